"""
# Schedules of a pipeline: the lists, the bubble, what they gather, send and keep

The oracle is a simulation that knows two rules: one thing after the other on each rank, and no pass
before the one that it needs.
"""

import itertools

import pytest

from zero3.pipeline.schedules import GATHERS, SCHEDULES, Action, actions, check
from zero3.pipeline.timeline import __doc__ as head
from zero3.pipeline.timeline import bubble, costs, drawn, main, needed, timeline

# Schedules with the numbers of ranks, micro-batches and stages per rank that they take.
EVERY = [(name, p, m, v) for name in SCHEDULES for p in (1, 2, 3, 4) for m in (1, 2, 3, 4, 6, 8)
         for v in (1, 2, 3)
         if (v == 1 or name in ("interleaved", "breadth-first"))
         and (name != "interleaved" or m % p == 0)]


def passes(listed):
    return [each for each in listed if each.kind in ("forward", "backward")]


def test_the_example_of_the_head_is_what_the_function_returns():
    """
    The drawing is in the head of `timeline.py`.
    Proves `actions`, `order_of`, `timeline`, `bubble`, `drawn`, `_name`.
    """
    lists = actions("1f1b", 2, 3)
    found = timeline(lists)
    assert drawn(found).splitlines() == ["rank 0  0   1       (0) 2   (1)     (2)",
                                         "rank 1      0   (0) 1   (1) 2   (2)"]
    assert all(f"    {line}\n" in head for line in drawn(found).splitlines())
    assert bubble(found) == pytest.approx(1 / 4)
    counted = {gathers: costs(actions("1f1b", 2, 3, gathers=gathers)[0]).gathers
               for gathers in GATHERS}
    assert counted == {"each": 6, "direction": 4, "stage": 1, "step": 1}
    assert passes(lists[0])[:3] == [Action("forward", 0, 0), Action("forward", 0, 1),
                                    Action("backward", 0, 0)]


@pytest.mark.parametrize("gathers", GATHERS)
def test_every_list_is_complete_and_can_be_played(gathers):
    """
    Each micro-batch goes once forward and once backward through each stage, on the rank that has
    the stage; what one rank sends, another one receives, in the same order; passes only compute
    with a stage that is whole. Breaks where two ranks would wait for each other.
    Proves I6, `actions`, `order_of`, `_with_gathers`, `_with_transfers`, `Action`, `timeline`,
    `needed`.
    """
    for name, p, m, v in EVERY:
        lists = actions(name, p, m, v, gathers)
        timeline(lists)
        for rank, listed in enumerate(lists):
            stages = range(rank, p * v, p)
            everything = {Action(kind, stage, i) for kind in ("forward", "backward")
                          for stage in stages for i in range(m)}
            assert len(passes(listed)) == len(everything) and {*passes(listed)} == everything
            assert sorted(a.stage for a in listed if a.kind == "reduce") == [*stages]
            whole, done = set(), set()
            for action in listed:
                if action.kind == "unshard":
                    assert action.stage not in whole
                    whole.add(action.stage)
                elif action.kind == "reshard":
                    whole.remove(action.stage)
                elif action.kind == "reduce":
                    assert {Action("backward", action.stage, i) for i in range(m)} <= done
                elif action.kind in ("forward", "backward"):
                    assert action.stage in whole
                    need = needed(action, p * v - 1)
                    assert need is None or need in done or need.stage not in stages
                    done.add(action)
            assert not whole
        for sends, receives, step in (("send", "receive", 1),
                                      ("send gradient", "receive gradient", -1)):
            for a, b in itertools.product(range(p), repeat=2):
                sent = [(x.stage + step, x.micro_batch) for x in lists[a] if x.kind == sends
                        and (x.stage + step) % p == b]
                received = [(x.stage, x.micro_batch) for x in lists[b] if x.kind == receives
                            and (x.stage - step) % p == a]
                assert sent == received, (name, p, m, v)


def test_the_bubble_is_the_formula():
    """
    With passes of one length, and with backward passes twice as long. Interleaved and breadth-first
    have one that is as many times smaller as there are stages on a rank.
    Proves `bubble`, `timeline`, `Pass`.
    """
    for name, p, m, v in EVERY:
        for backward in (1, 2):
            if backward == 2 and v > 1:
                continue
            found = bubble(timeline(actions(name, p, m, v), 1, backward))
            if m >= p or v == 1:
                assert found == pytest.approx((p - 1) / (v * m + p - 1)), (name, p, m, v)


def test_a_rank_keeps_the_activations_that_the_table_says():
    """
    Proves `costs`, `Costs`, `_most`.
    """
    for name, p, m, v in EVERY:
        for rank, listed in enumerate(actions(name, p, m, v)):
            kept = costs(listed).kept
            if name == "1f1b":
                assert kept == min(m, p - rank)
            elif name == "interleaved":
                assert kept <= min(m * v, p * v + p - 1)
            else:
                assert kept == m * v
    assert costs(actions("interleaved", 4, 8, 2)[0]).kept == 4 * 2 + 4 - 1


def test_a_stage_is_gathered_as_often_as_it_was_chosen():
    """
    Gathers per stage: two for each micro-batch; breadth-first two, and one if both directions
    follow each other; a stage at a time is whole, or two while the next one is on its way. Or once
    in a step, and then all of a rank's stages may be whole.
    Proves `_with_gathers`, `_runs`, `costs`.
    """
    for name, p, m, v in EVERY:
        for rank in range(p):
            counted = {gathers: costs(actions(name, p, m, v, gathers)[rank])
                       for gathers in GATHERS}
            assert counted["each"].gathers == 2 * m * v
            assert counted["stage"].gathers <= counted["direction"].gathers <= 2 * m * v
            assert counted["step"].gathers == v <= counted["stage"].gathers
            assert all(cost.reduces == v for cost in counted.values())
            assert all(cost.whole <= (v if gathers == "step" else min(2, v))
                       for gathers, cost in counted.items())
            if name in ("gpipe", "breadth-first"):
                assert counted["direction"].gathers == 2 * v
                assert counted["stage"].gathers == 2 * v - 1
            ends = (rank == 0) + (rank == p - 1)
            # At both ends of the pipeline there is nothing beyond.
            assert counted["stage"].sends == (2 * m * v - m * ends if p > 1 else 0)


def test_a_schedule_that_cannot_be_is_refused():
    """
    Proves `schedules.check`, `timeline`.
    """
    for wrong, part in (
            (("other", 2, 2), "a schedule of ['gpipe', '1f1b', 'interleaved', 'breadth-first']"),
            (("1f1b", 0, 2), "`ranks`, at least 1. Got: 0"),
            (("1f1b", 2, 1.5), "`micro_batches`, at least 1. Got: 1.5"),
            (("1f1b", 2, 2, 0), "`per_rank`, at least 1"),
            (("1f1b", 2, 2, 2), "one stage on each rank with 1f1b. Got: 2"),
            (("interleaved", 2, 3, 2), "micro-batches in groups of 2"),
            (("gpipe", 2, 2, 1, "never"), "`gathers` of ['each', 'direction', 'stage', 'step']")):
        with pytest.raises(ValueError, match="What to do: ") as error:
            actions(*wrong)
        assert part in str(error.value)
    check("interleaved", 2, 4, 2, "each")
    backwards = [listed[::-1] for listed in actions("gpipe", 2, 2)]
    with pytest.raises(RuntimeError, match="ranks that wait for each other before"):
        timeline(backwards)


def test_the_command_draws_a_schedule_and_counts(capsys):
    """
    The passes, the bubble, and what each rank gathers, sends and keeps. A line of four stages and
    eight micro-batches fits in 100 columns.
    Proves `timeline.main`, `drawn`, `costs`.
    """
    main(["--ranks", "2", "--per-rank", "2", "--micro-batches", "2", "--schedule", "interleaved"])
    told = capsys.readouterr().out
    assert "rank 0  a0   a1   b0   b1        (b0)" in told
    assert "Ranks wait for 20.0% of the step" in told
    for rank, listed in enumerate(actions("interleaved", 2, 2, 2)):
        cost = costs(listed)
        row = next(line for line in told.splitlines()[-6:] if line.startswith(f"rank {rank}"))
        assert [*map(int, row.split()[2:])] == [cost.gathers, cost.reduces, cost.sends, cost.whole,
                                                cost.kept]
    main(["--ranks", "4", "--micro-batches", "8", "--schedule", "1f1b"])
    told = capsys.readouterr().out
    assert "in flight" in told and max(map(len, told.splitlines())) <= 100
    for wrong in (["--per-rank", "0"], ["--ranks", "3", "--per-rank", "2"],
                  ["--ranks", "0"], ["--ranks", "100000"], ["--micro-batches", "100000"],
                  ["--ranks", "2", "--schedule", "interleaved", "--micro-batches", "3"]):
        with pytest.raises(SystemExit):
            main(wrong)

"""
# The lanes of a pipeline's step show what its ranks recorded
"""

import copy
import re
from itertools import product
from xml.etree import ElementTree

import pytest

from docs import lanes, svg
from docs.lanes import DEPTH, MICRO_BATCHES, RANKS, SCHEDULES, SHARDS, WIDTH, Lanes, spans
from zero3.pipeline.schedules import PASSES, actions
from zero3.pipeline.timeline import timeline
from zero3.train import launch


@pytest.fixture(scope="module")
def recorded(once):
    """
    A step with each schedule, recorded once
    """
    launch.preload("docs.lanes")
    return once("lanes", lanes.record)


def bars(run):
    """
    ## The bars of all stages, by stage
    """
    found = {}
    for done, passes in zip(run["done"], timeline(run["done"]), strict=True):
        for span in spans(done, passes):
            found.setdefault(span.stage, []).append(span)
    return found


def test_the_ranks_recorded_their_lists(recorded):
    """
    All actions of each list, in its order, and nothing else; the ranks that share a stage have
    recorded the same. Breaks if an action is recorded before the one that precedes it.
    """
    for name, per_rank in SCHEDULES.items():
        lists = actions(name, RANKS, MICRO_BATCHES, per_rank)
        for rank, answer in enumerate(recorded[name]["ranks"]):
            assert answer["done"] == lists[rank // SHARDS]
        assert recorded[name]["done"] == lists


def test_another_order_is_refused(recorded, monkeypatch):
    """
    Breaks if a figure is drawn from a rank that did something else.
    """
    answers = [copy.deepcopy({name: run["ranks"][rank] for name, run in recorded.items()})
               for rank in range(RANKS * SHARDS)]
    done = answers[3]["1f1b"]["done"]
    done[4], done[5] = done[5], done[4]
    monkeypatch.setattr(launch, "run", lambda *args, **kwargs: answers)
    with pytest.raises(RuntimeError, match=r"rank 3: did not follow the list of 1f1b\."):
        lanes.record()


def test_each_pass_is_inside_of_a_whole_stage(recorded):
    """
    A stage is gathered, then whole, and reduced after its last pass. Breaks if a bar begins before
    its gather is over, or if a stage is freed too early.
    """
    for run in recorded.values():
        for found in bars(run).values():
            whole = [span for span in found if span.what == "whole"]
            flights = [span for span in found if span.what == "flight"]
            passes = [span for span in found if span.text]
            (reduce,) = [span for span in found if span.what == "reduce"]
            assert [each.end for each in flights] == [each.begin for each in whole]
            for each in passes:
                assert any(w.begin <= each.begin and each.end <= w.end for w in whole)
            assert reduce.begin == max(each.end for each in passes)
            assert sorted(each.text for each in passes) == sorted(
                f"{kind[0].upper()}{i}" for kind, i in product(PASSES, range(MICRO_BATCHES)))


def test_the_gather_of_the_next_stage_overlaps_the_last_pass_of_this_one(recorded):
    """
    With several stages on a rank, and except for the first gather of all. Breaks if a gather begins
    only when its stage is needed.
    """
    run = recorded["breadth-first"]
    for rank in range(RANKS):
        mine = [span for stage, found in bars(run).items() if stage % RANKS == rank
                for span in found]
        _, *flights = sorted((s for s in mine if s.what == "flight"), key=lambda s: s.begin)
        assert len(flights) == 2 * SCHEDULES["breadth-first"] - 2
        for flight in flights:
            beside = [s for s in mine if s.text and s.begin < flight.end and flight.begin < s.end]
            assert beside and all(s.stage != flight.stage for s in beside)


@pytest.mark.parametrize("width", [svg.WIDE, svg.PHONE], ids=["wide", "phone"])
def test_a_drawing_has_all_passes_and_all_arrows(recorded, width):
    """
    Also for a screen reader. Breaks if a text or a bar leaves the drawing.
    """
    for name, run in recorded.items():
        step = Lanes(run, name, width)
        drawing = step.draw()
        parsed = ElementTree.fromstring(str(drawing))
        stages = RANKS * SCHEDULES[name]
        arrows = parsed.findall("{http://www.w3.org/2000/svg}polygon")
        assert len(arrows) == 2 * MICRO_BATCHES * (stages - 1)
        texts = [each.text for each in parsed.iter("{http://www.w3.org/2000/svg}text")]
        # In narrow slots, a pass is only the number of its micro-batch.
        passes = [f"{kind[0].upper()}1" if step.unit > 16 else "1" for kind in PASSES]
        assert all(texts.count(each) >= stages for each in passes)
        assert f"stage {stages - 1}" in texts
        for rect in parsed.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, wide, high = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
            assert 0 <= x and x + wide <= width and 0 <= y and y + high <= drawing.height
        assert drawing.about.count("F0") == drawing.about.count("B2") == stages


def test_a_figure_says_which_run_it_is_from(recorded):
    """
    And explains its letters. Breaks without the commit.
    """
    for name in SCHEDULES:
        html = lanes.figure(recorded, name)
        assert html.count("<svg") == 2 and re.search(r"4 ranks, .* commit \w+", html)


def test_the_table_has_the_bytes_of_the_formulas(recorded):
    """
    A rank sends its half of a layer for each gather and for each reduce, and a row of activations
    for each send. The table says what was measured. Breaks if a kind of bytes is counted twice.
    """
    heads, *rows = lanes.compared(recorded)
    half = 4 * (WIDTH * WIDTH + WIDTH) // SHARDS
    for row, (name, per_rank) in zip(rows, SCHEDULES.items(), strict=True):
        found = dict(zip(heads, row, strict=True))
        layers = DEPTH // RANKS
        gathered = layers if name == "1f1b" else 2 * layers - 1
        assert int(found["layers gathered"]) == gathered
        assert found["sent in gathers"] == f"{gathered * half:,}"
        assert found["sent in reduces"] == f"{layers * half:,}"
        # Rank 0 has no stage before its first one.
        sends = MICRO_BATCHES * (2 * per_rank - 1)
        assert found["sent to other stages"] == f"{sends * 4 * WIDTH:,}"
        share = (RANKS - 1) / (per_rank * MICRO_BATCHES + RANKS - 1)
        assert found["bubble"] == f"{share:.0%}"

r"""
# Timeline: what a schedule costs, before it runs

`timeline` plays a schedule with passes of a given length, and `costs` counts what it gathers, sends
and keeps.

A list of actions has no times. They follow from two rules: a rank does one thing after the other,
and a pass waits for the pass that it needs on another rank. The example of `schedules.py`, with one
slot for each pass:

| pass | on | waits for | slot |
|---|---|---|---|
| F0 | rank 0 | nothing | 0 |
| F0 | rank 1 | F0 on rank 0 | 1 |
| B0 | rank 1 | F0 on rank 1 | 2 |
| B0 | rank 0 | B0 on rank 1 | 3 |

What is sent takes no time here. The bubble is the share of slots in which a rank waits, and with
passes of one length it is

$$1 - \frac{2 m v}{\text{slots until the last rank is done}} = \frac{p - 1}{v m + p - 1}$$

**Run this**: `python -m zero3.pipeline --ranks 4 --micro-batches 8 --schedule 1f1b`.

**Not covered, and what that costs**: the time of transfers and gathers. A schedule with a smaller
bubble may be slower if it gathers more.
"""

from typing import NamedTuple

from zero3.guards.options import Parser, within
from zero3.pipeline.schedules import GATHERS, ORDERS, PASSES, Action, actions


class Pass(NamedTuple):
    """
    ## A pass with its time
    """

    start: float
    end: float
    action: Action


def timeline(lists: list[list[Action]], forward: float = 1, backward: float = 1
             ) -> list[list[Pass]]:
    """
    ## The passes of each rank, with times in slots

    * `lists` are from `actions`
    * `forward` and `backward` are the lengths of the passes

    Raises `RuntimeError` if every rank waits for another one: the lists are no schedule.
    """
    ranks = len(lists)
    passes = [[each for each in listed if each.kind in PASSES] for listed in lists]
    last = max(action.stage for listed in passes for action in listed)
    ends: dict[Action, float] = {}
    found: list[list[Pass]] = [[] for _ in range(ranks)]
    while any(len(done) < len(all_of) for done, all_of in zip(found, passes, strict=True)):
        before = len(ends)
        for done, all_of in zip(found, passes, strict=True):
            if len(done) == len(all_of):
                continue
            action = all_of[len(done)]
            needs = needed(action, last)
            if needs is None or needs in ends:
                free = done[-1].end if done else 0
                start = max(free, ends.get(needs, 0) if needs else 0)
                ends[action] = start + (forward if action.kind == "forward" else backward)
                done.append(Pass(start, ends[action], action))
        if len(ends) == before:
            waiting = [all_of[len(done)] for done, all_of in zip(found, passes, strict=True)
                       if len(done) < len(all_of)]
            raise RuntimeError(
                "the schedule does not end. Expected: lists in which some rank can go on. Got: "
                f"ranks that wait for each other before {waiting}. What to do: look for a pass "
                "that comes before the one that it needs.")
    return found


def needed(action: Action, last: int) -> Action | None:
    """
    ## The pass that has to end before this one begins, on whichever rank it is

    * `last` is the last stage
    """
    kind, stage, i = action
    if kind == "forward":
        return Action("forward", stage - 1, i) if stage else None
    return Action("backward", stage + 1, i) if stage < last else Action("forward", stage, i)


def bubble(found: list[list[Pass]]) -> float:
    """
    ## The share of the step in which ranks wait
    """
    length = max(each.end for passes in found for each in passes)
    busy = sum(each.end - each.start for passes in found for each in passes)
    return 1 - busy / (length * len(found))


class Costs(NamedTuple):
    """
    ## What a rank does in a step, beside computing
    """

    gathers: int  # of a stage
    reduces: int  # of a stage
    sends: int  # of activations, and of their gradients
    kept: int  # most micro-batches whose activations it has, of all its stages together
    whole: int  # most stages that are whole at a time


def costs(listed: list[Action]) -> Costs:
    """
    ## Count what a rank gathers, sends and keeps

    * `listed` are its actions
    """
    count = {kind: sum(action.kind == kind for action in listed)
             for kind in ("unshard", "reduce", "send", "send gradient")}
    return Costs(count["unshard"], count["reduce"], count["send"] + count["send gradient"],
                 _most(listed, "forward", "backward"), _most(listed, "unshard", "reshard"))


def _most(listed: list[Action], begins: str, ends: str) -> int:
    """
    #### The most things that have begun and not ended
    """
    now = most = 0
    for action in listed:
        now += (action.kind == begins) - (action.kind == ends)
        most = max(most, now)
    return most


def drawn(found: list[list[Pass]]) -> str:
    """
    ## A line for each rank: its passes over time

    A forward pass is the number of its micro-batch, a backward pass the number in brackets. With
    several stages on a rank, a letter tells which.
    """
    ranks = len(found)
    per_rank = 1 + max(each.action.stage for passes in found for each in passes) // ranks
    names = {each: _name(each.action, ranks, per_rank) for passes in found for each in passes}
    slot = min(each.end - each.start for passes in found for each in passes)
    width = max(-(-len(name) // round((each.end - each.start) / slot))
                for each, name in names.items()) + 1
    lines = []
    for rank, passes in enumerate(found):
        line = ""
        for each in passes:
            line = line.ljust(round(each.start / slot) * width)
            line += names[each].ljust(round((each.end - each.start) / slot) * width)
        lines.append(f"rank {rank}  {line.rstrip()}")
    return "\n".join(lines)


def _name(action: Action, ranks: int, per_rank: int) -> str:
    letter = chr(ord("a") + action.stage // ranks) if per_rank > 1 else ""
    name = f"{letter}{action.micro_batch}"
    return name if action.kind == "forward" else f"({name})"


def main(argv: list[str] | None = None) -> None:
    """
    ## The command line: draw a schedule, and say what it costs
    """
    parser = Parser(prog="zero3.pipeline", description="Draw a pipeline's step.")
    add = parser.add_argument
    add("--schedule", choices=[*ORDERS], default="1f1b", help="the order of the passes")
    add("--ranks", type=int, default=4, help="ranks of the pipeline")
    add("--micro-batches", type=int, default=8, help="micro-batches in a step")
    add("--per-rank", type=int, default=1, help="stages on each rank")
    add("--gathers", choices=GATHERS, default="stage", help="how long a stage stays whole")
    add("--backward", type=int, default=1, help="length of a backward pass, in forward passes")
    add("--stage-mib", type=float, default=0, help="parameters of a stage")
    add("--activation-mib", type=float, default=0, help="activations between two stages")
    add("--shards", type=int, default=1, help="ranks that share each stage")
    args = parser.parse_args(argv)
    try:
        for name in ("backward", "shards"):
            within(f"--{name}", getattr(args, name), 1, 1000)
        lists = actions(args.schedule, args.ranks, args.micro_batches, args.per_rank, args.gathers)
    except ValueError as error:
        parser.error(str(error))
    found = timeline(lists, 1, args.backward)
    print(f"{args.schedule}: passes over time; (0) is the backward pass of micro-batch 0\n")
    print(drawn(found))
    print(f"\nbubble {bubble(found):.1%} of the step\n")
    print(f"{'':8}{'gathers':>10}{'whole':>8}{'kept':>8}{'sends':>8}{'MiB sent':>12}")
    for rank, listed in enumerate(lists):
        cost = costs(listed)
        # A gather or a reduce sends a stage, but for this rank's own shard.
        share = args.stage_mib * (args.shards - 1) / args.shards
        mib = share * (cost.gathers + cost.reduces) + args.activation_mib * cost.sends
        print(f"rank {rank:<3}{cost.gathers:>10}{cost.whole:>8}{cost.kept:>8}{cost.sends:>8}"
              f"{mib:>12,.1f}")
    print("\ngathers of a stage; whole: most stages at a time; kept: most micro-batches whose "
          "activations\nare kept; sends of activations and their gradients")

r"""
# Timeline: what a schedule costs, before it runs

`timeline` plays a schedule with passes of a given length, `costs` counts what it gathers, sends and
keeps, and `drawn` draws it.

Times follow from two rules: a rank does one thing after the other, and a pass waits for the pass
that it needs on another rank.

The bubble is the share of slots in which a rank waits. With passes of one length it is

$$1 - \frac{2 m v}{\text{slots until the last rank is done}} = \frac{p - 1}{v m + p - 1}$$

**A stage of three layers on two ranks.** Each layer has three weights in fp32, so it is padded to
four, 16 bytes, and each rank keeps 8. The pipeline is that of `schedules.py`: two stages, 1F1B,
three micro-batches. Activations between the stages take 24 bytes for each micro-batch. A step of a
rank with stage 0 sends

| `gathers` | the stage is gathered | gathered | reduced | activations | peak above rest |
|---|---|---|---|---|---|
| `each` | 6 times | 144 | 24 | 72 | 80: two layers, all gradients |
| `direction` | 4 times | 96 | 24 | 72 | 96: all layers, all gradients |
| `stage` | once | 24 | 24 | 72 | 96 |

The full gradients, 48 bytes, stay until the last micro-batch. So a stage that stays whole takes 16
bytes more, one more layer, and its gathers send a sixth.

A layer $\ell$ has $P_\ell$ parameters with $b$ bytes each, and $b_g$ in a gradient. If $N$ ranks
share it and the rank gathers its stage $g$ times in a step, the rank sends

$$\underbrace{(N-1) \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil b \, g}_{\text{gathered}} +
\underbrace{(N-1) \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil b_g}_{\text{reduced}} +
\underbrace{m \, (A + G)}_{\text{between stages}}$$

In the first sum $\ell$ runs over the layers of one stage, in the second over all layers of the
rank. Tied weights, losses and norms come on top. $A$ are the bytes of a micro-batch's activations
for the next stage, and $G$ those of its gradients for the stage before. With $p$ ranks, rank $r$
has, for its $v$ stages of one size together,

| $g$ | `each` | `direction` | `stage` | `step` |
|---|---|---|---|---|
| `gpipe` | $2m$ | $2$ | $1$ | $1$ |
| `1f1b` | $2m$ | $2 \max(1, m - p + 1 + r)$ | $1$ | $1$ |
| `breadth-first` | $2mv$ | $2v$ | $2v - 1$ | $v$ |
| `interleaved` | $2mv$ | 1 + changes of stage or direction | 1 + changes of stage | $v$ |

A layer below the first one that trains has no backward pass. With `each` it is gathered $m$ times,
not $2m$.

**The peak.** With one stage on a rank, held whole, it is at the end of a backward pass, or in the
first reduce, which needs a receive buffer. With a bucket for each layer, and a last layer $L$ that
is reduced first,

$$\text{peak} - \text{rest} = N \max\Big(\sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil
(b + b_g), \; \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil b_g +
\left\lceil \frac{P_L}{N} \right\rceil \big(1 + \tfrac{1}{N}\big) b_g\Big)$$

for layers of equal size. Activations and their gradients in memory come on top; see `kept` below.

**Run this**: `python -m zero3.pipeline --ranks 2 --micro-batches 3`. The command draws a line for
each rank:

    rank 0  0   1       (0) 2   (1)     (2)
    rank 1      0   (0) 1   (1) 2   (2)

**Not covered, and what that costs**: the time of transfers and gathers. A schedule with a smaller
bubble may be slower if it gathers more.
"""

from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import accumulate
from typing import NamedTuple

from zero3.guards.command_line import Parser, within
from zero3.pipeline.schedules import GATHERS, PASSES, SCHEDULES, Action, actions


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

    * `forward` and `backward` are the lengths of the passes

    Raises `RuntimeError` if every rank waits for another one: the lists are no schedule.
    """
    passes = [[each for each in listed if each.kind in PASSES] for listed in lists]
    last = max(action.stage for mine in passes for action in mine)
    waits: dict[Action, list[Action]] = {}
    for mine in passes:
        for before, action in zip([None, *mine], mine, strict=False):
            waits[action] = [each for each in (before, needed(action, last)) if each]
    found: dict[Action, Pass] = {}
    try:
        for action in TopologicalSorter(waits).static_order():
            start = max((found[each].end for each in waits[action]), default=0)
            found[action] = Pass(
                start,
                start + (forward if action.kind == "forward" else backward),
                action)
    except (CycleError, KeyError) as error:
        raise RuntimeError(
            "the schedule does not end. Expected: lists in which some rank can go on. Got: "
            f"ranks that wait for each other before {error.args[-1]}. "
            "What to do: look for a pass that comes before the one that it needs.") from error
    return [[found[action] for action in mine] for mine in passes]


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
    whole: int  # most stages at a time between `unshard` and `reshard`


def costs(listed: list[Action]) -> Costs:
    """
    ## Count what a rank gathers, sends and keeps
    """
    count = Counter(action.kind for action in listed)
    return Costs(count["unshard"], count["reduce"], count["send"] + count["send gradient"],
                 _most(listed, "forward", "backward"), _most(listed, "unshard", "reshard"))


def _most(listed: list[Action], begins: str, ends: str) -> int:
    """
    #### The most things that have begun and not ended
    """
    return max(
        accumulate((action.kind == begins) - (action.kind == ends) for action in listed),
        default=0)


def drawn(found: list[list[Pass]]) -> str:
    """
    ## A line for each rank: its passes over time

    A forward pass is the number of its micro-batch, a backward pass the number in brackets. With
    several stages on a rank, a letter tells which.
    """
    ranks = len(found)
    per_rank = 1 + max(each.action.stage for passes in found for each in passes) // ranks
    names = {each: _name(each.action, ranks, per_rank) for passes in found for each in passes}
    width = 1 + max(len(name) for name in names.values())
    lines = []
    for rank, passes in enumerate(found):
        line = ""
        for each in passes:
            line = line.ljust(round(each.start * width)) + names[each]
        lines.append(f"rank {rank}  {line}")
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
    add("--schedule", choices=SCHEDULES, default="1f1b", help="the order of the passes")
    add("--ranks", type=int, default=4, help="ranks of the pipeline")
    add("--per-rank", type=int, default=1, help="stages on each rank")
    add("--micro-batches", type=int, default=8, help="micro-batches in a step")
    add("--gathers", choices=GATHERS, default="stage", help="how long a stage stays whole")
    args = parser.parse_args(argv)
    try:
        within("--ranks", args.ranks, 1, 64)
        within("--per-rank", args.per_rank, 1, 64)
        within("--micro-batches", args.micro_batches, 1, 256)
        lists = actions(args.schedule, args.ranks, args.micro_batches, args.per_rank, args.gathers)
    except ValueError as error:
        parser.error(str(error))
    found = timeline(lists)
    print("0 is the forward pass of micro-batch 0, and (0) its backward pass.",
          drawn(found),
          f"Ranks wait for {bubble(found):.1%} of the step, the bubble.",
          f"{'':8}{'gathers':>8}{'reduces':>8}{'sends':>8}{'whole':>8}{'in flight':>12}",
          sep="\n\n")
    for rank, listed in enumerate(lists):
        cost = costs(listed)
        print(f"rank {rank:<3}{cost.gathers:>8}{cost.reduces:>8}{cost.sends:>8}{cost.whole:>8}"
              f"{cost.kept:>12}")
    print("\ngathers, reduces: of a stage. sends: of activations or their gradients, between "
          "stages.\nwhole: the most stages at a time. in flight: the most micro-batches whose "
          "activations are kept.")

r"""
# Schedules: a pipeline's step as a list of actions

`actions` lists what each rank of a pipeline does in a training step.

A *pipeline* cuts a model into *stages*, and gives each rank some of them. The batch is cut into
*micro-batches*. While rank 1 computes the second stage of the first micro-batch, rank 0 computes
the first stage of the second one. Only activations and their gradients travel between stages. While
the pipeline fills and drains, ranks wait: this is the *bubble*.

**Two stages on two ranks, three micro-batches**, by the schedule 1F1B. `F0` is the forward pass of
micro-batch 0, `B0` its backward pass:

| slot | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
|---|---|---|---|---|---|---|---|---|
| rank 0 | F0 | F1 | | B0 | F2 | B1 | | B2 |
| rank 1 | | F0 | B0 | F1 | B1 | F2 | B2 | |

With $p$ ranks and $m$ micro-batches the step takes $2 (m + p - 1)$ slots, if forward and backward
take one each, and the bubble is

$$\frac{p - 1}{m + p - 1}$$

of it: here $\frac{1}{4}$. A rank keeps the activations of a micro-batch until its backward pass.

| schedule | order | activations that rank $r$ keeps, of a micro-batch in a stage |
|---|---|---|
| `gpipe` | all forwards, then all backwards | $m$ |
| `1f1b` | a backward as soon as there is one | $\min(m, p - r)$ |
| `interleaved` | 1F1B with $v$ stages on a rank | fewer than $p (v + 1)$ |
| `breadth-first` | GPipe with $v$ stages on a rank | $m v$ |

The papers are [GPipe](https://arxiv.org/abs/1811.06965), [PipeDream](https://arxiv.org/abs/1806.03377)
for 1F1B, [Megatron-LM](https://arxiv.org/abs/2104.04473), section 2.2, for interleaved stages, and
[Breadth-First Pipeline Parallelism](https://arxiv.org/abs/2211.05953).

With $v$ stages on each rank the bubble is $\frac{p - 1}{v m + p - 1}$, if $m \ge p$.

**Gathers.** If every forward and every backward gathers the layers of a stage, a step of $m$
micro-batches sends $2m$ times the weights, where plain ZeRO-3 sends them twice. But a stage may
stay whole from one micro-batch to the next, which takes memory:

| `gathers` | a stage is gathered | in the example, rank 0 |
|---|---|---|
| `each` | for each forward and each backward; two of its layers are whole at a time | 6 times |
| `direction` | for a run of passes in one direction | 4 times |
| `stage` | for a run of passes through this stage, in both directions | once |
| `step` | once, before its first pass; it is freed after its last one | once |

If a rank has several stages, `step` keeps all of them whole. With breadth-first, all micro-batches
go forward through a stage before the next one of this rank begins, so two gathers per stage are
enough, and one for the last.

**Run this**: `python -m zero3.pipeline --ranks 4 --micro-batches 8 --schedule 1f1b`.

**Not covered, and what that costs**: schedules that fill the bubble with the part of backward that
computes the weights' gradients.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from zero3.guards.checks import expect, whole

# What a rank computes.
PASSES = ("forward", "backward")
KINDS = (*PASSES, "receive", "send", "receive gradient", "send gradient", "unshard", "reshard",
         "reduce", "send tied", "receive tied", "send tied gradient", "receive tied gradient")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "breadth-first")
GATHERS = ("each", "direction", "stage", "step")


class Action(NamedTuple):
    """
    ## One entry of the list

    | kind | |
    |---|---|
    | forward, backward | compute a micro-batch through a stage |
    | receive, send | the activations from the stage before, and to the next one |
    | receive gradient, send gradient | those from the next stage, and to the one before |
    | unshard, reshard | gather the layers of a stage; free them |
    | reduce | reduce the gradients of a stage, once in a step |
    | send tied | this rank's shard of the tied weights, to the last stage that uses them |
    | receive tied | that shard |
    | send tied gradient | reduce the gradient of those weights, and send this rank's shard of it |
    | receive tied gradient | add it to the own gradient of the weights, which is reduced last |

    From `unshard` on, `micro_batch` is −1.
    """

    kind: str
    stage: int
    micro_batch: int = -1

    @property
    def is_gradient(self) -> bool:
        return "gradient" in self.kind

    @property
    def where(self) -> str:
        """
        ### Its stage and micro-batch, in words
        """
        number = "" if self.micro_batch < 0 else f", micro-batch {self.micro_batch}"
        return f"stage {self.stage}{number}"


def actions(schedule: str,
            ranks: int,
            micro_batches: int,
            per_rank: int = 1,
            gathers: str = "stage",
            tied: tuple[int, int] = (0, 0),
            backward: bool = True) -> list[list[Action]]:
    """
    ## The actions of all ranks in a step

    * `schedule` is "gpipe", "1f1b", "interleaved" or "breadth-first"
    * `ranks` is the length of the pipeline; stage $s$ is on rank `s % ranks`
    * `per_rank` is the number of stages on each rank
    * `gathers` is "each", "direction", "stage" or "step"
    * `tied` are the first and the last stage that use the same weights. If they are on two ranks,
      the shard of these weights is lent for the step
    * `backward` is false for an evaluation, which only goes forward

    Returns a list for each rank. Raises `ValueError` for numbers that do not fit together.
    """
    check(schedule, ranks, micro_batches, per_rank, gathers)
    found = []
    for rank in range(ranks):
        passes = [Action(kind, chunk * ranks + rank, i)
                  for kind, chunk, i in order_of(schedule, rank, ranks, micro_batches, per_rank)
                  if backward or kind == "forward"]
        found.append([*_with_gathers(passes, gathers, ranks, ranks * per_rank)])
    first, last = tied
    keeps, borrows = found[first % ranks], found[last % ranks]
    if keeps is not borrows:
        keeps.insert(0, Action("send tied", first))
        borrows.insert(0, Action("receive tied", last))
        if backward:
            borrows.append(Action("send tied gradient", last))
            keeps.append(Action("receive tied gradient", first))
    return found


def check(schedule: str,
          ranks: int,
          micro_batches: int,
          per_rank: int,
          gathers: str) -> None:
    """
    ## Refuse a schedule that does not exist

    Raises `ValueError`.
    """
    for good, expected, got, cure in (
        (schedule in SCHEDULES, f"a schedule of {[*SCHEDULES]}", repr(schedule),
         "pass one of them"),
        (whole(ranks, 1), "`ranks`, at least 1", repr(ranks), "pass a whole number"),
        (whole(micro_batches, 1), "`micro_batches`, at least 1", repr(micro_batches),
         "pass a whole number"),
        (whole(per_rank, 1), "`per_rank`, at least 1", repr(per_rank), "pass a whole number"),
        (gathers in GATHERS, f"`gathers` of {[*GATHERS]}", repr(gathers), "pass one of them"),
    ):
        expect(good, "the schedule", expected, got, cure)
    expect(per_rank == 1 or schedule in ("interleaved", "breadth-first"), "the schedule",
           f"one stage on each rank with {schedule}", f"{per_rank}",
           "pass schedule='interleaved' or 'breadth-first'")
    expect(schedule != "interleaved" or micro_batches % ranks == 0, "the schedule",
           f"micro-batches in groups of {ranks}, the number of ranks", f"{micro_batches}",
           "change their number, or pass schedule='breadth-first'")


# ------------------------------------------------------------------------------------------- order


def order_of(schedule: str,
             rank: int,
             ranks: int,
             micro_batches: int,
             per_rank: int) -> Iterator[tuple[str, int, int]]:
    """
    ## The order of a rank's passes

    Some forwards go *ahead*, then a forward and a backward go by turns, then the last backwards. So
    many micro-batches go *together* through a stage before the rank turns to its next one:

    | schedule | ahead | together |
    |---|---|---|
    | `1f1b`, `interleaved` | until the first gradient can be there | as many as there are ranks |
    | `gpipe`, `breadth-first` | all | all |

    Yields the kind of each pass, its chunk (which of this rank's stages, from 0), and its
    micro-batch.
    """
    count = micro_batches * per_rank
    ahead = count
    together = micro_batches
    if schedule in ("1f1b", "interleaved"):
        ahead = ranks - 1 - rank
        together = ranks
    if schedule == "interleaved" and per_rank > 1:
        # The first micro-batches go through the other stages of this rank first. From there it is
        # `ahead` slots to the last rank, and as many back. Forwards fill them.
        ahead = 2 * ahead + (per_rank - 1) * ranks

    def of(k: int, kind: str) -> tuple[str, int, int]:
        group, place = divmod(k, together * per_rank)
        chunk, i = divmod(place, together)
        return kind, chunk if kind == "forward" else per_rank - 1 - chunk, group * together + i

    for k in range(count + ahead):
        if k < count:
            yield of(k, "forward")
        if k >= ahead:
            yield of(k - ahead, "backward")


# ------------------------------------------------------------------------------- what comes between


def _with_gathers(passes: list[Action],
                  gathers: str,
                  ranks: int,
                  stages: int) -> Iterator[Action]:
    """
    #### Gather a stage before a run of passes, free it afterwards, and reduce it after the last one

    The gather comes one pass earlier, to overlap that pass, unless it is of the same stage. The
    reduce comes once the stage is freed: on the CPU the gradients of the other ranks arrive in the
    memory of the freed parameters.
    """
    runs = _runs(passes, gathers)
    last = {action.stage: k for k, action in enumerate(passes)}
    for k, action in enumerate(passes):
        for begin, _ in runs:
            stage = passes[begin].stage
            earlier = max(begin - 1, 0)
            if k == (begin if passes[earlier].stage == stage else earlier):
                yield Action("unshard", stage)
        yield from _with_transfers(action, ranks, stages)
        if any(end == k for _, end in runs):
            yield Action("reshard", action.stage)
        if action.kind == "backward" and k == last[action.stage]:
            yield Action("reduce", action.stage)


def _runs(passes: list[Action], gathers: str) -> list[tuple[int, int]]:
    """
    #### The first and the last pass of each run that a stage stays whole for
    """
    numbers = [*range(len(passes))]
    stages = [action.stage for action in passes]
    # Neighbours of the same key are a run.
    keys = {"each": numbers, "direction": [action[:2] for action in passes], "stage": stages,
            "step": stages}
    if gathers == "step":
        numbers.sort(key=stages.__getitem__)
    runs = [[*run] for _, run in groupby(numbers, keys[gathers].__getitem__)]
    return [(run[0], run[-1]) for run in runs]


def _with_transfers(action: Action,
                    ranks: int,
                    stages: int) -> Iterator[Action]:
    """
    #### A pass; before it receive what it needs, and after it send what it has made
    """
    is_forward = action.kind == "forward"
    first, last = (0, stages - 1) if is_forward else (stages - 1, 0)
    what = "" if is_forward else " gradient"
    if ranks > 1 and action.stage != first:
        yield action._replace(kind=f"receive{what}")
    yield action
    if ranks > 1 and action.stage != last:
        yield action._replace(kind=f"send{what}")

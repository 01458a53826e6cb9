r"""
# Claims about exercise 8: the list of a pipeline

Most claims need no ranks. `lists` asks the answer for the lists of all ranks, and `timeline`, the
simulation of the package, plays them. The simulation does not know which schedule a list is, so it
is the judge of any answer: of the order, of the slots, and of the activations that are kept.

For example, an answer that returns all forwards before the first backward is in order and as fast
as it can be. But with four micro-batches rank 1 of two keeps four of them, and not

$$\min(m,\, p - r) = \min(4,\, 2 - 1) = 1$$

The last claim trains a real pipeline with the answer's lists, on as many ranks as there are.

**Run this**: `make exercise N=8`

**Not covered, and what that costs**: only small pipelines are tried, of up to five ranks and six
micro-batches. An error that others would show goes unnoticed.
"""

import copy
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from docs.exercises.oracle import Case, Claim, expect
from zero3 import Zero3Optimizer
from zero3.pipeline import Pipeline, schedules
from zero3.pipeline.schedules import PASSES, Action
from zero3.pipeline.timeline import Pass, costs, timeline

MICRO_BATCHES = 4  # of the pipeline that is trained
SIZES = [(ranks, count) for ranks in range(1, 6) for count in range(1, 7)]


def lists(case: Case, ranks: int, count: int) -> list[list[Action]]:
    """
    ## The answer's lists of all ranks; the stage of a rank is its own number
    """
    found = []
    for rank in range(ranks):
        got: Any = case.answer.one_forward_one_backward(rank, ranks, count)
        expect(isinstance(got, list), "a list", type(got).__name__)
        for each in got:
            expect(isinstance(each, tuple) and len(each) == 2 and each[0] in PASSES,
                   'pairs like ("forward", 0)', repr(each))
        found.append([Action(kind, rank, i) for kind, i in got])
    return found


def shown(listed: list[Action]) -> str:
    return " ".join(f"{action.kind[0].upper()}{action.micro_batch}" for action in listed)


def cases(case: Case) -> Iterator[tuple[str, int, int, list[list[Action]]]]:
    """
    ## Pipelines of all sizes, the smallest first: in words, its ranks, its micro-batches, its lists
    """
    for ranks, count in SIZES:
        words = f"{ranks} rank{'s' * (ranks > 1)}, {count} micro-batch{'es' * (count > 1)}"
        yield words, ranks, count, lists(case, ranks, count)


def each_pass_once(case: Case) -> None:
    for words, _, count, listed in cases(case):
        for rank, mine in enumerate(listed):
            wanted = Counter((kind, i) for kind in PASSES for i in range(count))
            got = Counter((action.kind, action.micro_batch) for action in mine)
            expect(got == wanted, f"{words}, rank {rank}: each pass of each micro-batch once",
                   shown(mine))


def played(listed: list[list[Action]], words: str) -> list[list[Pass]]:
    """
    ## The passes with their slots
    """
    try:
        return timeline(listed)
    except RuntimeError:
        ranks = "; ".join(f"rank {rank}: {shown(mine)}" for rank, mine in enumerate(listed))
        expect(False, f"{words}: some rank can always go on", f"all ranks wait, with {ranks}")
        raise


def nobody_waits_forever(case: Case) -> None:
    for words, _, _, listed in cases(case):
        played(listed, words)


def as_fast_as_can_be(case: Case) -> None:
    for words, ranks, count, listed in cases(case):
        slots = max(each.end for passes in played(listed, words) for each in passes)
        expect(slots == 2 * (count + ranks - 1), f"{words}: {2 * (count + ranks - 1)} slots",
               f"{slots} slots, with {shown(listed[0])} on rank 0")


def keeps_few(case: Case) -> None:
    for words, ranks, count, listed in cases(case):
        for rank, mine in enumerate(listed):
            kept = costs(mine).kept
            most = min(count, ranks - rank)
            expect(kept <= most, f"{words}, rank {rank}: at most {most} in memory",
                   f"{kept}, with {shown(mine)}")


def trains(case: Case) -> None:
    """
    ## Two steps of a real pipeline, and of plain PyTorch on the same batches
    """
    def order(schedule: str, rank: int, ranks: int, count: int, per_rank: int
              ) -> Iterator[tuple[str, int, int]]:
        return ((kind, 0, i)
                for kind, i in case.answer.one_forward_one_backward(rank, ranks, count))

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double() for _ in range(3)]
    plain = nn.Sequential(*copy.deepcopy(layers))
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1),
                            mesh_dim_names=("pipeline", "shard"))
    with mock.patch.object(schedules, "order_of", order):
        model = Pipeline(layers, mesh, loss_fn=nn.functional.mse_loss,
                         micro_batches=MICRO_BATCHES)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.5)
    oracle = torch.optim.SGD(plain.parameters(), lr=0.5)
    for step in range(2):
        x = torch.randn(2 * MICRO_BATCHES, 4, dtype=torch.double,
                        generator=torch.Generator().manual_seed(step))
        model.train_batch(x, x, optimizer)
        nn.functional.mse_loss(plain(x), x).backward()
        for each in (optimizer, oracle):
            each.step()
            each.zero_grad()
    with model.full_params() as params:
        worst = max((params[name] - p).abs().max().item() for name, p in plain.named_parameters())
    expect(worst <= 1e-12, "the weights of plain PyTorch", "weights that differ from them by up to "
           f"{worst:.2g}")


CLAIMS: dict[int, tuple[Claim, ...]] = {
    8: (
        Claim("I1", "each micro-batch goes forward and backward once", each_pass_once),
        Claim("I6", "no rank waits forever", nobody_waits_forever),
        Claim("idle", "the step takes as few slots as possible", as_fast_as_can_be),
        Claim("kept", "a rank keeps as few activations as possible", keeps_few),
        Claim("I1", "a pipeline with these lists trains to plain PyTorch's weights", trains),
    ),
}

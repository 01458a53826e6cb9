r"""
# The oracle: the expected results

A small model, both sharded and in plain PyTorch, and the exception with which a claim reports the
expected result and the actual one.

While answers are checked, new memory is filled with NaN, so that uninitialised elements are
noticed even if the memory would have been zero by chance. If possible, elements are small whole
numbers, so that a reader sees immediately which one is wrong.

**Run this**: `make exercise N=1`

**Not covered, and what that costs**: the checks cover what a training step needs. They do not find
a superfluous line that changes nothing.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zero3 import Zero3Layer, Zero3Sequential
from zero3.estimate.formulas import describe
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.estimate.predict import Prediction, predict

ROWS = 2  # of each rank's batch
TOLERANCE = 1e-12  # in float64, for another order of the sum over ranks


class Wrong(Exception):
    """
    ## A claim does not hold
    """

    def __init__(self, expected: Any, got: Any):
        super().__init__(str(expected), str(got))


class Claim(NamedTuple):
    """
    ## A statement about an answer, and the invariant that breaks if it does not hold
    """

    # I1 to I10; or "time", "idle", "kept" or "sent" if the numbers are right, but at too high a
    # cost.
    invariant: str
    text: str
    check: Callable[["Case"], None]


def expect(good: bool, expected: Any, got: Any) -> None:
    if not good:
        raise Wrong(expected, got)


def show(tensor: torch.Tensor) -> str:
    numbers = [f"{x:.4g}" for x in tensor.detach().reshape(-1).tolist()]
    return f"[{', '.join(numbers[:12])}{', ...' if numbers[12:] else ''}]"


def equal(expected: torch.Tensor, got: Any, what: str = "") -> None:
    """
    ## Expect that two tensors are equal, except for rounding
    """
    expect(isinstance(got, torch.Tensor), f"{what}a tensor, {tuple(expected.shape)}", got)
    expect(got.shape == expected.shape, f"{what}{len(expected)} elements, {show(expected)}",
           f"{what}{tuple(got.shape)}, {show(got)}")
    expect(got.dtype == expected.dtype, f"{what}{expected.dtype}", f"{what}{got.dtype}")
    expect(torch.allclose(got.double(), expected.double()), what + show(expected), what + show(got))


# ------------------------------------------------------------------------------------ a small model


def modules() -> list[nn.Module]:
    """
    ## Layers of 25, 35 and 35 elements, which need padding on 2 and 3 ranks, and an empty layer
    """
    return [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 7, bias=False), nn.Linear(7, 5, bias=False)]


def chain() -> Zero3Sequential:
    """
    ## A sharded chain of these layers, with random values that are equal on all ranks
    """
    torch.manual_seed(0)
    return Zero3Sequential([Zero3Layer(m.double()) for m in modules()])


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    ## The global batch, `(ROWS * world_size, 4)`, and this rank's rows of it, `(ROWS, 4)`
    """
    x = torch.randn(ROWS * dist.get_world_size(), 4, dtype=torch.double,
                    generator=torch.Generator().manual_seed(step))
    return x, x[dist.get_rank() * ROWS :][:ROWS]


def mine(flat: torch.Tensor) -> torch.Tensor:
    """
    ## This rank's shard of a vector: `(shard_numel,)`, with zeros for padding
    """
    world_size = dist.get_world_size()
    padded = torch.cat([flat, flat.new_zeros(-len(flat) % world_size)])
    return padded.chunk(world_size)[dist.get_rank()]


@dataclass
class Step:
    """
    ## The result of two training steps, and the expected result
    """

    difference: float  # of any weight from plain PyTorch's, the largest
    rest_bytes: int
    tape: Ledger  # of the second step
    predicted: Prediction


class Case:
    """
    ## An answer, and results that several claims use
    """

    def __init__(self, answer: Any):
        self.answer = answer

    @cached_property
    def step(self) -> Step:
        """
        ### Two steps of SGD, sharded and plain
        """
        model = chain()
        torch.manual_seed(0)
        plain = nn.Sequential(*modules()).double()
        sgd = [torch.optim.SGD(p, 0.5) for p in (model.get_trainable_chunk(), plain.parameters())]
        for step in range(2):
            every, own = batch(step)
            with Ledger(model, sgd[0]) as tape:
                for one, trained, x in zip(sgd, (model, plain), (own, every), strict=True):
                    trained(x).square().mean().backward()
                    one.step()
                    one.zero_grad()
        rest_bytes = held_bytes(model, sgd[0])
        with model.full_params() as params:
            worst = max((params[name] - p).abs().max().item()
                        for name, p in plain.named_parameters())
        predicted = predict(describe(model), dist.get_world_size(), moments=0, step_bytes=0)
        return Step(worst, rest_bytes, tape, predicted)


def trains_like_plain(case: Case) -> None:
    worst = case.step.difference
    # The comparison is false for NaN, too.
    expect(worst <= TOLERANCE, "the weights of plain PyTorch on the global batch", "weights that "
           f"differ from them by up to {worst:.2g}")


def rests_as_predicted(case: Case) -> None:
    step = case.step
    expect(step.rest_bytes == step.predicted.rest_bytes,
           f"{step.predicted.rest_bytes:,} bytes between steps, the shards", f"{step.rest_bytes:,}")


def peaks_as_predicted(case: Case) -> None:
    step = case.step
    expect(step.tape.peak_live_bytes == step.predicted.peak_bytes,
           f"{step.predicted.peak_bytes:,} bytes at the peak of a step",
           f"{step.tape.peak_live_bytes:,}")


def sends_as_predicted(case: Case) -> None:
    tape = case.step.tape
    wanted = case.step.predicted
    gathers = sum(e.event == "fetch" for e in tape.events)
    reduces = sum(e.event == "reduce" for e in tape.events)
    # Each layer with parameters is gathered in forward and backward, except the last in backward.
    sharded = sum(any(True for _ in m.parameters()) for m in modules())
    expect((gathers, reduces, tape.sent_bytes) == (2 * sharded - 1, sharded, wanted.sent_bytes),
           f"{2 * sharded - 1} gathers, {sharded} reduces, {wanted.sent_bytes:,} bytes sent",
           f"{gathers} gathers, {reduces} reduces, {tape.sent_bytes:,} bytes")


STEP = {
    "numbers": Claim("I1", "two training steps give plain PyTorch's weights", trains_like_plain),
    "rest": Claim("I2", "between steps a rank holds only its shards", rests_as_predicted),
    "peak": Claim("I3", "the peak of a step is as predicted, to the byte", peaks_as_predicted),
    "traffic": Claim("I4", "a step sends as many bytes as predicted", sends_as_predicted),
}

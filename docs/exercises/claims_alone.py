r"""
# Claims about exercises 1, 2 and 7: functions that are called alone

Each exercise has a list of claims, each with the invariant that breaks where the claim is wrong.

A claim is a function that uses the reader's answer and compares what happens. All ranks call it.
Where the answer is a method, it stands in the place of the real one by then.

**Run this**: `make exercise N=1`

**Not covered, and what that costs**: other lengths than those that are tried here, a few for each
number of ranks.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from docs.exercises.layout import Layout, Place
from docs.exercises.oracle import STEP, Case, Claim, Wrong, equal, expect, show
from zero3 import Zero3Layer

MESSAGES = ("isend", "send", "irecv", "recv")
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_reduce",
    "all_to_all", "all_to_all_single", "broadcast", "gather", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter")


# ------------------------------------------------------------------------------ 1: merge and pad


def merged(numel: int = 9, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """
    ## Parameters with elements 1, 2, ..., merged by the answer

    A matrix, a shape without elements, a scalar, a transposed matrix and a vector.
    """
    ramp = torch.arange(1, numel + 1).to(dtype)
    turned = ramp[5:9].view(2, 2).t().contiguous().t()
    params = (ramp[:4].view(2, 2), ramp[:0], ramp[4].view(()), turned, ramp[9:])
    return Zero3Layer(nn.Identity())._merge_and_pad_params([nn.Parameter(p) for p in params])


def parameters_come_first(case: Case) -> None:
    got: Any = merged()
    expect(isinstance(got, torch.Tensor) and got.ndim == 1, "a vector", got)
    equal(torch.arange(1.0, 10.0), got[:9], "it begins with ")


def no_more_padding_than_needed(case: Case) -> None:
    world_size = dist.get_world_size()
    for numel in (9, 10, 11, 12):
        length = math.ceil(numel / world_size) * world_size
        got = len(merged(numel))
        expect(got == length, f"{length} elements, for {numel} of parameters and a world_size "
               f"of {world_size}", f"{got}")


def padding_is_zero(case: Case) -> None:
    # On two ranks 9 elements need some, on three ranks 10.
    for numel in (9, 10):
        got = merged(numel)[numel:]
        equal(torch.zeros(len(got)), got, "padding ")


def has_the_data_type(case: Case) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        got = merged(dtype=dtype)
        expect(got.dtype == dtype, f"{dtype}, as the parameters", got.dtype)


# ----------------------------------------------------------------------- 2: each collective alone


class Handle:
    """
    ## A message that says whether somebody has waited for it
    """

    def __init__(self, work: Any):
        self.work, self.waited = work, False

    def wait(self, *args: Any) -> Any:
        self.waited = True
        return self.work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@contextmanager
def messages(sent: list[int], handles: list[Handle]) -> Iterator[None]:
    """
    ## Count the elements that go out, keep the handles, and refuse collectives
    """
    def watched(name: str) -> Callable:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            # torch's `send` and `recv` go through the other two.
            if name == "isend":
                sent.append((args[0] if args else kwargs["tensor"]).numel())
            result = real(*args, **kwargs)
            if name in ("isend", "irecv"):
                handles.append(result := Handle(result))
            return result
        return call

    def refused(name: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise Wrong("messages from rank to rank, `dist.isend` and `dist.irecv`",
                        f"the collective `dist.{name}`")
        return call

    with ExitStack() as stack:
        for name in (*MESSAGES, *COLLECTIVES):
            fake = watched(name) if name in MESSAGES else refused(name)
            for module in (dist, dist.distributed_c10d) if hasattr(dist, name) else ():
                stack.enter_context(mock.patch.object(module, name, fake))
        yield


def collective(case: Case, which: str) -> tuple[Any, list[int], list[Handle]]:
    """
    ## Run the answer: what it gives, the messages it sends, their handles
    """
    rank, world_size, sent, handles = dist.get_rank(), dist.get_world_size(), [], []
    with messages(sent, handles):
        if which == "all-gather":
            out = torch.empty(3 * world_size)
            shard = torch.arange(3.0) + 10 * (rank + 1)
            case.answer.all_gather(out, shard, rank, world_size)
        else:
            # Rank r has 6 (r + 1) in the row of rank 0, twice that in the row of rank 1, ...
            rows = torch.arange(1.0, world_size + 1)[:, None] * 6 * (rank + 1)
            out = case.answer.reduce_scatter(rows.repeat(1, 3).view(-1), rank, world_size)
    return out, sent, handles


def gathers_in_rank_order(case: Case) -> None:
    got, _, handles = collective(case, "all-gather")
    wait_for(handles)
    equal(torch.cat([torch.arange(3.0) + 10 * (r + 1) for r in range(dist.get_world_size())]), got)


def reduces_to_the_mean(case: Case) -> None:
    got, _, handles = collective(case, "reduce-scatter")
    wait_for(handles)
    world_size = dist.get_world_size()
    mean = 6 * sum(range(1, world_size + 1)) / world_size
    equal(torch.full((3,), mean * (dist.get_rank() + 1)), got)


def wait_for(handles: list[Handle]) -> None:
    left = sum(not handle.waited for handle in handles)
    for handle in handles:
        if not handle.waited:
            handle.wait()
    expect(not left, "`wait()` on each of the handles", f"{left} of {len(handles)} without")


def sends_one_shard_to_each(case: Case, which: str) -> None:
    _, sent, _ = collective(case, which)
    wanted = [3] * (dist.get_world_size() - 1)
    expect(sent == wanted or sum(sent) == sum(wanted),
           f"{sum(wanted)} elements sent, a row of 3 to each other rank", f"{sum(sent)} elements, "
           f"in messages of {sent}")


def halves_stay_in_range(case: Case) -> None:
    world_size = dist.get_world_size()
    with messages([], []):
        got = case.answer.reduce_scatter(torch.full((world_size,), 60000.0, dtype=torch.half),
                                         dist.get_rank(), world_size)
    expect(bool(got.isfinite().all()), "a mean near 60000, in fp16, which ends at 65504", show(got))
    expect(got.dtype == torch.half, torch.half, got.dtype)


# -------------------------------------------------------------------------- 7: reshard a checkpoint


def layout(world_size: int, layers: list[dict[str, int]]) -> Layout:
    """
    ## The layout of layers with parameters of so many elements
    """
    places = {}
    for i, layer in enumerate(layers):
        offset = 0
        for name, numel in layer.items():
            places[name] = Place(i, offset, numel)
            offset += numel
    return Layout(world_size, places)


def shards_of(layout: Layout, padding: float, dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """
    ## The shards of each layer, where the parameters' elements are 1, 2, ... in order of names
    """
    ramps, begin = {}, 1
    for name in sorted(layout.places):
        ramps[name] = torch.arange(begin, begin + layout.places[name].numel).to(dtype)
        begin += layout.places[name].numel
    layers = []
    for i, shard_numel in enumerate(layout.shard_numels()):
        flat = torch.full((shard_numel * layout.world_size,), padding, dtype=dtype)
        for name, p in layout.places.items():
            if p.layer == i:
                flat[p.offset : p.offset + p.numel] = ramps[name]
        layers.append(list(flat.chunk(layout.world_size)))
    return layers


def resharded(case: Case, before: list[dict[str, int]], after: list[dict[str, int]],
              sizes: list[tuple[int, int]], dtype: torch.dtype = torch.float32,
              reads_too: bool = False) -> None:
    """
    ## Reshard from each number of ranks to each other one, and compare
    """
    for saved_ranks, wanted_ranks in sizes:
        saved, wanted = layout(saved_ranks, before), layout(wanted_ranks, after)
        stored, expected = shards_of(saved, math.nan, dtype), shards_of(wanted, 0.0, dtype)
        for rank in range(wanted_ranks):
            reads: list[int] = []

            def read(layer: int, old_rank: int, begin: int, end: int, stored: Any = stored,
                     reads: list[int] = reads) -> torch.Tensor:
                shard = stored[layer][old_rank]
                expect(0 <= begin <= end <= len(shard), f"elements of a shard of {len(shard)}",
                       f"a read from {begin} to {end}")
                reads.append(end - begin)
                return shard[begin:end].clone()

            got = case.answer.reshard(read, saved, wanted, rank, dtype)
            what = f"from {saved_ranks} to {wanted_ranks} ranks, rank {rank}: "
            expect(len(got) == len(after), f"{what}{len(after)} shards", f"{len(got)}")
            for i, shard in enumerate(got):
                equal(expected[i][rank], shard, f"{what}layer {i} ")
            needed = sum(int((layer[rank] != 0).sum()) for layer in expected)
            expect(not reads_too or sum(reads) == needed, f"{what}{needed} elements read",
                   f"{sum(reads)}")


EVEN = [{"a": 6, "b": 6}, {"c": 24}]
ODD = [{"a": 3, "b": 4}, {"c": 5}, {"d": 1}]
MERGED = [{"a": 3, "b": 4, "c": 5, "d": 1}]
PAIRS = [*product((1, 2, 3), (1, 2, 4, 5))]
WITHOUT_PADDING = [*product((1, 2, 3), (1, 2, 3, 4))]

CLAIMS: dict[int, tuple[Claim, ...]] = {
    1: (
        Claim("I1", "the parameters come first, in their order, row by row", parameters_come_first),
        Claim("I1", "the data type is the parameters'", has_the_data_type),
        Claim("I2", "there is no more padding than needed, and no less",
              no_more_padding_than_needed),
        Claim("I5", "the padding is zero", padding_is_zero),
        *STEP.values(),
    ),
    2: (
        Claim("I1", "all-gather: each shard is in the row of its rank", gathers_in_rank_order),
        Claim("I4", "all-gather: each other rank is sent one shard",
              lambda case: sends_one_shard_to_each(case, "all-gather")),
        Claim("I1", "reduce-scatter: the mean over ranks of this rank's share",
              reduces_to_the_mean),
        Claim("I4", "reduce-scatter: each other rank is sent its share",
              lambda case: sends_one_shard_to_each(case, "reduce-scatter")),
        Claim("I1", "reduce-scatter: fp16 does not overflow where the mean does not",
              halves_stay_in_range),
    ),
    7: (
        Claim("I1", "without padding, each element comes to its place",
              lambda case: resharded(case, EVEN, EVEN, WITHOUT_PADDING)),
        Claim("I1", "the data type is the one that was asked for",
              lambda case: resharded(case, EVEN, EVEN, [(2, 3)], torch.bfloat16)),
        Claim("I5", "new padding is zero, and old padding is not taken over",
              lambda case: resharded(case, ODD, ODD, PAIRS)),
        Claim("I5", "layers that are merged have no padding in the middle",
              lambda case: resharded(case, ODD, MERGED, PAIRS)),
        Claim("I1", "layers that are split, and parameters in another order",
              lambda case: resharded(case, MERGED, [*reversed(ODD)], PAIRS)),
        Claim("I2", "a rank reads the elements that its shards hold, and no others",
              lambda case: resharded(case, ODD, MERGED, PAIRS, reads_too=True)),
    ),
}

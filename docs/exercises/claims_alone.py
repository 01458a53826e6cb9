r"""
# Claims about exercises 1, 2, 7, 9 and 10: functions on their own

Each exercise has a list of claims. A claim is a statement about the answer, together with the
invariant that breaks if the statement does not hold.

Each claim is checked by a function that runs the reader's answer and compares the results. All
ranks call it. If the answer is a method, it has already replaced the real one.

**Run this**: `make exercise N=1`

**Not covered, and what that costs**: only a few lengths are tried for each number of ranks. An
error that other lengths would show goes unnoticed.
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
        expect(got == length, f"{length} elements, for parameters of {numel} elements and a "
               f"world_size of {world_size}", f"{got}")


def padding_is_zero(case: Case) -> None:
    # 9 elements need padding on two ranks, 10 elements on three ranks.
    for numel in (9, 10):
        got = merged(numel)[numel:]
        equal(torch.zeros(len(got)), got, "padding ")


def has_the_data_type(case: Case) -> None:
    for dtype in (torch.float64, torch.bfloat16):
        got = merged(dtype=dtype)
        expect(got.dtype == dtype, f"{dtype}, like the parameters", got.dtype)


# ----------------------------------------------------------------------- 2: each collective alone


class Handle:
    """
    ## A message that records whether it has been waited for
    """

    def __init__(self, work: Any):
        self.work = work
        self.waited = False

    def wait(self, *args: Any) -> Any:
        self.waited = True
        return self.work.wait(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.work, name)


@contextmanager
def messages(sent: list[int], handles: list[Handle]) -> Iterator[None]:
    """
    ## Record the elements of each message and its handle, and refuse collectives
    """
    def watched(name: str) -> Callable:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            # `send` and `recv` of torch call the other two.
            if name == "isend":
                sent.append((args[0] if args else kwargs["tensor"]).numel())
            result = real(*args, **kwargs)
            if name in ("isend", "irecv"):
                handles.append(result := Handle(result))
            return result
        return call

    def refused(name: str) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            raise Wrong("point-to-point messages with `dist.isend` and `dist.irecv`",
                        f"the collective `dist.{name}`")
        return call

    with ExitStack() as stack:
        for name in (*MESSAGES, *COLLECTIVES):
            fake = watched(name) if name in MESSAGES else refused(name)
            if hasattr(dist, name):
                stack.enter_context(mock.patch.object(dist, name, fake))
                stack.enter_context(mock.patch.object(dist.distributed_c10d, name, fake))
        yield


def collective(case: Case, which: str) -> tuple[Any, list[int], list[Handle]]:
    """
    ## Run the answer; return its result, the elements of each message, and the handles
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    sent: list[int] = []
    handles: list[Handle] = []
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
    expect(not left, "`wait()` on each handle", f"none on {left} of {len(handles)}")


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
    expect(bool(got.isfinite().all()), "a mean near 60000, which fits into fp16", show(got))
    expect(got.dtype == torch.half, torch.half, got.dtype)


# -------------------------------------------------------------------------- 7: reshard a checkpoint


def layout(world_size: int, layers: list[dict[str, int]]) -> Layout:
    """
    ## The layout of layers, given the elements of each of their parameters
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
    ## The shards of each layer, when the parameters' elements are 1, 2, ... in order of names
    """
    ramps = {}
    begin = 1
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
    ## Reshard from and to these numbers of ranks, and compare
    """
    for saved_ranks, wanted_ranks in sizes:
        saved = layout(saved_ranks, before)
        wanted = layout(wanted_ranks, after)
        stored = shards_of(saved, math.nan, dtype)
        expected = shards_of(wanted, 0.0, dtype)
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
            name = f"from {saved_ranks} to {wanted_ranks} ranks, rank {rank}: "
            expect(len(got) == len(after), f"{name}{len(after)} shards", f"{len(got)}")
            for i, shard in enumerate(got):
                equal(expected[i][rank], shard, f"{name}layer {i} ")
            needed = sum(int((layer[rank] != 0).sum()) for layer in expected)
            expect(not reads_too or sum(reads) == needed, f"{name}{needed} elements read",
                   f"{sum(reads)}")


# ------------------------------------------------------------- 9: the k-th smallest of all ranks


def kth(case: Case, every: list[list[int]], k: int, bits: int) -> list[int]:
    """
    ## Compare the answer with a sort; return how many counts it has sent, call by call

    * `every` has the numbers of each rank
    """
    sent: list[int] = []

    def together(what: str) -> list[str]:
        # Ask first: if the ranks did different things, they would wait for each other forever.
        all_do = [""] * dist.get_world_size()
        dist.all_gather_object(all_do, what)
        alike = {does.partition(" ")[0] for does in all_do}
        expect(len(alike) == 1, "all ranks call `total` as often",
               "; ".join(f"rank {rank} {does}" for rank, does in enumerate(all_do)))
        return all_do

    def total(counts: torch.Tensor) -> torch.Tensor:
        expect(isinstance(counts, torch.Tensor) and counts.dtype == torch.int64,
               "counts in int64", getattr(counts, "dtype", counts))
        lengths = {*together(f"totals {len(counts)} counts")}
        expect(len(lengths) == 1, "as many counts on all ranks", f"{sorted(lengths)}")
        sent.append(len(counts))
        whole = counts.clone()
        dist.all_reduce(whole)
        return whole

    mine = torch.tensor(every[dist.get_rank()], dtype=torch.int64)
    returned = together(f"returns {case.answer.kth_smallest(mine, k, bits, total)!r}")
    wanted = sorted(number for numbers in every for number in numbers)[k - 1]
    given = "; ".join(f"rank {rank} has {numbers[:6]}{' ...' * (len(numbers) > 6)}"
                      for rank, numbers in enumerate(every))
    expect({*returned} == {f"returns {wanted}"}, f"{wanted}, number {k} in order: {given}",
           "; ".join(f"rank {rank} {got}" for rank, got in enumerate(returned)))
    return sent


def split(numbers: list[int]) -> list[list[int]]:
    """
    ## These numbers, dealt out to the ranks
    """
    return [numbers[rank :: dist.get_world_size()] for rank in range(dist.get_world_size())]


def finds_each(case: Case) -> None:
    # 42, 13, 17 and 45, with digits of 8 bits.
    numbers = [4 * 256 + 2, 1 * 256 + 3, 1 * 256 + 7, 4 * 256 + 5]
    for k in (2, 3, 1, 4):
        kth(case, split(numbers), k, 16)


def sends_few_counts(case: Case) -> None:
    numbers = torch.randperm(2**16, generator=torch.Generator().manual_seed(0))[:3000].tolist()
    sent = kth(case, split(numbers), 1500, 16)
    expect(sum(sent) <= 2 * 256, "2 times 256 counts sent, for numbers of 16 bits", f"{sent}")


def finds_equal_ones(case: Case) -> None:
    for k in range(1, 8):
        kth(case, split([70_000, 3, 70_000, 3, 3, 260, 70_000]), k, 24)


def finds_long_ones(case: Case) -> None:
    numbers = [2**40 - 1, 2**39, 2**39 + 2**20, 1, 2**32, 0]
    for k in range(1, 7):
        kth(case, split(numbers), k, 40)


def a_rank_without_numbers(case: Case) -> None:
    nothing: list[list[int]] = [[] for _ in range(dist.get_world_size())]
    for k in (1, 3):
        kth(case, [*nothing[1:], [500, 7, 300]], k, 16)


# ----------------------------------------------------------------- 10: who steps which matrix


def owners_of(case: Case, costs: list[int], ranks: int) -> list[int]:
    """
    ## The answer's owners, if all ranks return the same ones; and each rank's work
    """
    mine = case.answer.assign([*costs], ranks)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    words = f"costs {costs[:8]}{' ...' * (len(costs) > 8)} on {ranks} ranks: "
    expect(all(each == every[0] for each in every), f"{words}the same list on all ranks",
           "; ".join(f"rank {rank} has {each}" for rank, each in enumerate(every)))
    good = isinstance(mine, list) and len(mine) == len(costs) and all(
        isinstance(owner, int) and 0 <= owner < ranks for owner in mine)
    expect(good, f"{words}{len(costs)} owners from 0 to {ranks - 1}", f"{mine}")
    return [sum(each for each, owner in zip(costs, mine, strict=True) if owner == rank)
            for rank in range(ranks)]


FEW = [[4, 3, 3, 2], [2, 3, 3, 4], [1, 1, 1, 1, 4], [5, 0, 7, 2, 2, 1], [9], [], [6, 6, 5, 4, 3]]


def each_has_an_owner(case: Case) -> None:
    for costs, ranks in product(FEW, (1, 2, 3, 8)):
        owners_of(case, costs, ranks)


def nobody_is_slow(case: Case) -> None:
    for costs, ranks in product(FEW, (1, 2, 3)):
        work = owners_of(case, costs, ranks)
        best = min((max(sum(cost for cost, owner in zip(costs, owners, strict=True)
                            if owner == rank) for rank in range(ranks))
                    for owners in product(range(ranks), repeat=len(costs))), default=0)
        most = best * (4 * ranks - 1) // (3 * ranks)
        expect(max(work) <= most, f"costs {costs} on {ranks} ranks: at most {most} for the slowest "
               f"owner, because {best} is possible", f"{work}")


def large_models_are_balanced(case: Case) -> None:
    # The matrices of GPT-2, with 12 layers, and Newton-Schulz on each.
    costs = [3 * 768**3, 768**3, 4 * 768**3, 4 * 768**3] * 12
    for ranks in (2, 8, 16):
        work = owners_of(case, costs, ranks)
        most = 115 * sum(costs) // (100 * ranks)
        expect(max(work) <= most, f"GPT-2 on {ranks} ranks: 1.15 times the mean for the slowest "
               "owner, or less", f"{max(work) * ranks / sum(costs):.2f} times")


EVEN = [{"a": 6, "b": 6}, {"c": 24}]
ODD = [{"a": 3, "b": 4}, {"c": 5}, {"d": 1}]
MERGED = [{"a": 3, "b": 4, "c": 5, "d": 1}]
PAIRS = [*product((1, 2, 3), (1, 2, 4, 5))]
WITHOUT_PADDING = [*product((1, 2, 3), (1, 2, 3, 4))]

CLAIMS: dict[int, tuple[Claim, ...]] = {
    1: (
        Claim("I1", "the parameters come first, in their order, row by row", parameters_come_first),
        Claim("I1", "the result has the data type of the parameters", has_the_data_type),
        Claim("I2", "there is as much padding as needed, and no more",
              no_more_padding_than_needed),
        Claim("I5", "the padding is zero", padding_is_zero),
        *STEP.values(),
    ),
    2: (
        Claim("I1", "all-gather: the shard of each rank is in its row", gathers_in_rank_order),
        Claim("I4", "all-gather: a rank sends each other rank one shard",
              lambda case: sends_one_shard_to_each(case, "all-gather")),
        Claim("I1", "reduce-scatter: the result is the mean over ranks of this rank's row",
              reduces_to_the_mean),
        Claim("I4", "reduce-scatter: a rank sends each other rank one row",
              lambda case: sends_one_shard_to_each(case, "reduce-scatter")),
        Claim("I1", "reduce-scatter: fp16 overflows only if the mean does",
              halves_stay_in_range),
    ),
    7: (
        Claim("I1", "without padding, each element is in its place",
              lambda case: resharded(case, EVEN, EVEN, WITHOUT_PADDING)),
        Claim("I1", "the shards have the requested data type",
              lambda case: resharded(case, EVEN, EVEN, [(2, 3)], torch.bfloat16)),
        Claim("I5", "the new padding is zero, and the old padding is not copied",
              lambda case: resharded(case, ODD, ODD, PAIRS)),
        Claim("I5", "merged layers have no padding in the middle",
              lambda case: resharded(case, ODD, MERGED, PAIRS)),
        Claim("I1", "layers can be split, and parameters reordered",
              lambda case: resharded(case, MERGED, [*reversed(ODD)], PAIRS)),
        Claim("I2", "a rank reads only the elements of its own shards",
              lambda case: resharded(case, ODD, MERGED, PAIRS, reads_too=True)),
    ),
    9: (
        Claim("I1", "each of four numbers is found", finds_each),
        Claim("sent", "a rank sends 256 counts for each digit", sends_few_counts),
        Claim("I1", "equal numbers count as often as they are there", finds_equal_ones),
        Claim("I1", "numbers of five digits are found", finds_long_ones),
        Claim("I6", "a rank without numbers takes part", a_rank_without_numbers),
    ),
    10: (
        Claim("I6", "all ranks find the same owner for each matrix", each_has_an_owner),
        Claim("time", "the slowest owner of a few matrices is as fast as promised", nobody_is_slow),
        Claim("time", "the matrices of GPT-2 are balanced", large_models_are_balanced),
    ),
}

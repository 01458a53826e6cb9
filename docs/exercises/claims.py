r"""
# What the answers are checked for

Each exercise has a list of claims, each with the invariant that breaks where the claim is wrong.

A claim is a function that uses the reader's answer and compares what happens with plain PyTorch, or
with predicted bytes. All ranks call it. By then the answer stands in the place of the real method.
New memory holds NaN here, and not by luck a zero: what nobody wrote shows. Elements are small whole
numbers where that is possible, so that a reader sees at once where one went wrong.

**Run this**: `make exercise N=1`

**Not covered, and what that costs**: an answer is asked for what a training step needs. An unused
line in it does no harm, and is not found.
"""

import copy
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from docs.exercises.ex7_reshard_a_checkpoint import Layout, Place
from zero3 import Zero3Layer, Zero3Sequential
from zero3.estimate import describe
from zero3.ledger import Ledger, held_bytes
from zero3.offload import FreedParameter
from zero3.predict import Prediction, predict

ROWS = 2  # of each rank's batch
TOLERANCE = 1e-12  # in float64: what another order of the sum over ranks may change
MESSAGES = ("isend", "send", "irecv", "recv")
COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_reduce",
    "all_to_all", "all_to_all_single", "broadcast", "gather", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter")


class Wrong(Exception):
    """
    ## A claim does not hold
    """

    def __init__(self, expected: Any, got: Any):
        super().__init__(str(expected), str(got))


class Claim(NamedTuple):
    """
    ## A claim, and what breaks where it is wrong
    """

    invariant: str  # I1 to I10; or "time", where the numbers are right and the ranks wait
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
    ## Two tensors are the same, but for rounding
    """
    expect(isinstance(got, torch.Tensor), f"{what}a tensor, {tuple(expected.shape)}", got)
    expect(got.shape == expected.shape, f"{what}{len(expected)} elements, {show(expected)}",
           f"{what}{tuple(got.shape)}, {show(got)}")
    expect(got.dtype == expected.dtype, f"{what}{expected.dtype}", f"{what}{got.dtype}")
    expect(torch.allclose(got.double(), expected.double()), what + show(expected), what + show(got))


# ------------------------------------------------------------------------------------ a small model


def modules() -> list[nn.Module]:
    """
    ## Layers of 25, 35 and 35 elements, which need padding on 2 and on 3 ranks, and one of none
    """
    return [nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 7, bias=False), nn.Linear(7, 5, bias=False)]


def chain() -> Zero3Sequential:
    """
    ## They, sharded, in a chain; their elements are drawn, and equal on all ranks
    """
    torch.manual_seed(0)
    return Zero3Sequential([Zero3Layer(m.double()) for m in modules()])


def first_of(model: Zero3Sequential) -> tuple[Any, Any]:
    """
    ## The first layer, and its flat parameter
    """
    return model.module_list[0], model.module_list[0].groups[0]


def whole(model: Any) -> list[int]:
    """
    ## Which layers are unsharded
    """
    return [layer.layer_idx for layer in model.module_list if layer.is_fetched]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    ## A batch for all ranks, and this rank's rows of it
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


@contextmanager
def spied(owner: Any, name: str) -> Iterator[list[tuple[Any, Any]]]:
    """
    ## Arguments and results of each call of a method
    """
    calls: list[tuple[Any, Any]] = []
    real = getattr(owner, name)

    def spy(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        calls.append((args, result))
        return result

    with mock.patch.object(owner, name, spy):
        yield calls


@dataclass
class Step:
    """
    ## What two steps of training gave, and what they should give
    """

    difference: float  # the largest, of any weight, from plain PyTorch's
    rest_bytes: int
    tape: Ledger  # of the second step
    predicted: Prediction


class Case:
    """
    ## An answer, and what several claims want to know of it
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
    # A NaN is not smaller than anything.
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
    tape, wanted = case.step.tape, case.step.predicted
    gathers = sum(e.event == "fetch" for e in tape.events)
    reduces = sum(e.event == "reduce" for e in tape.events)
    # Forward and backward of each layer with parameters, less the last one's second.
    sharded = sum(any(True for _ in m.parameters()) for m in modules())
    expect((gathers, reduces, tape.sent_bytes) == (2 * sharded - 1, sharded, wanted.sent_bytes),
           f"{2 * sharded - 1} gathers, {sharded} reduces, {wanted.sent_bytes:,} bytes sent",
           f"{gathers} gathers, {reduces} reduces, {tape.sent_bytes:,} bytes")


STEP = {
    "numbers": Claim("I1", "two steps of training give plain PyTorch's weights", trains_like_plain),
    "rest": Claim("I2", "between steps a rank has its shards and nothing else", rests_as_predicted),
    "peak": Claim("I3", "a step's peak is the predicted one, to the byte", peaks_as_predicted),
    "traffic": Claim("I4", "a step sends what is predicted, to the byte", sends_as_predicted),
}

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
        expect(got == length, f"{length} elements, for {numel} of parameters on {world_size} ranks",
               f"{got}")


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


# ------------------------------------------------------------------------------------ 3: unshard


def writes_into_the_same_storage(case: Case) -> None:
    layer, g = first_of(chain())
    ours, full = g.full.untyped_storage(), g.full
    with spied(layer.wire, "all_gather") as calls:
        layer.fetch_params()
    # Whatever the answer did with them, the messages end before their memory does.
    for _, transfer in calls:
        transfer.wait()
    expect(len(calls) > 0, "a gather", "none")
    to = [flat.untyped_storage()._cdata for (_, pairs), _ in calls for flat, _ in pairs]
    expect(g.full is full, "`group.full` stays the tensor that it is", "another tensor")
    expect(to == [ours._cdata], "a gather into `group.full`", "a gather into other memory")


def returns_before_the_messages_do(case: Case) -> None:
    layer, _ = first_of(chain())
    with spied(layer.wire, "all_gather") as calls:
        layer.fetch_params()
    started, kept = [transfer for _, transfer in calls], layer._gather
    for transfer in started:
        transfer.wait()
    expect(kept is not None and any(kept is t for t in started), "in `self._gather` the transfer, "
           "which nobody has waited for", kept)


def a_second_call_sends_nothing(case: Case) -> None:
    model = chain()
    layer, _ = first_of(model)
    with Ledger(model) as tape, spied(layer.wire, "all_gather") as calls:
        layer.fetch_params()
        layer.fetch_params()
    for _, transfer in calls:
        transfer.wait()
    expect(len(calls) == 1, "1 gather for two calls of `fetch_params()`",
           f"{len(calls)} gathers, {tape.sent_bytes} bytes sent")


def nothing_to_fetch(case: Case) -> None:
    model = chain()
    layer, _ = first_of(model)
    empty = model.module_list[1]
    with layer.full_params(), spied(layer, "_all_gather") as inside:
        layer.fetch_params()
    with spied(empty, "_all_gather") as without:
        empty.fetch_params()
    for _, transfer in (*inside, *without):
        transfer.wait()
    expect(not inside, "no gather inside of `full_params()`", f"{len(inside)}")
    expect(not without, "no gather of a layer without parameters", f"{len(without)}")


def gathers_the_weights_of_the_last_step(case: Case) -> None:
    layer, g = first_of(chain())
    for sign in (1, -1):
        g.shard.detach().fill_(sign * (dist.get_rank() + 1))
        layer.fetch_params()
        layer._wait_params()
        expect(g.full.untyped_storage().nbytes() > 0, "whole parameters", "no memory")
        ranks = torch.arange(1, dist.get_world_size() + 1).double() * sign
        equal(ranks, layer.wire.rows(g.full)[:, 0], "first elements of the shards ")
        layer._cleanup_params()


def gradients_on_their_way_come_first(case: Case) -> None:
    layer, g = first_of(chain())
    g.grad = layer._empty(len(g.full), g.full.dtype).fill_(dist.get_rank() + 1)
    g.ready.update(slot.names for slot in g.slots)
    layer._backup_grads()
    layer.fetch_params()
    layer._wait_params()
    layer.wire.reducer.end()
    total = sum(range(1, dist.get_world_size() + 1))
    equal(torch.full_like(g.shard, total), g.shard.grad, "gradient ")
    expect(g.full.untyped_storage().nbytes() > 0, "whole parameters", "no memory")


# ------------------------------------------------------------------------------------ 4: reshard


class Messages:
    """
    ## In place of a transfer: the memory it finds when it is waited for
    """

    def __init__(self, full: torch.Tensor):
        self.full, self.found_bytes = full, None

    def wait(self) -> None:
        self.found_bytes = self.full.untyped_storage().nbytes()


def unsharded() -> tuple[Any, Any, Any]:
    model = chain()
    layer, g = first_of(model)
    layer.fetch_params()
    layer._wait_params()
    return model, layer, g


def the_storage_has_no_bytes(case: Case) -> None:
    _, layer, g = unsharded()
    storage = g.full.untyped_storage()  # as autograd has it, in what it saved
    layer._cleanup_params()
    expect(storage.nbytes() == 0, "a storage of 0 bytes, whoever has views of it",
           f"{storage.nbytes()} bytes")
    expect(g.full.untyped_storage()._cdata == storage._cdata, "`group.full`, as it was", "another")


def freed_parameters_have_names(case: Case) -> None:
    _, layer, _ = unsharded()
    layer._cleanup_params()
    for slot in layer._slots():
        expect(isinstance(slot.param, FreedParameter), f"`{slot.names[0]}` of a `FreedParameter`, "
               "which raises an error when it is touched", f"a {type(slot.param).__name__}")


def waits_for_messages(case: Case) -> None:
    _, layer, g = unsharded()
    layer._gather = on_their_way = Messages(g.full)
    layer._cleanup_params()
    layer._gather = None
    found_bytes = on_their_way.found_bytes
    expect(bool(found_bytes), "messages are waited for, and then their memory is freed",
           "nobody waits for them" if found_bytes is None else "it is freed first")


def the_next_fetch_gathers(case: Case) -> None:
    _, layer, _ = unsharded()
    layer._kept = lambda: None
    layer._cleanup_params()
    expect(not layer.is_fetched, "`is_fetched` is False", "True")
    expect(layer._kept is None, "`_kept` is None", "it is as it was")
    layer._kept = lambda: None
    layer._cleanup_params()
    expect(layer._kept is None, "`_kept` is None after a call for a layer that is not fetched, too",
           "it is as it was")


def the_tape_says_so_once(case: Case) -> None:
    model, layer, g = unsharded()
    with Ledger(model) as tape:
        layer._cleanup_params()
        layer._cleanup_params()
    got = [f"{e.event} of {e.bytes} bytes, with {e.live_bytes} left" for e in tape.events]
    expected = f"free of {g.full.nbytes} bytes, with {held_bytes(model)} left"
    expect(got == [expected], f"for two calls one event on the tape: {expected}",
           f"{len(got)} events: {'; '.join(got)}")


# -------------------------------------------------------------------------- 5: reduce the gradients


class Mixed(nn.Module):
    """
    ## A layer with an unused parameter, one of another data type, and a frozen one
    """

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(4, 4), nn.Linear(3, 3), nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.double()
        self.scale = nn.Parameter(torch.full((5,), 0.5, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.frozen) * self.scale[:4]


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """
    ## A plain module's gradients as flat vectors, one for each data type; zero where there is none
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    return [torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
                       for p in trained if p.dtype == dtype])
            for dtype in dict.fromkeys(p.dtype for p in trained)]


def backward(times: int = 1, mixed: bool = False) -> tuple[Any, list[torch.Tensor]]:
    """
    ## A model after some backwards, and plain PyTorch's gradients of this rank's shards
    """
    torch.manual_seed(0)
    layers = [Mixed(), nn.Linear(4, 3).double()] if mixed else [m.double() for m in modules()]
    plain = nn.Sequential(*layers)
    model = Zero3Sequential([Zero3Layer(copy.deepcopy(m)) for m in plain])
    for step in range(times):
        every, own = batch(step)
        plain(every).square().mean().backward()
        model(own).square().mean().backward()
    return model, [mine(flat) for m in plain for flat in gradients(m)]


def nothing_full_after_backward(case: Case) -> None:
    model, _ = backward()
    for layer in model.module_list:
        for g in layer.groups:
            expect(not layer.is_fetched, f"{layer.label} resharded", "its parameters are whole")
            expect(g.grad is None and not g.ready, f"{layer.label} without a full gradient",
                   "it has one")
            expect(g.full.untyped_storage().nbytes() == 0, f"{layer.label} without an inbox",
                   f"one of {g.full.untyped_storage().nbytes()} bytes")


def same_gradients(times: int, mixed: bool) -> None:
    model, grads = backward(times, mixed)
    for shard, grad in zip(model.get_trainable_chunk(), grads, strict=True):
        expect(shard.grad is not None, "a gradient for each shard", "none")
        equal(grad, shard.grad, "gradient ")


def a_lone_layer_ends_its_reduce(case: Case) -> None:
    below, above, seen = nn.Linear(4, 4), Zero3Layer(nn.Linear(4, 4)), []
    # Called before the layer's own hook: its gradient is here, and that of the one above gone.
    below.bias.register_post_accumulate_grad_hook(lambda _: seen.append(above.groups[0].grad))
    above(Zero3Layer(below)(torch.ones(1, 4))).sum().backward()
    expect(len(seen) == 1 and seen[0] is None, "no full gradient of a lone layer when the layer "
           "below gets its own", "it waits for the end of the pass")


# ----------------------------------------------------------------------------------- 6: prefetch


def walks_in_order(case: Case) -> None:
    model = chain()
    x = torch.ones(1, 4, dtype=torch.double)
    with torch.no_grad():
        walked = [layer.layer_idx for layer in model.walk()]
        expect(walked == [0, 1, 2, 3], "layers 0, 1, 2, 3", walked)
        torch.manual_seed(0)
        equal(nn.Sequential(*modules()).double()(x), model(x), "output ")


def one_layer_ahead(case: Case) -> None:
    model, seen = chain(), []
    for layer in model.module_list:
        layer.module.register_forward_pre_hook(lambda *_: seen.append(whole(model)))
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.double))
    for i, wanted in enumerate(([0, 2], [2], [2, 3], [3])):
        expect(seen[i] == wanted, f"while layer {i} computes, unsharded are layers {wanted} (layer "
               "1 has no parameters)", f"layers {seen[i]}")


def nothing_left(case: Case, how: str) -> None:
    model = chain()
    x = torch.ones(1, 4, dtype=torch.double)
    with suppress(KeyError), torch.no_grad():
        for layer in model.walk():
            x = layer(x)
            if how == "break":
                break
            raise KeyError
    gc.collect()
    left = whole(model)
    for layer in model.module_list:
        layer._cleanup_params()
    expect(not left, f"no layer unsharded after a walk that ended by {how}", f"layers {left}")


def recomputation_sends_nothing_more(case: Case) -> None:
    sent = []
    for through in (lambda model, x: model(x), partial(checkpoint, use_reentrant=False)):
        model = chain()
        with Ledger(model) as tape:
            through(model, batch(0)[1]).sum().backward()
        sent.append(tape.sent_bytes)
    expect(sent[0] == sent[1], f"{sent[0]:,} bytes, as without activation checkpointing",
           f"{sent[1]:,}")


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
    3: (
        Claim("I3", "the gather writes into the storage that the parameters view",
              writes_into_the_same_storage),
        Claim("time", "it returns while the messages are on their way",
              returns_before_the_messages_do),
        Claim("I4", "a second call sends nothing", a_second_call_sends_nothing),
        Claim("I4", "where there is nothing to fetch, nothing is sent", nothing_to_fetch),
        Claim("I1", "the parameters are those after the last step",
              gathers_the_weights_of_the_last_step),
        Claim("I1", "gradients on their way into the same memory are not written over",
              gradients_on_their_way_come_first),
        *STEP.values(),
    ),
    4: (
        Claim("I2", "the memory is free, whoever has views of it", the_storage_has_no_bytes),
        Claim("I2", "a freed parameter is a `FreedParameter`", freed_parameters_have_names),
        Claim("I1", "messages have come before their memory is freed", waits_for_messages),
        Claim("I1", "the layer is ready to be fetched again", the_next_fetch_gathers),
        Claim("I3", "the tape says what is freed, once", the_tape_says_so_once),
        *STEP.values(),
    ),
    5: (
        Claim("I2", "after backward nothing is whole", nothing_full_after_backward),
        Claim("I1", "a shard's gradient is the mean over ranks",
              lambda case: same_gradients(1, mixed=False)),
        Claim("I1", "so it is with unused and frozen parameters, and with two data types",
              lambda case: same_gradients(1, mixed=True)),
        Claim("I7", "a second backward adds", lambda case: same_gradients(2, mixed=False)),
        Claim("I3", "a layer in no chain ends its reduce itself", a_lone_layer_ends_its_reduce),
        *STEP.values(),
    ),
    6: (
        Claim("I1", "the layers come in order", walks_in_order),
        Claim("I3", "while a layer computes, it and the next are whole", one_layer_ahead),
        Claim("I2", "a walk that ends by `break` leaves nothing",
              lambda case: nothing_left(case, "break")),
        Claim("I2", "a walk that ends by an exception leaves nothing",
              lambda case: nothing_left(case, "an exception")),
        *STEP.values(),
        Claim("I4", "recomputation in backward sends nothing more",
              recomputation_sends_nothing_more),
    ),
    7: (
        Claim("I1", "without padding, each element comes to its place",
              lambda case: resharded(case, EVEN, EVEN, PAIRS[:-1])),
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

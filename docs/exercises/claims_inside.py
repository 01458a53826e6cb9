r"""
# Claims about exercises 3 to 6: methods of a layer

A claim calls the answer through a sharded model, and then examines the layers.

Some wrong answers free memory that is still in use, and using it would crash the process. So a
claim checks the number of bytes of a storage before it computes anything with it, and the claims
about whole training steps come last.

**Run this**: `make exercise N=3`

**Not covered, and what that costs**: shards in files, and whole models. An answer that fails only
with these passes the checks.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from docs.exercises.oracle import (
    STEP,
    Case,
    Claim,
    batch,
    chain,
    equal,
    expect,
    mine,
    modules,
)
from zero3 import Zero3Layer, Zero3Sequential
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.guards.freed import FreedParameter


def first_of(model: Zero3Sequential) -> tuple[Any, Any]:
    """
    ## The first layer, and its flat parameter
    """
    return model.module_list[0], model.module_list[0].flats[0]


def whole(model: Any) -> list[int]:
    """
    ## The numbers of the unsharded layers
    """
    return [layer.layer_idx for layer in model.module_list if layer.is_fetched]


# ------------------------------------------------------------------------------------ 3: unshard


@contextmanager
def gathers(layer: Any) -> Iterator[list[list[Any]]]:
    """
    ## Record the buffers of a layer's all-gathers, and the transfers

    Each all-gather is complete before the next one starts, regardless of the answer. A new one
    allocates its buffer's memory again, while messages may still arrive in the old memory.
    """
    real = layer.comm.all_gather
    found: list[list[Any]] = []

    def wait_for_all() -> None:
        for _, transfer in found:
            transfer.wait()

    def gather(owner: Any, pairs: Any, **options: Any) -> Any:
        wait_for_all()
        found.append([[full for full, _ in pairs], real(owner, pairs, **options)])
        return found[-1][1]

    with mock.patch.object(layer.comm, "all_gather", gather):
        try:
            yield found
        finally:
            wait_for_all()


def writes_into_the_same_storage(case: Case) -> None:
    layer, flat = first_of(chain())
    full = flat.full
    ours = full.untyped_storage()
    with gathers(layer) as found:
        layer.fetch_params()
    expect(len(found) > 0, "an all-gather", "none")
    to = [vector.untyped_storage()._cdata for fulls, _ in found for vector in fulls]
    expect(flat.full is full, "`flat.full` stays the same tensor", "another tensor")
    expect(to == [ours._cdata], "an all-gather into `flat.full`",
           "an all-gather into other memory")


def returns_before_the_messages_do(case: Case) -> None:
    layer, _ = first_of(chain())
    with gathers(layer) as found:
        layer.fetch_params()
        kept = layer._gather
    expect(any(kept is transfer for _, transfer in found), "the transfer in `self._gather`, "
           "without a wait for it", kept)


def a_second_call_sends_nothing(case: Case) -> None:
    model = chain()
    layer, _ = first_of(model)
    with Ledger(model) as tape, gathers(layer) as found:
        layer.fetch_params()
        layer.fetch_params()
    expect(len(found) == 1, "1 all-gather for two calls of `fetch_params()`",
           f"{len(found)} all-gathers, {tape.sent_bytes} bytes sent")


def nothing_to_fetch(case: Case) -> None:
    model = chain()
    layer, _ = first_of(model)
    empty = model.module_list[1]
    with layer.full_params(), gathers(layer) as inside:
        layer.fetch_params()
    with gathers(empty) as without:
        empty.fetch_params()
    expect(not inside, "no all-gather inside of `full_params()`", f"{len(inside)}")
    expect(not without, "no all-gather of a layer without parameters", f"{len(without)}")


def gathers_the_weights_of_the_last_step(case: Case) -> None:
    layer, flat = first_of(chain())
    for sign in (1, -1):
        flat.shard.detach().fill_(sign * (dist.get_rank() + 1))
        layer.fetch_params()
        layer._wait_params()
        expect(flat.full.untyped_storage().nbytes() > 0, "whole parameters", "no memory")
        ranks = torch.arange(1, dist.get_world_size() + 1).double() * sign
        equal(ranks, layer.comm.rows(flat.full)[:, 0], "first elements of the shards ")
        layer._cleanup_params()


def gradients_on_their_way_come_first(case: Case) -> None:
    layer, flat = first_of(chain())
    flat.grad = layer._empty(len(flat.full), flat.full.dtype).fill_(dist.get_rank() + 1)
    flat.ready.update(slot.names for slot in flat.slots)
    layer._backup_grads()
    # Wait for the messages, so that an answer that reuses their memory does not crash the process.
    for work in layer.reducer.transfer.works:
        work.wait()
    layer.reducer.transfer.works = []
    layer.fetch_params()
    layer._wait_params()
    layer.reducer.end()
    total = sum(range(1, dist.get_world_size() + 1))
    equal(torch.full_like(flat.shard, total), flat.shard.grad, "gradient ")
    expect(flat.full.untyped_storage().nbytes() > 0, "whole parameters", "no memory")


def first_layers(model: Any, last: int, x: torch.Tensor) -> torch.Tensor:
    """
    ## Walk to the layer `last`, with activation checkpointing, and end the walk there
    """
    def walk(x: torch.Tensor) -> torch.Tensor:
        for layer in model.walk():
            x = layer(x)
            if layer.layer_idx == last:
                break
        return x

    return checkpoint(walk, x, use_reentrant=False)


def what_backward_did_not_use_is_freed(case: Case) -> None:
    model = chain()
    first_layers(model, 0, batch(0)[1]).sum().backward()
    left = whole(model)
    for layer in model.module_list:
        layer._cleanup_params()
    expect(not left, "no layer unsharded after a backward pass that fetched one and did not need "
           "it", f"layers {left}")


# ------------------------------------------------------------------------------------ 4: reshard


class Messages:
    """
    ## A transfer that records the size of its buffer when it is waited for
    """

    def __init__(self, full: torch.Tensor):
        self.full = full
        self.found_bytes: int | None = None

    def wait(self) -> None:
        self.found_bytes = self.full.untyped_storage().nbytes()


def unsharded() -> tuple[Any, Any, Any]:
    model = chain()
    layer, flat = first_of(model)
    layer.fetch_params()
    layer._wait_params()
    return model, layer, flat


def the_storage_has_no_bytes(case: Case) -> None:
    _, layer, flat = unsharded()
    storage = flat.full.untyped_storage()  # autograd holds it, too
    layer._cleanup_params()
    expect(storage.nbytes() == 0, "a storage of 0 bytes, even if there are views of it",
           f"{storage.nbytes()} bytes")
    expect(flat.full.untyped_storage()._cdata == storage._cdata, "the same storage of `flat.full`",
           "another one")


def freed_parameters_have_names(case: Case) -> None:
    _, layer, _ = unsharded()
    layer._cleanup_params()
    for slot in layer.slots():
        expect(isinstance(slot.param, FreedParameter), f"`{slot.names[0]}` of the class "
               "`FreedParameter`, which raises an error when it is used",
               f"a {type(slot.param).__name__}")


def waits_for_messages(case: Case) -> None:
    _, layer, flat = unsharded()
    layer._gather = on_their_way = Messages(flat.full)
    layer._cleanup_params()
    layer._gather = None
    found_bytes = on_their_way.found_bytes
    expect(bool(found_bytes), "first wait for the all-gather, then free its memory",
           "no wait" if found_bytes is None else "the memory is freed first")


def the_next_fetch_gathers(case: Case) -> None:
    _, layer, _ = unsharded()
    layer.kept_for = lambda: None
    layer._cleanup_params()
    expect(not layer.is_fetched, "`is_fetched` is False", "True")
    expect(layer.kept_for is None, "`kept_for` is None", "it is unchanged")
    layer.kept_for = lambda: None
    layer._cleanup_params()
    expect(layer.kept_for is None, "`kept_for` is None, even if the layer was not fetched",
           "it is unchanged")


def the_tape_says_so_once(case: Case) -> None:
    model, layer, flat = unsharded()
    with Ledger(model) as tape:
        layer._cleanup_params()
        layer._cleanup_params()
    got = [f"{e.event} of {e.bytes} bytes, with {e.live_bytes} left" for e in tape.events]
    expected = f"free of {flat.full.nbytes} bytes, with {held_bytes(model)} left"
    expect(got == [expected], f"one event on the tape for two calls: {expected}",
           f"{len(got)} events: {'; '.join(got)}")


# -------------------------------------------------------------------------- 5: reduce the gradients


class Mixed(nn.Module):
    """
    ## A layer with an unused parameter, one of another data type, and a frozen one
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.unused = nn.Linear(3, 3)
        self.last = nn.Linear(4, 4)
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.double()
        self.scale = nn.Parameter(torch.full((5,), 0.5, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.frozen) * self.scale[:4]


def gradients(module: nn.Module) -> list[torch.Tensor]:
    """
    ## A plain module's gradients as flat vectors, one for each data type; missing ones are zero
    """
    trained = [p for p in module.parameters() if p.requires_grad]
    return [torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1)
                       for p in trained if p.dtype == dtype])
            for dtype in dict.fromkeys(p.dtype for p in trained)]


def backward(times: int = 1, mixed: bool = False) -> tuple[Any, list[torch.Tensor]]:
    """
    ## A model after backward passes, and plain PyTorch's gradients of this rank's shards
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
        for flat in layer.flats:
            expect(not layer.is_fetched, f"{layer.label} resharded", "its parameters are whole")
            expect(flat.grad is None and not flat.ready, f"{layer.label} without a full gradient",
                   "it has one")
            nbytes = flat.full.untyped_storage().nbytes()
            expect(nbytes == 0, f"{layer.label} without a receive buffer", f"one of {nbytes} bytes")


def same_gradients(times: int, mixed: bool) -> None:
    model, grads = backward(times, mixed)
    for shard, grad in zip(model.get_trainable_chunk(), grads, strict=True):
        expect(shard.grad is not None, "a gradient for each shard", "none")
        equal(grad, shard.grad, "gradient ")


def a_lone_layer_ends_its_reduce(case: Case) -> None:
    below = nn.Linear(4, 4)
    above = Zero3Layer(nn.Linear(4, 4))
    seen = []
    # This hook runs before the layer's own hook. At that time the reduction of `above` is over.
    below.bias.register_post_accumulate_grad_hook(lambda _: seen.append(above.flats[0].grad))
    above(Zero3Layer(below)(torch.ones(1, 4))).sum().backward()
    expect(len(seen) == 1 and seen[0] is None, "no full gradient of a layer outside of a chain "
           "when the next layer in backward gets its gradients", "one, until the pass ends")


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
    model = chain()
    seen: list[list[int]] = []
    for layer in model.module_list:
        layer.module.register_forward_pre_hook(lambda *_: seen.append(whole(model)))
    with torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.double))
    for i, wanted in enumerate(([0, 2], [2], [2, 3], [3])):
        expect(seen[i] == wanted, f"while layer {i} computes, layers {wanted} are unsharded (layer "
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
    left = whole(model)
    for layer in model.module_list:
        layer._cleanup_params()
    expect(not left, f"no layer unsharded after a walk that ended early by {how}", f"layers {left}")


def recomputation_sends_nothing_more(case: Case) -> None:
    sent = []
    for through in (lambda model, x: model(x), partial(checkpoint, use_reentrant=False)):
        model = chain()
        with Ledger(model) as tape:
            through(model, batch(0)[1]).sum().backward()
        sent.append(tape.sent_bytes)
    expect(sent[0] == sent[1], f"{sent[0]:,} bytes, as without activation checkpointing",
           f"{sent[1]:,}")


def recomputed_layers_stay(case: Case) -> None:
    model = chain()
    layer = model.module_list[2]
    with gathers(layer) as found:
        model.module_list[3](first_layers(model, 2, batch(0)[1])).sum().backward()
    count = sum(full is layer.flats[0].full for fulls, _ in found for full in fulls)
    expect(count == 2, "2 all-gathers of layer 2 if a walk to it is computed again in backward",
           f"{count}")


CLAIMS: dict[int, tuple[Claim, ...]] = {
    3: (
        Claim("I3", "the all-gather writes into the storage of the parameters",
              writes_into_the_same_storage),
        Claim("time", "it returns while the all-gather is in flight",
              returns_before_the_messages_do),
        Claim("I4", "a second call sends nothing", a_second_call_sends_nothing),
        Claim("I4", "if there is nothing to fetch, nothing is sent", nothing_to_fetch),
        Claim("I1", "the parameters have the values of the last optimizer step",
              gathers_the_weights_of_the_last_step),
        Claim("I1", "gradients that arrive in the same memory are not overwritten",
              gradients_on_their_way_come_first),
        Claim("I2", "what a backward pass fetched and did not use is freed at its end",
              what_backward_did_not_use_is_freed),
        *STEP.values(),
    ),
    4: (
        Claim("I2", "the memory is freed, even if there are views of it", the_storage_has_no_bytes),
        Claim("I2", "a freed parameter is a `FreedParameter`", freed_parameters_have_names),
        Claim("I1", "the memory is freed only after the all-gather", waits_for_messages),
        Claim("I1", "the layer can be fetched again", the_next_fetch_gathers),
        Claim("I3", "the tape records the freed bytes once", the_tape_says_so_once),
        *STEP.values(),
    ),
    5: (
        Claim("I2", "after backward nothing is unsharded", nothing_full_after_backward),
        Claim("I1", "a shard's gradient is the mean over ranks",
              lambda case: same_gradients(1, mixed=False)),
        Claim("I1", "also with unused and frozen parameters, and with two data types",
              lambda case: same_gradients(1, mixed=True)),
        Claim("I7", "a second backward pass adds to the gradients",
              lambda case: same_gradients(2, mixed=False)),
        Claim("I3", "a layer outside of a chain finishes its reduction itself",
              a_lone_layer_ends_its_reduce),
        *STEP.values(),
    ),
    6: (
        Claim("I1", "the layers are yielded in order", walks_in_order),
        Claim("I3", "while a layer computes, only it and the next one are unsharded",
              one_layer_ahead),
        Claim("I2", "a walk that ends early by `break` leaves nothing unsharded",
              lambda case: nothing_left(case, "break")),
        Claim("I2", "a walk that ends early by an exception leaves nothing unsharded",
              lambda case: nothing_left(case, "an exception")),
        *STEP.values(),
        Claim("I4", "activation checkpointing sends nothing more",
              recomputation_sends_nothing_more),
        Claim("I4", "a walk that ends early in backward frees nothing", recomputed_layers_stay),
    ),
}

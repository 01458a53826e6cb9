r"""
# The flat parameter

`FlatParameter` is one buffer that all parameters of a layer are views of. The layer shards, gathers
and frees this buffer, and the parameters follow.

**Two parameters on two ranks.** A layer with a weight 1 2 and a bias 3 has three elements. One more
pads the buffer:

| element of the buffer | 0 | 1 | 2 | 3 |
|---|---|---|---|---|
| **value** | 1 | 2 | 3 | 0 |
| **holds** | weight | weight | bias | padding |
| **belongs to** | rank 0 | rank 0 | rank 1 | rank 1 |

Here each shard ends where a parameter ends. In general it may end inside a parameter. That is
harmless, because an elementwise optimizer does not ask which parameter an element belongs to. One
collective serves the whole layer, however many parameters it has. Each rank copies its own shard
into the buffer, and the other shards arrive there directly:

$$\text{all-gathers of data} = 1 \qquad
\text{elements copied} = \left\lceil \frac{P_\ell}{N} \right\rceil$$

**Freeing a buffer that has views.** Freeing resizes the buffer's storage to zero bytes. The
parameters, and the tensors that autograd has saved for backward, still exist, without memory.
When the same storage is filled again, all of them are valid again. `InFlight` says when a storage
may be resized: not while a message, a thread or a stream still uses it.

torch counts the writes to a tensor in its `_version`. Views share the count, and autograd refuses a
saved tensor whose count has changed. Gathering writes to the buffer in every step. After
`param.data = view` the parameter shares the memory of the buffer, and has a count of its own. What
autograd saves, such as `weight.t()`, has the parameter's count. So a gather changes no count that
autograd looks at, and a write to the *parameter* does.

Below, a parameter is *open* if it can be used, and *closed* if not. A closed one has another class,
`FreedParameter`, on which every operation is an error with the parameter's name. If it is freed,
its count is raised by one, so that autograd refuses what it saved until the parameter is open
again.

**Run this**: `notebooks/03_one_layer.ipynb` follows one flat parameter through a step.

**Not covered, and what that costs**: a layer that mixes data types, or frozen and trainable
parameters, has several buffers, and each has collectives of its own. What was in flight when a rank
failed is kept until the process ends, and its model with it. On an accelerator a wait stops a
stream and not the host, and streams reuse memory in order: the table in `comm/collectives.py` says
who waits for whom.
"""

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from zero3.guards.checks import Guarded, own_modules
from zero3.guards.moments import guards

# Each parameter once, with its names. It has several if the layer uses it in several places.
NamedParams = dict[nn.Parameter, tuple[str, ...]]
# What to do if the device has no room.
CURE = ("offload the shards: from an accelerator with `offload=\"cpu\"`, or to files with "
        "`offload=Offload(\"nvme\", folder=...)`; or use more ranks, or smaller layers")
# The names of some parameters.
Names = Iterable[tuple[str, ...]]


@dataclass(eq=False, repr=False)
class Storage:
    """
    ## Storage: where a shard rests, here in memory

    Those of `offload/tiers.py` have something to read and to write, in files.
    """

    param: nn.Parameter  # (shard_numel,), for the optimizer
    tier: str  # "device", "cpu" or "nvme"

    def read_async(self) -> None:
        """
        ### Begin to bring the shard into memory
        """

    def load(self) -> torch.Tensor:
        """
        ### The shard in memory: `(shard_numel,)`

        A caller that writes to it calls `save` afterwards.
        """
        return self.param.detach()

    def save(self) -> None:
        """
        ### Write the loaded shard back to where it rests; here it was written in place
        """

    def replace(self, values: torch.Tensor) -> None:
        """
        ### Take over these values, converted to the shard's data type
        """
        self.load().copy_(values)
        self.save()

    def release(self, stream: torch.Stream | None = None) -> None:
        """
        ### The loaded shard is no longer needed, once `stream` has copied it
        """


class GradientSink(Protocol):
    """
    ## Gradient sink: where the reduced gradient of a shard goes

    `FlatParameter` adds it to its shard's `.grad`. `Zero3Optimizer` hands in another sink if the
    shard's optimizer states rest elsewhere.
    """

    grad_device: torch.device

    # Add a reduced gradient, (shard_numel,), on `grad_device`, of the parameters with these names.
    def add_grad(self, total: torch.Tensor, names: Names = ()) -> None: ...

    def drop_grad(self, set_to_none: bool = True) -> None: ...


class StorageFactory:
    """
    ## Storage factory: decides where the shards of a layer rest, here on the device
    """

    tier = "device"

    def shard(self, owner: Guarded, values: torch.Tensor, trains: bool) -> Storage:
        """
        ### Put a layer's shard, `(shard_numel,)`, where it rests

        All ranks call it in the same order. Raises `RuntimeError` on all of them if a step of the
        layer has no room.
        """
        guards.check_step(owner, values, CURE)
        return Storage(nn.Parameter(values, trains), self.tier)

    def memory(self) -> list[torch.Tensor]:
        """
        ### Memory that it holds besides the shards, for a `Ledger`
        """
        return []

    def disk_bytes(self) -> int:
        """
        ### Bytes of its files
        """
        return 0


@dataclass(eq=False, repr=False)
class Slot:
    """
    ## The place of one parameter in the flat parameter
    """

    param: nn.Parameter
    names: tuple[str, ...]
    offset: int  # elements
    end: int
    view: torch.Tensor  # of the flat parameter, in the parameter's shape
    freed_class: type  # the `FreedParameter` with this parameter's name
    hook: Any = None  # the handle of the hook on its gradient
    version: int = 0  # the parameter's `_version` while it is open

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """
        ### This parameter's part of a buffer, in the parameter's shape

        * `flat` is `(world_size * shard_numel,)`
        """
        return flat[self.offset : self.end].view(self.view.shape)


class FlatParameter:
    """
    ## A flat parameter, its shard and its gradient

    The layer decides when to gather and when to free. In the example of `minimal.py`, rank 1 has
    the shard 3 0 until it steps. `full` is 1 2 3 0 while the layer computes, and `grad` is 2 0 1 0
    until it is reduced.
    """

    def __init__(self, owner: Guarded, params: NamedParams, full: torch.Tensor, storage: Storage,
                 aligned: Callable[[int, torch.dtype], int]):
        """
        ### Give each parameter its place in a buffer

        `look_at(None)` makes the parameters views of it later, once the buffer is freed.

        * `full` is `(world_size * shard_numel,)`, and has their values one after the other
        * `storage` is where this rank's part of it rests
        * `aligned` rounds a number of elements up to the alignment
        """
        self.owner = weakref.ref(owner)
        self.full = full  # (world_size * shard_numel,), device; no bytes between two steps
        self.storage = storage
        self.shard = storage.param  # (shard_numel,)
        self.grad_device = self.shard.device  # where its gradient rests
        # On the CPU the other ranks' gradients arrive in this storage. It was freed before, and
        # gets new memory.
        self.receive_buffer = full
        self.trains = False  # whether the parameters get gradients, as of the last forward
        # The full gradient until it is reduced: (world_size * shard_numel,), device. `ready` has
        # the names of the parameters whose gradients are in it.
        self.grad: torch.Tensor | None = None
        self.ready: set[tuple[str, ...]] = set()
        # Where the reduced gradient goes, if not to the shard's `.grad`.
        self.sink: GradientSink | None = None
        self.hook: Any = None  # the handle of the optimizer's hook on that `.grad`
        # The ranges of the shard that count in the norm of the model; `None` stands for all of it
        # (see `comm/parts.py`).
        self.counted: list[slice] | None = None
        self.slots: list[Slot] = []
        offset = 0
        for param, names in params.items():
            end = offset + param.numel()
            view = full[offset:end].view(param.shape)
            freed_class = guards.FreedParameter.named(owner, names[0], owner.cure)
            self.slots.append(Slot(param, names, offset, end, view, freed_class))
            offset += aligned(param.numel(), param.dtype)
        # Where the buffer has padding: at the end, and on an accelerator after each parameter.
        begins = [*(slot.offset for slot in self.slots[1:]), len(full)]
        self.padding = [slice(slot.end, begin)
                        for slot, begin in zip(self.slots, begins, strict=True)
                        if slot.end < begin]

    # ---------------------------------------------------------------------------------- parameters

    def open(self, was_freed: bool = True) -> None:
        """
        ### Open the parameters: from now on they may be used

        Autograd accepts the tensors that it saved in forward.

        * `was_freed` is false if the layer has stayed full, and its parameters were only closed
        """
        for slot in self.slots:
            slot.param.__class__ = guards.OpenParameter
        if was_freed:
            self._set_versions(freed=False)

    def close(self, is_freed: bool = True) -> None:
        """
        ### Close the parameters: from now on each use is an error

        Without this, an operation that reaches a freed parameter would read address zero and crash
        the process.

        * `is_freed` is false if the layer stays full, so that a use outside is still noticed
        """
        for slot in self.slots:
            slot.param.__class__ = slot.freed_class
        if is_freed:
            self._set_versions(freed=True)

    def _set_versions(self, freed: bool) -> None:
        """
        #### Set each count of writes to that of forward, or to one more while freed
        """
        params = tuple(slot.param for slot in self.slots)
        versions = tuple(slot.version + freed for slot in self.slots)
        torch._C._autograd._unsafe_set_version_counter(params, versions)

    def look_at(self, full: torch.Tensor | None) -> None:
        """
        ### Point the parameters at another buffer, or back at the flat parameter

        `full_params()` points them at a buffer of its own, and afterwards back.
        """
        # A view made in inference mode could never be used for training.
        with torch.inference_mode(False):
            for slot in self.slots:
                slot.param.__class__ = nn.Parameter
                if full is None:
                    # Writes inside `full_params()` are allowed, so take over the new count.
                    slot.version = slot.param._version
                slot.param.data = slot.view if full is None else slot.of(full)
            if full is None:
                self.close()
            else:
                self.open()

    def written(self) -> str:
        """
        ### The name of a parameter that somebody has written to, or an empty string

        The layer checks after forward and after backward, right before the memory with the written
        values is freed.
        """
        found = ""
        # A closed parameter would report this as a use.
        with torch._C.DisableTorchFunction():
            for slot in self.slots:
                param = slot.param
                is_written = param._version != slot.version
                if param.data_ptr() != slot.view.data_ptr():
                    # Some modules give a parameter other memory with the same values, as `nn.LSTM`
                    # does on a GPU. That is not a write. Comparing waits for the device, but only
                    # modules that move parameters get here.
                    is_written = (param.shape != slot.view.shape
                                  or not torch.equal(param, slot.view))
                    param.data = slot.view
                if is_written:
                    slot.version = param._version
                    found = slot.names[0]
        return found

    def collect_writes(self, full: torch.Tensor) -> str:
        """
        ### Copy what was assigned to the parameters into the buffer that they view

        Returns the problem if a parameter no longer fits its place, or an empty string.
        """
        problem = ""
        for slot in self.slots:
            place = slot.of(full)
            param = slot.param
            if param.shape != place.shape or param.dtype != place.dtype:
                problem = (f"`{slot.names[0]}` of {tuple(param.shape)}, {param.dtype}, in "
                           f"place of {tuple(place.shape)}, {place.dtype}")
            elif param.data_ptr() != place.data_ptr():
                # `p.data = values` has left the buffer alone.
                place.copy_(param)
        return problem

    def follow_requires_grad(self) -> bool:
        """
        ### Copy `requires_grad` from the shard to the parameters, and say whether it has changed
        """
        if self.trains == self.shard.requires_grad:
            return False
        self.trains = self.shard.requires_grad
        # A freed parameter would report the change as a use.
        with torch._C.DisableTorchFunction():
            for slot in self.slots:
                slot.param.requires_grad_(self.trains)
        return True

    # ------------------------------------------------------------------------------------ gradient

    def begin_grad(self, grad: torch.Tensor) -> None:
        """
        ### Collect the parameters' gradients in this buffer

        * `grad` is `(world_size * shard_numel,)`, uninitialised, so its padding is zeroed
        """
        self.grad = grad
        for padding in self.padding:
            self.grad[padding].zero_()

    def collect(self, slot: Slot, grad: torch.Tensor, factor: float) -> None:
        """
        ### Add `factor` times the gradient of one parameter to the flat gradient
        """
        assert self.grad is not None
        grad = grad.to(self.grad.dtype)
        if slot.names in self.ready:
            # The second part of a gradient: under reentrant checkpointing, or after a micro-batch
            # under `no_sync`.
            slot.of(self.grad).add_(grad, alpha=factor)
        else:
            torch.mul(grad, factor, out=slot.of(self.grad))
        self.ready.add(slot.names)

    def zero_missing(self) -> torch.Tensor:
        """
        ### The full gradient, with zeros for the parameters that got none

        Their places are uninitialised.
        """
        assert self.grad is not None
        for slot in self.slots:
            if slot.names not in self.ready:
                slot.of(self.grad).zero_()
        return self.grad

    def drop_full_grad(self) -> None:
        """
        ### Forget the full gradient, reduced or not
        """
        self.grad = None
        self.ready.clear()

    def add_grad(self, total: torch.Tensor, names: Names = ()) -> None:
        """
        ### Add to the shard's gradient

        * `total` is the reduced gradient, `(shard_numel,)`, on `grad_device`
        * `names` are the parameters that have contributed to it on this rank
        """
        if self.shard.grad is None:
            self.shard.grad = guards.mark(total, self, set(), names)
        else:
            self.shard.grad = guards.mark(self.shard.grad.add_(total), self, None, names)

    def drop_grad(self, set_to_none: bool = True) -> None:
        """
        ### Forget the shard's gradient, or make it zero
        """
        if set_to_none:
            self.shard.grad = None
        elif self.shard.grad is not None:
            self.shard.grad.zero_()


# ----------------------------------------------------------------------- parameters of a layer


def find_params(module: nn.Module) -> NamedParams:
    """
    ## Find each parameter of a layer once, with its names
    """
    found: NamedParams = {}
    for prefix, child in own_modules(module):
        for name, param in child._parameters.items():
            if param is not None:
                found[param] = (*found.get(param, ()), prefix + name)
    return found


def alike(params: NamedParams) -> list[NamedParams]:
    """
    ## Split parameters into those that can share a buffer

    They have one data type, and are all trainable or all frozen.
    """
    kinds: dict[tuple[bool, torch.dtype], NamedParams] = {}
    for param, names in params.items():
        frozen = not param.requires_grad
        kinds.setdefault((frozen, param.dtype), {})[param] = names
    return [kinds[kind] for kind in sorted(kinds, key=lambda kind: kind[0])]


def hide_params(modules: Iterable[nn.Module]) -> dict[nn.Module, dict[str, nn.Parameter | None]]:
    """
    ## Make the parameters of modules plain attributes

    The modules still find them by the same names, and `parameters()` yields the shards alone.
    Returns each module's parameters.
    """
    hidden = {}
    for module in dict.fromkeys(modules):
        hidden[module] = dict(module._parameters)
        vars(module).update(hidden[module])
        module._parameters.clear()
    return hidden


# ----------------------------------------------------------------------------- memory in flight


class InFlight:
    r"""
    ## The owner of memory in flight

    It knows the memory that a message, a thread or a stream may still use, and code that resizes
    memory asks it first. There is one for the process, `in_flight`.

    gloo's thread has an address and a length, and knows nothing of tensors. If a buffer is freed
    before the last rank's part has arrived, that part is written into the memory of another tensor.
    The program crashes later, in another place, once in many runs. A rank that *sends* from freed
    memory sends wrong numbers.

    **Three ranks gather 1 2 3**, one element each, and rank 1 has an error at the same moment:

    | moment | rank 0 | its buffer |
    |---|---|---|
    | it starts the gather | waits for two elements | 1 . . |
    | rank 1 announces its error | raises it; the forward pass ends | 1 . . |
    | the layer is cleaned up | **would free 12 bytes** | 1 . . |
    | the 3 of rank 2 was on its way | gloo writes 4 bytes at offset 8 | 1 . 3 |

    The cleanup cannot wait, because rank 1 will never send. So before a transfer starts, its owner
    names the memory (`begin`). After a successful wait it says that the transfer is done (`end`).
    In between nobody frees, resizes or reuses this memory. If the wait or the start fails, the
    memory is kept for good (`lose`):

    $$\text{freed} \cap \text{in flight} = \emptyset$$

    After an error only its announcement is sent (`announce_fault`), so hardly more memory is lost.

    **Who frees or reuses memory, and why nobody uses it then:**

    | place | memory | nobody uses it, because |
    |---|---|---|
    | `Zero3Layer` | the flat parameter | `_cleanup_params` has waited for the gather |
    | `Communicator.all_gather` | the same | it is empty; or it is whole, and is not resized |
    | `as_receive_buffer` | the same, for gradients | the layer's backward is over |
    | `add_reduced` | the same | the wait for the reduce has succeeded |
    | `Reducer.delivered` | a gradient in pinned memory | the host has waited for the copy |
    | `Encoded.release` | a decoded shard | it was copied, and the copy is sent |
    | `Buffers.borrow` | a buffer of files | its threads have ended, and so has the copy from it |
    | `Copy.rest` | an activation | dropped after the wait for its copy |
    | `Buffers.take` | a file of activations | the threads that moved its last blocks have ended |
    | `Channels.end` | activations that were sent | dropped after the wait; kept after an error |
    | `Compressed.after_forward` | a compressed weight | only the compute stream uses it |
    | `FreedParameter.of_shard` | memory that was never filled | nobody knows it |

    As long as no rank has failed, freeing memory in flight would be a mistake of this package, and
    an assertion fails.

    A tensor that is *dropped* needs no such care, because its message has a reference to it. Only
    resizing frees memory that is still referred to.
    """

    def __init__(self) -> None:
        # Each `Transfer` or copy in flight, with the storages that it uses: the addresses of
        # torch's objects, which stay the same when storages are resized. Weakly: whoever starts a
        # transfer keeps it until its wait, and after a failure `lost` does.
        self.users: weakref.WeakKeyDictionary[object, set[int]] = weakref.WeakKeyDictionary()
        # Those that have failed. Other ranks may still wait for their messages, and send to them.
        self.lost: list[object] = []

    def begin(self, user: object, *tensors: torch.Tensor) -> None:
        """
        ### A transfer is about to use these tensors

        * `user` is the transfer, or a copy; it may begin several times, with more tensors
        """
        storages = self.users.setdefault(user, set())
        storages.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def end(self, user: object) -> None:
        """
        ### A transfer is done
        """
        self.users.pop(user, None)

    def lose(self, user: object) -> None:
        """
        ### A transfer has failed: its memory and its messages are kept until the process ends
        """
        if user in self.users and user not in self.lost:
            self.lost.append(user)

    def user_of(self, tensor: torch.Tensor) -> object:
        """
        ### What uses this tensor's memory, or `None`
        """
        storage = tensor.untyped_storage()._cdata
        return next((user for user, storages in self.users.items() if storage in storages), None)

    def free(self, tensor: torch.Tensor) -> None:
        """
        ### Give the memory of a tensor back, unless something that was lost keeps it

        It is not enough to drop a flat parameter, because autograd keeps views of it for backward.
        """
        self.resize(tensor, 0)

    def resize(self, tensor: torch.Tensor, nbytes: int) -> None:
        """
        ### Give a tensor's storage another size

        All views of the storage still exist. Nothing happens if it has this size already: torch
        would allocate it again and copy.
        """
        storage = tensor.untyped_storage()
        if storage.nbytes() != nbytes:
            user = self.user_of(tensor)
            assert user is None or user in self.lost, (
                f"{user} is in flight, and its memory is about to be resized")
            if user is None:
                storage.resize_(nbytes)


in_flight = InFlight()

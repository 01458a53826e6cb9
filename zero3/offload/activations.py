r"""
# Activations that rest elsewhere

`Activations` moves the tensors that autograd saves in a layer to CPU memory or to files, and brings
them back in backward.

At long sequences activations are most of the memory of a step. Each is read once, in backward, in
an order that is known. So a layer's activations leave while the next layer computes, and come back
while the layer above goes backward. **Four layers that save 3 numbers each**, 12 bytes:

| computes | leaves meanwhile | comes back meanwhile | in memory |
|---|---|---|---|
| forward of layer 0 | | | 12 |
| forward of layer 1 | 0 | | 24 |
| forward of layer 2 | 1 | | 24 |
| forward of layer 3 | 2 | | 24 |
| backward of layer 3 | | 2, which is still here | 24 |
| backward of layer 2 | | 1 | 24 |
| backward of layer 1 | | 0 | 24 |
| backward of layer 0 | | | 12 |

Without it, 48 bytes are in memory after forward. The last layer stays, because backward begins with
it. With $n$ layers that save $A_\ell$ bytes, and `keep` layers that stay:

$$\text{out} = \sum_{\ell < n - \text{keep}} A_\ell \qquad
\text{in} = \sum_{\ell < n - \text{keep} - 1} A_\ell \qquad
\text{in memory} \le \max_\ell \sum_{i = \ell}^{\ell + \text{keep}} A_i$$

torch's `saved_tensors_hooks` calls `pack` for each tensor that autograd saves, keeps the result,
and calls `unpack` for it in backward. Here these are `Forward.pack` and `bring_back`, and the
result is a `Handle`. A storage that leaves has a `Copy`.

| a saved tensor | |
|---|---|
| a view of a flat parameter, or of a buffer of the module | stays: it is the model's |
| of a storage below `below_bytes` | stays |
| the second view of a storage | shares the copy of the first |
| the input of the next layer that this one has saved | leaves with the next layer, once |
| changed in place since | torch's error |

Inside of `torch.utils.checkpoint` autograd saves only what the checkpoint keeps, so only that is
moved. With a checkpoint around the layer nothing is.

[ZeRO-Infinity](https://arxiv.org/abs/2104.07857), section 5.1.2, moves activation checkpoints to
CPU memory.

**Run this**: `python -m pytest tests/offload/test_activations.py`.

**Not covered, and what that costs**: from layers on the CPU only files take activations; the tier
"cpu" leaves them where they are. Subclasses of tensors, other layouts, and whatever a function
keeps in its `ctx` without `save_for_backward` stay. A write through `.data` to a tensor that has
left does not reach backward. A tensor that somebody else refers to is copied, and no memory is
freed. `torch.func.grad` and `vjp` inside of the layer are an error, because torch allows no hooks
there. What backward needs while it still leaves holds its memory until the disk has it. If a graph
is kept (`retain_graph`), backward holds up to three calls. In a compiled model a graph without
parameters moves nothing, and what the root computes behind a layer counts as that layer's.

Files keep the largest sizes that were needed, until their `Offload` is gone. From a file to an
accelerator the second copy starts only when the activation is needed, so it overlaps nothing.
Pinned memory is torch's, which rounds each storage up to a power of two.
"""

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from zero3.flat import in_flight
from zero3.guards.checks import Guarded, expect, whole
from zero3.offload.disk import File, aligned, whole_blocks
from zero3.offload.in_file import Blocks, Buffers
from zero3.offload.tiers import Offload
from zero3.watch import in_backward, tensors_in


@dataclass(eq=False)
class Activations:
    """
    ## Where the activations of a layer rest, and which of them

    Whatever takes `activations=` takes one of these, or an `Offload`, or "cpu".

    * `offload` is the tier; pass one object to all layers, so that they share its files
    * `below_bytes`: storages with fewer bytes stay. To begin their requests would take longer than
      to move the bytes
    * `keep` is how many of the calls that came last stay in memory

    Raises `ValueError` if these do not fit together.
    """

    offload: Offload | str = "cpu"
    below_bytes: int = 1 << 18
    keep: int = 1
    to: Offload = field(init=False)

    def __post_init__(self) -> None:
        self.to = Offload.of(self.offload)
        expect(self.to.fraction == 1, "Activations", "an `Offload` without `fraction`",
               self.to.fraction, "pass it to `Zero3Optimizer`, whose states it divides")
        for name, least in (("below_bytes", 0), ("keep", 1)):
            value = getattr(self, name)
            expect(whole(value, least), "Activations", f"`{name}`, a whole number of at least "
                   f"{least}", repr(value), "pass one")

    @classmethod
    def of(cls, activations: "Activations | Offload | str") -> "Activations":
        """
        ### Turn the argument `activations` of a layer or a model into one of these
        """
        return activations if isinstance(activations, Activations) else cls(activations)

    def moves_from(self, device: torch.device) -> bool:
        """
        ### Whether the tier is another memory than that of a layer on `device`
        """
        return self.to.tier == "nvme" or (self.to.tier == "cpu" and device.type != "cpu")


class LayerActivations:
    """
    ## A layer's way to save what autograd needs: its forward runs `with saving(inputs):`
    """

    def __init__(self, activations: Activations | Offload | str, layer: Guarded):
        """
        ### Take the argument `activations` of a layer
        """
        self.activations = Activations.of(activations)
        # Weakly, because the layer refers to this object.
        self.layer = weakref.ref(layer)

    def __call__(self, inputs: object) -> AbstractContextManager:
        """
        ### Watch what autograd saves

        * `inputs` are the arguments of the call, in any nest
        """
        layer = self.layer()
        assert layer is not None
        if not (torch.is_grad_enabled() and self.activations.moves_from(layer.device)):
            return nullcontext()
        # Backward follows a recomputation at once. And under a checkpoint around the layer, whose
        # hooks are active, autograd saves nothing. Active are those of the innermost `with`.
        active = torch._C._autograd._top_saved_tensors_default_hooks(True)
        if in_backward() or (active is not None and active[1] is not bring_back):
            return nullcontext()
        return saved_tensors_hooks(Forward(self.activations, layer, inputs).pack, bring_back)


class Forward:
    """
    ## One forward call of a layer, which packs what autograd saves
    """

    def __init__(self, activations: Activations,
                 layer: Guarded,
                 inputs: object):
        self.activations = activations
        self.layer = layer
        self.visit: Visit | None = None
        self.inputs = {_storage_of(tensor) for tensor in tensors_in(inputs)}
        # The model holds this memory whether autograd saves it or not.
        self.own = {_storage_of(tensor) for tensor in _held_by(layer)}

    def pack(self, tensor: torch.Tensor) -> "Handle":
        """
        ### Autograd saves a tensor: give it a handle instead
        """
        if self._stays(tensor):
            # A result refers to its graph. If the graph referred to it, nothing would free the two.
            kept = tensor if tensor.is_leaf else tensor.detach()
            return Handle(self.layer.label, kept, tensor._version, tensor.size())
        visit = self._visit()
        stored = order.known.get(_storage_of(tensor))
        # Once it has left, its values may change: torch counts the writes of some views apart.
        if stored is None or stored.has_copy:
            # The whole storage, once for all of its views. With the last handle that refers to it
            # it goes, its memory and its copy.
            bytes_of_all = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            stored = Copy(bytes_of_all.set_(tensor.untyped_storage()))
            order.known[_storage_of(tensor)] = stored
        visit.add(stored)
        writes = tensor.detach()
        writes.data = tensor.new_empty(0)
        return Handle(
            visit.label,
            writes,
            tensor._version,
            tensor.size(),
            tensor.stride(),
            int(tensor.storage_offset()),
            stored,
            visit,
        )

    def _stays(self, tensor: torch.Tensor) -> bool:
        """
        #### Whether a saved tensor stays as it is
        """
        is_plain = (type(tensor) is torch.Tensor and tensor.layout == torch.strided
                    and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg()))
        if not is_plain or tensor.device != self.layer.device:
            return True
        is_small = tensor.untyped_storage().nbytes() < max(1, self.activations.below_bytes)
        # Parameters of other units. A unit learns while it computes whose parameters it uses. The
        # parameters of the units around it are open already, so its use of them is not noticed.
        around = (self.layer, *getattr(self.layer, "outside", ()))
        borrowed = (_storage_of(flat.full)
                    for each in around
                    for unit in (each, *each.externals)
                    for flat in unit.flats)
        key = _storage_of(tensor)
        return is_small or key in self.own or key in borrowed

    def _visit(self) -> "Visit":
        """
        #### The visit that tensors are saved in now

        If a layer inside this one has saved something since, a new one begins.
        """
        if self.visit is None or self.visit.number != order.newest:
            self.visit = Visit(self.activations, self.layer)
            for key in self.inputs:
                # This call still refers to it. It leaves with this one.
                stored = order.known.get(key)
                if stored is not None and not stored.has_copy:
                    self.visit.add(stored)
            order.begin(self.visit)
        return self.visit


class Handle(NamedTuple):
    """
    ## What autograd keeps in place of a tensor

    If the tensor has left, its place and shape in its storage.
    """

    label: str  # of the layer
    # The tensor without its graph, if it stays. Else an empty one of the same data type. Both have
    # the tensor's count of writes.
    writes: torch.Tensor
    version: int  # that count when the tensor was saved
    size: torch.Size
    stride: tuple[int, ...] = ()
    offset: int = 0  # elements
    stored: "Copy | None" = None
    visit: "Visit | None" = None


def bring_back(handle: Handle) -> torch.Tensor:
    """
    ## Backward needs a saved tensor again

    Raises torch's error if it has been changed in place since.
    """
    writes = handle.writes
    if writes._version != handle.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an "
            f"inplace operation: [{writes.type()} {[*handle.size]}], saved by {handle.label}, is "
            f"at version {writes._version}; expected version {handle.version} instead.")
    if handle.stored is None or handle.visit is None:
        return writes
    order.enter(handle.visit)
    memory = handle.stored.here()
    # Memory that was read begins at a block of the disk, somewhere in its storage.
    offset = int(memory.storage_offset()) // writes.itemsize + handle.offset
    tensor = torch.empty(0, dtype=writes.dtype, device=memory.device)
    return tensor.set_(memory.untyped_storage(), offset, handle.size, handle.stride)


class Visit:
    """
    ## What one call of a layer has saved

    A unit with units inside has several: before the first of them, between them, and after the
    last.
    """

    def __init__(self, activations: Activations, layer: Guarded):
        self.activations = activations
        self.layer = weakref.ref(layer)
        self.label = layer.label
        self.number = order.newest + 1
        # The storages that a graph still needs. Weakly, because they refer to this object.
        self.members: weakref.WeakValueDictionary[int, Copy] = (
            weakref.WeakValueDictionary())
        self.has_left = False

    def add(self, stored: "Copy") -> None:
        """
        ### This call needs a storage
        """
        self.members[id(stored)] = stored
        if stored.visits[-1:] != [self]:
            stored.visits.append(self)

    def leave(self) -> None:
        """
        ### Begin to copy, once

        Raises `RuntimeError` if the disk is full. Nothing is lost then, because all of it is still
        in memory.
        """
        layer = self.layer()
        going = [stored for stored in self.members.values()
                 if stored.visits[-1] is self and stored.can_leave]
        if self.has_left or not going or layer is None:
            return
        # Also if the disk is full, or each later forward would try again.
        self.has_left = True
        # Where each copy begins in the file, and where the last one ends.
        *begins, end = accumulate((whole_blocks(stored.nbytes) for stored in going), initial=0)
        shelf = self._shelf(layer, end)
        for stored, begin in zip(going, begins, strict=True):
            stored.leave(layer, shelf, begin)
        layer.listener.record(layer, "activations out", sum(stored.nbytes for stored in going),
                              tier=self.activations.to.tier)

    def _shelf(self, layer: Guarded, nbytes: int) -> "Shelf | None":
        """
        #### A file for the copies, if they go to one
        """
        offload = self.activations.to
        if offload.tier != "nvme":
            return None
        try:
            buffers = offload.buffers_for("activations", layer, 0)
            return Shelf(buffers, buffers.take(nbytes))
        except OSError as error:
            what = ("has no room for its activations", f"{nbytes:,} bytes in {offload.folder}",
                    error, "free some space, choose a folder on a larger disk, or train with "
                    "smaller batches or without `activations=`")
            if len(layer.comm.ranks) > 1:
                # The other ranks would wait for this one.
                layer.comm.fail(layer, *what)
            layer.expect(False, *what)
        return None

    def rest(self, backward: bool) -> None:
        """
        ### Free the memory of what has been copied

        * `backward` says that this call went backward, and does not need it again soon
        """
        for stored in self.members.values():
            if stored.visits[0 if backward else -1] is self:
                stored.rest()

    def come(self) -> None:
        """
        ### Begin to bring everything back
        """
        nbytes = sum(stored.come() for stored in self.members.values())
        layer = self.layer()
        if nbytes and layer is not None:
            layer.listener.record(layer, "activations in", nbytes, tier=self.activations.to.tier)


class Order:
    """
    ## The visits of this process, in the order of forward

    There is one for all models of the process: whatever computes next makes older activations
    leave. It refers weakly to everything, so a graph that is dropped without backward takes its
    visits along.
    """

    def __init__(self) -> None:
        self.visits: weakref.WeakValueDictionary[int, Visit] = weakref.WeakValueDictionary()
        self.newest = 0  # the number of the visit that has begun last
        # Storages in memory by the addresses of torch's objects for them.
        self.known: weakref.WeakValueDictionary[int, Copy] = weakref.WeakValueDictionary()
        # The numbers of the visits that backward has reached, the last two.
        self.entered = [0, 0]

    def begin(self, visit: Visit) -> None:
        """
        ### Forward reaches a visit: older ones leave, and those before them have left
        """
        older = list(self.visits.values())
        self.visits[visit.number] = visit
        self.newest = visit.number
        for age, old in zip(range(len(older), 0, -1), older, strict=True):
            if age >= old.activations.keep:
                old.leave()
            if age > old.activations.keep:
                old.rest(backward=False)

    def enter(self, visit: Visit) -> None:
        """
        ### Backward reaches a visit: bring it back, and begin with the one before it
        """
        before, last = self.entered
        if last == visit.number:
            return
        self.entered = [last, visit.number]
        visit.come()
        earlier = [number for number in self.visits.keys() if number < visit.number]
        ahead = self.visits.get(max(earlier, default=0))
        if ahead is not None:
            ahead.come()
        # A kept graph still has the visits behind. Two may take turns, so the last one stays.
        behind = self.visits.get(before)
        if behind is not None and behind not in (visit, ahead):
            behind.rest(backward=True)


def _held_by(layer: Guarded) -> Iterator[torch.Tensor]:
    """
    #### Parameters and buffers of a layer, and of the layers inside
    """
    for module in layer.modules():
        for flat in getattr(module, "flats", ()):
            yield flat.full
    if layer.is_full_elsewhere:
        yield from (slot.param for flat in layer.flats for slot in flat.slots)
    yield from layer.module.buffers()


def _storage_of(tensor: torch.Tensor) -> int:
    """
    #### The address of torch's object for a storage; 0 without one
    """
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else 0


order = Order()


# ------------------------------------------------------------------------------------- the copies


@dataclass(eq=False)
class Shelf:
    r"""
    ## A file with the copies of one call

    Its copies refer to it, and with the last one it gives the file back.

    Each batch may have activations of other sizes. So a call takes a file from those that earlier
    calls have given back, and makes one only if all of them are too small. Two calls of 8,192 and
    5,000 bytes in two steps:

    | | its file | files |
    |---|---|---|
    | step 1, call 0 leaves | new: 8,192 bytes | 1 |
    | step 1, call 1 leaves | new: 8,192 bytes, in whole blocks | 2 |
    | step 1, backward | both are given back | 2 |
    | step 2 | the same two | 2 |

    $$\text{bytes of files in use} = \sum_{\text{calls that are away}} \; \sum_{\text{storages}}
    \left\lceil \frac{\text{bytes}}{4096} \right\rceil \cdot 4096$$

    A direct write needs memory that begins at a block of the disk, and an activation begins
    anywhere. So each thread has a block of its own to write from (`Buffers.move`). Reading goes to
    new memory, which is aligned.
    """

    buffers: Buffers
    file: File  # that `buffers` has taken for it

    def __del__(self) -> None:
        self.buffers.idle.append(self.file)


class Copy:
    """
    ## Memory that leaves, and its copy in a file or in pinned CPU memory

    | | `memory` | the copy |
    |---|---|---|
    | | is there | |
    | `leave` | is there | begins |
    | `rest` | | complete |
    | `come` | | is read into `near` |
    | `here` | is there: what was `near` | stays, because a kept graph may come again |

    From an accelerator the backup stream copies to pinned memory, and threads write that to the
    file. On the way back threads read into pinned memory, and the fetch stream copies it to the
    device:

    | who | waits for | before |
    |---|---|---|
    | the backup stream | the compute stream | it copies an activation to the CPU |
    | the compute stream | this copy | the activation's memory is used again |
    | a thread | this copy | it writes to the file |
    | the fetch stream | the compute stream | it copies into new memory |
    | the compute stream | that copy | it reads the activation |
    """

    has_copy = False
    # After the last copy between the device and the CPU.
    event: torch.Event | None = None
    # The memory that it comes back to, while it does.
    near: torch.Tensor | None = None

    def __init__(self, memory: torch.Tensor):
        # (bytes,) uint8, device; `None` while only the copy has the values
        self.memory: torch.Tensor | None = memory
        self.device = memory.device
        self.nbytes = memory.nbytes
        self.moving: Blocks = []
        # The calls of layers that need an activation, in the order of forward.
        self.visits: list[Visit] = []

    @property
    def can_leave(self) -> bool:
        """
        ### Whether only memory has it, of the size that it was saved with

        Somebody may free it by resizing and fill it again, as `Compressed` does.
        """
        return (not self.has_copy and self.memory is not None
                and self.memory.untyped_storage().nbytes() == self.nbytes)

    def __del__(self) -> None:
        # It was dropped during a copy. Only the compute stream may use this memory again.
        if self.event is not None:
            self.comm.current_stream().wait_event(self.event)

    def leave(self, owner: Guarded,
              shelf: Shelf | None = None,
              at: int = 0) -> None:
        """
        ### Begin to copy

        * `owner` is the layer that it belongs to
        * `shelf` has room for it, `at` so many bytes; without one, the copy stays in pinned memory
        """
        assert self.memory is not None
        self.owner = weakref.ref(owner)
        self.comm = owner.comm
        self.shelf = shelf
        self.at = at
        in_flight.begin(self, self.memory)
        from_cpu = self.memory
        if self.device.type != "cpu":
            from_cpu = _pinned(self.nbytes)
            self._copy(self.comm.backup_stream, from_cpu, self.memory)
        if shelf is None:
            self.pinned = from_cpu
        else:
            self.moving = shelf.buffers.start(shelf.file, True, from_cpu, at, self.event)
        self.has_copy = True

    def _copy(self, stream: torch.Stream,
              to: torch.Tensor,
              memory: torch.Tensor) -> None:
        """
        #### Copy between the device and the CPU, on a stream beside the compute stream
        """
        with self.comm.on(stream):
            to.copy_(memory, non_blocking=True)
            self.event = self.comm.event()
            self.event.record()

    def rest(self) -> None:
        """
        ### Free the memory, if there is a copy, once the copy is complete

        On an accelerator the compute stream waits. For a file this thread waits as well, so that
        the copies of at most one call are in pinned memory.
        """
        if self.has_copy and self.memory is not None:
            self._end("write")
            in_flight.end(self)
            self.memory = None

    def come(self) -> int:
        """
        ### Begin to bring it back: the bytes that have to be copied
        """
        if self.memory is not None or self.near is not None:
            return 0
        if self.shelf is None:
            self._to_device(self.pinned)
        else:
            take = None if self.device.type == "cpu" else _pinned
            self.near = aligned(whole_blocks(self.nbytes), take)
            in_flight.begin(self, self.near)
            self.moving = self.shelf.buffers.start(self.shelf.file, False, self.near, self.at)
        return self.nbytes

    def here(self) -> torch.Tensor:
        """
        ### Wait until it is back: `(bytes,)` uint8, on the device
        """
        if self.memory is None:
            self.come()
            self._end("read")
            assert self.near is not None
            if self.shelf is not None and self.device.type != "cpu":
                self._to_device(self.near)
                self._end("read")
            in_flight.end(self)
            self.memory = self.near[: self.nbytes]
            self.near = None
        return self.memory

    def _to_device(self, memory: torch.Tensor) -> None:
        """
        #### Begin to copy from pinned memory to the device

        The new memory is the compute stream's, whose work so far the fetch stream waits for.
        """
        near = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        in_flight.begin(self, near)
        self._copy(self.comm.fetch_stream, near, memory[: self.nbytes])
        self.near = near

    def _end(self, event: str) -> None:
        """
        #### Wait for the blocks that are being read or written, and for the copy on a stream

        Raises `RuntimeError` if a block did not arrive; all ranks stop then.
        """
        if self.shelf is not None:
            self.shelf.buffers.wait(self.moving, self.owner(), f"{event} its activations",
                                    self.nbytes)
        self.moving = []
        if self.event is not None:
            self.comm.current_stream().wait_event(self.event)
            self.event = None


def _pinned(nbytes: int) -> torch.Tensor:
    """
    #### Pinned memory of torch's, which it keeps until the copies from it have ended
    """
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

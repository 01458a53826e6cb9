r"""
# States that are away

`StatesAway` moves the optimizer states of one layer to CPU memory and back, while the device
computes.

`room.py` decides which layers' states leave, and when. Here they move. Take a layer with a master
weight of 4 bytes and two moments of 4 bytes on this rank:

| operation | who copies | the device has | CPU memory has |
|---|---|---|---|
| before | | 12 bytes | |
| `offload` | the backup stream starts to | 12 | 12, not complete |
| `vacate` | it has ended: the compute stream waits | 0 | 12 |
| `reload` | the fetch stream starts to | 12, not complete | 12 |
| the step | it has ended: the compute stream waits | 12 | 12, unused |

The host never waits. A copy takes

$$t = \frac{\text{bytes}}{\text{bandwidth to CPU memory}}$$

and forward needs states gone only when memory is short, so most of $t$ overlaps computation.

**Which stream waits for which.**

| who | waits for | because |
|---|---|---|
| backup, before it copies | compute, as far as it is queued | the optimizer wrote there |
| compute, at `vacate` | this copy | it uses the freed memory again |
| fetch, before it copies back | compute, as far as it is queued | compute had the memory |
| compute, at the step | this copy | it steps the states |

Memory is taken and freed for the compute stream, although other streams copy. torch's allocator
keeps freed memory for the stream that took it, so activations can use the memory of states only
if both are of the same stream.

**States are where they are looked for.** Whoever asks a `ShardStates` for its master or moments
gets them back first: the step, `state_dict`, a checkpoint. Until then pieces and moments have no
elements, as those in files. So a forward pass without backward, or an exception, leaves nothing to
repair.

**Run this**: `python -m pytest tests/test_compiler_offload.py -k order`.

**Not covered, and what that costs**: the CPU memory is kept from step to step, because pinned
memory is slow to get: as many bytes as leave, until the model is dropped. A `Ledger` does not count
it. A tensor of `optimizer.state` that the caller has kept goes on taking device memory, and is not
the optimizer's any more when its layer has come back.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zero3.comm.collectives import ALIGN_BYTES
from zero3.compiler.room import LayerBytes, Room
from zero3.offload.memory import pinned
from zero3.optimizer.states import ShardStates

# The optimizer trains with these tensors, also if a forward pass in inference mode moves them.
PLAIN = torch.inference_mode(False)


class StatesAway:
    """
    ## The optimizer states of a layer, which may be away

    Each unit of a compiled model has one.
    """

    def __init__(self, layer: Any):
        self.layer = layer
        # "here", "leaving", "away" or "returning"
        self.phase = "here"
        self.parts: list[Part] = []  # none while they are here
        self.moved: list[ShardStates] = []  # whose parts they are
        self.copied: Any = None  # the event after the last copy
        self.memory = torch.empty(0, dtype=torch.uint8)  # pinned, kept from step to step

    @property
    def optimizer(self) -> Any:
        """
        ### The optimizer of the model, if it has a `Zero3Optimizer`
        """
        return optimizer_of(self.layer)

    @property
    def shard_states(self) -> list[ShardStates]:
        """
        ### The states of this layer's shards, if they rest on the device
        """
        return [states for states in states_on_device(self.optimizer)
                if states.layer is self.layer]

    @PLAIN
    def leave(self) -> None:
        """
        ### Start to copy the states to CPU memory

        They stay on the device until `vacate`. Moments that the optimizer has not made yet are not
        there to leave.
        """
        # They may still be away, because backward never came.
        self.back()
        self._find_parts()
        if not self.parts:
            return
        comm = self.layer.comm
        # The backup stream waits for the compute stream, where the optimizer wrote the states.
        with comm.on(comm.backup_stream):
            for part in self.parts:
                part.there.copy_(part.here, non_blocking=True)
            self._record_event()
        self._go_on("leaving", "offload")

    @PLAIN
    def vacate(self) -> None:
        """
        ### Free the memory of the states on the device, once they are copied

        The compute stream waits for the copy, because it is the next one to use this memory.
        """
        if self.phase != "leaving":
            return
        self.layer.comm.current_stream().wait_event(self.copied)
        for part in self.parts:
            part.put(part.here.new_empty(0))
            part.here = part.here.new_empty(0)
        self._go_on("away", "vacate")

    @PLAIN
    def reload(self) -> None:
        """
        ### Start to copy the states back to the device

        Nothing happens if they have not left it.
        """
        if self.phase == "leaving":
            self.back()
        if self.phase != "away":
            return
        for part in self.parts:
            # For the compute stream, which had the memory until now.
            part.here = torch.empty_like(part.there, device=self.layer.device)
        comm = self.layer.comm
        # The fetch stream waits for the compute stream: so also for the copy to CPU memory.
        with comm.on(comm.fetch_stream):
            for part in self.parts:
                part.here.copy_(part.there, non_blocking=True)
            self._record_event()
        self._go_on("returning", "reload")

    @PLAIN
    def back(self) -> None:
        """
        ### Have the states on the device, wherever they are

        The compute stream waits for the copy under way. `ShardStates` calls it before anybody reads
        or writes its states.
        """
        if self.phase == "away":
            self.reload()
        if self.phase == "here":
            return
        self.layer.comm.current_stream().wait_event(self.copied)
        if self.phase == "returning":
            for part in self.parts:
                part.put(part.here)
        for states in self.moved:
            states.away = None
        self.phase = "here"
        self.parts = []

    def held_tensors(self) -> Iterator[torch.Tensor]:
        """
        ### The states that are on their way back, for a `Ledger`

        While they leave, the optimizer still has them.
        """
        for part in self.parts:
            yield part.here

    def _find_parts(self) -> None:
        """
        #### Find the states that can leave, and a place in CPU memory for each
        """
        self.parts = []
        offset = 0
        found = [*self._states()]
        self._take_memory()
        for here, put in found:
            there = self.memory[offset : offset + here.nbytes].view(here.dtype)
            self.parts.append(Part(here, there, put))
            offset += aligned(here.nbytes)
        self.moved = self.shard_states if found else []
        for states in self.moved:
            states.away = self

    def _states(self) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
        """
        #### The masters and the moments of this layer

        Yields each tensor, and a function that puts another one in its place. A shard that is its
        own master stays, because the layer is gathered from it. So do the counters of steps.
        """
        for states in self.shard_states:
            if not states.shard_is_master:
                yield states.master, states.put_master
            for piece in states.pieces:
                known = self.optimizer.state.get(piece.param, {})
                for name in self.optimizer.moments:
                    moment = known.get(name)
                    if isinstance(moment, torch.Tensor) and moment.numel():
                        yield moment, Place(known, name)

    def _take_memory(self) -> None:
        """
        #### Take pinned CPU memory for master and moments, once

        Also for moments that the first step has not made yet: to get other memory later, the host
        would have to wait for the device.
        """
        nbytes = 0
        for states in self.shard_states:
            itemsize = states.master_dtype.itemsize
            if not states.shard_is_master:
                nbytes += aligned(len(states.shard) * itemsize)
            for piece in states.pieces:
                numel = piece.where.stop - piece.where.start
                nbytes += len(self.optimizer.moments) * aligned(numel * itemsize)
        if len(self.memory) < nbytes:
            device = self.layer.device
            # A CPU copies from any memory.
            self.memory = (torch.empty(nbytes, dtype=torch.uint8) if device.type == "cpu"
                           else pinned(device, nbytes))

    def _record_event(self) -> None:
        self.copied = self.layer.comm.event()
        self.copied.record()

    def _go_on(self, phase: str, event: str) -> None:
        """
        #### Enter a phase, and tell the listener
        """
        self.phase = phase
        nbytes = sum(part.there.nbytes for part in self.parts)
        self.layer.listener.record(self.layer, event, nbytes,
                                   tier="cpu" if event == "offload" else "device")


@dataclass
class Part:
    """
    ## A master or a moment that moves
    """

    here: torch.Tensor  # (n,) on the device; without elements while it is away
    there: torch.Tensor  # (n,) in pinned CPU memory
    put: Callable[[torch.Tensor], None]  # gives the optimizer a tensor in its place


class Place:
    """
    ## The place of a moment in the optimizer's state
    """

    def __init__(self, known: dict[str, Any], name: str):
        self.known = known
        self.name = name

    def __call__(self, tensor: torch.Tensor) -> None:
        self.known[self.name] = tensor


def aligned(nbytes: int) -> int:
    """
    ## The next number of bytes after which another tensor may begin
    """
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


# ------------------------------------------------------------------- what a step of layers takes


def optimizer_of(layer: Any) -> Any:
    """
    ## The `Zero3Optimizer` that steps a layer, or `None`
    """
    found = layer.reducer.optimizer
    return found() if found is not None else None


def states_on_device(optimizer: Any) -> list[ShardStates]:
    """
    ## The states that rest on the device, of all layers, in the order of the step
    """
    if optimizer is None or optimizer.offload.tier != "device":
        return []
    return optimizer.shard_states


def room_for(layers: dict[str, Any], limit_bytes: int) -> Room:
    """
    ## What a step of these layers takes on the device, and the limit

    * `layers` are those of a compiled model, by their names
    """
    first: Any = next(iter(layers.values()))
    optimizer = optimizer_of(first)
    found = states_on_device(optimizer)
    places = [states.layer for states in found]
    # In the order of the step.
    names = sorted(layers, key=lambda name: (places.index(layers[name])
                                             if layers[name] in places else len(places)))
    states_of = {name: [states for states in found if states.layer is layers[name]]
                 for name in names}
    of_layers = {name: layer_bytes(layers[name], states_of[name], optimizer) for name in names}
    rest_bytes = sum(flat.storage.rest_bytes for layer in layers.values() for flat in layer.flats
                     if flat.storage.tier == "device")
    rest_bytes += sum(len(states.shard) * states.grad_dtype.itemsize for states in found)
    # Where the step widens the gradient of one shard after the other.
    widened = [len(states.shard) * states.master_dtype.itemsize for states in found
               if states.grad_dtype != states.master_dtype]
    return Room(of_layers, rest_bytes, max(widened, default=0), limit_bytes)


def layer_bytes(layer: Any, found: list[ShardStates], optimizer: Any) -> LayerBytes:
    """
    ## What a layer takes on the device in a step

    * `found` are its states

    Moments count before the first step has made them.
    """
    gradient = sum(len(flat.full) * flat.shard.grad_dtype.itemsize for flat in layer.flats
                   if flat.shard.requires_grad)
    states = 0
    for each in found:
        copies = len(optimizer.moments) + (not each.shard_is_master)
        states += len(each.shard) * each.master_dtype.itemsize * copies
    return LayerBytes(sum(flat.full.nbytes for flat in layer.flats), gradient,
                      gradient // layer.comm.world_size, states)

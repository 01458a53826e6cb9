r"""
# Optimizer states that leave for a while

With `offload_states_bytes=`, some optimizer states rest in CPU memory during forward and backward,
and are back for the step.

A step takes the most memory where forward ends and backward begins, because all activations are
there. The optimizer states are not used before the step, so they may be away then. Take three
layers a, b and c. This rank has a master weight of 4 bytes and two moments of 4 bytes of each, and
is asked for 20 bytes. The layers that are stepped last leave first, because they have the most time
to come back. So c and b leave:

| forward | states on the device | backward | states on the device |
|---|---|---|---|
| **`offload(c)`**, **`offload(b)`** | 36 | c goes backward | 12 |
| a computes | 36 | b goes backward | 12 |
| **`vacate(c)`** | 24 | **`reload(b)`** | 24 |
| b computes | 24 | a goes backward | 24 |
| **`vacate(b)`** | 12 | **`reload(c)`** | 36 |
| c computes | 12 | the step | 36 |

The copies to CPU memory begin at `offload`, and each may take until its `vacate`, so they overlap
forward. A copy back begins at `reload`, and may take until the optimizer steps that layer.

One layer's states leave for each layer that has computed. With $L$ equal layers, of $a$ bytes of
activations and $s$ bytes of states each, of which $k < L$ leave, both together take at most

$$\max\big(a + L\,s,\; L\,a + (L - k)\,s\big) \quad \text{bytes}$$

**Which stream waits for which.** The host never waits.

| who | waits for | because |
|---|---|---|
| backup, before it copies | compute, as far as it is queued | the optimizer wrote there |
| compute, at `vacate` | this copy | it uses the freed memory again |
| fetch, before it copies back | compute, as far as it is queued | compute had the memory |
| compute, at the step | this copy | it steps the states |

Memory is taken and freed for the compute stream, although other streams copy. torch's allocator
keeps freed memory for the stream that took it, and activations need the memory of the states.

**States are where they are looked for.** The step, `state_dict` or a checkpoint asks a
`ShardStates` for its master or moments, and gets them back first. So a forward pass without
backward, or an exception, leaves nothing to repair.

`offload_states` in `passes.py` puts these operations into graphs. It is DeepCompile's adaptive
offloading ([paper](https://arxiv.org/abs/2504.09983)) with a number of bytes from the user.

**Run this**: `python -m pytest tests/compiler/test_away.py -k order`.

**Not covered, and what that costs**: the user has to find the number of bytes. If a copy takes
longer than the layers that it overlaps, the device waits for it at `vacate`. Each micro-batch moves
the states once more. The CPU memory is torch's pinned memory, which torch rounds up to a power of
two and keeps for later; a `Ledger` does not count it. A tensor of `optimizer.state` that the caller
has kept goes on taking device memory, and is no longer the optimizer's. One that the caller reads
while it is away is empty.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from zero3.layer import Zero3Layer
from zero3.offload.activations import Copy
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.optimizer.states import ShardStates


class StatesAway:
    """
    ## The optimizer states of a layer, which may be away
    """

    def __init__(self, layer: Zero3Layer):
        self.layer = layer
        self.parts: list[Part] = []  # none while they are at home

    def offload(self) -> None:
        """
        ### Start to copy the states to CPU memory
        """
        # They may still be away, because backward never came.
        self.back()
        optimizer = optimizer_on_device(self.layer)
        if optimizer is None:
            return
        for states in optimizer.shard_states:
            if states.layer is self.layer:
                states.bring_back = self.back
                self.parts += [Part(here.dtype, put, Copy(here.view(torch.uint8)))
                               for here, put in movable(states, optimizer)]
        for part in self.parts:
            part.copy.leave(self.layer)
        self._record("offload", sum(part.copy.nbytes for part in self.parts))

    def vacate(self) -> None:
        """
        ### Free the memory of the states on the device, once they are copied
        """
        for part in self.parts:
            part.copy.rest()
            part.put(torch.empty(0, dtype=part.dtype, device=part.copy.device))
        self._record("vacate", sum(part.copy.nbytes for part in self.parts))

    def reload(self) -> None:
        """
        ### Start to copy the states back to the device
        """
        self._record("reload", sum(part.copy.come() for part in self.parts))

    # The optimizer trains with these tensors, also if somebody looks at them in inference mode.
    @torch.inference_mode(False)
    def back(self) -> None:
        """
        ### Have the states on the device, wherever they are
        """
        self.reload()
        for part in self.parts:
            if part.copy.memory is None:
                part.put(part.copy.here().view(part.dtype))
            else:
                # The optimizer still has them, and keeps them.
                part.copy.rest()
        self.parts = []

    def _record(self, event: str, nbytes: int) -> None:
        """
        #### Tell the listener, unless nothing has moved
        """
        if nbytes:
            self.layer.listener.record(self.layer, event, nbytes,
                                       tier="cpu" if event == "offload" else "device")


class Part(NamedTuple):
    """
    ## A master or a moment that moves
    """

    dtype: torch.dtype
    put: Callable[[torch.Tensor], None]  # gives the optimizer a tensor in its place
    copy: Copy  # its memory on the device, and a copy in pinned CPU memory


# ------------------------------------------------------------------------- the states of a layer


def optimizer_on_device(layer: Zero3Layer) -> Zero3Optimizer | None:
    """
    ## The `Zero3Optimizer` that steps a layer, if its states rest on the device; or `None`
    """
    bucket: Any = layer.reducer
    optimizer: Zero3Optimizer | None = bucket.optimizer and bucket.optimizer()
    return optimizer if optimizer and optimizer.offload.tier == "device" else None


def movable(states: ShardStates, optimizer: Zero3Optimizer
            ) -> Iterator[tuple[torch.Tensor, Callable[[torch.Tensor], None]]]:
    """
    ## The master and the moments of a shard

    Yields each tensor, and a function that puts another one in its place. A shard that is its own
    master stays, because the layer is gathered from it. So do the counters of steps.
    """
    if not states.shard_is_master:
        yield states.master, states.portions[0].put_master
    for piece in states.pieces:
        known = optimizer.state.get(piece.param, {})
        for name in optimizer.moments:
            if isinstance(known.get(name), torch.Tensor) and known[name].numel():
                yield known[name], partial(known.__setitem__, name)


def leaving(layers: dict[str, Zero3Layer], nbytes: int) -> list[str]:
    """
    ## The layers whose states leave, in the order in which they do

    As many as have `nbytes` together.
    """
    names = {layer: name for name, layer in layers.items()}
    optimizer = optimizer_on_device(next(iter(names)))
    found: dict[str, None] = {}
    if optimizer is None:
        return []
    for states in reversed(optimizer.shard_states):
        # When the first step has made the moments.
        movable_count = len(optimizer.moments) + (not states.shard_is_master)
        own_bytes = movable_count * len(states.shard) * states.master_dtype.itemsize
        if nbytes > 0 and own_bytes and states.layer in names:
            found[names[states.layer]] = None
            nbytes -= own_bytes
    return [*found]

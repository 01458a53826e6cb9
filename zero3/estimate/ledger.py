r"""
# The tape

`Ledger` records what each rank sends and holds. The communicator counts the bytes that it sends,
and at every event the `Ledger` adds up the storages that the model really holds. A layer of three
weights on two ranks, in fp32, goes through a forward pass like this:

| event | bytes of the event | live bytes | sent bytes |
|---|---|---|---|
| at rest | | 8: the shard | |
| fetch | 16: the flat parameter | 24 | 8 |
| gathered, compute, computed | | 24 | |
| free | 16 | 8 | |

$$\text{live} = \sum_{\text{distinct storages } s} \text{bytes}(s)
\qquad \text{peak} = \max_{\text{events}} \text{live}$$

**Run this**: `make train`; its table and `tape.png` are drawn from a `Ledger`.

**Not covered, and what that costs**: activations and their threads' blocks, sparse buffers, and
memory that is taken and given back between two events. On an accelerator times are the host's,
which queues the work long before the device does it.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from zero3.comm.order import Counted, Listener
from zero3.sharded import Sharded, ShardedModel
from zero3.watch import in_backward


@dataclass(frozen=True)
class Event:
    """
    ## One entry on the tape
    """

    time_s: float  # since the tape began, by the host's clock
    rank: int
    layer: str
    phase: str  # "forward", "backward" or "step"
    event: str  # one of those in the table of `Ledger`
    tier: str  # "device", "cpu" or "nvme": where the bytes are
    bytes: int  # of the event
    live_bytes: int  # that model and optimizer hold after it
    sent_bytes: int  # of parameters, gradients or norms, by this rank
    between_bytes: int  # those to ranks on other nodes


class Ledger(Listener):
    """
    ## Record a run

    `with Ledger(model, optimizer) as tape:` records every sharded layer of the model, on this rank.

    | event | when |
    |---|---|
    | fetch | an unshard starts: the buffer has its memory, the all-gather is in flight |
    | gathered | the unshard is complete |
    | compute, computed | the module starts and ends; in backward, the first gradient arrives |
    | gradients | the buffer for the layer's flat gradient has its memory |
    | reduce | a reduce-scatter starts; that of a bucket has its first layer's name |
    | exchange | replicas, or nodes, start to add the sums of a reduce |
    | reduced | the shard's gradient is there, for each layer of a bucket |
    | free | full parameters, or the buffers of a reduce, are freed |
    | norm | the ranks tell each other the norms of their gradients |
    | collect, give back | pieces go to the owners of whole parameters; new values come back |
    | step | a shard is updated |
    | offload, vacate | a compiled model copies optimizer states to CPU memory; they are freed |
    | reload | it copies them back: they have their memory |
    | read, arrived | reading from a file starts; it has ended |
    | write, written | writing to a file starts; it has ended |
    | buffers | the buffers between files and memory are made, larger than those so far |
    | activations out | what autograd has saved in a layer begins to leave, for another tier |
    | activations in | it begins to come back |
    | sum, gather | the ranks that split a layer exchange parts of it |
    | forward, send, ... | a pipeline has carried out an action: the kinds of `Action` |
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None):
        """
        ### Choose a model

        * `optimizer`, if given, has the memory that it holds counted among the live bytes
        """
        self.model = model
        self.optimizer = optimizer
        self.events: list[Event] = []
        self.messages = 0
        self.order_bytes = 0  # of announcements
        self.peak_live_bytes = 0
        self._steps = 0  # those that have begun and not ended

    @property
    def sent_bytes(self) -> int:
        return sum(e.sent_bytes for e in self.events)

    @property
    def between_bytes(self) -> int:
        """
        ### Those of `sent_bytes` that went to ranks on other nodes
        """
        return sum(e.between_bytes for e in self.events)

    def bytes_of(self, event: str) -> int:
        """
        ### The bytes of all events of a kind
        """
        return sum(e.bytes for e in self.events if e.event == event)

    # From files, and into them.
    read_bytes = property(lambda self: self.bytes_of("read"))
    written_bytes = property(lambda self: self.bytes_of("write"))
    # Activations that left, and those that came back.
    out_bytes = property(lambda self: self.bytes_of("activations out"))
    in_bytes = property(lambda self: self.bytes_of("activations in"))

    def __enter__(self) -> "Ledger":
        self._start_s = time.perf_counter()
        self.peak_live_bytes = held_bytes(self.model, self.optimizer)
        self._listen(self)
        self._hooks = [register_optimizer_step_pre_hook(partial(self._count_steps, 1)),
                       register_optimizer_step_post_hook(partial(self._count_steps, -1))]
        return self

    def __exit__(self, *exception) -> None:
        self._listen(Listener())
        for hook in self._hooks:
            hook.remove()

    def _listen(self, listener: Listener) -> None:
        for module in self.model.modules():
            if isinstance(module, Sharded | ShardedModel):
                vars(module)["listener"] = listener
        if hasattr(self.optimizer, "listener"):
            vars(self.optimizer)["listener"] = listener

    def _count_steps(self, change: int, *_) -> None:
        # The optimizer inside a `Zero3Optimizer` steps, too.
        self._steps += change

    def record(self, sender: Any,
               event: str,
               nbytes: int | None = 0,
               transfer: Counted | None = None,
               tier: str = "device") -> None:
        """
        ### Add an event, and look at what is alive

        * `nbytes` are the bytes of the event; `None` stands for the bytes freed since the last one
        * `transfer` is the collective that has started, if one has
        """
        if event == "fetch":
            # A step gathers nothing, so it is over, even if an exception ended it.
            self._steps = 0
        live_bytes = held_bytes(self.model, self.optimizer)
        if nbytes is None:
            nbytes = self.events[-1].live_bytes - live_bytes
        self.peak_live_bytes = max(self.peak_live_bytes, live_bytes)
        if transfer is not None:
            self.messages += transfer.messages
            self.order_bytes += transfer.order_bytes
        now_s = time.perf_counter() - self._start_s
        self.events.append(Event(
            now_s,
            sender.comm.global_rank,
            sender.label,
            "backward" if in_backward() else "step" if self._steps else "forward",
            event,
            tier,
            nbytes,
            live_bytes,
            transfer.sent_bytes if transfer else 0,
            transfer.between_bytes if transfer else 0,
        ))


def held_bytes(*holders: nn.Module | torch.optim.Optimizer | None) -> int:
    """
    ## Bytes of the distinct storages that modules and optimizers hold
    """
    with torch._C.DisableTorchFunctionSubclass():
        return sum(storages(t for part in _parts(holders) for t in _held_by(part)).values())


def storages(tensors: Iterable[torch.Tensor | None]) -> dict[int, int]:
    """
    ## The bytes of each storage, by the address of torch's object for it
    """
    found = [t.untyped_storage() for t in tensors if t is not None and t.layout == torch.strided]
    return {storage._cdata: storage.nbytes() for storage in found}


def disk_bytes(*holders: Any) -> int:
    """
    ## Bytes of the files that modules and optimizers use
    """
    return sum(offload.disk_bytes() for offload in {
        part.offload for part in _parts(holders) if hasattr(part, "offload")})


def _parts(holders: tuple) -> Iterator[Any]:
    """
    #### Each module by itself, and the optimizers
    """
    for holder in holders:
        if holder is not None:
            yield from holder.modules() if isinstance(holder, nn.Module) else [holder]


def _held_by(part: Any) -> Iterator[torch.Tensor | None]:
    """
    #### The tensors of a module without those inside it, or of an optimizer
    """
    if isinstance(part, nn.Module):
        params = [*part._parameters.values()]
        yield from part._buffers.values()
    else:
        params = [param for group in part.param_groups for param in group["params"]]
        for state in part.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))
    for param in params:
        # A shard in a file has no bytes here, and raises an error if asked for its gradient.
        if param is not None and param.untyped_storage().nbytes():
            yield param
            yield param.grad
    if hasattr(part, "held_tensors"):
        yield from part.held_tensors()

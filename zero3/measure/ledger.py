r"""
# The tape

`Ledger` records what ranks send and hold, so that every figure in the text can be measured on a
real run.

A sharded layer promises bytes: so many at rest, so many at the peak, so many on the wire. A promise
like this is checked where the bytes are. `Communicator` counts what it sends as it starts; and at every
event the `Ledger` adds up the storages that the model then really holds, instead of believing what
each event says of itself.

$$\text{live} = \sum_{\text{distinct storages } s} \text{bytes}(s)
\qquad \text{peak} = \max_{\text{events}} \text{live}$$

**Run this**: `make train`; its table and `tape.png` are drawn from a `Ledger`.

**Not covered, and what that costs**: activations are not the model's and are not counted; memory
that one event takes and gives back before it is recorded is not seen. On an accelerator times are
the host's: when it handed the work over, and not when the device did it, which may be much later.
Bytes are right there; how long a layer took, and what overlapped, `torch.profiler` tells.
"""

import dataclasses
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero3.comm import Transfer


def in_backward() -> bool:
    """
    ## Whether the autograd engine runs, on this thread
    """
    return torch._C._current_graph_task_id() != -1


def tensors_in(value: Any, look_inside: bool = True) -> Iterator[torch.Tensor]:
    """
    ## Every tensor in a nest of tuples, lists, dicts, dataclasses and attributes of modules

    * `look_inside` says that objects of other classes are searched too: their attributes, but not
      the objects in these, which could lead anywhere
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        value = [v for m in value.modules() for v in vars(m).values() if type(v) is torch.Tensor]
    elif isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    elif look_inside and hasattr(value, "__dict__"):
        look_inside = False
        value = [v for v in vars(value).values() if not isinstance(v, nn.Module)]
    for item in value if isinstance(value, (list, tuple)) else ():
        yield from tensors_in(item, look_inside)


@dataclass(frozen=True)
class Event:
    """
    ## One entry on the tape
    """

    time_s: float  # since the tape began, by the host's clock
    rank: int
    layer: str
    phase: str  # "forward", "backward" or "step"
    event: str  # what happened, see `Ledger`
    tier: str  # "device", "cpu" or "nvme": where the bytes lie
    bytes: int  # that the event is about
    live_bytes: int  # that model and optimizer hold after it
    sent_bytes: int  # of parameters, gradients or norms that it put on the wire


class Ledger:
    """
    ## Record what a model does

    `with Ledger(model, optimizer) as tape:` records what every sharded layer in the model does, on
    this rank. Outside the context a layer asks once per event whether somebody listens, and goes
    on.

    | event | when |
    |---|---|
    | fetch | an unshard starts: the buffer is there, the messages are under way |
    | gathered | the unshard is complete |
    | compute, computed | the module starts and ends; in backward, the first gradient arrives |
    | gradients | the buffer for the layer's flat gradient is there |
    | reduce | a reduce-scatter starts; that of a bucket has its first layer's name |
    | reduced | the shard's gradient is there, of each layer of a bucket |
    | free | full parameters, or the buffers of a reduce, are given back |
    | norm | the ranks tell each other the norms of their gradients |
    | step | a shard is updated |
    | read, arrived | reading from a file starts; what was read is here |
    | write, written | writing to a file starts; it is done |
    | buffers | the buffers between files and memory are made, larger than any before |
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None):
        """
        ### Choose whom to listen to

        * `model` holds `Zero3Layer`s, at any depth
        * `optimizer` has what it holds counted among the live bytes, where given
        """
        self.model, self.optimizer = model, optimizer
        self.events: list[Event] = []
        self.messages = self.sent_bytes = self.order_bytes = self.peak_live_bytes = 0
        self.read_bytes = self.written_bytes = 0  # from files and to files

    def __enter__(self) -> "Ledger":
        self._start_s = time.perf_counter()
        self.peak_live_bytes = held_bytes(self.model, self.optimizer)
        self._listen(self)
        return self

    def __exit__(self, *exception) -> None:
        self._listen(Silence())

    def _listen(self, ledger: "Ledger | Silence") -> None:
        for speaker in (*self.model.modules(), self.optimizer):
            if hasattr(speaker, "listener"):
                vars(speaker)["listener"] = ledger

    def record(
        self, layer: Any, event: str, nbytes: int | None = 0, transfer: Transfer | None = None,
        tier: str = "device",
    ) -> None:
        """
        ### Add an event, and look at what is alive

        * `nbytes` is what the event is about; `None` stands for what went since the event before
        * `tier` is where they lie
        """
        live_bytes = held_bytes(self.model, self.optimizer)
        if nbytes is None:
            nbytes = self.events[-1].live_bytes - live_bytes
        self.peak_live_bytes = max(self.peak_live_bytes, live_bytes)
        sent_bytes = transfer.sent_bytes if transfer else 0
        self.sent_bytes += sent_bytes
        self.messages += transfer.messages if transfer else 0
        self.order_bytes += transfer.order_bytes if transfer else 0
        now_s = time.perf_counter() - self._start_s
        self.read_bytes += nbytes * (event == "read")
        self.written_bytes += nbytes * (event == "write")
        phase = "step" if layer.comm.stepping else "backward" if in_backward() else "forward"
        self.events.append(Event(now_s, layer.comm.rank, layer.label, phase, event, tier,
                                 nbytes, live_bytes, sent_bytes))


class Silence:
    """
    ## The ledger of a layer to which nobody listens
    """

    def record(self, *args: Any, **kwargs: Any) -> None:
        """
        ### Do nothing
        """


def held_bytes(*holders: nn.Module | torch.optim.Optimizer | None) -> int:
    """
    ## Bytes of the distinct storages that modules and optimizers hold

    Parameters, gradients and buffers of modules, the flat buffers of sharded layers and what they
    have in flight, and the parameters, gradients and states of an optimizer.
    """
    tensors: list[torch.Tensor | None] = []
    for holder in holders:
        part: Any
        for part in holder.modules() if isinstance(holder, nn.Module) else (holder,):
            if hasattr(part, "offload"):
                tensors += part.offload.memory()
            # Where a master is not the shard's neighbour, the gradient is the master's.
            tensors += (states.grad for states in getattr(part, "shard_states", ()))
        if isinstance(holder, torch.optim.Optimizer):
            for state in holder.state.values():
                tensors += (t for t in state.values() if isinstance(t, torch.Tensor))
            for param in (p for group in holder.param_groups for p in group["params"]):
                tensors += (param, param.grad)
            continue
        for module in holder.modules() if holder is not None else ():
            tensors += module._buffers.values()
            for param in module._parameters.values():
                # One that rests in a file has no bytes here, and raises where its gradient is.
                if param is not None and param.untyped_storage().nbytes():
                    tensors += (param, param.grad)
            if hasattr(module, "listener"):
                groups: Any = module.flats
                tensors += (t for group in groups for t in (group.full, group.grad))
                comm: Any = module.comm
                for pair in comm.reducing.pairs if comm.reducing else ():
                    tensors += pair
    storages = [t.untyped_storage() for t in tensors if t is not None]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def disk_bytes(*holders: Any) -> int:
    """
    ## Bytes of the files in which modules and optimizers have something at rest
    """
    offloads: set[Any] = {part.offload for holder in holders for part in
                          (holder.modules() if isinstance(holder, nn.Module) else (holder,))
                          if hasattr(part, "offload")}
    return sum(os.fstat(file.fd).st_size for offload in offloads
               for store in offload.stores.values() for file in store.files)


def exponents(optimizer: Any) -> dict[int, int]:
    r"""
    ## How many gradients of this rank lie between $2^e$ and $2^{e+1}$, for each $e$

    Of a `Zero3Optimizer`, between backward and its step. Without the loss scale, and without those
    that are zero or overflow.
    """
    found: Counter[int] = Counter()
    for states in optimizer.shard_states:
        if states.has_grad:
            sizes = states.read_grad().float().abs() / optimizer.loss_scale
            powers, counts = sizes[sizes > 0].log2().floor().unique(return_counts=True)
            found.update(dict(zip(powers.int().tolist(), counts.tolist(), strict=True)))
    return {e: n for e, n in sorted(found.items()) if e < 128}

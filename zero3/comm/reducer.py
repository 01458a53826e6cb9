r"""
# The reduce in flight

`Reducer` has the reduce-scatter of a layer in flight while the layer below goes backward.

If every layer waited for its own reduce, nothing would overlap it. If no layer waited, all layers
could have their full gradients in memory at the end. So one reduce is in flight at a time. Three
layers, backward:

| layer that computes | its gradients are ready, and it | in flight |
|---|---|---|
| 2 | starts its reduce | |
| 1 | waits for that of 2, and starts its own | 2 |
| 0 | waits for that of 1, and starts its own | 1 |
| the pass ends | waits for that of 0 | 0 |

At most two layers have full gradients then, $2 P_\ell$ elements: one in flight, and one that is
being filled.

**Run this**: `python -m pytest tests/docs/test_timelines.py -k backward_gathers`.

**Not covered, and what that costs**: each small layer pays for a collective. The optimizer hands in
a `Bucket` that reduces several of them together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from zero3.comm.collectives import Communicator, Pairs, Transfer
from zero3.comm.order import Sender
from zero3.flat import GradientSink, Names, in_flight


class Reducer:
    """
    ## The reduce-scatter in flight

    Two more things may be in flight, one of each: an *exchange*, which adds the sums of several
    replicas or nodes, and a copy of a gradient to CPU memory.
    """

    scaled = False  # whether the loss was multiplied by a scale, as `Zero3Optimizer` does for fp16
    # The gradient on its way to CPU memory: on the device, kept because its memory would be used
    # again during the copy; in pinned memory, (shard_numel,); the event after the copy; who gets
    # it; and the names of the parameters that have contributed.
    _leaving: tuple[torch.Tensor, torch.Tensor, torch.Event, GradientSink, Names] | None = None

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.layers: Sequence[Reducible] = ()
        self.transfer: Transfer | None = None
        # Layers that have to finish before `backward()` returns.
        self.unsettled: set[Reducible] = set()
        # The exchange in flight, and the gradients that are views of its totals.
        self.exchange: Transfer | None = None
        self._exchanged: list[tuple[torch.Tensor, GradientSink, Names]] = []

    def make_way(self, layer: Reducible, pairs: Pairs) -> bool:
        """
        ### Finish the reduce in flight, and return whether to send these gradients now

        * `pairs` are as for `Communicator.reduce_scatter`

        Nothing is to be sent if they are in flight already. A bucket sends by itself.
        """
        # At the end of the pass `settle` offers the gradients of every layer once more.
        if layer in self.layers:
            return False
        self.land()
        return True

    def started(self, layers: Sequence[Reducible], transfer: Transfer) -> None:
        """
        ### Keep a reduce-scatter that has started
        """
        self.layers = layers
        self.transfer = transfer
        nbytes = sum(grad.nbytes for grad, _ in transfer.pairs)
        layers[0].listener.record(layers[0], "reduce", nbytes, transfer)

    def finish(self, layer: Reducible) -> None:
        """
        ### Finish the reduce of a layer's gradients, if it is in flight
        """
        if layer in self.layers:
            self.layers = ()
            layer.add_reduced(self.arrived())

    def arrived(self) -> list[torch.Tensor]:
        """
        ### Wait for the transfer in flight: this rank's parts of the sums

        If the sums are those of one replica or of one node, an exchange with the others starts. It
        overlaps backward until the next reduce has arrived.
        """
        transfer = self.transfer
        self.transfer = None
        assert transfer is not None
        sums = transfer.wait()
        self.end_exchange()
        totals, self.exchange = self.comm.exchange(transfer.sender, sums)
        return totals

    def end_exchange(self) -> None:
        """
        ### Wait for the exchange in flight, and deliver its gradients
        """
        exchange = self.exchange
        exchanged = self._exchanged
        self.exchange = None
        self._exchanged = []
        if exchange is not None:
            exchange.wait()
        for total, sink, names in exchanged:
            self.deliver(total, sink, names)

    def land(self) -> None:
        """
        ### Finish the reduce in flight
        """
        if self.layers:
            self.finish(self.layers[0])

    def end(self) -> None:
        """
        ### Finish everything: then all gradients are where they rest

        The last layer to settle calls it before `backward()` returns. So does the optimizer, after
        it has reduced what was held back.
        """
        self.land()
        self.end_exchange()
        self.delivered()
        self.comm.end_pass()

    def drop(self, layer: Reducible) -> None:
        """
        ### A layer forgets its gradients after an error: finish their reduce if it is in flight
        """
        self.finish(layer)

    def deliver(self, total: torch.Tensor, sink: GradientSink, names: Names) -> None:
        """
        ### Hand a reduced gradient to its sink

        * `total` is `(shard_numel,)`, on the device
        * `names` are the parameters that have contributed to it on this rank

        From an accelerator to CPU memory the backup stream copies it. The copy starts when the
        layer below has gone backward, and overlaps those below that one. The sink gets it when the
        next copy starts, or at the end of the pass.

        If an exchange starts, `end_exchange` calls this again when it has ended.
        """
        if self.exchange is not None:
            # The layer forgets the names, so keep a list.
            self._exchanged.append((total, sink, list(names)))
            return
        if sink.grad_device == total.device or sink.grad_device.type != "cpu":
            sink.add_grad(total, names)
            return
        self.delivered()
        arriving = torch.empty_like(total, device=sink.grad_device, pin_memory=True)
        # The backup stream waits for the compute stream, because a single rank has no reduce, and
        # backward itself wrote `total`.
        with self.comm.on(self.comm.backup_stream):
            in_flight.begin(self, total, arriving)
            arriving.copy_(total, non_blocking=True)
            event = self.comm.event()
            event.record()
        self._leaving = (total, arriving, event, sink, list(names))

    def delivered(self) -> None:
        """
        ### Wait for the gradient that is on its way to CPU memory
        """
        leaving = self._leaving
        self._leaving = None
        if leaving is not None:
            _, arriving, copied, sink, names = leaving
            # The host waits, because it reads the gradient next.
            copied.synchronize()
            in_flight.end(self)
            sink.add_grad(arriving, names)

    def held_tensors(self) -> Iterator[torch.Tensor]:
        """
        ### The buffers in flight, for a `Ledger`
        """
        for transfer in (self.transfer, self.exchange):
            if transfer is not None:
                for pair in transfer.pairs:
                    yield from pair
                yield from transfer.buffers
        yield from self.comm.held_tensors()


class Reducible(Sender, Protocol):
    """
    ## A layer, as far as the reducer has to know it
    """

    def add_reduced(self, totals: list[torch.Tensor]) -> None: ...

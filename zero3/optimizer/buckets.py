r"""
# Buckets: small layers share a reduce-scatter

`Bucket` lets the gradients of small layers wait for each other and reduces them together.

A collective takes a fixed time beside the time of its bytes. So small layers share one, in a
*bucket*.

**Two layers on two ranks.** Layer 1 is that of the example in `minimal.py`: its flat gradient on
rank 0 is 1 2 3 0, divided by two already. Layer 0 has the gradient 5 6. They are packed side by
side, one row for each rank:

| gradients of rank 0 | for rank 0 | for rank 1 |
|---|---|---|
| gradient of layer 1 | 1 2 | 3 0 |
| gradient of layer 0 | 5 | 6 |
| **packed gradients** | **1 2 5** | **3 0 6** |

Rank 0 keeps 1 2 5, adds the row that rank 1 has packed for it, and splits the sum again. If a
collective takes $t$ seconds beside its bytes, $n$ layers that share one save

$$(n - 1)\, t \quad \text{seconds}$$

The bytes on the wire are the same, and so are the sums, bit for bit, unless `Links` encodes the
gradients: then a block may have elements of two layers.

**Run this**: `python -m pytest tests/optimizer/test_stage3.py -k small_layers_share`.

**Not covered, and what that costs**: packing without a copy. The full gradients wait in memory
until the bucket is full, and while it is in flight they are there twice.
"""

from typing import Any

import torch

from zero3.comm.collectives import Communicator, Pairs
from zero3.comm.reducer import Reducer, Reducible


class Bucket(Reducer):
    """
    ## Reduce the gradients of small layers together

    `Zero3Optimizer` hands a bucket to its layers in place of their `Reducer`.
    """

    def __init__(self, comm: Communicator, bucket_bytes: int = 1 << 62):
        super().__init__(comm)
        # No bucket is ever as large as the default, so somebody else says when to send it.
        self.bucket_bytes = bucket_bytes
        # How many `no_sync()` contexts are open. Inside of one, the bucket sends nothing.
        self.holds = 0
        # A weak reference to the optimizer, where a compiled model finds the states of its layers.
        self.optimizer: Any = None
        # The gradients that wait, each with its receive buffer, by their layers.
        self.waiting: dict[Reducible, Pairs] = {}

    def make_way(self, layer: Reducible, pairs: Pairs) -> bool:
        """
        ### Put a layer's gradients in, and send the bucket when it is full

        Returns false, because the bucket sends by itself.
        """
        # The end of a backward pass offers every layer once more, also those that are here.
        if not (self.holds or layer in self.layers or layer in self.waiting):
            mine = {layer: pairs}
            if self._fills(mine) or self.comm.divisor == 1:
                # Send them at once, without a copy, ahead of the layers that wait.
                self._send(mine)
            else:
                self.waiting |= mine
                if self._fills(self.waiting):
                    self._send(self.waiting)
        return False

    def finish(self, layer: Reducible) -> None:
        """
        ### End the reduce of a layer's bucket, if there is one
        """
        if layer in self.waiting:
            self._send(self.waiting)
        if layer in self.layers:
            layers = self.layers
            # Clear them first: if the ranks diverged, `arrived` raises, and there is nothing to
            # end.
            self.layers = []
            # For each data type the sums of this rank's parts, side by side.
            parts = {dtype: iter(total.split(numels))
                     for (dtype, numels), total
                     in zip(self.numels.items(), self.arrived(), strict=True)}
            for each, dtypes in zip(layers, self.dtypes, strict=True):
                each.add_reduced([next(parts[dtype]) for dtype in dtypes])

    def drop(self, layer: Reducible) -> None:
        """
        ### Forget a layer's gradients while they wait; end their reduce if it has begun

        The other ranks take part in a reduce that has begun, so it has to end.
        """
        self.waiting.pop(layer, None)
        self.finish(layer)

    def end(self) -> None:
        """
        ### Send the layers that wait, and end all reduces
        """
        if self.waiting:
            self._send(self.waiting)
        super().end()

    def _send(self, gradients: dict[Reducible, Pairs]) -> None:
        """
        #### Start to reduce-scatter these gradients: one collective for each data type

        All ranks must call this with the gradients of the same layers.
        """
        self.land()
        # In the order of the layers, because gradients may arrive in another order on each rank.
        layers = sorted(gradients, key=lambda layer: -layer.layer_idx)
        every = [pair for layer in layers for pair in gradients[layer]]
        # By data type: each gradient as one row for each rank, (world_size, shard_numel).
        rows = {dtype: [self.comm.rows(grad) for grad, _ in every if grad.dtype == dtype]
                for dtype in dict.fromkeys(grad.dtype for grad, _ in every)}
        # For `finish`, in the order of packing: the data types of each layer's gradients, and for
        # each data type how many elements of each gradient this rank gets.
        self.dtypes = [[grad.dtype for grad, _ in gradients[layer]]
                       for layer in layers]
        self.numels = {dtype: [each.shape[1] for each in group]
                       for dtype, group in rows.items()}
        for layer in layers:
            self.waiting.pop(layer, None)
        # (world_size, sum of all shard_numel), device; without a copy, if there is one gradient.
        packed = {dtype: torch.cat(group, dim=1) if len(group) > 1 else group[0]
                  for dtype, group in rows.items()}
        # The memory of the first one's buffer becomes the receive buffer of all.
        buffers = {grad.dtype: buffer
                   for grad, buffer in reversed(every)}
        self.started(layers, self.comm.reduce_scatter(layers, [
            (each.view(-1), buffers[dtype]) for dtype, each in packed.items()]))

    def _fills(self, gradients: dict[Reducible, Pairs]) -> bool:
        return sum(grad.nbytes for pairs in gradients.values()
                   for grad, _ in pairs) >= self.bucket_bytes


class PlannedBucket(Bucket):
    """
    ## A bucket that is sent when the graphs of a compiled model say so
    """

    def send(self) -> None:
        """
        ### Send what waits, unless `no_sync()` holds it back
        """
        if self.waiting and not self.holds:
            self._send(self.waiting)

r"""
# Buckets: small layers are reduced together

`Bucket` keeps the gradients of small layers until several of them fill a bucket, and reduces the
bucket in one collective.

A collective takes the time of its bytes, and a fixed time besides. Many small layers would pay the
fixed time once each. In a bucket they pay it once. Three layers with 4 elements each, on two ranks:

| | a rank sends |
|---|---|
| each layer alone | 2 elements, three times |
| in one bucket | 6 elements, once |

$$\text{time} = \text{collectives} \cdot \text{fixed time} +
\frac{\text{bytes}}{\text{bandwidth}}$$

The bytes are the same. The price is memory: full gradients stay until the bucket leaves, and while
it is in flight they are in memory twice, packed and unpacked.

**Run this**: `make train ARGS="--bucket-kib 1024"`.

**Not covered, and what that costs**: a layer's gradients are packed by a copy, where a bucket that
was allocated in advance would need none.
"""

from typing import Any, NamedTuple

import torch

from zero3.comm import Communicator, Pairs, Reducer


class _Gradient(NamedTuple):
    """
    ## A flat gradient, and where it comes from
    """

    layer: Any
    number: int  # among the layer's gradients
    grad: torch.Tensor  # (world_size * shard_numel,), device
    buffer: torch.Tensor  # as many elements; its memory may become the receive buffer


class _Share(NamedTuple):
    """
    ## A layer's share of a reduced bucket
    """

    layer: Any
    number: int  # among the layer's gradients
    numel: int


class Bucket(Reducer):
    """
    ## A reducer that lets the gradients of small layers wait for each other
    """

    def __init__(self, comm: Communicator, bucket_bytes: int):
        super().__init__(comm)
        self.bucket_bytes = bucket_bytes
        # Inside `no_sync()`, or several of them, it sends nothing.
        self.holds = 0
        self.waiting: list[_Gradient] = []
        # Of the bucket in flight: the shares of each of its tensors.
        self.shares: list[list[_Share]] = []

    def keeps(self, layer: Any, pairs: Pairs) -> bool:
        """
        ### Put a layer's gradients into the bucket, and send it if it is full

        * `pairs` are as for `Communicator.reduce_scatter`

        Returns true, because it sends by itself.
        """
        # The end of a pass offers gradients again that are in flight or waiting already.
        is_known = layer in self.layers or layer in [gradient.layer for gradient in self.waiting]
        if self.holds or is_known:
            return True
        new = [_Gradient(layer, i, *pair) for i, pair in enumerate(pairs)]
        # A large layer goes alone, past those that wait, and without a copy. A single rank sends
        # nothing, so nothing waits.
        if self._fills(new) or self.comm.world_size == 1:
            self._send(new)
            return True
        self.waiting += new
        if self._fills(self.waiting):
            self._send_waiting()
        return True

    def _fills(self, gradients: list[_Gradient]) -> bool:
        return sum(gradient.grad.nbytes for gradient in gradients) >= self.bucket_bytes

    def _send_waiting(self) -> None:
        waiting = self.waiting
        self.waiting = []
        self._send(waiting)

    def _send(self, gradients: list[_Gradient]) -> None:
        """
        #### Send these gradients (reduce-scatter)

        The bucket in flight is finished first. Gradients of one data type become one tensor. They
        lie in it in the order of the layers and not in that of their arrival, which may differ
        between ranks. All ranks must send the same ones.
        """
        self.land()
        alike: dict[torch.dtype, list[_Gradient]] = {}
        for gradient in sorted(gradients, key=lambda gradient: -gradient.layer.layer_idx):
            alike.setdefault(gradient.grad.dtype, []).append(gradient)
        pairs = []
        self.shares = []
        for same in alike.values():
            # The buffer of the first one receives all of them.
            pairs.append((self._packed(same), same[0].buffer))
            self.shares.append([_Share(gradient.layer, gradient.number,
                                       len(gradient.grad) // self.comm.world_size)
                                for gradient in same])
        layers = list(dict.fromkeys(share.layer for shares in self.shares for share in shares))
        self.started(layers, self.comm.reduce_scatter(layers, pairs))

    def _packed(self, gradients: list[_Gradient]) -> torch.Tensor:
        """
        #### Pack gradients so that a rank's parts of all of them lie side by side

        Returns `(world_size * shard_numel,)`, where `shard_numel` is that of all of them together.
        """
        if len(gradients) == 1:
            return gradients[0].grad
        return torch.cat([self.comm.rows(gradient.grad) for gradient in gradients], dim=1).view(-1)

    def finish(self, layer: Any) -> None:
        """
        ### Finish the reduce of a layer's bucket, if there is one

        If the bucket still waits, it is sent first. All its layers get their sums, by
        `add_reduced`, as views of one tensor.
        """
        if layer in [gradient.layer for gradient in self.waiting]:
            self._send_waiting()
        if layer not in self.layers:
            return
        totals: dict[Any, dict[int, torch.Tensor]] = {layer: {} for layer in self.layers}
        self.layers = []
        for shares, total in zip(self.shares, self.arrived(), strict=True):
            parts = total.split([share.numel for share in shares])
            for share, part in zip(shares, parts, strict=True):
                totals[share.layer][share.number] = part
        for owner, found in totals.items():
            owner.add_reduced([found[number] for number in sorted(found)])

    def drop(self, layer: Any) -> None:
        """
        ### Forget a layer's gradients, if they wait
        """
        self.waiting = [gradient for gradient in self.waiting if gradient.layer is not layer]
        self.finish(layer)

    def end(self) -> None:
        """
        ### Finish everything, the layers that wait too
        """
        if self.waiting:
            self._send_waiting()
        super().end()

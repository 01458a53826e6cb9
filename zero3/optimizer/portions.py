r"""
# A portion of a shard's states: one place to rest

`Portion` keeps the master, the moments and the gradient of a range of a shard, on the device, in
CPU memory or in a file.

Most shards have one portion. With `Offload("cpu", fraction=0.6)` they have two: the first rests and
is stepped in CPU memory, the second stays on the device. So the states fill what the device has
left, and no more than the rest travels. **A shard of 5,000 fp32 weights**, with Adam and
`fraction=0.6`:

| | elements | master and moments | gradient |
|---|---|---|---|
| in the tier | 3,072 | 36,864 bytes | 12,288 bytes |
| on the device | 1,928 | 23,136 bytes | 7,712 bytes |

The cut is at the end of a block of 1,024 elements:

$$\text{elements in the tier} = \min\left(n,
\left\lceil \frac{\text{fraction} \cdot n}{1024} \right\rceil \cdot 1024\right)$$

In fp32 that is a block of a disk, so a file has no more bytes than the fraction needs. And the norm
adds squares in such blocks (`norm_of`), so clipping computes the same bits with any fraction.

[ZeRO-Offload++](https://github.com/deepspeedai/DeepSpeed/blob/v0.19.8/blogs/deepspeed-offloadpp/README.md)
calls it Twin-Flow.

**Run this**: `python -m pytest tests/offload/test_fraction.py`.

**Not covered, and what that costs**: a shard with at most 1,024 elements is not cut. The last bit
may depend on the fraction in three cases: two processors compute; under tensor parallelism the
blocks of a norm begin at a parameter; and torch's fused step rounds the few elements at the end of
a piece otherwise, so a cut matters in a param group that begins inside of a shard. Parameters that
are stepped whole take no fraction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3.flat import FlatParameter, Names
from zero3.gradients import BLOCK_NUMEL, block_norms
from zero3.guards.shard_gradients import GradientElsewhere, plain_part
from zero3.offload.in_file import InFile
from zero3.offload.tiers import Offload


class Share(NamedTuple):
    """
    ## A range of a shard, and the tier that its states are for
    """

    where: slice
    offload: Offload
    device: torch.device  # of the step

    @property
    def numel(self) -> int:
        return self.where.stop - self.where.start


class Here(NamedTuple):
    """
    ## A portion while it is in memory
    """

    where: slice  # in the shard
    master: torch.Tensor  # (n,)
    grad: Any  # (n,), if there is one


def inside(outer: slice, where: slice) -> slice:
    """
    ## A range of the shard as one of the range `outer`; empty if it lies elsewhere
    """
    begin, end = (min(max(bound, outer.start), outer.stop) - outer.start
                  for bound in (where.start, where.stop))
    return slice(begin, end)


def whole_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """
    ## The values of all portions, one after the other: a copy, if there are several
    """
    return parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].device) for part in parts])


def shares(offload: Offload, numel: int, device: torch.device, layer_device: torch.device
           ) -> list[Share]:
    """
    ## How the states of a shard of `numel` elements are divided

    * `device` computes the step of what is in the tier; `layer_device` that of the rest
    """
    blocks = -int(-offload.fraction * numel // BLOCK_NUMEL)
    cut = min(numel, blocks * BLOCK_NUMEL)
    found = [Share(slice(0, cut), offload, device),
             Share(slice(cut, numel), Offload(), layer_device)]
    return [share for share in found if share.where.start < share.where.stop]


@dataclass(eq=False, repr=False)
class Portion:
    """
    ## Master and gradient of a range of a shard, and the file of its states
    """

    flat: FlatParameter
    where: slice  # in the shard
    grad_dtype: torch.dtype
    device: torch.device  # of the step
    # Whether the master is this range of the shard itself.
    is_master: bool = False
    # (n,), fp32 or wider, in memory; `None` while it rests in a file.
    master: Any = None
    # The gradient is this parameter's `.grad`; `None` if it rests in a file.
    grad_holder: nn.Parameter | None = None
    in_file: InFile | None = None  # the states that rest in a file, always with the gradient
    file_norms: torch.Tensor | None = None  # of the gradient in the file, if there is one
    # Prefetch the states of these when this gradient has arrived.
    prefetch: Sequence["Portion"] = field(default_factory=list)

    @property
    def numel(self) -> int:
        return self.where.stop - self.where.start

    @property
    def counted(self) -> list[slice] | None:
        """
        ### The ranges of the portion that count for a norm; `None` stands for all
        """
        if self.flat.counted is None:
            return None
        return [self.inside(where) for where in self.flat.counted]

    def inside(self, where: slice) -> slice:
        """
        ### A range of the shard as one of this portion; empty if it is in another one
        """
        return inside(self.where, where)

    def open_file(self, in_file: InFile, values: torch.Tensor) -> None:
        """
        ### Let the states rest in a file, and write the master to it

        * `values` are the master's, `(n,)`
        """
        self.in_file = in_file
        if "master" in in_file.where:
            in_file.blank("master")["master"].copy_(values)
            in_file.write_async("master")

    # ------------------------------------------------------------------------------------ gradient

    @property
    def grad_device(self) -> torch.device:
        """
        ### Where a reduced gradient goes; on its way to a file, CPU memory
        """
        return torch.device("cpu") if self.grad_holder is None else self.grad_holder.device

    @property
    def grad(self) -> torch.Tensor | None:
        """
        ### The gradient as a plain tensor, if there is one and it rests in memory

        A `ShardGradient` would not tell the norm of one rank's part.
        """
        grad = self.grad_holder.grad if self.grad_holder is not None else None
        return None if grad is None or isinstance(grad, GradientElsewhere) else plain_part(grad)

    @property
    def has_grad(self) -> bool:
        return self.grad is not None or self.file_norms is not None

    def norms(self) -> torch.Tensor | None:
        """
        ### The norms of the gradient's blocks, `(blocks,)`, if there is one
        """
        grad = self.grad
        return self.file_norms if grad is None else block_norms(grad, self.counted)

    @torch.no_grad()
    def add_grad(self, total: torch.Tensor, names: Names = ()) -> None:
        """
        ### Add a reduced gradient, `(n,)`, on `grad_device`
        """
        if self.in_file is None:
            self._add_in_memory(total)
        else:
            self._add_in_file(self.in_file, total)

    def _add_in_memory(self, total: torch.Tensor) -> None:
        holder: Any = self.grad_holder
        # The sum of a bucket is a view, which would keep the whole bucket in memory.
        is_view = total.untyped_storage().nbytes() > total.nbytes
        total = total.to(holder.device, copy=is_view)
        holder.grad = total if holder.grad is None else holder.grad.add_(total)

    def _add_in_file(self, in_file: InFile, total: torch.Tensor) -> None:
        if self.file_norms is None:
            grad = in_file.blank("grad")["grad"].copy_(total)
        else:
            grad = in_file.wait("grad")["grad"].add_(total.cpu())
        # Take the norm now, or the step would have to read the gradient twice.
        self.file_norms = block_norms(grad, self.counted)
        in_file.write_async("grad")
        for portion in self.prefetch:
            if portion.in_file and (names := portion.stepped_names()):
                portion.in_file.read_async(*names)

    def read_grad(self) -> torch.Tensor | None:
        """
        ### The gradient, wherever it rests; a gradient in a file is copied into memory
        """
        if not self.has_grad or self.in_file is None:
            return self.grad
        grad = self.in_file.wait("grad")["grad"].clone()
        self.in_file.release()
        return grad

    def drop_grad(self, set_to_none: bool = True) -> None:
        """
        ### Forget the gradient, or set it to zero
        """
        if set_to_none:
            self.file_norms = None
            if self.grad_holder is not None and self.grad_holder is not self.flat.shard:
                self.grad_holder.grad = None
        elif self.grad is not None:
            self.grad.zero_()
        elif self.file_norms is not None and self.in_file is not None:
            self.file_norms = torch.zeros_like(self.file_norms)
            self.in_file.blank("grad")["grad"].zero_()
            self.in_file.write_async("grad")

    # ---------------------------------------------------------------------------------------- step

    def stepped_names(self) -> list[str]:
        """
        ### The states in the file that a step changes: all but the gradient
        """
        if self.in_file is None:
            return []
        return [name for name in self.in_file.where if name != "grad"]

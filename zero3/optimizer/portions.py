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

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3.comm.parts import inside
from zero3.flat import FlatParameter, Names
from zero3.gradients import block_norms
from zero3.guards.shard_gradients import plain_part
from zero3.layer import Zero3Layer
from zero3.offload.in_file import InFile
from zero3.offload.memory import copy_to
from zero3.offload.tiers import Offload

# An optimizer's states: for each parameter, its moments and counters by name.
State = MutableMapping[torch.Tensor, dict[str, Any]]


class Piece(NamedTuple):
    """
    ## A part of a master that the optimizer steps as one parameter
    """

    group_index: int  # of its param group
    where: slice  # in the shard
    param: nn.Parameter  # a view of the master; without elements while the master is in a file
    positions: list[int]  # of the parameters that it has elements of, in the flat parameter


class Here(NamedTuple):
    """
    ## A portion while it is in memory
    """

    where: slice  # in the shard
    master: torch.Tensor  # (n,)
    grad: Any  # (n,), if there is one


def whole_of(parts: list[torch.Tensor]) -> torch.Tensor:
    """
    ## The values of all portions, one after the other: a copy, if there are several
    """
    return parts[0] if len(parts) == 1 else torch.cat([part.to(parts[0].device)
                                                       for part in parts])


@dataclass(eq=False, repr=False)
class Portion:
    """
    ## Master, moments and gradient of a range of a shard
    """

    flat: FlatParameter
    where: slice  # in the shard
    offload: Offload  # says where the states rest
    device: torch.device  # of the step
    master_dtype: torch.dtype
    grad_dtype: torch.dtype
    # Whether the master is this range of the shard itself.
    is_master: bool = False
    # (n,); without elements while it rests in a file.
    master: Any = None
    pieces: list[Piece] = field(default_factory=list)  # those of the shard that are in here
    in_file: InFile | None = None  # the states that rest in a file, always with the gradient
    stepped: list[str] = field(default_factory=list)  # those of them that a step changes
    # The gradient, if it rests in memory, and not in the shard.
    own_grad: torch.Tensor | None = None
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
        return [inside(self.where, where) for where in self.flat.counted]

    # --------------------------------------------------------------------------------------- place

    @property
    def can_step_shard(self) -> bool:
        """
        ### Whether the optimizer can step the shard itself
        """
        in_memory = not isinstance(self.flat.storage, InFile)
        shard = self.flat.shard
        return in_memory and shard.dtype == self.master_dtype and shard.device == self.device

    def nbytes(self, moments: list[str]) -> int:
        """
        ### Bytes of master, moments and gradient, besides the shard
        """
        wide = len(moments) + (not self.can_step_shard)
        return self.numel * (wide * self.master_dtype.itemsize + self.grad_dtype.itemsize)

    def place(self, layer: Zero3Layer,
              values: torch.Tensor, moments: list[str]) -> None:
        """
        ### Put the states where they rest

        * `values` are those of the shard, `(n,)`
        * `moments` are the names of the tensors that the optimizer keeps for each parameter
        """
        storage = self.flat.storage
        in_file = self.offload.place(self.nbytes(moments)) == "nvme"
        shares_file = (in_file and isinstance(storage, InFile)
                       and self.numel == len(self.flat.shard)
                       and self.flat.shard.dtype == self.master_dtype)
        self.is_master = shares_file or self.can_step_shard
        if self.can_step_shard:
            self.master = values
        elif not in_file:
            self.master = copy_to(self.device, values, self.master_dtype, layer.device)
        if in_file:
            self._open_file(layer, values, moments)
        if shares_file:
            storage.share(self.in_file)  # type: ignore[attr-defined]

    def _open_file(self, layer: Zero3Layer,
                   values: torch.Tensor, moments: list[str]) -> None:
        """
        #### Let the states rest in a file, with the master unless it is the shard
        """
        # One zero for all elements: the wrapped optimizer finds the right size.
        zeros = torch.zeros(1, dtype=self.master_dtype).expand(self.numel)
        self.stepped = ["master"] * (self.master is None) + moments
        like = dict.fromkeys(self.stepped, zeros)
        like["grad"] = zeros.to(self.grad_dtype)
        buffers = self.offload.buffers_for("states", layer, self.offload.buffers)
        self.in_file = InFile(buffers, layer, like)
        if self.master is None:
            self.master = zeros
            self.in_file.blank("master")["master"].copy_(values)
            self.in_file.write_async("master")

    # ------------------------------------------------------------------------------------ gradient

    @property
    def grad_device(self) -> torch.device:
        """
        ### Where a reduced gradient goes; on its way to a file, CPU memory
        """
        return self.device

    @property
    def grad(self) -> torch.Tensor | None:
        """
        ### The gradient as a plain tensor, if there is one and it rests in memory

        A `ShardGradient` would not tell the norm of one rank's part.
        """
        if self.flat.sink is not None:
            return self.own_grad
        grad = self.flat.shard.grad
        return None if grad is None else plain_part(grad)

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
            # The sum of a bucket is a view, which would keep the whole bucket in memory.
            is_view = total.untyped_storage().nbytes() > total.nbytes
            total = total.to(self.device, copy=is_view)
            self.own_grad = total if self.own_grad is None else self.own_grad.add_(total)
            return
        if self.file_norms is None:
            grad = self.in_file.blank("grad")["grad"].copy_(total)
        else:
            grad = self.in_file.wait("grad")["grad"].add_(total.cpu())
        # Take the norm now, or the step would have to read the gradient twice.
        self.file_norms = block_norms(grad, self.counted)
        self.in_file.write_async("grad")
        for portion in self.prefetch:
            if portion.in_file and portion.stepped:
                portion.in_file.read_async(*portion.stepped)

    def read_grad(self) -> torch.Tensor | None:
        """
        ### The gradient, wherever it rests; a gradient in a file is copied into memory
        """
        if self.file_norms is None or self.in_file is None:
            return self.grad
        grad = self.in_file.wait("grad")["grad"].clone()
        self.in_file.release()
        return grad

    def drop_grad(self, set_to_none: bool = True) -> None:
        """
        ### Forget a gradient that is not in the shard, or set the gradient to zero
        """
        if set_to_none:
            self.file_norms = None
            self.own_grad = None
        elif self.grad is not None:
            self.grad.zero_()
        elif self.file_norms is not None and self.in_file is not None:
            self.file_norms = torch.zeros_like(self.file_norms)
            self.in_file.blank("grad")["grad"].zero_()
            self.in_file.write_async("grad")

    # ---------------------------------------------------------------------------------------- step

    @contextmanager
    def in_memory(self, state: State,
                  write: bool, stale: bool) -> Iterator[Here]:
        """
        ### Master, moments and gradient in memory, inside this context

        * `state` and `write` are as for `ShardStates.in_memory`
        * `stale` says that the caller has written into the shard
        """
        views = self.in_file.wait() if self.in_file is not None else {}
        master = self._current_master(views, stale)
        if master.data_ptr() != self.master.data_ptr():
            self.put_master(master)
        for known, name, view in self._moments(state, views):
            if not known[name].numel():
                known[name] = view
        try:
            yield Here(self.where, self.master, views.get("grad", self.grad))
            # Moments that the optimizer has made in this step.
            for known, name, view in self._moments(state, views):
                if known[name].data_ptr() != view.data_ptr():
                    known[name] = view.copy_(known[name])
            if self.in_file is not None and write and self.stepped:
                self.in_file.write_async(*self.stepped)
        finally:
            # Leave pieces and moments without elements: the next shard gets the buffer.
            for known, name, view in self._moments(state, views):
                if known[name].data_ptr() == view.data_ptr():
                    known[name] = view.new_empty(0)
            if self.in_file is not None:
                self.put_master(self.master.new_empty(0))
                if self.in_file.held:
                    self.in_file.release()

    def _current_master(self, views: dict[str, torch.Tensor], stale: bool) -> torch.Tensor:
        """
        #### The master, in memory, with what the caller has written into the shard
        """
        storage = self.flat.storage
        if self.is_master and "master" not in views:
            # `model.to("cpu:0")` gives the shard another memory.
            return storage.load()[self.where]
        master = views.get("master", self.master)
        if stale and not self.is_master:
            master.copy_(storage.load()[self.where])
            storage.release()
        return master

    def put_master(self, master: torch.Tensor) -> None:
        """
        ### Take another tensor as the master, and let the pieces be views of it

        * `master` has the same values, `(n,)`; or no elements, while they are elsewhere
        """
        self.master = master
        for piece in self.pieces:
            piece.param.data = master[inside(self.where, piece.where)]

    def _moments(self, state: State, views: dict[str, torch.Tensor]
                 ) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """
        #### Every moment in the file: its piece's states, its name in them, its view of the buffer
        """
        for piece in self.pieces if views else ():
            known = state.get(piece.param, {})
            for name, value in known.items():
                if name in views and isinstance(value, torch.Tensor):
                    yield known, name, views[name][inside(self.where, piece.where)]

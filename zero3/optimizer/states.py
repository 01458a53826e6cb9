r"""
# The states of a shard: master, moments, gradient, and where they rest

`ShardStates` keeps master, moments and gradient of one trainable shard, on the device, in CPU
memory or in a file.

**Three weights of a bf16 shard.** With Adam, a rank keeps these for them:

| | | | data type | bytes |
|---|---|---|---|---|
| shard | the layer gathers it | 1 2 3 | bf16 | 6 |
| *master* | the optimizer steps it | 1.0012 1.9993 3.0004 | fp32 | 12 |
| *moments* | the optimizer's memory of past gradients | two numbers for each weight | fp32 | 24 |
| gradient | from the backward pass until `zero_grad()` | .3 .2 .4 | bf16 | 6 |

The optimizer sees *pieces* of the master. If the first two weights decay and the third does not,
they belong to two param groups, and the master is cut into two pieces. Each piece is a parameter of
the wrapped torch optimizer. Master, moments and gradient have $\lceil P_\ell/N \rceil$ elements
each. With Adam and gradients of $b_g$ bytes that is

$$\underbrace{4}_{\text{master}} + \underbrace{4 + 4}_{\text{moments}}
+ \underbrace{b_g}_{\text{gradient}} \quad \text{bytes per element of a shard}$$

An fp32 shard that rests where it is stepped is its own master.

**States in files.** A step needs all states of a shard together. They stand side by side in the
file, so one read brings them all into one of a few buffers. The optimizer prefetches the states of
the next shards before it steps this one, and does not wait for the writes of the previous shards.

A reduced gradient moves at once to the tier of its master.

**States in two places.** What rests in one place is a *portion*. Most shards have one. With
`Offload("cpu", fraction=0.6)` they have two: the first rests and is stepped in CPU memory, the
second stays on the device. So states fill the free memory of the device, and only the rest
travels. A shard of 5,000 fp32 weights, with Adam and `fraction=0.6`:

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

**Pieces are cut once more** between parameters that are used in different steps, because the
optimizer counts the steps of each piece.

**Run this**: `make train ARGS="--offload-optimizer nvme"`; `tape.png` shows the reads and writes.
And `python -m pytest tests/offload/test_fraction.py`.

**Not covered, and what that costs**: reading a part of a shard's states, even if only one piece has
something to step. On an accelerator the step waits while an updated shard is copied back from CPU
memory.

A shard with at most 1,024 elements is not cut. The last bit may depend on the fraction in three
cases: two processors compute; under tensor parallelism the blocks of a norm begin at a parameter;
and torch's fused step rounds the few elements at the end of a piece differently, so a cut matters
in a param group that begins inside of a shard. Parameters that are stepped whole take no fraction.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3.comm.parts import inside, length
from zero3.flat import FlatParameter, Names, Slot
from zero3.gradients import BLOCK_NUMEL, block_norms, norm_of
from zero3.guards.shard_gradients import GradientElsewhere, elsewhere, mark
from zero3.layer import Zero3Layer
from zero3.offload.in_file import InFile
from zero3.offload.tiers import Offload, copy_to

# An optimizer's states: for each parameter, its moments and counters by name.
State = MutableMapping[torch.Tensor, dict[str, Any]]


@dataclass(eq=False)
class Member:
    """
    ## A parameter in a shard, as the optimizer sees it
    """

    name: str  # in the plain model
    slot: Slot  # its place in the flat parameter
    options: dict[str, Any]  # those that differ for it
    span: slice  # where in the shard it is; padding belongs to the parameter before it
    group_index: int = 0  # of its param group
    # Neighbours with equal keys are in one piece (see `repartition`).
    key: int = 0
    owner: int = 0  # the rank that steps it, if it is stepped whole

    @property
    def shape(self) -> torch.Size:
        return self.slot.view.shape


def is_whole(options: dict[str, Any]) -> bool:
    """
    ## Whether parameters with these options are stepped whole (see `whole.py`)
    """
    return "optimizer" in options


class Piece(NamedTuple):
    """
    ## A part of a master that the optimizer steps as one parameter
    """

    group_index: int  # of its param group
    where: slice  # in the shard
    param: nn.Parameter  # a view of the master; without elements while the master is in a file
    positions: list[int]  # of its parameters, in the flat parameter


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


class ShardStates:
    """
    ## Master, moments and gradient of a trainable shard
    """

    def __init__(self, layer: Zero3Layer,
                 name: str,
                 flat: FlatParameter,
                 params: list[Member],
                 offload: Offload,
                 device: torch.device):
        """
        ### Divide the states between a tier and the device

        * `name` is the layer's, for errors
        * `params` are the parameters in the flat one
        * `offload` says where they rest; the optimizer steps states of that tier on `device`
        """
        self.layer = layer
        self.name = name
        self.flat = flat
        self.shard = flat.shard
        self.params = params
        self.master_dtype = torch.promote_types(self.shard.dtype, torch.float32)
        # Brings master and moments back, if somebody has moved them elsewhere for a while, as a
        # compiled model does in forward (`compiler/away.py`).
        self.bring_back: Callable[[], None] = lambda: None
        numel = len(self.shard)
        cut = min(numel, -int(-offload.fraction * numel // BLOCK_NUMEL) * BLOCK_NUMEL)
        parts = [(slice(0, cut), offload, device),
                 (slice(cut, numel), Offload(), layer.device)]
        self.portions = [Portion(flat, *part, self.master_dtype)
                         for part in parts if part[0].start < part[0].stop]
        # Where a reduced gradient goes. The last of two portions is on the layer's device, and the
        # gradient goes on from there.
        self.grad_device = self.portions[-1].device

    @property
    def pieces(self) -> list[Piece]:
        return [piece for portion in self.portions for piece in portion.pieces]

    @property
    def master(self) -> Any:
        """
        ### The master, `(shard_numel,)`, of a shard with one portion; empty if it is in a file
        """
        (portion,) = self.portions
        return portion.master

    # --------------------------------------------------------------------------------------- place

    @torch.no_grad()
    def place(self, moments: list[str]) -> None:
        """
        ### Put master, moments and gradient where they rest

        * `moments` are the names of the tensors that the optimizer keeps for each parameter

        All ranks call this alike.
        """
        storage = self.flat.storage
        values = storage.load()  # (shard_numel,)
        for portion in self.portions:
            portion.place(self.layer, values[portion.where], moments)
        storage.release()
        first = self.portions[0]
        self.in_file = first.in_file
        self.shard_is_master = all(portion.is_master for portion in self.portions)
        in_memory = not isinstance(storage, InFile)
        stays = (in_memory and self.in_file is None and len(self.portions) == 1
                 and first.device == self.shard.device)
        # `Reducer.deliver` calls `add_grad` below, unless the gradient stays the shard's `.grad`.
        # Set it in either case, because an earlier optimizer may have put its own there.
        self.flat.sink = None if stays else self
        if in_memory:
            self.shard.__class__ = nn.Parameter if self.shard_is_master else CountedShard
            if self.flat.hook is not None:  # an earlier optimizer's
                self.flat.hook.remove()
            # A weak reference, because shard and hook would keep each other alive forever.
            self.flat.hook = self.shard.register_hook(
                partial(_before_accumulation, weakref.ref(self.flat)))
        self.repartition([param.group_index for param in self.params], {})
        # The shard's `_version` when shard and master last agreed.
        self.synced_version = self.shard._version

    # ------------------------------------------------------------------------------------ gradient

    def current(self) -> "list[Portion]":
        """
        ### The portions, with the gradients that the caller has left

        While the gradient rests elsewhere, the shard's `.grad` is a marker. `zero_grad()` of a
        module removes it, and with it the gradient. A tensor of the caller's replaces it.
        """
        found: Any = self.shard.grad
        if self.flat.sink is self and not isinstance(found, GradientElsewhere):
            for portion in self.portions:
                portion.drop_grad()
            if found is not None:
                self.shard.grad = None
                self.add_grad(found.as_subclass(torch.Tensor))
                self.layer.reducer.delivered()
                marker: Any = self.shard.grad
                marker.used = getattr(found, "used", None)
        return self.portions

    def grad_norm(self) -> torch.Tensor:
        """
        ### The norm of the gradient; zero if there is none
        """
        norms = [norms for portion in self.current() if (norms := portion.norms()) is not None]
        return norm_of(whole_of(norms)) if norms else torch.zeros((), device=self.layer.device)

    @torch.no_grad()
    def add_grad(self, total: torch.Tensor, names: Names = ()) -> None:
        """
        ### Add a reduced gradient, in the place of the master

        * `total` is `(shard_numel,)`, and `Reducer.deliver` has brought it to `grad_device`
        * `names` are the parameters that have contributed to it on this rank
        """
        self.current()
        # A marker says that there is a gradient elsewhere, and for which parameters.
        marker: Any = self.shard.grad
        if marker is None:
            marker = elsewhere(self.flat, self.shard)
            # A shard in a file would refuse it.
            with torch._C.DisableTorchFunction():
                self.shard.grad = marker
        mark(marker, self.flat, None, names)
        for portion in self.portions:
            self.layer.reducer.deliver(total[portion.where], portion, ())

    def read_grad(self) -> torch.Tensor | None:
        """
        ### The gradient, wherever it rests; a gradient in a file is copied into memory
        """
        grads = [grad for portion in self.current()
                 if (grad := portion.read_grad()) is not None]
        return whole_of(grads) if grads else None

    def drop_grad(self, set_to_none: bool = True) -> None:
        """
        ### Forget the gradient, or set it to zero
        """
        if set_to_none:
            self.shard.grad = None
        for portion in self.current():
            portion.drop_grad(set_to_none)

    # ---------------------------------------------------------------------------------------- step

    @contextmanager
    def in_memory(self, state: State,
                  write: bool = True) -> Iterator[list[Here]]:
        """
        ### Master, moments and gradient in memory, inside this context

        * `state` is the optimizer's, of all pieces
        * `write` says that the caller changes the master and the moments

        Yields the master and the gradient of each portion. At the end of a context with `write` the
        masters are rounded into the shard, and states in a file start to be written. After an
        exception the file is as it was.
        """
        self.bring_back()
        stale = self.synced_version != self.shard._version
        with ExitStack() as contexts:
            here = [contexts.enter_context(portion.in_memory(state, write, stale))
                    for portion in self.current()]
            yield here

        if write and self.shard_is_master:
            # The step has not raised the shard's own count, by which its layer notices a step.
            torch.autograd.graph.increment_version(self.shard)
        elif write:
            masters = [each.master for each in here]
            if len(masters) > 1:
                # Convert them first, so that fewer bytes travel.
                masters = [each.to(self.shard.device, self.shard.dtype)
                           for each in masters]
            # Rounded, this is what the layer gathers next.
            self.flat.storage.replace(whole_of(masters))
        if write or self.in_file is None:
            # If a master in a file was only read, the file still has the old one.
            self.synced_version = self.shard._version

    # --------------------------------------------------------------------------------------- pieces

    def repartition(self, keys: Sequence[object], state: State) -> None:
        """
        ### Cut the shard again: neighbouring parameters with equal keys are one piece

        * `keys` has one key for each parameter of the flat one. Those of two param groups are never
          in one piece
        * `state` is the optimizer's. A part of an old piece takes its part of the states along; a
          piece that was merged has none
        """
        self.bring_back()
        for param, key in zip(self.params, keys, strict=True):
            param.key = keys.index(key)
        # A whole one is a piece by itself.
        runs = groupby(
            (param for param in self.params if length(param.span)),
            lambda param: (param.group_index, param.key,
                           param if is_whole(param.options) else None))
        starts = {next(run).span.start for _, run in runs}
        old = {piece.param for piece in self.pieces}
        for portion in self.portions:
            where = portion.where
            bounds = sorted({where.start, where.stop,
                             *(each for each in starts if where.start < each < where.stop)})
            portion.pieces = [self._piece(portion, slice(*each), state)
                              for each in pairwise(bounds)]
        for gone in old - {piece.param for piece in self.pieces}:
            state.pop(gone, None)

    def _piece(self, portion: "Portion",
               where: slice,
               state: State) -> Piece:
        """
        #### An old piece, a part of one with its states, or a new one
        """
        old = next((piece for piece in portion.pieces if piece.where.start <= where.start
                    and where.stop <= piece.where.stop), None)
        if old and old.where == where:
            return old
        param = nn.Parameter(portion.master[inside(portion.where, where)])
        if old and old.param in state:
            # A counter, or a moment without elements because it rests in a file, is copied.
            state[param] = {
                name: value[inside(old.where, where)]
                if getattr(value, "shape", ()) == (length(old.where),)
                else copy.deepcopy(value) for name, value in state[old.param].items()}
        # Between steps the shard has the gradient. Without a marker, somebody who clips
        # `optimizer.param_groups` would find no gradients, and clip nothing.
        param.grad = elsewhere(self.flat, param)
        positions = [i for i, each in enumerate(self.params)
                     if max(each.span.start, where.start) < min(each.span.stop, where.stop)]
        return Piece(self.params[positions[0]].group_index, where, param, positions)

    def split_by_use(self, unused: set[Member], state: State) -> list[Piece]:
        """
        ### The pieces to step

        * `unused` are parameters without a gradient on any rank

        A piece with parameters of both kinds is split between them for good.
        """
        if not unused.isdisjoint(self.params):
            self.repartition([(param.key, param in unused) for param in self.params],
                             state)
        return [piece for piece in self.pieces
                if self.params[piece.positions[0]] not in unused]


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
    # (n,); without elements while it rests in a file.
    master: Any = None
    pieces: list[Piece] = field(default_factory=list)  # those of the shard that are in here
    in_file: InFile | None = None  # the states that rest in a file, always with the gradient
    stepped: list[str] = field(default_factory=list)  # those of them that a step changes
    # The gradient, if it rests in memory, and not in the shard.
    own_grad: torch.Tensor | None = None
    file_norms: torch.Tensor | None = None  # of the gradient in the file, if there is one
    # Each begins to read the states of another shard, when this gradient has arrived.
    prefetch: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        shard = self.flat.shard
        # The device that takes a reduced gradient: CPU memory, if it goes on to a file.
        self.grad_device = self.device
        # Whether the master is this range of the shard itself, which the optimizer can step then.
        self.is_master = (not isinstance(self.flat.storage, InFile)
                          and shard.dtype == self.master_dtype
                          and shard.device == self.device)
        # The ranges of the portion that count for a norm; `None` stands for all.
        self.counted = self.flat.counted and [inside(self.where, each)
                                              for each in self.flat.counted]

    # --------------------------------------------------------------------------------------- place

    def nbytes(self, moments: list[str]) -> int:
        """
        ### Bytes of master, moments and gradient, besides the shard
        """
        wide = len(moments) + (not self.is_master)
        grad_dtype = self.flat.shard.grad_dtype or self.flat.shard.dtype
        return length(self.where) * (wide * self.master_dtype.itemsize + grad_dtype.itemsize)

    def place(self, layer: Zero3Layer,
              values: torch.Tensor, moments: list[str]) -> None:
        """
        ### Put the states where they rest

        * `values` are those of the shard, `(n,)`
        * `moments` are as for `ShardStates.place`
        """
        self.master = values
        if self.offload.tier == "nvme":
            self._open_file(layer, values, moments)
        elif not self.is_master:
            self.master = copy_to(self.device, values, self.master_dtype, layer.device)

    def _open_file(self, layer: Zero3Layer,
                   values: torch.Tensor, moments: list[str]) -> None:
        """
        #### Let the states rest in a file, with the master unless it is the shard

        A shard that rests in a file, and has the master's data type, shares this one.
        """
        shard = self.flat.shard
        storage = self.flat.storage
        # One zero for all elements: the wrapped optimizer finds the right size.
        zeros = torch.zeros(1, dtype=self.master_dtype, device="cpu").expand(len(values))
        self.stepped = ["master"] * (not self.is_master) + moments
        self.in_file = InFile(
            self.offload.buffers_for("states", layer, self.offload.buffers),
            layer,
            {**dict.fromkeys(self.stepped, zeros), "grad": zeros.to(shard.grad_dtype)})
        if not self.is_master:
            self.master = zeros
            self.in_file.blank("master")["master"].copy_(values)
            self.in_file.write_async("master")
        if (isinstance(storage, InFile) and len(values) == len(shard)
                and shard.dtype == self.master_dtype):
            self.is_master = True
            storage.share(self.in_file)

    # ------------------------------------------------------------------------------------ gradient

    @property
    def grad(self) -> torch.Tensor | None:
        """
        ### The gradient as a plain tensor, if there is one and it rests in memory

        A `ShardGradient` refuses to give the norm of one rank's part.
        """
        grad = self.flat.shard.grad if self.flat.sink is None else self.own_grad
        return None if grad is None else grad.as_subclass(torch.Tensor)

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
        else:
            if self.file_norms is None:
                grad = self.in_file.blank("grad")["grad"].copy_(total)
            else:
                grad = self.in_file.wait("grad")["grad"].add_(total.cpu())
            # Take the norm now, or the step would have to read the gradient twice.
            self.file_norms = block_norms(grad, self.counted)
            self.in_file.write_async("grad")
            for read_async in self.prefetch:
                read_async()

    def read_grad(self) -> torch.Tensor | None:
        """
        ### The portion's gradient, wherever it rests; one in a file is copied into memory
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
        ### The portion's master, moments and gradient, in memory inside this context

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
            # Copy the moments that the optimizer has made in this step.
            for known, name, view in self._moments(state, views):
                if known[name].data_ptr() != view.data_ptr():
                    known[name] = view.copy_(known[name])
            if self.in_file is not None and write and self.stepped:
                self.in_file.write_async(*self.stepped)
        finally:
            # Drop all views of the buffer, because the next shard gets it.
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
            values = storage.load()[self.where].to(master.device)
            # An element that was not written keeps the digits that the shard does not have.
            master.copy_(torch.where(values == master.to(values.dtype), master, values))
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


class CountedShard(nn.Parameter):
    """
    ## A shard whose master is elsewhere: torch counts every write to it

    If the caller writes into the shard, the master has to take over the new values, or the step
    would undo the write. `.data` is as in `OpenParameter`, and setting it copies.
    """

    def _set_data(self, values: torch.Tensor) -> None:
        if [values.shape, values.dtype, values.device] == [self.shape, self.dtype, self.device]:
            self.detach().copy_(values)
        else:
            torch.autograd.graph.increment_version(self)
            vars(torch._C.TensorBase)["data"].__set__(self, values)

    data = property(torch.Tensor.detach, _set_data)  # type: ignore[assignment]


@torch.no_grad()
def _before_accumulation(flat_ref: weakref.ref[FlatParameter], grad: torch.Tensor) -> torch.Tensor:
    """
    #### A hook: autograd is about to add a gradient to the shard's `.grad`

    A regulariser over `model.parameters()` has such gradients. Return the sum with one that rests
    elsewhere. From now on all parameters count as used.
    """
    flat = flat_ref()
    found: Any = None if flat is None else flat.shard.grad
    if isinstance(found, GradientElsewhere):
        present = flat.sink.read_grad()  # type: ignore[union-attr]
        flat.shard.grad = None  # type: ignore[union-attr]
        if present is not None:
            grad = grad + present.to(grad.device, grad.dtype)
    elif found is not None and hasattr(found, "used"):
        found.used = None
    return grad


def moments_of(optimizer_class: Any,
               kwargs: dict[str, Any],
               group: dict[str, Any],
               two: torch.Tensor) -> tuple[list[str], int]:
    """
    ## The names of an optimizer's moments, and the bytes of its other states

    Found out by trying: after a step of a parameter of two elements, each state that has two
    elements of the same data type is a moment.

    * `two` is a tensor `(2,)` on the device of the step
    """
    tensors = {name: value
               for name, value in first_state(optimizer_class, kwargs, group, two).items()
               if isinstance(value, torch.Tensor)}
    moments = [name for name, value in tensors.items()
               if value.shape == two.shape and value.dtype == two.dtype]
    return moments, sum(value.nbytes
                        for name, value in tensors.items() if name not in moments)


def first_state(optimizer_class: Any,
                kwargs: dict[str, Any],
                group: dict[str, Any],
                two: torch.Tensor) -> dict[str, Any]:
    """
    ## The state that an optimizer has of a parameter, after a first step

    * `two` has its values: two elements in each dimension
    """
    param = nn.Parameter(two)
    param.grad = torch.zeros_like(two)
    # A class may draw random numbers.
    with seeded(two.device, 0):
        optimizer = optimizer_class([{**group, "params": [param]}], **kwargs)
        optimizer.step()
    return optimizer.state[param]


@contextmanager
def seeded(device: torch.device, seed: int) -> Iterator[None]:
    """
    ## Seed the random numbers of the CPU and of a device, and restore them afterwards
    """
    # `torch.manual_seed` would change those of every GPU, and a bare `fork_rng` open each GPU.
    gpu = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(gpu, device_type=device.type if gpu else "cuda"):
        torch.default_generator.manual_seed(seed)
        for each in gpu:
            backend = torch.get_device_module(each)
            with backend.device(each):
                backend.manual_seed(seed)
        yield

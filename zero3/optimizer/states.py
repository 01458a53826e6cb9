r"""
# The states of a shard: master, moments, gradient, and where they rest

`ShardStates` keeps everything that a rank has of one trainable shard beside the shard itself, on
the device, in CPU memory or in a file.

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

An fp32 shard that rests where it is stepped is its own master. If it and its states rest in files,
they share one.

**States in files.** A step needs all states of a shard together. They stand side by side in the
file, so one read brings them all into one of a few buffers. The optimizer prefetches the states of
the next shards before it steps this one, and does not wait for the writes of the previous shards.

A gradient goes to the place of the master as soon as it is reduced.

**Pieces are cut once more** between parameters that are used in different steps, because the
optimizer counts the steps of each piece.

**Run this**: `make train ARGS="--offload-optimizer nvme"`; `tape.png` shows the reads and writes.

**Not covered, and what that costs**: reading a part of a shard's states, even if only one piece has
something to step. On an accelerator the step waits while an updated shard is copied back from CPU
memory.
"""

import copy
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3.flat import FlatParameter, Names
from zero3.gradients import norm_of_parts
from zero3.guards.shard_gradients import GradientElsewhere, elsewhere, grad_of, plain_part, set_grad
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
    where: slice  # in the master
    param: nn.Parameter  # a view of the master; without elements while the master is in a file


@dataclass(eq=False, repr=False)
class ShardStates:
    """
    ## Master, moments and gradient of a trainable shard
    """

    layer: Zero3Layer
    name: str  # of the layer, for errors
    flat: FlatParameter
    grad_dtype: torch.dtype
    group_indices: list[int]  # the param group of each parameter in the flat one
    spans: list[slice]  # where in the shard each of these is; padding belongs to the one before it
    pieces: list[Piece] = field(default_factory=list)
    # The parameters that are stepped whole, by number. Each has pieces of its own.
    wholes: set[int] = field(default_factory=set)
    # (shard_numel,), fp32 or wider, in memory; `None` while it rests in a file.
    master: Any = None
    shard_is_master: bool = False
    # The gradient is this parameter's `.grad`; `None` if it rests in a file.
    grad_holder: nn.Parameter | None = None
    in_file: InFile | None = None  # the states that rest in a file, always with the gradient
    file_grad_norm: torch.Tensor | None = None  # of the gradient in the file, if there is one
    # Prefetch the states of these shards when this gradient has arrived.
    prefetch: list["ShardStates"] = field(default_factory=list)
    # The shard's `_version` when shard and master last agreed.
    synced_version: int = 0
    # Brings master and moments back, if somebody has moved them elsewhere for a while.
    away: Callable[[], None] | None = None

    @property
    def shard(self) -> nn.Parameter:
        return self.flat.shard

    @property
    def master_dtype(self) -> torch.dtype:
        """
        ### The data type of the master: fp32, or the shard's if that is wider
        """
        return torch.promote_types(self.shard.dtype, torch.float32)

    def nbytes(self, moments: list[str]) -> int:
        """
        ### Bytes of master, moments and gradient, if the shard is not the master
        """
        masters_and_moments = (1 + len(moments)) * self.master_dtype.itemsize
        return len(self.shard) * (masters_and_moments + self.grad_dtype.itemsize)

    def can_step_shard_on(self, device: torch.device) -> bool:
        """
        ### Whether the optimizer can step the shard itself on this device

        If so, the shard is its own master.
        """
        in_memory = not isinstance(self.flat.storage, InFile)
        same_dtype = self.shard.dtype == self.master_dtype
        return in_memory and same_dtype and self.shard.device == device

    # --------------------------------------------------------------------------------------- place

    @torch.no_grad()
    def place(self, offload: Offload, device: torch.device, moments: list[str]) -> None:
        """
        ### Put master, moments and gradient where they rest

        * `offload` says where; the optimizer steps on `device`
        * `moments` are the names of the tensors that the optimizer keeps for each parameter

        All ranks call this alike.
        """
        storage = self.flat.storage
        values = storage.load()  # (shard_numel,)
        tier = offload.place(self.nbytes(moments))
        share_file = (isinstance(storage, InFile) and tier == "nvme"
                      and self.shard.dtype == self.master_dtype)
        self.shard_is_master = share_file or self.can_step_shard_on(device)

        # In a file, `_open_file` writes the master.
        if self.can_step_shard_on(device):
            self.master = values
        elif tier != "nvme":
            self.master = copy_to(device, values, self.master_dtype, self.layer.device)

        if tier == "nvme":
            self.in_file = self._open_file(offload, values, moments)
        elif self.shard.device == device and not isinstance(storage, InFile):
            self.grad_holder = self.shard
        else:
            self.grad_holder = nn.Parameter(self.master)
            self.grad_holder.grad_dtype = self.grad_dtype
        if share_file:
            storage.share(self.in_file)  # type: ignore[union-attr, attr-defined]
        storage.release()

        self._receive_gradients(offload)
        # Cut it where the param group changes.
        self.repartition(self.group_indices, {})
        self.synced_version = self.shard._version

    def _open_file(self, offload: Offload, values: torch.Tensor, moments: list[str]) -> InFile:
        """
        #### Take space in a file, and write the master
        """
        master_in_file = self.master is None
        one = torch.empty(1, dtype=self.master_dtype).expand(len(values))
        like = {"master": one} if master_in_file else {}
        like |= {name: one for name in moments}
        like["grad"] = one.to(self.grad_dtype)
        buffers = offload.buffers_for("states", self.layer, offload.buffers)
        in_file = InFile(buffers, self.layer, like)
        if master_in_file:
            in_file.blank("master")["master"].copy_(values)
            in_file.write_async("master")
        return in_file

    def _receive_gradients(self, offload: Offload) -> None:
        """
        #### Have the flat parameter deliver its reduced gradients here

        `Reducer.deliver` then calls `add_grad` below, unless the gradient stays the shard's
        `.grad`.
        """
        # Set it in either case, because an earlier optimizer may have put its own there.
        self.flat.sink = None if self.grad_holder is self.shard else self
        self.flat.copies_views = offload.tier == "nvme"
        if not isinstance(self.flat.storage, InFile):
            self.shard.__class__ = nn.Parameter if self.shard_is_master else CountedShard
            self._hook_shard()

    def _elements(self, where: slice) -> torch.Tensor:
        """
        #### The elements of a new piece: a view of the master

        For a master in a file, one zero stands for all elements, so that the wrapped optimizer
        finds the right size.
        """
        if self.in_file is None:
            return self.master[where]
        return torch.zeros(1, dtype=self.master_dtype).expand(where.stop - where.start)

    def release_pieces(self, state: State) -> None:
        """
        ### Leave the pieces without elements, if the states rest in a file

        * `state` is the optimizer's. What its constructor made goes to the file
        """
        if self.in_file is None:
            return
        for piece in self.pieces:
            piece.param.data = piece.param.new_empty(0)
        if any(piece.param in state for piece in self.pieces):
            with self.in_memory(state):
                pass

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
        self._notice_replaced_grad()
        grad = self.grad_holder.grad if self.grad_holder is not None else None
        return None if grad is None or isinstance(grad, GradientElsewhere) else plain_part(grad)

    @property
    def has_grad(self) -> bool:
        return self.grad is not None or self.file_grad_norm is not None

    @property
    def used(self) -> set[tuple[str, ...]] | None:
        """
        ### Names of the parameters that got a gradient on this rank; `None` means all

        The flat gradient has zeros for a parameter that the loss did not depend on, but plain
        PyTorch does not step such a parameter.
        """
        return getattr(grad_of(self.shard), "used", None)

    def grad_norm(self) -> torch.Tensor | None:
        """
        ### The norm of the gradient, if there is one
        """
        grad = self.grad
        return self.file_grad_norm if grad is None else norm_of_parts(grad, self.flat.counted)

    @torch.no_grad()
    def add_grad(self, total: torch.Tensor, names: Names = ()) -> None:
        """
        ### Add a reduced gradient, in the place of the master

        * `total` is `(shard_numel,)`, and `Reducer.deliver` has brought it to that place
        * `names` are the parameters that have contributed to it on this rank
        """
        self._notice_replaced_grad()
        # A marker says that there is a gradient elsewhere, and for which parameters.
        marker: Any = grad_of(self.shard)
        if marker is None:
            marker = elsewhere(self.flat)
            set_grad(self.shard, marker)
        marker.note_used(names)
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
        if self.file_grad_norm is None:
            grad = in_file.blank("grad")["grad"].copy_(total)
        else:
            grad = in_file.wait("grad")["grad"].add_(total.cpu())
        # Take the norm now, or the step would have to read the gradient twice.
        self.file_grad_norm = norm_of_parts(grad, self.flat.counted)
        in_file.write_async("grad")
        for states in self.prefetch:
            if names := states._stepped_names():
                states.read_async(*names)

    def _notice_replaced_grad(self) -> None:
        """
        #### Follow changes of the shard's `.grad` while the gradient rests elsewhere

        `zero_grad()` of a module removes the marker, and with it the gradient. A tensor of the
        caller's replaces it.
        """
        found = grad_of(self.shard)
        if self.flat.sink is not self or isinstance(found, GradientElsewhere):
            return
        self._forget_grad()
        if found is not None:
            used = getattr(found, "used", None)
            set_grad(self.shard, None)
            self.add_grad(plain_part(found))
            grad_of(self.shard).used = used

    def _hook_shard(self) -> None:
        """
        #### Run `_before_accumulation` when autograd brings a gradient to the shard itself

        A regulariser over `model.parameters()` has such gradients, for instance.
        """
        for handle in self.flat.shard_hooks:
            handle.remove()
        # A weak reference, because shard and hook would keep each other alive forever.
        method_ref = weakref.WeakMethod(self._before_accumulation)

        def hook(grad: torch.Tensor) -> torch.Tensor:
            method = method_ref()
            return grad if method is None else method(grad)

        self.flat.shard_hooks = [self.shard.register_hook(hook)]

    @torch.no_grad()
    def _before_accumulation(self, grad: torch.Tensor) -> torch.Tensor:
        """
        #### Autograd is about to add a gradient to the shard's `.grad`

        Return the sum with one that rests elsewhere. From now on all parameters count as used.
        """
        found = grad_of(self.shard)
        if isinstance(found, GradientElsewhere):
            present = self.read_grad() if self.has_grad else None
            set_grad(self.shard, None)
            if present is not None:
                grad = grad + present.to(grad.device, grad.dtype)
        elif found is not None and hasattr(found, "used"):
            found.used = None
        return grad

    def _forget_grad(self) -> None:
        """
        #### Forget the gradient that rests elsewhere
        """
        self.file_grad_norm = None
        if self.grad_holder is not None and self.grad_holder is not self.shard:
            self.grad_holder.grad = None

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
            set_grad(self.shard, None)
            self._forget_grad()
        elif self.grad is not None:
            self.grad.zero_()
        elif self.file_grad_norm is not None and self.in_file is not None:
            self.file_grad_norm = torch.zeros_like(self.file_grad_norm)
            self.in_file.blank("grad")["grad"].zero_()
            self.in_file.write_async("grad")

    def drop_scaled_grad(self) -> None:
        """
        ### After a step, forget a gradient in a file

        The step has scaled it in the buffer only.
        """
        if self.in_file is not None:
            self.drop_grad()

    # ---------------------------------------------------------------------------------------- step

    def _stepped_names(self) -> list[str]:
        """
        #### The states in the file that a step changes: all but the gradient
        """
        if self.in_file is None:
            return []
        return [name for name in self.in_file.where if name != "grad"]

    def bring_back(self) -> None:
        """
        ### Have master and moments where the optimizer looks for them

        A compiled model may have moved them to CPU memory in forward (`compiler/away.py`).
        """
        if self.away is not None:
            self.away()

    @torch.no_grad()
    def put_master(self, master: torch.Tensor) -> None:
        """
        ### Take another tensor as the master

        * `master` has the same values, `(shard_numel,)`; or no elements, while they are elsewhere
        """
        self.master = master
        for piece in self.pieces:
            piece.param.data = master[piece.where]
        if self.grad_holder is not None and self.grad_holder is not self.shard:
            # It has the gradient, so it keeps its shape. One element stands for all.
            whole = master if len(master) else master.new_zeros(1).expand(len(self.shard))
            self.grad_holder.data = whole

    def read_async(self, *names: str) -> None:
        """
        ### Start to read these states, or all of them, if they rest in a file
        """
        if self.in_file is not None:
            self.in_file.read_async(*names)

    @contextmanager
    def in_memory(self, state: State, write: bool = True) -> Iterator[tuple[torch.Tensor, Any]]:
        """
        ### Master, moments and gradient in memory, inside this context

        * `state` is the optimizer's, of all pieces
        * `write` says that the caller changes the master and the moments

        Yields the master and the gradient. At the end of a context with `write` the master is
        rounded into the shard, and states in a file start to be written. After an exception the
        file is as it was.
        """
        self.bring_back()
        views = self.in_file.wait() if self.in_file is not None else {}
        master = views.get("master", self.master)
        self._follow_shard(master)
        if self.in_file is None:
            yield master, self.grad
        else:
            self._attach(state, views, master)
            try:
                yield master, views["grad"]
                self._store_new_moments(state, views)
                if write and self._stepped_names():
                    self.in_file.write_async(*self._stepped_names())
            finally:
                self._detach(state, views)
                if self.in_file.held:
                    self.in_file.release()

        if write and self.shard_is_master:
            # The step wrote past the shard's own count, by which its layer notices a step.
            torch.autograd.graph.increment_version(self.shard)
        elif write:
            # Round it to the shard's data type. This is what the layer gathers next.
            self.flat.storage.replace(master)
        if write or self.in_file is None:
            # If a master in a file was only read, the file still has the old one.
            self.synced_version = self.shard._version

    def _follow_shard(self, master: torch.Tensor) -> None:
        """
        #### Copy the shard into the master, if the caller has written into the shard

        A shard that is its own master also gets its memory back, because `model.to("cpu:0")` gives
        it another one, which the optimizer would not step.
        """
        if self.shard_is_master and self.in_file is None:
            values = self.shard.detach()
            if values.data_ptr() != master.data_ptr():
                master.copy_(values)
                self.shard.data = master
        if self.synced_version != self.shard._version and not self.shard_is_master:
            master.copy_(self.flat.storage.load())
            self.flat.storage.release()

    def _attach(self, state: State, views: dict[str, torch.Tensor], master: torch.Tensor) -> None:
        """
        #### Let pieces and moments be views of the buffer that was read into
        """
        for known, name, view in self._moments(state, views):
            if not known[name].numel():
                known[name] = view
        for piece in self.pieces:
            piece.param.data = master[piece.where]

    def _store_new_moments(self, state: State, views: dict[str, torch.Tensor]) -> None:
        """
        #### Copy moments that the optimizer has made in this step into the buffer
        """
        for known, name, view in self._moments(state, views):
            if known[name].data_ptr() != view.data_ptr():
                known[name] = view.copy_(known[name])

    def _detach(self, state: State, views: dict[str, torch.Tensor]) -> None:
        """
        #### Leave pieces and moments without elements: the next shard gets the buffer
        """
        for known, name, view in self._moments(state, views):
            if known[name].data_ptr() == view.data_ptr():
                known[name] = view.new_empty(0)
        for piece in self.pieces:
            piece.param.data = piece.param.new_empty(0)

    def _moments(
        self, state: State, views: dict[str, torch.Tensor]
    ) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """
        #### Every moment of every piece: its states, its name in them, and its view of the buffer
        """
        for piece in self.pieces:
            known = state.get(piece.param, {})
            for name, value in known.items():
                if name in views and isinstance(value, torch.Tensor):
                    yield known, name, views[name][piece.where]

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
        # Only parameters that have elements in this rank's shard. A whole one is a piece by itself.
        alone = [i if i in self.wholes else -1 for i in range(len(self.spans))]
        here = [each for each in zip(self.spans, self.group_indices, keys, alone, strict=True)
                if each[0].start < each[0].stop]
        old = self.pieces
        pieces = []
        for (group_index, *_), run in groupby(here, key=lambda each: each[1:]):
            spans = [span for span, *_ in run]
            where = slice(spans[0].start, spans[-1].stop)
            pieces.append(self._piece(group_index, where, state))
        self.pieces = pieces
        kept = {piece.param for piece in pieces}
        for piece in old:
            if piece.param not in kept:
                state.pop(piece.param, None)

    def _piece(self, group_index: int, where: slice, state: State) -> Piece:
        """
        #### An old piece, a part of one with its states, or a new one
        """
        for piece in self.pieces:
            whole = piece.where
            if whole == where:
                return piece
            if whole.start <= where.start and where.stop <= whole.stop:
                inside = slice(where.start - whole.start, where.stop - whole.start)
                param = nn.Parameter(piece.param.detach()[inside])
                if piece.param in state:
                    numel = whole.stop - whole.start
                    state[param] = _states_of_part(state[piece.param], inside, numel)
                return Piece(group_index, where, param)
        return Piece(group_index, where, nn.Parameter(self._elements(where)))

    def split_by_use(self, used: list[bool], state: State) -> list[Piece]:
        """
        ### The pieces to step if only some parameters have a gradient

        * `used` has a flag for each parameter of the flat one

        A piece with parameters of both kinds is split between them for good.
        """
        self.repartition([*zip(self.piece_numbers(), used, strict=True)], state)
        starts = {span.start for span, is_used in zip(self.spans, used, strict=True)
                  if is_used and span.start < span.stop}
        return [piece for piece in self.pieces if piece.where.start in starts]

    def piece_numbers(self) -> list[int]:
        """
        ### The number of the piece that each parameter of the flat one begins in

        `Zero3Optimizer.state_dict` saves these, and `repartition` takes them as keys.
        """
        return [sum(piece.where.start <= span.start for piece in self.pieces)
                for span in self.spans]


class CountedShard(nn.Parameter):
    """
    ## A shard whose master is elsewhere: torch counts every write to it

    If the caller writes into the shard, the master has to take over the new values, or the step
    would undo the write. torch counts writes in a tensor's `_version`, but not those through
    `.data`. So here `.data` is `.detach()`, which shares memory and count, and setting `.data`
    copies.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func == torch.Tensor.data.__get__:
                return args[0].detach()
            if func == torch.Tensor.data.__set__:
                shard, values = args
                new_layout = (values.shape, values.dtype, values.device)
                if new_layout == (shard.shape, shard.dtype, shard.device):
                    shard.detach().copy_(values)
                    return None
                torch.autograd.graph.increment_version(shard)
            return func(*args, **(kwargs or {}))


def _states_of_part(known: dict[str, Any], inside: slice, numel: int) -> dict[str, Any]:
    """
    #### The states of one part of a piece that was split
    """
    found = {}
    for name, value in known.items():
        is_moment = isinstance(value, torch.Tensor) and value.dim() == 1
        if is_moment and len(value) == numel:
            found[name] = value[inside]
        else:
            # A counter, or a moment without elements because it rests in a file.
            found[name] = copy.deepcopy(value)
    return found


def moments_of(
    optimizer_class: Any, kwargs: dict[str, Any], group: dict[str, Any], two: torch.Tensor
) -> tuple[list[str], int]:
    """
    ## The names of an optimizer's moments, and the bytes of its other states

    Found out by trying: after a step of a parameter of two elements, each state that has two
    elements of the same data type is a moment.

    * `two` is a tensor `(2,)` on the device of the step
    * `group` are the options of a param group
    """
    state = first_state(optimizer_class, kwargs, group, two)
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    moments = [name for name, value in tensors.items()
               if value.shape == two.shape and value.dtype == two.dtype]
    moment_bytes = len(moments) * two.nbytes
    return moments, sum(value.nbytes for value in tensors.values()) - moment_bytes


def first_state(optimizer_class: Any, kwargs: dict[str, Any], group: dict[str, Any],
                two: torch.Tensor) -> dict[str, Any]:
    """
    ## The state that an optimizer has of a parameter of two elements, after a first step
    """
    param = nn.Parameter(two)
    param.grad = torch.zeros_like(two)
    optimizer = optimizer_class([{**group, "params": [param]}], **kwargs)
    optimizer.step()
    return optimizer.state[param]

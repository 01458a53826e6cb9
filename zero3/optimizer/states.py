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

A gradient goes to the place of the master as soon as it is reduced. With a `fraction`, both have
two places (`portions.py`).

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3.flat import FlatParameter, Names
from zero3.gradients import norm_of
from zero3.guards.shard_gradients import (
    GradientElsewhere,
    at_rest,
    elsewhere,
    grad_of,
    plain_part,
    set_grad,
)
from zero3.layer import Zero3Layer
from zero3.offload.in_file import InFile
from zero3.offload.memory import copy_to
from zero3.offload.tiers import Offload
from zero3.optimizer.portions import Here, Portion, Share, shares, whole_of

# An optimizer's states: for each parameter, its moments and counters by name.
State = MutableMapping[torch.Tensor, dict[str, Any]]


class Piece(NamedTuple):
    """
    ## A part of a master that the optimizer steps as one parameter
    """

    group_index: int  # of its param group
    where: slice  # in the master
    param: nn.Parameter  # a view of the master; without elements while the master is in a file


class Cut(NamedTuple):
    """
    ## The elements of a parameter in a portion of a shard
    """

    where: slice  # in the shard
    position: int  # of the parameter in the flat one
    portion: int


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
    # One, or two if the states rest in two places.
    portions: list[Portion] = field(default_factory=list)
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

    @property
    def master(self) -> Any:
        """
        ### The master, `(shard_numel,)`, of a shard with one portion; `None` if it is in a file
        """
        (portion,) = self.portions
        return portion.master

    @property
    def in_file(self) -> InFile | None:
        """
        ### The file of the states, if they rest in one
        """
        return self.portions[0].in_file

    @property
    def shard_is_master(self) -> bool:
        return all(portion.is_master for portion in self.portions)

    def shares(self, offload: Offload, device: torch.device) -> list[Share]:
        """
        ### How the states are divided between the tier and the device
        """
        return shares(offload, len(self.shard), device, self.layer.device)

    def nbytes(self, share: Share, moments: list[str]) -> int:
        """
        ### Bytes of master, moments and gradient of a share, if the shard is not the master
        """
        masters_and_moments = (1 + len(moments)) * self.master_dtype.itemsize
        return share.numel * (masters_and_moments + self.grad_dtype.itemsize)

    def can_step_shard_on(self, device: torch.device) -> bool:
        """
        ### Whether the optimizer can step the shard itself on this device
        """
        in_memory = not isinstance(self.flat.storage, InFile)
        same_dtype = self.shard.dtype == self.master_dtype
        return in_memory and same_dtype and self.shard.device == device

    # --------------------------------------------------------------------------------------- place

    @torch.no_grad()
    def place(self, offload: Offload, device: torch.device, moments: list[str]) -> None:
        """
        ### Put master, moments and gradient where they rest

        * `offload` says where; the optimizer steps on `device` what is in its tier
        * `moments` are the names of the tensors that the optimizer keeps for each parameter

        All ranks call this alike.
        """
        values = self.flat.storage.load()  # (shard_numel,)
        self.portions = [self._portion(share, values[share.where], moments)
                         for share in self.shares(offload, device)]
        self.flat.storage.release()
        self._receive_gradients(offload)
        # Cut it where the param group changes.
        self.repartition(self.group_indices, {})
        self.synced_version = self.shard._version

    def _portion(self, share: Share, values: torch.Tensor, moments: list[str]) -> Portion:
        """
        #### Put a share of the states where it rests

        * `values` are those of the shard, `(n,)`
        """
        storage = self.flat.storage
        device = share.device
        tier = share.offload.place(self.nbytes(share, moments))
        is_whole = share.numel == len(self.shard)
        share_file = (isinstance(storage, InFile) and tier == "nvme" and is_whole
                      and self.shard.dtype == self.master_dtype)
        portion = Portion(self.flat, share.where, self.grad_dtype, device,
                          share_file or self.can_step_shard_on(device))

        # In a file, `open_file` writes the master.
        if self.can_step_shard_on(device):
            portion.master = values
        elif tier != "nvme":
            portion.master = copy_to(device, values, self.master_dtype, self.layer.device)

        if tier == "nvme":
            portion.open_file(self._new_file(share.offload, portion, moments), values)
        elif self.shard.device == device and not isinstance(storage, InFile) and is_whole:
            portion.grad_holder = self.shard
        else:
            portion.grad_holder = nn.Parameter(portion.master)
            portion.grad_holder.grad_dtype = self.grad_dtype
        if share_file:
            storage.share(portion.in_file)  # type: ignore[union-attr, attr-defined]
        return portion

    def _new_file(self, offload: Offload, portion: Portion, moments: list[str]) -> InFile:
        """
        #### Take space in a file
        """
        one = torch.empty(1, dtype=self.master_dtype).expand(portion.numel)
        like = {"master": one} if portion.master is None else {}
        like |= {name: one for name in moments}
        like["grad"] = one.to(self.grad_dtype)
        buffers = offload.buffers_for("states", self.layer, offload.buffers)
        return InFile(buffers, self.layer, like)

    def _receive_gradients(self, offload: Offload) -> None:
        """
        #### Have the flat parameter deliver its reduced gradients here

        `Reducer.deliver` then calls `add_grad` below, unless the gradient stays the shard's
        `.grad`.
        """
        # Set it in either case, because an earlier optimizer may have put its own there.
        self.flat.sink = None if self.portions[0].grad_holder is self.shard else self
        self.flat.copies_views = offload.tier == "nvme"
        if not isinstance(self.flat.storage, InFile):
            self.shard.__class__ = nn.Parameter if self.shard_is_master else CountedShard
            self._hook_shard()

    def _elements(self, where: slice) -> torch.Tensor:
        """
        #### The elements of a new piece: a view of the master

        For states in a file, one zero stands for all elements, so that the wrapped optimizer finds
        the right size.
        """
        portion = next(each for each in self.portions if where.start < each.where.stop)
        if portion.in_file is None:
            return portion.master[portion.inside(where)]
        return torch.zeros(1, dtype=self.master_dtype).expand(where.stop - where.start)

    def _pieces_of(self, portion: Portion) -> Iterator[tuple[Piece, slice]]:
        """
        #### The pieces in a portion, each with its range there
        """
        for piece in self.pieces:
            inside = portion.inside(piece.where)
            if inside.start < inside.stop:
                yield piece, inside

    def release_pieces(self, state: State) -> None:
        """
        ### Leave the pieces without elements, if the states rest in a file

        * `state` is the optimizer's. What its constructor made goes to the file
        """
        if self.in_file is None:
            return
        in_file = [piece.param for piece, _ in self._pieces_of(self.portions[0])]
        for param in in_file:
            param.data = param.new_empty(0)
        if any(param in state for param in in_file):
            with self.in_memory(state):
                pass

    # ------------------------------------------------------------------------------------ gradient

    @property
    def grad_device(self) -> torch.device:
        """
        ### Where a reduced gradient goes; those of two portions go on from the device
        """
        return self.portions[0].grad_device if len(self.portions) == 1 else self.layer.device

    def current(self) -> list[Portion]:
        """
        ### The portions, with the gradients that the caller has left
        """
        self._notice_replaced_grad()
        return self.portions

    @property
    def has_grad(self) -> bool:
        return all(portion.has_grad for portion in self.current())

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
        norms = [norms for portion in self.current() if (norms := portion.norms()) is not None]
        return norm_of(whole_of(norms)) if norms else None

    @torch.no_grad()
    def add_grad(self, total: torch.Tensor, names: Names = ()) -> None:
        """
        ### Add a reduced gradient, in the place of the master

        * `total` is `(shard_numel,)`, and `Reducer.deliver` has brought it to `grad_device`
        * `names` are the parameters that have contributed to it on this rank
        """
        self._notice_replaced_grad()
        # A marker says that there is a gradient elsewhere, and for which parameters.
        marker: Any = grad_of(self.shard)
        if marker is None:
            marker = elsewhere(self.flat)
            set_grad(self.shard, marker)
        marker.note_used(names)
        if len(self.portions) == 1:
            self.portions[0].add_grad(total)
            return
        for portion in self.portions:
            self.layer.reducer.deliver(total[portion.where], portion, ())

    def _notice_replaced_grad(self) -> None:
        """
        #### Follow changes of the shard's `.grad` while the gradient rests elsewhere

        `zero_grad()` of a module removes the marker, and with it the gradient. A tensor of the
        caller's replaces it.
        """
        found = grad_of(self.shard)
        if self.flat.sink is not self or isinstance(found, GradientElsewhere):
            return
        for portion in self.portions:
            portion.drop_grad()
        if found is not None:
            used = getattr(found, "used", None)
            set_grad(self.shard, None)
            self.add_grad(plain_part(found))
            self.layer.reducer.delivered()
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
            set_grad(self.shard, None)
        for portion in self.current():
            portion.drop_grad(set_to_none)

    def drop_scaled_grad(self) -> None:
        """
        ### After a step, forget a gradient in a file

        The step has scaled it in the buffer only.
        """
        if self.in_file is not None:
            self.drop_grad()

    # ---------------------------------------------------------------------------------------- step

    def bring_back(self) -> None:
        """
        ### Have master and moments where the optimizer looks for them

        A compiled model may have moved them to CPU memory in forward (`compiler/away.py`).
        """
        if self.away is not None:
            self.away()

    @torch.no_grad()
    def put_master(self, master: torch.Tensor, portion: Portion | None = None) -> None:
        """
        ### Take another tensor as the master of a portion; left out, of the only one

        * `master` has the same values, `(n,)`; or no elements, while they are elsewhere
        """
        portion = portion or self.portions[0]
        portion.master = master
        for piece, inside in self._pieces_of(portion):
            piece.param.data = master[inside]
        if portion.grad_holder is not None and portion.grad_holder is not self.shard:
            # It has the gradient, so it keeps its shape. One element stands for all.
            whole = master if len(master) else master.new_zeros(1).expand(portion.numel)
            portion.grad_holder.data = whole

    def read_async(self, *names: str) -> None:
        """
        ### Start to read these states, or all of them, if they rest in a file
        """
        if self.in_file is not None:
            self.in_file.read_async(*names)

    @contextmanager
    def in_memory(self, state: State, write: bool = True) -> Iterator[list[Here]]:
        """
        ### Master, moments and gradient in memory, inside this context

        * `state` is the optimizer's, of all pieces
        * `write` says that the caller changes the master and the moments

        Yields the master and the gradient of each portion. At the end of a context with `write` the
        masters are rounded into the shard, and states in a file start to be written. After an
        exception the file is as it was.
        """
        self.bring_back()
        with ExitStack() as contexts:
            here = [contexts.enter_context(self._portion_in_memory(portion, state, write))
                    for portion in self.current()]
            yield here

        if write and self.shard_is_master:
            # The step wrote past the shard's own count, by which its layer notices a step.
            torch.autograd.graph.increment_version(self.shard)
        elif write:
            # Round it to the shard's data type. This is what the layer gathers next.
            self._round(here)
        if write or self.in_file is None:
            # If a master in a file was only read, the file still has the old one.
            self.synced_version = self.shard._version

    @contextmanager
    def _portion_in_memory(self, portion: Portion, state: State, write: bool) -> Iterator[Here]:
        """
        #### Master, moments and gradient of a portion
        """
        in_file = portion.in_file
        views = in_file.wait() if in_file is not None else {}
        master = self._follow_shard(portion, views.get("master", portion.master))
        if in_file is None:
            yield Here(portion.where, master, portion.grad)
            return
        self._attach(portion, state, views, master)
        try:
            yield Here(portion.where, master, views["grad"])
            self._store_new_moments(portion, state, views)
            if write and portion.stepped_names():
                in_file.write_async(*portion.stepped_names())
        finally:
            self._detach(portion, state, views)
            if in_file.held:
                in_file.release()

    def _round(self, here: list[Here]) -> None:
        """
        #### Round the masters into the shard
        """
        storage = self.flat.storage
        if len(here) == 1:
            storage.replace(here[0].master)
            return
        values = storage.load()
        for each in here:
            values[each.where].copy_(each.master)
        storage.save()
        storage.release()

    def _follow_shard(self, portion: Portion, master: torch.Tensor) -> torch.Tensor:
        """
        #### Copy the shard into the master, if the caller has written into the shard

        A shard that is its own master also gets its memory back, because `model.to("cpu:0")` gives
        it another one, which the optimizer would not step.
        """
        if portion.is_master and portion.in_file is None:
            values = self.shard.detach()[portion.where]
            if values.data_ptr() != master.data_ptr():
                self.put_master(values, portion)
                return values
        if self.synced_version != self.shard._version and not portion.is_master:
            master.copy_(self.flat.storage.load()[portion.where])
            self.flat.storage.release()
        return master

    def _attach(self, portion: Portion, state: State, views: dict[str, torch.Tensor],
                master: torch.Tensor) -> None:
        """
        #### Let pieces and moments be views of the buffer that was read into
        """
        for known, name, view in self._moments(portion, state, views):
            if not known[name].numel():
                known[name] = view
        for piece, inside in self._pieces_of(portion):
            piece.param.data = master[inside]

    def _store_new_moments(self, portion: Portion, state: State, views: dict[str, torch.Tensor]
                           ) -> None:
        """
        #### Copy moments that the optimizer has made in this step into the buffer
        """
        for known, name, view in self._moments(portion, state, views):
            if known[name].data_ptr() != view.data_ptr():
                known[name] = view.copy_(known[name])

    def _detach(self, portion: Portion, state: State, views: dict[str, torch.Tensor]) -> None:
        """
        #### Leave pieces and moments without elements: the next shard gets the buffer
        """
        for known, name, view in self._moments(portion, state, views):
            if known[name].data_ptr() == view.data_ptr():
                known[name] = view.new_empty(0)
        for piece, _ in self._pieces_of(portion):
            piece.param.data = piece.param.new_empty(0)

    def _moments(
        self, portion: Portion, state: State, views: dict[str, torch.Tensor]
    ) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
        """
        #### Every moment of every piece: its states, its name in them, and its view of the buffer
        """
        for piece, inside in self._pieces_of(portion):
            known = state.get(piece.param, {})
            for name, value in known.items():
                if name in views and isinstance(value, torch.Tensor):
                    yield known, name, views[name][inside]

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
        old = self.pieces
        pieces = []
        for _, run in groupby(self._cuts(), key=lambda each: (
                # A whole one is a piece by itself.
                each.portion, self.group_indices[each.position], keys[each.position],
                each.position if each.position in self.wholes else -1)):
            cuts = [*run]
            where = slice(cuts[0].where.start, cuts[-1].where.stop)
            pieces.append(self._piece(self.group_indices[cuts[0].position], where, state))
        self.pieces = pieces
        for piece in pieces:
            at_rest(piece.param, self.flat)
        kept = {piece.param for piece in pieces}
        for piece in old:
            if piece.param not in kept:
                state.pop(piece.param, None)

    def _cuts(self) -> list[Cut]:
        """
        #### The parameters that have elements in this rank's shard, cut between the portions
        """
        found = []
        for position, span in enumerate(self.spans):
            for number, portion in enumerate(self.portions):
                where = slice(max(span.start, portion.where.start),
                              min(span.stop, portion.where.stop))
                if where.start < where.stop:
                    found.append(Cut(where, position, number))
        return found

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
        starts = {cut.where.start for cut in self._cuts() if used[cut.position]}
        return [piece for piece in self.pieces if piece.where.start in starts]

    def piece_numbers(self) -> list[int]:
        """
        ### The number of the piece that each parameter of the flat one begins in

        `Zero3Optimizer.state_dict` saves these, and `repartition` takes them as keys.
        """
        # Not those that begin at the cut between two portions: a parameter may lie on both sides.
        cuts = {portion.where.start for portion in self.portions[1:]}
        starts = {piece.where.start for piece in self.pieces} - cuts
        return [sum(start <= span.start for start in starts) for span in self.spans]


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

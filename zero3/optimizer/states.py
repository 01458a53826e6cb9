r"""
# The states of a shard: master, moments, gradient, and where they rest

`Owned` is all that this rank keeps of one trainable shard, wherever it is: on the device, in CPU
memory or in a file.

The *master* of a shard is its copy in fp32, or wider, which the optimizer steps; *moments* are what
it keeps for each element, two for Adam; a *piece* is a run of the master that belongs to one param
group, and the parameter that the optimizer inside sees. All three are $(\lceil P_\ell/N \rceil,)$
or less.

A step needs a shard's states once, all together, and then not before the next step. So where they
rest in a file they lie side by side and come in one go, into one of a few buffers; the optimizer
asks for the next ones before it steps these, and does not wait for those before to be back. Outside
of that a piece and its moments have no elements.

$$\underbrace{4}_{\text{master}} + \underbrace{4 + 4}_{\text{moments}}
+ \underbrace{b_g}_{\text{gradient}} \quad \text{bytes per element of a shard}$$

for Adam, with gradients of $b_g$ bytes. An fp32 shard that rests where it is stepped is its own
master and is not kept twice: in the same memory, or in the same file, of which the layer reads the
beginning.

The gradient goes where the master is as soon as it is reduced. In backward the disk has less to do
than in the step; so before the last few gradients arrive, the states that the step begins with
begin to be read. In a chain that has no more shards than there are buffers, they are not.

**Run this**: `make train ARGS="--offload-optimizer nvme"`; `tape.png` shows the reads and writes.

A piece whose parameters are used in different steps is cut between them, because the optimizer
counts the steps of each and begins the moments of each with its first gradient.

**Not covered, and what that costs**: a shard's states are read and written whole, even if one of
its pieces alone has something to step. On an accelerator updated shards on their way back from the
CPU are copied while it waits. With several micro-batches, states are
read ahead for each of them, and used for the last.
"""

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from zero3.flat import FlatParameter
from zero3.guards.gradients import (
    GradientElsewhere,
    elsewhere,
    grad_of,
    norm_of,
    plain_part,
    set_grad,
)
from zero3.layer import Zero3Layer
from zero3.offload import InFile, Offload, copy_to


class CountedShard(nn.Parameter):
    """
    ## A shard that has a master elsewhere

    The step rounds the master into the shard, so whatever somebody wrote into the shard has to come
    into the master before. torch counts writes in a tensor's `_version`, but not those through
    `.data`. Here `.data` is `.detach()`, which shares memory and count; and to set it is to copy.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            if func == torch.Tensor.data.__get__:
                return args[0].detach()
            if func == torch.Tensor.data.__set__:
                shard, values = args
                alike = (values.shape, values.dtype, values.device)
                if alike == (shard.shape, shard.dtype, shard.device):
                    shard.detach().copy_(values)
                    return None
            return func(*args, **(kwargs or {}))


@dataclass(eq=False, repr=False)
class Owned:
    """
    ## A trainable shard of this rank, with its master, moments and gradient
    """

    layer: Zero3Layer
    name: str  # of the layer
    group: FlatParameter
    grad_dtype: torch.dtype
    indices: list[int]  # the param group of each parameter in the flat one
    spans: list[slice]  # where in the shard each of these is; the padding goes with the last
    # Param group, where in the master, a view of it.
    pieces: list[tuple[int, slice, nn.Parameter]] = field(default_factory=list)
    # (shard_numel,), fp32 or wider, in memory; or the shard itself; or nothing, and it is in a file
    master: Any = None
    own: bool = False  # the shard is its own master
    holder: nn.Parameter | None = None  # whose `.grad` the gradient is, where that is in memory
    states: InFile | None = None  # the file
    norm: torch.Tensor | None = None  # of the gradient in the file
    ahead: list["Owned"] = field(default_factory=list)  # to be read once this gradient is here
    # torch counts what is written into a tensor in its `_version`. This is the shard's, when it and
    # its master were last the same.
    version: int = 0

    @property
    def shard(self) -> nn.Parameter:
        return self.group.shard

    @property
    def wide(self) -> torch.dtype:
        """
        ### The data type of the master
        """
        return torch.promote_types(self.shard.dtype, torch.float32)

    def nbytes(self, moments: list[str]) -> int:
        """
        ### Bytes of master, moments and gradient, with a master of its own
        """
        return len(self.shard) * ((1 + len(moments)) * self.wide.itemsize
                                  + self.grad_dtype.itemsize)

    def near(self, device: torch.device) -> bool:
        """
        ### Whether the shard itself can be stepped there
        """
        in_memory = not isinstance(self.group.storage, InFile)
        return in_memory and self.shard.device == device and self.shard.dtype == self.wide

    @property
    def grad(self) -> torch.Tensor | None:
        """
        ### The gradient, where it rests in memory: a plain tensor
        """
        self._look()
        grad = self.holder.grad if self.holder is not None else None
        return None if grad is None or isinstance(grad, GradientElsewhere) else plain_part(grad)

    @property
    def has_grad(self) -> bool:
        return self.grad is not None or self.norm is not None

    @property
    def used(self) -> set[tuple[str, ...]] | None:
        """
        ### Names of the parameters that the gradient is of, as far as this rank knows; or all
        """
        return getattr(grad_of(self.shard), "used", None)

    def grad_norm(self) -> torch.Tensor | None:
        """
        ### The norm of the gradient, if there is one
        """
        grad = self.grad
        return self.norm if grad is None else norm_of(grad)

    # ---------------------------------------------------------------------------------------- rest

    @torch.no_grad()
    def rest(self, offload: Offload, device: torch.device, moments: list[str]) -> None:
        """
        ### Choose where the states rest

        * `offload` says where; `device` is where they are stepped
        * `moments` are the names of the tensors that the optimizer keeps for each parameter

        All ranks call it alike.
        """
        layer, shard, storage, wide = self.layer, self.shard, self.group.storage, self.wide
        values = storage.load()  # (shard_numel,)
        tier = offload.place(self.nbytes(moments))
        in_one_file = isinstance(storage, InFile) and tier == "nvme" and shard.dtype == wide
        self.own = in_one_file or self.near(device)
        if self.near(device):
            self.master = values
        elif tier != "nvme":
            self.master = copy_to(device, values, wide, layer.device)

        if tier == "nvme":
            one = torch.empty(1, dtype=wide).expand(len(values))
            names = moments if self.master is not None else ["master", *moments]
            like = {name: one for name in names} | {"grad": one.to(self.grad_dtype)}
            store = offload.buffers_for("states", layer, offload.buffers)
            self.states = InFile(store, layer, like)
            if self.master is None:
                self.states.blank("master")["master"].copy_(values)
                self.states.write_async("master")
            if in_one_file and isinstance(storage, InFile):
                storage.share(self.states.file)
        elif shard.device == device and not isinstance(storage, InFile):
            self.holder = shard
        else:
            self.holder = nn.Parameter(self.master)
            self.holder.grad_dtype = self.grad_dtype
        storage.release()
        # An optimizer before this one may have put its own there.
        self.group.sink = self if self.holder is not shard else None
        self.group.copies_views = offload.tier == "nvme"
        if not isinstance(storage, InFile):
            shard.__class__ = nn.Parameter if self.own else CountedShard
            self._watch()
        # Elements that are all one, until `let_go`, because those of a file are not here.
        there = torch.zeros(1, dtype=wide).expand(len(values)) if self.states else self.master
        # A shard holds matrices and biases one after the other, and may begin or end inside of one.
        # It is cut where one param group ends and another begins.
        self.pieces = [(index, where, nn.Parameter(there[where]))
                       for where, index in self._runs(slice(0, len(values)), self.indices)]
        self.version = shard._version

    def let_go(self, state: Any) -> None:
        """
        ### Leave pieces without elements, where the states rest in a file

        * `state` is the optimizer's; what it has made already goes to the file
        """
        if self.states is not None:
            for *_, piece in self.pieces:
                piece.data = piece.new_empty(0)
            if any(piece in state for *_, piece in self.pieces):
                with self.here(state):
                    pass

    # ------------------------------------------------------------------------------------ gradient

    @property
    def grad_device(self) -> torch.device:
        """
        ### Where a reduced gradient goes; on its way to a file, CPU memory
        """
        return torch.device("cpu") if self.holder is None else self.holder.device

    @torch.no_grad()
    def add_grad(self, total: torch.Tensor) -> None:
        """
        ### Add to the gradient, where the master rests

        * `total` is the reduced gradient, `(shard_numel,)`; `Communicator.deliver` has brought it here

        The shard's own `.grad` then says that there is one, and of which parameters. The norm of
        one that goes to a file is taken while it is in memory, or a step would have to read it
        twice.
        """
        self._look()
        sign: Any = grad_of(self.shard)
        if sign is None:
            sign = elsewhere(self.group)
            set_grad(self.shard, sign)
        self.group.note_used(sign)
        if self.states is None:
            holder: Any = self.holder
            # Of a bucket it is a view, and would keep the shares that have gone to files.
            shared = total.untyped_storage().nbytes() > total.nbytes
            total = total.to(holder.device, copy=shared)
            holder.grad = total if holder.grad is None else holder.grad.add_(total)
            return
        if self.norm is None:
            grad = self.states.blank("grad")["grad"].copy_(total)
        else:
            grad = self.states.wait("grad")["grad"].add_(total.cpu())
        self.norm = norm_of(grad)
        self.states.write_async("grad")
        for first in self.ahead:
            if kept := first._kept():
                first.read_async(*kept)

    def _look(self) -> None:
        """
        #### Notice what somebody did to the shard's `.grad`, while the gradient rests elsewhere

        `zero_grad()` of a module or of an optimizer of torch's takes it away, and so the gradient
        is gone. A tensor that somebody put there is the gradient from now on.
        """
        found = grad_of(self.shard)
        if self.group.sink is not self or isinstance(found, GradientElsewhere):
            return
        self._forget()
        if found is not None:
            names = getattr(found, "used", None)
            set_grad(self.shard, None)
            self.add_grad(plain_part(found))
            grad_of(self.shard).used = names

    def _watch(self) -> None:
        """
        #### Have a gradient that autograd brings to the shard itself added to the one that is there

        That of a regulariser over `model.parameters()`, for instance.
        """
        for handle in self.group.shard_hooks:
            handle.remove()
        # Weakly, or shard and hook would keep each other for ever.
        ours = weakref.WeakMethod(self._take_along)
        self.group.shard_hooks = [self.shard.register_hook(
            lambda grad: method(grad) if (method := ours()) else grad)]

    @torch.no_grad()
    def _take_along(self, grad: torch.Tensor) -> torch.Tensor:
        """
        #### A gradient is about to be added to the shard's `.grad`

        It is of all parameters. If the one that is there rests elsewhere, it is brought along.
        """
        found = grad_of(self.shard)
        if isinstance(found, GradientElsewhere):
            before = self.read_grad() if self.has_grad else None
            set_grad(self.shard, None)
            if before is not None:
                grad = grad + before.to(grad.device, grad.dtype)
        elif found is not None and hasattr(found, "used"):
            found.used = None
        return grad

    def _forget(self) -> None:
        """
        #### Have no gradient elsewhere
        """
        self.norm = None
        if self.holder is not None and self.holder is not self.shard:
            self.holder.grad = None

    def read_grad(self) -> torch.Tensor | None:
        """
        ### The gradient, wherever it rests; from a file, a copy
        """
        if not self.has_grad or self.states is None:
            return self.grad
        grad = self.states.wait("grad")["grad"].clone()
        self.states.release()
        return grad

    def drop_grad(self, set_to_none: bool = True) -> None:
        """
        ### Forget the gradient, or make it zero
        """
        if set_to_none:
            set_grad(self.shard, None)
            self._forget()
        elif self.grad is not None:
            self.grad.zero_()
        elif self.norm is not None and self.states is not None:
            self.norm = torch.zeros_like(self.norm)
            self.states.blank("grad")["grad"].zero_()
            self.states.write_async("grad")

    def spent(self) -> None:
        """
        ### Forget a gradient that was scaled in a buffer, for it is not what the file has
        """
        if self.states is not None:
            self.drop_grad()

    # ---------------------------------------------------------------------------------------- step

    def _kept(self) -> list[str]:
        """
        #### What a step writes
        """
        return [name for name in self.states.where if name != "grad"] if self.states else []

    def read_async(self, *names: str) -> None:
        """
        ### Begin to read these states, or all, where they rest in a file
        """
        if self.states is not None:
            self.states.read_async(*names)

    @contextmanager
    def here(self, state: Any, write: bool = True) -> Iterator[tuple[torch.Tensor, Any]]:
        """
        ### Have master, moments and gradient in memory

        * `state` is the optimizer's, of all pieces
        * `write` says that the master and the moments will be written to

        Yields the master and the gradient. Afterwards the master is rounded into the shard, and
        what rests in a file is on its way there; after an exception the file is as it was.
        """
        views = self.states.wait() if self.states is not None else {}
        master = views.get("master", self.master)
        if self.version != self.shard._version and not self.own:
            # Somebody has written into the shard, `full_params(writeback=True)` for instance.
            master.copy_(self.group.storage.load())
            self.group.storage.release()
        if self.states is None:
            yield master, self.grad
        else:
            for kept, key, there in self._moments(state, views):
                if not kept[key].numel():
                    kept[key] = there
            for _, where, piece in self.pieces:
                piece.data = master[where]
            try:
                yield master, views["grad"]
                for kept, key, there in self._moments(state, views):
                    if kept[key].data_ptr() != there.data_ptr():
                        # Born in this step.
                        kept[key] = there.copy_(kept[key])
                if write and self._kept():
                    self.states.write_async(*self._kept())
            finally:
                # The buffer will be another's.
                for kept, key, there in self._moments(state, views):
                    if kept[key].data_ptr() == there.data_ptr():
                        kept[key] = there.new_empty(0)
                for _, _, piece in self.pieces:
                    piece.data = piece.new_empty(0)
                if self.states.held:
                    self.states.release()
        if write and not self.own:
            self.group.storage.replace(master)
        if write or self.states is None:
            # A master that was only read here is still the old one in its file.
            self.version = self.shard._version

    # --------------------------------------------------------------------------------------- pieces

    def cut(self, used: list[bool], state: Any) -> list[tuple[int, slice, nn.Parameter]]:
        """
        ### The pieces that are stepped, if a gradient came for these parameters alone

        * `used` says so for each parameter of the flat one
        * `state` is the optimizer's

        A piece that has some of both is cut there, for good: from now on the optimizer counts their
        steps, and whatever else it knows, apart. The new pieces' moments are views of the old
        one's.
        """
        pieces, stepped = [], []
        for index, where, piece in self.pieces:
            runs = self._runs(where, used)
            state_before = state.pop(piece, {}) if len(runs) > 1 else {}
            for run, uses in runs:
                part = piece
                if len(runs) > 1:
                    inside = slice(run.start - where.start, run.stop - where.start)
                    # In a file it has no elements now.
                    part = nn.Parameter(piece.detach()[inside] if len(piece) else piece.detach())
                    if state_before:
                        state[part] = _share(state_before, inside, where.stop - where.start)
                pieces.append((index, run, part))
                if uses:
                    stepped.append(pieces[-1])
        self.pieces = pieces
        return stepped

    def _runs(self, where: slice, kinds: list[Any]) -> list[tuple[slice, Any]]:
        """
        #### Cut a piece between neighbours of different kinds

        * `kinds` has something for each parameter of the flat one, to be compared
        """
        inside = []
        for span, kind in zip(self.spans, kinds, strict=True):
            begin, end = max(span.start, where.start), min(span.stop, where.stop)
            if begin < end:
                inside.append((slice(begin, end), kind))
        runs: list[tuple[slice, Any]] = []
        for span, kind in inside:
            if runs and runs[-1][1] == kind:
                runs[-1] = (slice(runs[-1][0].start, span.stop), kind)
            else:
                runs.append((span, kind))
        return runs

    def groups_here(self) -> int:
        """
        ### How many pieces the param groups alone make
        """
        return len(self._runs(slice(0, len(self.shard)), self.indices))

    def kinds(self) -> list[int]:
        """
        ### Which parameters of the flat one are in one piece: a number for each, alike in a piece
        """
        found = []
        for span in self.spans:
            found.append(sum(where.start <= span.start for _, where, _ in self.pieces))
        return found

    def recut(self, kinds: list[Any], state: Any) -> None:
        """
        ### Cut all pieces anew, between neighbours of different kinds, and forget their states

        * `kinds` has something for each parameter of the flat one, to be compared
        * `state` is the optimizer's
        """
        whole = slice(0, len(self.shard))
        runs = self._runs(whole, [*zip(self.indices, kinds, strict=True)])
        if [run for run, _ in runs] == [where for _, where, _ in self.pieces]:
            return
        for *_, piece in self.pieces:
            state.pop(piece, None)
        self.pieces = []
        for where, (index, _) in runs:
            memory = self.master[where] if self.states is None else torch.empty(0, dtype=self.wide)
            self.pieces.append((index, where, nn.Parameter(memory)))

    def _moments(self, state: Any, views: dict[str, torch.Tensor]) -> Iterator[tuple]:
        """
        #### Where the optimizer has each moment of a piece, and where it lies in the buffer
        """
        for _, where, piece in self.pieces:
            for key, value in state[piece].items():
                if key in views and isinstance(value, torch.Tensor):
                    yield state[piece], key, views[key][where]


def _share(state: dict[str, Any], inside: slice, numel: int) -> dict[str, Any]:
    """
    #### What an optimizer knows of a piece, for a part of it

    * `inside` is where in the piece of `numel` elements the part is
    """
    found = {}
    for key, value in state.items():
        moment = isinstance(value, torch.Tensor) and value.dim() == 1
        if moment and len(value) == numel:
            found[key] = value[inside]
        else:
            # A number; or a moment without elements, which is in a file.
            found[key] = copy.deepcopy(value)
    return found


def moments_of(
    optimizer_class: Any, kwargs: dict[str, Any], group: dict[str, Any], two: torch.Tensor
) -> tuple[list[str], int]:
    """
    ## What an optimizer keeps for a parameter: tensors of its size, and bytes beside them

    It says so itself, by a step with `two` elements: each state that then has two, of the same data
    type, is a moment.
    Returns the moments' names, and the bytes of everything else.

    * `two` is `(2,)`, where the step will be computed; `group` are a param group's options
    """
    param = torch.nn.Parameter(two)
    param.grad = torch.zeros_like(two)
    optimizer = optimizer_class([{**group, "params": [param]}], **kwargs)
    optimizer.step()
    found = {k: t for k, t in optimizer.state[param].items() if isinstance(t, torch.Tensor)}
    moments = [key for key, t in found.items() if t.shape == two.shape and t.dtype == two.dtype]
    return moments, sum(t.nbytes for t in found.values()) - len(moments) * two.nbytes

r"""
# ZeRO-3: parameters, gradients and optimizer states in shards

`Zero3Layer` wraps a layer of a model so that each rank *rests* with $\frac{1}{N}$ of it, and has
the whole layer only while it computes with it.

Plain data parallelism keeps the same model $N$ times. ZeRO's observation is that a rank needs a
layer's parameters only while that layer computes, and never needs the other ranks' optimizer
states. So each layer is flattened into one vector and cut into $N$ equal shards, and a rank owns
one of them, with its gradient and its optimizer state. Before a layer computes, forward and again
backward, the ranks *unshard* it (all-gather); right after, they *reshard* it (free the memory).
Once its gradients are there, a reduce-scatter gives each rank the mean gradient of its own shard
and of nothing else. Each rank then steps its shards with an ordinary optimizer, or with
`Zero3Optimizer`, which adds mixed precision and what needs the whole model's gradient.

$$\underbrace{\left\lceil \frac{P_\ell}{N} \right\rceil}_{\text{elements at rest, per layer}}
\qquad
\underbrace{3\Psi\,\frac{N-1}{N}}_{\text{elements sent, per rank and step}}$$

Two all-gathers and one reduce-scatter send $\Psi\frac{N-1}{N}$ elements each, where the all-reduce
of plain data parallelism sends $2\Psi\frac{N-1}{N}$: half as much traffic again buys $N$ times less
memory. The paper is [ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models](https://arxiv.org/abs/1910.02054); partitioned parameters are its section 5.3, their traffic
is 7.2.2.

| symbol | meaning |
|---|---|
| $\Psi$ | parameters of the model |
| $P_\ell$ | parameters of layer $\ell$; trainable and frozen ones are sharded, and counted, apart |
| $N$, $r$ | `world_size`, the number of ranks, and `rank`, this one |
| $K$ | optimizer bytes per parameter |

**Run this**: `make train` trains a small transformer on two ranks, and compares what each rank held
and sent with these formulas.

**Not covered, and what that costs**: outside a `Zero3Sequential` a layer does not know its
neighbours, so its unshard starts when it is called, and nothing hides the wait. Process subgroups
and sparse gradients raise errors. So does double backward (`create_graph=True`, in a gradient
penalty for instance), except inside of `full_params()`, which holds the whole layer meanwhile. A
layer that writes to its own parameters in forward raises an error, because each rank would lose
the write; only a write through `.data` in place (`weight.data.clamp_()`) goes unnoticed, and is
lost. A tensor is watched in tuples, lists, dicts, dataclasses, attributes of modules and of other
objects. If one that needs a gradient leaves or enters a layer by another way, backward reaches a
freed layer: autograd then raises "modified by an inplace operation". Autocast keeps a 16-bit copy
of every fp32 weight from forward to backward, and with that half of the memory that sharding has
saved; layers in bf16 with `Zero3Optimizer`'s fp32 masters keep none. Transforms of
`torch.func` around a layer raise errors; inside of its module they work. `torch.compile` around
layers runs them uncompiled: compile their modules, `layer.module.compile()`. Parameters outside of
layers are not reduced, unless `DistributedDataParallel` is around the whole.

Names are labml's where labml has one, and say the standard term. The order to read in: shard,
unshard, reshard, forward, backward, reduce, wiring.
"""

import dataclasses
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zero3.comm import Communicator, Transfer
from zero3.guards.contents import Contents, Known, uncompiled
from zero3.guards.gradients import clip_grad_norm_, mark
from zero3.guards.options import expect, whole
from zero3.measure.ledger import Ledger, Silence, in_backward, tensors_in
from zero3.offload import FreedParameter, InFile, InMemory, Offload


@dataclasses.dataclass(eq=False, repr=False)
class Slot:
    """
    ## Where one parameter lies in the flat parameter
    """

    param: nn.Parameter
    names: tuple[str, ...]  # several where the layer ties a parameter to itself
    offset: int  # elements
    view: torch.Tensor  # of the flat parameter, in the parameter's shape
    freed_class: type  # a `FreedParameter` that knows its name
    hook: Any = None  # the handle of its gradient's
    version: int = 0  # the parameter's `_version` while its values are here

    @property
    def end(self) -> int:
        return self.offset + self.view.numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.offset : self.end].view(self.view.shape)


@dataclasses.dataclass(repr=False)
class FlatParameter:
    """
    ## A flat parameter, and its shard

    All parameters of a layer that have one data type and are either all trainable or all frozen.
    """

    slots: list[Slot]
    full: torch.Tensor  # (world_size * shard_numel,), device; its storage has no bytes at rest
    receive_buffer: torch.Tensor  # whose memory messages with gradients arrive in: `full`, as a rule
    storage: InMemory | InFile  # where the shard rests
    shard: nn.Parameter  # (shard_numel,), what rests
    trains: bool  # whether its parameters get gradients, as of the last forward
    grad: Any = None  # as long; of the shard's `grad_dtype`; until the end of the reduce
    ready: set[tuple[str, ...]] = dataclasses.field(default_factory=set)  # names of what `grad` has
    grad_device: torch.device | None = None  # where the shard's gradient rests; left out, with it
    layer: Any = None  # a weak reference
    sink: Any = None  # who keeps the gradient, where it does not rest in the shard
    parts: bool = False  # of gradients that come in a bucket together, others go to files
    watch: list[Any] = dataclasses.field(default_factory=list)  # handles of hooks on the shard

    def padding(self) -> Iterator[slice]:
        """
        #### Where the flat parameter has padding: after a parameter, and at the end
        """
        begins = [*(slot.offset for slot in self.slots[1:]), len(self.full)]
        for slot, begin in zip(self.slots, begins, strict=True):
            if slot.end < begin:
                yield slice(slot.end, begin)

    def add_grad(self, total: torch.Tensor) -> None:
        """
        #### Add to the shard's gradient

        * `total` is the reduced gradient, `(shard_numel,)`

        `Zero3Optimizer` keeps it where the master rests.
        """
        if self.sink is not None:
            self.sink.add_grad(total)
            return
        # Of a bucket it is a view, and would keep the shares that have gone to files.
        shared = self.parts and total.untyped_storage().nbytes() > total.nbytes
        total = total.to(self.shard.device, copy=shared)
        if self.shard.grad is None:
            grad = mark(total, self, used=set())
        else:
            grad = mark(self.shard.grad.add_(total), self, used=None)
        self.note_used(grad)
        self.shard.grad = grad

    def note_used(self, grad: Any) -> None:
        """
        #### Note of which parameters a shard's gradient has something
        """
        if grad.used is not None:
            grad.used |= self.ready


class Call:
    """
    ## One forward call

    Only the hooks that the call left in the graph refer to it, so it lives as long as the graph.
    """

    inputs = outputs = 0  # tensors that need a gradient and came in, and went out


class Zero3Layer(nn.Module):
    """
    ## Zero3 layer

    Wrap each layer of a model, or a few consecutive ones, in this module. Called, it does what the
    module does. Through one training step a layer of the model goes through these states:

    | phase | event | full parameters | full gradients |
    |---|---|---|---|
    | rest | | freed | none |
    | forward | the layer before begins: *unshard* | arriving | none |
    | | it computes | whole | none |
    | | it is done: *reshard* | freed | none |
    | backward | the layer after begins: *unshard* | arriving | none |
    | | its own gradients arrive | whole | filling |
    | | the last one is here: *reshard*, *reduce* | freed | leaving, or waiting in a bucket |
    | | the next reduce begins, or the pass ends | freed | freed: the shard has its gradient |
    """

    # What to do about a parameter that is not where somebody looks for it.
    cure = ("wrap each module once, put modules that share a parameter into one Zero3Layer, and "
            "build the optimizer on `get_trainable_chunk()` after wrapping")
    # What to do about a layer or a parameter that was added.
    cure_for_new = ("wrap it in a `Zero3Layer` of its own, or assign it before this layer is "
                    "wrapped; and build the optimizer afterwards")

    def __init__(self, module: nn.Module, rank: int | None = None, world_size: int | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None,
                 offload: Offload | str | None = None):
        """
        ### Shard a module

        All ranks call this in the same order. Rank 0's values become everybody's. Buffers stay
        whole.

        * `module` is the layer to wrap, whole, on `device`
        * `rank` and `world_size` default to those of the process group; without one, to 0 and 1
        * `device` defaults to where the parameters are
        * `dtype` is what all parameters must be; left out, a layer may mix data types
        * `offload` says where the shards rest, as an `Offload` or as "cpu"; left out, on the device

        Raises `TypeError` for what is no module or no rank, and `ValueError` for what is no tier.
        Raises `RuntimeError` where the module is sharded already, shares a parameter with another
        layer, is elsewhere or of another dtype, or differs between ranks; and where there is no
        room for the shards.
        ZeRO, section 5.3. Keeps I2 and I5.
        """
        if not isinstance(module, nn.Module):
            expect(False, "Zero3Layer", "a module", repr(module), "pass the layer itself, and not "
                   "its class", TypeError)
        for number in (rank, world_size):
            expect(number is None or whole(number), "Zero3Layer", "whole numbers for `rank` and "
                   "`world_size`", repr(number), "leave them out, and take the process group's",
                   TypeError)
        super().__init__()
        self.module = module
        self.comm, self.offload = Communicator(rank, world_size), Offload.of(offload)
        # Neighbours and place in forward order; `Zero3Sequential` sets them.
        self.prev_layer, self.next_layer = [], []  # type: tuple[list[Zero3Layer], list[Zero3Layer]]
        self.layer_idx, self.label = -1, type(module).__name__
        self.listener: Ledger | Silence = Silence()
        # An unshard has started, and is complete once the transfer that does it was waited for.
        self.is_fetched = self._full_elsewhere = False  # the latter inside `full_params`
        # Calls that still go backward, and the one for whose backward the last layer stays full.
        self._pending: weakref.WeakSet[Call] = weakref.WeakSet()
        self._gather, self._kept = None, None  # type: tuple[Transfer | None, weakref.ref | None]
        # In this `backward()`: the calls that went, the parameters whose gradients are here, and
        # the input gradients that the calls owe.
        self._entered, self._arrived = set(), set()  # type: tuple[set[Call], set[tuple[str, ...]]]
        self._inputs_left = 0

        found, self.chunk = self._find_params(module), nn.ParameterList()
        self.device = self.comm.open(self, found, device, dtype)
        # Trainable first, as labml has it; and the handles of hooks on what is sharded.
        self.flats, self.refusals = [], []  # type: tuple[list[FlatParameter], list[Any]]
        kinds = dict.fromkeys((not p.requires_grad, p.dtype) for p in found)
        for kind in sorted(kinds, key=lambda kind: kind[0]):
            self._shard({p: n for p, n in found.items() if (not p.requires_grad, p.dtype) == kind})
        self._look_at(None)
        params: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
        # Once, also of a module that has two names.
        for owner in dict.fromkeys(owner for _, owner in _own_modules(module)):
            # From now on a plain attribute: the module finds the parameter by the same name, and
            # `parameters()` yields the shards alone.
            params[owner] = dict(owner._parameters)
            vars(owner).update(params[owner])
            owner._parameters.clear()
            for buffer in owner._buffers.values():
                self.comm.broadcast(buffer)
        self.contents = Contents(self, params)
        for owner in params:
            self.refusals += self.contents.refuse_state_dicts(owner)

    # -------------------------------------------------------------------------------------- shard

    def _find_params(self, module: nn.Module) -> dict[nn.Parameter, tuple[str, ...]]:
        """
        #### Find each parameter once, with its names

        Those inside of a further `Zero3Layer` in the module are that layer's affair.
        """
        self.expect(not isinstance(module, Zero3Layer), "is given", "a plain module", module,
                    self.cure)
        found: dict[nn.Parameter, tuple[str, ...]] = {}
        for prefix, owner in _own_modules(module):
            for name, p in (*vars(owner).items(), *owner._parameters.items()):
                self.expect(not isinstance(p, FreedParameter), f"cannot shard `{prefix}{name}`",
                            "a parameter of this layer alone", p, self.cure)
            for name, p in owner._parameters.items():
                if p is not None:
                    found[p] = (*found.get(p, ()), prefix + name)
        return found

    @torch.no_grad()
    def _shard(self, params: dict[nn.Parameter, tuple[str, ...]]) -> None:
        """
        #### Shard: make parameters views of one flat buffer, keep $1/N$ of it, free it
        """
        flat = self._merge_and_pad_params(list(params))  # (world_size * shard_numel,), device
        rest = self._empty(len(flat) // self.comm.world_size, flat.dtype)  # (shard_numel,), device
        self.comm.scatter(rest, flat)
        storage = self.offload.shard(self, rest, next(iter(params)).requires_grad)
        group = FlatParameter([], flat, flat, storage, storage.param, trains=False)
        group.layer = weakref.ref(self)
        offset = 0
        for p, names in params.items():
            view = flat[offset : offset + p.numel()].view(p.shape)
            freed = FreedParameter.kind(self, names[0], self.cure)
            group.slots.append(Slot(p, names, offset, view, freed))
            offset += self.comm.aligned(p.numel(), p.dtype)
        flat.untyped_storage().resize_(0)
        self.flats.append(group)
        self.chunk.append(group.shard)
        self._follow_requires_grad()

    def _merge_and_pad_params(self, params: list[nn.Parameter]) -> torch.Tensor:
        r"""
        #### Merge parameters, and pad so that the length is divisible by `world_size`

        Returns $N \lceil P_\ell/N \rceil$ elements. On an accelerator each parameter, and each
        rank's row, also begins at a multiple of 16 bytes: there matrix products, copies and NCCL
        are slow elsewhere, and $P_\ell$ counts the padding between parameters. The padding is zero
        and stays zero: its gradient is zero, so an elementwise optimizer does not move it, and it
        adds nothing to a norm. Memory that nobody wrote could hold a NaN. Here it would stay in the
        padding, and go into every checkpoint; in that of a gradient it would make the norm of all
        gradients NaN, and clipping by it every gradient of the model.
        """
        dtype = params[0].dtype
        pieces = []
        for p in params:
            padding_numel = self.comm.aligned(p.numel(), dtype) - p.numel()
            pieces += [p.detach().reshape(-1), self._empty(padding_numel, dtype).zero_()]
        numel = sum(map(len, pieces))
        row_numel = self.comm.aligned(-(-numel // self.comm.world_size), dtype)
        padding_numel = self.comm.world_size * row_numel - numel
        return torch.cat([*pieces, self._empty(padding_numel, dtype).zero_()])

    def _empty(self, numel: int, dtype: torch.dtype | None) -> torch.Tensor:
        """
        #### A vector that nobody wrote yet
        """
        return torch.empty(numel, device=self.device, dtype=dtype)

    def _follow_requires_grad(self) -> None:
        """
        #### Freeze and unfreeze parameters as their shard is

        `model.requires_grad_(False)` reaches the shards, because they are what `parameters()`
        yields. Before each forward the parameters follow.
        """
        for i, g in enumerate(self.flats):
            if g.trains == g.shard.requires_grad:
                continue
            g.trains = g.shard.requires_grad
            # A freed parameter would report the change as a use.
            with torch._C.DisableTorchFunction():
                for slot in g.slots:
                    slot.param.requires_grad_(g.trains)
                self._add_backward_hooks(i)

    def _add_backward_hooks(self, group: int) -> None:
        """
        #### Have each parameter of a group report its gradient

        * `group` is the index of the group
        """
        # A hook gets a weak reference and two indices. The garbage collector does not see the
        # hooks of a parameter, so whatever a hook refers to would stay for ever.
        ours = weakref.WeakMethod(self._post_backward_hook)
        for i, slot in enumerate(self.flats[group].slots):
            if slot.param.requires_grad and slot.hook is None:
                slot.hook = slot.param.register_post_accumulate_grad_hook(
                    lambda p, ours=ours, i=i: ours()(group, i, p))

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """
        ### This rank's trainable shards

        1-D parameters, one per data type, for this rank's optimizer. An elementwise optimizer does
        to a shard what it would do to the parameters, for it does not ask where an element belongs;
        but it steps one that was not used with a gradient of zero, which has none in plain PyTorch.
        """
        return [g.shard for g in self.flats if g.shard.requires_grad and len(g.shard)]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """
        ### Clip the gradient of this layer, as it is on all ranks together

        As for `Zero3Sequential`.
        """
        return clip_grad_norm_(self, max_norm, norm_type)

    # ------------------------------------------------------------------------------------ unshard

    def fetch_params(self) -> None:
        r"""
        ### Unshard (all-gather)

        Starts it and returns; `_wait_params` completes it. All ranks must call it. A rank sends its
        shard to each other one, $(N-1)\lceil P_\ell/N \rceil$ elements.

        The gather writes into the flat buffer that the parameters view, and into the *same storage*
        as every time, so what autograd saved in forward is valid again in backward. A gather into
        fresh memory and a copy from there would hold the layer twice.
        """
        if self.is_fetched or self._full_elsewhere or not self.flats:
            return
        self._enter_backward()
        # Gradients may still be coming in, into this very buffer.
        self.comm.reducer.finish(self)
        self.is_fetched = True
        self._gather = self._all_gather([g.full for g in self.flats])
        # What will be fetched next is read from its file meanwhile: forward the next layer, and at
        # the last one the one before, if a backward can come; in backward those it will come to.
        back = in_backward() or (not self.next_layer and torch.is_grad_enabled())
        for layer in self.prev_layer if back else self.next_layer:
            for g in layer.flats if layer._pending or not in_backward() else ():
                g.storage.read_async()

    @torch.no_grad()
    def _all_gather(self, fulls: list[torch.Tensor]) -> Transfer:
        """
        #### Bring the shards, and start to gather them

        A shard in CPU memory or in a file is copied to its place among the others first.
        """
        pairs = [(full, g.storage.load()) for full, g in zip(fulls, self.flats, strict=True)]
        gather = self.comm.all_gather(self, pairs)
        for g in self.flats:
            # What it was read into may be filled again once the fetch stream has copied it.
            g.storage.release(self.comm.fetch_stream)
        return gather

    def _wait_params(self) -> None:
        """
        #### Complete the unshard

        The compute stream waits for the fetch stream; on the CPU, this thread for the messages.
        """
        if self._gather is not None:
            gather, self._gather = self._gather, None
            gather.wait()
            self._open_params()

    def _open_params(self) -> None:
        """
        #### Let the parameters be used: their values are here
        """
        for slot in self._slots():
            slot.param.__class__ = nn.Parameter
        _set_versions(self._slots(), freed=False)

    def _close_params(self) -> None:
        """
        #### Report each use of the parameters from now on: their memory is about to go

        Torch counts the changes of a tensor in its `_version`, and backward compares the count with
        that of forward before it uses what forward saved. A freed parameter has another count. So a
        backward pass that reaches it unexpectedly raises an error; without this it would read
        address zero and end the interpreter.
        """
        for slot in self._slots():
            slot.param.__class__ = slot.freed_class
        _set_versions(self._slots(), freed=True)

    def _check_params(self) -> None:
        """
        #### Make sure that nobody has written to the parameters

        A write would be lost when the memory is freed, and each rank would have written its own.
        Some modules give a parameter other memory with the same values, as `nn.LSTM` does on a GPU:
        the parameter gets its place in the flat buffer back.

        Raises `RuntimeError`.
        """
        # Inside of `full_params` a write is allowed, and the flat buffers have no memory.
        for slot in self._slots() if self.is_fetched else ():
            # A unit that stays full for others is closed already, and would report this as a use.
            with torch._C.DisableTorchFunction():
                written = self._take_back(slot)
            self.expect(
                not written, f"has written to `{slot.names[0]}`", "parameters that only an "
                "optimizer changes", "a write in forward or backward, which each rank would lose "
                "with the full parameter", "write to the shards between two steps (`for p in "
                "model.get_trainable_chunk(): p.clamp_(...)` under `torch.no_grad()`), or in `with "
                "model.full_params(writeback=True)`")

    def _take_back(self, slot: Slot) -> bool:
        """
        #### Have a parameter in its place again, and return whether somebody wrote to it
        """
        param = slot.param
        written = param._version != slot.version
        if param.data_ptr() != slot.view.data_ptr():
            # To compare waits for the device, but only modules that move parameters come here.
            written = param.shape != slot.view.shape or not torch.equal(param, slot.view)
            param.data = slot.view
        if written:
            slot.version = param._version
        return written

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """
        ### The full parameters, by their original names

        All ranks enter and leave. Inside, the layer may be read, called and written to. With
        `writeback=True` what rank 0 wrote is sharded at the end. If a rank raises an exception in
        the block, nothing is written, and the other ranks raise `RuntimeError`. Afterwards the
        parameters are freed again: `clone` what should stay.
        """
        self._cleanup_params()
        # Into a buffer of its own: a view of it that somebody keeps stays valid.
        with torch.inference_mode(False), torch.no_grad():
            fulls = [self._empty(len(g.full), g.full.dtype) for g in self.flats]
            self._all_gather(fulls).wait()
        self._look_at(fulls)
        try:
            yield {name: slot.param for slot in self._slots() for name in slot.names}
        except BaseException as error:
            if writeback and not isinstance(error, GeneratorExit):
                # The other ranks are about to write back, and wait for this one.
                self.comm.gather(f"{type(error).__name__}: {error}")
            raise
        else:
            if writeback:
                self._write_back(fulls)
        finally:
            self._look_at(None)

    @torch.no_grad()
    def _write_back(self, fulls: list[torch.Tensor]) -> None:
        """
        #### Shard what rank 0 has written

        First the ranks tell each other whether all of them are here with something to shard. Raises
        `RuntimeError` on all ranks where one is not.
        """
        problem = ""
        for full, g in zip(fulls, self.flats, strict=True):
            for slot in g.slots:
                place = slot.of(full)
                param = slot.param
                if param.shape != place.shape or param.dtype != place.dtype:
                    problem = (f"`{slot.names[0]}` of {tuple(param.shape)}, {param.dtype}, in "
                               f"place of {tuple(place.shape)}, {place.dtype}")
                elif param.data_ptr() != place.data_ptr():
                    # `p.data = values` has left the buffer alone.
                    place.copy_(param)
        self.comm.agree(self, "is not written back, and is as before",
                        "a block that ends without an error, and parameters of the same shape and "
                        "type", problem, "look for the error on that rank; change values only")
        for full, g in zip(fulls, self.flats, strict=True):
            self.comm.scatter(g.storage.load(), full)
            g.storage.save()

    @torch.no_grad()
    def _look_at(self, fulls: list[torch.Tensor] | None) -> None:
        """
        #### Point the parameters at these buffers, or back at their own, freed one
        """
        self._full_elsewhere = fulls is not None
        with torch.inference_mode(False):
            for i, g in enumerate(self.flats):
                for slot in g.slots:
                    # The object stays, and looks elsewhere: whatever refers to it goes on working.
                    slot.param.__class__ = nn.Parameter
                    if not fulls:
                        # What was written in the block belongs to the parameter from now on.
                        slot.version = slot.param._version
                    slot.param.data = slot.of(fulls[i]) if fulls else slot.view
            if fulls:
                self._open_params()
            else:
                self._close_params()

    def lend(self) -> bool:
        """
        ### Whether somebody outside may use the parameters, which are then here

        Who unshards whole models may find out so what a layer needs of another.
        """
        return False

    # ------------------------------------------------------------------------------------ reshard

    def _cleanup_params(self) -> None:
        """
        #### Reshard (free)

        Resizes the storage to nothing. To let go of the tensors would not do: autograd holds views
        of them for backward, and every layer would stay full until then.
        """
        self._kept = None
        if not self.is_fetched:
            return
        self._wait_params()
        self.is_fetched = False
        self._close_params()
        for g in self.flats:
            g.full.untyped_storage().resize_(0)
        self.listener.record(self, "free", sum(g.full.nbytes for g in self.flats))

    def _release(self, call: Call | None = None) -> None:
        """
        #### Reshard, or stay full where that saves a gather

        * `call` is the forward call that has ended; in backward there is none

        Backward begins where forward ends, so the last layer stays. A graph that is dropped without
        backward takes the call along, and that frees the layer.
        """
        if call and call.outputs and self.layer_idx >= 0 and not self.next_layer:
            self._kept = weakref.ref(call, lambda _: self._cleanup_params())
        else:
            self._cleanup_params()

    # ------------------------------------------------------------------------------------ forward

    @uncompiled
    def forward(self, *args, **kwargs):
        """
        ### Forward pass

        Unshard, compute, reshard. Tensors that need a gradient are watched as they come in and go
        out: the gradient of an output announces that this layer's backward begins, those of the
        inputs that it has ended.
        """
        # A forward inside of `backward()` is activation checkpointing, which computes the layer
        # again. Its backward follows, so the layer stays full until then and recomputation sends
        # nothing.
        recompute = in_backward()
        self.contents.check()
        if self._kept and not recompute:
            # Full since a forward whose backward did not come; an optimizer may have stepped since.
            self._cleanup_params()
        self._follow_requires_grad()
        if torch.is_autocast_enabled(self.device.type) and torch.is_grad_enabled():
            self._warn_of_autocast()
        self._enter_backward()
        self.fetch_params()
        self._wait_params()
        self.listener.record(self, "compute")
        call = Call()
        try:
            args = tuple(self._watch_input(call, value) for value in args)
            kwargs = {name: self._watch_input(call, value) for name, value in kwargs.items()}
            # Meanwhile `self.parameters()` in the module yields its full parameters.
            with self.contents:
                output = self.module(*args, **kwargs)
            self._check_params()
            self._watch_output(call, output)
        except BaseException:
            # Checkpointing ends a recomputation by an exception too, and then backward goes on.
            if not recompute:
                self._cleanup_params()
            raise
        self.listener.record(self, "computed")
        if not recompute:
            self._release(call)
        return output

    def _warn_of_autocast(self) -> None:
        """
        #### Say what autocast costs: it copies each fp32 weight, and backward needs the copy

        So the 16-bit copies of all layers stay from forward to backward, however early their fp32
        parameters are freed.
        """
        if any(g.full.dtype == torch.float32 for g in self.flats):
            # The same words for each layer: Python shows a warning once.
            warnings.warn(
                f"rank {self.comm.rank}: layers of fp32 run under autocast, which keeps a 16-bit "
                "copy of every weight from forward to backward. To free these too, convert the "
                "layers with `.bfloat16()` before wrapping and let `Zero3Optimizer` keep fp32 "
                "masters.", stacklevel=3)

    def _watch_input(self, call: Call, value: Any) -> Any:
        """
        #### Have an input say when its gradient is complete

        The module gets a view. Its gradient is complete once *this layer* has added all it will.
        That of the tensor itself also waits for everybody else who uses it, and the layer stays
        full until then: this is what a tensor inside of a container costs, for the container is not
        ours.
        """
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value = value.view_as(value)
        for tensor in tensors_in(value):
            if tensor.requires_grad and torch.is_grad_enabled():
                call.inputs += 1
                tensor.register_hook(partial(self._backward_event, call))
        return value

    def _watch_output(self, call: Call, output: Any) -> None:
        """
        #### Have an output announce the backward pass

        So may a tensor that a module keeps as an attribute, an auxiliary loss for instance.
        """
        for tensor in tensors_in((output, self.module)):
            ours = {g.full.untyped_storage().data_ptr() for g in self.flats if len(g.full)}
            own = tensor.layout != torch.strided or tensor.untyped_storage().data_ptr() not in ours
            self.expect(own, "puts out freed memory",
                        "a tensor of its own", f"a view of a parameter, {tensor.shape}", "clone it")
            if tensor.requires_grad and torch.is_grad_enabled():
                call.outputs += 1
                self._pending.add(call)
                tensor.register_hook(partial(self._pre_backward_hook, call))

    # ----------------------------------------------------------------------------------- backward

    def _enter_backward(self) -> None:
        """
        #### Have the end of this `backward()` settle the layer
        """
        if in_backward() and self not in self.comm.unsettled:
            self.comm.unsettled.add(self)
            torch.autograd.Variable._execution_engine.queue_callback(_Settle(self))

    def _pre_backward_hook(self, call: Call, *_) -> None:
        """
        #### A gradient of an output is here: this layer's backward begins

        Unshard again, and start with the previous layer, for autograd will come to it next.
        """
        recorded = torch.is_grad_enabled() and not self._full_elsewhere
        self.expect(not recorded, "cannot go backward twice", "backward without `create_graph`",
                    "a backward pass that is itself recorded: a gradient penalty, for instance, or "
                    "a Hessian", "compute it in `with model.full_params():`")
        self._enter_backward()
        if call not in self._entered:
            self._entered.add(call)
            self._pending.discard(call)
            self._inputs_left += call.inputs
            self.listener.record(self, "compute")
        self.fetch_params()
        for layer in self.prev_layer:
            # Below the first layer that trains nothing goes backward, and nothing is fetched.
            if layer._pending:
                layer.fetch_params()
        self._wait_params()

    @torch.no_grad()
    def _post_backward_hook(self, group_index: int, slot_index: int, param: nn.Parameter) -> None:
        """
        #### A parameter's gradient is complete: move it into the flat gradient

        In one pass, and then its own memory is gone: a layer does not collect its gradients twice.
        """
        group = self.flats[group_index]
        slot = group.slots[slot_index]
        grad: Any = param.grad
        if grad is None:
            # Autograd also calls the hook when it finds that there is no gradient.
            return
        param.grad = None
        self.expect(grad.layout == torch.strided and not grad.requires_grad, "cannot reduce a "
                    "gradient", "a dense one without a graph", f"{grad.layout}, `{slot.names[0]}`",
                    "use `sparse=False`, and backward without `create_graph`")
        self._enter_backward()
        if group.grad is None:
            # Of the parameters' data type, unless an optimizer has asked the shard for another.
            group.grad = self._empty(len(group.full), group.shard.grad_dtype)
            for padding in group.padding():
                group.grad[padding].zero_()
            self.listener.record(self, "gradients", group.grad.nbytes)
        grad = grad.to(group.grad.dtype)
        # The mean over ranks, here and nowhere else. A rank's loss is the mean over its own batch,
        # so the gradient of the mean over all batches is the mean of the ranks' gradients. To
        # divide before the sum is taken keeps the sum of half-precision numbers within their range.
        mean = 1 / self.comm.world_size
        if slot.names not in group.ready:
            torch.mul(grad, mean, out=slot.of(group.grad))
        else:
            # Reentrant checkpointing brings a gradient in parts; a micro-batch that was not reduced
            # has left its own.
            slot.of(group.grad).add_(grad, alpha=mean)
        group.ready.add(slot.names)
        self._arrived.add(slot.names)
        grad = None
        self._backward_event()

    def _backward_event(self, call: Call | None = None, *_) -> None:
        """
        #### Another gradient is complete, a parameter's or an input's

        With the last one the layer's backward is over. The parameters' own do not tell: a frozen
        weight below the last trainable one is still needed for the gradient of the input.
        """
        self._inputs_left -= call in self._entered
        if self._is_over():
            self._backup_grads()

    def _is_over(self) -> bool:
        """
        #### Whether backward needs the full parameters no more
        """
        trainable = sum(len(g.slots) for g in self.flats if g.trains)
        return self._inputs_left <= 0 and len(self._arrived) == trainable

    # ------------------------------------------------------------------------------------- reduce

    @torch.no_grad()
    def _backup_grads(self) -> None:
        r"""
        #### Reshard, and reduce-scatter the gradients

        The wire's reducer starts it, or lets small layers wait for each other, and returns; later
        it hands the sums to `_add_reduced`. All ranks must come here. A rank sends each other one
        its share of the flat gradient, $(N-1)\lceil P_\ell/N \rceil$ elements.
        """
        self._wait_params()
        self._check_params()
        self._release()
        self._arrived.clear()
        groups = [g for g in self.flats if g.grad is not None]
        for g in groups:
            for slot in g.slots:
                if slot.names not in g.ready:
                    # No gradient arrived: it is zero, and not what the memory held.
                    slot.of(g.grad).zero_()
        if groups:
            # Messages arrive where the full parameters were, which need the memory no more. Those
            # of a bucket arrive where its first layer's were.
            self.comm.reducer.add(self, [(g.grad, g.receive_buffer) for g in groups])
        if self.layer_idx < 0:
            # A layer that stands alone has no neighbour to end it before the pass does.
            self.comm.reducer.finish(self)

    @torch.no_grad()
    def _add_reduced(self, totals: list[torch.Tensor]) -> None:
        """
        #### Add the reduced gradients to the shards'

        * `totals` are the sums over ranks, `(shard_numel,)`, one for each flat gradient

        A second backward adds: $k$ micro-batches give the gradient of one batch $k$ times as large.
        """
        groups = [g for g in self.flats if g.grad is not None]
        for g, total in zip(groups, totals, strict=True):
            # The sum of what each rank divided: the mean. The compute stream has waited for it.
            self.comm.deliver(total, g.grad_device or g.shard.device, g.add_grad)
        self.listener.record(self, "reduced", sum(t.nbytes for t in totals))
        self._drop_grads()
        for g in groups:
            g.receive_buffer.untyped_storage().resize_(0)
        self.listener.record(self, "free", None)

    def _drop_grads(self) -> None:
        """
        #### Forget the full gradients
        """
        for g in self.flats:
            g.grad = None
            g.ready.clear()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        ### Drop the gradients of this layer's shards, and what `no_sync` holds back

        A module that has this layer somewhere inside does not know of the latter.
        """
        super().zero_grad(set_to_none)
        for layer in self.modules():
            if isinstance(layer, Zero3Layer):
                layer._drop_grads()

    def _settle(self, raised: bool = False) -> None:
        """
        #### End a `backward()`

        What did not fire is settled before it returns, so the optimizer can step at once:
        parameters that were not used, inputs that got no gradient, layers fetched in vain. The one
        that comes last ends all reduces. After an exception the layers that backward had reached
        drop the gradients whose reduce has not begun; the others stay until `zero_grad()`.
        """
        self._entered.clear()
        self._inputs_left = 0
        if raised:
            self.comm.reducer.drop(self)
            self._drop_grads()
        self._backup_grads()
        self.comm.unsettled.discard(self)
        if not self.comm.unsettled:
            self.comm.reducer.end()

    # ------------------------------------------------------------------------------------- wiring

    def expect(self, good: bool, what: str, expected: Any, got: Any, cure: str) -> None:
        """
        ### Raise an error that says where, what was expected, what was found, and what to do
        """
        if not good:
            raise RuntimeError(f"rank {self.comm.rank}: {self.label} {what}. Expected: {expected}. "
                               f"Got: {got}. What to do: {cure}.")

    def _slots(self) -> Iterator[Slot]:
        return (slot for g in self.flats for slot in g.slots)

    def admits(self, layer: nn.Module) -> bool:
        """
        ### Whether a sharded layer may be inside of this one

        `Unit` overrides this, because a whole model has a list of all its layers.
        """
        return True

    def __reduce_ex__(self, protocol: Any) -> Any:
        """
        ### Refuse `copy.copy`, `copy.deepcopy`, `pickle` and `torch.save`
        """
        self.contents.refuse_copies()


class Zero3Sequential(nn.Module):
    """
    ## A chain of layers, each unsharded while the one before computes
    """

    def __init__(self, modules: Iterable[Zero3Layer]):
        """
        ### Link the layers

        * `modules` are `Zero3Layer`s, in forward order: a list, or whatever yields them

        Raises `TypeError` for anything else, and `ValueError` without a layer.
        """
        super().__init__()
        expect(isinstance(modules, Iterable), "Zero3Sequential", "a list of Zero3Layers",
               type(modules), "pass `[layer]` for one", TypeError)
        # Once: a generator yields each layer a single time.
        modules = list(modules)
        expect(len(modules) > 0, "Zero3Sequential", "at least one layer", "none",
               "look at what should have made the layers")
        for i, m in enumerate(modules):
            if not isinstance(m, Zero3Layer):
                raise TypeError(f"Zero3Sequential, element {i}. Expected: a Zero3Layer. Got: "
                                f"{type(m)}. What to do: wrap it, with parameters or without.")
            m.layer_idx, m.label = i, f"layer {i} ({m.label})"
        # Layers without parameters have nothing to fetch; the chain passes over them.
        sharded = [m for m in modules if m.flats]
        for before, after in pairwise(sharded):
            before.next_layer.append(after)
            after.prev_layer.append(before)
            # One comm: its streams and its reducer are shared, and one reduce is in flight.
            after.comm = before.comm
        self.module_list: Any = nn.ModuleList(modules)
        self.layers = tuple(modules)
        self.known = Known([self, self.module_list])

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """
        ### This rank's trainable shards, of all layers
        """
        # Once, also of a layer that is in the chain twice.
        chunks = (chunk for m in self.module_list for chunk in m.get_trainable_chunk())
        return [*dict.fromkeys(chunks)]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """
        ### Clip the gradient of the whole model

        * `max_norm` is the greatest norm that the mean gradient may have
        * `norm_type` is the $p$ of the norm, or `math.inf`

        All ranks call it, where they would call `torch.nn.utils.clip_grad_norm_`: that one sees a
        rank's shards alone. Returns the norm before clipping, the same bits on all ranks.
        """
        return clip_grad_norm_(self, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        ### Drop the gradients of all shards, and what `no_sync` of an optimizer holds back
        """
        super().zero_grad(set_to_none)
        for layer in self.module_list:
            layer.zero_grad(set_to_none)

    def walk(self) -> Iterator[Zero3Layer]:
        """
        ### Walk the layers, one unshard ahead

        The next layer's starts before this one computes. `forward` walks so; do it yourself where
        layers take more than one tensor: `for layer in model.walk(): x = layer(x, mask)`.
        """
        self._check_layers()
        try:
            for layer in self.module_list:
                for ahead in (layer, *layer.next_layer):
                    ahead.fetch_params()
                yield layer
        finally:
            # A walk that ends early, by `break` or by an exception, has fetched a layer in vain.
            for layer in self.module_list:
                if not layer._kept and not in_backward():
                    layer._cleanup_params()

    def _check_layers(self) -> None:
        """
        #### Notice layers that were added to the chain or taken out of it

        Each layer knows its neighbours since the chain was built.
        """
        for first in self.layers[:1] if self.known.has_changed() else ():
            names = [name for name, _ in self.named_children()]
            first.expect(False, "is in a chain that has other layers than before",
                         f"the {len(self.layers)} that it was built with",
                         f"{len(self.module_list)}, and submodules {names}",
                         "build a new `Zero3Sequential` of `Zero3Layer`s, and the optimizer on it")

    @uncompiled
    def forward(self, *args, **kwargs):
        """
        ### Forward pass of the chain

        The first layer takes the arguments, each other one the output of the layer before it.
        """
        with closing(self.walk()) as layers:
            for layer in layers:
                args, kwargs = (layer(*args, **kwargs),), {}
        return args[0]

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """
        ### The full parameters of all layers at once, named as in an `nn.Sequential`

        This holds the whole model; `Zero3Layer.full_params` holds one layer.
        """
        with ExitStack() as stack:
            # Once, also of a layer that is in the chain twice: it has a name for each place.
            layers = dict.fromkeys(self.module_list)
            params = {m: stack.enter_context(m.full_params(writeback)) for m in layers}
            yield {f"{i}.{name}": p for i, m in enumerate(self.module_list)
                   for name, p in params[m].items()}


class _Settle:
    """
    ## The end of a `backward()`

    The engine calls it when all gradients are complete. If backward raises, the engine drops it
    uncalled, and the layer is reset so that a good step can follow.
    """

    def __init__(self, layer: Zero3Layer):
        self.layer: Any = layer

    def __call__(self) -> None:
        layer, self.layer = self.layer, None
        layer._settle()

    def __del__(self) -> None:
        if self.layer is not None and not self.layer.comm.broken:
            self.layer._settle(raised=True)


def _own_modules(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """
    #### The module and those in it, down to the next `Zero3Layer`

    One that is registered under several names comes once under each.
    """
    if not isinstance(module, Zero3Layer):
        yield prefix, module
        # Not `named_children`, which drops all names but the first.
        for name, child in module._modules.items():
            if child is not None:
                yield from _own_modules(child, f"{prefix}{name}.")


def _set_versions(slots: Iterable[Slot], freed: bool) -> None:
    """
    #### Set the `_version` of parameters: as forward saw it, or one more while they are freed
    """
    every = [*slots]
    params = tuple(slot.param for slot in every)
    versions = tuple(slot.version + freed for slot in every)
    torch._C._autograd._unsafe_set_version_counter(params, versions)

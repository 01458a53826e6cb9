r"""
# ZeRO-3: shard parameters, gradients and optimizer states

`Zero3Layer` keeps $\frac{1}{N}$ of a layer on each of $N$ ranks, and holds the whole layer only
while that layer computes.

This is `minimal.py` grown up: the methods that unshard, reshard, go forward and backward and reduce
have the same names, and work for real models. `Chain` of the small file is `Zero3Sequential`. The
small file lacks these things:

| what | goes wrong in `minimal.py` | here |
|---|---|---|
| a parameter without a gradient | its layer and the next get none, or an error | `settle` |
| a frozen parameter | an error when it is sharded | `_shard`, `_follow_requires_grad` |
| an exception in a layer | it and the next one stay whole, and become stale | `walk` |
| a forward pass without backward | the weights of the last layer become stale | `_prepare` |
| several inputs or outputs | an error | `watch.py` |
| a layer with two data types | all of it becomes fp32, silently | `alike` |
| a freed parameter is read | the process ends without a word | `guards/freed.py` |

Each rank keeps $\lceil P_\ell / N \rceil$ elements of a layer with $P_\ell$ parameters. For a model
with $\Psi$ parameters, and without the padding, a step sends

$$\underbrace{\Psi\,\frac{N-1}{N}}_{\text{all-gather, forward}} +
\underbrace{\Psi\,\frac{N-1}{N}}_{\text{all-gather, backward}} +
\underbrace{\Psi\,\frac{N-1}{N}}_{\text{reduce-scatter}}
\;=\; 3\Psi\,\frac{N-1}{N}$$

elements per rank. It is a little less, because the last layer of a chain stays whole between
forward and backward. Plain data parallelism sends two thirds of that. So ZeRO-3 sends 50 % more,
keeps $\frac{1}{N}$ of the memory between two steps, and overlaps most of the communication with
computation. The paper is [ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models](https://arxiv.org/abs/1910.02054), sections 5.3 and 7.2.2.

**How to read this.** Read `Zero3Layer` from top to bottom: shard, unshard, reshard, forward,
backward, reduce. Four methods call `_settle_at_end_of_backward`, which has autograd call `settle`
when the pass ends; *end of backward* says why. Method names follow [labml.ai's
annotated implementation](https://nn.labml.ai/scaling/zero3/index.html), and headings give the
standard terms. The parts of a layer are in `flat.py`, `watch.py` and `comm/`. `Sharded`, the base
class in `sharded.py`, has `flats`, and what users call outside the training step. Two flags come
from its own base class, `Guarded` in `guards/checks.py`: `is_fetched`, from the start of a gather
until the layer is freed, and `is_full_elsewhere`, inside `full_params()`. `guards` refuse mistakes
(see `guards/moments.py`). An "I2" in a docstring is an invariant that `zero3/__init__.py` lists.

**Run this**: `make train` trains a small transformer on two ranks, and compares the memory and the
communication of each rank with these formulas.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero3.comm.collectives import ALONE, Transfer
from zero3.flat import FlatParameter, NamedParams, alike, find_params, hide_params, in_flight
from zero3.guards.checks import own_modules
from zero3.guards.moments import guards
from zero3.sharded import Sharded, ShardedModel, communicator
from zero3.watch import Call, Watch, at_end_of_backward, in_backward, tensors_in

if TYPE_CHECKING:
    from zero3.comm.links import Links
    from zero3.offload.activations import Activations, Offload


class Zero3Layer(Sharded):
    r"""
    ## Zero3 layer

    Wrap each layer of a model in one, and call it as you would call the layer. In a training step
    it has the states of the table in `minimal.py`, with two differences. The layer is freed in
    backward only when the gradients of its inputs are there, too. And the gradients of other ranks
    need no buffer of their own: on the CPU they arrive in the memory of the freed flat parameter.
    """

    def __init__(self, module: nn.Module, rank: int | None = None, world_size: int | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None,
                 offload: Offload | str | None = None, mesh: DeviceMesh | Links | None = None,
                 activations: Activations | Offload | str | None = None):
        """
        ### Shard a module

        All ranks call this in the same order, and get the values that rank 0 has. Buffers get them
        too, and are not sharded.

        * `module` is the layer to wrap, initialised, on `device`
        * `rank` and `world_size` default to those of the process group; without one, to 0 and 1
        * `device` defaults to where the parameters are
        * `dtype` is the data type of all parameters; left out, a layer may mix data types
        * `offload` says where the shards rest, as an `Offload` or as "cpu"; left out, on the device
        * `mesh` has the ranks that share the layer, as a mesh or as `Links` (see `comm/links.py`);
          left out, all ranks share it
        * `activations` says where the tensors go that autograd saves in the layer, as an `Offload`,
          as "cpu" or as `Activations`; left out, they stay (see `offload/activations.py`)

        Raises `TypeError` if `module` is not an `nn.Module` or `rank` no integer, and
        `ValueError` if `offload` names no known place. Raises `RuntimeError` if the module

        * is sharded already, or shares a parameter with another layer
        * is on another device or of another data type than asked for
        * differs between ranks
        * needs more memory in a step than there is

        This is section 5.3 of the paper. Keeps I2 (only shards at rest) and I5 (zero padding).
        """
        # `Sharded` adds the reducer, the storage and the schedule.
        super().__init__(module, communicator(rank, world_size, mesh), offload, activations)
        # The all-gather in flight.
        self._gather: Transfer | None = None
        # If the layer was not freed after forward: the call whose backward it waits for.
        self.kept_for: weakref.ref[Call] | None = None
        self.watch = Watch(self._pre_backward_hook, self._backward_event)

        guards.check_module(self, module)
        params = find_params(module)
        buffers = {prefix + name: buffer for prefix, child in own_modules(module)
                   for name, buffer in child._buffers.items()}
        self.device = self.comm.open(self, params, buffers, device, dtype)
        # The shards, one for each flat parameter. labml calls them chunks.
        self.chunk = nn.ParameterList()
        for group in alike(params):
            self._shard(group)
        hidden = hide_params(child for _, child in own_modules(module))
        self.comm.broadcast(buffers.values())
        self.guard = guards.LayerGuard(self, hidden)

    # -------------------------------------------------------------------------------------- shard

    @torch.no_grad()
    def _shard(self, params: NamedParams) -> None:
        """
        #### Shard: merge parameters into one buffer, keep $1/N$ of it, free the buffer

        The constructor calls it for each group of parameters that can share a buffer (see `alike`).
        While it runs, the layer takes $2 + 1/N$ times its memory: the module's parameters, their
        merged copy, and the shard.
        """
        full = self._merge_and_pad_params(list(params))  # (world_size * shard_numel,), device
        # Rank 0 sends each rank its part, so that all ranks begin with the same model.
        part = self.comm.scatter(full)  # (shard_numel,), device
        # A single rank's part is the buffer itself, which is about to be freed.
        shard = part.clone() if part is full else part
        # All of these parameters are trainable, or all are frozen.
        trains = next(iter(params)).requires_grad
        storage = self.offload.shard(self, shard, trains)
        flat = FlatParameter(self, params, full, storage, self.comm.aligned)
        in_flight.free(full)
        self.flats.append(flat)
        self.chunk.append(flat.shard)
        self._follow_requires_grad()
        # Make the parameters views of the freed buffer, which drops the memory that they had. From
        # now on each use of one is an error.
        flat.look_at(None)

    def _merge_and_pad_params(self, params: list[nn.Parameter]) -> torch.Tensor:
        r"""
        #### Merge parameters, and pad so that the length is divisible by `world_size`

        Returns $N \lceil P_\ell/N \rceil$ elements on the CPU. On an accelerator there is more
        padding: each parameter and each shard begins at a multiple of 16 bytes, because matrix
        products, copies and NCCL are slow otherwise.

        The padding is zero and stays zero, because its gradient is zero too (`begin_grad`). If that
        gradient held a NaN, the norm of all gradients would be NaN, and clipping by it would
        destroy every gradient of the model.
        """
        dtype = params[0].dtype
        sizes = [self.comm.aligned(p.numel(), dtype) for p in params]
        shard_numel = self.comm.aligned(-(-sum(sizes) // self.comm.world_size), dtype)
        full = self._empty(self.comm.world_size * shard_numel, dtype).zero_()
        for p, place in zip(params, full[: sum(sizes)].split(sizes), strict=True):
            place[: p.numel()].view(p.shape).copy_(p.detach())
        return full

    def _empty(self, numel: int, dtype: torch.dtype | None) -> torch.Tensor:
        """
        #### Uninitialised memory on the device: `(numel,)`
        """
        return torch.empty(numel, device=self.device, dtype=dtype)

    def _follow_requires_grad(self) -> None:
        """
        #### Copy `requires_grad` from each shard to its parameters

        Runs while the layer is built, and before each forward. `model.requires_grad_(False)`
        reaches only the shards, because `parameters()` yields nothing else. Without this, autograd
        would go on computing the gradients of a frozen layer, and an unfrozen layer would get none.
        """
        for i, flat in enumerate(self.flats):
            if flat.follow_requires_grad():
                # A freed parameter would report the hook as a use.
                with torch._C.DisableTorchFunction():
                    self._add_backward_hooks(i)

    def _add_backward_hooks(self, flat_index: int) -> None:
        """
        #### Have each parameter of a flat parameter report its gradient
        """
        # A weak reference. A strong one would make a cycle of layer, parameter and hook, which
        # Python cannot collect, because one of its links is in C++.
        ours = weakref.WeakMethod(self._post_backward_hook)
        for i, slot in enumerate(self.flats[flat_index].slots):
            if slot.param.requires_grad and slot.hook is None:
                slot.hook = slot.param.register_post_accumulate_grad_hook(
                    lambda p, ours=ours, i=i: ours()(flat_index, i, p))

    # ------------------------------------------------------------------------------------ unshard

    def fetch_params(self) -> None:
        r"""
        ### Unshard (all-gather)

        Start the all-gather and do not wait for it, so that it overlaps the computation of another
        layer. `_wait_params` waits. All ranks must call this. A rank sends its shard to each
        other rank, $(N-1)\lceil P_\ell/N \rceil$ elements.
        """
        # A prefetch may have started it already.
        if self.is_fetched or self.is_full_elsewhere or not self.flats:
            return
        # If backward reaches the layer a second time, a reduce may still be in flight. It ends
        # first, because on the CPU the other ranks' gradients arrive in `flat.full`.
        self.reducer.finish(self)
        self._settle_at_end_of_backward()
        self.is_fetched = True
        # Gather into the *same storage* every time. The parameters are views of it, and so are the
        # tensors that autograd saved in forward, which are valid again in backward.
        pairs = [(flat.full, flat.storage.load()) for flat in self.flats]
        # `exact=False` allows a later chapter to round the weights on their way (`comm/links.py`).
        self._gather = self.comm.all_gather(self, pairs, exact=False)
        for flat in self.flats:
            # A shard in a file was read into a buffer, which is free once the fetch stream has
            # copied it.
            flat.storage.release(self.comm.fetch_stream)
        # Begin to read the shards of the layers that come next, if they rest in files.
        for layer in self.schedule.ahead(self):
            layer.read_async()

    def _wait_params(self) -> None:
        """
        #### Wait for the all-gather
        """
        if self._gather is None:
            return
        gather = self._gather
        self._gather = None
        gather.wait()
        for flat in self.flats:
            flat.open()

    # ------------------------------------------------------------------------------------ reshard

    def _cleanup_params(self) -> None:
        """
        #### Reshard (free)

        Runs after forward, and in backward after the last gradient. It first waits for an
        all-gather in flight, which writes into this memory. After an error on any rank that
        gather cannot finish, so the memory is kept (see `InFlight`).
        """
        self.kept_for = None
        if self.holders or not self.is_fetched:
            return
        if not self.comm.broken:
            self._wait_params()
        self._gather = None
        self.is_fetched = False
        for flat in self.flats:
            flat.close()
            in_flight.free(flat.full)
        self.listener.record(self, "free", sum(flat.full.nbytes for flat in self.flats))

    def _release(self, call: Call | None = None) -> None:
        """
        #### Reshard, unless the schedule says that backward needs the layer at once

        * `call` is the forward call that has ended (a record of `watch.py`); in backward there is
          none

        Until backward only hooks in the graph keep a `Call` alive. If the graph is dropped without
        a backward pass, the weak reference fires and frees the layer.
        """
        if call is None or not self.schedule.stays_full(self, call):
            self._cleanup_params()
        else:
            self.kept_for = weakref.ref(call, lambda _: self._cleanup_params())

    # ------------------------------------------------------------------------------------ forward

    @guards.uncompiled
    def forward(self, *args, **kwargs):
        """
        ### Forward pass: unshard, compute, reshard

        In a chain `walk` has started the all-gather of this layer already. The hooks that
        `watch` adds to inputs and outputs bring backward back to this layer.
        """
        # Activation checkpointing computes the layer again inside a backward pass. Its backward
        # follows, so the layer stays full until then.
        recompute = in_backward()
        self._prepare(recompute)
        self._settle_at_end_of_backward()
        call = Call(self.shard_versions(), self.is_full_elsewhere)
        try:
            self.fetch_params()
            self._wait_params()
            self.listener.record(self, "compute")
            args, kwargs = self.watch.inputs(call, args, kwargs)
            # While it runs, `module.parameters()` yields the full parameters.
            with self.guard, self.saving((args, kwargs)):
                output = self.module(*args, **kwargs)
            # A module may also keep a tensor as an attribute, an auxiliary loss for instance.
            outputs = list(tensors_in((output, self.module)))
            self.guard.after_forward(outputs, recompute)
            self.watch.outputs(call, outputs)
        except BaseException:
            # Checkpointing may stop a recomputation early by an exception, and backward goes on.
            if not recompute:
                self.reshard()
            raise
        self.listener.record(self, "computed")
        if not recompute:
            self._release(call)
        return output

    def _prepare(self, recompute: bool) -> None:
        """
        #### Take over the changes since the last forward

        Nobody tells the layer when parameters are frozen, when an optimizer steps, or when a new
        module is assigned.
        """
        self.guard.before_forward()
        if self.kept_for and not recompute:
            # It is full since a forward without a backward. The optimizer may have stepped.
            self._cleanup_params()
        self._follow_requires_grad()

    # ----------------------------------------------------------------------------------- backward

    def _pre_backward_hook(self, call: Call, *_) -> None:
        """
        #### The gradient of an output is here: this layer's backward begins

        Unshard again, and prefetch the layer that backward reaches next.
        """
        self.guard.before_backward(call.versions, call.is_elsewhere)
        # From now on the end of backward frees it, whichever graph is dropped.
        self.kept_for = None
        self._settle_at_end_of_backward()
        if self.watch.enter(call):
            self.listener.record(self, "compute")
        self.fetch_params()
        for layer in self.schedule.ahead(self):
            layer.fetch_params()
        self._wait_params()

    @torch.no_grad()
    def _post_backward_hook(self, flat_index: int, slot_index: int, param: nn.Parameter) -> None:
        """
        #### The gradient of a parameter is ready: add it to the flat gradient

        In the example of `minimal.py` rank 0 has the gradients 2 4 6. The flat gradient gets 1 2 3:
        half of each, because there are two ranks.
        """
        flat = self.flats[flat_index]
        slot = flat.slots[slot_index]
        grad = param.grad
        # Autograd also calls the hook when it finds that there is no gradient.
        if grad is None:
            return
        param.grad = None
        self.guard.before_grad(grad, slot.names[0])
        self._settle_at_end_of_backward()
        # A reduce of this layer may still be in flight: if the layer stayed full, `fetch_params`
        # has not ended it.
        self.reducer.finish(self)
        if flat.grad is None:
            # (world_size * shard_numel,), device, of the data type that is reduced.
            full_grad = self._empty(len(flat.full), flat.shard.grad_dtype)
            flat.begin_grad(full_grad)
            self.listener.record(self, "gradients", full_grad.nbytes)
        # Divide by the number of ranks here, and nowhere else: the reduce-scatter then sums to the
        # mean. Dividing before the sum keeps it within the range of fp16.
        mean = 1 / self.comm.divisor
        flat.collect(slot, grad, mean)
        self.watch.arrived.add(slot.names)
        # The flat gradient has a copy. Free the original before a reduce takes memory.
        del grad
        self._backward_event()

    def _backward_event(self) -> None:
        """
        #### A gradient of a parameter or of an input is complete: finish the layer after the last
        """
        if self.is_over():
            self._backup_grads()

    def is_over(self) -> bool:
        """
        ### Whether backward no longer needs the full parameters

        `watch.py` says why inputs count too. If a layer is freed too early, backward cannot read
        it. If too late, it takes memory while the previous layer computes.
        """
        trainable = sum(len(flat.slots) for flat in self.flats if flat.trains)
        return self.watch.inputs_left == 0 and len(self.watch.arrived) == trainable

    # ------------------------------------------------------------------------------------- reduce

    @torch.no_grad()
    def _backup_grads(self) -> None:
        r"""
        #### Reshard, and reduce-scatter the gradients

        End the reduce before it, start this one and return, so that it overlaps the backward pass
        of the previous layer. All ranks must call this. A rank sends the other ranks' parts of the
        flat gradient, $(N-1)\lceil P_\ell/N \rceil$ elements.
        """
        # A layer that was only prefetched has closed parameters, whose count of writes is one
        # higher (see `flat.py`). The guard would take that for a write, so open them first.
        self._wait_params()
        self.guard.after_backward()
        self._release()
        self.watch.arrived.clear()
        flats = [flat for flat in self.flats if flat.grad is not None]
        pairs = [(flat.zero_missing(), flat.receive_buffer) for flat in flats]
        # First the reduce before this one ends, or every layer could have a full gradient in memory
        # at once (see `comm/reducer.py`). The reducer of a `Zero3Optimizer` is a bucket: it sends
        # small layers together.
        if pairs and self.reducer.make_way(self, pairs):
            self.reducer.started([self], self.comm.reduce_scatter([self], pairs))
        if self.layer_idx == ALONE:
            # It is in no chain, so this reduce ends here and overlaps nothing.
            self.reducer.finish(self)

    def reduce(self) -> None:
        """
        ### Reduce the full gradients that a `no_sync()` has held back

        Inside `with optimizer.no_sync():` a backward pass keeps the full gradients, and sends
        nothing. The next pass outside reduces them. `Zero3Optimizer.step` calls this for those that
        are left: of a layer that the next pass has not reached, or if there was none.
        """
        self._backup_grads()

    @torch.no_grad()
    def add_reduced(self, totals: list[torch.Tensor]) -> None:
        """
        ### Add the reduced gradients to those of the shards

        * `totals` are the means over ranks, `(shard_numel,)`, one for each flat gradient

        The reducer calls it. A second backward pass adds to them. So the gradients of $k$
        micro-batches add up; divide each loss by $k$ for the gradient of one large batch.
        """
        flats = [flat for flat in self.flats if flat.grad is not None]
        for flat, total in zip(flats, totals, strict=True):
            self.reducer.deliver(total, flat.sink or flat, flat.ready)
        self.listener.record(self, "reduced", sum(total.nbytes for total in totals))
        for flat in flats:
            flat.drop_full_grad()
            in_flight.free(flat.receive_buffer)
        # `None` stands for all the bytes that were freed since the last event.
        self.listener.record(self, "free", None)

    # ------------------------------------------------------------------------- end of backward

    def _settle_at_end_of_backward(self) -> None:
        """
        #### Have the end of this backward pass call `settle`, once

        Without it, a layer that was prefetched and then not needed would stay full. And
        `backward()` would return before the last reduce has ended.
        """
        if in_backward() and self not in self.reducer.unsettled:
            self.reducer.unsettled.add(self)
            at_end_of_backward(self.settle)

    def settle(self, raised: bool) -> None:
        """
        ### Finish the layer's part of a backward pass

        * `raised` says that the pass ended with an exception

        Most layers have finished, and nothing is left to do. But not every hook fires: some
        parameters were not used, some inputs got no gradient, some layers were only prefetched. So
        each layer that backward has reached or prefetched finishes here, in the order of backward,
        before `backward()` returns. After an exception, a reduce in flight ends, and gradients
        whose reduce has not started are dropped. Call `zero_grad()` before you go on.
        """
        self.watch.reset()
        if raised and self.comm.broken:
            # Nothing can be finished any more.
            self.drop_full_grads()
            self._cleanup_params()
            return
        if raised:
            self.reducer.drop(self)
            self.drop_full_grads()
        # A reduce that is in flight is not started again: see `Reducer.make_way`.
        self._backup_grads()
        self.reducer.unsettled.discard(self)
        if not self.reducer.unsettled:
            self.reducer.end()


class Zero3Sequential(ShardedModel):
    """
    ## A chain of layers, each gathered while the one before it computes

    Use it if the layers of a model compute one after the other: it prefetches from the first step
    on. `wrap` takes any other model, and learns the order in the first forward pass.
    """

    def __init__(self, modules: Iterable[Zero3Layer]):
        """
        ### Link the layers

        * `modules` are `Zero3Layer`s in forward order, in a list or another iterable

        Raises `TypeError` for anything else, and `ValueError` without a layer.
        """
        super().__init__()
        layers = guards.check_chain(modules)
        for i, layer in enumerate(layers):
            layer.layer_idx = i
            layer.label = f"layer {i} ({type(layer.module).__name__})"
        # Layers without parameters have nothing to gather, so the links skip them.
        sharded = [layer for layer in layers if layer.flats]
        for before, after in pairwise(sharded):
            before.next_layer.append(after)
            after.prev_layer.append(before)
            # One reduce of the whole chain is in flight at a time, so its layers share a reducer.
            # They share a communicator, too: an error in one layer stops the transfers of all.
            after.comm = before.comm
            after.reducer = before.reducer
        self.module_list: Any = nn.ModuleList(layers)
        self._take(layers)

    def walk(self) -> Iterator[Zero3Layer]:
        """
        ### Walk the layers, one all-gather ahead

        `forward` walks like this. Do it yourself if layers take more than one tensor: `for layer in
        model.walk(): x = layer(x, mask)`.
        """
        guards.check_walk(self)
        try:
            for layer in self.module_list:
                layer.fetch_params()
                # Prefetch: this all-gather overlaps the computation of `layer`. Layers of another
                # chain are left out, because they would stay full.
                for ahead in filter(self.sharded_layers.__contains__, layer.next_layer):
                    ahead.fetch_params()
                yield layer
        finally:
            # A walk that ends early may have gathered a layer that nobody will use. A walk inside
            # backward is a recomputation, whose layers are needed.
            for layer in self.module_list:
                if layer.kept_for is None and not in_backward():
                    layer._cleanup_params()

    @guards.uncompiled
    def forward(self, *args, **kwargs):
        """
        ### Forward pass: the first layer takes the arguments, each other one the output before it
        """
        with closing(self.walk()) as layers:
            for layer in layers:
                args = (layer(*args, **kwargs),)
                kwargs = {}
        return args[0]

    def named_layers(self) -> Iterator[tuple[str, Sharded]]:
        """
        ### All layers, each with the prefix of its parameters' names in an `nn.Sequential`
        """
        for i, layer in enumerate(self.module_list):
            yield from layer.and_inside(f"{i}.")


# ## What later chapters replace
#
# Each later chapter hands a layer another part. There are eight such places, the *seams*:
#
# | seam | here | a later chapter hands in |
# |---|---|---|
# | communicator: `layer.comm` | all ranks | some of them, or replicas |
# | storage: `flat.storage` | memory of the device | CPU memory, or a file |
# | schedule: `layer.schedule` | the neighbours in a chain | the order of the last step |
# | holders: `layer.holders` | nobody holds it | units and stages that need it whole |
# | gradient sink: `layer.reducer`, `flat.sink` | the shard's `.grad` | another tier; buckets |
# | listener: `layer.listener` | nobody listens | `Ledger`, which records a run |
# | saving: `layer.saving` | autograd keeps what it saves | CPU memory, or a file |
# | guards: `guards`, `layer.guard` | says when to look | errors in place of wrong numbers |
#
# **Not covered, and what that costs**:
#
# | not covered | what happens | instead |
# |---|---|---|
# | a layer that is in no chain | nothing overlaps what it sends | a chain, or `wrap` |
# | sparse gradients | an error | `sparse=False` |
# | double backward (`create_graph=True`) | an error | inside `full_params()` |
# | `backward(inputs=shards)` | no layer gets a gradient | freeze the others |
# | a tensor deep inside objects | "modified by an inplace operation" | put it in a tuple or dict |
# | autocast | a 16-bit copy of every weight stays | bf16 layers with fp32 masters |
# | `torch.func` around a layer | an error | use it inside the module |
# | `torch.compile` around layers | they run uncompiled | `layer.module.compile()` |
# | parameters outside sharded layers | they are not reduced | DDP around the whole model |
#
# `watch.py` says where a layer looks for tensors.

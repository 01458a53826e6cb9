r"""
# ZeRO-3: shard parameters, gradients and optimizer states

`Zero3Layer` keeps $\frac{1}{N}$ of a layer on each of $N$ ranks, and has the whole layer only while
it computes with it.

In data parallel training every rank keeps the whole model, its gradients and its optimizer states.
Yet a rank needs a layer's parameters only while that layer computes, and it never needs the
optimizer states that other ranks keep. ZeRO-3 uses both. Each rank keeps one shard of every layer.
It gathers a layer just before the layer computes, in forward and again in backward, and frees it
right afterwards.

**Three weights on two ranks.** A layer with the weights 1, 2 and 3 goes through a training step
like this:

| | rank 0 | rank 1 | |
|---|---|---|---|
| flatten and pad | 1 2 3 0 | 1 2 3 0 | four elements, so that each rank gets two |
| **shard** | **1 2** | **3 0** | only this stays in memory |
| *unshard* (all-gather) | 1 2 3 0 | 1 2 3 0 | before forward, and again before backward |
| *reshard* (free) | **1 2** | **3 0** | right after each of the two |
| gradients | 2 4 6 0 | 4 0 2 0 | of each rank's own part of the batch |
| *reduce-scatter* | **3 2** | **4 0** | the means, and each rank gets only those of its shard |
| step, rate 0.1 | **.7 1.8** | **2.6 0** | each rank updates its shard, without communication |

A rank sends two elements in each of the three collectives, six in all. In general, a layer of
$P_\ell$ parameters leaves $\lceil P_\ell / N \rceil$ elements on each rank, and a step of a model
with $\Psi$ parameters sends

$$\underbrace{\Psi\,\frac{N-1}{N}}_{\text{all-gather, forward}} +
\underbrace{\Psi\,\frac{N-1}{N}}_{\text{all-gather, backward}} +
\underbrace{\Psi\,\frac{N-1}{N}}_{\text{reduce-scatter}}
\;=\; 3\Psi\,\frac{N-1}{N}$$

elements per rank. Plain data parallelism sends two thirds of that, because its all-reduce is a
reduce-scatter followed by an all-gather. So ZeRO-3 pays 50 % more communication for $N$ times less
memory, and overlaps most of it with computation. The paper is [ZeRO: Memory Optimizations Toward
Training Trillion Parameter Models](https://arxiv.org/abs/1910.02054); sections 5.3 and 7.2.2
describe sharded parameters and their communication.

| symbol | meaning |
|---|---|
| $\Psi$ | parameters of the model |
| $P_\ell$ | parameters of layer $\ell$; trainable and frozen ones are sharded, and counted, apart |
| $N$, $r$ | `world_size`, the number of ranks, and `rank`, this one |
| $K$ | optimizer bytes per parameter |

Read `Zero3Layer` from top to bottom: shard, unshard, reshard, forward, backward, reduce. Method
names are those of labml's implementation, and each says the standard term. Three files beside this
one have the parts that it uses: `flat.py` the buffer that the parameters are views of, `comm.py`
the collectives, `watch.py` the hooks that tell when a layer's backward begins and ends. Later
chapters hand in parts of their own, each at one of five seams:

| seam | a layer's attribute | here | later chapters hand in |
|---|---|---|---|
| communicator | `comm: Communicator` | all ranks | |
| storage | `flat.storage: Storage` | memory of the device | CPU memory, files |
| schedule | `schedule: Schedule` | the neighbours in a chain | an order that was learnt |
| gradient sink | `flat.sink: GradientSink` | the shard's `.grad` | master weights elsewhere |
| listener | `listener: Listener` | nobody | `Ledger`, which records a run |

**Run this**: `make train` trains a small transformer on two ranks, and compares the memory and the
communication of each rank with these formulas.

**Not covered, and what that costs**: outside a `Zero3Sequential` a layer does not know its
neighbours, so its all-gather starts when it is called, and nothing overlaps with it. Process
subgroups and sparse gradients raise errors. So does double backward (`create_graph=True`, as for a
gradient penalty), except inside `full_params()`, which holds the whole layer meanwhile. A layer
that writes to its own parameters in forward raises an error, because the write would be lost when
the layer is freed; only a write through `.data` in place (`weight.data.clamp_()`) goes unnoticed,
and is lost. Hooks find tensors in tuples, lists, dicts, dataclasses, attributes of modules and of
other objects; if a tensor that needs a gradient takes another way, backward reaches a freed layer
and autograd raises "modified by an inplace operation". Autocast keeps a 16-bit copy of every fp32
weight from forward to backward, and with that half of the memory that sharding saves; bf16 layers
with the fp32 masters of `Zero3Optimizer` keep none. Transforms of `torch.func` around a layer raise
errors, and work inside its module. `torch.compile` around layers runs them uncompiled: compile
their modules, `layer.module.compile()`. Parameters outside sharded layers are not reduced, unless
`DistributedDataParallel` is around the whole.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from zero3.comm import ALONE, Communicator, Listener, Reducer, Silence, Transfer
from zero3.flat import FlatParameter, NamedParams, alike, find_params, hide_params, own_modules
from zero3.guards.contents import Contents, Known, uncompiled
from zero3.offload import Offload
from zero3.sharded import Alone, Schedule, Sharded, ShardedModel, check_arguments, check_chain
from zero3.watch import Call, Watch, in_backward, tensors_in


class Zero3Layer(Sharded):
    r"""
    ## Zero3 layer

    Wrap each layer of a model, or a few consecutive ones, in this module, and call it as you would
    call the layer. In one training step it goes through these states:

    | phase | event | full parameters | full gradients |
    |---|---|---|---|
    | rest | | freed | none |
    | forward | layer $\ell - 1$ begins: *unshard* | arriving | none |
    | | it computes | whole | none |
    | | it is done: *reshard* | freed | none |
    | backward | layer $\ell + 1$ begins: *unshard* | arriving | none |
    | | its own gradients arrive | whole | filling |
    | | the last one is here: *reshard*, *reduce* | freed | in flight, or waiting in a bucket |
    | | the next reduce begins, or the pass ends | freed | freed: the shard has its gradient |
    """

    def __init__(self, module: nn.Module, rank: int | None = None, world_size: int | None = None,
                 device: torch.device | str | None = None, dtype: torch.dtype | None = None,
                 offload: Offload | str | None = None):
        """
        ### Shard a module

        All ranks call this in the same order. All of them get the values that rank 0 has. Buffers
        stay whole.

        * `module` is the layer to wrap, whole, on `device`
        * `rank` and `world_size` default to those of the process group; without one, to 0 and 1
        * `device` defaults to where the parameters are
        * `dtype` is the data type of all parameters; left out, a layer may mix data types
        * `offload` says where the shards rest, as an `Offload` or as "cpu"; left out, on the device

        Raises `TypeError` if the module is no module or the rank no number, and `ValueError` if the
        tier does not exist. Raises `RuntimeError` if the module is sharded already, shares a
        parameter with another layer, is on another device or of another dtype, or differs between
        ranks, and if there is no room for the shards. ZeRO, section 5.3. Keeps I2 and I5.
        """
        check_arguments(module, rank, world_size)
        super().__init__()
        self.module = module
        self.comm = Communicator(rank, world_size)
        self.offload = Offload.of(offload)
        self.label = type(module).__name__
        # Its place in a chain. `Zero3Sequential` sets it, and shares one reducer among its layers.
        self.layer_idx = ALONE
        self.prev_layer = []
        self.next_layer = []
        self.reducer = Reducer(self.comm)
        self.schedule: Schedule = Alone()
        self.listener: Listener = Silence()
        # An unshard has started, and this transfer completes it.
        self.is_fetched = False
        self._gather: Transfer | None = None
        # Inside `full_params` the parameters are whole in other memory.
        self.is_full_elsewhere = False
        # The call for whose backward the layer stays full.
        self.kept_for: weakref.ref[Call] | None = None
        self.watch = Watch(self._pre_backward_hook, self._backward_event)

        params = find_params(module, self, self.cure)
        self.device = self.comm.open(self, params, device, dtype)
        self.flats: list[FlatParameter] = []
        self.chunk = nn.ParameterList()
        for group in alike(params):
            self._shard(group)
        hidden = hide_params(child for _, child in own_modules(module))
        for child in hidden:
            for buffer in child._buffers.values():
                self.comm.broadcast(buffer)
        self.contents = Contents(self, hidden)
        self.refusals = self.contents.refuse_state_dicts()

    # -------------------------------------------------------------------------------------- shard

    @torch.no_grad()
    def _shard(self, params: NamedParams) -> None:
        """
        #### Shard: merge parameters into one buffer, keep $1/N$ of it, free the buffer
        """
        full = self._merge_and_pad_params(list(params))  # (world_size * shard_numel,), device
        shard = self._empty(len(full) // self.comm.world_size, full.dtype)  # (shard_numel,), device
        # Rank 0 sends each rank its part, so that all ranks begin with the same model.
        self.comm.scatter(shard, full)
        trains = next(iter(params)).requires_grad
        storage = self.offload.shard(self, shard, trains)
        flat = FlatParameter(self, params, full, storage, self.comm.aligned, self.cure)
        flat.free()
        self.flats.append(flat)
        self.chunk.append(flat.shard)
        self._follow_requires_grad()
        flat.look_at(None)

    def _merge_and_pad_params(self, params: list[nn.Parameter]) -> torch.Tensor:
        r"""
        #### Merge parameters, and pad so that the length is divisible by `world_size`

        Returns $N \lceil P_\ell/N \rceil$ elements. On an accelerator each parameter and each
        rank's row also begins at a multiple of 16 bytes, because matrix products, copies and NCCL
        are slow otherwise; $P_\ell$ counts the padding between parameters.

        The padding is zero and stays zero. Its gradient is zero, so an elementwise optimizer does
        not move it, and it adds nothing to a norm. Uninitialised memory could hold a NaN instead. A
        NaN in the padding of a gradient would make the norm of all gradients NaN, and clipping by
        that norm would destroy every gradient of the model.
        """
        dtype = params[0].dtype
        pieces = []
        for p in params:
            padding_numel = self.comm.aligned(p.numel(), dtype) - p.numel()
            pieces.append(p.detach().reshape(-1))
            pieces.append(self._empty(padding_numel, dtype).zero_())
        numel = sum(map(len, pieces))
        shard_numel = self.comm.aligned(-(-numel // self.comm.world_size), dtype)
        padding_numel = self.comm.world_size * shard_numel - numel
        return torch.cat([*pieces, self._empty(padding_numel, dtype).zero_()])

    def _empty(self, numel: int, dtype: torch.dtype | None) -> torch.Tensor:
        """
        #### Uninitialised memory on the device: `(numel,)`
        """
        return torch.empty(numel, device=self.device, dtype=dtype)

    def _follow_requires_grad(self) -> None:
        """
        #### Freeze and unfreeze parameters as their shards are
        """
        for i, flat in enumerate(self.flats):
            if flat.follow_requires_grad():
                # A freed parameter would report the hook as a use.
                with torch._C.DisableTorchFunction():
                    self._add_backward_hooks(i)

    def _add_backward_hooks(self, flat_index: int) -> None:
        """
        #### Have each parameter report its gradient

        * `flat_index` is the index of the flat parameter whose parameters these are
        """
        # A hook gets a weak reference and two indices. The garbage collector does not see the hooks
        # of a parameter, so everything that a hook refers to would stay in memory for ever.
        ours = weakref.WeakMethod(self._post_backward_hook)
        for i, slot in enumerate(self.flats[flat_index].slots):
            if slot.param.requires_grad and slot.hook is None:
                slot.hook = slot.param.register_post_accumulate_grad_hook(
                    lambda p, ours=ours, i=i: ours()(flat_index, i, p))

    # ------------------------------------------------------------------------------------ unshard

    def fetch_params(self) -> None:
        r"""
        ### Unshard (all-gather)

        Start the all-gather and return at once, so that communication overlaps the computation of
        the layer that runs meanwhile. `_wait_params` waits for it. All ranks must call this. A rank
        sends its shard to each other rank, $(N-1)\lceil P_\ell/N \rceil$ elements.
        """
        # A prefetch may have started it already.
        if self.is_fetched or self.is_full_elsewhere or not self.flats:
            return
        self.settle_at_end_of_backward()
        # Gradients of this layer may still be arriving, and they arrive in this very buffer.
        self.reducer.finish(self)
        self.is_fetched = True
        # Gather into the *same storage* every time. The parameters are views of it, and so are the
        # tensors that autograd saved in forward. Gathering into fresh memory and copying from there
        # would need the layer's memory twice.
        pairs = [(flat.full, flat.storage.load()) for flat in self.flats]
        self._gather = self.comm.all_gather(self, pairs)
        for flat in self.flats:
            # The next shard may be read into the same memory once the fetch stream has copied it.
            flat.storage.release(self.comm.fetch_stream)
        # Meanwhile, begin to read the shards that are gathered next, if they rest in files.
        for layer in self.schedule.ahead(self):
            for flat in layer.flats:
                flat.storage.read_async()

    def _wait_params(self) -> None:
        """
        #### Wait for the all-gather

        The compute stream waits for the fetch stream; on the CPU this thread waits.
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
        """
        self.kept_for = None
        if not self.is_fetched:
            return
        self._wait_params()
        self.is_fetched = False
        for flat in self.flats:
            flat.close()
            flat.free()
        self.listener.record(self, "free", sum(flat.full.nbytes for flat in self.flats))

    def reshard(self) -> None:
        """
        ### Reshard (free), for other chapters
        """
        self._cleanup_params()

    def _release(self, call: Call | None = None) -> None:
        """
        #### Reshard, unless the schedule says that the layer is needed again at once

        * `call` is the forward call that has ended; in backward there is none

        Backward begins with the layer that ends forward, so the last layer of a chain stays full.
        If the graph is dropped without a backward pass, the call goes with it and the layer is
        freed.
        """
        if call is None or not self.schedule.stays_full(self, call):
            self._cleanup_params()
        else:
            self.kept_for = weakref.ref(call, lambda _: self._cleanup_params())

    # ------------------------------------------------------------------------------------ forward

    @uncompiled
    def forward(self, *args, **kwargs):
        """
        ### Forward pass: unshard, compute, reshard
        """
        # A forward inside a backward pass is activation checkpointing, which computes the layer
        # again. Its backward follows, so the layer stays full until then.
        recompute = in_backward()
        self._prepare(recompute)
        self.settle_at_end_of_backward()
        self.fetch_params()
        self._wait_params()
        self.listener.record(self, "compute")
        call = Call()
        try:
            args, kwargs = self.watch.inputs(call, args, kwargs)
            # Inside the module, `self.parameters()` yields the full parameters.
            with self.contents:
                output = self.module(*args, **kwargs)
            self.refuse_writes()
            # A module may also keep a tensor as an attribute, an auxiliary loss for instance.
            outputs = list(tensors_in((output, self.module)))
            self.refuse_freed_outputs(outputs)
            self.watch.outputs(call, outputs)
        except BaseException:
            # Checkpointing ends a recomputation by an exception too, and backward then goes on.
            if not recompute:
                self._cleanup_params()
            raise
        self.listener.record(self, "computed")
        if not recompute:
            self._release(call)
        return output

    def _prepare(self, recompute: bool) -> None:
        """
        #### Notice everything that has changed since the last forward
        """
        self.contents.check()
        if self.kept_for and not recompute:
            # Full since a forward whose backward never came. The optimizer may have stepped since.
            self._cleanup_params()
        self._follow_requires_grad()
        self.warn_of_autocast()

    # ----------------------------------------------------------------------------------- backward

    def _pre_backward_hook(self, call: Call, *_) -> None:
        """
        #### The gradient of an output is here: this layer's backward begins

        Unshard again, and prefetch the layer that backward reaches next.
        """
        self.refuse_double_backward()
        self.settle_at_end_of_backward()
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
        """
        flat = self.flats[flat_index]
        slot = flat.slots[slot_index]
        grad: Any = param.grad
        # Autograd also calls the hook when it finds that there is no gradient.
        if grad is None:
            return
        # The flat gradient gets a copy, so free the original.
        param.grad = None
        self.refuse_sparse(grad, slot.names[0])
        self.settle_at_end_of_backward()
        if flat.grad is None:
            # (world_size * shard_numel,), device, of the data type that the optimizer asks for
            full_grad = self._empty(len(flat.full), flat.shard.grad_dtype)
            flat.begin_grad(full_grad)
            self.listener.record(self, "gradients", full_grad.nbytes)
        # Divide by the number of ranks here, and nowhere else: the reduce-scatter then sums to the
        # mean. Dividing before the sum keeps it within the range of fp16.
        mean = 1 / self.comm.world_size
        flat.collect(slot, grad, mean)
        self.watch.arrived.add(slot.names)
        del grad
        # This may have been the layer's last gradient.
        self._backward_event()

    def _backward_event(self, call: Call | None = None, *_) -> None:
        """
        #### A gradient is complete, of a parameter or of an input

        * `call` is the call whose input it is; for a parameter there is none
        """
        self.watch.input_arrived(call)
        if self.is_over():
            self._backup_grads()

    def is_over(self) -> bool:
        """
        ### Whether backward no longer needs the full parameters
        """
        trainable = sum(len(flat.slots) for flat in self.flats if flat.trains)
        return self.watch.inputs_left <= 0 and len(self.watch.arrived) == trainable

    # ------------------------------------------------------------------------------------- reduce

    @torch.no_grad()
    def _backup_grads(self) -> None:
        r"""
        #### Reshard, and reduce-scatter the gradients

        Start the reduce-scatter and return, so that it overlaps the backward pass of the layer
        below. All ranks must call this. A rank sends each other rank its part of the flat gradient,
        $(N-1)\lceil P_\ell/N \rceil$ elements.
        """
        self._wait_params()
        self.refuse_writes()
        self._release()
        self.watch.arrived.clear()
        flats = [flat for flat in self.flats if flat.grad is not None]
        for flat in flats:
            flat.zero_missing()
        # The gradients of the other ranks arrive where the full parameters were.
        pairs: Any = [(flat.grad, flat.receive_buffer) for flat in flats]
        # A bucket keeps the gradients of small layers, until several leave together.
        if pairs and not self.reducer.keeps(self, pairs):
            self.reducer.started([self], self.comm.reduce_scatter([self], pairs))
        if self.is_alone:
            # No neighbour's backward will end this reduce, so end it now.
            self.reducer.finish(self)

    def reduce(self) -> None:
        """
        ### Reduce the gradients that were held back, for other chapters
        """
        self._backup_grads()

    @torch.no_grad()
    def add_reduced(self, totals: list[torch.Tensor]) -> None:
        """
        ### Add the reduced gradients to those of the shards

        * `totals` are the means over ranks, `(shard_numel,)`, one for each flat gradient

        A second backward adds, so $k$ micro-batches give the gradient of one batch $k$ times as
        large.
        """
        flats = [flat for flat in self.flats if flat.grad is not None]
        for flat, total in zip(flats, totals, strict=True):
            self.reducer.deliver(total, flat.sink or flat)
        self.listener.record(self, "reduced", sum(total.nbytes for total in totals))
        for flat in flats:
            flat.drop_full_grad()
            flat.receive_buffer.untyped_storage().resize_(0)
        self.listener.record(self, "free", None)


class Chain:
    """
    ## The schedule of a chain: forward the next layer, backward the previous one
    """

    def ahead(self, layer: Sharded) -> list[Sharded]:
        """
        ### The neighbour that computes next
        """
        if in_backward():
            # Below the first trainable layer nothing goes backward, and nothing is gathered.
            return [before for before in layer.prev_layer if before.watch.pending]
        if not layer.next_layer and torch.is_grad_enabled():
            # Backward begins with the last layer, so the one before it comes next.
            return layer.prev_layer
        return layer.next_layer

    def stays_full(self, layer: Sharded, call: Call) -> bool:
        """
        ### Whether this is the last layer, and a backward pass can follow
        """
        return not layer.next_layer and call.outputs > 0


class Zero3Sequential(ShardedModel):
    """
    ## A chain of layers, each gathered while the one before it computes
    """

    def __init__(self, modules: Iterable[Zero3Layer]):
        """
        ### Link the layers

        * `modules` are `Zero3Layer`s in forward order, in a list or another iterable

        Raises `TypeError` for anything else, and `ValueError` without a layer.
        """
        super().__init__()
        layers = check_chain(modules)
        for i, layer in enumerate(layers):
            layer.layer_idx = i
            layer.label = f"layer {i} ({layer.label})"
            layer.schedule = Chain()
        # Layers without parameters have nothing to gather; the chain passes over them.
        sharded = [layer for layer in layers if layer.flats]
        for before, after in pairwise(sharded):
            before.next_layer.append(after)
            after.prev_layer.append(before)
            # One reduce is in flight at a time, so all layers share a reducer.
            after.comm = before.comm
            after.reducer = before.reducer
        self.module_list: Any = nn.ModuleList(layers)
        self.sharded_layers = tuple(layers)
        self.known = Known([self, self.module_list])

    def walk(self) -> Iterator[Zero3Layer]:
        """
        ### Walk the layers, one all-gather ahead

        `forward` walks like this. Do it yourself if layers take more than one tensor: `for layer in
        model.walk(): x = layer(x, mask)`.
        """
        self.refuse_changes(self.module_list)
        try:
            for layer in self.module_list:
                layer.fetch_params()
                # Prefetch: this all-gather overlaps the computation of `layer`.
                for ahead in layer.next_layer:
                    ahead.fetch_params()
                yield layer
        finally:
            # A walk that ends early, by `break` or by an exception, has gathered a layer in vain.
            for layer in self.module_list:
                if layer.kept_for is None and not in_backward():
                    layer._cleanup_params()

    @uncompiled
    def forward(self, *args, **kwargs):
        """
        ### Forward pass of the chain

        The first layer takes the arguments, each other one the output of the layer before it.
        """
        with closing(self.walk()) as layers:
            for layer in layers:
                args = (layer(*args, **kwargs),)
                kwargs = {}
        return args[0]

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """
        ### The full parameters of all layers at once, named as in an `nn.Sequential`

        This holds the whole model in memory; `Zero3Layer.full_params` holds one layer.
        """
        with ExitStack() as stack:
            params = {}
            # Each layer once, also if it is in the chain twice. It has names for each place.
            for layer in dict.fromkeys(self.module_list):
                params[layer] = stack.enter_context(layer.full_params(writeback))
            yield {f"{i}.{name}": p for i, layer in enumerate(self.module_list)
                   for name, p in params[layer].items()}

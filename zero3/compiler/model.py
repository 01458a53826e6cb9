r"""
# Compiled models

`compile` shards a model as `wrap` does, and has `torch.compile` make graphs of its step. In these
graphs, passes decide when layers are gathered and freed.

Shards, tiers, the optimizer and checkpoints are those of a wrapped model.

Take a model of four layers with 10 elements each, on two ranks, with room for 30 full elements. Its
input needs a gradient, so backward reads the weights of all layers:

| | wrapped | compiled |
|---|---|---|
| all-gathers in forward | 4 | 4 |
| all-gathers in backward | 3, the last layer stays | 1, three layers stay |
| full at once | 20 | 30 |
| elements that a rank sends | $(4 + 3 + 4) \cdot 5 = 55$ | $(4 + 1 + 4) \cdot 5 = 45$ |

With $K$ the layers that stay full until backward, or that backward does not read, a step sends

$$\Big(3\Psi - \sum_{\ell \in K} P_\ell\Big)\,\frac{N-1}{N} \quad \text{elements per rank}$$

**Small layers.** With `unit_bytes`, small neighbours share a unit: one flat parameter, one
all-gather and one reduce-scatter. Their parameters keep their names. Take 100 linear layers of 64 x
64 weights and a bias on two ranks. Each has 16,640 bytes, so 63 of them fit into 1 MiB:

| | alone | together, `unit_bytes=1 << 20` |
|---|---|---|
| units with parameters | 100 | 2 |
| collectives in a step | 297 | 4 |
| elements that a rank sends | 617,760 | 416,000 |

Alone means `bucket_bytes=0`. Then backward finds two layers full, and does not read the first one.
Together there is room for all, so backward gathers nothing again. The price: such layers cannot be
frozen one by one after `compile`, and the parameters of one are not in its `parameters()`.

**Graph breaks.** Dynamo cannot trace everything, such as a branch that depends on a value. Then
Python runs that line, and the next line begins another graph. Each graph frees what it has
gathered. A layer that Dynamo cannot trace at all runs with its hooks; `report()` says which one,
and why.

**What it gains.** Small layers gain time, because a graph runs with less Python than hooks. Large
ones gain little on a CPU.

**Run this**: `make bench ARGS="--compile"` measures it beside hooks, and beside `fully_shard` with
`torch.compile`.

**Not covered, and what that costs**: `persist_below_numel` of `wrap`; and torch 2.11, with which
some models would train wrongly. If backward never comes, layers that stayed full wait for the next
forward pass to free them. Layers that `compress` has changed run with hooks. A model that returns
one of its weights raises an error when the result is used. A `register_post_accumulate_grad_hook`
of a parameter is an error, and so is a `register_hook` if the gradient comes from several graphs.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakMethod

import torch
from torch import fx, nn
from torch._dynamo import config as dynamo
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.utils import counters
from torch.utils.weak import WeakTensorKeyDictionary

from zero3.compiler.away import StatesAway, leaving
from zero3.compiler.engines import Eager, Inductor
from zero3.compiler.graph import find, full_numel, gather, layers_of, reduce
from zero3.compiler.passes import gathered, improve, move_activations, offload_states
from zero3.compiler.trace import Graphs, Place, are_wanted, graphs_of
from zero3.flat import Slot, own_modules
from zero3.guards.checks import expect, whole
from zero3.guards.contents import uncompiled
from zero3.guards.freed import FreedParameter
from zero3.offload.activations import Forward, LayerActivations, bring_back
from zero3.optimizer.buckets import PlannedBucket
from zero3.watch import in_backward
from zero3.whole_model.units import Together, Unit
from zero3.whole_model.wrap import Classes, Zero3Model, wrap

ENGINES: dict[str, type[Eager]] = {"aot_eager": Eager, "inductor": Inductor}
_OPTIONS = ("leaf_classes", "unit_bytes", "offload", "device", "seed", "init", "checkpoint", "mesh",
            "activations")
# In a unit's `holders` for code outside of graphs, until backward ends. A unit would leave before.
_OUTSIDE: Any = object()
# Dynamo says of these that they were left out on purpose.
_OURS = ("CompiledUnit._forward_with_hooks", "CompiledUnit.fetch_for_others")


class CompiledUnit(Unit):
    """
    ## A layer of a compiled model

    Graphs call its operations.
    """

    reducer: PlannedBucket
    # Whether this pass runs it with hooks, and whether every pass has to.
    by_hooks = False
    untraceable = False
    # Whether a forward pass of the compiled model is running; for the root.
    running = False

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # Dynamo would look for these in the class of the module.
        vars(self).update(named_modules=self.named_modules, named_children=self.named_children)
        for slot in self.slots():
            slot.freed_class.traceable = True  # type: ignore[attr-defined]
        self.flat_slots = [(flat, slot) for flat in self.flats for slot in flat.slots]
        self.away = StatesAway(self)
        # What saves activations in the forward pass that is running.
        self.packs: Forward | None = None
        # The handle of each token that autograd has saved.
        self.handles = WeakTensorKeyDictionary()
        self.hooked: set[Slot] = set()

    def forward(self, *args, **kwargs):
        """
        ### Forward pass: as a part of a graph, or with hooks
        """
        if torch.compiler.is_compiling() and not self.untraceable:
            return self.module(*args, **kwargs)
        return self._forward_with_hooks(*args, **kwargs)

    # Dynamo would trace the communication, too, and compile a parameter's own methods.
    @torch.compiler.disable
    def _forward_with_hooks(self, *args, **kwargs):
        """
        #### Forward pass of a layer that Dynamo cannot trace
        """
        self.by_hooks = True
        for unit in self.externals:
            unit.by_hooks = unit.by_hooks or isinstance(unit.module, Together)
        return super().forward(*args, **kwargs)

    @property
    def root(self) -> "CompiledUnit":
        return self.order.root  # type: ignore[return-value]

    def prepare(self) -> None:
        """
        ### Notice what has changed since the last forward; free the layer if backward never came
        """
        self._prepare(recompute=False)
        self.by_hooks = False
        self.reshard()

    # ------------------------------------------------------------------- operations of a graph

    def wait(self) -> list[torch.Tensor]:
        """
        ### Wait for the all-gather, and return the parameters
        """
        # If the layer was kept, its gradients may be in flight, and it is about to collect others.
        self.reducer.finish(self)
        self.fetch_params()
        self._wait_params()
        # Graphs read views of the flat parameters. A use outside of graphs still has to be noticed.
        for flat in self.flats:
            flat.close(is_freed=False)
        return [slot.view for slot in self.slots()]

    def collect(self, place: int, grad: torch.Tensor) -> None:
        """
        ### Add the gradient of the parameter with the index `place` to the flat gradient
        """
        if not are_wanted():
            return
        flat, slot = self.flat_slots[place]
        self.guard.before_grad(grad, slot.names[0])
        grad = self._hooked(slot, grad)
        if flat.grad is None:
            # (world_size * shard_numel,), of the reduce's data type, device
            flat.begin_grad(self._empty(len(flat.full), flat.shard.grad_dtype))
        flat.collect(slot, grad, 1 / self.comm.divisor)

    def _hooked(self, slot: Slot, grad: torch.Tensor) -> torch.Tensor:
        """
        #### Call a parameter's hooks, because autograd does not see the parameter
        """
        # A freed parameter would report a use.
        with torch._C.DisableTorchFunction():
            hooks = [*(slot.param._backward_hooks or {}).values()]
            others = (slot.param._post_accumulate_grad_hooks or {}).keys() - {slot.hook.id}
        if not (hooks or others):
            return grad
        in_parts = self.by_hooks or slot in self.root.hooked
        self.expect(not (others or in_parts), f"cannot call the hooks of `{slot.names[0]}`",
                    "`register_hook`, on a parameter that one graph of the backward pass uses",
                    "`register_post_accumulate_grad_hook`" if others else "parts of its gradient, "
                    "from several graphs", "use `wrap`, or remove the hook")
        self.root.hooked.add(slot)
        for hook in hooks:
            found = hook(grad)
            grad = grad if found is None else found
        return grad

    def begin_reduce(self, *others: Unit) -> None:
        """
        ### Reduce-scatter the gradients of this layer and others
        """
        for layer in (self, *others):
            layer.reduce()
        self.reducer.send()

    def reduce(self) -> None:
        """
        ### Put the gradients into the bucket, if there are any
        """
        if self.by_hooks:
            super().reduce()
            return
        self.choose_receive_buffers()
        pairs = [(flat.zero_missing(), flat.receive_buffer) for flat in self.flats
                 if flat.grad is not None]
        if pairs:
            self.reducer.make_way(self, pairs)

    def finish_reduce(self, *_: Unit) -> None:
        """
        ### Wait for the reduce-scatter of this layer, and of those that share it
        """
        self.reducer.finish(self)

    def held_tensors(self) -> Iterator[torch.Tensor | None]:
        """
        ### Memory for a `Ledger`: states on their way back too
        """
        yield from super().held_tensors()
        # While they leave, the optimizer still has them.
        yield from [part.copy.near for part in self.away.parts]

    def refuse_old(self, versions: list[int]) -> None:
        """
        ### Refuse backward through weights that have changed since forward
        """
        self._settle_at_end_of_backward()
        self.guard.refuse_old_calls(tuple(versions))

    def put_away(self, tensor: torch.Tensor) -> torch.Tensor:
        """
        ### Have an activation leave when the next layer computes, and return a token for it
        """
        if self.packs is None:
            saving: Any = self.saving
            self.packs = Forward(saving.activations, self, ())
        token = torch.empty(0, device="cpu")
        self.handles[token] = self.packs.pack(tensor)
        return token

    def bring(self, token: torch.Tensor) -> torch.Tensor:
        """
        ### The activation of a token
        """
        return bring_back(self.handles[token])

    @torch.compiler.disable
    def fetch_for_others(self) -> bool:
        """
        ### Gather the parameters for code that Dynamo could not trace

        It stays full until the end of backward. Unless it is the root, later passes run it with
        hooks.
        """
        if self.order.stack or in_backward() or not self.root.running:
            return super().fetch_for_others()
        self.holders.add(_OUTSIDE)
        self.by_hooks = True
        for unit in self.order.units:
            # This layer, or the layers that share this unit.
            if unit is self or (isinstance(self.module, Together) and self in unit.externals):
                # The root's hooks would run the whole model without graphs.
                unit.untraceable = unit is not self.root
        self.fetch_params()
        self.show()
        return True

    # ------------------------------------------------------------------------- end of backward

    def leave(self) -> None:
        """
        ### Stop using parameters; a graph frees layers itself
        """
        if self.by_hooks:
            super().leave()

    def _settle_at_end_of_backward(self) -> None:
        """
        #### Have the end of this backward pass settle the layer; in graphs the root, for all
        """
        if self.by_hooks or self is self.root:
            super()._settle_at_end_of_backward()
        else:
            self.root._settle_at_end_of_backward()

    def settle(self, raised: bool) -> None:
        """
        ### Finish the layer's part of a backward pass; the root also that of the graphs
        """
        if self is self.root and raised and not self.comm.broken:
            for unit in self.order.units:
                self.reducer.drop(unit)
                unit.drop_full_grads()
                unit.reshard()
        self.holders.discard(_OUTSIDE)
        self.hooked.clear()
        super().settle(raised)


class CompiledModel(Zero3Model):
    """
    ## A compiled model
    """

    unit_class = CompiledUnit

    def __init__(self, *args: Any,
                 backend: str,
                 limit_numel: int | None,
                 bucket_bytes: int,
                 offload_states_bytes: int,
                 is_chain: bool):
        """
        ### Make the units, and choose how to compile them

        * `is_chain` says that each module of a chain is a layer
        """
        self.is_chain = is_chain
        # Layers whose optimizer states leave for a while, as of the last compilation.
        self.leaving: list[str] = []
        super().__init__(*args)
        self.expect(not self.comm.stages.same_layers, "cannot be compiled", "whole weights",
                    "parts of them, split over ranks, whose communication no graph has",
                    "use `wrap`")
        layers = {"root" if unit is self.units[0] else unit.title: unit for unit in self.units}
        self.numel = {name: unit.numel for name, unit in layers.items()}
        itemsize = max(flat.full.itemsize for unit in self.units for flat in unit.flats)
        self.bucket_numel = bucket_bytes // itemsize if self.comm.world_size > 1 else 0
        # A layer and the next one; or several small ones.
        room_numel = max(3 * self.bucket_numel, *(2 * unit.numel for unit in self.units[1:]))
        self.limit_numel = limit_numel or self.numel["root"] + room_numel
        on_cpu = self.units[0].device.type == "cpu"
        if offload_states_bytes and on_cpu:
            warnings.warn(f"rank {self.comm.global_rank}: `offload_states_bytes` does nothing on "
                          "the CPU, because optimizer states that leave the device would stay in "
                          "the same memory. What to do: nothing, or leave it out.", stacklevel=4)
        self.offload_states_bytes = 0 if on_cpu else offload_states_bytes
        self.breaks: list[str] = []  # why graphs ended early, in Dynamo's words
        self.earlier_breaks = counters["graph_break"].copy()
        self.engine = self._engine_named(backend)(layers)
        # Dynamo calls it while it traces. Elsewhere it stands for code that is not traced.
        skip_code(FreedParameter.__torch_function__.__func__.__code__)  # type: ignore[attr-defined]
        self._compile()

    def _engine_named(self, name: str) -> type[Eager]:
        """
        #### The engine with this name, or the one that needs no compiler if a rank has none

        All ranks call it (all-gather).
        """
        missing = self.comm.gather(
            Inductor.missing(self.units[0].device) if name == Inductor.name else "")
        for rank, problem in zip(self.comm.ranks, missing, strict=True):
            if problem:
                warnings.warn(f"rank {self.comm.global_rank}: compiled by \"aot_eager\" and not by "
                              f"\"{name}\", because rank {rank} has no compiler: {problem}",
                              stacklevel=5)
                return Eager
        return ENGINES[name]

    def _number_units(self) -> None:
        """
        #### Number the units, and give them a bucket that graphs send
        """
        super()._number_units()
        reducer = PlannedBucket(self.comm)
        units: Any = self.units
        for unit in units:
            unit.reducer = reducer
            # Compressed weights change after each step.
            compressed = [path for path, module in own_modules(unit.module)
                          if not getattr(module, "is_traceable", True)]
            self.expect(unit is not self.units[0] or not compressed, "cannot be compiled",
                        "compressed weights in its layers, which run with hooks then",
                        f"`{compressed[:1]}` outside of them", "pass its class in "
                        "`layer_classes`, or use `wrap`")
            # Ranks may compute other parts of a leaf, which would be other graphs.
            unit.untraceable = (unit.leaf and not self.is_chain) or bool(compressed)

    def _compile(self) -> None:
        """
        #### Have the next forward pass trace and compile the model
        """
        self.graphs: list[Graphs] = []
        places = {id(slot.param): Place(name, i, unit.full_name(slot.names[0]))
                  for name, unit in self.engine.layers.items()
                  for i, slot in enumerate(unit.slots())}
        module = self.module

        def run(*args, **kwargs):
            return module(*args, **kwargs)

        # Dynamo keeps graphs with the code, and a limited number, also of models that are gone.
        run.__code__ = run.__code__.replace()
        backend = partial(graphs_of, places, WeakMethod(self._lower), self.engine)
        self.run: Callable[..., Any] = torch.compile(run, backend=backend)

    def _follow_optimizer(self) -> None:
        """
        #### Compile again if the states of other layers have to leave than before
        """
        if self.offload_states_bytes:
            now = leaving(self.engine.layers, self.offload_states_bytes)
            if now != self.leaving:
                self.leaving = now
                self._compile()

    def _lower(self, graphs: Graphs,
               forward: fx.Graph,
               backward: fx.Graph | None) -> None:
        """
        #### Run the passes over traced graphs
        """
        graphs.steps, graphs.kept = improve(forward, backward, self.numel, self.limit_numel,
                                            self.bucket_numel)
        self._check_limit(graphs)
        # If Dynamo has ended a graph early, each graph moves the states of its own layers.
        here = gathered(graphs.forward)
        moving = [layer for layer in self.leaving if layer in here]
        if moving and graphs.backward is not None:
            pair = offload_states(graphs.forward, graphs.backward, moving)
            graphs.steps.append(("offload", *pair))
        saving = self.module.saving
        if (isinstance(saving, LayerActivations) and here and graphs.backward is not None
                and saving.activations.moves_from(self.module.device)):
            pair = move_activations(graphs.forward, graphs.backward)
            graphs.steps.append(("activations", *pair))
        self.graphs.append(graphs)

    def _check_limit(self, graphs: Graphs) -> None:
        """
        #### Refuse a limit that cannot be kept
        """
        least = max(max(full_numel(graph, self.numel, kept), default=0)
                    for graph, kept in ((graphs.forward, []), (graphs.backward, graphs.kept))
                    if graph is not None)
        self.expect(self.order.max_live_numel is None or least <= self.limit_numel,
                    "cannot be compiled",
                    f"at most {self.limit_numel:,} full elements, as `limit_numel` says",
                    f"{least:,} at one operation", "raise the limit, or pass smaller layers")

    @uncompiled
    def _forward(self, *args, **kwargs):
        """
        #### Forward pass of the model
        """
        if any(unit.is_full_elsewhere for unit in self.units):
            return super()._forward(*args, **kwargs)
        self.check()
        self._follow_optimizer()
        for unit in self.units:
            unit.prepare()
        self.module.running = True
        try:
            # After a graph break, each layer has graphs of the same code.
            with ExitStack() as shown, dynamo.patch(recompile_limit=8 + 2 * len(self.units),
                                                    skip_nnmodule_hook_guards=False):
                # A layer may ask for its own `parameters()`.
                for unit in self.units:
                    shown.enter_context(unit.guard)
                output = self.run(*args, **kwargs)
            self._warn_of_breaks()
            return output
        except BaseException:
            for unit in self.units:
                unit.reshard()
            raise
        finally:
            self.module.running = False
            for unit in self.units:
                unit.packs = None

    def communication(self, graphs: Graphs) -> list[tuple[str, int]]:
        """
        ### What a rank sends in a step with these graphs, in order

        Returns "gather" or "reduce", and the bytes that each rank sends.
        """
        others = self.comm.world_size - 1
        found = []
        for graph in filter(None, (graphs.forward, graphs.backward)):
            for node in find(graph, gather, reduce):
                flats = [flat for name in layers_of(node)
                         for flat in self.engine.layers[name].flats]
                if node.target is gather:
                    own_bytes = sum(flat.shard.nbytes for flat in flats)
                else:
                    own_bytes = sum(len(flat.shard) * flat.shard.grad_dtype.itemsize
                                    for flat in flats if flat.trains)
                found.append((getattr(node.target, "__name__", ""), others * own_bytes))
        return found

    def _warn_of_breaks(self) -> None:
        """
        #### Say once why a part of the model is not in a graph, or where a graph ended early
        """
        for text in counters["graph_break"] - self.earlier_breaks:
            reason = text.partition("\n")[0]
            if reason not in self.breaks and not any(name in text for name in _OURS):
                self.breaks.append(reason)
                warnings.warn(f"rank {self.comm.global_rank}: the compiled model has several "
                              f"graphs, or runs layers with hooks: {reason}. What to do: nothing, "
                              "or trace less; `report()` lists the graphs, and the environment "
                              "variable TORCH_LOGS=graph_breaks says where they end.", stacklevel=3)

    def report(self) -> str:
        """
        ### What was compiled, where graphs ended early, and which layers run with hooks
        """
        lines = [f"rank {self.comm.global_rank}: {len(self.graphs)} graphs, by {self.engine.name}, "
                 f"with at most {self.limit_numel:,} full elements"]
        lines += [graphs.line(self.numel) for graphs in self.graphs]
        lines += [f"{unit.label} runs with hooks" for unit in self.units if unit.untraceable]
        return "\n".join([*lines, *self.breaks])


def compile(model: nn.Module, layer_classes: Classes | None = None, *,
            backend: str = "inductor",
            limit_numel: int | None = None,
            bucket_bytes: int = 1 << 20,
            offload_states_bytes: int = 0,
            **options: Any) -> CompiledModel:
    """
    ## Shard a model in place, and compile its step

    All ranks call it alike.

    * `model` is as for `wrap`
    * `layer_classes` are the classes of its layers; left out, each module of an `nn.Sequential` is
      a layer, whatever `leaf_classes` says
    * `backend` is "inductor", which fuses operations and needs a C++ compiler on the CPU and Triton
      on a GPU; or "aot_eager", which gives the same bits as hooks
    * `limit_numel` is how many elements may be full at once. Left out, there is room for the rest
      and two layers, or three times `bucket_bytes`; and more if an operation needs more
    * `bucket_bytes` of gradients share a reduce-scatter, at most
    * `offload_states_bytes` of optimizer states, rounded up to whole layers, rest in CPU memory
      while forward ends and backward begins (see `away.py`). On the CPU it does nothing
    * `options` are further ones of `wrap`: `leaf_classes`, `unit_bytes`, `offload`, `device`,
      `seed`, `init`, `checkpoint`, `mesh`, `activations`

    Raises `ValueError` for impossible arguments, `TypeError` for an option of `wrap` that is for
    hooks, `RuntimeError` before torch 2.12, and otherwise as `wrap`. The first forward pass raises
    an error if `limit_numel` is too low. [DeepCompile](https://arxiv.org/abs/2504.09983), section
    4; [SimpleFSDP](https://arxiv.org/abs/2411.00284), section 3. Keeps I1 to I9, with `limit_numel`
    in place of I3, and fewer gathers than I4 says.
    """
    for name, value, least in (
            ("limit_numel", limit_numel, 1),
            ("bucket_bytes", bucket_bytes, 0),
            ("offload_states_bytes", offload_states_bytes, 0)):
        expect(whole(value, least) or (value is None and name == "limit_numel"),
               f"compile: `{name}`", f"a whole number of at least {least}", repr(value),
               "pass such a number")
    expect(backend in ENGINES, "compile: `backend`", f"one of {sorted(ENGINES)}", repr(backend),
           "pass one of these")
    for name in options:
        expect(name in _OPTIONS, f"compile: `{name}`", f"one of {sorted(_OPTIONS)}", "another "
               "argument", "leave it out; a graph decides for itself what hooks are told",
               TypeError)
    # Dynamo of torch 2.11 does not see that a layer is frozen or unfrozen later.
    expect(torch.__version__ >= "2.12", "compile", "torch 2.12 or later", torch.__version__,
           "install it, or call `wrap`", RuntimeError)
    if layer_classes is None:
        expect(isinstance(model, nn.Sequential), "compile: `layer_classes`", "the classes of the "
               "model's layers", "none", "pass them; only an `nn.Sequential` can do without")
        options["leaf_classes"] = tuple({type(child) for child in model.children()})
    kind = partial(CompiledModel, backend=backend, limit_numel=limit_numel,
                   bucket_bytes=bucket_bytes,
                   offload_states_bytes=offload_states_bytes, is_chain=layer_classes is None)
    return wrap(  # type: ignore[return-value]
        model, layer_classes or (), max_live_numel=limit_numel, kind=kind, **options)

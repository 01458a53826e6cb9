r"""
# Compiled models

`compile` shards a model as `wrap` does, and has `torch.compile` make graphs of its step. In these
graphs, passes decide when layers are gathered and freed.

A unit of a wrapped model decides step by step: its hooks run when it computes. A unit of a compiled
model has no say. While Dynamo traces, a unit is the module that it stands for, and the graph that
comes out gathers and frees all units. Everything else is the same: the shards and the tiers that
they rest in, the buffers that they are gathered into, the optimizer, the checkpoints.

Take a model of four layers with 10 elements each, on two ranks, with room for 30 full elements:

| | wrapped | compiled |
|---|---|---|
| all-gathers in forward | 4 | 4 |
| all-gathers in backward | 3, the last layer stays | 1, three layers stay |
| full at once | 20 | 30 |
| elements that a rank sends | $(4 + 3 + 4) \cdot 5 = 55$ | $(4 + 1 + 4) \cdot 5 = 45$ |

With $K$ the layers that stay full from forward to backward, a step sends

$$\Big(3\Psi - \sum_{\ell \in K} P_\ell\Big)\,\frac{N-1}{N} \quad \text{elements per rank}$$

**Graph breaks.** Dynamo cannot trace everything: printing a value, or a branch that depends on one.
Then it ends the graph, Python runs that line, and the next line begins another graph. Each graph
frees what it has gathered. A layer that Dynamo cannot trace at all runs with its hooks, as in a
wrapped model; `report()` says which one, and why.

**Run this**: `python -m zero3.compiler` prints the graphs of a small model; `make bench
ARGS="--compile"` measures it beside hooks, and beside `fully_shard` with `torch.compile`.

**Not covered, and what that costs**: `persist_below_numel` and `debug` of `wrap`. Layers that stay
full from forward to backward wait for that backward pass; if it never comes, the next forward pass
frees them. A model that returns one of its weights raises an error when the result is used.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero3.compiler.engines import Eager, Inductor
from zero3.compiler.graph import full_numel, picture
from zero3.compiler.passes import bucket, insert, keep, prefetch, sink
from zero3.compiler.trace import Backend, Graphs
from zero3.flat import FlatParameter, Slot
from zero3.guards.contents import uncompiled
from zero3.guards.options import expect, whole
from zero3.optimizer.buckets import PlannedBucket
from zero3.watch import Call, in_backward
from zero3.whole_model.together import can_share, fetch_together
from zero3.whole_model.units import Unit
from zero3.whole_model.wrap import Classes, Zero3Model, wrap

ENGINES = {"aot_eager": Eager, "inductor": Inductor}


class CompiledUnit(Unit):
    """
    ## A layer of a compiled model

    While the compiler traces, it is the module that it stands for. Its operations are called by
    graphs. If the compiler cannot trace it, it is a `Unit` with hooks.
    """

    # Whether its last forward pass ran with hooks.
    by_hooks = False
    # Whether it is full, and its parameters are closed: graphs read views of the flat parameters.
    in_graph = False
    # The full parameters, as graphs read them, and the places of their gradients. They stand here,
    # because a unit writes a new name to its module if the module has it.
    full_views: list[torch.Tensor] = []
    flat_slots: list[tuple[FlatParameter, Slot]] = []

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        # A freed parameter may be traced, because the graph gathers it.
        for slot in self.slots():
            slot.freed_class.traceable = True
        self.full_views = [slot.view for slot in self.slots()]
        self.flat_slots = [(flat, slot) for flat in self.flats for slot in flat.slots]

    def forward(self, *args, **kwargs):
        """
        ### Forward pass: as a part of a graph, or with hooks
        """
        if torch.compiler.is_compiling():
            return self.module(*args, **kwargs)
        self.by_hooks = True
        return super().forward(*args, **kwargs)

    @property
    def root(self) -> "CompiledUnit":
        root: Any = self.order.root
        return root

    def prepare(self) -> None:
        """
        ### Notice everything that has changed since the last forward, and free the layer

        It may be full since a forward pass whose backward never came.
        """
        self._prepare(recompute=False)
        self.by_hooks = False
        if self.is_fetched:
            self.reshard()

    # ------------------------------------------------------------------- operations of a graph

    def gather(self, others: list[Any]) -> None:
        """
        ### Unshard (all-gather) this layer and others
        """
        fetch_together([self, *others])

    def wait(self) -> list[torch.Tensor]:
        """
        ### Wait for the all-gather, and return the parameters

        A layer that stayed full may have been freed since, by another forward pass. Then it is
        gathered again.
        """
        if self.is_fetched:
            # It has stayed full. Before it collects gradients again, finish those in flight.
            self.reducer.finish(self)
        else:
            self.fetch_params()
        gather = self._gather
        self._gather = None
        if gather is not None:
            gather.wait()
            self.in_graph = True
        return self.full_views

    def _wait_params(self) -> None:
        """
        #### Wait for the all-gather, and open the parameters for hooks

        A graph may have gathered them already, and left them closed.
        """
        super()._wait_params()
        if self.in_graph:
            self.in_graph = False
            for flat in self.flats:
                flat.open()

    def release(self) -> None:
        """
        ### Reshard (free)
        """
        if not self.in_graph:
            self.reshard()
            return
        self.in_graph = False
        self.is_fetched = False
        for flat in self.flats:
            flat.free()
        self.listener.record(self, "free", sum(flat.full.nbytes for flat in self.flats))

    def collect(self, place: int, grad: torch.Tensor) -> None:
        """
        ### Add a gradient to the flat gradient

        * `place` is the index of the parameter
        """
        self._settle_at_end_of_backward()
        flat, slot = self.flat_slots[place]
        if flat.grad is None:
            # (world_size * shard_numel,), of the reduce's data type, device
            flat.begin_grad(self._empty(len(flat.full), flat.shard.grad_dtype))
        flat.collect(slot, grad, 1 / self.comm.divisor)

    def begin_reduce(self, others: list[Any]) -> None:
        """
        ### Reduce-scatter the gradients of this layer and others
        """
        for layer in (self, *others):
            layer.reduce()
        bucket: Any = self.reducer
        bucket.send()

    def reduce(self) -> None:
        """
        ### Put the gradients into the bucket, if there are any

        A graph knows when backward no longer needs the layer. So nothing of what hooks do at the
        end of a layer's backward is left to do, unless the layer ran with hooks.
        """
        if self.by_hooks:
            super().reduce()
            return
        pairs = []
        for flat in self.flats:
            if flat.grad is not None:
                flat.zero_missing()
                # Gradients cannot arrive in the memory of parameters that stay full.
                flat.receive_buffer = flat.full.new_empty(0) if self.is_fetched else flat.full
                pairs.append((flat.grad, flat.receive_buffer))
        if pairs:
            self.reducer.keeps(self, pairs)

    def finish_reduce(self) -> None:
        """
        ### Wait for the reduce-scatter
        """
        self.reducer.finish(self)

    def versions(self) -> list[int]:
        """
        ### How often each shard has been written to
        """
        return [*self.shard_versions()]

    def refuse_old(self, versions: list[int]) -> None:
        """
        ### Refuse backward through weights that have changed since forward
        """
        call = Call()
        call.versions = tuple(versions)
        self.refuse_old_calls(call)

    # ------------------------------------------------------------------------- end of backward

    def _settle_at_end_of_backward(self) -> None:
        """
        #### Have the end of this backward pass settle the layer

        In a graph the root settles for all layers.
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
        super().settle(raised)


class CompiledModel(Zero3Model):
    """
    ## A compiled model

    `compile` makes it. It is used like what `wrap` returns.
    """

    unit_class = CompiledUnit
    bucket_numel = 0
    limit_numel = 0
    run: Callable[..., Any]

    def _number_units(self) -> None:
        super()._number_units()
        reducer = PlannedBucket(self.comm)
        for unit in self.units:
            unit.reducer = reducer

    def plan(self, backend: str, limit_numel: int | None, bucket_bytes: int) -> None:
        """
        ### Choose how to compile

        The arguments are those of `compile`.
        """
        layers = {unit.path or "root": unit for unit in self.units}
        self.numel = {name: unit.numel for name, unit in layers.items()}
        itemsize = max(flat.full.itemsize for unit in self.units for flat in unit.flats)
        if can_share(self.comm):
            self.bucket_numel = bucket_bytes // itemsize
        largest_numel = max(unit.numel for unit in self.units[1:])
        # A layer and the next one; or a bucket that is packed, its layers, and the next bucket.
        room_numel = max(2 * largest_numel, 3 * self.bucket_numel)
        self.limit_numel = limit_numel or self.numel["root"] + room_numel
        self.graphs: list[Graphs] = []
        self.engine = ENGINES[backend](layers)
        places = {id(slot.param): (name, i) for name, unit in layers.items()
                  for i, slot in enumerate(unit.slots())}
        self.run = torch.compile(self.module.__call__,
                                 backend=Backend(places, self._lower, self.engine))

    def _lower(self, graphs: Graphs) -> None:
        """
        #### Run the passes over traced graphs
        """
        numel = self.numel
        first = [other for other in self.graphs if other.frame == self.graphs[0].frame]
        is_first = not first or graphs.frame == first[0].frame
        # The model's first frame may keep layers, unless other graphs run before its backward pass.
        may_keep = is_first and not graphs.broken
        graphs.limit = self.limit_numel
        if not is_first:
            graphs.limit -= max(sum(numel[layer] for layer in other.kept) for other in first)
        limit = graphs.limit
        _, forward, backward = graphs.steps[0]
        forward = insert(forward)
        backward = backward and insert(backward)
        graphs.steps.append(("insert", forward, backward))
        self._check_limit(graphs)
        if backward is not None and may_keep:
            forward, backward, graphs.kept = keep(forward, backward, numel, limit)
            graphs.steps.append(("keep", forward, backward))
        kept = graphs.kept
        forward = prefetch(forward, numel, limit, [])
        backward = backward and prefetch(backward, numel, limit, kept)
        graphs.steps.append(("prefetch", forward, backward))
        if self.bucket_numel:
            forward = bucket(forward, numel, self.bucket_numel, limit, [])
            backward = backward and bucket(backward, numel, self.bucket_numel, limit, kept)
            graphs.steps.append(("bucket", forward, backward))
        if backward is not None:
            backward = sink(backward)
            graphs.steps.append(("sink", forward, backward))
        self.graphs.append(graphs)

    def _check_limit(self, graphs: Graphs) -> None:
        """
        #### Refuse a limit that cannot be kept
        """
        least = max(max(full_numel(graph, self.numel), default=0)
                    for graph in (graphs.forward, graphs.backward) if graph is not None)
        self.expect(least <= graphs.limit, "cannot be compiled", "at most "
                    f"{graphs.limit:,} full elements, as `limit_numel` says",
                    f"{least:,} at one operation", "raise the limit, or pass smaller layers")

    @uncompiled
    def forward(self, *args, **kwargs):
        """
        ### Forward pass of the model

        The first call traces the model and compiles it, which takes a while.
        """
        if any(unit.is_full_elsewhere for unit in self.units):
            return super().forward(*args, **kwargs)
        self.check()
        for unit in self.units:
            unit.prepare()
        try:
            output = self.run(*args, **kwargs)
        except BaseException:
            for unit in self.units:
                unit.reshard()
            raise
        return output

    def report(self) -> str:
        """
        ### What was compiled, where graphs broke, and which layers run with hooks
        """
        lines = []
        for graphs in self.graphs:
            lines.append(f"graph {graphs.number}: ...")
        return "\n".join(lines)


def compile(model: nn.Module, layer_classes: Classes | None = None, *, backend: str = "inductor",
            limit_numel: int | None = None, bucket_bytes: int = 1 << 20, **options: Any
            ) -> CompiledModel:
    """
    ## Shard a model in place, and compile its step
    """
    if layer_classes is None:
        options["leaf_classes"] = tuple({type(child) for child in model.children()})
        layer_classes = ()
    compiled: Any = wrap(model, layer_classes, max_live_numel=limit_numel, kind=CompiledModel, **options)
    compiled.plan(backend, limit_numel, bucket_bytes)
    return compiled

r"""
# Engines: who computes between two communications

`Eager` runs the operations of a graph one by one, and `Inductor` compiles those that stand between
two communications into one function.

Inductor, the last part of `torch.compile`, fuses and reorders operations. But communication has to
stay where the passes have put it, on all ranks. So Inductor gets only the *regions* in between:

| graph | becomes |
|---|---|
| `wait(a)` | `wait(a)` |
| `h = mm(x, w)`, `r = relu(h)` | `r = region(x, w)` |
| `release(a)`, `gather(c)` | `release(a)`, `gather(c)` |
| `wait(b)` | `wait(b)` |

A model of $L$ equal layers has about $2L$ regions, but only few different ones. Each of these is
compiled once:

$$\text{compilations} \;=\; \text{distinct regions} \;\ll\; 2L$$

**Run this**: `python -m pytest tests/compiler/test_compiler.py -k within_rounding`.

**Not covered, and what that costs**: nothing is fused across the border between two layers. A
`release`, a `gather` or a `reduce` inside a region waits until the region ends. So memory is freed
a little later, within the limit, and communication overlaps the next region only.
"""

import operator
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import fx
from torch._functorch.partitioners import default_partition
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_symbols, is_symbol_binding_fx_node

from zero3.compiler.graph import (
    DELAYABLE,
    OPERATIONS,
    find,
    insert_after,
    is_view,
    linked,
    on_copies,
    wait,
)


class Eager:
    """
    ## Run a graph operation by operation

    The results are those of the model without a compiler, bit for bit.
    """

    name = "aot_eager"
    decompositions: Any = None
    partition: Any = staticmethod(default_partition)

    def __init__(self, layers: dict[str, Any]):
        # The compiler keeps the engine when the model is gone.
        self.layers: Any = WeakValueDictionary(layers)

    def compile(self, graph: fx.Graph) -> Callable:
        """
        ### A function that takes a list of arguments, and empties it
        """
        call: Any = torch.no_grad()(linked(graph, self.layers).forward)
        call._boxed_call = True
        return call


class Inductor(Eager):
    """
    ## Compile what stands between two communications
    """

    name = "inductor"

    def __init__(self, layers: dict[str, Any]):
        """
        ### Import the compiler, which takes seconds
        """
        super().__init__(layers)
        from torch._inductor import compile_fx
        from torch._inductor.decomposition import select_decomp_table

        self.inductor = compile_fx
        self.decompositions = select_decomp_table()
        self.compiled: dict[str, Callable] = {}

    def partition(self, *args, **kwargs):
        """
        ### Cut the joint graph into forward and backward
        """
        # Random operations get a seed there, and Inductor looks for the mode to make its tensor in.
        with V.set_fake_mode(TracingContext.get().fake_mode):
            return self.inductor.partition_fn(*args, **kwargs)

    def compile(self, graph: fx.Graph) -> Callable:
        """
        ### Compile the regions, and return such a function
        """
        return super().compile(self.fused(graph))

    @classmethod
    def missing(cls, device: torch.device) -> str:
        """
        ### The compiler that this machine lacks, or an empty string
        """
        if device.type != "cpu":
            from torch.utils._triton import has_triton

            return "" if has_triton() else "no Triton"
        from torch._inductor.cpp_builder import get_cpp_compiler

        try:
            get_cpp_compiler()
        except RuntimeError as error:
            return f"{error}"
        return ""

    @on_copies
    def fused(self, graph: fx.Graph) -> fx.Graph:
        """
        ### A graph with one operation for each region
        """
        for region in regions_of(graph):
            self._fuse(graph, region)
        return graph

    def _fuse(self, graph: fx.Graph, region: list[fx.Node]) -> None:
        """
        #### Replace the operations of a region by one

        It takes the place of the last one, because all inputs are there by then.
        """
        inside = set(region)
        inputs = [*dict.fromkeys(node for each in region for node in each.all_input_nodes
                                 if node not in inside)]
        inputs = [*dict.fromkeys((*_sizes(graph, [*inputs, *region]), *inputs))]
        results = [node for node in region if not inside.issuperset(node.users)]
        call = insert_after(
            region[-1],
            self._compiled(alone(region, inputs, results)),
            *inputs)
        for node in reversed(find(graph, *DELAYABLE)):
            # Those that stand inside follow behind it, in their order.
            if region[0] < node < call:
                call.append(node)
        for i, node in reversed([*enumerate(results)]):
            result = insert_after(call, operator.getitem, call, i)
            result.meta = node.meta
            node.replace_all_uses_with(result)
        for node in reversed(region):
            graph.erase_node(node)

    def _compiled(self, graph: fx.Graph) -> Callable:
        """
        #### The function of a region; equal regions share one
        """
        examples = [node.meta["val"] for node in graph.nodes if node.op == "placeholder"]
        key = f"{graph} {[_shape(example) for example in examples]}"
        if key not in self.compiled:
            module = fx.GraphModule(torch.nn.Module(), graph)
            # Inductor notes the results' strides there.
            with tracing(TracingContext(detect_fake_mode(examples))):
                run = self.inductor.compile_fx_inner(module, examples)

            def region(*inputs: Any) -> Any:
                return run([*inputs])

            region.__name__ = f"region_{len(self.compiled)}"
            self.compiled[key] = region
        return self.compiled[key]


def regions_of(graph: fx.Graph) -> list[list[fx.Node]]:
    """
    ## The runs of operations that no communication has to interrupt

    A `wait` ends a region, because what comes after it needs the parameters. So do `offload`,
    `vacate` and `bring`. Those in `DELAYABLE` can stand behind the region.
    """
    regions: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        is_parameter = node.target is operator.getitem and node.args[0].target is wait
        if node.op == "call_function" and node.target not in OPERATIONS and not is_parameter:
            regions[-1].append(node)
        elif node.target in OPERATIONS and node.target not in DELAYABLE:
            regions.append([])
    return [region for region in regions if not all(is_view(node) for node in region)]


def alone(region: list[fx.Node],
          inputs: list[fx.Node],
          results: list[fx.Node]) -> fx.Graph:
    """
    ## A graph of a region alone
    """
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for i, node in enumerate(inputs):
        copies[node] = graph.placeholder(f"input_{i}")
        copies[node].meta = dict(node.meta)
    for node in region:
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copies[n])
        copies[node] = graph.create_node(node.op, node.target, args, kwargs)
        copies[node].meta = dict(node.meta)
    output = graph.output(tuple(copies[node] for node in results))
    # Have Inductor keep the strides, because other regions were traced with them.
    output.meta["user_visible_output_idxs"] = [*range(len(results))]
    return graph


def _sizes(graph: fx.Graph, nodes: list[fx.Node]) -> list[fx.Node]:
    """
    #### The sizes among a graph's inputs that the shapes of these nodes depend on
    """
    symbols = free_symbols([node.meta.get("val") for node in nodes])
    return [node for node in graph.nodes if is_symbol_binding_fx_node(node) in symbols]


def _shape(example: Any) -> str:
    """
    #### The shape of an example, as far as a compiled region depends on it
    """
    if not isinstance(example, torch.Tensor):
        return str(example)
    return f"{example.dtype} {tuple(example.shape)} {example.stride()} {example.device}"

r"""
# A step as a list of operations

A graph lists what a model computes, one operation after the other. Six more operations say when
layers are gathered, freed and reduced.

Take a model of two layers, a and b, on two ranks. Each has one matrix of four weights, so each rank
keeps two of them. This is its forward pass, with the number of full weights during each operation:

| operation | full weights |
|---|---|
| `gather(a)` | 4 |
| `w = wait(a)[0]` | 4 |
| `h = mm(x, w)` | 4 |
| `release(a)` | 4 |
| `gather(b)` | 4 |
| `w = wait(b)[0]` | 4 |
| `y = mm(h, w)` | 4 |
| `release(b)` | 4 |

Each pass of `passes.py` is a function from such a list to another one. It can move `gather(b)` to
the top, for instance. Then communication overlaps computation, and eight weights are full at once:

$$\text{live}(t) = \sum_{\ell \text{ gathered at or before } t,\; \text{released at or after } t}
P_\ell \;\le\; \text{limit}$$

Hooks cannot do this. A hook runs when its layer computes, and does not know which operations come
next. A compiler sees the whole step before the first one runs.

| operation | carried out by | communication of a rank |
|---|---|---|
| `gather(a, b)` | starts one all-gather for all of these layers | $N-1$ times their shards |
| `wait(a)` | waits for it, and returns the parameters | |
| `release(a)` | frees the full parameters | |
| `collect(a, 0, g)` | adds `g` to the flat gradient, as that of parameter 0 | |
| `reduce(a, b)` | starts one reduce-scatter for these layers | $N-1$ times their shards |
| `finish(a, b)` | waits for it; the shards have their gradients | |

The operations call methods of the layers, which are those of the heart. So a compiled model gathers
into the same buffers as any other one, from the same tiers, and sends the same messages.

**Run this**: `python -m zero3.compiler` prints a small model's graphs before and after each pass.

**Not covered, and what that costs**: a graph has no branches. If a model takes another branch, it
gets another graph.
"""

import operator
from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import fx


class GraphLayer(Protocol):
    """
    ## A layer, as far as a graph has to know it
    """

    def gather(self) -> None: ...
    def wait(self) -> list[torch.Tensor]: ...
    def release(self) -> None: ...
    def collect(self, place: int, grad: torch.Tensor) -> None: ...
    def begin_reduce(self) -> None: ...
    def finish_reduce(self) -> None: ...


def parameter(layer: str, place: int) -> torch.Tensor:
    """
    ## A parameter, as the model has it: `weight` is parameter 0 of its layer

    Only a graph before the first pass has these. `insert` replaces them.
    """
    raise AssertionError(f"parameter {place} of {layer} was not gathered")


def gather(*layers: GraphLayer) -> None:
    """
    ## Start one all-gather for some layers

    All ranks call it. A rank sends $N-1$ times the bytes of the layers' shards.
    """
    first, *others = layers
    first.gather(others)


def wait(layer: GraphLayer) -> list[torch.Tensor]:
    """
    ## Wait for the all-gather of a layer, and return its parameters
    """
    return layer.wait()


def release(layer: GraphLayer) -> None:
    """
    ## Reshard (free)
    """
    layer.release()


def collect(layer: GraphLayer, place: int, grad: torch.Tensor) -> None:
    """
    ## Add the gradient of a parameter to the flat gradient of its layer
    """
    layer.collect(place, grad)


def reduce(*layers: GraphLayer) -> None:
    """
    ## Start one reduce-scatter for the flat gradients of some layers

    All ranks call it. A rank sends $N-1$ times the bytes of the layers' shards.
    """
    first, *others = layers
    first.reduce_together(others)


def finish(*layers: GraphLayer) -> None:
    """
    ## Wait for the reduce-scatter of some layers
    """
    layers[0].finish()


OPERATIONS = (parameter, gather, wait, release, collect, reduce, finish)


def layers_of(node: fx.Node) -> list[str]:
    """
    ## The names of the layers that an operation is about
    """
    if node.target not in OPERATIONS:
        return []
    return [arg for arg in node.args if isinstance(arg, str)]


def operations(nodes: Iterable[fx.Node], *kinds: Any) -> list[fx.Node]:
    """
    ## The operations of some kinds, in order
    """
    return [node for node in nodes if node.target in kinds]


def copied(graph: fx.Graph) -> fx.Graph:
    """
    ## A copy of a graph, so that a pass leaves its argument alone
    """
    new = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = new.node_copy(node, lambda n: copies[n])
    return new


def live(graph: fx.Graph, numel: dict[str, int], kept: Iterable[str] = ()) -> list[int]:
    """
    ## Full elements during each operation

    * `numel` is what each layer has in full, with padding
    * `kept` are the layers that are whole before the first operation
    """
    whole = set(kept)
    found = []
    for node in graph.nodes:
        if node.target is gather:
            whole |= set(layers_of(node))
        found.append(sum(numel[layer] for layer in whole))
        if node.target is release:
            whole -= set(layers_of(node))
    return found


def linked(graph: fx.Graph, layers: dict[str, GraphLayer]) -> fx.GraphModule:
    """
    ## A module that carries out a graph with these layers

    It takes a list of arguments and empties it, so that each of them is freed after its last use.
    """
    graph = copied(graph)
    root = torch.nn.Module()
    names: dict[str, fx.Node] = {}
    start = next(iter(graph.nodes))
    for node in operations(graph.nodes, *OPERATIONS):
        for name in layers_of(node):
            if name not in names:
                attribute = f"layer_{len(names)}"
                # Not a submodule: its parameters would be those of the graph.
                vars(root)[attribute] = layers[name]
                with graph.inserting_before(start):
                    names[name] = graph.create_node("get_attr", attribute)
        node.args = tuple(names[arg] if isinstance(arg, str) else arg for arg in node.args)
    graph.set_codegen(fx.graph._BoxedCodeGen())
    return fx.GraphModule(root, graph)


def picture(graph: fx.Graph, numel: dict[str, int], kept: Iterable[str] = ()) -> str:
    """
    ## A graph in words: one operation in a line, with the full elements during it
    """
    lines = [f"{'full':>10}  operation"]
    for node, full in zip(graph.nodes, live(graph, numel, kept), strict=True):
        if node.op != "placeholder" and node.target is not operator.getitem:
            lines.append(f"{full:10,}  {_words(node)}")
    return "\n".join(lines)


def _words(node: fx.Node) -> str:
    """
    #### One operation as a line of Python
    """
    if node.op == "output":
        return f"return {', '.join(str(arg) for arg in node.args[0] if arg is not None)}"
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    call = f"{name}({', '.join(_argument(arg) for arg in node.args)})"
    if not node.users:
        return call
    if node.target is wait:
        results = {user.args[1]: user.name for user in node.users}
        return f"{', '.join(results[i] for i in sorted(results))} = {call}"
    return f"{node.name} = {call}"


def _argument(arg: Any) -> str:
    return arg if isinstance(arg, str) else str(arg)

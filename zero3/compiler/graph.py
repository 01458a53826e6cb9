r"""
# A step as a list of operations

A graph lists what a model computes, one operation after the other. Eleven more operations say when
layers are gathered, freed and reduced, and when optimizer states and activations leave.

Take a model of two layers, a and b. Each has one matrix of four weights, of which two ranks keep
two each. This is its forward pass, with the number of full weights during each operation:

| operation | full weights |
|---|---|
| `gather(a)` | 4 |
| `w = wait(a)` | 4 |
| `h = mm(x, w)` | 4 |
| `release(a)` | 4 |
| `gather(b)` | 4 |
| `v = wait(b)` | 4 |
| `y = mm(h, v)` | 4 |
| `release(b)` | 4 |

A pass of `passes.py` moves `gather(b)` to the top, so that the all-gather of b overlaps the product
of a. Then eight weights are full at once. The passes count them before anything runs:

$$\text{full}(t) \;=\; \sum_{\ell \,:\, \text{gather}(\ell) \,\le\, t \,\le\, \text{release}(\ell)}
P_\ell \;\le\; \text{limit} \qquad \text{for each operation } t$$

| operation | meaning | a rank sends |
|---|---|---|
| `gather(a, b)` | start one all-gather for these layers | $N-1$ times their shards |
| `wait(a)` | wait for it, and return the parameters of a | |
| `release(a)` | free the full parameters of a | |
| `collect(a, 0, g)` | add the gradient of parameter 0 to the flat gradient of a | |
| `reduce(a, b)` | start one reduce-scatter for these layers | $N-1$ times their shards |
| `finish(a, b)` | wait for it: the shards have their gradients | |
| `offload(a)` | start to copy the optimizer states of a to CPU memory | |
| `vacate(a)` | wait for the copy, and free their memory on the device | |
| `reload(a)` | start to copy them back; the optimizer waits for it | |
| `t = put_away(a, h)` | have an activation of a leave, and return a token for it | |
| `h = bring(a, t)` | the activation again | |

Layers that share an all-gather arrive in a packed buffer, as large as all of them (see
`together.py`). So `wait` of such a layer takes memory, too.

**Run this**: `python -m zero3.compiler` prints the graphs of a small model after each pass.

**Not covered, and what that costs**: a graph has no branches. A model that takes another branch
gets another graph, which is traced when that happens.
"""

import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import fx

from zero3.compiler.away import StatesAway


class GraphLayer(Protocol):
    """
    ## A layer, as far as a graph has to know it
    """

    away: StatesAway

    def gather(self, others: list["GraphLayer"]) -> None: ...
    def wait(self) -> list[torch.Tensor]: ...
    def release(self) -> None: ...
    def collect(self, place: int, grad: torch.Tensor) -> None: ...
    def begin_reduce(self, others: list["GraphLayer"]) -> None: ...
    def finish_reduce(self) -> None: ...
    def shard_versions(self) -> tuple[int, ...]: ...
    def refuse_old(self, versions: list[int]) -> None: ...
    def put_away(self, tensor: torch.Tensor) -> torch.Tensor: ...
    def bring(self, token: torch.Tensor) -> torch.Tensor: ...


# ---------------------------------------------------------------------------------- operations

# How a graph that runs refers to a layer: weakly, because the compiler keeps its graphs when the
# model is gone.
Reference = Callable[[], GraphLayer]


def parameter(layer: str, place: int) -> torch.Tensor:
    """
    ## A parameter, as the model's code uses it

    * `place` is its index among the parameters of the layer

    The first pass replaces it by `gather` and `wait`.
    """
    raise AssertionError(f"parameter {place} of {layer} was not gathered")


def gather(*layers: Reference) -> None:
    """
    ## Start one all-gather for some layers

    All ranks call it.
    """
    first, *others = [layer() for layer in layers]
    first.gather(others)


def wait(layer: Reference) -> list[torch.Tensor]:
    """
    ## Wait for the all-gather of a layer, and return its parameters
    """
    return layer().wait()


def release(layer: Reference) -> None:
    """
    ## Free the full parameters of a layer
    """
    layer().release()


def collect(layer: Reference, place: int, grad: torch.Tensor) -> None:
    """
    ## Add the gradient of one parameter to the layer's flat gradient
    """
    layer().collect(place, grad)


def reduce(*layers: Reference) -> None:
    """
    ## Start one reduce-scatter for the flat gradients of some layers

    All ranks call it.
    """
    first, *others = [layer() for layer in layers]
    first.begin_reduce(others)


def finish(*layers: Reference) -> None:
    """
    ## Wait for the reduce-scatter of some layers
    """
    layers[0]().finish_reduce()


def remember(*layers: Reference) -> torch.Tensor:
    """
    ## How often the shards have been written to, for the backward pass: int64, CPU
    """
    counts = [count for layer in layers for count in layer().shard_versions()]
    return torch.tensor(counts, dtype=torch.int64)


def refuse_old(versions: torch.Tensor, *layers: Reference) -> None:
    """
    ## Refuse to go backward if the shards have been written to since forward

    * `versions` is what `remember` returned

    Backward gathers the weights once more, so it would compute with the new ones.
    """
    counts = iter(versions.tolist())
    for layer in layers:
        layer().refuse_old([next(counts) for _ in layer().shard_versions()])


def offload(layer: Reference) -> None:
    """
    ## Start to copy the optimizer states of a layer to CPU memory
    """
    layer().away.offload()


def vacate(layer: Reference) -> None:
    """
    ## Wait for that copy, and free the memory of the states on the device
    """
    layer().away.vacate()


def reload(layer: Reference) -> None:
    """
    ## Start to copy the optimizer states of a layer back to the device
    """
    layer().away.reload()


def put_away(layer: Reference, tensor: torch.Tensor) -> torch.Tensor:
    """
    ## Have an activation leave when the next layer computes

    Returns a token for autograd to save: `(0,)`, CPU.
    """
    return layer().put_away(tensor)


def bring(layer: Reference, token: torch.Tensor) -> torch.Tensor:
    """
    ## The activation of a token, which may have to come back first
    """
    return layer().bring(token)


OPERATIONS = (parameter, gather, wait, release, collect, reduce, finish, remember, refuse_old,
              offload, vacate, reload, put_away, bring)
# Operations that may wait until the computation around them has ended.
DELAYABLE = (release, gather, collect, reduce, finish, remember, refuse_old, reload, put_away)


# -------------------------------------------------------------------------------------- graphs


def layers_of(node: fx.Node) -> list[str]:
    """
    ## The names of the layers that an operation is about
    """
    if node.target not in OPERATIONS:
        return []
    return [arg for arg in node.args if isinstance(arg, str)]


def find(graph: fx.Graph, *kinds: Any) -> list[fx.Node]:
    """
    ## The operations of some kinds, in their order
    """
    return [node for node in graph.nodes if node.target in kinds]


def copied(graph: fx.Graph) -> fx.Graph:
    """
    ## A copy of a graph, so that a pass can change it and leave its argument alone
    """
    new = fx.Graph(graph.owning_module)
    copies: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        copies[node] = new.node_copy(node, lambda n: copies[n])
    return new


# Operations that return views, and whose declarations do not say so.
_UNDECLARED = (torch.ops.aten._unsafe_view.default, torch.ops.aten.unsafe_split.Tensor,
               torch.ops.aten.unsafe_split_with_sizes.default,
               torch.ops.aten.unsafe_chunk.default)


def is_view(node: fx.Node) -> bool:
    """
    ## Whether the result of an operation shares the memory of its first argument
    """
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    if node.target in _UNDECLARED:
        return True
    schema = getattr(node.target, "_schema", None)
    aliases = [result.alias_info for result in schema.returns] if schema else []
    return any(alias is not None and not alias.is_write for alias in aliases)


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """
    ## The operations that read the memory of a node, also through views
    """
    for user in node.users:
        yield user
        if is_view(user):
            yield from readers(user)


def full_numel(graph: fx.Graph, numel: dict[str, int], kept: Iterable[str] = ()) -> list[int]:
    """
    ## Full elements during each operation

    * `numel` is what each layer has in full, with padding
    * `kept` are the layers that are whole before the first operation

    A packed buffer counts from its `gather` to the last `wait`.
    """
    whole = set(kept)
    full = sum(numel[layer] for layer in whole)
    # The elements of each packed buffer, by the layer that is the last one to wait for it.
    packed: dict[str, int] = {}
    found = []
    for node in graph.nodes:
        layers = layers_of(node)
        if node.target is gather and len(layers) > 1:
            packed[layers[-1]] = sum(numel[layer] for layer in layers)
            full += packed[layers[-1]]
        elif layers and node.target in (gather, wait) and layers[0] not in whole:
            whole.add(layers[0])
            full += numel[layers[0]]
        found.append(full)
        if node.target is wait:
            full -= packed.pop(layers[0], 0)
        if node.target is release:
            whole.remove(layers[0])
            full -= numel[layers[0]]
    return found


def linked(graph: fx.Graph, layers: dict[str, GraphLayer]) -> fx.GraphModule:
    """
    ## A module that carries out a graph with these layers

    It empties the list of its arguments, so that each one is freed after its last use.
    """
    graph = copied(graph)
    root = torch.nn.Module()
    for node in graph.find_nodes(op="get_attr"):
        vars(root)[node.target] = getattr(graph.owning_module, node.target)
    nodes: dict[str, fx.Node] = {}
    start = next(iter(graph.nodes))
    for node in find(graph, *OPERATIONS):
        for layer in layers_of(node):
            if layer not in nodes:
                name = f"layer_{len(nodes)}"
                vars(root)[name] = weakref.ref(layers[layer])
                with graph.inserting_before(start):
                    nodes[layer] = graph.create_node("get_attr", name)
        node.args = tuple(nodes[arg] if isinstance(arg, str) else arg
                          for arg in node.args)
    graph.set_codegen(fx.graph._BoxedCodeGen())
    return fx.GraphModule(root, graph)


def picture(graph: fx.Graph, numel: dict[str, int], kept: Iterable[str] = ()) -> str:
    """
    ## A graph in words: a line for each operation, with the full elements during it

    Views and inputs are left out.
    """
    lines = [f"{'full':>12}  operation"]
    for node, full in zip(graph.nodes, full_numel(graph, numel, kept), strict=True):
        is_result = node.target is operator.getitem
        if node.op == "call_function" and not is_view(node) and not is_result:
            lines.append(f"{full:12,}  {_line(node)}")
    return "\n".join(lines)


def _line(node: fx.Node) -> str:
    """
    #### One operation as a line of Python
    """
    # An operation with several results has a node for each of them.
    results = [user for user in node.users if user.target is operator.getitem] or [node]
    name = getattr(node.target, "__name__", "").split(".")[0]
    arguments = ", ".join(str(_viewed(arg)) for arg in node.args)
    call = f"{name}({arguments})"
    if not node.users:
        return call
    return f"{', '.join(each.name for each in results)} = {call}"


def _viewed(arg: Any) -> Any:
    """
    #### The tensor that a view is a view of
    """
    while isinstance(arg, fx.Node) and is_view(arg):
        arg = arg.args[0]
    return arg

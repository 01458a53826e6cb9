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
| `gather(a)` | start to all-gather a | $N-1$ times its shard |
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

**Run this**: `notebooks/11_compiler.ipynb` prints the graphs of a small GPT, with the full elements
during each operation.

**Not covered, and what that costs**: a graph has no branches. A model that takes another branch
gets another graph, which is traced when that happens.
"""

import copy
import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import fx

# A function of graphs, and of what else it has to know.
Change = TypeVar("Change", bound=Callable[..., Any])

# ---------------------------------------------------------------------------------- operations


def parameter(layer: str, place: int) -> torch.Tensor:
    """
    ## A parameter, as the model's code uses it

    * `place` is its index among the parameters of the layer

    The first pass replaces it by `gather` and `wait`.
    """
    raise AssertionError(f"parameter {place} of {layer} was not gathered")


class Operation:
    """
    ## An operation on a layer: it calls a method of the layer

    A graph that is printed has names of layers among the arguments. A graph that runs has weak
    references in their places, because the compiler keeps its graphs when the model is gone.
    """

    def __init__(self, name: str, method: str = ""):
        self.__name__ = name
        self.method = operator.attrgetter(method or name)

    def __call__(self, *args: Any) -> Any:
        layer, *others = [arg() if isinstance(arg, weakref.ref) else arg for arg in args]
        return self.method(layer)(*others)


# The table at the head of this file says what they do. All ranks call `gather` and `reduce`.
gather = Operation("gather", "fetch_params")
wait = Operation("wait")
release = Operation("release", "_cleanup_params")
collect = Operation("collect")
reduce = Operation("reduce", "begin_reduce")
finish = Operation("finish", "finish_reduce")
offload = Operation("offload", "away.offload")
vacate = Operation("vacate", "away.vacate")
reload = Operation("reload", "away.reload")
# Its token is what autograd saves: `(0,)`, CPU.
put_away = Operation("put_away")
bring = Operation("bring")


def remember(*layers: Any) -> torch.Tensor:
    """
    ## How often the shards have been written to, for the backward pass: int64, CPU

    * `layers` are weak references
    """
    counts = [count for layer in layers for count in layer().shard_versions()]
    return torch.tensor(counts, dtype=torch.int64, device="cpu")


def refuse_old(versions: torch.Tensor, *layers: Any) -> None:
    """
    ## Refuse to go backward if the shards have been written to since forward

    * `versions` is what `remember` returned

    Backward gathers the weights once more, so it would compute with the new ones.
    """
    counts = iter(versions.tolist())
    for layer in layers:
        layer().refuse_old([next(counts) for _ in layer().shard_versions()])


OPERATIONS = (parameter, gather, wait, release, collect, reduce, finish, remember, refuse_old,
              offload, vacate, reload, put_away, bring)
# Operations that may wait until the computation around them has ended.
DELAYABLE = (release, gather, collect, reduce, finish, remember, refuse_old, reload, put_away)


# -------------------------------------------------------------------------------------- graphs


def layers_of(node: fx.Node) -> list[str]:
    """
    ## The names of the layers that an operation is about
    """
    return [arg for arg in node.args if node.target in OPERATIONS and isinstance(arg, str)]


def find(graph: fx.Graph, *kinds: Any) -> list[fx.Node]:
    """
    ## The operations of some kinds, in their order
    """
    return [node for node in graph.nodes if node.target in kinds]


def copied(graph: fx.Graph) -> fx.Graph:
    """
    ## A copy of a graph
    """
    new = copy.deepcopy(graph)
    # It has the constants that the graph reads.
    new.owning_module = graph.owning_module
    return new


def on_copies(change: Change) -> Change:
    """
    ## Have a function change copies of its graphs

    Each pass begins with it.
    """
    @functools.wraps(change)
    def change_copies(*args: Any) -> Any:
        return change(*(copied(arg) if isinstance(arg, fx.Graph) else arg for arg in args))

    return change_copies  # type: ignore[return-value]


def insert_before(place: fx.Node,
                  target: Callable,
                  *args: Any) -> fx.Node:
    """
    ## Insert an operation before another one
    """
    with place.graph.inserting_before(place):
        return place.graph.call_function(target, args)


def insert_after(place: fx.Node,
                 target: Callable,
                 *args: Any) -> fx.Node:
    """
    ## Insert an operation after another one
    """
    with place.graph.inserting_after(place):
        return place.graph.call_function(target, args)


# Operations that return views, and whose declarations do not say so.
_UNDECLARED = (torch.ops.aten._unsafe_view.default, torch.ops.aten.unsafe_split.Tensor,
               torch.ops.aten.unsafe_split_with_sizes.default,
               torch.ops.aten.unsafe_chunk.default)


def is_view(node: fx.Node) -> bool:
    """
    ## Whether the result of an operation shares the memory of its first argument
    """
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    return node.target in _UNDECLARED or getattr(node.target, "is_view", False)


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """
    ## The operations that read the memory of a node, also through views
    """
    for user in node.users:
        yield user
        if is_view(user):
            yield from readers(user)


def full_numel(graph: fx.Graph,
               numel: dict[str, int],
               kept: Iterable[str] = ()) -> Iterator[int]:
    """
    ## Full elements during each operation, one after the other

    * `numel` is what each layer has in full, with padding
    * `kept` are the layers that are whole before the first operation
    """
    whole = set(kept)
    for node in graph.nodes:
        if node.target is gather:
            whole.update(layers_of(node))
        yield sum(numel[layer] for layer in whole)
        if node.target is release:
            whole.difference_update(layers_of(node))


@on_copies
def linked(graph: fx.Graph, layers: Mapping[str, object]) -> fx.GraphModule:
    """
    ## A module that carries out a graph with these layers

    It empties the list of its arguments, so that each one is freed after its last use.
    """
    root = torch.nn.Module()
    for node in graph.find_nodes(op="get_attr"):
        vars(root)[node.target] = getattr(graph.owning_module, node.target)
    operations = find(graph, *OPERATIONS)
    named = dict.fromkeys(layer for node in operations for layer in layers_of(node))
    nodes: dict[Any, fx.Node] = {}
    for i, layer in enumerate(named):
        vars(root)[f"layer_{i}"] = weakref.ref(layers[layer])
        # At the top, the last one first.
        with graph.inserting_before():
            nodes[layer] = graph.create_node("get_attr", f"layer_{i}")
    for node in operations:
        node.args = tuple(nodes[arg] if isinstance(arg, str) else arg for arg in node.args)
    graph.set_codegen(fx.graph._BoxedCodeGen())
    return fx.GraphModule(root, graph)

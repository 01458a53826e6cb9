r"""
# The passes of the compiler

A pass is a function from a graph to another graph. `insert` puts communication where it is needed;
the others move it to where it costs less.

Take four layers of 10 elements each, a to d, and a limit of 20. After each pass a forward graph
begins like this, and `|` stands for the computation of a layer. The last column is the number of
gathers that overlap computation:

| pass | order of the operations | overlap |
|---|---|---|
| `insert` | gather a, wait a, \|a, release a, gather b, wait b, \|b, release b, ... | 0 |
| then `prefetch` | gather a, gather b, wait a, \|a, release a, gather c, wait b, \|b, ... | 3 |

The limit holds at every operation:

$$\max_t \text{full}(t) \;\le\; \text{limit}$$

`keep` uses the same room for the layers that forward ends with. Backward begins with them, so they
need not be freed in between. With a limit of 20, c and d stay, and backward gathers a and b alone:
six all-gathers in a step instead of eight. If the input of a needs no gradient, there are five,
because backward does not read the weights of a.

[DeepCompile](https://arxiv.org/abs/2504.09983) has other names: `keep` is selective unsharding
there, `prefetch` proactive prefetching, and `offload_states` adaptive offloading (see `away.py`).
[SimpleFSDP](https://arxiv.org/abs/2411.00284) calls `bucket` bucketing, `prefetch` and `sink`
reordering. `move_activations` has activations leave (see `offload/activations.py`).

**Run this**: `notebooks/11_compiler.ipynb` prints the graphs of a small GPT before and after them.

**Not covered, and what that costs**: the passes count elements and not time. Each layer is gathered
once in a graph: if a model uses a weight at its beginning and at its end, it stays full in between.
"""

import operator
from typing import Any

import torch
from torch import fx

from zero3.compiler.graph import (
    bring,
    collect,
    find,
    finish,
    full_numel,
    gather,
    insert_after,
    insert_before,
    is_view,
    layers_of,
    offload,
    on_copies,
    parameter,
    put_away,
    readers,
    reduce,
    refuse_old,
    release,
    reload,
    remember,
    vacate,
    wait,
)

# The name of a pass, and the graphs after it.
Step = tuple[str, fx.Graph, fx.Graph | None]


def improve(forward: fx.Graph,
            backward: fx.Graph | None,
            numel: dict[str, int],
            limit: int,
            bucket_numel: int) -> tuple[list[Step], list[str]]:
    """
    ## All passes, one after the other

    * `forward` and `backward` are traced graphs; without gradients there is no backward
    * `numel` is what each layer of the model has in full, with padding
    * `limit` is how many elements may be full at once
    * `bucket_numel` is how many elements may share a reduce-scatter; with 0 none do

    Returns the graphs before the first pass and after each one, and the layers that are kept for
    backward.
    """
    steps: list[Step] = [("traced", forward, backward)]
    forward = insert(forward)
    backward = backward and insert(backward)
    steps.append(("insert", forward, backward))
    kept: list[str] = []
    # If this graph has only some of the layers, there are other graphs.
    if backward is not None and gathered(forward) == {name for name in numel if numel[name]}:
        forward, backward, kept = keep(forward, backward, numel, limit)
        steps.append(("keep", forward, backward))
    if bucket_numel:
        backward = backward and bucket(backward, numel, bucket_numel)
        steps.append(("bucket", forward, backward))
    forward = prefetch(forward, numel, limit, [])
    backward = backward and prefetch(backward, numel, limit, kept)
    steps.append(("prefetch", forward, backward))
    backward = backward and sink(backward)
    steps.append(("sink", forward, backward))
    return steps, kept


def gathered(graph: fx.Graph) -> set[str]:
    """
    ## The layers that a graph gathers
    """
    return {layer for node in find(graph, gather) for layer in layers_of(node)}


# ------------------------------------------------------------------------------------- insert


@on_copies
def insert(graph: fx.Graph) -> fx.Graph:
    """
    ## Insert the communication

    Each layer is gathered right before its first use, and released after its last one.
    """
    # Move parameters and their views from the top of the graph to where they are read.
    for node in reversed([node for node in graph.nodes if node.users and _is_parameter(node)]):
        # Of two nodes the one that comes first is the smaller one.
        min(node.users).prepend(node)
    layers = [name for node in find(graph, parameter, collect) for name in layers_of(node)]
    for layer in dict.fromkeys(layers):
        _insert_gather(graph, layer)
        # Reduce the gradients when all are there, and the layer is free: on the CPU other ranks'
        # gradients arrive in the memory of its parameters.
        ends = [node for node in find(graph, collect, release) if layer in layers_of(node)]
        if any(node.target is collect for node in ends):
            begun = insert_after(ends[-1], reduce, layer)
            insert_after(begun, finish, layer)
    return graph


def _is_parameter(node: fx.Node) -> bool:
    """
    #### Whether a node is a parameter, or a view of one
    """
    return node.target is parameter or (is_view(node) and _is_parameter(node.args[0]))  # type: ignore[arg-type]


def _insert_gather(graph: fx.Graph, layer: str) -> None:
    """
    #### Gather a layer, wait for it, and release it
    """
    uses = [node for node in find(graph, parameter) if node.args[0] == layer]
    if not uses:
        return
    insert_after(max(reader for node in uses for reader in readers(node)), release, layer)
    whole = insert_before(uses[0], wait, layer)
    insert_before(whole, gather, layer)
    for node in uses:
        node.target = operator.getitem
        node.args = (whole, node.args[1])


# ------------------------------------------------------------------------- what the room is for


@on_copies
def keep(forward: fx.Graph,
         backward: fx.Graph,
         numel: dict[str, int],
         limit: int) -> tuple[fx.Graph, fx.Graph, list[str]]:
    """
    ## Keep layers whole from forward to backward, as far as the limit admits

    Also returns the layers that are kept. Those that backward gathers first are kept for the
    shortest time.
    """
    kept: list[str] = []
    for gathering in find(backward, gather):
        (layer,) = layers_of(gathering)
        # Forward gathers all layers, so it releases this one.
        (released,) = (node for node in find(forward, release) if layer in layers_of(node))
        # Behind its release, forward has the elements of this layer too.
        more = [full + numel[layer] * (node > released)
                for node, full in zip(forward.nodes, full_numel(forward, numel), strict=True)]
        if max(*more, *full_numel(backward, numel, [*kept, layer])) > limit:
            break
        kept.append(layer)
        forward.erase_node(released)
        backward.erase_node(gathering)
    return forward, backward, kept


@on_copies
def bucket(graph: fx.Graph,
           numel: dict[str, int],
           bucket_numel: int) -> fx.Graph:
    """
    ## Let a reduce wait for the next one, while both are small

    Small layers share gathers only in a unit of several layers (see `Together`).
    """
    before: tuple[fx.Node, fx.Node] | None = None
    for pair in zip(find(graph, reduce), find(graph, finish), strict=True):
        if before is not None and _numel(numel, before[0], pair[0]) <= bucket_numel:
            together = before[0].args + pair[0].args
            for node in before:
                graph.erase_node(node)
            for node in pair:
                node.args = together
        before = pair
    return graph


def _numel(numel: dict[str, int], *nodes: fx.Node) -> int:
    """
    #### Elements of the layers that some operations are about
    """
    return sum(numel[layer] for node in nodes for layer in layers_of(node))


@on_copies
def prefetch(graph: fx.Graph,
             numel: dict[str, int],
             limit: int,
             kept: list[str]) -> fx.Graph:
    """
    ## Move each gather up, as far as the limit admits

    * `kept` are the layers that are whole before the graph begins

    The gathers stay in their order.
    """
    earlier: fx.Node | None = None
    for node in find(graph, gather):
        full = dict(zip(graph.nodes, full_numel(graph, numel, kept), strict=True))
        place = node.prev
        while (place.op not in ("placeholder", "root") and place is not earlier
               and full[place] + _numel(numel, node) <= limit):
            place = place.prev
        place.append(node)
        earlier = node
    return graph


@on_copies
def sink(graph: fx.Graph) -> fx.Graph:
    """
    ## Wait for each reduce as late as possible

    One reduce is in flight at a time, so that is right before the next one begins, or the end.
    """
    later = graph.output_node()
    for node in reversed(find(graph, reduce, finish)):
        if node.target is finish:
            later.prepend(node)
        else:
            later = node
    return graph


# ------------------------------------------------------------------------------ optimizer states


@on_copies
def offload_states(forward: fx.Graph,
                   backward: fx.Graph,
                   layers: list[str]) -> tuple[fx.Graph, fx.Graph]:
    """
    ## Have the optimizer states of some layers rest in CPU memory between forward and backward

    * `forward` and `backward` have their communication already
    * `layers` leave in this order, and come back in the reverse one. `forward` gathers each of them
    """
    first = next(node for node in forward.nodes if node.op != "placeholder")
    for layer, end in zip(layers, _ends_of_layers(forward), strict=False):
        insert_before(first, offload, layer)
        insert_before(end, vacate, layer)
    ends = _ends_of_layers(backward)
    for i, layer in enumerate(reversed(layers), len(ends) - len(layers)):
        # Backward may wait for fewer layers than forward, because it reads the weights of fewer.
        insert_before(ends[max(i, 0)], reload, layer)
    return forward, backward


@on_copies
def move_activations(forward: fx.Graph, backward: fx.Graph) -> tuple[fx.Graph, fx.Graph]:
    """
    ## Have the tensors that forward saves for backward leave in between

    * `forward` and `backward` have their communication already

    Each leaves with the layer that reads it last in forward, and is loaded when the layer that
    reads it first in backward has its parameters.
    """
    output = forward.output_node()
    outputs: Any = [*output.args[0]]  # type: ignore[misc]
    inputs = backward.find_nodes(op="placeholder")
    # They follow the versions of the shards, in both graphs.
    first = 1 + outputs.index(find(forward, remember)[0])
    tokens = inputs[1 + inputs.index(find(backward, refuse_old)[0].args[0]) :]
    for i, (node, token) in enumerate(zip(outputs[first:], tokens, strict=False), first):
        if not isinstance(node.meta["val"], torch.Tensor):
            # Only sizes are left.
            break
        place = max((user for user in node.users if user is not output), default=node)
        before = _wait_before(place)
        if before is None:
            before = place = find(forward, wait)[0]
        (layer,) = layers_of(before)
        outputs[i] = insert_after(place, put_away, layer, node)
        _bring(layer, token)
    output.args = (tuple(outputs),)
    return forward, backward


def _bring(layer: str, token: fx.Node) -> None:
    """
    #### Bring an activation after the last `wait` before its first use; without one, at the use
    """
    if token.users:
        user = min(token.users)
        value = insert_after(_wait_before(user) or user.prev, bring, layer, token)
        value.meta = dict(token.meta)
        token.replace_all_uses_with(value, lambda node: node is not value)


def _wait_before(node: fx.Node) -> fx.Node | None:
    """
    #### The last `wait` before an operation, or the operation itself if it is one; else `None`
    """
    return max((each for each in find(node.graph, wait) if each <= node), default=None)


def _ends_of_layers(graph: fx.Graph) -> list[fx.Node]:
    """
    #### Where a layer has computed: at the next `wait`, and at the last operation
    """
    return [*find(graph, wait)[1:], graph.output_node()]

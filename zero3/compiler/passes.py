r"""
# The passes of the compiler

Each pass is a function from a graph to a graph.

`insert` puts the communication where it must be, and the others move it to where it costs less:

| pass | does |
|---|---|
| `insert` | gathers a layer right before its first use, releases it after its last one |
| `keep` | drops a release in forward and the gather in backward, while there is room |
| `prefetch` | moves gathers up, while there is room |
| `bucket` | merges the gathers of small neighbours, and their reduces |
| `sink` | moves the waits for reduces down |
"""

import operator

import torch
from torch import fx

from zero3.compiler.graph import (
    collect,
    copied,
    finish,
    gather,
    layers_of,
    live,
    operations,
    parameter,
    reduce,
    release,
    wait,
)


def insert(graph: fx.Graph) -> fx.Graph:
    graph = copied(graph)
    _sink_views(graph)
    for layer in dict.fromkeys(name for node in operations(graph.nodes, parameter, collect)
                               for name in layers_of(node)):
        _insert_gather(graph, layer)
        _insert_reduce(graph, layer)
    return graph


def _sink_views(graph: fx.Graph) -> None:
    at = {node: i for i, node in enumerate(graph.nodes)}
    views = [node for node in graph.nodes if node.users and of_parameter(node)]
    for node in reversed(views):
        min(node.users, key=at.__getitem__).prepend(node)
        at = {node: i for i, node in enumerate(graph.nodes)}


def _insert_gather(graph, layer):
    uses = [node for node in operations(graph.nodes, parameter) if node.args[0] == layer]
    if not uses:
        return
    at = {node: i for i, node in enumerate(graph.nodes)}
    last = max((reader for node in uses for reader in readers(node)), key=at.__getitem__)
    with graph.inserting_before(uses[0]):
        graph.call_function(gather, (layer,))
        whole = graph.call_function(wait, (layer,))
    for node in uses:
        with graph.inserting_before(node):
            value = graph.call_function(operator.getitem, (whole, node.args[1]))
        value.meta = node.meta
        node.replace_all_uses_with(value)
        graph.erase_node(node)
    with graph.inserting_after(last):
        graph.call_function(release, (layer,))


def _insert_reduce(graph, layer):
    ends = [node for node in operations(graph.nodes, collect, release) if layer in layers_of(node)]
    if not any(node.target is collect for node in ends):
        return
    with graph.inserting_after(ends[-1]):
        begun = graph.call_function(reduce, (layer,))
    with graph.inserting_after(begun):
        graph.call_function(finish, (layer,))


def keep(forward: fx.Graph, backward: fx.Graph, numel: dict[str, int], limit: int
         ) -> tuple[fx.Graph, fx.Graph, list[str]]:
    forward = copied(forward)
    backward = copied(backward)
    kept: list[str] = []
    for node in operations(backward.nodes, gather):
        (layer,) = layers_of(node)
        freed = next(n for n in operations(forward.nodes, release) if layer in layers_of(n))
        stays = [*live(forward, numel)]
        at = [*forward.nodes].index(freed)
        stays[at + 1 :] = [full + numel[layer] for full in stays[at + 1 :]]
        if max(*stays, *live(backward, numel, [*kept, layer])) > limit:
            break
        kept.append(layer)
        forward.erase_node(freed)
        backward.erase_node(node)
    return forward, backward, kept


def prefetch(graph, numel, limit, kept=()):
    graph = copied(graph)
    nodes = [*graph.nodes]
    begin = next(i for i, node in enumerate(nodes) if node.op != "placeholder")
    for node in operations(nodes, gather):
        n = sum(numel[name] for name in layers_of(node))
        full = live(graph, numel, kept)
        nodes = [*graph.nodes]
        at = nodes.index(node)
        while at > begin and full[at - 1] + n <= limit:
            at -= 1
        if nodes[at] is not node:
            nodes[at].prepend(node)
        begin = at + 1
    return graph


def bucket(graph, numel, bucket_numel, limit, kept=()):
    graph = copied(graph)
    head = None
    for node in operations(graph.nodes, gather):
        both = (*head.args, *node.args) if head else ()
        if head and sum(numel[a] for a in both) <= bucket_numel:
            alone = head.args
            head.args = both
            if max(live(graph, numel, kept)) <= limit:
                graph.erase_node(node)
                continue
            head.args = alone
        head = node
    _merge_reduces(graph, numel, bucket_numel)
    return graph


def _merge_reduces(graph, numel, bucket_numel):
    before = None
    for node in operations(graph.nodes, reduce):
        if before and sum(numel[a] for a in (*before.args, *node.args)) <= bucket_numel:
            (ended,) = [n for n in operations(graph.nodes, finish) if n.args == before.args]
            (ends,) = [n for n in operations(graph.nodes, finish) if n.args == node.args]
            node.args = ends.args = (*before.args, *node.args)
            graph.erase_node(ended)
            graph.erase_node(before)
        before = node


def sink(graph):
    graph = copied(graph)
    output = next(reversed(graph.nodes))
    later = output
    for node in reversed(operations(graph.nodes, reduce, finish)):
        if node.target is finish:
            later.prepend(node)
        else:
            later = node
    return graph


def is_view(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return is_view(node.args[0])
    if node.target is torch.ops.aten._unsafe_view.default:
        return True
    schema = getattr(node.target, "_schema", None)
    aliases = [value.alias_info for value in schema.returns] if schema else []
    return any(alias is not None and not alias.is_write for alias in aliases)


def of_parameter(node: fx.Node) -> bool:
    return node.target is parameter or (is_view(node) and of_parameter(node.args[0]))


def readers(node: fx.Node):
    for user in node.users:
        yield user
        if is_view(user):
            yield from readers(user)

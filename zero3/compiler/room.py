r"""
# Room for a step: optimizer states that leave for a while

`offload_states` counts the bytes that are on the device during each operation. If they are too
many, it has optimizer states rest in CPU memory until there is room again.

A step takes the most memory where forward ends and backward begins, because all activations are
there. The optimizer states are not used before the step. So some of them leave in forward, and come
back in backward, when activations have been freed.

Take two layers of four weights in fp32, a and b, on two ranks. Each has 16 bytes in full, and as
many bytes of gradients. The batch has 4 rows of 8 bytes, and so has the result of each layer.
Shards and their gradients take 48 bytes on this rank, optimizer states 32 for each layer. Without
this pass `dv = mm(g, h)` takes 272 bytes. With a limit of 240 the states of b leave:

| operation | rest | full | gradients | activations | states | held |
|---|---|---|---|---|---|---|
| **`offload(b)`** | 48 | | | 32 | 64 | 144 |
| `h = mm(x, w)` | 48 | 16 | | 64 | 64 | 192 |
| `y = mm(h, v)` | 48 | 16 | | 96 | 64 | 224 |
| **`vacate(b)`** | 48 | 16 | | 112 | 64 | 240 |
| `dv = mm(g, h)` | 48 | 16 | | 144 | 32 | 240 |
| `dh = mm(g, v)` | 48 | 16 | | 144 | 32 | 240 |
| `collect(b, 0, dv)` | 48 | | 16 | 144 | 32 | 240 |
| `dw = mm(dh, x)` | 48 | | 16 | 144 | 32 | 240 |
| `collect(a, 0, dw)` | 48 | | 32 | 112 | 32 | 224 |
| `finish(b)` | 48 | | 40 | 96 | 32 | 216 |
| **`reload(b)`** | 48 | | 16 | 96 | 64 | 224 |
| `finish(a)` | 48 | | 24 | 96 | 64 | 232 |

The copy to CPU memory begins at `offload`. It may take until `vacate`, so it overlaps forward. With
the layers $\ell$ whose states are on the device at an operation $t$, its bytes are

$$\text{held}(t) \;=\; \text{rest} + \text{full}(t) + \text{gradients}(t) + \text{activations}(t)
+ \sum_{\ell \text{ here}} \text{states}_\ell \;\le\; \text{limit}$$

The step needs all states. So the rest, all states, and the memory of the step itself have to be
within the limit, too. This pass is called adaptive offloading in
[DeepCompile](https://arxiv.org/abs/2504.09983).

**Run this**: `python -m pytest tests/test_compiler_offload.py`.

**Not covered, and what that costs**: the count is of tensors, so leave some room between the limit
and the size of the device. torch's allocator rounds each tensor up to 512 bytes. It keeps freed
memory for the stream that took it, so activations do not get the memory of freed parameters. An
operation may take memory for itself. Of Inductor, the count is that of its operations before they
are fused: it holds fewer results, and frees the inputs of a region only when that ends. Nobody
counts what the loss takes outside of the model, nor full gradients that `no_sync()` holds back, nor
the sums that replicas exchange. Gradients of shards count in forward already, as with several
micro-batches. Each of these moves the states once more. Time is not counted either: if a copy takes
longer than forward, the device waits for it at `vacate`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

from zero3.compiler.graph import (
    DELAYABLE,
    OPERATIONS,
    collect,
    copied,
    find,
    finish,
    full_numel,
    layers_of,
    offload,
    reduce,
    reload,
    remember,
    vacate,
    wait,
)
from zero3.compiler.trace import inputs_of


class LayerBytes(NamedTuple):
    """
    ## The bytes of a layer on a rank's device, for a step
    """

    full: int  # its full parameters, with padding
    gradient: int  # its flat gradients
    total: int  # this rank's part of their sums
    states: int  # its optimizer states, as far as they may leave


class Room(NamedTuple):
    """
    ## What a step takes on the device, and what there is
    """

    layers: dict[str, LayerBytes]  # in the order in which the optimizer steps them
    rest_bytes: int  # what is there all the time: shards and their gradients
    scratch_bytes: int  # what the step takes besides
    limit_bytes: int

    @property
    def step_bytes(self) -> int:
        """
        ### What the optimizer's step takes: all states are there
        """
        states_bytes = sum(each.states for each in self.layers.values())
        return self.rest_bytes + states_bytes + self.scratch_bytes


# ---------------------------------------------------------------------------------------- the pass


def offload_states(forward: fx.Graph, backward: fx.Graph | None, kept: list[str], room: Room
                   ) -> tuple[fx.Graph, fx.Graph | None]:
    """
    ## Have optimizer states leave the device, as far as the limit demands

    * `forward` and `backward` have their communication already; without gradients there is no
      backward
    * `kept` are the layers that are whole when backward begins

    The layers that are stepped last leave first, because they have the most time to come back. As
    few leave as that order admits; with enough room none. Returns the graphs. They exceed the limit
    if it cannot be kept: `held_bytes` tells. It is DeepCompile's adaptive offloading.
    """
    graphs = [copied(graph) for graph in (forward, backward) if graph is not None]
    gone = _insert_vacates(graphs, kept, room)
    _insert_offloads(graphs[0], gone)
    _insert_reloads(graphs, gone, kept, room)
    return graphs[0], graphs[1] if backward is not None else None


def _insert_vacates(graphs: list[fx.Graph], kept: list[str], room: Room) -> list[str]:
    """
    #### Free the states of one more layer whenever an operation would exceed the limit

    Returns the layers, in the order in which they go.
    """
    staying = [layer for layer, each in room.layers.items() if each.states]
    gone: list[str] = []
    gone_bytes = 0
    end: fx.Node | None = None
    for graph, column in zip(graphs, held_bytes(graphs, kept, room), strict=True):
        for node, nbytes in zip([*graph.nodes], column, strict=True):
            # The inputs of backward are there before its first operation.
            place = _begin_of_region(node) if _runs(node) else end
            while place and staying and nbytes - gone_bytes > room.limit_bytes:
                layer = staying.pop()
                gone.append(layer)
                gone_bytes += room.layers[layer].states
                with place.graph.inserting_before(place):
                    place.graph.call_function(vacate, (layer,))
        end = node
    return gone


def _runs(node: fx.Node) -> bool:
    """
    #### Whether something can be inserted before a node: not before an input
    """
    return node.op != "placeholder"


def _begin_of_region(node: fx.Node) -> fx.Node:
    """
    #### The first operation of the region that an operation is in

    A `vacate` in the middle would cut the region in two, and Inductor would compute other bits.
    """
    while not _is_border(node) and _runs(node.prev) and not _is_border(node.prev):
        node = node.prev
    return node


def _is_border(node: fx.Node) -> bool:
    return node.target in OPERATIONS and node.target not in DELAYABLE


def _insert_offloads(forward: fx.Graph, gone: list[str]) -> None:
    """
    #### Begin all copies at the beginning of forward, so that they overlap as much as they can
    """
    first = next(node for node in forward.nodes if _runs(node))
    with forward.inserting_before(first):
        for layer in gone:
            forward.call_function(offload, (layer,))


def _insert_reloads(graphs: list[fx.Graph], gone: list[str], kept: list[str], room: Room) -> None:
    """
    #### Bring the states back as soon as there is room until the end

    The last one that went is the first one that is stepped, so it comes back first.
    """
    nodes = [*graphs[-1].nodes]
    held = held_bytes(graphs, kept, room)[-1]
    # The most that is held from each operation on.
    most = [max(held[i:]) for i in range(len(held))]
    at = max((i + 1 for i, node in enumerate(nodes) if not _runs(node) or node.target is vacate),
             default=0)
    back_bytes = 0
    for layer in reversed(gone):
        back_bytes += room.layers[layer].states
        # Without any room they come back before the graph returns.
        while at < len(nodes) - 1 and most[at] + back_bytes > room.limit_bytes:
            at += 1
        with graphs[-1].inserting_before(nodes[at]):
            graphs[-1].call_function(reload, (layer,))


# --------------------------------------------------------------------------------- the held bytes


def held_bytes(graphs: list[fx.Graph], kept: list[str], room: Room) -> list[list[int]]:
    """
    ## The bytes on the device during each operation of each graph

    * `graphs` are a forward and a backward graph, or a forward graph alone
    * `kept` are the layers that are whole when backward begins

    It is the formula of the head. An operation counts its arguments, its result, and what else is
    there.
    """
    full = {layer: each.full for layer, each in room.layers.items()}
    callers = _storages_of_caller(graphs)
    states = _states_bytes(graphs, room.layers)
    found = []
    for graph, whole, theirs, states_here in zip(graphs, ([], kept), callers, states,
                                                 strict=False):
        columns = (full_numel(graph, full, whole), _gradient_bytes(graph, room.layers),
                   _activation_bytes(graph, theirs), states_here)
        found.append([room.rest_bytes + sum(row) for row in zip(*columns, strict=True)])
    return found


def _states_bytes(graphs: list[fx.Graph], layers: dict[str, LayerBytes]) -> list[list[int]]:
    """
    #### The optimizer states that are on the device during each operation
    """
    here = sum(each.states for each in layers.values())
    found: list[list[int]] = []
    for graph in graphs:
        found.append([])
        for node in graph.nodes:
            moved = sum(layers[layer].states for layer in layers_of(node))
            if node.target is reload:
                here += moved
            found[-1].append(here)
            if node.target is vacate:
                here -= moved
    return found


def _gradient_bytes(graph: fx.Graph, layers: dict[str, LayerBytes]) -> list[int]:
    """
    #### The flat gradients during each operation

    Each is there from the first `collect` to the `finish` of its layer. Layers that share a reduce
    are packed, so their gradients are there twice meanwhile. At the end, the sums come on top.
    """
    here: dict[str, int] = {}
    found = []
    for node in graph.nodes:
        names = layers_of(node)
        if node.target in (collect, finish):
            here |= {name: layers[name].gradient for name in names}
        if node.target is reduce and len(names) > 1:
            here[f"packed {names}"] = sum(layers[name].gradient for name in names)
        ends = node.target is finish
        found.append(sum(here.values()) + ends * sum(layers[name].total for name in names))
        if ends:
            for name in (*names, f"packed {names}"):
                here.pop(name, None)
    return found


def _activation_bytes(graph: fx.Graph, callers: dict[int, int]) -> list[int]:
    """
    #### The activations during each operation, by storage

    * `callers` are the storages that the caller keeps all the time, with their bytes

    A storage is there from the operation that makes it to the last one that reads it. A result of
    the graph is there until the end.
    """
    nodes = [*graph.nodes]
    at = {node: i for i, node in enumerate(nodes)}
    of_layers = {key for node in nodes if node.target is wait for result in node.users
                 for key, _ in _storages(result)}
    births: dict[int, int] = {}
    deaths: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for i, node in enumerate(nodes):
        for key, nbytes in _storages(node):
            births.setdefault(key, 0 if not _runs(node) else i)
            last = max([i, *(at[user] for user in node.users)])
            deaths[key] = max(last, deaths.get(key, 0))
            sizes[key] = nbytes
    change = [0] * (len(nodes) + 1)
    for key in sizes.keys() - callers.keys() - of_layers:
        change[births[key]] += sizes[key]
        change[deaths[key] + 1] -= sizes[key]
    found = []
    here = sum(callers.values())
    for each in change[:-1]:
        here += each
        found.append(here)
    return found


def _storages_of_caller(graphs: list[fx.Graph]) -> list[dict[int, int]]:
    """
    #### The storages that the caller keeps during each graph, with their bytes

    These are the inputs of the model; in backward also its results, and the gradients that backward
    begins with. The other outputs of forward are saved for backward alone. They begin with the
    counts of `remember`.
    """
    outputs = [*[*graphs[0].nodes][-1].args[0]]  # type: ignore[misc]
    results = outputs
    for node in find(graphs[0], remember):
        results = outputs[: outputs.index(node)]
    found = [_all_storages(inputs_of(graphs[0]))]
    for backward in graphs[1:]:
        saved = _all_storages(outputs)
        gradients = {key: nbytes for key, nbytes in _all_storages(inputs_of(backward)).items()
                     if key not in saved}
        found.append(found[0] | _all_storages(results) | gradients)
    return found


def _all_storages(nodes: list[Any]) -> dict[int, int]:
    return {key: nbytes for node in nodes if isinstance(node, fx.Node)
            for key, nbytes in _storages(node)}


def _storages(node: fx.Node) -> Iterator[tuple[int, int]]:
    """
    #### The storages of a node's value, with their bytes

    An input without users is a parameter, which the graph gathers itself.
    """
    if node.op == "placeholder" and not node.users:
        return
    for value in pytree.tree_leaves(node.meta.get("val")):
        if isinstance(value, torch.Tensor):
            storage: Any = value.untyped_storage()
            yield storage._cdata, int(storage.nbytes())

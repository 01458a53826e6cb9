r"""
# Between nodes: which layout sends the fewest bytes

A `Layout` says how ranks are grouped and what travels between them. `between_bytes` says how many
bytes leave a node in a step, and `choices` compares layouts by these bytes and by the memory of a
rank.

**Three weights on two nodes of two ranks**, padded to four. By messages, flat ZeRO-3 sends each
shard to both ranks of the other node. In a ring three shards leave each node. A layout of nodes
sends each shard to the other node once. A replica gathers inside its node. The elements that leave
a node:

| layout | kept | an all-gather | a reduction | a step |
|---|---|---|---|---|
| flat, by messages | 1 | 4 | 4 | 12 |
| flat, in a ring | 1 | 3 | 3 | 9 |
| nodes | 1 | 2 | 2 | 6 |
| nodes, secondary | 1, and 2 from forward to backward | 2 | 2 | 4 |
| hybrid | 2 | 0 | 4 | 4 |

For each layer there leave a node

$$\text{bytes} = c\,(\gamma w + g)$$

A shard has $w$ bytes as weights and $g$ as a gradient: 2 for each element in half precision, 1.03
in 8 bits and 0.53 in 4 bits. There are $N = L M$ ranks on $M$ nodes of $L$. $c$ counts the shards
that leave a node in a collective, and $\gamma$ the all-gathers between nodes:

| layout | $c$ | $\gamma$ |
|---|---|---|
| flat, by messages | $L (N - L)$ | 2 |
| flat, in a ring | $N - 1$ | 2 |
| nodes | $L (M - 1)$ | 2, or 1 with `secondary` |
| hybrid, by messages | $L (M - 1)$ | 0 |
| hybrid, in a ring | $2 L \frac{M - 1}{M}$ | 0 |

The last layer of a chain is gathered once, so its $\gamma$ is at most 1.

**Run this**: `python -m zero3.estimate --params 7b --ranks 32 --nodes 4 --link 25GB --gpu 80GB`.

**Not covered, and what that costs**: only the time of the link between nodes is told. NCCL may
choose other ways than a ring. Each node has the same number of ranks, all layers the same size, and
a step one micro-batch. Groups of different sizes, and a mesh on some of the ranks.
"""

from dataclasses import dataclass

from zero3.comm.encodings import Encoding, Int4, Int8
from zero3.estimate.formulas import ELEMENT_BYTES, LayerSpec, Part
from zero3.estimate.predict import predict


@dataclass(frozen=True)
class Layout:
    r"""
    ## Layout: groups of ranks, and what travels between them

    It says what a mesh and `Links` say, without process groups:

    | mesh | layout | shards of a layer | ranks that a rank sends to |
    |---|---|---|---|
    | none, four ranks | `Layout(4)` | 4 | 3 near |
    | ("replicate", "shard") of 2 x 2 | `Layout(2, replicas=2)` | 2 | 1 near, 1 across |
    | ("nodes", "shard") of 2 x 2 | `Layout(2, nodes=2)` | 4 | 1 near, 1 across |

    The ranks *near* a rank are the others of its group. Those *across* have the same place in the
    other nodes or replicas. With $R$ ranks in each of $G$ groups,

    $$\text{shards} = R\,G \text{ with nodes, } R \text{ with replicas} \qquad
    \text{near} = R - 1 \qquad \text{across} = G - 1$$

    * `ranks` share each layer: those of one node or one replica, if there are several
    * `nodes` and `replicas` are as in a mesh, which has one of the two
    * `weights`, `gradients` and `secondary` are as for `Links`
    """

    ranks: int
    nodes: int = 1
    replicas: int = 1
    weights: Encoding | None = None
    gradients: Encoding | None = None
    secondary: bool = False

    @property
    def shards(self) -> int:
        """
        ### Into how many shards a layer is cut
        """
        return self.ranks * self.nodes

    @property
    def divisor(self) -> int:
        """
        ### All ranks, over which gradients are averaged
        """
        return self.ranks * self.nodes * self.replicas


def row_bytes(encoding: Encoding | None,
              numel: int,
              element_bytes: int) -> int:
    """
    ## Bytes of a shard, or of its gradient, on its way to another rank
    """
    return encoding.nbytes(numel) if encoding else numel * element_bytes


@dataclass(frozen=True)
class Choice:
    """
    ## A layout, and its cost in a step
    """

    name: str
    rounds: bool  # whether it changes numbers
    between_bytes: int  # leave each node
    peak_bytes: int  # of a rank, without activations


def layouts(ranks: int, nodes: int) -> dict[str, Layout]:
    """
    ## The layouts to choose from, by name

    * `ranks` are those of all `nodes`
    """
    each = ranks // nodes
    return {
        "flat": Layout(ranks),
        "hybrid": Layout(each, replicas=nodes),
        "nodes": Layout(each, nodes),
        "nodes, secondary": Layout(each, nodes, secondary=True),
        "nodes, 8-bit weights": Layout(each, nodes, weights=Int8()),
        "nodes, 4-bit gradients": Layout(each, nodes, gradients=Int4()),
        "everything": Layout(each, nodes, weights=Int8(), gradients=Int4(), secondary=True),
    }


def between_bytes(layout: Layout,
                  nodes: int,
                  numel: int,
                  layers: int = 1,
                  by_messages: bool = False) -> int:
    r"""
    ## Bytes that leave a node in a step

    * `numel` are the parameters of each of the `layers`, in half precision
    * `by_messages` counts as on the CPU; otherwise collectives are rings, as on GPUs

    $$c\,(\gamma w + g) \quad \text{for each layer}$$
    """
    ranks = layout.divisor
    per_node = ranks // nodes
    shard_numel = -(-numel // layout.shards)
    weight_bytes = row_bytes(layout.weights, shard_numel, ELEMENT_BYTES)
    gradient_bytes = row_bytes(layout.gradients, shard_numel, ELEMENT_BYTES)
    gathers = layers if layout.secondary else 2 * layers - 1  # the last layer is gathered once
    crossings = per_node * (nodes - 1)
    if ranks == layout.ranks:
        crossings = per_node * (ranks - per_node) if by_messages else ranks - 1
    if layout.replicas > 1:
        gathers = 0
        if not by_messages:
            # A ring sends the parts of the sums around twice.
            gradient_bytes = 2 * gradient_bytes // nodes
    return crossings * (gathers * weight_bytes + layers * gradient_bytes)


def choices(params: float,
            ranks: int,
            nodes: int,
            layers: int = 32,
            by_messages: bool = False) -> list[Choice]:
    """
    ## The cost of each layout, for a model in half precision with Adam

    * all `layers` are taken to have the same size
    * `ranks` are those of all `nodes`, and a multiple of them

    The one that sends the fewest bytes between nodes comes first. Bytes that agree in three digits
    count as equal: then the least memory decides.
    """
    part = Part(-(-int(params) // layers), ELEMENT_BYTES, True)
    found = []
    for name, layout in layouts(ranks, nodes).items():
        peak_bytes = predict([LayerSpec((part,))] * layers, layout.shards, stage3=True,
                             by_messages=by_messages).peak_bytes
        if layout.secondary:
            peak_bytes += layers * nodes * row_bytes(
                layout.weights, part.shard_numel(layout.shards), ELEMENT_BYTES)
        found.append(Choice(
            name, rounds=layout.weights is not None or layout.gradients is not None,
            between_bytes=between_bytes(layout, nodes, part.numel, layers, by_messages),
            peak_bytes=peak_bytes))
    return sorted(found, key=lambda each: (float(f"{each.between_bytes:.2e}"), each.peak_bytes))


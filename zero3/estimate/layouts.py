r"""
# Layouts: groups of ranks, and encodings between them

`Layout` tells `predict` how ranks are grouped, and what travels between them.

A run says this with a mesh and `Links`, which need process groups. An estimate has to know it
before anything runs, often for machines that one does not have. A `Layout` has the same facts in
numbers:

| mesh | layout | shards of a layer | ranks that a rank sends to |
|---|---|---|---|
| none, four ranks | `Layout(4)` | 4 | 3 near |
| ("replicate", "shard") of 2 x 2 | `Layout(2, replicas=2)` | 2 | 1 near, 1 across |
| ("nodes", "shard") of 2 x 2 | `Layout(2, nodes=2)` | 4 | 1 near, 1 across |

The ranks *near* a rank are the others of its group. Those *across* have the same place in the
other nodes or replicas. The three weights 1 2 3 on `Layout(2, nodes=2)` are padded to four, one for
each rank; `Layout(2, replicas=2)` keeps two on each. In general, with $R$ ranks in each of $G$
groups,

$$\text{shards} = R\,G \text{ with nodes, } R \text{ with replicas} \qquad
\text{near} = R - 1 \qquad \text{across} = G - 1$$

**Run this**: `python -m pytest tests/test_links_bytes.py` compares predictions for each layout with
what a `Ledger` measures.

**Not covered, and what that costs**: ranks that are not consecutive. `placed` counts the ranks on
other nodes as if rank 0 began the first node. `Layout.of` asks a communicator instead, so it also
knows a mesh on some of the ranks.
"""

from dataclasses import dataclass, replace
from typing import Any

from zero3.comm.encodings import Encoding
from zero3.guards.options import expect


@dataclass(frozen=True)
class Peers:
    """
    ## The other ranks of a group, to which this rank sends
    """

    count: int
    far: int  # how many of the messages to them leave the node; in a ring, all or none
    direct: int  # how many of these ranks are on other nodes


@dataclass(frozen=True)
class Layout:
    """
    ## Layout: groups of ranks, and what travels between them

    `Links` with a mesh says the same of a run. A layout needs no process group, so it also
    describes machines that one does not have.

    * `ranks` share each layer: those of one node or one replica, if there are several
    * `nodes` share each layer too, as a mesh ("nodes", "shard") has them
    * `replicas` have the model each, as a mesh ("replicate", "shard") has them
    * `weights`, `gradients` and `secondary` are as for `Links`
    * `far` says for both groups how many messages to the others leave the node; in a ring, all or
      none, because a rank sends to the next one only. `placed` counts them
    * `direct` says how many of the others are on other nodes, in a ring or not

    Raises `ValueError` if there are nodes and replicas.
    """

    ranks: int
    nodes: int = 1
    replicas: int = 1
    weights: Encoding | None = None
    gradients: Encoding | None = None
    secondary: bool = False
    far: tuple[int, int] = (0, 0)
    direct: tuple[int, int] = (0, 0)

    def __post_init__(self) -> None:
        expect(1 in (self.nodes, self.replicas), "Layout", "nodes or replicas",
               f"{self.nodes} nodes and {self.replicas} replicas", "leave one of them out")

    @classmethod
    def of(cls, comm: Any) -> "Layout":
        """
        ### The layout of a communicator
        """
        direct = [group.far for group in comm.groups]
        ring = [(group.size - 1) * group.next_is_far for group in comm.groups]
        far = direct if comm.by_messages else ring
        # A mesh of one dimension has one group.
        layout = cls(comm.group.size, comm.world_size // comm.group.size, comm.replicas.size,
                     far=(far[0], sum(far[1:])), direct=(direct[0], sum(direct[1:])))
        links = comm.links
        if links is None:
            return layout
        return replace(layout, weights=links.weights, gradients=links.gradients,
                       secondary=links.secondary)

    def placed(self, ranks_per_node: int, rank: int = 0, by_messages: bool = True) -> "Layout":
        """
        ### The same layout on nodes of so many consecutive ranks

        * `rank` is the rank of the run whose bytes are asked for
        * `by_messages` is as for `predict`. A ring sends everything to the next rank of a group
        """
        first = rank - rank % self.ranks
        near = range(first, first + self.ranks)
        across = range(rank % self.ranks, self.ranks * self.groups, self.ranks)
        direct = []
        ring = []
        for group in (near, across):
            is_far = [other // ranks_per_node != rank // ranks_per_node for other in group]
            direct.append(sum(is_far))
            ring.append((len(group) - 1) * is_far[(group.index(rank) + 1) % len(group)])
        far = direct if by_messages else ring
        return replace(self, far=(far[0], far[1]), direct=(direct[0], direct[1]))

    @property
    def groups(self) -> int:
        """
        ### Nodes or replicas
        """
        return max(self.nodes, self.replicas)

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
        return self.ranks * self.groups

    @property
    def near(self) -> Peers:
        """
        ### The others in the same node, or the same replica
        """
        return Peers(self.ranks - 1, self.far[0], self.direct[0])

    @property
    def across(self) -> Peers:
        """
        ### Those in the same place in the other nodes, or replicas
        """
        return Peers(self.groups - 1, self.far[1], self.direct[1])

    def weight_bytes(self, numel: int, element_bytes: int) -> int:
        """
        ### Of a shard on its way to another rank
        """
        return _row_bytes(self.weights, numel, element_bytes)

    def gradient_bytes(self, numel: int, element_bytes: int) -> int:
        """
        ### Of a shard's gradient on its way to another rank
        """
        return _row_bytes(self.gradients, numel, element_bytes)


def _row_bytes(encoding: Encoding | None, numel: int, element_bytes: int) -> int:
    return encoding.nbytes(numel) if encoding else numel * element_bytes

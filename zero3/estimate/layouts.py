r"""
# Layouts: groups of ranks, and encodings between them

A `Layout` says how ranks are grouped and what travels between them, as a mesh and `Links` do,
without process groups:

| mesh | layout | shards of a layer | ranks that a rank sends to |
|---|---|---|---|
| none, four ranks | `Layout(4)` | 4 | 3 near |
| ("replicate", "shard") of 2 x 2 | `Layout(2, replicas=2)` | 2 | 1 near, 1 across |
| ("nodes", "shard") of 2 x 2 | `Layout(2, nodes=2)` | 4 | 1 near, 1 across |

The ranks *near* a rank are the others of its group. Those *across* have the same place in the other
nodes or replicas. With $R$ ranks in each of $G$ groups,

$$\text{shards} = R\,G \text{ with nodes, } R \text{ with replicas} \qquad
\text{near} = R - 1 \qquad \text{across} = G - 1$$

**Run this**: `python -m pytest tests/comm/test_links_bytes.py` compares formulas for each layout
with what a `Ledger` measures.

**Not covered, and what that costs**: groups of different sizes, and a mesh on some of the ranks.
"""

from dataclasses import dataclass

from zero3.comm.encodings import Encoding
from zero3.guards.options import expect


@dataclass(frozen=True)
class Layout:
    """
    ## Layout: groups of ranks, and what travels between them

    * `ranks` share each layer: those of one node or one replica, if there are several
    * `nodes` and `replicas` are as in a mesh
    * `weights`, `gradients` and `secondary` are as for `Links`

    Raises `ValueError` if there are nodes and replicas.
    """

    ranks: int
    nodes: int = 1
    replicas: int = 1
    weights: Encoding | None = None
    gradients: Encoding | None = None
    secondary: bool = False

    def __post_init__(self) -> None:
        expect(1 in (self.nodes, self.replicas), "Layout", "nodes or replicas",
               f"{self.nodes} nodes and {self.replicas} replicas", "leave one of them out")

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


def row_bytes(encoding: Encoding | None, numel: int, element_bytes: int) -> int:
    """
    ## Bytes of a shard, or of its gradient, on its way to another rank
    """
    return encoding.nbytes(numel) if encoding else numel * element_bytes

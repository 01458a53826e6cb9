r"""
# Which rank has which part

`links`, `mesh`, `tensor` and `thresholds` draw small examples step by step: a row of boxes for each
step, a column for each rank, and arrows for whatever a rank needs from another.

A table says the same numbers. Only the arrows say who sends to whom, and which of them cross the
slow link between two nodes. With three weights on two nodes of two ranks:

| gather | elements that cross the link |
|---|---|
| flat: each rank sends its shard to all others | 8 |
| across nodes first, then inside | 4 |

$$\underbrace{N \cdot N/2}_{\text{flat}} \qquad \underbrace{N}_{\text{across, then inside}}$$

**Run this**: `make docs`; the figures are in the chapters on groups, links, injection and
compression.

**Not covered, and what that costs**: time. All arrows of a step have the same length, however slow
their link is.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch

from docs.svg import PHONE, WIDE, Drawing, figure
from zero3.compression.thresholds import kth_keys

PER_NODE = 2
RANKS = 4
FLAT = (1, 2, 3, 0)  # three weights and the padding
GRADS = torch.tensor([[1, 2, 3, 0], [2, 0, 1, 0], [1, 0, 1, 0], [0, 1, 0, 0]])  # divided by 4
LEFT = 96  # the width of the words at the left
BOX = 24
GAP = 44  # between two rows
TOP = 24

Sends = Callable[[int, int], bool]  # whether a rank needs something of another for this row


class Row(NamedTuple):
    """
    ## A step: what each rank has after it, and whose parts it is made of
    """

    words: str
    color: str
    parts: list[list[int]]  # of each rank
    sends: Sends = int.__eq__
    sent: str = "muted"  # the colour of the arrows between ranks


def near(sender: int, receiver: int) -> bool:
    return sender // PER_NODE == receiver // PER_NODE


def same_place(sender: int, receiver: int) -> bool:
    return sender % PER_NODE == receiver % PER_NODE


def anyone(sender: int, receiver: int) -> bool:
    return True


def crossing(rows: list[Row]) -> int:
    """
    ## The elements that cross the link between nodes
    """
    ranks = range(len(rows[0].parts))
    return sum(len(before.parts[a]) for before, row in pairwise(rows)
               for a in ranks for b in ranks if row.sends(a, b) and not near(a, b))


def draw(width: float, title: str, rows: list[Row]) -> Drawing:
    """
    ## The rows, with arrows between them; a dashed line is the link between nodes
    """
    ranks = len(rows[0].parts)
    column = (width - LEFT) / ranks
    height = TOP + len(rows) * (BOX + GAP) - GAP + (24 if ranks > PER_NODE else 4)
    about = ". ".join(f"{row.words}: " + "; ".join(
        f"rank {rank} {_text(part)}" for rank, part in enumerate(row.parts)) for row in rows)
    drawing = Drawing(width, height, title, about + ".")
    middles = [LEFT + (rank + 0.5) * column for rank in range(ranks)]
    if ranks > PER_NODE:
        link = LEFT + PER_NODE * column
        drawing.line(link, TOP, link, height - 22, dashed=True)
        drawing.text(link, height - 6, "slow link between nodes", "muted", anchor="middle")
    for rank, x in enumerate(middles):
        drawing.text(x, 14, f"rank {rank}", "muted", anchor="middle")
    for i, row in enumerate(rows):
        y = TOP + i * (BOX + GAP)
        drawing.text(2, y + 17, row.words)
        for a, b in ((a, b) for a in range(ranks) for b in range(ranks) if i and row.sends(a, b)):
            far = ranks > PER_NODE and not near(a, b)
            drawing.line(middles[a], y - GAP + 2, middles[b], y - 3, arrow=True,
                         color="muted" if a == b else row.sent, width=2.6 if far else 1.3)
        for x, part in zip(middles, row.parts, strict=True):
            drawing.rect(x - column / 2 + 4, y, column - 8, BOX, row.color)
            drawing.text(x, y + 17, _text(part), anchor="middle", size=12, mono=True)
    return drawing


def drawn(title: str, rows: list[Row], caption: str) -> str:
    return figure(draw(WIDE, title, rows), draw(PHONE, title, rows), caption)


def _text(part: list[int]) -> str:
    return " ".join(map(str, part))


def gather_rows() -> list[Row]:
    """
    ## A gather on two nodes: across them, then inside
    """
    nodes = RANKS // PER_NODE
    slices = [list(FLAT[rank % PER_NODE * nodes :][:nodes]) for rank in range(RANKS)]
    shards = [[part[rank // PER_NODE]] for rank, part in enumerate(slices)]
    return [Row("shard", "shard", shards),
            Row("slice", "whole", slices, same_place, "flight"),
            Row("whole layer", "whole", [list(FLAT)] * RANKS, near, "flight")]


def links() -> str:
    """
    ## Which bytes of a gather cross the link
    """
    rows = gather_rows()
    flat = crossing([rows[0], Row("whole layer", "whole", rows[2].parts, anyone)])
    return drawn("A gather across nodes, then inside", rows, (
        f"Thick arrows cross the link: {crossing(rows)} elements. If each rank sent its shard to "
        f"all others, it would be {flat}. Drawn from the formulas of zero3/comm/links.py."))


def hybrid_rows() -> list[Row]:
    """
    ## A layer on two replicas of two ranks: its gather, and the reduction of its gradients
    """
    cut = [slice(rank % PER_NODE * 2, rank % PER_NODE * 2 + 2) for rank in range(RANKS)]
    sums = [sum(GRADS[a] for a in range(RANKS) if near(a, rank))[cut[rank]]
            for rank in range(RANKS)]
    total = GRADS.sum(0)
    return [Row("shard", "shard", [list(FLAT[each]) for each in cut]),
            Row("whole layer", "whole", [list(FLAT)] * RANKS, near, "flight"),
            Row("gradient / 4", "grad", GRADS.tolist()),
            Row("replica's sum", "reduced", [each.tolist() for each in sums], near, "reduce"),
            Row("sum of all", "reduced", [total[each].tolist() for each in cut], same_place,
                "reduce")]


def mesh() -> str:
    """
    ## What crosses the link with hybrid sharding
    """
    rows = hybrid_rows()
    return drawn("Hybrid sharding on two replicas of two ranks", rows, (
        f"Parameters never cross the link, and gradients do so when they are sums already: "
        f"{crossing(rows)} elements. Drawn from the formulas of zero3/comm/links.py."))


def split_rows() -> list[Row]:
    """
    ## A feed-forward network of four hidden features on two ranks
    """
    x = torch.tensor([1, 2])
    first = torch.tensor([[1, 0], [0, 1], [1, 1], [1, -1]])
    second = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]])
    hidden = [(rows @ x).relu() for rows in first.chunk(2)]
    summands = [part @ h for part, h in zip(second.chunk(2, dim=1), hidden, strict=True)]
    return [Row("x", "muted", [x.tolist()] * 2),
            Row("φ(W₁ x)", "compute", [h.tolist() for h in hidden]),
            Row("W₂ h", "compute", [part.tolist() for part in summands]),
            Row("y", "compute", [sum(summands).tolist()] * 2, anyone, "reduce")]


def tensor() -> str:
    """
    ## When two ranks that share a layer need each other
    """
    return drawn("A feed-forward network on two ranks", split_rows(), (
        "Two features each, with φ = ReLU. The ranks exchange nothing before the last step. "
        "Drawn from the formulas of zero3/inject/tensor.py."))


def pruned_rows() -> list[Row]:
    """
    ## Half of eight weights on two ranks, pruned by the size of all of them
    """
    stored = torch.tensor([[9, -8, 6, 1], [-2, 7, 3, 5]])
    sizes = stored.abs()
    # One process has all sizes here, so there is nothing to add up.
    found = kth_keys(sizes.flatten(), torch.zeros(8, dtype=torch.int64), [4], 8, lambda own: own)
    return [Row("stored", "shard", stored.tolist()),
            Row("threshold", "muted", [found.tolist()] * 2, anyone, "reduce"),
            Row("pruned", "shard", stored.where(sizes > found, 0).tolist())]


def thresholds() -> str:
    """
    ## One threshold for the shards of all ranks
    """
    rows = pruned_rows()
    kept = [sum(value != 0 for value in part) for part in rows[-1].parts]
    return drawn("Half of the weights of two ranks is pruned", rows, (
        f"Only counts travel. The threshold is that of all eight weights: rank 0 keeps {kept[0]} "
        f"of its own, and rank 1 {kept[1]}. Drawn from the formulas of "
        "zero3/compression/thresholds.py."))

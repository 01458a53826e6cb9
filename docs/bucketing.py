r"""
# The figure of a bucket: two layers in one reduce-scatter

`bucketed` runs a backward pass of two small layers, and `draw_bucket` draws the gradients from the
layers to the shards.

The layers are those at the head of `optimizer/buckets.py`: layer 1 has three weights, and layer 0
has two. Their gradients are given, and those of layer 1 are the example of `layer.py`. With and
without a bucket, a rank sends the same bytes:

$$\underbrace{8 + 4}_{\text{two reduce-scatters}} = \underbrace{12}_{\text{one}}$$

The numbers in the figure are those that the reduce-scatter found in memory, and the sums are those
that arrived in the optimizer.

**Run this**: `make docs`; the figure is in the chapter on buckets.

**Not covered, and what that costs**: several data types. Then a bucket has a collective for each
of them.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from docs import svg
from docs.svg import Drawing
from zero3.estimate.ledger import Ledger
from zero3.layer import Zero3Layer, Zero3Sequential
from zero3.optimizer.stage3 import Zero3Optimizer

Json = dict[str, Any]
# Gradients of two layers on two ranks, before they are divided by two: those at the head of
# `buckets.py`.
EXAMPLES = {0: ([10.0, 12.0], [2.0, 4.0]), 1: ([2.0, 4.0, 6.0], [4.0, 0.0, 2.0])}


class Given(nn.Module):
    """
    ## Weights with given gradients
    """

    def __init__(self, gradient: list[float]):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(len(gradient)))
        self.gradient = torch.tensor(gradient)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### Add the weights times their gradients
        """
        return x + (self.weight * self.gradient).sum()


class Packed(Ledger):
    """
    ## A ledger that also records the gradients in each reduce-scatter
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.sent: list[Json] = []

    def record(self, sender: Any, event: str, nbytes: int | None = 0, transfer: Any = None,
               tier: str = "device") -> None:
        """
        ### Record an event; of a reduce, also its rows, and those of each layer that waits
        """
        super().record(sender, event, nbytes, transfer, tier)
        if event != "reduce":
            return
        rows = sender.comm.rows
        ((packed, _),) = transfer.pairs
        grads = {layer.layer_idx: rows(layer.flats[0].grad).tolist()
                 for layer in self.model.module_list if layer.flats[0].grad is not None}
        self.sent.append({"rows": rows(packed).tolist(), "grads": grads,
                          "sent_bytes": transfer.sent_bytes, "messages": transfer.messages})


def bucketed(bucket_bytes: int) -> Json:
    """
    ## A backward pass of two small layers: what is sent, and the sums

    * `bucket_bytes` is as for `Zero3Optimizer`; with zero, each layer is reduced alone
    """
    rank = dist.get_rank()
    model = Zero3Sequential([Zero3Layer(Given(each[rank])) for each in EXAMPLES.values()])
    optimizer = Zero3Optimizer(model, lr=0.1, bucket_bytes=bucket_bytes)
    with Packed(model, optimizer) as tape:
        model(torch.zeros(1)).sum().backward()
    sums = {i: states.read_grad().tolist() for i, states in enumerate(optimizer.shard_states)}
    return {"sent": tape.sent, "sums": sums}


def bucket(run: Json) -> str:
    """
    ## The figure of a bucket

    * `run` is the result of `record`
    """
    caption = ("The gradients of two layers are packed into one row for each rank, so one "
               "reduce-scatter takes both. It sends as many bytes as two reduce-scatters. "
               f"{run['origin']}.")
    return svg.figure(draw_bucket(run, svg.WIDE), draw_bucket(run, svg.PHONE), caption)


def draw_bucket(run: Json, width: int) -> Drawing:
    """
    ### The gradients of two ranks, from their layers to their shards
    """
    size = 38 if width == svg.WIDE else 22
    d = Drawing(width, 242 + 3 * size, "Two layers share a reduce-scatter", "")
    lefts = [20, 370] if width == svg.WIDE else [4, 190]
    for rank, told in enumerate(run["buckets"]):
        (sent,) = told["with"]["sent"]
        d.text(lefts[rank], 14, f"rank {rank}", bold=True)
        draw_packing(d, lefts[rank], size, sent)
        draw_sums(d, lefts[rank], size, told["with"]["sums"])
        d.about += (f"Rank {rank} packs {sent['rows'][0]} for rank 0 and {sent['rows'][1]} for "
                    f"rank 1, and receives the sums {told['with']['sums']}. ")
    draw_exchange(d, lefts, size)
    if width == svg.WIDE:
        for y, word in ((45, "gradients"), (79 + size, "packed"), (156 + 2 * size, "sums")):
            d.text(321, y + size / 2 + 5, word, "muted", anchor="middle")
    mine = run["buckets"][0]
    draw_total(d, lefts[0], size, "together", mine["with"]["sent"])
    draw_total(d, lefts[1], size, "alone", mine["without"]["sent"])
    return d


def draw_packing(d: Drawing, left: float, size: float, sent: Json) -> None:
    """
    #### The gradients of each layer, and the rows of the bucket
    """
    x = left
    y = 79 + size
    filled = [left + row * (3 * size + 14) for row in range(len(sent["rows"]))]
    for row, values in enumerate(sent["rows"]):
        draw_cells(d, filled[row], y, size, values, "grad")
        d.text(filled[row] + 1.5 * size, y + size + 16, f"for rank {row}", anchor="middle")
    for layer in sorted(sent["grads"], reverse=True):
        d.text(x, 38, f"layer {layer}", "muted")
        for row, values in enumerate(sent["grads"][layer]):
            draw_cells(d, x, 45, size, values, "grad")
            middle = len(values) * size / 2
            d.line(x + middle, 47 + size, filled[row] + middle, y - 2, arrow=True)
            filled[row] += len(values) * size
            x += len(values) * size + 4
        x += 12


def draw_exchange(d: Drawing, lefts: list[float], size: float) -> None:
    """
    #### Who sends which row to whom; a rank's own row stays
    """
    top = 102 + 2 * size
    for rank, left in enumerate(lefts):
        for row, to in enumerate(lefts):
            x = left + row * (3 * size + 14) + 1.5 * size
            color = "muted" if rank == row else "reduce"
            d.line(x, top, to + (1 + rank) * size, top + 50, color, arrow=True, width=1.8)


def draw_sums(d: Drawing, left: float, size: float, sums: Json) -> None:
    """
    #### The sums that a rank receives, for each layer
    """
    x = left
    y = 156 + 2 * size
    for layer in sorted(sums, reverse=True):
        draw_cells(d, x, y, size, sums[layer], "reduced")
        d.text(x, y + size + 16, f"layer {layer}", "muted")
        x += max(len(sums[layer]) * size, 56) + 4


def draw_total(d: Drawing, left: float, size: float, how: str, sent: list[Json]) -> None:
    """
    #### The collectives of a backward pass, as long as their bytes
    """
    word = "reduce-scatter" + "s" * (len(sent) > 1)
    y = 210 + 3 * size
    d.text(left, y, f"{how}: {len(sent)} {word}")
    d.about += f"{how}: {len(sent)} {word}, {[each['sent_bytes'] for each in sent]} bytes. "
    for each in sent:
        width = each["sent_bytes"] * (7 + size * 0.32)
        d.rect(left, y + 8, width - 3, svg.BAR, "reduce")
        d.inside(left + width / 2 - 1, y + 24, f"{each['sent_bytes']} bytes", "reduce")
        left += width


def draw_cells(d: Drawing, x: float, y: float, size: float, values: list[float],
               color: str) -> None:
    """
    #### Numbers in a row
    """
    for i, value in enumerate(values):
        d.rect(x + i * size, y, size, size, color)
        d.text(x + (i + 0.5) * size, y + size / 2 + 5, f"{value:g}", anchor="middle")

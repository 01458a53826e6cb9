"""
# The report of a run

A table that holds measured bytes against predicted ones, the loss curve, the memory tape, which
shows what each rank held after every event of one step and which layer was the cause, and where
the gradients lie in the range of fp16.

All come from what a run recorded. The tape shows ZeRO-3 at a glance: the staircase up where
a layer is gathered, down where it is freed, the level between two steps, and under each step of
the stairs the layer that it belongs to.

**Run this**: `make train` prints the table, and writes `loss.png`, `tape.png` and `gradients.png`.

**Not covered, and what that costs**: the axis of the tape is the order of events, not time, so
that short ones can be seen; how long they took is on the tape itself, in `Event.time_s`.
"""

import os
import platform
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from typing import Any

import torch

# Figures without `pyplot`: nothing global, and no screen needed.
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zero3.estimate.predict import Prediction
from zero3.measure.ledger import Event

MIB = 2**20
# Of what a layer holds: colour, height of the bar, and how far below the middle of its row.
STYLES = {
    "full": ("#9ecae1", 0.8, 0.0),
    "computing": ("#2171b5", 0.8, 0.0),
    "gradients": ("#fd8d3c", 0.3, 0.25),
    "step": ("#31a354", 0.8, 0.0),
    "reading": ("#756bb1", 0.15, -0.45),
    "writing": ("#e7298a", 0.15, -0.3),
}
LEGEND = ("parameters whole", "layer computes", "full gradients", "optimizer steps",
          "reading from files", "writing to files")
# Behind the phases of a step.
SHADES = {"forward": "#ffffff", "backward": "#fff5eb", "step": "#edf8e9"}
# More ranks than this are not drawn: their tapes look the same.
MOST_RANKS = 4


def table(predicted: list[Prediction], plain: Prediction, measured: list[dict[str, int]]) -> str:
    """
    ## What each rank held and sent, beside what was predicted for it

    A measured figure is followed by `equal`, or by how far it is off.
    """
    columns = ["rest_bytes", "peak_bytes", "sent_bytes"]
    heads = ["at rest", "at the peak", "sent in a step"]
    if any(row.disk_bytes for row in predicted):
        heads[:2] = "at rest in memory", "at its peak"
        columns += ["disk_bytes", "read_bytes", "written_bytes"]
        heads += ["in files", "read in a step", "written in a step"]
    lines = ["bytes of each rank".ljust(26) + "".join(f"{head:>16}      " for head in heads)]

    def add(name: str, row: Prediction) -> None:
        cells = [f"{getattr(row, column):>16,}      " for column in columns]
        lines.append(name.ljust(26) + "".join(cells))

    add("data parallel, predicted", plain)
    for held, expected in zip(measured, predicted, strict=True):
        add(f"ZeRO-3, rank {held['rank']} predicted", expected)
        off = {column: held[column] - getattr(expected, column) for column in columns}
        cells = [f"{held[c]:>16,} {f'{off[c]:+,}' if off[c] else 'equal':5}" for c in columns]
        lines.append("measured".rjust(24).ljust(26) + "".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def as_dict(prediction: Prediction) -> dict[str, int]:
    return {"rest_bytes": prediction.rest_bytes, **asdict(prediction)}


def draw_loss(losses: list[float], held_out: list[tuple[int, float]], caption: str) -> Figure:
    """
    ## The loss curve

    * `losses` are of each step, in bits per byte
    * `held_out` has pairs of step and bits per byte
    """
    steps, reach = range(1, len(losses) + 1), len(losses) // 80
    around = [losses[max(0, i - reach) : i + reach + 1] for i in range(len(losses))]
    smooth = [sum(part) / len(part) for part in around]
    fig = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    ax = fig.subplots()
    ax.plot(steps, losses, color="#9ecae1", linewidth=0.7, label="training, each step")
    ax.plot(steps, smooth, color="#2171b5", linewidth=2, label=f"training, mean of {2 * reach + 1}")
    ax.plot(*zip(*held_out, strict=True), "o-", color="#d94801", markersize=4, label="held out")
    ax.set(xlabel="step", ylabel="loss (bits per byte)", ylim=(0, None), xlim=(0, len(losses) + 1))
    ax.set_title(caption, fontsize=9, loc="left")
    ax.grid(alpha=0.3)
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False)
    return fig


def spans(events: list[Event]) -> Iterator[tuple[str, str, int, int]]:
    """
    ## When which layer was whole, computed, and held gradients

    Yields layer, what it was, and the indices of the first and the last event of that. A layer
    frees its whole parameters before the buffers of its reduce, so a `free` ends the one that is
    there.
    """
    begins = {"fetch": "full", "compute": "computing", "gradients": "gradients",
              "read": "reading", "write": "writing"}
    over = {"computed": ["computing"], "arrived": ["reading"], "written": ["writing"]}
    begun: dict[tuple[str, str], int] = {}
    for i, e in enumerate(events):
        if e.event in begins:
            begun.setdefault((e.layer, begins[e.event]), i)
        ends = over.get(e.event, [])
        if e.event in ("norm", "step"):
            yield e.layer, "step", i - 1, i
        elif e.event == "free":
            ends = ["full", "computing"] if (e.layer, "full") in begun else ["gradients"]
        for what in ends:
            if (e.layer, what) in begun:
                yield e.layer, what, begun.pop((e.layer, what)), i
    for (layer, what), first in begun.items():
        # What is being written when the step ends is waited for in the next one.
        if what == "writing":
            yield layer, what, first, len(events)


def draw_tape(
    tapes: list[list[Event]], predicted: list[Prediction], plain: Prediction, caption: str
) -> Figure:
    """
    ## The memory tape of one step

    * `tapes` are the events of each rank
    * `predicted` and `plain` are what ZeRO-3 and plain data parallelism need

    Above, what each rank holds after each event. Below, on the same axis, what the layers of rank
    0 hold.
    """
    shown, events = tapes[:MOST_RANKS], tapes[0]
    heights = [2.4] * len(shown) + [0.8 + 0.3 * len({e.layer for e in events})]  # inches
    fig = Figure(figsize=(11, sum(heights) + 0.5), dpi=150, layout="constrained")
    axes = fig.subplots(len(heights), 1, sharex=True, height_ratios=heights)
    for ax, tape, expected in zip(axes, shown, predicted, strict=False):
        _draw_memory(ax, tape, expected, plain)
    _draw_layers(axes[-1], events)
    end = 0.5
    for phase, run in groupby(events, key=lambda e: e.phase):
        begin, end = end, end + len(list(run))
        for ax in axes:
            ax.axvspan(begin, end, color=SHADES[phase], zorder=0)
        axes[0].text((begin + end) / 2, 1.02, phase, transform=axes[0].get_xaxis_transform(),
                     ha="center", fontsize=8)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    fig.suptitle(caption, fontsize=9)
    return fig


def _draw_memory(ax: Any, tape: list[Event], predicted: Prediction, plain: Prediction) -> None:
    """
    #### What one rank holds, and the levels that were predicted
    """
    rest = predicted.rest_bytes
    live = [held / MIB for held in (rest, *(e.live_bytes for e in tape), rest)]
    at = range(len(live))
    ax.fill_between(at, live[0], color="#c7e9c0", linewidth=0)
    ax.fill_between(at, live, live[0], step="post", color="#6baed6", linewidth=0)
    what = "shards and optimizer states"
    if predicted.disk_bytes:
        what = f"buffers; {predicted.disk_bytes / MIB:.1f} MiB rest in files"
    ax.text(1, live[0] / 2, what, fontsize=8, va="center")
    ax.step(at, live, where="post", color="#08519c", linewidth=1.3)
    for level, text, color, side in (
        (plain.peak_bytes, "data parallel\npeak", "#737373", "bottom"),
        (predicted.peak_bytes, "predicted peak", "#cb181d", "top"),
        (predicted.rest_bytes, "predicted at rest", "#238b45", "top"),
    ):
        ax.axhline(level / MIB, color=color, linewidth=1.1, linestyle="--")
        ax.text(1.005, level / MIB, text, color=color, fontsize=8, va=side,
                transform=ax.get_yaxis_transform())
    top = max(plain.peak_bytes, predicted.peak_bytes) / MIB
    ax.set(ylabel=f"rank {tape[0].rank}\nMiB held", ylim=(0, top * 1.08))


def _draw_layers(ax: Any, events: list[Event]) -> None:
    """
    #### Which layers are whole, compute, or hold gradients
    """
    layers = list(dict.fromkeys(e.layer for e in events))
    for layer, what, first, last in spans(events):
        color, height, below = STYLES[what]
        order = list(STYLES).index(what)
        ax.barh(layers.index(layer) + below, last - first, left=first + 1, height=height,
                color=color, zorder=2 + order)
    ax.set_yticks(range(len(layers)), layers, fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="events of one step, in order", xlim=(0, len(events) + 1))
    shown = len(STYLES) - 2 * all(e.tier != "nvme" for e in events)
    ax.legend(
        [Patch(color=color) for color, *_ in list(STYLES.values())[:shown]], LEGEND[:shown],
        loc="lower left", bbox_to_anchor=(1, 0), fontsize=8, frameon=False,
    )


def merged(gradients: list[dict[int, int]]) -> dict[int, int]:
    """
    ## The counts of all ranks, by power of two
    """
    total: Counter[int] = Counter()
    for counts in gradients:
        total.update(counts)
    return dict(sorted(total.items()))


def draw_gradients(gradients: list[dict[int, int]], caption: str) -> Figure:
    """
    ## Where gradients lie, and where a loss scale moves them

    * `gradients` say for each rank how many lie between a power of two and the next

    Shaded is what fp16 cannot do: it has fewer and fewer digits below the 14th negative power of
    two, and no number below the 24th.
    """
    counts = merged(gradients)
    total = sum(counts.values()) or 1
    fig = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    ax = fig.subplots()
    for scale, color, name in ((0, "#9ecae1", "as they are"), (16, "#2171b5", "times 65536")):
        few = sum(n for e, n in counts.items() if e + scale < -14) / total
        label = f"{name}, {few:.1%} shaded"
        ax.bar([e + scale + 0.5 for e in counts], [100 * n / total for n in counts.values()],
               width=0.9, color=color, alpha=0.8, label=label)
    low, high = min(-30, *counts, 0), max(16, *(e + 17 for e in counts))
    ax.axvspan(low, -24, color="#fcbba1", zorder=0)
    ax.axvspan(-24, -14, color="#fee5d9", zorder=0)
    ax.text(-24.3, 0.97, "zero in fp16", ha="right", va="top", fontsize=8,
            transform=ax.get_xaxis_transform())
    ax.text(-14.3, 0.97, "fewer digits", ha="right", va="top", fontsize=8,
            transform=ax.get_xaxis_transform())
    ax.set(xlabel="gradient, as a power of two", ylabel="of the gradients of a step (%)",
           xlim=(low, high))
    ax.margins(y=0.35)
    ax.set_title(caption, fontsize=9, loc="left")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="upper right")
    return fig

"""
# The report of a run

`table` compares measured bytes with predicted ones. `draw_loss` draws the loss curve, and
`draw_tape` the memory tape of one step.

For two layers of 1 MiB that are gathered one after the other while shards of 1 MiB rest in memory,
the line of the memory tape goes 1, 2, 3, 2 in forward.

**Run this**: `make train` prints the table, and writes `loss.png` and `tape.png`.

**Not covered, and what that costs**: time. The axis of the tape counts events, so that short ones
are visible too.
"""

import os
import platform
import statistics
from collections.abc import Iterator
from itertools import groupby

import torch

# `pyplot` has global state and looks for a screen.
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from zero3.estimate.ledger import Event

MIB = 2**20
# As in the figures of the book.
COLORS = {
    "shard": "#2f6db3",
    "flight": "#a87400",  # an all-gather in flight
    "whole": "#7db4e6",  # full parameters
    "compute": "#14866d",
    "grad": "#cf5f12",  # full gradients
    "reduce": "#ad3a8c",  # a reduce-scatter in flight
    "reduced": "#6b7d1c",  # the gradient of a shard
    "state": "#7a52c7",  # optimizer states
    "file": "#6b7480",
}
# Other lines and text.
NEUTRAL = {"fg": "#1d232a", "muted": "#5b6570", "line": "#dfe3e6", "bad": "#b3261e"}
# Of each bar: colour, height, how far below the middle of the row, and its name in the legend.
STYLES = {
    "full": (COLORS["whole"], 0.8, 0.0, "parameters whole"),
    "computing": (COLORS["compute"], 0.8, 0.0, "layer computes"),
    "gradients": (COLORS["grad"], 0.3, 0.25, "full gradients"),
    "step": (COLORS["state"], 0.8, 0.0, "optimizer steps"),
    "reading": (COLORS["file"], 0.15, -0.45, "reading from files"),
    "writing": (f"{COLORS['file']}80", 0.15, -0.3, "writing to files"),
}
SHADES = {"forward": "#ffffff", "backward": "#f5f6f7", "step": "#e9ecef"}


def table(
    predicted: list[dict[str, int]],
    plain: dict[str, int],
    measured: list[dict[str, int]],
) -> str:
    """
    ## Bytes that each rank held and sent: predicted, measured, and for plain data parallelism

    `equal` follows a measured figure that equals the predicted one, else the difference. Figures
    that a dict of `predicted` lacks are "not predicted".
    """
    heads = {"rest_bytes": "at rest", "peak_bytes": "at the peak", "sent_bytes": "sent in a step"}
    if any(held.get("disk_bytes") for held in measured):
        heads |= {"rest_bytes": "at rest in memory", "peak_bytes": "at its peak",
                  "disk_bytes": "in files", "read_bytes": "read in a step",
                  "written_bytes": "written in a step"}
    if any(held.get("out_bytes") for held in measured):
        heads |= {"out_bytes": "activations out", "in_bytes": "activations in"}
    rows = [("bytes of each rank", [(head, "") for head in heads.values()]),
            ("data parallel, predicted", [(f"{plain.get(name, 0):,}", "") for name in heads])]
    for held, expected in zip(measured, predicted, strict=True):
        said = [f"{expected[name]:,}" if name in expected else "not predicted" for name in heads]
        rows += [
            (f"ZeRO-3, rank {held['rank']} predicted", [(cell, "") for cell in said]),
            (f"{'measured':>24}", [
                (f"{held[name]:,}", _difference(held[name], expected.get(name)))
                for name in heads]),
        ]
    return "\n".join(
        f"{name:26}{''.join(f'{cell:>16} {mark:5}' for cell, mark in cells)}".rstrip()
        for name, cells in rows
    )


def _difference(measured: int, predicted: int | None) -> str:
    return ("" if predicted is None else
            "equal" if measured == predicted else f"{measured - predicted:+,}")


def device_name(device: torch.device) -> str:
    return (torch.cuda.get_device_name(device) if device.type == "cuda" else
            f"CPU {platform.processor() or platform.machine()}, {os.cpu_count()} cores")


def draw_loss(losses: list[float],
              held_out: list[tuple[int, float]],
              caption: str) -> Figure:
    """
    ## The loss curve

    * `losses` has the loss of each step, in bits per byte
    * `held_out` has pairs of step and bits per byte
    """
    reach = len(losses) // 80
    steps = range(1, len(losses) + 1)
    fig = _figure(caption, 8, [4.5])
    (ax,) = fig.axes
    ax.plot(
        steps, losses,
        color=NEUTRAL["muted"], alpha=0.4, linewidth=0.7,
        label="training, each step",
    )
    ax.plot(
        steps,
        [statistics.fmean(losses[max(0, i - reach) : i + reach + 1]) for i in range(len(losses))],
        color=NEUTRAL["fg"], linewidth=2,
        label=f"training, mean of {2 * reach + 1}",
    )
    ax.plot(
        *zip(*held_out, strict=True), "o-",
        color=NEUTRAL["bad"], markersize=4,
        label="held out", clip_on=False,
    )
    ax.set(xlabel="step", ylabel="loss (bits per byte)", xlim=(0, len(losses) + 1))
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return fig


def _figure(caption: str, width: float, heights: list[float]) -> Figure:
    """
    #### A figure with a row of axes for each height, in inches
    """
    fig = Figure(figsize=(width, sum(heights) + 0.3), dpi=150, layout="constrained")
    fig.subplots(len(heights), sharex=True, height_ratios=heights)
    fig.suptitle(caption, fontsize=9)
    for ax in fig.axes:
        ax.spines[["top", "right"]].set_visible(False)
    return fig


def spans(events: list[Event]) -> Iterator[tuple[str, str, int, int]]:
    """
    ## When a layer was whole, computed, held gradients, was stepped, read or written

    Yields the layer, a name from `STYLES`, and the indices of the first and the last event. The
    first `free` of a layer ends "full", and the next one "gradients".
    """
    begins = {"fetch": "full", "compute": "computing", "gradients": "gradients",
              "read": "reading", "write": "writing"}
    ends = {"computed": ["computing"], "arrived": ["reading"], "written": ["writing"]}
    begun: dict[tuple[str, str], int] = {}
    for i, e in enumerate(events):
        if e.event in begins:
            begun.setdefault((e.layer, begins[e.event]), i)
        if e.event in ("norm", "step"):
            yield e.layer, "step", i - 1, i
        ended = ends.get(e.event, [])
        if e.event == "free":
            ended = ["full", "computing"] if (e.layer, "full") in begun else ["gradients"]
        for name in ended:
            if (e.layer, name) in begun:
                yield e.layer, name, begun.pop((e.layer, name)), i
    for (layer, name), first in begun.items():
        # A write may still be in flight at the end.
        if name == "writing":
            yield layer, name, first, len(events)


def draw_tape(
    tapes: list[list[Event]],
    predicted: list[dict[str, int]],
    plain: dict[str, int],
    caption: str,
) -> Figure:
    """
    ## The memory tape of one step

    * `tapes` has the events of each rank, and `predicted` the predicted bytes of each
    * `plain` has the bytes of plain data parallelism
    """
    events = tapes[0]
    held = [[e.live_bytes for e in tape] for tape in tapes]
    alike = len(tapes) > 1 and all(each == held[0] for each in held)
    shown = tapes[:1] if alike else tapes[:4]
    fig = _figure(caption, 11, [
        *[2.4] * len(shown),
        0.8 + 0.3 * len({e.layer for e in events}),
    ])
    for ax, tape, expected in zip(fig.axes, shown, predicted, strict=False):
        _draw_memory(ax, tape, expected, plain)
        ax.set_ylabel(f"{'each rank' if alike else f'rank {tape[0].rank}'}\nMiB held")
    _draw_layers(fig.axes[-1], events)
    for phase, run in groupby(range(len(events)), key=lambda i: events[i].phase):
        places = list(run)
        for ax in fig.axes:
            ax.axvspan(places[0] + 0.5, places[-1] + 1.5, color=SHADES[phase], zorder=0)
        fig.axes[0].text(
            statistics.fmean(places) + 1, 1.02, phase,
            ha="center", fontsize=8,
            transform=fig.axes[0].get_xaxis_transform(),
        )
    return fig


def _draw_memory(ax: Axes,
                 tape: list[Event],
                 predicted: dict[str, int],
                 plain: dict[str, int]) -> None:
    """
    #### Bytes of one rank, and the predicted levels
    """
    rest = predicted.get("rest_bytes", min(e.live_bytes for e in tape))
    live = [held / MIB for held in (rest, *(e.live_bytes for e in tape), rest)]
    at = range(len(live))
    ax.fill_between(at, live[0], color=COLORS["shard"], alpha=0.35, linewidth=0)
    ax.fill_between(
        at, live, live[0], step="post",
        color=COLORS["whole"], alpha=0.5, linewidth=0,
    )
    files = predicted.get("disk_bytes", 0) / MIB
    what = f"buffers; {files:.1f} MiB rest in files" if files else "shards and optimizer states"
    ax.text(1, live[0] / 2, what, fontsize=8, va="center")
    ax.step(at, live, where="post", color=NEUTRAL["fg"], linewidth=1.3)
    levels = [(plain["peak_bytes"], "data parallel\npeak", NEUTRAL["muted"], "bottom")]
    if predicted:
        levels += [(predicted["peak_bytes"], "predicted peak", NEUTRAL["bad"], "top"),
                   (predicted["rest_bytes"], "predicted at rest", COLORS["shard"], "top")]
    for level, text, color, side in levels:
        ax.axhline(level / MIB, color=color, linewidth=1.1, linestyle="--")
        ax.text(
            1.005, level / MIB, text,
            color=color, fontsize=8, va=side,
            transform=ax.get_yaxis_transform(),
        )
    ax.set(ylim=(0, 1.08 * max(*live, *(level / MIB for level, *_ in levels))))


def _draw_layers(ax: Axes, events: list[Event]) -> None:
    """
    #### A bar for each span of each layer
    """
    layers = list(dict.fromkeys(e.layer for e in events))
    found = list(spans(events))
    for layer, name, first, last in found:
        color, height, below, _ = STYLES[name]
        ax.barh(
            layers.index(layer) + below, last - first,
            left=first + 1, height=height,
            color=color, zorder=2 + [*STYLES].index(name),
        )
    ax.set_yticks(range(len(layers)), layers, fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="events of one step, in order", xlim=(0, len(events) + 1))
    drawn = {name for _, name, _, _ in found}
    ax.legend(
        handles=[
            Patch(color=color, label=text)
            for name, (color, _, _, text) in STYLES.items()
            if name in drawn],
        fontsize=8, frameon=False,
        loc="lower left", bbox_to_anchor=(1, 0),
    )

"""
# The ladder as figures and tables

Draws the memory of each rung of the ladder that `ladder.py` ran, and of the same rungs for a large
model from the formulas.

The ladder is about device memory. So its bars are device memory alone, all on one scale, and each
is at most as long as the one above it. Bytes in CPU memory and in files are numbers beside the
bars. In the small model the buffers and files of the last rung are together nearly as large as all
of DDP's memory. As parts of the bars they would hide that the device is almost empty.

An example, 8 billion parameters on 64 ranks:

| rung | bar | numbers beside it |
|---|---|---|
| DDP | 128 GB | |
| ZeRO-3, CPU | 1.5 GB | CPU 2 GB |

**Run this**: `make docs`.

**Not covered, and what that costs**: the two figures have scales of their own, so their bars cannot
be compared with each other.
"""

from dataclasses import dataclass
from html import escape
from typing import Any

from docs import svg
from zero3.estimate.formulas import WIDTHS, places

# The model of the second figure.
LARGE_PARAMS = 8e9
LARGE_RANKS = 64
LARGE_LAYERS = 32
# The parts of a bar: colour, words, and whether it is pale.
LEGEND = (("whole", "parameters", False), ("shard", "in shards", False),
          ("grad", "gradients", False), ("reduced", "in shards", False),
          ("state", "optimizer states", False), ("whole", "more at the peak", True))


@dataclass(frozen=True)
class Unit:
    """
    ## A unit of bytes
    """

    name: str
    size: float
    digits: int  # after the point

    def number(self, nbytes: float) -> str:
        return f"{nbytes / self.size:.{self.digits}f}" if nbytes else "0"

    def __call__(self, nbytes: float) -> str:
        return f"{self.number(nbytes)} {self.name}"


KIB = Unit("KiB", 2**10, 0)
MIB = Unit("MiB", 2**20, 1)
GB = Unit("GB", 1e9, 2)


@dataclass(frozen=True)
class Bar:
    """
    ## Memory of a rank on one rung, in bytes
    """

    rung: str
    parts: dict[str, float]  # on the device after a step, by the colour of what it is
    rise_bytes: float  # more than that, at the peak
    cpu_bytes: float
    file_bytes: float

    @property
    def rest_bytes(self) -> float:
        return sum(self.parts.values())

    @property
    def device_bytes(self) -> float:
        return self.rest_bytes + self.rise_bytes


def colored(params: float, grads: float, states: float, stage: int) -> dict[str, float]:
    """
    ## The bytes of a rank, by the colour of what they are

    * `stage` is ZeRO's: from 2 on gradients are reduced, and in 3 parameters are shards
    """
    return {"shard" if stage == 3 else "whole": params, "reduced" if stage > 1 else "grad": grads,
            "state": states}


def measured(answer: dict[str, Any]) -> list[Bar]:
    """
    ## The bars of the rungs that ran

    The run measures the bytes together. Parameters and gradients take 4 bytes each, and what a rung
    shards is divided by the ranks; the rest is the optimizer's.
    """
    bars = []
    for row in answer["rows"]:
        rest = row["device_rest_bytes"]
        params, grads = (4 * answer["params"] // (answer["ranks"] if kind in row["sharded"] else 1)
                         if rest else 0 for kind in ("parameters", "gradients"))
        stage = ("moments" in row["sharded"]) + ("gradients" in row["sharded"]) + (
            "parameters" in row["sharded"])
        bars.append(Bar(row["rung"], colored(params, grads, rest - params - grads, stage),
                        row["device_peak_bytes"] - rest, row["cpu_bytes"], row["file_bytes"]))
    return bars


def stage_parts(params: float,
                ranks: int,
                layers: int = 32,
                basis: int | str = 16) -> list[dict[str, float]]:
    r"""
    ## `stages` in parts: the bytes of a rank by `KINDS`, for stages 0 to 3

    Working buffers are not in Table 1: the full gradient of a layer in stage 2, and two whole
    layers more in stage 3.

    * `layers` are taken to have the same size
    """
    p, g, k = WIDTHS[basis]
    layer = params / layers
    working = (0, 0, p * layer, 3 * p * layer)
    return [
        {
            "parameters": params * p / (ranks if stage > 2 else 1),
            "gradients": params * g / (ranks if stage > 1 else 1),
            "states": params * k / (ranks if stage > 0 else 1),
            "working": working[stage],
        }
        for stage in range(4)
    ]


def calculated(names: list[str], params: float, ranks: int, layers: int) -> list[Bar]:
    """
    ## The bars of the same rungs for another model, from the formulas

    * `names` are those of the rungs

    In half precision with Adam, 16 bytes per parameter. Working buffers are the rise to the peak.
    """
    stages = stage_parts(params, ranks, layers)
    parts = [{"device": held, "cpu": {}, "nvme": {}} for held in (stages[0], *stages)]
    by_tiers = {(place.params_in, place.states_in): place.parts
                for place in places(params, ranks, layers)}
    parts += [by_tiers["cpu", "cpu"], by_tiers["nvme", "nvme"]]
    return [Bar(rung, colored(held["device"]["parameters"], held["device"]["gradients"],
                              held["device"]["states"], stage),
                held["device"]["working"], sum(held["cpu"].values()), sum(held["nvme"].values()))
            for rung, held, stage in zip(names, parts, (0, 0, 1, 2, 3, 3, 3), strict=True)]


def large_ladder(rows: list[dict[str, Any]]) -> list[Bar]:
    return calculated([row["rung"] for row in rows], LARGE_PARAMS, LARGE_RANKS, LARGE_LAYERS)


def rung_figures(answer: dict[str, Any], caption: str) -> str:
    """
    ## Both ladders as figures: the one that ran, and a large one from the formulas

    * `caption` is the origin of the run
    """
    title = f"{answer['params']:,} parameters on {answer['ranks']} ranks"
    ran = draw(measured(answer), title, MIB)
    return (svg.figure(*ran, f"Memory of one rank, measured: {answer['params']:,} "
                       f"parameters, {answer['layers']} layers, fp32. {caption}.")
            + large_figure(answer))


def large_figure(answer: dict[str, Any]) -> str:
    """
    ## The large ladder as a figure

    * `answer` is the ladder that ran, whose rungs this one has
    """
    title = f"{LARGE_PARAMS / 1e9:g} billion parameters on {LARGE_RANKS} ranks"
    drawings = draw(large_ladder(answer["rows"]), title, GB)
    return svg.figure(*drawings, f"Memory of one rank: {title}, {LARGE_LAYERS} layers, half "
                      "precision with Adam, 16 bytes per parameter. Calculated from the formulas "
                      "of zero3/estimate/formulas.py, without activations.")


def draw(bars: list[Bar], title: str, unit: Unit) -> tuple[svg.Drawing, svg.Drawing]:
    """
    ## The memory of each rung, for wide windows and for phones

    Device memory has bars, all on one scale. Bytes in CPU memory and in files are numbers beside
    them, because they are not what the figure compares.
    """
    told = "; ".join(f"{bar.rung}: device {unit(bar.device_bytes)}{off_device(bar, unit)}"
                     for bar in bars)
    about = f"Device memory of a rank at the peak of a step, {title}. {told}."
    wide = svg.Drawing(640, 50 + 34 * len(bars), f"Memory of a rank: {title}", about)
    phone = svg.Drawing(360, 48 + 58 * len(bars), f"Memory of a rank: {title}", about)
    legend(wide, 142)
    legend(phone, 106)
    wide.text(448, 16, "moved off the device", "muted")
    wide.line(434, 6, 434, wide.height - 6, "line")
    most = max(bar.device_bytes for bar in bars)
    for i, bar in enumerate(bars):
        wide_row(wide, 52 + 34 * i, bar, most, unit)
        phone_row(phone, 56 + 58 * i, bar, most, unit)
    return wide, phone


def legend(drawing: svg.Drawing, apart: float) -> None:
    """
    ## What the parts of a bar are; whatever is sharded stands below what is whole
    """
    for i, (color, text, pale) in enumerate(LEGEND):
        left = 2 + i // 2 * apart
        top = 16 + i % 2 * 20
        drawing.rect(left, top - 11, 13, 13, color, pale=pale)
        drawing.text(left + 20, top, text)


def device_bar(drawing: svg.Drawing, x: float, y: float, bar: Bar, width: float,
               scale: float) -> None:
    """
    ## The parts of a bar

    * `width` is the length of the whole scale, `scale` the length of a byte
    """
    drawing.rect(x, y, width, 18, "line", border=False)
    for color, nbytes in bar.parts.items():
        if nbytes:
            drawing.rect(x, y, nbytes * scale, 18, color, pale=False)
        x += nbytes * scale
    if bar.rise_bytes:
        drawing.rect(x, y, bar.rise_bytes * scale, 18, "whole")


def wide_row(drawing: svg.Drawing, y: float, bar: Bar, most: float, unit: Unit) -> None:
    """
    ## A rung in a wide window: its bar, and at its right the bytes off the device
    """
    drawing.text(2, y + 14, bar.rung)
    device_bar(drawing, 104, y, bar, 234, 234 / most)
    drawing.text(426, y + 14, unit(bar.device_bytes), anchor="end", bold=True)
    drawing.text(448, y + 14, off_device(bar, unit).removeprefix(", "), "muted")


def phone_row(drawing: svg.Drawing, y: float, bar: Bar, most: float, unit: Unit) -> None:
    """
    ## A rung on a phone: the words, and below them the bar
    """
    drawing.text(2, y + 12, bar.rung)
    drawing.text(358, y + 12, unit(bar.device_bytes) + off_device(bar, unit), anchor="end")
    device_bar(drawing, 2, y + 20, bar, 356, 356 / most)


def off_device(bar: Bar, unit: Unit) -> str:
    """
    ## The bytes in CPU memory and in files, if there are any
    """
    named = (("CPU", bar.cpu_bytes), ("files", bar.file_bytes))
    return "".join(f", {name} {unit(nbytes)}" for name, nbytes in named if nbytes)


# ------------------------------------------------------------------------------------------ tables


def memory_table(answer: dict[str, Any]) -> str:
    """
    ## The measured memory of a rank, as an HTML table
    """
    columns = {"device_rest_bytes": "device, after a step", "device_peak_bytes": "at its peak",
               "cpu_bytes": "CPU", "file_bytes": "files"}
    rows = [[f"{MIB.name} of a rank", *columns.values()]]
    rows += [[row["rung"], *(MIB.number(row[c]) for c in columns)]
             for row in answer["rows"]]
    return html_table(rows)


def traffic_table(answer: dict[str, Any]) -> str:
    """
    ## The states in shards and the communication of each rung, as an HTML table
    """
    rows = [["", "in shards", f"{MIB.name} sent in a step"]]
    rows += [[row["rung"], row["sharded"], MIB.number(row["sent_bytes"])]
             for row in answer["rows"]]
    return html_table(rows, words=2)


def losses_table(answer: dict[str, Any]) -> str:
    """
    ## The first, the middle and the last loss of each rung, as an HTML table
    """
    steps = sorted({0, answer["steps"] // 2, answer["steps"] - 1})
    rows = [["loss", *(f"step {step + 1}" for step in steps)]]
    rows += [[row["rung"], *(f"{row['losses'][step]:.4f}" for step in steps)]
             for row in answer["rows"]]
    return html_table(rows)


def differences_table(answer: dict[str, Any]) -> str:
    """
    ## The largest difference of each rung from DDP, as an HTML table
    """
    rows = [["largest difference from DDP", "in a loss", "in a weight"]]
    for row in answer["rows"]:
        differ = (row["loss_difference"], row["weight_difference"])
        rows.append([row["rung"], *(f"{each:.0e}" if each else "none" for each in differ)])
    return html_table(rows)


def compiled_table(answer: dict[str, Any]) -> str:
    """
    ## ZeRO-3 with hooks and compiled: memory, all-gathers and bytes, as an HTML table
    """
    rows = [["", f"{MIB.name} on the device, at its peak", "all-gathers in a step",
             f"{MIB.name} sent in a step", "largest difference from DDP, in a loss"]]
    for row in (hooks(answer), *answer["compiled"]):
        differs = row["loss_difference"]
        rows.append([row["rung"], f"{row['device_peak_bytes'] / MIB.size:.2f}",
                     str(row["gathers"]), f"{row['sent_bytes'] / MIB.size:.2f}",
                     f"{differs:.0e}" if differs else "none"])
    return html_table(rows)


def hooks(answer: dict[str, Any]) -> dict[str, Any]:
    """
    ## The rung that the compiled ones are compared with
    """
    return next(row for row in answer["rows"] if row["rung"] == "ZeRO-3")


def fewer_compiled(answer: dict[str, Any]) -> str:
    """
    ## What the compiled rungs save: a sentence with the numbers of layers and bytes
    """
    before = hooks(answer)
    saved = [(before["gathers"] - row["gathers"],
              f"{100 * (1 - row['sent_bytes'] / before['sent_bytes']):.0f} %")
             for row in answer["compiled"]]
    (few, less), (many, least) = saved
    return (f"With the memory of hooks it spares {few} of {before['gathers']} all-gathers and "
            f"sends {less} fewer bytes; with room for five layers {many}, and {least}.")


def nodes_table(answer: dict[str, Any]) -> str:
    """
    ## The rungs on two nodes: memory, bytes between nodes, and losses, as an HTML table
    """
    rows = [["on two nodes", f"{MIB.name} on the device, after a step", "at its peak",
             f"{KIB.name} to the other node in a step", f"loss, step {answer['steps']}",
             "largest difference from flat"]]
    for row in answer["nodes"]:
        differs = row["loss_difference"]
        rows.append([row["rung"], MIB.number(row["device_rest_bytes"]),
                     MIB.number(row["device_peak_bytes"]), KIB.number(row["between_bytes"]),
                     f"{row['losses'][-1]:.4f}", f"{differs:.0e}" if differs else "none"])
    return html_table(rows)


def fewer_between(answer: dict[str, Any]) -> str:
    """
    ## The bytes between nodes that ZeRO++ sends of those of the layout "nodes", in words
    """
    nodes, last = (each for each in answer["nodes"] if each["rung"] in ("nodes", "ZeRO++"))
    return f"{100 * last['between_bytes'] / nodes['between_bytes']:.0f} %"


def html_table(rows: list[list[str]], words: int = 1) -> str:
    """
    ## Rows as an HTML table; the first one is the header

    * `words` is the number of columns on the left that contain words, not numbers
    """
    lines = []
    for i, row in enumerate(rows):
        tag = "td" if i else "th"
        # A header that breaks keeps the columns of numbers narrow.
        wraps = "" if i else ' style="white-space:normal"'
        cells = (f"<{tag}{' class=number' * (j >= words)}{wraps}>{escape(cell)}</{tag}>"
                 for j, cell in enumerate(row))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return '<table class="numbers">' + "".join(lines) + "</table>"


def buffers(answer: dict[str, Any]) -> str:
    """
    ## Why files save so little CPU memory in the small model: a sentence with both numbers
    """
    small = measured(answer)
    large = large_ladder(answer["rows"])
    kept = [f"{100 * bars[-1].cpu_bytes / bars[-2].cpu_bytes:.0f} %" for bars in (small, large)]
    return (f"The small model has only {answer['layers']} layers, so its last rung still needs "
            f"{kept[0]} of the CPU memory of the rung before. The large model has {LARGE_LAYERS} "
            f"layers, and needs {kept[1]}. With twice as many layers of the same size, the buffers "
            "stay as large as they are.")

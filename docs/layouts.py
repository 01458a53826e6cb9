r"""
# Layouts: what moves where, drawn from runs

`record` runs three small programs on a few ranks. `files`, `reshard` and `trace` draw what they
did: the pipeline between files and memory, a checkpoint on another number of ranks, and a whole
model that goes another way than its trace.

A ledger says in which order things begin and end. The first and the last figure show this order
and no times. A bar reaches from the event that begins something to the event that ends it. Each bar
begins at the present *moment*, and the moment counts up only when a bar would end where it began.
So a read of layer 2 that spans the computation of layer 0 is drawn above or below it:

| event | moment | bar |
|---|---|---|
| read of layer 2 begins | 2 | |
| layer 0 computes | 2 | |
| layer 0 has computed | 3 | computation of layer 0, from 2 to 3 |
| the shard of layer 2 has arrived | 3 | read of layer 2, from 2 to 3 |

$$\text{end} = \max(\text{moment},\, \text{begin} + 1)$$

**Run this**: `make docs`; the figures are in the chapters on offload, checkpoints and whole models.

**Not covered, and what that costs**: times. A read, a write and an all-gather count as running
until the rank waits for them, as on the tape. The disk may have finished long before.
"""

import sys
import tempfile
import textwrap
from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from docs.svg import FONT, LETTER, STRIPED, Drawing, figure, origin
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, commit_name
from zero3.checkpoint.reader import CheckpointReader, Param, TensorFile, newest
from zero3.checkpoint.save_load import load, save
from zero3.estimate.ledger import Ledger
from zero3.offload.in_file import InFile
from zero3.train import launch
from zero3.whole_model.wrap import wrap

Json = dict[str, Any]

OLD_RANKS = 2
NEW_RANKS = 3
LAYERS = 6  # of the chain in files, so that a buffer has another shard in each turn
SHOWN = 5  # of them in forward
BUFFERS = 3  # the fewest: one to read into, one to step, one to write from
WAYS = ("left", "left", "right", "right")  # of the model that branches, step by step
WIDE = 640
PHONE = 360
# The events that begin something, and those that end it.
ENDS = {"read": "arrived", "fetch": "gathered", "compute": "computed", "write": "written"}
BEGINS = {end: begin for begin, end in ENDS.items()}
COLORS = {"read": "file", "write": "file", "fetch": "flight", "compute": "compute",
          "step": "compute", "gradient": "reduced"}
WORDS = {"fetch": "gather"}  # for events whose names are not the book's words
# What to see in the passes of `WAYS`.
NOTES = ("There is no trace yet. Each layer is gathered when it is needed.",
         "Along the trace, each layer is gathered while the one before it computes.",
         "The trace says left. After the dashed line, each layer is gathered on demand.",
         "The trace is that of step 3 now, and the pass follows it.")


# -------------------------------------------------------------------------------------- the record


class Moves(Ledger):
    """
    ## A ledger that also records which buffer a read or a write uses
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.rows: list[Json] = []

    def record(self, sender: Any, event: str, *args: Any, **kwargs: Any) -> None:
        """
        ### Record an event
        """
        super().record(sender, event, *args, **kwargs)
        told = self.events[-1]
        # Reads and writes are recorded by the `InFile` whose tensors move.
        caller = sys._getframe(1).f_locals.get("self")
        self.rows.append({"layer": sender.layer_idx, "phase": told.phase, "event": event,
                          "bytes": told.bytes, **place_of(caller)})


def place_of(file: Any) -> Json:
    """
    #### What a file has, and which buffer its tensors are in
    """
    if not isinstance(file, InFile) or file.buffer is None:
        return {}
    storages = [memory.untyped_storage().data_ptr() for memory in file.buffers.memory]
    return {"holds": "states" if "grad" in file.where else "shard",
            "buffer": storages.index(file.buffer.untyped_storage().data_ptr())}


def chain_in_files(folder: str) -> list[Json]:
    """
    ## Two steps of a chain whose shards and states are in files; the events of the second one

    The first step creates the moments, so its reads are smaller.
    """
    offload = Offload("nvme", folder, buffers=BUFFERS)
    model = Zero3Sequential([Zero3Layer(nn.Linear(64, 64, bias=False), offload=offload)
                             for _ in range(LAYERS)])
    # No buckets, because a bucket would hold the gradients of all these small layers.
    optimizer = Zero3Optimizer(model, offload=offload, bucket_bytes=0)
    for _ in range(2):
        tape = Moves(model, optimizer)
        with tape:
            optimizer.backward(model(torch.ones(2, 64)).sum())
            optimizer.step()
        optimizer.zero_grad()
    return tape.rows


class Branch(nn.Module):
    """
    ## A model that goes left or right
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.left = nn.Linear(16, 16)
        self.right = nn.Linear(16, 16)
        self.third = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        branch = self.left if way == "left" else self.right
        return self.last(self.third(branch(self.first(x))))


def changing_trace() -> list[Json]:
    """
    ## Four training steps of a model that goes left, left, right and right

    Returns for each step the events of its layers in forward. The root has no parameters, so its
    events are left out.
    """
    model = wrap(Branch(), nn.Linear)
    optimizer = Zero3Optimizer(model)
    steps = []
    for way in WAYS:
        tape = Moves(model, optimizer)
        with tape:
            optimizer.backward(model(torch.ones(2, 16), way).sum())
            optimizer.step()
        optimizer.zero_grad()
        rows = [{**row, "name": model.units[row["layer"]].path} for row in tape.rows
                if row["phase"] == "forward" and row["layer"] > 0]
        steps.append({"way": way, "rows": rows})
    return steps


class Small(nn.Module):
    """
    ## Ten weights in three parameters, which only have to be saved
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 7).view(2, 3))
        self.bias = nn.Parameter(torch.tensor([7.0, 8.0]))
        self.scale = nn.Parameter(torch.tensor([9.0, 10.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight.T + self.bias) * self.scale


def small_run() -> tuple[Zero3Layer, Zero3Optimizer]:
    """
    ## A sharded layer, and an optimizer after one step with a rate of zero

    So the weights keep their values, and the moments exist.
    """
    layer = Zero3Layer(Small())
    optimizer = Zero3Optimizer(layer, lr=0.0)
    optimizer.backward(layer(torch.ones(1, 3)).sum())
    optimizer.step()
    return layer, optimizer


def shard_of(layer: Zero3Layer) -> list[float]:
    return layer.flats[0].shard.tolist()


def old_rank(folder: str) -> Json:
    """
    ## A rank of the first run: it trains in files, follows a trace, and saves a checkpoint
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        files = chain_in_files(scratch)
    layer, optimizer = small_run()
    save(f"{folder}/checkpoint", layer, optimizer, step=1)
    return {"files": files, "trace": changing_trace(), "shard": shard_of(layer)}


class Reads:
    """
    ## A record of what a load reads from a checkpoint

    Inside its context, each range that `CheckpointReader.read` takes from a file is noted.
    """

    def __init__(self) -> None:
        self.rows: list[Json] = []
        self._now: tuple[str, str, int] = ("", "", 0)  # the parameter, its key, the next element
        self._read = CheckpointReader.read
        self._read_file = TensorFile.read
        self._patches = [mock.patch.object(CheckpointReader, "read", self._note_param()),
                         mock.patch.object(TensorFile, "read", self._note_range())]

    def __enter__(self) -> "Reads":
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *exception: Any) -> None:
        for patch in self._patches:
            patch.stop()

    def _note_param(self) -> Callable[..., torch.Tensor]:
        def read(reader: CheckpointReader, param: Param, key: str, begin: int, end: int
                 ) -> torch.Tensor:
            self._now = param.name, key, begin
            return self._read(reader, param, key, begin, end)
        return read

    def _note_range(self) -> Callable[..., torch.Tensor]:
        def read(file: TensorFile, name: str, begin: int = 0, end: int | None = None
                 ) -> torch.Tensor:
            values = self._read_file(file, name, begin, end)
            param, key, first = self._now
            self._now = param, key, first + len(values)
            self.rows.append({"param": param, "key": key, "first": first, "numel": len(values),
                              "file": file.rank, "begin": begin})
            return values
        return read


def new_rank(folder: str) -> Json:
    """
    ## A rank of the second run: it loads the checkpoint
    """
    layer, optimizer = small_run()
    with torch.no_grad():
        layer.flats[0].shard.zero_()
    with Reads() as reads:
        load(folder, layer, optimizer)
    path = newest(folder)
    assert path is not None
    (flat,) = CheckpointReader(path).flats
    return {"reads": reads.rows, "flat": flat, "shard": shard_of(layer)}


def record(timeout_s: float = 120) -> Json:
    """
    ## Run the three programs

    Raises `AssertionError` if a rank failed.
    """
    from zero3.train import report  # Here, because it imports matplotlib.

    with tempfile.TemporaryDirectory() as folder:
        old = launch.run("docs.layouts:old_rank", OLD_RANKS, folder, device="cpu",
                         timeout_s=timeout_s)
        new = launch.run("docs.layouts:new_rank", NEW_RANKS, f"{folder}/checkpoint", device="cpu",
                         timeout_s=timeout_s)
    return {"old": old, "new": new, "device": report.device_name(torch.device("cpu")),
            "torch": torch.__version__, "commit": commit_name()}


# ------------------------------------------------------------------------------------------ moments


class Bar(NamedTuple):
    """
    ## Something that takes a while
    """

    kind: str  # the event that began it, "step", or "gradient": the write of one
    layer: int
    begin: int  # a moment
    end: int
    ended: bool  # whether somebody has waited for it
    nbytes: int
    buffer: int | None
    name: str

    def spans(self, moment: int) -> bool:
        return self.begin <= moment < self.end


def bars(rows: list[Json]) -> list[Bar]:
    """
    ## The bars of recorded events, in the order in which they end

    An end whose beginning is not among the rows has no bar. The bars that did not end come last and
    are one moment long.
    """
    found: list[Bar] = []
    running: dict[tuple[int, str], Bar] = {}
    moment = 0
    for row in rows:
        event = row["event"]
        if event in ENDS or event == "step":
            running[row["layer"], event] = _begun(row, moment)
        ended = running.pop((row["layer"], BEGINS.get(event, "")), None)
        if event == "step":
            # A step is recorded when it has ended, and nothing else happens meanwhile.
            ended = running.pop((row["layer"], event))
        if ended:
            moment = max(moment, ended.begin + 1)
            found.append(ended._replace(end=moment, ended=True))
    return found + [*running.values()]


def _begun(row: Json, moment: int) -> Bar:
    is_gradient = row["event"] == "write" and row["phase"] == "backward"
    return Bar("gradient" if is_gradient else row["event"], row["layer"], moment, moment + 1, False,
               row["bytes"], row.get("buffer"), row.get("name", f"{row['layer']}"))


def forward_rows(recorded: Json) -> list[Json]:
    """
    ## The beginning of the forward pass in files: of the `SHOWN` first layers

    It ends when the last but two of them has computed. Then the next layer's read would begin.
    """
    rows = [row for row in recorded["old"][0]["files"]
            if row["phase"] == "forward" and row.get("holds") != "states"]
    events = [(row["layer"], row["event"]) for row in rows]
    return rows[: events.index((SHOWN - 3, "computed")) + 1]


def step_rows(recorded: Json) -> list[Json]:
    """
    ## The optimizer step in files, with the end of backward, in which it is prepared
    """
    rows = [row for row in recorded["old"][0]["files"] if row["phase"] != "forward"
            and (row.get("holds") == "states" or row["event"] == "step")]
    # This gradient starts the first reads for the step.
    events = [(row["layer"], row["event"]) for row in rows]
    return rows[events.index((BUFFERS - 1, "write")) :]


def moments(found: list[Bar], say: Callable[[Bar], str]) -> str:
    """
    ## What happens in each moment, for readers who do not see the figure
    """
    last = max(bar.end for bar in found)
    return " ".join(f"{i + 1}: {', '.join(say(bar) for bar in found if bar.spans(i))}."
                    for i in range(last))


# -------------------------------------------------------------------------------------- the drawing


class Lanes:
    """
    ## Lanes of bars: time goes to the right, or down
    """

    def __init__(self, drawing: Drawing, left: float, top: float, lane: float, moment: float,
                 down: bool = False):
        """
        ### Choose the place

        * `lane` and `moment` are their sizes
        """
        self.drawing = drawing
        self.left = left
        self.top = top
        self.lane = lane
        self.moment = moment
        self.down = down

    def box(self, lane: float, begin: float, lanes: float, length: float
            ) -> tuple[float, float, float, float]:
        """
        ### Left, top, width and height of some lanes and moments
        """
        across = (lane * self.lane, lanes * self.lane)
        along = (begin * self.moment, length * self.moment)
        x, y = (across, along) if self.down else (along, across)
        return self.left + x[0], self.top + y[0], x[1], y[1]

    def bar(self, lane: float, begin: float, end: float, color: str, text: str) -> None:
        """
        ### A bar, with its text inside

        Raises `ValueError` if the text does not fit.
        """
        x, y, width, height = self.box(lane, begin, 1, end - begin)
        if len(text) * FONT * LETTER > width - 2:
            raise ValueError(f"the text {text!r} does not fit into a bar that is {width:.0f} wide")
        self.drawing.rect(x + 1, y + 1.5, width - 2, height - 3, color)
        if color in STRIPED:
            self._chip(x + width / 2, y + height / 2, min(len(text) * FONT * LETTER + 2, width - 6))
        self.drawing.text(x + width / 2, y + height / 2 + 4.5, text, anchor="middle")

    def _chip(self, x: float, y: float, width: float) -> None:
        """
        #### The page's colour between stripes and text
        """
        self.drawing.tag(f'<rect x="{x - width / 2:.1f}" y="{y - 7.5:.1f}" width="{width:.1f}" '
                         'height="15" rx="2" style="fill:var(--bg);fill-opacity:.8"/>')

    def name(self, lane: float, text: str) -> None:
        """
        ### The name of a lane, before its first bar
        """
        x, y, width, height = self.box(lane, 0, 1, 0)
        if self.down:
            self.drawing.text(x + width / 2, y - 6, text, "muted", anchor="middle")
        else:
            self.drawing.text(x - 6, y + height / 2 + 4.5, text, "muted", anchor="end")

    def frame(self, moment: float, first: int, lanes: int) -> None:
        """
        ### A frame around some lanes in a moment to look at
        """
        x, y, width, height = self.box(first, moment, lanes, 1)
        self.drawing.tag(f'<rect x="{x - 1:.1f}" y="{y - 1:.1f}" width="{width + 2:.1f}" '
                         f'height="{height + 2:.1f}" rx="3" style="fill:none;stroke:var(--fg);'
                         'stroke-width:2"/>')

    def rule(self, moment: float, lanes: int) -> None:
        """
        ### A line across all lanes, between two moments
        """
        x, y, width, height = self.box(0, moment, lanes, 0)
        self.drawing.line(x, y - 2, x + width, y + height + 2, "bad", dashed=True, width=2)

    def bottom(self, lanes: int, last: int) -> float:
        """
        ### Where these lanes with so many moments end
        """
        _, y, _, height = self.box(0, 0, lanes, last)
        return y + height

    def opens(self, lane: float, begin: float, end: float) -> None:
        """
        ### A line from the end of a bar on, because nobody has waited for it
        """
        x, y, width, height = self.box(lane + 0.5, begin, 0, end - begin)
        self.drawing.line(x, y, x + width, y + height, dashed=True)


def paragraph(drawing: Drawing, y: float, text: str, color: str = "muted", bold: bool = False
              ) -> float:
    """
    ## Text in as many lines as it needs; returns the baseline after it
    """
    letters = int((drawing.width - 8) / (FONT * LETTER))
    for line in textwrap.wrap(text, letters):
        drawing.text(4, y, line, color, bold=bold)
        y += 18
    return y


# ------------------------------------------------------------------------------------------- files


def files(recorded: Json) -> str:
    """
    ## The figure of shards and states in files
    """
    about = _files_about(recorded)
    return figure(_files(recorded, Drawing(WIDE, 0, *about)),
                  _files(recorded, Drawing(PHONE, 0, *about)),
                  "In forward a shard is read two layers ahead. In the step the states of a shard "
                  "are read into a buffer, stepped there, and written from it. The first reads and "
                  "the gradients are part of backward, and the next forward pass waits for the "
                  "last writes. This run has three buffers; five are the default. The order of "
                  "events on rank 0, without times. "
                  + origin(recorded, OLD_RANKS))


def _files_about(recorded: Json) -> tuple[str, str]:
    def say(bar: Bar) -> str:
        return f"{WORDS.get(bar.kind, bar.kind)} {bar.layer}"
    return ("Shards and states in files", "Forward, moment by moment, with the numbers of layers. "
            + moments(bars(forward_rows(recorded)), say) + " The end of backward and the optimizer "
            "step, with the numbers of shards. " + moments(bars(step_rows(recorded)), say))


def _files(recorded: Json, drawing: Drawing) -> Drawing:
    forward = bars(forward_rows(recorded))
    step = bars(step_rows(recorded))
    read_bytes = next(bar.nbytes for bar in forward if bar.kind == "read")
    states_bytes = max(bar.nbytes for bar in step)
    y = paragraph(drawing, 16, "Forward: three layers at once", "fg", bold=True)
    y = paragraph(drawing, y, "Layer 1 computes while layer 2 is gathered and the shard of layer "
                  f"3, {read_bytes:,} bytes, is read.")
    y = _forward(drawing, forward, y) + 38
    y = paragraph(drawing, y, "Optimizer step: three buffers take turns", "fg", bold=True)
    y = paragraph(drawing, y, f"Shard 3 is stepped while the {states_bytes:,} bytes of shard 4 are "
                  "read and shard 2 is written.")
    drawing.height = _turns(drawing, step, y) + 6
    return drawing


def _lanes(drawing: Drawing, lanes: int, last: int, y: float) -> Lanes:
    """
    #### Lanes from left to right, and on a phone from top to bottom

    * `last` is the number of moments
    """
    if drawing.width == PHONE:
        return Lanes(drawing, 2, y + 12, (PHONE - 4) / lanes, 25, down=True)
    return Lanes(drawing, 66, y - 6, 27, (WIDE - 70) / last)


def _forward(drawing: Drawing, found: list[Bar], y: float) -> float:
    """
    #### A lane for each layer; returns where the lanes end
    """
    last = max(bar.end for bar in found if bar.ended)
    lanes = _lanes(drawing, SHOWN, last, y)
    for layer in range(SHOWN):
        lanes.name(layer, f"layer {layer}")
    for bar in found:
        lanes.bar(bar.layer, bar.begin, min(bar.end, last), COLORS[bar.kind],
                  WORDS.get(bar.kind, bar.kind))
    lanes.frame(next(bar.begin for bar in found if (bar.kind, bar.layer) == ("compute", 1)), 1, 3)
    return lanes.bottom(SHOWN, last)


def turns(found: list[Bar]) -> dict[int, int]:
    """
    ## The buffer of each shard's states, numbered in the order of shards
    """
    used = {bar.layer: bar.buffer for bar in found if bar.kind != "step"}
    order = list(dict.fromkeys(used[layer] for layer in sorted(used)))
    return {layer: order.index(buffer) for layer, buffer in used.items()}


def _turns(drawing: Drawing, found: list[Bar], y: float) -> float:
    """
    #### A lane for each buffer; returns where the lanes end
    """
    last = max(bar.end for bar in found)
    lanes = _lanes(drawing, BUFFERS, last, y)
    lane_of = turns(found)
    for number in range(BUFFERS):
        lanes.name(number, f"buffer {number + 1}")
    steps = {bar.layer: bar.begin for bar in found if bar.kind == "step"}
    for bar in found:
        text = bar.kind if bar.kind == "gradient" else f"{bar.kind} {bar.layer}"
        lanes.bar(lane_of[bar.layer], bar.begin, bar.end, COLORS[bar.kind], text)
        if not bar.ended and bar.end < last:
            lanes.opens(lane_of[bar.layer], bar.end, last)
    lanes.frame(steps[3], 0, BUFFERS)
    return lanes.bottom(BUFFERS, last)


# ------------------------------------------------------------------------------------------ reshard


def reads_of(recorded: Json) -> list[Json]:
    """
    ## The ranges that each new rank reads of the parameters, each of them once

    A load reads everything twice, and each moment like its parameter.
    """
    found: list[Json] = []
    for rank, told in enumerate(recorded["new"]):
        offsets = {entry["names"][0]: entry["offset"] for entry in told["flat"]["params"]}
        for read in told["reads"]:
            row = {**read, "rank": rank, "offset": offsets[read["param"]] + read["first"]}
            if read["key"] == "param" and row not in found:
                found.append(row)
    return found


def reshard(recorded: Json) -> str:
    """
    ## The figure of a checkpoint on another number of ranks
    """
    about = "A checkpoint of two ranks on three", " ".join(
        f"New rank {read['rank']} reads {read['param']}{range_of(read)} from the file of rank "
        f"{read['file']}." for read in reads_of(recorded)) + " The rest of its shard is padding."
    return figure(_reshard(recorded, Drawing(WIDE, 288, *about)),
                  _reshard(recorded, Drawing(PHONE, 288, *about)),
                  "A new rank asks for ranges of parameters by their names, and the manifest says "
                  "which files they are in. Each arrow is a range that was read; the moments of "
                  "the optimizer are read in the same ranges. "
                  + origin(recorded, f"{OLD_RANKS}, then {NEW_RANKS}"))


def range_of(read: Json) -> str:
    return f"[{read['first']}:{read['first'] + read['numel']}]"


def _reshard(recorded: Json, drawing: Drawing) -> Drawing:
    old = [rank["shard"] for rank in recorded["old"]]
    new = [rank["shard"] for rank in recorded["new"]]
    reads = reads_of(recorded)
    cell = (drawing.width - 8) / max(sum(map(len, old)), sum(map(len, new)))
    _names(drawing, recorded["new"][0]["flat"]["params"], cell, 24)
    _shards(drawing, old, cell, 64, [f"file of rank {rank} of {len(old)}" if drawing.width == WIDE
                                     else f"file of rank {rank}" for rank in range(len(old))], 56)
    for read in reads:
        _arrow(drawing, read, cell, 104, 218)
    names = []
    for rank in range(len(new)):
        count = len({read["file"] for read in reads if read["rank"] == rank})
        more = f" reads {count} file" + "s" * (count > 1) if drawing.width == WIDE else ""
        names.append(f"rank {rank} of {len(new)}{more}")
    _shards(drawing, new, cell, 220, names, 276)
    end = max(read["offset"] + read["numel"] for read in reads)
    middle = 4 + cell * (end + sum(map(len, new))) / 2
    drawing.text(middle, 212, "padding", "muted", anchor="middle")
    return drawing


def _names(drawing: Drawing, entries: list[Json], cell: float, y: float) -> None:
    """
    #### The parameters, above their elements
    """
    for entry in entries:
        x = 4 + entry["offset"] * cell
        end = x + torch.Size(entry["shape"]).numel() * cell
        drawing.text((x + end) / 2, y - 7, entry["names"][0], anchor="middle")
        drawing.tag(f'<path d="M{x + 4:.1f},{y + 6}v-6H{end - 4:.1f}v6" '
                    'style="fill:none;stroke:var(--fg);stroke-width:1.3"/>')


def _shards(drawing: Drawing, shards: list[list[float]], cell: float, y: float, names: list[str],
            name_y: float) -> None:
    """
    #### Shards side by side, with the values of their elements
    """
    begins = accumulate([0, *map(len, shards)])
    for shard, name, begin in zip(shards, names, begins, strict=False):
        x = 4 + begin * cell
        drawing.rect(x + 1.5, y, len(shard) * cell - 3, 38, "shard")
        drawing.text(x + len(shard) * cell / 2, name_y, name, "muted", anchor="middle")
        for i, value in enumerate(shard):
            drawing.text(x + (i + 0.5) * cell, y + 24, f"{value:g}", anchor="middle")


def _arrow(drawing: Drawing, read: Json, cell: float, top: float, bottom: float) -> None:
    """
    #### A range that was read: from its file down to the shard
    """
    x = 4 + read["offset"] * cell
    width = read["numel"] * cell
    drawing.tag(f'<rect x="{x + 2.5:.1f}" y="{top}" width="{width - 5:.1f}" '
                f'height="{bottom - top}" style="fill:var(--c-file);fill-opacity:.16"/>')
    # On a phone one cell has no room for more.
    lines = [read["param"], range_of(read)] if drawing.width == WIDE else [range_of(read)[1:-1]]
    for i, line in enumerate(lines):
        drawing.text(x + width / 2, top + 20 + 17 * i, line, anchor="middle")
    drawing.line(x + width / 2, top + 11 + 17 * len(lines), x + width / 2, bottom, "fg", arrow=True)


# -------------------------------------------------------------------------------------------- trace


def trace(recorded: Json) -> str:
    """
    ## The figure of a trace that changes
    """
    steps = recorded["old"][0]["trace"]

    def say(bar: Bar) -> str:
        return f"{'all-gather' if bar.kind == 'fetch' else 'computation'} of {bar.name}"
    about = "A trace that changes", " ".join(
        f"Step {i} goes {step['way']}: {note} " + moments(bars(step["rows"]), say)
        for i, step, note in zip(range(1, 5), steps, NOTES, strict=True))
    return figure(_trace(steps, Drawing(WIDE, 0, *about)), _trace(steps, Drawing(PHONE, 0, *about)),
                  "Forward passes of four steps. A pass along the trace waits for the first "
                  "all-gather only. A pass that differs waits for every layer after the "
                  "difference. The order of events on rank 0, without times. "
                  + origin(recorded, OLD_RANKS))


def _trace(steps: list[Json], drawing: Drawing) -> Drawing:
    y = 16.0
    longest = max(bar.end for step in steps for bar in bars(step["rows"]))
    if drawing.width == PHONE:
        y = paragraph(drawing, y, "Striped: all-gathers. Below them: computation.") + 8
    for i, step in enumerate(steps):
        y = paragraph(drawing, y, f"Step {i + 1} goes {step['way']}", "fg", bold=True)
        y = paragraph(drawing, y, NOTES[i])
        y = _pass(drawing, bars(step["rows"]), y - 12, longest) + 30
    drawing.height = y - 24
    return drawing


def unused(found: list[Bar]) -> list[str]:
    """
    ## The layers that a pass has gathered and not used
    """
    used = {bar.name for bar in found if bar.kind == "compute"}
    return [bar.name for bar in found if bar.kind == "fetch" and bar.name not in used]


def _pass(drawing: Drawing, found: list[Bar], y: float, longest: int) -> float:
    """
    #### A forward pass: all-gathers above computation; returns where it ends
    """
    left = 78 if drawing.width == WIDE else 2
    lanes = Lanes(drawing, left, y, 24, (drawing.width - left - 2) / longest)
    until: list[int] = []  # the end of the last bar of each lane of all-gathers
    wasted = unused(found)
    for bar in sorted((bar for bar in found if bar.kind == "fetch"), key=lambda bar: bar.begin):
        lane = next((i for i, end in enumerate(until) if end <= bar.begin), len(until))
        until[lane : lane + 1] = [bar.end]
        text = f"{bar.name}: not used" if bar.name in wasted else bar.name
        lanes.bar(lane, bar.begin, bar.end, COLORS[bar.kind], text)
    computed = [bar for bar in found if bar.kind == "compute"]
    for before, bar in zip([0, *(bar.end for bar in computed)], computed, strict=False):
        lanes.bar(len(until), bar.begin, bar.end, COLORS[bar.kind], bar.name)
        if before < bar.begin:
            x, middle, width, height = lanes.box(len(until), before, 1, bar.begin - before)
            drawing.text(x + width / 2, middle + height / 2 + 4.5, "waits", "muted",
                         anchor="middle")
    if wasted:
        # The first layer that had to be gathered on demand came in place of the expected one.
        differs = next(a.end for a, b in pairwise(computed) if a.end < b.begin)
        lanes.rule(differs, len(until) + 1)
    if drawing.width == WIDE:
        lanes.name((len(until) - 1) / 2, "all-gather")
        lanes.name(len(until), "compute")
    return lanes.bottom(len(until) + 1, longest)

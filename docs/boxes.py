r"""
# Boxes: memory, one element at a time

`life` draws the recorded example from the initialisation of its two parameters to their update.
`strip` draws a few of these stages, for the head of a chapter.

A box is one element in memory, four bytes. Each rank has a column with two places: on the left what
it keeps between two steps, on the right what it has only while the layer computes. So the bytes of
a stage can be counted:

$$\text{bytes held} = 4 \cdot \text{number of boxes with a solid border}$$

A dashed border stands for memory that was freed, or for a gradient that is freed as soon as it is
copied. A hollow box has no value of a parameter: it is padding, or unused. A thick frame shows that
a module computes with the boxes inside, or that they are in a file. The numbers, the bytes and the
sums all come from the record.

**Run this**: `make docs`.

**Not covered, and what that costs**: the columns have room for two ranks and four elements. Another
example needs another layout.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from docs.svg import Drawing, figure, origin, paint

Json = dict[str, Any]

# The meaning of each kind of box, and its name in texts. The meaning gives the colour.
KINDS = {
    "shard": ("shard", "shard"),
    "weight": ("whole", "weight"), "bias": ("whole", "bias"), "full": ("whole", "parameters"),
    "grad": ("grad", "gradient"),
    "receive": ("reduce", "receive buffer"),
    "reduced": ("reduced", "mean gradient of the shard"),
    "state": ("state", "momentum"),
}
# The meanings in the legend, in the order in which they appear.
LEGEND = {"whole": "parameters", "shard": "shard", "flight": "all-gather", "compute": "computes",
          "grad": "gradient", "reduce": "reduce-scatter", "reduced": "mean gradient",
          "state": "momentum", "file": "file"}


@dataclass(frozen=True)
class Line:
    """
    ## A line of boxes, the same on all ranks

    * `kept` is the box on the left, `held` are those on the right, by their names in the record
    * `at` is the stage in the record, if it is not the row's
    * `passing` boxes are freed at once, so they are dashed and not counted
    * `computes` says that a module computes with them, `freed` that the place on the right was
      freed just now
    * `names` writes the names of the boxes above them, and `note` is a word beside them
    """

    kept: str = ""
    held: tuple[str, ...] = ()
    at: tuple[str, ...] = ()
    passing: bool = False
    computes: bool = False
    freed: bool = False
    names: bool = False
    note: str = ""


@dataclass(frozen=True)
class Stage:
    """
    ## A row: a stage of the record
    """

    title: str
    method: str
    lines: tuple[Line, ...]
    arrows: str = ""
    phase: str = ""  # that begins here
    source: str = "ranks"  # the part of the record; in the others, what a rank keeps is in a file


WHOLE = Line("shard", ("full",))
REST = Line("shard")
FREED = Line("shard", freed=True)
PARAMS = Line("", ("weight", "bias"))
STAGES = {
    "born": Stage("Two parameters", "nn.Linear(2, 1)", (replace(PARAMS, names=True),),
                  phase="Shard, once"),
    "merge": Stage("Merge and pad", "_merge_and_pad_params", (PARAMS, Line("", ("full",)))),
    "scatter": Stage("Scatter", "Communicator.scatter", (PARAMS, WHOLE), "scatter"),
    "shard": Stage("Free all but the shard", "InFlight.free", (FREED,)),
    "fetch": Stage("All-gather", "fetch_params", (WHOLE,), "gather", phase="Forward"),
    "whole": Stage("Compute", "forward", (replace(WHOLE, computes=True),)),
    "free": Stage("Free", "_cleanup_params", (FREED,)),
    "rewhole": Stage("All-gather again", "_pre_backward_hook", (WHOLE,), phase="Backward"),
    "grads": Stage("Gradients, halved", "_post_backward_hook",
                   (replace(WHOLE, computes=True),
                    Line("", ("weight", "bias"), ("weight.grad", "bias.grad"), passing=True,
                         note="arrive"),
                    Line("", ("grad",), note="÷ 2"))),
    "reduce": Stage("Reduce-scatter", "_backup_grads",
                    (FREED, Line("", ("grad",)), Line("", ("receive",))), "reduce"),
    "sum": Stage("Sum over ranks", "Communicator.total",
                 (Line("shard", ("grad",)), Line("reduced", ("receive",)))),
    "reduced": Stage("Mean gradient", "add_reduced", (REST, Line("reduced", note="sums"))),
    "step": Stage("Update", "Zero3Optimizer.step",
                  (Line("shard", note="shard"), Line("reduced", note="mean gradient"),
                   Line("state", note="momentum")), phase="Step"),
    "rest": Stage("Until the next step", "zero_grad",
                  (Line("shard", note="shard"), Line("state", note="momentum"))),
    "file rest": Stage("Between two steps", "Offload", (REST,), source="files"),
    "file whole": Stage("Read, and all-gather", "fetch_params", (WHOLE,), source="files"),
    "file step": Stage("Read, update, write", "Zero3Optimizer.step",
                       (Line("shard", note="shard"), Line("state", note="momentum")),
                       source="files"),
    "saved": Stage("A file of each rank", "save",
                   (Line("shard", note="names"), Line("state", note="momentum")),
                   source="checkpoint"),
}
NUMEL = 3  # elements of the parameters; the next one is padding
# Figures: a title and stages.
STRIPS = {
    "life": ("Three weights on two ranks, from their initialisation to their update", (
        "born", "merge", "scatter", "shard", "fetch", "whole", "free", "rewhole", "grads",
        "reduce", "sum", "reduced", "step", "rest")),
    "flat": ("Two parameters become one flat parameter, and a shard of it",
             ("born", "merge", "scatter", "shard")),
    "comm": ("An all-gather and a reduce-scatter", ("fetch", "whole", "reduce", "sum", "reduced")),
    "optimizer": ("Each rank updates its shard", ("reduced", "step", "rest")),
    "offload": ("The shard and the optimizer state rest in a file",
                ("file rest", "file whole", "file step")),
    "checkpoint": ("Each rank saves its shard; the manifest says which parameters it belongs to",
                   ("rest", "saved")),
}


def life(recorded: Json) -> str:
    """
    ## The whole life, as a figure
    """
    return strip(recorded, "life")


def strip(recorded: Json, name: str) -> str:
    """
    ## A part of the life, as a figure

    * `name` is a key of `STRIPS`
    """
    title, stages = STRIPS[name]
    wide = Picture(recorded, Layout(640), title, stages)
    phone = Picture(recorded, Layout(360), title, stages)
    return figure(wide.draw(), phone.draw(), f"{title}. A box is an element of 4 bytes; hollow "
                  f"boxes are padding, or unused. {origin(recorded, recorded['world_size'])}")


@dataclass(frozen=True)
class Layout:
    """
    ## Where things stand in a drawing of a given width
    """

    width: int
    height: int = 24  # of a box
    between: int = 4  # two lines

    @property
    def phone(self) -> bool:
        return self.width < 500

    @property
    def cell(self) -> int:
        return 25 if self.phone else 26

    @property
    def gap(self) -> int:
        """
        ### Between what a rank keeps and what it holds for a while
        """
        return 10 if self.phone else 18

    @property
    def gutter(self) -> int:
        """
        ### Between the ranks
        """
        return 24 if self.phone else 34

    def kept(self, rank: int) -> float:
        """
        ### The left edge of what a rank keeps
        """
        left = 10 if self.phone else 180
        return left + rank * (6 * self.cell + self.gap + self.gutter)

    def held(self, rank: int) -> float:
        """
        ### The left edge of what a rank holds while the layer computes
        """
        return self.kept(rank) + 2 * self.cell + self.gap

    def end(self, rank: int) -> float:
        return self.held(rank) + 4 * self.cell


@dataclass
class Picture:
    """
    ## A drawing of stages
    """

    recorded: Json
    layout: Layout
    title: str
    stages: tuple[str, ...]
    y: float = 0
    used: set[str] = field(default_factory=set)  # meanings

    def draw(self) -> Drawing:
        """
        ### Draw all rows, one below the other
        """
        self.drawing = Drawing(self.layout.width, 0, self.title, self._about())
        self._heads()
        for name in self.stages:
            self._row(name)
        self._legend()
        self.drawing.height = self.y
        return self.drawing

    def _about(self) -> str:
        """
        #### Everything that is shown, in words
        """
        told = []
        for name in self.stages:
            stage = STAGES[name]
            ranks = [f"rank {r} has {_words(each)}" for r, each in enumerate(self._ranks(name))]
            held = ", ".join(self._bytes(name)) or "no bytes"
            told.append(f"{stage.title} ({stage.method}): {'; '.join(ranks)}; each holds {held}.")
        return " ".join(told)

    def _bytes(self, name: str) -> list[str]:
        """
        #### The bytes in memory and in files, the same on all ranks
        """
        ranks = self._ranks(name)
        (nbytes,) = {rank["bytes"] for rank in ranks}
        (file_bytes,) = {rank.get("file_bytes", 0) for rank in ranks}
        return [f"{nbytes} bytes"] * bool(nbytes) + [f"{file_bytes} in a file"] * bool(file_bytes)

    def _ranks(self, name: str) -> list[Json]:
        """
        #### What each rank has at a stage
        """
        return [stages[name] for stages in self.recorded[STAGES[name].source]]

    # ---------------------------------------------------------------------------------------- rows

    def _heads(self) -> None:
        at = self.layout
        self.y = 18
        for rank in range(2):
            middle = (at.kept(rank) + at.end(rank)) / 2
            self.drawing.text(middle, self.y, f"rank {rank}", anchor="middle", bold=True)
        if not at.phone:
            self.drawing.text(at.width - 4, self.y, "each holds", "muted", anchor="end")
        self.y += 18
        for rank in range(2):
            self.drawing.text(at.kept(rank) + at.cell, self.y, "keeps", "muted", anchor="middle")
            if any(line.held for name in self.stages for line in STAGES[name].lines):
                self.drawing.text(at.held(rank) + 2 * at.cell, self.y, "temporary", "muted",
                                  anchor="middle")
        self.y += 8

    def _row(self, name: str) -> None:
        """
        #### A row: its phase, its name, its boxes, its arrows
        """
        at = self.layout
        stage = STAGES[name]
        if stage.phase and len(self.stages) > 5:
            self._phase(stage.phase)
        self.y += 8
        first = self.y
        self._names(name, stage)
        # Room for an arrow, for the names of parameters, or for the edge of a file.
        self.y += 14 * (stage.arrows == "gather" or stage.lines[0].names)
        self.y += 5 * (stage.source != "ranks")
        top = self.y
        if stage.source != "ranks":
            self._file(top, len(stage.lines))
        for i, line in enumerate(stage.lines):
            for rank in range(2):
                self._line(name, line, rank, self.y)
            self.y += at.height + at.between * (i + 1 < len(stage.lines)) + 3 * line.computes
        if stage.arrows:
            arrows = {"scatter": self._scatter_arrows, "gather": self._gather_arrows,
                      "reduce": self._reduce_arrows}
            arrows[stage.arrows](top)
        self.y += 12 * (stage.arrows == "gather") + 5 * (stage.source != "ranks")
        if not at.phone:
            self.y = max(self.y, first + 34)
        self.y += 4

    def _file(self, y: float, lines: int) -> None:
        """
        #### A file of each rank, behind its boxes
        """
        at = self.layout
        self.used.add("file")
        height = lines * (at.height + at.between) - at.between
        for rank in range(2):
            self._ring(at.kept(rank) - 4, y - 5, 2 * at.cell + 8, height + 10, "file")

    def _phase(self, phase: str) -> None:
        self.y += 10
        self.drawing.line(0, self.y, self.layout.width, self.y, "line", width=1)
        self.drawing.text(0, self.y + 17, phase, "muted")
        self.y += 20

    def _names(self, name: str, stage: Stage) -> None:
        """
        #### The title, the method and the bytes of a row
        """
        at = self.layout
        self.drawing.text(0, self.y + 13, stage.title, bold=True)
        self.drawing.text(0, self.y + 29, stage.method, "muted", size=12, mono=True)
        for i, text in enumerate(self._bytes(name)):
            self.drawing.text(at.width - 4, self.y + 13 + 16 * i, text, anchor="end")
        if not at.phone and stage.source == "ranks":
            wide = 1.4 * self._ranks(name)[0]["bytes"]
            self.drawing.rect(at.width - 4 - wide, self.y + 20, wide, 5, "muted", border=False)
        if at.phone:
            self.y += 39

    def _line(self, name: str, line: Line, rank: int, y: float) -> None:
        """
        #### A line of boxes of one rank
        """
        at = self.layout
        stages = self.recorded[STAGES[name].source][rank]
        if line.kept:
            values = stages[name]["boxes"][line.kept]["values"]
            self._boxes(at.kept(rank), y, line.kept, values, first=2 * rank)
        x = at.held(rank)
        first = 0
        for i, kind in enumerate(line.held):
            values = stages[line.at[i] if line.at else name]["boxes"][kind]["values"]
            if line.passing:
                self._passing(x, y, values)
            elif kind == "receive":
                self._receive(x, y, rank, values)
            else:
                self._boxes(x, y, kind, values, first)
            if line.names:
                self.drawing.text(x + len(values) / 2 * at.cell, y - 6, kind, "muted",
                                  anchor="middle")
            first += len(values)
            # Two tensors stand apart.
            x += len(values) * at.cell + 8
        if line.computes:
            self._frame(at.held(rank), y)
        if line.freed:
            self._freed(at.held(rank), y)
        self._note(line, self._ranks(name)[rank], rank, y)

    def _note(self, line: Line, stage: Json, rank: int, y: float) -> None:
        """
        #### The words beside a line
        """
        x = self.layout.held(rank)
        y += 17
        if line.note == "sums":
            if "reduce" in self.stages:
                self.drawing.text(x, y, self._sums(rank), "muted")
        elif line.note == "names":
            self.drawing.text(x, y, f"= {', '.join(stage['names'])}", mono=True, size=12)
        elif line.note and line.kept:
            self.drawing.text(x, y, line.note, "muted")
        elif line.note:
            self.drawing.text(x - 6, y, line.note, "muted", anchor="end")

    def _sums(self, rank: int) -> str:
        """
        #### The sums that a mean gradient is made of
        """
        grads = [stages["grads"]["boxes"]["grad"]["values"] for stages in self.recorded["ranks"]]
        first, second = (" + ".join(number(grad[2 * rank + i]) for grad in grads)
                         for i in range(2))
        return f"= {first}, {second}"

    # --------------------------------------------------------------------------------------- boxes

    def _boxes(self, x: float, y: float, kind: str, values: list[float | None],
               first: int) -> None:
        """
        #### The boxes of a tensor; an element that has not arrived is striped and empty

        * `first` is the place of the first one in the flat parameter. Padding is written paler
        """
        for i, value in enumerate(values):
            color = "flight" if value is None else KINDS[kind][0]
            self.used.add(color)
            self._box(x, y, i, color, hollow=first + i == NUMEL and value is not None)
            if value is not None:
                self._number(x, y, i, value)

    def _box(self, x: float, y: float, i: int, color: str, hollow: bool = False) -> None:
        """
        #### A box: shards are darker, so that the eye can follow them, and padding is hollow
        """
        cell = self.layout.cell
        height = self.layout.height
        if hollow:
            self._outline(x + i * cell + 1, y, cell - 2, height, color, dashed=False)
            return
        self._swatch(x + i * cell + 1, y, cell - 2, height, color)

    def _swatch(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.drawing.rect(x, y, width, height, color)
        if color == "shard":
            self.drawing.rect(x, y, width, height, color, border=False)

    def _number(self, x: float, y: float, i: int, value: float | None) -> None:
        self.drawing.text(x + (i + 0.5) * self.layout.cell, y + self.layout.height / 2 + 5,
                          number(value), anchor="middle")

    def _receive(self, x: float, y: float, rank: int, values: list[float | None]) -> None:
        """
        #### The buffer for the other rank's gradients; its part for this rank's own stays unused
        """
        for i, value in enumerate(values):
            if i // 2 == rank:
                self._box(x, y, i, "muted", hollow=True)
            elif value is None:
                self.used.add("reduce")
                self._box(x, y, i, "reduce")
            else:
                self._box(x, y, i, "grad")
                self._number(x, y, i, value)

    def _passing(self, x: float, y: float, values: list[float | None]) -> None:
        """
        #### Boxes that are freed at once
        """
        at = self.layout
        for i, value in enumerate(values):
            self._outline(x + i * at.cell + 1, y, at.cell - 2, at.height, "grad")
            self._number(x, y, i, value)

    def _freed(self, x: float, y: float) -> None:
        """
        #### The place of memory that was freed just now
        """
        at = self.layout
        self._outline(x + 1, y, 4 * at.cell - 2, at.height, "muted")
        self.drawing.text(x + 2 * at.cell, y + at.height / 2 + 5, "freed", "muted",
                          anchor="middle")

    def _frame(self, x: float, y: float) -> None:
        """
        #### A frame around parameters with which a module computes
        """
        at = self.layout
        self.used.add("compute")
        self._ring(x - 2, y - 3, 4 * at.cell + 4, at.height + 6, "compute")

    def _ring(self, x: float, y: float, width: float, height: float, color: str) -> None:
        self.drawing.tag(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                         f'height="{height:.1f}" rx="4" style="fill:none;'
                         f'stroke:{paint(color)};stroke-width:2.2"/>')

    def _outline(self, x: float, y: float, width: float, height: float, color: str,
                 dashed: bool = True) -> None:
        dash = "stroke-dasharray:3 3;" * dashed
        self.drawing.tag(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                         f'height="{height:.1f}" rx="2" style="fill:none;{dash}'
                         f'stroke:{paint(color)};stroke-width:1.2"/>')

    # -------------------------------------------------------------------------------------- arrows

    def _scatter_arrows(self, top: float) -> None:
        """
        #### Rank 0 sends each rank its part
        """
        at = self.layout
        y = top + at.height * 1.5 + at.between
        self.drawing.line(at.held(0), y, at.kept(0) + 2 * at.cell + 1, y, "fg", arrow=True)
        self.drawing.line(at.end(0), y, at.kept(1) - 1, y, "fg", arrow=True)

    def _gather_arrows(self, top: float) -> None:
        """
        #### Each rank sends its shard to the other
        """
        at = self.layout
        below = top + at.height
        self._bow(at.held(0) + at.cell, at.held(1) + at.cell, top - 1, -12)
        self._bow(at.held(1) + 3 * at.cell, at.held(0) + 3 * at.cell, below + 1, 12)

    def _bow(self, x1: float, x2: float, y: float, height: float) -> None:
        """
        #### An arrow that leaves a box and enters another one from the same side
        """
        side = 6 if x2 > x1 else -6
        up = 6 if height > 0 else -6
        corner = y + height - up
        path = (f"M{x1:.1f},{y:.1f}V{corner:.1f}q0,{up} {side},{up}H{x2 - side:.1f}"
                f"q{side},0 {side},{-up}")
        self.drawing.tag(f'<path d="{path}" style="fill:none;stroke:{paint("flight")};'
                         'stroke-width:1.6"/>')
        self.drawing.line(x2, corner, x2, y, "flight", arrow=True, width=1.6)

    def _reduce_arrows(self, top: float) -> None:
        """
        #### Each rank sends the other's part of its gradient
        """
        at = self.layout
        y1 = top + at.height * 1.5 + at.between
        y2 = y1 + at.height + at.between
        self.drawing.line(at.end(0), y1, at.held(1), y2, "reduce", arrow=True, width=1.6)
        self.drawing.line(at.held(1), y1, at.end(0), y2, "reduce", arrow=True, width=1.6)

    def _legend(self) -> None:
        """
        #### The colours that occur
        """
        at = self.layout
        columns = 2 if at.phone else 5
        shown = [meaning for meaning in LEGEND if meaning in self.used]
        self.y += 14
        for i, meaning in enumerate(shown):
            x = i % columns * at.width / columns
            y = self.y + i // columns * 22
            if meaning in ("compute", "file"):
                self._ring(x + 1, y, 13, 13, meaning)
            else:
                self._swatch(x + 1, y, 13, 13, meaning)
            self.drawing.text(x + 20, y + 11, LEGEND[meaning], "muted")
        self.y += -(-len(shown) // columns) * 22


def _words(stage: Json) -> str:
    return ", ".join(f"{KINDS[kind][1]} {' '.join(map(number, box['values']))}"
                     for kind, box in stage["boxes"].items())


def number(value: float | None) -> str:
    """
    ## A number as short as in the text: .7
    """
    if value is None:
        return "empty"
    text = f"{value:.4g}"
    return text.removeprefix("0") if "." in text else text

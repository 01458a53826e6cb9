r"""
# Graphs before and after each pass

`record` traces a small chain and runs the passes of the compiler over its graphs. `figure` draws
the graphs before and after one of them.

The chain is the example of `passes.py`: four layers of 10 elements each, a to d, and a limit of 20.
Each operation of a graph has a column, and each layer has a row. A bar begins in the column of the
operation that starts something, and ends where another operation ends it:

| bar | from | to |
|---|---|---|
| all-gather | `gather` | `wait` |
| full parameters | `wait` | `release` |
| full gradient | `collect` | `reduce` |
| reduce-scatter | `reduce` | `finish` |

The curve below the rows has the full elements during each operation, as `full_numel` counts them,
and the dashed line is the limit:

$$\max_t \text{full}(t) \;\le\; \text{limit}$$

**Run this**: `make docs`; the figures are on the page of the passes.

**Not covered, and what that costs**: times. All columns have the same width, although an all-gather
takes longer than the product beside it, or less time.
"""

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import fx, nn

from docs import svg
from docs.lanes import legend, legend_rows
from docs.svg import Drawing
from zero3 import commit_name
from zero3.compiler.graph import (
    OPERATIONS,
    collect,
    finish,
    full_numel,
    gather,
    is_view,
    layers_of,
    parameter,
    readers,
    reduce,
    release,
    wait,
)
from zero3.compiler.model import compile
from zero3.compiler.passes import improve

LIMIT = 20  # full elements, as in the example of `passes.py`
BUCKET = 20  # elements that may share a reduce-scatter
# An operation of these kinds has a column. `collect` has none, because it stands right behind the
# product whose result it takes.
KINDS = {gather: "gather", wait: "wait", release: "release", collect: "collect", reduce: "reduce",
         finish: "finish"}


class Operation(NamedTuple):
    """
    ## An operation of a graph
    """

    kind: str  # "compute", or one of `KINDS`
    layers: list[str]
    full_numel: int  # full elements during it


class Graph(NamedTuple):
    """
    ## A graph as a list of operations
    """

    operations: list[Operation]
    kept: list[str]  # layers that are whole before the first operation

    @property
    def columns(self) -> int:
        return sum(each.kind != "collect" for each in self.operations)


# -------------------------------------------------------------------------------------- the record


class Recorded(NamedTuple):
    """
    ## The graphs of a step after each pass

    The first step is "traced". Each has a forward and a backward graph.
    """

    steps: dict[str, tuple[Graph, Graph]]
    numel: dict[str, int]  # of each layer
    origin: str


def record() -> Recorded:
    """
    ## Trace the chain, and run the passes
    """
    sizes = {"a": (2, 5), "b": (5, 2), "c": (2, 5), "d": (5, 2)}
    layers = OrderedDict((name, nn.Linear(*size, bias=False)) for name, size in sizes.items())
    model = compile(nn.Sequential(layers), backend="aot_eager")
    model(torch.ones(1, 2)).sum().backward()
    (graphs,) = model.graphs
    _, traced, traced_backward = graphs.steps[0]
    steps, kept = improve(traced, traced_backward, model.numel, LIMIT, BUCKET)
    found: dict[str, tuple[Graph, Graph]] = {}
    for name, forward, backward in steps:
        assert backward is not None
        whole = kept if len(found) > 1 else []
        found[name] = (Graph(operations(forward, model.numel, []), []),
                       Graph(operations(backward, model.numel, whole), whole))
    return Recorded(found, {name: model.numel[name] for name in sizes},
                    f"torch {torch.__version__}, commit {commit_name()}")


def operations(graph: fx.Graph, numel: dict[str, int], kept: list[str]) -> list[Operation]:
    """
    ## The operations of a graph that are drawn, in their order

    * `numel` and `kept` are as for `full_numel`
    """
    found = []
    for node, full in zip(graph.nodes, full_numel(graph, numel, kept), strict=True):
        if node.target in KINDS:
            found.append(Operation(KINDS[node.target], layers_of(node), full))
        elif computes(node):
            found.append(Operation("compute", [layer_of(node)], full))
    return found


def computes(node: fx.Node) -> bool:
    """
    ## Whether a node is a product, and neither communication nor a view
    """
    return (node.op == "call_function" and node.target not in OPERATIONS and not is_view(node)
            and not _is_weight(node))


def _is_weight(node: fx.Node) -> bool:
    """
    #### Whether a node is a parameter that arrived
    """
    return any(each.target is wait for each in node.all_input_nodes)


def layer_of(node: fx.Node) -> str:
    """
    ## The layer that a product belongs to: it reads its weight, or makes the gradient of that
    """
    for each in node.all_input_nodes:
        source = each
        while source.target not in (wait, parameter) and source.all_input_nodes and (
                is_view(source) or _is_weight(source)):
            source = source.all_input_nodes[0]
        if source.target in (wait, parameter):
            return layers_of(source)[0]
    return next(layers_of(each)[0] for each in readers(node) if each.target is collect)


# ---------------------------------------------------------------------------------------- the bars


class Bar(NamedTuple):
    """
    ## A bar in the row of a layer, from the beginning of a column to the end of another
    """

    what: str  # a colour of `svg.py`
    layer: str
    begin: int
    end: int


def bars(graph: Graph) -> list[Bar]:
    """
    ## The bars of a graph

    A layer that is kept is whole from the first column on, or up to the last one.
    """
    begun: dict[tuple[str, str], int] = {("whole", layer): 0 for layer in graph.kept}
    found: list[Bar] = []

    def end(what: str, layer: str, at: int) -> None:
        begin = begun.pop((what, layer), at)
        if begin < at:
            found.append(Bar(what, layer, begin, at))

    at = 0
    for kind, layers, _ in graph.operations:
        for layer in layers:
            if kind == "gather":
                begun["flight", layer] = at
            elif kind == "wait":
                end("flight", layer, at + 1)
                # A kept layer is whole already.
                begun.setdefault(("whole", layer), at + 1)
            elif kind == "release":
                end("whole", layer, at + 1)
            elif kind == "collect":
                begun["grad", layer] = at
            elif kind == "reduce":
                end("grad", layer, at)
                begun["reduce", layer] = at
            elif kind == "finish":
                end("reduce", layer, at + 1)
            else:
                found.append(Bar("compute", layer, at, at + 1))
        at += kind != "collect"
    for what, layer in [*begun]:
        end(what, layer, at)
    return found


# ------------------------------------------------------------------------------------- the drawing

ROW = 20  # from one row to the next
THICK = 15  # of a bar
TITLE = 20  # above a graph and its name, for the name of the pass
HEAD = 22  # above the first row, for the name of the graph
CURVE = 40  # height of the curve of full elements
FOOT = 18  # below the curve
GAP = 20  # between forward and backward, side by side
LEFT = 62  # for the names of the rows
LEGEND = (("compute", "computation"), ("flight", "all-gather"), ("whole", "full parameters"),
          ("grad", "full gradient"), ("reduce", "reduce-scatter"))


class Pictures:
    """
    ## The graphs before and after a pass, in a drawing of a given width
    """

    def __init__(self, recorded: Recorded, name: str, width: int):
        """
        ### Choose a pass

        * `name` is one of the steps of `recorded`, but not the first
        * `width` is `svg.WIDE` or `svg.PHONE`; a phone has backward below forward
        """
        self.recorded = recorded
        self.layers = [*recorded.numel]
        names = [*recorded.steps]
        self.shown = {f"before {name}": names[names.index(name) - 1], f"after {name}": name}
        self.is_wide = width == svg.WIDE
        self.left = LEFT if self.is_wide else 34
        steps = [recorded.steps[each] for each in self.shown.values()]
        columns = [forward.columns + backward.columns if self.is_wide
                   else max(forward.columns, backward.columns) for forward, backward in steps]
        self.unit = (width - self.left - 4 - GAP * self.is_wide) / max(columns)
        self.graph_height = HEAD + ROW * len(self.layers) + CURVE + FOOT
        self.step_height = TITLE + self.graph_height * (1 if self.is_wide else 2)
        self.legend = legend_rows(width, LEGEND)
        foot = 2 * self.step_height
        self.drawing = Drawing(width, foot + 22 * len(self.legend),
                               f"Graphs before and after {name}", self.about())
        for i, row in enumerate(self.legend):
            legend(self.drawing, row, foot + 22 * i, solid=("compute",))

    def draw(self) -> Drawing:
        """
        ### Draw everything
        """
        for i, (title, name) in enumerate(self.shown.items()):
            forward, backward = self.recorded.steps[name]
            y = i * self.step_height
            self.drawing.text(4, y + 14, title, bold=True)
            y += TITLE
            if self.is_wide:
                # A layer that is kept stays whole until backward begins.
                self.graph(forward, "forward", self.left, y, backward.kept)
                right = self.left + forward.columns * self.unit
                self.graph(backward, "backward", right + GAP, y)
            else:
                self.graph(forward, "forward", self.left, y)
                self.graph(backward, "backward", self.left, y + self.graph_height)
        return self.drawing

    def graph(self, graph: Graph, word: str, left: float, y: float, longer: Iterable[str] = ()
              ) -> None:
        """
        ### One graph: its rows, and below them the curve

        * `longer` are layers whose bars reach to the next graph
        """
        self.drawing.text(left, y + 12, word, "muted")
        right = left + graph.columns * self.unit
        y += HEAD
        is_first = left == self.left
        for i, layer in enumerate(self.layers):
            if is_first:
                text = f"layer {layer}" if self.is_wide else layer
                self.drawing.text(4, y + ROW * i + 12, text)
            middle = y + ROW * i + THICK / 2
            self.drawing.line(left, middle, right, middle, "line")
        # Computation is drawn upon the parameters that it reads.
        for bar in sorted(bars(graph), key=lambda each: each.what == "compute"):
            width = (bar.end - bar.begin) * self.unit
            if bar.what == "whole" and bar.layer in longer:
                width += GAP
            self.bar(bar, left + bar.begin * self.unit, y, width)
        self.shared(graph, left, y)
        self.curve(graph, left, y + ROW * len(self.layers) + 4, is_first)

    def bar(self, bar: Bar, x: float, y: float, width: float) -> None:
        """
        ### A bar in the row of its layer; computation is less high
        """
        inset = 3.5 if bar.what == "compute" else 0
        top = y + ROW * self.layers.index(bar.layer) + inset
        self.drawing.rect(x + 0.5 + inset / 2, top, width - 1 - inset, THICK - 2 * inset, bar.what,
                          pale=bar.what != "compute")

    def shared(self, graph: Graph, left: float, y: float) -> None:
        """
        ### A line between the layers that share a collective
        """
        at = 0
        for kind, layers, _ in graph.operations:
            if len(layers) > 1 and kind in ("gather", "reduce"):
                rows = sorted(self.layers.index(layer) for layer in layers)
                x = left + at * self.unit + 0.5
                self.drawing.line(x, y + ROW * rows[0], x, y + ROW * rows[-1] + THICK, "fg",
                                  width=2)
            at += kind != "collect"

    def curve(self, graph: Graph, left: float, y: float, is_first: bool) -> None:
        """
        ### The full elements during each operation, and the limit
        """
        levels = [each.full_numel for each in graph.operations if each.kind != "collect"]
        if not any(levels):
            if is_first:
                self.drawing.text(left, y + 24, "no gathers yet", "muted", size=11)
            return
        right = left + len(levels) * self.unit
        base = y + CURVE
        scale = (CURVE - 8) / LIMIT
        points = [f"{left:.1f},{base:.1f}"]
        for i, level in enumerate(levels):
            top = base - level * scale
            points += [f"{left + at * self.unit:.1f},{top:.1f}" for at in (i, i + 1)]
        points.append(f"{right:.1f},{base:.1f}")
        color = svg.paint("whole")
        self.drawing.tag(f'<polygon points="{" ".join(points)}" style="fill:{color};'
                         f'fill-opacity:.28;stroke:{color};stroke-width:1.3"/>')
        limit = base - LIMIT * scale
        self.drawing.line(left, limit, right, limit, "fg", dashed=True)
        if is_first:
            for number, height in ((str(LIMIT), limit), ("0", base)):
                self.drawing.text(left - 6, height + 4, number, "muted", anchor="end", size=11)
        if is_first and self.is_wide:
            self.drawing.text(4, limit + 4, "limit", "muted", size=11)

    def about(self) -> str:
        """
        ### Both graphs in words
        """
        said = []
        for name in self.shown.values():
            for word, graph in zip(("forward", "backward"), self.recorded.steps[name],
                                   strict=True):
                said.append(f"{name}, {word}: {in_words(graph)}.")
        return " ".join(said)


def in_words(graph: Graph) -> str:
    """
    ## The operations of a graph in words
    """
    return ", ".join(f"{kind} {' '.join(layers)}" for kind, layers, _ in graph.operations)


CAPTIONS = {
    "insert": "Each layer is gathered right before its first use, and freed after its last one. "
              "Each reduce-scatter begins when the gradient of its layer is there. Only one layer "
              "is full at a time, and no communication overlaps computation.",
    "keep": "The layers with which backward begins stay full, as many as the limit admits. So "
            "backward gathers fewer layers.",
    "bucket": "Two neighbours share a reduce-scatter, where the vertical lines are. The first "
              "gradient waits for the second one.",
    "prefetch": "Each all-gather moves up into the room that is left, and overlaps the computation "
                "of the layer before.",
    "sink": "Each wait for a reduce-scatter moves down, to where the next one begins or to the "
            "end. So computation goes on during the reduce-scatter."}


def figure(recorded: Recorded, name: str) -> str:
    """
    ## The figure of a pass
    """
    return svg.figure(Pictures(recorded, name, svg.WIDE).draw(),
                      Pictures(recorded, name, svg.PHONE).draw(),
                      f"{CAPTIONS[name]} A column is an operation, and the curve has the full "
                      f"elements during it. Drawn from the graphs of a chain of four layers with "
                      f"10 elements each, {recorded.origin}.")

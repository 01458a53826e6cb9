r"""
# The figure of the streams: who waits for whom

`on_streams` runs a training step on the accelerator of the tests, `tests/streams.py`, and
`draw_streams` draws what each stream does, as early as its waits allow.

The accelerator executes on the CPU, and records for each operation which others have certainly
ended when it begins. For example, layer 1 waits for its own all-gather, and not for that of layer
2. So the two may overlap:

| | waits for | and not for |
|---|---|---|
| layer 1 computes | gather 1 | copy 2, gather 2 |

Two bars are drawn side by side if neither is before the other:

$$\text{free}(a, b) \iff \lnot\, \text{before}(a, b) \land \lnot\, \text{before}(b, a)$$

**Run this**: `make docs`; the figure is in the chapter on the communicator.

**Not covered, and what that costs**: announcements of collectives, and their checks, are left out.
They run on the same streams, right before what they announce.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from docs import svg
from docs.svg import Drawing
from tests.streams import Accelerator, Operation, before
from zero3.estimate.ledger import Ledger
from zero3.layer import Zero3Layer, Zero3Sequential
from zero3.offload.tiers import Offload

Json = dict[str, Any]
# What an operation is called, by the event that follows it, its stream and itself. An empty name
# stands for all operations; of announcements and checks none is drawn.
KINDS = {("fetch", "fetch", "copy_"): "copy", ("fetch", "nccl", "all-gather"): "gather",
         ("computed", "compute", ""): "layer", ("gradients", "compute", ""): "layer",
         ("free", "compute", ""): "layer", ("reduce", "nccl", "reduce-scatter"): "reduce",
         ("reduced", "backup", "clone"): "sum", ("reduced", "backup", "copy_"): "to CPU",
         ("step", "host", "add_"): "step"}
PAINT = {"copy": "shard", "gather": "flight", "layer": "compute", "reduce": "reduce",
         "sum": "reduced", "to CPU": "reduced", "step": "state"}
COLUMNS = {"compute": "compute", "fetch": "fetch", "nccl": "NCCL", "backup": "backup",
           "host": "host"}
STREAM_LAYERS = 3  # of the chain; the middle one has both neighbours
MIDDLE = 1  # the layer whose waits are drawn
STEP = 34  # height of an operation and the gap below it


class Scale(nn.Module):
    """
    ## Three weights that scale their inputs
    """

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### Scale the inputs, `(batch, 3)`
        """
        return x * self.weight


def scales(count: int, offload: Offload | None = None) -> list[Zero3Layer]:
    """
    ## Layers of three weights each
    """
    return [Zero3Layer(Scale(), offload=offload) for _ in range(count)]


class Marked(Ledger):
    """
    ## A ledger that marks the operations of a device by the event that follows them
    """

    def __init__(self, model: nn.Module, log: list[Operation]):
        super().__init__(model)
        self.log = log
        self.marked: list[Json] = []

    def record(self, sender: Any, event: str, *args: Any, **kwargs: Any) -> None:
        """
        ### Record an event, and mark the operations since the last one
        """
        super().record(sender, event, *args, **kwargs)
        self.mark(sender.layer_idx, self.events[-1].phase, event)

    def mark(self, layer: int, phase: str, event: str) -> None:
        """
        ### Mark the operations since the last event
        """
        self.marked += ({"layer": layer, "phase": phase, "event": event, "operation": operation}
                        for operation in self.log[len(self.marked):])


def on_streams() -> list[Json]:
    """
    ## The operations of a training step on an accelerator, by stream

    The shards are in CPU memory, so the host takes part. The second step is recorded, because the
    first one also makes buffers.
    """
    with Accelerator() as device:
        model = Zero3Sequential(scales(STREAM_LAYERS, Offload("cpu")))
        comm = model.module_list[0].comm
        comm.fetch_stream.name = "fetch"
        comm.backup_stream.name = "backup"
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            device.log.clear()
            with Marked(model, device.log) as tape:
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
                tape.mark(-1, "step", "step")
            optimizer.zero_grad()
    if device.problems:
        raise RuntimeError(f"there is a race between streams: {device.problems[0]}. What to do: "
                           "run tests/test_streams.py.")
    return tape.marked


@dataclass
class Bar:
    """
    ## Operations of a stream that are drawn as one
    """

    kind: str
    layer: int
    phase: str
    operations: list[Operation]
    top: int = 0  # the number of operations above it
    rows: int = 1

    @property
    def line(self) -> str:
        """
        ### Its stream, or the host
        """
        return self.operations[0].line

    @property
    def name(self) -> str:
        """
        ### Its text
        """
        return self.kind if self.layer < 0 else f"{self.kind} {self.layer}"

    def waits_for(self, other: "Bar") -> bool:
        """
        ### Whether it certainly begins after the other one has ended
        """
        return before(other.operations[-1], self.operations[0])


def bars(marked: list[Json]) -> list[Bar]:
    """
    ## The bars of a recording, as early as their waits allow

    * `marked` are the operations, as `on_streams` returns them

    All bars of the middle layer, all computations, and whatever may run beside the middle layer's
    computations. A computation is drawn as long as a copy and a gather together.
    """
    every = all_bars(marked)
    middle = [bar for bar in every if bar.kind == "layer" and bar.layer == MIDDLE]
    chosen = [bar for bar in every if bar.layer == MIDDLE or bar.kind in ("layer", "step") or
              any(are_free(bar, other) for other in middle)]
    for i, bar in enumerate(chosen):
        bar.rows = 2 if bar.kind == "layer" else 1
        bar.top = max((a.top + a.rows for a in chosen[:i] if bar.waits_for(a)), default=0)
    return chosen


def all_bars(marked: list[Json]) -> list[Bar]:
    """
    ### The bars in the order in which the host launched them
    """
    found: dict[tuple[str, int, str], Bar] = {}
    gathers = set()  # of announcements; the data follows the copy of its shard
    for each in marked:
        operation = each["operation"]
        key = (each["event"], operation.line)
        kind = KINDS.get((*key, operation.what)) or KINDS.get((*key, ""))
        place = (each["layer"], each["phase"])
        if kind == "gather" and place not in gathers:
            gathers.add(place)
        elif kind:
            bar = found.setdefault((kind, *place), Bar(kind, *place, []))
            bar.operations.append(operation)
    return list(found.values())


def are_free(a: Bar, b: Bar) -> bool:
    """
    ### Whether two bars may run at the same time
    """
    return a is not b and not a.waits_for(b) and not b.waits_for(a)


def beside(bar: Bar, drawn: list[Bar]) -> list[str]:
    """
    ### The names of all bars that may run beside one
    """
    return [other.name for other in drawn if are_free(bar, other)]


def arrows(drawn: list[Bar]) -> list[tuple[Bar, Bar]]:
    """
    ## Who waits for whom: pairs of bars on two streams, with no other bar between them
    """
    return [(a, b) for b in drawn for a in drawn
            if a.line != b.line and b.waits_for(a)
            and not any(b.waits_for(c) and c.waits_for(a) for c in drawn)]


def streams(run: Json) -> str:
    """
    ## The figure of the streams

    * `run` is the result of `record`
    """
    caption = (f"The streams around layer {MIDDLE} of a chain. An arrow means that the lower "
               "operation waits for the upper one. Whatever is in a shaded band may run while the "
               f"layer computes. Recorded by tests/streams.py. {run['origin']}.")
    return svg.figure(draw_streams(run, svg.WIDE), draw_streams(run, svg.PHONE), caption)


def draw_streams(run: Json, width: int) -> Drawing:
    """
    ### Streams as columns, and time downwards
    """
    d = Drawing(width, 0, "Streams of a training step", "")
    drawn = bars(run["streams"])
    column = 127 if width == svg.WIDE else 71
    left = {line: 3 + i * column for i, line in enumerate(COLUMNS)}
    wide = 104 if width == svg.WIDE else 66
    draw_beside(d, left["backup"], drawn)
    turn = 22.5 + STEP * min(bar.top for bar in drawn if bar.phase == "backward")
    d.line(0, turn, width, turn, dashed=True)
    d.text(left["backup"], turn - 8, "forward", "muted")
    d.text(left["backup"], turn + 18, "backward", "muted")
    for line, name in COLUMNS.items():
        d.text(left[line] + wide / 2, 14, name, bold=True, anchor="middle")
    for a, b in arrows(drawn):
        if MIDDLE in (a.layer, b.layer):
            d.line(left[a.line] + wide / 2, 16 + (a.top + a.rows) * STEP, left[b.line] + wide / 2,
                   27 + b.top * STEP, "fg", arrow=True)
            d.about += f"{b.name} waits for {a.name}. "
    for bar in drawn:
        draw_bar(d, left[bar.line], wide, bar)
    d.height = 30 + STEP * max(bar.top + bar.rows for bar in drawn)
    return d


def draw_beside(d: Drawing, left: float, drawn: list[Bar]) -> None:
    """
    #### Mark the computations of the middle layer, and say what may run beside them
    """
    for bar in drawn:
        if bar.kind == "layer" and bar.layer == MIDDLE:
            y = 23 + bar.top * STEP
            d.tag(f'<rect x="0" y="{y}" width="{d.width}" height="{bar.rows * STEP - 2}" '
                  'style="fill:var(--accent);fill-opacity:.13"/>')
            free = beside(bar, drawn)
            d.about += f"While {bar.name} computes in {bar.phase}, {', '.join(free)} may run. "
            d.text(left, y + 18, "may run meanwhile:")
            for row in range(0, len(free), 2):
                more = "," * (row + 2 < len(free))
                d.text(left, y + 35 + 8.5 * row, ", ".join(free[row:row + 2]) + more)


def draw_bar(d: Drawing, left: float, width: float, bar: Bar) -> None:
    """
    #### A bar, in bold if it is of the middle layer
    """
    color = PAINT[bar.kind]
    y = 28 + bar.top * STEP
    high = bar.rows * STEP - 12
    d.rect(left, y, width, high, color)
    d.inside(left + width / 2, y + high / 2 + 5, bar.name, color, bold=bar.layer == MIDDLE)

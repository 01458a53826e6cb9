r"""
# Timelines: what overlaps with what

`record` runs everything that the figures of mechanisms show, and `prefetch` and `backward` draw
the two passes of a training step.

Communication costs no time if it is over before its result is needed. So the figures show the
communication that is in flight *while* a layer computes. In a chain of four layers, each with the
three weights of `layer.py`, each rank records these events first:

| event | layer | |
|---|---|---|
| fetch | 0 | its all-gather starts |
| fetch | 1 | the prefetch starts |
| gathered | 0 | |
| compute, computed | 0 | layer 1 is in flight |
| free | 0 | |
| fetch | 2 | |
| gathered | 1 | |
| compute, computed | 1 | layer 2 is in flight |

`spans` pairs events that belong together, such as fetch and gathered. An all-gather overlaps a
computation if their spans overlap:

$$\text{fetch}_{\ell+1} < \text{compute}_\ell < \text{computed}_\ell < \text{gathered}_{\ell+1}$$

The figures show the order of events and not their times, because these layers compute in a few
microseconds. A computation has the same width everywhere. So has communication that no computation
overlaps.

Two more figures are drawn elsewhere from the same recording: a bucket (`docs/bucketing.py`), and
the streams of an accelerator (`docs/orderings.py`).

**Run this**: `make docs`; the figures are in the chapter on the heart.

**Not covered, and what that costs**: times. On a slow network an all-gather takes longer than a
computation, and the computation waits for the rest of it. The trace that `docs/tape.py` writes has
times.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from docs import svg
from docs.bucketing import bucketed
from docs.orderings import on_streams, scales
from docs.svg import Drawing
from zero3 import commit_name
from zero3.estimate.ledger import Ledger
from zero3.layer import Zero3Layer, Zero3Sequential
from zero3.train import launch

Json = dict[str, Any]
LAYERS = 4  # of the chain; four show the pattern twice between its ends

# --------------------------------------------------------------------------------------- the record


def record() -> Json:
    """
    ## Record all runs of the figures, on two ranks

    Raises `AssertionError` if a rank failed, and `RuntimeError` if the ranks recorded different
    events.
    """
    from zero3.train import report  # Here, because it imports matplotlib.

    answers = launch.run("docs.timelines:worker", 2, device="cpu")
    for name in ("chain", "alone"):
        if answers[0][name] != answers[1][name]:
            raise RuntimeError(f"rank 1: recorded other events in the run `{name}`. Expected: "
                               f"those of rank 0, {answers[0][name]}. Got: {answers[1][name]}. "
                               "What to do: look for a branch that depends on the rank.")
    first = answers[0]
    run = {"device": report.device_name(torch.device("cpu")), "torch": torch.__version__,
           "commit": commit_name()}
    return {**first, "buckets": [answer["buckets"] for answer in answers],
            "origin": svg.origin(run, len(answers))}


def worker() -> Json:
    """
    ## All runs of one rank
    """
    chain = Zero3Sequential(scales(LAYERS))
    alone = nn.Sequential(*scales(LAYERS))
    # The first bucket is larger than both layers together.
    buckets = {"with": bucketed(1 << 18), "without": bucketed(0)}
    return {"chain": step_events(chain), "alone": step_events(alone), "buckets": buckets,
            "streams": on_streams()}


def step_events(model: nn.Module) -> list[Json]:
    """
    ## The events of a forward and a backward pass
    """
    number_layers(model)
    with Ledger(model) as tape:
        model(torch.ones(1, 3)).sum().backward()
    return [{"layer": int(e.layer.split()[1]), "phase": e.phase, "event": e.event,
             "bytes": e.bytes, "live_bytes": e.live_bytes, "sent_bytes": e.sent_bytes}
            for e in tape.events]


def number_layers(model: nn.Module) -> None:
    """
    ## Label layers by their order, also those that are in no chain
    """
    layers = (module for module in model.modules() if isinstance(module, Zero3Layer))
    for i, layer in enumerate(layers):
        layer.label = f"layer {i}"


# ---------------------------------------------------------------------------------- spans of events

# The span that an event begins, and those that it ends.
BEGINS = {"fetch": "flight", "gathered": "whole", "compute": "compute", "gradients": "grad",
          "reduce": "reduce"}
ENDS = {"gathered": ("flight",), "computed": ("compute",), "free": ("compute", "whole"),
        "reduced": ("reduce", "grad")}


@dataclass(frozen=True)
class Span:
    """
    ## A state of a layer, from one event to another
    """

    what: str  # a value of `BEGINS`
    layer: int
    begin: int  # index of the event
    end: int


def spans(events: list[Json]) -> list[Span]:
    """
    ## The spans of a run, in the order of their ends
    """
    begun: dict[tuple[str, int], int] = {}
    found = []
    for i, e in enumerate(events):
        layer = e["layer"]
        for what in ENDS.get(e["event"], ()):
            if (what, layer) in begun:
                found.append(Span(what, layer, begun.pop((what, layer)), i))
        if e["event"] in BEGINS:
            begun[BEGINS[e["event"]], layer] = i
        if e["event"] == "gathered" and ("compute", layer) in begun:
            # In backward a layer's turn comes first, and then it waits for its all-gather.
            begun["compute", layer] = i
    return found


def held(events: list[Json]) -> list[dict[str, int]]:
    """
    ## The bytes in memory after each event, by kind

    Their sum is `live_bytes`. On the CPU a reduce also has a receive buffer, which counts as part
    of it.
    """
    now = {"shard": events[0]["live_bytes"] - events[0]["bytes"], "reduced": 0, "whole": 0,
           "flight": 0, "grad": 0, "reduce": 0}
    # Each event moves bytes out of a kind, into a kind, or both.
    moves = {"fetch": ("", "flight"), "gathered": ("flight", "whole"), "gradients": ("", "grad"),
             "reduce": ("grad", "reduce"), "reduced": ("", "reduced")}
    told = []
    for e in events:
        out, into = moves.get(e["event"], ("", ""))
        if e["event"] == "free":
            # A layer frees its parameters first, and the buffers of its reduce later.
            out = "whole" if e["bytes"] <= now["whole"] else "reduce"
        if out:
            now[out] -= e["bytes"]
        if into:
            now[into] += e["bytes"] * (1 + (e["event"] == "reduce"))
        told.append(dict(now))
    return told


def positions(events: list[Json]) -> list[float]:
    """
    ## Where to draw each event, in computations from the left

    A computation is one wide, and so is communication that no computation overlaps. Anything else
    takes no width.
    """
    found = spans(events)
    widths = [0.0] * len(events)  # of the interval after each event
    for span in found:
        if span.what == "compute":
            # A fetch at the begin of a backward belongs to the begin.
            parts = [i for i in range(span.begin, span.end) if events[i + 1]["event"] != "fetch"]
            for i in parts:
                widths[i] = 1 / len(parts)
    for span in found:
        if span.what in ("flight", "reduce") and not any(widths[span.begin:span.end]):
            widths[span.end - 1] = 1
    return [sum(widths[:i]) for i in range(len(events))]


# ---------------------------------------------------------------------------------- events as lanes

ROW = 26  # from one bar to the next
BYTE = 1.15  # height of a byte of memory
NAMES = {"compute": "computes", "flight": "all-gather", "grad": "full gradients",
         "reduce": "reduce-scatter"}


class Timeline:
    """
    ## A phase of a run, as lanes in a drawing

    Wide drawings have the names of lanes at the left of them, and phones above them.
    """

    def __init__(self, drawing: Drawing, events: list[Json], phase: str, unit: float = 1):
        """
        ### Choose a run and a phase

        * `unit` is the width of a computation
        """
        self.drawing = drawing
        self.events = events
        self.unit = unit
        self.is_wide = drawing.width == svg.WIDE
        self.left = 112 if self.is_wide else 4
        within = [i for i, e in enumerate(events) if e["phase"] == phase]
        self.first = within[0]
        self.last = within[-1]
        self.at = positions(events)
        self.spans = [s for s in spans(events) if s.end > self.first and s.begin < self.last]
        self.length = self.at[self.last] - self.at[self.first]

    def x(self, event: int) -> float:
        """
        ### Where an event is drawn; those before and after the phase are at its ends
        """
        inside = min(max(event, self.first), self.last)
        return self.left + (self.at[inside] - self.at[self.first]) * self.unit

    def of(self, what: str) -> list[Span]:
        """
        ### The spans of a kind, in the order of their begins
        """
        return sorted((s for s in self.spans if s.what == what), key=lambda s: s.begin)

    def beside(self, what: str, computes: Span) -> list[int]:
        """
        ### The layers whose spans of a kind overlap a computation
        """
        begin = self.x(computes.begin)
        end = self.x(computes.end)
        return [s.layer for s in self.of(what) if self.x(s.begin) < end and begin < self.x(s.end)]

    def meanwhile(self, layer: int) -> list[str]:
        """
        ### What happens while a layer computes, in words: a line, or two
        """
        computes = next(s for s in self.of("compute") if s.layer == layer)
        arriving = [f"layer {i} arrives" for i in self.beside("flight", computes)]
        leaving = [f"the gradients of layer {i} leave" for i in self.beside("reduce", computes)]
        first, *second = [*arriving, *leaving] or ["nothing is in flight"]
        return [f"While layer {layer} computes, {first}", *(f"and {each}" for each in second)]

    def about(self) -> str:
        """
        ### The lanes in words
        """
        return " ".join(" ".join(self.meanwhile(s.layer)) + "." for s in self.of("compute"))

    def name(self, y: float, name: str, more: str = "") -> float:
        """
        ### The name of a lane; returns where the lane begins

        * `more` is added where the name is above its lane
        """
        if self.is_wide:
            self.drawing.text(self.left - 12, y + 16, name, "muted", anchor="end")
            return y
        self.drawing.text(self.left, y + 11, name + more, "muted")
        return y + 17

    def lane(self, y: float, what: str) -> float:
        """
        ### A lane of spans, in as many rows as overlap; returns where the next lane begins
        """
        found = self.of(what)
        has_room = all(fits("layer 0", self.x(s.end) - self.x(s.begin)) for s in found)
        of = " layer" if what == "compute" else " of layer"
        y = self.name(y, NAMES[what], "" if has_room else of)
        ends: list[float] = []  # of each row
        for span in found:
            left = self.x(span.begin)
            right = self.x(span.end)
            row = next((r for r, end in enumerate(ends) if end <= left), len(ends))
            ends[row:row + 1] = [right]
            self.bar(left, y + row * ROW, right, what, "layer " * has_room + str(span.layer))
        if what == "compute":
            self.waits(y)
        return y + len(ends) * ROW

    def bar(self, left: float, y: float, right: float, color: str, text: str) -> None:
        """
        ### A bar with a text
        """
        self.drawing.rect(left + 1.5, y, right - left - 3, svg.BAR, color)
        self.drawing.inside((left + right) / 2, y + 16, text, color)

    def waits(self, y: float) -> None:
        """
        ### Say where nothing computes
        """
        done = self.left
        for span in self.of("compute"):
            self.wait(done, y, self.x(span.begin))
            done = self.x(span.end)
        self.wait(done, y, self.x(self.last))

    def wait(self, left: float, y: float, right: float) -> None:
        """
        #### Say it here, if there is any width
        """
        if right > left:
            self.drawing.text((left + right) / 2, y + 16, "waits", "muted", anchor="middle")

    def band(self, layer: int, top: float, bottom: float, under: int) -> None:
        """
        ### Mark the time in which a layer computes

        * `under` is the number of shapes that are drawn before it
        """
        computes = next(s for s in self.of("compute") if s.layer == layer)
        left = self.x(computes.begin)
        width = self.x(computes.end) - left
        self.drawing.parts.insert(under, (
            f'<rect x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}" '
            'style="fill:var(--accent);fill-opacity:.13"/>'))

    def peak_bytes(self) -> int:
        """
        ### The most bytes in memory in this phase
        """
        return max(e["live_bytes"] for e in self.events[self.first:self.last])

    def memory(self, y: float) -> float:
        """
        ### Parameters in the memory of a rank: shards, whole layers upon them, and arriving ones
        """
        told = held(self.events)
        most = self.peak_bytes()
        top = self.name(y, "memory,", f" at most {most} bytes")
        if self.is_wide:
            self.name(y + 16, "at most")
            self.name(y + 32, f"{most} bytes")
        rest = told[self.first]["shard"]
        bottom = top + most * BYTE
        base = bottom - rest * BYTE
        self.drawing.rect(self.left, base, self.length * self.unit, rest * BYTE, "shard")
        self.drawing.text(self.left + 8, base + rest * BYTE / 2 + 5, f"shards: {rest} bytes")
        for i in range(self.first, self.last):
            if self.at[i + 1] > self.at[i]:
                self.pile(i, base, told[i])
        if any(s.end > self.last for s in self.of("whole")):
            self.drawing.text(self.x(self.last) + 7, base - 20, "stays whole", "muted")
            self.drawing.text(self.x(self.last) + 7, base - 4, "for backward", "muted")
        return bottom

    def pile(self, i: int, base: float, now: dict[str, int]) -> None:
        """
        #### The full parameters after an event, one kind upon the other
        """
        left = self.x(i)
        right = self.x(i + 1)
        for kind, word in (("whole", "whole"), ("flight", "arrives")):
            high = now[kind] * BYTE
            base -= high
            if high:
                self.drawing.rect(left, base, right - left, high, kind)
                if fits(word, right - left):
                    self.drawing.inside((left + right) / 2, base + high / 2 + 5, word, kind)


def fits(text: str, width: float) -> bool:
    """
    ## Whether a text fits into a bar
    """
    return svg.LETTER * svg.FONT * len(text) <= width - 4


# ---------------------------------------------------------------------------- prefetch and backward


def prefetch(run: Json) -> str:
    """
    ## The figure of the forward pass, with prefetch and without

    * `run` is the result of `record`
    """
    sent_bytes = run["chain"][0]["sent_bytes"]
    caption = ("In a chain, the all-gather of the next layer overlaps each computation, and memory "
               "has to hold two layers. Elsewhere a layer waits for its own all-gather. Each "
               f"all-gather sends {sent_bytes} bytes. Events are in order; widths are not times. "
               f"{run['origin']}.")
    return svg.figure(draw_prefetch(run, svg.WIDE), draw_prefetch(run, svg.PHONE), caption)


def draw_prefetch(run: Json, width: int) -> Drawing:
    """
    ### Two forward passes, one below the other
    """
    d = Drawing(width, 0, "Forward with and without prefetch", "")
    longest = Timeline(d, run["alone"], "forward")
    unit = (width - longest.left - 4) / longest.length
    y = 0.0
    for key, head in (("chain", "In a chain"), ("alone", "In no chain")):
        t = Timeline(d, run[key], "forward", unit)
        d.text(t.left, y + 14, head, bold=True)
        d.text(t.left, y + 32, f"{t.meanwhile(1)[0]}.")
        top = y + 40
        under = len(d.parts)
        y = t.lane(top + 4, "compute")
        y = t.lane(y, "flight")
        y = t.memory(y + 4)
        t.band(1, top, y + 4, under)
        d.about += f"{head}: {t.about()} Memory holds at most {t.peak_bytes()} bytes. "
        y += 26
    d.height = y - 18
    return d


def backward(run: Json) -> str:
    """
    ## The figure of the backward pass

    * `run` is the result of `record`
    """
    sent_bytes = next(e["sent_bytes"] for e in run["chain"] if e["event"] == "reduce")
    caption = ("While a layer goes backward, the layer below arrives, and the gradients of the "
               "layer above are reduced. The last layer is still whole from forward. Each "
               f"reduce-scatter sends {sent_bytes} bytes. Events are in order; widths are not "
               f"times. {run['origin']}.")
    return svg.figure(draw_backward(run, svg.WIDE), draw_backward(run, svg.PHONE), caption)


def draw_backward(run: Json, width: int) -> Drawing:
    """
    ### A backward pass, and one computation of it in words
    """
    d = Drawing(width, 0, "Overlap in backward", "")
    t = Timeline(d, run["chain"], "backward")
    t.unit = (width - t.left - 4) / t.length
    first, second = t.meanwhile(2)
    y = 14.0
    for line in [f"{first} {second}."] if t.is_wide else [first, f"{second}."]:
        d.text(t.left, y, line)
        y += 18
    top = y - 8
    under = len(d.parts)
    y = top + 4
    for what in ("compute", "flight", "grad", "reduce"):
        y = t.lane(y, what)
    t.band(2, top, y, under)
    d.about = t.about()
    d.height = y + 2
    return d

r"""
# Lanes: a recorded step of a pipeline

`record` trains two small pipelines on four ranks, and `figure` draws a step of each: a lane for
each stage, from the events that the ranks recorded.

The ledger of a rank hears of each action of its list once it is done: unshard, receive, forward,
send, and so on. This is the order on each rank. Between ranks, a pass begins when the pass that it
needs is over. `timeline` follows both rules, and gives each pass its slot:

| rank 0 has recorded | of stage 0 | slot |
|---|---|---|
| unshard | | before 0 |
| forward | micro-batch 0 | 0 |
| send | micro-batch 0 | |
| forward | micro-batch 1 | 1 |
| send | micro-batch 1 | |
| receive gradient, backward | micro-batch 0 | 3 |

$$\text{begin} = \max(\text{end of the pass before on this rank},\; \text{end of the pass that it
needs})$$

An all-gather is drawn from its start to the first pass of its stage, which waits for it. So it lies
beside the passes that it overlaps.

**Run this**: `make docs`; the figures are on the page of the tape, and in the chapter on schedules.

**Not covered, and what that costs**: times. These stages compute in microseconds, and four ranks
share the cores of one machine, so recorded times say more about the machine than about the
schedule.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from docs import svg
from docs.svg import Drawing
from zero3 import Zero3Optimizer, commit_name
from zero3.estimate.ledger import Ledger
from zero3.pipeline.pipeline import Pipeline
from zero3.pipeline.schedules import KINDS, PASSES, Action, actions
from zero3.pipeline.timeline import Pass, bubble, costs, timeline
from zero3.train import launch

Json = dict[str, Any]
RANKS = 2  # of the pipeline
SHARDS = 2  # of each stage
MICRO_BATCHES = 3  # as in the example of `schedules.py`
WIDTH = 16  # of a layer
DEPTH = 6  # layers
# The stages on each rank, by schedule.
SCHEDULES = {"1f1b": 1, "breadth-first": 3}

# -------------------------------------------------------------------------------------- the record


def record() -> dict[str, Json]:
    """
    ## Record a step with each schedule

    Raises `RuntimeError` if a rank did something else than its list says.
    """
    from zero3.train import report  # Here, because it imports matplotlib.

    answers = launch.run("docs.lanes:worker", RANKS * SHARDS, device="cpu")
    run = {"device": report.device_name(torch.device("cpu")), "torch": torch.__version__,
           "commit": commit_name()}
    found = {}
    for name, per_rank in SCHEDULES.items():
        lists = actions(name, RANKS, MICRO_BATCHES, per_rank)
        for rank, answer in enumerate(answers):
            wanted = lists[rank // SHARDS]
            if answer[name]["done"] != wanted:
                raise RuntimeError(f"rank {rank}: did not follow the list of {name}. Expected: "
                                   f"{wanted}. Got: {answer[name]['done']}. What to do: look for "
                                   "an action that is recorded twice, or not at all.")
        found[name] = {"ranks": [answer[name] for answer in answers],
                       # One of the ranks that share each stage.
                       "done": [answers[i * SHARDS][name]["done"] for i in range(RANKS)],
                       "origin": svg.origin(run, len(answers))}
    return found


def worker() -> Json:
    """
    ## A step of this rank with each schedule
    """
    return {name: step(name, per_rank) for name, per_rank in SCHEDULES.items()}


def step(schedule: str, per_rank: int) -> Json:
    """
    ## A step: its actions in the order of the ledger, and the bytes that it sends and holds
    """
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)]
    mesh = init_device_mesh("cpu", (RANKS, SHARDS), mesh_dim_names=("pipeline", "shard"))
    model = Pipeline(layers, mesh, loss_fn=nn.functional.mse_loss, schedule=schedule,
                     micro_batches=MICRO_BATCHES, per_rank=per_rank)
    optimizer = Zero3Optimizer(model, bucket_bytes=0)
    x = torch.ones(MICRO_BATCHES, WIDTH)
    with Ledger(model, optimizer) as tape:
        model.train_batch(x, x, optimizer)
    done = []
    sent_bytes = dict.fromkeys(("fetch", "reduce", "send", "send gradient"), 0)
    for e in tape.events:
        if e.event in sent_bytes:
            sent_bytes[e.event] += e.sent_bytes
        # Layers record events, too, some by the same names.
        if e.event in KINDS and e.layer.startswith("stage "):
            stage, _, number = e.layer.removeprefix("stage ").partition(", micro-batch ")
            done.append(Action(e.event, int(stage), int(number or -1)))
    return {"done": done, "sent_bytes": sent_bytes, "peak_bytes": tape.peak_live_bytes}


# ------------------------------------------------------------------------------------- the lanes

LEAD = 0.8  # slots before the first pass, for the gathers that overlap nothing
TAIL = 0.8  # slots of a reduce


class Span(NamedTuple):
    """
    ## A bar in the lane of a stage
    """

    what: str  # a colour of `svg.py`
    stage: int
    begin: float  # in slots
    end: float
    text: str = ""


def spans(done: list[Action], passes: list[Pass]) -> list[Span]:
    """
    ## The bars of a rank's stages

    * `done` are its recorded actions, and `passes` the passes among them, with their slots
    """
    at = {each.action: each for each in passes}
    now = -LEAD
    gathers: dict[int, float] = {}
    whole: dict[int, float] = {}
    found = []
    for action in done:
        stage = action.stage
        if action.kind == "unshard":
            gathers[stage] = now
        elif action.kind == "reshard":
            found.append(Span("whole", stage, whole.pop(stage), now))
        elif action.kind == "reduce":
            found.append(Span("reduce", stage, now, now + TAIL))
        elif action.kind in PASSES:
            begin, now, _ = at[action]
            if stage in gathers:
                found.append(Span("flight", stage, gathers.pop(stage), begin))
                whole[stage] = begin
            color = "compute" if action.kind == "forward" else "grad"
            found.append(Span(color, stage, begin, now, short(action)))
    return found


def short(action: Action) -> str:
    """
    ## A pass in two letters: F0 is the forward pass of micro-batch 0
    """
    return f"{action.kind[0].upper()}{action.micro_batch}"


PITCH = 50  # from one lane to the next
EDGE = 5  # of a whole stage, above and below its passes
HEAD = 24  # above the first lane, for the numbers of slots
LEGEND = (("compute", "forward"), ("grad", "backward"), ("flight", "all-gather"),
          ("whole", "stage is whole"), ("reduce", "reduce-scatter"))


class Lanes:
    """
    ## A step in a drawing of a given width
    """

    def __init__(self, run: Json, name: str, width: int):
        """
        ### Choose a step

        * `run` is what `record` returns for the schedule `name`
        * `width` is `svg.WIDE` or `svg.PHONE`
        """
        self.done = run["done"]
        self.played = timeline(self.done)
        self.stages = RANKS * SCHEDULES[name]
        self.slots = int(max(each.end for passes in self.played for each in passes))
        self.is_wide = width == svg.WIDE
        self.left = 104 if self.is_wide else 58
        self.unit = (width - self.left - 4) / (self.slots + LEAD + TAIL)
        self.foot = HEAD + self.stages * PITCH
        self.legend = legend_rows(width, LEGEND)
        self.drawing = Drawing(width, self.foot + 22 * len(self.legend) - 4,
                               f"A step of a pipeline, {name}", about(run))

    def x(self, slot: float) -> float:
        """
        ### Where a slot begins
        """
        return self.left + (slot + LEAD) * self.unit

    def y(self, stage: int) -> float:
        """
        ### The upper edge of the passes of a stage
        """
        return HEAD + EDGE + stage * PITCH

    def draw(self) -> Drawing:
        """
        ### Draw everything
        """
        self.names()
        bars = [span for done, passes in zip(self.done, self.played, strict=True)
                for span in spans(done, passes)]
        # Passes are drawn upon their stages.
        for span in sorted(bars, key=lambda each: bool(each.text)):
            self.bar(span)
        for stage, to, begin, end in transfers(self.played):
            self.arrow(stage, to, begin, end)
        for i, row in enumerate(self.legend):
            legend(self.drawing, row, self.foot + 22 * i)
        return self.drawing

    def names(self) -> None:
        """
        ### The numbers of the slots, and the names of the stages
        """
        every = 1 if self.unit > 16 else 2
        for slot in range(0, self.slots, every):
            self.drawing.text(self.x(slot + 0.5), 13, str(slot), "muted", anchor="middle", size=11)
        for stage in range(self.stages):
            self.drawing.text(4, self.y(stage) + 16, f"stage {stage}")
            if self.is_wide:
                first = stage % RANKS * SHARDS
                self.drawing.text(4, self.y(stage) + 31, f"ranks {first} and {first + 1}", "muted",
                                  size=11)

    def bar(self, span: Span) -> None:
        """
        ### A bar in its lane; passes are less high than stages
        """
        edge = 0 if span.text else EDGE
        begin = self.x(span.begin) + bool(span.text)
        y = self.y(span.stage)
        self.drawing.rect(begin, y - edge, self.x(span.end) - 1 - begin, svg.BAR + 2 * edge,
                          span.what)
        if span.text:
            # A narrow slot has room for the number of the micro-batch.
            text = span.text if self.unit > 16 else span.text[1:]
            self.drawing.text(self.x((span.begin + span.end) / 2), y + 16, text, anchor="middle")

    def arrow(self, stage: int, to: int, begin: float, end: float) -> None:
        """
        ### An arrow from one lane to the next
        """
        below = svg.BAR + EDGE
        leaves, arrives = (below, -EDGE) if to > stage else (-EDGE, below)
        self.drawing.line(self.x(begin), self.y(stage) + leaves, self.x(end),
                          self.y(to) + arrives, arrow=True)


def transfers(played: list[list[Pass]]) -> list[tuple[int, int, float, float]]:
    """
    ## What travels: from which stage to which, and from the end of a pass to the begin of another
    """
    at = {each.action: each for passes in played for each in passes}
    found = []
    for action, each in ((each.action, each) for passes in played for each in passes):
        to = action.stage + (1 if action.kind == "forward" else -1)
        there = at.get(action._replace(stage=to))
        if there is not None:
            found.append((action.stage, to, each.end, there.start))
    return found


def legend_rows(width: int, entries: Iterable[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """
    ## A legend, in as many rows as it needs

    * `entries` are colours with their words
    """
    rows: list[list[tuple[str, str]]] = [[]]
    for entry in entries:
        if sum(entry_width(word) for _, word in [*rows[-1], entry]) > width:
            rows.append([])
        rows[-1].append(entry)
    return rows


def entry_width(word: str) -> float:
    return 34 + svg.LETTER * svg.FONT * len(word)


def legend(drawing: Drawing, row: list[tuple[str, str]], y: float,
           solid: Iterable[str] = ()) -> None:
    """
    ## A row of a legend

    * `solid` are the colours that are not pale in this drawing
    """
    left = 4.0
    for color, word in row:
        drawing.rect(left, y, 16, 14, color, pale=color not in solid)
        drawing.text(left + 22, y + 12, word, "muted")
        left += entry_width(word)


def about(run: Json) -> str:
    """
    ## The passes of each rank, in words
    """
    return " ".join(f"Ranks {i * SHARDS} and {i * SHARDS + 1}: "
                    f"{', '.join(short(action) for action in done if action.kind in PASSES)}."
                    for i, done in enumerate(run["done"]))


CAPTIONS = {
    "1f1b": "A step of two stages, with the schedule 1F1B and three micro-batches. F0 is the "
            "forward pass of micro-batch 0, B0 its backward pass. Arrows are activations on their "
            "way down, and gradients on their way up. Each stage is gathered and reduced once.",
    "breadth-first": "The same model as six stages, three on each rank, with the schedule "
            "breadth-first. The all-gather of the next stage overlaps the last passes of the stage "
            "before. Each stage is gathered twice, but the last one of each rank once."}


def figure(recorded: dict[str, Json], name: str) -> str:
    """
    ## The figure of a schedule
    """
    run = recorded[name]
    return svg.figure(Lanes(run, name, svg.WIDE).draw(), Lanes(run, name, svg.PHONE).draw(),
                      f"{CAPTIONS[name]} Drawn in the order in which the ranks recorded it: "
                      f"{run['origin']}.")


def compared(recorded: dict[str, Json]) -> list[list[str]]:
    """
    ## A table of both steps: what rank 0 does, and the bytes that it sends and holds

    The cells of each row; the first row is the header.
    """
    rows = [["schedule", "stages on a rank", "bubble", "layers gathered",
             "layers whose activations are kept", "sent in gathers", "sent in reduces",
             "sent to other stages", "peak"]]
    for name, run in recorded.items():
        first = run["ranks"][0]
        sent = first["sent_bytes"]
        cost = costs(first["done"])
        per_rank = SCHEDULES[name]
        layers = DEPTH // RANKS // per_rank  # of a stage
        rows.append([name, str(per_rank), f"{bubble(timeline(run['done'])):.0%}",
                     str(cost.gathers * layers), str(cost.kept * layers), f"{sent['fetch']:,}",
                     f"{sent['reduce']:,}", f"{sent['send'] + sent['send gradient']:,}",
                     f"{first['peak_bytes']:,}"])
    return rows

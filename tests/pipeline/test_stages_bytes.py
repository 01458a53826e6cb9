"""
# Bytes of a pipeline: formula, list and measurement are equal, without a tolerance

The formulas are written out here once more, in shapes and numbers of ranks alone.
"""

from collections import Counter
from contextlib import nullcontext
from itertools import pairwise
from math import ceil, prod

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.cases import freeze
from tests.ranks import run
from zero3 import Zero3Optimizer
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.pipeline import Pipeline
from zero3.pipeline.schedules import GATHERS, PASSES, Action, actions
from zero3.pipeline.timeline import bubble, costs, timeline

# Stages and shards, and replicas in between if there are three numbers.
SHAPES = ((1, 2), (2, 1), (2, 2), (3, 1))
ROWS = 2
SIZES = [7, 12, 5, 12, 3, 9, 2]


class Embedding(nn.Module):
    """Returns a dict; its matrix is tied to that of the head."""

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(11, 6)
        self.place = nn.Parameter(torch.randn(5, 6))

    def forward(self, x):
        return {"hidden": self.token(x) + self.place, "mask": x > 3}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, inputs):
        hidden = inputs["hidden"] + torch.tanh(self.linear(inputs["hidden"]))
        return {**inputs, "hidden": hidden * inputs["mask"][..., None]}


class Head(nn.Module):
    def __init__(self, embedding):
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = embedding.token.weight

    def forward(self, inputs):
        return self.out(self.norm(inputs["hidden"]))


def models(name):
    """Seven layers each, six with parameters, and none of these as large as its neighbours."""
    torch.manual_seed(0)
    if name == "tied":
        embedding = Embedding()
        return [embedding, *(Block() for _ in range(5)), Head(embedding)]
    lines = [nn.Linear(a, b) for a, b in pairwise(SIZES)]
    if name == "frozen":
        lines[:3] = [freeze(line) for line in lines[:3]]
    if name == "frozen later":
        lines[2:4] = [freeze(line) for line in lines[2:4]]
    return [*lines[:2], nn.Tanh(), *lines[2:]]


def cut_of(stages):
    """Layers of each stage; the third layer, which has no parameters, is never alone."""
    return {1: [7], 2: [3, 4], 3: [2, 2, 3], 4: [2, 2, 2, 1], 6: [1, 1, 2, 1, 1, 1]}[stages]


def loss_fn(output, y):
    return ((output.float() - y) ** 2).mean()


def mesh_of(shape):
    names = ("pipeline", "shard") if len(shape) == 2 else ("pipeline", "replicate", "shard")
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def step_of(mesh, name="plain", schedule="1f1b", m=3, per_rank=1, gathers="stage",
            dtype=torch.float32, offload=None, **options):
    """A step: the pipeline, the tape, and what rests."""
    layers = [layer.to(dtype) for layer in models(name)]
    if name == "tied":
        x = torch.arange(m * ROWS * 5).view(-1, 5) % 11
        y = torch.zeros(m * ROWS, 5, 11)
    else:
        x = torch.ones(m * ROWS, 7, dtype=dtype)
        y = torch.zeros(m * ROWS, 2)
    pipeline = Pipeline(layers, mesh, loss_fn=loss_fn, schedule=schedule, micro_batches=m,
                        stages=cut_of(mesh.shape[0] * per_rank), gathers=gathers, offload=offload)
    optimizer = Zero3Optimizer(pipeline, offload=offload, **options)
    for is_measured in (False, True):
        with Ledger(pipeline, optimizer) if is_measured else nullcontext() as tape:
            pipeline.train_batch(x, y, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return pipeline, tape, held_bytes(pipeline, optimizer)


def measured(tape, rest):
    """What the tape has of each number that a formula tells"""
    sent = Counter()
    for event in tape.events:
        sent[event.event] += event.sent_bytes
    count = Counter(event.event for event in tape.events)
    return {
        "gathers": count["fetch"], "reduces": count["reduced"],
        "gathered_bytes": sent["fetch"], "reduced_bytes": sent["reduce"] + sent["exchange"],
        "activation_bytes": sent["send"], "gradient_bytes": sent["send gradient"],
        "tied_bytes": sent["send tied"] + sent["send tied gradient"],
        "sent_bytes": tape.sent_bytes, "messages": tape.messages,
        "order_bytes": tape.order_bytes, "between_bytes": tape.between_bytes,
        "peak_bytes": tape.peak_live_bytes, "rest_bytes": rest}


def orders():
    """The schedules with numbers that all meshes take"""
    for schedule, m, per_rank in (("gpipe", 3, 1), ("1f1b", 1, 1), ("1f1b", 5, 1),
                                  ("interleaved", 6, 2), ("breadth-first", 3, 2)):
        yield {"schedule": schedule, "m": m, "per_rank": per_rank}


def gathers_of_rank(schedule, gathers, p, m, v, r):
    """The formulas of the head of the chapter on costs"""
    if gathers == "step":
        return v
    if gathers == "each":
        return 2 * m * v
    if schedule in ("gpipe", "breadth-first"):
        return 2 * v if gathers == "direction" else 2 * v - 1
    if v == 1:
        return 2 * max(1, m - p + 1 + r) if gathers == "direction" else 1
    # Interleaved: the k-th forward pass is of this stage, and so on.
    ahead = min(2 * (p - 1 - r) + (v - 1) * p, m * v)
    forward = [("F", k // p % v) for k in range(m * v)]
    backward = [("B", v - 1 - k // p % v) for k in range(m * v)]
    passes = forward[:ahead]
    for pair in zip(forward[ahead:], backward, strict=False):
        passes += pair
    passes += backward[m * v - ahead:]
    if gathers == "stage":
        passes = [stage for _, stage in passes]
    return 1 + sum(a != b for a, b in pairwise(passes))


def formulas(shape, order, gathers, rank):
    """
    What a rank does in a step of the plain model in fp32, with a bucket for each layer

    The peak only for one stage on a rank.
    """
    p, n = shape
    m, v = order["m"], order["per_rank"]
    r, stages = rank // n, range(rank // n, p * v, p)
    cut = cut_of(p * v)
    numels = [a * b + b for a, b in pairwise(SIZES)]
    # The layer without parameters is the third of seven.
    numels.insert(2, 0)
    first = [sum(cut[:s]) for s in range(p * v + 1)]
    # Shards of each stage's layers.
    shards = {s: [4 * ceil(numel / n) for numel in numels[first[s]:first[s + 1]] if numel]
              for s in stages}
    mine = [shard for each in shards.values() for shard in each]
    # Wide as the input of each layer.
    wide = [*SIZES[:3], *SIZES[2:]]
    after = sum(4 * ROWS * wide[first[s + 1]] for s in stages if s + 1 < p * v) * (p > 1)
    before = sum(4 * ROWS * wide[first[s]] for s in stages if s) * (p > 1)
    sends = m * (2 * v - (r == 0) - (r == p - 1)) if p > 1 else 0
    counted = gathers_of_rank(order["schedule"], gathers, p, m, v, r)
    found = {"gathers of stages": counted, "reduces": len(mine),
             "reduced_bytes": (n - 1) * sum(mine), "activation_bytes": m * after,
             "gradient_bytes": m * before, "rest_bytes": 3 * sum(mine) + 4 * len(mine)}
    if v == 1:
        found["gathers"] = counted * len(mine)
        found["gathered_bytes"] = counted * found["reduced_bytes"]
        # Loss and norm, from stage to stage and from shard to shard.
        numbers = 2 * 8 * (p - 1) + 8 * (n - 1) * (1 + len(mine))
        found["sent_bytes"] = (found["gathered_bytes"] + found["reduced_bytes"] + m * after
                               + m * before + numbers)
        transfers = (n - 1) * (found["gathers"] + len(mine) + 2) + 2 * (p - 1)
        found["messages"] = transfers + sends
        found["order_bytes"] = 32 * (transfers + sends)
        pairs = [a + b for a, b in pairwise([*mine, 0])]
        whole = max(pairs) if gathers == "each" else sum(mine)
        peak = n * (whole + sum(mine))
        for k in range(len(mine)) if n > 1 else ():
            # Layers from k on are reduced: their shards have gradients, and k's are arriving.
            peak = max(peak, n * (sum(mine[:k + 1]) + mine[k]) + sum(mine[k:]))
        if m > 1 or gathers != "each":
            found["peak_bytes"] = found["rest_bytes"] + peak
    return found


def some(shape):
    """
    Each order with each way to gather on two ranks that share nothing. Elsewhere each order with
    two of the four ways, and the next order with the other two.
    """
    return [{**order, "gathers": gathers} for i, order in enumerate(orders())
            for j, gathers in enumerate(GATHERS) if shape == (2, 1) or (i + j + sum(shape)) % 2]


def measured_steps(shape, tried):
    """For each case: what is measured, and the list of this rank"""
    found = []
    mesh = mesh_of(shape)
    for case in tried:
        pipeline, tape, rest = step_of(mesh, **case, bucket_bytes=0)
        found.append((measured(tape, rest), pipeline.train_list))
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_formula_list_and_measurement_agree(shape):
    """
    For each schedule and choice: the closed formula, the count over the list, and what a `Ledger`
    has measured on real ranks. Breaks with a list that gathers at another place.
    Proves I3, I4, `actions`, `costs`, `_with_gathers`, `Stage.unshard`,
    `Stage.reshard`, `Channels.send`.
    """
    tried = some(shape)
    for rank, steps in enumerate(run(measured_steps, prod(shape), shape, tried)):
        for case, (got, listed) in zip(tried, steps, strict=True):
            order = {name: case[name] for name in ("schedule", "m", "per_rank")}
            formula = formulas(shape, order, case["gathers"], rank)
            counted = costs(listed)
            assert formula.pop("gathers of stages") == counted.gathers, (case, rank)
            kinds = Counter(action.kind for action in listed)
            assert kinds["send"] + kinds["send gradient"] == counted.sends
            for name, value in formula.items():
                assert value == got[name], (case, rank, name)


class Live(torch.autograd.Function):
    """Counts the graphs that wait for their backward pass."""

    now = most = 0

    @staticmethod
    def forward(ctx, x):
        Live.now += 1
        Live.most = max(Live.most, Live.now)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Live.now -= 1
        return grad


class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Live.apply(self.linear(x))


def recorded(shape, tried):
    """For each case: its list, the tape's actions, where layers were gathered, kept graphs"""
    torch.manual_seed(0)
    mesh = mesh_of(shape)
    found = []
    for case in tried:
        m = case["m"]
        # Two in each stage.
        layers = [Watched() for _ in range(2 * shape[0] * case["per_rank"])]
        pipeline = Pipeline(layers, mesh, loss_fn=loss_fn, schedule=case["schedule"],
                            micro_batches=m, per_rank=case["per_rank"], gathers=case["gathers"])
        optimizer = Zero3Optimizer(pipeline)
        Live.most = 0
        with Ledger(pipeline, optimizer) as tape:
            pipeline.train_batch(torch.ones(m, 4), torch.zeros(m, 4), optimizer)
        listed = pipeline.train_list
        found.append((listed, *played(tape.events), Live.most // 2))
    return found


def played(events):
    """The actions on a tape, and how many layers each of them has gathered"""
    found, gathered = [], []
    number = 0
    for event in events:
        number += event.event == "fetch"
        if event.layer.startswith("stage "):
            stage, _, micro_batch = event.layer[6:].partition(", micro-batch ")
            found.append(Action(event.event, int(stage), int(micro_batch or -1)))
            gathered.append(number)
            number = 0
    return found, gathered


@pytest.mark.parametrize("shape", SHAPES)
def test_the_recorded_run_is_the_list(shape):
    """
    In its order, so with the bubble of the formula, and with activations of as many micro-batches
    as the table in `schedules.py` says: 1F1B keeps at most as many as there are ranks from this one
    on. Layers are gathered where the list says `unshard`, or inside each pass. Breaks if a rank did
    anything sooner or later than its list.
    Proves I6, `Pipeline.train_batch`, `actions`, `timeline`, `bubble`, `costs`, `needed`,
    `Stage.begin`, `_Batch`.
    """
    p, n = shape
    tried = some(shape)
    found = run(recorded, p * n, shape, tried)
    for k, case in enumerate(tried):
        m, v = case["m"], case["per_rank"]
        where = PASSES if case["gathers"] == "each" else ("unshard",)
        for rank, (listed, done, gathered, kept) in enumerate(each[k] for each in found):
            assert done == listed, (case, rank)
            assert kept == costs(listed).kept == costs(done).kept
            if case["schedule"] == "1f1b":
                assert kept == min(m, p - rank // n)
            assert gathered == [2 * (action.kind in where) for action in done]
        if m >= p:
            # The recorded passes, played; ranks that share a stage do the same.
            share = bubble(timeline([each[k][1] for each in found[::n]]))
            assert share == pytest.approx((p - 1) / (v * m + p - 1))
            # In units of the computation, v times smaller than with all stages of a rank as one.
            of_one = bubble(timeline(actions("1f1b", p, m)))
            assert share / (1 - share) == pytest.approx(of_one / (1 - of_one) / v)


class Scale(nn.Module):
    """A layer of three weights"""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return x * self.weight


def example(gathers):
    """The first rank of the example on costs: gathers of its stage, bytes, above rest"""
    mesh = mesh_of((2, 2))
    layers = [Scale() for _ in range(6)]
    pipeline = Pipeline(layers, mesh, loss_fn=loss_fn, micro_batches=3, gathers=gathers)
    optimizer = Zero3Optimizer(pipeline, bucket_bytes=0)
    for _ in range(2):
        with Ledger(pipeline, optimizer) as tape:
            pipeline.train_batch(torch.ones(6, 3), torch.zeros(6, 3), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    got = measured(tape, held_bytes(pipeline, optimizer))
    return (got["gathers"] // 3, got["gathered_bytes"], got["reduced_bytes"],
            got["activation_bytes"], got["peak_bytes"] - got["rest_bytes"])


def test_the_example_of_the_head_is_measured():
    """
    The table that opens to the byte.
    Proves `costs`, `Channels.send`.
    """
    table = {"each": (6, 144, 24, 72, 80), "direction": (4, 96, 24, 72, 96),
             "stage": (1, 24, 24, 72, 96)}
    for gathers, expected in table.items():
        assert run(example, 4, gathers)[0] == expected

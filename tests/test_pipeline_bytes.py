"""
# Bytes of a pipeline: formula, list and measurement are equal, without a tolerance
"""

from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree

from tests.cases import freeze
from tests.ranks import run
from zero3 import Offload, Zero3Optimizer
from zero3.measure.ledger import Ledger, held_bytes
from zero3.pipeline import Pipeline
from zero3.pipeline.costs import outputs, predict_step
from zero3.pipeline.schedules import GATHERS, ORDERS, actions

# Pipelines and shards; the third number of a mesh are replicas.
SHAPES = ((1, 2), (2, 1), (2, 2), (3, 1))
ROWS = 2


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
    sizes = [7, 12, 5, 12, 3, 9, 2]
    lines = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    if name == "frozen":
        lines[:3] = [freeze(line) for line in lines[:3]]
    if name == "frozen later":
        lines[2:4] = [freeze(line) for line in lines[2:4]]
    return [*lines[:2], nn.Tanh(), *lines[2:]]


def loss_fn(output, y):
    return ((output.float() - y) ** 2).mean()


def step_of(shape, name="plain", schedule="1f1b", m=3, per_rank=1, gathers="stage",
            dtype=torch.float32, offload=None, **options):
    """A step that is predicted and measured: both, and what the list and the tape have."""
    layers = [layer.to(dtype) for layer in models(name)]
    names = ("pipeline", "shard") if len(shape) == 2 else ("pipeline", "replicate", "shard")
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if name == "tied":
        x = torch.arange(m * ROWS * 5).view(-1, 5) % 11
        y = torch.zeros(m * ROWS, 5, 11)
    else:
        x = torch.ones(m * ROWS, 7, dtype=dtype)
        y = torch.zeros(m * ROWS, 2)
    learnt = outputs(layers, x[:ROWS])
    # Seven layers for six stages: the one without parameters is no stage.
    options.setdefault("stages", [1, 1, 2, 1, 1, 1] if shape[0] * per_rank == 6 else None)
    pipeline = Pipeline(layers, mesh, loss_fn=loss_fn, schedule=schedule, micro_batches=m,
                        per_rank=per_rank, gathers=gathers, offload=offload,
                        stages=options.pop("stages"))
    optimizer = Zero3Optimizer(pipeline, offload=offload, **options)
    for _ in range(2):
        with Ledger(pipeline, optimizer) as tape:
            pipeline.train_batch(x, y, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    rest = held_bytes(pipeline, optimizer)
    return pipeline, learnt, tape, predict_step(pipeline, optimizer, learnt), rest


def measured(tape, rest):
    """What the tape has of each number that is predicted"""
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


def told(p):
    """The same of a prediction"""
    total = ("sent_bytes", "messages", "order_bytes", "between_bytes", "peak_bytes", "rest_bytes")
    own = ("gathers", "reduces", "gathered_bytes", "reduced_bytes", "activation_bytes",
           "gradient_bytes", "tied_bytes")
    return {**{name: getattr(p, name) for name in own},
            **{name: getattr(p.total, name) for name in total}}


def wrong(shape, cases):
    """Where a number that was predicted for this rank is not the measured one"""
    found = []
    for case in cases:
        _, _, tape, predicted, rest = step_of(shape, **case)
        got = measured(tape, rest)
        found += [(case, name, value, got[name]) for name, value in told(predicted).items()
                  if value != got[name]]
    return found

"""
# Optimizer states that leave for a while: the pass over graphs, and what carries it out

The pass is pure, so most of it is proven on graphs. Training runs on the CPU, which is told to have
memory of its own, and on the accelerator that is not there (`tests/streams.py`).
"""

import copy
import functools
import warnings
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero3
from tests.ranks import run
from tests.streams import Accelerator
from zero3 import Zero3Optimizer
from zero3.compiler import model as compiled_model
from zero3.compiler.engines import regions_of
from zero3.compiler.graph import find, offload, reload, vacate
from zero3.compiler.model import compile
from zero3.compiler.passes import improve
from zero3.compiler.room import LayerBytes, Room, held_bytes, offload_states
from zero3.compiler.trace import Graphs
from zero3.measure.ledger import Ledger


def chain(layers=3, width=2, bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(layers))).to(dtype)


@functools.cache
def traced(layers=3, width=2, rows=4, bias=False, dtype=torch.float32):
    """The graphs of a chain before any pass: forward and backward"""
    model = compile(chain(layers, width, bias, dtype), backend="aot_eager")
    model(torch.ones(rows, width, dtype=dtype)).sum().backward()
    (graphs,) = model.graphs
    return graphs.steps[0][1:], model.numel


class OnDevice(torch.autograd.Function):
    """Carry out two graphs as autograd would, because Dynamo does not trace below other modes"""

    @staticmethod
    def forward(ctx, x, graphs, params):
        forward, ctx.backward = graphs
        y, *ctx.saved = forward([x, *params])
        return y

    @staticmethod
    def backward(ctx, grad):
        args = [*ctx.saved, grad]
        ctx.saved = []
        ctx.backward(args)
        return None, None, None


def try_device(limit):
    (forward, backward), _ = traced(3, 8, 16, True)
    with Accelerator() as device:
        model = compile(chain(3, 8, True), backend="aot_eager", limit_bytes=10**9, limit_numel=80)
        optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.5)
        print(model.units[0].device, model.limit_bytes)
        model._follow_optimizer()
        graphs = Graphs("0", "")
        graphs.steps.append(("traced", forward, backward))
        model._lower(graphs)
        print(model.room)
        print(graphs.forward)
        x = torch.ones(16, 8, requires_grad=True)
        f, b = (model.engine.compile(g) for g in (graphs.forward, graphs.backward))
        n = len([n for n in graphs.forward.nodes if n.op == "placeholder"])
        for _ in range(3):
            for unit in model.units: unit.prepare()
            device.sweep()
            print("live", device.live_bytes)
            device.peak_bytes = device.live_bytes
            y = OnDevice.apply(x, (f, b), [None] * (n - 1))
            y.backward(torch.ones_like(y))
            print("peak", device.peak_bytes)
            optimizer.step()
            optimizer.zero_grad()
        held = held_bytes([graphs.forward, graphs.backward], graphs.kept, model.room)
        print(max(map(max, held)), model.room.step_bytes)
        print(device.problems)

if __name__ == "__main__":
    try_device(0)

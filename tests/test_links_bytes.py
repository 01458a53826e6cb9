"""
# Predicted bytes on nodes, on replicas and in encodings are measured bytes, without a tolerance
"""

import os
from contextlib import nullcontext
from itertools import product
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.cases import freeze
from tests.ranks import run
from tests.test_bytes import models
from tests.test_native import collectives
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.comm.encodings import Int4, Int8
from zero3.comm.links import Links
from zero3.estimate.formulas import describe
from zero3.estimate.layouts import Layout
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.estimate.predict import predict

ENCODED = {"weights": Int8(), "gradients": Int4(block=8)}
# The layouts, each with the ranks of a node.
LAYOUTS = {
    "flat on 3 nodes": (Layout(3), 1),
    "flat on uneven nodes": (Layout(3), 2),
    "flat, encoded": (Layout(3, **ENCODED), 2),
    "alone, encoded": (Layout(1, **ENCODED), 1),
    "hybrid 2x2": (Layout(2, replicas=2), 2),
    "hybrid 2x2 on one node": (Layout(2, replicas=2), 4),
    "hybrid 2x2, encoded": (Layout(2, replicas=2, **ENCODED), 2),
    "hybrid 2x1": (Layout(1, replicas=2), 1),
    "hybrid 4x1": (Layout(1, replicas=4), 1),
    "hybrid 3x1, encoded": (Layout(1, replicas=3, **ENCODED), 1),
    "nodes 2x2": (Layout(2, nodes=2), 2),
    "nodes 3x1": (Layout(1, nodes=3), 1),
    "nodes 2x1": (Layout(1, nodes=2), 1),
    "nodes 2x2, weights": (Layout(2, nodes=2, weights=Int8()), 2),
    "nodes 2x2, gradients": (Layout(2, nodes=2, gradients=Int4()), 2),
    "nodes 2x1, gradients": (Layout(1, nodes=2, gradients=Int8()), 1),
}
SECONDARY = {
    "nodes 2x2, secondary": (Layout(2, nodes=2, secondary=True), 2),
    "nodes 2x2, everything": (Layout(2, nodes=2, secondary=True, **ENCODED), 2),
    "nodes 2x1, everything": (Layout(1, nodes=2, secondary=True, **ENCODED), 1),
    "nodes 1x2, everything": (Layout(2, nodes=1, secondary=True, **ENCODED), 2),
}
PLAIN = {"SGD": (torch.optim.SGD, 0, 0), "AdamW": (torch.optim.AdamW, 2, 4)}
# Options of `Zero3Optimizer` and of the layers, their data type, micro-batches, and whether all but
# the last of these are held back.
ZERO3 = {
    "each alone": ({"bucket_bytes": 0}, torch.float32, 1, False),
    "buckets": ({"bucket_bytes": 600}, torch.float32, 1, False),
    "one bucket": ({}, torch.bfloat16, 2, False),
    "fp32 buckets": ({"bucket_bytes": 900, "reduce_dtype": torch.float32}, torch.bfloat16, 2,
                     False),
    "on the CPU": ({"bucket_bytes": 0, "offload": "cpu"}, torch.bfloat16, 1, False),
    "held": ({"bucket_bytes": 600}, torch.bfloat16, 2, True),
    "frozen in 4 bits": ({"bucket_bytes": 0, "frozen": Int4()}, torch.bfloat16, 1, False),
}


def chains():
    """The chains of `test_bytes.py`, and two in which a single layer trains."""
    line = nn.Linear
    return {**models(), "first": [line(7, 40), freeze(line(40, 9)), freeze(line(9, 40))],
            "last": [freeze(line(7, 40)), freeze(line(40, 9)), line(9, 40)]}


def linked(layout):
    """The ranks of a layout. All chains of a call share them, with their process groups."""
    mesh = None
    if layout.groups > 1 or layout.secondary:
        dims = ("replicate" if layout.replicas > 1 else "nodes", "shard")
        mesh = init_device_mesh("cpu", (layout.groups, layout.ranks), mesh_dim_names=dims)
    return Links(mesh, layout.weights, layout.gradients, layout.secondary)


def shard(chain, links, dtype=torch.float32, offload=None):
    """The chain on the ranks of a layout."""
    torch.manual_seed(0)
    return Zero3Sequential([Zero3Layer(module.to(dtype), offload=offload, mesh=links)
                            for module in chains()[chain]])


def train(model, optimizer, micro_batches=1, hold=False):
    """What the second step holds and sends; it has the moments that the first one made."""
    shards = model.get_trainable_chunk()
    for measured in (False, True):
        with Ledger(model, optimizer) if measured else nullcontext() as tape:
            for i in range(micro_batches):
                with optimizer.no_sync() if hold and i + 1 < micro_batches else nullcontext():
                    loss = model(torch.ones(4, 7, dtype=shards[0].dtype)).float().square().mean()
                    getattr(optimizer, "backward", torch.Tensor.backward)(loss)
            grads = sum(shard.grad.nbytes for shard in shards)
            optimizer.step()
            optimizer.zero_grad()
    return (held_bytes(model, optimizer), tape.peak_live_bytes, grads, tape.sent_bytes,
            tape.between_bytes, tape.messages, tape.order_bytes)


def told(p):
    return (p.rest_bytes, p.peak_bytes, p.grad_bytes, p.sent_bytes, p.between_bytes, p.messages,
            p.order_bytes)


def wrong_bytes(layout, ranks_per_node, pairs, native=False):
    """
    Where a `Ledger` measures another number than `predict` says, on this rank. `pairs` are of a
    chain and a kind of training.
    """
    found, links = [], linked(layout)
    where = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_per_node))
    with where, collectives() if native else nullcontext():
        for chain, kind in pairs:
            if kind in PLAIN:
                model = shard(chain, links)
                optimizer_class, moments, step_bytes = PLAIN[kind]
                got = train(model, optimizer_class(model.get_trainable_chunk()), 2)
                rank = model.module_list[0].comm.global_rank
                placed = layout.placed(ranks_per_node, rank, by_messages=not native)
                p = predict(describe(model), placed, moments=moments, step_bytes=step_bytes,
                            micro_batches=2, by_messages=not native)
            else:
                options, dtype, micro_batches, hold = ZERO3[kind]
                options = {**options}
                frozen = options.pop("frozen", None)
                offload = Offload(options.get("offload", "device"), frozen=frozen)
                model = shard(chain, links, dtype, offload)
                optimizer = Zero3Optimizer(model, **options)
                got = train(model, optimizer, micro_batches, hold)
                p = optimizer.predict(micro_batches, hold)
            if got != told(p):
                found.append((chain, kind, got, told(p)))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bytes_of_every_layout_are_predicted(name):
    """
    To the byte, on each rank: rest, peak, gradients, sent bytes and those to other nodes, messages
    and announcements. With micro-batches, buckets, frozen layers, and shards in CPU memory. Breaks
    with a buffer that lives longer, and where a rank is taken to be on another node.
    Proves I2, I3, I4, `predict`, `Layout`, `Layout.of`, `Layout.placed`, `Step`,
    `_Pack`, `Zero3Optimizer.predict`.
    """
    layout, ranks_per_node = LAYOUTS[name]
    pairs = [*product(["frozen"], [*PLAIN, *ZERO3]), *product(["unequal"], ["buckets", "held"])]
    for rank, found in enumerate(run(wrong_bytes, layout.divisor, layout, ranks_per_node, pairs)):
        assert found == [], rank


@pytest.mark.parametrize("name", ["flat, encoded", "hybrid 2x2", "nodes 2x2, gradients"])
def test_the_bytes_of_small_chains_are_predicted_too(name):
    """
    Padding, layers inside of layers, and a single layer that trains, first or last.
    Proves I2, I3, I4, `predict`.
    """
    layout, ranks_per_node = LAYOUTS[name]
    pairs = [*product(chains().keys() - {"frozen", "unequal"}, ["SGD", "buckets", "held"])]
    for rank, found in enumerate(run(wrong_bytes, layout.divisor, layout, ranks_per_node, pairs)):
        assert found == [], rank


@pytest.mark.parametrize("name", SECONDARY)
def test_the_slices_that_a_node_keeps_are_predicted(name):
    """
    From the end of a layer's gather in forward to the start of its gather in backward. Breaks where
    a slice is kept longer, or where backward gathers between nodes.
    Proves I2, I3, I4, `predict`, `Step`.
    """
    layout, ranks_per_node = SECONDARY[name]
    kinds = [kind for kind in (*PLAIN, *ZERO3) if kind != "held"]
    pairs = [*product(["unequal"], kinds), *product(["padding"], ["SGD", "buckets", "one bucket"])]
    for rank, found in enumerate(run(wrong_bytes, layout.divisor, layout, ranks_per_node, pairs)):
        assert found == [], rank


@pytest.mark.parametrize("name", SECONDARY)
def test_a_slice_that_backward_does_not_use_is_freed_at_its_end(name):
    """
    That of a frozen layer below the first that trains; and that of the last layer, which stays full
    and, inside `no_sync`, is not reduced.
    Proves I2, I3, `predict`.
    """
    layout, ranks_per_node = SECONDARY[name]
    pairs = [*product(["frozen", "first", "last"], ["SGD", "buckets", "held"])]
    for rank, found in enumerate(run(wrong_bytes, layout.divisor, layout, ranks_per_node, pairs)):
        assert found == [], rank


@pytest.mark.parametrize("name", ["flat on uneven nodes", "hybrid 2x2", "nodes 2x2", "nodes 2x1",
                                  "flat, encoded",
                                  "hybrid 2x2, encoded", "nodes 2x2, gradients",
                                  "nodes 2x2, secondary"])
def test_the_bytes_of_collectives_are_predicted(name):
    """
    As on an accelerator: rings send everything to the next rank, and gradients are added in place.
    Breaks where a ring is taken to enter a node more than once.
    Proves I4, I9, `predict`, `Layout.placed`, `Group.next_is_far`, `Transfer.count`.
    """
    layout, ranks_per_node = (LAYOUTS | SECONDARY)[name]
    pairs = [*product(["padding"], ["SGD", "each alone", "buckets"])]
    for rank, found in enumerate(run(wrong_bytes, layout.divisor, layout, ranks_per_node, pairs,
                                     True)):
        assert found == [], rank


def wrong_bytes_in_files(layout, folder):
    """The same with shards and states in files; what is read and written is predicted too."""
    found, links = [], linked(layout)
    for chain, bucket_bytes in product(("frozen", "unequal"), (0, 900)):
        offload = Offload("nvme", folder=folder)
        model = shard(chain, links, torch.bfloat16, offload)
        optimizer = Zero3Optimizer(model, bucket_bytes=bucket_bytes, offload=offload)
        for measured in (False, True):
            with Ledger(model, optimizer) if measured else nullcontext() as tape:
                optimizer.backward(model(torch.ones(4, 7).bfloat16()).float().square().mean())
                optimizer.step()
                optimizer.zero_grad()
        p = optimizer.predict()
        got = (held_bytes(model, optimizer), tape.peak_live_bytes, tape.sent_bytes,
               tape.read_bytes, tape.written_bytes)
        want = (p.rest_bytes, p.peak_bytes, p.sent_bytes, p.read_bytes, p.written_bytes)
        if got != want:
            found.append((chain, bucket_bytes, got, want))
    return found


@pytest.mark.parametrize("name", ["hybrid 2x2", "hybrid 3x1, encoded", "nodes 2x2, gradients"])
def test_the_bytes_of_files_in_replicas_and_nodes_are_predicted(name, tmp_path):
    """
    Breaks where a gradient is written before the other nodes' sums are in it.
    Proves I2, I3, I8, `predict`, `Reducer.deliver`.
    """
    layout, _ = LAYOUTS[name]
    for rank, found in enumerate(run(wrong_bytes_in_files, layout.divisor, layout, str(tmp_path))):
        assert found == [], rank

"""
# Bytes on nodes, on replicas and in encodings are those of the formulas, without a tolerance
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
from tests.offload.test_tiers import gathers_of, moved
from tests.ranks import run
from tests.test_bytes import models
from tests.test_native import collectives
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.comm.encodings import Int4, Int8
from zero3.comm.links import Links
from zero3.estimate.between import Layout, between_bytes, layouts, row_bytes
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.estimate.predict import predict_optimizer

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
# Options of `Zero3Optimizer` and of the layers, their data type, micro-batches, and whether all but
# the last of these are held back. Buckets hold one layer each, except in the last three.
KINDS = {
    "each alone": ({"bucket_bytes": 0}, torch.float32, 1, False),
    "fp32 gradients": ({"bucket_bytes": 0, "reduce_dtype": torch.float32}, torch.bfloat16, 2,
                       False),
    "on the CPU": ({"bucket_bytes": 0, "offload": "cpu"}, torch.bfloat16, 1, False),
    "held, each alone": ({"bucket_bytes": 0}, torch.bfloat16, 2, True),
    "buckets": ({"bucket_bytes": 600}, torch.float32, 1, False),
    "one bucket": ({}, torch.bfloat16, 2, False),
    "held": ({"bucket_bytes": 600}, torch.bfloat16, 2, True),
}


def some(number, chains):
    """
    Each chain with two kinds of training, other ones for the next chain and the next layout, so
    that each kind meets most chains and a few layouts of every form.
    """
    kinds = [*KINDS]
    return [(chain, kinds[(number + i + step) % len(kinds)])
            for i, chain in enumerate(chains) for step in (0, 3)]


def chains():
    """The chains of `test_bytes.py`, and two in which a single layer trains."""
    line = nn.Linear
    return {**models(), "first": [line(7, 40), freeze(line(40, 9)), freeze(line(9, 40))],
            "last": [freeze(line(7, 40)), freeze(line(40, 9)), line(9, 40)]}


def linked(layout):
    """The ranks of a layout. All chains of a call share them, with their process groups."""
    mesh = None
    groups = layout.nodes * layout.replicas
    if groups > 1 or layout.secondary:
        dims = ("replicate" if layout.replicas > 1 else "nodes", "shard")
        mesh = init_device_mesh("cpu", (groups, layout.ranks), mesh_dim_names=dims)
    return Links(mesh, layout.weights, layout.gradients, layout.secondary)


def shard(chain, links, dtype=torch.float32, offload=None):
    """The chain on the ranks of a layout."""
    torch.manual_seed(0)
    return Zero3Sequential([Zero3Layer(module.to(dtype), offload=offload, mesh=links)
                            for module in chains()[chain]])


def train(model, optimizer, micro_batches=1, hold=False):
    """The tape of the second step, which has the moments that the first one made."""
    for measured in (False, True):
        with Ledger(model, optimizer) if measured else nullcontext() as tape:
            for i in range(micro_batches):
                with optimizer.no_sync() if hold and i + 1 < micro_batches else nullcontext():
                    x = torch.ones(4, 7, dtype=model.get_trainable_chunk()[0].dtype)
                    optimizer.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return tape


class Sent:
    """What one rank sends: bytes, those to other nodes, messages and announcements"""

    def __init__(self, layout, per_node, rank, native):
        first = rank - rank % layout.ranks
        self.rank, self.per_node, self.native = rank, per_node, native
        self.near = range(first, first + layout.ranks)
        self.across = range(rank % layout.ranks, layout.divisor, layout.ranks)
        self.bytes = self.between = self.messages = self.order = 0

    def to(self, group, nbytes, messages=1, ring=True):
        """Send as many bytes to each other rank of a group. A ring sends all to the next rank."""
        others = len(group) - 1
        node = self.rank // self.per_node
        far = sum(other // self.per_node != node for other in group)
        if self.native and ring:
            after = group[(group.index(self.rank) + 1) % len(group)]
            far = others * (after // self.per_node != node)
        self.bytes += others * nbytes
        self.between += far * nbytes
        self.messages += others * messages
        self.order += 32 * others


def formula(sent, layout, model, reduce_dtype, micro_batches, hold):
    """The formulas in the head of `links.py`, of each hop of each layer"""
    flats = [layer.flats for layer in model.module_list if layer.flats]
    trains = [any(g.shard.requires_grad for g in each) for each in flats]
    down = [*range(trains.index(True), len(flats))]
    for i in range(micro_batches):
        reduces = not hold or i + 1 == micro_batches
        for layer, in_backward in (*product(range(len(flats)), [False]), *product(down[:-1],
                                                                                 [True])):
            row = sum(row_bytes(layout.weights, len(g.shard), g.shard.itemsize)
                      for g in flats[layer])
            if layout.nodes > 1 and not (in_backward and layout.secondary):
                sent.to(sent.across, row, len(flats[layer]))
            sent.to(sent.near, layout.nodes * row, len(flats[layer]))
        for layer in down if reduces else ():
            for g in flats[layer]:
                if g.shard.requires_grad:
                    reduce(sent, layout, len(g.shard), (reduce_dtype or g.shard.dtype).itemsize)
    norms = 8 * sum(g.shard.requires_grad for each in flats for g in each)
    sent.to(sent.near, norms)
    sent.to(sent.across, layout.ranks * norms)


def reduce(sent, layout, numel, width):
    """A gradient inside the group, and then between groups"""
    row = row_bytes(layout.gradients, numel, width)
    sent.to(sent.near, layout.nodes * row, ring=not layout.gradients)
    if layout.nodes == 1 and sent.native and not layout.gradients:
        # An all-reduce in a ring sends the parts of the sums around twice.
        sent.to(sent.across, 2 * numel * width // layout.replicas, 2)
    else:
        sent.to(sent.across, row, ring=not (layout.nodes > 1 and layout.gradients))


def rest_bytes(model, optimizer):
    """Shards, masters, two moments, and the counts of steps"""
    held = sum(g.shard.nbytes for layer in model.module_list for g in layer.flats)
    for states in optimizer.shard_states:
        masters = 2 if states.shard.itemsize == 4 else 3
        held += 4 * masters * len(states.shard) + 4 * len(states.pieces)
    return held


def wrong_bytes(layout, ranks_per_node, pairs, native=False):
    """
    Where a `Ledger` measures another number than a formula says, on this rank. `pairs` are of a
    chain and a kind of training.
    """
    found, links = [], linked(layout)
    where = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(ranks_per_node))
    with where, collectives() if native else nullcontext():
        for chain, kind in pairs:
            options, dtype, micro_batches, hold = KINDS[kind]
            model = shard(chain, links, dtype, Offload(options.get("offload", "device")))
            optimizer = Zero3Optimizer(model, **options)
            tape = train(model, optimizer, micro_batches, hold)
            rank = model.module_list[0].comm.global_rank
            sent = Sent(layout, ranks_per_node, rank, native)
            formula(sent, layout, model, options.get("reduce_dtype"), micro_batches, hold)
            want = [rest_bytes(model, optimizer), sent.bytes, sent.between, sent.messages,
                    sent.order]
            got = [held_bytes(model, optimizer), tape.sent_bytes, tape.between_bytes,
                   tape.messages, tape.order_bytes]
            if options.get("bucket_bytes") != 0:
                # Gradients in a bucket have a message in common, and an encoding rounds their sum.
                want, got = ((each[:1] if layout.gradients or native else each[:3])
                             for each in (want, got))
            if got != want:
                found.append((chain, kind, got, want))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_bytes_of_every_layout_are_those_of_the_formulas(name):
    """
    To the byte, on each rank: rest, sent bytes and those to other nodes, messages and
    announcements. With micro-batches, buckets, frozen layers, and shards in CPU memory. Breaks
    where a rank is taken to be on another node, or a hop sends a row twice.
    Proves I2, I4, `LinkedCommunicator.all_gather`, `LinkedCommunicator.reduce_scatter`,
    `LinkedCommunicator.exchange`, `Transfer.count`, `Layout`, `row_bytes`.
    """
    layout, ranks_per_node = LAYOUTS[name]
    pairs = some([*LAYOUTS].index(name), ["frozen", "unequal"])
    for rank, found in enumerate(run(wrong_bytes, layout.divisor, layout, ranks_per_node, pairs)):
        assert found == [], rank


@pytest.mark.parametrize("name", ["flat, encoded", "hybrid 2x2", "nodes 2x2, gradients"])
def test_the_bytes_of_small_chains_are_those_of_the_formulas_too(name):
    """
    Padding, layers inside of layers, and a single layer that trains, first or last. Gradients are
    held back in every second chain, and in the others with the next layout.
    Proves I2, I4.
    """
    layout, ranks_per_node = LAYOUTS[name]
    small = sorted(chains().keys() - {"frozen", "unequal", "buffers"})
    first = name.startswith("hybrid")
    pairs = [(chain, ["each alone", "held, each alone"][(i + first) % 2])
             for i, chain in enumerate(small)]
    for rank, found in enumerate(run(wrong_bytes, layout.divisor, layout, ranks_per_node, pairs)):
        assert found == [], rank


@pytest.mark.parametrize("name", SECONDARY)
def test_with_a_copy_in_the_node_backward_gathers_inside_it(name):
    """
    Of each layer that backward gathers. Breaks where backward gathers between nodes.
    Proves I2, I4, `LinkedCommunicator.all_gather`.
    """
    layout, ranks_per_node = SECONDARY[name]
    pairs = some([*SECONDARY].index(name), ["unequal", "frozen", "first", "last"])
    for rank, found in enumerate(run(wrong_bytes, layout.divisor, layout, ranks_per_node, pairs)):
        assert found == [], rank


def slices(layout):
    """
    For each chain, bytes above rest: at the end of forward, and at the end of backward; and those
    of the slices, of the last layer and of all gradients
    """
    found, links = [], linked(layout)
    for chain in ("unequal", "frozen", "first", "last"):
        model = shard(chain, links)
        optimizer = Zero3Optimizer(model, bucket_bytes=0)
        tape = train(model, optimizer)
        rest = held_bytes(model, optimizer)
        forward = [e.live_bytes for e in tape.events if e.phase == "forward"][-1] - rest
        optimizer.backward(model(torch.ones(4, 7)).square().mean())
        backward = held_bytes(model, optimizer) - rest
        flats = [g for layer in model.module_list for g in layer.flats]
        kept = layout.nodes * sum(row_bytes(layout.weights, len(g.shard), 4) for g in flats)
        last = sum(g.full.numel() * 4 for g in model.module_list[-1].flats)
        grads = sum(g.shard.nbytes for g in flats if g.shard.requires_grad)
        found.append(((forward, backward), (kept + last, grads)))
    return found


@pytest.mark.parametrize("name", SECONDARY)
def test_a_node_keeps_a_slice_of_each_layer_until_the_end_of_backward_at_most(name):
    """
    In forward the slices of all layers pile up. Those that backward does not use are freed at its
    end: that of a frozen layer below the first that trains, and that of the last layer, which stays
    full. Breaks where a slice is kept longer.
    Proves I2, I3, `LinkedCommunicator.held_tensors`, `LinkedCommunicator.end_pass`.
    """
    layout, _ = SECONDARY[name]
    for rank, found in enumerate(run(slices, layout.divisor, layout)):
        for measured, expected in found:
            assert measured == expected, rank


@pytest.mark.parametrize("name", ["flat on uneven nodes", "hybrid 2x2", "nodes 2x2", "nodes 2x1",
                                  "flat, encoded",
                                  "hybrid 2x2, encoded", "nodes 2x2, gradients",
                                  "nodes 2x2, secondary"])
def test_the_bytes_of_collectives_are_those_of_the_formulas(name):
    """
    As on an accelerator: rings send everything to the next rank, and gradients are added in place.
    Breaks where a ring is taken to enter a node more than once.
    Proves I4, I9, `Group.next_is_far`, `Transfer.count`.
    """
    layout, ranks_per_node = (LAYOUTS | SECONDARY)[name]
    pairs = [*product(["padding"], ["each alone", "held, each alone", "buckets"])]
    for rank, found in enumerate(run(wrong_bytes, layout.divisor, layout, ranks_per_node, pairs,
                                     True)):
        assert found == [], rank


def left_a_node(nodes, layout, native):
    """What this rank sends to other nodes in a step of three layers, without norms"""
    where = mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(layout.divisor // nodes))
    with where, collectives() if native else nullcontext():
        model = Zero3Sequential([Zero3Layer(nn.Linear(7, 7).bfloat16(), mesh=linked(layout))
                                 for _ in range(3)])
        optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, bucket_bytes=0)
        tape = train(model, optimizer)
    return sum(e.between_bytes for e in tape.events if e.event != "norm")


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("name", layouts(4, 2))
def test_the_bytes_that_leave_a_node_are_those_of_the_table(name, native):
    """
    All that the ranks of a node send to the other node, in half precision, for each layout that
    `between.py` compares. Breaks where one line of its table has another count.
    Proves I4, `between_bytes`, `layouts`, `Transfer.count`, `Ledger.between_bytes`.
    """
    layout = layouts(4, 2)[name]
    sent = run(left_a_node, 4, 2, layout, native)
    for node in (sent[:2], sent[2:]):
        assert sum(node) == between_bytes(layout, 2, 56, 3, by_messages=not native)


def refused():
    """What an error says of each layout, if its bytes cannot be predicted"""
    said = []
    for layout in (Layout(1, nodes=2), Layout(1, replicas=2), Layout(2, weights=Int8()),
                   Layout(2, gradients=Int4())):
        with pytest.raises(RuntimeError) as caught:
            predict_optimizer(Zero3Optimizer(shard("one", linked(layout))))
        said.append(f"{caught.value}")
    frozen = shard("frozen", linked(Layout(2)), offload=Offload(frozen=Int8()))
    with pytest.raises(RuntimeError) as caught:
        predict_optimizer(Zero3Optimizer(frozen))
    return [*said, f"{caught.value}"]


def test_nodes_replicas_and_encodings_are_not_predicted():
    """
    An error says so, and what to do. Breaks where a number is told that misses a hop.
    Proves `predict_optimizer`.
    """
    for said in run(refused, 2):
        assert len(said) == 5
        assert all("cannot predict. Expected: one group of ranks, without encodings, and an "
                   "elementwise step. Got: nodes, replicas, encodings, split parameters or "
                   "owners of whole parameters. What to do: measure with `Ledger`." in each
                   for each in said), said


def wrong_bytes_in_files(layout, folder):
    """The same with shards and states in files, and what is read and written."""
    found, links = [], linked(layout)
    for chain, bucket_bytes in product(("frozen", "unequal"), (0, 900)):
        offload = Offload("nvme", folder=folder)
        model = shard(chain, links, torch.bfloat16, offload)
        optimizer = Zero3Optimizer(model, bucket_bytes=bucket_bytes, offload=offload)
        tape = train(model, optimizer)
        # Five shards fit into the buffers, so their states are not read.
        read, _, written = moved(model, optimizer, gathers_of(model))
        got = (tape.read_bytes, tape.written_bytes)
        if got != (read, written):
            found.append((chain, bucket_bytes, got, (read, written)))
    return found


@pytest.mark.parametrize("name", ["hybrid 2x2", "hybrid 3x1, encoded", "nodes 2x2, gradients"])
def test_the_bytes_of_files_in_replicas_and_nodes_are_those_of_the_formulas(name, tmp_path):
    """
    Breaks where a gradient is written before the other nodes' sums are in it.
    Proves I2, I3, I8, `Reducer.deliver`.
    """
    layout, _ = LAYOUTS[name]
    for rank, found in enumerate(run(wrong_bytes_in_files, layout.divisor, layout, str(tmp_path))):
        assert found == [], rank

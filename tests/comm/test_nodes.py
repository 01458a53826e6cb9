"""
# Nodes: the slow link between them, and the bytes that cross it

The oracle is the kernel, which counts what each node sends to the others.
"""

import math
import os
import shutil
import subprocess
import sys
import time
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests import nodes
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.comm.encodings import Int4, Int8
from zero3.comm.links import Links
from zero3.estimate.ledger import Ledger
from zero3.train import launch

needs_nodes = pytest.mark.skipif(bool(nodes.why_not()), reason=nodes.why_not())
WIDTH = 1024
LAYERS = 4
MIB = 2**20


# ------------------------------------------------------------------------------------- the testbed


def where():
    """This rank's network, its numbers, and those that torchrun would give it."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    network = os.stat("/proc/self/ns/net").st_ino
    return network, dist.get_rank(), [int(os.environ[name]) for name in names]


@needs_nodes
def test_the_ranks_of_a_node_share_a_network_and_have_the_numbers_that_torchrun_gives():
    """
    Breaks where a rank enters another node, or none.
    """
    for count, ranks_each in ((2, 2), (3, 1)):
        with nodes.nodes(count, ranks_each) as testbed:
            answers = testbed.run(where)
        networks = [network for network, *_ in answers]
        assert len({*networks, os.stat("/proc/self/ns/net").st_ino}) == count + 1
        for rank, (network, own, told) in enumerate(answers):
            node, local = divmod(rank, ranks_each)
            assert network == networks[node * ranks_each] and own == rank
            assert told == [rank, count * ranks_each, local, ranks_each, node]


def exchange(mib, across):
    """
    Each rank sends as much to one other, which is on another node or on the same.

    Returns when it began, when it ended, and what this node has sent, of each of three times.
    """
    data = torch.zeros(mib * MIB, dtype=torch.uint8)
    received = torch.empty_like(data)
    # Four ranks in two nodes: 0 1 and 2 3.
    peer = dist.get_rank() ^ (2 if across else 1)
    found = []
    for _ in range(3):
        before = nodes.between_nodes()
        # A clock that all processes of this machine share.
        start_s = time.monotonic()
        for work in [dist.irecv(received, peer), dist.isend(data, peer)]:
            work.wait()
        end_s = time.monotonic()
        found.append((start_s, end_s, nodes.between_nodes().since(before)))
    return found


@needs_nodes
def test_the_link_between_nodes_is_never_faster_than_its_rate_and_drops_nothing():
    """
    A token bucket passes at most its rate times the time, and once its burst. The time is from the
    first rank's start to the last rank's end, so a busy machine only makes the link slower.
    """
    mib, mbit = 12, 200
    with nodes.nodes(mbit=mbit) as testbed:
        answers = testbed.run(exchange, mib, True)
        dropped = testbed.dropped_packets()
    for times in zip(*answers, strict=True):
        took_s = max(end_s for _, end_s, _ in times) - min(start_s for start_s, _, _ in times)
        # A node sends the data of two ranks.
        assert 2 * mib * MIB <= 1.001 * (mbit * 1e6 / 8 * took_s + nodes.BURST_BYTES)
    assert dropped == [0, 0]


@needs_nodes
def test_the_kernel_counts_what_nodes_send_each_other_and_nothing_else():
    """
    To a thousandth, with headers and acknowledgements subtracted. Ranks of one node send each other
    nothing over the link. Breaks where gloo uses an interface of another address inside a node.
    """
    mib = 12
    with nodes.nodes(mbit=2000) as testbed:
        before = testbed.link_bytes()
        across = testbed.run(exchange, mib, True)
        after = testbed.link_bytes()
        inside = testbed.run(exchange, mib, False)
    for found in across:
        for *_, sent in found:
            assert sent.payload_bytes == pytest.approx(2 * mib * MIB, rel=1e-3)
            assert sent.sent_bytes == pytest.approx(2 * mib * MIB, rel=1e-2)
    for first, last in zip(before, after, strict=True):
        # With the messages of the barriers, and those by which the ranks find each other.
        assert last.since(first).payload_bytes == pytest.approx(3 * 2 * mib * MIB, rel=1e-2)
    for found in inside:
        assert max(sent.sent_bytes for *_, sent in found) < 2e-3 * mib * MIB


def fails(how):
    if dist.get_rank() == 3:
        if how == "raises":
            raise ValueError("no such thing")
        os._exit(3)
    dist.barrier()


def interfaces():
    """The network of the machine itself."""
    return subprocess.check_output(["ip", "-o", "address"], text=True)


def users(networks):
    """The processes that are in one of these networks, or have it open."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            files = [process / "ns/net", *(process / "fd").iterdir()]
            here = {os.stat(file).st_ino for file in files if file.exists()}
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if here & networks:
            found.append(int(process.name))
    return found


@needs_nodes
@pytest.mark.parametrize("how", ["raises", "leaves"])
def test_an_error_on_a_rank_is_told_and_nothing_stays_behind(how):
    """
    Not with the file of a namespace left open, nor with a rank that waits for the lost one.
    """
    before = interfaces()
    said = {"raises": "no such thing", "leaves": "rank 3: the process ended without an answer"}
    with pytest.raises(AssertionError, match=said[how]), nodes.nodes() as testbed:
        networks = {os.fstat(fd).st_ino for fd in testbed.fds}
        assert users(networks) == [os.getpid()]
        testbed.run(fails, how)
    assert not users(networks) and interfaces() == before


def sleeps_on_nodes(told):
    """A process that is killed: its nodes, on which ranks wait."""
    # It has been forked itself, and would start another server.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running
    with nodes.nodes() as testbed:
        told.send({os.fstat(fd).st_ino for fd in testbed.fds})
        testbed.run(sleep)


def sleep():
    """Two ranks of each node wait for a message that never comes, and two only sleep."""
    if dist.get_rank() % 2:
        time.sleep(100)
    dist.recv(torch.zeros(1), src=dist.get_rank() + 1)


@needs_nodes
def test_nothing_stays_behind_after_a_kill():
    """
    The ranks notice that the process that started them has ended, and the nodes end with them.
    Breaks where nothing watches it: the ranks would wait for a minute and more.
    """
    before = interfaces()
    told, theirs = launch._CONTEXT.Pipe(duplex=False)
    process = launch._CONTEXT.Process(target=sleeps_on_nodes, args=(theirs,))
    process.start()
    theirs.close()
    networks = told.recv()
    while len(users(networks)) < 5:
        assert process.is_alive()
        time.sleep(0.1)
    process.kill()
    process.join()
    deadline_s = time.monotonic() + 10
    while users(networks) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not users(networks) and interfaces() == before


def test_a_machine_without_the_means_says_what_is_missing(monkeypatch):
    """
    The tests that need nodes are skipped with this reason.
    """
    why_not = nodes.why_not.__wrapped__
    with monkeypatch.context() as on_linux:
        on_linux.setattr(sys, "platform", "linux")
        on_linux.setattr(os, "geteuid", lambda: 0)
        on_linux.setattr(shutil, "which", lambda program: None)
        assert why_not() == "nodes need ip and tc, of the package iproute2"
        on_linux.setattr(os, "geteuid", lambda: 1000)
        assert why_not() == "only root can make nodes"
        on_linux.setattr(sys, "platform", "darwin")
        assert why_not() == "nodes need Linux"


@needs_nodes
@pytest.mark.parametrize("flag, reason", [
    (0, "still in the one of the process"), (1, "Invalid argument")])
def test_a_machine_that_makes_no_namespace_keeps_its_network(flag, reason, monkeypatch):
    """
    The kernel refuses, or does something else than it was asked for. Breaks where the testbed then
    builds its nodes in the network of the machine.
    """
    before = interfaces()
    monkeypatch.setattr(nodes, "CLONE_NEWNET", flag)
    # Nothing may be configured, even if the check that this test is about were missing.
    monkeypatch.setattr(nodes, "_configure", lambda *_: pytest.fail("it configures a network"))
    assert nodes.why_not.__wrapped__() == f"cannot make a network namespace: {reason}"
    assert interfaces() == before


# ------------------------------------------------------------------------- bytes of a training step


# The first dimension of the mesh, if there is one, and the rest of `Links`.
LAYOUTS = {
    "flat": (None, {}),
    "flat, encoded": (None, {"weights": Int8(), "gradients": Int4()}),
    "hybrid": ("replicate", {}),
    "hybrid, encoded": ("replicate", {"gradients": Int4()}),
    "nodes": ("nodes", {}),
    "nodes, copies inside": ("nodes", {"secondary": True}),
    "nodes, encoded": ("nodes", {"weights": Int8(), "gradients": Int4()}),
    "ZeRO++": ("nodes", {"weights": Int8(), "gradients": Int4(), "secondary": True}),
}


def expected_bytes(count, ranks_each, first, weights=None, gradients=None, secondary=False):
    """
    ## The bytes that a rank sends to other nodes in a step, by formula

    Without a mesh it sends its shard to each rank there, otherwise to one rank of each node. A
    replica on each node gathers nothing from there, and copies inside the node replace the gathers
    of backward. The last layer is gathered once in any case.
    """
    shards = ranks_each if first == "replicate" else count * ranks_each
    numel = math.ceil((WIDTH * WIDTH + WIDTH) / shards)
    gathers = 0 if first == "replicate" else LAYERS if secondary else 2 * LAYERS - 1
    weight_bytes = weights.nbytes(numel) if weights else 4 * numel
    gradient_bytes = gradients.nbytes(numel) if gradients else 4 * numel
    receivers = (count - 1) * (ranks_each if first is None else 1)
    # The norms of all shards of the node to each other node, or those of one rank to each rank.
    norm_bytes = (count - 1) * ranks_each * 8 * LAYERS
    return receivers * (gathers * weight_bytes + LAYERS * gradient_bytes) + norm_bytes


def steps_between_nodes(shape):
    return [step_between_nodes(shape, *layout) for layout in LAYOUTS.values()]


def step_between_nodes(shape, first, options):
    """What this node sends to the others in the second training step, and this rank's ledger."""
    mesh = None
    if first is not None:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=(first, "shard"))
    links = Links(mesh, **options)
    torch.manual_seed(0)
    model = Zero3Sequential(
        [Zero3Layer(nn.Linear(WIDTH, WIDTH), mesh=links) for _ in range(LAYERS)])
    optimizer = Zero3Optimizer(model, bucket_bytes=0)
    x = torch.randn(2, WIDTH)
    for _ in range(2):
        before = nodes.between_nodes()
        with Ledger(model, optimizer) as tape:
            optimizer.backward(model(x).square().mean())
            optimizer.step()
        optimizer.zero_grad()
        sent = nodes.between_nodes().since(before)
    return sent, tape.between_bytes


@needs_nodes
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (3, 1)])
def test_a_step_sends_between_nodes_what_the_formula_says(shape):
    """
    The ledger's count to the byte, and the kernel's to half a hundredth, because announcements and
    the headers of gloo's messages come on top. Breaks where a shard enters a node twice, where
    backward gathers from other nodes in spite of a copy, and where numbers that should be encoded
    cross the link as they are.
    Proves I4, `Ledger`, `Links`, `Communicator.all_gather`, `Communicator.reduce_scatter`,
    `LinkedCommunicator.exchange`, `LinkedCommunicator.all_gather`, `LinkedCommunicator.exchange`.
    """
    count, ranks_each = shape
    with nodes.nodes(count, ranks_each, mbit=2000) as testbed:
        answers = testbed.run(steps_between_nodes, shape)
    for found in answers:
        for (name, (first, options)), (sent, ledger_bytes) in zip(LAYOUTS.items(), found,
                                                                  strict=True):
            expected = expected_bytes(count, ranks_each, first, **options)
            assert ledger_bytes == expected, name
            assert sent.payload_bytes == pytest.approx(ranks_each * expected, rel=5e-3), name

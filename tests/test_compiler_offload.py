"""
# Optimizer states that leave for a while: the pass over graphs, and who carries it out

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
from torch import fx, nn

import zero3
from tests.ranks import run
from tests.streams import Accelerator, before
from zero3 import Zero3Optimizer
from zero3.compiler import model as compiled
from zero3.compiler.away import StatesAway
from zero3.compiler.engines import Inductor, regions_of
from zero3.compiler.graph import find, linked, offload, reload, vacate
from zero3.compiler.model import CompiledUnit, compile
from zero3.compiler.passes import improve
from zero3.compiler.room import LayerBytes, Room, held_bytes, offload_states
from zero3.compiler.trace import Graphs
from zero3.measure.ledger import Ledger
from zero3.train import launch


def chain(layers=3, width=2, bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(layers))).to(dtype)


@functools.cache
def traced(layers, width=2, rows=4, bias=False, dtype=torch.float32):
    """The graphs of a chain before any pass, and what each layer has in full"""
    model = compile(chain(layers, width, bias, dtype), backend="aot_eager")
    model(torch.ones(rows, width, dtype=dtype)).sum().backward()
    (graphs,) = model.graphs
    _, forward, backward = graphs.steps[0]
    return forward, backward, model.numel


def planned(layers, bucket=0, limit=4, **options):
    """The graphs after the other passes, and the layers that are kept for backward"""
    forward, backward, numel = traced(layers, **options)
    steps, kept = improve(forward, backward, numel, limit, bucket)
    return steps[-1][1], steps[-1][2], kept


def most(graphs, kept, room):
    return max(max(column) for column in held_bytes(graphs, kept, room))


def names(graph, kind):
    return [node.args[0] for node in find(graph, kind)]


def least_limit(forward, backward, kept, room):
    """The lowest limit that can be kept: that of all states away as long as possible"""
    graphs = offload_states(forward, backward, kept, room._replace(limit_bytes=1))
    return most([graph for graph in graphs if graph is not None], kept, room)


# ---------------------------------------------------------------------------------------- the pass


def room_of(states, limit, rest=48):
    """Layers of four fp32 weights, with these bytes of states, on two ranks"""
    layers = {str(i): LayerBytes(16, 16, 8, each) for i, each in enumerate(states)}
    return Room({**layers, "root": LayerBytes(0, 0, 0, 0)}, rest, 0, limit)


def test_the_bytes_of_the_example_are_those_of_the_text():
    """
    The table at the head of `room.py`, row by row. Breaks if a tensor is counted twice, or freed at
    another operation.
    Proves `held_bytes`, `LayerBytes`, `Room`, `offload_states`.
    """
    forward, backward, kept = planned(2)
    room = room_of([32, 32], 240)
    assert most([forward, backward], kept, room) == 272
    pair = offload_states(forward, backward, kept, room)
    held = held_bytes([*pair], kept, room)
    rows = [{node.name: nbytes for node, nbytes in zip(graph.nodes, column, strict=True)}
            for graph, column in zip(pair, held, strict=True)]
    assert [rows[0][name] for name in ("offload", "mm", "mm_1", "vacate")] == [144, 192, 224, 240]
    assert [rows[1][name] for name in (
        "mm_2", "mm_3", "collect_1", "mm_4", "collect", "finish", "reload", "finish_1")
        ] == [240, 240, 240, 240, 224, 216, 224, 232]
    assert room.step_bytes == 48 + 64


@pytest.mark.parametrize("states, bucket, limit", [
    ([32, 32], 0, 4), ([8, 64, 16, 32], 0, 4), ([8, 64, 16, 32], 0, 8),
    ([32, 0, 32, 64], 8, 12), ([64, 32, 8, 8], 64, 64)])
def test_as_few_states_leave_as_the_limit_admits_and_no_operation_exceeds_it(
        states, bucket, limit):
    """
    Each limit from the lowest that can be kept to that of no offload. The oracle is arithmetic: the
    peak without states, and the states of the layers that are stepped last. Breaks if a layer
    leaves too late, comes back too early, or leaves although there is room.
    Proves `offload_states`, `_insert_vacates`, `_insert_offloads`, `_insert_reloads`.
    """
    forward, backward, kept = planned(len(states), bucket, limit)
    room = room_of(states, 0)
    top = most([forward, backward], kept, room)
    least = least_limit(forward, backward, kept, room)
    assert least < top
    order = [str(i) for i, each in reversed([*enumerate(states)]) if each]
    for limit_bytes in range(least, top + 1):
        room = room._replace(limit_bytes=limit_bytes)
        first, second = offload_states(forward, backward, kept, room)
        assert most([first, second], kept, room) <= limit_bytes
        gone = names(first, offload)
        count = next(n for n in range(len(order) + 1)
                     if top - sum(states[int(i)] for i in order[:n]) <= limit_bytes)
        assert gone == order[:count]
        assert names(first, vacate) + names(second, vacate) == gone
        assert names(second, reload) == gone[::-1] and not names(first, reload)
    assert not gone and [*map(str, first.nodes)] == [*map(str, forward.nodes)]
    # Below that limit, all of them leave, and it is still exceeded.
    room = room._replace(limit_bytes=least - 1)
    pair = offload_states(forward, backward, kept, room)
    assert most([*pair], kept, room) > least - 1


@pytest.mark.parametrize("states, bucket, limit", [([32, 32, 32], 0, 4), ([8, 64, 16], 64, 64)])
def test_states_come_back_as_soon_as_there_is_room(states, bucket, limit):
    """
    One operation earlier, a layer would exceed the limit, or come back before another one has gone.
    Breaks if `reload` waits for the end of backward.
    Proves `_insert_reloads`, `_states_bytes`.
    """
    forward, backward, kept = planned(len(states), bucket, limit)
    room = room_of(states, 0)
    top = most([forward, backward], kept, room)
    early = 0
    for limit_bytes in range(least_limit(forward, backward, kept, room), top):
        room = room._replace(limit_bytes=limit_bytes)
        pair = offload_states(forward, backward, kept, room)
        held = held_bytes([*pair], kept, room)[1]
        nodes = [*pair[1].nodes]
        for node in find(pair[1], reload):
            at = nodes.index(node)
            earlier = nodes[at - 1]
            early += node.next.op != "output"
            if earlier.op != "placeholder" and earlier.target not in (vacate, reload):
                later = max(held[at:])
                more = sum(room.layers[n.args[0]].states
                           for n in nodes[at + 1 :] if n.target is reload)
                assert later <= limit_bytes
                assert held[at - 1] + room.layers[node.args[0]].states + more > limit_bytes or (
                    held[at - 1] + room.layers[node.args[0]].states > limit_bytes)
    assert early


def test_the_pass_changes_no_region():
    """
    Inductor fuses what stands between two communications. Breaks if `vacate` stands in the middle:
    other regions may round in another way.
    Proves `_begin_of_region`, `_is_border`, `regions_of`.
    """
    forward, backward, kept = planned(3, width=4, bias=True, limit=20)
    room = Room({str(i): LayerBytes(80, 80, 40, 80) for i in range(3)}, 100, 0, 0)
    room.layers["root"] = LayerBytes(0, 0, 0, 0)
    top = most([forward, backward], kept, room)
    moved = 0
    for limit_bytes in range(least_limit(forward, backward, kept, room), top, 8):
        pair = offload_states(forward, backward, kept, room._replace(limit_bytes=limit_bytes))
        moved += len(names(pair[0], vacate) + names(pair[1], vacate))
        for old, new in zip((forward, backward), pair, strict=True):
            assert [[*map(str, region)] for region in regions_of(new)] == (
                [[*map(str, region)] for region in regions_of(old)])
    assert moved


def test_without_gradients_states_come_back_in_the_same_graph():
    """
    An evaluation has no backward. Breaks if states stay away after it.
    Proves `offload_states`, `_storages_of_caller`.
    """
    forward, _, _ = planned(3)
    room = room_of([32, 32, 32], 0)
    least = least_limit(forward, None, [], room)
    first, second = offload_states(forward, None, [], room._replace(limit_bytes=least))
    assert second is None
    assert names(first, offload) == names(first, vacate) == names(first, reload)[::-1] != []


# ---------------------------------------------------------------------------------------- training


@contextmanager
def memory_of_its_own():
    """The CPU is told that its memory is that of a device"""
    with mock.patch.object(compiled, "has_own_memory", lambda device: True):
        yield


def tight(model, x):
    """Trace a model without a limit that matters, then give it the lowest one"""
    model(x).float().square().mean().backward()
    (graphs,) = model.graphs
    _, forward, backward = graphs.steps[-2]
    assert not names(graphs.forward, offload)
    room = model.room
    model.limit_bytes = max(room.step_bytes, least_limit(forward, backward, graphs.kept, room))
    return model.limit_bytes


def make(dtype, backend, limited, **options):
    limit_bytes = 1 << 40 if limited else None
    model = compile(chain(4, 8, True, dtype), backend=backend, limit_numel=160,
                    limit_bytes=limit_bytes)
    optimizer = Zero3Optimizer(model, lr=0.1, **options)
    return model, optimizer


def fails(*_):
    raise ValueError("planted")


def everything(dtype, backend, limited, options):
    """The states of a run in which states are away at all kinds of moments"""
    found, moves = [], []

    def state():
        kept = optimizer.state_dict()
        found.append([*kept["masters"], *(value for each in kept["state"].values()
                                         for value in each.values())])
        found[-1] = [torch.as_tensor(each).clone() for each in found[-1]]
        return copy.deepcopy(kept)

    with memory_of_its_own():
        model, optimizer = make(dtype, backend, limited, **options)
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)
        if limited:
            tight(model, x)
        else:
            model(x).float().square().mean().backward()
        optimizer.zero_grad()

        def loss(rows=x):
            return model(rows).float().square().mean()

        def step():
            optimizer.backward(loss())
            optimizer.step()
            optimizer.zero_grad()

        with Ledger(model, optimizer) as tape:
            step()
            first = state()
            # Forward without backward; then an evaluation in between; then the step.
            loss()
            step()
            kept = loss()
            with torch.no_grad():
                loss()
            with torch.inference_mode():
                loss()
            kept.backward()
            optimizer.step()
            optimizer.zero_grad()
            state()
            # Somebody looks, and loads, while states are away.
            kept = loss()
            state()
            kept.backward()
            optimizer.load_state_dict(first)
            optimizer.step()
            optimizer.zero_grad()
            # An exception in backward.
            kept = loss()
            with mock.patch.object(CompiledUnit, "collect", fails):
                with pytest.raises(ValueError, match="planted"):
                    kept.backward()
            optimizer.zero_grad()
            step()
            # Micro-batches: each moves the states once more.
            with optimizer.no_sync():
                optimizer.backward(loss(x[:8]))
            optimizer.backward(loss(x[8:]))
            optimizer.step()
            state()
        moves = [event.event for event in tape.events]
    return found, {kind: moves.count(kind) for kind in ("offload", "vacate", "reload", "step")}


def compared(dtype, backend, options):
    limited, moves = everything(dtype, backend, True, options)
    plain, no_moves = everything(dtype, backend, False, options)
    same = [torch.equal(a, b) for mine, theirs in zip(limited, plain, strict=True)
            for a, b in zip(mine, theirs, strict=True)]
    return same, moves, no_moves


COMPILERS = [
    (torch.float32, "aot_eager", {}), (torch.bfloat16, "aot_eager", {"bucket_bytes": 0}),
    (torch.float32, "inductor", {})]


@pytest.mark.parametrize("dtype, backend, options", COMPILERS)
def test_training_with_states_away_is_training_without_to_the_bit(dtype, backend, options):
    """
    The same run with the lowest limit and without one, on two ranks: forward without backward, an
    evaluation in between, a look at the states and a load while they are away, an exception in
    backward, and micro-batches. Breaks if a step does not bring the states back first.
    Proves I1, `StatesAway.leave`, `StatesAway.vacate`, `StatesAway.reload`, `StatesAway.back`,
    `ShardStates.bring_back`, `ShardStates.put_master`, `CompiledUnit.offload_states`,
    `CompiledUnit.vacate_states`, `CompiledUnit.reload_states`.
    """
    if backend == "inductor" and Inductor.missing(torch.device("cpu")):
        pytest.skip("needs a C++ compiler")
    for same, moves, no_moves in run(compared, 2, dtype, backend, options):
        assert len(same) > 20 and all(same)
        assert moves["step"] == no_moves["step"] > 0
        assert moves["offload"] >= moves["vacate"] >= moves["reload"] > 8
        assert no_moves["offload"] == no_moves["vacate"] == no_moves["reload"] == 0


if __name__ == "__main__":
    pass

"""
# Optimizer states that leave for a while: the pass over graphs, and who carries it out

The pass is pure, so most of it is proven on graphs. Training runs on the CPU, which is told to have
memory of its own, and on the accelerator that is not there (`tests/streams.py`).
"""

import copy
import functools
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
from zero3.compiler.away import StatesAway, states_on_device
from zero3.compiler.engines import Inductor, regions_of
from zero3.compiler.graph import find, linked, offload, reload, vacate
from zero3.compiler.model import CompiledUnit, compile
from zero3.compiler.passes import improve
from zero3.compiler.room import LayerBytes, Room, held_bytes, offload_states
from zero3.compiler.trace import Graphs
from zero3.estimate.ledger import Ledger
from zero3.train import launch


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Dynamo compiles the code of a module a few times, and no more, for all models together"""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def chain(layers=3, width=2, bias=False, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=bias) for _ in range(layers))).to(dtype)


@functools.cache
def traced(layers, width=2, rows=4, bias=False, dtype=torch.float32):
    """The graphs of a chain before any pass, and what each layer has in full"""
    # Other numbers of rows, in a test before, would make their number an input of the graphs.
    torch.compiler.reset()
    model = compile(chain(layers, width, bias, dtype), backend="aot_eager", bucket_bytes=0)
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
    Proves `room.held_bytes`, `LayerBytes`, `Room`, `offload_states`.
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
    model = compile(chain(3), backend="aot_eager", limit_numel=4)
    with torch.no_grad():
        model(torch.ones(4, 2))
    (graphs,) = model.graphs
    forward = graphs.forward
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
    torch._dynamo.reset()
    limited, moves = everything(dtype, backend, True, options)
    plain, no_moves = everything(dtype, backend, False, options)
    same = [torch.equal(a, b) for mine, theirs in zip(limited, plain, strict=True)
            for a, b in zip(mine, theirs, strict=True)]
    return same, moves, no_moves


@pytest.mark.parametrize("ranks, dtype, backend, options", [
    (2, torch.float32, "aot_eager", {}),
    (1, torch.bfloat16, "aot_eager", {"reduce_dtype": torch.float32}),
    (1, torch.bfloat16, "inductor", {})])
def test_training_with_states_away_is_training_without_to_the_bit(ranks, dtype, backend, options):
    """
    The same run with the lowest limit and without one: forward without backward, an
    evaluation in between, a look at the states and a load while they are away, an exception in
    backward, and micro-batches. Breaks if a step does not bring the states back first.
    Proves I1, `StatesAway.leave`, `StatesAway.vacate`, `StatesAway.reload`, `StatesAway.back`,
    `StatesAway.optimizer`, `StatesAway.shard_states`, `away.Part`, `away.Place`, `away.aligned`,
    `states.Away`, `graph.offload`, `graph.vacate`, `graph.reload`,
    `ShardStates.bring_back`, `ShardStates.put_master`, `CompiledUnit.offload_states`,
    `CompiledUnit.vacate_states`, `CompiledUnit.reload_states`.
    """
    if backend == "inductor" and Inductor.missing(torch.device("cpu")):
        pytest.skip("needs a C++ compiler")
    for same, moves, no_moves in run(compared, ranks, dtype, backend, options):
        assert len(same) > 20 and all(same)
        assert moves["step"] == no_moves["step"] > 0
        assert moves["offload"] >= moves["vacate"] >= moves["reload"] > 8
        assert no_moves["offload"] == no_moves["vacate"] == no_moves["reload"] == 0


def ledger_of_a_step(limited):
    """Each event of the last step: what, whose, in which phase, and the live bytes after it"""
    with memory_of_its_own():
        model, optimizer = make(torch.bfloat16, "aot_eager", limited, fused=False)
        x = torch.ones(16, 8, dtype=torch.bfloat16)
        if limited:
            tight(model, x)
            optimizer.zero_grad()
        for _ in range(2):
            with Ledger(model, optimizer) as tape:
                optimizer.backward(model(x).float().square().mean())
                optimizer.step()
            optimizer.zero_grad()
    states_bytes = [model.room.layers[str(i)].states for i in range(4)] if limited else []
    graphs = model.graphs[-1]
    gone = names(graphs.forward, offload)
    return [(e.event, e.layer, e.phase, e.bytes, e.live_bytes) for e in tape.events], (
        gone, states_bytes, optimizer.comm.broken)


def test_the_order_of_events_and_the_bytes_of_a_ledger():
    """
    Copies begin with forward, memory is freed before the operation that needs it, and is back
    before the step. In between a rank holds less, by the bytes of the states: master and moments,
    12 for each element of a shard. Breaks if somebody keeps a reference to a tensor that has left.
    Proves I8, `StatesAway.vacate`, `StatesAway.held_tensors`, `CompiledUnit.held_tensors`,
    `layer_bytes`, `room_for`.
    """
    events, (gone, states_bytes, _) = ledger_of_a_step(True)
    plain, _ = ledger_of_a_step(False)
    moves = [(event, layer.partition("(")[2].strip(")"), phase)
             for event, layer, phase, *_ in events if event in ("offload", "vacate", "reload")]
    assert gone in (["3", "2", "1"], ["3", "2"]) and states_bytes == [12 * 72] * 4
    assert moves[: len(gone)] == [("offload", layer, "forward") for layer in gone]
    assert [layer for event, layer, _ in moves if event == "vacate"] == gone
    assert [layer for event, layer, _ in moves if event == "reload"] == gone[::-1]
    assert {phase for event, _, phase in moves if event == "reload"} == {"backward"}
    kinds = [event[0] for event in events]
    last = len(kinds) - kinds[::-1].index("reload")
    assert "reduced" in kinds[:last] and kinds.index("step") > last
    # The other events are those of a run without a limit, with fewer bytes meanwhile.
    away = 0
    others = iter(plain)
    for event, layer, phase, nbytes, live_bytes in events:
        if event in ("offload", "vacate", "reload"):
            assert nbytes == 12 * 72
            away += {"offload": 0, "vacate": nbytes, "reload": -nbytes}[event]
            continue
        theirs = next(others)
        assert theirs[:3] == (event, layer, phase)
        assert live_bytes == theirs[4] - away
    assert away == 0


def test_a_checkpoint_finds_states_that_are_away(tmp_path):
    """
    Saved between forward and backward, on purpose, and loaded while states of another run are away.
    Breaks if a checkpoint reads tensors without elements.
    Proves `ShardStates.bring_back`, `StatesAway.back`.
    """
    x = torch.ones(16, 8, dtype=torch.bfloat16)
    with memory_of_its_own():
        runs = [make(torch.bfloat16, "aot_eager", True) for _ in range(2)]
        model, optimizer = runs[0]
        tight(model, x)
        optimizer.step()
        optimizer.zero_grad()
        optimizer.backward(model(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
        expected = copy.deepcopy(optimizer.state_dict())
        loss = model(x).float().square().mean()
        assert any(unit.away.phase == "away" for unit in model.units)
        zero3.save(tmp_path, model, optimizer, step=1)
        optimizer.backward(loss)
        optimizer.zero_grad()
        other, others = runs[1]
        tight(other, x)
        others.zero_grad()
        loss = other(x).float().square().mean()
        assert any(unit.away.phase == "away" for unit in other.units)
        zero3.load(tmp_path, other, others)
        found = others.state_dict()
    pairs = zip(expected["masters"], found["masters"], strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    for i, known in expected["state"].items():
        assert all(torch.equal(value, found["state"][i][key]) for key, value in known.items())


# ---------------------------------------------------------------- the accelerator that is not there


SHAPE = (3, 8, 16, True, torch.bfloat16)


class OnDevice(torch.autograd.Function):
    """Carry out two graphs as autograd would: Dynamo does not trace below somebody else's modes"""

    @staticmethod
    def forward(ctx, x, graphs, inputs):
        forward, ctx.backward = graphs
        y, *ctx.saved = forward([x, *[None] * (inputs - 1)])
        return y

    @staticmethod
    def backward(ctx, grad):
        args = [*ctx.saved, grad]
        ctx.saved = []
        ctx.backward(args)
        return None, None, None


class Watch(fx.Interpreter):
    """Run a graph, and note the most bytes on the device during each of its operations"""

    def __init__(self, graph, layers, device, found):
        super().__init__(linked(graph, layers))
        self.device = device
        self.found = found

    def __call__(self, args):
        mine = [*args]
        args.clear()
        out = self.boxed_run(mine)
        # It would keep the results.
        self.env = {}
        return out

    def run_node(self, node):
        self.device.sweep()
        self.device.peak_bytes = self.device.live_bytes
        out = super().run_node(node)
        self.found.setdefault(node.name, 0)
        self.found[node.name] = max(self.found[node.name], self.device.peak_bytes)
        return out


def on_device(device, shape, limited, watched=False, steps=3):
    """Train on the device; with the lowest limit, if there is one. The graphs were traced before"""
    layers, width, rows, _, dtype = shape
    forward, backward, _ = traced(*shape)
    model = compile(chain(layers, width, True, dtype), backend="aot_eager",
                    limit_numel=(width + 2) * width, bucket_bytes=0, limit_bytes=1 << 40)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.5, clip_grad_norm=1e9)
    model._follow_optimizer()
    graphs = Graphs("0/0", "")
    graphs.steps.append(("traced", forward, backward))
    model._lower(graphs)
    if limited:
        least = least_limit(graphs.forward, graphs.backward, graphs.kept, model.room)
        model.limit_bytes = max(least, model.room.step_bytes)
        model._follow_optimizer()
        del graphs.steps[1:]
        model._lower(graphs)
    pair = (graphs.forward, graphs.backward)
    found = [{}, {}]
    if watched:
        run_them = [Watch(graph, model.engine.layers, device, each)
                    for graph, each in zip(pair, found, strict=True)]
    else:
        run_them = [model.engine.compile(graph) for graph in pair]
    inputs = len([node for node in pair[0].nodes if node.op == "placeholder"])
    x = torch.ones(rows, width, dtype=dtype).requires_grad_()
    for step in range(steps):
        for each in found:
            each.clear()
        for unit in model.units:
            unit.prepare()
        y = OnDevice.apply(x, run_them, inputs)
        y.backward(torch.ones_like(y))
        del y
        # The last pass is a second micro-batch, so gradients are there in forward.
        if step < steps - 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    return model, optimizer, graphs, found


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_operation_takes_the_bytes_that_the_pass_has_counted(dtype, limited):
    """
    Every allocation of the device is counted, of the graph's operations, of the layers' and of the
    optimizer's. Breaks if the pass misses a tensor, or takes one for freed that somebody holds.
    Proves I3, `room.held_bytes`, `_activation_bytes`, `_gradient_bytes`, `_storages_of_caller`,
    `room_for`, `layer_bytes`.
    """
    shape = (4, 8, 16, True, dtype)
    traced(*shape)
    with Accelerator() as device:
        model, _, graphs, found = on_device(device, shape, limited, watched=True, steps=4)
        pair = [graphs.forward, graphs.backward]
        held = held_bytes(pair, graphs.kept, model.room)
        assert bool(names(pair[0], vacate) + names(pair[1], vacate)) == limited
        checked = 0
        for graph, column, seen in zip(pair, held, found, strict=True):
            for node, nbytes in zip(graph.nodes, column, strict=True):
                if node.op != "call_function":
                    continue
                checked += 1
                # A rank alone has no sum beside its gradient.
                alone = sum(model.room.layers[layer].total for layer in node.args
                            ) if node.name.startswith("finish") else 0
                assert seen[node.name] == nbytes - alone, node
                assert nbytes <= model.room.limit_bytes
        assert checked > 60


def races(limited, mistake=""):
    """The weights after three steps, what is not ordered, and who may overlap whom"""
    lost = {"vacate": StatesAway.vacate, "back": StatesAway.back}

    def forgets(self):
        if self.copied is not None:
            # Nobody waits for an event that was never recorded.
            self.copied = self.layer.comm.event()
        lost[mistake](self)

    traced(*SHAPE)
    with Accelerator() as device:
        planted = mock.patch.object(StatesAway, mistake, forgets) if mistake else mock.MagicMock()
        with planted:
            model, optimizer, _, _ = on_device(device, SHAPE, limited)
        for unit in model.units:
            device.name(unit.away.memory, "away")
        copies = [op for op in device.log if "copy_" in op.what]
        weights = [states.master.clone() for states in optimizer.shard_states]
    return [each.tolist() for each in weights], device.problems, device.waits, len(copies)


def test_states_move_without_a_race_and_the_host_does_not_wait():
    """
    On two ranks, with streams: every use of the states, of their copies and of the memory that they
    leave is ordered, the weights are those of a run without a limit, and the host waits as often as
    there. Breaks with each of the two mistakes: compute does not wait for a copy before its memory
    is used again, or before the step.
    Proves I8, I9, `StatesAway.leave`, `StatesAway.vacate`, `StatesAway.reload`, `StatesAway.back`.
    """
    plain = run(races, 2, False)
    for mine, theirs in zip(run(races, 2, True), plain, strict=True):
        assert mine[0] == theirs[0] and not mine[1] and not theirs[1]
        assert mine[2] == theirs[2]
        assert mine[3] > theirs[3]
    for mistake in ("vacate", "back"):
        assert races(True, mistake)[1]


def test_a_copy_to_cpu_memory_overlaps_forward():
    """
    The copy is ordered after the last step, and neither before nor after the products of the first
    layer. Breaks if `offload` waits for the copy.
    Proves I9, `StatesAway.leave`, `_insert_offloads`.
    """
    traced(*SHAPE)
    with Accelerator() as device:
        model, optimizer, _, _ = on_device(device, SHAPE, True)
        last = model.units[-1]
        last.offload_states()
        last.away.back()
        device.name(last.away.memory, "away")
        at = len(device.log)
        last.offload_states()
        products = torch.ones(8, 8) @ torch.ones(8, 8)
        last.vacate_states()
        after = products + 1
        log = device.log[at:]
        copied = [op for op in log if "away" in op.names][-1]
        (product,) = [op for op in log if op.what == "mm"]
        (later,) = [op for op in log if op.what == "add"]
        assert not before(copied, product) and not before(product, copied)
        assert before(copied, later) and after.sum() == 64 * 9
        assert optimizer.good_steps == 2


# ------------------------------------------------------------------------------------------ limits


def test_on_the_cpu_the_limit_does_nothing_and_says_so():
    """
    States that leave would stay in the same memory. Breaks if the argument is ignored in silence.
    Proves `compile`, `has_own_memory`, `_limit_of_device`.
    """
    with pytest.warns(UserWarning, match="`limit_bytes` does nothing on the CPU"):
        model = compile(chain(), backend="aot_eager", limit_bytes=1)
    model(torch.ones(1, 2)).sum().backward()
    assert not names(model.graphs[0].forward, offload)
    with pytest.raises(ValueError, match=r"`limit_bytes`.* a whole number of at least 1"):
        compile(chain(), limit_bytes=0)


def limited(limit_bytes, model=None):
    with memory_of_its_own():
        return compile(model or chain(), backend="aot_eager", limit_bytes=limit_bytes)


class Prints(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_a_limit_that_cannot_be_kept_is_an_error():
    """
    Numbers for a model that does not fit; and an error where nobody could count: without a
    `Zero3Optimizer`, and if the model has several graphs. Breaks if such a limit is exceeded in
    silence.
    Proves `_offload`, `Room.step_bytes`.
    """
    x = torch.ones(4, 2)
    model = limited(200)
    with pytest.raises(RuntimeError, match="a `Zero3Optimizer`, whose states `limit_bytes` counts"):
        model(x)
    model = limited(200)
    optimizer = Zero3Optimizer(model, lr=0.1)
    # A rank alone: three shards of 16 bytes, with gradients, and two moments of each.
    with pytest.raises(RuntimeError, match=r"at most 200 bytes on the device, as `limit_bytes` "
                       r"says. Got: \d+: .* 192 in the optimizer's step, 96 of them its states"):
        model(x)
    assert optimizer.good_steps == 0
    with memory_of_its_own():
        broken = compile(Prints(), nn.Linear, backend="aot_eager", limit_bytes=1 << 40)
    optimizer = Zero3Optimizer(broken, lr=0.1)
    with pytest.raises(RuntimeError, match="one graph of all layers, because `limit_bytes`"):
        broken(x)
    assert optimizer.good_steps == 0


def test_another_optimizer_gets_other_graphs(tmp_path):
    """
    An evaluation comes before the optimizer, and then comes one with fewer moments. Breaks if the
    graphs go on with the states of the old one.
    Proves `_follow_optimizer`, `optimizer_of`, `states_on_device`.
    """
    x = torch.ones(4, 2)
    model = limited(1 << 40)
    with torch.no_grad():
        model(x)
    counted = [model.room.step_bytes]
    for optimizer_class, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.5}),
                                     (torch.optim.SGD, {})):
        optimizer = Zero3Optimizer(model, optimizer_class, lr=0.1, **options)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        counted.append(model.room.step_bytes)
        assert len(model.graphs) == 1
    # Shards; then gradients and moments, of three layers of 16 bytes.
    assert counted == [48, 4 * 48, 3 * 48, 2 * 48]
    elsewhere = limited(1 << 40)
    optimizer = Zero3Optimizer(elsewhere, lr=0.1, offload=zero3.Offload("nvme", folder=tmp_path))
    elsewhere(x).sum().backward()
    assert not states_on_device(optimizer)
    assert not any(each.states for each in elsewhere.room.layers.values())


def train_on_a_gpu():
    """The weights, and the most memory of a step, without a limit and with one"""
    torch.set_default_device(launch.my_device())
    found = []
    for fraction in (None, 0.8):
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).bfloat16()
        model = compile(plain, limit_bytes=1 << 40, limit_numel=2 * 1024 * 1025)
        optimizer = Zero3Optimizer(model, lr=0.01)
        x = torch.randn(16384, 1024).bfloat16()

        def step(model=model, optimizer=optimizer, x=x):
            optimizer.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()

        step()
        if fraction is not None:
            graphs = model.graphs[-1]
            _, forward, backward = graphs.steps[-2]
            top = most([forward, backward], graphs.kept, model.room)
            least = least_limit(forward, backward, graphs.kept, model.room)
            model.limit_bytes = max(int(top - fraction * (top - least)), model.room.step_bytes)
        step()
        torch.cuda.reset_peak_memory_stats()
        step()
        moved = len(names(model.graphs[-1].forward, offload))
        found.append((torch.cuda.max_memory_allocated(), moved,
                      [states.master.sum().item() for states in optimizer.shard_states]))
        del model, optimizer, plain, x, step
    return found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, for memory of its own")
def test_a_gpu_takes_less_memory_and_computes_the_same():
    """
    With real streams and torch's allocator: the same weights, and a lower peak.
    Proves I8, I9, `StatesAway`, `offload_states`.
    """
    ((peak, none, weights), (lower, moved, same)), = launch.run(train_on_a_gpu, 1, timeout_s=600)
    assert not none and moved and lower < peak and weights == same

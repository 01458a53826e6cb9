"""
# Optimizer states that leave for a while: the pass over graphs, and who carries it out

The pass is pure, so it is proven on graphs. Training runs on the CPU, whose model is told
afterwards to move states, and on the accelerator that is not there (`tests/streams.py`).
"""

import copy
import functools
import gc
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn

import zero3
from tests.ranks import run
from tests.streams import Accelerator, before
from zero3 import Zero3Optimizer
from zero3.compiler.away import StatesAway, leaving, optimizer_on_device
from zero3.compiler.engines import Inductor, regions_of
from zero3.compiler.graph import find, linked, offload, reload, vacate, wait
from zero3.compiler.model import CompiledUnit, compile
from zero3.compiler.passes import improve, offload_states
from zero3.compiler.trace import TRAINED, Graphs
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
def traced(layers, width=2, rows=4, bias=False, dtype=torch.float32, input_trains=False):
    """The graphs of a chain before any pass, and what each layer has in full"""
    # Other numbers of rows, in a test before, would make their number an input of the graphs.
    torch.compiler.reset()
    model = compile(chain(layers, width, bias, dtype), backend="aot_eager", bucket_bytes=0)
    model(torch.ones(rows, width, dtype=dtype, requires_grad=input_trains)).sum().backward()
    (graphs,) = model.graphs
    _, forward, backward = graphs.steps[0]
    return forward, backward, model.numel


def planned(layers, bucket=0, limit=4, **options):
    """The graphs after the other passes"""
    forward, backward, numel = traced(layers, **options)
    steps, _ = improve(forward, backward, numel, limit, bucket)
    return steps[-1][1], steps[-1][2]


def names(graph, kind):
    return [node.args[0] for node in find(graph, kind)]


# ---------------------------------------------------------------------------------------- the pass


def order_of(graph):
    """The layers that compute, and the moves of states, in their order"""
    found = []
    for node in graph.nodes:
        if node.target in (offload, vacate, reload):
            found.append(f"{node.target.__name__} {node.args[0]}")
        elif node.target is wait:
            found.append(f"layer {node.args[0]}")
    return found


def test_states_leave_and_come_back_as_the_text_says():
    """
    The table at the head of `away.py`: three layers, of which two leave. Breaks if they leave or
    come back at other operations, or in another order.
    Proves `offload_states`, `_ends_of_layers`.
    """
    # With room for one layer, each of them is gathered in backward, too.
    pair = planned(3, input_trains=True)
    first, second = offload_states(*pair, ["2", "1"])
    assert order_of(first) == ["offload 2", "offload 1", "layer 0", "vacate 2", "layer 1",
                               "vacate 1", "layer 2"]
    assert order_of(second) == ["layer 2", "layer 1", "reload 1", "layer 0", "reload 2"]
    # If all of them leave, the last one goes before forward returns.
    first, second = offload_states(*pair, ["2", "1", "0"])
    assert order_of(first)[-3:] == ["vacate 1", "layer 2", "vacate 0"]
    assert order_of(second) == ["layer 2", "reload 0", "layer 1", "reload 1", "layer 0",
                                "reload 2"]
    # If the input needs no gradient, backward does not read the weights of layer 0.
    first, second = offload_states(*planned(3), ["2", "1", "0"])
    assert order_of(second) == ["layer 2", "reload 0", "reload 1", "layer 1", "reload 2"]
    for graph, kind in ((first, vacate), (second, reload)):
        assert [*graph.nodes][-2].target is kind


@pytest.mark.parametrize("limit, bucket", [(4, 0), (20, 0), (64, 64)])
def test_the_pass_changes_no_region_and_no_argument(limit, bucket):
    """
    Inductor fuses what stands between two communications. Breaks if `vacate` stands in the middle:
    other regions may round in another way. Nor does it touch another operation, or the graphs that
    it was given.
    Proves `offload_states`, `_ends_of_layers`, `regions_of`.
    """
    pair = planned(3, bucket, limit, width=4, bias=True)
    texts = [str(graph) for graph in pair]
    for count in range(4):
        moved = offload_states(*pair, ["2", "1", "0"][:count])
        assert [str(graph) for graph in pair] == texts
        assert sum(len(find(graph, offload, vacate, reload)) for graph in moved) == 3 * count
        for old, new in zip(pair, moved, strict=True):
            assert [str(node) for node in new.nodes
                    if node.target not in (offload, vacate, reload)] == [*map(str, old.nodes)]
            assert [[*map(str, region)] for region in regions_of(new)] == (
                [[*map(str, region)] for region in regions_of(old)])


# ---------------------------------------------------------------------------------------- training


# More than all states together.
ALL = 1 << 40


def make(dtype, backend, nbytes, layers=4, **options):
    """A model of layers with 72 elements; a number of bytes is told to a CPU, too"""
    model = compile(chain(layers, 8, True, dtype), backend=backend, limit_numel=160)
    optimizer = Zero3Optimizer(model, lr=0.1, **options)
    model.offload_states_bytes = nbytes
    return model, optimizer


def fails(*_):
    raise ValueError("planted")


def everything(dtype, backend, nbytes, options):
    """The states of a run in which states are away at all kinds of moments"""
    found, moves = [], []

    def state():
        kept = optimizer.state_dict()
        found.append([*kept["masters"], *(value for each in kept["state"].values()
                                         for value in each.values())])
        found[-1] = [torch.as_tensor(each).clone() for each in found[-1]]
        return copy.deepcopy(kept)

    model, optimizer = make(dtype, backend, nbytes, layers=3, **options)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank())).to(dtype)

    def loss():
        return model(x).float().square().mean()

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
        # Somebody looks, also in inference mode, and loads, while states are away.
        kept = loss()
        with torch.inference_mode():
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
        # Micro-batches: each moves the states once more. Fewer rows would be compiled once more.
        with optimizer.no_sync():
            optimizer.backward(loss())
        optimizer.backward(loss())
        optimizer.step()
        state()
    moves = [event.event for event in tape.events]
    return found, {kind: moves.count(kind) for kind in ("offload", "vacate", "reload", "step")}


def compared(dtype, backend, options):
    torch._dynamo.reset()
    moved, moves = everything(dtype, backend, ALL, options)
    torch._dynamo.reset()
    plain, no_moves = everything(dtype, backend, 0, options)
    same = [torch.equal(a, b) for mine, theirs in zip(moved, plain, strict=True)
            for a, b in zip(mine, theirs, strict=True)]
    return same, moves, no_moves


@pytest.mark.parametrize("ranks, dtype, backend, options", [
    (2, torch.float32, "aot_eager", {}),
    (1, torch.bfloat16, "aot_eager", {"reduce_dtype": torch.float32}),
    (1, torch.bfloat16, "inductor", {})])
def test_training_with_states_away_is_training_without_to_the_bit(ranks, dtype, backend, options):
    """
    The same run with all states moved and with none: forward without backward, an evaluation in
    between, a look at the states and a load while they are away, an exception in backward, and
    micro-batches. Breaks if a step does not bring the states back first.
    Proves I1, `StatesAway.offload`, `StatesAway.vacate`, `StatesAway.reload`, `StatesAway.back`,
    `away.Part`, `away.movable`, `optimizer_on_device`, `graph.Operation`, `ShardStates.in_memory`,
    `Portion.put_master`, `ShardStates.master`.
    """
    if backend == "inductor" and Inductor.missing(torch.device("cpu")):
        pytest.skip("needs a C++ compiler")
    for same, moves, no_moves in run(compared, ranks, dtype, backend, options):
        assert len(same) > 20 and all(same)
        assert moves["step"] == no_moves["step"] > 0
        assert moves["offload"] >= moves["vacate"] >= moves["reload"] > 8
        assert no_moves["offload"] == no_moves["vacate"] == no_moves["reload"] == 0


def ledger_of_a_step(nbytes):
    """Each event of the last step: what, whose, in which phase, and the live bytes after it"""
    model, optimizer = make(torch.bfloat16, "aot_eager", nbytes, fused=False)
    x = torch.ones(16, 8, dtype=torch.bfloat16)
    for _ in range(3):
        with Ledger(model, optimizer) as tape:
            optimizer.backward(model(x).float().square().mean())
            optimizer.step()
        optimizer.zero_grad()
    return [(e.event, e.layer, e.phase, e.bytes, e.live_bytes) for e in tape.events], model


def test_the_order_of_events_and_the_bytes_of_a_ledger():
    """
    Copies begin with forward, memory is freed when a layer has computed, and is back before the
    step. In between a rank holds less, by the bytes of the states: master and moments, 12 for each
    element of a shard. Breaks if somebody keeps a reference to a tensor that has left.
    Proves I8, `StatesAway.vacate`, `CompiledUnit.held_tensors`.
    """
    own_bytes = 12 * 72
    # One byte more than two layers have, so three of them leave.
    events, model = ledger_of_a_step(2 * own_bytes + 1)
    plain, _ = ledger_of_a_step(0)
    moves = [(event, layer.partition("(")[2].strip(")"), phase)
             for event, layer, phase, *_ in events if event in ("offload", "vacate", "reload")]
    gone = ["3", "2", "1"]
    assert "states that leave meanwhile: 3, 2, 1" in model.report()
    assert moves == [*(("offload", layer, "forward") for layer in gone),
                     *(("vacate", layer, "forward") for layer in gone),
                     *(("reload", layer, "backward") for layer in reversed(gone))]
    kinds = [event[0] for event in events]
    last = len(kinds) - kinds[::-1].index("reload")
    assert "reduced" in kinds[:last] and kinds.index("step") > last
    # The other events are those of a run in which none leave, with fewer bytes meanwhile.
    away = 0
    others = iter(plain)
    for event, layer, phase, nbytes, live_bytes in events:
        if event in ("offload", "vacate", "reload"):
            assert nbytes == own_bytes
            away += {"offload": 0, "vacate": nbytes, "reload": -nbytes}[event]
            continue
        theirs = next(others)
        assert theirs[:3] == (event, layer, phase)
        assert live_bytes == theirs[4] - away
    assert away == 0


def are_away(unit):
    """Whether the states of a layer are in CPU memory alone"""
    parts = unit.away.parts
    return bool(parts) and all(part.copy.memory is None is part.copy.near for part in parts)


def test_a_checkpoint_finds_states_that_are_away(tmp_path):
    """
    Saved between forward and backward, on purpose, and loaded while states of another run are away.
    Breaks if a checkpoint reads tensors without elements.
    Proves `ShardStates.in_memory`, `StatesAway.back`.
    """
    x = torch.ones(16, 8, dtype=torch.bfloat16)
    runs = [make(torch.bfloat16, "aot_eager", ALL) for _ in range(2)]
    model, optimizer = runs[0]
    for _ in range(2):
        optimizer.backward(model(x).float().square().mean())
        optimizer.step()
        optimizer.zero_grad()
    expected = copy.deepcopy(optimizer.state_dict())
    loss = model(x).float().square().mean()
    assert any(are_away(unit) for unit in model.units)
    zero3.save(tmp_path, model, optimizer, step=1)
    optimizer.backward(loss)
    optimizer.zero_grad()
    other, others = runs[1]
    loss = other(x).float().square().mean()
    assert any(are_away(unit) for unit in other.units)
    zero3.load(tmp_path, other, others)
    found = others.state_dict()
    pairs = zip(expected["masters"], found["masters"], strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    for i, known in expected["state"].items():
        assert all(torch.equal(value, found["state"][i][key]) for key, value in known.items())


class Prints(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def broken(nbytes):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = compile(Prints(), nn.Linear, backend="aot_eager")
    optimizer = Zero3Optimizer(model, lr=0.1)
    model.offload_states_bytes = nbytes
    with Ledger(model, optimizer) as tape:
        for _ in range(3):
            optimizer.backward(model(torch.ones(4, 2)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    moves = [event.event for event in tape.events]
    return [states.master.clone() for states in optimizer.shard_states], moves.count("reload")


@pytest.mark.filterwarnings("ignore:.*several graphs")
def test_each_graph_moves_the_states_of_its_own_layers():
    """
    Dynamo ends the graph between two layers, and their states leave in two graphs. Breaks if a
    graph names a layer of another one. In the first step there are no moments yet.
    Proves `CompiledModel._lower`.
    """
    mine, reloads = broken(ALL)
    theirs, none = broken(0)
    assert (reloads, none) == (4, 0)
    assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


# ---------------------------------------------------------------- the accelerator that is not there


SHAPE = (3, 8, 16, True, torch.bfloat16)


class OnDevice(torch.autograd.Function):
    """Carry out two graphs as autograd would: Dynamo does not trace below somebody else's modes"""

    @staticmethod
    def forward(ctx, x, trained, graphs, inputs):
        forward, ctx.backward = graphs
        y, *ctx.saved = forward([x, *[None] * (inputs - 1)])
        return y

    @staticmethod
    def backward(ctx, grad):
        args = [*ctx.saved, grad]
        ctx.saved = []
        ctx.backward(args)
        return None, None, None, None


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
        self.found.append((node, self.device.peak_bytes))
        return out


def on_device(device, shape, nbytes, watched=False, steps=3):
    """Train on the device, by graphs that were traced before"""
    layers, width, rows, _, dtype = shape
    forward, backward, _ = traced(*shape)
    model = compile(chain(layers, width, True, dtype), backend="aot_eager",
                    limit_numel=(width + 2) * width, bucket_bytes=0, offload_states_bytes=nbytes)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.5, clip_grad_norm=1e9)
    model._follow_optimizer()
    graphs = Graphs("0/0", "")
    model._lower(graphs, forward, backward)
    pair = (graphs.forward, graphs.backward)
    found = [[], []]
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
        y = OnDevice.apply(x, TRAINED, run_them, inputs)
        y.backward(torch.ones_like(y))
        del y
        # The last pass is a second micro-batch, so gradients are there in forward.
        if step < steps - 2:
            optimizer.step()
            optimizer.zero_grad()
    optimizer.step()
    return model, optimizer, found


def watched_bytes(dtype, nbytes):
    """Each operation of the last pass with the most bytes on the device, and how states moved"""
    with Accelerator() as device:
        model, _, found = on_device(device, (4, 8, 16, True, dtype), nbytes, True, steps=4)
        return [each for graph in found for each in graph], model.leaving


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [1, 2, 4])
def test_each_operation_takes_fewer_bytes_by_those_of_the_states_that_are_away(dtype, layers):
    """
    Every allocation of the device is counted, of the graph's operations, of the layers' and of the
    optimizer's. Between `vacate` and `reload` each operation takes less than without the pass, by
    the bytes of these states. Breaks if a state is freed later, comes back earlier, or is held
    twice.
    Proves I3, `StatesAway.vacate`, `StatesAway.reload`, `leaving`,
    `offload_states`.
    """
    traced(4, 8, 16, True, dtype)
    # A moment of fp32 for each of 72 elements; in 16 bits a master, too.
    own_bytes = (1 if dtype == torch.float32 else 2) * 4 * 72
    mine, gone = watched_bytes(dtype, own_bytes * (layers - 1) + 1)
    plain, none = watched_bytes(dtype, 0)
    assert gone == ["3", "2", "1", "0"][:layers] and not none
    away = least = 0
    others = iter(plain)
    for node, nbytes in mine:
        if node.name.startswith(("offload", "vacate", "reload")):
            away += {"o": 0, "v": own_bytes, "r": -own_bytes}[node.name[0]]
            continue
        other, theirs = next(others)
        assert node.name == other.name
        if node.op == "call_function":
            assert nbytes == theirs - away, node
            least = max(least, away)
    assert away == 0 and least == layers * own_bytes


def races(nbytes, mistake=""):
    """The weights after three steps, what is not ordered, and who may overlap whom"""
    lost = {"vacate": StatesAway.vacate, "back": StatesAway.back}

    def forgets(self):
        for part in self.parts:
            # Nobody waits for an event that was never recorded.
            part.copy.event = self.layer.comm.event()
        lost[mistake](self)

    traced(*SHAPE)
    with Accelerator() as device:
        planted = mock.patch.object(StatesAway, mistake, forgets) if mistake else mock.MagicMock()
        with planted:
            _, optimizer, _ = on_device(device, SHAPE, nbytes)
        copies = [op for op in device.log if "copy_" in op.what]
        weights = [states.master.clone() for states in optimizer.shard_states]
    return [each.tolist() for each in weights], device.problems, device.waits, len(copies)


def test_states_move_without_a_race_and_the_host_does_not_wait():
    """
    On two ranks, with streams: every use of the states, of their copies and of the memory that they
    leave is ordered, the weights are those of a run in which none leave, and the host waits as
    often as there. Breaks with each of the two mistakes: compute does not wait for a copy before
    its memory is used again, or before the step.
    Proves I8, I9, `StatesAway.offload`, `StatesAway.vacate`, `StatesAway.reload`,
    `StatesAway.back`.
    """
    plain = run(races, 2, 0)
    for mine, theirs in zip(run(races, 2, ALL), plain, strict=True):
        assert mine[0] == theirs[0] and not mine[1] and not theirs[1]
        assert mine[2] == theirs[2]
        assert mine[3] > theirs[3]
    for mistake in ("vacate", "back"):
        assert races(ALL, mistake)[1]


def test_a_copy_to_cpu_memory_overlaps_forward():
    """
    The copy is ordered after the last step, and neither before nor after the products of the first
    layer. Breaks if `offload` waits for the copy.
    Proves I9, `StatesAway.offload`.
    """
    traced(*SHAPE)
    with Accelerator() as device:
        model, optimizer, _ = on_device(device, SHAPE, ALL)
        last = model.units[-1].away
        at = len(device.log)
        last.offload()
        products = torch.ones(8, 8) @ torch.ones(8, 8)
        last.vacate()
        after = products + 1
        log = device.log[at:]
        copied = [op for op in log if "copy_" in op.what][-1]
        (product,) = [op for op in log if op.what == "mm"]
        (later,) = [op for op in log if op.what == "add"]
        assert not before(copied, product) and not before(product, copied)
        assert before(copied, later) and after.sum() == 64 * 9
        assert optimizer.good_steps == 2


# ----------------------------------------------------------------------------------------- options


def test_on_the_cpu_the_option_does_nothing_and_says_so():
    """
    States that leave would stay in the same memory. Breaks if the argument is ignored in silence.
    Proves `compile`, `CompiledModel.__init__`.
    """
    with pytest.warns(UserWarning, match="`offload_states_bytes` does nothing on the CPU"):
        model = compile(chain(), backend="aot_eager", offload_states_bytes=1)
    optimizer = Zero3Optimizer(model, lr=0.1)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    assert not names(model.graphs[0].forward, offload)
    with pytest.raises(ValueError, match=r"`offload_states_bytes`.* a whole number of at least 0"):
        compile(chain(), offload_states_bytes=-1)


def test_another_optimizer_gets_other_graphs(tmp_path):
    """
    An evaluation comes before the optimizer, and then come others with fewer moments, so that more
    layers have to leave. Breaks if the graphs go on with the states of the old one.
    Proves `_follow_optimizer`, `leaving`, `optimizer_on_device`.
    """
    x = torch.ones(4, 2)
    model = compile(chain(), backend="aot_eager")
    model.offload_states_bytes = 32
    with torch.no_grad():
        model(x)
    found = [model.leaving]
    for optimizer_class, options in ((torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.5}),
                                     (torch.optim.SGD, {})):
        optimizer = Zero3Optimizer(model, optimizer_class, lr=0.1, **options)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(names(model.graphs[-1].forward, offload))
        assert len(model.graphs) == 1
    # Of each of three layers, two moments of 16 bytes, then one, then none.
    assert found == [[], ["2"], ["2", "1"], []]
    optimizer = Zero3Optimizer(model, lr=0.1, offload=zero3.Offload("nvme", folder=tmp_path))
    model(x).sum().backward()
    assert optimizer.good_steps == 0 and optimizer_on_device(model.units[0]) is None
    assert leaving(model.engine.layers, ALL) == []


def train_on_a_gpu():
    """The weights, and the most memory of a step, without the pass and with it"""
    torch.set_default_device(launch.my_device())
    found = []
    for nbytes in (0, ALL):
        torch.manual_seed(0)
        plain = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8))).bfloat16()
        model = compile(plain, limit_numel=2 * 1024 * 1025, offload_states_bytes=nbytes)
        optimizer = Zero3Optimizer(model, lr=0.01)
        x = torch.randn(16384, 1024).bfloat16()

        def step(model=model, optimizer=optimizer, x=x):
            optimizer.backward(model(x).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        torch.cuda.reset_peak_memory_stats()
        step()
        moved = len(names(model.graphs[-1].forward, offload))
        found.append((torch.cuda.max_memory_allocated(), moved,
                      [states.master.sum().item() for states in optimizer.shard_states]))
        del model, optimizer, plain, x, step
        # A model and its hooks refer to each other.
        gc.collect()
    return found


@pytest.mark.gpu
@pytest.mark.skipif(torch.__version__ < "2.12", reason="`compile` needs torch 2.12")
def test_a_gpu_takes_less_memory_and_computes_the_same():
    """
    With real streams and torch's allocator: the same weights, and a lower peak.
    Proves I8, I9, `StatesAway`, `offload_states`.
    """
    ((peak, none, weights), (lower, moved, same)), = launch.run(train_on_a_gpu, 1, timeout_s=600)
    assert not none and moved == 8 and lower < peak and weights == same

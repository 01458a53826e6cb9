"""
# Predicted bytes are measured bytes: rest (I2), peak (I3) and traffic (I4), without a tolerance
"""

import copy
import gc
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from docs.rungs import stage_parts
from tests.cases import freeze
from tests.commands import python_m
from tests.ranks import run
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.estimate import predict as predict_module
from zero3.estimate.formulas import (
    WIDTHS,
    LayerSpec,
    Part,
    describe,
    places,
    sent_elements,
    stages,
)
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.estimate.predict import data_parallel, predict


def models():
    """Chains for which the formulas have to hold; all take 7 columns."""
    line = nn.Linear
    return {
        "padding": [line(7, 13), nn.ReLU(), line(13, 5), line(5, 3)],
        "frozen": [freeze(line(7, 20)), freeze(line(20, 9)), line(9, 20), freeze(line(20, 30)),
                   nn.Sequential(freeze(line(30, 4)), line(4, 5))],
        "nested": [nn.Sequential(line(7, 8), nn.Sequential(line(8, 8), nn.Sequential(line(8, 8)))),
                   line(8, 8), nn.Sequential(nn.LayerNorm(8), line(8, 1))],
        "unequal": [line(7, 100), line(100, 100), line(100, 2), line(2, 200), line(200, 3)],
        "alternating": [freeze(line(7, 64)), line(64, 3), freeze(line(3, 64)), line(64, 3),
                        freeze(line(3, 64))],
        "tiny": [line(7, 1, bias=False), nn.Dropout(0.0), line(1, 1), line(1, 1, bias=False)],
        "one": [line(7, 7)],
        "buffers": [line(7, 9), nn.BatchNorm1d(9), *shared_buffers(9), line(9, 2)],
    }


class Buffers(nn.Module):
    def __init__(self, **buffers):
        super().__init__()
        self.line = nn.Linear(9, 9)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def forward(self, x):
        return self.line(x)


def shared_buffers(numel):
    """Two layers with one mask, of which one also has a part of it and a sparse one"""
    mask = torch.ones(numel)
    return [Buffers(mask=mask), Buffers(mask=mask, first=mask[:2], edges=torch.eye(3).to_sparse())]


def measure(name, moments):
    modules = models()[name]
    before = describe(modules)
    model = Zero3Sequential([Zero3Layer(m) for m in modules])
    assert describe(model) == before
    shards = model.get_trainable_chunk()
    optimizer = torch.optim.AdamW(shards) if moments else torch.optim.SGD(shards)
    for step in range(2):
        with Ledger(model, optimizer) as tape:
            model(torch.randn(4, 7)).square().mean().backward()
            grads = sum(shard.grad.nbytes for shard in shards)
            optimizer.step()
            optimizer.zero_grad()
        for before, event in pairwise(tape.events):
            # What an event says of itself is what the storages say.
            if event.event in ("fetch", "gradients", "free"):
                assert abs(event.live_bytes - before.live_bytes) == event.bytes, event
        if moments == 0 or step == 1:
            # Adam's moments are born in its first step.
            return (held_bytes(model, optimizer), tape.peak_live_bytes, grads, tape.sent_bytes,
                    tape.messages, tape.order_bytes)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", models())
def test_the_formulas_give_the_bytes_at_rest_at_the_peak_and_on_the_wire(name, world_size):
    """
    Breaks with any buffer kept an event longer, any gather too many, any copy of a layer; and if a
    buffer that two layers share counts twice.
    Proves I2, I3, I4, `predict`, `Step`, `StepLayer`, `describe`, `formulas._parts`, `storages`.
    """
    for moments, step_bytes in ((2, 4), (0, 0)):
        p = predict(describe(models()[name]), world_size, moments=moments, step_bytes=step_bytes)
        expected = (p.rest_bytes, p.peak_bytes, p.grad_bytes, p.sent_bytes, p.messages,
                    p.order_bytes)
        if world_size == 4 and moments == 0:
            continue
        assert run(measure, world_size, name, moments) == [expected] * world_size


def test_the_example_of_two_layers_on_two_ranks_has_these_bytes():
    """
    The table at the head of `predict.py`: each moment of the step, and its sums.
    Proves `predict`, `Step`.
    """
    layers = [LayerSpec((Part(3, 4, True),)), LayerSpec((Part(2, 4, True),))]
    p = predict(layers, 2, moments=0, step_bytes=0)
    assert (p.rest_bytes, p.grad_bytes, p.peak_bytes, p.sent_bytes) == (12, 12, 12 + 48, 32)
    table = predict_module.__doc__.split("| event |")[1].split("\n\n")[0].splitlines()[2:]
    live_bytes = 0
    for row in table:
        change, live = (cell.strip(" *") for cell in row.split("|")[2:4])
        live_bytes += int(change.replace("− ", "-").replace("+ ", ""))
        assert live_bytes == int(live), row
    assert len(table) == 14 and live_bytes == p.grad_bytes
    assert max(int(row.split("|")[3].strip(" *")) for row in table) == p.peak_bytes - p.rest_bytes


def elements_sent():
    layers = [nn.Linear(10, 10, bias=False) for _ in range(4)]
    model = Zero3Sequential([Zero3Layer(m) for m in layers])
    with Ledger(model) as tape:
        model(torch.randn(2, 10)).sum().backward()
    return tape.sent_bytes // 4


def test_a_step_sends_three_times_the_model_less_the_last_layers_second_gather():
    """
    I4 in elements: 3 Psi (N-1)/N, minus the last layer's share of that for one gather. Breaks where
    the last layer is freed after forward.
    Proves I4, `Zero3Layer._release`, `Communicator.all_gather`, `Communicator.reduce_scatter`,
    `Schedule.stays_full`.
    """
    for world_size in (2, 4):
        psi, last = 400, 100
        expected = (3 * psi - last) * (world_size - 1) // world_size
        assert run(elements_sent, world_size) == [expected] * world_size


def sent_with_checkpoints(around):
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5)]
    model = Zero3Sequential([Zero3Layer(m) for m in layers])
    x = torch.randn(2, 8)
    with Ledger(model) as tape:
        if around == "each":
            for layer in model.walk():
                x = checkpoint(layer, x, use_reentrant=False)
        elif around == "three":
            one, *three, last = model.module_list
            x = checkpoint(lambda x: three[2](three[1](three[0](x))), one(x), use_reentrant=False)
            x = last(x)
        else:
            x = model(x)
        x.sum().backward()
    return tape.sent_bytes, tape.messages


def test_recomputation_sends_nothing_more():
    """
    I4 under activation checkpointing, around each layer and around three at once. Breaks where a
    forward inside of backward frees the layer at its end.
    Proves I4, `Zero3Layer.forward`, `in_backward`.
    """
    plain = run(sent_with_checkpoints, 2, None)
    assert plain[0] == (3 * 5 * 36 * 4 - 36 * 4, 3 * 5 - 1)
    assert run(sent_with_checkpoints, 2, "each") == plain
    assert run(sent_with_checkpoints, 2, "three") == plain


class Passing(nn.Module):
    """A layer of one or two tensors, which may hand its first input on."""

    def __init__(self, how):
        super().__init__()
        self.line, self.how, self.kept = nn.Linear(6, 6), how, None

    def forward(self, x, y=None):
        if self.how == "attribute":
            self.kept = x
        if self.how == "in place":
            x = x.relu_()
        out = self.line(x.clone() if y is None else x + y)
        return x.add_(out) if self.how == "written to" else out


class Passed(Passing):
    def forward(self, batch):
        x, y = batch if isinstance(batch, tuple) else (batch, batch)
        return (x if self.how == "tuple" else torch.tanh(x), super().forward(x, y))


def pass_on(how):
    """A step's fetches, the most layers that were whole at once, and whether it is as plain"""
    torch.manual_seed(0)
    kind = Passed if how in ("tuple", "computed") else Passing
    modules = [kind(how) for _ in range(4)]
    if how in ("written to", "in place"):
        # Autograd writes into no leaf.
        modules[0] = nn.Linear(6, 6)
    plain = nn.Sequential(*copy.deepcopy(modules))
    model = Zero3Sequential([Zero3Layer(m) for m in modules])
    found, expected = (each(torch.ones(2, 6, requires_grad=True)) for each in (model, plain))
    with Ledger(model) as tape:
        for out in (found, expected):
            (sum(out) if kind is Passed else out).square().sum().backward()
    layers, most = set(), 0
    for each in tape.events:
        layers = layers | {each.layer} if each.event == "fetch" else layers
        layers = layers - {each.layer} if each.event == "free" else layers
        most = max(most, len(layers))
    wholes = [param for each in model.module_list for param in snapshot_of(each)]
    same = [torch.allclose(ours, p.grad)
            for ours, p in zip(wholes, plain.parameters(), strict=True)]
    return [e.layer for e in tape.events if e.event == "fetch"], most, all(same)


def snapshot_of(layer):
    """The gradients of a layer's parameters, from the shards of all ranks"""
    grads = layer.comm.numbers(layer, layer.chunk[0].grad)[: layer.comm.world_size].flatten()
    return [slot.of(grads) for slot in layer.slots()]


@pytest.mark.parametrize("how", ["tuple", "computed", "attribute", "written to", "in place"])
def test_an_input_that_is_handed_on_is_no_output(how):
    """
    Backward gathers each layer once and frees it, also when a layer's input leaves it as it came,
    beside its output or as an attribute. Breaks where such an input announces the
    layer: its gradient arrives when the layer is done, which would be gathered a third time and
    stay whole. One that the layer has written to does announce it.
    Proves I1, I3, I4, `Watch.outputs`, `Watch.inputs`.
    """
    for fetched, most, same in run(pass_on, 2, how):
        kind = "Passed" if how in ("tuple", "computed") else "Passing"
        first = "Linear" if how in ("written to", "in place") else kind
        assert fetched == [f"layer 2 ({kind})", f"layer 1 ({kind})", f"layer 0 ({first})"]
        # A tensor in a container is no view of its own, and one that was written to no longer: its
        # layer is done a moment later.
        assert same and most == (2 if how in ("attribute", "written to") else 3)


def live_tensor_bytes():
    """Bytes of every storage that Python can reach."""
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                for tensor in (thing, thing.grad if thing.is_leaf else None):
                    if tensor is not None and tensor.layout == torch.strided:
                        storage = tensor.untyped_storage()
                        storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


class Witness(Ledger):
    """A ledger that also asks the garbage collector what is alive."""

    def record(self, layer, event, nbytes=0, transfer=None):
        super().record(layer, event, nbytes, transfer)
        self.seen = getattr(self, "seen", [])
        live_bytes = live_tensor_bytes() - self.before_bytes
        self.seen.append((event, live_bytes - self.events[-1].live_bytes))


def witness():
    Witness.before_bytes = live_tensor_bytes()
    model = Zero3Sequential([Zero3Layer(nn.Linear(64, 64)) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.get_trainable_chunk())
    x = torch.randn(1, 64)
    for _ in range(2):
        with Witness(model, optimizer) as tape:
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return tape.seen


def test_the_ledger_sees_every_tensor_that_is_alive():
    """
    At each event, what the ledger adds up and what the garbage collector finds differ by the
    activations alone: one row of 64 for each of three layers, where a layer or a gradient has 4160
    elements. Breaks with a buffer that the ledger does not know of.
    Proves `Ledger`, `Ledger.__init__`, `Ledger.record`, `ledger.held_bytes`,
    `Sharded.held_tensors`, `Reducer.held_tensors`, `Zero3Optimizer.held_tensors`.
    """
    for seen in run(witness, 2):
        for event, unseen_bytes in seen:
            assert 0 <= unseen_bytes < 12 * 64 * 4, (event, unseen_bytes)


class Peak(TorchDispatchMode):
    """The bytes of all storages that Python can reach, at the highest moment after an operation."""

    nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.nbytes = max(self.nbytes, live_tensor_bytes())
        return out


def sharded():
    module = nn.Linear(64, 64)
    others_bytes = live_tensor_bytes() - 4160 * 4
    with Peak() as peak:
        Zero3Layer(module)
    return peak.nbytes - others_bytes


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_layer_that_is_being_sharded_takes_its_memory_twice_and_its_shard(world_size):
    """
    The module's own 4160 parameters, their merged copy, and the shard; besides, what ranks tell
    each other. Breaks where the shard is allocated before it arrives.
    Proves `Zero3Layer._shard`, `Communicator.scatter`.
    """
    expected_bytes = (2 + 1 / world_size) * 4160 * 4
    for nbytes in run(sharded, world_size):
        assert expected_bytes <= nbytes < expected_bytes + 1024


def events_of_two_steps():
    model = Zero3Sequential([Zero3Layer(nn.Linear(8, 8)) for _ in range(4)])
    for _ in range(2):
        with Ledger(model) as tape:
            model(torch.randn(2, 8)).sum().backward()
    return [(e.phase, int(e.layer.split()[1]), e.event) for e in tape.events]


def test_the_next_layer_is_fetched_before_this_one_computes():
    """
    Overlap as an order of events: forward, gather $i+1$ starts before layer $i$ computes; backward,
    gather $i-1$ starts before layer $i$ has a gradient, and its reduce runs until the next begins.
    Breaks without the fetch in `walk` or the one in `_pre_backward_hook`.
    Proves `Zero3Sequential.walk`, `Zero3Layer._pre_backward_hook`, `Reducer.started`,
    `Reducer.end`, `Reducer.make_way`, `Reducer.land`, `Schedule`, `Schedule.ahead`.
    """
    events = run(events_of_two_steps, 2)
    assert events[0] == events[1]
    at = {event: i for i, event in enumerate(events[0])}
    for i in range(3):
        assert at["forward", i + 1, "fetch"] < at["forward", i, "compute"]
        assert at["forward", i, "free"] < at["forward", i + 1, "compute"]
    for i in (3, 2, 1):
        if i > 1:
            assert at["backward", i - 1, "fetch"] < at["backward", i, "gradients"]
        assert at["backward", i, "reduce"] < at["backward", i - 1, "gradients"]
        assert at["backward", i, "reduced"] < at["backward", i - 1, "reduce"]
    assert ("backward", 3, "fetch") not in at


def test_the_tape_is_empty_when_nobody_listens():
    """
    Outside of its context a ledger records nothing.
    Proves `Ledger`, `Listener`, `Listener.record`.
    """
    layer = Zero3Layer(nn.Linear(3, 2))
    with Ledger(layer) as tape:
        pass
    layer(torch.ones(1, 3)).sum().backward()
    assert tape.events == [] and tape.sent_bytes == 0
    # The shard, and since that backward its gradient.
    assert tape.peak_live_bytes == 8 * 4 and held_bytes(layer) == 2 * 8 * 4


def test_a_step_that_fails_is_over_on_the_tape_too():
    """
    A gradient that is not a number ends a step by an exception; the forward after it is a forward.
    Breaks if the tape waits for the end of the step.
    Proves `Ledger`, `Ledger.record`.
    """
    layer = Zero3Layer(nn.Linear(3, 2))
    optimizer = Zero3Optimizer(layer)
    with Ledger(layer, optimizer) as tape:
        layer(torch.full((1, 3), torch.nan)).sum().backward()
        with pytest.raises(RuntimeError):
            optimizer.step()
        failed = len(tape.events)
        layer(torch.ones(1, 3))
    assert tape.events[failed - 1].phase == "step"
    assert {event.phase for event in tape.events[failed:]} == {"forward"}


PAPER = {
    # Ranks: for 7.5, 128 and 1000 billion parameters, GB for stages 1, 2 and 3. ZeRO, Table 1.
    1: ((120, 120, 120), (2048, 2048, 2048), (16000, 16000, 16000)),
    4: ((52.5, 41.3, 30), (896, 704, 512), (7000, 5500, 4000)),
    16: ((35.6, 21.6, 7.5), (608, 368, 128), (4750, 2875, 1000)),
    64: ((31.4, 16.6, 1.88), (536, 284, 32), (4187, 2218, 250)),
    256: ((30.4, 15.4, 0.47), (518, 263, 8), (4046, 2054, 62.5)),
    1024: ((30.1, 15.1, 0.12), (513, 257, 2), (4011, 2013, 15.6)),
}


@pytest.mark.parametrize("ranks", PAPER)
def test_the_stages_give_every_cell_of_zeros_table_1(ranks):
    """
    All 54 cells, to the last digit that the paper prints; it cuts some off and rounds others.
    Proves `stages`.
    """
    for params, cells in zip((7.5e9, 128e9, 1e12), PAPER[ranks], strict=True):
        for bytes_, cell in zip(stages(params, ranks)[1:], cells, strict=True):
            digits = len(str(cell).split(".")[1]) if isinstance(cell, float) else 0
            assert abs(bytes_ / 1e9 - cell) < 10**-digits


def test_the_bases_are_16_18_and_20_bytes():
    """
    On one rank all stages need the bytes that each basis counts; on many, stage 3 needs an $N$-th.
    Breaks where a basis leaves out a term.
    Proves `stages`.
    """
    for basis in (16, 18, 20):
        assert stages(1, 1, basis) == [basis] * 4
        assert stages(1000, 1000, basis)[3] == basis


@pytest.mark.parametrize("basis", WIDTHS)
def test_the_parts_of_a_stage_add_up_to_table_1_and_stage_3_is_the_first_place(basis):
    """
    Without working buffers, the parts are the cells of the table; with them, stage 3 has the parts
    of `places` without offload. Breaks if a stage cuts another part, or if the two functions count
    other working buffers.
    Proves `stages`, `places`.
    """
    parts = stage_parts(7.5e9, 64, 36, basis)
    states = [sum(nbytes for kind, nbytes in each.items() if kind != "working") for each in parts]
    assert states == pytest.approx(stages(7.5e9, 64, basis), rel=1e-12)
    assert parts[3] == pytest.approx(places(7.5e9, 64, 36, basis)[0].parts["device"], rel=1e-12)
    layer = 7.5e9 / 36 * WIDTHS[basis][0]
    assert [each["working"] for each in parts] == pytest.approx([0, 0, layer, 3 * layer])


def test_stage_3_sends_half_as_much_again():
    """
    On two ranks half of the elements go to the other rank in each of the two or three collectives;
    the exact prediction for a deep chain sends as much, up to a gather of the last layer.
    Proves `sent_elements`, `predict`, `data_parallel`.
    """
    assert [sent_elements(100, 2, stage) for stage in range(4)] == [100, 100, 100, 150]
    assert [sent_elements(100, 1, stage) for stage in range(4)] == [0] * 4
    layers = [LayerSpec((Part(1024, 2, True),))] * 200
    sent = 2 * sent_elements(200 * 1024, 4, 3)
    assert predict(layers, 4).sent_bytes == sent * (1 - 1 / 600)
    assert data_parallel(layers, 4).sent_bytes == 2 * sent_elements(200 * 1024, 4, 0)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 50), st.sampled_from([2, 4, 8]), st.booleans()),
        min_size=1,
        max_size=6,
    ),
    st.integers(1, 9),
)
def test_sharding_never_predicts_more_than_data_parallelism_and_its_padding(parts, world_size):
    """
    For any chain: at rest a rank holds an $N$-th of the model and at most an element of padding per
    layer; a step sends at most three times the padded model.
    Proves `predict`, `data_parallel`, `LayerSpec`, `formulas.Part`.
    """
    layers = [LayerSpec((Part(*part),)) for part in parts]
    p, whole = predict(layers, world_size, step_bytes=0), data_parallel(layers, world_size)
    slack = sum(3 * part[1] for part in parts)
    assert whole.rest_bytes / world_size <= p.rest_bytes <= whole.rest_bytes / world_size + slack
    padded = sum(layer.shard_bytes(world_size) for layer in layers)
    assert p.sent_bytes <= 3 * (world_size - 1) * padded
    assert p.peak_bytes >= p.rest_bytes


def test_the_command_line_prints_the_three_stages_with_their_bases():
    """
    ZeRO's own example: 7.5 billion parameters on 64 ranks take 120, 31.4, 16.6 and 1.9 GB.
    Proves `estimate.main`, `show_stages`, `number`.
    """
    command = [sys.executable, "-m", "zero3.estimate", "--ranks", "64", "--params"]
    text = subprocess.run([*command, "7.5e9"], capture_output=True, text=True, check=True).stdout
    rows = [[float(x) for x in line.split()[-3:]] for line in text.splitlines() if line[1:2] == ":"]
    assert rows[:2] == [[120, 135, 150], [31.41, 46.41, 31.88]]
    assert rows[2:] == [[16.64, 16.88, 17.11], [1.88, 2.11, 2.34]]
    for params, error in (
            ("-1", "--params is too small. Expected: at least 1. Got: -1.0."),
            ("0", "--params is too small. Expected: at least 1. Got: 0.0.")):
        wrong = python_m("zero3.estimate", "--ranks", "64", "--params", params)
        assert wrong.returncode == 2 and error in wrong.stderr

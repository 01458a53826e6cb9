"""
# Frozen weights that rest encoded

The oracle is plain PyTorch, whose frozen weights went once through the encoding.
"""

import copy
import gc
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import wholes
from tests.cases import freeze
from tests.comm.test_encodings import Halves, any_rows
from tests.ranks import run
from tests.streams import Accelerator, before
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save, wrap
from zero3.comm.encodings import Int4, Int8
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.offload.tiers import Encoded

WIDTH = 7
ROWS = 2
TIERS = ("device", "cpu")
ENCODINGS = {"8 bits": Int8(), "4 bits": Int4(), "small blocks": Int4(6), "halves": Halves()}


def layers(seed=0, dtype=torch.double):
    """A frozen layer, one that is half frozen, a trainable one, and a frozen one at the end."""
    torch.manual_seed(seed)
    both = nn.Sequential(freeze(nn.Linear(31, 33)), nn.LayerNorm(33), nn.Tanh(), nn.Linear(33, 5))
    found = [nn.Sequential(freeze(nn.Linear(WIDTH, 31)), nn.Tanh()), both, nn.Linear(5, 9),
             freeze(nn.Linear(9, 3))]
    return [layer.to(dtype) for layer in found]


class Values(nn.Module):
    """One frozen parameter"""

    def __init__(self, values):
        super().__init__()
        self.values = nn.Parameter(values, requires_grad=False)


def sharded(modules, offload):
    return Zero3Sequential([Zero3Layer(module, offload=offload) for module in modules])


def batch(step, dtype=torch.double):
    """The rows of all ranks, and those of this one."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS * world_size, WIDTH, generator=generator).to(dtype)
    return x, x[rank * ROWS : (rank + 1) * ROWS]


def frozen_flats(model):
    """Each flat parameter that is frozen, with the names of its parameters in the plain model."""
    for prefix, layer in model.named_layers():
        for flat in layer.flats:
            if not flat.shard.requires_grad:
                yield flat, [prefix + slot.names[0] for slot in flat.slots]


@torch.no_grad()
def round_frozen(plain, model, encoding):
    """Send frozen weights of a plain model through an encoding, each rank's shard for itself."""
    params = dict(plain.named_parameters())
    for flat, names in frozen_flats(model):
        full = torch.zeros(len(flat.full), dtype=flat.full.dtype)
        for slot, name in zip(flat.slots, names, strict=True):
            slot.of(full).copy_(params[name])
        rows = model.sharded_layers[0].comm.rows(full)
        decoded = encoding.decode(encoding.encode(rows), rows.shape[1]).to(full.dtype).flatten()
        for slot, name in zip(flat.slots, names, strict=True):
            params[name].copy_(slot.of(decoded))


def weights(model):
    with model.full_params() as params:
        return {name: p.detach().clone() for name, p in params.items()}


def codes(model):
    return [flat.storage.code.clone() for flat, _ in frozen_flats(model)]


def largest_difference(plain, model):
    found = weights(model)
    return max((p.detach() - found[name]).abs().max().item()
               for name, p in plain.named_parameters())


# --------------------------------------------------------------------------------------- training


def trained(tier, name, dtype):
    """How far the weights are from those of plain PyTorch, and whether the frozen ones moved."""
    encoding = ENCODINGS[name]
    plain = nn.Sequential(*layers(dtype=dtype))
    # Rank 0's weights have to win.
    model = sharded(layers(seed=dist.get_rank(), dtype=dtype), Offload(tier, frozen=encoding))
    round_frozen(plain, model, encoding)
    at_first = codes(model)
    theirs = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    ours = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(3):
        every, mine = batch(step, dtype)
        theirs.zero_grad()
        ours.zero_grad()
        plain(every).square().mean().backward()
        ours.backward(model(mine).square().mean())
        theirs.step()
        ours.step()
    same = all(map(torch.equal, codes(model), at_first))
    return largest_difference(plain, model), same, len(at_first)


@pytest.mark.parametrize("world_size, tier, name, dtype", [
    (1, "device", "8 bits", torch.double), (1, "cpu", "4 bits", torch.double),
    (2, "device", "4 bits", torch.double), (2, "cpu", "8 bits", torch.double),
    (3, "cpu", "small blocks", torch.double), (3, "device", "halves", torch.double),
    (2, "device", "8 bits", torch.bfloat16),
])
def test_it_trains_as_plain_pytorch_with_the_rounded_weights(world_size, tier, name, dtype):
    """
    Three steps on the global batch, with frozen weights before, beside and after trainable ones.
    The frozen ones keep their bytes. Breaks if a trainable shard is encoded, if the shard of
    another rank is rounded with other blocks, or if padding is decoded into a weight.
    Proves I1, `Encoded`, `Encoded.__init__`, `Encoded.load`, `Encoded.release`, `Offload.shard`.
    """
    # The optimizer keeps fp32 masters of bf16 layers and plain PyTorch does not.
    most = 1e-10 if dtype == torch.double else 2**-5
    for off, same, frozen in run(trained, world_size, tier, name, dtype):
        assert off <= most and same and frozen == 3


def trained_whole(name, tier):
    torch.manual_seed(0)
    plain = wholes.WHOLES[name]().double()
    # All but the layer norms, and the last layer.
    for path, p in plain.named_parameters():
        p.requires_grad_("norm" in path or "layers_.3" in path)
    wrapped = copy.deepcopy(plain)
    model = wrap(wrapped, plain.layers, offload=Offload(tier, frozen=Int4()))
    round_frozen(plain, model, Int4())
    theirs, ours = wholes.optimizers(plain, model)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        ids = wholes.tokens(step, wholes.ROWS * world_size)
        plain.loss(plain(ids)).backward()
        rows = ids[rank * wholes.ROWS : (rank + 1) * wholes.ROWS]
        plain.loss(model(rows)).backward()
        for each in (theirs, ours):
            each.step()
            each.zero_grad()
        if step == 0:
            # Full from now on, until something writes to its shard.
            model.mark_persistent_parameters(1 << 20)
    off = largest_difference(plain, model)
    rows = wholes.tokens(9, 2)
    model(rows)
    assert all(unit.is_fetched for unit in model.units)
    with torch.no_grad():
        for unit in model.units:
            for flat in unit.flats:
                double = flat.storage.load() * 2
                flat.storage.replace(double)
        for p in plain.parameters():
            p.mul_(2)
    return off, (plain(rows) - model(rows)).abs().max().item()


@pytest.mark.parametrize("tier", TIERS)
def test_a_whole_model_trains_with_encoded_weights_too(tier):
    """
    `wrap`, with an optimizer of torch's. Units that stay full read their shards again after a
    write. Doubling the weights doubles the scales and keeps the codes, so nothing is rounded.
    Breaks if a write does not change the version of the shard's parameter.
    Proves I1, `Encoded.save`, `Encoded.load`.
    """
    for off, after in run(trained_whole, 2, "Plain", tier):
        assert off < 1e-10 and after < 1e-10


# ------------------------------------------------------------------------------------------ bytes


def bytes_at_rest(tier):
    """The bytes held at rest, after each of some uses, and those that the formula says."""
    found = []
    for encoding in ENCODINGS.values():
        offload = Offload(tier, frozen=encoding)
        model = sharded(layers(dtype=torch.float32), offload)
        shards = [flat for layer in model.sharded_layers for flat in layer.flats]
        want = 0
        for flat in shards:
            numel = len(flat.full) // dist.get_world_size()
            trains = flat.shard.requires_grad
            rest_bytes = 4 * numel if trains else encoding.nbytes(numel)
            found.append(((flat.shard if trains else flat.storage.code).nbytes, rest_bytes))
            found.append((flat.storage.tier, tier))
            want += rest_bytes
        found.append((held_bytes(model), want))
        optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1)
        for step in range(2):
            model(batch(step, torch.float32)[1]).square().mean().backward()
            optimizer.step()
            model.zero_grad()
            found.append((held_bytes(model), want))
        with torch.inference_mode():
            model(batch(2, torch.float32)[1])
        found.append((held_bytes(model), want))
        with model.full_params(writeback=True):
            pass
        found.append((held_bytes(model), want))
        # Another model with the same object adds its own bytes, and takes them away with it.
        other = sharded(layers(dtype=torch.float32), offload)
        codes_of_both = sum(t.nbytes for t in offload.memory())
        del other
        gc.collect()
        found.append((2 * sum(t.nbytes for t in offload.memory()), codes_of_both))
    return found


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("tier", TIERS)
def test_a_frozen_shard_rests_in_the_bytes_of_its_encoding(world_size, tier):
    """
    To the byte, before and after training, evaluation and `full_params()`; trainable shards rest
    as before. Breaks if the decoded shard, or the shard that was encoded, stays in memory.
    Proves I2, `Encoded.memory`, `Offload.memory`, `Encoded.release`.
    """
    for found in run(bytes_at_rest, world_size, tier):
        assert len(found) == 4 * 16
        for got, want in found:
            assert got == want


def peak_of_a_forward():
    layer = Zero3Layer(freeze(nn.Linear(100, 50)), offload=Offload(frozen=Int8()))
    with Ledger(layer) as tape, torch.no_grad():
        layer(torch.randn(2, 100))
    flat = layer.flats[0]
    rest = Int8().nbytes(len(flat.shard))
    return tape.peak_live_bytes, rest + flat.shard.nbytes + len(flat.full) * 4


def test_the_decoded_shard_counts_while_a_layer_is_gathered():
    """
    The peak is the code, the decoded shard and the full parameters. Breaks if a `Ledger` does not
    see the decoded shard.
    Proves `Encoded.memory`.
    """
    for got, want in run(peak_of_a_forward, 2):
        assert got == want


def rest_bytes():
    torch.manual_seed(0)
    whole = freeze(nn.Sequential(nn.Linear(64, 100), nn.Linear(100, 64, bias=False)))
    model = wrap(whole, nn.Linear, offload=Offload(frozen=Int4()))
    return [flat.storage.code.nbytes for unit in model.units for flat in unit.flats]


def test_an_encoded_shard_of_a_unit_takes_the_bytes_of_its_code():
    """
    Breaks if weights and biases of a module are not encoded as one row.
    Proves `Encoded`.
    """
    expected = [Int4().nbytes(numel) for numel in (64 * 100 + 100, 64 * 100)]
    assert run(rest_bytes, 1) == [expected]


def test_other_shards_rest_as_they_are():
    """
    Frozen whole numbers, frozen complex numbers, and weights that are frozen only after wrapping.
    Breaks if whole numbers go through a scale: 200 would come back as 200.8.
    Proves `Offload.shard`.
    """
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.arange(200, 210), requires_grad=False)
            self.turn = nn.Parameter(torch.full((3,), 0.3 + 1j), requires_grad=False)
            self.later = nn.Parameter(torch.full((3,), 0.3))

        def forward(self, x):
            return x + self.table.sum() + self.turn.real.sum() + self.later.sum()

    layer = Zero3Layer(Table(), offload=Offload(frozen=Int4()))
    layer.requires_grad_(False)
    with layer.full_params() as params:
        assert params["table"].tolist() == [*range(200, 210)]
        assert torch.equal(params["turn"], torch.full((3,), 0.3 + 1j))
    assert layer(torch.zeros(1)).item() == pytest.approx(2045 + 0.9 + 0.9)
    assert not any(isinstance(flat.storage, Encoded) for flat in layer.flats)


def test_a_layer_with_no_elements_rests_encoded_too():
    """
    In no bytes. Breaks where an encoding divides an empty row into blocks.
    Proves `Encoded`.
    """
    module = nn.Module()
    module.empty = nn.Parameter(torch.empty(0, 3), requires_grad=False)
    layer = Zero3Layer(module, offload=Offload(frozen=Int4()))
    assert sum(t.nbytes for t in layer.flats[0].storage.memory()) == 0
    with layer.full_params() as params:
        assert params["empty"].shape == (0, 3)


# ------------------------------------------------------------------- written, saved and loaded


def written(tier):
    """Weights that are written are encoded, and another write of the decoded ones changes none."""
    model = sharded(layers(), Offload(tier, frozen=Int8()))
    plain = nn.Sequential(*layers(seed=1))
    new = {name: p.detach().clone() for name, p in plain.named_parameters()}
    with model.full_params(writeback=True) as params, torch.no_grad():
        for name, p in params.items():
            # Only rank 0's count.
            p.copy_(new[name] if dist.get_rank() == 0 else torch.zeros_like(p))
    round_frozen(plain, model, Int8())
    off = largest_difference(plain, model)
    before = codes(model)
    with model.full_params(writeback=True):
        pass
    flat, _ = next(frozen_flats(model))
    # In place of the old ones, at their place.
    flat.storage.replace(torch.full_like(flat.storage.load(), 3.5))
    replaced = flat.storage.load().unique().tolist()
    flat.storage.release()
    return off, all(map(torch.equal, before[1:], codes(model)[1:])), replaced


@pytest.mark.parametrize("tier", TIERS)
def test_written_weights_are_encoded(tier):
    """
    `full_params(writeback=True)`. Breaks if the code is not written again.
    Proves `Encoded.save`, `Storage.replace`.
    """
    for off, same, replaced in run(written, 2, tier):
        assert off == 0 and same and len(replaced) == 1 and abs(replaced[0] - 3.5) < 3.5 / 200


def saved_and_loaded(folder, tier, is_async):
    model = sharded(layers(), Offload(tier, frozen=Int4()))
    optimizer = Zero3Optimizer(model, lr=0.1)
    for step in range(2):
        optimizer.backward(model(batch(step)[1]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    save(folder, model, optimizer, step=2, async_write=is_async)
    # An asynchronous save is waited for by the load.
    if not is_async:
        model = sharded(layers(seed=1), Offload(tier, frozen=Int4()))
        other = Zero3Optimizer(model, lr=0.1)
    else:
        expected = codes(model)
        with model.full_params(writeback=True) as params, torch.no_grad():
            for p in params.values():
                p.zero_()
        other = optimizer
        assert not all(map(torch.equal, expected, codes(model)))
    load(folder, model, other)
    rest = held_bytes(model)
    # The plain values, in a model that encodes nothing.
    exact = sharded(layers(seed=2), None)
    load(folder, exact)
    found, values = weights(model), weights(exact)
    same = all(torch.equal(found[name], values[name]) for name in found)
    return same, [code.tolist() for code in codes(model)], rest


def loaded_elsewhere(folder):
    """On another number of ranks: the largest error of a frozen weight over the largest weight."""
    exact = sharded(layers(seed=2), None)
    load(folder, exact)
    model = sharded(layers(seed=1), Offload(frozen=Int4()))
    load(folder, model)
    plain = nn.Sequential(*layers())
    with torch.no_grad():
        for name, value in weights(exact).items():
            dict(plain.named_parameters())[name].copy_(value)
    round_frozen(plain, model, Int4())
    return largest_difference(plain, model)


@pytest.mark.parametrize("tier, is_async", [("device", False), ("cpu", False), ("device", True)])
def test_a_checkpoint_has_the_decoded_values_and_gives_the_same_bytes_again(
        tier, is_async, tmp_path):
    """
    On as many ranks, and on another number the values are rounded once more. A model without
    encodings reads the same values. Breaks if the code were saved, or the values before they were
    encoded.
    Proves `Encoded.load`, `Encoded.save`, `Entries.here`.
    """
    folder = str(tmp_path)
    found = run(saved_and_loaded, 2, folder, tier, is_async)
    for rank, (same, loaded, rest) in enumerate(found):
        assert same
        for numel, code in zip((31 * 8, 32 * 33, 30), loaded, strict=True):
            assert len(code) == Int4().nbytes(numel // 2)
        assert rest < 6000, rank
    for off in run(loaded_elsewhere, 3, folder):
        assert off == 0


@settings(max_examples=100, deadline=None)
@given(rows=any_rows(), name=st.sampled_from([*ENCODINGS]),
       dtype=st.sampled_from([torch.bfloat16, torch.half, torch.float32, torch.double]))
def test_encoding_the_decoded_weights_changes_nothing(rows, name, dtype):
    """
    Also in 16 bits, which have fewer digits than a code times a scale. Breaks if a checkpoint is
    loaded to other bytes than the saved ones.
    Proves `Encoded._encode`, `Encoded.load`.
    """
    largest = min(torch.finfo(dtype).max, torch.finfo(torch.bfloat16).max) / 2
    values = torch.zeros(rows.numel(), dtype=dtype)
    values.copy_(rows.flatten().clamp(-largest, largest))
    layer = Zero3Layer(Values(values), offload=Offload(frozen=ENCODINGS[name]))
    storage = layer.flats[0].storage
    before, decoded = storage.code.clone(), storage.load().clone()
    storage.save()
    assert torch.equal(storage.code, before) and torch.equal(storage.load(), decoded)


# ----------------------------------------------------------------------------------------- errors


def message(does, kind=RuntimeError):
    with pytest.raises(kind) as error:
        does()
    return str(error.value)


def test_an_encoded_shard_cannot_be_made_trainable():
    """
    By any of the ways to say so; freezing it once more is harmless, and the layer still works.
    Breaks if an optimizer gets a shard whose steps would be rounded away.
    Proves `FrozenShard`, `FreedParameter.of_shard`.
    """
    model = sharded(layers(), Offload(frozen=Int8()))
    shard = model.sharded_layers[0].chunk[0]
    ways = (model.requires_grad_, lambda: model.requires_grad_(True),
            lambda: shard.requires_grad_(requires_grad=True),
            lambda: setattr(shard, "requires_grad", True))
    for way in ways:
        told = message(way)
        assert "rank 0: layer 0 (Sequential) cannot train its frozen weights" in told
        assert "What to do: unfreeze them before the layer is wrapped" in told
        assert not shard.requires_grad
    shard.requires_grad_(False)
    shard.requires_grad = False
    model.requires_grad_(False)
    assert model(torch.ones(2, WIDTH).double()).isfinite().all()
    # What an optimizer of torch's asks of all parameters is answered; an element is not.
    torch.optim.SGD(model.parameters(), lr=0.1).zero_grad()
    assert len(shard) == 31 * 8 and shard.dtype == torch.double and shard.grad is None
    assert "look at it in `full_params()`" in message(lambda: shard + 1)


@pytest.mark.parametrize("options, told", [
    ({"frozen": Int8}, "`frozen`, an encoding"), ({"frozen": "int8"}, "`frozen`, an encoding"),
    ({"frozen": 8}, "`frozen`, an encoding"),
    ({"tier": "nvme", "folder": "/tmp", "frozen": Int8()}, 'Offload("cpu", frozen=Int8())'),
])
def test_an_offload_that_cannot_encode_is_refused(options, told):
    """
    Also with the nvme tier, where a file would have to be decoded into one of the buffers.
    Proves `Offload`.
    """
    text = message(lambda: Offload(**options), ValueError)
    assert told in text and "What to do: " in text


def infinite(value):
    module = freeze(nn.Linear(3, 3))
    if dist.get_rank() == 0:
        # The last element: it goes to the last rank.
        module.bias.data[2] = value
    return message(lambda: Zero3Layer(module, offload=Offload(frozen=Int8())))


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_an_infinite_frozen_weight_is_an_error_on_all_ranks(value):
    """
    A mask of minus infinities would make NaNs of the weights beside it, in every forward.
    Proves `Encoded.__init__`.
    """
    for told in run(infinite, 2, value):
        assert "cannot keep its frozen weights encoded" in told and "rank 1" in told
        assert "What to do: wrap this layer with an `Offload` without `frozen=`" in told


def test_the_largest_half_stays_finite():
    """
    65504 is the largest fp16 number, and its scale would be rounded up: an infinity. The next lower
    scale is 512.
    Proves `Int8.encode`, `Encoded.__init__`.
    """
    module = freeze(nn.Linear(3, 3, bias=False).half())
    module.weight.data[0, 0] = -65504
    layer = Zero3Layer(module, offload=Offload(frozen=Int8(2)))
    out = layer(torch.eye(3, dtype=torch.half))
    assert out[0, 0] == -512 * 127 and out.isfinite().all()


def no_room():
    with mock.patch("zero3.guards.room.room", lambda at: 1000 if at.type == "cpu" else 1 << 40):
        with Accelerator():
            return message(lambda: Zero3Layer(freeze(nn.Linear(100, 100)),
                                              offload=Offload("cpu", frozen=Int8())))


def test_cpu_memory_that_is_too_small_for_the_code_is_an_error():
    """
    Breaks if the tier "cpu" takes memory without a look.
    Proves `Offload.shard`.
    """
    for told in run(no_room, 1):
        assert "has no room for its encoded shard" in told
        assert f"{Int8().nbytes(10100):,} bytes on cpu" in told


def test_a_layer_and_its_code_are_freed_with_the_last_reference():
    """
    Breaks if the `Offload`, which may serve several models, kept the code.
    Proves `Encoded`, `Offload`.
    """
    offload = Offload(frozen=Int8())
    layer = Zero3Layer(freeze(nn.Linear(5, 5)), offload=offload)
    layer(torch.ones(1, 5))
    found = weakref.ref(layer.flats[0].storage.code)
    del layer
    gc.collect()
    assert found() is None and offload.memory() == []


# ---------------------------------------------------------------------------------------- streams


def on_an_accelerator(tier, mistake=None):
    """
    Train, evaluate, write and save nothing on the host: what is not ordered, how often the host
    waited in a forward pass, and the log of the last one with the layers.
    """
    with Accelerator() as device:
        modules = layers(dtype=torch.float32)
        model = sharded([nn.Sequential(freeze(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
                         for _ in range(3)] + modules, Offload(tier, frozen=Int4()))
        comm = model.sharded_layers[0].comm
        comm.fetch_stream.name = "fetch"
        if mistake:
            mistake(model)
        found = [layer.flats[-1] for layer in model.sharded_layers]
        for i, flat in enumerate(found):
            device.name(flat.full, f"layer {i}")
            if isinstance(flat.storage, Encoded):
                device.name(flat.storage.code, f"code {i}")
        optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1)
        for _ in range(2):
            x = torch.randn(2, WIDTH)
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        with model.full_params(writeback=True) as params, torch.no_grad():
            for p in params.values():
                p.mul_(0.5)
        device.waits.clear()
        device.log.clear()
        model(torch.randn(2, WIDTH))
        return [*device.problems], [*device.waits], [*device.log], device.checks


def off_the_fetch_stream(model):
    """A planted mistake: a decoded shard is the compute stream's"""
    comm = model.sharded_layers[0].comm
    real = type(comm).on

    def on(stream):
        return real(comm, comm.current_stream())

    storage_comm = mock.Mock(wraps=comm)
    storage_comm.on = on
    storage_comm.fetch_stream = comm.fetch_stream
    for flat in (flat for layer in model.sharded_layers for flat in layer.flats):
        if isinstance(flat.storage, Encoded):
            flat.storage.owner = mock.Mock(comm=storage_comm)


def races(tier):
    problems, waits, log, checks = on_an_accelerator(tier)
    planted = []
    # It is a mistake of one rank's streams.
    if dist.get_world_size() == 1:
        planted = on_an_accelerator(tier, off_the_fetch_stream)[0]
    copied = [o for o in log if "code 2" in o.names and o.what == "_to_copy" and o.line == "fetch"]
    computed = [o for o in log if "layer 1" in o.names and o.line == "compute"]
    # The copy of the code of layer 2 begins before layer 1 has computed.
    overlaps = not any(before(a, b) for a in computed for b in copied)
    return problems, waits, checks, bool(planted), (len(copied), len(computed), overlaps)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("tier", TIERS)
def test_on_an_accelerator_nothing_races_and_codes_are_copied_ahead(world_size, tier):
    """
    A decoded shard is memory of the fetch stream, which copies it. The code of the next layer
    travels from CPU memory while this one computes. Breaks if it is decoded on the compute stream:
    its memory would be used again while the fetch stream copies from it.
    Proves I9, `Encoded.load`, `Encoded.release`.
    """
    for problems, waits, checks, planted, (copied, computed, overlaps) in run(
            races, world_size, tier):
        assert not problems and checks > 200 and planted == (world_size == 1)
        # With shards in CPU memory, the host waits for the copies of trainable ones.
        assert not waits or tier == "cpu"
        if tier == "cpu":
            assert copied and computed and overlaps

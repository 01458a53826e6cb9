"""
# Checkpoints: what is saved is there, wholly or not at all, for any number of ranks
"""

import errno
import json
import os
import random
import resource
import shutil
import sys
import threading
import zlib
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.cases import EachParameter
from tests.ranks import run
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save, wrap
from zero3.beside.dcp import load_dcp, save_dcp
from zero3.checkpoint.convert import main
from zero3.checkpoint.entries import Entries
from zero3.checkpoint.formats import from_tensors
from zero3.checkpoint.reader import (
    MANIFEST,
    CheckpointReader,
    TensorFile,
    decode,
    encode,
    file_name,
    newest,
    steps,
)
from zero3.offload.disk import File
from zero3.offload.tensors import BLOCK_BYTES, Broken, Writer

FP64, FP32, BF16 = torch.double, torch.float32, torch.bfloat16
ROWS = 12  # of a global batch: splits over 1, 2, 3 and 4 ranks


class Counts(nn.Module):
    """Passes on what comes, and keeps in buffers what came to this rank."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(11))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.5)
        return x


def plain(seed=0, width=11):
    """Unequal layers; a frozen matrix in one with a trainable one; buffers."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(5, width), Counts() if width == 11 else nn.Identity(), nn.Tanh()),
        nn.Sequential(nn.Linear(width, 7), nn.Tanh(), nn.Linear(7, 7)),
        nn.Linear(7, 3))
    model[1][2].weight.requires_grad_(False)
    return model


def decay(name, p):
    return {"weight_decay": 0.1 if p.ndim > 1 else 0.0}


def shard(model, kind="chain", dtype=FP32, tier="device", folder=None, torchs=False, **options):
    offload = Offload(tier, folder) if tier == "nvme" else Offload(tier)
    model = model.to(dtype)
    if kind == "wrap":
        model = wrap(model, nn.Sequential, offload=offload)
    else:
        model = Zero3Sequential([Zero3Layer(layer, offload=offload) for layer in model])
    options = {"lr": 0.01, "eps": 1e-3, **options}
    if torchs:
        return model, torch.optim.AdamW(model.get_trainable_chunk(), **options)
    return model, Zero3Optimizer(model, group_by=decay, offload=offload, **options)


def batch(step, dtype):
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(model, optimizer, step, dtype=FP32):
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    out = model(batch(step, dtype).chunk(world_size)[rank])
    loss = (out.float() if dtype == BF16 else out).square().mean()
    if isinstance(optimizer, Zero3Optimizer):
        optimizer.backward(loss)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model):
    with model.full_params() as params:
        return {name: p.detach().clone() for name, p in params.items()}


def contents(folder):
    """All that a checkpoint has of each parameter, by its plain name and the key."""
    checkpoint = CheckpointReader(newest(folder))
    found = {}
    for p in checkpoint.params:
        for key in ("param", *p.states["moments"]):
            found[p.name, key] = checkpoint.read_whole(p, key)
        for key, value in decode(p.states["scalars"]).items():
            found[p.name, key] = torch.as_tensor(value)
    return found


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[key], other[key]) for key in one)


def difference(one, other):
    assert one.keys() == other.keys()
    return max((one[key].double() - other[key].double()).abs().max().item() for key in one)


# ----------------------------------------------------------------------------- save, stop, go on


def goes_on(source, folder, kind, dtype, tier, scratch, count, torchs=False):
    """Build, load if there is something, take so many steps, save; return the weights."""
    model, optimizer = shard(plain(seed=bool(source)), kind, dtype, tier, scratch, torchs)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 4], gamma=0.5)
    first = 0
    if source:
        extra = load(source, model, optimizer)
        scheduler.load_state_dict(extra["scheduler"])
        first = extra["step"]
    for step in range(first, first + count):
        train(model, optimizer, step, dtype)
        scheduler.step()
    extra = {"step": first + count, "scheduler": scheduler.state_dict()}
    save(folder, model, optimizer, step=first + count, extra=extra)
    counts = next(m for m in model.modules() if isinstance(m, Counts))
    # What comes out of nothing but the shards has to be what the next step begins from.
    return weights(model), counts.mean, counts.calls.item(), optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("kind, dtype, tier, torchs, tolerance, all_ranks", [
    # In double precision what is left is the order in which ranks are added.
    ("chain", FP64, "device", False, 1e-12, (1, 2, 3, 4)),
    ("wrap", FP64, "nvme", False, 1e-12, (1, 2, 3, 4)),
    # A gradient in bf16 has 8 bits, and its sum over ranks is rounded elsewhere.
    ("chain", BF16, "cpu", False, 2e-2, (2, 3)),
    # With an optimizer of torch's.
    ("chain", FP64, "device", True, 1e-12, (2, 3)),
])
def test_a_run_goes_on_on_any_number_of_ranks(tmp_path, kind, dtype, tier, torchs, tolerance,
                                              all_ranks):
    """
    Saved on 2 ranks after three steps, taken up on 1, 2, 3 and 4: two steps later weights, moments
    and the counts of steps are those of a run that never stopped. On 2 ranks bit for bit. Breaks
    where a shard is cut wrongly, a moment forgotten, or padding taken for a parameter.
    Proves `save_load.save`, `load`, `Entries.shard`, `Entries.take`.
    """
    there = (kind, dtype, tier, tmp_path)
    run(goes_on, 2, None, tmp_path / "a", *there, 3, torchs)
    through = run(goes_on, 2, None, tmp_path / "all", *there, 5, torchs)
    for ranks in all_ranks:
        folder = tmp_path / f"{ranks}"
        found = run(goes_on, ranks, tmp_path / "a", folder, *there, 2, torchs)
        one, other = contents(folder), contents(tmp_path / "all")
        assert difference(one, other) <= tolerance
        assert difference(found[0][0], through[0][0]) <= tolerance
        assert found[0][2:] == through[0][2:] == (5, 0.0025)
        if ranks == 2:
            assert same(one, other) and same(found[0][0], through[0][0])
            # Buffers are each rank's own.
            assert all(torch.equal(a[1], b[1]) for a, b in zip(found, through, strict=True))
            assert not torch.equal(found[0][1], found[1][1])


def test_what_is_saved_is_what_plain_pytorch_has(tmp_path):
    """
    Weights, both moments and steps of plain AdamW on the global batch, read from the files of three
    ranks by parameter. Breaks where a name belongs to another place in the flat parameter.
    Proves `Own`, `Entries.describe`, `Entries.tensors`, `_states_of`,
    `CheckpointReader.read_whole`, `Slot`.
    """
    run(goes_on, 3, None, tmp_path, "chain", FP64, "device", None, 3)
    model = plain().double()
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(
        [{"params": [p], **decay(name, p)} for name, p in trainable.items()], lr=0.01, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 4], gamma=0.5)
    for step in range(3):
        train(model, optimizer, step, FP64)
        scheduler.step()
    expected = {(name, "param"): p.detach() for name, p in model.named_parameters()}
    for name, p in trainable.items():
        expected |= {(name, key): value for key, value in optimizer.state[p].items()}
    assert difference(contents(tmp_path), expected) <= 1e-12


def saves(folder, kind, dtype, tier, scratch):
    model, optimizer = shard(plain(), kind, dtype, tier, scratch)
    for step in range(2):
        train(model, optimizer, step, dtype)
    save(folder, model, optimizer, step=2)
    return weights(model)


def loads_and_saves(source, folder, kind, dtype, tier, scratch):
    model, optimizer = shard(plain(1), kind, dtype, tier, scratch)
    load(source, model, optimizer)
    save(folder, model, optimizer, step=2)
    return weights(model)


@pytest.mark.parametrize("tier, other, dtype, then", [
    ("device", "nvme", BF16, FP32), ("nvme", "cpu", FP32, BF16), ("cpu", "device", BF16, BF16),
    ("nvme", "device", BF16, BF16),
])
def test_another_tier_and_another_dtype_may_load_it(tmp_path, tier, other, dtype, then):
    """
    The masters and the moments come back as they were, and the weights are them, rounded; from a
    chain into a wrapped model. Breaks where the rounded weights are saved in place of the masters.
    Proves I8, `Entries.here`, `Entries.take`, `Flat`, `Flat.dtype`, `Flat.in_file`,
    `Listing.dtype`.
    """
    before = run(saves, 2, tmp_path / "a", "chain", dtype, tier, tmp_path)[0]
    folders = (tmp_path / "a", tmp_path / "b")
    after = run(loads_and_saves, 2, *folders, "wrap", then, other, tmp_path)[0]
    masters = contents(tmp_path / "a")
    frozen = {key for key in masters if key[0] == "1.2.weight"}
    found = contents(tmp_path / "b")
    assert same({k: v for k, v in masters.items() if k not in frozen},
                {k: v for k, v in found.items() if k not in frozen})
    for name, p in after.items():
        assert torch.equal(p, masters[name, "param"].to(then))
        if dtype == then:
            assert torch.equal(p, before[name])


def draws():
    return torch.rand(2).tolist(), random.random(), np.random.rand()


def draws_on(folder, load_it):
    model, _ = shard(plain())
    if load_it:
        load(folder, model)
        return draws()
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(dist.get_rank())
    draws()
    save(folder, model, step=0)
    return draws()


def test_random_numbers_go_on_on_each_rank(tmp_path):
    """
    On as many ranks each stream goes on where it was; on more, each rank has one of its own.
    Proves `_random_states`, `_random_states_of`, `_set_random_states`.
    """
    drawn = run(draws_on, 2, tmp_path, False)
    assert run(draws_on, 2, tmp_path, True) == drawn
    apart = run(draws_on, 3, tmp_path, True)
    assert len({str(each) for each in (*apart, *drawn)}) == 5
    assert run(draws_on, 3, tmp_path, True) == apart


@pytest.mark.parametrize("torchs", [False, True])
def test_adamw_stays_adamw_after_a_checkpoint_of_adam(tmp_path, torchs):
    """
    Its weight decay stays decoupled, as after `load_state_dict` of torch's, and Adam takes that of
    a checkpoint of AdamW. Breaks where AdamW copies this option, and goes on as Adam in silence.
    Proves `Entries._take_options`.
    """

    def make(optimizer_class):
        model = Zero3Sequential([Zero3Layer(nn.Linear(3, 3))])
        return model, (optimizer_class(model.get_trainable_chunk()) if torchs
                       else Zero3Optimizer(model, optimizer_class))

    for there, here in ((torch.optim.Adam, torch.optim.AdamW), (torch.optim.AdamW,
                                                                torch.optim.Adam)):
        save(tmp_path / there.__name__, *make(there), step=0)
        model, optimizer = make(here)
        load(tmp_path / there.__name__, model, optimizer)
        assert optimizer.param_groups[0]["decoupled_weight_decay"]


class Tied(nn.Module):
    """The first and the last matrix are one, in two units or in one"""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.a, self.b, self.c = (nn.Sequential(nn.Linear(5, 5)) for _ in range(3))
        self.c[0].weight = self.a[0].weight

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def saves_tied(folder, source):
    model = wrap(Tied(1 if source else 0), nn.Sequential)
    optimizer = Zero3Optimizer(model, lr=0.01)
    if source:
        load(source, model, optimizer)
    else:
        train(model, optimizer, 0)
    save(folder, model, optimizer, step=1)
    return weights(model)


def test_a_tied_parameter_is_saved_once_and_found_by_either_name(tmp_path):
    """
    In the manifest it has both of its names, and another number of ranks finds it by them. Breaks
    where a unit knows a parameter of another one by one name alone.
    Proves `Entries._names`, `Param`, `CheckpointReader`.
    """
    one = run(saves_tied, 2, tmp_path / "a", None)[0]
    assert same(one, run(saves_tied, 3, tmp_path / "b", tmp_path / "a")[0])
    assert torch.equal(one["a.0.weight"], one["c.0.weight"])
    checkpoint = CheckpointReader(newest(tmp_path / "a"))
    assert [p.entry["names"] for p in checkpoint.params if len(p.entry["names"]) > 1] == [
        ["a.0.weight", "c.0.weight"]]
    assert checkpoint.by_name["c.0.weight"] is checkpoint.by_name["a.0.weight"]
    assert same(contents(tmp_path / "a"), contents(tmp_path / "b"))


# -------------------------------------------------------------------------- what it takes, exactly


def test_a_rank_writes_its_shards_and_nothing_else(tmp_path):
    """
    The formula of `save_load.py`, with its padding: masters and moments of what trains, and what
    is frozen as it is. Breaks where parameters are written beside their masters.
    Proves I5, `Entries.entries`, `Entries.manifest`, `Entry`, `Writer`.
    """
    run(saves, 3, tmp_path, "chain", BF16, "device", None)
    checkpoint = CheckpointReader(newest(tmp_path))
    trainable = [5 * 11 + 11, 11 * 7 + 7 + 7, 7 * 3 + 3]
    shards = 12 * sum(-(-numel // 3) for numel in trainable) + 2 * -(-7 * 7 // 3)
    buffers = 8 + 11 * 2
    for file in checkpoint.files:
        header = 8 + int.from_bytes(file.read_bytes(0, 8), "little")
        assert file.nbytes - header == shards + buffers
    # Padding is zero, in files too (I5).
    for i, flat in enumerate(checkpoint.flats):
        for key in flat["keys"]:
            last = checkpoint.files[2].read(f"{i}.{key}")
            assert (last[len(last) - flat["padding"] :] == 0).all()


class Unused(nn.Module):
    """A layer with a parameter of one element that no loss uses"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.gate = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.linear(x)


def saves_unused(folder):
    """The moments and the weights in files, of a layer with one parameter that is not stepped"""
    model = Zero3Sequential([Zero3Layer(Unused())])
    optimizer = Zero3Optimizer(model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    save(folder, model, optimizer, step=1)


@pytest.mark.parametrize("world_size", [1, 2])
def test_one_element_without_a_state_is_saved_beside_others_with_one(tmp_path, world_size):
    """
    It is a piece by itself, whose moments are zeros in the file. Breaks where the bytes of these
    zeros, one element with the stride 0, cannot be seen.
    Proves `Writer.write`, `Entries.values`, `bytes_of`.
    """
    run(saves_unused, world_size, tmp_path)
    checkpoint = CheckpointReader(newest(tmp_path))
    gate = next(param for param in checkpoint.params if param.name == "0.gate")
    assert not gate.states["moments"]
    assert [checkpoint.read(gate, key, 0, 1).item() for key in ("param", "exp_avg")] == [1, 0]


class Empty(nn.Module):
    """A layer whose only parameter has no elements"""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 2))

    def forward(self, x):
        return x + self.empty.sum()


def without_elements(folder, torchs, kind):
    """The weights, one step after a save and one step after a load into new layers"""
    saves, loads = {"ours": (partial(save, step=1), load), "dcp": (save_dcp, load_dcp)}[kind]
    after = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = Zero3Sequential([Zero3Layer(nn.Linear(2, 2)), Zero3Layer(Empty())])
        optimizer = (torch.optim.AdamW(model.parameters(), lr=0.1) if torchs
                     else Zero3Optimizer(model, lr=0.1))
        for saved in (seed, 1):
            if saved:
                (loads if seed else saves)(folder, model, optimizer)
            model(torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        after.append(weights(model))
    return after


@pytest.mark.parametrize("kind", ["ours", "dcp"])
@pytest.mark.parametrize("torchs", [True, False])
def test_a_layer_without_elements_is_saved_and_loaded(tmp_path, torchs, kind):
    """
    With an optimizer of torch's, which has states of such a shard, and with ours, which has none.
    Breaks where the checkpoint is written with states of no parameter, and cannot be read.
    Proves `Entries.describe`, `Entries._take_states`, `CheckpointReader._check`.
    """
    for one, other in run(without_elements, 2, tmp_path, torchs, kind):
        assert same(one, other)


def test_a_parameter_without_elements_needs_no_state(tmp_path):
    """
    Adafactor has other states of the vector beside this matrix. Breaks where a checkpoint that
    was just saved is refused, because it has none of this matrix.
    Proves `Entries._check_optimizer`.
    """
    layer = Zero3Layer(nn.ModuleList([nn.RMSNorm(2), Empty()]))
    layer.module.forward = layer.module[0].forward
    optimizer = Zero3Optimizer(layer, torch.optim.Adafactor)
    optimizer.backward(layer(torch.ones(1, 2)).sum())
    optimizer.step()
    save(tmp_path, layer, optimizer, step=1)
    before = weights(layer)
    load(tmp_path, layer, optimizer)
    assert same(weights(layer), before)


class Counted(EachParameter):
    """Its count of steps is a tensor of one element; it has a moment, and a list of nine numbers"""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)

    def update(self, p, lr):
        state = self.state[p]
        state["step"] = state.get("step", torch.zeros(1)) + 1
        state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
        state["rates"] = state.get("rates", torch.zeros(9)).roll(1)
        state["rates"][0] = lr / state["step"]
        p.sub_(state["sum"] * state["rates"][:2].sum())


def goes_on_counted(folder, torchs, tier, step):
    """Two steps and a save, or a load; one more step: the weights"""
    torch.manual_seed(step)
    layer = Zero3Layer(nn.Linear(2, 1, bias=torchs))
    model = Zero3Sequential([layer, Zero3Layer(nn.Linear(1, 2))])
    offload = Offload(tier, folder.parent) if tier == "nvme" else Offload(tier)
    optimizer = (Counted(model.parameters()) if torchs
                 else Zero3Optimizer(model, Counted, group_by=decay_of, offload=offload))

    def forward():
        model(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    if step:
        load(folder, model, optimizer)
    else:
        forward()
        forward()
        save(folder, model, optimizer, step=2)
    forward()
    return weights(model), {tuple(state["step"].tolist()) for state in optimizer.state.values()}


def decay_of(name, p):
    return {"lr": 0.1 if p.ndim > 1 else 0.05}


@pytest.mark.parametrize("torchs, tier", [(True, "device"), (False, "device"), (False, "nvme")])
def test_a_count_that_is_a_tensor_of_one_element_is_no_moment(tmp_path, torchs, tier):
    """
    On two ranks some pieces have two elements and others one, and on one rank all have more. Breaks
    where a count is written as a moment, with fewer elements than the piece, or the list with more;
    or where it is one where a piece has one element, and the next run has more there.
    Proves `Entries.state_of`, `Entries.describe`, `_check_states`.
    """
    expected = run(goes_on_counted, 2, tmp_path / "run", torchs, tier, 0)
    manifest = CheckpointReader(newest(tmp_path / "run"))
    assert {key for flat in manifest.flats for key in flat["keys"]} == {"param", "sum"}
    for world_size in (2, 1):
        for at, (after, steps_after) in enumerate(
                run(goes_on_counted, world_size, tmp_path / "run", torchs, tier, 1)):
            assert steps_after == expected[at][1] == {(3,)}
            assert difference(after, expected[at][0]) < 1e-6


def padding_only(folder, make, kind):
    """The data types of the states after a save, a load and a step, on a rank without elements"""
    model = Zero3Sequential([Zero3Layer(nn.Linear(1, 1, bias=False).bfloat16())])
    options = {"momentum": 0.9} if make == torch.optim.SGD else {}
    optimizer = Zero3Optimizer(model, make, lr=0.1, **options)
    saves, loads = {"ours": (partial(save, step=1), load), "dcp": (save_dcp, load_dcp)}[kind]
    for saved in (False, True):
        if saved:
            saves(folder, model, optimizer)
            loads(folder, model, optimizer)
        optimizer.backward(model(torch.ones(1, 1, dtype=BF16)).sum())
        optimizer.step()
        optimizer.zero_grad()
    (state,) = optimizer.state.values()
    return {key: value.dtype for key, value in state.items()}


@pytest.mark.parametrize("kind", ["ours", "dcp"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_rank_of_padding_alone_loads_moments_of_the_same_type(tmp_path, make, kind):
    """
    One weight in bf16 on two ranks: the second one reads nothing, and its moments are of fp32 too.
    Breaks where they are of the type of the shard, so that its step fails or loses digits.
    Proves `Entries.shard`.
    """
    one, other = run(padding_only, 2, tmp_path, make, kind)
    assert one == other and {*other.values()} == {FP32}


def test_layers_of_two_data_types_are_loaded_into_one_without_rounding(tmp_path):
    """
    A layer in bf16 and one in fp32 are saved, and are one layer in fp32 where they are loaded.
    Breaks where the shard is read in the data type of its first parameter.
    Proves `Entries.shard`.
    """
    layers = [nn.Sequential(nn.Linear(3, 3).to(dtype)) for dtype in (BF16, FP32)]
    model = Zero3Sequential([Zero3Layer(layer) for layer in layers])
    save(tmp_path, model, step=1)
    other = Zero3Layer(nn.Sequential(*(nn.Sequential(nn.Linear(3, 3)) for _ in range(2))))
    load(tmp_path, other)
    assert same(weights(other), {name: p.float() for name, p in weights(model).items()})


def test_a_range_of_a_parameter_is_read_from_its_own_blocks(tmp_path, monkeypatch):
    """
    The bound in `reader.py`: n bytes are in n / 2^20 blocks, rounded up, and one more. Breaks
    where a reader reads what it does not need.
    Proves `CheckpointReader.read`, `TensorFile.read`, `TensorFile.read_bytes`,
    `TensorFile.block`.
    """
    big = {"a": torch.arange(3 << 20, dtype=FP32), "b": torch.ones(1 << 20)}
    announced = {name: {"param": (t.dtype, t.shape)} for name, t in big.items()}
    from_tensors(tmp_path, 0, announced, {}, lambda name, key: big[name])
    # The first, which has the manifest's length to find and the header.
    checkpoint = CheckpointReader(newest(tmp_path))
    assert checkpoint.files[0].header
    read, block = [], TensorFile.block
    monkeypatch.setattr(TensorFile, "block", lambda self, i: read.append(i) or block(self, i))
    for begin, end in ((0, 1), (262_143, 262_145), (1_000_000, 2_000_000), (0, 3 << 20)):
        read.clear()
        values = checkpoint.read(checkpoint.by_name["a"], "param", begin, end)
        assert torch.equal(values, big["a"][begin:end])
        # What is in memory still is not read again.
        assert len({*read}) <= -(-4 * (end - begin) // BLOCK_BYTES) + 1


def saves_from_files(folder, scratch):
    def kib(name):
        with open("/proc/self/status") as status:
            return int(status.read().split(name + ":")[1].split()[0])

    layers = [nn.Linear(700, 700) for _ in range(20)]
    nvme = Offload("nvme", scratch)
    model = Zero3Sequential([Zero3Layer(layer, offload=nvme) for layer in layers])
    optimizer = Zero3Optimizer(model, lr=1e-3, offload=nvme)
    optimizer.backward(model(torch.ones(2, 700)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    grown = []
    for what in (lambda: save(folder, model, optimizer, step=1),
                 lambda: save(folder, model, optimizer, step=2, async_write=True).wait(),
                 lambda: load(folder, model, optimizer)):
        # The high-water mark begins again.
        Path("/proc/self/clear_refs").write_text("5")
        before = kib("RssAnon")
        what()
        grown.append((kib("VmHWM") - kib("RssFile") - before) >> 10)
    return grown, sum(12 * len(o.shard) for o in optimizer.shard_states) >> 20


def test_states_in_files_do_not_come_to_memory_together(tmp_path):
    """
    Twenty layers whose states are in files: to save and to load them takes the pieces of a file
    that are under way, 32 MiB, and a shard, and not the states. An asynchronous save writes them at
    once.
    Proves `Writer.write`, `Entries.tensors`, `Saving._write_now`.
    """
    for grown, states in run(saves_from_files, 1, tmp_path / "a", tmp_path, fresh=True):
        assert states > 100 and max(grown) < 60, (grown, states)


# --------------------------------------------------------------------------- while training goes on


def saves_meanwhile(folder, torchs):
    """The disk waits until two more steps are done."""
    model, optimizer = shard(plain(), torchs=torchs)
    train(model, optimizer, 0)
    before, events, gate, move = weights(model), [], threading.Event(), File.move

    def wait(self, *args):
        assert gate.wait(60)
        events.append("write")
        return move(self, *args)

    File.move = wait
    try:
        saving = save(folder, model, optimizer, step=1, async_write=True)
        for step in (1, 2):
            train(model, optimizer, step)
            events.append("step")
        there = newest(folder)
        gate.set()
        # The step that finds all files written makes the checkpoint; here one that waits does.
        where = saving.wait()
    finally:
        File.move = move
    assert there is None and saving.wait() == where
    other, other_optimizer = shard(plain(1), torchs=torchs)
    load(folder, other, other_optimizer)
    return events[:3], same(weights(other), before), not same(weights(model), before)


def test_what_rests_in_files_comes_first_of_what_is_as_wide(tmp_path):
    """
    An asynchronous save writes it at once, and copies what comes after it. Breaks where a copy of
    what is in memory would have to wait for files.
    Proves `Entries.entries`.
    """
    model = Zero3Sequential([
        Zero3Layer(nn.Linear(3, 3), offload=Offload("nvme", tmp_path)),
        Zero3Layer(nn.Linear(3, 3)), Zero3Layer(nn.Linear(3, 3).double()),
        Zero3Layer(nn.Linear(3, 3), offload=Offload("nvme", tmp_path))])
    entries = Entries(model, None)
    manifest = entries.manifest(entries.describe())
    found = [(entry.name, entry.in_memory) for entry in entries.entries(manifest)]
    assert found == [("2.param", True), ("0.param", False), ("3.param", False), ("1.param", True)]


@pytest.mark.parametrize("torchs", [False, True])
def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, torchs):
    """
    Two steps are taken before a byte is written, and what is written is of before them. Breaks
    where an asynchronous save waits, or writes what has changed since.
    Proves `Saving`, `Saving.begin`, `Saving._write_now`, `Saving.wait`.
    """
    expected = ["step", "step", "write"], True, True
    assert run(saves_meanwhile, 2, tmp_path, torchs) == [expected] * 2


def fails_meanwhile(folder):
    model, optimizer = shard(plain())
    train(model, optimizer, 0)
    save(folder, model, optimizer, step=1)
    move = File.move
    if dist.get_rank() == 1:
        def full(*_):
            raise OSError(errno.ENOSPC, "No space left on device")
        File.move = full
    saving = save(folder, model, optimizer, step=2, async_write=True)
    saving.written.exception()
    dist.barrier()
    File.move, before = move, weights(model)
    message = ""
    try:
        train(model, optimizer, 1)
    except RuntimeError as error:
        message = str(error)
    try:
        saving.wait()
        again = ""
    except RuntimeError as error:
        again = str(error)
    optimizer.zero_grad()
    unchanged = same(weights(model), before)
    train(model, optimizer, 1)
    last = save(folder, model, optimizer, step=3, async_write=True)
    last.written.result()
    dist.barrier()
    train(model, optimizer, 2)
    return message, again, unchanged, sorted(os.listdir(folder))


def test_a_write_that_failed_is_an_error_in_the_next_step(tmp_path):
    """
    On all ranks, before the step changes anything; then training may go on, and save again, and a
    step that finds the files written makes the checkpoint. Breaks where a thread's error is lost.
    Proves I10, `Saving._write_rest`, `Saving._end_if_done`, `Saving._on_all_ranks`.
    """
    for rank, (message, again, unchanged, names) in enumerate(run(fails_meanwhile, 2, tmp_path)):
        assert again == message
        assert f"rank {rank}: the checkpoint of step 2 cannot be saved to {tmp_path}" in message
        assert "No space left on device, on rank 1" in message and "What to do" in message
        assert unchanged and names == ["step-00000001", "step-00000003"]


# ------------------------------------------------------------------------------------ what is kept


def test_the_newest_are_kept_and_a_step_may_be_saved_again(tmp_path):
    """
    Two stay. A run that is taken up again at an earlier step replaces what it comes to again, and
    has nothing of later steps any more. What others have put into the folder is theirs.
    Proves `save_load.save`, `steps`, `_rename_to_final`.
    """
    model, optimizer = shard(plain())
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "step-00000001.partial").mkdir()
    (tmp_path / "step-mine.removed").write_text("")
    for step in (1, 2, 3):
        save(tmp_path, model, optimizer, step=step)
    assert [*steps(tmp_path)] == [2, 3]
    train(model, optimizer, 0)
    save(tmp_path, model, optimizer, step=2, extra="again")
    assert [*steps(tmp_path)] == [2] and load(tmp_path, model, optimizer) == "again"
    save(tmp_path, model, optimizer, step=9, keep=1)
    assert sorted(os.listdir(tmp_path)) == ["step-00000009", "step-mine.removed", "step-notes"]
    assert sorted(os.listdir(newest(tmp_path))) == [MANIFEST, file_name(0, 1)]
    with pytest.raises(RuntimeError, match=r"Expected: a `step` of at least 0.*Got: -1 and 2"):
        save(tmp_path, model, optimizer, step=-1)
    with pytest.raises(RuntimeError, match="'float' object cannot be interpreted as an integer"):
        save(tmp_path, model, optimizer, step=3.0)
    save(tmp_path, model, optimizer, step=np.int64(10))
    assert [*steps(tmp_path)] == [9, 10]


def test_a_link_to_a_checkpoint_that_was_moved_is_removed_alone(tmp_path):
    """
    Somebody has moved the first one to another disk. Breaks where no later save succeeds, because
    each of them fails to remove the link.
    Proves `remove`.
    """
    model = Zero3Sequential([Zero3Layer(nn.Linear(2, 2))])
    there = save(tmp_path / "run", model, step=1).wait()
    there.rename(tmp_path / "moved")
    there.symlink_to(tmp_path / "moved")
    for step in (2, 3, 4):
        save(tmp_path / "run", model, step=step)
    assert sorted(os.listdir(tmp_path / "run")) == ["step-00000003", "step-00000004"]
    load(tmp_path / "moved", model)


@pytest.mark.parametrize("value", [
    None, 1, -2.5, float("inf"), "text", [1, [2]], (1, (2, "x")), {"a": {"b": None}}, {30: 1},
    {"__tuple__": 1}, Counter({30: 1}),
    torch.tensor(0.001), torch.arange(6, dtype=torch.int16).view(2, 3),
    torch.tensor([True, False]), torch.empty(0, 2), {("a", 1): [torch.zeros(2, dtype=BF16)]},
    torch.tensor(1.0).expand(1),
])
def test_small_things_come_back_as_they_were(value):
    """
    Through JSON, which knows neither tuples nor keys that are numbers.
    Proves `encode`, `decode`, `type_name`.
    """
    there = decode(json.loads(json.dumps(encode(value))))
    # By their text, for tensors are not equal to each other as a whole.
    assert repr(there) == repr(value) and type(there) is type(value)


def test_an_extra_that_is_no_plain_thing_is_refused_by_its_place(tmp_path):
    """
    And nothing of it is left.
    Proves `encode`, `Saving.begin`, `Saving._on_all_ranks`.
    """
    model, _ = shard(plain())
    with pytest.raises(RuntimeError, match=r"Got: `extra\['a'\]\[1\]` is a Random.*What to do"):
        save(tmp_path, model, step=0, extra={"a": [1, random.Random()]})
    assert os.listdir(tmp_path) == []


# ----------------------------------------------------------------------------------- what is wrong


@pytest.fixture
def saved(tmp_path):
    """A checkpoint of one rank, and a model of other weights to load it into"""
    model, optimizer = shard(plain())
    train(model, optimizer, 0)
    save(tmp_path / "run", model, optimizer, step=1, extra={"a": (1, 2)})
    return newest(tmp_path / "run"), *shard(plain(1))


def refused(folder, model, optimizer, *expected):
    """Not loaded, with these words; and nothing has changed."""
    train(model, optimizer, 1)
    before = weights(model)
    with pytest.raises(RuntimeError) as error:
        load(folder, model, optimizer)
    for words in ("rank 0: the checkpoint in", "cannot be loaded. Expected: ", "What to do: ",
                  *expected):
        assert words in str(error.value), error.value
    assert same(weights(model), before)
    train(model, optimizer, 2)


def test_every_flipped_byte_is_found_and_named(saved):
    """
    In the manifest and in a rank's file: each is refused, by the file's name, its rank, and where
    it is a parameter's, by that. Breaks where something is used before it is checked.
    Proves `checksums`, `read_block`, `_read_manifest`.
    """
    path, model, optimizer = saved
    for name in (MANIFEST, file_name(0, 1)):
        good = (path / name).read_bytes()
        assert len(good) < BLOCK_BYTES
        places = {0, 1, 7, 8, len(good) - 1, *random.Random(0).sample(range(len(good)), 60)}
        for place in sorted(places):
            bad = bytearray(good)
            bad[place] ^= 1 << place % 8
            (path / name).write_bytes(bad)
            expected = ["the file of rank 0, is damaged", "`0.0."] if name != MANIFEST else []
            with pytest.raises(RuntimeError) as error:
                load(path, model, optimizer)
            for words in (name, *expected):
                assert words in str(error.value), (place, error.value)
        (path / name).write_bytes(good)
    refused_before = load(path, model, optimizer)
    assert refused_before == {"a": (1, 2)}


def test_every_truncated_and_every_missing_file_is_found_and_named(saved):
    """
    The manifest and a rank's file, cut at several lengths, one byte too long, and gone; and a
    folder without any checkpoint. Breaks where a length is not looked at.
    Proves `CheckpointReader.__init__`, `TensorFile`, `_read_manifest`.
    """
    path, model, optimizer = saved
    for name in (MANIFEST, file_name(0, 1)):
        good = (path / name).read_bytes()
        for length in (0, 1, 8, len(good) // 2, len(good) - 1):
            (path / name).write_bytes(good[:length])
            refused(path, model, optimizer, name)
        (path / name).unlink()
        refused(path.parent, model, optimizer, name, "is missing")
        (path / name).write_bytes(good + b" ")
        refused(path, model, optimizer, name)
        (path / name).write_bytes(good)
    assert load(path.parent, model, optimizer) == {"a": (1, 2)}
    refused(path.parent / "other", model, optimizer, "is missing: this is no checkpoint")


def test_what_is_damaged_late_in_a_file_is_found_by_the_rank_that_reads_it(tmp_path):
    """
    In a block that belongs to the second parameter alone: the error has its name, and the first can
    still be read.
    Proves `CheckpointReader.read`, `TensorFile.block`, `TensorFile.header`, `Writer._move`.
    """
    big = {"a": torch.ones(1 << 19), "b": torch.ones(1 << 19)}
    announced = {name: {"param": (t.dtype, t.shape)} for name, t in big.items()}
    from_tensors(tmp_path, 0, announced, {}, lambda name, key: big[name])
    checkpoint = CheckpointReader(newest(tmp_path))
    with open(checkpoint.files[0].path, "r+b") as file:
        file.seek(checkpoint.files[0].nbytes - 5)
        file.write(b"\1")
    checkpoint = CheckpointReader(newest(tmp_path))
    a, b = (checkpoint.by_name[name] for name in "ab")
    assert (checkpoint.read(a, "param", 0, a.numel) == 1).all()
    with pytest.raises(Exception, match=r"`b`, its param: .*rank-00000-of-00001.*is damaged"):
        checkpoint.read(b, "param", 0, b.numel)


def test_a_damaged_block_is_named_by_its_bytes(tmp_path):
    """
    From its first to its last, counted in the file: of a block in the middle, and of the last one,
    which is shorter. Breaks where a block's number is said in place of its bytes, or the last block
    is taken for a whole one.
    Proves `read_block`, `Broken`, `Broken.unless`.
    """
    announced = {"a": {"param": (FP32, (3 << 18,))}}
    from_tensors(tmp_path, 0, announced, {}, lambda name, key: torch.ones(3 << 18))
    (file,) = CheckpointReader(newest(tmp_path)).files
    path, total = file.path, file.nbytes
    assert 3 * BLOCK_BYTES < total < 4 * BLOCK_BYTES
    good = path.read_bytes()
    for place, first, last in ((BLOCK_BYTES, BLOCK_BYTES, 2 * BLOCK_BYTES),
                               (2 * BLOCK_BYTES - 1, BLOCK_BYTES, 2 * BLOCK_BYTES),
                               (total - 1, 3 * BLOCK_BYTES, total)):
        path.write_bytes(good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :])
        (file,) = CheckpointReader(newest(tmp_path)).files
        damaged = f": bytes {first:,} to {last:,} do not match their checksum"
        with pytest.raises(Broken, match=damaged):
            file.read_bytes(0, total)


def rewrite(path, change):
    """A manifest that says something else, with the right checksum."""
    told = json.loads((path / MANIFEST).read_text())
    del told["crc32"]
    change(told)
    rest = json.dumps(told).encode()[1:]
    (path / MANIFEST).write_bytes(b'{"crc32": "%08x",' % zlib.crc32(rest) + rest)


def test_a_newer_format_says_so(saved):
    """
    By both numbers, and with the cure. Breaks where the schema is looked at first, which a newer
    format may have changed.
    Proves `_read_manifest`.
    """
    path, model, optimizer = saved
    rewrite(path, lambda told: told.update(version=3))
    refused(path, model, optimizer, "is of format 3, and this zero3 reads format 2")


def test_states_of_parameters_that_no_shard_has_are_not_lost_in_silence(tmp_path):
    """
    The optimizer also steps a temperature of the loss.
    Proves `Entries.describe`.
    """
    model = Zero3Sequential([Zero3Layer(nn.Linear(2, 2))])
    temperature = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([*model.get_trainable_chunk(), temperature])
    (model(torch.ones(1, 2)) * temperature).sum().backward()
    optimizer.step()
    with pytest.warns(UserWarning, match="states of 1 parameters that are not in the model"):
        save(tmp_path, model, optimizer, step=1)
    # Its own states come back, and the others stay.
    load(tmp_path, model, optimizer)
    assert optimizer.state[temperature]["step"] == 1


@pytest.mark.parametrize("make", [Zero3Optimizer, lambda m: torch.optim.SGD(m.parameters())])
def test_states_of_another_optimizer_are_not_lost_in_silence(tmp_path, recwarn, make):
    """
    Of a pair of models, each with an optimizer. Without one, or with all frozen that it does not
    step, nothing is lost.
    Proves `Entries.describe`.
    """
    pair = nn.ModuleList([Zero3Sequential([Zero3Layer(nn.Linear(2, 2))]) for _ in range(2)])
    optimizer = make(pair[0])
    save(tmp_path, pair, step=1)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="states of 1 shards that this optimizer does not step"):
        save(tmp_path, pair, optimizer, step=2)
    pair[1].requires_grad_(False)
    save(tmp_path, pair, optimizer, step=3)
    assert not recwarn.list


def test_another_model_or_optimizer_is_refused_by_name(saved):
    """
    Before anything has changed. Breaks where sizes alone are compared.
    Proves `Entries`, `Entries.check`, `_check_states`.
    """
    path, *_ = saved
    for make, expected in (
        (lambda: shard(plain(width=13)), "`0.0.weight` is of (11, 5) in the checkpoint, of (13"),
        (lambda: shard(plain()[:2]), "`2.bias`, `2.weight`, 2 in all, in the checkpoint and not"),
        (lambda: shard(nn.Sequential(*plain(), nn.Linear(3, 3))), "`3.weight` is missing"),
        (lambda: shard(nn.Sequential(plain()[0][:1], *plain()[1:])), "`0.1.calls`, `0.1.mean`, 2"),
    ):
        model, optimizer = make()
        with pytest.raises(RuntimeError) as error:
            load(path, model, optimizer)
        assert expected in str(error.value), error.value
    model, _ = shard(plain())
    sgd = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9, group_by=decay)
    with pytest.raises(RuntimeError, match=r"is stepped by AdamW there, and by SGD here; leave"):
        load(path, model, sgd)
    amsgrad = Zero3Optimizer(model, lr=0.1, amsgrad=True, group_by=decay)
    with pytest.raises(RuntimeError, match=r"has a `max_exp_avg_sq` of None there, and this opt"):
        load(path, model, amsgrad)
    with pytest.raises(RuntimeError, match=r"Expected: one of this model's shards. Got: Zero3Opt"):
        load(path, shard(plain())[0], sgd)
    # The weights alone are another thing.
    load(path, model)


def test_param_groups_are_found_by_their_parameters(saved):
    """
    Groups in another order get their own options back; parameters that are grouped otherwise are
    refused.
    Proves `Entries.check`, `Entries.options`, `Entries._take_options`.
    """
    path, *_ = saved
    model, _ = shard(plain(1))
    other = Zero3Optimizer(model, lr=1.0, group_by=lambda name, p: {
        "weight_decay": 5.0 if p.ndim > 1 else 6.0, "betas": (0.1, 0.1)})
    load(path, model, other)
    assert [(g["weight_decay"], g["lr"], g["betas"]) for g in other.param_groups] == [
        (0.1, 0.01, (0.9, 0.999)), (0.0, 0.01, (0.9, 0.999))]
    one = Zero3Optimizer(model, lr=1.0)
    three = Zero3Optimizer(model, lr=1.0, group_by=lambda name, p: {"eps": int(name[0]) + p.ndim})
    for other in (one, three):
        with pytest.raises(RuntimeError, match=r"param group of .* has other parameters here"):
            load(path, model, other)


def test_a_buffer_of_another_shape_is_refused_before_anything_changes(saved):
    """
    Breaks where a value is spread over a whole buffer, or the weights are there already.
    Proves `load`, `CheckpointReader.replicated`.
    """
    path, model, optimizer = saved
    counts = next(m for m in model.modules() if isinstance(m, Counts))
    counts.mean = torch.zeros(1)
    before = weights(model)
    with pytest.raises(RuntimeError, match=r"`0.1.mean` is of \(11,\) in the checkpoint, of \(1"):
        load(path, model, optimizer)
    assert same(weights(model), before)


def loads_what_another_writes(folder):
    """Somebody else loads from the folder of a run while that saves."""
    model, _ = shard(plain())
    save(folder, model, step=1)
    # As the other program has it before its manifest is written.
    (folder / "step-00000002.partial").mkdir(exist_ok=True)
    dist.barrier()
    load(folder, model)
    return sorted(os.listdir(folder))


def test_to_load_changes_nothing_in_a_folder_that_somebody_saves_to(tmp_path):
    """
    Breaks where a load takes what is being written for leftovers.
    Proves `load`, `newest`, `partial_path`.
    """
    expected = ["step-00000001", "step-00000002.partial"]
    assert run(loads_what_another_writes, 2, tmp_path) == [expected] * 2


def fails_on_one_rank(folder):
    model, optimizer = shard(plain())
    rank = dist.get_rank()
    messages = []
    loop = []
    loop.append(loop)
    for extra in (torch.eye(2).to_sparse(), loop):
        try:
            save(folder, model, optimizer, step=1, extra=extra if rank else None)
        except RuntimeError as error:
            messages.append("on rank 1. What to do" in str(error))
    save(folder, model, optimizer, step=1)
    pread = os.pread
    if rank:
        def broken(*_):
            raise OSError(errno.EIO, "Input/output error")
        os.pread = broken
    try:
        load(folder, model, optimizer)
    except RuntimeError as error:
        messages.append("Input/output error" in str(error) and "on rank 1" in str(error))
    os.pread = pread
    load(folder, model, optimizer)
    return messages


def test_what_fails_on_one_rank_is_an_error_on_all(tmp_path):
    """
    Whatever it is. Breaks where an exception leaves the other ranks waiting.
    Proves `Saving.begin`, `load`, `Peers.agree`.
    """
    assert run(fails_on_one_rank, 2, tmp_path) == [[True] * 3] * 2


def looks_beside_others(folder):
    """A hook of somebody else's, after ours."""
    model, optimizer = shard(plain())
    saving = save(folder, model, optimizer, step=0, async_write=True)
    saving.written.result()
    optimizer.register_step_pre_hook(lambda *_: None)
    train(model, optimizer, 0)
    for step in (1, 2, 3):
        save(folder, model, optimizer, step=step, async_write=True)
        train(model, optimizer, step)
    return len(optimizer._optimizer_step_pre_hooks)


def test_a_save_that_a_step_ends_leaves_one_hook_at_most(tmp_path):
    """
    Breaks where it is removed while torch goes through the hooks.
    Proves `Saving._end_if_done`, `all_here`.
    """
    assert run(looks_beside_others, 1, tmp_path) == [2]


def test_a_model_that_is_built_anew_loads_what_another_is_still_saving(tmp_path):
    """
    As in a notebook, whose next cell builds the model again. Breaks where it loads the checkpoint
    before the last, or where its own save removes the files that a thread still writes.
    Proves `all_here`, `Saving.begin`.
    """
    first, optimizer = shard(plain())
    save(tmp_path, first, optimizer, step=1)
    train(first, optimizer, 0)
    save(tmp_path, first, optimizer, step=2, async_write=True)
    second, other = shard(plain(1))
    load(tmp_path, second, other)
    assert same(weights(second), weights(first))
    saving = save(tmp_path, first, optimizer, step=3, async_write=True)
    save(tmp_path, second, other, step=4)
    assert saving.wait().exists() and [*steps(tmp_path)] == [3, 4]


# ------------------------------------------------------------------------------- a hostile manifest

SECRET = "the secret"


def mutated(told, rng, words):
    """One to three places of a manifest, something else."""
    for _ in range(rng.randint(1, 3)):
        at, places = told, []
        while isinstance(at, (dict, list)) and at:
            keys = [*at] if isinstance(at, dict) else range(len(at))
            key = rng.choice([*keys])
            places.append((at, key))
            if rng.random() < 0.2:
                break
            at = at[key]
        holder, key = places[-1]
        if rng.random() < 0.2:
            del holder[key]
        elif isinstance(holder[key], int) and rng.random() < 0.5:
            holder[key] += rng.choice([-1, 1, 1 << 40, -(1 << 40)])
        else:
            holder[key] = rng.choice(words)


def fuzzes(folder, cases):
    """In a process of its own, for an audit hook stays. Returns what else than ours was raised."""
    path = newest(folder)
    good = (path / MANIFEST).read_bytes()
    (folder.parent / SECRET).write_text("x")
    opened, strange, accepted = [], [], 0
    sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == "open" else None)
    words = [None, True, -1, 0, 1, 1 << 62, 10**30, 0.5, float("nan"), "", "x", f"../{SECRET}",
             str(folder.parent / SECRET), [], {}, [[]], {"__tensor__": "zz"}, {"__tuple__": 3},
             {"__tensor__": "00", "dtype": "F32", "shape": [1]}, "F64", [1, 2], ["0.0.weight"]]
    sys.stdout = open(os.devnull, "w")
    sys.stderr = open(os.devnull, "w")
    model, optimizer = shard(plain(1))
    rng = random.Random(0)
    for case in range(cases):
        (path / MANIFEST).write_bytes(good)
        if case % 4:
            rewrite(path, lambda told: mutated(told, rng, words))
        else:
            # Without the right checksum, and not even JSON.
            raw = bytearray(good)
            for _ in range(rng.randint(1, 4)):
                raw[rng.randrange(len(raw))] = rng.randrange(256)
            (path / MANIFEST).write_bytes(raw[: rng.choice([len(raw), rng.randrange(len(raw))])])
        for what in ("load", "verify", "export", "universal", "dcp"):
            out = folder.parent / "out"
            try:
                if what == "load":
                    load(folder, model, optimizer)
                    accepted += 1
                elif what == "dcp":
                    main(["universal", str(folder), str(out), "--format", "dcp"])
                else:
                    main([what, str(folder), *[str(out)][: what in ("export", "universal")]])
            except RuntimeError as error:
                if not str(error).startswith("rank 0: the checkpoint"):
                    strange.append((case, what, repr(error)))
            except BaseException as error:
                strange.append((case, what, repr(error)))
            shutil.rmtree(out, ignore_errors=True)
    (path / MANIFEST).write_bytes(good)
    return strange, [name for name in opened if SECRET in name], accepted


def test_a_fuzzed_manifest_neither_crashes_nor_leads_out_of_its_folder(tmp_path):
    """
    With a right checksum, too: whatever it says, what comes is our error, or a checkpoint that is
    the same in all that matters.
    Proves `file_name`, `CheckpointReader._check`, `_check_types`.
    """
    model, optimizer = shard(plain())
    train(model, optimizer, 0)
    save(tmp_path / "run", model, optimizer, step=1, extra={"a": (1, torch.ones(2))})
    strange, outside, accepted = run(fuzzes, 1, tmp_path / "run", 200)[0]
    assert not strange and not outside and accepted < 100, (strange[:3], accepted)


# ------------------------------------------------------------------------------- no room, no right


def disk_full(folder, when):
    model, optimizer = shard(plain(), torchs=True)
    train(model, optimizer, 0)
    save(folder, model, optimizer, step=1)
    move, limit = File.move, (1000, resource.RLIM_INFINITY)

    def later(self, *args):
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        return move(self, *args)

    if dist.get_rank() == 1:
        if when == "first":
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        File.move = later
    message, before = "", weights(model)
    try:
        save(folder, model, optimizer, step=2)
    except RuntimeError as error:
        message = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    File.move = move
    # Rank 0 clears away.
    dist.barrier()
    names = sorted(os.listdir(folder))
    load(folder, model, optimizer)
    train(model, optimizer, 1)
    save(folder, model, optimizer, step=2)
    return message, names, same(before, weights(model)), sorted(os.listdir(folder))


@pytest.mark.parametrize("when", ["first", "in the middle"])
def test_a_disk_that_is_full_is_an_error_on_all_ranks_and_loses_nothing(tmp_path, when):
    """
    The system refuses to give a file of one rank its space, or to take the bytes after all. The
    checkpoint before is as it was, and the next save goes through.
    Proves I10, `Writer.__init__`, `Writer.finish`, `Saving._on_all_ranks`.
    """
    for rank, (message, names, _, after) in enumerate(run(disk_full, 2, tmp_path, when)):
        assert f"rank {rank}: the checkpoint of step 2 cannot be saved to {tmp_path}" in message
        assert "File too large, on rank 1" in message and "What to do: make room" in message
        assert names == ["step-00000001"] and after == ["step-00000001", "step-00000002"]


def no_right(folder):
    os.seteuid(65534)
    try:
        model, _ = shard(plain())
        messages = []
        for what in (lambda: save(folder / "new", model, step=1), lambda: load(folder, model)):
            try:
                what()
            except RuntimeError as error:
                messages.append(str(error))
        return messages
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to be somebody else")
def test_no_permission_is_an_error_with_the_file(tmp_path):
    """
    Of the folder that cannot be made, and of the file that cannot be read. Breaks where only some
    errors of the system are caught.
    Proves `Saving.begin`, `load`.
    """
    model, _ = shard(plain())
    save(tmp_path, model, step=0)
    for path in (tmp_path, *tmp_path.parents[:-2]):
        path.chmod(0o755)
    (newest(tmp_path) / file_name(0, 1)).chmod(0)
    to_save, to_load = run(no_right, 1, tmp_path)[0]
    assert f"Permission denied: '{tmp_path}/new'" in to_save
    assert "Permission denied" in to_load and file_name(0, 1) in to_load


# ---------------------------------------------------------------------------------- sharded modules


@pytest.mark.parametrize("kind", ["chain", "wrap"])
def test_a_sharded_module_has_no_state_dict(kind):
    """
    Whoever asks, the model, a layer or the module that was wrapped, is told so, and what to do.
    Breaks where shards, or nothing, would be saved as if they were the weights.
    Proves `Zero3Layer.__init__`, `Zero3Model.destroy`.
    """
    inner = plain()
    first = inner[0]
    model, _ = shard(inner, kind)
    for module in (model, first, inner) if kind == "wrap" else (model, first):
        with pytest.raises(RuntimeError, match=r"rank 0: .* has no state dict.*full_params"):
            module.state_dict()
    # Without parameters there is nothing to miss.
    assert not Zero3Layer(nn.ReLU()).state_dict()
    if kind == "wrap":
        assert model.destroy().state_dict().keys() == plain().state_dict().keys()


def test_a_model_that_is_not_sharded_has_nothing_to_save(tmp_path):
    """
    Nor has one with a trainable parameter outside of all layers; a frozen one there is saved whole.
    Breaks where such a parameter is left out without a word.
    Proves `Entries`, `Entries.__init__`, `Named.expect`, `CheckpointReader.replicated`.
    """
    with pytest.raises(RuntimeError, match=r"Expected: a model of Zero3Layers. Got: Linear"):
        save(tmp_path, nn.Linear(2, 2), step=0)
    mixed = nn.Sequential(Zero3Layer(nn.Linear(2, 2)), nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"Got: `1.weight`, `1.bias` outside"):
        save(tmp_path, mixed, step=0)
    mixed[1].requires_grad_(False)
    save(tmp_path, mixed, step=0)
    assert CheckpointReader(newest(tmp_path)).replicated(0, "1.weight").equal(mixed[1].weight)


def test_a_checkpoint_has_its_name_only_after_all_of_it_is_on_the_disk(tmp_path, monkeypatch):
    """
    The file and its folder are forced out before the manifest is renamed into it, the folder again
    before it gets its own name, and the folder around it in the end. Breaks without `fsync`, which
    no killed process shows, for what it wrote is still in the page cache.
    Proves I10, `fsync_folder`, `commit_checkpoint`.
    """
    calls, fsync, rename = [], os.fsync, os.rename

    def told(fd):
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        calls.append(f"force out {path.relative_to(tmp_path)}")
        fsync(fd)

    def renamed(old, new):
        calls.append(f"rename to {Path(new).relative_to(tmp_path)}")
        rename(old, new)

    monkeypatch.setattr(os, "fsync", told)
    monkeypatch.setattr(os, "rename", renamed)
    save(tmp_path / "run", *shard(plain()), step=1)
    final = "run/step-00000001"
    partial = f"{final}.partial"
    assert calls == [
        f"force out {partial}/rank-00000-of-00001.safetensors", f"force out {partial}",
        f"force out {partial}/manifest.json.partial", f"rename to {partial}/manifest.json",
        f"force out {partial}", f"rename to {final}", "force out run"]


def test_a_writer_leaves_no_file_after_an_exception(tmp_path):
    """
    What is half written would look like a file of tensors. Breaks without the `unlink` in
    `__exit__`.
    Proves `Writer`.
    """
    with pytest.raises(ZeroDivisionError), Writer(tmp_path / "x", {"a": (FP32, (3,))}) as writer:
        writer.write(torch.ones(2))
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []

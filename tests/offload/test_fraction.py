"""
# States in parts: a fraction in the tier, the rest on the device

Any fraction gives the same bits, and moves bytes in its proportion.
"""

import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

import zero3
from tests.offload.test_tiers import equal
from tests.ranks import run
from tests.streams import Accelerator
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.estimate.ledger import Ledger
from zero3.offload.activations import Activations
from zero3.offload.disk import whole_blocks

BF16, FP32 = torch.bfloat16, torch.float32
FRACTIONS = (0, 0.25, 0.5, 0.6, 1)
WIDTH = 64


class Skips(nn.Module):
    """Two matrices, of which every other step uses only the first"""

    number = 0

    def __init__(self):
        super().__init__()
        self.always = nn.Linear(WIDTH, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.always(x) if Skips.number % 2 else self.sometimes(self.always(x))


def chain(dtype=FP32):
    """Layers with shards of many blocks, of one, and of less than one"""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 128, bias=False), nn.Sequential(nn.Linear(128, WIDTH), nn.Tanh()),
              Skips(), nn.Linear(WIDTH, 3)]
    return [layer.to(dtype) for layer in layers]


def build(offload, dtype=FP32, make=torch.optim.AdamW, params_in=None, **options):
    model = Zero3Sequential([Zero3Layer(layer, offload=params_in) for layer in chain(dtype)])
    return model, Zero3Optimizer(model, make, offload=offload, bucket_bytes=5000, lr=1e-2,
                                 **options)


def step(model, optimizer, number, dtype=FP32, micro_batches=1):
    Skips.number = number
    for i in range(micro_batches):
        generator = torch.Generator().manual_seed(100 * number + 10 * i + optimizer.comm.rank)
        x = torch.randn(2, WIDTH, generator=generator).to(dtype)
        optimizer.backward(model(x).float().square().mean() / micro_batches)
    norm = optimizer.step()
    optimizer.zero_grad()
    return norm


def everything(model, optimizer):
    """Weights, masters and moments, each of a shard in one tensor, and the counts of steps"""
    with model.full_params() as params:
        found = [p.detach().clone() for p in params.values()]
    for states in optimizer.shard_states:
        with states.in_memory(optimizer.state, write=False) as here:
            found.append(torch.cat([each.master.cpu() for each in here]))
            of_pieces = [optimizer.state[piece.param] for piece in states.pieces]
            for name in sorted(of_pieces[0]):
                values = [state[name].cpu() for state in of_pieces]
                found.append(torch.cat([value.view(-1) for value in values])
                             if values[0].ndim else torch.stack(values).unique())
    return [each.clone() for each in found]


def files(folder, fraction, **options):
    return Offload("nvme", folder, fraction=fraction, block_bytes=8192, **options)


# -------------------------------------------------------------------------------------- same bits


def some_steps(folder, dtype, micro_batches):
    options = {"clip_grad_norm": 0.05, "eps": 1e-3, "fused": False,
               "group_by": lambda name, p: {"weight_decay": 0.1 * (p.ndim > 1)}}
    found = {}
    for fraction in (None, *FRACTIONS):
        offload = None if fraction is None else files(folder, fraction)
        model, optimizer = build(offload, dtype, **options)
        norms = [step(model, optimizer, i, dtype, micro_batches) for i in range(4)]
        found[fraction] = (norms, everything(model, optimizer))
    # With the shards in files, too.
    model, optimizer = build(files(folder, 0.5), dtype, params_in=Offload("nvme", folder),
                             **options)
    norms = [step(model, optimizer, i, dtype, micro_batches) for i in range(4)]
    found["all"] = (norms, everything(model, optimizer))
    norms, expected = found.pop(None)
    assert all(norm > 0.05 for norm in norms)
    return {fraction: got[0] == norms and equal(got[1], expected)
            for fraction, got in found.items()}


@pytest.mark.parametrize("world_size, dtype, micro_batches",
                         [(1, FP32, 1), (2, FP32, 2), (3, FP32, 1), (2, BF16, 2)])
def test_any_fraction_trains_to_the_same_bits(world_size, dtype, micro_batches, tmp_path):
    """
    I8: norms, weights, masters, moments and counts of steps are those of states on the device, with
    clipping, param groups, and a parameter that is not always used and spans the cut. Breaks if the
    cut is not at the end of a block of the norm, or one portion takes the other's step for a write
    of the caller's.
    Proves I8, `Portion`, `Portion.norms`, `Portion.place`, `Portion.in_memory`, `parts.inside`,
    `parts.length`, `block_norms`, `ShardStates.in_memory`, `Here`.
    """
    for rank in run(some_steps, world_size, str(tmp_path), dtype, micro_batches):
        assert rank == dict.fromkeys([*FRACTIONS, "all"], True)


def other_optimizers(folder):
    results = []
    for make, options in ((torch.optim.SGD, {"momentum": 0.9}),
                          (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
                          (torch.optim.RMSprop, {"centered": True})):
        found = []
        for offload in (None, files(folder, 0.5)):
            model, optimizer = build(offload, make=make, **options)
            for i in range(3):
                step(model, optimizer, i)
            # Gradients of zero, of the caller's, and of the weights themselves.
            step_after(model, optimizer, partial(optimizer.zero_grad, set_to_none=False))
            step_after(model, optimizer, partial(ones_as_gradients, model))
            penalty = sum(p.square().sum() for p in model.parameters())
            step_after(model, optimizer, penalty.backward)
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)
            step(model, optimizer, 7)
            found.append(everything(model, optimizer))
        results.append(equal(*found))
    return results


def ones_as_gradients(model):
    for p in model.parameters():
        p.grad = torch.ones_like(p)


def step_after(model, optimizer, change):
    optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
    change()
    optimizer.step()
    optimizer.zero_grad()


def test_whatever_the_caller_does_reaches_both_portions(tmp_path):
    """
    Gradients that the caller zeroes, replaces or adds to, and writes into the shards. Breaks if a
    gradient of the caller's goes to the first portion alone.
    Proves `ShardStates.current`, `Portion.read_grad`, `Portion.add_grad`, `Portion.drop_grad`.
    """
    assert run(other_optimizers, 2, str(tmp_path)) == [[True] * 3] * 2


def other_parts(folder):
    (model, optimizer), (_, other) = build(None), build(files(folder, 0.5))
    step(model, optimizer, 0)
    before = [value.clone() for value in everything(model, optimizer)]
    with pytest.raises(RuntimeError) as error:
        optimizer.load_state_dict(other.state_dict())
    return str(error.value), equal(everything(model, optimizer), before)


def test_a_state_in_other_parts_is_refused(tmp_path):
    """
    With the names of what fits, before anything changes. Breaks where torch refuses it, after
    pieces were merged and have lost their moments.
    Proves `Zero3Optimizer.load_state_dict`.
    """
    for text, is_same in run(other_parts, 2, str(tmp_path)):
        assert "shards in parts of" in text and "the same `fraction`" in text and is_same


def resumed(folder):
    results = []
    for dtype in (FP32, BF16):
        model, optimizer = build(files(folder, 0.25), dtype)
        for i in range(3):
            step(model, optimizer, i, dtype)
        path = f"{folder}/{dtype}"
        zero3.save(path, model, optimizer, step=3)
        saved = copy.deepcopy(optimizer.state_dict())
        again, other = build(files(folder, 0.25), dtype)
        other.load_state_dict(saved)
        found = [(again, other)]
        for fraction in FRACTIONS:
            again, other = build(files(folder, fraction), dtype)
            zero3.load(path, again, other)
            found.append((again, other))
        for each in ((model, optimizer), *found):
            step(*each, 3, dtype)
        expected = everything(model, optimizer)
        results += [equal(everything(*each), expected) for each in found]
    return results


def test_a_checkpoint_fits_any_fraction(tmp_path):
    """
    And a `state_dict` fits the same one. Breaks if the files of a checkpoint show the cut.
    Proves `whole_of`, `Entries.tensors`, `Entries.take`, `ShardStates.repartition`.
    """
    for rank in run(resumed, 2, str(tmp_path)):
        assert rank == [True] * 2 * (1 + len(FRACTIONS))


# ------------------------------------------------------------------------------------------ bytes


def bytes_moved(folder):
    found = {}
    for fraction in FRACTIONS:
        torch.manual_seed(0)
        model = Zero3Sequential([Zero3Layer(nn.Linear(WIDTH, 256, bias=False)) for _ in range(8)])
        offload = files(folder, fraction)
        optimizer = Zero3Optimizer(model, offload=offload)
        x = torch.randn(2, WIDTH)
        # The second step has the moments that the first one made.
        for _ in range(2):
            with Ledger(model, optimizer) as tape:
                optimizer.backward(sum(one(x).square().mean() for one in model.module_list))
                optimizer.step()
                optimizer.zero_grad()
        moved = {event: sum(e.bytes for e in tape.events if e.event == event)
                 for event in ("read", "write")}
        found[fraction] = (moved["read"], moved["write"], offload.disk_bytes())
    return found


def test_bytes_fall_in_proportion(tmp_path):
    """
    Eight layers with 8,192 elements on each of two ranks. Their shards are their own masters, so
    two moments and a gradient are in files. Each step writes all of that, and reads what is in no
    buffer. With 0, 0.25, 0.5 and 1 of the states it is exactly so much.
    Proves `ShardStates.__init__`, `Portion.nbytes`, `ShardStates.place`.
    """
    for found in run(bytes_moved, 2, str(tmp_path)):
        read, written, on_disk = found[1]
        assert written == on_disk == 8 * 3 * 4 * 8192 and read > 0
        for fraction in (0, 0.25, 0.5):
            assert found[fraction] == (fraction * read, fraction * written, fraction * on_disk)
        # 0.6 * 8,192 elements are 4.8 blocks of 1,024.
        assert found[0.6][1] == 8 * 3 * 4 * 5 * 1024


@pytest.mark.parametrize("numel, fraction, cut", [
    (5000, 0.6, 3072), (5000, 0.6144, 3072), (5000, 0.7, 4096), (5000, 0.9, 5000), (5000, 0, 0),
    (5000, 1, 5000), (800, 0.1, 800), (4096, 0.25, 1024)])
def test_the_cut_is_at_the_end_of_a_block(numel, fraction, cut):
    """
    The formula at the head of the chapter, and its table.
    Proves `ShardStates.__init__`.
    """
    model = Zero3Layer(nn.Linear(numel, 1, bias=False))
    (states,) = Zero3Optimizer(model, offload=Offload("cpu", fraction=fraction)).shard_states
    assert [(p.where.start, p.where.stop, p.offload.tier) for p in states.portions] == [
        each for each in ((0, cut, "cpu"), (cut, numel, "device")) if each[0] < each[1]]
    assert cut in (0, numel) or (cut - 1024) / numel < fraction <= cut / numel
    assert whole_blocks(4 * math.ceil(fraction * numel)) == whole_blocks(4 * cut) or cut == numel


# ----------------------------------------------------------------------------------- accelerators


def trains_on_an_accelerator(tier, fraction, folder, dtype):
    """The weights of some steps in shards on the device, where each step was, and what raced"""
    with Accelerator() as device:
        offload = Offload(tier, folder if tier == "nvme" else None, fraction=fraction)
        model, optimizer = build(offload, dtype, clip_grad_norm=0.05, fused=False)
        with Ledger(model, optimizer) as tape:
            for i in range(3):
                step(model, optimizer, i, dtype)
        found = [each.cpu() for each in everything(model, optimizer)]
    steps = {}
    for event in tape.events:
        if event.event == "step":
            steps[event.tier] = steps.get(event.tier, 0) + event.bytes
    return found, steps, device.problems


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_on_an_accelerator_both_step_their_portion(tier, dtype, tmp_path):
    """
    The CPU steps the first portion of each shard, the device the second, and nothing races. Breaks
    if a gradient goes to the CPU whole, or the copies of two portions wait for nobody.
    Proves I8, I9, `ShardStates.add_grad`, `Portion.add_grad`, `Reducer.deliver`.
    """
    expected = None
    for fraction in (1, 0.5, 0):
        ((found, steps, problems),) = run(
            trains_on_an_accelerator, 1, tier, fraction, str(tmp_path), dtype)
        assert problems == []
        expected = expected or found
        assert all(torch.allclose(a, b, atol=1e-6, rtol=0 if dtype == FP32 else 1e-2)
                   for a, b in zip(found, expected, strict=True))
        assert {*steps} == {1: {"cpu"}, 0.5: {"cpu", "device"}, 0: {"device"}}[fraction]


# ----------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("make, words", [
    (lambda: Offload("cpu", fraction=1.5), "Expected: `fraction`, a number from 0 to 1. Got: 1.5"),
    (lambda: Offload("cpu", fraction=math.nan), "a number from 0 to 1. Got: nan"),
    (lambda: Offload("cpu", fraction="half"), "a number from 0 to 1. Got: 'half'"),
    (lambda: Offload(fraction=0.5), "`fraction` with the cpu or nvme tier. Got: tier 'device'"),
    (lambda: Activations(Offload("cpu", fraction=0.5)), "an `Offload` without `fraction`"),
    (lambda: Zero3Layer(nn.Linear(3, 3), offload=Offload("cpu", fraction=0.5)),
     "pass it to `Zero3Optimizer`"),
    (lambda: Zero3Optimizer(Zero3Layer(nn.Linear(3, 3)), offload=Offload("cpu", fraction=0.5),
                            group_by=lambda name, p: {"optimizer": torch.optim.Muon}
                            if p.ndim == 2 else {}),
     "cannot divide its states. Expected: parameters that are stepped element by element"),
])
def test_what_cannot_be_divided_is_refused(make, words):
    """
    Proves `Offload`, `Activations`, `Zero3Optimizer._place_states`.
    """
    with pytest.raises((ValueError, RuntimeError)) as error:
        make()
    assert words in str(error.value)

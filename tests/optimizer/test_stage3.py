"""
# The Stage 3 optimizer: the same numbers as plain PyTorch, in the bytes that the formulas say
"""

import copy
import math
import pickle
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from tests.cases import (
    CASES,
    WIDTH,
    EachParameter,
    PlainChain,
    difference,
    freeze,
    train_both,
)
from tests.ranks import run
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.estimate.predict import predict_optimizer
from zero3.train.gpt import GPTConfig, global_batch, gpt_layers, load_bytes, next_byte_loss

BF16, FP32 = torch.bfloat16, torch.float32


def chain(dtype=torch.double):
    """Unequal layers, of which no size is divisible by 2 or 3."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 11), nn.Tanh(), nn.Sequential(nn.Linear(11, 5), nn.LayerNorm(5)),
              nn.Linear(5, 3)]
    return [layer.to(dtype) for layer in layers]


def shard(layers):
    return Zero3Sequential([Zero3Layer(layer) for layer in layers])


def batch(rows, step=0, dtype=torch.double):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step), dtype=dtype)


def mine(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def share_of_gradient(layer):
    """What this rank's shard of a plain layer's gradient is; zero where there is none."""
    flat = torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten()
                      for p in layer.parameters()])
    return mine(F.pad(flat, (0, -len(flat) % dist.get_world_size())))


def decay(name, p):
    return {"weight_decay": 0.1 if p.ndim > 1 else 0.0}


# ---------------------------------------------------------------------------------- same numbers


def plain_bf16(layers, shares, steps, lr):
    """
    Plain PyTorch, one process: bf16 layers, and fp32 masters that AdamW steps. The gradient is the
    mean over `shares` equal parts of the batch, in bf16 as well, added one after the other.
    """
    model = nn.Sequential(*layers)
    params = list(model.parameters())
    masters = [nn.Parameter(p.detach().float()) for p in params]
    optimizer, losses, data = torch.optim.AdamW(masters, lr, fused=False), [], load_bytes()
    for step in range(steps):
        grads, parts = [0] * len(params), global_batch(data, step, 12, 16).chunk(shares)
        losses.append(0.0)
        for rows in parts:
            loss = next_byte_loss(model, rows)
            found = torch.autograd.grad(loss, params)
            grads = [grad + part * (1 / shares) for grad, part in zip(grads, found, strict=True)]
            losses[-1] += loss.item() / shares
        for master, grad in zip(masters, grads, strict=True):
            master.grad = grad.float()
        optimizer.step()
        for p, master in zip(params, masters, strict=True):
            p.data.copy_(master)
    return losses, [master.detach() for master in masters]


def sharded_bf16(steps, lr, fused):
    torch.manual_seed(0)
    model = shard([layer.to(BF16) for layer in gpt_layers(GPTConfig(d_model=32, n_layers=2))])
    optimizer = Zero3Optimizer(model, lr=lr, fused=fused)
    data, losses = load_bytes(), []
    for step in range(steps):
        loss = next_byte_loss(model, mine(global_batch(data, step, 12, 16)))
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    # The masters of a layer, one shard after the other, are its parameters and the padding.
    masters = []
    for states in optimizer.shard_states:
        rows = optimizer.comm.numbers(optimizer, states.master).flatten()
        for group in states.layer.flats:
            masters += [slot.of(rows).clone() for slot in group.slots]
    return (losses / dist.get_world_size()).tolist(), masters


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bf16_with_masters_follows_one_process_with_masters(world_size):
    """
    Every loss and every master is equal, bit for bit: a rank's gradient is divided in bf16 and the
    ranks' are added in rank order, which plain PyTorch can do too. Breaks where the bf16 shard is
    stepped, or the gradient is rounded once more. With torch's plain AdamW: the fused one computes
    eight elements at a time and rounds the few at a tensor's end otherwise, and a shard ends
    elsewhere.
    Proves `Zero3Optimizer._update`, `ShardStates`, `Storage.replace`, `Communicator.total`.
    """
    steps, lr = 10, 3e-3
    torch.manual_seed(0)
    layers = [layer.to(BF16) for layer in gpt_layers(GPTConfig(d_model=32, n_layers=2))]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected, masters = plain_bf16(layers, world_size, steps, lr)
    torch.set_num_threads(threads)
    assert expected[-1] < expected[0] - 0.3
    for losses, got in run(sharded_bf16, world_size, steps, lr, False):
        assert losses == pytest.approx(expected, abs=1e-6, rel=0)
        assert all(torch.equal(a, b) for a, b in zip(got, masters, strict=True))


def accumulate(k, clip, hold, options):
    """Train on k micro-batches a step, beside plain PyTorch on the global batch."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, model = PlainChain(chain()), shard(chain())
    adam = {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.1}
    reference = torch.optim.AdamW(plain.parameters(), **adam)
    optimizer = Zero3Optimizer(model, **adam, clip_grad_norm=clip, **options)
    worst, norms = 0.0, []
    for step in range(3):
        # As many rows for each micro-batch of each rank; 3 is odd.
        x = batch(3 * k * world_size, step)
        plain(x).square().mean().backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), clip or math.inf).item()
        reference.step()
        reference.zero_grad()
        parts = x.chunk(k * world_size)[rank * k : (rank + 1) * k]
        for i, part in enumerate(parts):
            with optimizer.no_sync() if hold and i + 1 < k else nullcontext():
                optimizer.backward(model(part).square().mean() / k)
        norms.append((optimizer.step(), expected))
        optimizer.zero_grad(set_to_none=bool(step % 2))
        worst = max(worst, difference(plain, model))
    return worst, norms


def accumulate_all():
    ways = ((False, {}), (True, {"bucket_bytes": 0}), (True, {"loss_scale": 1024.0}))
    cases = [(k, clip, *way) for i, k in enumerate((1, 2, 4))
             for j, clip in enumerate((None, 0.05, 50.0)) for m, way in enumerate(ways)
             # Another third on each number of ranks, in which each two of the three still meet.
             if (i + j + m + dist.get_world_size()) % 3 == 0]
    return [(case, accumulate(*case)) for case in cases]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_k_micro_batches_equal_one_batch_k_times_as_large(world_size):
    """
    I7, with a clip that shortens, one that does not, and none; reduced each time or at the end, in
    buckets or one by one, with a scale or without, for k = 1, 2 and 4. In fp64, where sums in
    another order differ by 1e-15 and a real difference is larger than 1e-10. A norm per rank, a
    second backward that assigns, a clip before the unscale, or one that counts a parameter on each
    rank break it.
    Proves I1, I7, `Zero3Optimizer.backward`, `Zero3Optimizer.no_sync`, `Zero3Optimizer._squares`,
    `Zero3Layer.add_reduced`.
    """
    for rank in run(accumulate_all, world_size):
        for case, (worst, norms) in rank:
            assert worst < 1e-10, case
            for got, expected in norms:
                assert got == pytest.approx(expected, rel=1e-9) and 0.1 < expected < 50


def reduced_in(param_dtype, reduce_dtype):
    """The gradient of three micro-batches in each shard, and what it has to be."""
    rank, world_size, k = dist.get_rank(), dist.get_world_size(), 3
    layers = chain(param_dtype)
    plain, optimizer = PlainChain(copy.deepcopy(layers)), Zero3Optimizer(
        shard(layers), reduce_dtype=reduce_dtype)
    dtype = reduce_dtype or param_dtype
    expected = [0] * len(optimizer.shard_states)
    for step in range(k):
        parts = batch(2 * world_size, step).to(param_dtype).chunk(world_size)
        optimizer.backward(optimizer.model(parts[rank]).float().square().mean())
        total = [0] * len(expected)
        for part in parts:
            plain.zero_grad()
            plain(part).float().square().mean().backward()
            for i, layer in enumerate(layer for layer in plain if [*layer.parameters()]):
                total[i] = total[i] + share_of_gradient(layer).to(dtype) * (1 / world_size)
        expected = [a + b for a, b in zip(expected, total, strict=True)]
    grads = [states.shard.grad for states in optimizer.shard_states]
    assert all(grad.dtype == dtype for grad in grads)
    return all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True)), grads


def test_gradients_are_divided_summed_and_accumulated_in_reduce_dtype():
    """
    Bit for bit, on three ranks, over three micro-batches: bf16 gradients in fp32, and fp32
    gradients in bf16, which halves what is sent. Breaks where a gradient is divided before it is
    widened, or the shard adds in the parameter's data type.
    Proves `Zero3Optimizer._make_shard_states`, `Zero3Layer._post_backward_hook`,
    `Zero3Layer.add_reduced`, `FlatParameter.add_grad`.
    """
    for param_dtype, reduce_dtype in ((BF16, FP32), (BF16, None), (FP32, BF16)):
        found = run(reduced_in, 3, param_dtype, reduce_dtype)
        assert [same for same, _ in found] == [True] * 3
        if reduce_dtype is FP32:
            # And it makes a difference.
            assert any((grad != grad.bfloat16()).any() for grad in found[0][1])


class Sum(nn.Module):
    """Multiplies by the sum of its weights, whatever their data type."""

    def __init__(self, numel, dtype):
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(numel, dtype=dtype))

    def forward(self, x):
        return x * (1 + self.weights.to(x.dtype).sum())


def test_layers_of_two_data_types_share_the_scratch_memory():
    """
    Its 12 bytes hold three fp32 numbers or one of fp64, whose gradients arrive in bf16. Breaks
    where all 12 bytes are viewed as fp64.
    Proves `Zero3Optimizer._update`.
    """
    model = shard([Sum(3, FP32), Sum(1, torch.double)])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.5, reduce_dtype=BF16)
    assert optimizer._scratch_bytes == 12
    optimizer.backward(model(torch.ones(())))
    assert optimizer.step() == pytest.approx(2)
    assert [shard.tolist() for shard in model.get_trainable_chunk()] == [[-0.5] * 3, [-0.5]]


def all_cases():
    def build(model, **options):
        return Zero3Optimizer(model, bucket_bytes=800, **options)

    return {name: train_both(name, optimizer=build) for name in CASES}


def test_every_trap_of_the_heart_is_none_for_the_optimizer():
    """
    The models of `tests/cases.py`: mixed data types, frozen and unused parameters, layers called
    twice, checkpointing of each kind, and buckets that hold two or three of their layers.
    Proves I1, I7, `Zero3Layer.is_over`, `Watch.inputs`, `Watch.outputs`, `tensors_in`,
    `Watch._arrives`, `FlatParameter.zero_missing`.
    """
    for worst in run(all_cases, 2):
        # One has parameters in fp32.
        assert worst.pop("DataTypes") < 1e-6
        assert max(worst.values()) < 1e-10, worst


# --------------------------------------------------------------------------------------- the bytes


def sizes():
    """Chains of bf16 layers whose sizes need padding; all take 6 columns."""
    line = nn.Linear
    mixed = nn.Sequential(line(9, 5), line(5, 9))
    chains = {
        "padding": [line(6, 13), nn.ReLU(), line(13, 5), line(5, 3)],
        "frozen": [freeze(line(6, 20)), line(20, 9), freeze(line(9, 30)),
                   nn.Sequential(freeze(line(30, 4)), line(4, 5))],
        "little": [line(6, 6), line(6, 6), line(6, 5), line(5, 100), line(100, 2), line(2, 1)],
        "alternating": [line(6, 64), freeze(line(64, 3)), line(3, 64), freeze(line(64, 3))],
        "mixed": [line(6, 9), mixed, line(9, 2)],
    }
    chains = {name: [layer.to(BF16) for layer in layers] for name, layers in chains.items()}
    mixed[1].float()
    mixed.forward = lambda x: mixed[1](mixed[0](x).float()).to(BF16)
    return chains


BYTES = {  # optimizer class and options, micro-batches, and whether all but one are held back
    "plain": (torch.optim.AdamW, {}, 1, False),
    "fp32 gradients": (torch.optim.AdamW, {"reduce_dtype": FP32}, 2, False),
    "groups": (torch.optim.AdamW, {"group_by": decay, "fused": False}, 1, False),
    "buckets": (torch.optim.SGD, {"bucket_bytes": 600, "momentum": 0.9}, 2, False),
    "fp32 buckets": (torch.optim.NAdam, {"bucket_bytes": 900, "reduce_dtype": FP32}, 1, False),
    "held": (torch.optim.Adam, {"amsgrad": True}, 3, True),
    "held buckets": (torch.optim.AdamW, {"bucket_bytes": 1 << 20, "clip_grad_norm": 1.0}, 2, True),
}


def kinds_of(name, world_size):
    """All of them on two ranks; else a half, which is the other half for the next chain."""
    return [*BYTES] if world_size == 2 else [*BYTES][[*sizes()].index(name) % 2 :: 2]


def measured_bytes(name):
    found = []
    for kind in kinds_of(name, dist.get_world_size()):
        optimizer_class, options, k, hold = BYTES[kind]
        model = shard(sizes()[name])
        optimizer = Zero3Optimizer(model, optimizer_class, **{"bucket_bytes": 0, **options})
        # The second step has the moments that the first one made.
        for measured in (False, True):
            with Ledger(model, optimizer) if measured else nullcontext() as tape:
                for i in range(k):
                    with optimizer.no_sync() if hold and i + 1 < k else nullcontext():
                        optimizer.backward(model(batch(4).to(BF16)).float().square().mean() / k)
                grads = sum(states.shard.grad.nbytes for states in optimizer.shard_states)
                optimizer.step()
            optimizer.zero_grad()
        p = predict_optimizer(optimizer, micro_batches=k, no_sync=hold)
        got = (held_bytes(model, optimizer), tape.peak_live_bytes, grads, tape.sent_bytes,
               tape.messages, tape.order_bytes)
        found.append((got, (p.rest_bytes, p.peak_bytes, p.grad_bytes, p.sent_bytes, p.messages,
                            p.order_bytes)))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", sizes())
def test_the_formulas_cover_masters_moments_and_gradients_of_both_widths(name, world_size):
    """
    To the byte, on each rank, in the second step: rest, peak, gradients, sent bytes, messages and
    announcements. Breaks with any buffer that lives longer, any copy of a gradient, any message.
    Proves I2, I3, I4, `predict_optimizer`.
    """
    for rank, found in enumerate(run(measured_bytes, world_size, name)):
        for what, (got, predicted) in zip(kinds_of(name, world_size), found, strict=True):
            assert got == predicted, (rank, what)


def rests_after_backward(dtype):
    model = shard([layer.to(dtype) for layer in gpt_layers(GPTConfig(d_model=32, n_layers=2))])
    optimizer = Zero3Optimizer(model)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward(next_byte_loss(model, global_batch(load_bytes(), 0, 2, 16)))
        optimizer.step()
    steps = sum(state["step"].nbytes for state in optimizer.state.values())
    before = held_bytes(model, optimizer)
    optimizer.zero_grad()
    padded = sum(len(shard) for shard in model.get_trainable_chunk())
    return before - steps, held_bytes(model, optimizer) - steps, padded, len(optimizer.shard_states)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_rank_holds_16_bytes_for_each_parameter_of_its_shards(world_size):
    """
    ZeRO's 2 + 2 + 12 after backward, 14 after `zero_grad()`, for bf16 and for fp16; for fp32, where
    the shard is its own master, the same 16 and 12. Beside that 4 bytes for each shard, in which
    torch's Adam counts its steps.
    Proves `ShardStates.place`, `ShardStates.__init__`, `Portion.place`,
    `Zero3Optimizer.zero_grad`.
    """
    numels = [sum(p.numel() for p in layer.parameters())
              for layer in gpt_layers(GPTConfig(d_model=32, n_layers=2))]
    psi_n = sum(-(-numel // world_size) for numel in numels)
    for dtype, less in ((BF16, 2), (torch.half, 2), (FP32, 4)):
        for before, after, padded, _ in run(rests_after_backward, world_size, dtype):
            assert (before, after, padded) == (16 * psi_n, (16 - less) * psi_n, psi_n)


def no_sync_traffic(hold):
    model = shard([nn.Linear(8, 8) for _ in range(4)])
    optimizer = Zero3Optimizer(model, bucket_bytes=0)
    with Ledger(model, optimizer) as tape:
        for i in range(3):
            with optimizer.no_sync() if hold and i < 2 else nullcontext():
                optimizer.backward(model(torch.ones(2, 8)).sum() / 3)
            held = sum(g.grad.nbytes for m in model.module_list for g in m.flats
                       if g.grad is not None)
            assert held == (4 * 72 * 4 if hold and i < 2 else 0)
    return tape.sent_bytes


def test_no_sync_saves_a_reduce_of_the_model_for_each_micro_batch_and_keeps_full_gradients():
    """
    Of three micro-batches two send no gradient: (k-1) Psi (N-1)/N elements less.
    Proves `Zero3Optimizer.no_sync`, `Bucket.make_way`.
    """
    (sent, _), (less, _) = run(no_sync_traffic, 2, False), run(no_sync_traffic, 2, True)
    assert sent - less == 2 * 4 * 72 // 2 * 4


# ------------------------------------------------------------------------------------- loss scale


def snapshot(optimizer):
    shards = optimizer.shard_states
    states = [t.clone() for state in optimizer.state.values() for t in state.values()]
    return [o.shard.detach().clone() for o in shards] + [o.master.clone() for o in shards] + states


def overflow(dtype):
    rank = dist.get_rank()
    model = shard(chain(dtype))
    optimizer = Zero3Optimizer(model, loss_scale="dynamic", scale_window=3)
    history, same = [], []
    for step in range(9):
        x = batch(2, step, FP32).to(dtype)
        if step == 2 and rank == 1:
            x[0, 0] = math.inf
        before = snapshot(optimizer)
        optimizer.backward(model(x).float().square().mean())
        norm = optimizer.step()
        optimizer.zero_grad()
        same.append(all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer), strict=True))
                    if step else False)
        history.append((norm is None, optimizer.loss_scale))
    return history, same, optimizer.skipped_steps


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("world_size", [2, 3])
def test_an_infinity_on_one_rank_skips_the_step_on_all(world_size, dtype):
    """
    Step 2 meets an infinity on rank 1 only. No rank steps, nothing changes by a bit, the scale
    halves; three good steps later it doubles, and again. Breaks where each rank judges by its own
    shards.
    Proves `Zero3Optimizer.step`, `Zero3Optimizer._overflow`, `Zero3Optimizer._squares`,
    `Communicator.numbers`.
    """
    top = 65536.0
    scales = [top, top, top / 2, top / 2, top / 2, top, top, top, 2 * top]
    for history, same, skipped in run(overflow, world_size, dtype):
        assert history == [(step == 2, scale) for step, scale in enumerate(scales)]
        assert same == [step == 2 for step in range(9)] and skipped == 1


class Explodes(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.linear, self.when = nn.Linear(WIDTH, WIDTH), when

    def forward(self, x):
        y = self.linear(x)
        # The value is good, the gradient is not.
        return y + (y * 0).abs().sqrt() if self.when() else y


class Infinite(Explodes):
    def forward(self, x):
        y = self.linear(x.sigmoid())
        if self.when():
            # Its own gradients are infinite. The differences of infinities below it are NaN.
            y.register_hook(lambda grad: torch.full_like(grad, math.inf))
        return y


def floor(loss_scale, kind=Explodes):
    here = []
    layers = [nn.Linear(WIDTH, WIDTH), kind(lambda: here and dist.get_rank() == 1),
              nn.Linear(WIDTH, WIDTH)]
    model = shard(layers)
    optimizer = Zero3Optimizer(model, loss_scale=loss_scale, scale_floor=16384.0)
    scales, text, before = [], "", snapshot(optimizer)
    here.append(True)
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.backward(model(batch(2, dtype=FP32)).square().mean())
        try:
            assert optimizer.step() is None
        except RuntimeError as error:
            text = str(error)
            break
        scales.append(optimizer.loss_scale)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(optimizer), strict=True))
    here.clear()
    optimizer.zero_grad()
    optimizer.backward(model(batch(2, dtype=FP32)).square().mean())
    return scales, text, optimizer.step()


def test_at_its_floor_the_scale_raises_and_names_the_layer():
    """
    Layer 1's backward makes a NaN or an infinity on rank 1; layer 0's gradient is NaN by
    consequence, layer 2's is good. All ranks name the same layer. Without a scale there is nothing
    to lower, so the first time raises. A fixed scale skips. Afterwards training goes on.
    Proves `Zero3Optimizer.step`, `Zero3Optimizer._overflow`.
    """
    for rank, (scales, text, norm) in enumerate(run(floor, 2, "dynamic")):
        assert scales == [32768.0, 16384.0] and norm > 0
        assert text.startswith(f"rank {rank}: the optimizer cannot step.") and "16384" in text
        assert "Got: a norm of inf or nan in layer 1 (Explodes)." in text
    for scales, text, norm in run(floor, 2, None):
        assert scales == [] and "layer 1 (Explodes)" in text and norm > 0
    for scales, text, norm in run(floor, 2, None, Infinite):
        assert scales == [] and "layer 1 (Infinite)" in text and norm > 0
    for scales, text, norm in run(floor, 2, 8.0):
        assert scales == [8.0] * 4 and text == "" and norm > 0


def off_by_a_tenth(loss_scale):
    """The share of gradients in fp16 that miss those of fp32 by more than a tenth."""
    torch.manual_seed(0)
    layers = [layer.half() for layer in gpt_layers(GPTConfig(d_model=64, n_layers=2))]
    windows, plain = global_batch(load_bytes(), 0, 16, 64), nn.Sequential(*copy.deepcopy(layers))
    next_byte_loss(plain.float(), windows).backward()
    optimizer = Zero3Optimizer(shard(layers), loss_scale=loss_scale)
    optimizer.backward(next_byte_loss(optimizer.model, mine(windows)))
    off = total = 0
    for states, layer in zip(optimizer.shard_states, plain, strict=True):
        right = share_of_gradient(layer)
        got = states.shard.grad.float() / optimizer.loss_scale
        off += ((got - right).abs() > right.abs() / 10).sum().item()
        total += right.count_nonzero().item()
    return off / total


def test_a_loss_scale_saves_the_digits_of_small_gradients_in_fp16():
    """
    Of one batch of a small GPT, several gradients in a hundred are wrong by more than a tenth in
    fp16; with a scale, fewer than a fifth as many.
    Proves `Zero3Optimizer.backward`.
    """
    without, scaled = run(off_by_a_tenth, 2, None), run(off_by_a_tenth, 2, 65536.0)
    assert sum(without) / 2 > 0.02 and sum(scaled) < sum(without) / 5, (without, scaled)


def test_half_precision_loses_a_step_that_its_master_takes():
    """
    The numbers of the chapter: a thousand steps of 0.001 leave bf16 at 1, steps of 0.0002 fp16; the
    neighbours of 1 in bf16 are 1 + 1/128 and 1 - 1/256.
    """
    for dtype, step in ((BF16, 0.001), (torch.half, 0.0002)):
        narrow, master = torch.ones((), dtype=dtype), torch.ones(())
        for _ in range(round(1 / step)):
            narrow -= step
            master -= step
        assert narrow == 1 and abs(master) < 1e-4
    one, inf = torch.ones((), dtype=BF16).view(torch.int16), 1
    assert (one + inf).view(BF16) == 1 + 1 / 128 and (one - inf).view(BF16) == 1 - 1 / 256
    assert torch.tensor(2.0**-24).half() > 0 and torch.tensor(2.0**-26).half() == 0


# ------------------------------------------------------------------------------------ param groups


def step_both(plain, reference, model, optimizer, step):
    """A step of plain PyTorch on the global batch, and of ours on this rank's rows."""
    x = batch(2 * dist.get_world_size(), step)
    plain(x).square().mean().backward()
    optimizer.backward(model(mine(x)).square().mean())
    for o in (reference, optimizer):
        o.step()
        o.zero_grad()


def special(name, p):
    """Decay for matrices only, and a learning rate of its own for the last layer."""
    return {"weight_decay": 0.1 if p.ndim > 1 else 0.0, **({"lr": 0.2} if name[0] == "3" else {})}


def grouped():
    plain, model = PlainChain(chain()), shard(chain())
    groups = {}
    for name, p in plain.named_parameters():
        groups.setdefault(str(special(name, p)), {"params": [], **special(name, p)})
        groups[str(special(name, p))]["params"].append(p)
    reference = torch.optim.AdamW(list(groups.values()), lr=0.05, eps=1e-3)
    optimizer = Zero3Optimizer(model, lr=0.05, eps=1e-3, group_by=special)
    worst, seen = 0.0, []
    schedulers = [
        make(o) for o in (reference, optimizer) for make in (
            lambda o: torch.optim.lr_scheduler.LinearLR(o, 0.5, 1.0, 3),
            lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [0.1, 0.2, 0.3, 0.4], total_steps=9),
        )]
    for step in range(8):
        step_both(plain, reference, model, optimizer, step)
        for scheduler in schedulers:
            scheduler.step()
        worst = max(worst, difference(plain, model))
        seen.append([group["lr"] for group in optimizer.param_groups])
        assert seen[-1] == [group["lr"] for group in reference.param_groups]
    options = [(g["weight_decay"], g["eps"]) for g in optimizer.param_groups]
    return worst, options, len(set(map(tuple, seen)))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_param_groups_and_schedulers_survive_sharding(world_size):
    """
    Weight decay for matrices, learning rates per group, and schedulers that move learning rates and
    momenta, as in plain PyTorch, where shards begin in the middle of matrices and of biases. Breaks
    with a cut that is one element off.
    Proves I1, `Zero3Optimizer.__init__`, `Zero3Optimizer._make_shard_states`,
    `Zero3Optimizer.pieces`.
    """
    for worst, options, different in run(grouped, world_size):
        assert worst < 1e-10 and different == 8
        assert options == [(0.1, 1e-3), (0.0, 1e-3)] * 2


ELEMENTWISE = {
    "Adam": {"amsgrad": True}, "AdamW": {}, "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"centered": True, "momentum": 0.5}, "Adagrad": {}, "Adadelta": {"lr": 1.0},
    "NAdam": {}, "RAdam": {}, "Adamax": {}, "Rprop": {}, "ASGD": {},
}


def elementwise():
    from labml_nn.optimizers.adam import Adam

    worst = {}
    for name, options in {**ELEMENTWISE, "labml's Adam": {"lr": 0.01}}.items():
        optimizer_class, options = getattr(torch.optim, name, Adam), {"lr": 0.01, **options}
        plain, model = PlainChain(chain()), shard(chain())
        reference = optimizer_class(plain.parameters(), **options)
        optimizer = Zero3Optimizer(model, optimizer_class, **options)
        for step in range(8):
            step_both(plain, reference, model, optimizer, step)
        worst[name] = difference(plain, model)
    return worst


def test_the_fused_loop_is_taken_where_there_is_one_unless_another_is_asked_for():
    """
    Breaks where an optimizer without one gets the argument, or a choice is overruled, also one in a
    `partial`.
    Proves `Zero3Optimizer.__init__`, `Zero3Optimizer._choose_fused`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    for optimizer_class, options, fused in (
        (torch.optim.AdamW, {}, True), (torch.optim.SGD, {}, None), (torch.optim.RMSprop, {}, None),
        (torch.optim.AdamW, {"foreach": True}, None), (torch.optim.AdamW, {"fused": False}, False),
        (torch.optim.SGD, {"fused": True}, True), (partial(torch.optim.AdamW, lr=0.1), {}, True),
        (partial(torch.optim.AdamW, foreach=True), {}, None),
        (partial(torch.optim.AdamW, fused=False), {}, False),
    ):
        optimizer = Zero3Optimizer(layer, optimizer_class, **options)
        assert optimizer.param_groups[0].get("fused") == fused


class OwnSGD(torch.optim.SGD):
    """A class of the user's"""


@pytest.mark.parametrize("make, options", [
    (torch.optim.SGD, {}), (torch.optim.SGD, {"group_by": lambda name, p: {"momentum": 0.5}}),
    (partial(torch.optim.SGD, momentum=0.5), {}), (OwnSGD, {"momentum": 0.5}),
])
def test_momentum_may_come_from_a_scheduler_a_group_a_partial_or_a_subclass(make, options):
    """
    The bias gets its first gradient in the third step, and has no momentum yet. torch's fused SGD
    raises an error there, while other ranks wait. Breaks if we choose the fused loop for any SGD.
    Proves I1, `Zero3Optimizer._choose_fused`.
    """
    class Late(nn.Linear):
        def forward(self, x, bias):
            return F.linear(x, self.weight, self.bias if bias else None)

    plain = Late(2, 2)
    layer = Zero3Layer(copy.deepcopy(plain))
    pairs = []
    for module, optimizer in ((plain, torch.optim.SGD(plain.parameters(), lr=0.1)),
                              (layer, Zero3Optimizer(layer, make, lr=0.1, **options))):
        # It sets the momentum of each group, too.
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9)
        pairs.append((module, optimizer, scheduler))
    for step in range(4):
        for module, optimizer, scheduler in pairs:
            module(torch.ones(1, 2), step > 1).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    flat = torch.cat([p.detach().flatten() for p in plain.parameters()])
    assert torch.equal(layer.get_trainable_chunk()[0].detach(), flat)


def test_any_elementwise_optimizer_does_to_shards_what_it_does_to_parameters():
    """
    torch's and labml's, in fp64. Adam's step divides by the root of what may be nearly zero, so
    differences of 1e-16 grow a little.
    Proves I1, `Zero3Optimizer`, `Zero3Optimizer._update`.
    """
    for worst in run(elementwise, 2):
        assert max(worst.values()) < 1e-8, worst


# ----------------------------------------------------------------------------------------- buckets


class Flips(nn.Module):
    """On one rank the gradients arrive in the other order, or not all of them."""

    def __init__(self, rank=None, skips=False):
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rank, self.skips = dist.get_rank() if rank is None else rank, skips

    def forward(self, x):
        first, second = (self.one, self.two) if self.rank else (self.two, self.one)
        return first(x).tanh() + (0 if self.skips and self.rank else second(x).sin())


def bucketed(bucket_bytes, by_messages=True):
    torch.manual_seed(0)
    model = shard([Flips() for _ in range(8)])
    model.module_list[0].comm.by_messages = by_messages
    optimizer = Zero3Optimizer(model, lr=0.01, bucket_bytes=bucket_bytes)
    for step in range(4):
        with Ledger(model, optimizer) as tape:
            optimizer.backward(model(batch(4, step, FP32)).square().mean())
            optimizer.step()
        optimizer.zero_grad()
    events = [(e.layer, e.event) for e in tape.events if e.event in ("reduce", "reduced")]
    shards = [shard.detach().clone() for shard in model.get_trainable_chunk()]
    return tape.messages, tape.sent_bytes, events, shards


def test_small_layers_share_a_message_and_train_the_same():
    """
    Eight layers of 84 parameters: 336 bytes of gradients each, so a bucket of 1000 takes three. The
    reduces become 3 messages in place of 8, of the same bytes, and weights are equal bit for
    bit, though gradients arrive in another order on rank 1. Breaks where a share is cut at the
    wrong place.
    Proves `Bucket`, `Bucket.make_way`, `Bucket._send`, `Bucket.finish`.
    """
    alone, together = run(bucketed, 2, 0), run(bucketed, 2, 1000)
    for (messages, sent, _, shards), (fewer, same, events, equal) in zip(
        alone, together, strict=True
    ):
        assert (messages - fewer, same) == (8 - 3, sent)
        assert all(torch.equal(a, b) for a, b in zip(shards, equal, strict=True))
        for event, layers in (("reduce", "741"), ("reduced", "76543210")):
            assert "".join(layer.split()[1] for layer, e in events if e == event) == layers
    assert together[0][2] == together[1][2]


def flips(rank):
    torch.manual_seed(0)
    return [Flips(rank, skips=i == 2) for i in range(4)]


def skipped():
    rank, world_size = dist.get_rank(), dist.get_world_size()
    optimizer = Zero3Optimizer(shard(flips(rank)))
    optimizer.backward(optimizer.model(batch(2, rank, FP32)).square().mean())
    expected = [0.0] * 4
    for other in range(world_size):
        plain = PlainChain(flips(other))
        plain(batch(2, other, FP32)).square().mean().backward()
        for i, layer in enumerate(plain):
            expected[i] = expected[i] + share_of_gradient(layer) / world_size
    return [(states.shard.grad - grad).abs().max().item()
            for states, grad in zip(optimizer.shard_states, expected, strict=True)]


def test_a_gradient_that_is_missing_on_one_rank_is_zero_there_and_delays_nobody():
    """
    Rank 1 does not use half of layer 2, so that layer is done at the end of backward only, after
    layers 1 and 0. In a bucket all have their place by number, and the sums are right. Breaks where
    a bucket is filled in the order of arrival.
    Proves `Bucket._send`, `Bucket.end`, `Zero3Layer._backup_grads`.
    """
    for off in run(skipped, 2):
        assert max(off) < 1e-6


def cut_off(bucket_bytes):
    """On rank 1 the loss does not depend on layers 0 and 1."""
    torch.manual_seed(0)
    model = shard([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    optimizer = Zero3Optimizer(model, bucket_bytes=bucket_bytes)
    x = batch(2, dtype=FP32)
    for i, layer in enumerate(model.walk()):
        x = layer(x)
        if i == 1 and dist.get_rank() == 1:
            x = x.detach()
    try:
        optimizer.backward(x.square().mean())
    except RuntimeError as error:
        return str(error)


def test_a_layer_without_any_gradient_on_one_rank_is_an_error_in_a_bucket_too():
    """
    Rank 0 gathers layer 1 again while rank 1 already reduces. Breaks where the other ranks wait for
    a gradient that never comes.
    Proves I6, `Bucket.make_way`.
    """
    for bucket_bytes in (0, 1 << 18):
        for rank, text in enumerate(run(cut_off, 2, bucket_bytes)):
            assert text and f"rank {rank}: layer " in text and "the ranks diverged" in text


def late():
    """Layer 6 of eight is late on rank 1, and a bucket is full before it comes."""
    torch.manual_seed(0)
    model = shard([Flips(skips=i == 6) for i in range(8)])
    optimizer = Zero3Optimizer(model, bucket_bytes=1000)
    try:
        optimizer.backward(model(batch(2, 0, FP32)).square().mean())
    except RuntimeError as error:
        return str(error)


def test_buckets_with_other_layers_on_another_rank_are_an_error_and_not_a_sum():
    """
    Rank 0 packs layers 7, 6 and 5, rank 1 packs 7, 5 and 4: as many bytes, with the same first
    layer. Breaks where the announcement does not say which layers are in the bucket.
    Proves I6, `Communicator.begin`, `Transfer._arrive`.
    """
    for rank, text in enumerate(run(late, 2)):
        assert text and text.startswith(f"rank {rank}: layer ") and "the ranks diverged" in text
        assert f"on rank {1 - rank}" in text and "1008 bytes" in text


def raises_while_waiting():
    model = shard([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), Explodes(lambda: False)])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.0)
    x = batch(2, dtype=FP32).requires_grad_()

    def stop(grad):
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        y = model.module_list[0](x)
        y.register_hook(stop)
        optimizer.backward(model.module_list[2](model.module_list[1](y)).square().mean())
    left = [bool(b.waiting or b.layers) for b in optimizer.buckets]
    grads = [states.shard.grad for states in optimizer.shard_states]
    optimizer.backward(model(x).square().mean())
    norm = optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(model(x).square().mean())
    return left, grads, norm == optimizer.step()


def test_gradients_that_wait_are_dropped_when_backward_raises():
    """
    Nothing is sent from the ruins of a backward, and the next one begins from nothing.
    Proves `Bucket.drop`, `Sharded.drop_full_grads`.
    """
    assert run(raises_while_waiting, 2) == [([False], [None] * 3, True)] * 2


def test_native_collectives_give_the_same_as_messages():
    """
    The lines that NCCL runs, here over gloo: buckets and norms, in two orders of addition, which
    for two ranks are one.
    Proves I9, `Communicator.numbers`, `Communicator.total`, `Bucket._send`, `Bucket.finish`.
    """
    for (*_, shards), (*_, same) in zip(
        run(bucketed, 2, 1000), run(bucketed, 2, 1000, False), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(shards, same, strict=True))


# ----------------------------------------------------------------------------------- what remains


def stops_and_goes_on():
    losses = []
    for stop in (False, True):
        model = shard([layer.to(BF16) for layer in chain()])
        optimizer = Zero3Optimizer(model, lr=0.01, loss_scale="dynamic", scale_window=2)
        for step in range(6):
            if stop and step == 3:
                state = copy.deepcopy(optimizer.state_dict())
                model = shard([layer.to(BF16) for layer in chain()])
                optimizer = Zero3Optimizer(model, loss_scale="dynamic", scale_window=2)
                optimizer.load_state_dict(state)
                assert optimizer.param_groups[0]["lr"] == 0.01 and optimizer.loss_scale == 131072
            optimizer.backward(model(batch(4, step).to(BF16)).float().square().mean())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(snapshot(optimizer))
    return all(torch.equal(a, b) for a, b in zip(*losses, strict=True))


def test_a_state_dict_is_all_that_the_next_run_needs():
    """
    Into new layers of other weights: masters, moments, groups and scale come back bit for bit.
    Proves `Zero3Optimizer.state_dict`, `Zero3Optimizer.load_state_dict`.
    """
    assert run(stops_and_goes_on, 2) == [True, True]


def test_a_state_of_another_model_is_refused_and_changes_nothing():
    """
    Breaks where the moments are loaded before the sizes are looked at.
    Proves `Zero3Optimizer.load_state_dict`.
    """
    one, other = (Zero3Optimizer(Zero3Layer(nn.Linear(2, n)), lr=n) for n in (2, 3))
    with pytest.raises(RuntimeError, match=r"Expected: shards of \[6\].*Got: \[9\]"):
        one.load_state_dict(other.state_dict())
    assert one.param_groups[0]["lr"] == 2


def test_a_state_of_as_many_elements_in_more_or_fewer_parameters_is_refused():
    """
    One weight of six elements, or a weight and a bias. Breaks where pieces are cut before all
    numbers are compared.
    Proves `Zero3Optimizer.load_state_dict`.
    """
    one, two = (Zero3Optimizer(Zero3Layer(each))
                for each in (nn.Linear(6, 1, bias=False), nn.Linear(2, 2)))
    for mine, theirs, expected, got in ((one, two, 1, 2), (two, one, 2, 1)):
        before = copy.deepcopy(mine.state_dict())
        with pytest.raises(RuntimeError, match=rf"shards of \[{expected}\] para.*Got: \[{got}\]"):
            mine.load_state_dict(theirs.state_dict())
        assert mine.state_dict()["cuts"] == before["cuts"]
        assert torch.equal(mine.state_dict()["masters"][0], before["masters"][0])


def test_a_state_with_more_or_fewer_param_groups_is_refused():
    """
    Also if it has as many as are stepped element by element: the matrix is stepped whole by SGD in
    one of them. Breaks where those get the options of another group.
    Proves `Zero3Optimizer.load_state_dict`.
    """
    one, other = (Zero3Optimizer(Zero3Layer(nn.Linear(2, 2)), lr=2, group_by=by)
                  for by in (lambda name, p: {"optimizer": torch.optim.SGD, "lr": 3.0}
                             if p.ndim == 2 else {}, None))
    for mine, theirs, expected, got in ((one, other, 2, 1), (other, one, 1, 2)):
        before = [group["lr"] for group in mine.param_groups]
        with pytest.raises(RuntimeError, match=f"Expected: {expected} param groups.*Got: {got}"):
            mine.load_state_dict(theirs.state_dict())
        assert [group["lr"] for group in mine.param_groups] == before


def test_a_state_does_not_decide_whether_to_scale():
    """
    A dynamic scale goes on from the state's; a run without one, or with a fixed one, keeps its own.
    Proves `Zero3Optimizer.load_state_dict`.
    """
    state = Zero3Optimizer(Zero3Layer(nn.Linear(2, 2)), loss_scale=1024.0).state_dict()
    for loss_scale, after in ((None, 1.0), (8.0, 8.0), ("dynamic", 1024.0)):
        layer = Zero3Layer(nn.Linear(2, 2))
        optimizer = Zero3Optimizer(layer, loss_scale=loss_scale)
        optimizer.load_state_dict(copy.deepcopy(state))
        optimizer.backward(layer(torch.ones(1, 2)).sum())
        assert optimizer.loss_scale == after and optimizer.step() == pytest.approx(6**0.5)


def test_gradients_that_wait_while_another_scale_is_loaded_are_refused():
    """
    With the same scale they are stepped. Breaks where they are divided by a scale that they do not
    have.
    Proves `Zero3Optimizer.load_state_dict`, `Zero3Optimizer._check_ready`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    optimizer = Zero3Optimizer(layer, loss_scale="dynamic")
    state = copy.deepcopy(optimizer.state_dict())
    for scale, refused in ((65536.0, False), (1024.0, True)):
        optimizer.backward(layer(torch.ones(1, 2)).sum())
        optimizer.load_state_dict({**state, "loss_scale": scale})
        with pytest.raises(RuntimeError, match="a loss times 1024") if refused else nullcontext():
            assert optimizer.step() == pytest.approx(6**0.5)
        optimizer.zero_grad()


def loads_scales(folder):
    """The scales of dynamic runs with the floor 16, from what a fixed scale and none have saved"""
    found = []
    for saved in (None, 8.0, 1024.0):
        model = Zero3Sequential([Zero3Layer(nn.Linear(2, 2))])
        optimizer = Zero3Optimizer(model, loss_scale=saved)
        save(folder / f"{saved}", model, optimizer, step=1)
        state = optimizer.state_dict()
        # What an earlier version has written of the same run.
        earlier = {**state, "loss_scale": optimizer.loss_scale}
        for one in (folder / f"{saved}", state, earlier):
            optimizer = Zero3Optimizer(model, loss_scale="dynamic", scale_floor=16.0)
            if isinstance(one, dict):
                optimizer.load_state_dict(one)
            else:
                load(one, model, optimizer)
            found.append(optimizer.loss_scale)
    return found


def test_a_loaded_scale_is_not_below_the_floor(tmp_path):
    """
    And a run that had no scale leaves the first scale of this one. Breaks where its 1 is taken for
    a scale, or where a lower one than the floor is taken over.
    Proves `Zero3Optimizer.scale_state`, `Zero3Optimizer.load_scale_state`,
    `Zero3Optimizer.load_state_dict`, `Zero3Optimizer.state_dict`, `Entries.options`,
    `Entries._take_options`.
    """
    assert run(loads_scales, 1, tmp_path)[0] == [
        65536, 65536, 16, 16, 16, 16, 1024, 1024, 1024]


def test_a_second_optimizer_has_its_own_reduce_dtype():
    """
    Breaks where the first one's choice stays with the shard. Gradients of the other data type are
    refused, those of the same are taken over.
    Proves `Zero3Optimizer._make_shard_states`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    for reduce_dtype, other in ((BF16, None), (None, BF16)):
        optimizer = Zero3Optimizer(layer, reduce_dtype=reduce_dtype)
        optimizer.backward(layer(torch.ones(1, 2)).sum())
        assert optimizer.shard_states[0].shard.grad.dtype == (reduce_dtype or FP32)
        with pytest.raises(RuntimeError, match="call `zero_grad"):
            Zero3Optimizer(layer, reduce_dtype=other)
        optimizer = Zero3Optimizer(layer, reduce_dtype=reduce_dtype)
        assert optimizer.step() == pytest.approx(6**0.5)
        optimizer.zero_grad()


def test_what_cannot_be_predicted_is_refused_and_not_wrong():
    """
    A layer that stands alone, a layer in a layer, momentum in one param group only, and a layer
    that was frozen since: its states stay.
    Proves `predict_optimizer`.
    """
    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = Zero3Layer(nn.Linear(2, 2)), nn.Linear(2, 2)

    def momentum(name, p):
        return {"momentum": 0.9 if p.dim() > 1 else 0.0}

    for model, options in (
        (Zero3Layer(nn.Linear(2, 2)), {}), (shard([Inner()]), {}),
        (shard([nn.Linear(2, 2)]), {"optimizer_class": torch.optim.SGD, "group_by": momentum}),
    ):
        with pytest.raises(RuntimeError, match=r"cannot predict. Expected: a Zero3Sequential of"):
            predict_optimizer(Zero3Optimizer(model, **options))
    model = shard([nn.Linear(2, 2), nn.Linear(2, 2)])
    optimizer = Zero3Optimizer(model)
    model.module_list[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="some that were frozen or unfrozen since"):
        predict_optimizer(optimizer)


def test_a_loss_in_fp16_is_refused_where_the_scale_is_no_number_of_fp16():
    """
    Its gradient would be infinite, in every step. In fp32 it is not.
    Proves `Zero3Optimizer.backward`.
    """
    layer = Zero3Layer(nn.Linear(2, 2).half())
    optimizer = Zero3Optimizer(layer, loss_scale="dynamic")
    y = layer(torch.ones(1, 2).half())
    with pytest.raises(RuntimeError, match="one in fp32, at a scale of 65536"):
        optimizer.backward(y.sum())
    optimizer.backward(y.float().sum() / 4)
    assert optimizer.step() == pytest.approx(6**0.5 / 4)


def test_an_optimizer_that_was_refused_leaves_no_scale_behind():
    """
    Its option is misspelt, and the next one is of torch. Breaks where the layers believe that their
    gradients have a scale.
    Proves `Zero3Optimizer`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="options of its class"):
        Zero3Optimizer(layer, loss_scale=8.0, group_by=lambda name, p: {"learning_rate": 1.0})
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.clip_grad_norm_(1.0).item() == pytest.approx(6**0.5)


class Upside(nn.Module):
    """Layers that stand alone, registered the other way round than called."""

    def __init__(self):
        super().__init__()
        self.head = Zero3Layer(Explodes(lambda: False))
        self.body = Zero3Layer(Explodes(lambda: True))

    def forward(self, x):
        return self.head(self.body(x))


class Owns(nn.Module):
    """Somebody's model, which passes on what the chain in it offers."""

    def __init__(self):
        super().__init__()
        self.body = Zero3Sequential([Zero3Layer(nn.Linear(2, 2))])

    def get_trainable_chunk(self):
        return self.body.get_trainable_chunk()


def test_a_model_with_a_method_of_a_chain_is_no_chain():
    """
    Breaks where the optimizer does not look into a module with such a method.
    Proves `plain_names`.
    """
    optimizer = Zero3Optimizer(Owns())
    assert [each.name for each in optimizer.shard_states[0].params] == ["body.0.weight",
                                                                        "body.0.bias"]


def test_a_layer_that_stands_alone_is_named_by_its_path():
    """
    Its class alone would not tell which of two equal layers it is.
    Proves `Zero3Optimizer._make_shard_states`, `Zero3Optimizer._overflow`.
    """
    optimizer = Zero3Optimizer(Upside())
    optimizer.backward(optimizer.model(torch.ones(2, WIDTH)).sum())
    with pytest.raises(RuntimeError, match=r"inf or nan in body \(Explodes\)"):
        optimizer.step()


def written():
    model = shard([layer.to(BF16) for layer in chain()])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=1.0)
    with model.full_params(writeback=True) as params:
        for p in params.values():
            p.data.fill_(0.5)
    # All but the padding.
    assert all((m == 0.5).sum() >= len(m) - 1 for m in optimizer.state_dict()["masters"])
    with model.full_params(writeback=True) as params:
        for p in params.values():
            p.data.fill_(0.25)
    optimizer.backward(model(batch(4).to(BF16)).float().square().mean() * 0)
    optimizer.step()
    return [o.shard.max().item() for o in optimizer.shard_states] + [o.master.max().item()
                                                              for o in optimizer.shard_states]


def test_a_master_follows_what_is_written_into_the_shard():
    """
    Weights that somebody loads into a sharded model are saved, and not undone by the next step.
    Proves `ShardStates.in_memory`, `Sharded.full_params`.
    """
    for values in run(written, 2):
        assert values == [0.25] * len(values)


def test_a_write_of_the_same_values_leaves_the_digits_of_the_master():
    """
    Two hundred steps, each too small for bf16, and `clamp_` after each of them: the first changes
    one weight. Breaks where the other weights are rounded every time, so that they never move.
    Proves `Portion._current_master`.
    """
    layer = Zero3Layer(Sum(3, BF16))
    optimizer = Zero3Optimizer(layer, torch.optim.SGD, lr=1e-3)
    (each,) = layer.get_trainable_chunk()
    with torch.no_grad():
        each.copy_(torch.tensor([1.0, 2.0, 3.0]))
    for _ in range(200):
        each.grad = torch.ones_like(each)
        optimizer.step()
        with torch.no_grad():
            each.clamp_(max=2.5)
    assert optimizer.state_dict()["masters"][0].tolist() == pytest.approx(
        [0.8, 1.8, 2.301], rel=1e-4)


def padding():
    model = shard([layer.to(BF16) for layer in chain()])
    optimizer = Zero3Optimizer(model, lr=0.1, clip_grad_norm=0.1, reduce_dtype=FP32)
    seen = []
    for step in range(3):
        optimizer.backward(model(batch(4, step).to(BF16)).float().square().mean())
        # The last layer's 18 elements divide by three.
        for shard_states in optimizer.shard_states[:-1]:
            states = [optimizer.state[piece.param] for piece in shard_states.pieces]
            seen += [shard_states.shard, shard_states.master, shard_states.shard.grad]
            seen += [s[key] for s in states for key in ("exp_avg", "exp_avg_sq") if key in s]
        seen = [t.detach().clone() for t in seen]
        optimizer.step()
        optimizer.zero_grad()
    return [t[-1].item() for t in seen]


def test_padding_stays_zero_in_masters_moments_and_gradients():
    """
    I5. Layers of 77 and 70 elements have padding on the last of three ranks: its last element.
    Proves I5, `Zero3Layer._merge_and_pad_params`, `Zero3Layer._post_backward_hook`,
    `FlatParameter.begin_grad`.
    """
    _, second, last = run(padding, 3)
    # Three steps, of which the first has no moments yet.
    assert last == [0.0] * (2 * (3 + 5 + 5)) and 0 not in second


class OddName(EachParameter):
    """Has a moment under a name that a file of states has for a gradient."""

    def update(self, p, lr):
        self.state[p]["grad"] = p.grad.clone()
        p.sub_(p.grad, alpha=lr)


class Shared(torch.optim.SGD):
    """Counts its steps in a state of no parameter."""

    def step(self):
        super().step()
        self.state["steps"] = 1


class Stray(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = Zero3Layer(nn.Linear(2, 2)), nn.Parameter(torch.ones(()))


def forgets(name, p):
    """A function without `return`."""


@pytest.mark.parametrize("what, make", {
    "is not elementwise": lambda m: Zero3Optimizer(m, torch.optim.Muon),
    "scale of zero": lambda m: Zero3Optimizer(m, loss_scale=0.0),
    "scale with a typo": lambda m: Zero3Optimizer(m, loss_scale="dynamc"),
    "clip at infinity": lambda m: Zero3Optimizer(m, clip_grad_norm=math.inf),
    "integer gradients": lambda m: Zero3Optimizer(m, reduce_dtype=torch.int32),
    "clip of zero": lambda m: Zero3Optimizer(m, clip_grad_norm=0.0),
    "no window": lambda m: Zero3Optimizer(m, scale_window=0),
    "not wrapped": lambda m: Zero3Optimizer(nn.Linear(2, 2)),
    "frozen": lambda m: Zero3Optimizer(Zero3Layer(freeze(nn.Linear(2, 2)))),
    "stray parameter": lambda m: Zero3Optimizer(Stray()),
    "parameters": lambda m: Zero3Optimizer(m.parameters()),
    "a moment named grad": lambda m: Zero3Optimizer(m, OddName),
    "a state of no parameter": lambda m: Zero3Optimizer(m, Shared),
    "an optimizer": lambda m: Zero3Optimizer(m, torch.optim.AdamW(m.parameters())),
    "a name of a class": lambda m: Zero3Optimizer(m, "adamw"),
    "a dict of groups": lambda m: Zero3Optimizer(m, group_by={"weight": {"lr": 0.1}}),
    "no options": lambda m: Zero3Optimizer(m, group_by=lambda name, p: None),
    "no options of whole parameters": lambda m: Zero3Optimizer(
        m, torch.optim.Adafactor, group_by=forgets),
    "no state": lambda m: Zero3Optimizer(m).load_state_dict({}),
    "a plain state": lambda m: Zero3Optimizer(m).load_state_dict(
        torch.optim.AdamW(m.parameters()).state_dict()),
    "a copy": lambda m: copy.copy(Zero3Optimizer(m)),
    "a deep copy": lambda m: copy.deepcopy(Zero3Optimizer(m)),
    "a pickle": lambda m: pickle.dumps(Zero3Optimizer(m)),
}.items())
def test_what_cannot_work_is_refused_by_name(what, make):
    """
    Each error names rank, what was expected, what was found and what to do.
    Proves `Zero3Optimizer._check_arguments`, `Zero3Optimizer._check_model`,
    `Zero3Optimizer._members`, `Zero3Optimizer._place_states`, `Zero3Optimizer.load_state_dict`,
    `Zero3Optimizer.__reduce_ex__`, `_tried`, `Named.expect`, `stray`.
    """
    with pytest.raises(RuntimeError, match=r"rank 0: the optimizer .*Expected.*Got.*What to do"):
        make(Zero3Layer(nn.Linear(2, 2)))


def test_a_step_inside_no_sync_is_refused_and_loses_nothing():
    """
    The gradients stay where they are, and the step outside takes them.
    Proves `Zero3Optimizer.step`, `Zero3Optimizer.no_sync`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    optimizer = Zero3Optimizer(layer, clip_grad_norm=1.0)
    with optimizer.no_sync():
        with optimizer.no_sync():
            pass
        optimizer.backward(layer(torch.ones(1, 2)).sum())
        assert layer.get_trainable_chunk()[0].grad is None
        with pytest.raises(RuntimeError, match="leave `no_sync"):
            optimizer.step()
    # The gradient is 1 in each of four weights and two biases.
    assert optimizer.step() == pytest.approx(6**0.5)


class Counts(torch.optim.SGD):
    """Keeps its count of steps where Schedule-Free does, and steps less with each."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-1 / group["k"])


def counted(name, p):
    return {"optimizer": Counts} if p.ndim == 2 else {}


@pytest.mark.parametrize("bucket_bytes", [1 << 18, 0])
@pytest.mark.parametrize("group_by", [None, counted])
def test_a_count_in_the_param_group_counts_the_steps(bucket_bytes, group_by):
    """
    Three shards, or two matrices, that are stepped one by one, with a gradient of 1: two steps take
    1 and then a half, as in plain PyTorch. Breaks where each call of the class counts.
    Proves `in_one_step`, `Zero3Optimizer._update`, `Owners.step`.
    """
    model = shard([nn.Linear(2, 2), nn.Linear(2, 2), Sum(3, torch.float32)])
    optimizer = Zero3Optimizer(model, Counts, group_by=group_by, bucket_bytes=bucket_bytes)
    before = [s.detach().clone() for s in model.get_trainable_chunk()]
    for _ in range(2):
        for each in model.get_trainable_chunk():
            each.grad = torch.ones_like(each)
        optimizer.step()
    assert {group["k"] for group in optimizer.param_groups} == {2}
    for one, other in zip(model.get_trainable_chunk(), before, strict=True):
        torch.testing.assert_close(one.detach(), other - 1.5)


def test_what_the_chapter_says_is_not_covered_is_so():
    """
    Gradients of 1e20, whose squares fp32 does not hold, count as an overflow.
    Proves `Zero3Optimizer._overflow`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    optimizer = Zero3Optimizer(layer, torch.optim.SGD, loss_scale=1.0)
    (each,) = layer.get_trainable_chunk()
    each.grad = torch.full_like(each, 1e20)
    assert optimizer.step() is None and optimizer.skipped_steps == 1


def test_the_norm_of_millions_of_gradients_has_six_digits():
    """
    Breaks where fp32 adds up all squares of a shard in one go.
    Proves `norm_of`, `Portion.grad`.
    """
    layer = Zero3Layer(nn.Linear(3000, 3000))
    optimizer = Zero3Optimizer(layer, torch.optim.SGD, lr=0.0)
    (shard,) = layer.get_trainable_chunk()
    shard.grad = torch.randn(len(shard), generator=torch.Generator().manual_seed(0))
    assert optimizer.step() == pytest.approx(shard.grad.double().norm().item(), rel=1e-6)


def test_zero_grad_also_drops_what_no_sync_held_back():
    """
    Breaks where the next step begins with another's gradients.
    Proves `Zero3Optimizer.zero_grad`, `Zero3Layer.reduce`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    optimizer = Zero3Optimizer(layer)
    with optimizer.no_sync():
        optimizer.backward(layer(torch.ones(1, 2)).sum())
    optimizer.zero_grad()
    optimizer.backward(layer(torch.ones(1, 2)).sum())
    assert optimizer.step() == pytest.approx(6**0.5)


def test_zero_grad_forgets_that_a_loss_was_scaled():
    """
    A batch is dropped, and the next one goes through `loss.backward()`. Breaks where the step
    divides its gradients by the scale of the dropped one, which nobody would notice.
    Proves `Zero3Optimizer.zero_grad`, `Zero3Optimizer._check_ready`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    optimizer = Zero3Optimizer(layer, loss_scale=1024.0)
    optimizer.backward(layer(torch.ones(1, 2)).sum())
    optimizer.zero_grad()
    layer(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match=r"a loss times 1024.*which has no scale"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.backward(layer(torch.ones(1, 2)).sum())
    assert optimizer.step() == pytest.approx(6**0.5)


def test_a_scaled_loss_can_go_backward_twice():
    """
    Breaks where the options of `Tensor.backward` are dropped, as Accelerate passes them on.
    Proves `Zero3Optimizer.backward`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    optimizer = Zero3Optimizer(layer, loss_scale=1024.0)
    loss = layer(torch.ones(1, 2)).sum()
    optimizer.backward(loss, retain_graph=True)
    optimizer.backward(loss)
    assert optimizer.step() == pytest.approx(2 * 6**0.5)


@pytest.mark.parametrize("loss_scale, after", [(None, 1.0), (8.0, 8.0), ("dynamic", 131072.0)])
def test_only_a_dynamic_scale_grows(loss_scale, after):
    """
    After one good step with a window of one.
    Proves `Zero3Optimizer._step`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    optimizer = Zero3Optimizer(layer, loss_scale=loss_scale, scale_window=1)
    optimizer.backward(layer(torch.ones(1, 2)).sum())
    assert optimizer.step() == pytest.approx(6**0.5) and optimizer.loss_scale == after

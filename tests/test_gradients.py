"""
# Gradients and the step: right, or an error that says what to do

The oracle is plain PyTorch on the global batch. Where a mistake of a user cannot give the right
numbers, the test demands the error and the cure in it.
"""

import copy
import math
import os
import pickle
import tempfile
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save, wrap
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.estimate.predict import predict_optimizer
from zero3.gradients import clip_grad_norm_, norm_of
from zero3.guards.shard_gradients import GradientElsewhere, ShardGradient

WIDTH = 5


def mine(x):
    return x.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else x


def batch(step=0, rows=12, dtype=torch.double):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(step), dtype=dtype)


def plain_chain(dtype=torch.double):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def shard(plain, offload=None):
    return Zero3Sequential([Zero3Layer(layer, offload=offload) for layer in copy.deepcopy(plain)])


def difference(plain, model):
    """The largest difference of weights."""
    with model.full_params() as params:
        return max((params[n] - p).abs().max().item() for n, p in plain.named_parameters())


def message(call, *args, **kwargs):
    """What a call says that raises; empty, if it does not."""
    try:
        call(*args, **kwargs)
    except RuntimeError as error:
        return str(error)
    return ""


def tiers(folder):
    """Where shards and states rest, with a gradient in the shard, in CPU memory and in a file."""
    return {"device": (None, None), "cpu": (Offload("cpu"), Offload("cpu")),
            "shards in files": (Offload("nvme", folder), Offload("cpu")),
            "states in files": (None, Offload("nvme", folder)),
            "all in files": (Offload("nvme", folder), Offload("nvme", folder))}


# ------------------------------------------------------------------------------------------- clip


def clip_rightly():
    found = []
    for norm_type in (2.0, 1.0, math.inf):
        for kind in ("chain", "wrapped", "module", "layer"):
            plain = plain_chain()
            model = shard(plain)
            if kind == "wrapped":
                model = wrap(copy.deepcopy(plain), nn.Linear)
            elif kind == "layer":
                model = Zero3Layer(copy.deepcopy(plain))
            optimizers = [torch.optim.SGD(m.parameters(), 1.0) for m in (plain, model)]
            plain(batch()).square().mean().backward()
            model(mine(batch())).square().mean().backward()
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type)
            norm = (clip_grad_norm_(nn.ModuleList([model]), 0.05, norm_type) if kind == "module"
                    else model.clip_grad_norm_(0.05, norm_type))
            for optimizer in optimizers:
                optimizer.step()
            found.append((abs(norm / expected - 1).item(), difference(plain, model), norm.item()))
    return found


def test_the_models_own_clip_takes_the_norm_of_the_whole_gradient():
    """
    Norm and weights are those of plain PyTorch, in fp64, for three kinds of norm and four of
    models; and the norm has the same bits on all ranks. Breaks where a rank clips by its own
    shards.
    Proves I1, `clip_grad_norm_`, `Trained`, `Trained.clip_grad_norm_`.
    """
    ranks = run(clip_rightly, 2) + run(clip_rightly, 3)
    for rank in ranks:
        for off, worst, _ in rank:
            assert off < 1e-12 and worst < 1e-12
    assert ranks[0][0][2] == ranks[1][0][2] and ranks[2][0][2] == ranks[4][0][2]


def clip_wrongly():
    model = shard(plain_chain())
    model(mine(batch())).square().mean().backward()
    params = list(model.parameters())
    before = [p.grad.clone() for p in params]
    grad = params[0].grad
    wrong = [
        message(nn.utils.clip_grad_norm_, params, 1.0, foreach=foreach, norm_type=norm_type)
        for foreach in (None, True, False) for norm_type in (2.0, math.inf)]
    wrong += [message(nn.utils.get_total_norm, [p.grad for p in params])]
    wrong += [message(lambda call=call: call(grad)) for call in (
        torch.norm, torch.linalg.norm, torch.linalg.vector_norm, torch.Tensor.norm,
        lambda g: g.data.norm(2), lambda g: g.detach().norm(), lambda g: g.float().norm())]
    untouched = all(torch.equal(a, p.grad) for a, p in zip(before, params, strict=True))
    part = grad.as_subclass(torch.Tensor).norm().item()
    nn.utils.clip_grad_value_(params, 1e-3)
    clipped = max(p.grad.abs().max().item() for p in params)

    # Whatever else is done with a gradient.
    twin = copy.deepcopy(grad), pickle.loads(pickle.dumps(grad)), grad.clone()
    kinds = [type(t) for t in twin] + [type(grad), type(params[0].grad)]
    same = all(torch.equal(t, grad) for t in twin)
    params[0].grad.mul_(2).add_(1)
    kept = type(params[0].grad) is ShardGradient
    shares = grad.untyped_storage().data_ptr() == grad.as_subclass(torch.Tensor).data_ptr()
    torch.optim.SGD(params, 0.1).zero_grad(set_to_none=False)
    zero = not any(p.grad.any() for p in params)
    return wrong, untouched, part, clipped, kinds, same, kept and shares, zero


def test_torchs_clip_on_shards_is_an_error_that_names_the_cure():
    """
    Each of torch's ways to a norm raises, and leaves the gradients alone; what is elementwise goes
    on as ever, and a copy is a plain tensor. Breaks where the gradient of a shard is a plain
    tensor: ranks clipped by 0.7 and 1.3 in place of 1.5.
    Proves `ShardGradient`, `mark`.
    """
    for rank, found in enumerate(run(clip_wrongly, 2)):
        wrong, untouched, part, clipped, kinds, same, kept, zero = found
        for text in wrong:
            assert text.startswith(f"rank {rank}: layer 0 (Linear) cannot give a norm. Expected: ")
            assert "model.clip_grad_norm_" in text
        assert untouched and part > 0 and clipped <= 1e-3
        assert kinds == [torch.Tensor] * 3 + [ShardGradient] * 2
        assert same and kept and zero


def test_one_rank_alone_may_take_any_norm():
    """
    Its shards are the whole, so torch's clip is right and works.
    Proves `ShardGradient`.
    """
    plain = plain_chain()
    model = shard(plain)
    for m in (plain, model):
        m(batch()).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    for norm in (nn.utils.clip_grad_norm_(model.parameters(), math.inf),
                 nn.utils.clip_grad_norm_(model.parameters(), math.inf, foreach=True),
                 model.clip_grad_norm_(0.1)):
        assert norm.item() == pytest.approx(expected.item(), rel=1e-12)
    assert nn.utils.get_total_norm([p.grad for p in model.parameters()]) <= 0.1 * (1 + 1e-9)


def test_a_clip_that_cannot_be_right_is_refused():
    """
    Parameters outside of layers, scaled or held gradients, and those that rest elsewhere.
    Proves `clip_grad_norm_`, `GradientElsewhere`.
    """
    assert "wrap it first" in message(clip_grad_norm_, nn.Linear(2, 2), 1.0)
    model = shard(plain_chain())
    outside = nn.ModuleList([model, nn.Linear(2, 2)])
    assert "all trainable parameters in Zero3Layers" in message(clip_grad_norm_, outside, 1.0)
    assert "`norm_type`" in message(model.clip_grad_norm_, 1.0, 0.0)
    optimizer = Zero3Optimizer(model, loss_scale=8.0)
    assert "loss scale" in message(model.clip_grad_norm_, 1.0)
    optimizer = Zero3Optimizer(model)
    with optimizer.no_sync():
        optimizer.backward(model(batch()).mean())
    assert "held back" in message(model.clip_grad_norm_, 1.0)
    model = shard(plain_chain(torch.bfloat16))
    with tempfile.TemporaryDirectory() as folder:
        optimizer = Zero3Optimizer(model, offload=Offload("nvme", folder))
        optimizer.backward(model(batch(dtype=torch.bfloat16)).float().mean())
        assert "rests elsewhere" in message(model.clip_grad_norm_, 1.0)
        wrong = message(nn.utils.clip_grad_norm_, model.parameters(), 1.0)
        assert "layer 0 (Linear) has no gradient to read" in wrong and "clip_grad_norm=" in wrong
        elsewhere = model.get_trainable_chunk()[0].grad
        for copied in (copy.deepcopy, pickle.dumps):
            assert "has no gradient to read" in message(copied, elsewhere)


@pytest.mark.parametrize("offload", ["device", "cpu", "nvme"])
def test_the_parameters_of_the_optimizer_cannot_be_clipped(offload, tmp_path):
    """
    They have no gradients between steps, so torch's functions would clip nothing, and say nothing.
    Some loops clip them, Lightning Fabric's own for instance. Before the first step and after it.
    Proves `elsewhere`.
    """
    tier = Offload(offload, tmp_path) if offload == "nvme" else Offload(offload)
    model = shard(plain_chain(), tier)
    optimizer = Zero3Optimizer(model, lr=0.1, offload=tier)
    for step in range(2):
        optimizer.zero_grad()
        optimizer.backward(model(batch()).mean())
        params = [param for group in optimizer.param_groups for param in group["params"]]
        assert "clip_grad_norm=" in message(nn.utils.clip_grad_norm_, params, 1.0), step
        assert "clip_grad_norm=" in message(nn.utils.clip_grad_value_, params, 1.0), step
        optimizer.step()


def test_the_norm_of_a_long_gradient_is_right_to_fp32_and_copies_little():
    """
    Of a length that is no multiple of a block, in three data types and for two kinds of norm,
    against fp64; and no copy as long as the gradient is made.
    Proves `norm_of`.
    """
    values = torch.randn((1 << 21) + 77, generator=torch.Generator().manual_seed(0))
    longest = []
    plain_to = torch.ops.aten._to_copy.default

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func is plain_to:
                longest.append(result.numel())
            return result

    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        grad = values.to(dtype)
        exact = grad.to(torch.promote_types(dtype, torch.double))
        for norm_type in (2.0, math.inf):
            with Watch():
                norm = norm_of(grad, norm_type)
            expected = torch.linalg.vector_norm(exact, norm_type).item()
            # A block is added up in fp32.
            assert norm.item() == pytest.approx(expected, rel=1e-5)
            assert norm.dtype == torch.float32
    assert max(longest, default=0) <= 1 << 20
    assert norm_of(torch.ones(3)).item() == pytest.approx(3**0.5)


# ----------------------------------------------------------------------------------- GradScaler


def scale_with_torch():
    """An overflow that is in one rank's shard alone, and steps before and after it."""
    found = []
    for options in ({}, {"fused": True}, {"foreach": True}):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4, bias=False))
        model = shard(plain)
        optimizers = [torch.optim.SGD(m.parameters(), 0.1, **options) for m in (plain, model)]
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
        for step in range(4):
            x = torch.randn(4, 4, generator=torch.Generator().manual_seed(step))
            for m, optimizer, scaler, rows in zip((plain, model), optimizers, scalers,
                                                  (x, mine(x)), strict=True):
                optimizer.zero_grad()
                out = m(rows)
                # In the second step the gradient of the first row of weights is infinite: rank 0's.
                large = 3e38 if step == 1 else 1.0
                scaler.scale(out.square().mean() + out[:, 0].abs().mean() * large).backward()
                scaler.step(optimizer)
                scaler.update()
        found.append((difference(plain, model), scalers[0].get_scale(), scalers[1].get_scale()))
    return found


def test_torchs_grad_scaler_skips_a_step_on_all_ranks_or_on_none():
    """
    The weights after four steps, one of them skipped, and the scale are plain PyTorch's on the
    global batch. Breaks where the ranks do not agree on `found_inf`: one stepped, the other did
    not.
    Proves I1, I6, `ShardGradient`.
    """
    for rank in run(scale_with_torch, 2):
        for worst, expected, scale in rank:
            assert worst < 1e-6 and scale == expected == 4.0


def test_torchs_grad_scaler_and_ours_do_not_mix():
    """
    `Zero3Optimizer` has a scale of its own, and torch's scaler says so.
    Proves `Zero3Optimizer`.
    """
    model = shard(plain_chain(torch.float32))
    optimizer, scaler = Zero3Optimizer(model), torch.amp.GradScaler("cpu")
    scaler.scale(model(batch(dtype=torch.float32)).mean()).backward()
    assert "pass `loss_scale=\"dynamic\"`" in message(scaler.step, optimizer)


# ------------------------------------------------------------------------------------- zero_grad


def ways_to_zero():
    """Norms of four steps, for each tier and each way to drop the gradients."""
    found = {}
    ways = {
        "optimizer": lambda model, optimizer: optimizer.zero_grad(),
        "model": lambda model, optimizer: model.zero_grad(),
        "wrapped model": lambda model, optimizer: model.zero_grad(),
        "model to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
        "around": lambda model, optimizer: nn.ModuleList([model]).zero_grad(),
        "torch": lambda model, optimizer: torch.optim.SGD(model.parameters()).zero_grad(),
        "torch to zero": lambda model, optimizer: torch.optim.SGD(
            model.parameters(), foreach=True).zero_grad(set_to_none=False),
        "by hand": lambda model, optimizer: [setattr(p, "grad", None) for p in model.parameters()],
    }
    with tempfile.TemporaryDirectory() as folder:
        for tier in tiers(folder):
            for way, zero in ways.items():
                places = tiers(folder)[tier]
                model = shard(plain_chain(), places[0])
                if way == "wrapped model":
                    model = wrap(plain_chain(), nn.Linear, offload=places[0])
                optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, offload=places[1])
                norms = []
                for step in range(3):
                    optimizer.backward(model(mine(batch(step))).square().mean())
                    norms.append(optimizer.step())
                    zero(model, optimizer)
                    with optimizer.no_sync():
                        optimizer.backward(model(mine(batch(step))).square().mean())
                    (model if "model" in way else optimizer).zero_grad()
                found[tier, way] = norms
    return found


def test_every_way_to_drop_gradients_drops_them_wherever_they_rest():
    """
    On all tiers the norms of three steps are plain PyTorch's, for `zero_grad` of our optimizer, of
    the model, of a module around it and of an optimizer of torch's, to `None` and to zero, and for
    `p.grad = None`; also of what `no_sync` holds back. Breaks where the gradient's holder does not
    see what happened to the shard's `.grad`: norms of 1.30, 2.37, 3.03 in place of 1.30, 1.07,
    0.89.
    Proves I7, `GradientElsewhere`, `elsewhere`, `ShardStates.drop_grad`,
    `ShardStates.grad_norm`, `Trained.zero_grad`,
    `FlatParameter.drop_grad`.
    """
    plain = plain_chain()
    reference, expected = torch.optim.SGD(plain.parameters(), 0.1), []
    for step in range(3):
        reference.zero_grad()
        plain(batch(step)).square().mean().backward()
        expected.append(nn.utils.clip_grad_norm_(plain.parameters(), math.inf).item())
        reference.step()
    for rank in run(ways_to_zero, 2):
        for case, norms in rank.items():
            assert norms == pytest.approx(expected, rel=1e-6), case


def regularised(places):
    plain = plain_chain()
    model = shard(plain, places[0])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, offload=places[1])
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    for step in range(2):
        for m, rows in ((plain, batch(step)), (model, mine(batch(step)))):
            out = m(rows).square().mean()
            decay = 0.1 * sum(p.square().sum() for p in m.parameters())
            if m is plain:
                (out + decay).backward()
            else:
                optimizer.backward(out)
                # In a pass of its own, onto a gradient that rests with its master.
                optimizer.backward(decay)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    # What somebody puts there is the gradient.
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    ones = sum(states.read_grad().sum().item() for states in optimizer.shard_states)
    return difference(plain, model), ones, sum(len(p) for p in model.parameters())


def regularised_all():
    with tempfile.TemporaryDirectory() as folder:
        return [regularised(tiers(folder)[tier]) for tier in ("device", "states in files")]


def test_a_gradient_that_somebody_brings_to_a_shard_is_not_lost():
    """
    That of a regulariser over `model.parameters()`, and one that is assigned; where it rests
    elsewhere it was dropped without a word. The weights are plain PyTorch's.
    Proves `ShardStates.add_grad`, `ShardStates.read_grad`.
    """
    for rank in run(regularised_all, 2):
        for worst, ones, numel in rank:
            assert worst < 1e-12 and ones == numel


# ----------------------------------------------------------------------------------------- unused


class Heads(nn.Module):
    """Two heads and a trunk in one layer, of which each step uses one head."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.a, self.b = nn.Linear(WIDTH, 4), nn.Linear(4, 3), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.double()

    def forward(self, x, step):
        head = self.b if step % 3 == 1 else self.a
        return head(self.trunk(x).tanh()) * self.scale


OPTIMIZERS = {
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    "AdamW": (torch.optim.AdamW, {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.1}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.5}),
}


def alternate(places, name, folder, group_by=None):
    """Six steps of alternate heads, taken up from a checkpoint and a state dict in between."""
    cls, options = OPTIMIZERS[name]
    plain = Heads()
    reference = cls(plain.parameters(), **options)

    def build():
        model = Zero3Layer(Heads(), offload=places[0])
        return model, Zero3Optimizer(model, cls, offload=places[1], clip_grad_norm=0.5,
                                     group_by=group_by, **options)

    model, optimizer = build()
    for step in range(6):
        plain(batch(step), step).square().mean().backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.backward(model(mine(batch(step)), step).square().mean())
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
        if step == 2:
            save(folder, model, optimizer, step=step)
            model, optimizer = build()
            load(folder, model, optimizer)
        elif step == 4:
            told = optimizer.state_dict()
            model, optimizer = build()
            optimizer.load_state_dict(told)
    counts = {name: reference.state[p].get("step") for name, p in plain.named_parameters()}
    (states,) = optimizer.shard_states
    for _, where, piece, _ in states.pieces:
        for slot, span in [(param.slot, param.span) for param in states.params]:
            if span.start < span.stop and where.start <= span.start < where.stop:
                got = optimizer.state[piece].get("step")
                assert got == counts[slot.names[0]], (slot.names, got, counts)
    return difference(plain, model)


def alternate_all():
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        for i, (tier, name) in enumerate(product(tiers(scratch), OPTIMIZERS)):
            # All on two ranks; on three, each tier and each optimizer.
            if dist.get_world_size() == 2 or i % 3 == i // 3 % 3:
                found[tier, name] = alternate(tiers(scratch)[tier], name, dist_folder())
        found["predicted"] = predicted_after_a_cut()
        found["groups"] = alternate((None, None), "AdamW", dist_folder(), lambda n, p: {
            "weight_decay": 0.1 if p.ndim > 1 else 0.0} if n != "x" else {}) * 0
    return found


def predicted_after_a_cut():
    """How far the bytes at rest are from the formula, after a cut."""
    model = Zero3Sequential([Zero3Layer(Heads())])
    optimizer = Zero3Optimizer(model)
    for step in range(2):
        optimizer.backward(model(mine(batch(step)), step=0).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    # The other head, for the first time: its moments are born.
    optimizer.backward(model(mine(batch()), step=1).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return abs(held_bytes(model, optimizer) - predict_optimizer(optimizer).rest_bytes)


def dist_folder():
    """A folder that all ranks know."""
    name = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(name)
    return name[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_parameters_without_a_gradient_stay_as_they_are(world_size):
    """
    Two heads in alternate steps, with momentum, weight decay, and counted steps, on all tiers, over
    a checkpoint and a state dict: weights and counts are plain PyTorch's. Breaks where an unused
    parameter is stepped with a zero gradient (off by 4.9e-3), or shares its count with a used one.
    Proves I1, I8, `Zero3Optimizer._unused`, `Zero3Optimizer._squares`, `Zero3Optimizer.regroup`,
    `ShardStates.split_by_use`, `ShardStates.repartition`,
    `predict_optimizer`, `Entries.describe`, `Piece`, `_states_of`, `mark`.
    """
    for rank in run(alternate_all, world_size):
        for case, worst in rank.items():
            assert worst < 1e-12, case


def used_on_one_rank():
    """Rank 0 uses one head and rank 1 the other; then both use the same."""
    plain, model = Heads(), Zero3Layer(Heads())
    options = OPTIMIZERS["AdamW"][1]
    reference = torch.optim.AdamW(plain.parameters(), **options)
    optimizer = Zero3Optimizer(model, torch.optim.AdamW, **options)
    rank = dist.get_rank()
    sent, held = [], []
    for step in range(2):
        rows = batch(step).chunk(2)
        losses = [plain(rows[r], 0 if step else r).square().mean() for r in range(2)]
        loss = model(rows[rank], 0 if step else rank).square().mean()
        (sum(losses) / 2).backward()
        with Ledger(model, optimizer) as tape:
            optimizer.backward(loss)
            optimizer.step()
        sent.append([e.sent_bytes for e in tape.events if e.event == "norm"])
        held.append(held_bytes(model, optimizer))
        reference.step()
        reference.zero_grad()
        optimizer.zero_grad()
    return difference(plain, model), sent, held


def test_a_parameter_is_used_if_any_rank_uses_it_and_says_so_in_few_bytes():
    """
    The ranks use different heads, and both are stepped. A step in which nothing is missing sends 8
    bytes for the shard; one in which something is, 8 more for each parameter; a cut adds a count of
    steps, 4 bytes, and no copy of a moment.
    Proves I1, I4, `Zero3Optimizer._unused`, `ShardStates.split_by_use`, `Piece`.
    """
    ranks = run(used_on_one_rank, 2)
    for worst, sent, _ in ranks:
        assert worst < 1e-12
        assert sent == [[8, 7 * 8], [8, 7 * 8]]
    # Rank 0 has nothing of the unused head; on rank 1 it lies at the end.
    assert [held[1] - held[0] for *_, held in ranks] == [0, 4]


# ------------------------------------------------------------------------------ writes to shards


def clip_weights(places, dtype):
    model = shard(plain_chain(dtype), places[0])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=1e-6, offload=places[1])
    shards = model.get_trainable_chunk()
    worst = []
    for way in (lambda p: p.data.clamp_(-0.01, 0.01),
                lambda p: setattr(p, "data", p.detach().clamp(-0.01, 0.01)),
                lambda p: torch._foreach_clamp_max_([p.data], 0.01)):
        with model.full_params(writeback=True) as params, torch.no_grad():
            for p in params.values():
                p.fill_(0.5)
        for step in range(2):
            # After a step of its own master and shard are the same.
            for p in shards if step else ():
                way(p)
            optimizer.backward(model(mine(batch(dtype=dtype))).double().mean())
            optimizer.step()
            optimizer.zero_grad()
        worst.append(max(p.detach().abs().max().item() for p in shards))
    return worst


def clip_weights_all():
    with tempfile.TemporaryDirectory() as folder:
        return [clip_weights((None, states), dtype) for dtype in (torch.bfloat16, torch.float32)
                for states in (None, Offload("nvme", folder))]


def test_what_is_written_through_data_comes_into_the_master():
    """
    Weights that are clipped by `p.data.clamp_()`, or by `p.data = ...`, stay clipped over the next
    step, on each tier and data type. Breaks where torch does not count the write: the step rounded
    the old master over it.
    Proves `CountedShard`, `ShardStates.in_memory`.
    """
    for rank in run(clip_weights_all, 2):
        for worst in rank:
            assert max(worst) < 0.0102


def test_a_step_on_the_cpu_takes_the_cores_that_an_accelerator_leaves_idle(monkeypatch):
    """
    Shared between the ranks of the machine; not while the layers compute there too, nor against
    somebody's own choice.
    Proves `Zero3Optimizer.step`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    optimizer = Zero3Optimizer(layer, lr=0.1)
    monkeypatch.setattr(optimizer, "_step", torch.get_num_threads)

    def step_threads(at, device, threads, ranks):
        optimizer.device = at
        layer.device = device
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        torch.set_num_threads(threads)
        found = optimizer.step()
        assert torch.get_num_threads() == threads
        return found

    before = torch.get_num_threads()
    cpu, gpu, cores = torch.device("cpu"), torch.device("cuda", 0), len(os.sched_getaffinity(0))
    try:
        assert step_threads(cpu, gpu, 1, 1) == cores
        assert step_threads(cpu, gpu, 1, 2) == max(1, cores // 2)
        assert step_threads(cpu, gpu, 1, 10 * cores) == 1
        assert step_threads(cpu, gpu, 3, 1) == 3
        assert step_threads(cpu, cpu, 1, 1) == step_threads(gpu, gpu, 1, 1) == 1
    finally:
        torch.set_num_threads(before)


# ------------------------------------------------------------------------------- arguments, closure


def test_a_closure_is_evaluated_with_gradients_and_its_loss_comes_back():
    """
    As in torch's optimizers. Hooks hear of one step.
    Proves `Zero3Optimizer.step`.
    """
    plain = plain_chain()
    model = shard(plain)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    heard = []
    optimizer.register_step_post_hook(lambda *_: heard.append(1))

    def closure(m, each, backward):
        def evaluate():
            each.zero_grad()
            loss = m(batch()).square().mean()
            backward(loss)
            return loss
        return evaluate

    for _ in range(2):
        expected = reference.step(closure(plain, reference, torch.Tensor.backward))
        with torch.no_grad():
            loss = optimizer.step(closure(model, optimizer, optimizer.backward))
        assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert difference(plain, model) < 1e-12 and len(heard) == 2


def test_what_an_optimizer_cannot_use_is_refused_with_the_cure():
    """
    A loss that is none, a size that is none, a parameter that would not be stepped, a data type
    that has no imaginary part.
    Proves `Zero3Optimizer.backward`, `Zero3Optimizer.add_param_group`, `Zero3Optimizer`, `finite`.
    """
    model = shard(plain_chain())
    optimizer = Zero3Optimizer(model)
    assert "scalar outputs" in message(optimizer.backward, model(batch()))
    assert "does not require grad" in message(optimizer.backward, torch.ones(()))
    with torch.no_grad():
        assert "does not require grad" in message(optimizer.backward, model(batch()).mean())
    extra = {"params": [nn.Parameter(torch.ones(2))]}
    assert "an optimizer of their own" in message(optimizer.add_param_group, extra)
    for wrong in (-1, math.nan, math.inf, "4", None):
        assert "`bucket_bytes`" in message(Zero3Optimizer, model, bucket_bytes=wrong)
    model = Zero3Layer(nn.Linear(2, 2).to(torch.complex64))
    wrong = message(Zero3Optimizer, model, reduce_dtype=torch.float32)
    assert "Linear cannot use `reduce_dtype`" in wrong and "imaginary" in wrong


def complex_parameters():
    torch.manual_seed(0)
    plain = nn.Linear(4, 4).to(torch.complex64)
    model = Zero3Layer(copy.deepcopy(plain))
    adam = {"lr": 0.1, "eps": 1e-3}
    reference = torch.optim.AdamW(plain.parameters(), **adam)
    optimizer = Zero3Optimizer(model, torch.optim.AdamW, **adam)
    for step in range(3):
        x = torch.randn(4, 4, dtype=torch.complex64, generator=torch.Generator().manual_seed(step))
        plain(x).abs().square().mean().backward()
        optimizer.backward(model(mine(x)).abs().square().mean())
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    return difference(plain, model)


def conjugated_buffer():
    """A conjugated buffer with this rank's number, after wrapping"""
    module = nn.Linear(2, 2)
    module.register_buffer("waves", torch.full((2,), complex(1, 1 + dist.get_rank())).conj())
    return Zero3Layer(module).module.waves.resolve_conj()


def test_a_conjugated_buffer_gets_the_values_of_the_first_rank():
    """
    torch sets a bit and conjugates when it reads. Breaks if bytes are taken from such a tensor,
    which torch refuses, or if the other ranks receive them in a copy.
    Proves `Communicator.broadcast`, `bytes_of`.
    """
    for waves in run(conjugated_buffer, 2):
        assert waves.tolist() == [1 - 1j] * 2


def test_complex_parameters_are_stepped_as_plain_pytorch_steps_them():
    """
    With the arguments that are left out. Breaks where `fused=True` is added, which torch refuses.
    Proves I1, `Zero3Optimizer`.
    """
    assert max(run(complex_parameters, 2)) < 1e-5


# --------------------------------------------------------------------------------- dropped, let go


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("planted")


def fails_while_a_bucket_is_on_its_way():
    plain = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()
    torch.manual_seed(1)
    for p in plain.parameters():
        nn.init.normal_(p)
    model = shard(plain)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, bucket_bytes=1)
    x, found = mine(batch()), []
    with pytest.raises(ValueError):
        hidden = x
        for i, layer in enumerate(model.walk()):
            hidden = layer(Fails.apply(hidden) if i == 2 else hidden)
        optimizer.backward(hidden.square().mean())
    found.append(model.module_list[0].reducer.transfer is None)
    found.append(not model.module_list[0].reducer.layers)
    groups = [g for m in model.module_list for g in m.flats]
    found.append(not any(g.grad is not None or g.full.untyped_storage().nbytes() for g in groups))
    found += [g.shard.grad is not None for g in groups]
    optimizer.zero_grad()
    reference = torch.optim.SGD(plain.parameters(), 0.1)
    plain(batch()).square().mean().backward()
    optimizer.backward(model(x).square().mean())
    for each in (reference, optimizer):
        each.step()
    return found, difference(plain, model)


def test_a_reduce_that_has_begun_ends_when_backward_fails():
    """
    Each layer is a bucket of its own, and backward raises below one that is being sent: the message
    is waited for and its gradient is there, nothing stays in flight or in memory, and the next step
    is right. Breaks where the bucket is dropped without the end of its reduce.
    Proves I2, I6, `Bucket.drop`.
    """
    for found, worst in run(fails_while_a_bucket_is_on_its_way, 2):
        assert found == [True, True, True, False, False, True, True] and worst < 1e-12


def test_states_that_an_optimizer_has_from_the_start_go_to_their_files():
    """
    Adagrad makes its sums when it is built. They rest in files like all others, with the values
    that they were given, and no piece keeps elements in memory. Breaks where the optimizer does not
    let go of the pieces at the start.
    Proves I8, `Portion.in_memory`.
    """
    weights = []
    with tempfile.TemporaryDirectory() as folder:
        for offload in (None, Offload("nvme", folder)):
            model = shard(plain_chain())
            optimizer = Zero3Optimizer(model, torch.optim.Adagrad, lr=0.1, offload=offload,
                                       initial_accumulator_value=0.5)
            if offload:
                pieces = [piece.param for piece in optimizer.pieces]
                assert [len(piece) for piece in pieces] == [0] * len(pieces)
                assert [len(optimizer.state[p]["sum"]) for p in pieces] == [0] * len(pieces)
            with torch.no_grad() if offload else nullcontext(), torch.enable_grad():
                optimizer.backward(model(batch()).square().mean())
            optimizer.step()
            with model.full_params() as params:
                weights.append([p.clone() for p in params.values()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert isinstance(model.get_trainable_chunk()[0].grad, GradientElsewhere | None)

"""
# The strategy of the page on loops, with the real Fabric on two ranks

The oracle is a loop of plain PyTorch on one process, with the whole batch.
"""

import gc
import importlib.util
import shutil
import tempfile
import weakref

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.beside.loops import (
    FABRIC,
    Torchrun,
    off,
    plain_pytorch,
    refused,
    replaced,
    run_programs,
    saved,
)
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap

NAME = "lightning.fabric" if importlib.util.find_spec("lightning") else "lightning_fabric"
fabric = pytest.importorskip(NAME, reason="the extra `tests` has it")

LAST = 'model.save("model")\n'
ALONE = ("batch_size=4", "batch_size=8")
# A program that is interrupted after the first epoch.
HALF = ('range(progress["epoch"], 2)', 'range(progress["epoch"], 1)')


def text_of(folder, *pairs):
    """The program, from known values, with an `eps` that does not magnify last bits"""
    return replaced(FABRIC.replace('"state"', f'"{folder}"'),
                    (LAST, LAST.replace("model\")", f"{folder}-model\")")),
                    ("from lightning_fabric import", f"from {NAME} import"),
                    ("plain = nn", "torch.manual_seed(0)\nplain = nn"),
                    ("lr=1e-2)", "lr=1e-2, eps=1e-3)"), *pairs)


def on_two_ranks(ports, folder):
    """The program, whole, interrupted and resumed, and the parts"""
    ranks = Torchrun(ports, folder)
    found = {"epoch": ranks.main(text_of("whole"))["progress"]["epoch"]}
    ranks.main(text_of("again", HALF))
    if ranks.rank == 0:
        shutil.copytree(folder / "again", folder / "fewer")
    found["resumed"] = ranks.main(text_of("again"))["progress"]["epoch"]
    with ranks.place():
        found |= parts(folder)
    return found


def on_one_rank(ports, folder):
    """The program, resumed on one rank"""
    Torchrun(ports, folder).main(text_of("fewer", ALONE))


def made(precision=None, strategy=None):
    """A Fabric on two ranks"""
    from zero3.beside.fabric import Zero3Strategy

    strategy = strategy or Zero3Strategy()
    found = fabric.Fabric(accelerator="cpu", devices=2, strategy=strategy, precision=precision)
    found.launch()
    return found


def small(**kwargs):
    torch.manual_seed(1)
    model = wrap(nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)), nn.Sequential)
    return model, Zero3Optimizer(model, lr=0.1, **kwargs)


def holds_gradients(model):
    """Whether full gradients wait for a later micro-batch"""
    return any(flat.grad is not None for layer in model.sharded_layers for flat in layer.flats)


def parts(folder):
    """Each call alone"""
    ours = made()
    x = torch.ones(2, 4)
    found = {"plain": type(ours.setup(nn.Linear(4, 1))._forward_module)}
    found["DDP"] = refused(lambda: made(strategy="ddp").setup(small()[0]))
    sharded, zero3 = small()
    model, optimizer = ours.setup(sharded, zero3)
    found["same"] = model._forward_module is sharded
    for enabled in (True, False):
        with ours.no_backward_sync(model, enabled):
            ours.backward(model(x).sum())
        found["held", enabled] = holds_gradients(sharded)
    found["value"] = refused(lambda: ours.clip_gradients(model, optimizer, clip_val=0.25))
    ours.backward(model(x * torch.inf).sum())
    found["norm"] = refused(lambda: ours.clip_gradients(model, optimizer, max_norm=1.0))
    optimizer.zero_grad()
    found["three"] = three_weights(ours)
    *found["torch"], alive = with_torchs_optimizer(ours, folder)
    gc.collect()
    found["freed"] = alive() is None
    found["alone"] = refused(lambda: ours.save(folder / "alone", {"optimizer": optimizer}))
    second = torch.optim.SGD(sharded.get_trainable_chunk()[:1])
    found["second"] = refused(lambda: ours.save(folder / "alone", {
        "model": model, "optimizer": optimizer, "second": second}))
    found["torch's alone"] = refused(lambda: ours.save(folder / "alone", {"second": second}))
    found["raw"] = refused(lambda: ours.load_raw(folder / "whole/rest.ckpt", model))
    found["offloaded"] = offloaded(ours)
    one = Zero3Sequential([Zero3Layer(nn.Linear(2, 2), rank=0, world_size=1)])
    found["one rank"] = refused(lambda: ours.setup(one))
    found["mixed"] = refused(lambda: made(precision="bf16-mixed").setup(*small()))
    in_bf16 = made(precision="bf16-true")
    found["converted"] = refused(lambda: in_bf16.setup(*small()))
    model = in_bf16.setup(wrap(nn.Sequential(nn.Linear(4, 4)).bfloat16(), nn.Linear))
    with model.full_params() as params:
        found["bf16"] = {each.dtype for each in params.values()}
    return found


def offloaded(ours):
    """Whether a model in files trains: nobody moves its shards"""
    with tempfile.TemporaryDirectory() as folder:
        nvme = Offload("nvme", folder)
        model = wrap(nn.Sequential(nn.Linear(4, 4)), nn.Linear, offload=nvme)
        model, optimizer = ours.setup(model, Zero3Optimizer(model, lr=0.1, offload=nvme))
        before, after = (weights_after(model, optimizer, ours) for _ in range(2))
    return bool((before != after).any())


def weights_after(model, optimizer, ours):
    """The weights after another step"""
    ours.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    with model.module.full_params() as params:
        return torch.cat([p.detach().flatten().clone() for p in params.values()])


def three_weights(ours):
    """The norms of the shards of (3, 0, 4), and the one that clips"""
    model = Zero3Sequential([Zero3Layer(nn.Linear(3, 1, bias=False))])
    model, optimizer = ours.setup(model, torch.optim.SGD(model.parameters(), 0.1))
    ours.backward(model(torch.tensor([[3.0, 0.0, 4.0]])).sum())
    (shard,) = model.parameters()
    mine = shard.grad.as_subclass(torch.Tensor).norm().item()
    return mine, ours.clip_gradients(model, optimizer, max_norm=1.0).item()


def with_torchs_optimizer(ours, folder):
    """Momentum of torch's own optimizer on shards, saved and loaded: whether a step is repeated"""
    sharded, _ = small()
    model, optimizer = ours.setup(sharded, torch.optim.SGD(sharded.parameters(), 0.1, 0.9))
    state = {"model": model, "optimizer": optimizer}
    weights = []
    for each in range(3):
        if each == 1:
            ours.save(folder / "torch", state)
        if each == 2:
            ours.load(folder / "torch", state)
        weights.append(weights_after(model, optimizer, ours))
    return (bool((weights[0] != weights[1]).any()), torch.equal(weights[1], weights[2]),
            weakref.ref(sharded))


@pytest.fixture(scope="module")
def ours(folder):
    found = run_programs(4, on_two_ranks, 2, folder)
    run_programs(1, on_one_rank, 1, folder)
    return found


def test_the_program_trains_like_plain_pytorch(folder, ours):
    """
    Twenty steps with accumulation and clipping on two ranks: the weights to 1e-6, because sums over
    ranks have another order. Breaks if gradients are summed, or clipped by the norm of a shard.
    Proves I1, `Zero3Strategy`, `Zero3Strategy.clip_gradients_norm`,
    `Zero3Strategy.setup_optimizer`.
    """
    expected, _ = plain_pytorch(decay=1)
    found = saved(folder / "whole-model")
    assert found.keys() == expected.keys()
    assert max((found[name] - p).abs().max().item() for name, p in expected.items()) < 1e-6


def test_a_resumed_run_is_the_uninterrupted_one(folder, ours):
    """
    From the second epoch: the same bits on two ranks, and 1e-6 on one rank with twice the batch.
    Breaks if the states of rank 0 are loaded on all ranks.
    Proves I1, `Zero3Strategy.save_checkpoint`, `Zero3Strategy.load_checkpoint`, `optimizer_of`.
    """
    assert off(folder, "again-model", "whole-model") == 0
    assert off(folder, "fewer-model", "whole-model") < 1e-6
    for found in ours:
        assert found["epoch"] == found["resumed"] == 2
        assert found["torch"] == [True, True]


def test_each_call_is_right_alone(ours):
    """
    A plain model goes into DDP, a sharded one stays what it is. Full gradients wait while
    `no_backward_sync` is on, and the norm is that of both ranks. Shards in CPU memory stay there. A
    model that is not used any more is freed.
    Proves `Zero3Strategy.setup_module`, `Zero3Strategy.module_to_device`,
    `Zero3Strategy.no_backward_sync`.
    """
    for rank, found in enumerate(ours):
        assert found["plain"] is DistributedDataParallel and found["same"] and found["freed"]
        assert (found["held", True], found["held", False]) == (True, False)
        # As in the head of the chapter.
        assert found["three"] == (4.0 if rank else 3.0, 5.0)
        assert found["bf16"] == {torch.bfloat16}
        assert found["offloaded"]


def test_what_cannot_be_right_is_an_error(ours):
    """
    Each says what to do. Breaks if Fabric does something else in silence.
    Proves `Zero3Strategy.setup_module`, `look_at_wrapper`, `elsewhere`, `check_rest`,
    `pairs.trains`.
    """
    for name, cure in {
            "DDP": "Zero3Strategy", "one rank": "before `wrap`", "mixed": "model.bfloat16()",
            "converted": "before `wrap`",
            "value": "clip_grad_norm=", "norm": "error_if_nonfinite=False",
            "alone": "pass both", "second": "group_by=", "torch's alone": "pass both",
            "raw": "zero3.load"}.items():
        for found in ours:
            assert cure in found[name], (name, found[name])

"""
# The `Accelerator` of the page on loops, with the real library on two ranks

The oracle is a loop of plain PyTorch on one process, with the whole batch.
"""

import math
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.beside.loops import (
    ACCELERATE,
    PAGE,
    Torchrun,
    off,
    plain_pytorch,
    refused,
    replaced,
    run_programs,
)
from tests.ranks import run
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap

pytest.importorskip("accelerate", minversion="1.15", reason="the extra `tests` has it")

LOOP = "for epoch in range(2):\n"
LAST = "accelerator.save_model(model, \"model\")\n"
RESUMED = ((LOOP, "accelerator.load_state(\"state-0\")\nfor epoch in range(1, 2):\n"),
           ("f\"state-{epoch}\"", "\"other\""))


def text_of(*pairs):
    """The program, from known values, with an `eps` that does not magnify last bits"""
    return replaced(ACCELERATE, ("plain = nn", "torch.manual_seed(0)\nplain = nn"),
                    ("lr=1e-2)", "lr=1e-2, eps=1e-3)"), *pairs)


def on_two_ranks(ports, folder):
    """The program, resumed, and the parts"""
    ranks = Torchrun(ports, folder)
    found = {"told": ranks.main(text_of())["told"]}
    ranks.main(text_of(*RESUMED, (LAST, LAST.replace('"model"', '"again"'))))
    with ranks.place():
        found |= parts(folder)
    with ranks.place():
        found["fp16"] = refused(lambda: made(mixed_precision="fp16"))
    with ranks.place():
        accelerator = made(mixed_precision="bf16")
        found["bf16"] = refused(lambda: accelerator.prepare(small()))
        model = accelerator.prepare(wrap(plain().bfloat16(), nn.Sequential))
        found["in bf16"] = model(torch.ones(2, 4).bfloat16()).dtype
    with ranks.place():
        found["compile"] = refused(lambda: made(dynamo_backend="eager"))
    return found


def on_one_rank(ports, folder):
    """The program, resumed on one rank"""
    Torchrun(ports, folder).main(text_of(*RESUMED, (LAST, LAST.replace('"model"', '"fewer"'))))


def made(**kwargs):
    from zero3.beside.accelerate import Accelerator
    return Accelerator(cpu=True, **kwargs)


def plain():
    torch.manual_seed(1)
    return nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.BatchNorm1d(4), nn.Linear(4, 4))


def small(**kwargs):
    return wrap(plain(), nn.Sequential, **kwargs)


def holds_gradients(model):
    """Whether full gradients wait for a later micro-batch"""
    return any(flat.grad is not None for layer in model.sharded_layers for flat in layer.flats)


def parts(folder):
    """Each call alone"""
    from accelerate.utils import GradientAccumulationPlugin

    accelerator = made(gradient_accumulation_steps=2)
    x = torch.ones(2, 4)
    found = {}
    # Two models in one call, of which one is not sharded.
    model, optimizer, other = accelerator.prepare(
        model := small(), Zero3Optimizer(model, lr=0.1), nn.Linear(4, 1))
    found["kinds"] = type(model).__name__, type(optimizer).__name__, type(other).__name__
    found["unwrapped"] = accelerator.unwrap_model(model) is model
    # The first of two micro-batches.
    for each in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            found["held", each] = holds_gradients(model)
            optimizer.step()
    model.zero_grad()
    found["part"] = clipping_a_part(accelerator, model, x)
    whole = accelerator.get_state_dict(model)
    accelerator.save_model(model, folder / "small")
    with model.full_params() as params:
        found["dict"] = ({*whole} == {*plain().state_dict()}, all(
            torch.equal(whole[name], p) for name, p in params.items() if whole), len(whole))
    # Gradients are reduced each time, if somebody says so.
    accelerator.gradient_state.plugin_kwargs |= GradientAccumulationPlugin(
        num_steps=2, sync_each_batch=True).to_kwargs()
    for each in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(x).sum())
            found["each", each] = holds_gradients(model)
    model.zero_grad()
    accelerator.free_memory()
    found["three"] = three_weights(made())
    found["tied"] = tied(made())
    found["twice"] = twice(made())
    found |= scaled(made(), x)
    found |= lonely(made(), folder, x)
    return found


def three_weights(accelerator):
    """The norms of the shards of (3, 0, 4), and the one that clips"""
    model = accelerator.prepare(Zero3Sequential([Zero3Layer(nn.Linear(3, 1, bias=False))]))
    accelerator.backward(model(torch.tensor([[3.0, 0.0, 4.0]])).sum())
    (shard,) = model.get_trainable_chunk()
    mine = shard.grad.as_subclass(torch.Tensor).norm().item()
    return mine, accelerator.clip_grad_norm_(model.parameters(), 1.0).item()


def tied(accelerator):
    """The weights of two layers that share one"""
    layers = [nn.Sequential(nn.Linear(4, 4)) for _ in range(2)]
    layers[1][0].weight = layers[0][0].weight
    model = accelerator.prepare(wrap(nn.Sequential(*layers), nn.Sequential))
    whole = accelerator.get_state_dict(model)
    return whole and (whole["0.0.weight"] is whole["1.0.weight"], len(whole))


def twice(accelerator):
    """The names of a model that has a layer with buffers under two names, and of the plain one"""
    layer = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    plain = nn.Sequential(layer, nn.Tanh(), layer)
    names = [*plain.state_dict()]
    whole = accelerator.get_state_dict(accelerator.prepare(wrap(plain, nn.Sequential)))
    return not whole or {*whole} == {*names}


def clipping_a_part(accelerator, model, x):
    """Of the parameters of one layer alone: torch's own function sees them"""
    accelerator.backward(model(x).sum())
    some = model.get_trainable_chunk()[:1]
    said = refused(lambda: accelerator.clip_grad_norm_(some, 1.0))
    model.zero_grad()
    return said


def scaled(accelerator, x):
    """A loss scale, and a step that is skipped; gradients that rest elsewhere"""
    found = {}
    model = small()
    optimizer = Zero3Optimizer(model, lr=0.1, loss_scale="dynamic", clip_grad_norm=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    rates = []
    for factor in (1e35, 1.0):
        accelerator.backward(model(x).sum() * factor)
        found["clip"] = accelerator.clip_grad_norm_(model.parameters(), 1.0)
        found["unknown"] = accelerator.clip_grad_norm_(model.parameters(), math.inf)
        found["other clip"] = refused(
            lambda: accelerator.clip_grad_norm_(model.parameters(), 2.0))
        found["value"] = refused(lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append((optimizer.step_was_skipped, accelerator.optimizer_step_was_skipped,
                      scheduler.get_last_lr()[0]))
    found["rates"] = rates
    second = small()
    accelerator.prepare(second, Zero3Optimizer(second, lr=0.1, loss_scale=8.0))
    found["whose"] = refused(lambda: accelerator.backward(second(x).sum()))
    accelerator.free_memory()
    away = Offload("cpu")
    model = small(offload=away)
    model, _ = accelerator.prepare(
        model, Zero3Optimizer(model, lr=0.1, offload=away, clip_grad_norm=1.0))
    accelerator.backward(model(x).sum())
    found["away"] = accelerator.clip_grad_norm_(model.parameters(), 1.0)
    accelerator.free_memory()
    return found


def lonely(accelerator, folder, x):
    """An optimizer alone, a model that is not on all ranks, and an optimizer of torch's"""
    found = {}
    optimizer = accelerator.prepare(Zero3Optimizer(small(), lr=0.1))
    found["alone"] = refused(lambda: accelerator.save_state(folder / "alone"))
    accelerator.free_memory(optimizer)
    one = Zero3Sequential([Zero3Layer(nn.Linear(2, 2), rank=0, world_size=1)])
    found["one rank"] = refused(lambda: accelerator.prepare(one))
    model = small()
    accelerator.prepare(model, *(torch.optim.SGD([shard]) for shard in model.get_trainable_chunk()))
    found["two"] = refused(lambda: accelerator.save_state(folder / "two"))
    accelerator.free_memory()
    model = small()
    optimizer = torch.optim.AdamW(model.get_trainable_chunk(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    weights = []
    for each in range(3):
        if each == 1:
            accelerator.save_state(folder / "torch")
        if each == 2:
            accelerator.load_state(folder / "torch")
        accelerator.backward(model(x * (1 + (each > 0))).square().sum())
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        with model.full_params() as params:
            weights.append(torch.cat([p.detach().flatten().clone() for p in params.values()]))
    found["torch"] = bool((weights[0] != weights[1]).any()), torch.equal(weights[1], weights[2])
    alive = weakref.ref(model)
    model, optimizer, params = accelerator.free_memory(model, optimizer, params)
    found["freed"] = alive() is None
    return found


@pytest.fixture(scope="module")
def ours(folder):
    found = run_programs(6, on_two_ranks, 2, folder)
    run_programs(1, on_one_rank, 1, folder)
    return found


def test_the_program_trains_like_plain_pytorch(folder, ours):
    """
    Twenty steps with accumulation, clipping and a scheduler on two ranks: the weights to 1e-6,
    because sums over ranks have another order, and the bytes that are guessed right. Breaks if DDP
    broadcasts shards, gradients are summed, or each rank clips by its own norm.
    Proves I1, `Accelerator`, `Accelerator.prepare_model`, `Accelerator.clip_grad_norm_`,
    `Accelerator.backward`, `Accelerator.no_sync`, `Accelerator.get_state_dict`, `Prepared.step`.
    """
    params, right = plain_pytorch()
    saved = load_file(folder / "model/model.safetensors")
    assert saved.keys() == params.keys()
    assert max((saved[name] - p).abs().max().item() for name, p in params.items()) < 1e-6
    assert "".join(found["told"] for found in ours) == f"{right} of 160 bytes are right\n"


def test_a_loaded_state_goes_on_as_if_nothing_had_happened(folder, ours):
    """
    After the first of two epochs: the same bits on two ranks, 1e-6 on one. Breaks if rank 0's
    optimizer states are all that is saved.
    Proves `Accelerator.save_state`, `Accelerator.load_state`, `Accelerator.prepare_optimizer`,
    `optimizer_of`.
    """
    assert off(folder, "again", "model") == 0
    assert off(folder, "fewer", "model") < 1e-6
    for found in ours:
        assert found["torch"] == (True, True)


def test_each_call_is_right_alone(folder, ours):
    """
    DDP around the plain model and nothing around the sharded one; full gradients are held back,
    unless each micro-batch is reduced; all weights and buffers are on the first rank. A model that
    was saved can be freed.
    Proves `Accelerator.prepare_model`, `Accelerator.no_sync`, `Accelerator.get_state_dict`.
    """
    for rank, found in enumerate(ours):
        assert found["kinds"] == ("Zero3Model", "Prepared", "DistributedDataParallel")
        assert found["unwrapped"] and found["freed"] and found["twice"]
        assert (found["held", 0], found["held", 1]) == (True, False)
        assert (found["each", 0], found["each", 1]) == (False, False)
        assert found["dict"] == (rank == 0, True, 0 if rank else 9)
        assert found["tied"] == ({} if rank else (True, 4))
        # As in the head of the chapter.
        assert found["three"] == (4.0 if rank else 3.0, 5.0)
    assert load_file(folder / "small/model.safetensors").keys() == plain().state_dict().keys()


def test_the_optimizer_scales_clips_and_skips(ours):
    """
    With a loss scale, or gradients in CPU memory, the step clips, and the call returns nothing. A
    scheduler does not advance in a step that was skipped: with two ranks it does so twice in the
    other one, as accelerate has it.
    Proves `Prepared`, `Accelerator.backward`, `Accelerator.clip_grad_norm_`.
    """
    for found in ours:
        assert found["clip"] is found["unknown"] is found["away"] is None
        assert found["rates"] == [(True, True, 0.1), (False, False, 0.025)]


def test_mixed_precision_takes_a_model_in_bf16(ours):
    """
    It computes in bf16, without autocast. Breaks if the output comes back in fp32.
    Proves `Accelerator.prepare_model`.
    """
    for found in ours:
        assert found["in bf16"] == torch.bfloat16


def test_what_cannot_be_right_is_an_error(ours):
    """
    Each says what to do. Breaks if a plain `Accelerator` does something else in silence.
    Proves `Accelerator.__init__`, `Accelerator.clip_grad_value_`, `pairs.check`,
    `check_rest`, `trains`.
    """
    for name, cure in {
            "fp16": "loss_scale", "bf16": "model.bfloat16()", "compile": "zero3.compile",
            "part": "model.clip_grad_norm_", "other clip": "clip_grad_norm=2.0",
            "value": "clip by the norm", "whose": "optimizer.optimizer.backward",
            "alone": "pass both to `prepare`", "two": "no other one steps",
            "one rank": "before `wrap`"}.items():
        for found in ours:
            assert cure in found[name], (name, found[name])


def under_autocast():
    """The matrices that autograd keeps of a model under autocast, as it computes"""
    torch.manual_seed(0)
    model = wrap(nn.Sequential(*(nn.Sequential(nn.Linear(8, 8)) for _ in range(3))), nn.Sequential)
    kept = []

    def keep(tensor):
        kept.append((tensor.dtype, *tensor.shape))
        return tensor

    with (torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
          torch.autocast("cpu", torch.bfloat16)):
        model(torch.ones(2, 8, requires_grad=True)).float().sum()
    return kept.count((torch.bfloat16, 8, 8)), {*kept}


def test_autocast_keeps_a_copy_of_each_weight():
    """
    On both ranks all three matrices, 2 bytes for each element: what no sharding divides. So the
    `Accelerator` refuses a model in fp32 with `mixed_precision="bf16"`.
    """
    for count, kept in run(under_autocast, 2):
        assert count == 3, kept


def test_the_table_links_to_lines_that_say_so():
    """
    Each link into accelerate, by the version that is pinned. Breaks if another version is installed
    and nobody has read it.
    """
    import inspect
    import re
    from pathlib import Path

    import accelerate

    said = {1674: "_prepare_fsdp2", 2450: "ds_initialize",
            1167: "set_requires_gradient_sync(False)", 1175: "zero_stage < 2", 779: "mp_policy",
            1427: "bf16"}
    links = re.findall(r"accelerate/blob/v([\d.]+)/src/accelerate/([\w/.]+)#L(\d+)", PAGE)
    assert {int(line) for _, _, line in links} == {*said}
    home = Path(inspect.getfile(accelerate)).parent
    for version, file, line in links:
        assert version == accelerate.__version__
        assert said[int(line)] in (home / file).read_text().splitlines()[int(line) - 1], line

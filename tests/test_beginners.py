"""
# Mistakes of beginners: each is made right, or is an error or a warning that says what to do
"""

import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.pipeline import Pipeline

# What gives the shards other memory, and what it does to the values of plain PyTorch's model.
MOVES = {
    "to": lambda model: model.to("cpu:0"),
    "half": lambda model: model.half().float(),
    "data": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "ema": lambda model: [setattr(p, "data", 0.5 * p.data) for p in model.parameters()],
}


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(rank):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))


def trained(model, optimizer, x, move):
    for step in range(3):
        if step == 1:
            move(model)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def moves(name):
    """The largest difference to plain PyTorch, and how far a weight has gone"""
    move = MOVES[name]
    expected = plain()
    both = torch.cat([batch(rank) for rank in range(2)])
    trained(expected, torch.optim.AdamW(expected.parameters(), lr=0.1), both, move)
    found = []
    for make in (lambda: Zero3Sequential([Zero3Layer(layer) for layer in plain()]),
                 lambda: wrap(plain(), nn.Linear)):
        model = make()
        trained(model, Zero3Optimizer(model, lr=0.1), batch(dist.get_rank()), move)
        with model.full_params() as params:
            pairs = [(p, params[name]) for name, p in expected.named_parameters()]
            found.append(max(float((a - b).abs().max()) for a, b in pairs))
    gone = max(float((a - b).abs().max()) for a, b in
               zip(expected.parameters(), plain().parameters(), strict=True))
    return max(found), gone


@pytest.mark.parametrize("name", MOVES)
def test_a_model_that_gets_other_memory_goes_on_training(name):
    """
    `to("cpu:0")` copies, and so does a conversion there and back. The optimizer has a view of the
    old memory, and would step that: no weight of the model would ever move again. Rounded or
    changed values are taken over, as plain PyTorch does. Breaks without the comparison of addresses
    in `_follow_shard`.
    Proves I1, `ShardStates._follow_shard`.
    """
    for difference, gone in run(moves, 2, name):
        assert difference < 1e-6 < 0.1 < gone


def unscaled():
    model = Zero3Sequential([Zero3Layer(layer) for layer in plain()])
    optimizer = Zero3Optimizer(model, lr=0.1, loss_scale="dynamic")
    x = batch(0)
    model(x).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"call `optimizer.backward\(loss\)`"):
        optimizer.step()
    optimizer.zero_grad()
    # Without a gradient there is nothing to scale.
    optimizer.step()
    optimizer.backward(model(x).square().mean())
    return optimizer.step() is not None


def test_a_loss_that_was_not_scaled_is_not_divided_by_the_scale():
    """
    `loss.backward()` with a dynamic loss scale would make every gradient 65,536 times too small.
    Proves `Zero3Optimizer.backward`, `Zero3Optimizer._check_ready`.
    """
    assert run(unscaled, 2) == [True, True]


def test_ranks_that_have_not_met_do_not_train_alone():
    """
    torchrun says that there are two ranks, and nobody has called `init_process_group`.
    Proves `all_ranks`.
    """
    with mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "2"}):
        with pytest.raises(RuntimeError, match=r"alone\. Expected: a process group of 2 ranks"):
            Zero3Layer(nn.Linear(2, 2))
    Zero3Layer(nn.Linear(2, 2))


def test_a_write_that_is_lost_is_said():
    """
    Inside `full_params()` without `writeback=True` the shards do not change.
    Proves `Sharded.full_params`, `Sharded._warn_of_writes`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="`weight` inside `full_params\\(\\)` is lost"):
        with layer.full_params() as params, torch.no_grad():
            params["weight"].zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with layer.full_params() as params:
            layer(torch.ones(1, 2)).sum().backward()
            assert params["weight"].abs().max() > 0
        with layer.full_params(writeback=True) as params, torch.no_grad():
            params["weight"].zero_()
        with layer.full_params() as params:
            assert params["weight"].abs().max() == 0


def evaluates():
    """A pipeline that is evaluated in inference mode, and then trained"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shard"))
    model = Pipeline([*plain()], mesh, loss_fn=nn.functional.mse_loss, micro_batches=2)
    optimizer = Zero3Optimizer(model, lr=0.1)
    x, y = torch.ones(4, 4), torch.zeros(4, 3)
    losses = []
    for _ in range(2):
        losses.append(model.train_batch(x, y, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            losses.append(model.eval_batch(x, y))
            losses.append(model.eval_batch(x, y))
    return losses


def test_a_pipeline_trains_after_an_evaluation_in_inference_mode():
    """
    A tensor that is asked for ahead of time may be used in the next batch, and a tensor that was
    made in inference mode can never be trained with.
    Proves `Channels`.
    """
    losses, others = run(evaluates, 2)
    first, once, twice, *_ = losses
    assert others == losses and once == twice != first

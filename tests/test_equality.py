"""
# Thirty steps of the main job's model, made small (I1)
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run
from zero3 import Zero3Layer, Zero3Sequential
from zero3.train.gpt import GPTConfig, global_batch, gpt_layers, load_bytes, next_byte_loss

STEPS, ROWS = 30, 12  # rows of the global batch: 1, 2, 3 and 4 ranks divide them
# Bytes in a row, and sizes of the model: small, because the claim is about steps.
WINDOW, CONFIG = 16, GPTConfig(d_model=64, n_layers=2, d_ff=128)


def train(kind, lr=3e-3, eps=1e-8):
    """Losses of every step, as means over ranks, and the final weights."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = gpt_layers(CONFIG)
    if kind == "sharded":
        model = Zero3Sequential([Zero3Layer(layer) for layer in layers])
    else:
        model = nn.Sequential(*layers)
    trained = DistributedDataParallel(model) if kind == "ddp" else model
    optimizer = torch.optim.AdamW(trained.parameters(), lr, eps=eps)
    data, losses = load_bytes(), []
    for step in range(STEPS):
        batch = global_batch(data, step, ROWS, WINDOW)
        rows = batch.chunk(1 if kind == "plain" else world_size)
        loss = next_byte_loss(trained, rows[0 if kind == "plain" else rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if kind != "plain":
        dist.all_reduce(losses)
        losses /= world_size
    if kind != "sharded":
        return losses, {name: p.detach() for name, p in model.named_parameters()}
    with model.full_params() as params:
        return losses, {name: p.detach().clone() for name, p in params.items()}


def sharded_and(kind):
    return train("sharded"), train(kind)


def test_two_ranks_train_bit_for_bit_like_ddp():
    """
    Every loss and every final weight is equal: both scale the gradients by a half, which is exact,
    and there is one order to add two numbers in. Breaks where the mean is taken elsewhere.
    Proves I1, `Zero3Layer._post_backward_hook`, `Reducer`, `Reducer.finish`, `Reducer.arrived`.
    """
    for (losses, weights), (ddp_losses, ddp_weights) in run(sharded_and, 2, "ddp"):
        assert torch.equal(losses, ddp_losses) and losses[-1] < losses[0] - 1
        assert weights.keys() == ddp_weights.keys()
        assert all(torch.equal(w, ddp_weights[name]) for name, w in weights.items())


@pytest.fixture(scope="module")
def one_process():
    """What plain PyTorch gives on the global batch, once."""
    # At Adam's usual epsilon the scale of a gradient cancels, and a sum would pass for a mean.
    return run(train, 1, "plain", 3e-3, 1e-3)[0]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_any_number_of_ranks_trains_like_one_process_on_the_global_batch(world_size, one_process):
    """
    On one rank bit for bit. On more, the mean over the batch is a mean of means, added in another
    order: a gradient differs in its last bits, about 1e-7 of its size, and so do weights and
    losses. A sum in place of the mean moves the losses by 0.1 and a parameter by 0.4 of its size.
    Proves I1, `Zero3Layer._post_backward_hook`, `Communicator.total`, `global_batch`.
    """
    losses, weights = run(train, world_size, "sharded", 3e-3, 1e-3)[0]
    expected, plain = one_process
    bound = 0 if world_size == 1 else 1e-5
    assert (losses - expected).abs().max() <= bound and losses[-1] < losses[0] - 1
    for name, weight in weights.items():
        assert (weight - plain[name]).norm() <= bound * plain[name].norm()

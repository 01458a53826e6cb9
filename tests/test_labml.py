"""
# Code written for labml's zero3 runs with the import changed
"""

import copy

import torch
import torch.distributed as dist
from torch import nn

import zero3.train.gpt  # noqa: F401  (defines what labml_nn's modules miss)
from tests.ranks import run
from zero3 import Zero3Layer, Zero3Sequential


def pattern():
    from labml_nn.optimizers.adam import Adam

    rank, world_size = dist.get_rank(), dist.get_world_size()
    device, dtype = torch.device("cpu"), torch.float32
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 9), nn.Tanh()), nn.Linear(9, 9), nn.Linear(9, 2)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    model = Zero3Sequential([Zero3Layer(m, rank, world_size, device, dtype) for m in layers])
    adam = Adam(model.get_trainable_chunk(), lr=1e-2, eps=1e-3)
    reference = Adam(plain.parameters(), lr=1e-2, eps=1e-3)
    for step in range(20):
        x = torch.randn(2 * world_size, 5, generator=torch.Generator().manual_seed(step))
        model(x[2 * rank : 2 * rank + 2]).square().mean().backward()
        adam.step()
        adam.zero_grad()
        plain(x).square().mean().backward()
        reference.step()
        reference.zero_grad()
    with model.full_params() as params:
        return max((params[name] - p).abs().max().item() for name, p in plain.named_parameters())


def test_labmls_own_pattern_and_its_adam_train_like_plain_pytorch():
    """
    Positional arguments, `get_trainable_chunk()`, and an optimizer that writes through `.data`.
    Proves I1, `Zero3Layer.__init__`, `Zero3Layer._settle_at_end_of_backward`,
    `ShardedModel.get_trainable_chunk`.
    """
    for world_size in (1, 2, 3):
        assert max(run(pattern, world_size)) < 1e-5

r"""
# Pairs: the optimizer that steps a sharded model

Other libraries hand over models and optimizers in lists of their own. `optimizer_of` finds those
that belong together:

$$\text{parameters of the optimizer} \cap \text{shards of the model} \ne \emptyset$$

**Run this**: `python -m pytest tests/beside`.

**Not covered, and what that costs**: two optimizers on one model. The first one is taken.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from zero3.guards.options import expect
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.sharded import ShardedModel


def optimizer_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
                 ) -> torch.optim.Optimizer | None:
    """
    ## The optimizer of a sharded model, if it is one of these
    """
    shards = {*model.get_trainable_chunk()} if isinstance(model, ShardedModel) else set()
    for optimizer in optimizers:
        # Its parameters are its masters, which may be other tensors than the shards.
        if isinstance(optimizer, Zero3Optimizer) and optimizer.model is model:
            return optimizer
        if not shards.isdisjoint(p for group in optimizer.param_groups for p in group["params"]):
            return optimizer
    return None


def check(good: bool, what: str, expected: object, got: object, cure: str) -> None:
    """
    ## Raise `RuntimeError`, with the number of this rank, unless this is good
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    expect(good, f"rank {rank}: {what}", expected, got, cure, RuntimeError)

r"""
# Pairs: the optimizer that steps a sharded model

Other libraries hand over models and optimizers in lists of their own. `optimizer_of` finds those
that belong together:

$$\text{parameters of the optimizer} \cap \text{shards of the model} \ne \emptyset$$

**Run this**: `python -m pytest tests/beside`.

**Not covered, and what that costs**: two optimizers on one model train it, and cannot be saved.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn

from zero3.guards.checks import expect
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.sharded import ShardedModel


def optimizer_of(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]
                 ) -> torch.optim.Optimizer | None:
    """
    ## The optimizer of a sharded model, if it is one of these
    """
    return next((each for each in optimizers
                 if isinstance(model, ShardedModel) and trains(each, model)), None)


def trains(optimizer: torch.optim.Optimizer, model: ShardedModel) -> bool:
    """
    ## Whether an optimizer steps shards of this model
    """
    shards = {*model.get_trainable_chunk()}
    # The parameters of a `Zero3Optimizer` are its masters, which may be other tensors.
    return getattr(optimizer, "model", None) is model or not shards.isdisjoint(
        p for group in optimizer.param_groups for p in group["params"])


def check_rest(who: str, rest: Iterable[torch.optim.Optimizer], models: Iterable[ShardedModel],
               cure: str) -> None:
    """
    ## Refuse to save or load an optimizer of shards without its model

    * `rest` are the optimizers in no pair: all ranks would load the states of rank 0
    """
    lost = [type(each).__name__ for each in rest if isinstance(each, Zero3Optimizer)
            or any(trains(each, model) for model in models)]
    check(not lost, f"{who} cannot save or load an optimizer alone", "with each optimizer its "
          "model, which no other one steps", lost,
          f"{cure}; in place of several take one `Zero3Optimizer`, with `group_by=`")


def check(good: bool,
          what: str,
          expected: object,
          got: object,
          cure: str) -> None:
    """
    ## Raise `RuntimeError`, with the number of this rank, unless this is good
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    expect(good, f"rank {rank}: {what}", expected, got, cure, RuntimeError)

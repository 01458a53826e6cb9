"""
# Sharded training gives the numbers of plain PyTorch (I1), and leaves nothing behind (I2)
"""

import pytest
import torch

from tests.cases import CASES, train_both
from tests.ranks import run

# float32 parameters in a float64 model.
TOLERANCE = {"DataTypes": 1e-5}


def at_rest(model):
    """No full parameter, no full gradient, and shards of the length that the formula gives."""
    for layer in (m for m in model.modules() if hasattr(m, "flats")):
        assert not layer.is_fetched and not layer.watch.entered and not layer.reducer.unsettled
        for g in layer.flats:
            numel = sum(slot.view.numel() for slot in g.slots)
            assert len(g.shard) == -(-numel // layer.comm.world_size)
            assert g.full.untyped_storage().nbytes() == 0 and g.grad is None and not g.ready
            padding = max(0, min(len(g.shard), (layer.comm.rank + 1) * len(g.shard) - numel))
            for tensor in (g.shard, g.shard.grad):
                if tensor is not None and padding:
                    assert torch.equal(tensor[-padding:], torch.zeros_like(tensor[-padding:]))


def worker(name):
    return train_both(name, check=at_rest)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_sharded_model_trains_like_a_plain_one_on_the_global_batch(name, world_size):
    """
    Weights after each step agree with plain PyTorch, and after every backward and every step only
    shards are left, with zeros for padding. Breaks with a sum for the mean in
    `_post_backward_hook`, or with any line of `_settle` left out.
    Proves I1, I2, I5, I7, `Zero3Layer`, `Zero3Layer._post_backward_hook`, `Zero3Layer.settle`,
    `at_end_of_backward`, `Watch._announces`.
    """
    assert max(run(worker, world_size, name)) <= TOLERANCE.get(name, 1e-10)

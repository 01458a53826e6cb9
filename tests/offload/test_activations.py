"""
# Activations that rest elsewhere: the same bits, less memory, and each byte moved once
"""

import contextlib
import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests import cases, wholes
from tests.ranks import run
from zero3 import Offload, Zero3Layer, Zero3Sequential, wrap
from zero3.estimate.ledger import Ledger
from zero3.in_flight import in_flight
from zero3.offload.activations import Activations, order
from zero3.offload.shelves import Shelves

WIDTH, ROWS = 64, 32
# Bytes of an activation, two whole blocks of a disk.
ONE = WIDTH * ROWS * 4


def to_files(folder, **options):
    """All activations, however small, with requests of one block"""
    files = Offload("nvme", folder, block_bytes=4096)
    return Activations(files, **{"below_bytes": 0, **options})


class Block(nn.Module):
    """Saves its input, the output of tanh twice as one storage, and nothing else of this size"""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def chain(activations=None, layers=5, make=Block):
    torch.manual_seed(0)
    return Zero3Sequential([Zero3Layer(make(), activations=activations) for _ in range(layers)])


def batch(seed=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def grads(model):
    return [shard.grad.clone() for shard in model.get_trainable_chunk()]


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def moved(tape, event):
    return [(e.layer.split()[1], e.bytes) for e in tape.events if e.event == event]


# -------------------------------------------------------------------------------------- same bits


def all_cases(folder):
    """Every chain of `cases.py`: whether the shards and their gradients have the same bits"""
    found = {}
    for name in cases.CASES:
        seen = {}
        for where in (None, to_files(folder)):
            values = seen.setdefault(where is None, [])

            def look(model, values=values):
                for shard in model.parameters():
                    values.append(shard.detach().clone())
                    if shard.grad is not None:
                        values.append(shard.grad.clone())
            off = cases.train_both(name, check=look, activations=where)
        found[name] = (equal(seen[True], seen[False]), off)
    return found, len(order.visits), len(order.known)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_chain_has_the_same_bits_with_its_activations_in_files(world_size, tmp_path):
    """
    Layers called twice, checkpointed inside and outside, frozen, changed in place, with several
    outputs, two graphs at once. Breaks if a storage is read before it is written, taken for another
    one, or given back too early.
    Proves I1, I8, `Activations`, `Saving`, `Forward.pack`, `Handle.unpack`, `activations.unpack`.
    """
    for found, visits, known in run(all_cases, world_size, str(tmp_path)):
        assert {name for name, (same, _) in found.items() if not same} == set()
        assert all(off < 1e-6 for _, off in found.values())
        # Nothing is left behind.
        assert visits == known == 0


def all_wholes(folder, micro):
    found = {}
    for name in wholes.WHOLES:
        seen = {}
        for where in (None, to_files(folder)):
            values = seen.setdefault(where is None, [])

            def look(model, values=values):
                for shard in model.parameters():
                    values.append(shard.detach().clone())
                    if shard.grad is not None:
                        values.append(shard.grad.clone())
            torch.manual_seed(0)
            wholes.train_both(name, check=look, micro=micro, twice=micro > 1, activations=where)
        found[name] = equal(seen[True], seen[False])
    gc.collect()
    return found, len(order.visits), len(order.known)


@pytest.mark.parametrize("world_size, micro", [(1, 1), (2, 2), (3, 1)])
def test_every_whole_model_has_the_same_bits_with_its_activations_in_files(world_size, micro,
                                                                           tmp_path):
    """
    GPT-2 and Llama of transformers, encoders with decoders, branches, mixtures, recomputation; with
    two micro-batches, each twice backward through its graph.
    Proves I1, I8, `wrap`, `Order.begin`, `Order.enter`, `Visit.rest`.
    """
    for found, visits, known in run(all_wholes, world_size, str(tmp_path), micro):
        assert {name for name, same in found.items() if not same} == set()
        assert visits == known == 0

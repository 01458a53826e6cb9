"""
# DCP on shards: what torch writes is what we have, and the other way round

The oracle is torch itself: `get_state_dict`, `dcp.save`, `dcp.load` and `set_state_dict`, with
FSDP2 on several ranks and with plain PyTorch on one.
"""

import itertools
import math
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tests.ranks import run
from zero3 import Offload, Zero3Optimizer, wrap
from zero3.beside.dcp import DcpCheckpoint, boxes, load, save

ROWS = 6  # of a global batch: splits over 1, 2 and 3 ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A tied matrix, one of three dimensions, a frozen one in a block, and buffers"""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        # Its module comes first, and is used last.
        self.last = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.first = nn.Linear(6, 6, bias=False)
        self.first.weight = self.last.weight
        self.mix = nn.Parameter(torch.randn(2, 3, 6))
        self.blocks[0].down.weight.requires_grad_(False)
        self.register_buffer("shift", torch.randn(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        x = self.first(x) + self.shift.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.last(x + self.mix.sum((0, 1)))


def decay(name, p):
    return {"weight_decay": 0.1 if p.ndim > 1 else 0.0}


def batch(step, dtype=torch.float32):
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(model, optimizer, steps, dtype=torch.float32):
    for step in steps:
        rows = batch(step, dtype).chunk(dist.get_world_size())[dist.get_rank()]
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# -------------------------------------------------------------------------------------------- torch


def of_torch(seed, sharded):
    """The model and its optimizer, whose groups are in another order, with the frozen one"""
    model = Net(seed)
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == wide],
               "weight_decay": 0.1 * wide} for wide in (False, True)]
    return model, torch.optim.AdamW(groups, lr=0.01, eps=1e-3, foreach=False)


def state_of(model, *optimizers):
    return dict(zip(("model", "optim"), get_state_dict(model, optimizers), strict=True))


def values(model, *optimizers):
    """All that torch has, whole, by DCP's keys"""
    state = state_of(model, *optimizers)
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for name, known in state["optim"]["state"].items():
        found |= {f"optim.state.{name}.{key}": value for key, value in known.items()}
    for group in state["optim"]["param_groups"]:
        options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad")}
        found |= {f"optim.of.{name}": options for name in group["params"]}
    whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value
             for key, value in found.items()}
    # Training changes them in place.
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in whole.items()}


def torch_saves(folder, sharded, steps=3):
    model, optimizer = of_torch(0, sharded)
    train(model, optimizer, range(steps))
    dcp.save({**state_of(model, optimizer), "step": steps}, checkpoint_id=folder)
    before = values(model, optimizer)
    train(model, optimizer, [steps])
    return before, values(model, optimizer)


def torch_loads(folder, sharded, steps=3):
    """As DCP's documentation has it; all that was loaded, and all after one more step"""
    model, optimizer = of_torch(1, sharded)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, [optimizer], model_state_dict=state["model"],
                   optim_state_dict=state["optim"])
    before = values(model, optimizer)
    train(model, optimizer, [steps])
    return before, values(model, optimizer)


# -------------------------------------------------------------------------------------------- zero3


def ours(seed, tier="device", folder=None, dtype=torch.float32, layers=(Block,), **options):
    offload = Offload(tier, folder) if tier == "nvme" else Offload(tier)
    model = wrap(Net(seed).to(dtype), layers, offload=offload)
    options = {"lr": 0.01, "eps": 1e-3, "group_by": decay, "offload": offload, **options}
    return model, Zero3Optimizer(model, torch.optim.AdamW, fused=False, foreach=False, **options)


def we_save(folder, *args):
    model, optimizer = ours(0, *args)
    dtype = model.sharded_layers[0].flats[0].shard.dtype
    train(model, optimizer, range(3), dtype)
    save(folder, model, optimizer, extra={"step": 3})
    train(model, optimizer, [3], dtype)
    save(f"{folder}-next", model, optimizer)


def we_load(source, folder, *args):
    model, optimizer = ours(1, *args)
    load(source, model, optimizer)
    save(folder, model, optimizer)
    train(model, optimizer, [3])
    save(f"{folder}-next", model, optimizer)


def equal(one, other):
    """Whether two are the same to the bit; else what differs"""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [key for key, value in one.items()
            if not (torch.equal(value, other[key]) if torch.is_tensor(value)
                    else value == other[key])]


def close(one, other):
    return max((value - other[key]).abs().max().item() for key, value in one.items()
               if torch.is_tensor(value))


def in_plain_pytorch(folder):
    return run(torch_loads, 1, folder, False)[0]


@pytest.mark.parametrize("ranks, then", [(1, 2), (2, 2), (2, 3), (3, 1), (3, 2)])
def test_we_go_on_from_a_folder_of_fsdp2(tmp_path, ranks, then):
    """
    Its masters, moments, counts, options and buffers, to the bit, on any number of ranks; and one
    more step on as many ranks is torch's, to the bit where two ranks add. Breaks where a box lies
    elsewhere, a group's options are another's, or a tied weight is looked for under the other name.
    Proves `beside.dcp.load`, `DcpCheckpoint`, `DcpCheckpoint.read`, `DcpCheckpoint.find`,
    `DcpFolder`, `_Into`, `_Objects`, `load_from`.
    """
    before, after = run(torch_saves, ranks, tmp_path / "torch", True)[0]
    run(we_load, then, tmp_path / "torch", tmp_path / "ours")
    assert equal(in_plain_pytorch(tmp_path / "ours")[0], before) == []
    there = in_plain_pytorch(tmp_path / "ours-next")[0]
    if ranks == then == 2:
        assert equal(there, after) == []
    assert close(there, after) < 1e-6


def test_we_go_on_from_a_folder_of_plain_pytorch(tmp_path):
    """
    One process has written each tensor as a whole, and two ranks read their boxes.
    """
    before, after = run(torch_saves, 1, tmp_path / "torch", False)[0]
    run(we_load, 2, tmp_path / "torch", tmp_path / "ours")
    assert equal(in_plain_pytorch(tmp_path / "ours")[0], before) == []
    assert close(in_plain_pytorch(tmp_path / "ours-next")[0], after) < 1e-6


@pytest.mark.parametrize("ranks, then, tier, layers", [
    (1, 2, "device", (Block,)), (2, 2, "nvme", (Block,)), (2, 3, "cpu", (Block, nn.Linear)),
    (3, 2, "device", (nn.ModuleList,)),
])
def test_fsdp2_goes_on_from_a_folder_of_ours(tmp_path, ranks, then, tier, layers):
    """
    As torch's documentation has it, from any tier, and one more step is ours. Breaks where a key is
    called otherwise, an option is missing, or a tied weight has its states under the other name.
    Proves `beside.dcp.save`, `_Boxes`, `dcp_state`, `Entries.names`, `Listing`.
    """
    run(we_save, ranks, tmp_path / "ours", tier, tmp_path, torch.float32, layers)
    there = in_plain_pytorch(tmp_path / "ours")
    before, after = run(torch_loads, then, tmp_path / "ours", True)[0]
    assert equal(before, there[0]) == []
    next_ = in_plain_pytorch(tmp_path / "ours-next")[0]
    if ranks == then == 2:
        assert equal(after, next_) == []
    assert close(after, next_) < 1e-6
    # It is what plain PyTorch has after the same steps.
    expected, _ = run(torch_saves, ranks, tmp_path / "torch", True)[0]
    if ranks == 2:
        assert equal(there[0], expected) == []
    assert close(there[0], expected) < 1e-6
    state = {"step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert state == {"step": 3}

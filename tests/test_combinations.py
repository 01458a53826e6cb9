"""
# Chapters together

The table of `zero3/__init__.py` says which chapters combine. Each "yes" trains, and each "no" is an
error. The oracle is plain PyTorch on the global batch.
"""

import re

import pytest
import torch
import torch.distributed as dist
from labml_nn.transformers.feed_forward import FeedForward
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zero3
from tests.comm.test_links import Same
from tests.ranks import run
from zero3 import Links, Offload, Zero3Optimizer, compile, wrap
from zero3.comm.parts import part_of
from zero3.compression import Prune, Quantize, compress
from zero3.estimate.ledger import Ledger
from zero3.inject import inject, policies
from zero3.offload.activations import Activations
from zero3.pipeline import Pipeline

WIDTH = 8
ROWS = 4  # of each rank's part of the batch
RULES = {"*.layer1|*.layer2": [Prune(0.5), Quantize(8)]}
POLICIES = {"tensor_parallel": lambda mesh: policies.tensor_parallel(mesh["tensor"]),
            "policies": lambda mesh: policies.swiglu()}
# What changes a plain model before it is sharded.
CHANGES = {*POLICIES, "compress"}


def table():
    """The cells of the table: "yes", or "no" and some words of the error, by their chapters"""
    text = zero3.__doc__.partition("**Which chapters combine.**")[2]
    head, _, *rows = [[cell.strip(" `") for cell in line.strip("|").split("|")]
                      for line in re.findall(r"(?m)^\|.*$", text)]
    return {(row[0], name): cell for row in rows
            for name, cell in zip(head[1:], row[1:], strict=True) if cell}


TABLE = table()


def layers():
    torch.manual_seed(0)
    return [FeedForward(WIDTH, 12, 0.0, nn.SiLU(), is_gated=True) for _ in range(4)]


def batch(step, rows):
    made = torch.Generator().manual_seed(step)
    return (torch.randn(rows, WIDTH, generator=made), torch.randn(rows, WIDTH, generator=made))


def train(model, forward, make, rows, part=slice(None)):
    """Two steps"""
    optimizer = make(model)
    for step in range(2):
        x, y = (t[part] for t in batch(step, rows))
        forward(model, x, y, optimizer)
        optimizer.step()
        optimizer.zero_grad()


def plainly(model, x, y, optimizer):
    F.mse_loss(model(x), y).backward()


def in_stages(model, x, y, optimizer):
    model.train_batch(x, y, optimizer)


def expected(names, rows):
    """The weights of plain PyTorch on the global batch"""
    plain = nn.Sequential(*layers())
    if "compress" in names:
        compress(plain, RULES)
    train(plain, plainly, lambda m: torch.optim.SGD(m.parameters(), lr=0.5), rows)
    return {name: p.detach() for name, p in plain.named_parameters()}


def built(names, folder, mesh):
    """
    The model of these chapters, injected and compressed in the order of the names
    """
    plain = nn.Sequential(*layers())
    for name in names:
        if name == "compress":
            compress(plain, RULES)
        elif name in CHANGES:
            # With two of them, both in one call.
            inject(plain, [make(mesh) for policy, make in POLICIES.items() if policy in names])
            if "compress" not in names:
                break
    over = mesh["shard"]
    if "Links" in names:
        # Pruned elements are counted before they are encoded.
        over = Links(over, gradients=Same(), weights=None if "compress" in names else Same())
    options = {}
    if "Offload" in names:
        options["offload"] = Offload("nvme", folder, direct=False)
    if "activations=" in names:
        options["activations"] = Activations(Offload("nvme", folder), below_bytes=0)
    if "Pipeline" in names:
        chain = compile(plain, FeedForward) if "compile" in names else plain
        lines = over if "Links" in names else init_device_mesh(
            "cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
        return Pipeline([*chain], lines, loss_fn=F.mse_loss, micro_batches=2, **options)
    if "compile" in names:
        return compile(plain, FeedForward, mesh=over, backend="aot_eager", **options)
    return wrap(plain, FeedForward, mesh=over, **options)


def test_the_table_has_all_pairs_of_chapters():
    """
    Eight chapters, and each pair of them once.
    """
    chapters = {name for names in TABLE for name in names}
    assert len(chapters) == 8 and len({frozenset(names) for names in TABLE}) == 28


def together(names, folder):
    """How far the weights are from those of plain PyTorch after two steps, or the error."""
    size, rank = dist.get_world_size(), dist.get_rank()
    shards = 2
    mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("tensor", "shard"))
    part = slice(ROWS * (rank % shards), ROWS * (rank % shards + 1))
    forward = in_stages if "Pipeline" in names else plainly
    try:
        model = built(names, folder, mesh)
        with Ledger(model) as tape:
            train(model, forward, lambda m: Zero3Optimizer(m, torch.optim.SGD, lr=0.5,
                  offload="cpu" if "Offload" in names else None), shards * ROWS, part)
    except (RuntimeError, TypeError, ValueError) as error:
        torch.compiler.reset()
        return str(error)
    torch.compiler.reset()
    assert (tape.out_bytes > 0) == ("activations=" in names)
    trained = expected(names, shards * ROWS)
    with model.full_params() as params:
        found = {name: p.detach().clone() for name, p in params.items()}
    assert len(found) == len(trained) or "Pipeline" in names
    return max(float((taken(model, name, trained[name]) - p.flatten()).abs().max())
               for name, p in found.items())


def taken(model, name, whole):
    """What this rank has of a weight"""
    part = None
    if hasattr(model, "module"):
        path, _, last = name.rpartition(".")
        part = part_of(model.module.module.get_submodule(path), last)
    return part.take(whole) if part else whole.flatten()


@pytest.mark.parametrize("names", TABLE, ids=" and ".join)
def test_chapters_combine_as_the_table_says(names, tmp_path):
    """
    Two steps of SGD with a rate of 0.5, in both orders if both change the plain model. Weights are
    within 1e-5 of plain PyTorch, because sums over ranks round in another order. Each "no" is an
    error with the words of the table.
    Breaks if two chapters train another model than plain PyTorch, without a word.
    Proves `compress`, `inject`, `tensor_parallel`, `compile`, `wrap`, `Pipeline`, `Links`.
    """
    says = TABLE[names]
    ranks = 4 if {"Pipeline", "tensor_parallel"} & {*names} else 2
    orders = [names, names[::-1]] if {*names} <= CHANGES and "compress" in names else [names]
    for order in orders:
        for found in run(together, ranks, order, str(tmp_path)):
            if says.startswith("yes"):
                assert found < 1e-5, order
            else:
                assert says.removeprefix("no: ") in found, (order, found)


def test_weights_outside_of_layers_are_not_compressed_and_compiled():
    """
    They would be in every graph, with the threshold of the first step.
    Proves `CompiledModel._number_units`.
    """
    plain = nn.ModuleList(layers())
    compress(plain, RULES)
    with pytest.raises(RuntimeError, match=r"layer1.*outside of them"):
        compile(nn.Sequential(plain[0], nn.LayerNorm(8)), nn.LayerNorm, backend="aot_eager")

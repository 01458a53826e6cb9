"""
# A rank that is stopped: in each chapter the others end after the time-out, and say why
"""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run
from zero3 import Int8, Links, Zero3Layer, Zero3Optimizer, Zero3Sequential, compile, save, wrap
from zero3.compression.compress import compress
from zero3.compression.rules import Prune
from zero3.inject import inject, policies
from zero3.inject.tensor import Pattern
from zero3.pipeline import Pipeline

TIMEOUT = timedelta(seconds=2)
X = torch.ones(4, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def blocks(count=3):
    return nn.Sequential(*(Block() for _ in range(count)))


def step_of(model):
    """A training step of a model that is called"""
    optimizer = Zero3Optimizer(model, lr=0.1, clip_grad_norm=1.0)

    def step():
        optimizer.backward(model(X).square().mean())
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def chain(mesh=None):
    return step_of(Zero3Sequential([Zero3Layer(block, mesh=mesh) for block in blocks()]))


def replicas():
    return chain(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def nodes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "shard"))
    return chain(Links(mesh, weights=Int8(), gradients=Int8(), secondary=True))


def whole():
    return step_of(wrap(blocks(), Block))


def compiled():
    return step_of(compile(blocks(), Block, backend="aot_eager"))


def tensor():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "shard"))
    split = policies.tensor_parallel(mesh["tensor"], {Block: Pattern(columns=("up",),
                                                                     rows=("down",))})
    return step_of(wrap(inject(blocks(), [split]), Block, mesh=mesh["shard"]))


def compressed():
    model = blocks()
    compress(model, {"*.up": [Prune(0.5, scope="global")]})
    return step_of(Zero3Sequential([Zero3Layer(block) for block in model]))


def pipeline():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    model = Pipeline([*blocks(4)], mesh, loss_fn=nn.functional.mse_loss, micro_batches=2)
    optimizer = Zero3Optimizer(model, lr=0.1)

    def step():
        model.train_batch(X, X, optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step, model, optimizer


def checkpoint(folder):
    step, model, optimizer = chain()
    saves = iter(range(9))

    def step_and_save():
        step()
        save(folder, model, optimizer, step=next(saves))

    return step_and_save, model, optimizer


CHAPTERS = {make.__name__: make for make in (chain, replicas, nodes, whole, compiled, tensor,
                                             compressed, pipeline, checkpoint)}


def stopped(name, folder):
    """The last rank is stopped before the second step; the others' errors, and the times"""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    pids = [0] * (last + 1)
    dist.all_gather_object(pids, os.getpid())
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=last + 1, timeout=TIMEOUT)
    arguments = [folder / "saved"] if name == "checkpoint" else []
    step, *alive = CHAPTERS[name](*arguments)
    step()
    if rank == last:
        os.kill(os.getpid(), signal.SIGSTOP)
        return ""
    with pytest.raises(RuntimeError) as error:
        step()
    (folder / f"said-{rank}").touch()
    if rank == 0:
        # A file does not wait for the rank that is stopped.
        while not all((folder / f"said-{other}").exists() for other in range(last)):
            time.sleep(0.01)
        os.kill(pids[last], signal.SIGCONT)
    del alive
    return str(error.value)


@pytest.mark.parametrize("name", CHAPTERS)
def test_a_stopped_rank_is_noticed_after_the_time_out(name, tmp_path):
    """
    SIGSTOP for the last of four ranks, as a machine that swaps or a link that is down would have
    it. After the time-out of `init_process_group`, 2 s here, each other rank raises an error that
    says what it has waited for. Breaks without `wait_as_long`: in a mesh that takes half an hour.
    Proves `wait_as_long`, `Group.together`, `Group.advice`, `Group.timeout`, `Transfer.wait`,
    `Transfer.wait_for`, `Channels`, `Group.within`.
    """
    said = run(stopped, 4, name, tmp_path)[:-1]
    for rank, text in enumerate(said):
        assert f"rank {rank}: " in text and "Expected: " in text and "What to do: " in text, text
    told = [text for text in said if "imed out waiting" in text]
    assert told and all("none of them has ended within 2 s" in text for text in told), said

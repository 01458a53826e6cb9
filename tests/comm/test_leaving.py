"""
# The end of a program: gloo's threads end before Python does
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run
from zero3 import Links, Zero3Layer
from zero3.comm.order import timeout_of
from zero3.pipeline import Pipeline

# A program that forks into two ranks for each way to end. It forks before it computes, and imports
# once. It looks for gloo's threads after everything else, because the first function that is
# registered runs last.
PROGRAM = """
import atexit, gc, os, signal, sys
from itertools import product
from pathlib import Path

def look():
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    print("gloo's threads:", sum("gloo_run" in name for name in names), flush=True)

atexit.register(look)
import torch
import torch._dynamo  # which optimizers import in their first step
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, save

# Ranks that look for cycles would copy the memory of all that is imported.
gc.freeze()
folder = Path(sys.argv[1])
hear, tell = os.pipe()
ranks = {}
for how, rank in product(sys.argv[2:], range(2)):
    ranks[how, rank] = os.fork()
    if not ranks[how, rank]:
        break
else:
    stopped = ranks.pop(("stopped", 1))
    os.waitpid(stopped, os.WUNTRACED)
    os.close(tell)
    for (how, rank), pid in ranks.items():
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (folder / f"{how}-{rank}.code").write_text(f"{code}")
    os.kill(stopped, signal.SIGKILL)
    sys.exit()

os.close(tell)
told = os.open(folder / f"{how}-{rank}.told", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
os.dup2(told, 1)
os.dup2(told, 2)
# Without a name torch chooses a backend for each kind of device, and calls it "undefined".
backend = None if how == "forgets" else "gloo"
where = f"file://{folder}/{how}.store"
dist.init_process_group(backend, init_method=where, rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
model = Zero3Sequential([Zero3Layer(nn.Linear(4, 4), mesh=mesh) for _ in range(2)])
optimizer = Zero3Optimizer(model, lr=0.1)
optimizer.backward(model(torch.ones(2, 4)).sum())
optimizer.step()
save(folder / how, model, optimizer, step=1)
if how == "destroys":
    dist.destroy_process_group()
elif how == "raises":
    raise ValueError("my own bug")
elif how == "stopped":
    # The other rank never answers, so a thread of gloo's waits for it, for half an hour.
    if rank:
        os.kill(os.getpid(), signal.SIGSTOP)
    os.read(hear, 1)
    work = dist.all_reduce(torch.ones(1), async_op=True)
"""
WAYS = ("forgets", "destroys", "raises", "stopped")


@pytest.fixture(scope="module")
def ends(tmp_path_factory):
    """The exit status of each rank that was not stopped, and what it has told"""
    folder = tmp_path_factory.mktemp("ends")
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, folder, *WAYS],
                               cwd=Path(__file__).parents[2], start_new_session=True,
                               env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        assert program.wait(timeout=300) == 0
    finally:
        # All ranks, also one that does not end.
        with suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait()
    return {path.stem: (int(path.read_text()), path.with_suffix(".told").read_text())
            for path in folder.glob("*.code")}


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs Linux's list of threads")
@pytest.mark.parametrize("how", ["forgets", "destroys", "raises"])
def test_no_thread_of_gloos_is_left_when_python_ends(how, ends):
    """
    A thread that still has to drop a tensor would end the process with SIGABRT, after everything
    has been saved. With layers on a mesh `destroy_process_group()` alone ends them only if nobody
    else has a handle of its groups. Breaks without `leave`, or with a strong `Group.handle`.
    Proves `leave`, `Group.process_group`.
    """
    for rank in range(2):
        code, told = ends[f"{how}-{rank}"]
        assert code == (how == "raises"), told
        assert "gloo's threads: 0" in told


def test_the_end_waits_for_nobody_who_was_stopped(ends):
    """
    The thread that waits for a stopped rank is left alone after half a second, and the program
    ends. Breaks where `leave` calls `destroy_process_group()` itself: that takes half an hour.
    Proves `leave`.
    """
    assert "stopped-0" in ends


def times():
    """How long each group of each kind of mesh waits, if the group of all ranks waits 60 s"""
    names = {"replicate": ("replicate", "shard"), "nodes": ("nodes", "shard")}
    groups = []
    for dims in names.values():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=dims)
        groups += Zero3Layer(nn.Linear(2, 2), mesh=Links(mesh)).comm.groups
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    pipeline = Pipeline([nn.Linear(2, 2), nn.Linear(2, 2)], mesh, loss_fn=torch.dist)
    layer = pipeline.sharded_layers[0]
    groups += [*layer.comm.groups, layer.comm.stages, pipeline.channels.control,
               *pipeline.channels.data.values()]
    found = {timeout_of(group.process_group, torch.device("cpu")) for group in groups}
    chosen = init_device_mesh("cpu", (4,), mesh_dim_names=("shard",))
    other = dist.new_group(timeout=timedelta(seconds=7))
    chosen = type(chosen).from_group(other, "cpu")
    (group,) = Zero3Layer(nn.Linear(2, 2), mesh=chosen).comm.groups
    return found, timeout_of(group.process_group, torch.device("cpu"))


def test_every_group_of_every_mesh_waits_as_long_as_the_group_of_all_ranks():
    """
    `init_device_mesh` forgets `init_process_group(timeout=)`, and would wait for 30 minutes. A
    group with a time of its own keeps it. Breaks without `wait_as_long`.
    Proves `wait_as_long`, `timeout_of`, `Channels`.
    """
    assert run(times, 4) == [({timedelta(seconds=60)}, timedelta(seconds=7))] * 4

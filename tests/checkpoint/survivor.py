"""
# A training run that may be killed at any moment, and a save that kills itself

Workers of `test_survival.py` and of `test_restarts.py`, which other processes import.
"""

import builtins
import hashlib
import os
import random
import shutil
import signal
import socket
import sys
import time
from datetime import timedelta
from itertools import count
from multiprocessing import forkserver, resource_tracker

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import run as torch_run
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.nn import functional as F

from tests import nodes
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save
from zero3.checkpoint.reader import MANIFEST, clean_up_interrupted_saves
from zero3.checkpoint.save_load import newest
from zero3.train import gpt
from zero3.train import job as train
from zero3.train.launch import fresh_store

WIDTH, TRACE_NUMEL = 48, 3 << 17
# Each changes what a reader finds there; `fsync` only says when it would outlast a power cut.
CALLS = ("mkdir", "posix_fallocate", "pwritev", "ftruncate", "fsync", "rename", "unlink", "rmdir")


class First(nn.Module):
    """A layer with buffers that each rank has for itself, of more than one block of a checksum."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, 97), nn.BatchNorm1d(97)
        self.register_buffer("trace", torch.zeros(TRACE_NUMEL))

    def forward(self, x):
        if self.training:
            self.trace.add_(x.detach().mean())
        return F.dropout(torch.tanh(self.norm(self.linear(x))), 0.2, self.training)


def build(seed=0):
    """A chain whose step draws random numbers."""
    torch.manual_seed(seed)
    model = Zero3Sequential([Zero3Layer(First()), Zero3Layer(nn.Linear(97, 5))])
    return model, Zero3Optimizer(model, torch.optim.AdamW, lr=1e-2)


def go(model, optimizer, step):
    """Data by the step's number; noise from all three streams of this process."""
    drawn = torch.Generator().manual_seed(1000 * step + model.module_list[0].comm.rank)
    x = torch.randn(8, WIDTH, generator=drawn) * (1 + random.random())
    loss = F.mse_loss(model(x), x[:, :5] + np.random.standard_normal())
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def values(model):
    """All weights, and this rank's buffers, as bytes."""
    with model.full_params() as full:
        found = {name: p.detach().clone() for name, p in full.items()}
    found |= {name: b.clone() for name, b in model.named_buffers()}
    return {name: t.numpy().tobytes() for name, t in found.items()}


# -------------------------------------------------------------------------------- a run of 2 ranks


def survive(folder, steps, marks):
    """
    ## Go on from the newest checkpoint to step `steps`, and save after each

    * `folder` is the run's, or nothing: then no checkpoint is read or written
    * `marks` is where rank 0 says what it is doing: a word and the time

    Returns `values`, and how many steps were taken here.
    """
    def mark(word):
        if not rank and marks is not None:
            marks.send_bytes(f"{word} {time.monotonic()}".encode())

    rank, (model, optimizer) = dist.get_rank(), build()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(rank)
    mark("load")
    # All ranks do as rank 0 finds it.
    found = [None]
    if folder is not None and not rank:
        clean_up_interrupted_saves(folder)
        found = [newest(folder)]
    dist.broadcast_object_list(found)
    if found[0] is not None:
        scheduler.load_state_dict(load(folder, model, optimizer))
    first, saving = scheduler.last_epoch, None
    for step in range(first, steps):
        mark("train" if saving is None else "train beside a write")
        go(model, optimizer, step)
        scheduler.step()
        if folder is not None:
            mark("save")
            saving = save(folder, model, optimizer, step=step + 1, keep=2,
                          extra=scheduler.state_dict(), async_write=step % 3 == 0)
            saving = saving if step % 3 == 0 else None
    if saving is not None:
        saving.wait()
    return values(model), steps - first


# ---------------------------------------------------------------------- a save that ends in between


def fingerprint(model, optimizer, extra):
    """All that a checkpoint has to bring back, in 64 digits."""
    drawn = np.random.get_state()
    told = hashlib.sha256(repr((extra, random.getstate(), drawn[0], drawn[2:])).encode())
    states = [optimizer.state.get(piece.param, {}) for kept in optimizer.shard_states
              for piece in kept.pieces]
    moments = [state[key].numpy() for state in states for key in sorted(state)]
    for each in (*values(model).values(), *moments, drawn[1], torch.get_rng_state().numpy()):
        told.update(each)
    return told.hexdigest()


def in_a_fork(work, *args):
    """
    ## Do this in a process of its own, and say how that ended

    Returns the status of `os.waitpid`. A fork has all that this process has built, and no threads.
    """
    drawn, child = random.getstate(), os.fork()
    if not child:
        status = 1
        try:
            # Python seeds this stream anew in a fork.
            random.setstate(drawn)
            work(*args)
            status = 0
        except BaseException as error:
            print(f"{error!r}", file=sys.stderr)
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def kill_at(n, calls):
    """
    ## Have this process killed in the n-th call that changes something on the disk

    Before the call; where it writes, when half of it is written; and where it opens a new file,
    when that is there and empty. Each call is told to `calls`, a file that the process leaves.
    """
    made = count()

    def dies(name, real):
        def call(*args, **kwargs):
            mode = args[1] if len(args) > 1 else kwargs.get("mode", "r")
            if name == "open" and "w" not in mode and "x" not in mode:
                return real(*args, **kwargs)
            os.write(calls, f"{name} ".encode())
            if next(made) == n:
                if name == "open":
                    real(*args, **kwargs)
                if name == "pwritev":
                    fd, (data,), offset = args
                    real(fd, [data[: len(data) // 8192 * 4096]], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)
        return call

    for name in CALLS:
        setattr(os, name, dies(name, getattr(os, name)))
    builtins.open = dies("open", open)


def prepare(folder, before, model, optimizer):
    """
    ## What is in the folder before the save, as `model` is now
    """
    given = before if isinstance(before, tuple) else (1, 2)
    for step in given:
        save(folder, model, optimizer, step=step, extra="old" if step == given[-1] else "older",
             keep=9)
    if before == "leftovers":
        # One of each row of the table; the one that waits for its name replaces an older one.
        one, two = folder / "step-00000001", folder / "step-00000002"
        two.rename(two.with_suffix(".partial"))
        for name in ("step-00000002", "step-00000003.partial", "step-00000000.removed"):
            shutil.copytree(one, folder / name)
        (folder / "step-00000003.partial" / MANIFEST).unlink()


def afterwards(folder, answer):
    """
    ## What a run finds there that is started again, and what its next save leaves

    Into the file `answer`: the fingerprint of what was loaded, or the error; and the names.
    """
    model, optimizer = build(seed=7)
    try:
        found = fingerprint(model, optimizer, load(folder, model, optimizer))
    except RuntimeError as error:
        found = f"{error}"
    go(model, optimizer, 0)
    save(folder, model, optimizer, step=20, keep=1)
    left = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
    answer.write_text("\n".join([found, *left]))


def die_everywhere(folder, before, told):
    """
    ## A save that is killed in its first call, in its second, and so on, until it goes through

    * `before` is the steps that were saved before, or "leftovers"; `told` is passed to `save`

    Returns the fingerprints of the states before and after; and for each save the calls that it
    made, whether it was killed, and what `afterwards` wrote.
    """
    base, here, calls = folder / "base", folder / "run", folder / "calls"
    base.mkdir()
    model, optimizer = build()
    go(model, optimizer, 0)
    old = fingerprint(model, optimizer, "old")
    if in_a_fork(prepare, base, before, model, optimizer):
        raise RuntimeError("cannot prepare the folder")
    go(model, optimizer, 1)
    new, found, killed = fingerprint(model, optimizer, "new"), [], True

    def save_and_die(n):
        fd = os.open(calls, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
        kill_at(n, fd)
        save(here, model, optimizer, extra="new", **told).wait()

    for n in count():
        shutil.copytree(base, here)
        status = in_a_fork(save_and_die, n)
        killed = status == signal.SIGKILL
        answer = "the save failed" if status and not killed else "the next run failed"
        if killed or not status:
            if not in_a_fork(afterwards, here, folder / "answer"):
                answer = (folder / "answer").read_text()
        found.append((calls.read_text().split(), killed, answer.split("\n")))
        shutil.rmtree(here)
        if not killed:
            return old, new, found


# --------------------------------------------------------------------- a run that torchrun restarts


def killed_in_each_attempt(folder, restarts):
    """
    ## A rank of torchrun's: one step further than the attempt before, and then it dies

    The last attempt writes a digest of this rank's weights to the folder.
    """
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    torch.set_num_threads(1)
    store = fresh_store(rank, world_size, timeout_s=20)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size,
                            timeout=timedelta(seconds=20))
    weights, taken = survive(folder / "checkpoints", attempt + 1, None)
    with open(folder / f"attempts-{rank}", "a") as file:
        file.write(f"{attempt} {taken}\n")
    dist.barrier()
    if attempt < restarts:
        if rank == attempt % world_size:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    (folder / f"digest-{rank}").write_text(digest(weights))


def digest(weights):
    """All weights and buffers, in 64 digits."""
    return hashlib.sha256(repr(sorted(weights.items())).encode()).hexdigest()


def agent(folder, restarts, backend, apart):
    """
    ## What torchrun does, with ranks that are forked from a server

    The same agent, rendezvous and store. Forked ranks need not import torch in each attempt.

    * `apart` is "1" if each attempt has a store of its own
    """
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = apart
    os.dup2(os.open(folder / "errors", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    # The agent has been forked itself, and would start another server.
    forkserver._forkserver.ensure_running = resource_tracker.ensure_running
    # Port 0: any that is free. A static rendezvous has to be given one.
    port = 0 if backend == "c10d" else free_port()
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="restarts", max_restarts=restarts,
        monitor_interval=0.03, start_method="forkserver", rdzv_backend=backend,
        rdzv_endpoint=f"localhost:{port}", rdzv_configs={"rank": 0, "timeout": 60})
    elastic_launch(config, killed_in_each_attempt)(folder, restarts)


def free_port():
    """A port that nobody listens on, just now."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


# ------------------------------------------------------------------------- ranks of the main job


def write_to(output, errors):
    """From now on this process and its children write to these files"""
    for number, path in ((1, output), (2, errors)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False, buffering=1)


def torchrun(argv, output, errors, network, environment):
    """
    ## torchrun itself, with ranks that it forks

    Neither it nor its ranks import torch anew, as they do if a shell starts them.

    * `network` is the file of a network namespace, or None
    * `environment` has further variables
    """
    if network is not None:
        with open(network) as file:
            nodes._enter(file.fileno())
    os.environ.update(environment)
    write_to(output, errors)
    torch_run.main(argv)


def one_rank(rank, world_size, port, argv, output, before):
    """A rank of the main job: what torchrun tells it, and where it writes to"""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "MASTER_ADDR": "localhost",
                   "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    write_to(output, output)
    if before is not None:
        before(rank)
    code = train.main(argv)
    sys.stdout.flush()
    os._exit(code)


def fails_in_forward(failing, rank):
    """A bug of these ranks', in the third batch"""
    batches = []
    real = gpt.next_byte_loss

    def next_byte_loss(model, windows):
        batches.append(windows)
        if rank in failing and len(batches) == 3:
            model.module_list[1].module.register_forward_pre_hook(lambda *_: 1 / 0)
        return real(model, windows)

    gpt.next_byte_loss = next_byte_loss


def signalled(rank):
    """SIGTERM for rank 1 alone, in its third batch"""
    batches = []
    real = gpt.global_batch

    def global_batch(*args):
        batches.append(args)
        if rank == 1 and len(batches) == 3:
            signal.raise_signal(signal.SIGTERM)
        return real(*args)

    gpt.global_batch = global_batch

"""
# Ranks from Python

`run` starts a worker on several ranks and returns what each of them answers: for notebooks, which
cannot be started by torchrun, and for tests.

`torchrun` starts a program on each rank. Where the program is a cell, or a test, the ranks have to
come from within: processes that import a function, join a process group and call it. They are
forked from a server that has imported torch once, so that to start them takes a tenth of a second.

The same call runs on a laptop and on a machine full of GPUs: with GPUs there is one rank on each,
and NCCL between them, else there are two ranks on the CPU, and gloo.

**Run this**: the notebooks.

**Not covered, and what that costs**: several machines. There torchrun is the way.
"""

import importlib
import multiprocessing
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_CONTEXT: Any = multiprocessing.get_context("forkserver")
# The first words of an error that another rank has caused.
_CONSEQUENCE = "as a consequence,"
# How long the other ranks may take to notice that one has failed.
_GRACE_S = 10


def preload(*modules: str) -> None:
    """
    ## Import modules once, for all ranks

    Before the first of them starts, and in place of what was asked for before. Optimizers import
    `torch._dynamo` in their first step.
    """
    _CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.distributed", *modules])


def default_ranks() -> int:
    """
    ## One rank for each GPU, or two on the CPU
    """
    return torch.cuda.device_count() or 2


def run(worker: Callable | str, world_size: int | None = None, *args: Any, device: str = "auto",
        timeout_s: float = 120) -> list[Any]:
    """
    ## Run a worker on each rank, and return the answers in rank order

    * `worker` is called with `args`. It lives in a module, for other processes import it; written
      `"module:function"` it need not be imported here, and each call sees the file as it is now
    * `world_size` is the number of ranks; left out, `default_ranks()`
    * `device` is "cpu", or "auto": a GPU for each rank where there are as many

    Raises `AssertionError` as soon as a rank has failed and the others have noticed: with its
    traceback first, then a line from each rank that only lost the others. A rank that has not
    answered after `timeout_s` seconds is an error, not a hang.
    """
    if device not in ("auto", "cpu"):
        raise ValueError(f'no such choice. Expected: "auto" or "cpu". Got: {device!r}. What to do: '
                         "hide GPUs with CUDA_VISIBLE_DEVICES where not all shall be used.")
    world_size = world_size or default_ranks()
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world_size):
            mine, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank, daemon=True,
                args=(worker, rank, world_size, f"{folder}/store", device, theirs, args))
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        failed = ["no answer was read"]
        try:
            answers, failed = _answers(pipes, timeout_s)
        finally:
            for process in processes:
                # After a failure the others may wait for the rank that is gone.
                process.join(timeout=0 if failed else 5)
                process.kill()
    if failed:
        raise AssertionError(report(failed))
    return [answers[rank] for rank in range(world_size)]


def my_device() -> torch.device:
    """
    ## The device of this rank, in a worker
    """
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_consequence(error: BaseException) -> bool:
    """
    ## Whether an error only says that another rank is lost

    When a rank raises and ends, each rank that waits for it raises too. Those errors hide the one
    that matters. They are recognised by where they come from: a wait of `zero3.comm`, or a
    collective of `torch.distributed`.
    """
    # An error that is handled may lead to further ones, so look at the first.
    while earlier := error.__cause__ or (not error.__suppress_context__ and error.__context__):
        error = earlier
    if not isinstance(error, RuntimeError):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    module = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    return (module.startswith("torch.distributed")
            or "the other ranks are lost" in str(error)
            # A rank announces a fault of its own in place of a transfer.
            or "Got: fault of" in str(error))


def report(failed: list[str]) -> str:
    """
    ## The texts of the ranks that failed: causes first, then a line for each consequence

    * `failed` are their texts, in the order in which they came

    Without a cause all of them are kept whole.
    """
    causes = [text for text in failed if not text.startswith(_CONSEQUENCE)]
    lines = [text.strip().splitlines()[-1] for text in failed if text.startswith(_CONSEQUENCE)]
    if not causes:
        return "\n".join(failed)
    return "\n".join([*causes, *(line if line.startswith(_CONSEQUENCE) else f"{_CONSEQUENCE} {line}"
                                 for line in lines)])


def _answers(pipes: list[connection.Connection], timeout_s: float) -> tuple[dict, list[str]]:
    """
    #### The ranks' results, by rank, and the texts of those that failed, as they come

    A failure is known at once, although other ranks may still wait for the one that failed. Those
    have `_GRACE_S` seconds to say so.
    """
    results: dict[int, Any] = {}
    failed: list[str] = []
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline_s = time.monotonic() + timeout_s
    while waiting:
        ready = connection.wait(waiting, max(0, deadline_s - time.monotonic()))
        if not ready:
            silent = ", ".join(f"rank {rank}" for rank in waiting.values())
            return results, [*failed, (
                f"{_CONSEQUENCE} {silent}: no answer after another rank had failed" if failed
                else f"{silent}: no answer after {timeout_s} s")]
        for pipe in [pipe for pipe in waiting if pipe in ready]:
            rank = waiting.pop(pipe)
            good, result = _answer(pipe, rank, timeout_s)
            if good:
                results[rank] = result
            else:
                failed.append(result)
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    return results, failed


def _answer(pipe: connection.Connection, rank: int, timeout_s: float) -> tuple[bool, Any]:
    """
    #### What a rank answers, or why it does not
    """
    if not pipe.poll(timeout_s):
        return False, f"rank {rank}: no answer after {timeout_s} s"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, f"rank {rank}: the process ended without an answer"


def _rank(worker, rank: int, world_size: int, store: str, device: str, pipe, args) -> None:
    """
    #### The life of a rank
    """
    # Ranks share the cores; more threads than cores would wait for each other.
    torch.set_num_threads(1)
    # A file that is written anew within a second would be taken for its old self.
    sys.dont_write_bytecode = True
    gpu = device == "auto" and torch.cuda.device_count() >= world_size
    try:
        if gpu:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if gpu else "gloo", init_method=f"file://{Path(store)}", rank=rank,
            world_size=world_size, timeout=timedelta(seconds=60))
        if isinstance(worker, str):
            module, function = worker.split(":")
            worker = getattr(importlib.import_module(module), function)
        answer = (True, worker(*args))
        # Here: the pipe would pass tensors on as shared memory, which ends with this process.
        told = pickle.dumps(answer)
    except BaseException as error:
        whose = f"{_CONSEQUENCE} " if is_consequence(error) else ""
        answer = (False, f"{whose}rank {rank}:\n{traceback.format_exc()}")
        told = pickle.dumps(answer)
    pipe.send_bytes(told)
    # Nobody leaves before all have answered: a rank that is gone takes the others' messages along.
    pipe.close()
    if answer[0]:
        dist.barrier()
        dist.destroy_process_group()

"""
# Ranks from Python

`run` calls a function on several ranks and returns their answers.

A notebook or a test starts its ranks itself. They are forked from a server process that has
imported torch once, so starting one takes a tenth of a second. If `who` of `worker.py` returns the
number of the rank, `run("worker:who", 2)` returns `[0, 1]`.

**Run this**: the notebooks.

**Not covered, and what that costs**: several machines. Use torchrun there.
"""

import multiprocessing.connection
import os
import pickle
import pkgutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero3.guards.options import expect

_CONTEXT = multiprocessing.get_context("forkserver")
# Many modules ask whether there is a GPU when they are imported. To answer, torch would start CUDA,
# which works in no process that is forked later. So torch asks NVML.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# The first words of an error that another rank has caused.
_CONSEQUENCE = "as a consequence,"
# Seconds that the other ranks have to notice that one has failed.
_GRACE_S = 10


def preload(*modules: str) -> None:
    """
    ## Import modules once, for all ranks

    Call it before the first rank starts.
    """
    _CONTEXT.set_forkserver_preload(["torch._dynamo", "torch.distributed", *modules])


def default_ranks() -> int:
    """
    ## One rank for each GPU, or two on the CPU
    """
    return torch.cuda.device_count() or 2


def run(worker: Callable | str, world_size: int | None = None, *args: object, device: str = "auto",
        timeout_s: float = 120) -> list[Any]:
    """
    ## Run a worker on each rank, and return the answers in rank order

    * `worker` is called with `args`. It has to be in a module, because other processes import it.
      As `"module:function"` it is imported on the ranks only, from the file as it is now
    * `world_size` is the number of ranks; by default, `default_ranks()`
    * `device` is "cpu" or "auto"; "auto" uses GPUs if there is one for each rank

    Raises `AssertionError` when a rank has failed, with its traceback first. A rank that does not
    answer within `timeout_s` seconds has failed.
    """
    expect(device in ("auto", "cpu"), "no such choice", '"auto" or "cpu"', repr(device),
           "hide GPUs with CUDA_VISIBLE_DEVICES to use only some of them")
    world_size = world_size or default_ranks()
    with tempfile.TemporaryDirectory() as folder:
        processes = {}
        for rank in range(world_size):
            mine, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank, daemon=True,
                args=(worker, rank, world_size, f"{folder}/store", device, theirs, args))
            process.start()
            theirs.close()
            processes[mine] = process
        try:
            answers = _answers([*processes], timeout_s)
            # Those that have answered leave by themselves, together.
            for process in processes.values():
                process.join(timeout=5)
        finally:
            # After a failure the others may wait for the lost rank for ever.
            for process in processes.values():
                process.kill()
    return answers


def my_device() -> torch.device:
    """
    ## The device of this rank, for use in a worker
    """
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def is_consequence(error: BaseException) -> bool:
    """
    ## Whether an error only says that another rank is lost
    """
    # Later errors were raised while the first one was handled.
    while earlier := error.__cause__ or (not error.__suppress_context__ and error.__context__):
        error = earlier
    if not isinstance(error, RuntimeError):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    module = frames[-1][0].f_globals.get("__name__", "") if frames else ""
    return (module.startswith("torch.distributed")
            or "the other ranks are lost" in str(error)
            # A rank that fails announces its fault to the others in place of a transfer.
            or "Got: fault of" in str(error))


def report(failed: list[str]) -> str:
    """
    ## The error texts of the ranks: causes in full first, then a line for each consequence
    """
    causes = [text for text in failed if not text.startswith(_CONSEQUENCE)]
    # A consequence without a traceback is one line, which begins with these words already.
    lines = [f"{_CONSEQUENCE} {text.strip().splitlines()[-1].removeprefix(_CONSEQUENCE).strip()}"
             for text in failed if text not in causes]
    return "\n".join([*causes, *lines] if causes else failed)


def _answers(pipes: list[multiprocessing.connection.Connection],
             timeout_s: float) -> list[Any]:
    """
    #### Wait for all ranks, and return their answers in rank order

    Raises `AssertionError` with the error texts in the order of their arrival.
    """
    answers: dict[int, tuple[bool, Any]] = {}  # in the order of their arrival
    waiting = dict(zip(pipes, range(len(pipes)), strict=True))
    deadline_s = time.monotonic() + timeout_s
    while waiting and (
            ready := multiprocessing.connection.wait(
                waiting,
                max(0, deadline_s - time.monotonic()))):
        for pipe in [pipe for pipe in waiting if pipe in ready]:
            rank = waiting.pop(pipe)
            answers[rank] = _answer(pipe, rank, timeout_s)
            if not answers[rank][0]:
                deadline_s = min(deadline_s, time.monotonic() + _GRACE_S)
    failed = [text for good, text in answers.values() if not good]
    if waiting:
        silent = ", ".join(f"rank {rank}" for rank in waiting.values())
        failed.append(f"{_CONSEQUENCE} {silent}: no answer after another rank had failed"
                      if failed else f"{silent}: no answer after {timeout_s} s")
    if failed:
        raise AssertionError(report(failed))
    return [answers[rank][1] for rank in range(len(pipes))]


def _answer(pipe: multiprocessing.connection.Connection,
            rank: int,
            timeout_s: float) -> tuple[bool, Any]:
    """
    #### One rank's answer: whether it succeeded, and its result or an error text
    """
    if not pipe.poll(timeout_s):
        return False, f"rank {rank}: no answer after {timeout_s} s"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, f"rank {rank}: the process ended without an answer"


def _rank(worker,
          rank: int,
          world_size: int,
          store: str,
          device: str,
          pipe,
          args) -> None:
    """
    #### The main function of a rank's process
    """
    # Ranks share the cores.
    torch.set_num_threads(1)
    # A file may be written again within a second.
    sys.dont_write_bytecode = True
    gpu = device == "auto" and torch.cuda.device_count() >= world_size
    try:
        if gpu:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "nccl" if gpu else "gloo", init_method=f"file://{Path(store)}", rank=rank,
            world_size=world_size, timeout=timedelta(seconds=60))
        if isinstance(worker, str):
            worker = pkgutil.resolve_name(worker)
        # The pipe itself would send tensors as shared memory, which ends with this process.
        answer = pickle.dumps((True, worker(*args)))
    except BaseException as error:
        whose = f"{_CONSEQUENCE} " if is_consequence(error) else ""
        pipe.send_bytes(pickle.dumps((False, f"{whose}rank {rank}:\n{traceback.format_exc()}")))
    else:
        pipe.send_bytes(answer)
        # Leave together: messages that other ranks still wait for would end with this process.
        dist.barrier(device_ids=[rank] if gpu else None)
        dist.destroy_process_group()

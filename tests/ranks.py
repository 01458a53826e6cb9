"""
# Ranks for tests: real processes, real gloo
"""

import multiprocessing
import pickle
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

# What every rank imports, imported once; the optimizers import torch._dynamo in their first step.
multiprocessing.set_forkserver_preload(["torch._dynamo", "torch.distributed", "tests.cases",
                                      "tests.survivor"])
_CONTEXT = multiprocessing.get_context("forkserver")


def run(worker, world_size, *args, timeout_s=120):
    """
    ## Run `worker(*args)` on each of `world_size` ranks and return the results in rank order

    `worker` is importable: it is called in other processes. An exception on a rank is raised here,
    with its traceback; a rank that has not answered after `timeout_s` is an error, not a hang.
    """
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "store"
        pipes, processes = [], []
        for rank in range(world_size):
            mine, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_rank, args=(worker, rank, world_size, str(store), theirs, args), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        try:
            answers = [_answer(pipe, rank, timeout_s) for rank, pipe in enumerate(pipes)]
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
    failed = [text for good, text in answers if not good]
    if failed:
        raise AssertionError("\n".join(failed))
    return [result for _, result in answers]


def _answer(pipe, rank, timeout_s):
    if not pipe.poll(timeout_s):
        return False, f"rank {rank}: no answer after {timeout_s} s"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return False, f"rank {rank}: the process ended without an answer"


def _rank(worker, rank, world_size, store, pipe, args):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=60),
        )
        answer = (True, worker(*args))
    except BaseException:
        answer = (False, f"rank {rank}:\n{traceback.format_exc()}")
    # Pickled here: the pipe would pass tensors on as shared memory, which ends with this process.
    pipe.send_bytes(pickle.dumps(answer))
    # Nobody leaves before all have answered: a rank that is gone takes the others' messages along.
    pipe.close()
    if answer[0]:
        dist.barrier()
        dist.destroy_process_group()

"""
# Ranks for tests: real processes, real gloo

`run(worker, world_size, *args)` calls a worker on each rank and returns the answers in rank order.

A new process costs more than most workers do: it imports the test's file, starts threads and takes
its first step. So ranks live on from call to call. What may not live on is made anew each time: the
process group with its connections, the random numbers, and every module of ours that the call
imported. After the call a rank looks for whatever else the worker left behind: a function that was
replaced, a thread, an open file, a limit, an environment variable, a layer that is still alive, a
message that was lost. A rank that finds something ends, and so do all ranks of a call that failed.
The next call starts new ones. A call also fails if it frees memory that is in flight (see
`in_flight.py`).

`run(..., fresh=True)` starts new processes in any case, for workers that measure their process or
end it. With `ZERO3_RANKS=1` in the environment and `pytest -s`, a rank that ends says why.
"""

import builtins
import contextlib
import functools
import gc
import inspect
import operator
import os
import pickle
import random
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.machinery import SourceFileLoader
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.optim import optimizer as torch_optimizer

import zero3
from tests import in_flight
from zero3.checkpoint import reader
from zero3.flat import in_flight as owner_of_memory
from zero3.train import launch

# What every rank imports, imported once. `preload` adds what the tests that are to run need.
launch.preload("tests.cases", "tests.checkpoint.survivor", "tests.in_flight", "tests.ranks",
               "tests.frozen")

# Packages that tests' files import first of all; the beginnings of the names of what is imported
# once for all ranks; and of the tests' files, which are not.
FIRST = ("pytest", "hypothesis")
PRELOADED = ("zero3.", "tests.", "docs.exercises.")
FILES = ".test_"
# What workers of these files import only as they go, which would take each new rank two seconds.
MODELS = "transformers.models"
LATE = {"tests.wholes": (f"{MODELS}.gpt2.modeling_gpt2", f"{MODELS}.llama.modeling_llama",
                         f"{MODELS}.t5.modeling_t5"),
        "tests.compiler.models": ("torch._dynamo.backends.debugging", "torch.distributed.tensor")}
HERE = "127.0.0.1"
# The cores that the tests may use; none where the system does not tell.
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
OURS = ("tests", "zero3", "docs", "notebooks")
# With modules and classes of ours, whatever tests replace something of.
REPLACEABLE = (torch, torch.Tensor, torch.cuda, torch.autograd, torch.nn, torch.nn.Module,
               torch.nn.functional, torch.optim.Optimizer, dist, builtins, os, random,
               threading, time)
# The hooks of all modules and all optimizers.
HOOKS = (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks,
         torch.nn.modules.module._global_forward_hooks,
         torch.nn.modules.module._global_forward_pre_hooks,
         torch.nn.modules.module._global_backward_hooks)


def preload() -> None:
    """
    ## Import once, for all ranks, what the tests' files have imported here

    The files themselves are not among it, because each call of a worker imports its file anew. Call
    it before the first rank starts, as `conftest.py` does once all files are imported.
    """
    first = [name for name in FIRST if name in sys.modules]
    ours = [name for name in sys.modules if name.startswith(PRELOADED)]
    late = [name for needs, names in LATE.items() if needs in sys.modules for name in names]
    launch.preload(*first, *late, *(name for name in ours if FILES not in name), "tests.frozen")


def run(worker: Callable | str, world_size: int, *args: Any, fresh: bool = False,
        timeout_s: float = 300) -> list[Any]:
    """
    ## Run a worker on each rank, and return the answers in rank order

    * `fresh` starts processes for this call alone, as `launch.run` does

    The rest is as for `launch.run`.
    """
    if fresh:
        return launch.run(worker, world_size, *args, device="cpu", timeout_s=timeout_s)
    ranks = _pool.first(world_size)
    good = False
    try:
        for number, rank in enumerate(ranks):
            place = (number, world_size, f"call {_pool.calls}")
            rank.pipe.send_bytes(pickle.dumps((place, worker, args)))
        answers = [launch._answer(rank.pipe, number, timeout_s)
                   for number, rank in enumerate(ranks)]
        good = all(each for each, _ in answers)
    finally:
        _pool.release(ranks, good)
    if not good:
        raise AssertionError("\n".join(text for each, text in answers if not each))
    return [result for _, result in answers]


class Rank:
    """
    ## A process that waits for calls
    """

    def __init__(self, port: int):
        self.pipe, theirs = launch._CONTEXT.Pipe()
        self.process = launch._CONTEXT.Process(target=_serve, args=(theirs, port), daemon=True)
        self.process.start()
        theirs.close()

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """
    ## The ranks that are alive
    """

    def __init__(self):
        self.ranks: list[Rank] = []
        self.calls = 0

    @functools.cached_property
    def store(self) -> dist.TCPStore:
        """
        ### Where the ranks of a call find each other: a thread of this process

        A rank that waits for a line in a file looks for it every 10 ms, several times for each
        process group.
        """
        return dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)

    def first(self, count: int) -> list[Rank]:
        """
        ### As many ranks as a call needs
        """
        for rank in [rank for rank in self.ranks if not rank.process.is_alive()]:
            self.end(rank)
        while len(self.ranks) < count:
            self.ranks.append(Rank(self.store.port))
        self.calls += 1
        return self.ranks[:count]

    def release(self, ranks: list[Rank], good: bool) -> None:
        """
        ### Keep the ranks that are as they were before the call, and end the others
        """
        # All have answered now: a rank that leaves sooner takes the others' messages along.
        for rank in ranks if good else []:
            rank.pipe.send_bytes(b"leave")
        for rank in ranks:
            kept, left = launch._answer(rank.pipe, 0, 10) if good else (False, "a call that failed")
            if os.environ.get("ZERO3_RANKS") and not kept:
                print(f"a rank ends because of {left}", file=sys.stderr)
            if not kept:
                self.end(rank)

    def end(self, rank: Rank) -> None:
        self.ranks.remove(rank)
        rank.end()


_pool = Pool()


# ------------------------------------------------------------------------------------ in the rank


def _serve(pipe: Any, port: int) -> None:
    """
    #### The life of a rank
    """
    # Ranks share the cores; more threads than cores would wait for each other.
    torch.set_num_threads(1)
    seed = torch.initial_seed()
    # Each call imports the worker's file anew. Where Python writes no bytecode, it would compile
    # the file as often.
    SourceFileLoader.source_to_code = functools.cache(  # type: ignore[method-assign]
        SourceFileLoader.source_to_code)
    in_flight.watch()
    store = dist.TCPStore(HERE, port, wait_for_workers=False)
    before = _state()
    # Whatever is alive now stays: the collector need not look at it after each call.
    gc.freeze()
    while True:
        try:
            call = pipe.recv_bytes()
        except EOFError:
            return
        torch.manual_seed(seed)
        random.seed()
        np.random.seed()
        pipe.send_bytes(_answer(call, store))
        # The others may still wait for messages of this rank's.
        pipe.recv_bytes()
        kinds = _clear(before["modules"])
        after = _state()
        left = ", ".join((*kinds, *_left(before, after)))
        pipe.send_bytes(pickle.dumps((not left, left)))
        before = after
        gc.freeze()


def _answer(call: bytes, store: dist.Store) -> bytes:
    """
    #### What the worker returns, or the traceback
    """
    where = "a rank"
    try:
        (rank, world_size, name), worker, args = pickle.loads(call)
        where = f"rank {rank}"
        _keep_to_a_core(rank)
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank,
                                world_size=world_size, timeout=timedelta(seconds=60))
        with warnings.catch_warnings():
            answer = worker(*args)
        found = in_flight.violations()
        return pickle.dumps((not found, "\n".join([where, *found]) if found else answer))
    except BaseException:
        return pickle.dumps((False, f"{where}:\n{traceback.format_exc()}"))


def _keep_to_a_core(rank: int) -> None:
    """
    #### Let the threads of a rank share a core, if cores are few

    A thread of gloo's that finds its connection locked asks again and again. On the core of the
    thread that has the lock, it cannot run at the same time. Processes that run tests side by side
    begin with different cores. Benchmarks leave the cores to the system, as torchrun does.
    """
    beside = os.environ.get("PYTEST_XDIST_WORKER")
    if beside and 1 < len(CORES) <= 4:
        # Threads that this one starts from now on inherit it.
        core = (rank + int(beside.removeprefix("gw"))) % len(CORES)
        os.sched_setaffinity(0, {CORES[core]})


def _clear(modules: set[str]) -> list[str]:
    """
    #### End what goes by itself, and name the kinds of what is alive nevertheless

    * `modules` are the names of those that were imported before the call
    """
    if dist.is_initialized():
        dist.destroy_process_group()
    # A process that has saved a checkpoint keeps the folder locked until it ends.
    reader._drop_inherited_locks()
    # A test's file may keep state in its variables, and the next call of it shall find none.
    for name in sys.modules.keys() - modules:
        if name.partition(".")[0] in OURS:
            parent, _, child = name.rpartition(".")
            vars(sys.modules.get(parent, zero3)).pop(child, None)
            del sys.modules[name]
    gc.collect()
    kinds = (zero3.Zero3Layer, zero3.Zero3Optimizer, zero3.comm.collectives.Communicator)
    alive = {type(thing).__name__ for thing in gc.get_objects() if isinstance(thing, kinds)}
    # The other ranks may still send to it.
    lost = ["something lost in flight"] if owner_of_memory.lost else []
    return [f"a {kind}" for kind in alive] + lost


def _left(before: dict[str, Any], after: dict[str, Any]) -> Iterator[str]:
    """
    #### What a call has changed and not changed back
    """
    for what in before.keys() - {"modules", "names"}:
        if before[what] != after[what]:
            yield f"{what}, {before[what]} and then {after[what]}"
    for owner, values in before["names"]:
        names = vars(owner)
        # There are tens of thousands of them. New ones come last.
        if len(names) >= len(values) and all(map(operator.is_, values, names)) and all(
                map(operator.is_, values.values(), names.values())):
            continue
        for name, value in values.items():
            now = names.get(name)
            # Torch itself wraps `step` of each class of optimizers, once; its compiler, two methods
            # of `Module`.
            by_compiler = getattr(now, "__module__", "") == "torch._dynamo.mutation_guard"
            if now is not value and not (getattr(now, "hooked", False) or by_compiler):
                yield f"{owner.__name__}.{name}"


def _state() -> dict[str, Any]:
    """
    #### What a worker may change for those that come after it
    """
    ours = [module for name, module in sys.modules.items() if name.partition(".")[0] in OURS]
    classes = {value for module in ours for value in vars(module).values()
               if inspect.isclass(value) and value.__module__.partition(".")[0] in OURS}
    return {
        "modules": {*sys.modules},
        "names": [(owner, {**vars(owner)}) for owner in (*REPLACEABLE, *ours, *classes)],
        "threads": {thread.ident for thread in threading.enumerate()},
        "open files": _open_files(),
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "path": [*sys.path],
        "limits": [resource.getrlimit(each) for each in LIMITS],
        "signals": [signal.getsignal(each) for each in signal.valid_signals()],
        "torch's modes": (torch.get_num_threads(), torch.get_default_dtype(),
                          torch.get_default_device(), torch.is_grad_enabled(),
                          torch.is_inference_mode_enabled(), torch.is_anomaly_enabled(),
                          torch.are_deterministic_algorithms_enabled(),
                          torch.is_autocast_enabled("cpu")),
        "hooks": [len(hooks) for hooks in HOOKS],
    }


def _open_files() -> dict[str, str]:
    """
    #### The descriptors of this process, and what they are of

    Not those of installed libraries' own files: matplotlib keeps its fonts open.
    """
    found = {}
    for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else ():
        # The folder itself was open to be listed, and is not any more.
        with contextlib.suppress(FileNotFoundError):
            found[fd] = os.readlink(f"/proc/self/fd/{fd}")
    return {fd: name for fd, name in found.items() if "/site-packages/" not in name}

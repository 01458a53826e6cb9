"""
# Ranks, started from Python or by torchrun

`run` calls a function on several ranks and returns their answers. `Ranks` tells a process of
torchrun's which rank it is, and gathers objects.

A notebook or a test starts its ranks itself. They are forked from a server process that has
imported torch once, so starting one takes a tenth of a second. If `who` of `worker.py` returns the
number of the rank, `run("worker:who", 2)` returns `[0, 1]`.

torchrun starts the ranks of the main job. They agree that all of them are ready, end together, and
say who failed first.

**Run this**: the notebooks; and `make train`, then Ctrl-C, then `make train`.

**Not covered, and what that costs**: `run` on several machines; use torchrun there. A signal ends
the main job only after the current step. If a step takes minutes, most systems kill the process
before that, and the newest checkpoint is then an older one. Ranks end together with a killed
torchrun on Linux only.
"""

import contextlib
import dataclasses
import multiprocessing.connection
import os
import pickle
import pkgutil
import signal
import sys
import tempfile
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import get_all

from zero3.guards.checks import expect
from zero3.guards.command_line import one_line

_CONTEXT = multiprocessing.get_context("forkserver")
# Many modules ask whether there is a GPU when they are imported. To answer, torch would start CUDA,
# which works in no process that is forked later. So torch asks NVML.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# The first words of an error that another rank has caused.
_CONSEQUENCE = "as a consequence,"
# Seconds that the other ranks have to notice that one has failed.
_GRACE_S = 10
# Seconds that a rank of torchrun's waits before it ends, if it did not fail first or may serve the
# store.
CAUSE_S = 2


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
    on_gpu = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


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


# ------------------------------------------------------------------------------ ranks from torchrun


@dataclasses.dataclass(frozen=True)
class Ranks:
    """
    ## This rank, and communication with the others
    """

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def find(cls, wanted: str) -> "Ranks":
        """
        ### Read the environment variables that torchrun sets

        Each rank of a machine gets the GPU with its local number. Raises `ValueError` if there are
        too few.
        """
        gpus = torch.cuda.device_count()
        device = torch.device("cpu")
        if wanted == "cuda" or (wanted == "auto" and gpus):
            here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
            fewer = f"start with --nproc_per_node={gpus}, or " if gpus else ""
            expect(here <= gpus, "there are more ranks than GPUs",
                   f"at most {gpus} ranks on this machine", here, f"{fewer}train with --device cpu")
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        return cls(
            int(os.environ.get("RANK", 0)),
            int(os.environ.get("WORLD_SIZE", 1)),
            device)

    def connect(self, store: dist.Store, timeout_s: float) -> None:
        """
        ### Join the process group: NCCL between GPUs, gloo between CPUs

        * `timeout_s` is the number of seconds that a rank waits for the others in one collective

        Raises `RuntimeError` if they cannot be reached.
        """
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.set_device(self.device)
        if self.world_size == 1:
            return
        with self.waits("the connections"):
            dist.init_process_group(
                "nccl" if on_gpu else "gloo", store=store, rank=self.rank,
                world_size=self.world_size, timeout=timedelta(seconds=timeout_s),
                # With it NCCL does not guess a GPU in a barrier.
                device_id=self.device if on_gpu else None)
        # Ranks share the cores.
        torch.set_num_threads(1)

    @contextlib.contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """
        ### Name the thing that this rank waited for, if the other ranks do not answer

        Raises `RuntimeError`.
        """
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: the other ranks are lost. Expected: their part of {what}. "
                f"Got: {error}. What to do: look for the first error on another rank, and start "
                "again; raise --timeout if a rank may be busy for longer.") from error

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        """
        ### This rank's rows of the global batch, on its device
        """
        return batch.chunk(self.world_size)[self.rank].to(self.device)

    def say(self, line: str, file: TextIO | None = None) -> None:
        """
        ### Print a line on rank 0 only
        """
        if not self.rank:
            # In one write, because ranks share the output.
            print(f"{line}\n", end="", file=file, flush=True)

    def gather(self, thing: object) -> list[Any]:
        """
        ### The `thing` of each rank, in rank order (all-gather; all ranks must call it)
        """
        things = [thing] * self.world_size
        if self.world_size > 1:
            with self.waits("an exchange of small things"):
                dist.all_gather_object(things, thing)
        return things


def fresh_store(rank: int,
                world_size: int,
                timeout_s: float) -> dist.Store:
    """
    ## A store without the keys of an earlier attempt

    With `--max-restarts`, torchrun keeps *one* store for all attempts, and a rank that reads early
    would get the address of a dead rank. So each rank puts a number of its own into the store, and
    rank 0 answers each new number with a token. From then on every key begins with the token. Only
    a living rank knows its number. If rank 0 has answered a dead rank, no acknowledgement arrives,
    and it looks again.

    All ranks must call this. Raises `RuntimeError` that names a rank which did not answer within
    `timeout_s` seconds.
    """
    if world_size == 1:
        return dist.HashStore()
    deadline_s = time.monotonic() + timeout_s
    silent = "rank 0" if rank else "each other rank"
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        if rank:
            mine = uuid.uuid4().hex
            store.set(f"hello/{rank}", mine)
            token = store.get(f"answer/{mine}").decode()
            store.set(f"ack/{token}/{rank}", "")
            return dist.PrefixStore(token, store)
        token = uuid.uuid4().hex
        for other in range(1, world_size):
            silent = f"rank {other}"
            while not store.check([f"ack/{token}/{other}"]):
                # `get` waits for the first `hello` of this rank. A later one replaces it.
                hello = store.get(f"hello/{other}").decode()
                store.set(f"answer/{hello}", token)
                if time.monotonic() > deadline_s:
                    raise RuntimeError("nothing of this attempt")
                time.sleep(0.005)
    except RuntimeError as error:
        raise RuntimeError(
            f"rank {rank}: the other ranks are lost. Expected: a sign of {silent} within "
            f"{timeout_s:g} s. Got: {error}. What to do: look for the first error on {silent}, and "
            "for a firewall in between; raise --timeout if ranks may start later than that."
        ) from error
    return dist.PrefixStore(token, store)


def agree(store: dist.Store,
          rank: int,
          world_size: int,
          problem: str) -> bool:
    """
    ## Whether all ranks are ready

    * `problem` is the error text of this rank, or empty

    The ranks talk through the store. Rank 0 prints the problems, each one once.
    """
    # A store takes UTF-8 only, and a path may have other bytes.
    store.set(f"problem{rank}", one_line(problem))
    problems = [text.decode() for text in get_all(store, rank, "problem", world_size)]
    if not rank:
        for text in filter(None, dict.fromkeys(problems)):
            ranks = ", ".join(str(i) for i, each in enumerate(problems) if each == text)
            where = "" if text == problems[0] else f"on rank {ranks}: "
            print(f"zero3.train: {where}{text}", file=sys.stderr, flush=True)
    # The others leave after that, or torchrun would end rank 0. Rank 0 leaves last, because it may
    # serve the store.
    store.set(f"told{rank}", "")
    get_all(store, rank, "told", world_size)
    return not any(problems)


def end_with_parent() -> None:
    """
    ## End when torchrun ends, even if it was killed

    A rank has a session of its own, so it would outlive torchrun. It asks Linux for SIGKILL when
    its parent dies, because a rank that waits in a collective would not react to a milder signal.
    """
    if not dist.is_torchelastic_launched() or sys.platform != "linux":
        return
    parent = os.getppid()
    torch.multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    # torchrun may have died before that call. Then the parent is process 1, which in a container
    # may be torchrun itself.
    orphaned = parent == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()
    if orphaned or os.getppid() != parent:
        os._exit(1)


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """
    ## Note Ctrl-C and SIGTERM instead of ending at once

    Yields a list to which each signal is added.
    """
    came: list[int] = []
    before = {number: signal.signal(number, lambda number, _: came.append(number))
              for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def tell_failure(error: Exception,
                 ranks: Ranks,
                 store: dist.Store) -> int:
    """
    ## Print an error, the cause first

    The rank that fails first prints its traceback, unless the error says what to do. The others
    print one line each, but a traceback if torch's error does not name the rank.

    Returns the exit code: 2 if the error says what to do and is no consequence, else 1.
    """
    consequence = is_consequence(error)
    first = False
    # If the store is gone, the rank that served it has failed before.
    with contextlib.suppress(RuntimeError):
        first = not consequence and store.add("failures", 1) == 1
    line = one_line(f"{type(error).__name__}: {error}")
    explains = "What to do: " in line
    brief = explains or not first
    happened = "failed" if first else "failed too"
    if consequence:
        happened = "ends as a consequence"
        brief = f"rank {ranks.rank}: " in line
    if not first:
        # torchrun also reports the rank that ends first.
        time.sleep(CAUSE_S)
    told = f". {line}\n" if brief else "\n" + "".join(traceback.format_exception(error))
    print(f"zero3.train: rank {ranks.rank} {happened}{told}", end="", file=sys.stderr, flush=True)
    if first and ranks.world_size > 1 and not ranks.rank:
        # This rank may serve the store, and others may be about to count their failures in it.
        time.sleep(CAUSE_S)
    return 2 if explains and not consequence else 1

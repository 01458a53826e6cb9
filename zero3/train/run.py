"""
# A run: its ranks, its figures, its checkpoints

`Ranks` tells a process which rank it is, and gathers objects. `Run` keeps the figures of a run.
`take_up` finds the checkpoint to resume from.

**Run this**: `make train`, then Ctrl-C, then `make train`.

**Not covered, and what that costs**: a signal ends the run only after the current step. If a step
takes minutes, most systems kill the process before that, and the newest checkpoint is then an older
one. Ranks end together with a killed torchrun on Linux only.
"""

import contextlib
import dataclasses
import os
import signal
import sys
import time
import traceback
import uuid
from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.elastic.utils.store import get_all

from zero3.checkpoint.reader import (
    CheckpointReader,
    clean_up_interrupted_saves,
    decode,
    lock_folder,
    newest,
)
from zero3.estimate.ledger import Ledger, disk_bytes, held_bytes
from zero3.guards.command_line import one_line
from zero3.guards.options import expect
from zero3.train.launch import is_consequence

# Two runs with the same values of these resume each other's checkpoints.
OPTIONS = ("d_model", "layers", "heads", "seq_len", "batch", "accumulate", "steps", "lr", "seed",
           "dtype", "reduce_dtype", "optimizer", "loss_scale", "clip", "text", "gather_bits",
           "reduce_bits", "compress")
# Seconds that a rank waits before it ends, if it did not fail first or may serve the store.
CAUSE_S = 2


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
        rank = int(os.environ.get("RANK", 0))
        world_size = int(os.environ.get("WORLD_SIZE", 1))
        gpus = torch.cuda.device_count()
        if wanted == "cpu" or (wanted == "auto" and not gpus):
            return cls(rank, world_size, torch.device("cpu"))
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        fewer = f"start with --nproc_per_node={gpus}, or " if gpus else ""
        expect(here <= gpus, "there are more ranks than GPUs",
               f"at most {gpus} ranks on this machine", here, f"{fewer}train with --device cpu")
        return cls(rank, world_size, torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))

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


@contextlib.contextmanager
def progress(ranks: Ranks, steps: int) -> Iterator[Callable[..., None]]:
    """
    ## Show the progress of the run, on rank 0

    Yields a function of the step, the loss on the training text and on held-out text, and the bytes
    per second.
    """
    if ranks.rank or not sys.stdout.isatty():
        yield lambda step, train, held_out, rate: ranks.say(
            f"step {step:>{len(str(steps))}} of {steps}   train {train:.3f}   "
            f"held out {held_out:.3f} bits/byte   {rate:,.0f} bytes/s"
        )
        return
    from labml import experiment, tracker

    def track(step, train, held_out, rate):
        tracker.save(step, {"loss.train": train, "loss.held_out": held_out, "bytes_per_s": rate})
        tracker.new_line()

    experiment.create(name="zero3", writers={"screen", "file"})
    with experiment.start():
        yield track


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


@dataclasses.dataclass
class Run:
    """
    ## The figures of a run, which go into its checkpoints
    """

    losses: list[float] = dataclasses.field(default_factory=list)  # bits per byte, one per step
    held_out: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # step, bits/byte
    train_s: float = 0.0  # without evaluation


def measured(tape: Ledger, rank: int) -> dict[str, int]:
    """
    ## The bytes of a recorded step, and those that stay after it
    """
    return {
        "rank": rank,
        "rest_bytes": held_bytes(tape.model, tape.optimizer),
        "peak_bytes": tape.peak_live_bytes,
        "sent_bytes": tape.sent_bytes,
        "between_bytes": tape.between_bytes,
        "messages": tape.messages,
        "order_bytes": tape.order_bytes,
        "read_bytes": tape.read_bytes,
        "written_bytes": tape.written_bytes,
        "disk_bytes": disk_bytes(tape.model, tape.optimizer),
        "out_bytes": tape.out_bytes,
        "in_bytes": tape.in_bytes,
    }


def take_up(args: Namespace, ranks: Ranks) -> Path | None:
    """
    ## The checkpoint to resume from, if there is one

    All ranks call it. Raises `ValueError` on all of them if the newest checkpoint belongs to a run
    with other options, or cannot be read.
    """
    if args.resume not in ("auto", "no"):
        return Path(args.resume)
    looks = not ranks.rank and args.resume == "auto"
    found, problem = ranks.gather(look_for_checkpoint(args) if looks else (None, ""))[0]
    if problem:
        raise ValueError(problem)
    return found


def look_for_checkpoint(args: Namespace) -> tuple[Path | None, str]:
    """
    ## Find the newest checkpoint of this run; return it with a problem, or an empty text
    """
    folder = checkpoints(args)
    found = None
    try:
        if folder.exists():
            lock_folder(folder)
        clean_up_interrupted_saves(folder)
        found = newest(folder)
        if not found:
            return None, ""
        # A checkpoint may be older than an option, which has its default then.
        theirs = {"optimizer": "adamw",
                  **decode(CheckpointReader(found).manifest["extra"])["options"]}
        differ = [f"{option(name)} {theirs.get(name)} there and {getattr(args, name)} here"
                  for name in OPTIONS if theirs.get(name) != getattr(args, name)]
    except Exception as error:
        # Any error at all, because the other ranks wait for this one.
        return found, (
            f"cannot resume from {found or folder}. Expected: a checkpoint of this job. Got: "
            f"{error}. What to do: pass --resume with another one, `--resume no` to start over, or "
            "another --out.")
    if differ:
        return found, (
            f"{found} belongs to another run. Expected: the same options. Got: "
            f"{', '.join(differ)}. What to do: pass `--resume {found}` to resume from it anyway, "
            "`--resume no` to start over, or another --out.")
    return found, ""


def option(name: str) -> str:
    """
    ## The option of a variable: `d_model` is `--d-model`
    """
    return f"--{name.replace('_', '-')}"


def checkpoints(args: Namespace) -> Path:
    """
    ## The folder of the run's checkpoints
    """
    return Path(args.out) / "checkpoints"

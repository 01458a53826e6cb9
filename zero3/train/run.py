"""
# A run: its ranks, its figures, its checkpoints

`Ranks` says which of the ranks this is and lets them exchange what the main job needs, `Run` keeps
what it leaves behind, and `take_up` finds the checkpoint from which a run goes on.

**Run this**: `make train`, then Ctrl-C, then `make train`.

**Not covered, and what that costs**: a run that shall end does so after the step that it is in. A
step of minutes takes longer than most systems wait before they end a process by force; then the
last checkpoint is the one from before. Ranks end with a torchrun that was killed on Linux alone,
and only from `end_with_parent` on: torch is imported before that.
"""

import contextlib
import ctypes
import dataclasses
import os
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero3.checkpoint.reader import (
    CheckpointReader,
    clean_up_interrupted_saves,
    decode,
    lock_folder,
)
from zero3.checkpoint.save_load import newest, save
from zero3.guards.options import one_line
from zero3.measure.ledger import Event, Ledger, disk_bytes, held_bytes
from zero3.train.launch import is_consequence

# What makes a run another one: a checkpoint of one is not taken up by the other unasked.
OPTIONS = ("d_model", "layers", "heads", "seq_len", "batch", "accumulate", "steps", "lr", "seed",
           "dtype", "reduce_dtype", "loss_scale", "clip", "text")
# How long, in seconds, a rank that lost the others leaves it to one of them to print the reason.
CAUSE_S = 2


@dataclasses.dataclass(frozen=True)
class Ranks:
    """
    ## The ranks of this run, and this one's place among them
    """

    rank: int
    world_size: int
    device: torch.device

    @classmethod
    def find(cls, wanted: str) -> "Ranks":
        """
        ### Read what torchrun says

        Each rank of a machine takes the GPU of its number. Raises `ValueError` if there are too
        few.
        """
        rank, world_size, local, here = (
            int(os.environ.get(name, default))
            for name, default in (
                ("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)
            )
        )
        gpus = torch.cuda.device_count()
        if wanted == "cpu" or (wanted == "auto" and not gpus):
            return cls(rank, world_size, torch.device("cpu"))
        if here > gpus:
            fewer = f"start with --nproc_per_node={gpus}, or " if gpus else ""
            raise ValueError(
                f"there are more ranks than GPUs. Expected: at most {gpus} ranks on this machine. "
                f"Got: {here}. What to do: {fewer}train with --device cpu."
            )
        return cls(rank, world_size, torch.device("cuda", local))

    def connect(self, store: dist.Store | None, timeout_s: float) -> None:
        """
        ### Join the process group: NCCL between GPUs, gloo between CPUs

        * `store` is the one from `fresh_store`; a single rank needs none
        * `timeout_s` is how long a rank waits for the others in one collective, in seconds

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
                # NCCL then opens its communicator here, and never guesses the GPU of a barrier.
                device_id=self.device if on_gpu else None)
        # Ranks share the cores; more threads than cores would wait for each other.
        torch.set_num_threads(1)

    @contextlib.contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """
        ### Say what this rank waited for, if the others do not come

        The errors of gloo and NCCL name sockets and work numbers. Raises `RuntimeError`.
        """
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: the other ranks are lost. Expected: their part of {what}. "
                f"Got: {error}. What to do: look for the first error on another rank, and start "
                "again; raise --timeout if a rank may be busy for longer.") from error

    def barrier(self) -> None:
        """
        ### Wait for all ranks (all ranks must call it)
        """
        if self.world_size > 1:
            with self.waits("a barrier"):
                dist.barrier()

    def rows(self, batch: torch.Tensor) -> torch.Tensor:
        """
        ### This rank's rows of the global batch, on its device
        """
        return batch.chunk(self.world_size)[self.rank].to(self.device)

    def mean(self, values: list[torch.Tensor]) -> list[float]:
        """
        ### The mean over ranks, of each value (all-reduce; all ranks must call it)
        """
        total = torch.stack(values).double().to(self.device)
        if self.world_size > 1:
            with self.waits("a mean"):
                dist.all_reduce(total)
        return (total / self.world_size).tolist()

    def say(self, line: str) -> None:
        """
        ### Print a line, once and not on every rank
        """
        if not self.rank:
            # One write: ranks share the output, and two could have another rank's between them.
            print(f"{line}\n", end="", flush=True)

    def any(self, flag: Any) -> bool:
        """
        ### Whether a flag is up on some rank (all-reduce; all ranks must call it)
        """
        return self.mean([torch.tensor(float(bool(flag)))])[0] > 0

    def gather(self, thing: Any) -> list[Any]:
        """
        ### What each rank has (all-gather; all ranks must call it)
        """
        things = [thing] * self.world_size
        if self.world_size > 1:
            with self.waits("an exchange of small things"):
                dist.all_gather_object(things, thing)
        return things


def fresh_store(rank: int, world_size: int, timeout_s: float) -> dist.Store:
    """
    ## A store without the keys of an earlier attempt

    Before ranks can send each other anything, they look each other up in a key-value store that
    torchrun serves: each writes its address under a fixed key, and reads the others'. With
    `--max-restarts` torchrun keeps *one* store for all attempts. A rank that reads early then gets
    the address of a rank that is dead, and the attempt fails. So does about every second one.

    A prefix that no earlier attempt has used cures it, if all ranks agree on one. The number of
    the restart is no such prefix: each machine counts its own failures, and a machine that joins
    or leaves restarts all ranks without being counted. So rank 0 draws a token, and gives it to
    each rank that is alive:

    | rank 1 | in the store | rank 0 |
    |---|---|---|
    | draws a number, `a3` | `hello/1` = `a3` | |
    | | `answer/a3` = `7f` | draws the token `7f`, and answers each new `hello/1` |
    | reads the answer | `ack/7f/1` | goes on to the next rank |

    Rank 1 trusts the token, because only a living rank can know `a3`. Rank 0 may answer a dead
    rank's `hello/1` first; no acknowledgement comes, so it looks again. From here on each key
    begins with `7f`.

    Hand it to torch with `init_process_group(store=..., rank=..., world_size=...)`. All ranks must
    call it. Raises `RuntimeError` that names the rank which did not come within `timeout_s`.
    """
    deadline_s = time.monotonic() + timeout_s
    missing = 0
    try:
        store, *_ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
        if rank:
            mine = uuid.uuid4().hex
            store.set(f"hello/{rank}", mine)
            token = store.get(f"answer/{mine}").decode()
            store.set(f"ack/{token}/{rank}", "")
            return dist.PrefixStore(token, store)
        token = uuid.uuid4().hex
        for missing in range(1, world_size):
            while not store.check([f"ack/{token}/{missing}"]):
                # It waits for the first `hello` of this rank. Later ones replace it.
                hello = store.get(f"hello/{missing}").decode()
                store.set(f"answer/{hello}", token)
                if time.monotonic() > deadline_s:
                    raise RuntimeError("nothing of this attempt")
                time.sleep(0.005)
    except RuntimeError as error:
        who = f"rank {missing}" if rank or missing else "each other rank"
        raise RuntimeError(
            f"rank {rank}: the other ranks are lost. Expected: a sign of {who} within "
            f"{timeout_s:g} s. Got: {error}. What to do: look for the first error on {who}, and "
            "for a firewall in between; raise --timeout if ranks may start later than that."
        ) from error
    return dist.PrefixStore(token, store)


def agree(store: dist.Store | None, rank: int, world_size: int, problem: str) -> bool:
    """
    ## Whether all ranks are ready

    * `problem` is what is wrong on this rank, or empty

    Before the process group is up, through the store. Rank 0 prints the problems, each once, and
    the others return after that, because torchrun ends all ranks with the first one that leaves.
    """
    problems = {problem: [rank]}
    if store is not None:
        store.set(f"problem/{rank}", problem)
        if rank:
            ready = store.get("ready") == b"yes"
            store.set(f"heard/{rank}", "")
            return ready
        for other in range(1, world_size):
            problems.setdefault(store.get(f"problem/{other}").decode(), []).append(other)
    for text, ranks in problems.items():
        if text:
            where = "" if 0 in ranks else f"on rank {', '.join(map(str, ranks))}: "
            print(f"zero3.train: {where}{one_line(text)}", file=sys.stderr, flush=True)
    ready = {*problems} == {""}
    if store is not None:
        store.set("ready", "yes" if ready else "no")
        # The store may be this rank's, and would end with it.
        store.wait([f"heard/{other}" for other in range(1, world_size)])
    return ready


def end_with_parent() -> None:
    """
    ## End when torchrun ends, even if it was killed

    torchrun starts each rank in a session of its own. Without this a rank outlives a torchrun that
    was killed, and the same command would start a second run in the same folder. Linux sends this
    process a signal when its parent dies. SIGKILL, because a rank that waits for another one would
    not see a milder one. Other systems have no such call; there the ranks live on. So does one
    whose torchrun dies while torch is imported, where orphans have another parent than process 1.
    """
    if not dist.is_torchelastic_launched() or sys.platform != "linux":
        return
    parent, set_parent_death_signal = os.getppid(), 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    # It may have died before that. Orphans go to process 1, which is torchrun in a container at
    # most.
    orphaned = parent == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()
    if orphaned or os.getppid() != parent:
        os._exit(1)


def tell_failure(error: Exception, rank: int, store: dist.Store | None) -> int:
    """
    ## Print an error, the cause first

    The rank that fails first prints its traceback. If others fail by themselves too, most likely of
    the same bug, they print a line each; and so do those that only lost a rank, after a while, so
    that the cause stands above. An error that says what to do needs no traceback: the learning rate
    was too high, or the disk is full.

    * `store` is the one from `fresh_store`; a single rank has none

    Returns the exit code: 2 if the error says what to do, else 1.
    """
    cured = "What to do: " in str(error)
    line = one_line(f"{type(error).__name__}: {error}")
    told = "".join(traceback.format_exception(error))
    if is_consequence(error):
        # torchrun also names the rank that ends first.
        time.sleep(CAUSE_S)
        # An error in torch's own words says too little without its traceback.
        ours = f"rank {rank}: " in str(error)
        text = f"ends as a consequence. {line}\n" if ours else f"ends as a consequence\n{told}"
    else:
        first = True
        # The store may be gone with its rank.
        with contextlib.suppress(RuntimeError):
            first = store is None or store.add("failures", 1) == 1
            if store is not None and not first:
                # The cause stands first.
                store.wait(["cause"], timedelta(seconds=CAUSE_S))
        text = f"failed too. {line}\n"
        if first:
            text = f"failed. {line}\n" if cured else f"failed\n{told}"
    print(f"zero3.train: rank {rank} {text}", end="", file=sys.stderr, flush=True)
    with contextlib.suppress(RuntimeError):
        if store is not None:
            store.set("cause", "")
    if not rank and store is not None:
        # The store may be this rank's, and others may be about to count their failures.
        time.sleep(CAUSE_S)
    return 2 if cured and not is_consequence(error) else 1


@contextlib.contextmanager
def progress(ranks: Ranks, steps: int) -> Iterator[Callable]:
    """
    ## Show how the run goes, on rank 0

    With labml where somebody looks at a terminal; its screen is full of escape codes, so a pipe or
    a file gets plain lines.
    """
    if ranks.rank:
        yield lambda *values: None
    elif sys.stdout.isatty():
        from labml import experiment, tracker

        def track(step, *values):
            names = ("loss.train", "loss.held_out", "bytes_per_s")
            tracker.save(step, dict(zip(names, values, strict=True)))
            tracker.new_line()

        experiment.create(name="zero3", writers={"screen", "file"})
        with experiment.start():
            yield track
    else:
        yield lambda step, train, held_out, rate: ranks.say(
            f"step {step:>{len(str(steps))}} of {steps}   train {train:.3f}   "
            f"held out {held_out:.3f} bits/byte   {rate:,.0f} bytes/s"
        )


@contextlib.contextmanager
def signals() -> Iterator[list[int]]:
    """
    ## Note Ctrl-C and SIGTERM, in place of ending at once

    Yields a list that has them as soon as they come. torchrun sends them on to all ranks, to each
    at a moment of its own.
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
    ## What a run leaves behind

    The first three go into its checkpoints.
    """

    losses: list[float] = dataclasses.field(default_factory=list)  # bits per byte, one per step
    held_out: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # step, bits/byte
    train_s: float = 0.0  # without evaluation
    came: list[int] = dataclasses.field(default_factory=list)  # signals that it shall end
    # Of the last step: its events, what this rank held and sent, and how long its gradients are.
    events: list[Event] = dataclasses.field(default_factory=list)
    measured: dict[str, int] = dataclasses.field(default_factory=dict)
    exponents: dict[int, int] = dataclasses.field(default_factory=dict)

    def take(self, model, optimizer, tape: Ledger, ranks: Ranks) -> None:
        """
        ### Keep what was recorded
        """
        self.events, self.measured = tape.events, {
            "rank": ranks.rank, "rest_bytes": held_bytes(model, optimizer),
            "peak_bytes": tape.peak_live_bytes, "sent_bytes": tape.sent_bytes,
            "messages": tape.messages, "order_bytes": tape.order_bytes,
            "read_bytes": tape.read_bytes, "written_bytes": tape.written_bytes,
            "disk_bytes": disk_bytes(model, optimizer),
        }


def take_up(args, ranks: Ranks) -> Path | None:
    """
    ## The checkpoint to go on from, if there is one

    All ranks call it; rank 0 looks. Raises `ValueError` on all of them if it is of a run with other
    options, for to go on with those would be neither this run nor that one.
    """
    if args.resume not in ("auto", "no"):
        return Path(args.resume)
    folder, found, problem = checkpoints(args), None, ""
    if not ranks.rank and args.resume == "auto":
        try:
            if folder.exists():
                lock_folder(folder)
            clean_up_interrupted_saves(folder)
            if found := newest(folder):
                options = decode(CheckpointReader(found).manifest["extra"])["options"]
                differ = [f"--{name.replace('_', '-')} {options[name]} there and "
                          f"{getattr(args, name)} here" for name in OPTIONS
                          if options[name] != getattr(args, name)]
                problem = "" if not differ else (
                    f"{found} is not of this run. Expected: the same options. Got: "
                    f"{', '.join(differ)}. What to do: pass `--resume {found}` to go on from it "
                    "all the same, `--resume no` to begin anew, or another --out.")
        except Exception as error:
            # Whatever it is: the other ranks wait for this one, and shall hear of it.
            problem = (f"cannot go on from {found or folder}. Expected: a checkpoint of this job. "
                       f"Got: {error}. What to do: pass --resume with another one, `--resume no` "
                       "to begin anew, or another --out.")
    found, problem = ranks.gather((found, problem))[0]
    if problem:
        raise ValueError(problem)
    return found


def checkpoints(args) -> Path:
    """
    ## Where the checkpoints are
    """
    return Path(args.out) / "checkpoints"


def save_run(model, optimizer, args, run: Run) -> str:
    """
    ## Save a checkpoint of the run, and return where
    """
    extra = {"options": {name: getattr(args, name) for name in OPTIONS}, "losses": run.losses,
             "held_out": run.held_out, "train_s": run.train_s}
    return str(save(checkpoints(args), model, optimizer, step=len(run.losses), extra=extra).wait())

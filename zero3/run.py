"""
# A run: its ranks, its figures, its checkpoints

`Ranks` says which of the ranks this is and lets them exchange what the main job needs, `Run` keeps
what it leaves behind, and `take_up` finds the checkpoint from which a run goes on.

**Run this**: `make train`, then Ctrl-C, then `make train`.

**Not covered, and what that costs**: a run that shall end does so after the step that it is in. A
step of minutes takes longer than most systems wait before they end a process by force; then the
last checkpoint is the one from before.
"""

import contextlib
import dataclasses
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero3.archive import Archive, decode, hold, sweep
from zero3.checkpoint import newest, save
from zero3.ledger import Event, Ledger, disk_bytes, held_bytes

# What makes a run another one: a checkpoint of one is not taken up by the other unasked.
OPTIONS = ("d_model", "layers", "heads", "seq_len", "batch", "accumulate", "steps", "lr", "seed",
           "dtype", "reduce_dtype", "loss_scale", "clip", "text")


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

    def connect(self) -> None:
        """
        ### Join the process group: NCCL between GPUs, gloo between CPUs
        """
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self.world_size > 1:
            dist.init_process_group("nccl" if self.device.type == "cuda" else "gloo")
            # Ranks share the cores; more threads than cores would wait for each other.
            torch.set_num_threads(1)

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
            dist.all_gather_object(things, thing)
        return things


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
                hold(folder)
            sweep(folder)
            if found := newest(folder):
                options = decode(Archive(found).manifest["extra"])["options"]
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

r"""
# Checkpoints: save, survive, go on with another number of ranks

`save` has each rank write its own shards, and `load` has each rank read what is its own now.

A run of many days on many machines ends many times before it is done. What it needs to go on is in
its shards: the parameters, and of each the master and the moments. Nobody has to gather anything:
each rank writes what it rests with, all at the same time, so a save takes as long as a rank's own
bytes take.

$$\underbrace{\frac{12\Psi}{N}}_{\text{bytes that a rank writes}} \qquad
\underbrace{2 \cdot \frac{12\Psi}{N'}}_{\text{that it reads, on } N' \text{ ranks}}$$

with fp32 masters and Adam, and for frozen parameters their own bytes; twice, for all is checked
before any of it is taken. The 16-bit parameters are not written: they are the masters, rounded.
`archive.py` says how a folder of such files becomes a checkpoint, at one moment and no sooner, and
how a range of a parameter is found again.

The way of a save is `Entries.describe`, `manifest`, `entries`, `tensors`, then `Writer`, then
`commit_checkpoint`; that of a load `newest`, `CheckpointReader`, `Entries.check`, `shard`, then `CheckpointReader.read`,
`TensorFile.read`, and `Entries.take`.

| what | where it is |
|---|---|
| masters and moments; parameters without any | each rank's file: its shards |
| buffers, frozen parameters outside of layers, random numbers' states | each rank's file: its own |
| steps that Adam counted, options of param groups, loss scale, `extra` | the manifest |

**On another number of ranks** each parameter is cut elsewhere, and a rank reads the pieces of its
shards from one or several of the files. The same goes for the layers: the parameters are found by
the names that they have in the plain model. Also where shards rest, and in which data type, is the
business of the model that loads.

**While training goes on.** With `async_write` the shards are copied, and a thread writes the copies
to the disk. The next step that finds all files written makes them a checkpoint; if one could not be
written, the next step says so. After the last step of a run somebody has to `wait()`.

**Run this**: `make train ARGS="--save-every 100"`, end it at any moment, by Ctrl-C or less kindly,
and run it again. `python -m zero3.checkpoint --help` looks into checkpoints and takes them to other
libraries.

**Not covered, and what that costs**: gradients. Save after a step, and not between micro-batches,
whose sums would be lost. Random numbers go on exactly on the same number of ranks; on another one
each rank begins a stream of its own. `extra` is rank 0's.
"""

import json
import operator
import os
import random
import shutil
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from zero3.checkpoint.entries import Entries, Entry
from zero3.checkpoint.reader import (
    MANIFEST,
    CheckpointReader,
    clean_up_interrupted_saves,
    commit_checkpoint,
    decode,
    encode,
    file_name,
    lock_folder,
    newest,
    partial_path,
    remove,
    steps,
)
from zero3.checkpoint.tensor_files import Broken, Writer
from zero3.comm import Communicator
from zero3.guards.options import one_line


def save(folder: str | Path, model: nn.Module, optimizer: Any = None, *, step: int,
         extra: Any = None, async_write: bool = False, keep: int = 2) -> "Saving":
    r"""
    ## Save a checkpoint

    All ranks call it alike, between a step and the next backward. Into `folder/step-...`, in which
    a checkpoint is there wholly or not at all, whatever happens meanwhile.

    * `folder` is a run's, the same for all ranks; what is missing of it is made
    * `model` is a `Zero3Sequential`, a wrapped model, or any module with `Zero3Layer`s
    * `optimizer` is a `Zero3Optimizer`, or one of torch's on the shards; left out, the weights are
      saved alone
    * `step` is the number of steps taken; checkpoints of later ones, from before the run was taken
      up again at an earlier one, are removed
    * `extra` is what else the run needs, of numbers, strings, tensors, lists, tuples and dicts: a
      scheduler's `state_dict()`, the place in the data
    * `async_write` copies what is in memory, $\frac{12\Psi}{N}$ bytes of a rank, and returns while
      the copies are being written. The checkpoint is there after a later step of the optimizer, the
      next `save` or `load`, or `wait()`; before the program ends, call that
    * `keep` is how many checkpoints stay, this one included

    Returns a `Saving`, on which an asynchronous save can be waited for.

    Raises `RuntimeError` on all ranks where it cannot be saved, where the ranks were not called
    alike or another run saves into the folder, or the asynchronous one before could not be and
    nobody was told yet; the checkpoints before are then as they were. Keeps I10.
    """
    def agreed(inventory: Entries) -> dict[str, Any]:
        found = {"folder": os.path.realpath(folder), "step": operator.index(step),
                 "keep": operator.index(keep), "async_write": bool(async_write)}
        inventory.expect(step >= 0 and keep > 0, "cannot be saved", "a `step` of at least 0, and "
                         "at least 1 to `keep`", f"{step} and {keep}", "pass these")
        return found

    inventory = _all_here("saved", model, optimizer, agreed)
    if inventory.comm.saving:
        inventory.comm.saving.leave()
    saving = Saving(inventory, Path(folder), operator.index(step), operator.index(keep))
    saving.begin(extra, async_write)
    return saving


def _all_here(done: str, model: nn.Module, optimizer: Any,
              agreed: Callable[[Entries], dict[str, Any]]) -> Entries:
    """
    #### List what a model has, once all ranks are here and were called alike

    * `done` is what shall be done to the checkpoint, for errors
    * `agreed` checks this rank's arguments, and returns those that all ranks must have alike

    All ranks must call it (all-gather of these). An exception of one rank goes on there; the others
    raise a `RuntimeError` with it, in place of waiting for that rank.
    """
    comm, mine, raised = Communicator(), {}, None  # type: tuple[Communicator, dict[str, Any], Exception | None]
    try:
        inventory = Entries(model, optimizer)
        mine = {"optimizer": inventory.kind if optimizer else None, **agreed(inventory)}
    except Exception as error:
        raised = error
    problem = one_line(f"{raised}" or repr(raised)) if raised else ""
    every = comm.gather((problem, mine))
    if raised:
        raise raised
    for rank, (problem, theirs) in enumerate(every):
        inventory.expect(not problem, f"cannot be {done}", "all ranks here, called alike",
                         f"an error on rank {rank}, which is not: {problem}",
                         f"look at what rank {rank} was called with; nothing has changed")
        for name, value in theirs.items():
            inventory.expect(value == every[0][1][name], f"cannot be {done}", f"the same `{name}` "
                             "on all ranks", f"{every[0][1][name]!r} on rank 0, {value!r} on rank "
                             f"{rank}", "call it alike on all ranks; nothing has changed")
    return inventory


class Saving:
    """
    ## A checkpoint that is being written
    """

    def __init__(self, inventory: Entries, folder: Path, step: int, keep: int):
        self.inventory, self.folder, self.step, self.keep = inventory, folder, step, keep
        self.partial = partial_path(folder, step)
        self.first = not inventory.comm.rank  # this is rank 0
        self.manifest: dict[str, Any] = {}
        self.made = False  # the folder, by rank 0
        self.writer: Any = None
        self.written: Any = None  # this rank's file: a `Future` of what `_write` returns
        self.hook: Any = None
        self.ended, self.failure = False, None  # type: tuple[bool, RuntimeError | None]

    def begin(self, extra: Any, async_write: bool) -> None:
        """
        ### Take the space, and write this rank's file, or begin to

        Rank 0 makes the folder. Then all take their space, so that a disk that is too small says so
        while nothing is written yet.
        """
        inventory, comm, problem = self.inventory, self.inventory.comm, ""
        described, options = [], None  # type: tuple[list[dict[str, Any]], dict[str, Any] | None]
        try:
            self.manifest = {"step": self.step, "extra": encode(extra)}
            described, options = inventory.describe(), inventory.options()
            if self.first:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock_folder(self.folder)
                clean_up_interrupted_saves(self.folder)
                self.partial.mkdir()
                self.made = True
        except Exception as error:
            # Whatever it is: the other ranks wait for this one, and shall hear of it.
            problem = f"{error}" or repr(error)
        self._agree(problem)
        self.manifest |= inventory.manifest(described, options)
        entries = inventory.entries(self.manifest)
        like = {entry.name: (entry.dtype, entry.shape) for entry in entries}
        path = self.partial / file_name(comm.rank, comm.world_size)
        try:
            streams = json.dumps(encode(_random_states(inventory.device)))
            self.writer = Writer(path, like, {"random": streams})
        except Exception as error:
            problem = f"{error}" or repr(error)
        self._agree(problem)
        self._fill(entries, async_write)
        if not async_write:
            self.wait()
            return
        comm.saving = self
        if inventory.optimizer is not None:
            self.hook = inventory.optimizer.register_step_pre_hook(self._end_if_done)

    def _fill(self, entries: list[Entry], async_write: bool) -> None:
        """
        #### Write what is to be written at once, and have a thread do the rest

        At once: everything, or what comes before the last that rests in a file.
        """
        inventory, now, problem = self.inventory, len(entries), ""
        if async_write:
            now = 1 + max((i for i, e in enumerate(entries) if not e.in_memory), default=-1)
        try:
            for values in inventory.tensors(entries[:now]):
                self.writer.write(values)
            copies = [t.detach().to("cpu", copy=True) for t in inventory.tensors(entries[now:])]
        except Exception as error:
            problem, copies = f"{error}" or repr(error), []
        worker = ThreadPoolExecutor(1, "zero3-checkpoint")
        self.written = worker.submit(self._write, copies, problem)
        worker.shutdown(wait=False)

    def _write(self, copies: list[torch.Tensor], problem: str) -> tuple[str, Any]:
        """
        #### Write what was copied, and have the file on the disk

        In a thread. Returns the problem, if there is one, and what the manifest says of the file.
        """
        try:
            with self.writer as writer:
                while copies:
                    writer.write(copies.pop(0))
                return problem, None if problem else writer.finish()
        except Exception as error:
            return problem or f"{error}", None

    def _end_if_done(self, *_) -> None:
        """
        #### End the save, if all files are written, or one cannot be

        Before each step as long as it lasts (all-gather of two flags). The hook that calls it stays
        until the next save: torch is going through the hooks now.
        """
        if self.ended:
            return
        done = self.written.done()
        failed = done and bool(self.written.result()[0])
        every = self.inventory.comm.gather((done, failed))
        if all(done for done, _ in every) or any(failed for _, failed in every):
            self.wait()

    def wait(self) -> Path:
        """
        ### Wait until the checkpoint is there, and return where

        All ranks call it. Raises `RuntimeError` on all ranks where one could not write.
        """
        if self.failure:
            raise self.failure
        if self.ended:
            return self.partial.with_suffix("")
        problem, file = self.written.result()
        self.ended = True
        self.manifest["files"] = self.inventory.comm.gather(file)
        self._agree(problem)
        try:
            if self.first:
                commit_checkpoint(self.partial, self.manifest)
                # What cannot be removed now stays, and the next save tries again.
                with suppress(OSError):
                    for path in [*steps(self.folder).values()][: -self.keep]:
                        remove(path)
        except Exception as error:
            problem = f"{error}"
        self._agree(problem)
        return self.partial.with_suffix("")

    def leave(self) -> None:
        """
        ### End it, if it has not ended, and have no step look after it any more
        """
        try:
            if not self.ended:
                self.wait()
        finally:
            self.inventory.comm.saving = None
            if self.hook:
                self.hook.remove()

    def _agree(self, problem: str) -> None:
        """
        #### Go on if no rank has a problem; else clear away, and raise on all of them
        """
        inventory = self.inventory
        try:
            inventory.comm.agree(
                inventory, f"of step {self.step} cannot be saved to {self.folder}", "a folder with "
                "room to write to, and an `extra` of numbers, strings, tensors, lists and dicts",
                problem, "make room, or choose another folder; the checkpoints before are as they "
                "were")
        except RuntimeError as error:
            self.ended, self.failure = True, error
            if self.writer and not self.written:
                # Nothing is written: to have the file closed.
                self._write([], "another rank's")
            if self.made and not (self.partial / MANIFEST).exists():
                # A folder that was not made here is another run's. With a manifest it is a
                # checkpoint already, and `clean_up_interrupted_saves` gives it its name.
                shutil.rmtree(self.partial, ignore_errors=True)
            raise


def load(folder: str | Path, model: nn.Module, optimizer: Any = None) -> Any:
    """
    ## Load a checkpoint

    All ranks call it alike, between steps. On any number of ranks: each reads what is its own now,
    checks it, and changes nothing before all have found everything whole.

    * `folder` is a run's, of which the newest checkpoint is loaded, or a checkpoint's own
    * `model` and `optimizer` are as for `save`, of the same parameters; layers, tiers and data
      types may be others. Without an optimizer the weights are loaded alone

    Returns what was `extra`.

    Raises `RuntimeError` on all ranks where there is no checkpoint, where it is damaged or of
    another model; model and optimizer are then as they were. Keeps I5 and I10.
    """
    inventory = _all_here("loaded", model, optimizer,
                          lambda _: {"folder": os.path.realpath(folder)})
    comm, problem = inventory.comm, ""
    if comm.saving:
        comm.saving.leave()
    # Rank 0 chooses: what the others see of a shared folder may be a moment older.
    path = Path(folder)
    with suppress(OSError):
        # `CheckpointReader` says better why not.
        path = newest(path) or path
    path = comm.gather(path)[0]
    try:
        archive = CheckpointReader(path)
        groups = inventory.check(archive)
        # Read, and dropped again: all ranks have to find all whole before anything changes.
        for flat in inventory.flats:
            for key in ("param", *flat.moments):
                inventory.shard(archive, flat, key)
        for name, t in inventory.found.items():
            shape = archive.replicated(comm.rank, name).shape
            if shape != t.shape:
                raise Broken(f"`{name}` is of {tuple(shape)} in the checkpoint, of "
                             f"{tuple(t.shape)} here")
        extra = decode(archive.manifest["extra"])
        states = _random_states_of(archive, comm)
        _check_random_states(states, inventory.device)
    except Exception as error:
        problem = one_line(f"{error}") or repr(error)
    comm.agree(inventory, f"in {path} cannot be loaded", "one of this model and optimizer, as it "
               "was saved", problem, "pass the folder of another one; `python -m zero3.checkpoint "
               "verify` says which are as they were written")
    try:
        inventory.take(archive, groups)
        _set_random_states(states, inventory.device)
    except Exception as error:
        problem = one_line(f"{error}") or repr(error)
    comm.agree(inventory, f"in {path} was whole, and then was not", "files that nobody writes to "
               "while they are loaded", problem, "load it again, or another one: until then the "
               "model has values of both")
    return extra


# ---------------------------------------------------------------------------------- random numbers


def _random_states(device: torch.device) -> dict[str, Any]:
    """
    #### Where each stream of random numbers of this process is
    """
    drawn: Any = np.random.get_state()
    found = {"torch": torch.get_rng_state(), "python": random.getstate(),
             "numpy": (drawn[0], drawn[1].tolist(), *drawn[2:])}
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_rng_state(device)
    return found


def _random_states_of(archive: CheckpointReader, comm: Communicator) -> dict[str, Any]:
    """
    #### What a checkpoint has of them for this rank

    On another number of ranks a seed, which differs between ranks. What came from another format
    has none.
    """
    same = archive.world_size == comm.world_size
    header = archive.files[comm.rank if same else 0].header
    streams = header.get("__metadata__", {}).get("random")
    if streams and same:
        return decode(json.loads(streams))
    return {"seed": zlib.crc32(f"{comm.rank} {streams}".encode())} if streams else {}


def _check_random_states(states: dict[str, Any], device: torch.device) -> None:
    """
    #### Make sure that each stream can be set, by streams that nobody uses

    Raises `Broken` where one cannot.
    """
    try:
        if "torch" in states:
            torch.Generator().set_state(states["torch"])
            random.Random().setstate(states["python"])
            np.random.RandomState().set_state(states["numpy"])
        if "device" in states and device.type != "cpu":
            torch.Generator(device).set_state(states["device"])
    except Exception as error:
        raise Broken(f"a state of random numbers is none: {error!r}") from error


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """
    #### Set each stream of random numbers, or seed it
    """
    if "seed" in states:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(states["seed"])
    if "torch" not in states:
        return
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "device" in states and device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states["device"], device)

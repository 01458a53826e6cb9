r"""
# Checkpoints: save a run, and resume it on any number of ranks

`save` lets each rank write its own shards, and `load` lets each rank read the elements that belong
to its shards now.

**Three weights, saved on two ranks, loaded on three and on four:**

| | rank 0 | rank 1 | rank 2 | rank 3 |
|---|---|---|---|---|
| the shard that a rank saves | 1 2 | 3 0 | | |
| the shard that it loads, on three ranks | 1 | 2 | 3 | |
| the shard that it loads, on four ranks | 1 | 2 | 3 | 0 |

With Adam a parameter has 12 bytes of state: an fp32 master and two moments. On $N$ ranks, and later
on $N'$:

$$\underbrace{\frac{12\Psi}{N}}_{\text{bytes that a rank writes}} \qquad
\underbrace{2 \cdot \frac{12\Psi}{N'}}_{\text{bytes that it reads}}$$

A rank reads everything twice, because it checks the whole checkpoint before it changes the model.
The 16-bit parameters are not saved; they are the masters, rounded.

| saved | place |
|---|---|
| masters and moments; parameters without a master | each rank's file: its shards |
| buffers, frozen parameters outside of layers, random number states | each rank's file: its own |
| number of steps, options of param groups, loss scale, `extra` | the manifest |

**On another number of ranks** a rank may read its elements from several files. Parameters are found
by their names in the plain model, so layers may be wrapped in another way, and a pipeline may have
other stages, or none. The loading model also decides on the tiers and data types.

**Run this**: `make train ARGS="--save-every 100"`. Stop it at any moment, and run it again.

**Not covered, and what that costs**: gradients are not saved, so a save between micro-batches loses
the sums so far. Random numbers continue exactly only on the same number of ranks, with as many in
each stage; otherwise each rank begins a new stream of its own. Ranks that split layers (tensor
parallelism) have one stream together. `extra` is taken from rank 0. With replicas, only the buffers
of the first one are saved.
"""

import json
import operator
import os
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from zero3.checkpoint.entries import Entries, Entry
from zero3.checkpoint.reader import (
    MANIFEST,
    CheckpointReader,
    FlatEntry,
    Manifest,
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
from zero3.comm.collectives import ALONE
from zero3.comm.order import Listener
from zero3.guards.checks import Named, expect, same
from zero3.offload.tensors import Broken, FileEntry, Writer
from zero3.sharded import comm_of
from zero3.whole_model.materialise import agreed


def save(folder: str | Path,
         model: nn.Module,
         optimizer: torch.optim.Optimizer | None = None, *,
         step: int,
         extra: object = None,
         async_write: bool = False,
         keep: int = 2) -> "Saving":
    r"""
    ## Save a checkpoint

    All ranks call this with the same arguments, between a step and the next backward pass. The
    checkpoint `folder/step-...` is complete or does not exist, at every moment (invariant I10).

    * `folder` belongs to this run; it is created if necessary
    * `model` is a `Zero3Sequential`, a wrapped model, a `Pipeline`, or any module with
      `Zero3Layer`s
    * `optimizer` is a `Zero3Optimizer`, or one of torch's on the shards; left out, the weights are
      saved alone
    * `step` is the number of steps taken. Checkpoints of later steps are removed: they are from
      before the run was resumed at an earlier step
    * `extra` is anything else that the run needs, such as the `state_dict()` of a scheduler:
      numbers, strings, tensors, lists, tuples and dicts
    * `async_write` copies everything in memory, $\frac{12\Psi}{N}$ bytes per rank, and returns
      while a thread writes the copies. The checkpoint is complete after a later optimizer step, the
      next `save` or `load`, or `wait()`; call `wait()` before the program ends
    * `keep` is the number of checkpoints to keep, including this one

    Returns a `Saving`, whose `wait()` waits for an asynchronous save.

    Raises `RuntimeError` on all ranks if the checkpoint cannot be saved, if the ranks passed
    different arguments, if another run saves to the folder, or if the previous asynchronous save
    failed and no step has raised its error yet. The older checkpoints are not touched then.
    """
    saving = Saving(all_here("saved", folder, model, optimizer, step, keep, async_write),
                    Path(folder), operator.index(step), operator.index(keep))
    saving.begin(extra, async_write)
    return saving


class _Caller(Named):
    """
    #### Who announces a save or a load to the other ranks
    """

    label = "the checkpoint"
    layer_idx = ALONE
    listener = Listener()


def all_here(done: str,
             folder: str | Path,
             model: nn.Module,
             optimizer: torch.optim.Optimizer | None,
             step: int = 0,
             keep: int = 1,
             async_write: bool = False) -> Entries:
    """
    ## List the contents of a model, check the arguments, and compare those of all ranks

    * `done` is what is to be done with it, "saved" or "loaded"; the rest is as for `save`

    All ranks must call it (all-gather of the arguments). If one rank raises, all do. Afterwards no
    asynchronous save of these ranks is in progress.
    """
    comm = comm_of(model)
    caller = _Caller()
    caller.comm = comm
    if not comm.met:
        # Without a sharded model this rank is about to raise, and the others have to hear of it.
        comm.use(torch.accelerator.current_accelerator() or torch.device("cpu"))
    if not comm.broken:
        # A rank that is in a step hears of it. Otherwise both would wait until the time-out.
        for group in comm.groups:
            comm.begin([group], [caller], "save or load", [], "checkpoint").wait()
    with agreed(caller, f"cannot be {done}", "valid arguments on all ranks",
                "look at the arguments on that rank; nothing has changed"):
        entries = Entries(model, optimizer)
        mine = {"`optimizer`": entries.optimizer_class if optimizer else None,
                "`folder`": os.path.realpath(folder), "`step`": operator.index(step),
                "`keep`": operator.index(keep), "`async_write`": bool(async_write)}
        expect(step >= 0 and keep > 0, "these numbers cannot be", "a `step` of at least 0, and at "
               "least 1 to `keep`", f"{step} and {keep}", "pass these")
    same(f"rank {comm.global_rank}: {caller.label} cannot be {done}", comm.ranks,
         comm.gather(mine), "call it alike on all ranks; nothing has changed")
    last = _LAST_SAVES.pop(comm.ranks, None)
    if last:
        last.hook.close()
        if not last.complete.done():
            last.wait()
    return entries


class Saving:
    """
    ## A checkpoint that is being written
    """

    def __init__(self, entries: Entries,
                 folder: Path,
                 step: int,
                 keep: int):
        self.entries = entries
        self.folder = folder
        self.step = step
        self.keep = keep
        self.partial = partial_path(folder, step)
        # Closes and removes what this save has made, if it fails.
        self.undo = ExitStack()
        self.writer: Writer | None = None  # once it has reserved the disk space
        # Removes the hook of an asynchronous save.
        self.hook = ExitStack()
        # The folder of the checkpoint when all is on the disk, or an error.
        self.complete: Future[Path] = Future()

    def begin(self, extra: object, async_write: bool) -> None:
        """
        ### Reserve the disk space, and write this rank's file or start a thread that writes it

        A full disk is an error before anything is written, because all ranks reserve space first.
        """
        if self.entries.owners is not None:
            self.entries.spread = self.entries.owners.spread()
        with self._on_all_ranks():
            described = self._prepare(extra)
        self.manifest |= self.entries.manifest(described)
        # One replica writes. The others have the same shards; their own buffers are not saved.
        listed = (self.entries.entries(self.manifest) if self.entries.comm.replicas.rank == 0
                  else [])
        # The random number states of each replica of this shard (all-gather).
        streams = self.entries.comm.replicas.gather(
            json.dumps(encode(_random_states(self.entries.device))))
        with self._on_all_ranks():
            if listed:
                self._open_file(listed, streams)
        with self._on_all_ranks():
            copies = self._write_now(listed, async_write)
        worker = ThreadPoolExecutor(1, "zero3-checkpoint")
        self.written = worker.submit(self._write_rest, copies)
        worker.shutdown(wait=False)
        if async_write:
            _LAST_SAVES[self.entries.comm.ranks] = self
            if self.entries.optimizer is not None:
                handle = self.entries.optimizer.register_step_pre_hook(self._end_if_done)
                self.hook.callback(handle.remove)
        else:
            self.wait()

    def _prepare(self, extra: object) -> list[FlatEntry]:
        """
        #### Create the folder on rank 0, and describe this rank's model and optimizer
        """
        self.manifest: Manifest = {"step": self.step, "extra": encode(extra),
                                   "optimizer": self.entries.options()}
        if self.entries.comm.is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            # Without the lock, the cleaning could remove another run's files.
            lock_folder(self.folder)
            clean_up_interrupted_saves(self.folder)
            self.partial.mkdir()
            # Not before: a folder that this save did not create belongs to another run.
            self.undo.callback(self._remove_partial)
        return self.entries.describe()

    def _remove_partial(self) -> None:
        """
        #### Remove the folder of a save that has failed

        A folder with a manifest is a checkpoint already, and `clean_up_interrupted_saves` renames
        it.
        """
        if not (self.partial / MANIFEST).exists():
            shutil.rmtree(self.partial, ignore_errors=True)

    def _open_file(self, listed: list[Entry], streams: list[str]) -> None:
        """
        #### Reserve the space of this rank's file
        """
        name = file_name(self.entries.file_number,
                         self.manifest["places"] * self.manifest["world_size"])
        self.writer = self.undo.enter_context(Writer(
            self.partial / name,
            like={entry.name: (entry.dtype, entry.shape)
                  for entry in listed},
            metadata={_random_key(replica): states
                      for replica, states in enumerate(streams)}))

    def _write_now(self, listed: list[Entry], async_write: bool) -> list[torch.Tensor]:
        """
        #### Write tensors, and return copies of those that a thread is to write
        """
        now = len(listed)
        if async_write:
            # Write up to the last tensor from a file now: only the others are copied.
            now = 1 + max((i for i, e in enumerate(listed) if not e.in_memory), default=-1)
        for values in self.entries.tensors(listed[:now]):
            assert self.writer, "a rank without a file has no tensors to write"
            self.writer.write(values)
        return [values.detach().to("cpu", copy=True)
                for values in self.entries.tensors(listed[now:])]

    def _write_rest(self, copies: list[torch.Tensor]) -> FileEntry | None:
        """
        #### Write the copies, and force the file to disk (in a thread)
        """
        if self.writer is None:
            return None
        with self.writer as writer:
            while copies:
                writer.write(copies.pop(0))
            return writer.finish()

    def _end_if_done(self, *_) -> None:
        """
        #### End the save if no rank is writing any more

        A hook that runs before every optimizer step (all-gather of a flag).
        """
        # The hook cannot remove itself, because torch is iterating over the hooks.
        if not self.complete.done() and all(self.entries.comm.gather(self.written.done())):
            self.wait()

    def wait(self) -> Path:
        """
        ### Wait until the checkpoint is complete, and return its folder

        All ranks must call it. Raises `RuntimeError` on all ranks if one of them could not write.
        """
        if not self.complete.done():
            with self._on_all_ranks():
                file = self.written.result()
            # The manifest lists the length and the checksums of each file (all-gather).
            every = sorted(self.entries.comm.gather((self.entries.file_number, file)),
                           key=operator.itemgetter(0))
            self.manifest["files"] = [each for _, each in every if each]
            with self._on_all_ranks():
                self._commit()
            self.complete.set_result(self.partial.with_suffix(""))
            # Let go of the model: `_LAST_SAVES` and the hook keep this object.
            del self.entries
        return self.complete.result()

    def _commit(self) -> None:
        """
        #### Make the folder a checkpoint, and remove the oldest ones (on rank 0)
        """
        if self.entries.comm.is_first:
            commit_checkpoint(self.partial, self.manifest)
            # If one cannot be removed now, the next save tries again.
            with suppress(OSError):
                for path in [*steps(self.folder).values()][: -self.keep]:
                    remove(path)

    @contextmanager
    def _on_all_ranks(self) -> Iterator[None]:
        """
        #### Leave the block on all ranks; if one has raised, clean up, and raise an error on all
        """
        try:
            with agreed(
                    self.entries, f"of step {self.step} cannot be saved to {self.folder}",
                    "a folder with room to write to, and an `extra` of numbers, strings, tensors, "
                    "lists and dicts", "make room, or choose another folder; the older checkpoints "
                    "are not touched"):
                yield
        except RuntimeError as error:
            # `wait` raises it again.
            self.complete.set_exception(error)
            self.undo.close()
            del self.entries
            raise


# The last asynchronous save by these ranks. A program may load it into a model that is built anew.
_LAST_SAVES: dict[tuple[int, ...], Saving] = {}


def load(folder: str | Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
         ) -> Any:
    """
    ## Load a checkpoint

    All ranks call this with the same arguments, between steps, on any number of ranks.

    * `folder` is a run's, to load its newest checkpoint, or the folder of one checkpoint
    * `model` and `optimizer` have the same parameters as the saved ones. Without an optimizer the
      weights are loaded alone

    Returns the `extra` that was saved.

    Raises `RuntimeError` on all ranks if there is no checkpoint, or if it is damaged or of another
    model. The model and the optimizer are unchanged then. Keeps I5 and I10.
    """
    entries = all_here("loaded", folder, model, optimizer)
    # Rank 0 chooses, because other machines may see an older state of a shared folder.
    path = Path(folder)
    with suppress(OSError):
        # `CheckpointReader` has the better error message.
        path = newest(path) or path
    return load_from(entries.comm.gather(path)[0], entries, CheckpointReader)


def load_from(path: Path,
              entries: Entries,
              read: Callable[[Path], CheckpointReader]) -> object:
    """
    ## Load a checkpoint of any format

    * `entries` is the result of `all_here`
    * `read` opens the folder `path`

    Returns and raises as `load`.
    """
    everywhere = entries.tensor_names()
    with agreed(entries, f"in {path} cannot be loaded", "an intact checkpoint of this model "
                "and optimizer", "pass the folder of another one; `python -m "
                "zero3.checkpoint verify` tells which ones of `zero3.save` are intact"):
        checkpoint = read(path)
        groups = entries.check(checkpoint, everywhere)
        # Read this rank's shards and buffers, to find damage before anything changes. All ranks
        # together read every moment, also those that an owner will load whole.
        for flat in entries.flats:
            moments = {key for own in flat.params for key in own.found.states["moments"]}
            for key in ("param", *sorted(moments)):
                entries.shard(checkpoint, flat, key, slice(0, len(flat.parameter.shard)))
        for name, tensor in entries.found.items():
            shape = checkpoint.replicated(entries.comm.rank, name).shape
            Broken.unless(shape == tensor.shape, f"`{name}` is of {tuple(shape)} in the "
                          f"checkpoint, of {tuple(tensor.shape)} here")
        extra = decode(checkpoint.manifest["extra"])
        # Other formats have no such states.
        states = _random_states_of(checkpoint, entries) if checkpoint.files else {}
        _check_random_states(states, entries.device)
    with agreed(entries, f"in {path} was whole, and then was not", "files that nobody writes "
                "to during a load", "load it again, or another one: until then the model has "
                "old and new values"):
        entries.take(checkpoint, groups)
    # Last, because nothing may draw a number afterwards.
    _set_random_states(states, entries.device)
    return extra


# ---------------------------------------------------------------------------------- random numbers


def _random_states(device: torch.device) -> dict[str, object]:
    """
    #### The state of each random number generator of this process
    """
    drawn: Any = np.random.get_state()
    found: dict[str, object] = {
        "torch": torch.get_rng_state(), "python": random.getstate(),
        "numpy": (drawn[0], drawn[1].tolist(), *drawn[2:])}
    if device.type != "cpu":
        found["device"] = torch.get_device_module(device).get_rng_state(device)
    return found


def _random_states_of(checkpoint: CheckpointReader, entries: Entries) -> dict[str, object]:
    """
    #### This rank's random number states from a checkpoint
    """
    comm = entries.comm
    same = (checkpoint.manifest["places"] == comm.stages.size
            and checkpoint.world_size == comm.world_size)
    # Ranks that split the same layers have to draw the same numbers: all read the first one's file.
    number = comm.rank if comm.stages.same_layers else entries.file_number
    found = checkpoint.files[number if same else 0].header.get("__metadata__", {})
    own = found.get(_random_key(comm.replicas.rank))
    if own and same:
        return decode(json.loads(own))
    streams = found.get(_random_key(0))
    seed = zlib.crc32(f"{comm.replicas.rank} {number} {streams}".encode())
    return {"seed": seed} if streams else {}


def _random_key(replica: int) -> str:
    """
    #### The key of a replica's random number states, in the header of its shard's file
    """
    return f"random.{replica}" if replica else "random"


def _check_random_states(states: dict[str, object], device: torch.device) -> None:
    """
    #### Make sure that the states are valid: set them, and set this process's own again
    """
    own = _random_states(device)
    try:
        _set_random_states(states, device)
    except Exception as error:
        raise Broken(f"a random number state is not valid: {error!r}") from error
    finally:
        _set_random_states(own, device)


def _set_random_states(states: dict[str, Any], device: torch.device) -> None:
    """
    #### Set or seed the random number generators of this process
    """
    if "seed" in states:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(states["seed"])
    if "torch" in states:
        torch.set_rng_state(states["torch"])
        random.setstate(states["python"])
        np.random.set_state(states["numpy"])
        if "device" in states and device.type != "cpu":
            torch.get_device_module(device).set_rng_state(states["device"], device)

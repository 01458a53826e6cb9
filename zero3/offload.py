r"""
# Offload: where a shard rests

`Offload` lets shards rest on the device, in CPU memory or in files, and brings them back while
something else computes.

A rank needs a shard twice in a step to gather it, and once to update it; optimizer states it needs
once. In between they may lie where memory is cheaper, as long as they are back in time. A *tier* is
such a place: the device that computes, CPU memory (pinned, so that a GPU copies it by itself while
it computes), or files on an NVMe disk. What travels from and to files goes through a few buffers,
made while the model is built and then used again and again. So what rests in files costs no memory
but theirs:

$$\text{buffers} = 2 \cdot \text{largest shard} \; + \; 5 \cdot \text{largest states of a shard}$$

The papers are [ZeRO-Offload](https://arxiv.org/abs/2101.06840) for the CPU and
[ZeRO-Infinity](https://arxiv.org/abs/2104.07857) for NVMe. Which bandwidth is enough, and which
tier a model needs, is what `estimate.py` answers.

| | the file is | the page cache |
|---|---|---|
| `direct=False` | mapped into memory; reading it is copying a tensor | holds it a second time |
| `direct=True` | read and written past the cache, in blocks, by a few threads | is left alone |

The first way is the one to understand, the second the one to use. `disk.py` has both behind one
call, so that nothing here tells them apart; `InFile` makes of it `read_async`, `wait` and
`write_async`.

**Run this**: `python -m zero3.offload bench --folder DIR` measures a disk both ways; `make train
ARGS="--offload-params nvme --offload-optimizer nvme"` trains from files.

**Not covered, and what that costs**: a shard in files has a file of its own, which stays open, so
there are as many shards as the system's hard limit on open files allows (`ulimit -Hn`), less a few.
Files are scratch and end with the run, so a run that is cut off begins again. They have no name in
their folder from the moment they are made: the system gives their space back however the run ends,
nobody else opens them, and several runs may share a folder; but `ls` does not show them, `df` does.
Activations stay where they are computed. A shard in a file has no elements that an optimizer of
torch's could step: that takes `Zero3Optimizer`. Whole layers are freed and made again all the time,
and glibc keeps some of such memory for itself, in pieces; where that is too much,
`MALLOC_MMAP_THRESHOLD_=131072` in the environment makes it give all back, at some cost in speed. On
an accelerator, gradients on their way to CPU memory, and there until `zero_grad()`, are in torch's
pinned memory, which rounds each up to a power of two: up to twice the bytes that are predicted for
them.
"""

import concurrent.futures
import errno
import mmap
import os
import resource
import shutil
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero3.files.disk import (
    ALIGN_BYTES,
    SPARE_FILES,
    File,
    aligned,
    allow_more_files,
    whole_blocks,
)
from zero3.guards.freed import FreedParameter
from zero3.guards.options import expect, whole

TIERS = ("device", "cpu", "nvme")
@dataclass(eq=False)
class Offload:
    """
    ## A tier, and what it has in use

    Pass one object to all layers of a model, so that they share its buffers. The optimizer may have
    the same one, or another.

    * `tier` is "device", "cpu" or "nvme"
    * `folder` is where files go, on a disk of this machine; each rank has files of its own
    * `max_in_cpu` bytes of a rank, shards and states as they come, stay in CPU memory; what does
      not fit goes to files. Of the nvme tier alone; buffers come on top
    * `direct` reads and writes past the page cache, where the file system lets it
    * `queue_depth` requests are with the disk at once, from as many threads; for parameters and for
      states each
    * `block_bytes` are in a request
    * `buffers` is how many shards' optimizer states are in memory at once

    Whatever takes an `Offload` also takes the name of a tier that needs no folder: `offload="cpu"`.

    Raises `ValueError` where these do not fit together. ZeRO-Infinity, section 5. Keeps I8.
    """

    tier: str = "device"
    folder: str | os.PathLike | None = None
    max_in_cpu: int = 0
    direct: bool = True
    queue_depth: int = 4
    block_bytes: int = 8 << 20
    buffers: int = 5
    stores: dict[str, "Store"] = field(default_factory=dict, init=False, repr=False)
    in_cpu_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        place = isinstance(self.folder, (str, os.PathLike)) and bool(os.fspath(self.folder))
        for good, expected, got, cure in (
            (self.tier in TIERS, f"a tier of {TIERS}", repr(self.tier), "pass one of them"),
            (place if self.tier == "nvme" else self.folder is None, "a folder with the nvme tier, "
             "and with no other", f"tier {self.tier!r}, folder {self.folder!r}",
             '`Offload("nvme", folder="/mnt/nvme")`, or leave the folder out'),
            (whole(self.max_in_cpu), "`max_in_cpu`, bytes in CPU memory, at least 0",
             repr(self.max_in_cpu), "pass a whole number"),
            (isinstance(self.direct, bool), "`direct`, True or False", repr(self.direct),
             "pass one of the two"),
            # Each is a thread, and has a block of a buffer.
            (whole(self.queue_depth, 1, 256), "`queue_depth`, 1 to 256 requests at once",
             repr(self.queue_depth), "pass a whole number"),
            (whole(self.buffers, 3, 1024), "`buffers`, 3 to 1024: to read into, to step and to "
             "write from", repr(self.buffers), "pass a whole number"),
            # The system moves less than 2 GiB in a request.
            (whole(self.block_bytes, ALIGN_BYTES, 1 << 30)
             and self.block_bytes % ALIGN_BYTES == 0, "`block_bytes`, a multiple of "
             f"{ALIGN_BYTES} up to 1 GiB", repr(self.block_bytes), "pass such a number"),
        ):
            expect(good, "Offload", expected, got, cure)

    @classmethod
    def of(cls, offload: "Offload | str | None") -> "Offload":
        """
        ### What was passed as `offload`

        * `offload` is one already, the name of a tier, or nothing, which is the device

        Raises `ValueError` for anything else, and for the nvme tier's name, because files need a
        folder.
        """
        if isinstance(offload, cls):
            return offload
        tier: Any = "device" if offload is None else offload
        return cls(tier)

    def place(self, nbytes: int) -> str:
        """
        ### The tier for the next so many bytes, which count against `max_in_cpu`
        """
        if self.tier == "nvme" and self.in_cpu_bytes + nbytes <= self.max_in_cpu:
            self.in_cpu_bytes += nbytes
            return "cpu"
        return self.tier

    def check(self, owner: Any, what: str, nbytes: int, at: torch.device) -> None:
        """
        ### Look whether there is memory, before it is taken

        Each rank asks for itself: ranks that share a machine may pass, and still be too many.
        Raises `RuntimeError` on all ranks if one has too little, and says which tier would do.
        """
        left_bytes, cpu = room(at), torch.device("cpu")
        problem = f"{left_bytes:,} bytes left" if left_bytes < nbytes else ""
        cure = "the nvme tier would do: `offload=Offload('nvme', folder=...)`"
        if self.tier == "nvme":
            cure = "more ranks, smaller layers or more memory; nothing rests there that need not"
        elif at != cpu and room(cpu) > nbytes:
            cure = "the cpu tier would do: `offload=Offload('cpu')`"
        owner.comm.agree(owner, f"has no room for {what}", f"{nbytes:,} bytes on {at}", problem,
                         cure)

    def shard(self, owner: Any, values: torch.Tensor, trains: bool) -> "InMemory | InFile":
        """
        ### Put a layer's shard where it shall rest

        * `values` are `(shard_numel,)`, on the device

        All ranks call it alike. Raises `RuntimeError` where memory or disk are too small.
        """
        # In backward it is whole, one as large below it too, and its gradient; and by messages an
        # receive_buffer.
        wholes = (3 + owner.comm.by_messages) * owner.comm.world_size
        self.check(owner, "a step", wholes * values.nbytes, owner.device)
        tier = self.place(values.nbytes)
        if tier == "nvme":
            # One is read into while another is copied from; a layer may have more shards at once.
            store = self.store("params", owner, max(2, len(owner.flats) + 1))
            storage = InFile(store, owner, {"shard": values})
            storage.become_parameter(owner, values, trains)
            storage.replace(values)
            return storage
        if tier == "cpu" and owner.device.type != "cpu":
            self.check(owner, "its shard", values.nbytes, torch.device("cpu"))
            values = copy_to(torch.device("cpu"), values, values.dtype, owner.device)
        return InMemory(nn.Parameter(values, trains), tier)

    def store(self, purpose: str, owner: Any, buffers: int) -> "Store":
        """
        ### The files and buffers for one purpose, opened with the first use
        """
        if purpose not in self.stores:
            self.stores[purpose] = Store(self, owner)
        store = self.stores[purpose]
        store.buffers = max(store.buffers, buffers)
        return store

    def memory(self) -> list[torch.Tensor]:
        """
        ### What the ledger counts: the memory of all buffers
        """
        return [memory for store in self.stores.values() for memory in store.memory]


class Store:
    """
    ## The files of one rank, and the buffers between them and everything else

    A buffer holds the largest shard, rounded up to whole blocks of the disk. There are as many as
    are in use at once and no more, so who wants one may have to wait until a write is done.
    """

    def __init__(self, offload: Offload, owner: Any):
        self.offload, self.buffers, self.buffer_bytes = offload, 0, 0
        # Pinned memory, if an accelerator shall copy from it.
        self.take_memory = partial(pinned, owner.device) if owner.device.type != "cpu" else None
        self.event = torch.get_device_module(owner.device).Event
        self.memory: list[torch.Tensor] = []  # all buffers
        self.free: list[tuple[torch.Tensor, Any]] = []  # with the event after which it may be used
        self.lent: list[InFile] = []  # to whom, the latest used last
        self.files: weakref.WeakSet[File] = weakref.WeakSet()
        self.workers = concurrent.futures.ThreadPoolExecutor(offload.queue_depth, "zero3-offload")

    def file(self, owner: Any, nbytes: int) -> File:
        """
        ### Make a file, or say on all ranks why not

        All of its space is taken now: a disk that is too small says so before training starts.
        Raises `RuntimeError` on all ranks.
        """
        folder, made, problem = Path(str(self.offload.folder)), None, ""
        try:
            made = File(folder, nbytes, self.offload.direct)
            self.files.add(made)
            if allow_more_files(made.fd) < SPARE_FILES:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        except (OSError, RuntimeError) as error:
            # torch raises the latter where it cannot map a file.
            problem = f"{error}"
            if getattr(error, "errno", None) == errno.ENOSPC:
                problem += f" with {shutil.disk_usage(folder).free:,} bytes left"
            if os.strerror(errno.EMFILE) in problem:
                most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
                problem = (f"{len(self.files) - 1} shards in files so far, and a limit of {most} "
                           "files for all that the process opens (`ulimit -Hn`)")
        owner.comm.agree(owner, f"cannot offload to {folder}", f"a folder that takes {nbytes:,} "
                         "bytes more from each rank", problem, "make the folder, let this user "
                         "write to it, choose one on a larger disk, or raise the limit on open "
                         "files (`ulimit -n`) before the start")
        return made  # type: ignore[return-value]

    def take(self, user: "InFile") -> torch.Tensor:
        """
        ### Lend a buffer: `(buffer_bytes,)` uint8, aligned

        If none is free, of those that nobody looks into the one that was used longest ago comes
        back, after its write is done.
        """
        if self.buffer_bytes < user.nbytes or len(self.memory) < self.buffers:
            self._grow(user)
        if not self.free:
            next(lender for lender in self.lent if not lender.held).release()
        buffer, event = self.free.pop(0)
        event.synchronize()
        return buffer

    def _grow(self, user: "InFile") -> None:
        """
        #### Make the buffers, as large as the largest shard

        While a model is built, each shard larger than those before it brings new ones. Nobody looks
        into the old ones meanwhile.
        """
        for lender in [*self.lent]:
            lender.release()
        self.buffer_bytes = max(self.buffer_bytes, user.nbytes)
        self.free.clear()
        self.memory.clear()
        for _ in range(self.buffers):
            memory, buffer = aligned(self.buffer_bytes, self.take_memory)
            self.memory.append(memory)
            self.free.append((buffer, self.event()))
        user.record("buffers", sum(memory.nbytes for memory in self.memory))


@dataclass
class InMemory:
    """
    ## A shard that rests on the device or in CPU memory

    It is where it is used, or where the device copies it from.
    """

    param: nn.Parameter  # (shard_numel,)
    tier: str

    def read_async(self) -> None:
        """
        ### Nothing has to come
        """

    def load(self) -> torch.Tensor:
        """
        ### The shard: `(shard_numel,)`
        """
        return self.param.detach()

    def save(self) -> None:
        """
        ### What was written is where it rests
        """

    def replace(self, values: torch.Tensor) -> None:
        """
        ### Take over these values, rounded
        """
        self.param.detach().copy_(values)

    def release(self, stream: Any = None) -> None:
        """
        ### Nothing was lent
        """


class InFile:
    """
    ## Tensors that rest in a file

    They lie one after the other, each from the beginning of a block, in the file as in the buffer
    that they come into. There may be several, so that what is used together is read in one go. What
    is in the buffer still is not read again.

    | | buffer | when |
    |---|---|---|
    | `read_async` | lent, and being read into | while layers or shards before it have their turn |
    | `wait` | here, and held | the layer is gathered, or the shard is stepped |
    | `write_async` | being written from | the shard is stepped |
    | `release`, or somebody else needs it | given back | what moves has arrived |
    """

    tier = "nvme"

    def __init__(self, store: Store, owner: Any, like: dict[str, torch.Tensor]):
        """
        ### Take space in a file

        * `owner` is the layer whose they are
        * `like` has a tensor of the length and data type of each
        """
        # Weak: a store, whose buffers this may have when its model goes, holds on to it.
        self.store, self.owner = store, weakref.ref(owner)
        self.where: dict[str, tuple[int, int, torch.dtype]] = {}  # offset, bytes, data type
        self.nbytes = 0
        for name, tensor in like.items():
            self.where[name] = (self.nbytes, tensor.nbytes, tensor.dtype)
            self.nbytes += whole_blocks(tensor.nbytes)
        self.file = store.file(owner, self.nbytes)
        self.file.users.append(self)
        self.param: Any = None
        self.buffer: torch.Tensor | None = None
        self.present: set[str] = set()  # what of it has been read, or will have been
        self.held = False  # somebody looks into the buffer
        self.moving: dict[str, list[concurrent.futures.Future]] = {"read": [], "write": []}

    def read_async(self, *names: str) -> None:
        """
        ### Begin to read these tensors, or all

        Does not wait for the reading; it may wait for a buffer, or for a write to this file.
        """
        self._borrow()
        missing = [name for name in names or self.where if name not in self.present]
        if missing:
            for user in self.file.users:
                # What another is writing is not in the file yet.
                user._end("write")
            self._start("read", missing)

    def wait(self, *names: str) -> dict[str, torch.Tensor]:
        """
        ### Wait until these tensors are here, or all: views of the buffer, by name

        They may be written to. The buffer stays until `write_async` or `release`.
        """
        self.read_async(*names)
        return self._views()

    def blank(self, *names: str) -> dict[str, torch.Tensor]:
        """
        ### The same without reading, to be filled
        """
        self._borrow()
        self.present.update(names)
        return self._views()

    def write_async(self, *names: str) -> None:
        """
        ### Begin to write these tensors

        Does not wait for the writing. The buffer may go when that is done.
        """
        self._start("write", names)
        self.held = False
        for user in self.file.users:
            if user is not self:
                # What it has read ahead is no longer what the file says.
                user.release()

    def release(self, stream: Any = None) -> None:
        """
        ### Give the buffer back

        Once what moves has arrived; and `stream`, where given, has copied it.
        """
        if self.buffer is not None:
            self._end("read")
            self._end("write")
            event = self.store.event()
            if stream is not None:
                event.record(stream)
            self.store.free.append((self.buffer, event))
            self.store.lent.remove(self)
            self.buffer, self.held = None, False
            self.present.clear()

    def share(self, file: File) -> None:
        """
        ### Rest in another file from now on, at its beginning
        """
        self.release()
        self.file = file
        file.users.append(self)

    @torch.no_grad()
    def become_parameter(self, owner: Any, values: torch.Tensor, trains: bool) -> None:
        """
        ### A parameter without elements, for whoever asks what there is to train
        """
        ghost = torch.empty(len(values), dtype=values.dtype)
        ghost.untyped_storage().resize_(0)
        self.param = nn.Parameter(ghost, trains)
        self.param.__class__ = FreedParameter.named(
            owner, "shard", "it rests in a file: look at it in `full_params()`, and step it with "
            "`Zero3Optimizer`", is_shard=True)

    def load(self) -> torch.Tensor:
        """
        ### The shard, in a buffer: `(shard_numel,)`
        """
        return self.wait("shard")["shard"]

    def save(self) -> None:
        """
        ### Write the shard back
        """
        self.write_async("shard")
        # Forgotten, so that each unshard reads, whichever buffer happened to be free.
        self.present.clear()
        torch.autograd.graph.increment_version(self.param)

    def replace(self, values: torch.Tensor) -> None:
        """
        ### Take over these values, rounded, without reading what was there
        """
        self.blank("shard")["shard"].copy_(values)
        self.save()

    def record(self, event: str, nbytes: int) -> None:
        if owner := self.owner():
            owner.listener.record(owner, event, nbytes, tier=self.tier)

    def _borrow(self) -> None:
        """
        #### Have a buffer, and be the last to give it back
        """
        if self.buffer is None:
            self.buffer = self.store.take(self)
        else:
            self.store.lent.remove(self)
        self.store.lent.append(self)

    def _views(self) -> dict[str, torch.Tensor]:
        self._end("read")
        # Or what is about to change would be changed under the eyes of the writing threads.
        self._end("write")
        self.held, buffer = True, self.buffer
        return {name: buffer[first : first + nbytes].view(dtype)  # type: ignore[index]
                for name, (first, nbytes, dtype) in self.where.items()}

    def _start(self, event: str, names: Iterable[str]) -> None:
        """
        #### Hand blocks to the threads

        Of all between the first and the last of these tensors, which are neighbours.
        """
        spans = [self.where[name][:2] for name in names]
        begin, end = spans[0][0], spans[-1][0] + whole_blocks(spans[-1][1])
        block, buffer = self.store.offload.block_bytes, self.buffer
        self.moving[event] += [
            self.store.workers.submit(self.file.move, event == "write",
                                      buffer[at : min(at + block, end)], at)  # type: ignore[index]
            for at in range(begin, end, block)]
        self.present.update(names)
        self.record(event, end - begin)

    def _end(self, event: str) -> None:
        """
        #### Wait for what moves

        Raises `RuntimeError` where a block did not arrive, as `Communicator.fail` does. Nothing goes on
        after that, so nobody uses a file that is half written.
        """
        if self.moving[event]:
            concurrent.futures.wait(self.moving[event])
            for block in self.moving[event]:
                if (error := block.exception()) and (owner := self.owner()):
                    owner.comm.fail(
                        owner, f"could not {event} what rests in a file",
                        f"{self.nbytes:,} bytes in {self.store.offload.folder}", error,
                        "look after the disk, and start again")
            self.moving[event] = []
            self.record({"read": "arrived", "write": "written"}[event], 0)


def copy_to(at: torch.device, values: torch.Tensor, dtype: torch.dtype,
            device: torch.device) -> torch.Tensor:
    """
    ## A copy, `(n,)`, elsewhere or of another data type

    In CPU memory it is pinned, where there is a `device` that can copy from there by itself.
    """
    if at.type == "cpu" and device.type != "cpu":
        return pinned(device, len(values) * dtype.itemsize).view(dtype).copy_(values)
    return torch.empty(len(values), dtype=dtype, device=at).copy_(values)


class _Pages(mmap.mmap):
    """
    ## Memory of the system's that an accelerator may read and write by itself

    Until it goes, and that is before the system has it back.
    """

    registered: Any = None  # the device's module, and the address

    def __del__(self) -> None:
        if self.registered is not None and not sys.is_finalizing():
            backend, address = self.registered
            # A copy may still be on its way.
            backend.synchronize()
            backend.cudart().cudaHostUnregister(address)


def pinned(device: torch.device, nbytes: int) -> torch.Tensor:
    """
    ## Pinned CPU memory for a device: `(nbytes,)` uint8

    Exactly as much. torch's own pinned memory is rounded up to a power of two, so a shard of 1.1
    GiB would take 2. Here the system gives pages, and the device is told of them
    (`cudaHostRegister`). That takes long, so it is for what stays: shards, masters, buffers of
    files. A device that cannot be told gets torch's.
    """
    backend: Any = torch.get_device_module(device)
    if nbytes and hasattr(backend, "cudart"):
        pages = _Pages(-1, nbytes)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        address = memory.data_ptr()
        if int(backend.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
            pages.registered = backend, address
            return memory
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def room(at: torch.device) -> int:
    """
    ## Bytes of memory that this process can still get

    On an accelerator, what is free there, and what torch keeps of it for the next tensor. On the
    CPU, the least of what the machine has available and of what limits leave: `ulimit -d`, `ulimit
    -v` and a container's control group, whose page cache can go.
    """
    if at.type != "cpu":
        device = torch.get_device_module(at)
        kept = device.memory_reserved(at) - device.memory_allocated(at)
        return device.mem_get_info(at)[0] + kept
    left, kib = [1 << 62], {}
    for name in ("/proc/self/status", "/proc/meminfo"):
        if os.path.exists(name):
            rows = (line.split() for line in Path(name).read_text().splitlines())
            kib.update({row[0]: int(row[1]) << 10 for row in rows if row[-1] == "kB"})
    left.append(kib.get("MemAvailable:", left[0]))
    for limit, used in ((resource.RLIMIT_DATA, "VmData:"), (resource.RLIMIT_AS, "VmSize:")):
        soft = resource.getrlimit(limit)[0]
        left += [soft - kib.get(used, 0)] if soft != resource.RLIM_INFINITY else []
    for folder, most, used in (("", "memory.max", "memory.current"),
                               ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            told = [Path("/sys/fs/cgroup", folder, name).read_text()
                    for name in (most, used, "memory.stat")]
            cached = dict(line.split() for line in told[2].splitlines())
            free = int(told[0]) - int(told[1])
            left.append(free + int(cached["active_file"]) + int(cached["inactive_file"]))
        except (OSError, ValueError, KeyError):
            # No such group, or no limit.
            continue
    return max(0, min(left))


if __name__ == "__main__":
    # Imported here: a training run has no use for the command line.
    from zero3.files.bench import main

    main()

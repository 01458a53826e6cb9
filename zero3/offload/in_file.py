r"""
# Tensors in a file

`InFile` keeps tensors in a file, and reads them into a buffer while something else computes.
`Buffers` are those that all files of a rank share.

Three layers whose shards rest in files, with two buffers:

| moment | buffer 1 | buffer 2 |
|---|---|---|
| layer 0 is gathered | holds shard 0 | reads shard 1 |
| layer 1 is gathered | reads shard 2 | holds shard 1 |
| layer 2 is gathered | holds shard 2 | reads shard 1, for backward |

Files cost no other memory than the buffers. With one block more, each can begin at a block:

$$\text{buffers} = \text{number} \cdot (\text{the largest file, in whole blocks} + 4096)$$

**Run this**: `make train ARGS="--offload-params nvme --offload-optimizer nvme"` draws reads and
writes in `tape.png`.

**Not covered, and what that costs**: files are scratch and have no name, so the system frees their
space however the run ends. `ls` does not show them, `df` does.
"""

import concurrent.futures
import errno
import os
import resource
import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from zero3.flat import Storage, in_flight
from zero3.guards.checks import Guarded
from zero3.offload.disk import ALIGN_BYTES, File, aligned, whole_blocks

# Files that stay free, for a checkpoint for instance.
SPARE_FILES = 32
# Blocks that threads are reading or writing.
Blocks = list[concurrent.futures.Future]


class Buffers:
    """
    ## The buffers between the files of one rank and everything else
    """

    def __init__(self, folder: str | os.PathLike | None,
                 direct: bool,
                 queue_depth: int,
                 block_bytes: int,
                 take_memory: Callable[[int], torch.Tensor],
                 owner: Guarded):
        """
        ### Start the threads that read and write

        * `take_memory` allocates so many bytes for a buffer
        * `owner` is a layer, whose device copies from the buffers
        """
        self.folder = Path(str(folder))
        self.direct = direct
        self.block_bytes = block_bytes
        self.number = 0
        self.buffer_bytes = 0
        self.take_memory = take_memory
        backend = torch.get_device_module(owner.device)
        self.event = backend.Event
        self.memory: list[torch.Tensor] = []  # all buffers
        # Buffers that nobody has, each with the event after which it may be used.
        self.free: list[tuple[torch.Tensor, torch.Event]] = []
        self.borrowers: list[InFile] = []  # the one that used its buffer last is at the end
        self.files: weakref.WeakSet[File] = weakref.WeakSet()
        self.idle: list[File] = []  # those that `take` may hand out again
        # Of each thread, a block that is aligned. Not in `memory`: only activations need it, and a
        # `Ledger` leaves them out.
        self.own = threading.local()
        # Threads wait for events. A thread that has chosen no GPU would open the first one for it.
        self.workers = concurrent.futures.ThreadPoolExecutor(
            queue_depth, "zero3-offload",
            partial(backend.set_device, owner.device))

    def new_file(self, owner: Guarded, nbytes: int) -> File:
        """
        ### Make a file, or say on all ranks why not

        Raises `RuntimeError` on all ranks.
        """
        problem = ""
        try:
            made = self.make_file(nbytes)
        except OSError as error:
            problem = f"{error}"
        owner.comm.agree(owner, f"cannot offload to {self.folder}",
                         f"a folder that takes {nbytes:,} "
                         "bytes more from each rank", problem, "make the folder, let this user "
                         "write to it, choose one on a larger disk, or raise the hard limit "
                         "on open files (`ulimit -Hn`) before the start")
        # After an error, `agree` has raised.
        return made

    def make_file(self, nbytes: int) -> File:
        """
        ### Make a file, or raise `OSError` on this rank alone

        Once about half of the limit on open files is taken, it is raised.
        """
        made = File(self.folder, nbytes, self.direct)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        # The system hands out the lowest free number, so it says how many files are open.
        if 2 * made.fd + SPARE_FILES >= soft and soft < hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        if soft - made.fd < SPARE_FILES:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.files.add(made)
        return made

    def take(self, nbytes: int) -> File:
        """
        ### A file of at least `nbytes`, which may be one that was given back

        Raises `OSError` if the disk is full. What rests in other files is not touched.
        """
        file = min((each for each in self.idle if each.nbytes >= nbytes),
                   key=lambda each: each.nbytes, default=None)
        if file:
            self.idle.remove(file)
            # The activation that was there is gone, and a thread may still write it.
            concurrent.futures.wait(file.moving)
            return file
        if self.idle:
            # Give its space back, before a larger file takes more.
            self.idle.remove(max(self.idle, key=lambda file: file.nbytes))
        return self.make_file(nbytes)

    def start(self, file: File,
              write: bool,
              memory: torch.Tensor,
              at: int,
              after: torch.Event | None = None) -> Blocks:
        """
        ### Hand memory to the threads, block by block

        * `memory` is `(bytes,)` uint8, which is read or written `at` so many bytes in the file. To
          be read into, it is whole aligned blocks
        * `after` is the event after which it may be written from
        """
        blocks = [self.workers.submit(self.move, file, write, [block], at + i * self.block_bytes,
                                      after)
                  for i, block in enumerate(memory.split(self.block_bytes))]
        file.moving = [block for block in file.moving if not block.done()] + blocks
        return blocks

    def move(self, file: File,
             write: bool,
             box: list[torch.Tensor],
             at: int,
             after: torch.Event | None) -> None:
        """
        ### Read or write a block, in a thread

        * `box` has the block, because a thread drops its arguments a moment after it is done, and
          the memory may have to be free by then
        """
        block = box.pop()
        if after is not None:
            after.synchronize()
        if write and (block.data_ptr() % ALIGN_BYTES or len(block) % ALIGN_BYTES):
            # An activation begins anywhere. The end of the last block of a file holds whatever was
            # in this one.
            if not hasattr(self.own, "block"):
                self.own.block = aligned(self.block_bytes)
            own = self.own.block[: whole_blocks(len(block))]
            own[: len(block)].copy_(block)
            block = own
        file.move(write, block, at)

    def wait(self, moving: Blocks,
             owner: Guarded | None,
             what: str,
             nbytes: int) -> None:
        """
        ### Wait until blocks have been moved

        * `what` was to be done with these `nbytes`, in words

        Raises `RuntimeError` if a block did not arrive; all ranks stop then.
        """
        concurrent.futures.wait(moving)
        for block in moving:
            error = block.exception()
            if error and owner is not None:
                owner.comm.fail(owner, f"could not {what}", f"{nbytes:,} bytes in {self.folder}",
                                error, "look after the disk, and start again")

    def borrow(self, borrower: "InFile") -> torch.Tensor:
        """
        ### A buffer for somebody: `(buffer_bytes,)` uint8, aligned

        If none is free, take back the one that was used longest ago and that nobody is looking at.
        """
        if self.buffer_bytes < borrower.nbytes or len(self.memory) < self.number:
            self._grow(borrower)
        if not self.free:
            next(other for other in self.borrowers if not other.held).release()
        buffer, event = self.free.pop(0)
        event.synchronize()
        return buffer

    def _grow(self, borrower: "InFile") -> None:
        """
        #### Make new buffers, as large as the largest file
        """
        for other in list(self.borrowers):
            other.release()
        self.buffer_bytes = max(self.buffer_bytes, borrower.nbytes)
        # First free those that are too small.
        self.free.clear()
        self.memory.clear()
        self.memory += [aligned(self.buffer_bytes, self.take_memory)
                        for _ in range(self.number)]
        self.free += [(buffer, self.event()) for buffer in self.memory]
        borrower.record("buffers", sum(buffer.untyped_storage().nbytes() for buffer in self.memory))


class InFile(Storage):
    """
    ## Tensors that rest in a file

    Each begins with a block of its own. A tensor that is still in the buffer is not read again.

    | | buffer | when |
    |---|---|---|
    | `read_async` | borrowed, and being filled | while other layers or shards have their turn |
    | `wait` | filled, and held | the layer is gathered, or the shard is stepped |
    | `write_async` | being written to the file | the shard was stepped |
    | `release`, or another file needs it | given back | reads and writes have ended |
    """

    tier = "nvme"

    def __init__(self, buffers: Buffers,
                 owner: Guarded,
                 like: dict[str, torch.Tensor]):
        """
        ### Take space in a file

        * `like` has a tensor of the same length and data type for each of them
        """
        self.buffers = buffers
        # Weakly, because the buffers refer to this object, and outlive its model.
        self.owner = weakref.ref(owner)
        self.where: dict[str, tuple[int, int, torch.dtype]] = {}  # offset, bytes, data type
        self.nbytes = 0
        for name, tensor in like.items():
            self.where[name] = (self.nbytes, tensor.nbytes, tensor.dtype)
            self.nbytes += whole_blocks(tensor.nbytes)
        self.file = buffers.new_file(owner, self.nbytes)
        # All that rest in this file.
        self.users = [self]
        self.buffer: torch.Tensor | None = None
        self.present: set[str] = set()  # tensors that are in the buffer, or on their way to it
        self.held = False  # somebody is looking at the buffer
        self.moving: dict[str, Blocks] = {"read": [], "write": []}

    def read_async(self, *names: str) -> None:
        """
        ### Begin to read these tensors, or all

        This may wait for a buffer, or for a write to this file, but not for the reading.
        """
        self._borrow()
        missing = [name for name in names or self.where if name not in self.present]
        if missing:
            for user in self.users:
                user._end("write")
            self._start("read", missing)

    def wait(self, *names: str) -> dict[str, torch.Tensor]:
        """
        ### Wait until these tensors are here, or all: views of the buffer, by name

        The views of all others come along, without values. They may be written to. The buffer stays
        until `write_async` or `release`.
        """
        self.read_async(*names)
        return self._views()

    def blank(self, *names: str) -> dict[str, torch.Tensor]:
        """
        ### Views of the buffer without reading, to be filled
        """
        self._borrow()
        self.present.update(names)
        return self._views()

    def write_async(self, *names: str) -> None:
        """
        ### Begin to write these tensors
        """
        self._start("write", names)
        self.held = False
        for user in self.users:
            if user is not self:
                # Its buffer no longer has what the file says.
                user.release()

    def release(self, stream: torch.Stream | None = None) -> None:
        """
        ### Give the buffer back

        * `stream` is one that still copies from the buffer, if there is one
        """
        if self.buffer is None:
            return
        self._end("read", "write")
        event = self.buffers.event()
        if stream is not None:
            event.record(stream)
        assert in_flight.user_of(self.buffer) is None, "a buffer that is still read or written"
        self.buffers.free.append((self.buffer, event))
        self.buffers.borrowers.remove(self)
        self.buffer = None
        self.held = False
        self.present.clear()

    def share(self, other: "InFile") -> None:
        """
        ### Rest in the file of another one from now on, at its beginning
        """
        self.release()
        self.file = other.file
        self.users = other.users
        self.users.append(self)

    # As a storage of a shard.

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
        # Forget it, so that every unshard reads, whichever buffer happened to be free.
        self.present.clear()
        torch.autograd.graph.increment_version(self.param)

    def replace(self, values: torch.Tensor) -> None:
        """
        ### Take over these values, converted, without reading the old ones
        """
        self.blank("shard")["shard"].copy_(values)
        self.save()

    def record(self, event: str, nbytes: int) -> None:
        """
        ### Tell the layer's listener
        """
        owner = self.owner()
        if owner is not None:
            owner.listener.record(owner, event, nbytes, tier=self.tier)

    def _borrow(self) -> None:
        """
        #### Borrow a buffer if there is none, and be the last of the borrowers
        """
        if self.buffer is None:
            self.buffer = self.buffers.borrow(self)
        else:
            self.buffers.borrowers.remove(self)
        self.buffers.borrowers.append(self)

    def _views(self) -> dict[str, torch.Tensor]:
        """
        #### The tensors, as views of the buffer
        """
        # The threads must not write a mixture of old and new.
        self._end("read", "write")
        self.held = True
        assert self.buffer is not None
        return {name: self.buffer[first : first + nbytes].view(dtype)
                for name, (first, nbytes, dtype) in self.where.items()}

    def _start(self, event: str, names: Iterable[str]) -> None:
        """
        #### Hand blocks to the threads

        * `names` are tensors that lie side by side
        """
        assert self.buffer is not None
        in_flight.begin(self, self.buffer)
        spans = [self.where[name][:2] for name in names]
        begin = spans[0][0]
        end = spans[-1][0] + whole_blocks(spans[-1][1])
        self.moving[event] += self.buffers.start(self.file, event == "write",
                                                 self.buffer[begin:end], begin)
        self.present.update(names)
        self.record(event, end - begin)

    def _end(self, *events: str) -> None:
        """
        #### Wait for the blocks that are being read or written

        * `events` are "read" and "write", or one of the two

        Raises `RuntimeError` if a block did not arrive; all ranks stop then.
        """
        for event in events:
            if self.moving[event]:
                self.buffers.wait(self.moving[event], self.owner(),
                                  f"{event} what rests in a file", self.nbytes)
                self.moving[event] = []
                if not any(self.moving.values()):
                    in_flight.end(self)
                self.record({"read": "arrived", "write": "written"}[event], 0)

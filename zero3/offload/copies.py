r"""
# Copies of activations

`SavedStorage` is a storage that autograd has saved, `Copy` its copy in CPU memory or in a file, and
`Shelf` a file with the copies of one call.

Each batch may have activations of other sizes. So a call takes a file from those that earlier calls
have given back, and makes one only if all of them are too small. Two calls of 8,192 and 5,000 bytes
in two steps:

| | its file | files |
|---|---|---|
| step 1, call 0 leaves | new: 8,192 bytes | 1 |
| step 1, call 1 leaves | new: 8,192 bytes, in whole blocks | 2 |
| step 1, backward | both are given back | 2 |
| step 2 | the same two | 2 |

$$\text{bytes of files} = \sum_{\text{calls that are away}} \; \sum_{\text{storages}}
\left\lceil \frac{\text{bytes}}{4096} \right\rceil \cdot 4096$$

A direct write needs memory that begins at a block of the disk, and an activation begins anywhere.
So each thread has a block of its own to write from. Reading goes to new memory, which is aligned.

From an accelerator the backup stream copies to pinned memory, and threads write that to the file.
On the way back threads read into pinned memory, and the fetch stream copies it to the device:

| who | waits for | before |
|---|---|---|
| the backup stream | the compute stream | it copies an activation to the CPU |
| the compute stream | this copy | the activation's memory is used again |
| a thread | this copy | it writes to the file |
| the fetch stream | the compute stream | it copies into new memory |
| the compute stream | that copy | it reads the activation |

**Run this**: `python -m pytest tests/offload/test_activations.py -k files`.

**Not covered, and what that costs**: files keep the largest sizes that were needed, until their
`Offload` is gone. From a file to an accelerator the second copy starts only when the activation is
needed, so it overlaps nothing. Pinned memory is torch's, which rounds each storage up to a power of
two.
"""

import concurrent.futures
import queue
import weakref
from typing import NamedTuple

import torch

from zero3.guards.moments import Guarded
from zero3.in_flight import in_flight
from zero3.offload.disk import File, aligned, whole_blocks
from zero3.offload.in_file import Buffers
from zero3.offload.tiers import Offload

Blocks = list[concurrent.futures.Future]


class Idle(NamedTuple):
    """
    ## A file that nobody needs, and the blocks of it that threads may still move
    """

    file: File
    moving: Blocks


class Shelves(Buffers):
    """
    ## The files of activations, and the threads that write and read them
    """

    def __init__(self, offload: Offload, owner: Guarded):
        """
        ### Start the threads, and give each a block to write from
        """
        super().__init__(offload.folder, offload.direct, offload.queue_depth, offload.block_bytes,
                         owner)
        self.idle: list[Idle] = []
        self.blocks: queue.LifoQueue[torch.Tensor] = queue.LifoQueue()
        for _ in range(offload.queue_depth):
            memory, block = aligned(offload.block_bytes)
            self.memory.append(memory)
            self.blocks.put(block)

    @classmethod
    def of(cls, offload: Offload, owner: Guarded) -> "Shelves":
        """
        ### Those of an `Offload`, made when they are needed first
        """
        found = offload.in_use.get("activations")
        if not isinstance(found, Shelves):
            found = cls(offload, owner)
            offload.in_use["activations"] = found
        return found

    def take(self, nbytes: int) -> File:
        """
        ### A file of at least `nbytes`

        Raises `OSError` if the disk is full. What rests in other files is not touched.
        """
        fitting = [idle for idle in self.idle if idle.file.nbytes >= nbytes]
        if fitting:
            idle = min(fitting, key=lambda idle: idle.file.nbytes)
            self.idle.remove(idle)
            # The activation that was there is gone, and a thread may still write it.
            concurrent.futures.wait(idle.moving)
            return idle.file
        if self.idle:
            # Give its space back, before a larger file takes more.
            self.idle.remove(max(self.idle, key=lambda idle: idle.file.nbytes))
        return self.make_file(nbytes)

    def move(self, file: File, write: bool, box: list[torch.Tensor], at: int,
             after: torch.Event | None) -> None:
        """
        ### Write a part of a copy, or read it, in a thread

        * `box` has the part, `(bytes,)` uint8, at most a block, in CPU memory
        * `after` is the event after which it may be written
        """
        # A thread drops its arguments a moment after it is done, and the memory has to be free by
        # then.
        part = box.pop()
        if not write:
            file.move(False, part, at)
            return
        if after is not None:
            after.synchronize()
        block = self.blocks.get()
        try:
            # The end of the last block of a file holds whatever was in this one.
            block[: len(part)].copy_(part)
            file.move(True, block[: whole_blocks(len(part))], at)
        finally:
            self.blocks.put(block)


class Shelf:
    """
    ## A file with the copies of one call

    Its copies refer to it, and with the last one it gives the file back.
    """

    def __init__(self, shelves: Shelves, nbytes: int):
        """
        ### Take a file of `nbytes`, whole blocks

        Raises `OSError` if there is none.
        """
        self.shelves = shelves
        self.file = shelves.take(nbytes)
        self.used_bytes = 0
        self.moving: Blocks = []

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self.shelves.idle.append(Idle(self.file, self.moving))

    def place(self, nbytes: int) -> int:
        """
        ### Where the next copy begins in the file
        """
        begin = self.used_bytes
        self.used_bytes += whole_blocks(nbytes)
        return begin

    def move(self, write: bool, memory: torch.Tensor, at: int, after: torch.Event | None = None
             ) -> Blocks:
        """
        ### Hand the blocks of a copy to the threads

        * `memory` is `(bytes,)` uint8, in CPU memory; to be read into, it is whole aligned blocks
        * `after` is the event after which it may be written from
        """
        blocks = []
        step = self.shelves.block_bytes
        for first in range(0, len(memory), step):
            box = [memory[first : first + step]]
            blocks.append(self.shelves.workers.submit(
                self.shelves.move, self.file, write, box, at + first, after))
        self.moving = [block for block in self.moving if not block.done()] + blocks
        return blocks


class SavedStorage:
    """
    ## A storage that autograd has saved, once for all of its views

    Its handles refer to it. With the last one it goes, its memory and its copy.
    """

    def __init__(self, tensor: torch.Tensor):
        whole_storage = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        # (bytes,) uint8, device; `None` while only the copy has the values
        self.memory: torch.Tensor | None = whole_storage.set_(tensor.untyped_storage())
        self.nbytes = self.memory.nbytes
        self.copy: Copy | None = None
        self.is_coming = False
        # Who needs it, in the order of forward.
        self.visits: list[object] = []

    @property
    def can_leave(self) -> bool:
        """
        ### Whether it is here alone, in memory of the size that it was saved with

        Somebody may free it by resizing and fill it again, as `compression/freeing.py` does.
        """
        return (self.copy is None and self.memory is not None
                and self.memory.untyped_storage().nbytes() == self.nbytes)

    def rest(self) -> None:
        """
        ### Free the memory, if there is a copy
        """
        if self.copy is not None and self.memory is not None:
            self.copy.left()
            self.memory = None

    def come(self) -> int:
        """
        ### Begin to bring it back: the bytes that have to be copied
        """
        if self.memory is not None or self.is_coming:
            return 0
        assert self.copy is not None
        self.copy.come()
        self.is_coming = True
        return self.nbytes

    def here(self) -> torch.Tensor:
        """
        ### The memory, `(bytes,)` uint8, on the device
        """
        if self.memory is None:
            self.come()
            assert self.copy is not None
            self.memory = self.copy.arrived()
            self.is_coming = False
        return self.memory


class Copy:
    """
    ## The copy of a storage: in a file, or in pinned CPU memory
    """

    def __init__(self, owner: Guarded, memory: torch.Tensor, shelf: Shelf | None):
        """
        ### Begin to copy

        * `memory` is `(bytes,)` uint8, all of a storage, on the device of the layer, `owner`
        * `shelf` has room for it; without one, the copy stays in pinned memory
        """
        self.owner = weakref.ref(owner)
        self.comm = owner.comm
        self.device = memory.device
        self.nbytes = memory.nbytes
        self.shelf = shelf
        self.at = shelf.place(self.nbytes) if shelf is not None else 0
        self.moving: Blocks = []
        # After the last copy between the device and the CPU.
        self.event: torch.Event | None = None
        # The memory that it comes back to, while it does.
        self.near: torch.Tensor | None = None
        self.pinned: torch.Tensor | None = None
        in_flight.begin(self, memory)
        from_cpu = memory
        if self.device.type != "cpu":
            from_cpu = torch.empty(self.nbytes, dtype=torch.uint8, pin_memory=True)
            self._copy(self.comm.backup_stream, from_cpu, memory)
        if shelf is None:
            self.pinned = from_cpu
        else:
            self.moving = shelf.move(True, from_cpu, self.at, self.event)

    def __del__(self) -> None:
        # The graph was dropped during a copy. Only the compute stream may use this memory again.
        if getattr(self, "event", None) is not None:
            self.comm.current_stream().wait_event(self.event)

    def _copy(self, stream: torch.Stream, to: torch.Tensor, memory: torch.Tensor) -> None:
        """
        #### Copy between the device and the CPU, on a stream beside the compute stream
        """
        with self.comm.on(stream):
            to.copy_(memory, non_blocking=True)
            self.event = self.comm.event()
            self.event.record()

    def left(self) -> None:
        """
        ### Wait until the copy is complete

        On an accelerator the compute stream waits. For a file this thread waits as well, so that
        the copies of at most one call are in pinned memory.
        """
        self._end("write")
        in_flight.end(self)

    def come(self) -> None:
        """
        ### Begin to bring it back, after `left`
        """
        if self.shelf is None:
            self._to_device(self.pinned)
            return
        take = None if self.device.type == "cpu" else _pinned
        _, self.near = aligned(whole_blocks(self.nbytes), take)
        in_flight.begin(self, self.near)
        self.moving = self.shelf.move(False, self.near, self.at)

    def arrived(self) -> torch.Tensor:
        """
        ### Wait until it is back: `(bytes,)` uint8, on the device
        """
        self._end("read")
        if self.shelf is not None and self.device.type != "cpu":
            self._to_device(self.near)
            self._end("read")
        in_flight.end(self)
        memory = self.near
        self.near = None
        assert memory is not None
        return memory[: self.nbytes]

    def _to_device(self, memory: torch.Tensor | None) -> None:
        """
        #### Begin to copy from pinned memory to the device

        The new memory is the compute stream's, whose work so far the fetch stream waits for.
        """
        assert memory is not None
        near = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        in_flight.begin(self, near)
        self._copy(self.comm.fetch_stream, near, memory[: self.nbytes])
        self.near = near

    def _end(self, event: str) -> None:
        """
        #### Wait for the blocks that are being read or written, and for the copy on a stream

        Raises `RuntimeError` if a block did not arrive; all ranks stop then.
        """
        moving = self.moving
        self.moving = []
        concurrent.futures.wait(moving)
        for block in moving:
            error = block.exception()
            owner = self.owner()
            if error and owner is not None and self.shelf is not None:
                owner.comm.fail(
                    owner, f"could not {event} its activations", f"{self.nbytes:,} bytes in "
                    f"{self.shelf.shelves.folder}", error, "look after the disk, and start again")
        if self.event is not None:
            self.comm.current_stream().wait_event(self.event)
            self.event = None


def _pinned(nbytes: int) -> torch.Tensor:
    """
    #### Pinned memory of torch's, which it keeps until the copies from it have ended
    """
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

r"""
# Copies of activations

`Copy` is memory of a device that leaves for CPU memory or a file, and comes back. `Shelf` is a file
with the copies of one call.

Each batch may have activations of other sizes. So a call takes a file from those that earlier calls
have given back, and makes one only if all of them are too small. Two calls of 8,192 and 5,000 bytes
in two steps:

| | its file | files |
|---|---|---|
| step 1, call 0 leaves | new: 8,192 bytes | 1 |
| step 1, call 1 leaves | new: 8,192 bytes, in whole blocks | 2 |
| step 1, backward | both are given back | 2 |
| step 2 | the same two | 2 |

$$\text{bytes of files in use} = \sum_{\text{calls that are away}} \; \sum_{\text{storages}}
\left\lceil \frac{\text{bytes}}{4096} \right\rceil \cdot 4096$$

A direct write needs memory that begins at a block of the disk, and an activation begins anywhere.
So each thread has a block of its own to write from (`Buffers.move`). Reading goes to new memory,
which is aligned.

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

import weakref
from dataclasses import dataclass

import torch

from zero3.guards.moments import Guarded
from zero3.in_flight import in_flight
from zero3.offload.disk import File, aligned, whole_blocks
from zero3.offload.in_file import Blocks, Buffers


@dataclass(eq=False)
class Shelf:
    """
    ## A file with the copies of one call

    Its copies refer to it, and with the last one it gives the file back.
    """

    buffers: Buffers
    file: File  # that `buffers` has taken for it

    def __del__(self) -> None:
        self.buffers.idle.append(self.file)


class Copy:
    """
    ## Memory that leaves, and its copy in a file or in pinned CPU memory

    | | `memory` | the copy |
    |---|---|---|
    | | is there | |
    | `leave` | is there | begins |
    | `rest` | | complete |
    | `come` | | is read into `near` |
    | `here` | is there: what was `near` | stays, because a kept graph may come again |
    """

    has_copy = False
    # After the last copy between the device and the CPU.
    event: torch.Event | None = None
    # The memory that it comes back to, while it does.
    near: torch.Tensor | None = None

    def __init__(self, memory: torch.Tensor):
        # (bytes,) uint8, device; `None` while only the copy has the values
        self.memory: torch.Tensor | None = memory
        self.device = memory.device
        self.nbytes = memory.nbytes
        self.moving: Blocks = []
        # The calls of layers that need an activation, in the order of forward.
        self.visits: list[object] = []

    @property
    def can_leave(self) -> bool:
        """
        ### Whether only memory has it, of the size that it was saved with

        Somebody may free it by resizing and fill it again, as `compression/freeing.py` does.
        """
        return (not self.has_copy and self.memory is not None
                and self.memory.untyped_storage().nbytes() == self.nbytes)

    def __del__(self) -> None:
        # It was dropped during a copy. Only the compute stream may use this memory again.
        if self.event is not None:
            self.comm.current_stream().wait_event(self.event)

    def leave(self, owner: Guarded,
              shelf: Shelf | None = None,
              at: int = 0) -> None:
        """
        ### Begin to copy

        * `owner` is the layer that it belongs to
        * `shelf` has room for it, `at` so many bytes; without one, the copy stays in pinned memory
        """
        assert self.memory is not None
        self.owner = weakref.ref(owner)
        self.comm = owner.comm
        self.shelf = shelf
        self.at = at
        in_flight.begin(self, self.memory)
        from_cpu = self.memory
        if self.device.type != "cpu":
            from_cpu = _pinned(self.nbytes)
            self._copy(self.comm.backup_stream, from_cpu, self.memory)
        if shelf is None:
            self.pinned = from_cpu
        else:
            self.moving = shelf.buffers.start(shelf.file, True, from_cpu, at, self.event)
        self.has_copy = True

    def _copy(self, stream: torch.Stream,
              to: torch.Tensor,
              memory: torch.Tensor) -> None:
        """
        #### Copy between the device and the CPU, on a stream beside the compute stream
        """
        with self.comm.on(stream):
            to.copy_(memory, non_blocking=True)
            self.event = self.comm.event()
            self.event.record()

    def rest(self) -> None:
        """
        ### Free the memory, if there is a copy, once the copy is complete

        On an accelerator the compute stream waits. For a file this thread waits as well, so that
        the copies of at most one call are in pinned memory.
        """
        if self.has_copy and self.memory is not None:
            self._end("write")
            in_flight.end(self)
            self.memory = None

    def come(self) -> int:
        """
        ### Begin to bring it back: the bytes that have to be copied
        """
        if self.memory is not None or self.near is not None:
            return 0
        if self.shelf is None:
            self._to_device(self.pinned)
        else:
            take = None if self.device.type == "cpu" else _pinned
            self.near = aligned(whole_blocks(self.nbytes), take)
            in_flight.begin(self, self.near)
            self.moving = self.shelf.buffers.start(self.shelf.file, False, self.near, self.at)
        return self.nbytes

    def here(self) -> torch.Tensor:
        """
        ### Wait until it is back: `(bytes,)` uint8, on the device
        """
        if self.memory is None:
            self.come()
            self._end("read")
            assert self.near is not None
            if self.shelf is not None and self.device.type != "cpu":
                self._to_device(self.near)
                self._end("read")
            in_flight.end(self)
            self.memory = self.near[: self.nbytes]
            self.near = None
        return self.memory

    def _to_device(self, memory: torch.Tensor) -> None:
        """
        #### Begin to copy from pinned memory to the device

        The new memory is the compute stream's, whose work so far the fetch stream waits for.
        """
        near = torch.empty(self.nbytes, dtype=torch.uint8, device=self.device)
        in_flight.begin(self, near)
        self._copy(self.comm.fetch_stream, near, memory[: self.nbytes])
        self.near = near

    def _end(self, event: str) -> None:
        """
        #### Wait for the blocks that are being read or written, and for the copy on a stream

        Raises `RuntimeError` if a block did not arrive; all ranks stop then.
        """
        if self.shelf is not None:
            self.shelf.buffers.wait(self.moving, self.owner(), f"{event} its activations",
                                    self.nbytes)
        self.moving = []
        if self.event is not None:
            self.comm.current_stream().wait_event(self.event)
            self.event = None


def _pinned(nbytes: int) -> torch.Tensor:
    """
    #### Pinned memory of torch's, which it keeps until the copies from it have ended
    """
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

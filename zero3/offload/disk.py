r"""
# Files past the page cache

`File` reads and writes blocks of a file in two ways: past the page cache, or through it.

If a model does not fit in memory, each byte in the page cache pushes out one that is needed sooner.
Past it (`O_DIRECT`), blocks go straight between the disk and our buffers. Their addresses, offsets
and lengths then have to be multiples of the disk's block:

$$\text{bytes on disk} = \left\lceil \frac{\text{bytes}}{4096} \right\rceil \cdot 4096$$

Several requests are in flight, each from a thread of its own.

**Run this**: `python -m tests.bench.disk --folder DIR` compares both.

**Not covered, and what that costs**: the system's asynchronous calls (`io_uring`, libaio), which
need one thread where this needs several.
"""

import errno
import fcntl
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import torch

# Right for disks with blocks of 512 and of 4096 bytes. With larger blocks, `File.move` goes through
# the page cache.
ALIGN_BYTES = 4096


class File:
    """
    ## A file, usually without a name
    """

    def __init__(self, folder: Path,
                 nbytes: int,
                 direct: bool,
                 name: str = ""):
        """
        ### Take space for it

        * `folder` is on the disk; `nbytes` is a multiple of `ALIGN_BYTES`
        * `direct` goes past the page cache, if the file system can
        * `name` is for a new file that stays

        Raises `OSError` if there is no space, or a file of that name.
        """
        self.handle = (open(folder / name, "xb+", buffering=0) if name
                       else tempfile.TemporaryFile(dir=folder, buffering=0))
        self.fd = self.handle.fileno()
        self.nbytes = nbytes
        # Blocks of it that threads may still move, after nobody needs the file (see `Shelf`).
        self.moving: list[Future] = []
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError:
            # Its name would be in the way of the next try.
            if name:
                (folder / name).unlink()
            raise
        self._past_the_cache(direct)

    def _past_the_cache(self, direct: bool) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT
        # Some file systems always use the page cache.
        with suppress(OSError):
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT * direct)

    def move(self, write: bool,
             memory: torch.Tensor,
             offset: int) -> None:
        """
        ### Read a block of the file into memory, or write it

        * `memory` is `(bytes,)` uint8, and both its address and its length are aligned

        Several threads may do this at once. Raises `OSError` if the system does, or if the file has
        become too short.
        """
        call: Callable[..., int] = os.pwritev if write else os.preadv
        rest = memory.numpy()
        while len(rest):
            left_bytes = os.fstat(self.fd).st_size
            if left_bytes < self.nbytes:
                raise OSError(errno.EIO, f"the file has been cut to {left_bytes} bytes")
            try:
                done = call(self.fd, [rest], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # This disk needs larger blocks. Through the page cache any block is right.
                self._past_the_cache(False)
                done = call(self.fd, [rest], offset)
            if done == 0:
                raise OSError(errno.EIO, f"the file has been cut to {offset} bytes")
            rest = rest[done:]
            offset += done


def whole_blocks(nbytes: int) -> int:
    """
    ## Bytes, rounded up to whole blocks of the disk
    """
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def aligned(nbytes: int, take: Callable[[int], torch.Tensor] | None = None
            ) -> torch.Tensor:
    """
    ## Memory for direct reads and writes: `(nbytes,)` uint8, in a storage of one block more

    * `take` allocates so many bytes; left out, torch does
    """
    size = nbytes + ALIGN_BYTES
    taken = take(size) if take else torch.empty(size, dtype=torch.uint8, device="cpu")
    first = -taken.data_ptr() % ALIGN_BYTES
    return taken[first : first + nbytes]

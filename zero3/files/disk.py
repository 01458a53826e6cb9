r"""
# Files past the page cache

`File` reads and writes blocks of a file in two ways: past the page cache, or mapped into memory.

A file system keeps whatever it reads and writes in free memory, its page cache. For a model that
does not fit in memory this is the wrong place: each byte is copied once more and pushes out another
byte that is needed sooner. So blocks go past it (`O_DIRECT`), straight between the disk and our
buffers. Their addresses, offsets and lengths then have to be multiples of the disk's block:

$$\text{bytes on disk} = \left\lceil \frac{\text{bytes}}{4096} \right\rceil \cdot 4096$$

One request at a time keeps a fast disk waiting, so several are in flight, each from a thread of its
own; Python releases its lock while the system works.

The other way, a file mapped into memory, needs no alignment and no thread, and reads through the
page cache. It shows in one line what offloading is; `bench.py` measures how much slower it is.

**Run this**: `python -m zero3.offload bench --folder DIR` compares both.

**Not covered, and what that costs**: the system's asynchronous calls (`io_uring`, libaio), which
need one thread where this needs several.
"""

import errno
import fcntl
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# Serves disks with blocks of 512 and of 4096 bytes; for larger ones `File.move` falls back.
ALIGN_BYTES = 4096
# Files that a process may still open when it stops making more for shards. It needs a few to look
# how much memory there is, to save a checkpoint, and to say what is wrong.
SPARE_FILES = 32


class File:
    """
    ## A file, as a rule without a name

    Without one it is its owner's alone, and it is gone with the last process that has it open.
    """

    def __init__(self, folder: Path, nbytes: int, direct: bool, name: str = ""):
        """
        ### Take space for it

        * `folder` is on the disk; `nbytes` is a multiple of `ALIGN_BYTES`
        * `direct` goes past the cache, where the file system lets it; or the file is mapped
        * `name` is of a new file that shall stay

        Raises `OSError` if there is no space, or a file of that name.
        """
        self.handle: Any = (open(folder / name, "xb+", buffering=0) if name else
                            tempfile.TemporaryFile(dir=folder, buffering=0))
        self.fd, self.nbytes = self.handle.fileno(), nbytes
        allow_more_files(self.fd)
        self.users: list[Any] = []  # who has tensors in it
        os.posix_fallocate(self.fd, 0, nbytes)
        self.mapped: torch.Tensor | None = None
        if direct:
            self._past_the_cache(True)
        else:
            self._map()

    def _map(self) -> None:
        name = f"/proc/self/fd/{self.fd}"
        self.mapped = torch.from_file(name, shared=True, size=self.nbytes, dtype=torch.uint8)

    def _past_the_cache(self, direct: bool) -> None:
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT * direct)
        except OSError:
            # A file system that knows no other way than through the cache.
            pass

    def move(self, write: bool, memory: torch.Tensor, offset: int) -> None:
        """
        ### Read a block of the file into memory, or write it

        * `memory` is `(bytes,)` uint8, aligned, as is its length

        Several threads may do so at once; both ways let others run meanwhile.

        Raises `OSError` where the system does, or where the file has become too short.
        """
        left_bytes = os.fstat(self.fd).st_size
        if left_bytes < self.nbytes:
            # To touch a mapped page that the file no longer has would end the process, and to write
            # behind its end would leave a hole that reads as zeros.
            raise OSError(errno.EIO, f"the file has been cut to {left_bytes} bytes")
        if self.mapped is not None:
            there = self.mapped[offset : offset + len(memory)]
            there.copy_(memory) if write else memory.copy_(there)
            return
        call: Any = os.pwritev if write else os.preadv
        rest = memory.numpy()
        while len(rest):
            try:
                done = call(self.fd, [rest], offset)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # This disk wants blocks larger than ours. Through the cache any block is right.
                self._past_the_cache(False)
                done = call(self.fd, [rest], offset)
            if done == 0:
                raise OSError(errno.EIO, f"the file has been cut to {offset} bytes")
            rest, offset = rest[done:], offset + done

    def cool(self) -> None:
        """
        ### Have all of it on the disk, and nothing in the page cache
        """
        was_mapped, self.mapped = self.mapped is not None, None
        os.fsync(self.fd)
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if was_mapped:
            self._map()


def allow_more_files(fd: int) -> int:
    """
    ## Raise this process's limit on open files once about half of it is taken

    * `fd` is the descriptor of the file that was opened last. The system gives out the lowest one
      that is free, so its number says how many are taken

    Each file of a shard stays open, and most systems allow a process 1024 files unless it asks for
    more. Half of the limit is left for what else it opens: sockets, other files, libraries.

    Returns how many more files may be opened. The hard limit cannot be raised from here.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 2 * fd + SPARE_FILES >= soft and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    return soft - fd


def whole_blocks(nbytes: int) -> int:
    """
    ## Bytes, rounded up to whole blocks of the disk
    """
    return -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES


def aligned(nbytes: int, take: Callable[[int], torch.Tensor] | None = None
            ) -> tuple[torch.Tensor, torch.Tensor]:
    """
    ## Memory for direct reads and writes

    * `take` takes so many bytes, where it matters how

    Returns all that was taken, and the aligned part of it, `(nbytes,)` uint8.
    """
    size = nbytes + ALIGN_BYTES
    taken = take(size) if take else torch.empty(size, dtype=torch.uint8)
    first = -taken.data_ptr() % ALIGN_BYTES
    return taken, taken[first : first + nbytes]

r"""
# The disk: files past the page cache, and how fast they are

`File` reads and writes blocks of a file in two ways, and `measure` says what the disk gives.

A file system keeps what it reads and writes in memory that is free, its page cache. For a model
that does not fit in memory this is the wrong place: each byte is copied once more and pushes out
another that is needed sooner. So blocks go past it (`O_DIRECT`), straight between the disk and our
buffers, whose address, offset and length then are multiples of the disk's block. One request keeps
a fast disk waiting for the next, so several are with it at once, each from a thread of its own;
Python lets go of its lock while the system works.

$$\text{bandwidth} = \min\Big(\text{bw}_\text{disk},\;
\frac{\text{queue depth} \cdot \text{block}}{\text{latency of a request}}\Big)$$

The other way, a file mapped into memory, needs no alignment and would need no thread, and reads
through the cache. It shows in one line what offload is, and `measure` shows what it costs.

**A figure of the disk, and not of the cache**: a file is written, forced out (`fsync`, which counts
as writing) and dropped from the cache before it is read, and the system says how many bytes came
from the disk and went to it. If they are over 1 % fewer than were read or written, there is no
figure. What a disk or a virtual
machine's host caches by itself cannot be told from here: choose a size above it.

**Run this**: `python -m zero3.offload bench --folder DIR`.

**Not covered, and what that costs**: the system's asynchronous calls (`io_uring`, libaio) need one
thread where these are several; `make bench ARGS="--disk DIR"` measures what libaio gains, by fio.
"""

import argparse
import concurrent.futures
import errno
import fcntl
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Serves disks with blocks of 512 and of 4096 bytes; for larger ones `File.move` falls back.
ALIGN_BYTES = 4096


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


@dataclass(frozen=True)
class Speed:
    """
    ## What a disk gave, in one way of asking
    """

    direct: bool
    block_bytes: int
    queue_depth: int
    write_gb_s: float | None  # GB are 1e9 bytes; nothing, where the cache had a part in it
    read_gb_s: float | None


def measure(folder: Path, nbytes: int, direct: bool, block_bytes: int, queue_depth: int) -> Speed:
    """
    ## Write a file and read it again

    * `nbytes` is its size, a multiple of `block_bytes`, which are in a request
    * `direct` is as for `File`; `queue_depth` requests are with the disk at once

    Raises `OSError` where the folder has no room for it.
    """
    file = File(folder, nbytes, direct)
    _, memory = aligned(block_bytes * queue_depth)
    memory.random_(0, 256)
    blocks = memory.split(block_bytes)
    speeds = []
    with concurrent.futures.ThreadPoolExecutor(queue_depth) as workers:
        # The first time over, the file system also marks the space as written. A run writes it
        # again in every step, so it is the second time that counts.
        for write in (True, True, False):
            before, start_s = _disk_bytes(write), time.perf_counter()
            moves = [workers.submit(file.move, write, blocks[i % queue_depth], at)
                     for i, at in enumerate(range(0, nbytes, block_bytes))]
            for move in moves:
                move.result()
            if write:
                os.fsync(file.fd)
            took_s, moved_bytes = time.perf_counter() - start_s, _disk_bytes(write) - before
            speeds.append(nbytes / took_s / 1e9 if moved_bytes >= 0.99 * nbytes else None)
            file.cool()
    return Speed(direct, block_bytes, queue_depth, *speeds[1:])


def _disk_bytes(write: bool) -> int:
    """
    #### What this process has had the disk do so far, as the system counts it
    """
    name = "write_bytes" if write else "read_bytes"
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[name])


def sweep(folder: Path, nbytes: int, rounds: int) -> Iterator[list[Speed]]:
    """
    ## Every way of asking, once in each round

    * `nbytes` are as for `measure`; `rounds` is how often

    Yields what each round gave. One way after the other in each, for disks that others share are
    faster at one time than at another, and that would look like the effect of a setting.
    """
    asked = [(direct, block << 20, depth) for direct in (True, False)
             for block, depth in ((1, 1), (1, 4), (4, 1), (4, 4), (8, 4), (4, 8))]
    for _ in range(rounds):
        yield [measure(folder, nbytes, *each) for each in asked]


def main() -> None:
    """
    ## The command line, of `zero3.offload`
    """
    parser = argparse.ArgumentParser(prog="python -m zero3.offload")
    bench = parser.add_subparsers(required=True).add_parser(
        "bench", help="measure how fast a disk reads and writes",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    bench.add_argument("--folder", type=Path, required=True, help="on the disk to measure")
    bench.add_argument("--mib", type=int, default=1024, help="size of the file that is written")
    bench.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    bench.add_argument("--out", type=Path, default=Path("runs/disk.png"), help="the picture")
    args = parser.parse_args()
    nbytes = args.mib << 20
    if args.rounds < 1 or nbytes < 64 << 20 or nbytes % (32 << 20):
        parser.error("expected at least one round, and a file of 64 MiB or another multiple of 32, "
                     f"got {args.rounds} and {args.mib} MiB")
    try:
        show(args.folder, nbytes, args.rounds, args.out)
    except OSError as error:
        parser.error(f"expected a folder with room for {args.mib} MiB, got {error}")


def show(folder: Path, nbytes: int, rounds: int, picture: Path) -> None:
    """
    ## Measure, and say what was found

    The median of the rounds, in GB/s (1e9 bytes). Raises `OSError` as `measure` does.
    """
    # Here, because matplotlib takes a second to import.
    from zero3 import report

    found = list(zip(*sweep(folder, nbytes, rounds), strict=True))
    print(f"a file of {nbytes >> 20} MiB in {folder}, cold: written, forced out and dropped from "
          f"the page cache before\nit is read. GB/s (1e9 bytes), median of {rounds} rounds "
          "(least and most)\n")
    print(f"{'way':22}{'block':>8}{'queue':>7}   {'write':22}{'read':22}")
    for rows in found:
        way = "past the cache" if rows[0].direct else "mapped into memory"
        cells = [_cell([getattr(row, what) for row in rows])
                 for what in ("write_gb_s", "read_gb_s")]
        print(f"{way:22}{rows[0].block_bytes >> 20:>4} MiB{rows[0].queue_depth:>7}   "
              + "".join(f"{cell:22}" for cell in cells).rstrip())
    picture.parent.mkdir(parents=True, exist_ok=True)
    caption = f"{nbytes >> 20} MiB, {rounds} rounds, commit {report.commit()}"
    report.draw_disk(found, caption).savefig(picture)
    print(f"\nwrote {picture}")


def _cell(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "not the disk's"
    return f"{statistics.median(known):.2f} ({min(known):.2f}-{max(known):.2f})"

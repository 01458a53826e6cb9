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

**Run this**: `python -m zero3.offload bench --folder DIR`. It takes a few minutes, with a line for
each figure as it comes. `--picture FILE` draws them too.

**Not covered, and what that costs**: the system's asynchronous calls (`io_uring`, libaio) need one
thread where these are several; `make bench ARGS="--disk DIR"` measures what libaio gains, by fio.
"""

import argparse
import concurrent.futures
import errno
import fcntl
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero3.options import INSTALL, Parser, expect, folder, missing, whole, within

# Serves disks with blocks of 512 and of 4096 bytes; for larger ones `File.move` falls back.
ALIGN_BYTES = 4096
# Past the cache or not, bytes of a request, and how many are with the disk at once.
WAYS = [(direct, mib << 20, depth) for direct in (True, False)
        for mib, depth in ((1, 1), (1, 4), (4, 1), (4, 4), (8, 4), (4, 8))]
# Files that a process may still open when it stops making more for shards. It needs a few to look
# how much memory there is, to save a checkpoint, and to say what is wrong.
SPARE_FILES = 32
PICTURES = (".png", ".svg", ".pdf")


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


def sweep(folder: Path, nbytes: int, rounds: int) -> Iterator[tuple[int, Speed]]:
    """
    ## Every way of asking, once in each round

    * `nbytes` are as for `measure`; `rounds` is how often

    Yields each figure as soon as it is there, with the number of its round. The ways take turns
    within a round, because a disk that others share is faster at one time than at another, and
    that would look like the effect of a setting.
    """
    for turn in range(rounds):
        for each in WAYS:
            yield turn, measure(folder, nbytes, *each)


def main(argv: list[str] | None = None) -> None:
    """
    ## The command line, of `zero3.offload`
    """
    parser = Parser(prog="python -m zero3.offload")
    bench = parser.add_subparsers(required=True, metavar="bench").add_parser(
        "bench", help="measure how fast a disk reads and writes",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    bench.add_argument("--folder", required=True, help="on the disk to measure")
    bench.add_argument("--mib", type=int, default=1024, help="size of the file that is written")
    bench.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    bench.add_argument("--picture", "--out", type=Path, metavar="FILE", help="draw the figures too "
                       f"(*{', *'.join(PICTURES)}); left out, nothing is written")
    args = parser.parse_args(argv)
    nbytes = args.mib << 20 if whole(args.mib, 64, 1 << 40) else 0
    try:
        expect(nbytes > 0 and nbytes % (32 << 20) == 0, "--mib does not split into requests",
               "64 or another multiple of 32", args.mib, "pass such a number of MiB")
        within("--rounds", args.rounds, 1, 1000)
        folder("--folder", args.folder)
        if args.picture is not None:
            check_picture(args.picture)
        show(Path(args.folder), nbytes, args.rounds, args.picture)
    except ValueError as error:
        bench.error(f"{error}")
    except OSError as error:
        bench.error(f"cannot measure. Expected: a folder with room for {args.mib} MiB. Got: "
                    f"{error}. What to do: choose a folder on a larger disk, or pass --mib")


def check_picture(picture: Path) -> None:
    """
    ## Raise `ValueError` when a picture could not be written

    Before minutes are spent on its figures. Makes the folder that it goes to.
    """
    what = "cannot draw --picture"
    expect(not missing("matplotlib"), what, "matplotlib", "a Python without it",
           f"{INSTALL}, or leave --picture out")
    expect(picture.suffix in PICTURES and not picture.is_dir(), what,
           f"the name of a file, with one of {', '.join(PICTURES)}", picture, "pass another name")
    try:
        picture.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expect(False, what, "a folder for it", error, "choose another one")
    folder("--picture", picture.parent)


def show(folder: Path, nbytes: int, rounds: int, picture: Path | None) -> None:
    """
    ## Measure, and say what was found

    Each figure goes to the error stream as it comes, because all of them take minutes. Then the
    medians of the rounds are printed, in GB/s (1e9 bytes). Raises `OSError` as `measure` does.
    """
    found: dict[Any, list[Speed]] = {}
    for turn, speed in sweep(folder, nbytes, rounds):
        found.setdefault(_way(speed), []).append(speed)
        print(f"round {turn + 1} of {rounds}: {_way(speed)}   write {_figure(speed.write_gb_s):16}"
              f"read {_figure(speed.read_gb_s)}", file=sys.stderr, flush=True)
    print(f"a file of {nbytes >> 20} MiB in {folder}, cold: written, forced out and dropped from "
          f"the page cache before\nit is read. GB/s (1e9 bytes), median of {rounds} rounds "
          "(least and most)\n")
    print(f"{'way':22}{'block':>8}{'queue':>7}   {'write':22}{'read':22}")
    for way, rows in found.items():
        cells = [_cell([row.write_gb_s for row in rows]), _cell([row.read_gb_s for row in rows])]
        print(f"{way}   " + "".join(f"{cell:22}" for cell in cells).rstrip())
    if picture is not None:
        # Here, because matplotlib takes a second to import.
        from zero3 import report

        caption = f"{nbytes >> 20} MiB, {rounds} rounds, commit {report.commit()}"
        report.draw_disk([tuple(rows) for rows in found.values()], caption).savefig(picture)
        print(f"\nwrote {picture}")


def _way(speed: Speed) -> str:
    way = "past the cache" if speed.direct else "mapped into memory"
    return f"{way:22}{speed.block_bytes >> 20:>4} MiB{speed.queue_depth:>7}"


def _figure(value: float | None) -> str:
    return "not the disk's" if value is None else f"{value:.2f} GB/s"


def _cell(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "not the disk's"
    return f"{statistics.median(known):.2f} ({min(known):.2f}-{max(known):.2f})"

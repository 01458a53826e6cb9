r"""
# How fast a disk is

`measure` writes a file and reads it again, past the page cache or through it, and
`python -m tests.bench.disk` compares the ways.

The bandwidth depends on how many requests are in flight and how large they are:

$$\text{bandwidth} = \min\Big(\text{bw}_\text{disk},\;
\frac{\text{queue depth} \cdot \text{block}}{\text{latency of a request}}\Big)$$

**A figure of the disk, and not of the page cache.** The file is written, forced out (`fsync`, which
counts as writing) and dropped from the page cache before it is read. If the system then counts less
than 99 % of the bytes on the disk, there is no figure.

**Run this**: `python -m tests.bench.disk --folder DIR`. It takes a few minutes.

**Not covered, and what that costs**: caches inside a disk or of a virtual machine's host cannot be
seen from here, so choose a file larger than they are.
"""

import argparse
import concurrent.futures
import os
import statistics
import sys
import time
from itertools import product
from pathlib import Path
from typing import NamedTuple

from zero3.guards.checks import expect
from zero3.guards.command_line import Parser, folder, within
from zero3.offload.disk import File, aligned

# Past the cache or not, bytes of a request, and how many are with the disk at once.
WAYS = [(direct, mib << 20, depth)
        for direct in (True, False)
        for mib, depth in ((1, 1), (1, 4), (4, 1),
                           (4, 4), (8, 4), (4, 8))]


class Speed(NamedTuple):
    """
    ## The speed of a disk in GB/s (1e9 bytes); none if the page cache helped
    """

    write_gb_s: float | None
    read_gb_s: float | None


def measure(folder: Path,
            nbytes: int,
            direct: bool,
            block_bytes: int,
            queue_depth: int) -> Speed:
    """
    ## Write a file and read it again

    * `nbytes` is its size, a multiple of `block_bytes`, which are in a request
    * `direct` is as for `File`; `queue_depth` requests are with the disk at once

    Raises `OSError` if the folder has no room for it.
    """
    file = File(folder, nbytes, direct)
    memory = aligned(block_bytes * queue_depth)
    memory.random_(0, 256)
    blocks = memory.split(block_bytes)
    speeds = []
    with concurrent.futures.ThreadPoolExecutor(queue_depth) as workers:
        # The first time, the file system also marks the space as written, so the second time
        # counts.
        for write in (True, True, False):
            before = _disk_bytes(write)
            start_s = time.perf_counter()
            moves = [workers.submit(file.move, write, blocks[i % queue_depth], at)
                     for i, at in enumerate(range(0, nbytes, block_bytes))]
            for move in moves:
                move.result()
            if write:
                os.fsync(file.fd)
            took_s = time.perf_counter() - start_s
            moved_bytes = _disk_bytes(write) - before
            speeds.append(nbytes / took_s / 1e9 if moved_bytes >= 0.99 * nbytes else None)
            cool(file)
    return Speed(*speeds[1:])


def cool(file: File) -> None:
    """
    ## Write all of a file to the disk, and drop it from the page cache
    """
    os.fsync(file.fd)
    os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)


def _disk_bytes(write: bool) -> int:
    """
    #### Bytes that this process has moved from or to the disk so far, by the system's count
    """
    name = "write_bytes" if write else "read_bytes"
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)[name])


def main(argv: list[str] | None = None) -> None:
    """
    ## The command line
    """
    bench = Parser(prog="python -m tests.bench.disk",
                   description="Measure how fast a disk reads and writes.",
                   formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    bench.add_argument("--folder", required=True, help="on the disk to measure")
    bench.add_argument("--mib", type=int, default=1024, help="size of the file that is written")
    bench.add_argument("--rounds", type=int, default=3, help="how often everything is measured")
    args = bench.parse_args(argv)
    try:
        within("--mib", args.mib, 64, 1 << 40)
        expect(args.mib % 32 == 0, "--mib does not split into requests", "a multiple of 32",
               args.mib, "pass such a number of MiB")
        within("--rounds", args.rounds, 1, 1000)
        folder("--folder", args.folder)
        show(Path(args.folder), args.mib << 20, args.rounds)
    except ValueError as error:
        bench.error(f"{error}")
    except OSError as error:
        bench.error(f"cannot measure. Expected: a folder with room for {args.mib} MiB. Got: "
                    f"{error}. What to do: choose a folder on a larger disk, or pass --mib")


def show(folder: Path,
         nbytes: int,
         rounds: int) -> None:
    """
    ## Measure, and print the figures

    Each figure goes to the error stream at once; in the end the medians are printed. Raises
    `OSError` as `measure` does.
    """
    found: dict[tuple[bool, int, int], list[Speed]] = {}
    # In turns, because a shared disk is faster at one time than at another.
    for turn, way in product(range(rounds), WAYS):
        speed = measure(folder, nbytes, *way)
        found.setdefault(way, []).append(speed)
        print(f"round {turn + 1} of {rounds}: {_row(way, [speed])}", file=sys.stderr, flush=True)
    print(f"a file of {nbytes >> 20} MiB in {folder}, cold: written, forced out and dropped from "
          f"the page cache before\nit is read. GB/s (1e9 bytes), median of {rounds} rounds "
          "(least and most)\n")
    print(f"{'way':22}{'block':>8}{'queue':>7}   {'write':22}{'read':22}")
    for way, speeds in found.items():
        print(_row(way, speeds))


def _row(way: tuple[bool, int, int], speeds: list[Speed]) -> str:
    """
    #### A row of the table: the way, and what was written and read
    """
    direct, block_bytes, queue_depth = way
    name = "past the cache" if direct else "through the cache"
    write, read = (_cell(list(figures)) for figures in zip(*speeds, strict=True))
    return f"{name:22}{block_bytes >> 20:>4} MiB{queue_depth:>7}   {write:22}{read}"


def _cell(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "not the disk's"
    return f"{statistics.median(known):.2f} ({min(known):.2f}-{max(known):.2f})"


if __name__ == "__main__":
    main()

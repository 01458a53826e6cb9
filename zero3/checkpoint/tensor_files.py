r"""
# Files of tensors: written as a stream, read by ranges, checked

`Writer` streams tensors past the page cache into a file of safetensors, and `TensorFile` reads any part
of it again.

[Safetensors](https://github.com/huggingface/safetensors) is a format that can be said in a line:
the length of a header, 8 bytes; the header, JSON with data type, shape and place of each tensor;
then the numbers, one tensor after the other. Nothing in it is ever executed, unlike in a pickle,
and any library of the field opens it. Its own library writes a file from a dict of tensors, which
all have to be in memory. States that rest in files come one shard at a time, so here they are
written in the order in which they come.

**Checksums** (CRC-32, that of gzip) are of blocks of 1 MiB: a reader of a range checks what it
reads and nothing else. One changed byte changes the checksum, always.

$$\text{blocks read for } n \text{ bytes} \le \left\lceil \frac{n}{2^{20}} \right\rceil + 1$$

**Run this**: `make bench ARGS="--save DIR"` measures a save beside plain direct writes of as many
bytes.

**Not covered, and what that costs**: a file is read by one thread, through the page cache.
Checksums find what a disk or a wire broke, not what somebody forged.
"""

import concurrent.futures
import json
import math
import os
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zero3.files.disk import File, aligned, whole_blocks

# What one checksum is of.
BLOCK_BYTES = 1 << 20
# That stay in memory, of a checkpoint's files together: neighbours that are small share one.
_KEPT_BLOCKS = 16
# What is written at once, and how many such pieces are under way.
_PIECE_BYTES, _PIECES = 8 << 20, 4
# Safetensors' names of data types.
TYPES = {"F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32,
         "BF16": torch.bfloat16, "F16": torch.float16, "I16": torch.int16, "U8": torch.uint8,
         "I8": torch.int8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
         "F8_E5M2": torch.float8_e5m2}
_NAMES = {dtype: name for name, dtype in TYPES.items()}


class Broken(Exception):
    """
    ## What cannot go into a checkpoint, or does not come out of it as it was written
    """

    def __str__(self) -> str:
        return printable(super().__str__())


def printable(text: str) -> str:
    r"""
    ## Text as a terminal may have it: what does not print is escaped

    A name in a file can be anything, also `\x1b[2J`, which clears a screen, or a line break, with
    which a name could pass for a message of ours.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def check_name(name: str, as_path: bool = False) -> str:
    """
    ## A name from a file, if it is one

    * `as_path` says that it will be the name of a file or of a folder

    Raises `Broken` for an empty name and for one that does not print, and as a path also for `.`,
    `..` and for one with a separator: these lead out of the folder in which they are looked up.
    """
    leads_away = as_path and (name in (".", "..") or "/" in name or "\\" in name)
    if not name or not name.isprintable() or leads_away:
        what = "of a file or folder" if as_path else "of a parameter or of a moment"
        raise Broken(f"`{name}` is no name {what}: somebody may have forged it, to write elsewhere")
    return name


def type_name(dtype: torch.dtype, name: str = "a tensor") -> str:
    """
    ## Safetensors' name of a data type; raises `Broken` where it has none
    """
    if dtype not in _NAMES:
        raise Broken(f"`{name}` is of {dtype}, which files of safetensors do not know")
    return _NAMES[dtype]


# ------------------------------------------------------------------------------------------ write


class Writer:
    """
    ## A file of safetensors, written from its beginning to its end

    Past the page cache, in pieces: while some are with the disk, the next is filled. Whatever is
    written, and wherever it comes from, takes the memory of a few pieces.

    In a `with` block: an exception removes the file again. Nothing is sure to be on the disk before
    `finish` says so.
    """

    def __init__(self, path: Path, like: dict[str, tuple[torch.dtype, tuple[int, ...]]],
                 metadata: dict[str, str] | None = None):
        """
        ### Take the file's space

        * `like` says what will be written, in this order: data type and shape by name, larger
          elements before smaller ones, so that each lies where it may be mapped into memory

        Raises `OSError` if there is no space, and `Broken` for a data type without a name.
        """
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        at = 0
        for name, (dtype, shape) in like.items():
            end = at + math.prod(shape) * dtype.itemsize
            header[name] = {"dtype": type_name(dtype, name), "shape": [*shape],
                            "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self.path, self.nbytes = path, 8 + len(text) + at
        piece_bytes = min(_PIECE_BYTES, whole_blocks(self.nbytes))
        self.buffers = [*aligned(piece_bytes * _PIECES)[1].split(piece_bytes)]
        self.file = File(path.parent, whole_blocks(self.nbytes), True, path.name)
        self.workers = concurrent.futures.ThreadPoolExecutor(_PIECES, "zero3-checkpoint")
        self.moves: list[concurrent.futures.Future] = []  # of the pieces so far, in order
        self.filled_bytes = 0  # of the piece that is being filled
        head = len(text).to_bytes(8, "little") + text
        self.write(torch.frombuffer(bytearray(head), dtype=torch.uint8))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: Any, *_) -> None:
        self.workers.shutdown(cancel_futures=True)
        self.file.handle.close()
        if kind is not None:
            self.path.unlink(missing_ok=True)

    def write(self, values: torch.Tensor) -> None:
        """
        ### Write the next elements

        Of the data types that were announced, in any shape, on any device. They may change as soon
        as this returns.

        Raises `OSError` if what was written before did not arrive.
        """
        left = values.detach().contiguous().view(-1).view(torch.uint8)
        while len(left):
            buffer = self.buffers[len(self.moves) % _PIECES]
            if not self.filled_bytes and len(self.moves) >= _PIECES:
                # What this buffer had before has to be on the disk first.
                self.moves[-_PIECES].result()
            room = buffer[self.filled_bytes :][: len(left)]
            room.copy_(left[: len(room)])
            self.filled_bytes, left = self.filled_bytes + len(room), left[len(room) :]
            if self.filled_bytes == len(buffer):
                self._flush()

    def _flush(self) -> None:
        """
        #### Hand the piece to the threads
        """
        at = len(self.moves) * len(self.buffers[0])
        buffer = self.buffers[len(self.moves) % _PIECES]
        self.moves.append(self.workers.submit(self._move, buffer, self.filled_bytes, at))
        self.filled_bytes = 0

    def _move(self, buffer: torch.Tensor, nbytes: int, at: int) -> str:
        """
        #### Write a piece, and return its checksums
        """
        self.file.move(True, buffer[: whole_blocks(nbytes)], at)
        return checksums(buffer[:nbytes])

    def finish(self) -> dict[str, Any]:
        """
        ### Have all of it on the disk

        Returns the file's length and checksums, for the manifest. Raises `OSError` where something
        did not arrive.
        """
        written = len(self.moves) * len(self.buffers[0])
        assert written + self.filled_bytes == self.nbytes, "not what was announced"
        if self.filled_bytes:
            self._flush()
        found = "".join(move.result() for move in self.moves)
        os.ftruncate(self.file.fd, self.nbytes)
        os.fsync(self.file.fd)
        force_out(self.path.parent)
        return {"nbytes": self.nbytes, "crc32": found}


def checksums(data: torch.Tensor) -> str:
    """
    ## The checksum of each block, as eight hexadecimal digits, one after the other
    """
    return "".join(f"{zlib.crc32(block.numpy()):08x}" for block in data.split(BLOCK_BYTES))


def force_out(folder: Path) -> None:
    """
    ## Have a folder's entries on the disk: a file that is there is found there

    `fsync` of the file alone does not say so.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass
class TensorFile:
    """
    ## A file of safetensors with checksums, read by ranges
    """

    path: Path
    rank: int  # whose it is
    recent: dict[tuple[int, int], bytes]  # the last few blocks: small parameters share one
    nbytes: int
    crc32: str

    def __post_init__(self) -> None:
        here = self.path.stat().st_size if self.path.exists() else None
        if here != self.nbytes:
            raise Broken(f"{self.path}, the file of rank {self.rank}, "
                         + ("is missing" if here is None else
                            f"has {here:,} bytes, and had {self.nbytes:,}"))

    def raw(self, begin: int, end: int) -> bytearray:
        """
        ### These bytes of the file; raises `Broken` where a block of them is not what was written
        """
        if not 0 <= begin <= end <= self.nbytes:
            raise Broken(f"{self.path} has no bytes {begin:,} to {end:,}")
        found = bytearray(end - begin)
        for i in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            first, last = max(begin, i * BLOCK_BYTES), min(end, (i + 1) * BLOCK_BYTES)
            there = memoryview(self.block(i))[first - i * BLOCK_BYTES : last - i * BLOCK_BYTES]
            found[first - begin : last - begin] = there
        return found

    def block(self, i: int) -> bytes:
        """
        ### A block, checked
        """
        at = self.rank, i
        if at not in self.recent:
            # Each time: a checkpoint may have more files than a process may have open.
            with open(self.path, "rb", buffering=0) as file:
                block = os.pread(file.fileno(), BLOCK_BYTES, i * BLOCK_BYTES)
            if f"{zlib.crc32(block):08x}" != self.crc32[8 * i : 8 * i + 8]:
                raise Broken(f"{self.path}, the file of rank {self.rank}, is damaged: bytes "
                             f"{i * BLOCK_BYTES:,} to {i * BLOCK_BYTES + len(block):,} have "
                             "another checksum than when they were written")
            if len(self.recent) == _KEPT_BLOCKS:
                self.recent.pop(next(iter(self.recent)))
            self.recent[at] = block
        return self.recent[at]

    @cached_property
    def header(self) -> dict[str, Any]:
        """
        ### What is where: the header, with offsets in the file
        """
        first = 8 + int.from_bytes(self.raw(0, 8), "little")
        told = json.loads(self.raw(8, first))
        for name, entry in told.items():
            if name != "__metadata__":
                entry["data_offsets"] = [first + at for at in entry["data_offsets"]]
        return told

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """
        ### These elements of a tensor, or all: `(end - begin,)`
        """
        if name not in self.header:
            raise Broken(f"{self.path}, the file of rank {self.rank}, has no `{name}`")
        dtype, (first, last) = (self.header[name][key] for key in ("dtype", "data_offsets"))
        element_bytes = TYPES[dtype].itemsize
        end = (last - first) // element_bytes if end is None else end
        if first + end * element_bytes > last:
            raise Broken(f"{self.path} has no elements {begin:,} to {end:,} of `{name}`")
        data = self.raw(first + begin * element_bytes, first + end * element_bytes)
        # Torch takes no buffer without bytes.
        return torch.frombuffer(data or bytearray(8), dtype=TYPES[dtype])[: end - begin]

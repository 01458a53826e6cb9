r"""
# Files of tensors with checksums

`Writer` streams tensors into a safetensors file, and `TensorFile` reads any range of elements from
it and checks every byte that it reads.

A [safetensors](https://github.com/huggingface/safetensors) file has three parts: the length of the
header, the header and the numbers. A layer with the weights 1, 2, 3 and the bias 4, in fp32,
becomes a file of 160 bytes:

| bytes | content |
|---|---|
| 0 to 8 | the length of the header, 136 |
| 8 to 144 | `{"weight": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, "bias": ...}` |
| 144 to 160 | 1, 2, 3 and 4, with 4 bytes each |

The header is JSON, with spaces at its end until its length is a multiple of 8. Nothing in the file
is ever executed, unlike a pickle, and other libraries can open it.

The safetensors library writes a file from a dict of tensors, all of them in memory. Offloaded
optimizer states are read from files one shard at a time, so `Writer` takes one tensor at a time. It
writes in pieces, past the page cache: threads write some pieces while the next one is filled.

**Checksums.** Each block of 1 MiB has a CRC-32, the checksum of gzip. A reader of a range therefore
checks only the blocks that it reads. One changed byte always changes the checksum.

$$\text{blocks read for } n \text{ bytes} \le \left\lceil \frac{n}{2^{20}} \right\rceil + 1$$

**Run this**: `make bench ARGS="--save DIR"` compares the speed of a save with the speed of direct
writes of the same number of bytes.

**Not covered, and what that costs**: one thread reads a file, through the page cache. Checksums
find damage by a disk or a network, but no forgery: a forger can compute the checksums too.
"""

import concurrent.futures
import json
import math
import os
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from zero3.guards.command_line import one_line
from zero3.offload.disk import File, aligned, whole_blocks

# Each block of so many bytes has a checksum.
BLOCK_BYTES = 1 << 20
# The readers of a checkpoint's files keep so many blocks, because small parameters share a block.
_KEPT_BLOCKS = 16
# A writer has so many pieces of so many bytes.
_PIECE_BYTES = 8 << 20
_PIECES = 4
# The names of data types in safetensors files.
TYPES = {"F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32,
         "BF16": torch.bfloat16, "F16": torch.float16, "I16": torch.int16, "U8": torch.uint8,
         "I8": torch.int8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
         "F8_E5M2": torch.float8_e5m2}
_NAMES = {dtype: name for name, dtype in TYPES.items()}


# ------------------------------------------------------------------------------------------ write


class Writer:
    """
    ## Write a safetensors file, tensor by tensor

    The file is written in pieces past the page cache. A thread writes each piece while the next one
    is filled, so a writer takes the memory of four pieces, however large the tensors are.

    Use it in a `with` block: an exception in the block removes the file. The file is complete and
    on the disk once `finish` has returned.
    """

    def __init__(self, path: Path, like: dict[str, tuple[torch.dtype, tuple[int, ...]]],
                 metadata: dict[str, str] | None = None):
        """
        ### Create the file and reserve its space

        * `path` is the file, which must not exist yet
        * `like` has the data type and the shape of each tensor, in the order of the later writes.
          Tensors with larger elements have to come first: then each begins at a multiple of its
          element size, and other programs can map it into memory
        * `metadata` is stored in the header

        Raises `OSError` if the disk has no space, and `Broken` if safetensors has no name for a
        data type.
        """
        header, data_bytes = _header(like, metadata)
        self.path = path
        self.nbytes = len(header) + data_bytes
        piece_bytes = min(_PIECE_BYTES, whole_blocks(self.nbytes))
        self.buffers = [*aligned(piece_bytes * _PIECES)[1].split(piece_bytes)]
        self.file = File(path.parent, whole_blocks(self.nbytes), True, path.name)
        self.workers = concurrent.futures.ThreadPoolExecutor(_PIECES, "zero3-checkpoint")
        # One for each piece so far, in the order of the file. Its result is the piece's checksums.
        self.writes: list[concurrent.futures.Future[str]] = []
        # Bytes in the piece that is being filled.
        self.filled_bytes = 0
        self.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.workers.shutdown(cancel_futures=True)
        self.file.handle.close()
        if kind is not None:
            self.path.unlink(missing_ok=True)

    def write(self, values: torch.Tensor) -> None:
        """
        ### Write the next elements

        * `values` has the announced data type. Its shape and its device do not matter, and it may
          change as soon as this returns

        Raises `OSError` if an earlier piece could not be written.
        """
        rest = values.detach().contiguous().view(-1).view(torch.uint8)
        while len(rest):
            buffer = self.buffers[len(self.writes) % _PIECES]
            if not self.filled_bytes and len(self.writes) >= _PIECES:
                # Wait until the disk has the previous content of this buffer.
                self.writes[-_PIECES].result()
            room = buffer[self.filled_bytes :][: len(rest)]
            room.copy_(rest[: len(room)])
            rest = rest[len(room) :]
            self.filled_bytes += len(room)
            if self.filled_bytes == len(buffer):
                self._flush()

    def _flush(self) -> None:
        """
        #### Have a thread write the piece
        """
        offset = len(self.writes) * len(self.buffers[0])
        buffer = self.buffers[len(self.writes) % _PIECES]
        self.writes.append(self.workers.submit(self._move, buffer, self.filled_bytes, offset))
        self.filled_bytes = 0

    def _move(self, buffer: torch.Tensor, nbytes: int, offset: int) -> str:
        """
        #### Write a piece and return its checksums

        Runs in a thread. The last piece is written up to the end of a disk block; `finish` cuts the
        file to its length.
        """
        self.file.move(True, buffer[: whole_blocks(nbytes)], offset)
        return checksums(buffer[:nbytes])

    def finish(self) -> dict[str, Any]:
        """
        ### Wait until the whole file is on the disk

        Returns the file's length and checksums for the manifest. Raises `OSError` if a piece could
        not be written.
        """
        written = len(self.writes) * len(self.buffers[0])
        assert written + self.filled_bytes == self.nbytes, "other tensors than announced"
        if self.filled_bytes:
            self._flush()
        crc32 = "".join(write.result() for write in self.writes)
        os.ftruncate(self.file.fd, self.nbytes)
        os.fsync(self.file.fd)
        fsync_folder(self.path.parent)
        return {"nbytes": self.nbytes, "crc32": crc32}


def _header(like: dict[str, tuple[torch.dtype, tuple[int, ...]]], metadata: dict[str, str] | None
            ) -> tuple[bytes, int]:
    """
    #### The beginning of a file, up to the first number, and how many bytes of numbers follow

    It has the offset of each tensor, so all shapes are known before the first number is written.
    """
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for name, (dtype, shape) in like.items():
        begin = end
        end += math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": type_name(dtype, name), "shape": [*shape],
                        "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, end


def checksums(data: torch.Tensor) -> str:
    """
    ## The checksum of each block

    * `data` is `(bytes,)` uint8, and begins at the beginning of a block

    Returns eight hexadecimal digits for each block, one checksum after the other.
    """
    return "".join(f"{zlib.crc32(block.numpy()):08x}" for block in data.split(BLOCK_BYTES))


def fsync_folder(folder: Path) -> None:
    """
    ## Force a folder's list of files to the disk

    `fsync` of a file forces out its content only. After a power cut a new file could be missing
    from its folder.
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------- read


@dataclass
class TensorFile:
    """
    ## Read ranges of a safetensors file and check them

    Raises `Broken` at once if the file is missing or has another length than the manifest says.
    """

    path: Path
    # The rank that wrote the file.
    rank: int
    # The last few blocks of all files of the checkpoint, by rank and number of the block.
    recent: dict[tuple[int, int], bytes]
    # From the manifest: the length and the checksums.
    nbytes: int
    crc32: str

    def __post_init__(self) -> None:
        if not self.path.exists():
            raise Broken(f"{self.path}, the file of rank {self.rank}, is missing")
        nbytes = self.path.stat().st_size
        if nbytes != self.nbytes:
            raise Broken(f"{self.path}, the file of rank {self.rank}, has {nbytes:,} bytes instead "
                         f"of {self.nbytes:,}")

    def read(self, name: str, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """
        ### Read these elements of a tensor, or all of them

        Returns `(end - begin,)`. Raises `Broken` if the file has no such elements or if they are
        damaged.
        """
        if name not in self.header:
            raise Broken(f"{self.path}, the file of rank {self.rank}, has no `{name}`")
        dtype = TYPES[self.header[name]["dtype"]]
        first, last = self.header[name]["data_offsets"]
        if end is None:
            end = (last - first) // dtype.itemsize
        if first + end * dtype.itemsize > last:
            raise Broken(f"{self.path} has no elements {begin:,} to {end:,} of `{name}`")
        data = self.read_bytes(first + begin * dtype.itemsize, first + end * dtype.itemsize)
        # `torch.frombuffer` refuses an empty buffer.
        return torch.frombuffer(data or bytearray(8), dtype=dtype)[: end - begin]

    @cached_property
    def header(self) -> dict[str, Any]:
        """
        ### The header, with offsets from the beginning of the file

        Raises `Broken` if two tensors share bytes: one of them would have the values of the other.
        """
        data_begin = 8 + int.from_bytes(self.read_bytes(0, 8), "little")
        header = json.loads(self.read_bytes(8, data_begin))
        tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
        for entry in tensors.values():
            entry["data_offsets"] = [data_begin + at for at in entry["data_offsets"]]
        end = data_begin
        for name in sorted(tensors, key=lambda name: tensors[name]["data_offsets"]):
            first, last = tensors[name]["data_offsets"]
            if not end <= first <= last <= self.nbytes:
                raise Broken(f"{self.path}, the file of rank {self.rank}: `{name}` overlaps "
                             "another tensor, or leaves the file")
            end = last
        return header

    def read_bytes(self, begin: int, end: int) -> bytearray:
        """
        ### Read these bytes of the file

        Raises `Broken` if one of their blocks is damaged.
        """
        if not 0 <= begin <= end <= self.nbytes:
            raise Broken(f"{self.path} has no bytes {begin:,} to {end:,}")
        found = bytearray(end - begin)
        for i in range(begin // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            block_begin = i * BLOCK_BYTES
            first = max(begin, block_begin)
            last = min(end, block_begin + BLOCK_BYTES)
            block = memoryview(self.block(i))
            found[first - begin : last - begin] = block[first - block_begin : last - block_begin]
        return found

    def block(self, i: int) -> bytes:
        """
        ### Read block `i` and compare its checksum
        """
        key = self.rank, i
        if key not in self.recent:
            # Open the file each time: a checkpoint may have more files than a process may open.
            with open(self.path, "rb", buffering=0) as file:
                block = os.pread(file.fileno(), BLOCK_BYTES, i * BLOCK_BYTES)
            if f"{zlib.crc32(block):08x}" != self.crc32[8 * i : 8 * i + 8]:
                raise Broken(f"{self.path}, the file of rank {self.rank}, is damaged: bytes "
                             f"{i * BLOCK_BYTES:,} to {i * BLOCK_BYTES + len(block):,} do not "
                             "match their checksum")
            if len(self.recent) == _KEPT_BLOCKS:
                # Forget the oldest block.
                self.recent.pop(next(iter(self.recent)))
            self.recent[key] = block
        return self.recent[key]


# ------------------------------------------------------------------------------- names and errors


def check_files(source: Path) -> None:
    """
    ## Refuse a pipe or a device in the place of a file, here or in this folder

    Nobody may ever write to a pipe, and reading it would wait for that. Raises `Broken`.
    """
    for path in (source, *source.rglob("*")):
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise Broken(f"{path} is neither a file nor a folder")


class Broken(Exception):
    r"""
    ## A checkpoint is damaged, or something does not fit into one

    The message may quote a name from a file, and that can be anything: `\x1b[2J` would clear a
    terminal, and a line break could make a second message. So characters that do not print are
    escaped.
    """

    def __str__(self) -> str:
        return one_line(super().__str__())


def check_name(name: str, as_path: bool = False) -> str:
    """
    ## Check a name that was read from a file, and return it

    * `as_path` says that a file or a folder will have this name

    Raises `Broken` if the name is empty or has characters that do not print. Names of files must
    not lead out of their folder either, so `.`, `..` and separators are refused.
    """
    leads_away = as_path and (name in (".", "..") or "/" in name or "\\" in name)
    if not name or not name.isprintable() or leads_away:
        kind = "file or folder" if as_path else "parameter or moment"
        raise Broken(f"`{name}` is not a valid name of a {kind}: it may be forged, to write to "
                     "another folder")
    return name


def type_name(dtype: torch.dtype, name: str = "a tensor") -> str:
    """
    ## The name of a data type in safetensors files

    * `name` is the tensor's, for the error

    Raises `Broken` if safetensors has no such data type.
    """
    if dtype not in _NAMES:
        raise Broken(f"`{name}` is of {dtype}, a data type that safetensors files do not have")
    return _NAMES[dtype]

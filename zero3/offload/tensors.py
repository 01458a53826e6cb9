r"""
# Safetensors files, written tensor by tensor

`write_tensors` streams tensors into a safetensors file, `save_tensors` writes a dict of them, and
`write_index` lists which tensor is in which of several files.

A layer with the weights 1, 2, 3 and the bias 4, in fp32, becomes a
[safetensors](https://github.com/huggingface/safetensors) file of 160 bytes:

| bytes | content |
|---|---|
| 0 to 8 | the length of the header, 136 |
| 8 to 144 | `{"weight": {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}, "bias": ...}` |
| 144 to 160 | 1, 2, 3 and 4, with 4 bytes each |

The header is JSON, with spaces at its end until its length is a multiple of 8.

`Writer` takes one tensor at a time. Threads write some pieces while the next one is filled. With
four pieces of 8 MiB:

$$\text{memory} \le 4 \cdot 8 \text{ MiB} = 32 \text{ MiB}$$

**Run this**: `make bench ARGS="--save DIR"` compares a save with direct writes of as many bytes.

**Not covered, and what that costs**: the header comes first, so the data types and shapes of all
tensors must be known before the first one is written.
"""

import concurrent.futures
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TypedDict

import torch

from zero3.comm.collectives import bytes_of
from zero3.guards.command_line import one_line
from zero3.offload.disk import File, aligned, whole_blocks

# Each block of so many bytes has a checksum.
BLOCK_BYTES = 1 << 20
# A writer has so many pieces of so many bytes.
_PIECE_BYTES = 8 << 20
_PIECES = 4
# Hugging Face's name of the index of several files.
INDEX = "model.safetensors.index.json"
# The names of data types in safetensors files.
TYPES = {"F64": torch.float64, "I64": torch.int64, "F32": torch.float32, "I32": torch.int32,
         "BF16": torch.bfloat16, "F16": torch.float16, "I16": torch.int16, "U8": torch.uint8,
         "I8": torch.int8, "BOOL": torch.bool, "F8_E4M3": torch.float8_e4m3fn,
         "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64, "U16": torch.uint16,
         "U32": torch.uint32, "U64": torch.uint64}
_NAMES = {dtype: name for name, dtype in TYPES.items()}

# The data type and shape of each tensor.
Like = dict[str, tuple[torch.dtype, tuple[int, ...]]]


class FileEntry(TypedDict):
    """
    ## A file in the manifest of a checkpoint
    """

    nbytes: int
    crc32: str  # of each block, see `checksums`


def write_tensors(path: Path,
                  like: Like,
                  read: Callable[[str], Iterable[torch.Tensor]],
                  metadata: dict[str, str] | None = None) -> FileEntry:
    """
    ## Write a safetensors file

    * `path` must not exist yet
    * `like` has the data type and the shape of each tensor
    * `read(name)` yields the elements of a tensor, in parts of any shape and data type

    Returns the file's length and checksums. Raises `OSError`, `Broken` as `Writer` does, and
    whatever `read` raises; no file is left then.
    """
    names = sorted(like, key=lambda name: -like[name][0].itemsize)
    with Writer(path, {name: like[name] for name in names}, metadata) as writer:
        for name in names:
            for values in read(name):
                writer.write(values.to(like[name][0]))
                del values
        return writer.finish()


def save_tensors(path: Path,
                 tensors: dict[str, torch.Tensor],
                 metadata: dict[str, str]) -> None:
    """
    ## Write a dict of tensors as safetensors, in the place of a file of this name

    Raises as `write_tensors`.
    """
    path.unlink(missing_ok=True)
    like = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    write_tensors(path, like, lambda name: [tensors[name]], metadata)


def write_index(folder: Path,
                files: dict[str, str],
                nbytes: int) -> None:
    """
    ## Write Hugging Face's index of several files

    * `files` has the file of each tensor, and `nbytes` is the size of all tensors
    """
    index = {"metadata": {"total_size": nbytes}, "weight_map": files}
    (folder / INDEX).write_text(json.dumps(index, indent=1))
    # `from_pretrained` would read an older checkpoint of one file instead.
    (folder / "model.safetensors").unlink(missing_ok=True)


class Writer:
    """
    ## Write a safetensors file, tensor by tensor

    Use it in a `with` block: an exception in the block removes the file. The file is complete and
    on the disk once `finish` has returned.
    """

    def __init__(self, path: Path,
                 like: Like,
                 metadata: dict[str, str] | None = None):
        """
        ### Create the file and reserve its space

        * `like` is in the order of the later writes. Tensors with larger elements come first: then
          each begins at a multiple of its element size, and other programs can map it into memory

        The rest is as for `write_tensors`. Raises `OSError` if the disk has no space, and `Broken`
        if safetensors has no name for a data type.
        """
        header, data_bytes = _header(like, metadata)
        self.path = path
        self.nbytes = len(header) + data_bytes
        piece_bytes = min(_PIECE_BYTES, whole_blocks(self.nbytes))
        self.buffers = [*aligned(piece_bytes * _PIECES).split(piece_bytes)]
        self.file = File(path.parent, whole_blocks(self.nbytes), True, path.name)
        self.workers = concurrent.futures.ThreadPoolExecutor(_PIECES, "zero3-checkpoint")
        # One for each piece so far, in the order of the file. Its result is the piece's checksums.
        self.writes: list[concurrent.futures.Future[str]] = []
        self.piece = self.buffers[0]
        self.filled_bytes = 0
        self.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def __enter__(self) -> "Writer":
        return self

    def __exit__(self, kind: type[BaseException] | None,
                 error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.workers.shutdown(cancel_futures=True)
        self.file.handle.close()
        if kind is not None:
            self.path.unlink(missing_ok=True)

    def write(self, values: torch.Tensor) -> None:
        """
        ### Write the next elements

        * `values` has the announced data type, and may change as soon as this returns

        Raises `OSError` if an earlier piece could not be written.
        """
        rest = bytes_of(values)
        while len(rest):
            room = self.piece[self.filled_bytes :][: len(rest)]
            room.copy_(rest[: len(room)])
            rest = rest[len(room) :]
            self.filled_bytes += len(room)
            if self.filled_bytes == len(self.piece):
                self._flush()

    def _flush(self) -> None:
        """
        #### Have a thread write the piece, and begin the next one
        """
        offset = len(self.writes) * len(self.piece)
        self.writes.append(self.workers.submit(self._move, self.piece, self.filled_bytes, offset))
        if len(self.writes) >= _PIECES:
            # Wait until the disk has the previous content of the next buffer.
            self.writes[-_PIECES].result()
        self.piece = self.buffers[len(self.writes) % _PIECES]
        self.filled_bytes = 0

    def _move(self, buffer: torch.Tensor,
              nbytes: int,
              offset: int) -> str:
        """
        #### Write a piece and return its checksums

        Runs in a thread.
        """
        self.file.move(True, buffer[: whole_blocks(nbytes)], offset)
        return checksums(buffer[:nbytes])

    def finish(self) -> FileEntry:
        """
        ### Wait until the whole file is on the disk

        Returns the file's length and checksums for the manifest. Raises `OSError` if a piece could
        not be written.
        """
        written = len(self.writes) * len(self.piece)
        assert written + self.filled_bytes == self.nbytes, "other tensors than announced"
        if self.filled_bytes:
            self._flush()
        crc32 = "".join(write.result() for write in self.writes)
        os.ftruncate(self.file.fd, self.nbytes)
        os.fsync(self.file.fd)
        fsync_folder(self.path.parent)
        return {"nbytes": self.nbytes, "crc32": crc32}


def _header(like: Like, metadata: dict[str, str] | None) -> tuple[bytes, int]:
    """
    #### The beginning of a file, up to the first number, and how many bytes of numbers follow
    """
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
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

    * `data` is `(bytes,)` uint8, and begins with a block

    Returns eight hexadecimal digits for each block.
    """
    return "".join(f"{zlib.crc32(block.numpy()):08x}" for block in data.split(BLOCK_BYTES))


def fsync_folder(folder: Path) -> None:
    """
    ## Force a folder's list of files to the disk
    """
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def type_name(dtype: torch.dtype, name: str = "a tensor") -> str:
    """
    ## The name of a data type in safetensors files

    * `name` is the tensor's, for the error

    Raises `Broken` if safetensors has no such data type.
    """
    Broken.unless(dtype in _NAMES, f"`{name}` is of {dtype}, a data type that safetensors files do "
                  "not have")
    return _NAMES[dtype]


class Broken(Exception):
    r"""
    ## A checkpoint is damaged, or something does not fit into one

    Characters that do not print are escaped, because the message may quote a name from a file.
    """

    @classmethod
    def unless(cls, good: bool, problem: str) -> None:
        """
        ### Raise it with this problem unless all is good
        """
        if not good:
            raise cls(problem)

    def __str__(self) -> str:
        return one_line(super().__str__())

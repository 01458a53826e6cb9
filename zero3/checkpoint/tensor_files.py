r"""
# Files of tensors with checksums

`TensorFile` reads any range of elements from a safetensors file that `offload/tensors.py` has
written, and checks every byte.

Each block of 1 MiB has a CRC-32. One changed byte always changes it.

$$\text{blocks read for } n \text{ bytes} \le \left\lceil \frac{n}{2^{20}} \right\rceil + 1$$

**Run this**: `python -m zero3.checkpoint verify FOLDER` checks all blocks of a checkpoint.

**Not covered, and what that costs**: one thread reads a file. Checksums find no forgery.
"""

import json
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from zero3.offload.tensors import BLOCK_BYTES, TYPES, Broken

# Blocks that a checkpoint's reader keeps, because small parameters share one.
KEPT_BLOCKS = 16


@dataclass
class TensorFile:
    """
    ## Read ranges of a safetensors file and check them

    Raises `Broken` if the file is missing or has another length than the manifest says.
    """

    path: Path
    rank: int
    # `read_block` below; all files of a checkpoint share one that keeps the last few blocks.
    read_block: Callable[[Path, int, int, str], bytes]
    # From the manifest: the length and the checksums.
    nbytes: int
    crc32: str

    def __post_init__(self) -> None:
        Broken.unless(self.path.exists(), f"{self.path}, the file of rank {self.rank}, is missing")
        nbytes = self.path.stat().st_size
        Broken.unless(nbytes == self.nbytes, f"{self.path}, the file of rank {self.rank}, has "
                      f"{nbytes:,} bytes instead of {self.nbytes:,}")

    def read(self, name: str,
             begin: int = 0,
             end: int | None = None) -> torch.Tensor:
        """
        ### Read these elements of a tensor, or all of them

        Returns `(end - begin,)`. Raises `Broken` if they are missing or damaged.
        """
        Broken.unless(name in self.header, f"{self.path}, the file of rank {self.rank}, has no "
                      f"`{name}`")
        dtype = TYPES[self.header[name]["dtype"]]
        first, last = self.header[name]["data_offsets"]
        if end is None:
            end = (last - first) // dtype.itemsize
        Broken.unless(first + end * dtype.itemsize <= last,
                      f"{self.path} has no elements {begin:,} to {end:,} of `{name}`")
        data = self.read_bytes(first + begin * dtype.itemsize, first + end * dtype.itemsize)
        # `torch.frombuffer` refuses an empty buffer.
        return torch.frombuffer(data or bytearray(8), dtype=dtype)[: end - begin]

    @cached_property
    def header(self) -> dict[str, Any]:
        """
        ### The header, with offsets from the beginning of the file
        """
        data_begin = 8 + int.from_bytes(self.read_bytes(0, 8), "little")
        header = json.loads(self.read_bytes(8, data_begin))
        for name, entry in header.items():
            if name != "__metadata__":
                entry["data_offsets"] = [data_begin + at for at in entry["data_offsets"]]
        return header

    def read_bytes(self, begin: int, end: int) -> bytearray:
        """
        ### Read these bytes of the file

        Raises `Broken` if one of their blocks is damaged.
        """
        Broken.unless(0 <= begin <= end <= self.nbytes,
                      f"{self.path} has no bytes {begin:,} to {end:,}")
        first = begin // BLOCK_BYTES
        found = bytearray().join(map(self.block, range(first, -(-end // BLOCK_BYTES))))
        return found[begin - first * BLOCK_BYTES : end - first * BLOCK_BYTES]

    def block(self, i: int) -> bytes:
        """
        ### Block `i`, checked
        """
        return self.read_block(self.path, self.rank, i, self.crc32[8 * i : 8 * i + 8])


def read_block(path: Path,
               rank: int,
               i: int,
               crc32: str) -> bytes:
    """
    ## Read block `i` of a rank's file and compare its checksum

    Raises `Broken` if it is damaged.
    """
    # A checkpoint may have more files than a process may keep open.
    with open(path, "rb", buffering=0) as file:
        block = os.pread(file.fileno(), BLOCK_BYTES, i * BLOCK_BYTES)
    Broken.unless(f"{zlib.crc32(block):08x}" == crc32,
                  f"{path}, the file of rank {rank}, is damaged: bytes {i * BLOCK_BYTES:,} to "
                  f"{i * BLOCK_BYTES + len(block):,} do not match their checksum")
    return block


def check_files(source: Path) -> None:
    """
    ## Refuse a pipe or a device in the place of a file, here or in this folder

    Nobody may ever write to a pipe, and reading it would wait for that. Raises `Broken`.
    """
    for path in (source, *source.rglob("*")):
        Broken.unless(not path.exists() or path.is_file() or path.is_dir(),
                      f"{path} is neither a file nor a folder")


def check_name(name: str, as_path: bool = False) -> str:
    """
    ## Check a name that was read from a file, and return it

    * `as_path` says that a file or a folder will have this name

    Raises `Broken` if the name is empty or has characters that do not print. Names of files must
    not lead out of their folder either, so `.`, `..` and separators are refused.
    """
    leads_away = as_path and (name in (".", "..") or "/" in name or "\\" in name)
    kind = "file or folder" if as_path else "parameter or moment"
    Broken.unless(bool(name) and name.isprintable() and not leads_away, f"`{name}` is not a valid "
                  f"name of a {kind}: it may be forged, to write to another folder")
    return name

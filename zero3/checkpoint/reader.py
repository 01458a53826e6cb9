r"""
# A checkpoint on disk

`commit_checkpoint` turns a folder of files into a checkpoint, and `CheckpointReader` reads any
range of any parameter from it.

Each rank writes its shards into a file of its own. The manifest, a JSON file, says which parameters
are in these files, with their shapes and offsets.

**Six elements from two ranks.** A layer has a weight with four elements and a bias with two. Its
flat parameter has six, and two ranks saved three each:

| element of the flat parameter | 0 | 1 | 2 | 3 | 4 | 5 |
|---|---|---|---|---|---|---|
| parameter | weight | weight | weight | weight | bias | bias |
| file of rank | 0 | 0 | 0 | 1 | 1 | 1 |
| element of the shard | 0 | 1 | 2 | 0 | 1 | 2 |

A flat parameter of $P_\ell$ elements on $N$ ranks has shards of $S = \lceil P_\ell/N \rceil$
elements. Element $i$ of a parameter at offset $o$ is here:

$$\text{file of rank} = \left\lfloor \frac{o + i}{S} \right\rfloor \qquad
\text{element of its shard} = (o + i) \bmod S$$

**In a pipeline** the ranks with the same layers are at one *place*, and the manifest says for each
flat parameter at which. The files of place 0 come first, so at place $p$ the number of the file is
larger by $pN$.

**Split for tensor parallelism**, a parameter has a part at each place (see `comm/parts.py`), and
the reader puts the parts together.

**All or nothing.** A save writes into a folder with a name that ends in `.partial`. When all files
are on the disk, rank 0 writes the manifest under a temporary name, forces it to the disk and
renames it. The checkpoint exists from this rename on, because a rename is done as a whole or not at
all. Finally rank 0 gives the folder its final name. If the run is killed in between, the next save
calls `clean_up_interrupted_saves`:

| folder | content | what `clean_up_interrupted_saves` does |
|---|---|---|
| `step-00000200.partial`, with a manifest | a checkpoint without its final name | renames it |
| `step-00000200.partial`, without a manifest | an interrupted save | removes it |
| `step-00000100.removed` | an interrupted removal | removes it |

**Checksums.** Each block of 1 MiB of a file has a CRC-32 in the manifest, and one changed byte
always changes it. `TensorFile` checks every byte that it reads:

$$\text{blocks read for } n \text{ bytes} \le \left\lceil \frac{n}{2^{20}} \right\rceil + 1$$

**One run per folder.** Two runs would remove each other's partial folders. So rank 0 locks the
folder at its first save.

**Run this**: `python -m zero3.checkpoint verify FOLDER` reads a checkpoint and reports damage.

**Not covered, and what that costs**: several machines need a shared file system. Some, NFS for
example, cannot lock folders: then the run gets a warning. One thread reads a file. Checksums find
no forgery.
"""

import fcntl
import json
import math
import os
import re
import shutil
import warnings
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

import torch

from zero3.comm.collectives import bytes_of
from zero3.comm.parts import WeightPart
from zero3.offload.tensors import BLOCK_BYTES, TYPES, Broken, FileEntry, fsync_folder, type_name

FORMAT = "zero3 checkpoint"
VERSION = 2
MANIFEST = "manifest.json"
# Elements that are read at once.
PART_NUMEL = 1 << 20
# Blocks that a reader keeps, because small parameters share one.
KEPT_BLOCKS = 16

# The descriptors of the folders that this process has locked, by device and inode.
_LOCKED: dict[tuple[int, int], int] = {}
# A run may save each checkpoint to a folder of its own, and a process may open 1,024 files.
_MOST_LOCKED = 64


def commit_checkpoint(partial: Path, manifest: "Manifest") -> Path:
    """
    ## Turn a folder of files into a checkpoint

    * `partial` is the folder; all of its files are on the disk already

    Returns the folder under its final name. Raises `OSError`. Keeps I10.
    """
    rest = json.dumps({"format": FORMAT, "version": VERSION, **manifest}, indent=1).encode()[1:]
    path = partial / f"{MANIFEST}.partial"
    with open(path, "wb") as file:
        # The checksum of the rest comes first.
        file.write(_first_line(rest) + rest)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path, partial / MANIFEST)
    fsync_folder(partial)
    return _rename_to_final(partial)


def _first_line(rest: bytes) -> bytes:
    return b'{"crc32": "%08x",' % zlib.crc32(rest)


def _rename_to_final(partial: Path) -> Path:
    """
    #### Give a finished checkpoint its final name
    """
    final = partial.with_suffix("")
    # Checkpoints of later steps are from before the run resumed at an earlier one.
    for step, path in steps(final.parent).items():
        if step >= _step_of(final):
            remove(path)
    os.rename(partial, final)
    fsync_folder(final.parent)
    return final


def remove(checkpoint: Path) -> None:
    """
    ## Remove a checkpoint, all or nothing

    After the rename, half of it does not look like a checkpoint.
    """
    if checkpoint.is_symlink():
        # It was moved elsewhere, and stays there; `rmtree` refuses links.
        checkpoint.unlink()
    else:
        renamed = checkpoint.with_suffix(".removed")
        os.rename(checkpoint, renamed)
        shutil.rmtree(renamed)


def clean_up_interrupted_saves(folder: Path) -> None:
    """
    ## Finish or undo the interrupted saves and removals in a folder

    Do not call it while a save into the folder is in progress.
    """
    # First, because what follows may remove a checkpoint of the same step.
    for path in steps(folder, ".removed").values():
        shutil.rmtree(path)
    for path in steps(folder, ".partial").values():
        if (path / MANIFEST).exists():
            _rename_to_final(path)
        else:
            shutil.rmtree(path)


# ------------------------------------------------------------------------------------------- lock


def lock_folder(folder: Path) -> None:
    """
    ## Keep other runs from saving into a folder until this process ends, or has locked 64 others

    Raises `Broken` if another run has locked the folder. Warns if the file system cannot lock it.
    """
    stat = os.stat(folder)
    key = stat.st_dev, stat.st_ino
    if key in _LOCKED:
        return
    if len(_LOCKED) == _MOST_LOCKED:
        os.close(_LOCKED.pop(next(iter(_LOCKED))))
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Broken(f"another run saves its checkpoints to {folder}, and two runs in one folder "
                     "remove each other's: end that run, or choose another folder") from None
    except OSError as error:
        warnings.warn(f"{folder} cannot be locked here ({error}): make sure that no other run "
                      "saves into it", stacklevel=2)
    # Closing the descriptor would end the lock.
    _LOCKED[key] = fd


def _drop_inherited_locks() -> None:
    """
    #### Close the parent's locked folders in a forked process
    """
    for fd in _LOCKED.values():
        os.close(fd)
    _LOCKED.clear()


os.register_at_fork(after_in_child=_drop_inherited_locks)


# ---------------------------------------------------------------------------------- files, folders


def make_output_folder(folder: Path) -> Path:
    """
    ## Make and lock a folder for a conversion's output

    Raises `Broken` if it has checkpoints or is one, and `OSError`.
    """
    Broken.unless(not newest(folder) and not (folder / MANIFEST).exists(),
                  f"{folder} has checkpoints in it: choose a folder of its own")
    folder.mkdir(parents=True, exist_ok=True)
    lock_folder(folder)
    return folder


def file_name(rank: int, world_size: int) -> str:
    """
    ## The name of a rank's file

    * `rank` is the number of the file, and `world_size` the number of files, of all places

    The manifest has no names of files, so a forged one cannot lead out of its folder.
    """
    return f"rank-{rank:05}-of-{world_size:05}.safetensors"


def partial_path(folder: Path, step: int) -> Path:
    """
    ## The folder of a checkpoint while it is being written
    """
    return folder / f"step-{step:08}.partial"


def newest(folder: str | Path) -> Path | None:
    """
    ## The newest checkpoint of a run, if there is one

    A finished checkpoint without its final name replaces those of its own step and of later ones.
    """
    unnamed = [path for path in steps(Path(folder), ".partial").values()
               if (path / MANIFEST).exists()]
    return next(reversed([*steps(Path(folder)).values(), *unnamed]), None)


def steps(folder: Path, suffix: str = "") -> dict[int, Path]:
    """
    ## The checkpoints in a folder by step, the newest last

    * `suffix` lists the folders with `.partial` or `.removed` in place of them
    """
    found = {_step_of(path): path for path in folder.glob("step-*")
             if re.fullmatch(rf"step-\d{{8,}}{re.escape(suffix)}", path.name) and path.is_dir()}
    return dict(sorted(found.items()))


def _step_of(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


# --------------------------------------------------------------------------------------- manifest


class ParamEntry(TypedDict, total=False):
    """
    ## A parameter in the manifest
    """

    names: list[str]
    shape: list[int]
    offset: int  # in the flat parameter
    param_group: int | None
    part: dict[str, object] | None  # a `WeightPart`, if ranks split the parameter


class StatesEntry(TypedDict, total=False):
    """
    ## The optimizer states of some parameters in the manifest
    """

    param_group: int | None
    moments: list[str]
    scalars: dict[str, object]
    params: list[int] | None  # those with these states; `None`, as from `flat_entry`, means all


class FlatEntry(TypedDict, total=False):
    """
    ## A flat parameter in the manifest
    """

    place: int  # in the pipeline
    layer: str
    dtype: str  # of the shards; `keys` has those of the saved tensors
    numel: int
    padding: int
    keys: dict[str, str]
    params: list[ParamEntry]
    states: list[StatesEntry]


OptimizerEntry = TypedDict("OptimizerEntry", {
    "class": str, "groups": list[dict[str, object]], "scale": dict[str, object]})


class Manifest(TypedDict, total=False):
    """
    ## A manifest

    `_read_manifest` compares the JSON with these types. An entry that may be `None` may be missing.
    """

    crc32: str  # of the rest
    format: str
    version: int
    step: int
    extra: object
    world_size: int
    places: int
    versions: dict[str, str]
    files: list[FileEntry]
    flats: list[FlatEntry]
    replicated: dict[str, int]  # the place of each tensor that every rank has whole
    optimizer: OptimizerEntry | None


# ------------------------------------------------------------------------------------------- read


@dataclass
class Param:
    """
    ## A parameter in a checkpoint
    """

    flat: int  # the number of its flat parameter
    entry: ParamEntry
    states: StatesEntry  # its optimizer states; `params` is left out
    # If ranks split it, all of its parts. Its names and states are those of the first one.
    parts: list["Param"] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.entry["names"][0]

    @property
    def part(self) -> WeightPart | None:
        """
        ### Which elements of the parameter these are; none, if all of them
        """
        told: Any = self.entry.get("part")
        return WeightPart(**{**told, "shape": tuple(told["shape"])}) if told else None

    @property
    def shape(self) -> tuple[int, ...]:
        """
        ### The shape in the plain model; of a part, its own
        """
        part = self.parts[0].part if self.parts else None
        return part.shape if part else tuple(self.entry["shape"])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Listing:
    """
    ## The parameters that a manifest lists
    """

    def __init__(self, manifest: Manifest):
        """
        ### Find the parameters, under each of their names

        Raises `ValueError` if the parts of a parameter do not make it up.
        """
        self.manifest = manifest
        self.flats = manifest["flats"]
        self.world_size = manifest["world_size"]
        self.params = merge_parts([
            Param(i, entry, _states_of(flat, at)) for i, flat in enumerate(self.flats)
            for at, entry in enumerate(flat["params"])])
        self.by_name = {name: param
                        for param in self.params for name in param.entry["names"]}

    def find(self, names: list[str]) -> Param | None:
        """
        ### The parameter with one of these names, if there is one

        Other libraries store a tied one under each of its names. Take that which is in a param
        group.
        """
        return max(
            (self.by_name[name] for name in names if name in self.by_name),
            key=lambda param: param.entry["param_group"] is not None,
            default=None)

    def dtype(self, param: Param, key: str) -> torch.dtype:
        """
        ### The data type of a saved parameter or moment
        """
        return TYPES[self.flats[param.flat]["keys"][key]]


def _states_of(flat: FlatEntry, at: int) -> StatesEntry:
    """
    #### The optimizer states of parameter `at` of a flat one
    """
    entry = flat["params"][at]
    # A parameter without elements is in no list, and has the states of its param group.
    known = [states for states in flat["states"] if states["param_group"] == entry["param_group"]
             and (states["params"] is None or at in states["params"] or 0 in entry["shape"])]
    return {"moments": known[0]["moments"] if known else [],
            "scalars": known[0]["scalars"] if known else {}}


class CheckpointReader(Listing):
    """
    ## Read a checkpoint
    """

    def __init__(self, folder: Path):
        """
        ### Read the manifest

        Raises `Broken` if the folder is not a checkpoint or has a newer format, and if one of its
        files is missing or has another length.
        """
        # A forged manifest can raise any of the errors below.
        try:
            super().__init__(_read_manifest(folder / MANIFEST))
            keeps_blocks = lru_cache(KEPT_BLOCKS)(read_block)
            files = self.manifest["files"]
            self.files = [
                TensorFile(folder / file_name(i, len(files)),
                           i,
                           keeps_blocks,
                           **file)
                for i, file in enumerate(files)]
            for flat in self.flats:
                self._check(flat)
        except (OSError, ValueError, TypeError, AttributeError, LookupError, ArithmeticError,
                RecursionError) as error:
            raise Broken(f"{folder / MANIFEST}: {error!r}") from error

    def _check(self, flat: FlatEntry) -> None:
        """
        #### Check that the numbers of a flat parameter agree with each other and with its files

        Forged offsets would lead a read into another parameter, and nothing in the numbers would
        show it.
        """
        groups = (self.manifest["optimizer"] or {"groups": []})["groups"]
        ends = [0, *(entry["offset"] + math.prod(entry["shape"])
                     for entry in flat["params"])]
        # On an accelerator there may be padding between two parameters.
        in_order = all(
            entry["names"] and min(entry["shape"], default=0) >= 0 and entry["offset"] >= end
            and entry["param_group"] in (None, *range(len(groups)))
            for entry, end in zip(flat["params"], ends, strict=False))
        whole_shards = (ends[-1] + flat["padding"]) % self.world_size == 0
        # A state that is missing here would be missing in training, too.
        moments = {key for states in flat["states"] for key in states["moments"]}
        widest = max(TYPES[dtype].itemsize
                     for dtype in (flat["dtype"], *flat["keys"].values()))
        shortest_bytes = min(file.nbytes for file in self.files_at(flat["place"]))
        if not (in_order and whole_shards
                and ends[-1] == flat["numel"] and flat["padding"] >= 0
                and {"param", *moments} == {*flat["keys"]}
                and self._shard_numel(flat) * widest <= shortest_bytes):
            raise ValueError(f"layer `{flat['layer']}` does not add up")

    def files_at(self, place: int) -> "list[TensorFile]":
        """
        ### The files of a place in the pipeline, one for each shard
        """
        return self.files[place * self.world_size : (place + 1) * self.world_size]

    def _shard_numel(self, flat: FlatEntry) -> int:
        return (flat["numel"] + flat["padding"]) // self.world_size

    def read(self, param: Param,
             key: str,
             begin: int,
             end: int) -> torch.Tensor:
        """
        ### Read elements of a parameter or of one of its moments

        * `key` is `param` or the name of a moment

        Returns `(end - begin,)` in the data type of the file. Raises `Broken` with the parameter,
        the file and its rank.
        """
        values = torch.empty(end - begin, dtype=self.dtype(param, key), device="cpu")
        at = 0
        while at < len(values):
            # A piece at a time, because each is in memory twice: in `values` and as bytes.
            at += self._read_into(values[at : at + PART_NUMEL], param, key, begin + at)
        return values

    def _read_into(self, values: torch.Tensor,
                   param: Param,
                   key: str,
                   begin: int) -> int:
        """
        #### Read the elements from `begin` on into `values`, as many as are in one file

        Returns how many.
        """
        if param.parts:
            # The ranks that have split it have some of the elements each.
            end = begin + len(values)
            for each in param.parts:
                part: Any = each.part
                found = self.read(each, key, part.before(begin), part.before(end))
                values[part.holds(torch.arange(begin, end, device="cpu"))] = found
            return len(values)
        flat = self.flats[param.flat]
        shard_numel = self._shard_numel(flat)
        # The formula above.
        rank, first = divmod(param.entry["offset"] + begin, shard_numel)
        last = min(shard_numel, first + len(values))
        with errors_name(f"`{param.name}`, its {key}"):
            file = self.files_at(flat["place"])[rank]
            values[: last - first] = file.read(f"{param.flat}.{key}", first, last)
        return last - first

    def read_whole(self, param: Param, key: str = "param") -> torch.Tensor:
        """
        ### Read all of a parameter, or of one of its moments, in its shape
        """
        return self.read(param, key, 0, param.numel).view(param.shape)

    def replicated(self, rank: int, name: str) -> torch.Tensor:
        """
        ### Read a buffer that each rank saved for itself

        * `rank` gets the buffer of the same rank, or of rank 0 if fewer ranks saved
        """
        if name not in self.manifest["replicated"]:
            # Checkpoints that were made from other formats list buffers as parameters.
            return self.read_whole(self.by_name[name])
        with errors_name(f"`{name}`"):
            files = self.files_at(self.manifest["replicated"][name])
            file = files[rank if rank < self.world_size else 0]
            return file.read(f"replicated.{name}").view(file.header[f"replicated.{name}"]["shape"])


def merge_parts(params: list[Param]) -> list[Param]:
    """
    ## Put the parts of each parameter together

    Raises `ValueError` if the parts do not make up the parameter.
    """
    found: dict[str, Param] = {}
    for param in params:
        first = found.setdefault(param.name, replace(param, parts=[]))
        if param.part:
            first.parts.append(param)
    for param in found.values():
        parts: list[Any] = [each.part for each in param.parts]
        ends = [0, *(part.end for part in parts)]
        fits = all(part == replace(parts[0], begin=begin, end=part.end)
                   and each.numel * part.size == math.prod(part.shape) * (part.end - part.begin)
                   for each, part, begin in zip(param.parts, parts, ends, strict=False))
        if parts and not (fits and ends[-1] == parts[0].size):
            raise ValueError(f"the parts of `{param.name}` do not add up")
    return [*found.values()]


@contextmanager
def errors_name(part: str) -> Iterator[None]:
    """
    ## Turn errors of reading into `Broken`, with the name of the part that cannot be read
    """
    try:
        yield
    except Exception as error:
        raise Broken(f"{part}: {error}") from error


def _read_manifest(path: Path) -> Manifest:
    """
    #### Read and check a manifest
    """
    Broken.unless(path.is_file(), f"{path} is missing: this is no checkpoint, nor a folder with "
                  "checkpoints")
    raw = path.read_bytes()
    manifest = json.loads(raw)
    version = manifest.get("version")
    # First of all, because a newer format may have other types.
    if manifest.get("format") == FORMAT and isinstance(version, int) and version > VERSION:
        raise Broken(f"{path} is of format {version}, and this zero3 reads format {VERSION}: "
                     "install a newer zero3")
    head = _first_line(b"")
    Broken.unless(raw[: len(head)] == _first_line(raw[len(head) :]),
                  f"{path} is damaged: it does not match its checksum")
    # A checkpoint that was made from another format may have no places.
    manifest.setdefault("places", 1)
    for flat in manifest["flats"]:
        flat.setdefault("place", 0)
    # Another program may have written it.
    _check_types(manifest, Manifest, "the manifest")
    used = [*(flat["place"] for flat in manifest["flats"]),
            *manifest["replicated"].values()]
    one_file_each = 0 < len(manifest["files"]) == manifest["places"] * manifest["world_size"]
    known = manifest["format"] == FORMAT and version == VERSION
    if not (known and one_file_each
            and all(0 <= place < manifest["places"] for place in used)):
        raise ValueError("another program wrote it")
    return manifest


def _check_types(value: Any,
                 kind: Any,
                 where: str) -> None:
    """
    #### Raise `ValueError` if a value does not have this type
    """
    if type(None) in get_args(kind):
        # A type, or `None`.
        kind = get_args(kind)[value is None]
    hints = get_type_hints(kind) if is_typeddict(kind) else {}
    plain = dict if hints else get_origin(kind) or kind
    good = isinstance(value, plain) and not (plain is int and isinstance(value, bool))
    if not good or (hints and value.keys() - hints.keys()):
        raise ValueError(f"{where} is {value!r:.40}, and should be {kind!r:.40}")
    for key, hint in hints.items():
        _check_types(value.setdefault(key), hint, f"{where}, `{key}`")
    if get_args(kind):
        parts = value if plain is dict else dict(enumerate(value))
        for at, each in parts.items():
            _check_types(each, get_args(kind)[-1], f"{where}, `{at}`")


# ------------------------------------------------------------------------------- tensors in files


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


# ------------------------------------------------------------------------------------------- JSON


# The classes that JSON lacks, by their names there, and how to make them of lists.
_CLASSES: dict[str, Callable[[list], object]] = {
    "__tuple__": tuple, "__items__": dict, "__counter__": lambda pairs: Counter(dict(pairs))}


def encode(value: object, where: str = "extra") -> Any:
    """
    ## Turn a small object into JSON

    * `value` is made of numbers, strings and tensors in lists, tuples, dicts and counters
    * `where` names it in errors

    `decode` returns an equal object. JSON alone has neither tuples nor keys that are numbers, and a
    learning rate scheduler that looks for step 30 would not find "30".

    Raises `ValueError` with the place of an object of another class, and `Broken` for a tensor of a
    data type that safetensors lacks.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return {"__tensor__": bytes_of(value.cpu()).numpy().tobytes().hex(),
                "dtype": type_name(value.dtype, where), "shape": [*value.shape]}
    if isinstance(value, (list, tuple)):
        parts = [encode(each, f"{where}[{i}]") for i, each in enumerate(value)]
        return parts if isinstance(value, list) else {"__tuple__": parts}
    if isinstance(value, dict):
        pairs = [(encode(key, where), encode(each, f"{where}[{key!r}]"))
                 for key, each in value.items()]
        if isinstance(value, Counter):
            return {"__counter__": pairs}
        if all(isinstance(key, str) and not key.startswith("__")
               for key in value):
            return dict(pairs)
        return {"__items__": pairs}
    raise ValueError(f"`{where}` is a {type(value).__name__}")


def decode(value: object) -> Any:
    """
    ## Turn the JSON of `encode` back into the object

    Nothing in a checkpoint is run to load it, unlike in a pickle.
    """
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        raw = bytearray.fromhex(value["__tensor__"])
        dtype = TYPES[value["dtype"]]
        # `torch.frombuffer` refuses an empty buffer.
        flat = torch.frombuffer(raw or bytearray(16), dtype=dtype)
        return flat[: len(raw) // dtype.itemsize].view(value["shape"])
    for name, make in _CLASSES.items():
        if name in value:
            return make(decode(value[name]))
    return {key: decode(each) for key, each in value.items()}

r"""
# What a checkpoint is on disk

`commit` makes a folder of files a checkpoint, wholly or not at all, and `CheckpointReader` reads any part of
any parameter out of one.

Each rank writes a file of its own, at the same time as the others: its shards, one after the other.
What these numbers *are* is written down once, in a manifest: which parameters lie in which flat
parameter, where, in which shape, and how much of its end is padding. So a reader does not need the
ranks that wrote. It asks for elements of a parameter, and the manifest says where these are. For
element $i$ of a parameter that begins at $o$ in its flat parameter, with shards of
$S = \lceil P_\ell/N \rceil$ elements:

$$\text{file of rank} = \left\lfloor \frac{o + i}{S} \right\rfloor \qquad
\text{element of its shard} = (o + i) \bmod S$$

All that a checkpoint is good for is made of this one operation: another number of ranks, other
layers around the same parameters, other formats.

**There, or not there.** A checkpoint is written into a folder whose name ends in `.partial`. When
all files are on the disk, the manifest is written under another name, forced out and renamed; from
that moment on the checkpoint is there. The folder gets its name next, after what it replaces is
gone. A rename is the one thing that a file system does wholly or not at all, and `sweep` ends what
a run had begun that is gone:

| folder | what it is | what `sweep` does |
|---|---|---|
| `step-00000200` | a checkpoint | nothing |
| `step-00000200.partial`, with a manifest | a checkpoint without its name yet | gives it its name |
| `step-00000200.partial`, without one | a save that was cut off | removes it |
| `step-00000100.removed` | a checkpoint that is being removed | removes it |

**Run this**: `python -m zero3.checkpoint inspect FOLDER` prints what is in a checkpoint.

A save sweeps before it begins; to load changes nothing.

**One run in a folder.** Two that save into the same one would take each other's files for
leftovers. So `hold` locks a run's folder, from rank 0's first save until that process ends, however
it ends. The lock is the system's, on the folder itself: it leaves no file, and a load needs none.

**Not covered, and what that costs**: all ranks write into one folder, which on several machines has
to be a shared one. A file system that locks no folders, as NFS does not, gets a warning in place of
a lock.
"""

import errno
import fcntl
import json
import math
import os
import re
import shutil
import socket
import warnings
import zlib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zero3.checkpoint.tensor_files import TYPES, Broken, TensorFile, force_out, printable, type_name

FORMAT, VERSION = "zero3 checkpoint", 1
MANIFEST = "manifest.json"
# Elements that are read at once.
_PART_NUMEL = 1 << 20
# What a manifest has, and of which type; a list has any number of such elements.
_SCHEMA: Any = {
    "format": str, "version": int, "step": int, "world_size": int, "versions": dict,
    "files": [{"nbytes": int, "crc32": str}],
    "flats": [{"layer": str, "dtype": str, "numel": int, "padding": int, "keys": dict,
               "params": [{"names": [str], "shape": [int], "offset": int,
                           "param_group": (int, type(None))}],
               "states": [{"param_group": (int, type(None)), "moments": [str], "scalars": dict}]}],
    "replicated": [str], "optimizer": (dict, type(None)),
}
# What is under `optimizer`, where that is something.
_OPTIMIZER: Any = {"class": str, "groups": [dict], "scale": dict}


# The folders that this process holds, by device and inode, and their descriptors.
_HELD: dict[tuple[int, int], int] = {}


def file_name(rank: int, world_size: int) -> str:
    """
    ## What a rank's file is called

    By this rule alone: a manifest has no names of files, and cannot lead out of its folder.
    """
    return f"rank-{rank:05}-of-{world_size:05}.safetensors"


def commit(partial: Path, manifest: dict[str, Any]) -> Path:
    """
    ## Make a folder of files a checkpoint

    * `partial` is the folder, whose files are on the disk

    The manifest's first line is the checksum of the rest. Returns where the checkpoint is. Raises
    `OSError`. Keeps I10.
    """
    rest = json.dumps({"format": FORMAT, "version": VERSION, **manifest}, indent=1).encode()[1:]
    path = partial / f"{MANIFEST}.partial"
    with open(path, "wb") as file:
        file.write(_first_line(rest) + rest)
        file.flush()
        os.fsync(file.fileno())
    os.rename(path, partial / MANIFEST)
    force_out(partial)
    return _settle(partial)


def _first_line(rest: bytes) -> bytes:
    return b'{"crc32": "%08x",' % zlib.crc32(rest)


def _settle(partial: Path) -> Path:
    """
    #### Give the folder of a checkpoint its name

    What had it before makes room, and so do checkpoints of later steps, from before the run was
    taken up again at an earlier one. Not sooner: until the manifest is there, they may be all.
    """
    final = partial.with_suffix("")
    for step, path in steps(final.parent).items():
        if step >= int(final.name[5:]):
            remove(path)
    os.rename(partial, final)
    force_out(final.parent)
    return final


def remove(checkpoint: Path) -> None:
    """
    ## Remove a checkpoint, wholly or not at all

    The folder is renamed first, so that nobody takes what is left half-way for a checkpoint.
    """
    gone = checkpoint.with_suffix(".removed")
    if gone.exists():
        shutil.rmtree(gone)
    os.rename(checkpoint, gone)
    shutil.rmtree(gone)


def sweep(folder: Path) -> None:
    """
    ## End what a run that is gone had begun

    By the table above. Not beside a save that is under way.
    """
    for path in _named(folder, ".partial").values():
        if (path / MANIFEST).exists():
            _settle(path)
        else:
            shutil.rmtree(path)
    for path in _named(folder, ".removed").values():
        shutil.rmtree(path)


def hold(folder: Path) -> None:
    """
    ## Keep other runs from saving into a folder, until this process ends

    * `folder` is there already; to hold it again changes nothing

    Call it before `sweep`, and before anything is written. Raises `Broken` with the process that
    holds the folder, and `OSError`.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    told = os.fstat(fd)
    at = told.st_dev, told.st_ino
    if at in _HELD:
        os.close(fd)
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Broken(f"{folder} is where {_holder(told)} saves its checkpoints, and two runs in a "
                     "folder remove each other's: end that one, or choose another folder") from None
    except OSError as error:
        if error.errno not in (errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.EOPNOTSUPP):
            os.close(fd)
            raise
        warnings.warn(f"{folder} cannot be locked here ({error}): make sure that no other run "
                      "saves into it", stacklevel=2)
    # The lock lasts as long as the descriptor, which also keeps the inode from being given to
    # another folder.
    _HELD[at] = fd


def _holder(folder: os.stat_result) -> str:
    """
    #### Who holds a folder, as the system knows it
    """
    device = f"{os.major(folder.st_dev):02x}:{os.minor(folder.st_dev):02x}"
    try:
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, *_, pid, at, _, _ = line.split()
            if kind == "FLOCK" and at == f"{device}:{folder.st_ino}":
                said = Path(f"/proc/{int(pid)}/cmdline").read_bytes().decode(errors="replace")
                command = printable(said.replace("\0", " ").strip())
                return f"process {pid} on {socket.gethostname()} (`{command:.80}`)"
    except (OSError, ValueError):
        # Another system's, or one that has just ended.
        pass
    return "a process of another machine or container"


def _let_go() -> None:
    """
    #### In a process that was forked: the lock is the parent's alone, and ends with that
    """
    for fd in _HELD.values():
        os.close(fd)
    _HELD.clear()


os.register_at_fork(after_in_child=_let_go)


def place(folder: Path) -> Path:
    """
    ## A folder to write into what is no checkpoint of ours; it is made, and held

    Raises `Broken` where it is a run's or a checkpoint's own, and `OSError`.
    """
    if steps(folder) or (folder / MANIFEST).exists():
        raise Broken(f"{folder} has checkpoints in it: choose a folder of its own")
    folder.mkdir(parents=True, exist_ok=True)
    hold(folder)
    return folder


def partial_path(folder: Path, step: int) -> Path:
    """
    ## Where a checkpoint is written, until it is one
    """
    return folder / f"step-{step:08}.partial"


def newest(folder: str | Path) -> Path | None:
    """
    ## The newest checkpoint of a run, if there is one

    One that has no name yet replaces all of its step and later.
    """
    nameless = [path for path in _named(Path(folder), ".partial").values()
                if (path / MANIFEST).exists()]
    return next(reversed([*steps(Path(folder)).values(), *nameless]), None)


def steps(folder: Path) -> dict[int, Path]:
    """
    ## The checkpoints in a folder, by step, the newest last
    """
    return _named(folder, "")


def _named(folder: Path, suffix: str) -> dict[int, Path]:
    """
    #### The folders that are called as we call them, by step; what others put there is theirs
    """
    found = {int(path.stem[5:]): path for path in folder.glob("step-*")
             if re.fullmatch(rf"step-\d{{8,}}{re.escape(suffix)}", path.name) and path.is_dir()}
    return dict(sorted(found.items()))


# ------------------------------------------------------------------------------------------- read


@dataclass
class Param:
    """
    ## A parameter of a checkpoint
    """

    flat: int
    entry: dict[str, Any]  # of the manifest: names, shape, offset, param group

    @property
    def name(self) -> str:
        return self.entry["names"][0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.entry["shape"])

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class CheckpointReader:
    """
    ## A checkpoint, to be read
    """

    def __init__(self, folder: Path):
        """
        ### Read the manifest

        * `folder` is the checkpoint's own

        Raises `Broken` where it is none, is of a newer format, or has files that are missing or of
        another length.
        """
        self.folder = folder
        try:
            self.manifest = _read_manifest(folder / MANIFEST)
            self.flats, self.world_size = self.manifest["flats"], self.manifest["world_size"]
            recent: dict[tuple[int, int], bytes] = {}
            self.files = [TensorFile(folder / file_name(rank, self.world_size), rank, recent, **each)
                          for rank, each in enumerate(self.manifest["files"])]
            self.params = [Param(i, each) for i, flat in enumerate(self.flats)
                           for each in flat["params"]]
            for flat in self.flats:
                self._check(flat)
        except (OSError, ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise Broken(f"{folder / MANIFEST}: {error!r}") from error
        self.by_name = {name: param for param in self.params for name in param.entry["names"]}

    def _check(self, flat: dict[str, Any]) -> None:
        """
        #### Make sure that a flat parameter is no larger than its files, and has its parameters
        """
        shard_numel, end = (flat["numel"] + flat["padding"]) // self.world_size, 0
        at_most = min(each.nbytes for each in self.files)
        dtypes = [TYPES[name] for name in (flat["dtype"], *flat["keys"].values())]
        good = "param" in flat["keys"] and shard_numel >= 0
        good &= all(shard_numel * dtype.itemsize <= at_most for dtype in dtypes)
        for each in flat["params"]:
            good &= bool(each["names"]) and all(n >= 0 for n in each["shape"])
            # After the one before, and on an accelerator some padding between them.
            good &= each["offset"] >= end
            end = each["offset"] + math.prod(each["shape"])
        good &= flat["padding"] >= 0 and (end + flat["padding"]) % self.world_size == 0
        if not good or end != flat["numel"]:
            raise ValueError(f"layer `{flat['layer']}` does not add up")

    def read(self, param: Param, key: str, begin: int, end: int) -> torch.Tensor:
        """
        ### Elements of a parameter, or of a moment of it: `(end - begin,)`, as they were saved

        Reads the blocks in which they lie and no others. Raises `Broken` with the file, its rank
        and the parameter.
        """
        flat, at = self.flats[param.flat], param.entry["offset"]
        shard_numel = (flat["numel"] + flat["padding"]) // self.world_size
        try:
            found = torch.empty(end - begin, dtype=TYPES[flat["keys"][key]])
            while begin < end:
                rank, first = divmod(at + begin, shard_numel)
                # A part at a time: what is read is not in memory twice.
                last = min(shard_numel, first + end - begin, first + _PART_NUMEL)
                part = found[len(found) - (end - begin) :][: last - first]
                part.copy_(self.files[rank].read(f"{param.flat}.{key}", first, last))
                begin += last - first
        except (Broken, OSError, ValueError, TypeError, KeyError, IndexError) as error:
            raise Broken(f"`{param.name}`, its {key}: {error}") from error
        return found

    def replicated(self, rank: int, name: str) -> torch.Tensor:
        """
        ### A buffer, as a rank had it; of ranks that there were not, rank 0's
        """
        if (param := self.by_name.get(name)) and name not in self.manifest["replicated"]:
            # What came from another format does not tell buffers from parameters.
            return self.read(param, "param", 0, param.numel).view(param.shape)
        file = self.files[rank if rank < self.world_size else 0]
        try:
            return file.read(f"replicated.{name}").view(file.header[f"replicated.{name}"]["shape"])
        except (Broken, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
            raise Broken(f"`{name}`: {error}") from error

    def announced(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """
        ### Data type and shape of a buffer, without reading it
        """
        try:
            entry = self.files[0].header[f"replicated.{name}"]
            return TYPES[entry["dtype"]], tuple(entry["shape"])
        except (Broken, OSError, ValueError, TypeError, KeyError) as error:
            raise Broken(f"`{name}`: {error}") from error

    def states(self, param: Param) -> dict[str, Any]:
        """
        ### What the optimizer knew of a parameter: names of moments, and numbers
        """
        flat = self.flats[param.flat]
        place = flat["params"].index(param.entry)
        # Without `params` it is of all parameters of the param group.
        found = [each for each in flat["states"]
                 if each["param_group"] == param.entry["param_group"]
                 and place in each.get("params", (place,))]
        return found[0] if found else {"moments": [], "scalars": {}}


def _read_manifest(path: Path) -> dict[str, Any]:
    """
    #### Read and check a manifest

    A checksum says that it is as it was written, and the schema that it was we who wrote it.
    """
    if not path.exists():
        raise Broken(f"{path} is missing: this is no checkpoint, nor a folder of any")
    raw = path.read_bytes()
    manifest = json.loads(raw)
    version = manifest.get("version")
    if manifest.get("format") == FORMAT and isinstance(version, int) and version > VERSION:
        raise Broken(f"{path} is of format {version}, and this is zero3 for format {VERSION}: use "
                     "a newer one")
    head = _first_line(b"")
    if raw[: len(head)] != _first_line(raw[len(head) :]):
        raise Broken(f"{path} is damaged: it has another checksum")
    _fit(manifest, _SCHEMA, "the manifest")
    for states in (each for flat in manifest["flats"] for each in flat["states"]):
        _fit(states.get("params", []), [int], "the manifest, `params` of a state")
    if manifest["optimizer"] is not None:
        _fit(manifest["optimizer"], _OPTIMIZER, "the manifest, `optimizer`")
    good = (manifest["format"], manifest["version"]) == (FORMAT, VERSION)
    if not good or len(manifest["files"]) != manifest["world_size"] or not manifest["files"]:
        raise ValueError("no checkpoint of ours")
    return manifest


def _fit(value: Any, like: Any, where: str) -> None:
    """
    #### Raise `ValueError` where something is not of the type that the schema says
    """
    if isinstance(like, dict) and isinstance(value, dict):
        for key, each in like.items():
            _fit(value.get(key), each, f"{where}, `{key}`")
    elif isinstance(like, list) and isinstance(value, list):
        for i, each in enumerate(value):
            _fit(each, like[0], f"{where}, {i}")
    elif isinstance(like, (dict, list)) or not isinstance(value, like) or isinstance(value, bool):
        raise ValueError(f"{where} is {value!r:.40}, and not {like!r:.40}")


# ------------------------------------------------------------------------------------- small things


def encode(value: Any, where: str = "extra") -> Any:
    """
    ## Something small as JSON, so that `decode` gives it back as it was

    Numbers, strings, tensors, and lists, tuples, dicts and counters of these. JSON alone has
    neither tuples nor keys that are numbers, and a scheduler that looked for step 30 would not find
    "30". Other classes that are based on these come back as what they are based on.

    Raises `ValueError` with the place of what is none of that.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        raw = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        return {"__tensor__": raw.hex(), "dtype": type_name(value.dtype, where),
                "shape": [*value.shape]}
    if isinstance(value, list):
        return [encode(each, f"{where}[{i}]") for i, each in enumerate(value)]
    if isinstance(value, tuple):
        return {"__tuple__": encode([*value], where)}
    if isinstance(value, dict):
        pairs = [(key, encode(each, f"{where}[{key!r}]")) for key, each in value.items()]
        plain = all(isinstance(key, str) and not key.startswith("__") for key in value)
        if plain and not isinstance(value, Counter):
            return dict(pairs)
        kind = "__counter__" if isinstance(value, Counter) else "__items__"
        return {kind: [[encode(key, where), each] for key, each in pairs]}
    raise ValueError(f"`{where}` is a {type(value).__name__}")


def decode(value: Any) -> Any:
    """
    ## What `encode` was given
    """
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    if "__tensor__" in value:
        raw, dtype = bytearray.fromhex(value["__tensor__"]), TYPES[value["dtype"]]
        flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
        return flat.view(value["shape"])
    if "__tuple__" in value:
        return tuple(decode(value["__tuple__"]))
    for name, kind in (("__items__", dict), ("__counter__", Counter)):
        if name in value:
            return kind({decode(key): decode(each) for key, each in value[name]})
    return {key: decode(each) for key, each in value.items()}

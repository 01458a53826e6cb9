r"""
# Other libraries' checkpoints

DeepSpeed's universal layout and `torch.distributed.checkpoint`, written and read one parameter at a
time.

Both say what each parameter *is*, and not how it was cut, so another library, or another number of
ranks, can take it up; the idea is section 3 of [Universal
Checkpointing](https://arxiv.org/abs/2406.18820). What they have, and what we have, is the same
three tensors for each parameter that Adam trains:

$$w_{32}, \quad m, \quad v$$

in the files `fp32.pt`, `exp_avg.pt` and `exp_avg_sq.pt` of a folder, or, in a DCP folder, under
`model.NAME`, `optim.state.NAME.exp_avg` and `...exp_avg_sq`.

| | DeepSpeed | DCP |
|---|---|---|
| number of steps | of each parameter; Stage 3 reads one for all | of each parameter |
| options of param groups | its own configuration's | in it |
| buffers, frozen parameters | not in it | in it |
| tied parameters | once | under each name |

**Run this**: `python -m zero3.checkpoint universal FOLDER OUT`, with `--format dcp` for the other.

**Not covered, and what that costs**: both are pickles, in part. Where we read them, nothing but
tensors, plain containers and DCP's own records are unpickled, and no name in them leads to another
folder. A folder of somebody else's may still say sizes that no memory has. DeepSpeed 0.19 gives all
param groups of its Stage 3 one tensor that counts steps, which torch's Adam then moves on once for
each. With `--torch-adam` and several groups give each its own after loading: `for s in
engine.optimizer.optimizer.state.values(): s["step"] = s["step"].clone()`.
"""

import math
import os
import pickle
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TextIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from zero3.checkpoint.reader import (
    CheckpointReader,
    Param,
    commit,
    decode,
    encode,
    file_name,
    partial_path,
    place,
)
from zero3.checkpoint.tensor_files import TYPES, Broken, Writer, check_name, printable, type_name
from zero3.guards.version import __version__

# What DeepSpeed calls the master; the moments have torch's names. And the version whose layout this
# is: its stages 1 and 2 compare it with those that they can read.
_FP32, _DEEPSPEED_VERSION = "fp32", "0.19.8"


def from_tensors(folder: Path, step: int, tensors: dict[str, dict[str, tuple]],
                 scalars: dict[str, dict[str, Any]], read: Callable[[str, str], torch.Tensor]
                 ) -> None:
    """
    ## Make a checkpoint of plain tensors

    As if one rank had saved it, with each parameter alone in a layer.

    * `folder` is empty, or made here; `step` is the number of steps taken
    * `tensors` has, by name of the parameter and by key, data type and shape; `param` is the
      parameter itself, the others are moments
    * `scalars` is what else an optimizer knew of a parameter
    * `read` gives the values of one tensor

    Raises `Broken` where the folder has something in it, which could be a run's.
    """
    if step < 0:
        raise Broken(f"step {step} is none: pass one of at least 0")
    if folder.exists() and [*folder.iterdir()]:
        raise Broken(f"{folder} is not empty: choose another")
    flats, entries = [], []  # type: tuple[list[dict[str, Any]], list[tuple]]
    for i, (name, keys) in enumerate(tensors.items()):
        if "param" not in keys:
            raise Broken(f"`{name}` has moments there, and no values")
        for each in (name, *keys, *scalars.get(name, {})):
            check_name(each)
        dtype, shape = keys["param"]
        moments, known = [key for key in keys if key != "param"], encode(scalars.get(name, {}))
        states = [{"param_group": None, "moments": moments, "scalars": known}]
        flats.append({
            "layer": name, "dtype": type_name(dtype), "numel": math.prod(shape), "padding": 0,
            "keys": {key: type_name(kind) for key, (kind, _) in keys.items()},
            "params": [{"names": [name], "shape": [*shape], "offset": 0, "param_group": None}],
            "states": states if moments or known else []})
        for key, (kind, there) in keys.items():
            if tuple(there) != tuple(shape):
                raise Broken(f"`{name}` is of {tuple(shape)}, and its {key} of {tuple(there)}")
            entries.append((f"{i}.{key}", kind, (math.prod(shape),), name, key))
    entries.sort(key=lambda entry: -entry[1].itemsize)
    unfinished = partial_path(place(folder), step)
    unfinished.mkdir()
    try:
        like = {at: (kind, shape) for at, kind, shape, *_ in entries}
        with Writer(unfinished / file_name(0, 1), like) as writer:
            for _, kind, _, name, key in entries:
                writer.write(read(name, key).to(kind))
            file = writer.finish()
    except BaseException:
        shutil.rmtree(unfinished)
        raise
    done = commit(unfinished, {
        "step": step, "world_size": 1, "versions": {"zero3": __version__}, "files": [file],
        "flats": flats, "replicated": [], "optimizer": None, "extra": None})
    say(f"wrote {len(tensors)} parameters to {done}")


def say(line: str, file: TextIO | None = None) -> None:
    """
    ## Print a line, with what does not print escaped

    * `file` is standard output, where it is left out
    """
    print(printable(line), file=file)


def _full(archive: CheckpointReader, param: Param, key: str) -> torch.Tensor:
    return archive.read(param, key, 0, param.numel).view(param.shape)


def _scalars(archive: CheckpointReader, param: Param) -> dict[str, Any]:
    return decode(archive.states(param)["scalars"])


# -------------------------------------------------------------------------------------- DeepSpeed


def to_deepspeed(folder: Path, out: Path, torch_adam: bool) -> None:
    """
    ## Write DeepSpeed's universal layout

    * `torch_adam` says that the engine that loads it runs torch's Adam, which counts steps in a
      tensor; its own count them in a number

    The files that its stages 1 to 3 ask for, and no others. Raises `Broken`, before anything is
    written, where a parameter or a moment has no name for a file.
    """
    archive, root = CheckpointReader(folder), out / "universal"
    for param in archive.params:
        check_name(param.name, as_path=True)
        for key in archive.states(param)["moments"]:
            if check_name(key, as_path=True) in (_FP32, "step"):
                raise Broken(f"`{param.name}` has a moment `{key}`, which is another file's name")

    def put(value: Any, *path: str) -> None:
        at = root.joinpath(*path)
        at.parent.mkdir(parents=True, exist_ok=True)
        torch.save(value, at)

    place(out)
    taken = archive.manifest["step"]
    for param in archive.params:
        for key in ("param", *archive.states(param)["moments"]):
            # Without a name, which would keep it in memory beside the next one.
            put({"param": _full(archive, param, key).to(torch.float32)},
                "zero", param.name, f"{_FP32 if key == 'param' else key}.pt")
        if "step" in (scalars := _scalars(archive, param)):
            taken = int(scalars["step"])
            put(torch.tensor(float(taken)) if torch_adam else taken, "zero", param.name, "step.pt")
    step = torch.tensor(float(taken)) if torch_adam else taken
    # DeepSpeed copies options from here into each of its groups. It gets none and keeps its own.
    # Stages 1 and 2 load as many groups as are listed here, so there is one for each parameter.
    groups = [{"params": [i]} for i in range(len(archive.params))]
    put({"optimizer_state_dict": {"state": {0: {"step": step}}, "param_groups": groups[:1]},
         "param_groups": groups, "ds_version": _DEEPSPEED_VERSION},
        "zero", "optimizer_state.pt")
    for name in ("zero_pp_rank_0_mp_rank_00", "mp_rank_00"):
        put({"dp_world_size": 1, "mp_world_size": 1, "global_steps": archive.manifest["step"],
             "skipped_steps": 0}, f"{name}_model_states.pt")
    # Last: it says that the rest is there.
    (out / "latest_universal").write_text(root.name)
    say(f"wrote {len(archive.params)} parameters of step {archive.manifest['step']} to {root}; "
        f"DeepSpeed loads {out}")


class _Stub:
    """
    ## In place of DeepSpeed's classes, of which nothing is needed
    """

    def __init__(self, *args, **kwargs):
        pass


def from_deepspeed(source: Path, folder: Path) -> None:
    """
    ## Make a checkpoint of DeepSpeed's universal layout
    """
    latest = source / "latest_universal"
    root = source
    if latest.exists():
        root = source / check_name(latest.read_text().strip(), as_path=True)
    stubs: list[Any] = [(_Stub, f"deepspeed.runtime.{name}") for name in (
        "zero.config.ZeroStageEnum", "fp16.loss_scaler.LossScaler",
        "fp16.loss_scaler.DynamicLossScaler")]

    def open_file(path: Path) -> Any:
        with torch.serialization.safe_globals(stubs):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)

    # Stage 3 has flat tensors, and the shapes beside them; stages 1 and 2 have whole ones, and the
    # steps beside each.
    states_of = [root / f"{name}_model_states.pt"
                 for name in ("zero_pp_rank_0_mp_rank_00", "mp_rank_00")]
    about = open_file(next((path for path in states_of if path.exists()), states_of[0]))
    shapes = {name: shape for each in about.get("param_shapes", []) for name, shape in each.items()}
    steps_taken = about["global_steps"] - about.get("skipped_steps", 0)
    with suppress(OSError, KeyError):
        states = open_file(root / "zero" / "optimizer_state.pt")["optimizer_state_dict"]["state"]
        steps_taken = states[0]["step"]

    def read(name: str, key: str) -> torch.Tensor:
        if name in buffers:
            return buffers[name]
        found = open_file(root / "zero" / name / f"{_FP32 if key == 'param' else key}.pt")
        values = found["param"] if isinstance(found, dict) else found
        return values.view(shapes.get(name, values.shape))

    buffers = {name: about["module"][name] for name in about.get("buffer_names", [])}
    tensors: dict[str, dict[str, tuple]] = {
        name: {"param": (b.dtype, tuple(b.shape))} for name, b in buffers.items()}
    scalars = {}
    for at in sorted(path for path in (root / "zero").iterdir() if path.is_dir()):
        keys = {"param", *(path.stem for path in at.glob("*.pt"))} - {_FP32, "step"}
        values = {key: read(at.name, key) for key in sorted(keys)}
        tensors[at.name] = {key: (t.dtype, tuple(t.shape)) for key, t in values.items()}
        own = at / "step.pt"
        taken = open_file(own) if own.exists() else steps_taken
        scalars[at.name] = {"step": torch.tensor(float(taken))} if len(keys) > 1 else {}
    from_tensors(folder, int(about["global_steps"]), tensors, scalars, read)


# -------------------------------------------------------------------------------------------- DCP


class _DcpWriter(dcp.FileSystemWriter):
    """
    ## DCP's writer, one tensor after the other

    Torch's own keeps all tensors of a file until it is done.
    """

    def __init__(self, folder: Path, read: Callable[[str], torch.Tensor]):
        super().__init__(folder)
        self.folder, self.tensor = folder, read

    def write_data(self, plan: Any, planner: Any) -> Any:
        name, results = "__0_0.distcp", []
        with open(self.folder / name, "wb") as file:
            for item in plan.items:
                first = file.tell()
                if item.type == WriteItemType.BYTE_IO:
                    file.write(planner.resolve_data(item).getbuffer())
                else:
                    torch.save(self.tensor(item.index.fqn), file)
                length = file.tell() - first
                results.append(WriteResult(item.index, length, _StorageInfo(name, first, length)))
            file.flush()
            os.fsync(file.fileno())
        done: Future = Future()
        done.set_result(results)
        return done


def to_dcp(folder: Path, out: Path) -> None:
    """
    ## Write what `torch.distributed.checkpoint` loads

    `{"model": ..., "optim": ...}`, as `get_model_state_dict` and `get_optimizer_state_dict` give
    them: with them FSDP2 loads it. It is planned with tensors on the meta device, and each is read
    when it is its turn.
    """
    archive = CheckpointReader(folder)
    readers: dict[str, Callable[[], torch.Tensor]] = {}
    model, states, groups = {}, {}, []  # type: tuple[dict, dict, list]

    def later(dtype: torch.dtype, shape: Any, name: str, read: Callable[[], torch.Tensor]) -> Any:
        readers[name] = read
        return torch.empty(shape, dtype=dtype, device="meta")

    for p in archive.params:
        keys = archive.flats[p.flat]["keys"]
        for name in p.entry["names"]:
            model[name] = later(TYPES[keys["param"]], p.shape, f"model.{name}",
                                partial(_full, archive, p, "param"))
        known: dict[str, Any] = {}
        for key in archive.states(p)["moments"]:
            known[key] = later(TYPES[keys[key]], p.shape, f"optim.state.{p.name}.{key}",
                               partial(_full, archive, p, key))
        for key, value in _scalars(archive, p).items():
            at = f"optim.state.{p.name}.{key}"
            known[key] = (later(value.dtype, value.shape, at, value.clone)
                          if isinstance(value, torch.Tensor) else value)
        states |= {p.name: known} if known else {}
    for name in archive.manifest["replicated"]:
        model[name] = later(*archive.announced(name), f"model.{name}",
                            partial(archive.replicated, 0, name))
    # What came from DeepSpeed has moments, and no options: the usual ones, in one group.
    bare = archive.manifest["optimizer"] is None
    optimizer: dict[str, Any] = {"class": "AdamW", "groups": [{}][: len(states)]} if bare else (
        archive.manifest["optimizer"])
    for i, options in enumerate(decode(optimizer["groups"])):
        # Those that say how torch computes are not in a checkpoint, but who loads this asks for
        # them; and a scheduler for the learning rate that it began with.
        kind = getattr(torch.optim, optimizer["class"], torch.optim.AdamW)
        usual = kind([torch.zeros(1)]).state_dict()["param_groups"]
        options = {**usual[0], **options}
        names = [p.name for p in archive.params
                 if (p.name in states if bare else p.entry["param_group"] == i)]
        groups.append({"initial_lr": options["lr"], **options, "params": names})
    state = {"model": model, **({"optim": {"state": states, "param_groups": groups}} if groups
                                else {})}
    place(out)
    with warnings.catch_warnings():
        # It warns that there is no process group; none is needed.
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=_DcpWriter(out, lambda name: readers[name]()), no_dist=True)
    say(f"wrote {len(readers)} tensors of step {archive.manifest['step']} to {out}")


class _MetadataUnpickler(pickle.Unpickler):
    """
    ## Reads DCP's `.metadata`, which is a pickle, and runs nothing that is in it

    A pickle names the functions and classes that make its objects, and Python's own reader calls
    whatever is named. Here these are looked up in a short list of records, sizes and data types.
    """

    _ADMITTED = {
        "torch.distributed.checkpoint.metadata": (
            "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
            "TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING"),
        "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
        "torch.serialization": ("_get_layout",),
        "torch": ("Size",),
        "collections": ("OrderedDict",),
        "pathlib": ("PosixPath", "WindowsPath"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if name in self._ADMITTED.get(module, ()):
            # A path is somebody's note of where the folder was; of another system's it cannot be
            # one here.
            return PurePath if module == "pathlib" else super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise Broken(f"`.metadata` asks for `{module}.{name}`, which is none of DCP's records: to "
                     "read it could run anything. If you trust it, load the folder by "
                     "`torch.distributed.checkpoint` and save it again")


class _DcpReader(dcp.FileSystemReader):
    """
    ## DCP's reader, with a look at what its folder says before that is believed
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        with open(Path(self.path) / ".metadata", "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        if not isinstance(metadata, dcp.Metadata):
            raise Broken(f"`.metadata` has a {type(metadata).__name__}, and nothing of DCP's")
        for info in metadata.storage_data.values():
            check_name(info.relative_path, as_path=True)
        return metadata


def from_dcp(source: Path, folder: Path, step: int) -> None:
    """
    ## Make a checkpoint of a DCP folder

    Of weights alone, or with what an optimizer knows, wherever in it `model` and `optim` are.
    """
    reader = _DcpReader(source)
    metadata = reader.read_metadata()
    reader.set_up_storage_reader(metadata, True)
    entries: dict[str, Any] = metadata.state_dict_metadata
    paths = metadata.planner_data or {}
    named = any("model" in paths.get(key, ()) for key in entries)
    places: dict[tuple[str, str], str] = {}
    for key, entry in entries.items():
        path = [str(part) for part in paths.get(key, (key,))]
        if not isinstance(entry, TensorStorageMetadata):
            continue
        if "optim" in path:
            # "state", the parameter's name, the moment's; or all of that in one.
            rest = ".".join(path[path.index("optim") + 1 :]).removeprefix("state.")
            name, _, moment = rest.rpartition(".")
            places[name, moment] = key
        elif not named or "model" in path:
            places[".".join(path[path.index("model") + 1 if named else 0 :]), "param"] = key

    def read(name: str, key: str) -> torch.Tensor:
        at = places[name, key]
        entry, planner = entries[at], dcp.DefaultLoadPlanner()
        values = torch.empty(entry.size, dtype=entry.properties.dtype)
        planner.set_up_planner({at: values}, metadata, True)
        reader.read_data(planner.create_local_plan(), planner).wait()
        return values

    tensors: dict[str, dict[str, tuple]] = {}
    scalars: dict[str, dict[str, Any]] = {}
    # Each parameter before its moments.
    for name, key in sorted(places, key=lambda place: (place[0], place[1] != "param")):
        entry = entries[places[name, key]]
        known, shape = tensors.setdefault(name, {}), tuple(entry.size)
        if key == "step" or shape != known.get("param", (None, shape))[1]:
            scalars.setdefault(name, {})[key] = read(name, key)
        else:
            known[key] = (entry.properties.dtype, shape)
    taken = [int(known["step"]) for known in scalars.values() if "step" in known]
    from_tensors(folder, step or max(taken, default=0), tensors, scalars, read)

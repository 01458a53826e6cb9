r"""
# Checkpoints of other libraries

Read and write DeepSpeed's universal layout and `torch.distributed.checkpoint` (DCP).

Both formats store whole parameters ([Universal Checkpointing](https://arxiv.org/abs/2406.18820),
section 3). They have three tensors for each parameter that Adam trains: the fp32 master and two
moments,

$$w_{32}, \quad m, \quad v$$

For a parameter `0.weight` they are here:

| | DeepSpeed, a file each | DCP, a key each |
|---|---|---|
| $w_{32}$ | `universal/zero/0.weight/fp32.pt` | `model.0.weight` |
| $m$ | `universal/zero/0.weight/exp_avg.pt` | `optim.state.0.weight.exp_avg` |
| $v$ | `universal/zero/0.weight/exp_avg_sq.pt` | `optim.state.0.weight.exp_avg_sq` |
| number of steps | of each parameter; Stage 3 reads one for all | of each parameter |
| options of param groups | not stored | stored, and read by `load_dcp` alone |
| buffers, frozen parameters outside of layers | not stored | stored |
| tied parameters | under one name | under each name |

**Run this**: `python -m zero3.checkpoint universal FOLDER OUT` writes the layout of DeepSpeed, and
with `--format dcp` that of DCP.

**Not covered, and what that costs**: parts of both formats are pickles. The functions here unpickle
only tensors, plain containers and DCP's own records. A forged folder can still announce tensors
that are larger than any memory.

In DeepSpeed 0.19 all param groups of Stage 3 count their steps in one tensor, so torch's Adam adds
a step for each group. With `--torch-adam` and several groups, give each a tensor of its own after
loading: `for s in engine.optimizer.optimizer.state.values(): s["step"] = s["step"].clone()`.
"""

import io
import math
import pickle
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Any, TextIO

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from zero3 import __version__
from zero3.checkpoint.reader import (
    CheckpointReader,
    FlatEntry,
    Listing,
    Param,
    clean_up_interrupted_saves,
    commit_checkpoint,
    decode,
    encode,
    errors_name,
    file_name,
    make_output_folder,
    partial_path,
)
from zero3.guards.command_line import one_line
from zero3.offload.tensors import Broken, Like, type_name, write_tensors

# DeepSpeed's name of the master.
_FP32 = "fp32"
# DeepSpeed's files of model states: Stage 3 reads the first name, stages 1 and 2 the second.
_MODEL_STATES = ("zero_pp_rank_0_mp_rank_00_model_states.pt", "mp_rank_00_model_states.pt")


def from_tensors(folder: Path,
                 step: int,
                 tensors: dict[str, Like],
                 scalars: Mapping[str, Mapping[str, object]],
                 read: Callable[[str, str], torch.Tensor]) -> None:
    """
    ## Make a checkpoint of whole tensors

    It looks as if one rank had saved it, with a layer for each parameter.

    * `folder` has no checkpoints, and is created if necessary; `step` is the number of steps taken
    * `tensors` has, for each name of a parameter, the data type and shape of each of its tensors by
      key: `param` is the parameter itself, the other keys are moments
    * `scalars` has the other optimizer states of a parameter, such as the count of steps
    * `read` returns the values of one tensor for a name and a key

    Raises `Broken` if the folder has checkpoints, if another run has locked it, or if tensors do
    not fit together. After an error while the file is written, it has an interrupted save.
    """
    flats = [flat_entry(name, keys, scalars.get(name, {}))
             for name, keys in tensors.items()]
    entries = {f"{i}.{key}": (name, key)
               for i, (name, keys) in enumerate(tensors.items())
               for key in keys}
    like: Like = {f"{i}.{key}": (dtype, (math.prod(shape),))
                  for i, keys in enumerate(tensors.values())
                  for key, (dtype, shape) in keys.items()}

    unfinished = partial_path(make_output_folder(folder), step)
    # A conversion to this folder may have been interrupted.
    clean_up_interrupted_saves(folder)
    unfinished.mkdir()
    file = write_tensors(unfinished / file_name(0, 1), like,
                         lambda entry: [read(*entries[entry])])
    checkpoint = commit_checkpoint(unfinished, {
        "step": step,
        "world_size": 1,
        "versions": {"zero3": __version__},
        "files": [file],
        "flats": flats,
        "replicated": {},
        "optimizer": None,
        "extra": None})
    print_escaped(f"wrote {len(tensors)} parameters to {checkpoint}")


def flat_entry(name: str,
               keys: Like,
               scalars: Mapping[str, object],
               group: int | None = None) -> FlatEntry:
    """
    ## The manifest's entry for a parameter that is alone in its layer

    * `keys` has the data type and shape of each of its tensors, and `scalars` its other states
    * `group` is the number of its param group, if that is known

    Raises `Broken` if its tensors do not fit together.
    """
    Broken.unless("param" in keys, f"`{name}` has moments but no values")
    for each in (name, *keys, *scalars):
        check_name(each)
    dtype, shape = keys["param"]
    for key, (_, other) in keys.items():
        Broken.unless(other == shape, f"`{name}` has the shape {shape}, and its {key} {other}")
    moments = [key for key in keys if key != "param"]
    return {
        "place": 0,
        "layer": name,
        "dtype": type_name(dtype),
        "numel": math.prod(shape),
        "padding": 0,
        "keys": {key: type_name(dtype)
                 for key, (dtype, _) in keys.items()},
        "params": [{
            "names": [name],
            "shape": [*shape],
            "offset": 0,
            "param_group": group}],
        "states": [{
            "param_group": group,
            "moments": moments,
            "scalars": encode(scalars),
            "params": None}] if moments or scalars else []}


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


def print_escaped(line: str, file: TextIO | None = None) -> None:
    """
    ## Print a line and escape the characters that do not print
    """
    print(one_line(line), file=file)


# -------------------------------------------------------------------------------------- DeepSpeed


def to_deepspeed(folder: Path,
                 out: Path,
                 torch_adam: bool) -> None:
    """
    ## Write DeepSpeed's universal layout

    * `torch_adam` is for an engine with torch's Adam, which counts steps in a tensor. DeepSpeed's
      own Adam counts them in a number

    Raises `Broken` before it writes anything if a parameter or a moment has a name that no file may
    have, or if `out` has such a layout already.
    """
    checkpoint = CheckpointReader(folder)
    _check_file_names(checkpoint)
    make_output_folder(out)
    root = out / "universal"
    # Moments of an older one would be read as this one's.
    Broken.unless(not root.exists(), f"{root} exists already: choose another folder")
    (root / "zero").mkdir(parents=True)
    count: Callable[[float], torch.Tensor | int] = partial(
        torch.tensor, device="cpu") if torch_adam else int
    steps_taken = count(float(checkpoint.manifest["step"]))
    for param in checkpoint.params:
        path = root / "zero" / param.name
        path.mkdir(exist_ok=True)
        for key in ("param", *param.states["moments"]):
            # Not in a variable, which would keep it in memory beside the next one.
            torch.save({"param": checkpoint.read_whole(param, key).to(torch.float32)},
                       path / f"{_FP32 if key == 'param' else key}.pt")
        scalars = decode(param.states["scalars"])
        if "step" in scalars:
            steps_taken = count(float(scalars["step"]))
            torch.save(steps_taken, path / "step.pt")

    # Without options here, DeepSpeed keeps its own. Stages 1 and 2 load as many groups as are
    # listed, so list one for each parameter.
    groups = [{"params": [i]}
              for i in range(len(checkpoint.params))]
    state = {"state": {0: {"step": steps_taken}}, "param_groups": groups[:1]}
    # Stages 1 and 2 check the version.
    torch.save({"optimizer_state_dict": state, "param_groups": groups, "ds_version": "0.19.8"},
               root / "zero" / "optimizer_state.pt")

    step = checkpoint.manifest["step"]
    for name in _MODEL_STATES:
        torch.save({"dp_world_size": 1, "mp_world_size": 1, "global_steps": step,
                    "skipped_steps": 0}, root / name)
    # Last, because it names a complete folder.
    (out / "latest_universal").write_text(root.name)
    print_escaped(f"wrote {len(checkpoint.params)} parameters of step {step} to {root}; DeepSpeed "
                  f"loads {out}")


def _check_file_names(checkpoint: CheckpointReader) -> None:
    """
    #### Check that files can have the names of all parameters and moments

    A name with a slash would lead to another folder.
    """
    for param in checkpoint.params:
        check_name(param.name, as_path=True)
        for key in param.states["moments"]:
            Broken.unless(check_name(key, as_path=True) not in (_FP32, "step"),
                          f"`{param.name}` has a moment `{key}`, which is another file's name")


def from_deepspeed(source: Path, folder: Path) -> None:
    """
    ## Make a checkpoint of DeepSpeed's universal layout

    * `source` has the layout itself, or a file `latest_universal` with the name of its folder
    """
    root = source
    if (source / "latest_universal").exists():
        root /= check_name((source / "latest_universal").read_text().strip(), as_path=True)

    stage_3, other_stages = (root / name for name in _MODEL_STATES)
    model = _load_deepspeed(stage_3 if stage_3.exists() else other_stages)
    buffers = {name: model["module"][name]
               for name in model.get("buffer_names", [])}
    # Stage 3 stores flat tensors, and their shapes here.
    shapes = {name: shape for group in model.get("param_shapes", [])
              for name, shape in group.items()}

    def read(name: str, key: str) -> torch.Tensor:
        if name in buffers:
            return buffers[name]
        found = _load_deepspeed(root / "zero" / name / f"{_FP32 if key == 'param' else key}.pt")
        values = found["param"] if isinstance(found, dict) else found
        return values.view(shapes.get(name, values.shape))

    # Stage 3 stores one number of steps for all parameters; stages 1 and 2 one beside each.
    steps_of_all = model["global_steps"] - model.get("skipped_steps", 0)
    with suppress(OSError, KeyError):
        optimizer = _load_deepspeed(root / "zero" / "optimizer_state.pt")["optimizer_state_dict"]
        steps_of_all = optimizer["state"][0]["step"]

    tensors = {name: {"param": (b.dtype, tuple(b.shape))}
               for name, b in buffers.items()}
    scalars = {}
    for path in sorted(path for path in (root / "zero").iterdir()
                       if path.is_dir()):
        keys = {"param", *(file.stem for file in path.glob("*.pt"))} - {_FP32, "step"}
        values = {key: read(path.name, key)
                  for key in sorted(keys)}
        tensors[path.name] = {key: (t.dtype, tuple(t.shape))
                              for key, t in values.items()}
        own = path / "step.pt"
        steps_taken = _load_deepspeed(own) if own.exists() else steps_of_all
        trained = len(keys) > 1
        scalars[path.name] = {"step": torch.tensor(
            float(steps_taken), device="cpu")} if trained else {}
    from_tensors(folder, int(model["global_steps"]), tensors, scalars, read)


class _Stub:
    """
    ## Stand-in for DeepSpeed's classes in a pickle; their content is not used
    """

    def __init__(self, *args, **kwargs):
        pass


def _load_deepspeed(path: Path) -> Any:
    """
    #### Unpickle a file of tensors, plain containers and stubs
    """
    stubs: list[Callable | tuple[Callable, str]] = [
        (_Stub, f"deepspeed.runtime.{name}") for name in (
            "zero.config.ZeroStageEnum", "fp16.loss_scaler.LossScaler",
            "fp16.loss_scaler.DynamicLossScaler")]
    with torch.serialization.safe_globals(stubs):
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)


# -------------------------------------------------------------------------------------------- DCP


def to_dcp(folder: Path, out: Path) -> None:
    """
    ## Write a folder that `torch.distributed.checkpoint` loads

    The state dict is `{"model": ..., "optim": ...}`, as FSDP2 loads it.
    """
    checkpoint = CheckpointReader(folder)
    state = dcp_state(checkpoint, {name: checkpoint.replicated(0, name).to("meta")
                                   for name in checkpoint.manifest["replicated"]})
    make_output_folder(out)
    # torch's writer keeps all tensors of a file in memory, so each tensor gets a file.
    writer = dcp.FileSystemWriter(out, single_file_per_rank=False)
    with warnings.catch_warnings():
        # It warns that there is no process group.
        warnings.simplefilter("ignore")
        dcp.save(state, storage_writer=writer, planner=_DcpPlanner(checkpoint), no_dist=True)
    print_escaped(f"wrote {len(checkpoint.params)} parameters of step "
                  f"{checkpoint.manifest['step']} to {out}")


def dcp_state(checkpoint: Listing, replicated: dict[str, torch.Tensor]) -> dict[str, object]:
    """
    ## The state dict that DCP is to write

    * `replicated` has the tensors that every rank has whole
    """
    model = replicated | {
        name: _meta(checkpoint, param, "param")
        for param in checkpoint.params
        for name in param.entry["names"]}
    states = {
        param.name: {
            **decode(param.states["scalars"]),
            **{key: _meta(checkpoint, param, key) for key in param.states["moments"]}}
        for param in checkpoint.params
        if param.states["scalars"] or param.states["moments"]}
    groups = _dcp_groups(checkpoint, [*states])
    optim = {"optim": {"state": states, "param_groups": groups}} if groups else {}
    return {"model": model, **optim}


def _meta(checkpoint: Listing,
          param: Param,
          key: str) -> torch.Tensor:
    # A tensor without elements needs no planner.
    device = "meta" if param.numel else "cpu"
    return torch.empty(param.shape, dtype=checkpoint.dtype(param, key), device=device)


def _dcp_groups(checkpoint: Listing, trained: list[str]) -> list[dict[str, object]]:
    """
    #### The param groups in DCP's state dict
    """
    optimizer = checkpoint.manifest["optimizer"]
    if optimizer is None:
        # A checkpoint that was made from another format has moments but no options.
        return [_dcp_group("AdamW", {}, trained)] if trained else []
    return [_dcp_group(options.pop("optimizer", optimizer["class"]), options, [
                param.name for param in checkpoint.params if param.entry["param_group"] == i])
            for i, options in enumerate(decode(optimizer["groups"]))]


def _dcp_group(optimizer_class: str,
               options: dict[str, object],
               names: list[str]) -> dict[str, object]:
    """
    #### A param group with all options of torch's optimizer

    Loaders ask for some that a checkpoint does not have, such as `fused`.
    """
    make_optimizer = getattr(torch.optim, optimizer_class, torch.optim.AdamW)
    defaults = make_optimizer([torch.zeros(1, 1, device="cpu")]).state_dict()["param_groups"][0]
    options = {**defaults, **options}
    return {"initial_lr": options["lr"], **options, "params": names}


class _DcpPlanner(dcp.DefaultSavePlanner):
    """
    ## DCP's planner, which hands torch's writer the values of a meta tensor when its turn comes
    """

    def __init__(self, checkpoint: CheckpointReader):
        super().__init__()
        self.checkpoint = checkpoint

    def resolve_data(self, write_item: WriteItem) -> Any:
        """
        #### The values of a parameter, of a moment or of a buffer
        """
        dcp_key = write_item.index.fqn
        if not getattr(self.state_dict[dcp_key], "is_meta", False):
            return super().resolve_data(write_item)
        name, key = name_and_key(self.mappings[dcp_key])
        if key == "param":
            return self.checkpoint.replicated(0, name)
        return self.checkpoint.read_whole(self.checkpoint.by_name[name], key)


def name_and_key(path: tuple[object, ...]) -> tuple[str, str]:
    """
    ## The name of a parameter, and our key, for a tensor of `dcp_state`

    * `path` is `("model", NAME)` or `("optim", "state", NAME, KEY)`
    """
    return (f"{path[1]}", "param") if path[0] == "model" else (f"{path[2]}", f"{path[3]}")


def from_dcp(source: Path, folder: Path) -> None:
    """
    ## Make a checkpoint of a DCP folder

    Its step is that of the optimizer states; of weights alone it is 0.
    """
    found = DcpFolder(source)
    steps_taken = [int(known["step"])
                   for known in found.scalars.values() if "step" in known]
    from_tensors(folder, max(steps_taken, default=0), found.tensors, found.scalars, found.read)


# The keys of a DCP folder: of a tensor, by the parameter's name and our key; of an option, by the
# number of its param group and its name.
DcpKeys = dict[tuple[str, str], str]


class DcpFolder:
    """
    ## What is in a folder of DCP's

    * `tensors` and `scalars` are as for `from_tensors`
    """

    def __init__(self, folder: Path):
        self.metadata = _read_metadata(folder)
        self.entries: dict[str, Any] = {**self.metadata.state_dict_metadata}
        self.reader = dcp.FileSystemReader(folder)
        self.reader.set_up_storage_reader(self.metadata, True)
        self.keys, self.options = _dcp_keys(self.metadata)
        # An object that is no tensor has none.
        sizes = {at: getattr(self.entries[dcp_key], "size", None)
                 for at, dcp_key in self.keys.items()}
        # A count of a parameter without dimensions looks like a moment, so look at the others.
        counts = {"step", *(key for (name, key), size in sizes.items()
                            if size == () != sizes.get((name, "param")))}
        scalars = {
            (name, key): self.keys[name, key]
            for (name, key), size in sizes.items()
            if key in counts or size is None or size != sizes.get((name, "param"), size)}
        self.scalars = self.read_all(scalars, "a state of the optimizer")
        self.tensors: dict[str, Like] = {}
        for name, key in sorted(self.keys):
            tensors = self.tensors.setdefault(name, {})
            if (name, key) not in scalars:
                entry = self.entries[self.keys[name, key]]
                tensors[key] = (entry.properties.dtype, tuple(entry.size))

    def read_all(self, keys: DcpKeys, what: str) -> dict[str, dict[str, Any]]:
        """
        ### Read tensors as a whole, and objects that are no tensors

        * `what` names them in errors

        Returns the value for each parameter and key, or for each param group and option.
        """
        entries = {dcp_key: self.entries[dcp_key] for dcp_key in keys.values()}
        wanted = {
            dcp_key: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            if isinstance(entry, TensorStorageMetadata) else None
            for dcp_key, entry in entries.items()}
        planner = _Objects()
        planner.set_up_planner(wanted, self.metadata, True)
        with errors_name(what):
            self.reader.read_data(planner.create_local_plan(), planner).wait()
        found: dict[str, dict[str, Any]] = {}
        for (at, key), dcp_key in keys.items():
            found.setdefault(at, {})[key] = planner.state_dict[dcp_key]
        return found

    def read(self, name: str, key: str) -> torch.Tensor:
        """
        ### Read a whole tensor
        """
        keys = {(name, key): self.keys[name, key]}
        return self.read_all(keys, f"`{name}`, its {key}")[name][key]


def _dcp_keys(metadata: dcp.Metadata) -> tuple[DcpKeys, DcpKeys]:
    """
    #### DCP's keys of parameters and their states, and those of the options of param groups

    A folder without any `model` is a plain state dict.
    """
    paths = metadata.planner_data or {}
    nested = any("model" in paths.get(key, ())
                 for key in metadata.state_dict_metadata)
    keys: DcpKeys = {}
    options: DcpKeys = {}
    for dcp_key, entry in metadata.state_dict_metadata.items():
        path = [str(part)
                for part in paths.get(dcp_key, (dcp_key,))]
        is_tensor = isinstance(entry, TensorStorageMetadata)
        if path[-3:-2] == ["param_groups"]:
            options[path[-2], path[-1]] = dcp_key
        elif "optim" in path:
            # Either `state`, name and moment are parts of the path, or they are one part.
            rest = ".".join(path[path.index("optim") + 1 :])
            name, _, key = rest.removeprefix("state.").rpartition(".")
            is_path = path[-3:-2] == ["state"]
            if is_path:
                name, key = path[-2:]
            # Options that were flattened are those of a parameter.
            if (is_tensor or is_path) and not rest.startswith("param_groups."):
                keys[name, key] = dcp_key
        elif is_tensor and (not nested or "model" in path):
            parts = path[path.index("model") + 1 :] if nested else path
            keys[".".join(parts), "param"] = dcp_key
    return keys, options


class _Objects(dcp.DefaultLoadPlanner):
    """
    ## DCP's planner, which runs nothing that is in a pickle
    """

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _make(made: Any, cls: type, *args: object) -> object:
    """
    #### What a stand-in does in place of a class, or of a function

    Without arguments a pickle wants an empty object.
    """
    return made(*args) if args else made.__new__(made)


def _read_metadata(folder: Path) -> dcp.Metadata:
    """
    #### Read DCP's metadata, and check the names of files in it
    """
    with open(folder / ".metadata", "rb") as file:
        metadata = _MetadataUnpickler(file).load()
    Broken.unless(isinstance(metadata, dcp.Metadata),
                  f"`.metadata` has a {type(metadata).__name__} instead of DCP's metadata")
    for info in metadata.storage_data.values():
        check_name(info.relative_path, as_path=True)
    return metadata


class _MetadataUnpickler(pickle.Unpickler):
    """
    ## Unpickle DCP's `.metadata` without running anything in it

    This unpickler knows a short list of names. A pickle may also set attributes on a class, so it
    is given stand-ins, which make the same objects.
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

    def find_class(self, module: str, name: str) -> object:
        if name in self._ADMITTED.get(module, ()):
            # A path says where the folder used to be. `PurePath` can hold another system's path.
            made = PurePath if module == "pathlib" else super().find_class(module, name)
            return type(name, (), {"__new__": partial(_make, made)})
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise Broken(f"`.metadata` asks for `{module}.{name}`, which is none of DCP's records: "
                     "reading it could run anything. If you trust it, load the folder with "
                     "`torch.distributed.checkpoint` and save it again")

r"""
# From checkpoints to other libraries, and back

What is in a checkpoint, for people to look at and for other libraries to load; and from these back
into a checkpoint. `main` is the command line, `python -m zero3.checkpoint`.

A checkpoint of shards is of use to nobody but us. To leave is to read parameter after parameter,
whichever ranks had it, and to write it as somebody else has it; to come back is the reverse. None
of it needs the model, a GPU or more than one process, and none has the whole model in memory. With
the pieces of files that are under way,

$$\text{memory} \le 2 \cdot \text{largest parameter} + 32 \text{ MiB} + 16 \text{ MiB}$$

to write and to read, for what torch unpickles it copies; and `export` has no more than $2^{20}$
elements of a parameter.

| format | command | what it has |
|---|---|---|
| Hugging Face's safetensors, a file, or several with an index | `export`, `import` | weights |
| DeepSpeed's universal checkpoint, a folder for each parameter | `universal` | and moments |
| `torch.distributed.checkpoint`, which FSDP2 loads | `universal --format dcp` | and options |

`universal` finds out which way to go: what is of another format becomes a checkpoint, and a
checkpoint becomes what `--format` says.

**Run this**: `python -m zero3.checkpoint --help`.

**Not covered, and what that costs**: names are those of the plain model. Where a format has others,
Hugging Face's `model.` in front for instance, they have to be changed first.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.distributed.checkpoint.api import CheckpointException

from zero3.checkpoint.formats import (
    from_dcp,
    from_deepspeed,
    from_tensors,
    say,
    to_dcp,
    to_deepspeed,
)
from zero3.checkpoint.reader import CheckpointReader, Param, newest, place, steps
from zero3.checkpoint.tensor_files import BLOCK_BYTES, TYPES, Broken, Writer, check_name
from zero3.whole_model.materialise import Source

# Elements of a parameter that `export` has in memory at once; and its file, where there is one.
_PART_NUMEL, _ONE = 1 << 20, "model.safetensors"


# ------------------------------------------------------------------------------------------- look


def inspect(folder: Path) -> None:
    """
    ## Print what a checkpoint has: its flat parameters, and what is in them
    """
    archive = CheckpointReader(folder)
    manifest, optimizer = archive.manifest, archive.manifest["optimizer"]
    nbytes = sum(file.nbytes for file in archive.files)
    say(f"{folder}: step {manifest['step']:,}, saved by {archive.world_size} ranks, {nbytes:,} "
        "bytes")
    if optimizer is not None:
        say(f"{optimizer['class']}, {len(optimizer['groups'])} param groups")
    for flat in archive.flats:
        kept = ", ".join(f"{key} {dtype}" for key, dtype in flat["keys"].items())
        padding = f" and {flat['padding']} of padding" if flat["padding"] else ""
        say(f"{flat['numel']:>14,}{padding} in layer {flat['layer'] or '(the rest)'}, "
            f"{flat['dtype']}; kept: {kept}")
        for each in flat["params"]:
            say(f"{math.prod(each['shape']):>18,}  {' = '.join(each['names'])} "
                f"{tuple(each['shape'])}")
    for name in manifest["replicated"]:
        say(f"{math.prod(archive.announced(name)[1]):>14,} in {name}, whole on each rank")


def verify(folders: list[Path]) -> int:
    """
    ## Read all of these, and say which have a byte that is not what was written

    Returns 1 if there is one, else 0.
    """
    broken = 0
    for folder in folders:
        try:
            archive = CheckpointReader(folder)
            for file in archive.files:
                for i in range(-(-file.nbytes // BLOCK_BYTES)):
                    file.block(i)
                # Whether the header has what the manifest says: to read up to the end from there
                # is to read nothing more.
                for i, flat in enumerate(archive.flats):
                    end = -(-flat["numel"] // archive.world_size)
                    for key in flat["keys"]:
                        file.read(f"{i}.{key}", end, end)
            say(f"{folder}: as it was written")
        except Exception as error:
            # Whatever it is, the other folders are looked at too.
            broken = 1
            say(f"{folder}: {_told(error)}", sys.stderr)
    return broken


# ----------------------------------------------------------------------------------- safetensors


def export(folder: Path, out: Path, dtype: torch.dtype | None = None, file_bytes: int = 5 << 30
           ) -> None:
    """
    ## Write the weights as Hugging Face has them

    * `out` is a folder that has no such files yet
    * `dtype` is what floating parameters become; left out, what they were in the model
    * `file_bytes` are in a file at most, or one parameter; there is an index if one is not enough
    """
    archive = CheckpointReader(folder)
    parts: dict[str, tuple[torch.dtype, tuple[int, ...], Any]] = {}
    for param in archive.params:
        own = TYPES[archive.flats[param.flat]["dtype"]]
        kind = dtype if dtype and own.is_floating_point else own
        parts[param.name] = (kind, param.shape, param)
    for name in archive.manifest["replicated"]:
        parts[name] = (*archive.announced(name), name)
    files = _files(parts, file_bytes)
    total_bytes = sum(math.prod(shape) * kind.itemsize for kind, shape, _ in parts.values())
    # As safetensors says it: which name of a tied parameter stands for which others.
    tied = {other: param.name for param in archive.params for other in param.entry["names"][1:]}
    index: dict[str, str] = {}
    place(out)
    with ExitStack() as undo:
        for i, each in enumerate(files, 1):
            name = f"model-{i:05}-of-{len(files):05}.safetensors" if files[1:] else _ONE
            like = {name: (kind, shape) for name, (kind, shape, _) in each.items()}
            with Writer(out / name, like, {"format": "pt", **tied}) as writer:
                for kind, _, source in each.values():
                    for values in _parts(archive, source):
                        writer.write(values.to(kind))
                writer.finish()
            undo.callback((out / name).unlink)
            index |= dict.fromkeys(each, name)
        # All are there, and stay.
        undo.pop_all()
    if files[1:]:
        (out / "model.safetensors.index.json").write_text(json.dumps(
            {"metadata": {"total_size": total_bytes}, "weight_map": index}, indent=1))
    say(f"wrote {len(parts)} tensors of step {archive.manifest['step']}, {total_bytes:,} bytes, "
        f"to {out}, in {len(files)} files")


def _files(parts: dict[str, tuple], file_bytes: int) -> list[dict[str, tuple]]:
    """
    #### What goes into which file, larger elements first
    """
    files: list[dict[str, tuple]] = [{}]
    left_bytes = file_bytes
    for name, part in sorted(parts.items(), key=lambda item: -item[1][0].itemsize):
        nbytes = math.prod(part[1]) * part[0].itemsize
        if files[-1] and nbytes > left_bytes:
            files.append({})
            left_bytes = file_bytes
        files[-1][name] = part
        left_bytes -= nbytes
    return files


def _parts(archive: CheckpointReader, source: Param | str) -> Iterator[torch.Tensor]:
    """
    #### A parameter, a part at a time; or what is whole on each rank, by name
    """
    if isinstance(source, str):
        yield archive.replicated(0, source)
        return
    for begin in range(0, source.numel, _PART_NUMEL):
        yield archive.read(source, "param", begin, min(begin + _PART_NUMEL, source.numel))


def from_safetensors(source: Path, folder: Path, step: int) -> None:
    """
    ## Make a checkpoint of Hugging Face's safetensors: a file, an index, or the folder of either
    """
    files, tensors = Source(torch.device("cpu"), checkpoint=source).files, {}
    if not files:
        raise Broken(f"{source} has no tensors")
    for name, path in files.items():
        check_name(path.name, as_path=True)
        with safe_open(path, framework="pt") as file:
            part = file.get_slice(name)
            tensors[name] = {"param": (TYPES[part.get_dtype()], tuple(part.get_shape()))}

    def read(name: str, key: str) -> torch.Tensor:
        with safe_open(files[name], framework="pt") as file:
            return file.get_tensor(name)

    from_tensors(folder, step, tensors, {}, read)


# ------------------------------------------------------------------------------------ command line


def universal(source: Path, out: Path, style: str, torch_adam: bool, step: int) -> None:
    """
    ## From a checkpoint into another format, or from one of these into a checkpoint
    """
    if (source / ".metadata").exists():
        from_dcp(source, out, step)
    elif (source / "latest_universal").exists() or (source / "zero").is_dir():
        from_deepspeed(source, out)
    elif style == "dcp":
        to_dcp(_at(source), out)
    else:
        to_deepspeed(_at(source), out, torch_adam)


def _at(folder: Path) -> Path:
    """
    #### The newest checkpoint of a run, or of the main job's; or the checkpoint itself
    """
    return newest(folder) or newest(folder / "checkpoints") or folder


def _told(error: BaseException) -> str:
    """
    #### An error in a line; of a library's own, which may not say much, also its kind
    """
    if isinstance(error, (Broken, OSError)):
        return f"{error}"
    return f"this is not what it was taken for, or damaged: {error!r}"


def _path(text: str) -> Path:
    """
    #### A folder from the command line; an empty one would be where the program was started
    """
    if not text:
        raise argparse.ArgumentTypeError("it is empty: pass a folder, or `.` for this one")
    return Path(text)


def _count(text: str) -> int:
    """
    #### A number of steps or bytes
    """
    if not (text.isascii() and text.isdigit() and len(text) < 19):
        raise argparse.ArgumentTypeError(f"{text!r:.40} is no number of at least 0")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zero3.checkpoint")
    commands = parser.add_subparsers(required=True, dest="command")
    helps = {
        "inspect": "print what is in a checkpoint",
        "verify": "read all of a checkpoint, or of all of a run",
        "export": "write the weights as safetensors",
        "import": "make a checkpoint of safetensors",
        "universal": "write, or read, what DeepSpeed or FSDP2 load",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text)
        command.add_argument("folder", type=_path, metavar="FOLDER",
                             help="a run's, a checkpoint's own, or what to read from")
        if name in ("export", "import", "universal"):
            command.add_argument("out", type=_path, metavar="OUT", help="the folder to write to")
        if name in ("import", "universal"):
            command.add_argument("--step", type=_count, default=0, help="steps taken, of "
                                 "safetensors and of what DCP has without an optimizer")
        if name == "export":
            command.add_argument("--dtype", choices=["F32", "BF16", "F16"], help="of floating "
                                 "parameters; left out, the model's")
            command.add_argument("--file-bytes", type=_count, default=5 << 30, metavar="N",
                                 help="in a file, at most")
        if name == "universal":
            command.add_argument("--format", choices=["deepspeed", "dcp"], default="deepspeed")
            command.add_argument("--torch-adam", action="store_true", help="for DeepSpeed "
                                 "with torch's Adam, and not its own")
    return parser


def main(argv: list[str] | None = None) -> int:
    """
    ## The command line, of `zero3.checkpoint`
    """
    args = _parser().parse_args(argv)
    try:
        if args.command == "inspect":
            inspect(_at(args.folder))
        elif args.command == "verify":
            every = steps(args.folder) or steps(args.folder / "checkpoints")
            return verify([*every.values()] or [args.folder])
        elif args.command == "export":
            dtype = TYPES[args.dtype] if args.dtype else None
            export(_at(args.folder), args.out, dtype, args.file_bytes)
        elif args.command == "import":
            from_safetensors(args.folder, args.out, args.step)
        else:
            universal(args.folder, args.out, args.format, args.torch_adam, args.step)
    except BrokenPipeError:
        # Whoever reads has read enough, and what Python still wants to flush goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except Exception as error:
        # Whatever it is: a file of somebody else's can break any library that reads it.
        say(f"zero3.checkpoint {args.command}: {_told(error)}", sys.stderr)
        return 1
    except CheckpointException as error:
        # Torch's is no `Exception`: it has one for each rank, and a trace of where they were.
        causes = [cause for cause, _ in error.failures.values()]
        say(f"zero3.checkpoint {args.command}: {_told(causes[0])}", sys.stderr)
        return 1
    return 0

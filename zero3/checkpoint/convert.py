r"""
# The checkpoint tool: verify, export, convert

`main` is the command line. It checks checkpoints and converts them, one parameter at a time, in one
process without the model or a GPU.

| format | command | content |
|---|---|---|
| Hugging Face's safetensors | `export` | weights |
| DeepSpeed's universal layout: a folder for each parameter | `universal` | weights, states |
| `torch.distributed.checkpoint` (FSDP2) | `universal --format dcp` | weights, states, options |

`universal` finds the direction itself. Options go to DCP, and `load_dcp` alone reads them. `Writer`
has 32 MiB of pieces, `CheckpointReader` keeps 16 MiB of blocks, and torch copies a parameter when
it unpickles it:

$$\text{memory} \le 2 \cdot \text{largest parameter} + 32 \text{ MiB} + 16 \text{ MiB}$$

**Run this**: `python -m zero3.checkpoint --help`.

**Not covered, and what that costs**: `export` writes a single file, also of a large model. The
parameters have the names of the plain model, without a prefix such as Hugging Face's `model.`. Only
`wrap(model, checkpoint=...)` reads safetensors.
"""

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException

from zero3.checkpoint.formats import (
    from_dcp,
    from_deepspeed,
    print_escaped,
    to_dcp,
    to_deepspeed,
)
from zero3.checkpoint.reader import (
    PART_NUMEL,
    CheckpointReader,
    make_output_folder,
    newest,
    steps,
)
from zero3.offload.tensors import BLOCK_BYTES, TYPES, Broken, Like, write_tensors

# ------------------------------------------------------------------------------------------ verify


def verify(folders: list[Path]) -> int:
    """
    ## Read checkpoints completely and report damage

    Returns 1 if one of them is damaged, else 0.
    """
    status = 0
    for folder in folders:
        try:
            for file in CheckpointReader(folder).files:
                for i in range(-(-file.nbytes // BLOCK_BYTES)):
                    file.block(i)
            print_escaped(f"{folder}: as it was written")
        except Exception as error:
            status = 1
            print_escaped(f"{folder}: {_in_a_line(error)}", sys.stderr)
    return status


# ----------------------------------------------------------------------------------- safetensors


def export(folder: str | Path,
           out: str | Path,
           dtype: torch.dtype | None = None) -> None:
    """
    ## Export the weights for Hugging Face

    * `out` is a folder without a file `model.safetensors`
    * `dtype` is the new data type of floating-point parameters, by default that of the model
    """
    checkpoint = CheckpointReader(Path(folder))
    like: Like = {}
    for param in checkpoint.params:
        own = TYPES[checkpoint.flats[param.flat]["dtype"]]
        like[param.name] = (dtype if dtype and own.is_floating_point else own, param.shape)
    for name in checkpoint.manifest["replicated"]:
        tensor = checkpoint.replicated(0, name)
        like[name] = (tensor.dtype, tuple(tensor.shape))

    # The other names of a tied parameter.
    metadata = {"format": "pt"} | {other: param.name for param in checkpoint.params
                                   for other in param.entry["names"][1:]}
    file = write_tensors(make_output_folder(Path(out)) / "model.safetensors", like,
                         lambda name: _parts(checkpoint, name), metadata)
    print_escaped(f"wrote {len(like)} tensors of step {checkpoint.manifest['step']}, "
                  f"{file['nbytes']:,} bytes, to {out}")


def _parts(checkpoint: CheckpointReader, name: str) -> Iterable[torch.Tensor]:
    """
    #### The values of a parameter, a part at a time, or of a buffer
    """
    if name in checkpoint.manifest["replicated"]:
        return [checkpoint.replicated(0, name)]
    param = checkpoint.by_name[name]
    return (checkpoint.read(param, "param", begin, min(begin + PART_NUMEL, param.numel))
            for begin in range(0, param.numel, PART_NUMEL))


# ------------------------------------------------------------------------------------ command line


def main(argv: list[str] | None = None) -> int:
    """
    ## Run the command line

    Returns the exit status: 0, or 1 after an error.
    """
    args = _parser().parse_args(argv)
    try:
        check_files(args.folder)
        if args.command == "verify":
            found = steps(args.folder) or steps(args.folder / "checkpoints")
            return verify([*found.values()] or [args.folder])
        elif args.command == "export":
            export(_checkpoint_in(args.folder), args.out, TYPES.get(args.dtype))
        elif (args.folder / ".metadata").exists():
            from_dcp(args.folder, args.out)
        elif (args.folder / "latest_universal").exists() or (args.folder / "zero").is_dir():
            from_deepspeed(args.folder, args.out)
        elif args.format == "dcp":
            to_dcp(_checkpoint_in(args.folder), args.out)
        else:
            to_deepspeed(_checkpoint_in(args.folder), args.out, args.torch_adam)
    except (Exception, CheckpointException) as error:
        # Another library can raise anything over a forged file. DCP's `CheckpointException` is not
        # an `Exception`.
        print_escaped(f"zero3.checkpoint {args.command}: {_in_a_line(error)}", sys.stderr)
        return 1
    return 0


def check_files(source: Path) -> None:
    """
    ## Refuse a pipe or a device in the place of a file, here or in this folder

    Nobody may ever write to a pipe, and reading it would wait for that. Raises `Broken`.
    """
    for path in (source, *source.rglob("*")):
        Broken.unless(not path.exists() or path.is_file() or path.is_dir(),
                      f"{path} is neither a file nor a folder")


def _checkpoint_in(folder: Path) -> Path:
    """
    #### The newest checkpoint of a run or of a training job, or the folder itself
    """
    return newest(folder) or newest(folder / "checkpoints") or folder


def _in_a_line(error: BaseException) -> str:
    """
    #### An error in one line
    """
    if isinstance(error, CheckpointException):
        # It has an error for each rank. There is one rank here.
        error, _ = next(iter(error.failures.values()))
    if isinstance(error, (Broken, OSError)):
        return f"{error}"
    return f"this is another kind of folder, or damaged: {error!r}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m zero3.checkpoint")
    commands = parser.add_subparsers(required=True, dest="command")
    verifies = commands.add_parser("verify", help="read a checkpoint, or all checkpoints of a run, "
                                   "and report damage")
    exports = commands.add_parser("export", help="write the weights as safetensors")
    converts = commands.add_parser("universal", help="convert to or from the formats of DeepSpeed "
                                   "and FSDP2")
    for command in (verifies, exports, converts):
        command.add_argument("folder", type=Path, metavar="FOLDER",
                             help="the folder of a run or of a checkpoint, or the source to read")
    for command in (exports, converts):
        command.add_argument("out", type=Path, metavar="OUT", help="the folder to write to")
    exports.add_argument("--dtype", choices=["F32", "BF16", "F16"], help="the data type of "
                         "floating-point parameters, by default that of the model")
    converts.add_argument("--format", choices=["deepspeed", "dcp"], default="deepspeed")
    converts.add_argument("--torch-adam", action="store_true", help="write for a DeepSpeed engine "
                          "with torch's Adam instead of its own")
    return parser

r"""
# Models larger than memory: made, read and written layer by layer

`Source` gives a layer its values, and `save` writes a sharded model to files.

Build a model that no rank has room for without values, on torch's `meta` device. `wrap` then
allocates a layer, gives it its values, shards it and frees it, before it comes to the next one
([ZeRO-Infinity](https://arxiv.org/abs/2104.07857), section 7.2). The values come from the module's
own `reset_parameters`, from a function, or from a checkpoint.

**Two layers on two ranks.** The first layer has 4 elements, the second one has 6. Memory while
`wrap` makes the model, in elements on each rank:

| | layer 1 | layer 2 | together |
|---|---|---|---|
| allocate layer 1, and copy it to its flat parameter | 4 + 4 | | 8 |
| shard it, and free the rest | 2 | | 2 |
| allocate layer 2, and copy it to its flat parameter | 2 | 6 + 6 | 14 |
| shard it, and free the rest | 2 | 3 | 5 |

The largest layer counts twice:

$$\text{memory while a model is made} \le \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil
+ 2 \max_\ell P_\ell \quad \text{elements}$$

A tensor that is read from a checkpoint is one more copy on rank 0.

Each module is seeded by its name, so the values do not depend on the number of ranks. A model that
is built in one go gets others.

**Run this**: `python -m pytest tests/whole_model/test_wrap.py -k memory` makes, trains and saves a
model of four times the memory that each rank may take.

**Not covered, and what that costs**: checkpoints are safetensors in Hugging Face's layout, a single
file or several with an index. Their names have to be those of the plain model's `state_dict()`;
rename the tensors first if they differ. Buffers that are in no file need `reset_parameters` in
their module, `_init_weights` in the model, as Hugging Face's have it, or `init`; or build them
outside of the meta device. Optimizer states are not in these files. A save overwrites the previous
files, so an interrupted one leaves neither.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from zero3.comm.parts import WeightPart, part_of, whole_values
from zero3.flat import own_modules
from zero3.guards.checks import Named
from zero3.guards.command_line import one_line
from zero3.offload.tensors import INDEX, save_tensors, write_index
from zero3.optimizer.states import seeded
from zero3.sharded import ShardedModel


@dataclass
class Source:
    """
    ## The source of a model's values

    * `device` is where layers are allocated
    * `seed` is for values that are drawn
    * `init` is called instead of `reset_parameters`, on rank 0, with each module that has tensors
      without values, innermost first; tensors with values keep them
    * `checkpoint` is a file of safetensors, the index of several, or their folder; rank 0 reads it
    * `own_init` is the model's `_init_weights`, by which Hugging Face's models compute buffers that
      are in no file
    """

    device: torch.device
    seed: int = 0
    init: Callable[[nn.Module], object] | None = None
    checkpoint: str | Path | None = None
    own_init: Callable[[nn.Module], object] | None = None

    @torch.no_grad()
    def fill(self, model: ShardedModel,
             modules: dict[str, nn.Module],
             path: str,
             names: dict[torch.Tensor, list[str]]) -> dict[torch.Tensor, torch.Tensor]:
        """
        ### Give values to the tensors of a layer that have none, or to all from a checkpoint

        * `modules` are the layer's own, by their names in `model`; `path` is the layer's name
        * `names` are all names of each tensor in the model

        All ranks must call it. Rank 0 draws or reads the values, and tells the others if that
        failed (all-gather of a text). Returns the new tensors by the meta tensors that they
        replace.

        Raises `RuntimeError` on all ranks if a tensor gets no values, or if a checkpoint does not
        fit (invariant I6).
        """
        made, empty = self._allocate(modules)
        if not empty and self.checkpoint is None:
            return made
        with agreed(model, f"cannot fill `{path or 'the rest'}`", "values for every parameter and "
                    "buffer", "pass `init=`, a function of a module; or pass the path of a "
                    "checkpoint with all of these tensors; or build the missing ones outside of "
                    "the meta device"):
            if model.comm.is_first:
                for new in made.values():
                    _mark(new)
                names = names | {new: names[old]
                                 for old, new in made.items()}
                self._give_values(modules, empty, names)
        return made

    def _allocate(self, modules: dict[str, nn.Module]
                  ) -> tuple[dict[torch.Tensor, torch.Tensor], dict[str, list[str]]]:
        """
        #### Replace meta tensors by tensors with memory
        """
        made: dict[torch.Tensor, torch.Tensor] = {}
        empty: dict[str, list[str]] = {}
        for at, module in modules.items():
            kinds: Any = (module._parameters, module._buffers)
            for tensors in kinds:
                for name, t in tensors.items():
                    if t is not None and t.is_meta:
                        if t not in made:
                            made[t] = torch.empty_like(t, device=self.device, requires_grad=False)
                            if isinstance(t, nn.Parameter):
                                made[t] = nn.Parameter(made[t], t.requires_grad)
                        tensors[name] = made[t]
                        empty.setdefault(at, []).append(name)
        return made, empty

    def _give_values(self, modules: dict[str, nn.Module],
                     empty: dict[str, list[str]],
                     names: dict[torch.Tensor, list[str]]) -> None:
        """
        #### Draw or read the values of a layer

        Runs on rank 0 alone. Raises `ValueError` if a tensor gets no values.
        """
        # A draw writes to all tensors of a module. Those that had values keep them.
        kept: list[Any] = [(tensors, name, t, t.clone())
                           for at, module in modules.items()
                           for tensors in (module._parameters, module._buffers)
                           for name, t in tensors.items()
                           if t is not None and name not in empty.get(at, ())]
        # An outer module may change the values of an inner one.
        for at, keys in reversed(empty.items()):
            # Checkpoints have no values for non-persistent buffers.
            if self.checkpoint is None or modules[at]._non_persistent_buffers_set & {*keys}:
                self._draw(modules[at], at)
        # Free the copies before a checkpoint is read.
        while kept:
            tensors, name, t, values = kept.pop()
            tensors[name] = t.copy_(values)
        if self.checkpoint is not None:
            self._read(modules, names)
        for at, keys in empty.items():
            for name in keys:
                if _is_marked(getattr(modules[at], name)):
                    raise ValueError(f"`{f'{at}.{name}'.strip('.')}` has no values, or NaN")

    def _draw(self, module: nn.Module, at: str) -> None:
        """
        #### Draw the values of a module
        """
        kind = type(module)
        # The first of these that there is.
        draw = (self.init
                or getattr(kind, "reset_parameters", None)
                or getattr(kind, "_reset_parameters", None)
                or (self.own_init if self.checkpoint is not None else None))
        if draw is None:
            raise ValueError(f"`{at}`, a {kind.__name__} without `reset_parameters`")
        try:
            # Each module has random numbers of its own, wherever it is drawn.
            seed = zlib.crc32(f"{self.seed} {at}".encode())
            with seeded(self.device, seed), whole_values(module):
                draw(module)
        except Exception as error:
            raise ValueError(f"`{at}`: {error!r}") from error

    def _read(self, modules: dict[str, nn.Module],
              names: dict[torch.Tensor, list[str]]) -> None:
        """
        #### Read the values of a layer

        * `names` are all names of each tensor, of which the file has one
        """
        parts = {t: part_of(module, name)
                 for module in modules.values()
                 for name, t in (*module._parameters.items(),
                                 *module._buffers.items())
                 if t is not None and name not in module._non_persistent_buffers_set}
        try:
            for t, part in parts.items():
                self._read_tensor(t, names[t], part)
        except (OSError, KeyError, json.JSONDecodeError, SafetensorError) as error:
            raise ValueError(f"{self.checkpoint}: {error!r}") from error

    def _read_tensor(self, t: torch.Tensor,
                     names: list[str],
                     part: WeightPart | None) -> None:
        """
        #### Read one tensor, which is in the checkpoint under one of these names
        """
        name = next((name for name in names if name in self.files), "")
        if not name:
            raise ValueError(f"no `{names[0]}` in {self.checkpoint}")
        with safe_open(self.files[name], framework="pt") as file, torch.device("cpu"):
            whole = file.get_tensor(name)
            wanted = part.shape if part else t.shape
            if whole.shape != wanted:
                raise ValueError(f"`{name}` of {(*whole.shape,)} there, and {(*wanted,)} here")
            t.copy_(part.take(whole).view_as(t) if part else whole)

    @cached_property
    def files(self) -> dict[str, Path]:
        """
        ### The file of each tensor in the checkpoint
        """
        path = Path(str(self.checkpoint))
        if path.is_dir():
            path = path / INDEX if (path / INDEX).exists() else path / "model.safetensors"
        if path.suffix == ".json":
            names = json.loads(path.read_text())["weight_map"]
            # An index must not name other folders.
            return {name: path.parent / Path(file).name
                    for name, file in names.items()}
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)


def save(units: list[Any], folder: Path) -> None:
    """
    ## Write a whole model's weights, one unit at a time

    * `units` are the `Unit`s of the model, the root first

    Writes safetensors, a file for each unit with tensors and an index, in Hugging Face's layout.
    All ranks must call it, because each unit is all-gathered; rank 0 writes. A parameter with
    several names is written once. A model of Hugging Face's gets its `config.json`, so that
    `from_pretrained` opens the folder.

    Raises `RuntimeError` on all ranks if rank 0 cannot write (invariant I6).
    """
    index: dict[str, str] = {}
    total_bytes = 0
    for i, unit in enumerate(units, 1):
        file = f"model-{i:05}-of-{len(units):05}.safetensors"
        with unit.full_params(), agreed(
                unit, f"cannot be saved to {folder}", "a folder with room to write to",
                "choose another, or make room"):
            own = ({slot.names[0]: slot.param.detach()
                    for slot in unit.slots()}
                   | buffers_of(unit.module))
            found = {unit.full_name(name): tensor
                     for name, tensor in own.items()}
            index |= dict.fromkeys(found, file)
            total_bytes += sum(t.nbytes for t in found.values())
            if unit.comm.is_first:
                folder.mkdir(parents=True, exist_ok=True)
                if found:
                    save_tensors(folder / file, found, {"format": "pt"})
                if unit is units[-1]:
                    write_index(folder, index, total_bytes)
                    _save_config(units[0].module, folder)


@contextmanager
def agreed(sender: Named,
           what: str,
           expected: str,
           cure: str) -> Iterator[None]:
    """
    ## Leave the block on all ranks, or raise an error on all if one of them has raised any

    * `what`, `expected` and `cure` are as for `expect`
    """
    try:
        yield
    except Exception as error:
        # An error without a text is one, too.
        problem = one_line(f"{error}") or repr(error)
        sender.comm.agree(sender, what, expected, problem, cure)
    else:
        sender.comm.agree(sender, what, expected, "", cure)


def _save_config(plain: nn.Module, folder: Path) -> None:
    """
    #### Write the configuration of a Hugging Face model, which `from_pretrained` asks for
    """
    config: Any = getattr(plain, "config", None)
    if hasattr(config, "save_pretrained"):
        config.architectures = config.architectures or [type(plain).__name__]
        config.save_pretrained(folder)


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """
    ## The persistent buffers of a layer's module, without those of layers inside it
    """
    return {prefix + name: buffer
            for prefix, owner in own_modules(module)
            for name, buffer in owner._buffers.items()
            if buffer is not None and name not in owner._non_persistent_buffers_set}


def _mark(tensor: torch.Tensor) -> None:
    """
    #### Mark memory without values: with NaN, or with a byte that no bool has
    """
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.view(-1).view(torch.uint8).fill_(0xA5)


def _is_marked(tensor: torch.Tensor) -> bool:
    """
    #### Whether a tensor still has the mark

    A single NaN is enough. Of whole numbers all have to be equal to the mark.
    """
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    as_bytes = tensor.reshape(-1).view(torch.uint8)
    return bool(len(as_bytes) and (as_bytes == 0xA5).all())


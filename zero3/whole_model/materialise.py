r"""
# Models larger than memory: made, read and written layer by layer

`Source` gives one layer of a model its values, `Deferred` stands for one that is not made yet, and
`save` writes a sharded model to files.

A model that no rank could hold must not be whole at any time, and least of all on its first day. So
it is built without values, on torch's `meta` device or of `Deferred` layers. Then each layer in
turn is materialised on every rank, filled, sharded and freed, before the next one is touched.
Values come from the module's own `reset_parameters`, from a function, or from a checkpoint, of
which only the layer's tensors are read. It is what section 7.2 of
[ZeRO-Infinity](https://arxiv.org/abs/2104.07857) does while a model is built.

$$\text{while a model is made} \le \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil
+ 2 \max_\ell P_\ell \quad \text{elements}$$

Twice the largest layer: in its parameters, and in the flat one that they are copied to. A tensor of
a checkpoint is a copy too, before it is one.

Each module is seeded by its name, and a deferred layer by its own. So values depend neither on the
number of ranks nor on what was made before; they are not those of a model that is made in one go,
which draws all of its numbers one after the other.

**Run this**: `python -m pytest tests/test_coordinator.py -k memory` makes, trains and saves a model
of four times a limit on its memory.

**Not covered, and what that costs**: checkpoints are files of safetensors, one or several with an
index, as Hugging Face has them, with names as in the plain model's `state_dict()`; other names have
to be changed first. Buffers that are in no file need `init`, for Hugging Face's models
`init=model._init_weights`, or to be built outside of the meta device. Optimizer states are not in
them, and a save that is cut off has overwritten what was there.
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
from safetensors.torch import save_file
from torch import nn

from zero3.flat import own_modules

_INDEX = "model.safetensors.index.json"


class Deferred(nn.Module):
    """
    ## A layer that is not made yet

    Stands in a model where `factory()` will give a layer, on each rank, when `wrap` comes to it.
    What it gives is one unit, whatever is inside of it.
    """

    def __init__(self, factory: Callable[[], nn.Module]):
        super().__init__()
        self.factory = factory


@dataclass
class Source:
    """
    ## Where a model's values come from

    * `device` is where layers are materialised
    * `seed` is of the values that are drawn, for what is on the meta device or deferred
    * `init` gives a module its values, in place of the module's `reset_parameters`; it is called
      with each module that has parameters or buffers without values, innermost first, on rank 0
    * `checkpoint` is a file of safetensors, the index of several, or their folder, on rank 0
    """

    device: torch.device
    seed: int = 0
    init: Callable[[nn.Module], Any] | None = None
    checkpoint: str | Path | None = None

    def make(self, model: Any, module: nn.Module, path: str) -> nn.Module:
        """
        ### The layer itself, where it was deferred

        * `model` raises errors, on all ranks

        Raises `RuntimeError` on all ranks if the factory of one of them raises.
        """
        if not isinstance(module, Deferred):
            return module
        made: nn.Module = module
        cause: Exception | None = None
        try:
            with self._seeded(path), self.device:
                made = module.factory().train(module.training)
        except Exception as error:
            cause = error
        try:
            model.comm.agree(model, f"cannot make `{path}`", "a layer from its factory",
                             repr(cause) if cause else "", "look into the factory")
        except RuntimeError as error:
            raise error from cause
        return made

    @torch.no_grad()
    def fill(self, model: Any, modules: dict[str, nn.Module], path: str,
             names: dict[torch.Tensor, list[str]]) -> dict[torch.Tensor, torch.Tensor]:
        """
        ### Give a layer values, where it has none

        * `model` raises errors, on all ranks
        * `modules` are the layer's own, by their names in the model; `path` is the layer's
        * `names` are all that a tensor has in the model

        All ranks call it; rank 0 draws or reads, for its values become everybody's, and tells the
        others of a problem (all-gather of a text). Returns what was made, by what stood for it.

        Raises `RuntimeError` on all ranks where there are no values for something, or a checkpoint
        does not fit. Keeps I6.
        """
        made: dict[torch.Tensor, torch.Tensor] = {}
        empty: dict[str, list[str]] = {}  # of each module, what had no values
        for at, module in modules.items():
            kinds: Any = (module._parameters, module._buffers)
            for tensors in kinds:
                for name, t in tensors.items():
                    if t is not None and t.is_meta:
                        if t not in made:
                            # In its shape, device
                            new = torch.empty_like(t, device=self.device, requires_grad=False)
                            made[t] = (nn.Parameter(new, t.requires_grad)
                                       if isinstance(t, nn.Parameter) else new)
                            if not model.comm.rank:
                                _mark(new)
                        tensors[name] = made[t]
                        empty.setdefault(at, []).append(name)
        if not empty and self.checkpoint is None:
            return made
        problem = ""
        # Those inside of others first: what holds them may want to change them afterwards.
        for at in [*empty][::-1] if not model.comm.rank else ():
            if self.checkpoint is None or modules[at]._non_persistent_buffers_set & {*empty[at]}:
                problem = problem or self._draw(modules[at], at)
        if self.checkpoint is not None and not model.comm.rank:
            stood_for = {new: old for old, new in made.items()}
            problem = problem or self._read(modules, lambda t: names.get(stood_for.get(t, t), []))
        for at, keys in empty.items() if not model.comm.rank else ():
            for name in keys:
                if _is_marked(getattr(modules[at], name)):
                    problem = problem or f"`{_join(at, name)}` has no values, or NaN"
        model.comm.agree(model, f"cannot fill `{path or 'the rest'}`", "values for every parameter "
                         "and buffer", problem, "pass `init=`, a function of a module, or the path "
                         "of a checkpoint with all of these tensors; or build what is missing "
                         "outside of the meta device")
        return made

    def _draw(self, module: nn.Module, at: str) -> str:
        """
        #### Draw a module's values, or say why not
        """
        own = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))
        if self.init is None and own is None:
            return f"`{at}`, a {type(module).__name__} without `reset_parameters`"
        try:
            with self._seeded(at):
                if self.init is not None:
                    self.init(module)
                else:
                    own()  # type: ignore[misc]
        except Exception as error:
            # The other ranks wait for this one, and shall hear of it.
            return f"`{at}`: {error!r}"
        return ""

    def _read(self, modules: dict[str, nn.Module],
              more: Callable[[torch.Tensor], list[str]]) -> str:
        """
        #### Read a layer's values, or say why not

        A tied parameter is in a file under one of its names, of which some may be in other layers:
        `more` gives all.
        """
        places: dict[torch.Tensor, list[str]] = {}
        for at, module in modules.items():
            for name, t in (*module._parameters.items(), *module._buffers.items()):
                if t is not None and name not in module._non_persistent_buffers_set:
                    places.setdefault(t, []).append(_join(at, name))
        try:
            for t, own in places.items():
                name = next((name for name in (*own, *more(t)) if name in self.files), "")
                if not name:
                    return f"no `{own[0]}` in {self.checkpoint}"
                with safe_open(self.files[name], framework="pt") as file:
                    shape = tuple(file.get_slice(name).get_shape())
                    if shape != tuple(t.shape):
                        return f"`{name}` of {shape} there, and {tuple(t.shape)} here"
                    t.copy_(file.get_tensor(name))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            return f"{self.checkpoint}: {error!r}"
        return ""

    @cached_property
    def files(self) -> dict[str, Path]:
        """
        ### In which file each tensor of the checkpoint is
        """
        path = Path(str(self.checkpoint))
        if path.is_dir():
            path = path / _INDEX if (path / _INDEX).exists() else path / "model.safetensors"
        if path.suffix == ".json":
            names = json.loads(path.read_text())["weight_map"]
            # By its last part alone: an index has no say about other folders.
            return {name: path.parent / Path(file).name for name, file in names.items()}
        with safe_open(path, framework="pt") as file:
            return dict.fromkeys(file.keys(), path)

    @contextmanager
    def _seeded(self, at: str) -> Iterator[None]:
        """
        #### Random numbers of a module's own, and afterwards those from before
        """
        seed = zlib.crc32(f"{self.seed} {at}".encode())
        # `torch.manual_seed` and a bare `fork_rng` would go through every GPU of the machine. A
        # rank has one.
        gpu = [self.device] if self.device.type != "cpu" else []
        with torch.random.fork_rng(gpu, device_type=self.device.type if gpu else "cuda"):
            torch.default_generator.manual_seed(seed)
            for device in gpu:
                backend = torch.get_device_module(device)
                with backend.device(device):
                    backend.manual_seed(seed)
            yield


def save(model: Any, folder: Path) -> None:
    """
    ## Write a whole model's weights, one unit at a time

    Safetensors, a file for each unit and an index, as Hugging Face has them and as `Source` reads
    them. A parameter with several names is in it once, under the first that its unit has for it.
    All ranks call it, and all-gather each unit; rank 0 writes.

    Raises `RuntimeError` on all ranks where that fails. Keeps I6.
    """
    index: dict[str, str] = {}
    total_bytes = 0
    for i, unit in enumerate(model.units, 1):
        file, problem = f"model-{i:05}-of-{len(model.units):05}.safetensors", ""
        with unit.full_params() as params:
            first = {p: name for name, p in reversed(params.items())}
            found = {unit.full_name(name): p.detach() for p, name in first.items()}
            for prefix, module in own_modules(unit.module):
                # Copies, for buffers may share memory or be views, which files cannot say.
                found |= {unit.full_name(prefix + name): buffer.contiguous().clone()
                          for name, buffer in module._buffers.items()
                          if buffer is not None and name not in module._non_persistent_buffers_set}
            index |= dict.fromkeys(found, file)
            total_bytes += sum(t.nbytes for t in found.values())
            try:
                if not unit.comm.rank:
                    folder.mkdir(parents=True, exist_ok=True)
                    if found:
                        save_file(found, folder / file, {"format": "pt"})
                    if unit is model.units[-1]:
                        told = {"metadata": {"total_size": total_bytes}, "weight_map": index}
                        (folder / _INDEX).write_text(json.dumps(told, indent=1))
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                problem = f"{error}"
        unit.comm.agree(unit, f"cannot be saved to {folder}", "a folder with room to write to",
                        problem, "choose another, or make room")


def _mark(tensor: torch.Tensor) -> None:
    """
    #### Write what shows that nobody has written: NaN, and elsewhere a byte that no bool has
    """
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.view(-1).view(torch.uint8).fill_(0xA5)


def _is_marked(tensor: torch.Tensor) -> bool:
    """
    #### Whether something of it, or all where that could be a value, is as `_mark` left it
    """
    if tensor.is_floating_point():
        return bool(tensor.isnan().any())
    as_bytes = tensor.reshape(-1).view(torch.uint8)
    return bool(len(as_bytes) and (as_bytes == 0xA5).all())


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

"""
# Clean: a model that really is smaller

`clean` makes compression permanent. Pruned rows, channels and heads disappear from the shapes, if
their rule has `follows`, and weights are stored in their bits.

    from zero3.compression import clean, compress, read, write

    plain = [Block() for _ in range(4)]
    compress(plain, rules)              # the same rules
    clean(plain, trained=model)         # with the weights of the sharded model
    write(plain, "small.safetensors")

    small = [Block() for _ in range(4)]
    read(small, "small.safetensors")    # cleaned, too

**Take two layers of 4 by 4**, and prune two rows of the first. Two outputs are always zero, so two
columns of the second layer go, too:

| | parameters | multiply-adds for an input |
|---|---|---|
| before | 4 · 4 + 4 · 4 = 32 | 32 |
| after | 2 · 4 + 4 · 2 = 16 | 16 |

Single elements save bytes and no multiply-adds.

| pruned | goes from this layer | and from the layers that `follows` names |
|---|---|---|
| row | rows, and elements of the bias | columns |
| channel, head | columns | rows, and elements of the bias |

Rows may go if zero stays zero on the way to the next layer, as it does in a ReLU, a GELU or a
dropout, and not in a sigmoid or a norm. Columns may always go.

If no shape changes, the outputs are the same as before, to the bit. In smaller shapes kernels may
add the remaining terms of a sum in another order.

**Run this**: `python -m pytest tests/compression/test_clean.py`.

**Not covered, and what that costs**: pipelines; save a checkpoint, and load it into a model without
stages. Each rank has the whole model while it cleans it. Inputs in 8 bits are multiplied as floats.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.flop_counter import FlopCounterMode

from zero3.compression.compress import named_modules
from zero3.compression.stored import Stored, store, unpack
from zero3.compression.weights import (
    Compressed,
    Grid,
    Method,
    PrunedElements,
    PrunedParts,
    Quantised,
    Weighted,
    axes,
)
from zero3.guards.checks import expect
from zero3.offload.tensors import save_tensors
from zero3.optimizer.stage3 import plain_paths
from zero3.sharded import ShardedModel, comm_of

# Which rows and which columns of a weight are left, bool, or a slice for all.
Cut = list[torch.Tensor | slice]
ALL = slice(None)
# Of a stored weight, as the file names them.
PARTS = ("codes", "mask", "scales", "zeros")
_SIZES = (("out_features", "out_channels", "nf", "embedding_dim"),
          ("in_features", "in_channels", "nx", "num_embeddings"))


@torch.no_grad()
def clean(model: nn.Module | Iterable[nn.Module], trained: ShardedModel | None = None) -> None:
    """
    ## Make the compression of a plain model permanent, in place

    * `model` is as `compress` left it
    * `trained` is a sharded model that was compressed by the same rules. Its weights, steps and
      thresholds are taken over first (all-gather; all ranks call it)

    Raises `ValueError` if nothing is compressed, if a layer in `follows` does not exist or has
    another shape, or if columns go from the middle of a group that shares a scale. Raises
    `RuntimeError` if codes do not give the trained weight; the model is half cleaned then.
    """
    modules = named_modules(model)
    if trained is not None:
        take_over(modules[""], trained)
    plans = {name: Plan(name, module)
             for name, module in modules.items()
             if _methods(module)}
    expect(bool(plans), "clean", "a model with compressed weights", "none, or a model that is "
           "clean already", "call `compress` with the rules that it was trained with")
    cuts = _cuts(modules)
    for plan in plans.values():
        plan.release()
    for name, cut in cuts.items():
        (plans.get(name) or Plan(name, modules[name])).cut(cut)
    for plan in plans.values():
        plan.store()


@torch.no_grad()
def take_over(plain: nn.Module, trained: ShardedModel) -> None:
    """
    ## Copy the parameters and buffers of a sharded model into a plain one

    All-gather; all ranks call it. Raises `ValueError` if the two models differ.
    """
    expect(comm_of(trained).stages.size == 1, "clean: `trained`", "a model with all layers on each "
           "rank", "a pipeline", "save it, and load it into a model without stages")
    paths = plain_paths(trained)
    rules = {path: getattr(module, "rule", None) for module, path in paths.items()}
    again = "call `compress` on both with the same rules, and in the same data type"
    for name, module in plain.named_modules():
        mine = getattr(module, "rule", None)
        expect(mine == rules.get(name), f"clean: `{name}`",
               f"the rule of `trained`, {rules.get(name)}", mine, again)
    theirs: dict[str, Any] = {
        f"{path}.{name}".strip("."): buffer for module, path in paths.items()
        for name, buffer in module._buffers.items()}
    with trained.full_params() as params:
        theirs |= params
        for name, tensor in (*plain.named_parameters(), *plain.named_buffers()):
            mine = (*tensor.shape, tensor.dtype)
            got = (*theirs[name].shape, theirs[name].dtype) if name in theirs else None
            expect(got == mine, "clean: `trained`", "a sharded model of the same layers and data "
                   f"type, with `{name}` of {mine}", got, again)
            tensor.copy_(theirs[name])


def _methods(module: Weighted) -> list[Method]:
    """
    #### The rules of a module's weight, if it is compressed
    """
    made_by = (module.parametrizations.weight[0] if parametrize.is_parametrized(module, "weight")
               else None)
    return [*made_by] if isinstance(made_by, Compressed) else []


class Plan:
    """
    ## What becomes of one weight
    """

    def __init__(self, name: str, module: Weighted):
        """
        ### Look at a weight, compressed or not
        """
        self.name = name
        self.module = module
        self.kept: torch.Tensor | None = None  # which elements are stored; `None` for all
        self.grid: Grid | None = None  # what the weight is rounded to
        methods = _methods(module)
        weight = module.parametrizations.weight.original if methods else module.weight
        # In the order of training.
        for method in methods:
            if isinstance(method, PrunedElements) and method.count:
                self.kept = method.kept()
            if isinstance(method, Quantised):
                self.grid = method.grid(weight)
            weight = method(weight)
        if self.grid is not None and self.grid.bits == 1 and bool((weight == 0).any()):
            # A sign of zero has no code.
            self.kept = weight != 0

    def release(self) -> None:
        """
        ### Make the weight, and the bias, plain parameters
        """
        module = self.module
        for hook in module.parametrizations.weight[0].hooks:
            hook.remove()
        # torch removes the weight from the class, which a copy of the module shares.
        kind = type(module)
        module.__class__ = type(kind.__name__, kind.__bases__, dict(vars(kind)))
        # The bias first, because its mask is that of the weight.
        for name in reversed([*module.parametrizations]):
            parametrize.remove_parametrizations(module, name)

    def cut(self, cut: Cut) -> None:
        """
        ### Leave rows and columns out of a plain weight, its bias, and the sizes of its module
        """
        module = self.module
        if self.kept is not None:
            self.kept = _select(self.kept, cut)
        if self.grid is not None:
            self.grid = self._cut_grid(self.grid, cut)
        module.weight = nn.Parameter(
            _select(module.weight.detach(), cut),
            module.weight.requires_grad)
        bias = getattr(module, "bias", None)
        if bias is not None:
            module.bias = nn.Parameter(bias.detach()[cut[axes(module)[0]]], bias.requires_grad)
        for axis, attributes in zip(axes(module), _SIZES, strict=True):
            for attribute in attributes:
                if hasattr(module, attribute):
                    setattr(module, attribute, module.weight.shape[axis])

    def _cut_grid(self, grid: Grid, cut: Cut) -> Grid:
        """
        #### Leave out the scales of rows and groups that go
        """
        weight = self.module.weight
        width = weight.numel() // len(grid.scales)
        # For each element the number of its scale, cut as the elements are.
        numbers = torch.arange(len(grid.scales), device=weight.device).repeat_interleave(width)
        numbers = _select(numbers.view(weight.shape), cut)
        left, counts = numbers.flatten().unique_consecutive(return_counts=True)
        width = min(width, numbers[0].numel())
        expect(bool((counts == width).all()), f"clean: `{self.name}`", "columns that go together "
               "with all that share a scale", "some of a group",
               "leave `group` out, or let it divide the width of a head")
        return replace(grid, scales=grid.scales[left], zeros=grid.zeros[left])

    def store(self) -> None:
        """
        ### Store the weight in its bits, if a rule has rounded or pruned it
        """
        if self.grid is None and self.kept is None:
            return
        weight = self.module.weight.detach()
        stored, codes = store(weight, self.kept, self.grid)
        expect(torch.equal(stored(codes), weight), f"clean: `{self.name}`", "codes of the weight "
               f"that was trained, {weight.dtype}", "others, or NaN", "convert the model to fp32 "
               "first", RuntimeError)
        _put(self.module, codes, stored)


def _put(module: Weighted,
         codes: torch.Tensor,
         stored: Stored) -> None:
    """
    #### Have a module compute with a stored weight
    """
    del module.weight
    module.register_buffer("weight", codes)
    parametrize.register_parametrization(module, "weight", stored, unsafe=True)


# ------------------------------------------------------------------------------ rows and columns


def _cuts(modules: dict[str, nn.Module]) -> dict[str, Cut]:
    """
    #### The rows and columns that go, by the name of each layer
    """
    cuts: dict[str, Cut] = {}
    for name, module in modules.items():
        removed_by = [method for method in _methods(module)
                      if isinstance(method, PrunedParts) and method.rule.follows and method.count]
        for method in removed_by:
            is_row = method.rule.kind == "row"
            kept = method.kept().reshape(-1)
            _add_cut(cuts, modules, name, is_row, kept)
            for other in method.rule.follows:
                _add_cut(cuts, modules, _beside(name, other), not is_row, kept)
            # The attributes with the number of heads.
            for count in method.rule.counts:
                path, _, attribute = _beside(name, count).rpartition(".")
                expect(isinstance(getattr(modules.get(path), attribute, None), int),
                       f"clean: `{count}`, beside `{name}`", "an attribute with the number of "
                       "heads", path, "look at the names")
                setattr(modules[path], attribute, int(method.kept_units().sum()))
    return cuts


def _beside(name: str, other: str) -> str:
    """
    #### The whole name of what a rule names beside a layer
    """
    return f"{name.rpartition('.')[0]}.{other}".strip(".")


def _add_cut(cuts: dict[str, Cut],
             modules: dict[str, nn.Module],
             name: str,
             is_outputs: bool,
             kept: torch.Tensor) -> None:
    """
    #### Cut the outputs of a layer, or its inputs
    """
    layer: Weighted = modules.get(name)
    weight = getattr(layer, "weight", None)
    along = axes(layer)[0 if is_outputs else 1]
    kind = ("rows", "columns")[along]
    expect(weight is not None and weight.dim() >= 2 and weight.shape[along] == len(kept)
           and getattr(layer, "groups", 1) == 1,
           f"clean: the {kind} of `{name}`",
           f"a layer with {len(kept)} of them, and without groups",
           None if weight is None else f"a weight of {tuple(weight.shape)}",
           "look at `follows`, at the names and at the shapes")
    cut = cuts.setdefault(name, [ALL, ALL])
    expect(cut[along] is ALL, f"clean: the {kind} of `{name}`", "one rule that removes them",
           "two", "leave one of the rules out")
    cut[along] = kept


def _select(weight: torch.Tensor, cut: Cut) -> torch.Tensor:
    """
    #### The rows and columns that are left
    """
    return weight[cut[0]][:, cut[1]]


# ---------------------------------------------------------------------------------- file and table


def write(model: nn.Module | Iterable[nn.Module], path: str | Path) -> None:
    """
    ## Write a cleaned model as safetensors, which any reader of that format loads

    A stored weight `0.weight` becomes `0.weight.codes`, `.mask`, `.scales` and `.zeros`, as far as
    it has them. The file's metadata have an entry `zero3`, in JSON: `weights`, see `stored.py`, and
    `numbers`, the whole numbers among the attributes of modules, some of which `clean` has changed.

    Raises `ValueError` if the model is not clean.
    """
    modules = named_modules(model)
    expect(not any(map(_methods, modules.values())), "write", "a cleaned model", "a compressed "
           "one", "call `clean` first")
    weights = {
        _file_name(f"{prefix}.").strip("."): {
            "shape": [*module.shape],
            "dtype": str(module.dtype).removeprefix("torch."),
            "bits": module.bits,
            "least": module.least}
        for prefix, module in modules.items()
        if isinstance(module, Stored)}
    numbers = {f"{prefix}.{key}": value for prefix, module in modules.items()
               for key, value in vars(module).items()
               if type(value) is int and not key.startswith("_")}
    tensors = {_file_name(name): tensor.detach().clone().contiguous()
               for name, tensor in _tensors(modules).items()}
    save_tensors(Path(path), tensors,
                 {"zero3": json.dumps({"weights": weights, "numbers": numbers})})


@torch.no_grad()
def read(model: nn.Module | Iterable[nn.Module], path: str | Path) -> None:
    """
    ## Load a file of `write` into a plain model, in place

    * `model` is as it was before `compress`. If inputs are rounded, call `compress` with the rules
      of inputs first

    Raises `ValueError` if the file is not one of `write`, or if it has other names than the model.
    """
    modules = named_modules(model)
    with safe_open(path, "pt") as file, torch.device("cpu"):
        metadata = file.metadata() or {}
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    expect("zero3" in metadata, f"read: {path}", "a file of `write`", "another one", "pass such a "
           "file; `load_state_dict` loads plain tensors")
    about = json.loads(metadata["zero3"])
    weights = about["weights"]
    stored = {f"{weight}.{part}" for weight in weights for part in PARTS}
    there = {*weights, *(tensors.keys() - stored)}
    places = {_file_name(place): (place, old)
              for place, old in _tensors(modules).items()}
    expect(there == places.keys(), f"read: {path}", "the names of the model",
           f"others, {sorted(there ^ places.keys())}", "build the model as it was before "
           "`compress`; if inputs are rounded, call `compress` with the rules of inputs alone")
    # A tied weight has several names.
    params: dict[int, nn.Parameter] = {}
    for name, (place, old) in places.items():
        prefix, _, key = place.rpartition(".")
        module = modules[prefix]
        if name in weights:
            parts = {part: tensors[f"{name}.{part}"].to(old.device) for part in PARTS
                     if f"{name}.{part}" in tensors}
            weight = weights[name]
            _put(module, parts.pop("codes"), Stored(
                torch.Size(weight["shape"]),
                getattr(torch, weight["dtype"]),
                weight["bits"],
                weight["least"],
                **parts))
        elif isinstance(old, nn.Parameter):
            param = nn.Parameter(tensors[name].to(old.device), old.requires_grad)
            setattr(module, key, params.setdefault(id(old), param))
        else:
            setattr(module, key, tensors[name].to(old.device))
    for name, number in about["numbers"].items():
        prefix, _, key = name.rpartition(".")
        if hasattr(modules.get(prefix), key):
            setattr(modules[prefix], key, number)


def _tensors(modules: dict[str, nn.Module]) -> dict[str, torch.Tensor]:
    """
    #### The tensors of a model that are saved, each module's once
    """
    return {name: tensor for name, tensor in modules[""].state_dict(keep_vars=True).items()
            if name.rpartition(".")[0] in modules and isinstance(tensor, torch.Tensor)}


def _file_name(name: str) -> str:
    """
    #### `0.parametrizations.weight.0.scales` is `0.weight.scales` in a file
    """
    plain = re.sub(r"parametrizations\.(\w+)\.(\d+\.)?", r"\1.", name)
    return plain if plain == name else re.sub("original$", "codes", plain)


@dataclass(frozen=True)
class Size:
    """
    ## How large a model is, and how good
    """

    nbytes: int  # of all parameters and buffers
    parameters: int  # elements of weights and biases that are left
    multiply_adds: int  # of a forward pass of the example
    loss: float  # held-out


@torch.no_grad()
def measure(model: nn.Module,
            example: torch.Tensor,
            loss: float) -> Size:
    """
    ## Measure a plain model

    * `example` is an input for torch's own `FlopCounterMode`
    """
    with FlopCounterMode(display=False) as counter:
        model(example)
    return Size(
        nbytes=sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        parameters=sum(p.numel() for p in model.parameters()) + sum(
            each.shape.numel() if each.mask is None else int(unpack(each.mask, 1).sum())
            for each in model.modules()
            if isinstance(each, Stored)),
        multiply_adds=counter.get_total_flops() // 2,
        loss=loss)


def table(before: Size, after: Size) -> str:
    """
    ## A table of a model before and after
    """
    lines = [f"{'':14} {'before':>14} {'after':>14} {'ratio':>7}"]
    for name in ("nbytes", "parameters", "multiply_adds", "loss"):
        old, new = getattr(before, name), getattr(after, name)
        form = ".4f" if name == "loss" else ","
        lines.append(f"{name.replace('_', '-').replace('nb', 'b'):14} {old:14{form}} "
                     f"{new:14{form}} {new / old:7.3f}")
    return "\n".join(lines)

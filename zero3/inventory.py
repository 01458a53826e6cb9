r"""
# What there is to save

`Inventory` lists what this rank holds of a model and its optimizer, has each shard at hand in turn,
and takes over what a checkpoint has for it.

A model may be a chain, a wrapped one, or anything with `Zero3Layer`s in it; its shards may rest
anywhere, be their own masters or have one elsewhere; an optimizer may be `Zero3Optimizer`, or one
of torch's on the shards. In a checkpoint all of this is one thing: *flat parameters*, each with
*keys*, the parameter itself and its moments, of which each rank has a shard.

$$\text{elements that a rank saves} = \sum_\ell \Big\lceil \frac{P_\ell}{N} \Big\rceil
\,(1 + \text{moments of } \ell)$$

The key `param` is the master where there is one, and the shard where there is none. What an
optimizer knows of a parameter beside tensors of its length, the number of its steps for instance,
is the same on all ranks and goes into the manifest, for each flat parameter and param group.

One shard at a time is in memory of what rests in files, whatever is done with it.

**Run this**: `python -m pytest tests/test_checkpoint.py -k tier` saves from one tier and loads into
another.

**Not covered, and what that costs**: what a module keeps for itself by `get_extra_state`; pass it
as `extra`. A parameter that is loaded into other layers than it was saved from needs the same
number of steps as the others of its new flat parameter, or there is an error.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zero3 import __version__
from zero3.archive import Archive, Param, decode, encode
from zero3.blocks import TYPES, Broken, type_name
from zero3.coordinator import Zero3Model
from zero3.layer import Zero3Layer, _Group, _Slot
from zero3.offload import InFile
from zero3.optimizer import Zero3Optimizer, plain_paths
from zero3.states import Owned, moments_of
from zero3.wire import Wire

# Options of a param group that say how torch computes, and not what.
_WAYS = ("params", "fused", "foreach", "capturable", "differentiable")


@dataclass(eq=False)
class Flat:
    """
    ## A flat parameter of the model at hand
    """

    path: str  # of its layer, in the plain model
    layer: Zero3Layer
    group: _Group
    owned: Owned | None  # of `Zero3Optimizer`'s
    pieces: list[tuple[int, slice, nn.Parameter]]  # as `Owned` has them
    indices: list[int | None]  # the param group of each parameter
    # In a checkpoint: each parameter's place, and what is known of those of a param group.
    found: list[Param] = field(default_factory=list)
    states: dict[int | None, dict[str, Any]] = field(default_factory=dict)

    @property
    def in_file(self) -> bool:
        home_in_file = isinstance(self.group.home, InFile)
        return self.owned.states is not None if self.owned else home_in_file


class Entry(NamedTuple):
    """
    ## A tensor of a rank's file
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    in_memory: bool
    flat: int  # which one; -1 of what is whole on each rank
    key: str  # "param" or a moment; or the name of what is whole


class Inventory:
    """
    ## What of a model and its optimizer goes into a checkpoint
    """

    # What the wire asks of a layer.
    expect: Any = Zero3Layer.expect
    label = "the checkpoint"

    def __init__(self, model: nn.Module, optimizer: Any):
        self.model, self.optimizer, paths = model, optimizer, plain_paths(model)
        layers = [m for m in paths if isinstance(m, Zero3Layer) and m.groups]
        self.wire = layers[0].wire if layers else Wire()
        self.expect(bool(layers), "has nothing to save or load", "a model of Zero3Layers",
                    type(model).__name__, "wrap the model first")
        self.device = layers[0].device
        self.param_groups = optimizer.param_groups if optimizer else []
        self.state = optimizer.state if optimizer else {}
        # By their shards; a tensor is a key by what it is, and not by what is in it.
        owned = {o.group.shard: o for o in getattr(optimizer, "owned", ())}
        groups = {p: i for i, g in enumerate(self.param_groups) for p in g["params"]}
        self.flats: list[Flat] = []
        for layer in layers:
            for g in layer.groups:
                own, index = owned.get(g.shard), groups.get(g.shard)
                whole = slice(0, len(g.shard))
                pieces = [(index, whole, g.shard)] if index is not None else []
                self.flats.append(Flat(
                    paths[layer], layer, g, own, own.pieces if own else pieces,
                    [*own.indices] if own else [index] * len(g.slots)))
        shards = {f.group.shard for f in self.flats}
        # Whole on each rank: buffers, and frozen parameters outside of layers.
        self.whole: dict[str, torch.Tensor] = {}
        for m, path in paths.items():
            kept = {n: b for n, b in m._buffers.items() if n not in m._non_persistent_buffers_set}
            for name, t in {**kept, **m._parameters}.items():
                if t is not None and t not in shards:
                    self.expect(not t.requires_grad, "cannot save or load", "trainable parameters "
                                "in Zero3Layers", f"`{path}.{name}` outside", "wrap its module")
                    self.whole[f"{path}.{name}".strip(".")] = t

    def names(self, flat: Flat, slot: _Slot) -> list[str]:
        """
        ### What a parameter is called in the plain model, by all of its names
        """
        own = [f"{flat.path}.{name}".strip(".") for name in slot.names]
        tied = self.model.tied if isinstance(self.model, Zero3Model) else {}
        return own + [name for name, p in tied.items() if p is slot.param and name not in own]

    # ------------------------------------------------------------------------------------- to save

    def describe(self) -> list[dict[str, Any]]:
        """
        ### What this rank has, for the manifest
        """
        told = []
        for flat in self.flats:
            shard, slots, kept = flat.group.shard, flat.group.slots, {}
            wide = flat.owned.wide if flat.owned else shard.dtype
            keys, numel = {"param": type_name(wide)}, slots[-1].offset + slots[-1].view.numel()
            for index, _, piece in flat.pieces:
                state = self.state.get(piece, {})
                moments = {key: value for key, value in state.items()
                           if isinstance(value, torch.Tensor) and value.dim() == 1}
                keys |= {key: type_name(value.dtype) for key, value in moments.items()}
                if state:
                    scalars = {k: encode(v, k) for k, v in state.items() if k not in moments}
                    kept[index] = {"group": index, "moments": [*moments], "scalars": scalars}
            told.append({
                "layer": flat.path, "dtype": type_name(shard.dtype), "numel": numel,
                "padding": len(flat.group.full) - numel, "keys": keys, "states": kept,
                "params": [{"names": self.names(flat, slot), "shape": [*slot.view.shape],
                            "offset": slot.offset, "group": index}
                           for slot, index in zip(slots, flat.indices, strict=True)]})
        return told

    def manifest(self, described: list[dict[str, Any]]) -> dict[str, Any]:
        """
        ### What all ranks have together (all-gather; all ranks must call it)

        * `described` is what this rank has; it knows of the param groups of which it has a piece,
          and of no others
        """
        first, *others = self.gather(described)
        for other in others:
            for mine, theirs in zip(first, other, strict=True):
                mine["keys"] |= theirs["keys"]
                mine["states"] |= theirs["states"]
        for flat in first:
            flat["states"] = [*flat["states"].values()]
        return {
            "world_size": self.wire.world_size, "flats": first, "whole": [*self.whole],
            "versions": {"zero3": __version__, "torch": torch.__version__},
            "optimizer": self.optimizer and {
                "class": type(getattr(self.optimizer, "inner", self.optimizer)).__name__,
                "groups": [encode({k: v for k, v in group.items() if k not in _WAYS}, "param group")
                           for group in self.param_groups],
                "scale": {key: getattr(self.optimizer, key) for key in
                          ("loss_scale", "good_steps", "skipped_steps")
                          if hasattr(self.optimizer, key)}}}

    def entries(self, told: dict[str, Any]) -> list[Entry]:
        """
        ### What a rank's file has, in its order

        Larger elements first, so that all lie where they may be mapped. Then what rests in files,
        which an asynchronous save writes at once, for to copy it would bring it all to memory.
        """
        found = [Entry(f"{i}.{key}", TYPES[dtype], (len(flat.group.shard),), not flat.in_file, i,
                       key) for i, flat in enumerate(self.flats)
                 for key, dtype in told["flats"][i]["keys"].items()]
        found += [Entry(f"whole.{name}", t.dtype, tuple(t.shape), True, -1, name)
                  for name, t in self.whole.items()]
        return sorted(found, key=lambda entry: (-entry.dtype.itemsize, entry.in_memory))

    def tensors(self, entries: list[Entry]) -> Iterator[torch.Tensor]:
        """
        ### The values of these entries, one shard at a time; valid until the next is asked for
        """
        for i, run in groupby(entries, key=lambda entry: entry.flat):
            if i < 0:
                yield from (self.whole[entry.key] for entry in run)
                continue
            with self.here(self.flats[i]) as values:
                for entry in run:
                    if entry.key == "param":
                        yield values
                    for _, where, piece in self.flats[i].pieces if entry.key != "param" else ():
                        numel = where.stop - where.start
                        kept = self.state.get(piece, {}).get(entry.key)
                        yield torch.zeros(numel, dtype=entry.dtype) if kept is None else kept

    @contextmanager
    def here(self, flat: Flat, write: bool = False) -> Iterator[torch.Tensor]:
        """
        ### Have a shard's master in memory, with its moments; or the shard, where it has no master

        * `write` says that it will be written to
        """
        if flat.owned:
            with flat.owned.here(self.state, write=write) as (master, _):
                yield master
            return
        home = flat.group.home
        try:
            yield home.load()
            if write:
                home.save()
        finally:
            home.release()

    # ------------------------------------------------------------------------------------- to load

    def check(self, archive: Archive) -> dict[int, int]:
        """
        ### Find each parameter in a checkpoint

        Returns which of its param groups is which of the optimizer's. Raises `Broken` where the two
        do not fit.
        """
        groups: dict[int, int] = {}
        for flat in self.flats:
            flat.found, flat.states = [], {}
            for slot, index in zip(flat.group.slots, flat.indices, strict=True):
                names, shape = self.names(flat, slot), tuple(slot.view.shape)
                param = next((archive.by_name[n] for n in names if n in archive.by_name), None)
                if param is None or param.shape != shape:
                    there = f"of {param.shape}" if param else "missing"
                    raise Broken(f"`{names[0]}` is {there} in the checkpoint, of {shape} here")
                theirs, states = param.told["group"], archive.states(param)
                if theirs is not None and index is not None:
                    # Which is which is found out here; each is one, and no two are the same.
                    mine = groups.setdefault(theirs, index)
                    if mine != index or [*groups.values()].count(index) > 1:
                        raise Broken(f"`{names[0]}` shares a param group with others than in the "
                                     "checkpoint")
                if index is not None and flat.states.setdefault(index, states) != states:
                    raise Broken(f"`{names[0]}` has taken other steps than the rest of its shard")
                flat.found.append(param)
            self._check_moments(flat)
        # What came from another format does not tell buffers from parameters, and may have a tied
        # parameter under each of its names.
        known = {name for flat in self.flats for slot in flat.group.slots
                 for name in self.names(flat, slot)}
        more = {p.name for p in archive.params if p.name not in known} | {*archive.told["whole"]}
        for name in sorted(more ^ {*self.whole}):
            raise Broken(f"`{name}` is in the checkpoint, and not in this model" if name in more
                         else f"`{name}` is in this model, and not in the checkpoint")
        return groups

    def _check_moments(self, flat: Flat) -> None:
        """
        #### Make sure that the moments are those of this optimizer
        """
        for index in flat.states if flat.owned else ():
            states: Any = flat.states[index]
            cls, kwargs = self.optimizer.made_by
            two = torch.zeros(2, device=self.optimizer.device)
            wanted, _ = moments_of(cls, kwargs, self.param_groups[index or 0], two)
            if states["moments"] and not {*wanted} <= {*states["moments"]}:
                raise Broken(f"`{flat.found[0].name}` has {states['moments']} there, and this "
                             f"optimizer needs {wanted}")

    def shard(self, archive: Archive, flat: Flat, key: str) -> torch.Tensor:
        """
        ### This rank's shard, or a moment of it, out of a checkpoint: `(shard_numel,)`

        With zeros in the padding, and where a param group has no such moment.
        """
        numel = len(flat.group.shard)
        first, found = self.wire.rank * numel, None
        for slot, param in zip(flat.group.slots, flat.found, strict=True):
            begin = max(slot.offset, first)
            end = min(slot.offset + slot.view.numel(), first + numel)
            if begin < end and key in ("param", *archive.states(param)["moments"]):
                values = archive.read(param, key, begin - slot.offset, end - slot.offset)
                found = torch.zeros(numel, dtype=values.dtype) if found is None else found
                found[begin - first : end - first] = values
        return torch.zeros(numel, dtype=flat.group.shard.dtype) if found is None else found

    @torch.no_grad()
    def take(self, archive: Archive, groups: dict[int, int]) -> None:
        """
        ### Take over all that is in a checkpoint

        * `groups` is what `check` returned
        """
        for layer in {flat.layer for flat in self.flats}:
            layer._cleanup_params()
        for flat in self.flats:
            with self.here(flat, write=True) as values:
                param = self.shard(archive, flat, "param")
                values.copy_(param)
                for _, _, piece in flat.pieces:
                    self.state.pop(piece, None)
                keys = {key for states in flat.states.values() for key in states["moments"]}
                for key in sorted(keys) if flat.pieces else ():
                    moment = self.shard(archive, flat, key)
                    # What was of the master's data type is so again.
                    dtype = values.dtype if moment.dtype == param.dtype else moment.dtype
                    for index, where, piece in flat.pieces:
                        if key in flat.states[index]["moments"]:
                            kept = moment[where].to(piece.device, dtype, copy=True)
                            self.state[piece][key] = kept
                for index, _, piece in flat.pieces:
                    group, states = self.param_groups[index], flat.states[index]
                    near = group.get("fused") or group.get("capturable")
                    for key, value in states["scalars"].items():
                        value = decode(value)
                        if isinstance(value, torch.Tensor) and near:
                            value = value.to(piece.device)
                        self.state[piece][key] = value
        for name, t in self.whole.items():
            t.copy_(archive.whole(self.wire.rank, name))
        self._take_options(archive.told["optimizer"], groups)

    def _take_options(self, told: dict[str, Any] | None, groups: dict[int, int]) -> None:
        """
        #### Take over the param groups' options and the loss scale
        """
        if not told or self.optimizer is None:
            return
        for theirs, mine in groups.items():
            for key, value in decode(told["groups"][theirs]).items():
                old = self.param_groups[mine].get(key)
                if isinstance(old, torch.Tensor):
                    old.fill_(value)
                else:
                    self.param_groups[mine][key] = value
        if isinstance(self.optimizer, Zero3Optimizer):
            for key, value in told["scale"].items():
                # This run has chosen whether to scale; a dynamic scale goes on from where it was.
                if key != "loss_scale" or self.optimizer.dynamic:
                    setattr(self.optimizer, key, value)
        self.optimizer.zero_grad()

    # ---------------------------------------------------------------------------------- both ways

    def gather(self, thing: Any) -> list[Any]:
        """
        ### What each rank has (all-gather; all ranks must call it)
        """
        things = [thing] * self.wire.world_size
        if self.wire.world_size > 1:
            dist.all_gather_object(things, thing)
        return things

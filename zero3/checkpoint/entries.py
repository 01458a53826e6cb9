r"""
# What there is to save

`Entries` lists what this rank holds of a model and its optimizer, has each shard at hand in turn,
and takes over what a checkpoint has for it.

A model may be a chain, a wrapped one, or anything with `Zero3Layer`s in it; its shards may rest
anywhere, be their own masters or have one elsewhere; an optimizer may be `Zero3Optimizer`, or one
of torch's on the shards. In a checkpoint all of this is one thing: *flat parameters*, each with
*keys*, the parameter itself and its moments, of which each rank has a shard.

$$\text{elements that a rank saves} = \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil
\,(1 + \text{moments of } \ell)$$

The key `param` is the master where there is one, and the shard where there is none. What an
optimizer knows of a parameter beside tensors of its length, the number of its steps for instance,
is the same on all ranks and goes into the manifest, for each flat parameter and param group; and
for each parameter, if some have been used in other steps than others.

One shard at a time is in memory of what rests in files, whatever is done with it.

**Run this**: `python -m pytest tests/test_checkpoint.py -k tier` saves from one tier and loads into
another.

**Not covered, and what that costs**: what a module keeps for itself by `get_extra_state`; pass it
as `extra`. With an optimizer of torch's on the shards, a parameter that is loaded into other layers
than it was saved from needs the same number of steps as the others of its new flat parameter, or
there is an error; so does one that trains now and did not then. `Zero3Optimizer` cuts its pieces
between such parameters.
"""

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3.checkpoint.reader import CheckpointReader, Param, decode, encode
from zero3.checkpoint.tensor_files import TYPES, Broken, type_name
from zero3.comm import Communicator
from zero3.flat import FlatParameter, Slot
from zero3.guards.version import __version__
from zero3.layer import Zero3Layer
from zero3.offload import InFile
from zero3.optimizer.stage3 import Zero3Optimizer, plain_names
from zero3.optimizer.states import Piece, ShardStates, moments_of
from zero3.whole_model.wrap import Zero3Model

# Options of a param group that say how torch computes, and not what.
_WAYS = ("params", "fused", "foreach", "capturable", "differentiable")
# What a `Zero3Optimizer` knows of its loss scale.
_SCALE = ("loss_scale", "good_steps", "skipped_steps")


@dataclass(eq=False)
class Flat:
    """
    ## A flat parameter of the model at hand
    """

    paths: list[str]  # of its layer, in the plain model: several where it is registered so
    layer: Zero3Layer
    group: FlatParameter
    owned: ShardStates | None  # of `Zero3Optimizer`'s
    # As `ShardStates` has them: param group, where in the shard, and the optimizer's parameter.
    pieces: list[Piece]
    indices: list[int | None]  # the param group of each parameter
    # In a checkpoint: each parameter's place, and what the optimizer knew of it.
    found: list[Param] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)

    @property
    def moments(self) -> list[str]:
        """
        ### What a checkpoint has of it, beside the parameter itself
        """
        return sorted({key for states in self.states for key in states["moments"]})

    def within(self, where: slice) -> list[int]:
        """
        ### Which parameters have elements in this part of the shard, by places in the flat one
        """
        if self.owned is None:
            # There is one piece, the whole shard.
            return [i for i, slot in enumerate(self.group.slots) if slot.view.numel()]
        return [i for i, span in enumerate(self.owned.spans)
                if max(span.start, where.start) < min(span.stop, where.stop)]

    @property
    def in_file(self) -> bool:
        home_in_file = isinstance(self.group.storage, InFile)
        return self.owned.in_file is not None if self.owned else home_in_file


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


class Entries:
    """
    ## What of a model and its optimizer goes into a checkpoint
    """

    # In place of a layer, for errors that concern none.
    expect: Any = Zero3Layer.expect
    label = "the checkpoint"

    def __init__(self, model: nn.Module, optimizer: Any):
        self.model, self.optimizer, paths = model, optimizer, plain_names(model)
        layers = [m for m in paths if isinstance(m, Zero3Layer) and m.flats]
        # Without layers there is an error to come, and it names the rank.
        self.comm = layers[0].comm if layers else Communicator()
        self.expect(bool(layers), "has nothing to save or load", "a model of Zero3Layers",
                    type(model).__name__, "wrap the model first")
        self.device = layers[0].device
        self.param_groups = optimizer.param_groups if optimizer else []
        self.state = optimizer.state if optimizer else {}
        self.kind = type(getattr(optimizer, "inner", optimizer)).__name__
        # By their shards: as keys tensors are themselves, whatever is in them.
        owned = {o.shard: o for o in getattr(optimizer, "shard_states", ())}
        groups = {p: i for i, g in enumerate(self.param_groups) for p in g["params"]}
        self.flats: list[Flat] = []
        for layer in layers:
            for g in layer.flats:
                own, index = owned.get(g.shard), groups.get(g.shard)
                every = slice(0, len(g.shard))
                pieces = [Piece(index, every, g.shard)] if index is not None else []
                self.flats.append(Flat(
                    paths[layer], layer, g, own, own.pieces if own else pieces,
                    [*own.group_indices] if own else [index] * len(g.slots)))
        shards = {f.group.shard for f in self.flats}
        self.expect(optimizer is None or any(flat.pieces for flat in self.flats), "cannot save or "
                    "load this optimizer", "one of this model's shards", type(optimizer).__name__,
                    "build it on the model, after wrapping")
        # Whole on each rank: buffers, and frozen parameters outside of layers, by each name; and
        # those of these names that `check` found in a checkpoint.
        self.replicated: dict[str, torch.Tensor] = {}
        self.found: dict[str, torch.Tensor] = {}
        for m, path in ((m, path) for m, every in paths.items() for path in every):
            kept = {n: b for n, b in m._buffers.items() if n not in m._non_persistent_buffers_set}
            for name, t in {**kept, **m._parameters}.items():
                if t is not None and t not in shards:
                    self.expect(not t.requires_grad, "cannot save or load", "trainable parameters "
                                "in Zero3Layers", f"`{path}.{name}` outside", "wrap its module")
                    self.replicated[f"{path}.{name}".strip(".")] = t

    def names(self, flat: Flat, slot: Slot) -> list[str]:
        """
        ### What a parameter is called in the plain model, by all of its names
        """
        own = [f"{path}.{name}".strip(".") for path in flat.paths for name in slot.names]
        tied = self.model.tied if isinstance(self.model, Zero3Model) else {}
        return own + [name for name, p in tied.items() if p is slot.param and name not in own]

    # ------------------------------------------------------------------------------------- to save

    def describe(self) -> list[dict[str, Any]]:
        """
        ### What this rank has, for the manifest: an entry for each flat parameter

        Of its states, those of the parameters of which this rank has a piece, by parameter.
        """
        entries = []
        for flat in self.flats:
            shard, slots = flat.group.shard, flat.group.slots
            kept: dict[int, dict[str, Any]] = {}
            wide = flat.owned.master_dtype if flat.owned else shard.dtype
            keys, numel = {"param": type_name(wide)}, slots[-1].offset + slots[-1].view.numel()
            for index, where, piece in flat.pieces:
                state = self.state.get(piece, {})
                moments = {key: value for key, value in state.items()
                           if isinstance(value, torch.Tensor) and value.dim() == 1}
                keys |= {key: type_name(value.dtype) for key, value in moments.items()}
                if state:
                    scalars = {k: encode(v, k) for k, v in state.items() if k not in moments}
                    entry = {"param_group": index, "moments": [*moments], "scalars": scalars}
                    kept |= dict.fromkeys(flat.within(where), entry)
            entries.append({
                "layer": flat.paths[0], "dtype": type_name(shard.dtype), "numel": numel,
                "padding": len(flat.group.full) - numel, "keys": keys, "states": kept,
                "params": [{"names": self.names(flat, slot), "shape": [*slot.view.shape],
                            "offset": slot.offset, "param_group": index}
                           for slot, index in zip(slots, flat.indices, strict=True)]})
        return entries

    def options(self) -> dict[str, Any] | None:
        """
        ### What the optimizer knows beside that, for the manifest
        """
        return None if self.optimizer is None else {
            "class": self.kind,
            "groups": [encode({k: v for k, v in group.items() if k not in _WAYS}, "param group")
                       for group in self.param_groups],
            "scale": {key: getattr(self.optimizer, key) for key in _SCALE
                      if hasattr(self.optimizer, key)}}

    def manifest(self, described: list[dict[str, Any]], options: dict[str, Any] | None
                 ) -> dict[str, Any]:
        """
        ### What all ranks have together (all-gather; all ranks must call it)

        * `described` is what `describe` gave; here all parameters' states come together in a list
        * `options` is what `options` gave
        """
        first, *others = self.comm.gather(described)
        for other in others:
            for mine, theirs in zip(first, other, strict=True):
                mine["keys"] |= theirs["keys"]
                mine["states"] |= theirs["states"]
        for flat in first:
            flat["states"] = _in_groups(flat["params"], flat["states"])
        return {
            "world_size": self.comm.world_size, "flats": first, "replicated": [*self.replicated],
            "versions": {"zero3": __version__, "torch": torch.__version__},
            "optimizer": options}

    def entries(self, manifest: dict[str, Any]) -> list[Entry]:
        """
        ### What this rank's file has, in its order

        Larger elements first, so that all lie where they may be mapped. Then what rests in files,
        which an asynchronous save writes at once, for to copy it would bring it all to memory.
        """
        found = [Entry(f"{i}.{key}", TYPES[dtype], (len(flat.group.shard),), not flat.in_file, i,
                       key) for i, flat in enumerate(self.flats)
                 for key, dtype in manifest["flats"][i]["keys"].items()]
        found += [Entry(f"replicated.{name}", t.dtype, tuple(t.shape), True, -1, name)
                  for name, t in self.replicated.items()]
        return sorted(found, key=lambda entry: (-entry.dtype.itemsize, entry.in_memory))

    def tensors(self, entries: list[Entry]) -> Iterator[torch.Tensor]:
        """
        ### The values of these entries, one shard at a time; valid until the next is asked for
        """
        for i, run in groupby(entries, key=lambda entry: entry.flat):
            if i < 0:
                yield from (self.replicated[entry.key] for entry in run)
                continue
            with self.here(self.flats[i]) as values:
                for entry in run:
                    if entry.key == "param":
                        yield values
                        continue
                    for _, where, piece in self.flats[i].pieces:
                        kept = self.state.get(piece, {}).get(entry.key)
                        # Another param group's options may ask for a moment that this has not.
                        numel = where.stop - where.start
                        yield torch.zeros(numel, dtype=entry.dtype) if kept is None else kept

    @contextmanager
    def here(self, flat: Flat, write: bool = False) -> Iterator[torch.Tensor]:
        """
        ### Have a shard's master in memory, with its moments; or the shard, where it has no master

        * `write` says that it will be written to
        """
        if flat.owned:
            with flat.owned.in_memory(self.state, write=write) as (master, _):
                yield master
            return
        storage = flat.group.storage
        try:
            yield storage.load()
            if write:
                storage.save()
        finally:
            storage.release()

    # ------------------------------------------------------------------------------------- to load

    def check(self, archive: CheckpointReader) -> dict[int, int]:
        """
        ### Find each parameter in a checkpoint

        Notes in each flat parameter where its parameters are, and what the optimizer knew of them.
        Returns, for each param group of the checkpoint, the index of the optimizer's. Raises
        `Broken` where the two do not fit.
        """
        groups: dict[int, int] = {}
        wanted = self._wanted(archive)
        for flat in self.flats:
            flat.found, flat.states = [], []
            for slot, index in zip(flat.group.slots, flat.indices, strict=True):
                names, shape = self.names(flat, slot), tuple(slot.view.shape)
                param = next((archive.by_name[n] for n in names if n in archive.by_name), None)
                if param is None or param.shape != shape:
                    there = f"of {param.shape}" if param else "missing"
                    raise Broken(f"`{names[0]}` is {there} in the checkpoint, of {shape} here")
                theirs, states = param.entry["param_group"], archive.states(param)
                if theirs is not None and index is not None:
                    if not 0 <= theirs < len(archive.manifest["optimizer"]["groups"]):
                        raise Broken(f"`{names[0]}` is of a param group that is not there")
                    # Which is which is found out here; each is one, and no two are the same.
                    mine = groups.setdefault(theirs, index)
                    if mine != index or [*groups.values()].count(index) > 1:
                        raise Broken(f"the param group of `{names[0]}` has other parameters here "
                                     "than in the checkpoint")
                flat.found.append(param)
                flat.states.append(states)
            if flat.pieces and not flat.owned:
                # One of torch's has one state for the shard.
                parts = flat.within(slice(0, len(flat.group.shard)))
                for i in parts:
                    if flat.states[i] != flat.states[parts[0]]:
                        raise Broken(f"the optimizer knows other things of `{flat.found[i].name}`, "
                                     "the number of its steps for instance, than of the rest of "
                                     "its shard")
            for index, states in zip(flat.indices, flat.states, strict=True):
                needs = wanted.get(index, [])
                if states["moments"] and not {*needs} <= {*states["moments"]}:
                    raise Broken(f"`{flat.found[0].name}` has {states['moments']} there, and this "
                                 f"optimizer needs {needs}")
        self._check_optimizer(archive, groups)
        # What came from another format does not tell buffers from parameters, and may have a tied
        # parameter under each of its names.
        known = {name for flat in self.flats for slot in flat.group.slots
                 for name in self.names(flat, slot)}
        more = {p.name for p in archive.params if p.name not in known}
        more |= {*archive.manifest["replicated"]}
        self.found = {name: t for name, t in self.replicated.items() if name in more}
        # Of several names for the same tensor one will do.
        known_ids = {id(t) for t in self.found.values()}
        missing = {name for name, t in self.replicated.items() if id(t) not in known_ids}
        for only, there, here in ((more - {*self.replicated}, "the checkpoint", "this model"),
                                  (missing, "this model", "the checkpoint")):
            if only:
                some = ", ".join(f"`{name}`" for name in sorted(only)[:5])
                raise Broken(f"{some}, {len(only)} in all, in {there} and not in {here}")
        return groups

    def _wanted(self, archive: CheckpointReader) -> dict[int | None, list[str]]:
        """
        #### The moments that a `Zero3Optimizer` keeps, for each param group

        Raises `Broken` where the optimizer is of another class than the one that was saved.
        """
        saved = (archive.manifest["optimizer"] or {}).get("class", self.kind)
        if self.optimizer is not None and {saved, self.kind} - {"Adam", "AdamW"} and (
                saved != self.kind):
            raise Broken(f"the optimizer is {saved} in the checkpoint, {self.kind} here; without "
                         "one the weights are loaded alone")
        if not isinstance(self.optimizer, Zero3Optimizer):
            return {}
        cls, kwargs = self.optimizer.made_by
        # For a step with two elements, by which an optimizer shows what it keeps.
        two = torch.zeros(2, device=self.optimizer.device)
        return {i: moments_of(cls, kwargs, group, two)[0]
                for i, group in enumerate(self.param_groups)}

    def _check_optimizer(self, archive: CheckpointReader, groups: dict[int, int]) -> None:
        """
        #### Make sure that the optimizer can step with what a checkpoint has for it

        Now, because an error in the middle of `take` comes too late, and one in the next step later
        still. Raises `Broken` with the option that is of another kind than here, or with what the
        optimizer itself says in a step on two elements.
        """
        saved = archive.manifest["optimizer"]
        told: dict[int, dict[str, Any]] = {}  # by the index of the param group here
        for theirs, mine in groups.items():
            told[mine] = decode(saved["groups"][theirs])
            here = self.param_groups[mine]
            for key, value in told[mine].items():
                # A scheduler adds options, `initial_lr` for instance, which may not be here yet.
                like = here.get(key, here.get("lr") if key.endswith("lr") else None)
                if key in _WAYS or not _is_like(value, like):
                    raise Broken(f"param group {theirs} has a `{key}` of {value!r:.60} there, and "
                                 f"of {like!r:.60} here")
        for key, value in (saved["scale"] if saved else {}).items():
            counts = key in _SCALE and type(value) is int and value >= 0
            scales = key == "loss_scale" and type(value) in (int, float) and 0 < value < math.inf
            if not (scales if key == "loss_scale" else counts):
                raise Broken(f"the optimizer's `{key}` is {value!r:.60} there")
        tried: list[tuple] = []
        for flat in self.flats:
            for index, states in zip(flat.indices, flat.states, strict=True):
                if index is None:
                    continue
                dtypes = archive.flats[flat.found[0].flat]["keys"]
                group = {**self.param_groups[index], **told.get(index, {})}
                if (index, states, dtypes) not in tried:
                    tried.append((index, states, dtypes))
                    self._try(flat, group, states, dtypes)

    def _try(self, flat: Flat, group: dict[str, Any], states: dict[str, Any],
             dtypes: dict[str, str]) -> None:
        """
        #### Take a step with these options and states, on two elements

        * `dtypes` are those of the parameter and of its moments in the checkpoint, by key
        """
        shard = flat.group.shard
        wide, device = shard.dtype, shard.device
        cls: Any = type(self.optimizer)
        known: dict[str, Any] = {}
        if isinstance(self.optimizer, Zero3Optimizer):
            cls, known = self.optimizer.made_by
            wide, device = flat.owned.master_dtype if flat.owned else wide, self.optimizer.device
        options = {key: value for key, value in group.items() if key != "params"}
        accepted = inspect.signature(cls).parameters
        known = {**known, **{k: v for k, v in options.items() if k in accepted}}
        try:
            inspect.signature(cls).bind([], **known)
        except TypeError:
            # It cannot be made again from its options, as torch's own can.
            return
        # Nothing is zero, for an `eps` may be.
        param = nn.Parameter(torch.ones(2, dtype=wide, device=device))
        param.grad = torch.full_like(param, 0.5)
        scalars = decode(states["scalars"])
        try:
            # The constructor looks at its arguments, and not at the options of a group.
            optimizer = cls([param], **known)
            optimizer.param_groups[0].update(options)
            optimizer.state[param].update(self._on_device(scalars, group, device))
            for key in states["moments"]:
                dtype = wide if dtypes[key] == dtypes["param"] else TYPES[dtypes[key]]
                optimizer.state[param][key] = torch.ones(2, dtype=dtype, device=device)
            optimizer.step()
        except Exception as error:
            raise Broken(f"the optimizer cannot step `{flat.found[0].name}` with what is there, "
                         f"{scalars!r:.60}: {error!r}") from error
        if not param.isfinite().all():
            raise Broken(f"the optimizer makes `{flat.found[0].name}` infinite or NaN with what is "
                         f"there, {scalars!r:.60}")

    def _on_device(self, scalars: dict[str, Any], group: dict[str, Any], device: torch.device
                   ) -> dict[str, Any]:
        """
        #### What an optimizer counts, where its param group wants it
        """
        on_device = group.get("fused") or group.get("capturable")
        return {key: value.to(device) if isinstance(value, torch.Tensor) and on_device else value
                for key, value in scalars.items()}

    def shard(self, archive: CheckpointReader, flat: Flat, key: str) -> torch.Tensor:
        """
        ### This rank's shard, or a moment of it, out of a checkpoint: `(shard_numel,)`

        With zeros in the padding, and where a param group has no such moment.
        """
        numel = len(flat.group.shard)
        first, found = self.comm.rank * numel, None
        for slot, param in zip(flat.group.slots, flat.found, strict=True):
            begin = max(slot.offset, first)
            end = min(slot.offset + slot.view.numel(), first + numel)
            if begin < end and key in ("param", *archive.states(param)["moments"]):
                values = archive.read(param, key, begin - slot.offset, end - slot.offset)
                found = torch.zeros(numel, dtype=values.dtype) if found is None else found
                found[begin - first : end - first] = values
        return torch.zeros(numel, dtype=flat.group.shard.dtype) if found is None else found

    @torch.no_grad()
    def take(self, archive: CheckpointReader, groups: dict[int, int]) -> None:
        """
        ### Take over all that is in a checkpoint

        * `groups` is what `check` returned
        """
        for layer in {flat.layer for flat in self.flats}:
            layer.reshard()
        for flat in self.flats:
            if flat.owned:
                flat.owned.repartition(flat.states, self.state)
                flat.pieces = flat.owned.pieces
        if isinstance(self.optimizer, Zero3Optimizer):
            self.optimizer.regroup()
        for flat in self.flats:
            with self.here(flat, write=True) as values:
                param = self.shard(archive, flat, "param")
                values.copy_(param)
                for _, _, piece in flat.pieces:
                    # What it had before is not to be mixed with what comes.
                    self.state.pop(piece, None)
                for key in flat.moments if flat.pieces else ():
                    moment = self.shard(archive, flat, key)
                    # Moments that had the master's data type get this master's.
                    dtype = values.dtype if moment.dtype == param.dtype else moment.dtype
                    for _, where, piece in flat.pieces:
                        if key in flat.states[flat.within(where)[0]]["moments"]:
                            kept = moment[where].to(piece.device, dtype, copy=True)
                            self.state[piece][key] = kept
                for index, where, piece in flat.pieces:
                    # Read anew for each: an optimizer counts in them.
                    scalars = decode(flat.states[flat.within(where)[0]]["scalars"])
                    group = self.param_groups[index]
                    for key, value in self._on_device(scalars, group, piece.device).items():
                        self.state[piece][key] = value
        for name, t in self.found.items():
            t.copy_(archive.replicated(self.comm.rank, name))
        if self.optimizer is not None:
            # They are of the weights from before.
            self.optimizer.zero_grad()
            if saved := archive.manifest["optimizer"]:
                self._take_options(saved, groups)

    def _take_options(self, saved: dict[str, Any], groups: dict[int, int]) -> None:
        """
        #### Take over the param groups' options and the loss scale
        """
        for theirs, mine in groups.items():
            for key, value in decode(saved["groups"][theirs]).items():
                old = self.param_groups[mine].get(key)
                if isinstance(old, torch.Tensor):
                    old.fill_(value)
                else:
                    self.param_groups[mine][key] = value
        if isinstance(self.optimizer, Zero3Optimizer):
            for key, value in saved["scale"].items():
                # This run has chosen whether to scale; a dynamic scale goes on from where it was.
                if key != "loss_scale" or self.optimizer.dynamic:
                    setattr(self.optimizer, key, value)


def _is_like(value: Any, here: Any) -> bool:
    """
    #### Whether an option of a param group is of the kind that it is of here

    A number is finite, or what it is here; of what is not here, any number, text or flag will do.
    """
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None
    if isinstance(here, torch.Tensor):
        here = here.item()
    if isinstance(here, (list, tuple)) and isinstance(value, (list, tuple)):
        return len(value) == len(here) and all(map(_is_like, value, here))
    if isinstance(value, float) and not math.isfinite(value):
        return value == here
    if here is None or value is None:
        return not isinstance(value, dict)
    if isinstance(here, (bool, str)) or isinstance(value, (bool, str)):
        return type(value) is type(here)
    if isinstance(value, (int, float)) and isinstance(here, (int, float)):
        return True
    return isinstance(value, type(here))


def _in_groups(params: list[dict[str, Any]], states: dict[int, dict[str, Any]]
               ) -> list[dict[str, Any]]:
    """
    #### What an optimizer knows of a flat parameter, each thing once

    * `params` are the manifest's; `states` has, by the place in them, what is known of a parameter

    Of a param group, as a rule, there is one entry. If some of its parameters have been used in
    other steps than others, each entry says by `params` which ones it is of.
    """
    found: list[dict[str, Any]] = []
    for group in dict.fromkeys(param["param_group"] for param in params):
        members = [i for i, param in enumerate(params)
                   if param["param_group"] == group and 0 not in param["shape"]]
        entries: list[dict[str, Any]] = []
        for i in members:
            if i in states and states[i] not in entries:
                entries.append(states[i])
        if len(entries) == 1 and all(i in states for i in members):
            found += entries
            continue
        found += [{**entry, "params": [i for i in members if states.get(i) == entry]}
                  for entry in entries]
    return found

r"""
# Contents of a checkpoint

`Entries` lists the tensors that this rank saves of a model and its optimizer, and puts the values
of a checkpoint back in their places.

A checkpoint has *flat parameters*, and under each of them several *keys*: `param` for the values,
and one key for each moment.

**One layer on two ranks.** A layer has a weight with the elements $w_0, w_1$ and a bias $b_0$. Adam
keeps the moments `exp_avg` ($m$) and `exp_avg_sq` ($v$). The layer is the first flat parameter, so
the names of its entries begin with 0:

| entry | file of rank 0 | file of rank 1 |
|---|---|---|
| `0.param` | $w_0\; w_1$ | $b_0\; 0$ |
| `0.exp_avg` | $m_0\; m_1$ | $m_2\; 0$ |
| `0.exp_avg_sq` | $v_0\; v_1$ | $v_2\; 0$ |

For a whole model:

$$\text{elements that a rank saves} = \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil
\,(1 + \text{moments of } \ell)$$

`param` is the master if there is one, and the shard itself otherwise. The rest of the optimizer
state, such as Adam's number of steps, is the same on all ranks, so it goes into the *manifest*, the
file that describes the checkpoint.

**Run this**: `python -m pytest tests/checkpoint/test_save_load.py -k tier` saves from one tier and
loads into another.

**Not covered, and what that costs**: the extra state that a module returns from `get_extra_state`
is not saved; pass it as `extra`. An optimizer of torch's has a single state for a whole shard, so
parameters with different numbers of steps cannot be loaded into one.
"""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3 import __version__
from zero3.checkpoint.reader import (
    CheckpointReader,
    FlatEntry,
    Manifest,
    OptimizerEntry,
    Param,
    StatesEntry,
    decode,
    encode,
)
from zero3.comm.parts import WeightPart, connect, part_of
from zero3.flat import FlatParameter, Slot
from zero3.guards.contents import check_groups, stray
from zero3.guards.options import Named
from zero3.layer import Zero3Layer
from zero3.offload.in_file import InFile
from zero3.offload.tensors import TYPES, Broken, type_name
from zero3.optimizer.portions import Here
from zero3.optimizer.stage3 import Zero3Optimizer, plain_names
from zero3.optimizer.states import Piece, ShardStates, State, first_state
from zero3.optimizer.whole import Spread, Whole
from zero3.sharded import comm_of
from zero3.whole_model.wrap import Zero3Model

# Options of a param group that are not saved. The loading run chooses the implementation of the
# step.
NOT_SAVED = ("params", "fused", "foreach", "capturable", "differentiable")
# The state of a loss scale.
_SCALE = ("loss_scale", "good_steps", "skipped_steps")


@dataclass(eq=False)
class Flat:
    """
    ## A flat parameter of this model, with its optimizer state
    """

    paths: list[str]  # its layer's names in the plain model: several if it is registered twice
    layer: Zero3Layer
    parameter: FlatParameter
    owned: ShardStates | None  # the optimizer state, if the optimizer is a `Zero3Optimizer`
    dtype: torch.dtype  # of the saved values: the master's, or else the shard's
    in_file: bool  # whether the saved values are in a file
    # The param group and the range of the shard of each parameter.
    indices: list[int | None]
    spans: list[slice]
    pieces: list[Piece]
    # `Entries.check` fills these in: each parameter's record in the checkpoint, and its state.
    found: list[Param] = field(default_factory=list)
    states: list[StatesEntry] = field(default_factory=list)

    @property
    def moments(self) -> list[str]:
        """
        ### The moments that the checkpoint has for this flat parameter
        """
        return sorted({key for states in self.states for key in states["moments"]})

    def within(self, where: slice) -> list[int]:
        """
        ### Indices of the parameters whose state covers part of this range of the shard
        """
        return [i for i, span in enumerate(self.spans)
                if max(span.start, where.start) < min(span.stop, where.stop)]


class Entry(NamedTuple):
    """
    ## A tensor of a rank's file
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    in_memory: bool
    flat: Flat | None  # its flat parameter; none if each rank has the whole tensor
    key: str  # "param" or a moment; for a whole tensor its name


# A flat parameter as one rank describes it, and the states of this rank's pieces, by parameter.
Described = tuple[FlatEntry, dict[int, StatesEntry]]


class TensorNames(NamedTuple):
    """
    ## The names of all tensors of a model, in a pipeline those of all stages
    """

    params: list[tuple[list[str], int | None]]  # the names of each parameter, and its param group
    replicated: set[str]  # the names of the tensors that each rank of a stage has whole


class Entries(Named):
    """
    ## The tensors of a model and its optimizer that go into a checkpoint
    """

    label = "the checkpoint"

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None):
        """
        ### List the flat parameters, and the tensors that every rank has whole

        Raises `RuntimeError` if the model has no sharded layers, if it trains parameters outside of
        them, or if the optimizer was built on another model.
        """
        connect(model)
        self.model = model
        self.optimizer = optimizer
        paths = plain_names(model)
        # The modules in the order of the plain model.
        self.order = {path: i for i, path in enumerate(
            path for found in paths.values() for path in found)}
        layers = [m for m in paths if isinstance(m, Zero3Layer) and m.flats]
        # All ranks of the model, also if it has no layers.
        self.comm = comm_of(model)
        # Its place in the pipeline. The ranks at one place have shards of the same layers.
        self.place = self.comm.stages.rank
        # The files of a place follow each other, in the order of their shards.
        self.file_number = self.place * self.comm.world_size + self.comm.rank
        self.stage_comm = layers[0].comm if layers else self.comm
        check_groups(layers)
        self.expect(bool(layers), "has nothing to save or load", "a model of Zero3Layers",
                    type(model).__name__, "wrap the model first")
        self.device = layers[0].device
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups if optimizer else []
        self.state: State = optimizer.state if optimizer else {}
        self.optimizer_class = type(getattr(optimizer, "inner", optimizer)).__name__
        self.flats = [self._flat(layer, paths[layer], p) for layer in layers for p in layer.flats]
        # The layers of a rank in a pipeline may all be frozen.
        frozen = self.comm.stages.size > 1 and getattr(optimizer, "model", None) is model
        has_pieces = any(flat.pieces for flat in self.flats)
        self.expect(optimizer is None or has_pieces or frozen, "cannot save or load this optimizer",
                    "one of this model's shards", type(optimizer).__name__,
                    "build the optimizer after the model is wrapped, on the wrapped model")
        self.owners = optimizer.owners if isinstance(optimizer, Zero3Optimizer) else None
        # The states of these parameters while they are saved, in pieces like all others.
        self.spread: dict[nn.Parameter, Spread] = {}
        self.replicated = self._find_replicated(paths)
        # Those of them in the checkpoint; `check` fills this in.
        self.found: dict[str, torch.Tensor] = {}

    def _flat(self, layer: Zero3Layer,
              paths: list[str],
              parameter: FlatParameter) -> Flat:
        """
        #### Find the optimizer state of a flat parameter
        """
        shard = parameter.shard
        for states in getattr(self.optimizer, "shard_states", ()):
            if states.shard is shard:
                return Flat(paths, layer, parameter, states, states.master_dtype,
                            states.in_file is not None, [*states.group_indices], states.spans,
                            states.pieces)
        whole = slice(0, len(shard))
        pieces = [Piece(index, whole, shard) for index, group in enumerate(self.param_groups)
                  if any(p is shard for p in group["params"])]
        slots = parameter.slots
        return Flat(paths, layer, parameter, None, shard.dtype,
                    isinstance(parameter.storage, InFile),
                    [pieces[0][0] if pieces else None] * len(slots),
                    [whole if slot.view.numel() else slice(0, 0) for slot in slots], pieces)

    def _find_replicated(self, paths: dict[nn.Module, list[str]]) -> dict[str, torch.Tensor]:
        """
        #### The tensors that every rank has whole, under each of their names
        """
        # Nobody reduces the gradient of a trainable parameter there.
        for name in stray(self.model):
            self.expect(False, "cannot save or load", "trainable parameters in Zero3Layers",
                        f"`{name}` outside of them", "wrap its module")
        found: dict[str, torch.Tensor] = {}
        shards = {flat.parameter.shard for flat in self.flats}
        for module, names in paths.items():
            tensors = {name: t for name, t in {**module._buffers, **module._parameters}.items()
                       if t is not None and name not in module._non_persistent_buffers_set}
            for path in names:
                for name, tensor in tensors.items():
                    if tensor not in shards:
                        found[f"{path}.{name}".strip(".")] = tensor
        return found

    def names(self, flat: Flat, slot: Slot) -> list[str]:
        """
        ### All names that a parameter has in the plain model, in the order of its modules

        The first one is that of `named_parameters()`.
        """
        own = [f"{path}.{name}".strip(".") for path in flat.paths for name in slot.names]
        tied = self.model.tied if isinstance(self.model, Zero3Model) else {}
        names = own + [name for name, p in tied.items() if p is slot.param and name not in own]
        return sorted(names, key=lambda name: self.order.get(name.rpartition(".")[0], 0))

    def part(self, flat: Flat, slot: Slot) -> WeightPart | None:
        """
        ### Which part of a parameter the ranks of a shard have; none, if all of it
        """
        return part_of(flat.layer.module, slot.names[0])

    # --------------------------------------------------------------------------------------- save

    def describe(self) -> list[Described]:
        """
        ### This rank's entries for the manifest: one for each flat parameter
        """
        described: list[Described] = []
        for flat in self.flats:
            slots = flat.parameter.slots
            numel = slots[-1].end
            keys = {"param": type_name(flat.dtype)}
            states: dict[int, StatesEntry] = {}
            for index, where, piece in flat.pieces:
                moments, others = self.state_of(piece)
                # An optimizer has no state for a parameter that it has not stepped yet.
                if moments or others:
                    scalars = {key: encode(value, key) for key, value in others.items()}
                    entry: StatesEntry = {
                        "param_group": index, "moments": [*moments], "scalars": scalars}
                    keys |= {key: type_name(value.dtype) for key, value in moments.items()}
                    states |= dict.fromkeys(flat.within(where), entry)
            parts = [self.part(flat, slot) for slot in slots]
            described.append(({
                "place": self.place,
                "layer": flat.paths[0], "dtype": type_name(flat.parameter.shard.dtype),
                "numel": numel, "padding": len(flat.parameter.full) - numel,
                "keys": keys,
                "params": [{"names": self.names(flat, slot), "shape": [*slot.view.shape],
                            "offset": slot.offset, "param_group": index,
                            **({"part": asdict(part)} if part else {})}
                           for slot, index, part in zip(slots, flat.indices, parts, strict=True)]},
                states))
        return described

    def state_of(self, piece: nn.Parameter) -> Spread:
        """
        ### The optimizer state of a piece: its moments, and the rest
        """
        state = self.state.get(piece, {})
        moments = {key: value for key, value in state.items()
                   if isinstance(value, torch.Tensor) and value.dim() == 1}
        others = {key: value for key, value in state.items() if key not in moments}
        return self.spread.get(piece, Spread(moments, others))

    def options(self) -> OptimizerEntry | None:
        """
        ### The optimizer's entry for the manifest: class, param groups and loss scale
        """
        if self.optimizer is None:
            return None
        return {
            "class": self.optimizer_class,
            "groups": [encode({**self._class_of(i), **{
                k: v for k, v in group.items() if k not in NOT_SAVED}}, "param group")
                for i, group in enumerate(self.param_groups)],
            "scale": {key: getattr(self.optimizer, key) for key in _SCALE
                      if hasattr(self.optimizer, key)},
        }

    def _class_of(self, index: int) -> dict[str, str]:
        """
        #### The class of a param group that is stepped whole, as one of its saved options
        """
        inner = self.owners.inner.get(index) if self.owners else None
        return {"optimizer": type(inner).__name__} if inner else {}

    def manifest(self, described: list[Described]) -> Manifest:
        """
        ### Merge the descriptions of all ranks (all-gather; all ranks must call it)
        """
        # The ranks at this place describe the same flat parameters, and different pieces of them.
        first, *others = self.stage_comm.gather(described)
        for other in others:
            for (mine, states), (theirs, more) in zip(first, other, strict=True):
                mine["keys"] |= theirs["keys"]
                states |= more
        merged: list[FlatEntry] = [
            {**flat, "states": _merge_states(states)} for flat, states in first]
        # The ranks at another place of a pipeline have other flat parameters.
        places = self.comm.stages.gather((merged, [*self.replicated]))
        return {
            "world_size": self.comm.world_size,
            "places": len(places),
            "flats": [flat for flats, _ in places for flat in flats],
            "replicated": {name: place for place, (_, names) in enumerate(places)
                           for name in names},
            "versions": {"zero3": __version__, "torch": torch.__version__},
        }

    def entries(self, manifest: Manifest) -> list[Entry]:
        """
        ### The tensors of this rank's file, in the file's order

        Larger elements come first (see `Writer`). Among elements of one size, shards in files come
        first, because an asynchronous save does not copy them.
        """
        own = [(i, described["keys"]) for i, described in enumerate(manifest["flats"])
               if described["place"] == self.place]
        found = [Entry(f"{i}.{key}", TYPES[dtype], (len(flat.parameter.shard),), not flat.in_file,
                       flat, key)
                 for (i, keys), flat in zip(own, self.flats, strict=True)
                 for key, dtype in keys.items()]
        found += [Entry(f"replicated.{name}", tensor.dtype, tuple(tensor.shape), True, None, name)
                  for name, tensor in self.replicated.items()]
        return sorted(found, key=lambda entry: (-entry.dtype.itemsize, entry.in_memory))

    def tensors(self, entries: list[Entry]) -> Iterator[torch.Tensor]:
        """
        ### The values of these entries; each is valid until the next one is requested
        """
        for flat, run in groupby(entries, key=lambda entry: entry.flat):
            if flat is None:
                yield from (self.replicated[entry.key] for entry in run)
                continue
            with self.here(flat) as values:
                for entry in run:
                    if entry.key == "param":
                        yield from (each.master for each in values)
                        continue
                    for _, where, piece in flat.pieces:
                        moment = self.state_of(piece).moments.get(entry.key)
                        if moment is None:
                            # Only other param groups have this moment, because of their options.
                            moment = torch.zeros(where.stop - where.start, dtype=entry.dtype)
                        yield moment

    @contextmanager
    def here(self, flat: Flat, write: bool = False) -> Iterator[list[Here]]:
        """
        ### Load a shard's master and moments into memory; or the shard, if it has no master

        * `write` stores the changed values again afterwards
        """
        if flat.owned:
            with flat.owned.in_memory(self.state, write=write) as here:
                yield here
            return
        storage = flat.parameter.storage
        try:
            values = storage.load()
            yield [Here(slice(0, len(values)), values, None)]
            if write:
                storage.save()
        finally:
            storage.release()

    # -------------------------------------------------------------------------------------- check

    def tensor_names(self) -> TensorNames:
        """
        ### The names of all tensors of the model (all-gather in a pipeline; all ranks must call it)
        """
        mine = [(self.names(flat, slot), index) for flat in self.flats
                for slot, index in zip(flat.parameter.slots, flat.indices, strict=True)]
        found = TensorNames([], set())
        for params, replicated in self.comm.stages.gather((mine, [*self.replicated])):
            found.params.extend(params)
            found.replicated.update(replicated)
        return found

    def check(self, checkpoint: CheckpointReader, everywhere: TensorNames) -> dict[int, int]:
        """
        ### Find every tensor in a checkpoint, and make sure that the optimizer can go on

        * `everywhere` is the result of `tensor_names`

        Fills in `found` and `states` of each flat parameter. Returns this optimizer's param group
        for each of the checkpoint's. Raises `Broken` if the checkpoint does not fit.
        """
        for flat in self.flats:
            self._match(flat, checkpoint)
        groups = _match_groups(checkpoint, everywhere)
        if self.optimizer is not None:
            self._check_optimizer(checkpoint.manifest["optimizer"], groups)
        self._match_replicated(checkpoint, everywhere)
        return groups

    def _match(self, flat: Flat, checkpoint: CheckpointReader) -> None:
        """
        #### Find the parameters of a flat parameter by their names
        """
        for slot in flat.parameter.slots:
            names = self.names(flat, slot)
            part = self.part(flat, slot)
            shape = part.shape if part else tuple(slot.view.shape)
            param = checkpoint.find(names)
            if param is None or param.shape != shape:
                there = f"of {param.shape}" if param else "missing"
                raise Broken(f"`{names[0]}` is {there} in the checkpoint, of {shape} here")
            flat.found.append(param)
            flat.states.append(checkpoint.states(param))

    def _match_replicated(self, checkpoint: CheckpointReader, everywhere: TensorNames) -> None:
        """
        #### Find the tensors that every rank has whole

        Raises `Broken` if one of them is missing, or if the checkpoint has one more.
        """
        # Only the names of all stages tell whether the checkpoint has one more.
        sharded = {name for names, _ in everywhere.params for name in names}
        # A checkpoint that was converted from another format has buffers among its parameters, and
        # may have a tied parameter once under each of its names.
        there = {param.name for param in checkpoint.params} - sharded
        there |= {*checkpoint.manifest["replicated"]}
        self.found = {name: t for name, t in self.replicated.items() if name in there}
        # A tensor with several names needs only one of them.
        found_ids = {id(t) for t in self.found.values()}
        missing = {name for name, t in self.replicated.items() if id(t) not in found_ids}
        for names, has, lacks in ((there - everywhere.replicated, "the checkpoint", "this model"),
                                  (missing, "this model", "the checkpoint")):
            some = ", ".join(f"`{name}`" for name in sorted(names)[:5])
            _expect(not names, f"{some}, {len(names)} in all, in {has} and not in {lacks}")

    def _check_optimizer(self, saved: OptimizerEntry | None, groups: dict[int, int]) -> None:
        """
        #### Make sure that the optimizer can go on with the saved options and states

        * `saved` is the manifest's entry for the optimizer, if there was one

        An error inside `take` would leave the model half loaded.
        """
        mine = self.optimizer_class
        # Not every format has the class.
        theirs = (saved["class"] if saved else "") or mine
        _expect(theirs == mine or {theirs, mine} == {"Adam", "AdamW"},
                f"the optimizer is {theirs} in the checkpoint, {mine} here; leave it out to load "
                "the weights alone")
        if saved:
            self._check_options(saved, groups)
        needed = [self._first_state(group) for group in self.param_groups]
        for flat, whole in self._wholes():
            self._check_whole(whole, flat.states[whole.position])
        for flat in self.flats:
            wholes = flat.owned.wholes if flat.owned else {}
            for i, (index, param, states) in enumerate(
                    zip(flat.indices, flat.found, flat.states, strict=True)):
                # A parameter that no step has used has no state.
                if index is not None and i not in wholes and (
                        states["moments"] or states["scalars"]):
                    _check_states(param.name, states, needed[index])
            if not flat.owned:
                # One of torch's optimizers has a single state for the shard.
                shared = [flat.states[i] for _, where, _ in flat.pieces for i in flat.within(where)]
                _expect(all(states == shared[0] for states in shared),
                        f"the parameters from `{flat.found[0].name}` on share a shard here, and "
                        "have different optimizer states, different numbers of steps for instance")

    def _wholes(self) -> Iterator[tuple[Flat, Whole]]:
        """
        #### The parameters that are stepped whole
        """
        flats = {flat.owned: flat for flat in self.flats}
        if self.owners is not None:
            for whole in self.owners.wholes:
                yield flats[whole.states], whole

    def _check_whole(self, whole: Whole, states: StatesEntry) -> None:
        """
        #### Compare the names of a parameter's saved states with those that its owner needs
        """
        assert self.owners
        inner = self.owners.inner[whole.group_index]
        options = {key: value for key, value in inner.param_groups[0].items() if key != "params"}
        like = torch.zeros((2,) * len(whole.shape))
        needed = _first_state(type(inner), {}, options, like)
        there = {*states["moments"], *states["scalars"]}
        _expect(not there or not needed or there == needed.keys(),
                f"`{whole.name}` has {sorted(there)} there, and {type(inner).__name__} needs "
                f"{sorted(needed)}")

    def _check_options(self, saved: OptimizerEntry, groups: dict[int, int]) -> None:
        """
        #### Make sure that the saved options and loss scale are of the right kind
        """
        for theirs, mine in groups.items():
            here = self.param_groups[mine]
            options = decode(saved["groups"][theirs])
            classes = [each.pop("optimizer", self.optimizer_class)
                       for each in (options, self._class_of(mine))]
            _expect(saved["class"] == "" or classes[0] == classes[1], f"param group {theirs} is "
                    f"stepped by {classes[0]} there, and by {classes[1]} here")
            for key, value in options.items():
                # A scheduler adds options such as `initial_lr`, which this group may not have yet.
                like = here.get(key, here.get("lr") if key.endswith("lr") else None)
                fits = _kind(value) == _kind(like) if like is not None else type(value) is not dict
                _expect(key not in NOT_SAVED and fits, f"param group {theirs} has a `{key}` of "
                        f"{value!r:.60} there, and of {like!r:.60} here")
        for key, value in saved["scale"].items():
            counts = key in _SCALE and type(value) is int and value >= 0
            scales = (isinstance(value, (int, float)) and value is not True
                      and 0 < value < math.inf)
            _expect(scales if key == "loss_scale" else counts,
                    f"the optimizer's `{key}` is {value!r:.60} there")

    def _first_state(self, group: dict[str, object]) -> dict[str, object]:
        """
        #### The state that this optimizer keeps of a parameter in a param group
        """
        cls, kwargs = getattr(self.optimizer, "made_by", (type(self.optimizer), {}))
        two = torch.zeros(2, device=getattr(self.optimizer, "device", self.device))
        return _first_state(cls, kwargs, group, two)

    # --------------------------------------------------------------------------------------- load

    def shard(self, checkpoint: CheckpointReader,
              flat: Flat,
              key: str,
              where: slice | None = None) -> torch.Tensor:
        """
        ### Read this rank's shard, or one of its moments, from a checkpoint

        * `where` is a range of the shard; left out, the whole shard

        Returns `(where.stop - where.start,)`. The padding is zero (invariant I5), and so are
        moments that a param group does not have.
        """
        shard = flat.parameter.shard
        where = where or slice(0, len(shard))
        first = self.comm.rank * len(shard) + where.start
        last = self.comm.rank * len(shard) + where.stop
        found: torch.Tensor | None = None
        for slot, param, states in zip(flat.parameter.slots, flat.found, flat.states, strict=True):
            begin = max(slot.offset, first)
            end = min(slot.end, last)
            if begin < end and key in ("param", *states["moments"]):
                read = partial(checkpoint.read, param, key)
                place = (begin - slot.offset, end - slot.offset)
                part = self.part(flat, slot)
                values = part.read(*place, read) if part else read(*place)
                if found is None:
                    found = torch.zeros(last - first, dtype=values.dtype)
                found[begin - first : end - first] = values
        return torch.zeros(last - first, dtype=shard.dtype) if found is None else found

    @torch.no_grad()
    def take(self, checkpoint: CheckpointReader, groups: dict[int, int]) -> None:
        """
        ### Load all values of a checkpoint into the model and the optimizer
        """
        for layer in {flat.layer for flat in self.flats}:
            # Its full parameters have the old values.
            layer.reshard()
        for flat in self.flats:
            if flat.owned:
                # Cut the shard between parameters that have different states in the checkpoint.
                flat.owned.repartition(flat.states, self.state)
                flat.pieces = flat.owned.pieces
        if isinstance(self.optimizer, Zero3Optimizer):
            self.optimizer.regroup()
        for flat in self.flats:
            with self.here(flat, write=True) as here:
                for where, master, _ in here:
                    param = self.shard(checkpoint, flat, "param", where)
                    master.copy_(param)
                self._take_states(checkpoint, flat, master.dtype, param.dtype)
        for flat, whole in self._wholes():
            if self.owners and whole in self.owners.own:
                self._take_whole(checkpoint, flat, whole)
        for name, tensor in self.found.items():
            tensor.copy_(checkpoint.replicated(self.comm.rank, name))
        if self.optimizer is not None:
            # The gradients belong to the old weights.
            self.optimizer.zero_grad()
            if saved := checkpoint.manifest["optimizer"]:
                self._take_options(saved, groups)

    def _take_states(self, checkpoint: CheckpointReader,
                     flat: Flat,
                     dtype: torch.dtype,
                     saved_dtype: torch.dtype) -> None:
        """
        #### Load the optimizer states of a shard

        * `dtype` is the master's data type here, and `saved_dtype` the one in the checkpoint
        """
        for index, where, piece in flat.pieces:
            # All parameters of a piece have the same state.
            position = flat.within(where)[0]
            if flat.owned and position in flat.owned.wholes:
                continue
            states = flat.states[position]
            new: dict[str, object] = {}
            for key in sorted(states["moments"]):
                moment = self.shard(checkpoint, flat, key, where)
                # A moment that was saved in the master's data type gets this master's.
                new_dtype = dtype if moment.dtype == saved_dtype else moment.dtype
                new[key] = moment.to(piece.device, new_dtype)
            # Decode again for each piece: the optimizer updates its number of steps in place.
            scalars = decode(states["scalars"])
            new |= _on_device(scalars, self.param_groups[index], piece.device)
            # The old state may have other keys.
            self.state.pop(piece, None)
            if new:
                self.state[piece] = new

    def _take_whole(self, checkpoint: CheckpointReader,
                    flat: Flat,
                    whole: Whole) -> None:
        """
        #### Load the state of a parameter that this rank owns
        """
        states = flat.states[whole.position]
        read = partial(checkpoint.read, flat.found[whole.position])
        new: dict[str, object] = {}
        for key in states["moments"]:
            moment = read(key, 0, whole.numel).view(whole.shape)
            same = moment.dtype == read("param", 0, 1).dtype
            new[key] = moment.to(whole.states.master_dtype) if same else moment
        assert self.owners
        self.owners.put_state(whole, {**new, **decode(states["scalars"])})

    def _take_options(self, saved: OptimizerEntry, groups: dict[int, int]) -> None:
        """
        #### Load the options of the param groups, such as the learning rate, and the loss scale
        """
        for theirs, mine in groups.items():
            group = self.param_groups[mine]
            options = decode(saved["groups"][theirs])
            options.pop("optimizer", None)
            for key, value in options.items():
                old = group.get(key)
                if isinstance(old, torch.Tensor):
                    old.copy_(torch.as_tensor(value))
                elif isinstance(value, torch.Tensor) and old is not None:
                    # A learning rate that was a tensor there, and is a number here.
                    group[key] = value.tolist()
                else:
                    group[key] = value
        if isinstance(self.optimizer, Zero3Optimizer):
            for key, value in saved["scale"].items():
                # This run chose a fixed scale or none, and keeps it; a dynamic one is resumed.
                if key != "loss_scale" or self.optimizer.dynamic:
                    setattr(self.optimizer, key, value)


def _expect(good: bool, problem: str) -> None:
    """
    #### Refuse a checkpoint with this problem unless all is good

    `load` raises an error on all ranks.
    """
    if not good:
        raise Broken(problem)


def _first_state(make: object,
                 kwargs: dict[str, object],
                 group: dict[str, object],
                 two: torch.Tensor) -> dict[str, object]:
    """
    #### The first state of a parameter, or nothing if the class cannot be made with these options
    """
    try:
        return first_state(make, kwargs, group, two)
    except (TypeError, ValueError):
        return {}


def _match_groups(checkpoint: CheckpointReader, everywhere: TensorNames) -> dict[int, int]:
    """
    #### This optimizer's param group for each of the checkpoint's, by the parameters in them
    """
    groups: dict[int, int] = {}
    for names, mine in everywhere.params:
        param = checkpoint.find(names)
        theirs = param.entry["param_group"] if param else None
        if theirs is not None and mine is not None:
            # The groups have to correspond one to one, in any order.
            groups.setdefault(theirs, mine)
            _expect(groups[theirs] == mine and [*groups.values()].count(mine) == 1, "the param "
                    f"group of `{names[0]}` has other parameters here than in the checkpoint")
    return groups


def _on_device(scalars: dict[str, object],
               group: dict[str, object],
               device: torch.device) -> dict[str, object]:
    """
    #### Move the number of steps and the like to the device, for torch's fused and capturable steps
    """
    on_device = group.get("fused") or group.get("capturable")
    return {key: value.to(device) if on_device and isinstance(value, torch.Tensor) else value
            for key, value in scalars.items()}


def _check_states(name: str,
                  states: StatesEntry,
                  needed: dict[str, object]) -> None:
    """
    #### Compare the saved states of a parameter with those that the optimizer needs

    * `needed` is the result of `_first_state`. Moments have one dimension
    """
    scalars = decode(states["scalars"])
    for key, like in needed.items():
        if isinstance(like, torch.Tensor) and like.dim() == 1:
            _expect(key in states["moments"],
                    f"`{name}` has {states['moments']} there, and this optimizer needs {key!r}")
        else:
            value = scalars.get(key)
            _expect(type(value) is type(like) and _kind(value) == _kind(like),
                    f"`{name}` has a `{key}` of {value!r:.60} there, and of {like!r:.60} here")


def _kind(value: object) -> object:
    """
    #### The kind of an option or of a state: equal for values that can replace each other

    Any finite number may replace another one. A whole number needs at most 64 bits.
    """
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [_kind(each) for each in value]
    if isinstance(value, float):
        return float if math.isfinite(value) else value
    is_whole = type(value) is int and -(1 << 63) <= value < 1 << 63
    return float if is_whole else type(value)


def _merge_states(states: dict[int, StatesEntry]) -> list[StatesEntry]:
    """
    #### The optimizer states of a flat parameter, each of them once

    Each lists its parameters as `params`. They differ if some parameters of a param group were used
    in other steps than the rest.
    """
    found: dict[str, StatesEntry] = {}
    for index, entry in sorted(states.items()):
        same: Any = found.setdefault(json.dumps(entry), {**entry, "params": []})
        same["params"].append(index)
    return [*found.values()]

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
state, such as Adam's number of steps, is the same on all ranks, so it goes into the *manifest*.

**Run this**: `python -m pytest tests/checkpoint/test_save_load.py -k tier` saves from one tier and
loads into another.

**Not covered, and what that costs**: the extra state that a module returns from `get_extra_state`
is not saved; pass it as `extra`. An optimizer of torch's has a single state for a whole shard, so
parameters with different numbers of steps cannot be loaded into one.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial, reduce
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
from zero3.comm.parts import WeightPart, connect, length, part_of
from zero3.flat import FlatParameter, Slot, Storage
from zero3.guards.checks import Named
from zero3.guards.contents import check_groups, stray
from zero3.layer import Zero3Layer
from zero3.offload.tensors import TYPES, Broken, type_name
from zero3.optimizer.stage3 import SCALE_STATE, Zero3Optimizer, plain_names
from zero3.optimizer.states import Here, Piece, ShardStates, State, first_state
from zero3.optimizer.whole import Owners, Spread
from zero3.sharded import comm_of
from zero3.whole_model.wrap import Zero3Model

# Options of a param group that are not saved. The loading run chooses the implementation of the
# step.
NOT_SAVED = ("params", "fused", "foreach", "capturable", "differentiable")


@dataclass(eq=False)
class Own:
    """
    ## A parameter of this model, in its flat parameter
    """

    names: list[str]  # in the plain model, see `Entries._names`
    slot: Slot
    part: WeightPart | None  # the part that the ranks of a shard have; none, if all of it
    group: int | None  # its param group
    found: Param = field(init=False)  # its record in a checkpoint, from `Entries.check`


@dataclass(eq=False)
class Flat:
    """
    ## A flat parameter of this model, with its optimizer state
    """

    path: str  # of its layer in the plain model
    layer: Zero3Layer
    parameter: FlatParameter
    owned: ShardStates | None  # the optimizer state, if the optimizer is a `Zero3Optimizer`
    pieces: list[Piece]
    params: list[Own]

    @property
    def dtype(self) -> torch.dtype:
        """
        ### The data type of the saved values: the master's, or else the shard's
        """
        return self.owned.master_dtype if self.owned else self.parameter.shard.dtype

    @property
    def in_file(self) -> bool:
        """
        ### Whether the saved values are in a file
        """
        return (self.owned.in_file is not None if self.owned
                else self.parameter.storage.tier == "nvme")


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


# The names of each tensor of a model, in a pipeline those of all stages, and its param group. A
# tensor that each rank has whole is in none.
Names = list[tuple[list[str], int | None]]


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
        # Its place in the pipeline.
        self.place = self.comm.stages.rank
        self.file_number = self.place * self.comm.world_size + self.comm.rank
        check_groups(layers)
        self.expect(bool(layers), "has nothing to save or load", "a model of Zero3Layers",
                    type(model).__name__, "wrap the model first")
        self.device = layers[0].device
        self.param_groups: list[dict[str, Any]] = optimizer.param_groups if optimizer else []
        self.state: State = optimizer.state if optimizer else {}
        wrapped = getattr(optimizer, "inner", optimizer)
        self.optimizer_class = type(wrapped).__name__
        self.owners = optimizer.owners if isinstance(optimizer, Zero3Optimizer) else None
        # The optimizers of the param groups that are stepped whole.
        self.inner = self.owners.inner if self.owners else {}
        # Who steps each param group.
        self.steppers = [self.inner.get(i, wrapped) for i in range(len(self.param_groups))]
        self.owned: dict[torch.Tensor, ShardStates] = {
            states.shard: states for states in getattr(optimizer, "shard_states", ())}
        self.flats = [self._flat(layer, paths[layer], p)
                      for layer in layers for p in layer.flats]
        self.params = [own for flat in self.flats for own in flat.params]
        # The layers of a rank in a pipeline may all be frozen.
        frozen = self.comm.stages.size > 1 and getattr(optimizer, "model", None) is model
        self.expect(optimizer is None or frozen or any(flat.pieces for flat in self.flats),
                    "cannot save or load this optimizer",
                    "one of this model's shards", type(optimizer).__name__,
                    "build the optimizer after the model is wrapped, on the wrapped model")
        # The states of these parameters while they are saved, in pieces like all others.
        self.spread: dict[nn.Parameter, Spread] = {}
        self.replicated = self._find_replicated(paths)

    def _flat(self, layer: Zero3Layer,
              paths: list[str],
              parameter: FlatParameter) -> Flat:
        """
        #### Find the parameters and the optimizer state of a flat parameter

        * `paths` are its layer's names in the plain model: several if it is registered twice
        """
        shard = parameter.shard
        slots = parameter.slots
        owned = self.owned.get(shard)
        # One of torch's optimizers has a single state for the shard.
        with_elements = [i for i, slot in enumerate(slots) if slot.view.numel()]
        pieces = owned.pieces if owned else [
            Piece(index, slice(0, len(shard)), shard, with_elements)
            for index, group in enumerate(self.param_groups)
            if any(p is shard for p in group["params"])]
        groups = [param.group_index for param in owned.params] if owned else [
            pieces[0].group_index if pieces else None] * len(slots)
        params = [
            Own(self._names(paths, slot),
                slot,
                part_of(layer.module, slot.names[0]),
                group)
            for slot, group in zip(slots, groups, strict=True)]
        return Flat(paths[0], layer, parameter, owned, pieces, params)

    def _names(self, paths: list[str], slot: Slot) -> list[str]:
        """
        #### All names that a parameter has in the plain model, in the order of its modules

        The first one is that of `named_parameters()`.
        """
        own = [f"{path}.{name}".strip(".") for path in paths for name in slot.names]
        tied = self.model.tied if isinstance(self.model, Zero3Model) else {}
        return sorted(
            own + [name for name, p in tied.items() if p is slot.param and name not in own],
            key=lambda name: self.order.get(name.rpartition(".")[0], 0))

    def _find_replicated(self, paths: dict[nn.Module, list[str]]) -> dict[str, torch.Tensor]:
        """
        #### The tensors that every rank has whole, under each of their names
        """
        # Nobody reduces the gradient of a trainable parameter there.
        names = [f"`{name}`" for name in stray(self.model)]
        self.expect(not names, "cannot save or load", "trainable parameters in Zero3Layers",
                    f"{', '.join(names)} outside of them", "wrap its module")
        shards = {flat.parameter.shard for flat in self.flats}
        return {f"{path}.{name}".strip("."): tensor
                for module, paths_of in paths.items() for path in paths_of
                for name, tensor in (*module._buffers.items(), *module._parameters.items())
                if tensor is not None and tensor not in shards
                and name not in module._non_persistent_buffers_set}

    # --------------------------------------------------------------------------------------- save

    def describe(self) -> list[FlatEntry]:
        """
        ### This rank's entries for the manifest: one for each flat parameter
        """
        ours = {piece.param for flat in self.flats for piece in flat.pieces}
        strangers = [p for p in self.state if p not in ours] if self.owners is None else []
        unstepped = [flat for flat in self.flats if self.optimizer and not flat.pieces
                     and flat.parameter.shard.requires_grad and len(flat.parameter.shard)]
        for lost, whose in ((strangers, "parameters that are not in the model"),
                            (unstepped, "shards that this optimizer does not step")):
            if lost:
                warnings.warn(
                    f"rank {self.comm.global_rank}: states of {len(lost)} {whose} are not saved. "
                    "What to do: save them with their own model or optimizer, to another folder; "
                    "those of no shard also in `extra`, as the `state_dict()` of an optimizer of "
                    "their own.", stacklevel=2)
        described: list[FlatEntry] = []
        first_state_of = cache(self._first_state)
        for flat in self.flats:
            keys = {"param": type_name(flat.dtype)}
            states: list[StatesEntry] = []
            for piece in flat.pieces:
                moments, others = self.state_of(piece)
                if moments and length(piece.where) == 1 and piece.param not in self.spread:
                    # A count of one element looks like a moment here, so look at a parameter of
                    # two elements. All ranks have to find the same.
                    first = first_state_of(piece.group_index, 1)
                    others |= {key: moments.pop(key) for key in [*moments]
                               if getattr(first.get(key), "shape", (2,)) != (2,)}
                # An optimizer has no state for a parameter that it has not stepped yet. One of
                # torch's has states of a shard without elements, which are of no parameter.
                if piece.positions and (moments or others):
                    keys |= {key: type_name(value.dtype)
                             for key, value in moments.items()}
                    states.append({
                        "param_group": piece.group_index, "moments": [*moments],
                        "scalars": {key: encode(value, key) for key, value in others.items()},
                        "params": piece.positions})
            numel = flat.params[-1].slot.end
            described.append({
                "place": self.place,
                "layer": flat.path, "dtype": type_name(flat.parameter.shard.dtype),
                "numel": numel, "padding": len(flat.parameter.full) - numel,
                "keys": keys,
                "params": [{"names": own.names, "shape": [*own.slot.view.shape],
                            "offset": own.slot.offset, "param_group": own.group,
                            "part": asdict(own.part) if own.part else None}
                           for own in flat.params],
                "states": states})
        return described

    def state_of(self, piece: Piece) -> Spread:
        """
        ### The optimizer state of a piece: its moments, and the rest

        A moment has as many elements as the piece, or none while it rests in a file.
        """
        state = self.state.get(piece.param, {})
        moments = {key: value for key, value in state.items()
                   if isinstance(value, torch.Tensor) and value.dim() == 1
                   and len(value) in (0, length(piece.where))}
        others = {key: value for key, value in state.items()
                  if key not in moments}
        return self.spread.get(piece.param, Spread(moments, others))

    def options(self) -> OptimizerEntry | None:
        """
        ### The optimizer's entry for the manifest: class, param groups and loss scale
        """
        if self.optimizer is None:
            return None
        return {
            "class": self.optimizer_class,
            "groups": [encode({"optimizer": type(stepper).__name__, **{
                k: v for k, v in group.items() if k not in NOT_SAVED}}, "param group")
                for stepper, group in zip(self.steppers, self.param_groups, strict=True)],
            "scale": (self.optimizer.scale_state()
                      if isinstance(self.optimizer, Zero3Optimizer) else {}),
        }

    def manifest(self, described: list[FlatEntry]) -> Manifest:
        """
        ### Merge the descriptions of all ranks (all-gather; all ranks must call it)
        """
        merged: dict[tuple[int, int], FlatEntry] = {}
        replicated: dict[str, int] = {}
        for place, flats, names in self.comm.gather((self.place, described, [*self.replicated])):
            replicated |= dict.fromkeys(names, place)
            # The ranks at a place describe the same flat parameters, and different pieces of them.
            for i, flat in enumerate(flats):
                first = merged.setdefault((place, i), {**flat, "states": []})
                first["keys"] |= flat["keys"]
                first["states"] += flat["states"]
        for flat in merged.values():
            flat["states"] = _merge_states(flat["states"])
        return {
            "world_size": self.comm.world_size,
            "places": self.comm.stages.size,
            "flats": [merged[at] for at in sorted(merged)],
            "replicated": replicated,
            "versions": {"zero3": __version__, "torch": torch.__version__},
        }

    def entries(self, manifest: Manifest) -> list[Entry]:
        """
        ### The tensors of this rank's file, in the file's order

        Larger elements come first (see `Writer`). Among elements of one size, shards in files come
        first, because an asynchronous save does not copy them.
        """
        own = [(i, described["keys"])
               for i, described in enumerate(manifest["flats"])
               if described["place"] == self.place]
        found = [
            Entry(f"{i}.{key}",
                  TYPES[dtype],
                  (len(flat.parameter.shard),),
                  not flat.in_file,
                  flat,
                  key)
            for (i, keys), flat in zip(own, self.flats, strict=True)
            for key, dtype in keys.items()]
        found += [
            Entry(f"replicated.{name}",
                  tensor.dtype,
                  tuple(tensor.shape),
                  in_memory=True,
                  flat=None,
                  key=name)
            for name, tensor in self.replicated.items()]
        return sorted(found, key=lambda entry: (-entry.dtype.itemsize, entry.in_memory))

    def tensors(self, entries: list[Entry]) -> Iterator[torch.Tensor]:
        """
        ### The values of these entries; each is valid until the next one is requested
        """
        for flat, run in groupby(entries, key=lambda entry: entry.flat):
            if flat is None:
                yield from (self.replicated[entry.key] for entry in run)
            else:
                with self.here(flat) as here:
                    for entry in run:
                        yield from (values for _, values in
                                    self.values(flat, entry.key, entry.dtype, here))

    def values(self, flat: Flat,
               key: str,
               dtype: torch.dtype,
               here: list[Here]) -> list[tuple[slice, torch.Tensor]]:
        """
        ### The masters of a shard, or one of its moments: ranges of the shard with their values

        * `here` is what `here()` yields

        A moment is zero in a piece that does not have it: by its options, or before its first step.
        """
        if key == "param":
            return [(each.where, each.master) for each in here]
        zero = torch.zeros((), dtype=dtype, device="cpu")
        return [(piece.where, self.state_of(piece).moments.get(
                    key, zero.expand(length(piece.where))))
                for piece in flat.pieces]

    def here(self, flat: Flat, write: bool = False) -> AbstractContextManager[list[Here]]:
        """
        ### Load a shard's master and moments into memory; or the shard, if it has no master

        * `write` stores the changed values again afterwards
        """
        return (flat.owned.in_memory(self.state, write=write) if flat.owned
                else _in_memory(flat.parameter.storage, write))

    # -------------------------------------------------------------------------------------- check

    def tensor_names(self) -> Names:
        """
        ### The names of all tensors of the model (all-gather in a pipeline; all ranks must call it)
        """
        mine: Names = [*((own.names, own.group) for own in self.params),
                       *(([name], None) for name in self.replicated)]
        return [each for theirs in self.comm.stages.gather(mine) for each in theirs]

    def check(self, checkpoint: CheckpointReader, everywhere: Names) -> dict[int, int]:
        """
        ### Find every tensor in a checkpoint, and make sure that the optimizer can go on

        * `everywhere` is the result of `tensor_names`

        Sets `found` of each parameter. Returns this optimizer's param group for each of the
        checkpoint's. Raises `Broken` if the checkpoint does not fit.
        """
        for own in self.params:
            found = checkpoint.find(own.names)
            shape = own.part.shape if own.part else tuple(own.slot.view.shape)
            if found is None or found.shape != shape:
                there = f"of {found.shape}" if found else "missing"
                raise Broken(f"`{own.names[0]}` is {there} in the checkpoint, of {shape} here")
            own.found = found
        groups = _match_groups(checkpoint, everywhere)
        if self.optimizer is not None:
            self._check_optimizer(checkpoint.manifest["optimizer"], groups)
        self._match_replicated(checkpoint, everywhere)
        return groups

    def _match_replicated(self, checkpoint: CheckpointReader, everywhere: Names) -> None:
        """
        #### Find the tensors that every rank has whole

        Raises `Broken` if one of them is missing, or if the checkpoint has one more.
        """
        # A checkpoint that was converted from another format has buffers among its parameters, and
        # may have a tied parameter once under each of its names.
        there = {*checkpoint.manifest["replicated"],
                 *(each.name for each in checkpoint.params)}
        # For `take`.
        self.found = {name: t for name, t in self.replicated.items()
                      if name in there}
        # Only the names of all stages tell whether the checkpoint has one more.
        here = {name for names, _ in everywhere for name in names}
        # A tensor with several names needs only one of them.
        found_ids = {id(t) for t in self.found.values()}
        missing = {name for name, t in self.replicated.items() if id(t) not in found_ids}
        for names, has, lacks in ((there - here, "the checkpoint", "this model"),
                                  (missing, "this model", "the checkpoint")):
            some = ", ".join(f"`{name}`" for name in sorted(names)[:5])
            Broken.unless(not names, f"{some}, {len(names)} in all, in {has} and not in {lacks}")

    def _check_optimizer(self, saved: OptimizerEntry | None, groups: dict[int, int]) -> None:
        """
        #### Make sure that the optimizer can go on with the saved options and states

        * `saved` is the manifest's entry for the optimizer, if there was one

        An error inside `take` would leave the model half loaded.
        """
        if saved:
            self._check_options(saved, groups)
        first_state_of = cache(self._first_state)
        for own in self.params:
            # A parameter without elements, or that no step has used, has no state.
            if (own.group is not None
                    and own.slot.view.numel()
                    and any(own.found.states.values())):
                _check_states(own, first_state_of(own.group, own.slot.view.dim()))
        for flat in self.flats:
            if not flat.owned:
                # One of torch's optimizers has a single state for the shard.
                shared = [flat.params[i].found.states for piece in flat.pieces
                          for i in piece.positions]
                Broken.unless(all(states == shared[0] for states in shared),
                              f"the parameters from `{flat.params[0].names[0]}` on share a shard "
                              "here, and have different optimizer states, different numbers of "
                              "steps for instance")

    def _check_options(self, saved: OptimizerEntry, groups: dict[int, int]) -> None:
        """
        #### Make sure that the saved options and loss scale are of the right kind
        """
        for theirs, mine in groups.items():
            here = self.param_groups[mine]
            steps = type(self.steppers[mine]).__name__
            options = decode(saved["groups"][theirs])
            # Not every format has the class.
            there = options.pop("optimizer", saved["class"]) or steps
            Broken.unless(there == steps or {there, steps} == {"Adam", "AdamW"},
                          f"param group {theirs} is stepped by {there} there, and by {steps} here; "
                          "leave the optimizer out to load the weights alone")
            for key, value in options.items():
                # A scheduler adds options such as `initial_lr`, which this group may not have yet.
                like = here.get(key, here.get("lr") if key.endswith("lr") else None)
                fits = _kind(value) == _kind(like) if like is not None else type(value) is not dict
                Broken.unless(key not in NOT_SAVED and fits, f"param group {theirs} has a `{key}` "
                              f"of {value!r:.60} there, and of {like!r:.60} here")
        for key, value in saved["scale"].items():
            counts = key in SCALE_STATE and type(value) is int and value >= 0
            scales = (isinstance(value, (int, float)) and value is not True
                      and 0 < value < math.inf)
            Broken.unless(scales if key == "loss_scale" else counts,
                          f"the optimizer's `{key}` is {value!r:.60} there")

    def _first_state(self, index: int, dims: int) -> dict[str, object]:
        """
        #### The state that this optimizer keeps of a parameter in a param group

        * `dims` is the number of its dimensions, for a param group that is stepped whole

        Nothing, if the class cannot be made with the options of the group.
        """
        whole = index in self.inner
        made_by: tuple[Any, dict] = (type(self.inner[index]), {}) if whole else getattr(
            self.optimizer,
            "made_by",
            (type(self.optimizer), {}))
        two = torch.zeros((2,) * (dims if whole else 1),
                          device=getattr(self.optimizer, "device", self.device))
        try:
            return first_state(*made_by, self.param_groups[index], two)
        except (TypeError, ValueError):
            return {}

    # --------------------------------------------------------------------------------------- load

    def shard(self, checkpoint: CheckpointReader,
              flat: Flat,
              key: str,
              where: slice) -> torch.Tensor:
        """
        ### Read this rank's shard, or one of its moments, from a checkpoint

        * `where` is a range of the shard

        Returns `(where.stop - where.start,)`. The padding is zero (invariant I5), and so are
        moments that a parameter does not have. All ranks get the widest data type of the
        parameters, also one that has nothing but padding.
        """
        shard = flat.parameter.shard
        first = self.comm.rank * len(shard) + where.start
        last = self.comm.rank * len(shard) + where.stop
        having = [own for own in flat.params
                  if key in ("param", *own.found.states["moments"])]
        dtypes = [checkpoint.dtype(own.found, key) for own in having] or [shard.dtype]
        values = torch.zeros(
            last - first, dtype=reduce(torch.promote_types, dtypes), device="cpu")
        for own in having:
            # Where the parameter begins in the range; negative if that is before the range.
            at = own.slot.offset - first
            begin = max(-at, 0)
            end = min(own.slot.end, last) - own.slot.offset
            if begin < end:
                read = partial(checkpoint.read, own.found, key)
                values[at + begin : at + end] = (
                    own.part.read(begin, end, read) if own.part else read(begin, end))
        return values

    @torch.no_grad()
    def take(self, checkpoint: CheckpointReader, groups: dict[int, int]) -> None:
        """
        ### Load all values of a checkpoint into the model and the optimizer
        """
        for flat in self.flats:
            # Its full parameters have the old values.
            flat.layer.reshard()
            if flat.owned:
                # Cut the shard between parameters that have different states in the checkpoint.
                flat.owned.repartition([own.found.states for own in flat.params], self.state)
                flat.pieces = flat.owned.pieces
            with self.here(flat, write=True) as here:
                for where, master, _ in here:
                    master.copy_(self.shard(checkpoint, flat, "param", where))
                self._take_states(checkpoint, flat)
        if isinstance(self.optimizer, Zero3Optimizer):
            self.optimizer.regroup(self.optimizer.pieces)
            self._take_wholes(checkpoint, self.optimizer.owners)
        for name, tensor in self.found.items():
            tensor.copy_(checkpoint.replicated(self.comm.rank, name))
        if self.optimizer is not None:
            # The gradients belong to the old weights.
            self.optimizer.zero_grad()
            if saved := checkpoint.manifest["optimizer"]:
                self._take_options(saved, groups)

    def _take_states(self, checkpoint: CheckpointReader, flat: Flat) -> None:
        """
        #### Load the optimizer states of a shard, except those of parameters stepped whole
        """
        for index, where, param, positions in flat.pieces:
            if index in self.inner or not positions:
                continue
            # All parameters of a piece have the same state.
            own = flat.params[positions[0]]
            new = _read_states(checkpoint, own.found, flat.dtype,
                               partial(self.shard, checkpoint, flat, where=where))
            # The old state may have other keys.
            self.state.pop(param, None)
            if new:
                group = self.param_groups[index]
                # torch's fused and capturable steps have their counters on the device, too.
                all_there = group.get("fused") or group.get("capturable")
                self.state[param] = {
                    key: value.to(param.device)
                    if isinstance(value, torch.Tensor) and (all_there or value.dim()) else value
                    for key, value in new.items()}

    def _take_wholes(self, checkpoint: CheckpointReader, owners: Owners) -> None:
        """
        #### Load the states of the parameters that this rank owns
        """
        found_at = {own.slot: own.found for own in self.params}
        for whole in owners.own:
            found = found_at[whole.slot]
            owners.put_state(whole, _read_states(
                checkpoint, found, owners.wholes[whole].master_dtype,
                partial(checkpoint.read_whole, found)))

    def _take_options(self, saved: OptimizerEntry, groups: dict[int, int]) -> None:
        """
        #### Load the options of the param groups, such as the learning rate, and the loss scale
        """
        for theirs, mine in groups.items():
            group = self.param_groups[mine]
            options = decode(saved["groups"][theirs])
            options.pop("optimizer", None)
            if isinstance(self.steppers[mine], torch.optim.AdamW):
                # The options of an Adam say False, and would make it one. torch's also keeps this.
                options.pop("decoupled_weight_decay", None)
            for key, value in options.items():
                old = group.get(key)
                if isinstance(old, torch.Tensor):
                    old.copy_(torch.as_tensor(value, device="cpu"))
                else:
                    # A learning rate may be a tensor there, and a number here.
                    is_number = isinstance(value, torch.Tensor) and old is not None
                    group[key] = value.tolist() if is_number else value
        if isinstance(self.optimizer, Zero3Optimizer):
            self.optimizer.load_scale_state(saved["scale"])


@contextmanager
def _in_memory(storage: Storage, write: bool) -> Iterator[list[Here]]:
    """
    #### Load a shard into memory

    The arguments are those of `Entries.here`.
    """
    try:
        values = storage.load()
        yield [Here(slice(0, len(values)), values, None)]
        if write:
            storage.save()
    finally:
        storage.release()


def _match_groups(checkpoint: CheckpointReader, everywhere: Names) -> dict[int, int]:
    """
    #### This optimizer's param group for each of the checkpoint's, by the parameters in them
    """
    groups: dict[int, int] = {}
    for names, mine in everywhere:
        param = checkpoint.find(names)
        theirs = param.entry["param_group"] if param else None
        if theirs is not None and mine is not None:
            # The groups have to correspond one to one, in any order.
            groups.setdefault(theirs, mine)
            Broken.unless(groups[theirs] == mine and [*groups.values()].count(mine) == 1,
                          f"the param group of `{names[0]}` has other parameters here than in the "
                          "checkpoint")
    return groups


def _read_states(checkpoint: CheckpointReader,
                 found: Param,
                 dtype: torch.dtype,
                 read: Callable[[str], torch.Tensor]) -> dict[str, object]:
    """
    #### Read the state of a parameter, or of a piece

    * `dtype` is the master's data type here
    * `read(key)` reads a moment
    """
    new: dict[str, object] = decode(found.states["scalars"])
    for key in sorted(found.states["moments"]):
        moment = read(key)
        # A moment that was saved in the master's data type gets this master's.
        same = moment.dtype == checkpoint.dtype(found, "param")
        new[key] = moment.to(dtype) if same else moment
    return new


def _check_states(own: Own, needed: dict[str, object]) -> None:
    """
    #### Compare the saved states of a parameter with those that the optimizer needs

    * `needed` is the result of `_first_state`
    """
    scalars = decode(own.found.states["scalars"])
    for key, like in needed.items():
        value = scalars.get(key)
        # A tensor of another shape than its parameter is no moment: it is among the scalars.
        is_moment = isinstance(like, torch.Tensor) and like.shape == (2,)
        fits = not is_moment and type(value) is type(like) and _kind(value) == _kind(like)
        Broken.unless(fits or key in own.found.states["moments"],
                      f"`{own.names[0]}` has a `{key}` of {value!r:.60} there, and this optimizer "
                      f"needs one like {like!r:.60}")


def _kind(value: object) -> object:
    """
    #### The kind of an option or of a state: equal for values that can replace each other

    Any number may replace another one, if it is finite and fits into 64 bits. Of tensors with
    several elements, each may replace another one.
    """
    if isinstance(value, torch.Tensor) and not value.dim():
        value = value.item()
    if isinstance(value, (list, tuple)):
        return [_kind(each) for each in value]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float if abs(value) < 1 << 63 else value
    return type(value)


def _merge_states(states: list[StatesEntry]) -> list[StatesEntry]:
    """
    #### The optimizer states of a flat parameter, each of them once

    They differ if some parameters of a param group were used in other steps than the rest.
    """
    by_param = {i: entry
                for entry in states for i in entry["params"] or ()}
    found: dict[str, Any] = {}
    for i in sorted(by_param):
        entry = {**by_param[i], "params": None}
        found.setdefault(json.dumps(entry), {**entry, "params": []})["params"].append(i)
    return [*found.values()]

r"""
# Whole models

`wrap` shards a model as it is: each of its layers becomes a unit, and the model is called as
before.

You name the classes of the layers. The rest, the *root*, becomes one more unit around all of them:
embeddings, a last norm, a head. Take a GPT with 100 parameters outside its three blocks of 60 each,
on two ranks:

| unit | parameters | at rest, on each rank | full |
|---|---|---|---|
| the root | 100 | 50 | through forward and backward |
| each block | 60 | 30 | while it or the block before it computes |
| together | 280 | 140 | at most 100 + 60 + 60 |

$$\underbrace{P_{\text{root}}}_{\text{forward and backward}} + \;
\underbrace{P_\ell + \text{prefetched}}_{\text{one after the other}}
\;\ge\; \text{full elements at any moment}$$

If units use each other's parameters, or are inside each other, $P_\ell$ counts all of them.
Persistent units come on top.

A parameter with two names has one owner: the root if it has it, and otherwise the first unit that
does. For the other units it is an external parameter.

**Run this**: `python -m zero3.whole_model`.

**Not covered, and what that costs**: ranks must reach the same units in the same order, so
everything that depends on a rank's data belongs inside one unit, by `leaf_classes`. A unit persists
as a whole: one small parameter in it would save no message. `predict` covers chains only. Of the
model's methods, `forward` and `generate` gather what they need. Add trainable layers to the plain
model, before `wrap` or after `destroy`; otherwise the next forward raises an error. `isinstance`
says what a unit's module is, but not what the whole model is: ask `model.module`.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero3.comm.links import Links
from zero3.comm.order import Group
from zero3.comm.reducer import Reducer
from zero3.estimate.ledger import Ledger
from zero3.flat import own_modules
from zero3.guards.checks import MOST, expect, whole
from zero3.guards.contents import Known, stray, uncompiled
from zero3.guards.placement import check_fresh
from zero3.layer import Zero3Layer
from zero3.offload.activations import Activations
from zero3.offload.tiers import Offload
from zero3.optimizer.steps import after_steps
from zero3.sharded import Sharded, ShardedModel, communicator
from zero3.watch import tensors_in
from zero3.whole_model.materialise import Source, save
from zero3.whole_model.units import (
    LayerPlace,
    StandIn,
    Together,
    TracedOrder,
    Unit,
    neighbours,
)

Classes = type | Iterable[type]


class Zero3Model(StandIn, ShardedModel):
    """
    ## A whole model, sharded unit by unit
    """

    unit_class = Unit
    is_chain = False  # whether leaves are layers like others

    def __init__(self, model: nn.Module,
                 layer_classes: tuple[type, ...],
                 leaf_classes: tuple[type, ...],
                 source: Source,
                 prefetch_numel: int | None,
                 max_live_numel: int | None,
                 persist_below_numel: int,
                 unit_bytes: int,
                 offload: Offload,
                 mesh: DeviceMesh | Links | None,
                 activations: Activations | Offload | str | None):
        super().__init__()
        self.comm = communicator(mesh=mesh)
        self.order = TracedOrder()
        self.unit_bytes = unit_bytes
        self.order.max_live_numel = max_live_numel
        shard = partial(self.unit_class, order=self.order, device=source.device, offload=offload,
                        mesh=mesh, activations=activations)
        # The names of the parameters that each plain module has.
        self.layout = {m: [*m._parameters] for m in model.modules()}
        wrapping = _Wrapping(self, model, source, shard)
        self.units: list[Unit] = wrapping.units_of(layer_classes, leaf_classes)
        # Units that stand for no module. Here the model finds their shards.
        self.beside = nn.ModuleList(
            unit for unit in self.units if isinstance(unit.module, Together))
        # The parameters that have several names, by each of them.
        self.tied: dict[str, Any] = {name: wrapping.made.get(t, t)
                                     for t, names in wrapping.names.items()
                                     if len(names) > 1 and isinstance(t, nn.Parameter)
                                     for name in names}
        self.module = self.units[0]
        self.training = model.training
        self.beside.train(model.training)
        self.missed: list[str] = []  # units that have a gradient and no optimizer
        self._number_units()
        self._limit_live(max_live_numel, prefetch_numel)
        self.mark_persistent_parameters(persist_below_numel)
        self._count_steps()
        self._take(self.units)
        self.known = Known([self])

    def _number_units(self) -> None:
        """
        #### Give each unit its number, its neighbours in the tree, and the model's communicator
        """
        reducer = Reducer(self.comm)
        for i, unit in enumerate(self.units):
            unit.layer_idx = i
            unit.label = f"layer {i} ({unit.title})"
            unit.comm = self.comm
            unit.reducer = reducer
            self.comm.labels[i] = unit.label
            unit.inside = [m
                           for m in unit.module.modules() if isinstance(m, Unit)]
            for other in unit.inside:
                other.outside.append(unit)

    def _limit_live(self, max_live_numel: int | None, prefetch_numel: int | None) -> None:
        """
        #### Set how many elements may be full, and how many are prefetched
        """
        largest_numel = max(unit.numel for unit in self.units[1:])
        least_numel = self.units[0].numel + largest_numel
        self.expect(max_live_numel is None or max_live_numel >= least_numel, "cannot be this "
                    "small", f"`max_live_numel` of at least {least_numel:,}, the rest and the "
                    "largest unit", max_live_numel, "raise it, or wrap smaller layers")
        self.order.prefetch_numel = largest_numel if prefetch_numel is None else prefetch_numel

    def _count_steps(self) -> None:
        """
        #### Count the steps of optimizers that have shards of this model
        """
        shards = {id(shard) for shard in self.get_trainable_chunk()}
        # Those that no optimizer has stepped yet.
        missed = set(shards)

        def count(model: Zero3Model, optimizer: Any) -> None:
            stepped = {id(p) for group in optimizer.param_groups
                       for p in group["params"]}
            stepped |= {id(states.shard)
                        for states in getattr(optimizer, "shard_states", ())}
            if not shards.isdisjoint(stepped):
                model.order.steps += 1
                missed.difference_update(stepped)
                # Those with a gradient, for `check`.
                model.missed = [unit.title for unit in model.units if missed
                                for shard in unit.get_trainable_chunk()
                                if id(shard) in missed and shard.grad is not None]

        after_steps[self] = count

    def _unit(self) -> Any:
        """
        #### The root, which has the plain model
        """
        return nn.Module.__getattr__(self, "module")

    # ----------------------------------------------------------------------------------- settings

    def mark_persistent_parameters(self, below_numel: int) -> int:
        """
        ### Have small units stay full from one step to the next

        * `below_numel`: units with fewer elements than this persist

        All ranks call it alike, between two steps. Returns the elements that will stay. Suspends I2
        for them. Raises `ValueError` if it is no whole number.
        """
        expect(whole(below_numel), "mark_persistent_parameters: `below_numel`", "a whole number of "
               "elements", repr(below_numel), "pass such a number")
        self.release_all()
        for unit in self.units:
            unit.persistent = 0 < unit.numel < below_numel
        return sum(unit.numel for unit in self.units if unit.persistent)

    def register_external_parameter(self, module: nn.Module, param: nn.Parameter) -> None:
        """
        ### Say that a module uses a parameter of another unit

        Usually the first use is noticed. Call this if not all ranks use the parameter, on all ranks
        alike. Raises `RuntimeError` if either is not part of this model.
        """
        users = [unit for unit in self.units
                 for m in (unit, *dict(own_modules(unit.module)).values()) if m is module]
        owners = [unit for unit in self.units
                  for slot in unit.slots() if slot.param is param]
        self.expect(bool(users and owners), "cannot register this", "a module and a parameter of "
                    "this model", f"{type(module).__name__} and {type(param).__name__}",
                    "take them from the wrapped model")
        if owners[0] is not users[0] and owners[0] not in users[0].externals:
            users[0].externals.append(owners[0])

    # ----------------------------------------------------------------------------------------- use

    @property
    def forward(self) -> Callable:  # type: ignore[override]
        """
        ### Forward pass of the model
        """
        self.expect("module" in self._modules, "was destroyed", "a use before that", "one after",
                    "call what `destroy` returned")
        return update_wrapper(partial(self._forward),
                              self.module.module.forward)

    @uncompiled
    def _forward(self, *args, **kwargs):
        """
        #### Forward pass of the root unit
        """
        self.check()
        return self.module(*args, **kwargs)

    def check(self) -> None:
        """
        ### Refuse what cannot be trained, before a forward pass
        """
        if self.known.has_changed():
            # The plain model does not see layers that were added to this object: nobody would
            # reduce the gradients of `model.add_module("extra", nn.Linear(8, 2))`.
            extra = stray(self)
            self.expect(not extra, "has new parameters", "those that it was wrapped with", extra,
                        Unit.cure_for_new)
        # Shared units have no forward that would look.
        for unit in (self.module, *self.beside):
            unit.guard.check()
        # Checked here and not in the step, because another optimizer may step them next.
        missed = self.missed
        self.missed = []
        self.expect(not missed, "is trained in part", "an optimizer for each unit with a "
                    "gradient", f"none that has ever stepped {missed}", "build the optimizer "
                    "on `model.parameters()` of what `wrap` returned, because the plain model has "
                    "lost those outside the layers; or freeze what shall not train, "
                    "`unit.requires_grad_(False)`")

    def named_layers(self) -> Iterator[tuple[str, Sharded]]:
        """
        ### The units, each with the prefix of its parameters' names in the plain model
        """
        for unit in self.units:
            yield unit.full_name(""), unit

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """
        ### The full parameters of all units at once, under all their names in the plain model
        """
        with super().full_params(writeback) as params:
            params |= self.tied
            yield params

    def save(self, folder: str | Path) -> None:
        """
        ### Write the weights as safetensors, one unit at a time: see `materialise.save`
        """
        self.expect(not self.comm.stages.same_layers, "cannot be saved like this", "whole weights",
                    "parts of them, split over ranks", "call `zero3.save`, and convert the "
                    "checkpoint; or `restore(model.destroy())`")
        save(self.units, Path(folder))

    @torch.no_grad()
    def generate(self, *args, **kwargs) -> Any:
        """
        ### Continue sequences of tokens, all ranks in step

        Calls the model's own `generate` if it has one, and `continue_tokens` otherwise. All ranks
        call it, each with sequences of its own, and go on until all are done (all-reduce of a
        number after each token).
        """
        root = self.module
        plain = root.module
        self.check()
        # Every token needs the root, and a model may ask it for its device.
        arrive = plain.register_forward_pre_hook(lambda *_: self.order.arrive(root))
        with root.full_params(), root.guard, arrive:
            self.order.stack.append(root)
            try:
                if hasattr(plain, "generate"):
                    every = dist.get_world_size() if dist.is_initialized() else 1
                    self.expect(len(self.comm.ranks) in (1, every), "cannot generate",
                                f"all {every} ranks, which its own `generate` waits for",
                                f"ranks {[*self.comm.ranks]}", "wrap it without `mesh=`, or call "
                                "`continue_tokens` on its forward")
                    return plain.generate(*args, synced_gpus=self.comm.world_size > 1, **kwargs)
                return continue_tokens(plain, *args, groups=self.comm.sharers, **kwargs)
            finally:
                self.order.stack.pop()
                root.leave()
                self.order.end_pass()

    def release_all(self) -> None:
        """
        ### Free all full parameters, those of persistent units too
        """
        self.order.trace.end()
        for unit in self.units:
            unit.reshard()

    @torch.no_grad()
    def destroy(self) -> nn.Module:
        """
        ### Give the plain module back, without units and hooks

        All ranks call it, because each unit is all-gathered, and each rank gets the whole model.
        Afterwards neither this object nor an optimizer that was built on it is of any use.
        """
        self.release_all()
        for unit in self.units:
            unit._follow_requires_grad()
            with unit.full_params():
                values = [slot.param.clone() for slot in unit.slots()]
            # The same objects as before.
            for slot, value in zip(unit.slots(), values, strict=True):
                if slot.hook:
                    slot.hook.remove()
                slot.param.__class__ = nn.Parameter
                slot.param.data = value
            for refusal in unit.guard.refusals:
                refusal.remove()
        plain = self.module.module
        for m, names in self.layout.items():
            vars(m).pop("requires_grad_", None)
            for name in names:
                m._parameters[name] = vars(m).pop(name)
            for name, child in m._modules.items():
                m._modules[name] = child.module if isinstance(child, Unit) else child
        self._modules.clear()
        self.units.clear()
        self.sharded_layers = ()
        after_steps.pop(self, None)
        return plain


def wrap(model: nn.Module, layer_classes: Classes, *,
         leaf_classes: Classes = (),
         prefetch_numel: int | None = None,
         max_live_numel: int | None = None,
         persist_below_numel: int = 0,
         unit_bytes: int = 0,
         offload: Offload | str | None = None,
         device: torch.device | str | None = None,
         seed: int = 0,
         init: Callable[[nn.Module], Any] | None = None,
         checkpoint: str | Path | None = None,
         mesh: DeviceMesh | Links | None = None,
         activations: Activations | Offload | str | None = None,
         kind: Callable[..., Zero3Model] = Zero3Model) -> Zero3Model:
    """
    ## Shard a whole model, in place

    All ranks call it alike. Call the model that this returns; the original has lost its parameters.

    * `model` has values, and all ranks get those of rank 0; or it is on the meta device, and is
      made one unit at a time
    * `layer_classes` is a class or several; layers inside other layers are units too
    * `leaf_classes` become units together with everything inside them: whatever depends on a rank's
      data, such as the experts of a mixture with their router
    * `prefetch_numel` elements are gathered ahead, or not freed because they are needed again soon;
      left out, as many as the largest unit has, but for the root
    * `max_live_numel` is how many elements of full parameters there are at once, at most, but for
      `full_params` and `save`; left out, any number
    * `persist_below_numel`: as for `mark_persistent_parameters`
    * `unit_bytes` of layers that follow each other share a unit, at most: see `Together`
    * `offload`, `mesh` and `activations` are as for `Zero3Layer`
    * `device` is where the model is made; left out, where it is, or the CPU
    * `seed`, `init` and `checkpoint` are as for `Source`
    * `kind` is the class of the result; `zero3.compile` passes another one

    Raises `TypeError` or `ValueError` for an impossible argument, before anything changes. Raises
    `RuntimeError` if there is nothing to wrap, a unit has no values or the limit is too low,
    perhaps only in the first pass, and as `Zero3Layer` does. ZeRO-Infinity, sections 6.2, 7.1 and
    7.2. Keeps I1 to I8, but I2 not for persistent units; I3 and I4 are as the formula and the table
    in `units.py` say.
    """
    expect(isinstance(model, nn.Module), "wrap", "a model", repr(model),
           "pass the model itself, and not its class", TypeError)
    expect(init is None or callable(init), "wrap: `init`", "a function of a module", repr(init),
           "pass one, or leave it out", TypeError)
    for name, value, least in (
            ("prefetch_numel", prefetch_numel, 0),
            ("max_live_numel", max_live_numel, 1),
            ("persist_below_numel", persist_below_numel, 0),
            ("unit_bytes", unit_bytes, 0),
            ("seed", seed, -MOST)):
        left_out = value is None and name in ("prefetch_numel", "max_live_numel")
        expect(left_out or whole(value, least), f"wrap: `{name}`",
               f"a whole number of at least {least}", repr(value), "pass such a number")
    at = next((p.device for p in model.parameters() if not p.is_meta),
              "cpu")
    source = Source(torch.device(device or at), seed, init, checkpoint,
                    getattr(model, "_init_weights", None))
    wrapped = kind(model, classes_of(layer_classes), classes_of(leaf_classes), source,
                   prefetch_numel, max_live_numel, persist_below_numel, unit_bytes,
                   Offload.of(offload), mesh, activations and Activations.of(activations))
    # From now on, attributes that are not its own are set on the plain model.
    wrapped.order.units = wrapped.units
    return wrapped


class _Wrapping:
    """
    ## How the layers of a model become units, each in the place where it stands
    """

    def __init__(self, owner: Zero3Model, model: nn.Module, source: Source,
                 shard: Callable[[nn.Module, str, bool], Unit]):
        """
        ### Choose a model

        * `shard(module, path, leaf)` makes a unit
        """
        self.owner = owner
        self.model = model
        self.source = source
        self.shard = shard
        self.names: dict[torch.Tensor, list[str]] = {}
        for name, t in (*model.named_parameters(remove_duplicate=False),
                        *model.named_buffers(remove_duplicate=False)):
            self.names.setdefault(t, []).append(name)
        # The unit that has a parameter; `None` stands for the root, which is made last. And the
        # parameter that replaced one on the meta device.
        self.owners: dict[torch.Tensor, Any] = {}
        self.made: dict[torch.Tensor, torch.Tensor] = {}
        # Parameters that a unit uses and does not have: which, the unit, its module, the name.
        self.tied: list[tuple[torch.Tensor, Unit, nn.Module, str]] = []

    def units_of(self, layers: tuple[type, ...], leaves: tuple[type, ...]) -> list[Unit]:
        """
        ### Make the units, and return them with the root first
        """
        places = [*_places(self.model, "", layers, leaves)]
        kind = type(self.model).__name__
        for m in self.model.modules():
            self.owner.expect(not isinstance(m, Zero3Layer), "is sharded already", "a plain model",
                              kind, "`destroy()` it first")
        self.owner.expect(bool(places), "has nothing to wrap", f"modules of {(*layers, *leaves)}",
                          f"none inside of {kind}", "pass the classes of its layers")
        # Once a layer is a unit, its parameters have other memory.
        check_fresh(self.owner, self.model)
        # The root owns whatever is outside all layers.
        inside = {m for place in places for m in place.layer.modules()}
        self.owners = {p: None
                       for m in self.model.modules() if m not in inside
                       for p in m._parameters.values() if p is not None}
        together = self._units_together(places)
        units: dict[nn.Module, Unit] = {}
        for place in places:
            if place.layer not in units:
                units[place.layer] = self._unit(place.layer, place.path, place.is_leaf)
            place.parent._modules[place.name] = units[place.layer]
        # The root keeps its own.
        self.owners = {p: unit for p, unit in self.owners.items()
                       if unit is not None}
        root = self._unit(self.model, "", leaf=False)
        for tied, user, module, name in self.tied:
            vars(module)[name] = self.made.get(tied, tied)
            user.externals.append(self.owners[tied])
            # In its forward its modules' `parameters()` yield these, too.
            user.guard.hidden.append((module, {name: vars(module)[name]}))
        return [root, *together, *units.values()]

    def _units_together(self, places: list[LayerPlace]) -> list[Unit]:
        """
        #### Make the units that have the parameters of several layers
        """
        if not self.owner.unit_bytes or self.owner.comm.world_size == 1:
            return []
        layers = {place.layer for place in places}
        tied = {t for t, names in self.names.items() if len(names) > 1}
        # Layers without units inside of them, whose tensors have one name each.
        may_share = [place for place in places
                     if (self.owner.is_chain or not place.is_leaf)
                     and tied.isdisjoint(place.layer.parameters())
                     and layers.intersection(place.layer.modules()) == {place.layer}]
        rest_numel = sum(p.numel() for p in self.owners)
        # There has to be room for two of them.
        most_numel = ((self.owner.order.max_live_numel or MOST) - rest_numel) / 2
        return [self._unit(Together(shared), "", leaf=False)
                for shared in neighbours(may_share, self.owner.unit_bytes, most_numel)]

    def _unit(self, layer: nn.Module, path: str, leaf: bool) -> Unit:
        """
        #### Make the unit of one layer, or of the root
        """
        modules: dict[str, Any] = {
            f"{path}.{at}".strip("."): m for at, m in own_modules(layer)}
        ties = self._untie(modules)
        made = self.source.fill(self.owner, modules, path, self.names)
        for _, m, name in ties:
            del vars(m)[name]
        unit = self.shard(layer, path, leaf)
        if unit.flats:
            # The streams of a communicator are those of its parameters' device.
            self.owner.comm = unit.comm
        self.made |= made
        self.owners |= dict.fromkeys(
            [*made, *(slot.param for slot in unit.slots())], unit)
        self.tied += [(param, unit, m, name)
                      for param, m, name in ties]
        return unit

    def _untie(self, modules: dict[str, Any]) -> list[tuple]:
        """
        #### Take parameters of other units out of a unit's modules, and say which and where
        """
        ties = []
        for m in modules.values():
            # A module that is in two units has them as plain attributes by now.
            for name, p in [*vars(m).items(), *m._parameters.items()]:
                if isinstance(p, nn.Parameter) and p in self.owners:
                    ties.append((p, m, name))
                    m._parameters.pop(name, None)
                    # For a module that draws its values, and would draw these too.
                    vars(m)[name] = torch.empty(
                        p.shape, dtype=p.dtype, device=self.source.device)
        return ties


def continue_tokens(model: nn.Module, ids: torch.Tensor, max_new_tokens: int = 20, *,
                    eos_token_id: int | None = None,
                    groups: Iterable[Group] = ()) -> torch.Tensor:
    """
    ## Continue sequences of tokens, each by the likeliest next token

    * `model` returns logits, `(batch, length, vocabulary)`, first
    * `ids` are `(batch, length)`, of this rank
    * `eos_token_id` ends a sequence, and pads it
    * `groups` have the ranks that go on until all of them are done, and all of these must call it;
      left out, this one alone

    Returns `(batch, length + n)`, where n is at most `max_new_tokens`.
    """
    done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        # (batch, length, vocabulary) to (batch,)
        token = next(tensors_in(model(ids)))[:, -1].argmax(-1)
        if not done.all():
            if eos_token_id is not None:
                token = token.where(~done, eos_token_id)
                done = done | (token == eos_token_id)
            ids = torch.cat([ids, token[:, None]], dim=1)
        # The others need the shards of a rank that is done.
        left = (~done).any().int()
        for group in groups:
            if group.size > 1:
                group.together("its state", dist.all_reduce, left, dist.ReduceOp.MAX)
        if not left:
            break
    return ids


def _places(module: nn.Module,
            path: str,
            layers: tuple[type, ...],
            leaves: tuple[type, ...]) -> Iterator[LayerPlace]:
    """
    #### Where units will stand
    """
    for name, child in module._modules.items():
        if child is not None:
            at = f"{path}.{name}" if path else name
            if not isinstance(child, leaves):
                yield from _places(child, at, layers, leaves)
            if isinstance(child, (*layers, *leaves)):
                yield LayerPlace(module, name, child, at, isinstance(child, leaves))


# One class or several, as a tuple.
def classes_of(classes: Classes) -> tuple[type, ...]:
    several = isinstance(classes, Iterable) and not isinstance(classes, type)
    found: Any = tuple(classes) if several else (classes,)  # type: ignore[arg-type]
    for kind in found:
        expect(isinstance(kind, type), "wrap", "classes of modules", f"a {type(kind).__name__}",
               "pass `type(layer)`, or several in a tuple", TypeError)
    return found


def main() -> None:
    """
    ## Two steps of a small model, as they happen
    """
    block = partial(nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.0, batch_first=True)
    plain = nn.Sequential(
        nn.Embedding(9, 16),
        block(),
        block(),
        block(),
        nn.Linear(16, 9))
    model = wrap(plain, nn.TransformerEncoderLayer)
    for step in (1, 2):
        with Ledger(model) as tape:
            model(torch.arange(9)[None]).mean().backward()
        for phase in ("forward", "backward"):
            events = [f"{e.event} {e.layer.split()[1]}" for e in tape.events if e.phase == phase
                    and e.event in ("fetch", "compute", "reduce")]
            print(f"step {step}, {phase}: {', '.join(events)}")

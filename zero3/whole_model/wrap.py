r"""
# Whole models: wrap them where they stand

`wrap` turns the layers of any model into units, which are sharded, fetched and freed by themselves;
the model is called as before.

In `Zero3Sequential` a model is a chain that was built for it. Here the model is whatever it is, and
its layers are named by their classes. Each becomes a `Unit` in the place where it stands, and what
is left over becomes one more, around all of them: embeddings, a last norm, a head.

$$\underbrace{P_{\text{rest}}}_{\text{forward and backward}} + \;
\underbrace{P_\ell + \text{what is fetched ahead}}_{\text{in turn}}
\;\ge\; \text{full elements at any moment}$$

Where units lie inside of one another, or use each other's parameters, $P_\ell$ is of all of those
together; what persists comes on top.

A parameter under two names, an embedding and a head for instance, has one owner, one shard and one
gradient. Inside of a unit nothing has to be done for that. Between units the owner is the root if
it has the parameter, else the first unit that does; for the others it is a parameter of somebody
else, which is fetched along with them.

| argument | DeepSpeed's name for it |
|---|---|
| `layer_classes`, `leaf_classes` | every module is one; `set_z3_leaf_modules` |
| `prefetch_numel` | `stage3_prefetch_bucket_size`, `stage3_max_reuse_distance` |
| `max_live_numel` | `stage3_max_live_parameters`; here nothing exceeds it |
| `persist_below_numel` | `stage3_param_persistence_threshold` |
| `mark_persistent_parameters` | the same, with `stage3_model_persistence_threshold` |
| `register_external_parameter` | the same |

**Run this**: `python -m zero3.whole_model` writes down what happens in two steps of a small model,
before its order is known and after; `make bench ARGS="--peers zero3 wrap"` measures `wrap` beside a
`Zero3Sequential` of the same layers.

**Not covered, and what that costs**: ranks must come to the same units in the same order, so what
depends on a rank's data belongs inside of one, by `leaf_classes`. A parameter that is smaller than
its unit saves no message by staying full: a unit is gathered as one flat parameter, and persists as
a whole. `predict` knows chains only. Of the model's methods, `forward` and `generate` fetch what
they need. Layers that train are added to the plain model, before `wrap` or after `destroy`; others
raise an error in the next forward. `isinstance` says what a unit's module is, but not what the
whole model is: ask `model.module`.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from zero3.comm import Communicator
from zero3.guards.contents import Known, uncompiled
from zero3.guards.gradients import clip_grad_norm_
from zero3.guards.options import MOST, expect, whole
from zero3.layer import Zero3Layer, _own_modules
from zero3.measure.ledger import Ledger, tensors_in
from zero3.offload import Offload
from zero3.whole_model.materialise import Deferred, Source, save
from zero3.whole_model.units import Schedule, Unit

Classes = type | Iterable[type]


class Zero3Model(nn.Module):
    """
    ## A whole model, sharded unit by unit

    `wrap` makes it. It is called like the model, and can be asked for the model's attributes.
    """

    # What the wire asks of a layer, for errors that concern no unit alone.
    expect: Any = Zero3Layer.expect
    label = "the model"

    def __init__(self, model: nn.Module, layer_classes: Classes, leaf_classes: Classes,
                 source: Source, prefetch_numel: int | None, max_live_numel: int | None,
                 persist_below_numel: int, offload: Offload | None, debug: bool):
        super().__init__()
        self.comm, self.schedule = Communicator(), Schedule(debug)
        self.tied: dict[str, Any] = {}  # parameters with several names, by these
        self.layout: dict[nn.Module, list[str]] = {}  # which parameters a plain module has
        self.units = self.schedule.units = self._wrap(model, layer_classes, leaf_classes, source,
                                                      offload)
        self.module: Any = self.units[0]
        self.training = model.training
        for i, unit in enumerate(self.units):
            # One comm: the reduces of all units follow each other, and each unit has a number.
            unit.layer_idx, unit.comm = i, self.comm
            self.comm.names[i] = unit.label = f"layer {i} ({unit.path or 'the rest'})"
            unit.inside = [m for m in unit.module.modules() if isinstance(m, Unit)]
            for other in unit.inside:
                other.outside.append(unit)
        largest_numel = max(unit.numel for unit in self.units[1:])
        least_numel = self.units[0].numel + largest_numel
        self.expect(max_live_numel is None or max_live_numel >= least_numel, "cannot be this "
                    "small", f"`max_live_numel` of at least {least_numel:,}, the rest and the "
                    "largest unit", max_live_numel, "raise it, or wrap smaller layers")
        self.schedule.max_live_numel = max_live_numel
        self.schedule.prefetch_numel = largest_numel if prefetch_numel is None else prefetch_numel
        self.mark_persistent_parameters(persist_below_numel)
        # What persists is gathered again after a step with shards of this model.
        schedule, shards = weakref.ref(self.schedule), {*map(id, self.get_trainable_chunk())}

        def count(optimizer: Any, *_) -> None:
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            stepped += [states.shard for states in getattr(optimizer, "shard_states", ())]
            if (found := schedule()) and not shards.isdisjoint(map(id, stepped)):
                found.steps += 1

        self._stop_counting = weakref.finalize(
            self, register_optimizer_step_post_hook(count).remove)
        self.known = Known([self])

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            root: Any = super().__getattr__("module")
            return root.read(name)

    def __setattr__(self, name: str, value: Any) -> None:
        # `known` is the last that `__init__` sets. From then on what the model has is the model's.
        theirs = "known" in vars(self) and name not in vars(self) and name not in self._modules
        theirs = theirs and "module" in self._modules
        if theirs and not hasattr(type(self), name) and hasattr(self.module.module, name):
            setattr(self.module.module, name, value)
        else:
            super().__setattr__(name, value)

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __contains__(self, item: Any) -> bool:
        return item in self.module

    def __bool__(self) -> bool:
        # Without this, Python would ask for the length, which most models have not.
        return True

    # ---------------------------------------------------------------------------------------- wrap

    def _wrap(self, model: nn.Module, layer_classes: Classes, leaf_classes: Classes,
              source: Source, offload: Offload | None) -> list[Unit]:
        """
        #### Put units in the places of the layers, and one around what is left over

        What is inside of others first. Returns them, the root's first.
        """
        leaves = _classes(leaf_classes)
        places = [*_places(model, "", (*_classes(layer_classes), Deferred), leaves)]
        self._check(model, (*_classes(layer_classes), *leaves), len(places))
        below = {m for _, _, layer, _ in places for m in layer.modules()}
        # A tied parameter belongs to the root, which is whole all along, or to the first who has
        # it. The others find it where they look for it, and it is fetched along with them.
        at_root = {p for m in model.modules() if m not in below for p in m._parameters.values()
                   if p is not None}
        names: dict[torch.Tensor, list[str]] = {}
        for full_name, param in model.named_parameters(remove_duplicate=False):
            names.setdefault(param, []).append(full_name)
        owners: dict[torch.Tensor, Unit] = {}  # by the parameter as it was before
        made: dict[torch.Tensor, torch.Tensor] = {}
        tied: list[tuple[torch.Tensor, Unit, nn.Module, str]] = []
        units: dict[nn.Module, Unit] = {}
        for parent, name, layer, path in [*places, (None, "", model, "")]:
            if layer not in units:
                module = source.make(self, layer, path)
                own = {f"{path}.{at}".strip("."): m for at, m in _own_modules(module)}
                for m in own.values():
                    self.layout.setdefault(m, [*m._parameters])
                ties = self._untie(own, {*owners, *(at_root if layer is not model else ())}, source)
                before = {p for m in own.values() for p in m._parameters.values() if p is not None}
                made |= source.fill(self, own, path, names)
                for _, m, key in ties:
                    del vars(m)[key]
                unit = Unit(module, self.schedule, path, isinstance(layer, leaves), source.device,
                            offload)
                units[layer] = unit
                # The streams of a wire are those of its parameters' device.
                self.comm = unit.comm if unit.flats else self.comm
                owners |= dict.fromkeys((*before, *(made.get(p, p) for p in before)), unit)
                tied += [(p, unit, m, key) for p, m, key in ties]
            if parent is not None:
                parent._modules[name] = units[layer]
        for p, user, m, key in tied:
            vars(m)[key] = made.get(p, p)
            user.externals.append(owners[p])
        self.tied = {name: made.get(p, p) for p, every in names.items() for name in every
                     if len(every) > 1}
        # The root's came last.
        return [units.pop(model), *units.values()]

    def _check(self, model: nn.Module, classes: tuple[type, ...], found: int) -> None:
        """
        #### Refuse what cannot be wrapped
        """
        plain = not any(isinstance(m, Zero3Layer) for m in model.modules())
        self.expect(plain, "is sharded already", "a plain model", type(model).__name__,
                    "`destroy()` it first")
        self.expect(found > 0, "has nothing to wrap", f"modules of {classes}",
                    f"none inside of {type(model).__name__}", "pass the classes of its layers")

    def _untie(self, own: dict[str, Any], others: set, source: Source) -> list[tuple]:
        """
        #### Take parameters of other units out of a unit's modules, and say which and where
        """
        ties = []
        for m in own.values():
            # A module that is in two units has them as plain attributes by now.
            for key, p in [*vars(m).items(), *m._parameters.items()]:
                if isinstance(p, nn.Parameter) and p in others:
                    ties.append((p, m, key))
                    m._parameters.pop(key, None)
                    # For a module that draws its values, and would draw these too.
                    vars(m)[key] = torch.empty(p.shape, dtype=p.dtype, device=source.device)
        return ties

    def mark_persistent_parameters(self, below_numel: int, model_numel: int | None = None) -> int:
        """
        ### Have small units stay full from one step to the next

        * `below_numel` is more than each of them has, in elements
        * `model_numel` is the most that all of them may have; left out, there is no limit

        Each is gathered once after a step, in place of forward and backward of each micro-batch.
        All ranks call it alike, between two steps. Returns the elements that will stay. Suspends I2
        for them. Raises `ValueError` for what is no whole number.
        """
        for name, value in (("below_numel", below_numel), ("model_numel", model_numel)):
            left_out = value is None and name == "model_numel"
            expect(left_out or whole(value), f"mark_persistent_parameters: `{name}`", "a whole "
                   "number of elements", repr(value), "pass such a number")
        self.release_all()
        left_numel = float("inf") if model_numel is None else model_numel
        for unit in self.units:
            unit.persistent = 0 < unit.numel < below_numel and unit.numel <= left_numel
            left_numel -= unit.numel * unit.persistent
        return sum(unit.numel for unit in self.units if unit.persistent)

    def register_external_parameter(self, module: nn.Module, param: nn.Parameter) -> None:
        """
        ### Say that a module uses a parameter of another unit

        Where a first use that fetches does not do: if not all ranks come to it, for instance. All
        ranks call it alike, those that do not use the parameter too.

        Raises `RuntimeError` where either is not of this model.
        """
        users = [u for u in self.units for m in (u, *dict(_own_modules(u.module)).values())
                 if m is module]
        owners = [u for u in self.units for slot in u._slots() if slot.param is param]
        self.expect(bool(users and owners), "cannot register this", "a module and a parameter of "
                    "this model", f"{type(module).__name__} and {type(param).__name__}",
                    "take them from the wrapped model")
        if owners[0] is not users[0] and owners[0] not in users[0].externals:
            users[0].externals.append(owners[0])

    @uncompiled
    def forward(self, *args, **kwargs):
        """
        ### Forward pass of the model
        """
        self.expect("module" in self._modules, "was destroyed", "a use before that", "one after",
                    "call what `destroy` returned")
        self._check_children()
        self.module.contents.check()
        return self.module(*args, **kwargs)

    def _check_children(self) -> None:
        """
        #### Notice layers that were assigned to this object, where the model does not see them
        """
        if self.known.has_changed():
            extra = [name for name, p in self.named_parameters()
                     if p.requires_grad and not name.startswith("module.")]
            self.expect(not extra, "has new parameters", "those that it was wrapped with", extra,
                        Unit.cure_for_new)

    # ----------------------------------------------------------------------------------------- use

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """
        ### This rank's trainable shards, of all units
        """
        return [shard for unit in self.units for shard in unit.get_trainable_chunk()]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """
        ### Clip the gradient of the whole model

        As `Zero3Sequential.clip_grad_norm_`; all ranks call it.
        """
        return clip_grad_norm_(self, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        ### Drop the gradients of the shards, and what `no_sync` of an optimizer holds back
        """
        super().zero_grad(set_to_none)
        self.module.zero_grad(set_to_none)

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """
        ### The full parameters of all units at once, named as in the plain model

        This holds the whole model; `full_params` of a unit holds one. All ranks enter and leave;
        `writeback` is as for a `Zero3Layer`.
        """
        with ExitStack() as stack:
            found = {unit.full_name(name): p for unit in self.units
                     for name, p in stack.enter_context(unit.full_params(writeback)).items()}
            yield found | self.tied

    def save(self, folder: str | Path) -> None:
        """
        ### Write the weights as safetensors, one unit at a time: see `materialise.save`
        """
        save(self, Path(folder))

    @torch.no_grad()
    def generate(self, *args, **kwargs) -> Any:
        """
        ### Continue sequences of tokens, all ranks in step

        With the model's own `generate`, where it has one, as those of Hugging Face have; else with
        `continue_tokens`, which see for the arguments. All ranks call it, each with sequences of
        its own, and tells the others after each token whether it is done (all-reduce, a number):
        those that are go on computing until all are. What is at the root stays full until the end,
        for every token needs it.
        """
        root, plain, schedule = self.module, self.module.module, self.schedule
        self._check_children()
        root.contents.check()
        # Shown, for a model may ask its own parameters for their device in between.
        arrive = plain.register_forward_pre_hook(lambda *_: schedule.arrive(root))
        with root.full_params(), root.contents, arrive:
            schedule.stack.append(root)
            try:
                if hasattr(plain, "generate"):
                    return plain.generate(*args, synced_gpus=self.comm.world_size > 1, **kwargs)
                return continue_tokens(plain, *args, world_size=self.comm.world_size, **kwargs)
            finally:
                schedule.stack.pop()
                root._leave()
                schedule.end_forward()

    def release_all(self) -> None:
        """
        ### Free all full parameters, of persistent units too
        """
        self.schedule.trace.end()
        for unit in self.units:
            unit.users.clear()
            unit._cleanup_params()

    @torch.no_grad()
    def destroy(self, weights: bool = True) -> nn.Module:
        """
        ### Give the plain module back, without units and hooks

        * `weights` says that each rank gets the whole model; left out of it, the parameters are on
          the meta device

        All ranks call it, and all-gather each unit if there shall be weights. This object is of no
        use afterwards, nor is an optimizer that was built on it.
        """
        self.release_all()
        new: dict[torch.Tensor, nn.Parameter] = {}
        for unit in self.units:
            with unit.full_params() if weights else nullcontext():
                values = [slot.param.clone() if weights else
                          torch.empty(slot.view.shape, dtype=slot.view.dtype, device="meta")
                          for slot in unit._slots()]
            for slot, value in zip(unit._slots(), values, strict=True):
                new[slot.param] = nn.Parameter(value, slot.param.requires_grad)
                if slot.hook:
                    slot.hook.remove()
                if weights:
                    # The same object as ever, for whoever refers to it.
                    slot.param.__class__ = nn.Parameter
                    slot.param.data, new[slot.param] = value, slot.param
            for refusal in unit.refusals:
                refusal.remove()
        plain = self.module.module
        for m in [*plain.modules()]:
            for key in self.layout.get(m, ()):
                p = vars(m).pop(key)
                m._parameters[key] = p if p is None else new[p]
            for key, child in m._modules.items():
                m._modules[key] = child.module if isinstance(child, Unit) else child
        self._modules.clear()
        self.units.clear()
        self._stop_counting()
        return plain

    def memory_report(self) -> str:
        """
        ### What each unit has on this rank, now, in a table

        Elements with their padding, and bytes of parameters: at rest, and full.
        """
        rows, totals = [f"{'elements':>14} {'at rest':>14} {'full':>14}  tier    unit"], [0, 0, 0]
        for unit in self.units:
            rest_bytes = sum(g.shard.nbytes for g in unit.flats)
            full = unit.is_fetched or unit._full_elsewhere
            full_bytes = sum(g.full.nbytes for g in unit.flats) * full
            tiers = "+".join(dict.fromkeys(g.storage.tier for g in unit.flats)) or "none"
            stays = ", persistent" * unit.persistent + ", leaf" * unit.leaf
            cells = (unit.numel, rest_bytes, full_bytes)
            totals = [a + b for a, b in zip(totals, cells, strict=True)]
            rows.append(" ".join(f"{cell:14,}" for cell in cells)
                        + f"  {tiers:7} {unit.label}{stays}")
        rows.append(" ".join(f"{cell:14,}" for cell in totals) + "          together")
        return "\n".join([f"rank {self.comm.rank} of {self.comm.world_size}", *rows,
                          f"{self.schedule.trace.misses} passes differed from the last of their "
                          "kind"])


def wrap(model: nn.Module, layer_classes: Classes, *, leaf_classes: Classes = (),
         prefetch_numel: int | None = None, max_live_numel: int | None = None,
         persist_below_numel: int = 0, offload: Offload | str | None = None,
         device: torch.device | str | None = None, seed: int = 0,
         init: Callable[[nn.Module], Any] | None = None, checkpoint: str | Path | None = None,
         debug: bool = False) -> Zero3Model:
    """
    ## Shard a whole model, in place

    All ranks call it alike. Every module of `layer_classes` becomes a `Unit` where it stands, and
    what is left over one more, around all of them. Call what this returns: the model itself has
    lost its parameters.

    * `model` may have its values, rank 0's become everybody's; or be on the meta device, or have
      `Deferred` layers, and then it is made one unit at a time
    * `layer_classes` is a class or several; those inside of others are units too
    * `leaf_classes` become units with all that is inside of them. What depends on the data of a
      rank belongs there, the experts of a mixture with their router for instance: they are gathered
      together, and reduced on all ranks, with zeros where nothing came
    * `prefetch_numel` elements are fetched ahead, or not freed since they come soon again; left
      out, as many as the largest unit has, so that the next is always on its way; with 0 none
    * `max_live_numel` elements of full parameters there are at once, at most, those that persist
      among them; `full_params` and `save` come on top. Left out, there is no limit
    * `persist_below_numel`: as for `mark_persistent_parameters`
    * `offload` says where shards rest, as an `Offload` or as "cpu"; left out, on the device
    * `device` is where to materialise; left out, where the model is, or the CPU
    * `seed`, `init` and `checkpoint` are as for `Source`
    * `debug` has ranks compare what they are about to gather; on the CPU messages always say so,
      and this finds out on an accelerator what NCCL would hang on, where one rank gathers one unit
      and another one another

    Raises `TypeError` for what is no model, no class or no function, and `ValueError` for numbers
    that cannot be, before anything changes. Raises `RuntimeError` where there is nothing to wrap, a
    unit has no values, the limit is too low, and as `Zero3Layer`; where units inside of others, or
    external ones, exceed the limit, in the first pass. ZeRO-Infinity, sections 6.2, 7.1 and 7.2.
    Keeps I1 to I8; I2 but for what persists, I3 and I4 as the formula and the table in `units.py`
    say.
    """
    expect(isinstance(model, nn.Module), "wrap", "a model", repr(model),
           "pass the model itself, and not its class", TypeError)
    expect(init is None or callable(init), "wrap: `init`", "a function of a module", repr(init),
           "pass one, or leave it out", TypeError)
    for name, value, least in (("prefetch_numel", prefetch_numel, 0),
                               ("max_live_numel", max_live_numel, 1),
                               ("persist_below_numel", persist_below_numel, 0),
                               ("seed", seed, -MOST)):
        left_out = value is None and name in ("prefetch_numel", "max_live_numel")
        expect(left_out or whole(value, least), f"wrap: `{name}`",
               f"a whole number of at least {least}", repr(value), "pass such a number")
    at = next((p.device for p in model.parameters() if not p.is_meta), "cpu")
    source = Source(torch.device(device or at), seed, init, checkpoint)
    return Zero3Model(model, layer_classes, leaf_classes, source, prefetch_numel, max_live_numel,
                      persist_below_numel, Offload.of(offload), debug)


def continue_tokens(model: nn.Module, ids: torch.Tensor, max_new_tokens: int = 20, *,
                    eos_token_id: int | None = None, temperature: float = 0.0,
                    generator: torch.Generator | None = None, window: int | None = None,
                    world_size: int = 1) -> torch.Tensor:
    """
    ## Continue sequences of tokens

    * `model` gives logits, `(batch, length, vocabulary)`, first of what it returns
    * `ids` are `(batch, length)`, of this rank
    * `eos_token_id` ends a sequence, and fills the others' places behind it
    * `temperature` 0 takes the likeliest token, others draw with `generator`
    * `window` is the longest sequence that the model takes; left out, any length

    Returns `(batch, length + n)`, where n is at most `max_new_tokens`.
    """
    done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for _ in range(max_new_tokens):
        # (batch, vocabulary) fp32; and without a window all of the sequence, for -0 is 0.
        logits = next(tensors_in(model(ids[:, -(window or 0) :])))[:, -1].float()
        if temperature:
            # On the CPU, so that a seed means the same tokens on every device.
            draws = torch.softmax(logits / temperature, -1).cpu()
            token = torch.multinomial(draws, 1, generator=generator)[:, 0].to(ids.device)
        else:
            token = logits.argmax(-1)
        if not done.all():
            if eos_token_id is not None:
                token = token.where(~done, eos_token_id)
                done = done | (token == eos_token_id)
            ids = torch.cat([ids, token[:, None]], dim=1)
        # Who is done goes on computing, for the others need its shards; and returns fewer tokens.
        left = (~done).any().int()
        if world_size > 1:
            dist.all_reduce(left, dist.ReduceOp.MAX)
        if not left:
            break
    return ids


def _places(module: nn.Module, path: str, layers: tuple[type, ...], leaves: tuple[type, ...]
            ) -> Iterator[tuple[nn.Module, str, nn.Module, str]]:
    """
    #### Where units will stand: in which module, by which name, what, by which path

    What is inside of a unit comes before it.
    """
    for name, child in module._modules.items():
        if child is not None:
            at = f"{path}.{name}" if path else name
            if not isinstance(child, leaves):
                yield from _places(child, at, layers, leaves)
            if isinstance(child, (*layers, *leaves)):
                yield module, name, child, at


def _classes(classes: Classes) -> tuple[type, ...]:
    several = isinstance(classes, Iterable) and not isinstance(classes, type)
    found: Any = tuple(classes) if several else (classes,)  # type: ignore[arg-type]
    for kind in found:
        if not isinstance(kind, type):
            raise TypeError(f"wrap. Expected: classes of modules. Got: a {type(kind).__name__}. "
                            "What to do: pass `type(layer)`, or several in a tuple.")
    return found


def main() -> None:
    """
    ## Two steps of a small model, as they happen
    """
    block = partial(nn.TransformerEncoderLayer, 16, 2, 32, dropout=0.0, batch_first=True)
    model = wrap(nn.Sequential(nn.Embedding(9, 16), block(), block(), block(), nn.Linear(16, 9)),
                 nn.TransformerEncoderLayer)
    for step in (1, 2):
        with Ledger(model) as tape:
            model(torch.arange(9)[None]).mean().backward()
        for phase in ("forward", "backward"):
            told = [f"{e.event} {e.layer.split()[1]}" for e in tape.events if e.phase == phase
                    and e.event in ("fetch", "compute", "reduce")]
            print(f"step {step}, {phase}: {', '.join(told)}")
    print(model.memory_report())

r"""
# The uses and the contents of a sharded module

`LayerGuard` looks at a layer before and after it computes. It notices writes to its parameters, and
parameters and layers that are added. Other functions refuse what other libraries do to sharded
modules and cannot do right.

Without this chapter, a case crashes, or trains another model than it seems to:

| somebody | without this chapter | here |
|---|---|---|
| sets the weight 1 to 5 in forward | the next all-gather brings back the 1 | an error |
| returns `self.weight[0]` in forward | reading it crashes the process | an error |
| assigns a new layer inside | each rank trains a layer of its own | an error in the next forward |
| calls `load_state_dict` | nothing is loaded | an error |
| wraps the model in DDP | rank 0's shards replace the others | an error |
| wraps a module with more parameters in DDP | the same | DDP leaves the shards alone |
| calls `fully_shard` | the optimizer steps parameters that no layer reads | an error in forward |
| asks for `parameters()` in a forward | there are none | the full parameters of that layer |

The first check runs in every forward, and looks closer only if something differs:

$$\text{modules now} = \text{modules when it was wrapped} \;\Rightarrow\; \text{nothing was added}$$

**Run this**: `python -m pytest tests/guards tests/test_layer.py tests/test_sharded.py` tries each
of these.

**Not covered, and what that costs**: a library that keeps a sharded module without registering it
as a submodule is noticed only in the next forward.
"""

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.utils.hooks import RemovableHandle

from zero3.guards.checks import Guarded, Named, expect, is_sharded, own_modules

Layer = TypeVar("Layer", bound=Guarded)
# By name, because most of them are not installed.
WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel",
            "FlattenParamsWrapper", "ShardedDataParallel", "DeepSpeedEngine")


class LayerGuard:
    """
    ## The guard of a layer
    """

    def __init__(self, layer: Guarded, params: dict[nn.Module, dict[str, nn.Parameter | None]]):
        """
        ### Remember the modules and parameters that are there

        * `params` are the parameters that the layer's modules had, and now have as plain attributes
        """
        self.layer = layer
        self.hidden = [(owner, own) for owner, own in params.items() if own]
        self.depth = 0  # of the `with` blocks that show the parameters now
        self.known = Known([layer, *params])
        self.refusals = self._refuse_on_modules(list(params)) if layer.flats else []

    def check(self) -> None:
        """
        ### Notice additions before the layer computes

        Raises `RuntimeError` for a trainable parameter that is not sharded, for one that was frozen
        by itself, for a shard that somebody has replaced, and for a layer that the model does not
        know. Also inside a transform of `torch.func`, which forbids writing to full parameters.
        """
        layer = self.layer
        layer.expect(not torch._C._are_functorch_transforms_active(), "cannot be transformed",
                     "a plain call", "one inside of `torch.func` or `torch.vmap`", "use the "
                     "transform inside of the layer's module, or transform "
                     "`torch.func.functional_call(layer.module, params, ...)` in `with "
                     "layer.full_params() as params:`")
        for flat, shard in zip(layer.flats, layer.chunk._parameters.values(), strict=False):
            layer.expect(shard is flat.shard,
                         "has lost its shard",
                         "the one that it was wrapped with",
                         f"a {type(shard).__name__} in its place",
                         "leave sharded layers out of what replaces parameters, as `fully_shard` "
                         "and `distribute_module` do; call `torch.func.functional_call` in `with "
                         "layer.full_params() as params:`")
            # A shard in a file would report a use.
            with torch._C.DisableTorchFunction():
                hooks = {**(flat.shard._backward_hooks or {}),
                         **(flat.shard._post_accumulate_grad_hooks or {})}
                changed = [slot.names[0] for slot in flat.slots
                           if slot.param.requires_grad != flat.trains]
            layer.expect(not changed,
                         "cannot freeze or train a part of a shard",
                         "parameters that train as their shard does",
                         f"another `requires_grad` of {changed}",
                         "set it for all of the layer, `layer.requires_grad_(...)`; or for a "
                         "parameter before wrapping")
            if flat.hook is not None:
                # The optimizer's own.
                hooks.pop(flat.hook.id, None)
            layer.expect(not hooks,
                         "cannot call the hooks of a shard",
                         "none, because its gradient comes from a reduce-scatter",
                         [*hooks.values()],
                         "change `.grad` between backward and step, or register the hook on the "
                         "parameter before it is wrapped")
        if self.depth == 0 and self.known.has_changed():
            self._hide_again()
            self.known = Known([layer, *(owner for _, owner in self._look())])

    def _hide_again(self) -> None:
        """
        #### Make parameters plain attributes again if somebody has assigned them

        `torch.func.functional_call` does.
        """
        for owner, params in self.hidden:
            for name, p in params.items():
                if p is not None and name not in vars(owner) and owner._parameters.get(name) is p:
                    vars(owner)[name] = owner._parameters.pop(name)

    def _look(self) -> list[tuple[str, nn.Module]]:
        """
        #### Look at every module again, because something has changed

        Refuse a parameter that is not sharded, and a layer that does not belong here.
        """
        layer = self.layer
        found = list(own_modules(layer.module))
        beside = [each for name, child in layer._modules.items()
                  if child not in (layer.module, layer.chunk)
                  for each in own_modules(child, f"{name}.")]
        for prefix, owner in [*found, ("", layer), *beside]:
            for name, p in owner._parameters.items():
                # `__enter__` shows parameters that are plain attributes as well. An assigned one is
                # no plain attribute.
                is_fine = p is None or not p.requires_grad or vars(owner).get(name) is p
                layer.expect(is_fine,
                             f"has a new parameter, `{prefix}{name}`",
                             "no trainable parameter that is not sharded",
                             type(p).__name__,
                             layer.cure_for_new)
            for name, child in owner._modules.items():
                is_fine = child is None or not is_sharded(child) or layer.admits(child)
                layer.expect(is_fine,
                             f"has a new layer, `{prefix}{name}`",
                             "the layers that it was wrapped with",
                             f"a sharded {type(child).__name__}",
                             layer.cure_for_new)
        return found

    def __enter__(self) -> None:
        """
        ### Show the full parameters to `parameters()`

        While the module computes, `next(self.parameters()).device` is then the same as in plain
        PyTorch.
        """
        self.depth += 1
        for owner, params in self.hidden:
            owner._parameters.update(params)

    def __exit__(self, *exception: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            for owner, params in self.hidden:
                # New parameters stay, and `check` finds them.
                for name in params:
                    owner._parameters.pop(name, None)

    def before_forward(self) -> None:
        """
        ### Look at the contents, and warn that autocast keeps a copy of each fp32 weight

        A layer that stayed full may be recomputed before its backward begins.
        """
        self.check()
        self.layer.show_again()
        layer = self.layer
        layer.expect(
            not layer.is_full_elsewhere or layer.gathered_versions == layer.shard_versions(),
            "cannot compute", "the weights that `full_params()` has gathered", "others, since a "
            "step or `load` inside of it", "leave `full_params()` first, and enter it again")
        copies = torch.is_autocast_enabled(layer.device.type) and torch.is_grad_enabled()
        if copies and any(flat.full.dtype == torch.float32 for flat in layer.flats):
            # The same words for each layer, because Python shows a warning once.
            warnings.warn(
                f"rank {layer.comm.global_rank}: layers of fp32 run under autocast, which keeps a "
                "16-bit copy of every weight from forward to backward. To free these too, convert "
                "the layers with `.bfloat16()` before wrapping and let `Zero3Optimizer` keep fp32 "
                "masters.", stacklevel=4)

    def after_forward(self, outputs: list[torch.Tensor], recompute: bool) -> None:
        """
        ### Refuse an output that is a view of a parameter, because its memory is about to be freed

        Then hide the parameters of a layer that stays full: a use outside is an error. A
        recomputation is followed by backward, and a unit hides its own.
        """
        for layer in (self.layer, *self.layer.externals):
            layer.guard.after_backward()
        # The address of a layer that is freed already is 0, as that of a view of it.
        lent = {flat.full.untyped_storage().data_ptr() for layer in self.layer.lenders()
                for flat in layer.flats if len(flat.full)}
        for tensor in outputs:
            has_memory = tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta
            self.layer.expect(
                not has_memory or tensor.untyped_storage().data_ptr() not in lent,
                "puts out freed memory", "a tensor of its own",
                "a view of a parameter", "clone it")
        if self.layer.is_fetched and not (self.layer in self.layer.holders or recompute):
            for flat in self.layer.flats:
                flat.close(is_freed=False)

    def before_backward(self, versions: tuple[int, ...], was_elsewhere: bool) -> None:
        """
        ### Refuse a backward pass that is itself recorded, because a second one would follow it

        The arguments are those of `refuse_old_calls`.
        """
        recorded = torch.is_grad_enabled() and not self.layer.is_full_elsewhere
        self.layer.expect(
            not recorded, "cannot go backward twice", "backward without `create_graph`",
            "a backward pass that is itself recorded: a gradient penalty, for instance, or "
            "a Hessian", "compute it in `with model.full_params():`")
        self.refuse_old_calls(versions, was_elsewhere)
        self.layer.show_again()

    def refuse_old_calls(self, versions: tuple[int, ...], was_elsewhere: bool = False) -> None:
        """
        ### Refuse backward through weights that have changed or moved since forward

        * `was_elsewhere` says that forward was inside of `full_params()`, where the parameters have
          other memory; what autograd saved outside is freed there

        After a change plain PyTorch raises an error too.
        """
        self.layer.expect(
            was_elsewhere or not self.layer.is_full_elsewhere, "cannot go backward here",
            "backward outside of `full_params()`, where its forward was", "backward inside",
            "go backward before `with model.full_params():`, or compute the forward pass in it")
        self.layer.expect(
            versions == self.layer.shard_versions(), "cannot go backward",
            "the weights of its forward pass", "weights that have changed since, by an "
            "optimizer for instance", "go backward through all forward passes before you "
            "step; or compute the forward pass again")
        frozen = [flat.slots[0].names[0] for flat in self.layer.flats
                  if flat.trains and not flat.shard.requires_grad]
        self.layer.expect(not frozen, "cannot go backward", "layers that train as in forward",
                          f"`{frozen[:1]}`, which was frozen in between", "freeze before forward")

    def before_grad(self, grad: torch.Tensor, name: str) -> None:
        """
        ### Refuse a gradient that has no place in the flat one

        `nn.Embedding(sparse=True)` makes such gradients: they list the rows that were used.
        """
        self.layer.expect(
            grad.layout == torch.strided and not grad.requires_grad, "cannot reduce a gradient",
            "a dense one without a graph", f"{grad.layout}, `{name}`",
            "use `sparse=False`, and backward without `create_graph`")

    def after_backward(self) -> None:
        """
        ### Refuse a write to the parameters, because it is lost when they are freed
        """
        # Not fetched, but inside `full_params`: there a write is allowed.
        if not self.layer.is_fetched:
            return
        for flat in self.layer.flats:
            name = flat.written()
            self.layer.expect(
                not name, f"has written to `{name}`", "parameters that only an "
                "optimizer changes", "a write in forward or backward, which each rank would lose "
                "with the full parameter", "write to the shards between two steps (`for p in "
                "model.get_trainable_chunk(): p.clamp_(...)` under `torch.no_grad()`), or in `with "
                "model.full_params(writeback=True)`")

    def _refuse_on_modules(self, owners: list[nn.Module]) -> list[RemovableHandle]:
        """
        #### Refuse to read and to write the state dicts of the modules, and to freeze one

        `state_dict()` would return shards, or nothing. `load_state_dict(strict=False)` would load
        nothing, and `requires_grad_(False)` freeze nothing. Returns the handles of the hooks.
        """
        def refusal(*told: str) -> Callable[..., None]:
            return lambda *_, **__: self.layer.expect(False, *told)

        refuse_to_save = refusal(
            "has no state dict", "weights", "shards", "take `zero3.save`, or the weights in `with "
            "model.full_params() as params:`")
        refuse_to_load = refusal(
            "cannot load a state dict", "parameters to load into", "shards", "load it before "
            "wrapping; or copy each tensor to `params[name]` in `with "
            "model.full_params(writeback=True) as params:`; or pass its file to `wrap(..., "
            "checkpoint=)`; a checkpoint of `zero3.save` is read by `zero3.load`")
        for owner in owners:
            vars(owner)["requires_grad_"] = refusal(
                "cannot freeze a module inside of it", "`requires_grad_` of all that is sharded "
                "together", "that of a part, whose parameters are elsewhere", "call it on the "
                "sharded layer or the model; or freeze the part before wrapping")
        return [*(owner.register_state_dict_pre_hook(refuse_to_save) for owner in owners),
                *(owner.register_load_state_dict_pre_hook(refuse_to_load) for owner in owners)]


class Known:
    """
    ## Which modules and parameters some modules had
    """

    def __init__(self, modules: list[nn.Module]):
        self.before = [(m._parameters, m._modules, [*m._modules.values()]) for m in modules]

    def has_changed(self) -> bool:
        """
        ### Whether they have other modules now, or a parameter of their own
        """
        # Modules are equal only if they are the same object.
        return any(parameters or [*modules.values()] != before
                   for parameters, modules, before in self.before)


def check_writes(layer: Guarded,
                 prefix: str,
                 shown: dict[str, nn.Parameter],
                 writeback: bool) -> None:
    """
    ## Refuse `params[name] = values` in `full_params(writeback=True)`, and warn of lost writes

    * `shown` is the dict that the block got, and `prefix` begins the names in it
    """
    slots = [slot for flat in layer.flats for slot in flat.slots]
    gone = [prefix + name for slot in slots for name in slot.names
            if shown.get(prefix + name) is not slot.param]
    layer.expect(not (gone and writeback), "is not written back", "the parameters that "
                 "`full_params()` gave, with new values", f"another object as `params{gone[:1]}`",
                 "write into it: `params[name].copy_(values)` under `torch.no_grad()`")
    written = [slot.names[0] for slot in slots if slot.param._version != slot.version]
    if written and not writeback:
        warnings.warn(
            f"rank {layer.comm.global_rank}: {layer.label}: what was written to `{written[0]}` "
            "inside `full_params()` is lost, because the shards have not changed. Pass "
            "`writeback=True` to keep the values of rank 0.", stacklevel=4)


def check_chain(modules: Iterable[Layer]) -> list[Layer]:
    """
    ## Refuse modules that cannot be a chain

    Each rank would train its own copy of a plain module.
    """
    expect(isinstance(modules, Iterable), "Zero3Sequential", "a list of Zero3Layers",
           type(modules), "pass `[layer]` for one", TypeError)
    # A generator yields its layers a single time.
    layers = list(modules)
    expect(len(layers) > 0, "Zero3Sequential", "at least one layer", "none",
           "look at the code that should have made the layers")
    for i, layer in enumerate(layers):
        expect(isinstance(layer, Guarded), f"Zero3Sequential, element {i}", "a Zero3Layer",
               type(layer), "wrap it, with parameters or without", TypeError)
    check_groups(layers)
    return layers


def check_walk(chain: Any) -> None:
    """
    ## Refuse layers that were added to a chain or taken out of it
    """
    built = chain.sharded_layers
    children = dict(chain.named_children())
    params = {**chain._parameters, **chain.module_list._parameters}
    built[0].expect(
        [*chain.module_list] == [*built] and len(children) == 1 and not params,
        "is in a chain whose layers have changed", f"the {len(built)} that it was built with",
        f"{len(chain.module_list)}, and submodules {[*children]}",
        "build a new `Zero3Sequential` of `Zero3Layer`s, and the optimizer on it")


def stray(model: nn.Module) -> list[str]:
    """
    ## The names of trainable parameters that no sharded layer has

    Nobody reduces their gradients.
    """
    shards = {shard for layer in model.modules() if is_sharded(layer) for shard in layer.chunk}
    return [name for name, param in model.named_parameters()
            if param.requires_grad and param not in shards]


def check_groups(layers: Iterable[Guarded]) -> None:
    """
    ## Refuse layers of one model that are sharded over different ranks

    Raises `RuntimeError`.
    """
    by_groups = {(layer.comm.groups, layer.comm.links): layer for layer in layers}
    told = [" x ".join(f"{[*group.ranks]}" for group in groups) + f" with {links}" * bool(links)
            for groups, links in by_groups]
    for layer in by_groups.values():
        layer.expect(len(by_groups) == 1, "is sharded over other ranks, or in another way, than "
                     "the rest of its model", "the same ranks and the same `Links` for all layers",
                     " and ".join(told), "pass the same `mesh=` to every layer, also to those "
                     "without parameters; models on different ranks take an optimizer each")


def check_drawn(owner: Named, layers: Iterable[Guarded]) -> None:
    """
    ## Refuse the same random numbers in the shards of several ranks

    With one seed `nn.init.normal_(p)` of every shard draws them. All ranks must call it.
    """
    # A shard that nobody has written to has the values of before wrapping.
    written = [(layer, flat.shard) for layer in layers for flat in layer.flats
               if type(flat.shard) is nn.Parameter and flat.shard._version]
    every = owner.comm.group.gather([tuple(shard[:64].tolist()) for _, shard in written])
    for (layer, _), begins in zip(written, zip(*every, strict=False), strict=False):
        # Constants, and patterns of a few numbers, may well be the same.
        drawn = [values for values in begins if len({*values}) > 8]
        layer.expect(len({*drawn}) == len(drawn), "has been initialised in shards", "other values "
                     "on each rank", "the same random numbers on several",
                     "initialise before wrapping, or in `with model.full_params(writeback=True):`")


def uncompiled(forward: Callable) -> Callable:
    """
    ## Have `torch.compile` leave a function out of its graphs

    It would trace freed parameters. Compile a layer's module instead, `layer.module.compile()`: it
    runs compiled as a part of the layer.
    """
    eager = torch._disable_dynamo(forward)

    @functools.wraps(forward)
    def call(*args: object, **kwargs: object) -> object:
        # Only while it traces, because importing torch's compiler takes seconds.
        if torch.compiler.is_compiling():
            return eager(*args, **kwargs)
        return forward(*args, **kwargs)

    return call


def look_at_wrapper(wrapper: nn.Module,
                    name: str,
                    module: object) -> None:
    """
    ## Refuse a library that trains whole parameters

    `DistributedDataParallel` is right around a module that also has parameters outside sharded
    layers, if it ignores the shards. Raises `RuntimeError`.
    """
    kind = type(wrapper).__name__
    if kind not in WRAPPERS or not isinstance(module, nn.Module):
        return
    layers = [m for m in module.modules() if is_sharded(m)]
    ddp: Any = wrapper
    if kind == "DistributedDataParallel" and layers and stray(module):
        shards = {id(p) for layer in layers for p in layer.chunk}
        ddp.parameters_to_ignore |= {n for n, p in module.named_parameters() if id(p) in shards}
        ddp._module_parameters = [p for p in ddp._module_parameters if id(p) not in shards]
    elif layers:
        layers[0].expect(
            False, f"cannot be trained inside of {kind}", "layers that are sharded once, by zero3",
            f"{kind} around {len(layers)} of them", "call the sharded model itself, because its "
            "gradients are means over all ranks already; with Fabric take the `Zero3Strategy` of "
            "`zero3.beside.fabric`; with Accelerate take the `Accelerator` of "
            "`zero3.beside.accelerate`, or pass the data loader alone to `prepare`, and leave "
            "model and optimizer out")


# It is called for all modules, because nothing else tells a module that it was wrapped.
register_module_module_registration_hook(look_at_wrapper)

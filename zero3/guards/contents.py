r"""
# What a sharded model holds, and who may hold it

`Contents` notices parameters and layers that were added to a sharded module after it was wrapped,
and it refuses what other libraries do to sharded modules and cannot do right.

A sharded module looks like any other module. So people assign new heads to it, load state dicts
into it, copy it for a moving average, and put `DistributedDataParallel` around it. None of these
fails by itself, and each of them trains another model than it seems to:

| somebody | without this chapter | here |
|---|---|---|
| assigns a new layer inside | each rank trains a layer of its own | an error in the next forward |
| calls `load_state_dict` | nothing is loaded | an error |
| wraps the model in DDP | rank 0's shards replace everybody's | an error |
| wraps a module that has more parameters in DDP | the same | DDP leaves the shards alone |
| calls `fully_shard` | the optimizer steps what no layer reads | an error in the next forward |
| asks for `parameters()` in a forward | there are none | the full parameters of that layer |

The first check runs in every forward, so it has to be cheap. It compares the submodules of each
module with the list from before, by identity, and looks at the modules themselves only when
something differs:

$$\text{modules now} = \text{modules when it was wrapped} \;\Rightarrow\; \text{nothing was added}$$

**Run this**: `python -m pytest tests/test_trust_ecosystem.py` tries each of these.

**Not covered, and what that costs**: libraries that keep a sharded module without registering it as
a submodule are not noticed before the next forward. A parameter that is assigned and removed again
between two forwards is not noticed at all.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

# Classes that train what they wrap in a way of their own, by name: to import them takes long, and
# most of them are not installed.
WRAPPERS = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel",
            "FlattenParamsWrapper", "ShardedDataParallel", "DeepSpeedEngine")


class Contents:
    """
    ## The modules inside of a sharded layer

    Each layer has one of these as `contents`, from the moment at which it is sharded.
    """

    def __init__(self, layer: Any, params: dict[nn.Module, dict[str, Any]]):
        """
        ### Remember what is there

        * `layer` is the sharded layer
        * `params` are what its modules had as parameters, and now have as plain attributes
        """
        self.layer = layer
        self.owners = list(params)
        self.hidden = [(owner, own) for owner, own in params.items() if own]
        self.depth = 0  # of the `with` blocks that show them now
        self.known = Known([layer, *params])

    def check(self) -> None:
        """
        ### Notice what was added, before the layer computes

        Raises `RuntimeError` for a trainable parameter that is not sharded, for a shard that
        somebody has replaced, and in a whole model for a layer that the model does not know. Also
        inside of a transform of `torch.func`, which forbids to write to the full parameters.
        """
        layer = self.layer
        layer.expect(not torch._C._are_functorch_transforms_active(), "cannot be transformed",
                     "a plain call", "one inside of `torch.func` or `torch.vmap`", "use the "
                     "transform inside of the layer's module, or transform "
                     "`torch.func.functional_call(layer.module, params, ...)` in `with "
                     "layer.full_params() as params:`")
        for group, shard in zip(layer.flats, layer.chunk._parameters.values(), strict=False):
            if shard is not group.shard:
                layer.expect(False, "has lost its shard", "the one that it was wrapped with",
                             f"a {type(shard).__name__} in its place", "leave sharded layers out "
                             "of what replaces parameters, as `fully_shard` and "
                             "`distribute_module` do")
        if self.depth == 0 and self.known.has_changed():
            self._hide_again()
            owners = [owner for _, owner in self._look()]
            self.known = Known([layer, *owners])

    def _hide_again(self) -> None:
        """
        #### Make parameters plain attributes again, where somebody has assigned them

        `torch.func.functional_call` exchanges them, and afterwards assigns the same ones.
        """
        for owner, params in self.hidden:
            for name, p in params.items():
                if p is not None and name not in vars(owner) and owner._parameters.get(name) is p:
                    vars(owner)[name] = owner._parameters.pop(name)

    def _look(self) -> list[tuple[str, nn.Module]]:
        """
        #### Look at every module again, since something has changed

        Layers that only change places pass, and so do modules without trainable parameters.
        """
        layer, found = self.layer, [*self._walk(self.layer.module, "")]
        extra = {n: m for n, m in layer._modules.items() if m not in (layer.module, layer.chunk)}
        for prefix, owner in [*found, ("", layer), *self._walk(None, "", extra)]:
            for name, p in owner._parameters.items():
                # What `__enter__` shows is a plain attribute as well. What was assigned is not.
                fine = p is None or not p.requires_grad or vars(owner).get(name) is p
                layer.expect(fine, f"has a new parameter, `{prefix}{name}`", "no trainable "
                             "parameter that is not sharded", type(p).__name__, layer.cure_for_new)
            for name, child in owner._modules.items():
                fine = not is_sharded(child) or layer.admits(child)
                layer.expect(fine, f"has a new layer, `{prefix}{name}`", "the layers that it was "
                             "wrapped with", f"a sharded {type(child).__name__}",
                             layer.cure_for_new)
        return found

    def _walk(self, module: Any, prefix: str, children: dict[str, Any] | None = None
              ) -> Iterator[tuple[str, nn.Module]]:
        """
        #### A module and those inside, down to the next sharded one
        """
        if module is not None:
            yield prefix, module
            children = module._modules
        for name, child in (children or {}).items():
            if child is not None and not is_sharded(child):
                yield from self._walk(child, f"{prefix}{name}.")

    def __enter__(self) -> None:
        """
        ### Show the parameters where `parameters()` looks for them

        While its module computes, `next(self.parameters()).device` is then what it is in plain
        PyTorch. At all other times `parameters()` yields the shards and nothing else, because that
        is what an optimizer needs.
        """
        self.depth += 1
        for owner, params in self.hidden:
            owner._parameters.update(params)

    def __exit__(self, *exception: Any) -> None:
        self.depth -= 1
        for owner, params in self.hidden if self.depth == 0 else ():
            if len(owner._parameters) == len(params):
                owner._parameters.clear()
            else:
                # What the module has registered meanwhile stays, and `check` will find it.
                for name in params:
                    owner._parameters.pop(name, None)

    def refuse_state_dicts(self) -> list[Any]:
        """
        ### Refuse to read and to write the state dicts of the modules

        `state_dict()` would return shards, or nothing, where everybody expects weights.
        `load_state_dict(strict=False)` would load nothing, and say nothing.

        Returns the handles of the hooks.
        """
        def refuse_to_save(*_: Any) -> None:
            self.layer.expect(
                not self.layer.flats, "has no state dict", "weights", "shards", "take "
                "`zero3.save`, or the weights in `with model.full_params() as params:`")

        def refuse_to_load(*_: Any) -> None:
            self.layer.expect(
                not self.layer.flats, "cannot load a state dict", "parameters to load into",
                "shards", "load it before wrapping; or copy each tensor to `params[name]` in `with "
                "model.full_params(writeback=True) as params:`; or pass its file to `wrap(..., "
                "checkpoint=)`; a checkpoint of `zero3.save` is read by `zero3.load`")

        handles = []
        for owner in self.owners:
            handles.append(owner.register_state_dict_pre_hook(refuse_to_save))
            handles.append(owner.register_load_state_dict_pre_hook(refuse_to_load))
        return handles

    def refuse_copies(self) -> None:
        """
        ### Refuse to be copied or pickled

        A copy would have hooks, files and communicators of the original. Raises `RuntimeError`.
        """
        self.layer.expect(
            False, "cannot be copied or pickled", "one model on each rank", "a copy of one of its "
            "layers", "copy the plain model before wrapping it; for a moving average (EMA) average "
            "the shards, `[p.detach().clone() for p in model.get_trainable_chunk()]`; to keep the "
            "weights use `zero3.save`, or clone them in `with model.full_params() as params:`")


class Known:
    """
    ## Which modules and parameters some modules had
    """

    def __init__(self, modules: list[nn.Module]):
        self.before = [(m._parameters, m._modules, [*m._modules.values()]) for m in modules]

    def has_changed(self) -> bool:
        """
        ### Whether they have others now, or a parameter of their own

        In every forward, so it compares lists and follows no module.
        """
        for parameters, modules, before in self.before:
            # Modules are equal only if they are the same object.
            if parameters or [*modules.values()] != before:
                return True
        return False


def is_sharded(module: Any) -> bool:
    """
    ## Whether this is a sharded layer
    """
    return module is not None and isinstance(vars(module).get("contents"), Contents)


def uncompiled(forward: Callable) -> Callable:
    """
    ## Have `torch.compile` leave a function out of its graphs

    It traces what it compiles, and would trace the parameters while they are freed. A layer's
    module can be compiled by itself, `layer.module.compile()`, and then runs compiled as a part of
    the layer. This asks torch's compiler only while it traces, because to import it takes seconds.

    * `forward` is the function

    Returns one that does the same.
    """
    eager = torch._disable_dynamo(forward)

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return eager(*args, **kwargs)
        return forward(*args, **kwargs)

    return call


def look_at_wrapper(wrapper: nn.Module, name: str, module: Any) -> None:
    """
    ## Refuse to be wrapped in a library that trains whole parameters

    torch calls this whenever a module becomes a submodule of another one, so it asks for the name
    of the class first. All of these libraries register the module before they send anything.

    `DistributedDataParallel` around a module that also has parameters outside of sharded layers is
    right if it ignores the shards. It synchronises the others, and each sharded layer its own.

    Raises `RuntimeError`.
    """
    kind = type(wrapper).__name__
    if kind not in WRAPPERS or not isinstance(module, nn.Module):
        return
    layers: list[Any] = [m for m in module.modules() if is_sharded(m)]
    shards = {id(p) for layer in layers for p in layer.chunk.parameters()}
    others = [p for p in module.parameters() if p.requires_grad and id(p) not in shards]
    ddp: Any = wrapper
    if kind == "DistributedDataParallel" and layers and others:
        ddp.parameters_to_ignore |= {n for n, p in module.named_parameters() if id(p) in shards}
        ddp._module_parameters = [p for p in ddp._module_parameters if id(p) not in shards]
    elif layers:
        layers[0].expect(
            False, f"cannot be trained inside of {kind}", "layers that are sharded once, by zero3",
            f"{kind} around {len(layers)} of them", "call the sharded model itself, because its "
            "gradients are means over all ranks already; with Accelerate leave the model out of "
            "`prepare`, or use `accelerator.prepare_model(model, evaluation_mode=True)`")


# For all modules of this process, because nothing else tells a module that it was wrapped.
register_module_module_registration_hook(look_at_wrapper)

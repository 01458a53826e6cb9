r"""
# Gradients of shards

`ShardGradient`, the type of a shard's gradient, raises an error if somebody takes the norm of one
rank's part for the norm of the whole gradient.

In the example of `gradients.py`, PyTorch's `clip_grad_norm_(model.parameters(), 1)` finds 5 and 12,
and each rank would shrink its part by another factor, without an error:

$$\lVert g^{(r)} \rVert \ne \lVert g \rVert$$

| the call | on a shard's gradient |
|---|---|
| `model.clip_grad_norm_(c)` | the norm of the whole model, one all-gather of a number per shard |
| `torch.nn.utils.clip_grad_norm_`, and all norms of torch's | an error that names the first call |
| `torch.amp.GradScaler` | the ranks agree whether there was an overflow: all step, or none |
| a step that looks at whole parameters, or has an empty group of them | an error |
| `clip_grad_value_`, other optimizers, in-place operations | as for any tensor |
| `g.as_subclass(torch.Tensor)` | a plain tensor with the same memory, to look at this rank's part |

`GradientElsewhere` has a gradient's shape and no memory. A shard's `.grad` is one of these while
the gradient rests in CPU memory or in a file, and so is the gradient of each parameter in
`optimizer.param_groups` between steps. Reading it is an error.

**Run this**: `python -m pytest tests/test_gradients.py`.

**Not covered, and what that costs**: the type does not survive arithmetic. If somebody adds up a
norm by hand, `(g * g).sum()` for instance, or searches for NaN, that concerns this rank's part
alone, and nothing notices.
"""

import weakref
from collections.abc import Iterable
from functools import partial
from typing import SupportsIndex

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from zero3.guards.checks import Guarded, expect
from zero3.guards.freed import METADATA

# `clip_grad_norm_` and `get_total_norm` call these.
_NORMS = {
    torch.Tensor.norm, torch.norm, torch.functional.norm, torch.linalg.norm,
    torch.linalg.vector_norm, torch.linalg.matrix_norm, torch._foreach_norm,
    torch.nn.functional.normalize, *(getattr(torch, name) for name in ("_foreach_powsum",)
                                     if hasattr(torch, name)),
}
# Functions that return the same numbers.
_SAME = {torch.Tensor.detach, vars(torch._C.TensorBase)["data"].__get__, torch.Tensor.float,
         torch.Tensor.double, torch.Tensor.to, torch.Tensor.cpu}
_ZERO = {torch.Tensor.zero_, torch._foreach_zero_}
_UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_
# Classes that look at a whole parameter, by name: not all of them are torch's.
_LOOK_AT_ALL = {"adafactor", "lamb", "lars", "lbfgs", "muon", "shampoo", "soap"}
_CURE = ("clip with `model.clip_grad_norm_(...)`, or `Zero3Optimizer(..., clip_grad_norm=...)`; "
         "without a `Zero3Sequential` or `wrap`, with "
         "`zero3.gradients.clip_grad_norm_(model, ...)`; to look at this rank's part take "
         "`.as_subclass(torch.Tensor)` of the gradient")


class ShardGradient(torch.Tensor):
    """
    ## The gradient of a shard
    """

    flat: weakref.ref  # the flat parameter
    # Names of the parameters that have contributed, as far as this rank knows; `None` for all.
    used: set[tuple[str, ...]] | None

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        asked = func in _NORMS or func is _UNSCALE
        layer = _layer((args, kwargs)) if asked else None
        if func in _NORMS and layer is not None:
            has_all = layer.comm.world_size == layer.comm.stages.size == 1
            layer.expect(has_all, "cannot give a norm", "the norm of the whole model's gradient",
                         f"`{func.__name__}` of the part that this rank has", _CURE)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            if func in _SAME and isinstance(result, torch.Tensor):
                # Such a copy refuses a norm too.
                return mark(result, args[0].flat(), args[0].used)
            if func is _UNSCALE and layer is not None:
                _agree_on_overflow(layer, *args, **(kwargs or {}))
        return result

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        # A copy belongs to no shard. One of a gradient that is not here is an error.
        return self.clone()

    def __reduce_ex__(self, protocol: SupportsIndex) -> str | tuple:
        return self.clone().__reduce_ex__(protocol)


class GradientElsewhere(ShardGradient):
    """
    ## A gradient that rests with its master, in CPU memory or in a file

    So `p.grad is None` and `zero_grad()` mean what they always do.
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # These read no element.
        if func in METADATA or func in (torch.Tensor.requires_grad_, torch.Tensor.detach_):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        layer = _layer(args)
        # Its model may be gone.
        check = partial(expect, kind=RuntimeError) if layer is None else layer.expect
        check(
            func in _ZERO, "has no gradient to read", "one in the shard's own memory",
            f"`{getattr(func, '__name__', func)}` of one that rests with its master",
            "let `Zero3Optimizer` clip, scale and step, by `clip_grad_norm=` and `loss_scale=`; "
            "`optimizer.shard_states[i].read_grad()` brings a gradient")
        for grad in _found(args):
            if not isinstance(grad, cls):
                grad.zero_()
            elif (flat := grad.flat()) is not None:
                (flat.sink or flat).drop_grad(set_to_none=False)
        return args[0]

    def __repr__(self, *, tensor_contents=None):
        return f"<a gradient of {len(self)} elements that is not here>"


def mark(grad: torch.Tensor,
         flat: object,
         used: set | None,
         names: Iterable[tuple[str, ...]] = ()) -> ShardGradient:
    """
    ## The same gradient, marked as a part of the whole

    * `used` names the parameters that it has something of; `None` for all
    * `names` are those that have been added to it, also if it is marked already
    """
    if not isinstance(grad, ShardGradient):
        grad = grad.as_subclass(ShardGradient)
        grad.flat = weakref.ref(flat)
        grad.used = used
    if grad.used is not None:
        # A parameter that got no gradient on any rank is not stepped, as in plain PyTorch.
        grad.used.update(names)
    return grad


def check_optimizer(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """
    ## Refuse to step shards as if they were whole parameters

    A group is empty if it was to get matrices, or certain names: shards have one dimension and
    other names.
    """
    groups = optimizer.param_groups
    # `Zero3Optimizer` knows the parameters of each shard.
    layer = None if hasattr(optimizer, "shard_states") else _layer(
        [p.grad for group in groups for p in group["params"]])
    if layer is None:
        return
    name = type(optimizer).__name__
    layer.expect(all(group["params"] for group in groups), "cannot be stepped in such groups",
                 "parameters in each group", f"an empty group of {name}", "pass `group_by=` to "
                 "`Zero3Optimizer`, which gets whole shapes and names; or leave the group out")
    layer.expect(name.lower() not in _LOOK_AT_ALL, f"cannot be stepped by {name}",
                 "an optimizer that steps each element by itself", "one that looks at a whole "
                 "parameter", f"call `Zero3Optimizer(model, {name}, ...)`")


register_optimizer_step_pre_hook(check_optimizer)


def elsewhere(flat: object, param: nn.Parameter) -> GradientElsewhere:
    """
    ## A gradient without memory, for the shard of a flat parameter, or for a part of its master
    """
    with torch._C.DisableTorchFunction():
        one = torch.empty(1, dtype=param.grad_dtype or param.dtype, device=param.device)
        grad = one.expand(len(param)).as_subclass(GradientElsewhere)
        grad.untyped_storage().resize_(0)
    grad.flat = weakref.ref(flat)
    grad.used = set()
    return grad


# ---------------------------------------------------------------------------------------- helpers


def _found(args: object) -> list[ShardGradient]:
    """
    #### The gradients among the arguments of a function
    """
    return [leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, ShardGradient)]


def _layer(args: object) -> Guarded | None:
    """
    #### The layer of the gradients among these, if it still exists
    """
    flats = [grad.flat() for grad in _found(args)]
    return next((flat.owner() for flat in flats if flat is not None), None)


def _agree_on_overflow(layer: Guarded,
                       grads: list[torch.Tensor],
                       found_inf: torch.Tensor,
                       inv_scale: torch.Tensor) -> None:
    """
    #### Tell all ranks about an overflow that one of them has in its shards

    All ranks call it: an all-gather of 4 bytes, for each data type of gradients; and one over the
    stages of a pipeline, or the ranks that split the weights.
    """
    mine = found_inf.view(1).to(layer.device)  # (1,) fp32, device
    of_stage = layer.comm.numbers(layer, mine).max()
    found_inf.copy_(layer.comm.over_stages(layer, of_stage.view(1)).max())

r"""
# A freed parameter

`FreedParameter` is the class of every parameter while its memory is freed, so that a use outside of
its layer is an error with the parameter's name.

A freed parameter keeps its shape. An operation on it would read address zero and end the
interpreter:

$$\text{bytes that its shape promises} > \text{bytes in its storage} = 0$$

So the layer changes the *class* of each parameter, to a subclass of this one when it frees the
memory and to `OpenParameter` when it fills it again. The object stays the same.

**Run this**: `zero3.Zero3Layer(torch.nn.Linear(2, 2)).module.weight + 1` in a Python session.

**Not covered, and what that costs**: code that bypasses `__torch_function__`, in C++ for instance.
"""

import weakref

import torch
from torch import nn
from torch._guards import TracingContext

from zero3.guards.checks import Guarded, expect, is_sharded, own_modules
from zero3.guards.placement import check_fresh

# Properties and methods that read no element.
_PROPERTIES = ("shape", "dtype", "device", "layout", "ndim", "requires_grad", "is_leaf", "grad_fn",
               "grad_dtype", "is_sparse", "is_sparse_csr", "is_cuda", "is_cpu", "is_meta",
               "is_quantized", "is_nested", "_version", "nbytes")
_METHODS = ("dim", "numel", "nelement", "size", "stride", "__len__", "__hash__", "element_size",
            "untyped_storage", "is_floating_point", "is_complex")
METADATA = {*(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
            *(getattr(torch.Tensor, name) for name in _METHODS),
            vars(torch._C.TensorBase)["grad_dtype"].__set__}
# Functions that save or copy weights.
_READS = {vars(torch._C.TensorBase)["data"].__get__, torch.Tensor.detach, torch.Tensor.clone,
          torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.item}
_CURE_FOR_READS = ("save the model with `zero3.save` or, if `wrap` returned it, `model.save`; or "
                   "take a state dict in `with model.full_params() as params:`, `{name: "
                   "p.detach().cpu().clone() for name, p in params.items()}`; pass "
                   "`writeback=True` to write")
_CURE_FOR_WRITES = ("initialise, and freeze a part, before wrapping; later write in `with "
                    "model.full_params(writeback=True):`, and freeze a whole layer by "
                    "`layer.requires_grad_(False)`")
# A shard that rests elsewhere can also be frozen, and asked for its gradient.
_OF_SHARDS = {vars(torch._C.TensorBase)["grad"].__get__,
              vars(torch._C.TensorBase)["requires_grad"].__set__, torch.Tensor.requires_grad_}


def check_module(owner: Guarded, module: nn.Module) -> None:
    """
    ## Refuse what cannot be sharded

    Raises `TypeError` if it is no module, and `RuntimeError` if it is sharded already, has a
    parameter of another layer or one with a gradient, or shares memory.
    """
    expect(isinstance(module, nn.Module), "Zero3Layer", "a module", module,
           "pass the layer itself, and not its class", TypeError)
    owner.expect(not is_sharded(module), "is given", "a plain module", module, owner.cure)
    for prefix, child in own_modules(module):
        for name, value in (*vars(child).items(), *child._parameters.items()):
            owner.expect(not isinstance(value, FreedParameter), f"cannot shard `{prefix}{name}`",
                         "a parameter of this layer alone", value, owner.cure)
    check_fresh(owner, module)


class FreedParameter(nn.Parameter):
    """
    ## A parameter without memory

    Each parameter, and each shard that rests in a file or encoded, gets a subclass with its name.
    """

    name: str
    owner: weakref.ref[Guarded]
    cure: str
    is_shard: bool
    traceable = False  # whether a compiler may trace a use, because it gathers the parameter itself

    @classmethod
    def named(cls, owner: Guarded,
              name: str,
              cure: str,
              is_shard: bool = False) -> "type[FreedParameter]":
        """
        ### The subclass for one parameter
        """
        return type("FreedParameter", (cls,), {
            "owner": weakref.ref(owner), "name": name, "cure": cure, "is_shard": is_shard})

    @classmethod
    def of_shard(cls, owner: Guarded,
                 memory: torch.Tensor,
                 trains: bool,
                 cure: str) -> nn.Parameter:
        """
        ### A parameter without elements, for an optimizer that asks what there is to train

        * `memory` is as long as the shard and of its data type; it is freed
        """
        memory.untyped_storage().resize_(0)
        param = nn.Parameter(memory, trains)
        param.__class__ = cls.named(owner, "shard", cure, is_shard=True)
        return param

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        # The second is for what Dynamo asks by itself, and not because it traces this function.
        if cls.traceable and (torch.compiler.is_compiling() or TracingContext.try_get()):
            return super().__torch_function__(func, types, args, kwargs or {})
        removes_grad = func == torch.Tensor.grad.__set__ and args[1] is None
        if func in METADATA or (cls.is_shard and (removes_grad or func in _OF_SHARDS)):
            return super().__torch_function__(func, types, args, kwargs or {})
        owner = cls.owner()
        # The methods of a property are called `__get__` and `__set__`, and it has the name.
        is_property = func.__name__ in ("__get__", "__set__")
        name = getattr(func, "__self__", func).__name__ if is_property else func.__name__
        is_write = name in ("data", "requires_grad") or (name[-1] == "_" != name[0])
        cure = _CURE_FOR_WRITES if is_write else cls.cure
        # In a whole model a layer may use the parameter of another one, which is gathered then.
        owner.expect(not cls.is_shard and owner.fetch_for_others(), f"freed `{cls.name}`",
                     "a use in the layer's forward, or in `with layer.full_params():`",
                     f"`{name}` outside", _CURE_FOR_READS if func in _READS else cure)
        return func(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents=None):
        return f"<`{self.name}`, sharded by {self.owner().label}>"

    def __format__(self, spec: str) -> str:
        return repr(self)


class OpenParameter(nn.Parameter):
    """
    ## A parameter while it is full: torch counts every write to it

    torch does not count those through `.data`. So here that is `.detach()`, which shares the count.
    """

    data = property(torch.Tensor.detach,
                    vars(torch._C.TensorBase)["data"].__set__)  # type: ignore[assignment]

    # A copy outlives the layer's computation.
    def __new__(cls, *args):
        return nn.Parameter(*args)

r"""
# Placement: the same parameters and buffers on every rank, on the right device

`check_params` looks at a layer before it is sharded, and `check_fresh` at the gradients and the
memory of its parameters.

Take a module that was built in another order on rank 1:

| | parameter 0 | parameter 1 |
|---|---|---|
| rank 0 | `first.weight`, (2, 3) | `second.weight`, (2, 3) |
| rank 1 | `second.weight`, (2, 3) | `first.weight`, (2, 3) |

All sizes agree, so both ranks would compute with halves of two weights. So the ranks compare names,
shapes and data types once:

$$\text{parameters of rank } 0 = \text{parameters of rank } 1 = \ldots$$

They compare buffers too, because rank 0 sends its values into those of the other ranks.

Two whole models may agree in all of these, and be built in another order on rank 1. So the first
rank draws a number while the ranks compare, and announcements of gathers, reduces and norms
contain it (see `collectives.py`).

**Run this**: `python -m docs.mutations no-comparison` shows what happens without the comparison.

**Not covered, and what that costs**: two ranks that share one accelerator; NCCL reports these.
Parameters of one memory in two layers of a chain: each trains on its own. A tensor with a
parameter's memory in a list or a closure: it keeps the old values.
"""

import secrets
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero3.guards.checks import Named, own_modules, same

Params = dict[nn.Parameter, tuple[str, ...]]
Buffers = dict[str, torch.Tensor | None]


def check_params(owner: Named,
                 params: Params,
                 buffers: Buffers,
                 device: torch.device | str | None,
                 dtype: torch.dtype | None) -> tuple[torch.device, int]:
    """
    ## Check the parameters of a layer, and compare them and its buffers between ranks

    * `owner` is the layer
    * `params` are its parameters, with their names, and `buffers` its buffers by their names
    * `device` and `dtype` are those that they must have, if given

    All ranks must call it. Returns the device that the parameters are on, and a number below 2 to
    the 31 that the first rank has drawn. Raises `RuntimeError`.
    """
    group = next((group for group in owner.comm.groups if group.size > 1), None)
    # A layer without parameters computes where its group can send.
    home = group.place_of(torch.device("cpu")) if group else "cpu"
    at = torch.device(device or next((p.device for p in params), home))
    for p, (name, *_) in params.items():
        what = f"cannot shard `{name}`"
        owner.expect(type(p) is nn.Parameter and not p.is_meta,
                     what,
                     "a Parameter with values",
                     f"{type(p).__name__} on {p.device}",
                     "initialise the module first")
        owner.expect(p.device.type == at.type and at.index in (None, p.device.index or 0),
                     what,
                     f"device {at}",
                     p.device,
                     "move the module there first")
        owner.expect(dtype in (None, p.dtype), what, dtype, p.dtype, "convert the module with "
                     "`.to(dtype)` first, or leave `dtype` out to mix data types")
        at = p.device
    if at.type != "cpu":
        at = check_device(owner, at)
    if group:
        owner.expect(group.place_of(at) == at,
                     f"cannot compute on {at}",
                     f"a process group for {at.type}",
                     f"one for {dist.get_backend_config(group.process_group)}",
                     "move the module to a device of that group, or call `init_process_group` "
                     "without a backend")
    return at, compare_params(owner, params, buffers)


def check_fresh(owner: Named, module: nn.Module) -> None:
    """
    ## Refuse a parameter that has a gradient, or that shares memory with another tensor

    No `zero_grad` would drop the gradient, and parameters that share memory would train apart. A
    buffer or an attribute, `self.table = self.emb.weight.data`, would keep the old values. Two
    names of one parameter are fine. Raises `RuntimeError`.
    """
    stored: dict[tuple[int, int], dict[torch.Tensor, str]] = {}
    for prefix, child in own_modules(module):
        # `nn.utils.spectral_norm` keeps such an attribute, and replaces it before each forward.
        renewed = {getattr(hook, "name", None) for hook in child._forward_pre_hooks.values()}
        kept = {name: t for name, t in vars(child).items()
                if type(t) is torch.Tensor and name not in renewed}
        for name, t in (*child._parameters.items(), *child._buffers.items(), *kept.items()):
            if t is None or type(t) not in (nn.Parameter, torch.Tensor) or t.is_meta:
                continue
            owner.expect(name in kept or not t.is_leaf or t.grad is None,
                         f"cannot shard `{prefix}{name}`", "no gradient yet",
                         "a gradient from before wrapping", "call "
                         "`zero_grad()` of the plain model or its optimizer before wrapping")
            if t.layout == torch.strided and t.numel():
                storage = (t.untyped_storage()._cdata, t.itemsize)
                stored.setdefault(storage, {}).setdefault(t, prefix + name)
    for tensors in stored.values():
        # Tensors that begin before it in the storage and reach up to it.
        near: list[torch.Tensor] = []
        # Of two that begin together, the parameter comes first, because the error is about it.
        for t in sorted(tensors, key=lambda t: (t.storage_offset(), type(t) is torch.Tensor)):
            near = [each for each in near if _last(each) >= t.storage_offset()]
            for each in near:
                trains = any(type(one) is nn.Parameter and one.requires_grad for one in (each, t))
                owner.expect(
                    not trains or not _overlap(each, t), f"cannot shard `{tensors[each]}`",
                    "a parameter with memory of its own", f"that of `{tensors[t]}`", "use the "
                    "parameter itself, as in `b.weight = a.weight`, or a copy of its values")
            near.append(t)


def _last(t: torch.Tensor) -> int:
    """
    #### The place of its last element in its storage
    """
    steps = zip(t.size(), t.stride(), strict=True)
    return int(t.storage_offset()) + sum((n - 1) * step for n, step in steps)


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """
    #### Whether two tensors, of which neither ends before the other, have an element in common

    Columns of a matrix may lie between each other.
    """
    if one.is_contiguous() and other.is_contiguous():
        return True
    first = int(min(one.storage_offset(), other.storage_offset()))
    every = torch.arange(max(_last(one), _last(other)) + 1 - first, device="cpu")
    places = [every.as_strided(t.size(), t.stride(), int(t.storage_offset()) - first)
              for t in (one, other)]
    return bool(torch.isin(*places).any())


def compare_params(owner: Named, params: Params, buffers: Buffers) -> int:
    """
    ## Make sure that all ranks have the same parameters and buffers in the same order
    """
    told = {f"parameter {i}": (names, tuple(p.shape), p.dtype, p.requires_grad)
            for i, (p, names) in enumerate(params.items())} | {
            f"buffer {i}": (name, None if b is None else (tuple(b.shape), b.dtype, b.layout))
            for i, (name, b) in enumerate(buffers.items())}
    comm = owner.comm
    how = "as it is" if comm.links is None else comm.links.told
    # Not from torch's or Python's random numbers, which are the user's.
    every = comm.gather(({"`Links`": how, **told}, secrets.randbits(31)))
    same(f"rank {comm.global_rank}: {owner.label} differs between ranks", comm.ranks,
         [told for told, _ in every],
         "build the same module, in the same order and with the same `Links`, on all ranks")
    return every[0][1]


def check_device(owner: Named, at: torch.device) -> torch.device:
    """
    ## Make sure that an accelerator is the one that this rank's collectives use

    NCCL waits for the stream of the *current* device.

    Returns the device with its number. Raises `RuntimeError`.
    """
    what = f"cannot compute on {at}"
    backend: Any = torch.get_device_module(at)
    count = backend.device_count() if backend.is_available() else 0
    owner.expect((at.index or 0) < count, what, f"one of {count} such devices", at,
                 "choose one that this process sees, or move the module to the CPU")
    current = torch.device(at.type, backend.current_device())
    if at.index is None:
        at = current
    owner.expect(at == current, what, f"the current device, {current}", at,
                 f"call `torch.{at.type}.set_device({at.index})` on this rank before "
                 "`init_process_group`, or move the module")
    is_alone = all(group.size == 1 for group in owner.comm.groups)
    bound = getattr(dist.group.WORLD, "bound_device_id", None)
    owner.expect(is_alone or bound in (None, at), what, f"{bound}, which the process group has", at,
                 f"pass `device_id={at}` to `init_process_group`, or move the module")
    return at

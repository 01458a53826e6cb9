r"""
# The norm of a sharded gradient

`clip_grad_norm_` clips the gradient of a whole model by its norm over all ranks.

Two shards of two weights have the gradients (3, 4) on rank 0 and (12, 0) on rank 1. The norm of the
whole gradient is 13. If each rank clipped to 1 by its own norm, rank 0 would divide by 5 and rank 1
by 12, and the model would step in a wrong direction. So each rank sends the norms of its shards to
all others, 8 bytes each:

$$\lVert g \rVert_p = \Big( \sum_{r=0}^{N-1} \sum_\ell \lVert g_\ell^{(r)} \rVert_p^p \Big)^{1/p}$$

All ranks combine the same numbers in the same order, so they clip by the same bits.

**Run this**: `python -m pytest tests/test_gradients.py -k norm`.

**Not covered, and what that costs**: gradients outside of their shards, and scaled ones.
`Zero3Optimizer(clip_grad_norm=)` clips these while it steps. It exchanges squared norms.
"""

from typing import Any

import torch
from torch import nn
from torch.linalg import vector_norm

from zero3.guards.checks import attributes, expect, is_sharded
from zero3.guards.contents import check_groups, stray
from zero3.guards.shard_gradients import GradientElsewhere

# Elements whose powers are added up in fp32 (see `norm_of`): 4,096 bytes, a block of a disk.
BLOCK_NUMEL = 1 << 10
# Blocks that the CPU widens at a time, so that the copies stay in its cache.
_WIDENED_BLOCKS = 1 << 10


@torch.no_grad()
def clip_grad_norm_(model: nn.Module,
                    max_norm: float,
                    norm_type: float = 2.0) -> torch.Tensor:
    r"""
    ## Clip the gradient of a whole model

    * `model` has all of its trainable parameters in `Zero3Layer`s
    * `max_norm` is the greatest norm that its mean gradient may have
    * `norm_type` is the $p$ of the norm, a positive number or `math.inf`

    Call this between backward and the optimizer's step, in place of
    `torch.nn.utils.clip_grad_norm_`. All ranks must call it: it all-gathers 8 bytes for each
    trainable shard. The stages of a pipeline, or the ranks that split weights, all-gather a flag
    and 8 bytes. Returns the norm before clipping, in fp64 and with the same bits on all ranks.

    Raises `RuntimeError` if parameters are not sharded, or not all over the same ranks, and if
    `norm_type` is not positive. Also if a gradient is scaled, held back by `no_sync()`, or not in
    its shard: `Zero3Optimizer(clip_grad_norm=)` clips those.
    """
    for line in {own["line"] for own in attributes(model) if "line" in own}:
        # Under tensor parallelism other ranks have parts of the same weights (see
        # `inject/line.py`).
        line.connect(model)
    layers: list[Any] = [m for m in model.modules() if is_sharded(m)]
    flats = [flat for layer in layers for flat in layer.flats if flat.shard.requires_grad]
    # A stage of a pipeline may have only frozen layers. Layers with parameters know who has other
    # parts.
    sharded = [layer for layer in layers if layer.flats] or layers
    some = bool(sharded) and any(sharded[0].comm.stages.gather(bool(flats)))
    expect(some, "clip_grad_norm_: no shards", "a model with a trainable Zero3Layer",
           type(model).__name__, "wrap it first", RuntimeError)
    first = sharded[0]
    _check_clip(model, first, flats, norm_type)
    # Plain tensors with the same memory, of which a norm may be taken.
    grads = {flat: grad.as_subclass(torch.Tensor) for flat in flats
             if (grad := flat.shard.grad) is not None and len(grad)}
    norms = {flat: norm_of(block_norms(grad, flat.counted, norm_type), norm_type)
             for flat, grad in grads.items()}
    zero = torch.zeros((), dtype=torch.double, device=first.device)
    mine = torch.stack([norms.get(flat, zero).to(first.device, torch.double)
                        for flat in flats]
                       or [zero])  # (shards,) fp64, device
    # Replicas have the same gradients, so count those of the first one.
    norms_of_ranks = first.comm.numbers(first, mine)[: first.comm.world_size]
    norm = vector_norm(norms_of_ranks, norm_type)
    # In a pipeline, the other stages have the gradients of other layers. Under tensor parallelism
    # the ranks have other parts of the same layers, and what all of them have counts once
    # (`comm/parts.py`).
    norm = vector_norm(first.comm.over_stages(first, norm.view(1)), norm_type)
    nn.utils.clip_grads_with_norm_([flat.shard for flat in grads], max_norm, norm)
    return norm


def _check_clip(model: nn.Module,
                first: Any,
                flats: list[Any],
                norm_type: float) -> None:
    """
    #### Refuse gradients that cannot be clipped here

    With a loss scale of 65,536 the norm would be 65,536 times too large.
    """
    names = stray(model)
    first.expect(not names, "cannot clip", "all trainable parameters in Zero3Layers", names,
                 "wrap the modules that they are in, or freeze them")
    check_groups(flat.owner() for flat in flats)
    first.expect(norm_type > 0, "cannot clip", "a positive `norm_type`, or math.inf", norm_type,
                 "pass 2.0, or leave it out")
    first.expect(not first.reducer.scaled, "cannot clip", "gradients without a loss scale",
                 "the scaled ones of a `Zero3Optimizer`",
                 "pass `clip_grad_norm=` to it, which unscales first")
    for flat in flats:
        is_elsewhere = isinstance(flat.shard.grad, GradientElsewhere)
        first.expect(flat.grad is None and not is_elsewhere, "cannot clip",
                     "gradients in the shards", "one that rests elsewhere, or "
                     "is held back by `no_sync()`", "pass `clip_grad_norm=` to `Zero3Optimizer`")


def norm_of(grad: torch.Tensor, norm_type: float = 2.0) -> torch.Tensor:
    """
    ## The norm of a gradient, `(n,)` to `()`, in fp32 or wider

    It adds powers in blocks, because one long fp32 sum is soon so large that a small power does
    not change it.
    """
    while len(grad) > BLOCK_NUMEL:
        grad = block_norms(grad, None, norm_type)
    return vector_norm(grad, norm_type, dtype=torch.promote_types(grad.dtype, torch.float32))


def block_norms(grad: torch.Tensor,
                counted: list[slice] | None,
                norm_type: float = 2.0) -> torch.Tensor:
    """
    ## The norms of blocks of a gradient, `(n,)` to `(blocks,)`, in fp32 or wider

    * `counted` are the ranges of the elements that count; `None` stands for all

    `norm_of` combines them. So a gradient has the same norm, to the last bit, if it is cut at the
    end of a block.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    # The CPU makes a wide copy, and an accelerator widens in the kernel.
    copies = grad.dtype != wide and grad.device.type == "cpu"
    norms = []
    parts = [grad] if counted is None else [grad[where] for where in counted]
    for part in parts:
        whole = len(part) // BLOCK_NUMEL * BLOCK_NUMEL
        blocks = part[:whole].view(-1, BLOCK_NUMEL)
        for rows in blocks.split(_WIDENED_BLOCKS if copies else max(1, len(blocks))):
            norms.append(vector_norm(rows, norm_type, dim=1, dtype=wide))
        if whole < len(part):
            norms.append(vector_norm(part[whole:], norm_type, dtype=wide).view(1))
    return torch.cat(norms) if norms else grad.new_zeros(1, dtype=wide)

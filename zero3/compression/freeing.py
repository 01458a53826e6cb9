r"""
# Freeing: a compressed weight lives while its module computes

`Compressed` makes the weight of a module from the stored one, and gives its memory back between
forward and backward.

A matrix product keeps the compressed weight for the backward pass, and the sharded layer frees only
the stored one. **Two layers of 100 elements** on two ranks, after forward:

| | stored, sharded | compressed |
|---|---|---|
| if autograd keeps it | 50 + 50 | 100 + 100 |
| with `Compressed` | 50 + 50 | 0 |

So the module frees it. In backward:

| event | the compressed weight |
|---|---|
| the gradient of the module's output is there | is made again, into the same storage |
| the gradients of its input and of this weight are computed | is used |
| the gradient of this weight is there | is freed |
| the gradient of the stored weight is computed | |

The layer has gathered the stored weight by then, because autograd calls all hooks of a tensor
before those of the operation that made it. With $C$ elements in the compressed weights of the layer
that computes,

$$\text{elements of compressed weights in memory} \le C$$

Masks are computed again too, by torch's own `checkpoint`. A weight is made three times in a step.

**Run this**: `python -m pytest tests/compression/test_compression.py -k freed`.

**Not covered, and what that costs**: modules that return other than one tensor or keep one, frozen
weights, and a weight that another module reads, as attention does. These stay until backward has
passed.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from zero3.compression.weights import Method
from zero3.watch import in_backward, tensors_in


class Compressed(nn.Sequential):
    """
    ## A weight, as its rules make it of the stored one
    """

    def __init__(self, methods: list[Method], module: nn.Module):
        """
        ### Free the weight of a module when it has computed
        """
        super().__init__(*methods)
        self.hooks = [module.register_forward_pre_hook(before_forward),
                      module.register_forward_hook(after_forward, always_call=True)]
        # The weights that were made since the forward of the module began; `None` outside of it.
        self.made: list[torch.Tensor] | None = None

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """
        ### Make the weight
        """
        apply_rules = super().forward
        if not torch.is_grad_enabled() or not weight.requires_grad:
            return apply_rules(weight)
        found = checkpoint(apply_rules, weight, use_reentrant=False, preserve_rng_state=False)
        # Before the first rule starts, it is the stored weight itself, which the layer frees.
        is_own = found.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
        if is_own and self.made is not None and not parametrize._cache_enabled:
            self.made.append(found)
        return found


def before_forward(module: Any, args: object) -> None:
    """
    ## A module is about to compute
    """
    module.parametrizations.weight[0].made = []


@torch.no_grad()
def after_forward(module: Any, args: object, output: object) -> None:
    """
    ## A module has computed: free its weight, until the gradient of its output is there

    * `output` is `None` if it has failed
    """
    compressed = module.parametrizations.weight[0]
    made = compressed.made or []
    compressed.made = None
    # Backward may reach another tensor first, an auxiliary loss that the module has kept.
    computed = [each.grad_fn for each in tensors_in((output, module)) if each.grad_fn]
    if not isinstance(output, torch.Tensor) or len(computed) != 1 or in_backward():
        return
    for weight in made:
        # Another tensor of the same storage: a hook that had `weight` would keep its graph alive.
        # Writing to it is no change of the saved one.
        place = weight.data
        # Not a hook of the output, which the layer's own hook, set later, would follow.
        computed[0].register_prehook(partial(_fill, module, place))
        weight.register_hook(partial(_free, place))
        _free(place)


@torch.no_grad()
def _fill(module: Any, place: torch.Tensor, grads: object) -> None:
    """
    #### Make the weight again, into the memory where autograd looks for it
    """
    stored = module.parametrizations.weight
    place.untyped_storage().resize_(place.numel() * place.itemsize)
    place.copy_(stored[0](stored.original))


def _free(place: torch.Tensor, grad: object = None) -> None:
    # With `create_graph=True` the graph of the gradients needs it.
    if not torch.is_grad_enabled():
        place.untyped_storage().resize_(0)

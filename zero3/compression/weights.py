r"""
# Compressed weights: masks and grids

`Pruned` and `Quantised` are parametrizations of `torch.nn.utils.parametrize`: a module asks for its
`weight`, and gets what they make of the stored one. `Compressed` applies them, and gives the memory
of what they make back between forward and backward.

| the module's `weight` | from the stored weight $w$ |
|---|---|
| pruned | $w$ where the mask is one, and zero elsewhere |
| quantised | the nearest multiple of a scale |

The layer shards, gathers and frees the stored weight, and each rank makes the same masks and scales
from it.

**A mask is one number.** Give each element of a weight a *key*: the bits of its magnitude, followed
by the bits of its place. With magnitudes of three bits and places of two, the weights 1, −7, 1 have
the keys

$$001\,00 = 4 \qquad 111\,01 = 29 \qquad 001\,10 = 6$$

No two keys are equal, so a threshold can prune exactly two of three: all keys up to 6.
`thresholds.py` finds it without gathering the weight. Rows, channels and heads need none.

**Gradients.** A pruned element gets no gradient. With `regrow` it gets the one that it would have
if it were left, as in [Learning N:M Fine-grained Structured Sparse
Neural Networks](https://arxiv.org/abs/2102.04010). The gradient ignores the rounding of a quantised
element: the *straight-through* estimator, of [Estimating or Propagating
Gradients](https://arxiv.org/abs/1308.3432).

**Run this**: `python -m pytest tests/compression/test_compression.py -k "fake or freed"`.

**Not covered, and what that costs**: making a mask takes 16 bytes for each element of a weight,
for a moment. Weights of fp64 have no keys. Modules that return other than one tensor or keep one,
frozen weights, and a weight that another module reads, as attention does: their compressed weights
stay until backward has passed.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from zero3.compression.rules import Prune
from zero3.guards.checks import expect
from zero3.watch import in_backward, tensors_in

Weighted = Any


class Method(nn.Module):
    """
    ## What a rule does to one weight or input, and how far its schedule is

    `state`, a buffer, has the number of the optimizer's steps, and the threshold: the greatest key
    that is pruned, or −1, which is below all keys.
    """

    state: torch.Tensor
    # A graph would keep the step and the threshold of the day it was traced.
    is_traceable = False
    compression: Any

    def __init__(self, rule: Any, module: Weighted):
        super().__init__()
        self.rule = rule
        self.register_buffer("state", torch.tensor([0, -1], device=module.weight.device))
        # The steps as Python's number, with the buffer and the version that they are of. So reading
        # them waits for the device once in a step.
        self._known: tuple[torch.Tensor | None, int, int] = (None, 0, 0)

    def __setstate__(self, state: dict) -> None:
        # The buffer of a copy begins with a version of its own.
        super().__setstate__(state | {"_known": (None, 0, 0)})

    @property
    def steps(self) -> int:
        """
        ### The steps that the optimizer has taken
        """
        # Loading a checkpoint raises the version of the state, or replaces it.
        if (self._known[0] is not self.state
                or self._known[1] != self.state._version):
            self._known = (self.state, self.state._version, int(self.state[0]))
        return self._known[2]


# ------------------------------------------------------------------------------------------- masks


class Pruned(Method):
    """
    ## A weight without its least important parts
    """

    def __init__(self, rule: Prune, module: Weighted):
        """
        ### Prune the weight of a module
        """
        super().__init__(rule, module)
        # A tuple is not registered.
        self._module = (module,)
        self.shape = module.weight.shape

    @property
    def original(self) -> torch.Tensor:
        """
        ### The stored weight
        """
        return self._module[0].parametrizations.weight.original

    @property
    def count(self) -> int:
        """
        ### How many parts are pruned now

        One is always left: nine tenths of four rows are three of them.
        """
        return min(round(self.rule.sparsity_at(self.steps) * self.units()),
                   self.units() - 1)

    def units(self) -> int:
        """
        ### How many parts there are
        """
        return self.shape.numel()

    def kept(self) -> torch.Tensor:
        """
        ### Which elements are left: bool, of the weight's shape or one that expands to it
        """
        raise NotImplementedError

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """
        ### The weight with zeros
        """
        return self.masked(weight, self.kept()) if self.count else weight

    def masked(self, values: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """
        ### Zeros where a part is pruned, with the gradient that the rule asks for
        """
        found = torch.where(kept, values, 0)
        # With `regrow`, the value of `found` and the gradient of all values.
        return found.detach() + (values - values.detach()) if self.rule.regrow else found


class PrunedElements(Pruned):
    """
    ## Single elements up to a threshold are pruned
    """

    def __init__(self, rule: Prune, module: Weighted):
        """
        ### Prune elements of a weight
        """
        super().__init__(rule, module)
        # Whose elements share its threshold, in the order in which they are numbered.
        self.sharers = [self]
        # Of the weight, when the threshold was found here.
        self.dtype: torch.dtype | None = None

    def units(self) -> int:
        """
        ### How many elements share the threshold
        """
        return sum(each.shape.numel() for each in self.sharers)

    @torch.no_grad()
    def kept(self) -> torch.Tensor:
        """
        ### Those above the threshold

        Raises `RuntimeError` if the weight had another data type then, and so other keys.
        """
        dtype = self.original.dtype
        expect(self.dtype in (None, dtype), "a pruned weight", f"{self.dtype}, of which its "
               "threshold was found", dtype, "convert a model before `compress`, or call "
               "`find_thresholds()` of what `compress` has returned", RuntimeError)
        keys = self.keys(self.original.reshape(-1))
        return (keys > self.state[1]).view(self.shape)

    def keys(self, values: torch.Tensor, first: int = 0) -> torch.Tensor:
        """
        ### Numbers in the order in which elements are pruned: `(n,)` int64, none twice

        * `values` are `(n,)`, a part of the stored weight
        * `first` is the place of the first of them in this weight
        """
        first += sum(each.shape.numel() for each in self.sharers[: self.sharers.index(self)])
        integer = getattr(torch, f"int{8 * values.element_size()}")
        bits = values.detach().contiguous().view(integer).long()
        bits &= torch.iinfo(integer).max  # no sign
        places = torch.arange(first, first + len(bits), device=bits.device)
        bits <<= self.units().bit_length()
        return bits.bitwise_or_(places)


class PrunedParts(Pruned):
    """
    ## Whole rows, channels or heads
    """

    def __init__(self, rule: Prune, module: Weighted):
        """
        ### Prune parts of a weight along an axis
        """
        self.axis = axis_of(rule, module)
        super().__init__(rule, module)

    def units(self) -> int:
        """
        ### How many rows, channels or heads there are
        """
        return self.rule.heads or self.shape[self.axis]

    @torch.no_grad()
    def kept_units(self) -> torch.Tensor:
        """
        ### Which rows, channels or heads are left: `(units,)` bool
        """
        sizes = (self.original.abs()
                 .transpose(0, self.axis)
                 .reshape(self.units(), -1)
                 .sum(dim=1, dtype=torch.float64))
        kept = torch.ones_like(sizes, dtype=torch.bool)
        kept[sizes.argsort(stable=True)[: self.count]] = False
        return kept

    def kept(self) -> torch.Tensor:
        """
        ### The elements of those that are left, `(rows, 1, ...)` or `(1, columns, ...)`
        """
        along = self.kept_units().repeat_interleave(self.shape[self.axis] // self.units())
        return along.view(-1, *[1] * (len(self.shape) - 1)).transpose(0, self.axis)


def axes(module: nn.Module) -> tuple[int, int]:
    """
    ## The axes of a layer's weight that are its outputs and its inputs

    An embedding, a transposed convolution and Hugging Face's `Conv1D` keep inputs first.
    """
    has_inputs_first = isinstance(module, (nn.Embedding, nn.EmbeddingBag,
                                           nn.modules.conv._ConvTransposeNd))
    is_conv1d = any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)
    return (1, 0) if has_inputs_first or is_conv1d else (0, 1)


def axis_of(rule: Prune, module: nn.Module) -> int:
    """
    ## The axis of a weight that a rule for rows, channels or heads prunes
    """
    return axes(module)[0 if rule.kind == "row" else 1]


class PrunedBias(nn.Module):
    """
    ## The bias of a layer with pruned rows: zero where they are
    """

    def __init__(self, pruned: PrunedParts):
        """
        ### Follow a pruned weight
        """
        super().__init__()
        self.follows = (pruned,)

    def forward(self, bias: torch.Tensor) -> torch.Tensor:
        """
        ### The bias with zeros
        """
        (pruned,) = self.follows
        return pruned.masked(bias, pruned.kept_units()) if pruned.count else bias


# ------------------------------------------------------------------------------------------- grids


@dataclass(frozen=True)
class Grid:
    r"""
    ## The values that the rows of a weight are rounded to

    A code $c$ of a row stands for $s (c - z)$. With 1 bit there are two values, $-s$ and $s$.
    """

    bits: int
    scales: torch.Tensor  # (rows,) fp32, or the weight's data type for 1 bit
    zeros: torch.Tensor  # (rows,) int32
    least: int = 0
    most: int = 1

    def codes(self, rows: torch.Tensor) -> torch.Tensor:
        """
        ### The codes of values that are rounded already, above the least one: uint8
        """
        if self.bits == 1:
            return (rows > 0).to(torch.uint8)
        codes = (rows / self.scales[:, None]).round() + self.zeros[:, None]
        return (codes - self.least).to(torch.uint8)


@torch.no_grad()
def grid(low: torch.Tensor,
         high: torch.Tensor,
         bits: int,
         symmetric: bool) -> Grid:
    r"""
    ## The multiples of a scale that cover a range

    * `low` and `high` are the least and the greatest values, `(rows,)`

    Of $b$ bits, symmetric codes use one less than there are, so that zero is in the middle:

    $$s = \frac{\max |w|}{2^{b-1} - 1} \qquad \text{or} \qquad
    s = \frac{\max(w, 0) - \min(w, 0)}{2^b - 1}, \quad z = -\frac{\min(w, 0)}{s}$$

    Zero is always one of the values, so that what was pruned stays zero.
    """
    # A row of zeros takes any scale but zero.
    tiny = torch.finfo(torch.float32).tiny
    if symmetric:
        most = 2 ** (bits - 1) - 1
        scales = (torch.maximum(low.abs(), high.abs()).float() / most).clamp(min=tiny)
        return Grid(bits, scales, torch.zeros_like(scales, dtype=torch.int32), -most, most)
    most = 2**bits - 1
    low = low.float().clamp(max=0)
    scales = ((high.float().clamp(min=0) - low) / most).clamp(min=tiny)
    # A row with a NaN has NaN as its scale, and its zero has to be a code.
    return Grid(bits, scales, (-low / scales).nan_to_num().round().int(), 0, most)


class Quantised(Method):
    """
    ## A weight in few bits
    """

    def grid(self, weight: torch.Tensor) -> Grid | None:
        """
        ### What the weight is rounded to now, or `None` before the start

        With 1 bit the scale is the mean magnitude of what is not zero in the row, as in
        [XNOR-Net](https://arxiv.org/abs/1603.05279), section 3.1.
        """
        bits = self.rule.bits_at(self.steps)
        if bits is None:
            return None
        # (rows, neighbours), which share a scale
        rows = weight.detach().reshape(-1, self.rule.group or weight[0].numel())
        if bits > 1:
            return grid(rows.amin(dim=1), rows.amax(dim=1),
                        bits, self.rule.symmetric)
        means = (rows.abs().sum(dim=1)
                 / (rows != 0).sum(dim=1).clamp(min=1))
        return Grid(bits, means, torch.zeros_like(means, dtype=torch.int32))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """
        ### The weight, rounded
        """
        to = self.grid(weight)
        if to is None:
            return weight
        rows = weight.reshape(len(to.scales), -1)
        if to.bits == 1:
            # torch has no operation for signs. Their value, with the gradient of the weight.
            signs = rows.detach().sign() * to.scales[:, None]
            rounded = signs + (rows - rows.detach())
        else:
            rounded = torch.fake_quantize_per_channel_affine(
                rows, to.scales, to.zeros, 0, to.least, to.most)
        return rounded.view(weight.shape)


class QuantisedInput(Method):
    """
    ## The input of a layer in 8 bits, within the range of its batch
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### The input, rounded
        """
        expect(x.is_floating_point(), "an input cannot be quantised", "floats", x.dtype,
               "leave this layer out of `Quantize(of=\"input\")`", TypeError)
        # A batch of no rows has no range.
        if self.rule.bits_at(self.steps) is None or not x.numel():
            return x
        low, high = x.detach().aminmax()
        to = grid(low.view(1), high.view(1), self.rule.bits, self.rule.symmetric)
        return torch.fake_quantize_per_tensor_affine(
            x, to.scales[0], to.zeros[0], to.least, to.most)


# ----------------------------------------------------------------------------------------- freeing


class Compressed(nn.Sequential):
    r"""
    ## A weight, as its rules make it of the stored one, while its module computes

    A matrix product keeps the compressed weight for the backward pass, and the sharded layer frees
    only the stored one. **Two layers of 100 elements** on two ranks, after forward:

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
    before those of the operation that made it. With $C$ elements in the compressed weights of the
    layer that computes,

    $$\text{elements of compressed weights in memory} \le C$$

    Masks are computed again too, by torch's own `checkpoint`. A weight is made three times in a
    step.
    """

    def __init__(self, methods: list[Method], module: nn.Module):
        """
        ### Free the weight of a module when it has computed
        """
        super().__init__(*methods)
        self.hooks = [module.register_forward_pre_hook(self.before_forward),
                      module.register_forward_hook(self.after_forward, always_call=True)]
        # The weights that were made since the forward of the module began; `None` outside of it.
        self.made: list[torch.Tensor] | None = None

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """
        ### Make the weight
        """
        if not torch.is_grad_enabled() or not weight.requires_grad:
            return super().forward(weight)
        found = checkpoint(
            super().forward,
            weight,
            use_reentrant=False,
            preserve_rng_state=False)
        # Before the first rule starts, it is the stored weight itself, which the layer frees.
        is_own = found.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr()
        if is_own and self.made is not None and not parametrize._cache_enabled:
            self.made.append(found)
        return found

    def before_forward(self, module: nn.Module, args: object) -> None:
        """
        ### The module is about to compute
        """
        self.made = []

    @torch.no_grad()
    def after_forward(self, module: nn.Module, args: object, output: object) -> None:
        """
        ### It has computed: free its weight, until the gradient of its output is there

        * `output` is `None` if it has failed
        """
        made = self.made or []
        self.made = None
        # Backward may reach another tensor first, an auxiliary loss that the module has kept.
        computed = [each.grad_fn for each in tensors_in((output, module)) if each.grad_fn]
        if not isinstance(output, torch.Tensor) or len(computed) != 1 or in_backward():
            return
        for weight in made:
            # Another tensor of the same storage: a hook that had `weight` would keep its graph
            # alive. Writing to it is no change of the saved one.
            place = weight.data
            # Not a hook of the output, which the layer's own hook, set later, would follow.
            computed[0].register_prehook(partial(self._fill, module, place))
            weight.register_hook(partial(_free, place))
            _free(place)

    @torch.no_grad()
    def _fill(self, module: Weighted, place: torch.Tensor, grads: object) -> None:
        """
        #### Make the weight again, into the memory where autograd looks for it
        """
        place.untyped_storage().resize_(place.numel() * place.itemsize)
        place.copy_(self(module.parametrizations.weight.original))


def _free(place: torch.Tensor, grad: object = None) -> None:
    # With `create_graph=True` the graph of the gradients needs it.
    if not torch.is_grad_enabled():
        place.untyped_storage().resize_(0)

r"""
# Rules: which compression, and when

`Quantize` and `Prune` say what becomes of a weight, and from which optimizer step to which.

A model that loses bits or elements at once loses accuracy too. So it loses them *while it trains*.
Take four weights, half of them pruned and the others in 4 bits:

| | | | | | in a file |
|---|---|---|---|---|---|
| the weight | 0.1 | −0.7 | 0.4 | −0.2 | 16 bytes |
| pruned: the two smallest are zero | 0 | −0.7 | 0.4 | 0 | |
| quantised: multiples of 0.1, from −7 to 7 | 0 | −0.7 | 0.4 | 0 | |
| stored: which are left, and their codes | 0 1 1 0 | −7 | 4 | | 2 bytes, and the scale |

**Sparsity rises by a cubic.** Between the steps $t_0$ and $t_1$ the pruned part $s$ of a weight
rises to $s_1$, fast at first and slowly in the end:

$$s(t) = s_1 \left(1 - \left(1 - \frac{t - t_0}{t_1 - t_0}\right)^3\right)$$

This is equation 1 of [To Prune, or Not to Prune](https://arxiv.org/abs/1710.01878). With
$s_1 = \frac12$, $t_0 = 0$ and $t_1 = 4$ it is 0, 0.29, 0.44, 0.49, 0.5.

**Bits fall in equal parts.** From 8 to 4 bits in four steps they are 8, 7, 6, 5, 4.

**Run this**: `python -m pytest tests/compression/test_compression.py -k schedule`.

**Not covered, and what that costs**: a schedule that looks at the loss. Choose the end early
enough, so that training goes on with the final sparsity and bits.
"""

import math
from dataclasses import dataclass

from zero3.guards.checks import MOST, expect, whole

KINDS = ("element", "row", "channel", "head")


def progress(step: int, start: int, end: int | None) -> float:
    """
    ## How much of a schedule is behind, from 0 to 1
    """
    if end is None or end == start:
        return float(step >= start)
    return min(max((step - start) / (end - start), 0.0), 1.0)


@dataclass(frozen=True)
class Quantize:
    """
    ## Compute with fewer bits

    * `bits` of a weight are 8, 4, 2 or 1; those of an input are 8
    * `group` is how many neighbours of a row share a scale; left out, a whole row does
    * `symmetric` values are multiples of a scale on both sides of zero; otherwise zero may be
      anywhere in the range
    * `start` is the optimizer's step from which weights are rounded. At `end` the bits have fallen
      from `start_bits` to `bits`; left out, they are `bits` from the start
    * `of` is "weight" or "input". An input is rounded within the range of this rank's rows, so
      ranks with other rows round differently

    Raises `ValueError` for anything else.
    """

    bits: int = 8
    group: int | None = None
    symmetric: bool = True
    start: int = 0
    end: int | None = None
    start_bits: int | None = None
    of: str = "weight"

    def __post_init__(self) -> None:
        _check_steps("Quantize", self.start, self.end)
        is_input = self.of == "input"
        for name, good, expected, cure in (
                ("of", self.of in ("weight", "input"),
                 "weight or input", "pass one of the two"),
                ("bits", whole(self.bits, 8 if is_input else 1, 8) and self.bits in (8, 4, 2, 1),
                 "8 for inputs; 8, 4, 2 or 1 for weights", "pass one of these"),
                ("group", self.group is None or (whole(self.group, 1) and not is_input),
                 "a number of neighbours in a row of a weight",
                 "pass such a number, or leave it out"),
                ("symmetric", self.symmetric or self.bits != 1,
                 "True for 1 bit, which is a sign", "pass `symmetric=True`, or more bits")):
            expect(good, f"Quantize: `{name}`", expected, repr(getattr(self, name)), cure)
        expect(self.start_bits is None or (whole(self.start_bits, self.bits, 8)
                                           and self.end is not None),
               "Quantize: `start_bits`", f"from {self.bits} to 8, and an `end`",
               f"{self.start_bits!r} and the end {self.end}", "pass both, or leave both out")

    def bits_at(self, step: int) -> int | None:
        """
        ### The bits after so many steps, or `None` before the start
        """
        if step < self.start:
            return None
        more = 0 if self.start_bits is None else self.start_bits - self.bits
        # For floats, 7 * (6 / 7) is 6, and 7 * (1 - 6 / 7) more than 1.
        return self.bits + more - math.floor(more * progress(step, self.start, self.end))


@dataclass(frozen=True)
class Prune:
    """
    ## Compute with fewer elements

    * `sparsity` is the part that is pruned, from 0 to below 1
    * `kind` is "element"; "row", an output of the layer with its bias; "channel", an input; or
      "head", a block of inputs
    * `start` and `end` are steps of the optimizer; without `end` the sparsity is reached at once
    * `scope` is "layer", or "global" for elements: then all weights that its pattern matches share
      one threshold
    * `regrow` gives pruned elements the gradient that they would have if they were left
    * `heads` is how many heads the inputs are made of
    * `follows` are other layers that `clean` makes smaller too, by their names beside this one: for
      rows, those that read them; for channels and heads, those that write them
    * `counts` are attributes that have the number of heads, by their names beside this layer

    Raises `ValueError` for anything else.
    """

    sparsity: float = 0.5
    kind: str = "element"
    start: int = 0
    end: int | None = None
    scope: str = "layer"
    regrow: bool = False
    heads: int | None = None
    follows: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_steps("Prune", self.start, self.end)
        names = ("a tuple of names", 'pass one, `("second",)` for instance')
        for name, good, expected, cure in (
                ("kind", self.kind in KINDS,
                 f"one of {KINDS}", "pass one of these"),
                ("sparsity", 0 <= self.sparsity < 1,
                 "from 0 to below 1", "pass the part to prune"),
                ("scope", self.scope == "layer" or (self.scope, self.kind) == ("global", "element"),
                 '"layer", or "global" for elements', "pass one of these"),
                ("heads", whole(self.heads, 2) if self.kind == "head" else self.heads is None,
                 "how many there are, for heads only", "pass it with that kind"),
                ("follows", isinstance(self.follows, tuple), *names),
                ("counts", isinstance(self.counts, tuple), *names),
                ("follows", not self.follows or self.kind != "element",
                 "layers that follow rows, channels or heads", "leave it out")):
            expect(good, f"Prune: `{name}`", expected, repr(getattr(self, name)), cure)

    def sparsity_at(self, step: int) -> float:
        """
        ### The sparsity after so many steps
        """
        return self.sparsity * (1 - (1 - progress(step, self.start, self.end)) ** 3)


def _check_steps(who: str, start: int, end: int | None) -> None:
    """
    #### Refuse a schedule that ends before it starts
    """
    expect(whole(start, 0, MOST) and (end is None or whole(end, start, MOST)), f"{who}: `start` "
           "and `end`", "whole numbers of steps, the end not before the start",
           f"{start!r} and {end!r}", "pass such numbers, or leave `end` out")

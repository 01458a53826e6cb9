r"""
# Encodings: fewer bytes for the same numbers

`Int8` and `Int4` turn floats into fewer bits, and back.

In *block-wise quantisation* 64 neighbours share one scale, and each becomes a small integer.

**Four numbers in 4 bits.** An `Int4` has the values −7 to 7. The largest of these numbers is 3.5,
so the scale is $3.5 / 7 = 0.5$:

| | | | | |
|---|---|---|---|---|
| value | 0.6 | −1.3 | 3.5 | 0 |
| divided by 0.5 | 1.2 | −2.6 | 7 | 0 |
| **sent, 4 bits each** | **1** | **−3** | **7** | **0** |
| times 0.5 | 0.5 | −1.5 | 3.5 | 0 |
| error | 0.1 | 0.2 | 0 | 0 |

A number is rounded to the nearest multiple of the scale $s$, so it moves by at most $s/2$. With $q$
positive values (7 or 127) the scale is the block's largest size over $q$. The scale is rounded to
16 bits (bfloat16), by at most one part in 256, so the largest number still rounds to $q$:

$$|x - \hat{x}| \;\le\; \frac{s}{2} \;\le\; \frac{\max |x|}{2 q} \left(1 + 2^{-8}\right)$$

For `Int8` the error is at most 0.4 % of the block's largest number, for `Int4` 7.2 %. An element
costs

$$1 + \frac{2}{64} = 1.03 \ \text{bytes in 8 bits} \qquad
\frac12 + \frac{2}{64} = 0.53 \ \text{bytes in 4 bits}$$

Four more properties matter:

* Zero stays zero, so padding stays zero.
* An infinity or a NaN makes its whole block infinite or NaN, so an overflow is still found.
* Decoded finite numbers encode to the same bytes again.
* A finite number stays finite. The largest fp16 number, 65504, over 127 is rounded up to the scale
  516, and 127 · 516 would be infinite in fp16. So the scale is the next lower one, 512.

There are two exceptions to the bound. A block with such a lower scale moves by up to $s$. A block
becomes zeros if its largest number is below
$q \cdot 2^{-126}$, which is about $10^{-36}$ in 8 bits.

Block-wise quantisation is from [8-bit Optimizers](https://arxiv.org/abs/2110.02861), section 2.1;
[ZeRO++](https://arxiv.org/abs/2306.10209), sections 3.1 and 3.3, uses it between ranks.

**Write your own**: an `Encoding` is any object with the three methods below.

**Run this**: `python -m pytest tests/comm/test_encodings.py` measures the errors.

**Not covered, and what that costs**: error feedback, which would add the rounding error of one
gradient to the next.
"""

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from zero3.guards.checks import expect, whole


class Encoding(Protocol):
    """
    ## Encoding: how rows of floats become bytes

    It encodes each row independently, gives the same bytes on all ranks, keeps zeros, and leaves
    `rows` alone. Make it a frozen dataclass, so that two with the same arguments are equal.
    """

    # How many bytes a row of `numel` elements takes.
    def nbytes(self, numel: int) -> int: ...

    # (rows, numel) floats to (rows, nbytes) uint8, on the same device.
    def encode(self, rows: torch.Tensor) -> torch.Tensor: ...

    # And back, to (rows, numel) fp32. It may be a view of more memory.
    def decode(self, coded: torch.Tensor, numel: int) -> torch.Tensor: ...


def is_encoding(thing: Any) -> bool:
    """
    ## Whether this is an encoding: it can be hashed, and does on zeros what it has to do

    The class `Int8`, without parentheses, is none.
    """
    zeros = torch.zeros(2, 3, device="cpu")
    try:
        hash(thing)
        code = thing.encode(zeros)
        return (code.dtype == torch.uint8 and code.shape == (2, thing.nbytes(3))
                and code.is_contiguous() and torch.equal(thing.decode(code, 3), zeros))
    except (AttributeError, TypeError, ValueError, RuntimeError):
        return False


@dataclass(frozen=True)
class Int8:
    """
    ## 8 bits for an element, and 16 for each block

    * `block` is how many neighbours share a scale; an even number

    Raises `ValueError` for another `block`.
    """

    block: int = 64
    levels: ClassVar[int] = 127  # the positive values

    def __post_init__(self) -> None:
        # A block has to fit into memory.
        is_even = whole(self.block, 2, 1 << 20) and self.block % 2 == 0
        expect(is_even, type(self).__name__, "`block`, an even number from 2 to 2^20",
               repr(self.block), "pass such a number, or leave it out")

    def nbytes(self, numel: int) -> int:
        """
        ### The bytes of a row: its codes, then its scales
        """
        return self._code_bytes(numel) + 2 * self._blocks(numel)

    @torch.no_grad()
    def encode(self, rows: torch.Tensor) -> torch.Tensor:
        """
        ### Encode: `(rows, numel)` floats to `(rows, nbytes)` uint8
        """
        count, numel = rows.shape
        blocks = rows.new_zeros(count, self._blocks(numel), self.block, dtype=torch.float32)
        flat = blocks.flatten(1)  # the same memory, (rows, elements with padding)
        flat[:, :numel] = rows
        # `abs()` would be another copy.
        largest = torch.maximum(blocks.amax(dim=2), -blocks.amin(dim=2))
        scales = blocks.new_empty(blocks.shape[:2], dtype=torch.bfloat16)
        scales.copy_(largest / self.levels)
        # Below this number a bfloat16 has fewer digits, and codes could be too large.
        scales.masked_fill_(scales < torch.finfo(scales.dtype).tiny, 0)
        divisors = scales.float()
        above = divisors * self.levels > torch.finfo(rows.dtype).max
        # To ask saves a pass over all blocks, but on an accelerator the host would wait.
        lowers = rows.device.type != "cpu" or bool(above.any())
        if lowers:
            # A finite number stays finite.
            scales.view(torch.int16).sub_((above & scales.isfinite()).to(torch.int16))
            divisors = scales.float()
        # A block of zeros has the scale 0. Dividing by infinity gives the codes 0.
        divisors.masked_fill_(scales == 0, math.inf)
        blocks.div_(divisors.unsqueeze(2)).round_()
        if lowers:
            # Only a lower scale makes codes too large.
            blocks.clamp_(-self.levels, self.levels)
        return torch.cat([self._pack(flat, numel), scales.view(torch.uint8)], dim=1)

    @torch.no_grad()
    def decode(self, coded: torch.Tensor, numel: int) -> torch.Tensor:
        """
        ### Decode: `(rows, nbytes)` uint8 to `(rows, numel)` fp32
        """
        code_bytes = self._code_bytes(numel)
        # A copy, because a view of two bytes must begin at an even one.
        scales = coded.new_empty(len(coded), self._blocks(numel), dtype=torch.bfloat16)
        scales.view(torch.uint8).copy_(coded[:, code_bytes:])
        blocks = coded.new_empty(*scales.shape, self.block, dtype=torch.float32)
        self._unpack(coded[:, :code_bytes], blocks.flatten(1), numel)
        return blocks.mul_(scales.float().unsqueeze(2)).flatten(1)[:, :numel]

    def _blocks(self, numel: int) -> int:
        """
        #### The number of blocks in a row; the last one may have padding
        """
        return -(-numel // self.block)

    def _code_bytes(self, numel: int) -> int:
        """
        #### The bytes of a row without its scales
        """
        return numel

    def _pack(self, flat: torch.Tensor, numel: int) -> torch.Tensor:
        """
        #### Whole numbers in fp32 to `(rows, code_bytes)` uint8
        """
        return flat[:, :numel].to(torch.int8).view(torch.uint8)

    def _unpack(self, codes: torch.Tensor,
                flat: torch.Tensor,
                numel: int) -> None:
        """
        #### And back, into `flat`
        """
        flat[:, :numel] = codes.view(torch.int8)


@dataclass(frozen=True)
class Int4(Int8):
    r"""
    ## 4 bits for an element, and 16 for each block

    Two neighbours share a byte: the first has its lower half. A code $c$ is stored as $c + 8$, so
    −7 to 7 become 1 to 15:

    $$\text{byte} = (c_0 + 8) + 16 \, (c_1 + 8) = c_0 + 16 \, c_1 + 136$$
    """

    levels: ClassVar[int] = 7

    def _code_bytes(self, numel: int) -> int:
        return (numel + 1) // 2

    def _pack(self, flat: torch.Tensor, numel: int) -> torch.Tensor:
        # The last number of an odd row shares its byte with padding.
        second = flat[:, 1 : numel + 1 : 2]
        codes = torch.add(flat[:, :numel:2], second, alpha=16)
        return codes.add_(136).to(torch.uint8)

    def _unpack(self, codes: torch.Tensor,
                flat: torch.Tensor,
                numel: int) -> None:
        flat[:, :numel:2] = codes & 15
        flat[:, 1 : numel + 1 : 2] = codes >> 4
        flat[:, : numel + 1].sub_(8)

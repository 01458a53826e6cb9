r"""
# Stored weights: codes in their bits

`Stored` keeps a weight in codes of 8, 4, 2 or 1 bits, and makes it from them whenever its module
computes.

**Four weights**, two of them pruned, the others in 4 bits:

| | | bytes |
|---|---|---|
| the weight, 0 −0.7 0.4 0 in fp32 | | 16 |
| `mask`: which are left, a bit for each | 0 1 1 0 | 1 |
| `codes`: of those that are left, 4 bits for each, 7 added | 0 11 | 1 |
| `scales`: one for a row | 0.1 | 4 |

With a weight of $n$ elements of which $m$ are left, in $b$ bits, with $g$ neighbours to a scale:

$$\underbrace{\lceil n / 8 \rceil}_{\text{mask, if pruned}} + \lceil m b / 8 \rceil +
4\, \frac{n}{g} \quad \text{bytes}$$

and one more for each scale if codes are not symmetric. The values are those that training computed
with, bit for bit, and `clean` compares them.

**Reading the file without this package.** The file's metadata have an entry `zero3`, whose
`weights` say of each weight its `shape`, `dtype` and `bits`, and `least`, which is added to each
code. Then the `zeros` are subtracted, if there are any. With 1 bit the codes 0 and 1 stand for −1
and 1. A symmetric weight of 4 bits, none of it pruned, is

    byte = tensors["0.weight.codes"]
    codes = torch.stack([byte & 15, byte >> 4], dim=1).view(-1)[:numel].float() + least
    weight = (codes.view(rows, -1) * tensors["0.weight.scales"]).view(shape)

**Run this**: `python -m pytest tests/compression/test_clean.py -k bits`.

**Not covered, and what that costs**: kernels that compute with codes, such as those of torchao. So
the cleaned model is small at rest and not fast.
"""

import torch
from torch import nn

from zero3.compression.weights import Grid


class Stored(nn.Module):
    """
    ## A weight from its codes

    A parametrization, whose `parametrizations.weight.original` has the codes.
    """

    mask: torch.Tensor | None
    scales: torch.Tensor | None
    zeros: torch.Tensor | None

    def __init__(self, shape: torch.Size,
                 dtype: torch.dtype,
                 bits: int | None,
                 least: int,
                 mask: torch.Tensor | None = None,
                 scales: torch.Tensor | None = None,
                 zeros: torch.Tensor | None = None):
        """
        ### Prepare for a weight

        * `shape` and `dtype` are those of the weight
        * `bits` are those of a code; `None` if the elements are stored themselves
        * `least` is added to each code
        * `mask` is uint8, a bit for each element; `scales` are fp32 and `zeros` uint8, each
          `(scales, 1)`, with one for each group of neighbours
        """
        super().__init__()
        self.shape = shape
        self.dtype = dtype
        self.bits = bits
        self.least = least
        self.register_buffer("mask", mask)
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", zeros)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        """
        ### The weight
        """
        numel = self.shape.numel()
        kept = None if self.mask is None else unpack(self.mask, 1)[:numel].bool()
        numbers = (codes if self.bits is None else unpack(codes, self.bits))[:numel].to(
            # As wide as in training.
            torch.promote_types(self.dtype, torch.float32))
        if kept is not None:
            numbers = numbers.new_zeros(numel).masked_scatter(kept, numbers)
        if self.scales is not None:
            if self.bits == 1:
                numbers = 2 * numbers - 1
            zeros = 0 if self.zeros is None else self.zeros.float()
            rows = numbers.view(len(self.scales), -1) + self.least
            numbers = ((rows - zeros) * self.scales).view(-1)
        if kept is not None:
            # A missing code counts as zero, which stands for another number.
            numbers = torch.where(kept, numbers, 0)
        return numbers.view(self.shape).to(self.dtype)


def store(weight: torch.Tensor, kept: torch.Tensor | None, grid: Grid | None
          ) -> tuple[Stored, torch.Tensor]:
    """
    ## A weight as codes, `(bytes,)` uint8, or as elements, if it has no grid

    * `kept` says which elements are left, of the weight's shape; left out, all
    * `grid` is what the weight was rounded to
    """
    # Codes of 3 bits are stored in 4.
    bits = None if grid is None else next(each for each in (1, 2, 4, 8) if each >= grid.bits)
    stored = Stored(
        weight.shape,
        weight.dtype,
        bits,
        grid.least if grid else 0)
    codes = weight.reshape(-1)
    if grid is not None:
        stored.scales = grid.scales.float().view(-1, 1)
        if grid.bits > 1 and grid.least == 0:
            stored.zeros = grid.zeros.to(torch.uint8).view(-1, 1)
        codes = grid.codes(weight.reshape(len(stored.scales), -1)).view(-1)
    if kept is not None:
        stored.mask = pack(kept.reshape(-1).to(torch.uint8), 1)
        codes = codes[kept.reshape(-1)]
    return stored, codes.clone() if bits is None else pack(codes, bits)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """
    ## Several codes to a byte, the first one in its lowest bits

    * `codes` are `(n,)` uint8, each below `2**bits`
    """
    each = 8 // bits
    padded = torch.cat([codes, codes.new_zeros(-len(codes) % each)]).view(-1, each)
    shifts = torch.arange(0, 8, bits, device=codes.device)
    return (padded.long() << shifts).sum(dim=1).to(torch.uint8)


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """
    ## The codes, `(n,)` uint8, with those that pad the last byte
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed[:, None] >> shifts & (2**bits - 1)).view(-1)

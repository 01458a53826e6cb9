r"""
# Activations in numbers: what autograd saves

`saved_bytes` counts from shapes what autograd saves in each layer of a chain, and `gpt2_bytes` does
so by formula for GPT-2. `activations` tells how much of it leaves memory and comes back.

**A block of GPT-2** with $d = 4$ features and $a = 2$ heads gets $b = 2$ rows of $s = 3$ tokens. It
saves for each token:

| | numbers |
|---|---|
| norms: two inputs, two outputs | $4d$ = 16 |
| queries, keys, values, and what attention returns | $4d$ = 16 |
| network: five tensors of $4d$ features | $20d$ = 80 |
| scores: a row of each head | $as$ = 6 |

These are 118 numbers for each of 6 tokens. In fp32, with $w = 4$ bytes each, a block saves

$$w\,b\,s\,(28d + as) = 4 \cdot 2 \cdot 3 \cdot 118 = 2832 \text{ bytes}$$

Three such blocks and a head save $3 \cdot 2832 + 2wbsd = 8688$ bytes. With `activations=` all
blocks leave, 8496 bytes, and two come back, 5664. At most two are in memory, 5664 bytes.

**Run this**: `python -m zero3.estimate --params 8b --ranks 64 --sequence 2048`.

**Not covered, and what that costs**: statistics of norms, tokens, masks, dropout, logits and the
loss, which formulas leave out; `saved_bytes` counts all that layers save. Fused kernels save less:
attention without scores drops $as$. `saved_bytes` takes plain chains, of which each layer sees the
output of the one before, and counts as the meta device saves. Kernels of a GPU may save otherwise.
With `keep` above 1 a storage that a later call saves again may be counted twice.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from zero3.estimate.formulas import ELEMENT_BYTES

# Features of a head of GPT-2, in all its sizes.
HEAD_WIDTH = 64


class Moved(NamedTuple):
    """
    ## What a step moves between the device and another tier, and the most that it holds
    """

    out_bytes: int = 0
    in_bytes: int = 0
    memory_bytes: int = 0


def activations(saved_bytes: Sequence[int], keep: int = 1) -> Moved:
    r"""
    ## Activations that rest elsewhere, with `activations=`

    * `saved_bytes` are the bytes that autograd saves in each call, in the order of forward
    * `keep` is how many of the last calls stay. Calls that save nothing do not count

    Three calls save 10, 20 and 40 bytes. The last one stays, so 30 bytes leave. Backward begins
    before the second one is freed, so 10 come back. At most $20 + 40$ are in memory.
    """
    calls = [nbytes for nbytes in saved_bytes if nbytes]
    together = [sum(calls[i : i + keep + 1]) for i in range(len(calls))]
    return Moved(sum(calls[:-keep]), sum(calls[: -keep - 1]), max(together, default=0))


def saved_bytes(layers: Iterable[nn.Module],
                inputs: torch.Tensor,
                below_bytes: int = 0) -> list[int]:
    """
    ## The bytes that autograd saves in each layer of a chain, from shapes alone

    * `layers` and `inputs` are on the meta device, which has shapes and no numbers
    * storages with fewer than `below_bytes` do not count

    Counts as `offload/activations.py` moves: each storage once, and no parameters or buffers.
    """
    # Of each layer: storages by their addresses. While they are here, nobody else gets the address.
    found: list[dict[int, torch.UntypedStorage]] = []
    earlier: dict[int, torch.UntypedStorage] = {}
    for layer in layers:
        held = {tensor.untyped_storage()._cdata
                for tensor in (*layer.parameters(), *layer.buffers())}
        saved: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor, held=held, saved=saved) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata not in held and storage.nbytes() >= max(1, below_bytes):
                saved[storage._cdata] = storage

        entry = inputs.untyped_storage()._cdata
        # Nothing goes backward.
        with saved_tensors_hooks(pack, lambda _: torch.empty(0, device="cpu")):
            inputs = layer(inputs)
        found.append(saved)
        if saved and entry in earlier:
            # It leaves with the later of the two calls.
            saved[entry] = earlier.pop(entry)
        earlier = saved or earlier
    return [sum(storage.nbytes() for storage in saved.values()) for saved in found]


def gpt2_bytes(layers: int,
               width: int,
               heads: int,
               tokens: int,
               length: int,
               element_bytes: int = ELEMENT_BYTES) -> list[int]:
    r"""
    ## The bytes that autograd saves in each block of GPT-2, and in its head

    * `tokens` are those of a step, in sequences of `length`

    $$w\,b\,s\,(28d + as) \text{ in a block} \qquad 2\,w\,b\,s\,d \text{ in the head}$$
    """
    token_bytes = element_bytes * tokens
    return [*[token_bytes * (28 * width + heads * length)] * layers, 2 * token_bytes * width]


def gpt2_width(params: float, layers: int) -> int:
    r"""
    ## The features of a GPT-2 with so many parameters: $\Psi = 12\,n\,d^2$ without its embedding
    """
    return max(1, math.floor(math.sqrt(params / (12 * layers))))

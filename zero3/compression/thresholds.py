r"""
# Thresholds: the k-th smallest number of all ranks

`kth_keys` finds the number that exactly $k$ of all numbers do not exceed.

A global sparsity of one half means: prune the smaller half of *all* elements. Gathering them would
send the whole model. But ranks can *count*. They agree on the number digit by digit, the greatest
digit first.

**Four numbers on two ranks.** The second smallest is wanted. Rank 0 has 42 and 17, rank 1 has 13
and 45:

| | rank 0 counts | rank 1 counts | together | so |
|---|---|---|---|---|
| first digits | one 4, one 1 | one 1, one 4 | two 1, two 4 | it is the second with a 1 |
| second digits, of those with a 1 | one 7 | one 3 | one 3, one 7 | it is 17 |

The digits here have 8 bits, so a row has $2^8$ counts of 8 bytes. For keys of $b$ bits, $n$
thresholds and $N$ ranks, a rank sends

$$\left\lceil \frac{b}{8} \right\rceil \cdot 2^8 \cdot 8 \cdot n \cdot (N - 1) \quad
\text{bytes}$$

in $\lceil b / 8 \rceil$ messages to each other rank. An fp32 weight of 128 by 128 has keys of 32
bits for the element and 15 for its place, together 47. On two ranks these are 12,288 bytes in a
step, where a gather of the weight is 32,768. The threshold has the same bits on any number of
ranks.

This is a radix sort that follows one bucket only; see Cormen et al., *Introduction to Algorithms*,
sections 8.3 and 9.2.

**Run this**: `make exercise N=9`, to write it yourself; or `python -m pytest
tests/compression/test_compression.py -k threshold`.

**Not covered, and what that costs**: masks that are kept for a while. The threshold is found anew
after each step of the optimizer.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from zero3.comm.parts import inside
from zero3.compression.weights import PrunedElements
from zero3.guards.checks import Guarded
from zero3.guards.freed import FreedParameter

DIGIT = 8


def kth_keys(keys: torch.Tensor,
             lists: torch.Tensor,
             ks: list[int],
             bits: int,
             total: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """
    ## The k-th smallest key, in several lists at once

    * `keys` are this rank's keys of all lists, and `lists` says which list each belongs to; `(n,)`
      int64
    * `ks` are how many keys of each list, over all ranks, are not greater than the result, at least
      one
    * `bits` are those of the longest key
    * `total` adds up counts over ranks; all ranks must call this with as many lists

    Returns `(lists,)` int64, the same on all ranks.
    """
    base = 1 << DIGIT
    left = torch.tensor(ks, device=keys.device)
    found = torch.zeros_like(left)
    for shift in reversed(range(0, bits, DIGIT)):
        digits = (keys >> shift) & (base - 1)
        # One histogram for all lists, side by side.
        counts = (lists * base + digits).bincount(minlength=len(ks) * base)
        counts = total(counts).view(-1, base)  # (lists, 256), of all ranks
        upto = counts.cumsum(dim=1)
        # The first digit up to which there are enough.
        chosen = (upto < left[:, None]).sum(dim=1)
        left -= (upto - counts).gather(1, chosen[:, None])[:, 0]
        found = (found << DIGIT) | chosen
        follows = digits == chosen[lists]
        keys = keys[follows]
        lists = lists[follows]
    return found


# ------------------------------------------------------------------------------- keys of the shards


def own_keys(prunings: list[PrunedElements]) -> Iterator[tuple[PrunedElements, torch.Tensor]]:
    """
    ## The keys of the elements that this rank has: `(n,)` int64 of each weight

    A stage of a pipeline yields none of the weights of other stages.
    """
    by_param = {id(pruned.original): pruned for pruned in prunings}
    layers = layers_of(pruned.original for pruned in prunings)
    for pruned in prunings:
        # Beside sharded layers all ranks have a plain one, and the first rank counts it.
        if (not layers_of([pruned.original])
                and all(layer.comm.rank == 0 for layer in layers)):
            yield pruned, pruned.keys(pruned.original.detach().reshape(-1))
    for layer in layers:
        layer.expect(not getattr(layer.comm.links, "weights", None), "cannot prune elements",
                     "weights that are gathered as they are", f"{layer.comm.links}", "prune rows, "
                     "channels or heads; or leave `weights` out of `Links`")
        for flat in layer.flats:
            slots = [slot for slot in flat.slots if id(slot.param) in by_param]
            if slots:
                begin = layer.comm.rank * len(flat.shard)
                shard = flat.storage.load()
                for slot in slots:
                    part = inside(slice(begin, begin + len(shard)), slice(slot.offset, slot.end))
                    pruned = by_param[id(slot.param)]
                    yield pruned, pruned.keys(
                        shard[part].to(layer.device),
                        # So many of its elements are on earlier ranks, if it begins there.
                        first=max(begin - slot.offset, 0))
                flat.storage.release()


def layers_of(params: Iterable[torch.Tensor]) -> list[Guarded]:
    """
    ## The sharded layers of these parameters; none in a plain model
    """
    return [*dict.fromkeys(
        layer for param in params
        if isinstance(param, FreedParameter)
        and (layer := type(param).owner()) is not None)]

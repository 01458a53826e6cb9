r"""
# Exercise 9: the k-th smallest number of all ranks

Find the number that exactly $k$ of all numbers do not exceed, without gathering them: the ranks
*count*, and agree digit by digit. The second smallest of four numbers:

| | rank 0 has 42 and 17 | rank 1 has 13 and 45 | together | so |
|---|---|---|---|---|
| first digits | one 1, one 4 | one 1, one 4 | two 1, two 4 | the second smallest begins with 1 |
| second digits, of those with a 1 | one 7 | one 3 | one 3, one 7 | it is 17 |

The third smallest of all is the *first* smallest of those with a 4.

**Given**

* `numbers`, `(n,)` int64, of this rank, from 0 to $2^\text{bits} - 1$. A rank may have none, and
  a number may be there several times
* `k`, from 1 to the number of all numbers of all ranks
* `bits`, a multiple of 8. Take digits of 8 bits
* `total(counts)`: adds up counts over all ranks, `(m,)` int64. All ranks call it together

**Return** the k-th smallest number of all ranks, an `int`.

**Keeps** I1: the number is exact, and the same on all ranks. I6: all ranks call `total` as often,
and with as many counts. Sent: a rank sends 256 counts for each digit.

**Hint**: `(numbers >> shift) & 255` is a digit of each number, and `torch.bincount` counts digits.
Then drop the numbers that have another digit, and change `k`.
"""

from collections.abc import Callable

import torch


def kth_smallest(numbers: torch.Tensor, k: int, bits: int,
                 total: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """
    ## The k-th smallest number of all ranks

    * `numbers` are this rank's, `(n,)` int64
    * `total(counts)` returns the sum over ranks, `(m,)` int64

    Returns the same number on all ranks.
    """
    raise NotImplementedError("exercise 9: count the greatest digit of the numbers, add up the "
                              "counts of all ranks, and find the digit of the k-th smallest")

r"""
# Exercise 8: the list of a pipeline

List the passes of each rank by the schedule *1F1B*. `F0` is the forward pass of micro-batch 0, `B0`
its backward pass, and each takes one slot:

| slot | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
|---|---|---|---|---|---|---|---|---|
| rank 0 | F0 | F1 | | B0 | F2 | B1 | | B2 |
| rank 1 | | F0 | B0 | F1 | B1 | F2 | B2 | |

**Given** `rank`, from 0 to `ranks - 1`, and the numbers `ranks` and `micro_batches`; either may be
the smaller one. Rank 0 has the first stage. The passes depend on each other:

* a forward pass needs that of the same micro-batch on the rank before
* a backward pass needs that on the next rank; on the last rank, its forward pass

**Return** the passes of this rank in order, without the empty slots. For rank 0 above:

```
[("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("backward", 1), ("backward", 2)]
```

**Keeps** I1: each micro-batch goes forward and backward once. I6: no rank waits forever. Idle: with
$p$ ranks and $m$ micro-batches all ranks are done after $2(m + p - 1)$ slots. Kept: rank $r$ never
keeps the activations of more than $\min(m, p - r)$ micro-batches.

**Hint**: the list has three parts: some forwards, then a forward and a backward by turns, then the
rest of the backwards. How many forwards does the last rank need first? And the rank before it?
"""


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[tuple[str, int]]:
    """
    ## The passes of a rank, in order

    Returns pairs of "forward" or "backward" and the number of a micro-batch.
    """
    raise NotImplementedError("exercise 8: return the passes of this rank, in order")

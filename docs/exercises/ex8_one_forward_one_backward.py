r"""
# Exercise 8: the list of a pipeline

In a pipeline each rank has one stage of the model, and the batch is cut into micro-batches. A rank
computes a list of passes, one after the other. If a pass needs something from another rank, the
rank waits for it. The schedule *1F1B* orders the passes so that no rank waits longer than
necessary, and no rank keeps more activations than necessary.

Here are two ranks with three micro-batches. `F0` is the forward pass of micro-batch 0, `B0` its
backward pass, and each takes one slot:

| slot | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
|---|---|---|---|---|---|---|---|---|
| rank 0 | F0 | F1 | | B0 | F2 | B1 | | B2 |
| rank 1 | | F0 | B0 | F1 | B1 | F2 | B2 | |

The list of rank 0 is F0 F1 B0 F2 B1 B2. The empty slots are not in the list.

**Given**

* `rank`, from 0 to `ranks - 1`. Rank 0 has the first stage of the model, and the last rank has the
  last one
* `ranks`, the number of ranks, which is the number of stages
* `micro_batches`, their number, which may be smaller than `ranks`

The passes depend on each other:

* the forward pass of a micro-batch on a rank needs that of the same micro-batch on the rank before
* its backward pass needs the backward pass on the next rank; on the last rank, its forward pass

**Return** the passes of this rank in order, as a list of pairs. The list above is

```
[("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("backward", 1), ("backward", 2)]
```

**Keeps** I1: each micro-batch goes forward and backward once. I6: no rank waits forever. Idle: with
$p$ ranks and $m$ micro-batches all ranks are done after $2(m + p - 1)$ slots. Kept: rank $r$ never
keeps the activations of more than $\min(m, p - r)$ micro-batches. It keeps those of a micro-batch
from the beginning of its forward pass to the end of its backward pass.

**Hint**: the list has three parts: some forwards, then a forward and a backward by turns, then the
rest of the backwards. All three lengths follow from that of the first part, which is different on
each rank. How many forwards does the last rank need before its first backward? And the rank before
it?
"""


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[tuple[str, int]]:
    """
    ## The passes of a rank, in order

    Returns pairs of "forward" or "backward" and the number of a micro-batch.
    """
    raise NotImplementedError("exercise 8: return the passes of this rank, in order")

r"""
# Exercise 2: each collective alone

Implement an *all-gather* and a *reduce-scatter* that takes the mean, with point-to-point messages.
On two ranks with shards of two elements:

| | rank 0 has | rank 1 has | rank 0 gets | rank 1 gets |
|---|---|---|---|---|
| all-gather | 1 2 | 3 4 | 1 2 3 4 | 1 2 3 4 |
| reduce-scatter | 1 2 3 4 | 5 6 7 8 | 3 4 | 5 6 |

**Given**

* `full`, `(world_size * shard_numel,)`, to be filled: row $k$ of `full.view(world_size,
  shard_numel)` is the place of rank $k$'s shard
* `shard`, `(shard_numel,)`: this rank's shard
* `grad`, `(world_size * shard_numel,)`: row $k$ is for rank $k$. You may overwrite it
* `dist.isend(tensor, rank)` and `dist.irecv(tensor, rank)` start a message and return a handle;
  `handle.wait()` waits until it is complete

**Do**: `all_gather` fills `full`. `reduce_scatter` returns the mean over ranks of this rank's row,
`(shard_numel,)`, in the gradient's data type. When either returns, all its messages are complete.

**Keeps** I1: the numbers are right, also in fp16, where the sum may overflow although the mean
fits: divide before you add. I4: a rank sends each other rank `shard_numel` elements, and itself
nothing. I6: no rank waits forever.

**Hint**: start all messages before you wait for any.
"""

import torch
import torch.distributed as dist  # noqa: F401  (for your answer)


def all_gather(full: torch.Tensor, shard: torch.Tensor, rank: int, world_size: int) -> None:
    """
    ## Give each rank the shards of all ranks

    * `full` is `(world_size * shard_numel,)`, to be filled
    * `shard` is `(shard_numel,)`, to be sent
    """
    raise NotImplementedError("exercise 2: copy your own shard into its row of `full`, send it to "
                              "each other rank, and receive their shards into their rows")


def reduce_scatter(grad: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """
    ## Give each rank the mean of its row of the gradients

    * `grad` is `(world_size * shard_numel,)`, to be sent

    Returns `(shard_numel,)`.
    """
    raise NotImplementedError("exercise 2: send each other rank its row of `grad`, receive the "
                              "rows for this rank, and return the mean of these and your own")

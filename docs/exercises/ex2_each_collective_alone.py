r"""
# Exercise 2: each collective alone

ZeRO-3 needs two collectives. An *all-gather* gives each rank the shards of all. A *reduce-scatter*
gives each rank the sum, here the mean, of its own share of everybody's gradient. Build both out of
messages from one rank to another.

**Given**

* `full`, `(world_size * shard_numel,)`, to write: row $k$ of
  `full.view(world_size, shard_numel)` is for the shard of rank $k$
* `shard`, `(shard_numel,)`: this rank's
* `grad`, `(world_size * shard_numel,)`: this rank's gradient of everything; row $k$ is rank $k$'s
  share. It may be written over
* `dist.isend(tensor, rank)` and `dist.irecv(tensor, rank)` start a message and return a handle;
  `handle.wait()` completes it

**Do** `all_gather` fills `full` and returns nothing. `reduce_scatter` returns `(shard_numel,)`, of
the gradient's data type: the mean over ranks of this rank's share. When either returns, all of its
messages are complete.

**Keeps** I1: the numbers are right; fp16 gradients too, whose sum may be larger than fp16 can hold
where the mean is not. I4: a rank sends each other rank `shard_numel` elements and no more; nothing
is sent to itself. I6: no rank waits for ever.

**Hint**: start all messages, then wait for all. A rank that waits for its first message to leave
before it starts to receive waits for one that does the same.
"""

import torch
import torch.distributed as dist  # noqa: F401  (for your answer)


def all_gather(full: torch.Tensor, shard: torch.Tensor, rank: int, world_size: int) -> None:
    """
    ## Give each rank the shards of all

    * `full` is `(world_size * shard_numel,)`, to write
    * `shard` is `(shard_numel,)`, to send
    """
    raise NotImplementedError("exercise 2: put your own shard into its row of `full`, send it to "
                              "each other rank, and receive theirs into their rows")


def reduce_scatter(grad: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """
    ## Give each rank the mean of its share of the gradients

    * `grad` is `(world_size * shard_numel,)`, to send

    Returns `(shard_numel,)`.
    """
    raise NotImplementedError("exercise 2: send each other rank its row of `grad`, receive their "
                              "rows for you, and return the mean of those and your own")

r"""
# Exercise 7: reshard a checkpoint

$N$ ranks have saved their shards, and $M$ ranks want to resume. The model may also be divided into
other layers now. A layer with three elements:

| | rank 0 | rank 1 | rank 2 |
|---|---|---|---|
| saved by two ranks | 4 5 | 6 0 | |
| wanted on three ranks | 4 | 5 | 6 |

**Given**

* `saved` and `wanted`, each a [`Layout`](layout.py). `layout.world_size` is its number of ranks.
  `layout.places` maps the name of each parameter to a `Place`: `place.layer` is its layer,
  `place.offset` is where it begins in the flat parameter, and `place.numel` is its number of
  elements. Padding is at the end. `layout.shard_numels()` lists the elements of a shard for each
  layer, including padding
* `read(layer, rank, begin, end)`: elements `begin` to `end` of a saved shard
* `rank`: the rank among the $M$ new ones, and `dtype`, the data type of the shards to return

**Return** a list of this rank's shards, `(shard_numel,)` each, one for each wanted layer in order.

**Keeps** I1: each element ends up in its place. I2: a rank reads only the elements of its own
shards. I5: the new padding is zero. The checker puts NaN into the old padding.

**Hint**: for each parameter, find the range of it that is in this rank's shard. `divmod` gives the
rank, and the position in its shard.
"""

from collections.abc import Callable

import torch

from docs.exercises.layout import Layout


def reshard(read: Callable[[int, int, int, int], torch.Tensor], saved: Layout, wanted: Layout,
            rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """
    ## Read this rank's shards of all wanted layers from the saved shards

    * `read(layer, rank, begin, end)` returns elements of a saved shard, `(end - begin,)`

    Returns `(shard_numel,)` for each wanted layer.
    """
    raise NotImplementedError("exercise 7: make a shard of zeros for each wanted layer, and read "
                              "the parts of parameters that belong to it")

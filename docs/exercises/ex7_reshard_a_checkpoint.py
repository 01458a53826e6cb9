r"""
# Exercise 7: reshard a checkpoint

$N$ ranks have saved their shards, and $M$ ranks want to resume. The number of ranks determines
where each shard begins and how much padding there is. The model may also be divided into other
layers now. Only the parameters' names and elements stay the same.

For example, one layer with a parameter `a` = 1 2 3:

| | rank 0 | rank 1 | rank 2 |
|---|---|---|---|
| saved by two ranks | 1 2 | 3 0 | |
| wanted on three ranks | 1 | 2 | 3 |

Rank 1 of the new run reads the second element of rank 0's saved shard.

**Given**

* `saved` and `wanted`, each a [`Layout`](layout.py). `layout.world_size` is its number of ranks,
  and `layout.places` maps the name of each parameter to a `Place`. `place.layer` is the number of
  the layer whose flat parameter contains it, `place.offset` is where it begins there, and
  `place.numel` is its number of elements. The parameters of a layer follow each other without
  gaps, and the padding is at the end. `layout.shard_numels()` lists the number of elements of a
  shard for each layer, including padding
* `read(layer, rank, begin, end)`: elements `begin` to `end` of the shard of this layer that this
  rank has saved, `(end - begin,)`. Shards may be in files, so read only the elements that you need
* `rank`: the rank among the $M$ new ones, and `dtype`, the data type of the shards to return

**Return** a list of this rank's shards, `(shard_numel,)` each, one for each wanted layer in order.

**Keeps** I1: each element ends up in its place. I2: a rank reads only the elements of its own
shards, and no whole parameter. I5: the new padding is zero, and the old padding is not copied. The
checker puts NaN into the old padding to detect copies.

**Hint**: for each parameter, find the range of it that is in this rank's shard. It begins at the
larger of two begins and ends at the smaller of two ends. In the saved layer this range may be
spread over the shards of several ranks. `divmod` gives the rank, and the position in its shard.
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

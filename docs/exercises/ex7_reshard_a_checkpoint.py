r"""
# Exercise 7: reshard a checkpoint

$N$ ranks have saved their shards; $M$ ranks want to go on. Where a shard begins and how much
padding there is depends on the number of ranks, and perhaps the model is cut into other layers now.
What stays the same is a parameter's name and its elements.

**Given**

* `saved` and `wanted`, each a [`Layout`](layout.py): `layout.world_size` is a number of ranks, and
  `layout.places` has a `Place` for each parameter's name. `place.layer` is the layer in whose flat
  parameter it lies, `place.offset` where it begins there, and `place.numel` its elements. The
  parameters of a layer lie one after the other, from 0 on; the padding is at the end.
  `layout.shard_numels()` are the elements of a shard of each layer, padding included
* `read(layer, rank, begin, end)`: elements `begin` to `end` of the shard that this rank saved of
  this layer, `(end - begin,)`. A shard may lie on a disk, so read what you need and nothing else
* `rank`: which of the wanted ranks this is, and `dtype`, the data type of what it returns

**Return** this rank's shards, `(shard_numel,)` each, of all wanted layers: a list, by number.

**Keeps** I1: each element comes to its place. I2: a rank reads what its own shards hold, and no
whole parameter. I5: the new padding is zero, and the old padding is nowhere. Here the checker has
put NaN into the old one, so that it shows.

**Hint**: for each parameter, find the part of it that lies in this rank's shard. It begins at the
later of two begins and ends at the earlier of two ends. In the saved layer the same part may lie
in the shards of several ranks: `divmod` gives the rank, and the place in its shard.
"""

from collections.abc import Callable

import torch

from docs.exercises.layout import Layout


def reshard(read: Callable[[int, int, int, int], torch.Tensor], saved: Layout, wanted: Layout,
            rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """
    ## This rank's shards of all wanted layers, out of the saved ones

    * `read(layer, rank, begin, end)` gives elements of a saved shard, `(end - begin,)`

    Returns `(shard_numel,)` for each wanted layer.
    """
    raise NotImplementedError("exercise 7: make a shard of zeros for each wanted layer, and read "
                              "into it the parts of parameters that lie in it")

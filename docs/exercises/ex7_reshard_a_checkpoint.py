r"""
# Exercise 7: reshard a checkpoint

$N$ ranks have saved their shards; $M$ ranks want to go on. Where a shard begins and how much
padding there is depends on the number of ranks, and perhaps the model is cut into other layers now.
What stays the same is a parameter's name and its elements.

**Given**

* `saved` and `wanted`, each a `Layout`: a number of ranks, and for each parameter its `Place`,
  which is in which layer's flat parameter it lies, from which offset on, and how many elements it
  has. The parameters of a layer lie one after the other, from 0 on; the padding is at the end
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
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Place:
    """
    ## Where a parameter lies
    """

    layer: int
    offset: int  # in the layer's flat parameter, in elements
    numel: int


@dataclass(frozen=True)
class Layout:
    """
    ## Where all parameters lie, and in how many shards their layers are cut
    """

    world_size: int
    places: dict[str, Place]  # by the parameters' names

    def shard_numels(self) -> list[int]:
        """
        ### Elements of a shard of each layer, padding included
        """
        numels = [0] * (1 + max(p.layer for p in self.places.values()))
        for p in self.places.values():
            numels[p.layer] += p.numel
        return [-(-numel // self.world_size) for numel in numels]


def reshard(read: Callable[[int, int, int, int], torch.Tensor], saved: Layout, wanted: Layout,
            rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """
    ## This rank's shards of all wanted layers, out of the saved ones

    * `read(layer, rank, begin, end)` gives elements of a saved shard, `(end - begin,)`

    Returns `(shard_numel,)` for each wanted layer.
    """
    raise NotImplementedError("exercise 7: make a shard of zeros for each wanted layer, and read "
                              "into it the parts of parameters that lie in it")

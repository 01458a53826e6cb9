"""
# Layout of a sharded model

A `Layout` records the number of shards per layer, and the place of each parameter in its layer. A
checkpoint has to know this about its shards; exercise 7 uses it.

**Run this**: `make exercise N=7`

**Not covered, and what that costs**: shapes and data types, because resharding does not change
them.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """
    ## The place of a parameter in its layer
    """

    layer: int
    offset: int  # in the layer's flat parameter, in elements
    numel: int


@dataclass(frozen=True)
class Layout:
    """
    ## The places of all parameters, and the number of shards per layer
    """

    world_size: int
    places: dict[str, Place]  # by the name of the parameter

    def shard_numels(self) -> list[int]:
        """
        ### Number of elements of a shard for each layer, including padding
        """
        numels = [0] * (1 + max(p.layer for p in self.places.values()))
        for p in self.places.values():
            numels[p.layer] += p.numel
        return [-(-numel // self.world_size) for numel in numels]

"""
# Where parameters lie

A `Layout` says in how many shards layers are cut, and where in a layer each parameter lies: what a
checkpoint has to know of its shards, for exercise 7.

**Run this**: `make exercise N=7`

**Not covered, and what that costs**: shapes and data types, which resharding leaves as they are.
"""

from dataclasses import dataclass


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

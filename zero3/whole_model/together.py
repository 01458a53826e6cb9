r"""
# Shared units: small layers that follow each other have one flat parameter

A collective takes a fixed time $t$ beside its bytes, so that many small ones are slow.
`wrap(..., unit_bytes=)` and `compile(..., unit_bytes=)` put small neighbours into one unit.

**Two layers on two ranks.** Layer a is that of `minimal.py`, with the weights 1 2 3. Layer b has
the weights 5 6:

| | flat parameters | rank 0 | rank 1 | collectives in a step |
|---|---|---|---|---|
| each alone | 1 2 3 0, and 5 6 | 1 2, and 5 | 3 0, and 6 | 6 at most |
| in one unit | 1 2 3 5 6 0 | 1 2 3 | 5 6 0 | 3 at most |

Each layer uses the weights of the shared unit as if they were tied. Both stay units without
parameters of their own, so the order of the model is known as before. With $n$ layers for each
shared unit, $L$ layers save up to

$$3 L \left(1 - \frac{1}{n}\right) t \quad \text{seconds in a step, and nothing is copied.}$$

**Run this**: `python -m pytest tests/whole_model/test_together.py -k collectives`.

**Not covered, and what that costs**: a layer whose parameters have two names, or that has units
inside, keeps a unit of its own, and so do `leaf_classes`. Layers of a shared unit cannot be frozen
one by one. Only the wrapped model's `parameters()` has the shared shards, not those of a layer or
of a list of layers. The fused loop of AdamW rounds the last elements of a shard in another way, so
the last place may differ.
"""

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn


class LayerPlace(NamedTuple):
    """
    ## Where a layer stands in a model
    """

    parent: nn.Module
    name: str  # in the parent
    layer: nn.Module
    path: str  # its name in the model
    is_leaf: bool  # of `leaf_classes`


class Together(nn.Module):
    """
    ## Layers that share a unit

    It has the layers as children, by their names in the model. Nobody calls it.
    """

    def __init__(self, places: list[LayerPlace]):
        super().__init__()
        # Not by `add_module`, because such a name may have dots.
        self._modules.update({place.path: place.layer for place in places})
        self.title = f"{places[0].path} to {places[-1].path}"

    def get_submodule(self, target: str) -> nn.Module:
        """
        ### A module in one of the layers, by its name in the model
        """
        return dict(self.named_modules(remove_duplicate=False))[target]


def neighbours(places: Iterable[LayerPlace], most_bytes: int, most_numel: float
               ) -> list[list[LayerPlace]]:
    """
    ## Layers that follow each other, and together are small

    * `places` are those of layers, in the order of the model's modules
    * `most_bytes` and `most_numel` are what the layers of a unit may have together

    Returns lists of at least two places.
    """
    found: list[list[LayerPlace]] = [[]]
    params: list[nn.Parameter] = []  # of the layers in the last list
    for place in places:
        own = [*place.layer.parameters()]
        params += own
        numel = sum(p.numel() for p in params)
        if sum(p.nbytes for p in params) > most_bytes or numel > most_numel:
            found.append([])
            params = own
        found[-1].append(place)
    return [each for each in found if len(each) > 1]

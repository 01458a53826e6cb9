r"""
# What guards know of a layer

`Guarded` is a sharded layer, as far as guards and tiers have to know it, and `Announced` is a
transfer between its ranks. `is_sharded` tells such a layer from a plain module, and `own_modules`
yields what belongs to it.

A module with a plain layer `a` and a sharded layer `b` inside:

| | is sharded | is an own module of the outer one |
|---|---|---|
| the module | no | yes |
| `a` | no | yes, as `a.` |
| `b` | yes | no |
| `b.module` | no | no: it is `b`'s |

$$\text{own modules} = \text{modules inside} - \text{sharded layers and what is inside of them}$$

**Run this**: `python -m pytest tests/guards -k own_modules`.

**Not covered, and what that costs**: a module in a plain list is not inside, as for `modules()`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

from zero3.guards.options import Named

# What a rank may be about to do. An announcement has the index in this tuple.
ACTIONS = ("gather", "reduce", "norm", "fault", "exchange", "gather from the node", "pieces",
           "save or load", "gather without rounding")
# The `layer_idx` of a sender that has no place in a chain or a model.
ALONE = -1


class Guarded(nn.Module, Named):
    """
    ## A sharded layer, as far as guards and tiers have to know it
    """

    module: nn.Module
    device: torch.device
    chunk: nn.ParameterList  # the shards
    flats: list[Any]
    listener: Any  # hears what happens to it
    is_fetched = False  # from the start of an all-gather until the layer is freed
    is_full_elsewhere = False  # inside `full_params` the parameters are whole in other memory
    gathered_versions: tuple[int, ...] = ()  # `shard_versions` when the last one began
    holders: set[object]  # who needs its full parameters now
    externals: Collection[Any] = ()  # and whose parameters it computes with
    # The advice in errors about a parameter in the wrong place, and about a new one.
    cure = ("wrap each module once, put modules that share a parameter into one Zero3Layer, and "
            "build the optimizer on `get_trainable_chunk()` after wrapping")
    cure_for_new = ("wrap it in a `Zero3Layer` of its own, or assign it before this layer is "
                    "wrapped; and build the optimizer afterwards")

    def fetch_for_others(self) -> bool:
        """
        ### Gather the parameters for another layer that uses them, and return whether it may

        Here nothing is gathered.
        """
        return False

    def show_again(self) -> None:
        """
        ### Show the parameters again, if the layer has stayed full
        """
        if self.is_fetched:
            for flat in self.flats:
                flat.open(was_freed=False)

    def admits(self, layer: nn.Module) -> bool:
        """
        ### Whether a sharded layer may be inside this one
        """
        return True

    def lenders(self) -> Iterator[Guarded]:
        """
        ### The layers whose parameters the module can read while it computes
        """
        yield from (self, *self.externals)

    def shard_versions(self) -> tuple[int, ...]:
        """
        ### How often each shard has been written to
        """
        return tuple(flat.shard._version for flat in self.flats)


class Announced(Protocol):
    """
    ## A transfer that all ranks of a group have announced
    """

    action: str  # one of `ACTIONS`
    options: str  # what has to be the same on all ranks besides, in words
    comm: Any

    @property
    def where(self) -> str: ...


def is_sharded(module: nn.Module) -> TypeGuard[Guarded]:
    """
    ## Whether this is a sharded layer: while it is being made, it is a module like any other
    """
    return isinstance(module, Guarded) and "guard" in vars(module)


def own_modules(module: nn.Module | None, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """
    ## A module and the modules inside, down to the next sharded layer, with prefixes for names
    """
    if module is None or is_sharded(module):
        return
    yield prefix, module
    # Not `named_children`, which drops all names but the first.
    for name, child in module._modules.items():
        yield from own_modules(child, f"{prefix}{name}.")


def attributes(model: nn.Module) -> Iterator[dict[str, Any]]:
    """
    ## The attributes of each plain module inside, also of those that sharded layers stand for
    """
    for module in model.modules():
        yield vars(module.module if is_sharded(module) else module)

r"""
# Moments: when the guards look

`guards` has a function for each moment at which something could go wrong in silence. The heart
names the moment, and a guard decides whether to raise an error.

| a layer | who asks | refused, for instance |
|---|---|---|
| gets a module | `Zero3Layer.__init__` | parameters that are sharded already (`freed.py`) |
| compares it | `Communicator.open` | others on rank 1 (`placement.py`) |
| has a shard | `StorageFactory.shard` | no room for a step (`room.py`) |
| will compute | `_prepare` | a new parameter inside (`contents.py`) |
| has computed | `forward` | a write, which would be lost (`contents.py`) |
| goes backward | `_pre_backward_hook` | weights that have changed (`contents.py`) |
| sends | `Transfer._arrive` | another layer on rank 1 (`diverged.py`) |
| has a gradient | `add_grad` | the norm of a part (`shard_gradients.py`) |

So whoever reads the heart can skip the checks:

$$\text{numbers with guards} = \text{numbers without guards}$$

**Run this**: `python -m pytest tests/guards`.

**Not covered, and what that costs**: `with guard:` and `mark` are mechanisms as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeGuard, TypeVar

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zero3.guards.options import Named

Thing = TypeVar("Thing")
# What a rank may be about to do. An announcement has the index in this tuple.
ACTIONS = ("gather", "reduce", "norm", "fault", "exchange", "gather from the node", "pieces",
           "save or load")
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
    cure: str  # what to do about a parameter that is not where somebody looks for it
    cure_for_new: str  # and about a new one
    listener: Any  # hears what happens to it
    guard: Guard
    is_fetched = False  # from the start of an all-gather until the layer is freed
    is_full_elsewhere = False  # inside `full_params` the parameters are whole in other memory

    def fetch_for_others(self) -> bool:
        """
        ### Gather the parameters for another layer that uses them, and return whether it may
        """
        return False

    def admits(self, layer: nn.Module) -> bool:
        """
        ### Whether a sharded layer may be inside this one
        """
        return True

    def lenders(self) -> Iterator[Guarded]:
        """
        ### The layers whose parameters the module can read while it computes
        """
        yield self

    def shard_versions(self) -> tuple[int, ...]:
        """
        ### How often each shard has been written to
        """
        return tuple(flat.shard._version for flat in self.flats)


Layer = TypeVar("Layer", bound=Guarded)


class Guard(Protocol):
    """
    ## Guard: looks at one layer

    Each method raises `RuntimeError` if something is wrong.
    """

    refusals: list[RemovableHandle]  # hooks to remove when the layer is a plain module again

    def __enter__(self) -> None:
        """
        ### The module computes, and finds its parameters
        """

    def __exit__(self, *exception: object) -> None:
        """
        ### It has computed
        """

    def check(self) -> None:
        """
        ### Somebody may have changed the modules inside
        """

    def before_forward(self) -> None:
        """
        ### The layer will compute
        """

    def after_forward(self, outputs: list[torch.Tensor]) -> None:
        """
        ### It has computed, and will be freed
        """

    def before_backward(self, versions: tuple[int, ...]) -> None:
        """
        ### Backward is here
        """

    def refuse_old_calls(self, versions: tuple[int, ...]) -> None:
        """
        ### The same, in a graph
        """

    def before_grad(self, grad: torch.Tensor, name: str) -> None:
        """
        ### A parameter has this gradient
        """

    def after_backward(self) -> None:
        """
        ### The parameters will be freed
        """


class Sharers(Protocol):
    """
    ## The ranks that share a layer, as far as guards have to know them
    """

    global_rank: int
    world_size: int
    ranks: tuple[int, ...]
    group: Any
    links: Any
    by_messages: bool
    labels: dict[int, str]
    met: int
    failed: int | None

    def gather(self, thing: Thing) -> list[Thing]: ...


class Announced(Protocol):
    """
    ## A transfer that all ranks of a group have announced
    """

    action: str  # one of `ACTIONS`
    options: str  # what has to be the same on all ranks besides, in words

    @property
    def comm(self) -> Sharers: ...
    @property
    def where(self) -> str: ...


class Guards(Protocol):
    """
    ## Guards: one function for each moment
    """

    def check_module(self, owner: Guarded, module: nn.Module) -> None:
        """
        ### A layer gets a module
        """

    def check_params(self, comm: Sharers, who: str, params: dict[nn.Parameter, tuple[str, ...]],
                     device: torch.device | str | None, dtype: torch.dtype | None
                     ) -> tuple[torch.device, int]:
        """
        ### It has these parameters: their device, and a number of the model
        """

    def check_step(self, layer: Guarded, shard: torch.Tensor, cure: str) -> None:
        """
        ### Its shard will rest on the device
        """

    def freed_class(self, owner: Guarded, name: str, cure: str) -> type[nn.Parameter]:
        """
        ### The class of a parameter while it is freed
        """

    def guard_of(self, layer: Guarded, params: dict[nn.Module, dict[str, nn.Parameter | None]]
                 ) -> Guard:
        """
        ### The layer is built, and `params` are plain attributes of its modules
        """

    def check_chain(self, modules: Iterable[Layer]) -> list[Layer]:
        """
        ### A chain gets these layers
        """

    def check_walk(self, chain: Any) -> None:
        """
        ### A chain will compute
        """

    def diverged(self, transfer: Announced, ranks: tuple[int, ...], rank: int,
                 order: torch.Tensor) -> str:
        """
        ### All announcements are here: the problem
        """

    def mark(self, grad: torch.Tensor, flat: object, used: set | None,
             names: Iterable[tuple[str, ...]] = ()) -> torch.Tensor:
        """
        ### The gradient of a shard, as a part of the whole
        """

    def uncompiled(self, forward: Callable) -> Callable:
        """
        ### A forward that `torch.compile` leaves out
        """


guards: Guards


def is_sharded(module: nn.Module) -> TypeGuard[Guarded]:
    """
    ## Whether this is a sharded layer: while it is being made, it is a module like any other
    """
    return isinstance(module, Guarded) and "guard" in vars(module)


def own_modules(module: nn.Module | None, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """
    ## A module and the modules inside, down to the next sharded layer, with their names
    """
    if module is None or is_sharded(module):
        return
    yield prefix, module
    # Not `named_children`, which drops all names but the first.
    for name, child in module._modules.items():
        yield from own_modules(child, f"{prefix}{name}.")

r"""
# Parts of a weight

A `WeightPart` says which elements of a weight a rank has, if ranks split the weight between them.

Take a weight with the rows 0 1 2 3 and 4 5 6 7, on two ranks:

| | rank 0 | rank 1 |
|---|---|---|
| split by rows | 0 1 2 3 | 4 5 6 7 |
| split by columns | 0 1 and 4 5 | 2 3 and 6 7 |
| split by columns, in two blocks | 0 2 and 4 6 | 1 3 and 5 7 |

A weight for queries, keys and values has three blocks, and each rank needs its part of each. In
every case the elements of the whole weight form a box of three dimensions, and a part is a range of
the middle one:

$$(\text{rows}, \text{size}, \text{width}) \to (\text{rows}, \text{end} - \text{begin},
\text{width})$$

The boxes above are $(1, 2, 4)$ for rows, $(2, 4, 1)$ for columns, and $(4, 2, 1)$ for columns in
two blocks.

**Run this**: `python -m pytest tests/inject/test_tensor_parallel.py -k part`.

**Not covered, and what that costs**: a weight is split along one dimension only.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero3.flat import FlatParameter
from zero3.guards.checks import Guarded, attributes, is_sharded


@dataclass(frozen=True)
class WeightPart:
    """
    ## The elements of a weight that one rank has
    """

    shape: tuple[int, ...]  # of the whole weight
    rows: int
    size: int
    width: int
    begin: int
    end: int

    @classmethod
    def of(cls, shape: tuple[int, ...],
           dim: int,
           place: int,
           count: int,
           blocks: int = 1) -> "WeightPart":
        """
        ### The part of one rank

        * `shape` is that of the whole weight, `dim` the dimension that is split
        * `place` is the number of this rank among `count`
        * `blocks` is how many weights were put together along that dimension
        """
        size = shape[dim] // blocks
        return cls(tuple(shape),
                   rows=math.prod(shape[:dim]) * blocks,
                   size=size,
                   width=math.prod(shape[dim + 1 :]),
                   begin=size * place // count,
                   end=size * (place + 1) // count)

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """
        ### This part of a weight, or of some rows of its box: a copy in one dimension
        """
        box = whole.reshape(-1, self.size, self.width)
        return box[:, self.begin : self.end].clone().flatten()

    def holds(self, at: torch.Tensor) -> torch.Tensor:
        """
        ### Which of these elements are in this part

        * `at` counts them row by row in the whole weight
        """
        column = at // self.width % self.size
        return (self.begin <= column) & (column < self.end)

    def before(self, at: int) -> int:
        """
        ### How many elements of this part come before an element of the whole weight
        """
        row, inside = divmod(at, self.size * self.width)
        own = (self.end - self.begin) * self.width
        return row * own + min(max(inside - self.begin * self.width, 0), own)

    def read(self, begin: int,
             end: int,
             read: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """
        ### Elements of the part, read from the whole weight

        * `read(begin, end)` reads elements of the whole weight
        """
        if self.rows == 1:
            # The part is a range of the whole weight.
            offset = self.begin * self.width
            return read(offset + begin, offset + end)
        own = (self.end - self.begin) * self.width
        first = begin // own
        last = -(-end // own)
        numel = self.size * self.width
        rows = self.take(read(first * numel, last * numel))
        return rows[begin - first * own : end - first * own]


def part_of(module: nn.Module, name: str) -> WeightPart | None:
    """
    ## Which part of a parameter a rank has; none, if it has all of it
    """
    path, _, last = name.rpartition(".")
    return vars(module.get_submodule(path)).get("parts", {}).get(last)


@contextmanager
def whole_values(module: nn.Module) -> Iterator[None]:
    """
    ## Give a module whole weights for a while, and keep this rank's parts of their values

    Inside, initial values are drawn as for the plain module.
    """
    parts = {name: part
             for name, part in vars(module).get("parts", {}).items()
             if name in module._parameters}
    own: Any = {name: module._parameters[name] for name in parts}
    try:
        for name, part in parts.items():
            # NaN, so that values which nobody draws are noticed.
            module._parameters[name] = nn.Parameter(
                own[name].detach().new_full(part.shape, torch.nan), own[name].requires_grad)
        yield
        for name, part in parts.items():
            taken = part.take(module.get_parameter(name).detach())
            own[name].detach().copy_(taken.view_as(own[name]))
    finally:
        module._parameters.update(own)


def connect(model: nn.Module) -> None:
    """
    ## Tell the layers of a sharded model who has the other parts of its weights

    Chains and `wrap` call it on all ranks (all-gather of their numbers).

    Raises `RuntimeError` if the model is sharded over ranks that have other parts of it, if it has
    stages of a pipeline, or if it is a single layer in no chain.
    """
    modules = [*model.modules()]
    lines = {own["line"] for own in attributes(model) if "line" in own}
    layers = [module for module in modules if is_sharded(module) and module.flats]
    if not lines or not layers:
        return
    # Each layer may have a policy of its own.
    (group,) = {line.group for line in lines}
    first = layers[0]
    # A chain, or the model that `wrap` returned.
    owner: Any = next(m for m in modules if hasattr(m, "get_trainable_chunk"))
    joined = first.comm.stages.same_layers
    # A layer may be in two chains, and then both are told.
    if joined and (owner is first or vars(owner).get("comm", first.comm) is not first.comm):
        return
    both = {*group.ranks} & {*first.comm.ranks}
    first.expect(both == {first.comm.global_rank}, "is sharded over ranks that have other parts of "
                 "it", "ranks with the same parts", f"ranks {sorted(both)} in both meshes",
                 "wrap it with `mesh=mesh[\"shard\"]`, and split it over `mesh[\"tensor\"]`")
    first.expect(joined or first.comm.stages.size == 1, "has split weights",
                 "a model without a pipeline", "stages of a pipeline", "leave one of the two out")
    first.expect(owner is not first, "has split weights", "a `Zero3Sequential`, or `wrap`",
                 "a layer that is in no chain", "put it in a chain, also if it is the only one")
    owner.comm = first.comm.join(group)
    for line in lines:
        line.model = owner
    if group.rank > 0:
        for layer in layers:
            for flat in layer.flats:
                flat.counted = _counted(layer, flat)


def _counted(layer: Guarded, flat: FlatParameter) -> list[slice]:
    """
    #### The ranges of a shard that count in the norm of the whole model

    All ranks have the parameters that are not split, as norms. Those of the first rank count.
    """
    shard = slice(layer.comm.rank * len(flat.shard), (layer.comm.rank + 1) * len(flat.shard))
    ranges = (inside(shard, slice(slot.offset, slot.end))
              for slot in flat.slots if part_of(layer.module, slot.names[0]) is not None)
    return [each for each in ranges if each.start < each.stop]


def inside(outer: slice, where: slice) -> slice:
    """
    ## The part of a range inside of `outer`, counted from its start; empty if there is none
    """
    begin, end = (min(max(bound, outer.start), outer.stop) - outer.start
                  for bound in (where.start, where.stop))
    return slice(begin, end)


def length(where: slice) -> int:
    """
    ## The elements of a range
    """
    return where.stop - where.start

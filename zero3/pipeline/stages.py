r"""
# Stages: a part of the model, gathered for as long as the schedule says

A `Stage` is a chain of layers that can be held whole, over several micro-batches.

A chain frees a layer right after it has computed, but the next micro-batch needs it a moment later.
So `unshard` *holds* the layers of a stage: they are gathered, and every attempt to free them is
ignored until `reshard`.

**Where to cut.** `balanced` cuts a list of layers so that the largest stage is as small as it can
be. Five layers with 4, 1, 1, 1 and 5 parameters, for two stages:

| cut after | stages have | largest |
|---|---|---|
| 1 | 4, 8 | 8 |
| **3** | **6, 6** | **6** |
| 4 | 7, 5 | 7 |

$$\text{best}(i, k) = \min_{j > i} \max\Big(\sum_{\ell=i}^{j-1} P_\ell,\; \text{best}(j, k-1)\Big)$$

Here $\text{best}(i, k)$ is the largest stage if the layers from $i$ on are cut into $k$.

**Tied weights.** A language model may use one matrix as the embedding in the first stage, and as
the head in the last one. Its shards and optimizer states rest with the first stage. The last stage
*borrows* it: at the beginning of a step each rank there receives the shard of its partner, and at
the end it sends its gradient back. With $N$ ranks in each stage, a tied weight of $P$ elements
costs $\lceil P/N \rceil$ elements each way, once in a step.

**Run this**: `python -m pytest tests/pipeline/test_pipeline.py -k "tied or cut"`.

**Not covered, and what that costs**: all tied weights must be shared by the same two stages.
Layers are balanced by their parameters, not by the time they take.
"""

import math
from collections.abc import Container, Iterable
from functools import cache
from typing import Any

from torch import nn

from zero3.guards.checks import expect
from zero3.layer import Zero3Layer, Zero3Sequential
from zero3.sharded import Schedule


class InTurn(Schedule):
    """
    ## The schedule of a stage's layers

    The last layer does not stay full, because the next pass is of another micro-batch.
    """

    def stays_full(self, layer: object, call: object) -> bool:
        return False


class Stage(Zero3Sequential):
    """
    ## One stage of a pipeline
    """

    def __init__(self, layers: dict[int, Zero3Layer],
                 tied: tuple[Zero3Layer, ...]):
        """
        ### Link the layers

        * `layers` are by their number in the whole model
        * `tied` has the layer of tied weights, if this stage uses them
        """
        super().__init__(layers.values())
        # A tuple is not registered: it is no layer of this chain.
        self.tied = tied
        for i, layer in layers.items():
            layer.layer_idx = i
            layer.label = f"layer {i} ({type(layer.module).__name__})"
            layer.schedule = InTurn()
            # Nobody may hand on a view of the tied weights, or move them with activations.
            layer.externals = tied

    def unshard(self, hold: bool, backward: bool) -> None:
        """
        ### Gather all layers, and keep them whole until `reshard`

        * `hold` is false if each layer is to gather itself, and to be freed after its part
        * `backward` says that the next pass begins with the last layer, which is gathered first
        """
        layers = [*self.module_list] if hold else []
        if backward:
            layers.reverse()
        for layer in (*self.tied, *layers):
            # Two stages of one rank may hold the same tied weights.
            layer.holders.add(self)
            # Nobody calls the layer of tied weights, so it would not notice that they were frozen.
            layer._follow_requires_grad()
            layer.fetch_params()

    def begin(self) -> None:
        """
        ### Wait for the tied weights before a pass, because nobody calls their layer
        """
        for layer in self.tied:
            layer._wait_params()

    def reshard(self) -> None:
        """
        ### Free all layers, unless another stage still holds them
        """
        for layer in (*self.module_list, *self.tied):
            layer.holders.discard(self)
            layer._cleanup_params()


class Plan:
    """
    ## Which rank has which layers, and which weights two stages share
    """

    def __init__(self, layers: list[nn.Module],
                 ranks: int,
                 counts: list[int]):
        """
        ### Find the tied weights

        * `layers` are those of the whole model, and `ranks` is the length of the pipeline
        * `counts` has the number of layers of each stage

        Raises `ValueError` for counts that do not fit, for tied weights of other pairs of stages,
        and for a stage without weights.
        """
        self.layers = layers
        self.counts = counts
        self._check_counts(ranks)
        # The stage of each layer, and the rank of that stage.
        self.places = [s for s, count in enumerate(counts) for _ in range(count)]
        self.owners = [s % ranks for s in self.places]
        self.names = names_of(layers)
        self.tied = {p: names for p, names in self.names.items()
                     if len({layer_of(name) for name in names}) > 1}
        pairs = {tuple(sorted({self.places[layer_of(name)] for name in names}))
                 for names in self.tied.values()}
        expect(len(pairs) <= 1 and all(len(pair) <= 2 for pair in pairs), "tied weights",
               "the same two stages for all of them", f"stages {sorted(pairs)}",
               "cut the stages elsewhere, with `stages=`")
        # The first and the last stage that use tied weights.
        pair = min(pairs, default=(0,))
        self.ends = (pair[0], pair[-1])
        self._check_weights()
        # Of each parameter, by its names: the place of the rank that keeps it, shape and data type.
        self.shapes = {tuple(names): (self.owners[layer_of(names[0])], p.shape, p.dtype)
                       for p, names in self.names.items()}
        # The names of buffers that layers on several ranks share.
        self.shared_buffers = {
            name for names in names_of(layers, "named_buffers").values() for name in names
            if len({self.owners[layer_of(each)] for each in names}) > 1}

    def _check_counts(self, ranks: int) -> None:
        """
        #### Refuse stages that cannot be
        """
        good = (isinstance(self.counts, (list, tuple)) and len(self.counts) > 0
                and all(isinstance(n, int) and n > 0 for n in self.counts)
                and sum(self.counts) == len(self.layers) and len(self.counts) % ranks == 0)
        expect(good, "`stages`", f"numbers of layers that add up to {len(self.layers)}, for as "
               f"many stages on each of {ranks} ranks", repr(self.counts),
               "pass a number of layers for each stage")

    def _check_weights(self) -> None:
        """
        #### Refuse a stage that would keep nothing

        A rank reaches the others of its stage through a layer that has weights.
        """
        kept = {self.places[layer_of(names[0])] for names in self.names.values()}
        for s in range(len(self.counts)):
            expect(s in kept, f"stage {s}", "weights of its own", "none",
                   "pass `stages=`, or use fewer stages")


def balanced(layers: list[nn.Module], parts: int) -> list[int]:
    """
    ## How many layers each stage gets, so that the largest stage is as small as possible

    Tied weights count where they are kept, in the first layer that has them.
    """
    sizes = [0] * len(layers)
    for p, names in names_of(layers).items():
        sizes[layer_of(names[0])] += p.numel()

    def size(begin: int, end: int) -> float:
        # A stage without weights would have nothing to shard.
        return sum(sizes[begin:end]) or math.inf

    @cache
    def best(begin: int, parts: int) -> tuple[float, list[int]]:
        if parts == 1:
            return size(begin, len(sizes)), [len(sizes) - begin]
        rests = {end: best(end, parts - 1)
                 for end in range(begin + 1, len(sizes) - parts + 2)}
        return min((max(size(begin, end), largest), [end - begin, *counts])
                   for end, (largest, counts) in rests.items())

    expect(0 < parts <= len(layers), "the stages", f"at most {len(layers)}, one for each layer",
           f"{parts}", "use fewer ranks for the pipeline, or smaller layers")
    return best(0, parts)[1]


def names_of(layers: list[nn.Module],
             kind: str = "named_parameters") -> dict[Any, list[str]]:
    """
    ## All names of each parameter in the plain model, `nn.Sequential(*layers)`

    * `kind` may also be "named_buffers"
    """
    found: dict[Any, list[str]] = {}
    for name, value in getattr(nn.Sequential(*layers), kind)(remove_duplicate=False):
        found.setdefault(value, []).append(name)
    return found


def layer_of(name: str) -> int:
    """
    ## The number of the layer that a parameter's name begins with
    """
    return int(name.split(".")[0])


def untie(layers: Iterable[nn.Module],
          tied: Container[nn.Parameter]) -> None:
    """
    ## Make tied weights plain attributes of their modules

    Otherwise each layer would shard them as its own.
    """
    for layer in layers:
        for module in layer.modules():
            for name, param in [*module._parameters.items()]:
                if param in tied:
                    vars(module)[name] = module._parameters.pop(name)


def holder(tied: dict[nn.Parameter, list[str]]) -> nn.Module:
    """
    ## A module with these parameters, under all names that they have in the plain model
    """
    root = nn.Module()
    for param, names in tied.items():
        for name in names:
            *path, last = name.split(".")
            at: Any = root
            for part in path:
                at = at._modules.setdefault(part, nn.Module())
            at.register_parameter(last, param)
    return root

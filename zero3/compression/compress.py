r"""
# Compress: rules for weights, which advance with the optimizer

`compress` puts rules on the layers of a plain model, which is then wrapped and trained as always.

    layers = [Block() for _ in range(4)]
    compress(layers, {"*.linear": [Prune(0.5, start=100, end=500), Quantize(4, start=300)]})
    model = Zero3Sequential([Zero3Layer(layer) for layer in layers])
    optimizer = Zero3Optimizer(model, torch.optim.AdamW, lr=1e-3)

Names are those of `nn.Sequential(*layers)`, and patterns are those of a shell; `*.first|*.second`
matches either. The rules apply to every layer with a `weight` that matches.

**After each step** of an optimizer that trains parameters of the model, the schedule advances by
one. Of several optimizers it follows the one with the most steps.

| | on each rank | between ranks |
|---|---|---|
| steps | one more | |
| thresholds of elements | count the keys of its own shards | counts, `thresholds.py` |
| everything else | made from the gathered weight | |

Take the weights 0.1, −0.7 on rank 0 and 0.4, −0.2 on rank 1, with the sparsity one half. Both
ranks learn that the threshold is the key of −0.2, and make the same mask of the gathered weights:

$$0.1,\; -0.7,\; 0.4,\; -0.2 \quad\to\quad 0,\; -0.7,\; 0.4,\; 0$$

**At rest** there are no masks, only 16 bytes for each rule and weight on each rank.

**Resume.** Steps and thresholds are buffers, so `zero3.save` saves them. A run that resumes calls
`compress` with the same rules before it loads.

**Run this**: `python -m pytest tests/compression/test_compression.py -k ranks`.

**Not covered, and what that costs**: checkpoints of the uncompressed model, because a compressed
weight is called `...parametrizations.weight.original`; load plain weights before `compress`. A
model on the meta device. A weight with two names. Encodings of gathered weights beside pruned
elements, because the ranks would count other numbers than they compute with. With the other rules
training computes with rounded weights and `clean` with exact ones, so `clean` may keep other rows.
A step that a loss scale skips counts as one.
"""

import inspect
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from zero3.compression.rules import Prune, Quantize
from zero3.compression.thresholds import kth_keys, layers_of, own_keys
from zero3.compression.weights import (
    Compressed,
    Method,
    PrunedBias,
    PrunedElements,
    PrunedParts,
    Quantised,
    QuantisedInput,
    Weighted,
    axis_of,
)
from zero3.guards.checks import expect
from zero3.optimizer.buckets import Bucket
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.optimizer.steps import after_steps
from zero3.sharded import Sharded, ShardedModel

Rule = Prune | Quantize
Rules = dict[str, list[Rule]]
MOST_SHARED = 2**31 - 1
# What a rule does, by its `kind` or its `of`, in the order in which a weight gets it.
METHODS: dict[str, type[Method]] = {
    "element": PrunedElements, "row": PrunedParts, "channel": PrunedParts, "head": PrunedParts,
    "weight": Quantised, "input": QuantisedInput}


def compress(model: nn.Module | Iterable[nn.Module], rules: Rules) -> "Compression":
    """
    ## Put rules on the weights of a plain model, in place

    All ranks call it alike, before wrapping.

    * `model` is a module, or a list of layers
    * `rules` has a list of `Prune` and `Quantize` for each pattern of names: at most one each for
      elements, for rows, channels or heads, for the weight's bits, and for the input. They apply in
      this order

    Returns the record of what is compressed. Raises `TypeError` for anything that is no rule, and
    `ValueError` if the model is sharded, if a pattern matches nothing new, if a weight is tied, or
    if a rule does not fit the weight's shape. Nothing has changed then.
    """
    found = named_modules(model)
    split = [name for name, module in found.items() if "line" in vars(module)]
    expect(not split, "compress", "whole weights, because thresholds and scales are for these",
           f"`{split[:1]}`, which `tensor_parallel` has split", "leave one of the two out")
    uses = Counter(p for module in found.values() for p in module._parameters.values())
    left = {name: module for name, module in found.items()
            if getattr(module._parameters.get("weight"), "ndim", 0) >= 2}
    made: list[tuple[Weighted, list[Method]]] = []
    for pattern, of_pattern in rules.items():
        matched = {name: left.pop(name) for name in [*left]
                   if any(fnmatchcase(name, each) for each in pattern.split("|"))}
        expect(bool(matched), f"compress: the pattern `{pattern}`", "a layer with a weight of two "
               "dimensions or more", "none, or one that another pattern has compressed",
               f"look at the names, {[*found][:20]}")
        for name, module in matched.items():
            _check(name, module, of_pattern, uses)
        added = [(module, _methods(module, of_pattern)) for module in matched.values()]
        _share(added)
        made += added
    for module, methods in made:
        _put(module, methods)
    compression = Compression(found[""], [each for _, methods in made for each in methods])
    compression.find_thresholds()
    return compression


def named_modules(model: nn.Module | Iterable[nn.Module]) -> dict[str, nn.Module]:
    """
    ## The modules of a plain model or of a list of plain layers, by their names

    Raises `ValueError` if the model is sharded.
    """
    whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)
    found = dict(whole.named_modules())
    expect(not any(isinstance(module, (Sharded, ShardedModel)) for module in found.values())
           and not layers_of(_params(whole)),
           "compression",
           "a plain model, or a list of plain layers",
           "one that is sharded",
           "call `compress` before wrapping; to clean, build the plain model anew, call `compress` "
           "on it with the same rules, and then `clean(plain, trained=sharded)`")
    return found


def _params(model: nn.Module) -> Iterator[nn.Parameter]:
    """
    #### The parameters of a model, also those that a sharded layer keeps as plain attributes
    """
    return (value for module in model.modules()
            for value in (*vars(module).values(), *module._parameters.values())
            if isinstance(value, nn.Parameter))


class Compression:
    """
    ## The record of a call of `compress`
    """

    def __init__(self, model: nn.Module, methods: list[Method]):
        """
        ### Follow the steps of optimizers
        """
        self.model = model
        self.all_methods = methods
        self.taken: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary())
        self.most_taken = 0
        for method in methods:
            method.compression = self
        after_steps[self] = Compression.follow

    def __getstate__(self) -> tuple:
        return self.model, self.all_methods

    def __setstate__(self, state: tuple) -> None:
        Compression.__init__(self, *state)

    def methods(self, kind: type[Method] = Method) -> Iterator[Any]:
        """
        ### What the rules do, weight by weight
        """
        yield from (method for method in self.all_methods if isinstance(method, kind))

    @property
    def groups(self) -> list[list[PrunedElements]]:
        """
        ### The prunings whose elements share a threshold
        """
        return [*{id(pruned.sharers): pruned.sharers
                  for pruned in self.methods(PrunedElements)}.values()]

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """
        ### Whether an optimizer trains a parameter of the model, or its shard
        """
        layers = layers_of(_params(self.model))
        if isinstance(optimizer, Zero3Optimizer):
            return any(layer.reducer in optimizer.buckets for layer in layers)
        trained = {id(p) for p in (
            *_params(self.model),
            *(flat.shard for layer in layers if not isinstance(layer.reducer, Bucket)
              for flat in layer.flats))}
        return any(id(p) in trained for group in optimizer.param_groups for p in group["params"])

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """
        ### Some optimizer has stepped

        The first step of a later optimizer counts as the last step of the others.
        """
        if not self.is_trained_by(optimizer):
            return
        taken = self.taken.get(optimizer, max(self.most_taken - 1, 0)) + 1
        self.taken[optimizer] = taken
        if taken > self.most_taken:
            self.most_taken = taken
            self.advance()
        else:
            self.find_thresholds()

    @torch.no_grad()
    def advance(self) -> None:
        """
        ### One more step: find thresholds anew

        All ranks must call this.
        """
        for method in self.methods():
            method.state[0] += 1
        self.find_thresholds()

    @torch.no_grad()
    def find_thresholds(self) -> None:
        """
        ### Find the threshold of each group of elements, over all ranks

        All ranks must call this (all-gather of counts, for all groups together).
        """
        groups = [group for group in self.groups if group[0].count]
        if not groups:
            return
        numbers = {pruned: i for i, group in enumerate(groups) for pruned in group}
        layers = layers_of(pruned.original for pruned in numbers)

        def total(counts: torch.Tensor) -> torch.Tensor:
            if not layers:
                return counts
            layer = layers[0]
            # The other rows are of replicas, with the same shards.
            rows = layer.comm.numbers(layer, counts)[: layer.comm.world_size]
            counts = layer.comm.over_stages(layer, rows.sum(dim=0))
            # Ranks that split other layers have the same shards of this one.
            return counts[: 1 if layer.comm.stages.same_layers else None].sum(dim=0)

        # A stage may have none of the weights, so the first list of keys is empty.
        own = [(groups[0][0], groups[0][0].state[:0]), *own_keys([*numbers])]
        found = kth_keys(
            keys=torch.cat([each for _, each in own]),
            lists=torch.cat([torch.full_like(each, numbers[pruned]) for pruned, each in own]),
            ks=[group[0].count for group in groups],
            bits=max(8 * group[0].original.dtype.itemsize + group[0].units().bit_length()
                     for group in groups),
            total=total)
        for pruned, i in numbers.items():
            pruned.state[1] = found[i]
            pruned.dtype = pruned.original.dtype


# ------------------------------------------------------------------------------------ put in place


def _check(name: str,
           module: Weighted,
           rules: list[Rule],
           uses: Counter[nn.Parameter | None]) -> None:
    """
    #### Refuse rules that do not fit a weight, before anything changes
    """
    expect(isinstance(rules, (list, tuple)) and len(rules) > 0
           and all(isinstance(rule, (Prune, Quantize)) for rule in rules),
           f"compress: the rules of `{name}`", "a list of `Prune` and `Quantize`", repr(rules),
           "pass one", TypeError)
    expect(len({*map(_class_of, rules)}) == len(rules), f"compress: the rules of `{name}`",
           "at most one for elements, one for rows, channels or heads, one for weights and one for "
           "inputs", rules, "leave one of them out")
    # `clean` removes channels from the input, and so from the range of a batch.
    removes = any(isinstance(rule, Prune) and rule.kind != "row" and rule.follows for rule in rules)
    rounds = any(isinstance(rule, Quantize) and rule.of == "input" for rule in rules)
    expect(not (removes and rounds), f"compress: the rules of `{name}`", "inputs as they are, if "
           "channels or heads are removed", rules, "leave `follows` or the rule of inputs out")
    weight = module.weight
    expect(not weight.is_meta, f"compress: `{name}`", "a weight with values", "one on the meta "
           "device", "build the layer first")
    expect(uses[weight] == 1, f"compress: `{name}`", "a weight of this layer alone",
           "one that another layer has too", "give each of them its own")
    for rule in rules:
        expect(_suits(rule, module), f"compress: `{name}`, {module} of {weight.dtype}",
               "a weight that splits into such groups or heads; for elements, of at most 32 bits; "
               "for rows, channels and heads, one that is not split into groups; for inputs, a "
               "layer that is called, while attention reads the weight of its `out_proj`", rule,
               "pass other numbers, or match other layers")


def _suits(rule: Rule, module: Weighted) -> bool:
    """
    #### Whether the shape and the data type of a weight allow a rule
    """
    weight = module.weight
    if isinstance(rule, Quantize):
        # The `out_proj` of torch's attention is never called.
        return weight[0].numel() % (rule.group or 1) == 0 and not (
            rule.of == "input"
            and isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear))
    if rule.kind == "element":
        return weight.element_size() <= 4
    axis = axis_of(rule, module)
    # The second axis of a convolution in groups is that of one group.
    return ((axis == 0 or getattr(module, "groups", 1) == 1)
            and weight.shape[axis] % (rule.heads or 1) == 0)


def _class_of(rule: Rule) -> type[Method]:
    """
    #### What a rule does to a module's weight, or to its input
    """
    return METHODS[rule.kind if isinstance(rule, Prune) else rule.of]


def _methods(module: Weighted, rules: list[Rule]) -> list[Method]:
    """
    #### What the rules of a layer do, in the order in which they do it
    """
    return [kind(rule, module)
            for kind in dict.fromkeys(METHODS.values())
            for rule in rules
            if _class_of(rule) is kind]


def _share(added: list[tuple[Weighted, list[Method]]]) -> None:
    """
    #### Let the weights of a pattern share a threshold, or refuse those that cannot
    """
    weights = {method: module.weight for module, methods in added for method in methods
               if isinstance(method, PrunedElements) and method.rule.scope == "global"}
    dtypes = {weight.dtype for weight in weights.values()}
    numel = sum(weight.numel() for weight in weights.values())
    expect(len(dtypes) < 2 and numel <= MOST_SHARED,
           "compress: a global threshold", "weights of one data type, because their bits are "
           f"compared, with at most {MOST_SHARED:,} elements", f"{numel:,} of {dtypes}",
           "use several patterns, or `scope=\"layer\"`")
    sharers = [*weights]
    for method in sharers:
        method.sharers = sharers


def _put(module: Weighted, methods: list[Method]) -> None:
    """
    #### Compute with what these methods make of a layer's weight, bias and input
    """
    of_weight = [method for method in methods if not isinstance(method, QuantisedInput)]
    if of_weight:
        parametrize.register_parametrization(
            module, "weight", Compressed(of_weight, module), unsafe=True)
    for method in methods:
        if isinstance(method, QuantisedInput):
            module.compressed_input = method
            module.register_forward_pre_hook(_round_input, with_kwargs=True)
        if (isinstance(method, PrunedParts) and method.rule.kind == "row"
                and getattr(module, "bias", None) is not None):
            parametrize.register_parametrization(module, "bias", PrunedBias(method), unsafe=True)


def _round_input(module: Weighted,
                 args: tuple,
                 kwargs: dict) -> tuple[tuple, dict]:
    """
    #### A hook before the forward pass of a layer
    """
    if args:
        return (module.compressed_input(args[0]), *args[1:]), kwargs
    name = next(iter(inspect.signature(module.forward).parameters))
    return args, kwargs | {name: module.compressed_input(kwargs[name])}

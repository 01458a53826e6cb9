r"""
# Compress: rules for weights, which advance with the optimizer

`compress` puts rules on the layers of a plain model. Then the model is wrapped and trained as
always.

    layers = [Block() for _ in range(4)]
    compress(layers, {"*.linear": [Prune(0.5, start=100, end=500), Quantize(4, start=300)]})
    model = Zero3Sequential([Zero3Layer(layer) for layer in layers])
    optimizer = Zero3Optimizer(model, torch.optim.AdamW, lr=1e-3)

Names are those of `nn.Sequential(*layers)`, and a pattern is that of a shell: `*` stands for any
part of a name, and `*.first|*.second` for names of either kind. Each pattern has a list of rules,
which apply to every layer with a `weight` that it matches.

**After each step** of an optimizer that trains one of these weights, the schedule advances by one:

| | on each rank | between ranks |
|---|---|---|
| steps | one more | |
| thresholds of elements | count the keys of its own shards | counts, `thresholds.py` |
| ranges of inputs | the least and the greatest since the last step | 8 bytes for each input |
| everything else | made from the gathered weight | |

Take the weights 0.1, −0.7 on rank 0 and 0.4, −0.2 on rank 1, with the sparsity one half. Both
ranks count, both learn that the threshold is the key of −0.2, and each of them makes the same mask
as soon as it has gathered the four weights:

$$0.1,\; -0.7,\; 0.4,\; -0.2 \quad\to\quad 0,\; -0.7,\; 0.4,\; 0$$

**Fewer bytes between ranks.** A weight that is rounded to 8 bits need not be gathered in 32. With
`Zero3Layer(layer, mesh=Links(weights=Int8()))` the layer is quantised before the gather too, in
blocks of its flat parameter, and an all-gather sends 1.03 bytes for an element in place of 4.

**At rest** a compressed model has what it had before, 16 bytes for each rule and weight on each
rank, and learnt scores in shards. There are no masks: a threshold takes less than bits would.

**Resume.** Steps and thresholds are buffers, and scores are parameters, so `zero3.save` saves
them. A run that resumes goes on with the same masks, on another number of ranks too. It has to
call `compress` with the same rules before it loads.

**Run this**: `python -m pytest tests/test_compression.py -k ranks`.

**Not covered, and what that costs**: the names of a checkpoint. A compressed weight is called
`...parametrizations.weight.original`, so a checkpoint of the uncompressed model does not load; load
plain weights before `compress`. A model on the meta device. A weight with two names. Encodings of
gathered weights (`Links(weights=...)`) beside pruned elements, because the ranks would count other
numbers than they compute with. A step that a loss scale skips counts as one.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook

from zero3.compression.freeing import Compressed, after_forward, before_forward
from zero3.compression.rules import Prune, Quantize
from zero3.compression.thresholds import DIGIT, key_bits, kth_keys, layer_of, own_keys
from zero3.compression.weights import (
    Method,
    Pruned,
    PrunedBias,
    PrunedElements,
    PrunedFours,
    PrunedParts,
    Quantised,
    QuantisedInput,
)
from zero3.guards.options import expect
from zero3.optimizer.buckets import Bucket
from zero3.optimizer.stage3 import Zero3Optimizer

Rules = dict[str, list[Prune | Quantize]]
_ELEMENTS = ("element", "2:4")
# Magnitude and place of an element are a key of at most 63 bits.
MOST_SHARED = 2**31 - 1


def compress(model: nn.Module | Iterable[nn.Module], rules: Rules) -> "Compression":
    """
    ## Put rules on the weights of a plain model, in place

    All ranks call it alike, before wrapping.

    * `model` is a module, or a list of layers
    * `rules` has a list of `Prune` and `Quantize` for each pattern of names. Of those that one
      weight has, elements are pruned first, then rows, channels and heads; then it is quantised

    Returns the record of what is compressed. Raises `TypeError` for anything that is no rule, and
    `ValueError` if a pattern matches no weight, if a weight is matched twice or is tied, or if a
    rule does not fit the weight's shape.
    """
    found = named_modules(model)
    split = [name for name, module in found.items() if "line" in vars(module)]
    expect(not split, "compress", "whole weights, because thresholds and scales are for these",
           f"`{split[:1]}`, which `tensor_parallel` has split", "leave one of the two out")
    # A tied weight has several.
    uses = Counter(p for module in found.values() for p in module._parameters.values())
    places: list[Place] = []
    groups: list[list[PrunedElements]] = []
    for pattern, methods in rules.items():
        matched = {name: module for name, module in found.items() if _has_weight(module)
                   and any(fnmatchcase(name, each) for each in pattern.split("|"))}
        expect(bool(matched), f"compress: the pattern `{pattern}`", "a layer with a weight of two "
               "dimensions or more", "none, or one that another pattern has compressed",
               f"look at the names, {[*found][:20]}")
        for name, module in matched.items():
            _check(name, module, methods, uses)
        added = [_add(module, methods) for module in matched.values()]
        groups += _groups(added)
        places += added
    compression = Compression(places, groups)
    # What is pruned from the start on.
    compression.find_thresholds()
    return compression


def named_modules(model: nn.Module | Iterable[nn.Module]) -> dict[str, nn.Module]:
    """
    ## The modules of a model or of a list of layers, by their names in the plain model
    """
    whole = model if isinstance(model, nn.Module) else nn.Sequential(*model)
    return dict(whole.named_modules())


@dataclass(eq=False)
class Place:
    """
    ## One compressed layer

    `stored` has the weight that is trained, `stored.original`; it is `None` if only inputs are
    rounded.
    """

    stored: Any
    methods: list[Method]

    def params(self) -> Iterator[Any]:
        """
        ### The stored weight and its learnt scores
        """
        yield getattr(self.stored, "original", None)
        for method in self.methods:
            yield getattr(method, "score", None)


class Compression:
    """
    ## The record of a call of `compress`

    The compressed layers share it. It follows the steps of optimizers as long as one of them lives.
    """

    def __init__(self, places: list[Place], groups: list[list[PrunedElements]]):
        """
        ### Follow the steps of optimizers

        * `groups` are the prunings whose elements share a threshold
        """
        self.places = places
        self.groups = groups
        for place in places:
            for method in place.methods:
                method.compression = self
        ours = weakref.ref(self)

        def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
            compression = ours()
            # `step(closure)` of a `Zero3Optimizer` calls `step()`, which has been counted.
            closure = [*args[1:], kwargs.get("closure")]
            is_twice = isinstance(optimizer, Zero3Optimizer) and any(closure)
            if compression is not None and not is_twice and compression.is_trained_by(optimizer):
                compression.advance()

        weakref.finalize(self, register_optimizer_step_post_hook(after_step).remove)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Compression":
        # The copy of a model follows its own optimizer.
        new = Compression.__new__(Compression)
        memo[id(self)] = new
        Compression.__init__(new, copy.deepcopy(self.places, memo),
                             copy.deepcopy(self.groups, memo))
        return new

    def methods(self, kind: Any = Method) -> Iterator[Any]:
        """
        ### What the rules do, weight by weight
        """
        for place in self.places:
            yield from (method for method in place.methods if isinstance(method, kind))

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """
        ### Whether an optimizer trains one of these weights, or its shard

        A `Zero3Optimizer` steps its shards by an optimizer inside of it, which does not count.
        """
        stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return any(_is_stepped(param, optimizer, stepped)
                   for place in self.places for param in place.params())

    @torch.no_grad()
    def advance(self) -> None:
        """
        ### One more step: find thresholds and ranges anew

        All ranks call it together, because the step of the optimizer does.
        """
        for method in self.methods():
            method.state[0] += 1
        self.find_thresholds()
        self._move_ranges()

    def _layer(self) -> Any:
        """
        #### One of the sharded layers, which sends for all of them; or none in a plain model
        """
        layers = (layer_of(param) for place in self.places for param in place.params())
        return next((layer for layer in layers if layer is not None), None)

    @torch.no_grad()
    def find_thresholds(self) -> None:
        """
        ### Find the threshold of each group of elements, over all ranks

        Gathers counts of all groups together: see `kth_keys`. All ranks must call this.
        """
        groups = self._active()
        if not groups:
            return
        layer = self._layer()

        def total(counts: torch.Tensor) -> torch.Tensor:
            if layer is None:
                return counts
            # The other rows are those of replicas, which have the same shards.
            rows = layer.comm.numbers(layer, counts)[: layer.comm.world_size]
            return layer.comm.over_stages(layer, rows.sum(dim=0)).sum(dim=0)

        own = own_keys([pruned for group in groups for pruned in group])
        keys = [torch.cat([own[pruned] for pruned in group]) for group in groups]
        sizes = torch.tensor([len(each) for each in keys], device=keys[0].device)
        lists = torch.arange(len(keys), device=sizes.device).repeat_interleave(sizes)
        found = kth_keys(torch.cat(keys), lists, [group[0].count for group in groups],
                         key_bits(groups), total)
        for group, threshold in zip(groups, found, strict=True):
            for pruned in group:
                pruned.state[1] = threshold

    def _active(self) -> list[list[PrunedElements]]:
        """
        #### The groups that prune something now
        """
        return [group for group in self.groups if group[0].count]

    def counting(self) -> tuple[int, int]:
        """
        ### What a rank sends in a step to find thresholds: bytes and messages

        The formula of `thresholds.py`.
        """
        groups = self._active()
        layer = self._layer()
        nbytes = 0
        messages = 0
        if groups and layer is not None:
            rounds = -(-key_bits(groups) // DIGIT)
            round_bytes = len(groups) * (1 << DIGIT) * 8
            for group in layer.comm.groups:
                nbytes += rounds * round_bytes * (group.size - 1)
                messages += rounds * (group.size - 1)
                # The replicas send each other the counts of all their ranks.
                round_bytes *= group.size
        return nbytes, messages

    def _move_ranges(self) -> None:
        """
        #### Move the ranges of inputs towards those that all ranks have seen since the last step

        All-gather of two numbers for each input. The least and the greatest of all ranks do not
        depend on how the batch was split.
        """
        inputs = [each for each in self.methods(QuantisedInput) if each.rule.moving is not None]
        if not inputs:
            return
        seen = torch.stack([each.seen for each in inputs])  # (inputs, 2)
        seen[:, 0].neg_()
        layer = self._layer()
        if layer is not None:
            rows = layer.comm.numbers(layer, seen.view(-1)).amax(dim=0)
            seen = layer.comm.over_stages(layer, rows).amax(dim=0).view_as(seen)
        seen[:, 0].neg_()
        for each, new in zip(inputs, seen, strict=True):
            each.move(new)


def _is_stepped(param: Any, optimizer: torch.optim.Optimizer, stepped: set[int]) -> bool:
    """
    #### Whether an optimizer trains a weight, or its shard

    * `stepped` has the ids of what the optimizer steps
    """
    layer = layer_of(param)
    if layer is None:
        return id(param) in stepped
    if isinstance(optimizer, Zero3Optimizer):
        return layer.reducer in optimizer.buckets
    # A layer of a `Zero3Optimizer` is stepped by the optimizer inside of it, too.
    return (not isinstance(layer.reducer, Bucket)
            and any(id(flat.shard) in stepped for flat in layer.flats))


# ------------------------------------------------------------------------------------ put in place


def _has_weight(module: nn.Module) -> bool:
    """
    #### Whether a module has a weight that can be compressed
    """
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() >= 2


def _check(name: str, module: Any, methods: list[Any], uses: Counter[Any]) -> None:
    """
    #### Refuse rules that do not fit a weight, before anything changes
    """
    expect(isinstance(methods, (list, tuple)) and len(methods) > 0
           and all(isinstance(rule, (Prune, Quantize)) for rule in methods),
           f"compress: the rules of `{name}`", "a list of `Prune` and `Quantize`", repr(methods),
           "pass one", TypeError)
    kinds = [_order(rule) for rule in methods]
    expect(len({*kinds}) == len(kinds), f"compress: the rules of `{name}`", "one of each kind",
           methods, "leave one of them out")
    weight = module.weight
    parts = [rule for rule in methods if isinstance(rule, Prune) and rule.kind not in _ELEMENTS]
    expect(not parts or not isinstance(module, nn.Embedding), f"compress: `{name}`", "rules for "
           "elements, because the rows of an embedding are tokens and not outputs", parts,
           'pass `kind="element"` or "2:4"')
    expect(not weight.is_meta, f"compress: `{name}`", "a weight with values", "one on the meta "
           "device", "build the layer first")
    expect(uses[weight] == 1, f"compress: `{name}`", "a weight of this layer alone",
           "one that another layer has too", "give each of them its own")
    for rule in methods:
        expect(_suits(rule, weight), f"compress: `{name}` of {tuple(weight.shape)}, {weight.dtype}",
               "a weight that splits into such groups or heads; for elements, of at most 32 bits",
               rule, "pass other numbers, or match other layers")


def _suits(rule: Prune | Quantize, weight: torch.Tensor) -> bool:
    """
    #### Whether the shape and the data type of a weight allow a rule
    """
    row_numel = weight[0].numel()
    if isinstance(rule, Quantize):
        return row_numel % (rule.group or 1) == 0
    if rule.kind == "element":
        return weight.element_size() <= 4
    if rule.kind == "2:4":
        return row_numel % 4 == 0
    return rule.heads is None or weight.shape[1] % rule.heads == 0


def _class(rule: Prune | Quantize) -> Any:
    """
    #### The class that does what a rule says
    """
    if isinstance(rule, Prune):
        return {"element": PrunedElements, "2:4": PrunedFours}.get(rule.kind, PrunedParts)
    return Quantised if rule.of == "weight" else QuantisedInput


def _order(rule: Prune | Quantize) -> int:
    """
    #### The place of a rule among those of a layer, which has one of each place
    """
    places = {PrunedElements: 0, PrunedFours: 0, PrunedParts: 1, Quantised: 2, QuantisedInput: 3}
    return places[_class(rule)]


def _add(module: Any, rules: list[Any]) -> Place:
    """
    #### Put rules on one layer
    """
    weight = module.weight
    methods: list[Method] = [_class(rule)(rule, weight) for rule in sorted(rules, key=_order)]
    of_weight = [method for method in methods if not isinstance(method, QuantisedInput)]
    if len(of_weight) < len(methods):
        module.compressed_input = methods[-1]
        module.register_forward_pre_hook(_round_input)
    if of_weight:
        _add_to_weight(module, of_weight)
    return Place(module.parametrizations.weight if of_weight else None, methods)


def _add_to_weight(module: Any, methods: list[Method]) -> None:
    """
    #### Compute with what these methods make of the weight
    """
    parametrize.register_parametrization(module, "weight", Compressed(methods), unsafe=True)
    module.register_forward_pre_hook(before_forward)
    module.register_forward_hook(after_forward)
    for method in methods:
        if isinstance(method, Pruned):
            method.attach(module.parametrizations.weight)
        if isinstance(method, PrunedParts) and method.rule.kind == "row" \
                and module.bias is not None:
            parametrize.register_parametrization(module, "bias", PrunedBias(method), unsafe=True)


def _round_input(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """
    #### A hook before the forward pass of a layer
    """
    return (module.compressed_input(args[0]), *args[1:])


def _groups(places: list[Place]) -> list[list[PrunedElements]]:
    """
    #### The prunings of one pattern whose elements share a threshold
    """
    pruned = [method for place in places for method in place.methods
              if isinstance(method, PrunedElements)]
    if not pruned or pruned[0].rule.scope == "layer":
        return [[each] for each in pruned]
    numel = sum(each.shape.numel() for each in pruned)
    expect(numel <= MOST_SHARED, "compress: a global threshold", f"at most {MOST_SHARED:,} "
           "elements", f"{numel:,}", "use several patterns, or `scope=\"layer\"`")
    first = 0
    for each in pruned:
        each.share(first, numel)
        first += each.shape.numel()
    return [pruned]

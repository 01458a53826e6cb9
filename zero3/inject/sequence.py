r"""
# Sequence parallelism: norms and the residual stream on some of the positions

With `tensor_parallel(mesh, sequence=True)` each rank keeps only some of the positions of a sequence
between the split layers.

Norms, dropouts and the residual stream treat each position by itself. Take four positions
$x_0 \ldots x_3$ on two ranks:

| | rank 0 | rank 1 |
|---|---|---|
| residual stream and norm | $x_0\; x_1$ | $x_2\; x_3$ |
| $f$: all-gather | $x_0\; x_1\; x_2\; x_3$ | $x_0\; x_1\; x_2\; x_3$ |
| split layers: a summand for each position | $a_0\; a_1\; a_2\; a_3$ | $b_0\; b_1\; b_2\; b_3$ |
| $g$: reduce-scatter | $a_0 + b_0$, $a_1 + b_1$ | $a_2 + b_2$, $a_3 + b_3$ |

**Conjugate communication.** In backward each of the two becomes the other one:

| | forward | backward |
|---|---|---|
| $f$, where the split begins | all-gather | reduce-scatter |
| $g$, where it ends | reduce-scatter | all-gather |
| the stream begins | keep the own positions | all-gather |
| the stream ends | all-gather | keep the own positions |

A reduce-scatter and an all-gather together send as much as the all-reduce that they replace. So
with $T$ positions of $d$ features with $b$ bytes, on $t$ ranks, a rank sends for $L$ layers

$$\underbrace{8 L\,\frac{t-1}{t}\,T d b}_{\text{as before}} +
\underbrace{2\,\frac{t-1}{t}\,T d b}_{\text{both ends of the stream}}$$

bytes, and keeps $t$ times fewer activations of the stream. Section 4.2.2 of [Korthikanti et
al.](https://arxiv.org/abs/2205.05198) calls the two $g$ and $\bar g$.

**Weights of norms** get a gradient from each rank's own positions. So do biases that are added
after $g$. Both are all-reduced in backward, $2\frac{t-1}{t}$ times their bytes.

**Dropout.** Each rank draws the mask of all positions, as the plain model does, and takes its part.

**Other lengths.** Five positions on two ranks are two and three; a single one, as in generation, is
none and one. Shorter parts are padded while they travel.

**Run this**: `python -m pytest tests/inject/test_tensor_parallel.py -k sequence`.

**Not covered, and what that costs**: the gathered inputs of split layers are kept for backward.
Embeddings, their dropout, and all that comes after the final norm are computed on whole sequences.
Hidden states of single layers (`output_hidden_states`) have the positions of this rank. Between a
forward and its backward with checkpointed activations, a pass of another length is an error. Models
without a stream in `policies.py` are refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from zero3.guards.checks import expect
from zero3.inject.line import Border, Line, Swap
from zero3.inject.replace import Replacement, become, own_class

# Modules that treat each position by itself.
_POSITIONWISE = (nn.LayerNorm, nn.RMSNorm, nn.Dropout, nn.Identity)


@dataclass(frozen=True)
class Stream:
    """
    ## The part of a model in which each rank has some of the positions

    It begins with the first of the `blocks` and ends with the module `last`, or with the last
    block.
    """

    blocks: str
    last: str = ""
    dim: int = 1  # the dimension of positions
    # The full names of the classes of blocks, of containers inside them, and of norms.
    classes: tuple[str, ...] = ()
    # Modules that use other sequences. Blocks must not have them.
    absent: tuple[str, ...] = ("crossattention", "src_attn")

    def along(self, module: nn.Module) -> list[nn.Module]:
        """
        ### The blocks, in their order, and the module that the stream ends with
        """
        last = [module.get_submodule(self.last)] if self.last else []
        return [*cast(nn.ModuleList, module.get_submodule(self.blocks)), *last]

    def inside(self, module: nn.Module,
               split: Mapping[nn.Module, Any]) -> Iterator[nn.Module]:
        """
        ### The modules that compute with some of the positions, and the split ones

        * `split` has the patterns of split modules. What is inside of such a module has all
          positions, unless it comes after the last split layer
        """
        waiting = self.along(module)
        while waiting:
            each = waiting.pop()
            yield each
            if each in split:
                waiting += [each.get_submodule(name) for name in split[each].after]
            else:
                waiting += each.children()

    def problems(self, module: nn.Module,
                 split: Mapping[nn.Module, Any]) -> Iterator[str]:
        """
        ### Why the stream cannot be split
        """
        along = self.along(module)
        if len({*along}) < len(along):
            yield f"a {own_class(along[0]).__name__} that it uses several times"
        for each in self.inside(module, split):
            kind = own_class(each)
            for name in self.absent:
                if getattr(each, name, None) is not None:
                    yield f"its {kind.__name__} has a `{name}`"
            if (each not in split
                    and kind not in _POSITIONWISE
                    and torch.typename(kind) not in self.classes):
                yield f"its {kind.__name__} may need all positions"
            if "forward" in vars(each):
                yield f"its {kind.__name__} has a `forward` of its own"

    def prepare(self, module: nn.Module, line: Line) -> None:
        """
        ### Note which modules compute with some of the positions only

        Raises `ValueError` if the stream cannot be split.
        """
        problem = next(self.problems(module, line.patterns), "")
        expect(not problem, "tensor_parallel: `sequence=True`", "modules that treat each position "
               f"by itself in `{type(module).__name__}`", problem, "leave `sequence` out")
        line.borders.update(dict.fromkeys(
            self.inside(module, line.patterns),
            SequenceBorder(line, self.dim)))

    def begin(self, module: nn.Module, line: Line) -> None:
        """
        ### Give the modules of the stream their new classes
        """
        along = self.along(module)
        border = line.borders[along[0]]
        for each in dict.fromkeys(self.inside(module, line.patterns)):
            names = tuple(name for name, p in each._parameters.items()
                          if p is not None)
            if isinstance(each, nn.Dropout):
                become(each, PartialDropout, border=border, dim=self.dim)
            elif names and each not in line.patterns:
                become(each, SummedWeights, border=border, names=names)
        become(along[0], StreamBegin, border=border)
        become(along[-1], StreamEnd, border=border)


@dataclass(eq=False)
class SequenceBorder(Border):
    """
    ## $f$ and $g$ between some of the positions and all of them
    """

    dim: int  # the dimension of positions
    length: int = 0  # of the sequences of the last forward pass

    def states(self, args: tuple, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """
        ### The arguments that are parts of sequences: the first one, and those with a known name

        Masks and positions are whole.
        """
        return [
            *args[:1],
            # As the classes of known streams call them.
            *(kwargs[name] for name in ("hidden_states", "x", "query", "key", "value")
              if name in kwargs)]

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### $f$: all-gather in forward, reduce-scatter in backward
        """
        return Swap.apply(
            x,
            partial(self.gathered, self.length),
            partial(self.summed, self.length))

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### $g$: reduce-scatter in forward, all-gather in backward
        """
        return Swap.apply(
            x,
            partial(self.summed, self.length),
            partial(self.gathered, self.length))

    def begin(self, whole: torch.Tensor) -> torch.Tensor:
        """
        ### The own positions in forward, all-gather in backward
        """
        self.length = whole.shape[self.dim]
        return Swap.apply(
            whole,
            partial(self.own, self.length),
            partial(self.gathered, self.length))

    def end(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### All-gather in forward, the own positions in backward
        """
        return Swap.apply(
            x,
            partial(self.gathered, self.length),
            partial(self.own, self.length))

    def weight(self, param: torch.Tensor) -> torch.Tensor:
        """
        ### A weight that each rank uses for its own positions: the gradients are summed
        """
        return self.line.border.enter(param) if param.requires_grad else param

    def sizes(self, x: torch.Tensor, dim: int) -> tuple[int, ...]:
        """
        ### How many positions each rank has
        """
        return self.line.sizes(self.length)

    def own(self, length: int, whole: torch.Tensor) -> torch.Tensor:
        """
        ### This rank's positions, a copy

        * `length` is that of the pass that this is part of, here and below
        """
        return (whole
                .split(self.line.sizes(length), self.dim)[self.line.group.rank]
                .clone(memory_format=torch.contiguous_format))

    def gathered(self, length: int, x: torch.Tensor) -> torch.Tensor:
        r"""
        ### All positions of the sequence (all-gather)

        A rank sends $t-1$ times the bytes of the longest part. All ranks must call it. Raises
        `RuntimeError` if `x` is of a sequence of another length.
        """
        count = self.line.sizes(length)[self.line.group.rank]
        expect(x.shape[self.dim] == count, "sequence parallelism", f"{count} of {length} "
               "positions on this rank", f"{x.shape[self.dim]} positions", "with checkpointed "
               "activations, run no pass of another length between forward and backward",
               RuntimeError)
        return self.line.gather_parts(x, self.dim, length)

    def summed(self, length: int, x: torch.Tensor) -> torch.Tensor:
        r"""
        ### The sum over ranks, of this rank's positions (reduce-scatter)

        A rank sends $t-1$ times the bytes of the longest part. All ranks must call it.
        """
        sizes = self.line.sizes(length)
        total = self.line.reduce_scatter(torch.stack([
            self.line.padded(part, self.dim, length)
            for part in x.split(sizes, self.dim)]))
        return total.narrow(self.dim, 0, sizes[self.line.group.rank]).contiguous()


# --------------------------------------------------------------------------- modules of a stream


class InStream(Replacement):
    """
    ## A module that computes with some of the positions
    """

    border: SequenceBorder


class StreamBegin(InStream):
    """
    ## The first block, which keeps its rank's positions
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole, *_ = self.border.states(args, kwargs)
        args, kwargs = exchanged(
            args,
            kwargs,
            {id(whole): self.border.begin(whole)})
        return super().forward(*args, **kwargs)


class StreamEnd(InStream):
    """
    ## The last module, whose output has all positions again
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.border.end(super().forward(*args, **kwargs))


class SummedWeights(InStream):
    """
    ## A norm of some of the positions, with gradients that are summed over the ranks
    """

    names: tuple[str, ...]  # of its weights

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # A sharded module has its weights among its attributes, which are found first.
        attributes = vars(self)
        before = {name: attributes[name] for name in self.names if name in attributes}
        try:
            attributes.update({
                name: self.border.weight(getattr(self, name))
                for name in self.names})
            return super().forward(*args, **kwargs)
        finally:
            for name in self.names:
                attributes.pop(name, None)
            attributes.update(before)


class PartialDropout(Replacement):
    """
    ## Dropout of a part of a tensor, with the mask of the plain model

    The part has some of the heads, the features or the positions.
    """

    p: float
    border: Border
    dim: int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### Zeros where the plain model has them
        """
        if not self.training or not self.p:
            return x
        sizes = self.border.sizes(x, self.dim)
        shape = [*x.shape]
        shape[self.dim] = sum(sizes)
        # A mask is drawn in the order of memory, so the whole mask has the order that `x` has.
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        ones = torch.empty_permuted(shape, order, dtype=x.dtype, device=x.device).fill_(1)
        mine = F.dropout(ones, self.p).split(sizes, self.dim)[self.border.line.group.rank]
        return x * mine


def exchanged(args: tuple, kwargs: Mapping[str, Any], found: Mapping[int, Any]
              ) -> tuple[tuple, dict[str, Any]]:
    """
    ## Arguments of a call, with other tensors for some of them

    * `found` has the new ones, by the `id` of the old ones. One tensor may be several arguments
    """
    return (
        tuple(found.get(id(arg), arg) for arg in args),
        {name: found.get(id(arg), arg) for name, arg in kwargs.items()})

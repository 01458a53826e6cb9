r"""
# Tensor parallelism: ranks that compute one layer together

`tensor_parallel` splits the linear layers of a model over the ranks of a mesh dimension: each rank
multiplies with its own part of the weights, and they add up the results.

Take a feed-forward network $y = W_2 \, \phi(W_1 x)$ with four hidden features, on two ranks:

| | rank 0 | rank 1 |
|---|---|---|
| $W_1$, split by rows: the *column-split* layer | features 0 1 | features 2 3 |
| $h = \phi(W_1 x)$ | $h_0\; h_1$ | $h_2\; h_3$ |
| $W_2$, split by columns: the *row-split* layer | for $h_0\; h_1$ | for $h_2\; h_3$ |
| $W_2 h$, a summand | $a$ | $b$ |
| all-reduce | $a + b$ | $a + b$ |

The names are those of $x W^T$, where the weight is transposed. Between the two layers nothing is
exchanged, because $\phi$ takes each feature by itself. In attention each rank has some heads.

**Conjugate communication.** All ranks have the same $x$, and each computes the gradient of $x$
through its own part; the whole gradient is the sum. So there are two operations, which
[Megatron-LM](https://arxiv.org/abs/1909.08053) calls $f$ and $g$ (section 3, figure 3):

| | forward | backward |
|---|---|---|
| $f$, where the split begins | identity | all-reduce |
| $g$, where it ends | all-reduce | identity |

After both of them all ranks have the same bits, so weights that are not split stay equal without
communication.

**Vocabulary.** Embedding and head are split by tokens. A rank looks up the tokens that it has, and
zeros for the others, and $g$ adds them up. The head's logits are gathered. With the policy
`cross_entropy` the loss exchanges only the logarithm of the sum of $e^{\text{logit}}$ and the logit
of the target, two numbers for each position.

A layer with attention and a feed-forward network has both twice. For $T$ positions of $d$ features
with $b$ bytes, on $t$ ranks, a rank sends in a layer's forward and backward

$$\underbrace{2}_{f} \cdot 2\,\frac{t-1}{t}\,T d b \;+\;
\underbrace{2}_{g} \cdot 2\,\frac{t-1}{t}\,T d b \;=\; 8\,\frac{t-1}{t}\,T d b$$

bytes. The embedding has another $g$ and the head another $f$, and the logits of $V$ tokens travel
once:

$$4\,\frac{t-1}{t}\,T d b + (t-1)\,T \left\lceil \frac{V}{t} \right\rceil b$$

All of it grows with the batch, so tensor parallelism is for fast links. ZeRO-3 on $t$ ranks sends
$3 \frac{t-1}{t}$ of each weight instead, however many positions there are.

**With ZeRO-3**: on a mesh ("tensor", "shard") each rank shards its own part of each weight over the
ranks of "shard", which have the same part and other rows of the batch.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "shard"))
    model = inject(model, [policies.tensor_parallel(mesh["tensor"])])
    model = wrap(model, Block, mesh=mesh["shard"])

**Run this**: `python -m pytest tests/inject/test_tensor_parallel.py`.

**Not covered, and what that costs**: norms and the residual stream are computed and kept whole on
each rank, unless `sequence=True` splits them by positions (see `sequence.py`). `full_params` and
`model.save` have this rank's parts; use `zero3.save`, or `restore`. All ranks need the same batch
and random numbers; only the first forward pass compares them. A `GradScaler` needs `wrap`, or ranks
disagree on an overflow and hang.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from zero3.comm.parts import WeightPart
from zero3.guards.checks import expect
from zero3.inject.line import Border, Line, Swap
from zero3.inject.replace import Replacement, become
from zero3.inject.sequence import PartialDropout, Stream, exchanged

# Of each split parameter of a layer: the dimension that is split, and the number of blocks.
Dims = dict[str, tuple[int, int]]


@dataclass(frozen=True)
class Pattern:
    r"""
    ## Which layers of a module are split, and how

    All are names of modules or numbers inside it. Names that it does not have are passed over, but
    in `dropouts` and `after` they are errors. For a network of Llama's it is

        Pattern(columns=("gate_proj", "up_proj"), rows=("down_proj",))

    | layer | weight | on each of two ranks |
    |---|---|---|
    | `gate_proj`, `up_proj` | $(f, d)$ | $(\frac{f}{2}, d)$, some of the outputs |
    | `down_proj` | $(d, f)$ | $(d, \frac{f}{2})$, some of the inputs |

    An attention computes with numbers that count its heads. Where the module keeps such a number,
    it is `divided` by the number of ranks. Where it derives them from shapes, the number must be
    `divisible`. A module that no pattern names stays whole on each rank.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()  # convolutions that the heads of all ranks use
    dropouts: tuple[tuple[str, int], ...] = ()  # with the dimension that is split
    # The number of features in each block, if several weights were put together in `columns`.
    block: str = ""
    # Numbers that are divided, those that must be divisible, and those that must be zero.
    divided: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()
    # With `sequence=True`: modules behind the last split layer, and the stream in this module.
    after: tuple[str, ...] = ()
    stream: Stream | None = None

    def parts(self, module: nn.Module) -> Iterator[tuple[Any, type["Weights"], Dims]]:
        """
        ### The split layers of a module
        """
        for names, by, dim in (
                (self.columns, Column, 0),
                (self.rows, Row, 1),
                (self.embeddings, VocabularyEmbedding, 0),
                (self.heads, VocabularyHead, 0),
                (self.shared, SharedConvolution, None)):
            for child in filter(None, [_attribute(module, name) for name in names]):
                dims = {}
                if dim is not None:
                    at = 1 - dim if _conv1d(child) else dim
                    blocks = (child.weight.shape[at] // _attribute(module, self.block)
                              if by is Column and self.block else 1)
                    dims["weight"] = (at, blocks)
                    if dim == 0 and getattr(child, "bias", None) is not None:
                        dims["bias"] = (0, blocks)
                yield child, by, dims


class Split(Replacement):
    """
    ## A module with split layers inside
    """

    all_or_none = True
    line: Line
    pattern: Pattern

    @classmethod
    def problem(cls, module: nn.Module) -> str:
        for name in (*cls.pattern.divided, *cls.pattern.divisible):
            value = _attribute(module, name)
            if value is not None and value % cls.line.size:
                return f"its `{name}` is {value}, for {cls.line.size} ranks"
        for name in cls.pattern.zero:
            if _attribute(module, name):
                return f"its `{name}` would draw another mask on each rank"
        for child, by, dims in cls.pattern.parts(module):
            if problem := by.unfit(child, dims, cls.line.size):
                return f"its {type(child).__name__} {problem}"
        return ""

    def begin(self) -> None:
        if self.pattern.stream:
            self.pattern.stream.begin(self, self.line)
        self.border = self.line.borders.get(self, self.line.border)
        parts = [*self.pattern.parts(self)]
        self.whole_values = {name: value for name in self.pattern.divided
                             if (value := _attribute(self, name)) is not None}
        for name, value in self.whole_values.items():
            _set_attribute(self, name, value // self.line.size)
        for child, by, dims in parts:
            expect(not isinstance(child, Replacement), "tensor_parallel", "plain layers",
                   f"a {type(child).__name__}", "leave the other policy out", RuntimeError)
            become(child, by, border=self.border)
            child.split(self.line, dims)
        for name, dim in self.pattern.dropouts:
            become(self.get_submodule(name), PartialDropout, border=self.line.border, dim=dim)

    def end(self) -> None:
        for name, value in self.whole_values.items():
            _set_attribute(self, name, value)
        del self.whole_values, self.border

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """
        ### $f$ for its inputs, then the module's own forward
        """
        self.line.compare_once(self, (*args, *kwargs.values()))
        if self.pattern.columns:
            # Without $f$ each rank would send back the gradient of its own part.
            expect(not any(isinstance(t, torch.Tensor) and t.requires_grad
                           for value in (*args, *kwargs.values())
                           if isinstance(value, (tuple, list)) for t in value),
                   type(self).__name__, "tensors that need a gradient as arguments",
                   "some inside a tuple or a list", "pass each as an argument of its own")
            # One tensor may be query, key and value.
            args, kwargs = exchanged(args, kwargs, {
                id(t): self.border.enter(t)
                for t in dict.fromkeys(self.border.states(args, kwargs))})
        return super().forward(*args, **kwargs)


class Weights(Replacement):
    """
    ## A layer that has parts of its weights
    """

    stands_for: type[nn.Module] = nn.Linear
    uneven = False
    border: Border
    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def unfit(cls, module: Any, dims: Dims, ranks: int) -> str:
        """
        ### Why a layer cannot be split over so many ranks, or an empty string
        """
        plain: Any = _conv1d(module) or cls.stands_for
        if "forward" in vars(module) or type(module).forward is not plain.forward:
            return "has a `forward` of its own"
        if not module._parameters.keys() >= dims.keys():
            return "has weights that `compress` makes, which no rank can split"
        for name, (dim, blocks) in dims.items():
            size = module._parameters[name].shape[dim] // blocks
            # A rank without any token could not look one up, and the others would wait for it.
            if size < ranks or (size % ranks and not cls.uneven):
                return f"has {size} features, for {ranks} ranks"
        return ""

    def split(self, line: Line, dims: Dims) -> None:
        """
        ### Keep this rank's part of each of these parameters
        """
        self.line = line
        self.parts: dict[str, WeightPart] = {}
        for name, (dim, blocks) in dims.items():
            whole = self.get_parameter(name)
            part = WeightPart.of(
                whole.shape,
                dim,
                line.group.rank,
                line.size,
                blocks)
            self.parts[name] = part
            self._parameters[name] = line.twin(whole, partial(_taken, part, dim))

    @torch.no_grad()
    def end(self) -> None:
        """
        ### Gather the whole weights (all-gather; all ranks must call it)
        """
        for name, part in self.parts.items():
            self._parameters[name] = self.line.twin(
                self.get_parameter(name),
                partial(self._whole, part))
        del self.line, self.parts

    def _whole(self, part: WeightPart, own: torch.Tensor) -> torch.Tensor:
        """
        #### A whole weight, of the parts of all ranks
        """
        return self.line.gather_parts(
            own.reshape(part.rows, -1, part.width),
            1,
            part.size).view(part.shape)


class Column(Weights):
    """
    ## A linear layer of which this rank computes some of the outputs
    """


class Row(Weights):
    """
    ## A linear layer of which this rank has some of the inputs

    The bias is whole on each rank, and is added once, after $g$.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight if _conv1d(self) else self.weight.t()
        out = self.border.leave(x @ weight)
        return out if self.bias is None else out + self.border.weight(self.bias)


class VocabularyEmbedding(Weights):
    """
    ## An embedding of which this rank has some of the tokens
    """

    stands_for = nn.Embedding
    uneven = True
    padding_idx: int | None

    @classmethod
    def unfit(cls, module: Any, dims: Dims, ranks: int) -> str:
        if module.max_norm or module.sparse or module.scale_grad_by_freq:
            return f"is {module}"
        return super().unfit(module, dims, ranks)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        part = self.parts["weight"]
        torch._assert_async(((ids >= 0) & (ids < part.size)).all(),
                            f"an embedding. Expected: tokens from 0 to {part.size - 1}. "
                            "Got: others. What to do: look at the data.")
        is_here = (part.begin <= ids) & (ids < part.end)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - part.begin if part.begin <= padding < part.end else None
        found = F.embedding((ids - part.begin).where(is_here, 0), self.weight, padding)
        return self.border.leave(found.where(is_here[..., None], 0))


class VocabularyHead(Weights):
    """
    ## A head of which this rank has some of the tokens, and which returns the logits of all
    """

    uneven = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        part = self.parts["weight"]
        return Swap.apply(
            F.linear(self.border.enter(x), self.weight, self.bias),
            lambda x: self.line.gather_parts(x, -1, part.size),
            lambda grad: grad[..., part.begin : part.end])


class SharedConvolution(Weights):
    """
    ## A convolution over the features of a head, which all heads use

    Each rank applies it to its own heads, so the gradient of the weight is a sum over ranks.
    """

    stands_for = nn.Conv1d
    _conv_forward: Callable[..., torch.Tensor]  # torch's

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (None if p is None else self.line.border.enter(p)
                        for p in (self.weight, self.bias))
        return self._conv_forward(x, weight, bias)


def _taken(part: WeightPart,
           dim: int,
           whole: torch.Tensor) -> torch.Tensor:
    """
    #### This rank's part of a weight that is split along a dimension
    """
    return part.take(whole).view(
        *whole.shape[:dim],
        -1,
        *whole.shape[dim + 1 :])


def _conv1d(module: nn.Module) -> type | None:
    """
    #### Hugging Face's `Conv1D`, which keeps the transposed weight, if a module is one
    """
    return next((kind for kind in type(module).__mro__
                 if torch.typename(kind) == "transformers.pytorch_utils.Conv1D"), None)


def _attribute(module: Any, path: str) -> Any:
    """
    #### An attribute of a module or of a module inside; `None` if there is none
    """
    for name in path.split("."):
        module = getattr(module, name, None)
    return module


def _set_attribute(module: Any, path: str, value: int) -> None:
    where, _, name = path.rpartition(".")
    setattr(_attribute(module, where) if where else module, name, value)

r"""
# Tensor parallelism: ranks that compute one layer together

`tensor_parallel` splits the linear layers of a model over the ranks of a mesh dimension: each rank
multiplies with its own part of the weights, and they add up the results.

Sharding divides memory, and every rank computes the whole layer for rows of its own. With tensor
parallelism the ranks compute the same rows, each a part of the layer. Take a feed-forward network
$y = W_2 \, \phi(W_1 x)$ with four hidden features, on two ranks:

| | rank 0 | rank 1 |
|---|---|---|
| $W_1$, split by rows: the *column-split* layer | features 0 1 | features 2 3 |
| $h = \phi(W_1 x)$ | $h_0\; h_1$ | $h_2\; h_3$ |
| $W_2$, split by columns: the *row-split* layer | for $h_0\; h_1$ | for $h_2\; h_3$ |
| $W_2 h$, a summand | $a$ | $b$ |
| all-reduce | $a + b$ | $a + b$ |

The layers have their names from $x W^T$, where the weight is transposed. Between the two, no rank
needs anything of the others, because $\phi$ takes each feature by itself. In attention each rank
has some of the heads.

**Conjugate communication.** All ranks have the same $x$, and each computes the gradient of $x$
through its own part; the whole gradient is the sum. So there are two operations, which
[Megatron-LM](https://arxiv.org/abs/1909.08053) calls $f$ and $g$ (section 3, figure 3):

| | forward | backward |
|---|---|---|
| $f$, where the split begins | identity | all-reduce |
| $g$, where it ends | all-reduce | identity |

After both of them all ranks have the same bits, so layer norms, dropouts and everything else
between the split layers computes the same on all ranks. Weights that are not split get the same
gradients everywhere, and stay equal without communication.

**Vocabulary.** Embedding and head are split by tokens. A rank looks up the tokens that it has, and
zeros for the others, and $g$ adds them up. The head's logits are gathered for whoever needs them.
The loss does not: `chunked_cross_entropy` exchanges the sum of $e^{\text{logit}}$ and the logit of
the target, two numbers for each position.

A layer with attention and a feed-forward network has each operation twice. For $T$ positions of $d$
features with $b$ bytes, on $t$ ranks, a rank sends in a layer's forward and backward

$$\underbrace{2}_{f} \cdot 2\,\frac{t-1}{t}\,T d b \;+\;
\underbrace{2}_{g} \cdot 2\,\frac{t-1}{t}\,T d b \;=\; 8\,\frac{t-1}{t}\,T d b$$

bytes. That grows with the batch, and the communication of ZeRO-3 with the model. So tensor
parallelism is for fast links, and splits also what a rank computes for one sequence.

**With ZeRO-3**: on a mesh ("tensor", "shard") each rank shards its own part of each weight over the
ranks of "shard", which have the same part and other rows of the batch.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tensor", "shard"))
    model = inject(model, [policies.tensor_parallel(mesh["tensor"])])
    model = wrap(model, Block, mesh=mesh["shard"])

**Run this**: `python -m pytest tests/test_tensor_parallel.py`.

**Not covered, and what that costs**: norms and the residual stream are computed and kept whole on
each rank (no sequence parallelism). `full_params` and `model.save` have this rank's parts; use
`zero3.save`, or `restore`. All ranks of the dimension must have the same batch and the same random
numbers; they compare both in the first forward pass, and not again. A model on the meta device gets
the values of the plain model from `wrap`; `Deferred` layers stay whole.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from zero3.groups.mesh import Group
from zero3.guards.options import expect
from zero3.guards.parts import WeightPart
from zero3.inject.replace import Replacement


class Line:
    """
    ## The ranks that split a model, and their collectives

    It stands for the sender of activations in a `Ledger`, under the name `tensor ranks`.
    """

    label = "tensor ranks"

    def __init__(self, group: Group):
        self.group = replace(group, same_layers=True)
        # A `Ledger` asks for the rank here.
        self.comm = self.group
        # The sharded model, once there is one: `connect` sets it.
        self.model: Any = None
        self.sent_bytes = 0
        self.compared = False
        # By the id of a parameter: the parameter, and the one that replaced it.
        self.twins: dict[int, tuple[Any, Any]] = {}

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def place(self) -> int:
        return self.group.rank

    def __deepcopy__(self, memo: Any) -> "Line":
        # A copy of a model is split over the same ranks.
        return self

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        r"""
        ### The sum over the ranks, a new tensor with the same bits on all of them

        A rank sends $2\frac{t-1}{t}$ times the bytes of `x`. All ranks must call it.
        """
        x = x.clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            dist.all_reduce(x, group=self.group.process_group)
            self._count("sum", x.nbytes, 2 * (self.size - 1) * x.nbytes // self.size)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### The tensors of all ranks: `x.shape` to `(ranks, *x.shape)`

        A rank sends $t-1$ times the bytes of `x`. All ranks must call it.
        """
        found = x.new_empty(self.size, *x.shape)
        if self.size == 1:
            return found.copy_(x)
        dist.all_gather([*found], x.contiguous(), group=self.group.process_group)
        self._count("gather", found.nbytes, (self.size - 1) * x.nbytes)
        return found

    def _count(self, event: str, nbytes: int, sent_bytes: int) -> None:
        self.sent_bytes += sent_bytes
        if self.model is not None:
            sent = SimpleNamespace(sent_bytes=sent_bytes, between_bytes=0, messages=1,
                                   order_bytes=0)
            self.model.listener.record(self, event, nbytes, sent)

    def prepare(self, model: nn.Module, classes: dict[nn.Module, Any]) -> None:
        """
        ### Give all ranks the first one's values, if their models are alike

        All ranks must call it (all-gather of names, broadcast of values). Raises `ValueError` if a
        weight is also used by a module that is not split, and on all ranks if the models differ.
        """
        new = {(child, name) for module, options in classes.items()
               for child, _, names in options.pattern.parts(module) for name in names}
        weights = {child._parameters[name] for child, name in new}
        for path, module in model.named_modules():
            for name, param in module._parameters.items():
                expect(param is None or param not in weights or (module, name) in new,
                       "tensor_parallel", "every use of a split weight to be split",
                       f"`{path}.{name}`, which is tied to one",
                       "untie it, or leave the policy out")
        tensors = [*model.named_parameters(), *model.named_buffers()]
        told = [(name, tuple(t.shape), f"{t.dtype}") for name, t in tensors]
        every: list[Any] = [told] * self.size
        if self.size > 1:
            dist.all_gather_object(every, told, group=self.group.process_group)
        for rank, theirs in zip(self.group.ranks, every, strict=True):
            expect(theirs == every[0], "tensor_parallel", "the same model on all ranks",
                   f"other parameters on rank {rank}", "build it alike on all ranks")
        for _, tensor in tensors:
            if not tensor.is_meta:
                self.broadcast(tensor.detach(), 0)

    def broadcast(self, tensor: torch.Tensor, place: int) -> None:
        """
        ### Give all ranks the values that one of them has; all ranks must call it
        """
        if self.size > 1 and tensor.numel():
            whole = tensor.contiguous()
            dist.broadcast(whole.view(-1).view(torch.uint8), group=self.group.process_group,
                           group_src=place)
            tensor.copy_(whole)

    def twin(self, param: nn.Parameter, make: Any) -> nn.Parameter:
        """
        ### The parameter that replaces another one; the same one wherever it is tied
        """
        old, new = self.twins.get(id(param), (lambda: None, lambda: None))
        found = new() if old() is param else None
        if found is None:
            found = nn.Parameter(make(), param.requires_grad)
            self.twins[id(param)] = (ref(param), ref(found))
        return found

    def compare_once(self, tensors: list[torch.Tensor]) -> None:
        """
        ### Refuse ranks that were given other values, or have other random numbers

        It looks at the first forward pass alone. All ranks must call it. Raises `ValueError`.
        """
        if self.compared or self.size == 1:
            return
        self.compared = True
        raw = [t.detach().cpu().contiguous().view(-1).view(torch.uint8)
               for t in (*tensors, torch.get_rng_state()) if t.numel()]
        told = [zlib.crc32(each.numpy().tobytes()) for each in raw]
        every: list[Any] = [told] * self.size
        dist.all_gather_object(every, told, group=self.group.process_group)
        for rank, theirs in zip(self.group.ranks, every, strict=True):
            what = "the random numbers" if theirs[:-1] == every[0][:-1] else "the inputs"
            expect(theirs == every[0], "tensor_parallel", "the same batch and the same random "
                   f"numbers on ranks {self.group.ranks}", f"{what} of rank {rank} differ",
                   "give all ranks of this mesh dimension the same rows, and the same "
                   "`torch.manual_seed`")


# -------------------------------------------------------------------------------- f, g and a gather


class _Enter(torch.autograd.Function):
    """
    #### $f$: identity in forward, all-reduce of the gradient in backward
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: Line) -> torch.Tensor:
        ctx.line = line
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        return ctx.line.all_reduce(grad), None


class _Leave(torch.autograd.Function):
    """
    #### $g$: all-reduce in forward, identity in backward
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: Line) -> torch.Tensor:
        return line.all_reduce(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        return grad, None


class _Gather(torch.autograd.Function):
    """
    #### All-gather of the last dimension in forward; in backward each rank keeps its part

    Parts that are shorter are padded while they travel.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, line: Line, part: WeightPart) -> torch.Tensor:
        ctx.part = part
        longest = -(-part.size // line.size)
        rows = line.all_gather(F.pad(x, (0, longest - x.shape[-1])))
        ends = [part.size * place // line.size for place in range(line.size + 1)]
        return torch.cat([row[..., : end - begin] for row, begin, end
                          in zip(rows, ends, ends[1:], strict=False)], -1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        return grad[..., ctx.part.begin : ctx.part.end], None, None


# ------------------------------------------------------------------------------------ split modules


@dataclass(frozen=True)
class Pattern:
    """
    ## Which layers of a module are split, and how

    All are names of modules or numbers inside it. Names that it does not have are passed over.
    """

    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()  # convolutions that the heads of all ranks use
    dropouts: tuple[tuple[str, int], ...] = ()  # with the dimension that is split
    blocks: int = 1  # weights that were put together in each of `columns`
    # Numbers that are divided, those that must be divisible, and those that must be zero.
    divided: tuple[str, ...] = ()
    divisible: tuple[str, ...] = ()
    zero: tuple[str, ...] = ()

    def parts(self, module: nn.Module
              ) -> Iterator[tuple[Any, type["Weights"], dict[str, tuple[int, int]]]]:
        """
        ### The split layers of a module

        Yields each layer, its replacement, and its split parameters with dimension and blocks.
        """
        for names, by, dim in ((self.columns, Column, 0), (self.rows, Row, 1),
                               (self.embeddings, VocabularyEmbedding, 0),
                               (self.heads, VocabularyHead, 0),
                               (self.shared, SharedConvolution, None)):
            for child in (_attribute(module, name) for name in names):
                if child is None:
                    continue
                dims = {}
                blocks = self.blocks if by is Column else 1
                if dim is not None:
                    dims["weight"] = (1 - dim if _is_transposed(child) else dim, blocks)
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
            told = f"its {type(child).__name__}"
            plain = by.stands_for.forward  # type: ignore[attr-defined]
            if "forward" in vars(child) or (type(child).forward is not plain
                                            and not _is_transposed(child)):
                return f"{told} has a `forward` of its own"
            for name, (dim, blocks) in dims.items():
                size = child._parameters[name].shape[dim] // blocks
                if by in (Column, Row) and size % cls.line.size:
                    return f"{told} has {size} features, for {cls.line.size} ranks"
            if isinstance(child, nn.Embedding) and (child.max_norm or child.sparse
                                                    or child.scale_grad_by_freq):
                return f"{told} is {child}"
        return ""

    def begin(self: Any) -> None:
        self.whole_values = {}
        for name in self.pattern.divided:
            value = _attribute(self, name)
            if value is not None:
                self.whole_values[name] = value
                _set_attribute(self, name, value // self.line.size)
        for child, by, dims in self.pattern.parts(self):
            expect(not isinstance(child, Replacement), "tensor_parallel", "plain layers",
                   f"a {type(child).__name__}", "leave the other policy out", RuntimeError)
            child.__class__ = type(f"{by.__name__}({type(child).__name__})", (by, type(child)), {})
            child.split(self.line, dims)
        for name, dim in self.pattern.dropouts:
            dropout = self.get_submodule(name)
            dropout.__class__ = type("SplitDropout", (SplitDropout, type(dropout)),
                                     {"line": self.line, "dim": dim})

    def end(self: Any) -> None:
        for name, value in self.whole_values.items():
            _set_attribute(self, name, value)
        del self.whole_values

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """
        ### $f$ for every input with a gradient, then the module's own forward
        """
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        self.line.compare_once(tensors)
        if not self.pattern.columns:
            return cast(Any, super()).forward(*args, **kwargs)
        # One tensor may be query, key and value, and is one summand of the gradient then.
        entered = {id(t): _Enter.apply(t, self.line) for t in tensors if t.requires_grad}
        args = tuple(entered.get(id(arg), arg) for arg in args)
        kwargs = {name: entered.get(id(arg), arg) for name, arg in kwargs.items()}
        return cast(Any, super()).forward(*args, **kwargs)


class Weights(Replacement):
    """
    ## A layer that has parts of its weights
    """

    all_or_none = True
    # The class whose forward this one knows.
    stands_for: type[nn.Module] = nn.Linear

    def split(self: Any, line: Line, dims: dict[str, tuple[int, int]]) -> None:
        """
        ### Keep this rank's part of each of these parameters

        * `dims` has for each parameter the dimension, and the number of blocks
        """
        self.line = line
        self.parts = {}
        for name, (dim, blocks) in dims.items():
            whole = self._parameters[name]
            part = WeightPart.of(whole.shape, dim, line.place, line.size, blocks)
            shape = [*whole.shape]
            shape[dim] = (part.end - part.begin) * blocks
            self.parts[name] = part
            self._parameters[name] = line.twin(
                whole, lambda w=whole, p=part, s=shape: p.take(w.detach()).view(s))

    @torch.no_grad()
    def end(self: Any) -> None:
        """
        ### Gather the whole weights (a broadcast from each rank; all ranks must call it)
        """
        line = self.line
        for name, part in self.parts.items():
            self._parameters[name] = line.twin(
                self._parameters[name], lambda p=part, n=name: self._whole(p, self._parameters[n]))
        del self.line, self.parts

    def _whole(self: Any, part: WeightPart, own: torch.Tensor) -> torch.Tensor:
        """
        #### A whole weight, of the parts of all ranks
        """
        line = self.line
        whole = own.new_empty(part.shape)
        for place in range(line.size):
            theirs = replace(part, begin=part.size * place // line.size,
                             end=part.size * (place + 1) // line.size)
            values = own.detach() if place == line.place else theirs.take(whole)
            line.broadcast(values, place)
            theirs.put(whole, values)
        return whole


class Column(Weights):
    """
    ## A linear layer of which this rank computes some of the outputs

    The forward is the module's own: $x W_r^T + b_r$ with the rows $W_r$ of the weight.
    """


class Row(Weights):
    """
    ## A linear layer of which this rank has some of the inputs

    $g$ adds up the products of all ranks. The bias is whole on each, and is added once, afterwards.
    """

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        # Hugging Face's `Conv1D` keeps the transposed weight.
        weight = self.weight if _is_transposed(self) else self.weight.t()
        out = _Leave.apply(x @ weight, self.line)
        return out if self.bias is None else out + self.bias


class VocabularyEmbedding(Weights):
    """
    ## An embedding of which this rank has some of the tokens

    It looks up its own tokens, and zeros for those of other ranks; $g$ adds them up.
    """

    stands_for = nn.Embedding

    def forward(self: Any, ids: torch.Tensor) -> torch.Tensor:
        part = self.parts["weight"]
        is_token = ((ids >= 0) & (ids < part.size)).all()
        if ids.device.type == "cpu":
            expect(bool(is_token), "an embedding", f"tokens from 0 to {part.size - 1}", f"{ids}",
                   "look at the data", IndexError)
        else:
            # Without waiting for the device.
            torch._assert_async(is_token)
        is_here = (part.begin <= ids) & (ids < part.end)
        own = (ids - part.begin).where(is_here, 0)
        padding = self.padding_idx
        if padding is not None:
            padding = padding - part.begin if part.begin <= padding < part.end else None
        found = F.embedding(own, self.weight, padding) * is_here[..., None]
        return _Leave.apply(found, self.line)


class VocabularyHead(Weights):
    """
    ## A head of which this rank has some of the tokens, and which returns the logits of all
    """

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        own = F.linear(_Enter.apply(x, self.line), self.weight, self.bias)
        return _Gather.apply(own, self.line, self.parts["weight"])


class SharedConvolution(Weights):
    """
    ## A convolution over the features of a head, which all heads use

    Each rank applies it to its own heads, so the gradient of the weight is a sum over ranks.
    """

    stands_for = nn.Conv1d

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (None if p is None else _Enter.apply(p, self.line)
                        for p in (self.weight, self.bias))
        return self._conv_forward(x, weight, bias)


class SplitDropout(Replacement):
    """
    ## Dropout of some of the heads or features, with the mask of the plain model

    Each rank draws the whole mask and takes its part of it.
    """

    line: Line
    dim: int

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.p:
            return x
        shape = [*x.shape]
        shape[self.dim] *= self.line.size
        # A mask is drawn in the order of memory, so the whole mask has the order that `x` has.
        order = sorted(range(x.dim()), key=x.stride, reverse=True)
        ones = x.detach().new_ones([shape[dim] for dim in order])
        mask = F.dropout(ones, self.p).permute([order.index(dim) for dim in range(x.dim())])
        count = x.shape[self.dim]
        return x * mask.narrow(self.dim, self.line.place * count, count)


def _is_transposed(module: nn.Module) -> bool:
    # Hugging Face's `Conv1D`, or a replaced one.
    return any(f"{kind.__module__}.{kind.__name__}" == "transformers.pytorch_utils.Conv1D"
               for kind in type(module).__mro__)


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

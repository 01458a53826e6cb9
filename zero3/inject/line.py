r"""
# Lines: the ranks that split a model, and what they exchange

A `Line` is the ranks of the mesh dimension "tensor". A `Border` says what they exchange where the
split layers begin and end.

A row-split layer with two outputs gives each rank a summand, and both need the sum:

| | rank 0 | rank 1 |
|---|---|---|
| summands | 1 2 | 3 4 |
| all-reduce | 4 6 | 4 6 |

With $t$ ranks and a tensor of $n$ bytes, a rank sends

$$\underbrace{\frac{t-1}{t}\,n}_{\text{reduce-scatter}} +
\underbrace{\frac{t-1}{t}\,n}_{\text{all-gather}} = 2\,\frac{t-1}{t}\,n$$

bytes; `sequence.py` uses the halves apart.

**Run this**: `python -m pytest tests/inject/test_tensor_parallel.py`.

**Not covered, and what that costs**: a collective is not started ahead, so no communication of
activations overlaps computation.
"""

import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from zero3.comm.collectives import (
    Communicator,
    all_gather_single,
    all_to_all_single,
    bytes_of,
    known,
    reduce_scatter_single,
)
from zero3.comm.order import Counted, Group
from zero3.comm.parts import WeightPart, connect
from zero3.guards.checks import expect, same
from zero3.optimizer.steps import before_steps
from zero3.sharded import ShardedModel

Operation = Callable[[torch.Tensor], torch.Tensor]


class Line:
    """
    ## The ranks that split a model, and their collectives

    It stands for the sender of activations in a `Ledger`.
    """

    label = "tensor ranks"

    def __init__(self, group: Group, sequence: bool = False):
        """
        ### Make a communicator of these ranks

        * `group` has the ranks of the mesh dimension
        * `sequence` says that there must be streams
        """
        self.group = replace(group, same_layers=True)
        self.size = group.size
        self.sequence = sequence
        self.comm = Communicator((self.group,))
        # The sharded model, once there is one: `connect` sets it.
        self.model: ShardedModel | None = None
        # By a split module: whether its model has been compared.
        self.compared: WeakKeyDictionary[nn.Module, list[bool]] = WeakKeyDictionary()
        # By a parameter, as long as it lives: the one that replaced it.
        self.twins = WeakTensorKeyDictionary()
        self.patterns: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()  # of split modules
        self.border = Border(self)
        # The border of each module of a stream. Other modules have `self.border`.
        self.borders: WeakKeyDictionary[nn.Module, Border] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict) -> "Line":
        # A copy of a model is split over the same ranks.
        return self

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        r"""
        ### The sum over the ranks, with the same bits on all of them

        A rank sends $2\frac{t-1}{t}$ times the bytes of `x`. All ranks must call it.
        """
        x = x.clone(memory_format=torch.contiguous_format)
        if self.size > 1:
            self.group.together("parts of a sum", dist.all_reduce, x)
            self._count("sum", x.nbytes,
                        2 * (self.size - 1) * x.nbytes // self.size)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### The tensors of all ranks: `x.shape` to `(ranks, *x.shape)`

        A rank sends $t-1$ times the bytes of `x`. All ranks must call it.
        """
        found = x.new_empty(self.size, *x.shape)
        if self.size == 1:
            return found.copy_(x)
        self.group.together("activations", all_gather_single,
                            known(found), known(x))
        self._count("gather", found.nbytes, (self.size - 1) * x.nbytes)
        return found

    def sizes(self, size: int) -> tuple[int, ...]:
        """
        ### How many of `size` things each rank has, if they are split as evenly as can be
        """
        parts = [WeightPart.of((size,), 0, place, self.size)
                 for place in range(self.size)]
        return tuple(part.end - part.begin for part in parts)

    def padded(self, x: torch.Tensor,
               dim: int,
               size: int) -> torch.Tensor:
        """
        ### A part with zeros behind it, so that all parts are as long as the longest one
        """
        # Padding is given from the last dimension on, in front and behind.
        behind = (0, 0) * (x.dim() - 1 - dim % x.dim())
        return F.pad(x, (*behind, 0, -(-size // self.size) - x.shape[dim]))

    def gather_parts(self, x: torch.Tensor,
                     dim: int,
                     size: int) -> torch.Tensor:
        """
        ### The parts of all ranks in a row (all-gather)

        * `x` is this rank's part; all parts have `size` together along `dim`

        A rank sends $t-1$ times the bytes of the longest part. All ranks must call it.
        """
        rows = self.all_gather(self.padded(x, dim, size))
        return torch.cat(
            [row.narrow(dim, 0, count)
             for row, count in zip(rows, self.sizes(size), strict=True)],
            dim)

    def reduce_scatter(self, rows: torch.Tensor) -> torch.Tensor:
        r"""
        ### The sum over the ranks of the row for this rank: `(ranks, *shape)` to `shape`

        A rank sends $\frac{t-1}{t}$ times the bytes of `rows`. All ranks must call it.
        """
        if self.size == 1:
            return rows[0]
        if rows.device.type == "cpu":
            # gloo's own reduce-scatter sends as much as an all-reduce.
            found = torch.empty_like(rows)
            self.group.together("parts of a sum", all_to_all_single, found, rows)
            total = found.sum(0)
        else:
            total = torch.empty_like(rows[0])
            self.group.together("parts of a sum", reduce_scatter_single,
                                known(total), known(rows))
        self._count("reduce", rows.nbytes, (self.size - 1) * total.nbytes)
        return total

    def _count(self, event: str, nbytes: int, sent_bytes: int) -> None:
        if self.model is not None:
            self.model.listener.record(
                self,
                event,
                nbytes,
                Counted(sent_bytes=sent_bytes, messages=1))

    def connect(self, model: nn.Module) -> None:
        """
        ### Tell the layers of a sharded model who has the other parts of its weights
        """
        connect(model)

    def prepare(self, model: nn.Module, classes: dict[nn.Module, Any]) -> None:
        """
        ### Give all ranks the first one's values, if their models are alike

        * `classes` are those that split modules will have

        All ranks must call it (all-gather of names, broadcast of values). Raises `ValueError` if a
        weight is also used by a module that is not split, and on all ranks if the models differ.
        """
        # Also if that layer stays whole: each of these ranks would count its elements.
        expect(not any(vars(module).keys() >= {"rule", "compression"}
                       for module in model.modules()), "tensor_parallel", "a plain model", "layers "
               "that `compress` has changed", "leave one of the two out")
        patterns = {module: options.pattern for module, options in classes.items()}
        _check_ties(model, patterns)
        self.patterns.update(patterns)
        streams = {module: pattern.stream
                   for module, pattern in patterns.items()
                   if pattern.stream}
        expect(bool(streams) or not self.sequence, "tensor_parallel: `sequence=True`",
               "a model with a known stream", f"none in this {type(model).__name__}",
               "leave `sequence` out, or pass a pattern with a `stream`")
        for module, stream in streams.items():
            stream.prepare(module, self)
        tensors = [*model.named_parameters(), *model.named_buffers()]
        same("tensor_parallel",
             self.group.ranks,
             self.group.gather({f"`{name}`": (tuple(t.shape), t.dtype) for name, t in tensors}),
             "build the model alike on all ranks",
             ValueError)
        self.comm.broadcast(tensor for _, tensor in tensors if not tensor.is_meta)
        before_steps[model] = _compare_gradients
        # The modules of a model share it.
        mark = [False]
        self.compared.update({module: mark for module in patterns})

    def twin(self, param: nn.Parameter, make: Operation) -> nn.Parameter:
        """
        ### The parameter that replaces another one; the same one wherever it is tied
        """
        if param not in self.twins:
            self.twins[param] = nn.Parameter(make(param.detach()), param.requires_grad)
        return self.twins[param]

    def compare_once(self, module: nn.Module, values: Iterable[Any]) -> None:
        """
        ### Refuse ranks that were given other values, or have other random numbers

        * `module` is the split one that was given them
        * `values` may be tensors, which are compared, and others

        It looks at a model's first forward pass alone, and at none of a copy. All ranks must call
        it. Raises `ValueError`.
        """
        mark = self.compared.get(module, [True])
        if mark[0] or self.size == 1:
            return
        mark[0] = True
        given = [value for value in values if isinstance(value, torch.Tensor) and value.numel()]
        # On a GPU dropout draws the numbers of that GPU.
        states = [torch.get_rng_state(), *(
            torch.get_device_module(at).get_rng_state(at)
            for at in dict.fromkeys(value.device for value in given)
            if at.type != "cpu")]
        *inputs, numbers = [zlib.crc32(bytes_of(each.cpu()).numpy().tobytes())
                            for each in (*given, torch.cat(states))]
        same("tensor_parallel",
             self.group.ranks,
             self.group.gather({
                 "inputs (their checksums)": inputs,
                 "random numbers (their checksum)": numbers}),
             "give all ranks of this mesh dimension the same rows, and the same "
             "`torch.manual_seed`",
             ValueError)


def _check_ties(model: nn.Module, patterns: dict[nn.Module, Any]) -> None:
    """
    #### Refuse weights that a split module shares with a module that is not split
    """
    new = {(child, name) for module, pattern in patterns.items()
           for child, _, names in pattern.parts(module) for name in names}
    weights = {child._parameters[name] for child, name in new}
    for path, module in model.named_modules():
        for name, param in module._parameters.items():
            expect(param is None or param not in weights or (module, name) in new,
                   "tensor_parallel", "every use of a split weight to be split",
                   f"`{path}.{name}`, which is tied to one", "untie it, or leave the policy out")


@torch.no_grad()
def _compare_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """
    #### Refuse a step with other gradients of weights that all ranks have

    A sharded model compares by itself.

    An all-gather of their norm, 8 bytes. If it differs, each rank has clipped by the norm of its
    own parts, or the ranks had different batches. Raises `RuntimeError` on all ranks.
    """
    split = [module for module in model.modules()
             if isinstance(vars(module).get("line"), Line)]
    line = vars(split[0])["line"] if split else None
    if line is None or line.size == 1 or line.model is not None:
        return
    parts = {id(module._parameters.get(name))
             for module in split for name in vars(module)["parts"]}
    stepped = {id(p)
               for group in optimizer.param_groups for p in group["params"]}
    if parts.isdisjoint(stepped):
        return
    zero = torch.zeros((), dtype=torch.double, device=next(model.parameters()).device)
    norms = [p.grad.norm(dtype=torch.double)
             for p in model.parameters()
             if id(p) in stepped and id(p) not in parts
             and p.grad is not None]
    every = line.all_gather(torch.stack([zero, *norms]).norm())
    # An accelerator may add up in another order.
    expect(torch.allclose(every, every[:1], rtol=1e-5, equal_nan=True),
           "a step of a split model",
           f"the same gradients of the weights that ranks {line.group.ranks} all have",
           f"norms {every.tolist()}",
           "`wrap` the model, and clip by `Zero3Optimizer(clip_grad_norm=)` or "
           "`model.clip_grad_norm_`, because torch's `clip_grad_norm_` knows the parts of this "
           "rank alone; give all ranks of this mesh dimension the same rows",
           RuntimeError)


@dataclass(eq=False)
class Border:
    """
    ## What is exchanged where the split layers begin and end: $f$ and $g$

    This one is for activations that are whole on each rank.
    """

    line: Line

    def __deepcopy__(self, memo: dict) -> "Border":
        return self

    def states(self, args: tuple, kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """
        ### The arguments of a split module that `enter` is for: those with a gradient
        """
        return [value for value in (*args, *kwargs.values())
                if isinstance(value, torch.Tensor) and value.requires_grad]

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        r"""
        ### $f$, where the split layers begin

        $$f(x) = x \qquad \frac{\partial L}{\partial x} = \sum_r \frac{\partial L}{\partial f_r}$$

        All ranks must call it and its backward (all-reduce of the gradient).
        """
        return Swap.apply(x, identity, self.line.all_reduce)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        r"""
        ### $g$, where they end

        * `x` is this rank's summand

        $$g(x) = \sum_r x_r \qquad \frac{\partial L}{\partial x} = \frac{\partial L}{\partial g}$$

        All ranks must call it (all-reduce).
        """
        return Swap.apply(x, self.line.all_reduce, identity)

    def weight(self, param: torch.Tensor) -> torch.Tensor:
        """
        ### A weight that all ranks have, where they compute with it between the split layers
        """
        return param

    def sizes(self, x: torch.Tensor, dim: int) -> tuple[int, ...]:
        """
        ### How much each rank has along a dimension of which `x` is this rank's part
        """
        return (x.shape[dim],) * self.line.size


def identity(x: torch.Tensor) -> torch.Tensor:
    """
    ## The identity, a view
    """
    return x.view_as(x)


class Swap(torch.autograd.Function):
    r"""
    ## A conjugate pair: one operation in forward, the other one in backward

    `Swap.apply(x, there, back)` is `there(x)`, and a gradient $g$ becomes `back(g)`.
    """

    @staticmethod
    def forward(ctx,
                x: torch.Tensor,
                there: Operation,
                back: Operation) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        return ctx.back(grad), None, None

"""
# Models for the compiler, and hooks and graphs side by side

The oracle of `aot_eager` is `wrap`: the same bits. Where hooks add the gradients of a tensor with
three users in another order, it is plain PyTorch.
"""

import copy
import warnings
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from zero3 import Zero3Optimizer, compile, wrap
from zero3.compiler.graph import collect, parameter

WIDTH = 6
# The compiler's progress bars start a thread, which a rank would leave behind.
tqdm.monitor_interval = 0


class Block(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.linear, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Stack(nn.Module):
    """Blocks and a head."""

    def __init__(self, block=Block, depth=3):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Breaks(Block):
    """A value of a tensor ends the graph inside of the layer."""

    def forward(self, x):
        x = self.norm(x)
        if x.sum().item() > 1e9:
            x = x + 1
        return torch.tanh(self.linear(x))


class BreaksBetween(Stack):
    """A value of a tensor ends the graph between two layers."""

    def forward(self, x):
        x = self.blocks[0](x)
        scale = 2.0 if x.sum().item() > 1e9 else 0.5
        for block in self.blocks[1:]:
            x = block(x * scale)
        return self.head(x)


class Eager(Block):
    """Code outside of graphs uses a parameter, in each layer."""

    def forward(self, x):
        torch._dynamo.graph_break()
        return torch.tanh(self.linear(x) / self.linear.weight.norm())


@torch.compiler.disable
def outside(scale):
    return torch.tanh(scale) ** 2


class RootOutside(Stack):
    """Code outside of graphs uses a parameter of the root, and a later graph another one."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        x = self.blocks[0](x) * outside(self.scale)
        x = self.blocks[1](x) + self.shift
        return self.head(self.blocks[2](x))


class Untraceable(Stack):
    """The loop over the layers cannot be traced."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.head(x)


class Recurrent(nn.Module):
    """Dynamo traces no LSTM."""

    def __init__(self):
        super().__init__()
        self.lstm, self.linear = nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.lstm(x)[0])


class Buffers(Block):
    """Dropout, and buffers that forward writes to."""

    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return torch.dropout(self.batch(super().forward(x)), 0.2, self.training) * self.calls


class Checkpoints(Stack):
    """Activation checkpointing, with a graph that ends inside of it, and random numbers."""

    def forward(self, x):
        def two(x):
            x = self.blocks[1](x)
            torch._dynamo.graph_break()
            return torch.dropout(self.blocks[2](x), 0.2, True)

        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        return self.head(checkpoint(two, x, use_reentrant=True))


@dataclass
class Pair:
    left: torch.Tensor
    right: torch.Tensor | None = None


class Containers(nn.Module):
    """Dicts, dataclasses, keywords and attributes between layers; views of parameters."""

    def __init__(self):
        super().__init__()
        self.weight, self.unused = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(2, 2)

    def forward(self, pair, *, more):
        low, high = torch.unsafe_chunk(self.weight, 2)
        left = torch.tanh(pair.left[:, :3] @ low + pair.left[:, 3:] @ high) + self.weight[0]
        self.mean = left.mean()
        return {"pair": Pair(left, more["right"]), "times": 2}


class Contained(Stack):
    def __init__(self):
        super().__init__(Containers, 2)

    def forward(self, x):
        pair = Pair(x)
        for block in self.blocks:
            out = block(pair, more={"right": x})
            pair = out["pair"]
        return self.head(pair.left) * out["times"] + self.blocks[0].mean + pair.right


class Uneven(nn.Module):
    """Which layer computes depends on the rank's data."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.head = Block(), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.head(self.one(x) if x.sum() > 0 else self.two(self.one(x)))


def rows(step, count=4):
    """This rank's part of the batch: `(count, WIDTH)`"""
    rank = dist.get_rank() if dist.is_initialized() else 0
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def adam(model, **options):
    return Zero3Optimizer(model, lr=0.05, **options)


def unfused(model):
    """
    AdamW, operation by operation, for layers that share a shard.

    The fused loop takes the last elements of a shard one by one, and rounds them in another way
    than those that it takes eight at a time.
    """
    return adam(model, fused=False)


def pair_of(plain, layers, make=adam, backend="aot_eager", limit=None, bucket_bytes=1 << 20,
            unit_bytes=0, **options):
    """Hooks and graphs of the same model, each with its optimizer."""
    hooks = wrap(copy.deepcopy(plain), layers, **options)
    graphs = compile(copy.deepcopy(plain), layers, backend=backend, limit_numel=limit,
                     bucket_bytes=bucket_bytes, unit_bytes=unit_bytes, **options)
    return [(hooks, make(hooks)), (graphs, make(graphs))]


def train(model, optimizer, steps=3, batch=rows, loss=lambda out: out.square().mean()):
    """A step is forward, backward and an update: the losses."""
    found = []
    for step in range(steps):
        torch.manual_seed(step)
        value = loss(model(batch(step)))
        optimizer.backward(value)
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    return found


def compare(pair, does=train, within=0.0):
    """What is different between hooks and graphs after both have done the same."""
    (hooks, one), (graphs, two) = pair
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = does(hooks, one), does(graphs, two)
    values = [torch.tensor([value for value in flat(each)]) for each in found]
    different = [] if torch.allclose(*values, rtol=0, atol=within) else [repr(found)]
    with hooks.full_params() as expected, graphs.full_params() as got:
        different += [name for name, p in expected.items()
                      if not torch.allclose(p, got[name], rtol=0, atol=within)]
    different += [name for (name, p), (_, q) in
                  zip(hooks.named_buffers(), graphs.named_buffers(), strict=True)
                  if not torch.equal(p, q)]
    # What Dynamo has compiled would keep the models alive.
    torch.compiler.reset()
    return ", ".join(different)


def flat(values):
    """The numbers in a nest of lists."""
    for value in values:
        if isinstance(value, list):
            yield from flat(value)
        else:
            yield value


def raised(does, kind=RuntimeError):
    """What an error says."""
    try:
        does()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")


# ------------------------------------------------------------------------- graphs without a model


class Fake:
    """
    A layer of a graph: `x @ weight`.

    Its full weight is NaN once it is released, and it counts what is full.
    """

    def __init__(self, name, layers, value, numel):
        self.name, self.layers, self.value, self.numel = name, layers, value, numel
        self.whole, self.gathered, self.grad = None, False, None
        self.reduced = self.most = 0

    def fetch_params(self):
        assert not self.gathered, f"{self.name} is gathered twice"
        self.gathered = True
        self.whole = [self.value.clone()]
        layers = self.layers.values()
        self.most = max(self.most, sum(layer.numel for layer in layers if layer.whole))

    def wait(self):
        assert self.gathered, f"{self.name} is not gathered"
        return self.whole

    def _cleanup_params(self):
        self.whole[0].fill_(torch.nan)
        self.whole, self.gathered = None, False

    def collect(self, place, grad):
        assert place == 0 and self.grad is None
        self.grad = grad

    def begin_reduce(self, *others):
        for layer in (self, *others):
            assert layer.grad is not None and not layer.gathered
            layer.reduced = "in flight"

    def finish_reduce(self, *others):
        for layer in self.layers.values():
            if layer.reduced == "in flight":
                layer.reduced = 1

    def shard_versions(self):
        return (0,)

    def refuse_old(self, versions):
        raise AssertionError


def chain_graphs(names):
    """A traced step of `x @ w`, layer after layer; a name may come twice."""
    mm, t = torch.ops.aten.mm.default, torch.ops.aten.t.default
    forward = fx.Graph()
    x = forward.placeholder("x")
    weights = {name: forward.call_function(parameter, (name, 0)) for name in dict.fromkeys(names)}
    saved = []
    for name in names:
        saved.append(x)
        x = forward.call_function(mm, (x, weights[name]))
    forward.output((x, *saved))

    backward = fx.Graph()
    inputs = [backward.placeholder(f"saved_{i}") for i in range(len(names))]
    grad = backward.placeholder("grad")
    turned = {name: backward.call_function(t, (backward.call_function(parameter, (name, 0)),))
              for name in dict.fromkeys(names)}
    sums = {}
    for i, name in reversed([*enumerate(names)]):
        part = backward.call_function(mm, (backward.call_function(t, (inputs[i],)), grad))
        sums[name] = part if name not in sums else backward.call_function(
            torch.ops.aten.add.Tensor, (sums[name], part))
        if i == names.index(name):
            backward.call_function(collect, (name, 0, sums[name]))
        grad = backward.call_function(mm, (grad, turned[name]))
    backward.output((grad,))
    return forward, backward

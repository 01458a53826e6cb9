"""
# Models that a sharded layer must get right, and the plain PyTorch that says what is right

Each case is a chain of layers and a loss. `train_both` trains it plain, on the global batch, and
sharded, on this rank's rows, and compares every parameter after every step. All in float64, so that
the order in which ranks are added leaves differences of 1e-15, and 1e-10 finds any real one.
"""

import dataclasses

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from zero3 import Zero3Layer, Zero3Sequential
from zero3.comm.links import Links

WIDTH = 6
ROWS = 2  # of each rank


class EachParameter(torch.optim.Optimizer):
    """
    ## An optimizer that does the same with each parameter that has a gradient: `update(p, lr)`
    """

    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group["lr"])


class Case:
    """
    ## A chain of layers, and what a step does with it
    """

    weight_decay = 0.1

    def layers(self):
        raise NotImplementedError

    def loss(self, model, x):
        return model(x).square().mean()

    def backward(self, model, x):
        self.loss(model, x).backward()


def chain(model):
    """
    ## The layers of a chain, sharded or plain
    """
    return getattr(model, "module_list", model)


def linear(inputs=WIDTH, outputs=WIDTH):
    return nn.Linear(inputs, outputs)


def freeze(module):
    return module.requires_grad_(False)


class Chain(Case):
    """Unequal layers, of which no size is divisible by 2 or 3, and one without parameters"""

    def layers(self):
        return [linear(WIDTH, 11), nn.Tanh(), nn.Sequential(linear(11, 5), nn.Tanh()), linear(5, 3)]


class IntegerInput(Case):
    """The first layer's input has no gradient, and is no float"""

    def layers(self):
        return [nn.Embedding(17, WIDTH), linear(), linear(WIDTH, 5)]

    def loss(self, model, x):
        return model((x.abs() * 7).long() % 17).square().mean()


@dataclasses.dataclass
class Pack:
    main: torch.Tensor
    side: dict


class Packs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = linear(), linear()

    def forward(self, x, *, scale):
        return Pack(self.one(x), {"list": [self.two(x) * scale, "text", None]})


class Unpacks(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = linear()

    def forward(self, pack):
        return self.out(pack.main + pack.side["list"][0]), {"more": (pack.main,)}


class Nested(Case):
    """Outputs and inputs in dataclasses, dicts, lists and tuples, and by keyword"""

    def layers(self):
        return [Packs(), Unpacks()]

    def loss(self, model, x):
        scale = torch.full((), 2.0, dtype=x.dtype, requires_grad=True)
        out, more = model(x, scale=scale)
        return out.square().mean() + more["more"][0].sin().mean()


class CalledTwice(Case):
    """A layer called twice before one backward: its gradients add"""

    def layers(self):
        return [linear(), linear(), linear()]

    def loss(self, model, x):
        first, second, third = chain(model)
        h = first(x)
        return third(second(torch.tanh(second(h))) + second(h)).square().mean()


class TwoGraphs(Case):
    """Two forwards, then a backward for each"""

    def layers(self):
        return [linear(), nn.Tanh(), linear()]

    def backward(self, model, x):
        one, two = self.loss(model, x), self.loss(model, x.flip(1)) * 0.5
        one.backward()
        two.backward()


class Accumulated(Case):
    """Three micro-batches before the step, the graph of one of them kept"""

    def layers(self):
        return [linear(), nn.Tanh(), linear()]

    def backward(self, model, x):
        for factor in (0.2, 0.3):
            (self.loss(model, x) * factor).backward()
        loss = self.loss(model, x)
        (loss * 0.25).backward(retain_graph=True)
        (loss * 0.25).backward()


class Frozen(Case):
    """Frozen layers below, between and above trainable ones"""

    def layers(self):
        between = freeze(nn.Sequential(linear(), nn.Tanh()))
        return [freeze(linear()), linear(), between, linear(), freeze(linear())]


class LowRank(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.weight = freeze(linear()), freeze(linear())
        self.down, self.up = linear(WIDTH, 2), linear(2, WIDTH)

    def forward(self, x):
        h = torch.tanh(self.before(x))
        return self.weight(h) + self.up(self.down(h))


class Adapters(Case):
    """Frozen and trainable parameters in one layer, the frozen one needed last in backward"""

    def layers(self):
        return [LowRank(), LowRank(), LowRank()]


class Half(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.used, self.unused = linear(), linear()
        self.use = use

    def forward(self, x):
        return self.used(x) if self.use else x


class Unused(Case):
    """Parameters and whole layers that no gradient reaches"""

    # Plain AdamW skips a parameter without a gradient, and with it the decay. A shard holds used
    # and unused parameters, whose gradient is zero then, and decays all.
    weight_decay = 0.0

    def layers(self):
        return [linear(), Half(True), Half(False), linear(), Half(True)]


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.nothing = None
        self.register_parameter("absent", None)

    def forward(self, x):
        return x * self.scalar + self.empty.sum()


class OnlyEmpty(nn.Module):
    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.ones(0))

    def forward(self, x):
        return x + self.empty.sum()


class Tiny(Case):
    """Scalar and empty parameters, and layers with fewer elements than ranks"""

    def layers(self):
        return [linear(), Odd(), nn.Dropout(0.0), OnlyEmpty(), linear(WIDTH, 1), Odd()]


class Inside(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.one, self.two, self.reentrant = linear(), linear(), reentrant

    def forward(self, x):
        h = checkpoint(lambda x: torch.tanh(self.one(x)), x, use_reentrant=self.reentrant)
        return self.two(h) + self.one(x)


class CheckpointInside(Case):
    """Activation checkpointing inside of a layer, with a parameter used within and without"""

    reentrant = False

    def layers(self):
        return [linear(), Inside(self.reentrant), linear()]


class CheckpointInsideReentrant(CheckpointInside):
    """The same with the older kind, which brings that parameter's gradient in two parts"""

    reentrant = True


class CheckpointAround(Case):
    """Activation checkpointing around each layer"""

    reentrant = False

    def layers(self):
        return [linear(), nn.Sequential(linear(), nn.Tanh(), linear()), linear()]

    def loss(self, model, x):
        for layer in model.walk():
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x.square().mean()


class CheckpointAroundReentrant(CheckpointAround):
    """The same with the older kind, whose backward runs a backward"""

    reentrant = True

    def loss(self, model, x):
        return super().loss(model, x.detach().requires_grad_())


class CheckpointAroundSeveral(Case):
    """Activation checkpointing around several layers at once"""

    def layers(self):
        return [linear(), nn.Tanh(), linear(), linear(), linear(), linear()]

    def loss(self, model, x):
        a, b, c, d, e, f = chain(model)
        x = a(x)
        x = checkpoint(lambda x: e(d(c(b(x)))), x, use_reentrant=False)
        return f(x).square().mean()


class Auxiliary(nn.Module):
    def __init__(self):
        super().__init__()
        self.main, self.gate = linear(), linear()
        self.loss = None

    def forward(self, x):
        out = self.main(x)
        # Computed last, so that backward comes to it first.
        self.loss = self.gate(x).sigmoid().mean()
        return out


class SideDoor(Case):
    """A loss that leaves the layer as an attribute of the module"""

    def layers(self):
        return [linear(), Auxiliary(), linear(), Auxiliary()]

    def loss(self, model, x):
        out = model(x).square().mean()
        modules = (getattr(layer, "module", layer) for layer in chain(model))
        return out + sum(m.loss for m in modules if isinstance(m, Auxiliary))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow, self.last = linear(), linear(WIDTH, 5), freeze(linear(5, WIDTH))

    def double(self):
        super().double()
        self.narrow.float()
        return self

    def forward(self, x):
        return self.last(self.narrow(self.wide(x).float()).to(x.dtype))


class DataTypes(Case):
    """A layer with two data types, of which some parameters are frozen"""

    def layers(self):
        return [linear(), Mixed(), linear()]


class Ties(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = linear(), linear()
        self.two.weight = self.one.weight

    def forward(self, x):
        return self.two(torch.tanh(self.one(x)))


class TiedInside(Case):
    """A layer that uses one parameter under two names"""

    def layers(self):
        return [Ties(), linear()]


class Detached(Case):
    """A layer whose input is cut from the graph: nothing below it trains"""

    def layers(self):
        return [linear(), linear(), linear()]

    def loss(self, model, x):
        first, second, third = chain(model)
        return third(second(first(x).detach())).square().mean()


class InPlace(Case):
    """Layers that write over their input, and over the output of the layer before"""

    def layers(self):
        return [linear(), nn.Sequential(nn.ReLU(inplace=True), linear()),
                nn.Sequential(nn.LeakyReLU(inplace=True), linear())]


class InPlaceViews(InPlace):
    """The same with three dimensions, in which the output of a linear layer is a view"""

    def loss(self, model, x):
        return model(x[None]).square().mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.lstm(x[:, None, :].expand(-1, 3, -1))[0]


class Library(Case):
    """Modules of torch that keep lists of their parameters: an LSTM and an attention"""

    def layers(self):
        attention = nn.TransformerEncoderLayer(8, 2, 9, dropout=0.0, batch_first=True)
        return [linear(), Recurrent(), linear(5, 8), attention]


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.inner, self.after = linear(), nn.Sequential(linear(), linear()), linear()

    def forward(self, x):
        return self.after(torch.tanh(self.inner(self.before(x))))


class LayerInLayer(Case):
    """A sharded layer inside of a sharded layer, which leaves it alone"""

    def layers(self):
        return [linear(), Inner(), linear()]

    def wrap(self, module, **options):
        if isinstance(module, Inner):
            module.inner = Zero3Layer(module.inner, **options)
        return Zero3Layer(module, **options)


class SeveralOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = linear(), linear()

    def forward(self, x):
        return self.one(x), self.two(x), x, x.detach()


class OutputIsInput(Case):
    """Outputs of which one is the input, one is not used and one has no gradient"""

    weight_decay = 0.0

    def layers(self):
        return [linear(), SeveralOutputs(), linear()]

    def loss(self, model, x):
        first, second, third = chain(model)
        one, _, same, _ = second(first(x))
        return (third(one) + same).square().mean()


class Prompt(Case):
    """A leaf that needs a gradient comes in from outside, directly and in a list"""

    def layers(self):
        return [LowRank(), Adds()]

    def loss(self, model, x):
        prompt = nn.Parameter(torch.full((WIDTH,), 0.3, dtype=x.dtype))
        first, second = chain(model)
        out = second(first(x + prompt), [prompt]).square().mean()
        (grad,) = torch.autograd.grad(out, prompt, retain_graph=True)
        return out + grad.abs().sum()


class Adds(nn.Module):
    def __init__(self):
        super().__init__()
        self.frozen, self.out = freeze(linear()), linear()

    def forward(self, x, more):
        return self.out(self.frozen(x + more[0]))


class Moves(nn.Linear):
    def forward(self, x):
        # So does `nn.LSTM` on a GPU, whose parameters have to lie side by side.
        self.weight.data = self.weight.data.clone()
        return super().forward(x)


class Moved(Case):
    """A forward that gives its parameters other memory with the same values"""

    def layers(self):
        return [Moves(WIDTH, WIDTH), nn.Tanh(), Moves(WIDTH, WIDTH)]


class Repeated(Case):
    """One layer in several places of the chain, as ALBERT has it"""

    def layers(self):
        one, two = linear(), linear()
        return [one, nn.Tanh(), two, one, one]

    def wrap(self, module, **options):
        self.wrapped = getattr(self, "wrapped", {})
        if module not in self.wrapped:
            self.wrapped[module] = Zero3Layer(module, **options)
        return self.wrapped[module]


class Adversarial(Case):
    """A layer that is frozen for one of two backward passes, as a GAN's discriminator is"""

    def layers(self):
        return [linear(), nn.Tanh(), linear()]

    def backward(self, model, x):
        chain(model)[2].requires_grad_(False)
        (self.loss(model, x) * 0.5).backward()
        chain(model)[2].requires_grad_(True)
        self.loss(model, x.flip(1)).backward()


class Box:
    def __init__(self, inside):
        self.inside = inside


class Boxes(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.out = nn.LayerNorm(WIDTH), linear()

    def forward(self, x):
        return Box([self.out(self.norm(x))])


class Unboxes(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = linear()

    def forward(self, box):
        return self.out(box.inside[0])


class Boxed(Case):
    """A tensor that goes from layer to layer as an attribute of an object"""

    def layers(self):
        return [Boxes(), Unboxes()]


CASES = {
    cls.__name__: cls
    for cls in (
        Chain, IntegerInput, Nested, CalledTwice, TwoGraphs, Accumulated, Frozen, Adapters, Unused,
        Tiny, CheckpointInside, CheckpointInsideReentrant, CheckpointAround,
        CheckpointAroundReentrant, CheckpointAroundSeveral, SideDoor, DataTypes, TiedInside,
        Detached, InPlace, InPlaceViews, Library, LayerInLayer, OutputIsInput, Prompt, Moved,
        Repeated, Adversarial, Boxed,
    )
}


class PlainChain(nn.ModuleList):
    """
    ## The same chain in plain PyTorch
    """

    def walk(self):
        return iter(self)

    def forward(self, *args, **kwargs):
        for layer in self:
            args, kwargs = (layer(*args, **kwargs),), {}
        return args[0]


def place(mesh=None):
    """
    ## This rank's number among the ranks of a mesh, and how many these are
    """
    mesh = mesh.mesh if isinstance(mesh, Links) else mesh
    if mesh is None:
        return dist.get_rank(), dist.get_world_size()
    ranks = mesh.mesh.flatten().tolist()
    return ranks.index(dist.get_rank()), len(ranks)


def train_both(name, steps=3, check=None, optimizer=None, offload=None, mesh=None, **more):
    """
    ## Train a case plain and sharded; return the largest difference of any parameter

    * `check(model)` is called after every backward and after every step
    * `optimizer(model, **options)` makes the sharded model's, in place of AdamW on its shards
    * `offload` says where its layers' shards rest
    * `mesh` has the ranks that train it, left out all; it may be `Links`
    * `more` is handed to each layer
    """
    rank, world_size = place(mesh)
    case = CASES[name]()
    torch.manual_seed(0)
    plain = PlainChain([layer.double() for layer in case.layers()])
    # Other ranks are born with other weights: rank 0's have to win.
    torch.manual_seed(rank)
    wrap = getattr(case, "wrap", Zero3Layer)
    model = Zero3Sequential([wrap(layer.double(), offload=offload, mesh=mesh, **more)
                             for layer in case.layers()])
    # An epsilon of this size lets a wrong scale of the gradient show in the weights.
    options = {"lr": 0.05, "eps": 1e-3, "weight_decay": case.weight_decay}
    adam = [torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **options)]
    if optimizer:
        adam.append(optimizer(model, **options))
    else:
        adam.append(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad],
                                      **options))
    worst = 0.0
    for step in range(steps):
        generator = torch.Generator(torch.get_default_device()).manual_seed(step)
        x = torch.randn(ROWS * world_size, WIDTH, generator=generator, dtype=torch.double)
        for stepped, trained, rows in (
            (adam[0], plain, x),
            (adam[1], model, x[rank * ROWS : (rank + 1) * ROWS]),
        ):
            # To nothing and to zeros by turns; in the first step there is nothing.
            stepped.zero_grad(set_to_none=step % 2 == 0)
            case.backward(trained, rows)
            if trained is model and check:
                check(model)
            stepped.step()
        worst = max(worst, difference(plain, model))
        if check:
            check(model)
    return worst


def difference(plain, model):
    """
    ## The largest difference between a plain and a sharded model's parameters
    """
    expected = {name: p.detach() for name, p in plain.named_parameters(remove_duplicate=False)}
    worst = 0.0
    with model.full_params() as params:
        got = {name: p.detach() for name, p in params.items()}
    assert got.keys() == expected.keys(), (sorted(got), sorted(expected))
    for name, p in expected.items():
        if p.numel():
            worst = max(worst, (p - got[name]).abs().max().item())
    return worst

"""
# The idea in one file: the same numbers as plain PyTorch and as the heart

The oracle is plain PyTorch: each rank's gradient by itself, divided by the number of ranks and
added in the order of ranks.
"""

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run
from zero3 import Zero3Layer, Zero3Sequential, minimal
from zero3.train import launch

STEPS = 3
# 7 * 5 + 5, 5 * 5 + 5 and 5 * 3 + 3 weights: padded on two and on three ranks.
SIZES = ((7, 5), (5, 5), (5, 3))


def layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(*size), nn.Tanh()) for size in SIZES]


def batch(step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 7, generator=generator)


def loss_of(model, x):
    return model(x).square().mean()


def plain():
    """Weights after some steps of plain PyTorch"""
    ranks = dist.get_world_size()
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        total = None
        for rank in range(ranks):
            grads = torch.autograd.grad(loss_of(model, batch(step, rank)), [*model.parameters()])
            parts = [grad * (1 / ranks) for grad in grads]
            total = parts if total is None else [a + b for a, b in zip(total, parts, strict=True)]
        for p, grad in zip(model.parameters(), total, strict=True):
            p.grad = grad
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def train(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        loss_of(model, batch(step, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(chain):
    """The parameters of a minimal chain, gathered"""
    found = []
    for layer in chain.layers:
        layer.fetch_params()
        layer._wait_params()
        found += [p.detach().clone() for p in layer.params]
        layer._cleanup_params()
    return found


def differences(folder):
    """Which weights of the minimal chain equal plain PyTorch's, the heart's, and those in files"""
    chain = minimal.Chain([minimal.Zero3Layer(layer) for layer in layers()])
    train(chain)
    in_files = minimal.Chain([minimal.Zero3Layer(layer) for layer in layers()])
    for i, layer in enumerate(in_files.layers):
        minimal.MappedShard(layer, f"{folder}/{dist.get_rank()}-{i}")
    train(in_files)
    heart = Zero3Sequential([Zero3Layer(layer) for layer in layers()])
    train(heart)
    mine = whole(chain)
    with heart.full_params() as params:
        others = {"plain": plain(), "heart": [p.detach() for p in params.values()],
                  "files": whole(in_files)}
        told = {name: [torch.equal(a, b) for a, b in zip(mine, theirs, strict=True)]
                for name, theirs in others.items()}
    stored = [torch.from_file(f"{folder}/{dist.get_rank()}-{i}", size=len(layer.chunk))
              for i, layer in enumerate(chain.layers)]
    told["stored"] = [torch.equal(shard, layer.chunk)
                      for shard, layer in zip(stored, chain.layers, strict=True)]
    return told


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_minimal_chain_has_the_bits_of_plain_pytorch_and_of_the_heart(ranks, tmp_path):
    """
    Every weight after three steps, in memory and in files; and the files have the shards. Breaks if
    gradients are not divided, if a shard is another one, or if the padding gets a gradient.
    Proves `minimal.MappedShard.__init__`, `minimal.MappedShard.load`, I1, `minimal.Zero3Layer`,
    `minimal.Chain`, `minimal.MappedShard`.
    """
    for told in run(differences, ranks, str(tmp_path)):
        assert told == {**{name: [True] * 6 for name in ("plain", "heart", "files")},
                        "stored": [True] * 3}


def observed():
    """Elements that a step sends, the order of its events, and what is left afterwards"""
    chain = minimal.Chain([minimal.Zero3Layer(layer) for layer in layers()])
    names = {id(layer.full): i for i, layer in enumerate(chain.layers)}
    events = []
    sent = []
    all_gather, all_to_all = dist.all_gather, dist.all_to_all_single
    cleanup = minimal.Zero3Layer._cleanup_params

    def gather(rows, shard, **kwargs):
        sent.append((len(rows) - 1) * len(shard))
        layer = next(each for each in chain.layers
                     if each.full.untyped_storage().data_ptr() == rows[0].data_ptr())
        events.append(f"gather {names[id(layer.full)]}")
        return all_gather(rows, shard, **kwargs)

    def exchange(received, grad, **kwargs):
        ranks = dist.get_world_size()
        sent.append((ranks - 1) * len(grad) // ranks)
        events.append("reduce")
        return all_to_all(received, grad, **kwargs)

    def free(layer):
        events.append(f"free {names[id(layer.full)]}")
        cleanup(layer)
        fulls = [each.full.untyped_storage().nbytes() > 0 for each in chain.layers]
        most.append(sum(fulls))

    most = []
    dist.all_gather, dist.all_to_all_single = gather, exchange
    minimal.Zero3Layer._cleanup_params = free
    try:
        loss_of(chain, batch(0, dist.get_rank())).backward()
    finally:
        dist.all_gather, dist.all_to_all_single = all_gather, all_to_all
        minimal.Zero3Layer._cleanup_params = cleanup
    rest = [(layer.full.untyped_storage().nbytes(), layer.grad, layer.gather, layer.reduce)
            for layer in chain.layers]
    once = [layer.chunk.grad.clone() for layer in chain.layers]
    loss_of(chain, batch(0, dist.get_rank())).backward()
    twice = all(torch.equal(layer.chunk.grad, 2 * grad)
                for layer, grad in zip(chain.layers, once, strict=True))
    with torch.no_grad():
        chain(batch(0, 0))
    no_grad = [layer.full.untyped_storage().nbytes() for layer in chain.layers]
    return sum(sent), events, max(most), rest, twice, no_grad


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_step_of_the_minimal_chain_sends_and_holds_what_its_formulas_say(ranks):
    """
    Two all-gathers and a reduce for each layer, one all-gather for the last; each layer is gathered
    while the one before it computes; after a layer is freed, at most the next one is whole; nothing
    whole is left after a step, or after a pass without gradients; two backward passes add up.
    Breaks if a layer is freed later, or gathered when it computes.
    Proves I2, I4, I7, `minimal.Zero3Layer.fetch_params`, `minimal.Zero3Layer._cleanup_params`,
    `minimal.Zero3Layer._backup_grads`, `minimal.Zero3Layer.__init__`,
    `minimal.Zero3Layer.forward`.
    """
    shards = [-(-(a * b + b) // ranks) for a, b in SIZES]
    for sent, events, most, rest, twice, no_grad in run(observed, ranks):
        assert sent == (ranks - 1) * (3 * sum(shards) - shards[-1])
        assert events == ["gather 0", "gather 1", "free 0", "gather 2", "free 1", "gather 1",
                          "free 2", "reduce", "gather 0", "free 1", "reduce", "free 0", "reduce"]
        assert most == 1 and rest == [(0, None, None, None)] * 3
        assert twice and no_grad == [0, 0, 0]


def test_the_minimal_file_prints_the_three_weights():
    """
    The numbers of its head, from two ranks. Breaks where the example and the code differ.
    Proves `minimal.step`, `minimal.show`.
    """
    done = subprocess.run([sys.executable, "-m", "zero3.minimal"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["rank", "0", "rank", "1"], ["shard", "1", "2", "3", "0"],
        ["all-gather", "1", "2", "3", "0", "1", "2", "3", "0"],
        ["reduce-scatter", "3", "2", "4", "0"],
        ["step,", "rate", "0.1", "0.7", "1.8", "2.6", "0"]]


# -------------------------------------------------------------------------- what the one file lacks


class Unused(nn.Module):
    """A weight that gets no gradient"""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


class Fails(nn.Linear):
    """A layer that raises an exception once"""

    good = False

    def forward(self, x):
        if not self.good:
            self.good = True
            raise ValueError
        return super().forward(x)


class Two(nn.Module):
    """Two inputs and two outputs"""

    def __init__(self):
        super().__init__()
        self.one = nn.Linear(3, 3)

    def forward(self, x, y):
        return self.one(x + y), y


def said(does):
    """What an error says, or nothing"""
    try:
        does()
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        return f"{error}"
    return ""


def lacks(layer, chain):
    """What goes wrong, with one kind of layers and chains"""
    def of(*modules):
        return chain([layer(module) for module in modules])

    def grads(model):
        model(x).sum().backward()
        return [p.grad is not None for p in model.parameters()]

    def old(model):
        """Whether the model computes with weights that its shards no longer have."""
        said(lambda: model(x))
        with torch.no_grad():
            for p in model.parameters():
                p.zero_()
        return bool(model(x).abs().sum())

    x = torch.ones(2, 3)
    frozen = nn.Linear(3, 3)
    frozen.bias.requires_grad_(False)
    mixed = layer(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).bfloat16()))
    dtypes = {p.dtype for p in mixed.parameters()}
    return {"unused": grads(of(Unused(), nn.Linear(3, 3))),
            "unused later": said(lambda: grads(of(nn.Linear(3, 3), Unused()))),
            "frozen": said(lambda: of(frozen)),
            "exception": old(of(nn.Linear(3, 3), Fails(3, 3))),
            "no backward": old(of(nn.Linear(3, 3))),
            "two": said(lambda: of(Two())(x, x)),
            "mixed": sorted(str(dtype) for dtype in dtypes)}


def both_lack():
    return lacks(minimal.Zero3Layer, minimal.Chain), lacks(Zero3Layer, Zero3Sequential)


def reads(store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    print(minimal.Zero3Layer(nn.Linear(300, 300)).module.weight.sum())


def test_what_the_one_file_lacks_goes_wrong_there_and_not_in_the_heart(tmp_path):
    """
    The table at the head of `layer.py`, row by row, on two ranks. Breaks where the small file
    learns one of these, and where the heart forgets one.
    Proves `Zero3Layer.settle`, `Zero3Sequential.walk`, `Zero3Layer._prepare`, `alike`.
    """
    for toy, heart in run(both_lack, 2):
        assert toy["unused"] == [False, False] and heart["unused"] == [True, True]
        assert "no attribute 'wait'" in toy["unused later"] and heart["unused later"] == ""
        assert "cannot register a hook" in toy["frozen"] and heart["frozen"] == ""
        assert toy["exception"] and not heart["exception"]
        assert toy["no backward"] and not heart["no backward"]
        assert "takes 2 positional arguments" in toy["two"] and heart["two"] == ""
        assert toy["mixed"] == ["torch.float32"]
        assert heart["mixed"] == ["torch.bfloat16", "torch.float32"]
    process = launch._CONTEXT.Process(target=reads, args=(tmp_path / "store",))
    process.start()
    process.join()
    # By a signal, and not by an exception.
    assert process.exitcode < 0

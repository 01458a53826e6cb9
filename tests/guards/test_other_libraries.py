"""
# Sharded models among other libraries

What others do to a module - wrap it in DDP, load a state dict, copy it, assign a layer - is either
right, or an error that says what to do.
"""

import contextlib
import copy
import io
import json
import os
import pickle
import re
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.ranks import run
from tests.wholes import build, tokens
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.comm.collectives import Communicator
from zero3.estimate.ledger import Ledger
from zero3.whole_model.units import Unit


def message(does):
    """What an error says, and that it is one of ours: `does` raises it."""
    with pytest.raises(RuntimeError) as error:
        does()
    text = str(error.value)
    assert re.match(r"rank \d: .*Expected: .*Got: .*What to do: .*\.", text, re.DOTALL), text
    return text


def chain():
    return Zero3Sequential([Zero3Layer(nn.Linear(4, 4)), Zero3Layer(nn.Linear(4, 2))])


def whole():
    return wrap(nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)),
                nn.Sequential)


class Mixed(nn.Module):
    """A plain layer, with a buffer that learns, around a sharded one."""

    def __init__(self, body):
        super().__init__()
        self.stem, self.norm, self.body = nn.Linear(3, 4), nn.BatchNorm1d(4), body

    def forward(self, x):
        return self.body(self.norm(self.stem(x)))


# ------------------------------------------------------------------------ others that train models


def others_that_train():
    """What DDP and the like say; and how far DDP around a mixed model is from plain PyTorch."""
    said, rank = {}, dist.get_rank()
    for make in (chain, whole):
        torch.manual_seed(0)
        model = make()
        with model.full_params() as params:
            before = {name: p.clone() for name, p in params.items()}
        said[make.__name__, "ddp"] = message(lambda m=model: DistributedDataParallel(m))
        said[make.__name__, "inside"] = message(
            lambda m=model: DistributedDataParallel(nn.Sequential(m, nn.ReLU())))
        said[make.__name__, "dp"] = message(lambda m=model: nn.DataParallel(m))
        with model.full_params() as params:
            assert all(torch.equal(before[name], p) for name, p in params.items())

    torch.manual_seed(0)
    stem, body = nn.Linear(3, 4), nn.Linear(4, 2)
    plain, mixed = Mixed(body).double(), Mixed(copy.deepcopy(body).double()).double()
    plain.stem, mixed.stem = stem.double(), copy.deepcopy(stem)
    # Each rank's norm sees its own rows, as it does with DDP.
    plain.eval()
    mixed.body = Zero3Layer(mixed.body)
    if rank:
        mixed.stem.weight.data.zero_()
    ddp = DistributedDataParallel(mixed).eval()
    pair = [torch.optim.SGD(m.parameters(), 0.5) for m in (plain, ddp)]
    for step in range(3):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step)).double()
        for model, optimizer, rows in ((plain, pair[0], x), (ddp, pair[1], x.chunk(2)[rank])):
            optimizer.zero_grad()
            model(rows).square().mean().backward()
            optimizer.step()
    with mixed.body.full_params() as params:
        off = [(params["weight"] - plain.body.weight).abs().max().item()]
    off += [(p - q).abs().max().item() for p, q in
            zip(mixed.stem.parameters(), plain.stem.parameters(), strict=True)]
    return said, max(off)


def fully_sharded():
    """FSDP2 around a sharded layer, a module that holds one, and a unit; and the older FSDP."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    said = []
    for put in (lambda layer: layer, lambda layer: nn.Sequential(layer)):
        layer = Zero3Layer(nn.Linear(4, 4))
        around = put(layer)
        fully_shard(around)
        said.append(message(lambda m=around: m(torch.ones(1, 4))))
    said.append(message(lambda: fully_shard(whole().module)))
    with warnings.catch_warnings(), pytest.raises(Exception) as error:
        warnings.simplefilter("ignore")
        FullyShardedDataParallel(chain(), device_id=torch.device("cpu"))
    return said, str(error.value)


def others():
    # Together, because to import them takes longer than to try them.
    return others_that_train(), fully_sharded()


def test_ddp_and_fsdp_are_refused_or_leave_the_shards_alone():
    """
    `DistributedDataParallel` and `DataParallel` around a sharded model, or around a module that has
    no other parameters, say what to do, and change no weight. Around a module that trains others
    too DDP is right. `fully_shard` puts DTensors where the shards were, and an optimizer would step
    those: the next forward says so. A unit refuses its new class at once, and the older FSDP does
    not take shards. Breaks where DDP broadcasts rank 0's shards over everybody's.
    Proves I1, `look_at_wrapper`, `is_sharded`, `LayerGuard.check`, `Unit.__class__`.
    """
    for (said, off), (later, older) in run(others, 2):
        for text in said.values():
            assert "call the sharded model itself" in text
            assert "leave model and optimizer out" in text
        assert "cannot be trained inside of DistributedDataParallel" in said["chain", "inside"]
        assert off < 1e-12
        assert all("has lost its shard" in text for text in later[:2])
        assert "cannot change its class" in later[2] and older


def test_fairscale_and_conversions_are_errors():
    """
    fairscale's FSDP around a layer; `SyncBatchNorm.convert_sync_batchnorm` makes a new module with
    the freed parameters of the old one.
    Proves `look_at_wrapper`, `LayerGuard.check`.
    """
    fairscale = pytest.importorskip("fairscale.nn.misc.flatten_params_wrapper")
    layer = Zero3Layer(nn.Linear(3, 3))
    assert "FlattenParamsWrapper" in message(lambda: fairscale.FlattenParamsWrapper(layer))
    layer = Zero3Layer(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
    nn.SyncBatchNorm.convert_sync_batchnorm(layer)
    said = message(lambda: layer(torch.ones(2, 3)))
    assert "has a new parameter, `1.weight`" in said


# --------------------------------------------------------------------------------- what was added


def add_to_the_root(model):
    model.append(nn.Linear(2, 2))


def add_below(model):
    model[0].append(nn.Linear(4, 4))


def replace(model):
    model.module.module[1] = nn.Linear(4, 2)


def insert(model):
    model.module.module.insert(0, nn.Linear(4, 4))


def assign(model):
    model.head = nn.Linear(4, 2)


def add_to_the_wrapped_one(model):
    model.add_module("head", nn.Linear(4, 2))


def assign_to_a_unit(model):
    model[0].head = nn.Linear(4, 2)


def register(model):
    model[0].module[0].register_parameter("scale", nn.Parameter(torch.ones(4)))


def reassign(model):
    model[0].module[0].weight = nn.Parameter(torch.ones(4, 4))


def add_a_sharded_layer(model):
    model.module.module[1] = Zero3Layer(nn.Linear(4, 2))


ADDITIONS = {add_to_the_root: "`2.weight`", add_below: "`2.weight`", replace: "`1.weight`",
             insert: "`0.weight`", assign: "`head.weight`",
             add_to_the_wrapped_one: "'head.weight'", assign_to_a_unit: "`head.weight`",
             register: "`0.scale`", reassign: "`0.weight`", add_a_sharded_layer: "`1`"}


@pytest.mark.parametrize("add", ADDITIONS, ids=lambda add: add.__name__)
def test_what_is_added_to_a_whole_model_is_noticed(add):
    """
    With its name, in the next forward. Breaks where a new layer runs unsharded, and is stepped by
    nobody.
    Proves `LayerGuard`, `LayerGuard.check`, `Known`, `Known.has_changed`, `Zero3Model.forward`,
    `Unit.admits`.
    """
    model = whole()
    model(torch.ones(1, 4))
    add(model)
    said = message(lambda: model(torch.ones(1, 4)))
    assert ADDITIONS[add] in said and "model.destroy()" in said


def test_what_trains_nothing_may_be_added_and_layers_may_change_places():
    """
    Breaks where every change is an error.
    Proves `LayerGuard.__init__`, `LayerGuard.check`, `LayerGuard.__enter__`.
    """
    model = wrap(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(3))), nn.Sequential)
    layers = model.module.module
    layers[0], layers[1] = layers[1], layers[0]
    layers.append(nn.Dropout(0.0))
    layers.append(nn.Linear(4, 4).requires_grad_(False))
    model.extra = nn.Identity()
    out = model(torch.ones(1, 4))
    out.sum().backward()
    assert all(p.grad is not None for p in model.get_trainable_chunk())


def test_what_is_added_to_a_chain_is_noticed():
    """
    A layer at its end, in place of one, beside it; and inside of one of its layers.
    Proves `Zero3Sequential.walk`, `Guarded.admits`, `LayerGuard.check`,
    `check_walk`.
    """
    for add in (lambda m: m.module_list.append(Zero3Layer(nn.Linear(2, 2))),
                lambda m: m.module_list.__setitem__(0, nn.Linear(4, 4)),
                lambda m: setattr(m, "head", nn.Linear(2, 2))):
        model = chain()
        add(model)
        assert "whose layers have changed" in message(lambda m=model: m(torch.ones(1, 4)))
    model = chain()
    model.module_list[1].module.bias = nn.Parameter(torch.ones(2))
    said = message(lambda: model(torch.ones(1, 4)))
    assert "layer 1 (Linear) has a new parameter, `bias`" in said
    assert not any(layer.is_fetched for layer in model.sharded_layers)
    nested = Zero3Layer(nn.Sequential(nn.Linear(4, 4)))
    nested.module.append(Zero3Layer(nn.Linear(4, 4)))
    assert nested(torch.ones(1, 4)).shape == (1, 4)


# -------------------------------------------------------------------------- state dicts and copies


@pytest.mark.parametrize("strict", [True, False])
def test_loading_a_state_dict_says_what_to_do(strict):
    """
    Of a layer, a chain, a whole model, a unit, and a module inside. Breaks where `strict=False`
    loads nothing, and says nothing.
    Proves `LayerGuard._refuse_on_modules`.
    """
    weights = nn.Linear(4, 4).state_dict()
    for model in (Zero3Layer(nn.Linear(4, 4)), Zero3Layer(nn.Linear(4, 4)).module, chain(), whole(),
                  whole().module, whole()[0]):
        said = message(lambda m=model: m.load_state_dict(weights, strict=strict))
        for cure in ("zero3.load", "full_params(writeback=True)", "wrap(..., checkpoint=)"):
            assert cure in said
        assert "has no state dict" in message(model.state_dict)
    plain = nn.Sequential(nn.Linear(4, 4))
    plain = wrap(plain, nn.Linear).destroy()
    plain.load_state_dict({f"0.{name}": t for name, t in weights.items()})
    assert torch.equal(plain[0].weight, weights["weight"])


def test_freezing_a_part_says_what_to_do():
    """
    The parameters of a module inside a layer are shards elsewhere. Breaks where `requires_grad_`
    finds none, and says nothing: then the part trains on. A layer or a model is frozen as a whole.
    Proves `LayerGuard._refuse_on_modules`, `Zero3Model.destroy`.
    """
    for model in (chain(), whole()):
        inside = [m for m in model.modules() if type(m) is nn.Linear]
        for part in inside:
            said = message(lambda m=part: m.requires_grad_(False))
            assert "cannot freeze a module inside" in said
        model.requires_grad_(False)
        assert not any(p.requires_grad for p in model.parameters())
    plain = model.destroy()
    assert not any(p.requires_grad for p in plain.requires_grad_(False).parameters())


def test_copies_and_pickles_say_what_to_do():
    """
    `deepcopy`, `pickle`, `torch.save` and torch's own moving averages.
    Proves `Sharded.__reduce_ex__`.
    """
    for model in (Zero3Layer(nn.Linear(4, 4)), chain(), whole()):
        for does in (copy.deepcopy, copy.copy, pickle.dumps, torch.optim.swa_utils.AveragedModel,
                     lambda m: torch.save(m, io.BytesIO())):
            if does is copy.copy and not isinstance(model, Zero3Layer):
                continue
            said = message(lambda m=model, does=does: does(m))
            assert "cannot be copied or pickled" in said and "get_trainable_chunk" in said


# ------------------------------------------------------------------------------ classes and lengths


def unet():
    """Of the smallest sizes that it allows."""
    from labml_nn.diffusion.ddpm.unet import UNet

    torch.manual_seed(0)
    return UNet(1, 32, (1, 2), (False, True), 1)


def train_a_unet():
    from labml_nn.diffusion.ddpm import unet as parts

    # It makes tensors of its own, of the data type that is the default.
    torch.set_default_dtype(torch.float64)
    plain, other = unet().eval(), unet().eval()
    model = wrap(other, (parts.DownBlock, parts.UpBlock, parts.MiddleBlock, parts.Upsample,
                         parts.Downsample))
    pair = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    rank = dist.get_rank()
    for step in range(2):
        make = torch.Generator().manual_seed(step)
        x, t = torch.randn(2, 1, 4, 4, generator=make), torch.tensor([1, 5])
        for each, optimizer, rows in ((plain, pair[0], slice(None)),
                                      (model, pair[1], slice(rank, rank + 1))):
            optimizer.zero_grad()
            each(x[rows], t[rows]).square().mean().backward()
            optimizer.step()
    with model.full_params() as params:
        off = max((params[n] - p).abs().max().item() for n, p in plain.named_parameters())
    return off, {type(unit.module).__name__ for unit in model.units}


def test_a_model_may_treat_its_layers_by_their_classes():
    """
    labml_nn's U-Net for diffusion asks whether a layer is an `Upsample`, and takes no second input
    for it then. Two ranks train it like plain PyTorch.
    Proves I1, `Unit.__class__`, `Unit.forward`.
    """
    for off, kinds in run(train_a_unet, 2):
        assert off < 1e-10 and "Upsample" in kinds


def test_a_unit_is_what_its_module_is():
    """
    Its class, its length, its elements, and a `TypeError` where the module has none; but `type` and
    `repr` say that it is a unit.
    Proves `Unit.__class__`, `Unit`, `Zero3Model`, `StandIn`.
    """
    model = whole()
    unit = model[0]
    assert isinstance(unit, nn.Sequential) and isinstance(unit, Unit)
    assert isinstance(unit, Zero3Layer) and not isinstance(unit, nn.Linear)
    assert type(unit) is Unit and repr(unit).startswith("Unit(")
    assert len(unit) == 2 and [*unit] == [*unit.module] and unit[0] in unit
    assert len(model) == 2 and next(iter(model)) is unit and unit in model and model and unit
    bare = wrap(nn.Sequential(nn.Linear(2, 2)), nn.Linear)[0]
    assert isinstance(bare, nn.Linear) and bool(bare)
    for does in (len, iter, lambda it: it[0], lambda it: 0 in it):
        with pytest.raises(TypeError):
            does(bare)
    # Layers that a model iterates itself are used outside of their unit, and fetched along with it.
    class Outside(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    torch.manual_seed(0)
    plain = Outside()
    expected = plain(torch.ones(1, 3))
    assert torch.equal(wrap(plain, nn.Sequential)(torch.ones(1, 3)), expected)


def test_attributes_of_a_whole_model_are_written_to_the_model():
    """
    Breaks where `model.scale = 2` is set on the wrapper, where the model does not see it. A name
    that the model does not have yet is set there, too, because its forward may ask for it.
    Proves `Zero3Model`.
    """
    class Scaled(nn.Sequential):
        scale = 1.0

        def forward(self, x):
            return super().forward(x) * self.scale

    model = wrap(Scaled(nn.Linear(2, 2)), nn.Linear)
    once = model(torch.ones(1, 2))
    model.scale = 2.0
    assert torch.equal(model(torch.ones(1, 2)), 2 * once) and model.scale == 2.0
    model.note = "mine"
    assert model.note == model.module.module.note == "mine"


# ---------------------------------------------------------------------------------- inside forward


class Asks(nn.Linear):
    """Asks for its parameters, as Hugging Face's models do for their device and data type."""

    def forward(self, x):
        self.seen = [(name, tuple(p.shape)) for name, p in self.named_parameters()]
        return super().forward(x.to(next(self.parameters()).dtype))

    @property
    def dtype(self):
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    @property
    def device(self):
        return next(p.device for p in self.parameters())


def test_a_module_sees_its_parameters_while_it_computes():
    """
    And outside `parameters()` yields shards alone, after an exception too. Breaks where a layer
    that asks `next(self.parameters())` ends in StopIteration.
    Proves `LayerGuard.__enter__`.
    """
    layer, expected = Zero3Layer(Asks(4, 4).double()), [("weight", (4, 4)), ("bias", (4,))]
    layer(torch.ones(1, 4)).sum().backward()
    assert layer.module.seen == expected
    with pytest.raises(RuntimeError):
        layer(torch.ones(1, 5))
    assert [*layer.parameters()] == [*layer.chunk] and not [*layer.module.parameters()]
    model = wrap(nn.Sequential(Asks(4, 4).double(), nn.Tanh()), Asks)
    shards = [*model.parameters()]
    # Freed parameters can say as much, when a model asks one of its units before it calls it.
    assert model[0].dtype == torch.float64 and model[0].device == torch.device("cpu")
    model(torch.ones(1, 4)).sum().backward()
    assert model[0].module.seen == expected
    assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))


def between(how, model):
    """The gradients of a chain whose last layer stays full for its backward, in some way."""
    x = torch.ones(2, 4)
    if how == "checkpointed with its loss":
        # The square saves the output, so the chain is computed again before its backward begins.
        return checkpoint(lambda x: model(x).square().sum(), x, use_reentrant=False)
    if how == "checkpointed":
        x.requires_grad_()
        return checkpoint(model, x, use_reentrant=True).square().sum()
    if how == "written to":
        # The output of three dimensions is a view.
        return model(x[None]).mul_(2).sum()
    first = model(x).square().sum()
    return first + model(2 * x).sum() if how == "called twice" else first


@pytest.mark.parametrize("how", ["called once", "called twice", "checkpointed",
                                 "checkpointed with its loss", "written to"])
def test_the_last_layer_of_a_chain_is_closed_between_forward_and_backward(how):
    """
    As every other layer, though it is still whole: a use of a weight is an error, and a step in
    between would make its values old. Breaks without `close` after forward; or where a
    recomputation and backward do not show the parameters again.
    Proves I1, `LayerGuard.after_forward`, `LayerGuard.before_forward`,
    `LayerGuard.before_backward`, `Guarded.fetch_for_others`, `Guarded.show_again`.
    """
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4), nn.Linear(4, 2)]
    plain = nn.Sequential(*copy.deepcopy(modules))
    model = Zero3Sequential([Zero3Layer(m) for m in modules])
    last = model.module_list[-1]
    between(how, plain).backward()
    for read in (False, True):
        loss = between(how, model)
        assert last.is_fetched == (how != "checkpointed")
        text = message(lambda: last.module.weight + 1)
        assert "freed `weight`" in text
        with model.full_params() if read else contextlib.nullcontext() as params:
            if read:
                assert torch.equal(params["1.weight"], plain[1].weight)
        loss.backward()
        assert "freed `weight`" in message(lambda: last.module.weight + 1)
    expected = torch.cat([p.grad.view(-1) for p in plain.parameters()])
    found = torch.cat([p.grad for p in model.parameters()])
    torch.testing.assert_close(found, 2 * expected)


def test_a_model_of_hugging_face_knows_its_device_and_data_type():
    """
    Outside of forward, inside, and while it generates.
    Proves `LayerGuard.__enter__`, `Zero3Model.generate`, `StandIn`.
    """
    transformers = pytest.importorskip("transformers", reason="Hugging Face's library is not there")
    config = transformers.GPT2Config(vocab_size=9, n_positions=8, n_embd=8, n_layer=2, n_head=2)
    plain = transformers.GPT2LMHeadModel(config).eval()
    block = type(plain.transformer.h[0])
    asked, ids = [], torch.tensor([[1, 2]])
    plain.transformer.h[0].register_forward_hook(
        lambda *_: asked.append((plain.device, plain.dtype, plain.transformer.dtype)))
    expected = plain(ids).logits
    model = wrap(plain, block).eval()
    assert model.device == torch.device("cpu") and model.dtype == torch.float32
    assert torch.equal(model(ids).logits, expected)
    model.generate(ids, max_new_tokens=2, pad_token_id=0)
    assert len(asked) >= 3
    assert {*asked} == {(torch.device("cpu"), torch.float32, torch.float32)}
    assert model.dtype == torch.float32 and not [*model.module.module.transformer.wte.parameters()]


class Graph(nn.Linear):
    """Multiplies by a sparse matrix, a buffer or an attribute."""

    def __init__(self, buffer):
        super().__init__(3, 3)
        adjacent = (torch.eye(3) * (1 + dist.get_rank() * dist.is_initialized())
                    if dist.is_initialized() else torch.eye(3)).to_sparse()
        if buffer:
            self.register_buffer("adjacent", adjacent)
        else:
            self.adjacent = adjacent

    def forward(self, x):
        return torch.sparse.mm(self.adjacent, super().forward(x))


def sparse_on_two_ranks():
    layer = Zero3Layer(Graph(True))
    layer(torch.ones(3, 3)).sum().backward()
    Zero3Layer(Graph(False))(torch.ones(3, 3)).sum().backward()
    return layer.module.adjacent.to_dense().tolist()


def test_sparse_attributes_and_buffers():
    """
    Rank 0's buffer becomes everybody's, as a dense one does. Breaks where a sparse tensor is asked
    for its storage.
    Proves `Zero3Layer.forward`, `Communicator.broadcast`.
    """
    assert run(sparse_on_two_ranks, 2) == [torch.eye(3).tolist()] * 2


# ------------------------------------------------------------------------------- torch's transforms


class Squashed(nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


@pytest.mark.parametrize("kind", ["chain", "whole"])
@pytest.mark.parametrize("where", ["around", "at", "inside"])
def test_torch_compile_leaves_sharded_layers_out(kind, where):
    """
    `torch.compile` around a sharded model, of it, and of the modules in its layers: the numbers of
    plain PyTorch, and what is compiled is what is outside of layers or inside of their modules.
    Proves `uncompiled`.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    plain = nn.Sequential(Squashed(6, 6), Squashed(6, 3))
    layers = copy.deepcopy(plain)
    if where == "inside":
        for layer in layers:
            layer.compile(backend="aot_eager")
    model = (Zero3Sequential([Zero3Layer(m) for m in layers]) if kind == "chain"
             else wrap(layers, Squashed))
    used = model
    if where == "around":
        plain.forward = lambda x: nn.Sequential.forward(plain, x + 1)
        used = torch.compile(lambda x: model(x + 1), backend="aot_eager")
    if where == "at":
        used = torch.compile(model, backend="aot_eager")
    pair, x = [torch.optim.SGD(m.parameters(), 0.5) for m in (plain, model)], torch.randn(8, 6)
    for _ in range(2):
        losses = []
        for each, optimizer in ((plain, pair[0]), (used, pair[1])):
            optimizer.zero_grad()
            loss = each(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs == {"around": 1, "at": 0, "inside": 2}[where]


def test_transforms_of_functions_are_errors_around_a_layer_and_right_inside():
    """
    `vmap`, `grad` and `jvp` of `torch.func` around a layer say so; inside of its module, and of its
    full parameters, they are what they are in plain PyTorch.
    Proves `LayerGuard.check`.
    """
    class Inside(nn.Linear):
        def forward(self, x):
            return torch.vmap(super().forward)(x)

    layer, x = Zero3Layer(Inside(3, 3)), torch.randn(4, 3)
    for does in (lambda: torch.vmap(layer)(x), lambda: torch.func.grad(lambda x: layer(x).sum())(x),
                 lambda: torch.func.jvp(layer, (x,), (x,)), lambda: torch.vmap(whole())(x)):
        said = message(does)
        assert "cannot be transformed" in said
    with layer.full_params() as params:
        new = {name: 2 * p for name, p in params.items()}
        doubled = torch.func.functional_call(layer.module, new, (x,))
    out = layer(x)
    assert torch.allclose(doubled, 2 * out)
    out.sum().backward()
    assert layer.chunk[0].grad.count_nonzero()


# ------------------------------------------------------------------------------------- other ranks


def left_alone(file):
    """What rank 1 is told after rank 0 has ended, in a file: nobody waits for its answer."""
    connected = Path(f"{file}-connected")
    if dist.get_rank() == 0:
        # Not before the other one is connected, which would fail already.
        while not connected.exists():
            time.sleep(0.01)
        os._exit(1)
    connected.touch()
    comm, layer = Communicator(), Zero3Layer
    said = [message(does) for does in (
        lambda: Zero3Layer(nn.Linear(4, 4)), lambda: comm.agree(layer, "", "", "", ""),
        lambda: comm.broadcast([torch.ones(2)]), lambda: comm.broadcast([torch.eye(2).to_sparse()]),
        lambda: comm.scatter(torch.ones(4)))]
    Path(file).write_text(json.dumps(said))


def test_a_rank_that_waits_in_vain_says_to_look_for_the_first_error(tmp_path):
    """
    Rank 0 has ended, as after an error before it wraps a layer. Breaks where the other one knows
    the backend's words alone.
    Proves `Peers.gather`, `Peers.agree`, `Communicator.broadcast`,
    `Communicator.scatter`.
    """
    with pytest.raises(AssertionError, match="rank 0: the process ended"):
        run(left_alone, 2, str(tmp_path / "said"))
    said_to_1 = json.loads((tmp_path / "said").read_text())
    assert len(said_to_1) == 5
    for said in said_to_1:
        assert said.startswith("rank 1: another rank has ended, or does something else.")
        assert "the first error on the other ranks" in said


# ------------------------------------------------------------------------------------ what follows


def gathers_of_the_last_layer():
    """How often the last layer is gathered in the third step, with nothing fetched ahead."""
    plain, model = build("Plain", prefetch_numel=0)
    optimizer = Zero3Optimizer(model, lr=0.01)
    for step in range(3):
        with Ledger(model, optimizer) as tape:
            optimizer.backward(plain.loss(model(tokens(step, 2))))
            optimizer.step()
            optimizer.zero_grad()
    return [sum(e.event == "fetch" and e.layer == unit.label for e in tape.events)
            for unit in model.units]


def test_what_follows_is_the_next_unit_that_nobody_uses():
    """
    Where forward ends, the root is still in use, and backward comes to it first. The unit that
    follows is the one after it: the last layer, which stays full though nothing is fetched ahead.
    Breaks where `comes_again` takes the first of what comes, used or not.
    Proves I4, `TracedOrder.stays_full`.
    """
    root, *layers, last = run(gathers_of_the_last_layer, 1)[0]
    assert (root, last) == (1, 1) and {*layers} == {2}

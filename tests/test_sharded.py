"""
# What a layer does with code that it did not expect: the right thing, or an error with the cure

Programs that train wrongly without an error in many a sharded library: writes to parameters in
forward, frozen layers, gradient penalties, blocks that one rank leaves by an exception.
"""

import copy
import dataclasses
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tests.cases import WIDTH, linear, train_both
from tests.ranks import run
from tests.test_layer import message
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save, wrap
from zero3.comm import collectives
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.estimate.predict import predict_optimizer

# ------------------------------------------------------------------------ writes to parameters


class Clamps(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.clamp_(-0.05, 0.05)
        return super().forward(x)


class ClampsData(nn.Linear):
    def forward(self, x):
        self.weight.data.clamp_(-0.05, 0.05)
        return super().forward(x)


class Replaces(nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data * 0.5
        return super().forward(x)


def test_a_forward_that_writes_to_a_parameter_is_refused_and_leaves_the_layer_usable():
    """
    By an operation in place, by `.data`, and as `nn.Embedding(max_norm=)` does it. The layer rests
    afterwards and has its old values. Breaks without `_check_params` in `forward`: the write would
    be lost with the full parameter, and `Moved` in the cases would train a copy.
    Proves `FlatParameter.written`, `FlatParameter.open`, `LayerGuard.after_backward`,
    `OpenParameter`.
    """
    for module, x in ((Clamps(WIDTH, WIDTH), torch.ones(1, WIDTH)),
                      (ClampsData(WIDTH, WIDTH), torch.ones(1, WIDTH)),
                      (Replaces(WIDTH, WIDTH), torch.ones(1, WIDTH)),
                      (nn.Embedding(5, WIDTH, max_norm=0.1), torch.tensor([1, 2]))):
        before = module.weight.detach().clone()
        layer = Zero3Layer(module)
        text = message(lambda layer=layer, x=x: layer(x))
        assert "written to `weight`" in text and "get_trainable_chunk" in text
        assert not layer.is_fetched and layer.flats[0].full.untyped_storage().nbytes() == 0
        with layer.full_params() as params:
            assert torch.equal(params["weight"], before)


def test_a_write_in_backward_is_refused():
    """
    An optimizer that steps each parameter in its gradient's hook would step one that is about to be
    freed. Breaks without `_check_params` in `_backup_grads`.
    Proves `FlatParameter.written`, `Zero3Layer._backup_grads`, `LayerGuard.after_backward`.
    """
    module = linear()

    def step(param):
        with torch.no_grad():
            param.sub_(param.grad)

    module.weight.register_post_accumulate_grad_hook(step)
    layer = Zero3Layer(module)
    assert "written to `weight`" in message(lambda: layer(torch.ones(1, WIDTH)).sum().backward())


class WritesInBackward(nn.Module):
    """Its weight is written to once the gradient of its input is there; `end` raises as well."""

    def __init__(self, end):
        super().__init__()
        self.line, self.unused = linear(), nn.Parameter(torch.ones(1))
        self.end, self.wrong = end, False

    def forward(self, x):
        if self.wrong:
            x.register_hook(self.write)
        return torch.tanh(self.line(x))

    def write(self, grad):
        with torch.no_grad():
            self.line.weight.add_(1)
        if self.end == "an exception":
            raise KeyError("after the write")


def goes_on(end, layers, ours):
    """The losses after a pass whose layer could not settle, and those of plain PyTorch."""
    torch.manual_seed(0)
    modules = [linear() for _ in range(layers - 1)]
    modules.insert(layers // 2, WritesInBackward(end))
    plain = nn.Sequential(*copy.deepcopy(modules))
    model = Zero3Sequential([Zero3Layer(m) for m in modules])
    optimizer = (Zero3Optimizer(model, torch.optim.SGD, lr=0.1) if ours else
                 torch.optim.SGD(model.parameters(), lr=0.1))
    modules[layers // 2].wrong = True
    x = torch.ones(2, WIDTH, requires_grad=True)
    with pytest.raises((RuntimeError, KeyError)) as caught:
        model(x).sum().backward()
    text = str(caught.value)
    del caught
    left = [layer.is_fetched for layer in model.module_list]
    unsettled = len(model.module_list[0].reducer.unsettled)
    modules[layers // 2].wrong = False
    model.zero_grad()
    losses = []
    for each, steps in ((model, optimizer), (plain, torch.optim.SGD(plain.parameters(), lr=0.1))):
        for _ in range(3):
            loss = each(x).square().sum()
            loss.backward()
            steps.step()
            steps.zero_grad()
            losses.append(loss.item())
    return text, left, unsettled, losses[:3], losses[3:]


@pytest.mark.parametrize("end", ["the end of the pass", "an exception"])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("ours", [False, True])
def test_a_layer_that_cannot_settle_is_freed_and_trains_on(end, layers, ours):
    """
    The guard finds the write when the layer settles, because one parameter gets no gradient. In a
    chain the engine then drops what the other layers asked for, and they settle after an exception.
    Breaks without the second call in `at_end_of_backward`: the layer would stay full, compute with
    old weights, and never settle again.
    Proves I2, `at_end_of_backward`, `Zero3Layer.settle`.
    """
    for text, left, unsettled, losses, expected in run(goes_on, 2, end, layers, ours):
        what = "written to `line.weight`" if end == "the end of the pass" else "after the write"
        assert what in text
        assert not any(left) and unsettled == 0
        assert losses == pytest.approx(expected)


def test_values_given_by_data_are_written_back():
    """
    `p.data = values` in the block has left the buffer that is sharded; a shape that does not fit is
    an error, and nothing changes. Breaks without the copy in `_write_back`.
    Proves `Sharded.full_params`, `FlatParameter.collect_writes`.
    """
    layer = Zero3Layer(nn.Linear(3, 3))
    with layer.full_params(writeback=True) as params:
        params["weight"].data = torch.full((3, 3), 7.0)

    def misfit():
        with layer.full_params(writeback=True) as params:
            params["bias"].data = torch.zeros(4)

    assert "`bias` of (4,)" in message(misfit)
    with layer.full_params() as params:
        assert params["weight"].eq(7).all() and params["bias"].shape == (3,)
    layer(torch.ones(1, 3)).sum().backward()


def test_full_params_inside_of_full_params_changes_nothing():
    """
    As `generate` and `save` of a whole model enter it. Breaks if the inner block gathers the layer
    again, without what was written, or frees it while the outer block goes on.
    Proves `Sharded.full_params`.
    """
    layer = Zero3Layer(nn.Linear(3, 3))
    with layer.full_params(writeback=True) as params, torch.no_grad():
        params["weight"].fill_(7)
        with layer.full_params() as inner:
            assert inner["weight"].eq(7).all()
        params["bias"].fill_(8)
    with layer.full_params() as params:
        assert params["weight"].eq(7).all() and params["bias"].eq(8).all()


@pytest.mark.parametrize("trains", [False, True])
def test_a_parameter_is_not_frozen_by_itself(trains):
    """
    It has no shard of its own: weight decay would change it, or its gradient would stay whole.
    Breaks if the next forward does not look. Proves `LayerGuard.check`.
    """
    layer = Zero3Layer(nn.Linear(3, 3).requires_grad_(not trains))
    with layer.full_params() as params:
        params["weight"].requires_grad_(trains)
    assert r"another `requires_grad` of ['weight']" in message(
        lambda: layer(torch.ones(1, 3)))


def leaves(kind):
    """Rank 0 leaves the block by an exception; then all write, and train."""
    torch.manual_seed(0)
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    model = (Zero3Sequential([Zero3Layer(m) for m in modules]) if kind == "chain" else
             wrap(nn.Sequential(*modules), nn.Linear))
    told = ""
    try:
        with model.full_params(writeback=True) as params:
            params["0.weight"].detach().fill_(9)
            if dist.get_rank() == 0:
                raise ValueError("of rank 0 alone")
    except (ValueError, RuntimeError) as error:
        told = f"{type(error).__name__}: {error}"
    with model.full_params(writeback=True) as params:
        old = params["0.weight"].eq(9).any().item()
        params["0.bias"].detach().fill_(dist.get_rank() + 1)
    model(torch.ones(1, 4)).sum().backward()
    with model.full_params() as params:
        return told, old, params["0.bias"].tolist()


@pytest.mark.parametrize("kind", ["chain", "wrap"])
def test_an_exception_of_one_rank_in_full_params_reaches_all(kind):
    """
    Nothing is written, nobody waits for ever, and the next block works. Breaks without the gather
    in the `except` of `full_params`: the other rank would wait in the scatter.
    Proves `Sharded.full_params`, `Peers.agree`.
    """
    (mine, *first), (theirs, *second) = run(leaves, 2, kind)
    assert mine == "ValueError: of rank 0 alone"
    assert theirs.startswith("RuntimeError: rank 1:") and "on rank 0" in theirs
    assert "ValueError: of rank 0 alone" in theirs
    assert first == second == [False, [1.0] * 4]


# --------------------------------------------------------------------------- backward of backward

class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.w = nn.LayerNorm(8), nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.norm(x) * self.w


class Hides(Scale):
    def forward(self, x):
        y = super().forward(x)
        return lambda: y


def needs_freed(kind):
    x = torch.randn(2, 8, requires_grad=True)

    def go():
        if kind == "penalty":
            (g,) = torch.autograd.grad((Zero3Layer(Scale())(x) ** 3).sum(), x, create_graph=True)
            g.square().sum().backward()
        else:
            Zero3Layer(Hides())(x)().sum().backward()

    return told(go)


@pytest.mark.parametrize("kind, expected", [
    ("penalty", "rank 0: Scale cannot go backward twice"),
    ("hidden", "modified by an inplace operation"),
])
def test_a_backward_that_needs_a_freed_parameter_raises(kind, expected):
    """
    In a process of its own, which a read of freed memory would end: a gradient penalty, and an
    output that nobody could watch. Breaks without the check in `_pre_backward_hook`, and without
    another `_version` in `_close_params`.
    Proves `FlatParameter.close`, `Zero3Layer._pre_backward_hook`, `FlatParameter._set_versions`.
    """
    (said,) = run(needs_freed, 1, kind, fresh=True)
    assert expected in said


def penalised(kind):
    """The largest difference of a weight, after three steps with a gradient penalty."""
    torch.manual_seed(0)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain = nn.Sequential(nn.Linear(8, 8), nn.Softplus(), nn.LayerNorm(8), nn.Linear(8, 1)).double()
    modules = copy.deepcopy(plain)
    model = (Zero3Sequential([Zero3Layer(m) for m in modules]) if kind == "chain" else
             wrap(modules, nn.Linear))

    def penalty(model, x):
        x = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return (grad.square().sum(1) - 1).square().mean()

    ours, theirs = (torch.optim.SGD(p, 0.1) for p in
                    (model.get_trainable_chunk(), plain.parameters()))
    for step in range(3):
        x = torch.randn(2 * world_size, 8, generator=torch.Generator().manual_seed(step)).double()
        theirs.zero_grad()
        penalty(plain, x).backward()
        theirs.step()
        ours.zero_grad()
        with model.full_params():
            penalty(model, x.chunk(world_size)[rank]).backward()
        ours.step()
    with model.full_params() as params:
        return max((params[n] - p).abs().max().item() for n, p in plain.named_parameters())


@pytest.mark.parametrize("kind", ["chain", "wrap"])
def test_inside_of_full_params_a_gradient_penalty_is_that_of_plain_pytorch(kind):
    """
    The cure that the error names is right. Breaks where the check of `_pre_backward_hook` ignores
    `is_full_elsewhere`, or the hook of a parameter without a gradient goes on.
    Proves I1, `Zero3Layer._pre_backward_hook`, `Sharded.full_params`,
    `LayerGuard.before_backward`.
    """
    assert max(run(penalised, 2, kind)) < 1e-12


def pair_of(kind):
    """A sharded model, its optimizer, and the plain model"""
    torch.manual_seed(0)
    modules = nn.Sequential(linear(), linear())
    plain = copy.deepcopy(modules)
    model = (Zero3Sequential([Zero3Layer(m) for m in modules]) if kind == "chain" else
             wrap(modules, nn.Linear))
    return model, torch.optim.SGD(model.get_trainable_chunk(), 0.1), plain


@pytest.mark.parametrize("kind", ["chain", "wrap"])
def test_backward_inside_of_full_params_needs_its_forward_there(kind):
    """
    What autograd saved outside is freed by then. Backward outside is right wherever the forward
    was. Breaks without the check of `is_elsewhere`, with an error of torch's about a storage.
    Proves `LayerGuard.before_backward`, `Call`.
    """
    model, _, plain = pair_of(kind)
    x = torch.ones(1, WIDTH)

    def inside():
        loss = model(x).sum()
        with model.full_params():
            loss.backward()

    text = message(inside)
    assert "cannot go backward here" in text and "`full_params()`" in text
    model.zero_grad()
    with model.full_params():
        model(x).sum().backward()
        loss = model(x).sum()
    loss.backward()
    plain(x).sum().backward()
    expected = torch.cat([p.grad.view(-1) for p in plain.parameters()])
    found = torch.cat([p.grad for p in model.get_trainable_chunk()])
    torch.testing.assert_close(found, 2 * expected)


@pytest.mark.parametrize("kind", ["chain", "wrap"])
def test_a_step_inside_of_full_params_is_an_error(kind):
    """
    The parameters inside have the values from before. A forward pass would compute with these, and
    `writeback` would undo the step. Breaks where nobody compares the shards' versions.
    Proves `Sharded.full_params`, `LayerGuard.before_forward`.
    """
    model, optimizer, plain = pair_of(kind)
    x = torch.ones(1, WIDTH)

    def inside(writeback):
        with model.full_params(writeback):
            model(x).sum().backward()
            optimizer.step()
            if not writeback:
                model(x)

    assert "a step or `load` inside of it. What to do: leave `full_params()`" in message(
        lambda: inside(False))
    assert "a step or `load` in the block, which this would undo" in message(lambda: inside(True))
    # Both steps were taken, and nothing else.
    theirs = torch.optim.SGD(plain.parameters(), 0.1)
    for _ in range(2):
        plain(x).sum().backward()
        theirs.step()
    with model.full_params() as params:
        for name, p in plain.named_parameters():
            torch.testing.assert_close(params[name], p)


@pytest.mark.parametrize("kind", ["chain", "wrap"])
def test_a_hook_of_a_shard_is_an_error(kind):
    """
    Nobody would call it, because the gradient of a shard comes from a reduce-scatter.
    Proves `LayerGuard.check`.
    """
    model, _, _ = pair_of(kind)
    shard = model.get_trainable_chunk()[-1]
    x = torch.ones(1, WIDTH)
    for register in (shard.register_hook, shard.register_post_accumulate_grad_hook):
        handle = register(lambda grad: None)
        assert "cannot call the hooks of a shard" in message(lambda: model(x))
        handle.remove()
    optimizer = Zero3Optimizer(model)
    optimizer.backward(model(x).sum())
    optimizer.step()
    model(x)


@pytest.mark.parametrize("kind", ["chain", "wrap"])
def test_a_layer_that_is_frozen_between_forward_and_backward_is_an_error(kind):
    """
    Plain PyTorch would give it no gradient, and here it would get one.
    Proves `LayerGuard.refuse_old_calls`.
    """
    model, _, _ = pair_of(kind)
    loss = model(torch.ones(1, WIDTH)).sum()
    last = [m for m in model.modules() if isinstance(m, Zero3Layer)][-1].requires_grad_(False)
    assert "which was frozen in between. What to do: freeze before forward" in message(
        loss.backward)
    last.requires_grad_(True)
    model.zero_grad()
    model(torch.ones(1, WIDTH)).sum().backward()


def test_a_layer_inside_of_a_layer_belongs_to_the_chain():
    """
    Its shards are for the optimizer, and its parameters have their names in the plain model. Breaks
    where a chain knows only the layers that it was built with.
    Proves `Sharded.and_inside`, `Zero3Sequential.named_layers`,
    `ShardedModel.get_trainable_chunk`.
    """
    def module(wrapped):
        inner = nn.Sequential(linear(), wrapped(linear()))
        return nn.Sequential(linear(), nn.Sequential(linear(), wrapped(inner)))

    plain = nn.Sequential(module(nn.Identity().forward), linear())
    model = Zero3Sequential([Zero3Layer(module(Zero3Layer)), Zero3Layer(linear())])
    assert {*model.get_trainable_chunk()} == {*model.parameters()}
    assert len(model.get_trainable_chunk()) == 4
    with model.full_params() as params:
        assert {*params} == {name for name, _ in plain.named_parameters()}


# -------------------------------------------------------------------------------- frozen, thawed


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_layer_may_be_frozen_and_thawed_after_wrapping(tier, tmp_path):
    """
    `requires_grad_` on the model reaches the shards, and the parameters follow: frozen ones get no
    gradient and go on passing them, thawed ones train, also where they were wrapped frozen. Breaks
    without `_follow_requires_grad` in `forward`.
    Proves `FlatParameter.follow_requires_grad`, `Zero3Layer._add_backward_hooks`,
    `FreedParameter`, `Watch.enter`.
    """
    torch.manual_seed(0)
    offload = Offload(tier, tmp_path if tier == "nvme" else None)
    born_frozen = linear().requires_grad_(False)
    model = Zero3Sequential([Zero3Layer(born_frozen, offload=offload),
                             Zero3Layer(linear(), offload=offload)])
    x = torch.randn(2, WIDTH, requires_grad=True)
    model.requires_grad_(False)
    model(x).mean().backward()
    assert x.grad is not None and all(p.grad is None for p in model.parameters())
    model.requires_grad_(True)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.5, offload=offload)

    def weights():
        with model.full_params() as params:
            return {name: p.detach().clone() for name, p in params.items()}

    before = weights()
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    assert all(not torch.equal(p, before[name]) for name, p in weights().items())

    model.module_list[0].requires_grad_(False)
    late = Zero3Optimizer(model, torch.optim.SGD, lr=0.5, offload=offload)
    model.module_list[0].requires_grad_(True)
    late.backward(model(x).square().mean())
    assert "layer 0" in (text := message(late.step)) and "freeze afterwards" in text


# -------------------------------------------------- inputs whose gradients say something else


class Force(nn.Module):
    """The gradient of an energy by the input, and a term that needs the weight after it."""

    def __init__(self):
        super().__init__()
        self.line = linear()

    def forward(self, x):
        energy = torch.tanh(self.line(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return force + self.line(x)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_forward_may_take_the_gradient_of_its_own_input(frozen):
    """
    It is no backward pass of the layer. Breaks where each gradient of an input counts: a frozen
    layer would be over with it, and freed before the second use of its weight.
    Proves I1, `Watch.inputs`, `Watch._arrives`.
    """
    torch.manual_seed(0)
    modules = [linear(), Force().requires_grad_(not frozen), linear()]
    plain = nn.Sequential(*copy.deepcopy(modules))
    model = Zero3Sequential([Zero3Layer(m) for m in modules])
    x = torch.randn(2, WIDTH)
    for each in (model, plain):
        each(x).square().sum().backward()
    expected = [p.grad.view(-1) for p in plain.parameters() if p.grad is not None]
    found = [p.grad for p in model.get_trainable_chunk()]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected))


class Context(nn.Module):
    """Attention of its input to itself, or to another one, as a module tells by identity"""

    def __init__(self):
        super().__init__()
        self.line = linear()

    def forward(self, x, context=None):
        return self.line(x) if context is x else 2 * self.line(x + context)


class Pull(nn.Module):
    """The gradient of an energy, also where gradients are off"""

    def __init__(self):
        super().__init__()
        self.line = linear()

    @torch.enable_grad()
    def forward(self, x):
        return torch.autograd.grad(self.line(x).square().sum(), x)[0]


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x):
        return torch.sparse.mm(x, self.weight)


@dataclasses.dataclass
class Half:
    """Only one of its fields has a value"""

    x: torch.Tensor
    y: torch.Tensor = dataclasses.field(init=False)


class Fields(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = linear()

    def forward(self, half):
        return Half(self.line(half.x))


def test_inputs_of_all_kinds_reach_the_module_as_they_are():
    """
    The same tensor twice is the same one, a tensor keeps its graph where gradients are off, a
    sparse one has no view, and a field of a dataclass may be empty. Breaks with a view for each
    argument: a module that asks `context is x` takes another way.
    Proves I1, `Watch.inputs`, `tensors_in`.
    """
    torch.manual_seed(0)
    x = torch.randn(2, WIDTH, requires_grad=True)
    eye = torch.eye(WIDTH).to_sparse().requires_grad_()
    for module, call in (
            (Context(), lambda f: f(x, x)), (Context(), lambda f: f(x, context=x)),
            (Context(), lambda f: f(x, x.clone())), (Sparse(), lambda f: f(eye)),
            (Fields(), lambda f: f(Half(x)).x)):
        plain = copy.deepcopy(module)
        layer = Zero3Layer(module)
        found, expected = call(layer), call(plain)
        torch.testing.assert_close(found, expected)
        for each in (found, expected):
            each.sum().backward()
        torch.testing.assert_close(layer.chunk[0].grad, torch.cat(
            [p.grad.view(-1) for p in plain.parameters()]))
    pull = Pull()
    plain = copy.deepcopy(pull)
    with torch.no_grad():
        torch.testing.assert_close(Zero3Layer(pull)(x), plain(x))


class Prompted(nn.Module):
    """Adds a prompt to its input, and hands both on: the prompt in a dict, or as an attribute."""

    def __init__(self, prompt, how):
        super().__init__()
        self.line, self.how = linear(), how
        self.prompt = prompt if how == "attribute" else None

    def forward(self, batch):
        prompt = self.prompt if self.how == "attribute" else batch["prompt"]
        return {**batch, "x": torch.tanh(self.line(batch["x"] + prompt))}


def prompted(how, frozen, sharded):
    """The prompt after each of three steps, and how many hooks it has once the graph is gone."""
    torch.manual_seed(0)
    prompt = torch.zeros(WIDTH, requires_grad=True)
    modules = [Prompted(prompt, how).requires_grad_(not frozen) for _ in range(2)]
    model = (Zero3Sequential([Zero3Layer(m) for m in modules]) if sharded else
             nn.Sequential(*modules))
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD([*params, prompt], 0.1)
    passed = {"prompt": prompt} if how == "dict" else {}
    found = []
    for _ in range(3):
        model({"x": torch.ones(1, WIDTH), **passed})["x"].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append((prompt.tolist(), len(prompt._backward_hooks or ())))
    return found


@pytest.mark.parametrize("how", ["dict", "attribute"])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_prompt_outlives_its_passes(how, frozen):
    """
    A leaf that passes through layers trains as in plain PyTorch, and keeps nothing of a pass.
    Breaks where a leaf among the outputs announces backward: in the second step that of the first
    one, whose weights have changed; or without the removal of the hooks on inputs, which would
    grow with each step.
    Proves I1, `Watch.inputs`, `Watch.outputs`, `Call`.
    """
    found = prompted(how, frozen, True)
    expected = prompted(how, frozen, False)
    assert [hooks for _, hooks in found] == [0, 0, 0]
    for (ours, _), (plain, _) in zip(found, expected, strict=True):
        assert ours == pytest.approx(plain)


# -------------------------------------------------------------------------------------- autocast


def saved_weight_bytes(model, x):
    """What autograd saves in forward that is as large as a weight, and how much of it stays."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(x)
    wide = x.shape[1] ** 2
    return out, sum(t.untyped_storage().nbytes() for t in saved.values() if t.numel() >= wide)


def test_autocast_keeps_all_weights_in_16_bits_and_says_so():
    """
    Under autocast the 16-bit copies of all weights but the first stay from forward to backward (the
    first layer's input needs no gradient); layers in bf16 keep the last layer alone. Breaks where
    the chapter says otherwise.
    Proves `Zero3Layer.forward`, `LayerGuard.before_forward`.
    """
    depth, width = 5, 64

    def chain(dtype):
        return Zero3Sequential([Zero3Layer(nn.Linear(width, width, bias=False, dtype=dtype))
                                for _ in range(depth)])

    x = torch.randn(2, width)
    with pytest.warns(UserWarning, match="rank 0: layers of fp32 run under autocast"):
        with torch.autocast("cpu", torch.bfloat16):
            out, nbytes = saved_weight_bytes(chain(torch.float32), x)
    assert nbytes == (depth - 1) * 2 * width * width
    out.float().sum().backward()
    _, nbytes = saved_weight_bytes(chain(torch.bfloat16), x.bfloat16())
    assert nbytes == 2 * width * width


def test_a_gradient_finds_its_place_without_a_search():
    """
    The work for a gradient does not grow with the number of parameters in the layer. Counted in
    calls of Python functions, for time would depend on the machine. Breaks with a search through
    the slots in `_post_backward_hook`.
    Proves `Zero3Layer._post_backward_hook`, `FlatParameter.collect`, `Sharded.slots`.
    """

    class Many(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.all = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(count))

        def forward(self, x):
            return x * torch.stack([*self.all]).sum(0)

    def calls_for_each(count):
        out = Zero3Layer(Many(count))(torch.ones(2)).sum()
        calls = []
        sys.setprofile(lambda frame, event, _: calls.append(event == "call"))
        try:
            out.backward()
        finally:
            sys.setprofile(None)
        return sum(calls) / count

    assert calls_for_each(400) < 1.2 * calls_for_each(100)


class TwoNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.one = linear()
        self.two = self.one

    def forward(self, x):
        return self.two(x.to(next(self.one.parameters()).dtype))


def test_a_module_with_two_names_sees_its_parameters_and_has_both_names():
    """
    Inside of forward by `parameters()`, and in `full_params` by each name. Breaks where a module
    that comes twice is emptied twice in `Zero3Layer.__init__`.
    Proves `Zero3Layer.__init__`, `own_modules`.
    """
    layer = Zero3Layer(TwoNames())
    layer(torch.ones(1, WIDTH, dtype=torch.double)).sum().backward()
    with layer.full_params() as params:
        assert {*params} == {f"{name}.{p}" for name in ("one", "two") for p in ("weight", "bias")}


# ------------------------------------------------------------------------------------- alignment


def aligned(folder):
    """Everything as on an accelerator, as far as places in flat parameters go."""
    real = collectives.Communicator.open

    def open_as_on_an_accelerator(self, *args):
        device = real(self, *args)
        self.align_bytes = collectives.ALIGN_BYTES
        return device

    collectives.Communicator.open = open_as_on_an_accelerator
    told = {name: train_both(name) for name in ("Chain", "Adapters", "Tiny", "DataTypes")}
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 7)).bfloat16() for _ in range(3)]
    model = Zero3Sequential([Zero3Layer(layer) for layer in layers])
    starts = []
    for layer in model.module_list:
        for g in layer.flats:
            rows = layer.comm.rows(g.full)
            elements = [slot.offset for slot in g.slots] + [r * rows.shape[1] for r in range(3)]
            starts += [n * g.full.itemsize % 16 for n in elements]
    optimizer = Zero3Optimizer(model, lr=0.1, clip_grad_norm=1.0, bucket_bytes=300)
    for _ in range(2):
        with Ledger(model, optimizer) as tape:
            optimizer.backward(model(torch.ones(2, 7).bfloat16()).float().square().mean())
            optimizer.step()
        optimizer.zero_grad()
    found = predict_optimizer(optimizer)
    differ = [held_bytes(model, optimizer) - found.rest_bytes, tape.sent_bytes - found.sent_bytes,
              tape.peak_live_bytes - found.peak_bytes]
    padding = [g.shard.detach()[max(0, slice.start - first) : max(0, slice.stop - first)]
               for layer in model.module_list for g in layer.flats for slice in g.padding
               for first in [layer.comm.rank * len(g.shard)]]
    told["padding"] = max(float(part.abs().max()) for part in padding if len(part))
    # And back, into layers that are packed without padding between parameters.
    save(folder, model, optimizer, step=2)
    collectives.Communicator.open = real
    packed = Zero3Sequential([Zero3Layer(copy.deepcopy(plain)) for plain in
                              [nn.Sequential(nn.Linear(7, 3), nn.Linear(3, 7)).bfloat16()] * 3])
    load(folder, packed, Zero3Optimizer(packed, lr=0.1))
    with model.full_params() as mine, packed.full_params() as theirs:
        told["checkpoint"] = max(float((mine[n] - theirs[n]).abs().max()) for n in mine)
    return told, starts, differ


@pytest.mark.parametrize("world_size", [2, 3])
def test_on_an_accelerator_parameters_and_rows_begin_at_multiples_of_16_bytes(world_size, tmp_path):
    """
    With the same numbers, zeros in the padding, bytes that are predicted exactly, and checkpoints
    that load where nothing is padded. Breaks without `aligned` in `_merge_and_pad_params`, or with
    a gradient whose padding between parameters is not zeroed.
    Proves I1, I5, `Zero3Layer._merge_and_pad_params`, `Communicator.aligned`, `formulas.Part`,
    `CheckpointReader.read`.
    """
    for told, starts, differ in run(aligned, world_size, str(tmp_path)):
        assert told.pop("DataTypes") <= 1e-5 and max(told.values()) <= 1e-10, told
        assert not any(starts) and differ == [0, 0, 0]


# ---------------------------------------------------------------------- a step before backward


def told(does):
    with pytest.raises(RuntimeError) as error:
        does()
    return str(error.value)


def steps_in_between(kind, folder):
    """
    Two forward passes, the backward pass of the first, a step, and that of the second: what is
    said, and what is said after `full_params` has written. Then a plain step works again.
    """
    offload = Offload("nvme", folder=folder) if kind == "files" else Offload()
    module = nn.Sequential(linear(), nn.Tanh(), linear())
    if kind == "wrap":
        model = wrap(module, nn.Linear)
    else:
        model = Zero3Sequential([Zero3Layer(module, offload=offload)])
    if kind == "torch":
        optimizer = torch.optim.SGD(model.get_trainable_chunk(), lr=0.1)
    else:
        optimizer = Zero3Optimizer(model, lr=0.1, offload=offload)
    x = torch.ones(1, WIDTH)
    first, second = model(x).sum(), model(x).square().sum()
    first.backward()
    optimizer.step()
    said = [told(second.backward)]
    optimizer.zero_grad()
    loss = model(x).sum()
    with model.full_params(writeback=True) as params:
        for p in params.values():
            p.detach().mul_(0.5)
    said.append(told(loss.backward))
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    return said


@pytest.mark.parametrize("kind", ["torch", "ours", "files", "wrap"])
def test_a_step_between_forward_and_its_backward_is_refused_as_in_plain_pytorch(kind, tmp_path):
    """
    Plain PyTorch finds that a weight, saved for backward, has been modified. Backward would gather
    the new weights here, and give a gradient that belongs to no forward pass.
    Proves I1, `LayerGuard.refuse_old_calls`, `Guarded.shard_versions`, `Call`.
    """
    for rank, said in enumerate(run(steps_in_between, 2, kind, str(tmp_path))):
        for text in said:
            assert f"rank {rank}: " in text and "cannot go backward. Expected: the weights" in text
            assert "What to do: go backward through all forward passes before you step" in text

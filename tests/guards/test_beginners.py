"""
# Mistakes of beginners: each is made right, or is an error or a warning that says what to do
"""

import copy
import json
import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.guards.checks import is_sharded, own_modules
from zero3.inject.cross_entropy import chunked_cross_entropy
from zero3.pipeline import Pipeline

# What gives the shards other memory, and what it does to the values of plain PyTorch's model.
MOVES = {
    "to": lambda model: model.to("cpu:0"),
    "half": lambda model: model.half().float(),
    "data": lambda model: [setattr(p, "data", p.data.clone()) for p in model.parameters()],
    "ema": lambda model: [setattr(p, "data", 0.5 * p.data) for p in model.parameters()],
}


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def batch(rank):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))


def trained(model, optimizer, x, move):
    for step in range(3):
        if step == 1:
            move(model)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def moves(name):
    """The largest difference to plain PyTorch, and how far a weight has gone"""
    move = MOVES[name]
    expected = plain()
    both = torch.cat([batch(rank) for rank in range(2)])
    trained(expected, torch.optim.AdamW(expected.parameters(), lr=0.1), both, move)
    found = []
    for make in (lambda: Zero3Sequential([Zero3Layer(layer) for layer in plain()]),
                 lambda: wrap(plain(), nn.Linear)):
        model = make()
        trained(model, Zero3Optimizer(model, lr=0.1), batch(dist.get_rank()), move)
        with model.full_params() as params:
            pairs = [(p, params[name]) for name, p in expected.named_parameters()]
            found.append(max(float((a - b).abs().max()) for a, b in pairs))
    gone = max(float((a - b).abs().max()) for a, b in
               zip(expected.parameters(), plain().parameters(), strict=True))
    return max(found), gone


@pytest.mark.parametrize("name", MOVES)
def test_a_model_that_gets_other_memory_goes_on_training(name):
    """
    `to("cpu:0")` copies, and so does a conversion there and back. The optimizer has a view of the
    old memory, and would step that: no weight of the model would ever move again. Rounded or
    changed values are taken over, as plain PyTorch does. Breaks without the comparison of addresses
    in `Portion._current_master`.
    Proves I1, `Portion._current_master`.
    """
    for difference, gone in run(moves, 2, name):
        assert difference < 1e-6 < 0.1 < gone


def rests(dtype, tier, folder):
    """Whether weights that are halved by a detour are plain PyTorch's, with masters elsewhere"""
    expected, model = (nn.Linear(4, 3).to(dtype) for _ in range(2))
    model.load_state_dict(expected.state_dict())
    model = Zero3Layer(model)
    optimizer = Zero3Optimizer(model, lr=0.1, offload=Offload(tier, folder=folder))
    trained = torch.optim.SGD(expected.parameters(), lr=0.0)
    for net, stepper in ((expected, trained), (model, optimizer)):
        stepper.param_groups[0]["lr"] = 0.0
        for p in net.parameters():
            p.data = 0.5 * p.data.float()
        net.to(dtype)
        net(torch.ones(2, 4, dtype=dtype)).sum().backward()
        stepper.step()
    with model.full_params() as params:
        return all(torch.equal(p, params[name]) for name, p in expected.named_parameters())


@pytest.mark.parametrize(("dtype", "tier"), [(torch.float32, "device"), (torch.bfloat16, "device"),
                                             (torch.bfloat16, "cpu"), (torch.bfloat16, "nvme")])
def test_a_detour_through_another_data_type_is_a_write(dtype, tier, tmp_path):
    """
    The values come back in memory of their own, in the shard's data type. A master in 32 bits would
    undo the write in the next step, if nobody counted it. The learning rate is 0.
    Proves I1, I8, `CountedShard`, `Portion._current_master`.
    """
    folder = tmp_path if tier == "nvme" else None
    assert run(rests, 2, dtype, tier, folder) == [True, True]


def vector(model):
    """What torch's own function does to all weights: they are views of one vector from now on"""
    params = [*model.parameters()]
    nn.utils.vector_to_parameters(0.5 * nn.utils.parameters_to_vector(params), params)


MOVES["vector"] = vector


def unscaled():
    model = Zero3Sequential([Zero3Layer(layer) for layer in plain()])
    optimizer = Zero3Optimizer(model, lr=0.1, loss_scale="dynamic")
    x = batch(0)
    model(x).square().mean().backward()
    with pytest.raises(RuntimeError, match=r"call `optimizer.backward\(loss\)`"):
        optimizer.step()
    optimizer.zero_grad()
    # Without a gradient there is nothing to scale.
    optimizer.step()
    optimizer.backward(model(x).square().mean())
    return optimizer.step() is not None


def test_a_loss_that_was_not_scaled_is_not_divided_by_the_scale():
    """
    `loss.backward()` with a dynamic loss scale would make every gradient 65,536 times too small.
    Proves `Zero3Optimizer.backward`, `Zero3Optimizer._check_ready`.
    """
    assert run(unscaled, 2) == [True, True]


def test_ranks_that_have_not_met_do_not_train_alone():
    """
    torchrun says that there are two ranks, and nobody has called `init_process_group`.
    Proves `all_ranks`.
    """
    with mock.patch.dict(os.environ, {"RANK": "1", "WORLD_SIZE": "2"}):
        with pytest.raises(RuntimeError, match=r"alone\. Expected: a process group of 2 ranks"):
            Zero3Layer(nn.Linear(2, 2))
    Zero3Layer(nn.Linear(2, 2))


def alone():
    """Each rank has made a process group of its own, as a program for one process does"""
    rank = dist.get_rank()
    # Not before the other rank is connected, too.
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with mock.patch.dict(os.environ, {"RANK": f"{rank}", "WORLD_SIZE": "2"}):
        with pytest.raises(RuntimeError, match=r"alone\. Expected: .* Got: one of 1 rank") as error:
            wrap(plain(), nn.Linear)
    return str(error.value)


def test_ranks_with_a_process_group_each_do_not_train_alone():
    """
    `init_process_group(rank=0, world_size=1)`, copied from a program for one process.
    Proves `all_ranks`.
    """
    for rank, text in enumerate(run(alone, 2)):
        assert text.startswith(f"rank {rank}: ") and "without a rank and a size" in text


def says(does):
    """What this rank's error says, if it raises one"""
    try:
        does()
    except RuntimeError as error:
        return str(error)
    return ""


def in_part():
    """Optimizers of some parameters, and what the next forward says"""
    x = batch(dist.get_rank())
    said = []
    for choose in (lambda plain, model: plain.parameters(),
                   lambda plain, model: [p for unit in model[1:] for p in unit.parameters()],
                   lambda plain, model: model.parameters()):
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 6), *(nn.Sequential(nn.Linear(6, 6)) for _ in range(2)))
        model = wrap(plain, nn.Sequential)
        optimizer = torch.optim.AdamW(choose(plain, model), lr=0.1)
        model(x).square().mean().backward()
        optimizer.step()
        # `optimizer.zero_grad()` would leave the root's gradient.
        model.zero_grad()
        said.append(says(lambda: model(x)))  # noqa: B023
        # It is said once, and frozen weights are not missed.
        model.module.requires_grad_(False)
        for unit in model.units[1:]:
            unit.requires_grad_(True)
        model(x).square().mean().backward()
        optimizer.step()
        said.append(says(lambda: model(x)))  # noqa: B023
    return said


def test_a_unit_that_no_optimizer_steps_is_missed_in_the_next_forward():
    """
    After `wrap` the plain model's `parameters()` are those of the layers, without the root's. An
    optimizer of these would train the layers alone. `unit.parameters()` of all layers, likewise.
    Proves `Zero3Model._count_steps`, `Zero3Model.check`.
    """
    for first, _, second, _, right, _ in (said := run(in_part, 2)):
        for text in (first, second):
            assert "the model is trained in part" in text and "['the rest']" in text
            assert "`model.parameters()` of what `wrap` returned" in text
        assert right == ""
    assert [text for each in said for text in each[1::2]] == [""] * 6


def other_options():
    """What each rank says, if the options or the models of one differ"""
    rank = dist.get_rank()
    found = {}

    def steps(name, change, **options):
        model = Zero3Sequential([Zero3Layer(layer) for layer in plain()])
        optimizer = Zero3Optimizer(model, lr=0.1, **options)
        change(optimizer)
        optimizer.backward(model(batch(0)).square().mean())
        found[name] = says(optimizer.step)

    def own_loss(optimizer):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for loss in (1.0, 1.0 - 0.5 * rank):
            plateau.step(loss)

    steps("the same", lambda optimizer: None)
    steps("scheduler", own_loss)
    steps("decay", lambda optimizer: None, weight_decay=0.1 * rank)
    steps("group", lambda optimizer: None,
          group_by=lambda name, p: {"lr": 0.2} if name == f"{2 * rank}.weight" else {})
    steps("clip", lambda optimizer: None, clip_grad_norm=1.0 + rank)
    steps("class", lambda optimizer: None,
          optimizer_class=(torch.optim.AdamW, torch.optim.Adam)[rank], weight_decay=0.0)
    return found


def test_ranks_that_would_step_by_other_options_are_told_so_and_do_not_step():
    """
    A rank steps its own part of every weight, so with another learning rate on one rank a part of
    every weight goes astray. The announcement of the norms has a checksum of the options, which
    costs no bytes. Breaks if `_squares` announces no options.
    Proves I6, `Zero3Optimizer._rule`, `Zero3Optimizer._squares`, `checks._cure`.
    """
    first, second = run(other_options, 2)
    assert first.pop("the same") == second.pop("the same") == ""
    for name, text in (*first.items(), *second.items()):
        assert "the optimizer: the ranks diverged" in text, name
        assert "give the optimizers of all ranks the same options" in text, text
    assert "lr 0.01," in first["scheduler"] and "lr 0.1," in second["scheduler"]
    assert "mean loss over all ranks" in first["scheduler"]


def other_models(how):
    """Two models of the same shapes, in another order on rank 1; what each rank says"""
    order = [0, 1] if dist.get_rank() == 0 else [1, 0]
    models = {}
    for i in order if how == "wrapped" else range(2):
        torch.manual_seed(i)
        models[i] = wrap(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), nn.Linear)
    return says(lambda: models[order[0] if how == "called" else 0](batch(0)))


@pytest.mark.parametrize("how", ["wrapped", "called"])
def test_models_of_the_same_shapes_are_not_mixed_up(how):
    """
    A teacher and its student, say: wrapped in another order on one rank, or called in another
    order. Each rank would compute with halves of both.
    Proves I6, `compare_params`, `told`, `checks._cure`.
    """
    for text in run(other_models, 2, how):
        assert "the ranks diverged" in text and "of another model" in text
        assert "wrap models in the same order on all ranks, and call the same one" in text


def states_of_rank_0():
    """What each rank says to rank 0's states, and to its own"""
    model = Zero3Layer(nn.Linear(4, 3))
    optimizer = Zero3Optimizer(model, lr=0.1)
    optimizer.backward(model(batch(0)).mean())
    optimizer.step()
    own = optimizer.state_dict()
    sent = [own]
    dist.broadcast_object_list(sent, 0)
    return says(lambda: optimizer.load_state_dict(sent[0])), says(
        lambda: optimizer.load_state_dict(own))


def test_the_states_of_rank_0_are_not_loaded_on_the_others():
    """
    With DDP all ranks load what rank 0 has saved. Here all ranks would get rank 0's part of the
    weights.
    Proves `Zero3Optimizer.load_state_dict`.
    """
    (first, own), (other, others_own) = run(states_of_rank_0, 2)
    assert first == own == others_own == ""
    assert "Expected: that of part 1 of 2. Got: part 0 of 2" in other and "zero3.save" in other


def draws(value):
    """A chain whose shards are drawn on each rank, from one seed"""
    model = Zero3Sequential([Zero3Layer(layer) for layer in plain()])
    torch.manual_seed(1)
    for p in model.parameters():
        nn.init.normal_(p, 0.1, value)
    return says(lambda: Zero3Optimizer(model))


def test_ranks_that_draw_the_same_weights_for_their_shards_are_told_so():
    """
    `nn.init.normal_(p)` for `p` in `model.parameters()` would make the parts of a weight equal.
    Constants are fine.
    Proves `check_drawn`.
    """
    for said in run(draws, 2, 0.02):
        assert "the same random numbers on several" in said and "before wrapping" in said
    assert run(draws, 2, 0.0) == ["", ""]


def ends_sooner():
    layer = Zero3Layer(nn.Linear(2, 2))
    if dist.get_rank() == 0:
        dist.destroy_process_group()
        return ""
    return says(lambda: layer(torch.ones(1, 2)))


def test_a_rank_with_more_batches_is_told_to_look_for_one_with_fewer():
    """
    Rank 0 has ended without an error, so there is no first error to look for.
    Proves `Group.advice`.
    """
    _, said = run(ends_sooner, 2)
    assert "the other ranks are lost" in said and "a rank that has fewer batches and has" in said


def test_a_state_dict_of_freed_parameters_says_how_to_take_one():
    """
    labml's `FineTuner.state_dict` reads `p.data.cpu()`, others `p.detach()`.
    Proves `FreedParameter`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    for read, name in ((lambda p: p.data.cpu(), "data"), (lambda p: p.detach(), "detach"),
                       (lambda p: p.clone(), "clone")):
        with pytest.raises(RuntimeError, match=f"Got: `{name}` outside. What to do: save the model "
                                               ".* in `with model.full_params") as error:
            {n: read(p) for n, p in (("weight", layer.module.weight),)}
        assert "freed `weight`" in str(error.value)


def test_a_write_to_a_freed_parameter_says_how_to_write_and_to_freeze():
    """
    The advice on a use in forward would lead into `full_params()` without `writeback`.
    Proves `FreedParameter`.
    """
    weight = Zero3Layer(nn.Linear(2, 2)).module.weight
    for write, name in ((nn.init.zeros_, "zero_"), (nn.init.xavier_normal_, "normal_"),
                        (lambda p: setattr(p, "requires_grad", False), "requires_grad"),
                        (lambda p: setattr(p, "data", torch.ones(2, 2)), "data")):
        with pytest.raises(RuntimeError, match=f"Got: `{name}` outside. What to do: initialise.*"
                                               "writeback=True.*requires_grad_"):
            write(weight)
    with pytest.raises(RuntimeError, match=r"`__getitem__` outside\. .* wrap each"):
        weight[0]


def test_a_functional_call_takes_the_names_and_values_of_full_params():
    """
    `named_parameters()` of a sharded layer has shards, which say nothing about a weight.
    Proves `LayerGuard.check`.
    """
    layer, x = Zero3Layer(nn.Linear(2, 2)), torch.ones(1, 2)
    halves = {name: p / 2 for name, p in layer.named_parameters()}
    with pytest.raises(RuntimeError, match=r"lost its shard.*functional_call` in `with layer.full"):
        torch.func.functional_call(layer, halves, (x,))
    with layer.full_params() as params:
        halves = {name: p / 2 for name, p in params.items()}
        y = torch.func.functional_call(layer.module, halves, (x,))
    assert torch.equal(2 * y, layer(x))


class Rotary(nn.Module):
    """A buffer that is in no file, computed by the constructor"""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 0.1 ** torch.arange(0, 1, 0.25), persistent=False)

    def forward(self, x):
        return x * self.inv_freq


class Llama(nn.Module):
    """A model that gives values to its modules' buffers, as Hugging Face's do"""

    def __init__(self):
        super().__init__()
        self.rotary = Rotary()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def _init_weights(self, module):
        if isinstance(module, Rotary):
            module.inv_freq.copy_(Rotary().inv_freq)

    def forward(self, x):
        return self.layers(self.rotary(x))


def test_buffers_that_are_in_no_checkpoint_are_computed_by_the_model(tmp_path):
    """
    Hugging Face's Llama on the meta device: its `rotary_emb` has no `reset_parameters`, and its
    model has `_init_weights`.
    Proves `Source`.
    """
    torch.manual_seed(0)
    expected = Llama()
    save_file(expected.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = Llama()
    model = wrap(empty, nn.Linear, checkpoint=tmp_path)
    assert torch.equal(model(batch(0)), expected(batch(0)))


def test_a_write_that_is_lost_is_said():
    """
    Inside `full_params()` without `writeback=True` the shards do not change. A copy of a parameter
    is a plain one.
    Proves `Sharded.full_params`, `check_writes`, `OpenParameter`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    for alias in (lambda p: p, lambda p: p.data):
        with pytest.warns(UserWarning, match="`weight` inside `full_params\\(\\)` is lost"):
            with layer.full_params() as params, torch.no_grad():
                alias(params["weight"]).zero_()
                assert type(copy.deepcopy(params["weight"])) is nn.Parameter
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with layer.full_params() as params:
            layer(torch.ones(1, 2)).sum().backward()
            assert params["weight"].abs().max() > 0
        with layer.full_params(writeback=True) as params, torch.no_grad():
            params["weight"].zero_()
        with layer.full_params() as params:
            assert params["weight"].abs().max() == 0


def test_a_tensor_that_takes_the_place_of_a_parameter_is_not_written_back():
    """
    `params[name] = values` and `params.update(state)` change a dict, and no weight.
    Proves `Sharded.full_params`, `ShardedModel.full_params`, `check_writes`.
    """
    for model, name in ((Zero3Layer(nn.Linear(2, 2)), "bias"),
                        (Zero3Sequential([Zero3Layer(nn.Linear(2, 2))]), "0.bias"),
                        (wrap(nn.Sequential(nn.Linear(2, 2)), nn.Linear), "0.bias")):
        with pytest.raises(RuntimeError, match=f"Got: another object as `params\\['{name}'\\]`"):
            with model.full_params(writeback=True) as params:
                params.update({name: torch.zeros(2)})
        with model.full_params() as params:
            params[name] = params[name].cpu()


def evaluates():
    """A pipeline that is evaluated in inference mode, and then trained"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shard"))
    model = Pipeline([*plain()], mesh, loss_fn=nn.functional.mse_loss, micro_batches=2)
    optimizer = Zero3Optimizer(model, lr=0.1)
    x, y = torch.ones(4, 4), torch.zeros(4, 3)
    losses = []
    for _ in range(2):
        losses.append(model.train_batch(x, y, optimizer))
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode():
            losses.append(model.eval_batch(x, y))
            losses.append(model.eval_batch(x, y))
    return losses


def test_a_pipeline_trains_after_an_evaluation_in_inference_mode():
    """
    A tensor that is asked for ahead of time may be used in the next batch, and a tensor that was
    made in inference mode can never be trained with.
    Proves `Channels`.
    """
    losses, others = run(evaluates, 2)
    first, once, twice, *_ = losses
    assert others == losses and once == twice != first


class Grows(nn.Module):
    """The third layer computes from the second step on"""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

    def forward(self, x, count):
        for layer in self.layers[:count]:
            x = layer(x)
        return x


def test_a_parameter_may_get_its_first_gradient_later_than_its_neighbours():
    """
    SGD with momentum: torch's fused kernel refuses it, and was chosen by us.
    Proves I1, `Zero3Optimizer._choose_fused`.
    """
    torch.manual_seed(0)
    expected = Grows()
    torch.manual_seed(0)
    model = wrap(Grows(), nn.Linear)
    theirs = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
    ours = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    x = batch(0)
    for count in (2, 3, 3):
        for net, optimizer in ((expected, theirs), (model, ours)):
            net(x, count).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with model.full_params() as params:
        for name, param in expected.named_parameters():
            assert torch.equal(param, params[name])


@pytest.mark.parametrize("make, words", [
    (lambda ps: torch.optim.AdamW([{"params": [p for p in ps if p.dim() > 1]},
                                   {"params": [p for p in ps if p.dim() < 2], "weight_decay": 0}]),
     "Got: an empty group of AdamW. What to do: pass `group_by=`"),
    (torch.optim.Adafactor, r"stepped by Adafactor. (.*)`Zero3Optimizer\(model, Adafactor"),
])
def test_shards_are_not_stepped_as_if_they_were_parameters(make, words):
    """
    Without decay for vectors, no shard would have any; and a class that takes the norm of a
    parameter would take that of a shard.
    Proves `check_optimizer`.
    """
    model = Zero3Sequential([Zero3Layer(nn.Linear(3, 3)) for _ in range(2)])
    optimizer = make([*model.parameters()])
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()


def test_a_group_takes_the_options_of_its_optimizer():
    """
    A typing mistake in `weight_decay` would train without, in silence.
    Proves `Zero3Optimizer._members`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match=r"cannot use `group_by`(.*)weight_decay"):
        Zero3Optimizer(layer, group_by=lambda name, p: {"weight_deacy": 0.1})
    for wrong in ({"optimizer": torch.optim.SGD, "weight_deacy": 0.1}, {"optimizer": "SGD"}):
        with pytest.raises(RuntimeError, match=r"cannot step `weight`\. Expected: parameters and "
                                               "options that SGD takes"):
            Zero3Optimizer(layer, group_by=lambda name, p, wrong=wrong: wrong)
    optimizer = Zero3Optimizer(layer, group_by=lambda name, p: {"weight_decay": 0.5})
    assert optimizer.param_groups[0]["weight_decay"] == 0.5


def test_labels_of_the_chunked_loss_are_tokens_and_may_all_be_ignored():
    """
    A label outside of the vocabulary is an error, as in torch. With all labels ignored the loss is
    NaN and the gradients are zero, as in torch. In fp16 the gradient is as good as torch's: the
    gradient of the logits is rounded before anybody divides it.
    Proves `chunked_cross_entropy`.
    """
    hidden, weight = torch.randn(4, 8), torch.randn(10, 8, requires_grad=True)
    for wrong in (-1, 10, 50256):
        with pytest.raises(RuntimeError, match="expected targets from 0 to 9, or -100"):
            chunked_cross_entropy(hidden, weight, torch.tensor([1, 2, 3, wrong]))
    loss = chunked_cross_entropy(hidden, weight, torch.full((4,), -100))
    loss.backward()
    assert loss.isnan() and weight.grad.eq(0).all()

    torch.manual_seed(0)
    tokens, scale = 8000, 65536.0
    values = 0.02 * torch.randn(tokens, 32), torch.randn(1024, 32)
    targets = torch.randint(0, tokens, (1024,))

    def grads(loss, dtype):
        weight, hidden = (each.to(dtype).requires_grad_() for each in values)
        (loss(hidden, weight) * scale).backward()
        return [each.grad.double() / scale for each in (weight, hidden)]

    def plainly(hidden, weight):
        logits = nn.functional.linear(hidden, weight)
        return nn.functional.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)

    def chunked(hidden, weight):
        return chunked_cross_entropy(hidden, weight, targets)

    true = grads(plainly, torch.double)
    errors = [[float((a - b).norm() / b.norm()) for a, b in zip(found, true, strict=True)]
              for found in (grads(plainly, torch.half), grads(chunked, torch.half))]
    assert max(errors[1]) < 1.5 * max(errors[0]) < 0.002


def cuts():
    """What a pipeline says to batches that cannot be cut, and to another number of parts"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shard"))
    model = Pipeline([*plain()], mesh, loss_fn=nn.functional.mse_loss, micro_batches=2)
    optimizer = Zero3Optimizer(model, lr=0.1)
    said = []
    rows = torch.ones(8, 4)
    for x, y in ((rows, torch.zeros(2, 3)), ((rows, torch.arange(4)), None)):
        with pytest.raises(ValueError, match="micro-batches") as error:
            model.train_batch(x, y, optimizer)
        said.append(str(error.value))
    with pytest.raises(AttributeError):
        model.micro_batches = 4
    model.train_batch(rows, torch.zeros(8, 3), optimizer)
    return said


def test_a_pipeline_cuts_tensors_with_as_many_rows_and_nothing_else():
    """
    Targets of two rows beside inputs of eight would train, each part with a part of them. Another
    number of parts, set afterwards, would train a part of the batch.
    Proves `Pipeline.cut`, `Pipeline.micro_batches`.
    """
    for first, second in run(cuts, 2):
        assert "tensors of [2, 8] rows" in first and "tensors of [4, 8] rows" in second


class Config:
    """What a model of Hugging Face's has as its `config`"""

    architectures = None

    def save_pretrained(self, folder):
        (folder / "config.json").write_text(json.dumps({"architectures": self.architectures}))


def test_a_saved_model_of_hugging_faces_has_its_configuration(tmp_path):
    """
    `from_pretrained` asks for it, and for the class.
    Proves `materialise.save`, `_save_config`.
    """
    model = plain()
    model.config = Config()
    wrap(model, nn.Linear).save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {"architectures": ["Sequential"]}


def test_own_modules_end_at_a_sharded_layer():
    """
    The table of `own_modules`: a plain layer `a` is an own module, a sharded layer `b` is none, and
    neither is the module of `b`. Breaks if `own_modules` looks into a sharded layer.
    Proves `own_modules`, `is_sharded`.
    """
    outer = nn.Sequential()
    outer.add_module("a", nn.Linear(2, 2))
    outer.add_module("b", Zero3Layer(nn.Linear(2, 2)))
    assert [*own_modules(outer)] == [("", outer), ("a.", outer.a)]
    assert [is_sharded(each) for each in (outer, outer.a, outer.b, outer.b.module)] == [
        False, False, True, False]

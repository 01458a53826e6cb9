"""
# Mistakes of beginners: each is made right, or is an error or a warning that says what to do
"""

import json
import os
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
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
    in `_follow_shard`.
    Proves I1, `ShardStates._follow_shard`.
    """
    for difference, gone in run(moves, 2, name):
        assert difference < 1e-6 < 0.1 < gone


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


def test_a_write_that_is_lost_is_said():
    """
    Inside `full_params()` without `writeback=True` the shards do not change.
    Proves `Sharded.full_params`, `Sharded._warn_of_writes`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    with pytest.warns(UserWarning, match="`weight` inside `full_params\\(\\)` is lost"):
        with layer.full_params() as params, torch.no_grad():
            params["weight"].zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with layer.full_params() as params:
            layer(torch.ones(1, 2)).sum().backward()
            assert params["weight"].abs().max() > 0
        with layer.full_params(writeback=True) as params, torch.no_grad():
            params["weight"].zero_()
        with layer.full_params() as params:
            assert params["weight"].abs().max() == 0


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


def test_a_group_takes_the_options_of_its_optimizer():
    """
    A typing mistake in `weight_decay` would train without, in silence.
    Proves `Zero3Optimizer._group_indices`.
    """
    layer = Zero3Layer(nn.Linear(2, 2))
    for wrong in ({"weight_deacy": 0.1}, {"optimizer": torch.optim.SGD}):
        with pytest.raises(RuntimeError, match=r"cannot use `group_by`(.*)weight_decay"):
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

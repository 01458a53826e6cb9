"""
# Tensor parallelism: ranks that compute one layer together

The oracle is the plain model on the global batch, in fp64.
"""

import copy

import pytest
import torch
import torch.distributed as dist
from labml_nn.transformers import MultiHeadAttention, TransformerLayer
from labml_nn.transformers.feed_forward import FeedForward
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero3
from tests.ranks import run
from tests.test_inject import LENGTH, TOKENS, WIDTH, HuggingFace, Masked, Model, farthest, ids_of
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.guards.parts import Part
from zero3.inject import inject, policies, restore
from zero3.measure.ledger import Ledger
from zero3.train.gpt import GPTConfig, gpt_layers

NAMES = ("tensor", "shard")


def labml_model(dropout=0.0, gated=False):
    """labml's layer with a gate, and the main job's, whose heads share a convolution."""
    layer = TransformerLayer(
        d_model=WIDTH, self_attn=MultiHeadAttention(2, WIDTH, dropout),
        feed_forward=FeedForward(WIDTH, 12, dropout, nn.SiLU(), is_gated=True),
        dropout_prob=dropout)
    first, block, last = gpt_layers(GPTConfig(TOKENS, LENGTH, WIDTH, 2, 1, 12, dropout))
    if gated:
        block.layer.feed_forward = copy.deepcopy(layer.feed_forward)
    return Model([first, Masked(layer), block, last])


def with_dropout():
    return labml_model(0.25)


def tied():
    model = labml_model()
    model.layers[-1].generator.projection.weight = model.layers[0].embed.linear.weight
    return model


class Bert(nn.Module):
    """A masked language model, of which the layers are split"""

    def __init__(self):
        import transformers

        super().__init__()
        config = transformers.BertConfig(
            vocab_size=TOKENS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=12, max_position_embeddings=8, hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0)
        self.model = transformers.BertForMaskedLM(config)
        self.layer_classes = (type(self.model.bert.encoder.layer[0]),)

    def forward(self, ids):
        return self.model(ids, labels=ids).loss


MODELS = {
    "labml": labml_model, "gated": lambda: labml_model(gated=True), "dropout": with_dropout, "tied": tied, "bert": Bert,
    "gpt2": lambda: HuggingFace("GPT2"), "qwen2": lambda: HuggingFace("Qwen2"),
    "llama": lambda: HuggingFace("Llama", tie_word_embeddings=True)}
# Hugging Face computes the loss in fp32, and Llama's norms.
TOLERANCE = {"gpt2": 1e-5, "qwen2": 1e-5, "llama": 1e-5, "bert": 1e-5}


def make(which, seed=0):
    torch.manual_seed(seed)
    return MODELS[which]().double()


def adam(params):
    return torch.optim.AdamW(params, lr=1e-2, eps=1e-2)


def train(model, optimizer, rows, steps=3):
    """Losses of a few steps, each with masks of its own."""
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(rows(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


# ------------------------------------------------------------------------------------ without shards


def split_alone(which, more):
    """The largest difference after training, and of what `restore` gives back."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    plain = make(which)
    # The first rank's values count.
    model = make(which, seed=rank)
    classes = [type(module) for module in model.modules()]
    listed = [policies.tensor_parallel(mesh), *(getattr(policies, name)() for name in more)]
    inject(model, listed)
    numel = [sum(p.numel() for p in each.parameters()) for each in (plain, model)]
    expected = train(plain, adam(plain.parameters()), lambda step: ids_of(3, step))
    found = train(model, adam(model.parameters()), lambda step: ids_of(3, step))
    worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert not any({"line", "parts", "whole_values"} & vars(m).keys() for m in model.modules())
    pair = [dict(each.named_parameters()) for each in (plain, model)]
    assert [p.shape for p in pair[0].values()] == [p.shape for p in pair[1].values()]
    # As good as plain: one more step.
    train(plain, adam(plain.parameters()), lambda step: ids_of(3, 9), 1)
    train(model, adam(model.parameters()), lambda step: ids_of(3, 9), 1)
    return max(worst, farthest(*pair)) / TOLERANCE.get(which, 1e-10), numel[1] / numel[0]


@pytest.mark.parametrize("which, more", [
    ("labml", ()), ("tied", ()), ("dropout", ()), ("gated", ("attention", "swiglu")),
    ("gpt2", ()), ("llama", ()), ("qwen2", ()), ("bert", ()), ("gpt2", ("cross_entropy",)),
    ("llama", ("cross_entropy", "rms_norm", "swiglu"))])
def test_two_ranks_train_the_weights_of_the_plain_model(which, more):
    """
    Weights and losses after three steps, and one more after `restore`, in fp64. A vocabulary of 13
    tokens on two ranks, tied embeddings, weights of three blocks, convolutions that heads share,
    dropout with the masks of the plain model, biases; alone and with other policies. Each rank
    keeps little more than half of the weights.
    """
    for worst, share in run(split_alone, 2, which, more):
        assert worst < 1 and share < (0.8 if which == "bert" else 0.75), (worst, share)


# --------------------------------------------------------------------------------------- with shards


def rows_of(mesh, step):
    """The global batch, and the rows of this rank: the same on all tensor ranks."""
    count, place = mesh["shard"].size(), mesh["shard"].get_local_rank()
    ids = ids_of(2 * count, step)
    return ids, ids[2 * place : 2 * place + 2]


def build_split(which, mesh, chain=False, seed=0):
    model = inject(make(which, seed), [policies.tensor_parallel(mesh["tensor"])])
    if chain:
        return Zero3Sequential([Zero3Layer(layer, mesh=mesh["shard"]) for layer in model.layers])
    return wrap(model, model.layer_classes, mesh=mesh["shard"])


def loss_of(model, ids):
    return Model.loss(model(ids), ids) if isinstance(model, Zero3Sequential) else model(ids)


def weights_of(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def split_and_sharded(which, shape, folder, ours, chain, offload=None):
    """The largest difference of losses, norms and weights, with a checkpoint in between."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    plain = make(which)
    model = build_split(which, mesh, chain, seed=dist.get_rank())
    clip = {"clip_grad_norm": 0.1} if ours else {}
    optimizer = (Zero3Optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-2, offload=offload,
                                **clip) if ours else adam(model.get_trainable_chunk()))
    other = adam(plain.parameters())
    worst = []
    for step in range(4):
        ids, mine = rows_of(mesh, step)
        torch.manual_seed(step)
        expected = loss_of(plain, ids)
        expected.backward()
        torch.manual_seed(step)
        loss = loss_of(model, mine)
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        worst.append(abs(mean / mesh.size() - expected).item())
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        found = None if ours else model.clip_grad_norm_(0.1)
        found = optimizer.step() if ours else (optimizer.step(), found)[1]
        worst.append(abs(float(found) - float(norm)))
        other.step()
        for each in (optimizer, other):
            each.zero_grad()
        if step == 1:
            zero3.save(folder, model, optimizer, step=step)
            with model.full_params() as params:
                for p in params.values():
                    p.detach().zero_()
            zero3.load(folder, model, optimizer)
    zero3.save(folder, model, optimizer, step=4)
    restored = restore(model.destroy())
    names = weights_of(plain if not chain else plain.layers)
    worst.append(farthest(names, weights_of(restored)))
    return max(worst) / TOLERANCE.get(which, 1e-10), names


def loaded(which, shape, folder):
    """The weights of a checkpoint, in a model that is split in another way, or not at all."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    if shape[0] == 1:
        plain = make(which, seed=7)
        model = wrap(plain, plain.layer_classes, mesh=mesh["shard"])
    else:
        model = build_split(which, mesh, seed=7)
    optimizer = Zero3Optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-2)
    zero3.load(folder, model, optimizer)
    return weights_of(restore(model.destroy()))


@pytest.mark.parametrize("which, ours, chain", [
    ("labml", True, False), ("tied", True, False), ("labml", False, True), ("gpt2", True, False)])
def test_split_layers_are_sharded_again(which, ours, chain, tmp_path):
    """
    Tensor 2 x shard 2: losses, clipped norms, and weights after four steps, with a checkpoint and a
    load in between; by `wrap` and as a chain, by our optimizer and torch's. The checkpoint loads at
    tensor 1 x shard 1, x shard 3, and at tensor 2 without shards, with the plain names and shapes.
    """
    folder = str(tmp_path)
    (worst, expected), *others = run(split_and_sharded, 4, which, (2, 2), folder, ours, chain)
    assert max(worst, *(each for each, _ in others)) < 1
    if chain:
        return
    for shape in ((1, 1), (1, 3), (2, 1)):
        for found in run(loaded, shape[0] * shape[1], which, shape, folder):
            assert farthest(found, expected) < TOLERANCE.get(which, 1e-10)

"""
# Tensor parallelism: ranks that compute one layer together

The oracle is the plain model on the global batch, in fp64.
"""

import argparse
import copy
from dataclasses import asdict

import pytest
import torch
import torch.distributed as dist
from labml_nn.transformers import Encoder, Generator, MultiHeadAttention, TransformerLayer
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.models import EmbeddingsWithPositionalEncoding
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zero3
from tests.bench import tensor as bench_tensor
from tests.inject.test_inject import (
    LENGTH,
    TOKENS,
    WIDTH,
    HuggingFace,
    Masked,
    Model,
    farthest,
    ids_of,
    kept,
)
from tests.ranks import run
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.checkpoint.convert import export
from zero3.checkpoint.reader import Param, merge_parts, newest
from zero3.comm.links import groups_of
from zero3.comm.order import Group
from zero3.comm.parts import WeightPart, part_of
from zero3.compression import Quantize, compress
from zero3.estimate.formulas import LayerSpec, Part
from zero3.estimate.ledger import Ledger
from zero3.estimate.predict import predict, predict_optimizer
from zero3.inject import inject, policies, restore
from zero3.inject.cross_entropy import chunked_cross_entropy
from zero3.inject.line import Line
from zero3.inject.sequence import SequenceBorder
from zero3.inject.tensor import Pattern
from zero3.pipeline import Pipeline
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


class Encoded(nn.Module):
    """labml's encoder between an embedding and a head"""

    layer_classes = (TransformerLayer,)

    def __init__(self, dropout=0.25):
        super().__init__()
        self.embed = EmbeddingsWithPositionalEncoding(WIDTH, TOKENS)
        self.encoder = Encoder(TransformerLayer(
            d_model=WIDTH, self_attn=MultiHeadAttention(2, WIDTH, dropout),
            feed_forward=FeedForward(WIDTH, 12, dropout), dropout_prob=dropout), 2)
        self.generator = Generator(TOKENS, WIDTH)

    def forward(self, ids):
        mask = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()[..., None]
        x = self.encoder(self.embed(ids.t()), mask)
        return Model.loss(self.generator(x).transpose(0, 1), ids)


class Bert(nn.Module):
    """A masked language model, of which the layers are split"""

    def __init__(self, dropout=0.0):
        import transformers

        super().__init__()
        config = transformers.BertConfig(
            vocab_size=TOKENS, hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=12, max_position_embeddings=8, hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=0.0)
        self.model = transformers.BertForMaskedLM(config)
        self.layer_classes = (type(self.model.bert.encoder.layer[0]),)

    def forward(self, ids):
        return self.model(ids, labels=ids).loss


class Crossed(nn.Module):
    """A decoder with cross-attention, and vectors that it attends to"""

    def __init__(self, which):
        import transformers

        super().__init__()
        sizes = ({"n_positions": 16, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "attn_pdrop": 0.0,
                  "embd_pdrop": 0.0, "resid_pdrop": 0.0} if which == "GPT2" else
                 {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
                  "intermediate_size": 12, "max_position_embeddings": 8, "is_decoder": True,
                  "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0})
        config = getattr(transformers, f"{which}Config")(
            vocab_size=TOKENS, bos_token_id=0, eos_token_id=0, add_cross_attention=True, **sizes)
        self.seen = nn.Embedding(TOKENS, WIDTH)
        self.model = getattr(transformers, f"{which}LMHeadModel")(config)

    def forward(self, ids):
        return self.model(ids, labels=ids, encoder_hidden_states=self.seen(ids.flip(1))).loss


MODELS = {
    "gpt2, crossed": lambda: Crossed("GPT2"), "bert, crossed": lambda: Crossed("Bert"),
    "labml": labml_model, "gated": lambda: labml_model(gated=True), "dropout": with_dropout,
    "tied": tied, "bert": Bert,
    "encoder": lambda: Encoded(0.0), "encoder, dropout": Encoded,
    "bert, dropout": lambda: Bert(0.25),
    "gpt2, dropout": lambda: HuggingFace("GPT2", embd_pdrop=0.25, resid_pdrop=0.25),
    "gpt2": lambda: HuggingFace("GPT2"), "qwen2": lambda: HuggingFace("Qwen2"),
    "llama": lambda: HuggingFace("Llama", tie_word_embeddings=True)}
# Hugging Face computes the loss in fp32, and Llama's norms.
TOLERANCE = dict.fromkeys(
    ("gpt2", "gpt2, dropout", "gpt2, crossed", "qwen2", "llama", "bert", "bert, dropout",
     "bert, crossed"), 1e-5)


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


# ----------------------------------------------------------------------------------- without shards


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
    ("gpt2, crossed", ()), ("bert, crossed", ()),
    ("llama", ("cross_entropy", "rms_norm", "swiglu"))])
def test_two_ranks_train_the_weights_of_the_plain_model(which, more):
    """
    Weights and losses after three steps, and one more after `restore`, in fp64. A vocabulary of 13
    tokens on two ranks, tied embeddings, weights of three blocks and of two, convolutions that
    heads share, cross-attention, dropout with the masks of the plain model, biases; alone and with
    other policies. Each rank keeps little more than half of the weights.
    Proves I1, `tensor_parallel`, `Line`, `Line.prepare`, `Line.all_reduce`, `Line.all_gather`,
    `Line.twin`, `Pattern`, `Pattern.parts`, `Split`, `Split.forward`,
    `Weights`, `Weights.split`, `Weights.end`, `Weights._whole`, `Column`, `Row`,
    `VocabularyEmbedding`, `VocabularyHead`, `SharedConvolution`, `PartialDropout`, `Border`,
    `Border.enter`, `Border.leave`, `Border.states`, `Border.weight`, `Border.sizes`, `Swap`,
    `identity`, `Line.gather_parts`, `Line.padded`, `Line.sizes`, `_over_ranks`, `_attribute`.
    """
    for worst, share in run(split_alone, 2, which, more):
        assert worst < 1 and share < (0.8 if "bert" in which else 0.75), (worst, share)


def wrapped_head():
    """The loss of a model whose split head is a unit of its own, and the plain one."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    plain = make("llama")
    model = inject(copy.deepcopy(plain), [
        policies.tensor_parallel(mesh["tensor"]), policies.cross_entropy()])
    model = wrap(model, nn.Linear, mesh=mesh["shard"])
    # Tokens that the first rank has, which a loss over its part would take without an error.
    ids = ids_of(3) % (TOKENS // 2)
    return model(ids).item(), plain(ids).item()


def test_the_loss_in_chunks_takes_a_split_head_that_is_a_unit():
    """
    Breaks if it takes the logits of a part for those of all tokens.
    Proves `CrossEntropy.forward`.
    """
    for found, plain in run(wrapped_head, 2):
        assert abs(found - plain) < 1e-5


# --------------------------------------------------------------------------- some of the positions


def sequence_alone(which, more, length):
    """The same with a stream of which each rank has some of the positions."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    plain = make(which)
    model = copy.deepcopy(plain)
    classes = [type(module) for module in model.modules()]
    inject(model, [policies.tensor_parallel(mesh, sequence=True),
                   *(getattr(policies, name)() for name in more)])
    # A copy is as good as the original.
    model = copy.deepcopy(model)
    if which == "qwen2":
        model.model.gradient_checkpointing_enable()
    pair = [train(each, adam(each.parameters()), lambda step: ids_of(3, step)[:, :length])
            for each in (plain, model)]
    worst = max(abs(a - b) for a, b in zip(*pair, strict=True))
    restore(model)
    assert [type(module) for module in model.modules()] == classes
    assert not any("border" in vars(module) for module in model.modules())
    return max(worst, farthest(weights_of(plain), weights_of(model))) / TOLERANCE.get(which, 1e-10)


@pytest.mark.parametrize("which, more, length", [
    ("encoder, dropout", (), 6), ("encoder, dropout", (), 5), ("gpt2, dropout", (), 5),
    ("bert, dropout", (), 6),
    ("qwen2", (), 6), ("llama", ("cross_entropy", "rms_norm", "swiglu"), 5)])
def test_ranks_with_some_of_the_positions_train_the_weights_of_the_plain_model(which, more, length):
    """
    Losses and weights after three steps, with dropout in the stream and before it, norms in front
    of and behind the split layers, biases after the reduce-scatter, five positions on two ranks,
    and activations that are computed again in backward.
    Breaks if the gradients of norms or of these biases are not summed, or if a rank draws a mask
    for its own positions alone.
    Proves I1, `tensor_parallel`, `Stream`, `Stream.begin`, `Stream.along`, `Stream.prepare`,
    `Stream.inside`, `SequenceBorder`, `SequenceBorder.states`, `SequenceBorder.enter`,
    `SequenceBorder.leave`, `SequenceBorder.weight`, `SequenceBorder.sizes`, `SequenceBorder.own`,
    `SequenceBorder.gathered`, `SequenceBorder.summed`, `SequenceBorder.begin`,
    `SequenceBorder.end`, `InStream`, `StreamBegin`, `StreamEnd`, `SummedWeights`,
    `PartialDropout`, `PartialDropout.forward`, `exchanged`, `own_class`, `become`,
    `Line.reduce_scatter`.
    """
    for worst in run(sequence_alone, 2, which, more, length):
        assert worst < 1, worst


def activation_bytes(t, rows, length, stream_numel=0):
    """
    What each of `t` ranks sends of two layers, an embedding and a head in fp64, by the formulas.

    `stream_numel` are the weights of a stream that is split by positions.
    """
    all_reduce = 2 * (t - 1) * rows * length * WIDTH // t
    # Shorter parts are padded to the longest.
    half = (t - 1) * rows * -(-length // t) * WIDTH
    logits = (t - 1) * rows * length * -(-TOKENS // t)
    inside = 2 * half if stream_numel else all_reduce
    stream = 2 * half + 2 * (t - 1) * stream_numel // t if stream_numel else 0
    # The embedding and the head have whole sequences in any case.
    return 8 * (2 * 4 * inside + 2 * all_reduce + stream + logits)


def sequence_measured(length):
    """Bytes that a step sends and keeps, whole and by positions, beside the formulas."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=NAMES)
    t = mesh["tensor"].size()
    ids = ids_of(3)[:, :length]
    found = []
    for sequence in (False, True):
        torch.manual_seed(0)
        model = inject(Encoded(0.0).double(), [
            policies.tensor_parallel(mesh["tensor"], sequence=sequence)])
        kept_bytes, _ = kept(model, ids)
        model = wrap(model, model.layer_classes, mesh=mesh["shard"])
        with Ledger(model) as tape:
            model(ids).backward()
        sent = sum(event.sent_bytes for event in tape.events if event.layer == "tensor ranks")
        found.append((sent, kept_bytes))
    whole, split = found
    # Two norms, and biases behind the two split parts, of each layer; and the final norm.
    stream_numel = 2 * (4 + 2) * WIDTH + 2 * WIDTH
    more = [activation_bytes(t, *ids.shape, numel) for numel in (0, stream_numel)]
    # Each norm keeps its input, a mean and a deviation.
    fewer = 8 * 5 * 3 * (length - (length * (dist.get_rank() + 1) // t
                                   - length * dist.get_rank() // t)) * (WIDTH + 2)
    return [whole[0], split[0], whole[1] - split[1]], [*more, fewer]


@pytest.mark.parametrize("length", [6, 5])
def test_a_sequence_in_parts_sends_and_keeps_what_the_formulas_say(length):
    """
    An all-reduce is a reduce-scatter and an all-gather, so only the ends of the stream and the
    gradients of its weights are new. Norms keep this rank's positions. Five positions are padded to
    six while they travel.
    Breaks if a collective is sent twice, or a norm keeps all positions.
    Proves I4, `Line.reduce_scatter`, `SequenceBorder.gathered`, `SequenceBorder.summed`.
    """
    for found, expected in run(sequence_measured, 2, length):
        assert found == expected


def test_a_sequence_of_another_length_is_an_error():
    """
    A block that is computed again in backward, after a pass of another length, would gather the
    wrong positions.
    Proves `SequenceBorder.gathered`.
    """
    border = SequenceBorder(Line(Group((0,), 0)), 1)
    border.length = 4
    assert border.gathered(4, torch.ones(2, 4, 3)).shape == (2, 4, 3)
    with pytest.raises(RuntimeError, match=r"4 of 4 positions.*3 positions.*another length"):
        border.enter(torch.ones(2, 3, 3))


def two_lengths():
    """Two forward passes, one backward pass, and how far the weights are from those of the plain"""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tensor",))
    plain = make("llama")
    model = inject(copy.deepcopy(plain), [policies.tensor_parallel(mesh, sequence=True)])
    for each in (plain, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        sum(each(ids_of(3)[:, :length]) for length in (6, 4)).backward()
        optimizer.step()
    restore(model)
    return farthest(weights_of(plain), weights_of(model))


def test_passes_of_two_lengths_go_backward_together():
    """
    As those of a chosen answer and a rejected one do. Breaks if backward asks how long the last
    forward pass was.
    Proves `SequenceBorder.own`, `SequenceBorder.summed`, `SequenceBorder.gathered`.
    """
    assert max(run(two_lengths, 2)) < 1e-10


# -------------------------------------------------------------------------------------- with shards


def rows_of(mesh, step):
    """The global batch, and the rows of this rank: the same on all tensor ranks."""
    count, place = mesh["shard"].size(), mesh["shard"].get_local_rank()
    ids = ids_of(2 * count, step)
    return ids, ids[2 * place : 2 * place + 2]


def build_split(which, mesh, chain=False, seed=0):
    sequence = which == "encoder"
    model = inject(make(which, seed), [
        policies.tensor_parallel(mesh["tensor"], sequence=sequence)])
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
            for shard in model.get_trainable_chunk():
                shard.detach().zero_()
            zero3.load(folder, model, optimizer)
    zero3.save(folder, model, optimizer, step=4)
    if chain:
        worst.append(farthest(parts_of(plain, model), full(model)))
    else:
        worst.append(farthest(weights_of(plain), weights_of(restore(model.destroy()))))
    return max(worst) / TOLERANCE.get(which, 1e-10), weights_of(plain)


def full(model, shaped=False):
    with model.full_params() as params:
        found = {name: p.detach().clone() for name, p in params.items()}
    return found if shaped else {name: p.flatten() for name, p in found.items()}


def parts_of(plain, model):
    """What this rank of a chain should have of each weight."""
    found = {}
    for name, p in plain.layers.named_parameters():
        i, _, rest = name.partition(".")
        part = part_of(model.module_list[int(i)].module, rest)
        found[name] = part.take(p.detach()) if part else p.detach().flatten()
    return found


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
    ("encoder", True, False), ("tied", True, False), ("labml", False, True),
    ("gpt2", True, False)])
def test_split_layers_are_sharded_again(which, ours, chain, tmp_path):
    """
    Tensor 2 x shard 2: losses, clipped norms, and weights after four steps, with a checkpoint and a
    load in between; by `wrap` and as a chain, by our optimizer and torch's; one of them with some
    of the positions on each rank. The checkpoint loads at tensor 1 x shard 1, x shard 3, and at
    tensor 2 without shards, with the plain names and shapes.
    Proves I1, `Zero3Optimizer._squares`, `connect`, `parts._counted`, `part_of`, `Portion.norms`,
    `clip_grad_norm_`, `save_load.save`, `load`, `CheckpointReader._read_into`, `Param.part`,
    `Param.shape`, `Line.connect`.
    """
    folder = str(tmp_path)
    (worst, expected), *others = run(split_and_sharded, 4, which, (2, 2), folder, ours, chain)
    assert max(worst, *(each for each, _ in others)) < 1
    if chain:
        return
    # In plain PyTorch, from a file of safetensors. It has a tied weight once, and buffers.
    export(newest(folder), tmp_path / "out")
    plain = load_file(tmp_path / "out" / "model.safetensors")
    plain = {name: plain[name] for name in expected}
    assert farthest(plain, expected) < TOLERANCE.get(which, 1e-10)
    for shape in ((1, 1), (1, 3), (2, 1)):
        for found in run(loaded, shape[0] * shape[1], which, shape, folder):
            assert farthest(found, expected) < TOLERANCE.get(which, 1e-10)


def numbers_after(folder):
    """Random numbers and weights of tensor ranks, after checkpoints of shards and of a pipeline."""
    found = []
    for kind in ("shards", "pipeline"):
        layers = [*with_dropout().layers]
        lines = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shard"))
        torch.manual_seed(dist.get_rank())
        zero3.save(f"{folder}/{kind}", Pipeline(layers, lines, loss_fn=Model.loss)
                   if kind == "pipeline" else Zero3Sequential([*map(Zero3Layer, layers)]), step=0)
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
        model = build_split("dropout", mesh, chain=True)
        zero3.load(f"{folder}/{kind}", model)
        drawn = torch.rand(2).tolist()
        optimizer = adam(model.get_trainable_chunk())
        # Raises an error if random numbers differ: this is the first forward pass.
        loss_of(model, ids_of(2, 0)).backward()
        optimizer.step()
        whole = {name: p.tolist() for name, p in full(model).items() if "norm" in name}
        found.append((drawn, whole))
    return found


def test_tensor_ranks_draw_the_same_numbers_after_a_load_of_another_layout(tmp_path):
    """
    From two shards and from two stages: the same random numbers, and after a step with dropout the
    same whole weights. Breaks where each rank gets a seed of its own, or the numbers of a stage.
    Proves `_random_states_of`, `load`.
    """
    one, other = run(numbers_after, 2, str(tmp_path))
    assert one == other and all(len(whole) > 1 for _, whole in one)


def measured(shape):
    """Bytes that a chain keeps, and that its step sends, beside the formulas of sizes alone."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    t, n = shape
    layers = [Masked(TransformerLayer(
        d_model=WIDTH, self_attn=MultiHeadAttention(2, WIDTH, 0.0),
        feed_forward=FeedForward(WIDTH, 12, 0.0, nn.SiLU(), True),
        dropout_prob=0.0)) for _ in range(2)]
    first, _, last = gpt_layers(GPTConfig(TOKENS, LENGTH, WIDTH, 2, 1, 12))
    model = inject(Model([first, *layers, last]).double(), [
        policies.tensor_parallel(mesh["tensor"])])
    model = Zero3Sequential([Zero3Layer(layer, mesh=mesh["shard"]) for layer in model.layers])
    optimizer = Zero3Optimizer(model, torch.optim.AdamW, lr=1e-2)
    _, ids = rows_of(mesh, 0)
    for _ in range(2):
        with Ledger(model, optimizer) as tape:
            loss_of(model, ids).backward()
            optimizer.step()
            optimizer.zero_grad()
    sent = sum(event.sent_bytes for event in tape.events if event.layer == "tensor ranks")
    activations = activation_bytes(t, *ids.shape)
    place = mesh["tensor"].get_local_rank()
    tokens = TOKENS * (place + 1) // t - TOKENS * place // t
    # Attention has four matrices, and a network with a gate three. Norms are whole, and so are the
    # biases that are added after a sum.
    split = 4 * WIDTH**2 + 3 * WIDTH * 12 + 3 * WIDTH + 2 * 12
    numels = [(tokens + LENGTH) * WIDTH, *[split // t + 6 * WIDTH] * 2,
              2 * WIDTH + tokens * (WIDTH + 1)]
    found = predict([LayerSpec((Part(numel, 8, True),)) for numel in numels], n, stage3=True)
    shards = sum(shard.nbytes for shard in model.get_trainable_chunk())
    if t > 1:
        # It knows nothing of the activations that they exchange.
        with pytest.raises(RuntimeError, match=r"cannot predict.*split parameters"):
            predict_optimizer(optimizer)
    # The norm over tensor ranks is 8 bytes more.
    return ((sent, tape.sent_bytes - sent, shards),
            (activations, found.sent_bytes + 8 * (t - 1), found.param_bytes))


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (1, 2)])
def test_a_step_sends_and_keeps_what_the_formulas_say(shape):
    """
    Activations by the formula, and weights, gradients and norms as `predict` says for what a rank
    has, of the sizes alone: 13 tokens on two ranks are six and seven.
    Breaks if a sum is sent twice, or a part has another size.
    Proves I4, `predict_optimizer`, `Line.all_reduce`, `Line.all_gather`, `connect`.
    """
    for measured_bytes, estimated in run(measured, shape[0] * shape[1], shape):
        assert measured_bytes == estimated


def generated(which, shape):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    prompt = ids_of(2)[:, :3]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "input_ids": prompt,
               "attention_mask": torch.ones_like(prompt)}
    plain = make(which)
    expected = plain.model.generate(**options)
    found = []
    for sequence in (False, True):
        model = inject(make(which).model, [
            policies.tensor_parallel(mesh["tensor"], sequence=sequence)])
        found.append(wrap(model, plain.layer_classes, mesh=mesh["shard"]).generate(**options))
    return all(torch.equal(tokens, expected) for tokens in found)


@pytest.mark.parametrize("which", ["gpt2", "llama"])
def test_split_models_generate_the_tokens_of_the_plain_one(which):
    """
    With their caches of keys and values, each rank for its heads, at tensor 2 x shard 2. Split by
    positions, a rank has none of a single new token.
    Proves `tensor_parallel`, `Zero3Model.generate`.
    """
    assert all(run(generated, 4, which, (2, 2)))


def made(which, shape, folder):
    """Whether a split model from the meta device gets the values of a plain one, drawn and read."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    found = []
    for split in (False, True):
        for checkpoint in (None, folder):
            with torch.device("meta"):
                model = MODELS[which]()
            if split:
                inject(model, [policies.tensor_parallel(mesh["tensor"])])
            model = wrap(model, model.layer_classes, mesh=mesh["shard"], seed=3, device="cpu",
                         init=draw, checkpoint=checkpoint)
            if not split and checkpoint is None and dist.get_rank() == 0:
                save_file(full(model, shaped=True), f"{folder}/model.safetensors")
            dist.barrier()
            found.append(weights_of(restore(model.destroy())))
    return [all(torch.equal(found[0][name], p) for name, p in each.items()) for each in found]


def draw(module):
    for p in module._parameters.values():
        if p is not None:
            nn.init.normal_(p, std=0.1)


@pytest.mark.parametrize("which", ["labml", "tied"])
def test_split_models_from_the_meta_device_get_the_values_of_the_plain_one(which, tmp_path):
    """
    Drawn by name, and read from a file of safetensors: the parts have the bits of the plain model,
    and ranks have different parts. Proves `whole_values`, `Source._draw`, `Source._read`.
    """
    for found in run(made, 2, which, (2, 1), str(tmp_path)):
        assert all(found), found


def test_the_benchmark_splits_all_peers_alike():
    """
    The losses of ours, whole, by positions and with other policies, are those of torch's own split.
    It says nothing of speed here.
    Breaks if a peer is split or trained in another way than its name says.
    Proves `tensor_parallel`.
    """
    sizes = argparse.Namespace(steps=1, layers=1, width=16, batch=2, length=8, vocabulary=32)
    measured = run(bench_tensor.measure, 2, sizes, fresh=True)[0]
    rows = {name: bench_tensor.row_of(name, *measured, 16) for name in measured[0]}
    assert [*rows] == ["torch", "zero3", "zero3, by positions", "zero3, with policies"]
    assert all(row["tokens_per_s"] > 0 and row["peak_bytes"] > 0 for row in rows.values())
    assert rows["torch"]["ratio"] == [1, 1, 1]


# -------------------------------------------------------------------------------- what does not fit


def one_head():
    return MultiHeadAttention(1, WIDTH, 0.0)


def llama_with_dropout():
    return HuggingFace("Llama", attention_dropout=0.1)


class Adapted(nn.Linear):
    def forward(self, x):
        return super().forward(x) + x


def adapted():
    model = FeedForward(WIDTH, WIDTH, 0.0)
    model.layer2 = Adapted(WIDTH, WIDTH)
    return model


def tied_to_a_whole_layer():
    model = nn.ModuleList([labml_model(), nn.Linear(WIDTH, 12)])
    model[1].weight = model[0].layers[1].layer.feed_forward.layer1.weight
    return model


def other_on_each_rank():
    return FeedForward(WIDTH, 12 + 2 * dist.get_rank(), 0.0)


def injected_before():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return inject(FeedForward(WIDTH, 12, 0.0), [policies.tensor_parallel(mesh)])


def other_conv1d():
    model = HuggingFace("GPT2")
    plain = model.model.transformer.h[0].mlp
    kind = type(plain.c_fc)
    plain.c_fc.__class__ = type("Scaled", (kind,), {"forward": lambda self, x: 2 * x})
    return model


def one_token():
    return EmbeddingsWithPositionalEncoding(WIDTH, 1)


def compressed_elsewhere():
    model = nn.ModuleList([FeedForward(WIDTH, 12, 0.0), nn.Linear(WIDTH, 12)])
    compress(model, {"1": [Quantize(of="input")]})
    return model


def other_sequences():
    model = Encoded()
    model.encoder.layers[1].src_attn = MultiHeadAttention(2, WIDTH, 0.0)
    return model


def repeated():
    model = Encoded()
    model.encoder.layers[1] = model.encoder.layers[0]
    return model


def across_positions():
    model = Encoded()
    model.encoder.layers[1].norm_ff = nn.Conv1d(WIDTH, WIDTH, 1)
    return model


UNFIT = {
    "adapted": "its Adapted has a `forward` of its own",
    "one_token": "its Embedding has 1 features, for 2 ranks",
    "compressed_elsewhere": "layers that `compress` has changed",
    "other_conv1d": "its Scaled has a `forward` of its own",
    "one_head": "query.heads` is 1, for 2 ranks", "llama_with_dropout": "another mask",
    "other_on_each_rank": "the same `1.layer1.weight` on all ranks",
    "tied_to_a_whole_layer": "`1.1.weight`, which is tied", "injected_before": "replaced already"}
UNFIT_SEQUENCES = {
    "labml_model": "a model with a known stream", "other_sequences": "has a `src_attn`",
    "across_positions": "its Conv1d may need all positions",
    "repeated": "a TransformerLayer that it uses several times"}


def refused():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    said = {}
    for name in (*UNFIT, *UNFIT_SEQUENCES):
        model = nn.ModuleList([FeedForward(WIDTH, 12, 0.0), globals()[name]()])
        classes = [type(module) for module in model.modules()]
        shapes = [p.shape for p in model.parameters()]
        with pytest.raises(ValueError) as error:
            inject(model, [policies.tensor_parallel(mesh, sequence=name in UNFIT_SEQUENCES)],
                   strict=False)
        assert [type(module) for module in model.modules()] == classes
        assert [p.shape for p in model.parameters()] == shapes
        said[name] = str(error.value)
    return said


def test_a_model_that_cannot_be_split_is_refused_and_stays_as_it_was():
    """
    Also with `strict=False`: a model of which half is split computes something else. Layers with
    another forward, heads and weights that cannot be divided, modules of a stream that may need all
    positions, and compressed layers that stay whole.
    Proves `tensor_parallel`, `Line.prepare`, `_check_ties`, `Stream.problems`, `Split.problem`,
    `Weights.unfit`.
    """
    for said in run(refused, 2):
        for name, text in (UNFIT | UNFIT_SEQUENCES).items():
            assert text in said[name], (name, said[name])
    with pytest.raises(TypeError, match=r"mesh. Expected: a `torch.*DeviceMesh`. Got: \[0, 1\]"):
        policies.tensor_parallel([0, 1])


def networks(mesh):
    """Two networks whose parts have the same shapes on all ranks."""
    model = nn.Sequential(FeedForward(WIDTH, 12, 0.0), FeedForward(WIDTH, 12, 0.0))
    return inject(model, [policies.tensor_parallel(mesh["tensor"])])


def after_the_split():
    """What is refused later: other inputs or random numbers, another policy, unknown tokens."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    said = []
    policy = policies.tensor_parallel(mesh["tensor"])
    # A model that is in order, beside others with the same policy.
    fine = inject(labml_model(), [policy])
    for does in ("inputs", "random numbers", "policy", "tokens", "layer", "wrap", "save",
                 "pipeline"):
        model = inject(labml_model(), [policy])
        fine(ids_of(2, 0))
        ids = ids_of(2, dist.get_rank() if does == "inputs" else 0)
        torch.manual_seed(dist.get_rank() if does == "random numbers" else 0)
        with pytest.raises((ValueError, IndexError, RuntimeError)) as error:
            if does == "policy":
                inject(model, [policies.attention()])
            elif does == "layer":
                Zero3Optimizer(Zero3Layer(model.layers[0], mesh=mesh["shard"]))
            elif does == "wrap":
                wrap(networks(mesh), FeedForward)
            elif does == "save":
                wrap(model, model.layer_classes, mesh=mesh["shard"]).save("nowhere")
            elif does == "pipeline":
                lines = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shard"))
                pipeline = Pipeline([*networks(mesh)], lines, loss_fn=Model.loss)
                Zero3Optimizer(pipeline)
            else:
                model(ids + TOKENS * (does == "tokens"))
        said.append(str(error.value))
    return said


def test_ranks_with_other_inputs_and_late_changes_are_refused():
    """
    The first forward pass of each model compares inputs and random numbers, because ranks with
    other ones would add up results that have nothing to do with each other.
    Proves `Line.compare_once`, `Line.prepare`, `connect`, `Zero3Model.save`, `VocabularyEmbedding`.
    """
    for said in run(after_the_split, 2):
        expected = ("the same inputs", "the same random numbers",
                    "inject both policies in one call", "tokens from 0 to 12",
                    "put it in a chain", "ranks [0, 1] in both meshes", "parts of them",
                    "stages of a pipeline")
        for text, part in zip(said, expected, strict=True):
            assert part in text, text


def by_parts():
    """What torch's clipping says, and the step after it, without shards, and with one for all."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    said = []
    for kind in ("alone", "wrap", "chain"):
        # A plain model that is alive beside the chain of its layers.
        model = plain = networks(mesh)
        if kind == "wrap":
            model = wrap(plain, FeedForward, mesh=mesh["shard"])
        elif kind == "chain":
            model = Zero3Sequential([Zero3Layer(each, mesh=mesh["shard"]) for each in plain])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(0))
        for clips in (False, True):
            model(x).square().sum().backward()
            if not clips:
                optimizer.step()
                optimizer.zero_grad()
                continue
            with pytest.raises(RuntimeError) as error:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
        said.append(str(error.value))
    # An overflow in the part of one rank.
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model.zero_grad()
    scaler.scale(model(x).sum()).backward()
    shards = model.get_trainable_chunk()
    before = [shard.detach().clone() for shard in shards]
    shards[0].grad[0] = float("inf") if dist.get_rank() == 0 else 1.0
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(*pair) for pair in zip(before, shards, strict=True))
    return [*said, scaler.get_scale()]


def test_gradients_of_split_weights_are_not_clipped_by_the_norm_of_a_part():
    """
    Each rank would clip by another factor, and weights that all ranks have would drift apart. So a
    step compares the gradients of such weights. With ZeRO-3 on one rank beside the split, torch's
    norm is of a part, too, in a chain that no optimizer of ours knows. An overflow in one rank's
    part is one for all.
    Breaks if a rank steps with gradients that the others do not have.
    Proves `_compare_gradients`, `ShardGradient`, `_agree_on_overflow`, `connect`.
    """
    for alone, *sharded, scale in run(by_parts, 2):
        assert "ranks (0, 1) all have" in alone and "`Zero3Optimizer(clip_grad_norm=)`" in alone
        for text in sharded:
            assert "the part that this rank has" in text and "model.clip_grad_norm_" in text
        assert scale == 2.0


def of_two_chains():
    """Norms of two chains with a layer in common, and those of plain models."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    torch.manual_seed(0)
    plain = [FeedForward(WIDTH, 12, 0.0) for _ in range(2)]
    layers = [Zero3Layer(inject(copy.deepcopy(each), [policies.tensor_parallel(mesh["tensor"])]),
                         mesh=mesh["shard"]) for each in plain]
    # A layer without parameters knows of no other parts.
    chains = [Zero3Sequential([Zero3Layer(nn.Identity(), mesh=mesh["shard"]), *layers[:count]])
              for count in (1, 2)]
    norms = []
    for count, chain in enumerate(chains, 1):
        other = nn.Sequential(*plain[:count])
        for each in (chain, other):
            each.zero_grad()
            each(torch.ones(3, WIDTH)).square().sum().backward()
        norms.append((float(chain.clip_grad_norm_(1.0)),
                      float(nn.utils.clip_grad_norm_(other.parameters(), 1.0))))
    return norms


def test_two_chains_of_split_layers_have_the_norms_of_plain_models():
    """
    Each layer has a policy of its own, and one is in both chains. Breaks if the second chain counts
    a bias that all ranks have once for each of them.
    Proves `connect`, `parts._counted`.
    """
    for norms in run(of_two_chains, 2):
        assert all(found == pytest.approx(plain) for found, plain in norms), norms


class Pair(nn.Module):
    """Adds up two tensors of one argument"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, pair):
        return self.linear(pair[0] + pair[1])


def in_a_tuple():
    mesh = init_device_mesh("cpu", (1,))
    model = inject(Pair(), [policies.tensor_parallel(mesh, {Pair: Pattern(columns=("linear",))})])
    x = torch.ones(2, 4)
    assert model((x, x)).shape == (2, 4)
    with pytest.raises(ValueError) as error:
        model((x, x.clone().requires_grad_()))
    return str(error.value)


def test_a_tensor_with_a_gradient_inside_a_tuple_is_refused():
    """
    Nobody would add up its gradient, and weights before the module would drift apart. One without a
    gradient may be there.
    Proves `Split.forward`.
    """
    assert "some inside a tuple or a list" in run(in_a_tuple, 1)[0]


class Looks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(6, 4)

    def forward(self, ids):
        return self.table(ids)


def infinite():
    """A loss and a row, if the first number of rank 1's part is infinite"""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    hidden, weight, targets = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 1, 5])
    bias = torch.zeros(6)
    bias[3] = -torch.inf
    plain = F.cross_entropy(F.linear(hidden, weight, bias), targets)
    (group,) = groups_of(mesh)
    mine = slice(3 * group.rank, 3 * group.rank + 3)
    split = chunked_cross_entropy(hidden, weight[mine], targets, bias[mine], split=Line(group),
                                  own=WeightPart.of((6, 4), 0, group.rank, 2))
    model = Looks()
    with torch.no_grad():
        model.table.weight[3] = torch.inf
    row = model.table.weight[1].clone()
    inject(model, [policies.tensor_parallel(mesh, {Looks: Pattern(embeddings=("table",))})])
    return (plain - split).abs().item(), torch.equal(model(torch.tensor([1]))[0], row)


def test_an_infinite_number_of_one_part_stays_there():
    """
    A rank looks at its own first token in the place of those that others have. Breaks where it
    multiplies what it finds by zero.
    Proves `_Chunked`, `VocabularyEmbedding.forward`, `Line.__init__`.
    """
    for difference, is_equal in run(infinite, 2):
        assert difference < 1e-6 and is_equal


# -------------------------------------------------------------------------------------------- parts


def test_a_part_is_taken_read_and_put_back():
    """
    The four weights of the head of `parts.py`, and every range of a part read from the whole.
    Proves `WeightPart`, `WeightPart.of`, `WeightPart.take`, `WeightPart.holds`,
    `WeightPart.before`, `WeightPart.read`.
    """
    whole = torch.arange(8).view(2, 4)
    taken = [[WeightPart.of((2, 4), dim, place, 2, blocks).take(whole).tolist() for place in (0, 1)]
             for dim, blocks in ((0, 1), (1, 1), (1, 2))]
    assert taken == [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 4, 5], [2, 3, 6, 7]],
                     [[0, 2, 4, 6], [1, 3, 5, 7]]]
    whole = torch.arange(5 * 6 * 2).view(5, 6, 2)
    for dim, count, blocks in ((0, 2, 1), (0, 5, 1), (1, 4, 1), (1, 2, 3), (2, 2, 1), (1, 3, 2)):
        found = torch.zeros_like(whole)
        for place in range(count):
            part = WeightPart.of(whole.shape, dim, place, count, blocks)
            values = part.take(whole)
            held = part.holds(torch.arange(whole.numel()))
            found.view(-1)[held] = values
            assert [part.before(i) for i in range(len(held) + 1)] == [
                int(held[:i].sum()) for i in range(len(held) + 1)]
            for begin in range(len(values)):
                for end in range(begin + 1, len(values) + 1):
                    read = part.read(begin, end, lambda i, j: whole.flatten()[i:j])
                    assert torch.equal(read, values[begin:end])
        assert torch.equal(found, whole)


def test_a_checkpoint_with_parts_that_do_not_add_up_is_refused():
    """
    A part is missing, or two have the same place.
    Proves `merge_parts`.
    """
    def param(place):
        part = asdict(WeightPart.of((2, 4), 0, place, 2))
        return Param(place, {"names": ["w"], "shape": [1, 4], "offset": 0, "part": part}, {})

    assert [p.shape for p in merge_parts([param(0), param(1)])] == [(2, 4)]
    for places in ((0,), (1,), (0, 0), (1, 0)):
        with pytest.raises(ValueError, match="parts of `w` do not add up"):
            merge_parts([param(place) for place in places])

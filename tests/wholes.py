"""
# Whole models, and the plain PyTorch that says what is right

Each is a model as somebody would write it, with any control flow, and what to pass to `wrap`.
`train_both` trains it plain, on the global batch, and wrapped, on this rank's rows.
"""

import copy

import torch
import torch.distributed as dist
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.mha import MultiHeadAttention
from labml_nn.transformers.models import TransformerLayer
from labml_nn.transformers.vit import (
    ClassificationHead,
    LearnedPositionalEmbeddings,
    PatchEmbeddings,
    VisionTransformer,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from zero3 import wrap
from zero3.train import gpt

# labml_nn's attention runs with what that module gives to labml.
assert gpt.tracker.debug

WIDTH, TOKENS = 6, 13  # features, and how many kinds of tokens there are
ROWS, LENGTH = 2, 5  # sequences of each rank, and tokens of a sequence


class Layer(nn.Module):
    def __init__(self, width=WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 11), nn.Linear(11, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Whole(nn.Module):
    """
    ## A model, its units and its loss
    """

    layers: tuple = (Layer,)
    options: dict = {}
    weight_decay = 0.1

    def loss(self, out):
        return out.square().mean()


class Plain(Whole):
    """Embedding, layers in a list and a head, of which the layers are units"""

    def __init__(self, depth=4):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.layers_ = nn.ModuleList(Layer() for _ in range(depth))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers_:
            x = layer(x)
        return self.head(x)


class Tied(Plain):
    """The embedding is the head, and both are at the root"""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight


class TiedBetweenUnits(Tied):
    """The embedding is the head, and each is a unit"""

    layers = (Layer, nn.Embedding, nn.Linear)


class TiedToTheRoot(Tied):
    """The head is a unit, and its weight the root's"""

    layers = (Layer, nn.Linear)


class External(Plain):
    """The root uses the weight of a unit, which is nobody's child but its own"""

    layers = (Layer, nn.Embedding)

    def __init__(self):
        super().__init__()
        self.head = nn.LayerNorm(WIDTH)

    def forward(self, ids):
        return F.linear(super().forward(ids), self.embed.weight)


class Reads(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        # In a list, or it would be a submodule.
        self.other = [other]

    def forward(self, x):
        return self.linear(x) @ self.other[0].up.weight.t() @ self.other[0].up.weight


class ExternalSiblings(Whole):
    """Units use the weights of units before and after them, of which one is frozen"""

    layers = (Layer, Reads)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.one, self.two = Layer(), Layer().requires_grad_(False)
        self.reads = nn.ModuleList([Reads(self.one), Reads(self.two), Reads(self.two)])

    def forward(self, ids):
        x = self.embed(ids)
        x = self.reads[0](self.one(x))
        return self.reads[2](self.two(self.reads[1](x)))


class EncoderDecoder(Whole):
    """Every decoder layer takes the encoder's output"""

    layers = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)

    def __init__(self):
        super().__init__()
        options = dict(d_model=8, nhead=2, dim_feedforward=9, dropout=0.0, batch_first=True)
        self.embed = nn.Embedding(TOKENS, 8)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(**options), 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**options), 3)
        self.head = nn.Linear(8, TOKENS)

    def forward(self, ids):
        x = self.embed(ids)
        return self.head(self.decoder(x.flip(1), self.encoder(x)))


class Branches(Whole):
    """Two branches, a layer called twice at once and one that is called again much later"""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.a, self.b, self.c, self.d, self.e = (Layer() for _ in range(5))
        self.join = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, ids):
        x = self.a(self.embed(ids))
        left, right = self.b(self.b(x)), self.d(self.c(x))
        return self.a(self.e(self.join(torch.cat([left, right], -1))))


class Experts(nn.Module):
    """Each token goes to one of three experts; rank 0 never needs the last one"""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        weights, chosen = self.router(x).softmax(-1).max(-1)
        out = x.clone()
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero(as_tuple=True)
            if len(rows[0]):
                out[rows] = out[rows] + expert(x[rows]) * weights[rows].unsqueeze(-1)
        return out


class Blocks(Whole):
    """An embedding, and blocks that follow each other"""

    def __init__(self, *blocks):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(TOKENS, WIDTH), nn.ModuleList(blocks)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


class Mixture(Blocks):
    """Which experts compute depends on the rank's tokens"""

    layers = (Layer,)
    options = {"leaf_classes": Experts}

    def __init__(self):
        super().__init__(Layer(), Experts(), Layer(), Experts())


class MixtureFirst(Mixture):
    """The experts' input needs no gradient, so that nothing says when they are done"""

    def __init__(self):
        super().__init__()
        self.embed.requires_grad_(False)
        self.blocks = nn.ModuleList([Experts(), Layer()])


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = Layer().requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Adapters(Whole):
    """Frozen and trainable parameters in each unit, and a frozen one between them at the root"""

    layers = (Adapter,)

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH).requires_grad_(False)
        self.one, self.two, self.three = Adapter(), Adapter(), Adapter()
        self.between = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, ids):
        x = self.two(self.one(self.embed(ids)))
        return self.head(self.three(torch.tanh(self.between(x))))


class Nested(Blocks):
    """Units inside of units, inside of the root"""

    layers = (Layer, Adapter)

    def __init__(self):
        super().__init__(Adapter(), Adapter(), Adapter())
        for p in self.blocks[1].parameters():
            p.requires_grad_(True)


class Recomputed(Plain):
    """Activation checkpointing around each layer"""

    reentrant = False

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers_:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class RecomputedReentrant(Recomputed):
    """The same with the older kind"""

    reentrant = True


class RecomputedTwice(RecomputedReentrant):
    """A layer whose gradients come in two parts, each by a backward inside of backward"""

    def forward(self, ids):
        x = self.embed(ids)
        for layer in (self.layers_[0], *self.layers_, self.layers_[3]):
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


class RecomputedInOne(Plain):
    """Activation checkpointing around all layers at once"""

    def forward(self, ids):
        def run(x):
            for layer in self.layers_:
                x = layer(x)
            return x

        return self.head(checkpoint(run, self.embed(ids), use_reentrant=False))


class Projects(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(torch.ones(TOKENS))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x):
        return x.detach() @ self.frozen(self.weight).t() + self.bias


class FrozenBetween(Whole):
    """A frozen layer between a unit's output and the weight that it shares with another"""

    layers = (Layer, nn.Embedding, Projects)

    def __init__(self):
        super().__init__()
        self.embed, self.layer = nn.Embedding(TOKENS, WIDTH), Layer()
        self.head = Projects(self.embed.weight)

    def forward(self, ids):
        x = self.layer(self.embed(ids))
        return self.head(x) + x.mean(-1, keepdim=True)


class Around(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.norm(x))


class SharedModules(Whole):
    """A module inside of two units and at the root, and a unit under two names"""

    layers = (Layer, Around)

    def __init__(self):
        super().__init__()
        self.embed, self.norm, other = nn.Embedding(TOKENS, WIDTH), nn.LayerNorm(WIDTH), Layer()
        self.a, self.b, self.c, self.d = Around(self.norm), other, Around(self.norm), other

    def forward(self, ids):
        return self.norm(self.d(self.c(self.b(self.a(self.embed(ids))))))


class NoRest(Whole):
    """Nothing is left over at the root"""

    layers = (nn.Embedding, Layer)

    def __init__(self):
        super().__init__()
        self.embed, self.one, self.two = nn.Embedding(TOKENS, WIDTH), Layer(), Layer()

    def forward(self, ids):
        return self.two(self.one(self.embed(ids)))


class Vision(Whole):
    """labml_nn's vision transformer"""

    def __init__(self):
        super().__init__()
        self.layers = (TransformerLayer,)
        layer = TransformerLayer(d_model=8, self_attn=MultiHeadAttention(2, 8, 0.0),
                                 feed_forward=FeedForward(8, 9, 0.0), dropout_prob=0.0)
        self.vit = VisionTransformer(layer, 3, PatchEmbeddings(8, 2, 1),
                                     LearnedPositionalEmbeddings(8, 40),
                                     ClassificationHead(8, 9, 4))

    def forward(self, ids):
        pictures = torch.stack([F.one_hot(row, 16).double() for row in ids[:, :4]])[:, None]
        return self.vit(pictures)


class HuggingFace(Whole):
    """A language model of Hugging Face's, from a configuration"""

    def __init__(self, which):
        # A test extra, and seconds to import.
        import transformers

        super().__init__()
        if which == "gpt2":
            from transformers.models.gpt2.modeling_gpt2 import GPT2Block as Block

            config = transformers.GPT2Config(
                vocab_size=TOKENS, n_positions=32, n_embd=8, n_layer=3, n_head=2, attn_pdrop=0.0,
                embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0)
            self.model = transformers.GPT2LMHeadModel(config)
        elif which == "t5":
            from transformers.models.t5.modeling_t5 import T5Block as Block

            config = transformers.T5Config(
                vocab_size=TOKENS, d_model=8, d_kv=4, d_ff=9, num_layers=2, num_heads=2,
                dropout_rate=0.0, decoder_start_token_id=0)
            self.model = transformers.T5ForConditionalGeneration(config)
        else:
            from transformers.models.llama.modeling_llama import LlamaDecoderLayer as Block

            config = transformers.LlamaConfig(
                vocab_size=TOKENS, hidden_size=8, intermediate_size=9, num_hidden_layers=3,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
                bos_token_id=0, eos_token_id=0, tie_word_embeddings=False)
            self.model = transformers.LlamaForCausalLM(config)
        self.layers = (Block,)

    def forward(self, ids):
        return self.model(ids, labels=ids).loss

    def loss(self, out):
        return out


class GPT2(HuggingFace):
    def __init__(self):
        super().__init__("gpt2")


class Llama(HuggingFace):
    def __init__(self):
        super().__init__("llama")


class T5(HuggingFace):
    def __init__(self):
        super().__init__("t5")


WHOLES = {cls.__name__: cls for cls in (
    Plain, Tied, TiedBetweenUnits, TiedToTheRoot, External, ExternalSiblings, EncoderDecoder,
    Branches, Mixture, MixtureFirst, Adapters, Nested, Recomputed, RecomputedReentrant,
    RecomputedTwice, RecomputedInOne, FrozenBetween, SharedModules, NoRest, Vision, GPT2, Llama,
    T5)}


def tokens(step, rows):
    """
    ## The global batch: `(rows, LENGTH)` int64
    """
    return torch.randint(TOKENS, (rows, LENGTH), generator=torch.Generator().manual_seed(step))


def build(name, **options):
    """
    ## The plain model and the wrapped one, in double precision
    """
    torch.manual_seed(0)
    plain = WHOLES[name]().double()
    wrapped = copy.deepcopy(plain)
    if dist.get_rank():
        # Rank 0's weights have to win.
        for p in wrapped.parameters():
            p.detach().add_(1)
    return plain, wrap(wrapped, plain.layers, **{**plain.options, **options})


def optimizers(plain, model, optimizer=None):
    options = {"lr": 0.05, "eps": 1e-3, "weight_decay": plain.weight_decay}
    make = optimizer or (lambda m, **more: torch.optim.AdamW(
        [p for p in m.parameters() if p.requires_grad], **more))
    return (torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **options),
            make(model, **options))


def train_both(name, steps=3, micro=1, twice=False, check=None, optimizer=None, **options):
    """
    ## Train plain and wrapped; return the largest difference of any parameter, and the model

    * `micro` backwards make a step, each `twice` through the same graph; `options` are `wrap`'s
    * `check(model)` is called after every backward and every step
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, model = build(name, **options)
    pair = optimizers(plain, model, optimizer)
    for step in range(steps):
        for i in range(micro):
            ids = tokens(step * micro + i, ROWS * world_size)
            for each, rows in (plain, ids), (model, ids[rank * ROWS : (rank + 1) * ROWS]):
                loss = plain.loss(each(rows))
                if twice:
                    loss.backward(retain_graph=True)
                loss.backward()
                # With it goes the graph, and what would be kept for it.
                del loss
            if check:
                check(model)
        for p in plain.parameters() if optimizer is None else ():
            # What no token of the batch came to has no gradient there. In a shard it has one of
            # zero, with which an optimizer of torch's steps it; `Zero3Optimizer` does not.
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)
        for each in pair:
            each.step()
            each.zero_grad()
        if check:
            check(model)
    # In the end alone: to look at the weights gathers them, also where a step forgot to.
    return difference(plain, model), model


def difference(plain, model):
    expected = dict(plain.named_parameters(remove_duplicate=False))
    with model.full_params() as params:
        assert params.keys() == expected.keys(), sorted(params.keys() ^ expected.keys())
        return max((p - params[name]).abs().max().item() for name, p in expected.items())

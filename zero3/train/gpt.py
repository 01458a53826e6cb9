r"""
# A byte-level GPT as a list of layers

The toy model that the main job shards: an embedding, $n$ transformer blocks and a head, each a
module of its own, put together from the parts in `labml_nn.transformers`.

ZeRO-3 shards a model layer by layer, so the model comes as a list. Each layer takes one tensor and
returns one tensor; the causal mask is made inside the block, and nothing but activations passes
between layers. Bytes are the tokens, so there is no tokenizer to train or to download, and a loss
can be read as compression: for a model that gives the byte $x_t$ the probability $p(x_t \mid
x_{<t})$,

$$\text{bits per byte} = -\frac{1}{T} \sum_{t=1}^{T} \log_2 p(x_t \mid x_{<t})$$

which is 8 for a model that knows nothing.

The block is [Primer EZ](https://arxiv.org/abs/2109.08668)'s: squared ReLU, and a convolution over
three positions behind each query, key and value. The convolution shows every head the two bytes
before. A plain transformer first has to learn to look there, and a run of a few minutes ends
before it has.

**Run this**: `make train` trains it.

**Not covered, and what that costs**: sampling keeps no cache of keys and values, so each new byte
computes its whole window again; weights of embedding and head are not tied, which would put both
into one `Zero3Layer`.

| shape | of |
|---|---|
| `[batch, seq]` int64 | what goes in: byte values |
| `[seq, batch, d_model]` | between layers, as labml_nn has it |
| `[batch, seq, n_vocab]` | what comes out: logits |
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from labml import tracker
from labml_nn.transformers import Generator, TransformerLayer
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.models import EmbeddingsWithLearnedPositionalEncoding
from labml_nn.transformers.primer_ez import MultiDConvHeadAttention, SquaredReLU
from torch import nn
from torch.nn import functional as F

from zero3.guards.options import expect
from zero3.offload import room

# labml_nn 0.5 shows its attention to `tracker.debug`, which labml 0.5 does not have: without it,
# every forward raises.
if not hasattr(tracker, "debug"):
    tracker.debug = lambda *args: None


@dataclass(frozen=True)
class GPTConfig:
    """
    ## The sizes of the model
    """

    n_vocab: int = 256  # byte values
    seq_len: int = 64  # bytes that a position can see at most
    d_model: int = 128  # features of a position
    n_heads: int = 2
    n_layers: int = 4  # blocks, without embedding and head
    d_ff: int = 256  # features inside the feed-forward network
    dropout: float = 0.0

    def __post_init__(self):
        if self.d_model % self.n_heads:
            raise ValueError(
                f"d_model does not split into heads. Expected: a multiple of {self.n_heads} heads. "
                f"Got: d_model = {self.d_model}. What to do: change one of the two."
            )

    @property
    def numel(self) -> int:
        """
        ### Parameters of the model, without building it

        A block has four square matrices and two of the feed-forward network, with their biases,
        two norms, and three convolutions with three weights and a bias for each feature of a head.
        """
        d, per_head = self.d_model, self.d_model // self.n_heads
        block = 4 * (d * d + d) + 2 * d * self.d_ff + self.d_ff + d + 2 * 2 * d + 3 * 4 * per_head
        embedding = (self.n_vocab + self.seq_len) * d
        head = 2 * d + self.n_vocab * (d + 1)
        return embedding + self.n_layers * block + head


class Embedding(nn.Module):
    """
    ## Bytes to vectors

    Token embedding plus a learned vector per position: `[batch, seq]` to `[seq, batch, d_model]`.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.embed = EmbeddingsWithLearnedPositionalEncoding(
            config.d_model, config.n_vocab, config.seq_len
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.embed(x.t())


class Block(nn.Module):
    """
    ## One transformer block

    Attention and feed-forward network, each behind a layer norm and added to what came in:
    `[seq, batch, d_model]` to the same.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        d, p = config.d_model, config.dropout
        self.layer = TransformerLayer(
            d_model=d,
            self_attn=MultiDConvHeadAttention(config.n_heads, d, p),
            feed_forward=FeedForward(d, config.d_ff, p, SquaredReLU()),
            dropout_prob=p,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seq_len = len(x)
        # [seq, seq, 1] bool: which query (row) may look at which key (column). Made anew, because
        # a buffer would be one more thing on each rank that is not sharded.
        mask = torch.ones(seq_len, seq_len, dtype=torch.bool, device=x.device).tril().unsqueeze(-1)
        x = self.layer(x=x, mask=mask)
        # labml_nn keeps the attention for plots. It would stay until the next step, and it is
        # larger than the layer.
        self.layer.self_attn.attn = None
        return x


class Head(nn.Module):
    """
    ## Vectors to logits

    The final layer norm and a projection: `[seq, batch, d_model]` to `[batch, seq, n_vocab]`.
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm = nn.LayerNorm([config.d_model])
        self.generator = Generator(config.n_vocab, config.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.generator(self.norm(x)).transpose(0, 1)


def gpt_layers(config: GPTConfig) -> list[nn.Module]:
    r"""
    ## The model, as layers to wrap

    Matrices start as labml_nn's transformer has them (Glorot, uniform), with two exceptions. A
    block adds its two outputs to the residual stream, which would grow with depth; they start
    smaller by $\frac{1}{\sqrt{2n}}$. And the head starts near zero, so that training begins at 8
    bits per byte instead of at a confident guess.
    """
    blocks = [Block(config) for _ in range(config.n_layers)]
    embedding, head = Embedding(config), Head(config)
    layers = [embedding, *blocks, head]
    for layer in layers:
        for param in layer.parameters():
            if param.dim() == 2:
                nn.init.xavier_uniform_(param)
    with torch.no_grad():
        for block in blocks:
            for branch in (block.layer.self_attn.output, block.layer.feed_forward.layer2):
                branch.weight.mul_(1 / math.sqrt(2 * config.n_layers))
    nn.init.normal_(head.generator.projection.weight, std=0.02)
    return layers


def next_byte_loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    """
    ## Cross-entropy of each byte after the first, in nats

    * `windows` is `[batch, seq + 1]`: every position but the last is an input, every one but the
      first is a target

    Returns the mean, in fp32 whatever the model computes in. Divided by the logarithm of 2 it is
    bits per byte.
    """
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


@torch.no_grad()
def sample(
    model: nn.Module,
    prompt: bytes,
    n: int,
    seq_len: int,
    temperature: float = 0.8,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
) -> bytes:
    """
    ## Continue a text by `n` bytes

    * `prompt` has at least one byte
    * `seq_len` is the longest window that the model takes
    * `generator` draws the bytes, on the CPU, so that a seed means the same text on every device

    A sharded model gathers its layers once per byte, so all ranks call this together; with
    generators of the same seed they get the same text. Returns prompt and continuation.
    """
    training = model.training
    model.eval()
    text = list(prompt)
    for _ in range(n):
        window = torch.tensor([text[-seq_len:]], device=device)
        logits = model(window)[0, -1].float().cpu()
        probabilities = torch.softmax(logits / temperature, dim=-1)
        text.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    model.train(training)
    return bytes(text)


def load_bytes(path: str | Path | None = None) -> torch.Tensor:
    """
    ## A text as a `[length]` uint8 tensor

    Without a path: the reference of the Python language that Python itself carries, for `help()`.
    Its topics quote one another, so a paragraph is taken once; a held-out part would otherwise be
    in the training part too.
    """
    if path is not None:
        what = "there is no text to train on"
        cure = "check the path, or leave it out and take the default text"
        expect(Path(path).is_file(), what, "a file", path or "an empty path", cure)
        nbytes, left_bytes = Path(path).stat().st_size, room(torch.device("cpu"))
        # It is copied once.
        expect(2 * nbytes <= left_bytes, what, f"a file that fits into {left_bytes:,} bytes of "
               "memory twice", f"{path}, of {nbytes:,} bytes", "take a part of it")
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            expect(False, what, "a file that can be read", error, cure)
    else:
        from pydoc_data.topics import topics

        paragraphs = "\n\n".join(topics.values()).split("\n\n")
        data = "\n\n".join(dict.fromkeys(paragraphs)).encode()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0)


def split(data: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    ## The text to train on, and the last tenth, held out
    """
    cut = len(data) - len(data) // 10
    if len(data) - cut <= seq_len:
        raise ValueError(
            f"the text is too short. Expected: at least {10 * (seq_len + 1)} bytes, so that the "
            f"held-out tenth has a window of {seq_len + 1}. Got: {len(data)}. What to do: take a "
            "longer text or shorter sequences."
        )
    return data[:cut], data[cut:]


def global_batch(
    data: torch.Tensor, step: int, rows: int, seq_len: int, seed: int = 0
) -> torch.Tensor:
    """
    ## The windows of all ranks for one step

    Drawn from `seed` and `step` alone: every rank draws the whole batch, `[rows, seq_len + 1]`
    int64, and takes its rows of it. So any number of ranks trains on the same windows, and there
    is nothing to send.
    """
    # Within the 64 bits of a seed, whatever the product is.
    generator = torch.Generator().manual_seed((1_000_003 * seed + step) % 2**64)
    starts = torch.randint(len(data) - seq_len, (rows,), generator=generator)
    return data.unfold(0, seq_len + 1, 1)[starts].long()


def lr_at(step: int, steps: int, lr: float) -> float:
    """
    ## The learning rate of a step

    A straight warm-up over at most 30 steps, then half a cosine down to a twentieth.
    """
    warmup = min(30, steps // 2)
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

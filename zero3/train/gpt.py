r"""
# A byte-level GPT as a list of layers

The main job trains this model: an embedding, $n$ transformer blocks and a head, built from the
modules of `labml_nn.transformers`.

Each layer takes one tensor and returns one tensor. The block makes its causal mask itself.

The tokens are bytes, so the loss can be read as compression. If the right bytes have the
probability $\frac{1}{256}$, they cost $\log_2 256 = 8$ bits each; with $\frac{1}{4}$ they cost 2.
In general,

$$\text{bits per byte} = -\frac{1}{T} \sum_{t=1}^{T} \log_2 p(x_t \mid x_{<t})$$

The block is that of [Primer EZ](https://arxiv.org/abs/2109.08668): it has squared ReLU, and a
convolution over three positions after each query, key and value.

**Run this**: `make train` trains it.

**Not covered, and what that costs**: sampling keeps no cache of keys and values, so each new byte
computes its whole window again. Embedding and head do not share their weights.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import torch
from labml import tracker
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.models import (
    EmbeddingsWithLearnedPositionalEncoding,
    Generator,
    TransformerLayer,
)
from labml_nn.transformers.primer_ez import MultiDConvHeadAttention, SquaredReLU
from torch import nn
from torch.nn import functional as F

from zero3.guards.checks import expect
from zero3.guards.room import room

# `cross_entropy` returns nats, and a nat has this many bits.
BITS = 1 / math.log(2)
# labml_nn 0.5 calls `tracker.debug` in every attention, but labml 0.5 has no such function.
if not hasattr(tracker, "debug"):
    tracker.debug = lambda *args: None


@dataclass(frozen=True)
class GPTConfig:
    """
    ## The sizes of the model
    """

    n_vocab: int = 256  # byte values
    seq_len: int = 64  # longest window, in bytes
    d_model: int = 128  # features of a position
    n_heads: int = 2
    n_layers: int = 4  # blocks, without embedding and head
    d_ff: int = 256  # features inside the feed-forward network
    dropout: float = 0.0

    def __post_init__(self):
        expect(self.d_model % self.n_heads == 0, "d_model does not split into heads",
               f"a multiple of {self.n_heads} heads", f"d_model = {self.d_model}",
               "change one of the two")

    @property
    def numel(self) -> int:
        """
        ### Number of parameters, without building the model
        """
        d = self.d_model
        # Four square matrices, and three convolutions.
        attention = 4 * (d * d + d) + 3 * 4 * (d // self.n_heads)
        feed_forward = 2 * d * self.d_ff + self.d_ff + d
        block = attention + feed_forward + 2 * 2 * d
        embedding = (self.n_vocab + self.seq_len) * d
        head = 2 * d + self.n_vocab * (d + 1)
        return embedding + self.n_layers * block + head


class Embedding(nn.Module):
    """
    ## Bytes to vectors: `[batch, seq]` to `[seq, batch, d_model]`
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
    ## One transformer block: `[seq, batch, d_model]` to the same shape
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.layer = TransformerLayer(
            d_model=config.d_model,
            self_attn=MultiDConvHeadAttention(config.n_heads, config.d_model, config.dropout),
            feed_forward=FeedForward(config.d_model, config.d_ff, config.dropout, SquaredReLU()),
            dropout_prob=config.dropout,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seq_len = len(x)
        # [seq, seq, 1] bool: whether a query (row) may look at a key (column). A buffer would stay
        # on every rank unsharded.
        mask = torch.ones(seq_len, seq_len, dtype=torch.bool, device=x.device).tril().unsqueeze(-1)
        x = self.layer(x=x, mask=mask)
        # labml_nn keeps it for plots, and it is larger than the layer.
        self.layer.self_attn.attn = None
        return x


class Head(nn.Module):
    """
    ## Vectors to logits: `[seq, batch, d_model]` to `[batch, seq, n_vocab]`
    """

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.norm = nn.LayerNorm([config.d_model])
        self.generator = Generator(config.n_vocab, config.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.generator(self.norm(x)).transpose(0, 1)


def gpt_layers(config: GPTConfig) -> list[nn.Module]:
    r"""
    ## The layers of the model, to be wrapped one by one

    Matrices are initialised as in labml_nn's transformer (Glorot, uniform), with two exceptions.
    Each block adds two outputs to the residual stream, so their matrices start smaller, by
    $\frac{1}{\sqrt{2n}}$. The head starts near zero, so that training begins at 8 bits per byte.
    """
    blocks = [Block(config) for _ in range(config.n_layers)]
    embedding = Embedding(config)
    head = Head(config)
    layers = [embedding, *blocks, head]
    for param in nn.Sequential(*layers).parameters():
        if param.dim() == 2:
            nn.init.xavier_uniform_(param)
    with torch.no_grad():
        for block in blocks:
            for branch in (block.layer.self_attn.output, block.layer.feed_forward.layer2):
                branch.weight.mul_(1 / math.sqrt(2 * config.n_layers))
    nn.init.normal_(head.generator.projection.weight, std=0.02)
    return layers


def next_byte_loss(model: nn.Module, windows: torch.Tensor) -> torch.Tensor:
    r"""
    ## Cross-entropy of each byte after the first, in nats

    * `windows` is `[batch, seq + 1]`: each row but its last byte is input, each row but its first
      is target

    Returns the mean in fp32. Times `BITS`, which is $\frac{1}{\ln 2}$, it is in bits per byte.
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

    * `generator` draws the bytes on the CPU, so a seed gives the same text on every device and rank

    All ranks of a sharded model call this together. Returns prompt and continuation.
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

    The default is the reference of the Python language. Raises `ValueError` if the file cannot be
    read or does not fit into memory.
    """
    data = python_reference() if path is None else read_text(path)
    # `torch.frombuffer` refuses an empty buffer.
    return torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8)[: len(data)]


def python_reference() -> bytes:
    from pydoc_data.topics import topics

    # Topics quote one another. Take each paragraph once, or the training text would have parts of
    # the held-out one.
    paragraphs = "\n\n".join(topics.values()).split("\n\n")
    return "\n\n".join(dict.fromkeys(paragraphs)).encode()


def read_text(path: str | Path) -> bytes:
    what = "there is no text to train on"
    cure = "check the path, or leave it out and take the default text"
    expect(Path(path).is_file(), what, "a file", path or "an empty path", cure)
    nbytes = Path(path).stat().st_size
    free_bytes = room(torch.device("cpu"))
    # `load_bytes` copies it once.
    expect(2 * nbytes <= free_bytes, what, f"a file that fits into {free_bytes:,} bytes of memory "
           "twice", f"{path}, of {nbytes:,} bytes", "take a part of it")
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{what}. Expected: a file that can be read. Got: {error}. What to do: "
                         f"{cure}.") from error


def split(data: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    ## The text to train on, and the last tenth for evaluation
    """
    cut = len(data) - len(data) // 10
    expect(len(data) - cut > seq_len, "the text is too short",
           f"at least {10 * (seq_len + 1)} bytes, so that the held-out tenth has a window of "
           f"{seq_len + 1}", len(data), "take a longer text or shorter sequences")
    return data[:cut], data[cut:]


def global_batch(
    data: torch.Tensor, step: int, rows: int, seq_len: int, seed: int = 0
) -> torch.Tensor:
    """
    ## The windows of all ranks for one step

    They are `[rows, seq_len + 1]` int64, and depend only on `seed` and `step`.
    """
    starts = torch.randint(
        len(data) - seq_len,
        (rows,),
        generator=torch.Generator().manual_seed((1_000_003 * seed + step) % 2**64),
        device="cpu")
    return data.unfold(0, seq_len + 1, 1)[starts].long()


def lr_at(step: int, steps: int, lr: float) -> float:
    """
    ## The learning rate of a step

    Linear warm-up over at most 30 steps, then half a cosine down to a twentieth.
    """
    warmup = min(30, steps // 2)
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

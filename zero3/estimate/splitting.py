r"""
# Tensor parallelism in numbers: what a split keeps and sends

`Transformer` says what one rank keeps of a model if $t$ ranks split each layer, and what they send
in a step.

**A layer on four ranks.** Take a layer of 12 weights, of which 4 are norms that nobody splits, and
a mesh of tensor 2 x shard 2. A rank has half of the 8 others and the norms, 8 weights. It shards
these over two ranks, and keeps 4. Without the split it would keep 3 of 12:

$$\text{kept} = \left\lceil \frac{1}{N} \Big( \frac{P_\text{split}}{t} + P_\text{whole} \Big)
\right\rceil$$

**Bytes of activations.** There are $L$ layers of $d$ features, and the $t$ ranks have $T$ positions
in common, with $b$ bytes for a number. A layer has $f$ and $g$ twice (see `inject/tensor.py`), an
all-reduce each. The embedding has another $g$, and the head another $f$:

$$\underbrace{(4L + 2) \cdot 2\,\frac{t-1}{t}\,T d b}_{f \text{ and } g} +
\underbrace{(t-1)\,T \left\lceil \frac{V}{t} \right\rceil b}_{\text{logits}}$$

With `sequence=True` the ends of the stream and the gradients of its weights, $P_\text{whole}$ of
each layer and the final norm, come on top:

$$2\,\frac{t-1}{t}\,T d b + 2\,\frac{t-1}{t}\,P_\text{stream}\,b$$

Weights need $3 \frac{N-1}{N} \frac{P}{t}$ elements. So the split pays when $T d$ is small beside
the weights of a layer.

**Run this**: `python -m zero3.estimate --params 7b --ranks 32 --tensor 8 --width 4096`.

**Not covered, and what that costs**: heads of keys and values that are shared, which make a layer
smaller; convolutions of Primer EZ; masks and embeddings of types. With `policies.cross_entropy`
logits are not gathered: pass `logits=False`, and add 16 bytes for each position and other rank.
"""

import argparse
from dataclasses import dataclass

from zero3.estimate.formulas import ELEMENT_BYTES, LayerSpec, Part, gigabytes, print_table
from zero3.estimate.predict import predict


@dataclass(frozen=True)
class Transformer:
    """
    ## The sizes of a transformer

    GPT-2 has biases and no gate, and Llama a gate and no biases.
    """

    layers: int
    width: int
    hidden: int  # features inside a feed-forward network
    vocabulary: int
    positions: int = 0  # vectors of learned positions
    gated: bool = False
    biases: bool = True  # of linear layers and norms
    head_bias: bool = False

    @property
    def whole_numel(self) -> int:
        """
        ### Weights of a layer that each rank has: two norms, and biases behind the split layers
        """
        return (2 + 2 * self.biases) * self.width + 2 * self.biases * self.width

    @property
    def split_numel(self) -> int:
        """
        ### Weights of a layer that ranks split: attention and feed-forward network
        """
        networks = 3 if self.gated else 2
        biases = 3 * self.width + (networks - 1) * self.hidden
        weights = 4 * self.width**2 + networks * self.width * self.hidden
        return weights + biases * self.biases

    @property
    def norm_numel(self) -> int:
        """
        ### Weights of the final norm
        """
        return (1 + self.biases) * self.width

    def specs(self, tensor: int, place: int = 0, element_bytes: int = ELEMENT_BYTES
              ) -> list[LayerSpec]:
        """
        ### What one rank has of each layer: of the embedding, of the layers, and of the head

        * `tensor` ranks split each layer, and this is number `place` of them
        """
        tokens = (self.vocabulary * (place + 1) // tensor) - (self.vocabulary * place // tensor)
        embedding = (tokens + self.positions) * self.width
        layer = self.whole_numel + self.split_numel // tensor
        head = self.norm_numel + tokens * (self.width + self.head_bias)
        return [LayerSpec((Part(numel, element_bytes, True),))
                for numel in (embedding, *[layer] * self.layers, head)]

    def activation_bytes(self, tensor: int,
                         rows: int,
                         length: int,
                         element_bytes: int = ELEMENT_BYTES, *,
                         sequence: bool = False,
                         logits: bool = True) -> int:
        """
        ### Bytes that a rank sends to the others that split its layers, in forward and backward

        * `rows` are the sequences of a step, `length` the positions of each
        * `sequence` says that the stream is split by positions; `logits`, that the head's are
          gathered
        """
        others = tensor - 1
        all_reduce = 2 * others * rows * length * self.width // tensor
        # Shorter parts are padded to the longest.
        half = others * rows * -(-length // tensor) * self.width
        stream = self.layers * self.whole_numel + self.norm_numel
        # The embedding and the head have whole sequences in any case.
        sent = 2 * all_reduce
        if sequence:
            sent += 4 * self.layers * 2 * half + 2 * half + 2 * others * stream // tensor
        else:
            sent += 4 * self.layers * all_reduce
        if logits:
            sent += others * rows * length * -(-self.vocabulary // tensor)
        return sent * element_bytes


@dataclass(frozen=True)
class Splitting:
    """
    ## A tensor size, and what it costs a rank
    """

    tensor: int
    shards: int
    rest_bytes: int
    peak_bytes: int  # without activations
    weight_bytes: int  # sent in a step, gradients included
    activation_bytes: int  # sent in a step

    @property
    def sent_bytes(self) -> int:
        return self.weight_bytes + self.activation_bytes


def splittings(params: float,
               ranks: int,
               most: int,
               width: int,
               layers: int = 32,
               tokens: float = 8192) -> list[Splitting]:
    """
    ## What each tensor size costs, in half precision with Adam

    * `params` are all in `layers` of the same size, and all split
    * `most` is the largest tensor size
    * `tokens` are those of a step, divided by `ranks`, so the batch is the same for all sizes
    """
    found = []
    for tensor in (size for size in range(1, most + 1) if ranks % size == 0):
        numel = -(-int(params) // (layers * tensor))
        specs = [LayerSpec((Part(numel, ELEMENT_BYTES, True),))] * layers
        shards = ranks // tensor
        p = predict(specs, shards, stage3=True, by_messages=False)
        sent = 4 * layers * (2 * (tensor - 1) * int(tokens) * width) * ELEMENT_BYTES
        found.append(Splitting(tensor, shards, p.rest_bytes, p.peak_bytes, p.sent_bytes, sent))
    return found


def show_tensor(args: argparse.Namespace) -> None:
    """
    ## Print what each tensor size costs
    """
    found = splittings(args.params, args.ranks, args.tensor, args.width, args.layers, args.tokens)
    print(f"{args.params:,.0f} parameters in {args.layers} layers of width {args.width:,}, on "
          f"{args.ranks} ranks, in half precision\nwith Adam, {args.tokens:,.0f} tokens for each "
          "rank. GB (1e9 bytes) of a rank, without the memory of\nactivations:\n")
    rows = [("  tensor   shard", ["at rest", "at the peak", "weights sent", "activations sent",
                                  "both"], "")]
    for each in found:
        cells = (each.rest_bytes, each.peak_bytes, each.weight_bytes, each.activation_bytes,
                 each.sent_bytes)
        rows.append((f"{each.tensor:8}{each.shards:8}", [gigabytes(cell) for cell in cells], ""))
    print_table(rows, name_width=16)
    least = min(found, key=lambda each: each.sent_bytes)
    print(f"\nTensor {least.tensor} sends the fewest bytes. Activations travel while everybody "
          "waits, and weights while\nothers compute, so ranks that split a layer need the fastest "
          "links.")

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

`sequence=True` adds the ends of the stream, and the gradients of its weights. These are
$P_\text{stream}$ elements: those of each layer that all ranks have, and the final norm:

$$2\,\frac{t-1}{t}\,T d b + 2\,\frac{t-1}{t}\,P_\text{stream}\,b$$

Weights need $3 \frac{N-1}{N} \frac{P}{t}$ elements. So the split pays when $T d$ is small beside
the weights of a layer.

**Run this**: `python -m pytest tests/inject/test_tensor_parallel.py -k estimate`.

**Not covered, and what that costs**: heads of keys and values that are shared, which make a layer
smaller; convolutions of Primer EZ; masks and embeddings of types; `policies.cross_entropy`, which
gathers no logits.
"""

from dataclasses import dataclass

from zero3.estimate.formulas import ELEMENT_BYTES, LayerSpec, Part


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
                         sequence: bool = False) -> int:
        """
        ### Bytes that a rank sends to the others that split its layers, in forward and backward

        * `rows` are the sequences of a step, `length` the positions of each
        * `sequence` says that the stream is split by positions
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
        # The logits.
        sent += others * rows * length * -(-self.vocabulary // tensor)
        return sent * element_bytes

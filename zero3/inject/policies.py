r"""
# Policies: forwards that are faster, or need less memory

Each function here returns a policy for `inject`. It names the classes of labml and of Hugging Face
that it fits; further classes with the same forward can be passed to it.

Autograd keeps the tensors that backward needs. A forward that is written out step by step keeps one
for most of its steps. A forward that is one operation keeps its inputs, and computes the rest
again. Take attention over $S$ positions, with $B$ sequences and $h$ heads of $d$ features each:

| kept for backward | written out | `scaled_dot_product_attention` |
|---|---|---|
| queries, keys, values | $3 S B h d$ | $3 S B h d$ |
| scores or probabilities | $S^2 B h$ | none |
| output | $S B h d$ | $S B h d$ |

On 512 positions with heads of 64 features the scores are eight times as large as the queries. The
same is true of the logits of a language model. With $V$ tokens, $T$ positions and chunks of $C$
positions, the logits in memory are

$$\underbrace{T V}_{\text{all at once, and again in fp32}} \qquad
\underbrace{C V}_{\text{in chunks}}$$

elements. Here are time and memory of one forward and backward, on one core of a CPU in fp32. The
memory is what autograd keeps; for the cross entropy it is the peak, because it keeps little:

TABLE

**Left out**: queries, keys and values in a single matrix product (fused QKV). It computes the same
numbers of multiplications and keeps the same input.
On this CPU it takes QKV of the time of three products, so it is neither faster nor smaller. It
matters on GPUs with small batches.

**Run this**: `python -m zero3.inject` measures all of them.

**Not covered, and what that costs**: Hugging Face's models have a switch for their attention,
`model.set_attn_implementation("sdpa")`, so `attention` leaves them alone. With dropout in the
attention, PyTorch draws another mask than the written-out forward; such modules are refused. A row
of the mask that hides every position gives zeros here, and NaN when written out. `attn`, the
probabilities that labml keeps for plots, is not there.
"""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from zero3.guards.options import expect, whole
from zero3.inject.cross_entropy import chunked_cross_entropy
from zero3.inject.replace import Policy, Replacement

_MODELS = "transformers.models"
_ATTENTION = ("labml_nn.transformers.mha.MultiHeadAttention",)
_NORMS = tuple(f"{_MODELS}.{module}.modeling_{module}.{name}RMSNorm" for module, name in (
    ("llama", "Llama"), ("mistral", "Mistral"), ("mixtral", "Mixtral"), ("qwen2", "Qwen2"),
    ("qwen3", "Qwen3"), ("phi3", "Phi3")))
# The linear layers of a gate, of the values that it gates, and of the output.
_GATED: Mapping[str | type, Any] = {
    "labml_nn.transformers.feed_forward.FeedForward": {
        "parts": ("layer1", "linear_v", "layer2"), "activation_name": "activation"},
    **{f"{_MODELS}.{module}.modeling_{module}.{name}MLP": {
        "parts": ("gate_proj", "up_proj", "down_proj"), "activation_name": "act_fn"}
       for module, name in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"),
                            ("qwen3", "Qwen3"))}}
_LANGUAGE_MODELS = tuple(f"{_MODELS}.{module}.modeling_{module}.{name}" for module, name in (
    ("gpt2", "GPT2LMHeadModel"), ("llama", "LlamaForCausalLM"), ("mistral", "MistralForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")))


def attention(*more: type) -> Policy:
    """
    ## Attention in one operation

    For labml's `MultiHeadAttention`, and the classes `more` with its forward. Within 1e-5 of the
    written-out forward in fp32, and 1e-12 in fp64.
    """
    return Policy("attention", Attention, _all(*_ATTENTION, *more))


class Attention(Replacement):
    """
    ## The forward of `attention`
    """

    @classmethod
    def problem(cls, module: Any) -> str:
        if module.dropout.p:
            return f"its dropout of {module.dropout.p} would draw another mask"
        over_keys = isinstance(module.softmax, nn.Softmax) and module.softmax.dim == 1
        return "" if over_keys else f"its softmax is {module.softmax}"

    def forward(self: Any, *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        ### As labml's, `(positions, batch, features)` to the same shape
        """
        if mask is not None:
            # (queries, keys, batch, 1) to (batch, 1, queries, keys)
            mask = self.prepare_mask(mask, query.shape, key.shape).permute(2, 3, 0, 1) != 0
        # (positions, batch, heads, d_k) to (batch, heads, positions, d_k)
        q, k, v = (project(x).permute(1, 2, 0, 3) for project, x in (
            (self.query, query), (self.key, key), (self.value, value)))
        x = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        return self.output(x.permute(2, 0, 1, 3).flatten(2))


def rms_norm(*more: type) -> Policy:
    """
    ## The root mean square norm in one operation

    For Llama's norm and its copies, and the classes `more` with its forward and its attributes
    `weight` and `variance_epsilon`. Within 1e-6 of the written-out one in fp32. That one computes
    fp64 in fp32; this does not.
    """
    return Policy("rms_norm", RMSNorm, _all(*_NORMS, *more))


class RMSNorm(Replacement):
    """
    ## The forward of `rms_norm`
    """

    @classmethod
    def problem(cls, module: Any) -> str:
        has_both = hasattr(module, "weight") and hasattr(module, "variance_epsilon")
        return "" if has_both else "it has no `weight` and `variance_epsilon`"

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def swiglu(*more: type) -> Policy:
    """
    ## A gated feed-forward network that keeps less for backward

    For labml's `FeedForward` with a gate and `nn.SiLU`, and for Llama's and its copies; the classes
    `more` have the forward of Llama's. Same values in forward, and gradients within 1e-6 in fp32.
    """
    like_llama = _GATED[f"{_MODELS}.llama.modeling_llama.LlamaMLP"]
    return Policy("swiglu", SwiGLU, {**_GATED, **_all(*more, **like_llama)})


class SwiGLU(Replacement):
    """
    ## The forward of `swiglu`
    """

    parts: tuple[str, str, str]
    activation_name: str

    @classmethod
    def problem(cls, module: Any) -> str:
        missing = [name for name in cls.parts if not hasattr(module, name)]
        if missing:
            return f"it has no `{missing[0]}`"
        activation = getattr(module, cls.activation_name, None)
        # Hugging Face has a class of its own for it.
        is_silu = type(activation).__name__ in ("SiLU", "SiLUActivation")
        return "" if is_silu else f"its activation is {activation}"

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.parts)
        x = _GatedProduct.apply(gate(x), up(x))
        return down(self.dropout(x) if hasattr(self, "dropout") else x)


class _GatedProduct(torch.autograd.Function):
    r"""
    #### $\text{silu}(a) \cdot b$, which keeps $a$ and $b$ alone

    With $s = \text{sigmoid}(a)$ the derivative of $\text{silu}(a) = a s$ is $s + a s (1 - s)$.
    """

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return F.silu(a) * b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        a, b = ctx.saved_tensors
        s = torch.sigmoid(a)
        silu = a * s
        return grad * b * (s + silu * (1 - s)), grad * silu


def cross_entropy(*more: type, rows: int = 1024) -> Policy:
    """
    ## The loss of a language model without all of its logits

    For Hugging Face's `GPT2LMHeadModel`, `LlamaForCausalLM` and their like, and the classes `more`.
    Called with `labels`, they return the loss, and `None` for the logits. Without labels nothing
    changes. Within 1e-5 of the plain loss in fp32.

    * `rows` is the number of positions in a chunk

    Raises `ValueError` if `rows` is no whole number of at least 1.
    """
    expect(whole(rows, 1), "policies.cross_entropy: `rows`", "a whole number of at least 1",
           repr(rows), "pass such a number, or leave it out")
    return Policy("cross_entropy", CrossEntropy,
                  _all(*_LANGUAGE_MODELS, *more, rows=rows))


class CrossEntropy(Replacement):
    """
    ## The forward of `cross_entropy`
    """

    rows: int
    # Arguments with which the plain forward computes something else.
    others = frozenset({"shift_labels", "logits_to_keep", "return_dict", "ignore_index"})

    @classmethod
    def problem(cls, module: Any) -> str:
        head = module.get_output_embeddings()
        if not isinstance(head, nn.Linear):
            return f"its head is a {type(head).__name__}"
        is_plain = module.loss_function.__name__ == "ForCausalLMLoss"
        return "" if is_plain else f"its loss is {module.loss_function.__name__}"

    def forward(self: Any, input_ids: torch.Tensor | None = None, *, labels: Any = None,
                num_items_in_batch: Any = None, **kwargs: Any) -> Any:
        """
        ### As the model's own, with arguments by name
        """
        if labels is None or self.others & kwargs.keys():
            if num_items_in_batch is not None:
                kwargs["num_items_in_batch"] = num_items_in_batch
            return cast(Any, super()).forward(input_ids, labels=labels, **kwargs)
        output = self.base_model(input_ids, **kwargs)
        head = self.get_output_embeddings()
        # Each position predicts the next token.
        hidden = output.last_hidden_state[:, :-1].flatten(0, 1)
        loss = chunked_cross_entropy(hidden, head.weight, labels[:, 1:].flatten(), head.bias,
                                     rows=self.rows, count=num_items_in_batch)
        outputs = import_module("transformers.modeling_outputs")
        return outputs.CausalLMOutputWithPast(
            loss=loss, past_key_values=output.past_key_values,
            hidden_states=output.hidden_states, attentions=output.attentions)


def _all(*kinds: str | type, **options: Any) -> dict[str | type, Mapping[str, Any]]:
    """
    #### The same options for modules of all of these classes
    """
    return dict.fromkeys(kinds, options)

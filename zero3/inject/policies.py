r"""
# Policies: forwards that are faster, or need less memory

Each function here returns a policy for `inject`, for classes of labml and of Hugging Face, and
others with the same forward.

A forward that is written out keeps a tensor for most of its steps. One operation keeps its inputs,
and backward computes the rest again. Per layer and position, with $d$ features, $f$ features inside
a feed-forward network, $h$ heads and $S$ positions in a sequence, these elements are kept:

| | written out | injected |
|---|---|---|
| `attention`: queries, keys, values, output | $4d$ | $4d$ |
| `attention`: probabilities | $hS$ | $h$ |
| `swiglu`: gate, its activation, values, their product | $4f$ | $3f$ |
| `rms_norm`: input, and what is multiplied by the weight | $2d$ | $d$ |

In the head of a language model, with $V$ tokens, $T$ positions and chunks of $C$ positions, the
logits have

$$\underbrace{T V}_{\text{at once}} \qquad \underbrace{C V}_{\text{in chunks}}$$

elements.

**Run this**: `python -m tests.bench.inject` measures time and memory, plain and injected.

**Not covered, and what that costs**: `attention` leaves Hugging Face's models alone, because they
have `model.set_attn_implementation("sdpa")`. It refuses dropout, because torch's operation draws
another mask. `attn`, the probabilities that labml keeps for plots, is not there. A row of the mask
that hides every position gives NaN when written out, and here it may give zeros. A gradient of a
gradient is an error in `swiglu`, `rms_norm` and `cross_entropy`.
"""

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from zero3.comm.links import groups_of
from zero3.comm.parts import part_of
from zero3.guards.checks import expect, is_sharded, whole
from zero3.inject.cross_entropy import chunked_cross_entropy
from zero3.inject.line import Line
from zero3.inject.replace import Policy, Replacement
from zero3.inject.sequence import Stream
from zero3.inject.tensor import Pattern, Split

MODELS = "transformers.models"
LABML = "labml_nn.transformers"
# Norms with a forward like Llama's.
NORMS = tuple(f"{MODELS}.{module}.modeling_{module}.{name}RMSNorm" for module, name in (
    ("llama", "Llama"), ("mistral", "Mistral"), ("mixtral", "Mixtral"), ("qwen2", "Qwen2"),
    ("qwen3", "Qwen3"), ("phi3", "Phi3")))
_LIKE_LLAMA = (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"))
# The linear layers of a gate, of the values that it gates, and of the output.
_GATED: Mapping[str | type, Any] = {
    f"{LABML}.feed_forward.FeedForward": {
        "linears": ("layer1", "linear_v", "layer2"), "activation_name": "activation"},
    **{f"{MODELS}.{module}.modeling_{module}.{name}MLP": {
        "linears": ("gate_proj", "up_proj", "down_proj"), "activation_name": "act_fn"}
       for module, name in (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"),
                            ("qwen3", "Qwen3"))}}
_LANGUAGE_MODELS = tuple(f"{MODELS}.{module}.modeling_{module}.{name}" for module, name in (
    ("gpt2", "GPT2LMHeadModel"), ("llama", "LlamaForCausalLM"), ("mistral", "MistralForCausalLM"),
    ("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")))


def attention(*more: str | type) -> Policy:
    """
    ## Attention in one operation

    For labml's `MultiHeadAttention`, and the classes `more` with its forward. Within 1e-5 of the
    written-out forward in fp32, and 1e-12 in fp64.
    """
    return Policy("attention", Attention, {
        kind: {} for kind in (f"{LABML}.mha.MultiHeadAttention", *more)})


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

    def forward(self: Any, *, query: torch.Tensor, key: torch.Tensor,
                value: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """
        ### As labml's, `(positions, batch, features)` to the same shape
        """
        if mask is not None:
            # (queries, keys, batch, 1) to (batch, 1, queries, keys)
            mask = (self.prepare_mask(mask, query.shape, key.shape)
                    .permute(2, 3, 0, 1) != 0)
        # (positions, batch, heads, d_k) to (batch, heads, positions, d_k). The features of a head
        # have to be side by side in memory, or torch writes out its attention, too.
        q, k, v = (
            x.contiguous().permute(1, 2, 0, 3)
            for x in (self.query(query), self.key(key), self.value(value)))
        x = F.scaled_dot_product_attention(q, k, v, mask, scale=self.scale)
        return self.output(x.permute(2, 0, 1, 3).flatten(2))


def rms_norm(*more: str | type) -> Policy:
    """
    ## The root mean square norm in one operation

    For Llama's norm and its copies, and the classes `more` with its forward and its attributes
    `weight` and `variance_epsilon`. Within 1e-6 of the written-out one in fp32.
    """
    return Policy("rms_norm", RMSNorm, {kind: {} for kind in (*NORMS, *more)})


class RMSNorm(Replacement):
    """
    ## The forward of `rms_norm`
    """

    @classmethod
    def problem(cls, module: Any) -> str:
        return ("" if hasattr(module, "weight") and hasattr(module, "variance_epsilon")
                else "it has no `weight` and `variance_epsilon`")

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return _Norm.apply(hidden_states, self.weight, self.variance_epsilon)


class _Norm(torch.autograd.Function):
    r"""
    #### $w \cdot x r$ with $r = (\text{mean}(x^2) + \epsilon)^{-1/2}$, which keeps $x$ and $r$

    With $n = x r$ the gradient of $x$ is $r \, (w g - n \cdot \text{mean}(n w g))$.
    """

    @staticmethod
    def forward(ctx,
                x: torch.Tensor,
                weight: torch.Tensor,
                eps: float) -> torch.Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        r = (torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # (..., 1)
             .square_()
             .div_(x.shape[-1])
             .add_(eps)
             .rsqrt_())
        ctx.save_for_backward(x, weight, r)
        return (wide * r).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        normed = x * r
        of_weight = (grad * normed).reshape(-1, len(weight)).sum(0)
        of_normed = grad.to(r.dtype) * weight
        mean = (of_normed * normed).mean(-1, keepdim=True)
        of_x = of_normed.sub_(normed.mul_(mean)).mul_(r)
        return of_x.to(x.dtype), of_weight.to(weight.dtype), None


def swiglu(*more: str | type) -> Policy:
    """
    ## A gated feed-forward network that keeps less for backward

    For labml's `FeedForward` with a gate and `nn.SiLU`, and for Llama's and its copies; the classes
    `more` have the forward of Llama's. Same values in forward, and gradients within 1e-6 in fp32.
    """
    return Policy("swiglu", SwiGLU, {
        **_GATED,
        **dict.fromkeys(more, _GATED[f"{MODELS}.llama.modeling_llama.LlamaMLP"])})


class SwiGLU(Replacement):
    """
    ## The forward of `swiglu`
    """

    linears: tuple[str, str, str]
    activation_name: str

    @classmethod
    def problem(cls, module: Any) -> str:
        missing = [name for name in cls.linears if not hasattr(module, name)]
        if missing:
            return f"it has no `{missing[0]}`"
        activation = getattr(module, cls.activation_name, None)
        return ("" if type(activation).__name__ in ("SiLU", "SiLUActivation")
                else f"its activation is {activation}")

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        gate, up, down = (getattr(self, name) for name in self.linears)
        x = _GatedProduct.apply(gate(x), up(x))
        return down(self.dropout(x) if hasattr(self, "dropout") else x)


class _GatedProduct(torch.autograd.Function):
    r"""
    #### $\text{silu}(a) \cdot b$, which keeps $a$ and $b$ alone
    """

    @staticmethod
    def forward(ctx, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return F.silu(a).mul_(b)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        a, b = ctx.saved_tensors
        of_b = F.silu(a).mul_(grad)
        return torch.ops.aten.silu_backward(grad * b, a), of_b


def cross_entropy(*more: str | type, rows: int = 1024) -> Policy:
    """
    ## The loss of a language model without all of its logits

    For Hugging Face's `GPT2LMHeadModel`, `LlamaForCausalLM` and their like, and the classes `more`.
    Called with `labels`, they return the loss, and `None` for the logits. Without labels nothing
    changes, nor with an argument that `CrossEntropy.others` names, such as `return_dict`. Within
    1e-5 of the plain loss in fp32.

    * `rows` is the number of positions in a chunk
    """
    expect(whole(rows, 1), "policies.cross_entropy: `rows`", "a whole number of at least 1",
           repr(rows), "pass such a number, or leave it out")
    return Policy("cross_entropy", CrossEntropy,
                  {kind: {"rows": rows} for kind in (*_LANGUAGE_MODELS, *more)})


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
        loss = module.loss_function.__name__
        return "" if loss == "ForCausalLMLoss" else f"its loss is {loss}"

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        """
        ### As the model's own
        """
        plain = super().forward
        kwargs.update(zip(inspect.signature(plain).parameters, args, strict=False))
        if kwargs.get("labels") is None or self.others & kwargs.keys():
            return plain(**kwargs)
        labels = kwargs.pop("labels")
        count = kwargs.pop("num_items_in_batch", None)
        output = self.base_model(**kwargs)
        head = self.get_output_embeddings()
        # `wrap` may have put it into a unit of its own.
        parted = head.module if is_sharded(head) else head
        return import_module("transformers.modeling_outputs").CausalLMOutputWithPast(
            # Each position predicts the next token.
            loss=chunked_cross_entropy(
                output.last_hidden_state[:, :-1].flatten(0, 1),
                head.weight,
                labels[:, 1:].flatten(),
                head.bias,
                rows=self.rows,
                count=count,
                split=vars(parted).get("line"),
                own=part_of(parted, "weight")),
            past_key_values=output.past_key_values,
            hidden_states=output.hidden_states,
            attentions=output.attentions)


def tensor_parallel(mesh: DeviceMesh, more: Mapping[str | type, Pattern] | None = None, *,
                    sequence: bool = False) -> Policy:
    """
    ## Split the linear layers of a model over ranks

    Known are GPT-2, BERT, Llama, Mistral and Qwen2 of Hugging Face's, and labml's transformer. All
    other layers stay whole on each rank.

    * `mesh` has one dimension: the ranks that split each layer
    * `more` are further classes with their patterns, mixtures of experts for instance
    * `sequence` splits norms, dropouts and the residual stream by positions, in Hugging Face's
      models and labml's `Encoder`

    All ranks of the mesh inject alike (broadcast of all values): they get those of the first one.
    The model has to be wrapped on the other dimension of the mesh, or on none.

    Raises `ValueError` as `inject` does, also with `strict=False`: half of the layers would compute
    something else. Megatron-LM, section 3.
    """
    group, *others = groups_of(mesh)
    expect(not others, "policies.tensor_parallel", "a mesh of one dimension", f"{mesh}",
           "pass `mesh[\"tensor\"]`")
    line = Line(group, sequence)
    patterns = {**PATTERNS, **(STREAMS if sequence else {}), **(more or {})}
    return Policy(
        "tensor_parallel",
        Split,
        {kind: {"pattern": each, "line": line} for kind, each in patterns.items()},
        line.prepare)


# ----------------------------------------------------------------------------------- known models

_QKV = ("query", "key", "value")
# Which linear layers of each class are split, and how.
PATTERNS: Mapping[str | type, Pattern] = {
    # `query` is a module with a `linear`, or in Primer EZ a list of this module and a convolution.
    f"{LABML}.mha.MultiHeadAttention": Pattern(
        columns=tuple(f"{x}{of}linear" for x in _QKV for of in (".", ".0.")),
        rows=("output",),
        divided=tuple(f"{x}{of}heads" for x in _QKV for of in (".", ".0.")),
        shared=tuple(f"{x}.1.conv" for x in _QKV),
        dropouts=(("dropout", 3),)),
    f"{LABML}.feed_forward.FeedForward": Pattern(
        columns=("layer1", "linear_v"),
        rows=("layer2",),
        dropouts=(("dropout", -1),)),
    f"{LABML}.models.EmbeddingsWithPositionalEncoding": Pattern(embeddings=("linear",)),
    f"{LABML}.models.EmbeddingsWithLearnedPositionalEncoding": Pattern(embeddings=("linear",)),
    f"{LABML}.models.Generator": Pattern(heads=("projection",)),
    f"{MODELS}.gpt2.modeling_gpt2.GPT2Attention": Pattern(
        # Queries, keys and values together; with cross-attention queries alone, in `q_attn`.
        columns=("c_attn", "q_attn"),
        rows=("c_proj",),
        block="split_size",
        zero=("attn_dropout.p",),
        after=("resid_dropout",),
        divided=("num_heads", "split_size", "c_attn.nf", "q_attn.nf")),
    f"{MODELS}.gpt2.modeling_gpt2.GPT2MLP": Pattern(
        columns=("c_fc",),
        rows=("c_proj",),
        divided=("c_fc.nf",),
        after=("dropout",)),
    f"{MODELS}.gpt2.modeling_gpt2.GPT2LMHeadModel": Pattern(
        embeddings=("transformer.wte",), heads=("lm_head",)),
    **{f"{MODELS}.bert.modeling_bert.Bert{which}Attention": Pattern(
        columns=_QKV,
        zero=("dropout.p",),
        divided=("num_attention_heads", "all_head_size"))
       for which in ("Self", "Cross")},
    f"{MODELS}.bert.modeling_bert.BertSelfOutput": Pattern(
        rows=("dense",), after=("dropout", "LayerNorm")),
    f"{MODELS}.bert.modeling_bert.BertIntermediate": Pattern(columns=("dense",)),
    f"{MODELS}.bert.modeling_bert.BertOutput": Pattern(
        rows=("dense",), after=("dropout", "LayerNorm")),
    **{f"{MODELS}.{module}.modeling_{module}.{name}{part}": pattern
       for module, name in _LIKE_LLAMA
       for part, pattern in (
           ("Attention", Pattern(
               columns=("q_proj", "k_proj", "v_proj"),
               rows=("o_proj",),
               divisible=("config.num_attention_heads", "config.num_key_value_heads"),
               zero=("attention_dropout",))),
           ("MLP", Pattern(columns=("gate_proj", "up_proj"), rows=("down_proj",))),
           ("ForCausalLM", Pattern(embeddings=("model.embed_tokens",), heads=("lm_head",))))}}
# Where the residual stream of a model begins and ends. With `sequence=True` each rank has some of
# the positions in between.
STREAMS: Mapping[str | type, Pattern] = {
    f"{LABML}.models.Encoder": Pattern(stream=Stream(
        "layers", "norm", dim=0, classes=(f"{LABML}.models.TransformerLayer",))),
    f"{MODELS}.gpt2.modeling_gpt2.GPT2Model": Pattern(stream=Stream(
        "h", "ln_f", classes=(f"{MODELS}.gpt2.modeling_gpt2.GPT2Block",))),
    f"{MODELS}.bert.modeling_bert.BertEncoder": Pattern(stream=Stream(
        "layer", classes=tuple(f"{MODELS}.bert.modeling_bert.Bert{part}"
                               for part in ("Layer", "Attention")))),
    **{f"{MODELS}.{module}.modeling_{module}.{name}Model": Pattern(stream=Stream(
        "layers", "norm", classes=(f"{MODELS}.{module}.modeling_{module}.{name}DecoderLayer",
                                   *NORMS)))
       for module, name in _LIKE_LLAMA}}

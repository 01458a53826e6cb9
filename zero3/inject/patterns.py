r"""
# Patterns: how known models are split

`PATTERNS` says for each known class which of its linear layers are split and how, and `STREAMS`
says where the residual stream of a model begins and ends.

A pattern names modules and numbers inside a module of its class. For a network of Llama's it is

    Pattern(columns=("gate_proj", "up_proj"), rows=("down_proj",))

| layer | weight | on each of two ranks |
|---|---|---|
| `gate_proj`, `up_proj` | $(f, d)$ | $(\frac{f}{2}, d)$, some of the outputs |
| `down_proj` | $(d, f)$ | $(d, \frac{f}{2})$, some of the inputs |

An attention computes with numbers that count its heads. Where the module keeps such a number, it is
`divided` by the number of ranks. Where it derives them from shapes, the number must be `divisible`.

A module that no pattern names stays whole on each rank.

**Run this**: `python -m pytest tests/inject/test_tensor_parallel.py`.

**Not covered, and what that costs**: mixtures of experts, and classes with other names. Pass their
patterns to `tensor_parallel(mesh, more)`.
"""

from collections.abc import Mapping

from zero3.inject.sequence import Stream
from zero3.inject.tensor import Pattern

MODELS = "transformers.models"
LABML = "labml_nn.transformers"
# Norms with a forward like Llama's.
NORMS = tuple(f"{MODELS}.{module}.modeling_{module}.{name}RMSNorm" for module, name in (
    ("llama", "Llama"), ("mistral", "Mistral"), ("mixtral", "Mixtral"), ("qwen2", "Qwen2"),
    ("qwen3", "Qwen3"), ("phi3", "Phi3")))
_LIKE_LLAMA = (("llama", "Llama"), ("mistral", "Mistral"), ("qwen2", "Qwen2"))
_QKV = ("query", "key", "value")
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

# Where each rank has some of the positions, with `sequence=True`.
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

r"""
# The main job, compressed: train, prune and round, clean, evaluate

`--compress` has the main job train a model that becomes smaller as it learns. At the end it writes
the small model, and evaluates it.

| `--compress` | weights | when, in parts of the run |
|---|---|---|
| `8` | 8 bits | from 0.4 on |
| `4-half` | half of them pruned, the rest in 4 bits, 64 to a scale | 0.1 to 0.4 |
| `rows-heads` | 8 bits; half of the heads and of the hidden features gone | 0.1 to 0.4 |

A run of 1,000 steps with `4-half` begins to prune at step 100. Half of the elements are gone at
step 400, and by then the bits have fallen from 8 to 4. In the 600 steps that follow, the elements
that are left learn to do without the others. A weight of 128 by 128 then takes

$$\underbrace{\tfrac{128^2}{8}}_{\text{mask}} + \underbrace{\tfrac{128^2}{2} \cdot
\tfrac{4}{8}}_{\text{codes}} + \underbrace{\tfrac{128^2}{64} \cdot 4}_{\text{scales}} = 7168
\quad \text{bytes in place of } 65536$$

The file `small.safetensors` loads without this package; `compression/stored.py` says how. The table
at the end compares the model before and after. Its first loss is that of the sharded model, whose
weights are already pruned and rounded; its second one is that of the cleaned model, which computes
with the same numbers. To see what compression costs, run the job without `--compress` too.

**Run this**: `make train ARGS="--compress 4-half"`.

**Not covered, and what that costs**: a student with fewer layers; `distill` makes one from Python.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from zero3.compression.clean import clean, measure, table, write
from zero3.compression.compress import Compression, Rules, compress
from zero3.compression.rules import Prune, Quantize
from zero3.estimate.predict import Prediction
from zero3.layer import Zero3Sequential
from zero3.train import gpt

FILE = "small.safetensors"
# All matrices of the model; its convolutions have three numbers in a row.
MATRICES = ("*.linear", "*.output", "*.layer[12]", "*.projection")


def rules_8(steps: int, config: gpt.GPTConfig) -> Rules:
    """
    ## 8 bits
    """
    return {"|".join(MATRICES): [Quantize(8, start=2 * steps // 5)]}


def rules_4_half(steps: int, config: gpt.GPTConfig) -> Rules:
    """
    ## 4 bits, and half of the elements pruned
    """
    when: dict[str, Any] = {"start": steps // 10, "end": 2 * steps // 5}
    # A row that is no multiple of 64 has one scale.
    group = None if config.d_model % 64 else 64
    prune = Prune(0.5, scope="global", regrow=True, **when)
    quantize = Quantize(4, group=group, start_bits=8, **when)
    # All matrices share a threshold, so some lose more than half, and some less.
    return {"|".join(MATRICES): [prune, quantize]}


def rules_rows_heads(steps: int, config: gpt.GPTConfig) -> Rules:
    """
    ## 8 bits, and half of the heads and hidden features gone
    """
    when: dict[str, Any] = {"start": steps // 10, "end": 2 * steps // 5}
    three = ("query.0", "key.0", "value.0")
    rules: Rules = {"*.linear|*.projection|*.layer2": [Quantize(8)]}
    rules["*.layer1"] = [Prune(0.5, "row", follows=("layer2",), **when), Quantize(8)]
    rules["*.output"] = [
        Prune(0.5, "head", heads=config.n_heads, follows=tuple(f"{name}.linear" for name in three),
              counts=("heads", *(f"{name}.heads" for name in three)), **when), Quantize(8)]
    return rules


RECIPES: dict[str, Callable[[int, gpt.GPTConfig], Rules]] = {
    "8": rules_8, "4-half": rules_4_half, "rows-heads": rules_rows_heads}


def compress_layers(layers: list[nn.Module], recipe: str, steps: int, config: gpt.GPTConfig
                    ) -> Compression:
    """
    ## Put the rules of a recipe on the layers, before they are wrapped

    * `steps` are those of the whole run
    """
    return compress(layers, RECIPES[recipe](steps, config))


def with_counts(prediction: Prediction, compression: Compression, ranks: int) -> Prediction:
    """
    ## A prediction, with the bytes that the ranks send to find thresholds

    Those of the last step, which is the one that the job records. The number of messages is that
    without them.
    """
    sent_bytes = prediction.sent_bytes + compression.counting_bytes(ranks)
    return replace(prediction, sent_bytes=sent_bytes)


def finish(model: Zero3Sequential, config: gpt.GPTConfig, recipe: str, steps: int,
           evaluate: Callable[[nn.Module], float], out: Path | None) -> str:
    """
    ## Clean the model, evaluate it, and write it

    * `evaluate` returns the held-out loss of a model, in bits per byte, as a mean over ranks
    * `out` is where the file goes; `None` on the ranks that write none

    All ranks call it. Returns the table.
    """
    device = model.sharded_layers[0].device
    dtype = next(model.parameters()).dtype
    layers = [layer.to(device, dtype) for layer in gpt.gpt_layers(config)]
    whole = nn.Sequential(*layers)
    example = gpt.global_batch(gpt.load_bytes(), 0, 1, config.seq_len)[:, :-1].to(device)
    before = measure(whole, example, evaluate(model))
    compress_layers(layers, recipe, steps, config)
    clean(whole, trained=model)
    after = measure(whole, example, evaluate(whole))
    if out is not None:
        write(whole, out / FILE)
    return table(before, after)

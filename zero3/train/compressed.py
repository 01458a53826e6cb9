r"""
# The main job, compressed: train, prune and round, clean, evaluate

With `--compress` the main job trains a model that becomes smaller, and writes and evaluates it at
the end.

| `--compress` | weights | when, in parts of the run |
|---|---|---|
| `dense` | as they are | |
| `8` | 8 bits | from 0.4 on |
| `4-half` | half of them pruned, the rest in 4 bits, 64 to a scale | 0.1 to 0.4 |
| `rows-heads` | half of the heads and of the hidden features gone; 8 bits | 0.1 to 0.4; from 0 |

In a run of 1,000 steps with `4-half`, half of the elements are gone at step 400, and the bits have
fallen from 8 to 4. A weight of 128 by 128 then takes

$$\underbrace{\tfrac{128^2}{8}}_{\text{mask}} + \underbrace{\tfrac{128^2}{2} \cdot
\tfrac{4}{8}}_{\text{codes}} + \underbrace{\tfrac{128^2}{64} \cdot 4}_{\text{scales}} = 7168
\quad \text{bytes in place of } 65536$$

**What compression costs** is the difference to a dense model that was trained from the same seed on
the same batches. So the job trains a model by each recipe, and the first one is the yardstick of a
table.

**Run this**: `make train ARGS="--compress dense 8 4-half rows-heads"`. It writes a folder for each
model, and the table as `compared.json`.

**Not covered, and what that costs**: a student with fewer layers; `distill` makes one from Python.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero3.compression.clean import Size, clean, measure, take_over, write
from zero3.compression.compress import Rules, compress
from zero3.compression.rules import Prune, Quantize
from zero3.estimate.formulas import print_table
from zero3.layer import Zero3Sequential
from zero3.train import gpt

FILE = "model.safetensors"
COMPARED = "compared.json"
DENSE = "dense"
MATRICES = ("*.linear", "*.output", "*.layer[12]", "*.projection")


def rules_4_half(steps: int, config: gpt.GPTConfig) -> Rules:
    """
    ## 4 bits, and half of the elements pruned
    """
    start = steps // 10
    end = 2 * steps // 5
    # A row that is no multiple of 64 has one scale.
    group = None if config.d_model % 64 else 64
    # With one threshold, some matrices lose more than half, and some less.
    return {"|".join(MATRICES): [
        Prune(0.5, scope="global", regrow=True, start=start, end=end),
        Quantize(4, group=group, start_bits=8, start=start, end=end)]}


def rules_rows_heads(steps: int, config: gpt.GPTConfig) -> Rules:
    """
    ## 8 bits, and half of the heads and hidden features gone
    """
    prune = partial(Prune, 0.5, start=steps // 10, end=2 * steps // 5)
    three = ("query.0", "key.0", "value.0")
    heads = prune("head", heads=config.n_heads, follows=tuple(f"{name}.linear" for name in three),
                  counts=("heads", *(f"{name}.heads" for name in three)))
    return {"*.linear|*.projection|*.layer2": [Quantize(8)],
            "*.layer1": [prune("row", follows=("layer2",)), Quantize(8)],
            "*.output": [heads, Quantize(8)]}


# The rules of each recipe, for the steps of the whole run and a model.
RECIPES: dict[str, Callable[[int, gpt.GPTConfig], Rules]] = {
    DENSE: lambda steps, config: {},
    "8": lambda steps, config: {"|".join(MATRICES): [Quantize(8, start=2 * steps // 5)]},
    "4-half": rules_4_half,
    "rows-heads": rules_rows_heads}


def finish(model: Zero3Sequential,
           config: gpt.GPTConfig,
           recipe: str,
           steps: int,
           evaluate: Callable[[nn.Module], float],
           out: Path | None) -> tuple[Size, Size]:
    """
    ## Clean the model, evaluate it, and write it

    * `evaluate` returns the held-out loss of a model, in bits per byte, as a mean over ranks
    * `out` is where the file goes; `None` on the ranks that write none

    All ranks call it. Returns how large and how good the model is, before and after.
    """
    device = model.sharded_layers[0].device
    plain = nn.Sequential(*gpt.gpt_layers(config)).to(
        device,
        next(model.parameters()).dtype)
    example = torch.zeros(1, config.seq_len, dtype=torch.long, device=device)
    before = measure(plain, example, evaluate(model))
    if recipe == DENSE:
        take_over(plain, model)
    else:
        compress(plain, RECIPES[recipe](steps, config))
        clean(plain, trained=model)
    after = measure(plain, example, evaluate(plain))
    if out is not None:
        write(plain, out / FILE)
    return before, after


def compare(out: Path, recipes: list[str]) -> None:
    """
    ## Print and write the table of all models of a run
    """
    metrics = {recipe: json.loads((out / recipe / "metrics.json").read_text())
               for recipe in recipes}
    models = [{"recipe": recipe, "held_out": found["cleaned"]["loss"],
               "multiply_adds": found["cleaned"]["multiply_adds"],
               "file_bytes": (out / recipe / FILE).stat().st_size}
              for recipe, found in metrics.items()]
    run = metrics[recipes[-1]]
    compared = {
        **{name: run[name] for name in ("ranks", "device", "torch", "commit")},
        **{name: run["options"][name] for name in ("steps", "seed")},
        "models": models}
    (out / COMPARED).write_text(json.dumps(compared, indent=1) + "\n")
    print()
    print_table([(recipe, cells, "") for recipe, *cells in compared_rows(compared)])
    print(f"\nwrote {out / COMPARED}", flush=True)


def compared_rows(compared: dict[str, Any]) -> list[list[str]]:
    """
    ## The rows of the table of all models, the header first
    """
    first = compared["models"][0]
    rows = [["", "bits per byte", f"against {first['recipe']}", "bytes of the file",
             "multiply-adds"]]
    for each in compared["models"]:
        more = 100 * (each["held_out"] / first["held_out"] - 1)
        rows.append([each["recipe"], f"{each['held_out']:.4f}",
                     "" if each is first else f"{more:+.2f} %",
                     f"{each['file_bytes']:,}", f"{each['multiply_adds']:,}"])
    return rows

r"""
# Benchmark of policies: each beside the plain forward

Runs a module forward and backward, plain and injected by turns, on one core in fp32. The last two
rows train whole models, with a step of AdamW: the main job's GPT with the sizes of `tests.bench`,
and a small Llama, with all policies that fit them.

Ratios are of neighbouring runs, because a machine that slows down slows both; the range has the
middle half of them. Memory is measured in a run of its own, as torch's `MemTracker` counts it: all
tensors that exist after forward, and the most that exist at once, above those before. Both models
of a pair must have the same loss.

**Run this**: `python -m tests.bench.inject --out docs/inject.json` writes what the chapter's table
is made of.

**Not covered, and what that costs**: one thread on a CPU. On a GPU a policy saves launches, too.
The GPT of `tests.bench` itself computes its attention in one operation already, so no policy finds
anything to replace in it.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
from labml_nn.transformers import MultiHeadAttention
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional as F

from tests.bench.training import digests, machine, write
from zero3.inject import inject, policies
from zero3.train import gpt

# labml_nn's attention runs with what that module gives to labml.
assert gpt.tracker.debug

# What of the package the figures are of.
TIMED = [f"zero3/inject/{name}.py" for name in ("policies", "cross_entropy")]


class SelfAttention(nn.Module):
    """
    ## Causal attention of labml's, from a sequence to itself
    """

    def __init__(self, width):
        super().__init__()
        self.attention = MultiHeadAttention(4, width, 0.0)

    def forward(self, x):
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()[..., None]
        return self.attention(query=x, key=x, value=x, mask=mask).square().mean()


class Mean(nn.Module):
    """
    ## A module and a loss
    """

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x).square().mean()


class Loss(nn.Module):
    """
    ## A language model of Hugging Face's and its loss
    """

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, labels=ids).loss


class GPT(nn.Module):
    """
    ## The main job's GPT, with the sizes of `tests.bench`, and its loss
    """

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*gpt.gpt_layers(gpt.GPTConfig(
            seq_len=256, d_model=384, n_heads=6, n_layers=6, d_ff=1536)))

    def forward(self, ids):
        return F.cross_entropy(self.layers(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def llama(vocabulary, layers):
    # Seconds to import.
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=256, intermediate_size=688, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True)
    return transformers.LlamaForCausalLM(config)


def cases():
    """
    ## Name, module, policies and inputs of each row
    """
    model = llama(32_000, 2)
    norm, network = model.model.norm, model.model.layers[0].mlp
    x = torch.randn(2048, 256, requires_grad=True)
    ids = torch.randint(32_000, (1, 512))
    for length in (64, 256, 512):
        sequence = torch.randn(length, 1024 // length, 256, requires_grad=True)
        yield f"attention, {length} positions", SelfAttention(256), [policies.attention()], sequence
    yield "rms_norm, 2,048 positions", Mean(norm), [policies.rms_norm()], x
    yield "swiglu, 2,048 positions", Mean(network), [policies.swiglu()], x
    for rows in (128, 512):
        yield (f"cross_entropy, 512 positions, rows={rows}", Loss(model),
               [policies.cross_entropy(rows=rows)], ids)
    yield "GPT, trained", GPT(), [policies.attention()], torch.randint(256, (4, 256))
    yield "Llama, trained", Loss(model), [
        policies.rms_norm(), policies.swiglu(), policies.cross_entropy(rows=128)], ids


class Timed:
    """
    ## One of a pair: a module, and its optimizer if it trains
    """

    def __init__(self, module, trains):
        self.module = module
        self.optimizer = None
        if trains:
            self.optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)

    def step_ms(self, x):
        """
        ### Time of forward and backward, and of the optimizer's step if there is one
        """
        self.module.zero_grad()
        begin = time.perf_counter()
        self.loss = self.module(x)
        self.loss.backward()
        if self.optimizer:
            self.optimizer.step()
        return 1000 * (time.perf_counter() - begin)

    def memory_bytes(self, x):
        """
        ### What is kept from forward to backward, and the peak; both above the bytes before
        """
        self.module.zero_grad()
        tracker = MemTracker()
        with tracker:
            loss = self.module(x)
            kept = tracker.get_tracker_snapshot("current")
            loss.backward()
            peak = tracker.get_tracker_snapshot("peak")
        return [sum(each["Total"] for each in found.values()) for found in (kept, peak)]


def measure(module, listed, x, rounds, trains):
    """
    ## A row: times, ratios and memory, each of the plain module and of the injected one
    """
    pair = [Timed(module, trains), Timed(inject(copy.deepcopy(module), listed), trains)]
    times = []
    for _ in range(rounds + 1):
        times.append([each.step_ms(x) for each in pair])
        off = abs(pair[0].loss.item() - pair[1].loss.item())
        assert off < 1e-3, (type(module).__name__, off)
    times = times[1:]
    ratios = sorted(after / before for before, after in times)
    quarter = len(ratios) // 4
    row = {"ms": [statistics.median(column) for column in zip(*times, strict=True)],
           "ratio": [statistics.median(ratios), ratios[quarter], ratios[-1 - quarter]]}
    row["kept_bytes"], row["peak_bytes"] = zip(*(each.memory_bytes(x) for each in pair),
                                               strict=True)
    if trains:
        row["tokens_per_s"] = [1000 * x.numel() / ms for ms in row["ms"]]
    return row


def cells(name, row):
    """
    ## The cells of a row
    """
    median, least, most = row["ratio"]
    return [name, *(f"{ms:.1f}" for ms in row["ms"]), f"{median:.2f} ({least:.2f}-{most:.2f})",
            *(f"{nbytes / 1e6:.1f}" for what in ("kept_bytes", "peak_bytes")
              for nbytes in row[what]),
            *(f"{each:,.0f}" for each in row.get("tokens_per_s", ()))]


def main():
    """
    ## The command line
    """
    parser = argparse.ArgumentParser(prog="python -m tests.bench.inject")
    parser.add_argument("--rounds", type=int, default=11, help="runs of each of a pair")
    parser.add_argument("--only", default="", help="rows with these words")
    parser.add_argument("--out", type=Path, default=Path("runs/inject.json"), help="results file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = {}
    print("| | ms | injected | ratio | kept MB | injected | peak MB | injected | tokens/s | "
          "injected |")
    print("|---" * 10 + "|")
    for name, module, listed, x in cases():
        if args.only in name:
            rows[name] = measure(module, listed, x, args.rounds, "trained" in name)
            print(f"| {' | '.join(cells(name, rows[name]))} |", flush=True)
    write(args, {"machine": machine(argparse.Namespace(gpu=False)), "settings": vars(args),
                 "code": digests(TIMED), "rows": rows})


if __name__ == "__main__":
    main()

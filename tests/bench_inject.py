r"""
# Benchmark of policies: each beside the plain forward

Runs a module forward and backward, plain and injected by turns, on one core in fp32.

Ratios are of neighbouring runs, because a machine that slows down slows both; the range has the
middle half of them. Memory is measured in a run of its own, as torch's `MemTracker` counts it: all
tensors that exist after forward, and the most that exist at once, above those before. The last two
rows are whole models.

**Run this**: `python -m tests.bench_inject`.

**Not covered, and what that costs**: one thread on a CPU. On a GPU a policy saves launches, too.
"""

import argparse
import copy
import statistics
import sys
import time

import torch
from labml_nn.transformers import MultiHeadAttention, TransformerLayer
from labml_nn.transformers.feed_forward import FeedForward
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from zero3.inject import inject, policies
from zero3.train import gpt

# labml_nn's attention runs with what that module gives to labml.
assert gpt.tracker.debug
sys.modules.setdefault("torchvision", None)


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


class Layers(nn.Module):
    """
    ## Layers of labml's transformer, with the causal mask
    """

    def __init__(self, width, count):
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerLayer(d_model=width, self_attn=MultiHeadAttention(4, width, 0.0),
                             feed_forward=FeedForward(width, 3 * width, 0.0, nn.SiLU(), True),
                             dropout_prob=0.0) for _ in range(count))

    def forward(self, x):
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()[..., None]
        for layer in self.layers:
            x = layer(x=x, mask=mask)
        return x.square().mean()


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
    yield ("labml, 4 layers", Layers(256, 4), [policies.attention(), policies.swiglu()],
           torch.randn(256, 4, 256, requires_grad=True))
    yield ("Llama, 2 layers", Loss(model), [
        policies.rms_norm(), policies.swiglu(), policies.cross_entropy(rows=128)], ids)


def step_time_ms(model, x):
    """
    ## Time of one forward and backward
    """
    model.zero_grad()
    begin = time.perf_counter()
    model(x).backward()
    return 1000 * (time.perf_counter() - begin)


def memory_bytes(model, x):
    """
    ## What is kept from forward to backward, and the peak; both above the bytes before
    """
    model.zero_grad()
    tracker = MemTracker()
    with tracker:
        loss = model(x)
        kept = tracker.get_tracker_snapshot("current")
        loss.backward()
        peak = tracker.get_tracker_snapshot("peak")
    return [sum(each["Total"] for each in found.values()) for found in (kept, peak)]


def measure(module, listed, x, rounds):
    """
    ## Medians of plain and injected times, sorted ratios, and the memory of both
    """
    pair = [module, inject(copy.deepcopy(module), listed)]
    for each in pair:
        step_time_ms(each, x)
    times = [[step_time_ms(each, x) for each in pair] for _ in range(rounds)]
    plain, injected = (statistics.median(column) for column in zip(*times, strict=True))
    ratios = sorted(after / before for before, after in times)
    return plain, injected, ratios, [memory_bytes(each, x) for each in pair]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("| | ms | injected | ratio | kept MB | injected | peak MB | injected |")
    print("|---" * 8 + "|")
    for name, module, listed, x in cases():
        if args.only in name:
            plain, injected, ratios, memory = measure(module, listed, x, args.rounds)
            quarter = len(ratios) // 4
            (kept, peak), (kept_by_ours, peak_of_ours) = [
                [nbytes / 1e6 for nbytes in each] for each in memory]
            print(f"| {name} | {plain:.1f} | {injected:.1f} | {statistics.median(ratios):.2f} "
                  f"({ratios[quarter]:.2f}-{ratios[-1 - quarter]:.2f}) | {kept:.1f} | "
                  f"{kept_by_ours:.1f} | {peak:.1f} | {peak_of_ours:.1f} |", flush=True)


if __name__ == "__main__":
    main()

r"""
# Benchmark of compiled models: beside hooks, and beside FSDP2 with `torch.compile`

Trains the benchmark's model, and a model of many small layers, by `compile` and by its peers.

| peer | who gathers | who computes |
|---|---|---|
| zero3 | the hooks of a chain | PyTorch |
| wrap | the hooks of units | PyTorch |
| wrap-units | the same, small layers in one unit | PyTorch |
| compile-eager | graphs | PyTorch, operation by operation |
| compile-units | the same, small layers in one unit | the same |
| compile | graphs | Inductor |
| fsdp2 | the hooks of `fully_shard` | PyTorch |
| fsdp2-compile | the same | Inductor, for each block |
| ddp | nobody | PyTorch |

`fsdp2-compile` compiles each block and then shards it, as
[torchtitan](https://github.com/pytorch/torchtitan) does. So Inductor sees the same operations
there: all of a block, and no communication.

The second case is about fixed costs. 100 layers of 64 x 64 weights have 416,000 parameters, so
their bytes and their operations take next to no time. With $t$ seconds for a collective and $h$
seconds for what a layer costs besides, a step of $L$ layers in $b$ units takes about

$$3\, b\, t + L\, h$$

Alone, $b = L = 100$. In shared units of 1 MiB $b = 2$, and $h$ is left. In graphs, most of $h$ is
spent once for each unit.

Each peer has a folder of its own for what Inductor compiles. In the first round that folder is
empty. The next rounds find there what the first one has compiled. So the results have the seconds
of the first step twice: with an empty folder, and as the median of all rounds.

**Run this**: `make bench ARGS=--compile`; `make bench ARGS="--compile --cases small-layers"` takes
a minute.

**Not covered, and what that costs**: the time of the first step includes tracing and compiling, and
not the import of the compiler, which takes seconds. The two ranks share the cores, so nothing
overlaps here: a compiled step wins what it sends and calls less.
"""

import argparse
import os
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import mean, median

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import zero3
from tests.bench import training as bench
from tests.bench.training import (
    Block,
    Embed,
    compare,
    loopback_bytes,
    measure_training,
    play,
    summarize,
    table,
)
from tests.ranks import run
from zero3 import Zero3Optimizer

# Rows of a rank in a step of the small layers.
ROWS = 16
# Who takes part in each case. Inductor has nothing to fuse in a small layer.
GPT_PEERS = ("zero3", "wrap", "compile-eager", "compile", "fsdp2", "fsdp2-compile", "ddp")
SMALL_PEERS = ("wrap", "wrap-units", "compile-eager", "compile-units", "fsdp2", "ddp")
PAIRS = (("compile", "fsdp2-compile"), ("compile", "compile-eager"), ("compile", "wrap"),
         ("compile", "ddp"), ("compile-eager", "wrap"), ("compile-eager", "wrap-units"),
         ("compile-eager", "fsdp2"), ("compile-eager", "ddp"), ("compile-units", "ddp"),
         ("compile-units", "compile-eager"), ("wrap", "ddp"),
         ("wrap-units", "ddp"), ("wrap-units", "wrap"), ("fsdp2-compile", "fsdp2"),
         ("fsdp2", "ddp"))


def compare_compiled(args):
    """
    ## The rounds of each case, and tables of medians and ratios
    """
    ways = {"gpt": (run_gpt, GPT_PEERS), "small-layers": (run_small, SMALL_PEERS)}
    cases = {}
    for name in args.cases:
        run_peer, known = ways[name]
        peers = [peer for peer in args.peers if peer in known]
        print(f"\n{name}")
        with tempfile.TemporaryDirectory() as folder:
            case = argparse.Namespace(**{**vars(args), "peers": peers, "cache": folder})
            rounds = play(case, run_peer)
        found = compare(rounds, peers, PAIRS)
        print("\n" + table(found["medians"], found["ratios"]))
        first_s = {peer: row["first_s"] for peer, row in rounds[0].items()}
        print("The first step, with nothing compiled before: "
              + ", ".join(f"{peer} {seconds:.1f} s" for peer, seconds in first_s.items()))
        cases[name] = {"rounds": rounds, **found, "first_s": first_s}
    return {"cases": cases}


# --------------------------------------------------------------------------------------------- GPT


def run_gpt(peer, args):
    """
    ## One run of a peer with the benchmark's model, in one row
    """
    ranks = run(measure_gpt, args.ranks, peer, args, fresh=True, timeout_s=1800)
    row = summarize(ranks, args)
    row["wire_bytes"] = ranks[0]["counted_bytes"] / args.ranks / args.steps
    row["wire_psi"] = row["wire_bytes"] / ranks[0]["psi_bytes"] * args.ranks / (args.ranks - 1)
    return {**row, "first_s": max(rank["warmup_s"][0] for rank in ranks)}


def measure_gpt(peer, args):
    """
    ## What one rank of one peer measures
    """
    use_cache(peer, args)
    return measure_training(partial(build_gpt, peer), args, torch.device("cpu"), loopback_bytes)


def use_cache(peer, args):
    """
    ## Let Inductor keep what it compiles in the peer's own folder
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(args.cache, peer))


def build_gpt(peer, layers, device):
    """
    ## A peer's model and its optimizer
    """
    # A model that ran before, with other shapes, would make Dynamo take these for dynamic ones.
    torch.compiler.reset()
    if peer.startswith("compile"):
        return compiled(peer, nn.Sequential(*layers), (Embed, Block))
    if peer == "fsdp2-compile":
        layers = [torch.compile(layer, fullgraph=True) if isinstance(layer, Block) else layer
                  for layer in layers]
    return bench.wrap(peer, layers, device)


def compiled(peer, whole, layer_classes):
    """
    ## Our compiled model and its optimizer
    """
    backend = "inductor" if peer == "compile" else "aot_eager"
    # As many bytes as share a bucket.
    unit_bytes = 1 << 20 if peer == "compile-units" else 0
    model = zero3.compile(whole, layer_classes, backend=backend, unit_bytes=unit_bytes)
    return model, Zero3Optimizer(model, lr=1e-3, eps=1e-3)


# ------------------------------------------------------------------------------------ small layers


def run_small(peer, args):
    """
    ## One run of a peer with many small layers, in one row
    """
    ranks = run(measure_small, args.ranks, peer, args, fresh=True, timeout_s=1800)
    row = {
        "step_ms": 1e3 * max(median(rank["step_s"]) for rank in ranks),
        "first_s": max(rank["first_s"] for rank in ranks),
        "cpu_s": sum(rank["cpu_s"] for rank in ranks) / args.steps,
        "losses": [mean(step) for step in zip(*(rank["losses"] for rank in ranks), strict=True)],
    }
    row["wire_bytes"] = ranks[0]["counted_bytes"] / args.ranks / args.steps
    return {**row, "loss": row["losses"][-1], "ranks": ranks}


def measure_small(peer, args):
    """
    ## What one rank measures with many small layers
    """
    use_cache(peer, args)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(args.width, args.width), nn.ReLU())
              for _ in range(args.layers)]
    model, optimizer = build_small(peer, layers)
    rows = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses, step_s = [], []
    for step in range(args.warmup + args.steps):
        if step == args.warmup:
            sent_bytes = loopback_bytes()
            cpu_s = time.process_time()
        x = torch.randn(ROWS, args.width, generator=rows)
        start_s = time.perf_counter()
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        step_s.append(time.perf_counter() - start_s)
    return {"first_s": step_s[0], "step_s": step_s[args.warmup :], "losses": losses,
            "cpu_s": time.process_time() - cpu_s, "counted_bytes": loopback_bytes() - sent_bytes}


def build_small(peer, layers):
    """
    ## A peer's model of small layers
    """
    whole = nn.Sequential(*layers)
    if peer.startswith("compile"):
        return compiled(peer, whole, (nn.Linear,))
    if peer.startswith("wrap"):
        unit_bytes = 1 << 20 if peer == "wrap-units" else 0
        model = zero3.wrap(whole, (nn.Linear,), unit_bytes=unit_bytes)
        return model, Zero3Optimizer(model, lr=1e-3, eps=1e-3)
    if peer == "fsdp2":
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        for layer in layers:
            fully_shard(layer[0])
        fully_shard(whole)
        model = whole
    else:
        model = nn.parallel.DistributedDataParallel(whole, gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, fused=True)

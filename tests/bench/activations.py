r"""
# Benchmark of activations: they stay, are computed again, or rest in files

Trains the benchmark's GPT on one rank, with long sequences, and measures the time of a step and the
most memory above that at its start. All peers train in one process and take turns step by step,
because the machine and its disk are faster in one minute than in the next. Ratios are taken within
a turn.

| peer | between forward and backward a block's activations |
|---|---|
| plain | stay |
| files | are in files, but for the last block |
| recompute | are gone, but for its input; backward computes the block again |
| recompute-files | are gone, and its input is in a file |
| save-on-cpu | stay: `torch.autograd.graph.save_on_cpu` moves nothing from the CPU |

Files take no time if the disk is quick enough. A block with $F$ floating-point operations and $A$
bytes of activations, on a machine with $f$ operations and $b$ bytes in a second, takes

$$t_\text{recompute} = \frac{4F}{f} \qquad
t_\text{files} = \frac{F}{f} + \max\Big(\frac{2F}{f}, \frac{A}{b}\Big) + \dots$$

**Run this**: `python -m tests.bench.activations --folder DIR`; with `--below` it measures from
which size on it pays to move a storage.

**Not covered, and what that costs**: accelerators, several ranks. On the CPU, DeepSpeed's
`cpu_checkpointing` is recomputation, because the inputs that it moves are there already. The
threads that move blocks need a core. If all cores compute, they take time from the computation.
"""

import argparse
import ctypes
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.bench.training import (
    Block,
    Memory,
    batches,
    compare,
    digests,
    gpt,
    machine,
    table,
    train_step,
    write,
)
from tests.ranks import run
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.offload.activations import Activations

PEERS = ("plain", "files", "recompute", "recompute-files", "save-on-cpu")
PAIRS = (("files", "recompute"), ("files", "plain"), ("recompute", "plain"),
         ("recompute-files", "recompute"), ("recompute-files", "files"),
         ("save-on-cpu", "plain"))
# What of the package the figures are of.
TIMED = [f"zero3/offload/{name}.py" for name in ("activations", "disk", "in_file")]
# Bytes of a storage, and of all storages of a layer.
SIZES = [1 << power for power in range(14, 23)]
LAYER_BYTES = 4 << 20


class Recomputed(nn.Module):
    """
    ## A block that backward computes again
    """

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=False)


class Around(nn.Module):
    """
    ## A layer whose forward runs `with context():`
    """

    def __init__(self, layer, context):
        super().__init__()
        self.layer = layer
        self.context = context

    def forward(self, x):
        with self.context():
            return self.layer(x)


def build(peer, folder, layers):
    """
    ## A peer's model and its optimizer
    """
    if peer.startswith("recompute"):
        layers = [Recomputed(layer) if isinstance(layer, Block) else layer for layer in layers]
    if peer == "save-on-cpu":
        layers = [Around(layer, torch.autograd.graph.save_on_cpu) for layer in layers]
    where = Offload("nvme", folder) if "files" in peer else None
    model = Zero3Sequential([Zero3Layer(layer, activations=where) for layer in layers])
    return model, Zero3Optimizer(model, lr=1e-3, eps=1e-3)


def measure(args):
    """
    ## A step of each peer, one after the other, again and again

    Returns for each repetition, and each peer, the time of the step, the most memory above that at
    its start, and the loss.
    """
    torch.set_num_threads(args.threads)
    # Freed tensors go back to the system at once. Otherwise the peak would be the allocator's.
    ctypes.CDLL(None).mallopt(-3, 131072)
    device = torch.device("cpu")
    rounds = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        trained = {peer: build(peer, folder, gpt(args.dim, args.blocks, args.heads, args.seq))
                   for peer in args.peers}
        windows = batches(args, device)
        for i in range(args.rounds + 1):
            window = next(windows)
            row = {}
            for k in range(len(args.peers)):
                peer = args.peers[(i + k) % len(args.peers)]
                memory = Memory(device)
                with memory:
                    start_s = time.perf_counter()
                    loss = train_step(*trained[peer], window)
                    took_ms = 1000 * (time.perf_counter() - start_s)
                row[peer] = {"step_ms": took_ms, "peak_bytes": memory.peak_bytes, "loss": loss}
            # The first one makes files and moments.
            if i:
                rounds.append(row)
                told = ", ".join(f"{peer} {each['step_ms']:.0f} ms" for peer, each in row.items())
                print(f"round {i} of {args.rounds}: {told}", flush=True)
    return rounds


# ------------------------------------------------------------------------------- small storages


class Saves(nn.Module):
    """
    ## Saves its results, each in a storage of its own
    """

    def __init__(self, count):
        super().__init__()
        self.count = count
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x):  # [numel]
        return torch.cat([piece.tanh() for piece in (x + self.shift).chunk(self.count)])


def measure_sizes(args):
    """
    ## For each size the milliseconds that a MiB takes to leave and to come back

    Returns for each repetition the difference to a step in which all stays, just before it.
    """
    torch.set_num_threads(args.threads)
    x = torch.ones(LAYER_BYTES // 4, requires_grad=True)
    files = Offload("nvme", args.folder)
    pairs = {}
    for size in SIZES:
        pairs[size] = [
            Zero3Sequential([Zero3Layer(Saves(LAYER_BYTES // size), activations=where)
                             for _ in range(4)])
            for where in (None, Activations(files, below_bytes=0))]
    found = {size: [] for size in SIZES}
    for repeat in range(args.rounds + 1):
        for size, pair in pairs.items():
            took_ms = []
            for model in pair:
                start_s = time.perf_counter()
                model(x).sum().backward()
                took_ms.append(1000 * (time.perf_counter() - start_s))
            # The first one makes the files. Three layers leave.
            if repeat:
                found[size].append((took_ms[1] - took_ms[0]) / (3 * LAYER_BYTES / 2**20))
    return found


def show_sizes(found):
    """
    ## A row for each size

    Other work on the machine only adds to a time, so the least one says what a size takes by
    itself.
    """
    rows = {}
    print(f"{'KiB':>8}{'ms per MiB, least':>20}{'median':>10}{'ms per storage, least':>24}")
    for size, each in found.items():
        rows[size] = {"least": min(each), "median": median(each), "most": max(each)}
        print(f"{size >> 10:>8}{min(each):>20.2f}{median(each):>10.2f}"
              f"{min(each) * size / 2**20:>24.3f}")
    return rows


def main(argv=None):
    """
    ## The command line
    """
    parser = argparse.ArgumentParser(prog="python -m tests.bench.activations",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--folder", required=True, help="on the disk that takes the activations")
    add("--dim", type=int, default=512, help="features of a position")
    add("--blocks", type=int, default=8, help="transformer blocks")
    add("--heads", type=int, default=8, help="attention heads of a block")
    add("--seq", type=int, default=2048, help="bytes in a sequence")
    add("--batch", type=int, default=1, help="sequences in a step")
    add("--rounds", type=int, default=9, help="steps of each peer")
    add("--threads", type=int, default=1, help="cores that compute")
    add("--peers", nargs="+", choices=PEERS, default=PEERS, help="who takes part")
    add("--below", action="store_true", help="measure small storages")
    add("--out", type=Path, default=Path("runs/activations.json"), help="results file")
    args = parser.parse_args(argv)
    args.ranks = 1
    settings = vars(args)
    if args.below:
        (found,) = run(measure_sizes, 1, args, fresh=True, timeout_s=1800)
        results = {"sizes": show_sizes(found)}
    else:
        (rounds,) = run(measure, 1, args, fresh=True, timeout_s=1800)
        found = compare(rounds, args.peers, PAIRS)
        print("\n" + table(found["medians"], found["ratios"]))
        results = {"rounds": rounds, **found}
    write(args, {"machine": machine(argparse.Namespace(gpu=False)), "settings": settings,
                 "code": digests(TIMED), **results})


if __name__ == "__main__":
    main()

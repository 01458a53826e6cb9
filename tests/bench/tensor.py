r"""
# Benchmark of tensor parallelism: beside torch's own

Trains a small Llama on two ranks, split by `policies.tensor_parallel` and by
`torch.distributed.tensor.parallel`, by turns in one run.

Both split the same layers in the same way: attention by heads, the network by features, embedding
and head by tokens. Torch's plan is that of its tutorial, for the names of Hugging Face's modules.
Ratios are of neighbouring steps; the range has the middle half of them. Losses of both are compared
with each other. The peak is the most that the tensors of a rank take at once in a forward and a
backward, as torch's `MemTracker` counts it, above those before.

**Run this**: `python -m tests.bench.tensor --out docs/tensor.json` writes what the chapter's table
is made of.

**Not covered, and what that costs**: two ranks on the cores of one machine, so communication is a
copy in memory.
"""

import argparse
import copy
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.bench.training import digests, machine, write
from tests.ranks import run
from zero3.inject import inject, policies

# What of the package the figures are of.
TIMED = [f"zero3/inject/{name}.py" for name in (
    "line", "sequence", "tensor", "policies", "cross_entropy")]


def llama(args):
    # Seconds to import.
    import transformers

    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=args.width, intermediate_size=args.width * 8 // 3,
        num_hidden_layers=args.layers, num_attention_heads=4, num_key_value_heads=4,
        tie_word_embeddings=False))


def torch_split(model, mesh):
    """
    ## The model, split by torch
    """
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    return parallelize_module(model, mesh, {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate())})


def measure(args):
    """
    ## Times of all steps, for each peer, losses and peaks
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    plain = llama(args)
    peers = {"torch": torch_split(copy.deepcopy(plain), mesh)}
    several = [policies.rms_norm(), policies.swiglu(), policies.cross_entropy(rows=args.length)]
    for name, more, sequence in (("zero3", [], False), ("zero3, by positions", [], True),
                                 ("zero3, with policies", several, False)):
        peers[name] = inject(copy.deepcopy(plain), [
            *more, policies.tensor_parallel(mesh, sequence=sequence)])
    optimizers = {name: torch.optim.SGD(peer.parameters(), lr=0.1) for name, peer in peers.items()}
    times = {name: [] for name in peers}
    losses = {name: [] for name in peers}
    for step in range(args.steps + 2):
        ids = torch.randint(args.vocabulary, (args.batch, args.length),
                            generator=torch.Generator().manual_seed(step))
        for name, peer in peers.items():
            dist.barrier()
            begin = time.perf_counter()
            loss = peer(ids, labels=ids).loss
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            times[name].append(time.perf_counter() - begin)
            losses[name].append(loss.item())
    peaks = {name: peak_bytes(peer, ids) for name, peer in peers.items()}
    return {name: each[2:] for name, each in times.items()}, losses, peaks


def peak_bytes(peer, ids):
    """
    ## The most that exists at once in a forward and a backward
    """
    tracker = MemTracker()
    with tracker:
        peer(ids, labels=ids).loss.backward()
        peak = tracker.get_tracker_snapshot("peak")
    return sum(each["Total"] for each in peak.values())


def row_of(name, times, losses, peaks, tokens):
    """
    ## A row: the time of a step, its ratio to torch's, and the peak
    """
    worst = max(abs(a - b) for a, b in zip(losses[name], losses["torch"], strict=True))
    assert worst < 1e-3, (name, worst)
    ratios = sorted(a / b for a, b in zip(times[name], times["torch"], strict=True))
    quarter = len(ratios) // 4
    median_s = statistics.median(times[name])
    return {"ms": 1000 * median_s, "tokens_per_s": tokens / median_s,
            "ratio": [statistics.median(ratios), ratios[quarter], ratios[-1 - quarter]],
            "peak_bytes": peaks[name]}


def main():
    """
    ## The command line
    """
    parser = argparse.ArgumentParser(prog="python -m tests.bench.tensor")
    for name, value in (("steps", 15), ("layers", 4), ("width", 256), ("batch", 4),
                        ("length", 128), ("vocabulary", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=Path("runs/tensor.json"), help="results file")
    args = parser.parse_args()
    measured = run(measure, 2, args, fresh=True, timeout_s=900)[0]
    rows = {name: row_of(name, *measured, args.batch * args.length) for name in measured[0]}
    print("| | ms | ratio to torch | tokens/s | peak MB |\n|---|---|---|---|---|")
    for name, row in rows.items():
        median, least, most = row["ratio"]
        print(f"| {name} | {row['ms']:.0f} | {median:.2f} ({least:.2f}-{most:.2f}) | "
              f"{row['tokens_per_s']:,.0f} | {row['peak_bytes'] / 1e6:.1f} |")
    write(args, {"machine": machine(argparse.Namespace(gpu=False)), "settings": vars(args),
                 "code": digests(TIMED), "rows": rows})


if __name__ == "__main__":
    main()

r"""
# Benchmark of tensor parallelism: beside torch's own

Trains a small Llama on two ranks, split by `policies.tensor_parallel` and by
`torch.distributed.tensor.parallel`, by turns in one run.

Both split the same layers in the same way: attention by heads, the network by features, embedding
and head by tokens. Torch's plan is that of its tutorial, for the names of Hugging Face's modules.
Ratios are of neighbouring steps; the range has the middle half of them. Losses of both are compared
with each other.

**Run this**: `python -m tests.bench_tensor`.

**Not covered, and what that costs**: two ranks on the cores of one machine, so communication is a
copy in memory.
"""

import argparse
import copy
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.ranks import run
from zero3.inject import inject, policies

sys.modules.setdefault("torchvision", None)


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
    ## Times of all steps, for each peer, and losses
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    plain = llama(args)
    peers = {"torch": torch_split(copy.deepcopy(plain), mesh)}
    for name, more in (("zero3", []), ("zero3, with policies", [
            policies.rms_norm(), policies.swiglu(), policies.cross_entropy(rows=args.length)])):
        peers[name] = inject(copy.deepcopy(plain), [*more, policies.tensor_parallel(mesh)])
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
    return {name: each[2:] for name, each in times.items()}, losses


def main():
    parser = argparse.ArgumentParser()
    for name, value in (("steps", 15), ("layers", 4), ("width", 256), ("batch", 4),
                        ("length", 128), ("vocabulary", 4096)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    times, losses = run(measure, 2, args, fresh=True, timeout_s=900)[0]
    print("| | ms | ratio to torch | tokens/s |\n|---|---|---|---|")
    for name, each in times.items():
        ratios = sorted(a / b for a, b in zip(each, times["torch"], strict=True))
        quarter = len(ratios) // 4
        median_s = statistics.median(each)
        print(f"| {name} | {1000 * median_s:.0f} | {statistics.median(ratios):.2f} "
              f"({ratios[quarter]:.2f}-{ratios[-1 - quarter]:.2f}) | "
              f"{args.batch * args.length / median_s:,.0f} |")
        worst = max(abs(a - b) for a, b in zip(losses[name], losses["torch"], strict=True))
        assert worst < 1e-3, (name, worst)


if __name__ == "__main__":
    main()

r"""
# Benchmark of pipelines: beside torch's own

Trains the benchmark's model in stages, by `Pipeline` and by `torch.distributed.pipelining`, with
the same cut, schedule and micro-batches.

Two pipelines of two stages take four ranks. Two ranks share each stage, and each peer has another
way to do that:

| peer | a stage is | gathered in a step | a rank sends, besides activations |
|---|---|---|---|
| zero3 | sharded, `gathers="stage"` | once | $2 S$ |
| zero3-each | sharded, `gathers="each"` | $2m$ times | $(2m + 1) S$ |
| zero3-step | sharded, `gathers="step"`, whole also while another stage computes | once | $2 S$ |
| plain | whole, on one rank | | |
| ddp | whole on each rank | | $2 S$, around a ring |
| fsdp2 | sharded, `reshard_after_forward=False` | once | $3 S$ |
| fsdp2-each | sharded, `reshard_after_forward=True` | $m + 1$ times | $(m + 3) S$ |

$m$ is the number of micro-batches, and $S$ the bytes that a rank lacks of its stage. With $\Psi$
bytes of parameters on $p$ stages of $N$ shards each

$$S = \frac{\Psi}{p} \cdot \frac{N - 1}{N}$$

With 44 MB of parameters, two stages and two shards, that is 11 MB. gloo's reduce-scatter sends
$2 S$, and ours $S$. Each micro-batch also sends its activations to the next stage and their
gradients back, which is the same for all peers.

Torch's `PipelineStage` keeps the layers of FSDP2 whole after a backward pass, until the next
forward pass has ended. So `fsdp2-each` gathers a stage $m + 1$ times and not $2m$ times. `fsdp2` is
the faster setting, which torchtitan also takes for pipelines. All of torch's peers accumulate
gradients and reduce them after the last micro-batch, as we do. They know all shapes from the
beginning, and keep no outputs.

The rounds and the ratios are as in `training.py`. Bytes are the loopback's own count.

**Run this**: `make bench ARGS=--pipeline`; `make bench ARGS="--pipeline --shards 2 --schedules
interleaved"` has two stages on each rank.

**Not covered, and what that costs**: all ranks share the cores of one machine. A rank that waits in
a bubble leaves its core to another one, so four ranks on two cores hardly notice the bubble. Our
`train_batch` returns the mean loss on all ranks, for which all of them wait for each other; torch's
loss is on the last stage alone.
"""

import argparse
import warnings
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from torch.nn import functional as F

from tests.bench.training import compare, loopback_bytes, measure_training, play, summarize, table
from tests.ranks import run
from zero3 import Zero3Optimizer
from zero3.pipeline import Pipeline
from zero3.pipeline.stages import balanced

# Ranks of a pipeline.
PLACES = 2
# Torch's class of each schedule, and the stages on each rank.
SCHEDULES = {"1f1b": (Schedule1F1B, 1), "gpipe": (ScheduleGPipe, 1),
             "interleaved": (ScheduleInterleaved1F1B, 2)}
PAIRS = (("zero3", "plain"), ("zero3", "ddp"), ("zero3", "fsdp2"), ("zero3", "fsdp2-each"),
         ("zero3-each", "fsdp2-each"), ("zero3-each", "zero3"), ("zero3-step", "ddp"),
         ("zero3-step", "fsdp2"))


def compare_pipelines(args):
    """
    ## The rounds of each schedule and layout, and tables of medians and ratios
    """
    cases = {}
    for schedule in args.schedules:
        for shards in args.shards:
            name = f"{schedule}, {PLACES} x {shards}"
            print(f"\n{name} ranks, {args.micro_batches} micro-batches")
            # Without a wrapper nobody reduces the gradients of several shards.
            peers = [peer for peer in args.peers if peer != "plain" or shards == 1]
            case = argparse.Namespace(**{
                **vars(args), "schedule": schedule, "shards": shards, "ranks": PLACES * shards,
                "peers": peers})
            rounds = play(case, run_pipeline, reference="zero3")
            found = compare(rounds, peers, PAIRS)
            print("\n" + table(found["medians"], found["ratios"]))
            cases[name] = {"rounds": rounds, **found}
    return {"cases": cases}


def run_pipeline(peer, args):
    """
    ## One run of a peer, in one row
    """
    ranks = run(measure_pipeline, args.ranks, peer, args, fresh=True, timeout_s=1800)
    # Torch's loss is on the ranks of the last stage.
    for place, rank in enumerate(ranks):
        rank["losses"] = ranks[place % args.shards - args.shards]["losses"]
    # The ranks of a pipeline see the same tokens.
    row = summarize(ranks, argparse.Namespace(**{**vars(args), "ranks": args.shards}))
    row["wire_bytes"] = ranks[0]["counted_bytes"] / args.ranks / args.steps
    return row


def measure_pipeline(peer, args):
    """
    ## What one rank of one peer measures
    """
    mesh = init_device_mesh("cpu", (PLACES, args.shards), mesh_dim_names=("pipeline", "shard"))
    make = zero3_pipeline if peer.startswith("zero3") else torch_pipeline
    return measure_training(partial(make, peer, args, mesh), args, torch.device("cpu"),
                            loopback_bytes, train_step, mesh.get_local_rank("shard"))


def train_step(model, optimizer, windows):
    # Some versions of torch's pipeline take no views.
    loss = model.train_batch(
        windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def loss_of(output, y):
    return F.cross_entropy(output.flatten(0, 1), y.flatten())


def cut(layers, args):
    """
    ## The number of layers of each stage
    """
    return balanced(layers, PLACES * SCHEDULES[args.schedule][1])


# ------------------------------------------------------------------------------------------- peers


def zero3_pipeline(peer, args, mesh, layers, device):
    """
    ## Our pipeline and its optimizer
    """
    gathers = "stage" if peer == "zero3" else peer.removeprefix("zero3-")
    model = Pipeline(layers, mesh, loss_fn=loss_of, schedule=args.schedule,
                     micro_batches=args.micro_batches, stages=cut(layers, args), gathers=gathers,
                     per_rank=SCHEDULES[args.schedule][1])
    return model, Zero3Optimizer(model, lr=1e-3, eps=1e-3)


def torch_pipeline(peer, args, mesh, layers, device):
    """
    ## Torch's pipeline and its optimizer
    """
    kind, per_rank = SCHEDULES[args.schedule]
    counts = cut(layers, args)
    stages = []
    for index in range(mesh.get_local_rank("pipeline"), len(counts), PLACES):
        begin = sum(counts[:index])
        own = layers[begin : begin + counts[index]]
        ends = [boundary(args, layers, i, len(counts)) for i in (index, index + 1)]
        module = wrap_stage(peer, own, mesh["shard"])
        stages.append(PipelineStage(module, index, len(counts), device, *ends,
                                    group=mesh.get_group("pipeline")))
    schedule = kind(stages if per_rank > 1 else stages[0], args.micro_batches, loss_fn=loss_of)
    params = [p for stage in stages for p in stage.submod.parameters()]
    return TorchPipeline(schedule, stages), torch.optim.AdamW(params, lr=1e-3, eps=1e-3, fused=True)


def wrap_stage(peer, layers, mesh):
    """
    ## A stage as a peer shares it
    """
    whole = nn.Sequential(*layers)
    if peer == "plain":
        return whole
    if peer == "ddp":
        return nn.parallel.DistributedDataParallel(
            whole, process_group=mesh.get_group(), gradient_as_bucket_view=True)
    # The head's logits are a view; nothing here writes into them.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    for module in (*layers, whole):
        fully_shard(module, mesh=mesh, reshard_after_forward=peer == "fsdp2-each")
    return whole


def boundary(args, layers, index, count):
    """
    ## A tensor like those before stage `index`, so that torch knows all shapes beforehand
    """
    shape = (args.batch // args.micro_batches, args.seq)
    if index == 0:
        return torch.zeros(shape, dtype=torch.int64)
    dim = layers[0].tokens.embedding_dim if index < count else 256
    return torch.zeros(*shape, dim, requires_grad=True)


class TorchPipeline:
    """
    ## Torch's schedule with the call of ours
    """

    def __init__(self, schedule, stages):
        self.schedule = schedule
        self.has_first = any(stage.is_first for stage in stages)
        self.has_last = any(stage.is_last for stage in stages)

    def train_batch(self, x, y, optimizer):
        """
        ### Forward and backward of all micro-batches

        Returns the mean loss of these rows on the last stage, and `None` elsewhere.
        """
        losses = []
        inputs = (x,) * self.has_first
        target = y if self.has_last else None
        self.schedule.step(*inputs, target=target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().item() if self.has_last else None

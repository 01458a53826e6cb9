r"""
# The ladder: from one process to offload, with equal losses

Seven ways to train a small GPT on the same batches. From rung to rung the memory on the device
shrinks or stays equal, and the losses are the same.

The *model states* in training are the parameters, their gradients, and the optimizer's moments. In
fp32 with Adam they are $4 + 4 + 8$ bytes for each of the $\Psi$ parameters. In plain data parallel
training every rank has all of them. Each of the next three rungs cuts one more of them into $N$
shards, and the last two move the shards off the device:

$$16\Psi \;\to\; 8\Psi + \frac{8\Psi}{N} \;\to\; 4\Psi + \frac{12\Psi}{N} \;\to\;
\frac{16\Psi}{N} \;\to\; 0$$

The arithmetic does not change. The sum of two gradients does not depend on their order, so on two
ranks the losses of all rungs are bitwise equal. So are the weights, if the same kind of processor
runs all optimizer steps. A single process computes the mean over the whole batch directly, not as a
mean of two means, so its last bits differ.

| rung | difference from the previous one |
|---|---|
| one process | plain PyTorch, to compare with |
| DDP | an all-reduce of the gradients |
| ZeRO-1 | each rank updates its share of the parameters, and an all-gather distributes them |
| ZeRO-2 | gradients are reduced layer by layer, and freed |
| ZeRO-3 | parameters are gathered layer by layer, and freed |
| ZeRO-3, CPU | shards and states are stored in CPU memory |
| ZeRO-3, NVMe | shards and states are stored in files |

**On two nodes.** Four more runs, on four ranks, are about the bytes between nodes of two ranks:

| rung | how layers travel |
|---|---|
| flat | each rank sends its shard to all others, wherever they are |
| nodes | it sends the shard to the other node once, and the shard is passed on there |
| hybrid | each node has a replica, so only gradients go to the other node |
| ZeRO++ | like nodes, with a copy until backward, 8-bit weights and 4-bit gradients |

**Compiled.** Two more runs, on two ranks, let a compiler decide when layers are gathered:

| rung | how many layers may be full at once |
|---|---|
| ZeRO-3, compiled | two of the largest, as many as with hooks |
| with more room | five of the largest |

The sum of four gradients depends on their order. Flat adds them rank by rank. Nodes and hybrid both
add inside each node first, so these two have the same bits. ZeRO++ rounds.

**Run this**: `python -m docs.ladder`; with `--out FILE` it also writes the figures as JSON.

**Not covered, and what that costs**: activations, which no rung shards, and temporary memory inside
of an optimizer step. The table is smaller than the real peak by these. ZeRO-1 and ZeRO-2 are
implemented here as briefly as possible, so their communication does not overlap computation.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from zero3 import (
    Int4,
    Int8,
    Links,
    Offload,
    Zero3Layer,
    Zero3Optimizer,
    Zero3Sequential,
    commit_name,
    compile,
)
from zero3.comm.collectives import all_gather_single, reduce_scatter_single
from zero3.estimate.ledger import Ledger, disk_bytes, held_bytes
from zero3.train import launch
from zero3.train.gpt import GPTConfig, global_batch, gpt_layers, load_bytes, next_byte_loss

RANKS = 2
NODES = 2  # of so many ranks each, for the second table
STEPS = 5
ROWS = 4  # of the global batch
CONFIG = GPTConfig(seq_len=32, d_model=64, n_layers=6, d_ff=128)
# With an epsilon this large, Adam's result depends on the size of the gradient, so an error shows.
# `fused` is off because the fused loop rounds the last few elements of a tensor differently, and
# shards do not end where tensors end.
ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "fused": False}


# ------------------------------------------------------------------------------------------- rungs


class Single:
    """
    ## Rung 0: one process, plain PyTorch
    """

    sharded = "nothing"
    rests = "device"
    sent_by = "nothing"
    sharers = 1  # the number of ranks that share the batch
    sent_bytes = 0
    peak_bytes = 0

    def __init__(self, layers: list[nn.Module]):
        self.plain = nn.Sequential(*layers)
        self.model: nn.Module = self.plain
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), **ADAM)

    def step(self, windows: torch.Tensor) -> torch.Tensor:
        """
        #### A training step, the same on all rungs
        """
        loss = next_byte_loss(self.model, windows)
        self.backward(loss)
        self.update()
        # Gradients exist until `zero_grad()`, so this is the highest level of a plain rung. Other
        # rungs also note their temporary buffers.
        self.note(held_bytes(self.model, self.optimizer))
        return loss.detach()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()

    def note(self, live_bytes: int) -> None:
        """
        #### Update the peak memory of the device

        * `live_bytes` are the bytes of parameters, gradients and moments on all devices together
        """
        self.peak_bytes = max(self.peak_bytes, live_bytes - self.in_cpu())

    def in_cpu(self) -> int:
        """
        #### The bytes of these that are offloaded to CPU memory
        """
        return 0

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.plain.named_parameters()}


class DataParallel(Single):
    """
    ## Rung 1: DDP, everything on every rank

    Gradients are views of DDP's buckets. Otherwise it would hold a second copy, which we do not
    count.
    """

    sent_by = "formula"
    sharers = RANKS

    def __init__(self, layers: list[nn.Module]):
        super().__init__(layers)
        # A ring all-reduce of the gradients.
        self.sent_bytes = 2 * (RANKS - 1) * sum(p.nbytes for p in self.plain.parameters()) // RANKS
        self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)


class Flat:
    """
    ## A layer's parameters as views of one vector; this rank updates its part of it
    """

    def __init__(self, layer: nn.Module):
        self.params: Any = [*layer.parameters()]
        self.full = self.pad(parameters_to_vector(self.params).detach())
        vector_to_parameters(self.full, self.params)
        self.shard = nn.Parameter(self.mine(self.full))  # (shard_numel,), a view

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        return nn.functional.pad(flat, (0, -len(flat) % RANKS))

    def mine(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(RANKS, -1)[dist.get_rank()]


class Zero1(DataParallel):
    """
    ## Rung 2: ZeRO-1, a rank keeps the moments of its shards only

    Each rank updates its own shards, and an all-gather distributes the new parameters.
    """

    sharded = "moments"

    def __init__(self, layers: list[nn.Module]):
        self.flats = [Flat(layer) for layer in layers]
        self.plain = nn.Sequential(*layers)
        self.model = self.plain
        self.optimizer = torch.optim.AdamW([flat.shard for flat in self.flats], **ADAM)
        # A reduce-scatter and an all-gather.
        self.sent_bytes = 2 * (RANKS - 1) * sum(f.shard.nbytes for f in self.flats)

    def reduce(self, flat: Flat) -> torch.Tensor:
        """
        #### This rank's part of a layer's mean gradient (reduce-scatter), a view of the whole
        """
        grad = flat.pad(torch.cat([p.grad.flatten() for p in flat.params]))
        self.note(held_bytes(self.model, self.optimizer) + grad.nbytes)
        for p in flat.params:
            p.grad = None
        reduce_scatter_single(flat.mine(grad), grad.div_(RANKS))
        return flat.mine(grad)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        for flat in self.flats:
            flat.shard.grad = self.reduce(flat)

    def update(self) -> None:
        self.optimizer.step()
        for flat in self.flats:
            all_gather_single(flat.full, flat.mine(flat.full))


class Zero2(Zero1):
    """
    ## Rung 3: ZeRO-2, a rank also keeps the gradients of its shards only

    As soon as all gradients of a layer are ready, they are reduced and the full gradients are
    freed.
    """

    sharded = "moments, gradients"
    backward = Single.backward

    def __init__(self, layers: list[nn.Module]):
        super().__init__(layers)
        for flat in self.flats:
            for p in flat.params:
                p.register_post_accumulate_grad_hook(partial(self.arrive, flat))

    def arrive(self, flat: Flat, _: nn.Parameter) -> None:
        if all(p.grad is not None for p in flat.params):
            # Copy this rank's part, because a view would keep the whole gradient alive.
            flat.shard.grad = self.reduce(flat).clone()


class Zero3(DataParallel):
    """
    ## Rungs 4 to 6: ZeRO-3, parameters are sharded too; then everything is offloaded

    This is the package itself: `Zero3Layer` around each layer, `Zero3Optimizer` for the shards, and
    an `Offload` that selects their tier.
    """

    sharded = "moments, gradients, parameters"
    sent_by = "measured"

    def __init__(self, layers: list[nn.Module], offload: Offload | None = None, mesh: Any = None):
        self.sharers = dist.get_world_size()
        self.model = Zero3Sequential([Zero3Layer(layer, offload=offload, mesh=mesh)
                                      for layer in layers])
        # No buckets: a bucket of the default size would hold the gradients of several small layers.
        self.optimizer = Zero3Optimizer(self.model, bucket_bytes=0, offload=offload, **ADAM)
        self.rests = self.optimizer.offload.tier

    def backward(self, loss: torch.Tensor) -> None:
        self.optimizer.backward(loss)

    def in_cpu(self) -> int:
        """
        #### The bytes in CPU memory

        The optimizer holds everything that is offloaded: shards, gradients and moments, or the
        buffers between files and memory. They count as CPU memory even if the CPU is the device.
        """
        return held_bytes(self.optimizer) if self.rests != "device" else 0

    def weights(self) -> dict[str, torch.Tensor]:
        with self.model.full_params() as params:
            return {name: p.detach().clone() for name, p in params.items()}


class Compiled(Zero3):
    """
    ## ZeRO-3, compiled: passes over a graph of the step decide when layers are gathered

    * `room` is how many of the largest layers may be full at once
    """

    def __init__(self, layers: list[nn.Module], room: int = 2):
        self.sharers = dist.get_world_size()
        largest_numel = max(sum(p.numel() for p in layer.parameters()) for layer in layers)
        # No buckets, as on the rung that is compared with. Inductor would take minutes to compile.
        self.model = compile(nn.Sequential(*layers), backend="aot_eager", bucket_bytes=0,
                             limit_numel=room * largest_numel)
        self.optimizer = Zero3Optimizer(self.model, bucket_bytes=0, **ADAM)


class Tape(Ledger):
    """
    ## A ledger that updates the peak at each event; plain rungs have no events
    """

    rung: Single

    def record(self, *args: Any, **kwargs: Any) -> None:
        super().record(*args, **kwargs)
        self.rung.note(self.events[-1].live_bytes)


def rungs(folder: str) -> dict[str, Callable[[list[nn.Module]], Single]]:
    """
    ## The rungs in order; the last one writes its files to `folder`
    """
    return {"one process": Single, "DDP": DataParallel, "ZeRO-1": Zero1, "ZeRO-2": Zero2,
            "ZeRO-3": Zero3, "ZeRO-3, CPU": partial(Zero3, offload=Offload("cpu")),
            "ZeRO-3, NVMe": partial(Zero3, offload=Offload("nvme", folder))}


def rungs_compiled() -> dict[str, Callable[[list[nn.Module]], Single]]:
    """
    ## The compiled rungs, on two ranks
    """
    return {"ZeRO-3, compiled": Compiled, "with more room": partial(Compiled, room=5)}


def rungs_on_nodes() -> dict[str, Callable[[list[nn.Module]], Single]]:
    """
    ## The rungs on two nodes of two ranks: ZeRO-3, with fewer bytes between nodes on each
    """
    shape = (NODES, RANKS)
    replicas = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    nodes = init_device_mesh("cpu", shape, mesh_dim_names=("nodes", "shard"))
    rounded = Links(nodes, weights=Int8(), gradients=Int4(), secondary=True)
    return {"flat": Zero3, "nodes": partial(Zero3, mesh=nodes),
            "hybrid": partial(Zero3, mesh=replicas), "ZeRO++": partial(Zero3, mesh=rounded)}


# ------------------------------------------------------------------------------------------- climb


def train(rung: Single, data: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """
    ## Train on a rung; return its memory, its communication and its losses
    """
    losses = []
    tape = Tape(rung.model, rung.optimizer)
    tape.rung = rung
    for step in range(STEPS):
        batch = global_batch(data, step, ROWS, CONFIG.seq_len).to(device)
        with tape if step + 1 == STEPS else nullcontext():
            losses.append(rung.step(batch.chunk(rung.sharers)[dist.get_rank() % rung.sharers]))
        rest_bytes = held_bytes(rung.model, rung.optimizer)
        cpu_bytes = rung.in_cpu()
        rung.optimizer.zero_grad()
    # Take the mean over ranks. If each rank has the whole batch, this changes nothing.
    means = torch.stack(losses) / dist.get_world_size()
    dist.all_reduce(means)
    return {"sharded": rung.sharded, "rests": rung.rests,
            "device_rest_bytes": rest_bytes - cpu_bytes, "cpu_bytes": cpu_bytes,
            "device_peak_bytes": rung.peak_bytes,
            "file_bytes": disk_bytes(rung.model, rung.optimizer), "losses": means.tolist(),
            "sent_bytes": rung.sent_bytes or tape.sent_bytes, "sent_by": rung.sent_by,
            "between_bytes": tape.between_bytes,
            "gathers": sum(e.event == "fetch" for e in tape.events)}


def climb_rank(folder: str) -> dict[str, Any]:
    """
    ## Train on every rung, on this rank
    """
    compiled = rungs_compiled()
    rows, params = train_all({**rungs(folder), **compiled}, "DDP")
    return {"params": params, "ranks": RANKS, "steps": STEPS, "layers": CONFIG.n_layers + 2,
            "device": launch.my_device().type, "rows": rows[: -len(compiled)],
            "compiled": rows[-len(compiled) :]}


def climb_nodes_rank() -> list[dict[str, Any]]:
    """
    ## Train on every rung on two nodes, on this rank
    """
    # As torchrun tells it. All ranks really are on this machine.
    os.environ["LOCAL_WORLD_SIZE"] = str(RANKS)
    return train_all(rungs_on_nodes(), "flat")[0]


def train_all(makes: dict[str, Callable[[list[nn.Module]], Single]],
              first: str) -> tuple[list[dict[str, Any]], int]:
    """
    ## Train on each rung; return the rows, and the number of parameters

    * `first` is the rung that the others are compared with
    """
    data = load_bytes()
    device = launch.my_device()
    rows = {}
    weights = {}
    for name, make in makes.items():
        torch.manual_seed(0)
        rung = make([layer.to(device) for layer in gpt_layers(CONFIG)])
        rows[name] = {"rung": name, **train(rung, data, device)}
        weights[name] = rung.weights()
    for name, row in rows.items():
        pairs = zip(row["losses"], rows[first]["losses"], strict=True)
        row["loss_difference"] = max(abs(loss - other) for loss, other in pairs)
        row["weight_difference"] = max((weights[name][each] - w).abs().max().item()
                                       for each, w in weights[first].items())
    return [*rows.values()], sum(w.numel() for w in weights[first].values())


def climb(folder: str | None = None) -> dict[str, Any]:
    """
    ## Train on every rung; return the memory, communication and losses of each

    * `folder` is the folder for the last rung's files; the default is the system's temporary folder

    Memory at rest is measured after a step, with its gradients, as ZeRO counts model states. Losses
    are means over ranks, and differences are those from DDP.
    """
    # Imported here because matplotlib takes a second to import, and ranks do not need it.
    from zero3.train import report

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # Pass the function by name: if this is the main program, other processes cannot import it.
        # The compiler traces the model twice, which takes a while on a busy machine.
        answers = launch.run("docs.ladder:climb_rank", RANKS, scratch, device="cpu", timeout_s=600)
    on_nodes = launch.run("docs.ladder:climb_nodes_rank", NODES * RANKS, device="cpu")
    # All ranks return the same: shards have equal lengths, and losses are means over ranks.
    for first, *others in (answers, on_nodes):
        assert all(other == first for other in others), (first, others)
    answer = {**answers[0], "nodes": on_nodes[0]}
    return {**answer, "device": report.device_name(torch.device(answer["device"])),
            "torch": torch.__version__, "commit": commit_name()}


# -------------------------------------------------------------------------------------------- show


def table(answer: dict[str, Any]) -> str:
    """
    ## The ladder in plain text

    Columns are bytes of a rank: on its device at rest and at the peak, in CPU memory, in files, and
    sent. Then the differences of losses and weights from DDP's, and the last loss. The compiled
    rungs follow, beside ZeRO-3 with hooks, with the all-gathers in a step; and the rungs on two
    nodes, with the bytes sent to the other node and the differences from flat.
    """
    lines = ["{params:,} parameters in {layers} layers, fp32, AdamW, {ranks} ranks, {steps} steps; "
             "{device}, torch {torch}, commit {commit}\n".format(**answer),
             f"{'rung':14}{'in shards':31}{'at rest':>13}{'at the peak':>13}"
             f"{'in CPU memory':>15}{'in files':>13}{'sent':>13}{'losses':>17}{'weights':>9}"
             f"{'last loss':>11}"]
    for row in answer["rows"]:
        lines.append("{rung:14}{sharded:31}{device_rest_bytes:13,}{device_peak_bytes:13,}"
                     "{cpu_bytes:15,}{file_bytes:13,}{sent_bytes:13,} {sent_by:8}"
                     "{loss_difference:8.0g}{weight_difference:9.0g}".format(**row)
                     + f"{row['losses'][-1]:11.6f}")
    hooks = next(row for row in answer["rows"] if row["rung"] == "ZeRO-3")
    lines.append(f"\n{'':18}{'at the peak':>13}{'all-gathers':>13}{'sent':>13}{'losses':>9}"
                 f"{'weights':>9}{'last loss':>11}")
    for row in (hooks, *answer["compiled"]):
        lines.append("{rung:18}{device_peak_bytes:13,}{gathers:13}{sent_bytes:13,}"
                     "{loss_difference:9.0g}{weight_difference:9.0g}".format(**row)
                     + f"{row['losses'][-1]:11.6f}")
    lines.append(f"\n{'on two nodes':14}{'at rest':>13}{'at the peak':>13}{'sent between':>14}"
                 f"{'losses':>9}{'weights':>9}{'last loss':>11}")
    for row in answer["nodes"]:
        lines.append("{rung:14}{device_rest_bytes:13,}{device_peak_bytes:13,}{between_bytes:14,}"
                     "{loss_difference:9.0g}{weight_difference:9.0g}".format(**row)
                     + f"{row['losses'][-1]:11.6f}")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """
    ## The command line
    """
    parser = argparse.ArgumentParser(prog="python -m docs.ladder")
    parser.add_argument("--out", type=Path, help="output file for the figures, as JSON")
    out = parser.parse_args(argv).out
    answer = climb()
    print(table(answer))
    if out:
        out.write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    launch.preload("zero3.train.gpt")
    main()

r"""
# The ladder: from one process to files, and always the same numbers

Seven ways to train one small GPT on the same batches, none with more on the device than the one
before it, and all with the same losses.

What a rank holds of a model in training are its *model states*: parameters, gradients, and the
optimizer's moments. In fp32 with Adam these are $4 + 4 + 8$ bytes for each of $\Psi$ parameters.
Plain data parallelism has them all on every rank. Each rung of the ladder cuts one more of them
into $N$ shards, and the last two move the shards off the device:

$$16\Psi \;\to\; 8\Psi + \frac{8\Psi}{N} \;\to\; 4\Psi + \frac{12\Psi}{N} \;\to\;
\frac{16\Psi}{N} \;\to\; 0$$

The arithmetic stays what it was. With two ranks there is one order to add two gradients in, so the
losses of all rungs on two ranks are equal to the last bit, and so are the weights, where one kind
of processor steps them all. One process takes the mean over the batch in one go and not as a mean
of means, so its last bits differ.

| rung | what it adds |
|---|---|
| one process | plain PyTorch, to compare with |
| DDP | an all-reduce of the gradients |
| ZeRO-1 | a rank steps its share of the parameters, and the ranks gather what came of it |
| ZeRO-2 | gradients are reduced layer by layer, and freed |
| ZeRO-3 | parameters are gathered layer by layer, and freed |
| ZeRO-3, CPU | what rests, rests in CPU memory |
| ZeRO-3, NVMe | what rests, rests in files |

**Run this**: `python -m docs.ladder`, or with `--out FILE` for the figures as JSON.

**Not covered, and what that costs**: activations, which no rung shards, and what an optimizer takes
and gives back inside of a step. ZeRO-1 and ZeRO-2 are written down here as short as they can be;
they wait for each message, and send whole layers.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.comm import all_gather_single, reduce_scatter_single
from zero3.guards.version import commit_name
from zero3.measure.ledger import Ledger, disk_bytes, held_bytes
from zero3.train import launch
from zero3.train.gpt import GPTConfig, global_batch, gpt_layers, load_bytes, next_byte_loss

RANKS, STEPS, ROWS = 2, 5, 4  # rows of the global batch
CONFIG = GPTConfig(seq_len=32, d_model=64, n_layers=8, d_ff=128)
# At an epsilon this large a gradient of the wrong size shows. Torch's plain loop: the fused one
# rounds the last few elements of a tensor otherwise, and a shard ends elsewhere.
ADAM: dict[str, Any] = {"lr": 1e-2, "eps": 1e-3, "weight_decay": 0.1, "fused": False}


# ------------------------------------------------------------------------------------------- rungs


class Single:
    """
    ## Rung 0: one process, plain PyTorch
    """

    sharded, rests, sent_by, sharers = "nothing", "device", "nothing", 1
    sent_bytes = peak_bytes = 0

    def __init__(self, layers: list[nn.Module]):
        self.plain = self.model = nn.Sequential(*layers)  # type: Any
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), **ADAM)

    def step(self, windows: torch.Tensor) -> torch.Tensor:
        """
        #### A training step, the same on all rungs
        """
        loss = next_byte_loss(self.model, windows)
        self.backward(loss)
        self.update()
        # Gradients stay until `zero_grad()`, so that now there is all that there ever is; what is
        # there for a moment only is noted in that moment.
        self.note(held_bytes(self.model, self.optimizer))
        return loss.detach()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()

    def note(self, live_bytes: int) -> None:
        """
        #### Remember the highest moment of the device

        * `live_bytes` are of the distinct storages of parameters, gradients and moments, wherever
        """
        self.peak_bytes = max(self.peak_bytes, live_bytes - self.in_cpu())

    def in_cpu(self) -> int:
        """
        #### Bytes of them that are in CPU memory, and not on the device
        """
        return 0

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.plain.named_parameters()}


class DataParallel(Single):
    """
    ## Rung 1: DDP, everything on every rank

    Its buckets *are* the gradients; else it would have them twice, and once out of our sight.
    """

    sent_by, sharers = "formula", RANKS

    def __init__(self, layers: list[nn.Module]):
        super().__init__(layers)
        # A ring all-reduce of the gradients.
        self.sent_bytes = 2 * (RANKS - 1) * sum(p.nbytes for p in self.plain.parameters()) // RANKS
        self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)


class Flat:
    """
    ## A layer's parameters as views of one vector, of which this rank steps its share
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
    ## Rung 2: ZeRO-1, a rank has the moments of its shards

    It steps these, and the ranks tell each other what came of it (all-gather).
    """

    sharded = "moments"

    def __init__(self, layers: list[nn.Module]):
        self.flats = [Flat(layer) for layer in layers]
        self.plain = self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.AdamW([flat.shard for flat in self.flats], **ADAM)
        # A reduce-scatter and an all-gather.
        self.sent_bytes = 2 * (RANKS - 1) * sum(f.shard.nbytes for f in self.flats)

    def reduce(self, flat: Flat) -> torch.Tensor:
        """
        #### This rank's share of a layer's mean gradient (reduce-scatter), a view of the whole
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
    ## Rung 3: ZeRO-2, and the gradients of its shards

    A layer's gradients are reduced in the moment in which all are there, and the whole is freed.
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
            # A copy, or the share would keep the whole alive.
            flat.shard.grad = self.reduce(flat).clone()


class Zero3(DataParallel):
    """
    ## Rungs 4 to 6: ZeRO-3, and the parameters; then all of it off the device

    This package: `Zero3Layer` around each layer, `Zero3Optimizer` for the shards, and an `Offload`
    that says where they rest.
    """

    sharded, sent_by = "moments, gradients, parameters", "measured"

    def __init__(self, layers: list[nn.Module], offload: Offload | None = None):
        self.model = Zero3Sequential([Zero3Layer(layer, offload=offload) for layer in layers])
        # No buckets: one of the usual length would hold several of these small layers' gradients.
        self.optimizer = Zero3Optimizer(self.model, bucket_bytes=0, offload=offload, **ADAM)
        self.rests = self.optimizer.offload.tier

    def backward(self, loss: torch.Tensor) -> None:
        self.optimizer.backward(loss)

    def in_cpu(self) -> int:
        """
        #### Bytes that rest in CPU memory

        What the optimizer holds is all that rests: shards, gradients and moments, or the buffers
        between files and memory. Where the CPU is the device they are counted apart all the same.
        """
        return held_bytes(self.optimizer) if self.rests != "device" else 0

    def weights(self) -> dict[str, torch.Tensor]:
        with self.model.full_params() as params:
            return {name: p.detach().clone() for name, p in params.items()}


class Tape(Ledger):
    """
    ## A ledger that looks at the device at each event, of which plain rungs have none
    """

    rung: Single

    def record(self, *args: Any, **kwargs: Any) -> None:
        super().record(*args, **kwargs)
        self.rung.note(self.events[-1].live_bytes)


def rungs(folder: str) -> dict[str, Callable[[list[nn.Module]], Single]]:
    """
    ## The ladder, from below; files go to a folder
    """
    return {"one process": Single, "DDP": DataParallel, "ZeRO-1": Zero1, "ZeRO-2": Zero2,
            "ZeRO-3": Zero3, "ZeRO-3, CPU": partial(Zero3, offload=Offload("cpu")),
            "ZeRO-3, NVMe": partial(Zero3, offload=Offload("nvme", folder))}


# ------------------------------------------------------------------------------------------- climb


def train(rung: Single, data: torch.Tensor, device: torch.device) -> dict[str, Any]:
    """
    ## Train on a rung, and say what it held, sent and learnt
    """
    losses, tape = [], Tape(rung.model, rung.optimizer)
    tape.rung = rung
    for step in range(STEPS):
        batch = global_batch(data, step, ROWS, CONFIG.seq_len).to(device)
        with tape if step + 1 == STEPS else nullcontext():
            losses.append(rung.step(batch.chunk(rung.sharers)[dist.get_rank() % rung.sharers]))
        rest_bytes, cpu_bytes = held_bytes(rung.model, rung.optimizer), rung.in_cpu()
        rung.optimizer.zero_grad()
    # The mean over ranks; where each is alone with the batch, it has the mean already.
    means = torch.stack(losses) / RANKS
    dist.all_reduce(means)
    return {"sharded": rung.sharded, "rests": rung.rests,
            "device_rest_bytes": rest_bytes - cpu_bytes, "cpu_bytes": cpu_bytes,
            "device_peak_bytes": rung.peak_bytes,
            "file_bytes": disk_bytes(rung.model, rung.optimizer), "losses": means.tolist(),
            "sent_bytes": rung.sent_bytes or tape.sent_bytes, "sent_by": rung.sent_by}


def climb_rank(folder: str) -> dict[str, Any]:
    """
    ## Train on every rung, on this rank
    """
    data, device, rows, weights = load_bytes(), launch.my_device(), [], []
    for name, make in rungs(folder).items():
        torch.manual_seed(0)
        rung = make([layer.to(device) for layer in gpt_layers(CONFIG)])
        rows.append({"rung": name, **train(rung, data, device)})
        weights.append(rung.weights())
    for row, mine in zip(rows, weights, strict=True):
        pairs = zip(row["losses"], rows[1]["losses"], strict=True)
        row["loss_difference"] = max(abs(loss - ddps) for loss, ddps in pairs)
        row["weight_difference"] = max((mine[name] - w).abs().max().item()
                                       for name, w in weights[1].items())
    return {"params": sum(w.numel() for w in weights[1].values()), "ranks": RANKS, "steps": STEPS,
            "layers": CONFIG.n_layers + 2, "device": device.type, "rows": rows}


def climb(folder: str | None = None) -> dict[str, Any]:
    """
    ## Train on every rung, and say what each held, sent and learnt

    * `folder` is where the last rung's files go; left out, where temporary files do

    At rest is after a step, with its gradients, as ZeRO counts model states; the peak is the
    highest moment. Losses are means over ranks, differences are from DDP.
    """
    # Here, because matplotlib takes a second to import, and ranks need none.
    from zero3.train import report

    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # By its name: where this is the main program, other processes could not import it else.
        first, *others = launch.run("docs.ladder:climb_rank", RANKS, scratch,
                                     device="cpu")
    # Shards are of one length, and losses are the mean over ranks on each.
    assert all(other == first for other in others), (first, others)
    return {**first, "device": report.device_name(torch.device(first["device"])),
            "torch": torch.__version__, "commit": commit_name()}


# -------------------------------------------------------------------------------------------- show


def table(answer: dict[str, Any]) -> str:
    """
    ## The ladder in plain text

    Bytes of a rank, on its device at rest and at the peak, elsewhere, and sent; then how far losses
    and weights are from those of DDP, and the last loss.
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
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]]) -> str:
    """
    ## Memory of each rung, as an SVG

    A bar for each: what rests on the device, up to the peak, then what is in CPU memory and in
    files. Colours are `--fg`, `--muted`, `--accent` and `--line` of the page that it stands in.
    """
    fg, accent, muted, line = (f"var(--{name})" for name in (
        "fg,#222", "accent,#2171b5", "muted,#777", "line,#ddd"))
    styles = (accent, f"{accent};fill-opacity:.4", muted, f"{line};stroke:{muted}")
    heads, at = ("device, at rest", "to its peak", "CPU", "files"), (12, 216, 380, 470)
    texts = [(x + 26, 33, head, fg) for x, head in zip(at, heads, strict=True)]
    boxes = [(x, 16, 18.0, 18, style) for x, style in zip(at, styles, strict=True)]
    each = [(row["device_rest_bytes"], row["device_peak_bytes"] - row["device_rest_bytes"],
             row["cpu_bytes"], row["file_bytes"]) for row in rows]
    scale, told = 616 / max(map(sum, each)), []
    for y, row, parts in zip(range(90, 10_000, 78), rows, each, strict=False):
        words = " + ".join(f"{name}{n / 2**20:.1f}" for name, n in zip(
            ("", "CPU ", "files "), (sum(parts[:2]), *parts[2:]), strict=True) if n) + " MiB"
        told.append(f"{row['rung']}: {words}")
        texts += [(12, y, row["rung"], fg), (628, y, words, f"{muted};text-anchor:end")]
        boxes += [(12 + (end - part) * scale, y + 10, part * scale, 26, style)
                  for part, end, style in zip(parts, accumulate(parts), styles, strict=True)]
    drawn = [f'<text x="{x}" y="{y}" style="fill:{style}">{words}</text>'
             for x, y, words, style in texts]
    drawn += [f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" '
              f'style="fill:{style}"/>' for x, y, width, height, style in boxes if width]
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {60 + 78 * len(rows)}" '
            'role="img" aria-labelledby="ladder-title ladder-desc" font-size="22">\n<title '
            'id="ladder-title">What a rank holds, rung by rung</title>\n<desc id="ladder-desc">On '
            f'the device at the peak, and elsewhere. {"; ".join(told)}.</desc>\n'
            + "\n".join(drawn) + "\n</svg>\n")


def main(argv: list[str] | None = None) -> None:
    """
    ## The command line
    """
    parser = argparse.ArgumentParser(prog="python -m docs.ladder")
    parser.add_argument("--out", type=Path, help="where to write the figures, as JSON")
    out, answer = parser.parse_args(argv).out, climb()
    print(table(answer))
    if out:
        out.write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    launch.preload("zero3.train.gpt")
    main()

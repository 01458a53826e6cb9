r"""
# The tape of a training step

`record` trains a small transformer on one rank or a few, and keeps the last step, event by event:
the memory of each rank, the communication in flight, and the line of `zero3` that was running.

A ledger records each event together with the bytes in memory after it. `Lines` also records the
source line that caused the event, and where the activations of each layer are. `frames` derives the
state of every layer from the events, so the scripts of the pages only have to draw. `recordings`
records the same step on one, two and three ranks, each with prefetch and without, and with
activations that stay or leave, so that a reader can compare them event by event.

$$\text{live}_r(i) \le \text{predicted peak}_r \qquad \max_i \text{live}_r(i) = \text{predicted
peak}_r \qquad \text{for each rank } r$$

The recording checks two things. The memory of each rank between steps and at its peak, and the
bytes that it sends, equal the prediction. And all ranks record the same events in the same order,
which is invariant I6. Shards are padded to equal lengths, so even the bytes are the same on all
ranks, and the pages draw one curve for all of them.

**Run this**: `python -m docs.tape --out DIR` writes `tape.json`, the data of the page, and
`trace.json`, which you can open in https://ui.perfetto.dev and `chrome://tracing`.

**Not covered, and what that costs**: the tape has the times of the ledger's events, not the times
at which messages arrive. So communication counts as in flight until the rank has waited for it.
Buckets are switched off and each layer is reduced alone, because the events of a bucket name only
its first layer. Reads and writes of shards are not drawn. Activations are in no curve; those that
leave are counted beside it.
"""

import argparse
import ast
import json
import sys
import tempfile
from contextlib import ExitStack, nullcontext
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero3
from docs.annotate import Source
from docs.states import frames, moments, scenes, tell
from docs.views import Json, alone, chrome_trace, compared, data_files, staircase
from zero3 import commit_name
from zero3.estimate.formulas import describe
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.estimate.predict import data_parallel, predict, predict_optimizer
from zero3.layer import Zero3Layer, Zero3Sequential
from zero3.offload.activations import Activations, Copy, Visit, order
from zero3.offload.disk import whole_blocks
from zero3.offload.tiers import Offload
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.train import gpt, launch
from zero3.watch import in_backward

PACKAGE = Path(zero3.__file__).parent
MOST_LINES = 4  # of the call stack of an event
SKIP = ("launch.py", "contents.py")  # files to leave out of call stacks
# A small model keeps the page small. Four blocks show the repeating pattern.
CONFIG = gpt.GPTConfig(seq_len=32, d_model=32, n_heads=2, n_layers=4, d_ff=64)

RANKS = (1, 2, 3)

__all__ = ["chrome_trace", "compared", "data_files", "frames", "moments", "record", "recordings",
           "staircase"]


# -------------------------------------------------------------------------------------- the source


@lru_cache
def functions(file: str) -> list[tuple[int, int, str]]:
    """
    ## The functions of a source file: first line, last line, qualified name

    Decorators are included. A nested function follows the one around it.
    """
    source = Source(PACKAGE / file)
    spans = ((source.span(name), name) for name, node in source.defined.items()
             if isinstance(node, ast.FunctionDef))
    return [(span.start, span.stop - 1, name) for span, name in spans]


def function_at(file: str, line: int) -> tuple[int, int, str]:
    """
    ## The innermost function around a line
    """
    around = [each for each in functions(file) if each[0] <= line <= each[1]]
    return around[-1]


class Lines(Ledger):
    """
    ## A ledger that also records the source lines of events
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.lines: list[list[tuple[str, int]]] = []  # per event, innermost first
        self.saved: list[dict[str, Json]] = []  # per event, as `saved_now` returns it

    def record(self, *args: Any, **kwargs: Any) -> None:
        """
        ### Record an event, and the calls in `zero3` that led to it
        """
        super().record(*args, **kwargs)
        self.saved.append(saved_now())
        calls: list[tuple[str, int]] = []
        frame: Any = sys._getframe(1)
        while frame is not None and len(calls) < MOST_LINES:
            # If autograd has called a hook, there are frames of torch in between.
            path = Path(frame.f_code.co_filename)
            name = frame.f_code.co_name
            if path.is_relative_to(PACKAGE) and path.name not in SKIP and name != "<lambda>":
                calls.append((path.relative_to(PACKAGE).as_posix(), frame.f_lineno))
            frame = frame.f_back
        self.lines.append(calls)


def saved_now() -> dict[str, Json]:
    """
    ## Where the activations are, by the label of their layer: state, bytes in memory, all bytes

    | state | a storage that autograd has saved |
    |---|---|
    | here | is in memory, or backward waits for it |
    | leaving | is in memory, and is being copied |
    | away | is in a file alone |
    | coming | is being read |

    If the storages of a layer differ, the state is that of most bytes. Memory that is read into
    counts. Layers without activations are left out, and so are those whose activations stay.
    """
    found: dict[str, Json] = {}
    for visit in [*order.visits.values()]:
        bytes_in = dict.fromkeys(("here", "leaving", "away", "coming"), 0)
        for stored in visit.members.values():
            # The input of the next layer is that layer's.
            if stored.visits[-1] is visit:
                bytes_in[state_of(stored, visit)] += stored.nbytes
        if any(bytes_in.values()):
            found[visit.label] = {
                "state": max(bytes_in, key=lambda state: bytes_in[state]),
                "bytes": sum(bytes_in.values()) - bytes_in["away"], "of": sum(bytes_in.values())}
    return found


def state_of(stored: Copy, visit: Visit) -> str:
    """
    ## The state of a storage
    """
    if stored.memory is not None:
        # When backward begins, the last copy that began is not waited for, and nobody needs it.
        return "leaving" if stored.has_copy and not in_backward() else "here"
    if stored.near is None:
        return "away"
    return "here" if order.entered[-1:] == [visit.number] else "coming"


# -------------------------------------------------------------------------------------- the record


def recordings(steps: int = 2) -> dict[str, Json]:
    """
    ## The same step on one, two and three ranks, with prefetch and without

    The name of a recording is "2-prefetch", for example, or "2-demand" without prefetch. In
    "2-prefetch-leave" activations leave.
    """
    return {f"{ranks}-{'prefetch' if prefetch else 'demand'}{'-leave' * leave}":
            record(ranks, steps, device="cpu", prefetch=prefetch, leave=leave)
            for ranks in RANKS for leave in (False, True) for prefetch in (True, False)}


def record(world_size: int = 2, steps: int = 3, config: gpt.GPTConfig = CONFIG,
           device: str = "cpu", timeout_s: float = 120, prefetch: bool = True,
           leave: bool = False) -> Json:
    """
    ## Train for a few steps, and record the last one

    * `steps` is at least 2, because in the first step the optimizer has no moments yet
    * `device` is as for `launch.run`
    * `prefetch` puts the layers in a `Zero3Sequential`. Without it they are in no chain: each is
      gathered on demand, and its gradient is reduced before backward goes on
    * `leave` moves the activations to files

    Raises `RuntimeError` if the ranks recorded different events. Raises `AssertionError` if a rank
    failed, or if its memory differs from the prediction.
    """
    from zero3.train import report  # Here, because it imports matplotlib.

    answers = launch.run("docs.tape:worker", world_size, steps, config, prefetch, leave,
                         device=device, timeout_s=timeout_s)
    ranks = [rank for rank, _ in answers]
    order = [[(e["layer"], e["event"], e["phase"]) for e in rank["events"]] for rank in ranks]
    for rank, events in enumerate(order):
        if events != order[0]:
            raise RuntimeError(f"rank {rank}: recorded other events. Expected: those of rank 0, "
                               f"{order[0]}. Got: {events}. What to do: look for a branch that "
                               "depends on the rank.")
    start_s = min(rank["start_s"] for rank in ranks)
    for rank in ranks:
        # All processes of a machine read the same clock, so let their times start at the same zero.
        late_s = rank.pop("start_s") - start_s
        for e in rank["events"]:
            e["time_s"] += late_s
            # Here, because each rank would parse the same files again.
            e["lines"] = [(file, line, function_at(file, line)[2]) for file, line in e["lines"]]
    known = answers[0][1]
    known["device"] = report.device_name(torch.device(known["device"]))
    return {**known, "world_size": world_size, "prefetch": prefetch, "leave": leave,
            "steps": steps, "commit": commit_name(), "torch": torch.__version__,
            "functions": _code(ranks), "ranks": ranks}


def worker(steps: int, config: gpt.GPTConfig, prefetch: bool = True,
           leave: bool = False) -> tuple[Json, Json]:
    """
    ## One rank's events, and the data that is the same on all ranks
    """
    device = launch.my_device()
    rank = dist.get_rank()
    torch.manual_seed(0)
    with ExitStack() as until_recorded:
        folder = until_recorded.enter_context(tempfile.TemporaryDirectory()) if leave else None
        model = shard([m.to(device) for m in gpt.gpt_layers(config)], prefetch, folder)
        optimizer = Zero3Optimizer(model, lr=1e-3, bucket_bytes=0)
        tape = _last_step(model, optimizer, steps, config.seq_len)
    measured = {"rest_bytes": held_bytes(model, optimizer), "peak_bytes": tape.peak_live_bytes,
                "sent_bytes": tape.sent_bytes}
    predicted = predicted_bytes(optimizer, prefetch)
    optimizer.expect(measured == predicted, "would record a wrong tape", predicted, measured,
                     "look for the line that holds or sends more than `predict.py` says")
    plain = data_parallel(describe(optimizer.layers), dist.get_world_size(), mixed=True)
    layers = [_layer(layer) for layer in optimizer.layers]
    return {
        "rank": rank, "predicted": predicted, "measured": measured, "start_s": tape._start_s,
        **_told(tape, layers, predicted["rest_bytes"], optimizer.comm),
    }, {
        "device": device.type, "layers": layers,
        "data_parallel": {"rest_bytes": plain.rest_bytes, "peak_bytes": plain.peak_bytes},
    }


def shard(modules: list[nn.Module], prefetch: bool, folder: str | None = None) -> nn.Module:
    """
    ## Shard a model, as a chain or as layers that know no neighbours

    * `folder` is for files of activations, if they leave: all but the ids of the tokens
    """
    where = None
    if folder is not None:
        files = Offload("nvme", folder, block_bytes=whole_blocks(1))
        where = Activations(files, below_bytes=whole_blocks(1))
    layers = [Zero3Layer(module, activations=where) for module in modules]
    if prefetch:
        return Zero3Sequential(layers)
    for i, layer in enumerate(layers):
        # A chain numbers its layers. Here nobody does, and four blocks would have one name.
        layer.label = f"layer {i} ({type(layer.module).__name__})"
    return nn.Sequential(*layers)


def predicted_bytes(optimizer: Zero3Optimizer, prefetch: bool) -> dict[str, int]:
    """
    ## The bytes of this rank, at rest, at the peak and sent, from shapes

    `predict_optimizer` predicts a chain. A layer that is in no chain is predicted as a chain
    of one layer. In backward, the layers above it have their shards' gradients already. A chain
    gathers its last layer once, and a layer in no chain is gathered twice, so add its second
    all-gather.
    """
    if prefetch:
        chain = predict_optimizer(optimizer)
        return {"rest_bytes": chain.rest_bytes, "peak_bytes": chain.peak_bytes,
                "sent_bytes": chain.sent_bytes}
    comm = optimizer.comm
    layers = describe(optimizer.layers)[::-1]
    alone = [predict([layer], comm.world_size, by_messages=comm.by_messages,
                     stage3=True) for layer in layers]
    rest = sum(one.rest_bytes for one in alone)
    above = accumulate((one.grad_bytes for one in alone), initial=0)
    peaks = [one.peak_bytes - one.rest_bytes + grads
             for one, grads in zip(alone, above, strict=False)]
    again = sum((comm.world_size - 1) * layer.shard_bytes(comm.world_size) for layer in layers)
    return {"rest_bytes": rest, "peak_bytes": rest + max(peaks),
            "sent_bytes": sum(one.sent_bytes for one in alone) + again}


def _last_step(model: Any, optimizer: Zero3Optimizer, steps: int, seq_len: int) -> Lines:
    """
    #### Train, and record the last step
    """
    comm = optimizer.comm
    text = gpt.load_bytes()
    tape = Lines(model, optimizer)
    for step in range(steps):
        windows = gpt.global_batch(text, step, 2 * comm.world_size, seq_len)
        mine = windows[2 * comm.rank : 2 * comm.rank + 2].to(optimizer.device)
        # Without this barrier the first message would include the time to start a slower rank.
        dist.barrier()
        with tape if step + 1 == steps else nullcontext():
            optimizer.backward(gpt.next_byte_loss(model, mine))
            optimizer.step()
        optimizer.zero_grad()
    return tape


def _layer(layer: Zero3Layer) -> Json:
    return {
        "label": layer.label,
        "params": sum(slot.param.numel() for g in layer.flats for slot in g.slots),
        "bytes": sum(g.full.nbytes for g in layer.flats),  # with padding
        "shard_bytes": sum(g.shard.nbytes for g in layer.flats),
    }


def _told(tape: Lines, layers: list[Json], rest_bytes: int, comm: Any) -> Json:
    """
    #### A rank's events with their source lines and descriptions, and its frames
    """
    names = ("time_s", "layer", "phase", "event", "bytes", "live_bytes", "sent_bytes")
    events = [{name: getattr(e, name) for name in names} for e in tape.events]
    states = frames(events, layers, rest_bytes, comm.by_messages and comm.world_size > 1)
    labels = [layer["label"] for layer in layers]
    for before, e, calls in zip(states, events, tape.lines, strict=False):
        e["lines"] = calls
        e["text"] = tell(e, before, labels, comm.world_size)
    for frame, saved in zip(states, [{}, *tape.saved], strict=True):
        frame["saved"] = [saved.get(label) for label in labels]
    return {"events": events, "frames": states, "scenes": scenes(events, states, comm.world_size)}


def _code(ranks: list[Json]) -> dict[str, Json]:
    """
    #### The text of every function in the call stack of an event, by file and name
    """
    found: dict[str, Json] = {}
    for file, line, name in (each for rank in ranks for e in rank["events"] for each in e["lines"]):
        if f"{file}:{name}" not in found:
            first, last, _ = function_at(file, line)
            text = (PACKAGE / file).read_text(encoding="utf-8").splitlines()[first - 1 : last]
            found[f"{file}:{name}"] = {"file": file, "name": name, "first": first,
                                       "text": "\n".join(text)}
    return found


def main(argv: list[str] | None = None) -> None:
    """
    ## Record a tape, and write it and the trace
    """
    parser = argparse.ArgumentParser(prog="docs.tape", description="Record one step of training.")
    parser.add_argument("--out", required=True, metavar="DIR", help="output folder")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    parser.add_argument("--on-demand", action="store_true", help="record without prefetch")
    args = parser.parse_args(argv)
    launch.preload("docs.tape")
    tape = record(args.ranks, prefetch=not args.on_demand)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tape.json").write_text(json.dumps(tape), encoding="utf-8")
    (out / "trace.json").write_text(json.dumps(chrome_trace(tape)), encoding="utf-8")
    (out / "step.svg").write_text(alone(staircase(tape)), encoding="utf-8")
    print(f"wrote tape.json, trace.json and step.svg to {out}: "
          f"{len(tape['ranks'][0]['events'])} events")


if __name__ == "__main__":
    main()

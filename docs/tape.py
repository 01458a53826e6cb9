r"""
# The tape of a training step

`record` trains a small transformer on a few ranks and keeps the last step, event by event: the
memory of each rank, the communication in flight, and the line of `zero3` that was running.

A ledger records each event together with the bytes in memory after it. `Lines` also records the
source line that caused the event. `frames` derives the state of every layer from the events, so the
page's script, `tape.js`, only has to draw.

$$\text{live}_r(i) \le \text{predicted peak}_r \qquad \max_i \text{live}_r(i) = \text{predicted
peak}_r \qquad \text{for each rank } r$$

The recording checks two things. The memory of each rank between steps and at its peak equals the
prediction of `Zero3Optimizer.predict`, to the byte. And all ranks record the same events in the
same order, which is invariant I6.

**Run this**: `python -m docs.tape --out DIR` writes `tape.json`, the data of the page, and
`trace.json`, which you can open in https://ui.perfetto.dev and `chrome://tracing`.

**Not covered, and what that costs**: the tape has the times of the ledger's events, not the times
at which messages arrive. So communication counts as in flight until the rank has waited for it.
Buckets are switched off and each layer is reduced alone, because the events of a bucket name only
its first layer. Reads and writes of offload tiers are not drawn.
"""

import argparse
import ast
import json
import sys
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero3
from docs.annotate import Source
from docs.views import Json, chrome_trace, staircase
from zero3.estimate.formulas import describe
from zero3.estimate.predict import data_parallel
from zero3.guards.version import commit_name
from zero3.layer import Zero3Layer, Zero3Sequential
from zero3.measure.ledger import Ledger, held_bytes
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.train import gpt, launch

PACKAGE = Path(zero3.__file__).parent
MOST_LINES = 4  # of the call stack of an event
SKIP = ("launch.py", "contents.py")  # files to leave out of call stacks
# A small model keeps the page small. Four blocks show the repeating pattern.
CONFIG = gpt.GPTConfig(seq_len=32, d_model=32, n_heads=2, n_layers=4, d_ff=64)

__all__ = ["chrome_trace", "frames", "record", "staircase"]


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

    def record(self, *args: Any, **kwargs: Any) -> None:
        """
        ### Record an event, and the calls in `zero3` that led to it
        """
        super().record(*args, **kwargs)
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


# -------------------------------------------------------------------------------------- the record


def record(world_size: int = 2, steps: int = 3, config: gpt.GPTConfig = CONFIG,
           device: str = "cpu", timeout_s: float = 120) -> Json:
    """
    ## Train for a few steps, and record the last one

    * `world_size` is at least 2. The page is designed for two ranks, because a phone has no room
      for more
    * `steps` is at least 2, because in the first step the optimizer has no moments yet
    * `device` is as for `launch.run`

    Raises `RuntimeError` if the ranks recorded different events. Raises `AssertionError` if a rank
    failed, or if its memory differs from the prediction.
    """
    from zero3.train import report  # Here, because it imports matplotlib.

    if world_size < 2:
        raise ValueError("a tape of one rank has no communication. Expected: at least 2 ranks. "
                         f"Got: {world_size}. What to do: pass `world_size=2`.")
    answers = launch.run("docs.tape:worker", world_size, steps, config, device=device,
                         timeout_s=timeout_s)
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
    known = answers[0][1]
    known["device"] = report.device_name(torch.device(known["device"]))
    return {**known, "world_size": world_size, "steps": steps, "commit": commit_name(),
            "torch": torch.__version__, "functions": _code(ranks), "ranks": ranks}


def worker(steps: int, config: gpt.GPTConfig) -> tuple[Json, Json]:
    """
    ## One rank's events, and the data that is the same on all ranks
    """
    device = launch.my_device()
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = Zero3Sequential([Zero3Layer(m.to(device)) for m in gpt.gpt_layers(config)])
    optimizer = Zero3Optimizer(model, lr=1e-3, bucket_bytes=0)
    tape = _last_step(model, optimizer, steps, config.seq_len)
    measured = {"rest_bytes": held_bytes(model, optimizer), "peak_bytes": tape.peak_live_bytes,
                "sent_bytes": tape.sent_bytes}
    expected = optimizer.predict()
    predicted = {name: getattr(expected, name) for name in measured}
    optimizer.expect(measured == predicted, "would record a wrong tape", predicted, measured,
                     "look for the line that holds or sends more than `predict.py` says")
    plain = data_parallel(describe(model), dist.get_world_size(), mixed=True)
    layers = [_layer(m) for m in model.module_list]
    return {
        "rank": rank, "predicted": predicted, "measured": measured, "start_s": tape._start_s,
        **_told(tape, layers, predicted["rest_bytes"], optimizer.comm),
    }, {
        "device": device.type, "layers": layers,
        "data_parallel": {"rest_bytes": plain.rest_bytes, "peak_bytes": plain.peak_bytes},
    }


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
    states = frames(events, layers, rest_bytes, comm.by_messages)
    labels = [layer["label"] for layer in layers]
    for before, e, calls in zip(states, events, tape.lines, strict=False):
        e["lines"] = [(file, line, function_at(file, line)[2]) for file, line in calls]
        e["text"] = tell(e, before, labels, comm.world_size)
    return {"events": events, "frames": states}


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


# --------------------------------------------------------------------------------------- the frames

# The kinds of memory of a rank, from the bottom of the picture to the top.
HELD = ("rest", "reduced", "whole", "unsharding", "gradients", "receive_buffer")


def frames(events: list[Json], layers: list[Json], rest_bytes: int,
           receive_buffer: bool) -> list[Json]:
    """
    ## The state of each layer and the communication in flight, after each event

    The first frame is the state before the first event.

    * `layers` have a label, bytes and bytes of a shard
    * `receive_buffer` is true if gradients arrive in the memory of the full parameters

    | field of a layer | value |
    |---|---|
    | `params` | shard, unsharding, whole, or receive_buffer |
    | `busy` | whether the layer computes, in forward or in backward |
    | `grads` | none, filling, full, reducing, reduced, or shard (the shard's gradient alone) |
    | `state` | a summary: shard, unsharding, whole, computing, gradients, reducing, reduced, or |
    | | updated, after the optimizer step |

    `held` is the memory of these states for each kind in `HELD`. Their sum is the ledger's count.
    """
    rest = {"params": "shard", "busy": False, "grads": "none", "state": "shard"}
    states = {layer["label"]: dict(rest) for layer in layers}
    flight: dict[tuple[str, str], Json] = {}
    told = [_frame(states, flight, layers, rest_bytes)]
    for number, e in enumerate(events, start=1):
        name = e["layer"]
        # The norm belongs to the optimizer and not to a layer.
        if name in states:
            _move(states[name], e["event"], receive_buffer)
        if e["event"] in ("fetch", "reduce"):
            flight[name, e["event"]] = {
                "layer": [*states].index(name), "what": e["event"], "bytes": e["sent_bytes"],
                "since": number}
        elif e["event"] in ("gathered", "reduced"):
            del flight[name, "fetch" if e["event"] == "gathered" else "reduce"]
        told.append(_frame(states, flight, layers, rest_bytes))
    return told


def _move(state: Json, event: str, receive_buffer: bool) -> None:
    """
    #### Change the state of a layer according to an event
    """
    changes: dict[str, Json] = {
        "fetch": {"params": "unsharding"}, "gathered": {"params": "whole"},
        "compute": {"busy": True}, "computed": {"busy": False}, "gradients": {"grads": "filling"},
        "reduce": {"grads": "reducing", "params": "receive_buffer" if receive_buffer else "shard"},
        "reduced": {"grads": "reduced"},
        # A layer frees its parameters first, and the buffers of its reduction later.
        "free": {"params": "shard", "busy": False,
                 "grads": {"filling": "full", "reduced": "shard"}.get(state["grads"], "none")},
    }
    state.update(changes.get(event, {}))
    params = state["params"]
    grads = state["grads"]
    if event == "step":
        state["state"] = "updated"
    elif params == "whole":
        state["state"] = ("gradients" if grads == "filling" else
                          "computing" if state["busy"] else "whole")
    elif params == "unsharding":
        state["state"] = params
    else:
        state["state"] = {"none": "shard", "full": "gradients", "shard": "reduced"}.get(
            grads, grads)


def _frame(states: Json, flight: Json, layers: list[Json], rest_bytes: int) -> Json:
    held = dict.fromkeys(HELD, 0) | {"rest": rest_bytes}
    for layer, state in zip(layers, states.values(), strict=True):
        params = state["params"]
        grads = state["grads"]
        if params != "shard":
            held[params] += layer["bytes"]
        held["gradients"] += layer["bytes"] * (grads not in ("none", "shard"))
        held["reduced"] += layer["shard_bytes"] * (grads in ("reduced", "shard"))
    return {"layers": [dict(state) for state in states.values()], "flight": [*flight.values()],
            "held": held}


def tell(e: Json, before: Json, labels: list[str], world_size: int) -> str:
    """
    ## Describe an event in a sentence

    * `before` is the frame before the event
    """
    name = e["layer"]
    nbytes = f"{e['bytes']:,} bytes"
    sent = f"{e['sent_bytes']:,} bytes"
    others = "the other rank" if world_size == 2 else f"the {world_size - 1} other ranks"
    owned = before["layers"][labels.index(name)] if name in labels else {}
    backward = e["phase"] == "backward"
    if owned.get("params") == "whole":
        frees = f"frees its full parameters, {nbytes}; its shard stays"
    elif owned.get("params") == "receive_buffer":
        frees = f"frees its full gradient and the receive buffer, {nbytes}"
    else:
        frees = f"frees its full gradient, {nbytes}"
    return {
        "fetch": f"{name} starts its all-gather; its shard, {sent}, is in flight to {others}",
        "gathered": f"{name} is whole: the shards of {others} have arrived",
        "compute": f"{name} starts {'its backward' if backward else 'to compute'}",
        "computed": f"{name} has finished its forward",
        "gradients": f"{name} allocates its full gradient, {nbytes}, and fills it",
        "free": f"{name} {frees}",
        "reduce": f"{name} starts to reduce its gradient; {sent} are in flight to {others}",
        "reduced": f"{name} has the mean gradient of this rank's shard, {nbytes}",
        "norm": f"the ranks exchange the norms of their gradients, {sent} to {others}",
        "step": f"the optimizer has updated this rank's shard of {name}",
    }[e["event"]]


def main(argv: list[str] | None = None) -> None:
    """
    ## Record a tape, and write it and the trace
    """
    parser = argparse.ArgumentParser(prog="docs.tape", description="Record one step of training.")
    parser.add_argument("--out", required=True, metavar="DIR", help="output folder")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks")
    args = parser.parse_args(argv)
    launch.preload("zero3.train.gpt", "zero3.optimizer.stage3")
    tape = record(args.ranks)
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tape.json").write_text(json.dumps(tape), encoding="utf-8")
    (out / "trace.json").write_text(json.dumps(chrome_trace(tape)), encoding="utf-8")
    print(f"wrote tape.json and trace.json to {out}: {len(tape['ranks'][0]['events'])} events")


if __name__ == "__main__":
    main()

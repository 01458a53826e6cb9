r"""
# The tape, to be scrubbed

`record` trains a toy transformer on a few ranks and keeps the last step, event by event: what each
rank held, which messages were under way, and which line of `zero3` was running.

A ledger's entry says what happened and how many bytes are alive after it. `Lines` notes beside each
entry where in the source it was made, and `frames` replays the entries into the state of every
layer, so that the page that shows them, `tape.js`, only draws.

$$\text{live}_r(i) \le \text{predicted peak}_r \qquad \max_i \text{live}_r(i) = \text{predicted
peak}_r \qquad \text{for each rank } r$$

While it is recorded, both are checked: what a rank holds between steps and at its peak is what
`Zero3Optimizer.predict` says, to the byte, and all ranks record the same events in the same order
(I6).

**Run this**: `python -m docs.tape --out DIR` writes `tape.json`, from which the page is made, and
`trace.json`, which https://ui.perfetto.dev and `chrome://tracing` open.

**Not covered, and what that costs**: the tape knows when the ledger was told, not when a message
crossed the comm, so messages in flight are those that were begun and not yet waited for. Buckets:
each layer here is reduced alone, for a bucket's entries name its first layer only. Offload tiers,
whose reads and writes are not drawn.
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
MOST_LINES = 4  # of the calls that led to an event
SKIP = ("launch.py", "contents.py")  # files whose calls say nothing about it
# Small, so that the page is; four blocks, so that a reader sees the pattern repeat.
CONFIG = gpt.GPTConfig(seq_len=32, d_model=32, n_heads=2, n_layers=4, d_ff=64)

__all__ = ["chrome_trace", "frames", "record", "staircase"]


# -------------------------------------------------------------------------------------- the source


@lru_cache
def functions(file: str) -> list[tuple[int, int, str]]:
    """
    ## The functions of a source file: first line, last line, qualified name

    Decorators belong to them. One inside of another comes after it.
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
    ## A ledger that also notes which lines were running
    """

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.lines: list[list[tuple[str, int]]] = []  # per event, innermost first

    def record(self, *args: Any, **kwargs: Any) -> None:
        """
        ### Add an event, and the calls in `zero3` that led to it
        """
        super().record(*args, **kwargs)
        calls: list[tuple[str, int]] = []
        frame: Any = sys._getframe(1)
        while frame is not None and len(calls) < MOST_LINES:
            # Torch's own frames lie between ours where autograd calls a hook.
            path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
            if path.is_relative_to(PACKAGE) and path.name not in SKIP and name != "<lambda>":
                calls.append((path.relative_to(PACKAGE).as_posix(), frame.f_lineno))
            frame = frame.f_back
        self.lines.append(calls)


# -------------------------------------------------------------------------------------- the record


def record(world_size: int = 2, steps: int = 3, config: gpt.GPTConfig = CONFIG,
           device: str = "cpu", timeout_s: float = 120) -> Json:
    """
    ## Train for a few steps, and keep the last

    * `world_size` is at least 2; the page is made for two, and has no room for more on a phone
    * `steps` is at least 2: in the first one the optimizer has no moments yet
    * `device` is as for `launch.run`

    Raises `RuntimeError` where the ranks recorded different events, and `AssertionError` where a
    rank failed, or held other bytes than predicted.
    """
    from zero3.train import report  # Here, for matplotlib takes a second to import.

    if world_size < 2:
        raise ValueError(f"there is no tape of one rank. Expected: at least 2 ranks. Got: "
                         f"{world_size}. What to do: pass `world_size=2`.")
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
        # On one machine all processes read the same clock, and so they share one origin.
        late_s = rank.pop("start_s") - start_s
        for e in rank["events"]:
            e["time_s"] += late_s
    known = answers[0][1]
    known["device"] = report.device_name(torch.device(known["device"]))
    return {**known, "world_size": world_size, "steps": steps, "commit": commit_name(),
            "torch": torch.__version__, "functions": _code(ranks), "ranks": ranks}


def worker(steps: int, config: gpt.GPTConfig) -> tuple[Json, Json]:
    """
    ## One rank's part: its events, and what all ranks know
    """
    device, rank = launch.my_device(), dist.get_rank()
    torch.manual_seed(0)
    model = Zero3Sequential([Zero3Layer(m.to(device)) for m in gpt.gpt_layers(config)])
    optimizer = Zero3Optimizer(model, lr=1e-3, bucket_bytes=0)
    tape = _last_step(model, optimizer, steps, config.seq_len)
    measured = {"rest_bytes": held_bytes(model, optimizer), "peak_bytes": tape.peak_live_bytes,
                "sent_bytes": tape.sent_bytes}
    expected = optimizer.predict()
    predicted = {name: getattr(expected, name) for name in measured}
    optimizer.expect(measured == predicted, "would put a wrong tape on the page", predicted,
                     measured, "look for the line that holds or sends more than `predict.py` says")
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
    #### Train, and listen to the last step
    """
    comm, text, tape = optimizer.comm, gpt.load_bytes(), Lines(model, optimizer)
    for step in range(steps):
        windows = gpt.global_batch(text, step, 2 * comm.world_size, seq_len)
        mine = windows[2 * comm.rank : 2 * comm.rank + 2].to(optimizer.device)
        # So that no rank's first message waits for a rank that still starts.
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
    #### A rank's events with their lines and sentences, and its frames
    """
    names = ("time_s", "layer", "phase", "event", "bytes", "live_bytes", "sent_bytes")
    events = [{name: getattr(e, name) for name in names} for e in tape.events]
    states, labels = frames(events, layers, rest_bytes, comm.by_messages), [
        layer["label"] for layer in layers]
    for before, e, calls in zip(states, events, tape.lines, strict=False):
        e["lines"] = [(file, line, function_at(file, line)[2]) for file, line in calls]
        e["text"] = tell(e, before, labels, comm.world_size)
    return {"events": events, "frames": states}


def _code(ranks: list[Json]) -> dict[str, Json]:
    """
    #### The text of every function that some event ran through, by file and name
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

# What a rank holds, from the bottom of the picture to the top.
HELD = ("rest", "reduced", "whole", "unsharding", "gradients", "receive_buffer")


def frames(events: list[Json], layers: list[Json], rest_bytes: int, receive_buffer: bool) -> list[Json]:
    """
    ## The state of each layer, and the messages in flight, before the first event and after each

    * `layers` have a label, bytes and bytes of a shard
    * `receive_buffer` says that messages with gradients arrive where the full parameters were

    | of a layer | is |
    |---|---|
    | `params` | shard, unsharding, whole, or receive_buffer |
    | `busy` | whether it computes, forward or backward |
    | `grads` | none, filling, full, reducing, reduced, or shard: of all these the shard's is left |
    | `state` | a word for all: shard, unsharding, whole, computing, gradients, reducing, reduced |
    | | and, once the optimizer has stepped it, updated |

    `held` adds up what these states hold, by `HELD`; the sum is what the ledger counted.
    """
    rest = {"params": "shard", "busy": False, "grads": "none", "state": "shard"}
    states = {layer["label"]: dict(rest) for layer in layers}
    flight: dict[tuple[str, str], Json] = {}
    told = [_frame(states, flight, layers, rest_bytes)]
    for number, e in enumerate(events, start=1):
        name = e["layer"]
        # The norm is the optimizer's, and of no layer; it is waited for where it is begun.
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
    #### What an event makes of a layer
    """
    changes: dict[str, Json] = {
        "fetch": {"params": "unsharding"}, "gathered": {"params": "whole"},
        "compute": {"busy": True}, "computed": {"busy": False}, "gradients": {"grads": "filling"},
        "reduce": {"grads": "reducing", "params": "receive_buffer" if receive_buffer else "shard"},
        "reduced": {"grads": "reduced"},
        # A layer frees its parameters before the buffers of its reduce.
        "free": {"params": "shard", "busy": False,
                 "grads": {"filling": "full", "reduced": "shard"}.get(state["grads"], "none")},
    }
    state.update(changes.get(event, {}))
    params, grads = state["params"], state["grads"]
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
        params, grads = state["params"], state["grads"]
        if params != "shard":
            held[params] += layer["bytes"]
        held["gradients"] += layer["bytes"] * (grads not in ("none", "shard"))
        held["reduced"] += layer["shard_bytes"] * (grads in ("reduced", "shard"))
    return {"layers": [dict(state) for state in states.values()], "flight": [*flight.values()],
            "held": held}


def tell(e: Json, before: Json, labels: list[str], world_size: int) -> str:
    """
    ## An event as a sentence

    * `before` is the frame before it
    """
    name, nbytes, sent = e["layer"], f"{e['bytes']:,} bytes", f"{e['sent_bytes']:,} bytes"
    others = "the other rank" if world_size == 2 else f"the {world_size - 1} other ranks"
    owned = before["layers"][labels.index(name)] if name in labels else {}
    backward = e["phase"] == "backward"
    receive_buffer = " and the buffer that messages came into" if owned.get("params") == "receive_buffer" else ""
    gives = (f"frees its full parameters, {nbytes}; its shard stays"
             if owned.get("params") == "whole" else
             f"gives back its full gradient{receive_buffer}, {nbytes}")
    return {
        "fetch": f"{name} starts to unshard; its shard, {sent}, is on its way to {others}",
        "gathered": f"{name} is whole: the shards of {others} have arrived",
        "compute": f"{name} starts {'its backward' if backward else 'to compute'}",
        "computed": f"{name} has computed",
        "gradients": f"{name} makes room for its full gradient, {nbytes}, and fills it",
        "free": f"{name} {gives}",
        "reduce": f"{name} starts to reduce its gradient; {sent} are on their way to {others}",
        "reduced": f"{name} has the mean gradient of this rank's shard, {nbytes}",
        "norm": f"the ranks tell each other the norms of their gradients, {sent} to {others}",
        "step": f"the optimizer has updated this rank's shard of {name}",
    }[e["event"]]


def main(argv: list[str] | None = None) -> None:
    """
    ## Record, and write the tape and the trace
    """
    parser = argparse.ArgumentParser(prog="docs.tape", description="Record one step of training.")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write to")
    parser.add_argument("--ranks", type=int, default=2, help="ranks")
    args = parser.parse_args(argv)
    launch.preload("zero3.train.gpt", "zero3.optimizer.stage3")
    tape, out = record(args.ranks), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "tape.json").write_text(json.dumps(tape), encoding="utf-8")
    (out / "trace.json").write_text(json.dumps(chrome_trace(tape)), encoding="utf-8")
    print(f"wrote tape.json and trace.json to {out}: {len(tape['ranks'][0]['events'])} events")


if __name__ == "__main__":
    main()

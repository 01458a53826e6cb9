"""
# What the page on loops shows of a run: figures, and the trace of a profiler
"""

import json
from contextlib import nullcontext
from itertools import pairwise

import torch

from tests.beside.loops import WATCH, Torchrun, run_programs
from zero3.comm.collectives import named_range

LAYERS = ["layer 0 (the rest)", *(f"layer {k + 1} ({k})" for k in range(4))]


def watched(ports, folder):
    """The figures of the last step, and the ranges of one"""
    ranks = Torchrun(ports, folder)
    found = ranks.main(WATCH)
    trace = json.loads((folder / f"trace-{ranks.rank}.json").read_text())
    ranges = sorted((each for each in trace["traceEvents"] if each.get("ph") == "X"),
                    key=lambda each: each["ts"])
    tape = found["tape"]
    return ranges, (tape.sent_bytes, tape.peak_live_bytes), found["loss"]


def test_a_trace_names_what_starts_and_what_is_waited_for(tmp_path):
    """
    The gather of a layer starts before the layer ahead of it computes, and is waited for after
    that; its reduce is waited for after the next one's backward has begun. Torch's range of a
    message begins inside of the range that starts it. Breaks where a range is left out, or a gather
    overlaps nothing.
    Proves `named_range`, `Transfer.starting`, `Transfer.wait`, `Unit.forward`.
    """
    ranks = run_programs(1, watched, 2, tmp_path)
    assert len({str(figures) for _, figures, _ in ranks}) == 1
    for ranges, (sent_bytes, peak_bytes), loss in ranks:
        # Two gathers and a reduce of each layer, but the last one's weights stay full for backward;
        # and four squared norms.
        shard_bytes = (512 * 512 + 512) // 2 * 4
        assert sent_bytes == (3 * 4 - 1) * shard_bytes + 4 * 8
        assert peak_bytes > 4 * 4 * shard_bytes and loss < 1
        names = [each["name"] for each in ranges]
        first = {name: names.index(name) for name in names}
        last = {name: len(names) - 1 - names[::-1].index(name) for name in names}
        for here, following in pairwise(LAYERS):
            start = first[f"start the gather of {following}"]
            assert start < first[here] < first[f"wait for the gather of {following}"]
        for here, following in pairwise(LAYERS[1:]):
            start, wait = (first[f"{what} the reduce of {following}"]
                           for what in ("start", "wait for"))
            assert start < last[f"wait for the gather of {here}"] < wait
        step = ranges[first["Optimizer.step#Zero3Optimizer.step"]]
        norm = ranges[first["wait for the norm of the optimizer"]]
        assert step["ts"] <= norm["ts"] and norm["ts"] + norm["dur"] <= step["ts"] + step["dur"]
        started = ranges[first[f"start the gather of {LAYERS[1]}"]]
        message = ranges[first["gloo:recv"]]
        assert started["ts"] <= message["ts"] <= started["ts"] + started["dur"]


def test_without_a_profiler_there_are_no_ranges():
    """
    Breaks if ranges are always made.
    Proves `named_range`.
    """
    assert isinstance(named_range("x"), nullcontext)
    with torch.profiler.profile() as profiler, named_range("x"):
        torch.ones(1)
    assert "x" in {event.name for event in profiler.events()}

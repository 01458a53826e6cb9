"""
The tape that the site shows: what is drawn is what a rank held, and the lines are those that ran.
"""

import ast
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

import zero3
from docs.tape import CONFIG, chrome_trace, functions, record, staircase
from zero3.train import launch

PACKAGE = Path(zero3.__file__).parent


@pytest.fixture(scope="module")
def tape():
    """
    One step of the toy transformer, recorded on two ranks
    """
    # Where no ranks have run yet: their imports are most of the time.
    launch.preload("docs.tape")
    return record(2, steps=2, device="cpu")


def pairs(rank):
    """
    ## Each event with the frame before it and the frame after it
    """
    return zip(rank["events"], rank["frames"], rank["frames"][1:], strict=False)


def test_what_was_measured_is_what_was_predicted(tape):
    """
    Rest, peak and traffic of each rank, to the byte, and the peak is one of the events shown.
    Breaks where the page's lines come from another model than its curve.
    """
    for rank in tape["ranks"]:
        assert rank["measured"] == rank["predicted"]
        held = [e["live_bytes"] for e in rank["events"]]
        assert max(held) == rank["predicted"]["peak_bytes"] < tape["data_parallel"]["peak_bytes"]
        assert sum(e["sent_bytes"] for e in rank["events"]) == rank["predicted"]["sent_bytes"]


def test_all_ranks_record_the_same_events_in_the_same_order(tape):
    """
    I6, without which the page could not show the ranks side by side, event by event.
    """
    order = [[(e["layer"], e["event"], e["phase"]) for e in rank["events"]]
             for rank in tape["ranks"]]
    assert len(order) == 2 and order[0] == order[1]
    assert list(dict.fromkeys(phase for *_, phase in order[0])) == ["forward", "backward", "step"]


def test_the_coloured_areas_of_every_frame_add_up_to_the_live_bytes(tape):
    """
    What the states of all layers hold, by the sizes of shards and buffers, is what the ledger found
    in memory after the same event. Breaks where `_move` or `_frame` misunderstands an event.
    """
    for rank in tape["ranks"]:
        assert sum(rank["frames"][0]["held"].values()) == rank["predicted"]["rest_bytes"]
        for e, _, after in pairs(rank):
            assert sum(after["held"].values()) == e["live_bytes"], e


def test_at_most_the_computing_layer_and_the_prefetched_one_are_full(tape):
    """
    I3. Forward, nothing else is there; backward, one gradient at most is in flight beside them. And
    while a layer computes, the next one is under way, but for the last of each pass.
    """
    for e, _, after in pairs(tape["ranks"][0]):
        params = Counter(layer["params"] for layer in after["layers"])
        grads = Counter(layer["grads"] for layer in after["layers"])
        assert params["whole"] + params["unsharding"] <= 2
        assert params["whole"] <= 1
        assert grads["reducing"] + grads["reduced"] <= 1 and grads["filling"] + grads["full"] <= 1
        if e["phase"] == "forward":
            assert not grads.keys() - {"none"}
        last = "Head" if e["phase"] == "forward" else "Embedding"
        if any(layer["state"] == "computing" for layer in after["layers"]) and e["event"] in (
                "computed", "gathered", "gradients") and last not in e["layer"]:
            assert params["unsharding"] == 1, e


def test_each_layer_goes_through_its_states_and_comes_to_rest(tape):
    """
    The heart's table of states, layer by layer: twice whole, but once for the last layer, which
    stays from forward into backward; then reduced, and updated.
    """
    forward = ["shard", "unsharding", "whole", "computing", "whole"]
    backward = ["computing", "gradients", "reducing", "reduced", "updated"]
    for rank in tape["ranks"]:
        for i in range(len(tape["layers"])):
            seen = [frame["layers"][i]["state"] for frame in rank["frames"]]
            seen = [a for a, b in zip(seen, [None, *seen], strict=False) if a != b]
            again = ["shard", "unsharding"] if i < len(tape["layers"]) - 1 else []
            assert seen == [*forward, *again, *backward]
        assert all(layer["params"] == "shard" for layer in rank["frames"][-1]["layers"])


def test_messages_are_in_flight_from_their_start_until_they_are_waited_for(tape):
    """
    Each fetch has its gathered and each reduce its reduced; at the end nothing is in flight. What
    is sent is a shard, to the one other rank. Breaks where an event ends another layer's message.
    """
    shards = {layer["label"]: layer["shard_bytes"] for layer in tape["layers"]}
    for rank in tape["ranks"]:
        told = Counter((e["layer"], e["event"]) for e in rank["events"])
        for name in shards:
            assert told[name, "fetch"] == told[name, "gathered"] == 1 + ("Head" not in name)
            assert told[name, "reduce"] == told[name, "reduced"] == 1
        for number, (e, before, after) in enumerate(pairs(rank), start=1):
            new = [m for m in after["flight"] if m not in before["flight"]]
            gone = [m for m in before["flight"] if m not in after["flight"]]
            assert len(new) == (e["event"] in ("fetch", "reduce"))
            assert len(gone) == (e["event"] in ("gathered", "reduced"))
            for message in new:
                assert message["since"] == number
                assert message["bytes"] == e["sent_bytes"] == shards[e["layer"]]
            assert all(tape["layers"][m["layer"]]["label"] == e["layer"] for m in (*new, *gone))
        assert rank["frames"][-1]["flight"] == []


def test_the_line_of_an_event_is_the_one_that_records_it(tape):
    """
    The innermost line is in a call of `record`, with the event's name in it where it is written
    there; each further line calls something, in the function that it is said to be in. Breaks where
    the stack is cut at another frame, or the text is of another state of the source.
    """
    sources = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8")
               for path in PACKAGE.rglob("*.py")}
    records = [(file, node) for file in {e["lines"][0][0] for e in tape["ranks"][0]["events"]}
               for node in ast.walk(ast.parse(sources[file]))
               if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "record"]
    for e in (e for rank in tape["ranks"] for e in rank["events"]):
        (file, line, _), *_ = e["lines"]
        calls = [node for where, node in records
                 if where == file and node.lineno <= line <= node.end_lineno]
        assert [ast.literal_eval(call.args[1]) for call in calls] == [e["event"]], e
        assert 1 <= len(e["lines"]) <= 4
        for file, line, name in e["lines"]:
            code = tape["functions"][f"{file}:{name}"]
            rows = code["text"].splitlines()
            assert (code["first"], code["first"] + len(rows) - 1, name) in functions(file)
            source = sources[file].splitlines()[line - 1]
            assert rows[line - code["first"]] == source
            assert "(" in source or "for " in source


def test_a_sentence_says_the_bytes_of_its_event(tape):
    """
    Whole numbers in a sentence are the event's own. Breaks where a sentence tells of what the tape
    does not have.
    """
    for e in tape["ranks"][1]["events"]:
        told = re.findall(r"[\d,]+(?= bytes)", e["text"])
        assert {int(n.replace(",", "")) for n in told} <= {e["bytes"], e["sent_bytes"]}
        assert e["layer"] in e["text"] or e["event"] == "norm"


def test_the_trace_is_well_formed(tape):
    """
    Every span has a length, times do not go back, spans on one thread do not cross, all processes
    and threads have a name, and each fetch and reduce is there. A viewer drops what is not so.
    """
    made = chrome_trace(tape)["traceEvents"]
    names = {(e["name"], e["pid"], e["tid"]) for e in made if e["ph"] == "M"}
    spans = [e for e in made if e["ph"] == "X"]
    assert {e["ph"] for e in made} == {"M", "X", "C"}
    times = [e["ts"] for e in made]
    assert times == sorted(times) and times[0] >= 0
    for rank in tape["ranks"]:
        pid = rank["rank"]
        assert ("process_name", pid, 0) in names
        counters = [e["args"]["bytes"] for e in made if e["ph"] == "C" and e["pid"] == pid]
        assert counters == [e["live_bytes"] for e in rank["events"]]
        told = Counter(e["event"] for e in rank["events"])
        mine = [e for e in spans if e["pid"] == pid]
        assert sum(e["cat"] == "messages" for e in mine) == told["fetch"] + told["reduce"]
        assert sum(e["cat"] == "compute" for e in mine) == told["compute"] + told["step"] + 1
        for tid in {e["tid"] for e in mine}:
            assert ("thread_name", pid, tid) in names
            on_it = [e for e in mine if e["tid"] == tid]
            for before, after in pairwise(on_it):
                assert before["dur"] >= 0
                assert before["ts"] + before["dur"] <= after["ts"] + 1e-3


def test_the_staircase_is_an_svg_that_says_what_it_shows(tape):
    """
    It parses, its words have the predicted figures, text stays inside of it, and it takes every
    colour from the site. Breaks where a label grows out of the picture.
    """
    rank = tape["ranks"][0]
    for width in (640, 360):
        svg = ElementTree.fromstring(staircase(tape, width))
        words = " ".join(svg.itertext())
        for nbytes in (rank["predicted"]["rest_bytes"], rank["predicted"]["peak_bytes"],
                       tape["data_parallel"]["peak_bytes"]):
            assert words.count(f"{nbytes:,}") == 2, "once in the description, once in the picture"
        assert svg[0].tag.endswith("title") and svg[1].tag.endswith("desc")
        drawn = [node for node in svg if node.tag.endswith(("rect", "path", "text"))]
        assert all("var(--" in node.get("style") for node in drawn)
        for node in (node for node in svg if node.tag.endswith("text")):
            # A letter of a wide font, like DejaVu Sans, takes half of the font's size.
            assert float(node.get("x")) + 0.54 * 13 * len(node.text) <= width, node.text


def test_the_steps_of_the_staircase_are_the_events(tape):
    """
    One step for each event and one for rest before it, at the heights of their bytes. Breaks where
    an event is drawn in the place of another.
    """
    svg = ElementTree.fromstring(staircase(tape))
    line = [node for node in svg if node.tag.endswith("path")][-1].get("d")
    heights = [float(y) for y in re.findall(r"V([\d.]+)H", line)]
    rank = tape["ranks"][0]
    held = [rank["predicted"]["rest_bytes"], *(e["live_bytes"] for e in rank["events"])]
    assert len(heights) == len(held)
    assert [a > b for a, b in pairwise(heights)] == [
        a < b for a, b in pairwise(held)]


def test_one_rank_has_no_tape():
    """
    Without another rank there are no messages to show.
    """
    with pytest.raises(ValueError, match="at least 2 ranks"):
        record(1, config=CONFIG)

"""
# The tape shows what a rank held, beside the lines that ran
"""

import ast
import copy
import json
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

import zero3
from docs.states import short
from docs.tape import (
    chrome_trace,
    compared,
    data_files,
    functions,
    moments,
    recordings,
    staircase,
)
from docs.views import (
    DARK,
    alone,
)
from zero3.estimate.saved import activations
from zero3.train import launch

PACKAGE = Path(zero3.__file__).parent
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tapes(once):
    """
    One step of the toy transformer on one, two and three ranks, with prefetch and without, and with
    activations that stay and leave
    """
    # Where no ranks have run yet: their imports are most of the time.
    launch.preload("docs.tape")
    return once("tapes", recordings)


@pytest.fixture(scope="module")
def tape(tapes):
    """
    The recording on two ranks, with prefetch
    """
    return tapes["2-prefetch"]


@pytest.fixture(scope="module")
def every_rank(tapes):
    """
    Each recording and each of its ranks
    """
    return [(tape, rank) for tape in tapes.values() for rank in tape["ranks"]]


def pairs(rank):
    """
    ## Each event with the frame before it and the frame after it
    """
    return zip(rank["events"], rank["frames"], rank["frames"][1:], strict=False)


def test_what_was_measured_is_what_was_predicted(every_rank):
    """
    Rest, peak and traffic of each rank, to the byte, and the peak is one of the events shown.
    Breaks where the page's lines come from another model than its curve.
    """
    for tape, rank in every_rank:
        assert rank["measured"] == rank["predicted"]
        held = [e["live_bytes"] for e in rank["events"]]
        assert max(held) == rank["predicted"]["peak_bytes"]
        assert sum(e["sent_bytes"] for e in rank["events"]) == rank["predicted"]["sent_bytes"]
        # A rank alone has nothing to save, and copies layers that it has.
        assert (max(held) < tape["data_parallel"]["peak_bytes"]) == (tape["world_size"] > 1)


def test_all_ranks_record_the_same_events_in_the_same_order(tapes):
    """
    I6, without which the page could not show the ranks side by side, event by event.
    """
    for tape in tapes.values():
        order = [[(e["layer"], e["event"], e["phase"]) for e in rank["events"]]
                 for rank in tape["ranks"]]
        assert len(order) == tape["world_size"] and all(each == order[0] for each in order)
        phases = dict.fromkeys(phase for *_, phase in order[0])
        assert list(phases) == ["forward", "backward", "step"]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_prefetch_starts_a_fetch_before_the_computation_that_hides_it(tapes, ranks):
    """
    With prefetch the next layer's fetch comes before this layer computes, and in backward before
    this layer is done. Without prefetch it comes after this layer is freed. Breaks where the two
    recordings are of the same model.
    """
    def order(prefetch):
        events = tapes[f"{ranks}-{'prefetch' if prefetch else 'demand'}"]["ranks"][0]["events"]
        names = list(dict.fromkeys(e["layer"] for e in events))[:6]
        return names, [(names.index(e["layer"]), e["event"], e["phase"]) for e in events
                       if e["layer"] in names]

    for prefetch in (True, False):
        names, events = order(prefetch)
        assert [short(name) for name in names] == [f"layer {i}" for i in range(6)]
        for i in range(5):
            fetch = events.index((i + 1, "fetch", "forward"))
            assert (fetch < events.index((i, "compute", "forward"))) == prefetch
            assert (fetch > events.index((i, "free", "forward"))) != prefetch
            back = events.index((i, "fetch", "backward"))
            assert back < events.index((i, "compute", "backward")) or not prefetch
            assert (back < events.index((i + 1, "reduce", "backward"))) == prefetch
        # Only a chain keeps its last layer.
        assert ((5, "fetch", "backward") in events) != prefetch


@pytest.mark.parametrize("ranks", [2, 3])
def test_without_prefetch_nothing_overlaps_and_the_peak_is_lower(tapes, ranks):
    """
    One layer at a time has more than its shard. The price of prefetch is the memory of a second
    one; without it the last layer is gathered once more. Breaks where the layers are still linked.
    """
    chain = tapes[f"{ranks}-prefetch"]
    alone = tapes[f"{ranks}-demand"]
    busy = [sum(layer["params"] != "shard" or layer["grads"] not in ("none", "shard")
                for layer in frame["layers"])
            for tape in (chain, alone) for frame in tape["ranks"][0]["frames"]]
    frames = len(chain["ranks"][0]["frames"])
    assert max(busy[:frames]) == 3 and max(busy[frames:]) == 1
    more, less = (tape["ranks"][0]["measured"] for tape in (chain, alone))
    assert less["rest_bytes"] == more["rest_bytes"]
    assert less["peak_bytes"] < more["peak_bytes"]
    again = (ranks - 1) * chain["layers"][-1]["shard_bytes"]
    assert less["sent_bytes"] == more["sent_bytes"] + again


def test_a_rank_alone_sends_nothing_and_says_so(tapes):
    """
    No message, none in flight, and no sentence tells of another rank. Breaks where a sentence is
    written for two.
    """
    for name in ("1-prefetch", "1-demand"):
        (rank,) = tapes[name]["ranks"]
        assert rank["measured"]["sent_bytes"] == 0
        assert not any(frame["flight"] for frame in rank["frames"])
        told = [e["text"] for e in rank["events"]] + [text for _, text in rank["scenes"]]
        for text in told:
            assert not re.search("other rank|in flight|each rank|ranks|arrive", text), text
        assert all(layer["bytes"] == layer["shard_bytes"] for layer in tapes[name]["layers"])


def test_the_coloured_areas_of_every_frame_add_up_to_the_live_bytes(every_rank):
    """
    What the states of all layers hold, by the sizes of shards and buffers, is what the ledger found
    in memory after the same event. Breaks where `_move` or `_frame` misunderstands an event.
    """
    for _, rank in every_rank:
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


def test_messages_are_in_flight_from_their_start_until_they_are_waited_for(every_rank):
    """
    Each fetch has its gathered and each reduce its reduced; at the end nothing is in flight. What
    is sent is a shard, to each other rank. Breaks where an event ends another layer's message.
    """
    for tape, rank in ((tape, rank) for tape, rank in every_rank if tape["world_size"] > 1):
        others = tape["world_size"] - 1
        shards = {layer["label"]: others * layer["shard_bytes"] for layer in tape["layers"]}
        told = Counter((e["layer"], e["event"]) for e in rank["events"])
        for name in shards:
            assert told[name, "fetch"] == told[name, "gathered"]
            assert told[name, "fetch"] == 1 + ("Head" not in name or not tape["prefetch"])
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


def test_a_sentence_says_the_bytes_of_its_event(every_rank):
    """
    Whole numbers in a sentence are the event's own: all of its bytes, or those to one other rank.
    Breaks where a sentence tells of what the tape does not have.
    """
    for tape, rank in every_rank:
        for e in rank["events"]:
            told = re.findall(r"[\d,]+(?= bytes)", e["text"])
            each = e["sent_bytes"] // max(1, tape["world_size"] - 1)
            assert {int(n.replace(",", "")) for n in told} <= {e["bytes"], each}
            assert e["layer"] in e["text"] or e["event"] == "norm"


def test_each_event_belongs_to_a_scene_that_says_what_overlaps(tapes):
    """
    Scenes begin at position 0 and go on to the end, two for each layer and a few around. With
    prefetch a scene names all layers that are in flight in it; without it says that there are none.
    Breaks where a scene is cut in two.
    """
    for tape in tapes.values():
        rank = tape["ranks"][0]
        begins = [first for first, _ in rank["scenes"]]
        assert begins[0] == 0 and begins == sorted(set(begins)) and len(begins) == 15
        assert begins[-1] <= len(rank["events"])
        for (first, text), end in zip(rank["scenes"], [*begins[1:], None], strict=True):
            inside = rank["frames"][first:end]
            flying = {short(tape["layers"][m["layer"]]["label"]) for f in inside
                      for m in f["flight"]}
            if tape["prefetch"] and "norm" not in text:
                assert all(name in text.lower() for name in flying), (text, flying)
            moves = [e for e in rank["events"][max(0, first - 1) : end and end - 1]
                     if e["event"].startswith("activations")]
            assert all(short(e["layer"]) in text for e in moves)
            assert ("Nothing overlaps" in text) == (
                not tape["prefetch"] and len(flying) == 1 and not moves)


@pytest.fixture(scope="module", params=["1-prefetch", "2-prefetch", "2-demand", "3-prefetch"])
def leaving(tapes, request):
    """
    A recording whose activations leave
    """
    return tapes[f"{request.param}-leave"]


def test_activations_leave_while_the_next_layer_computes(leaving):
    """
    Those of blocks 1 to 4 begin to leave after the next layer has begun its forward, and before it
    ends it; the layer after that begins without them in memory. Those of 3 to 1 begin to come back
    between the beginning and the end of the backward of the layer above; 4 and the head need no
    read. Breaks if a layer's activations leave after its own forward, or come when it needs them.
    Proves `Order.begin`, `Order.enter`.
    """
    for rank in leaving["ranks"]:
        events = [(int(e["layer"].split()[1]), e["event"], e["phase"]) for e in rank["events"]
                  if e["phase"] != "step"]
        assert [i for i, event, _ in events if event == "activations out"] == [1, 2, 3, 4]
        assert [i for i, event, _ in events if event == "activations in"] == [3, 2, 1]
        for i in (1, 2, 3, 4):
            out = events.index((i, "activations out", "forward"))
            assert events.index((i, "computed", "forward")) < events.index(
                (i + 1, "compute", "forward")) < out < events.index((i + 1, "computed", "forward"))
            if i < 4:
                back = events.index((i, "activations in", "backward"))
                assert events.index((i + 1, "compute", "backward")) < back < events.index(
                    (i + 1, "gradients", "backward"))
                later = events.index((i + 2, "computed", "forward"))
                assert rank["frames"][later + 1]["saved"][i]["state"] == "away"


def test_each_layer_s_activations_go_through_their_states(leaving):
    """
    Here, leaving, away, coming, here. Block 4 and the head are in memory from forward to backward.
    Breaks if a state of the page is another one than that of the memory.
    Proves `Visit.leave`, `Visit.rest`, `Copy.rest`, `Copy.come`.
    """
    whole = ["here", "leaving", "away", "coming", "here"]
    for rank in leaving["ranks"]:
        columns = zip(*(frame["saved"] for frame in rank["frames"]), strict=True)
        for column, wanted in zip(columns, [[], whole, whole, whole, ["here", "leaving", "here"],
                                            ["here"]], strict=True):
            seen = [one["state"] for one in column if one]
            assert [a for a, b in zip(seen, [None, *seen], strict=False) if a != b] == wanted
            # Away is without memory, and all others are with all of it.
            assert all(one["bytes"] == (0 if one["state"] == "away" else one["of"])
                       for one in column if one)
        assert rank["frames"][-1]["saved"] == [None] * 6


def test_the_activations_of_the_tape_are_those_of_the_formula(leaving):
    """
    What leaves, what comes back, and the most that is in memory, to the byte.
    Proves `saved.activations`.
    """
    for rank in leaving["ranks"]:
        frames = [[one or {"bytes": 0, "of": 0} for one in frame["saved"]]
                  for frame in rank["frames"]]
        # The embedding saves the ids of the tokens, which are few bytes and stay.
        nothing, *saved = [max(one["of"] for one in column)
                           for column in zip(*frames, strict=True)]
        expected = activations(saved)
        assert nothing == 0 and saved[0] == saved[1] == saved[2] == saved[3] > saved[4] > 0
        for event, nbytes in (("activations out", expected.out_bytes),
                              ("activations in", expected.in_bytes)):
            assert sum(e["bytes"] for e in rank["events"] if e["event"] == event) == nbytes
        most = max(sum(one["bytes"] for one in frame) for frame in frames)
        assert most == expected.memory_bytes < sum(saved) / 2


def test_activations_that_stay_are_not_on_the_tape(tapes):
    """
    Neither a state nor an event. Apart from those, both tapes have the same events and bytes.
    Breaks if activations that leave change what a rank holds of the model, or sends.
    """
    for key, tape in tapes.items():
        if tape["leave"]:
            continue
        for rank, other in zip(tape["ranks"], tapes[f"{key}-leave"]["ranks"], strict=True):
            assert not any(one for frame in rank["frames"] for one in frame["saved"])
            names = ("layer", "phase", "event", "bytes", "live_bytes", "sent_bytes", "text")
            told = [[tuple(e[name] for name in names) for e in each["events"]
                     if not e["event"].startswith("activations")] for each in (rank, other)]
            assert told[0] == told[1]


def test_the_moments_that_the_page_links_to_show_what_the_links_say(tape):
    """
    A layer computes while the next one arrives; the last layer is whole at the end of forward; a
    gradient is filled while another one is reduced; the peak. Breaks where an event was added and
    the links have old positions.
    """
    rank = tape["ranks"][0]
    at = moments(rank["events"], rank["frames"])
    event = {name: rank["events"][i - 1] for name, i in at.items()}
    frame = {name: rank["frames"][i] for name, i in at.items()}
    computes = [layer["state"] for layer in frame["overlap"]["layers"]].index("computing")
    assert frame["overlap"]["layers"][computes + 1]["state"] == "unsharding"
    assert event["stays"]["event"] == "computed"
    assert frame["stays"]["layers"][-1]["state"] == "whole"
    assert {"gradients", "reducing", "unsharding"} <= {
        layer["state"] for layer in frame["reduce"]["layers"]}
    assert event["peak"]["live_bytes"] == rank["predicted"]["peak_bytes"]
    assert event["peak"]["phase"] == "backward"
    assert at["leave"] == at["come"] == 0


def test_the_moments_of_activations_show_what_the_links_say(tapes):
    """
    Activations leave while the next layer computes, and come back while the layer above fills its
    gradient.
    """
    rank = tapes["2-prefetch-leave"]["ranks"][0]
    at = moments(rank["events"], rank["frames"])
    for name, state, above in (("leave", "leaving", "computing"), ("come", "coming", "computing")):
        frame = rank["frames"][at[name]]
        moving = [one and one["state"] for one in frame["saved"]].index(state)
        assert frame["layers"][moving + 1]["state"] == above


def test_the_pages_get_each_recording_as_a_script(tapes):
    """
    One file for each recording, with the events, states and lines of all ranks, on one scale; and
    the functions of all of them once. Breaks where one rank is taken for all although it differs.
    """
    files = data_files(tapes)
    data = {}
    for name, text in files.items():
        key, value = re.fullmatch(r'\(window.TAPES \|\|= {}\)\["(.+?)"\] = (.*);\n', text).groups()
        assert name == f"tape-{key}.js"
        data[key] = json.loads(value)
    source = data.pop("source")
    assert list(data) == list(tapes)
    for key, told in data.items():
        rank = tapes[key]["ranks"][-1]
        assert told["frames"] == rank["frames"] and told["peak_bytes"] < told["most_bytes"] * 1.01
        assert [e["text"] for e in told["events"]] == [e["text"] for e in rank["events"]]
        assert {f"{file}:{name}" for e in told["events"] for file, _, name in e["lines"]} <= {
            *source}
    assert len({told["most_bytes"] for told in data.values()}) == 1
    odd = copy.deepcopy(tapes["2-prefetch"])
    odd["ranks"][1]["events"][3]["live_bytes"] += 1
    with pytest.raises(ValueError, match="on all ranks"):
        data_files({"2-prefetch": odd})


def test_the_table_compares_all_recordings(tapes):
    """
    Six rows, and the bytes are those that were measured, whether activations leave or not.
    """
    head, *rows = compared(tapes)
    assert len(rows) == 6 and len(head) == 5 and len(tapes) == 12
    stay = {key: tape for key, tape in tapes.items() if not tape["leave"]}
    for row, (key, tape) in zip(rows, stay.items(), strict=True):
        measured = tape["ranks"][0]["measured"]
        assert measured == tapes[f"{key}-leave"]["ranks"][0]["measured"]
        assert row[:2] == [str(tape["world_size"]), "yes" if tape["prefetch"] else "no"]
        assert [int(cell.replace(",", "")) for cell in row[2:]] == [*measured.values()]


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


def test_the_picture_of_the_readme_is_drawn_from_this_step(tape):
    """
    On a dark page, too, where no style sheet is. Breaks with any event or byte that has changed:
    `make tape`, and copy `runs/tape/step.svg` to `docs`.
    """
    assert (ROOT / "docs/step.svg").read_text() == alone(staircase(tape))
    sheet = (ROOT / "docs/book.css").read_text()
    dark = sheet[sheet.index('[data-theme="dark"]'):]
    assert all(f"--{name}: {value};" in dark for name, value in DARK.items())


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

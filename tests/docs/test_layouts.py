"""
# The figures of files, checkpoints and traces show what ranks did, in that order
"""

import re
from itertools import chain, pairwise
from xml.etree import ElementTree

import pytest

from docs import layouts, ranks
from docs.layouts import BUFFERS, LAYERS, WAYS, Bar, Lanes, bars
from docs.svg import Drawing
from zero3.train import launch


@pytest.fixture(scope="module")
def recorded(once):
    """
    The three programs, recorded once
    """
    # Where no ranks have run yet: their imports are most of the time.
    launch.preload("docs.layouts")
    return once("layouts", layouts.record)


def places(rows):
    """
    ## The number of each event in its rows; each may be there once
    """
    told = [(row["layer"], row["event"]) for row in rows]
    assert len(set(told)) == len(told)
    return {each: i for i, each in enumerate(told)}


def states_rows(rows, phase):
    return [row for row in rows if row["phase"] == phase
            and (row.get("holds") == "states" or row["event"] == "step")]


def drawings(html):
    """
    ## The drawings of a figure, parsed: the wide one and the one for phones
    """
    found = [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]
    assert len(found) == 2
    return found


def texts(svg):
    return [each.text for each in svg.iter("{http://www.w3.org/2000/svg}text")]


# -------------------------------------------------------------------------------------------- files


def test_all_ranks_move_the_same_things_in_the_same_order(recorded):
    """
    I6, without which rank 0 could not stand for both. Breaks if a read or a write depends on the
    rank.
    """
    order = [[(row["layer"], row["event"], row["bytes"]) for row in rank["files"]]
             for rank in recorded["old"]]
    assert order[0] == order[1]
    passes = [[[(row["name"], row["event"]) for row in step["rows"]] for step in rank["trace"]]
              for rank in recorded["old"]]
    assert passes[0] == passes[1]


def test_a_shard_is_read_two_layers_ahead(recorded):
    """
    While layer l computes, the all-gather of layer l + 1 and the read of layer l + 2 are under way.
    Breaks if `fetch_params` does not begin to read the layers after its own.
    """
    at = places(layouts.forward_rows(recorded))
    for layer in range(layouts.SHOWN - 2):
        begins = at[layer, "compute"]
        ends = at[layer, "computed"]
        assert at[layer + 2, "read"] < begins < ends
        assert at[layer + 1, "fetch"] < begins < ends
        # The last arrivals are behind the end of the figure.
        assert ends < at.get((layer + 2, "arrived"), ends + 1)
        assert ends < at.get((layer + 1, "gathered"), ends + 1)


def test_the_frames_of_the_files_figure_say_what_happens_in_them(recorded):
    """
    The sentences above the two pipelines, read from their bars. Breaks if a moment is drawn at
    another place, or if the sentences name other layers.
    """
    def during(found, kind, layer):
        (moment,) = [bar.begin for bar in found if (bar.kind, bar.layer) == (kind, layer)]
        return {(bar.kind, bar.layer) for bar in found if bar.spans(moment)}

    forward = bars(layouts.forward_rows(recorded))
    assert during(forward, "compute", 1) == {("compute", 1), ("fetch", 2), ("read", 3)}
    step = bars(layouts.step_rows(recorded))
    assert during(step, "step", 3) == {("step", 3), ("read", 4), ("write", 2)}


def test_one_buffer_is_read_into_one_is_stepped_and_one_is_written_from(recorded):
    """
    While a shard is stepped, the next one's states are being read and the previous one's written,
    each in a buffer of its own. Breaks if the step waits for a write before it steps the next.
    """
    rows = states_rows(recorded["old"][0]["files"], "step")
    order = [(row["layer"], row["event"]) for row in rows]
    lane_of = layouts.turns(bars(layouts.step_rows(recorded)))
    for layer in range(1, LAYERS - 1):
        step = order.index((layer, "step"))
        assert (layer + 1, "read") in order[:step] and (layer + 1, "arrived") in order[step:]
        write = order.index((layer - 1, "write"))
        assert write < step and (layer - 1, "written") not in order[write:step]
        assert len({lane_of[each] for each in (layer - 1, layer, layer + 1)}) == BUFFERS


def test_the_bytes_are_those_of_a_shard_and_its_states(recorded):
    """
    64 x 64 weights on two ranks: a shard has 8,192 bytes, master and two moments as many each, and
    the gradient too. Breaks if a figure says the bytes of something else.
    """
    shard_bytes = 64 * 64 * 4 // layouts.OLD_RANKS
    rows = recorded["old"][0]["files"]
    for row in rows:
        if row["event"] == "read" and row["holds"] == "shard":
            assert row["bytes"] == shard_bytes
        if row["event"] == "write":
            assert row["bytes"] == shard_bytes * (1 if row["phase"] == "backward" else 3)
    reads = [row["bytes"] for row in states_rows(rows, "step") if row["event"] == "read"]
    # The gradient of shard 2 is still in its buffer.
    assert reads == [3 * shard_bytes] + [4 * shard_bytes] * (LAYERS - BUFFERS)
    for svg in drawings(layouts.files(recorded)):
        said = " ".join(texts(svg))
        assert f"{shard_bytes:,} bytes" in said and f"{4 * shard_bytes:,} bytes" in said


def test_backward_reads_the_first_states_and_forward_waits_for_the_last_writes(recorded):
    """
    The caption's two claims. Breaks if `ShardStates.prefetch` is empty, or if a step waits for all
    of its writes.
    """
    rows = recorded["old"][0]["files"]
    backward = states_rows(rows, "backward")
    assert [row["layer"] for row in backward if row["event"] == "read"] == [*range(BUFFERS - 1)]
    waited = {row["layer"] for row in states_rows(rows, "forward") if row["event"] == "written"}
    assert waited == {*range(LAYERS - BUFFERS, LAYERS)}
    open_bars = {bar.layer for bar in bars(layouts.step_rows(recorded)) if not bar.ended}
    assert open_bars == waited


def test_bars_keep_the_order_of_events():
    """
    The worked example of the chapter. Breaks if something that spans another thing would be drawn
    beside it.
    """
    def row(layer, event):
        return {"layer": layer, "event": event, "phase": "forward", "bytes": 0}

    found = bars([row(2, "read"), row(0, "compute"), row(0, "computed"), row(2, "arrived"),
                  row(2, "fetch")])
    assert [(bar.kind, bar.layer, bar.begin, bar.end, bar.ended) for bar in found] == [
        ("compute", 0, 0, 1, True), ("read", 2, 0, 1, True), ("fetch", 2, 1, 2, False)]


def test_each_bar_takes_a_moment_and_a_layer_has_one_bar_at_a_time(recorded):
    """
    In forward a layer is read, gathered and computed one after the other. A buffer has one shard at
    a time. Breaks if two bars would lie on each other.
    """
    forward = bars(layouts.forward_rows(recorded))
    step = bars(layouts.step_rows(recorded))
    lane_of = layouts.turns(step)
    lanes: dict[object, list[Bar]] = {}
    for bar in forward:
        lanes.setdefault(("layer", bar.layer), []).append(bar)
    for bar in step:
        lanes.setdefault(("buffer", lane_of[bar.layer]), []).append(bar)
    for lane in lanes.values():
        lane.sort(key=lambda bar: bar.begin)
        assert all(bar.begin < bar.end for bar in lane)
        assert all(a.end <= b.begin for a, b in pairwise(lane))


# ------------------------------------------------------------------------------------------ reshard


def test_the_arrows_cover_each_parameter_exactly_once(recorded):
    """
    All ranges together are all elements of all parameters. Breaks if a new rank reads what belongs
    to another one, or does not read what belongs to it.
    """
    (flat,) = {str(rank["flat"]): rank["flat"] for rank in recorded["new"]}.values()
    covered = [(read["param"], read["first"] + i) for read in layouts.reads_of(recorded)
               for i in range(read["numel"])]
    sizes = {"weight": 6, "bias": 2, "scale": 2}
    assert {entry["names"][0] for entry in flat["params"]} == sizes.keys()
    assert sorted(covered) == sorted((name, i) for name, n in sizes.items() for i in range(n))


def test_an_arrow_leads_from_the_elements_in_a_file_to_the_same_elements_of_a_shard(recorded):
    """
    The values of an arrow's range are the same at both ends, and all other elements of the new
    shards are padding. Breaks if offsets in files or shards are mistaken.
    """
    old = [rank["shard"] for rank in recorded["old"]]
    new = [rank["shard"] for rank in recorded["new"]]
    assert [*map(len, old)] == [5, 5] and [*map(len, new)] == [4, 4, 4]
    arrived = [[0.0] * len(shard) for shard in new]
    for read in layouts.reads_of(recorded):
        values = old[read["file"]][read["begin"] : read["begin"] + read["numel"]]
        first = read["offset"] - read["rank"] * len(new[0])
        arrived[read["rank"]][first : first + read["numel"]] = values
    assert arrived == new
    assert [*chain.from_iterable(new)] == [*map(float, range(1, 11)), 0.0, 0.0]


def test_the_arrows_are_the_ranges_that_the_load_read(recorded):
    """
    Each arrow was read twice for the parameter and twice for each moment, and nothing else was.
    Breaks if the load no longer checks everything first, or if a moment is read in other ranges.
    """
    for rank, told in enumerate(recorded["new"]):
        drawn = [(read["param"], read["first"], read["numel"], read["file"], read["begin"])
                 for read in layouts.reads_of(recorded) if read["rank"] == rank]
        for key in ("param", "exp_avg", "exp_avg_sq"):
            read = [(row["param"], row["first"], row["numel"], row["file"], row["begin"])
                    for row in told["reads"] if row["key"] == key]
            assert sorted(read) == sorted(drawn * 2)
        assert len(told["reads"]) == 6 * len(drawn)


# -------------------------------------------------------------------------------------------- trace


def gathered(rows):
    """
    ## The layers that were prefetched, those gathered on demand, and those not used

    A layer is prefetched if another layer computed between the start of its all-gather and the end.
    """
    at = {(row["name"], row["event"]): i for i, row in enumerate(rows)}
    order = [row["name"] for row in rows if row["event"] == "compute"]
    ahead = [name for name in order if any(
        at[name, "fetch"] < at[other, "compute"] < at[name, "gathered"] for other in order)]
    unused = [name for name, event in at if event == "fetch" and name not in order]
    return ahead, [name for name in order if name not in ahead], unused


def test_a_pass_prefetches_along_the_trace_until_it_differs(recorded):
    """
    The notes of the four steps. Breaks if the trace is not learnt after a pass, or is followed
    after it was wrong.
    """
    steps = recorded["old"][0]["trace"]
    assert tuple(step["way"] for step in steps) == WAYS
    assert [gathered(step["rows"]) for step in steps] == [
        ([], ["first", "left", "third", "last"], []),
        (["left", "third", "last"], ["first"], []),
        ([], ["first", "right", "third", "last"], ["left"]),
        (["right", "third", "last"], ["first"], [])]


def test_the_bars_of_a_pass_are_its_events(recorded):
    """
    A prefetched layer's all-gather is drawn above the computation of another layer, one on demand
    is not, and a pass waits for exactly those. Breaks if the drawing has another order.
    """
    for step in recorded["old"][0]["trace"]:
        ahead, on_demand, unused = gathered(step["rows"])
        found = bars(step["rows"])
        computes = {bar.name: bar for bar in found if bar.kind == "compute"}
        fetches = {bar.name: bar for bar in found if bar.kind == "fetch"}
        assert [*computes] == [row["name"] for row in step["rows"] if row["event"] == "compute"]
        assert layouts.unused(found) == unused
        for name, fetch in fetches.items():
            overlaps = any(fetch.spans(bar.begin) for bar in computes.values())
            assert overlaps == (name in ahead or name in unused)
            assert name in unused or fetch.end <= computes[name].begin
        waits = [name for name, bar in computes.items()
                 if bar.begin not in {0, *(other.end for other in computes.values())}]
        assert waits == on_demand


# ------------------------------------------------------------------------------------------ drawing


@pytest.mark.parametrize("name", ["files", "reshard", "trace"])
def test_each_figure_fits_into_a_wide_window_and_into_a_phone(recorded, name):
    """
    A text that does not fit raises an error. Breaks if a figure gets wider, or loses its title, its
    description or the origin of its run.
    """
    html = getattr(layouts, name)(recorded)
    widths = []
    for svg in drawings(html):
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        widths.append(width)
        title, about = list(svg)[:2]
        assert title.text and len(about.text) > 100
        for rect in svg.iter("{http://www.w3.org/2000/svg}rect"):
            x, y, w, h = (float(rect.attrib[key]) for key in ("x", "y", "width", "height"))
            assert -0.5 <= x and -0.5 <= y and x + w <= width + 0.5 and y + h <= height + 0.5
        for text in svg.iter("{http://www.w3.org/2000/svg}text"):
            assert 0 < float(text.attrib["y"]) <= height
    assert widths == [layouts.WIDE, layouts.PHONE]
    assert f"commit {recorded['commit']}</figcaption>" in html


def test_a_text_that_does_not_fit_into_its_bar_is_an_error():
    """
    Breaks if `Lanes.bar` draws over the next bar.
    """
    lanes = Lanes(Drawing(200, 50, "title", "about"), 0, 0, 24, 40)
    lanes.bar(0, 0, 1, "file", "read")
    with pytest.raises(ValueError, match="does not fit into a bar that is 40 wide"):
        lanes.bar(0, 1, 2, "file", "a longer text")


def test_figures_of_ranks_say_what_the_formulas_say():
    """
    What crosses the link in the drawn gather and in the drawn reduction, each rank's sums, a split
    network against the whole one, and the half of the weights that is pruned. Breaks if an arrow
    or a number is drawn by hand.
    """
    rows, reduced = ranks.gather_rows(), ranks.hybrid_rows()
    # (M - 1) s elements of each rank, with M = R = 2 and s = 1 or 2.
    assert (ranks.crossing(rows), ranks.crossing(reduced)) == (4 * 1, 4 * 2)
    flat = [rows[0], ranks.Row("", "whole", rows[2].parts, ranks.anyone)]
    assert ranks.crossing(flat) == 8 and rows[0].parts == [[1], [3], [2], [0]]
    assert reduced[-1].parts == [[4, 3], [5, 0], [4, 3], [5, 0]]
    assert ranks.split_rows()[-1].parts == [[1 + 3, 2 + 3]] * 2
    assert [each.parts for each in ranks.pruned_rows()[1:]] == [[[5], [5]],
                                                               [[9, -8, 6, 0], [0, 7, 0, 0]]]
    for picture in (ranks.links, ranks.mesh, ranks.tensor, ranks.thresholds):
        assert picture().count("<svg") == 2

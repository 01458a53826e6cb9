"""
# The figures of timelines, a bucket and streams: what is drawn is what was recorded
"""

from itertools import combinations
from xml.etree import ElementTree

import pytest

from docs import svg
from docs.bucketing import bucket, draw_bucket
from docs.orderings import MIDDLE, are_free, arrows, bars, beside, draw_streams, streams
from docs.svg import Drawing
from docs.timelines import (
    LAYERS,
    Timeline,
    backward,
    draw_backward,
    draw_prefetch,
    held,
    positions,
    prefetch,
    record,
    spans,
)
from tests.streams import before
from zero3.train import launch

DRAWN = {"prefetch": draw_prefetch, "backward": draw_backward, "bucket": draw_bucket,
         "streams": draw_streams}


@pytest.fixture(scope="module")
def run(once):
    """
    All runs of the figures, recorded once
    """
    # Where no ranks have run yet: their imports are most of the time.
    launch.preload("docs.timelines")
    return once("timelines", record)


def timeline(run, key, phase):
    """
    ## A phase of a run in an empty drawing
    """
    return Timeline(Drawing(svg.WIDE, 100, "", ""), run[key], phase)


def texts(drawing):
    """
    ## The texts of a drawing: left, right, baseline and words
    """
    for node in ElementTree.fromstring(str(drawing)):
        if node.tag.endswith("}text"):
            # Narrower than `svg.LETTER`, which is the widest that a letter is taken to be.
            wide = 0.48 * svg.FONT * len(node.text)
            x = float(node.get("x"))
            left = x - {"start": 0, "middle": wide / 2, "end": wide}[node.get("text-anchor")]
            yield left, left + wide, float(node.get("y")), node.text


def test_in_a_chain_the_next_layer_arrives_while_one_computes(run):
    """
    Forward, for each layer but the last: the next fetch is before its computation, and the next
    computation after it. Breaks if `Zero3Sequential.walk` gathers only the layer at hand.
    """
    found = spans(run["chain"])
    forward = {(s.what, s.layer): s for s in reversed(found)}
    for i in range(LAYERS - 1):
        computes = forward["compute", i]
        arrives = forward["flight", i + 1]
        assert arrives.begin < computes.begin < computes.end < arrives.end
        assert computes.end < forward["compute", i + 1].begin
        assert timeline(run, "chain", "forward").meanwhile(i) == [
            f"While layer {i} computes, layer {i + 1} arrives"]


def test_in_no_chain_nothing_overlaps(run):
    """
    Neither an all-gather nor a reduce is in flight while any layer computes. Breaks if the two runs
    are mixed up.
    """
    found = spans(run["alone"])
    computations = [s for s in found if s.what == "compute"]
    messages = [s for s in found if s.what in ("flight", "reduce")]
    assert len(computations) == 2 * LAYERS and len(messages) == 3 * LAYERS
    for c in computations:
        assert all(m.end <= c.begin or c.end <= m.begin for m in messages)


def test_backward_gathers_the_layer_below_and_reduces_the_layer_above(run):
    """
    While a layer goes backward, with one reduce in flight at most, and at most two full gradients.
    Breaks if a layer waits for its own reduce.
    """
    t = timeline(run, "chain", "backward")
    for computes in t.of("compute"):
        i = computes.layer
        assert t.beside("flight", computes) == [i - 1] * (i > 0)
        assert t.beside("reduce", computes) == [i + 1] * (i < LAYERS - 1)
    for event in range(t.first, t.last):
        at = [s.what for s in t.spans if s.begin <= event < s.end]
        assert at.count("reduce") <= 1 and at.count("grad") <= 2
    assert len(t.of("reduce")) == len(t.of("grad")) == LAYERS
    assert len(t.of("flight")) == LAYERS - 1
    # Each full gradient is filled before its reduce begins, and stays until it ends.
    for grad, reduce in zip(t.of("grad"), t.of("reduce"), strict=True):
        assert grad.layer == reduce.layer and grad.begin < reduce.begin < reduce.end == grad.end


@pytest.mark.parametrize("key", ["chain", "alone"])
def test_the_kinds_of_memory_add_up_to_the_live_bytes(run, key):
    """
    After each event. Breaks if `held` misunderstands an event.
    """
    for e, now in zip(run[key], held(run[key]), strict=True):
        assert sum(now.values()) == e["live_bytes"], e
        assert min(now.values()) >= 0


@pytest.mark.parametrize("key", ["chain", "alone"])
def test_events_are_drawn_in_their_order(run, key):
    """
    No event is to the left of an earlier one, and each computation is as wide as the others, so no
    picture shows a time. Breaks if an interval has two widths.
    """
    at = positions(run[key])
    assert at == sorted(at) and len(at) == len(run[key])
    wide = [at[s.end] - at[s.begin] for s in spans(run[key]) if s.what == "compute"]
    assert wide == pytest.approx([1.0] * (2 * LAYERS))


def test_prefetch_shortens_the_pass_and_takes_the_memory_of_a_layer(run):
    """
    The two drawings of one figure: shorter by an all-gather for each layer but the first, and
    higher by one full layer.
    """
    chain = timeline(run, "chain", "forward")
    alone = timeline(run, "alone", "forward")
    assert alone.length - chain.length == LAYERS - 1
    assert chain.peak_bytes() - alone.peak_bytes() == run["chain"][0]["bytes"]
    about = draw_prefetch(run, svg.WIDE).about
    assert f"at most {chain.peak_bytes()} bytes" in about
    assert f"at most {alone.peak_bytes()} bytes" in about


def test_a_bucket_sends_the_same_bytes_in_one_reduce_scatter(run):
    """
    On each rank, and the sums are the same. What is drawn are these collectives. Breaks if a bucket
    packs padding of its own.
    """
    for rank in run["buckets"]:
        together = rank["with"]["sent"]
        alone = rank["without"]["sent"]
        assert len(together) == 1 and len(alone) == 2
        assert sum(e["sent_bytes"] for e in together) == sum(e["sent_bytes"] for e in alone)
        assert rank["with"]["sums"] == rank["without"]["sums"]
    words = [text for *_, text in texts(draw_bucket(run, svg.WIDE))]
    assert "together: 1 reduce-scatter" in words and "alone: 2 reduce-scatters" in words
    for each in (*together, *alone):
        assert f"{each['sent_bytes']} bytes" in words


def test_each_row_of_the_bucket_has_the_gradients_of_all_layers(run):
    """
    The row for a rank is that rank's row of each layer's gradient, and the sum of these rows over
    the ranks is what the rank's shards receive.
    """
    sent = [rank["with"]["sent"][0] for rank in run["buckets"]]
    for each in sent:
        for row, values in enumerate(each["rows"]):
            assert values == [x for i in (1, 0) for x in each["grads"][i][row]]
    for rank, told in enumerate(run["buckets"]):
        total = [sum(column) for column in zip(*(each["rows"][rank] for each in sent), strict=True)]
        assert total == [*told["with"]["sums"][1], *told["with"]["sums"][0]]
    # The example at the head of `buckets.py`, and that of `layer.py`.
    assert sent[0]["rows"] == [[1, 2, 5], [3, 0, 6]]
    assert [told["with"]["sums"][1] for told in run["buckets"]] == [[3, 2], [4, 0]]


def test_each_arrow_between_streams_is_an_order_of_the_recording(run):
    """
    The last operation of the upper bar is certainly over when the lower one begins, and they are on
    two streams. And each bar is of operations in the log. Breaks if an arrow is drawn by hand.
    """
    drawn = bars(run["streams"])
    log = [each["operation"] for each in run["streams"]]
    for bar in drawn:
        assert all(any(operation is one for one in log) for operation in bar.operations)
    found = arrows(drawn)
    for a, b in found:
        assert before(a.operations[-1], b.operations[0]) and a.line != b.line
        assert a.top + a.rows <= b.top
    names = {(a.name, b.name) for a, b in found}
    middle = f"layer {MIDDLE}"
    assert {(f"copy {MIDDLE}", f"gather {MIDDLE}"), (f"gather {MIDDLE}", middle),
            (middle, f"reduce {MIDDLE}"), (f"reduce {MIDDLE}", f"sum {MIDDLE}"),
            (f"to CPU {MIDDLE}", "step")} <= names


def test_the_shaded_band_has_exactly_what_may_run_beside_the_layer(run):
    """
    A bar is in the rows of the middle layer's computation if neither waits for the other. Breaks if
    compute waits for the copy of the next layer.
    """
    drawn = bars(run["streams"])
    forward, backward = (b for b in drawn if (b.kind, b.layer) == ("layer", MIDDLE))
    for bar in (forward, backward):
        inside = [b for b in drawn if b is not bar and b.top < bar.top + bar.rows
                  and bar.top < b.top + b.rows]
        assert inside == [b for b in drawn if are_free(bar, b)]
    assert beside(forward, drawn) == ["copy 2", "gather 2"]
    assert sorted(beside(backward, drawn)) == ["copy 0", "gather 0", "reduce 2"]


@pytest.mark.parametrize("width", [svg.WIDE, svg.PHONE])
@pytest.mark.parametrize("name", DRAWN)
def test_all_texts_fit_and_none_is_upon_another(run, name, width):
    """
    `Drawing.text` raises if a text is wider than the drawing. Breaks if a lane has no height.
    """
    drawing = DRAWN[name](run, width)
    root = ElementTree.fromstring(str(drawing))
    assert root[0].text and len(root[1].text) > 100
    found = [*texts(drawing)]
    assert len(found) > 10
    for one, other in combinations(found, 2):
        apart = one[1] <= other[0] or other[1] <= one[0] or abs(one[2] - other[2]) >= 13
        assert apart, (one, other)
    assert all(12 <= y <= drawing.height for _, _, y, _ in found)


def test_each_figure_says_where_it_comes_from(run):
    """
    The caption ends with ranks, device, torch and commit.
    """
    for draw in (prefetch, backward, bucket, streams):
        html = draw(run)
        assert html.count("<svg") == 2
        assert html.endswith(f"{run['origin']}.</figcaption></figure>")

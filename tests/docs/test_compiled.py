"""
# The drawings of the compiler's passes show the graphs that the passes made
"""

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from docs import compiled, svg
from docs.compiled import CAPTIONS, LIMIT, Pictures, bars


@pytest.fixture(scope="module")
def recorded(once):
    """
    The graphs after each pass, traced once
    """
    return once("compiled", compiled.record)


def found(recorded, name, backward=False):
    """
    ## The bars of a graph, by what they are and by layer
    """
    graph = recorded.steps[name][backward]
    return {(bar.what, bar.layer): bar for bar in bars(graph) if bar.what != "compute"}, graph


def test_every_pass_has_a_figure(recorded):
    """
    And each is drawn beside the graph before it. Breaks if a pass is added without a caption.
    """
    assert [*recorded.steps] == ["traced", *CAPTIONS]
    for before, name in pairwise(recorded.steps):
        shown = Pictures(recorded, name, svg.WIDE).shown
        assert shown == {f"before {name}": before, f"after {name}": name}


def test_the_captions_are_true(recorded):
    """
    Of what each pass changes in this example. Breaks if a pass or the order of passes changes, and
    the words under its figure stay.
    """
    flights = {name: {layer for what, layer in found(recorded, name, True)[0] if what == "flight"}
               for name in recorded.steps}
    assert flights["insert"] == {"b", "c", "d"} and flights["keep"] == {"b"}
    assert recorded.steps["keep"][1].kept == ["d", "c"]

    def beside(name, what):
        """Layers whose bar overlaps the computation of another layer"""
        return {layer for forward in (False, True) for (kind, layer), bar
                in found(recorded, name, forward)[0].items() if kind == what
                and any(c.what == "compute" and c.layer != layer
                        and bar.begin < c.end and c.begin < bar.end
                        for c in bars(recorded.steps[name][forward]))}

    assert not beside("insert", "flight") and not beside("keep", "flight")
    # The first one has nothing to overlap.
    assert beside("prefetch", "flight") == {"b", "c", "d"}
    assert not beside("bucket", "reduce") and beside("sink", "reduce") == {"c", "d"}
    # Only in a shared reduce-scatter does a gradient wait.
    assert not any(what == "grad" for what, _ in found(recorded, "insert", True)[0])
    assert {layer for what, layer in found(recorded, "bucket", True)[0] if what == "grad"} == {
        "b", "d"}
    shared = [each.layers for each in recorded.steps["bucket"][1].operations
              if each.kind == "reduce"]
    assert shared == [["d", "c"], ["b", "a"]]
    assert all(len(each.layers) == 1 for graph in recorded.steps["sink"]
               for each in graph.operations if each.kind == "gather")


def test_no_graph_has_more_full_elements_than_the_limit(recorded):
    """
    And bars of full or arriving parameters add up to what the compiler counts, at each operation.
    Breaks if a bar begins or ends in another column.
    """
    for name, graphs in recorded.steps.items():
        if name == "traced":
            continue
        for graph in graphs:
            drawn = [each for each in graph.operations if each.kind != "collect"]
            for at, operation in enumerate(drawn):
                full = {bar.layer for bar in bars(graph) if bar.what in ("flight", "whole")
                        and bar.begin <= at < bar.end}
                assert sum(recorded.numel[layer] for layer in full) == operation.full_numel
                assert operation.full_numel <= LIMIT


def test_each_product_belongs_to_a_layer(recorded):
    """
    One in forward, and two in backward; the first layer has no gradient of its input. Breaks if the
    gradient of a weight is drawn in another row.
    """
    for forward, backward in recorded.steps.values():
        for graph, counts in ((forward, (1, 1, 1, 1)), (backward, (1, 2, 2, 2))):
            drawn = [bar.layer for bar in bars(graph) if bar.what == "compute"]
            assert tuple(map(drawn.count, "abcd")) == counts


@pytest.mark.parametrize("width", [svg.WIDE, svg.PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("name", CAPTIONS)
def test_a_drawing_stays_inside_its_frame(recorded, name, width):
    """
    Bars, curves and texts; and it tells a screen reader all operations. Breaks if a graph gets more
    columns than there is room for.
    """
    drawing = Pictures(recorded, name, width).draw()
    parsed = ElementTree.fromstring(str(drawing))
    for rect in parsed.iter("{http://www.w3.org/2000/svg}rect"):
        x, y, wide, high = (float(rect.get(key)) for key in ("x", "y", "width", "height"))
        assert 0 <= x and x + wide <= width and 0 <= y and y + high <= drawing.height
    for polygon in parsed.iter("{http://www.w3.org/2000/svg}polygon"):
        points = [tuple(map(float, each.split(","))) for each in polygon.get("points").split()]
        assert all(0 <= x <= width and 0 <= y <= drawing.height for x, y in points)
    assert f"{name}, forward: " in drawing.about and f"{name}, backward: " in drawing.about
    assert drawing.about.count("compute a") == 4


def test_a_figure_says_where_it_is_from(recorded):
    """
    Torch and commit, for both widths. Breaks without the commit.
    """
    for name in CAPTIONS:
        html = compiled.figure(recorded, name)
        assert html.count("<svg") == 2 and re.search(r"torch \S+, commit \w+", html)

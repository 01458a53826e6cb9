"""
# The example that the book draws: its numbers are those of a real step and of the text
"""

import copy
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from docs import boxes, example
from docs.boxes import STAGES, STRIPS, Layout, Picture, number
from zero3 import Offload, Zero3Layer, Zero3Optimizer, save
from zero3.comm.collectives import Communicator
from zero3.flat import FlatParameter, InFlight
from zero3.train import launch
from zero3.train.report import COLORS

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def recorded(once):
    """
    The example on two ranks, recorded once
    """
    # Where no ranks have run yet: their imports are most of the time.
    launch.preload("docs.example")
    return once("example", example.record)


def values(recorded, stage, box, part="ranks"):
    """The contents of a box on each rank"""
    return [stages[stage]["boxes"][box]["values"] for stages in recorded[part]]


def table_of_the_text():
    """The table at the head of `minimal.py`: for each row, the numbers of rank 0 and of rank 1"""
    text = (ROOT / "zero3/minimal.py").read_text()
    lines = text.split("| | rank 0 | rank 1 | |\n")[1].split("\n\n")[0].splitlines()[1:]
    rows = {}
    for line in lines:
        name, *ranks = line.strip("|").replace("*", "").split("|")[:3]
        rows[name.strip()] = [[float(v) for v in rank.split()] for rank in ranks]
    return rows


def test_the_record_equals_the_table_in_the_text(recorded):
    """
    Row by row, each number. Breaks if the library moves a number elsewhere, and if somebody types
    another number or another row into the table.
    """
    arrived = [weight + bias + [0.0] for weight, bias in zip(
        values(recorded, "weight.grad", "weight"), values(recorded, "bias.grad", "bias"),
        strict=True)]
    found = {
        "flatten and pad": values(recorded, "merge", "full"),
        "shard": values(recorded, "shard", "shard"),
        "all-gather": values(recorded, "whole", "full"),
        "free": [[], []],
        "gradients": arrived,
        "divide by 2": values(recorded, "grads", "grad"),
        "reduce-scatter": values(recorded, "reduced", "reduced"),
        "step, rate 0.1": [[float(number(v)) for v in rank]
                           for rank in values(recorded, "step", "shard")],
    }
    assert found == table_of_the_text()
    assert values(recorded, "rewhole", "full") == found["all-gather"]
    assert values(recorded, "scatter", "shard") == found["shard"]
    assert values(recorded, "free", "shard") == found["shard"]


def test_the_update_is_that_of_plain_pytorch_on_the_global_batch(recorded):
    """
    Bitwise: the sum of two gradients does not depend on their order. Breaks without the division by
    the number of ranks, and with a gradient in the wrong place.
    """
    layer = example.linear()
    optimizer = torch.optim.SGD(layer.parameters(), lr=example.RATE, momentum=example.MOMENTUM)
    (sum(example.loss(layer, rank) for rank in range(2)) / 2).backward()
    optimizer.step()
    plain = torch.cat([p.detach().flatten() for p in (layer.weight, layer.bias)]).tolist()
    for part, stage in (("ranks", "step"), ("files", "file step"), ("checkpoint", "saved")):
        shards = values(recorded, stage, "shard", part)
        assert shards[0] + shards[1] == [*plain, 0.0]
    assert values(recorded, "step", "state") == values(recorded, "step", "reduced")
    assert [rank["saved"]["names"] for rank in recorded["checkpoint"]] == [["weight"], ["bias"]]


def test_each_stage_holds_these_bytes(recorded):
    """
    On both ranks, as the storages have them. Breaks if a stage keeps a buffer that the next one
    should not see, the full parameters for instance.
    """
    expected = {"born": 12, "merge": 28, "scatter": 36, "shard": 8, "fetch": 24, "whole": 24,
                "free": 8, "refetch": 24, "rewhole": 24, "bias.grad": 4, "weight.grad": 8,
                "grads": 40, "refree": 24, "reduce": 40, "sum": 48, "reduced": 16,
                "step": 24, "rest": 16}
    for rank in recorded["ranks"]:
        assert {name: stage["bytes"] for name, stage in rank.items()} == expected
    for rank in recorded["files"]:
        assert [(s["bytes"], s["file_bytes"]) for s in rank.values()] == [(0, 8), (16, 8), (0, 16)]


def test_notes_that_miss_memory_are_refused():
    """
    The gradient of the shard is there, and noted; a second tensor is there, and not noted. Breaks
    where the notes are not compared with the storages.
    """
    notes = example.Notes()
    layer = example.Watched(example.linear(), notes)
    notes.look("good")
    layer.register_buffer("more", torch.zeros(2))
    with pytest.raises(RuntimeError, match=r"Expected: 20 bytes\. Got: 12"):
        notes.look("bad")


# ---------------------------------------------------------------------------------------- drawings


def drawing(recorded, name, width=640):
    """The parsed drawing of a figure"""
    return ElementTree.fromstring(str(Picture(recorded, Layout(width), *STRIPS[name]).draw()))


def numbers(root):
    """All texts of a drawing that are a number, or bytes, or sums, sorted"""
    texts = [e.text for e in root.iter(f"{SVG}text")]
    return sorted(text for text in texts if re.fullmatch(r"[=\d., +]+|\d+ (bytes|in a file)", text))


def shown(recorded, name):
    """The same, from the record"""
    texts = []
    for stage in STRIPS[name][1]:
        ranks = recorded[STAGES[stage].source]
        for rank in ranks:
            kinds = [(stage, kind) for kind in rank[stage]["boxes"]]
            if stage == "grads":
                kinds += [("weight.grad", "weight"), ("bias.grad", "bias")]
            texts += [number(value) for at, kind in kinds
                      for value in rank[at]["boxes"][kind]["values"] if value is not None]
        for unit, key in (("bytes", "bytes"), ("in a file", "file_bytes")):
            held = ranks[0][stage].get(key, 0)
            texts += [f"{held} {unit}"] * bool(held)
        if stage == "reduced" and "reduce" in STRIPS[name][1]:
            (a, b, c, d), (e, f, g, h) = (map(number, grad) for grad in
                                          values(recorded, "grads", "grad"))
            texts += [f"= {a} + {e}, {b} + {f}", f"= {c} + {g}, {d} + {h}"]
    return sorted(texts)


def changed(recorded):
    """Another record, with other numbers and bytes"""
    other = copy.deepcopy(recorded)
    for part in ("ranks", "files", "checkpoint"):
        for stages in other[part]:
            for stage in stages.values():
                stage["bytes"] += 100 * bool(stage["bytes"])
                for box in stage["boxes"].values():
                    box["values"] = [v if v is None else v + 5 for v in box["values"]]
    return other


@pytest.mark.parametrize("width", [640, 360])
@pytest.mark.parametrize("name", STRIPS)
def test_each_number_in_a_drawing_comes_from_the_record(recorded, name, width):
    """
    All numbers and bytes, no fewer and no more, also of a record with other numbers. Breaks if a
    number is typed.
    """
    for each in (recorded, changed(recorded)):
        assert numbers(drawing(each, name, width)) == shown(each, name)


@pytest.mark.parametrize("stage", STRIPS["life"][1])
def test_the_solid_boxes_of_a_stage_are_its_bytes(recorded, stage):
    """
    Four bytes each, on two ranks. Breaks if a tensor is not drawn, or drawn twice.
    """
    picture = Picture(recorded, Layout(640), "", (stage,))
    height = str(picture.layout.height)
    rects = [e for e in ElementTree.fromstring(str(picture.draw())).iter(f"{SVG}rect")
             if e.get("height") == f"{float(height):.1f}" and "dasharray" not in e.get("style")
             # A shard is painted twice.
             and "stroke:none" not in e.get("style")]
    assert 4 * len(rects) == sum(rank[stage]["bytes"] for rank in recorded["ranks"])


def test_a_figure_says_in_words_what_it_shows(recorded):
    """
    The text for screen readers has each stage, its numbers and its bytes, and the caption the
    origin. Breaks if the drawing gets a stage that is not told.
    """
    figure = boxes.life(recorded)
    about = drawing(recorded, "life").find(f"{SVG}desc").text
    assert all(STAGES[stage].title in about for stage in STRIPS["life"][1])
    assert "rank 0 has shard .7 1.8, mean gradient of the shard 3 2, momentum 3 2; rank 1" in about
    assert "each holds 40 bytes" in about and "all-gather" in about.lower()
    assert f"2 ranks, {recorded['device']}, torch {torch.__version__}, commit" in figure
    assert figure.count("<svg") == 2


def test_the_methods_beside_the_stages_exist():
    """
    Breaks if a method is renamed.
    """
    known = {cls.__name__: cls for cls in (Zero3Optimizer, Communicator, FlatParameter, InFlight)}
    known |= {"Zero3Layer": Zero3Layer, "Offload": Offload, "save": save, "nn": nn}
    for stage in STAGES.values():
        owner, _, name = stage.method.split("(")[0].rpartition(".")
        owners = [known[owner]] if owner else [*known.values()]
        assert any(hasattr(each, name) for each in owners) or name in known, stage.method


def test_pictures_and_pages_have_the_same_colours():
    """
    The colours of matplotlib's figures, and the variables of the light theme. Breaks if one of the
    two files changes a colour.
    """
    css = "\n".join(path.read_text() for path in (ROOT / "docs/tape.css", ROOT / "docs/book.css"))
    light = [css[m.end() : css.index("}", m.end())] for m in re.finditer(r"^:root \{", css, re.M)]
    found = dict(re.findall(r"--c-([\w-]+): *(#[0-9a-f]{6})", "\n".join(light)))
    same = {name for name in COLORS if name in found}
    assert same >= {"shard", "flight", "whole", "compute", "grad", "reduce", "reduced"}
    assert {name: COLORS[name] for name in same} == {name: found[name] for name in same}

"""
# Which layout sends the fewest bytes between nodes: the formula and the table
"""

from fractions import Fraction

import pytest

from tests.commands import python_m
from zero3.comm.encodings import Int4, Int8
from zero3.estimate.between import (
    Layout,
    between_bytes,
    choices,
    layouts,
    row_bytes,
)
from zero3.estimate.formulas import ELEMENT_BYTES


def test_a_layout_counts_ranks_and_bytes_as_its_table_says():
    """
    The table of `Layout`, and the bytes of 64 elements with their scale.
    Proves `Layout.shards`, `Layout.divisor`, `row_bytes`, `Layout`.
    """
    counts = {Layout(4): (4, 4), Layout(2, replicas=2): (2, 4), Layout(2, nodes=2): (4, 4)}
    for layout, expected in counts.items():
        assert expected == (layout.shards, layout.divisor)
    assert [row_bytes(each, 64, 4) for each in (Int8(), Int4(), None)] == [66, 34, 256]


def test_the_example_of_three_weights_has_these_elements():
    """
    The table at the head of `between.py`: what a layer adds that is not the last one.
    Proves `between_bytes`.
    """
    found = {}
    for name, layout in layouts(4, 2).items():
        for by_messages in (True, False):
            two, one = (between_bytes(layout, 2, 3, layers, by_messages) for layers in (2, 1))
            found[name, by_messages] = (two - one) / ELEMENT_BYTES
    assert found["flat", True] == 12 and found["flat", False] == 9
    for by_messages in (True, False):
        assert found["nodes", by_messages] == 6
        assert found["nodes, secondary", by_messages] == found["hybrid", by_messages] == 4


@pytest.mark.parametrize("block, ratio", [(64, Fraction(25, 96)), (128, Fraction(49, 192))])
def test_all_three_ideas_of_zero_plus_plus_send_a_quarter_and_the_scales(block, ratio):
    """
    Of what nodes send in half precision, layer by layer, in shards of whole blocks. The quarter is
    exceeded by 4.2 % with blocks of 64, and by 2.1 % with blocks of 128. Breaks where a pass goes
    between nodes again.
    Proves `between_bytes`.
    """
    everything = Layout(8, 4, weights=Int8(block), gradients=Int4(block), secondary=True)
    sent = []
    for layout in (everything, Layout(8, 4)):
        many, fewer = (between_bytes(layout, 4, 32 * 128 * 10, layers) for layers in (100, 99))
        sent.append(many - fewer)
    assert Fraction(*sent) == ratio
    assert float(ratio * 4 - 1) == pytest.approx({64: 0.042, 128: 0.021}[block], abs=4e-4)


def test_the_fewest_bytes_come_first():
    """
    With messages a copy in 8 bits. In rings two layouts send as good as the same, and the one with
    less memory stands before the other. Breaks where memory is not looked at.
    Proves `choices`, `Choice`.
    """
    found = choices(7e9, 32, 4, by_messages=True)
    assert found[0].name == "everything"
    assert [each.between_bytes for each in found] == sorted(each.between_bytes for each in found)
    assert {each.name for each in found if each.rounds} == {
        "nodes, 8-bit weights", "nodes, 4-bit gradients", "everything"}
    exact = [each for each in choices(7e9, 32, 4) if not each.rounds]
    # The replica pads less, and so it sends a few bytes less.
    assert [each.name for each in exact[:2]] == ["nodes, secondary", "hybrid"]
    assert exact[0].between_bytes > exact[1].between_bytes
    assert exact[0].peak_bytes < exact[1].peak_bytes


def ask(*options):
    return python_m("zero3.estimate", "--params", "7b", "--ranks", "32", *options)


def test_the_command_line_shows_the_best_layout_first():
    """
    The example of the documentation, and options that do not go together.
    Proves `estimate.main`, `check_args`, `show_layouts`, `print_table`.
    """
    told = ask("--nodes", "4", "--link", "25GB", "--gpu", "80GB")
    assert told.returncode == 0 and told.stderr == ""
    rows = {line[:24].strip(): line[24:].split() for line in told.stdout.splitlines()}
    assert rows["flat"][1:4] == ["40.26", "1.611", "exact"]
    assert rows["everything"][1:4] == ["8.20", "0.328", "rounded"]
    assert [*rows].index("everything") + 1 == [*rows].index("nodes, secondary")
    assert "does not fit" not in told.stdout
    told = ask("--nodes", "4", "--messages")
    assert "249.38" in told.stdout and "seconds" not in told.stdout
    assert ask("--nodes", "4", "--gpu", "6GB").stdout.count("does not fit") == 3
    for options, error in ((("--nodes", "3"), "--ranks do not split over --nodes"),
                           (("--nodes", "1"), "--nodes is too small"),
                           (("--nodes", "4", "--cpu", "1TB"), "neither --cpu nor --nvme"),
                           (("--nodes", "4", "--layers", "20000"), "--layers is too large")):
        told = ask(*options)
        assert told.returncode == 2 and error in told.stderr, told.stderr

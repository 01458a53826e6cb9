"""
# Without this line: each mutation of the source shows its symptom, and the source does not
"""

import dataclasses
import functools
import os
import re

import pytest

import zero3
from docs import programs
from docs.annotate import Source
from docs.mutations import MUTATIONS, all_with_lines
from docs.trial import ROOT, Trials, source

BY_NAME = {mutation.name: mutation for mutation in MUTATIONS}


@pytest.fixture(scope="module")
def trials():
    with Trials() as running:
        yield running
    with pytest.raises(ProcessLookupError):
        # Nothing of it is left, or a mutation that hangs would stay.
        os.killpg(running.process.pid, 0)


@pytest.fixture(scope="module")
def healthy(trials):
    """What a program prints with the source as it is; each runs once."""
    return functools.cache(trials.run)


def begins(text, output):
    return any(line.startswith(text) for line in output.splitlines())


@pytest.mark.parametrize("name", BY_NAME)
def test_a_line_that_is_missing_shows_and_the_source_has_it(name, trials, healthy):
    """
    A program prints the symptom with the mutation, and the healthy line without it; and neither the
    other way round. Breaks where a line that the text calls necessary is not.
    """
    mutation = BY_NAME[name]
    without = healthy(mutation.program)
    assert begins(mutation.healthy, without) and not begins(mutation.symptom, without), without
    output = trials.run(mutation.program, mutation)
    assert begins(mutation.symptom, output) and not begins(mutation.healthy, output), output


def test_every_mutation_is_of_whole_lines_in_the_function_that_it_names():
    """
    The lines are in the source once, in that function, and the mutation changes nothing else; the
    invariant is one of the table in the package, and the program one that there is.
    """
    known = {"", *re.findall(r"^\| (I\d+),", zero3.__doc__, re.MULTILINE)}
    assert [mutation for mutation, *_ in all_with_lines()] == MUTATIONS
    assert len(BY_NAME) == len(MUTATIONS) and {"", "I1", "I10"} < known
    for mutation, first, last in all_with_lines():
        rows = source(mutation.file).splitlines(keepends=True)
        assert "".join(rows[first - 1 : last]) == mutation.old
        assert "".join([*rows[: first - 1], mutation.new, *rows[last:]]) == mutation.text()
        lines = Source(ROOT / "zero3" / mutation.file).span(mutation.section)
        assert {first, last} <= set(lines), mutation.name
        assert mutation.breaks in known and callable(getattr(programs, mutation.program))
        assert mutation.line == first and mutation.old != mutation.new and mutation.why


def test_a_mutation_that_does_not_fit_the_source_is_an_error():
    """Of lines that are not there, that are there twice, and of half a line."""
    good = BY_NAME["mean"]
    assert "\n-" + good.old in good.diff() and "\n+" + good.new.rstrip() in good.diff()
    for old in ("        no such line\n", "        if groups:\n        if groups:\n",
                "            for slot in g.slots:\n", good.old.lstrip(), good.old.strip("\n")):
        with pytest.raises(ValueError, match=r"mutation mean\. Expected: .* Got: .* \d+ times"):
            dataclasses.replace(good, old=old).text()


def test_a_rank_that_does_not_answer_is_ended(trials):
    """No mutation can hang, nor hold up the next. Breaks without the limit in `serve`."""
    assert trials.run("late", limit_s=0.01) == "no answer"
    assert trials.run("micro_batches").startswith("gradient of 4 micro-batches: 1.00 times")

"""
# The notebooks run, and print what is kept of them
"""

import pytest

pytest.importorskip("nbclient", reason="the notebooks' libraries are not installed")

from nbclient.exceptions import CellExecutionError
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from notebooks.run import NOTEBOOKS, check, differences, execute, kernel


@pytest.fixture(scope="module")
def client():
    with kernel() as client:
        yield client


@pytest.mark.parametrize("source", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_kept(source, client):
    """
    Breaks with any figure in a notebook that the code no longer gives, and with any error. Proves
    `launch.run`.
    """
    assert check(source, client) == []


def cell(*outputs, source="x", **metadata):
    return new_notebook(cells=[new_code_cell(source, outputs=[*outputs], metadata=metadata)])


def data(**kinds):
    return new_output("display_data", data={k.replace("_", "/"): v for k, v in kinds.items()})


ONE, TWO = (new_output("stream", name="stdout", text=text) for text in ("1\n", "2\n"))
KEPT = cell(ONE, TWO)


@pytest.mark.parametrize("now", [
    cell(TWO, ONE), cell(ONE), cell(ONE, TWO, source="y"),
    cell(ONE, new_output("stream", name="stderr", text="2\n")),
    cell(ONE, TWO, data(text_html="<b>")), cell(ONE, TWO, data(image_png="")),
    cell(ONE, TWO, new_output("error", ename="E", evalue="e")),
    new_notebook(cells=[new_markdown_cell("x")])])
def test_what_differs_from_what_is_kept_is_found(now):
    """
    Another text, order, stream, kind of output or cell. Breaks where something is not looked at.
    """
    assert differences(KEPT, now) and differences(now, KEPT)


def test_pieces_of_a_stream_pictures_and_what_varies_may_differ():
    """A stream that comes in other pieces, the pixels of a picture, and a cell that says so."""
    whole = new_output("stream", name="stdout", text="1\n2\n")
    assert not differences(KEPT, cell(whole))
    assert not differences(cell(data(image_png="a", text_plain="at 1")),
                           cell(data(image_png="b", text_plain="at 2")))
    assert not differences(KEPT, cell(TWO, tags=["varies"]))


def test_a_cell_that_raises_fails_the_notebook_and_the_next_begins_without_names(tmp_path, client):
    """
    Breaks where errors are kept like any other output, or where a notebook runs only after another.
    """
    source = tmp_path / "raises.py"
    for cells, error in (("name = 1\n1 / 0", "ZeroDivisionError"), ("name", "NameError")):
        source.write_text(f"# %%\n{cells}\n")
        with pytest.raises(CellExecutionError, match=error):
            execute(source, client)

"""
# The notebooks run, and print what is kept of them
"""

import pytest

pytest.importorskip("nbclient", reason="the notebooks' libraries are not installed")

from notebooks.run import NOTEBOOKS, check


@pytest.mark.parametrize("source", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_kept(source):
    """
    Breaks with any figure in a notebook that the code no longer gives, and with any error. Proves
    `launch.run`.
    """
    assert check(source) == []

r"""
# Options: what may be passed, and one line when it may not

`whole` and `within` check a number, `folder` checks a place for files, `expect` and `fail` raise
the error, and `Parser` ends a command line with one line in place of a traceback.

A wrong option is cheapest to find before anything starts: before memory is taken and a minute has
passed. Many wrong numbers pass a check that looks right. `nan < 1` is false and so is `nan > 9`, so
a NaN is neither too small nor too large; `1.5` is large enough for a number of threads; and in
Python `True` is 1. So each check here asks for what is right, and refuses the rest:

$$\text{least} \le \text{value} \le \text{most}$$

**Run this**: `python -m zero3.estimate --params nan --ranks 2`.

**Not covered, and what that costs**: values of tensors and of a model. The layers check these, and
name the rank and the parameter.
"""

import argparse
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

# The largest number that torch takes as a size.
MOST = 2**63 - 1
# What the application needs beside the library: `gpt.py`, `train.py` and `report.py`.
APP = ("labml", "labml_nn", "matplotlib")
INSTALL = "install the application's packages, `pip install 'zero3[app]'`"


def whole(value: Any, least: int = 0, most: int = MOST) -> bool:
    """
    ## Whether this is a whole number within limits

    An `int`, or a number of another library that can be an index. A truth value is none.
    """
    return (hasattr(type(value), "__index__") and not isinstance(value, bool)
            and least <= value <= most)


def expect(good: bool, what: str, expected: Any, got: Any, cure: str,
           kind: type[Exception] = ValueError) -> None:
    """
    ## Raise an error of this kind when an option cannot work

    It says what was expected, what was passed and what to do.
    """
    if not good:
        raise kind(f"{what}. Expected: {expected}. Got: {got}. What to do: {cure}.")


def fail(rank: int, who: str, what: str, expected: Any, got: Any, cure: str) -> NoReturn:
    """
    ## Raise the error of a layer or an optimizer on one rank

    * `rank` is this rank, and `who` is the name of the layer or the optimizer
    * `what` is the problem: "cannot step", for instance

    Raises `RuntimeError`, which says where, what was expected, what was found, and what to do.
    """
    raise RuntimeError(f"rank {rank}: {who} {what}. Expected: {expected}. Got: {got}. "
                       f"What to do: {cure}.")


def within(name: str, value: float, least: float, most: float) -> None:
    """
    ## Raise `ValueError` when a number of a command line is not within limits
    """
    expect(value >= least, f"{name} is too small", f"at least {least}", value, f"raise {name}")
    expect(value <= most, f"{name} is too large", f"at most {most}", value, f"lower {name}")


def folder(name: str, path: str | Path) -> None:
    """
    ## Raise `ValueError` when no file can be made in a folder

    Makes one without a name, which is gone at once. A look at the folder's mode would not do: it
    says nothing about a disk that is mounted to be read only.
    """
    problem = ""
    try:
        # `tempfile` would take an empty path for the system's own folder.
        os.stat(path)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, ValueError) as error:
        problem = f"{error}"
    expect(not problem, f"cannot write to the folder of {name}", "a folder that takes files",
           problem, "make the folder, let this user write to it, or choose another one")


def missing(*modules: str) -> list[str]:
    """
    ## Which of these modules are not installed
    """
    found = []
    for name in modules:
        try:
            there = find_spec(name) is not None
        except (ImportError, ValueError):
            there = False
        if not there:
            found.append(name)
    return found


def one_line(text: str) -> str:
    """
    ## A text with its line breaks and escape codes spelt out

    What was passed is quoted in an error, and may have both in it.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Parser(argparse.ArgumentParser):
    """
    ## A command line that says in one line what is wrong
    """

    def error(self, message: str) -> NoReturn:
        """
        ### End with exit code 2

        * `message` is argparse's, or that of an error which `expect` raised
        """
        cure = "" if "What to do: " in message else f" What to do: see `{self.prog} --help`."
        dot = "" if message.endswith(".") else "."
        self.exit(2, f"{self.prog}: {one_line(message)}{dot}{cure}\n")

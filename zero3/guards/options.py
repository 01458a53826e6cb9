r"""
# Options: check arguments, and explain a wrong one in one line

`whole` and `within` check numbers, and `folder` checks a folder for files. `expect` and `fail`
raise the error, and `Parser` prints it as one line, without a traceback.

It is best to find a wrong option before anything starts: before memory is allocated, and before a
minute has passed. Many wrong numbers pass a check that looks right. `nan < 1` is false and so is
`nan > 9`, so a NaN seems neither too small nor too large. `1.5` is large enough for a number of
threads. And in Python, `True` equals 1. So the checks here do not look for wrong values. They ask
for right ones, and refuse the rest:

$$\text{least} \le \text{value} \le \text{most}$$

**Run this**: `python -m zero3.estimate --params nan --ranks 2`.

**Not covered, and what that costs**: values of tensors, and models. The layers check these, and
their errors name the rank and the parameter.
"""

import argparse
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

# The largest number that torch takes as a size.
MOST = 2**63 - 1
# Packages that only the application needs, `gpt.py`, `job.py` and `report.py`.
APP = ("labml", "labml_nn", "matplotlib")
INSTALL = "install the application's packages, `pip install 'zero3[app]'`"


def whole(value: Any, least: int = 0, most: int = MOST) -> bool:
    """
    ## Whether the value is a whole number within limits

    It is an `int`, or a number of another library that can be an index. `True` and `False` are not
    numbers here.
    """
    return (hasattr(type(value), "__index__") and not isinstance(value, bool)
            and least <= value <= most)


def expect(good: bool, what: str, expected: Any, got: Any, cure: str,
           kind: type[Exception] = ValueError) -> None:
    """
    ## Raise an error if an option cannot work

    * `good` says whether it can
    * `what` is the problem, `expected` a right value, `got` the value that was passed, and `cure`
      a remedy
    * `kind` is the class of the error
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
    ## Raise `ValueError` if a number of a command line is not within limits
    """
    expect(value >= least, f"{name} is too small", f"at least {least}", value, f"raise {name}")
    expect(value <= most, f"{name} is too large", f"at most {most}", value, f"lower {name}")


def folder(name: str, path: str | Path) -> None:
    """
    ## Raise `ValueError` if files cannot be created in a folder

    It creates a file without a name, which disappears at once. The permissions of the folder are
    not enough: they say nothing about a disk that is mounted read-only.
    """
    problem = ""
    try:
        # For an empty path, `tempfile` would use the system's own folder.
        os.stat(path)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, ValueError) as error:
        problem = f"{error}"
    expect(not problem, f"cannot write to the folder of {name}", "a folder that takes files",
           problem, "make the folder, let this user write to it, or choose another one")


def missing(*modules: str) -> list[str]:
    """
    ## The modules among these that are not installed
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
    ## The text, with line breaks and escape codes spelt out

    An error quotes the value that was passed, which may contain both.
    """
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


class Parser(argparse.ArgumentParser):
    """
    ## A command line with errors of one line
    """

    def error(self, message: str) -> NoReturn:
        """
        ### End with exit code 2

        * `message` is from argparse, or from an error of `expect`
        """
        cure = "" if "What to do: " in message else f" What to do: see `{self.prog} --help`."
        dot = "" if message.endswith(".") else "."
        self.exit(2, f"{self.prog}: {one_line(message)}{dot}{cure}\n")

r"""
# Command lines: an error in one line

`within` checks a number, and `folder` a folder for files. `Parser` prints the error of a wrong
argument as one line, without a traceback:

```
python -m zero3.estimate: --params is too small. Expected: at least 1. Got: 0.0.
What to do: raise --params.
```

**Run this**: `python -m zero3.estimate --params 0 --ranks 2`.

**Not covered, and what that costs**: arguments that are right one by one and do not fit together.
"""

import argparse
import os
import tempfile
from pathlib import Path
from typing import NoReturn

from zero3.guards.checks import expect

# Packages that only the application needs, in `gpt.py`, `job.py` and `report.py`.
APP = ("labml", "labml_nn", "matplotlib")
INSTALL = "install the application's packages, `pip install 'zero3[app]'`"


def within(name: str,
           value: float,
           least: float,
           most: float) -> None:
    """
    ## Raise `ValueError` if a number of a command line is not within limits
    """
    expect(value >= least, f"{name} is too small", f"at least {least}", value, f"raise {name}")
    expect(value <= most, f"{name} is too large", f"at most {most}", value, f"lower {name}")


def folder(name: str, path: str | Path) -> None:
    """
    ## Raise `ValueError` if files cannot be created in a folder

    Permissions say nothing about a read-only disk.
    """
    try:
        # For an empty path, `tempfile` would use the system's own folder.
        os.stat(path)
        tempfile.TemporaryFile(dir=path).close()
    except (OSError, ValueError) as error:
        expect(False, f"cannot write to the folder of {name}", "a folder that takes files",
               error, "make the folder, let this user write to it, or choose another one")


def one_line(text: str) -> str:
    """
    ## The text, with line breaks and escape codes spelt out
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

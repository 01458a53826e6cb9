"""
# Commands for tests: what `python -m ...` prints and returns, without a new Python

`python_m("zero3.estimate", "--ranks", "64")` runs the module as `__main__` in this process, which
has imported torch already. A new one needs two seconds for that. Each command has one test at least
that starts it as a reader does.
"""

import contextlib
import io
import runpy
import subprocess
import sys
import warnings
from unittest import mock


def python_m(module: str, *arguments: str) -> subprocess.CompletedProcess:
    """
    ## Run a module with these arguments, and return its exit status, output and errors
    """
    out, errors = io.StringIO(), io.StringIO()
    status = 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(errors))
        stack.enter_context(mock.patch.object(sys, "argv", [module, *arguments]))
        # The module has been imported before, under its own name.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as error:
            status = error.code or 0
    return subprocess.CompletedProcess([module, *arguments], status, out.getvalue(),
                                       errors.getvalue())

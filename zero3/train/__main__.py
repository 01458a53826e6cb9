"""
# The command line of the main job
"""

import os
import sys

from zero3.guards.command_line import APP, INSTALL, Parser

try:
    from zero3.train.job import main
except ModuleNotFoundError as error:
    Parser(prog="zero3.train").error(
        f"a package of the application is missing. Expected: {', '.join(APP)}. Got: {error}. "
        f"What to do: {INSTALL}."
    )

# Escape characters that the terminal cannot show: an error would end a run after its last step.
sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
code = main()
sys.stdout.flush()
sys.stderr.flush()
# Skip the interpreter's shutdown. Now and then a thread of the process group would still need the
# interpreter then, and would abort a run that has succeeded.
os._exit(code)

import os
import sys

from zero3.guards.options import APP, INSTALL, Parser

try:
    from zero3.train.job import main
except ModuleNotFoundError as error:
    Parser(prog="zero3.train").error(
        f"a package of the application is missing. Expected: {', '.join(APP)}. Got: {error}. "
        f"What to do: {INSTALL}."
    )

# A sample has whatever bytes the model writes, and a path those of the file system. Neither may
# end a run at the end of it.
sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
code = main()
sys.stdout.flush()
sys.stderr.flush()
# Exit at once. Now and then a thread of the process group would still ask for an interpreter that
# is shutting down, and abort a run that is done.
os._exit(code)

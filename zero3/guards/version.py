"""
# Version and commit

`__version__` is the version of the package, and `commit_name` the commit that a figure was measured
with. A figure without its commit could not be measured again.

**Run this**: `python -c "import zero3; print(zero3.__version__)"`.
"""

import shutil
import subprocess
from pathlib import Path

__version__ = "0.1.0"


def commit_name() -> str:
    """
    ## The current commit, with `-dirty` if files differ from it

    Returns "unknown" outside a git repository.
    """
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"

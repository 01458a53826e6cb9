"""
# Which code this is

The version of the package, and the commit that a figure was measured with.

**Run this**: `python -c "import zero3; print(zero3.__version__)"`.
"""

import shutil
import subprocess
from pathlib import Path

__version__ = "0.1.0"


def commit_name() -> str:
    """
    ## The commit that a figure comes from, `-dirty` where files differ from it
    """
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"

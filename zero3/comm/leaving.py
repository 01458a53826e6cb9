r"""
# The end of a program

`leave` waits for gloo's threads before Python ends.

A thread of gloo's may be the last to drop a tensor. It needs Python's lock for that. If Python is
ending already, the process aborts instead (pytorch 190489):

| | a thread of gloo's | the program |
|---|---|---|
| `save` returns | still has a tensor | its last line |
| without `leave` | drops it, and cannot have the lock | ends with SIGABRT |
| with it | drops it, and ends | waits for that, then ends |

`dist.destroy_process_group()` waits for these threads, too. `leave` is for programs that forget it.
It waits at most

$$0.5\,\text{s} + 0.1\,\text{s}$$

because a thread may itself wait for a rank that was stopped.

**Run this**: `python -m pytest tests/comm/test_leaving.py`.

**Not covered, and what that costs**: NCCL ends by itself, so nobody waits for groups of GPUs.
"""

import atexit
import gc
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

LEAVE_S = 0.5


@atexit.register
def leave() -> None:
    """
    ## Have gloo end its threads before Python ends
    """
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None:
        return
    # torch keeps handles of groups in meshes, and groups with handles keep their threads.
    for thing in gc.get_objects():
        if type(thing).__name__ == "DeviceMesh":
            thing._pg_registry.clear()
    # `get_backend()` may be "undefined".
    if not dist.is_initialized() or "nccl" in dist.get_backend_config():
        return
    everybody = weakref.ref(dist.group.WORLD)
    ending = threading.Thread(target=dist.destroy_process_group, daemon=True)
    # Some versions of Python start no thread at this point.
    with suppress(RuntimeError):
        ending.start()
        ending.join(LEAVE_S)
    if everybody() is not None:
        # Somebody else has a handle, so the threads go on. Give them a moment to drop what they
        # hold.
        time.sleep(LEAVE_S / 5)

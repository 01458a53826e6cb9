r"""
# Room: memory that is left

`room` says how much memory this process can still get, and `check_room` raises an error on all
ranks if one of them has too little.

$$\text{room} = \min(\text{available},\; \text{limits} - \text{used})$$

In backward the parameters of two layers and a gradient are in memory together, and on the CPU a
receive buffer as well. So a layer of 3 GB has no room for a step on the CPU if 10 GB are left.

**Run this**: `python -c "import torch; from zero3.guards.room import room;
print(room(torch.device('cpu')))"`.

**Not covered, and what that costs**: `room` looks at this process alone. Ranks that share a machine
may each find enough room, and together too little.
"""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from zero3.guards.checks import Guarded, Named


def check_step(layer: Guarded,
               shard: torch.Tensor,
               cure: str) -> None:
    """
    ## Make sure that there is memory for a training step of a layer

    * `shard` is the layer's, `(shard_numel,)`, and `cure` the advice if there is no room

    That is a lower bound, because the layer above may still have its gradient.
    """
    full_buffers = 4 if layer.comm.by_messages else 3
    nbytes = full_buffers * layer.comm.world_size * shard.nbytes
    check_room(layer, "a step", nbytes, layer.device, cure)


def check_room(owner: Named,
               what: str,
               nbytes: int,
               at: torch.device,
               cure: str) -> None:
    """
    ## Make sure that there is memory, before it is taken

    * `owner`, a layer or an optimizer, needs `nbytes` for `what`, on the device `at`

    All ranks must call it. If one has too little, all raise `RuntimeError`.
    """
    left_bytes = room(at)
    problem = f"{left_bytes:,} bytes left" if left_bytes < nbytes else ""
    owner.comm.agree(owner, f"has no room for {what}", f"{nbytes:,} bytes on {at}", problem, cure)


def room(at: torch.device) -> int:
    """
    ## Bytes of memory that this process can still get

    On an accelerator, the free memory, and what torch keeps for the next tensor. On the CPU, the
    least of what the machine has and of what limits leave: `ulimit -d`, `ulimit -v` and the
    container's control group.
    """
    if at.type != "cpu":
        device = torch.get_device_module(at)
        kept = device.memory_reserved(at) - device.memory_allocated(at)
        return device.mem_get_info(at)[0] + kept
    return max(0, min([1 << 62, *_left_by_limits(), *_left_by_control_group()]))


def _left_by_limits() -> Iterator[int]:
    """
    #### Bytes that the machine and the limits of this process leave
    """
    kib: dict[str, int] = {}
    for name in ("/proc/self/status", "/proc/meminfo"):
        if os.path.exists(name):
            rows = (line.split() for line in Path(name).read_text().splitlines())
            kib.update({row[0]: int(row[1]) << 10 for row in rows if row[-1] == "kB"})
    if "MemAvailable:" in kib:
        yield kib["MemAvailable:"]
    for limit, used in ((resource.RLIMIT_DATA, "VmData:"), (resource.RLIMIT_AS, "VmSize:")):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY:
            yield soft - kib.get(used, 0)


def _left_by_control_group() -> Iterator[int]:
    """
    #### Bytes that the control group leaves; its page cache can be freed
    """
    for folder, most, used in (("", "memory.max", "memory.current"),
                               ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            told = [Path("/sys/fs/cgroup", folder, name).read_text()
                    for name in (most, used, "memory.stat")]
            cached = dict(line.split() for line in told[2].splitlines())
            free = int(told[0]) - int(told[1])
            yield free + int(cached["active_file"]) + int(cached["inactive_file"])
        except (OSError, ValueError, KeyError):
            # No such group, or no limit.
            continue

r"""
# CPU memory: pinned, and how much of it is left

`pinned` takes CPU memory that an accelerator can copy from by itself, and `room` says how much
memory this process can still get.

An accelerator copies from ordinary CPU memory only while the host waits, because the system may
move such memory. *Pinned* memory stays where it is, so the copy overlaps computation.

$$\text{room} = \min(\text{available},\; \text{limits} - \text{used})$$

**Run this**: `python -c "import torch; from zero3.offload.memory import room;
print(room(torch.device('cpu')))"`.

**Not covered, and what that costs**: `room` looks at this process alone. Ranks that share a machine
may each find enough room, and together too little.
"""

import mmap
import os
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch


def copy_to(at: torch.device, values: torch.Tensor, dtype: torch.dtype,
            device: torch.device) -> torch.Tensor:
    """
    ## A copy, `(n,)`, on another device or of another data type

    In CPU memory it is pinned if `device` is an accelerator, which then copies it by itself.
    """
    if at.type == "cpu" and device.type != "cpu":
        return pinned(device, len(values) * dtype.itemsize).view(dtype).copy_(values)
    return torch.empty(len(values), dtype=dtype, device=at).copy_(values)


class _Pages(mmap.mmap):
    """
    ## Memory pages that an accelerator may read and write by itself

    They are unregistered before the system gets them back.
    """

    registered: Any = None  # the device's module, and the address

    def __del__(self) -> None:
        if self.registered is not None and not sys.is_finalizing():
            backend, address = self.registered
            # A copy may still be in flight.
            backend.synchronize()
            backend.cudart().cudaHostUnregister(address)


def pinned(device: torch.device, nbytes: int) -> torch.Tensor:
    """
    ## Pinned CPU memory for a device: `(nbytes,)` uint8

    Exactly as much as is asked for. torch rounds its own pinned memory up to a power of two, so a
    shard of 1.1 GiB would take 2 GiB. Here the system gives pages, and `cudaHostRegister` tells the
    device about them. That is slow, so it is for memory that stays: shards, master weights, buffers
    of files. A device without this call gets torch's pinned memory.
    """
    backend: Any = torch.get_device_module(device)
    if nbytes and hasattr(backend, "cudart"):
        pages = _Pages(-1, nbytes)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        address = memory.data_ptr()
        if int(backend.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
            pages.registered = backend, address
            return memory
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def room(at: torch.device) -> int:
    """
    ## Bytes of memory that this process can still get

    On an accelerator, the free memory, and the memory that torch keeps for the next tensor. On the
    CPU, the least of what the machine has available and of what limits leave: `ulimit -d`, `ulimit
    -v` and the container's control group.
    """
    if at.type != "cpu":
        device = torch.get_device_module(at)
        kept = device.memory_reserved(at) - device.memory_allocated(at)
        return device.mem_get_info(at)[0] + kept
    return max(0, min([1 << 62, *_left_by_limits(), *_left_by_control_group()]))


def _left_by_limits() -> Iterator[int]:
    """
    #### Bytes that the machine has available, and bytes that the limits of this process leave
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

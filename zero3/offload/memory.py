r"""
# Pinned CPU memory

`pinned` takes CPU memory that an accelerator can copy from by itself.

An accelerator copies from ordinary CPU memory only while the host waits, because the system may
move it. *Pinned* memory stays where it is.

$$\text{copy} \parallel \text{compute} \quad \text{only from pinned memory}$$

**Run this**: `python -m pytest tests/test_native.py -k pinned`.

**Not covered, and what that costs**: pinning is slow, so it is for memory that stays.
"""

import mmap
import sys
from typing import Any

import torch


def copy_to(at: torch.device,
            values: torch.Tensor,
            dtype: torch.dtype,
            device: torch.device) -> torch.Tensor:
    """
    ## A copy, `(n,)`, on another device or of another data type

    In CPU memory it is pinned if `device` is an accelerator.
    """
    if at.type == "cpu":
        return pinned(device, len(values) * dtype.itemsize).view(dtype).copy_(values)
    return torch.empty(len(values), dtype=dtype, device=at).copy_(values)


class _Pages(mmap.mmap):
    """
    ## Memory pages that an accelerator may read and write by itself
    """

    registered: Any = None  # the device's module, the device, and the address

    def __del__(self) -> None:
        if self.registered is not None and not sys.is_finalizing():
            backend, device, address = self.registered
            # It may be collected in a thread that has chosen no device.
            with backend.device(device):
                # A copy may still be in flight.
                backend.synchronize()
                backend.cudart().cudaHostUnregister(address)


def pinned(device: torch.device, nbytes: int) -> torch.Tensor:
    """
    ## Pinned CPU memory for a device: `(nbytes,)` uint8

    Exactly as much as is asked for: torch rounds its own pinned memory up to a power of two, so a
    shard of 1.1 GiB would take 2 GiB. Here the system gives pages, and `cudaHostRegister` tells the
    device about them. A device without this call gets torch's pinned memory, and the CPU itself
    gets memory that is not pinned.
    """
    backend: Any = torch.get_device_module(device)
    if nbytes and hasattr(backend, "cudart"):
        pages = _Pages(-1, nbytes)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        address = memory.data_ptr()
        if int(backend.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
            pages.registered = backend, device, address
            return memory
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")

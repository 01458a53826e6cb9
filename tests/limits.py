"""
# A rank that may have little memory

In a module of its own, because what a process has imported takes memory.
"""

import ctypes
import resource
import threading

import torch
from torch import nn

from zero3 import Offload, Zero3Optimizer, wrap

WIDTH = 1000
# What a rank may take for whole layers, buffers and the stacks of threads, beside what Python and
# torch have taken before.
ROOM_BYTES = 84 << 20


def in_a_quarter(folder):
    """Make, train and save a model whose parameters are four times what this rank may take."""

    def kib(name):
        with open("/proc/self/status") as status:
            return int(status.read().split(name + ":")[1].split()[0]) * 1024

    # Threads get stacks of 8 MiB otherwise, which count, used or not.
    threading.stack_size(1 << 20)
    # Freed layers go back to the system, as with MALLOC_MMAP_THRESHOLD_ in the environment.
    ctypes.CDLL(None).mallopt(-3, 131072)
    limit_bytes = kib("VmData") + ROOM_BYTES
    layer_bytes = 4 * (WIDTH * WIDTH + WIDTH)
    depth = -(-4 * ROOM_BYTES // layer_bytes)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    before_bytes, nvme = kib("RssAnon"), Offload("nvme", folder=folder, queue_depth=2)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(depth)))
    model = wrap(model, nn.Linear, offload=nvme)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=1e-3, offload=nvme)
    optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    model.save(folder)
    return depth * layer_bytes, kib("VmHWM") - kib("RssFile") - before_bytes

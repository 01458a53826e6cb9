"""
# A rank that may have little memory

In a module of its own, because what a process has imported takes memory.
"""

import ctypes
import resource
import threading

import torch
from torch import nn
from torch.nn import functional as F

from tests.bench.training import gpt
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.estimate.ledger import Ledger
from zero3.offload.activations import Activations

WIDTH = 1000
# What a rank may take for whole layers, buffers and the stacks of threads, beside what Python and
# torch have taken before.
ROOM_BYTES = 84 << 20
# What a rank may take for activations, and for all else that a step needs.
STEP_BYTES = 40 << 20


def kib(name):
    """A line of the process's status, in bytes"""
    with open("/proc/self/status") as status:
        return int(status.read().split(name + ":")[1].split()[0]) * 1024


def count_what_is_taken():
    """Have a limit of this process count what it uses, and little else"""
    # Threads get stacks of 8 MiB otherwise, which count, used or not.
    threading.stack_size(1 << 20)
    # Freed layers go back to the system, as with MALLOC_MMAP_THRESHOLD_ in the environment.
    ctypes.CDLL(None).mallopt(-3, 131072)


def in_a_quarter(folder):
    """Make, train and save a model whose parameters are four times what this rank may take."""
    count_what_is_taken()
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


def long_sequences(moves, limit_bytes):
    """
    Two steps of a GPT with a sequence of 1,024 tokens, its activations in files if `moves` is a
    folder, and with so much more memory than the process has, if there is a limit.

    Returns losses, the bytes that have left, and the most memory above that at the start; or what
    the error says.
    """
    count_what_is_taken()
    layers = gpt(dim=64, blocks=16, heads=2, seq=1024)
    where = moves and Activations(Offload("nvme", moves, queue_depth=2, block_bytes=1 << 20),
                                  below_bytes=1 << 16)
    model = Zero3Sequential([Zero3Layer(layer, activations=where) for layer in layers])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    ids = torch.randint(256, (1, 1025), generator=torch.Generator().manual_seed(0))
    before_bytes = kib("RssAnon")
    if limit_bytes:
        resource.setrlimit(resource.RLIMIT_DATA, (kib("VmData") + limit_bytes,) * 2)
    losses = []
    try:
        for _ in range(2):
            with Ledger(model) as tape:
                loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
                losses.append(loss.item())
                optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    except RuntimeError as error:
        return str(error)
    return losses, tape.out_bytes, kib("VmHWM") - kib("RssFile") - before_bytes

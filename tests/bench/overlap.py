"""
# Copies from CPU memory to a GPU and back, while it computes

A chain of square matrices trains on one GPU. Its parameters and the states of its optimizer rest in
pinned CPU memory. torch's profiler tells when each kernel ran, and each copy.

**Run this**: `python -m tests.bench.overlap`, on a machine with a GPU. It prints what
`docs/gpu.json` has under "overlap".
"""

import json
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential

LAYERS, WIDTH, ROWS, STEPS = 12, 4096, 8192, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):  # [rows, width]
        return x + self.linear(x).relu()


def events_of_a_step():
    """
    ## What the profiler saw of one step: kernels and copies, with begin and length in µs
    """
    torch.manual_seed(0)
    device = torch.device("cuda", torch.cuda.current_device())
    model = Zero3Sequential([Zero3Layer(Block().to(device), offload="cpu")
                             for _ in range(LAYERS)])
    optimizer = Zero3Optimizer(model, lr=1e-3, eps=1e-3, offload="cpu")
    x = torch.randn(ROWS, WIDTH, device=device)

    def step():
        optimizer.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    for _ in range(STEPS):
        step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        seen.export_chrome_trace(str(path))
        return [each for each in json.loads(path.read_text())["traceEvents"] if each["ph"] == "X"]


def spans(events, kind, part=""):
    """
    ## Begin and end of all events of a kind that have a part of a name, in order
    """
    return sorted((each["ts"], each["ts"] + each["dur"]) for each in events
                  if each.get("cat") == kind and part in each["name"])


def overlap(mine, others):
    """
    ## How long some spans overlap others, none of which overlap each other
    """
    return sum(max(0, min(end, last) - max(begin, first))
               for begin, end in mine for first, last in others)


def measure(events):
    """
    ## The time of copies and how much of it overlaps kernels; and when the forward's copies end
    """
    kernels = spans(events, "kernel")
    found = {"layers": LAYERS, "width": WIDTH, "ms": {}}
    for way in ("HtoD", "DtoH"):
        copies = spans(events, "gpu_memcpy", way)
        found["ms"][way] = {
            "copies": round(sum(end - begin for begin, end in copies) / 1e3, 2),
            "under_kernels": round(overlap(copies, kernels) / 1e3, 2)}
    copied = [(begin, end) for begin, end in spans(events, "gpu_memcpy", "HtoD")
              if end - begin > 100][:LAYERS]
    # The products of forward, one for each layer.
    products = spans(events, "kernel", "gemm")[:LAYERS]
    found["us_from_the_end_of_a_copy_to_its_layer"] = [
        round(begin - end) for (_, end), (begin, _) in zip(copied, products, strict=True)]
    return found


if __name__ == "__main__":
    print(json.dumps(measure(events_of_a_step()), indent=1))

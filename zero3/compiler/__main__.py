"""
# The command line of the compiler: the graphs of a small model after each pass
"""

import argparse
from typing import Any

import torch
from torch import nn

from zero3.compiler.graph import find, full_numel, gather, picture, reduce
from zero3.compiler.model import compile
from zero3.compiler.passes import improve


def main() -> None:
    """
    ## Trace a chain of small layers, and print what each pass makes of its graphs
    """
    parser = argparse.ArgumentParser(description="The graphs of a chain after each pass")
    parser.add_argument("--layers", type=int, default=4, help="each has a 2 x 2 weight")
    parser.add_argument("--limit", type=int, default=8, help="elements that may be full at once")
    parser.add_argument("--bucket", type=int, default=0, help="elements that share a collective")
    args = parser.parse_args()

    model = compile(nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(args.layers))),
                    backend="aot_eager")
    model(torch.ones(1, 2)).sum().backward()
    (graphs,) = model.graphs
    traced = graphs.steps[0]
    steps, kept = improve(traced[1], traced[2], model.numel, args.limit, args.bucket)
    backward: Any = None
    for name, forward, backward in (traced, *steps):
        whole = [] if name in ("traced", "insert") else kept
        print(f"\n{name}, forward\n{picture(forward, model.numel)}")
        print(f"\n{name}, backward\n{picture(backward, model.numel, whole)}")
    most = max(*full_numel(forward, model.numel), *full_numel(backward, model.numel, kept))
    print(f"\n{len(find(forward, gather)) + len(find(backward, gather))} gathers, "
          f"{len(find(backward, reduce))} reduces, at most {most} full elements")


main()

"""
# The command line of the estimate
"""

import argparse
from collections.abc import Callable

from zero3.estimate.between import show_layouts
from zero3.estimate.formulas import number, show_places, show_stages
from zero3.estimate.saved import show_activations
from zero3.guards.command_line import Parser, within
from zero3.guards.options import expect

# No model or machine is larger. Beyond this limit, products of options would overflow to infinity.
MOST = 1e24
# `predict` replays a step layer by layer.
MOST_LAYERS = 10_000
# The options that are numbers: type, default, the least value, and the help text.
NUMBERS: dict[str, tuple[Callable[[str], float], float | None, float, str]] = {
    "ranks": (int, None, 1, "ranks that share it"),
    "gpu": (number, None, 0, "memory of each rank's device: 80GB"),
    "cpu": (number, 0.0, 0, "memory of the machine, all ranks' together: 128GB"),
    "nvme": (number, 0.0, 0, "space on its disk: 1TB"),
    "layers": (int, 32, 1, "layers of the model, taken to be equally large"),
    "tokens": (float, 8192.0, 1, "of a rank in a step"),
    "tflops": (float, 70.0, 1e-6, "that a device reaches, in 1e12 flops a second"),
    "nodes": (int, None, 2, "machines with as many ranks each: compares layouts"),
    "link": (number, None, 1, "between nodes, bytes that leave one in a second: 25GB"),
    "width": (int, None, 1, "features of a position, with --sequence"),
    "sequence": (int, None, 1, "tokens of a sequence: counts activations, as of GPT-2"),
}


def main(argv: list[str] | None = None) -> None:
    """
    ## The command line
    """
    parser = Parser(
        prog="python -m zero3.estimate",
        description="Memory for model states, stage by stage; with --gpu, tier by tier; with "
        "--nodes, layout by layout; with --sequence, for activations.")
    parser.add_argument("--params", "--model", type=number, required=True,
                        help="of the model: 7.5e9, or 8b")
    for name, (kind, default, _, text) in NUMBERS.items():
        parser.add_argument(f"--{name}", type=kind, default=default, required=name == "ranks",
                            help=text)
    parser.add_argument("--messages", action="store_true",
                        help="count messages, as on the CPU, instead of rings")
    args = parser.parse_args(argv)
    try:
        check_args(args)
    except ValueError as error:
        parser.error(f"{error}")
    if args.nodes is not None:
        show_layouts(args)
    elif args.gpu is None:
        show_stages(args.params, args.ranks)
    else:
        show_places(args, {"device": args.gpu, "cpu": args.cpu, "nvme": args.nvme})
    if args.sequence is not None:
        show_activations(args)


def check_args(args: argparse.Namespace) -> None:
    """
    ## Refuse numbers that are too small or too large, and options that do not go together

    Raises `ValueError`.
    """
    within("--params", args.params, 1, MOST)
    for name, (_, _, least, _) in NUMBERS.items():
        if getattr(args, name) is not None:
            within(f"--{name}", getattr(args, name), least, MOST)
    if args.nodes is not None:
        expect(args.ranks % args.nodes == 0, "--ranks do not split over --nodes",
               f"a multiple of {args.nodes}", args.ranks, "change one of the two")
        expect(not (args.cpu or args.nvme), "--nodes compares layouts without offload",
               "neither --cpu nor --nvme", "one of them", "leave out --nodes to compare tiers")
    if args.nodes is not None or args.sequence is not None:
        within("--layers", args.layers, 1, MOST_LAYERS)


if __name__ == "__main__":
    main()

"""
# The command line of the estimate
"""

import argparse

from zero3.estimate.between import show_layouts
from zero3.estimate.formulas import number, show_places, show_stages
from zero3.estimate.splitting import show_tensor
from zero3.guards.command_line import Parser, within
from zero3.guards.options import expect

# No model or machine is larger. Beyond this limit, products of options would overflow to infinity.
MOST = 1e24
# `predict` replays a step layer by layer.
MOST_LAYERS = 10_000


def main(argv: list[str] | None = None) -> None:
    """
    ## The command line

    * `argv` are the arguments, by default those of the process
    """
    parser = Parser(
        prog="python -m zero3.estimate",
        description="Memory for model states, stage by stage; with --gpu, tier by tier; with "
        "--nodes, layout by layout; with --tensor, for layers that ranks split.")
    add = parser.add_argument
    add("--params", "--model", type=number, required=True, help="of the model: 7.5e9, or 8b")
    add("--ranks", type=int, required=True, help="ranks that share it")
    add("--gpu", type=number, help="memory of each rank's device: 80GB")
    add("--cpu", type=number, default=0.0, help="memory of the machine, all ranks' together: 128GB")
    add("--nvme", type=number, default=0.0, help="space on its disk: 1TB")
    add("--layers", type=int, default=32, help="layers of the model, taken to be equally large")
    add("--tokens", type=float, default=8192.0, help="of a rank in a step")
    add("--tflops", type=float, default=70.0, help="that a device reaches, in 1e12 flops a second")
    add("--nodes", type=int, help="machines with as many ranks each: compares layouts")
    add("--link", type=number, help="between nodes, bytes that leave one in a second: 25GB")
    add("--messages", action="store_true", help="count messages, as on the CPU, instead of rings")
    add("--tensor", type=int, help="compares tensor sizes up to this one, for --width")
    add("--width", type=int, help="features of a position, with --tensor")
    args = parser.parse_args(argv)
    try:
        for name, least in (("params", 1), ("ranks", 1), ("layers", 1), ("tokens", 1),
                            ("tflops", 1e-6), ("gpu", 0), ("cpu", 0), ("nvme", 0), ("nodes", 2),
                            ("link", 1),
                            ("tensor", 1), ("width", 1)):
            if getattr(args, name) is not None:
                within(f"--{name}", getattr(args, name), least, MOST)
        if args.nodes is not None:
            check_nodes(args)
        if args.tensor is not None:
            check_tensor(args)
    except ValueError as error:
        parser.error(f"{error}")
    if args.nodes is not None:
        show_layouts(args)
    elif args.tensor is not None:
        show_tensor(args)
    elif args.gpu is None:
        show_stages(args.params, args.ranks)
    else:
        show_places(args, {"device": args.gpu, "cpu": args.cpu, "nvme": args.nvme})


def check_nodes(args: argparse.Namespace) -> None:
    """
    ## Refuse options that do not go with --nodes

    Raises `ValueError`.
    """
    expect(args.ranks % args.nodes == 0, "--ranks do not split over --nodes",
           f"a multiple of {args.nodes}", args.ranks, "change one of the two")
    within("--layers", args.layers, 1, MOST_LAYERS)
    expect(not (args.cpu or args.nvme), "--nodes compares layouts without offload",
           "neither --cpu nor --nvme", "one of them", "leave out --nodes to compare tiers")


def check_tensor(args: argparse.Namespace) -> None:
    """
    ## Refuse options that do not go with --tensor

    Raises `ValueError`.
    """
    expect(args.width is not None, "--tensor", "the features of a position, --width", "none",
           "pass it")
    within("--tensor", args.tensor, 1, args.ranks)
    within("--layers", args.layers, 1, MOST_LAYERS)
    expect(args.nodes is None and args.gpu is None, "--tensor compares tensor sizes",
           "neither --nodes nor --gpu", "one of them", "leave out --tensor to compare those")


if __name__ == "__main__":
    main()

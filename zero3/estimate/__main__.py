"""
# The command line of the estimate
"""

import argparse
from collections.abc import Callable

from zero3.estimate.between import choices
from zero3.estimate.formulas import (
    advise,
    gigabytes,
    number,
    places,
    print_table,
    show_stages,
)
from zero3.estimate.saved import HEAD_WIDTH, activations, gpt2_bytes, gpt2_width
from zero3.guards.checks import expect
from zero3.guards.command_line import Parser, within

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
    "tokens": (float, 8192.0, 1, "of a rank in a step, with --sequence"),
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


def show_places(args: argparse.Namespace, has: dict[str, float]) -> None:
    """
    ## Print in which tiers the model fits on this machine
    """
    found = advise(args.params, args.ranks, has, args.layers)
    print(f"{args.params:,.0f} parameters in {args.layers} layers, {args.ranks} rank(s) on one "
          "machine, in half precision with Adam,\n16 bytes per parameter. GB (1e9 bytes) that a "
          "rank needs, without activations:\n")
    rows = [(f"{'parameters':12}optimizer", [*has], "")]
    for place in places(args.params, args.ranks, args.layers):
        cells = [gigabytes(place.needs[tier], 1) for tier in has]
        note = "   <- the fastest that fits" if place == found else ""
        rows.append((f"{place.params_in:12}{place.states_in}", cells, note))
    print_table([*rows, ("a rank has", [
        gigabytes(n / (1 if tier == "device" else args.ranks), 1) for tier, n in has.items()], "")])
    if found is None:
        print("\nIt does not fit. More ranks need less each; a larger disk is the cheapest tier.")
        return
    for tier, moved in found.step_bytes.items():
        if moved:
            print(f"\nA step moves {gigabytes(moved, 1)} GB of a rank into its {tier} tier and "
                  "out.")


def show_layouts(args: argparse.Namespace) -> None:
    """
    ## Print what each layout costs: the one that sends the fewest bytes between nodes first
    """
    how = "messages, as on the CPU" if args.messages else "rings, as on GPUs"
    print(f"{args.params:,.0f} parameters in {args.layers} layers, on {args.nodes} nodes of "
          f"{args.ranks // args.nodes} rank(s), in half precision with Adam.\nGB (1e9 bytes) of a "
          "rank at the peak of a step, without activations, and GB that leave\neach node in a "
          f"step, in {how}. Rounded numbers change losses:\n")
    rows = [("layout", ["of a rank", "leave a node", *(["seconds"] if args.link else [])],
             "  numbers")]
    for each in choices(args.params, args.ranks, args.nodes, args.layers, args.messages):
        cells = [gigabytes(each.peak_bytes), gigabytes(each.between_bytes)]
        if args.link:
            cells.append(f"{each.between_bytes / args.link:,.3f}")
        too_much = args.gpu is not None and each.peak_bytes > args.gpu
        numbers = "  rounded" if each.rounds else "  exact"
        rows.append((each.name, cells, numbers + ", does not fit" * too_much))
    print_table(rows)


def show_activations(args: argparse.Namespace) -> None:
    """
    ## Print what activations need if they stay, and if they leave
    """
    width = args.width or gpt2_width(args.params, args.layers)
    heads = -(-width // HEAD_WIDTH)
    saved = gpt2_bytes(args.layers, width, heads, int(args.tokens), args.sequence)
    print(f"\nActivations of {args.layers} blocks of GPT-2 with {width:,} features and {heads} "
          f"heads: {args.tokens:,.0f} tokens of a rank\nin a step, in sequences of "
          f"{args.sequence:,}, without recomputation. GB (1e9 bytes):\n")
    rows = [("", ["out", "in", "in memory"], "")]
    for name, keep in (("stay", len(saved)), ("to cpu or nvme", 1)):
        cells = [gigabytes(nbytes) for nbytes in activations(saved, keep)]
        rows.append((name, cells, ""))
    print_table(rows)


if __name__ == "__main__":
    main()

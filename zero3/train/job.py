r"""
# The main job: train a sharded GPT, and check the bytes

Trains the byte-level GPT of `gpt.py` over all ranks, each layer in a `Zero3Layer`, then holds what
every rank kept and sent against what the formulas say.

The loop is an ordinary PyTorch loop. What differs from plain data parallelism is three lines: the
layers are wrapped, a `Zero3Optimizer` is built on the model, and it calls backward. The comparison
is the point:
`predict.py` predicts from the shapes alone, `ledger.py` records one real step, and for each rank
the table says whether they are equal, to the byte.

$$\text{predicted} = \text{measured} \qquad \text{at rest, at the peak, and on the wire}$$

**Run this**: `make train`, or `torchrun --nproc_per_node=2 -m zero3.train --help` for the options;
one rank needs no torchrun. It prints losses, a sample and the table, and writes `loss.png`,
`tape.png`, `gradients.png` and `metrics.json`. With `--save-every 100` it saves checkpoints too.
Ctrl-C saves one in any case; the same command then goes on from there, to the same numbers. After
Ctrl-C torchrun ends with a traceback of its own, a `SignalException`: that it was told to end.
When one rank fails, its traceback stands first, and the others add a line each. No rank waits for
another one longer than `--timeout`.

**Not covered, and what that costs**: text that does not fit into memory. A batch is drawn by the
number of its step, so a run needs no more than that number to find its place in the data.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import math
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch

from zero3.checkpoint.save_load import load
from zero3.estimate.formulas import describe
from zero3.estimate.predict import data_parallel
from zero3.guards.options import (
    APP,
    INSTALL,
    MOST,
    Parser,
    expect,
    folder,
    missing,
    one_line,
    within,
)
from zero3.guards.version import commit_name
from zero3.layer import Zero3Layer, Zero3Sequential
from zero3.measure.ledger import Ledger, exponents
from zero3.offload import TIERS, Offload, room
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.train import gpt
from zero3.train.run import (
    Ranks,
    Run,
    agree,
    end_with_parent,
    fresh_store,
    progress,
    save_run,
    signals,
    take_up,
    tell_failure,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Cross-entropy comes in nats.
BITS = 1 / math.log(2)
# Windows for one evaluation, in batches; always the same ones.
EVAL_BATCHES = 4
# What modules, hooks and shards of a block take beside its elements, at least.
BLOCK_BYTES = 100_000
# A text of this length takes hours to write, because each byte gathers the whole model.
MOST_SAMPLE = 1_000_000
# Sequences in a step; where ranks times micro-batches do not divide it, the next multiple.
BATCH = 16
# Much longer than a step and than what one rank does alone; torch's own limit is half an hour.
TIMEOUT_S = 300.0


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """
    ## The options
    """
    parser = Parser(
        prog="zero3.train",
        description="Train a byte-level GPT, sharded over all ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--d-model", type=int, default=128, help="features of a position")
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--heads", type=int, default=2, help="attention heads of a block")
    add("--seq-len", type=int, default=64, help="bytes in a sequence")
    add("--batch", type=int, metavar="N", help="sequences in a step, of all ranks together; left "
        f"out, {BATCH}, or the next multiple of ranks times micro-batches")
    add("--accumulate", type=int, default=1, help="micro-batches that a batch is cut into")
    add("--steps", type=int, default=650, help="optimizer steps")
    add("--lr", type=float, default=4e-3, help="highest learning rate")
    add("--seed", type=int, default=0, help="of weights, batches and sample")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to train")
    add("--dtype", choices=list(DTYPES), default="fp32", help="of parameters and computation")
    add("--reduce-dtype", choices=list(DTYPES), help="of gradients between ranks and in shards")
    add("--loss-scale", type=loss_scale, metavar="S", help='a number, or "dynamic"')
    add("--clip", type=float, metavar="C", help="greatest norm of the gradient")
    add("--offload-params", choices=TIERS, default="device", help="where parameters rest")
    add("--offload-optimizer", choices=TIERS, default="device", help="where its states rest")
    add("--offload-folder", metavar="DIR", help="for files; left out, the one of --out")
    add("--table", action="store_true", help="first say what each rank will hold")
    add("--text", metavar="FILE", help="text to train on, instead of Python's own reference")
    add("--out", default="runs/train", help="folder for pictures and figures")
    add("--eval-every", type=int, default=50, help="steps from one evaluation to the next")
    add("--save-every", type=int, default=0, metavar="N", help="steps from one checkpoint to the "
        "next, in the folder of --out; with 0 Ctrl-C alone saves one")
    add("--resume", default="auto", metavar="DIR", help="a checkpoint to go on from, of whatever "
        "run; auto: the newest of this one; no: none, and the first one that is saved replaces "
        "those of later steps")
    add("--timeout", type=seconds, default=TIMEOUT_S, metavar="SECONDS", help="how long a rank "
        "waits for the others before it ends with an error")
    add("--sample", type=int, default=300, help="bytes to write after training")
    add("--prompt", default="The ", help="what the sample begins with")
    return parser.parse_args(argv)


def loss_scale(text: str) -> float | str:
    return text if text == "dynamic" else float(text)


def seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"expected seconds, more than 0, got {text}")
    return value


def check_options(args: argparse.Namespace, ranks: Ranks) -> None:
    """
    ## Refuse what cannot work, before anything starts

    Raises `ValueError`.
    """
    most_fp32 = torch.finfo(torch.float32).max
    limits = {"steps": (2, MOST), "layers": (1, MOST), "heads": (1, MOST), "d_model": (1, MOST),
              "seq_len": (1, MOST), "batch": (1, MOST), "eval_every": (1, MOST),
              "accumulate": (1, MOST), "save_every": (0, MOST), "sample": (0, MOST_SAMPLE),
              # What torch takes as a seed.
              "seed": (-2**63, 2**64 - 1),
              "lr": (0, most_fp32), "clip": (1e-6, most_fp32), "loss_scale": (1e-6, most_fp32)}
    for name, (least, most) in limits.items():
        given = getattr(args, name)
        if given not in (None, "dynamic"):
            within(f"--{name.replace('_', '-')}", given, least, most)
    expect(args.batch % (ranks.world_size * args.accumulate) == 0, "the batch does not split",
           f"a multiple of {ranks.world_size} ranks times {args.accumulate} micro-batches",
           f"--batch {args.batch}", "change one of the three")
    expect(bool(args.prompt), "there is nothing to continue", "a prompt of at least one byte",
           "an empty one", "pass --prompt")
    # An empty path would be the folder in which the run was started.
    resumable = args.resume in ("auto", "no") or (args.resume and Path(args.resume).is_dir())
    expect(resumable, "there is no checkpoint for --resume", "a folder, `auto` or `no`",
           repr(args.resume), "pass one")
    expect(bool(args.out), "there is no place to write to", "a folder", "an empty --out",
           "pass --out")
    in_files = "nvme" in (args.offload_params, args.offload_optimizer)
    if args.offload_folder is not None:
        expect(in_files, "nothing goes to --offload-folder", "--offload-params nvme or "
               "--offload-optimizer nvme beside it", "neither", "pass one of them, or leave "
               "--offload-folder out")
        folder("--offload-folder", args.offload_folder)


def check_memory(config: gpt.GPTConfig, args: argparse.Namespace, ranks: Ranks) -> None:
    """
    ## Refuse sizes that memory has no room for, before anything is built

    Each part counts what it needs at least, so nothing is refused that would work. Ranks of one
    machine share its CPU memory and its disk.

    Raises `ValueError`, with the bytes that are needed and those that are free.
    """
    width = DTYPES[args.dtype].itemsize
    shard_numel = config.numel / ranks.world_size
    # Two moments, a gradient, and an fp32 master where the parameters are narrower.
    state_bytes = 8 + DTYPES[args.reduce_dtype or args.dtype].itemsize + 4 * (width < 4)
    rows = args.batch / ranks.world_size / args.accumulate
    # Autograd saves each block's attention and the fp32 logits.
    row_numel = config.n_layers * config.n_heads * config.seq_len**2
    row_bytes = width * row_numel + 4 * config.seq_len * config.n_vocab
    smaller, shorter = "lower --d-model or --layers", "lower --batch or --seq-len"
    for what, tier, nbytes, cure in (
        # Each rank builds the whole model in fp32, and shards it layer by layer.
        ("the model as it is built", "cpu",
         4 * config.numel + config.n_layers * BLOCK_BYTES, smaller),
        ("the parameters", args.offload_params, width * shard_numel, smaller),
        ("the optimizer states", args.offload_optimizer, state_bytes * shard_numel, smaller),
        # Every rank draws the windows of all ranks, first as bytes and then as numbers.
        ("a batch", "cpu", args.batch * (8 + 9 * (config.seq_len + 1)), shorter),
        ("the activations of a step", "device", rows * row_bytes,
         f"{shorter}, or raise --accumulate"),
    ):
        at, sharers = "the GPU", 1
        if tier == "nvme":
            at = f"{args.offload_folder or args.out}"
            left_bytes = shutil.disk_usage(at).free
        elif tier == "cpu" or ranks.device.type == "cpu":
            at, left_bytes = "the CPU", room(torch.device("cpu"))
        else:
            left_bytes = room(ranks.device)
        if at != "the GPU":
            sharers = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        need_bytes = int(sharers * nbytes)
        expect(need_bytes <= left_bytes, f"there is no room for {what}",
               f"at least {need_bytes:,} bytes on {at}, for {sharers} rank(s)",
               f"{left_bytes:,} bytes free", cure)


def build(
    config: gpt.GPTConfig, args: argparse.Namespace, ranks: Ranks
) -> tuple[Zero3Sequential, Zero3Optimizer]:
    """
    ## The sharded model and its optimizer

    Wrapped one by one, so that no rank ever has more than one whole layer beside the shards on its
    GPU.
    """
    torch.manual_seed(args.seed)
    dtype = DTYPES[args.dtype]
    place = (ranks.rank, ranks.world_size, ranks.device, dtype)
    params_in, states_in = (
        Offload(tier, args.offload_folder or args.out if tier == "nvme" else None)
        for tier in (args.offload_params, args.offload_optimizer))
    layers = [Zero3Layer(m.to(ranks.device, dtype), *place, params_in)
              for m in gpt.gpt_layers(config)]
    model = Zero3Sequential(layers)
    optimizer = Zero3Optimizer(
        model, betas=(0.9, 0.95), loss_scale=args.loss_scale, clip_grad_norm=args.clip,
        offload=states_in,
        reduce_dtype=DTYPES.get(args.reduce_dtype),
        # Decay keeps matrices small. Norms and biases have a size for a reason.
        group_by=lambda name, p: {"weight_decay": 0.1 if p.ndim > 1 else 0.0},
    )
    return model, optimizer


@torch.no_grad()
def evaluate(model: Zero3Sequential, data: torch.Tensor, args, ranks: Ranks) -> float:
    """
    ## Bits per byte on text that no step has seen, as a mean over ranks
    """
    model.eval()
    losses = []
    for i in range(EVAL_BATCHES):
        windows = ranks.rows(gpt.global_batch(data, i, args.batch, args.seq_len))
        losses.append(gpt.next_byte_loss(model, windows))
    model.train()
    return sum(ranks.mean(losses)) / EVAL_BATCHES * BITS


def begin(
    config: gpt.GPTConfig, args, ranks: Ranks, run: Run
) -> tuple[Zero3Sequential, Zero3Optimizer]:
    """
    ## The model and its optimizer, as they were built or as a checkpoint has them

    Raises `RuntimeError` if there is no room for the model, and `ValueError` on all ranks if the
    checkpoint cannot be loaded.
    """
    found = take_up(args, ranks)
    try:
        model, optimizer = build(config, args, ranks)
    except RuntimeError as error:
        raise RuntimeError(f"cannot build the model. {error}") from error
    if args.table:
        ranks.say(optimizer.table(args.accumulate) + "\n")
    if found is None:
        return model, optimizer
    try:
        told = load(found, model, optimizer)
        run.losses, run.held_out, run.train_s = (
            told[name] for name in ("losses", "held_out", "train_s"))
    except (RuntimeError, OSError, KeyError, TypeError) as error:
        raise ValueError(f"cannot go on from {found}. {error}") from error
    step = len(run.losses)
    if step + 1 == args.steps:
        raise ValueError(
            "too few steps are left. Expected: none, or at least 2, of which one is recorded. Got: "
            f"1, from {found}. What to do: raise --steps."
        )
    ranks.say(f"step {step}: goes on from {found}" if step < args.steps else
              f"step {step}: {found} is the end of this run; `--resume no` begins anew")
    return model, optimizer


def train(model, optimizer, text, held_out, args, ranks: Ranks, show, run: Run) -> None:
    """
    ## The loop

    It goes on from where `run` is, to the end, or until a signal says that it shall end.

    The last step is recorded: by then the optimizer has its states, so it is a step like all but
    the first, unless it overflows and is skipped. Before the last two there is no checkpoint, or a
    run that goes on from it would have no step to record.
    """
    losses, tape, start_s = [], Ledger(model, optimizer), time.perf_counter()
    for step in range(len(run.losses), args.steps):
        for group in optimizer.param_groups:
            group["lr"] = gpt.lr_at(step, args.steps, args.lr)
        last = step + 1 == args.steps
        windows = ranks.rows(gpt.global_batch(text, step, args.batch, args.seq_len, args.seed))
        losses.append(torch.zeros((), device=ranks.device))
        with tape if last else contextlib.nullcontext():
            for part in windows.chunk(args.accumulate):
                loss = gpt.next_byte_loss(model, part) / args.accumulate
                optimizer.backward(loss)
                losses[-1] += loss.detach()
            if step + 2 == args.steps:
                # Off the tape: to look at gradients in files, they have to be read.
                run.exponents = exponents(optimizer)
            optimizer.step()
        optimizer.zero_grad()

        looks = last or (step + 1) % args.eval_every == 0
        ends = ranks.any(run.came)
        saves = ends or (args.save_every and (step + 1) % args.save_every == 0)
        saves = saves and step + 2 < args.steps
        if looks or saves:
            # A loss is this rank's, the mean of its rows; the mean over ranks is that of the
            # global batch.
            run.losses += [value * BITS for value in ranks.mean(losses)]
            run.train_s += time.perf_counter() - start_s
        if looks:
            recent = run.losses[run.held_out[-1][0] if run.held_out else 0 :]
            run.held_out.append((step + 1, evaluate(model, held_out, args, ranks)))
            rate = args.batch * args.seq_len * (step + 1) / run.train_s
            show(step + 1, sum(recent) / len(recent), run.held_out[-1][1], rate)
        if saves:
            where = save_run(model, optimizer, args, run)
            cure = "the same command" if args.resume == "auto" else "`--resume auto`"
            ranks.say(f"step {step + 1}: saved {where}" + f"; {cure} goes on from there" * ends)
            if ends:
                return
        if looks or saves:
            losses, start_s = [], time.perf_counter()
        if last:
            run.take(model, optimizer, tape, ranks)


def finish(model, optimizer, config: gpt.GPTConfig, args, ranks: Ranks, run: Run) -> None:
    """
    ## Sample, compare, and write it all down

    All ranks call it; rank 0 prints and writes.
    """
    drawn = torch.Generator().manual_seed(args.seed)
    # A byte that is no UTF-8 is one of the prompt too.
    prompt = args.prompt.encode(errors="surrogateescape")
    text = gpt.sample(model, prompt, args.sample, args.seq_len, 0.5, drawn, ranks.device).decode(
        errors="replace"
    )
    # Ranks differ by a few bytes: param groups cut their shards in other places.
    predicted = ranks.gather(optimizer.predict(args.accumulate))
    plain = data_parallel(describe(model), ranks.world_size, mixed=True)
    measured, tapes, gradients = map(ranks.gather, (run.measured, run.events, run.exponents))
    if ranks.rank:
        return
    # Here, because matplotlib takes a second to import, and only rank 0 draws.
    from zero3.train import report

    ranks.say(f"\n{text}\n")
    ranks.say(report.table(predicted, plain, measured))
    device, version, out = report.device_name(ranks.device), torch.__version__, Path(args.out)
    metrics = {
        "options": vars(args),
        "config": dataclasses.asdict(config),
        "ranks": ranks.world_size,
        "device": device,
        "torch": version,
        "commit": commit_name(),
        "tokens_per_s": args.batch * args.seq_len * args.steps / run.train_s,
        "loss_unit": "bits per byte",
        "losses": run.losses,
        "held_out": run.held_out,
        "sample": text,
        "measured": measured,
        "skipped_steps": optimizer.skipped_steps, "loss_scale": optimizer.loss_scale,
        "gradients": report.merged(gradients),
        "predicted": [report.as_dict(p) for p in predicted],
        "data_parallel": report.as_dict(plain),
    }
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1))
    caption = f"{ranks.world_size} ranks, {device}, torch {version}, commit {metrics['commit']}"
    report.draw_loss(run.losses, run.held_out, caption).savefig(out / "loss.png")
    report.draw_tape(tapes, predicted, plain, caption).savefig(out / "tape.png")
    report.draw_gradients(gradients, caption).savefig(out / "gradients.png")
    ranks.say(f"\nwrote loss.png, tape.png, gradients.png and metrics.json to {out}")


def prepare(argv: list[str] | None) -> tuple[Any, gpt.GPTConfig, Ranks, tuple[torch.Tensor, ...]]:
    """
    ## Options, sizes, ranks and text, or an error before anything starts

    Raises `ValueError` for this rank alone, because each machine has files and memory of its own.
    `main` tells the other ranks.
    """
    args = parse_args(argv)
    ranks = Ranks.find(args.device)
    if args.batch is None:
        share = max(1, ranks.world_size * args.accumulate)
        args.batch = -(-BATCH // share) * share
        if args.batch != BATCH:
            ranks.say(f"--batch {args.batch}, because {BATCH} is no multiple of {share} "
                      "(ranks times micro-batches)")
    check_options(args, ranks)
    config = gpt.GPTConfig(
        seq_len=args.seq_len, d_model=args.d_model, n_heads=args.heads, n_layers=args.layers,
        d_ff=2 * args.d_model,
    )
    texts = gpt.split(gpt.load_bytes(args.text), args.seq_len)
    expect(not missing(*APP), "a package of the application is missing", ", ".join(APP),
           f"a Python without {', '.join(missing(*APP))}", INSTALL)
    try:
        Path(args.out).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        expect(False, "there is no place to write to", "a folder", error, "pass --out")
    folder("--out", args.out)
    check_memory(config, args, ranks)
    return args, config, ranks, texts


def main(argv: list[str] | None = None) -> int:
    """
    ## Train, and say how it went

    Returns the exit code: 0 at the end of the run, 2 for what cannot work, 1 for an error; and
    128 + 15 or 128 + 2, as shells have it, if SIGTERM or Ctrl-C ended the run before its last step.
    """
    end_with_parent()
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    problem, timeout_s, store = "", TIMEOUT_S, None
    try:
        # argparse writes to the screen by itself, and would do so on every rank.
        with contextlib.ExitStack() as quiet:
            if rank:
                quiet.enter_context(contextlib.redirect_stdout(io.StringIO()))
            told = quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
            args, config, ranks, (text, held_out) = prepare(argv)
        timeout_s = args.timeout
    except ValueError as error:
        problem = str(error)
    except SystemExit as error:
        if not error.code:
            return 0
        problem = told.getvalue().strip().splitlines()[-1].removeprefix("zero3.train: ")
    try:
        if world_size > 1:
            store = fresh_store(rank, world_size, timeout_s)
        if not agree(store, rank, world_size, problem):
            return 2
        ranks.connect(store, timeout_s)
    except RuntimeError as error:
        print(f"zero3.train: {error}", file=sys.stderr, flush=True)
        return 1
    with signals() as came:
        run = Run(came=came)
        try:
            return train_and_finish(args, config, ranks, text, held_out, run)
        except Exception as error:
            return tell_failure(error, rank, store)


def train_and_finish(args, config: gpt.GPTConfig, ranks: Ranks, text, held_out, run: Run) -> int:
    """
    ## From the first step to the last, or to a signal

    All ranks call it. Returns the exit code.
    """
    code = 0
    try:
        check_alike(args, ranks)
        model, optimizer = begin(config, args, ranks, run)
    except ValueError as error:
        # On all ranks alike.
        if not ranks.rank:
            print(f"zero3.train: {one_line(str(error))}", file=sys.stderr, flush=True)
        code = 2
    else:
        begun = len(run.losses)
        with progress(ranks, args.steps) as show:
            train(model, optimizer, text, held_out, args, ranks, show, run)
        if run.measured:
            finish(model, optimizer, config, args, ranks, run)
            if args.save_every or begun:
                where = save_run(model, optimizer, args, run)
                ranks.say(f"saved {where}, the end of this run")
        elif len(run.losses) < args.steps:
            # A supervisor shall not take the run for done. The signal came to some rank.
            code = 128 + max(number for came in ranks.gather(run.came) for number in came)
    # Nobody leaves while rank 0 still speaks or draws.
    ranks.barrier()
    return code


def check_alike(args: argparse.Namespace, ranks: Ranks) -> None:
    """
    ## Refuse ranks that were started with different options

    Machines of one run are started by a command each. With another --seed on one of them, weights
    would be put together from two models. Raises `ValueError` on all ranks alike.
    """
    # Paths may differ between machines.
    mine = {name: value for name, value in vars(args).items()
            if name not in ("text", "out", "offload_folder", "resume")}
    first, *others = ranks.gather(mine)
    for rank, theirs in enumerate(others, 1):
        for name, value in first.items():
            if theirs[name] != value:
                option = f"--{name.replace('_', '-')}"
                raise ValueError(
                    f"the ranks have different options. Expected: {option} {value}, as on rank 0. "
                    f"Got: {option} {theirs[name]}, on rank {rank}. What to do: start all machines "
                    "with the same command."
                )

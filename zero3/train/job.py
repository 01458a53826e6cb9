r"""
# The main job: train a sharded GPT, and check the bytes

The job trains the byte-level GPT of `gpt.py` on all ranks. Three lines of its loop differ from
plain data parallelism: the layers are wrapped, a `Zero3Optimizer` is built on the model, and the
optimizer calls backward.

`predict.py` predicts the bytes from the shapes alone, and a `Ledger` measures them in one real
step. The table at the end of the run says `equal`. Nodes, replicas, encodings, Muon, the traffic of
files, and some bytes of `--compress` are measured only.

`Run` keeps the figures of a run, which go into its checkpoints, and `take_up` finds the checkpoint
to resume from.

$$\text{predicted} = \text{measured} \qquad \text{at rest, at the peak, and between ranks}$$

**Run this**: `make train`, or `torchrun --nproc_per_node=2 -m zero3.train --help` for the options.
`docs/running.md` says what it prints, how it resumes, and how long ranks wait for each other.

**Not covered, and what that costs**: a text that does not fit into memory. Each batch is drawn from
the number of its step, so a run that resumes needs only that number to find its place in the data.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero3 import commit_name
from zero3.checkpoint.reader import (
    CheckpointReader,
    clean_up_interrupted_saves,
    decode,
    lock_folder,
    newest,
)
from zero3.checkpoint.save_load import load, save
from zero3.comm.encodings import Encoding, Int4, Int8
from zero3.comm.links import Links
from zero3.compression.clean import table
from zero3.compression.compress import Compression, compress
from zero3.estimate.formulas import describe
from zero3.estimate.ledger import Ledger, disk_bytes, held_bytes
from zero3.estimate.predict import data_parallel, memory_table, predict_optimizer
from zero3.estimate.saved import Moved, activations, saved_bytes
from zero3.guards.checks import MOST, expect, same
from zero3.guards.command_line import Parser, folder, one_line, within
from zero3.guards.room import room
from zero3.layer import Zero3Layer, Zero3Sequential
from zero3.offload.activations import Activations
from zero3.offload.tiers import TIERS, Offload
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.optimizer.whole import GroupBy, Matrices, Options
from zero3.train import compressed, gpt, report
from zero3.train.launch import (
    Ranks,
    agree,
    end_with_parent,
    fresh_store,
    signals,
    tell_failure,
)

ENCODINGS: dict[int | None, Encoding] = {4: Int4(), 8: Int8()}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Batches of an evaluation, the same ones each time.
EVAL_BATCHES = 4
# Bytes that a block needs beside its parameters, at least.
BLOCK_BYTES = 100_000
# Sequences in a step.
BATCH = 16
# Much longer than anything that one rank does alone. Torch waits 30 minutes with gloo and 10 with
# NCCL.
TIMEOUT_S = 300.0


def loss_scale(text: str) -> float | str:
    return text if text == "dynamic" else float(text)


MOST_FP32 = torch.finfo(torch.float32).max
# The options that are numbers: type, default, least and greatest value, and the help text.
NUMBERS: dict[str, tuple[Callable[[str], float | str], float | None, float, float, str]] = {
    "d_model": (int, 128, 1, MOST, "features of a position"),
    "layers": (int, 4, 1, MOST, "transformer blocks"),
    "heads": (int, 2, 1, MOST, "attention heads of a block"),
    "seq_len": (int, 64, 1, MOST, "bytes in a sequence"),
    "batch": (int, None, 1, MOST, "sequences in a step, on all ranks together; if not given, "
              f"{BATCH} or the next multiple of ranks times micro-batches"),
    "accumulate": (int, 1, 1, MOST, "micro-batches in a step"),
    "steps": (int, 650, 2, MOST, "optimizer steps"),
    "lr": (float, 4e-3, 0, MOST_FP32, "highest learning rate"),
    "seed": (int, 0, -2**63, 2**64 - 1, "seed of weights, batches and sample"),
    "loss_scale": (loss_scale, None, 1e-6, MOST_FP32, 'a number, or "dynamic"'),
    "clip": (float, None, 1e-6, MOST_FP32, "largest norm of the gradient"),
    "replicas": (int, 1, 1, MOST, "replicas of the sharded model"),
    "nodes": (int, 1, 1, MOST, "nodes that share the model, each with as many consecutive ranks"),
    "eval_every": (int, 50, 1, MOST, "steps between two evaluations"),
    "save_every": (int, 0, 0, MOST, "steps between two checkpoints, which go to the folder of "
                   "--out; with 0, Ctrl-C and SIGTERM save one, and a resumed run at its end"),
    "timeout": (float, TIMEOUT_S, 1e-3, 1e6, "seconds for which a rank waits for the others before "
                "it ends with an error"),
    # All layers are gathered for each byte.
    "sample": (int, 300, 0, 1_000_000, "bytes of text to write after training"),
}
# The other options, as arguments of `add_argument`.
OTHERS: dict[str, dict[str, Any]] = {
    "device": {"choices": ["auto", "cpu", "cuda"], "default": "auto", "help": "device to train on"},
    "dtype": {"choices": list(DTYPES), "default": "fp32",
              "help": "data type of parameters and computation"},
    "reduce_dtype": {"choices": list(DTYPES),
                     "help": "data type of gradients, between ranks and in shards"},
    "optimizer": {"choices": ["adamw", "muon"], "default": "adamw",
                  "help": "who steps the hidden matrices; AdamW steps all others"},
    "offload_params": {"choices": TIERS, "default": "device", "help": "where parameters rest"},
    "offload_optimizer": {"choices": TIERS, "default": "device",
                          "help": "where optimizer states rest"},
    "activations": {"choices": TIERS, "default": "device",
                    "help": "where tensors rest that autograd saves"},
    "offload_folder": {"metavar": "DIR", "help": "folder for offloaded files; if not given, --out"},
    "gather_bits": {"type": int, "choices": [4, 8],
                    "help": "bits of a parameter between ranks; if not given, all"},
    "reduce_bits": {"type": int, "choices": [4, 8],
                    "help": "bits of a gradient between ranks; if not given, all"},
    "secondary": {"action": "store_true", "help": "keep a copy of each layer inside its node from "
                  "forward to backward; needs --nodes"},
    "compress": {"choices": [*compressed.RECIPES], "nargs": "+", "help": "train a model that "
                 "becomes smaller, and write it at the end; with several of these, train one model "
                 "by each, and compare them with the first"},
    "table": {"action": "store_true", "help": "first print the bytes that each rank will hold"},
    "text": {"metavar": "FILE", "help": "text to train on; if not given, Python's own reference"},
    "out": {"default": "runs/train", "help": "folder for pictures and figures"},
    "resume": {"default": "auto", "metavar": "DIR", "help": "checkpoint to resume from, of any "
               "run; auto: the newest one of this run; no: none, and the first checkpoint that is "
               "saved replaces those of later steps"},
    "prompt": {"default": "The ", "help": "beginning of the sample"},
}

# Two runs with the same values of these resume each other's checkpoints.
OPTIONS = ("d_model", "layers", "heads", "seq_len", "batch", "accumulate", "steps", "lr", "seed",
           "dtype", "reduce_dtype", "optimizer", "loss_scale", "clip", "text", "gather_bits",
           "reduce_bits", "compress")


def main(argv: list[str] | None = None) -> int:
    """
    ## Train, and report how it went

    Returns the exit code: 0 at the end of the run, 2 for wrong options and for an error of this
    rank that says what to do, 1 for any other. If a signal ended the run early, the code is 128 +
    15 or 128 + 2, as in a shell.
    """
    end_with_parent()
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    job, problem = prepare_quietly(argv, rank)
    if job is None and not problem:
        # `--help`.
        return 0
    timeout_s = job.args.timeout if job else TIMEOUT_S
    try:
        store = fresh_store(rank, world_size, timeout_s)
        if not agree(store, rank, world_size, problem) or job is None:
            return 2
        job.ranks.connect(store, timeout_s)
    except RuntimeError as error:
        print(f"zero3.train: {error}", file=sys.stderr, flush=True)
        return 1
    # torchrun sends SIGTERM if another rank fails.
    with signals() as job.came:
        try:
            code = job.train_each()
            # Wait for all ranks: torchrun ends rank 0 when another rank leaves.
            job.ranks.gather(code)
            return code
        except Exception as error:
            return tell_failure(error, job.ranks, store)


def prepare_quietly(argv: list[str] | None, rank: int) -> tuple["Job | None", str]:
    """
    ## Prepare the job, and catch anything that argparse would print on every rank

    Returns the job, or the problem of this rank. After `--help` there is neither.
    """
    errors = io.StringIO()
    screen = io.StringIO() if rank else sys.stdout
    try:
        with contextlib.redirect_stdout(screen), contextlib.redirect_stderr(errors):
            return prepare(argv), ""
    # A path that is too long, or that this rank may not read, is the system's error.
    except (ValueError, OSError) as error:
        return None, str(error)
    except SystemExit as error:
        last_line = errors.getvalue().strip().rpartition("\n")[2]
        return None, last_line.removeprefix("zero3.train: ") if error.code else ""


def prepare(argv: list[str] | None) -> "Job":
    """
    ## Check options, sizes, text and memory before anything starts

    Raises `ValueError` on this rank alone, and `main` tells the other ranks.
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
    config = gpt.GPTConfig(seq_len=args.seq_len, d_model=args.d_model, n_heads=args.heads,
                           n_layers=args.layers, d_ff=2 * args.d_model)
    text, held_out = gpt.split(gpt.load_bytes(args.text), args.seq_len)
    with contextlib.suppress(OSError):
        Path(args.out).mkdir(parents=True, exist_ok=True)
    folder("--out", args.out)
    check_memory(config, args, ranks)
    return Job(args, config, ranks, text, held_out)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """
    ## Options of the command line
    """
    parser = Parser(
        prog="zero3.train",
        description="Train a byte-level GPT, sharded over all ranks.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    numbers = {name: {"type": kind, "default": default, "help": text}
               for name, (kind, default, _, _, text) in NUMBERS.items()}
    for name, settings in (numbers | OTHERS).items():
        parser.add_argument(option(name), **settings)
    return parser.parse_args(argv)


def option(name: str) -> str:
    """
    ## The option of a variable: `d_model` is `--d-model`
    """
    return f"--{name.replace('_', '-')}"


def check_options(args: argparse.Namespace, ranks: Ranks) -> None:
    """
    ## Refuse options that cannot work

    Raises `ValueError`.
    """
    for name, (_, _, least, most, _) in NUMBERS.items():
        given = getattr(args, name)
        if given not in (None, "dynamic"):
            within(option(name), given, least, most)
    recipes = args.compress or []
    for check in (
        (args.batch % (ranks.world_size * args.accumulate) == 0, "the batch does not split",
         f"a multiple of {ranks.world_size} ranks times {args.accumulate} micro-batches",
         f"--batch {args.batch}", "change one of the three"),
        (1 in (args.replicas, args.nodes), "the ranks cannot be grouped both ways",
         "--replicas or --nodes", f"--replicas {args.replicas} --nodes {args.nodes}",
         "leave one of them out"),
        (ranks.world_size % (args.replicas * args.nodes) == 0, "the ranks do not split",
         f"replicas or nodes that divide {ranks.world_size} ranks",
         f"--replicas {args.replicas} --nodes {args.nodes}", "change one of these numbers"),
        (args.nodes > 1 or not args.secondary, "there are no nodes for --secondary",
         "--nodes beside it", "one node", "pass --nodes, or leave --secondary out"),
        (not args.table or is_predicted(args), "the bytes cannot be predicted",
         "one group of ranks, no encodings and AdamW", "--table beside --nodes, --replicas, "
         "--gather-bits, --reduce-bits or --optimizer muon",
         "leave --table out; the job measures them at its end"),
        (args.optimizer == "adamw" or not args.compress, "the matrices of a compressed model "
         "have no owner", "AdamW", "--optimizer muon beside --compress", "leave one of them out"),
        (len({*recipes}) == len(recipes), "a model would be trained twice", "different recipes",
         f"--compress {' '.join(recipes)}", "pass each of them once"),
        ("4-half" not in recipes or not args.gather_bits, "elements cannot be pruned",
         "weights that are gathered as they are", f"--gather-bits {args.gather_bits}",
         "leave it out, or pass --compress 8"),
        ("rows-heads" not in recipes or args.heads > 1, "there is no head to prune",
         "at least 2 heads", f"--heads {args.heads}", "raise it, or pass --compress 8"),
        (len(recipes) < 2 or args.resume in ("auto", "no"), "several models cannot resume from "
         "one checkpoint", "`auto` or `no`", f"--resume {args.resume}", "pass one recipe"),
        (bool(args.prompt), "there is nothing to continue", "a prompt of at least one byte",
         "an empty one", "pass --prompt"),
        # An empty path would mean the current folder.
        (args.resume in ("auto", "no") or (args.resume and Path(args.resume).is_dir()),
         "there is no checkpoint for --resume", "a folder, `auto` or `no`", repr(args.resume),
         "pass one"),
        (bool(args.out), "there is no place to write to", "a folder", "an empty --out",
         "pass --out"),
        (args.offload_folder is None
         or "nvme" in (args.offload_params, args.offload_optimizer, args.activations),
         "nothing goes to --offload-folder", "--offload-params nvme, --offload-optimizer nvme or "
         "--activations nvme beside it", "none of them",
         "pass one of them, or leave --offload-folder out"),
    ):
        expect(*check)
    if args.offload_folder is not None:
        folder("--offload-folder", args.offload_folder)


def is_predicted(args: argparse.Namespace) -> bool:
    """
    ## Whether formulas predict the bytes
    """
    return not (args.nodes > 1 or args.replicas > 1 or args.gather_bits or args.reduce_bits
                or args.optimizer == "muon")


def check_memory(config: gpt.GPTConfig,
                 args: argparse.Namespace,
                 ranks: Ranks) -> None:
    """
    ## Refuse a model or a batch that does not fit into memory, before anything is built

    Each need is counted at its least, so no run is refused that would have worked. The layers and
    the optimizer look for the room of shards and states when they are built. Raises `ValueError`.
    """
    cpu = torch.device("cpu")
    # Autograd saves each block's attention and the fp32 logits. Of blocks whose attention leaves,
    # two are in memory.
    blocks = config.n_layers if args.activations == "device" else min(2, config.n_layers)
    saved = (DTYPES[args.dtype].itemsize * blocks * config.n_heads * config.seq_len**2
             + 4 * config.seq_len * config.n_vocab)
    shorter = "lower --batch or --seq-len"
    for what, at, nbytes, cure in (
        # Each rank builds the whole model in fp32, and then shards it layer by layer.
        ("the model as it is built", cpu, 4 * config.numel + config.n_layers * BLOCK_BYTES,
         "lower --d-model or --layers"),
        # Every rank draws the windows of all ranks, first as bytes and then as 8-byte integers.
        ("a batch", cpu, args.batch * (8 + 9 * (config.seq_len + 1)), shorter),
        ("the activations of a step",
         ranks.device,
         args.batch / ranks.world_size / args.accumulate * saved,
         f"{shorter}, or raise --accumulate"),
    ):
        sharers = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if at.type == "cpu" else 1
        need_bytes = int(sharers * nbytes)
        free_bytes = room(at)
        expect(need_bytes <= free_bytes, f"there is no room for {what}",
               f"at least {need_bytes:,} bytes on {at}, for {sharers} rank(s)",
               f"{free_bytes:,} bytes free", cure)


@dataclasses.dataclass
class Run:
    """
    ## The figures of a run, which go into its checkpoints
    """

    losses: list[float] = dataclasses.field(default_factory=list)  # bits per byte, one per step
    held_out: list[tuple[int, float]] = dataclasses.field(default_factory=list)  # step, bits/byte
    train_s: float = 0.0  # without evaluation


@dataclasses.dataclass
class Job:
    """
    ## One run of the job on this rank

    `build` adds the model, its optimizer and its activations. All ranks call each method, but rank
    0 alone calls `metrics`.
    """

    args: argparse.Namespace
    config: gpt.GPTConfig
    ranks: Ranks
    text: torch.Tensor
    held_out: torch.Tensor
    run: Run = dataclasses.field(default_factory=Run)
    came: list[int] = dataclasses.field(default_factory=list)  # signals to end the run
    compression: Compression | None = None

    def train_each(self) -> int:
        """
        ### Train one model, or one for each recipe of `--compress`

        Several models have a folder each, and start from the same seed. Returns the exit code.
        """
        recipes = self.args.compress or [None]
        several = len(recipes) > 1
        for recipe in recipes:
            out = f"{self.args.out}/{recipe}" if several else self.args.out
            if several:
                Path(out).mkdir(exist_ok=True)
                self.ranks.say(f"\n--compress {recipe}")
            args = argparse.Namespace(**vars(self.args) | {"compress": recipe, "out": out})
            code = dataclasses.replace(self, args=args, run=Run()).train_and_finish(several)
            if code:
                return code
        if several and not self.ranks.rank:
            compressed.compare(Path(self.args.out), recipes)
        return 0

    def train_and_finish(self, saves_end: bool) -> int:
        """
        ### From the first step to the last one, or to a signal

        * `saves_end` saves the end of the run, so that the same command skips this model

        Returns the exit code.
        """
        try:
            same("the ranks have different options",
                 range(self.ranks.world_size),
                 # Paths may differ between machines.
                 self.ranks.gather({
                     option(name): value
                     for name, value in vars(self.args).items()
                     if name not in ("text", "out", "offload_folder", "resume")}),
                 "start all machines with the same command",
                 ValueError)
            self.begin()
        except ValueError as error:
            # Every rank has raised it.
            self.ranks.say(f"zero3.train: {one_line(str(error))}", sys.stderr)
            return 2
        begun = len(self.run.losses)
        tape = Ledger(self.model, self.optimizer)
        with progress(self.ranks, self.args.steps) as show:
            code = self.train(show, tape)
        if tape.events:
            self.finish(tape)
            if self.args.save_every or begun or saves_end:
                self.save(", the end of this run")
        return code

    def begin(self) -> None:
        """
        ### Build the model and its optimizer, and load a checkpoint if there is one

        Raises `RuntimeError` if the model does not fit into memory, and `ValueError` on all ranks
        if the checkpoint cannot be loaded.
        """
        found = take_up(self.args, self.ranks)
        self.build()
        if self.args.table:
            self.ranks.say(memory_table(self.optimizer, self.args.accumulate) + "\n")
        if found is None:
            return
        try:
            extra = load(found, self.model, self.optimizer)
            self.run = Run(**{name: extra[name] for name in vars(self.run)})
        except (RuntimeError, OSError, KeyError, TypeError) as error:
            raise ValueError(f"cannot resume from {found}. {error}") from error
        step = len(self.run.losses)
        expect(step + 1 != self.args.steps, "too few steps are left",
               "none, or at least 2, because the last one is recorded", f"1, from {found}",
               "raise --steps")
        is_end = step >= self.args.steps
        where = (f"{found} is the end of this run; `--resume no` starts it over" if is_end
                 else f"resumes from {found}")
        self.ranks.say(f"step {step}: {where}")

    def build(self) -> None:
        """
        ### The sharded model and its optimizer
        """
        torch.manual_seed(self.args.seed)
        dtype = DTYPES[self.args.dtype]
        params_in = self.offload(self.args.offload_params)
        self.activations = Activations(self.offload(self.args.activations))
        links = self.links()
        # Before thresholds are found, because they are those of the numbers that are trained.
        modules = [module.to(dtype) for module in gpt.gpt_layers(self.config)]
        if self.args.compress:
            self.compression = compress(
                modules,
                compressed.RECIPES[self.args.compress](self.args.steps, self.config))
        group_by = self.group_by(modules)
        self.model = Zero3Sequential(
            Zero3Layer(
                module.to(self.ranks.device),
                device=self.ranks.device,
                dtype=dtype,
                offload=params_in,
                mesh=links,
                activations=self.activations)
            for module in modules)
        self.optimizer = Zero3Optimizer(
            self.model,
            betas=(0.9, 0.95),
            loss_scale=self.args.loss_scale,
            clip_grad_norm=self.args.clip,
            offload=self.offload(self.args.offload_optimizer),
            reduce_dtype=DTYPES.get(self.args.reduce_dtype),
            group_by=group_by,
        )

    def group_by(self, modules: list[nn.Module]) -> GroupBy:
        """
        ### Who steps a parameter, and with which weight decay

        * `modules` are the layers before they are sharded
        """
        def decay(name: str, param: nn.Parameter) -> Options:
            # Norms and biases would be pulled away from their scale.
            return {"weight_decay": 0.1 if param.ndim > 1 else 0.0}

        if self.args.optimizer == "adamw":
            return decay
        # Steps of this size have the learning rate of AdamW.
        matrices = Matrices(nn.Sequential(*modules), adjust_lr_fn="match_rms_adamw")
        return lambda name, param: matrices(name, param) or decay(name, param)

    def links(self) -> Links:
        """
        ### How layers travel between the ranks
        """
        args = self.args
        groups = args.replicas * args.nodes
        mesh = None if groups == 1 else torch.distributed.init_device_mesh(
            self.ranks.device.type,
            (groups, self.ranks.world_size // groups),
            mesh_dim_names=("nodes" if args.nodes > 1 else "replicate", "shard"))
        return Links(mesh, ENCODINGS.get(args.gather_bits), ENCODINGS.get(args.reduce_bits),
                     args.secondary)

    def offload(self, tier: str) -> Offload:
        return Offload(tier, self.args.offload_folder or self.args.out if tier == "nvme" else None)

    def train(self, show: Callable[..., None], tape: Ledger) -> int:
        """
        ### The training loop

        * `show` gets a step, the losses on the training text and on held-out text, and a rate
        * `tape` records the last step, unless a signal comes before it

        Ranks exchange their losses and signals after each step, in one all-gather of objects.
        Returns the exit code.
        """
        for done in range(len(self.run.losses) + 1, self.args.steps + 1):
            start_s = time.perf_counter()
            losses, signals = zip(
                *self.ranks.gather((self.train_step(done, tape), max(self.came, default=0))),
                strict=True)
            # The mean over ranks is that of the whole batch.
            self.run.losses.append(sum(losses) / len(losses) * gpt.BITS)
            self.run.train_s += time.perf_counter() - start_s
            if done == self.args.steps or done % self.args.eval_every == 0:
                self.evaluate(show)
            # A signal may have reached one rank only.
            ends = max(signals)
            saves = ends or (self.args.save_every and done % self.args.save_every == 0)
            if saves and done + 1 < self.args.steps:
                command = "the same command" if self.args.resume == "auto" else "`--resume auto`"
                self.save(f"; {command} resumes from there" * bool(ends))
                if ends:
                    # A supervisor must not believe that the run is done.
                    return 128 + ends
        return 0

    def train_step(self, done: int, tape: Ledger) -> float:
        """
        ### Forward and backward of each micro-batch, then a step of the optimizer

        * `done` is the number of steps after this one

        Returns this rank's loss, in nats.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = gpt.lr_at(done - 1, self.args.steps, self.args.lr)
        batch = gpt.global_batch(self.text, done - 1, self.args.batch, self.args.seq_len,
                                 self.args.seed)
        total = torch.zeros((), device=self.ranks.device)
        with tape if done == self.args.steps else contextlib.nullcontext():
            for windows in self.ranks.rows(batch).chunk(self.args.accumulate):
                loss = gpt.next_byte_loss(self.model, windows) / self.args.accumulate
                self.optimizer.backward(loss)
                total += loss.detach()
            self.optimizer.step()
        self.optimizer.zero_grad()
        return total.item()

    @torch.no_grad()
    def held_out_loss(self, model: nn.Module) -> float:
        """
        ### Bits per byte on text that no step has seen, as a mean over ranks
        """
        model.eval()
        losses = [
            gpt.next_byte_loss(model, self.ranks.rows(gpt.global_batch(
                self.held_out,
                i,
                self.args.batch,
                self.args.seq_len))).item()
            for i in range(EVAL_BATCHES)]
        model.train()
        means = [sum(each) / len(each) for each in zip(*self.ranks.gather(losses), strict=True)]
        return sum(means) / EVAL_BATCHES * gpt.BITS

    def evaluate(self, show: Callable[..., None]) -> None:
        """
        ### Evaluate the model, and show how it goes
        """
        held_out = self.held_out_loss(self.model)
        step = len(self.run.losses)
        recent = self.run.losses[self.run.held_out[-1][0] if self.run.held_out else 0 :]
        self.run.held_out.append((step, held_out))
        show(step, sum(recent) / len(recent), held_out, self.tokens_per_s())

    def tokens_per_s(self) -> float:
        return self.args.batch * self.args.seq_len * len(self.run.losses) / self.run.train_s

    def save(self, then: str) -> None:
        """
        ### Save a checkpoint, and say so

        * `then` are words on what comes then
        """
        step = len(self.run.losses)
        where = save(
            checkpoints(self.args),
            self.model,
            self.optimizer,
            step=step,
            extra={"options": {name: getattr(self.args, name) for name in OPTIONS},
                   **vars(self.run)},
        ).wait()
        self.ranks.say(f"step {step}: saved {where}{then}")

    def finish(self, tape: Ledger) -> None:
        """
        ### Write a sample, compare the bytes, and draw; rank 0 prints and writes

        * `tape` has the last step
        """
        mine = (self.predicted(), measured(tape, self.ranks.rank), tape.events)
        predicted, held, tapes = map(list, zip(*self.ranks.gather(mine), strict=True))
        sample = gpt.sample(
            self.model,
            self.args.prompt.encode(errors="surrogateescape"),
            self.args.sample,
            self.args.seq_len,
            temperature=0.5,
            generator=torch.Generator().manual_seed(self.args.seed),
            device=self.ranks.device,
        ).decode(errors="replace")
        sizes = None if self.compression is None else compressed.finish(
            self.model,
            self.config,
            self.args.compress,
            self.args.steps,
            self.held_out_loss,
            None if self.ranks.rank else Path(self.args.out))
        plain = data_parallel(describe(self.model), self.ranks.world_size, mixed=True).as_dict()
        if self.ranks.rank:
            return
        self.ranks.say(f"\n{sample}\n\n{report.table(predicted, plain, held)}")
        metrics = self.metrics(report.device_name(self.ranks.device)) | {
            "sample": sample,
            "measured": held,
            "predicted": predicted,
            "data_parallel": plain,
        }
        if sizes:
            self.ranks.say(f"\nthe model in {compressed.FILE}, and before\n{table(*sizes)}")
            metrics["cleaned"] = dataclasses.asdict(sizes[1])
        out = Path(self.args.out)
        (out / "metrics.json").write_text(json.dumps(metrics, indent=1))
        caption = "{ranks} ranks, {device}, torch {torch}, commit {commit}".format(**metrics)
        report.draw_loss(self.run.losses, self.run.held_out, caption).savefig(out / "loss.png")
        report.draw_tape(tapes, predicted, plain, caption).savefig(out / "tape.png")
        self.ranks.say(f"\nwrote loss.png, tape.png and metrics.json to {out}")

    def predicted(self) -> dict[str, int]:
        """
        ### The bytes of this rank by the formulas, as far as they can be predicted

        The messages by which ranks find thresholds for `--compress` are not.
        """
        if not is_predicted(self.args):
            return {}
        found = predict_optimizer(self.optimizer, self.args.accumulate, saved=self.saved()
                                  ).as_dict()
        unknown = ["activation_bytes", "out_bytes", "in_bytes"] if self.compression else []
        if self.compression is not None and self.compression.groups:
            unknown += ["sent_bytes", "messages", "order_bytes"]
        return {name: nbytes for name, nbytes in found.items() if name not in unknown}

    def saved(self) -> Moved:
        """
        ### The activations of a micro-batch, from shapes alone
        """
        args = self.args
        rows = args.batch // (self.ranks.world_size * args.accumulate)
        # On the CPU a micro-batch is a view of the whole batch, on a GPU of this rank's rows.
        whole = args.batch if self.ranks.device.type == "cpu" else rows * args.accumulate
        leaves = self.activations.moves_from(self.ranks.device)
        windows = torch.empty(whole, args.seq_len + 1, dtype=torch.long, device="meta")
        with torch.device("meta"):
            modules = [module.to(DTYPES[args.dtype]) for module in gpt.gpt_layers(self.config)]
            saved = saved_bytes(modules, windows[:rows, :-1],
                                self.activations.below_bytes if leaves else 0)
        return activations(saved, self.activations.keep if leaves else len(saved))

    def metrics(self, device: str) -> dict[str, object]:
        """
        ### Options, losses and speed of the run, for `metrics.json`
        """
        return {
            "options": vars(self.args),
            "config": dataclasses.asdict(self.config),
            "ranks": self.ranks.world_size,
            "device": device,
            "torch": torch.__version__,
            "commit": commit_name(),
            "tokens_per_s": self.tokens_per_s(),
            "loss_unit": "bits per byte",
            "losses": self.run.losses,
            "held_out": self.run.held_out,
            "skipped_steps": self.optimizer.skipped_steps,
            "loss_scale": self.optimizer.loss_scale,
        }


@contextlib.contextmanager
def progress(ranks: Ranks, steps: int) -> Iterator[Callable[..., None]]:
    """
    ## Show the progress of the run, on rank 0

    Yields a function of the step, the loss on the training text and on held-out text, and the bytes
    per second.
    """
    if ranks.rank or not sys.stdout.isatty():
        yield lambda step, train, held_out, rate: ranks.say(
            f"step {step:>{len(str(steps))}} of {steps}   train {train:.3f}   "
            f"held out {held_out:.3f} bits/byte   {rate:,.0f} bytes/s"
        )
        return
    from labml import experiment, tracker

    def track(step, train, held_out, rate):
        tracker.save(step, {"loss.train": train, "loss.held_out": held_out, "bytes_per_s": rate})
        tracker.new_line()

    experiment.create(name="zero3", writers={"screen", "file"})
    with experiment.start():
        yield track


def measured(tape: Ledger, rank: int) -> dict[str, int]:
    """
    ## The bytes of a recorded step, and those that stay after it
    """
    return {
        "rank": rank,
        "rest_bytes": held_bytes(tape.model, tape.optimizer),
        "peak_bytes": tape.peak_live_bytes,
        "sent_bytes": tape.sent_bytes,
        "between_bytes": tape.between_bytes,
        "messages": tape.messages,
        "order_bytes": tape.order_bytes,
        "read_bytes": tape.read_bytes,
        "written_bytes": tape.written_bytes,
        "disk_bytes": disk_bytes(tape.model, tape.optimizer),
        "out_bytes": tape.out_bytes,
        "in_bytes": tape.in_bytes,
    }


# ------------------------------------------------------------------------------------- checkpoints


def take_up(args: argparse.Namespace, ranks: Ranks) -> Path | None:
    """
    ## The checkpoint to resume from, if there is one

    All ranks call it. Raises `ValueError` on all of them if the newest checkpoint belongs to a run
    with other options, or cannot be read.
    """
    if args.resume not in ("auto", "no"):
        return Path(args.resume)
    # Rank 0 alone looks.
    found, problem = ranks.gather(
        (None, "") if ranks.rank or args.resume == "no" else look_for_checkpoint(args))[0]
    if problem:
        raise ValueError(problem)
    return found


def look_for_checkpoint(args: argparse.Namespace) -> tuple[Path | None, str]:
    """
    ## Find the newest checkpoint of this run; return it with a problem, or an empty text
    """
    folder = checkpoints(args)
    found = None
    try:
        if folder.exists():
            lock_folder(folder)
        clean_up_interrupted_saves(folder)
        found = newest(folder)
        if not found:
            return None, ""
        # A checkpoint may be older than an option, which has its default then.
        theirs = {"optimizer": "adamw",
                  **decode(CheckpointReader(found).manifest["extra"])["options"]}
        differ = [f"{option(name)} {theirs.get(name)} there and {getattr(args, name)} here"
                  for name in OPTIONS if theirs.get(name) != getattr(args, name)]
    except Exception as error:
        # Any error at all, because the other ranks wait for this one.
        return found, (
            f"cannot resume from {found or folder}. Expected: a checkpoint of this job. Got: "
            f"{error}. What to do: pass --resume with another one, `--resume no` to start over, or "
            "another --out.")
    if differ:
        return found, (
            f"{found} belongs to another run. Expected: the same options. Got: "
            f"{', '.join(differ)}. What to do: pass `--resume {found}` to resume from it anyway, "
            "`--resume no` to start over, or another --out.")
    return found, ""


def checkpoints(args: argparse.Namespace) -> Path:
    """
    ## The folder of the run's checkpoints
    """
    return Path(args.out) / "checkpoints"

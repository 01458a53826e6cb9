r"""
# Benchmark: beside DDP and FSDP2, in alternating rounds

Trains the same toy GPT in five ways and measures what each costs: time, memory, processor time and
bytes on the wire.

The peers are our `Zero3Sequential`, our `wrap` of the same model, `DistributedDataParallel`, which
holds everything whole, FSDP2's `fully_shard` on each layer, which shards as we do, and the chain of
`minimal.py`. They get the same weights, batches and AdamW. A machine that does other things too is
faster in one minute than in the next, so each round runs every peer once, in fresh processes, and
ratios are taken within a round. Bytes on the wire are the loopback's own count, also in units in
which the ring all-reduce of data parallelism is 2 and ZeRO-3 is 3:

$$\text{sent} \Big/ \Psi\frac{N-1}{N}$$

**Run this**: `make bench`; `make bench ARGS="--peers zero3-muon fsdp2-muon"` trains the hidden
matrices with Muon; `python -m tests.bench --step` compares a step of `Zero3Optimizer` with
one of FSDP2's optimizer, `python -m tests.bench --comm` compares `Communicator`'s messages with
gloo's collectives for the same bytes, `python -m tests.bench --disk DIR` our direct reads and
writes with those of fio, `python -m tests.bench --save DIR` a checkpoint with plain direct writes
of as many bytes. `python -m tests.bench --nodes` trains over a slow link between nodes; see
`bench/nodes.py`. `python -m tests.bench --pipeline` trains in stages; see `bench/pipeline.py`.
`python -m tests.bench --compile` compiles the step; see `bench/compile.py`.

**Not covered, and what that costs**: mixed precision, recomputation, more than one machine. FSDP2
gathers its last layer twice as we do not; that is about a hundredth of the model here. Ranks
that share a few cores gain nothing from transfers beside the computation, so a CPU shows what
sharding costs and not what overlap wins back. Memory is what the system counts, with activations
and with what the allocator keeps. It needs Linux, for `/proc`.
"""

import argparse
import ctypes
import fcntl
import functools
import gc
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import zero3
from docs.annotate import Source
from tests.bench import disk as disk_bench
from tests.ranks import run
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, commit_name, minimal, save
from zero3.checkpoint.reader import file_name
from zero3.comm.collectives import all_gather_single, reduce_scatter_single
from zero3.estimate.ledger import Ledger
from zero3.offload import disk
from zero3.optimizer.whole import Matrices
from zero3.train import launch

PEERS = ("zero3", "wrap", "ddp", "fsdp2", "minimal")
# Muon for the hidden matrices. FSDP2's are DTensors, of which torch's Muon asks whole products.
MUON_PEERS = ("zero3-muon", "fsdp2-muon", "ddp-muon")
NODE_PEERS = ("flat", "hybrid", "zero++", "fsdp2", "hsdp")
STAGE_PEERS = ("zero3", "zero3-each", "zero3-step", "plain", "ddp", "fsdp2", "fsdp2-each")
COMPILE_PEERS = ("zero3", "wrap", "wrap-units", "compile-eager", "compile-units", "compile",
                 "fsdp2", "fsdp2-compile", "ddp")
COMPILE_CASES = ("gpt", "small-layers")
# What of the package a step goes through.
TIMED = [f"zero3/{name}.py" for name in (
    "layer", "flat", "watch", "comm/collectives", "comm/order", "sharded", "offload/tiers",
    "estimate/ledger", "optimizer/buckets", "optimizer/stage3", "optimizer/states",
    "whole_model/units", "whole_model/wrap")]
# And with `--nodes`.
NODES_TIMED = ["zero3/comm/links.py", "zero3/comm/encodings.py"]
# And with `--pipeline`.
STAGES_TIMED = [f"zero3/pipeline/{name}.py" for name in (
    "schedules", "channels", "stages", "pipeline")]
# And with `--compile`.
COMPILED_TIMED = [f"zero3/compiler/{name}.py" for name in (
    "graph", "passes", "trace", "engines", "model")]
# What a run is measured by: its heading, its format, and what to divide by.
COLUMNS = {
    "tokens_per_s": ("tokens/s", ",.0f", 1),
    "step_ms": ("ms/step", ",.1f", 1),
    "first_s": ("first step s", ",.1f", 1),
    "peak_bytes": ("peak MiB", ",.1f", 2**20),
    "rest_bytes": ("rest MiB", ",.1f", 2**20),
    "cpu_s": ("CPU s/step", ",.3f", 1),
    "wire_bytes": ("wire MiB", ",.2f", 2**20),
    "wire_psi": ("in Psi", ".3f", 1),
    "link_bytes": ("link MiB", ",.2f", 2**20),
    "link_psi": ("in Psi", ".3f", 1),
    "loss": ("loss", ".5f", 1),
    "loss_off": ("loss off", ".1e", 1),
}
# Those of which a smaller or larger value is a matter of the peer, and not of the unit.
COMPARED = ("tokens_per_s", "step_ms", "peak_bytes", "rest_bytes", "cpu_s", "wire_bytes",
            "link_bytes")
REPEATS = 7


def options(argv=None):
    """
    ## The options
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench", description="Zero3Sequential beside DDP and FSDP2.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, gpus = parser.add_argument, torch.cuda.device_count()
    add("--dim", type=int, default=384, help="features of a position")
    add("--blocks", type=int, default=6, help="transformer blocks")
    add("--heads", type=int, default=6, help="attention heads of a block")
    add("--seq", type=int, default=256, help="bytes in a sequence")
    add("--batch", type=int, default=4, help="sequences of a rank in a step")
    add("--warmup", type=int, default=2, help="steps that are not measured")
    add("--steps", type=int, default=8, help="steps that are")
    add("--rounds", type=int, default=3, help="how often each peer runs")
    add("--ranks", type=int, default=gpus or 2, help="one per GPU, or processes on the CPU")
    add("--peers", nargs="+",
        choices=dict.fromkeys(PEERS + MUON_PEERS + NODE_PEERS + STAGE_PEERS + COMPILE_PEERS),
        default=PEERS, help="who takes part")
    add("--nodes", action="store_true", help="train on nodes with a slow link between them")
    add("--each", type=int, default=2, help="with --nodes: ranks of a node")
    add("--mbit", type=float, default=200, help="with --nodes: Mbit/s of the link")
    add("--pipeline", action="store_true", help="train in stages, beside torch's pipelining")
    add("--micro-batches", type=int, default=4, help="with --pipeline: parts of a batch")
    add("--shards", type=int, nargs="+", default=[1, 2],
        help="with --pipeline: ranks that share a stage")
    add("--schedules", nargs="+", choices=("1f1b", "gpipe", "interleaved"),
        default=["1f1b"], help="with --pipeline: orders of the passes")
    add("--compile", action="store_true", help="compile the step, beside fully_shard's")
    add("--cases", nargs="+", choices=COMPILE_CASES, default=COMPILE_CASES,
        help="with --compile: what to train")
    add("--layers", type=int, default=100, help="with --compile: how many small layers")
    add("--width", type=int, default=64, help="with --compile: features of a small layer")
    add("--step", action="store_true", help="measure the optimizers alone")
    add("--comm", action="store_true", help="measure the collectives alone")
    add("--mib", type=float, default=64, help="with --comm: the size of the whole buffer")
    add("--disk", type=Path, metavar="DIR", help="measure the disk of this folder alone")
    add("--save", type=Path, metavar="DIR", help="measure checkpoints in this folder alone")
    add("--gib", type=float, default=1, help="with --disk and --save: how much is written")
    add("--out", type=Path, default=argparse.SUPPRESS,
        help="results file (default: {bench,step,comm,disk,save,nodes,pipeline,compile}.json "
             "in runs)")
    add("--own-network", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_known_args(argv)[0].nodes:
        # A step over a slow link takes seconds, so there are few, and of few tokens.
        parser.set_defaults(ranks=4, batch=1, warmup=1, steps=3, peers=NODE_PEERS)
        gpus = 0
    if parser.parse_known_args(argv)[0].pipeline:
        parser.set_defaults(peers=STAGE_PEERS, rounds=5)
        gpus = 0
    if parser.parse_known_args(argv)[0].compile:
        # The first step compiles, and the second one may compile again.
        parser.set_defaults(peers=COMPILE_PEERS, warmup=4, rounds=5)
        gpus = 0
    args = parser.parse_args(argv)
    name = "comm.json" if args.comm else "step.json" if args.step else "bench.json"
    name = "disk.json" if args.disk else "save.json" if args.save else name
    name = "nodes.json" if args.nodes else "pipeline.json" if args.pipeline else name
    name = "compile.json" if args.compile else name
    args.out = getattr(args, "out", Path("runs", name))
    known = NODE_PEERS if args.nodes else STAGE_PEERS if args.pipeline else PEERS + MUON_PEERS
    known = COMPILE_PEERS if args.compile else known
    if strangers := set(args.peers) - set(known):
        parser.error(f"no such peer {'with' if args.nodes else 'without'} --nodes: {strangers}")
    if args.compile and not args.warmup:
        parser.error("expected a --warmup of at least 1, because the first step compiles")
    if args.nodes and (args.ranks % args.each or args.ranks <= args.each):
        parser.error("expected two nodes or more, of --each ranks")
    if args.pipeline and args.batch % args.micro_batches:
        parser.error("expected a --batch that --micro-batches divide")
    args.gpu, alone = gpus > 0, args.comm or args.step or args.save
    if not 1 + args.comm <= args.ranks <= (gpus or args.ranks) or (alone and gpus):
        parser.error("expected one rank per GPU or fewer; for --comm two or more; for --comm, "
                     "--step and --save no GPU")
    return args


# ------------------------------------------------------------------------------------------- model


class Embed(nn.Module):
    def __init__(self, dim, seq):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, dim), nn.Embedding(seq, dim)

    def forward(self, x):  # [batch, seq] int64
        return self.tokens(x) + self.places.weight[: x.shape[1]]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.norm, self.norm_ff = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):  # [batch, seq, dim]
        qkv = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)  # [batch, heads, seq, dim/heads]
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.ff(self.norm_ff(x))


def gpt(dim, blocks, heads, seq):
    """
    ## The layers of the toy GPT, with the same weights wherever they are made
    """
    torch.manual_seed(0)
    head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 256))
    return [Embed(dim, seq), *(Block(dim, heads) for _ in range(blocks)), head]


def wrap(peer, layers, device, mesh=None):
    """
    ## A peer's model and its optimizer

    * `mesh` is for "zero3", which also takes `Links`, and "fsdp2"
    """
    layers, whole = [layer.to(device) for layer in layers], nn.Sequential(*layers)
    peer, _, rule = peer.partition("-")
    # "fsdp2-compile" has another rule.
    matrices = rule == "muon" and Matrices(whole, lr=1e-3, adjust_lr_fn="match_rms_adamw")
    if peer == "zero3":
        model = Zero3Sequential([Zero3Layer(layer, mesh=mesh) for layer in layers])
    elif peer == "wrap":
        model = zero3.wrap(whole, (Embed, Block))
    elif peer == "ddp":
        model = nn.parallel.DistributedDataParallel(whole, gradient_as_bucket_view=True)
    elif peer == "minimal":
        model = minimal.Chain([minimal.Zero3Layer(layer) for layer in layers])
    else:
        from torch.distributed.fsdp import fully_shard

        # The head's logits are a view; nothing here writes into them.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
        for module in (*layers, whole):
            model = fully_shard(module, mesh=mesh, reshard_after_forward=True)
    # With the usual eps of 1e-8 Adam hardly sees how long a gradient is, and a sum in place of a
    # mean would give nearly the same losses.
    if peer in ("zero3", "wrap"):
        return model, Zero3Optimizer(model, lr=1e-3, eps=1e-3, group_by=matrices or None)
    if matrices:
        return model, Both(whole, matrices)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, fused=True)


class Both:
    """
    ## torch's Muon for hidden matrices, and its AdamW for the rest
    """

    def __init__(self, model, matrices):
        options = {p: matrices(name, p) for name, p in model.named_parameters()}
        hidden = [p for p, of_muon in options.items() if of_muon]
        muon = {key: value for key, value in options[hidden[0]].items() if key != "optimizer"}
        rest = [p for p, of_muon in options.items() if not of_muon]
        self.all = [torch.optim.Muon(hidden, **muon),
                    torch.optim.AdamW(rest, lr=1e-3, eps=1e-3, fused=True)]

    def step(self):
        for each in self.all:
            each.step()

    def zero_grad(self):
        for each in self.all:
            each.zero_grad()


def batches(args, device, place=None):
    """
    ## This rank's rows of the global batches, without end

    * `place` says which rows; left out, those of the rank's number
    """
    place = dist.get_rank() if place is None else place
    text = torch.frombuffer(bytearray("".join(topics.values()), "utf-8"), dtype=torch.uint8)
    rows = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(text) - args.seq, (args.ranks, args.batch), generator=rows)
        places = starts[place][:, None] + torch.arange(args.seq + 1)
        yield text[places].long().to(device)  # [batch, seq + 1] int64


def loss_of(model, windows):
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def train_step(model, optimizer, windows):
    loss = loss_of(model, windows)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()  # and a GPU has then done all of the above


# ----------------------------------------------------------------------------------------- meters


class Memory:
    """
    ## Bytes that this rank holds, above those at the start

    On the CPU the anonymous resident memory, looked at every 10 ms by a thread; on a GPU what the
    caching allocator has handed out.
    """

    def __init__(self, device):
        self.gpu = torch.cuda if device.type == "cuda" else None
        self.start_bytes = self.peak_bytes = 0
        self.start_bytes = self.rest()

    def now(self):
        status = "" if self.gpu else Path("/proc/self/status").read_text().split("RssAnon:")[1]
        held = int(status.split()[0]) * 1024 if status else self.gpu.memory_allocated()
        return held - self.start_bytes

    def rest(self):
        gc.collect()
        # What was freed goes back to the system; glibc would keep some of it.
        ctypes.CDLL(None).malloc_trim(0)
        return self.now()

    def watch(self):
        while not self.done.wait(0.01):
            self.peak_bytes = max(self.peak_bytes, self.now())

    def __enter__(self):
        self.rest()
        self.done, self.thread = threading.Event(), threading.Thread(target=self.watch)
        self.gpu.reset_peak_memory_stats() if self.gpu else self.thread.start()

    def __exit__(self, *exception):
        self.done.set()
        if self.gpu:
            self.peak_bytes = self.gpu.max_memory_allocated() - self.start_bytes
        else:
            self.thread.join()


def loopback_bytes():
    """
    ## Bytes that all ranks have sent so far, headers included

    All ranks call it: between the two barriers nobody sends anything.
    """
    dist.barrier()
    counters = Path("/proc/net/dev").read_text().partition(" lo:")[2].split()
    dist.barrier()
    return int(counters[8])


def own_network(args):
    """
    ## Begin again in a network of our own, where that is permitted

    There the loopback carries nothing but our ranks' messages, and its count is exact.
    """
    if args.own_network:
        with socket.socket() as control:
            # SIOCSIFFLAGS: a new network's loopback is down. IFF_UP is 1.
            fcntl.ioctl(control, 0x8914, struct.pack("16sh14x", b"lo", 1))
        return
    for command in ("unshare --net", "unshare --net --map-root-user"):
        attempt = f"{command} '{sys.executable}' -c ''"
        if not args.gpu and subprocess.getstatusoutput(attempt)[0] == 0:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            again = [sys.executable, "-m", "tests.bench", *sys.argv[1:], "--own-network"]
            os.execvp("unshare", [*command.split(), *again])


# ------------------------------------------------------------------------------------------ rounds


def measure(peer, args, store):
    """
    ## What one rank of one peer measures
    """
    device = torch.device("cuda", dist.get_rank()) if args.gpu else torch.device("cpu")
    if args.gpu:
        rank = dist.get_rank()
        dist.destroy_process_group()
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", f"file://{store}", rank=rank, world_size=args.ranks)
    return measure_training(partial(wrap, peer), args, device, loopback_bytes)


def measure_training(build, args, device, count, train_step=train_step, place=None):
    """
    ## What one rank measures while it trains a model

    * `build(layers, device)` returns the model and its optimizer
    * `count()` returns the bytes that have been sent so far
    * `place` is as for `batches`
    """
    windows = batches(args, device, place)
    # Thrown away: what a first step imports and opens is not the model's memory.
    train_step(*build(gpt(8 * args.heads, 2, args.heads, args.seq), device), next(windows))
    memory = Memory(device)
    layers = gpt(args.dim, args.blocks, args.heads, args.seq)
    psi_bytes = sum(p.nbytes for layer in layers for p in layer.parameters())
    model, optimizer = build(layers, device)
    losses, warmup_s, step_s = [], [], []
    for _ in range(args.warmup):
        start_s = time.perf_counter()
        losses.append(train_step(model, optimizer, next(windows)))
        warmup_s.append(time.perf_counter() - start_s)
    sent_bytes = count()
    with memory:
        cpu_s = time.process_time()
        for _ in range(args.steps):
            start_s = time.perf_counter()
            losses.append(train_step(model, optimizer, next(windows)))
            step_s.append(time.perf_counter() - start_s)
        cpu_s = time.process_time() - cpu_s
    found = {"step_s": step_s, "losses": losses, "psi_bytes": psi_bytes, "cpu_s": cpu_s,
             "counted_bytes": count() - sent_bytes, "warmup_s": warmup_s,
             "peak_bytes": memory.peak_bytes, "rest_bytes": memory.rest()}
    if isinstance(optimizer, Zero3Optimizer):
        # To listen takes time, so the ledger gets a step of its own.
        with Ledger(model, optimizer) as tape:
            train_step(model, optimizer, next(windows))
        found["ledger_bytes"] = tape.sent_bytes + tape.order_bytes
        found["ledger_between_bytes"] = tape.between_bytes
    return found


def summarize(ranks, args):
    """
    ## One run in one row: the slowest and the fullest rank
    """
    step_s, tokens = max(median(r["step_s"]) for r in ranks), args.ranks * args.batch * args.seq
    losses = zip(*(r["losses"] for r in ranks), strict=True)
    row = {
        "tokens_per_s": tokens / step_s,
        "peak_bytes": max(r["peak_bytes"] for r in ranks),
        "rest_bytes": max(r["rest_bytes"] for r in ranks),
        "cpu_s": sum(r["cpu_s"] for r in ranks) / args.steps,
        "losses": [mean(step) for step in losses],
    }
    row["loss"] = row["losses"][-1]
    return {**row, "ranks": ranks}


def run_here(peer, args):
    """
    ## One run of a peer on this machine, in one row
    """
    with tempfile.TemporaryDirectory() as folder:
        # Not by the ranks of the tests, which look at every message.
        ranks = run(measure, args.ranks, peer, args, f"{folder}/store", fresh=True, timeout_s=1800)
    row = summarize(ranks, args)
    if not args.gpu and args.ranks > 1:
        row["wire_bytes"] = ranks[0]["counted_bytes"] / args.ranks / args.steps
        row["wire_psi"] = row["wire_bytes"] / ranks[0]["psi_bytes"] * args.ranks / (args.ranks - 1)
    return row


def play(args, run_peer=run_here, reference="ddp"):
    """
    ## The rounds

    Each begins with another peer, so that none always runs after the same one. Losses are compared
    with those of the reference.
    """
    rounds = []
    for i in range(args.rounds):
        rounds.append(done := {})
        for k in range(len(args.peers)):
            peer = args.peers[(i + k) % len(args.peers)]
            done[peer] = run_peer(peer, args)
            print(f"round {i + 1} of {args.rounds}   {peer}", flush=True)
        for row in done.values() if reference in done else ():
            pairs = zip(row["losses"], done[reference]["losses"], strict=True)
            row["loss_off"] = max(abs(a - b) for a, b in pairs)
    return rounds


def compare(rounds, peers, pairs):
    """
    ## Medians over the rounds, and ratios of the peers of each pair within a round
    """
    ratios, medians = {}, {}
    for peer in peers:
        known = [c for c in COLUMNS if c in rounds[0][peer]]
        medians[peer] = {c: median(r[peer][c] for r in rounds) for c in known}
    for ours, other in pairs:
        for c in COMPARED if {ours, other} <= {*peers} else ():
            # A run of a few milliseconds ends before its memory is looked at.
            if medians[other].get(c, 0) > 0:
                each = [r[ours][c] / r[other][c] for r in rounds if r[other][c] > 0]
                ratios.setdefault(f"{ours}/{other}", {})[c] = median(each), min(each), max(each)
    return {"medians": medians, "ratios": ratios}


def table(medians, ratios):
    columns = [c for c in COLUMNS if any(c in row for row in medians.values())]
    wide = max(13, *(len(name) + 1 for name in (*medians, *ratios)))
    lines = [f"{'median':{wide}s}" + "".join(f"{COLUMNS[c][0]:>18}" for c in columns)]
    for peer, row in medians.items():
        cells = (format(row[c] / COLUMNS[c][2], COLUMNS[c][1]) if c in row else "" for c in columns)
        lines.append(f"{peer:{wide}s}" + "".join(f"{cell:>18}" for cell in cells))
    for name, row in ratios.items():
        # Median, and in brackets the lowest and the highest.
        cells = ("{:.2f} ({:.2f}-{:.2f})".format(*row[c]) if c in row else "" for c in columns)
        lines.append(f"{name:{wide}s}" + "".join(f"{cell:>18}" for cell in cells))
    return "\n".join(line.rstrip() for line in lines)


# ------------------------------------------------------------------------------------- collectives


def measure_comm(args):
    """
    ## gloo's collectives and `Communicator`'s messages, one after the other, again and again

    Returns of each its milliseconds and the bytes that all ranks sent, per repetition.
    """
    layer, n = Zero3Layer(nn.Linear(1, 1)), args.ranks
    shard = torch.full((int(args.mib * 2**18) // n,), 1.0 + dist.get_rank())
    full, grad, received = shard.repeat(n), shard.repeat(n), shard.repeat(n)
    mine = shard.clone()
    ways = {
        "all-gather, gloo": lambda: all_gather_single(full, shard),
        "all-gather, Communicator": lambda: layer.comm.all_gather(layer, [(full, shard)]).wait(),
        "reduce-scatter, gloo": lambda: reduce_scatter_single(mine, grad),
        "reduce-scatter, Communicator": lambda: layer.comm.reduce_scatter(
            [layer], [(grad, received)]).wait(),
    }
    found = {name: [] for name in ways}  # of (milliseconds, bytes)
    for repeat in range(REPEATS + 1):
        for name, way in ways.items():
            before, start_s = loopback_bytes(), time.perf_counter()
            way()
            took_ms = (time.perf_counter() - start_s) * 1e3
            sent = loopback_bytes() - before
            if repeat:  # the first connects, and touches the memory
                found[name].append((took_ms, sent))
    return found


def compare_comm(ranks, args):
    """
    ## Medians of the slowest rank, and what a rank sends

    In place of the parameters, the unit is made of the whole buffer.
    """
    rows = {}
    print(f"\n{args.mib:g} MiB on {args.ranks} ranks, median of {REPEATS}\n"
          f"{'':22s}{'ms':>12}{'MiB sent':>12}{'in Psi':>12}")
    for name in ranks[0]:
        sent_mib = median(sent for _, sent in ranks[0][name]) / args.ranks / 2**20
        repeats = zip(*(r[name] for r in ranks), strict=True)
        slowest = [max(ms for ms, _ in repeat) for repeat in repeats]
        rows[name] = {"ms": median(slowest), "wire_mib": sent_mib,
                      "wire_psi": sent_mib / args.mib * args.ranks / (args.ranks - 1)}
        print(f"{name:22s}" + "".join(f"{value:12.3f}" for value in rows[name].values()))
    return rows


# ------------------------------------------------------------------------------------------ steps


def measure_step(args):
    """
    ## Our step and FSDP2's, one after the other, again and again

    Returns the milliseconds of each. All have a model of the same size with gradients. Ours always
    takes the norm of the gradient, over all ranks; FSDP2's only where it clips.
    """
    device, steps = torch.device("cpu"), {}
    windows = next(batches(args, device))
    for name, peer, options, clip in (
        ("Zero3Optimizer", "zero3", {}, None),
        ("FSDP2, foreach", "fsdp2", {"foreach": True}, None),
        ("FSDP2, fused", "fsdp2", {"fused": True}, None),
        ("Zero3Optimizer, clips", "zero3", {"clip_grad_norm": 1e-3}, 1e-3),
        ("FSDP2, foreach, clips", "fsdp2", {"foreach": True}, 1e-3),
    ):
        model, _ = wrap(peer, gpt(args.dim, args.blocks, args.heads, args.seq), device)
        loss_of(model, windows).backward()
        if peer == "zero3":
            steps[name] = Zero3Optimizer(model, **options).step
            continue
        adam = torch.optim.AdamW(model.parameters(), **options)
        steps[name] = partial(fsdp2_step, model, adam, clip)
    found = {name: [] for name in steps}
    for repeat in range(4 * REPEATS + 1):
        for name, step in steps.items():
            dist.barrier()
            start_s = time.perf_counter()
            step()
            if repeat:  # in the first the moments are born
                found[name].append((time.perf_counter() - start_s) * 1e3)
    return found


def fsdp2_step(model, adam, clip):
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    adam.step()


def compare_step(ranks):
    """
    ## Medians of the slower rank, and ratios to ours within a repetition
    """
    slowest = {name: [max(each) for each in zip(*(r[name] for r in ranks), strict=True)]
               for name in ranks[0]}
    rows = {}
    for name, took in slowest.items():
        ours = slowest["Zero3Optimizer, clips" if "clips" in name else "Zero3Optimizer"]
        rows[name] = {"ms": median(took),
                      "times_ours": median(a / b for a, b in zip(took, ours, strict=True))}
    print(f"\nmedian of {4 * REPEATS} steps\n{'':24s}{'ms':>10}{'times ours':>14}")
    for name, row in rows.items():
        print(f"{name:24s}{row['ms']:10.1f}{row['times_ours']:14.2f}")
    return rows


# -------------------------------------------------------------------------------------------- main


def machine(args):
    """
    ## Where the figures come from
    """
    cpu = Path("/proc/cpuinfo").read_text().partition("model name")[2].partition("\n")[0]
    return {
        "cpu": cpu.strip("\t :") or os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if args.gpu else None,
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "commit": commit_name(),
    }


def digests(timed):
    """
    ## The digests of the files that are timed

    Who shows the figures can see whether they are still of this code.
    """
    return {path: digest(path) for path in timed}


@functools.cache
def digest(path):
    return Source(Path(__file__).parents[2] / path).digest()


def write(args, results):
    """
    ## Write the figures as JSON
    """
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1, default=str) + "\n")


# ------------------------------------------------------------------------------------------- disk


def measure_disk(args):
    """
    ## What we and fio write and read, in GB/s (1e9 bytes), round by round

    Both write a file twice, of which the second time counts, force it out and read it; 4 MiB at a
    time, past the page cache, with four requests at once. By turns, now the one first and now the
    other.
    """
    nbytes = int(args.gib * 256) << 22
    peers = {"zero3": lambda: ours(args.disk, nbytes), "fio": lambda: fio(args.disk, nbytes)}
    rounds = []
    for i in range(args.rounds):
        order = list(peers)[:: 1 if i % 2 == 0 else -1]
        rounds.append({peer: peers[peer]() for peer in order})
    return rounds


def ours(folder, nbytes):
    speed = disk_bench.measure(folder, nbytes, True, 4 << 20, 4)
    return {"write": speed.write_gb_s, "read": speed.read_gb_s}


def fio(folder, nbytes):
    """
    ## The same by fio, with the system's asynchronous calls
    """
    path = folder / f"fio-{os.getpid()}"
    speeds = {}
    try:
        for way in ("write", "write", "read"):
            command = ["fio", "--name=zero3", f"--filename={path}", f"--rw={way}", "--bs=4m",
                       "--direct=1", "--ioengine=libaio", "--iodepth=4", f"--size={nbytes}",
                       "--end_fsync=1", "--output-format=json"]
            told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            (job,) = json.loads(told[told.index("{") :])["jobs"]
            # Milliseconds.
            speeds[way] = job[way]["io_bytes"] / job[way]["runtime"] / 1e6
    finally:
        path.unlink(missing_ok=True)
    return speeds


def compare_disk(rounds):
    """
    ## Medians, and ratios taken within a round
    """
    medians = {}
    for way in ("write", "read"):
        mine, theirs = ([each[peer][way] for each in rounds] for peer in ("zero3", "fio"))
        if None in mine:
            raise SystemExit("The page cache had a part in it: choose a folder on a disk.")
        ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
        medians[way] = {"zero3": median(mine), "fio": median(theirs), "ratio": median(ratios),
                        "least": min(ratios), "most": max(ratios)}
        print(f"{way:6} zero3 {median(mine):.2f} GB/s, fio {median(theirs):.2f} GB/s, within a "
              f"round {median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) of fio")
    return {"rounds": rounds, "medians": medians}


# ------------------------------------------------------------------------------------ checkpoints


def measure_save(args):
    """
    ## Seconds to save, and to write as many bytes plainly, round by round

    All ranks at once, into new files, until they are forced out; by turns, now the one first and
    now the other. The plain writes are of 8 MiB, past the page cache, four at a time, and from
    memory that is there already: no copies, no checksums.
    """
    width, folder, rank = 2048, args.save, dist.get_rank()
    # 12 bytes of masters and moments for each parameter.
    layers = [nn.Linear(width, width) for _ in range(max(1, int(args.gib * 2**30 / 12 / width**2)))]
    model = Zero3Sequential([Zero3Layer(layer) for layer in layers])
    optimizer = Zero3Optimizer(model, lr=1e-4)
    optimizer.backward(model(torch.ones(1, width)).mean())
    optimizer.step()
    optimizer.zero_grad()
    memory = disk.aligned(4 * (8 << 20))
    memory.random_(0, 256)

    def zero3_save():
        path = save(folder, model, optimizer, step=0).wait()
        return (path / file_name(rank, args.ranks)).stat().st_size

    def plain():
        file = disk.File(folder, disk.whole_blocks(nbytes), True, f"plain-{rank}")
        with ThreadPoolExecutor(4) as workers:
            blocks = memory.split(8 << 20)
            for move in [workers.submit(file.move, True, blocks[i % 4][: file.nbytes - at], at)
                         for i, at in enumerate(range(0, file.nbytes, 8 << 20))]:
                move.result()
        os.fsync(file.fd)
        file.handle.close()

    def clear():
        dist.barrier()
        if not rank:
            for path in folder.glob("*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        dist.barrier()

    # The first save is not counted.
    nbytes, rounds = zero3_save(), []
    for i in range(args.rounds):
        took = {}
        for what in (zero3_save, plain)[:: 1 if i % 2 == 0 else -1]:
            clear()
            start_s = time.perf_counter()
            what()
            dist.barrier()
            took[what.__name__] = time.perf_counter() - start_s
        rounds.append({"save_s": took["zero3_save"], "plain_s": took["plain"]})
    clear()
    return rounds, nbytes


def compare_save(ranks, args):
    """
    ## Medians, and the ratio taken within a round
    """
    rounds, nbytes = ranks[0]
    ratios = [each["save_s"] / each["plain_s"] for each in rounds]
    medians = {name: median([each[name] for each in rounds]) for name in rounds[0]}
    medians |= {"ratio": median(ratios), "least": min(ratios), "most": max(ratios)}
    print(f"{nbytes / 1e6:,.0f} MB from each of {args.ranks} ranks: a checkpoint "
          f"{medians['save_s']:.2f} s, plain direct writes {medians['plain_s']:.2f} s, within a "
          f"round {medians['ratio']:.2f} ({min(ratios):.2f}-{max(ratios):.2f}) times as long")
    return {"rounds": rounds, "medians": medians}


def main():
    """
    ## The command line
    """
    args = options()
    if not args.nodes:
        own_network(args)
    # New ranks measure each peer, so let them share what they import.
    launch.preload("tests.bench.training", "torch.distributed.fsdp",
                   "torch.distributed.pipelining", "zero3.whole_model.wrap",
                   "zero3.pipeline.pipeline")
    benchmark(args)


def benchmark(args):
    """
    ## Measure, and write the results
    """
    facts = machine(args)
    print(f"{facts['gpu'] or facts['cpu']}, {facts['cores']} cores, load {facts['load'][0]:.1f}, "
          f"torch {facts['torch']}, {args.ranks} ranks")
    code = digests([*TIMED, *(NODES_TIMED if args.nodes else ()),
                    *(STAGES_TIMED if args.pipeline else ()),
                    *(COMPILED_TIMED if args.compile else ())])
    results = {"machine": facts, "settings": vars(args), "wire_is_exact": args.own_network,
               "code": code}
    if args.comm:
        ranks = run(measure_comm, args.ranks, args, fresh=True, timeout_s=600)
        results |= {"ranks": ranks, "medians": compare_comm(ranks, args)}
    elif args.step:
        ranks = run(measure_step, args.ranks, args, fresh=True, timeout_s=600)
        results |= {"ranks": ranks, "medians": compare_step(ranks)}
    elif args.disk:
        results |= compare_disk(measure_disk(args))
    elif args.save:
        with tempfile.TemporaryDirectory(dir=args.save) as folder:
            args.save = Path(folder)
            results |= compare_save(
                run(measure_save, args.ranks, args, fresh=True, timeout_s=600), args)
    elif args.nodes:
        # Not at the top, because that file uses this one.
        from tests.bench import nodes

        results |= nodes.compare_nodes(args)
    elif args.pipeline:
        from tests.bench import pipeline

        results |= pipeline.compare_pipelines(args)
    elif args.compile:
        from tests.bench import compile

        results |= compile.compare_compiled(args)
    else:
        of_muon = not {*args.peers} - {*MUON_PEERS}
        ours, reference = ("zero3-muon", "ddp-muon") if of_muon else ("zero3", "ddp")
        rounds = play(args, reference=reference)
        pairs = [(ours, other) for other in sorted({*args.peers} - {ours})]
        results |= {"rounds": rounds, **compare(rounds, args.peers, pairs)}
        print("\n" + table(results["medians"], results["ratios"]))
        if "zero3" in args.peers:
            count = rounds[0]["zero3"]["ranks"][0]["ledger_bytes"]
            print(f"\nzero3's ledger counts {count / 2**20:,.2f} MiB sent by a rank in a step.")
    if not (args.gpu or args.own_network or args.nodes):
        print("No network of our own: bytes on the wire include other programs' local traffic.")
    write(args, results)
    print(f"Wrote {args.out}")


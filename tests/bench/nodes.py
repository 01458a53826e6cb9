r"""
# Benchmark of nodes: training over a slow link

Trains the benchmark's model on nodes with a slow link between them, sharded in several ways, and
measures speed, memory, and the bytes that cross the link.

Inside a node ranks exchange gigabytes in a second, between nodes 25 MB. So the bytes between nodes
decide how long a step takes, and each way of sharding sends others:

| peer | sharded over | between nodes | which is |
|---|---|---|---|
| flat | all ranks | $\frac32 \Psi$ | its quarter, three times, to each of two ranks |
| hybrid | the ranks of a node | $\frac12 \Psi$ | the gradients of its half |
| zero++ | all ranks | $\frac1{10} \Psi$ | its quarter once in 8 bits, and once in 4 bits |
| fsdp2 | all ranks, by `fully_shard` | $\frac32 \Psi$ | gloo's collectives, around a ring |
| hsdp | the ranks of a node, by `fully_shard` | $\frac12 \Psi$ | the gradients of its half |

The third column is of one rank and one step, on two nodes of two ranks. $\Psi$ are the bytes of the
parameters. The $L$ ranks of a node share a link of $B$ bytes per second, so a step takes at least

$$L \cdot \text{bytes of a rank} \,/\, B$$

seconds. With 44 MB of parameters and 200 Mbit/s that is 5.2 s for flat, 1.7 s for hybrid and 0.3 s
for zero++. This one is ZeRO++: the gradients go in 4 bits, the weights in 8 and only in forward,
because a copy of them stays inside the node until backward.

The rounds and the ratios are as in `training.py`. Bytes are the kernel's count on the link, without
headers; `nodes.py` builds the nodes.

**Run this**: `make bench ARGS=--nodes`; `make bench ARGS="--nodes --each 1 --ranks 2"` has one rank
on each node, `--mbit 1000` a faster link.

**Not covered, and what that costs**: all ranks share the cores of one machine, so the computation
takes longer than on separate machines, and hides more of the communication. The link has no
latency to speak of.
"""

from functools import partial

import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.bench.training import compare, measure_training, play, summarize, table, wrap
from tests.nodes import between_nodes, nodes, why_not
from zero3.comm.encodings import Int4, Int8
from zero3.comm.links import Links

# Each peer's form in `training.py`, and the first name of its mesh if it has one.
PEERS = {
    "flat": ("zero3", None),
    "hybrid": ("zero3", "replicate"),
    "zero++": ("zero3", "nodes"),
    "fsdp2": ("fsdp2", None),
    "hsdp": ("fsdp2", "replicate"),
}
# Ours to the same layout of FSDP2, and each of ours to the flat one.
PAIRS = (("flat", "fsdp2"), ("hybrid", "hsdp"), ("hybrid", "flat"), ("zero++", "flat"),
         ("zero++", "hybrid"))


def compare_nodes(args):
    """
    ## The rounds, and a table of medians and ratios

    Ends the program if this machine cannot have nodes.
    """
    if why_not():
        raise SystemExit(why_not())
    with nodes(args.ranks // args.each, args.each, args.mbit) as testbed:
        rounds = play(args, partial(run_on, testbed), reference="flat")
    found = compare(rounds, args.peers, PAIRS)
    print(f"\n{args.ranks // args.each} nodes of {args.each} ranks, {args.mbit:g} Mbit/s\n")
    print(table(found["medians"], found["ratios"]))
    return {"rounds": rounds, **found}


def run_on(testbed, peer, args):
    """
    ## One run of a peer on the nodes, in one row
    """
    ranks = testbed.run(measure_on_node, peer, args, timeout_s=1800)
    row = summarize(ranks, args)
    # The ranks of a node have read the same count.
    counts = [rank["counted_bytes"] for rank in ranks[:: args.each]]
    row["link_bytes"] = sum(counts) / args.ranks / args.steps
    row["link_psi"] = row["link_bytes"] / ranks[0]["psi_bytes"]
    return row


def measure_on_node(peer, args):
    """
    ## What one rank of one peer measures
    """
    form, first = PEERS[peer]
    mesh = None
    if first is not None:
        shape = (args.ranks // args.each, args.each)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=(first, "shard"))
    if peer == "zero++":
        mesh = Links(mesh, weights=Int8(), gradients=Int4(), secondary=True)
    return measure_training(partial(wrap, form, mesh=mesh), args, torch.device("cpu"), sent_bytes)


def sent_bytes():
    """
    ## Bytes that this node has sent to the others so far, without headers
    """
    return between_nodes().payload_bytes

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # The collectives, each alone
#
# **Question**: what does a rank have to send, so that all ranks train the same model?
#
# A *collective* is an operation that all ranks call together, each with a vector of its own. ZeRO-3
# is made of two of them, plain data parallelism of one. Here each runs alone, and its bytes are
# counted where they leave the process: at the sockets.
#
# Let the vector have $\Psi$ elements, and cut it into $N$ rows, one for each rank.
#
# **Your prediction**: which sends most, and by which factor? All-gather, reduce-scatter and
# all-reduce of a vector on many ranks: order them. Then: a step of ZeRO-3 gathers the parameters
# twice and reduces the gradients once. How much more is that than data parallelism, which reduces
# once and gathers nothing?
#
# This notebook belongs to [`comm.py`](../zero3/comm.py#the-wire), through which everything goes
# that ranks send each other.

# %%
# %matplotlib inline
from matplotlib.figure import Figure

from zero3.train.launch import default_ranks, preload, run

preload("zero3.layer")
N = default_ranks()
print(f"{N} ranks")

# %% [markdown]
# This is the code that runs on each rank. `collective` calls one of them. `sent_bytes` asks the
# kernel how many bytes each of the process's TCP connections has sent, which is something that no
# formula of ours has a part in; Linux answers, and for gloo, which talks over TCP.

# %% tags=["varies"]
# %%writefile worker_02.py
import os
import socket
import struct
import sys

import torch
import torch.distributed as dist
from torch import nn

from zero3 import Zero3Layer
from zero3.measure.ledger import Ledger
from zero3.train.launch import my_device


def collective(name, mine):
    """Call one, with this rank's `(psi,)`; returns what the rank then has."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, out = list(mine.chunk(ranks)), torch.empty_like(mine)
    if name == "broadcast":
        out.copy_(mine)
        dist.broadcast(out, src=0)
    elif name == "all-gather":
        dist.all_gather(list(out.chunk(ranks)), rows[rank])
    elif name == "reduce-scatter":
        out = torch.empty_like(rows[rank])
        dist.reduce_scatter(out, rows)
    elif name == "all-reduce":
        out.copy_(mine)
        dist.all_reduce(out)
    elif name == "all-to-all":
        dist.all_to_all_single(out, mine)
    elif name == "both":
        part = collective("reduce-scatter", mine)
        dist.all_gather(list(out.chunk(ranks)), part)
    elif name == "mine":
        out = my_reduce_scatter(mine)
    return out


def my_reduce_scatter(mine):
    """The exercise: as it stands, it sends too much."""
    return collective("reduce-scatter", mine)


def small(name):
    """On numbers that say where they come from: 10 r + row."""
    ranks = dist.get_world_size()
    mine = 10 * dist.get_rank() + torch.arange(ranks, device=my_device())
    return mine.tolist(), collective(name, mine).tolist()


def sent_bytes():
    """Bytes that this process's TCP connections have sent, or None where nobody counts."""
    if dist.get_backend() != "gloo" or sys.platform != "linux":
        return None
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            end = socket.socket(fileno=os.dup(int(fd)))
        except OSError:
            continue  # not a socket
        with end:
            if end.family in (socket.AF_INET, socket.AF_INET6) and end.type == socket.SOCK_STREAM:
                # `tcpi_bytes_sent` and `tcpi_bytes_retrans` of the kernel's `struct tcp_info`.
                told = end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 216)
                if len(told) < 216:
                    return None
                sent, again = struct.unpack_from("=QQ", told, 200)
                total += sent - again
    return total


def counted(psi, action):
    """What this rank sends while `action` runs, in units of `psi` elements; and its answer."""
    dist.barrier()
    before = sent_bytes()
    answer = action()
    # After a barrier all that was sent before it has arrived.
    dist.barrier()
    return None if before is None else (sent_bytes() - before) / (4 * psi), answer


def measure(name, psi):
    mine = torch.ones(psi, device=my_device())
    return counted(psi, lambda: collective(name, mine))[0]


def layer_step(side):
    """Forward and backward of one sharded layer: sockets, and what the `Ledger` says."""
    layer = Zero3Layer(nn.Linear(side, side, bias=False, device=my_device()))
    x = torch.randn(4, side, device=my_device())

    def step():
        with Ledger(layer) as tape:
            layer(x).square().mean().backward()
        return tape

    sent, tape = counted(side**2, step)
    events = [(e.event, e.sent_bytes) for e in tape.events if e.sent_bytes]
    return sent, events, tape.sent_bytes, tape.order_bytes


# %% [markdown]
# ## What each does
#
# Element $i$ of rank $r$ is $10r + i$, so that each number says where it comes from. Cover the
# output, and write down for each what rank 1 will have.

# %%
NAMES = ["broadcast", "all-gather", "reduce-scatter", "all-reduce", "all-to-all"]
start = [[10 * r + i for i in range(N)] for r in range(N)]
sums = [sum(column) for column in zip(*start, strict=True)]
expected = {
    "broadcast": [start[0]] * N,
    "all-gather": [[start[r][r] for r in range(N)]] * N,
    "reduce-scatter": [[total] for total in sums],
    "all-reduce": [sums] * N,
    "all-to-all": [list(column) for column in zip(*start, strict=True)],
}
for name in NAMES:
    answers = run("worker_02:small", N, name)
    for rank, (before, after) in enumerate(answers):
        print(f"{'' if rank else name:16} rank {rank}: {before!s:{4 * N}} -> {after}")
        assert after == expected[name][rank]

# %% [markdown]
# | collective | rank $r$ has before | and after |
# |---|---|---|
# | broadcast | a vector | rank 0's vector |
# | all-gather | row $r$ | all rows |
# | reduce-scatter | a vector | row $r$ of the sum of all vectors |
# | all-reduce | a vector | the sum of all vectors |
# | all-to-all | a vector | row $r$ of all vectors |
#
# All-gather and reduce-scatter undo each other's cut. One after the other, they are an all-reduce:

# %%
for rank, (_, after) in enumerate(run("worker_02:small", N, "both")):
    print(f"reduce-scatter, then all-gather: rank {rank} has {after}")
    assert after == expected["all-reduce"][rank]

# %% [markdown]
# ## What each has to send
#
# In a reduce-scatter, $N-1$ ranks have a part of the sum that one rank shall have, and each of them
# has to send a row, or add to one that it passes on. That is so for each of the $N$ rows: $N(N-1)$
# rows of $\Psi/N$ elements, $\Psi\frac{N-1}{N}$ per rank. In an all-gather each rank wants $N-1$
# rows, which is as many. So an all-reduce, being both, sends
#
# $$\underbrace{\Psi\,\frac{N-1}{N}}_{\text{reduce-scatter}} +
# \underbrace{\Psi\,\frac{N-1}{N}}_{\text{all-gather}} = 2\Psi\,\frac{N-1}{N}$$
#
# A *ring* needs no more than this. Each rank only ever talks to its right-hand neighbour, and sends
# one row in each of $2(N-1)$ rounds. Here it is without ranks and without numbers: a cell is a row
# on a rank, and holds the set of ranks whose parts have been added.


# %%
def ring(n):
    """A ring all-reduce: what is where after each round, and the rows that each rank has sent."""
    have = [[{rank} for _ in range(n)] for rank in range(n)]
    pictures, sent = [have], [0] * n
    for turn in range(2 * (n - 1)):
        before, have = have, [[*rows] for rows in have]
        for rank in range(n):
            right, row = (rank + 1) % n, (rank - 1 - turn) % n
            # Added in the first n - 1 rounds; in the others what comes has all parts, and replaces.
            have[right][row] = before[rank][row] | before[right][row]
            sent[rank] += 1
        pictures.append(have)
    return pictures, sent


pictures, sent = ring(4)
assert all(cell == {0, 1, 2, 3} for rows in pictures[-1] for cell in rows)
assert sent == [2 * (4 - 1)] * 4
# Half-way, after the reduce-scatter, rank r has row r and nothing else that is complete.
assert all((len(pictures[3][rank][row]) == 4) == (rank == row)
           for rank in range(4) for row in range(4))

fig = Figure(figsize=(10, 2.1), layout="constrained")
titles = ["start", "1", "2", "3: reduce-scattered", "4", "5", "6: all-reduced"]
for ax, picture, title in zip(fig.subplots(1, 7), pictures, titles, strict=True):
    parts = [[len(cell) for cell in rows] for rows in picture]
    ax.imshow(parts, cmap="Blues", vmin=0, vmax=5)
    for rank in range(4):
        for row in range(4):
            ax.text(row, rank, parts[rank][row], ha="center", va="center", fontsize=8,
                    color="white" if parts[rank][row] > 3 else "black")
    ax.set(xticks=range(4), yticks=range(4), xlabel="row")
    ax.set_title(title, fontsize=8)
fig.axes[0].set_ylabel("rank")
fig

# %% [markdown]
# *How many ranks' parts each row has, round by round, in a ring of four.*
#
# ## Counted at the sockets
#
# The same five with a vector of a mebibyte. In a broadcast rank 0, or whoever passes it on, sends
# more than the others, so the table has the mean over ranks, in units of $\Psi$ elements.

# %%
PSI = -(-(2**18) // N) * N  # fp32 elements, a mebibyte of them, and a multiple of N
once = (N - 1) / N
predicted = dict.fromkeys(NAMES, once) | {"all-reduce": 2 * once}
measured = {}
print(f"{'':16} predicted  measured")
for name in NAMES:
    ranks = run("worker_02:measure", N, name, PSI)
    seen = None not in ranks
    measured[name] = sum(ranks) / N if seen else None
    print(f"{name:16} {predicted[name]:9.2f} "
          + (f"{measured[name]:9.2f}" if seen else "  (TCP alone can be counted)"))
for name in NAMES:
    if seen and name != "reduce-scatter":
        assert abs(measured[name] - predicted[name]) < 0.005
if seen:
    assert abs(measured["reduce-scatter"] - measured["all-reduce"]) < 0.02

# %% [markdown]
# **Measured**: four of five to the last digit. The surprise is gloo's reduce-scatter: it sends what
# an all-reduce sends, as if each rank got all rows and threw the others' away.
#
# This matters here. Data parallelism needs an all-reduce of the gradients in each step. ZeRO-3
# needs two all-gathers of the parameters, one forward and one backward, and one reduce-scatter of
# the gradients:
#
# $$\text{data parallel: } 2\Psi\,\frac{N-1}{N} \qquad \text{ZeRO-3: } 3\Psi\,\frac{N-1}{N}$$
#
# With gloo's reduce-scatter it would be 4. That is why `zero3` sends messages of its own on the
# CPU: each rank sends each other one its row, and adds up what comes. This is one sharded layer,
# forward and backward:

# %%
side = 512
shard_bytes = -(-(side**2) // N) * 4
steps = run("worker_02:layer_step", N, side)
for rank, (_, events, total, order_bytes) in enumerate(steps):
    print(f"rank {rank}: " + ", ".join(f"{event} {nbytes:,} bytes" for event, nbytes in events))
    assert total == 3 * (N - 1) * shard_bytes
    assert order_bytes == 3 * (N - 1) * 32  # announcements, see below

# %%
if seen:
    volumes = {
        "data parallel": measured["all-reduce"],
        "ZeRO-3, gloo's collectives": 2 * measured["all-gather"] + measured["reduce-scatter"],
        "ZeRO-3, zero3's messages": sum(sent for sent, *_ in steps) / N,
    }
    print("in units of Psi (N - 1) / N, at the sockets:")
    for name, volume in volumes.items():
        print(f"{name:28} {volume / once:.2f}")
    assert [round(volume / once, 1) for volume in volumes.values()] == [2, 4, 3]

# %% [markdown]
# **Measured**: ZeRO-3 sends one and a half times what data parallelism sends, on any number of
# ranks: $\frac{N-1}{N}$ is in both. This is the whole price, and it buys the $N$-th part of the
# memory. In a chain of layers it is a little less, because the last layer's second gather is
# [saved](04_a_transformer.ipynb).
#
# What the kernel counts beyond that is too little for these digits: the headers of messages, and
# the 32 bytes with which each transfer [announces
# itself](../zero3/comm.py#announce-what-this-rank-is-about-to-transfer), so that ranks that diverge
# get an error and not noise. On GPUs the collectives are NCCL's, and its reduce-scatter is a real
# one; transfers announce themselves there too, and the device compares.
#
# ## Exercise
#
# Write `my_reduce_scatter` in the worker's cell above, with `all_to_all_single` and no other
# collective. It shall return what a reduce-scatter returns and send $\Psi\frac{N-1}{N}$. Run that
# cell again, and then this one.

# %%
answers = [after for _, after in run("worker_02:small", N, "mine")]
print("right:", answers == expected["reduce-scatter"])
if seen:
    exercise = sum(run("worker_02:measure", N, "mine", PSI)) / N
    print(f"sends {exercise:.2f}, should send {once:.2f}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# ```python
# def my_reduce_scatter(mine):
#     receive_buffer = torch.empty_like(mine)
#     dist.all_to_all_single(receive_buffer, mine)
#     return receive_buffer.view(dist.get_world_size(), -1).sum(0)
# ```
#
# An all-to-all brings each rank its row of all vectors; what is left is to add them. It needs an
# receive_buffer as large as the vector, where a ring needs a row. `zero3` has one at hand: the memory where
# the full parameters were, which backward needs no more.
#
# </details>
#
# **In the source**: [gather](../zero3/comm.py#start-to-gather-each-shard-into-its-flat-buffer),
# [reduce](../zero3/comm.py#start-to-reduce-scatter-each-flat-gradient), and the
# [sum](../zero3/comm.py#this-rank-s-share-of-the-sum-over-ranks-shard-numel). Next: [one
# layer](03_one_layer.ipynb), opened up.

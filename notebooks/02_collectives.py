# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # The collectives, each alone
#
# **Question**: how much does a rank have to send, so that all ranks train the same model?
#
# A *collective* is an operation that all ranks call together, each with a vector of its own. ZeRO-3
# needs two collectives, an all-gather and a reduce-scatter. Plain data parallel training needs one,
# an all-reduce. In this notebook each of them runs alone, and we count its bytes at the sockets,
# where they leave the process.
#
# Let the vector have $\Psi$ elements. Cut it into $N$ rows, one for each of the $N$ ranks.
#
# **Your prediction**: on many ranks, which collective sends most, all-gather, reduce-scatter or
# all-reduce, and how many times as much as the others? A step of ZeRO-3 gathers the parameters
# twice and reduces the gradients once. A step of data parallel training reduces the gradients once
# and gathers nothing. How much more does ZeRO-3 send?
#
# This notebook belongs to [`collectives.py`](../zero3/comm/collectives.py#the-communicator),
# which does all communication between ranks.

# %%
# %matplotlib inline
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from zero3.train.launch import default_ranks, preload, run
from zero3.train.report import COLORS

preload("zero3.layer")
N = default_ranks()
print(f"{N} ranks")

# %% [markdown]
# This is the code that runs on each rank. `collective` calls one of the collectives. `sent_bytes`
# asks the kernel how many bytes each TCP connection of the process has sent, so the measurement
# does not depend on any of our formulas. It works on Linux with gloo, which communicates over TCP.

# %% tags=["varies"]
# %%writefile worker_02.py
import os
import socket
import struct
import sys
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from zero3 import Zero3Layer
from zero3.estimate.ledger import Ledger
from zero3.train.launch import my_device


def collective(name, mine):
    """Call a collective with this rank's vector `(psi,)`, and return this rank's result."""
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    rows = list(mine.chunk(ranks))
    out = torch.empty_like(mine)
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
    """The exercise: this version sends too much."""
    return collective("reduce-scatter", mine)


def small(*names):
    """Call collectives with 10 r + row, and return the input and the output as lists."""
    ranks = dist.get_world_size()
    mine = 10 * dist.get_rank() + torch.arange(ranks, device=my_device())
    return [(mine.tolist(), collective(name, mine).tolist()) for name in names]


def sent_bytes():
    """Bytes that the TCP connections of this process have sent, or None if nothing counts them."""
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
    """Run `action`; return the bytes it sent, in units of `psi` fp32 elements, and its result."""
    dist.barrier()
    before = sent_bytes()
    answer = action()
    # The barrier ends when everything that was sent before it has arrived.
    dist.barrier()
    return None if before is None else (sent_bytes() - before) / (4 * psi), answer


def measure(psi, *names):
    mine = torch.ones(psi, device=my_device())
    return [counted(psi, partial(collective, name, mine))[0] for name in names]


def layer_step(side):
    """Forward and backward of one sharded layer, counted at the sockets and by a `Ledger`."""
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
# Element $i$ of rank $r$ is $10r + i$, so each number shows where it comes from. Cover the output,
# and write down the result on rank 1 for each collective.

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
for name, *answers in zip(NAMES, *run("worker_02:small", N, *NAMES), strict=True):
    for rank, (before, after) in enumerate(answers):
        print(f"{'' if rank else name:16} rank {rank}: {before!s:{4 * N}} -> {after}")
        assert after == expected[name][rank]

# %% [markdown]
# | collective | input of rank $r$ | output of rank $r$ |
# |---|---|---|
# | broadcast | a vector | rank 0's vector |
# | all-gather | row $r$ | all rows |
# | reduce-scatter | a vector | row $r$ of the sum of all vectors |
# | all-reduce | a vector | the sum of all vectors |
# | all-to-all | a vector | row $r$ of all vectors |
#
# A reduce-scatter leaves each rank with one row, and an all-gather puts the rows together again.
# One after the other they are an all-reduce:

# %%
for rank, [(_, after)] in enumerate(run("worker_02:small", N, "both")):
    print(f"reduce-scatter, then all-gather: rank {rank} has {after}")
    assert after == expected["all-reduce"][rank]

# %% [markdown]
# ## How much each has to send
#
# Start with two ranks and a vector of four elements, two rows of two. In a reduce-scatter rank 0
# needs the sum of the first rows, so rank 1 has to send its first row; rank 0 sends its second row
# in return. Each rank sends two elements. In an all-gather each rank sends its own row, again two
# elements.
#
# In general $N-1$ ranks each send a row of $\frac{\Psi}{N}$ elements toward the rank that needs
# their sum, either directly or added to a row that they pass on. For all $N$ rows that is
# $\Psi\frac{N-1}{N}$ elements per rank. An all-gather sends as many, because each rank has to
# receive $N-1$ rows. An all-reduce does both:
#
# $$\underbrace{\Psi\,\frac{N-1}{N}}_{\text{reduce-scatter}} +
# \underbrace{\Psi\,\frac{N-1}{N}}_{\text{all-gather}} = 2\Psi\,\frac{N-1}{N}$$
#
# A *ring* reaches this minimum. Each rank sends only to its right-hand neighbour, one row in each
# of $2(N-1)$ rounds. The next cell simulates a ring in a single process and without numbers: a cell
# stands for a row on a rank, and contains the set of ranks whose vectors have been added to it.


# %%
def ring(n):
    """A ring all-reduce: each row after each round, and the number of rows that each rank sent."""
    have = [[{rank} for _ in range(n)] for rank in range(n)]
    pictures = [have]
    sent = [0] * n
    for turn in range(2 * (n - 1)):
        before = have
        have = [[*rows] for rows in before]
        for rank in range(n):
            right = (rank + 1) % n
            row = (rank - 1 - turn) % n
            # In the first n - 1 rounds a row is added to the one that is there. In the later rounds
            # the row that arrives is complete, so adding its set replaces the other.
            have[right][row] = before[rank][row] | before[right][row]
            sent[rank] += 1
        pictures.append(have)
    return pictures, sent


pictures, sent = ring(4)
assert all(cell == {0, 1, 2, 3} for rows in pictures[-1] for cell in rows)
assert sent == [2 * (4 - 1)] * 4
# Half-way, after the reduce-scatter, row r is complete on rank r and on no other rank.
assert all((len(pictures[3][rank][row]) == 4) == (rank == row)
           for rank in range(4) for row in range(4))

fig = Figure(figsize=(10, 2.1), layout="constrained")
# The more of a sum is there, the more it has the colour of a reduced gradient.
shades = LinearSegmentedColormap.from_list("sum", ["white", COLORS["reduced"]])
titles = ["start", "1", "2", "3: reduce-scattered", "4", "5", "6: all-reduced"]
for ax, picture, title in zip(fig.subplots(1, 7), pictures, titles, strict=True):
    parts = [[len(cell) for cell in rows] for rows in picture]
    ax.imshow(parts, cmap=shades, vmin=0, vmax=4)
    for rank in range(4):
        for row in range(4):
            ax.text(row, rank, parts[rank][row], ha="center", va="center", fontsize=8,
                    color="white" if parts[rank][row] > 3 else "black")
    ax.set(xticks=range(4), yticks=range(4), xlabel="row")
    ax.set_title(title, fontsize=8)
fig.axes[0].set_ylabel("rank")
fig

# %% [markdown]
# *How many ranks' vectors have been added to each row, round by round, in a ring of four.*
#
# ## Counted at the sockets
#
# Now the same five collectives with a vector of a mebibyte. In a broadcast rank 0, or a rank that
# passes the vector on, sends more than the others. So the table shows the mean over ranks, in units
# of $\Psi$ elements.

# %%
PSI = -(-(2**18) // N) * N  # fp32 elements, a mebibyte of them, and a multiple of N
once = (N - 1) / N
predicted = dict.fromkeys(NAMES, once) | {"all-reduce": 2 * once}
measured = {}
print(f"{'':16} predicted  measured")
for name, *ranks in zip(NAMES, *run("worker_02:measure", N, PSI, *NAMES), strict=True):
    seen = None not in ranks
    measured[name] = sum(ranks) / N if seen else None
    print(f"{name:16} {predicted[name]:9.2f} "
          + (f"{measured[name]:9.2f}" if seen else "  (only TCP can be counted)"))
for name in NAMES:
    if seen and name != "reduce-scatter":
        assert abs(measured[name] - predicted[name]) < 0.005
if seen:
    assert abs(measured["reduce-scatter"] - measured["all-reduce"]) < 0.02

# %% [markdown]
# **Measured**: four of five agree with the formula to the last digit. The surprise is gloo's
# reduce-scatter. It sends as much as an all-reduce, as if each rank received all rows and discarded
# those of the others.
#
# This matters for ZeRO-3. Data parallel training needs one all-reduce of the gradients in each
# step. ZeRO-3 needs two all-gathers of the parameters, one in forward and one in backward, and one
# reduce-scatter of the gradients:
#
# $$\text{data parallel: } 2\Psi\,\frac{N-1}{N} \qquad \text{ZeRO-3: } 3\Psi\,\frac{N-1}{N}$$
#
# With gloo's reduce-scatter the factor would be 4. Therefore `zero3` sends point-to-point messages
# on the CPU: each rank sends every other rank its row, and adds up the rows that it receives. Here
# is one sharded layer, forward and backward:

# %%
side = 512 // (2 * N) * (2 * N)  # each rank's part is a multiple of 16 bytes
shard_bytes = side**2 // N * 4
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
        "ZeRO-3, zero3's own messages": sum(sent for sent, *_ in steps) / N,
    }
    print("in units of Psi (N - 1) / N, at the sockets:")
    for name, volume in volumes.items():
        print(f"{name:28} {volume / once:.2f}")
    assert [round(volume / once, 1) for volume in volumes.values()] == [2, 4, 3]

# %% [markdown]
# **Measured**: ZeRO-3 sends one and a half times as much as data parallel training. The ratio is
# the same on any number of ranks, because $\frac{N-1}{N}$ is a factor of both. This is the whole
# price for $\frac{1}{N}$ of the memory. In a chain of layers it is a little less, because the last
# layer [saves](04_a_transformer.ipynb) its second all-gather.
#
# The kernel also counts the headers of messages and the 32 bytes with which each transfer
# [announces itself](../zero3/comm/collectives.py#announce-what-this-rank-is-about-to-send). Both
# are too small to show in these digits. The announcements let diverging ranks raise an error,
# because
# otherwise they would receive the wrong data. On GPUs NCCL runs the collectives, and its
# reduce-scatter sends only what it has to. Transfers are announced there too, and compared on the
# device.
#
# ## Exercise
#
# Write `my_reduce_scatter` in the worker's cell above, with `all_to_all_single` and no other
# collective. It has to return the same as a reduce-scatter, and to send $\Psi\frac{N-1}{N}$
# elements. Run that cell again, and then this one.

# %%
answers = [after for [(_, after)] in run("worker_02:small", N, "mine")]
print("right:", answers == expected["reduce-scatter"])
if seen:
    exercise = sum(sent for [sent] in run("worker_02:measure", N, PSI, "mine")) / N
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
# An all-to-all brings each rank its row of all vectors, so the rank only has to add them. This
# needs a receive buffer as large as the vector, while a ring needs one as large as a row. `zero3`
# already has such a buffer: the memory of the full parameters, which backward does not need any
# more.
#
# </details>
#
# **In the source**:
# the [communicator](../zero3/comm/collectives.py#a-group-of-ranks-and-the-collectives-between-them)
# gathers and reduces, and `total` is the
# [sum](../zero3/comm/collectives.py#this-rank-s-part-of-the-sum-over-ranks-shard-numel). Next: [one
# layer](03_one_layer.ipynb), step by step.

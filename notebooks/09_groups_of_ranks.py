# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Groups of ranks: fewer bytes between nodes
#
# **Question**: a step of ZeRO-3 sends three times the model. Between two machines, the *nodes*, a
# link may be ten times slower than inside one. How few bytes have to cross it?
#
# Torch arranges the ranks in a *mesh*, a table whose dimensions have names. A mesh tells `zero3`
# [which ranks share a model](../zero3/comm/links.py#groups-of-ranks), and
# [`Links`](../zero3/comm/links.py#links-a-mesh-and-how-layers-travel-over-it) says how layers
# travel over it.
#
# We use four ranks as two nodes of two. They all run on this machine. torchrun tells each rank with
# `LOCAL_WORLD_SIZE` how many consecutive ranks are on its node; here the worker says so itself.

# %% tags=["varies"]
# %%writefile worker_09.py
import os
from collections import Counter
from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zero3 import Int4, Int8, Links, Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.train.gpt import GPTConfig, global_batch, gpt_layers, load_bytes, next_byte_loss
from zero3.train.launch import my_device

os.environ["LOCAL_WORLD_SIZE"] = "2"


@cache
def mesh_of(first):
    """Two nodes of two ranks"""
    return init_device_mesh(my_device().type, (2, 2), mesh_dim_names=(first, "shard"))


LAYOUTS = {
    "flat": lambda: None,
    "hybrid": lambda: mesh_of("replicate"),
    "nodes": lambda: mesh_of("nodes"),
    "+ copy": lambda: Links(mesh_of("nodes"), secondary=True),
    "+ 8-bit weights": lambda: Links(mesh_of("nodes"), secondary=True, weights=Int8()),
    "+ 4-bit gradients": lambda: Links(mesh_of("nodes"), secondary=True, weights=Int8(),
                                       gradients=Int4()),
}


def three_weights(names):
    """The shard of this rank and its gradient, in each layout"""
    return {name: weights_in(LAYOUTS[name]()) for name in names}


def weights_in(layout):
    """The weights 1 2 3"""
    plain = nn.Linear(3, 1, bias=False, device=my_device())
    plain.weight.data = torch.tensor([[1.0, 2.0, 3.0]], device=my_device())
    layer = Zero3Layer(plain, mesh=layout)
    # The gradient of a weight is its input.
    row = [[4, 8, 12], [8, 0, 4], [4, 0, 4], [0, 4, 0]][dist.get_rank()]
    layer(torch.tensor([row], dtype=torch.float32, device=my_device())).backward()
    (shard,) = layer.get_trainable_chunk()
    return shard.tolist(), shard.grad.tolist()


# %% [markdown]
# ## Predict: who holds what
#
# The three weights of `layer.py` are 1 2 3. Each rank computes a gradient on its part of the batch,
# and the mean over the four ranks is 4 3 5. Three layouts share the weights and the mean gradient:
#
# | layout | mesh | sharded over |
# |---|---|---|
# | flat | none | all four ranks |
# | hybrid | ("replicate", "shard") | the two ranks of a node, so each node has a replica |
# | nodes | ("nodes", "shard") | all four ranks, and the mesh says which of them are near |
#
# **Predict** the shard of each rank in each layout.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import torch

from zero3 import Int4, Int8
from zero3.train.launch import preload, run
from zero3.train.report import COLORS, NEUTRAL

preload("zero3.comm.links", "zero3.optimizer.stage3", "zero3.train.gpt")
ranks = run("worker_09:three_weights", 4, ["flat", "hybrid", "nodes"])
held = {name: [rank[name] for rank in ranks] for name in ranks[0]}
print(f"{'':17}" + "".join(f"rank {rank:<5}" for rank in range(4)).rstrip())
for name, parts in held.items():
    for what, part in (("shard", 0), ("gradient", 1)):
        cells = (" ".join(f"{each:g}" for each in mine[part]) for mine in parts)
        print(f"{'' if part else name:8}{what:9}" + "".join(f"{c:10}" for c in cells).rstrip())

assert held["flat"] == [([1], [4]), ([2], [3]), ([3], [5]), ([0], [0])]
assert held["hybrid"] == [([1, 2], [4, 3]), ([3, 0], [5, 0])] * 2
assert held["nodes"] == [([1], [4]), ([3], [5]), ([2], [3]), ([0], [0])]

# %% [markdown]
# **Measured**: flat and nodes cut the weights into four, hybrid cuts them into two and holds
# everything twice. Wherever a weight is, its gradient is the same mean over all ranks.
#
# With nodes the shards have another order. Ranks 0 and 2 have the same place in their nodes, and
# together they have 1 2, two neighbours. So a gather has two steps. First rank 0 gets the 2 from
# rank 2, while rank 1 gets the 0 from rank 3. Then ranks 0 and 1 exchange their halves 1 2 and 3 0
# inside the node. Each shard has crossed the link once.
#
# ## Predict: bytes between nodes
#
# A chain of eight layers in bf16, so an element has 2 bytes. Let $s$ be the elements of a quarter
# of a layer. In a pass with messages, flat sends each quarter to both ranks of the other node: $2
# \cdot 2 s$ bytes. The passes are forward, backward and gradients.
#
# **Predict** for each layout: how many bytes per element of the quarter does a rank send to the
# other node in a step? And which layout makes a rank hold the fewest bytes, which the most?

# %% tags=["varies"]
# %%writefile -a worker_09.py


WIDTH = 256
DEPTH = 8


def step_bytes():
    """The bytes of a step in each layout"""
    return {name: bytes_in(make()) for name, make in LAYOUTS.items()}


def bytes_in(layout):
    """Bytes sent between and inside nodes, by phase; and those held, at rest and at the peak"""
    model = Zero3Sequential([
        Zero3Layer(nn.Linear(WIDTH, WIDTH, device=my_device(), dtype=torch.bfloat16), mesh=layout)
        for _ in range(DEPTH)])
    rest = held_bytes(model)
    x = torch.ones(4, WIDTH, device=my_device(), dtype=torch.bfloat16)
    with Ledger(model) as tape:
        model(x).sum().backward()
    between, inside = Counter(), Counter()
    for event in tape.events:
        if event.sent_bytes:
            phase = event.phase if event.event == "fetch" else "gradients"
            between[phase] += event.between_bytes
            inside[phase] += event.sent_bytes - event.between_bytes
    return dict(between), dict(inside), rest, tape.peak_live_bytes


# %%
PHASES = ["forward", "backward", "gradients"]
numel = 256 * 256 + 256  # of a layer
s, half = numel // 4, numel // 2

# Messages go to both ranks of the other node. In NCCL's ring only one of the two ranks has a
# neighbour there, to which it sends three quarters.
flat = 1.5 if torch.cuda.device_count() >= 4 else 2
# Bytes between nodes for a layer: forward, backward, gradients.
formulas = {
    "flat": (flat * 2 * s, flat * 2 * s, flat * 2 * s),
    "hybrid": (0, 0, 2 * half),
    "nodes": (2 * s, 2 * s, 2 * s),
    "+ copy": (2 * s, 0, 2 * s),
    "+ 8-bit weights": (Int8().nbytes(s), 0, 2 * s),
    "+ 4-bit gradients": (Int8().nbytes(s), 0, Int4().nbytes(s)),
}

measured = {}
print(f"{'bytes of a rank':19}{'at rest':>10}{'peak':>11}{'inside':>12}{'between':>12}"
      "   for an element of the quarter")
ranks = run("worker_09:step_bytes", 4)
for name in formulas:
    between, inside = ([sum(rank[name][part].get(phase, 0) for rank in ranks) / 4
                        for phase in PHASES] for part in (0, 1))
    rest, peak = ranks[0][name][2:]
    measured[name] = between, inside, rest
    # Backward does not gather the last of the eight layers, which is still full.
    layers = (8, 7, 8)
    assert between == [n * each for n, each in zip(layers, formulas[name], strict=True)]
    assert rest == 8 * 2 * (half if name == "hybrid" else s)
    print(f"{name:19}{rest:10,}{peak:11,}{sum(inside):12,.0f}{sum(between):12,.0f}"
          f"{sum(between) / (8 * s):8.2f}")

total = {name: sum(each[0]) for name, each in measured.items()}
assert total["+ 4-bit gradients"] / total["nodes"] < 0.28 and total["+ copy"] == total["hybrid"]

# %% [markdown]
# **Measured**: to the byte what the formulas say. Two steps send each shard to the other node once.
# In the passes this takes $2 + 2 + 2$ bytes for an element, minus a gather that the last layer does
# not need. Messages of flat send twice as much. NCCL's ring would send 1.5 times as much; on $M$
# nodes of $L$ ranks $\frac{LM - 1}{LM - L}$ times, which is hardly more if there are many nodes.
# Then:
#
# * A *copy* of the layer stays inside the node from forward to backward, so backward sends nothing
#   between nodes. This is `secondary=True`, or hpZ.
# * The weights are sent in 8 bits, with a scale for every 64 of them: $1 + \frac{2}{64} = 1.03$
#   bytes instead of 2. This is `weights=Int8()`, or qwZ.
# * The gradients are sent in 4 bits: 0.53 bytes. This is `gradients=Int4()`, or qgZ.
#
# All three together are [ZeRO++](https://arxiv.org/abs/2306.10209), and $1.03 + 0.53 = 1.56$ is
# about a quarter of 6. Hybrid sharding sends as little as nodes with a copy, but a rank holds twice
# the bytes at rest, and so of optimizer states, too. A copy costs memory only until its layer has
# gone backward.

# %%
fig, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained", sharey=True)
colors = dict(zip(PHASES, (COLORS["shard"], COLORS["whole"], COLORS["grad"]), strict=True))
for ax, part, title in zip(axes, (0, 1), ("to the other node", "inside the node"), strict=True):
    left = [0.0] * len(measured)
    for i, phase in enumerate(PHASES):
        widths = [each[part][i] / (8 * s) for each in measured.values()]
        ax.barh([*measured], widths, left=left, color=colors[phase], label=phase)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    ax.set_title(f"bytes that a rank sends {title}", fontsize=9, loc="left")
    ax.set(xlabel="bytes for an element of the quarter", xlim=(0, 15))
    ax.spines[["top", "right"]].set_visible(False)
axes[0].invert_yaxis()
axes[0].legend(frameon=False)
plt.show()

# %% [markdown]
# The bars on the right show the price of the two steps: a rank sends more inside its node, where a
# byte is cheap. The encodings shorten these bars, too.
#
# ## What rounding does
#
# An [encoding](../zero3/comm/encodings.py#encodings-fewer-bytes-for-the-same-numbers) divides
# each block of 64 numbers by a scale, and rounds to integers. With $q$ positive ones, 127 or 7, a
# number moves by at most
#
# $$|x - \hat{x}| \;\le\; \frac{\max |x|}{2 q} \left(1 + 2^{-8}\right)$$
#
# The maximum is taken over its block. The tensor below has 256 numbers with a standard deviation of
# 1, and one of them is replaced by 20. **Predict**: which of the others lose precision?

# %%
x = torch.randn(256, generator=torch.Generator().manual_seed(0))
x[100] = 20
errors = {}
for encoding in (Int8(), Int4()):
    near = encoding.decode(encoding.encode(x.view(1, -1)), 256).view(-1)
    bound = x.view(-1, 64).abs().amax(1) / (2 * encoding.levels) * (1 + 2**-8)
    errors[encoding] = (near - x, bound.repeat_interleave(64))
    assert (errors[encoding][0].abs() <= errors[encoding][1]).all()
    for block in range(4):
        part = slice(64 * block, 64 * block + 64)
        print(f"{type(encoding).__name__} block {block}: largest {x[part].abs().max():5.2f}, "
              f"worst error {errors[encoding][0][part].abs().max():.4f}, bound {bound[block]:.4f}")

fig, axes = plt.subplots(3, 1, figsize=(9, 4.2), layout="constrained", sharex=True,
                         height_ratios=(2, 1, 1))
axes[0].plot(x, ".", markersize=3, color=COLORS["shard"])
axes[0].set_title("256 numbers in four blocks", fontsize=9, loc="left")
for ax, (encoding, (error, bound)) in zip(axes[1:], errors.items(), strict=True):
    ax.fill_between(range(256), -bound, bound, step="post", color=NEUTRAL["line"])
    ax.plot(error, ".", markersize=3, color=NEUTRAL["bad"])
    ax.set_title(f"{type(encoding).__name__}: error, and its bound in grey", fontsize=9, loc="left")
for ax in axes:
    ax.set_xticks(range(0, 257, 64))
    ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# **Measured**: only its 63 neighbours in the block. Their scale is that of the 20. In 4 bits it is
# nearly 3, so most of them become zero. The other blocks do not notice. This is why blocks are
# small.
#
# ## What training notices
#
# A small GPT is trained twice on the same batches: with exact numbers, and with 8-bit weights and
# 4-bit gradients. The rounded run computes with rounded weights, but the optimizer updates exact
# ones. **Predict**: after 40 steps, does the rounded run have a loss that you can tell from the
# other?

# %% tags=["varies"]
# %%writefile -a worker_09.py


def trains(names, steps):
    """The mean loss over ranks of each step, in each layout"""
    return [losses_in(LAYOUTS[name](), steps) for name in names]


def losses_in(layout, steps):
    config = GPTConfig(seq_len=32, d_model=32, n_layers=2, d_ff=64)
    torch.manual_seed(0)
    model = Zero3Sequential([Zero3Layer(layer.to(my_device()), mesh=layout)
                             for layer in gpt_layers(config)])
    optimizer = Zero3Optimizer(model, lr=1e-2)
    data = load_bytes()
    losses = torch.zeros(steps, device=my_device())
    for step in range(steps):
        batch = global_batch(data, step, 16, config.seq_len).to(my_device())
        loss = next_byte_loss(model, batch.chunk(4)[dist.get_rank()])
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = loss.detach() / 4
    dist.all_reduce(losses)
    return losses.tolist()


# %%
exact, rounded = run("worker_09:trains", 4, ["nodes", "+ 4-bit gradients"], 40)[0]
print("step     exact   rounded")
for step in (1, 10, 20, 40):
    print(f"{step:4}{exact[step - 1]:10.2f}{rounded[step - 1]:10.2f}")
worst = max(abs(a - b) for a, b in zip(exact, rounded, strict=True))
fallen = exact[0] - exact[-1]
print(f"largest difference at a step {worst:.2f}; the loss has fallen by {fallen:.2f}")
assert worst < 0.1 and fallen > 2.5

fig, ax = plt.subplots(figsize=(7, 2.8), layout="constrained")
ax.plot(range(1, 41), exact, color=COLORS["shard"], linewidth=3, alpha=0.5, label="exact")
ax.plot(range(1, 41), rounded, color=NEUTRAL["fg"], linewidth=1,
        label="8-bit weights, 4-bit gradients")
ax.set(xlabel="step", ylabel="loss (nats per byte)")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# **Measured**: hardly. The two curves lie on each other, although each gradient has crossed the
# link with 4 bits instead of 32. The rounding errors of many numbers point in all directions, so
# most of them cancel. And the optimizer updates weights that have never been rounded, so small
# steps are not lost.
#
# **Answer**: a quarter of the bytes, on two nodes and on any other number. Each shard crosses a
# link once, and only in forward, in 8 bits. Each sum of gradients crosses it once, in 4 bits.
#
# ## Exercises
#
# **1.** A model of 7 billion parameters in 16 bits is sharded over 8 nodes of 8 ranks. The eight
# ranks of a node share a link that sends 25 GB in a second. For how many seconds is it busy in each
# step, with the layout "nodes" and with everything? Count 6 and 1.56 bytes for an element of a
# shard, and send each shard to each other node.

# %%
mine = None  # (seconds with "nodes", seconds with everything)

truth = [8 * (8 - 1) * 7e9 / 64 * nbytes / 25e9 for nbytes in (6, 1.56)]
if mine is None:
    print("not answered yet")
else:
    right = all(abs(a / b - 1) < 0.05 for a, b in zip(mine, truth, strict=True))
    print("right" if right else "other times")

# %% [markdown]
# <details><summary>Answer</summary>
#
# A rank has $s = \frac{7 \cdot 10^9}{64}$ elements, and sends them to $M - 1 = 7$ other nodes.
# Eight ranks share the link.
#
# ```python
# s = 7e9 / 64
# mine = 8 * 7 * s * 6 / 25e9, 8 * 7 * s * 1.56 / 25e9
# ```
#
# That is 1.5 s and 0.4 s. It costs time only as far as computation does not overlap it.
# </details>
#
# **2.** Write an encoding that halves fp32: 16 bits for each element, as bfloat16. It needs [three
# methods](../zero3/comm/encodings.py#encoding-how-rows-of-floats-become-bytes).

# %%


class Half:
    def nbytes(self, numel):
        return None  # the bytes of a row

    def encode(self, rows):
        """(rows, numel) floats to (rows, nbytes) uint8"""

    def decode(self, coded, numel):
        """(rows, nbytes) uint8 to (rows, numel) fp32"""


if Half().nbytes(1) is None:
    print("not answered yet")
else:
    rows = x.view(2, 128)
    coded = Half().encode(rows)
    off = ((Half().decode(coded, 128) - rows).abs() / rows.abs()).max()
    right = coded.dtype == torch.uint8 and coded.shape == (2, Half().nbytes(128)) == (2, 256)
    print("right" if right and off <= 2**-8 else "other bytes or numbers")

# %% [markdown]
# <details><summary>Answer</summary>
#
# ```python
# class Half:
#     def nbytes(self, numel):
#         return 2 * numel
#
#     def encode(self, rows):
#         return rows.bfloat16().view(torch.uint8)
#
#     def decode(self, coded, numel):
#         return coded.contiguous().view(torch.bfloat16).float()
# ```
#
# Pass it to `Links(weights=Half())`, and a model in fp32 sends half the bytes in its gathers. There
# is no scale, because each bfloat16 has an exponent of its own.
# </details>
#
# **In the source**: [the gather in two
# steps](../zero3/comm/links.py#all-gather-across-the-nodes-first-then-inside-each-node), and [the
# sums](../zero3/comm/links.py#reduce-scatter-inside-the-node) inside a node and over nodes.
#
# Next: [how a model is cut into stages](10_pipeline.ipynb).

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # The optimizer: compute in 16 bits, learn in 32
#
# **Question**: the layers compute in bf16, with 2 bytes per parameter. Why do the ranks hold 16?
#
# An optimizer on shards is almost an ordinary one. It is elementwise, so a rank steps its own
# shards without communication. [`Zero3Optimizer`][chapter] adds a master copy and a loss scale for
# half precision. It also answers two questions about the whole model: how long is its gradient,
# and is any of it infinite?
#
# All worker functions are in one file, and each part of this notebook appends its own. After a
# change, run the notebook from its first cell.
#
# [chapter]: ../zero3/optimizer/stage3.py#the-stage-3-optimizer-mixed-precision-on-shards

# %% tags=["varies"]
# %%writefile worker_06.py
from contextlib import nullcontext

import torch
from torch import nn

from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.estimate.predict import predict_optimizer
from zero3.gradients import norm_of
from zero3.train.launch import my_device

WIDTH = 256


def layers(dtype, depth):
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, WIDTH).to(my_device(), dtype) for _ in range(depth)]


def chain(dtype, depth):
    return Zero3Sequential([Zero3Layer(layer) for layer in layers(dtype, depth)])


def memory():
    """The bytes that a rank holds, around the first step of a model in bf16"""
    model = chain(torch.bfloat16, 4)
    optimizer = Zero3Optimizer(model, torch.optim.AdamW, lr=1e-3)
    held = {"built": held_bytes(model, optimizer)}
    x = torch.ones(4, WIDTH, device=my_device(), dtype=torch.bfloat16)
    optimizer.backward(model(x).float().square().mean())
    held["after the first backward"] = held_bytes(model, optimizer)
    optimizer.step()
    held["after the first step"] = held_bytes(model, optimizer)
    optimizer.zero_grad()
    held["after zero_grad"] = held_bytes(model, optimizer)
    return held, predict_optimizer(optimizer)


# %% [markdown]
# ## Predict
#
# A rank has bf16 shards and uses Adam. How many bytes does it hold for each parameter of its
# shards at four moments: when the optimizer has been built, after the first backward pass, after
# the first step, and after `zero_grad()`?

# %%
from math import log2

import matplotlib.pyplot as plt

from zero3.train.launch import default_ranks, preload, run
from zero3.train.report import COLORS

preload("zero3.optimizer.stage3")
N = default_ranks()
shard_numel = -(-(256 * 256 + 256) // N)  # of a layer
shards = 4 * shard_numel
held, predicted = run("worker_06:memory", N)[0]
for when, nbytes in held.items():
    print(f"{when:26}{nbytes:12,} bytes{nbytes / shards:8.2f} for each parameter of a shard")

counts = 4 * 4  # Adam counts the steps of each shard in 4 bytes
assert held["built"] == (2 + 4) * shards
assert held["after the first backward"] == (2 + 4 + 2) * shards
assert held["after the first step"] == (2 + 4 + 2 + 8) * shards + counts
assert held["after zero_grad"] == (2 + 4 + 8) * shards + counts == predicted.rest_bytes

# %% [markdown]
# **Measured**: two bytes for the shard, and at once four more for its *master*, the same numbers
# in fp32. The backward pass adds a gradient of 2 bytes, and the first step adds Adam's two moments
# of 4 bytes each. This is the $16 = 2 + 2 + 12$ of the paper. On $N$ ranks it is
# $\frac{16 \Psi}{N}$.
#
# ## Why a master
#
# The model below has 64 weights of 1, and the gradient of each weight is always 1. SGD takes a
# hundred steps of 0.001. **Predict** the weight after that, for SGD on the bf16 shards themselves
# and for `Zero3Optimizer`: 0.9, something near 0.9, or 1?

# %% tags=["varies"]
# %%writefile -a worker_06.py


def ones(dtype):
    """64 weights of 1. The gradient of each is equal to the input"""
    layer = nn.Linear(1, 64, bias=False, device=my_device(), dtype=dtype)
    nn.init.ones_(layer.weight)
    return Zero3Sequential([Zero3Layer(layer)])


def small_steps(steps, lr):
    """Without masters, and with them"""
    return [steps_of(steps, lr, masters) for masters in (False, True)]


def steps_of(steps, lr, masters):
    """The first weight of this rank's shard after each step, and its master"""
    model = ones(torch.bfloat16)
    (shard,) = model.get_trainable_chunk()
    optimizer = (Zero3Optimizer(model, torch.optim.SGD, lr=lr) if masters else
                 torch.optim.SGD([shard], lr=lr))
    seen, x = [], torch.ones(1, 1, device=my_device(), dtype=torch.bfloat16)
    for _ in range(steps):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        master = optimizer.shard_states[0].master if masters else shard
        seen.append((shard[0].item(), master[0].item()))
    return seen


# %%
plain, mixed = run("worker_06:small_steps", N, 100, 0.001)[0]
print(f"SGD on the shard:  {plain[-1][0]:.4f}")
print(f"with a master:     {mixed[-1][0]:.4f}, and the master {mixed[-1][1]:.4f}")
assert plain[-1][0] == 1 and abs(mixed[-1][1] - 0.9) < 1e-4 and abs(mixed[-1][0] - 0.9) < 2**-8

steps = range(1, 101)
fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
ax.plot(steps, [shard for shard, _ in plain], color=COLORS["shard"], linestyle="--",
        label="bf16 shard, stepped itself")
ax.plot(steps, [master for _, master in mixed], color=COLORS["state"], label="fp32 master",
        linewidth=3, alpha=0.5)
ax.step(steps, [shard for shard, _ in mixed], color=COLORS["shard"], linewidth=1, where="mid",
        label="bf16 shard, the master rounded")
ax.set(xlabel="step", ylabel="weight")
ax.set_title(f"a hundred steps of 0.001, rank 0 of {N}", fontsize=9, loc="left")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()

# %% [markdown]
# **Measured**: without a master the weight has not moved at all. The next number of bf16 below 1
# is $1 - \frac{1}{256}$, so a step of 0.001 is rounded back to 1. The next step starts at 1 again
# and is lost as well. The master adds up the steps, and the shard follows in stairs. Nothing else
# has changed: the same layer computes in the same 16 bits.
#
# ## Why fp16 needs a loss scale
#
# fp16 has more digits than bf16 and a smaller range. It has no number below $2^{-24}$ and none
# above 65504. So the loss is multiplied by a scale before the backward pass, and the gradient is
# divided by the scale afterwards, in fp32.
#
# **Predict** two things. First, each gradient is $2^{-26}$. Which norm do 64 of them have, without
# a scale and with a scale of 65536? Second, the scale is "dynamic" and starts at 65536. The
# gradient is 8 on the last rank and tiny on all others. How many steps are skipped, and by which
# ranks?

# %% tags=["varies"]
# %%writefile -a worker_06.py


def tiny(loss_scales):
    """The result of `step()` with each scale"""
    norms = []
    for loss_scale in loss_scales:
        model = ones(torch.float16)
        optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=1.0, loss_scale=loss_scale)
        x = torch.ones(1, 1, device=my_device(), dtype=torch.float16)
        optimizer.backward(model(x).float().sum() * 2**-26)
        norms.append(optimizer.step())
    return norms


def overflow(attempts):
    """The scale, the result of `step()`, and whether a weight moved, for each attempt"""
    model = ones(torch.float16)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.01, loss_scale="dynamic")
    last = optimizer.comm.rank == optimizer.comm.world_size - 1
    x = torch.ones(1, 1, device=my_device(), dtype=torch.float16)
    told = []
    for _ in range(attempts):
        scale, before = optimizer.loss_scale, optimizer.shard_states[0].master.clone()
        optimizer.backward(model(x).float().sum() * (8 if last else 2**-10))
        norm = optimizer.step()
        told.append((scale, norm, not optimizer.shard_states[0].master.equal(before)))
        optimizer.zero_grad()
    return told


# %%
lost, kept = run("worker_06:tiny", N, (None, 65536))[0]
print(f"norm of 64 gradients of 2**-26: {lost:g} without a scale, 2**{log2(kept):.3f} with one\n")
assert lost == 0 and abs(kept / (2**-26 * 64**0.5) - 1) < 1e-6

print(f"{'attempt':>7}{'scale':>8}   norm on each rank; has a weight moved")
attempts = run("worker_06:overflow", N, 5)
for i, told in enumerate(zip(*attempts, strict=True), 1):
    norms = ", ".join("skipped" if norm is None else f"{norm:.3f}" for _, norm, _ in told)
    print(f"{i:7}{told[0][0]:8g}   {norms}; {[moved for *_, moved in told]}")
    assert len(set(told)) == 1  # all ranks say the same
assert [norm is None for _, norm, _ in attempts[0]] == [True] * 4 + [False]

# %% [markdown]
# **Measured**: without a scale the gradient is zero. With a scale nothing is lost, because the
# scale is a power of two. And *all* ranks skip the step while one rank overflows. The gradients of
# the others are finite, but if only some ranks stepped, the shards would no longer belong to one
# model. The ranks learn of the overflow from a [collective of 8 bytes for each shard][squares], in
# which an infinity arrives as an infinite norm. Each skip halves the scale. After four of them
# $8 \cdot 65536 / 2^4$ is a number of fp16, and the fifth attempt steps.
#
# [squares]: ../zero3/optimizer/stage3.py#the-squared-norm-of-each-shard-s-gradient-on-each-rank
#
# ## How long is the gradient?
#
# Clipping scales the gradient down to a norm of at most 1, for example. A rank has only its shards'
# part of the gradient. **Predict**: what would go wrong if each rank clipped its own part?

# %% tags=["varies"]
# %%writefile -a worker_06.py


def rows(optimizer, count):
    """The global batch, `count` rows for each rank, and this rank's rows of it"""
    torch.manual_seed(1)
    batch = torch.randn(count * optimizer.comm.world_size, WIDTH).to(my_device())
    return batch, batch.chunk(optimizer.comm.world_size)[optimizer.comm.rank]


def loss_of(model, x):
    """The mean over rows; only the first eight features count"""
    return (model(x)[:, :8] - 1).square().sum(dim=1).mean()


def difference(model, plain):
    with model.full_params() as params:
        return max((params[name] - p).abs().max().item() for name, p in plain.named_parameters())


def clip():
    """Norms of this rank's part, of the whole, and plain PyTorch's; how far weights then differ"""
    model, plain = chain(torch.float32, 2), nn.Sequential(*layers(torch.float32, 2))
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, clip_grad_norm=1.0)
    batch, mine = rows(optimizer, 4)
    optimizer.backward(loss_of(model, mine))
    parts = [norm_of(states.read_grad()) for states in optimizer.shard_states]
    part, whole = norm_of(torch.stack(parts)).item(), optimizer.step()

    loss_of(plain, batch).backward()
    truth = nn.utils.clip_grad_norm_(plain.parameters(), 1.0).item()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    return part, whole, truth, difference(model, plain)


# %%
parts, wholes, truths, differences = zip(*run("worker_06:clip", N), strict=True)
print(f"of each rank's part:      {[round(part, 3) for part in parts]}")
print(f"what `step()` returned:   {wholes[0]:.3f}")
print(f"plain PyTorch, one model: {truths[0]:.3f}\n")
together = sum(part**2 for part in parts) ** 0.5
assert len({*wholes}) == 1 and abs(together - wholes[0]) < 1e-4 > abs(truths[0] - wholes[0])
assert max(differences) < 1e-6 and wholes[0] > 1

cosine = sum(parts) / (N**0.5 * wholes[0])
print("if each rank clipped its own part")
print(f"norm of the whole:        {N**0.5:.3f}")
print(f"cosine to the true one:   {cosine:.3f}")

# %% [markdown]
# **Measured**: the squares of the parts add up to the square of the whole, because each element is
# in exactly one shard and the padding is zero. `Zero3Optimizer` returns plain PyTorch's norm, and
# the clipped step gives plain PyTorch's weights. If each rank clipped its own part, every part
# would be multiplied by a different factor. The gradient would be too long, and it would point in
# another direction.
#
# ## Micro-batches
#
# A batch that is too large for the device is split into $k$ micro-batches, and their gradients add
# up. They can add up in the shard, with a reduce-scatter for each micro-batch. Or, inside
# `no_sync()`, they add up in the layer's full gradient, with one reduce-scatter in the last
# micro-batch. **Predict**: with $k = 4$, which part of the traffic remains with `no_sync()`: a
# quarter, a half, or three quarters? And what does it cost?

# %% tags=["varies"]
# %%writefile -a worker_06.py


def micro_batches(cases):
    return [step_in_parts(*case) for case in cases]


def step_in_parts(count, hold):
    """A step of 16 rows in `count` micro-batches"""
    model, plain = chain(torch.float32, 8), nn.Sequential(*layers(torch.float32, 8))
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    batch, mine = rows(optimizer, 16)
    with Ledger(model, optimizer) as tape:
        for i, x in enumerate(mine.chunk(count)):
            # The last micro-batch runs outside of `no_sync`, because it has to reduce.
            with optimizer.no_sync() if hold and i + 1 < count else nullcontext():
                optimizer.backward(loss_of(model, x) / count)
        optimizer.step()
    loss_of(plain, batch).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    predicted = predict_optimizer(optimizer, micro_batches=count, no_sync=hold)
    return tape.sent_bytes, tape.peak_live_bytes, predicted.sent_bytes, difference(model, plain)


def opposite():
    """The result of `step()`, if the gradient is 1 on ranks 0, 2, 4 ... and -1 on the others"""
    optimizer = Zero3Optimizer(model := ones(torch.float32), torch.optim.SGD, lr=0.1)
    x = torch.full((1, 1), 1.0 - 2 * (optimizer.comm.rank % 2), device=my_device())
    optimizer.backward(model(x).sum())
    return optimizer.step()


# %%
print(f"{'micro-batches':26}{'sent':>14}{'at the peak':>14}   bytes of rank 0")
sent, peak = {}, {}
cases = {"1": (1, False), "4": (4, False), "4, in no_sync": (4, True)}
answers = run("worker_06:micro_batches", N, [*cases.values()])
for name, *ranks in zip(cases, *answers, strict=True):
    sent[name], peak[name], *_ = ranks[0]
    print(f"{name:26}{sent[name]:14,}{peak[name]:14,}")
    assert all(rank[0] == rank[2] and rank[3] < 1e-6 for rank in ranks)
saved = 3 * (N - 1) * 8 * shard_numel * 4  # three reduces of all gradients, fp32
assert sent["4"] - sent["4, in no_sync"] == saved
if N > 1:
    assert peak["4, in no_sync"] > peak["4"] > peak["1"]
    print(f"\nleft with no_sync: {sent['4, in no_sync'] / sent['4']:.0%} of the traffic")

# %% [markdown]
# **Measured**: all three equal plain PyTorch's step on the whole batch. `no_sync()` saves the
# reduce-scatters of the first three micro-batches, and no all-gather. A sharded layer has to be
# gathered in the forward and in the backward pass, whatever happens to its gradient. In return, the
# full gradients of *all* layers stay in memory until the last micro-batch, so the price grows with
# the number of layers. `no_sync()` pays if communication is slow and there is memory to spare.
#
# **Answer**: a rank holds 16 bytes for each parameter of its shards, because 2 bytes are enough to
# compute with but not enough to add up small steps. All of these states are elementwise and stay
# with the shard. In a step the ranks exchange only one norm for each shard.
#
# ## Exercise
#
# `opposite` above has a single layer of 64 weights. The gradient of each weight is 1 on even ranks
# and $-1$ on odd ranks. Which norm does `step()` return on two ranks? And which number would the
# mean of the ranks' own norms be?

# %%
mine = None  # the result of `step()`, on your number of ranks

truth = run("worker_06:opposite", N)[0]
print("not answered yet" if mine is None else "right" if abs(mine - truth) < 1e-6 else "not that")
assert abs(truth - N % 2 / N * 64**0.5) < 1e-6

# %% [markdown]
# <details><summary>Answer</summary>
#
# Zero. The reduce-scatter takes the mean over ranks first, and the mean of 1 and $-1$ is 0. On the
# global batch these rows cancel. The norm of each rank's own gradient is $\sqrt{64} = 8$, and so is
# the mean of the two norms. On an odd number $N$ of ranks one rank has no partner, and the norm is
# $\frac{8}{N}$. The source explains this [next to the norm][norm].
#
# [norm]: ../zero3/optimizer/stage3.py#step-all-shards-if-the-gradient-is-finite
# </details>
#
# Next: [models that are no chain](07_whole_models.ipynb).

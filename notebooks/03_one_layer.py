# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # One layer, step by step
#
# **Question**: a rank stores only a part of a layer's weights, and computes with all of them. Where
# are the other weights while the layer does not compute, and how does autograd find them again in
# backward?
#
# A `Zero3Layer` makes the same few calls in every step. Here we make them ourselves, one by one,
# and look at the memory after each. The layer is an `nn.Linear(2, 1)` with the weight (1, 2) and
# the bias 3, so we can follow every number. It is the example at the head of
# [`minimal.py`](../zero3/minimal.py).
#
# **Your prediction**: the layer has 3 parameters in fp32, 12 bytes. How many bytes of it does each
# of two ranks hold between two steps? And how many at the peak of a step: fewer than plain PyTorch,
# as many, or more? Plain PyTorch holds 12 bytes of weights and 12 of gradients.
#
# This notebook belongs to [`layer.py`](../zero3/layer.py#zero3-layer).

# %%
# %matplotlib inline
import torch
from matplotlib.figure import Figure

from zero3.train.launch import default_ranks, preload, run
from zero3.train.report import COLORS, NEUTRAL

preload("zero3.layer")
N = default_ranks()
P = 2 + 1  # number of parameters of nn.Linear(2, 1)
SHARD = -(-P // N)  # number of elements of a shard
print(f"{P} parameters, {4 * P} bytes. {N} ranks: shards of {SHARD} elements, and padding of "
      f"{N * SHARD - P}")

# %% [markdown]
# This code runs on the ranks. The function to read is `opened`. It does with a layer what the
# layer's `forward` and its hooks do, and after each call it notes the sizes of four storages in
# bytes.
#
# All ranks compute on the CPU, also on a machine with GPUs. A GPU reads 16 bytes at once, so there
# the layer would begin each parameter and each shard at a multiple of 16 bytes, and this layer
# would be mostly padding.

# %% tags=["varies"]
# %%writefile worker_03.py
import torch
import torch.distributed as dist
from torch import nn

from zero3 import Zero3Layer
from zero3.estimate.ledger import Ledger

# The rows and the targets of rank 0 and of rank 1. Further ranks begin again with the first.
BATCHES = (([[1, 0], [0, 1]], [2, 1]), ([[2, 0], [0, 1]], [3, 5]))
RATE = 0.1


def readable():
    """A layer with the weight (1, 2) and the bias 3."""
    linear = nn.Linear(2, 1)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1, 2]]))
        linear.bias.fill_(3)
    return linear


def loss(layer, rank):
    """Half the squared errors of this rank's rows, added up."""
    x, target = (torch.tensor(part, dtype=torch.float) for part in BATCHES[rank % 2])
    return 0.5 * (layer(x).flatten() - target).square().sum()


def plain(ranks):
    """The expected result: gradient and update of plain PyTorch on the global batch."""
    linear = readable()
    (sum(loss(linear, rank) for rank in range(ranks)) / ranks).backward()
    grad = torch.cat([p.grad.flatten() for p in linear.parameters()])
    torch.optim.SGD(linear.parameters(), lr=RATE).step()
    return grad, torch.cat([p.detach().flatten() for p in linear.parameters()])


def merged():
    """The flat parameter, and this rank's shard of it."""
    layer = Zero3Layer(readable())
    linear = readable()
    flat = layer._merge_and_pad_params(list(linear.parameters()))
    return flat.tolist(), layer.flats[0].shard.tolist()


def touched():
    """A freed parameter's text, its shape, and the error that it raises in an addition."""
    linear = readable()
    Zero3Layer(linear)
    try:
        linear.weight + 1
    except RuntimeError as error:
        return repr(linear.weight), tuple(linear.weight.shape), str(error)


def opened():
    """A training step of one layer, call by call."""
    ranks = dist.get_world_size()
    linear = readable()
    layer = Zero3Layer(linear)
    flat = layer.flats[0]
    notes = []

    def note(call):
        tensors = flat.shard, flat.full, flat.grad, flat.shard.grad
        notes.append((call, [0 if t is None else t.untyped_storage().nbytes() for t in tensors]))

    note("at rest")
    storage = flat.full.untyped_storage()._cdata

    # Forward
    layer.fetch_params()
    note("fetch_params()")
    layer._wait_params()
    weights = linear.weight.flatten().tolist() + linear.bias.tolist()
    error = loss(linear, dist.get_rank())  # with the module itself, which does not know of shards
    note("linear(x)")
    layer._cleanup_params()
    note("_cleanup_params()")

    # Backward: autograd has saved views of the flat parameter, so fill its storage again.
    layer.fetch_params()
    layer._wait_params()
    note("fetch, wait")
    params = [slot.param for slot in flat.slots]
    flat.grad = layer._empty(len(flat.full), flat.shard.dtype).zero_()
    for slot, grad in zip(flat.slots, torch.autograd.grad(error, params), strict=True):
        slot.of(flat.grad).copy_(grad * (1 / ranks))
        flat.ready.add(slot.names)
    note("gradients")

    # Reduce
    with Ledger(layer) as tape:
        layer._backup_grads()
    note("_backup_grads()")
    same = storage == flat.full.untyped_storage()._cdata
    events = [(e.event, e.bytes, e.live_bytes) for e in tape.events]
    return notes, weights, same, events, flat.shard.grad.cpu()


def itself():
    """The same step, by the layer itself, and the step of an optimizer."""
    layer = Zero3Layer(readable())
    optimizer = torch.optim.SGD(layer.parameters(), lr=RATE)
    with Ledger(layer) as tape:
        loss(layer, dist.get_rank()).backward()
    grad = layer.flats[0].shard.grad.clone()
    optimizer.step()
    events = [(e.phase, e.event, e.live_bytes) for e in tape.events]
    return events, grad, layer.flats[0].shard.detach()


# %% [markdown]
# ## Shard
#
# A layer first
# [merges](../zero3/layer.py#merge-parameters-and-pad-so-that-the-length-is-divisible-by-world-size)
# its parameters. `_merge_and_pad_params` concatenates them and appends zeros until the length is
# divisible by $N$. The result is the *flat parameter*. Rank $r$ keeps the $r$-th part of it, its
# *shard*. On two ranks the first shard happens to be the weight. A cut may fall anywhere, and on
# three ranks it would divide the weight.

# %%
answers = run("worker_03:merged", N, device="cpu")
print("flat parameter", [int(value) for value in answers[0][0]])
for rank, (flat, shard) in enumerate(answers):
    print(f"shard of rank {rank}", [int(value) for value in shard])
    assert flat == [*range(1, P + 1), *[0] * (N * SHARD - P)]
    assert shard == flat[rank * SHARD : (rank + 1) * SHARD]

# %% [markdown]
# The module's weight and bias are views of the flat parameter. While the layer is sharded they stay
# views, but the storage under them has no bytes. An operation on such a view would read from
# address zero and crash the process. So while a layer is sharded, its parameters have a special
# [class](../zero3/guards/freed.py#a-parameter-without-memory). It answers questions that
# need no elements, such as the shape, and raises an error with the parameter's name for anything
# else:

# %%
for rank, (text, shape, error) in enumerate(run("worker_03:touched", N, device="cpu")):
    if rank == 0:
        print(f"{text}, shape {shape}\n\n{error}")
    assert shape == (1, 2) and f"rank {rank}: Linear freed `weight`" in error

# %% [markdown]
# ## Unshard, compute, reshard; and again for backward
#
# Now the whole step. Each line of the output shows the bytes that this rank holds after a call.
#
# * [`fetch_params`](../zero3/layer.py#unshard-all-gather) allocates the flat parameter's memory and
#   starts the all-gather, and `_wait_params` completes it
# * [`_cleanup_params`](../zero3/layer.py#reshard-free) resizes the storage to zero bytes
# * [`_backup_grads`](../zero3/layer.py#reshard-and-reduce-scatter-the-gradients) frees the
#   parameters and reduce-scatters the gradients
#
# Backward needs care. Autograd has saved the weight for it, but not as a copy: it holds a view of
# the flat parameter, and that memory has been freed since. This works because the next all-gather
# fills the *same storage*. If it wrote into a new tensor, autograd would still hold the old, empty
# one.

# %%
answers = run("worker_03:opened", N, device="cpu")
notes, *_ = answers[0]
print(f"{'':18}{'shard':>12}{'full':>12}{'full grad':>12}{'shard grad':>12}{'all':>12}")
for call, held in notes:
    print(f"{call:18}" + "".join(f"{nbytes:>12}" for nbytes in [*held, sum(held)]))

shard_bytes = 4 * SHARD
full_bytes = 4 * N * SHARD
assert [held for _, held in notes] == [
    [shard_bytes, 0, 0, 0], [shard_bytes, full_bytes, 0, 0], [shard_bytes, full_bytes, 0, 0],
    [shard_bytes, 0, 0, 0], [shard_bytes, full_bytes, 0, 0],
    [shard_bytes, full_bytes, full_bytes, 0], [shard_bytes, 0, 0, shard_bytes]]
for other, weights, same, _, _ in answers:
    assert other == notes  # the same on all ranks
    assert weights == [*range(1, P + 1)] and same
print("\nall weights in forward, and the same storage as before, on all ranks: True")

# %% [markdown]
# `_backup_grads` does several things in one call. The
# [`Ledger`](../zero3/estimate/ledger.py#the-tape) shows them one by one. First the parameters are
# freed. On the CPU the gradients of the other ranks then arrive in the memory that the parameters
# used.

# %%
events = answers[0][3]
for event, nbytes, live_bytes in events:
    print(f"{event:8} {nbytes:4} bytes, then the layer holds {live_bytes}")
assert all(answer[3] == events for answer in answers)

# %%
fig = Figure(figsize=(8, 3), layout="constrained")
ax = fig.subplots()
left = [0] * len(notes)
kinds = {"shard": "shard", "full parameters": "whole", "full gradient": "grad",
         "shard's gradient": "reduced"}
for i, (kind, color) in enumerate(kinds.items()):
    widths = [held[i] for _, held in notes]
    ax.barh(range(len(notes)), widths, left=left, color=COLORS[color], label=kind)
    left = [a + b for a, b in zip(left, widths, strict=True)]
ax.axvline(2 * 4 * P, color=NEUTRAL["muted"], linestyle="--", linewidth=1)
ax.text(2 * 4 * P + 0.3, 0, "plain: weights and gradients", fontsize=8, va="center")
ax.set_yticks(range(len(notes)), [call for call, _ in notes])
ax.invert_yaxis()
ax.set(xlabel="bytes that a rank holds")
ax.legend(frameon=False, fontsize=8, loc=(0.77, 0.4))
ax.spines[["top", "right"]].set_visible(False)
fig

# %%
highest = max(sum(held) for _, held in notes)
highest = max(highest, *(live_bytes for *_, live_bytes in events))
print(f"at rest {sum(notes[0][1])} bytes, at the peak {highest}; plain PyTorch "
      f"{2 * 4 * P} with its gradients")
assert highest > 2 * 4 * P

# %% [markdown]
# **Measured**: between two steps a rank holds only its shard. At the peak it holds *more* than
# plain PyTorch: the whole layer, its whole gradient, and the shard as well. A single sharded layer
# saves nothing at its peak. The saving comes from the other layers: while this one is whole, each
# of them is a shard. So wrap many layers of moderate size.
#
# ## The same gradient
#
# Each rank has computed with its own rows. Rank 0 has the errors 2 and 4, so its gradient is (2, 4)
# for the weight and 6 for the bias. Rank 1 has the errors 2 and 0, so its gradient is (4, 0) and 2.
# The model learns from the mean over ranks. Each rank divides its gradient by $N$ before it sends
# it, so the sum over ranks is that mean. Concatenated, the shards' gradients equal the gradient of
# plain PyTorch on the whole batch, and the gradient of the padding is zero:

# %%
((right, updated),) = run("worker_03:plain", 1, N, device="cpu")
by_hand = torch.cat([grad for *_, grad in answers])
print("plain  ", [round(value, 3) for value in right.tolist()])
print("shards ", [round(value, 3) for value in by_hand.tolist()])
torch.testing.assert_close(by_hand[:P], right, rtol=1e-6, atol=1e-6)
assert (by_hand[P:] == 0).all()

# %% [markdown]
# ## Automatically
#
# `layer(x)` and `backward()` do all this themselves. In backward nobody calls the layer, so it
# registers hooks. One on each output runs when the gradient of that output is ready, and announces
# the layer's backward pass. One on each parameter runs when the gradient of that parameter is
# complete. Here are the events of the layer, followed by the same gradient, bit by bit:

# %%
by_itself = run("worker_03:itself", N, device="cpu")
for phase, event, live_bytes in by_itself[0][0]:
    print(f"{phase:9} {event:9} then the layer holds {live_bytes:4} bytes")
same = torch.equal(torch.cat([grad for _, grad, _ in by_itself]), by_hand)
print("\nthe same bits as by hand:", same)
assert same and all(tape == by_itself[0][0] for tape, *_ in by_itself)
assert max(live_bytes for *_, live_bytes in by_itself[0][0]) == highest

# %% [markdown]
# ## Update
#
# Between two steps `layer.parameters()` yields this rank's shard. SGD subtracts 0.1 times its
# gradient. Each rank updates its own shard, without communication, and together the shards equal
# the parameters that plain PyTorch has after its step:

# %%
for rank, (*_, shard) in enumerate(by_itself):
    print(f"shard of rank {rank}", [round(value, 3) for value in shard.tolist()])
shards = torch.cat([shard for *_, shard in by_itself])
print("plain          ", [round(value, 3) for value in updated.tolist()])
torch.testing.assert_close(shards[:P], updated, rtol=1e-6, atol=1e-6)
assert (shards[P:] == 0).all()

# %% [markdown]
# ## Exercise
#
# In the worker's cell, remove the division: write `.copy_(grad)` in place of `.copy_(grad * (1 /
# ranks))`. Run everything again. What happens to the gradients of the shards? Why might you train a
# model with AdamW for weeks before you notice?
#
# <details><summary>Answer</summary>
#
# They are $N$ times too large, and the comparison with plain PyTorch fails. With SGD the steps
# would be $N$ times as long, which you would notice. Adam divides the mean gradient by the root of
# the mean squared gradient, so a constant factor almost cancels, and the losses look right. Only
# gradient clipping would change: it would start at $\frac{1}{N}$ of the norm that you asked for.
# This is why the tests compare weights with a large `eps`, and not only losses.
#
# </details>
#
# **In the source**: [`layer.py`](../zero3/layer.py#zero3-layer) has the same order, from
# [shard](../zero3/layer.py#shard-merge-parameters-into-one-buffer-keep-1-n-of-it-free-the-buffer)
# to [add](../zero3/layer.py#add-the-reduced-gradients-to-those-of-the-shards). Next: [a
# transformer](04_a_transformer.ipynb) made of such layers.

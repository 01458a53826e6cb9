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
# for an `nn.Linear` with small whole numbers, and look at the memory after each.
#
# **Your prediction**: the layer has 15 parameters in fp32, 60 bytes. How many bytes of it does each
# of two ranks hold between two steps? And how many at the peak of a step: fewer than plain PyTorch,
# as many, or more? Plain PyTorch holds 60 bytes of weights and 60 of gradients.
#
# This notebook belongs to [`layer.py`](../zero3/layer.py#zero3-layer).

# %%
# %matplotlib inline
import torch
from matplotlib.figure import Figure

from zero3.train.launch import default_ranks, preload, run

preload("zero3.layer")
N = default_ranks()
P = 4 * 3 + 3  # number of parameters of nn.Linear(4, 3)
SHARD = -(-P // N)  # number of elements of a shard
print(f"{P} parameters, {4 * P} bytes. {N} ranks: shards of {SHARD} elements, and padding of "
      f"{N * SHARD - P}")

# %% [markdown]
# This code runs on the ranks. The function to read is `opened`. It does with a layer what the
# layer's `forward` and its hooks do, and after each call it notes the sizes of four storages in
# bytes.

# %% tags=["varies"]
# %%writefile worker_03.py
import torch
import torch.distributed as dist
from torch import nn

from zero3 import Zero3Layer
from zero3.measure.ledger import Ledger
from zero3.train.launch import my_device

ROWS = 4  # of the batch of each rank


def readable():
    """A layer with the weights 1 to 12 and the biases 13 to 15."""
    linear = nn.Linear(4, 3)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(1, 13).view(3, 4))
        linear.bias.copy_(torch.arange(13, 16))
    return linear.to(my_device())


def inputs(ranks):
    """The global batch, small whole numbers, the same on every rank: `(ROWS * ranks, 4)`."""
    torch.manual_seed(0)
    return torch.randint(-2, 3, (ROWS * ranks, 4)).float().to(my_device())


def my_inputs():
    """This rank's rows of the global batch: `(ROWS, 4)`."""
    return inputs(dist.get_world_size()).chunk(dist.get_world_size())[dist.get_rank()]


def mean_loss(out):
    return out.square().sum() / (2 * len(out))


def plain(ranks):
    """The expected result: the gradient of plain PyTorch on the global batch, as one vector."""
    linear = readable()
    mean_loss(linear(inputs(ranks))).backward()
    return torch.cat([p.grad.flatten() for p in linear.parameters()]).cpu()


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
    out = linear(my_inputs())  # the module itself, which does not know about shards
    note("linear(x)")
    layer._cleanup_params()
    note("_cleanup_params()")

    # Backward: autograd has saved views of the flat parameter, so fill its storage again.
    layer.fetch_params()
    layer._wait_params()
    note("fetch, wait")
    params = [slot.param for slot in flat.slots]
    flat.grad = layer._empty(len(flat.full), flat.shard.dtype).zero_()
    for slot, grad in zip(flat.slots, torch.autograd.grad(mean_loss(out), params), strict=True):
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
    """The same step in two lines."""
    layer = Zero3Layer(readable())
    with Ledger(layer) as tape:
        mean_loss(layer(my_inputs())).backward()
    return [(e.phase, e.event, e.live_bytes) for e in tape.events], layer.flats[0].shard.grad.cpu()


# %% [markdown]
# ## Shard
#
# A layer first
# [merges](../zero3/layer.py#merge-parameters-and-pad-so-that-the-length-is-divisible-by-world-size)
# its parameters. `_merge_and_pad_params` concatenates them and appends zeros until the length is
# divisible by $N$. The result is the *flat parameter*. Rank $r$ keeps the $r$-th part of it, its
# *shard*. A cut may fall anywhere, even in the middle of a row of a matrix.

# %%
answers = run("worker_03:merged", N)
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
for rank, (text, shape, error) in enumerate(run("worker_03:touched", N)):
    if rank == 0:
        print(f"{text}, shape {shape}\n\n{error}")
    assert shape == (3, 4) and f"rank {rank}: Linear freed `weight`" in error

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
answers = run("worker_03:opened", N)
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
# [`Ledger`](../zero3/measure/ledger.py#the-tape) shows them one by one. First the parameters are
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
for i, (kind, color) in enumerate({"shard": "#31a354", "full parameters": "#2171b5",
                                   "full gradient": "#fd8d3c",
                                   "shard's gradient": "#756bb1"}.items()):
    widths = [held[i] for _, held in notes]
    ax.barh(range(len(notes)), widths, left=left, color=color, label=kind)
    left = [a + b for a, b in zip(left, widths, strict=True)]
ax.axvline(2 * 4 * P, color="#737373", linestyle="--", linewidth=1)
ax.text(2 * 4 * P + 1, 0, "plain: weights and gradients", fontsize=8, va="center")
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
# Each rank has computed with its own rows, and its loss is the mean over them. The loss on the
# global batch is the mean over all rows, so its gradient is the mean of the ranks' gradients. Each
# rank divides its gradient by $N$ before it sends it, so the sum over ranks is that mean.
# Concatenated, the shards' gradients equal the gradient of plain PyTorch on the whole batch, and
# the gradient of the padding is zero:

# %%
(right,) = run("worker_03:plain", 1, N)
by_hand = torch.cat([grad for *_, grad in answers])
print("plain  ", [round(value, 3) for value in right.tolist()])
print("shards ", [round(value, 3) for value in by_hand.tolist()])
torch.testing.assert_close(by_hand[:P], right, rtol=1e-5, atol=1e-5)
assert (by_hand[P:] == 0).all()

# %% [markdown]
# ## Automatically
#
# `layer(x)` and `backward()` do all this themselves. In backward nobody calls the layer, so it
# registers hooks. One on each output runs when the gradient of that output is ready, and announces
# the layer's backward pass. One on each parameter runs when the gradient of that parameter is
# complete. Here are the events of the layer, followed by the same gradient, bit by bit:

# %%
by_itself = run("worker_03:itself", N)
for phase, event, live_bytes in by_itself[0][0]:
    print(f"{phase:9} {event:9} then the layer holds {live_bytes:4} bytes")
same = torch.equal(torch.cat([grad for _, grad in by_itself]), by_hand)
print("\nthe same bits as by hand:", same)
assert same and all(tape == by_itself[0][0] for tape, _ in by_itself)
assert max(live_bytes for *_, live_bytes in by_itself[0][0]) == highest

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

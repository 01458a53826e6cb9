# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # One layer, opened up
#
# **Question**: a rank has a part of a layer's weights, and computes with all of them. Where are the
# others when it does not compute, and how does autograd find them again?
#
# A `Zero3Layer` goes through the same few calls in every step. Here we make them ourselves, one by
# one, on an `nn.Linear` with numbers that can be read, and look at what the memory holds after
# each.
#
# **Your prediction**: the layer has 15 parameters, 60 bytes. How many bytes of it does each of two
# ranks hold between two steps? And how many at the highest moment of a step: fewer than plain
# PyTorch, which holds 60 bytes of weights and 60 of gradients, as many, or more?
#
# This notebook belongs to [`layer.py`](../zero3/layer.py#zero3-layer).

# %%
# %matplotlib inline
import torch
from matplotlib.figure import Figure

from zero3.train.launch import default_ranks, preload, run

preload("zero3.layer")
N = default_ranks()
P = 4 * 3 + 3  # parameters of nn.Linear(4, 3)
SHARD = -(-P // N)  # elements of each rank
print(f"{P} parameters, {4 * P} bytes. {N} ranks: shards of {SHARD} elements, and padding of "
      f"{N * SHARD - P}")

# %% [markdown]
# The code that runs on the ranks. `opened` is the one to read: it does with a layer what the
# layer's `forward` and its hooks do, and after each call it notes the bytes of four storages.

# %% tags=["varies"]
# %%writefile worker_03.py
import torch
import torch.distributed as dist
from torch import nn

from zero3 import Zero3Layer
from zero3.measure.ledger import Ledger
from zero3.train.launch import my_device

ROWS = 4  # of each rank


def readable():
    """A layer with the weights 1 to 12 and the biases 13 to 15."""
    linear = nn.Linear(4, 3)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(1, 13).view(3, 4))
        linear.bias.copy_(torch.arange(13, 16))
    return linear.to(my_device())


def inputs(ranks):
    """The global batch, of small whole numbers: the same on every rank."""
    torch.manual_seed(0)
    return torch.randint(-2, 3, (ROWS * ranks, 4)).float().to(my_device())


def my_inputs():
    return inputs(dist.get_world_size()).chunk(dist.get_world_size())[dist.get_rank()]


def mean_loss(out):
    return out.square().sum() / (2 * len(out))


def plain(ranks):
    """What is right: plain PyTorch on the global batch, and the gradient as one vector."""
    linear = readable()
    mean_loss(linear(inputs(ranks))).backward()
    return torch.cat([p.grad.flatten() for p in linear.parameters()]).cpu()


def merged():
    layer, linear = Zero3Layer(readable()), readable()
    flat = layer._merge_and_pad_params(list(linear.parameters()))
    return flat.tolist(), layer.flats[0].shard.tolist()


def touched():
    """What a freed parameter answers."""
    linear = readable()
    Zero3Layer(linear)
    try:
        linear.weight + 1
    except RuntimeError as error:
        return repr(linear.weight), tuple(linear.weight.shape), str(error)


def opened():
    linear, ranks = readable(), dist.get_world_size()
    layer = Zero3Layer(linear)
    group, notes = layer.flats[0], []

    def note(call):
        tensors = group.shard, group.full, group.grad, group.shard.grad
        notes.append((call, [0 if t is None else t.untyped_storage().nbytes() for t in tensors]))

    note("at rest")
    storage = group.full.untyped_storage()._cdata

    # Forward
    layer.fetch_params()
    note("fetch_params()")
    layer._wait_params()
    weights = linear.weight.flatten().tolist() + linear.bias.tolist()
    out = linear(my_inputs())  # the module itself, which knows nothing of shards
    note("linear(x)")
    layer._cleanup_params()
    note("_cleanup_params()")

    # Backward: autograd has kept views of the flat buffer, so they are filled again.
    layer.fetch_params()
    layer._wait_params()
    note("fetch, wait")
    params = [slot.param for slot in group.slots]
    group.grad = layer._empty(len(group.full), group.shard.dtype).zero_()
    for slot, grad in zip(group.slots, torch.autograd.grad(mean_loss(out), params), strict=True):
        slot.of(group.grad).copy_(grad * (1 / ranks))
        group.ready.add(slot.names)
    note("gradients")

    # Reduce
    with Ledger(layer) as tape:
        layer._backup_grads()
    note("_backup_grads()")
    same = storage == group.full.untyped_storage()._cdata
    events = [(e.event, e.bytes, e.live_bytes) for e in tape.events]
    return notes, weights, same, events, group.shard.grad.cpu()


def itself():
    """The same in two lines."""
    layer = Zero3Layer(readable())
    with Ledger(layer) as tape:
        mean_loss(layer(my_inputs())).backward()
    return [(e.phase, e.event, e.live_bytes) for e in tape.events], layer.flats[0].shard.grad.cpu()


# %% [markdown]
# ## Shard
#
# `_merge_and_pad_params`
# ([here](../zero3/layer.py#merge-parameters-and-pad-so-that-the-length-is-divisible-by-world-size))
# lays all parameters one after the other, and adds zeros until the length can be divided by $N$.
# The result is the *flat parameter*, and rank $r$ keeps the $r$-th part of it: its *shard*. A cut
# goes wherever it falls, also through a row of a matrix.

# %%
answers = run("worker_03:merged", N)
print("flat parameter", [int(value) for value in answers[0][0]])
for rank, (flat, shard) in enumerate(answers):
    print(f"shard of rank {rank}", [int(value) for value in shard])
    assert flat == [*range(1, P + 1), *[0] * (N * SHARD - P)]
    assert shard == flat[rank * SHARD : (rank + 1) * SHARD]

# %% [markdown]
# The module's weight and bias were views of the flat parameter, and still are, but the storage
# under it has been resized to nothing. An operation on such a view would read address zero and end
# the process. So while a layer is sharded its parameters are of a
# [class](../zero3/offload.py#a-parameter-whose-memory-is-given-back) that answers what needs no
# element, and for anything else raises an error which says whose parameter this is:

# %%
for rank, (text, shape, error) in enumerate(run("worker_03:touched", N)):
    if rank == 0:
        print(f"{text}, shape {shape}\n\n{error}")
    assert shape == (3, 4) and f"rank {rank}: Linear freed `weight`" in error

# %% [markdown]
# ## Unshard, compute, reshard; and again for backward
#
# Now the whole step. Each line below is what this rank holds after a call, in bytes.
#
# * [`fetch_params`](../zero3/layer.py#unshard-all-gather) gives the flat parameter its memory back
#   and starts the all-gather, and `_wait_params` completes it
# * [`_cleanup_params`](../zero3/layer.py#reshard-free) resizes the storage to nothing
# * [`_backup_grads`](../zero3/layer.py#reshard-and-reduce-scatter-the-gradients) frees the
#   parameters, and reduce-scatters the gradients
#
# Backward is the first place to be careful. Autograd has kept the weight for it: not a copy, but a
# view of the flat parameter, whose memory went in between. It works because the next all-gather
# fills the *same storage*. To replace it by a new tensor would leave autograd with the old one.

# %%
answers = run("worker_03:opened", N)
notes, *_ = answers[0]
print(f"{'':18}{'shard':>10}{'full':>10}{'gradient':>10}{'its shard':>10}{'all':>10}")
for call, held in notes:
    print(f"{call:18}" + "".join(f"{nbytes:>10}" for nbytes in [*held, sum(held)]))

shard_bytes, full_bytes = 4 * SHARD, 4 * N * SHARD
assert [held for _, held in notes] == [
    [shard_bytes, 0, 0, 0], [shard_bytes, full_bytes, 0, 0], [shard_bytes, full_bytes, 0, 0],
    [shard_bytes, 0, 0, 0], [shard_bytes, full_bytes, 0, 0],
    [shard_bytes, full_bytes, full_bytes, 0], [shard_bytes, 0, 0, shard_bytes]]
for other, weights, same, _, _ in answers:
    assert other == notes  # on all ranks
    assert weights == [*range(1, P + 1)] and same
print("\nwhole weights while it computed, and the same storage as before, on all ranks: True")

# %% [markdown]
# From outside one does not see what happens within `_backup_grads`. The
# [`Ledger`](../zero3/measure/ledger.py#the-tape) does: the parameters go first, and on the CPU the other
# ranks' gradients then arrive in the very memory that they had.

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
print(f"at rest {sum(notes[0][1])} bytes, at the highest moment {highest}; plain PyTorch "
      f"{2 * 4 * P} with gradients")
assert highest > 2 * 4 * P

# %% [markdown]
# **Measured**: between two steps a rank has its part. At the highest moment it holds *more* than
# plain PyTorch: the whole layer, its whole gradient, and the shard too. One sharded layer alone
# saves nothing at its peak. The saving is in the others: while this layer is whole, each other
# layer of the model is a shard. So the layers to wrap are many and of moderate size.
#
# ## The same gradient
#
# Each rank has computed with its own rows. Its loss is the mean over these, so the gradient of the
# mean over all rows is the mean of the ranks' gradients. Each gradient is divided by $N$ before it
# is sent, and the sum of what arrives is that mean. Put together, the shards' gradients are what
# plain PyTorch finds on the whole batch, and the padding's gradient is zero:

# %%
(right,) = run("worker_03:plain", 1, N)
by_hand = torch.cat([grad for *_, grad in answers])
print("plain  ", [round(value, 3) for value in right.tolist()])
print("shards ", [round(value, 3) for value in by_hand.tolist()])
torch.testing.assert_close(by_hand[:P], right, rtol=1e-5, atol=1e-5)
assert (by_hand[P:] == 0).all()

# %% [markdown]
# ## Without hands
#
# `layer(x)` and `backward()` do all this by themselves. Nothing calls the layer in backward, so it
# leaves hooks: one on each output, whose gradient announces that its backward begins, and one on
# each parameter, which comes when that parameter's gradient is complete. These are its events, and
# below them the same gradient, to the bit:

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
# In the worker's cell, take the mean out: `.copy_(grad)` instead of `.copy_(grad * (1 / ranks))`.
# Run all again. What do the shards' gradients become, and why might you train a model for weeks
# with AdamW before you notice?
#
# <details><summary>Answer</summary>
#
# They are $N$ times too large, and the comparison with plain PyTorch fails. SGD would take steps
# $N$ times as long, which shows. Adam divides the mean gradient by the root of the mean square
# gradient, so a constant factor nearly cancels: losses look right. A clip of the gradient's norm,
# though, would begin at an $N$-th of the norm that was asked for. This is why the tests compare
# weights with a large `eps`, and not only losses.
#
# </details>
#
# **In the source**: this order is the order of [`layer.py`](../zero3/layer.py#zero3-layer), from
# [shard](../zero3/layer.py#shard-make-parameters-views-of-one-flat-buffer-keep-1-n-of-it-free-it)
# to [add](../zero3/layer.py#add-the-reduced-gradients-to-the-shards). Next: [a
# transformer](04_a_transformer.ipynb) of such layers.

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A transformer in shards
#
# **Question**: a chain of sharded layers, a real model, several ranks. Does it train to what one
# process trains to, and what does it hold and send on the way?
#
# `Zero3Sequential` links the layers, so that each is unsharded while the one before it computes.
# The model is a small GPT that reads and predicts bytes. Everything here is done in the order of
# the whole project: predict, run, measure, compare.
#
# **Your prediction**, for a model in fp32 with Adam, on two ranks. Compared with plain data
# parallelism, which part does a rank hold between two steps: a half, less, more? And at the highest
# moment of a step? And will each layer be gathered twice?
#
# This notebook belongs to the
# [chain](../zero3/layer.py#a-chain-of-layers-each-unsharded-while-the-one-before-computes).

# %%
# %matplotlib inline
import textwrap

import torch

from zero3.estimate.formulas import describe
from zero3.estimate.predict import data_parallel, predict
from zero3.guards.version import commit_name
from zero3.train.gpt import GPTConfig, gpt_layers
from zero3.train.launch import default_ranks, preload, run
from zero3.train.report import device_name, draw_tape, table

preload("zero3.train.gpt", "torch._dynamo")
N, STEPS = default_ranks(), 10
config = GPTConfig(seq_len=32, d_model=64, n_layers=3, d_ff=128)

# %% [markdown]
# ## Predict
#
# What the formulas need of a layer is its number of parameters and their width. Embedding, blocks
# and head are a layer each:

# %%
modules = gpt_layers(config)
layers = describe(modules)
for i, (module, layer) in enumerate(zip(modules, layers, strict=True)):
    (part,) = layer.parts
    numel = part.shard_numel(N)
    print(f"layer {i}, {type(module).__name__:10}{part.numel:8,} parameters, {numel:7,} on each of "
          f"{N} ranks, {N * numel - part.numel} padding")
psi = sum(layer.parts[0].numel for layer in layers)
print(f"{'all':19}{psi:8,}")

# %% [markdown]
# On the CPU the ranks send each other messages, which need a receive buffer; NCCL adds in place. This is
# all that `predict` has to know of the machine.

# %%
on_gpus = torch.cuda.device_count() >= N
predicted = predict(layers, N, by_messages=not on_gpus)
plain = data_parallel(layers, N)
for name in ("rest_bytes", "peak_bytes", "sent_bytes"):
    ours, theirs = getattr(predicted, name), getattr(plain, name)
    print(f"{name:11}{ours:10,}, data parallel {theirs:10,}: {ours / max(theirs, 1):.2f} of it")

# %% [markdown]
# ## Run
#
# `sharded` is all there is to do: wrap each layer, chain them, and build any elementwise optimizer
# on this rank's shards. `alone` is the same in plain PyTorch, with the rows of all ranks in one
# batch. The tape listens to the last step.

# %% tags=["varies"]
# %%writefile worker_04.py
import torch
import torch.distributed as dist
from torch import nn

from zero3 import Zero3Layer, Zero3Sequential
from zero3.measure.ledger import Ledger, held_bytes
from zero3.train.gpt import global_batch, gpt_layers, load_bytes, next_byte_loss
from zero3.train.launch import my_device

ROWS = 4  # of each rank, in a step
# By default a GPU's convolutions round fp32 to 10 bits. One process and several would round other
# sums, and 3 decimals would not be left.
torch.backends.cudnn.allow_tf32 = False


def new_layers(config):
    torch.manual_seed(0)
    return [layer.to(my_device()) for layer in gpt_layers(config)]


def train(model, params, config, steps, ranks, rank=None):
    """Returns losses, and the tape of the last step; `rank` has its rows of each batch, or all."""
    optimizer, text = torch.optim.AdamW(params, lr=3e-3), load_bytes()
    losses = []
    for step in range(steps):
        windows = global_batch(text, step, ROWS * ranks, config.seq_len).to(my_device())
        windows = windows if rank is None else windows.chunk(ranks)[rank]
        with Ledger(model, optimizer) as tape:
            loss = next_byte_loss(model, windows)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses, tape, held_bytes(model, optimizer)


def sharded(config, steps):
    model = Zero3Sequential([Zero3Layer(layer) for layer in new_layers(config)])
    rank, ranks = dist.get_rank(), dist.get_world_size()
    params = model.get_trainable_chunk()
    losses, tape, rest_bytes = train(model, params, config, steps, ranks, rank)
    measured = {"rank": rank, "rest_bytes": rest_bytes, "peak_bytes": tape.peak_live_bytes,
                "sent_bytes": tape.sent_bytes}
    return losses, measured, tape.events


def alone(config, steps, ranks):
    model = nn.Sequential(*new_layers(config))
    return train(model, model.parameters(), config, steps, ranks)[0]


# %%
answers = run("worker_04:sharded", N, config, STEPS)
(right,) = run("worker_04:alone", 1, config, STEPS, N)
# A rank's loss is the mean of its rows; the mean over ranks is that of all rows.
losses = [sum(step) / N for step in zip(*(losses for losses, *_ in answers), strict=True)]
print(f"step   one process   {N} ranks, in shards")
for step in (0, 1, 2, 4, STEPS - 1):
    print(f"{step:4}{right[step]:14.3f}{losses[step]:20.3f}")
farthest = max(abs(a - b) for a, b in zip(losses, right, strict=True))
print("the same to 3 decimals:", farthest < 5e-4)
assert farthest < 5e-4 and losses[-1] < losses[0] - 0.5

# %% [markdown]
# **Measured**: the same losses. Sharding changes where numbers are, not which numbers. They are not
# the same *bits* as one process has, because a sum over ranks adds in another order than a sum over
# rows. Plain data parallelism on two ranks adds like `zero3`, and there a
# [test](../tests/test_equality.py) finds the same bits.
#
# ## Compare
#
# What each rank held between two steps, at the highest moment of a step, and sent in it:

# %%
measured = [held for _, held, _ in answers]
print(table([predicted] * N, plain, measured))
for held in measured:
    for name in ("rest_bytes", "peak_bytes", "sent_bytes"):
        assert held[name] == getattr(predicted, name)

# %% [markdown]
# **Measured**: equal, to the byte. Between two steps it is the $N$-th part, as promised; the few
# bytes more are padding and Adam's counts of steps. The peak has saved less, for in so small a
# model two layers and a gradient are a large part; the exercise goes on from here. And the bytes
# sent are not quite one and a half times those of data parallelism. The tape knows why:

# %%
events = answers[0][2]


def layer_of(event):
    return int(event.layer.split()[1])


last = len(layers) - 1
for i in range(len(layers)):
    counts = {name: sum(e.event == name and layer_of(e) == i for e in events)
              for name in ("fetch", "reduce")}
    print(f"layer {i}: all-gathers {counts['fetch']}, reduce-scatters {counts['reduce']}")
    assert counts == {"fetch": 1 if i == last else 2, "reduce": 1}
sent = 4 * (N - 1) * sum((3 - (i == last)) * layer.parts[0].shard_numel(N)
                         for i, layer in enumerate(layers))
print(f"{sent:,} bytes of each rank")
assert sent == predicted.sent_bytes

# %% [markdown]
# Backward begins where forward ends. So the last layer [stays
# full](../zero3/layer.py#reshard-or-stay-full-where-that-saves-a-gather) and saves its second
# gather.
#
# ## The order
#
# An unshard takes time, and the point of a chain is to hide it. **Your prediction**: put into
# order, forward, "fetch layer 1", "compute layer 0", "free layer 0", "compute layer 1".

# %%
for phase in ("forward", "backward"):
    order = [f"{e.event} {layer_of(e)}" for e in events if e.phase == phase]
    print(textwrap.fill(f"{phase}: " + ", ".join(order), 96, subsequent_indent="  "), end="\n\n")

at = {(e.phase, e.event, layer_of(e)): i for i, e in enumerate(events)}
for i in range(last):
    # Forward, the next layer's unshard starts before this one computes ...
    assert at["forward", "fetch", i + 1] < at["forward", "compute", i]
    # ... and this one is freed before the next computes.
    assert at["forward", "free", i] < at["forward", "compute", i + 1]
for i in range(1, last):
    # Backward, the layer below is on its way before this one has a gradient,
    assert at["backward", "fetch", i - 1] < at["backward", "gradients", i]
    # and this one's reduce ends only when that of the layer below begins.
    assert at["backward", "gradients", i - 1] < at["backward", "reduced", i]
    assert at["backward", "reduced", i] < at["backward", "reduce", i - 1]
for _, _, other in answers:
    assert [(e.event, e.layer) for e in other] == [(e.event, e.layer) for e in events]

# %% [markdown]
# **Measured**: each transfer starts as early as it can and is waited for as late as it can be.
# While a layer computes, forward, the next one arrives; backward, the one below arrives and the
# gradients of the one above leave. All ranks do the same in the same order, or they would wait for
# each other for ever.
#
# ## The tape
#
# The same events, drawn. Above, what a rank holds: up where a layer is gathered, down where it is
# freed. Below, which layer it is.

# %%
device = torch.device("cuda", 0) if on_gpus else torch.device("cpu")
caption = f"One step on {N} ranks, {device_name(device)}, torch {torch.__version__}, {commit_name()}"
fig = draw_tape([tape for *_, tape in answers], [predicted] * N, plain, caption)
fig.set_dpi(80)
fig

# %% [markdown]
# ## Exercise
#
# Make the model deeper, and let `predict` say what it needs; nothing has to run. The last column is
# what the peak has beyond an $N$-th of data parallelism's. Why does it stop growing (but for
# padding)? How deep does the model have to be until it is less than a tenth of that $N$-th?

# %%
print(f"blocks   at the peak   data parallel   beyond 1/{N} of it")
beyond = {}
for n_layers in (1, 2, 3, 6, 12):  # go on
    deep = describe(gpt_layers(GPTConfig(seq_len=32, d_model=64, n_layers=n_layers, d_ff=128)))
    # Adam's counts left out: 4 bytes for each layer.
    need = predict(deep, N, by_messages=not on_gpus, step_bytes=0)
    whole = data_parallel(deep, N)
    beyond[n_layers] = need.peak_bytes - whole.peak_bytes // N
    print(f"{n_layers:6}{need.peak_bytes:14,}{whole.peak_bytes:16,}{beyond[n_layers]:20,}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Everything that rests is cut into $N$ parts, and so are the gradients of the shards, which gather
# while backward goes on. What is left are the layers that are whole at the highest moment, the one
# that computes and the one that arrives, and the full gradients that are being filled and sent.
# That depends on the size of two layers, not on how many there are. Each further block adds 16
# bytes for each of its parameters to data parallelism's peak, and an $N$-th of that to ours. So
# with depth the peak, too, comes to an $N$-th; it is within a tenth when the $N$-th has grown to
# ten times the last column.
#
# </details>
#
# **In the source**: the [walk](../zero3/layer.py#walk-the-layers-one-unshard-ahead) of a chain;
# [what announces
# backward](../zero3/layer.py#a-gradient-of-an-output-is-here-this-layer-s-backward-begins); the
# [formulas](../zero3/estimate/predict.py#predict-the-same-bytes-from-shapes) and the
# [tape](../zero3/measure/ledger.py#the-tape); the model is
# [`gpt.py`](../zero3/train/gpt.py#a-byte-level-gpt-as-a-list-of-layers). `make train` trains a larger one
# for some minutes, until it writes text. Next: [where shards rest](05_offload.ipynb) when the
# device has no room for them.

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # A transformer in shards
#
# **Question**: a real model is sharded layer by layer over several ranks. Does training give the
# same losses as on one process, and how many bytes does a rank hold and send?
#
# `Zero3Sequential` links the layers, so that each layer is prefetched while the previous one
# computes. The model is a small GPT that reads and predicts bytes. This notebook goes through the
# steps of the whole project: predict, run, measure, compare.
#
# **Your prediction**, for a model in fp32 with Adam, on two ranks: how much does a rank hold
# between two steps, compared with plain data parallelism? A half, less, more? And at the highest
# moment of a step? Is each layer gathered twice?
#
# This notebook belongs to the
# [chain](../zero3/layer.py#a-chain-of-layers-each-gathered-while-the-one-before-it-computes).

# %%
# %matplotlib inline
import textwrap

import torch

from zero3 import commit_name
from zero3.estimate.formulas import describe
from zero3.estimate.predict import data_parallel, predict
from zero3.train.gpt import GPTConfig, gpt_layers
from zero3.train.launch import default_ranks, preload, run
from zero3.train.report import device_name, draw_tape, table

preload("zero3.train.gpt", "torch._dynamo")
N, STEPS = default_ranks(), 10
config = GPTConfig(seq_len=32, d_model=64, n_layers=3, d_ff=128)

# %% [markdown]
# ## Predict
#
# The formulas need the number of parameters of each layer, and their data types. The embedding,
# each block and the head are one layer each:

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
# On the CPU, a reduce-scatter needs a receive buffer for the messages of the other ranks. NCCL
# needs none. `predict` has to know nothing else about the machine.

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
# `sharded` wraps each layer, chains the layers, and builds an optimizer on this rank's shards. Any
# elementwise optimizer will do. `alone` is the same training in plain PyTorch, with the rows of all
# ranks in one batch. A `Ledger` records each step on a tape, and the last tape is kept.

# %% tags=["varies"]
# %%writefile worker_04.py
import torch
import torch.distributed as dist
from torch import nn

from zero3 import Zero3Layer, Zero3Sequential
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.train.gpt import global_batch, gpt_layers, load_bytes, next_byte_loss
from zero3.train.launch import my_device

ROWS = 4  # of each rank, in a step
# By default a GPU's convolutions round fp32 to 10 bits. One process and several processes would
# then round different sums, and agree in fewer than 3 decimals.
torch.backends.cudnn.allow_tf32 = False


def new_layers(config):
    torch.manual_seed(0)
    return [layer.to(my_device()) for layer in gpt_layers(config)]


def train(model, params, config, steps, ranks, rank=None):
    """Returns losses and the tape of the last step. Trains on the rows of `rank`, or on all."""
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
# A rank's loss is the mean of its rows, so the mean over ranks is the mean of all rows.
losses = [sum(step) / N for step in zip(*(losses for losses, *_ in answers), strict=True)]
print(f"step   one process   {N} ranks, in shards")
for step in (0, 1, 2, 4, STEPS - 1):
    print(f"{step:4}{right[step]:14.3f}{losses[step]:20.3f}")
farthest = max(abs(a - b) for a, b in zip(losses, right, strict=True))
print("the same to 3 decimals:", farthest < 5e-4)
assert farthest < 5e-4 and losses[-1] < losses[0] - 0.5

# %% [markdown]
# **Measured**: the same losses. Sharding moves numbers to other ranks, and does not change them.
# Only the last *bits* differ from one process, because a sum over ranks adds in another order than
# a sum over rows. Plain data parallelism on two ranks adds in the same order as `zero3`, and a
# [test](../tests/test_equality.py) finds the same bits.
#
# ## Compare
#
# The bytes that each rank held between two steps, held at the highest moment of a step, and sent:

# %%
measured = [held for _, held, _ in answers]
print(table([predicted.as_dict()] * N, plain.as_dict(), measured))
for held in measured:
    for name in ("rest_bytes", "peak_bytes", "sent_bytes"):
        assert held[name] == getattr(predicted, name)

# %% [markdown]
# **Measured**: equal, to the byte. Between two steps a rank holds $\frac{1}{N}$ of the states, plus
# a few bytes of padding and Adam's step counts. The peak is reduced less, because two layers and a
# gradient are a large part of so small a model; the exercise continues from here. The bytes sent
# are a little less than one and a half times those of data parallelism. The tape shows the reason:

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
# Backward begins with the layer that forward ended with. So the last layer [stays
# full](../zero3/layer.py#reshard-unless-the-schedule-says-that-backward-needs-the-layer-at-once),
# which saves its second all-gather.
#
# ## The order of events
#
# An all-gather takes time, and a chain overlaps it with computation. **Your prediction**: in which
# order do these events happen in forward: "fetch layer 1", "compute layer 0", "free layer 0",
# "compute layer 1"?

# %%
for phase in ("forward", "backward"):
    order = [f"{e.event} {layer_of(e)}" for e in events if e.phase == phase]
    print(textwrap.fill(f"{phase}: " + ", ".join(order), 96, subsequent_indent="  "), end="\n\n")

at = {(e.phase, e.event, layer_of(e)): i for i, e in enumerate(events)}
for i in range(last):
    # In forward, the all-gather of the next layer starts before this one computes ...
    assert at["forward", "fetch", i + 1] < at["forward", "compute", i]
    # ... and this one is freed before the next one computes.
    assert at["forward", "free", i] < at["forward", "compute", i + 1]
for i in range(1, last):
    # In backward, the all-gather of the layer below starts before this one has a gradient,
    assert at["backward", "fetch", i - 1] < at["backward", "gradients", i]
    # and the reduce-scatter of this one finishes right before that of the layer below starts.
    assert at["backward", "gradients", i - 1] < at["backward", "reduced", i]
    assert at["backward", "reduced", i] < at["backward", "reduce", i - 1]
for _, _, other in answers:
    assert [(e.event, e.layer) for e in other] == [(e.event, e.layer) for e in events]

# %% [markdown]
# **Measured**: each transfer starts as early as possible, and a rank waits for it as late as
# possible. While a layer computes in forward, the next one is gathered. In backward, the layer
# below is gathered, and the gradients of the layer above are reduced. All ranks do this in the same
# order. Otherwise they would wait for each other for ever.
#
# ## The tape
#
# The picture shows the same events. The upper lines are the bytes that a rank holds: up when a
# layer is gathered, down when it is freed. The bars below show the layer.

# %%
device = torch.device("cuda", 0) if on_gpus else torch.device("cpu")
caption = f"One step on {N} ranks, {device_name(device)}, torch {torch.__version__}"
caption += f", {commit_name()}"
fig = draw_tape([tape for *_, tape in answers], [predicted.as_dict()] * N, plain.as_dict(), caption)
fig.set_dpi(80)
fig

# %% [markdown]
# ## Exercise
#
# Make the model deeper, and predict its bytes; nothing has to run. The last column is the
# difference between the peak and $\frac{1}{N}$ of data parallelism's peak. Why does it stop growing
# (except for padding)? How deep does the model have to be, until the difference is less than a
# tenth of that $\frac{1}{N}$?

# %%
print(f"blocks   at the peak   data parallel   beyond 1/{N} of it")
beyond = {}
for n_layers in (1, 2, 3, 6, 12):  # go on
    deep = describe(gpt_layers(GPTConfig(seq_len=32, d_model=64, n_layers=n_layers, d_ff=128)))
    # Without Adam's step counts, which are 4 bytes for each layer.
    need = predict(deep, N, by_messages=not on_gpus, step_bytes=0)
    whole = data_parallel(deep, N)
    beyond[n_layers] = need.peak_bytes - whole.peak_bytes // N
    print(f"{n_layers:6}{need.peak_bytes:14,}{whole.peak_bytes:16,}{beyond[n_layers]:20,}")

# %% [markdown]
# <details><summary>Answer</summary>
#
# All model states are sharded, and so are the gradients that backward leaves in the shards. The
# difference consists of the layers that are whole at the highest moment (one computes, and one is
# being gathered) and of the full gradients that are filled and sent. It depends on the size of two
# layers, and not on the number of layers. Each further block adds 16 bytes for each of its
# parameters to data parallelism's peak, and $\frac{1}{N}$ of that to ours. So in a deep model the
# peak, too, approaches $\frac{1}{N}$. It is within a tenth when $\frac{1}{N}$ of data parallelism's
# peak has grown to ten times the last column.
#
# </details>
#
# **In the source**: the [walk](../zero3/layer.py#walk-the-layers-one-all-gather-ahead) along a
# chain; the [hook that begins
# backward](../zero3/layer.py#the-gradient-of-an-output-is-here-this-layer-s-backward-begins); the
# [predictions](../zero3/estimate/predict.py#predict-the-same-bytes-from-shapes) and the
# [tape](../zero3/estimate/ledger.py#the-tape); and the model,
# [`gpt.py`](../zero3/train/gpt.py#a-byte-level-gpt-as-a-list-of-layers). `make train` trains a
# larger one for a few minutes, until it writes text. Next: [offload](05_offload.ipynb), for shards
# that do not fit on the device.

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Offload: where a shard rests
#
# **Question**: between two uses nobody computes with a shard. It may rest on the device, in CPU
# memory or in a file. What does the training notice of it?
#
# A rank needs a shard of the parameters twice in a step, to gather it forward and backward, and
# its optimizer states once. In between they are in nobody's way if they are elsewhere, as long as
# they are back in time. A *tier* is such a place. The chapter is
# [`offload.py`](../zero3/offload.py#offload-where-a-shard-rests); what a layer does with its shard
# was the subject of the [third notebook](03_one_layer.ipynb).
#
# Below is a chain of equal layers in bf16, with `Zero3Optimizer` and Adam. The parameters rest in
# one tier, and masters, moments and gradients in one that may be another.

# %% tags=["varies"]
# %%writefile worker_05.py
import tempfile

import torch
from torch import nn

from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.measure.ledger import Ledger, disk_bytes, held_bytes
from zero3.train.launch import my_device

WIDTH = 256


def build(folder, params_in, states_in, depth, **options):
    """A chain of `depth` layers, and its optimizer"""
    torch.manual_seed(0)
    # One object for all layers: they share its buffers.
    params, states = (Offload(tier, folder=folder, **options) if tier == "nvme" else Offload(tier)
                      for tier in (params_in, states_in))
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(depth)]
    model = Zero3Sequential([Zero3Layer(layer.to(my_device(), torch.bfloat16), offload=params)
                             for layer in layers])
    return model, Zero3Optimizer(model, torch.optim.AdamW, lr=1e-3, offload=states)


def train(params_in, states_in, depth=8, steps=4, **options):
    """Train, and tell losses, weights, bytes, and what happened in the last step"""
    # On a machine with an NVMe disk, `dir=` is a folder on it.
    with tempfile.TemporaryDirectory() as folder:
        model, optimizer = build(folder, params_in, states_in, depth, **options)
        torch.manual_seed(optimizer.comm.rank)  # each rank has rows of its own
        x = torch.randn(16, WIDTH).to(my_device(), torch.bfloat16)
        losses = []
        for _ in range(steps):
            with Ledger(model, optimizer) as tape:
                loss = (model(x) - 0.5).float().square().mean()
                optimizer.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        with model.full_params() as params:
            weights = torch.cat([p.flatten().cpu() for p in params.values()])
        return {"losses": losses, "weights": weights, "device": my_device().type,
                "memory": held_bytes(model, optimizer), "files": disk_bytes(model, optimizer),
                "read": tape.read_bytes, "written": tape.written_bytes,
                "predicted": optimizer.predict(), "events": tape.events}


# %% [markdown]
# ## Predict
#
# All shards, masters, moments and gradients of eight layers rest in files. Of the bytes that a
# rank had in memory before, how many are still there between two steps?
#
# 1. none,
# 2. less than a tenth,
# 3. more than half.
#
# And do the losses differ: from the first step on, in the last digits, or not at all?

# %%
import matplotlib.pyplot as plt
import torch
from torch import nn

from zero3.estimate.formulas import describe, efficiency, places
from zero3.estimate.predict import predict
from zero3.offload import Offload
from zero3.train import report
from zero3.train.launch import default_ranks, preload, run

preload("zero3.optimizer.stage3")
N = default_ranks()
PLACES = [("device", "device"), ("device", "cpu"), ("cpu", "cpu"), ("nvme", "nvme")]
found = {place: run("worker_05:train", N, *place) for place in PLACES}

print(f"{N} ranks; bytes of rank 0\n")
print(f"{'parameters':12}{'states':10}{'in memory':>12}{'in files':>12}{'read':>12}{'written':>12}"
      "   last loss")
for (params_in, states_in), ranks in found.items():
    mine = ranks[0]
    cells = "".join(f"{mine[key]:12,}" for key in ("memory", "files", "read", "written"))
    print(f"{params_in:12}{states_in:10}{cells}   {mine['losses'][-1]:.2f}")
    for rank in ranks:
        expected = rank["predicted"]
        assert rank["memory"] == expected.rest_bytes and rank["files"] == expected.disk_bytes
        assert (rank["read"], rank["written"]) == (expected.read_bytes, expected.written_bytes)

# %% [markdown]
# On a machine without a GPU the device's memory *is* the CPU's, and the first three rows are
# alike. With GPUs the sums stay what they are, and lie elsewhere.
#
# Each figure is what [`predict`](../zero3/estimate/predict.py#predict-the-same-bytes-from-shapes) says of
# it from the shapes alone; the cell stops where one is not. Now the numbers that were trained.

# %%
reference = found["cpu", "cpu"][0]
same_processor = PLACES if reference["device"] == "cpu" else PLACES[1:]
for place in same_processor:
    mine = found[place][0]
    equal = mine["weights"].equal(reference["weights"]) and mine["losses"] == reference["losses"]
    print(f"{place[0]:8}{place[1]:8} same bits: {equal}")
    assert equal

left = found["nvme", "nvme"][0]["memory"] / found["device", "device"][0]["memory"]
print(f"\nin memory with everything in files: {left:.0%} of what there was without")
assert left > 0.5

# %% [markdown]
# **Measured**: no bit differs. A tier moves numbers and computes none, so all that can change them
# is the processor that steps them: from CPU memory and from files that is the CPU, from the device
# it is the device. Where those are two, the first row may differ from the others in its last
# digits, and it is left out above.
#
# And with eight layers most of the memory is still there. Nothing rests in it, though. It is the
# [buffers](../zero3/offload.py#the-files-and-buffers-for-one-purpose-opened-with-the-first-use)
# through which files are read and written:
#
# $$\text{buffers} = 2 \cdot \text{largest shard} \; + \; 5 \cdot \text{largest states of a shard}$$
#
# ## What remains does not grow
#
# The formula has no number of layers in it. **Predict**: from how many of these layers on does it
# pay to have everything in files?

# %%
def rest_bytes(depth, tier, **options):
    """What a rank has in memory, from shapes: nothing runs"""
    layer = nn.Linear(256, 256, device="meta", dtype=torch.bfloat16)
    at = Offload(tier, folder="." if tier == "nvme" else None, **options)
    return predict(describe([layer] * depth), N, stage3=True, params_in=at, states_in=at).rest_bytes


print(f"{'layers':>6}{'in memory':>14}{'with files':>14}   measured")
for depth in (4, 8, 16):
    measured = run("worker_05:train", N, "nvme", "nvme", depth, 1)[0]["memory"]
    device, files = rest_bytes(depth, "device"), rest_bytes(depth, "nvme")
    print(f"{depth:6}{device:14,}{files:14,}   {'equal' if measured == files else measured}")
    assert measured == files
pays = next(d for d in range(1, 100) if rest_bytes(d, "nvme") < rest_bytes(d, "device"))
print(f"\nfiles save memory from {pays} layers on")
assert rest_bytes(100, "nvme") - rest_bytes(8, "nvme") == 92 * 4

# %% [markdown]
# **Measured**: the states of five layers are in buffers, whether there are eight layers or a
# hundred; what grows are the 4 bytes in which Adam counts the steps of a shard. A model of few
# layers has *more* in memory with files than without. Offload is for models that are deep, and one
# enormous layer is better cut in pieces.
#
# ## Back in time
#
# **Predict**: in forward, when does the read of layer 4 from its file begin: when layer 4 is
# called, while layer 3 computes, or earlier?
#
# The tape has what happened in the last step, in order. At each moment in which a layer begins to
# compute, we look which others are being gathered, and which are being read.

# %%
events = found["nvme", "nvme"][0]["events"]
number = {e.layer: int(e.layer.split()[1]) for e in events if e.phase != "step"}
gathering, reading, table = [], [], {}
for e in events:
    if e.phase == "forward" and e.event in ("read", "fetch", "compute"):
        layer = number[e.layer]
        if e.event == "read":
            reading.append(layer)
        elif e.event == "fetch":
            reading.remove(layer)
            gathering.append(layer)
        else:
            gathering.remove(layer)
            table[layer] = ([*gathering], [*reading])
            print(f"layer {layer} computes; asked for: gathers of {gathering}, reads of {reading}")
assert all(table[i] == ([i + 1], [i + 2]) for i in range(6))

# %% [markdown]
# **Measured**: two layers ahead: the read of layer 4 begins before layer 2 computes. The chain
# gathers one layer ahead, and [each gather asks for the file of the next
# one](../zero3/layer.py#unshard-all-gather). At the end of forward it is turned round: when the
# last layer is gathered, the file of the one before it is read, because backward comes to it next.
#
# The same for the whole step, in one picture. It has the order of events, not times.

# %%
fig, ax = plt.subplots(figsize=(10, 3.6), layout="constrained")
labels = sorted(number, key=number.get)
for label, what, first, last in report.spans(events):
    if label in number:
        color, height, below = report.STYLES[what]
        ax.barh(number[label] + below, last - first, left=first, height=height, color=color,
                zorder=2 + [*report.STYLES].index(what))
for phase in ("forward", "backward", "step"):
    at = [i for i, e in enumerate(events) if e.phase == phase]
    ax.axvspan(at[0], at[-1] + 1, color=report.SHADES[phase], zorder=0)
    ax.text((at[0] + at[-1]) / 2, -1, phase, ha="center", fontsize=9)
handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color, *_ in report.STYLES.values()]
ax.legend(handles, report.LEGEND, loc="upper left", bbox_to_anchor=(1, 1), fontsize=8,
          frameon=False)
ax.set_title(f"rank 0 of {N}, {reference['device']}: eight layers and their states in files",
             fontsize=9, loc="left", pad=18)
ax.set(xlabel="events of the last step, in order", yticks=range(8),
       yticklabels=[f"layer {i}" for i in range(8)], xlim=(0, len(events)))
ax.invert_yaxis()
ax.spines[["top", "right"]].set_visible(False)
plt.show()

# %% [markdown]
# Reads (purple) begin before the layer is whole (blue); in backward each gradient goes to its file
# as soon as it is reduced (pink), and the states with which the step begins are asked for before
# backward is over. The step itself is a
# [pipeline](../zero3/optimizer/states.py#the-states-of-a-shard-master-moments-gradient-and-where-they-rest):
# one shard is stepped (green) while others are read and written.
#
# ## What a tier costs
#
# Memory is not the price, bytes on the way are. **Predict**: with everything in files, how many
# bytes does a step read and write for each parameter of a shard? A parameter has 2 bytes, its
# gradient 2, its master and its moments 12.

# %%
nvme, numel = found["nvme", "nvme"][0], 8 * -(-(256 * 256 + 256) // N)
told = places(numel * N, N)[-1].step_bytes["nvme"]
measured = (nvme["read"] + nvme["written"]) / numel
print(f"formula:  {told / numel:.1f} bytes for each parameter of a shard")
print(f"measured: {measured:.1f}")
assert told / numel == 34

# %% [markdown]
# The formula adds up the shard, $2 + 2$ read and $2$ written, and master, moments and gradient,
# $14$ read and $14$ written. In the run the last layer is not gathered twice, and [what is in a
# buffer still is not read again](../zero3/offload.py#tensors-that-rest-in-a-file), which makes it
# less; and files are in whole blocks of 4096 bytes, which makes it more, where shards are small.
#
# Whether anybody notices depends on how much is computed for each byte. With $T$ tokens of a rank
# in a step, where nothing hides a transfer,
#
# $$\text{efficiency} = \frac{\text{ait} \cdot \text{bw}}{\text{ait} \cdot \text{bw} +
# \text{peak}} \qquad \text{ait} = T \text{ for parameters and gradients, } \frac{T}{4}
# \text{ for optimizer states}$$
#
# **Predict**: a disk gives 3 GB/s to a rank, a device computes at 70 Tflop/s, and a rank has 8,192
# tokens in a step. What is left of the speed?

# %%
PEAK, DISK, CPU = 70e12, 3e9, 25e9  # flops, and bytes, in a second
print("what is left of the speed, if nothing hides the transfer\n")
print(f"{'tokens':>10}{'parameters':>22}{'optimizer states':>22}")
print(f"{'':10}{'from cpu':>11}{'files':>11}{'from cpu':>11}{'files':>11}")
for tokens in (8_192, 65_536, 524_288):
    row = [efficiency(ait, speed, PEAK) for ait in (tokens, tokens / 4) for speed in (CPU, DISK)]
    print(f"{tokens:10,}" + "".join(f"{part:11.0%}" for part in row))
assert efficiency(8192 / 4, DISK, PEAK) < 0.1 < 0.9 < efficiency(524288 / 4, CPU, PEAK)

# %% [markdown]
# **Answer**: a tier changes no number that is trained. What it costs is bytes that move, and those
# are the same for a small batch and for a large one; so the way to afford a slow tier is to
# compute more for each step. The three speeds above are round figures: `python -m zero3.offload
# bench --folder DIR` measures your disk, and `python -m zero3.estimate --model 8b --ranks 1 --gpu
# 80GB --cpu 128GB --nvme 1TB` says which tiers a model needs. The formula is
# [`efficiency`](../zero3/estimate/formulas.py#estimate-the-papers-formulas), from ZeRO-Infinity.
#
# ## Exercise
#
# `Offload(..., buffers=3)` has three shards' states in memory at once, and not five. By how many
# bytes does a rank's memory shrink in the chain above? Say it as a formula first: a shard has $S =
# \lceil P_\ell / N \rceil$ elements, and a buffer has whole blocks of 4096 bytes and one block
# more, to begin at an address that the disk likes.

# %%
mine = None  # your number of bytes

truth = rest_bytes(8, "nvme") - rest_bytes(8, "nvme", buffers=3)
print("not answered yet" if mine is None else "right" if mine == truth else "another number")

# %% [markdown]
# <details><summary>Answer</summary>
#
# Two buffers less. A buffer holds the master, two moments and the gradient, each in whole blocks:
# with $b(n) = 4096 \lceil n / 4096 \rceil$ it has $3\,b(4S) + b(2S) + 4096$ bytes.
#
# ```python
# S = -(-(256 * 256 + 256) // N)
# b = lambda n: -(-n // 4096) * 4096
# mine = 2 * (3 * b(4 * S) + b(2 * S) + 4096)
# ```
#
# It costs time and no bits: with three buffers one is written from, one is stepped in, and one
# alone is left to read ahead into. And of what backward had, less is still there for the step, so
# a little more is read.
# </details>
#
# Next: [what is in those states, and why](06_optimizer.ipynb).

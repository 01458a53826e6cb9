# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Pipelines: stages that are sharded, too
#
# **Question**: a pipeline cuts a model into stages, and a batch into micro-batches. With ZeRO-3 the
# layers of a stage are sharded, so each micro-batch would gather them again, in forward and in
# backward. How often does a stage really have to be gathered?
#
# We use four ranks: [two places in the pipeline, and two shards of each
# stage](../zero3/pipeline/pipeline.py#pipeline-train-a-model-in-stages-each-of-them-sharded). The
# model has eight layers of the same size.

# %% tags=["varies"]
# %%writefile worker_10.py
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zero3 import Zero3Optimizer
from zero3.estimate.ledger import Ledger
from zero3.pipeline import Pipeline
from zero3.pipeline.schedules import KINDS, Action
from zero3.train.launch import my_device

WIDTH = 64
DEPTH = 8


def make_layers():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).to(my_device())
            for _ in range(DEPTH)]


def train_all(cases):
    mesh = init_device_mesh(my_device().type, (2, 2), mesh_dim_names=("pipeline", "shard"))
    return [train(mesh, *case) for case in cases]


def train(mesh, schedule, micro_batches, per_rank, gathers):
    """A step on two pipelines of two ranks, and the same step with plain PyTorch"""
    model = Pipeline(make_layers(), mesh, loss_fn=nn.functional.mse_loss, schedule=schedule,
                     micro_batches=micro_batches, per_rank=per_rank, gathers=gathers)
    # No buckets: one would hold the gradients of all these small layers.
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.5, bucket_bytes=0)
    plain = nn.Sequential(*make_layers())
    oracle = torch.optim.SGD(plain.parameters(), lr=0.5)
    x = torch.randn(4 * micro_batches, WIDTH).to(my_device())  # the global batch
    mine = x.chunk(2)[mesh.get_local_rank("shard")]
    with Ledger(model, optimizer) as tape:
        model.train_batch(mine, mine, optimizer)
    optimizer.step()
    nn.functional.mse_loss(plain(x), x).backward()
    oracle.step()
    with model.full_params() as params:
        off = max((p - params[n]).abs().max().item() for n, p in plain.named_parameters())
    return {"done": done(tape), "off": off, "peak": tape.peak_live_bytes, "sent": sent(tape)}


def done(tape):
    """What this rank has done, in the order in which it was recorded"""
    found = []
    for e in tape.events:
        if e.event in KINDS and e.layer.startswith("stage"):
            stage, _, number = e.layer.removeprefix("stage ").partition(", micro-batch ")
            found.append(Action(e.event, int(stage), int(number or -1)))
    return found


def sent(tape):
    """Bytes that this rank has sent"""
    kinds = {"fetch": "gathers", "reduce": "reduces", "send": "activations",
             "send gradient": "activations"}
    found = dict.fromkeys(kinds.values(), 0)
    for e in tape.events:
        if e.event in kinds:
            found[kinds[e.event]] += e.sent_bytes
    return found


# %% [markdown]
# ## Predict: a step of two stages
#
# Ranks 0 and 1 share the first stage, and ranks 2 and 3 the second. Let a forward and a backward
# pass through a stage take one slot each. `F0` is the forward pass of micro-batch 0, `B0` its
# backward pass. Rank 2 computes F0 when rank 0 has sent its activations, and rank 0 computes B0
# when rank 2 has sent their gradients.
#
# **Predict**: with four micro-batches, in which order does rank 0 compute? It should go back as
# early as possible, because activations are kept until then. In how many slots does it wait?

# %%
# %matplotlib inline
import matplotlib.pyplot as plt

from zero3.pipeline.schedules import PASSES, actions
from zero3.pipeline.timeline import bubble, costs, timeline
from zero3.train.launch import preload, run
from zero3.train.report import COLORS, NEUTRAL

preload("zero3.pipeline.pipeline", "zero3.estimate.ledger")
M = 4
ranks = [found[0] for found in run("worker_10:train_all", 4, [("1f1b", M, 1, "stage")])]


def short(action):
    """"F0" for the forward pass of micro-batch 0"""
    return f"{action.kind[0].upper()}{action.micro_batch}"


for rank, found in enumerate(ranks):
    print(f"rank {rank}, stage {rank // 2}:",
          *(short(each) for each in found["done"] if each.kind in PASSES))
# The ranks have done what the list says, no more and no less, in this order.
assert [ranks[0]["done"], ranks[2]["done"]] == actions("1f1b", 2, M)
assert ranks[0]["done"] == ranks[1]["done"] and ranks[2]["done"] == ranks[3]["done"]

times = timeline([ranks[0]["done"], ranks[2]["done"]])
slots = max(each.end for passes in times for each in passes)
print(f"\n{slots} slots; each rank computes in {2 * M} of them: {bubble(times):.0%} is bubble")
print(f"largest difference from plain PyTorch: {max(rank['off'] for rank in ranks):.0e}")
assert slots == 2 * (M + 1) and max(rank["off"] for rank in ranks) < 1e-6

# %% [markdown]
# **Measured**: rank 0 goes forward twice, then alternates. It waits in 2 of 10 slots. This order is
# called 1F1B, one forward and one backward. With $p$ ranks and $m$ micro-batches, the pipeline
# needs $p - 1$ slots to fill and as many to drain, so of $2(m + p - 1)$ slots a rank waits in
#
# $$\frac{p - 1}{m + p - 1}$$
#
# This share is the *bubble*. And the weights are those of plain PyTorch on the global batch.
#
# The picture has a lane for each stage. It is drawn from what the ranks recorded, and each pass
# begins as soon as the passes that it needs are over.

# %%


def lanes(ax, recorded, slot=1):
    """Draw what ranks have done: a lane for each stage, and passes that are `slot` wide"""
    for done, passes in zip(recorded, timeline(recorded, slot, slot), strict=True):
        at = {each.action: each for each in passes}
        now, whole = 0, {}
        for action in done:
            stage = action.stage
            if action.kind in PASSES:
                start, now, _ = at[action]
                is_forward = action.kind == "forward"
                ax.barh(stage, now - start, left=start, height=0.5, edgecolor="white",
                        color=COLORS["compute" if is_forward else "grad"], zorder=3)
                ax.text((start + now) / 2, stage, short(action) if slot > 1 else "", color="white",
                        ha="center", va="center", fontsize=7, zorder=4)
            elif action.kind == "unshard":
                whole[stage] = now
            elif action.kind == "reshard":
                ax.barh(stage, now - whole[stage], left=whole[stage], height=0.9,
                        color=COLORS["whole"], zorder=2)
            elif action.kind == "reduce":
                ax.plot(now, stage, ">", color=COLORS["reduce"], markersize=7, zorder=5)
    stages = 1 + max(action.stage for done in recorded for action in done)
    ax.set_yticks(range(stages), [f"stage {s}" for s in range(stages)])
    ax.invert_yaxis()
    ax.spines[["top", "right"]].set_visible(False)


def legend(fig):
    marks = [plt.Rectangle((0, 0), 1, 1, color=COLORS[name])
             for name in ("compute", "grad", "whole")]
    marks.append(plt.Line2D([], [], marker=">", linestyle="", color=COLORS["reduce"]))
    fig.legend(marks, ["forward", "backward", "stage is whole", "gradients are reduced"], ncols=4,
               loc="outside lower center", frameon=False)


# %%
fig, ax = plt.subplots(figsize=(9, 2.4), layout="constrained")
lanes(ax, [ranks[0]["done"], ranks[2]["done"]], slot=4)
ax.set_title("1F1B: two stages, four micro-batches", fontsize=9, loc="left")
ax.set(xlabel="time, in layers", xlim=(0, 42))
legend(fig)
plt.show()

# %% [markdown]
# Each stage is gathered once, stays whole during the step, and is reduced at its end. So once is
# enough, but a rank then has all parameters of its stage all the time, and sharding them saves
# memory only between steps.
#
# ## Predict: four schedules
#
# The eight layers may also be eight stages, four on each rank. Then micro-batches come around four
# times, and the pipeline fills four times faster. We compare:
#
# | schedule | stages on a rank | order |
# |---|---|---|
# | GPipe | 1 | all forwards, then all backwards |
# | 1F1B | 1 | a backward as soon as there is one |
# | interleaved | 4 | 1F1B over the stages of a rank |
# | breadth-first | 4 | all micro-batches through a stage, then the next stage of this rank |
#
# **Predict**: which has the smallest bubble? Which keeps the activations of the fewest layers? And
# if a stage may stay whole only while it computes several passes in a row, which needs the fewest
# gathers?

# %%
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 4, "breadth-first": 4}
GATHERS = ("each", "direction", "stage")
cases = [(name, M, v, gathers) for name, v in SCHEDULES.items() for gathers in GATHERS]
answers = run("worker_10:train_all", 4, cases)
measured = {(name, gathers): [rank[i] for rank in answers]
            for i, (name, _, _, gathers) in enumerate(cases)}

print(f"{'':15}{'bubble':>8}{'kept':>12}{'gathered':>13}")
for name, v in SCHEDULES.items():
    found = measured[name, "stage"]
    recorded = [found[0]["done"], found[2]["done"]]
    waits = bubble(timeline(recorded))
    counted = costs(recorded[0])
    # A stage of a rank has 4 / v layers.
    print(f"{name:15}{waits:8.1%}{counted.kept * 4 // v:5} layers"
          f"{counted.gathers * 4 // v:6} layers")
    assert abs(waits - 1 / (v * M + 1)) < 1e-9
    assert recorded == actions(name, 2, M, v)
assert all(rank["off"] < 1e-6 for found in measured.values() for rank in found)

# %% [markdown]
# **Measured**, on rank 0: with $v$ stages on a rank, the bubble is
#
# $$\frac{p - 1}{v m + p - 1}$$
#
# 1F1B keeps the fewest activations: of two micro-batches, through four layers each. GPipe and
# breadth-first keep those of all four micro-batches. One stage on a rank is gathered once. Of
# several stages, breadth-first gathers each twice, once in each direction, but the last one only
# once. Interleaved stages alternate, so they are gathered again and again.

# %%
fig, axes = plt.subplots(4, 1, figsize=(9, 8.4), layout="constrained", sharex=True,
                         height_ratios=(1, 1, 2.6, 2.6))
for ax, (name, v) in zip(axes, SCHEDULES.items(), strict=True):
    found = measured[name, "stage"]
    lanes(ax, [found[0]["done"], found[2]["done"]], slot=4 // v)
    ax.set_title(name, fontsize=9, loc="left")
axes[-1].set(xlabel="time, in layers", xlim=(0, 42))
legend(fig)
plt.show()

# %% [markdown]
# The light bars show what each schedule pays. In the upper two pictures, a rank has all its four
# layers whole all the time. Breadth-first has one or two of them: the next stage is gathered while
# the last pass of this one computes.
#
# ## Bytes for memory
#
# How long a stage stays whole is our choice, `gathers`:
#
# | `gathers` | a stage is gathered |
# |---|---|
# | "each" | for each pass, layer by layer, as in `Zero3Sequential` |
# | "direction" | for a run of passes in one direction |
# | "stage" | for a run of passes, in both directions |
#
# In a gather, a rank sends its half of a layer to the other rank that shares it. **Predict**: with
# "each", how many times does a rank send its half of each layer, for four micro-batches? And which
# of the twelve combinations would you choose if links are slow and memory is scarce?

# %%
half = (64 * 64 + 64) * 4 // 2  # bytes of this rank's half of a layer, in fp32
print(f"{'KiB':15}{'':12}{'gathers':>9}{'reduces':>9}{'between stages':>16}{'peak':>9}")
for (name, gathers), found in measured.items():
    first = found[0]
    kib = {what: nbytes / 1024 for what, nbytes in first["sent"].items()}
    print(f"{name if gathers == 'each' else '':15}{gathers:12}{kib['gathers']:9.0f}"
          f"{kib['reduces']:9.0f}{kib['activations']:16.0f}{first['peak'] / 1024:9.0f}")
    # To the byte: what the list says.
    counted = costs(first["done"])
    layers = 4 // SCHEDULES[name]
    assert first["sent"]["gathers"] == counted.gathers * layers * half
    assert first["sent"]["reduces"] == counted.reduces * layers * half == 4 * half
    assert first["sent"]["activations"] == counted.sends * 2 * 64 * 4

sends = {case: found[0]["sent"]["gathers"] for case, found in measured.items()}
peak = {case: found[0]["peak"] for case, found in measured.items()}
assert sends["1f1b", "each"] == 2 * M * 4 * half and sends["1f1b", "stage"] == 4 * half
assert sends["breadth-first", "stage"] == 7 * half
assert peak["breadth-first", "stage"] < peak["1f1b", "stage"]

# %% [markdown]
# **Measured**: eight times with "each", because each of the four micro-batches goes forward and
# backward. For such reasons DeepSpeed [does not combine
# pipelines](https://github.com/deepspeedai/DeepSpeed/issues/4164) with ZeRO-3. The other choices
# send much less, and each gradient is reduced once in all of them. All these bytes follow from the
# list of actions, so they are known before the step runs.

# %%
fig, ax = plt.subplots(figsize=(7, 3.4), layout="constrained")
marks = {"each": "o", "direction": "s", "stage": "D"}
colors = dict(zip(SCHEDULES, ("file", "shard", "flight", "compute"), strict=True))
for i, name in enumerate(SCHEDULES):
    points = [(sends[name, g] / 1024, peak[name, g] / 1024) for g in GATHERS]
    # Wide lines and large rings first, so that equal points stay visible one inside the other.
    style = {"color": COLORS[colors[name]], "linewidth": 4 - i}
    ax.plot(*zip(*points, strict=True), **style, label=name)
    for g, point in zip(GATHERS, points, strict=True):
        ax.plot(*point, marks[g], color=style["color"], markersize=14 - 3 * i, fillstyle="none",
                markeredgewidth=1.6)
for g, mark in marks.items():
    ax.plot([], [], mark, color=NEUTRAL["muted"], label=f'"{g}"')
ax.set(xlabel="sent in gathers, KiB", ylabel="peak, KiB", xlim=(0, 285), ylim=(0, 180))
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False, fontsize=8, ncols=2)
plt.show()

# %% [markdown]
# The peak counts parameters and gradients. With one stage on a rank, "each" has the lowest peak,
# and the other two differ in bytes only. Breadth-first is different. With "stage" it sends nearly
# as little as one gather for each layer, and its peak is below that of every other schedule; only
# its own "each" is lower. It has at most two of its four stages whole, and a gradient is reduced as
# soon as all micro-batches have gone back through its stage. The other schedules collect the full
# gradients of all layers of a rank before they reduce the first one.
#
# The peak does not count activations, of which breadth-first and GPipe keep the most. Activation
# checkpointing keeps fewer: it computes them again in backward, and sends nothing for it.
#
# **Answer**: once, if its rank may keep it whole. Otherwise once in forward and once in backward,
# for any number of micro-batches, if they all pass through the stage in one run.
#
# ## Exercises
#
# **1.** A pipeline has 8 ranks. How many micro-batches are needed so that at most a tenth of the
# step is bubble, with one stage on each rank, and with four?

# %%
mine = None  # (with one stage on each rank, with four)

if mine is None:
    print("not answered yet")
else:
    for v, count in zip((1, 4), mine, strict=True):
        shares = [bubble(timeline(actions("breadth-first", 8, m, v))) for m in (count - 1, count)]
        right = shares[1] <= 0.1 + 1e-9 < shares[0]
        print(f"{v} on each rank: {shares[1]:.1%}", "right" if right else "too many or too few")

# %% [markdown]
# <details><summary>Answer</summary>
#
# $\frac{p - 1}{v m + p - 1} \le \frac{1}{10}$ if $v m \ge 9 (p - 1) = 63$.
#
# ```python
# mine = 63, 16
# ```
# </details>
#
# **2.** Write the list of 1F1B yourself: `make exercise N=8`, from the folder of the repository.
#
# **In the source**: [the lists](../zero3/pipeline/schedules.py), [the
# simulation](../zero3/pipeline/timeline.py) that gave the slots, and [the
# pipeline](../zero3/pipeline/pipeline.py) that runs them. Back to [the first
# notebook](01_where_the_memory_goes.ipynb).

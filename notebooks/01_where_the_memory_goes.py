# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Where the memory goes
#
# **Question**: a model in bf16 has two bytes for each parameter. How many bytes does training need
# for each parameter, and how many of them does each rank have to hold?
#
# Training keeps three *model states* from step to step: parameters, gradients, and optimizer
# states. With $\Psi$ parameters, and $K$ bytes of optimizer states for each,
#
# $$\underbrace{2\Psi}_{\text{parameters}} + \underbrace{2\Psi}_{\text{gradients}} +
# \underbrace{K\Psi}_{\text{optimizer}}$$
#
# Activations need memory too. They depend on the batch, and not on the sharding.
#
# **Your prediction**, before you run anything: how large is $K$ for Adam? Are all model states
# together smaller in half precision than in fp32? If the states are sharded over 64 ranks, which of
# them saves the most memory?
#
# This notebook belongs to
# [`formulas.py`](../zero3/estimate/formulas.py#estimate-the-papers-formulas), which has the papers'
# formulas.

# %%
# %matplotlib inline
import torch
from matplotlib.figure import Figure
from torch import nn

from zero3.estimate.formulas import BASES, show_stages, stages
from zero3.estimate.ledger import held_bytes
from zero3.train.launch import default_ranks, preload, run
from zero3.train.report import COLORS

preload("zero3.optimizer.stage3")
N = default_ranks()
SIDE, DEPTH = 420, 4  # a chain of four square matrices
PSI = DEPTH * SIDE**2
print(f"{PSI:,} parameters, {N} ranks")

# %% [markdown]
# ## Count the bytes of one process
#
# This is mixed precision by hand. The model computes in bf16. Most of Adam's updates are too small
# to change a bf16 number, so there is an fp32 copy of each parameter, its *master*, and Adam
# updates the master. The gradient is computed in bf16, and converted to fp32 for the step.
#
# `held_bytes` adds up the storages that a model and an optimizer hold, so the numbers below are
# measured. Adam also counts its steps, in 4 bytes for each tensor. The last line shows them.


# %%
def mixed_step(optimizer_class, **options):
    """One step of mixed precision; returns bytes by kind."""
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(DEPTH))).bfloat16()
    masters = [nn.Parameter(p.detach().float()) for p in model.parameters()]
    optimizer = optimizer_class(masters, **options)
    rest = {"parameters, bf16": held_bytes(model)}
    model(torch.ones(1, SIDE, dtype=torch.bfloat16)).float().square().mean().backward()
    rest["gradients, bf16"] = held_bytes(model) - rest["parameters, bf16"]
    rest["masters, fp32"] = held_bytes(None, optimizer)
    for param, master in zip(model.parameters(), masters, strict=True):
        master.grad = param.grad.float()
    rest["gradients, fp32"] = held_bytes(None, optimizer) - rest["masters, fp32"]
    before = held_bytes(None, optimizer)
    optimizer.step()
    rest["moments, fp32"] = held_bytes(None, optimizer) - before
    counts = [t for state in optimizer.state.values() for t in state.values()
              if isinstance(t, torch.Tensor) and not t.ndim]
    rest["counts"] = sum(t.nbytes for t in counts)
    rest["moments, fp32"] -= rest["counts"]
    return rest


adam = mixed_step(torch.optim.AdamW)
for kind, nbytes in adam.items():
    print(f"{kind:18} {nbytes:>12,} bytes {nbytes / PSI:6.2f} for each parameter")

# %% [markdown]
# Which of these rows are the model states? The papers disagree: the gradient is kept in bf16, in
# fp32, or in both. So there are three ways to count, called *bases*, and a memory figure needs to
# say which one it uses.

# %%
param, grad, master, wide, moment = (adam[kind] // PSI for kind in list(adam)[:5])
print(f"ZeRO                   {param} + {grad} + {master + moment:2}")
print(f"DeepSpeed's estimator  {param} + {wide} + {master + moment:2}")
print(f"ZeRO-Infinity          {param} + {grad} + {master + wide + moment:2}")
assert BASES == {16: (param, grad, master + moment), 18: (param, wide, master + moment),
                 20: (param, grad, master + wide + moment)}

# %% [markdown]
# **Measured**: $K = 12$ in ZeRO's basis. A model that needs 2 bytes for each parameter on disk
# needs 16 in training. This is $K$ for Adam; another optimizer has another $K$:

# %%
K = {}
for name, optimizer_class, options in (("SGD", torch.optim.SGD, {}),
                                       ("SGD, momentum", torch.optim.SGD, {"momentum": 0.9}),
                                       ("AdamW", torch.optim.AdamW, {})):
    kinds = mixed_step(optimizer_class, lr=0.1, **options)
    K[name] = (kinds["masters, fp32"] + kinds["moments, fp32"]) // PSI
    print(f"{name:14} K = {K[name]:2}, {2 + 2 + K[name]:2} bytes for each parameter")
assert K["AdamW"] == 12

# %% [markdown]
# And plain fp32, without masters?

# %%
model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(DEPTH)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(1, SIDE)).square().mean().backward()
optimizer.step()
fp32_bytes = held_bytes(model, optimizer) - adam["counts"]
print(f"fp32: {fp32_bytes / PSI:.0f} bytes for each parameter")
assert fp32_bytes == sum(BASES[16]) * PSI

# %% [markdown]
# **Measured**: the same. Mixed precision does not make the model states smaller, because the
# masters use up everything that parameters and gradients save. It makes computation faster,
# activations smaller, and communication cheaper.
#
# ## Three stages
#
# Plain data parallelism holds all of this on every rank. ZeRO shards it over $N$ ranks, in three
# stages: first the optimizer states, then the gradients too, then the parameters too. A rank holds
#
# $$4\Psi + \frac{K\Psi}{N} \qquad 2\Psi + \frac{(2+K)\Psi}{N} \qquad \frac{(4+K)\Psi}{N}$$
#
# This is ZeRO's own example, with 7.5 billion parameters on 64 ranks. The left column is in its
# basis:

# %%
show_stages(7.5e9, 64)

# %%
KINDS = {"parameters": COLORS["whole"], "gradients": COLORS["grad"], "optimizer": COLORS["state"]}
fig = Figure(figsize=(9, 3), layout="constrained")
for ax, ranks in zip(fig.subplots(1, 3, sharey=True), (4, 64, 1024), strict=True):
    below = [0.0] * 4
    for kind, width, first in zip(KINDS, BASES[16], (3, 2, 1), strict=True):
        # `first` is the first stage that shards this kind.
        gb = [7.5 * width / (ranks if stage >= first else 1) for stage in range(4)]
        ax.bar(range(4), gb, bottom=below, color=KINDS[kind], label=kind)
        below = [x + y for x, y in zip(below, gb, strict=True)]
    assert all(abs(x - y / 1e9) < 1e-9 for x, y in zip(below, stages(7.5e9, ranks), strict=True))
    for stage, total in enumerate(below):
        ax.text(stage, total + 1, f"{total:.1f}", ha="center", fontsize=8)
    ax.set(title=f"{ranks} ranks", xlabel="stage", ylim=(0, 135))
    ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
fig.supylabel("GB per rank", fontsize=10)
fig

# %% [markdown]
# Stage 1 saves the most, because the optimizer states are the largest. But stages 1 and 2 have a
# limit: every rank holds all parameters, however many ranks there are. Only stage 3 keeps
# shrinking, so with enough ranks any model fits.
#
# ## Run the stages
#
# The stages differ only in *the states that are sharded*. The training loop below implements all
# four, with the parameters in one flat vector of $\Psi$ elements. Between two steps it holds
# `params`, `grads`, `master` and Adam's moments. `cut` keeps only this rank's part of them, from
# the stage on that shards them. When a sharded state is needed whole, it is gathered from the other
# ranks. [The next notebook](02_collectives.ipynb) measures the cost of that.
#
# **Your prediction**: will the four stages train to the same weights?

# %% tags=["varies"]
# %%writefile worker_01.py
import torch
import torch.distributed as dist
from torch import nn

from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.estimate.ledger import held_bytes
from zero3.train.launch import my_device


def whole_model(side, depth):
    torch.manual_seed(0)
    weights = torch.randn(depth, side, side) / side**0.5
    return weights.bfloat16().to(my_device())


def gathered(part):
    """All-gather: every rank's part, one after the other."""
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts)


def reduced(whole):
    """Reduce-scatter: the mean over ranks, of this rank's part."""
    ranks = dist.get_world_size()
    part = torch.empty_like(whole[: len(whole) // ranks])
    dist.reduce_scatter(part, list((whole / ranks).chunk(ranks)))
    return part


def gradients(params, shape, step):
    """Forward and backward, on this rank's rows."""
    params = params.detach().requires_grad_()
    torch.manual_seed(1000 * step + dist.get_rank())
    h = torch.randn(8, shape[-1]).to(params)
    for weight in params.view(shape):
        h = torch.tanh(h @ weight.t())
    h.float().square().mean().backward()
    return params.grad


def train_all(stages, side, depth, steps):
    return [train(stage, side, depth, steps) for stage in stages]


def train(stage, side, depth, steps):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    weights = whole_model(side, depth)
    whole, shape = weights.flatten(), weights.shape
    mine = slice(rank * len(whole) // ranks, (rank + 1) * len(whole) // ranks)

    def cut(values, from_stage):
        return values[mine].clone() if stage >= from_stage else values

    params = cut(whole, 3)
    master = nn.Parameter(cut(whole.float(), 1))
    adam = torch.optim.AdamW([master], lr=1e-2)
    for step in range(steps):
        full = gathered(params) if stage == 3 else params
        # Stages 0 and 1 need the whole gradient, as after an all-reduce.
        share = reduced(gradients(full, shape, step))
        grads = share if stage >= 2 else gathered(share)
        master.grad = (grads[mine] if stage == 1 else grads).float()
        adam.step()
        master.grad = None
        # Each rank has updated its own masters. In stages 1 and 2 the ranks exchange the results.
        params = master.detach().bfloat16()
        params = gathered(params) if stage in (1, 2) else params
    moments = [t for t in adam.state[master].values() if t.ndim]
    storages = [t.untyped_storage() for t in (params, grads, master, *moments)]
    held = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    return held, (gathered(params) if stage == 3 else params).cpu()


def ours(side, depth, steps):
    """The same training in `zero3`; returns the bytes held, with gradients."""
    layers = [nn.Sequential(nn.Linear(side, side, bias=False), nn.Tanh()) for _ in range(depth)]
    layers = [layer.to(my_device(), torch.bfloat16) for layer in layers]
    model = Zero3Sequential([Zero3Layer(layer) for layer in layers])
    optimizer = Zero3Optimizer(model, torch.optim.AdamW, lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(8, side).to(my_device(), torch.bfloat16)
        optimizer.backward(model(x).float().square().mean())
        optimizer.step()
    return held_bytes(model, optimizer)


# %%
assert PSI % N == 0
predicted = [int(nbytes) for nbytes in stages(PSI, N)]
trained = []
print(f"bytes of each of {N} ranks     predicted     measured")
for stage, *answers in zip(range(4), *run("worker_01:train_all", N, range(4), SIDE, DEPTH, 3),
                           strict=True):
    for held, weights in answers:
        assert held == predicted[stage]
        trained.append(weights)
    print(f"stage {stage} {predicted[stage]:31,} {answers[0][0]:>12,}  equal")
same = all(torch.equal(weights, trained[0]) for weights in trained)
print("the same weights on all ranks in all stages, bit for bit:", same)
assert same

# %% [markdown]
# **Measured**: the formulas are exact, and no stage changes the weights. ZeRO is not an
# approximation. It stores each number once instead of $N$ times.
#
# The picture above shows memory *between* two steps. During a step, the loop above holds all
# parameters again in stage 3, in `full`, and a whole gradient. `zero3` gathers one layer at a time,
# so only one or two layers are whole. [The third notebook](03_one_layer.ipynb) opens such a layer.
# Between two steps `zero3` holds the bytes of stage 3:

# %%
for rank, held in enumerate(run("worker_01:ours", N, SIDE, DEPTH, 3)):
    counts_bytes = held - predicted[3]
    print(f"rank {rank}: {held:,} bytes. Stage 3: {predicted[3]:,}, and {counts_bytes} for Adam's "
          "counts")
    assert counts_bytes == 4 * DEPTH  # fp32, one for each layer

# %% [markdown]
# ## Exercise
#
# You have GPUs with 80 GB for model states each, and a model with $10^{12}$ parameters. How many
# GPUs does each stage need, in ZeRO's basis? Use `stages` below, then solve the formula to check.

# %%
ranks = 64  # change this
print([f"{nbytes / 1e9:,.0f} GB" for nbytes in stages(1e12, ranks)])

# %% [markdown]
# <details><summary>Answer</summary>
#
# Stage 3 needs $(4 + 12) \cdot 10^{12} / N \le 80 \cdot 10^9$, so $N \ge 200$. Stage 2 never fits:
# every rank holds $2\Psi$ bytes of parameters, 2000 GB, for any $N$. Stage 1 and plain data
# parallelism hold even more.
#
# </details>
#
# **In the source**:
# [`stages`](../zero3/estimate/formulas.py#zero-s-table-1-bytes-of-model-states-per-rank) computes
# the table.
# `held_bytes` of the [ledger](../zero3/estimate/ledger.py) adds up storages.
# [`Zero3Optimizer`](../zero3/optimizer/stage3.py#zero3-optimizer) keeps the masters and moments of
# shards. Next: [the collectives](02_collectives.ipynb), one by one.

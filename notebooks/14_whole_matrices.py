# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Whole matrices: Muon on shards
#
# **Question**: a shard is a piece of a matrix. Who steps a matrix that two ranks share?
#
# AdamW does not mind: it steps each element by itself, so a rank steps its own shards.
# [Muon](https://kellerjordan.github.io/posts/muon/) does mind. It replaces the gradient of a matrix
# by one with the same directions, in which all of them are about equally strong. For that it
# multiplies the matrix with itself. The source is [here][chapter].
#
# All worker functions are in one file, and each part of this notebook appends its own. After a
# change, run the notebook from its first cell.
#
# [chapter]: ../zero3/optimizer/whole.py#optimizers-that-need-whole-matrices

# %% [markdown]
# ## Predict
#
# The gradient of a $2 \times 2$ matrix has the rows (3, 1) and (1, 3). Its strongest direction is
# (1, 1), with 4, and the other one is (1, -1), with 2. Muon of this gradient has the signs
# $\begin{smallmatrix}+ & -\\ - & +\end{smallmatrix}$. Two ranks have one row each. **Predict** the
# signs if each rank gives its own row to Muon.

# %%
import torch
from torch import nn


def muon_of(grad):
    """What Muon subtracts from a matrix for this gradient, at a learning rate of 1"""
    param = nn.Parameter(torch.zeros_like(grad))
    param.grad = grad.clone()
    torch.optim.Muon([param], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return -param.detach()


grad = torch.tensor([[3.0, 1.0], [1.0, 3.0]])
whole = muon_of(grad)
rows = torch.cat([muon_of(grad[:1]), muon_of(grad[1:])])
for name, step in (("gradient", grad), ("Muon of the matrix", whole), ("Muon of each row", rows)):
    strengths = [round(value, 2) for value in torch.linalg.svdvals(step).tolist()]
    print(f"{name:20}{[[round(value, 2) for value in row] for row in step.tolist()]}, directions "
          f"as strong as {strengths}")
assert whole[0, 1] < 0 < rows[0, 1]

# %% [markdown]
# **Measured**: all signs are positive. A single row has only one direction, so Muon can only change
# its length. The strengths of both rows together are 2 to 1, as in the gradient. Muon of the matrix
# brings them to 1.1 and 0.69. A training run on rows would not crash. It would learn something
# else.
#
# ## Owners
#
# So each matrix gets one *owner* among the ranks. The owner receives the pieces of values and
# gradient, steps the whole matrix with torch's own class, and sends the new values back. The
# momentum stays with it.
#
# The model below has four matrices of 64 by 64, an embedding and a head. `Matrices`
# gives the four to Muon and the rest to AdamW. **Predict**: which part of Muon's momentum does a
# rank hold, and by how much do the weights differ from plain PyTorch's after five steps?

# %% tags=["varies"]
# %%writefile worker_14.py
import torch
import torch.distributed as dist
from torch import nn

from zero3 import Matrices, Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.estimate.ledger import Ledger
from zero3.train.launch import my_device

WIDTH = 64


def layers():
    torch.manual_seed(0)
    made = [nn.Embedding(16, WIDTH), *(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)),
            nn.Linear(WIDTH, 16)]
    return [layer.to(my_device()) for layer in made]


def batch(step, ranks):
    rows = torch.randint(16, (2 * ranks, 8), generator=torch.Generator().manual_seed(step))
    return rows.to(my_device())


def loss_of(model, rows):
    return nn.functional.cross_entropy(model(rows).flatten(0, 1), rows.roll(1, dims=1).flatten())


def built():
    made = layers()
    rule = Matrices(nn.Sequential(*made), lr=0.02)
    model = Zero3Sequential([Zero3Layer(layer) for layer in made])
    return rule, model, Zero3Optimizer(model, torch.optim.AdamW, lr=1e-3, group_by=rule)


def five_steps():
    """What `Matrices` says, owners, elements of momentum, and the difference from plain PyTorch"""
    rule, model, optimizer = built()
    plain = nn.Sequential(*layers())
    hidden = [p for name, p in plain.named_parameters() if rule(name, p)]
    others = [p for name, p in plain.named_parameters() if not rule(name, p)]
    both = [torch.optim.Muon(hidden, lr=0.02), torch.optim.AdamW(others, lr=1e-3, fused=True)]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(5):
        rows = batch(step, ranks)
        optimizer.backward(loss_of(model, rows.chunk(ranks)[rank]))
        optimizer.step()
        optimizer.zero_grad()
        for part in rows.chunk(ranks):
            (loss_of(plain, part) / ranks).backward()
        for each in both:
            each.step()
            each.zero_grad()
    owners = {whole.name: whole.owner for whole in optimizer.owners.wholes}
    held = sum(optimizer.owners.state_of(whole)["momentum_buffer"].numel()
               for whole in optimizer.owners.wholes if whole.owner == rank)
    with model.full_params() as params:
        worst = max((params[name] - p).abs().max().item() for name, p in plain.named_parameters())
    return str(rule), owners, held, worst


# %%
from zero3.train.launch import default_ranks, preload, run

preload("zero3.optimizer.stage3")
N = default_ranks()
every = run("worker_14:five_steps", N)
chosen, owners, *_ = every[0]
print(chosen, "\n")
for name, owner in owners.items():
    print(f"{name}: stepped by rank {owner}")
held = [elements for _, _, elements, _ in every]
print(f"\nelements of momentum on each rank: {held}, {sum(held):,} in all")
print(f"largest difference from plain PyTorch: {max(worst for *_, worst in every):g}")
assert sum(held) == 4 * 64 * 64 and max(held) == -(-4 // N) * 64 * 64
exact = N in (1, 2, 4) and not torch.cuda.is_available()
assert max(worst for *_, worst in every) <= (0 if exact else 1e-2)

# %% [markdown]
# **Measured**: each matrix has one owner, and all ranks hold its momentum together once. That is
# $\frac{1}{N}$ each, if $N$ divides the number of matrices. The weights have the same bits as in
# plain PyTorch, which adds the ranks' parts of the batch in the same order, and steps with the same
# fused AdamW. NCCL adds in another order. Then the weights differ a little: Muon computes in bf16,
# so a last bit of a gradient can move the eighth bit of a step.
#
# ## What it costs
#
# An element of a matrix rests in a shard. If the owner is another rank, it sends a value of 4 bytes
# and a gradient, here of 4 bytes too, and gets 4 bytes back. **Predict**: how many bytes do all
# ranks send in a step for these four matrices, and is that more or less than a gather of all
# gradients to all ranks, 4 bytes to each of the $N - 1$ others?

# %% tags=["varies"]
# %%writefile -a worker_14.py


def bytes_of_a_step():
    """Bytes that this rank sends for whole matrices, and those of a gather of the gradients"""
    _, model, optimizer = built()
    optimizer.backward(loss_of(model, batch(0, 1)))
    with Ledger(model, optimizer) as tape:
        optimizer.step()
    sent = sum(event.sent_bytes for event in tape.events if event.event in ("collect", "give back"))
    others = dist.get_world_size() - 1
    return sent, 4 * others * sum(len(layer.flats[0].shard) for layer in optimizer.layers[1:5])


# %%
sent, gather = zip(*run("worker_14:bytes_of_a_step", N), strict=True)
elements = 4 * 64 * 64 * (N - 1) // N  # of other ranks than the owner
print(f"to owners and back: {sum(sent):9,} bytes of all ranks, {[*sent]}")
print(f"a gather instead:   {sum(gather):9,} bytes")
if N in (1, 2, 4):
    assert sum(sent) == (4 + 4 + 4) * elements and sum(gather) == 4 * (N - 1) * 4 * 64 * 64

# %% [markdown]
# **Measured**: 12 bytes for each element that another rank has. A gather takes $4 (N - 1)$ bytes
# for every element, and grows with the number of ranks. On two ranks both are small: 6 and 4 bytes
# for each element on average. On eight ranks owners cost $12 \cdot \frac{7}{8} = 10.5$ and a gather
# 28. With a gather each rank would also compute all steps, or send its results once more.
#
# ## Who waits for whom
#
# A step ends when the slowest owner has ended. Newton-Schulz on an $m \times n$ matrix takes time
# in proportion to $\min(m,n)^2 \max(m,n)$. The longest matrix is assigned first, and each to the
# rank with the least to do. **Predict**: GPT-2 has 48 matrices. Up to how many ranks is the slowest
# owner within 15 % of the mean?

# %%
import matplotlib.pyplot as plt

from zero3.optimizer.whole import assign, cost
from zero3.train.report import COLORS

MODELS = {
    "GPT-2, 48 matrices": [(2304, 768), (768, 768), (3072, 768), (768, 3072)] * 12,
    "Llama 8B, 224 matrices": [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096),
                               (14336, 4096), (14336, 4096), (4096, 14336)] * 32,
}
RANKS = [2**i for i in range(8)]
slowest = {}
for name, shapes in MODELS.items():
    costs = [cost(shape) for shape in shapes]
    slowest[name] = []
    for ranks in RANKS:
        work = [0] * ranks
        for owner, each in zip(assign(costs, ranks), costs, strict=True):
            work[owner] += each
        slowest[name].append(max(work) * ranks / sum(costs))
print(f"{'ranks':24}" + "".join(f"{ranks:7}" for ranks in RANKS))
for name, times in slowest.items():
    print(f"{name:24}" + "".join(f"{each:7.2f}" for each in times))

fig, ax = plt.subplots(figsize=(7, 3), layout="constrained")
for (name, times), color in zip(slowest.items(), ("shard", "state"), strict=True):
    ax.plot(RANKS, times, color=COLORS[color], marker="o", label=name)
ax.axhline(1.15, color="0.6", linestyle=":", linewidth=1)
ax.set_xscale("log", base=2)
ax.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
ax.set(xlabel="ranks", ylabel="slowest owner / mean")
ax.set_title("work of the slowest owner in a step of Muon, computed", fontsize=9, loc="left")
ax.spines[["top", "right"]].set_visible(False)
ax.legend(frameon=False)
plt.show()
assert slowest["GPT-2, 48 matrices"][4] < 1.15 < slowest["GPT-2, 48 matrices"][5]

# %% [markdown]
# **Measured**: up to 16 ranks. On 64 ranks there are more ranks than matrices, so some have nothing
# to do, and the largest matrix alone takes 1.78 times the mean. No assignment is better than that.
# Llama 8B has enough matrices for 64 ranks.
#
# **Answer**: one rank steps it whole, its owner. Masters and gradients stay in the shards, momentum
# stays with the owner, and pieces travel twice in a step. Any other optimizer that looks at whole
# parameters works in the same way, `torch.optim.Adafactor` for example: `Zero3Optimizer` finds out
# on small matrices what a class looks at.
#
# ## Exercise
#
# A bf16 matrix of 4096 by 4096 on 8 ranks, each with an eighth of it. The master has 4 bytes and
# the gradient 2. How many bytes do all ranks together send for it in a step?

# %%
mine = None  # bytes

truth = (4 + 2 + 4) * 4096 * 4096 * 7 // 8
print("not answered yet" if mine is None else "right" if mine == truth else "not that")

# %% [markdown]
# <details><summary>Answer</summary>
#
# 146,800,640. Seven eighths of $4096^2$ elements belong to other ranks than the owner. For each, 4
# bytes of master and 2 bytes of gradient go to the owner, and 4 bytes come back. The gathers and
# the reduce of the same matrix send $3 \cdot 2 \cdot 7 \cdot 4096^2$ bytes, about five times as
# many.
# </details>

# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # The compiler: a step that is known before it runs
#
# **Question**: with hooks, a layer is gathered when it computes, in forward and again in backward.
# A [compiler](../zero3/compiler/passes.py) has the whole step as a list of operations before the
# step runs. How many all-gathers does a step really need, if it has room for some layers?
#
# We train a small GPT of eight layers, with one rank for each GPU, or two on the CPU.

# %% tags=["varies"]
# %%writefile worker_11.py
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F

from zero3 import Zero3Optimizer, compile, wrap
from zero3.compiler.graph import (
    finish,
    full_numel,
    gather,
    is_view,
    layers_of,
    reduce,
    release,
    wait,
)
from zero3.estimate.ledger import Ledger
from zero3.train.launch import my_device

VOCAB, SEQ, WIDTH, BLOCKS = 256, 32, 64, 6
COMMUNICATION = (gather, wait, release, reduce, finish)


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Embedding(SEQ, WIDTH)

    def forward(self, x):
        return self.token(x) + self.place(torch.arange(SEQ, device=x.device))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2)
                   for t in self.qkv(self.norm_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Head(nn.Linear):
    pass


def make_model():
    torch.manual_seed(0)
    layers = {"embed": Embedding()} | {f"block {i}": Block() for i in range(BLOCKS)}
    return nn.Sequential(OrderedDict(layers, head=Head(WIDTH, VOCAB))).to(my_device())


def train(model):
    """Two steps, and a third one on a tape: what it sends, its peak, and the weights after it"""
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.5, bucket_bytes=0)
    tape = Ledger(model, optimizer)
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randint(VOCAB, (2, SEQ + 1), device=my_device())
        if step == 2:
            tape.__enter__()
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    tape.__exit__()
    measured = [(e.event, e.sent_bytes) for e in tape.events if e.event in ("fetch", "reduce")]
    with model.full_params() as params:
        weights = {name: p.detach().cpu().clone() for name, p in params.items()}
    return {"measured": measured, "peak": tape.peak_live_bytes, "weights": weights}


def hooks():
    return train(wrap(make_model(), (Embedding, Block, Head)))


def compiled_all(limits):
    return [compiled(limit) for limit in limits]


def compiled(limit):
    """The same, compiled: with its graphs after each pass, and what they are going to send"""
    # Inductor would fuse operations, but takes long to compile.
    model = compile(make_model(), backend="aot_eager", limit_numel=limit, bucket_bytes=0)
    found = train(model)
    (graphs,) = model.graphs
    sent = model.communication(graphs)
    steps = {name: (in_short(forward, model.numel, []),
                    in_short(backward, model.numel, graphs.kept if i > 1 else []))
             for i, (name, forward, backward) in enumerate(graphs.steps)}
    return found | {"predicted": sent, "steps": steps, "kept": graphs.kept, "numel": model.numel}


def in_short(graph, numel, kept):
    """The communication in a graph, with the number of other operations in between, and the full
    elements during each"""
    lines = []
    for node, full in zip(graph.nodes, full_numel(graph, numel, kept), strict=True):
        if node.target in COMMUNICATION:
            lines.append((f"{node.target.__name__} {', '.join(layers_of(node))}", full, 1))
        elif node.op == "call_function" and not is_view(node):
            before = lines.pop() if lines and lines[-1][0].endswith(" operations") else ("", 0, 0)
            lines.append((f"{before[2] + 1} operations", full, before[2] + 1))
    return lines


# %% [markdown]
# ## Predict: the graph of a step
#
# The compiler traces the model: it follows the Python code once, and writes down each operation.
# Then [passes](../zero3/compiler/passes.py#insert-the-communication) change this list. The first
# pass inserts a `gather` before the first use of each layer, and a `release` after its last one.
#
# **Predict**: eight layers are gathered in forward. How many are gathered in backward? Remember
# what the gradient of an embedding depends on.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt

from zero3.train.launch import preload, run
from zero3.train.report import COLORS

preload("zero3.compiler.model", "zero3.estimate.ledger", "torch._functorch.aot_autograd")
block = 49_984  # parameters of a block
first, *others = run("worker_11:compiled", None, 2 * block)
N = 1 + len(others)


def show(lines, count=None):
    print(f"{'full':>9}  operation")
    for text, full, _ in lines[:count]:
        print(f"{full:9,}  {text}")


def gathers(lines):
    return sum(text.startswith("gather") for text, *_ in lines)


numel = {name: count for name, count in first["numel"].items() if name != "root"}
print({name: numel[name] for name in ("embed", "block 0", "head")})
forward, backward = first["steps"]["insert"]
print("\nforward begins")
show(forward, 8)
print("\nbackward begins")
show(backward, 14)
print(f"\n{gathers(forward)} gathers in forward, {gathers(backward)} in backward")
assert (gathers(forward), gathers(backward)) == (8, 7)

# %% [markdown]
# **Measured**: seven, because the gradient of an embedding does not depend on its weights. At most
# one layer is full at a time, but each all-gather is waited for at once, so none overlaps any
# computation.
#
# ## The same step, after all passes
#
# There is room for two blocks. The passes use it twice: the last layers stay full until backward,
# and the other all-gathers start earlier. **Predict**: the head has a third of a block's elements.
# Which layers can stay full from forward to backward, within a limit of two blocks?

# %%
forward, backward = first["steps"]["sink"]
print("forward begins")
show(forward, 10)
print("\nbackward begins")
show(backward, 14)
print(f"\nkept for backward: {', '.join(first['kept'])}; "
      f"{gathers(forward)} gathers in forward, {gathers(backward)} in backward")
assert first["kept"] == ["head", "block 5"]
assert max(full for _, full, _ in (*forward, *backward)) <= 2 * block

# %% [markdown]
# **Measured**: the head and the last block. The all-gather of block 0 now starts before the
# embedding computes, and a reduce is waited for when the next one begins.
#
# Does it still train the same model? And are the bytes those that the graph promises? We train
# three steps with [hooks](../zero3/whole_model/wrap.py) and three compiled ones, and put the third
# on a tape.

# %%
hooked = run("worker_11:hooks")


def total(events, *kinds):
    return sum(sent for kind, sent in events if kind in kinds)


def count(events, *kinds):
    return sum(kind in kinds for kind, _ in events)


def differs(rank):
    return max((rank["weights"][name] - w).abs().max().item()
               for name, w in hooked[0]["weights"].items())


print(f"{'':22}{'gathers':>9}{'reduces':>9}{'bytes sent':>12}")
for name, events in (("hooks, measured", hooked[0]["measured"]),
                     ("compiled, predicted", first["predicted"]),
                     ("compiled, measured", first["measured"])):
    print(f"{name:22}{count(events, 'gather', 'fetch'):9}{count(events, 'reduce'):9}"
          f"{sum(sent for _, sent in events):12,}")
print(f"\nlargest difference of a weight after three steps: {differs(first):.0e}")
# In the same order, too.
assert [sent for _, sent in first["predicted"]] == [sent for _, sent in first["measured"]]
assert differs(first) < 1e-6

# %% [markdown]
# **Measured**: 15 all-gathers with hooks, because each layer is gathered twice, but the last one
# once. The compiled step needs 13: it keeps one block more, and does not gather the embedding
# for backward. Hooks cannot know that, because a layer's backward pass might read any weight.
#
# ## Predict: more room
#
# Now the limit grows from two blocks to three and four, and to the whole model. With $\Psi$
# the elements of all layers, a rank sends in a step
#
# $$\frac{N-1}{N} \Big(3\Psi - P_\text{embed} - \sum_{\ell \in K} P_\ell\Big)
# \quad \text{elements}$$
#
# with $K$ the layers that are kept. **Predict** for each limit: how many gathers are left in
# backward, and how many bytes does a rank send? Write the rule down before you run the cell.

# %%
psi = sum(numel.values())
limits = {"2 blocks": 2 * block, "3 blocks": 3 * block, "4 blocks": 4 * block,
          "everything": psi}


def rule(limit):
    """The layers that are kept, from the last one on, as long as they fit"""
    kept = []
    for name in reversed(numel):
        if name != "embed" and sum(numel[each] for each in (*kept, name)) <= limit:
            kept.append(name)
    return kept


answers = run("worker_11:compiled_all", None, [*limits.values()][1:])[0]
runs = dict(zip(limits, [first, *answers], strict=True))
print(f"{'limit':12}{'in backward':>13}{'sent, predicted':>17}{'measured':>10}{'peak, KiB':>11}")
for name, limit in limits.items():
    found = runs[name]
    kept = rule(limit)
    sent = 4 * (N - 1) * (3 * psi - numel["embed"] - sum(numel[each] for each in kept)) // N
    measured = total(found["measured"], "fetch", "reduce")
    print(f"{name:12}{7 - len(kept):5} gathers{sent:17,}{measured:10,}{found['peak'] // 1024:11,}")
    assert kept == found["kept"] and sent == measured and differs(found) < 1e-6
events = hooked[0]["measured"]
print(f"{'hooks':12}{count(events, 'fetch') - 8:5} gathers{'':17}"
      f"{total(events, 'fetch', 'reduce'):10,}{hooked[0]['peak'] // 1024:11,}")

# %% [markdown]
# **Measured**: as the rule says, to the byte. With room for everything a rank sends
# $2\Psi\frac{N-1}{N}$, as much as in data parallelism, and between two steps it still keeps shards
# only. Each block of room saves one gather. The peak, which also counts gradients, grows with the
# room at first. From four blocks on it is the same, because prefetching fills the room of a lower
# limit, too.
#
# The curves show the full elements during each operation, with the limit as a dashed line.

# %%
fig, axes = plt.subplots(3, 1, figsize=(9, 5), layout="constrained", sharex=True, sharey=True)
for ax, name in zip(axes, ("2 blocks", "4 blocks", "everything"), strict=True):
    start = 0
    for word, lines in zip(("forward", "backward"), runs[name]["steps"]["sink"], strict=True):
        edges, levels = [start], []
        for _, full, wide in lines:
            edges.append(edges[-1] + wide)
            levels.append(full / block)
        ax.stairs(levels, edges, fill=True, color=COLORS["whole"], alpha=0.6)
        ax.text(start + 2, 8.6, word, fontsize=8, va="top")
        start = edges[-1] + 8
    ax.axhline(limits[name] / block, color="gray", linestyle="--", linewidth=1)
    ax.set_title(f"limit: {name}", fontsize=9, loc="left")
    ax.set(ylim=(0, 8.8), yticks=(0, 2, 4, 6), ylabel="full, in blocks")
    ax.spines[["top", "right"]].set_visible(False)
axes[-1].set(xlabel="operations")
plt.show()

# %% [markdown]
# The limit holds at every operation, and the compiler knows that before the first step. Whether the
# room is well spent is another question: the passes count elements and not time, so a gather may
# move up although it would have been in time.
#
# **Answer**: one for each layer in forward, and in backward one for each layer whose weights are
# read and that had no room to stay. Hooks need one for nearly every layer in each direction.
#
# ## Exercise
#
# A rank should send at most $2.4\,\Psi\,\frac{N-1}{N}$ elements in a step. What is the lowest
# limit, in elements? The rule above tells how many layers have to be kept.

# %%
mine = None  # elements

if mine is None:
    print("not answered yet")
else:
    for limit in (mine - 1, mine):
        sent = 3 * psi - numel["embed"] - sum(numel[each] for each in rule(limit))
        print(f"limit {limit:,}: {sent / psi:.2f} Psi (N - 1) / N")
    found = run("worker_11:compiled", None, mine)[0]
    print(f"measured: {total(found['measured'], 'fetch', 'reduce'):,} bytes")

# %% [markdown]
# <details><summary>Answer</summary>
#
# $3\Psi - P_\text{embed} - \sum_K P_\ell \le 2.4\,\Psi$ if the layers in $K$ have at least
# $0.6\,\Psi - P_\text{embed}$ elements, which is about 3.7 blocks. The head and four blocks have
# that, and the head and three blocks do not.
#
# ```python
# mine = numel["head"] + 4 * block
# ```
# </details>
#
# **In the source**: [the graph](../zero3/compiler/graph.py), [the
# passes](../zero3/compiler/passes.py) with a drawing of each, and [the
# model](../zero3/compiler/model.py) that runs them. Back to [the first
# notebook](01_where_the_memory_goes.ipynb).

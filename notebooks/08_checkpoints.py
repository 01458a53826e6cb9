# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Checkpoints: resume on another number of ranks
#
# **Question**: each rank saves only its own shards, and no rank gathers the parameters. Can another
# number of ranks resume from these files?
#
# A long training run is interrupted many times. The shards have everything that it needs to resume:
# all ranks write them at the same time, each into a file of its own. A
# [manifest](../zero3/checkpoint/reader.py#a-checkpoint-on-disk) records which parameters these
# numbers belong to.
#
# The model below has two layers of odd sizes in bf16, trained with Adam. `saves` takes three steps,
# saves, and takes two more. `resumes` builds the model with other weights, loads the checkpoint,
# and takes the same two steps.

# %% tags=["varies"]
# %%writefile worker_08.py
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save
from zero3.train.launch import my_device


def build(seed):
    torch.manual_seed(seed)
    layers = [nn.Linear(301, 501), nn.Tanh(), nn.Linear(501, 301)]
    model = Zero3Sequential([Zero3Layer(layer.to(my_device(), torch.bfloat16))
                             for layer in layers])
    return model, Zero3Optimizer(model, torch.optim.AdamW, lr=1e-3)


def train(model, optimizer, steps, rows):
    """Train on the same `rows` on any number of ranks; return the mean loss of each step"""
    losses = []
    for step in steps:
        batch = torch.randn(rows, 301, generator=torch.Generator().manual_seed(step))
        x = batch.chunk(dist.get_world_size())[dist.get_rank()].to(my_device(), torch.bfloat16)
        loss = (model(x) - 1).float().square().mean()
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / dist.get_world_size())
    return losses


def weights_of(model):
    with model.full_params() as params:
        return {name: p.detach().cpu().clone() for name, p in params.items()}


def saves(folder, rows):
    """Take three steps, save after the second and the third, and take two more"""
    model, optimizer = build(seed=0)
    train(model, optimizer, range(2), rows)
    save(folder, model, optimizer, step=2)
    train(model, optimizer, range(2, 3), rows)
    save(folder, model, optimizer, step=3, extra={"epoch": 1})
    saved = weights_of(model)
    return saved, train(model, optimizer, range(3, 5), rows), weights_of(model)


def resumes(folder, rows):
    """Load into a model with other weights, and take two steps"""
    model, optimizer = build(seed=1)
    extra = load(folder, model, optimizer)
    loaded = weights_of(model)
    return loaded, train(model, optimizer, range(3, 5), rows), weights_of(model), extra


# %% [markdown]
# ## Predict
#
# After a step, the gradients have been freed. A rank still has 14 bytes for each parameter of its
# shards: 2 for the parameter in bf16, 4 for its fp32 master, and 8 for Adam's two fp32 moments. How
# many of these bytes does it write: 2, 12 or 14?

# %%
import io
import tempfile
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from zero3.checkpoint.convert import export
from zero3.checkpoint.reader import CheckpointReader
from zero3.train.launch import default_ranks, preload, run
from zero3.train.report import COLORS, NEUTRAL

preload("zero3.checkpoint.save_load")
N = default_ranks()
rows = 2 * N * (N + 1)  # 1, N and N + 1 ranks can each take an equal part
scratch = tempfile.TemporaryDirectory()
folder = Path(scratch.name) / "mine"

saved, losses, later = run("worker_08:saves", N, str(folder), rows)[0]
written = 0
for path in sorted(folder.glob("*")):
    print(f"{path.name}: {', '.join(sorted(file.name for file in path.iterdir()))}")
print(f"\nin the file of rank {N - 1}")
for rank in range(N):
    file = folder / "step-00000003" / f"rank-{rank:05}-of-{N:05}.safetensors"
    for name, tensor in load_file(file).items():
        written += tensor.nbytes
        if rank == N - 1:
            print(f"    {name:14}{tensor.dtype}  {tuple(tensor.shape)}")
numel = sum(weight.numel() for weight in saved.values())
print(f"\nbytes for each of {numel:,} parameters, all files together: {written / numel:.2f}")
# The shards of two layers are padded; on GPUs these and four parameters, each to eight elements.
assert 0 <= written - 12 * numel < 12 * 2 * 8 * (N + 2)

# %% [markdown]
# **Measured**: twelve, plus at most a few bytes of padding. The bf16 parameter is the rounded
# master, so it need not be written. The files are safetensors files, so any library can read them.
# Each tensor in them is the shard of a flat parameter or of a moment.
#
# ## Another number of ranks
#
# **Predict**: load the checkpoint on the same number of ranks, on one rank, and on one more than
# before. In which of these cases are the loaded weights equal bit for bit? And after two more
# steps?

# %%
on_gpus = torch.cuda.is_available()
print(f"saved on {N}; the next losses{'':15}" + "  ".join(f"{loss:.3f}" for loss in losses))
for ranks in dict.fromkeys((N, 1, N + 1)):
    loaded, after, weights, extra = run("worker_08:resumes", ranks, str(folder), rows)[0]
    same = all(loaded[name].equal(weight) for name, weight in saved.items())
    still = all(weights[name].equal(weight) for name, weight in later.items())
    print(f"loaded on {ranks}: same bits {same!s:7} losses  "
          + "  ".join(f"{loss:.3f}" for loss in after) + f"   then same bits: {still}")
    assert same and extra == {"epoch": 1} and (still or ranks != N or on_gpus)
    # A GPU chooses its kernels by the number of rows, and more ranks than GPUs run on the CPU. So
    # the results are rounded to the 8 bits of bf16 in different places.
    assert all(abs(a - b) < (1 / 256 if on_gpus else 1e-3)
               for a, b in zip(after, losses, strict=True))

# %% [markdown]
# **Measured**: the loaded weights are equal bit for bit on any number of ranks. After two more
# steps they still are on the same number of ranks, so Adam's moments and its count of steps were
# restored too. Another number of ranks adds up the gradients in another order, and that can change
# the last bits.
#
# Nothing was converted for this. A flat parameter of $P_\ell$ elements on $N$ ranks has shards of
# $S$ elements. If a parameter begins at element $o$ of its flat parameter, its element $i$ is here:
#
# $$\text{file of rank} = \left\lfloor \frac{o + i}{S} \right\rfloor \qquad
# \text{element of its shard} = (o + i) \bmod S \qquad
# S = \left\lceil \frac{P_\ell}{N} \right\rceil$$
#
# A rank that loads computes its new ranges and reads them from the files that have them.
# [`CheckpointReader`](../zero3/checkpoint/reader.py#read-a-checkpoint) finds $o$ and the shape in
# the manifest:

# %%
flat = CheckpointReader(folder / "step-00000003").flats[0]
for param in flat["params"]:
    name, shape = param["names"][0], tuple(param["shape"])
    print(f"{name:9}{shape!s:11} begins at element {param['offset']:,}")

fig, ax = plt.subplots(figsize=(9, 1.9), layout="constrained")
numel = flat["numel"]
old, new = -(-numel // N), -(-numel // (N + 1))  # elements of a shard
for at, (verb, shard) in enumerate((("saved by", old), ("loaded by", new))):
    cuts = sorted({*range(0, numel, old), *range(0, numel, shard), numel})
    for begin, end in pairwise(cuts):
        file = begin // old
        ax.barh(at, end - begin, left=begin, height=0.7, color=COLORS["shard"],
                alpha=0.25 + 0.5 * file / N)
    for rank, begin in enumerate(range(0, numel, shard)):
        ax.plot([begin, begin], [at - 0.42, at + 0.42], color=NEUTRAL["fg"])
        ax.text(begin + numel / 200, at, f"{verb} rank {rank}", va="center", fontsize=8)
for param in flat["params"]:
    ax.axvline(param["offset"], color=NEUTRAL["fg"], linestyle=":")
ax.set_title(f"The flat parameter of the first layer, saved by {N} ranks and loaded by {N + 1}. A "
             "shade is a file, a dotted line begins a parameter", fontsize=9, loc="left")
ax.set(xlabel="element", yticks=[], xlim=(-numel / 100, numel * 1.01))
ax.invert_yaxis()
ax.spines[["top", "right", "left"]].set_visible(False)
plt.show()

# %% [markdown]
# Each rank reads its elements from one file or from several, and receives none from other ranks. A
# shard can begin in the middle of a parameter, and even in the middle of one of its rows.
#
# ## A damaged byte
#
# A disk has changed one bit in the file of the last rank. **Predict**: on which ranks does `load`
# raise an error? And which weights does the model have afterwards?

# %% tags=["varies"]
# %%writefile -a worker_08.py


def refuses(folder):
    """Load the damaged checkpoint, and then the one before it"""
    model, optimizer = build(seed=1)
    before = weights_of(model)
    message = "loaded"
    try:
        load(folder, model, optimizer)
    except RuntimeError as error:
        message = str(error)
    after = weights_of(model)
    load(f"{folder}/step-00000002", model, optimizer)
    return message, all(after[name].equal(before[name]) for name in before)


def saves_meanwhile(folder, rows):
    """Save asynchronously, and take a step while the files are written"""
    model, optimizer = build(seed=0)
    train(model, optimizer, range(1), rows)
    saving = save(folder, model, optimizer, step=1, async_write=True)
    names = [sorted(path.name for path in Path(folder).iterdir())]
    saved = weights_of(model)
    train(model, optimizer, range(1, 2), rows)
    path = saving.wait()
    names.append(sorted(path.name for path in Path(folder).iterdir()))
    stepped = weights_of(model)
    load(path, model, optimizer)
    loaded = weights_of(model)
    return (names, all(loaded[name].equal(saved[name]) for name in saved),
            all(stepped[name].equal(saved[name]) for name in saved))


# %%
victim = folder / "step-00000003" / f"rank-{N - 1:05}-of-{N:05}.safetensors"
content = bytearray(victim.read_bytes())
content[len(content) // 3] ^= 1  # one bit of one byte
victim.write_bytes(content)

ranks = run("worker_08:refuses", N, str(folder))
print(ranks[0][0].replace(scratch.name, "...").replace(". ", ".\n"))
print(f"\nranks with this error: {sum('is damaged' in error for error, _ in ranks)} of {N}; "
      f"models with unchanged weights: {sum(unchanged for _, unchanged in ranks)} of {N}")
assert all(f"file of rank {N - 1}, is damaged" in error and unchanged for error, unchanged in ranks)

# %% [markdown]
# **Measured**: on all ranks, even on those that read no damaged byte, and no weight has changed.
# `load` first reads and checks everything. Then the ranks agree that all of them have succeeded,
# and only then do they change the model. Otherwise some ranks would have loaded and others not.
# [Each block of 1 MiB has a
# checksum](../zero3/checkpoint/reader.py#read-ranges-of-a-safetensors-file-and-check-them), so a
# reader of a range checks only the blocks that it reads. The previous checkpoint is intact: the
# ranks loaded it next.
#
# ## Save while training continues
#
# With `async_write=True`, `save` copies the shards and returns, and a thread writes the copies.
# **Predict**: take one more step after `save`, and then wait for the checkpoint. Does it have the
# weights from before this step or from after it?

# %%
other = Path(scratch.name) / "other"
(before, after), as_saved, as_stepped = run("worker_08:saves_meanwhile", N, str(other), rows)[0]
print(f"when `save` returns: {before}")
print(f"after `wait`:        {after}\n")
print(f"the loaded weights are those at `save`: {as_saved}; those a step later: {as_stepped}")
assert before == ["step-00000001.partial"] and after == ["step-00000001"]
assert as_saved and not as_stepped

# %% [markdown]
# **Measured**: the weights from before the step, as they were at `save`. The folder's name ends in
# `.partial` until all files are on the disk, and `load` ignores it until it has its manifest. Then
# two renames [turn it into a
# checkpoint](../zero3/checkpoint/reader.py#turn-a-folder-of-files-into-a-checkpoint): the manifest
# gets its name first, and the folder second. A file system completes a rename or changes nothing,
# so a run that is killed in between still has the previous checkpoint or already the new one.
#
# ## Export
#
# **Predict**: another machine does not have `zero3`. Which libraries does it need to use these
# weights?

# %%
out = Path(scratch.name) / "exported"
with redirect_stdout(io.StringIO()) as printed:
    export(folder / "step-00000002", out)
print(printed.getvalue().replace(scratch.name, "..."))

plain = nn.Sequential(nn.Linear(301, 501), nn.Tanh(), nn.Linear(501, 301)).to(torch.bfloat16)
print(plain.load_state_dict(load_file(out / "model.safetensors")))
loaded = run("worker_08:resumes", 1, str(folder / "step-00000002"), rows)[0][0]
same = all(loaded[name].equal(weight) for name, weight in plain.state_dict().items())
print(f"same bits as from the shards: {same}")
assert same

# %% [markdown]
# **Measured**: PyTorch and safetensors.
# [`export`](../zero3/checkpoint/convert.py#export-the-weights-for-hugging-face) reads one parameter
# at a time from the files of all ranks, rounds the master to the data type of the model, and writes
# it under its name in the plain model. The command line is `python -m zero3.checkpoint export
# FOLDER OUT`. `universal` converts the moments too, for DeepSpeed and FSDP2.
#
# **Answer**: yes. A shard is a range of parameters, and the manifest says where each parameter
# begins. With the formula above, any number of ranks can find its new ranges in the files of the
# old ones.
#
# ## Exercise
#
# Find the master of `2.weight[200, 7]` in the files of step 2 with nothing but the formula above.
# Which rank's file has it, and which element is it in the tensor `1.param` of that file? The weight
# has 301 rows of 501 elements and begins at 0. A bias of 301 elements follows it.

# %%
mine = None  # (rank, element of its shard)

if mine is None:
    print("not answered yet")
else:
    file = folder / "step-00000002" / f"rank-{mine[0]:05}-of-{N:05}.safetensors"
    with safe_open(file, "pt") as tensors:
        found = tensors.get_slice("1.param")[mine[1] : mine[1] + 1]
    # The weight is the rounded master.
    right = found.bfloat16().equal(plain[2].weight[200, 7:8].detach())
    print("right" if right else "another element")

# %% [markdown]
# <details><summary>Answer</summary>
#
# The weight is stored row by row, so $i = 200 \cdot 501 + 7$, with $o = 0$. The flat parameter has
# $P_\ell = 301 \cdot 501 + 301$ elements.
#
# ```python
# S = -(-(301 * 501 + 301) // N)
# mine = divmod(200 * 501 + 7, S)
# ```
#
# On two ranks the file of rank 1 has it. `CheckpointReader.read` does the same. If a range goes
# beyond the end of a shard, it continues in the next file.
# </details>
#
# Next: [groups of ranks](09_groups_of_ranks.ipynb), or [the
# source](../zero3/layer.py#zero-3-shard-parameters-gradients-and-optimizer-states).

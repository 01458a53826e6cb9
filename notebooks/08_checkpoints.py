# ---
# jupyter:
#   jupytext:
#     text_representation: {extension: .py, format_name: percent}
#   kernelspec: {display_name: Python 3, language: python, name: python3}
# ---

# %% [markdown]
# # Checkpoints: who wrote a number does not matter
#
# **Question**: each rank saves its own shards, and gathers nothing. Can a run that was saved like
# this go on with another number of ranks?
#
# A long run ends many times before it is done. What it needs to go on is in the shards: all ranks
# write them at the same time, each into a file of its own, and a
# [manifest](../zero3/checkpoint/reader.py#what-a-checkpoint-is-on-disk) says once for all what these numbers
# are.
#
# Below are two layers of odd sizes in bf16, with Adam. `goes_on` builds the model with other
# values, loads, and takes the same two steps that were taken after the save.

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
    """Some steps, with the same `rows` on any number of ranks; their losses, means over all rows"""
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
    """Three steps with a save after the second and the third; and two steps more"""
    model, optimizer = build(seed=0)
    train(model, optimizer, range(2), rows)
    save(folder, model, optimizer, step=2)
    train(model, optimizer, range(2, 3), rows)
    save(folder, model, optimizer, step=3, extra={"epoch": 1})
    saved = weights_of(model)
    return saved, train(model, optimizer, range(3, 5), rows), weights_of(model)


def goes_on(folder, rows):
    model, optimizer = build(seed=1)
    extra = load(folder, model, optimizer)
    loaded = weights_of(model)
    return loaded, train(model, optimizer, range(3, 5), rows), weights_of(model), extra


# %% [markdown]
# ## Predict
#
# A parameter is in bf16, 2 bytes; its master and Adam's two moments are 12 bytes more; its
# gradient is gone. How many bytes does a rank write for each parameter of its shards: 2, 12 or 14?

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

preload("zero3.checkpoint.save_load")
N = default_ranks()
rows = 2 * N * (N + 1)  # which 1, N and N + 1 ranks can share
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
assert 0 <= written - 12 * numel < 12 * 2 * N

# %% [markdown]
# **Measured**: twelve, and for padding. The 2 bytes are the master, rounded, so to write the
# master is to write both. The files are of safetensors, each tensor is the shard of a flat
# parameter or of a moment, and any library can read them.
#
# ## Another number of ranks
#
# **Predict**: the checkpoint is loaded on as many ranks, on one, and on one more than before.
# Where are the weights the same to the bit? And after two more steps?

# %%
on_gpus = torch.cuda.is_available()
print(f"saved on {N}; losses afterwards{'':13}" + "  ".join(f"{loss:.3f}" for loss in losses))
for ranks in dict.fromkeys((N, 1, N + 1)):
    loaded, after, weights, extra = run("worker_08:goes_on", ranks, str(folder), rows)[0]
    same = all(loaded[name].equal(weight) for name, weight in saved.items())
    still = all(weights[name].equal(weight) for name, weight in later.items())
    print(f"loaded on {ranks}: same bits {same!s:7} losses  "
          + "  ".join(f"{loss:.3f}" for loss in after) + f"   then same bits: {still}")
    assert same and extra == {"epoch": 1} and (still or ranks != N or on_gpus)
    # On GPUs other kernels run for other numbers of rows, and more ranks than GPUs run on the CPU.
    # Each rounds to the 8 bits of bf16 in other places.
    assert all(abs(a - b) < (1 / 256 if on_gpus else 1e-3)
               for a, b in zip(after, losses, strict=True))

# %% [markdown]
# **Measured**: after loading, always: on more ranks and on fewer, no bit of a weight is another.
# After two more steps the same number of ranks has the same bits still, which it would not with
# other moments or another count of Adam's steps. Other numbers of ranks add gradients up in
# another order, and that may change the last digit.
#
# Nothing was converted for this. A parameter that begins at element $o$ of its flat parameter has
# its element $i$ in
#
# $$\text{file of rank} = \left\lfloor \frac{o + i}{S} \right\rfloor \qquad
# \text{element of its shard} = (o + i) \bmod S \qquad
# S = \left\lceil \frac{P_\ell}{N} \right\rceil$$
#
# and whoever loads reads the ranges that are its own now, from whichever files they are in. The
# manifest, read by [`CheckpointReader`](../zero3/checkpoint/reader.py#a-checkpoint-to-be-read), has $o$ and the
# shape:

# %%
flat = CheckpointReader(folder / "step-00000003").flats[0]
for param in flat["params"]:
    name, shape = param["names"][0], tuple(param["shape"])
    print(f"{name:9}{shape!s:11} begins at element {param['offset']:,}")

fig, ax = plt.subplots(figsize=(9, 1.9), layout="constrained")
numel = flat["numel"]
old, new = -(-numel // N), -(-numel // (N + 1))  # elements of a shard
files = plt.colormaps["Blues"]
for at, (what, shard) in enumerate((("saved by", old), ("loaded by", new))):
    cuts = sorted({*range(0, numel, old), *range(0, numel, shard), numel})
    for begin, end in pairwise(cuts):
        color = files(0.25 + 0.5 * (begin // old) / N)
        ax.barh(at, end - begin, left=begin, height=0.7, color=color)
    for rank, begin in enumerate(range(0, numel, shard)):
        ax.plot([begin, begin], [at - 0.42, at + 0.42], color="#252525")
        ax.text(begin + numel / 200, at, f"{what} rank {rank}", va="center", fontsize=8)
for param in flat["params"]:
    ax.axvline(param["offset"], color="#d94801", linestyle=":")
ax.set_title(f"the first layer's flat parameter, saved by {N} and loaded by {N + 1}: colours are "
             "files, dotted lines begin a parameter", fontsize=9, loc="left")
ax.set(xlabel="element", yticks=[], xlim=(-numel / 100, numel * 1.01))
ax.invert_yaxis()
ax.spines[["top", "right", "left"]].set_visible(False)
plt.show()

# %% [markdown]
# A rank that loads reads from one file or from several, and asks nobody. Cuts need not be where a
# parameter begins, nor where one of its rows does.
#
# ## A damaged byte
#
# A disk returns one byte that is not what was written, in the last rank's file. **Predict**: which
# ranks notice? And what is then in the model?

# %% tags=["varies"]
# %%writefile -a worker_08.py


def refuses(folder):
    """Load what is damaged; then the step before it"""
    model, optimizer = build(seed=1)
    before = weights_of(model)
    told = "loaded"
    try:
        load(folder, model, optimizer)
    except RuntimeError as error:
        told = str(error)
    after = weights_of(model)
    load(f"{folder}/step-00000002", model, optimizer)
    return told, all(after[name].equal(before[name]) for name in before)


def saves_meanwhile(folder, rows):
    """Save asynchronously, and step while it is being written"""
    model, optimizer = build(seed=0)
    train(model, optimizer, range(1), rows)
    saving = save(folder, model, optimizer, step=1, async_write=True)
    told, saved = [sorted(path.name for path in Path(folder).iterdir())], weights_of(model)
    train(model, optimizer, range(1, 2), rows)
    path = saving.wait()
    told.append(sorted(path.name for path in Path(folder).iterdir()))
    stepped = weights_of(model)
    load(path, model, optimizer)
    loaded = weights_of(model)
    return (told, all(loaded[name].equal(saved[name]) for name in saved),
            all(stepped[name].equal(saved[name]) for name in saved))


# %%
victim = folder / "step-00000003" / f"rank-{N - 1:05}-of-{N:05}.safetensors"
content = bytearray(victim.read_bytes())
content[len(content) // 3] ^= 1  # one bit of one byte
victim.write_bytes(content)

told = run("worker_08:refuses", N, str(folder))
print(told[0][0].replace(scratch.name, "...").replace(". ", ".\n"))
print(f"\nranks with such an error: {sum('is damaged' in error for error, _ in told)} of {N}; "
      f"models as they were before: {sum(untouched for _, untouched in told)} of {N}")
assert all(f"file of rank {N - 1}, is damaged" in error and untouched for error, untouched in told)

# %% [markdown]
# **Measured**: all ranks, also those that read nothing damaged: `load` checks everything, has the
# ranks agree, and only then begins to change the model. Otherwise some would have loaded and some
# not. [Checksums](../zero3/checkpoint/tensor_files.py#files-of-tensors-written-as-a-stream-read-by-ranges-checked)
# are of blocks of 1 MiB, so that a reader of a range checks what it reads. The checkpoint before
# is whole, and was loaded next.
#
# ## While training goes on
#
# `async_write=True` copies the shards and returns; a thread writes the copies. **Predict**: after
# `save` one more step is taken, and then somebody waits for the checkpoint. Which weights are in
# it?

# %%
other = Path(scratch.name) / "other"
(before, after), as_saved, as_stepped = run("worker_08:saves_meanwhile", N, str(other), rows)[0]
print(f"when `save` returns: {before}")
print(f"after `wait`:        {after}\n")
print(f"loaded is what was there at `save`: {as_saved}; a step later: {as_stepped}")
assert before == ["step-00000001.partial"] and after == ["step-00000001"]
assert as_saved and not as_stepped

# %% [markdown]
# **Measured**: those of the moment of `save`. Until all files and the manifest are on the disk the
# folder ends in `.partial`, and no `load` takes it for a checkpoint. A rename makes it one, which
# a file system does [wholly or not at
# all](../zero3/checkpoint/reader.py#make-a-folder-of-files-a-checkpoint); so whatever ends a run in between
# leaves the checkpoint before.
#
# ## To leave
#
# **Predict**: what does a machine need to use these weights on which there is no `zero3`?

# %%
out = Path(scratch.name) / "exported"
with redirect_stdout(io.StringIO()) as said:
    export(folder / "step-00000002", out)
print(said.getvalue().replace(scratch.name, "..."))

plain = nn.Sequential(nn.Linear(301, 501), nn.Tanh(), nn.Linear(501, 301)).to(torch.bfloat16)
print(plain.load_state_dict(load_file(out / "model.safetensors")))
loaded = run("worker_08:goes_on", 1, str(folder / "step-00000002"), rows)[0][0]
same = all(loaded[name].equal(weight) for name, weight in plain.state_dict().items())
print(f"same bits as in shards: {same}")
assert same

# %% [markdown]
# **Measured**: PyTorch and safetensors.
# [`export`](../zero3/checkpoint/convert.py#write-the-weights-as-hugging-face-has-them) reads parameter after
# parameter, whichever ranks had it, rounds the master to the model's data type, and gives it the
# name that it has in the plain model. On the command line it is `python -m zero3.checkpoint export
# FOLDER OUT`; `universal` takes moments along, to DeepSpeed and FSDP2.
#
# **Answer**: yes. Shards are ranges of parameters, and a range can be found again by anybody who
# knows where it was put. The number of ranks is how a checkpoint was written and no part of what
# is in it.
#
# ## Exercise
#
# Find the master of `2.weight[200, 7]` in the files of step 2 with nothing but the formula above:
# in which rank's file, and which element of the tensor `1.param` there? The weight has 301 rows of
# 501 elements, begins at 0, and a bias of 301 comes behind it.

# %%
mine = None  # (rank, element of its shard)

if mine is None:
    print("not answered yet")
else:
    file = folder / "step-00000002" / f"rank-{mine[0]:05}-of-{N:05}.safetensors"
    with safe_open(file, "pt") as tensors:
        found = tensors.get_slice("1.param")[mine[1] : mine[1] + 1]
    # Rounded, the master is the weight.
    print("right" if found.bfloat16().equal(plain[2].weight[200, 7:8].detach()) else "another one")

# %% [markdown]
# <details><summary>Answer</summary>
#
# A weight lies row after row, so $i = 200 \cdot 501 + 7$ and $o = 0$; the flat parameter has
# $P_\ell = 301 \cdot 501 + 301$ elements.
#
# ```python
# S = -(-(301 * 501 + 301) // N)
# mine = divmod(200 * 501 + 7, S)
# ```
#
# On two ranks that is in the file of rank 1. `CheckpointReader.read` does the same, and goes on in the next
# file where a range ends behind a shard.
# </details>
#
# Back to [the first notebook](01_where_the_memory_goes.ipynb), or on to [the
# source](../zero3/layer.py#zero-3-parameters-gradients-and-optimizer-states-in-shards).

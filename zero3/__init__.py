r"""
# zero3: the chapters

`zero3` is ZeRO-3 to read and to train with. Tests check its claims about numbers, bytes and order.

Read the files at the top first. `layer.py` is the heart, and the other files of the first part are
its tools. Each folder is a later chapter: it adds one thing to the heart, and can be skipped.

| chapter | file | contents |
|---|---|---|
| 4 | `minimal.py` | the idea, whole: one file that imports torch and nothing else |
| 4 | `layer.py` | the heart: `Zero3Layer` and `Zero3Sequential` |
| 4 | `flat.py` | the flat parameter: one buffer that all parameters of a layer are views of |
| 4 | `watch.py` | when the backward pass of a layer begins and ends |
| 4 | `schedule.py` | which layer is gathered next, and which stays full |
| 4 | `sharded.py` | what a sharded layer offers its users: full parameters, clipping, errors |
| 4 | `gradients.py` | the norm of a sharded gradient, and clipping by it |
| 5 | `comm/collectives.py` | the communicator: collectives that overlap computation |
| 5 | `comm/reducer.py` | the reduce of a layer, while the next one goes backward |
| 5 | `comm/order.py` | the ranks of a model: alike, or an error on all of them |
| 5 | `in_flight.py` | memory in flight: one owner, which alone may free it |
| 5 | `comm/mesh.py` | groups of ranks: a model on some of them, and replicas of a sharded model |
| 5 | `comm/leaving.py` | the end of a program: gloo's threads end first |
| 5 | `comm/links.py` | `Links`: nodes, copies inside a node, and fewer bytes between nodes |
| 5 | `comm/encodings.py` | `Int8` and `Int4`: the same numbers in fewer bytes |
| 5 | `comm/parts.py` | which part of a weight a rank has |
| 6 | `offload/tiers.py` | `Offload`: shards on the device, in CPU memory or in files |
| 6 | `offload/encoded.py` | frozen weights that rest in 8 or 4 bits |
| 6 | `offload/in_file.py` | tensors in a file, read ahead into a few buffers |
| 6 | `offload/disk.py` | reads and writes past the page cache |
| 6 | `offload/tensors.py` | safetensors files, written tensor by tensor |
| 6 | `offload/memory.py` | pinned CPU memory, which an accelerator copies by itself |
| 6 | `offload/bench.py` | the speed of a disk |
| 7 | `optimizer/stage3.py` | `Zero3Optimizer`: loss scale, clipping, micro-batches, the step |
| 7 | `optimizer/buckets.py` | small layers share a reduce-scatter |
| 7 | `optimizer/states.py` | masters, moments and gradients of a shard, in any tier |
| 8 | `whole_model/wrap.py` | `wrap`: shard a whole model without changing it |
| 8 | `whole_model/units.py` | layers of a whole model, prefetched in an order that was recorded |
| 8 | `whole_model/materialise.py` | models larger than memory: built and read layer by layer |
| 8 | `whole_model/together.py` | small layers share an all-gather |
| 9 | `checkpoint/save_load.py` | `save` and `load`: on any number of ranks, beside training |
| 9 | `checkpoint/reader.py` | a checkpoint on disk, complete or absent |
| 9 | `checkpoint/entries.py` | the contents of a checkpoint: model, optimizer, random states |
| 9 | `checkpoint/tensor_files.py` | reads of ranges from files of tensors, with checksums |
| 9 | `checkpoint/formats.py` | formats of other libraries |
| 9 | `checkpoint/convert.py` | converting between them |
| measuring | `estimate/ledger.py` | `Ledger`: measured bytes that a rank sends, holds and reads |
| measuring | `estimate/predict.py` | `predict`: the same bytes, from shapes |
| measuring | `estimate/formulas.py` | the papers' formulas; `python -m zero3.estimate` |
| measuring | `estimate/layouts.py` | `Layout`: groups of ranks, and encodings between them |
| measuring | `estimate/between.py` | which layout sends the fewest bytes between nodes |
| measuring | `estimate/splitting.py` | what layers that ranks split keep and send |
| pipelines | `pipeline/schedules.py` | a pipeline's step as a list of actions |
| pipelines | `pipeline/timeline.py` | what a schedule costs, before it runs |
| pipelines | `pipeline/stages.py` | stages: layers that stay whole as long as the schedule says |
| pipelines | `pipeline/channels.py` | channels: activations and gradients between the stages |
| pipelines | `pipeline/pipeline.py` | `Pipeline`: train a model in stages that are sharded, too |
| pipelines | `pipeline/__init__.py` | `Pipeline`, imported when it is used first |
| compiler | `compiler/graph.py` | a step as a list of operations |
| compiler | `compiler/passes.py` | passes: gather earlier, keep, share and wait later |
| compiler | `compiler/trace.py` | from a model to graphs, by `torch.compile` |
| compiler | `compiler/engines.py` | engines: who computes between two communications |
| compiler | `compiler/away.py` | optimizer states on their way to CPU memory and back |
| compiler | `compiler/model.py` | `compile`: a sharded model that runs as graphs |
| injection | `inject/replace.py` | `inject` and `restore`: other forwards, same model |
| injection | `inject/policies.py` | policies: which modules, and which forwards |
| injection | `inject/cross_entropy.py` | a loss that never has all logits |
| injection | `inject/tensor.py` | tensor parallelism: ranks that compute one layer together |
| injection | `inject/line.py` | the ranks that split a model, and what they exchange |
| injection | `inject/sequence.py` | norms and the residual stream on some of the positions |
| injection | `inject/patterns.py` | patterns: how known models are split |
| injection | `inject/__init__.py` | `inject`, `restore`, `report`, imported when used first |
| compression | `compression/rules.py` | rules: which compression, and when |
| compression | `compression/weights.py` | compressed weights: masks and grids |
| compression | `compression/thresholds.py` | the k-th smallest number of all ranks |
| compression | `compression/compress.py` | `compress`: rules that advance with the optimizer |
| compression | `compression/freeing.py` | compressed weights live only while a module computes |
| compression | `compression/distill.py` | `distill`: a student from some layers of a teacher |
| compression | `compression/clean.py` | `clean`: a model that really is smaller |
| compression | `compression/stored.py` | weights that are stored in their bits |
| compression | `compression/__init__.py` | its names, imported when they are used first |
| guards | `guards/freed.py` | a freed parameter, which reports every use |
| guards | `guards/placement.py` | the same parameters on every rank, on the right device |
| guards | `guards/contents.py` | modules and libraries around a sharded model |
| guards | `guards/shard_gradients.py` | gradients of shards, which refuse a norm of a part |
| guards | `guards/room.py` | memory that is left, before it is taken |
| guards | `guards/options.py` | checks of arguments |
| guards | `guards/command_line.py` | errors of command lines, in one line |
| a training job | `train/job.py` | the main job, `make train` |
| a training job | `train/gpt.py` | a byte-level GPT, as a list of layers |
| a training job | `train/run.py` | its ranks and its checkpoints |
| a training job | `train/compressed.py` | the same job, compressed while it trains |
| a training job | `train/report.py` | its table and pictures |
| a training job | `train/launch.py` | ranks started from Python, for notebooks and tests |

Ten invariants always hold. Each has a number, and a test that fails if it is broken:

| invariant | claim |
|---|---|
| I1, numbers | fp32 training equals plain PyTorch on the global batch; on two ranks, DDP's bits |
| I2, rest | between steps a rank holds only $\lceil P_\ell/N \rceil$ elements of a layer |
| I3, peak | in a step the computing layer and the next are whole, and gradients in flight |
| I4, traffic | forward and backward each gather a layer once, the last one once for both |
| I5, padding | padding is zero in weights, gradients, moments and norms |
| I6, order | all ranks communicate in the same order, or get an error; on CPUs it names both |
| I7, micro-batches | a second backward adds: $k$ of them equal one batch $k$ times as large |
| I8, tiers | the tier of shards and states changes no bit, if the same processor steps them |
| I9, devices | CPUs with gloo and GPUs with NCCL run the same lines |
| I10, faults | a crash at any moment leaves the last checkpoint, and no garbage |

I1 holds with `Zero3Optimizer`. It also holds with torch's optimizers on the shards, as long as each
parameter gets a gradient. If the loss does not depend on a parameter, that parameter has no
gradient in plain PyTorch, and does not change. In a shard it lies between others and has a gradient
of zero. Weight decay, momentum and step counts of torch's optimizers then move it.
`Zero3Optimizer` does not change it.

**Which chapters combine.** A "no" is an error with these words, before anything trains:

| | `Offload` | `Links` | `compress` | policies | `tensor_parallel` | `Pipeline` |
|---|---|---|---|---|---|---|
| `compile` | yes | yes | yes, with hooks | yes | no: split over ranks | no: a plain module |
| `Pipeline` | yes | no: a mesh with | yes | yes | no: stages of a pipeline | |
| `tensor_parallel` | yes | yes | no: split | yes, in one call | | |
| policies | yes | yes | yes | | | |
| `compress` | yes | yes, for some rules | | | | |
| `Links` | yes | | | | | |

Compressed layers of a compiled model run with hooks. Elements are not pruned where `Links` encodes
the weights. Policies are those of `inject`, and all of them come in one call with
`tensor_parallel`. Inject and compress in any order, then shard, and build the optimizer last.

Code, tests and the main job go through the same three steps: predict the bytes (`predict`), run and
measure them (`Ledger`), compare.
"""

import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

# It waits for gloo's threads when the program ends.
from zero3.comm import leaving as leaving

__version__ = "0.1.0"

_PUBLIC = {
    "Zero3Layer": "layer",
    "Zero3Sequential": "layer",
    "Offload": "offload.tiers",
    "Links": "comm.links",
    "Int8": "comm.encodings",
    "Int4": "comm.encodings",
    "Zero3Optimizer": "optimizer.stage3",
    "Zero3Model": "whole_model.wrap",
    "wrap": "whole_model.wrap",
    "compile": "compiler.model",
    "Deferred": "whole_model.materialise",
    "save": "checkpoint.save_load",
    "load": "checkpoint.save_load",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    # Import only what is asked for: `python -m zero3.estimate` needs no model.
    if name in _PUBLIC:
        return getattr(import_module(f"zero3.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module `zero3` has no attribute `{name}`")


def commit_name() -> str:
    """
    ## The current commit, with `-dirty` if files differ from it

    A figure names the commit that it was measured with. Returns "unknown" outside a git repository.
    """
    if shutil.which("git") is None:
        return "unknown"
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"

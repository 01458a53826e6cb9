r"""
# zero3: the chapters

Read the numbered files in this order, and skip those with "more". The chapters 1, 2 and 4 are pages
of the book (`docs/`).

| chapter | file | contents |
|---|---|---|
| 3 | `minimal.py` | the idea, whole, in one file |
| 5 | `layer.py` | the heart: `Zero3Layer` and `Zero3Sequential` |
| 5 | `flat.py` | the flat parameter: one buffer for all parameters of a layer |
| 5 | `watch.py` | when the backward pass of a layer begins and ends |
| 5 | `sharded.py` | full parameters, clipping, errors; which layer is gathered next |
| 5 | `gradients.py` | the norm of a sharded gradient, and clipping by it |
| 6 | `comm/collectives.py` | collectives that overlap computation |
| 6 | `comm/reducer.py` | the reduce of a layer, while the next one goes backward |
| 6 | `comm/order.py` | all ranks alike, or an error on all of them |
| 6 | `comm/leaving.py` | the end of a program: gloo's threads end first |
| 7 | `optimizer/stage3.py` | `Zero3Optimizer`: loss scale, clipping, the step |
| 7 | `optimizer/buckets.py` | small layers share a reduce-scatter |
| 7 | `optimizer/states.py` | masters, moments and gradients of a shard, in one place or two |
| 7 | `optimizer/whole.py` | whole matrices for Muon: each has an owner |
| 7 | `optimizer/steps.py` | who hears of the steps of all optimizers |
| more | `offload/tiers.py` | `Offload`: shards in CPU memory, in files or encoded |
| more | `offload/in_file.py` | tensors in a file, read ahead |
| more | `offload/disk.py` | reads and writes past the page cache |
| more | `offload/activations.py` | activations that rest elsewhere |
| more | `offload/tensors.py` | safetensors files, written tensor by tensor |
| more | `whole_model/units.py` | layers of a whole model, in a recorded order |
| more | `whole_model/wrap.py` | `wrap`: shard a whole model without changing it |
| more | `whole_model/materialise.py` | models larger than memory |
| more | `checkpoint/save_load.py` | `save` and `load`, on any number of ranks |
| more | `checkpoint/reader.py` | a checkpoint on disk, complete or absent |
| more | `checkpoint/entries.py` | the contents of a checkpoint |
| more | `checkpoint/formats.py` | formats of other libraries |
| more | `checkpoint/convert.py` | converting between them |
| more | `comm/links.py` | `Links`: groups of ranks, and fewer bytes between nodes |
| more | `comm/encodings.py` | `Int8` and `Int4`: numbers in fewer bytes |
| more | `comm/parts.py` | which part of a weight a rank has |
| more | `estimate/ledger.py` | `Ledger`: measured bytes |
| more | `estimate/predict.py` | `predict`: the same bytes, from shapes |
| more | `estimate/formulas.py` | the papers' formulas |
| more | `estimate/saved.py` | what autograd saves, and how much of it leaves |
| more | `estimate/between.py` | which layout sends the fewest bytes |
| more | `pipeline/schedules.py` | a pipeline's step as a list of actions |
| more | `pipeline/timeline.py` | what a schedule costs, before it runs |
| more | `pipeline/stages.py` | stages: layers that stay whole for longer |
| more | `pipeline/channels.py` | activations and gradients between the stages |
| more | `pipeline/pipeline.py` | `Pipeline`: train a model in sharded stages |
| more | `pipeline/__init__.py` | its public name |
| more | `compiler/graph.py` | a step as a list of operations |
| more | `compiler/passes.py` | passes: gather earlier, keep, share |
| more | `compiler/trace.py` | from a model to graphs, by `torch.compile` |
| more | `compiler/engines.py` | who computes between two communications |
| more | `compiler/away.py` | optimizer states that leave the device |
| more | `compiler/model.py` | `compile`: a sharded model that runs as graphs |
| more | `inject/replace.py` | `inject` and `restore` |
| more | `inject/policies.py` | policies: which modules, and which forwards |
| more | `inject/cross_entropy.py` | a loss that never has all logits |
| more | `inject/tensor.py` | tensor parallelism |
| more | `inject/line.py` | what the ranks of a split model exchange |
| more | `inject/sequence.py` | norms on some of the positions |
| more | `inject/__init__.py` | its public names |
| more | `compression/rules.py` | rules: which compression, and when |
| more | `compression/weights.py` | compressed weights: masks and grids, freed after use |
| more | `compression/thresholds.py` | the k-th smallest number of all ranks |
| more | `compression/compress.py` | `compress`: rules that advance with the optimizer |
| more | `compression/distill.py` | `distill`: a student from a teacher's layers |
| more | `compression/clean.py` | `clean`: a model that really is smaller |
| more | `compression/stored.py` | weights that are stored in their bits |
| more | `compression/__init__.py` | its public names |
| more | `guards/moments.py` | when the guards look |
| more | `guards/freed.py` | a freed parameter reports every use |
| more | `guards/placement.py` | the same parameters on every rank |
| more | `guards/contents.py` | a use of a layer that would go wrong later |
| more | `guards/shard_gradients.py` | no norm of a part of a gradient |
| more | `guards/room.py` | memory that is left |
| more | `guards/checks.py` | checks: of arguments, layers, and what ranks will send |
| more | `guards/command_line.py` | errors of command lines |
| more | `guards/__init__.py` | all guards in one place |
| more | `beside/accelerate.py` | accelerate: its calls, on a sharded model |
| more | `beside/trainer.py` | Trainer: Hugging Face's loop, on a sharded model |
| more | `beside/fabric.py` | Lightning Fabric: a strategy, for a sharded model |
| more | `beside/pairs.py` | pairs: the optimizer that steps a sharded model |
| more | `beside/dcp.py` | DCP: torch's checkpoints, from shards |
| more | `train/job.py` | the main job, `make train` |
| more | `train/gpt.py` | a byte-level GPT, as a list of layers |
| more | `train/compressed.py` | the same job, compressed while it trains |
| more | `train/report.py` | its table and pictures |
| more | `train/launch.py` | ranks, started from Python or by torchrun |

Ten invariants hold, and each has tests ([in full](../docs/invariants.md)):

| invariant | claim |
|---|---|
| I1, numbers | fp32 training equals plain PyTorch on the global batch; on two ranks, DDP's bits |
| I2, rest | between steps a rank holds only $\lceil P_\ell/N \rceil$ elements of a layer |
| I3, peak | in a step only the computing layer and the prefetched one are whole |
| I4, traffic | forward and backward each gather a layer once, the last one once for both |
| I5, padding | padding is zero in weights, gradients, moments and norms |
| I6, order | all ranks communicate in the same order, or get an error |
| I7, micro-batches | a second backward adds to the gradients |
| I8, tiers | the tier of shards and states changes no bit, if the same processor steps them |
| I9, devices | CPUs with gloo and GPUs with NCCL run the same lines |
| I10, faults | a crash leaves the last checkpoint, and no garbage |

I1 holds with `Zero3Optimizer`, and with torch's optimizers on the shards as long as each parameter
gets a gradient. A parameter without one gets zeros in the shard, and torch's optimizers then move
it by weight decay and momentum.

**Which chapters combine.** A "no" is an error before anything trains, whose message has the words
in the cell:

| | `activations=` | `Offload` | `Links` | `compress` | policies | `tensor_parallel` | `Pipeline` |
|---|---|---|---|---|---|---|---|
| `compile` | yes | yes | yes | yes | yes | no: split over ranks | no: a plain module |
| `Pipeline` | yes | yes | no: a mesh with | yes | yes | no: stages of a pipeline | |
| `tensor_parallel` | yes | yes | yes | no: split | yes, in one call | | |
| policies | yes | yes | yes | yes | | | |
| `compress` | yes | yes | yes, for some rules | | | | |
| `Links` | yes | yes | | | | | |
| `Offload` | yes | | | | | | |

With `Links` that encode the weights, rules that prune single elements are an error. Policies are
those of `inject`. Inject and compress in any order, then shard, and build the optimizer last.
"""

import shutil
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

from zero3 import guards

# It waits for gloo's threads when the program ends.
from zero3.comm import leaving as leaving
from zero3.guards import moments

# The training step calls the guards through `moments`, and can be read without them.
moments.guards = guards

__version__ = "0.1.0"

_PUBLIC = {
    "Zero3Layer": "layer",
    "Zero3Sequential": "layer",
    "Offload": "offload.tiers",
    "Links": "comm.links",
    "Int8": "comm.encodings",
    "Int4": "comm.encodings",
    "Zero3Optimizer": "optimizer.stage3",
    "Matrices": "optimizer.whole",
    "Zero3Model": "whole_model.wrap",
    "wrap": "whole_model.wrap",
    "compile": "compiler.model",
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
    done = subprocess.run(["git", "-C", str(Path(__file__).parent), "describe", "--always",
                           "--dirty", "--exclude=*"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"

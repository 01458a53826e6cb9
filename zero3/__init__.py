r"""
# zero3: the chapters

ZeRO-3 to read and to train with; what the text claims of numbers, bytes and order is tested.

Read the chapters in this order, and the tools where a chapter uses them: `comm.py` beside chapter
1, `disk.py` after chapter 2.

| chapter | file | what it holds |
|---|---|---|
| 1 | `layer.py` | the heart: `Zero3Layer`, `Zero3Sequential` |
| 2 | `offload.py` | `Offload`: shards that rest on the device, in CPU memory or in files |
| 3 | `states.py` | masters, moments and gradients of a shard, and where they rest |
| 3 | `buckets.py` | `Bucket`: small layers share a reduce-scatter |
| 3 | `optimizer.py` | `Zero3Optimizer`: loss scale, clipping, micro-batches, the step |
| 4 | `units.py` | layers of a whole model, fetched ahead along an order that was learnt |
| 4 | `materialise.py` | models larger than memory: made, read and written layer by layer |
| 4 | `coordinator.py` | `wrap`: a whole model, as it is, and what can be done with it then |
| 5 | `blocks.py` | files of tensors, written as a stream, read by ranges, checked |
| 5 | `archive.py` | what a checkpoint is on disk: there, or not there |
| 5 | `inventory.py` | what of a model and its optimizer goes into one, and comes out again |
| 5 | `checkpoint.py` | `save` and `load`: on any number of ranks, while training goes on |
| 5 | `formats.py`, `convert.py` | to other libraries, and back; `python -m zero3.checkpoint` |
| tools | `contents.py` | what is added to sharded modules, and other libraries around them |
| tools | `comm.py` | what ranks send each other |
| tools | `gradients.py` | a shard's gradient, which knows that it is a part; clipping by all |
| tools | `disk.py` | reading and writing past the page cache, and how fast that is |
| tools | `ledger.py` | the tape of what a rank sent, held, read and wrote |
| tools | `predict.py` | the same bytes, from shapes |
| tools | `launch.py` | ranks that are started from Python, in notebooks and tests |
| tools | `estimate.py` | the papers' formulas, and a command line to ask them |
| tools | `options.py` | checks of what is passed, and one line when it cannot work |
| app | `gpt.py`, `train.py` | a byte-level GPT, and the main job |
| app | `run.py`, `report.py` | its ranks and checkpoints; its table and pictures |

What the code keeps at all times has a number, and a test that fails without it:

| invariant | what it says |
|---|---|
| I1, numbers | fp32 training equals plain PyTorch on the global batch, on two ranks DDP's bits |
| I2, rest | between steps a rank has $\lceil P_\ell/N \rceil$ elements of a layer, nothing whole |
| I3, peak | in a step the computing layer and the next are whole, and gradients on their way |
| I4, traffic | a layer is unsharded forward and backward, and reduced once; the last saves one |
| I5, padding | is zero in weights, gradients, moments and norms |
| I6, order | all ranks send the same in the same order, or get an error that names both sides |
| I7, micro-batches | a second backward adds: $k$ of them are one batch $k$ times as large |
| I8, tiers | where shards and states rest changes no bit, on the processor that steps them |
| I9, devices | CPUs with gloo and GPUs with NCCL run the same lines |
| I10, faults | what ends a run at any moment leaves the last checkpoint, and nothing that stays |

I1 holds with `Zero3Optimizer`, and with an optimizer of torch's on the shards as long as each
parameter gets a gradient. A parameter that the loss does not depend on has none in plain PyTorch
and stays as it is. In a shard it lies between others and has a gradient of zero, so weight decay,
momentum and the count of steps of an optimizer of torch's move it; `Zero3Optimizer` leaves it as it
is.

The same three steps run through code, tests and the main job: predict (`predict`), run and measure
(`ledger`), compare.
"""

from importlib import import_module
from typing import Any

from zero3.guards.version import __version__ as __version__

_PUBLIC = {
    "Zero3Layer": "layer",
    "Zero3Sequential": "layer",
    "Offload": "offload",
    "Zero3Optimizer": "optimizer.stage3",
    "Zero3Model": "whole_model.wrap",
    "wrap": "whole_model.wrap",
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

r"""
# zero3

ZeRO-3 with every claim tested: a small implementation to read, and to train with.

Read the chapters in this order; each stands on those before it.

| chapter | file | what it holds |
|---|---|---|
| 1 | `layer.py` | the heart: `Zero3Layer`, `Zero3Sequential` |
| 3 | `optimizer.py` | `Zero3Optimizer`: fp32 masters, loss scale, clipping, buckets |
| tools | `ledger.py` | the wire, over which ranks send, and the tape of what they sent and held |
| tools | `estimate.py` | the papers' formulas for the same bytes, and a command line to ask them |
| app | `gpt.py`, `train.py`, `report.py` | a byte-level GPT, the main job, its table and pictures |

The same three steps run through code, tests and the main job: predict (`estimate`), run and measure
(`ledger`), compare.
"""

from zero3.layer import Zero3Layer, Zero3Sequential
from zero3.optimizer import Zero3Optimizer

__all__ = ["Zero3Layer", "Zero3Optimizer", "Zero3Sequential"]

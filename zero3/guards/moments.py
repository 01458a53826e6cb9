r"""
# Moments: when the guards look

`guards` has a function for each moment at which something could go wrong in silence. The heart
names the moment, and a guard decides whether to raise an error.

| a layer | who asks | refused, for instance |
|---|---|---|
| gets a module | `Zero3Layer.__init__` | parameters that are sharded already (`freed.py`) |
| compares it | `Communicator.open` | others on rank 1 (`placement.py`) |
| has a shard | `StorageFactory.shard` | no room for a step (`room.py`) |
| will compute | `_prepare` | a new parameter inside (`contents.py`) |
| has computed | `forward` | a write, which would be lost (`contents.py`) |
| goes backward | `_pre_backward_hook` | weights that have changed (`contents.py`) |
| waits for a transfer | `Transfer._arrive` | another layer on rank 1 (`checks.py`) |
| has a gradient | `add_grad` | the norm of a part (`shard_gradients.py`) |

`guards` is the package `zero3.guards`: each function says in its own file what it refuses, and
`LayerGuard` has those that know one layer. So whoever reads the heart can skip the checks:

$$\text{numbers with guards} = \text{numbers without guards}$$

**Run this**: `python -m pytest tests/guards`.

**Not covered, and what that costs**: `with guard:` and `mark` are mechanisms as well.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # The heart asks these, and does not import them: `zero3/__init__.py` hands them in.
    from zero3 import guards as guards

r"""
# Exercise 6: prefetch

In a chain, start the all-gather of the next layer before the current one computes.

**Given** a `Zero3Sequential` with

* `self.module_list`: all layers, in forward order
* `layer.next_layer`: a list with the next layer that has parameters, if there is one
* `layer.fetch_params()` starts an unshard, unless it has started already
* `layer._cleanup_params()` reshards, if there is something to free
* `layer.kept_for`: not `None` if the layer stays whole for the following backward pass
* `in_backward()`: whether a backward pass is running. With activation checkpointing, forward runs
  there too

**Do**: write a generator that yields the layers in order. When it yields a layer, the unshards of
this layer and of the next one have started, and no others. Each layer frees itself after its own
forward. If the caller stops early, with `break` or an exception, reshard the layer that was yielded
and the one ahead, if they are still whole, but none that is kept. During a backward pass reshard
nothing, because backward needs these layers next.

**Keeps** I2: if the walk ends early, nothing stays in memory. I3: while a layer computes, only
this layer and the next one are whole. I4: a layer that is kept for backward is not gathered again.

**Hint**: the `finally:` block of a generator runs even if it is closed early.
"""

from collections.abc import Iterator

from zero3 import Zero3Layer, Zero3Sequential
from zero3.watch import in_backward  # noqa: F401  (for your answer)


def walk(self: Zero3Sequential) -> Iterator[Zero3Layer]:
    """
    ## Walk the layers, one unshard ahead
    """
    raise NotImplementedError("exercise 6: for each layer, fetch it and its `next_layer`, then "
                              "yield it; at the end free layers that were fetched needlessly")

r"""
# Exercise 6: prefetch

If a layer is unsharded only when it is called, it has to wait for the whole all-gather. In a chain
we know the next layer, so we can start its all-gather before the current layer computes.
Communication then overlaps computation. This is called *prefetch*.

**Given** a `Zero3Sequential` with

* `self.module_list`: all layers, in forward order
* `layer.next_layer`: a list with the next layer that has parameters. It is empty for the last one,
  and for a layer without parameters
* `layer.fetch_params()` starts an unshard, and does nothing if it has already started
* `layer._cleanup_params()` reshards, and does nothing if there is nothing to free
* `layer.kept_for`: not `None` if the layer stays whole on purpose, for the following backward pass
* `in_backward()`: whether a backward pass is running. Under activation checkpointing forward runs
  during backward, too

**Do**: write a generator that yields the layers in order. When it yields a layer, the unshards of
this layer and of the next one have started, and no others. The caller then calls the layer, which
reshards itself. The caller may stop early, with `break` or with an exception. In that case reshard
the layers that were fetched needlessly. Do not reshard a layer that is kept on purpose. During a
backward pass reshard nothing, because backward needs these layers next.

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

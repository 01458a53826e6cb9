r"""
# Exercise 6: prefetch

A layer that unshards when it is called waits for its messages. In a chain the next layer is known,
so its unshard starts before this one computes, and the messages travel meanwhile: *prefetch*.

**Given** a `Zero3Sequential`, with

* `self.module_list`: all layers, in forward order
* `layer.next_layer`: a list with the next layer that has parameters; empty for the last one, and
  for a layer without parameters
* `layer.fetch_params()` starts an unshard, and does nothing if it has started already;
  `layer._cleanup_params()` reshards, and does nothing if there is nothing to free
* `layer.kept_for`: not `None` where a layer stays whole on purpose, for the backward that follows
* `in_backward()`: whether backward runs; forward does too then, under activation checkpointing

**Do** write a generator that yields the layers in order. When it yields one, the unshards of this
layer and of the next one have started, and no others. Who walks calls the layer, which reshards
itself. A walk may end early, by `break` or by an exception: then reshard what was fetched in vain.
Leave alone what is kept on purpose; and in backward reshard nothing, for backward needs it next.

**Keeps** I2: nothing is left of a walk that ended early. I3: while a layer computes, it and the
next are whole, and no more. I4: what is kept for backward is not gathered again.

**Hint**: a generator that is closed early runs its `finally:`.
"""

from collections.abc import Iterator

from zero3 import Zero3Layer, Zero3Sequential
from zero3.watch import in_backward  # noqa: F401  (for your answer)


def walk(self: Zero3Sequential) -> Iterator[Zero3Layer]:
    """
    ## Walk the layers, one unshard ahead
    """
    raise NotImplementedError("exercise 6: for each layer fetch it and its `next_layer`, then "
                              "yield it; in the end free what was fetched in vain")

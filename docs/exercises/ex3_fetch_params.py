r"""
# Exercise 3: unshard

Before a layer computes, its shards come together: *unshard*, an all-gather. It starts early, while
the layer before computes, and it writes into the memory that the module's parameters view.

**Given** a `Zero3Layer`, with

* `self.flats`: its flat parameters. `group.full` is one, `(world_size * shard_numel,)`; at rest
  its storage has no bytes
* `self.gather_into(fulls)`: gives these flat tensors their memory, starts to gather the shards
  into them, and returns a *transfer*, at once
* `self._gather`: the transfer that `_wait_params()` will wait for, later, or `None`
* `self.is_fetched`: whether an unshard has started, since the last reshard
* `self.is_full_elsewhere`: true inside of `with layer.full_params():`, where the parameters are whole
  in other memory
* `self.settle_at_end_of_backward()`: call it before you start; if backward runs, its end will then tidy up
* `self.reducer.finish(self)`: call it before you start, too. A reduce of this layer's
  gradients may still be on its way, and its messages arrive in the memory of `group.full`

**Do** start the unshard, and return without waiting for it. Called again before a reshard, the
function does nothing; it also does nothing for a layer without groups, and inside of
`full_params()`.

**Keeps** I1: the parameters are those after the last step. I3: the layer is in memory once. What
autograd saved in forward are views of `group.full`'s storage, and backward reads them, so fresh
memory will not do. I4: one gather for each time the layer is needed.

**Hint**: six lines. The real function has a few more, which begin to read the next shard where
shards rest in files; leave them out.
"""

from zero3 import Zero3Layer


def fetch_params(self: Zero3Layer) -> None:
    """
    ## Unshard (all-gather): start it, and return
    """
    raise NotImplementedError("exercise 3: unless there is nothing to do, start `_all_gather` into "
                              "the groups' own `full`, and keep what it returns in `self._gather`")

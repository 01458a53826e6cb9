r"""
# Exercise 3: unshard

Gather the shards of a layer into the memory that its parameters are views of.

**Given** a `Zero3Layer` with

* `self.flats`: its flat parameters. `flat.full` is the whole vector of one of them,
  `(world_size * shard_numel,)`. While the layer is sharded, its storage has no bytes
* `flat.storage.load()`: this rank's shard, `(shard_numel,)`
* `self.comm.all_gather(self, pairs)`: allocates each `full` and starts to gather the shards into
  it, for all pairs `(full, shard)` in one call. It returns a *transfer*
* `self._gather`: the transfer that `_wait_params()` waits for later, or `None`
* `self.is_fetched`: whether an unshard has started since the last reshard
* `self.is_full_elsewhere`: true inside of `with layer.full_params():`
* `self._settle_at_end_of_backward()` makes the end of a backward pass free this layer, and
  `self.reducer.finish(self)` waits for a reduce that still uses `flat.full`. Call both before the
  all-gather

**Do**: start the unshard and return without waiting for it. Do nothing if it has started already,
if the layer has no flat parameters, or inside of `full_params()`.

**Keeps** I1: the parameters have the values of the last optimizer step. I3: the layer is in memory
once. Autograd has saved views of `flat.full`'s storage, so the all-gather must fill this storage,
not new memory. I4: there is one all-gather each time the layer is needed.

**Hint**: seven lines are enough.
"""

from zero3 import Zero3Layer


def fetch_params(self: Zero3Layer) -> None:
    """
    ## Unshard (all-gather): start it, and return
    """
    raise NotImplementedError("exercise 3: unless there is nothing to do, start "
                              "`self.comm.all_gather` into the flat parameters' own `full`, and "
                              "keep what it returns in `self._gather`")

r"""
# Exercise 3: unshard

Before a layer computes, its shards have to be gathered. This is called *unshard*, and it is an
all-gather. It starts early, while the previous layer computes, so that communication overlaps
computation. It writes into the memory that the module's parameters are views of.

**Given** a `Zero3Layer` with

* `self.flats`: its flat parameters. `flat.full` is the whole vector of one of them, `(world_size *
  shard_numel,)`. While the layer is sharded, its storage has no bytes
* `flat.storage.load()`: this rank's shard of one flat parameter, `(shard_numel,)`
* `self.comm.all_gather(self, pairs)`: starts to gather shards, and immediately returns a
  *transfer*. A pair is `(full, shard)`: the vector to gather into, whose memory it allocates, and
  this rank's shard. All pairs go in a single call
* `self._gather`: the transfer that `_wait_params()` waits for later, or `None`
* `self.is_fetched`: whether an unshard has started since the last reshard
* `self.is_full_elsewhere`: true inside of `with layer.full_params():`, when the whole parameters
are
  in other memory
* `self._settle_at_end_of_backward()`: call it before the all-gather. If a backward pass is running,
  its end then cleans up this layer
* `self.reducer.finish(self)`: call this before the all-gather, too. The reduce of this layer's
  gradients may be in flight, and its receive buffer is the memory of `flat.full`

**Do**: start the unshard and return without waiting for it. A second call before the next reshard
does nothing. Neither does a call for a layer without flat parameters, or a call inside of
`full_params()`.

**Keeps** I1: the parameters have the values of the last optimizer step. I3: the layer is in memory
once. The tensors that autograd saved in forward are views of `flat.full`'s storage, and backward
reads them. So the all-gather must fill this storage, not new memory. I4: there is one all-gather
each time the layer is needed.

**Hint**: seven lines are enough. The real function has a few more, which prefetch the next shard
from its file. Leave them out.
"""

from zero3 import Zero3Layer


def fetch_params(self: Zero3Layer) -> None:
    """
    ## Unshard (all-gather): start it, and return
    """
    raise NotImplementedError("exercise 3: unless there is nothing to do, start "
                              "`self.comm.all_gather` into the flat parameters' own `full`, and "
                              "keep what it returns in `self._gather`")

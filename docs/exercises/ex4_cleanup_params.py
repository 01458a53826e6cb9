r"""
# Exercise 4: reshard

After a layer has computed, free the memory of its whole parameters. The shards stay.

**Given** a `Zero3Layer` with

* `self.is_fetched`: whether an unshard has started since the last reshard
* `self._wait_params()`: waits for an unshard that is still in flight
* `self.flats`: its flat parameters, each with the whole vector `flat.full`
* `self.slots()`: a slot for each parameter. `slot.param` is the parameter, a view of `flat.full`.
  `slot.freed_class` is a class that raises an error at each use
* `self.kept_for`: not `None` while the last layer stays whole from forward to backward
* `self.listener.record(self, "free", nbytes)`: records on the tape that so many bytes were freed.
  Call it once, after freeing, with the bytes of all flat parameters together

**Do**: free the memory of the flat parameters, and leave the layer in a state in which the next
`fetch_params()` works. Always set `self.kept_for` to `None`. If the layer is not fetched, do
nothing else.

**Keeps** I1: no message arrives in memory that has been freed. I2: nothing of the other ranks'
shards stays in memory, although autograd has views of the storage of `flat.full`. I3: the memory is
freed immediately, and the tape records it.

**Hint**: `tensor.untyped_storage().resize_(0)` frees the memory of a tensor and of all its views,
which keep their shapes. To turn a parameter into a freed one, assign to `slot.param.__class__`.
"""

from zero3 import Zero3Layer


def _cleanup_params(self: Zero3Layer) -> None:
    """
    ## Reshard (free)
    """
    raise NotImplementedError("exercise 4: if the layer is fetched, wait for its all-gather, "
                              "change its parameters' class, resize its storages to 0 and "
                              "record it")

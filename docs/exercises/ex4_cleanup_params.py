r"""
# Exercise 4: reshard

After a layer has computed, its memory is given back: *reshard*. The shards stay; the whole
parameters go.

**Given** a `Zero3Layer`, with

* `self.is_fetched`: whether an unshard has started since the last reshard
* `self._wait_params()`: completes an unshard whose messages are still on their way
* `self.flats`: `group.full` is a flat parameter, `(world_size * shard_numel,)`
* `self.slots()`: a slot for each parameter of the module. `slot.param` is the parameter, a view of
  `group.full`; `slot.freed_class` is a subclass of `FreedParameter`, which raises an error with the
  parameter's name when somebody touches it
* `self.kept_for`: what keeps the last layer whole from forward to backward, or `None`
* `self.listener.record(self, "free", nbytes)`: writes on the tape that so many bytes went

**Do** free the flat parameters' memory, and leave the layer so that the next `fetch_params()`
works. `self.kept_for` is `None` afterwards, always. Beyond that a layer that is not fetched is left
alone.

**Keeps** I1: no message writes into memory that was given back. I2: nothing of the others' shards
is left. To let go of `group.full` would not do: autograd has views of its storage until backward,
and the memory would stay. I3: what is free is free at once, and the tape says so.

**Hint**: `tensor.untyped_storage().resize_(0)` frees the memory of a tensor and of all its views,
and leaves every tensor, with its shape, in place. An assignment to `slot.param.__class__` makes a
parameter of that class.
"""

from zero3 import Zero3Layer


def _cleanup_params(self: Zero3Layer) -> None:
    """
    ## Reshard (free)
    """
    raise NotImplementedError("exercise 4: if the layer is fetched, wait for its messages, change "
                              "its parameters' class, resize its storages to 0 and tell the tape")

r"""
# Exercise 5: reduce the gradients

`_backup_grads` starts the reduce-scatter, and `add_reduced` receives the result.

**Given** a `Zero3Layer` with

* `self.flats`: its flat parameters. `flat.grad` is the full gradient of one of them,
  `(world_size * shard_numel,)`, divided by `world_size` already, or `None` if none of its
  parameters got one. The places of parameters without a gradient are uninitialised,
  and the padding is zero
* `flat.slots`: one for each parameter. `slot.names in flat.ready` says whether its gradient is
  ready, and `slot.of(flat.grad)` is its place in the full gradient
* `flat.receive_buffer`, usually `flat.full`: gradients from other ranks arrive here.
  `comm.reduce_scatter` allocates it
* `flat.shard`: this rank's shard, `(shard_numel,)`, with `flat.shard.grad`
* `self._release()`: reshards, as in exercise 4
* `self.watch.arrived`: names of the parameters whose gradients are ready
* `self.reducer.make_way(self, pairs)`: ends the reduce of another layer, and returns whether to
  send the pairs `(flat.grad, flat.receive_buffer)` now; a bucket sends them by itself. If so, pass
  what `self.comm.reduce_scatter([self], pairs)` returns to `self.reducer.started([self],
  transfer)`, which later calls `self.add_reduced(totals)`
* `self.reducer.finish(self)`: waits for the reduce of this layer now, if one is under way
* `self.layer_idx`: less than 0 if the layer is in no chain
* `self.drop_full_grads()`: sets each `flat.grad` to `None` and empties `flat.ready`

**Do** in `_backup_grads`: reshard, and clear `self.watch.arrived`. In each full gradient, zero the
places of parameters that got none. Reduce the flat parameters that have a full gradient, if there
are any. If the layer is alone, finish immediately. In `add_reduced`: add each total to the gradient
of its shard. The totals have the order of the flat parameters with a full gradient. Then drop the
full gradients, and free the receive buffers.

**Keeps** I1: gradients are means over ranks. I2, I3: neither whole parameters nor whole gradients
stay in memory. I4: a layer is reduced once. I7: a second backward pass adds to the gradients.

**Hint**: free the receive buffers with `untyped_storage().resize_(0)`.
"""

import torch

from zero3 import Zero3Layer


@torch.no_grad()
def _backup_grads(self: Zero3Layer) -> None:
    """
    ## Reshard, and reduce-scatter the gradients
    """
    raise NotImplementedError("exercise 5: reshard, zero the places without a gradient, and pass "
                              "all `(flat.grad, flat.receive_buffer)` to "
                              "`self.comm.reduce_scatter`, if `self.reducer` makes way")


@torch.no_grad()
def add_reduced(self: Zero3Layer, totals: list[torch.Tensor]) -> None:
    """
    ## Add the reduced gradients to the gradients of the shards

    * `totals` are `(shard_numel,)`, one for each flat parameter with a full gradient
    """
    raise NotImplementedError("exercise 5: add each total to its `flat.shard.grad`, then drop the "
                              "full gradients and free the receive buffers")

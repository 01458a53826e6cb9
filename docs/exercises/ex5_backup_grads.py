r"""
# Exercise 5: reduce the gradients

A layer's gradients are complete. It needs its whole parameters no more: *reshard*. Each rank has
the gradient of its own rows for the whole layer; the *reduce-scatter* leaves it with the mean
gradient of its own shard. It goes on its way while the layer below computes, so there are two
functions: `_backup_grads` sends, and `add_reduced` takes what comes back.

**Given** a `Zero3Layer`, with

* `self.flats`: `group.grad` is a full gradient, `(world_size * shard_numel,)`, or `None` where
  none of the group's parameters got one. It was made by `torch.empty`, and holds what the memory
  held wherever no gradient arrived. What has arrived is divided by `world_size` already
* `group.slots`: one for each parameter. `slot.names in group.ready` says whether its gradient has
  arrived; `slot.of(group.grad)` is its place in the full gradient
* `group.receive_buffer`: the tensor whose memory messages arrive in; as a rule `group.full`
* `group.shard`: what this rank owns, `(shard_numel,)`; `group.shard.grad` is the optimizer's
* `self._release()`: reshard, as in exercise 4
* `self.watch.arrived`: names of the parameters whose gradients have come; to be cleared
* `self.reducer.add(self, pairs)`: starts the reduce-scatter of the pairs
  `(group.grad, group.receive_buffer)`, all in one call. Later it calls `self.add_reduced(totals)`
* `self.reducer.finish(self)`: ends this layer's reduce now
* `self.layer_idx`: negative for a layer that is in no chain
* `self.drop_full_grads()`: forgets all `group.grad` and empties `group.ready`

**Do** in `_backup_grads`: reshard; clear what has arrived; where a group has a gradient, zero the
places of parameters that got none; hand the groups with a gradient to the reducer, if there are
any; end the reduce at once if the layer is in no chain. In `add_reduced`: add each total to the
gradient of its shard, in the order of the groups that have a gradient; then drop the full
gradients, and free the inboxes' memory.

**Keeps** I1: gradients are means over ranks. I2, I3: neither whole parameters nor whole gradients
stay. I4: a layer is reduced once. I7: a second backward adds.

**Hint**: the memory of `group.full` serves twice. Freed by the reshard, it becomes the receive_buffer;
`untyped_storage().resize_(0)` frees it again.
"""

import torch

from zero3 import Zero3Layer


@torch.no_grad()
def _backup_grads(self: Zero3Layer) -> None:
    """
    ## Reshard, and reduce-scatter the gradients
    """
    raise NotImplementedError("exercise 5: reshard, zero what no gradient reached, and hand all "
                              "`(group.grad, group.receive_buffer)` that there are to `self.reducer`")


@torch.no_grad()
def add_reduced(self: Zero3Layer, totals: list[torch.Tensor]) -> None:
    """
    ## Add the reduced gradients to the shards'

    * `totals` are `(shard_numel,)`, one for each group that has a gradient
    """
    raise NotImplementedError("exercise 5: add each total to its `group.shard.grad`, then drop the "
                              "full gradients and free the inboxes")

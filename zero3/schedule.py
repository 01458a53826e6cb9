r"""
# Schedule: which layer comes next

A `Schedule` tells a layer which layers come next, and whether to stay full after forward.

To overlap computation, communication has to start early, so a layer has to know which one computes
next. Three layers in a chain, 0, 1 and 2, go through a training step like this:

| computes | gathered meanwhile | freed afterwards |
|---|---|---|
| nothing yet | 0 | |
| forward of layer 0 | 1 | 0 |
| forward of layer 1 | 2 | 1 |
| forward of layer 2 | | nothing: backward begins with layer 2 |
| backward of layer 2 | 1 | 2 |
| backward of layer 1 | 0 | 1 |
| backward of layer 0 | | 0 |

These are five all-gathers for three layers, because layer 2 is gathered once. If all layers train:

$$\text{all-gathers} = 2 \cdot \text{layers} - 1$$

**Run this**: `python -m zero3.whole_model` prints such an order for a model that is no chain.

**Not covered, and what that costs**: a layer outside of a chain has no neighbours, so nothing
overlaps with its all-gathers. `whole_model/units.py` has a schedule that learns the order of any
model.
"""

import torch

from zero3.comm.collectives import ALONE
from zero3.sharded import Sharded
from zero3.watch import Call, in_backward


class Schedule:
    """
    ## Schedule: a layer asks it two questions

    This one answers for a chain. The neighbours are in the layer itself; a layer that is in no
    chain has none, so nothing is gathered ahead.
    """

    def ahead(self, layer: Sharded) -> list[Sharded]:
        """
        ### The layers that compute after this one, in the direction of the pass

        In backward the layer gathers them; in forward `walk` of the chain gathers `next_layer`. In
        both directions `fetch_params` begins to read their shards, if these rest in files.
        """
        if in_backward():
            # A layer without a recorded call has no backward pass, so it is not gathered.
            return [before for before in layer.prev_layer if before.watch.pending]
        if not layer.next_layer and torch.is_grad_enabled():
            # This is the last layer. Backward begins with it, so the one before it comes next.
            return layer.prev_layer
        return layer.next_layer

    def stays_full(self, layer: Sharded, call: Call) -> bool:
        """
        ### Whether a layer stays full after a forward call, because backward needs it at once

        The last layer of a chain does, if a backward pass can follow.
        """
        return layer.layer_idx != ALONE and not layer.next_layer and call.outputs > 0

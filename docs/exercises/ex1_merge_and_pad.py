r"""
# Exercise 1: merge and pad

Make the *flat parameter* of a layer: one vector whose length is divisible by the number of ranks.
On two ranks, `[[1, 2], [3, 4]]` and `5` become `1 2 3 4 5 0`, three for each rank.

**Given**

* `params`: the layer's parameters, of one data type and any shapes, also transposed ones and shapes
  without elements. Together they have $P \ge 1$ elements
* `self.comm.world_size`: the number of ranks, $N$
* `self._empty(numel, dtype)`: an uninitialised vector on the layer's device

**Return** a new tensor of $N \lceil P/N \rceil$ elements: all parameters in order, each row by
row, and then the padding. It is on `self.device`, has the parameters' data type, and is not part
of an autograd graph.

**Keeps** I1: no element is lost. I2: there is as little padding as possible. I5: the padding is
zero. A NaN there would spoil a norm of the weights.

**Hint**: in Python `-7 % 3` is 2.
"""

import torch
from torch import nn

from zero3 import Zero3Layer


def _merge_and_pad_params(self: Zero3Layer, params: list[nn.Parameter]) -> torch.Tensor:
    """
    ## Concatenate parameters, and pad until `world_size` divides the length

    * `params` have one data type, and any shapes

    Returns `(world_size * shard_numel,)`.
    """
    raise NotImplementedError("exercise 1: return all parameters as one vector, and append zeros "
                              "until `world_size` divides its length")

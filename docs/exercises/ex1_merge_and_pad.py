r"""
# Exercise 1: merge and pad

A rank keeps one $N$-th of a layer. For that the layer has to be a vector whose length $N$ divides:
the *flat parameter*. Write the function that makes it.

**Given**

* `params`: the layer's parameters, all of one data type. Their shapes are any: matrices, scalars,
  shapes without elements, transposed ones. Together they have $P$ elements, one at least
* `self.comm.world_size`: $N$
* `self._empty(numel, dtype)`: a vector on the layer's device. It holds whatever the memory held

**Return** a new tensor of $N \lceil P/N \rceil$ elements: the parameters one after the other, each
row by row, then the padding. It is on `self.device`, of the parameters' data type, and without a
graph.

**Keeps** I1: no element is lost. I2: a shard has $\lceil P/N \rceil$ elements, so there is no more
padding than that takes. I5: the padding is zero. It goes through everything that the parameters go
through, and one NaN in it would make the norm of the whole gradient NaN.

**Hint**: in Python `-7 % 3` is 2. That is how many elements 7 lacks to be divisible by 3.
"""

import torch
from torch import nn

from zero3 import Zero3Layer


def _merge_and_pad_params(self: Zero3Layer, params: list[nn.Parameter]) -> torch.Tensor:
    """
    ## Merge parameters, and pad so that the length is divisible by `world_size`

    * `params` are of one data type and of any shapes

    Returns `(world_size * shard_numel,)`.
    """
    raise NotImplementedError("exercise 1: return all parameters as one vector, with zeros at its "
                              "end until `world_size` divides its length")

r"""
# Cross entropy in chunks: a loss that never has all logits

`chunked_cross_entropy` computes the head of a language model and its loss for a few positions at a
time, and the gradients along with them.

The head multiplies each position's vector with the vector of each token of the vocabulary. The
result, the logits, is often the largest tensor of a training step. With 512 positions and a
vocabulary of 50,257 tokens it has 26 million elements, 103 MB in fp32. Plain PyTorch has it three
times at the peak: the logits, their log-softmax, and the gradient.

**Two positions, three tokens.** In forward we already know the gradient of the loss with respect to
the logits. It is the softmax, minus one at the target:

| | logits | softmax | target | gradient, for a mean over two |
|---|---|---|---|---|
| position 0 | 0 0 0 | .33 .33 .33 | token 1 | .17 -.33 .17 |
| position 1 | 0 .69 0 | .25 .5 .25 | token 1 | .13 -.25 .13 |

So a chunk of positions is finished in one go: its logits, its loss, and its part of both gradients.
Then its logits can be overwritten by those of the next chunk. With hidden states $h_i$, head $W$,
targets $y_i$ and $T$ positions

$$L = \frac{1}{T} \sum_{i=1}^{T} \Big( \log \sum_v e^{W_v \cdot h_i} - W_{y_i} \cdot h_i \Big)
\qquad
\frac{\partial L}{\partial W_v \cdot h_i} = \frac{1}{T} \big( \text{softmax}(W h_i)_v -
[v = y_i] \big)$$

Backward only multiplies the two finished gradients by the gradient that comes in.

**Run this**: `python -m zero3.inject`.

**Not covered, and what that costs**: the gradient of the head's weight exists from forward to
backward, as large as the weight. Class weights and label smoothing are not here.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


def chunked_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor,
                          bias: torch.Tensor | None = None, *, rows: int = 1024,
                          ignore_index: int = -100, count: Any = None) -> torch.Tensor:
    """
    ## `cross_entropy(linear(hidden, weight, bias), targets)`, a chunk at a time

    * `hidden` is `(positions, features)`
    * `weight` is `(tokens, features)`, and `bias` `(tokens,)`
    * `targets` is `(positions,)` int64; those of `ignore_index` do not count
    * `rows` is the number of positions in a chunk
    * `count` divides the sum of losses; left out, it is the number of targets that count

    Returns the mean loss, `()`, in fp32 or wider. Sums of gradients are in that data type too.
    """
    if count is None:
        count = (targets != ignore_index).sum()
    grads = torch.is_grad_enabled()
    return _Chunked.apply(hidden, weight, bias, targets, rows, ignore_index, count, grads)


class _Chunked(torch.autograd.Function):
    """
    #### The loss and its gradients, in forward
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                targets: torch.Tensor, rows: int, ignore_index: int, count: Any, grads: bool
                ) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        inputs = (hidden, weight, bias)
        sums = [torch.zeros_like(t, dtype=wide) if grads and t is not None and t.requires_grad
                else None for t in inputs]
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            logits = F.linear(hidden[part], weight, bias).to(wide)  # (rows, tokens)
            counts = (targets[part] != ignore_index)[:, None]  # (rows, 1)
            target = targets[part, None].where(counts, 0)
            total = logits.logsumexp(1, keepdim=True)
            loss += ((total - logits.gather(1, target)) * counts).sum()
            if any(total is not None for total in sums):
                # In place: the softmax, minus one at the target.
                grad = logits.sub_(total).exp_()
                grad.scatter_add_(1, target, grad.new_full((), -1.0).expand_as(target))
                _add(sums, part, grad.mul_(counts).div_(count).to(hidden.dtype), hidden, weight)
        ctx.save_for_backward(*sums)
        ctx.dtypes = [hidden.dtype, weight.dtype, weight.dtype]
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        found = [None if total is None else (total * grad).to(dtype)
                 for total, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)]
        return (*found, *[None] * (8 - len(found)))


def _add(sums: list[torch.Tensor | None], part: slice, grad: torch.Tensor, hidden: torch.Tensor,
         weight: torch.Tensor) -> None:
    """
    #### Add a chunk's part of the gradients of hidden states, weight and bias

    * `grad` is that of the chunk's logits, `(rows, tokens)`
    """
    of_hidden, of_weight, of_bias = sums
    if of_hidden is not None:
        of_hidden[part] = grad @ weight
    if of_weight is not None:
        of_weight += grad.t() @ hidden[part]
    if of_bias is not None:
        of_bias += grad.sum(0)

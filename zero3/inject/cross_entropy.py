r"""
# Cross entropy in chunks: a loss that never has all logits

`chunked_cross_entropy` computes the head of a language model and its loss for a few positions at a
time, and the gradients along with them.

With 512 positions and a vocabulary of 50,257 tokens the logits have 26 million elements, 103 MB in
fp32. Plain PyTorch has three such tensors at the peak: the logits, their log-softmax, and the
gradient.

**Two positions, three tokens.** In forward we already know the gradient of the loss with respect to
the logits. It is the softmax, minus one at the target:

| | logits | softmax | target | gradient, for a mean over two |
|---|---|---|---|---|
| position 0 | 0 0 0 | .33 .33 .33 | token 1 | .17 -.33 .17 |
| position 1 | 0 .69 0 | .25 .5 .25 | token 1 | .13 -.25 .13 |

So a chunk of positions is finished in one go. With hidden states $h_i$, head $W$, targets $y_i$ and
$T$ positions

$$L = \frac{1}{T} \sum_{i=1}^{T} \Big( \log \sum_v e^{W_v \cdot h_i} - W_{y_i} \cdot h_i \Big)
\qquad
\frac{\partial L}{\partial W_v \cdot h_i} = \frac{1}{T} \big( \text{softmax}(W h_i)_v -
[v = y_i] \big)$$

Backward only multiplies the finished gradients by the gradient that comes in.

**Run this**: `python -m pytest tests/inject/test_inject.py -k chunks`.

**Not covered, and what that costs**: the gradients of the hidden states and of the head exist
from forward to backward, in fp32 or wider. Class weights and label smoothing are not here.
"""

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from zero3.comm.parts import WeightPart
from zero3.inject.line import Line


def chunked_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor,
                          bias: torch.Tensor | None = None, *, rows: int = 1024,
                          ignore_index: int = -100, count: torch.Tensor | int | None = None,
                          split: Line | None = None,
                          own: WeightPart | None = None) -> torch.Tensor:
    """
    ## `cross_entropy(linear(hidden, weight, bias), targets)`, a chunk at a time

    * `hidden` is `(positions, features)`
    * `weight` is `(tokens, features)`, and `bias` `(tokens,)`
    * `targets` is `(positions,)` int64; those of `ignore_index` do not count
    * `rows` is the number of positions in a chunk
    * `count` divides the sum of losses; left out, it is the number of targets that count
    * `split` are the ranks that split the weight by tokens, if they do: a `Line`. `own` is the part
      that this rank has

    Returns the mean loss, `()`, in fp32 or wider. Sums of gradients are in that data type too.
    Raises `RuntimeError` if a target is no token; on an accelerator, at the next operation that
    waits for the device.
    """
    tokens = own.size if own else len(weight)
    counts = targets != ignore_index
    are_tokens = (targets >= 0) & (targets < tokens)
    torch._assert_async((~counts | are_tokens).all(),
                        f"cross_entropy: expected targets from 0 to {tokens - 1}, or "
                        f"{ignore_index}. Got others. What to do: look at the labels.")
    return _Chunked.apply(
        hidden,
        weight,
        bias,
        targets,
        rows,
        ignore_index,
        torch.is_grad_enabled(),
        counts.sum() if count is None else count,
        split,
        own.begin if own else 0)


class _Chunked(torch.autograd.Function):
    """
    #### The loss and its gradients, in forward
    """

    @staticmethod
    def forward(ctx, hidden: torch.Tensor,
                weight: torch.Tensor,
                bias: torch.Tensor | None,
                targets: torch.Tensor,
                rows: int,
                ignore_index: int,
                grads: bool,
                count: torch.Tensor | int,
                split: Line | None,
                first: int) -> torch.Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sums = [None if t is None or not (grads and t.requires_grad)
                else torch.zeros_like(t, dtype=wide)
                for t in (hidden, weight, bias)]
        wanted = [total for total in sums if total is not None]
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        for begin in range(0, len(hidden), rows):
            part = slice(begin, begin + rows)
            logits = F.linear(hidden[part], weight, bias).to(wide)  # (rows, tokens)
            counts = (targets[part] != ignore_index)[:, None]  # (rows, 1)
            target = targets[part, None].where(counts, 0) - first
            is_here = (target >= 0) & (target < len(weight))
            target = target.where(is_here, 0)
            total, of_target = _over_ranks(split, logits.logsumexp(1, keepdim=True),
                                           logits.gather(1, target).where(is_here, 0))
            # A logit that does not count may be infinite, and infinity times zero is NaN.
            loss += (total - of_target).where(counts, 0).sum()
            if wanted:
                grad = logits.sub_(total).exp_()
                grad.scatter_add_(1, target, -is_here.to(wide))
                # Divide the sums, and not this: in fp16 most of it would be rounded to zero.
                grad = grad.mul_(counts).to(hidden.dtype)
                _add(sums, part, grad, hidden, weight)
        # If no target counts, the loss is NaN and the gradients are zero, as in torch.
        divisor = torch.as_tensor(count, device=hidden.device)
        divisor = divisor.where(divisor != 0, 1)
        for total in wanted:
            total.div_(divisor)
        if split is not None and sums[0] is not None:
            # The conjugate of the exchanges above: hidden states are the same on all ranks.
            sums[0] = split.all_reduce(sums[0])
        ctx.save_for_backward(*sums)
        return loss / count

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple:  # type: ignore[override]
        # Autograd converts a gradient to the data type of its tensor.
        return (
            *(None if total is None else total * grad for total in ctx.saved_tensors),
            # Targets and options have no gradients.
            *[None] * 7)


def _over_ranks(split: Line | None, total: torch.Tensor, of_target: torch.Tensor
                ) -> tuple[torch.Tensor, torch.Tensor]:
    """
    #### The logarithm of the sum and the target's logit, over the tokens of all ranks (all-gather)
    """
    if split is None:
        return total, of_target
    found = split.all_gather(torch.cat([total, of_target], 1))  # (ranks, rows, 2)
    return found[..., :1].logsumexp(0), found[..., 1:].sum(0)


def _add(sums: list[torch.Tensor | None], part: slice, grad: torch.Tensor,
         hidden: torch.Tensor, weight: torch.Tensor) -> None:
    """
    #### Add a chunk's part of the gradients of hidden states, weight and bias
    """
    of_hidden, of_weight, of_bias = sums
    if of_hidden is not None:
        of_hidden[part] = grad @ weight
    if of_weight is not None:
        of_weight += grad.t() @ hidden[part]
    if of_bias is not None:
        of_bias += grad.sum(0)

r"""
# Distill: fewer layers, taught by all of them

`distill` starts a small model, the *student*, from some layers of a trained one, the *teacher*, and
makes its loss.

**Three bytes**, of which `a` came next:

| | a | b | c |
|---|---|---|---|
| the text says | 1 | 0 | 0 |
| the teacher says | 0.70 | 0.25 | 0.05 |
| the teacher at temperature 2 | 0.54 | 0.32 | 0.14 |

A temperature $T$ divides the logits. The loss has three parts: the task's own, the distance of the
probabilities, and that of the layers' outputs:

$$L = (1 - \alpha)\, L_{\text{task}} + \alpha\, T^2\, \mathrm{KL}\left(p^T_{\text{teacher}} \,\|\,
p^T_{\text{student}}\right) + \beta \, \frac{1}{n} \sum_i \lVert h_i - h'_{k_i} \rVert^2 / d$$

The gradient of the second part shrinks with $T^2$, so it is multiplied by that. It is from
[Distilling the Knowledge in a Neural Network](https://arxiv.org/abs/1503.02531), section 2; the
third part is from [TinyBERT](https://arxiv.org/abs/1909.10351), section 3.

    teacher = Zero3Sequential([...])                # six layers, trained
    student = Zero3Sequential([...])                # four layers, new
    teaching = distill(student, teacher, keep=[0, 1, 4, 5])
    optimizer = Zero3Optimizer(student, torch.optim.AdamW, lr=1e-3)
    optimizer.backward(teaching(x, lambda logits: F.cross_entropy(logits, y)))

**Both are sharded.** The teacher has no gradients and no optimizer. A step gathers it once, so
it sends a third of what training it would.

**Run this**: `python -m pytest tests/compression/test_distill.py`.

**Not covered, and what that costs**: models that are not chains; layers whose width differs. The
outputs of all layers stay in memory until the loss is there, also with `hidden=0`.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.nn import functional as F

from zero3.compression.weights import Method
from zero3.guards.checks import expect, whole
from zero3.layer import Zero3Sequential
from zero3.sharded import Sharded

Chain = Zero3Sequential | nn.Sequential
Task = Callable[[torch.Tensor], torch.Tensor]


def distill(student: Chain,
            teacher: Chain,
            keep: list[int], *,
            logits: float = 0.5,
            hidden: float = 0.0,
            temperature: float = 2.0) -> Callable[[torch.Tensor, Task], torch.Tensor]:
    r"""
    ## Start a student from layers of its teacher

    All ranks call it alike, before the optimizer is built. Both models are chains, sharded or
    plain. The student's layers get the weights of those that they correspond to. The teacher is
    frozen, and set to `eval()`.

    * `keep` has the index of the teacher's layer for each layer of the student
    * `logits` is $\alpha$, from 0 to 1, and `hidden` is $\beta$
    * `temperature` is $T$

    Returns a function `(x, task)` of this rank's batch, which returns the loss. `task` makes the
    task's loss of the student's outputs, `(..., classes)`. All ranks call it together. Raises
    `TypeError` for models that are no chains, and `ValueError` for impossible numbers, or if layers
    do not have the same parameters.
    """
    for model in (student, teacher):
        expect(isinstance(model, (Zero3Sequential, nn.Sequential)), "distill", "two chains, each "
               "`Zero3Sequential` or `nn.Sequential`", type(model), "pass such models", TypeError)
    mine, theirs = (
        [*(model.module_list if isinstance(model, Zero3Sequential) else model)]
        for model in (student, teacher))
    expect(isinstance(keep, list) and len(keep) == len(mine)
           and all(whole(i, 0, len(theirs) - 1) for i in keep),
           "distill: `keep`",
           f"{len(mine)} indices of layers, from 0 to {len(theirs) - 1}",
           repr(keep),
           "pass one for each layer of the student")
    expect(0 <= logits <= 1 and hidden >= 0 and temperature > 0, "distill", "`logits` from 0 to 1, "
           "`hidden` of at least 0, and a positive `temperature`",
           f"{logits}, {hidden} and {temperature}", "pass such numbers")
    for layer, index in zip(mine, keep, strict=True):
        _copy(layer, theirs[index])
    for compression in dict.fromkeys(
            each.compression for each in student.modules() if isinstance(each, Method)):
        # The thresholds were those of other weights.
        compression.find_thresholds()
    teacher.requires_grad_(False)
    teacher.eval()

    def teaching(x: torch.Tensor, task: Task) -> torch.Tensor:
        with torch.no_grad():
            theirs = [*outputs(teacher, x)]
        mine = [*outputs(student, x)]
        learnt, taught = (
            (of_layers[-1].flatten(0, -2).float() / temperature).log_softmax(dim=-1)
            for of_layers in (mine, theirs))
        loss = (1 - logits) * task(mine[-1]) + logits * temperature**2 * F.kl_div(
            learnt, taught, log_target=True, reduction="batchmean")
        if hidden:
            apart = [F.mse_loss(output, theirs[index])
                     for output, index in zip(mine[:-1], keep[:-1], strict=True)]
            loss = loss + hidden * sum(apart) / max(1, len(apart))
        return loss

    return teaching


def outputs(model: Chain, x: torch.Tensor) -> Iterator[torch.Tensor]:
    """
    ## The outputs of the layers of a chain, one after the other
    """
    layers = model.walk() if isinstance(model, Zero3Sequential) else model
    for layer in layers:
        x = layer(x)
        yield x


@torch.no_grad()
def _copy(layer: nn.Module, teacher: nn.Module) -> None:
    """
    #### Copy the weights and buffers of a teacher's layer into one of the student's
    """
    with _whole(teacher) as theirs, _whole(layer, writeback=True) as mine:
        wanted = {name.replace("parametrizations.", "").removesuffix(".original"): p
                  for name, p in mine.items()}
        expect({name: p.shape for name, p in theirs.items()}
               == {name: p.shape for name, p in wanted.items()},
               "distill", "layers that have the same parameters",
               f"{[*wanted]} of the student, {[*theirs]} of the teacher",
               "look at `keep`; compress the student only")
        for name, p in wanted.items():
            p.copy_(theirs[name])
    buffers = dict(_plain(teacher).named_buffers())
    for name, buffer in _plain(layer).named_buffers():
        if name in buffers:
            buffer.copy_(buffers[name])


def _plain(layer: nn.Module) -> nn.Module:
    """
    #### The module inside a sharded layer
    """
    return layer.module if isinstance(layer, Sharded) else layer


def _whole(layer: nn.Module, writeback: bool = False
           ) -> AbstractContextManager[dict[str, nn.Parameter]]:
    """
    #### The parameters of a layer, whole while the block runs
    """
    return (layer.full_params(writeback) if isinstance(layer, Sharded) else
            nullcontext(dict(layer.named_parameters())))

"""
# Steps: who hears of the steps of all optimizers

A whole model counts the steps of its optimizers with a hook of PyTorch's for all optimizers. If the
hook went with the model, Python could collect both in the middle of a step, while PyTorch is going
through the hooks:

> RuntimeError: OrderedDict mutated during iteration

So there is one hook before steps and one after, for good, which call those who follow.
"""

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# Called with the follower and the optimizer. It must not refer to the follower, or the follower
# would live for ever.
Hear = Callable[[Any, Optimizer], None]

before_steps: WeakKeyDictionary[Any, Hear] = WeakKeyDictionary()
after_steps: WeakKeyDictionary[Any, Hear] = WeakKeyDictionary()


def tell(followers: WeakKeyDictionary[Any, Hear],
         optimizer: Optimizer,
         *_: object) -> None:
    """
    ## Tell all followers of a step
    """
    # A list, because whoever hears of a step may add another one.
    for owner, hear in list(followers.items()):
        hear(owner, optimizer)


register_optimizer_step_pre_hook(partial(tell, before_steps))
register_optimizer_step_post_hook(partial(tell, after_steps))

"""
# Steps: who hears of the steps of all optimizers

A whole model counts the steps of its optimizers with a hook of PyTorch's for all optimizers. If the
hook went with the model, Python could collect both in the middle of a step, while PyTorch is going
through the hooks:

> RuntimeError: OrderedDict mutated during iteration

So there is one hook, for good, which calls those who follow.
"""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

# Called with who follows, the optimizer, and the arguments of its `step`.
Hear = Callable[[Any, Optimizer, tuple, dict[str, Any]], None]


class Followers:
    """
    ## Those who follow the steps of all optimizers, as long as they live
    """

    def __init__(self, register: Callable):
        """
        ### Put in the one hook

        * `register` is PyTorch's function for a hook of all optimizers
        """
        self._hears: WeakKeyDictionary[Any, Hear] = WeakKeyDictionary()
        register(self._call)

    def add(self, owner: object, hear: Hear) -> None:
        """
        ### Call `hear(owner, optimizer, args, kwargs)` at each step, while the owner lives

        `hear` must not refer to its owner, who would live for ever.
        """
        self._hears[owner] = hear

    def remove(self, owner: object) -> None:
        """
        ### No longer call for an owner
        """
        self._hears.pop(owner, None)

    def __len__(self) -> int:
        return len(self._hears)

    def _call(self, optimizer: Optimizer, args: tuple, kwargs: dict[str, Any]) -> None:
        # A list, because whoever hears of a step may add another one.
        for owner, hear in list(self._hears.items()):
            hear(owner, optimizer, args, kwargs)


before_steps = Followers(register_optimizer_step_pre_hook)
after_steps = Followers(register_optimizer_step_post_hook)

"""
# Who hears of the steps of all optimizers
"""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from tests.ranks import run
from zero3 import Zero3Layer, wrap
from zero3.compression import Prune, compress
from zero3.inject import inject, policies
from zero3.optimizer.steps import after_steps, before_steps
from zero3.train.gpt import GPTConfig, gpt_layers


def whole_model():
    return wrap(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear)


def compression():
    plain = nn.Sequential(nn.Linear(2, 2))
    return plain, compress(plain, {"*": [Prune(0.5)]})


def tensor_parallel():
    plain = nn.Sequential(*gpt_layers(GPTConfig(8, 4, 8, 2, 1, 8)))
    inject(plain, [policies.tensor_parallel(init_device_mesh("cpu", (1,)))])
    return plain


MAKERS = {maker.__name__: maker for maker in (whole_model, compression, tensor_parallel)}


def collected_meanwhile(name):
    gc.collect()
    before = len(before_steps), len(after_steps)
    gone = [MAKERS[name]()]
    assert (len(before_steps), len(after_steps)) != before

    def collect(*_):
        gone.clear()
        gc.collect()

    module = nn.Linear(2, 2)
    module(torch.ones(1, 2)).sum().backward()
    nothing = [lambda *_: None] * 2
    hooks = [register(hook) for hook in (collect, *nothing)
             for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook)]
    try:
        torch.optim.SGD(module.parameters(), lr=0.1).step()
        assert not gone
        return (len(before_steps), len(after_steps)) == before
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize("name", MAKERS)
def test_a_model_that_python_collects_within_a_step_harms_nobody(name):
    """
    A cell of a notebook that is run again leaves the old model to Python, which collects it at any
    moment. Breaks if a hook is removed while PyTorch goes through the hooks: `OrderedDict mutated
    during iteration`, in a step of another model. Breaks too if a model that is gone is kept.
    Proves `steps.tell`.
    """
    assert run(collected_meanwhile, 1, name) == [True]


def test_one_who_hears_of_a_step_may_add_another_and_go():
    """
    Proves `steps.tell`.
    """
    first, second = Zero3Layer(nn.Linear(2, 2)), Zero3Layer(nn.Linear(2, 2))
    heard = []

    def hear(owner, *_):
        heard.append(owner)
        after_steps.pop(owner)
        if owner is first:
            after_steps[second] = hear

    after_steps[first] = hear
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    for _ in range(3):
        optimizer.step()
    assert [owner is first for owner in heard] == [True, False]

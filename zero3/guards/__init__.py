"""
# All guards

`moments.py` says when each of them looks, and `zero3/__init__.py` hands in this module.
"""

from zero3.guards.checks import diverged
from zero3.guards.contents import LayerGuard, check_chain, check_walk, check_writes, uncompiled
from zero3.guards.freed import FreedParameter, OpenParameter, check_module
from zero3.guards.placement import check_params
from zero3.guards.room import check_step
from zero3.guards.shard_gradients import mark

__all__ = ["FreedParameter", "LayerGuard", "OpenParameter", "check_chain", "check_module",
           "check_params", "check_step", "check_walk", "check_writes", "diverged", "mark",
           "uncompiled"]

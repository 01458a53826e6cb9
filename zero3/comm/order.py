r"""
# Ranks that agree

A `Group` is the ranks that share something, and `Peers` are those that train a model together. All
of them raise an error if one has a problem.

If a rank raised an error alone, because its disk is full for instance, the others would wait for
its part of the next collective. So all ranks exchange what they found:

| | rank 0 | rank 1 |
|---|---|---|
| finds | nothing | no room for a step |
| **gathers** | nothing, no room | nothing, no room |
| raises | an error that names rank 1 | the same error |

These objects are pickled, so this serves while a model is wrapped, saved or loaded. A training step
exchanges numbers, in `collectives.py`, and few small objects. With $N$ ranks, and objects that take
$b$ bytes at most, a rank sends

$$(N-1)\, b \quad \text{bytes}$$

**Run this**: `python -m pytest tests/comm/test_groups.py -k a_communicator_has`.

**Not covered, and what that costs**: a rank that was stopped. The others wait for it until the
time-out of the process group. With gloo they notice at once that a rank has ended.
"""

import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

# Import this now: after `init_process_group` its functions would keep the process group alive, as a
# default argument.
import torch.distributed.nn.functional
from torch.distributed.constants import default_pg_timeout

from zero3.guards.checks import Named, expect

Thing = TypeVar("Thing")


@dataclass(frozen=True)
class Group:
    """
    ## The ranks that share something, and this rank's place among them
    """

    ranks: tuple[int, ...]  # their global ranks
    rank: int  # this rank's place in `ranks`
    # torch's process group; `None` stands for that of all ranks. Weakly, because a reference keeps
    # gloo's threads alive.
    handle: weakref.ref[dist.ProcessGroup] | None = field(default=None, compare=False)
    # Whether its ranks split the weights of the same layers (see `parts.py`).
    same_layers: bool = False

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """
        ### What torch's collectives take as their `group`

        Raises `ValueError` if it has been destroyed, as torch does.
        """
        if self.handle is None:
            return None
        found = self.handle()
        if found is None:
            raise ValueError(f"the process group of ranks {[*self.ranks]} has been destroyed")
        return found

    # The rest follows from these and never changes, so each is computed once.

    @cached_property
    def timeout(self) -> timedelta:
        """
        ### How long to wait for a rank that does not answer
        """
        return timeout_of(self.process_group or dist.group.WORLD, torch.device("cpu"))

    @cached_property
    def size(self) -> int:
        return len(self.ranks)

    @cached_property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    @cached_property
    def far(self) -> int:
        """
        ### How many of its ranks are on other nodes
        """
        return sum(node_of(rank) != node_of(self.global_rank) for rank in self.ranks)

    @cached_property
    def next_is_far(self) -> bool:
        """
        ### Whether the next rank of the group is on another node
        """
        following = self.ranks[(self.rank + 1) % self.size]
        return node_of(following) != node_of(self.global_rank)

    def place_of(self, device: torch.device) -> torch.device:
        """
        ### Where a tensor of a device has to be when it is sent: there, or on another kind

        NCCL alone sends nothing from CPU memory.
        """
        group: Any = self.process_group or dist.group.WORLD
        kinds = {each.type for each in group._device_types}
        return device if device.type in kinds else torch.device(min(kinds))

    def together(self, what: str, collective: Callable, *args: Any, **kwargs: Any) -> None:
        """
        ### Call a blocking collective of torch's, and explain the error if another rank does not

        * `what` names in words what the other ranks have to send

        All ranks must call it. Raises `RuntimeError`.
        """
        try:
            collective(*args, group=self.process_group, **kwargs)
        # torch raises `ValueError` for a process group that is gone.
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"rank {self.global_rank}: another rank has ended, or does something else. "
                f"Expected: {what} from all {self.size} ranks of {[*self.ranks]}, which call the "
                f"same functions of zero3{self.within(error)}. Got: {error}. What to do: "
                f"{self.advice(error)}") from error

    def gather(self, thing: Thing) -> list[Thing]:
        """
        ### A small Python object of each rank (all-gather); all ranks must call it

        Returns them in the order of `ranks`.
        """
        things = [thing] * self.size
        if self.size > 1:
            self.together("small objects", dist.all_gather_object, things, thing)
        return things

    def within(self, error: Exception) -> str:
        """
        ### How long this rank has waited, in words, if torch's error is a time-out
        """
        return f" within {self.timeout.total_seconds():g} s" * ("imed out" in str(error))

    def advice(self, error: Exception) -> str:
        """
        ### What to do about ranks that do not send their part
        """
        if not self.within(error):
            return ("look for the first error on the other ranks, which is the cause; without one, "
                    "for a rank that has fewer batches and has ended. Start again.")
        return (f"none of them has ended{self.within(error)}, so look for a rank "
                "that does something else: one that evaluates or saves alone, has fewer batches, "
                "or was stopped. All ranks have to call the same functions. "
                "`init_process_group(timeout=)` sets how long they wait.")

    def only_this(self) -> "Group":
        """
        ### The group of this rank alone, which sends nothing
        """
        return Group((self.global_rank,), 0)


def node_of(rank: int) -> int:
    """
    ## The node of a rank of the run

    torchrun gives each node `LOCAL_WORLD_SIZE` consecutive ranks. Without this variable, all ranks
    are on one node.
    """
    return rank // int(os.environ.get("LOCAL_WORLD_SIZE", rank + 1))


def all_ranks(rank: int | None = None, world_size: int | None = None) -> Group:
    """
    ## The group of all ranks

    * `rank` and `world_size` must be those of the process group, and default to them; without one,
      to 0 and 1. If 0 and 1 are passed, this rank trains alone, also in a larger process group

    Raises `RuntimeError` if there is no process group of this rank and size, or if torchrun has
    started several ranks and this one would train alone, without `world_size=1`.
    """
    has_group = dist.is_available() and dist.is_initialized()
    here = (dist.get_rank(), dist.get_world_size()) if has_group else (0, 1)
    told = int(os.environ.get("WORLD_SIZE") or 1)
    is_alone = here[1] == 1 < told
    expect(not is_alone or world_size is not None,
           f"rank {os.environ.get('RANK', '?')}: it would train alone",
           f"a process group of {told} ranks, as WORLD_SIZE says",
           "one of 1 rank" if has_group else "none",
           "call `torch.distributed.init_process_group()` without a rank and a size, before the "
           "first layer is wrapped; to train alone on purpose, unset WORLD_SIZE", RuntimeError)
    rank = here[0] if rank is None else rank
    world_size = here[1] if world_size is None else world_size
    expect((rank, world_size) == (here if world_size > 1 else (0, 1)),
           f"rank {rank}: no such rank", f"rank {here[0]} of {here[1]}, as the process group says",
           f"rank {rank} of {world_size}", "start with torchrun, call "
           "`torch.distributed.init_process_group` first, and pass its numbers or leave them out",
           RuntimeError)
    return Group(tuple(range(world_size)), rank)


def timeout_of(process_group: Any, device: torch.device) -> timedelta:
    """
    ## How long a group waits for a rank that does not answer

    * `device` is the kind of device that its tensors are on
    """
    try:
        backend = process_group._get_backend(device)
    except RuntimeError:
        return default_pg_timeout
    return getattr(getattr(backend, "options", None), "_timeout", default_pg_timeout)


class Peers:
    """
    ## The ranks that train a model together
    """

    def __init__(self, groups: tuple[Group, ...] = (), ranks: tuple[int, ...] = ()):
        """
        ### Join the ranks

        * `groups` has the group that shares shards; then, if there is one, the group to exchange
          sums with; left out, all ranks of the process group share shards
        * `ranks` are the global ranks of the whole model; left out, those of the first group
        """
        self.groups = groups or (all_ranks(),)
        self.group = self.groups[0]
        self.replicas = self.group.only_this()
        # The ranks with the rest of the model: the stages of a pipeline, or other parts of weights.
        self.stages = self.group.only_this()
        # This rank has part `rank` of `world_size` of each flat parameter.
        self.rank = self.group.rank
        self.world_size = self.group.size
        # The mean gradient is the sum divided by this.
        self.divisor = math.prod(group.size for group in self.groups)
        self.global_rank = self.group.global_rank
        self.ranks = ranks or self.group.ranks

    @property
    def is_first(self) -> bool:
        """
        ### Whether this is the first rank, which writes whatever one rank alone has to write
        """
        return self.global_rank == self.ranks[0]

    def gather(self, thing: Thing) -> list[Thing]:
        """
        ### Small Python objects of all ranks (all-gather); all ranks must call it

        Returns them in the order of `ranks`.
        """
        things = [thing]
        for group in self.groups:
            things = [each for several in group.gather(things) for each in several]
        return things

    def agree(self, sender: Named, what: str, expected: str, problem: str, cure: str) -> None:
        """
        ### Raise an error on all ranks if one of them has a problem

        * `problem` is this rank's, or empty; `what`, `expected` and `cure` are as for `expect`

        All ranks must call it. Raises `RuntimeError`.
        """
        for rank, theirs in zip(self.ranks, self.gather(problem), strict=True):
            sender.expect(not theirs, what, expected, f"{theirs}, on rank {rank}", cure)


class Listener:
    """
    ## Listener: an object that hears of every event

    Each layer has this one until a `Ledger` listens.
    """

    def record(self, sender: Any,
               event: str,
               nbytes: int | None = 0,
               transfer: "Counted | None" = None,
               tier: str = "device") -> None:
        """
        ### Do nothing
        """


@dataclass(eq=False, kw_only=True)
class Counted:
    """
    ## What this rank has sent, for a listener
    """

    sent_bytes: int = 0  # of parameters, gradients, norms or activations
    between_bytes: int = 0  # those to ranks on other nodes
    messages: int = 0
    order_bytes: int = 0  # of announcements


class Sender(Protocol):
    """
    ## A layer, a model or an optimizer that sends something
    """

    label: str
    layer_idx: int
    listener: Listener

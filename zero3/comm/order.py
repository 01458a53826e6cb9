r"""
# Ranks that agree

`Peers` are the ranks that train a model together. They exchange small objects, and all of them
raise an error if one has a problem. The rest are protocols: what a sender and a listener must have.

One rank may find something that the others cannot see: its disk is full, or its model has another
layer. If it raised an error alone, the others would wait for its part of the next collective. So
all ranks exchange what they found, and come to the same conclusion:

| | rank 0 | rank 1 |
|---|---|---|
| finds | nothing | no room for a step |
| **gathers** | nothing, no room | nothing, no room |
| raises | an error that names rank 1 | the same error |

These objects are pickled, so this serves while a model is wrapped, saved or loaded. A training step
exchanges numbers, in `collectives.py`. With $N$ ranks and objects of $b$ bytes a rank sends

$$(N-1)\, b \quad \text{bytes}$$

**Run this**: `python -m pytest tests/comm/test_groups.py -k a_communicator_has`.

**Not covered, and what that costs**: a rank that has ended or was stopped. The others wait for it
until the time-out of the process group.
"""

from __future__ import annotations

import math
from typing import Protocol

from torch.distributed.device_mesh import DeviceMesh

from zero3.comm.mesh import Thing, all_ranks, groups_of
from zero3.guards.options import Named


class Peers:
    """
    ## The ranks that train a model together
    """

    def __init__(self, rank: int | None = None, world_size: int | None = None,
                 mesh: DeviceMesh | None = None):
        """
        ### Join the ranks

        * `rank` and `world_size` must be those of the process group, and default to them; without
          one, to 0 and 1
        * `mesh` has the ranks; left out, these are all ranks of the process group

        Raises `RuntimeError` if there is no process group of this rank and size, and as
        `groups_of`.
        """
        # The ranks that share shards; then, if there are any, those to exchange sums with.
        self.groups = (all_ranks(rank, world_size),) if mesh is None else groups_of(mesh)
        self.group = self.groups[0]
        self.replicas = self.group.only_this()
        # The ranks that have other layers of the same model, the stages of a pipeline.
        self.stages = self.group.only_this()
        # Which part of each flat parameter is this rank's, and of how many.
        self.rank = self.group.rank
        self.world_size = self.group.size
        # The mean gradient is the sum over all ranks, divided by their number.
        self.divisor = math.prod(group.size for group in self.groups)
        # Errors name ranks as the whole run does.
        self.global_rank = self.group.global_rank
        self.ranks = self.group.ranks if mesh is None else tuple(mesh.mesh.flatten().tolist())

    @property
    def is_first(self) -> bool:
        """
        ### Whether this is the first of the ranks, which writes what is written once
        """
        return self.global_rank == self.ranks[0]

    @property
    def in_first_replica(self) -> bool:
        """
        ### Whether this rank's shard is not the copy of another one

        One replica is enough to write a checkpoint.
        """
        return self.replicas.rank == 0

    def gather(self, thing: Thing) -> list[Thing]:
        """
        ### Small Python objects of all ranks (all-gather); all ranks must call it

        Returns them in the order of `ranks`.

        A training step calls it only while an asynchronous save is under way.
        """
        things = [thing]
        for group in self.groups:
            things = [each for several in group.gather(things) for each in several]
        return things

    def agree(self, sender: Named, what: str, expected: str, problem: str, cure: str) -> None:
        """
        ### Raise an error on all ranks if one of them has a problem

        * `problem` is this rank's, or empty; `what`, `expected` and `cure` are as for `fail`

        All ranks must call it. Raises `RuntimeError`.
        """
        for rank, theirs in zip(self.ranks, self.gather(problem), strict=True):
            sender.expect(not theirs, what, expected, f"{theirs}, on rank {rank}", cure)


class Listener(Protocol):
    """
    ## Listener: an object that hears of every event

    `Ledger` is one: it records the bytes that a run sends and holds.
    """

    def record(self, sender: object, event: str, nbytes: int | None = 0,
               transfer: Counted | None = None, tier: str = "device") -> None: ...


class Counted(Protocol):
    """
    ## What has been sent, as far as a listener has to know it
    """

    @property
    def sent_bytes(self) -> int: ...
    @property
    def between_bytes(self) -> int: ...
    @property
    def messages(self) -> int: ...
    @property
    def order_bytes(self) -> int: ...


class Silence:
    """
    ## A listener that ignores events: each layer has it until a `Ledger` listens
    """

    def record(self, *args: object, **kwargs: object) -> None:
        """
        ### Do nothing
        """


class Sender(Protocol):
    """
    ## A layer, a model or an optimizer that sends something

    Errors and records need its name, and an announcement needs its number.
    """

    label: str
    layer_idx: int
    listener: Listener

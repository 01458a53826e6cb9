r"""
# Groups of ranks

A `Group` is the ranks that share something: who they are, and which of them this rank is.

With a *mesh*, torch's table of ranks, only some ranks of a run share a model. Here four ranks train
two models side by side:

| mesh | ranks of the model | place of rank 2 | a shard is |
|---|---|---|---|
| none | 0 1 2 3 | number 2 of 4 | a quarter |
| `DeviceMesh("cpu", [0, 1])` | 0 1 | nobody | half |
| `DeviceMesh("cpu", [2, 3])` | 2 3 | number 0 of 2 | half |

So a rank has two numbers. Its place in the group says which part of each flat parameter it keeps.
Its *global rank* is the number that torchrun and the logs know, so errors use that one. Wherever
another chapter says rank 0, it is the first rank of the mesh.

**Hybrid sharding.** A mesh ("replicate", "shard") has *replicas* of the model, and each replica is
sharded. A gather stays inside one replica, which may be one machine with fast links. Between
machines each rank sends only the gradient of its own shard. Three weights on two replicas of two
ranks:

| | rank 0 | rank 1 | rank 2 | rank 3 | |
|---|---|---|---|---|---|
| shard | 1 2 | 3 0 | 1 2 | 3 0 | ranks 0 and 2 have the same |
| gradients | 4 8 12 0 | 8 0 4 0 | 4 0 4 0 | 0 4 0 0 | on each rank's part of the batch |
| divide by 4 | 1 2 3 0 | 2 0 1 0 | 1 0 1 0 | 0 1 0 0 | the number of *all* ranks |
| reduce-scatter | 3 2 | 4 0 | 1 1 | 1 0 | in 0 1, and in 2 3 |
| all-reduce | 4 3 | 5 0 | 4 3 | 5 0 | in 0 2, and in 1 3 |

With $N$ ranks in each of $R$ replicas, a layer of $P_\ell$ parameters costs

$$\underbrace{\left\lceil \frac{P_\ell}{N} \right\rceil}_{\text{kept}} \qquad
\underbrace{3 (N-1) \left\lceil \frac{P_\ell}{N} \right\rceil}_{\text{sent inside the replica}}
\qquad
\underbrace{(R-1) \left\lceil \frac{P_\ell}{N} \right\rceil}_{\text{sent to other replicas}}$$

elements. Such a mesh is `init_device_mesh("cuda", (2, 8), mesh_dim_names=("replicate", "shard"))`:
two machines, and eight GPUs in each. Pass it to each layer or to `wrap`.

The reduce-scatter of a layer overlaps the backward pass of the layer below, and the all-reduce that
of the next one below. NCCL's all-reduce sends $2\frac{R-1}{R}$ times the shard. Replicas add in the
same order, so they keep the same bits.

**Nodes.** A mesh ("nodes", "shard") keeps one model on all ranks, and only says which of them are
near (see `links.py`).

**Run this**: `python -m pytest tests/comm/test_groups.py` trains models on groups of ranks.

**Not covered, and what that costs**: each rank of the run has to build every mesh, also those that
it is not in. On the CPU the sums of the other replicas take memory until they are added, $R$ times
the shard.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

# Import it before there is a process group, or its functions keep a handle of it as a default.
import torch.distributed.nn.functional
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from zero3.guards.options import expect

Thing = TypeVar("Thing")
# How long groups wait that were told nothing.
TORCHS_TIMES = (default_pg_timeout, default_pg_nccl_timeout)


@dataclass(frozen=True)
class Group:
    """
    ## The ranks that share something, and this rank's place among them
    """

    ranks: tuple[int, ...]  # their global ranks
    rank: int  # this rank's place in `ranks`
    # torch's handle; without one, the group is torch's own, of all ranks. Weakly, because gloo
    # keeps its threads while somebody has a handle.
    handle: weakref.ref[dist.ProcessGroup] | None = field(default=None, compare=False)
    # Whether its ranks have parts of the same layers (see `parts.py`).
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

    @property
    def timeout(self) -> timedelta:
        """
        ### How long to wait for a rank that does not answer
        """
        return timeout_of(self.process_group or dist.group.WORLD, torch.device("cpu"))

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]

    @property
    def far(self) -> int:
        """
        ### How many of its ranks are on other nodes
        """
        return sum(node_of(rank) != node_of(self.global_rank) for rank in self.ranks)

    @property
    def next_is_far(self) -> bool:
        """
        ### Whether the next rank of the group is on another node
        """
        following = self.ranks[(self.rank + 1) % self.size]
        return node_of(following) != node_of(self.global_rank)

    def together(self, what: str, collective: Callable, *args: Any, **kwargs: Any) -> None:
        """
        ### Call a blocking collective of torch's, and explain the error if another rank does not

        * `what` the other ranks have to send, in words

        All ranks must call it. A backend reports a closed connection or a time-out, and not the
        error on the other rank that caused it. Raises `RuntimeError`.
        """
        try:
            collective(*args, group=self.process_group, **kwargs)
        # torch raises the latter for a process group that is gone.
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

        * `error` is torch's
        """
        if not self.within(error):
            return ("look for the first error on the other ranks, which is the cause, and start "
                    "again.")
        return (f"none of them has ended{self.within(error)}, so look for a rank "
                "that does something else: one that evaluates or saves alone, has fewer batches, "
                "or was stopped. All ranks have to call the same functions. "
                "`init_process_group(timeout=)` sets how long they wait.")

    def only_this(self) -> Group:
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
      to 0 and 1

    Raises `RuntimeError` if there is no process group of this rank and size, or if torchrun has
    started several ranks and this one would train alone.
    """
    has_group = dist.is_available() and dist.is_initialized()
    here = (dist.get_rank(), dist.get_world_size()) if has_group else (0, 1)
    told = int(os.environ.get("WORLD_SIZE") or 1)
    if here[1] == 1 < told and world_size is None:
        raise RuntimeError(
            f"rank {os.environ.get('RANK', '?')}: it would train alone. Expected: a process group "
            f"of {told} ranks, as WORLD_SIZE says. Got: {'one of 1 rank' if has_group else 'none'}."
            " What to do: call `torch.distributed.init_process_group()` without a rank and a size, "
            "before the first layer is wrapped; to train alone on purpose, unset WORLD_SIZE.")
    rank = here[0] if rank is None else rank
    world_size = here[1] if world_size is None else world_size
    if (rank, world_size) != (here if world_size > 1 else (0, 1)):
        raise RuntimeError(
            f"rank {rank}: no such rank. Expected: rank {here[0]} of {here[1]}, as the "
            f"process group says. Got: rank {rank} of {world_size}. What to do: "
            "start with torchrun, call `torch.distributed.init_process_group` first, and pass "
            "its numbers or leave them out.")
    return Group(tuple(range(world_size)), rank)


def groups_of(mesh: DeviceMesh) -> tuple[Group, ...]:
    """
    ## The groups of a mesh: first the ranks that are near, then those along the other dimension

    * `mesh` has one dimension; or two, ("replicate", "shard") or ("nodes", "shard")

    Raises `TypeError` if it is no mesh, and `ValueError` if it has other dimensions or other ranks,
    or if its ranks are not ascending.
    """
    expect(isinstance(mesh, DeviceMesh), "mesh", "a `torch.distributed.device_mesh.DeviceMesh`",
           repr(mesh), "pass one, or leave it out to shard over all ranks", TypeError)
    has_two = mesh.mesh_dim_names in (("replicate", "shard"), ("nodes", "shard"))
    expect(mesh.ndim == 1 or has_two, "mesh", "one dimension, or two that are named "
           "('replicate', 'shard') or ('nodes', 'shard')", f"{mesh}", "name the dimensions in this "
           "order: 'replicate' for copies of the model, 'nodes' for one model on several machines; "
           "`mesh['shard']` alone trains a model of its own in each group")
    ranks = mesh.mesh.flatten().tolist()
    expect(mesh.get_coordinate() is not None, f"rank {dist.get_rank()}",
           f"one of the ranks of the mesh, {ranks}", "a rank outside of it",
           "build this model only on the ranks of its mesh")
    # torch sorts the ranks of a process group.
    expect(ranks == sorted(ranks), "mesh", "ranks in ascending order", ranks, "sort them")
    return tuple(_along(mesh, dim) for dim in reversed(range(mesh.ndim)))


def _along(mesh: DeviceMesh, dim: int) -> Group:
    """
    #### The group of this rank along one dimension of a mesh
    """
    where: list[Any] = [*mesh.get_coordinate()]  # type: ignore[misc]
    place = where[dim]
    where[dim] = slice(None)
    process_group = mesh.get_group(dim)
    wait_as_long(process_group)
    return Group(tuple(mesh.mesh[tuple(where)].tolist()), place, weakref.ref(process_group))


def wait_as_long(process_group: dist.ProcessGroup) -> None:
    """
    ## Have a group of some ranks wait as long as that of all ranks

    `init_device_mesh` forgets the `timeout` of `init_process_group`, and its groups would wait for
    half an hour.
    """
    for device in process_group._device_types:
        if timeout_of(process_group, device) in TORCHS_TIMES:
            backend: Any = process_group._get_backend(device)
            backend._set_default_timeout(timeout_of(dist.group.WORLD, device))


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

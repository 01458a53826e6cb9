r"""
# Groups of ranks

`groups_of` turns a mesh, torch's table of ranks, into the groups that share a model.

With a mesh some ranks of a run can share a model. Here four ranks train two models:

| mesh | ranks of the model | place of rank 2 | a shard is |
|---|---|---|---|
| none | 0 1 2 3 | number 2 of 4 | a quarter |
| `DeviceMesh("cpu", [0, 1])` | 0 1 | nobody | half |
| `DeviceMesh("cpu", [2, 3])` | 2 3 | number 0 of 2 | half |

A rank's place in the group says which part of each flat parameter it keeps. Its *global rank* is
the number that torchrun and errors use. Wherever another chapter says rank 0, it is the first rank
of the mesh.

**Hybrid sharding.** A mesh ("replicate", "shard") has *replicas* of the model, and each replica is
sharded. A gather stays inside one replica, which may be one machine. Between replicas each rank
sends only the gradient of its own shard. Three weights on two replicas of two ranks:

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

elements.

The reduce-scatter of a layer overlaps the backward pass of the layer below, and the all-reduce that
of the next one below. NCCL's all-reduce sends $2\frac{R-1}{R}$ times the shard. Replicas add in the
same order, so they keep the same bits.

**Nodes.** A mesh ("nodes", "shard") keeps one model on all ranks, and only says which of them are
near (see `links.py`).

**Run this**: `python -m pytest tests/comm/test_groups.py`.

**Not covered, and what that costs**: each rank of the run has to build every mesh, also those that
it is not in. On the CPU the sums of the other replicas take memory until they are added, $R$ times
the shard.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from zero3.comm.order import Group, timeout_of
from zero3.guards.options import expect

# How long a group waits if nobody has set its time-out.
TORCHS_TIMES = (default_pg_timeout, default_pg_nccl_timeout)


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

    `init_device_mesh` forgets the `timeout` of `init_process_group`. Its groups would wait for half
    an hour with gloo, and for ten minutes with NCCL.
    """
    for device in process_group._device_types:
        if timeout_of(process_group, device) in TORCHS_TIMES:
            backend: Any = process_group._get_backend(device)
            backend._set_default_timeout(timeout_of(dist.group.WORLD, device))

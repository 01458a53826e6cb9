r"""
# Groups of ranks

A `Group` is the ranks that share a layer: who they are, and which of them this rank is.

Usually all ranks of a run train one model. With a *mesh*, torch's table of ranks, only some of them
do. Here four ranks train two models side by side:

| mesh | ranks of the model | rank 2 is there | a shard is |
|---|---|---|---|
| none | 0 1 2 3 | number 2 of 4 | a quarter |
| `DeviceMesh("cpu", [0, 1])` | 0 1 | nobody | half |
| `DeviceMesh("cpu", [2, 3])` | 2 3 | number 0 of 2 | half |

So a rank has two numbers. Its place in the group says which part of each flat parameter it keeps:

$$\text{elements of shard } r = \big[\, r \lceil P_\ell / N \rceil,\;
(r + 1) \lceil P_\ell / N \rceil \,\big) \qquad N = \text{size of the group}$$

Its *global rank* is the number that torchrun and the logs know, so errors use that one.

**Run this**: `python -m pytest tests/test_groups.py` trains models on groups of ranks.

**Not covered, and what that costs**: torch makes the process groups of a mesh together on all ranks
of the run, so each rank builds every mesh, also those that it is not in.
"""

from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero3.guards.options import expect


@dataclass(frozen=True)
class Group:
    """
    ## The ranks that share something, and this rank's place among them
    """

    ranks: tuple[int, ...]  # their global ranks
    rank: int  # this rank's place in `ranks`
    # torch's handle. `None` is its own group, of all ranks.
    process_group: dist.ProcessGroup | None = field(default=None, compare=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def global_rank(self) -> int:
        return self.ranks[self.rank]


def all_ranks(rank: int | None = None, world_size: int | None = None) -> Group:
    """
    ## The group of all ranks

    * `rank` and `world_size` must be those of the process group, and default to them; without one,
      to 0 and 1

    Raises `RuntimeError` if there is no process group of this rank and size.
    """
    has_group = dist.is_available() and dist.is_initialized()
    here = (dist.get_rank(), dist.get_world_size()) if has_group else (0, 1)
    rank = here[0] if rank is None else rank
    world_size = here[1] if world_size is None else world_size
    if (rank, world_size) != (here if world_size > 1 else (0, 1)):
        raise RuntimeError(
            f"rank {rank}: no such rank. Expected: rank {here[0]} of {here[1]}, as the "
            f"process group says. Got: rank {rank} of {world_size}. What to do: "
            "start with torchrun, call `torch.distributed.init_process_group` first, and pass "
            "its numbers or leave them out.")
    return Group(tuple(range(world_size)), rank)


def group_of(mesh: DeviceMesh) -> Group:
    """
    ## The group of a mesh

    * `mesh` has one dimension, and this rank is in it

    Raises `TypeError` if it is no mesh, and `ValueError` if it has more dimensions, other ranks, or
    its ranks in an order that torch does not keep.
    """
    expect(isinstance(mesh, DeviceMesh), "mesh", "a `torch.distributed.device_mesh.DeviceMesh`",
           repr(mesh), "pass one, or leave it out to shard over all ranks", TypeError)
    expect(mesh.ndim == 1, "mesh", "one dimension", f"{mesh.ndim}, {mesh}",
           "pass one dimension of it, by its name: `mesh['shard']`")
    ranks = tuple(mesh.mesh.tolist())
    place = mesh.get_coordinate()
    expect(place is not None, f"rank {dist.get_rank()}", f"one of the ranks of the mesh, {ranks}",
           "a rank outside of it", "build this model only on the ranks of its mesh")
    # torch sorts the ranks of a process group.
    expect(ranks == tuple(sorted(ranks)), "mesh", "ranks in ascending order", ranks, "sort them")
    return Group(ranks, mesh.get_local_rank(), mesh.get_group())

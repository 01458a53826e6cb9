r"""
# Links: nodes, copies inside a node, and fewer bytes between them

`Links` says over which mesh layers travel, in which encoding, and how often between nodes.
`LinkedCommunicator` sends them that way. `groups_of` turns the mesh into groups of ranks, which may
also be replicas.

A machine is a *node*. The link between nodes is slow, and ZeRO-3 sends three times the model over
it in a step: weights for forward, weights for backward, gradients. Hybrid sharding (see
`groups_of`) avoids the first two and pays with memory. Here the model stays sharded over all ranks,
and each of the three becomes cheaper. The ideas are those of
[MiCS](https://arxiv.org/abs/2205.00119), section 3.3, and
[ZeRO++](https://arxiv.org/abs/2306.10209), section 3:

| | name in the papers | what it does | between nodes |
|---|---|---|---|
| a mesh of nodes | hierarchical gather | across nodes first, then inside | each byte once |
| `secondary` | hpZ | the node keeps a copy from forward to backward | backward gathers nothing |
| `weights` | qwZ | gathers 8 or 4 bits of each parameter | 8 are half of 16 bits |
| `gradients` | qgZ | reduces 4 or 8 bits, decoded before they are added | 4 are a quarter |

**Three weights on two nodes of two ranks**, with a mesh ("nodes", "shard"). Ranks 0 and 1 are on
the first node. Ranks with the same place on each node have neighbouring shards:

| | rank 0 | rank 1 | rank 2 | rank 3 | |
|---|---|---|---|---|---|
| **shard** | **1** | **3** | **2** | **0** | a quarter of 1 2 3 0 each |
| *gather across* | 1 2 | 3 0 | 1 2 | 3 0 | 0 with 2, and 1 with 3: a *slice* |
| *gather inside* | 1 2 3 0 | 1 2 3 0 | 1 2 3 0 | 1 2 3 0 | 0 with 1, and 2 with 3 |
| kept until backward | 1 2 | 3 0 | 1 2 | 3 0 | with `secondary`; backward gathers inside only |
| gradients, divided by 4 | 1 2 3 0 | 2 0 1 0 | 1 0 1 0 | 0 1 0 0 | |
| *reduce inside* | 3 2 | 4 0 | 1 1 | 1 0 | the sums of a node, for this rank's slice |
| *exchange across* | **4** | **5** | **3** | **0** | and of both nodes, for this rank's shard |

A shard crosses the link once. NCCL's ring enters each node once already, so there the two steps
save less.

A rank's shard has $s = \lceil P_\ell / N \rceil$ elements, on $M$ nodes of $L$ ranks, $N = L M$. An
element takes $w$ bytes as a gathered parameter and $g$ as a reduced gradient. A rank sends

$$\underbrace{(M-1)\,s\,w}_{\text{forward}} +
\underbrace{(M-1)\,s\,w \quad\text{or}\quad 0}_{\text{backward; 0 with a copy}} +
\underbrace{(M-1)\,s\,g}_{\text{gradients}} \quad \text{bytes between nodes}$$

Inside its node it sends $M (L-1)\,s\,(2 w + g)$, with or without a copy. In 16 bits the bytes
between two nodes are $2 + 2 + 2 = 6$ for an element of the shard. With a copy, `Int8` weights and
`Int4` gradients they are $1.03 + 0 + 0.53 = 1.56$: 26 % of that, or a quarter without the scales.
The copy costs $M s w$ bytes for each layer that waits for its backward pass: at the end of forward,
one part in $L$ of the model.

**What is overlapped.** On the CPU only the first step of a gather overlaps the computation of the
layer before: the step across nodes or, with a copy, the step inside.

**What is rounded.** `full_params()`, checkpoints and the optimizer see exact weights; forward and
backward see the rounded ones, except inside `full_params()`. All ranks decode the same bytes, so
they compute with the same bits. A gradient is rounded at most twice in a backward pass: once on its
way to a rank of the node, and once as a node's sum. In a ring it would be rounded at each hop, so
gradients go by all-to-all.

**Run this**: `make train ARGS="--gather-bits 8 --reduce-bits 4"` trains with rounded weights and
gradients; `make bench ARGS=--nodes` measures two nodes with a slow link between them;
`python -m pytest tests/comm/test_groups.py` tries other meshes.

**Not covered, and what that costs**: replicas that span several nodes. Every micro-batch gathers
its weights from the other nodes again. With torch's reentrant checkpointing layers gather across
nodes in backward too. An infinite weight, as in a frozen mask, makes its neighbours infinite or
NaN; make it a buffer. Each rank of the run has to build every mesh, also those that it is not in.
On the CPU the sums of the other replicas take memory until they are added, as many times the shard
as there are replicas.
"""

import warnings
import weakref
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.constants import default_pg_nccl_timeout, default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from zero3.comm import collectives
from zero3.comm.collectives import Communicator, Pairs, Transfer
from zero3.comm.encodings import Encoding, is_encoding
from zero3.comm.order import Group, Sender, timeout_of
from zero3.flat import in_flight
from zero3.guards.checks import Named, expect
from zero3.watch import in_backward


@dataclass(frozen=True)
class Links:
    """
    ## Links: a mesh, and how layers travel over it

    Pass one in place of a mesh: `Zero3Layer(layer, mesh=Links(mesh, weights=Int8()))`.

    * `mesh` is as for `Zero3Layer`
    * `weights` encodes what is gathered
    * `gradients` encodes what is reduced
    * `secondary` keeps a copy of each layer inside the node from forward to backward. It needs a
      mesh ("nodes", "shard")

    Raises `TypeError` or `ValueError` if these do not fit together.
    """

    mesh: DeviceMesh | None = None
    weights: Encoding | None = None
    gradients: Encoding | None = None
    secondary: bool = False

    def __post_init__(self) -> None:
        for name in ("weights", "gradients"):
            encoding = getattr(self, name)
            expect(encoding is None or is_encoding(encoding), "Links",
                   f"an `Encoding` for `{name}`", repr(encoding), "pass `Int8()`, `Int4()` or a "
                   "frozen dataclass with the methods of `Encoding`, that makes `nbytes(numel)` "
                   "contiguous bytes of uint8 of each row, and zeros of zeros", TypeError)
        expect(self.mesh is None or isinstance(self.mesh, DeviceMesh), "Links",
               "a `torch.distributed.device_mesh.DeviceMesh`", repr(self.mesh),
               "pass one, or leave it out to shard over all ranks", TypeError)
        expect(isinstance(self.secondary, bool), "Links", "`secondary`, True or False",
               repr(self.secondary), "pass one of the two", TypeError)
        expect(self.has_nodes or not self.secondary, "Links", "with `secondary`, a mesh with the "
               "dimensions ('nodes', 'shard')", f"{self.mesh}", "build the mesh with these names, "
               "or leave `secondary` out")

    @property
    def has_nodes(self) -> bool:
        return self.mesh is not None and self.mesh.mesh_dim_names == ("nodes", "shard")

    def communicator(self) -> Communicator:
        """
        ### The communicator that sends a layer this way
        """
        groups = () if self.mesh is None else groups_of(self.mesh)
        if len(groups) > 1 or self.weights or self.gradients:
            return LinkedCommunicator(self, groups)
        return Communicator(groups)

    @property
    def told(self) -> str:
        """
        ### What has to be the same on all ranks, in words
        """
        said = [f"secondary={self.secondary}"]
        for name in ("weights", "gradients"):
            encoding = getattr(self, name)
            if encoding:
                code = encoding.encode(torch.linspace(-1, 1, 999, device="cpu").view(3, 333))
                made = zlib.crc32(code.cpu().numpy().tobytes())
                said.append(f"{name}={type(encoding).__name__}, which makes {made:x}")
        return ", ".join(said)


def ranks_of_parts(comm: Communicator) -> Group:
    """
    ## The ranks that share a layer, in the order of their parts
    """
    return comm.sharing if isinstance(comm, LinkedCommunicator) else comm.group


class LinkedCommunicator(Communicator):
    r"""
    ## A communicator that knows nodes and encodings

    Without nodes $M$ is 1.
    """

    def __init__(self, links: Links, groups: tuple[Group, ...]):
        """
        ### Join the ranks of a mesh
        """
        ranks = [] if links.mesh is None else links.mesh.mesh.flatten().tolist()
        super().__init__(groups, tuple(ranks))
        self.links: Links = links
        # The ranks with the same place on the other nodes, or in the other replicas.
        self.across = self.replicas = self.group.only_this()
        if links.has_nodes:
            self.across = self.groups[1]
            self.rank = self.group.rank * self.across.size + self.across.rank
            self.world_size = self.group.size * self.across.size
        elif len(self.groups) > 1:
            self.replicas = self.groups[1]
        self.sharers = (self.group, self.across)
        # The slice of each layer that this node keeps until backward, by its flat parameter.
        self._kept: dict[int, torch.Tensor] = {}

    @cached_property
    def sharing(self) -> Group:
        """
        ### The ranks that share the layer, of all nodes

        They have no process group yet. All of them ask for it together.
        """
        if self.across.size == 1:
            return self.group
        process_group = dist.new_group([*self.ranks], use_local_synchronization=True)
        wait_as_long(process_group)
        if not self.by_messages:
            # NCCL connects the ranks of a group at its first call, and needs all of them for it. Of
            # the messages between owners some ranks have none.
            dist.all_reduce(torch.zeros(1, device=self.device), group=process_group)
        mesh: Any = self.links.mesh
        # Neighbouring parts are on different nodes.
        in_order = tuple(mesh.mesh.t().flatten().tolist())
        return Group(in_order, self.rank, weakref.ref(process_group))

    def open(self, sender: Named,
             params: dict[nn.Parameter, tuple[str, ...]],
             buffers: dict[str, torch.Tensor | None],
             device: torch.device | str | None,
             dtype: torch.dtype | None) -> torch.device:
        """
        ### Check the parameters of a layer, as `Communicator.open` does

        Raises `ValueError` if `Links` encodes gradients and a trainable parameter has no real
        floats. Warns if ranks of one node are on several.
        """
        if self.links.gradients:
            for param, names in params.items():
                expect(param.is_floating_point() or not param.requires_grad,
                       f"rank {self.global_rank}: {sender.label}", "real floats, because `Links` "
                       "encodes gradients", f"{param.dtype}, `{names[0]}`",
                       "leave `gradients` out, or freeze it")
        if self.links.has_nodes and self.group.far:
            warnings.warn(
                f"rank {self.global_rank}: the mesh says that ranks {[*self.group.ranks]} are on "
                "one node. torchrun says that they are on several (`LOCAL_WORLD_SIZE`). Then what "
                "is sent inside a node crosses the slow link.", stacklevel=4)
        return super().open(sender, params, buffers, device, dtype)

    # -------------------------------------------------------------------------------------- gather

    def all_gather(self, sender: Sender,
                   pairs: Pairs,
                   exact: bool = True) -> Transfer:
        """
        ### All-gather: across the nodes first, then inside each node

        * `exact` leaves the weights as they are, for `full_params()` and checkpoints
        """
        with self.on(self.fetch_stream):
            if not in_backward():
                # The optimizer may have stepped since.
                self._forget(full for full, _ in pairs)
            near = all(id(full) in self._kept for full, _ in pairs)
            groups = [self.group] if near else [*self.sharers]
            # A rank in `full_params()` and one in forward expect other bytes of the same layer.
            action = ("gather from the node" if near else
                      "gather without rounding" if exact and self.links.weights else "gather")
            # All memory first: after an error here nothing is in flight.
            rows = [self._travelling(full, self._rows_to_fill(sender, full, shard), exact)
                    for full, shard in pairs]
            transfer = self.begin(groups, [sender], action, pairs)
            for each, (full, shard) in zip(rows, pairs, strict=True):
                if near:
                    # Each copy serves one gather.
                    self._slice(each).copy_(self._kept.pop(id(full)))
                else:
                    self._put(shard, each[self.rank])
                    transfer.count(self.across, each[0].nbytes)
                transfer.count(self.group, self.across.size * each[0].nbytes)
                if each.dtype != full.dtype:
                    transfer.buffers.append(each)
            keeps = self.links.secondary and torch.is_grad_enabled() and not in_backward()
            # A group of one rank sends nothing, and the last step neither.
            hops = [partial(self._hop, transfer, group, rows)
                    for group in groups[::-1] if group.size > 1]
            transfer.later = [*hops, partial(self._arrived, transfer, rows, keeps)]
            transfer.later.pop(0)()
            if not self.by_messages:
                # The stream waits between the steps. On the CPU the wait for the transfer does.
                transfer.go_on()
            transfer.done.record()
        sender.listener.record(sender, "fetch", transfer.row[2], transfer)
        return transfer

    def announce_fault(self, groups: Iterable[Group], sender: Sender) -> None:
        """
        ### Send the later steps all the same, so that the other ranks reach the announcement
        """
        for transfer in self._unfinished():
            in_flight.lose(transfer)
            later = transfer.later
            transfer.later = []
            for step in later[:-1]:
                with suppress(RuntimeError):
                    step()
        super().announce_fault(groups, sender)

    def _unfinished(self) -> list[Transfer]:
        """
        #### The gathers that have later steps
        """
        return [user for user in in_flight.users
                if isinstance(user, Transfer) and user.comm is self and user.later]

    def _travelling(self, full: torch.Tensor,
                    rows: torch.Tensor,
                    exact: bool) -> torch.Tensor:
        """
        #### The rows that travel, `(world_size, n)`: those of the flat parameter, or encoded ones
        """
        if exact or self.links.weights is None or not full.is_floating_point():
            return rows
        return torch.empty(self.world_size, self.links.weights.nbytes(rows.shape[1]),
                           dtype=torch.uint8, device=full.device)

    def _put(self, shard: torch.Tensor, row: torch.Tensor) -> None:
        """
        #### Put this rank's shard into its row, encoded as for the other ranks
        """
        # Floats are encoded, to bytes, unless they are to stay exact.
        if self.links.weights and row.dtype != shard.dtype:
            shard = shard.to(row.device, non_blocking=True)
            shard = self.links.weights.encode(shard.view(1, -1)).view(-1)
        row.copy_(shard, non_blocking=True)

    def _forget(self, fulls: Iterable[torch.Tensor]) -> None:
        """
        #### Drop the slices that are kept of these flat parameters
        """
        for full in fulls:
            self._kept.pop(id(full), None)

    def end_pass(self) -> None:
        """
        ### The end of a backward pass: drop the slices that it has not used
        """
        self._kept.clear()

    def _slice(self, rows: torch.Tensor) -> torch.Tensor:
        """
        #### The rows of the ranks with this place in their nodes: `(M, n)`
        """
        return rows.view(self.group.size, self.across.size, -1)[self.group.rank]

    def _hop(self, transfer: Transfer,
             group: Group,
             rows: list[torch.Tensor]) -> None:
        """
        #### All-gather across the nodes, or inside this one, into rows of which each rank has some
        """
        for each in rows:
            part = self._slice(each) if group is self.across else each.view(group.size, -1)
            self.send(transfer, group, part, part[group.rank], collectives.all_gather_single)

    def _arrived(self, transfer: Transfer,
                 rows: list[torch.Tensor],
                 keeps: bool) -> None:
        """
        #### All rows are here: decode them, and keep this rank's slice if asked to
        """
        for (full, _), each in zip(transfer.pairs, rows, strict=True):
            if keeps:
                self._kept[id(full)] = self._slice(each).clone()
            if self.links.weights and each.dtype != full.dtype:
                out = self.rows(full)
                out.copy_(self.links.weights.decode(each, out.shape[1]))

    # -------------------------------------------------------------------------------------- reduce

    def reduce_scatter(self, senders: Sequence[Any], pairs: Pairs) -> Transfer:
        """
        ### Reduce-scatter: inside the node

        `exchange` adds the sums over the nodes.
        """
        # A layer that stayed full has not used its copy.
        self._forget(flat.full for sender in senders for flat in sender.flats)
        encoding = self.links.gradients
        if encoding is None or self.group.size == 1:
            return super().reduce_scatter(senders, pairs)
        with self.on(self.backup_stream):
            codes = [encoding.encode(self.rows(grad)) for grad, _ in pairs]  # (world_size, n) uint8
            transfer = self.begin([self.group], senders, "reduce", pairs)
            transfer.add = self._add_decoded
            for i, (grad, buffer) in enumerate(pairs):
                parts = codes[i].view(self.group.size, -1)
                received = collectives.as_receive_buffer(buffer, parts.view(-1)).view_as(parts)
                transfer.pairs[i] = (grad, received)
                self._all_to_all(transfer, self.group, received, parts)
        return transfer

    def _all_to_all(self, transfer: Transfer,
                    group: Group,
                    received: torch.Tensor,
                    parts: torch.Tensor) -> None:
        """
        #### Start to send each rank of a group its part, and to receive those for this rank
        """
        self.send(transfer, group, received, parts, collectives.all_to_all_single)
        transfer.count(group, parts[0].nbytes, in_ring=False)
        # What is sent has to stay until it has left.
        transfer.buffers.append(parts)

    def _add_decoded(self, grad: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """
        #### The sums of this rank's slice over the ranks of the node: `(M * shard_numel,)`
        """
        mine = self._slice(self.rows(grad))
        return self._sum_decoded(self.group, mine, received).to(grad.dtype).view(-1)

    def _sum_decoded(self, group: Group,
                     mine: torch.Tensor,
                     received: torch.Tensor) -> torch.Tensor:
        """
        #### The sum over a group, in fp32: this rank's `(rows, n)`, and the encoded ones of others
        """
        encoding: Any = self.links.gradients
        total = torch.zeros_like(mine, dtype=torch.float32)
        for k, part in enumerate(received.view(group.size, len(mine), -1)):
            # All replicas decode the same bytes, their own too.
            is_exact = k == group.rank and group is not self.replicas
            total += mine if is_exact else encoding.decode(part, mine.shape[1])
        return total

    # ------------------------------------------------------------------------------------ exchange

    def exchange(self, sender: Sender,
                 sums: list[torch.Tensor]) -> tuple[list[torch.Tensor], Transfer | None]:
        """
        ### Exchange: start to add the sums of a node over the nodes, or those of a replica over all

        * `sums` are `(M * shard_numel,)` each, the sums of this rank's slice

        Returns the totals and the transfer. With nodes the totals are `(shard_numel,)`, one row of
        the slice; with replicas they are `sums`, changed in place. Nobody reads or writes them
        until the transfer has ended.
        """
        if self.across.size == self.replicas.size == 1:
            return sums, None
        with self.on(self.backup_stream):
            group = self.across if self.links.has_nodes else self.replicas
            totals = [each.view(self.across.size, -1)[self.across.rank] for each in sums]
            if self.links.has_nodes:
                totals = [total.clone() for total in totals]
            transfer = self.begin(
                [group], [sender], "exchange", [(total, total) for total in totals])
            transfer.add = partial(self._add_in, group)
            for i, each in enumerate(sums):
                transfer.pairs[i] = (totals[i], self._send_sums(transfer, group, each, totals[i]))
        sender.listener.record(sender, "exchange", sum(t.nbytes for t in sums), transfer)
        return totals, transfer

    def _send_sums(self, transfer: Transfer,
                   group: Group,
                   sums: torch.Tensor,
                   total: torch.Tensor) -> torch.Tensor:
        """
        #### Start to add sums over the nodes (reduce-scatter), or over the replicas (all-reduce)

        * `total` is this rank's own row of them, `(shard_numel,)`

        Returns what arrives from the others, for `_add_in`.
        """
        rows = sums.view(self.across.size, -1)  # one for each node, or one for all replicas
        if self.links.gradients:
            coded = self.links.gradients.encode(rows)
            if group is self.across:
                received = torch.empty_like(coded)
                self._all_to_all(transfer, group, received, coded)
            else:
                received = coded.repeat(group.size, 1)
                self.send(transfer,
                          group,
                          received,
                          received[group.rank],
                          collectives.all_gather_single)
                transfer.count(group, coded.nbytes)
            return received
        received = rows.new_empty(group.size, len(total)) if self.by_messages else total
        to_all = group is self.replicas
        self.send(transfer,
                  group,
                  received,
                  rows,
                  _all_reduce if to_all else collectives.reduce_scatter_single)
        if to_all and not self.by_messages:
            # NCCL's ring sends $2 (R-1) / R$ times the bytes.
            transfer.count(group, 2 * total.nbytes // group.size, messages=2)
        else:
            transfer.count(group, total.nbytes)
        transfer.buffers.append(sums)
        return received

    def _add_in(self, group: Group,
                total: torch.Tensor,
                received: torch.Tensor) -> torch.Tensor:
        """
        #### The sum over a group, in this rank's memory, which a bucket's layers have views of
        """
        if self.links.gradients:
            found = self._sum_decoded(group, total.view(1, -1), received)
            return total.copy_(found.view(-1))
        if self.by_messages:
            return total.copy_(collectives.sum_of(group, total, received))
        # NCCL has added already.
        return total

    def held_tensors(self) -> Iterable[torch.Tensor]:
        """
        ### The slices that are kept for backward, and what arrives encoded
        """
        yield from self._kept.values()
        for transfer in self._unfinished():
            yield from transfer.buffers


def _all_reduce(total: torch.Tensor, _: torch.Tensor, **kwargs: Any) -> dist.Work | None:
    """
    #### All-reduce in place, called as the other collectives of `Communicator.send`
    """
    return collectives.all_reduce(total, **kwargs)


# ------------------------------------------------------------------------------ groups of ranks


def groups_of(mesh: DeviceMesh) -> tuple[Group, ...]:
    r"""
    ## Groups of ranks

    Returns the groups of a mesh, torch's table of ranks: first the ranks that are near, then those
    along the other dimension.

    * `mesh` has one dimension; or two, ("replicate", "shard") or ("nodes", "shard")

    Raises `TypeError` if it is no mesh, and `ValueError` if it has other dimensions or other ranks,
    or if its ranks are not ascending.

    With a mesh some ranks of a run can share a model. Here four ranks train two models:

    | mesh | ranks of the model | place of rank 2 | a shard is |
    |---|---|---|---|
    | none | 0 1 2 3 | number 2 of 4 | a quarter |
    | `DeviceMesh("cpu", [0, 1])` | 0 1 | nobody | half |
    | `DeviceMesh("cpu", [2, 3])` | 2 3 | number 0 of 2 | half |

    A rank's place in the group says which part of each flat parameter it keeps. Its *global rank*
    is the number that torchrun and errors use. Wherever another chapter says rank 0, it is the
    first rank of the mesh.

    **Hybrid sharding.** A mesh ("replicate", "shard") has *replicas* of the model, and each replica
    is sharded. A gather stays inside one replica, which may be one machine. Between replicas each
    rank sends only the gradient of its own shard. Three weights on two replicas of two ranks:

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

    The reduce-scatter of a layer overlaps the backward pass of the layer below, and the all-reduce
    that of the next one below. NCCL's all-reduce sends $2\frac{R-1}{R}$ times the shard. Replicas
    add in the same order, so they keep the same bits.

    **Nodes.** A mesh ("nodes", "shard") keeps one model on all ranks, and only says which of them
    are near.
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
    process_group = mesh.get_group(dim)
    wait_as_long(process_group)
    return Group(tuple(dist.get_process_group_ranks(process_group)), mesh.get_local_rank(dim),
                 weakref.ref(process_group))


def wait_as_long(process_group: dist.ProcessGroup) -> None:
    """
    ## Have a group of some ranks wait as long as that of all ranks

    `init_device_mesh` forgets the `timeout` of `init_process_group`. Its groups would wait for half
    an hour with gloo, and for ten minutes with NCCL.
    """
    for device in process_group._device_types:
        # Nobody has set its time-out.
        if timeout_of(process_group, device) in (default_pg_timeout, default_pg_nccl_timeout):
            backend: Any = process_group._get_backend(device)
            backend._set_default_timeout(timeout_of(dist.group.WORLD, device))

r"""
# The communicator

`Communicator` starts collectives between ranks, counts their bytes, and makes sure that all ranks
start the same one. `Transfer` is a collective in flight.

A training step gathers and reduces, and an optimizer that clips exchanges norms. The table has the
three weights of `minimal.py` and a zero of padding. Gradients are divided by the number of ranks
already, so sums are means:

| | collective | rank 0 has | rank 1 has | rank 0 gets | rank 1 gets |
|---|---|---|---|---|---|
| gather | all-gather | 1 2 | 3 0 | 1 2 3 0 | 1 2 3 0 |
| reduce | reduce-scatter | 1 2 3 0 | 2 0 1 0 | 3 2 | 4 0 |
| squared norm, to clip | all-gather | 13 | 16 | 13 16 | 13 16 |

The norm of the whole gradient is then $\sqrt{13 + 16} = 5.39$ on both ranks.

The first two collectives start early and are waited for late, so that they overlap computation.

**Collectives and messages.** On GPUs we call NCCL's collectives. On the CPU a rank sends its data
to each other rank in one message of gloo's, and receives one from each (`by_messages`). gloo's own
reduce-scatter sends twice the bytes, so a step of a model with $\Psi$ parameters would send $4\Psi$
instead of $3\Psi$.

With $N$ ranks, a rank sends its shard of a layer with $P_\ell$ elements to the $N-1$ others:

$$\text{bytes per rank} = (N-1)\left\lceil \frac{P_\ell}{N} \right\rceil
\cdot \text{bytes of an element}$$

**Streams.** On an accelerator three streams run beside each other. The *compute stream* is the one
that the caller uses. The *fetch stream* copies this rank's shard into the flat parameter and starts
the all-gather. The *backup stream* starts the reduce-scatter, and copies its result to CPU memory
(see `reducer.py`). NCCL adds a stream of its own, on which the collectives of a group run one after
the other. If one stream uses something that another one wrote, it waits for an event:

| who | waits for | because |
|---|---|---|
| fetch, before a gather | compute, as far as it is queued | the optimizer wrote the shard on it |
| NCCL, before a collective | the stream that starts it | it reads what that stream wrote |
| compute, before a layer | the copy and the gather of *this* layer | it reads the parameters |
| backup, before a reduce | compute, as far as it is queued | backward wrote the gradients on it |
| backup, at the next reduce | this reduce | it adds or copies the sums |
| compute, at the next reduce | the sums of this one | the optimizer reads them |
| backup, before it sends or copies sums | compute, as far as it is queued | see `Reducer.deliver` |
| the host, at the wait for a gather | the copy from CPU memory | it may write to that memory next |
| the host, at the reduce after the next | the copy to CPU memory | it reads the sums there |

The first row keeps the overlap: a gather is queued before the computation that it overlaps, so it
waits for earlier layers only. The third row says *this* layer: if compute waited for all of the
fetch stream, it would also wait for the next layer's copy.

**The same on all ranks.** Before its data, each rank announces what it is about to send, and
`guards.diverged` compares the announcements: the host does it on the CPU, or if it is about to
wait anyway, and otherwise the device.

**Run this**: `make bench ARGS=--comm` compares the messages used here with gloo's collectives.

**Not covered, and what that costs**: on an accelerator we count what a ring sends, and NCCL may
choose another way. Shards are longer by a few elements there, because they begin at multiples of 16
bytes.
"""

from __future__ import annotations

import copy
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import record_function

from zero3.comm.order import Counted, Group, Peers, Sender
from zero3.flat import in_flight
from zero3.guards.checks import ACTIONS, ALONE, Named, expect
from zero3.guards.moments import guards

# torch 2.13 has new names for these two, and 2.11 has only the old ones.
_NEW = hasattr(dist, "all_gather_single")
all_gather_single = getattr(dist, "all_gather_single" if _NEW else "all_gather_into_tensor")
reduce_scatter_single = getattr(dist, "reduce_scatter_single" if _NEW else "reduce_scatter_tensor")
all_reduce = dist.all_reduce
all_to_all_single = dist.all_to_all_single

# (flat buffer, shard) for a gather; (gradient, receive buffer) for a reduce.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
# On an accelerator parameters and shards begin at multiples of this many bytes, because one thread
# loads as much at once.
ALIGN_BYTES = 16
# The tag of announcements. Data has tags from 2 up.
_ORDER_TAG = 1
# An announcement is four numbers of 8 bytes: layer, action, bytes, and a mark. The lower half of
# the mark is a checksum of layers, gradients and options, the upper half the number of the model.
_ORDER_BYTES = 32


class Communicator(Peers):
    r"""
    ## A group of ranks, and the collectives between them

    On the CPU gloo's threads send and receive while this one computes, and streams do nothing.
    """

    def __init__(self, groups: tuple[Group, ...] = (), ranks: tuple[int, ...] = ()):
        """
        ### Join the ranks
        """
        super().__init__(groups, ranks)
        # The groups over which the shards of a layer are spread. `scatter` cuts a buffer once for
        # each of them.
        self.sharers: tuple[Group, ...] = (self.group,)
        # Encodings and routes between nodes, if there are any (see `links.py`).
        self.links: Any = None
        # Names of layers by number, for error messages.
        self.labels: dict[int, str] = {}
        # The reason why nothing can be sent any more.
        self.broken = ""
        # The rank that has announced a fault, if one has (see `guards.diverged`).
        self.failed: int | None = None
        # The number of the model, on which the ranks agreed when they met to shard.
        self.met = 0
        # For each gradient of the layers of the last reduce: whether it was missing.
        self.ready: list[bool] = []

    # -------------------------------------------------------------------------------- collectives

    def all_gather(self, sender: Sender, pairs: Pairs, exact: bool = True) -> Transfer:
        """
        ### All-gather: start to gather each shard into its flat parameter

        * each of `pairs` is a buffer, `(world_size * shard_numel,)`, to allocate and fill, and the
          shard for it, `(shard_numel,)`, on the same device or in CPU memory
        * `exact` forbids an encoding that changes values. This communicator has none (see
          `links.py`)

        All ranks must call it. A rank sends $N-1$ times the bytes of the shards.
        """
        with self.on(self.fetch_stream):
            # All memory first: after an error here nothing is in flight.
            fulls = [self._rows_to_fill(sender, *pair) for pair in pairs]
            transfer = self.begin([self.group], [sender], "gather", pairs)
            for rows, (_, shard) in zip(fulls, pairs, strict=True):
                # This rank's own row is filled by a copy, and sent from there. So a buffer that the
                # shard was read into is free again.
                mine = rows[self.rank]
                mine.copy_(shard, non_blocking=True)
                self.send(transfer, self.group, rows, mine, all_gather_single)
                transfer.count(self.group, mine.nbytes)
            transfer.done.record()
        sender.listener.record(sender, "fetch", transfer.row[2], transfer)
        return transfer

    def reduce_scatter(self, senders: Sequence[Sender], pairs: Pairs) -> Transfer:
        """
        ### Reduce-scatter: start to sum each flat gradient over the ranks

        * `senders` are the layers that the gradients belong to
        * each of `pairs` is a gradient, `(world_size * shard_numel,)`, and a buffer that nobody
          uses now, the freed flat parameter; on the CPU its storage receives the other ranks' rows

        All ranks must call it. A rank sends $N-1$ times the bytes of the shards.
        """
        with self.on(self.backup_stream):
            transfer = self.begin([self.group], senders, "reduce", pairs)
            transfer.add = self.total
            if self.group.size > 1:
                for i, (grad, buffer) in enumerate(pairs):
                    parts = grad.view(self.group.size, -1)
                    mine = parts[self.group.rank]
                    # NCCL replaces this rank's own part by the sum.
                    received = mine
                    if self.by_messages:
                        received = as_receive_buffer(buffer, grad).view_as(parts)
                        transfer.pairs[i] = (grad, received)
                    self.send(transfer, self.group, received, parts, reduce_scatter_single)
                    transfer.count(self.group, mine.nbytes)
        return transfer

    def total(self, grad: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
        """
        ### This rank's part of the sum over ranks: `(shard_numel,)`

        * `grad` is this rank's flat gradient; `received` has the parts of the other ranks

        With messages they are added in the order of ranks, so that the bits are the same each time.
        NCCL chooses its own order.
        """
        if self.group.size == 1:
            return grad
        mine = grad.view(self.group.size, -1)[self.group.rank]
        if not self.by_messages:
            # A copy, so that the full gradient can be freed.
            return mine.clone()
        return sum_of(self.group, mine, received.view(self.group.size, -1))

    def exchange(self, sender: Sender,
                 sums: list[torch.Tensor]) -> tuple[list[torch.Tensor], Transfer | None]:
        """
        ### Start to add the sums of this group to those of other groups

        * `sums` are `(shard_numel,)` each

        There are no other groups here. The communicator of `links.py` adds them over replicas, or
        over nodes.
        """
        return sums, None

    def end_pass(self) -> None:
        """
        ### The end of a backward pass: nothing to do here
        """

    def held_tensors(self) -> Iterable[torch.Tensor]:
        """
        ### Memory that it holds besides the transfers in flight, for a `Ledger`: none here
        """
        return ()

    def numbers(self, sender: Sender, mine: torch.Tensor, options: str = "",
                groups: Sequence[Group] = ()) -> torch.Tensor:
        """
        ### All-gather a few numbers, and wait

        * `mine` are this rank's, `(n,)`
        * `options` are the same on all ranks, or the wait raises an error
        * `groups` default to all of this communicator

        All ranks of the groups must call it, with as many numbers. A rank sends $N-1$ times their
        bytes, and with $R$ replicas $R N-1$ times. Returns a row of each rank; by default
        `(divisor, n)`, and the first `world_size` rows are of the first replica.
        """
        rows = mine
        for group in groups or self.groups:
            own = rows.view(-1)
            rows = own.repeat(group.size, 1)
            with self.on(self.fetch_stream):
                transfer = self.begin([group], [sender], "norm", [(rows, own)], options)
                self.send(transfer, group, rows, rows[group.rank], all_gather_single)
                transfer.count(group, own.nbytes)
                transfer.done.record()
            sender.listener.record(sender, "norm", rows.nbytes, transfer)
            transfer.wait()
        return rows.view(-1, len(mine))

    def over_stages(self, sender: Sender,
                    mine: torch.Tensor,
                    options: str = "") -> torch.Tensor:
        """
        ### All-gather a few numbers of the ranks with the rest of the model, and wait

        * `mine` are those of this stage, or of this part of the weights, `(n,)`
        * `options` are as for `numbers`

        All ranks must call it, with as many numbers. Returns `(stages, n)`. Without a pipeline and
        without split weights there is one row, and nothing is sent.
        """
        if self.stages.size == 1:
            return mine[None]
        return self.numbers(sender, mine, options, [self.stages])

    def send(self, transfer: Transfer,
             group: Group,
             receive: torch.Tensor,
             send: torch.Tensor,
             collective: Callable,
             tag: int | None = None) -> None:
        """
        ### Start to send a row to each other rank of a group, and to receive one from each

        * `receive` is `(size, n)`; for a reduce on an accelerator `(n,)`
        * `send` is `(size, n)`; or `(n,)`, if each rank gets the same row
        * `collective` is torch's function, which is called instead on an accelerator

        Each rank begins with its right-hand neighbour. Otherwise all would send to rank 0 first.
        """
        if group.size == 1 or not send.numel():
            return
        handle = group.process_group
        with transfer.starting(receive, send) as works:
            if not self.by_messages:
                works.append(collective(known(receive), known(send), group=handle, async_op=True))
                return
            rows = send.expand(group.size, -1)
            tag = transfer.tag() if tag is None else tag
            peers = [(group.rank + k) % group.size for k in range(1, group.size)]
            for peer in peers:
                works.append(dist.irecv(receive[peer], group=handle, tag=tag, group_src=peer))
            for peer in peers:
                works.append(dist.isend(rows[peer], group=handle, tag=tag, group_dst=peer))

    # ------------------------------------------------------------------------- streams and layout

    @contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        """
        ### Work on a stream, after it has waited for the current one

        So memory that torch's allocator hands out again here has no reader left, and no tensor
        needs `record_stream`.
        """
        stream.wait_stream(self.current_stream())
        with self._backend.stream(stream):
            yield

    def current_stream(self) -> torch.Stream:
        """
        ### The compute stream, which the caller may change between two layers
        """
        return self._backend.current_stream(self.device)

    def aligned(self, numel: int, dtype: torch.dtype) -> int:
        """
        ### Round a number of elements up to where another tensor may begin

        On an accelerator the next number for three fp32 elements is four, which is 16 bytes. On the
        CPU it is three.
        """
        step = max(1, self.align_bytes // dtype.itemsize)
        return -(-numel // step) * step

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """
        ### A flat buffer as one row per rank: `(world_size, shard_numel)`
        """
        return flat.view(self.world_size, flat.numel() // self.world_size)

    # ------------------------------------------------------------------- the same on all ranks

    def begin(self, groups: list[Group],
              senders: Sequence[Sender],
              action: str,
              pairs: Pairs,
              options: str = "") -> Transfer:
        """
        ### Announce what this rank is about to send

        It sends 32 bytes to each other rank of these groups.

        Raises `RuntimeError` after an earlier error. Some messages before this one were never sent
        then, and the other ranks would take this one for them.
        """
        if self.broken and action != "fault":
            raise RuntimeError(self.broken)
        # The stages of a pipeline have different layers, so they name none.
        of_stages = groups == [self.stages]
        numbers = [ALONE if of_stages else sender.layer_idx for sender in senders]
        if action == "reduce":
            # A layer may have two gradients of one size. If rank 0 has only the first, and rank 1
            # only the second, the bytes are the same. So the checksum says which ones there are.
            self.ready = [flat.grad is None for s in senders for flat in getattr(s, "flats", ())]
        ready = self.ready if action in ("reduce", "exchange") else []
        # The checksum tells two buckets or gradients of one size apart, and the number two models.
        met = 0 if action in ("fault", "save or load") or of_stages else self.met
        mark = met << 32 | zlib.crc32(f"{numbers}{ready}{options}".encode())
        row = (numbers[0], ACTIONS.index(action), sum(full.nbytes for full, _ in pairs), mark)
        transfer = Transfer(self, senders[0], action, pairs, self.event(), row, options)
        transfer.from_cpu = any(each.device != full.device for full, each in pairs)
        for group in groups:
            if group.size > 1:
                mine = announced(row, self.device)
                # NCCL runs collectives in order. So this one brings the other ranks' announcements,
                # whatever they are about to send.
                order = mine.new_empty(group.size, 4)
                if self.by_messages:
                    order[group.rank] = mine
                self.send(transfer, group, order, mine, all_gather_single, _ORDER_TAG)
                transfer.orders.append((group, order))
                transfer.order_bytes += _ORDER_BYTES * (group.size - 1)
        transfer.announced = len(transfer.works)
        return transfer

    def fail(self, sender: Sender,
             what: str,
             expected: str,
             got: object,
             cure: str) -> None:
        """
        ### Raise an error here, and on the other ranks as soon as they wait for this one

        * `what`, `expected`, `got` and `cure` are as for `expect`

        Raises `RuntimeError`, here and in every later wait for a transfer.
        """
        try:
            expect(False, f"rank {self.global_rank}: {sender.label} {what}", expected, got, cure,
                   RuntimeError)
        except RuntimeError as error:
            self.give_up(str(error), sender, self.groups)
            raise

    def give_up(self, reason: str, sender: Sender, groups: Iterable[Group]) -> None:
        """
        ### Send nothing new after the first error: each later transfer raises it again

        What is in flight keeps its memory, because the other ranks may still send to it, or wait
        for it (see `InFlight`).

        * `reason` is the text of that error
        * `groups` are those whose ranks have to hear of it
        """
        if self.broken:
            return
        self.broken = reason
        for user in list(in_flight.users):
            if getattr(user, "comm", None) is self:
                in_flight.lose(user)
        # Announce a fault in place of the next transfer. The other ranks compare it with the one
        # that they expect, and raise an error. Nobody waits for it here.
        self.announce_fault(groups, sender)

    def announce_fault(self, groups: Iterable[Group], sender: Sender) -> None:
        """
        ### Have the other ranks of some groups raise an error as soon as they wait for this one
        """
        for group in groups:
            with suppress(RuntimeError):
                in_flight.lose(self.begin([group], [sender], "fault", []))

    # -------------------------------------------------------------------- while a model is wrapped

    def join(self, stages: Group) -> Communicator:
        """
        ### Join the ranks that have other layers of the model, or other parts of them

        Returns the communicator of all ranks of the model: this one, with the stages among its
        groups. All of them must call it (all-gather of their numbers).
        """
        self.stages = stages
        whole = copy.copy(self)
        whole.groups = (*self.groups, stages)
        whole.ranks = tuple(rank for ranks in stages.gather(self.ranks) for rank in ranks)
        return whole

    def open(self, sender: Named,
             params: dict[nn.Parameter, tuple[str, ...]],
             buffers: dict[str, torch.Tensor | None],
             device: torch.device | str | None,
             dtype: torch.dtype | None) -> torch.device:
        """
        ### Check the parameters of a layer, and compare them and its buffers between ranks

        Returns the device. Ranks whose parameters differ in order or shape would gather noise.
        """
        at, self.met = guards.check_params(sender, params, buffers, device, dtype)
        self.use(at)
        return at

    def use(self, at: torch.device) -> None:
        """
        ### Choose messages or collectives for a device, and take its streams
        """
        self.by_messages = at.type == "cpu"
        self.align_bytes = 1 if at.type == "cpu" else ALIGN_BYTES
        self.device = at
        self._backend: Any = torch.get_device_module(at)
        self.event = self._backend.Event
        self.fetch_stream, self.backup_stream = streams(at)

    def _rows_to_fill(self, sender: Sender,
                      full: torch.Tensor,
                      shard: torch.Tensor) -> torch.Tensor:
        """
        #### Allocate a flat parameter, if the shard still fits it: `(world_size, shard_numel)`

        `model.half()` after wrapping converts the shards and not the flat parameter.
        """
        is_near = shard.device in (full.device, torch.device("cpu"))
        if full.dtype != shard.dtype or not is_near:
            expect(False, f"rank {self.global_rank}: {sender.label} cannot gather",
                   f"{full.dtype} on {full.device}, as wrapped",
                   f"a shard of {shard.dtype} on {shard.device}",
                   "convert or move the module before wrapping it, not after", RuntimeError)
        # The buffer of `full_params` has its memory already.
        in_flight.resize(full, full.nbytes)
        return self.rows(full)

    def scatter(self, full: torch.Tensor) -> torch.Tensor:
        """
        ### This rank's part of the first rank's buffer: `(shard_numel,)`

        * `full` is `(world_size * shard_numel,)`; on a single rank it is the part itself

        All ranks must call it. It waits.
        """
        part = full
        for group in self.sharers:
            if group.size > 1:
                parts = [bytes_of(each) for each in part.view(group.size, -1)]
                part = part.new_empty(len(part) // group.size)
                if len(part):
                    group.together("first values", dist.scatter, bytes_of(part),
                                   parts if group.rank == 0 else None, group_src=0)
        self.broadcast([part], groups=[self.replicas])
        return part

    def broadcast(self, tensors: Iterable[torch.Tensor | None],
                  source: int = 0,
                  groups: Sequence[Group] = ()) -> None:
        """
        ### Give each rank the tensors of one of them, and wait; all ranks must call it

        * `source` is the place of that rank in each group
        * `groups` default to all of this communicator
        """
        for tensor in tensors:
            for group in groups or self.groups:
                if tensor is None or group.size == 1 or not tensor.numel():
                    continue
                whole = tensor.detach().to(group.place_of(tensor.device))
                if tensor.layout == torch.strided:
                    # Here, because `bytes_of` would receive into a copy of a conjugated tensor.
                    whole = whole.resolve_conj().contiguous()
                    group.together("values", dist.broadcast, bytes_of(whole), group_src=source)
                else:
                    # A sparse tensor's number of elements may differ between ranks.
                    parts = [whole.cpu()]
                    group.together("values", dist.broadcast_object_list, parts, group_src=source)
                    whole = parts[0]
                # The source has the values already, and a copy would count as a write.
                if group.rank != source:
                    # Not into `tensor.detach()`, which has indices of its own if it is sparse.
                    with torch.no_grad():
                        tensor.copy_(whole)


@dataclass(eq=False, repr=False)
class Transfer(Counted):
    """
    ## A collective in flight

    `all_gather` and `reduce_scatter` return one at once, while the data travels. It keeps the
    buffers alive until somebody calls `wait`, which is normally one layer later.
    """

    comm: Communicator
    sender: Sender
    action: str  # one of `ACTIONS`
    pairs: Pairs
    # Recorded on the fetch stream after this rank's copies, or on the backup stream after the sums.
    done: torch.Event
    row: tuple[int, ...]  # what this rank has announced: layer, action, bytes, mark
    options: str  # what else has to be the same on all ranks, in words
    # Returns this rank's part of the sum for a pair; a gather sums nothing.
    add: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    # What to do once the data has arrived, step by step, such as to send it on (see `links.py`).
    later: list[Callable[[], None]] = field(default_factory=list)
    # Memory that is in flight besides the pairs.
    buffers: list[torch.Tensor] = field(default_factory=list)
    from_cpu: bool = False  # an accelerator copies from memory that the host may write to
    # For each group, (group.size, 4) int64: what each of its ranks is about to do.
    orders: list[tuple[Group, torch.Tensor]] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)
    announced: int = 0  # how many of the works, the first ones, are announcements

    def wait(self) -> list[torch.Tensor]:
        """
        ### Wait for the collective

        The compute stream waits for this transfer, and for nothing that started after it; on the
        CPU this thread waits. A reduce returns, for each pair, the sum over ranks of this rank's
        part, `(shard_numel,)`. An exchange writes its sums in place.

        Raises `RuntimeError` if another rank is about to do something else (I6), or is gone.
        """
        try:
            with named_range(f"wait for the {self.action} of {self.sender.label}"):
                # The backup stream takes the sums, because it may copy them to CPU memory next. For
                # all else the compute stream itself waits, so that the fetch stream goes on with
                # the next layer.
                with self.comm.on(self.comm.backup_stream) if self.add else nullcontext():
                    self._arrive()
                    totals = [self.add(*pair) for pair in self.pairs if self.add]
                    if self.add:
                        self.done.record()
                self.comm.current_stream().wait_event(self.done)
                if self.from_cpu:
                    # The host waits too, because an optimizer on the CPU writes to the shard in
                    # place.
                    self.done.synchronize()
        except BaseException:
            # Something may still arrive.
            in_flight.lose(self)
            raise
        if self.action.startswith("gather"):
            self.sender.listener.record(self.sender, "gathered", self.row[2])
        in_flight.end(self)
        # The works hold references to the buffers.
        self.works = []
        self.pairs = []
        self.buffers = []
        return totals

    @contextmanager
    def starting(self, *tensors: torch.Tensor) -> Iterator[list[Any]]:
        """
        ### Inside of this, start something that uses these tensors, and append its work to the list

        Raises `RuntimeError` if the connection is gone.
        """
        in_flight.begin(self, *tensors)
        try:
            with named_range(f"start the {self.action} of {self.sender.label}"):
                yield self.works
        # torch raises `ValueError` for a process group that is gone.
        except (RuntimeError, ValueError) as error:
            in_flight.lose(self)
            raise self._give_up(self._problem(error)) from error

    def count(self, group: Group,
              nbytes: int,
              messages: int = 1,
              in_ring: bool = True) -> None:
        """
        ### Count what goes to each other rank of a group

        * `in_ring` says that all bytes go to the next rank, as in NCCL's ring; messages go to each
          rank directly
        """
        if not nbytes:
            return
        others = group.size - 1
        self.sent_bytes += others * nbytes
        self.messages += others * messages
        in_ring = in_ring and not self.comm.by_messages
        self.between_bytes += nbytes * (others * group.next_is_far if in_ring else group.far)

    def tag(self) -> int:
        """
        ### The tag of its next messages

        It is made of the announcement and the number of works. So only messages of equal transfers
        match, and gloo keeps those in order.
        """
        name = f"{self.row} {len(self.works)}".encode()
        return _ORDER_TAG + 1 + zlib.crc32(name) % (1 << 30)

    def _arrive(self) -> None:
        """
        #### Have the current stream wait, or on the CPU this thread; or raise an error
        """
        # After the first error the messages no longer fit each other.
        if self.comm.broken:
            raise RuntimeError(self.comm.broken)
        try:
            self.wait_for(self.works[: self.announced])
            # Compare before waiting for the data. If the ranks diverged, it may never come.
            problems = (guards.diverged(self, group.ranks, group.rank, order)
                        for group, order in self.orders)
            problem = next(filter(None, problems), "")
            if not problem:
                self.go_on()
        except (RuntimeError, ValueError) as error:
            problem = self._problem(error)
        if problem:
            raise self._give_up(problem)

    def go_on(self) -> None:
        """
        ### Wait for the data, and start each later step when the one before has arrived
        """
        self.wait_for(self.works[self.announced :])
        while self.later:
            sent = len(self.works)
            self.later.pop(0)()
            self.wait_for(self.works[sent:])

    def _give_up(self, problem: str) -> RuntimeError:
        """
        #### Send nothing new, tell this rank's other groups, and return the error to raise

        The ranks of the transfer's own group find the problem themselves.
        """
        alone = self.orders[0][0] if len(self.orders) == 1 else None
        others = [group for group in self.comm.groups if group is not alone]
        self.comm.give_up(problem, self.sender, others)
        return RuntimeError(self.comm.broken)

    def wait_for(self, works: list[Any]) -> None:
        """
        ### Wait for messages within the group's timeout, and have a stream wait for collectives

        Without a limit gloo waits as long as it was told when the group was made: half an hour, if
        a mesh made it (see `wait_as_long`).
        """
        for work in works:
            if self.comm.by_messages:
                work.wait(self.comm.group.timeout)
            else:
                work.wait()

    @property
    def where(self) -> str:
        return f"rank {self.comm.global_rank}: {self.sender.label}"

    def _problem(self, error: Exception) -> str:
        """
        #### The text for a connection that is gone, or for a wait that took too long
        """
        group = self.comm.group
        return (f"{self.where}: the other ranks are lost. Expected: their part of a {self.action}"
                f"{group.within(error)}. Got: {error}. What to do: {group.advice(error)}")


@functools.lru_cache(4096)
def announced(row: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """
    ## An announcement in the device's memory: `(4,)` int64

    The host waits while it copies the numbers to the device. Most of them come again in each step,
    so they are kept.
    """
    return torch.tensor(row, device=device)


@functools.cache
def streams(device: torch.device) -> tuple[torch.Stream, torch.Stream]:
    """
    ## The fetch stream and the backup stream of a device

    All communicators share them, because the allocator gives freed memory only to the stream that
    took it. The priority is high, so that the small copies around a collective go ahead of large
    kernels.
    """
    backend = torch.get_device_module(device)
    # The CPU's streams take no device.
    options = {} if device.type == "cpu" else {"device": device, "priority": -1}
    return backend.Stream(**options), backend.Stream(**options)


def named_range(name: str) -> AbstractContextManager[object]:
    """
    ## A range in the traces of `torch.profiler`, if a profiler runs

    To make one takes time, even if nobody records it.
    """
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


def sum_of(group: Group,
           mine: torch.Tensor,
           received: torch.Tensor) -> torch.Tensor:
    """
    #### The sum over a group, `(n,)`: this rank's row and those that the others have sent

    * `received` is `(size, n)`; this rank's row is not read
    """
    rows = [mine if k == group.rank else row for k, row in enumerate(received)]
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total += row
    return total


def as_receive_buffer(buffer: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """
    #### The storage of a buffer, as a tensor of this gradient's length and data type
    """
    in_flight.resize(buffer, grad.nbytes)
    return grad.new_empty(0).set_(buffer.untyped_storage(), 0, grad.shape, (1,))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """
    #### The bytes of a tensor, `(nbytes,)`: its own memory, if it is contiguous, not conjugated

    Neither gloo's nor NCCL's collectives know every data type, but they know bytes. The stride is
    written out, because torch also calls a tensor of one element contiguous whose stride is 0.
    """
    flat = tensor.detach().resolve_conj().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)


def known(tensor: torch.Tensor) -> torch.Tensor:
    """
    #### The elements of a tensor in a row, as numbers that NCCL knows

    It adds real floats alone, and a few kinds of integers are unknown to it.
    """
    flat = tensor.detach().resolve_conj().contiguous()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    return flat.view(-1) if flat.is_floating_point() else bytes_of(flat)

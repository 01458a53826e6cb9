r"""
# The wire

`Communicator` carries what ranks tell each other, and `Reducer` says when gradients go.

All that a training step sends goes through one class. It starts a transfer and returns, so that
what is computed in between hides the time it takes; it counts what it sends; and it announces each
transfer, so that ranks which diverged learn it from each other. What is sent once, when layers are
wrapped and written to, is not counted.

| transfer | sends to each other rank | starts | is waited for |
|---|---|---|---|
| gather | this rank's shard | while the layer before computes | before the layer computes |
| reduce | that rank's share of the gradient | when a layer has its gradients | with the next one |
| norm | a number for each shard | in the optimizer's step | at once |

**Run this**: `make bench ARGS=--comm` measures messages against gloo's collectives.

On an accelerator three things run beside each other. The *compute stream* is the one that the
caller uses. The *fetch stream* copies this rank's shard into the flat buffer, and starts the
all-gather. The *backup stream* starts the reduce-scatter, and copies what arrived to CPU memory.
NCCL has a stream of its own for the collectives. Each crossing is an event:

| who | waits for | because |
|---|---|---|
| fetch, before a gather | compute, up to now | the optimizer wrote the shard there |
| compute, before a layer | the copy and the gather of *this* layer | it reads the parameters |
| backup, before a reduce | compute, up to now | backward wrote the gradients there |
| compute, at the next reduce | the sums of this one | the optimizer reads them |
| the host, one layer later | the copy of a shard from CPU memory | it may write there next |
| the host, one reduce later | the copy of the sums to CPU memory | it reads them there |

The second row says *this* layer: compute waits for an event that was recorded behind the layer's
own copy. If it waited for all that the fetch stream has, the copy of the next layer would be among
it, which was queued before, and no copy would ever overlap computation.

**Not covered, and what that costs**: process subgroups. On an accelerator the bytes counted are
what the collective's algorithm needs, while the transport may send more. If ranks diverge there, an
assertion on the device fails, and the error comes with the next operation that waits for the
device. It says that the ranks diverged, but not which ranks and layers: nobody reads on the host
what the others announced. Run the same program on the CPU, where the error names both sides, or
look at the collectives that each rank issued last, with torch's flight recorder
(`TORCH_FR_BUFFER_SIZE`). A rank that ended without an announcement is found out by NCCL's time-out.
"""

import functools
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

# torch 2.13 renames these two; 2.11 has only the old names.
_NEW = hasattr(dist, "all_gather_single")
_all_gather = getattr(dist, "all_gather_single" if _NEW else "all_gather_into_tensor")
_reduce_scatter = getattr(dist, "reduce_scatter_single" if _NEW else "reduce_scatter_tensor")

# Flat buffers, each with a shard or a receive buffer.
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
# What a rank may be about to do, as a number that fits into a message.
_ACTIONS = ("gather", "reduce", "norm", "fault")
# On an accelerator parameters and shards begin at multiples of so many bytes: what one thread of it
# loads at once.
ALIGN_BYTES = 16
# The tag of the messages that announce it. Data has tags of its own, from 2 up.
_ORDER_TAG = 1
# Four numbers of 8 bytes: layer, action, bytes, and a checksum of the layers.
_ORDER_BYTES = 32


@dataclass
class Transfer:
    """
    ## Messages that have started, and what they put on the wire

    Started early and waited for late: what a layer computes in between hides the time they take.
    """

    comm: "Communicator"
    layer: Any
    action: str  # one of `_ACTIONS`
    stream: Any
    pairs: Pairs
    # Recorded on the stream: behind the copies of a gather, and behind the sums of a reduce.
    done: Any = None
    from_cpu: bool = False  # an accelerator copies from memory to which the host may write
    order: torch.Tensor | None = None  # (world_size, 4) int64: what each rank is about to do
    order_works: list[Any] = field(default_factory=list)
    works: list[Any] = field(default_factory=list)
    sent_bytes: int = 0  # of parameters, gradients or norms, by this rank
    messages: int = 0
    order_bytes: int = 0

    def wait(self) -> list[torch.Tensor]:
        """
        ### Wait for the transfer

        The compute stream waits for this transfer, and for nothing that was started after it; on
        the CPU this thread waits. Returns what a reduce gives: per pair the sum over ranks of this
        rank's share, `(shard_numel,)`, in memory of the backup stream.

        Raises `RuntimeError` where another rank is about to do something else (I6), or is gone.
        """
        totals: list[torch.Tensor] = []
        if self.action == "reduce":
            # The sums are made on the backup stream, which may copy them on to CPU memory.
            with self.comm.on(self.stream):
                self._arrive()
                totals = [self.comm.total(*pair) for pair in self.pairs]
                self.done.record()
        else:
            # On the compute stream itself: the fetch stream goes on with the next layer.
            self._arrive()
        self.comm.current_stream().wait_event(self.done)
        if self.from_cpu:
            # The host waits too, before it may write to the shard: an optimizer on the CPU steps it
            # in place. This copy has had the computation of a layer, and the next is queued behind.
            self.done.synchronize()
        if self.action == "gather":
            self.layer.listener.record(self.layer, "gathered", sum(f.nbytes for f, _ in self.pairs))
        # They hold the buffers, which would outlive the moment at which the layer frees them.
        self.works, self.order_works, self.pairs = [], [], []
        return totals

    def _arrive(self) -> None:
        """
        #### Have the current stream wait, or raise
        """
        # What once broke stays so: the messages that others sent since then fit nothing here.
        self.comm.broken = self.comm.broken or self._complete()
        if self.comm.broken:
            # With the last reference its messages would go, and others may wait for them.
            self.comm.lost.append(self)
            raise RuntimeError(self.comm.broken)

    def _complete(self) -> str:
        """
        #### Wait, or say why not
        """
        where = f"rank {self.comm.rank}: {self.layer.label}"
        try:
            for work in self.order_works:
                work.wait()
            # Before the wait for the data: that of ranks which diverged may never come.
            if problem := self._diverged(where):
                return problem
            for work in self.works:
                work.wait()
        except (RuntimeError, ValueError) as error:
            return (f"{where}: the other ranks are lost. Expected: their part of a {self.action}. "
                    f"Got: {error}. What to do: look for the first error on another rank, and "
                    "start again.")
        return ""

    def _diverged(self, where: str) -> str:
        """
        #### Compare what the ranks have announced

        Messages are compared here, which names both sides. What a collective gathered is on the
        device, and to look at it the host would have to wait. So the device compares: if the rows
        differ, the assertion fails there, and so does the next call that waits for the device.
        On the CPU it raises at once.
        """
        if self.order is None:
            return ""
        if not self.comm.by_messages:
            return self._assert_same(where, self.order)
        rows = self.order.tolist()
        mine = rows[self.comm.rank]
        for other, row in enumerate(rows):
            if row != mine:
                return (f"{where}: the ranks diverged. Expected: {self.comm.told(mine)}, on "
                        f"all ranks, as here. Got: {self.comm.told(row)}, on rank {other}. "
                        f"What to do: look for an error on rank {other}; without one, call the "
                        "same layers in the same order on all ranks. Start again.")
        return ""

    def _assert_same(self, where: str, order: torch.Tensor) -> str:
        """
        #### Have the device compare

        * `order` is `(world_size, 4)` int64, on the device

        Returns why not, where the assertion has failed already.
        """
        problem = (f"{where}: the ranks diverged. Expected: a {self.action} of this layer on all "
                   "ranks, as here. Got: another transfer on another rank. What to do: look for an "
                   "error on another rank; without one, call the same layers in the same order on "
                   "all ranks: the same program on the CPU names both sides. Start again.")
        try:
            torch._assert_async((order == order[self.comm.rank]).all(), problem)
        except RuntimeError as error:
            if problem not in str(error):
                # An earlier failure on the device, which the first call after it reports.
                raise
            return problem
        return ""


class Communicator:
    r"""
    ## The seam between CPU and GPU

    On an accelerator the collectives are NCCL's, and streams put them beside the computation.
    On the CPU each is $N-1$ messages out and $N-1$ in, carried by a thread of gloo's while this one
    computes; streams are absent there, torch's CPU module has no-ops by the same names. The tests
    put a device in its place that has streams and no speed, and check which operation waits for
    which.

    Messages rather than gloo's collectives, because its reduce-scatter sends what an all-reduce
    sends: a step would send $4\Psi$ instead of $3\Psi$. `python -m tests.bench --comm` measures
    both.
    """

    def __init__(self, rank: int | None = None, world_size: int | None = None):
        """
        ### Take a place among the ranks

        * `rank` and `world_size` are the process group's, and default to them; without one, to 0
          and 1

        Raises `RuntimeError` where there is no process group of this rank and size.
        """
        up = dist.is_available() and dist.is_initialized()
        here = (dist.get_rank(), dist.get_world_size()) if up else (0, 1)
        self.rank = here[0] if rank is None else rank
        self.world_size = here[1] if world_size is None else world_size
        if (self.rank, self.world_size) != (here if self.world_size > 1 else (0, 1)):
            raise RuntimeError(
                f"rank {self.rank}: no such rank. Expected: rank {here[0]} of {here[1]}, as the "
                f"process group says. Got: rank {self.rank} of {self.world_size}. What to do: "
                "start with torchrun, call `torch.distributed.init_process_group` first, and pass "
                "its numbers or leave them out.")
        self.reducer = Reducer(self)
        # Layers that the end of this `backward()` will settle; and what errors call the layers.
        self.unsettled, self.names = set(), {}  # type: tuple[set[Any], dict[int, str]]
        # One reduce at most is in flight, of a layer or of a bucket of them; and one checkpoint on
        # its way to the disk.
        self.reducing, self.saving = None, None  # type: tuple[Any, Any]
        self.stepping = False  # inside of the optimizer's step
        # One reduced gradient at most is on its way to CPU memory.
        self.leaving: _Leaving | None = None
        # What this rank announces by collectives, in the device's memory.
        self._rows: dict[tuple[int, ...], torch.Tensor] = {}
        # Why nothing can be sent any more, once that is so; and what could not be waited for then.
        self.broken, self.lost = "", []  # type: tuple[str, list[Transfer]]

    def gather(self, thing: Any) -> list[Any]:
        """
        ### What each rank has: small things, of any kind (all-gather; all ranks must call it)
        """
        things = [thing] * self.world_size
        if self.world_size > 1:
            self._together(dist.all_gather_object, things, thing)
        return things

    def _together(self, collective: Callable, *args: Any) -> None:
        """
        #### Call a collective; if another rank does not, raise an error that says so

        A rank that raised before it came here ends its process, and closes its connections. The
        backend then reports a closed connection or a time-out, and knows nothing of the reason.

        Raises `RuntimeError`.
        """
        try:
            collective(*args)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: another rank has ended, or does something else. Expected: all "
                f"{self.world_size} ranks to call the same functions of zero3. Got: {error}. What "
                "to do: look for the first error on the other ranks, which is the cause, and start "
                "again.") from error

    def agree(self, layer: Any, what: str, expected: str, problem: str, cure: str) -> None:
        """
        ### Raise an error on all ranks, if one of them has a problem

        * `problem` is this rank's, or empty; the others are as for `Zero3Layer.expect`

        All ranks must call it. Raises `RuntimeError`.
        """
        for rank, theirs in enumerate(self.gather(problem)):
            layer.expect(not theirs, what, expected, f"{theirs}, on rank {rank}", cure)

    def fail(self, layer: Any, what: str, expected: str, got: Any, cure: str) -> None:
        """
        ### Raise an error, and have the other ranks raise one where they would wait for this one

        * `what`, `expected`, `got` and `cure` are as for `Zero3Layer.expect`

        Raises `RuntimeError`, here and again in the next wait for a transfer. The other ranks raise
        one too, where they wait for the transfer that this rank does not begin.
        """
        try:
            layer.expect(False, what, expected, got, cure)
        except RuntimeError as error:
            if not self.broken:
                # In place of what the others expect to be announced; never waited for.
                self.lost.append(self._begin([layer], "fault", None, []))
            self.broken = self.broken or str(error)
            raise

    def open(self, layer: Any, params: dict[nn.Parameter, tuple[str, ...]],
             device: torch.device | str | None, dtype: torch.dtype | None) -> torch.device:
        """
        ### Make sure that all ranks will send the same things, and open the streams

        * `params` are the layer's, with their names; `device` and `dtype` are what they must be on
          and of, where given

        Returns the device. Ranks whose parameters differ in order or shape would gather noise.
        """
        at = torch.device(device or next((p.device for p in params), "cpu"))
        for p, (name, *_) in params.items():
            what = f"cannot shard `{name}`"
            layer.expect(type(p) is nn.Parameter and not p.is_meta, what, "a Parameter with values",
                         f"{type(p).__name__} on {p.device}", "initialise the module first")
            matches = p.device.type == at.type and at.index in (None, p.device.index or 0)
            layer.expect(matches, what, f"device {at}", p.device, "move the module there first")
            layer.expect(dtype in (None, p.dtype), what, dtype, p.dtype, "convert the module with "
                         "`.to(dtype)` first, or leave `dtype` out to mix data types")
            at = p.device
        backend = torch.get_device_module(at)
        self.by_messages = at.type == "cpu"
        if not self.by_messages:
            at = self._device(layer, at, backend)
        layout = [(n, tuple(p.shape), p.dtype, p.requires_grad) for p, n in params.items()]
        for rank, theirs in enumerate(self.gather(layout)):
            for i in range(max(len(layout), len(theirs))):
                here, there = layout[i : i + 1] or "none", theirs[i : i + 1] or "none"
                layer.expect(here == there, f"differs between ranks at parameter {i}",
                             f"{here}, as here", f"{there} on rank {rank}",
                             "build the same module, in the same order, on all ranks")
        self.align_bytes = 1 if at.type == "cpu" else ALIGN_BYTES
        self.fetch_stream, self.backup_stream = streams(at)
        self.current_stream = functools.partial(backend.current_stream, at)
        self.event, self._stream, self.device = backend.Event, backend.stream, at
        return at

    def _device(self, layer: Any, at: torch.device, backend: Any) -> torch.device:
        """
        #### Make sure that an accelerator is the one that this rank's collectives use

        Returns it with its number. NCCL takes the *current* device for what it sends by itself, and
        waits for that one's stream. Two devices in one rank would wait for nothing, or for ever.
        """
        cannot = f"cannot compute on {at}"
        there = backend.device_count() if backend.is_available() else 0
        layer.expect((at.index or 0) < there, cannot, f"one of {there} such devices", at,
                     "choose one that this process sees, or move the module to the CPU")
        current = torch.device(at.type, backend.current_device())
        at = current if at.index is None else at
        layer.expect(at == current, cannot, f"the current device, {current}", at,
                     f"call `torch.{at.type}.set_device({at.index})` on this rank before "
                     "`init_process_group`, or move the module")
        if self.world_size > 1:
            bound = getattr(dist.group.WORLD, "bound_device_id", None)
            layer.expect(bound in (None, at), cannot, f"{bound}, which the process group has", at,
                         f"pass `device_id={at}` to `init_process_group`, or move the module")
            backends = str(dist.get_backend_config())
            layer.expect(f"{at.type}:" in backends, cannot, f"a process group for {at.type}",
                         f"one for {backends}", "call `init_process_group` without a backend, or "
                         "with one that serves this device")
        return at

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        """
        ### Work on a stream, which first waits for the current one

        Whatever this stream reads has then been written, and whatever memory it reuses has been
        read. That is why no tensor here needs `record_stream`: a block is freed by the host as soon
        as its last reader is queued, and the next writer waits for that reader.
        """
        stream.wait_stream(self.current_stream())
        with self._stream(stream):
            yield

    def aligned(self, numel: int, dtype: torch.dtype) -> int:
        """
        ### The next number of elements after which another tensor may begin
        """
        step = max(1, self.align_bytes // dtype.itemsize)
        return -(-numel // step) * step

    def rows(self, flat: torch.Tensor) -> torch.Tensor:
        """
        ### A flat buffer as one row per rank: `(world_size, shard_numel)`
        """
        return flat.view(self.world_size, len(flat) // self.world_size)

    def all_gather(self, layer: Any, pairs: Pairs) -> Transfer:
        """
        ### Start to gather each shard into its flat buffer

        * `pairs` are of `(world_size * shard_numel,)` to write, which gets its memory here, and
          `(shard_numel,)` to send, on the same device or in CPU memory

        All ranks must call it. Sends $N-1$ times the shards' bytes.
        """
        # The fetch stream waits for the compute stream: there the optimizer wrote the shards, and
        # there the memory that is handed out now had its last reader.
        with self.on(self.fetch_stream):
            transfer = self._begin([layer], "gather", self.fetch_stream, pairs)
            for full, shard in pairs:
                near = shard.device in (full.device, torch.device("cpu"))
                layer.expect(full.dtype == shard.dtype and near,
                             "cannot gather", f"{full.dtype} on {full.device}, as wrapped",
                             f"a shard of {shard.dtype} on {shard.device}",
                             "convert or move the module before wrapping it, not after")
                storage = full.untyped_storage()
                if storage.nbytes() != full.nbytes:
                    # Only then: to resize to the same size takes the memory a second time.
                    storage.resize_(full.nbytes)
                # From wherever it rests to where it will be needed, and from there to the others:
                # what it was read into is then free for the next one.
                mine = self.rows(full)[self.rank]
                mine.copy_(shard, non_blocking=True)
                transfer.from_cpu |= shard.device != full.device
                self._gather(transfer, full, mine)
            transfer.done.record()
        layer.listener.record(layer, "fetch", sum(full.nbytes for full, _ in pairs), transfer)
        return transfer

    def reduce_scatter(self, layers: list[Any], pairs: Pairs) -> None:
        """
        ### Start to reduce-scatter each flat gradient

        * `layers` are those whose gradients these are; it is recorded under the first one's name
        * `pairs` are of the gradient, `(world_size * shard_numel,)`, and of any buffer: where
          messages need a receive buffer, its storage becomes one

        All ranks must call it. Sends $N-1$ times the shards' bytes. `reduced` ends it.
        """
        # The backup stream waits for the compute stream, which wrote the gradients.
        with self.on(self.backup_stream):
            self.reducing = transfer = self._begin(layers, "reduce", self.backup_stream, pairs)
            for i, (grad, buffer) in enumerate(pairs):
                if self.world_size > 1 and self.by_messages:
                    memory = buffer.untyped_storage().resize_(grad.nbytes)
                    # The gradients may be of another length and data type than the buffer was.
                    receive_buffer = grad.new_empty(0).set_(memory, 0, grad.shape, (1,))
                    transfer.pairs[i] = (grad, receive_buffer)
                    self._exchange(transfer, self.rows(receive_buffer), self.rows(grad))
                elif self.world_size > 1:
                    # In place: the sum replaces this rank's own row.
                    self._collective(transfer, _reduce_scatter, self.rows(grad)[self.rank], grad)
        layers[0].listener.record(layers[0], "reduce", sum(g.nbytes for g, _ in pairs), transfer)

    def numbers(self, layer: Any, mine: torch.Tensor) -> torch.Tensor:
        """
        ### Tell each other a few numbers

        * `mine` are this rank's, `(n,)`

        All ranks must call it, with as many. Sends $N-1$ times their bytes. Returns every rank's,
        `(world_size, n)`, so that all ranks can come to the same conclusion.
        """
        rows = mine.repeat(self.world_size, 1)
        with self.on(self.fetch_stream):
            transfer = self._begin([layer], "norm", self.fetch_stream, [(rows, mine)])
            self._gather(transfer, rows.view(-1), mine)
            transfer.done.record()
        layer.listener.record(layer, "norm", rows.nbytes, transfer)
        transfer.wait()
        return rows

    def reduced(self) -> list[torch.Tensor]:
        """
        ### End the reduce in flight: this rank's shares of the sums
        """
        transfer, self.reducing = self.reducing, None
        return transfer.wait()

    def deliver(self, total: torch.Tensor, where: torch.device,
                add: Callable[[torch.Tensor], None]) -> None:
        """
        ### Hand a reduced gradient to the place where it rests

        * `total` is `(shard_numel,)`, on the device
        * `add` gets it, on the device `where`

        From an accelerator to CPU memory the backup stream copies it while the layers below
        compute. `add` is called once it has arrived: when the next one leaves, or at the end of the
        pass (`delivered`). So the host waits for a copy that had the backward of a whole layer.
        """
        if where == total.device or where.type != "cpu":
            add(total)
            return
        self.delivered()
        there = torch.empty_like(total, device=where, pin_memory=True)
        # The backup stream waits for the compute stream: one rank alone has no reduce, and its
        # `total` is the gradient that backward has just written.
        with self.on(self.backup_stream):
            there.copy_(total, non_blocking=True)
            event = self.event()
            event.record()
        self.leaving = _Leaving(total, there, event, add)

    def delivered(self) -> None:
        """
        ### Wait until the gradient that is on its way to CPU memory has arrived
        """
        leaving, self.leaving = self.leaving, None
        if leaving is not None:
            # The host waits, for it reads the gradient next.
            leaving.copied.synchronize()
            leaving.add(leaving.there)

    def total(self, grad: torch.Tensor, receive_buffer: torch.Tensor) -> torch.Tensor:
        """
        ### This rank's share of the sum over ranks: `(shard_numel,)`

        Added in rank order, so that every run adds alike.
        """
        if self.world_size == 1:
            return grad
        mine = self.rows(grad)[self.rank]
        if not self.by_messages:
            return mine.clone()
        rows = [mine if k == self.rank else row for k, row in enumerate(self.rows(receive_buffer))]
        total = rows[0] + rows[1]
        for row in rows[2:]:
            total += row
        return total

    def scatter(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        """
        ### Give each rank its share of what rank 0 has

        * `shard` is `(shard_numel,)` to write, anywhere; `full` is `(world_size * shard_numel,)`
        """
        if self.world_size == 1:
            shard.copy_(full)
        elif len(shard):
            rows = [_bytes(row) for row in self.rows(full)] if self.rank == 0 else None
            # On the device: the shard may rest elsewhere.
            mine = torch.empty_like(shard, device=full.device)
            self._together(dist.scatter, _bytes(mine), rows)
            shard.copy_(mine)

    def broadcast(self, tensor: torch.Tensor | None) -> None:
        """
        ### Give each rank rank 0's tensor
        """
        if self.world_size == 1 or tensor is None or not tensor.numel():
            return
        if tensor.layout != torch.strided:
            # A sparse tensor has as many elements on each rank as it likes.
            parts = [tensor.detach()]
            self._together(dist.broadcast_object_list, parts, 0)
            with torch.no_grad():
                tensor.copy_(parts[0])
            return
        whole = tensor.detach().contiguous()
        self._together(dist.broadcast, _bytes(whole), 0)
        tensor.detach().copy_(whole)

    def told(self, row: list[int]) -> str:
        """
        ### What a rank has announced
        """
        layer, action, nbytes, checksum = row
        sent = ""
        if _ACTIONS[action] != "fault":
            sent = f", {nbytes} bytes, layers' checksum {checksum}"
        # Whatever is in no chain has the number -1.
        alone = "the gradients" if _ACTIONS[action] == "norm" else "a layer in no chain"
        name = self.names.get(layer, f"layer {layer}" if layer >= 0 else alone)
        return f"{_ACTIONS[action]} of {name}{sent}"

    def _begin(self, layers: list[Any], action: str, stream: Any, pairs: list) -> Transfer:
        """
        #### Announce what this rank is about to transfer

        32 bytes to each other rank, ahead of the data and without waiting. Ranks that took
        different branches would otherwise exchange different layers: where the sizes are the same,
        the model turns to noise; where they are not, gloo ends the process and NCCL hangs.
        """
        transfer = Transfer(self, layers[0], action, stream, pairs, self.event())
        if self.world_size > 1:
            numbers = [layer.layer_idx for layer in layers]
            # A checksum, for two buckets may begin with the same layer and have as many bytes.
            row = (numbers[0], _ACTIONS.index(action), sum(full.nbytes for full, _ in pairs),
                   zlib.crc32(str(numbers).encode()))
            if self.by_messages:
                transfer.order = torch.empty(self.world_size, 4, dtype=torch.int64)
                transfer.order[self.rank] = torch.tensor(row)
                mine = [transfer.order[self.rank]] * self.world_size
                transfer.order_works = self._send(transfer.order, mine, _ORDER_TAG)
            else:
                self._announce(transfer, row)
            transfer.order_bytes = _ORDER_BYTES * (self.world_size - 1)
        return transfer

    def _announce(self, transfer: Transfer, row: tuple[int, ...]) -> None:
        """
        #### Announce it by a collective

        It comes before the data in NCCL's own order, so it meets the others' announcements,
        whatever they are about to send. The host waits for nothing, except the first time, when it
        copies the numbers to the device.
        """
        if row not in self._rows:
            self._rows[row] = torch.tensor(row, device=self.device)
        transfer.order = self._rows[row].new_empty(self.world_size, 4)
        transfer.order_works = [
            _all_gather(transfer.order.view(-1), self._rows[row], async_op=True)]

    def _gather(self, transfer: Transfer, full: torch.Tensor, mine: torch.Tensor) -> None:
        if self.world_size > 1 and not self.by_messages:
            self._collective(transfer, _all_gather, full, mine)
        else:
            self._exchange(transfer, self.rows(full), [mine] * self.world_size)

    def _exchange(self, transfer: Transfer, receive_buffer: Any, outbox: Any) -> None:
        """
        #### Send each other rank its row, and receive one from each

        The tag names the transfer, so messages of ranks that diverged never meet.
        """
        if transfer.order is None or not len(outbox[0]):
            return
        name = f"{transfer.order[self.rank].tolist()} {len(transfer.works)}".encode()
        transfer.works += self._send(receive_buffer, outbox, _ORDER_TAG + 1 + zlib.crc32(name) % (1 << 30))
        self._count(transfer, outbox[0])

    def _send(self, receive_buffer: Any, outbox: Any, tag: int) -> list[Any]:
        # Each rank starts with its right-hand neighbour, or all would queue at rank 0.
        peers = [(self.rank + k) % self.world_size for k in range(1, self.world_size)]
        works = [dist.irecv(receive_buffer[k], k, tag=tag) for k in peers]
        return works + [dist.isend(outbox[k], k, tag=tag) for k in peers]

    def _collective(self, transfer: Transfer, collective: Callable, output, data) -> None:
        transfer.works.append(collective(output, data, async_op=True))
        self._count(transfer, min(output, data, key=len))

    def _count(self, transfer: Transfer, row: torch.Tensor) -> None:
        transfer.sent_bytes += (self.world_size - 1) * row.nbytes
        transfer.messages += self.world_size - 1


class Reducer:
    """
    ## When gradients are reduced: each layer's as soon as they are there

    A reduce is in flight beside the backward of the layer below. `Zero3Optimizer` puts a reducer in
    place of this one that lets small layers wait for each other.
    """

    scaled = False  # whether gradients are those of a loss that was multiplied by a scale

    def __init__(self, comm: Communicator):
        self.comm = comm
        self.layers: list[Any] = []  # whose gradients are in flight

    def add(self, layer: Any, pairs: Pairs) -> None:
        """
        ### A layer's flat gradients are complete

        * `pairs` are as for `Communicator.reduce_scatter`
        """
        if layer not in self.layers:
            self._land()
            self.layers = [layer]
            self.comm.reduce_scatter(self.layers, pairs)

    def finish(self, layer: Any) -> None:
        """
        ### End the reduce of a layer's gradients, if there is one

        `layer._add_reduced` gets the sums.
        """
        if layer in self.layers:
            self.layers = []
            layer._add_reduced(self.comm.reduced())

    def end(self) -> None:
        """
        ### End all reduces: gradients are where they rest
        """
        self._land()
        self.comm.delivered()

    def _land(self) -> None:
        """
        #### End the reduce in flight

        Its sums may still be on their way to CPU memory.
        """
        for layer in self.layers[:1]:
            self.finish(layer)

    def drop(self, layer: Any) -> None:
        """
        ### Forget a layer's gradients, or end their reduce if it has begun
        """
        self.finish(layer)


class _Leaving(NamedTuple):
    """
    ## A reduced gradient on its way to CPU memory
    """

    total: torch.Tensor  # on the device; kept, or its memory would be used again during the copy
    there: torch.Tensor  # as long, in pinned memory
    copied: Any  # the event behind the copy
    add: Callable[[torch.Tensor], None]  # gets `there`


@functools.cache
def streams(device: torch.device) -> tuple[Any, Any]:
    """
    ## The fetch stream and the backup stream of a device

    All wires of a device share them. The allocator keeps freed memory for the stream that took it,
    so layers with streams of their own could not use each other's. Of high priority, as in FSDP2:
    the small copies before and after a collective go ahead of the large kernels that wait for it.
    """
    backend = torch.get_device_module(device)
    # torch's CPU module has a stand-in, which is on no device.
    options = {} if device.type == "cpu" else {"device": device, "priority": -1}
    return backend.Stream(**options), backend.Stream(**options)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    # gloo's collectives do not know every data type, but they know bytes.
    return tensor.reshape(-1).view(torch.uint8)

r"""
# An accelerator that is not there: find races between streams on the CPU

`Accelerator` lets the library believe that it runs on a GPU, executes everything on the CPU at
once, and notes meanwhile what a GPU would have been free to reorder.

A GPU executes what the host hands it in *lines*: within a stream in order, between streams in any
order unless one waits for the other. A program that forgets to wait is right on most days, so
running it proves little. What can be proven is the order itself, without a GPU. Each line has a
*vector clock*: how much of every other line is certainly done before its next operation.

| | the clock of |
|---|---|
| an operation begins on a line | the line counts one more of its own |
| `a.wait_stream(b)` | a takes over the larger numbers of b |
| `event.record(b)`, `a.wait_event(event)` | a takes over what b's was at the record |
| the host launches an operation on a | a takes over the host's: a launch follows its reason |
| the host waits for an event | the host takes over the event's |

**Two operations on two streams.** `fetch` copies a shard into a buffer: its clock is (fetch 1).
`compute` multiplies by the buffer: its clock is (compute 1). It knows nothing of fetch 1, so a GPU
may multiply first: a race. If compute waits for fetch before, its clock is (fetch 1, compute 1),
and the order is certain.

$$a \text{ is before } b \iff \text{clock}_b[\text{line of } a] \ge \text{time of } a$$

Two uses of the same memory, one of them a write, must be ordered; if not, that is a race. The
other way round, two operations that shall overlap must *not* be ordered. The tests demand both.

Five lines are no streams: the host, which touches CPU memory; the thread that moves blocks of
files; those that read activations; NCCL's own stream, in which collectives run one after the other;
and time itself for memory that is handed out again. As the caching allocator does it, memory that
the host frees goes to the stream from which it was taken, and the next tensor of that stream may
have it at once. So a new tensor inherits all users that freed memory of its stream ever had.

**Not covered, and what that costs**: operations inside of one kernel, and the time that anything
takes: two operations that may overlap need not. NCCL is taken to have one stream for everything,
and one thread to write all activations. Two uses of different parts of one storage count as uses of
the same memory.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

import zero3.comm.collectives
from zero3.guards.freed import METADATA, FreedParameter
from zero3.offload.activations import Forward
from zero3.offload.disk import aligned
from zero3.offload.in_file import Buffers, InFile
from zero3.offload.tiers import Offload

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
# What makes a tensor without touching its memory.
_TOUCH_NOTHING = ("detach", "empty", "alias", "new_empty", "set_", "resize_", "view", "empty_like",
                  "empty_strided", "new_empty_strided", "_unsafe_view", "_reshape_alias")
# What makes the host wait for the device, because the host needs a value.
_HOST_NEEDS = ("_local_scalar_dense", "nonzero", "equal", "_unique2", "masked_select")


class Line:
    """
    ## Operations that happen one after the other
    """

    def __init__(self, device: "Accelerator", name: str):
        self.device, self.name, self.index = device, name, len(device.lines)
        self.clock: dict[int, int] = {}
        device.lines.append(self)

    def tick(self) -> int:
        self.clock[self.index] = self.clock.get(self.index, 0) + 1
        return self.clock[self.index]

    def merge(self, clock: dict[int, int]) -> None:
        for index, time in clock.items():
            self.clock[index] = max(time, self.clock.get(index, 0))

    def saw(self, index: int, time: int) -> bool:
        return self.clock.get(index, 0) >= time

    # What `torch.cuda.Stream` has.

    def wait_stream(self, other: "Line") -> None:
        self.merge(other.clock)

    def wait_event(self, event: "Event") -> None:
        self.merge(event.clock)

    def record_event(self, event: Any = None) -> "Event":
        event = event or Event(self.device)
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.device.host_waits("stream", self.clock)


class Event:
    """
    ## The moment that a line had reached
    """

    def __init__(self, device: "Accelerator"):
        self.device: Any = device
        self.clock: dict[int, int] = {}

    def record(self, stream: Line | None = None) -> None:
        self.clock = dict((stream or self.device.current).clock)

    def wait(self, stream: Line | None = None) -> None:
        (stream or self.device.current).wait_event(self)

    def synchronize(self) -> None:
        self.device.host_waits("event", self.clock)

    def query(self) -> bool:
        return False


@dataclass
class Memory:
    """
    ## The memory of one storage, and who uses it

    Of each line the latest use is enough: within a line the others are before it.
    """

    place: torch.device
    pool: Line  # whose allocator has it back when it is freed
    nbytes: int
    ref: StorageWeakRef
    pinned: bool = False
    name: str = ""
    users: dict[int, tuple[int, str]] = field(default_factory=dict)  # of each line: time, what
    writers: dict[int, tuple[int, str]] = field(default_factory=dict)


@dataclass
class Operation:
    """
    ## An operation that has been executed, and what was certainly done before
    """

    what: str
    line: str
    index: int
    time: int
    clock: dict[int, int]
    names: frozenset[str]  # of the memory that it touched


def before(a: Operation, b: Operation) -> bool:
    """
    ## Whether a is certainly done when b begins
    """
    return b.clock.get(a.index, 0) >= a.time and a is not b


class Accelerator:
    """
    ## A device with streams, for the length of a `with`

    Tensors that are made without a `device`, or with the device "cuda", are on it. The parts of
    torch that the library asks about a device are replaced by what follows.
    """

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.host, self.compute = Line(self, "host"), Line(self, "compute")
        self.nccl, self.disk = Line(self, "nccl"), Line(self, "disk")
        self.currents = [self.compute]
        self.memory: dict[int, Memory] = {}  # by the storage's address
        # Of each line, the users of all memory that was ever freed to it.
        self.freed: dict[int, dict[int, tuple[int, str]]] = {}
        self.pages: dict[int, int] = {}  # registered by hand: address, bytes
        self.problems: list[str] = []
        self.checks = self.live_bytes = self.peak_bytes = 0
        self.waits: list[str] = []  # each time that the host waited for the device
        self.log: list[Operation] = []
        self.options: list[dict[str, Any]] = []  # that streams were made with
        self.chosen: list[tuple[str, torch.device]] = []  # by which thread

    # ---------------------------------------------------------------- what torch has for a device

    def Stream(self, device: Any = None, priority: int = 0) -> Line:
        self.options.append({"device": device, "priority": priority})
        made = Line(self, f"stream {len(self.lines)}")
        # A stream is born idle, and what the host does next may not wait for anybody.
        return made

    def Event(self, *_: Any, **__: Any) -> Event:
        return Event(self)

    @property
    def current(self) -> Line:
        return self.currents[-1]

    def current_stream(self, *_: Any) -> Line:
        return self.current

    @contextlib.contextmanager
    def stream(self, line: Line) -> Iterator[None]:
        self.currents.append(line)
        try:
            yield
        finally:
            self.currents.pop()

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    def synchronize(self, *_: Any) -> None:
        for line in self.lines:
            self.host_waits("device", line.clock)

    def set_device(self, at: torch.device) -> None:
        self.chosen.append((threading.current_thread().name, at))

    def get_rng_state(self, *_: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, *_: Any) -> None:
        torch.set_rng_state(state)

    def device(self, *_: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def manual_seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def memory_reserved(self, *_: Any) -> int:
        return 0

    memory_allocated = memory_reserved

    def mem_get_info(self, *_: Any) -> tuple[int, int]:
        return 1 << 40, 1 << 40

    def cudart(self) -> "Accelerator":
        return self

    def check_error(self, error: int) -> None:
        assert not error

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pages[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pages[address]
        return 0

    # ------------------------------------------------------------------------------------- memory

    def find(self, tensor: torch.Tensor) -> Memory:
        """
        ### The memory of a tensor that nobody made here: that of the device
        """
        storage = tensor.untyped_storage()
        if storage._cdata not in self.memory:
            self.make(storage, GPU)
        return self.memory[storage._cdata]

    def make(self, storage: Any, place: torch.device, pinned: bool = False) -> None:
        self.sweep()
        pool = self.current if place == GPU else self.host
        memory = Memory(place, pool, storage.nbytes(), StorageWeakRef(storage), pinned)
        if place == GPU:
            # Perhaps it was somebody else's a moment ago.
            memory.users = dict(self.freed.get(pool.index, {}))
            self.live_bytes += memory.nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.memory[storage._cdata] = memory

    def sweep(self) -> None:
        for key in [key for key, memory in self.memory.items() if memory.ref.expired()]:
            self.free(self.memory.pop(key))

    def free(self, memory: Memory) -> None:
        if memory.place == GPU:
            self.live_bytes -= memory.nbytes
            pool = self.freed.setdefault(memory.pool.index, {})
            for index, (time, what) in memory.users.items():
                if index not in pool or pool[index][0] < time:
                    pool[index] = (time, f"{what}, in memory that was freed then,")

    def of_host(self, real: Callable) -> Callable:
        """
        ### What looks at memory of the host's, without an operation
        """
        def look(*args: Any, **kwargs: Any) -> torch.Tensor:
            tensor = real(*args, **kwargs)
            self.make(tensor.untyped_storage(), CPU)
            return tensor

        return look

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.untyped_storage().data_ptr()
        return self.find(tensor).pinned or any(
            first <= at < first + nbytes for first, nbytes in self.pages.items())

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """
        ### What the log shall call the memory of a tensor
        """
        self.find(tensor).name = name

    # ----------------------------------------------------------------------------------- ordering

    def host_waits(self, what: str, clock: dict[int, int]) -> None:
        # A thread that waits holds up nobody else.
        if self.host is self.lines[0]:
            self.waits.append(what)
        self.host.merge(clock)

    def use(self, line: Line, time: int, tensor: torch.Tensor, write: bool, what: str) -> None:
        """
        ### A line touches memory: whoever used it before must be done
        """
        if not tensor.untyped_storage().nbytes():
            return
        memory = self.find(tensor)
        for index, (then, other) in (memory.users if write else memory.writers).items():
            self.checks += 1
            if not line.saw(index, then):
                self.problems.append(
                    f"{what} on {line.name} {'writes' if write else 'reads'} "
                    f"{memory.name or 'memory'} before {other} on {self.lines[index].name} is done")
        memory.users[line.index] = (time, what)
        if write:
            memory.writers[line.index] = (time, what)

    def operate(self, line: Line, what: str, reads: list[torch.Tensor],
                writes: list[torch.Tensor]) -> None:
        """
        ### An operation on a line
        """
        line.merge(self.host.clock)
        clock = dict(line.clock)
        time = line.tick()
        for tensor in reads:
            self.use(line, time, tensor, False, what)
        for tensor in writes:
            self.use(line, time, tensor, True, what)
        names = frozenset(self.find(t).name for t in (*reads, *writes)) - {""}
        self.log.append(Operation(what, line.name, line.index, time, clock, names))

    def collective(self, real: Callable, what: str) -> Callable:
        """
        ### A collective as NCCL runs it: on a stream of its own, after the current one
        """
        # One tensor, if the result replaces it; or the result and the data.
        def call(*tensors: torch.Tensor, group: Any, async_op: bool) -> Any:
            assert async_op
            with _disable_current_modes():
                real(*tensors, group=group)
            self.nccl.wait_stream(self.current)
            self.operate(self.nccl, what, [tensors[-1]], [tensors[0]])
            done = self.Event()
            done.record(self.nccl)
            # A work's `wait` makes the current stream wait, and not the host.
            return Work(done)

        return call

    def messages(self, real: Callable) -> Callable:
        """
        ### Messages as NCCL runs them: together, on its stream, after the current one
        """
        def call(ops: list[Any]) -> list[Work]:
            with _disable_current_modes():
                for work in real(ops):
                    work.wait()
            self.nccl.wait_stream(self.current)
            sent, received = ([op.tensor for op in ops if op.op.__name__ == name]
                              for name in ("isend", "irecv"))
            self.operate(self.nccl, "messages", sent, received)
            done = self.Event()
            done.record(self.nccl)
            return [Work(done)]

        return call

    def moves(self, real: Callable) -> Callable:
        """
        ### Blocks of a file, which threads move between the file and a buffer
        """
        def start(storage: InFile, event: str, names: Any) -> None:
            names, at = [*names], storage.buffer
            self.disk.merge(self.host.clock)
            self.operate(self.disk, f"{event} of a file", [at] if event == "write" else [],
                         [at] if event == "read" else [])  # type: ignore[list-item]
            done = self.Event()
            done.record(self.disk)
            vars(storage).setdefault("done", {})[event] = done
            real(storage, event, names)

        return start

    def threads(self, real: Callable) -> Callable:
        """
        ### Threads that move activations
        """
        def buffers_for(offload: Offload, purpose: str, *args: Any) -> Buffers:
            buffers = real(offload, purpose, *args)
            if purpose == "activations" and not isinstance(buffers.workers, Threads):
                with _disable_current_modes():
                    buffers.own.block = aligned(buffers.block_bytes)
                self.make(buffers.own.block.untyped_storage(), CPU)
                vars(buffers)["workers"] = Threads(self)
            return buffers

        return buffers_for

    def waited(self, real: Callable) -> Callable:
        """
        ### The host waits for threads
        """
        def wait(futures: Any, *args: Any, **kwargs: Any) -> Any:
            for each in futures:
                if isinstance(each, Moved):
                    self.host.merge(each.clock)
            return real(futures, *args, **kwargs)

        return wait

    def answered(self, real: Callable) -> Callable:
        """
        ### A hook that runs inside of an operation, where nobody answers for a tensor's device
        """
        def call(*args: Any) -> Any:
            with _Places(self):
                return real(*args)

        return call

    def moved(self, real: Callable) -> Callable:
        def end(storage: InFile, *events: str) -> None:
            for event in events:
                if storage.moving[event]:
                    self.host.merge(vars(storage)["done"][event].clock)
            real(storage, *events)

        return end

    # --------------------------------------------------------------------------------- in its place

    def __enter__(self) -> "Accelerator":
        self.stack = contextlib.ExitStack()
        storage, resize = torch.UntypedStorage, torch.UntypedStorage.resize_

        def resized(mine: Any, nbytes: int) -> Any:
            old = self.memory.pop(mine._cdata, None)
            place, pinned, name = (old.place, old.pinned, old.name) if old else (GPU, False, "")
            if old:
                self.free(old)
            out = resize(mine, nbytes)
            self.make(mine, place, pinned)
            self.memory[mine._cdata].name = name
            return out

        engine = torch.autograd._engine_run_backward

        def run_backward(*args: Any, **kwargs: Any) -> Any:
            # Hooks run inside, and see the device too.
            with _Places(self):
                return engine(*args, **kwargs)

        # Hooks on saved tensors run where nobody answers for a tensor's device: checkpointing must
        # not compare it.
        checks: Any = checkpoint._allowed_determinism_checks_to_fns
        self.stack.callback(checks.__setitem__, "default", checks["default"])
        checks["default"] = checks["none"]
        for name in ("frombuffer", "from_file"):
            self.replace(torch, name, self.of_host(getattr(torch, name)))
        comm: Any = zero3.comm.collectives
        self.replace(torch, "get_device_module", lambda *_: self)
        # Older versions of torch ask `torch.cuda` itself.
        self.replace(torch.cuda, "get_rng_state", self.get_rng_state)
        self.replace(torch.cuda, "set_rng_state", self.set_rng_state)
        self.replace(storage, "resize_", resized)
        self.replace(torch.autograd, "_engine_run_backward", run_backward)
        self.replace(comm, "all_gather_single",
                     self.collective(comm.all_gather_single, "all-gather"))
        self.replace(comm, "reduce_scatter_single",
                     self.collective(comm.reduce_scatter_single, "reduce-scatter"))
        self.replace(comm, "all_reduce", self.collective(comm.all_reduce, "all-reduce"))
        self.replace(comm, "all_to_all_single",
                     self.collective(comm.all_to_all_single, "all-to-all"))
        self.replace(dist, "batch_isend_irecv", self.messages(dist.batch_isend_irecv))
        self.replace(Forward, "pack", self.answered(Forward.pack))
        self.replace(Offload, "buffers_for", self.threads(Offload.buffers_for))
        self.replace(concurrent.futures, "wait", self.waited(concurrent.futures.wait))
        self.replace(InFile, "_start", self.moves(InFile._start))
        self.replace(InFile, "_end", self.moved(InFile._end))
        if hasattr(comm, "streams"):
            # Streams that an earlier device made.
            comm.streams.cache_clear()
            self.stack.callback(comm.streams.cache_clear)
            comm.announced.cache_clear()
            self.stack.callback(comm.announced.cache_clear)
        self.stack.enter_context(_Operations(self))
        self.stack.enter_context(_Places(self))
        return self

    def replace(self, owner: Any, name: str, new: Any) -> None:
        old = getattr(owner, name)
        setattr(owner, name, new)
        self.stack.callback(setattr, owner, name, old)

    def __exit__(self, *exception: Any) -> None:
        self.stack.close()


class Threads:
    """
    ## Threads that move activations between memory and files

    They run at once, in place of the host, and are on lines of their own: one that writes, and one
    for each storage that is read. So a read is after a write only if the host has waited for the
    write before it asked for the read. A file is memory, too.
    """

    def __init__(self, device: Accelerator):
        self.device = device
        self.readers: dict[int, Line] = {}

    def submit(self, move: Callable, file: Any, write: bool, box: list[torch.Tensor], at: int,
               after: Any) -> concurrent.futures.Future:
        device, host, memory = self.device, self.device.host, box[0]
        place = vars(file).setdefault("places", {}).setdefault(at, torch.zeros(1, device=CPU))
        key = memory.untyped_storage()._cdata
        if not write and key not in self.readers:
            self.readers[key] = Line(device, "reader")
        device.host = device.disk if write else self.readers[key]
        device.host.merge(host.clock)
        future = Moved()
        try:
            future.set_result(move(file, write, box, at, after))
            if write:
                device.operate(device.host, "the write of an activation", [], [place])
            else:
                device.operate(device.host, "the read of an activation", [place], [memory])
            future.clock = dict(device.host.clock)
        finally:
            device.host = host
        return future


class Moved(concurrent.futures.Future):
    """
    ## A block that a thread may still move, until somebody waits for it
    """

    clock: dict[int, int]

    def done(self) -> bool:
        return False


class Work:
    """
    ## A collective on its way
    """

    def __init__(self, done: Event):
        self.done = done

    def wait(self) -> None:
        self.done.wait()


# A shard that rests elsewhere has its gradient, or a marker for it.
GRADS = (torch.Tensor.grad.__get__, torch.Tensor.grad.__set__)


class _Places(TorchFunctionMode):
    """
    ## Who is where: tensors of the accelerator say so, and are made there
    """

    # What the call in progress asks for: a device, or pinned memory.
    place: tuple[torch.device | None, bool] = (None, False)

    def __init__(self, device: Accelerator):
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func == torch.Tensor.device.__get__:
            return self.device.find(args[0]).place
        if func is torch.device:
            return func(*args, **kwargs)
        if func == torch.Tensor.is_pinned:
            return self.device.is_pinned(args[0])
        asked = [a for a in (*args, kwargs.get("device")) if isinstance(a, torch.device)]
        pinned = kwargs.pop("pin_memory", False)
        place = (asked[0] if asked else CPU if pinned else None, pinned)
        if func == torch.Tensor.cpu:
            func, asked = torch.Tensor.to, [CPU]
            args, place = (args[0], CPU), (CPU, False)
        if func == torch.Tensor.to and asked and asked[0] != self.device.find(args[0]).place:
            # Both are the CPU in truth, and nothing would be copied.
            kwargs["copy"] = True
        args = tuple(CPU if isinstance(a, torch.device) else a for a in args)
        if "device" in kwargs:
            kwargs["device"] = CPU
        freed = [t for t in types if issubclass(t, FreedParameter)]
        if freed and func not in METADATA and func not in GRADS:
            # A unit may gather another one in there.
            with self:
                return freed[0].__torch_function__(func, types, args, kwargs)
        outer, _Places.place = _Places.place, place
        try:
            return func(*args, **kwargs)
        finally:
            _Places.place = outer


class _Operations(TorchDispatchMode):
    """
    ## What is executed where, and which memory it touches
    """

    def __init__(self, device: Accelerator):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        device, kwargs = self.device, kwargs or {}
        place, pinned = _Places.place
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        made, reads, writes = _tensors(out), [], []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if written else reads).extend(_tensors(value))
        for key, value in kwargs.items():
            (writes if key == "out" else reads).extend(_tensors(value))
        given = [device.find(t).place for t in (*writes, *reads)]
        wide = {device.find(t).place for t in (*writes, *reads) if t.numel() > 1}
        for tensor in made:
            storage = tensor.untyped_storage()
            if storage._cdata not in device.memory or (
                    device.memory[storage._cdata].ref.expired()):
                device.make(storage, place or (given[0] if given else GPU), pinned)
        if func.is_view or name in _TOUCH_NOTHING or "prim" in func.namespace:
            return out
        if func.namespace == "c10d":
            # One that is waited for at once.
            device.nccl.wait_stream(device.current)
            device.operate(device.nccl, name, reads, writes)
            device.current.wait_stream(device.nccl)
            return out
        places = {*given, *(device.find(t).place for t in made)}
        line = device.current if GPU in places else device.host
        copies = name in ("copy_", "_to_copy")
        if len(wide) > 1 and not copies:
            device.problems.append(f"{name} mixes tensors of the device and of the CPU")
        device.operate(line, name, reads, [*writes, *made])
        if copies and len(places) > 1:
            alone = name == "copy_" and (kwargs.get("non_blocking") or args[2:3] == (True,))
            hosts = [t for t in (*reads, *writes, *made) if device.find(t).place == CPU]
            if not alone or not all(device.is_pinned(t) for t in hosts):
                device.host_waits("copy", line.clock)
        elif line is not device.host and name in _HOST_NEEDS:
            device.host_waits(name, line.clock)
        return out


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []

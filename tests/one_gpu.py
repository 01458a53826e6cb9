"""
# A process group like NCCL's, for several ranks on one GPU

NCCL refuses two ranks on one GPU. Here a thread of each rank copies what a collective sends to CPU
memory, sends it by gloo, and copies the answer back on a stream of its own, often late. As with
NCCL, a wait stops the current stream, and tensors have to be contiguous, on the GPU, and of a data
type that NCCL knows. Without a GPU the same lines run on the CPU.
"""

import queue
import random
import threading
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

LATE = random.Random(0)
UNKNOWN = {torch.int16, torch.uint16, torch.uint32, torch.complex64, torch.complex128}


def join(store):
    """
    ## Join all ranks, in place of the group that they are in

    * `store` is the name of a file that does not exist yet
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    with mock.patch.object(distributed_c10d, "ProcessGroupNCCL", OneGpu, create=True):
        if not torch.cuda.is_available():
            dist.Backend.register_backend("one", OneGpu, devices=["cpu"])
        dist.init_process_group("nccl" if torch.cuda.is_available() else "one",
                                init_method=f"file://{store}", rank=rank, world_size=size)
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


class Work(dist.Work):
    """What has begun"""

    def __init__(self, tensors):
        super().__init__()
        self.tensors, self.ended, self.error, self.event = tensors, threading.Event(), None, None

    def wait(self, timeout=timedelta(seconds=60)):
        assert self.ended.wait(60), "no answer"
        if self.error:
            raise self.error
        if self.event:
            torch.cuda.current_stream().wait_event(self.event)
        return True

    def is_completed(self):
        return self.ended.is_set() and (self.event is None or self.event.query())


class Line:
    """A thread, and a stream, on which one thing runs after the other"""

    def __init__(self, device):
        self.waiting, self.device = queue.SimpleQueue(), device
        threading.Thread(target=self.run, daemon=True).start()

    def begin(self, does, *tensors):
        assert all(t.is_contiguous() and t.device.type == self.device for t in tensors)
        assert UNKNOWN.isdisjoint(t.dtype for t in tensors)
        work, event = Work(tensors), None
        if self.device == "cuda":
            event = torch.cuda.Event()
            event.record()
        self.waiting.put((work, event, does))
        return work

    def run(self):
        stream = torch.cuda.Stream() if self.device == "cuda" else None
        while True:
            work, event, does = self.waiting.get()
            try:
                # Nobody counts what a collective writes.
                with torch.inference_mode(), torch.cuda.stream(stream):
                    if event:
                        stream.wait_event(event)
                    does()
                    if event:
                        work.event = torch.cuda.Event()
                        work.event.record()
            except Exception as error:
                work.error = error
            work.ended.set()
            del work, event, does


class OneGpu(dist.ProcessGroup):
    """The collectives that chains use, and torch's object collectives"""

    Options = getattr(getattr(distributed_c10d, "ProcessGroupNCCL", None), "Options", None)
    supports_splitting = supports_coalescing = False
    group_name = property(lambda self: distributed_c10d._world.pg_names.get(self, ""))
    group_desc = property(lambda self: "")
    _device_types = property(lambda self: [torch.device(self.device)])

    def __init__(self, store, rank, size, options=None):
        super().__init__(rank, size)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size,
                                          timedelta(seconds=60))
        self.line = Line(self.device)

    def _get_backend(self, device):
        return self

    def _set_default_timeout(self, timeout):
        pass

    def _set_sequence_number_for_group(self):
        pass

    def shutdown(self):
        pass

    def rows(self, mine):
        """The same of each rank, on the CPU"""
        sent = mine.detach().to("cpu", copy=True)
        found = [torch.empty(sent.nbytes, dtype=torch.uint8) for _ in range(self.size())]
        self.gloo.allgather([found], [sent.view(-1).view(torch.uint8)]).wait()
        return [row.view(sent.dtype).view(sent.shape) for row in found]

    def put(self, out, value):
        if self.device == "cuda" and LATE.random() < 0.5:
            # Cycles of a clock of one to two GHz.
            torch.cuda._sleep(LATE.randrange(2_000_000))
        out.copy_(value.view(out.shape))

    def allgather(self, outs, mine, opts=None):
        return self.line.begin(lambda: [*map(self.put, outs[0], self.rows(mine[0]))],
                               *outs[0], *mine)

    def _allgather_base(self, out, mine, opts=None):
        assert out.numel() == self.size() * mine.numel()
        return self.line.begin(lambda: self.put(out, torch.cat(
            [row.view(-1) for row in self.rows(mine)])), out, mine)

    def _reduce_scatter_base(self, out, whole, opts):
        assert whole.numel() == self.size() * out.numel() and opts.reduceOp == dist.ReduceOp.SUM
        return self.line.begin(lambda: self.put(out, sum(
            row.view(self.size(), -1)[self.rank()] for row in self.rows(whole))), out, whole)

    # torch 2.13 calls these two by new names.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def allreduce(self, tensors, opts):
        how = torch.amax if opts.reduceOp == dist.ReduceOp.MAX else torch.sum
        return self.line.begin(lambda: self.put(
            tensors[0], how(torch.stack(self.rows(tensors[0])), 0)), *tensors)

    def broadcast(self, tensors, opts):
        return self.line.begin(lambda: self.put(
            tensors[0], self.rows(tensors[0])[opts.rootRank]), *tensors)

    def scatter(self, outs, parts, opts):
        def go():
            # The others have as much to give: nothing.
            whole = torch.cat([part.view(-1) for part in parts[0]]) if parts else torch.zeros(
                self.size() * outs[0].numel(), dtype=outs[0].dtype, device=outs[0].device)
            self.put(outs[0], self.rows(whole)[opts.rootRank].view(self.size(), -1)[self.rank()])
        return self.line.begin(go, *outs)

    def barrier(self, opts=None):
        return self.line.begin(lambda: self.gloo.barrier().wait())

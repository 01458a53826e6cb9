from typing import Any

import torch
from torch import nn
from zero3.compiler.graph import linked
from zero3.compiler import passes
from zero3.compiler.trace import Backend
from zero3.optimizer.buckets import Bucket
from zero3.whole_model.units import Unit
from zero3.whole_model.wrap import Zero3Model


class CompiledUnit(Unit):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        for slot in self.slots():
            slot.freed_class.traceable = True

    def forward(self, *args, **kwargs):
        if torch.compiler.is_compiling():
            return self.module(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def gather(self, others):
        for each in (self, *others):
            each.fetch_params()

    def wait(self):
        self.fetch_params()
        self._wait_params()
        return [slot.view for slot in self.slots()]

    def release(self):
        self.reshard()

    def collect(self, place, grad):
        for flat in self.flats:
            if place < len(flat.slots):
                break
            place -= len(flat.slots)
        self._settle_at_end_of_backward()
        if flat.grad is None:
            flat.begin_grad(self._empty(len(flat.full), flat.shard.grad_dtype))
        flat.collect(flat.slots[place], grad, 1 / self.comm.divisor)

    def reduce_together(self, others):
        for each in (self, *others):
            each._backup_grads()
        self.reducer.send()

    def finish(self):
        self.reducer.finish(self)


class Planned(Bucket):
    def __init__(self, comm):
        super().__init__(comm, 1 << 62)

    def send(self):
        if self.waiting and not self.holds:
            self._send_waiting()


class CompiledModel(Zero3Model):
    unit_class = CompiledUnit
    backend = "aot_eager"
    limit_numel = 0
    bucket_numel = 0
    run: Any = None
    history: Any = None

    def _number_units(self):
        super()._number_units()
        reducer = Planned(self.comm)
        for unit in self.units:
            unit.reducer = reducer

    def prepare(self, backend, limit_numel, bucket_bytes):
        self.layers = {unit.path or "root": unit for unit in self.units}
        self.numel = {name: unit.numel for name, unit in self.layers.items()}
        self.history = []
        self.bucket_numel = bucket_bytes // 4
        self.limit_numel = limit_numel or self.numel["root"] + 2*max(self.bucket_numel, *[u.numel for u in self.units[1:]])
        places = {id(slot.param): (name, i) for name, unit in self.layers.items() for i, slot in enumerate(unit.slots())}
        self.run = torch.compile(self.module.__call__, backend=Backend(places, self.lower, self.build))

    def lower(self, traced, first, second):
        log = [("traced", first, second)]
        first = passes.insert(first)
        kept = []
        if second is not None:
            second = passes.insert(second)
            log.append(("insert", first, second))
            first, second, kept = passes.keep(first, second, self.numel, self.limit_numel)
            log.append(("keep", first, second))
            second = passes.prefetch(second, self.numel, self.limit_numel, kept)
            second = passes.bucket(second, self.numel, self.bucket_numel, self.limit_numel, kept)
            second = passes.sink(second)
        first = passes.prefetch(first, self.numel, self.limit_numel)
        first = passes.bucket(first, self.numel, self.bucket_numel, self.limit_numel)
        log.append(("all", first, second))
        self.history.append((log, kept))
        return first, second

    def build(self, graph):
        run = linked(graph, self.layers)
        def call(args):
            return run(args)
        call._boxed_call = True
        return call

    def forward(self, *args, **kwargs):
        for unit in self.units:
            unit._prepare(False)
        return self.run(*args, **kwargs)

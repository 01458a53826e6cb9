"""
# Every tier trains alike (I8), in the bytes that the formulas say, and a disk's faults are errors
"""

import contextlib
import copy
import ctypes
import gc
import math
import os
import resource
import stat
import subprocess
import sys
import textwrap
import time
import traceback
import weakref
from collections import Counter
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bench.disk import _disk_bytes, cool, measure
from tests.cases import CASES, WIDTH, freeze, train_both
from tests.commands import python_m
from tests.ranks import run
from tests.test_bytes import models
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.estimate.formulas import (
    LayerSpec,
    Part,
    advise,
    efficiency,
    number,
    places,
)
from zero3.estimate.ledger import Ledger, disk_bytes, held_bytes
from zero3.estimate.predict import predict, predict_optimizer
from zero3.guards.room import room
from zero3.offload.disk import File, aligned, whole_blocks
from zero3.offload.in_file import InFile
from zero3.train import launch

BF16, FP32 = torch.bfloat16, torch.float32
# The kernel's numbers for namespaces of mounts and of users.
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000


def tiers(folder):
    """Pairs of what the layers and the optimizer get; one object for both, where it is the same."""
    nvme, both = {"tier": "nvme", "folder": folder}, Offload("nvme", folder, block_bytes=8192)
    return {
        "parameters in CPU memory": (Offload("cpu"), Offload()),
        "all in CPU memory": (Offload("cpu"), Offload("cpu")),
        "parameters in files": (Offload(**nvme), Offload()),
        "parameters in files, states in CPU memory": (Offload(**nvme), Offload("cpu")),
        "states in files": (Offload(), Offload(**nvme)),
        "all in files": (Offload(**nvme), Offload(**nvme, buffers=3)),
        "all in files, one object": (both, both),
        "all in cached files": (Offload(**nvme, direct=False), Offload(**nvme, direct=False)),
    }


def chain(dtype=FP32):
    """Six layers with parameters, of unequal sizes above and below a block of the disk."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, 71), nn.Tanh(), nn.Sequential(nn.Linear(71, 50), nn.LayerNorm(50)),
              nn.Sequential(nn.Linear(50, 33), freeze(nn.Linear(33, 33))), nn.Linear(33, 90),
              nn.Linear(90, 3, bias=False), nn.Linear(3, 3)]
    return [layer.to(dtype) for layer in layers]


def build(layers, params_in, states_in, **options):
    model = Zero3Sequential([Zero3Layer(layer, offload=params_in) for layer in layers])
    options = {"lr": 1e-2, "eps": 1e-3} | options
    return model, Zero3Optimizer(model, offload=states_in, **options)


def step(model, optimizer, number, dtype=FP32, micro_batches=1):
    losses = []
    for i in range(micro_batches):
        seed = (number * 10 + i) * 10 + optimizer.comm.rank
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)
        loss = model(x).float().square().mean() / micro_batches
        optimizer.backward(loss)
        losses.append(loss.item())
    losses.append(optimizer.step())
    optimizer.zero_grad()
    return losses


def everything(model, optimizer):
    with model.full_params() as params:
        found = [p.detach().clone() for p in params.values()]
    states = optimizer.state_dict()
    moments = [value for state in states["state"].values() for value in state.values()]
    return [t.clone() for t in (*found, *states["masters"], *moments)]


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


# -------------------------------------------------------------------------------------- same bits


def some_steps(folder, dtype, micro_batches):
    options = {"clip_grad_norm": 0.05, "bucket_bytes": 5000,
               "group_by": lambda name, p: {"weight_decay": 0.1 * (p.ndim > 1)}}
    found = {}
    for name, (params_in, states_in) in {"device": (None, None), **tiers(folder)}.items():
        model, optimizer = build(chain(dtype), params_in, states_in, **options)
        losses = [step(model, optimizer, i, dtype, micro_batches) for i in range(4)]
        found[name] = (losses, everything(model, optimizer))
    (losses, expected) = found.pop("device")
    assert losses[0][-1] != losses[1][-1]
    return {name: got[0] == losses and equal(got[1], expected) for name, got in found.items()}


@pytest.mark.parametrize("world_size, dtype, micro_batches",
                         [(1, FP32, 1), (2, FP32, 1), (3, FP32, 1), (2, BF16, 2)])
def test_every_tier_trains_to_the_same_bits(world_size, dtype, micro_batches, tmp_path):
    """
    I8: four steps give the same losses, norms, weights, masters and moments, bit for bit. Breaks
    where a buffer is read before its file is written, or given away before it is copied from.
    Proves I8, `Offload`, `Storage`, `Storage.release`, `ShardStates.add_grad`.
    """
    for rank in run(some_steps, world_size, str(tmp_path), dtype, micro_batches):
        assert rank == dict.fromkeys(tiers("anywhere"), True)


def all_cases(folder):
    def optimizer(model, **options):
        return Zero3Optimizer(model, offload=Offload("nvme", folder), **options)

    # On three ranks every second one, and the one with parameters in fp32.
    names = CASES if dist.get_world_size() == 1 else {*[*CASES][::2], "DataTypes"}
    return {name: train_both(name, 2, None, optimizer, Offload("nvme", folder))
            for name in sorted(names)}


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_model_trains_from_files_as_in_plain_pytorch(world_size, tmp_path):
    """
    All of `tests/cases.py`: layers called twice, out of order, frozen, unused, recomputed, nested.
    Breaks where what was read ahead is taken for what was asked for.
    Proves I1, I8, `InFile.load`, `InFile.read_async`, `Zero3Layer._backward_event`, `own_modules`,
    `Offload.place`, `Portion.nbytes`.
    """
    for rank in run(all_cases, world_size, str(tmp_path)):
        # One has parameters in fp32.
        assert rank.pop("DataTypes") < 1e-6
        assert {name: off for name, off in rank.items() if off > 1e-10} == {}


def other_optimizers(folder):
    results = []
    for cls, options in ((torch.optim.SGD, {}), (torch.optim.SGD, {"momentum": 0.9}),
                         (torch.optim.Adagrad, {"initial_accumulator_value": 0.5}),
                         (torch.optim.AdamW, {"amsgrad": True}),
                         (torch.optim.RMSprop, {"centered": True})):
        found = []
        for states_in in (None, Offload("nvme", folder)):
            model = Zero3Sequential([Zero3Layer(layer) for layer in chain()])
            optimizer = Zero3Optimizer(model, cls, lr=0.01, offload=states_in, **options)
            for i in range(4):
                step(model, optimizer, i)
            # A step with a gradient of zero moves by momentum and decay.
            optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()
            found.append(everything(model, optimizer))
            # Another optimizer takes over, and this one's files are no longer used.
            second = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
            second.backward(model(torch.ones(2, WIDTH)).square().mean())
            second.step()
            found[-1] += everything(model, second)
        results.append(equal(*found))
    return results


def test_optimizers_with_other_moments_and_with_none_rest_in_files_too(tmp_path):
    """
    What an optimizer keeps is found out, and not assumed; Adagrad makes it before the first step.
    Proves I8, `moments_of`, `Portion._moments`, `ShardStates.drop_grad`.
    """
    assert run(other_optimizers, 2, str(tmp_path)) == [[True] * 5] * 2


def written_and_loaded(folder):
    results = []
    for dtype in (FP32, BF16):
        found = {}
        for name in ("device", "all in files", "states in files", "parameters in files"):
            params_in, states_in = tiers(folder).get(name, (None, None))
            model, optimizer = build(chain(dtype), params_in, states_in)
            step(model, optimizer, 0, dtype)
            with model.full_params(writeback=True) as params, torch.no_grad():
                for p in params.values():
                    # Frozen ones are in no optimizer's state.
                    p.mul_(0.5 if p.requires_grad else 1.0)
            # To look at states that are out of date does not bring them up to date in their file.
            optimizer.state_dict()
            step(model, optimizer, 1, dtype)
            found[name] = everything(model, optimizer)
            saved = copy.deepcopy(optimizer.state_dict())
            again, other = build(chain(dtype), *tiers(folder)["all in files"])
            other.load_state_dict(saved)
            step(again, other, 2, dtype)
            step(model, optimizer, 2, dtype)
            found[name] += everything(model, optimizer)
            results.append(equal(everything(again, other), everything(model, optimizer)))
        results += [equal(found["device"], got) for got in found.values()]
    return results


def test_states_in_files_leave_pieces_without_elements(tmp_path):
    """
    And what an optimizer has made when it was built is in the file, as Adagrad's sums are. Breaks
    if nothing is written then: the pieces would say that each element is there, and the sums begin
    at zero.
    Proves `Zero3Optimizer._make_inner`.
    """
    model = Zero3Sequential([Zero3Layer(nn.Linear(3, 3))])
    optimizer = Zero3Optimizer(model, torch.optim.Adagrad, initial_accumulator_value=0.25,
                               offload=Offload("nvme", tmp_path))
    pieces = [p for group in optimizer.param_groups for p in group["params"]]
    assert [p.numel() for p in pieces] == [0] and "sum" in optimizer.state[pieces[0]]
    (states,) = optimizer.shard_states
    with states.in_memory(optimizer.state, write=False):
        assert optimizer.state[pieces[0]]["sum"].tolist() == [0.25] * 12


def test_weights_written_and_states_loaded_arrive_in_every_tier(tmp_path):
    """
    `full_params(writeback=True)` and `load_state_dict` between tiers. Breaks where a buffer still
    has what its file had before.
    Proves I8, `InFile.save`, `InFile.blank`, `InFile.replace`, `ShardStates.in_memory`.
    """
    assert all(map(all, run(written_and_loaded, 2, str(tmp_path))))


def skipped(folder):
    model, optimizer = build(chain(), Offload("nvme", folder), Offload("nvme", folder),
                             loss_scale=4.0)
    step(model, optimizer, 0)
    before = everything(model, optimizer)
    x = torch.full((2, WIDTH), math.inf if dist.get_rank() == 1 else 1.0)
    optimizer.backward(model(x).square().mean())
    norm = optimizer.step()
    optimizer.zero_grad()
    same = equal(before, everything(model, optimizer))
    return norm, same, all(map(math.isfinite, step(model, optimizer, 1)))


def test_an_overflow_leaves_files_as_they_were(tmp_path):
    """
    A skipped step changes nothing, and the next one is a good one.
    Proves `Zero3Optimizer.step`, `Zero3Optimizer._overflow`.
    """
    assert run(skipped, 2, str(tmp_path)) == [(None, True, True)] * 2


def raises_in_step(folder):
    class Breaks(torch.optim.AdamW):
        broken = False

        def step(self, closure=None):
            super().step(closure)
            if Breaks.broken:
                raise ArithmeticError("in the middle of a step")

    model, optimizer = build(chain(), Offload("nvme", folder), Offload("nvme", folder),
                             optimizer_class=Breaks)
    step(model, optimizer, 0)
    before = everything(model, optimizer)
    Breaks.broken = True
    with pytest.raises(ArithmeticError):
        step(model, optimizer, 1)
    Breaks.broken = False
    optimizer.zero_grad()
    after = everything(model, optimizer)
    counts = [t.numel() == 1 for t in before]
    return all(torch.equal(a, b) for a, b, count in zip(before, after, counts, strict=True)
               if not count)


def test_an_exception_in_a_step_leaves_the_file_as_it_was(tmp_path):
    """
    What was stepped in the buffer is dropped with it; nothing half done is written.
    Proves `ShardStates.in_memory`, `InFile.release`.
    """
    assert run(raises_in_step, 1, str(tmp_path)) == [True]


# ------------------------------------------------------------------------------------------ bytes


def gathers_of(model, micro_batches=1):
    """How often each layer is gathered in a step"""
    layers = [layer for layer in model.module_list if layer.flats]
    first = next(i for i, layer in enumerate(layers)
                 if any(g.shard.requires_grad for g in layer.flats))
    return Counter(micro_batches * [*layers, *layers[first:-1]])


def moved(model, optimizer, gathers, micro_batches=1):
    """
    The formulas in the head of `predict.py`: bytes of parameters that a step reads; for each shard
    with states in a file, bytes of master and moments, and of the gradient; bytes that are written
    """
    in_files = {id(g.shard): whole_blocks(g.shard.numel() * g.shard.element_size())
                for layer in model.module_list for g in layer.flats if hasattr(g.storage, "file")}
    read = sum(n * in_files.get(id(g.shard), 0) for layer, n in gathers.items()
               for g in layer.flats)
    states, written = [], 0
    for each in optimizer.shard_states:
        of_param = in_files.get(id(each.shard), 0)
        is_master = each.shard.element_size() == 4 and (each.in_file or not of_param)
        written += 0 if is_master else of_param
        if each.in_file:
            kept = 2 if is_master and not of_param else 3
            numel = each.shard.numel()
            states.append((kept * whole_blocks(4 * numel),
                           whole_blocks(each.shard.grad_dtype.itemsize * numel)))
            written += states[-1][0] + micro_batches * states[-1][1]
    return read, states, written


def predictions(folder, chains):
    wrong = []
    settings = ((FP32, 1, {}), (BF16, 2, {}), (BF16, 1, {"reduce_dtype": FP32, "bucket_bytes": 0}))
    for i, (name, (dtype, micro_batches, options)) in enumerate(product(chains, settings)):
        # Each tier with each setting, on one of the two chains.
        for tier, (params_in, states_in) in [*tiers(folder).items()][i % 2 :: 2]:
            layers = [layer.to(dtype) for layer in models()[name]]
            model, optimizer = build(layers, params_in, states_in, **options)
            # The second one has the moments that the first one made.
            for measured in (False, True):
                with Ledger(model, optimizer) if measured else contextlib.nullcontext() as tape:
                    for _ in range(micro_batches):
                        x = torch.randn(4, 7).to(dtype)
                        optimizer.backward(model(x).float().square().mean())
                    optimizer.step()
                    optimizer.zero_grad()
            expected = predict_optimizer(optimizer, micro_batches)
            pool_bytes = {m.data_ptr(): m.untyped_storage().nbytes()
                          for offload in (params_in, states_in) for m in offload.memory()}
            gathers = gathers_of(model, micro_batches)
            got = {
                "rest": held_bytes(model, optimizer), "peak": tape.peak_live_bytes,
                "sent": tape.sent_bytes, "messages": tape.messages,
                "disk": disk_bytes(model, optimizer), "pool": sum(pool_bytes.values()),
            }
            want = dict(zip(got, (
                expected.rest_bytes, expected.peak_bytes, expected.sent_bytes, expected.messages,
                expected.disk_bytes, expected.pool_bytes), strict=True))
            of_params, states, written = moved(model, optimizer, gathers, micro_batches)
            got |= {"read": tape.read_bytes, "written": tape.written_bytes}
            # States that fit into the buffers are not read; three buffers are too few for five.
            want |= {"read": of_params, "written": written}
            if states_in.buffers < len(states):
                assert of_params < got["read"] <= of_params + micro_batches * sum(map(sum, states))
                del got["read"], want["read"]
            if got != want:
                wrong.append((name, dtype, micro_batches, tier, options, got, want))
    return wrong


@pytest.mark.parametrize("world_size", [1, 2])
def test_files_buffers_and_what_is_read_and_written_are_predicted_to_the_byte(world_size, tmp_path):
    """
    Also memory at rest and at the peak, and traffic. Breaks where `predict.py` and `tiers.py`
    drift apart, by one block.
    Proves I2, I3, I4, `_Shard.place_states`, `_pool_bytes`, `_Shard`, `Ledger.bytes_of`,
    `InFile.share`, `Storage.read_async`.
    """
    for rank in run(predictions, world_size, str(tmp_path), ["frozen", "unequal"]):
        assert rank == []


def read_by_many(folder, depth):
    """What a step of a deep chain reads and writes, measured and by the formulas"""
    offload = Offload("nvme", folder)
    layers = [nn.Linear(WIDTH, WIDTH).to(BF16) for _ in range(depth)]
    model, optimizer = build(layers, offload, offload)
    for i in range(2):
        with Ledger(model, optimizer) as tape:
            step(model, optimizer, i, BF16)
    read, states, written = moved(model, optimizer, gathers_of(model))
    kept, grads = zip(*states, strict=True)
    return ((tape.read_bytes, tape.written_bytes),
            (read + sum(kept) + sum(grads[offload.buffers:]), written))


@pytest.mark.parametrize("depth", [10, 13])
def test_a_deep_chain_reads_its_states_once_and_most_gradients(depth, tmp_path):
    """
    With twice as many layers as buffers, or more. The gradients of the first layers arrive last, so
    they are still in the buffers. Breaks where a state is read again that is in a buffer.
    Proves `InFile.read_async`, `Buffers.borrow`.
    """
    for measured, expected in run(read_by_many, 2, str(tmp_path), depth):
        assert measured == expected


def test_files_take_their_space_at_once_and_belong_to_their_owner_alone(tmp_path):
    """
    A disk that is too small says so before training. Breaks where a file is made without space, is
    readable by others, or has a name that outlives its run.
    Proves `File.__init__`, `whole_blocks`, `disk.aligned`, `Offload.memory`.
    """
    offload = Offload("nvme", tmp_path)
    layer = Zero3Layer(nn.Linear(100, 100), offload=offload)
    (group,) = layer.flats
    found = os.fstat(group.storage.file.fd)
    assert found.st_size == 40960 and found.st_blocks * 512 >= 40960  # 10,100 fp32, whole blocks
    assert stat.S_IMODE(found.st_mode) == 0o600 and found.st_nlink == 0
    assert list(tmp_path.iterdir()) == []
    assert [m.untyped_storage().nbytes() for m in offload.memory()] == 2 * [40960 + 4096]
    assert held_bytes(layer) == 2 * (40960 + 4096)


def test_buffers_grow_while_a_model_is_built_and_not_while_it_trains(tmp_path):
    """
    A growth is an event on the tape. Breaks where a shard gets a buffer of its own.
    Proves `Buffers`, `Buffers.__init__`, `InFile.record`, `Buffers.borrow`, `Buffers._grow`,
    `Offload.buffers_for`.
    """
    offload = Offload("nvme", tmp_path)
    model, optimizer = build(chain(), offload, offload)
    step(model, optimizer, 0)
    memory = [m.data_ptr() for m in offload.memory()]
    with Ledger(model, optimizer) as tape:
        step(model, optimizer, 1)
    assert "buffers" not in {e.event for e in tape.events}
    assert [m.data_ptr() for m in offload.memory()] == memory
    Zero3Layer(nn.Linear(100, 100), offload=offload)
    assert [m.data_ptr() for m in offload.memory()] != memory
    offload.in_use["params"].number += 1
    with Ledger(model, optimizer) as tape:
        step(model, optimizer, 2)
    assert [e.bytes for e in tape.events if e.event == "buffers"] == [3 * (40960 + 4096)]


# ------------------------------------------------------------------------------------------ order


def tape_of_a_step(folder):
    offload = Offload("nvme", folder)
    layers = [nn.Linear(WIDTH, 40), *(nn.Linear(40, 40) for _ in range(11)), nn.Linear(40, 2)]
    model, optimizer = build(layers, offload, offload)
    for i in range(2):
        with Ledger(model, optimizer) as tape:
            step(model, optimizer, i)
    return [(e.phase, e.layer, e.event, e.tier) for e in tape.events]


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_next_shard_is_read_before_this_layer_has_computed(world_size, tmp_path):
    """
    read(i+1) is issued before compute(i) ends, forward and backward. Breaks where a layer's read
    starts when the layer is called.
    Proves `Zero3Layer.fetch_params`, `InFile.read_async`, `Sharded.read_async`, `InFile._borrow`,
    `InFile._start`, `Buffers.start`, `Buffers.move`.
    """
    for events in run(tape_of_a_step, world_size, str(tmp_path)):
        for phase, pairs in (("forward", [(i, i + 1) for i in range(12)]),
                             ("backward", [(i, i - 1) for i in range(11, 0, -1)])):
            for this, after in pairs:
                read = at(events, phase, after, "read")
                done = at(events, phase, this, "computed" if phase == "forward" else "free")
                assert read < done, (phase, this, after)
        # Two layers ahead of the one that computes, because the next one is on its way already.
        assert at(events, "forward", 5, "read") < at(events, "forward", 3, "computed")
        # Where forward turns round, the first layer of backward is read before the last computes.
        again = [i for i, e in enumerate(events) if e[1:3] == ("layer 11 (Linear)", "read")][1]
        assert again < at(events, "forward", 12, "computed")


def at(events, phase, layer, event):
    return next(i for i, e in enumerate(events)
                if e[:3] == (phase, f"layer {layer} (Linear)", event))


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_reads_the_next_shard_and_does_not_wait_for_the_last_ones_write(world_size,
                                                                              tmp_path):
    """
    read(i+1) is issued before step(i), and write(i-1) is not waited for before step(i) starts; what
    the step begins with was read in backward. Breaks where the pipeline takes one after the other.
    Proves `Zero3Optimizer._step`, `ShardStates.add_grad`,
    `InFile.write_async`.
    """
    for events in run(tape_of_a_step, world_size, str(tmp_path)):
        for i in range(12):
            stepped = at(events, "step", i, "step")
            if i + 1 > 3:
                # Those before have been read in backward.
                assert at(events, "step", i + 1, "read") < stepped
            if i > 0:
                write = at(events, "step", i - 1, "write")
                written = [k for k, e in enumerate(events) if k > write
                           and e[1:3] == (f"layer {i - 1} (Linear)", "written")]
                assert write < stepped and (not written or written[0] > stepped), i
        for i in range(4):
            # Its parameters to compute with, and its states, before its own gradient is there.
            reads = [k for k, e in enumerate(events)
                     if e[:3] == ("backward", f"layer {i} (Linear)", "read")]
            assert len(reads) == 2 and reads[1] < at(events, "backward", i, "write")
            assert ("step", f"layer {i} (Linear)", "read", "nvme") not in events
        assert {e[3] for e in events if e[2] in ("read", "write")} == {"nvme"}


# ----------------------------------------------------------------------------------- memory limit


LIMITED = """
    import gc, resource, sys, threading
    import torch
    import torch._dynamo  # which optimizers import in their first step
    from torch import nn
    from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential
    from zero3.estimate.predict import predict_optimizer

    torch.set_num_threads(1)
    # Threads get stacks of 8 MiB otherwise, which count, used or not. How many threads there are
    # depends on how quickly each comes to its turn.
    threading.stack_size(1 << 20)
    WIDTH = 700

    def kib(name):
        return int(open("/proc/self/status").read().split(name + ":")[1].split()[0]) * 1024

    def train(offload, steps):
        layers = [Zero3Layer(nn.Linear(WIDTH, WIDTH), offload=offload) for _ in range(depth)]
        model = Zero3Sequential(layers)
        optimizer = Zero3Optimizer(model, lr=1e-3, offload=offload)
        for _ in range(steps):
            optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return optimizer

    # Room for whole layers, buffers and the stacks of threads.
    limit = kib("VmData") + (104 << 20)
    depth = -(-3 * limit // (12 * (WIDTH * WIDTH + WIDTH)))
    states = 12 * depth * (WIDTH * WIDTH + WIDTH)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before = kib("RssAnon")
    optimizer = train(Offload("nvme", sys.argv[1]), 2)
    print(states, limit, kib("VmHWM") - kib("RssFile") - before,
          predict_optimizer(optimizer).peak_bytes)
    # Its buffers go with it.
    del optimizer
    gc.collect()
    for tier in ("device", "cpu"):
        try:
            train(Offload(tier), 2)
        except RuntimeError as error:
            print(error)
"""


@pytest.fixture(scope="module")
def limited(tmp_path_factory):
    """
    What a process with little memory says: its figures with all in files, and then its errors
    """
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path_factory.mktemp("disk"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1",
                               # Freed layers go back to the system, and are not cut into pieces.
                               "MALLOC_MMAP_THRESHOLD_": "131072"})
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_model_of_three_times_the_memory_limit_trains_from_files(limited):
    """
    Parameters, masters and moments of at least three times what the system allows the process
    (RLIMIT_DATA). Resident memory grows by the stated buffers and whole layers, and no more than
    the interpreter's and torch's own needs beside them. Breaks where a shard, a gradient or a
    moment stays in memory.
    Proves `Offload.shard`, `ShardStates.place`, `InFile`, `FreedParameter.of_shard`.
    """
    states_bytes, limit_bytes, grown_bytes, peak_bytes = map(int, limited[0].split())
    assert states_bytes >= 3 * limit_bytes
    assert grown_bytes < peak_bytes + (48 << 20)
    assert 2 * peak_bytes < limit_bytes


def test_without_offload_the_same_model_fails_and_says_which_tier_would_do(limited):
    """
    On the device and in CPU memory: an error by name, with the bytes that are needed and left,
    before memory runs out.
    Proves `Offload.check`, `room`, `check_step`, `check_room`.
    """
    errors = limited[1:]
    assert len(errors) == 2
    for error in errors:
        assert "has no room for a step" in error and "bytes left" in error
        assert '`offload=Offload("nvme", folder=...)`' in error


def test_masters_and_moments_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    """
    The optimizer says what it needs of all its shards together.
    Proves `Zero3Optimizer._place_states`, `Offload.check`, `check_room`, `Offload.cure`.
    """
    model = Zero3Sequential([Zero3Layer(nn.Linear(300, 300)) for _ in range(3)])
    # Two moments and a gradient; an fp32 shard is its own master.
    need = 12 * 3 * (300 * 300 + 300)
    monkeypatch.setattr("zero3.guards.room.room", lambda at: need - 1)
    with pytest.raises(RuntimeError) as caught:
        Zero3Optimizer(model)
    assert f"masters, moments and gradients. Expected: {need:,} bytes" in str(caught.value)
    assert '`offload=Offload("nvme", folder=...)`' in str(caught.value)


def rooms(limit):
    """What there is, what a limit of 16 GiB leaves, and what 256 MiB take of that."""
    cpu = torch.device("cpu")
    most = room(cpu)
    resource.setrlimit(limit, (1 << 34, 1 << 34))
    less = room(cpu)
    taken = torch.ones(1 << 26)
    return most, less, less - room(cpu), len(taken)


def test_room_is_the_least_of_what_limits_leave():
    """
    What `ulimit -d` and `ulimit -v` leave to this process, and not what the machine has.
    Proves `room`.
    """
    for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        ((most, less, taken, _),) = run(rooms, 1, limit)
        assert less < 1 << 34 and less <= most and taken >= 1 << 28
    assert 0 < room(torch.device("cpu")) < 1 << 50


# ----------------------------------------------------------------------------------------- faults


def refused(folder, mine=None):
    where = mine if mine and dist.get_rank() == 1 else folder
    with pytest.raises(RuntimeError) as caught:
        Zero3Layer(nn.Linear(300, 300), offload=Offload("nvme", where))
    return str(caught.value)


@pytest.mark.parametrize("bad, why", [("missing", "No such file or directory"),
                                      ("/proc", "No such file or directory"),
                                      (__file__, "Not a directory")])
def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank(bad, why, tmp_path):
    """
    Also where one rank's alone is bad; none is left waiting. It names the bytes that are needed.
    Proves `Buffers.new_file`, `Peers.agree`.
    """
    bad = str(tmp_path / bad)
    for rank, error in enumerate(run(refused, 2, str(tmp_path), bad)):
        assert f"rank {rank}: Linear cannot offload to" in error
        # Half of 90,300 fp32, in whole blocks.
        assert "184,320 bytes more from each rank. Got: [Errno" in error
        assert why in error and "on rank 1" in error


def started(worker, *args):
    """A process that has imported everything, and what it tells"""
    told, theirs = launch._CONTEXT.Pipe(duplex=False)
    process = launch._CONTEXT.Process(target=worker, args=(*args, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, told


def on_a_small_disk(test):
    """Call a function in a process with a mount of its own, of 1 MiB."""
    process, told = started(_small_disk, test, "/mnt")
    why_not, error = told.recv()
    process.join()
    if why_not:
        pytest.skip(f"needs a mount of its own: {why_not}")
    assert not error, error


def _small_disk(test, folder, told):
    libc = ctypes.CDLL(None, use_errno=True)
    users = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
    # Root of its own, who may mount, and what it mounts nobody else sees.
    failed = libc.unshare(CLONE_NEWUSER | CLONE_NEWNS)
    if not failed:
        for name, text in users.items():
            Path("/proc/self", name).write_text(text)
        failed = libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"size=1m")
    if failed:
        told.send((os.strerror(ctypes.get_errno()), ""))
        return
    os.chdir(folder)
    error = ""
    try:
        test()
    except BaseException:
        error = traceback.format_exc()
    told.send(("", error))


def _too_small():
    layers = [Zero3Layer(nn.Linear(300, 300), offload=Offload("nvme", "."))]
    with pytest.raises(RuntimeError) as caught:
        Zero3Optimizer(Zero3Sequential(layers), offload=Offload("nvme", "."))
    # Master, two moments and a gradient, of 90,300 fp32 each in whole blocks.
    assert "a folder that takes 1,458,176 bytes more from each rank" in str(caught.value)
    assert "No space left on device" in str(caught.value)
    # What was taken for it is given back.
    assert os.statvfs(".").f_bavail * os.statvfs(".").f_frsize == 684032
    assert layers[0](torch.ones(1, 300)).shape == (1, 300)


def test_a_disk_that_is_too_small_says_so_before_training_and_what_it_lacks():
    """
    Breaks where space is taken with the first write, in the middle of a run.
    Proves `Buffers.new_file`, `File.__init__`.
    """
    on_a_small_disk(_too_small)


def _no_direct_files():
    offload = Offload("nvme", ".")
    model, optimizer = build([nn.Linear(WIDTH, 40), nn.Linear(40, 3)], offload, offload)
    for i in range(3):
        step(model, optimizer, i)


def test_a_file_system_without_direct_files_is_used_through_its_cache():
    """
    One that lives in memory, for instance.
    Proves `File.__init__`.
    """
    on_a_small_disk(_no_direct_files)


def faulty(folder, direct, fault):
    offload = Offload("nvme", folder, direct=direct)
    model, optimizer = build(chain(), offload, offload)
    step(model, optimizer, 0)
    if dist.get_rank() == 1 and fault == "cut":
        for states in optimizer.shard_states:
            # Nothing is being written any more.
            states.in_file.release()
        os.ftruncate(optimizer.shard_states[2].in_file.file.fd, 100)
    elif dist.get_rank() == 1:
        # No file of this process may grow, and no byte of one be written.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
    begun = time.monotonic()
    errors = []
    for i in range(3):
        try:
            step(model, optimizer, 1 + i)
        except RuntimeError as error:
            errors.append(str(error))
            break
    return errors, time.monotonic() - begun


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_that_was_cut_is_an_error_on_every_rank(direct, tmp_path):
    """
    A read that comes back short is not taken for whole, and the other rank does not wait for ever.
    A write behind its new end would leave zeros.
    Proves `File.move`, `InFile.wait`, `InFile._end`, `Communicator.fail`.
    """
    (zeros, took_s), (ones, _) = run(faulty, 2, str(tmp_path), direct, "cut")
    assert "rank 1: layer 3 (Sequential) could not read what rests in a file" in ones[0]
    assert "the file has been cut to 100 bytes" in ones[0] and str(tmp_path) in ones[0]
    assert "Got: fault of layer 3, on rank 1. What to do: look for an error on rank 1" in zeros[0]
    assert took_s < 30


def test_a_call_that_moves_nothing_is_an_error(tmp_path):
    """
    A file system that reads no bytes where there should be some. Breaks where `move` tries for
    ever.
    Proves `File.move`.
    """
    file = File(tmp_path, 4096, direct=False)
    with mock.patch("os.preadv", return_value=0), pytest.raises(OSError, match="cut to 0 bytes"):
        file.move(False, torch.empty(4096, dtype=torch.uint8), 0)


def test_a_write_that_fails_is_an_error_on_every_rank(tmp_path):
    """
    The system refuses it in the middle of a run, as a full disk would where space is not taken
    before. Nobody goes on with what was half written.
    Proves `InFile._end`, `Communicator.fail`.
    """
    (zeros, took_s), (ones, _) = run(faulty, 2, str(tmp_path), True, "full")
    assert "could not write what rests in a file" in ones[0] and "File too large" in ones[0], ones
    assert "Got: fault of layer" in zeros[0] and "on rank 1" in zeros[0]
    assert took_s < 30


def killed(folder, told):
    offload = Offload("nvme", folder)
    model = Zero3Sequential([Zero3Layer(nn.Linear(500, 500), offload=offload) for _ in range(5)])
    optimizer = Zero3Optimizer(model, offload=offload)
    while True:
        optimizer.backward(model(torch.ones(2, 500)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        told.send("step")


def test_a_run_that_is_killed_leaves_nothing_behind(tmp_path):
    """
    No stale files, for they have no names: the system gives their space back. Two runs in one
    folder do not meet, for the same reason.
    Proves I10, `File`, `File.__init__`.
    """
    runs = [started(killed, tmp_path) for _ in range(2)]
    for process, told in runs:
        assert [told.recv() for _ in range(3)] == ["step"] * 3
        held = [os.readlink(f"/proc/{process.pid}/fd/{fd}")
                for fd in os.listdir(f"/proc/{process.pid}/fd")]
        assert sum(str(tmp_path) in name and "(deleted)" in name for name in held) == 5
    assert list(tmp_path.iterdir()) == []
    for process, _ in runs:
        process.kill()
        process.join()
    assert list(tmp_path.iterdir()) == []


def open_files():
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += "(deleted)" in os.readlink(f"/proc/self/fd/{fd}")
    return found


def test_a_model_that_is_gone_takes_its_memory_and_its_files_along(tmp_path):
    """
    As in a notebook, where one model follows another. Breaks where a parameter's hook, of which the
    garbage collector knows nothing, refers to its layer.
    Proves `Zero3Layer._shard`, `InFile.__init__`.
    """
    gc.collect()
    before = open_files()
    for offload in (None, Offload("nvme", tmp_path)):
        model, optimizer = build(chain(), offload, offload)
        step(model, optimizer, 0)
        layers = [weakref.ref(layer) for layer in model.module_list]
        del model, optimizer
        gc.collect()
        assert [layer() for layer in layers] == [None] * 7
        # Of the last shards alone, which had the buffers.
        assert open_files() - before <= (5 if offload else 0)
    del offload
    gc.collect()
    # A thread that still writes holds its file, and by it all others, until that is done: on a busy
    # disk a while. Only then are they garbage, which has to be collected.
    deadline_s = time.monotonic() + 30
    while open_files() != before and time.monotonic() < deadline_s:
        time.sleep(0.05)
        gc.collect()
    assert open_files() == before


def test_a_shard_in_a_file_says_so_to_an_optimizer_that_cannot_step_it(tmp_path):
    """
    By name, with the cure. Breaks where an optimizer would step nothing, without a word.
    Proves `FreedParameter`, `FreedParameter.of_shard`, `Zero3Layer.__init__`.
    """
    layer = Zero3Layer(nn.Linear(5, 5), offload=Offload("nvme", tmp_path))
    with pytest.raises(RuntimeError, match=r"Zero3Optimizer"):
        optimizer = torch.optim.AdamW(layer.get_trainable_chunk())
        layer(torch.ones(1, 5)).sum().backward()
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"rank 0: Linear freed `shard`"):
        layer.get_trainable_chunk()[0].sum()
    with pytest.raises(RuntimeError, match=r"full_params"):
        layer.state_dict()
    layer.zero_grad()
    assert "sharded by Linear" in repr(layer.get_trainable_chunk()[0])
    assert layer.get_trainable_chunk()[0].shape == (30,)


@pytest.mark.parametrize("wrong", [
    {"tier": "disk"}, {"tier": "nvme"}, {"tier": "cpu", "folder": "/"},
    {"queue_depth": 0}, {"block_bytes": 1000}, {"block_bytes": 0}, {"buffers": 2},
])
def test_what_does_not_fit_together_is_refused(wrong):
    """
    A tier, a folder or a number that cannot work is found out when the `Offload` is made, before
    any layer has it. Breaks where a folder is asked for with the first file.
    Proves `Offload`.
    """
    with pytest.raises(ValueError, match=r"Offload\. Expected: .* Got: .* What to do: "):
        Offload(**wrong)


def test_gradients_in_files_are_those_in_memory(tmp_path):
    """
    Breaks if a gradient is read from another place of the file.
    Proves `ShardStates.read_grad`.
    """
    found = []
    for states_in in (None, Offload("nvme", tmp_path)):
        model, optimizer = build(chain(), None, states_in)
        optimizer.backward(model(torch.ones(2, WIDTH)).square().mean())
        found.append(torch.cat([states.read_grad() for states in optimizer.shard_states]))
    assert torch.equal(*found) and found[0].count_nonzero() > 1000


# --------------------------------------------------------------------------------------- formulas


def test_efficiency_gives_the_papers_cases():
    """
    ZeRO-Infinity, section 4, at 70 Tflop/s: 70 GB/s for parameters and gradients are more than half
    of the speed at batch size 1 with 1024 tokens; optimizer states need four times as much; 1.5
    TB/s for them are 90 % at batch size 2.
    Proves `efficiency`.
    """
    peak = 70e12
    assert 0.5 < efficiency(1024, 70e9, peak) < 0.51
    assert efficiency(1024 / 4, 4 * 70e9, peak) == efficiency(1024, 70e9, peak)
    assert 0.9 < efficiency(2 * 1024 / 4, 1.5e12, peak) < 0.92


def test_offload_to_the_cpu_moves_four_bytes_for_each_parameter():
    """
    ZeRO-Offload, section 3: half-precision gradients there and parameters back, the least that is
    possible; what rests on the device is 2 bytes for each parameter and a few layers.
    Proves `places`, `formulas.Place`.
    """
    place = next(p for p in places(1e9, 1, 100) if (p.params_in, p.states_in) == ("device", "cpu"))
    assert place.step_bytes == {"cpu": 4e9, "nvme": 0.0}
    assert place.needs == {"device": 2e9 + 6e7, "cpu": 14e9, "nvme": 0.0}


def moved_by_many(params_in, states_in, numel, element_bytes, depth=100, buffers=5):
    """The formulas in the head of `predict.py`, for layers whose shards are whole blocks."""
    if states_in != "nvme":
        return 0
    params = element_bytes * numel if params_in == "nvme" else 0
    is_master = element_bytes == 4 and params_in != "device"
    states = 4 * numel * (2 if is_master and not params else 3)
    grads = element_bytes * numel
    read = (2 * depth - 1) * params + depth * states + (depth - buffers) * grads
    return read + depth * (states + grads + (0 if is_master else params))


def test_what_a_step_moves_to_the_disk_is_what_real_layers_move():
    """
    The envelope and the exact formula agree within what the last layer and the buffers make.
    Proves `places`.
    """
    for names, each in ((("device", "nvme"), 28), (("cpu", "nvme"), 28), (("nvme", "nvme"), 34)):
        rough = next(p for p in places(100 << 20, 1, 100) if (p.params_in, p.states_in) == names)
        assert rough.step_bytes["nvme"] == each * (100 << 20)
        moved_bytes = moved_by_many(*names, 1 << 20, 2)
        assert moved_bytes == pytest.approx(rough.step_bytes["nvme"], rel=0.05)


@pytest.mark.parametrize(("basis", "element_bytes"), [(16, 2), ("fp32", 4)])
@pytest.mark.parametrize("ranks", [1, 4])
def test_each_choice_of_tiers_has_the_bytes_that_are_predicted_of_real_layers(
        basis, element_bytes, ranks, tmp_path):
    """
    In half precision and in fp32, for each choice: files to the byte; shards, states and the
    buffers of files within step counts and whole blocks; the transfer to files within the buffers
    that are still full. Breaks if fp32 parameters on the device have no copy where they are
    stepped, or if parameters in files have one.
    Proves `places`, `Place.needs`, `predict`, `formulas.Part`, `LayerSpec`.
    """
    layers = [LayerSpec((Part(1 << 20, element_bytes, True),))] * 100
    tiers = {"device": Offload(), "cpu": Offload("cpu"), "nvme": Offload("nvme", tmp_path)}
    for place in places(100 << 20, ranks, 100, basis):
        exact = predict(layers, ranks, stage3=True, by_messages=False,
                        params_in=tiers[place.params_in], states_in=tiers[place.states_in])
        rest = place.needs["device"] + place.needs["cpu"] - place.parts["device"]["working"]
        moved_bytes = moved_by_many(place.params_in, place.states_in, (1 << 20) // ranks,
                                    element_bytes)
        assert exact.disk_bytes == place.needs["nvme"]
        assert exact.pool_bytes == pytest.approx(place.parts["cpu"]["working"], rel=2e-3)
        assert exact.rest_bytes + exact.grad_bytes == pytest.approx(rest, rel=2e-3)
        assert moved_bytes == pytest.approx(place.step_bytes["nvme"], rel=0.01)


@pytest.mark.parametrize("params, ranks, has, expected", [
    (1e9, 1, {"device": 80e9}, ("device", "device")),
    (8e9, 1, {"device": 80e9, "cpu": 128e9}, ("device", "cpu")),
    (8e9, 1, {"device": 10e9, "cpu": 200e9}, ("cpu", "cpu")),
    (8e9, 1, {"device": 80e9, "cpu": 64e9, "nvme": 1e12}, ("device", "nvme")),
    (8e9, 1, {"device": 10e9, "cpu": 20e9, "nvme": 1e12}, ("nvme", "nvme")),
    (8e9, 1, {"device": 10e9, "cpu": 8e9, "nvme": 1e12}, None),
    # CPU memory is shared by the ranks of a machine, a device is not.
    (8e9, 2, {"device": 80e9, "cpu": 0.0}, ("device", "device")),
    (8e9, 2, {"device": 20e9, "cpu": 100e9}, None),
    (8e9, 2, {"device": 20e9, "cpu": 113e9}, ("device", "cpu")),
])
def test_the_fastest_tiers_that_fit_are_advised(params, ranks, has, expected):
    """
    The first choice of tiers, from fast to slow, for which a rank has enough of each; or none.
    Breaks where CPU memory is counted once for each rank, or a device for all of them.
    Proves `advise`, `places`.
    """
    place = advise(params, ranks, has)
    assert (place and (place.params_in, place.states_in)) == expected


@pytest.mark.parametrize("text, value", [("8b", 8e9), ("350m", 3.5e8), ("80GB", 8e10),
                                         ("1TB", 1e12), ("7.5e9", 7.5e9), ("1t", 1e12), ("12", 12)])
def test_numbers_are_read_as_people_write_them(text, value):
    """
    In powers of 1000, with or without a unit. Breaks where a `b` of billions is taken for one of
    bytes.
    Proves `number`.
    """
    assert number(text) == value


def test_the_command_line_says_whether_it_fits_and_where():
    """
    The example of the documentation, and one that does not fit.
    Proves `estimate.main`, `show_places`, `advise`.
    """
    told = python_m("zero3.estimate", "--model", "8b", "--ranks", "1", "--gpu", "80GB", "--cpu",
                    "128GB", "--nvme", "1TB")
    assert told.returncode == 0 and told.stderr == ""
    (row,) = [line for line in told.stdout.splitlines() if "<- the fastest that fits" in line]
    assert row.split()[:5] == ["device", "cpu", "17.5", "112.0", "0.0"]
    assert "A step moves 32.0 GB of a rank into its cpu tier and out." in told.stdout
    told = python_m("zero3.estimate", "--model", "1t", "--ranks", "1", "--gpu", "80GB")
    assert "It does not fit" in told.stdout and "<-" not in told.stdout


# ------------------------------------------------------------------------------------------- disk


@pytest.mark.parametrize("direct", [True, False])
def test_what_the_cache_gave_is_not_reported_as_the_disks(direct, tmp_path):
    """
    Memory that looks like a disk has no speed here. On a disk there is a figure, and the system
    says that all the bytes came from it.
    Proves `File.move`.
    """
    if Path("/dev/shm").is_dir():
        speed = measure(Path("/dev/shm"), 8 << 20, direct, 1 << 20, 2)
        assert speed.read_gb_s is None and speed.write_gb_s is None
    speed = measure(tmp_path, 8 << 20, direct, 1 << 20, 2)
    if speed.read_gb_s is None:
        pytest.skip("the tests' folder is not on a disk")
    assert speed.read_gb_s > 0 and speed.write_gb_s > 0


@pytest.mark.parametrize("direct", [False, True])
def test_a_file_that_was_cooled_is_not_in_the_page_cache(direct, tmp_path):
    """
    What is read then comes from the disk. Breaks without `posix_fadvise`.
    Proves `File.move`.
    """
    file = File(tmp_path, 1 << 20, direct)
    file.move(True, aligned(1 << 20), 0)
    cool(file)
    before = _disk_bytes(False)
    os.pread(os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY), 1 << 20, 0)
    if not before:
        pytest.skip("the tests' folder is not on a disk")
    assert _disk_bytes(False) - before >= 1 << 20


def test_a_file_that_finds_no_space_leaves_no_name(tmp_path):
    """
    It would be in the way of the next try, which wants a new file.
    Proves I10, `File.__init__`.
    """
    for nbytes in (1 << 60, 4096):
        with pytest.raises(OSError) if nbytes > 4096 else contextlib.nullcontext():
            File(tmp_path, nbytes, False, "named")
        assert os.listdir(tmp_path) == ["named"] * (nbytes == 4096)


def test_the_benchmark_prints_a_table(tmp_path):
    """
    Twelve ways of asking, six of each kind, each told as soon as it was measured. A folder that is
    not there is one line and no traceback.
    Proves `command_line.folder`.
    """
    command = [sys.executable, "-m", "tests.bench.disk", "--folder", str(tmp_path), "--mib", "64",
               "--rounds", "1"]
    told = subprocess.run(command, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert told.stdout.count("past the cache") == 6
    assert told.stdout.count("through the cache") == 6
    assert told.stderr.count("round 1 of 1: ") == told.stderr.count("\n") == 12
    told = python_m("tests.bench.disk", "--folder", str(tmp_path / "missing"))
    assert told.returncode == 2 and "Expected: a folder that takes files. Got: " in told.stderr
    assert told.stderr.count("\n") == 1


# -------------------------------------------------------------------------------------------- gpu


@pytest.mark.gpu
def test_tiers_of_a_gpu_train_to_the_same_bits(tmp_path):
    """
    Parameters on the device, in pinned memory and in files; and states in pinned memory and in
    files, which are both stepped by the CPU.
    Proves I8, I9, `Offload`, `copy_to`.
    """
    def trained(params_in, states_in):
        model, optimizer = build([layer.cuda() for layer in chain()], params_in, states_in)
        for i in range(20):
            x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(i)).cuda()
            optimizer.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        return [t.cpu() for t in everything(model, optimizer)]

    files = {"tier": "nvme", "folder": tmp_path}
    assert equal(trained(None, None), trained(Offload("cpu"), None))
    assert equal(trained(None, None), trained(Offload(**files), None))
    assert equal(trained(None, Offload("cpu")), trained(None, Offload(**files)))
    assert equal(trained(None, Offload("cpu")), trained(Offload("cpu"), Offload("cpu")))
    assert equal(trained(None, Offload("cpu")), trained(Offload(**files), Offload(**files)))


def test_the_folder_of_the_tests_has_an_in_file_shard(tmp_path):
    """
    So that the tests above are of files: the tier is what was asked for.
    Proves `Offload.shard`, `InFile`.
    """
    layer = Zero3Layer(nn.Linear(5, 5), offload=Offload("nvme", tmp_path))
    assert isinstance(layer.flats[0].storage, InFile) and layer.flats[0].storage.tier == "nvme"


def test_states_that_an_optimizer_makes_at_once_go_to_their_file_at_once(tmp_path):
    """
    Adagrad makes its sums in its constructor, one for each element. They rest in the file before
    the first step, with their values, so that a model that fits in files can begin. Breaks where
    `offload` looks for states in the wrong case.
    Proves `ShardStates.in_memory`.
    """
    nvme = Offload("nvme", folder=tmp_path)
    layer = Zero3Layer(nn.Linear(8, 8), offload=nvme)
    optimizer = Zero3Optimizer(layer, torch.optim.Adagrad, lr=0.1, offload=nvme,
                               initial_accumulator_value=2.0)
    (states,) = optimizer.shard_states
    sums = [state["sum"] for state in optimizer.inner.state.values()]
    assert [each.numel() for each in sums] == [0] * len(sums) and sums
    with states.in_memory(optimizer.inner.state):
        assert all(bool((state["sum"] == 2).all()) and state["sum"].numel()
                   for state in optimizer.inner.state.values())

"""
# The lines that a GPU runs, as far as two ranks on the CPU can run them (I9)

NCCL's path takes collectives in place of messages, which gloo has too. Autograd runs the backward
of a GPU's operations on a thread of its own.
"""

import gc
import random
import threading
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests import cases, one_gpu, wholes
from tests.ranks import run
from tests.streams import Accelerator
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save, wrap
from zero3.comm import collectives as wires
from zero3.comm.collectives import Communicator, streams
from zero3.comm.links import groups_of
from zero3.comm.order import Group
from zero3.compiler.model import compile
from zero3.estimate.ledger import Ledger
from zero3.estimate.predict import predict_optimizer
from zero3.flat import in_flight
from zero3.inject.line import Line
from zero3.train import launch

# Those take seconds to build, and train as the others do.
WHOLES = [name for name in wholes.WHOLES if name not in ("GPT2", "Llama", "T5", "Vision")]


@contextmanager
def collectives():
    """
    Every wire takes collectives, as on an accelerator, which asserts with short messages only
    """
    def opened(self, *args, real=Communicator.open):
        at = real(self, *args)
        self.by_messages = False
        return at

    def asserted(condition, message, real=torch._assert_async):
        assert len(message) < 255
        real(condition, message)

    with (mock.patch.object(Communicator, "open", opened),
          mock.patch.object(torch, "_assert_async", asserted)):
        yield


@contextmanager
def other_thread():
    """
    Backward runs on another thread, as an accelerator's does
    """
    def backward(self, *args, real=torch.Tensor.backward, **kwargs):
        raised = []

        def go():
            try:
                real(self, *args, **kwargs)
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=go)
        thread.start()
        thread.join()
        if raised:
            raise raised[0]

    with mock.patch.object(torch.Tensor, "backward", backward):
        yield


def with_masters(model, **options):
    return Zero3Optimizer(model, torch.optim.AdamW, fused=False, bucket_bytes=600, **options)


def train_all():
    """The largest difference to plain PyTorch, of each case and each whole model"""
    worst = {}
    with collectives(), other_thread():
        for i, name in enumerate(cases.CASES):
            # By turns: torch's optimizer on shards, and one with masters and buckets.
            optimizer = with_masters if i % 2 else None
            worst[name] = cases.train_both(name, steps=2, optimizer=optimizer)
        for i, name in enumerate(WHOLES):
            optimizer = None if i % 2 else with_masters
            worst[f"whole {name}"], _ = wholes.train_both(name, steps=2, optimizer=optimizer)
    return worst


def test_everything_trains_over_collectives_and_with_backward_on_another_thread():
    """
    All cases and whole models give the numbers of plain PyTorch on the paths that only a GPU takes
    by itself. Breaks with a hook that believes to be on the thread of the forward, or with shares
    in another order than the collective's.
    Proves I1, I9, `Communicator.all_gather`, `Communicator.reduce_scatter`, `Communicator.numbers`,
    `Communicator.total`.
    """
    for worst in run(train_all, 2):
        assert len(worst) == len(cases.CASES) + len(WHOLES)
        for name, difference in worst.items():
            assert difference <= (1e-5 if name == "DataTypes" else 1e-10), (name, difference)


# ------------------------------------------------------------------------------------ divergence


def linear():
    return nn.Linear(4, 4)


def diverge():
    """Two ranks gather different layers of one size; then one is alone with a fault"""
    said = []
    with collectives():
        layers = [Zero3Layer(linear()) for _ in range(2)]
        for layer in Zero3Sequential(layers).module_list:
            layer.comm = layers[0].comm
        mine = layers[dist.get_rank()]
        try:
            mine(torch.ones(1, 4))
        except RuntimeError as error:
            said.append(str(error))
        layer = Zero3Layer(linear())
        try:
            if dist.get_rank() == 0:
                layer.comm.fail(layer, "has a fault", "none", "one", "look after it")
            layer(torch.ones(1, 4))
        except RuntimeError as error:
            said.append(str(error))
    return said


def test_ranks_that_diverge_over_collectives_get_an_error_and_not_noise():
    """
    I6, where the host cannot look at what the others announced: an assertion on the device compares
    it, which on the CPU raises at once. Layers of one size would else be exchanged for each other.
    A rank that raises has the others raise, who would wait for it.
    Proves I6, `announced`, `diverged`, `Communicator.fail`.
    """
    for rank, (layers, fault) in enumerate(run(diverge, 2)):
        assert f"rank {rank}: layer {rank} (Linear): the ranks diverged" in layers
        assert "a gather of this layer on all ranks" in layers and "CPU, which names both" in layers
        assert ("has a fault" if rank == 0 else "the ranks diverged") in fault


def account(bucket_bytes):
    """What the ledger counts in a step, and what was predicted"""
    with collectives():
        model = Zero3Sequential([Zero3Layer(nn.Linear(4, 4)) for _ in range(4)])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, bucket_bytes=bucket_bytes)
    with torch.inference_mode():
        # What is announced first is made here, and is used in training too.
        model(torch.ones(2, 4))
    for _ in range(2):
        with Ledger(model, optimizer) as tape:
            optimizer.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
        optimizer.zero_grad()
    p = predict_optimizer(optimizer)
    counted = (tape.sent_bytes, tape.messages, tape.order_bytes, tape.peak_live_bytes)
    return counted, (p.sent_bytes, p.messages, p.order_bytes, p.peak_bytes)


def test_announcements_over_collectives_are_counted_and_predicted():
    """
    32 bytes to each other rank for each transfer, as by messages.
    Proves I4, I6, `announced`, `predict`, `predict_optimizer`.
    """
    for bucket_bytes in (0, 1 << 18):
        for counted, predicted in run(account, 2, bucket_bytes):
            assert counted == predicted and counted[2]


def fails_twice():
    layer = Zero3Layer(linear())
    lost = []
    for _ in range(2):
        with pytest.raises(RuntimeError, match="has a fault"):
            layer.comm.fail(layer, "has a fault", "none", "one", "look after it")
        lost.append(len(in_flight.lost))
    with pytest.raises(RuntimeError, match="has a fault"):
        layer(torch.ones(1, 4))
    return lost, len(in_flight.lost)


def test_a_fault_is_announced_once():
    """
    A wire that is broken already sends nothing more: the others have heard of the first fault, and
    a second announcement would wait for a receiver who never comes.
    Proves I6, `Communicator.fail`.
    """
    assert run(fails_twice, 2) == [([1, 1], 1)] * 2


# ---------------------------------------------------------------------------------------- devices


@pytest.mark.parametrize("device, current, expected", [
    ("cuda:1", 0, "call `torch.cuda.set_device\\(1\\)`"),
    ("cuda:7", 0, "choose one that this process sees"),
    ("cuda:1", 1, ""),
    ("cuda", 1, ""),
])
def test_a_layer_is_on_the_device_that_its_rank_uses(device, current, expected):
    """
    NCCL takes the current device for what it sends by itself. Another one raises before anything is
    sent, and says which call is missing. Streams are made on the layer's device, of high priority,
    once for all wires.
    Proves I9, `Communicator.open`, `check_device`, `streams`.
    """
    with Accelerator() as there:
        there.device_count = lambda: 2
        there.current_device = lambda: current
        if expected:
            with pytest.raises(RuntimeError, match=expected):
                Zero3Layer(nn.Tanh(), device=device)
            return
        layers = [Zero3Layer(nn.Tanh(), device=device) for _ in range(2)]
        assert layers[0].device == torch.device("cuda", 1)
        assert there.options == [{"device": torch.device("cuda", 1), "priority": -1}] * 2
        assert layers[0].comm.fetch_stream is layers[1].comm.fetch_stream
        assert streams(layers[0].device)[1] is layers[1].comm.backup_stream


def for_gpus_alone():
    """As if the process group were NCCL's"""
    gpu = torch.device("cuda")
    return mock.patch.object(Group, "place_of", lambda group, at: at if at.type == "cuda" else gpu)


def forgets_to_move():
    """A module that is still on the CPU, with a process group for GPUs"""
    with for_gpus_alone(), pytest.raises(RuntimeError) as error:
        Zero3Layer(nn.Linear(4, 4))
    return str(error.value)


def test_a_module_that_was_not_moved_to_the_gpu_is_refused():
    """
    Breaks where the first broadcast finds out: its error would send the user to another rank.
    Proves `check_params`.
    """
    for text in run(forgets_to_move, 2):
        assert "cannot compute on cpu. Expected: a process group for cpu. Got: one for" in text


def has_no_parameters():
    """The device of a layer without parameters, with a process group for GPUs alone"""
    with Accelerator(), for_gpus_alone():
        return str(Zero3Layer(nn.Tanh()).device)


def test_a_layer_without_parameters_is_where_its_group_can_send():
    """
    To move it to the GPU changes nothing.
    Proves `check_params`, `Group.place_of`.
    """
    assert run(has_no_parameters, 2) == ["cuda:0", "cuda:0"]


def has_a_long_name():
    """What a layer with a long name asserts, of transfers that are the same on all ranks"""
    layer = Zero3Layer(type("Long" * 99, (nn.Linear,), {})(2, 2))
    with collectives():
        layer.comm.by_messages = False
        return layer(torch.ones(1, 2)).shape


def test_a_long_name_is_cut_for_the_gpu():
    """
    A GPU refuses to assert with 255 characters, so no layer would ever arrive.
    Proves `diverged`.
    """
    assert run(has_a_long_name, 2) == [(1, 2)] * 2


def draws_on_the_gpu():
    """Split ranks with the same random numbers on the CPU, and other ones on their GPUs"""
    (group,) = groups_of(init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
    with Accelerator() as device:
        told = torch.tensor([7, dist.get_rank()], dtype=torch.uint8, device="cpu")
        device.get_rng_state = lambda *_: told
        with pytest.raises(ValueError) as error:
            line = Line(group)
            module = nn.Module()
            line.compared[module] = [False]
            line.compare_once(module, [torch.ones(2)])
    return str(error.value)


def test_split_ranks_draw_the_same_numbers_on_their_gpus():
    """
    Dropout draws there. Breaks where only the numbers of the CPU are compared: each rank would take
    its part of another mask.
    Proves `Line.compare_once`.
    """
    for text in run(draws_on_the_gpu, 2):
        assert "the same random numbers" in text


def first_of_a_group():
    """The collectives that connect the ranks which share owners, and how many ranks these are"""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "shard"))
    real, groups = dist.all_reduce, []

    def all_reduce(tensor, *args, group=None, **more):
        groups.append(group)
        return real(tensor, *args, group=group, **more)

    with collectives(), mock.patch.object(dist, "all_reduce", all_reduce):
        layer = Zero3Layer(linear(), mesh=mesh)
        sharing = layer.comm.sharing.process_group
    return groups.count(sharing), dist.get_world_size(sharing)


def test_nccl_connects_those_who_share_owners_before_some_of_them_send():
    """
    Its first call in a group needs all of its ranks, and some owners have nothing to send: the
    others would wait for them. gloo connects each pair by itself.
    Proves `LinkedCommunicator.sharing`.
    """
    assert run(first_of_a_group, 4) == [(1, 4)] * 4


def test_threads_that_move_files_choose_the_gpu_of_their_layer(tmp_path):
    """
    They wait for events, and a thread that has chosen no GPU opens the first one for that: on each
    other rank, memory of a GPU that is not its own.
    Proves `Buffers`.
    """
    with Accelerator() as device:
        layer = Zero3Layer(nn.Linear(4, 4), offload=Offload("nvme", tmp_path))
        with layer.full_params() as params:
            assert params["bias"].shape == (4,)
        assert device.chosen
        assert all(name.startswith("zero3-offload") and at == layer.device
                   for name, at in device.chosen)


def test_pinned_memory_is_as_large_as_what_is_in_it():
    """
    A shard in CPU memory, and the buffers of files, are registered with the device to the byte, and
    unregistered before the system has their memory back. Breaks with torch's pinned memory, which
    is rounded up to a power of two.
    Proves `pinned`, `_Pages`, `copy_to`, `Buffers`.
    """
    with Accelerator() as device:
        layer = Zero3Layer(nn.Linear(100, 100), offload=Offload("cpu"))
        assert list(device.pages.values()) == [4 * 10100]
        (shard,) = layer.get_trainable_chunk()
        assert shard.data_ptr() in device.pages and shard.untyped_storage().nbytes() == 4 * 10100
        registered = device.cudaHostRegister
        device.cudaHostRegister = lambda *_: 1
        # A device that takes no such memory.
        other = Zero3Layer(nn.Linear(10, 10), offload=Offload("cpu"))
        device.cudaHostRegister = registered
        assert len(device.pages) == 1 and other.get_trainable_chunk()[0].is_pinned()
        at = layer.device
        del shard, layer
        with mock.patch.object(device, "device", side_effect=device.device) as chosen:
            # A layer refers to itself.
            gc.collect()
        assert not device.pages and chosen.call_args_list == [mock.call(at)]


def test_full_params_takes_the_memory_of_a_layer_once():
    """
    To resize a storage to the size that it has would take its memory a second time while the first
    is still there. Breaks without the comparison in `Communicator.all_gather`.
    Proves I3, `Communicator.all_gather`, `Sharded.full_params`.
    """
    layer = Zero3Layer(nn.Linear(100, 100))
    sizes = []
    resize = torch.UntypedStorage.resize_

    def counted(storage, nbytes):
        sizes.append(nbytes)
        return resize(storage, nbytes)

    with mock.patch.object(torch.UntypedStorage, "resize_", counted):
        with layer.full_params() as params:
            assert params["weight"].abs().sum() > 0
    assert not any(sizes)


def train_elsewhere(folder, default):
    """Chain, wrapped and compiled model: the weights after steps, tiers and a checkpoint"""
    found = []
    for kind in ("chain", "wrap", "compile"):
        torch.manual_seed(0)
        plain = [nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3)]
        x = torch.randn(4, 8)
        files = Offload("nvme", folder)
        with torch.device(default):
            if kind == "chain":
                model = Zero3Sequential([Zero3Layer(layer, offload=files, activations=files)
                                         for layer in plain])
            elif kind == "wrap":
                model = wrap(nn.Sequential(*plain), nn.Sequential, offload="cpu")
            else:
                # What Inductor makes of a graph says its device itself, and takes long to compile.
                model = compile(nn.Sequential(*plain), backend="aot_eager")
            optimizer = Zero3Optimizer(model, lr=0.1, offload=files, clip_grad_norm=0.5)
            for i in range(3):
                optimizer.backward(model(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
                if not i:
                    save(f"{folder}/saved-{kind}-{default}", model, optimizer, step=1)
            load(f"{folder}/saved-{kind}-{default}", model, optimizer)
            optimizer.backward(model(x).square().mean())
            optimizer.step()
            with model.full_params() as params:
                found += [p.detach().clone() for p in params.values()]
    return found


def test_another_default_device_changes_nothing(tmp_path):
    """
    The meta device stands for a GPU: what is there by mistake has no values. Breaks where a buffer
    of a file, or a state that is loaded, is made without saying where.
    Proves `aligned`, `Offload.shard`, `remember`, `CheckpointReader.read`.
    """
    for here, there in zip(run(train_elsewhere, 2, tmp_path, "cpu"),
                           run(train_elsewhere, 2, tmp_path, "meta"), strict=True):
        assert len(here) == 18 and all(map(torch.equal, here, there))


class Unusual(nn.Module):
    """Data types that NCCL does not know, and a buffer in a place from which it does not send"""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.tensor([7, 10, 13], dtype=torch.int16), requires_grad=False)
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j, 2 + 0j]))
        self.register_buffer("seen", torch.tensor([dist.get_rank() + 1], device="cpu"))

    def forward(self, factor):
        return (self.table * self.phase).real.sum() * factor


def train_on_one_gpu(store):
    """The same on ranks that share one GPU; without one, the CPU"""
    with collectives():
        worst = train_on_gpus(one_gpu.join(store))
        layer = Zero3Layer(Unusual())
        layer(1 + dist.get_rank()).backward()
        torch.optim.SGD(layer.parameters(), lr=1).step()
        with layer.full_params() as params:
            # The mean of the factors is 1.5.
            assert params["phase"].tolist() == [1 - 10.5 + 2j, 3 - 15 - 1j, 2 - 19.5]
            assert params["table"].tolist() == [7, 10, 13]
        seen = layer.module.seen
        assert seen.tolist() == [1] and seen.device.type == "cpu"
        return worst


@pytest.mark.parametrize("where", ["cpu", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_all_cases_train_on_ranks_that_share_a_gpu(where, tmp_path):
    """
    The numbers of plain PyTorch, over a group that behaves as NCCL's.
    Proves I1, I8, I9, `Communicator`.
    """
    for worst in launch.run(train_on_one_gpu, 2, f"{tmp_path}/store", device="cpu", timeout_s=300):
        for (name, *how), difference in worst.items():
            assert difference <= (1e-5 if name == "DataTypes" else 1e-9), (name, how, difference)


def train_on_gpus(device=None):
    """All cases, with NCCL"""
    torch.set_default_device(device or launch.my_device())
    worst = {}
    for name in cases.CASES:
        for tier in ("device", "cpu"):
            offload = Offload(tier)
            for optimizer in (None, partial(with_masters, offload=offload)):
                worst[name, tier, bool(optimizer)] = cases.train_both(
                    name, offload=offload, optimizer=optimizer)
    return worst


def train_with_delays():
    """
    The same, with delays: now and then the current stream sleeps for up to a millisecond before a
    copy, an addition, a collective, a mark or a wait
    """
    draw, seen = random.Random(dist.get_rank()), set()

    def delayed(name, method):
        def begin(*args, **kwargs):
            seen.add(name)
            if draw.random() < 0.3:
                # Cycles of a clock of one to two GHz.
                torch.cuda._sleep(draw.randrange(1_000_000))
            return method(*args, **kwargs)
        return begin

    with ExitStack() as patches:
        for owner, names in (
                (wires, ("all_gather_single", "reduce_scatter_single")),
                (torch.Tensor, ("copy_", "add_")), (torch.cuda.Event, ("record", "wait")),
                (torch.cuda.Stream, ("wait_event", "wait_stream"))):
            for name in names:
                patches.enter_context(
                    mock.patch.object(owner, name, delayed(name, getattr(owner, name))))
        worst = train_on_gpus()
    # One rank sends nothing.
    assert seen >= {"copy_", "record"} and ("all_gather_single" in seen) == (
        dist.get_world_size() > 1)
    return worst


@pytest.mark.gpu
@pytest.mark.parametrize("worker", [train_on_gpus, train_with_delays])
def test_all_cases_train_on_gpus(worker):
    """
    The numbers of plain PyTorch on the global batch, with real streams, and with NCCL where there
    are two GPUs. Delays reveal a stream that reads before another has written, or writes before
    another has read.
    Proves I1, I8, I9, `Communicator`.
    """
    for worst in launch.run(worker, min(2, torch.cuda.device_count()), timeout_s=600):
        for (name, *how), difference in worst.items():
            assert difference <= (1e-5 if name == "DataTypes" else 1e-9), (name, how, difference)

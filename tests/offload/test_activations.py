"""
# Activations that rest elsewhere: the same bits, less memory, and each byte moved once
"""

import concurrent.futures
import gc
import itertools
import os
import threading
from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from labml_nn.transformers.feed_forward import FeedForward
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import zero3
from tests import cases, wholes
from tests.bench.disk import measure
from tests.compiler import models as compiler_models
from tests.compiler import test_compiler
from tests.compiler.models import Stack, compare, pair_of
from tests.limits import STEP_BYTES, long_sequences
from tests.offload.test_tiers import on_a_small_disk
from tests.ranks import run
from tests.streams import Accelerator, Event, Line, before
from zero3 import (
    Int4,
    Int8,
    Links,
    Offload,
    Zero3Layer,
    Zero3Optimizer,
    Zero3Sequential,
    wrap,
)
from zero3.compression import Prune, compress
from zero3.estimate.ledger import Ledger
from zero3.estimate.saved import Moved, activations, gpt2_bytes
from zero3.flat import in_flight
from zero3.inject import inject, policies
from zero3.offload.activations import Activations, Copy, Forward, bring_back, order
from zero3.offload.disk import File
from zero3.offload.in_file import Buffers
from zero3.pipeline import Pipeline

WIDTH, ROWS = 64, 32
# Bytes of an activation, two whole blocks of a disk.
ONE = WIDTH * ROWS * 4


def to_files(folder, **options):
    """All activations, however small, with requests of one block"""
    files = Offload("nvme", folder, block_bytes=4096)
    return Activations(files, **{"below_bytes": 0, **options})


class Block(nn.Module):
    """Saves its input, the output of tanh twice as one storage, and nothing else of this size"""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def chain(activations=None, layers=5, make=Block, mesh=None):
    torch.manual_seed(0)
    return Zero3Sequential([Zero3Layer(make(), activations=activations, mesh=mesh)
                            for _ in range(layers)])


def batch(seed=0):
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def grads(model):
    return [shard.grad.clone() for shard in model.get_trainable_chunk()]


def equal(one, other):
    return len(one) == len(other) and all(map(torch.equal, one, other))


def moved(tape, event):
    return [(e.layer.split()[1], e.bytes) for e in tape.events if e.event == event]


# -------------------------------------------------------------------------------------- same bits


def noting(values):
    """Notes the shards of a model, and their gradients"""
    def look(model):
        for shard in model.parameters():
            values.append(shard.detach().clone())
            if shard.grad is not None:
                values.append(shard.grad.clone())

    return look


# All models on two ranks; on one every second one, and on three half of the others: each rank has
# files of its own, and knows nothing of those of others.
SOME = {1: slice(0, None, 2), 2: slice(None), 3: slice(1, None, 4)}


def all_cases(folder):
    """Chains of `cases.py`: whether the shards and their gradients have the same bits"""
    found = {}
    for name in [*cases.CASES][SOME[dist.get_world_size()]]:
        seen = {}
        for where in (None, to_files(folder)):
            look = noting(seen.setdefault(where is None, []))
            off = cases.train_both(name, steps=2, check=look, activations=where)
        found[name] = (equal(seen[True], seen[False]), off)
    return found, len(order.visits), len(order.known)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_chain_has_the_same_bits_with_its_activations_in_files(world_size, tmp_path):
    """
    Layers called twice, checkpointed inside and outside, frozen, changed in place, with several
    outputs, two graphs at once. Breaks if a storage is read before it is written, taken for another
    one, or given back too early.
    Proves I1, I8, `Activations`, `LayerActivations`, `LayerActivations.__init__`,
    `LayerActivations.__call__`, `Forward.pack`, `bring_back`.
    """
    for found, visits, known in run(all_cases, world_size, str(tmp_path)):
        assert {name for name, (same, _) in found.items() if not same} == set()
        assert all(off < 1e-6 for _, off in found.values())
        # Nothing is left behind.
        assert visits == known == 0


def all_wholes(folder, micro):
    found = {}
    for name in [*wholes.WHOLES][SOME[dist.get_world_size()]]:
        seen = []
        for where in (None, to_files(folder)):
            seen.append([])
            torch.manual_seed(0)
            train_whole(name, micro, where, noting(seen[-1]))
        found[name] = equal(*seen)
    gc.collect()
    return found, len(order.visits), len(order.known)


def train_whole(name, micro, where, look):
    """
    Two steps, or one of two micro-batches, so that each file is used again. `wholes.train_both`
    would train the plain model too, which has no activations.
    """
    plain, model = wholes.build(name, activations=where)
    _, optimizer = wholes.optimizers(plain, model)
    for step in range(2 // micro):
        for i in range(micro):
            ids = wholes.tokens(step * micro + i, wholes.ROWS * dist.get_world_size())
            loss = plain.loss(model(ids.chunk(dist.get_world_size())[dist.get_rank()]))
            if micro > 1:
                loss.backward(retain_graph=True)
            loss.backward()
            # With it goes the graph, and what would be kept for it.
            del loss
            look(model)
        optimizer.step()
        optimizer.zero_grad()
        look(model)


@pytest.mark.parametrize("world_size, micro", [(1, 1), (2, 2), (3, 1)])
def test_every_whole_model_has_the_same_bits_with_its_activations_in_files(world_size, micro,
                                                                           tmp_path):
    """
    GPT-2, Llama and T5 of transformers, encoders with decoders, branches, mixtures, recomputation;
    with two micro-batches, each twice backward through its graph.
    Proves I1, I8, `wrap`, `Order.begin`, `Order.enter`, `Visit.rest`.
    """
    for found, visits, known in run(all_wholes, world_size, str(tmp_path), micro):
        assert {name for name, same in found.items() if not same} == set()
        assert visits == known == 0


def pipelined(folder, schedule, tied):
    """A pipeline of two stages: whether the gradients have the same bits, and what left"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shard"))
    found = []
    for where in (None, to_files(folder)):
        torch.manual_seed(0)
        layers = [Block() for _ in range(6)]
        if tied:
            layers[4].up.weight = layers[0].up.weight
        model = Pipeline(layers, mesh, loss_fn=nn.functional.mse_loss, stages=[3, 3],
                         schedule=schedule, micro_batches=4, activations=where)
        optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
        rows = torch.cat([batch(i) for i in range(4)])
        values = []
        for _ in range(2):
            with Ledger(model) as tape:
                values.append(torch.tensor(model.train_batch(rows, rows.flip(0), optimizer)))
            optimizer.step()
            optimizer.zero_grad()
        with model.full_params() as params:
            values += [p.detach().clone() for p in params.values()]
        found.append(values)
    return equal(*found), tape.out_bytes, tape.in_bytes


@pytest.mark.parametrize("schedule, tied", [("gpipe", False), ("gpipe", True), ("1f1b", False)])
def test_micro_batches_that_wait_in_a_pipeline_may_leave(schedule, tied, tmp_path):
    """
    Four of them, each through three layers on a rank. Under gpipe, which first sends all of them
    forward, everything leaves but the last call; under 1f1b a rank of the last stage goes backward
    at once. Tied weights stay: their memory is freed while a copy of it would be on its way.
    Proves `Pipeline`, `Stage.__init__`, `Order.begin`.
    """
    (zeros, *_), (ones, *_) = found = run(pipelined, 2, str(tmp_path), schedule, tied)
    assert zeros and ones
    if schedule == "gpipe":
        for _, out_bytes, _ in found:
            assert out_bytes == 2 * ONE * (4 * 3 - 1)
    else:
        assert found[1][1] < found[0][1]


def on_a_mesh(folder, names):
    """Four ranks: whether two steps have the same bits, and what moved in the last one"""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    over = mesh if names[0] == "replicate" else Links(mesh, weights=Int8(), gradients=Int4(),
                                                      secondary=True)
    found = []
    for where in (None, to_files(folder)):
        torch.manual_seed(0)
        model = Zero3Sequential([Zero3Layer(Block(), mesh=over, activations=where)
                                 for _ in range(5)])
        optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
        for i in range(2):
            with Ledger(model) as tape:
                optimizer.backward(model(batch(10 * i + dist.get_rank())).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        with model.full_params() as params:
            found.append([p.detach().clone() for p in params.values()])
    return equal(*found), tape.out_bytes, tape.in_bytes


@pytest.mark.parametrize("names", [("replicate", "shard"), ("nodes", "shard")])
def test_replicas_and_nodes_move_their_own_activations(names, tmp_path):
    """
    Each rank those of its rows, as much as alone. Between nodes weights and gradients are encoded,
    and each node keeps a copy for backward. Breaks if two ranks take the same file.
    Proves `Activations`, `Buffers`, `Links`, I1.
    """
    assert run(on_a_mesh, 4, str(tmp_path), names) == [(True, 8 * ONE, 6 * ONE)] * 4


def split_layers(folder):
    """Two ranks compute each layer: whether there are the same bits, and what moved"""
    found = []
    for where in (None, to_files(folder)):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tensor", "shard"))
        torch.manual_seed(0)
        plain = nn.Sequential(*(FeedForward(WIDTH, 2 * WIDTH, 0.0) for _ in range(4)))
        inject(plain, [policies.tensor_parallel(mesh["tensor"])])
        model = wrap(plain, FeedForward, mesh=mesh["shard"], activations=where)
        for _ in range(2):
            with Ledger(model) as tape:
                model(batch()).square().mean().backward()
        found.append(grads(model))
    return equal(*found), tape.out_bytes, tape.in_bytes


def test_layers_that_two_ranks_compute_move_their_parts(tmp_path):
    """
    A rank saves the whole input of a layer, and half of what is inside, which is twice as wide.
    Proves `tensor_parallel`, `wrap`.
    """
    assert run(split_layers, 2, str(tmp_path)) == [(True, 6 * ONE, 4 * ONE)] * 2


def generator_state(folder):
    """Losses, gradients and the generator's state after two steps with dropout"""
    found = []
    for where in (None, to_files(folder)):
        model = chain(where, make=lambda: nn.Sequential(Block(), nn.Dropout(0.3)))
        torch.manual_seed(7)
        for i in range(2):
            model(batch(i)).square().mean().backward()
        found.append([*grads(model), torch.get_rng_state()])
    return equal(*found)


def test_dropout_draws_the_same_numbers(tmp_path):
    """
    Masks leave and come back like other tensors, and nobody draws a number in between.
    Proves `Forward.pack`.
    """
    assert generator_state(tmp_path)


# ------------------------------------------------------------------------- bytes, and what is moved


@pytest.mark.parametrize("keep, layers", [(1, 5), (2, 5), (5, 4), (1, 1)])
def test_the_ledger_counts_what_the_formula_says(keep, layers, tmp_path):
    """
    Each layer but the last ones leaves once, and comes back once if it was freed. Breaks if a
    second view of a storage is moved again, or a parameter, or if the next layer moves its input a
    second time.
    Proves `Activations`, `saved.activations`, `Moved`, `Visit.leave`, `Visit.come`, `Ledger`,
    `Ledger.bytes_of`.
    """
    model = chain(to_files(tmp_path, keep=keep), layers)
    expected = activations([2 * ONE] * layers, keep)
    for _ in range(2):
        with Ledger(model) as tape:
            model(batch()).sum().backward()
        assert (tape.out_bytes, tape.in_bytes) == (expected.out_bytes, expected.in_bytes)
    kept = [f"{i}" for i in range(layers)]
    assert [name for name, _ in moved(tape, "activations out")] == kept[:-keep]
    assert [name for name, _ in moved(tape, "activations in")] == kept[: -keep - 1][::-1]


def test_the_formula_on_three_calls():
    """
    The example of `saved.activations`, calls that all stay, and some that save nothing.
    Proves `saved.activations`.
    """
    assert activations([10, 20, 40]) == Moved(30, 10, 60)
    assert activations([10, 20, 40], keep=2) == Moved(10, 0, 70)
    assert activations([10, 20, 40], keep=5) == Moved(0, 0, 70)
    assert activations([0, 10, 0, 20, 40, 0]) == Moved(30, 10, 60)
    assert activations([]) == Moved(0, 0, 0)


def gpt(folder, rows, length, width, heads, dtype):
    """GPT-2's blocks: what the ledger says of a step"""
    # `wholes` has seen to it that this needs no other library.
    import transformers
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=width, n_head=heads, n_layer=4, vocab_size=50, n_positions=length, attn_pdrop=0.0,
        embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
        attn_implementation="eager")
    # More than the statistics of a norm and the ids of the tokens.
    where = Activations(Offload("nvme", folder), below_bytes=8 * rows * length + 1)
    model = wrap(transformers.GPT2LMHeadModel(config).to(dtype), GPT2Block, activations=where)
    ids = torch.randint(50, (rows, length))
    with Ledger(model) as tape:
        model(ids).logits.square().mean().backward()
    return tape.out_bytes, tape.in_bytes, moved(tape, "activations out")


@pytest.mark.parametrize("rows, length, width, heads, dtype", [
    (4, 32, 64, 4, torch.float32), (4, 64, 64, 4, torch.bfloat16), (2, 32, 128, 8, torch.float32)])
def test_a_block_of_gpt_2_saves_what_its_shapes_say(rows, length, width, heads, dtype, tmp_path):
    r"""
    In fp32, with $b$ rows of $s$ tokens, $d$ features and $a$ heads, a block of GPT-2 saves
    $4bs(28d + as)$ bytes: among them the scores of attention, $4abs^2$, once. In bf16 it is half of
    that. All four blocks leave, because the head comes after them, and three come back.
    Proves `wrap`, `saved.activations`, `gpt2_bytes`, `Forward.pack`.
    """
    saved = gpt2_bytes(4, width, heads, rows * length, length, dtype.itemsize)
    block = dtype.itemsize * rows * length * (28 * width + heads * length)
    assert saved == [block] * 4 + [2 * dtype.itemsize * rows * length * width]
    for out_bytes, in_bytes, leaving in run(gpt, 2, str(tmp_path), rows, length, width, heads,
                                            dtype):
        expected = activations(saved)
        assert leaving == [(f"{i}", block) for i in (1, 2, 3, 4)]
        assert (out_bytes, in_bytes) == (expected.out_bytes, expected.in_bytes)


class Watched(TorchDispatchMode):
    """
    After each operation, the bytes in memory of all storages that autograd has saved. What it
    saves is heard from `Forward.pack`, what comes back from `bring_back`.
    """

    def __init__(self, monkeypatch):
        super().__init__()
        self.refs = {}
        self.peak_bytes = 0
        pack, back = Forward.pack, bring_back

        def packed(forward, tensor):
            handle = pack(forward, tensor)
            if handle.stored is not None:
                self.watch(tensor)
            return handle

        def unpacked(handle):
            tensor = back(handle)
            if handle.stored is not None:
                self.watch(tensor)
            return tensor
        monkeypatch.setattr(Forward, "pack", packed)
        monkeypatch.setattr("zero3.offload.activations.bring_back", unpacked)

    def watch(self, tensor):
        storage = tensor.untyped_storage()
        self.refs[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.look()

    def look(self):
        self.refs = {key: ref for key, ref in self.refs.items() if not ref[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self.refs.values()))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.look()
        return out


def wait_for_files(to_file):
    """Until nothing is on its way to a file or from it: nobody waits for what nobody reads again"""
    for file in to_file.to.in_use["activations"].files:
        concurrent.futures.wait(file.moving)


@pytest.mark.parametrize("keep", [1, 2])
def test_at_most_the_last_calls_are_in_memory(keep, tmp_path, monkeypatch):
    """
    Counted over all storages that autograd saves: forward holds exactly what the formula says, and
    backward as much, with the room in which a read finds the beginning of a block. Otherwise all of
    it would be in memory. Breaks if anything refers to what has left.
    Proves `saved.activations`, `Copy.rest`, `Order.begin`, `Buffers.move`.
    """
    to_file = to_files(tmp_path, keep=keep)
    model = chain(to_file, layers=7)
    expected = activations([2 * ONE] * 7, keep).memory_bytes
    model(batch()).sum().backward()
    watched = Watched(monkeypatch)
    with watched:
        loss = model(batch()).sum()
    assert expected == 2 * ONE * (keep + 1) < 2 * ONE * 7
    # The caller has the batch until forward is over.
    assert watched.peak_bytes == expected + ONE
    # Backward needs what still leaves, and does not wait for it. A thread has it until it is
    # written, however long that takes.
    wait_for_files(to_file)
    watched.peak_bytes = 0
    with watched:
        loss.backward()
    # Two of the storages in memory have been read.
    assert expected <= watched.peak_bytes <= expected + 4 * 4096
    assert not watched.refs or all(ref.expired() for ref, _ in watched.refs.values())


def test_under_a_hard_limit_only_activations_in_files_train(tmp_path):
    """
    The limit is the system's, `RLIMIT_DATA`: 40 MiB more than the process has when the model is
    there. Each of 16 blocks saves 4 MiB. So a step takes more than 1.7 times the limit without
    files, and less than half of it with them. Freed memory goes back to the system at once, and the
    page cache does not count.
    Proves I1, `Activations`, `Copy.rest`, `Buffers`.
    """
    ((free, _, free_bytes),) = run(long_sequences, 1, None, None, fresh=True)
    assert free_bytes > 1.7 * STEP_BYTES
    (error,) = run(long_sequences, 1, None, STEP_BYTES, fresh=True)
    assert "can't allocate memory" in error
    ((losses, out_bytes, grown_bytes),) = run(long_sequences, 1, str(tmp_path), STEP_BYTES,
                                              fresh=True)
    assert losses == free and free[1] < free[0]
    assert out_bytes == 16 << 22 and grown_bytes < STEP_BYTES / 2


def moved_on_disk():
    """Bytes that the system has written and read on a disk for this process"""
    with open("/proc/self/io") as io:
        counts = dict(line.split(": ") for line in io)
    return int(counts["write_bytes"]), int(counts["read_bytes"])


@pytest.mark.parametrize("rows, blocks", [(32, 2), (33, 3), (1000, 63)])
def test_the_system_counts_the_bytes_of_the_formula_on_the_disk(rows, blocks, tmp_path):
    """
    Five layers save two activations each, of `rows` times 256 bytes, in whole blocks of 4,096. Four
    leave and three come back. The system counts the same blocks, and the ledger their bytes. The
    first step makes the files. Now and then the system counts a block of the file system's own,
    but not in each of five steps. Breaks if anything is written twice, or through the page cache.
    Proves `saved.activations`, `Visit.leave`, `Buffers.move`, `Copy.come`.
    """
    if None in measure(tmp_path, 8 << 20, True, 1 << 20, 2):
        pytest.skip("the tests' folder is not on a disk, or only through the page cache")
    to_file = to_files(tmp_path)
    model = chain(to_file)
    x = torch.ones(rows, WIDTH)
    counts = []
    with Ledger(model) as tape:
        for _ in range(6):
            model(x).sum().backward()
            wait_for_files(to_file)
            counts.append(moved_on_disk())
    steps = [(then[0] - first[0], then[1] - first[1])
             for first, then in itertools.pairwise(counts)]
    on_disk = activations([2 * 4096 * blocks] * 5)
    assert min(out_bytes for out_bytes, _ in steps) == on_disk.out_bytes
    assert min(in_bytes for _, in_bytes in steps) == on_disk.in_bytes
    expected = activations([2 * 4 * WIDTH * rows] * 5)
    assert (tape.out_bytes, tape.in_bytes) == (6 * expected.out_bytes, 6 * expected.in_bytes)
    assert rows != 32 or expected == on_disk


class WithBuffer(nn.Module):
    """A large weight, and a mask in a buffer, which autograd saves"""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 50 * WIDTH)
        self.down = nn.Linear(50 * WIDTH, WIDTH, bias=False)
        self.register_buffer("mask", torch.ones(ROWS, WIDTH))

    def forward(self, x):
        with torch.no_grad():
            small = self.up(x)
        return self.down(small) + x * self.mask


def test_parameters_and_buffers_stay(tmp_path):
    """
    The layer holds them anyway. Breaks if the large weights are written to a file in every step.
    Proves `Forward.pack`, `bring_back`.
    """
    model = chain(to_files(tmp_path), 3, WithBuffer)
    with Ledger(model) as tape:
        model(batch().requires_grad_()).sum().backward()
    assert {nbytes for _, nbytes in moved(tape, "activations out")} == {50 * ONE}


def test_a_weight_of_another_unit_stays(tmp_path):
    """
    Of four layers, the second one uses the weight of the first. Breaks if a unit takes the
    parameters of others for activations.
    Proves `Forward.pack`, `wrap`.
    """
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    layers[1].weight = layers[0].weight
    model = wrap(nn.Sequential(*layers), nn.Linear, activations=to_files(tmp_path))
    for _ in range(2):
        with Ledger(model) as tape:
            model(batch()).sum().backward()
        assert moved(tape, "activations out") == [("1", ONE), ("2", ONE), ("3", ONE)]


class Reads(nn.Module):
    """Ends with the weight of a module that is not inside"""

    def __init__(self, outside):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.outside = [outside]

    def forward(self, x):
        return nn.functional.linear(self.up(x), self.outside[0].weight).tanh()


class Borrows(nn.Sequential):
    """Begins with the weight of its first layer"""

    def forward(self, x):
        return super().forward(nn.functional.linear(x, self[0].weight))


@pytest.mark.parametrize("lends", ["the root", "a unit that the root uses"])
def test_a_weight_that_is_open_already_stays(lends, tmp_path):
    """
    Two units read a weight of the root, or of the unit before them that the root also uses. It is
    open when they come, so nobody notes that they use it. Breaks if they take it for an activation:
    the third forward would free memory that is in flight.
    Proves `Forward.pack`, `wrap`.
    """
    first = nn.Linear(WIDTH, WIDTH)
    layers = [first, Reads(first), Reads(first)]
    if lends == "the root":
        model = wrap(nn.Sequential(*layers), Reads, activations=to_files(tmp_path))
    else:
        model = wrap(Borrows(*layers), (Reads, nn.Linear), activations=to_files(tmp_path))
    for _ in range(3):
        with Ledger(model) as tape:
            loss = model(batch()).sum()
    loss.backward()
    assert {nbytes for _, nbytes in moved(tape, "activations out")} <= {ONE, 2 * ONE, 3 * ONE}


def test_small_storages_stay(tmp_path):
    """
    By default below a quarter of a MiB.
    Proves `Activations`.
    """
    model = chain(Activations(Offload("nvme", tmp_path)))
    for rows, out_bytes in ((1023, 0), (1024, 8 * 1024 * WIDTH * 4)):
        with Ledger(model) as tape:
            model(torch.ones(rows, WIDTH)).sum().backward()
        assert tape.out_bytes == out_bytes


class Tanh(nn.Module):
    """Saves its output, which the next layer saves as its input"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).tanh()


def test_an_output_that_the_next_layer_saves_is_moved_once(tmp_path):
    """
    It leaves with the layer that needs it last in forward, so the last layer's input stays. Breaks
    if it is written by both, or if backward has to read it at once.
    Proves `Forward`, `Visit.add`.
    """
    model = chain(to_files(tmp_path), 4, Tanh)
    with Ledger(model) as tape:
        model(batch()).sum().backward()
    assert moved(tape, "activations out") == [("0", ONE), ("1", ONE), ("2", ONE)]
    assert moved(tape, "activations in") == [("1", ONE), ("0", ONE)]


class Recomputed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.block = Block()
        self.reentrant = reentrant

    def forward(self, x):
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_a_checkpoint_inside_the_layer_only_its_input_is_moved(reentrant, tmp_path):
    """
    DeepSpeed's checkpoint offload. Breaks if the recomputation writes what backward reads at once.
    Proves `LayerActivations`.
    """
    found = []
    for where in (None, to_files(tmp_path)):
        model = chain(where, 4, lambda: Recomputed(reentrant))
        with Ledger(model) as tape:
            model(batch().requires_grad_()).sum().backward()
        found.append(grads(model))
    assert equal(*found)
    assert moved(tape, "activations out") == [("0", ONE), ("1", ONE), ("2", ONE)]
    assert moved(tape, "activations in") == [("1", ONE), ("0", ONE)]


def test_a_checkpoint_around_layers_goes_on_saving_nothing(tmp_path):
    """
    Its own hooks drop what the layer saves, and ours would take their place.
    Proves `LayerActivations`.
    """
    model = chain(to_files(tmp_path), 4)
    with Ledger(model) as tape:
        checkpoint(model, batch().requires_grad_(), use_reentrant=False).sum().backward()
    assert tape.out_bytes == tape.in_bytes == 0


@pytest.mark.parametrize("where", ["cpu", "device", Offload("cpu")])
def test_on_the_cpu_the_cpu_tier_keeps_activations_where_they_are(where):
    """
    There is no other memory to move them to.
    Proves `Activations.moves_from`.
    """
    model = chain(where)
    with Ledger(model) as tape:
        model(batch()).sum().backward()
    assert tape.out_bytes == 0 and not order.visits


def test_without_gradients_nothing_is_watched(tmp_path):
    """
    Proves `LayerActivations`.
    """
    model = chain(to_files(tmp_path))
    with Ledger(model) as tape, torch.no_grad():
        model(batch())
    assert tape.out_bytes == 0 and not order.visits and not list(tmp_path.iterdir())


def test_a_layer_is_read_while_the_layer_above_goes_backward(tmp_path):
    """
    The read of layer 1 begins after backward has reached layer 2, and before it has left it.
    Proves `Order.enter`.
    """
    model = chain(to_files(tmp_path))
    with Ledger(model) as tape:
        model(batch()).sum().backward()
    happened = [(e.layer.split()[1], e.event) for e in tape.events if e.phase == "backward"]
    for i in (3, 2, 1):
        begins = happened.index((f"{i}", "compute"))
        over = happened.index((f"{i}", "reduce"))
        assert begins < happened.index((f"{i - 1}", "activations in")) < over


# ------------------------------------------------------------------------------ compiled models


def compiled(where, backend="aot_eager", layers=5, make=Block):
    torch.compiler.reset()
    torch.manual_seed(0)
    return zero3.compile(nn.Sequential(*(make() for _ in range(layers))), backend=backend,
                         bucket_bytes=0, activations=where)


@pytest.fixture
def fresh_compiler():
    yield
    # What it has compiled would keep models alive.
    torch.compiler.reset()


def graphs_and_hooks(folder, names, wholes_, does):
    """Models of the compiler's tests, with files: what is different between hooks and graphs"""
    where = to_files(folder)
    found = test_compiler.models(names, activations=where)
    found |= test_compiler.wholes(wholes_, activations=where)
    for each in does:
        torch.manual_seed(0)
        pair = pair_of(Stack(depth=2), compiler_models.Block, activations=where)
        found[each] = compare(pair, getattr(test_compiler, each))
    gc.collect()
    return found, len(order.visits), len(order.known)


def test_compiled_models_have_the_same_bits_with_their_activations_in_files(tmp_path):
    """
    Graphs that end early, layers that Dynamo cannot trace, tied weights, recomputation, a graph
    that goes backward twice, frozen layers, `full_params`. Breaks if a tensor is
    loaded for another one, or if a layer that runs with hooks gets a token.
    Proves I1, `compile`, `move_activations`, `CompiledUnit.put_away`,
    `CompiledUnit.bring`.
    """
    names = ("breaks", "recurrent", "checkpoints")
    wholes_ = ("Tied", "RecomputedInOne")
    does = ("sync", "freeze", "whole_around")
    for found, visits, known in run(graphs_and_hooks, 2, str(tmp_path), names, wholes_, does):
        assert found == dict.fromkeys((*names, *wholes_, *does), "")
        assert visits == known == 0


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_ledger_of_a_compiled_model_counts_what_the_formula_says(backend, tmp_path, monkeypatch,
                                                                    fresh_compiler):
    """
    The same as with hooks: each layer but the last one leaves once, and at most two are in memory,
    in forward, and in backward with the room in which a read finds the beginning of a block. The
    gradients are those of the graphs without files. Breaks if a tensor leaves with the layer that
    makes it, and not with the one that reads it last.
    Proves `move_activations`, `_wait_before`, `_bring`, `CompiledUnit.put_away`.
    """
    plain = compiled(None, backend)
    plain(batch()).square().mean().backward()
    model = compiled(to_files(tmp_path), backend)
    expected = activations([2 * ONE] * 5)
    # The first step compiles.
    for _ in range(2):
        with Ledger(model) as tape:
            model(batch()).square().mean().backward()
        assert (tape.out_bytes, tape.in_bytes) == (expected.out_bytes, expected.in_bytes)
        assert [nbytes for _, nbytes in moved(tape, "activations out")] == [2 * ONE] * 4
        assert equal(grads(plain), grads(model))
        model.zero_grad()
    watched = Watched(monkeypatch)
    loss = model(batch()).square().mean()
    # The caller has the batch until forward is over.
    assert expected.memory_bytes <= watched.peak_bytes <= expected.memory_bytes + ONE
    watched.peak_bytes = 0
    loss.backward()
    assert watched.peak_bytes <= expected.memory_bytes + 4 * 4096
    assert not order.visits


def test_a_compiled_graph_that_is_dropped_frees_its_activations(tmp_path, fresh_compiler):
    """
    A token keeps its handle, and nothing else does.
    Proves `CompiledUnit.put_away`, `CompiledModel`.
    """
    model = compiled(to_files(tmp_path))
    y = model(batch())
    assert len(order.visits) == 5
    del y
    assert not order.visits and not order.known


def test_an_input_that_was_changed_after_a_compiled_forward_is_an_error(tmp_path, fresh_compiler):
    """
    Proves `CompiledUnit.bring`.
    """
    model = compiled(to_files(tmp_path))
    x = batch()
    loss = model(x).sum()
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ------------------------------------------------------------------------- what autograd allows


class Views(nn.Module):
    """Saves views of one storage: turned, sliced, repeated, of another data type, conjugated"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.linear(x) * 1
        left, right = y.chunk(2, dim=1)
        turned = left.t() @ right[3:].narrow(0, 0, 5).repeat(7, 1)[:ROWS]
        repeated = y[:1].expand(ROWS, WIDTH) * y
        waves = torch.view_as_complex(y.view(ROWS, WIDTH // 2, 2))
        spread = (waves.conj() * waves).real.sum(1, keepdim=True)
        coarse = y.bfloat16().tanh().float() + y.masked_fill(y > 0, 1)
        return (repeated + turned.sum() + spread + coarse).sin()


def test_each_view_of_a_storage_is_what_it_was(tmp_path):
    """
    Breaks if a view is rebuilt with another offset, stride or data type, or if a conjugated one
    loses its sign.
    Proves `Handle`, `Forward.pack`.
    """
    found = []
    for where in (None, to_files(tmp_path)):
        model = chain(where, make=Views)
        with Ledger(model) as tape:
            model(batch()).square().mean().backward()
        found.append(grads(model))
    assert equal(*found) and tape.in_bytes > 0 and found[0][0].any()


def test_memory_that_somebody_frees_and_fills_again_stays(tmp_path):
    """
    Compressed weights are freed between forward and backward, by resizing. Breaks if a thread
    reads such memory, or if backward gets what it held before.
    Proves `Copy.can_leave`.
    """
    found = []
    for where in (None, to_files(tmp_path)):
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        compress(layers, {f"{i}": [Prune(0.5)] for i in range(4)})
        model = Zero3Sequential([Zero3Layer(layer, activations=where) for layer in layers])
        with Ledger(model) as tape:
            model(batch().requires_grad_()).square().sum().backward()
        found.append(grads(model))
    assert equal(*found)
    # The inputs leave, and no weight.
    assert {nbytes for _, nbytes in moved(tape, "activations out")} == {ONE}


def test_a_kept_graph_goes_backward_as_often_as_it_is_asked(tmp_path):
    """
    The second pass reads the files again, also the layer that did not have to be read before.
    Proves `Visit.rest`, `Copy.rest`, `Copy.come`, `Copy.here`.
    """
    found = []
    for where in (None, to_files(tmp_path)):
        model = chain(where)
        with Ledger(model) as tape:
            loss = model(batch()).sum()
            loss.backward(retain_graph=True)
            loss.backward()
        found.append(grads(model))
    assert equal(*found)
    assert tape.out_bytes == 8 * ONE
    assert [name for name, _ in moved(tape, "activations in")] == [*"210", *"3210"]


@pytest.mark.parametrize("first", [0, 1])
def test_two_graphs_go_backward_in_any_order(first, tmp_path):
    """
    Proves `Order.begin`, `Order.enter`.
    """
    found = []
    for where in (None, to_files(tmp_path)):
        model = chain(where)
        losses = [model(batch(i)).square().mean() for i in (0, 1)]
        losses.pop(first).backward()
        losses.pop().backward()
        found.append(grads(model))
    assert equal(*found) and not order.visits


def test_a_graph_that_is_dropped_frees_its_memory_and_its_files(tmp_path):
    """
    By counting references alone: the collector of cycles is off.
    Proves `Shelf`, `Order`, `Copy`, `Visit`.
    """
    model = chain(to_files(tmp_path))
    files = model.module_list[0].saving.activations.to
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            y = model(batch())
            assert len(order.visits) == 5
            del y
            assert not order.visits and not order.known
            # Four calls left, and their files wait for the next ones.
            assert len(files.in_use["activations"].idle) == 4
            assert not in_flight.users
    finally:
        gc.enable()


class Gated(nn.Module):
    """Saves a small result of sigmoid besides what `Block` saves"""

    def __init__(self):
        super().__init__()
        self.block = Block()
        self.gate = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.block(x) * self.gate(x).sigmoid()


def test_a_graph_that_is_dropped_frees_the_results_that_stay(tmp_path):
    """
    Autograd saves the result of sigmoid, and the result refers to the graph. Breaks if its handle
    refers to it too: no collector sees this cycle, and memory and files are lost in each forward.
    Proves `Forward.pack`, `Handle`.
    """
    model = chain(to_files(tmp_path, below_bytes=ONE), make=Gated)
    files = model.module_list[0].saving.activations.to
    y = model(batch())
    assert len(order.visits) == 5
    del y
    gc.collect()
    assert not order.visits and not order.known
    # Four calls left, and their files wait for the next ones.
    assert len(files.in_use["activations"].idle) == 4


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).tanh().add_(1)


def written_inside(model):
    return model(batch())


def written_outside(model):
    found = []
    x = batch()
    for layer in model.walk():
        x = layer(x)
        found.append(x)
    with torch.no_grad():
        found[0].add_(1)
    return x


@pytest.mark.parametrize("make, write", [(Writes, written_inside), (Tanh, written_outside)])
def test_a_saved_tensor_that_was_changed_is_torchs_error(make, write, tmp_path):
    """
    Inside the layer, and after its copy has left. Breaks if backward computes with the old values,
    or with the new ones.
    Proves `bring_back`.
    """
    said = []
    for where in (None, to_files(tmp_path)):
        model = chain(where, make=make)
        with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
            write(model).sum().backward()
        said.append(str(caught.value))
    for part in ("one of the variables needed for gradient computation has been modified by an "
                 "inplace operation: [torch.FloatTensor [32, 64]], ", "is at version 1; expected "
                 "version 0 instead"):
        assert part in said[0] and part in said[1]
    assert "saved by layer" in said[1]


def test_a_parameter_that_was_changed_is_an_error_too(tmp_path):
    """
    It stays, and hooks of ours stand before torch's own check.
    Proves `bring_back`.
    """
    model = chain(to_files(tmp_path))
    loss = model(batch()).sum()
    with torch.no_grad():
        model.get_trainable_chunk()[0].add_(1)
    with pytest.raises(RuntimeError, match="cannot go backward"):
        loss.backward()


def test_double_backward_is_refused_as_without(tmp_path):
    """
    Proves `LayerGuard.before_backward`.
    """
    model = chain(to_files(tmp_path))
    x = batch().requires_grad_()
    with pytest.raises(RuntimeError, match="cannot go backward twice"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)


def test_a_gradient_penalty_in_full_params_has_the_same_bits(tmp_path):
    """
    There a second backward pass is allowed, and it walks the graph of the first one.
    Proves `bring_back`, `Forward.pack`.
    """
    found = []
    for where in (None, to_files(tmp_path)):
        model = chain(where)
        x = batch().requires_grad_()
        with model.full_params() as params, Ledger(model) as tape:
            (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), [*params.values()],
                                             allow_unused=True))
        assert tape.out_bytes == (8 * ONE if where else 0)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True) if a is not None)


class Transforms(nn.Module):
    """Computes with a transform of `torch.func`"""

    def __init__(self, transform):
        super().__init__()
        self.block = Block()
        self.transform = transform

    def forward(self, x):
        return self.transform(self.block(x), self.block)


def waves(y):
    return y.sin() * y


@pytest.mark.parametrize("transform", [
    lambda y, _: torch.func.vmap(waves)(y),
    lambda y, _: torch.func.jvp(waves, (y,), (y.cos(),))[1],
    lambda y, _: torch.func.vmap(torch.func.jacfwd(waves))(y[:, :2]).sum((1, 2)).unsqueeze(1) * y,
    lambda y, block: torch.func.functional_call(block, dict(block.named_parameters()), (y,))])
def test_forward_transforms_in_a_layer_have_the_same_bits(transform, tmp_path):
    """
    `vmap`, `jvp`, `jacfwd` and `functional_call` save plain tensors.
    Proves `Forward.pack`.
    """
    found = []
    for where in (None, to_files(tmp_path)):
        model = chain(where, make=lambda: Transforms(transform))
        with Ledger(model) as tape:
            model(batch()).square().mean().backward()
        found.append(grads(model))
    assert equal(*found) and tape.in_bytes > 0 and found[0][0].any()


@pytest.mark.parametrize("transform", [
    lambda y, _: torch.func.grad(lambda z: waves(z).sum())(y),
    lambda y, _: torch.func.vjp(waves, y)[1](y)[0]])
def test_backward_transforms_in_a_layer_are_torchs_error(transform, tmp_path):
    """
    torch allows no hooks on what they save. Nothing is left behind, and a layer without
    `activations=` may do it beside others.
    Proves `LayerActivations`.
    """
    model = chain(to_files(tmp_path), make=lambda: Transforms(transform))
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks") as caught:
        model(batch())
    del caught
    gc.collect()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not order.visits and not order.known
    found = []
    for where in (None, to_files(tmp_path)):
        torch.manual_seed(0)
        places = (where, None, where, where)
        makes = (Block, lambda: Transforms(transform), Block, Block)
        model = Zero3Sequential([Zero3Layer(make(), activations=place)
                                 for make, place in zip(makes, places, strict=True)])
        with Ledger(model) as tape:
            model(batch()).square().mean().backward()
        found.append(grads(model))
    assert equal(*found) and tape.in_bytes > 0


class Fails(nn.Module):
    fails = False

    def __init__(self):
        super().__init__()
        self.block = Block()

    def forward(self, x):
        y = self.block(x)
        if self.fails:
            raise KeyError("on purpose")
        return y


def test_after_an_exception_in_a_layer_the_next_step_is_the_same(tmp_path):
    """
    The hooks are gone, and so is what had been saved.
    Proves `LayerActivations`.
    """
    model = chain(to_files(tmp_path), make=Fails)
    model(batch()).sum().backward()
    before = grads(model)
    model.zero_grad()
    model.module_list[3].module.fails = True
    with pytest.raises(KeyError, match="on purpose"):
        model(batch())
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert not order.visits and not order.known
    model.module_list[3].module.fails = False
    model(batch()).sum().backward()
    assert equal(grads(model), before)


# --------------------------------------------------------------------------------------- the files


def test_files_are_used_again_if_they_are_large_enough(tmp_path):
    """
    Four calls leave, so there are four files, as large as the largest batch so far needs.
    Proves `Buffers.__init__`, `Offload.buffers_for`, `Buffers.take`, `Shelf`,
    `Offload.disk_bytes`, `Buffers.make_file`.
    """
    model = chain(to_files(tmp_path))
    files = model.module_list[0].saving.activations.to
    for rows, most in ((ROWS, ROWS), (ROWS, ROWS), (ROWS // 2, ROWS), (3 * ROWS, 3 * ROWS),
                       (ROWS, 3 * ROWS)):
        model(torch.ones(rows, WIDTH)).sum().backward()
        assert files.disk_bytes() == 4 * 2 * most * WIDTH * 4
    # They have no names.
    assert not list(tmp_path.iterdir())


def test_a_file_is_used_again_only_after_its_writer(tmp_path, monkeypatch):
    """
    A graph is dropped while a thread has still to write its activations. The next call takes the
    same file, and waits. Breaks if the late bytes overwrite those of the new call.
    Proves `Buffers.take`, `Shelf`.
    """
    model = chain(to_files(tmp_path), 2)
    files = model.module_list[0].saving.activations.to
    model(batch(0)).sum().backward()
    expected = grads(model)
    model.zero_grad()
    buffers: Buffers = files.in_use["activations"]
    real, gate = File.move, threading.Event()

    def move(file, write, *where):
        # A file of an earlier test may leave meanwhile.
        if write and file in buffers.files:
            gate.wait(20)
        real(file, write, *where)
    monkeypatch.setattr(File, "move", move)
    model(batch(1))
    assert len(buffers.idle) == 1 and any(not block.done() for block in buffers.idle[0].moving)
    threading.Timer(0.2, gate.set).start()
    loss = model(batch(0)).sum()
    assert gate.is_set() and len(buffers.files) == 1
    loss.backward()
    assert equal(grads(model), expected)


def _full_disk():
    # 1 MiB, and the first call of this batch needs a little more.
    torch.manual_seed(0)
    model = chain(Activations(Offload("nvme", ".", block_bytes=4096), below_bytes=0), 7)
    expected = grads_of(chain(None, 7))
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(65 * ROWS, WIDTH))
    told = str(caught.value)
    # The traceback refers to the graph.
    del caught
    gc.collect()
    assert told.startswith("rank 0: layer 0 (Block) has no room for its activations. Expected: "
                           "1,064,960 bytes in .. Got: [Errno 28] No space left on device."), told
    assert "free some space" in told
    assert not order.visits and not order.known
    # Nothing is lost: a smaller batch trains on.
    assert equal(grads_of(model), expected)


def grads_of(model):
    model(batch()).sum().backward()
    return grads(model)


def test_a_full_disk_is_an_error_and_nothing_is_lost():
    """
    It names the layer, the bytes and the folder.
    Proves `Visit.leave`, `Buffers.take`.
    """
    on_a_small_disk(_full_disk)


def faulty(folder, fault, dims=None):
    where = to_files(folder)
    model = chain(where, mesh=dims and init_device_mesh("cpu", (2, 1), mesh_dim_names=dims))
    model(batch()).sum().backward()
    model.zero_grad()
    buffers = where.to.in_use["activations"]
    try:
        if fault == "full" and dist.get_rank() == 1:
            buffers.idle.clear()

            def make_file(nbytes):
                raise OSError(28, "No space left on device")
            buffers.make_file = make_file
        loss = model(batch()).sum()
        if fault == "cut" and dist.get_rank() == 1:
            for file in buffers.files:
                os.ftruncate(file.fd, 100)
        loss.backward()
        # A rank hears of it at the latest when it waits for the other one.
        model(batch())
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("fault, told", [
    ("cut", "could not read its activations. Expected: 8,192 bytes in "),
    ("full", "layer 0 (Block) has no room for its activations. Expected: 16,384 bytes in ")])
def test_a_faulty_disk_of_one_rank_is_an_error_on_both(fault, told, tmp_path):
    """
    A short read is not taken for whole, and the other rank does not wait for ever.
    Proves `Copy.here`, `Buffers.wait`, `Visit.leave`, `Communicator.fail`.
    """
    # A rank that has a node or a replica to itself has to tell the others, too.
    for dims in (None, ("nodes", "shard"), ("replicate", "shard")):
        zeros, ones = run(faulty, 2, str(tmp_path), fault, dims)
        assert told in ones and str(tmp_path) in ones
        assert "on rank 1" in zeros


@pytest.mark.parametrize("options, told", [
    ({"below_bytes": -1}, "`below_bytes`, a whole number of at least 0. Got: -1"),
    ({"keep": 0}, "`keep`, a whole number of at least 1. Got: 0"),
    ({"offload": "nvme"}, "a folder with the nvme tier"),
    ({"offload": "moon"}, "a tier of")])
def test_options_that_cannot_work_are_refused(options, told):
    """
    Proves `Activations`.
    """
    with pytest.raises(ValueError, match=told):
        Activations(**options)
    if "offload" in options:
        with pytest.raises(ValueError, match=told):
            Zero3Layer(nn.Linear(2, 2), activations=options["offload"])


# ------------------------------------------------------------------------------- an accelerator


def on_a_device(where, keep_graph=False, fails=False):
    """Two steps on an accelerator that is not there: gradients, the tape, and what it found"""
    def fail(_):
        raise KeyError("on purpose")

    real = Copy._copy

    def named(copy, stream, to, memory):
        device.name(memory, "an activation")
        real(copy, stream, to, memory)

    with Accelerator() as device, mock.patch.object(Copy, "_copy", named):
        model = chain(where)
        for i in range(2):
            with Ledger(model) as tape:
                loss = model(batch(i)).sum()
                loss.backward(retain_graph=keep_graph)
                if keep_graph:
                    loss.backward()
                del loss
        found = grads(model)
        if fails:
            # While layer 2 is read.
            with pytest.raises(KeyError, match="on purpose"):
                x = batch()
                for i, layer in enumerate(model.walk()):
                    x = layer(x)
                    if i == 2:
                        x.register_hook(fail)
                x.sum().backward()
            del x
        # A graph that is dropped while copies are in flight.
        model(batch())
    return found, tape, device


@pytest.mark.parametrize("keep_graph", [False, True])
def test_on_an_accelerator_copies_are_ordered_and_nothing_waits_on_the_host(keep_graph):
    """
    To pinned memory and back, beside the compute stream. Nothing reads an activation before it is
    back, and nobody gets the memory of one before it has been copied. Breaks without any of the
    waits in the table of `Copy`.
    Proves `Copy`, `Copy.leave`, `Copy.rest`, `Copy.come`,
    `Copy.here`, I9.
    """
    plain, _, device = on_a_device(None, keep_graph)
    waits = Counter(device.waits)
    found, tape, device = on_a_device(Activations("cpu", below_bytes=0), keep_graph)
    assert equal(plain, found)
    assert tape.out_bytes == 8 * ONE
    assert device.problems == []
    assert Counter(device.waits) == waits
    # Each copy may run beside something that computes.
    computes = [op for op in device.log if op.line == "compute" and op.what != "copy_"]
    copies = [op for op in device.log if op.what == "copy_" and "an activation" in op.names]
    assert len(copies) == 3 * 8 + 2 * (14 if keep_graph else 6)
    for one in copies:
        assert any(not before(one, other) and not before(other, one) for other in computes)


@pytest.mark.parametrize("keep_graph", [False, True])
def test_from_an_accelerator_to_files(keep_graph, tmp_path):
    """
    Through pinned memory, both ways, in the order that the table of `Copy` says.
    Proves `Buffers.start`, `Buffers.move`, `Copy.here`.
    """
    plain, _, _ = on_a_device(None, keep_graph)
    found, tape, device = on_a_device(to_files(tmp_path), keep_graph, fails=True)
    assert equal(plain, found)
    assert (tape.out_bytes, tape.in_bytes) == (8 * ONE, (14 if keep_graph else 6) * ONE)
    assert device.problems == [] and device.checks


@pytest.mark.parametrize("name", ["rest", "here", "__del__"])
def test_each_wait_that_is_left_out_is_found(name, monkeypatch):
    """
    The test above would see it.
    Proves `Copy.rest`, `Copy.here`.
    """
    real = getattr(Copy, name)

    def without(copy):
        with monkeypatch.context() as patch:
            patch.setattr(Line, "wait_event", lambda *_: None)
            return real(copy)
    monkeypatch.setattr(Copy, name, without)
    _, _, device = on_a_device(Activations("cpu", below_bytes=0))
    assert device.problems


def without_threads(copy, event):
    """`Copy._end`, but it waits for no thread"""
    copy.moving = []
    if copy.event is not None:
        copy.comm.current_stream().wait_event(copy.event)
        copy.event = None


def nobody_waits(*_):
    pass


@pytest.mark.parametrize("where, left_out, told", [
    ((Buffers, "move"), (Event, "synchronize", nobody_waits),
     "copy_ on disk reads memory before copy_ on stream"),
    ((Copy, "rest"), (Copy, "_end", without_threads),
     "the read of an activation on reader reads memory before the write of an activation on disk"),
    ((Copy, "here"), (Copy, "_end", without_threads),
     "reads an activation before the read of an activation on reader is done"),
    ((Copy, "_to_device"), (Line, "wait_stream", nobody_waits),
     "writes memory before tanh_backward, in memory that was freed then, on compute is done"),
    ((Buffers, "take"), (concurrent.futures, "wait", nobody_waits),
     "the write of an activation on disk writes memory before the read of an activation"),
])
def test_each_wait_on_the_way_to_files_that_is_left_out_is_found(where, left_out, told, tmp_path,
                                                                 monkeypatch):
    """
    In this order: a thread writes to the file what has not been copied, reads what has not been
    written, copies to the device what has not been read, and into memory that somebody still uses;
    and a file gets the activations of the next call, while it is read for one that was dropped.
    Proves `Copy.rest`, `Copy.here`, `Buffers.move`, `Buffers.take`.
    """
    real = getattr(*where)

    def without(*args):
        with monkeypatch.context() as patch:
            patch.setattr(*left_out)
            return real(*args)
    monkeypatch.setattr(*where, without)
    _, _, device = on_a_device(to_files(tmp_path), fails=True)
    assert any(told in problem for problem in device.problems), device.problems

"""
# Links: nodes, secondary shards, encodings between ranks

The oracle is plain PyTorch on the global batch. Where numbers are rounded on their way, plain
PyTorch computes with the rounded ones.
"""

import copy
import math
import os
from collections import Counter
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.cases import CASES, difference, linear
from tests.comm.test_groups import (
    STEPS,
    Counts,
    batch,
    diverging_on,
    layers,
    load_on,
    mesh_of,
    message,
    same,
    save_on,
    sharded,
    trained_on,
    weights,
    whole_on,
)
from tests.ranks import run
from tests.streams import Accelerator
from tests.test_native import collectives
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.comm.encodings import Int4, Int8
from zero3.comm.links import LinkedCommunicator, Links
from zero3.estimate.ledger import Ledger
from zero3.sharded import communicator


class Same:
    """An encoding that loses nothing of fp32."""

    def nbytes(self, numel):
        return 4 * numel

    def encode(self, rows):
        return rows.float().contiguous().view(torch.uint8)

    def decode(self, coded, numel):
        return coded.contiguous().view(torch.float32)


@contextmanager
def node_size(ranks):
    """Nodes of so many ranks, as torchrun tells them."""
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(ranks)}):
        yield


# ------------------------------------------------------------------------------------------- nodes


def trained_on_nodes(shape, names, folder, native, secondary):
    return trained_on(Links(mesh_of(shape), secondary=secondary), names, folder, native)


@pytest.mark.parametrize("shape, native, secondary", [
    *product([(2, 2)], [False, True], [False, True]),
    *((shape, native, not native) for shape in [(2, 1), (3, 1), (1, 2)]
      for native in (False, True))])
def test_nodes_train_like_plain_pytorch_on_the_global_batch(shape, native, secondary, tmp_path):
    """
    Every case by messages and by collectives, once with a copy in the node and once without, with
    torch's AdamW; and with `Zero3Optimizer` in each tier. Breaks where a row of a slice belongs to
    another rank, where a gradient is delivered before the nodes have added theirs, and where
    backward takes the slice of an earlier forward.
    Proves I1, I5, I7, I8, I9, `LinkedCommunicator.all_gather`, `LinkedCommunicator.reduce_scatter`,
    `LinkedCommunicator.exchange`, `Communicator.scatter`, `communicator`, `groups_of`,
    `_hop`, `_travelling`, `LinkedCommunicator._put`, `_slice`, `Transfer.go_on`, `_send_sums`.
    """
    names = [name for name in CASES if name not in ("DataTypes", "Library")]
    # Half of them with both or neither, and the other half with one of the two.
    names = names[secondary != native :: 2] if shape == (2, 2) else names[:6]
    answers = run(trained_on_nodes, math.prod(shape), shape, names, str(tmp_path), native,
                  secondary)
    for worst in answers:
        assert max(worst.values()) < 1e-10, worst


def whole_on_nodes(links, offload):
    """`wrap` on nodes: the difference from plain PyTorch, and tokens that it continues."""
    worst = whole_on(links(), offload)
    continues = wrap(Counts(), nn.Linear, mesh=links())
    ids = continues.generate(torch.tensor([[0]]), 5, eos_token_id=dist.get_rank() + 1)
    return worst, ids.tolist()


def two_nodes():
    return mesh_of((2, 2))


def with_copies():
    return Links(mesh_of((2, 2)), secondary=True)


def without_loss():
    return Links(mesh_of((2, 2)), Same(), Same(), secondary=True)


@pytest.mark.parametrize("links", [two_nodes, with_copies, without_loss])
def test_whole_models_train_on_nodes_and_continue_sequences(links):
    """
    Units of a whole model, one of them persistent, with micro-batches inside and outside of
    `no_sync`; sequences that end at another length on each rank. Breaks where a rank leaves while
    the other node still gathers.
    Proves I1, I7, `wrap`, `continue_tokens`, `LinkedCommunicator.__init__`.
    """
    bound = 1e-6 if links is without_loss else 1e-10
    for offload in (None, "cpu"):
        for rank, (worst, ids) in enumerate(run(whole_on_nodes, 4, links, offload)):
            assert worst < bound and ids == [[*range(rank + 2)]]


class Stack(nn.Module):
    """Layers of a chain that are computed again in backward."""

    def __init__(self, model, reentrant):
        super().__init__()
        self.model, self.reentrant = model, reentrant

    def forward(self, x):
        for layer in self.model.module_list:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def recomputed(secondary, reentrant):
    """Activation checkpointing: the difference from plain PyTorch, and the gathers of backward."""
    plain = nn.Sequential(*layers()).double()
    model = sharded(Links(mesh_of((2, 2)), secondary=secondary))
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    with node_size(2), Ledger(model) as tape:
        for step in range(STEPS):
            x, mine = (each.double() for each in batch(step))
            plain(x).square().mean().backward()
            optimizer.backward(Stack(model, reentrant)(mine.requires_grad_()).square().mean())
            for each in (sgd, optimizer):
                each.step()
                each.zero_grad()
    across = sum(e.between_bytes for e in tape.events if e.event == "fetch"
                 and e.phase == "backward")
    return difference(plain, model), across


def test_a_layer_that_is_computed_again_gathers_from_its_node():
    """
    With torch's ordinary checkpointing the recomputation finds the copy. The reentrant kind runs
    forward without gradients, which keeps none, so it gathers from the other node.
    Proves I1, I7, `LinkedCommunicator.all_gather`.
    """
    for secondary in (False, True):
        for reentrant in (False, True):
            for worst, across in run(recomputed, 4, secondary, reentrant):
                assert worst < 1e-10
                assert (across == 0) == (secondary and not reentrant)


def three_weights():
    """The rows of the table in the chapter's head, on this rank."""
    layer = nn.Linear(3, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0, 3.0]])
    layer = Zero3Layer(layer, mesh=Links(mesh_of((2, 2)), gradients=Same(), secondary=True))
    row = [[4, 8, 12], [8, 0, 4], [4, 0, 4], [0, 4, 0]][dist.get_rank()]
    (flat,) = layer.flats
    found = [flat.shard.tolist()]
    output = layer(torch.tensor([row], dtype=torch.float32))
    (kept,) = layer.comm.held_tensors()
    found.append(kept.view(-1).tolist())
    sums = []

    def exchange(comm, sender, each, real=LinkedCommunicator.exchange):
        sums.extend(each[0].tolist())
        return real(comm, sender, each)

    with mock.patch.object(LinkedCommunicator, "exchange", exchange):
        output.backward()
    return [*found, sums, flat.shard.grad.tolist()]


def test_the_example_of_the_head_runs_as_it_is_told():
    """
    Proves I1, `LinkedCommunicator`.
    """
    assert run(three_weights, 4) == [
        [[1], [1, 2], [3, 2], [4]], [[3], [3, 0], [4, 0], [5]],
        [[2], [1, 2], [1, 1], [3]], [[0], [3, 0], [1, 0], [0]]]


def stepped_in_between():
    """
    A forward whose backward never comes, a step, and a recomputation: the gradient of the input
    must be the new weight. Returns it, with the copies that are left.
    """
    layer = nn.Linear(1, 1, bias=False).double()
    layer.weight.data.fill_(2.0)
    layer = Zero3Layer(layer, mesh=Links(mesh_of((2, 1)), secondary=True))
    layer(torch.ones(1, 1).double())
    with torch.no_grad():
        layer.chunk[0].fill_(10.0)
    x = torch.ones(1, 1).double().requires_grad_()
    checkpoint(layer, x, use_reentrant=True).backward()
    return x.grad.item(), len([*layer.comm.held_tensors()])


def test_a_copy_is_never_older_than_the_weights():
    """
    Reentrant checkpointing runs forward without gradients, and keeps no copy itself. Breaks where
    backward takes the copy of a forward before the step.
    Proves I1, I2, `_forget`, `LinkedCommunicator.end_pass`, `Communicator.end_pass`.
    """
    assert run(stepped_in_between, 2) == [(10.0, 0)] * 2


# ------------------------------------------------------------------------------------------- bytes


def sent_on_nodes(shape, options, bucket_bytes):
    """Bytes of a step, and those between nodes, by event."""
    with node_size(shape[1]):
        links = Links(mesh_of(shape), **options)
        model = sharded(links, dtype=torch.float32)
        optimizer = Zero3Optimizer(model, bucket_bytes=bucket_bytes)
        optimizer.backward(model(batch(0)[1]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        sent, between = Counter(), Counter()
        with Ledger(model, optimizer) as tape:
            with torch.no_grad():
                model(batch(0)[1])
            kept = [*model.module_list[0].comm.held_tensors()]
            seen = len(tape.events)
            optimizer.backward(model(batch(0)[1]).square().mean())
            optimizer.step()
    for event in tape.events[seen:]:
        sent[event.phase, event.event] += event.sent_bytes
        between[event.phase, event.event] += event.between_bytes
    optimizer.zero_grad()
    return +sent, +between, len(kept), len([*model.module_list[0].comm.held_tensors()])


@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (2, 1)])
@pytest.mark.parametrize("options", [{}, {"secondary": True}, {"weights": Int8(2)},
                                     {"gradients": Int4(4)},
                                     {"secondary": True, "weights": Int8(), "gradients": Int4()}])
def test_a_step_on_nodes_sends_what_the_formulas_say(shape, options):
    """
    I4 on nodes, in all and between nodes. A shard enters each other node once; with a copy in the
    node, backward brings none. Nothing is kept without gradients, nor after the step. Breaks where
    a row enters a node twice, and where an encoding's scales are not counted.
    Proves I4, `LinkedCommunicator.all_gather`, `LinkedCommunicator.reduce_scatter`,
    `LinkedCommunicator.exchange`, `LinkedCommunicator.held_tensors`, `_all_to_all`, `_arrived`,
    `Communicator.held_tensors`, `Transfer.starting`, `Transfer.count`,
    `Group.far`, `node_of`, `Encoding`.
    """
    nodes, ranks = shape
    numels = [-(-sum(p.numel() for p in layer.parameters()) // (nodes * ranks))
              for layer in layers()]
    secondary = options.get("secondary", False)

    def row(kind, numel):
        return options[kind].nbytes(numel) if options.get(kind) else 4 * numel

    gathers = [row("weights", numel) for numel in numels]
    reduces = [row("gradients", numel) for numel in numels]
    inside, across = nodes * (ranks - 1), nodes - 1
    # The last layer stays full, so backward does not gather it.
    below = sum(gathers[:-1])
    norms = 8 * len(numels)
    sent = {("forward", "fetch"): (inside + across) * sum(gathers),
            ("backward", "fetch"): (inside + across * (not secondary)) * below,
            ("backward", "reduce"): inside * sum(reduces),
            ("backward", "exchange"): across * sum(reduces),
            ("step", "norm"): norms * (nodes * ranks - 1)}
    between = {("forward", "fetch"): across * sum(gathers),
               ("backward", "fetch"): across * below * (not secondary),
               ("backward", "exchange"): across * sum(reduces),
               ("step", "norm"): norms * across * ranks}
    for answer in run(sent_on_nodes, nodes * ranks, shape, options, 0):
        assert answer == (+Counter(sent), +Counter(between), 0, 0)


# --------------------------------------------------------------------------------------- encodings


def rounded(shape, first, gradients):
    """
    Train with rounded weights; plain PyTorch computes with the same ones, and updates exact ones.
    Each rank returns the difference, and whether a gather brought the same bits to all ranks.
    """
    links = Links(mesh_of(shape, first) if shape else None, Int8(4), gradients, first == "nodes")
    plain = nn.Sequential(*layers())
    exact = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model = sharded(links, dtype=torch.float32)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    worst = 0.0
    for step in range(STEPS):
        x, mine = batch(step)
        for i, layer in enumerate(model.module_list):
            for flat in layer.flats:
                full = torch.zeros(len(flat.full))
                for slot in flat.slots:
                    slot.of(full).copy_(exact[f"{i}.{slot.names[0]}"])
                rows = layer.comm.rows(full)
                near = Int8(4).decode(Int8(4).encode(rows), rows.shape[1]).reshape(-1)
                for slot in flat.slots:
                    plain.get_parameter(f"{i}.{slot.names[0]}").data.copy_(slot.of(near))
        plain(x).square().mean().backward()
        for name, p in plain.named_parameters():
            exact[name] -= 0.1 * p.grad
            p.grad = None
        optimizer.backward(model(mine).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        found = weights(model)
        worst = max(worst, *((found[name] - p).abs().max().item() for name, p in exact.items()))
    seen = model(batch(9)[0])
    return worst, seen.tolist()


@pytest.mark.parametrize("shape, first", [((2, 2), "nodes"), ((2, 2), "replicate"), (None, "")])
def test_rounded_weights_compute_and_exact_ones_are_updated(shape, first):
    """
    A forward and a backward pass see the rounded weights, the same bits on all ranks;
    `full_params()` and the update see the exact ones. Gradients go in an encoding without loss.
    Breaks where a rank computes with its own shard unrounded, and where a rounded weight is kept.
    Proves I1, `LinkedCommunicator.all_gather`, `Links`, `_arrived`, `_add_decoded`, `_sum_decoded`,
    `_send_sums`, `_add_in`.
    """
    count = math.prod(shape) if shape else 3
    answers = run(rounded, count, shape, first, Same())
    assert max(worst for worst, _ in answers) < 1e-5
    assert all(seen == answers[0][1] for _, seen in answers)


def gradients_of(links, native):
    """The gradient of each shard, and the bound on its error from the encodings of all ranks."""
    with collectives() if native else nullcontext():
        model = sharded(links, dtype=torch.float32)
    model(batch(0)[1]).square().mean().backward()
    return [shard.grad for shard in model.get_trainable_chunk()]


def errors_of(shape, first, encoding, native):
    """The largest error of a gradient, over the bound on it."""
    mesh = mesh_of(shape, first)
    exact = gradients_of(mesh, native)
    found = gradients_of(Links(mesh, gradients=encoding), native)
    unharmed = gradients_of(Links(mesh, gradients=Same()), native)
    for a, b in zip(exact, unharmed, strict=True):
        # A collective adds in an order of its own.
        assert torch.allclose(a, b) if native else torch.equal(a, b)
    # Each rank rounds what it sends by at most a share of its largest gradient, in two hops.
    largest = torch.stack([grad.abs().max() for grad in gradients_of(mesh, native)])
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    errors = [(a - b).abs().max().item() for a, b in zip(exact, found, strict=True)]
    return max(errors), largest.max().item()


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("shape, first", [((2, 2), "nodes"), ((2, 2), "replicate"),
                                          ((1, 3), "nodes"), ((3, 1), "nodes")])
def test_an_encoding_without_loss_changes_no_bit_of_a_gradient(shape, first, native):
    """
    The same sums in the same order; and `Int8` stays near them. Breaks where a part is added
    twice, or as it was before it was decoded.
    Proves `_all_to_all`, `_add_decoded`, `_sum_decoded`, `LinkedCommunicator.reduce_scatter`.
    """
    for error, largest in run(errors_of, math.prod(shape), shape, first, Int8(4), native):
        assert 0 < error < 4 * largest / 127


def bits_of_ranks(shape, first, dtype):
    """Shards, norms and skipped steps of training with everything rounded."""
    links = Links(mesh_of(shape, first), Int8(), Int4(), first == "nodes")
    model = sharded(links, dtype=dtype)
    optimizer = Zero3Optimizer(model, lr=0.1, clip_grad_norm=0.1, loss_scale="dynamic",
                               bucket_bytes=200)
    norms = []
    for step in range(6):
        rows = batch(step)[1].to(dtype)
        if step == 3 and dist.get_rank() == math.prod(shape) - 1:
            rows = rows * math.inf
        optimizer.backward(model(rows).float().square().mean())
        norms.append(optimizer.step())
        optimizer.zero_grad()
    return [p.tolist() for p in model.get_trainable_chunk()], norms


@pytest.mark.parametrize("shape, first", [((2, 2), "nodes"), ((2, 2), "replicate")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_everything_rounded_ranks_agree_and_an_overflow_is_still_found(shape, first, dtype):
    """
    Replicas keep the same bits, although each has rounded its own sums. One rank has an infinite
    loss in one step: no rank takes the step. Breaks where an infinity is rounded to a number.
    Proves I1, I6, `_sum_decoded`, `Int4`, `Zero3Optimizer.step`.
    """
    answers = run(bits_of_ranks, 4, shape, first, dtype)
    for rank, (shards, norms) in enumerate(answers):
        assert norms == answers[0][1]
        assert [norm is None for norm in norms] == [i == 3 for i in range(6)]
        if first == "replicate":
            assert shards == answers[rank % 2][0]


def padding_of(shape):
    """Everything that this rank's padding holds after training with everything rounded."""
    links = Links(mesh_of(shape), Int8(), Int4(), True)
    model = sharded(links, dtype=torch.float32)
    optimizer = Zero3Optimizer(model, lr=0.1)
    for step in range(STEPS):
        optimizer.backward(model(batch(step)[1]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    model.module_list[0].fetch_params()
    model.module_list[0]._wait_params()
    (flat,) = model.module_list[0].flats
    used = sum(slot.view.numel() for slot in flat.slots)
    found = flat.full[used:].tolist()
    model.module_list[0].reshard()
    return found


def test_padding_stays_zero_in_every_encoding():
    """
    Proves I5, `Int8.encode`, `Int4`.
    """
    for found in run(padding_of, 4, (2, 2)):
        # 49 parameters on four ranks: three elements of padding.
        assert found == [0.0] * 3


# -------------------------------------------------------------------------- streams and divergence


def race_on_nodes(shape, options, tier, folder):
    """Train on the simulated device: how many orders were checked, and what is not ordered."""
    links = Links(mesh_of(shape), **options)
    offload = Offload(tier, folder=folder if tier == "nvme" else None)
    with Accelerator() as device:
        model = sharded(links, offload, torch.float32)
        optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.05, bucket_bytes=400,
                                   clip_grad_norm=1e9, offload=offload)
        for step in range(2):
            for _ in range(2):
                optimizer.backward(model(batch(step)[1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return device.checks, Counter(device.problems)


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
def test_no_stream_uses_what_still_travels(tier, tmp_path):
    """
    On an accelerator each step of a gather, and each hop of a gradient, comes after the one before
    it.
    Proves I9, `LinkedCommunicator.all_gather`, `LinkedCommunicator.exchange`,
    `Transfer.go_on`.
    """
    for options in ({"secondary": True}, {"weights": Int8(), "gradients": Int4(),
                                          "secondary": True}):
        for checks, problems in run(race_on_nodes, 4, (2, 2), options, tier, str(tmp_path)):
            assert checks > 200 and not problems, problems


def diverging_nodes(options):
    return diverging_on(Links(mesh_of((2, 2)), **options))


@pytest.mark.parametrize("options", [{}, {"secondary": True, "weights": Int8()}])
def test_a_rank_that_diverges_is_an_error_on_every_node(options):
    """
    Ranks 1 and 2 find it themselves, each in the group that it shares with rank 3. Rank 0 shares
    none with it, and hears of it from them.
    Proves I6, `diverged`, `Transfer._give_up`, `Communicator.announce_fault`,
    `LinkedCommunicator.announce_fault`.
    """
    said = run(diverging_nodes, 4, options)
    for rank, text in enumerate(said):
        assert text.startswith(f"rank {rank}: layer") and "the ranks diverged" in text, said
    assert "on rank 3" in said[1] and "on rank 3" in said[2]


def exact_on_one_rank():
    layer = Zero3Layer(nn.Linear(8, 8), mesh=Links(weights=Int8()))
    if dist.get_rank():
        return message(lambda: layer(torch.ones(1, 8)))
    return message(layer.full_params().__enter__)


def test_a_rank_that_wants_exact_weights_alone_is_told():
    """
    Breaks where both gathers are announced alike: one is longer, and gloo ends the process.
    Proves I6, `LinkedCommunicator.all_gather`.
    """
    exact, rounded = run(exact_on_one_rank, 2)
    assert "Expected: gather without rounding of" in exact and "Got: gather of" in exact
    assert "Expected: gather of" in rounded and "Got: gather without rounding of" in rounded


# ------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("shape", [("nodes", 2, 2), ("nodes", 3, 1), (2, 2), 4])
def test_nodes_save_and_every_layout_loads(shape, tmp_path):
    """
    On the same layout the run goes on with the bits, and the random numbers, that it would have
    had. Breaks where a file has the name of another rank's shard.
    Proves I10, `save_load.save`, `load`.
    """
    def size(shape):
        return math.prod(shape[-2:]) if isinstance(shape, tuple) else shape

    folder = str(tmp_path / "run")
    saved = run(save_on, size(shape), shape, folder, shape == 4)
    for rank, (there, end, drawn) in enumerate(run(load_on, size(shape), shape, folder)):
        assert same(there, saved[0][0]) and same(end, saved[0][1]) and drawn == saved[rank][2]
    # From nodes on every layout, and from every layout on nodes.
    layouts = [("nodes", 2, 2), ("nodes", 2, 1), (2, 2), 3, 1]
    for other in layouts if shape in (("nodes", 2, 2), ("nodes", 3, 1)) else layouts[:2]:
        for there, *_ in run(load_on, size(other), other, folder):
            assert same(there, saved[0][0])


def values_on_nodes():
    """Values that ranks begin with, draw, and write back; what ranks tell each other."""
    links = Links(mesh_of((2, 2)), Int8(), Int4(), True)
    model = sharded(links)
    plain = nn.Sequential(*layers()).double()
    first = same(weights(model), {name: p.detach() for name, p in plain.named_parameters()})
    layer = Zero3Layer(linear(2, 3), mesh=links)
    with layer.full_params(writeback=True) as params:
        params["weight"].detach().copy_(torch.tensor([[1.1, 2.3], [3.7, 4.9], [5.3, 6.1]])
                                        + dist.get_rank())
    with layer.full_params() as params:
        written = params["weight"].tolist()
    drawn = wrap(nn.Sequential(nn.Linear(2, 2, device="meta")), nn.Linear, mesh=links, seed=3)
    return first, written, weights(drawn)["0.weight"].tolist(), layer.comm.gather(dist.get_rank())


def test_values_arrive_on_every_node_exactly():
    """
    Encodings are for the training step alone: what is written back is read exactly.
    Proves `Communicator.scatter`, `Peers.gather`,
    `Sharded.full_params`.
    """
    exact = torch.tensor([[1.1, 2.3], [3.7, 4.9], [5.3, 6.1]]).tolist()
    answers = run(values_on_nodes, 4)
    for first, written, drawn, told in answers:
        assert first and written == exact and told == [0, 1, 2, 3]
        assert drawn == answers[0][2]


# ------------------------------------------------------------------------------------------ errors


class Mixed(nn.Module):
    """A layer with frozen whole numbers and a complex weight."""

    def __init__(self, trains):
        super().__init__()
        self.table = nn.Parameter(torch.tensor([7, 1010, 2013]), requires_grad=False)
        self.phase = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]), requires_grad=trains)

    def forward(self):
        return self.table.clone(), self.phase.clone()


def other_numbers():
    """What a forward sees of numbers that are not real floats, and what is said about gradients."""
    layer = Zero3Layer(Mixed(False), mesh=Links(weights=Int8(), gradients=Int8()))
    said = message(lambda: Zero3Layer(Mixed(True), mesh=Links(gradients=Int8())))
    return [each.tolist() for each in layer()], said


def test_only_real_floats_are_rounded():
    """
    Breaks where an index or a complex number goes through an encoding of real numbers.
    Proves `_fits`, `LinkedCommunicator.open`.
    """
    for rank, (seen, said) in enumerate(run(other_numbers, 2)):
        assert seen == [[7, 1010, 2013], [1 + 2j, 3 - 1j]]
        assert f"rank {rank}: Mixed. Expected: real floats, because `Links` encodes" in said


class Masked(nn.Module):
    """Attention whose mask is a frozen parameter: the lowest finite number from the diagonal on"""

    def __init__(self, dtype):
        super().__init__()
        mask = torch.full((8, 8), torch.finfo(dtype).min).triu(0).to(dtype)
        self.mask = nn.Parameter(mask, requires_grad=False)

    def forward(self, x):
        return torch.softmax(x + self.mask, dim=-1)


def masked(dtype):
    """The largest difference between attention with a mask that was sent in 8 bits, and without"""
    x = torch.rand(8, 8, generator=torch.Generator().manual_seed(0)).to(dtype)
    layer = Zero3Layer(Masked(dtype), mesh=Links(weights=Int8()))
    return (layer(x) - Masked(dtype)(x)).abs().max().item()


def test_a_mask_of_the_lowest_finite_numbers_may_be_sent_in_8_bits():
    """
    In bf16 and in fp16 its scale would be rounded up. The first row is masked everywhere. Breaks
    where 127 times the scale is infinite: that row is NaN.
    Proves I1, `Int8.encode`, `LinkedCommunicator._arrived`.
    """
    for dtype in (torch.bfloat16, torch.half):
        assert run(masked, 2, dtype) == [0, 0]


@dataclass
class Unhashed(Same):
    name: str = "x"


class Wide(Same):
    def encode(self, rows):
        return rows.double()


class Shifted(Same):
    def decode(self, coded, numel):
        return super().decode(coded, numel) + 1


def on_each_rank(block):
    """An encoding that depends on the rank."""
    blocks = [64, block]
    said = message(lambda: Zero3Layer(linear(), mesh=Links(weights=Int8(blocks[dist.get_rank()]))))
    with node_size(1), pytest.warns(UserWarning, match="crosses the slow link"):
        Zero3Layer(linear(), mesh=mesh_of((1, 2)))
    return said


def test_ranks_that_encode_in_different_ways_are_told():
    """
    Their bytes may have the same size, and the weights would differ between ranks. And a mesh whose
    nodes are not those of torchrun gets a warning.
    Proves I6, `Links.told`, `compare_params`, `LinkedCommunicator.open`.
    """
    for rank, said in enumerate(run(on_each_rank, 2, 66)):
        assert f"rank {rank}: Linear differs between ranks. Expected: the same `Links`" in said
        assert "on rank 1. What to do: build the same module" in said and "same `Links`" in said


def test_an_encoding_that_does_not_work_is_refused():
    """
    Proves `is_encoding`, `Links.__post_init__`.
    """
    for wrong in (Unhashed(), Wide(), Shifted()):
        for name in ("weights", "gradients"):
            said = message(lambda name=name, wrong=wrong: Links(**{name: wrong}))
            assert f"an `Encoding` for `{name}`. Got: " in said
            assert "that makes `nbytes(numel)` contiguous bytes" in said
    assert Links(weights=Same()).told.startswith("secondary=False, weights=Same, which makes ")


def wrong_links():
    """What is said about links that do not fit."""
    every = init_device_mesh("cpu", (2,))
    nodes = mesh_of((2, 1))
    mixed = [Zero3Layer(linear(), mesh=Links(nodes, weights=Int8())),
             Zero3Layer(linear(), mesh=Links(nodes))]
    return [message(lambda: Links(weights=Int8)),
            message(lambda: Links(gradients=8)),
            message(lambda: Links(every, secondary=True)),
            message(lambda: Links(secondary=True)),
            message(lambda: Links(nodes, secondary="yes")),
            message(lambda: Links([0, 1])),
            message(lambda: Zero3Layer(linear(), 0, 2, mesh=Links(nodes))),
            message(lambda: Zero3Sequential(mixed))]


def test_links_that_do_not_fit_are_an_error_that_says_what_to_do():
    """
    Proves `Links`, `Links.__post_init__`, `Links.has_nodes`, `check_groups`.
    """
    for rank, said in enumerate(run(wrong_links, 2)):
        for text, part in zip(said, (
                "an `Encoding` for `weights`", "an `Encoding` for `gradients`. Got: 8",
                "with `secondary`, a mesh with the dimensions ('nodes', 'shard')",
                "with `secondary`, a mesh", "`secondary`, True or False. Got: 'yes'",
                "a `torch.distributed.device_mesh.DeviceMesh`. Got: [0, 1]",
                "`mesh`, or `rank` and `world_size`",
                f"rank {rank}: Linear is sharded over other ranks, or in another way"),
                strict=True):
            assert part in text and "What to do: " in text, text


def test_a_layer_takes_the_communicator_that_it_needs():
    """
    Without nodes and without encodings the simple one does.
    Proves `communicator`, `LinkedCommunicator.__init__`, `Links.communicator`.
    """
    assert not isinstance(communicator(), LinkedCommunicator)
    assert not isinstance(communicator(mesh=Links()), LinkedCommunicator)
    assert isinstance(communicator(mesh=Links(weights=Int8())), LinkedCommunicator)
    assert copy.deepcopy(Int8()) == Int8() != Int4()

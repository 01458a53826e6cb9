"""
# Groups of ranks: several models side by side in one run

The oracle is plain PyTorch on the batch of the group.
"""

import copy
import math
from collections import Counter
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.cases import CASES, PlainChain, difference, linear, place, train_both
from tests.ranks import run
from tests.streams import Accelerator
from tests.test_native import collectives
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save, wrap
from zero3.comm.collectives import Communicator
from zero3.comm.links import LinkedCommunicator
from zero3.comm.order import Group, all_ranks
from zero3.estimate.ledger import Ledger
from zero3.estimate.predict import predict_optimizer
from zero3.gradients import clip_grad_norm_

WIDTH = 6
STEPS = 3


def meshes(*groups):
    """Every mesh of the run, which all ranks build, and that of this rank."""
    found = [DeviceMesh("cpu", list(group)) for group in groups]
    return next(mesh for mesh in found if mesh.get_coordinate() is not None)


def message(does):
    """What a call says as it fails."""
    with pytest.raises((RuntimeError, ValueError, TypeError)) as error:
        does()
    return str(error.value)


def layers(seed=0):
    """A plain chain, of which no size is divisible by 2 or 3."""
    torch.manual_seed(seed)
    return [nn.Sequential(linear(WIDTH, 7), nn.Tanh()), nn.Sequential(linear(7, 5), nn.Tanh()),
            linear(5, 3)]


def batch(step, mesh=None):
    """The batch of all ranks of the mesh, and the rows of this one."""
    number, count = place(mesh)
    x = torch.randn(2 * count, WIDTH, generator=torch.Generator().manual_seed(step))
    return x, x[2 * number : 2 * number + 2]


def sharded(mesh=None, offload=None, dtype=torch.double):
    """A chain on the ranks of a mesh, born with other weights on each rank but the first."""
    modules = layers(seed=place(mesh)[0])
    return Zero3Sequential([Zero3Layer(m.to(dtype), offload=offload, mesh=mesh) for m in modules])


def weights(model):
    with model.full_params() as params:
        return {name: p.detach().clone() for name, p in params.items()}


# ------------------------------------------------------------------------------------ side by side


def side_by_side(groups, names, folder):
    """Each group trains the cases; its ranks return the largest difference from plain PyTorch."""
    mesh = meshes(*groups)
    worst = max(train_both(name, mesh=mesh) for name in names)
    for offload in ("cpu", Offload("nvme", folder=folder)):
        def optimizer(model, where=offload, **options):
            return Zero3Optimizer(model, offload=where, bucket_bytes=300, **options)
        worst = max(worst, train_both(names[0], optimizer=optimizer, offload=offload, mesh=mesh))
    return worst


@pytest.mark.parametrize("groups", [((0, 1), (2, 3)), ((0, 1), (2,)), ((0, 2), (1,))])
def test_models_on_parts_of_the_ranks_train_side_by_side_like_plain_pytorch(groups, tmp_path):
    """
    Each group has a model, a batch and an optimizer of its own, in all tiers. Breaks where a
    message goes to a place in the group as if it were a rank of the run, and where a collective
    waits for all ranks.
    Proves I1, I8, `Group`, `groups_of`, `Communicator.__init__`, `Zero3Layer.__init__`.
    """
    names = ["Chain", "Accumulated", "Frozen", "LayerInLayer", "CheckpointAround", "Unused"]
    world_size = sum(map(len, groups))
    assert max(run(side_by_side, world_size, groups, names, str(tmp_path))) < 1e-10


def like_all_ranks():
    """Weights after training on a mesh of all ranks, and without a mesh."""
    found = []
    for mesh in (None, init_device_mesh("cpu", (dist.get_world_size(),))):
        model = sharded(mesh, dtype=torch.float32)
        optimizer = Zero3Optimizer(model, clip_grad_norm=0.1)
        for step in range(STEPS):
            optimizer.backward(model(batch(step, mesh)[1]).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    return all(torch.equal(p, found[1][name]) for name, p in found[0].items())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_mesh_of_all_ranks_is_no_mesh_to_the_bit(world_size):
    """
    Breaks where the group changes an order of summation.
    Proves I1, `all_ranks`, `Communicator.total`.
    """
    assert all(run(like_all_ranks, world_size))


def in_two_groups(first, second):
    """
    A rank may be in two groups, with a model in each: it steps them by turns. Each rank returns
    the largest difference from plain PyTorch.
    """
    pairs = []
    for i, ranks in enumerate((first, second)):
        mesh = DeviceMesh("cpu", list(ranks))
        if mesh.get_coordinate() is not None:
            plain = nn.Sequential(*layers()).double()
            model = sharded(mesh)
            pairs.append((plain, torch.optim.SGD(plain.parameters(), 0.1), model,
                          Zero3Optimizer(model, torch.optim.SGD, lr=0.1), mesh, i))
    worst = 0.0
    for step in range(STEPS):
        losses = []
        for plain, sgd, model, optimizer, mesh, i in pairs:
            x, mine = (each.double() for each in batch(10 * step + i, mesh))
            plain(x).square().mean().backward()
            sgd.step()
            sgd.zero_grad()
            losses.append((model(mine).square().mean(), optimizer))
        # Both models are between forward and backward now.
        for loss, optimizer in losses:
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        for plain, _, model, *_ in pairs:
            worst = max(worst, difference(plain, model))
    return worst


def test_two_models_in_two_groups_work_in_one_process():
    """
    The groups share rank 1, which has both models between forward and backward at the same time.
    Breaks where a communicator keeps anything that belongs to the process.
    Proves I1, I6, `Communicator`.
    """
    assert max(run(in_two_groups, 3, (0, 1), (1, 2))) < 1e-10
    assert max(run(in_two_groups, 4, (0, 1, 3), (1, 2))) < 1e-10


# ------------------------------------------------------------------------------------ whole models


def whole_side_by_side(groups):
    """`wrap` in each group: the difference from plain PyTorch, and what `generate` says."""
    mesh = meshes(*groups)
    plain = nn.Sequential(*layers()).double()
    torch.manual_seed(place(mesh)[0])
    whole = nn.Sequential(*layers(place(mesh)[0])).double()
    model = wrap(whole, nn.Linear, mesh=mesh)
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    for step in range(STEPS):
        x, mine = (each.double() for each in batch(step, mesh))
        plain(x).square().mean().backward()
        optimizer.backward(model(mine).square().mean())
        for each in (sgd, optimizer):
            each.step()
            each.zero_grad()
    expected = dict(plain.named_parameters())
    with model.full_params() as params:
        return max((p - expected[name]).abs().max().item() for name, p in params.items())


class Counts(nn.Module):
    """A model that continues each sequence by the next number, and has a parameter."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, ids):
        following = nn.functional.one_hot((ids + 1) % 9, 9)
        return following + 0 * self.inner(torch.ones(1))


class Generates(Counts):
    def generate(self, ids, synced_gpus=False):
        return self(ids)


def continued_side_by_side():
    """Sequences of other lengths in each group, and the refusal of a model's own `generate`."""
    mesh = meshes((0, 1), (2, 3))
    model = wrap(Counts(), nn.Linear, mesh=mesh)
    ids = model.generate(torch.tensor([[0]]), 5, eos_token_id=dist.get_rank() + 1)
    said = message(lambda: wrap(Generates(), nn.Linear, mesh=mesh).generate(torch.tensor([[0]])))
    return ids.tolist(), said


def test_whole_models_train_side_by_side_and_continue_sequences():
    """
    In each group the ranks go on until both are done, whatever the other group does. Breaks where
    a rank waits for all ranks of the run.
    Proves I1, `wrap`, `Zero3Model.generate`, `continue_tokens`.
    """
    assert max(run(whole_side_by_side, 4, ((0, 1), (2, 3)))) < 1e-10
    assert max(run(whole_side_by_side, 3, ((0,), (1, 2)))) < 1e-10
    for rank, (ids, said) in enumerate(run(continued_side_by_side, 4)):
        assert ids == [[*range(rank + 2)]]
        assert f"rank {rank}: the model cannot generate. Expected: all 4 ranks" in said


# ------------------------------------------------------------------------------------------ bytes


def sent_by_groups(groups):
    """Bytes and messages of a step, its announcements, and the ranks on the tape."""
    mesh = meshes(*groups)
    model = sharded(mesh, dtype=torch.float32)
    optimizer = Zero3Optimizer(model, bucket_bytes=0)
    with Ledger(model, optimizer) as tape:
        optimizer.backward(model(batch(0, mesh)[1]).square().mean())
        optimizer.step()
    predicted = predict_optimizer(optimizer)
    assert (tape.sent_bytes, tape.messages) == (predicted.sent_bytes, predicted.messages)
    return tape.sent_bytes, tape.messages, tape.order_bytes, {e.rank for e in tape.events}


def test_a_group_sends_what_as_many_ranks_alone_would_send():
    """
    Five gathers and three reductions of three layers, and one exchange of norms: each goes to the
    other ranks of the group. Breaks where bytes are counted, or sent, for all ranks of the run.
    Proves I4, `Ledger.record`, `predict_optimizer`.
    """
    groups = ((0, 1, 2), (3,))
    numels = [sum(p.numel() for p in layer.parameters()) for layer in layers()]
    shards = [4 * math.ceil(numel / 3) for numel in numels]
    sent = 2 * (3 * sum(shards) - shards[-1] + 8 * len(shards))
    answers = run(sent_by_groups, 4, groups)
    transfers = 3 * len(shards) - 1 + 1
    assert answers[:3] == [(sent, 2 * transfers, 64 * transfers, {rank}) for rank in range(3)]
    assert answers[3] == (0, 0, 0, {3})


# ------------------------------------------------------------------------------------- checkpoints


def save_side_by_side(folder):
    """Each group saves its model in a folder of its own, at the same time; returns its weights."""
    mesh = meshes((0, 1), (2, 3))
    side = dist.get_rank() // 2
    model = sharded(mesh)
    optimizer = Zero3Optimizer(model)
    for step in range(STEPS):
        optimizer.backward(model(batch(step + 10 * side, mesh)[1].double()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        saving = save(f"{folder}/{side}", model, optimizer, step=step, async_write=step % 2 == 1)
    saving.wait()
    with pytest.raises(RuntimeError, match=r"Got: '.*/2', on|the same `folder`|on rank"):
        save(f"{folder}/same/{dist.get_rank()}", model, optimizer, step=4)
    return weights(model)


def load_side_by_side(folder, groups):
    """Each group loads the checkpoint of side 1, and returns its weights."""
    mesh = meshes(*groups)
    model = sharded(mesh)
    load(f"{folder}/1", model, Zero3Optimizer(model))
    return weights(model)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(p, other[name]) for name, p
                                              in one.items())


def test_each_group_saves_its_model_and_any_group_loads_it(tmp_path):
    """
    The first rank of a group creates the folder and commits it. Breaks where rank 0 of the run has
    to be among them, or where a save waits for all ranks.
    Proves I10, `save_load.save`, `load`, `comm_of`, `Peers.is_first`.
    """
    saved = run(save_side_by_side, 4, str(tmp_path))
    assert same(saved[0], saved[1]) and same(saved[2], saved[3]) and not same(saved[0], saved[2])
    for groups in (((0, 1, 2),), ((0, 1), (2,)), ((0,),)):
        world_size = sum(map(len, groups))
        assert all(same(each, saved[2]) for each in run(load_side_by_side, world_size,
                                                        str(tmp_path), groups))


# ------------------------------------------------------------------------------------------ errors


def wrong_meshes():
    """What is said about meshes that do not fit."""
    one = DeviceMesh("cpu", [0, 1])
    two = DeviceMesh("cpu", [[0, 1]])
    mine = meshes((0,), (1,), (2,))
    every = init_device_mesh("cpu", (3,))
    rank = dist.get_rank()
    said = [message(lambda: Zero3Layer(linear(), mesh=two)),
            message(lambda: Zero3Layer(linear(), mesh=[0, 1])),
            message(lambda: Zero3Layer(linear(), rank, 3, mesh=every)),
            message(lambda: Zero3Layer(linear(), mesh=DeviceMesh("cpu", [2, 1, 0])))]
    if rank == 2:
        said += [message(lambda: wrap(nn.Sequential(linear()), nn.Linear, mesh=one))]
    chains = [sharded(mine), sharded(every)]
    apart = nn.ModuleList(chains)
    said += [message(lambda: Zero3Sequential([chain.module_list[0] for chain in chains])),
             message(lambda: Zero3Optimizer(apart)),
             message(lambda: save("folder", apart, step=0)),
             message(lambda: clip_grad_norm_(apart, 1.0))]
    return said


def test_a_mesh_that_does_not_fit_is_an_error_that_says_what_to_do():
    """
    Breaks where a rank outside of a mesh, or a chain of layers from two, waits for ever.
    Proves `groups_of`, `check_groups`, `communicator`, `_check_clip`.
    """
    for rank, (several, none, both, sort, *outside, chain, optimizer, saves, clip) in enumerate(
            run(wrong_meshes, 3)):
        assert "one dimension" in several and "mesh['shard']" in several
        assert "DeviceMesh" in none and "[0, 1]" in none
        assert f"{rank} and 3 with a mesh" in both
        assert "[2, 1, 0]" in sort and "sort them" in sort
        for said in outside:
            assert said.startswith("rank 2. Expected: one of the ranks of the mesh, [0, 1].")
        assert len(outside) == (rank == 2)
        for said in (chain, optimizer, saves, clip):
            assert f"[{rank}] and [0, 1, 2]" in said and "the same `mesh=`" in said


def diverging(ends):
    """Rank 3 of the group (2, 3) leaves out a layer or has an error; what each rank is told."""
    mesh = meshes((0, 1), (2, 3))
    model = sharded(mesh)
    rank, x = dist.get_rank(), batch(0, mesh)[1].double()
    try:
        if rank == 3 and ends:
            model.module_list[0].comm.fail(model.module_list[0], "has a fault", "none", "one", "go")
        first, second, last = model.module_list
        h = first(x)
        last(h[:, :5] if rank == 3 else second(h)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("ends", [False, True])
def test_ranks_that_diverge_are_named_as_the_run_names_them(ends):
    """
    The ranks of the group raise an error that names rank 3 and not its place in the group; the
    other group trains on. Breaks where errors count from the first rank of the group.
    Proves I6, `diverged`, `Communicator.fail`.
    """
    *fine, said, own = run(diverging, 4, ends)
    assert fine == ["", ""]
    assert said.startswith("rank 2: layer") and "the ranks diverged" in said
    assert "on rank 3" in said and own.startswith("rank 3: layer")


def unequal():
    """Modules that differ, and a problem of one rank: both with the ranks of the run."""
    mesh = meshes((0, 1), (2, 3))
    rank = dist.get_rank()
    said = message(lambda: Zero3Layer(nn.Linear(2 + rank // 3, 2), mesh=mesh)) if rank > 1 else ""
    layer = Zero3Layer(linear(), mesh=mesh)
    comm = layer.comm
    problem = "a leak" if rank == 1 else ""
    if rank < 2:
        said = message(lambda: comm.agree(layer, "broke", "none", problem, "mend it"))
    return said, comm.rank, comm.world_size, comm.divisor, comm.global_rank, comm.is_first


def test_a_communicator_has_its_group_its_size_its_rank_and_the_divisor_apart():
    """
    On four ranks in two groups each communicator is number 0 or 1 of 2, while errors name the rank
    of the run. Breaks where one number is taken for another.
    Proves `Communicator.__init__`, `Peers.is_first`, `Peers.agree`, `compare_params`.
    """
    answers = run(unequal, 4)
    for rank, (said, *numbers) in enumerate(answers):
        assert numbers == [rank % 2, 2, 2, rank, rank % 2 == 0]
        assert f"on rank {(1, 1, 3, 2)[rank]}" in said


def test_a_group_knows_itself_by_its_ranks():
    """
    Two meshes of the same ranks are the same group, whatever handles torch has made for them.
    Proves `Group`, `Group.only_this`.
    """
    assert Group((2, 3), 1).only_this() == Group((3,), 0)
    assert Group((2, 3), 1) == Group((2, 3), 1, object()) != Group((0, 1), 1)
    assert Group((2, 3), 1).global_rank == 3 and all_ranks() == Group((0,), 0)


# ---------------------------------------------------------------------------------------- replicas


def mesh_of(shape, first="nodes"):
    """A mesh of all ranks."""
    return init_device_mesh("cpu", shape, mesh_dim_names=(first, "shard"))


def hybrid(replicas, shards):
    """A mesh of all ranks, of so many replicas with so many ranks each."""
    return mesh_of((replicas, shards), "replicate")


def trained_in_replicas(shape, names, folder, native):
    return trained_on(hybrid(*shape), names, folder, native)


def trained_on(mesh, names, folder, native):
    """
    The largest difference from plain PyTorch, of these cases, and of one from each tier. In two
    steps: gradients are made in the first, and added to zeros in the second
    """
    worst = {}
    with collectives() if native else nullcontext():
        for name in names:
            worst[name] = train_both(name, steps=2, mesh=mesh)
        for offload, name in ((None, "Chain"), ("cpu", "Accumulated"),
                              (Offload("nvme", folder=folder), "Unused")):
            def optimizer(model, where=offload, **options):
                return Zero3Optimizer(model, offload=where, bucket_bytes=300, **options)
            worst[name, str(offload)] = train_both(name, steps=2, optimizer=optimizer,
                                                   offload=offload, mesh=mesh)
    return worst


@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (3, 1), (1, 2)])
@pytest.mark.parametrize("native", [False, True])
def test_replicas_train_like_plain_pytorch_on_the_global_batch(shape, native, tmp_path):
    """
    Every case by messages or by collectives, the first six by both, with torch's AdamW; and with
    `Zero3Optimizer` in each tier. Breaks where the divisor is the size of one replica, where a
    gradient is delivered before the replicas have added theirs, and where a norm counts replicas.
    Proves I1, I5, I7, I8, I9, `LinkedCommunicator.exchange`, `_add_in`, `groups_of`,
    `Reducer.end_exchange`, `Reducer.deliver`, `Reducer.arrived`.
    """
    names = [name for name in CASES if name not in ("DataTypes", "Library")]
    names = names if shape == (2, 2) and not native else names[:6]
    for worst in run(trained_in_replicas, math.prod(shape), shape, names, str(tmp_path), native):
        assert max(worst.values()) < 1e-10, worst


def bits_of_replicas(shape, kind):
    """The shards after training on other rows on each rank, the norms, and the steps skipped."""
    mesh = hybrid(*shape)
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    model = sharded(mesh, dtype=dtype)
    model.module_list[0].module[0].register_buffer("seen", torch.tensor([dist.get_rank()]))
    if kind == "torch":
        optimizer = torch.optim.AdamW(model.get_trainable_chunk(), 0.1)
    else:
        optimizer = Zero3Optimizer(model, lr=0.1, clip_grad_norm=0.1, loss_scale="dynamic",
                                   bucket_bytes=200)
    norms = []
    for step in range(6):
        rows = batch(step, mesh)[1].to(dtype)
        if kind != "torch" and step == 3 and dist.get_rank() == math.prod(shape) - 1:
            rows = rows * math.inf
        loss = model(rows).float().square().mean()
        if kind == "torch":
            loss.backward()
            norms.append(model.clip_grad_norm_(0.1).item())
            optimizer.step()
        else:
            optimizer.backward(loss)
            norms.append(optimizer.step())
        optimizer.zero_grad()
    return [p.tolist() for p in model.get_trainable_chunk()], norms


@pytest.mark.parametrize("kind", ["torch", "fp32", "bf16"])
def test_replicas_keep_the_same_bits_and_skip_a_step_together(kind):
    """
    Ranks of other replicas with the same shard have the same bits after six steps on other rows,
    and all ranks have the same norms. One rank has an infinite loss in one step: no rank takes it.
    Breaks where a replica adds in an order of its own, or decides by itself.
    Proves I1, I6, `Communicator.numbers`, `_add_in`, `Zero3Optimizer.step`,
    `clip_grad_norm_`.
    """
    for shape in ((2, 2), (3, 1)):
        answers = run(bits_of_replicas, math.prod(shape), shape, kind)
        for rank, (shards, norms) in enumerate(answers):
            assert shards == answers[rank % shape[1]][0]
            assert norms == answers[0][1]
            assert [norm is None for norm in norms] == [kind != "torch" and i == 3
                                                        for i in range(6)]
        if shape == (2, 2):
            assert answers[0][0] != answers[1][0]


def on_some_ranks():
    """Replicas on ranks 1 to 4 of five: the difference from plain PyTorch, and the rank on tape."""
    mesh = DeviceMesh("cpu", [[1, 2], [3, 4]], mesh_dim_names=("replicate", "shard"))
    if dist.get_rank() == 0:
        return 0.0, {0}
    worst = train_both("Chain", optimizer=Zero3Optimizer, mesh=mesh)
    model = sharded(mesh)
    with Ledger(model) as tape:
        model(torch.zeros(1, WIDTH).double()).sum().backward()
    return worst, {event.rank for event in tape.events}


def test_replicas_may_be_on_some_of_the_ranks():
    """
    Breaks where a place in a replica is taken for a rank of the run.
    Proves I1, `groups_of`, `Communicator.__init__`.
    """
    for rank, (worst, ranks) in enumerate(run(on_some_ranks, 5)):
        assert worst < 1e-10 and ranks == {rank}


def norms_and_values():
    """Norms of the whole gradient both ways and plain; the values that ranks begin with."""
    mesh = hybrid(2, 2)
    model = sharded(mesh)
    model.module_list[1].module.register_buffer("kept", torch.zeros(1))
    first = weights(model)
    plain = nn.Sequential(*layers()).double()
    expected = {name: p.detach().clone() for name, p in plain.named_parameters()}
    x, mine = (each.double() for each in batch(0, mesh))
    plain(x).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item()
    model(mine).square().mean().backward()
    with_torch = model.clip_grad_norm_(1e9).item()
    model.zero_grad()
    optimizer = Zero3Optimizer(model)
    optimizer.backward(model(mine).square().mean())
    buffers = nn.BatchNorm1d(2)
    buffers.running_mean.fill_(dist.get_rank())
    drawn = wrap(nn.Sequential(nn.Linear(2, 2, device="meta")), nn.Linear, mesh=mesh, seed=3)
    layer = Zero3Layer(buffers, mesh=mesh)
    with layer.full_params(writeback=True) as params:
        params["weight"].detach().fill_(dist.get_rank() + 5)
    return (norm, with_torch, optimizer.step(), same(first, expected),
            layer.module.running_mean.tolist(), weights(drawn)["0.weight"].tolist(),
            [shard.tolist() for shard in layer.chunk])


def test_replicas_begin_with_the_values_of_the_first_rank_and_count_a_norm_once():
    """
    Weights, buffers, values that are drawn and values that are written back are those of rank 0 on
    all ranks; the norm is that of plain PyTorch on the global batch. Breaks where each replica
    begins with the values of its own first rank.
    Proves I1, `Communicator.scatter`, `Communicator.broadcast`, `clip_grad_norm_`.
    """
    answers = run(norms_and_values, 4)
    for rank, (norm, with_torch, with_ours, is_same, mean, drawn, shards) in enumerate(
            answers):
        assert with_torch == pytest.approx(norm, rel=1e-12)
        assert with_ours == pytest.approx(norm, rel=1e-12)
        assert is_same and mean == [0, 0] and drawn == answers[0][5]
        assert shards == [[[5, 5]], [[0, 0]]][rank % 2]


class Branches(nn.Module):
    """A layer with a part that some ranks use, and a part that none does."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.never = linear(), linear(), linear()

    def forward(self, x, rank):
        return self.always(x) + self.sometimes(x) if rank == 3 else self.always(x)


def used_on_one_rank():
    """A parameter that only rank 3 uses: the difference from plain PyTorch."""
    mesh = hybrid(2, 2)
    torch.manual_seed(0)
    plain = PlainChain([Branches().double()])
    model = Zero3Sequential([Zero3Layer(copy.deepcopy(plain[0]), mesh=mesh)])
    options = {"lr": 0.05, "eps": 1e-3, "weight_decay": 0.1}
    adam = torch.optim.AdamW(plain.parameters(), **options)
    optimizer = Zero3Optimizer(model, **options)
    for step in range(STEPS):
        x, mine = (each.double() for each in batch(step, mesh))
        for rank, rows in enumerate(x.chunk(4)):
            (plain(rows, rank).square().mean() / 4).backward()
        adam.step()
        adam.zero_grad()
        optimizer.backward(model(mine, dist.get_rank()).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return difference(plain, model)


def test_a_parameter_that_one_replica_uses_is_stepped_in_all():
    """
    Breaks where a replica asks only its own ranks who has a gradient.
    Proves I1, `Zero3Optimizer.step`.
    """
    assert max(run(used_on_one_rank, 4)) < 1e-10


class Sees(Ledger):
    """A ledger that notes whether replicas exchange sums while a layer's gradients arrive."""

    def record(self, sender, event, nbytes=0, transfer=None, tier="device"):
        super().record(sender, event, nbytes, transfer, tier)
        self.seen = getattr(self, "seen", [])
        if event == "gradients":
            self.seen.append(sender.reducer.exchange is not None)


def sent_in_replicas(shape, bucket_bytes):
    """Bytes of a step by event, and whether an all-reduce was in flight at each layer."""
    mesh = hybrid(*shape)
    model = sharded(mesh, dtype=torch.float32)
    optimizer = Zero3Optimizer(model, bucket_bytes=bucket_bytes)
    with Sees(model, optimizer) as tape:
        optimizer.backward(model(batch(0, mesh)[1]).square().mean())
        optimizer.step()
    sent = Counter()
    for event in tape.events:
        sent[event.event] += event.sent_bytes
    order = [(e.event, e.layer) for e in tape.events if e.event in ("reduce", "exchange")]
    return +sent, tape.messages, tape.order_bytes, tape.seen, order


@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (2, 1)])
def test_a_step_in_replicas_sends_what_the_formula_says(shape):
    """
    I4 with replicas: gathers and reductions inside one replica, and each shard's gradient once to
    each other replica. A gradient is exchanged while the layer below goes backward. A bucket is
    exchanged at once. Breaks where a gather leaves the replica, and where the exchange is waited
    for at once.
    Proves I4, `LinkedCommunicator.exchange`, `Reducer.end_exchange`, `Ledger.record`,
    `Transfer.starting`.
    """
    replicas, ranks = shape
    numels = [sum(p.numel() for p in layer.parameters()) for layer in layers()]
    shards = [4 * math.ceil(numel / ranks) for numel in numels]
    expected = {"fetch": (ranks - 1) * (2 * sum(shards) - shards[-1]),
                "reduce": (ranks - 1) * sum(shards), "exchange": (replicas - 1) * sum(shards),
                "norm": 8 * len(shards) * (replicas * ranks - 1)}
    for sent, messages, order_bytes, seen, order in run(
            sent_in_replicas, replicas * ranks, shape, 0):
        assert sent == +Counter(expected)
        inside, across = 3 * len(shards) - 1 + 1, len(shards) + 1
        assert messages == (ranks - 1) * inside + (replicas - 1) * across
        assert order_bytes == 32 * messages
        # Layer 2 comes first; while layer 0 goes backward, the sums of layer 2 are on their way.
        assert seen == [False, False, True]
        assert [event for event, _ in order] == ["reduce", *["exchange", "reduce"] * 2,
                                                 "exchange"]
    for sent, _, _, _, order in run(sent_in_replicas, replicas * ranks, shape, 1 << 20):
        assert sent == +Counter(expected)
        assert [event for event, _ in order] == ["reduce", "exchange"]


def race_in_replicas(shape, tier, folder, planted):
    """Train on the simulated device: how many orders were checked, and what is not ordered."""
    mesh = hybrid(*shape)
    offload = Offload(tier, folder=folder if tier == "nvme" else None)
    plant = nullcontext()
    if planted:
        plant = mock.patch.object(LinkedCommunicator, "exchange", on_no_stream)
    with Accelerator() as device, plant:
        model = sharded(mesh, offload)
        optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.05, bucket_bytes=400,
                                   clip_grad_norm=1e9, offload=offload)
        for step in range(2):
            for _ in range(2):
                optimizer.backward(model(batch(step, mesh)[1].double()).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    return device.checks, Counter(device.problems)


def on_no_stream(comm, *args, real=LinkedCommunicator.exchange):
    """`LinkedCommunicator.exchange`, whose stream does not wait for the compute stream"""
    with mock.patch.object(Communicator, "on", lambda *_: comm._backend.stream(comm.fetch_stream)):
        return real(comm, *args)


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
def test_no_stream_uses_sums_that_replicas_still_add(tier, tmp_path):
    """
    On an accelerator the all-reduce comes after the sums of this replica, and before the optimizer
    and the copy to CPU memory. Breaks where a gradient is delivered before the all-reduce has
    ended; one mistake is planted here.
    Proves I9, `LinkedCommunicator.exchange`, `Reducer.end_exchange`, `Reducer.deliver`.
    """
    for shape in ((2, 1), (2, 2)):
        for checks, problems in run(race_in_replicas, math.prod(shape), shape, tier, str(tmp_path),
                                    False):
            assert checks > 200 and not problems, problems
    assert all(problems for _, problems in run(race_in_replicas, 2, (2, 1), tier, str(tmp_path),
                                               True))


def diverging_replicas():
    return diverging_on(hybrid(2, 2))


def diverging_on(mesh):
    """Rank 3 leaves out a layer; what each rank is told."""
    model = sharded(mesh)
    rank, x = dist.get_rank(), batch(0, mesh)[1].double()
    try:
        first, second, last = model.module_list
        for _ in range(3):
            h = first(x)
            last(h[:, :5] if rank == 3 else second(h)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_diverges_is_an_error_in_every_replica():
    """
    Ranks 2 and 3 find it themselves, by their announcements. Each tells the other replica of its
    shard, which waits for its sums. Breaks where that rank waits until it gives up.
    Proves I6, `diverged`, `Transfer._give_up`, `Communicator.announce_fault`.
    """
    said = run(diverging_replicas, 4)
    for rank, text in enumerate(said):
        assert text.startswith(f"rank {rank}: layer") and "the ranks diverged" in text, said
    assert "on rank 3" in said[2] and "on rank 2" in said[3]
    assert "fault of" in said[0] + said[1]


class EitherWeight(nn.Module):
    """Two weights, of which a call uses one; the second is in another flat parameter"""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(4), torch.ones(4)])
        self.weights[1].requires_grad_(False)

    def forward(self, branch):
        return (self.weights[branch] * torch.arange(4)).sum()


def each_uses_another(shape):
    layer = Zero3Layer(EitherWeight(), mesh=hybrid(*shape))
    # From now on both train.
    layer.requires_grad_(True)
    return message(layer(dist.get_rank() * 2 // dist.get_world_size()).backward)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_ranks_with_gradients_of_other_weights_of_a_layer_are_told(shape):
    """
    They are as large. Breaks if the gradient of one is added to that of the other, in the reduce or
    in the exchange between replicas.
    Proves I6, `Communicator.begin`, `diverged`.
    """
    for rank, text in enumerate(run(each_uses_another, 2, shape)):
        assert text.startswith(f"rank {rank}: EitherWeight: the ranks diverged"), text
        assert "on all ranks, and use all of their parameters. Start" in text


def whole_in_replicas(shape, offload):
    return whole_on(hybrid(*shape), offload)


def whole_on(mesh, offload):
    """`wrap` on a mesh: the difference from plain PyTorch."""
    plain = nn.Sequential(*layers()).double()
    model = wrap(nn.Sequential(*layers(dist.get_rank())).double(), nn.Linear, mesh=mesh,
                 offload=offload, persist_below_numel=20)
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, bucket_bytes=200, offload=offload)
    for step in range(STEPS):
        x, mine = (each.double() for each in batch(step, mesh))
        for half in range(2):
            (plain(x).square().mean() / 2).backward()
            with optimizer.no_sync() if half == 0 and step == 1 else nullcontext():
                optimizer.backward(model(mine).square().mean() / 2)
        for each in (sgd, optimizer):
            each.step()
            each.zero_grad()
    expected = dict(plain.named_parameters())
    return max((p - expected[name]).abs().max().item() for name, p in weights(model).items())


def goes_on(native):
    """An exception in backward on all ranks, and then a step: the difference from plain PyTorch."""
    mesh = hybrid(2, 2)
    plain = nn.Sequential(*layers()).double()
    with collectives() if native else nullcontext():
        model = sharded(mesh)
    sgd = torch.optim.SGD(plain.parameters(), 0.1)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, bucket_bytes=0)

    def breaks(grad):
        raise ArithmeticError

    first, *others = model.module_list
    x, mine = (each.double() for each in batch(0, mesh))
    h = first(mine)
    h.register_hook(breaks)
    for layer in others:
        h = layer(h)
    with pytest.raises(ArithmeticError):
        optimizer.backward(h.square().mean())
    assert first.reducer.exchange is None and not first.reducer.layers
    optimizer.zero_grad()
    plain(x).square().mean().backward()
    optimizer.backward(model(mine).square().mean())
    sgd.step()
    optimizer.step()
    return difference(plain, model)


def test_replicas_go_on_after_an_exception_in_backward():
    """
    Two layers have been reduced by then, and their sums are on their way to the other replicas.
    Breaks where these are delivered in the next pass, or never waited for.
    Proves I2, `Reducer.end`, `Reducer.drop`, `Reducer.end_exchange`.
    """
    for native in (False, True):
        assert max(run(goes_on, 4, native)) < 1e-10


def test_whole_models_train_in_replicas():
    """
    Units of a whole model, one of them persistent, with micro-batches inside and outside of
    `no_sync`. Breaks where a unit gathers again before its sums have arrived.
    Proves I1, I7, `wrap`.
    """
    assert max(run(whole_in_replicas, 4, (2, 2), None)) < 1e-10
    assert max(run(whole_in_replicas, 4, (2, 2), "cpu")) < 1e-10
    assert max(run(whole_in_replicas, 3, (3, 1), None)) < 1e-10


def save_on(shape, folder, wait):
    """Train two steps and save; then two more: the weights there and at the end."""
    model, optimizer, mesh = resumed(shape)
    torch.manual_seed(dist.get_rank())
    further(model, optimizer, mesh, range(2))
    saving = save(folder, model, optimizer, step=2, extra="x", async_write=not wait)
    there = weights(model)
    further(model, optimizer, mesh, range(2, 4))
    saving.wait()
    return there, weights(model), torch.rand(2).tolist()


def resumed(shape):
    """A model on all ranks, in replicas (2, 2), or on nodes ("nodes", 2, 2); and its optimizer."""
    mesh = None
    if isinstance(shape, tuple):
        mesh = mesh_of(shape[1:]) if shape[0] == "nodes" else hybrid(*shape)
    model = sharded(mesh, dtype=torch.float32)
    return model, Zero3Optimizer(model, lr=0.1, bucket_bytes=200), mesh


def further(model, optimizer, mesh, steps):
    for step in steps:
        noise = 0.01 * torch.rand(2, WIDTH)
        optimizer.backward(model(batch(step, mesh)[1] + noise).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def load_on(shape, folder):
    """What `save_on` returns, of a run that begins at the checkpoint."""
    model, optimizer, mesh = resumed(shape)
    assert load(folder, model, optimizer) == "x"
    there = weights(model)
    further(model, optimizer, mesh, range(2, 4))
    return there, weights(model), torch.rand(2).tolist()


@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (1, 2), 4, 3])
def test_one_replica_saves_and_every_layout_of_groups_loads(shape, tmp_path):
    """
    A checkpoint has one replica's files. It is loaded on every other layout, with the same bits;
    on the same layout the run goes on with the bits, and the random numbers, that it would have
    had. Breaks where two replicas write one file, and where one resumes with the other's dropout.
    Proves I10, `save_load.save`, `load`, `_random_key`, `Saving.begin`.
    """
    count = math.prod(shape) if isinstance(shape, tuple) else shape
    folder = str(tmp_path / "run")
    saved = run(save_on, count, shape, folder, shape != (2, 2))
    shards = shape[1] if isinstance(shape, tuple) else shape
    files = {path.name for path in (tmp_path / "run" / "step-00000002").glob("*.safetensors")}
    assert files == {f"rank-{rank:05}-of-{shards:05}.safetensors" for rank in range(shards)}
    for rank, (there, end, drawn) in enumerate(run(load_on, count, shape, folder)):
        assert same(there, saved[0][0]) and same(end, saved[0][1]) and drawn == saved[rank][2]
    # From replicas of two ranks on all, and from each other layout on three.
    layouts = [(2, 2), (3, 1), (2, 1), 4, 2, 1]
    for other in layouts if shape == (2, 2) else layouts[count % 2 :: 2]:
        number = math.prod(other) if isinstance(other, tuple) else other
        answers = run(load_on, number, other, folder)
        assert all(same(there, saved[0][0]) for there, *_ in answers)
        # Each rank draws numbers of its own.
        assert len({tuple(drawn) for *_, drawn in answers}) == number

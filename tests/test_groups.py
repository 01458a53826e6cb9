"""
# Groups of ranks: several models side by side in one run

The oracle is plain PyTorch on the batch of the group.
"""

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.cases import difference, linear, place, train_both
from tests.ranks import run
from tests.test_house import PACKAGE
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save, wrap
from zero3.groups import Group, all_ranks, group_of
from zero3.guards.gradients import clip_grad_norm_
from zero3.measure.ledger import Ledger

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
    Proves I1, I8, `Group`, `group_of`, `Communicator.__init__`, `Zero3Layer.__init__`.
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
        with model.full_params() as params:
            found.append({name: p.detach().clone() for name, p in params.items()})
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
    predicted = optimizer.predict()
    assert (tape.sent_bytes, tape.messages) == (predicted.sent_bytes, predicted.messages)
    return tape.sent_bytes, tape.messages, tape.order_bytes, {e.rank for e in tape.events}


def test_a_group_sends_what_as_many_ranks_alone_would_send():
    """
    Five gathers and three reductions of three layers, and one exchange of norms: each goes to the
    other ranks of the group. Breaks where bytes are counted, or sent, for all ranks of the run.
    Proves I4, `Ledger.record`, `Zero3Optimizer.predict`.
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
    with model.full_params() as params:
        return {name: p.detach().clone() for name, p in params.items()}


def load_side_by_side(folder, groups):
    """Each group loads the checkpoint of side 1, and returns its weights."""
    mesh = meshes(*groups)
    model = sharded(mesh)
    load(f"{folder}/1", model, Zero3Optimizer(model))
    with model.full_params() as params:
        return {name: p.detach().clone() for name, p in params.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(p, other[name]) for name, p
                                              in one.items())


def test_each_group_saves_its_model_and_any_group_loads_it(tmp_path):
    """
    The first rank of a group creates the folder and commits it. Breaks where rank 0 of the run has
    to be among them, or where a save waits for all ranks.
    Proves I10, `save_load.save`, `load`, `comm_of`, `Communicator.is_first`.
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
    Proves `group_of`, `check_groups`, `check_arguments`, `_check_clip`.
    """
    for rank, (several, none, both, sort, *outside, chain, optimizer, saves, clip) in enumerate(
            run(wrong_meshes, 3)):
        assert "one dimension" in several and "mesh['shard']" in several
        assert "DeviceMesh" in none and "[0, 1]" in none
        assert f"{rank} and 3 with a mesh" in both
        assert "(2, 1, 0)" in sort and "sort them" in sort
        for said in outside:
            assert said.startswith("rank 2. Expected: one of the ranks of the mesh, (0, 1).")
        assert len(outside) == (rank == 2)
        for said in (chain, optimizer, saves):
            assert f"[{rank}] and [0, 1, 2]" in said and "the same `mesh=`" in said
        assert "layers on 2 groups" in clip


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
    Proves I6, `Transfer._diverged`, `Communicator.fail`.
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
    Proves `Communicator.__init__`, `Communicator.is_first`, `Communicator.agree`, `compare_params`.
    """
    answers = run(unequal, 4)
    for rank, (said, *numbers) in enumerate(answers):
        assert numbers == [rank % 2, 2, 2, rank, rank % 2 == 0]
        assert f"on rank {(1, 1, 3, 2)[rank]}" in said


def test_a_group_knows_itself_by_its_ranks():
    """
    Two meshes of the same ranks are the same group, whatever handles torch has made for them.
    Proves `Group`.
    """
    assert Group((2, 3), 1) == Group((2, 3), 1, object()) != Group((0, 1), 1)
    assert Group((2, 3), 1).global_rank == 3 and all_ranks() == Group((0,), 0)
    assert (PACKAGE / "groups.py").exists() and group_of.__doc__

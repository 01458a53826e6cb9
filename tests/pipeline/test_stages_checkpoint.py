"""
# Checkpoints of a pipeline: they load on any number of stages, shards and replicas, or on none

A *layout* says how a run is cut up: `("pipeline", 2, 2)` is a `Pipeline` of two stages with two
shards each, `("interleaved", 2, 1)` has two stages on each rank, `("replicas", 2, 2, 1)` has two
stages in two replicas, `("chain", 2)` is a `Zero3Sequential` on two ranks, and `("wrap", 2)` a
wrapped model there. All of them see the same global batches.
"""

import errno
import math
import os
import shutil
import threading

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.checkpoint.test_save_load import contents, difference, rewrite, same
from tests.ranks import run
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save, wrap
from zero3.checkpoint.convert import main
from zero3.checkpoint.entries import Entries
from zero3.checkpoint.reader import MANIFEST, CheckpointReader, file_name, newest
from zero3.offload.disk import File
from zero3.offload.tensors import Broken
from zero3.pipeline import Pipeline
from zero3.sharded import comm_of

FP64, FP32, BF16 = torch.double, torch.float32, torch.bfloat16
ROWS = 12  # of a global batch: micro-batches of at least one row on up to three ranks
PIPELINE = ("pipeline", 2, 2)
LAYOUTS = (PIPELINE, ("pipeline", 1, 1), ("pipeline", 3, 1), ("pipeline", 1, 2),
           ("interleaved", 2, 1), ("chain", 2))
NAMES = {"replicas": ("pipeline", "replicate", "shard")}


class Counts(nn.Module):
    """Counts its calls in a buffer, which differs between ranks, and passes on what comes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return x


class Embedding(nn.Module):
    """The first layer of a model with tied weights."""

    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(7, 4)
        self.place = nn.Parameter(torch.randn(3, 4))

    def forward(self, x):
        return self.word(x) + self.place


class Head(nn.Module):
    """The last one, with the same matrix."""

    def __init__(self, embedding):
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = embedding.word.weight

    def forward(self, h):
        return self.out(self.norm(h))


def layers(kind="plain", seed=0):
    """
    Five unequal layers, with a frozen matrix and buffers; "frozen" has nothing to train in the
    first three; "more" has a sixth layer; "tied" is a language model.
    """
    torch.manual_seed(seed)
    if kind == "tied":
        embedding = Embedding()
        middle = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        return [embedding, *middle, Head(embedding)]
    found = [nn.Sequential(nn.Linear(4, 7), nn.Tanh()),
             nn.Sequential(Counts(), nn.Linear(7, 5), nn.Tanh()),
             nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6)),
             nn.Sequential(nn.Linear(6, 5), nn.Tanh(), Counts()),
             nn.Linear(5, 3)]
    found[2][2].weight.requires_grad_(False)
    for layer in found[: 3 * (kind == "frozen")]:
        layer.requires_grad_(False)
    return found + [nn.Linear(3, 3) for _ in range(kind == "more")]


def loss_of(kind):
    def squares(out, y):
        return (out.float() if out.dtype == BF16 else out).sub(y).square().mean()

    def entropy(out, y):
        return nn.functional.cross_entropy(out.flatten(0, 1), y.flatten())

    return entropy if kind == "tied" else squares


def group(name, p):
    """Three param groups, one of them for the last layer alone."""
    if name.startswith("4."):
        return {"lr": 0.02}
    return {"weight_decay": 0.1 if p.ndim > 1 else 0.0}


class Run:
    """A model in some layout, its optimizer, and this rank's part of the global batches."""

    def __init__(self, layout, kind="plain", seed=0, dtype=FP64, tier="device", folder=None,
                 stages=None):
        how, *shape = layout
        self.kind, self.dtype = kind, dtype
        offload = Offload(tier, folder) if tier == "nvme" else Offload(tier)
        found = [layer.to(dtype) for layer in layers(kind, seed)]
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        if how == "chain":
            self.model = Zero3Sequential([Zero3Layer(layer, offload=offload) for layer in found])
        elif how == "wrap":
            self.model = wrap(nn.Sequential(*found), nn.Linear, offload=offload)
        else:
            mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=NAMES.get(
                how, ("pipeline", "shard")))
            self.ranks = math.prod(shape[1:])
            self.rank %= self.ranks
            two = how == "interleaved"
            self.model = Pipeline(found, mesh, loss_fn=loss_of(kind), micro_batches=2,
                                  schedule="interleaved" if two else "1f1b", stages=stages,
                                  per_rank=1 + two, offload=offload)
        self.optimizer = Zero3Optimizer(self.model, lr=0.05, eps=1e-3, group_by=group,
                                        reduce_dtype=FP32 if dtype == BF16 else None,
                                        clip_grad_norm=0.5, offload=offload)

    def step(self, number):
        g = torch.Generator().manual_seed(number)
        if self.kind == "tied":
            x, y = torch.randint(0, 7, (2, ROWS, 3), generator=g)
        else:
            x = torch.randn(ROWS, 4, generator=g).to(self.dtype)
            y = torch.randn(ROWS, 3, generator=g).to(FP64 if self.dtype == FP64 else FP32)
        x, y = x.chunk(self.ranks)[self.rank], y.chunk(self.ranks)[self.rank]
        if isinstance(self.model, Pipeline):
            self.model.train_batch(x, y, self.optimizer)
        else:
            self.optimizer.backward(loss_of(self.kind)(self.model(x), y))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self):
        with self.model.full_params() as params:
            return {name: p.detach().clone() for name, p in params.items()}

    def buffers(self):
        found = Entries(self.model, None).replicated
        return {name: tensor.clone() for name, tensor in found.items()}


def size(layout):
    return math.prod(layout[1:])


def rates(folder):
    """The learning rate of each parameter that is trained, as the checkpoint says."""
    checkpoint = CheckpointReader(newest(folder))
    groups = checkpoint.manifest["optimizer"]["groups"]
    return {name: groups[p.entry["param_group"]]["lr"] for p in checkpoint.params
            for name in p.entry["names"] if p.entry["param_group"] is not None}


def saves(layout, folder, cases):
    """For each case: two steps, a save, one more step; the weights there, buffers and numbers."""
    answers = []
    for i, options in enumerate(cases):
        trained = Run(layout, **options)
        torch.manual_seed(dist.get_rank())
        for buffer in Entries(trained.model, None).replicated.values():
            buffer += 100 * dist.get_rank()
        trained.step(0)
        # As a scheduler does.
        for options_of_group in trained.optimizer.param_groups:
            options_of_group["lr"] /= 4
        trained.step(1)
        before = trained.weights()
        save(folder / f"{i}", trained.model, trained.optimizer, step=2, extra="x")
        buffers = trained.buffers()
        drawn = torch.rand(2).tolist()
        trained.step(2)
        answers.append((before, trained.weights(), buffers, drawn))
    return answers


def goes_on(layout, source, folder, cases):
    """For each case: load, save again, a step; the rest is as for `saves`."""
    answers = []
    for i, options in enumerate(cases):
        other = Run(layout, seed=1, **options)
        assert load(source / f"{i}", other.model, other.optimizer) == "x"
        save(folder / f"{i}", other.model, other.optimizer, step=2)
        before, buffers, drawn = other.weights(), other.buffers(), torch.rand(2).tolist()
        other.step(2)
        answers.append((before, other.weights(), buffers, drawn))
    return answers


def folders(tmp_path, cases):
    return zip((tmp_path / "a" / f"{i}" for i in range(len(cases))),
               (tmp_path / "b" / f"{i}" for i in range(len(cases))), strict=True)


def check(tmp_path, saved_on, loaded_on, cases):
    """
    Save on one layout and load on another: the same bits in the checkpoint that the second one
    saves, and the next step of the uninterrupted run.
    """
    saved = run(saves, size(saved_on), saved_on, tmp_path / "a", cases)
    check_load(tmp_path, saved, saved_on, loaded_on, cases)


def check_load(tmp_path, saved, saved_on, loaded_on, cases):
    shutil.rmtree(tmp_path / "b", ignore_errors=True)
    loaded = run(goes_on, size(loaded_on), loaded_on, tmp_path / "a", tmp_path / "b", cases)
    for a, b in folders(tmp_path, cases):
        assert same_state(contents(a), contents(b)) and rates(a) == rates(b)
    for rank, answers in enumerate(loaded):
        for i, (before, after, _, drawn) in enumerate(answers):
            expected_before, expected, *_ = saved[0][i]
            assert same(before, expected_before)
            if saved_on == loaded_on:
                assert same(after, expected) and drawn == saved[rank][i][3]
            else:
                assert difference(after, expected) < (2e-2 if cases[i]["dtype"] == BF16 else 1e-10)
    if saved_on != loaded_on:
        # Each rank has random numbers of its own.
        assert len({tuple(answers[0][3]) for answers in loaded}) == size(loaded_on)


def same_state(one, other):
    """The bits of parameters and moments, by the one name that a tied parameter is saved under."""
    return one.keys() == other.keys() and same(one, other)


# --------------------------------------------------------------------------------- save and go on

BOTH = ({"dtype": BF16}, {"dtype": FP64})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run on 2 stages of 2 ranks, in bf16 with fp32 masters and in fp64."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, run(saves, 4, PIPELINE, folder / "a", BOTH)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_pipeline_saves_and_every_layout_loads_and_goes_on(saved, layout):
    """
    Two stages of two ranks save. Every other layout has the same masters, moments, numbers of steps
    and learning rates to the bit, and the next step of the run that went on; on the same layout
    that step is equal to the bit, and so are the random numbers. Breaks where a rank looks for a
    shard in the files of another stage, and where a stage keeps its own learning rate of a param
    group that only another stage has parameters of.
    Proves I10, `save_load.save`, `load`, `Entries.tensor_names`,
    `CheckpointReader.files_at`, `Listing.find`.
    """
    folder, answers = saved
    check_load(folder, answers, PIPELINE, layout, BOTH)


@pytest.mark.parametrize("layout", [("chain", 2), ("interleaved", 2, 1)], ids=str)
def test_a_pipeline_loads_what_other_layouts_saved(tmp_path, layout):
    """
    A chain without a pipeline, and stages that are interleaved. Breaks where flat parameters are
    found by their number.
    Proves `load`, `Entries.check`.
    """
    check(tmp_path, layout, PIPELINE, BOTH)


@pytest.mark.parametrize("layout", [PIPELINE, ("pipeline", 3, 1), ("pipeline", 1, 1),
                                    ("wrap", 2)], ids=str)
def test_tied_weights_are_saved_once_and_found_by_either_name(tmp_path, layout):
    """
    The embedding is in the first stage, and the last one borrows it. Another pipeline loads it, and
    so does a wrapped model, and the other way round. Breaks where the borrowed copy is saved too.
    Proves `Entries._names`, `Listing.find`.
    """
    cases = ({"kind": "tied", "dtype": FP64},)
    check(tmp_path, PIPELINE, layout, cases)
    tied = CheckpointReader(newest(tmp_path / "a" / "0")).find(["3.out.weight"])
    assert tied.entry["names"] == ["0.word.weight", "3.out.weight"]
    if layout != PIPELINE:
        check(tmp_path / "back", layout, PIPELINE, cases)


# ----------------------------------------------------------------------------- what is in the files


def test_a_rank_writes_the_shards_of_its_stages(saved):
    """
    Each of four files has one shard of each flat parameter of its own stage, and the buffers of
    that stage; the manifest has each parameter once. Breaks where two stages write one file.
    Proves `Entries.manifest`, `Entries.entries`, `file_name`.
    """
    path = newest(saved[0] / "a" / "1")
    assert sorted(os.listdir(path)) == [MANIFEST, *(file_name(i, 4) for i in range(4))]
    checkpoint = CheckpointReader(path)
    assert sorted(p.name for p in checkpoint.params) == sorted(names())
    assert checkpoint.manifest["replicated"] == {"1.0.calls": 0, "3.2.calls": 1}
    for i, file in enumerate(checkpoint.files):
        here = {int(name.split(".")[0]) for name in file.header if name[0].isdigit()}
        assert here == {n for n, flat in enumerate(checkpoint.flats) if flat["place"] == i // 2}
        assert "replicated.1.0.calls" in file.header or i > 1


def test_each_rank_gets_the_buffers_of_its_own_stage(saved, tmp_path):
    """
    The buffers differ between ranks. On the same layout each rank has its own again; elsewhere it
    has those of the rank with the same shard in the stage that saved them. Breaks where a buffer is
    looked for in the first stage.
    Proves `CheckpointReader.replicated`, `Entries.tensor_names`.
    """
    folder, answers = saved
    own = [rank[1][2] for rank in answers]
    assert own[0].keys() == own[1].keys() == {"1.0.calls"}
    assert own[2].keys() == own[3].keys() == {"3.2.calls"}
    assert len({int(value) for each in own for value in each.values()}) == 4
    case = (BOTH[1],)
    for layout in (PIPELINE, ("chain", 2), ("pipeline", 1, 1)):
        (tmp_path / "a").mkdir(exist_ok=True)
        shutil.copytree(folder / "a" / "1", tmp_path / "a" / "0", dirs_exist_ok=True)
        loaded = run(goes_on, size(layout), layout, tmp_path / "a", tmp_path / "b", case)
        for rank, ((_, _, found, _),) in enumerate(loaded):
            for name, value in found.items():
                assert value == own[2 * (name == "3.2.calls") + rank % 2][name]
        assert {name for ((_, _, found, _),) in loaded for name in found} == {
            "1.0.calls", "3.2.calls"}


class Normed(nn.Module):
    """A layer with a batch norm."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        return self.norm(self.inner(x))


def normed(folder):
    """Two steps with a load between them, and without: the weights and the buffers."""
    answers = []
    for source in (None, folder):
        torch.manual_seed(bool(source))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
        model = Pipeline([nn.Linear(4, 4), Normed()], mesh, loss_fn=loss_of(""), micro_batches=2)
        optimizer = Zero3Optimizer(model, lr=0.05)
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(dist.get_rank() % 2))
        if source:
            load(source, model, optimizer)
        else:
            model.train_batch(x, x, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            save(folder, model, optimizer, step=1)
        model.train_batch(x, x, optimizer)
        optimizer.step()
        with model.full_params() as params:
            answers.append({**{name: p.detach().clone() for name, p in params.items()},
                            **Entries(model, None).replicated})
    return same(*answers), answers[0].get("1.norm.running_mean")


def test_a_batch_norm_in_one_stage_goes_on_with_its_own_mean(tmp_path):
    """
    Running means are of each rank's own rows. Breaks where two ranks of a stage get the same.
    Proves `Entries.take`.
    """
    answers = run(normed, 4, tmp_path)
    assert all(is_same for is_same, _ in answers)
    means = [mean for _, mean in answers]
    assert means[0] is means[1] is None and not means[2].equal(means[3])


def test_one_replica_of_each_stage_saves(saved, tmp_path):
    """
    Two stages in two replicas: one file for each stage. It loads on two stages of two ranks, and
    the other way round. Breaks where the replicas of two stages are taken for each other.
    Proves `Saving.begin`, `Saving.wait`.
    """
    replicas = ("replicas", 2, 2, 1)
    answers = run(saves, 4, replicas, tmp_path / "a", BOTH)
    assert len([*newest(tmp_path / "a" / "1").glob("*.safetensors")]) == 2
    for layout in (replicas, PIPELINE):
        check_load(tmp_path, answers, replicas, layout, BOTH)
    folder, answers = saved
    check_load(folder, answers, PIPELINE, replicas, BOTH)


def test_stages_rest_in_any_tier(tmp_path):
    """
    From files into CPU memory and onto the device, with the same bits. Breaks where a stage loads
    with the offload of another one.
    Proves I8, `Entries.tensors`, `Entries.here`.
    """
    (tmp_path / "scratch").mkdir()
    files = ({"dtype": BF16, "tier": "nvme", "folder": tmp_path / "scratch"},)
    answers = run(saves, 4, PIPELINE, tmp_path / "a", files)
    for tier in ("nvme", "cpu", "device"):
        cases = ({**files[0], "tier": tier},)
        check_load(tmp_path, answers, PIPELINE, PIPELINE, cases)


def test_a_frozen_stage_has_no_states(tmp_path):
    """
    The first stage has nothing to train, and so nothing of the optimizer. Breaks where its ranks
    take the optimizer for that of another model.
    Proves `Entries.__init__`.
    """
    cases = ({"kind": "frozen", "dtype": FP64, "stages": [3, 2]},)
    answers = run(saves, 4, PIPELINE, tmp_path / "a", cases)
    check_load(tmp_path, answers, PIPELINE, PIPELINE, cases)
    checkpoint = CheckpointReader(newest(tmp_path / "a" / "0"))
    trained = [any(p.states["moments"]) for p in checkpoint.params]
    assert trained == [False] * 8 + [True] * 4
    without = ({"kind": "frozen", "dtype": FP64},)
    check_load(tmp_path, answers, PIPELINE, ("chain", 2), without)


def loads_weights(layout, folder):
    """Without an optimizer, and into a model that will never have one."""
    other = Run(layout, seed=1, dtype=FP64)
    lr = [each["lr"] for each in other.optimizer.param_groups]
    assert load(folder, other.model) == "x"
    assert lr == [each["lr"] for each in other.optimizer.param_groups]
    save(folder.parent / "weights", other.model, step=0)
    return other.weights()


def test_weights_load_without_an_optimizer(saved, tmp_path):
    """
    And are saved without one. Breaks where a pipeline asks for the states.
    Proves `load`, `comm_of`.
    """
    shutil.copytree(saved[0] / "a" / "1", tmp_path / "a")
    for weights in run(loads_weights, 4, PIPELINE, tmp_path / "a"):
        assert same(weights, saved[1][0][1][0])
    there = contents(tmp_path / "weights")
    assert {key for _, key in there} == {"param"} and len(there) == len(names())


def names():
    return [name for name, _ in nn.Sequential(*layers()).named_parameters()]


# ------------------------------------------------------------------------------- without a pipeline


def test_the_command_line_reads_a_pipelines_checkpoint(saved, tmp_path):
    """
    It checks all files, and exports weights that plain PyTorch loads, buffers included. Breaks
    where a conversion reads the files of the first stage alone.
    Proves `verify`, `export`, `to_dcp`.
    """
    path = newest(saved[0] / "a" / "1")
    assert main(["verify", str(path)]) == 0
    assert main(["export", str(path), str(tmp_path / "plain")]) == 0
    plain = nn.Sequential(*layers(seed=1)).double()
    plain.load_state_dict(load_file(tmp_path / "plain" / "model.safetensors"))
    expected = saved[1][0][1][0]
    assert all(torch.equal(p, expected[name]) for name, p in plain.named_parameters())
    assert plain[3][2].calls == saved[1][2][1][2]["3.2.calls"]
    for style in ("deepspeed", "dcp"):
        there, back = str(tmp_path / style), tmp_path / f"{style} and back"
        assert main(["universal", str(path), there, "--format", style]) == 0
        assert main(["universal", there, str(back)]) == 0
        again = contents(back)
        one = contents(path.parent)
        keys = [key for key in one if key[1] != "step" and key in again]
        assert len(keys) > 20
        for key in keys:
            assert torch.equal(again[key].to(FP32), one[key].to(FP32))


def test_a_manifest_with_wrong_places_is_refused(saved, tmp_path):
    """
    Whatever place is not there, or not a number. Breaks where a place leads to other files.
    Proves `_read_manifest`, `CheckpointReader._check`.
    """
    path = tmp_path / "step-00000002"

    def to(place):
        return [lambda told: told["flats"][0].update(place=place),
                lambda told: told["replicated"].update({"3.2.calls": place})]

    forged = [change for place in (-1, 2, 1 << 70, None, "0", True, [0]) for change in to(place)]
    forged += [lambda told, n=n: told.update(places=n) for n in (0, 1, 4, -2, 1 << 70, None, {})]
    for change in forged:
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(newest(saved[0] / "a" / "1"), path)
        rewrite(path, change)
        with pytest.raises(Broken):
            CheckpointReader(path)
    # A layer in the other stage: the files of that one do not have it.
    for change in to(0)[1], lambda told: told["flats"][-1].update(place=0):
        shutil.rmtree(path)
        shutil.copytree(newest(saved[0] / "a" / "1"), path)
        rewrite(path, change)
        checkpoint = CheckpointReader(path)
        with pytest.raises(Broken, match=r"has no `"):
            checkpoint.replicated(0, "3.2.calls")
            checkpoint.read_whole(checkpoint.params[-1])


# ------------------------------------------------------------------------------------ what is wrong


def message(does, *args, **options):
    try:
        does(*args, **options)
    except (RuntimeError, TypeError) as error:
        return str(error)
    return ""


def is_refused(folder):
    """What each rank is told when something is wrong, and whether all of it is as before."""
    trained = Run(PIPELINE, dtype=FP64)
    trained.step(0)
    run_here = (trained.model, trained.optimizer)
    save(folder, *run_here, step=1)
    path, rank, told = newest(folder), dist.get_rank(), []
    trained.step(1)
    before = trained.weights()
    for number in range(4):
        file = path / file_name(number, 4)
        good = file.read_bytes()
        dist.barrier()
        if rank == 0:
            file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
        dist.barrier()
        told.append(message(load, folder, *run_here))
        dist.barrier()
        if rank == 0:
            file.write_bytes(good)
        dist.barrier()
    more = Run(PIPELINE, "more", dtype=FP64)
    told.append(message(load, folder, more.model, more.optimizer))
    save(folder.parent / "more", more.model, more.optimizer, step=1)
    told.append(message(load, folder.parent / "more", *run_here))
    pread = os.pread
    if rank == 3:
        def broken(*_):
            raise OSError(errno.EIO, "Input/output error")
        os.pread = broken
    told.append(message(load, folder, *run_here))
    os.pread = pread
    told.append(message(save, folder, *run_here, step=1 + rank // 2))
    told.append(message(save, folder, *run_here, step=2, extra=print if rank == 1 else None))
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    told.append(message(save, folder, trained.model, other if rank == 2 else trained.optimizer,
                        step=2))
    is_same = same(before, trained.weights())
    trained.step(2)
    end = trained.weights()
    load(folder, *run_here)
    trained.step(1)
    return told, is_same and same(before, trained.weights()), not same(before, end)


def test_what_is_wrong_in_one_stage_is_an_error_in_all(tmp_path):
    """
    A damaged file, a parameter that the checkpoint or the model lacks, an error of the disk on one
    rank, other arguments in one stage: every rank of every stage is told, and nothing changes.
    Breaks where only the ranks of one stage agree, who then leave the others waiting.
    Proves `load`, `save_load.save`, `all_here`, `Entries.check`, `Saving._on_all_ranks`.
    """
    answers = run(is_refused, 4, tmp_path / "run")
    causes = [*(f"the file of rank {i}, is damaged" for i in range(4)),
              "`5.weight` is missing in the checkpoint", "`5.weight`, 2 in all, in the checkpoint",
              "Input/output error", "1 on rank 0, and 2 on rank 2", "`extra` is a builtin",
              "Got: SGD"]
    for rank, (told, as_before, stepped) in enumerate(answers):
        assert as_before and stepped
        for mine, cause in zip(told, causes, strict=True):
            assert mine.startswith(f"rank {rank}: the checkpoint") and cause in mine, (cause, mine)
        for mine, culprit in ((told[6], 3), (told[8], 1)):
            assert f"on rank {culprit}" in mine


# --------------------------------------------------------------------------- while training goes on


def saves_meanwhile(folder):
    """The disk of one rank waits until a step is done, and later it fails."""
    trained = Run(PIPELINE, dtype=FP64)
    trained.step(0)
    before, gate, move, rank = trained.weights(), threading.Event(), File.move, dist.get_rank()

    def wait(self, *args):
        assert gate.wait(60)
        return move(self, *args)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    try:
        if rank == 2:
            File.move = wait
        saving = save(folder, trained.model, trained.optimizer, step=1, async_write=True)
        trained.step(1)
        nothing_yet = newest(folder) is None
        gate.set()
        saving.written.result()
        dist.barrier()
        # This step ends the save.
        trained.step(2)
        ended = saving.complete.done() and newest(folder) is not None
        if rank == 1:
            File.move = full
        saving = save(folder, trained.model, trained.optimizer, step=2, async_write=True)
        saving.written.exception()
        dist.barrier()
    finally:
        File.move = move
    told = message(trained.step, 3)
    trained.optimizer.zero_grad()
    # The next save or load would raise the error of a save that no step has seen.
    load(folder, trained.model, trained.optimizer)
    dist.barrier()
    return nothing_yet, ended, told, same(before, trained.weights()), sorted(os.listdir(folder))


def test_training_goes_on_while_a_pipeline_is_saved(tmp_path):
    """
    One rank of the second stage is slow: all stages train on, and a later step ends the save. One
    rank of the first stage fails: the next step is an error in both stages. Breaks where a stage
    ends the save alone.
    Proves `Saving._end_if_done`, `Saving._write_rest`, `all_here`.
    """
    for rank, (nothing_yet, ended, told, is_same, names) in enumerate(
            run(saves_meanwhile, 4, tmp_path)):
        assert nothing_yet and ended and is_same and names == ["step-00000001"]
        assert told.startswith(f"rank {rank}: the checkpoint of step 2")
        assert "No space left on device, on rank 1" in told


def test_the_communicator_of_a_model_is_that_of_all_its_ranks():
    """
    A pipeline has one that reaches every stage; a chain has that of its layers. Breaks where a
    checkpoint of a pipeline is agreed on inside a stage.
    Proves `comm_of`.
    """
    assert run(reached, 4) == [((0, 1, 2, 3), 2, (0, 1), 4)] * 2 + [
        ((0, 1, 2, 3), 2, (2, 3), 4)] * 2


def reached():
    pipeline = Run(PIPELINE, dtype=FP64).model
    chain = Zero3Sequential([Zero3Layer(nn.Linear(2, 2))])
    everyone = comm_of(nn.ModuleList([pipeline]))
    assert everyone is pipeline.comm and comm_of(chain) is chain.module_list[0].comm
    layer = pipeline.sharded_layers[0]
    return everyone.ranks, everyone.stages.size, layer.comm.ranks, len(comm_of(3).ranks)

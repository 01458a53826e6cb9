"""
# DCP on shards: what torch writes is what we have, and the other way round

The oracle is torch itself: `get_state_dict`, `dcp.save`, `dcp.load` and `set_state_dict`, with
FSDP2 on several ranks and with plain PyTorch on one.
"""

import itertools
import math
import pickle
import shutil
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.beside.loops import DCP, Torchrun, refused, run_programs
from tests.pipeline.test_stages_checkpoint import Run, layers
from tests.ranks import run
from zero3 import Offload, Zero3Optimizer, wrap
from zero3.beside import dcp as sharded
from zero3.beside.dcp import DcpCheckpoint, boxes, load_dcp, save_dcp
from zero3.checkpoint.entries import Entries
from zero3.inject import inject, policies
from zero3.train.gpt import GPTConfig, gpt_layers

ROWS = 6  # of a global batch: splits over 1, 2 and 3 ranks


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 6)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """A tied matrix, one of three dimensions, a frozen one in a block, and buffers"""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        # Its module comes first, and is used last.
        self.last = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.first = nn.Linear(6, 6, bias=False)
        self.first.weight = self.last.weight
        self.mix = nn.Parameter(torch.randn(2, 3, 6))
        self.blocks[0].down.weight.requires_grad_(False)
        self.register_buffer("shift", torch.randn(6))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        x = self.first(x) + self.shift.to(x.dtype)
        for block in self.blocks:
            x = block(x)
        return self.last(x + self.mix.sum((0, 1)))


def decay(name, p):
    return {"weight_decay": 0.1 if p.ndim > 1 else 0.0}


def batch(step, dtype=torch.float32):
    return torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(step)).to(dtype)


def train(model, optimizer, steps, dtype=torch.float32):
    for step in steps:
        rows = batch(step, dtype).chunk(dist.get_world_size())[dist.get_rank()]
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# -------------------------------------------------------------------------------------------- torch


def of_torch(seed, sharded):
    """The model and its optimizer, whose groups are in another order, with the frozen one"""
    model = Net(seed)
    if sharded:
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == wide],
               "weight_decay": 0.1 * wide} for wide in (False, True)]
    return model, torch.optim.AdamW(groups, lr=0.01, eps=1e-3, foreach=False)


def state_of(model, *optimizers):
    return dict(zip(("model", "optim"), get_state_dict(model, optimizers), strict=True))


def values(model, *optimizers):
    """All that torch has, whole, by DCP's keys"""
    state = state_of(model, *optimizers)
    found = {f"model.{name}": value for name, value in state["model"].items()}
    for name, known in state["optim"]["state"].items():
        found |= {f"optim.state.{name}.{key}": value for key, value in known.items()}
    for group in state["optim"]["param_groups"]:
        options = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay", "amsgrad")
                   if key in group}
        found |= {f"optim.of.{name}": options for name in group["params"]}
    whole = {key: value.full_tensor() if hasattr(value, "full_tensor") else value
             for key, value in found.items()}
    # Training changes them in place.
    return {key: value.clone() if torch.is_tensor(value) else value for key, value in whole.items()}


def torch_saves(folder, sharded, steps=3):
    model, optimizer = of_torch(0, sharded)
    train(model, optimizer, range(steps))
    dcp.save({**state_of(model, optimizer), "step": steps}, checkpoint_id=folder)
    before = values(model, optimizer)
    train(model, optimizer, [steps])
    return before, values(model, optimizer)


def torch_loads(folder, sharded, steps=3):
    """As DCP's documentation has it; all that was loaded, and all after one more step"""
    model, optimizer = of_torch(1, sharded)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, [optimizer], model_state_dict=state["model"],
                   optim_state_dict=state["optim"])
    before = values(model, optimizer)
    train(model, optimizer, [steps])
    return before, values(model, optimizer)


# -------------------------------------------------------------------------------------------- zero3


def ours(seed, tier="device", folder=None, dtype=torch.float32, layers=(Block,), **options):
    offload = Offload(tier, folder) if tier == "nvme" else Offload(tier)
    model = wrap(Net(seed).to(dtype), layers, offload=offload)
    options = {"lr": 0.01, "eps": 1e-3, "group_by": decay, "offload": offload, **options}
    return model, Zero3Optimizer(model, torch.optim.AdamW, fused=False, foreach=False, **options)


def we_save(folder, *args):
    model, optimizer = ours(0, *args)
    dtype = model.sharded_layers[0].flats[0].shard.dtype
    train(model, optimizer, range(3), dtype)
    save_dcp(folder, model, optimizer, extra={"step": 3})
    train(model, optimizer, [3], dtype)
    save_dcp(f"{folder}-next", model, optimizer)


def we_load(source, folder, *args):
    model, optimizer = ours(1, *args)
    load_dcp(source, model, optimizer)
    save_dcp(folder, model, optimizer)
    train(model, optimizer, [3], model.sharded_layers[0].flats[0].shard.dtype)
    save_dcp(f"{folder}-next", model, optimizer)


def equal(one, other):
    """Whether two are the same to the bit; else what differs"""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return [key for key, value in one.items()
            if not (torch.equal(value, other[key]) if torch.is_tensor(value)
                    else value == other[key])]


def close(one, other):
    return max((value - other[key]).abs().max().item() for key, value in one.items()
               if torch.is_tensor(value))


def in_plain_pytorch(folder):
    return run(torch_loads, 1, folder, False)[0]


@pytest.mark.parametrize("ranks, then", [(1, 2), (2, 2), (2, 3), (3, 1), (3, 2)])
def test_we_go_on_from_a_folder_of_fsdp2(tmp_path, ranks, then):
    """
    Its masters, moments, counts, options and buffers, to the bit, on any number of ranks; and one
    more step on as many ranks is torch's, to the bit where two ranks add. Breaks where a box lies
    elsewhere, a group's options are another's, or a tied weight is looked for under the other name.
    Proves `load_dcp`, `DcpCheckpoint`, `DcpCheckpoint.__init__`, `DcpCheckpoint.read`,
    `Listing.find`, `DcpFolder`, `DcpFolder.read_all`, `flat_entry`, `_Objects`, `load_from`.
    """
    before, after = run(torch_saves, ranks, tmp_path / "torch", True)[0]
    run(we_load, then, tmp_path / "torch", tmp_path / "ours")
    assert equal(in_plain_pytorch(tmp_path / "ours")[0], before) == []
    there = in_plain_pytorch(tmp_path / "ours-next")[0]
    if ranks == then == 2:
        assert equal(there, after) == []
    assert close(there, after) < 1e-6


def test_we_go_on_from_a_folder_of_plain_pytorch(tmp_path):
    """
    One process has written each tensor as a whole, and two ranks read their boxes.
    """
    before, after = run(torch_saves, 1, tmp_path / "torch", False)[0]
    run(we_load, 2, tmp_path / "torch", tmp_path / "ours")
    assert equal(in_plain_pytorch(tmp_path / "ours")[0], before) == []
    assert close(in_plain_pytorch(tmp_path / "ours-next")[0], after) < 1e-6


@pytest.mark.parametrize("ranks, then, tier, layers", [
    (1, 2, "device", (Block,)), (2, 2, "nvme", (Block,)), (2, 3, "cpu", (Block, nn.Linear)),
    (3, 2, "device", (nn.ModuleList,)),
])
def test_fsdp2_goes_on_from_a_folder_of_ours(tmp_path, ranks, then, tier, layers):
    """
    As torch's documentation has it, from any tier, and one more step is ours. Breaks where a key is
    called otherwise, an option is missing, or a tied weight has its states under the other name.
    Proves `save_dcp`, `_Boxes`, `dcp_state`, `Entries._names`, `Entries.state_of`,
    `Entries.values`, `Listing`, `Listing.__init__`, `name_and_key`.
    """
    run(we_save, ranks, tmp_path / "ours", tier, tmp_path, torch.float32, layers)
    there = in_plain_pytorch(tmp_path / "ours")
    before, after = run(torch_loads, then, tmp_path / "ours", True)[0]
    assert equal(before, there[0]) == []
    next_ = in_plain_pytorch(tmp_path / "ours-next")[0]
    if ranks == then == 2:
        assert equal(after, next_) == []
    assert close(after, next_) < 1e-6
    # It is what plain PyTorch has after the same steps.
    expected, _ = run(torch_saves, ranks, tmp_path / "torch", True)[0]
    if ranks == 2:
        assert equal(there[0], expected) == []
    assert close(there[0], expected) < 1e-6
    state = {"step": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=tmp_path / "ours", no_dist=True)
    assert state == {"step": 3}


# ------------------------------------------------------------------------------------------- boxes


@pytest.mark.parametrize("shape", [(), (5,), (1,), (2, 3), (3, 1, 4), (2, 3, 5), (1, 4), (4, 1),
                                   (2, 2, 2, 3)])
def test_a_range_is_a_few_boxes(shape):
    """
    Every range of every shape: the boxes have its elements in their order, and are at most 2n - 1.
    And those of the chapter's table.
    Proves `boxes`.
    """
    numel = math.prod(shape)
    elements = torch.arange(numel).view(shape)
    for begin, end in itertools.combinations(range(numel + 1), 2):
        found = boxes(shape, begin, end)
        views = [elements[tuple(map(slice, box.offsets, map(sum, zip(box.offsets, box.sizes,
                                                                     strict=True))))]
                 for box in found]
        assert torch.equal(torch.cat([view.flatten() for view in views]), torch.arange(begin, end))
        assert len(found) <= max(1, 2 * len(shape) - 1)
    assert [(tuple(box.offsets), tuple(box.sizes)) for span in ((0, 4), (4, 6))
            for box in boxes((2, 3), *span)] == [
        ((0, 0), (1, 3)), ((1, 0), (1, 1)), ((1, 1), (1, 2))]


# ------------------------------------------------------------------------------------------ memory


def counts_memory(folder, tier):
    """What a save and a load have in memory: elements of copies, of reads and of stored tensors"""
    model, optimizer = ours(0, tier, folder)
    train(model, optimizer, range(2))
    alive, opened, copies, reads, stored = [], [], [], [], []
    resolve, here = sharded._Boxes.resolve_data, Entries.here
    read, unpickle = DcpCheckpoint.read, torch.load

    def resolved(self, item):
        value = resolve(self, item)
        if torch.is_tensor(value) and item.index in self.places:
            copies.append(value)
            alive.append(sum(copy.untyped_storage().nbytes() for copy in copies) // 4)
        return value

    def counted(*args, **kwargs):
        value = unpickle(*args, **kwargs)
        stored.append(value.numel() if torch.is_tensor(value) else 0)
        return value

    sharded._Boxes.resolve_data = resolved
    Entries.here = lambda self, flat, **write: opened.append(flat) or here(self, flat, **write)
    DcpCheckpoint.read = lambda self, *args: reads.append(args[3] - args[2]) or read(self, *args)
    torch.load = counted
    try:
        save_dcp(folder / "ours", model, optimizer)
        saved = len(opened)
        load_dcp(folder / "ours", model, optimizer)
    finally:
        sharded._Boxes.resolve_data, Entries.here = resolve, here
        DcpCheckpoint.read, torch.load = read, unpickle
    shards = [len(flat.shard) for layer in model.sharded_layers for flat in layer.flats]
    return saved, len(shards), max(alive), max(reads), max(stored), max(shards), len(copies)


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_one_box_is_in_memory_at_a_time(tmp_path, tier):
    """
    A save opens each shard once, and has one box of it as a copy; a load reads at most a shard of
    one key, and stored tensors of at most a box. The largest box has 66 elements, all of a matrix.
    Breaks where torch's writer keeps what it has written, or where the boxes of a shard are not
    written together.
    Proves `_Boxes.resolve_data`, `_Boxes.create_local_plan`, `DcpCheckpoint.read`.
    """
    for saved, shards, alive, read, stored, shard, copies in run(counts_memory, 2, tmp_path, tier):
        assert saved == shards and copies > 10
        assert alive <= 66 and stored <= 66 and read <= shard


# ----------------------------------------------------------------------------------- more of models


def saves_bf16(folder):
    we_save(folder, "cpu", folder, torch.bfloat16)


def test_masters_are_written_in_place_of_rounded_weights(tmp_path):
    """
    A model in bf16 is fp32 in the folder, as with FSDP2 and mixed precision, and comes back to the
    bit. Breaks where the rounded weights are written.
    """
    run(saves_bf16, 2, tmp_path / "ours")
    before = in_plain_pytorch(tmp_path / "ours")[0]
    assert before["model.last.weight"].dtype == torch.float32
    rounded = before["model.last.weight"].bfloat16().float()
    assert not torch.equal(rounded, before["model.last.weight"])
    run(we_load, 3, tmp_path / "ours", tmp_path / "again", "device", None, torch.bfloat16)
    assert equal(in_plain_pytorch(tmp_path / "again")[0], before) == []


class Small(nn.Module):
    """A scalar, an empty parameter, and one that no step uses"""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.inside = nn.Sequential(nn.Linear(6, 6))
        self.empty = nn.Parameter(torch.ones(0, 3))
        self.scalar = nn.Parameter(torch.randn(()))
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return self.inside(x) * self.scalar + self.empty.sum()


def small(folder):
    """Into plain PyTorch, back again, and what differs"""
    plain = Small(0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=torch.tensor(0.01), foreach=False)
    train(plain, optimizer, range(2))
    before = values(plain, optimizer)
    dcp.save(state_of(plain, optimizer), checkpoint_id=folder / "torch")
    model = wrap(Small(1), nn.Sequential)
    one = Zero3Optimizer(model, torch.optim.AdamW, lr=0.5, fused=False)
    load_dcp(folder / "torch", model, one)
    save_dcp(folder / "ours", model, one)
    plain = Small(2)
    optimizer = torch.optim.AdamW(plain.parameters(), foreach=False)
    train(plain, optimizer, range(1))
    state = state_of(plain, optimizer)
    dcp.load(state, checkpoint_id=folder / "ours")
    # It has no states of what no step has used.
    set_state_dict(plain, [optimizer], model_state_dict=state["model"],
                   optim_state_dict=state["optim"], options=StateDictOptions(strict=False))
    after = values(plain, optimizer)
    return [key for key in equal(before, after) if not key.startswith("optim.of.")], float(
        one.param_groups[0]["lr"])


def test_small_parameters_and_a_rate_that_is_a_tensor(tmp_path):
    """
    Parameters without dimensions and without elements, one that no step has used, and a learning
    rate that torch writes as a tensor: both ways, to the bit.
    Proves `DcpFolder.read_all`, `_dcp_keys`, `_meta`.
    """
    assert run(small, 1, tmp_path)[0] == ([], pytest.approx(0.01))


class Scaled(nn.Linear):
    def __init__(self):
        super().__init__(6, 6)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x) * self.scale


def counts(folder):
    """What differs from plain PyTorch after a step with its states"""
    torch.manual_seed(0)
    plain, model = nn.Sequential(Scaled()), wrap(nn.Sequential(Scaled()), Scaled)
    one = torch.optim.NAdam(plain.parameters(), eps=1e-3)
    for step in range(2):
        if step:
            dcp.save(state_of(plain, one), checkpoint_id=folder)
        plain(batch(step)).square().mean().backward()
        one.step()
        one.zero_grad()
    optimizer = Zero3Optimizer(model, torch.optim.NAdam, lr=1.0, eps=1e-3)
    load_dcp(folder, model, optimizer)
    train(model, optimizer, [1])
    with model.full_params() as params:
        return close(params, dict(plain.named_parameters()))


def test_a_count_of_a_parameter_without_dimensions_is_no_moment(tmp_path):
    """
    NAdam keeps a product for each parameter, as a tensor without dimensions, and so is the scale.
    The first rank has nothing of it. Breaks where equal shapes make the product a moment.
    Proves `DcpFolder`.
    """
    assert max(run(counts, 2, tmp_path)) < 1e-6


def muon(folder):
    """Two optimizers of torch's, and one of ours that steps matrices whole; both ways"""
    def of_torchs(seed):
        model = Net(seed)
        trained = [p for p in model.parameters() if p.requires_grad]
        return model, (torch.optim.Muon([p for p in trained if p.ndim == 2], lr=0.02),
                       torch.optim.AdamW([p for p in trained if p.ndim != 2], lr=0.01))

    def of_ours(seed):
        model = wrap(Net(seed), Block)
        return model, Zero3Optimizer(model, torch.optim.AdamW, lr=0.5, group_by=lambda name, p: {
            "optimizer": torch.optim.Muon, "lr": 0.5} if p.ndim == 2 else {})

    model, pair = of_torchs(0)
    for step in range(2):
        model(batch(step)).square().mean().backward()
        for each in pair:
            each.step()
            each.zero_grad()
    before = values(model, *pair)
    dcp.save(state_of(model, *pair), checkpoint_id=folder / "torch")
    one = of_ours(1)
    load_dcp(folder / "torch", *one)
    save_dcp(folder / "ours", *one)
    model, pair = of_torchs(2)
    # torch looks for the options of a group by its number.
    pair = pair[::-1]
    state = state_of(model, *pair)
    dcp.load(state, checkpoint_id=folder / "ours")
    rates = [group["lr"] for group in one[1].param_groups]
    set_state_dict(model, [*pair], model_state_dict=state["model"],
                   optim_state_dict=state["optim"])
    return equal(before, values(model, *pair)), sorted(rates)


def test_matrices_that_are_stepped_whole(tmp_path):
    """
    The momentum of Muon comes from two optimizers of torch's, and goes back, on two ranks. Breaks
    where the missing name of a class refuses them.
    Proves `Entries.check`.
    """
    assert run(muon, 2, tmp_path) == [([], [0.01, 0.02])] * 2


def stages(folder):
    """A pipeline of two stages, of a plain and of a tied model, writes"""
    found = []
    for kind in ("plain", "tied"):
        one = Run(("pipeline", 2, 1), kind, dtype=torch.float32)
        one.step(0)
        save_dcp(folder / kind, one.model, one.optimizer)
        found.append(one.weights())
    return found


def no_stages(folder):
    """A model without stages reads it, and so does plain PyTorch"""
    found = []
    for kind in ("plain", "tied"):
        one = Run(("wrap", 1), kind, seed=1, dtype=torch.float32)
        load_dcp(folder / kind, one.model, one.optimizer)
        model = nn.Sequential(*layers(kind, 2))
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder / kind)
        found.append((one.weights(), state["model"]))
    return found


def test_stages_of_a_pipeline(tmp_path):
    """
    Each stage writes its own layers, under the names of the plain model, and a tied weight once.
    Breaks where a rank looks for a layer of another stage.
    """
    saved = run(stages, 2, tmp_path)
    (loaded,) = run(no_stages, 1, tmp_path)
    for first, second, (ours_, theirs) in zip(*saved, loaded, strict=True):
        assert equal(ours_, first | second) == []
        assert equal({name: theirs[name] for name in ours_}, ours_) == []


def replicas(folder):
    """Two replicas of one shard each write one checkpoint"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = wrap(Net(0), Block, mesh=mesh)
    optimizer = Zero3Optimizer(model, torch.optim.AdamW, group_by=decay)
    train(model, optimizer, range(2))
    save_dcp(folder, model, optimizer)
    other = wrap(Net(1), Block)
    load_dcp(folder, other)
    with model.full_params() as expected, other.full_params() as params:
        return equal(expected, params)


def test_replicas_write_one_checkpoint(tmp_path):
    assert run(replicas, 2, tmp_path) == [[], []]


# ------------------------------------------------------------------------------------------- errors


def saves_small(folder):
    model, optimizer = ours(0)
    train(model, optimizer, range(1))
    save_dcp(folder, model, optimizer)


def refuses(folders):
    """What each load says, and whether the model is as it was"""
    model, optimizer = ours(1)
    with model.full_params() as params:
        before = {name: p.clone() for name, p in params.items()}
    told = [refused(lambda folder=folder: load_dcp(folder, model, optimizer)) for folder in folders]
    with model.full_params() as params:
        assert equal(before, params) == []
    assert not optimizer.state
    return told


def metadata_of(folder):
    return pickle.loads((folder / ".metadata").read_bytes())


def without(key):
    def damage(folder, metadata):
        del metadata.state_dict_metadata[key], metadata.planner_data[key]
    return damage


def shorter(folder, metadata):
    metadata.state_dict_metadata["model.mix"].size = torch.Size((2, 3, 5))


def narrower(folder, metadata):
    metadata.state_dict_metadata["optim.state.mix.exp_avg"].size = torch.Size((2, 3, 5))


def holed(folder, metadata):
    metadata.state_dict_metadata["optim.state.mix.exp_avg"].chunks.pop()


def cut(folder, metadata):
    for file in folder.glob("*.distcp"):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def foreign(folder, metadata):
    """An option that is code, in place of a number"""
    key = "optim.param_groups.0.lr"
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    torch.save(pytest.raises, folder / "foreign.distcp")
    info.relative_path = "foreign.distcp"
    info.offset, info.length = 0, (folder / "foreign.distcp").stat().st_size


DAMAGES = {
    without("model.mix"): "`mix` has moments but no values",
    without("model.blocks.0.down.weight"): "`blocks.0.down.weight` is missing in the checkpoint",
    without("optim.state.last.bias.exp_avg_sq"): "`last.bias` has a `exp_avg_sq` of None there",
    without("optim.state.last.bias.step"): "`last.bias` has a `step` of None there",
    shorter: "`mix` is of (2, 3, 5) in the checkpoint, of (2, 3, 6) here",
    narrower: "`mix` has a `exp_avg` of ",
    holed: "`mix`, its exp_avg: some elements are in no file",
    cut: "`",
    foreign: "an option of the optimizer: Weights only load failed",
}


def test_a_damaged_folder_is_an_error_on_all_ranks(tmp_path):
    """
    That names the tensor, and leaves model and optimizer as they were. A pickle of something else
    than numbers is not opened. Breaks where the model is changed before all was read.
    Proves `load_dcp`, `DcpCheckpoint`, `errors_name`, `agreed`.
    """
    run(saves_small, 2, tmp_path / "good")
    folders = []
    for i, damage in enumerate(DAMAGES):
        folder = tmp_path / f"bad{i}"
        shutil.copytree(tmp_path / "good", folder)
        metadata = metadata_of(folder)
        damage(folder, metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        folders.append(folder)
    folders.append(tmp_path)
    for told in run(refuses, 2, folders):
        for text, words in zip(told, (*DAMAGES.values(), ".metadata"), strict=True):
            assert words in text and "cannot be loaded" in text, (words, text[200:700])


def refuses_to_save(folder):
    model, optimizer = ours(0)
    save_dcp(folder / "one", model, optimizer)
    told = [refused(lambda: save_dcp(folder / "one", model, optimizer)),
            refused(lambda: save_dcp(folder / "two", model, extra={"optim": 1}))]
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("other", "shard"))
    part = wrap(Net(0), Block, mesh=mesh["shard"])
    told.append(refused(lambda: save_dcp(folder / f"part{dist.get_rank()}", part)))
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tensor", "shard"))
    split = nn.Sequential(*gpt_layers(GPTConfig(seq_len=8, d_model=16, n_layers=2)))
    inject(split, [policies.tensor_parallel(mesh["tensor"])])
    split = wrap(split, tuple({type(layer) for layer in split}), mesh=mesh["shard"])
    told.append(refused(lambda: save_dcp(folder / "split", split)))
    return told


def test_what_cannot_be_written_is_an_error(tmp_path):
    """
    A folder that has a checkpoint, an `extra` that would be overwritten, a model on some of the
    ranks, and weights that are split.
    Proves `save_dcp`, `dcp._check`.
    """
    for one, extra, part, split in run(refuses_to_save, 2, tmp_path):
        assert "would lose a part of `extra`" in extra and "['optim']" in extra
        assert "a folder without a checkpoint" in one
        assert "a model on all 2 ranks. Got: one on ranks [" in part
        assert "whole weights" in split and "because of tensor parallelism" in split


# ---------------------------------------------------------------------------------------- the page


def test_the_program_of_the_page(tmp_path):
    """
    One step of FSDP2 and one of ours are two steps of FSDP2, and the folder has them.
    """
    run_programs(1, page, 2, tmp_path)
    model, optimizer = page_model()
    for seed in (1, 2):
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert close(run(reads_page, 1, tmp_path / "ours")[0], dict(model.named_parameters())) < 1e-6


def page(ports, folder):
    Torchrun(ports, folder).main(DCP)


def page_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def reads_page(folder):
    model, _ = page_model()
    state = {"model": model.state_dict(), "step": 0}
    dcp.load(state, checkpoint_id=folder)
    assert state["step"] == 2
    return state["model"]

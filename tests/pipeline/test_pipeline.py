"""
# Pipelines: stages, each of them sharded

The oracle is plain PyTorch on the global batch, in fp64 unless a test says otherwise.
"""

import copy
import functools
import gc
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from tests.ranks import run
from zero3 import Offload, Zero3Optimizer
from zero3.estimate.ledger import Ledger
from zero3.pipeline import Pipeline
from zero3.pipeline.stages import Plan, balanced, holder, layer_of, names_of

NAMES = ("pipeline", "shard")
TOKENS = 11
WIDTH = 8
LENGTH = 5


class Embedding(nn.Module):
    """Tokens to a dict of a tensor that needs gradients, one that does not, and a number"""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH))

    def forward(self, x):
        return {"h": self.tokens(x) + self.places, "mask": (x > 3)[..., None], "times": 2}


class Block(nn.Module):
    """A layer that is computed again in backward, and hands on what came in too"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        h = checkpoint(lambda h: torch.tanh(self.linear(h)), value["h"], use_reentrant=False)
        h = value["h"] + h * value["mask"] * value["times"]
        # The first activations pass through, unless they have passed through this one before.
        return {**value, "h": h, "first": value.get("first", value["h"])}


class Head(nn.Module):
    """The embedding's weights once more, after a norm of its own"""

    def __init__(self, embedding):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, TOKENS, bias=False)
        self.linear.weight = embedding.tokens.weight

    def forward(self, value):
        return self.linear(self.norm(value["h"] + value["first"]))


def gpt(seed, dtype):
    """A small transformer's shape: five layers, the first and the last one tied."""
    torch.manual_seed(seed)
    embedding = Embedding()
    layers = [embedding, Block(), Block(), Block(), Head(embedding)]
    return [layer.to(dtype) for layer in layers]


def chain(seed, dtype):
    """Four layers of different sizes, one without parameters."""
    torch.manual_seed(seed)
    layers = [nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Flatten()),
              nn.Linear(WIDTH * LENGTH, 7), nn.Tanh(), nn.Linear(7, TOKENS * LENGTH),
              nn.Unflatten(1, (LENGTH, TOKENS))]
    return [layer.to(dtype) for layer in layers]


def loss_of(output, y):
    return nn.functional.cross_entropy(output.flatten(0, 1), y.flatten())


def rows_of(mesh, micro_batches):
    """This rank's number among those that see other rows, how many those are, and its rows."""
    data = mesh[mesh.mesh_dim_names[1:]]
    number = 0
    for place, size in zip(data.get_coordinate(), data.mesh.shape, strict=True):
        number = number * size + place
    return number, data.size(), slice(number * 2 * micro_batches, (number + 1) * 2 * micro_batches)


@functools.cache
def mesh_of(shape, names):
    """Its process groups, which take longer to connect than some cases take to train"""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def difference(make, shape, micro_batches, names=NAMES, frozen=(), dtype=torch.double, steps=3,
               options=None, optimizer_options=None):
    """
    Train a pipeline and its plain twin on the same batches. Returns the largest difference of
    losses, norms and weights.
    """
    mesh = mesh_of(shape, names)
    # Each rank is born with other weights, and only those of the first one count.
    layers, twins = make(dist.get_rank(), dtype), make(0, dtype)
    for i in frozen:
        layers[i].requires_grad_(False)
        twins[i].requires_grad_(False)
    plain = nn.Sequential(*twins)
    pipeline = Pipeline(layers, mesh, loss_fn=loss_of, micro_batches=micro_batches,
                        **options or {})
    optimizer = Zero3Optimizer(pipeline, torch.optim.AdamW, lr=1e-2, clip_grad_norm=0.5,
                               **optimizer_options or {})
    other = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2)
    _, count, mine = rows_of(mesh, micro_batches)
    draw = torch.Generator().manual_seed(1)
    worst = 0.0
    for _ in range(steps):
        shape = (2 * count * micro_batches, LENGTH)
        x, y = (torch.randint(0, TOKENS, shape, generator=draw) for _ in range(2))
        loss = pipeline.train_batch(x[mine], y[mine], optimizer)
        norm = optimizer.step()
        optimizer.zero_grad()
        expected = loss_of(plain(x), y)
        expected.backward()
        expected_norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        other.step()
        other.zero_grad()
        worst = max(worst, abs(loss - expected.item()), abs(norm - expected_norm.item()))
        with torch.no_grad():
            outputs = []
            loss = pipeline.eval_batch(x[mine], y[mine], outputs)
            expected = plain(x)
            worst = max(worst, abs(loss - float(loss_of(expected, y))))
            # On the ranks of the last stage.
            has_last = pipeline.place == (pipeline.count - 1) % pipeline.ranks
            assert len(outputs) == micro_batches * has_last
            if has_last:
                worst = max(worst, float((torch.cat(outputs) - expected[mine]).abs().max()))
    with pipeline.full_params() as params:
        found = dict(plain.named_parameters(remove_duplicate=False))
        assert params.keys() == found.keys()
        return max(worst, *(float((params[n] - p).abs().max()) for n, p in found.items()))


def several(cases):
    return [difference(*case) for case in cases]


def same(cases, ranks, tolerance=1e-10):
    for worst in run(several, ranks, cases):
        assert max(worst) < tolerance, dict(zip(map(str, cases), worst, strict=True))


# ------------------------------------------------------------------------- plain PyTorch's weights

SCHEDULES = [("gpipe", 1, 1), ("gpipe", 3, 1), ("1f1b", 1, 1), ("1f1b", 2, 1), ("1f1b", 5, 1),
             ("1f1b", 8, 1), ("interleaved", 4, 2), ("breadth-first", 3, 2)]


@pytest.mark.parametrize("shape", [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1)])
def test_every_schedule_trains_the_weights_of_plain_pytorch(shape):
    """
    One to three stages, with tied weights, sharded or not; one to eight micro-batches; each of the
    ways to gather; dicts between stages, activation checkpointing in the layers, a clipped norm.
    Losses of training and evaluation, outputs, norms and weights are those of plain PyTorch.
    Proves I1, I7, `Pipeline`, `Pipeline.__init__`, `Channels.__init__`, `Stage.__init__`,
    `Pipeline.train_batch`, `Pipeline.eval_batch`,
    `Pipeline.full_params`, `Pipeline.named_layers`, `Pipeline.cut`, `Pipeline._run`,
    `Pipeline._build`, `Communicator.join`,
    `_Batch`, `_Batch.forward`, `_Batch.backward`,
    `_Batch._loss_of`, `_detached`, `_Batch.send`, `_Batch.receive`, `_Batch._send`,
    `_Batch._receive`, `_Batch._partner`, `Action.is_gradient`, `_Batch.unshard`, `_Batch.reshard`,
    `_Batch.reduce`, `_Batch.send_tied`, `_Batch.receive_tied`, `_Batch.send_tied_gradient`,
    `_Batch.receive_tied_gradient`, `_trainable`, `Channels`, `Channels.send`,
    `Channels.receive`, `Channels.end`, `Channels._start`, `_has_rows`, `Stage`,
    `Stage.unshard`, `Stage.reshard`, `Stage.begin`, `InTurn`, `untie`, `holder`,
    `Communicator.over_stages`, `Group.gather`, `actions`.
    """
    stages, shards = shape
    cases = [(gpt, shape, m, NAMES, (), torch.double, 2,
              {"schedule": schedule, "per_rank": v, "gathers": gathers})
             for schedule, m, v in SCHEDULES if stages * v <= 5 and not (v > 1 and m % stages)
             for gathers in ("each", "direction", "stage")
             # All of them on two stages; elsewhere one way to gather for each schedule.
             if shape == (2, 1) or gathers == ("each", "direction", "stage")[m % 3]]
    same(cases, stages * shards)


@pytest.mark.parametrize("frozen, options", [
    ((0, 1), {"stages": [2, 3]}), ((3, 4), {"stages": [3, 2]}), ((1,), {"stages": [1, 4]}),
    ((), {"stages": [4, 1]}), ((), {"stages": [1, 1, 1, 2], "schedule": "interleaved"})])
def test_uneven_and_frozen_stages_train_like_plain_pytorch(frozen, options):
    """
    A stage may be much larger than another one. The first or the last stage may be frozen: no
    gradient is sent to a stage whose outputs need none, and its rank has no optimizer states.
    Proves I1, `stages.Plan`, `stages.Plan.__init__`, `Pipeline._build`, `Zero3Optimizer._squares`.
    """
    same([(gpt, (2, 1), 4, NAMES, frozen, torch.double, 3, options),
          (chain, (2, 1), 4, NAMES, frozen[:1], torch.double, 3,
           {**options, "stages": None, "per_rank": 1, "schedule": "1f1b"})], 2)


def with_tiers(folder):
    files = Offload("nvme", folder=folder)
    scaled = {"loss_scale": 1024.0, "reduce_dtype": torch.double}
    cases = [(gpt, (2, 2), 4, NAMES, (), torch.double, 3, {"offload": tier}, {"offload": tier})
             for tier in ("cpu", files)]
    cases += [(gpt, (2, 2), 4, NAMES, (), torch.double, 3, {}, options)
              for options in ({"offload": "cpu"}, scaled)]
    return [difference(*case) for case in cases]


def test_from_files_and_cpu_memory_and_with_a_loss_scale(tmp_path):
    """
    Two stages of two shards. Optimizer states, or weights too, rest in CPU memory or in files:
    what users of DeepSpeed asked for. The lent shard of tied weights comes from a file too.
    Proves I8, `Pipeline.train_batch`, `_Batch.send_tied`.
    """
    for worst in run(with_tiers, 4, str(tmp_path)):
        assert max(worst) < 1e-10


def test_replicas_of_a_pipeline_train_like_plain_pytorch():
    """
    Two stages, each on two replicas. The gradient of borrowed weights is a sum over replicas
    already, and counts once.
    Proves I1, `_Batch.receive_tied_gradient`.
    """
    names = ("pipeline", "replicate", "shard")
    same([(gpt, (2, 2, 1), 4, names), (gpt, (1, 2, 2), 2, names)], 4)


def in_bf16(shape):
    """The weights after training bf16 layers with fp32 masters, and sums of gradients in fp32."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=NAMES)
    pipeline = Pipeline(chain(0, torch.bfloat16), mesh, loss_fn=loss_of, micro_batches=4)
    optimizer = Zero3Optimizer(pipeline, torch.optim.AdamW, lr=1e-2, reduce_dtype=torch.float32)
    draw = torch.Generator().manual_seed(1)
    *_, mine = rows_of(mesh, 4)
    for _ in range(5):
        x, y = (torch.randint(0, TOKENS, (16, LENGTH), generator=draw) for _ in range(2))
        pipeline.train_batch(x[mine], y[mine], optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with pipeline.full_params() as params:
        return {name: p.detach().clone() for name, p in params.items()}


def test_bf16_layers_with_masters_have_the_bits_of_a_single_stage():
    """
    Activations and their gradients travel in bf16, as they would go from layer to layer. Gradients
    of weights are summed and reduced in fp32. So two stages train the same bits as one.
    Proves I8, `Pipeline.train_batch`.
    """
    expected = run(in_bf16, 2, (1, 2))[0]
    for found in run(in_bf16, 4, (2, 2)):
        assert all(torch.equal(found[name], p) for name, p in expected.items())
        assert found.keys() == expected.keys()


# ------------------------------------------------------------------------------------------ cutting


def test_layers_are_cut_so_that_the_largest_stage_is_small():
    """
    The example of the head; and every way to cut, for small lists.
    Proves `balanced`, `names_of`, `stages.layer_of`.
    """
    def of(sizes):
        return [nn.Linear(n, 1, bias=False) for n in sizes]

    assert balanced(of([4, 1, 1, 1, 5]), 2) == [3, 2]
    for sizes in ([3, 1, 4, 1, 5], [1, 1, 1, 1], [9, 1, 1, 9], [2, 7, 1, 8, 2, 8]):
        for parts in range(1, 5):
            counts = balanced(of(sizes), parts)
            assert sum(counts) == len(sizes) and len(counts) == parts and min(counts) > 0
            assert largest(sizes, counts) == min(
                largest(sizes, other) for other in compositions(len(sizes), parts))
    # A layer without weights is never a stage of its own.
    assert balanced([nn.Linear(9, 1), nn.Tanh(), nn.Linear(2, 1), nn.Linear(1, 1)], 3) == [1, 2, 1]
    assert layer_of("3.weight") == 3
    assert [*names_of(of([2, 3])).values()] == [["0.weight"], ["1.weight"]]


def largest(sizes, counts):
    rest = iter(sizes)
    return max(sum(next(rest) for _ in range(count)) for count in counts)


def compositions(total, parts):
    if parts == 1:
        yield [total]
        return
    for first in range(1, total - parts + 2):
        for rest in compositions(total - first, parts - 1):
            yield [first, *rest]


def test_a_plan_knows_tied_weights_and_who_keeps_them():
    """
    Proves `stages.Plan.__init__`, `holder`.
    """
    layers = gpt(0, torch.double)
    plan = Plan(layers, 2, [2, 3])
    assert plan.ends == (0, 1) and [*plan.tied.values()] == [["0.tokens.weight", "4.linear.weight"]]
    # Once, with both of its names.
    tied = ("0.tokens.weight", "4.linear.weight")
    assert plan.shapes[tied] == (0, (TOKENS, WIDTH), torch.double) and plan.shared_buffers == set()
    assert plan.shapes[("4.norm.weight",)][0] == 1 and plan.owners == [0, 0, 1, 1, 1]
    names = [name for name, _ in holder(plan.tied).named_parameters(remove_duplicate=False)]
    assert names == ["0.tokens.weight", "4.linear.weight"]
    assert Plan(layers, 1, [5]).ends == (0, 0) and not Plan(chain(0, torch.double), 1, [5]).tied


# --------------------------------------------------------------------------------------- in its use


def used():
    """What a user does around training; returns texts and numbers to compare."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    pipeline = Pipeline(gpt(0, torch.double), mesh, loss_fn=loss_of, micro_batches=2)
    optimizer = Zero3Optimizer(
        pipeline, torch.optim.SGD, lr=0.1,
        # Each stage has parameters of other groups than the rest.
        group_by=lambda name, p: {"lr": 0.2} if name.startswith("4.norm") else {})
    x = torch.arange(4 * LENGTH).view(4, LENGTH) % TOKENS
    with pipeline.full_params() as params:
        before = {name: p.clone() for name, p in params.items()}
    with Ledger(pipeline, optimizer) as tape:
        # Two batches, whose gradients add up.
        for _ in range(2):
            pipeline.train_batch(x, x, optimizer)
    norm = pipeline.clip_grad_norm_(1e9)
    stepped = optimizer.step()
    optimizer.zero_grad()
    events = [event for event in tape.events if event.layer.startswith("stage ")]
    passes = sum(event.event in ("forward", "backward") for event in events)
    with pipeline.full_params(writeback=True) as params:
        moved = {name: (before[name] - p).abs().max().item() for name, p in params.items()}
        if dist.get_rank() == 0:
            for name, p in params.items():
                p.data.copy_(before[name])
    wrong = [refused_write(pipeline, how) for how in ("shape", "raises")]
    with pipeline.full_params() as params:
        back = all(torch.equal(before[name], p) for name, p in params.items())
    groups = [group["lr"] for group in optimizer.param_groups]
    return float(norm), stepped, passes, groups, moved, back, wrong


def refused_write(pipeline, how):
    """What a rank says if one of them writes what does not fit, or raises an error."""
    with pytest.raises((RuntimeError, ValueError)) as error, \
            pipeline.full_params(writeback=True) as params:
        params["4.norm.bias"].data.fill_(7)
        if how == "shape" and dist.get_rank() == 0:
            params["2.linear.bias"].data = params["2.linear.bias"].new_zeros(3)
        if how == "raises" and dist.get_rank() == 1:
            raise ValueError("not this one")
    return str(error.value)


def test_norms_groups_accumulation_and_full_params_are_those_of_the_whole_model():
    """
    All ranks of all stages see the same norm and the same param groups. `full_params` has every
    parameter on every rank, and brings back what the first rank wrote. Gradients of two batches add
    up. A `Ledger` hears of each action.
    Proves `Pipeline.full_params`, `Pipeline.held_tensors`, `Zero3Optimizer._make_shard_states`,
    `clip_grad_norm_`, `Counted`.
    """
    answers = run(used, 4)
    for norm, stepped, passes, groups, moved, back, (shape, raises) in answers:
        assert "Got: `2.linear.bias` of (3,), torch.float64, on rank 0." in shape
        assert "not this one" in raises
        assert norm == pytest.approx(answers[0][0], rel=1e-12)
        assert stepped == answers[0][1] and passes == 2 * 2 * 2
        assert groups == [0.1, 0.2] and moved == answers[0][4] and back
    plain = nn.Sequential(*gpt(0, torch.double))
    x = torch.arange(4 * LENGTH).view(4, LENGTH) % TOKENS
    (2 * loss_of(plain(x), x)).backward()
    params = dict(plain.named_parameters(remove_duplicate=False))
    norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in plain.parameters()]))
    assert answers[0][0] == pytest.approx(float(norm), rel=1e-10)
    for name, moved in answers[0][4].items():
        lr = 0.2 if name.startswith("4.norm") else 0.1
        assert moved == pytest.approx(lr * float(params[name].grad.abs().max()), rel=1e-9)


def overflow(stage, scaled):
    """A step with an infinite gradient in one stage: what each rank says, and its scale."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    layers = chain(0, torch.float32)
    pipeline = Pipeline(layers, mesh, loss_fn=loss_of, micro_batches=2, stages=[2, 3])
    optimizer = Zero3Optimizer(pipeline, torch.optim.SGD, lr=0.1,
                               loss_scale="dynamic" if scaled else None)
    before = copy.deepcopy([p.detach() for p in pipeline.get_trainable_chunk()])
    x = torch.zeros(2, LENGTH, dtype=torch.long)
    pipeline.train_batch(x, x, optimizer)
    if mesh.get_local_rank("pipeline") == stage and mesh.get_local_rank("shard") == 1:
        grad = pipeline.get_trainable_chunk()[0].grad
        grad.view(-1)[0] = float("inf")
    try:
        told = optimizer.step()
    except RuntimeError as error:
        told = str(error)
    now = pipeline.get_trainable_chunk()
    return told, optimizer.loss_scale, all(map(torch.equal, before, now))


def test_an_overflow_in_one_stage_skips_the_step_in_all():
    """
    With a dynamic scale all ranks lower it, and none has stepped. Without one, all ranks raise: the
    stage itself names its layer, the other one names the ranks.
    Proves `Zero3Optimizer._overflow`, `Zero3Optimizer.step`.
    """
    for stage in (0, 1):
        for told, scale, same in run(overflow, 4, stage, True):
            assert told is None and scale == 32768 and same
        answers = run(overflow, 4, stage, False)
        for rank, (told, _, same) in enumerate(answers):
            layer = ("layer 0 (Sequential)", "layer 3 (Linear)")[stage]
            there = layer if rank // 2 == stage else f"the layers of rank {2 * stage + rank % 2}"
            assert f"a norm of inf or nan in {there}" in told and same


class InPlace(nn.Module):
    """A layer that writes to what came in, and counts in a buffer that it hands on"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, value):
        h, count = value if isinstance(value, tuple) else (value, self.count)
        h = self.linear(torch.relu_(h)) * (1 + count)
        self.count += 1
        return h, self.count


def odd_layers(seed):
    torch.manual_seed(seed)
    return [nn.Sequential(nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)), InPlace(),
            InPlace(), First(), nn.Linear(WIDTH, TOKENS)]


class First(nn.Module):
    def forward(self, value):
        return value[0]


class Reuses(nn.Module):
    """A layer that returns the same memory each time"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("memory", torch.zeros(1, LENGTH, WIDTH))

    def forward(self, x):
        found = self.memory.detach()
        return found.copy_(self.linear(x))


def reusing_layers(seed):
    torch.manual_seed(seed)
    return [nn.Embedding(TOKENS, WIDTH), Reuses(), nn.Linear(WIDTH, WIDTH), nn.Tanh(),
            nn.Linear(WIDTH, TOKENS)]


def odd(micro_batches, make=odd_layers, **options):
    """The loss of a pipeline of odd layers, and of the same layers micro-batch by micro-batch."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=NAMES)
    pipeline = Pipeline([m.double() for m in make(0)], mesh, loss_fn=loss_of,
                        micro_batches=micro_batches, stages=[2, 3], **options)
    optimizer = Zero3Optimizer(pipeline, torch.optim.SGD, lr=0.1)
    plain = nn.Sequential(*make(0)).double()
    x = torch.arange(4 * LENGTH).view(4, LENGTH) % TOKENS
    loss = pipeline.train_batch(x, x, optimizer)
    optimizer.step()
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = 0.0
    for part in x.chunk(micro_batches):
        each = loss_of(plain(part), part) / micro_batches
        each.backward()
        expected += each.item()
    other.step()
    with pipeline.full_params() as params:
        worst = max((params[name] - p).abs().max().item() for name, p in plain.named_parameters())
    return abs(loss - expected), worst


def test_a_stage_may_write_to_what_came_in_and_hand_on_a_buffer():
    """
    The first layer of the second stage works in place. A buffer that is handed on changes in the
    next micro-batch, before its message has left.
    Proves I1, `_Arrival`, `to_send`.
    """
    for differences in run(odd, 2, 4):
        assert max(differences) < 1e-12


def test_a_stage_may_write_its_outputs_to_the_same_memory():
    """
    The next micro-batch writes to it before this message has left. Breaks where a tensor is sent
    without a copy because it has a gradient: the second stage trains with other rows, in silence.
    Both stages may be on one rank, which sends nothing.
    Proves I1, `to_send`, `_detached`.
    """
    for differences in run(odd, 2, 4, reusing_layers):
        assert max(differences) < 1e-12
    one_rank = functools.partial(odd, schedule="breadth-first")
    assert max(run(one_rank, 1, 4, reusing_layers)[0]) < 1e-12


class Relu(nn.Module):
    """Writes to what came in"""

    def forward(self, x):
        return torch.relu_(x)


def writes(schedule):
    """What a first layer and a loss that work in place train, and whether the rows are as before"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)

    def loss_fn(output, y):
        return (output - y.mul_(2)).square().mean()

    def make():
        torch.manual_seed(0)
        return [m.double() for m in (Relu(), nn.Linear(4, 4), Relu(), nn.Linear(4, 4))]

    pipeline = Pipeline(make(), mesh, loss_fn=loss_fn, micro_batches=2, schedule=schedule)
    optimizer = Zero3Optimizer(pipeline, torch.optim.SGD, lr=0.1)
    x, y = torch.randn(2, 4, 4, dtype=torch.double)
    before = x.clone(), y.clone()
    for _ in range(2):
        pipeline.train_batch(x, y, optimizer)
    optimizer.step()
    plain = nn.Sequential(*make())
    for _ in range(2):
        loss_fn(plain(x.clone()), y.clone()).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with pipeline.full_params() as params:
        worst = max((params[name] - p).abs().max().item() for name, p in plain.named_parameters())
    return worst, torch.equal(x, before[0]) and torch.equal(y, before[1])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_first_layer_and_a_loss_may_write_to_their_rows(schedule):
    """
    Micro-batches are parts of one tensor, and a write to one of them is none to the others. The
    batch itself stays the same on all ranks, so it can be used again.
    Proves I1, `_copied`.
    """
    for worst, unchanged in run(writes, 2, schedule):
        assert worst < 1e-12 and unchanged


class Pair(nn.Module):
    """One weight under two names"""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def written_by_name(name):
    """Write a weight of the second rank by one of its names: what all its names read then"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    layers = [nn.Linear(4, 4), Pair(), nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[3].weight = layers[2].weight
    pipeline = Pipeline(layers, mesh, loss_fn=loss_of, stages=[1, 3])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad(), pipeline.full_params(writeback=True) as params:
            params[name].fill_(7)
        with pipeline.full_params() as params:
            return {other for other, p in params.items() if bool((p == 7).all())}


def test_a_weight_may_be_written_by_any_of_its_names():
    """
    Breaks where each name has a tensor of its own on a rank that does not keep the weight: the last
    name wins, with the old values. Reading does not count as writing, so there is no warning.
    Proves `Pipeline.full_params`, `Communicator.broadcast`.
    """
    inner, tied = ["1.first.weight", "1.second.weight"], ["2.weight", "3.weight"]
    for names in (inner, tied):
        for name in names:
            assert run(written_by_name, 2, name) == [{*names}] * 2


def doubled():
    """Losses with weights twice as large, in `full_params` and afterwards: how far from plain"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    pipeline = Pipeline(gpt(0, torch.double), mesh, loss_fn=loss_of, micro_batches=2)
    plain = nn.Sequential(*gpt(0, torch.double))
    x = torch.arange(4 * LENGTH).view(4, LENGTH) % TOKENS
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        with pipeline.full_params():
            # Nobody writes here, so nothing is lost.
            pass
        with pipeline.full_params(writeback=True) as params:
            for p in {*params.values(), *plain.parameters()}:
                p.mul_(2)
            losses = [pipeline.eval_batch(x, x)]
        losses.append(pipeline.eval_batch(x, x))
        return [abs(loss - float(loss_of(plain(x), x))) for loss in losses]


def test_a_batch_inside_full_params_sees_what_was_written_there():
    """
    In both stages that use tied weights. Breaks where the last one gets their shards meanwhile: a
    loss of other weights, in silence.
    Proves `Pipeline.full_params`, `_Batch.receive_tied`.
    """
    assert max(max(each) for each in run(doubled, 2)) < 1e-12


def of_changing_lengths():
    """The bytes of all tensors that are alive after some batches, each of another length"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    layers = [nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, TOKENS)]
    pipeline = Pipeline(layers, mesh, loss_fn=loss_of, micro_batches=2)
    optimizer = Zero3Optimizer(pipeline, torch.optim.SGD, lr=0.1)
    found = []
    for step in range(30):
        x = torch.zeros(4, 1 + step, dtype=torch.long)
        pipeline.train_batch(x, x, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        del x
        if step in (4, 29):
            gc.collect()
            found.append(sum(thing.nbytes for thing in gc.get_objects()
                             # A description on the meta device has no memory.
                             if isinstance(thing, torch.Tensor) and not thing.is_meta))
    return found


def test_batches_of_changing_lengths_take_no_memory():
    """
    To the byte. Breaks where a rank keeps a buffer for each shape that it has seen.
    Proves `Channels.receive`, `Channels.send`, `Channels.end`.
    """
    for before, after in run(of_changing_lengths, 2):
        assert before == after


def freezes():
    """Freeze all but one layer after the first step, and thaw after the second."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    layers, twins = gpt(0, torch.double), gpt(0, torch.double)
    pipeline = Pipeline(layers, mesh, loss_fn=loss_of, micro_batches=2)
    plain = nn.Sequential(*twins)
    optimizer = Zero3Optimizer(pipeline, torch.optim.SGD, lr=0.1)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    x = torch.arange(4 * LENGTH).view(4, LENGTH) % TOKENS
    for step in range(3):
        for model in (pipeline, plain):
            model.requires_grad_(step != 1)
        for layer in (*[m for name, m in pipeline.named_layers() if name == "2."], twins[2]):
            layer.requires_grad_(True)
        pipeline.train_batch(x, x, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        loss_of(plain(x), x).backward()
        other.step()
        other.zero_grad()
    with pipeline.full_params() as params:
        return max((params[name] - p).abs().max().item() for name, p in plain.named_parameters())


def test_freezing_between_steps_reaches_borrowed_weights():
    """
    The stage that borrows tied weights learns with them whether they train.
    Proves `_Batch.receive_tied`, `_Batch.send_tied_gradient`, `_Batch.send_tied`.
    """
    assert max(run(freezes, 2)) < 1e-12


def thaws():
    """A stage that was frozen when the optimizer was built trains now; what a step says."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    layers = chain(0, torch.double)
    layers[1].requires_grad_(False)
    pipeline = Pipeline(layers, mesh, loss_fn=loss_of, micro_batches=2, stages=[2, 3])
    optimizer = Zero3Optimizer(pipeline, torch.optim.SGD, lr=0.1)
    pipeline.requires_grad_(True)
    x = torch.arange(4 * LENGTH).view(4, LENGTH) % TOKENS
    pipeline.train_batch(x, x, optimizer)
    with pytest.raises(RuntimeError) as error:
        optimizer.step()
    return str(error.value)


def test_a_stage_that_cannot_step_stops_the_others():
    """
    The other stage hears of it in the place of a norm, and does not wait.
    Proves `Zero3Optimizer.step`, `Zero3Optimizer._norms_of_stages`.
    """
    first, second = run(thaws, 2)
    assert "parameters that trained when the optimizer was built" in first
    assert "stages that are ready to step. Got: errors on ranks [0]" in second


def inner_tie(options):
    """Two inner layers share a weight, in neighbouring stages of different ranks."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    torch.manual_seed(0)
    layers = [nn.Embedding(TOKENS, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)),
              nn.Linear(WIDTH, TOKENS)]
    layers[3].weight = layers[2].weight
    plain = nn.Sequential(*copy.deepcopy(layers)).double()
    pipeline = Pipeline([m.double() for m in layers], mesh, loss_fn=loss_of, micro_batches=4,
                        stages=[1, 1, 1, 2], **options)
    optimizer = Zero3Optimizer(pipeline, torch.optim.SGD, lr=0.1)
    x = torch.arange(4 * LENGTH).view(4, LENGTH) % TOKENS
    pipeline.train_batch(x, x, optimizer)
    optimizer.step()
    loss_of(plain(x), x).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with pipeline.full_params() as params:
        return max((params[name] - p).abs().max().item() for name, p in plain.named_parameters())


@pytest.mark.parametrize("schedule", ["interleaved", "breadth-first"])
def test_weights_may_be_tied_between_inner_stages(schedule):
    """
    Breaks where the gradient of borrowed weights is awaited before the other rank can send it.
    Proves `actions`, `_Batch.receive_tied_gradient`.
    """
    assert max(run(inner_tie, 2, {"schedule": schedule})) < 1e-12

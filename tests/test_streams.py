"""
# Streams: nothing races, and what shall overlap may (I9)

On an accelerator that is not there: `tests/streams.py`.
"""

import copy
from collections import Counter
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests import cases, wholes
from tests.ranks import run
from tests.streams import Accelerator, Event, Line, Work, before
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.comm.collectives import Communicator, Transfer
from zero3.comm.reducer import Reducer
from zero3.offload.in_file import InFile
from zero3.optimizer.whole import Owners


def nothing(*_):
    """In place of a wait"""


# ------------------------------------------------------------------------------------------ races


class Chain:
    """A case of `cases.py`"""

    def __init__(self, name):
        self.case = cases.CASES[name]()

    def sharded(self, offload):
        make = getattr(self.case, "wrap", Zero3Layer)
        return Zero3Sequential(
            [make(layer.double(), offload=offload) for layer in self.case.layers()])

    def batch(self, step, world_size):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(2 * world_size, cases.WIDTH, dtype=torch.double, generator=generator)

    def forward(self, model, rows):
        self.case.loss(model, rows)

    def backward(self, model, rows):
        self.case.backward(model, rows)


class Whole:
    """A model of `wholes.py`"""

    def __init__(self, name):
        self.name = name

    def sharded(self, offload):
        return wholes.build(self.name, offload=offload)[1]

    def batch(self, step, world_size):
        return wholes.tokens(step, wholes.ROWS * world_size)

    def forward(self, model, rows):
        return wholes.WHOLES[self.name].loss(self, model(rows))

    def backward(self, model, rows):
        self.forward(model, rows).backward()


def train(trial, model, optimizer):
    """
    Two steps, with an evaluation in each. Nothing in here reads a value: the host waits for
    the device where the library makes it wait, and nowhere else.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        rows = trial.batch(step, world_size).chunk(world_size)[rank]
        trial.backward(model, rows)
        # Before the step: nothing of it makes the host wait.
        with torch.no_grad():
            trial.forward(model, rows)
        optimizer.step()
        optimizer.zero_grad()


def of_torch(model):
    # Not Adam: the host would read its count of steps from the device.
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05, momentum=0.5)


def of_zero3(offload, model):
    # Large layers go alone, small ones share a bucket; and the gradient is never clipped.
    return Zero3Optimizer(model, torch.optim.SGD, lr=0.05, momentum=0.5, clip_grad_norm=1e9,
                          bucket_bytes=600, offload=offload)


def race(trial, tier, states, folder):
    """
    Train on the device: how many orders were checked, and what is not ordered. Without a tier for
    the states, they are those of torch's optimizer.
    """
    params_in, states_in = (each and Offload(each, folder if each == "nvme" else None)
                            for each in (tier, states))
    if states == tier:
        states_in = params_in
    with Accelerator() as device:
        model = trial.sharded(params_in)
        train(trial, model, of_zero3(states_in, model) if states else of_torch(model))
    return device.checks, Counter(device.problems)


def races(tier, states, chains, models, folder):
    found = {}
    for name in chains:
        found[name] = race(Chain(name), tier, states, folder)
    for name in models:
        found[f"whole {name}"] = race(Whole(name), tier, states, folder)
    return found


# The quickest that cover each way through the comm: accumulation, a backward inside of backward,
# several flat parameters, gradients that nobody announces.
SOME = ("Chain", "Accumulated", "CheckpointAroundReentrant", "DataTypes", "Unused")
SOME_WHOLES = ("TiedBetweenUnits", "Branches", "RecomputedReentrant")


@pytest.mark.parametrize("tier, states, chains, models", [
    # Without the one whose loss takes a gradient, which an evaluation cannot.
    ("device", None, [name for name in cases.CASES if name != "Prompt"], SOME_WHOLES),
    ("device", "device", SOME[:3], SOME_WHOLES[1:2]),
    ("device", "cpu", SOME[:3], SOME_WHOLES[1:2]),
    ("device", "nvme", SOME[:3], SOME_WHOLES[1:2]),
    ("cpu", None, SOME[:3], SOME_WHOLES[1:2]),
    ("cpu", "cpu", SOME, SOME_WHOLES),
    ("nvme", "nvme", SOME, SOME_WHOLES[:2]),
])
def test_no_two_streams_use_the_same_memory_unless_one_waits_for_the_other(
        tier, states, chains, models, tmp_path):
    """
    Every use of every tensor is ordered after those before it that it has to see: on compute,
    fetch and backup stream, on NCCL's, on the host and by the threads that read and write files;
    and so is the next use of memory that was freed. Breaks with each of the mistakes in `PLANTED`.
    Proves I9, `Communicator.on`, `Reducer.deliver`, `Transfer.wait`, `streams`.
    """
    for found in run(races, 2, tier, states, chains, models, str(tmp_path)):
        assert len(found) == len(chains) + len(models)
        for name, (checks, problems) in found.items():
            assert checks > 200 and not problems, (name, problems)


class Matrices:
    """Six matrices, each of which one rank steps whole. Each has a storage of its own"""

    def sharded(self, offload):
        torch.manual_seed(0)
        return Zero3Sequential([Zero3Layer(nn.Linear(6, 6, bias=False).double(), offload=offload)
                                for _ in range(6)])

    def batch(self, step, world_size):
        generator = torch.Generator().manual_seed(step)
        return torch.randn(2 * world_size, 6, dtype=torch.double, generator=generator)

    def forward(self, model, rows):
        model(rows).square().mean()

    def backward(self, model, rows):
        model(rows).square().mean().backward()


def race_of_owners(tier, folder):
    """How many orders of a run with owners were checked, what is not ordered, and the messages"""
    offload = Offload(tier, folder=folder if tier == "nvme" else None)
    with Accelerator() as device:
        trial = Matrices()
        model = trial.sharded(offload)
        train(trial, model, Zero3Optimizer(model, torch.optim.Muon, lr=0.05, bucket_bytes=600,
                                           clip_grad_norm=1e9, offload=offload))
    # In each line's own order: what it computes while messages travel.
    log = [operation for operation in device.log if operation.line in ("nccl", "compute")]
    overlapped = any(a.what == "messages" and b.what == "mm" and not before(a, b)
                     and not before(b, a) for a in log for b in log)
    return device.checks, Counter(device.problems), overlapped


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
def test_pieces_on_their_way_to_owners_and_back_race_with_nothing(tier, tmp_path):
    """
    Copies out of the masters, messages, steps on the owner and copies back. On the device the next
    matrix travels while this one is orthogonalised.
    Proves I9, `Owners.step`, `Owners._start`, `Owners._land`.
    """
    for checks, problems, overlapped in run(race_of_owners, 2, tier, str(tmp_path)):
        assert checks > 500 and not problems, problems
        assert overlapped or tier != "device"


PLANTED_IN_OWNERS = {
    "the owner does not wait for the pieces": (Work, "wait", nothing),
    "nobody waits for the new values": (
        Owners, "_land", lambda self: self.trips["give back"].clear()),
}


def plant_in_owners():
    found = {}
    for what, replaced in PLANTED_IN_OWNERS.items():
        with mock.patch.object(*replaced):
            found[what] = race_of_owners("device", None)[1]
    return found


def test_a_planted_mistake_on_the_way_to_owners_is_found():
    """
    Each changes no number here.
    Proves I9, `Owners._compute`, `Owners._land`.
    """
    for found in run(plant_in_owners, 2):
        assert all(found[what] for what in PLANTED_IN_OWNERS), found


def trains_on_an_accelerator(tier, folder):
    """The weights of three steps, plain on the CPU and in shards on the device, from this tier"""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)]
    plain = copy.deepcopy(nn.Sequential(*layers))
    x = torch.randn(3, 4, 6)
    with Accelerator():
        place = Offload(tier, folder=folder if tier == "nvme" else None)
        model = Zero3Sequential([Zero3Layer(layer, offload=place) for layer in layers])
        ours = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, offload=place, bucket_bytes=0)
        for batch in x:
            ours.zero_grad()
            ours.backward(model(batch).square().mean())
            ours.step()
        with model.full_params() as params:
            found = {name: p.detach().clone() for name, p in params.items()}
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in x:
        theirs.zero_grad()
        plain(batch).square().mean().backward()
        theirs.step()
    return max(float((p - found[name].cpu()).abs().max()) for name, p in plain.named_parameters())


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
def test_on_an_accelerator_each_tier_trains_like_plain_pytorch(tier, tmp_path):
    """
    A gradient on its way to CPU memory arrives after its layer has forgotten which parameters have
    contributed to it. Breaks if they do not travel along: then all of them count as unused, and the
    weights stay as they were.
    Proves I1, I8, I9, `Reducer.deliver`, `ShardStates.add_grad`, `mark`.
    """
    for off in run(trains_on_an_accelerator, 1, tier, str(tmp_path)):
        assert off < 1e-6


# ------------------------------------------------------------------------------- planted mistakes


def not_waiting(*which):
    """`Communicator.on`, but these streams do not wait for the compute stream"""
    @contextmanager
    def on(self, stream):
        if stream not in [getattr(self, name) for name in which]:
            stream.wait_stream(self.current_stream())
        with self._backend.stream(stream):
            yield

    return on


def release_at_once(storage, stream=None, real=InFile.release):
    real(storage)


def keep_copy_alone(self, leaving):
    vars(self)["kept"] = leaving and (None, *leaving[1:])


# What: on how many ranks, the tiers of parameters and of states; and what is replaced by what.
PLANTED = {
    "no stream waits for compute":
        (2, "device", None, Communicator, "on", not_waiting("fetch_stream", "backup_stream")),
    "the next gather does not wait for the optimizer":
        (2, "device", None, Communicator, "on", not_waiting("fetch_stream")),
    "the reduce does not wait for backward":
        (2, "device", "device", Communicator, "on", not_waiting("backup_stream")),
    "compute does not wait for the all-gather":
        (2, "device", None, Work, "wait", nothing),
    "compute does not wait for the copy of its shard":
        (1, "device", None, Line, "wait_event", nothing),
    "the host steps a shard that is being copied":
        (2, "cpu", None, Transfer, "from_cpu", property(lambda _: False, nothing)),
    "the optimizer does not wait for the sums":
        (2, "device", None, Line, "wait_event", nothing),
    "the host does not wait for a gradient that it reads":
        (2, "cpu", "cpu", Event, "synchronize", nothing),
    "the next file is read into a buffer that is being copied":
        (2, "nvme", "nvme", InFile, "release", release_at_once),
    "a gradient is freed that is being copied":
        (1, "cpu", None, Reducer, "_leaving",
         property(lambda self: vars(self).get("kept"), keep_copy_alone)),
}


def plant(folder):
    """What each mistake leads to, in a chain and in a whole model"""
    found = {}
    for what, (ranks, tier, states, *replaced) in PLANTED.items():
        if ranks == dist.get_world_size():
            with mock.patch.object(*replaced):
                found[what] = [race(trial, tier, states, folder)[1]
                               for trial in (Chain("Chain"), Whole("Plain"))]
    return found


@pytest.mark.parametrize("ranks", [1, 2])
def test_each_planted_mistake_is_found(ranks, tmp_path):
    """
    Each takes one wait away, and none changes a number here, where all runs in the host's order.
    Breaks with a rule that the device does not know, or with a wait that nothing needs.
    Proves I9, `Communicator.on`, `Reducer.deliver`, `Reducer.delivered`, `Transfer.wait`,
    `InFile.release`.
    """
    for found in run(plant, ranks, str(tmp_path)):
        assert found.keys() == {what for what, (n, *_) in PLANTED.items() if n == ranks}
        for what, problems in found.items():
            assert all(problems), what


# ---------------------------------------------------------------------------------------- overlap


class Order:
    """
    ## A recorded pass: which operations of one layer come before which of another
    """

    def __init__(self, log):
        self.log = log

    def compute(self, i):
        return [o for o in self.log if o.line == "compute" and f"layer {i}" in o.names]

    def copy(self, i):
        return [o for o in self.log if o.line == "fetch" and f"layer {i}" in o.names]

    def gather(self, i):
        return [o for o in self.log if o.line == "nccl" and f"layer {i}" in o.names]

    def reduce(self, nth):
        return [o for o in self.log if o.what == "reduce-scatter"][nth:][:1]

    def land(self, nth):
        """The copy of reduced gradients to the CPU"""
        return [o for o in self.log if o.line == "backup" and o.what == "copy_"][nth:][:1]


def waits(later, earlier):
    """Whether any of these operations waits for one of those; or there are none"""
    return not later or not earlier or any(before(a, b) for a in earlier for b in later)


def overlap(kind, tier="cpu", replaced=None):
    """
    A forward and a backward of five layers whose shards are in CPU memory, once the first steps are
    over. Returns the sentences that hold, and how often the host waited.
    """
    with mock.patch.object(*replaced) if replaced else nullcontext(), Accelerator() as device:
        offload = Offload(tier)
        modules = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(5)]
        if kind == "chain":
            model = Zero3Sequential([Zero3Layer(m, offload=offload) for m in modules])
            layers = [*model.module_list]
        else:
            model = wrap(nn.Sequential(nn.Linear(6, 6), *modules), nn.Sequential, offload=offload)
            layers = [m for m in model.modules() if getattr(m, "flats", None)]
            layers = [m for m in layers if isinstance(m.module, nn.Sequential)][-5:]
        comm = layers[0].comm
        comm.fetch_stream.name, comm.backup_stream.name = "fetch", "backup"
        for i, layer in enumerate(layers):
            device.name(layer.flats[0].full, f"layer {i}")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(3, 6)
        for _ in range(3):
            device.log.clear()
            device.waits.clear()
            loss = model(x).square().mean()
            forward, in_forward = Order([*device.log]), [*device.waits]
            device.log.clear()
            device.waits.clear()
            loss.backward()
            backward = Order([*device.log])
            optimizer.step()
            optimizer.zero_grad()
            in_backward = [*device.waits]
    return facts(forward, backward), in_forward, in_backward


def facts(forward, backward):
    found = set()

    def note(sentence, holds):
        if all(holds):
            found.add(sentence)

    f, b = forward, backward
    note("compute waits for its own copy and gather",
         [waits(f.compute(i), f.gather(i)) and waits(f.gather(i), f.copy(i)) for i in range(5)])
    note("compute does not wait for the next copy and gather",
         [not waits(f.compute(i), [*f.copy(i + 1), *f.gather(i + 1)]) for i in range(4)])
    note("the next copy and gather do not wait for compute",
         [not waits([*f.copy(i + 1), *f.gather(i + 1)], f.compute(i)) for i in range(4)])
    note("backward does not wait for the next copy and gather",
         [not waits(b.compute(i), [*b.copy(i - 1), *b.gather(i - 1)]) for i in (4, 3, 2, 1)])
    note("the next copy and gather do not wait for backward",
         [not waits([*b.copy(i - 1), *b.gather(i - 1)], b.compute(i)) for i in (4, 3, 2, 1)])
    # Layer 0 has no gradient of an input to compute, so its backward does not read parameters.
    note("a reduce runs beside the backward of the layer below",
         [not waits(b.compute(i - 1), b.reduce(4 - i)) and
          not waits(b.reduce(4 - i), b.compute(i - 1)) for i in (4, 3, 2)])
    note("gradients land beside the backward of the layer two below",
         [not waits(b.compute(i - 2), b.land(4 - i)) and
          not waits(b.land(4 - i), b.compute(i - 2)) for i in (4, 3)])
    return found


FACTS = {
    "compute waits for its own copy and gather",
    "compute does not wait for the next copy and gather",
    "the next copy and gather do not wait for compute",
    "backward does not wait for the next copy and gather",
    "the next copy and gather do not wait for backward",
    "a reduce runs beside the backward of the layer below",
    "gradients land beside the backward of the layer two below",
}


def takes_the_tail(transfer, real=Transfer.wait):
    """`Transfer.wait`, which then waits for all that the fetch stream has"""
    totals = real(transfer)
    transfer.comm.current_stream().wait_stream(transfer.comm.fetch_stream)
    return totals


def lands_at_once(self, total, sink, names):
    """`Reducer.deliver`, which waits for the copy"""
    sink.add_grad(total.to(sink.grad_device), names)


def overlaps():
    slow = {
        "takes the tail": (Transfer, "wait", takes_the_tail),
        "lands at once": (Reducer, "deliver", lands_at_once),
    }
    return ({kind: overlap(kind) for kind in ("chain", "wrap")},
            {name: overlap("chain", "cpu", replaced)[0] for name, replaced in slow.items()},
            [overlap(kind, "device") for kind in ("chain", "wrap")])


def test_communication_may_run_beside_computation():
    """
    What a GPU is free to do at the same time: neither waits for the other. In a chain and in a
    wrapped model, shards in CPU memory. There the host waits once for each layer's copy, and in
    backward once for its gradient's, each with a layer's computation queued beside. With shards on
    the device the host waits for nothing in a whole step, nor for what ranks announce. Breaks if
    compute waits for the fetch stream's tail, in which the next layer's copy is, or if a gradient
    goes to the CPU by `.to()`.
    Proves I9, `Transfer.wait`, `Communicator.all_gather`, `Reducer.deliver`, `Reducer.delivered`,
    `Reducer.end`, `Communicator.current_stream`.
    """
    on_device = FACTS - {"gradients land beside the backward of the layer two below"}
    for found, slow, near in run(overlaps, 2):
        for kind, (holds, in_forward, in_backward) in found.items():
            assert holds == FACTS, (kind, FACTS - holds)
            units = 5 + (kind == "wrap")
            assert in_forward == ["event"] * units
            # The last layer stays full from forward, and in a wrapped model the rest of it.
            copies = units - 1 - (kind == "wrap")
            assert in_backward == ["event"] * (copies + units), in_backward
        for holds, in_forward, in_backward in near:
            assert holds >= on_device and not in_forward and not in_backward
        first, second = slow["takes the tail"], slow["lands at once"]
        assert "compute does not wait for the next copy and gather" in FACTS - first
        assert "gradients land beside the backward of the layer two below" in FACTS - second

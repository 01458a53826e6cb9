"""
# Small units that share an all-gather

Equality is against plain PyTorch in double precision, see `wholes.py`, and to the bit against the
same model gathered one by one. Messages and memory are counted at every event.
"""

from collections import Counter
from contextlib import nullcontext
from math import ceil

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run
from tests.streams import Accelerator
from tests.test_native import collectives
from tests.wholes import ROWS, WHOLES, build, difference, optimizers, tokens, train_both
from zero3 import Offload, Zero3Optimizer, wrap
from zero3.comm.encodings import Int8
from zero3.comm.links import Links
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.whole_model.together import fetch_together

ALL = 10**9
# Tied, external, nested and persistent units, several data types, a layer called twice.
SOME = ("Plain", "TiedBetweenUnits", "External", "ExternalSiblings", "Branches", "Mixture",
        "Adapters", "Nested", "RecomputedReentrant", "NoRest")


class Block(nn.Module):
    """20 elements"""

    fails = ""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = torch.tanh(self.linear(x))
        if self.fails == "forward":
            raise ValueError("forward fails")
        if self.fails == "backward":
            y.register_hook(self.fail)
        return y

    def fail(self, grad):
        raise ValueError("backward fails")


NUMEL = 20


def blocks(count, **options):
    torch.manual_seed(0)
    return wrap(nn.Sequential(*(Block() for _ in range(count))).double(), Block, **options)


def mine(ids):
    return ids.chunk(dist.get_world_size())[dist.get_rank()]


def weights(model):
    with model.full_params() as params:
        return {name: p.clone() for name, p in params.items()}


# ---------------------------------------------------------------------------------------- equality


def train_both_ways(names, options, native=False):
    """How far from plain PyTorch, misses, and whether sharing changes a bit"""
    found = {}
    with collectives() if native else nullcontext():
        for name in names:
            off, model = train_both(name, steps=2, **options)
            _, alone = train_both(name, steps=2, **{**options, "bucket_numel": 0})
            ours, theirs = weights(model), weights(alone)
            same = all(torch.equal(p, theirs[each]) for each, p in ours.items())
            found[name] = off, model.order.trace.misses, same
    return found


@pytest.mark.parametrize("world_size, names, options, native", [
    (1, SOME[:2], {}, False),
    (2, SOME, {}, False),
    (3, SOME[:4], {}, False),
    (2, SOME[::2], {"bucket_numel": 400, "micro": 2}, False),
    (2, SOME[1::2], {"persist_below_numel": 165, "prefetch_numel": 0, "micro": 2}, False),
    (2, SOME[::3], {"twice": True}, True),
])
def test_sharing_changes_no_bit(world_size, names, options, native):
    """
    Whatever the model does, on one, two and three ranks, by messages and by collectives: the
    numbers are those of plain PyTorch, and the bits those of units that are gathered one by one.
    Breaks if a unit takes columns of another one, or is not packed anew after a step.
    Proves I1, `fetch_together`, `Packed.wait`, `Packed._pack`, `Unit.come_with`, `Unit.refresh`.
    """
    options = {"bucket_numel": ALL, **options}
    for found in run(train_both_ways, world_size, names, options, native):
        for name, (off, misses, same) in found.items():
            assert off < 1e-10 and not misses and same, (name, off, misses, same)


def train_from(tier, folder):
    """Shards in a tier, of which some are frozen and rest encoded, if the tier has that"""
    found = {}
    for name in ("Plain", "Adapters", "FrozenBetween", "Tied"):
        both = []
        for numel in (0, ALL):
            offload = Offload(tier, folder=folder if tier == "nvme" else None,
                              frozen=None if tier == "nvme" else Int8())

            def make(model, offload=offload, **more):
                return Zero3Optimizer(model, offload=offload, **more)

            off, model = train_both(name, steps=2, micro=2, optimizer=make, offload=offload,
                                    bucket_numel=numel)
            both.append(weights(model))
        found[name] = all(torch.equal(p, both[0][each]) for each, p in both[1].items())
        if tier == "nvme":
            found[name] = found[name] and off < 1e-10
    return found


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
def test_shards_of_every_tier_are_packed(tier, tmp_path):
    """
    In memory, encoded, and in files, which have fewer buffers than a bucket has units. Breaks if a
    shard is not released before the next but one is read.
    Proves I8, `Packed.__init__`, `Packed._pack`.
    """
    for found in run(train_from, 2, tier, str(tmp_path)):
        assert all(found.values()), found


# -------------------------------------------------------------------------------- messages, memory


def step_of(count, together, mesh=None):
    """The second of two steps: its events, messages and bytes; an evaluation; the weights"""
    # With padding, so that each rank has as many elements.
    numel = ceil(NUMEL / dist.get_world_size()) * dist.get_world_size()
    model = blocks(count, bucket_numel=together * numel, mesh=mesh and mesh())
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    x = torch.ones(2, 4, dtype=torch.double) * (1 + dist.get_rank())
    for _ in range(2):
        with Ledger(model, optimizer) as tape:
            optimizer.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    events = Counter(e.event for e in tape.events)
    evaluate = Ledger(model)
    with torch.inference_mode():
        model(x)
        with evaluate:
            model(x)
    evaluated = Counter(e.event for e in evaluate.events)
    return (events, evaluated, (tape.messages, tape.sent_bytes, tape.order_bytes),
            weights(model))


def steps_of(count, sizes):
    return [step_of(count, together) for together in sizes]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_number_of_collectives_follows_the_formula(ranks):
    """
    L units that share gathers by k: ceil(L / k) of them in forward and in evaluation, and
    ceil((L - 1) / k) in backward, because the last unit is still full. One by one these are L and
    L - 1. Each rank sends the same bytes, and announces fewer transfers.
    Breaks if the root, which has no parameters here, keeps a reducer of its own: then each backward
    pass is taken for several, and no unit is gathered ahead.
    Proves I4, `units._first`, `TracedOrder._fetch_all`, `Zero3Optimizer.backward`,
    `Packed`.
    """
    count = 7
    sizes = (2, 3, 7, 100)
    for one_by_one, *found in run(steps_of, ranks, count, (0, *sizes)):
        events, evaluated, alone, before = one_by_one
        assert events["fetch"] == count + count - 1 and evaluated["fetch"] == count
        assert not events["unpacked"]
        for together, (events, evaluated, sent, after) in zip(sizes, found, strict=True):
            gathers = ceil(count / together) + ceil((count - 1) / together)
            assert events["fetch"] == events["gathered"] == gathers
            assert evaluated["fetch"] == ceil(count / together)
            saved = (2 * count - 1 - gathers) * (ranks - 1)
            assert alone[0] - sent[0] == saved
            assert alone[1] == sent[1] and alone[2] - sent[2] == 32 * saved
            assert all(torch.equal(p, before[name]) for name, p in after.items())


class Probe:
    """A ledger that looks at how many elements are full or packed, at each event."""

    def __init__(self, model):
        self.model, self.most, self.shared = model, 0, 0
        for unit in model.units:
            unit.listener = self

    def record(self, sender, event, nbytes=0, *args, **kwargs):
        full_bytes = sum(flat.full.untyped_storage().nbytes() for unit in self.model.units
                         for flat in unit.flats if unit.is_fetched)
        packed = {id(buffer): buffer.untyped_storage().nbytes() for unit in self.model.units
                  if unit.packed for buffer in unit.packed.buffers}
        self.most = max(self.most, (full_bytes + sum(packed.values())) // 8)
        if event == "unpacked":
            self.shared += nbytes
        limit = self.model.order.max_live_numel
        assert limit is None or self.model.order.live_numel() <= limit


def live(name, most, **options):
    """The most elements that were full, bytes that were shared, how far off, and units' elements"""
    plain, model = build(name, max_live_numel=most, bucket_numel=ALL, **options)
    probe = Probe(model)
    pair = optimizers(plain, model)
    for step in range(2):
        ids = tokens(step, ROWS * dist.get_world_size())
        plain.loss(plain(ids)).backward()
        plain.loss(model(mine(ids))).backward()
        with torch.no_grad():
            model(mine(ids))
        for each in pair:
            each.step()
            each.zero_grad()
    # To look at all weights takes more.
    model.order.max_live_numel = None
    most = probe.most
    return most, probe.shared, difference(plain, model), {
        unit.path or "the rest": unit.numel for unit in model.units}


def live_within(name, around):
    """Without a limit, then from the least one, which layers have, to more than there is"""
    _, _, _, sizes = live(name, None)
    least = sum(sizes[each] for each in around)
    limits = (least, least + 100, least + 500, 3 * sum(sizes.values()))
    return [(most, *live(name, most)) for most in limits]


LEAST = {"Plain": ["the rest", "layers_.0"], "Recomputed": ["the rest", "layers_.0"],
         "TiedToTheRoot": ["the rest", "layers_.0", "layers_.0.up"]}


@pytest.mark.parametrize("name", LEAST)
def test_packed_buffers_count_as_live(name):
    """
    At every event, the memory of full parameters and of packed buffers is at most
    `max_live_numel`, from the smallest possible limit to more than there is. With the smallest
    nothing fits together, and nothing is shared. Breaks if a packed buffer is not counted, or keeps
    a wanted unit out.
    Proves I3, `TracedOrder.live_numel`, `TracedOrder._fits`, `TracedOrder._make_room`,
    `Unit.packed`, `Unit.held_tensors`.
    """
    for found in run(live_within, 2, name, LEAST[name]):
        for most, peak, _, off, _ in found:
            assert peak <= most and off < 1e-10, (most, peak)
        shares = [shared for _, _, shared, *_ in found]
        assert shares == sorted(shares) and shares[0] == 0 < shares[-1]


def peak_of(count, together):
    model = blocks(count, bucket_numel=together * NUMEL)
    probe = Probe(model)
    for _ in range(2):
        probe.most = 0
        model(torch.ones(2, 4, dtype=torch.double)).sum().backward()
    left_bytes = held_bytes(model) - sum(p.nbytes for p in model.get_trainable_chunk())
    grads = sum(p.grad.nbytes for p in model.get_trainable_chunk())
    return probe.most, left_bytes - grads


def test_a_bucket_that_is_there_twice_is_the_most():
    """
    When the first unit of a bucket takes the parameters of all, the bucket before is free: 2 k
    units. After a step nothing is left. Breaks if the packed buffer outlives that.
    Proves I2, I3, `Packed.wait`, `fetch_together`.
    """
    for together in (2, 3):
        for peak, left_bytes in run(peak_of, 2, 3 * together, together):
            assert peak == 2 * together * NUMEL and left_bytes == 0


def persistent_gathers():
    model = blocks(5, persist_below_numel=ALL, bucket_numel=ALL)
    optimizer = torch.optim.SGD(model.get_trainable_chunk(), 0.1)
    x = torch.ones(2, 4, dtype=torch.double)
    counts = []
    for _ in range(3):
        with Ledger(model) as tape:
            for _ in range(2):
                model(x).sum().backward()
        optimizer.step()
        counts.append(sum(e.event == "fetch" for e in tape.events))
    return counts


def test_persistent_units_are_gathered_again_together():
    """
    Once in a step, all of them by one all-gather, as soon as their order is known.
    Proves `Unit.refresh`, `TracedOrder._fetch_all`.
    """
    assert run(persistent_gathers, 2) == [[5, 1, 1]] * 2


def fetched_by_hand():
    """Units that are gathered together and released, some without having computed"""
    model = blocks(4)
    x = torch.ones(1, 4, dtype=torch.double)
    expected = model(x)
    units = model.units[1:]
    before_bytes = held_bytes(model)
    facts = []
    with Ledger(model) as tape:
        fetch_together(units[:3])
        # A second time, with one that is not on its way, which is gathered alone then.
        fetch_together(units)
        facts.append([unit.is_fetched for unit in units])
        facts.append([unit.packed is not None for unit in units])
        for unit in units:
            unit.reshard()
        facts.append(held_bytes(model) - before_bytes)
        fetch_together(reversed(units))
        facts.append(torch.equal(model(x), expected))
        model.release_all()
    facts.append(held_bytes(model) - before_bytes)
    sizes = [(e.event, e.bytes) for e in tape.events if e.event in ("fetch", "gathered")][:4]
    fetched = [e.layer for e in tape.events if e.event == "fetch"]
    with pytest.raises(RuntimeError, match="units of one model"):
        fetch_together([units[0], blocks(1).units[1]])
    return facts, sizes, fetched, sum(e.event == "free" for e in tape.events)


def test_a_unit_may_be_released_without_having_computed():
    """
    Another caller may gather units together, and free them again. The bytes of the events are those
    of the packed buffer; those that a unit has are freed with it. Breaks if the packed buffer
    outlives its first unit.
    Proves I2, `fetch_together`, `can_share`, `Packed.wait`, `Unit.is_here`, `Packed.__init__`,
    `Unit.packed`.
    """
    for facts, sizes, fetched, freed in run(fetched_by_hand, 2):
        assert facts == [[True] * 4, [True] * 3 + [False], 0, True, 0]
        nbytes = NUMEL * 8
        assert sizes[:2] == [("fetch", 3 * nbytes), ("fetch", nbytes)]
        assert ("gathered", 3 * nbytes) in sizes and ("gathered", nbytes) in sizes
        assert fetched[:2] == ["layer 1 (0) and 2 more", "layer 4 (3)"]
        assert fetched[2] == "layer 4 (3) and 3 more" and freed == 8


# ------------------------------------------------------------------------------------------ errors


def after_an_error(where):
    """Two good steps, one that fails on all ranks, two good ones: does sharing change a bit?"""
    both = []
    for numel in (0, ALL):
        model = blocks(6, bucket_numel=numel)
        optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
        at_rest = held_bytes(model)
        for step in range(5):
            failing = model.units[3].module
            failing.fails = where if step == 2 else ""
            x = torch.ones(2, 4, dtype=torch.double) * (1 + dist.get_rank() + step)
            with pytest.raises(ValueError, match="fails") if step == 2 else nullcontext():
                optimizer.backward(model(x).square().mean())
            if step != 2:
                optimizer.step()
            optimizer.zero_grad()
            assert not any(unit.is_fetched or (unit.packed and unit.packed.buffers)
                           for unit in model.units)
        both.append(weights(model))
        del x
        assert held_bytes(model) == at_rest
    return all(torch.equal(p, both[0][name]) for name, p in both[1].items())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_frees_all_units_of_a_bucket(where):
    """
    Those that were on their way and never computed too, and training goes on as without buckets.
    Proves I2, I7, `Unit.come_with`, `Unit.settle`, `TracedOrder.end_forward`.
    """
    assert run(after_an_error, 2, where) == [True, True]


def diverge(native):
    """Units of one size: both sets begin with the same one"""
    with collectives() if native else nullcontext():
        model = blocks(3)
    others = model.units[2 + dist.get_rank()]
    said = []
    fetch_together([model.units[1], others])
    for unit in (others, model.units[1]):
        with pytest.raises(RuntimeError) as error:
            unit.show()
        said.append(str(error.value))
    return said


@pytest.mark.parametrize("native", [False, True])
def test_ranks_that_pack_other_units_get_an_error(native):
    """
    The sizes are equal, and so are the first units. Breaks if a bucket is announced by its first
    unit alone: then the weights would be garbage, without a word.
    Proves I6, `Packed`, `Packed.__init__`.
    """
    for rank, said in enumerate(run(diverge, 2, native)):
        for text in said:
            assert f"rank {rank}: layer 1 (0) and 1 more: the ranks diverged" in text


def converted():
    model = blocks(2)
    model.units[2].float()
    with pytest.raises(RuntimeError, match="convert or move the module before wrapping"):
        fetch_together(model.units[1:])
    return True


def test_a_converted_unit_is_refused_and_not_packed():
    """
    Packing would convert its shard without a word.
    Proves `_can_join`.
    """
    assert run(converted, 2) == [True, True]


@pytest.mark.parametrize("numel", [-1, 1.5, True, None])
def test_an_impossible_size_of_buckets_is_refused(numel):
    """
    Proves `wrap`.
    """
    with pytest.raises(ValueError, match="`bucket_numel`"):
        blocks(2, bucket_numel=numel)


# ------------------------------------------------------------------------------- links, and streams


def nodes():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "shard"))


def replicas():
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def with_copies():
    return Links(nodes(), secondary=True)


def quantised():
    return Links(nodes(), weights=Int8())


def quantised_gradients():
    return Links(nodes(), gradients=Int8())


def both_ways(mesh):
    alone, together = (step_of(5, numel, mesh) for numel in (0, 100))
    same = all(torch.equal(p, alone[3][name]) for name, p in together[3].items())
    return alone[0]["fetch"], together[0]["fetch"], alone[2][1] == together[2][1], same


@pytest.mark.parametrize("mesh, gathers", [
    (nodes, 2), (replicas, 2), (quantised_gradients, 2), (with_copies, 9), (quantised, 9)])
def test_units_on_nodes_and_replicas_share_what_can_be_shared(mesh, gathers):
    """
    Exact weights are packed for two nodes as for one group. Quantised weights and copies inside the
    node are gathered one by one. The bytes are the same, and so is every bit.
    Proves I1, `can_share`, `fetch_together`.
    """
    assert run(both_ways, 4, mesh) == [(9, gathers, True, True)] * 4


def race(tier, folder):
    """Train on the simulated device: how many orders were checked, and what is not ordered"""
    problems = Counter()
    checks = 0
    for name in ("TiedBetweenUnits", "Plain"):
        offload = Offload(tier, folder=folder if tier == "nvme" else None)
        with Accelerator() as device:
            model = build(name, offload=offload, bucket_numel=ALL)[1]
            optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.05, bucket_bytes=600,
                                       offload=offload)
            shared = 0
            for step in range(2):
                with Ledger(model) as tape:
                    ids = mine(tokens(step, ROWS * 2))
                    WHOLES[name].loss(None, model(ids)).backward()
                optimizer.step()
                optimizer.zero_grad()
                shared += sum(e.event == "unpacked" for e in tape.events)
        problems.update(device.problems)
        checks += device.checks
        assert shared
    return checks, problems


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
def test_no_stream_uses_a_packed_buffer_too_early(tier, tmp_path):
    """
    On an accelerator the fetch stream packs, after the optimizer has written; the compute stream
    unpacks, after the all-gather; and the host writes to a shard in CPU memory after the copy.
    Proves I9, `Packed.__init__`, `Packed._pack`, `Packed.wait`.
    """
    for checks, problems in run(race, 2, tier, str(tmp_path)):
        assert checks > 200 and not problems, problems

"""
# Small layers that share a unit

Equality is against plain PyTorch in double precision, see `wholes.py`. Messages and memory are
counted at every event.
"""

import copy
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
from zero3.whole_model.units import Together

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


def train_shared(names, options, native=False):
    """How far from plain PyTorch, misses, and how many units are shared"""
    found = {}
    with collectives() if native else nullcontext():
        for name in names:
            off, model = train_both(name, steps=2, **options)
            shared = sum(isinstance(unit.module, Together) for unit in model.units)
            found[name] = off, model.order.trace.misses, shared
    return found


@pytest.mark.parametrize("world_size, names, options, native", [
    (2, SOME, {}, False),
    (3, SOME[:4], {}, False),
    (2, SOME[::2], {"unit_bytes": 3000, "micro": 2}, False),
    (2, SOME[1::2], {"persist_below_numel": 165, "prefetch_numel": 0, "micro": 2}, False),
    (2, SOME[::3], {"twice": True}, True),
])
def test_layers_of_a_shared_unit_train_like_plain_pytorch(world_size, names, options, native):
    """
    Whatever the model does, on two and three ranks, by messages and by collectives. Breaks if a
    shared unit is freed while one of its layers computes, or before the last gradient is there.
    Proves I1, `Together`, `neighbours`, `_Wrapping._units_together`, `Unit.leave`.
    """
    options = {"unit_bytes": ALL, **options}
    for found in run(train_shared, world_size, names, options, native):
        for name, (off, misses, shared) in found.items():
            assert off < 1e-10 and not misses and shared, (name, off, misses, shared)


def last_of_three(called):
    """Two steps of the last layer, in the model or called by itself: off by, and what stays full"""
    torch.manual_seed(0)
    plain = nn.Sequential(*(Block() for _ in range(3))).double()
    plain[:2].requires_grad_(False)
    model = wrap(copy.deepcopy(plain), Block, unit_bytes=ALL)
    for _ in range(2):
        for each in (plain, model):
            compute = each[2] if called else each
            compute(torch.ones(2, 4, dtype=torch.double)).square().mean().backward()
            torch.optim.SGD([p for p in each.parameters() if p.requires_grad], lr=0.1).step()
            each.zero_grad()
    full = [unit.title for unit in model.units if unit.is_fetched]
    return difference(plain, model), full


@pytest.mark.parametrize("called", [False, True])
def test_a_shared_unit_is_freed_if_backward_ends_before_its_first_layer(called):
    """
    Breaks if it stays full: the next step computes with the weights from before.
    Proves I1, I2, `Unit.settle`, `TracedOrder.end_pass`.
    """
    for off, full in run(last_of_three, 2, called):
        assert off < 1e-10 and not full


class Writes(Block):
    def forward(self, x):
        self.linear.weight.mul_(2)
        return super().forward(x)


def write_in_forward():
    model = wrap(nn.Sequential(Writes(), Writes()), Writes, unit_bytes=ALL)
    with torch.no_grad(), pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 4))
    return str(error.value)


def test_a_write_to_a_shared_weight_is_refused():
    """
    It would be lost with the full parameter. Proves `LayerGuard.after_forward`.
    """
    assert all("has written to `0.linear.weight`" in text for text in run(write_in_forward, 2))


class Penalised(Block):
    """A layer whose output has the squares of its weights"""

    def forward(self, x):
        return super().forward(x) + sum(p.square().sum() for p in self.parameters())


def off_with_parameters():
    torch.manual_seed(0)
    plain = nn.Sequential(Penalised(), Penalised()).double()
    model = wrap(copy.deepcopy(plain), Penalised, unit_bytes=ALL)
    x = torch.ones(2, 4, dtype=torch.double)
    return (plain(x) - model(x)).abs().max().item(), [*model[0].module.parameters()]


def test_a_layer_of_a_shared_unit_may_ask_for_its_own_parameters():
    """
    In its forward alone. Breaks if they are yielded only to the shared unit, which nobody calls.
    Proves `_Wrapping.units_of`.
    """
    assert all(off < 1e-10 and not outside for off, outside in run(off_with_parameters, 2))


def test_a_rank_alone_shares_nothing():
    """
    It has no collectives to save. Proves `_Wrapping._units_together`.
    """
    assert not any(isinstance(unit.module, Together)
                   for unit in blocks(3, unit_bytes=ALL).units)


def train_from(tier, folder):
    """Shards in a tier, of which some are frozen and rest encoded, if the tier has that"""
    found = {}
    for name in ("Plain", "Adapters", "FrozenBetween", "Tied"):
        offload = Offload(tier, folder=folder if tier == "nvme" else None,
                          frozen=None if tier == "nvme" else Int8())

        def make(model, offload=offload, **more):
            return Zero3Optimizer(model, offload=offload, **more)

        off, _ = train_both(name, steps=2, micro=2, optimizer=make, offload=offload,
                            unit_bytes=ALL)
        # Encoded weights are not those of plain PyTorch.
        found[name] = off if tier == "nvme" or name in ("Plain", "Tied") else 0.0
    return found


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_shared_units_rest_in_every_tier(tier, tmp_path):
    """
    In memory, encoded, and in files.
    Proves I8, `Together`.
    """
    for found in run(train_from, 2, tier, str(tmp_path)):
        assert max(found.values()) < 1e-10, found


# -------------------------------------------------------------------------------- messages, memory


def step_of(count, together, mesh=None):
    """The first and the second step: gathers, messages and bytes; an evaluation; the weights"""
    model = blocks(count, unit_bytes=together * NUMEL * 8, mesh=mesh and mesh())
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    x = torch.ones(2, 4, dtype=torch.double) * (1 + dist.get_rank())
    gathers = []
    for _ in range(2):
        with Ledger(model, optimizer) as tape:
            optimizer.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        gathers.append(sum(e.event == "fetch" for e in tape.events))
    evaluate = Ledger(model)
    with torch.inference_mode():
        model(x)
        with evaluate:
            model(x)
    gathers.append(sum(e.event == "fetch" for e in evaluate.events))
    return gathers, tape.sent_bytes, weights(model)


def steps_of(count, sizes):
    return [step_of(count, together) for together in sizes]


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_number_of_collectives_follows_the_formula(ranks):
    """
    L layers in units of k are gathered ceil(L / k) times in forward and in evaluation, and as often
    in backward; once less if the last one is alone, because it is still full. So it is in the first
    step too. Breaks if the first forward pass gathers a shared unit for each of its layers.
    Proves I4, `TracedOrder.stays_full`, `TracedOrder.fetch`, `neighbours`.
    """
    count = 7
    sizes = (2, 3, 7, 100)
    for (alone, *_, before), *found in run(steps_of, ranks, count, (0, *sizes)):
        assert alone == [2 * count, 2 * count - 1, count]
        for together, (gathers, _, after) in zip(sizes, found, strict=True):
            units = ceil(count / together)
            last_alone = count % together == 1
            assert gathers == [2 * units, 2 * units - last_alone, units], (together, gathers)
            assert all(torch.allclose(p, before[name]) for name, p in after.items())


class Probe:
    """A ledger that looks at how many elements are full, at each event."""

    def __init__(self, model):
        self.model, self.most = model, 0
        for unit in model.units:
            unit.listener = self

    def record(self, *_, **__):
        full_bytes = sum(flat.full.untyped_storage().nbytes() for unit in self.model.units
                         for flat in unit.flats if unit.is_fetched)
        self.most = max(self.most, full_bytes // 8)
        limit = self.model.order.max_live_numel
        assert limit is None or self.model.order.live_numel() <= limit


def live(name, most):
    """The most elements that were full, how far off, and the elements of the units"""
    plain, model = build(name, max_live_numel=most, unit_bytes=ALL)
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
    return probe.most, difference(plain, model), {
        unit.path or unit.title: unit.numel for unit in model.units}


def live_within(name, around):
    """From the least limit, which layers alone have, to more than there is"""
    plain = build(name)[1]
    sizes = {unit.path or "the rest": unit.numel for unit in plain.units}
    least = sum(sizes[each] for each in around)
    limits = (least, least + 100, least + 500, 3 * sum(sizes.values()))
    return [(most, *live(name, most)) for most in limits]


LEAST = {"Plain": ["the rest", "layers_.0"], "Recomputed": ["the rest", "layers_.0"],
         "TiedToTheRoot": ["the rest", "layers_.0", "layers_.0.up"]}


@pytest.mark.parametrize("name", LEAST)
def test_a_shared_unit_has_room_within_the_limit(name):
    """
    At every event the full parameters are at most `max_live_numel`, from the smallest limit to more
    than there is. With the smallest nothing is shared.
    Proves I3, `TracedOrder.live_numel`, `TracedOrder._fits`, `TracedOrder._make_room`,
    `neighbours`.
    """
    for found in run(live_within, 2, name, LEAST[name]):
        for most, peak, off, _ in found:
            assert peak <= most and off < 1e-10, (most, peak)
        shares = [any(" to " in unit for unit in sizes) for *_, sizes in found]
        assert shares == sorted(shares) and not shares[0] and shares[-1]


def frozen_one_by_one():
    model = blocks(3, unit_bytes=ALL)
    # The root has the layers inside.
    for unit in (model.units[-1], model.units[0]):
        with pytest.raises(RuntimeError, match="a layer with a shard of its own"):
            unit.requires_grad_(False)
    model.requires_grad_(False)
    return [p.requires_grad for p in model.parameters()]


def test_a_layer_of_a_shared_unit_cannot_be_frozen_alone():
    """
    The error says so; all of them can.
    Proves `Unit.requires_grad_`.
    """
    assert run(frozen_one_by_one, 2) == [[False]] * 2


def thawed_and_frozen():
    """Frozen when it is wrapped, trained for a step, frozen again: off by, and gradients then"""
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block()).double().requires_grad_(False)
    model = wrap(copy.deepcopy(plain), Block, unit_bytes=ALL)
    x = torch.ones(2, 4, dtype=torch.double, requires_grad=True)
    for trains in (True, False):
        for each in (plain, model):
            each.requires_grad_(trains)
            each(x).square().mean().backward()
            if trains:
                torch.optim.SGD(each.parameters(), lr=0.1).step()
                each.zero_grad()
    return difference(plain, model), [p.grad for p in model.parameters()]


def test_layers_of_a_shared_unit_are_frozen_together():
    """
    Breaks if a unit that has no forward of its own keeps the `requires_grad` that it had when it
    was wrapped: it never trains, or collects gradients while it is frozen.
    Proves I1, `Unit.refresh`.
    """
    for off, grads in run(thawed_and_frozen, 2):
        assert off < 1e-10 and grads == [None]


def step_before_backward():
    model = blocks(2, unit_bytes=ALL)
    output = model(torch.ones(2, 4, dtype=torch.double)).sum()
    with torch.no_grad():
        model.get_trainable_chunk()[0].mul_(2)
    with pytest.raises(RuntimeError) as error:
        output.backward()
    return str(error.value)


def test_backward_through_shared_weights_that_have_changed_is_refused():
    """
    They are gathered once more, so backward would compute with the new ones.
    Proves `Unit.shard_versions`.
    """
    assert all("Got: weights that have changed" in text for text in run(step_before_backward, 2))


def a_hook_and_a_frozen_weight():
    found = []
    for what in ("hook", "weight"):
        model = blocks(2, unit_bytes=ALL)
        if what == "hook":
            model.get_trainable_chunk()[0].register_hook(print)
        else:
            with model.full_params() as params:
                params["0.linear.weight"].requires_grad_(False)
        with pytest.raises(RuntimeError) as error:
            model(torch.ones(2, 4, dtype=torch.double))
        found.append(str(error.value))
    return found


def test_what_a_shard_cannot_do_a_shared_one_cannot_do():
    """
    Call hooks, and train in part. Proves `Zero3Model.check`.
    """
    for hook, weight in run(a_hook_and_a_frozen_weight, 2):
        assert "(0 to 1) cannot call the hooks" in hook
        assert "(0 to 1) cannot freeze or train a part" in weight


def names_inside():
    plain, model = build("Nested", unit_bytes=ALL)
    found = [name.removeprefix("module").strip(".") for name, _ in model.named_modules()]
    seen = []
    model.apply(seen.append)
    layers = [sum(isinstance(m, plain.layers) for m in each)
              for each in (plain.modules(), model.modules(), seen)]
    return {name for name, _ in plain.named_modules()} - {*found}, layers


def test_a_layer_of_a_shared_unit_is_there_once_where_the_model_has_it():
    """
    Breaks if `modules()` or `children()` find the layers in the shared unit too.
    Proves `Unit.named_modules`, `Unit.named_children`.
    """
    for missing, (expected, *found) in run(names_inside, 2):
        assert not missing and found == [expected] * 2


# ------------------------------------------------------------------------------------------ errors


def after_an_error(where):
    """Two good steps, one that fails on all ranks, two good ones: are the weights the same?"""
    both = []
    for nbytes in (0, ALL):
        model = blocks(6, unit_bytes=nbytes)
        optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
        at_rest = held_bytes(model)
        layers = [unit.module for unit in model.units if isinstance(unit.module, Block)]
        for step in range(5):
            layers[2].fails = where if step == 2 else ""
            x = torch.ones(2, 4, dtype=torch.double) * (1 + dist.get_rank() + step)
            with pytest.raises(ValueError, match="fails") if step == 2 else nullcontext():
                optimizer.backward(model(x).square().mean())
            if step != 2:
                optimizer.step()
            optimizer.zero_grad()
            assert not any(unit.is_fetched for unit in model.units)
        both.append(weights(model))
        del x
        assert held_bytes(model) == at_rest
    return all(torch.allclose(p, both[0][name]) for name, p in both[1].items())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_frees_a_shared_unit(where):
    """
    Training goes on as without shared units.
    Proves I2, I7, `Unit.settle`, `TracedOrder.end_pass`.
    """
    assert run(after_an_error, 2, where) == [True, True]


@pytest.mark.parametrize("nbytes", [-1, 1.5, True, None])
def test_an_impossible_size_of_units_is_refused(nbytes):
    """
    Proves `wrap`.
    """
    with pytest.raises(ValueError, match="`unit_bytes`"):
        blocks(2, unit_bytes=nbytes)


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
    alone, together = (step_of(5, layers, mesh) for layers in (0, 100))
    close = all(torch.allclose(p, alone[2][name], rtol=0.05)
                for name, p in together[2].items())
    return alone[0][1], together[0][1], close


@pytest.mark.parametrize("mesh", [nodes, replicas, quantised_gradients, with_copies, quantised])
def test_units_are_shared_on_nodes_and_replicas(mesh):
    """
    A shared unit is gathered like any other one, quantised or from a copy inside the node.
    Proves I1, `Together`.
    """
    assert run(both_ways, 4, mesh) == [(9, 2, True)] * 4


def race(tier, folder):
    """Train on the simulated device: how many orders were checked, and what is not ordered"""
    problems = Counter()
    checks = 0
    for name in ("TiedBetweenUnits", "Plain"):
        offload = Offload(tier, folder=folder if tier == "nvme" else None)
        with Accelerator() as device:
            model = build(name, offload=offload, unit_bytes=ALL)[1]
            optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.05, bucket_bytes=600,
                                       offload=offload)
            for step in range(2):
                ids = mine(tokens(step, ROWS * 2))
                WHOLES[name].loss(None, model(ids)).backward()
                optimizer.step()
                optimizer.zero_grad()
        problems.update(device.problems)
        checks += device.checks
    return checks, problems


@pytest.mark.parametrize("tier", ["device", "cpu", "nvme"])
def test_no_stream_uses_a_shared_unit_too_early(tier, tmp_path):
    """
    Several layers compute with one buffer, and the host writes to a shard in CPU memory after the
    copy.
    Proves I9, `Together`.
    """
    for checks, problems in run(race, 2, tier, str(tmp_path)):
        assert checks > 200 and not problems, problems

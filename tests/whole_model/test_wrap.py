"""
# Whole models

Equality is against plain PyTorch in double precision, see `wholes.py`; what is said of order and
messages is read from the tape.
"""

import copy
import gc
import json
import re
import time
import weakref
from contextlib import suppress
from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn

import zero3
from tests.limits import ROOM_BYTES, in_a_quarter
from tests.ranks import run
from tests.wholes import (
    LENGTH,
    ROWS,
    TOKENS,
    WHOLES,
    WIDTH,
    Experts,
    Layer,
    Plain,
    Tied,
    TiedBetweenUnits,
    build,
    difference,
    optimizers,
    tokens,
    train_both,
)
from zero3 import Offload, Zero3Optimizer, wrap
from zero3.checkpoint.convert import main as convert
from zero3.comm.collectives import Communicator
from zero3.estimate.ledger import Ledger
from zero3.optimizer.steps import after_steps
from zero3.whole_model.units import Trace
from zero3.whole_model.wrap import continue_tokens, main

# They compute their loss in fp32, whatever the model computes in.
NEARLY = {"GPT2": 1e-5, "Llama": 1e-5, "T5": 1e-5}


def mine(ids):
    return ids.chunk(dist.get_world_size())[dist.get_rank()]


# ---------------------------------------------------------------------------------------- equality


def train_some(names, options):
    worst = {}
    for name in names:
        worst[name], model = train_both(name, check=nothing_but_persistent, **options)
        assert model.order.trace.misses == 0, (name, model.order.trace.misses)
    return worst


def nothing_but_persistent(model):
    """Nothing else is full between a backward, a step and a forward."""
    for unit in model.units:
        stays = unit.persistent and unit.is_fetched
        full_bytes = sum(g.full.untyped_storage().nbytes() for g in unit.flats)
        assert full_bytes == stays * sum(g.full.nbytes for g in unit.flats), unit.label
        assert not unit.holders and not model.order.stack


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_whole_models_train_like_plain_pytorch(world_size):
    """
    Two steps of each model in `wholes.py`, of which the second goes by the order that the first has
    learnt, on weights that have been stepped: tied embeddings, an encoder and decoder, branches, a
    layer called twice, experts chosen by each rank's data, frozen and trainable parameters mixed,
    recomputation, labml_nn's vision transformer, GPT-2, Llama and T5 of Hugging Face. On one and on
    three ranks every second one.
    Proves I1, I2, `wrap`, `_Wrapping._unit`, `_places`, `_Wrapping`, `_Wrapping.units_of`,
    `Unit.leave`.
    """
    names = [*WHOLES] if world_size == 2 else [*WHOLES][world_size // 2 :: 2]
    for worst in run(train_some, world_size, names, {"steps": 2}):
        wrong = {n: off for n, off in worst.items() if not off < NEARLY.get(n, 1e-10)}
        assert not wrong and [*worst] == names


OPTIONS = {
    "nothing ahead": dict(prefetch_numel=0),
    "everything ahead": dict(prefetch_numel=10**9),
    "several ahead": dict(prefetch_numel=400, micro=2),
    "all persist": dict(persist_below_numel=10**9, micro=2),
    "some persist": dict(persist_below_numel=165, micro=2),
    "twice through a graph": dict(twice=True),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_no_option_changes_the_numbers(case):
    """
    Whatever is fetched ahead or stays. A persistent unit that is not gathered again after a step
    would train on the weights from before.
    Proves I1, I7, `Zero3Layer.fetch_params`, `Unit._backup_grads`, `Unit.choose_receive_buffers`,
    `TracedOrder`,
    `Zero3Model.mark_persistent_parameters`.
    """
    # Each option with half of them, the next option with the other half.
    names = [name for name in WHOLES if name not in NEARLY][[*OPTIONS].index(case) % 2 :: 2]
    # The first learns the order, the second goes by it, on weights that have been stepped.
    for worst in run(train_some, 2, names, {"steps": 2, **OPTIONS[case]}):
        assert all(off < 1e-10 for off in worst.values()), worst


def train_with_our_optimizer(folder):
    worst = {}
    nvme = Offload("nvme", folder=folder)
    for i, name in enumerate(("TiedToTheRoot", "ExternalSiblings", "Branches", "Mixture",
                              "Adapters")):
        # In memory with persistent units or from files without, and the next one the other way.
        for stays, offload in ((i % 2, None), (1 - i % 2, nvme)):
            def make(model, offload=offload, **more):
                return Zero3Optimizer(model, offload=offload, **more)

            options = {"persist_below_numel": 165} if stays else {}
            worst[name, stays, bool(offload)] = train_both(
                name, steps=2, micro=2, check=nothing_but_persistent, optimizer=make,
                offload=offload, **options)[0]
    return worst


def test_whole_models_train_with_masters_and_from_files(tmp_path):
    """
    With `Zero3Optimizer`, in memory and from files. The experts' gradients wait in its buckets.
    Proves I1, I7, I8, `wrap`, `Unit._fill_leaf`, `Unit._backup_grads`.
    """
    for worst in run(train_with_our_optimizer, 2, str(tmp_path)):
        assert all(off < 1e-10 for off in worst.values()), worst


def change_the_way():
    """Layers in another order each third step; and passes without gradients in between."""
    plain, model = build("Plain")
    pair, ids = optimizers(plain, model), tokens(0, ROWS * dist.get_world_size())
    worst, misses = 0.0, []
    for step in range(9):
        for each in (plain, model):
            layers = each.layers_ if each is plain else each.module.module.layers_
            if step % 3 == 0:
                layers[0], layers[1] = layers[1], layers[0]
        with torch.no_grad():
            off = (plain(mine(ids)) - model(mine(ids))).abs().max().item()
        nothing_but_persistent(model)
        plain.loss(plain(ids)).backward()
        plain.loss(model(mine(ids))).backward()
        for each in pair:
            each.step()
            each.zero_grad()
        misses.append(model.order.trace.misses)
        worst = max(worst, off)
    return worst, misses


def test_a_pass_that_differs_is_counted_and_learnt_anew():
    """
    The order changes before steps 0, 3 and 6: three kinds of pass differ twice, and none after
    that. What they compute is right all along.
    Proves `Trace`, `Trace.begin`, `Trace.end`.
    """
    for worst, misses in run(change_the_way, 2):
        assert worst < 1e-10 and misses == [0, 0, 0, 3, 3, 3, 6, 6, 6]


# ------------------------------------------------------------------------------------------- order


def tape_of(name, steps, micro=1, options=None):
    """Of the last step: layer, phase and event; and what was sent."""
    plain, model = build(name, **(options or {}))
    optimizer = Zero3Optimizer(model, lr=0.01)
    for step in range(steps):
        with Ledger(model, optimizer) as tape:
            for i in range(micro):
                ids = mine(tokens(step + i, ROWS * dist.get_world_size()))
                optimizer.backward(plain.loss(model(ids)))
            optimizer.step()
            optimizer.zero_grad()
    events = [(e.layer, e.phase, e.event) for e in tape.events]
    units = [(unit.label, unit.numel) for unit in model.units]
    return events, units, tape.sent_bytes, tape.messages


def fetches(events):
    return [label for label, _, event in events if event == "fetch"]


@pytest.mark.parametrize("world_size", [1, 2])
def test_from_the_second_step_a_gather_starts_before_the_layer_before_it_computes(world_size):
    """
    In the first step no gather of a layer starts before the layer before it has computed. In the
    second, forward and backward, each starts before the one before it ends, and before it begins.
    Proves `Trace.upcoming`, `TracedOrder.arrive`, `TracedOrder.fetch`, `Unit._pre_backward_hook`.
    """
    for step in (1, 2):
        for events, units, *_ in run(tape_of, world_size, "Plain", step):
            layers = [label for label, _ in units[1:]]
            for phase, order in (("forward", layers), ("backward", layers[::-1])):
                for before, after in pairwise(order):
                    fetch = events.index((after, phase, "fetch"))
                    begins = events.index((before, phase, "compute"))
                    # Backward has a guess from the start.
                    assert (fetch < begins) == (step == 2 or phase == "backward"), (step, after)


def test_gathers_in_a_step():
    """
    A layer is gathered twice, the last one and the root's once. With room for three layers ahead
    the last three are gathered once, a layer that is called again at once is not gathered again,
    and what persists is gathered once for all micro-batches.
    Proves I4, `TracedOrder.stays_full`, `TracedOrder._soon`, `Unit._release`.
    """
    events, units, sent_bytes, messages = run(tape_of, 2, "Plain", 2)[0]
    labels = [label for label, _ in units]
    assert sorted(fetches(events)) == sorted([*labels, *labels[1:-1]])
    # A gather sends half of the unit's float64 elements to the other rank, a reduce as many.
    gathers = sum(n for label, n in units for _ in range(fetches(events).count(label)))
    reduces = sum(n for _, n in units)
    norms = len(units)
    assert sent_bytes == (gathers + reduces) // 2 * 8 + norms * 8
    assert messages == len(fetches(events)) + 1 + 1  # one bucket, one message with norms

    events, *_ = run(tape_of, 2, "Plain", 2, 1, {"prefetch_numel": 3 * units[1][1]})[0]
    assert sorted(fetches(events)) == sorted([*labels, labels[1]])
    events, units, *_ = run(tape_of, 2, "Branches", 3)[0]
    twice = fetches(events).count("layer 2 (b)")
    assert twice == 2, "once forward, for two calls, and once backward"


def test_what_persists_is_gathered_once_for_all_micro_batches():
    """
    Two micro-batches gather each layer four times, the last one twice, and the root's twice; what
    persists once. These are the messages saved.
    Proves `Zero3Model.mark_persistent_parameters`, `Zero3Layer.fetch_params`, `Unit._release`.
    """
    events, units, _, messages = run(tape_of, 2, "Plain", 3, 2, {"persist_below_numel": 0})[0]
    counts = [fetches(events).count(label) for label, _ in units]
    assert counts == [2, 4, 4, 4, 2]
    events, units, _, fewer = run(tape_of, 2, "Plain", 3, 2, {"persist_below_numel": 165})[0]
    counts = [fetches(events).count(label) for label, _ in units]
    assert counts == [2, 1, 1, 1, 1] and messages - fewer == 3 * 3 + 1
    events, units, _, fewest = run(tape_of, 2, "Plain", 3, 2, {"persist_below_numel": 10**6})[0]
    assert fetches(events) == [label for label, _ in units] and messages - fewest == 3 * 3 + 1 + 1


class Probe:
    """A ledger that looks at how many elements are full, at each event."""

    def __init__(self, model):
        self.model, self.most = model, 0

    def record(self, *args, **kwargs):
        # Where gradients arrive there is memory too, but no parameter.
        full_bytes = sum(g.full.untyped_storage().nbytes() for u in self.model.units
                         for g in u.flats if u.is_fetched)
        self.most = max(self.most, full_bytes // 8)


def live(name, most, prefetch=10**9):
    """The most elements that were full, how far from plain PyTorch, and each unit's elements."""
    plain, model = build(name, max_live_numel=most, prefetch_numel=prefetch)
    probe = Probe(model)
    for unit in model.units:
        unit.listener = probe
    pair = optimizers(plain, model)
    for step in range(2):
        ids = tokens(step, ROWS * dist.get_world_size())
        plain.loss(plain(ids)).backward()
        plain.loss(model(mine(ids))).backward()
        with torch.no_grad():
            model(mine(ids))
        nothing_but_persistent(model)
        for each in pair:
            each.step()
            each.zero_grad()
    return probe.most, difference(plain, model), {
        unit.path or "the rest": unit.numel for unit in model.units}


def live_within(name, around):
    """The least limit, which layers have; what is found from there to no limit; and below it"""
    _, _, sizes = live(name, None)
    least = sum(sizes[each] for each in around)
    limits = (least, least + 100, least + 2 * max(sizes.values()), sum(sizes.values()))
    found = [(most, *live(name, most)) for most in limits]
    with pytest.raises((RuntimeError, ValueError)) as error:
        live(name, least - 1)
    return least, found, str(error.value)


# A layer that is called twice stays full in backward from the one call to the other, and what is
# around another unit as long as that.
LEAST = {"Plain": ["the rest", "layers_.0"], "Recomputed": ["the rest", "layers_.0"],
         "Branches": ["the rest", "a", "e"],
         "TiedToTheRoot": ["the rest", "layers_.0", "layers_.0.up"]}


@pytest.mark.parametrize("name", LEAST)
def test_live_parameters_never_exceed_their_limit(name):
    """
    With everything fetched ahead that the limit allows. Between the smallest possible limit and
    none, each is kept, and used; and the numbers are those of plain PyTorch.
    Proves I3, `TracedOrder.fetch`, `TracedOrder.live_numel`, `TracedOrder._fits`,
    `Named.expect`.
    """
    for least, found, error in run(live_within, 2, name, LEAST[name]):
        for most, peak, off, _ in found:
            assert least <= peak <= most and off < 1e-10, (most, peak)
        # Of the rest and one unit it is known at once, of units inside of units in the first pass.
        at_once = ("cannot be this small. Expected: `max_live_numel` of at least "
                   f"{least:,}, .* raise it")
        later = ("cannot be fetched. Expected: at most `max_live_numel`, "
                 f"{least - 1:,} full elements. Got: .* raise the limit")
        assert re.search(at_once if len(LEAST[name]) == 2 else later, error), error


def ahead_of(name, prefetches):
    return [live(name, None, prefetch) for prefetch in prefetches]


@pytest.mark.parametrize("name", ["Plain", "Recomputed", "EncoderDecoder", "NoRest", "Vision"])
def test_what_is_full_is_the_rest_one_unit_and_what_is_fetched_ahead(name):
    """
    At every event, forward and backward, with nothing ahead, with the default, and with more.
    Proves I3, `TracedOrder._soon`, `TracedOrder.stays_full`.
    """
    prefetches = (0, None, 2 * 162)
    found = run(ahead_of, 2, name, prefetches)[0]
    for prefetch, (peak, off, sizes) in zip(prefetches, found, strict=True):
        rest, layers = sizes.pop("the rest"), sizes.values()
        ahead = max(layers) if prefetch is None else prefetch
        assert rest + max(layers) <= peak <= rest + max(layers) + ahead and off < 1e-10


def gathers_and_work(prefetch_numel):
    """The gathers that one step starts, and the layers that compute, in order."""
    events, start = [], Communicator.all_gather

    def noted(self, sender, pairs, exact=True):
        events.append(("gather", sender.path))
        return start(self, sender, pairs, exact)

    Communicator.all_gather = noted
    model = Plain(depth=8)
    for i, layer in enumerate(model.layers_):
        layer.register_forward_pre_hook(
            lambda *_, path=f"layers_.{i}": events.append(("work", path)))
    model = wrap(model, Layer, prefetch_numel=prefetch_numel)
    for step in range(3):
        # The first steps are for learning the order.
        events.clear()
        model(mine(tokens(step, ROWS * dist.get_world_size()))).square().mean().backward()
    return events


def test_a_prefetch_starts_a_gather_before_the_layer_in_front_computes():
    """
    So the gather travels while that layer computes. Without a prefetch it starts afterwards.
    Proves `TracedOrder.fetch`, `TracedOrder._soon`.
    """
    for prefetch_numel, ahead in ((0, False), (None, True)):
        for events in run(gathers_and_work, 2, prefetch_numel):
            for i in range(1, 8):
                gather = events.index(("gather", f"layers_.{i}"))
                work = events.index(("work", f"layers_.{i - 1}"))
                assert (gather < work) == ahead, (i, events)


# ------------------------------------------------------------------------------ what is at rest


def raise_on_purpose():
    """An exception in forward and one in backward, on all ranks; and a good step after each."""
    plain, model = build("Plain", persist_below_numel=0)
    pair, ids = optimizers(plain, model), tokens(0, ROWS * dist.get_world_size())

    def refuse(*args):
        raise ValueError("on purpose")

    for register in ("register_forward_pre_hook", "register_full_backward_hook"):
        handle = getattr(model.layers_[2].module.up, register)(refuse)
        with suppress(ValueError):
            model(mine(ids)).square().mean().backward()
            raise AssertionError("nothing was raised")
        handle.remove()
        nothing_but_persistent(model)
        for each in pair:
            each.zero_grad()
        plain.loss(plain(ids)).backward()
        plain.loss(model(mine(ids))).backward()
        nothing_but_persistent(model)
        for each in pair:
            each.step()
            each.zero_grad()
    # A graph that is dropped takes along what was kept for its backward.
    loss = model(mine(ids)).square().mean()
    assert [unit.path for unit in model.units if unit.is_fetched] == ["", "layers_.3"]
    del loss
    nothing_but_persistent(model)
    assert model.mark_persistent_parameters(10**9) == sum(unit.numel for unit in model.units)
    model(mine(ids))
    assert all(unit.is_fetched for unit in model.units)
    model.release_all()
    assert not any(unit.is_fetched for unit in model.units)
    return difference(plain, model)


def test_an_exception_leaves_nothing_full_and_a_good_step_can_follow():
    """
    In forward and in backward, also where units ahead have been fetched already.
    Proves I2, `Unit.settle`, `Zero3Model.release_all`, `Zero3Model.mark_persistent_parameters`,
    `Sharded.reshard`.
    """
    assert max(run(raise_on_purpose, 2)) < 1e-10


def one_shard():
    found = {}
    for name in ("Tied", "TiedBetweenUnits", "TiedToTheRoot"):
        plain, model = build(name)
        shards = sum(len(shard) for unit in model.units for shard in unit.chunk)
        full = sum(unit.numel for unit in model.units)
        padding = full - sum(p.numel() for p in plain.parameters())
        with model.full_params() as params:
            same = params["embed.weight"] is params["head.weight"]
            numel = sum(p.numel() for p in set(params.values()))
        found[name] = (shards * dist.get_world_size() - padding, same, numel, padding)
    return found


def test_a_tied_parameter_has_one_shard():
    """
    Within the root, between two units, and between a unit and the root.
    Proves `Zero3Model.full_params`, `_Wrapping.__init__`, `_Wrapping._untie`,
    `Zero3Model.named_layers`, `ShardedModel.named_layers`.
    """
    numel = sum(p.numel() for p in Tied().parameters())
    for found in run(one_shard, 2):
        for shards, same, full, padding in found.values():
            assert shards == full == numel and same and padding < 20


# ---------------------------------------------------------------------------- external parameters


class Sometimes(nn.Module):
    """Reads another unit's weight, on some ranks"""

    def __init__(self, other, ranks):
        super().__init__()
        self.linear, self.other, self.ranks = nn.Linear(WIDTH, WIDTH), [other], ranks

    def forward(self, x):
        x = self.linear(x)
        return x + self.other[0].up.bias.sum() if dist.get_rank() in self.ranks else x


class Reader(nn.Module):
    def __init__(self, ranks):
        super().__init__()
        self.one, self.two = Layer(), Layer()
        self.reads = Sometimes(self.one, ranks)

    def forward(self, x):
        return self.reads(self.two(self.one(x)))


def read_on_some_ranks(register):
    torch.manual_seed(0)
    plain = Reader([0]).double()
    model = wrap(copy.deepcopy(plain), (Layer, Sometimes))
    if register:
        model.register_external_parameter(model.reads, model.one.up.bias)
        # Once is enough; and its own are no other's.
        model.register_external_parameter(model.reads.module, model.one.up.bias)
        model.register_external_parameter(model.one.up, model.one.up.bias)
        assert [unit.path for unit in model.units if unit.externals] == ["reads"]
        with pytest.raises(RuntimeError, match=r"cannot register this. Expected: a module and a "
                           "parameter of this model. Got: Linear and Parameter"):
            model.register_external_parameter(nn.Linear(1, 1), nn.Parameter(torch.zeros(1)))
    x = torch.ones(2, WIDTH, dtype=torch.double)
    for _ in range(2):
        model(x).square().mean().backward()
    return [g.shard.grad for g in model.one.flats]


def test_an_external_parameter_that_not_all_ranks_use_is_registered():
    """
    Registered, it is fetched on all ranks. Found out on one rank alone it is an error on both,
    which names what each was about to do.
    Proves I6, `Zero3Model.register_external_parameter`.
    """
    grads = run(read_on_some_ranks, 2, True)
    assert all(torch.isfinite(g).all() for rank in grads for g in rank)
    with pytest.raises(AssertionError) as error:
        run(read_on_some_ranks, 2, False)
    assert "gather of layer 1 (one)" in str(error.value) and "What to do" in str(error.value)


def touch_outside():
    _, model = build("TiedBetweenUnits")
    for weight in (model.embed.weight, model.head.weight, model.layers_[0].up.weight):
        with pytest.raises(RuntimeError, match=r"rank \d: layer \d+ \((embed|layers_.0.up)\) freed "
                           r"`weight`. Expected: a use in the layer's forward.* Got: `sum` "
                           "outside. What to do: .*register_external_parameter"):
            weight.sum()
    # Full, because forward has kept it for backward, and yet not for everybody.
    _, model = build("Plain")
    model(mine(tokens(0, 4))).sum().backward()
    loss = model(mine(tokens(0, 4))).sum()
    last = model.layers_[3]
    assert last.is_fetched
    with pytest.raises(RuntimeError, match=r"freed `down.weight`"):
        last.down.weight.sum()
    loss.backward()


def test_a_parameter_that_is_touched_outside_of_forward_raises_by_name():
    """
    Also while its unit happens to be full; or one use would pass, and the next one not.
    Proves `FreedParameter`, `Unit.fetch_for_others`, `Unit._release`, `FlatParameter.close`,
    `FlatParameter.open`, `Unit.show`.
    """
    run(touch_outside, 2)


class Looks(nn.Module):
    """Returns a view of another module's weight beside its input"""

    def __init__(self, other):
        super().__init__()
        # In a list, or it would be a submodule.
        self.other = [other]

    def forward(self, x):
        return x, self.other[0].weight.t()


class HandsOut(nn.Module):
    """A view of a unit's weight is a result of the root, or of another unit; or one of the rest"""

    def __init__(self, whose):
        super().__init__()
        self.one, self.two = Layer(), Layer()
        self.rest = nn.Linear(WIDTH, WIDTH)
        self.whose = whose
        self.looks = Looks(self.rest if whose == "rest" else self.one.up)

    def forward(self, x):
        x = self.two(self.one(x))
        if self.whose == "inside":
            return x, self.one.up.weight.t()
        x, view = self.looks(x)
        return x, view.sum()


@pytest.mark.parametrize("whose", ["inside", "external", "rest"])
def test_a_view_of_another_unit_is_refused_unless_that_unit_stays_full(whose):
    """
    A unit that the root calls is free when the root returns. A read of the view would end the
    process, without an error. The rest stays full until then, so a unit may return a view of it.
    Proves `Guarded.lenders`, `Unit.lenders`, `LayerGuard.after_forward`.
    """
    model = wrap(HandsOut(whose), (Layer, Looks))
    x = torch.ones(2, WIDTH)
    for _ in range(2):
        if whose == "rest":
            _, total = model(x)
            torch.testing.assert_close(total, full_sum(model, "rest.weight"))
            continue
        with pytest.raises(RuntimeError, match=r"puts out freed memory.*a view of a parameter"):
            model(x)


def full_sum(model, name):
    with model.full_params() as params:
        return params[name].detach().sum()


# --------------------------------------------------------------------------------- leaves, ranks


class TwoWays(nn.Module):
    """Rank 1 takes the other way"""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        self.left, self.right, self.last = Layer(), Layer(), Layer()

    def forward(self, ids):
        x = self.embed(ids)
        return self.last((self.right if dist.get_rank() else self.left)(x))


def diverge():
    model = wrap(TwoWays(), Layer)
    start_s = time.perf_counter()
    with pytest.raises(RuntimeError) as error:
        model(tokens(0, 2)).sum().backward()
    assert time.perf_counter() - start_s < 30
    return str(error.value)


def test_ranks_that_diverge_get_an_error_that_names_both_layers():
    """
    On each rank: what it was about to gather, and what the other one. Within seconds, and not at a
    time-out.
    Proves I6, `Transfer._arrive`, `Communicator.begin`.
    """
    first, second = run(diverge, 2)
    assert "rank 0: layer 1 (left)" in first and "of layer 2 (right)" in first
    assert "rank 1: layer 2 (right)" in second and "of layer 1 (left)" in second
    assert "What to do" in first and "on rank 1" in first and "on rank 0" in second


def gradients_of_experts():
    """Rank 0's tokens go to expert 0 and rank 1's to expert 1; nobody's to expert 2."""
    torch.manual_seed(0)
    plain = Experts().double()
    with torch.no_grad():
        plain.router.weight.zero_()
        plain.router.bias.zero_()
        # A token's last feature says where it goes.
        plain.router.weight[0, -1], plain.router.weight[1, -1] = 5.0, -5.0
    whole = nn.Sequential(nn.Linear(WIDTH, WIDTH), copy.deepcopy(plain)).double()
    nn.init.eye_(whole[0].weight)
    nn.init.zeros_(whole[0].bias)
    model = wrap(whole, (), leaf_classes=Experts)
    x = torch.rand(3, WIDTH, dtype=torch.double)
    x[:, -1] = 1 - 2 * dist.get_rank()
    with Ledger(model) as tape:
        model(x).square().mean().backward()
    reduced = [e.layer for e in tape.events if e.event == "reduce"]
    leaf = model.units[1]
    (group,) = leaf.flats
    everything = [torch.empty_like(group.shard.grad) for _ in range(2)]
    dist.all_gather(everything, group.shard.grad)
    flat = torch.cat(everything)
    return {slot.names[0]: slot.of(flat).abs().sum().item() for slot in group.slots}, reduced


def test_experts_without_tokens_get_zero_gradients():
    """
    An expert that one rank used has a gradient, one that nobody used has zeros, and the leaf was
    reduced once, as a whole, before the unit below it.
    Proves `Unit._fill_leaf`, `Unit.is_over`.
    """
    for sums, reduced in run(gradients_of_experts, 2):
        for name, total in sums.items():
            assert (total == 0) == name.startswith("experts.2"), name
        assert reduced == ["layer 1 (1)", "layer 0 (the rest)"]


# ------------------------------------------------------------------------------- initialisation


class Watched(Layer):
    """Says how many others are materialised while it draws its values"""

    born: list = []

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("factor", torch.full((2,), 0.5), persistent=False)

    def reset_parameters(self):
        nn.init.normal_(self.scale)
        self.factor.fill_(0.5)
        everybody = [m for m in gc.get_objects() if type(m) is Watched]
        Watched.born.append(sum(m.up.weight.untyped_storage().nbytes() > 0 for m in everybody
                                if isinstance(vars(m).get("up", m._modules["up"]), nn.Linear)
                                and type(m.up.weight) is nn.Parameter and not m.up.weight.is_meta))

    def forward(self, x):
        return super().forward(x) * self.factor[0] + self.scale.sum()


def made():
    torch.manual_seed(dist.get_rank())
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(TOKENS, WIDTH), *(Watched() for _ in range(4)))
    model = wrap(model.eval(), Watched, seed=7)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.is_meta is False for p in model.parameters())
    assert not any(m.training for m in model.modules() if not isinstance(m, nn.ParameterList))
    out = model(tokens(0, 1))
    with model.full_params() as params:
        found = {name: p.detach().clone() for name, p in params.items()}
    return found, Watched.born, out.detach()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_model_on_the_meta_device_is_made_one_layer_at_a_time(world_size):
    """
    While a layer draws its values no other one is whole. They are of the seed and the modules'
    names: the same on any number of ranks, other ones in each layer, and nothing is left of memory.
    Proves `Source.fill`, `Source._draw`, `seeded`.
    """
    expected, _, _ = run(made, 1)[0]
    for params, born, out in run(made, world_size):
        assert born == ([1] * 4 if born else []) and torch.isfinite(out).all()
        assert all(torch.equal(p, expected[name]) for name, p in params.items())
        assert not torch.equal(params["1.up.weight"], params["2.up.weight"])


class Partly(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.norm.running_mean.fill_(7.0)
        self.norm.weight = nn.Parameter(self.norm.weight.to("meta"))
        self.inner = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.full((2,), 7.0))
        self.shift = nn.Parameter(torch.empty(2, device="meta"))
        nn.init.constant_(self.inner.bias, 7.0)

    def reset_parameters(self):
        nn.init.zeros_(self.inner.bias)
        self.scale = nn.Parameter(torch.zeros(2))
        nn.init.constant_(self.shift, 3.0)


def made_partly():
    # Rank 0 makes the model, and the other ranks have other values.
    model = nn.Sequential(Partly())
    with torch.no_grad():
        model[0].scale += dist.get_rank()
    model = wrap(model, Partly)
    with model.full_params() as params:
        return ({name: p.tolist() for name, p in params.items() if p.dim() == 1},
                model[0].norm.running_mean.tolist())


def test_only_tensors_on_the_meta_device_are_drawn():
    """
    Breaks if a module with one tensor on the meta device loses the values of its others, or of
    modules inside of it: a trained bias would be random again, without a word.
    Proves `Source._give_values`, `Source._draw`.
    """
    for params, mean in run(made_partly, 2):
        assert mean == params["0.scale"] == params["0.inner.bias"] == [7.0, 7.0]
        assert params["0.shift"] == [3.0, 3.0] and params["0.norm.weight"] == [1.0, 1.0]


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))


class Counts(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(3, dtype=dtype))

    def forward(self, x):
        return self.linear(x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float16])
def test_a_buffer_that_nobody_wrote_is_found_out(dtype):
    """
    Whatever its data type; `init` may write it.
    Proves `Source.fill`, `_mark`, `_is_marked`.
    """
    def write(module):
        if isinstance(module, Counts):
            module.table.fill_(1)
        else:
            module.reset_parameters()

    def leave(module):
        if isinstance(module, nn.Linear):
            module.reset_parameters()

    with torch.device("meta"):
        first, second = (nn.Sequential(Counts(dtype)) for _ in range(2))
    with pytest.raises(RuntimeError, match=r"`0.table` has no values"):
        wrap(first, Counts, init=leave)
    assert next(wrap(second, Counts, init=write).buffers()).sum() == 3


def refuse_to_make():
    def wrap_meta(make, classes, **options):
        with torch.device("meta"):
            model = make()
        with pytest.raises(RuntimeError) as error:
            wrap(model, classes, **options)
        return str(error.value)

    def forget(module):
        if isinstance(module, nn.Linear):
            module.bias.data.zero_()

    def fail(module):
        raise OSError("no such place")

    return [
        wrap_meta(lambda: nn.Sequential(Bare(), Layer()), Layer),
        wrap_meta(Plain, Layer, init=forget),
        wrap_meta(Plain, Layer, init=fail),
        wrap_meta(Plain, Layer, checkpoint="nowhere"),
        wrap_meta(Plain, nn.Conv1d),
    ]


def test_what_has_no_values_is_refused_on_all_ranks():
    """
    Rank 0 alone finds it out, and all raise: no `reset_parameters`, an `init` that leaves something
    out or raises, no checkpoint, and nothing to wrap.
    Proves I6, `Source.fill`, `Source._draw`, `Source._read`, `_Wrapping.units_of`.
    """
    for errors in run(refuse_to_make, 2):
        for error, what in zip(errors, (
                "cannot fill `the rest`. Expected: values .* Got: `0`, a Bare without "
                "`reset_parameters`, on rank 0. What to do: pass `init=`",
                "`layers_.0.\\w+.weight` has no values",
                r"OSError\('no such place'\), on rank 0", "Got: nowhere: .* on rank 0",
                "has nothing to wrap. Expected: modules of .*Conv1d.* Got: none inside of "
                "Plain"),
                strict=True):
            assert re.search(what, error), (what, error)


def from_checkpoint(path, name, options):
    torch.manual_seed(99)
    with torch.device("meta"):
        model = WHOLES[name]()
    if name in NEARLY:
        # Buffers that are computed, and in no file.
        model = WHOLES[name]()
    model = wrap(model, model.layers, checkpoint=path, **options)
    out = model(tokens(0, 2)).detach()
    with model.full_params() as params:
        return out, {name: p.detach().clone() for name, p in params.items()}


@pytest.mark.parametrize("name", ["Plain", "Tied", "TiedBetweenUnits", "TiedToTheRoot", "GPT2"])
def test_a_checkpoint_is_read_layer_by_layer(name, tmp_path):
    """
    One file, or several with an index, as Hugging Face writes them; a tied parameter is there
    under either name, of which one may be in another unit.
    Proves `Source`, `Source._read`, `Source.files`.
    """
    torch.manual_seed(1)
    plain = WHOLES[name]()
    state = {key: value.clone() for key, value in plain.state_dict().items()}
    expected = dict(plain.named_parameters(remove_duplicate=False))
    if name != "Plain":
        first = next(key for key in state if key.endswith(("embed.weight", "wte.weight")))
        other = next(key for key in state if key.endswith("head.weight"))
        # In between, the unit that has the parameter finds it under the other one's name.
        del state[first if name in ("Tied", "TiedBetweenUnits") else other]
    save_file(state, tmp_path / "model.safetensors")
    index = {}
    for i, key in enumerate(state):
        index[key] = f"part-{i % 3}.safetensors"
    (tmp_path / "parts").mkdir()
    for part in set(index.values()):
        save_file({key: state[key] for key in state if index[key] == part},
                  tmp_path / "parts" / part)
    (tmp_path / "parts" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": index}))
    if name == "Tied" or name in NEARLY:
        paths = [tmp_path / "parts"]
    else:
        paths = [tmp_path, tmp_path / "model.safetensors", tmp_path / "parts"]
    for path in paths:
        for out, params in run(from_checkpoint, 2, str(path), name, {}):
            assert params.keys() == expected.keys()
            assert all(torch.equal(p, expected[key]) for key, p in params.items())
            assert torch.allclose(out, plain(tokens(0, 2)), atol=1e-6)


def refuse_checkpoint(path):
    with torch.device("meta"):
        model = Plain()
    with pytest.raises(RuntimeError) as error:
        wrap(model, Layer, checkpoint=path)
    return str(error.value)


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(tmp_path):
    """
    A tensor that is missing, one of another shape, a file that was cut, an index that names a
    missing file or one outside of its folder; on all ranks, before anything else is read.
    Proves `Source._read`, `Source.files`.
    """
    state = Plain().state_dict()
    cases = {}
    for case, change, what in (
            ("missing", {"layers_.1.up.bias": None}, "no `layers_.1.up.bias` in"),
            ("shape", {"layers_.1.up.bias": torch.ones(12)},
             r"`layers_.1.up.bias` of \(12,\) there, and \(11,\) here")):
        wrong = {key: value for key, value in {**state, **change}.items() if value is not None}
        save_file(wrong, tmp_path / f"{case}.safetensors")
        cases[f"{case}.safetensors"] = what
    save_file(state, tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-99])
    cases["cut.safetensors"] = "SafetensorError|incomplete|Error"
    (tmp_path / "inside").mkdir()
    (tmp_path / "inside" / "out.json").write_text(json.dumps(
        {"weight_map": dict.fromkeys(state, "../whole.safetensors")}))
    cases["inside/out.json"] = "No such file"
    for name, what in cases.items():
        for error in run(refuse_checkpoint, 2, str(tmp_path / name)):
            assert re.search(what, error), (what, error)
            assert "on rank 0" in error and "What to do" in error


def saved(folder):
    plain, model = build("TiedToTheRoot", persist_below_numel=20)
    pair, ids = optimizers(plain, model), tokens(0, ROWS * dist.get_world_size())
    plain.loss(plain(ids)).backward()
    plain.loss(model(mine(ids))).backward()
    for each in pair:
        each.step()
    model.save(folder)
    return {name: p.detach() for name, p in plain.named_parameters()}


def test_a_saved_model_opens_without_us_and_comes_back(tmp_path):
    """
    `save` writes what `safetensors` reads, each parameter once, with an index whose size is right.
    Proves `materialise.save`, `buffers_of`, `Zero3Model.save`, `Unit.full_name`.
    """
    expected = run(saved, 2, str(tmp_path / "new"))[0]
    index = json.loads((tmp_path / "new" / "model.safetensors.index.json").read_text())
    found = {}
    for file in set(index["weight_map"].values()):
        found |= load_file(tmp_path / "new" / file)
    assert found.keys() == expected.keys() == index["weight_map"].keys()
    assert all((found[name] - p).abs().max() < 1e-10 for name, p in expected.items())
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in found.values())
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match=r"cannot be saved to .*/file.* on rank 0"):
        run(saved, 2, str(tmp_path / "file"))


def test_a_save_replaces_a_checkpoint_of_one_file(tmp_path):
    """
    As Hugging Face writes it, to the same folder. Breaks if the old file stays: `from_pretrained`
    reads it, and not the files of the index.
    Proves `materialise.save`, `write_index`.
    """
    plain = WHOLES["GPT2"]()
    plain.model.save_pretrained(tmp_path)
    model = wrap(plain.model, plain.layers)
    with model.full_params(writeback=True) as params, torch.no_grad():
        params["transformer.wte.weight"].fill_(7)
    model.save(tmp_path)
    found = type(model.module.module).from_pretrained(tmp_path)
    assert found.transformer.wte.weight.eq(7).all()


# ------------------------------------------------------------------------------------------- use


def continued(model, plain, ids, **options):
    """What the plain model says, and the wrapped one, and what that gathered."""
    with torch.no_grad():
        expected = continue_tokens(plain, ids, **options)
    with Ledger(model) as tape:
        got = model.generate(ids, **options)
    assert not any(unit.is_fetched for unit in model.units)
    return expected.tolist(), got.tolist(), [e.layer for e in tape.events if e.event == "fetch"]


def continue_on_two_ranks():
    plain, model = build("Tied")
    rank = dist.get_rank()
    ids = tokens(3, 4).chunk(2)[rank]
    found = [continued(model, plain, ids, max_new_tokens=6)]
    # Rank 1 is done after its first token, rank 0 goes on.
    first = found[0][0][0][LENGTH]
    found.append(continued(model, plain, ids[:1], max_new_tokens=6,
                           eos_token_id=first if rank else None))
    plain, model = build("External")
    found.append(continued(model, plain, ids, max_new_tokens=6))
    return found


def test_generate_continues_like_the_plain_model_though_one_rank_is_done_first():
    """
    Greedy, and with an end that comes on one rank only: that rank goes on gathering, and returns
    what it had. A layer is gathered for each token, the root's parameters
    once, and as long as these another unit's that it uses.
    Proves `Zero3Model.generate`, `continue_tokens`.
    """
    answers = run(continue_on_two_ranks, 2)
    for found in answers:
        for expected, got, _ in found:
            assert got == expected
        assert sorted({*found[2][2]}) == [f"layer {i} ({name})" for i, name in enumerate(
            ("the rest", "embed", "layers_.0", "layers_.1", "layers_.2", "layers_.3"))]
        assert found[2][2].count("layer 1 (embed)") <= 2
        for _, _, gathers in found[:2]:
            layers = [f"layer {i} (layers_.{i - 1})" for i in range(1, 5)]
            assert gathers == ["layer 0 (the rest)", *layers * 6]
    assert [len(found[1][1][0]) - LENGTH for found in answers] == [6, 1]


def generate_with_hugging_face(name):
    torch.manual_seed(0)
    whole = WHOLES[name]()
    plain, rank = whole.model.eval(), dist.get_rank()
    model = wrap(copy.deepcopy(plain), whole.layers)
    ids = tokens(3, 4).chunk(2)[rank]
    options = dict(do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(ids),
                   max_new_tokens=4 + 3 * rank, eos_token_id=None)
    expected = plain.generate(ids, **options)
    got = model.generate(ids, **options)
    beams = plain.generate(ids, num_beams=2, **options), model.generate(ids, num_beams=2, **options)
    assert not any(unit.is_fetched for unit in model.units)
    return torch.equal(expected, got), torch.equal(*beams), got.shape[1] - LENGTH


@pytest.mark.parametrize("name", ["GPT2", "Llama"])
def test_generate_uses_hugging_faces_own(name):
    """
    With its cache, greedy and with beams; rank 0 is done three tokens before rank 1.
    Proves `Zero3Model.generate`.
    """
    assert run(generate_with_hugging_face, 2, name) == [(True, True, 4), (True, True, 7)]


def destroyed(name):
    plain, model = build(name, persist_below_numel=100)
    ids = tokens(0, ROWS * dist.get_world_size())
    plain.loss(model(mine(ids))).backward()
    units = [weakref.ref(unit) for unit in model.units]
    params = {n: slot.param for u in model.units for slot in u.slots()
              for n in map(u.full_name, slot.names)}
    back = model.destroy()
    del model
    gc.collect()
    assert not any(unit() for unit in units)
    assert [n for n, _ in back.named_modules()] == [n for n, _ in plain.named_modules()]
    expected = dict(plain.named_parameters(remove_duplicate=False))
    found = dict(back.named_parameters(remove_duplicate=False))
    assert found.keys() == expected.keys()
    assert all(found[name] is p and type(p) is nn.Parameter for name, p in params.items())
    # No hook, no sharding: it trains like any module.
    for each in (plain, back):
        each.zero_grad()
        plain.loss(each(ids)).backward()
    same = [torch.equal(p, expected[name]) and torch.equal(p.grad, expected[name].grad)
            for name, p in found.items() if p.requires_grad]
    return all(same) and len(same) > 3 and all(
        not p._post_accumulate_grad_hooks for p in found.values() if p.requires_grad)


@pytest.mark.parametrize("name", ["Tied", "TiedBetweenUnits", "Adapters", "Mixture"])
def test_destroy_gives_the_plain_module_back(name):
    """
    The same parameters in the same places, whole and without hooks.
    Proves `Zero3Model.destroy`.
    """
    assert all(run(destroyed, 2, name))


def test_a_wrapped_model_is_asked_like_the_plain_one():
    """
    Attributes and methods of the model and of its layers; a name that neither has is an error.
    Proves `Zero3Model`, `Unit`.
    """
    model = Plain()
    model.greeting, model.layers_[1].number = "hello", 7
    wrapped = wrap(model, Layer)
    assert wrapped.greeting == "hello" and wrapped.layers_[1].number == 7
    assert wrapped.embed is model.embed and len(wrapped.layers_) == 4
    for thing in (wrapped, wrapped.layers_[0]):
        with pytest.raises(AttributeError, match="nothing_like_it"):
            thing.nothing_like_it  # noqa: B018
    assert not wrapped.eval().training and not model.layers_[1].module.up.training


def test_what_destroy_gives_back_is_frozen_as_the_units_were():
    """
    Breaks if the parameters have the `requires_grad` of the last forward.
    Proves `Zero3Model.destroy`.
    """
    model = wrap(Plain(), Layer)
    model.layers_[1].requires_grad_(False)
    frozen = {name for name, p in model.destroy().named_parameters() if not p.requires_grad}
    assert frozen == {f"layers_.1.{name}" for name, _ in Layer().named_parameters()}


class Nested(Layer):
    """A layer with a layer inside, a buffer that is saved, and one that is not"""

    def __init__(self):
        super().__init__()
        self.inner = Layer()
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, x):
        return super().forward(self.inner(x)) * self.scale.mean()


class Sums(Plain):
    """Its forward asks all modules for what they are"""

    def __init__(self):
        super().__init__(1)
        self.layers_.extend([Nested(), Nested()])

    def forward(self, ids):
        scales = [m.scale[0] for m in self.modules() if isinstance(m, Nested)]
        return super().forward(ids) * sum(scales)


@pytest.mark.parametrize("wrapping", [wrap, partial(zero3.compile, backend="aot_eager")])
def test_modules_has_each_layer_once_under_its_name_in_the_plain_model(wrapping, tmp_path):
    """
    Breaks if a sum over the layers, or `output_hidden_states` of Hugging Face, counts one twice.
    Proves `Unit.named_modules`, `Unit.named_children`, `Unit.train`.
    """
    plain, ids = Sums().double(), tokens(0, 2)
    model = wrapping(copy.deepcopy(plain), Layer)
    assert (model(ids) - plain(ids)).abs().max() < 1e-10
    found = {name.removeprefix("module").strip("."): m.__class__
             for name, m in model.named_modules()}
    classes = {name: type(m) for name, m in plain.named_modules()}
    assert classes.items() <= found.items()
    assert {type(m) for name, m in model.named_modules()
            if name.removeprefix("module").strip(".") not in classes} == {
                nn.ModuleList, nn.ParameterList}
    buffers = [name.removeprefix("module.") for name, _ in model.named_buffers()]
    assert buffers == [name for name, _ in plain.named_buffers()]
    assert [*model.parameters()] == [*dict.fromkeys(model.parameters())]
    assert {*model.parameters()} == {*model.get_trainable_chunk()}
    seen = []
    model.eval().apply(seen.append)
    assert not model.layers_[1].module.training
    assert sum(isinstance(m, Layer) for m in seen) == 5
    zero3.save(tmp_path, model, step=1)
    convert(["export", str(tmp_path), str(tmp_path / "whole")])
    assert load_file(tmp_path / "whole/model.safetensors").keys() == plain.state_dict().keys()


class Stubborn(Layer):
    """A layer of which a part always evaluates"""

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()


def test_a_layer_sets_its_mode_by_its_own_method():
    """
    As those do that have frozen statistics. Breaks if a unit sets the mode of what is inside.
    Proves `Unit.train`.
    """
    layers = wrap(nn.Sequential(Stubborn(), Stubborn()), Stubborn).eval().train().module
    assert [each.norm.training for each in layers] == [False, False]
    assert all(each.training and each.up.training for each in layers)


class Gate(Layer):
    """A layer that keeps a loss, of what its output does not come from"""

    def forward(self, x):
        self.loss = self.up(x).square().mean()
        return super().forward(x)


class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.inner = nn.Linear(WIDTH, WIDTH), Gate()

    def forward(self, x):
        return self.inner(torch.tanh(self.linear(x)))


def test_a_unit_sees_a_tensor_that_a_unit_inside_keeps():
    """
    Breaks if only the attributes of modules that are no units are looked at: nothing would announce
    the backward pass of the outer unit.
    Proves `tensors_in`, `attributes`.
    """
    plain = nn.Sequential(Around(), Around()).double()
    model = wrap(copy.deepcopy(plain), (Gate, Around))
    x = torch.ones(2, WIDTH, dtype=torch.double)
    for each in (plain, model):
        each(x)
        sum(around.inner.loss for around in each).backward()
        torch.optim.SGD(each.parameters(), lr=1.0).step()
    assert difference(plain, model) < 1e-10


def test_a_model_is_wrapped_once():
    """
    The second time it says so; after `destroy` it may be wrapped anew.
    Proves `wrap`, `_Wrapping.units_of`, `Zero3Model.forward`, `Zero3Model.check`,
    `Zero3Model.destroy`.
    """
    model = Plain()
    wrapped = wrap(model, Layer)
    with pytest.raises(RuntimeError, match=r"the model is sharded already. Expected: a plain "
                       r"model. Got: Plain. What to do: `destroy\(\)` it first"):
        wrap(model, Layer)
    assert wrap(wrapped.destroy(), (Layer,)).units
    with pytest.raises(RuntimeError, match=r"the model was destroyed. .* what `destroy` returned"):
        wrapped(tokens(0, 1))
    for wrong in ("Layer", Layer(), [Layer, None]):
        with pytest.raises(TypeError, match=r"Expected: classes of modules. Got: a .* pass `type"):
            wrap(Plain(), wrong)


def call_a_unit_alone():
    """After a step, and while a forward pass before it has kept the unit."""
    plain, model = build("Plain")
    pair, ids = optimizers(plain, model), mine(tokens(0, 4))
    everybody = tokens(0, 4)
    plain.loss(plain(everybody)).backward()
    plain.loss(model(ids)).backward()
    kept = model(ids)
    assert model.layers_[3].is_fetched
    for each in pair:
        each.step()
    x = torch.ones(1, WIDTH, dtype=torch.double)
    off = (model.layers_[3](x) - plain.layers_[3](x)).abs().max().item()
    del kept
    nothing_but_persistent(model)
    return off


def test_a_unit_that_is_called_alone_has_the_weights_of_now():
    """
    What an earlier pass has kept for its backward is of before the step.
    Proves `TracedOrder.arrive`.
    """
    assert max(run(call_a_unit_alone, 2)) < 1e-10


class Scaled(Layer):
    def forward(self, x):
        return super().forward(x) * getattr(self, "new", 1.0)


@pytest.mark.parametrize("wrapping", [wrap, partial(zero3.compile, backend="aot_eager")])
def test_what_is_set_on_a_unit_is_set_on_its_module(wrapping):
    """
    The unit's own names stay the unit's. Breaks if a new name stays there as well: the module's
    forward would not find it, and compute with its default. Or if a model takes a name of the plain
    one, such as `run`, for its own state.
    Proves `Unit`, `StandIn`, `wrap`.
    """
    plain = nn.Sequential(Scaled(), Scaled())
    plain.run, plain[0].scale, plain[0].label = "theirs", 1.0, "theirs"
    wrapped = wrapping(plain, Scaled)
    x = torch.ones(2, WIDTH)
    before = wrapped(x)
    layer = wrapped[0]
    layer.scale, wrapped[1].new, wrapped.seen = 2.0, 3.0, True
    assert torch.equal(wrapped(x), 3.0 * before)
    assert layer.module.scale == layer.scale == 2.0
    assert plain.seen and plain.run == "theirs"
    assert layer.label == "layer 1 (0)" and layer.module.label == "theirs"
    del wrapped[1].new
    assert torch.equal(wrapped(x), before)


def test_a_trace_does_not_grow():
    """
    Neither in training nor in evaluation.
    Proves `Trace`, `Trace.begin`.
    """
    model, longest = wrap(Plain(), Layer), set()
    for _ in range(5):
        model(tokens(0, 1)).sum().backward()
        with torch.no_grad():
            model(tokens(0, 1))
        trace = model.order.trace
        longest.add((len(trace.left), *map(len, trace.learnt.values())))
    assert max(map(max, longest)) == 5 and len(longest) <= 2


def foreign_step():
    """On rank 0 alone an optimizer of something else steps."""
    plain, model = build("Plain", persist_below_numel=1000)
    ids = mine(tokens(0, 4))
    plain.loss(model(ids)).backward()
    other = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    if dist.get_rank() == 0:
        other(torch.ones(2)).sum().backward()
        optimizer.step()
    with Ledger(model) as tape:
        model(ids)
    assert not any(e.event == "fetch" for e in tape.events)
    # Without an optimizer: the version of a shard counts what is written into it.
    with torch.no_grad():
        for shard in model.get_trainable_chunk():
            shard.zero_()
    return model(ids).abs().max().item()


def test_what_persists_is_gathered_again_after_a_change_of_its_shards_and_of_nothing_else():
    """
    A step of another model's optimizer, on one rank even, changes nothing; a write into a shard
    does.
    Proves `Zero3Layer.fetch_params`, `Unit.refresh`, `ShardedModel.get_trainable_chunk`.
    """
    assert run(foreign_step, 2) == [0.0, 0.0]


def test_a_model_that_is_gone_leaves_nothing_behind():
    """
    Neither its memory nor what counts its steps.
    Proves `Zero3Model`, `Unit.__init__`.
    """
    # Models of other tests, too.
    gc.collect()
    before = len(after_steps)
    model = wrap(Plain(), Layer)
    optimizer = Zero3Optimizer(model, lr=0.1)
    model(tokens(0, 2)).sum().backward()
    optimizer.step()
    assert len(after_steps) == before + 1
    units = [weakref.ref(unit) for unit in model.units]
    del model, optimizer
    gc.collect()
    assert not any(unit() for unit in units)
    assert len(after_steps) == before


def test_shards_have_the_plain_models_names_for_param_groups():
    """
    `group_by` sees the names that the plain model has.
    Proves `plain_paths`.
    """
    seen = []
    model = wrap(Tied(), Layer)
    Zero3Optimizer(model, lr=0.1, group_by=lambda name, p: seen.append(name) or {})
    assert sorted(seen) == sorted(name for name, _ in Tied().named_parameters())


def write_back():
    _, model = build("TiedBetweenUnits", persist_below_numel=1000)
    ids = tokens(0, 2)
    model(ids)
    with model.full_params(writeback=True) as params, torch.no_grad():
        for p in params.values():
            p.fill_(0.01 * (1 + dist.get_rank()))
    with model.full_params() as params:
        kept = [bool((p == 0.01).all()) for p in params.values()]
    return kept, model(ids).detach()


def test_what_is_written_back_is_what_persists():
    """
    Rank 0's values, in every shard and in what stays full.
    Proves `Zero3Model.full_params`, `Communicator.scatter`.
    """
    (kept, out), (_, same) = run(write_back, 2)
    assert all(kept) and torch.equal(out, same)
    plain = TiedBetweenUnits().double()
    with torch.no_grad():
        for p in plain.parameters():
            p.fill_(0.01)
    assert torch.allclose(plain(tokens(0, 2)), out, atol=1e-12)


def train_on_gpu(device):
    torch.manual_seed(0)
    plain = Plain().to(device)
    model, ids = wrap(copy.deepcopy(plain), Layer), tokens(0, 2).to(device)
    plain(ids).sum().backward()
    model(ids).sum().backward()
    first = plain.layers_[0].up.weight.grad
    (group,) = model.layers_[0].flats
    slot = next(slot for slot in group.slots if slot.names[0] == "up.weight")
    return torch.allclose(slot.of(group.shard.grad), first)


@pytest.mark.gpu
def test_a_wrapped_model_trains_on_a_gpu():
    """
    One rank: the gather is a copy on the fetch stream, which compute has to wait for.
    Proves I9, `wrap`.
    """
    assert train_on_gpu("cuda")


def test_a_trace_says_what_comes_only_while_the_pass_goes_as_the_last_one():
    """
    Breaks where what was learnt is believed after a pass has gone another way: it would fetch units
    that nobody comes to.
    Proves `Trace.follows`, `Trace.upcoming`.
    """
    trace = Trace()
    trace.begin("eval")
    assert trace.follows() and trace.upcoming() == []
    trace.seen += "abc"
    assert not trace.follows()
    trace.begin("eval")
    assert trace.follows() and trace.upcoming() == ["a", "b", "c"]
    trace.seen += "a"
    assert trace.follows() and trace.upcoming() == ["b", "c"]
    trace.seen += "c"
    assert not trace.follows() and trace.upcoming() == []
    trace.end()
    assert trace.misses == 1 and not trace.follows()


class Stops(nn.Module):
    """As many blocks as it is told."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

    def forward(self, x, depth):
        for block in self.blocks[:depth]:
            x = block(x)
        return x


def test_what_was_fetched_ahead_in_vain_is_freed_at_the_end_of_forward():
    """
    A pass that ends sooner than the one before has begun to fetch a unit that it does not come to.
    Breaks without the loop in `end_pass`: that unit would stay full.
    Proves I2, `TracedOrder.end_pass`.
    """
    model = wrap(Stops(), nn.Linear)
    with torch.no_grad():
        model(torch.ones(1, 3), 4)
        with Ledger(model) as tape:
            model(torch.ones(1, 3), 2)
    fetched = [e.layer for e in tape.events if e.event == "fetch"]
    assert len(fetched) == 3
    assert not any(unit.is_fetched for unit in model.units)


def test_the_command_line_shows_that_the_order_is_learnt(capsys):
    """
    In the first step a unit is fetched when it is come to, in the second one while the unit before
    it computes.
    Proves `wrap.main`.
    """
    main()
    first, _, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("step 1, forward: fetch 0, compute 0, fetch 1, compute 1, fetch 2,")
    assert second.startswith("step 2, forward: fetch 0, fetch 1, compute 0, fetch 2, compute 1,")


# ----------------------------------------------------------------------------------- memory limit


def test_a_model_of_four_times_the_memory_that_is_left_is_made_trained_and_saved(tmp_path):
    """
    Parameters alone of four times what the system allows each of two ranks (RLIMIT_DATA) beside
    what Python and torch have taken, from the meta device into files. Breaks where a layer stays
    when the next is made, gathered or saved.
    Proves `wrap`, `Source.fill`, `materialise.save`.
    """
    for params_bytes, grown_bytes in run(
            in_a_quarter, 2, str(tmp_path), timeout_s=300, fresh=True):
        assert params_bytes >= 4 * ROOM_BYTES > 4 * grown_bytes
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == params_bytes

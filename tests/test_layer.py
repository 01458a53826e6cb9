"""
# What a layer does at its edges: birth, errors, exceptions, evaluation, reading and writing
"""

import copy
import gc
import os

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.cases import ROWS, WIDTH, freeze, linear
from tests.ranks import run
from tests.test_cases import at_rest
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.estimate.ledger import Ledger
from zero3.guards.freed import FreedParameter


def three():
    return Zero3Sequential([Zero3Layer(linear()) for _ in range(3)])


def snapshot(model):
    with model.full_params() as params:
        return {name: p.detach().clone() for name, p in params.items()}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


# ------------------------------------------------------------------------------------------ birth


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=5),
    st.integers(1, 9),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_merging_and_padding_loses_nothing_and_pads_with_zeros(shapes, world_size, dtype):
    """
    For any shapes and number of ranks: the flat parameter begins with the parameters in order, its
    length is the next multiple of the number of ranks, and the rest is zero.
    Proves I5, `Zero3Layer._merge_and_pad_params`, `Zero3Layer._empty`, `Communicator.rows`,
    `Slot.of`.
    """
    layer = Zero3Layer(nn.Identity())
    layer.comm.world_size = world_size
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    flat = layer._merge_and_pad_params(params)
    numel = sum(p.numel() for p in params)
    assert len(flat) == -(-numel // world_size) * world_size and flat.dtype == dtype
    assert torch.equal(flat[numel:], torch.zeros(len(flat) - numel, dtype=dtype))
    offset = 0
    for p in params:
        assert torch.equal(flat[offset : offset + p.numel()].view(p.shape), p)
        offset += p.numel()
    rows = layer.comm.rows(flat)
    assert rows.shape == (world_size, len(flat) // world_size)
    assert torch.equal(torch.cat(list(rows)), flat)


def born():
    torch.manual_seed(100 + dist.get_rank())
    module = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH))
    mask = torch.rand(3) > 0.5
    module[1].register_buffer("mask", mask)
    one = torch.tensor(dist.get_rank() + 1).expand(1)
    module[1].register_buffer("one", one)
    module[1].running_mean.fill_(dist.get_rank() + 1)
    mine = {name: p.detach().clone() for name, p in module.named_parameters()}
    layer = Zero3Layer(module)
    return mine, snapshot(layer), module[1].running_mean.clone(), mask, one, len(layer.chunk[0])


def test_rank_0_gives_everybody_its_weights_and_buffers():
    """
    Ranks seeded differently begin alike. Breaks without the scatter in `_shard` or the broadcast,
    and where a buffer of one element has the stride 0.
    Proves `Zero3Layer._shard`, `Communicator.scatter`, `Communicator.broadcast`, `Storage.load`,
    `bytes_of`.
    """
    for world_size in (2, 3):
        ranks = run(born, world_size)
        first, numel = ranks[0][0], WIDTH * WIDTH + 3 * WIDTH
        assert not same(first, ranks[1][0])
        for _, full, buffer, mask, one, shard_numel in ranks:
            assert same(full, first) and torch.equal(buffer, torch.ones(WIDTH)) and one == 1
            assert torch.equal(mask, ranks[0][3]) and shard_numel == -(-numel // world_size)


def test_parameters_are_exactly_the_shards():
    """
    Trainable first, then frozen, and one per data type; the module's own are gone from the list.
    Proves `Zero3Layer.__init__`, `Sharded.get_trainable_chunk`, `FlatParameter`,
    `FlatParameter.__init__`, `alike`, `hide_params`, `Sharded`, `Sharded.__init__`,
    `StorageFactory.shard`, `Peers`, `Peers.__init__`.
    """
    module = nn.Sequential(freeze(linear()), linear(), linear().double())
    layer = Zero3Layer(module)
    shards = list(layer.parameters())
    assert [(s.dtype, s.requires_grad) for s in shards] == [
        (torch.float32, True), (torch.float64, True), (torch.float32, False)
    ]
    assert list(map(id, shards)) == list(map(id, layer.chunk)) and list(module.parameters()) == []
    assert list(map(id, layer.get_trainable_chunk())) == list(map(id, shards[:2]))
    assert all(s.shape == (WIDTH * WIDTH + WIDTH,) for s in shards)


# ----------------------------------------------------------------------------------------- errors


def message(make):
    with pytest.raises(RuntimeError) as caught:
        make()
    text = str(caught.value)
    assert "rank 0" in text and all(w in text for w in ("Expected:", "Got:", "What to do:")), text
    return text


def test_a_freed_parameter_raises_by_name_wherever_it_is_touched():
    """
    Never a crash, never a silent broadcast of a placeholder: in the module, in a reference that was
    kept, in an optimizer built before wrapping. What does not need the elements still answers.
    Proves `FreedParameter`, `FreedParameter.named`, `Guarded.fetch_for_others`.
    """
    module = nn.Sequential(linear(), linear())
    weight = module[1].weight
    early = torch.optim.SGD(module.parameters(), 0.1)
    layer = Zero3Layer(module)
    for touch in (
        lambda: module(torch.ones(1, WIDTH)), lambda: weight + 1, lambda: torch.ones(1) * weight,
        lambda: weight.sum(), lambda: weight.detach(), lambda: weight.data, lambda: weight[0],
        lambda: weight.tolist(), lambda: torch.stack([weight]), lambda: nn.init.zeros_(weight),
    ):
        text = message(touch)
        assert "Sequential" in text and "full_params" in text
        assert "`1.weight`" in text or "`0.weight`" in text
    for step in (early.step, early.zero_grad):
        assert "get_trainable_chunk" in message(step)
    assert weight.shape == (WIDTH, WIDTH) and weight.dtype == torch.float32 and weight.requires_grad
    assert weight.device.type == "cpu" and weight.ndim == 2
    assert isinstance(weight, FreedParameter) and "1.weight" in repr(weight)
    layer(torch.ones(1, WIDTH)).sum().backward()


def test_what_cannot_be_sharded_is_refused_with_the_cure():
    """
    Each error names the rank, the layer, the parameter, what was expected and got, what to do. A
    gradient from before wrapping would be added to the first one, and no `zero_grad` reaches it.
    Proves `find_params`, `check_params`, `check_module`, `Zero3Sequential.__init__`,
    `Communicator.__init__`,
    `Communicator.open`,
    `communicator`, `check_chain`.
    """
    one, two = linear(), linear()
    two.weight = one.weight
    layer = Zero3Layer(one)
    assert "`weight`" in (text := message(lambda: Zero3Layer(two))) and "share" in text
    assert "once" in message(lambda: Zero3Layer(one))
    assert "once" in message(lambda: Zero3Layer(layer))
    wrong = message(lambda: Zero3Layer(linear(), 0, 1, torch.device("cpu"), torch.float16))
    assert "`weight`" in wrong and "torch.float16" in wrong and "torch.float32" in wrong
    Zero3Layer(linear(), 0, 1, torch.device("cpu", 0), torch.float32)
    assert "meta" in message(lambda: Zero3Layer(nn.Linear(2, 2, device="meta"), device="cpu"))
    assert "Uninitialized" in message(lambda: Zero3Layer(nn.LazyLinear(2)))
    assert "process group" in message(lambda: Zero3Layer(linear(), 0, 2))
    stale = linear()
    stale(torch.ones(1, WIDTH)).sum().backward()
    text = message(lambda: Zero3Layer(stale))
    assert "`weight`" in text and "a gradient" in text and "zero_grad" in text
    assert "zero_grad" in message(lambda: wrap(nn.Sequential(stale, linear()), nn.Linear))
    stale.zero_grad()
    Zero3Layer(stale)
    with pytest.raises(TypeError, match="element 1"):
        Zero3Sequential([layer, nn.ReLU()])


class Aliased(nn.Module):
    """A parameter and a buffer with its memory."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("seen", self.weight.data[1:])


def test_parameters_with_the_memory_of_others_are_refused():
    """
    Two parameters, and a parameter and a buffer. Breaks where each gets memory of its own without a
    word, and trains on its own. One parameter with two names, columns of one matrix, and buffers
    with one memory are fine.
    Proves `check_fresh`, `_last`, `_overlap`, `check_module`.
    """
    def two():
        return nn.Sequential(linear(), linear())

    shared = two()
    shared[1].weight.data = shared[0].weight.data
    for make in (lambda: Zero3Layer(shared), lambda: wrap(shared, nn.Linear)):
        text = message(make)
        assert "rank 0" in text and "`0.weight`" in text and "`1.weight`" in text
        assert "memory of its own" in text and "b.weight = a.weight" in text
    # What was refused has changed nothing.
    assert shared(torch.ones(1, WIDTH)).shape == (1, WIDTH)
    assert "`seen`" in message(lambda: Zero3Layer(Aliased()))
    tied = two()
    tied[1].weight = tied[0].weight
    columns = two()
    matrix = torch.randn(WIDTH, 2 * WIDTH)
    for i, half in enumerate(matrix.chunk(2, dim=1)):
        columns[i].weight = nn.Parameter(half)
        columns[i].register_buffer("one", torch.ones(2))
        columns[i].register_buffer("other", columns[i].one[:1])
    for fine in (tied, columns):
        expected = fine(torch.ones(1, WIDTH))
        # Not the same bits, because columns are multiplied in another order.
        torch.testing.assert_close(Zero3Layer(fine)(torch.ones(1, WIDTH)), expected)


class Cached(nn.Module):
    """An embedding, and an attribute with the memory of its weights."""

    def __init__(self, alias):
        super().__init__()
        self.emb = nn.Embedding(5, WIDTH)
        self.table = alias(self.emb.weight)

    def forward(self, x):
        return self.emb(x) @ self.table.t()


@pytest.mark.filterwarnings("ignore:.*spectral_norm")
def test_an_attribute_with_the_memory_of_a_parameter_is_refused():
    """
    Breaks if only parameters and buffers are looked at: the attribute would keep the weights from
    before wrapping, and the loss would differ a little from the first step on. The parameter under
    a second name, a copy, and what `spectral_norm` replaces before each forward are fine. So are
    two attributes with one memory, and one that has a gradient.
    Proves `check_fresh`.
    """
    # `spectral_norm` divides by a norm, which may be tiny.
    torch.manual_seed(0)
    for alias in (lambda p: p.data, lambda p: p.t(), lambda p: p.detach()[1:]):
        for make, who in ((Zero3Layer, "Cached"), (lambda m: wrap(m, nn.Embedding), "the model")):
            text = message(lambda make=make, alias=alias: make(Cached(alias)))
            assert f"rank 0: {who} cannot shard `emb.weight`" in text
            assert "Got: that of `table`" in text and "use the parameter itself" in text
    busy = linear()
    busy.noise = torch.ones(2, requires_grad=True)
    busy.noise.sum().backward()
    hidden = linear()(torch.ones(2, WIDTH))
    busy.first, busy.second = hidden, hidden[:1]
    for fine, x in ((Cached(lambda p: p), torch.arange(5)),
                    (Cached(lambda p: p.detach().clone()), torch.arange(5)),
                    (nn.utils.spectral_norm(linear()).eval(), torch.ones(2, WIDTH)),
                    (busy, torch.ones(2, WIDTH))):
        expected = fine(x)
        # Not the same bits, because weights in a merged buffer begin at other addresses.
        torch.testing.assert_close(Zero3Layer(fine)(x), expected)


def test_a_layer_that_was_converted_after_wrapping_is_refused():
    """
    Its shard is of another data type than the buffer that the ranks gather into. Breaks where the
    shard is cast without a word.
    Proves `Communicator.all_gather`, `Communicator._rows_to_fill`.
    """
    layer = Zero3Layer(linear()).bfloat16()
    assert "torch.bfloat16" in message(lambda: layer(torch.ones(1, WIDTH)))


@pytest.mark.filterwarnings("ignore:Using backward")
def test_gradients_that_cannot_be_reduced_are_refused():
    """
    Sparse gradients and double backward; a good step with the same layer follows.
    Proves `Zero3Layer._post_backward_hook`, `LayerGuard.before_grad`.
    """
    layer = Zero3Layer(nn.Embedding(5, 3, sparse=True))
    assert "sparse" in message(lambda: layer(torch.tensor([1, 2])).sum().backward())
    layer.module.sparse = False
    layer(torch.tensor([1, 2])).sum().backward()
    assert layer.chunk[0].grad.sum() == 6
    layer = Zero3Layer(linear())
    twice = layer(torch.ones(1, WIDTH)).square().sum()
    assert "create_graph" in message(lambda: twice.backward(create_graph=True))


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, WIDTH))

    def forward(self, n):
        return {"rows": self.table[:n]}


def test_an_output_that_is_freed_memory_is_refused():
    """
    A slice of a parameter would be read after its memory is gone.
    Proves `Watch.outputs`, `LayerGuard.after_forward`.
    """
    layer = Zero3Layer(Table())
    text = message(lambda: layer(2))
    assert "Table" in text and "clone" in text
    at_rest(layer)


def differ(what):
    rank = dist.get_rank()
    if what == "shape":
        module = nn.Linear(3, 2 + rank)
    elif what == "order":
        module = nn.ModuleDict({name: linear() for name in ("ab" if rank else "ba")})
    else:
        module = linear().requires_grad_(rank == 0)
    with pytest.raises(RuntimeError) as caught:
        Zero3Layer(module)
    return str(caught.value)


@pytest.mark.parametrize("what", ["shape", "order", "frozen"])
def test_ranks_with_different_modules_are_told_so(what):
    """
    Breaks without the comparison in `Communicator.open`: the ranks would gather noise.
    Proves `Communicator.open`, `Peers.gather`, `compare_params`.
    """
    for rank, text in enumerate(run(differ, 2, what)):
        assert f"rank {rank}:" in text and f"on rank {1 - rank}" in text
        assert ("ModuleDict" if what == "order" else "Linear") in text


def differ_in_a_buffer(what):
    rank = dist.get_rank()
    module = nn.Sequential(linear(), linear())
    kept = {"shape": torch.ones(8 - 4 * rank),
            "type": torch.ones(4, dtype=(torch.float32, torch.int32)[rank]),
            "none": None if rank else torch.ones(4),
            "missing": torch.ones(4)}
    if what != "missing" or rank == 0:
        module[1].register_buffer("seen", kept[what])
    with pytest.raises(RuntimeError) as caught:
        Zero3Layer(module)
    return str(caught.value)


@pytest.mark.parametrize("what", ["shape", "type", "none", "missing"])
def test_ranks_with_different_buffers_are_told_so(what):
    """
    Breaks if ranks compare parameters alone: rank 0 would send eight numbers into four, or the
    bytes of floats into integers, and a rank without the buffer would never receive them.
    Proves `Communicator.open`, `check_params`, `compare_params`.
    """
    for rank, text in enumerate(run(differ_in_a_buffer, 2, what)):
        assert f"rank {rank}: Sequential differs between ranks" in text
        assert "the same buffer 0 on all ranks" in text and "'1.seen'" in text
        assert "on rank 0, and" in text and "build the same module" in text


def diverge(where):
    model = three()
    x = torch.ones(ROWS, WIDTH)
    with pytest.raises(RuntimeError) as caught:
        if where == "layer":
            model.module_list[1 + dist.get_rank()](x)
        else:
            loss = model(x).sum()
            if dist.get_rank() == 0:
                loss.backward()
            else:
                model(x)
    return str(caught.value)


@pytest.mark.parametrize("where", ["layer", "pass"])
def test_ranks_that_diverge_get_an_error_that_names_both_sides(where):
    """
    I6: one rank calls another layer of the same size; one goes backward while the other goes
    forward again. Breaks without the announcement in `Communicator.begin`: the first would train
    on the other layer's weights, the second wait for ever.
    Proves I6, `Transfer.wait`, `Transfer._arrive`, `Communicator.begin`, `told`,
    `Transfer.tag`.
    """
    expected = {
        "layer": ("gather of layer 1", "gather of layer 2"),
        "pass": ("of layer 1", "of layer 0"),
    }[where]
    for rank, text in enumerate(run(diverge, 2, where)):
        mine, theirs = expected[rank], expected[1 - rank]
        assert "diverged" in text and f"rank {rank}:" in text and f"on rank {1 - rank}" in text
        assert text.index(mine) < text.index(theirs)


def leave(path):
    model = three()
    if dist.get_rank() == 1:
        os._exit(1)
    with pytest.raises(RuntimeError) as caught:
        model(torch.ones(ROWS, WIDTH))
    path.write_text(str(caught.value))
    os._exit(0)


def test_a_rank_that_is_gone_is_an_error_on_the_others_and_not_a_hang(tmp_path):
    """
    I6: the rank that waits says for what, and where to look.
    Proves I6, `Transfer`, `Transfer._arrive`, `run`, `_answer`.
    """
    with pytest.raises(AssertionError, match="rank 1: the process ended"):
        run(leave, 2, tmp_path / "error", fresh=True)
    text = (tmp_path / "error").read_text()
    assert "rank 0: layer 0 (Linear)" in text and "their part of a gather" in text


# ------------------------------------------------------------------------------------- exceptions


class Fails(nn.Module):
    def __init__(self, when):
        super().__init__()
        self.line, self.when, self.fail = linear(), when, True

    def forward(self, x):
        y = self.line(x)
        if self.fail and self.when == "forward":
            raise KeyError("forward")
        if self.fail and self.when == "backward":
            y.register_hook(self.raises)
        return torch.tanh(y)

    def raises(self, grad):
        raise KeyError("backward")


def fail(when):
    torch.manual_seed(0)
    bad = Fails(when)
    model = Zero3Sequential([Zero3Layer(m) for m in (linear(), bad, linear(), linear())])
    x = torch.ones(ROWS, WIDTH)
    before = snapshot(model)
    with pytest.raises(KeyError, match=when) as caught:
        model(x).sum().backward()
    at_rest(model)
    del caught
    model.zero_grad()
    bad.fail = False
    assert same(before, snapshot(model))
    model(x).sum().backward()
    after_error = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    alone = Zero3Layer(Fails(when))
    with pytest.raises(KeyError, match=when):
        alone(x).sum().backward()
    at_rest(alone)
    return all(torch.equal(a, p.grad) for a, p in zip(after_error, model.parameters(), strict=True))


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_after_an_exception_nothing_is_left_and_the_next_step_is_good(when, world_size):
    """
    I2 after an exception in the middle of a pass, in a chain and in a layer that stands alone; the
    gradients of the next step are those of an undisturbed one. Breaks without
    `weakref.finalize`, or the `except` in `forward`.
    Proves I2, `at_end_of_backward`, `Zero3Layer.forward`, `Sharded.drop_full_grads`,
    `Reducer.drop`, `Watch.reset`, `FlatParameter.drop_full_grad`.
    """
    assert all(run(fail, world_size, when))


# ------------------------------------------------------------------------------------- evaluation


def evaluate():
    torch.manual_seed(0)
    model = three()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(ROWS, WIDTH)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        model.eval()
        with mode():
            one = model(x).detach().clone()
        gc.collect()
        at_rest(model)
        model.train()
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        at_rest(model)
        with mode():
            two = model(x).detach().clone()
        at_rest(model)
        with model.full_params():
            by_hand = x
            for layer in model.module_list:
                by_hand = layer.module(by_hand)
        assert not torch.equal(one, two) and torch.equal(two, by_hand)
    return True


def test_evaluation_between_steps_sees_the_new_weights_and_leaves_nothing():
    """
    I2 and no stale last layer: under `no_grad`, `inference_mode`, and with gradients but without a
    backward. Breaks without the weak reference in `forward`.
    Proves I2, `Zero3Layer._release`, `Zero3Layer._cleanup_params`, `Zero3Sequential.forward`,
    `InFlight.free`.
    """
    assert all(run(evaluate, 2))


def without_backward():
    torch.manual_seed(0)
    model = three()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x = torch.ones(ROWS, WIDTH)
    model(x).sum().backward()
    kept = model(x)
    assert model.module_list[-1].is_fetched
    optimizer.step()
    two = model(x).detach().clone()
    with torch.no_grad():
        three_ = model(x)
    assert torch.equal(two, three_) and not torch.equal(kept, two)
    del kept
    at_rest(model)
    return True


def test_a_forward_without_backward_leaves_no_stale_layer():
    """
    The last layer stays full for a backward that does not come; the next forward gathers again,
    and with the graph the memory goes.
    Proves I2, `Zero3Layer.forward`, `Zero3Layer._release`, `Call`, `Watch`, `Watch.__init__`.
    """
    assert all(run(without_backward, 2))


def stop_early():
    model = three()
    x = torch.ones(ROWS, WIDTH)
    for layer in model.walk():
        x = layer(x)
        break
    gc.collect()
    at_rest(model)
    return x.shape == (ROWS, WIDTH)


def test_a_walk_that_stops_early_leaves_nothing_fetched():
    """
    The layer that was fetched ahead is freed as well. Breaks without the `finally` in `walk`.
    Proves I2, `Zero3Sequential.walk`.
    """
    assert all(run(stop_early, 2))


# --------------------------------------------------------------------------------- reading, writing


def several_chains(ours):
    """Two chains with one layer in common, and a chain of that layer; and plain PyTorch."""
    torch.manual_seed(0)
    modules = [linear() for _ in range(3)]
    plain = copy.deepcopy(modules)
    one, two, three = (Zero3Layer(m) for m in modules)
    chains = [Zero3Sequential([one, two]), Zero3Sequential([one, three]), Zero3Sequential([one])]
    model = nn.ModuleList(chains[:2])
    optimizer = (Zero3Optimizer(model, torch.optim.SGD, lr=0.1) if ours else
                 torch.optim.SGD(model.parameters(), lr=0.1))
    theirs = torch.optim.SGD([p for m in plain for p in m.parameters()], lr=0.1)
    in_chain = [plain[:2], [plain[0], plain[2]], plain[:1]]
    worst = 0.0
    for step in range(4):
        # Each step trains the chains in another order.
        for i in (step % 3, (step + 1) % 3):
            x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
            loss = chains[i](x).square().sum()
            expected = nn.Sequential(*in_chain[i])(x).square().sum()
            worst = max(worst, (loss - expected).abs().item())
            loss.backward()
            expected.backward()
            for chain in chains:
                at_rest(chain)
        optimizer.step()
        optimizer.zero_grad()
        theirs.step()
        theirs.zero_grad()
    return worst


@pytest.mark.parametrize("ours", [False, True])
def test_a_layer_may_be_in_several_chains(ours):
    """
    As an encoder is that has a head for each of two tasks. Breaks where `walk` prefetches what
    comes next in another chain: it would stay full, and compute with old weights after a step.
    Proves I1, I2, `Zero3Sequential.walk`.
    """
    assert max(run(several_chains, 2, ours)) < 1e-5


def read_and_write():
    rank = dist.get_rank()
    model = three()
    before = snapshot(model)
    layer = model.module_list[1]
    with layer.full_params() as params:
        view = params["weight"].detach()[0]
        with torch.no_grad():
            params["weight"].fill_(7.0)
    # A view that was kept is still there, and what was written is not.
    assert view.sum() == 7.0 * WIDTH and same(before, snapshot(model))
    with pytest.raises(ZeroDivisionError), model.full_params(writeback=True) as params:
        with torch.no_grad():
            params["0.weight"].fill_(8.0)
        raise ZeroDivisionError
    assert same(before, snapshot(model))
    with model.full_params(writeback=True) as params, torch.no_grad():
        params["1.weight"].fill_(1.0 + rank)
        layer.module.bias.zero_()
    after = snapshot(model)
    assert after["1.weight"].eq(1.0).all() and after["1.bias"].eq(0.0).all()
    assert same({k: v for k, v in before.items() if k[0] != "1"},
                {k: v for k, v in after.items() if k[0] != "1"})
    # Forward inside costs no message, and gradients taken there are those of outside.
    x = torch.ones(ROWS, WIDTH)
    with Ledger(model) as tape, model.full_params():
        sent_bytes = tape.sent_bytes
        inside = model(x)
        assert tape.sent_bytes == sent_bytes
    inside.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model(x).sum().backward()
    at_rest(model)
    return all(torch.equal(g, p.grad) for g, p in zip(grads, model.parameters(), strict=True))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_full_params_reads_and_writes_and_gives_back(world_size):
    """
    Rank 0's writing counts, and only with `writeback` and without an exception.
    Proves `Sharded.full_params`, `FlatParameter.look_at`, `ShardedModel.full_params`,
    `Storage.save`, `FlatParameter.collect_writes`, `Zero3Sequential.named_layers`, `ShardedModel`.
    """
    assert all(run(read_and_write, world_size))


# ------------------------------------------------------------------------- same code everywhere


def native(collectives):
    torch.manual_seed(dist.get_rank())
    model = Zero3Sequential(
        [Zero3Layer(m) for m in (linear(), nn.Sequential(linear(WIDTH, 5), freeze(linear(5, 3))))]
    )
    for layer in model.module_list:
        layer.comm.by_messages = not collectives
    optimizer = torch.optim.AdamW(model.get_trainable_chunk(), 0.1, eps=1e-3)
    for step in range(4):
        generator = torch.Generator().manual_seed(dist.get_rank() + 10 * step)
        model(torch.randn(ROWS, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        at_rest(model)
    return snapshot(model)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_native_collectives_and_messages_train_alike(world_size):
    """
    I9: the lines that NCCL runs, here over gloo's collectives, give what the messages give; at two
    ranks bit for bit, for there is but one order to add two numbers in.
    Proves I9, `Communicator.all_gather`, `Communicator.reduce_scatter`, `Communicator.total`,
    `Zero3Layer.fetch_params`, `Transfer.starting`.
    """
    one, two = run(native, world_size, True)[0], run(native, world_size, False)[0]
    for name in one:
        assert torch.allclose(one[name], two[name], rtol=0, atol=0 if world_size < 3 else 1e-6)


@pytest.mark.gpu
def test_a_gpu_trains_like_the_cpu():
    """
    I9: the same lines with real streams.
    Proves I1, I9, `Communicator.on`, `Zero3Layer._wait_params`.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(*(linear() for _ in range(4))).cuda()
    torch.manual_seed(0)
    model = Zero3Sequential([Zero3Layer(linear().cuda()) for _ in range(4)])
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (plain, model)]
    x = torch.ones(ROWS, WIDTH, device="cuda")
    for _ in range(5):
        for trained, optimizer in zip((plain, model), optimizers, strict=True):
            trained(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, p in snapshot(model).items():
        assert torch.allclose(p, dict(plain.named_parameters())[name], atol=1e-6)

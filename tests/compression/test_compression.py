"""
# Compression: rules, masks, grids and thresholds

The oracle is torch's own operation, a sort of the whole weight, or plain PyTorch on the global
batch.
"""

import contextlib
import copy
import gc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.ranks import run
from zero3 import (
    Int8,
    Links,
    Offload,
    Zero3Layer,
    Zero3Optimizer,
    Zero3Sequential,
    load,
    save,
    wrap,
)
from zero3.compression import Prune, Quantize, clean, compress
from zero3.compression.compress import named_modules
from zero3.compression.rules import progress
from zero3.compression.thresholds import kth_keys
from zero3.compression.weights import (
    Pruned,
    PrunedElements,
    Quantised,
    grid,
)
from zero3.estimate.ledger import Ledger
from zero3.estimate.predict import predict_optimizer
from zero3.inject import inject, policies
from zero3.inject.tensor import Pattern
from zero3.optimizer.steps import after_steps
from zero3.pipeline import Pipeline


def layers(dtype=torch.float32):
    """Three layers with sizes that no number of ranks divides"""
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(6, 11), nn.ReLU()).to(dtype),
            nn.Sequential(nn.Linear(11, 8), nn.ReLU()).to(dtype),
            nn.Linear(8, 5).to(dtype)]


def batches(steps, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(12, 6, generator=generator).to(dtype) for _ in range(steps)]


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def rows(x):
    return x.chunk(world_size())[rank()]


def sharded(plain, **options):
    return Zero3Sequential([Zero3Layer(layer, **options) for layer in plain])


def step(model, optimizer, x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def computed(model):
    """The weights and biases that the linear layers compute with"""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            found += [(f"{name}.weight", module.weight), (f"{name}.bias", module.bias)]
    return {name.replace("module_list.", "").replace("module.", ""): t.detach().clone()
            for name, t in found}


def seen(model):
    """The same of a sharded model"""
    with model.full_params():
        return computed(model)


# ----------------------------------------------------------------------------------------- rules


def test_a_schedule_rises_by_a_cubic_and_bits_fall_in_equal_parts():
    """
    The numbers of the head, and what is before the start and after the end. Breaks if a schedule
    is off by a step.
    Proves `rules.progress`, `Quantize.bits_at`, `Prune.sparsity_at`.
    """
    rule = Prune(0.5, end=4)
    assert [round(rule.sparsity_at(t), 2) for t in range(6)] == [0, 0.29, 0.44, 0.49, 0.5, 0.5]
    assert [Prune(0.5, start=3).sparsity_at(t) for t in (2, 3, 4)] == [0, 0.5, 0.5]
    falling = Quantize(4, start_bits=8, start=2, end=6)
    assert [falling.bits_at(t) for t in range(8)] == [None, None, 8, 7, 6, 5, 4, 4]
    falling = Quantize(1, start_bits=8, end=7)
    assert [falling.bits_at(t) for t in range(8)] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert progress(7, 5, 9) == 0.5


@pytest.mark.parametrize("make, word", [
    (partial(Quantize, 3), "bits"), (partial(Quantize, True), "bits"),
    (partial(Quantize, 1, symmetric=False), "symmetric"), (partial(Quantize, of="bias"), "of"),
    (partial(Quantize, group=0), "group"), (partial(Quantize, 4, start_bits=8), "start_bits"),
    (partial(Quantize, start=5, end=3), "start"), (partial(Quantize, 4, of="input"), "bits"),
    (partial(Prune, 1.0), "sparsity"),
    (partial(Prune, float("nan")), "sparsity"), (partial(Prune, 0.5, "column"), "kind"),
    (partial(Prune, 0.5, "row", scope="global"), "scope"),
    (partial(Prune, 0.5, "head"), "heads"),
    (partial(Prune, follows=("a",)), "follows"), (partial(Prune, 0.5, "row", follows="a"),
                                                  "follows"),
])
def test_a_wrong_rule_is_refused(make, word):
    """
    Before anything is built, and with the option's name. Breaks if a typo means another rule.
    Proves `Quantize`, `Prune`.
    """
    with pytest.raises(ValueError, match=f"`{word}`.*What to do"):
        make()


# --------------------------------------------------------------------------------------- weights


@pytest.mark.parametrize("bits, group, symmetric", [
    (8, None, True), (8, None, False), (4, 3, True), (4, 2, False), (2, None, True), (2, 3, False)])
def test_a_fake_quantised_weight_and_its_gradient_are_those_of_torch(bits, group, symmetric):
    """
    `torch.fake_quantize_per_channel_affine`, with the scales of the formula. Breaks if a row gets
    the scale of another one, or if rounding changes the gradient.
    Proves `Quantised`, `Quantised.forward`, `Quantised.grid`, `weights.Grid`, `weights.grid`.
    """
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    plain = copy.deepcopy(layer)
    compress([layer], {"0": [Quantize(bits, group=group, symmetric=symmetric)]})
    x = torch.randn(4, 6)
    layer(x).square().sum().backward()

    parts = plain.weight.reshape(-1, group or 6)
    if symmetric:
        most = 2 ** (bits - 1) - 1
        least = -most
        scale = parts.detach().abs().amax(1) / most
        zero = torch.zeros(len(parts), dtype=torch.int32)
    else:
        least, most = 0, 2**bits - 1
        low = parts.detach().amin(1).clamp(max=0)
        scale = (parts.detach().amax(1).clamp(min=0) - low) / most
        zero = (-low / scale).round().int()
    expected = torch.fake_quantize_per_channel_affine(parts, scale, zero, 0, least, most)
    expected = expected.view_as(plain.weight)
    F.linear(x, expected, plain.bias).square().sum().backward()
    assert torch.equal(layer.weight, expected)
    assert torch.equal(layer.parametrizations.weight.original.grad, plain.weight.grad)
    assert not torch.equal(layer.weight, plain.weight)
    found = grid(parts.detach().amin(1), parts.detach().amax(1), bits, symmetric)
    assert torch.equal(found.scales, scale) and torch.equal(found.zeros, zero)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_data_types_stay_what_they_are(dtype):
    """
    Breaks if a layer of bf16 computes with a weight of fp32.
    """
    layer = nn.Linear(8, 4, dtype=dtype)
    compress([layer], {"0": [Quantize(8)]})
    layer(torch.randn(2, 8, dtype=dtype)).sum().backward()
    assert layer.weight.dtype == layer.parametrizations.weight.original.grad.dtype == dtype


def test_one_bit_is_the_sign_times_the_mean_of_those_that_are_left():
    """
    And the gradient passes through. Breaks if pruned elements lower the mean, or get a sign.
    Proves `Quantised.grid`.
    """
    layer = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -3, 0.5, -0.25], [2, 2, -2, 4]]))
    compress([layer], {"0": [Prune(0.25), Quantize(1)]})
    assert layer.weight.tolist() == [[2, -2, 0, 0], [2.5, 2.5, -2.5, 2.5]]
    layer(torch.tensor([[1.0, 2, 3, 4]])).sum().backward()
    assert layer.parametrizations.weight.original.grad.tolist() == [[1, 2, 0, 0], [1, 2, 3, 4]]


def test_a_row_of_zeros_stays_zero():
    """
    Breaks if its scale is zero, and the row NaN.
    """
    for symmetric in (True, False):
        layer = nn.Linear(4, 2)
        nn.init.zeros_(layer.weight)
        compress([layer], {"0": [Quantize(8, symmetric=symmetric)]})
        assert torch.equal(layer.weight, torch.zeros(2, 4))


def test_the_smallest_elements_are_pruned_and_of_equal_ones_the_earlier():
    """
    The keys of the head, exactly as many as the sparsity says, and no gradient for them. Breaks if
    ties are pruned together, or if a pruned element is trained.
    Proves `Pruned`, `Pruned.__init__`, `Pruned.forward`, `Pruned.kept`,
    `Pruned.count`, `Pruned.units`, `Pruned.original`, `Method`,
    `PrunedElements`, `PrunedElements.__init__`, `PrunedElements.units`,
    `PrunedElements.kept`, `PrunedElements.keys`.
    """
    layer = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -7], [4, 1]]))
    compress([layer], {"0": [Prune(0.25)]})
    assert layer.weight.tolist() == [[0, -7], [4, 1]]
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.parametrizations.weight.original.grad.tolist() == [[0, 1], [1, 1]]
    (method,) = layer.parametrizations.weight[0]
    keys = method.keys(method.original.view(-1))
    assert (method.units(), method.count) == (4, 1) and keys.argsort().tolist() == [0, 3, 2, 1]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        values = torch.randn(4096, dtype=dtype)
        values[::7] = 0
        layer = nn.Linear(64, 64, dtype=dtype)
        pruned = PrunedElements(Prune(0.5), layer)
        order = pruned.keys(values).argsort()
        assert torch.equal(order, values.abs().argsort(stable=True))
        assert pruned.keys(values).unique().numel() == 4096 and pruned.keys(values).min() >= 0


def test_rows_with_their_biases_channels_and_heads_are_pruned_whole():
    """
    By the sum of their magnitudes. Breaks if a bias of a pruned row still speaks.
    Proves `PrunedParts`, `PrunedParts.units`, `PrunedParts.kept_units`,
    `PrunedParts.kept`, `PrunedBias`, `PrunedBias.__init__`,
    `PrunedBias.forward`.
    """
    weight = torch.arange(1.0, 25).view(4, 6)
    masks = {"row": torch.tensor([[0.0], [0], [1], [1]]),
             "channel": torch.tensor([0.0, 0, 0, 1, 1, 1]),
             "head": torch.tensor([0.0, 0, 1, 1, 1, 1])}
    for kind, mask in masks.items():
        layer = nn.Linear(6, 4)
        with torch.no_grad():
            layer.weight.copy_(weight)
        bias = layer.bias.clone()
        heads = 3 if kind == "head" else None
        compress([layer], {"0": [Prune(1 / 3 if heads else 0.5, kind, heads=heads)]})
        assert torch.equal(layer.weight, weight * mask)
        assert torch.equal(layer.bias, bias * mask[:, 0] if kind == "row" else bias)
    convolution = nn.Conv2d(4, 2, 3)
    compress([convolution], {"0": [Prune(0.5, "channel")]})
    assert (convolution.weight.abs().sum((0, 2, 3)) == 0).sum() == 2


@pytest.mark.parametrize("kind", ["element", "row"])
def test_pruned_elements_may_be_trained_to_come_back(kind):
    """
    With `regrow` they get the gradient of a weight that has zeros in their places. Breaks if the
    value of a pruned element leaks into the output.
    Proves `Pruned.masked`.
    """
    torch.manual_seed(0)
    layer = nn.Linear(6, 4)
    compress([layer], {"0": [Prune(0.5, kind, regrow=True)]})
    x = torch.randn(3, 6)
    (layer(x) + 1).square().sum().backward()
    weight = layer.weight.detach().clone().requires_grad_()
    bias = layer.bias.detach().clone().requires_grad_()
    (F.linear(x, weight, bias) + 1).square().sum().backward()
    assert int((weight == 0).sum()) == 12
    assert torch.equal(layer.parametrizations.weight.original.grad, weight.grad)
    if kind == "row":
        assert torch.equal(layer.parametrizations.bias.original.grad, bias.grad)


def test_inputs_are_rounded_to_their_batch():
    """
    The same as `torch.fake_quantize_per_tensor_affine`. Breaks if the range is that of one row.
    Proves `QuantisedInput`, `QuantisedInput.forward`.
    """
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    low, high = x.aminmax()
    scale = (high - low) / 255
    rounded = torch.fake_quantize_per_tensor_affine(x, scale, (-low / scale).round().int(), 0, 255)
    layer = nn.Linear(6, 3)
    compress([layer], {"0": [Quantize(of="input", symmetric=False)]})
    assert torch.equal(layer(x), F.linear(rounded, layer.weight, layer.bias))
    with pytest.raises(TypeError, match=r"floats.*What to do"):
        layer(x.int())


class Conv1D(nn.Linear):
    """As Hugging Face has it: inputs first"""

    def __init__(self, inputs, outputs):
        super().__init__(inputs, outputs)
        self.weight = nn.Parameter(self.weight.detach().t().contiguous())

    def forward(self, x):
        return x @ self.weight + self.bias


def test_an_input_without_rows_is_left_as_it_is():
    """
    As an expert's that no token was sent to.
    Proves `QuantisedInput.forward`.
    """
    layer = nn.Linear(3, 2)
    compress(layer, {"": [Quantize(of="input")]})
    assert layer(torch.ones(0, 3)).shape == (0, 2)


def test_rows_are_outputs_and_channels_are_inputs_in_layers_that_keep_inputs_first_too():
    """
    A transposed convolution, Hugging Face's `Conv1D` and an embedding. Breaks if the outputs of
    such a layer stay, and its inputs go.
    Proves `axis_of`, `weights.axes`, `PrunedParts.__init__`.
    """
    torch.manual_seed(0)
    for layer, x in ((Conv1D(8, 6), torch.randn(3, 8)), (nn.Embedding(8, 6), torch.arange(8)),
                     (nn.ConvTranspose2d(8, 6, 3), torch.randn(2, 8, 5, 5))):
        compress([layer], {"0": [Prune(0.5, "row")]})
        out = layer(x) if layer.weight.dim() == 2 else layer(x).movedim(1, -1)
        assert (out.flatten(0, -2) == 0).all(0).sum() == 3
    for layer in (Conv1D(8, 6), nn.ConvTranspose2d(8, 6, 3)):
        compress([layer], {"0": [Prune(0.5, "head", heads=4)]})
        gone = (layer.weight == 0).flatten(1).all(1).view(4, 2)
        assert gone.all(1).sum() == 2 and gone.any(1).sum() == 2


def test_one_part_is_left_whatever_the_sparsity():
    """
    Nine tenths of four rows round to four. Breaks if a layer becomes zero.
    Proves `Pruned.count`.
    """
    for rule, left in ((Prune(0.9, "row"), 1), (Prune(0.99), 1), (Prune(0.0), 4)):
        layer = nn.Linear(1, 4)
        compress([layer], {"0": [rule]})
        assert (layer.weight != 0).sum() == left


def test_values_by_name_strides_and_nan_are_those_of_torch():
    """
    An input that is passed by its name is rounded too, weights in channels-last order have the
    neighbours of the others, and a NaN makes its row NaN. Breaks if one of them is an error of a
    tensor's shape, or if a NaN is hidden.
    Proves `weights.grid`, `PrunedElements.keys`.
    """
    torch.manual_seed(0)
    layer = nn.Linear(6, 3)
    compress([layer], {"0": [Quantize(of="input")]})
    x = torch.randn(5, 6)
    assert torch.equal(layer(input=x), layer(x))

    both = [nn.Conv2d(8, 8, 3) for _ in range(2)]
    both[1].load_state_dict(both[0].state_dict())
    both[1].to(memory_format=torch.channels_last)
    compress(both, {"*": [Prune(0.5), Quantize(4, group=4)]})
    assert torch.equal(both[0].weight, both[1].weight)
    both[1](torch.randn(1, 8, 5, 5)).sum().backward()

    for symmetric in (True, False):
        layer = nn.Linear(6, 3)
        with torch.no_grad():
            layer.weight[0, 0] = torch.nan
        compress([layer], {"0": [Prune(0.5), Quantize(4, symmetric=symmetric)]})
        assert layer.weight[0].isnan().any() and not layer.weight[1:].isnan().any()


# ------------------------------------------------------------------------------------ thresholds


def test_the_example_of_the_head_finds_the_second_smallest():
    """
    Two ranks in one process: each list is a rank's. Breaks if ranks disagree on a digit.
    Proves `kth_keys`.
    """
    messages = []

    def total(counts):
        messages.append(counts.nbytes)
        return counts.view(2, -1).sum(0).repeat(2)

    keys = torch.tensor([42, 17, 13, 45])
    of_ranks = torch.tensor([0, 0, 1, 1])
    assert kth_keys(keys, of_ranks, [2, 2], 6, total).tolist() == [17, 17]
    assert messages == [2 * 256 * 8]


def exact(sizes):
    """Thresholds of random keys, of many equal first digits, and of ranks without any"""
    def total(counts):
        dist.all_reduce(counts)
        return counts

    found = []
    for size, k in sizes:
        generator = torch.Generator().manual_seed(size)
        every = [torch.randperm(4000, generator=generator)[:size] + base
                 for base in (0, 2**45, 77)]
        mine = [keys.tensor_split(world_size())[rank()] for keys in every]
        # The last list is all on rank 0.
        mine[2] = every[2][: 0 if rank() else size]
        lists = torch.arange(3).repeat_interleave(torch.tensor([len(each) for each in mine]))
        thresholds = kth_keys(torch.cat(mine), lists, [k] * 3, 46, total)
        found.append((thresholds.tolist(), [keys.sort().values[k - 1].item() for keys in every]))
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_threshold_is_that_of_a_sort_on_all_ranks(ranks):
    """
    The k-th of the sorted whole. Breaks if one element is counted twice, or on no rank.
    Proves `kth_keys`.
    """
    for found in run(exact, ranks, [(1, 1), (50, 7), (1000, 1000)]):
        assert all(thresholds == expected for thresholds, expected in found)


def masks(dtype, scope, across, offload):
    """What pruning leaves after a few steps, and what counting sends"""
    plain = layers(dtype)
    compression = compress(plain, {"*": [Prune(0.5, end=3, scope=scope)]})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=(across, "shard")) if across else None
    offload = Offload("nvme", folder=offload) if offload else None
    model = sharded(plain, mesh=mesh, offload=offload)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, offload=offload)
    with Ledger(model, optimizer) as tape:
        for x in batches(3, dtype):
            step(model, optimizer, rows(x))
    counts = [e for e in tape.events if e.event == "norm" and e.layer != "the optimizer"]
    # Between two groups of two ranks: five gathers, over both hops with nodes, and a reduction and
    # an exchange of norms, over both in any case.
    others = {"replicate": 9, "nodes": 14}
    messages = others[across] if across else predict_optimizer(optimizer).messages
    sent = (sum(e.sent_bytes for e in counts) / 3, tape.messages / 3 - messages)
    with model.full_params() as params:
        stored = {name: p.clone() for name, p in params.items()}
        weights = computed(model)
    return weights, stored, [int(m.state[1]) for m in compression.methods()], sent


def several_masks(cases, folder):
    return [masks(dtype, scope, across, folder if in_files else None)
            for dtype, scope, across, in_files in cases]


def largest_half(part):
    """By a stable sort of a whole weight"""
    mask = torch.ones(len(part), dtype=torch.bool)
    mask[part.abs().argsort(stable=True)[: round(len(part) / 2)]] = False
    return torch.where(mask, part, 0)


FP32 = (torch.float32, "layer", "", False)
BF16 = (torch.bfloat16, "global", "", False)


@pytest.mark.parametrize("ranks, cases", [
    (1, [FP32]), (2, [FP32, BF16, (torch.bfloat16, "global", "", True)]), (3, [FP32, BF16]),
    (4, [(torch.bfloat16, "global", across, False) for across in ("replicate", "nodes")])])
def test_masks_on_ranks_are_exact_and_those_of_one_process(ranks, cases, tmp_path):
    """
    A stable sort of the whole weights, by magnitude, leaves the same elements; bf16 has many equal
    ones. Thresholds are the same on all ranks, and for shards in files. The bytes and messages are
    those of the formula. Breaks if a threshold is approximate, if a rank forgets the place of its
    shard, or if counting reads another shard than the one that was stepped.
    Proves `compress`, `Compression`, `Compression.__init__`, `Compression.find_thresholds`,
    `Compression.advance`, `Compression.methods`, `own_keys`,
    `thresholds.layers_of`,
    `Compression.groups`, `named_modules`, `Method.steps`.
    """
    on_ranks = run(several_masks, ranks, cases, tmp_path)
    for i, (dtype, scope, across, _) in enumerate(cases):
        weights, stored, thresholds, (sent_bytes, messages) = on_ranks[0][i]
        assert all(found[i][2] == thresholds for found in on_ranks)
        names = [name for name in stored if name.endswith("original")]
        sizes = [stored[name].numel() for name in names]
        whole = torch.cat([stored[name].view(-1) for name in names])
        parts = [whole] if scope == "global" else whole.split(sizes)
        kept = torch.cat([largest_half(part) for part in parts])
        for name, expected in zip(names, kept.split(sizes), strict=True):
            plain = name.replace("parametrizations.weight.original", "weight")
            assert torch.equal(weights[plain].view(-1), expected), (ranks, name)
        # In each step so many messages of so many bytes to each other rank; replicas send each
        # other the counts of two ranks.
        digits = -(-(8 * dtype.itemsize + max(map(len, parts)).bit_length()) // 8)
        others = 2 if across else ranks - 1
        assert sent_bytes == digits * 256 * 8 * len(parts) * (ranks - 1)
        assert messages == digits * others


def beside(scope):
    """How much is pruned of two sharded layers and a plain one"""
    plain = layers()
    compress(plain, {"*": [Prune(0.5, scope=scope)]})
    sharded_layers = [Zero3Layer(layer) for layer in plain[:2]]
    model = nn.Sequential(*sharded_layers, plain[2])
    model(rows(batches(1)[0])).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    with sharded_layers[0].full_params(), sharded_layers[1].full_params():
        weights = [t for name, t in computed(model).items() if name.endswith("weight")]
    return [int((t == 0).sum()) for t in weights]


def beside_split(scope):
    """How much is pruned of a layer in a chain with one that ranks split"""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tensor", "shard"))
    linear = nn.Linear(8, 8)
    compress([linear], {"*": [Prune(0.5, scope=scope)]})
    pattern = Pattern(columns=("0",), rows=("2",))
    network = inject(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)),
                     [policies.tensor_parallel(mesh["tensor"], {nn.Sequential: pattern})])
    model = sharded([linear, network], mesh=mesh["shard"])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.0)
    step(model, optimizer, torch.ones(2, 8))
    with model.full_params():
        return int((linear.weight == 0).sum())


def both_beside():
    assert [beside_split(scope) for scope in ("layer", "global")] == [32, 32]
    return [beside(scope) for scope in ("layer", "global")]


def test_a_plain_layer_beside_sharded_ones_is_counted_once():
    """
    Half of its elements are pruned, and half of all if they share a threshold; and half of a whole
    layer in front of a split one. Breaks if each rank counts them.
    Proves `own_keys`, `Compression.find_thresholds`.
    """
    for alone, together in run(both_beside, 2):
        assert alone == [33, 44, 20] and sum(together) == 97


# -------------------------------------------------------------------------------------- training


EVERYTHING = {
    "0.0": [Prune(0.6, start=1, end=4)],
    "1.0": [Prune(0.5, "row", start=2, regrow=True),
            Quantize(4, group=11, start_bits=8, start=1, end=5)],
    "2": [Prune(0.5), Prune(0.5, "head", heads=4), Quantize(8, symmetric=False)],
}


def train(steps, rules, use="chain"):
    """Train sharded, or plain on the global batch in one process"""
    plain = layers()
    compression = compress(plain, rules)
    if use == "plain":
        model = nn.Sequential(*plain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    else:
        model = sharded(plain) if use != "wrap" else wrap(nn.Sequential(*plain), nn.Linear)
        make = torch.optim.SGD if use == "torch" else None
        optimizer = make(model.get_trainable_chunk(), lr=0.1, momentum=0.9) if make else \
            Zero3Optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    found = []
    for x in batches(steps):
        step(model, optimizer, x if use == "plain" else rows(x))
        weights = computed(model) if use == "plain" else seen(model)
        states = [m.state.tolist() for m in compression.methods(Pruned)]
        found.append((weights, states))
    return found


def train_each(steps, rules, uses):
    return {use: train(steps, rules, use) for use in uses}


@pytest.mark.parametrize("ranks, uses", [
    (1, ["chain"]), (2, ["chain", "torch", "wrap"]), (3, ["chain", "wrap"])])
def test_training_on_ranks_is_that_of_one_process(ranks, uses):
    """
    All rules together: masks and thresholds to the bit, in every step, and all weights up to the
    order in which gradients are added. Breaks if ranks advance at different steps, or if an
    optimizer inside of another one advances a schedule too.
    Proves `Compression.is_trained_by`.
    """
    expected = train(6, EVERYTHING, "plain")
    for found in run(train_each, ranks, 6, EVERYTHING, uses):
        for use in uses:
            for mine, plain in zip(found[use], expected, strict=True):
                compare(mine, plain)
            if ranks == 1:
                assert [states for _, states in found[use]] == [each[1] for each in expected]
    zeros = [sum(int((t == 0).sum()) for t in weights.values()) for weights, _ in expected]
    assert zeros[0] < zeros[-1]


def compare(mine, theirs):
    """A step on ranks, and the same step of one process"""
    (weights, states), (plain, plain_states) = mine, theirs
    assert [state[0] for state in states] == [state[0] for state in plain_states]
    expected = dict(sorted(plain.items())).values()
    for (name, weight), other in zip(sorted(weights.items()), expected, strict=True):
        assert torch.equal(weight == 0, other == 0), name
        # A gradient is a mean over ranks, in another order. A weight that lies between two codes
        # may round to the other one.
        assert (weight - other).abs().max() < 0.02, name


def once():
    """Steps with a closure, and without"""
    return [steps_after_one(use_closure) for use_closure in (True, False)]


def steps_after_one(use_closure):
    plain = layers()
    compression = compress(plain, {"*": [Prune(0.5)]})
    model = sharded(plain)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    x = rows(batches(1)[0])

    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        optimizer.backward(loss)
        return loss

    if use_closure:
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()
    other.step()
    return [m.steps for m in compression.methods()]


def test_a_step_advances_a_schedule_once():
    """
    With a closure too, and not if another model is stepped. Breaks if a schedule runs at twice the
    speed.
    Proves `Compression.is_trained_by`.
    """
    assert run(once, 2) == [[[1, 1, 1]] * 2] * 2


def test_a_copy_follows_its_own_optimizer_and_hooks_go_with_the_model():
    """
    Breaks if training a copy advances the original, or if a model that is gone leaves a hook.
    """
    gc.collect()
    before = len(after_steps)
    plain = nn.Sequential(*layers())
    compression = compress(plain, {"*": [Prune(0.5)]})
    twin = copy.deepcopy(plain)
    x = batches(1)[0]
    # A copy that is loaded until its buffer has the version that the original's had.
    other = nn.Sequential(*layers())
    again = compress(other, {"*": [Prune(0.5, start=2)]})
    again.advance()
    other(x)
    average = copy.deepcopy(other)
    version = other[2].parametrizations.weight[0][0].state._version
    again.advance()
    while average[2].parametrizations.weight[0][0].state._version < version:
        average.load_state_dict(other.state_dict())
    assert torch.equal(average(x), other(x))
    step(twin, torch.optim.SGD(twin.parameters(), lr=0.1), x)
    assert [m.steps for m in compression.methods()] == [0, 0, 0]
    assert twin[2].parametrizations.weight[0][0].steps == 1
    assert twin[2].parametrizations.weight[0][0].compression is not compression
    assert len(after_steps) == before + 4
    del plain, twin, compression, average, other, again
    gc.collect()
    assert len(after_steps) == before


def logged(sharded):
    """Thresholds and weights after steps, each in the life of a forward pass without backward."""
    torch.manual_seed(0)
    modules = [nn.Linear(6, 8), nn.Linear(8, 5)]
    compression = compress(modules, {"*": [Prune(0.5)]})
    model = (Zero3Sequential([Zero3Layer(m) for m in modules]) if sharded else
             nn.Sequential(*modules))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = batches(1)[0]
    for _ in range(2):
        model(x).square().mean().backward()
        kept = model(2 * x)
        optimizer.step()
        optimizer.zero_grad()
        del kept
    with torch.no_grad():
        return [int(method.state[1]) for method in compression.methods()], model(x)


def both_logged():
    return logged(True), logged(False)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forward_that_is_kept_over_a_step_changes_no_threshold(ranks):
    """
    The last layer is whole from such a forward on, with the weights from before the step. Breaks
    where its parameters pass for plain ones then, and the threshold is that of the old weights.
    Proves `LayerGuard.after_forward`.
    """
    for (found, ours), (expected, plain) in run(both_logged, ranks):
        assert found == expected
        torch.testing.assert_close(ours, plain)


def test_a_schedule_follows_the_optimizer_with_the_most_steps():
    """
    Of two optimizers for two halves, of one that takes the other's place, for frozen weights, and
    for inputs alone. The thresholds are those of the weights after each step. Breaks if two halves
    advance a schedule twice, or if the schedule of a frozen weight never starts.
    Proves `Compression.follow`, `Compression.is_trained_by`.
    """
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    compression = compress(model, {"*": [Prune(0.5, end=10, scope="global")]})

    def train(*optimizers):
        model(batches(1)[0]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    halves = [torch.optim.SGD(half.parameters(), lr=0.1) for half in model]
    for done in range(1, 4):
        train(*halves)
        assert {method.steps for method in compression.methods()} == {done}
        found = {int(method.state[1]) for method in compression.methods()}
        compression.find_thresholds()
        assert found == {int(method.state[1]) for method in compression.methods()}
    later = torch.optim.SGD(model.parameters(), lr=0.1)
    for done in (3, 4, 5):
        train(later)
        assert {method.steps for method in compression.methods()} == {done}

    for rules in ([Quantize(4, start=1)], [Quantize(of="input", start=1)]):
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        model[0].requires_grad_(False)
        compress(model, {"0": rules})
        before = model(batches(1)[0])
        train(torch.optim.SGD(model[1].parameters(), lr=0.0))
        assert not torch.equal(model(batches(1)[0]), before)


def staged(scope):
    """A pipeline of two stages, whose weights share a threshold or not"""
    plain = layers()
    compression = compress(plain, {"*": [Prune(0.5, scope=scope), Quantize(of="input")]})
    mesh = init_device_mesh("cpu", (2, world_size() // 2), mesh_dim_names=("pipeline", "shard"))
    model = Pipeline(plain, mesh, loss_fn=lambda out, y: out.square().mean(), micro_batches=2,
                     stages=[1, 2])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    for x in batches(3):
        mine = x.chunk(world_size() // 2)[dist.get_rank() % (world_size() // 2)]
        model.train_batch(mine, mine, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    with model.full_params() as params:
        stored = {name: p.detach().clone() for name, p in params.items()}
    return [int(m.state[1]) for m in compression.methods(Pruned)], stored


def both_scopes():
    return {scope: staged(scope) for scope in ("layer", "global")}


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_stages_of_a_pipeline_share_thresholds(ranks):
    """
    The threshold is that of one process with the same weights, on the ranks of every stage. Breaks
    if a stage counts only what it has.
    Proves `Compression.find_thresholds`.
    """
    on_ranks = run(both_scopes, ranks)
    for scope, (_, stored) in on_ranks[0].items():
        plain = layers()
        compression = compress(plain, {"*": [Prune(0.5, scope=scope)]})
        with torch.no_grad():
            for name, p in nn.Sequential(*plain).named_parameters():
                p.copy_(stored[name])
        compression.find_thresholds()
        expected = [int(m.state[1]) for m in compression.methods(Pruned)]
        assert all(found[scope][0] == expected for found in on_ranks)


SAVED, END = 3, 6


def resumed(folder, begin, rules):
    """Train from the first step and save in the middle, or go on from there"""
    plain = layers()
    compression = compress(plain, rules)
    model = sharded(plain)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    if begin:
        load(folder, model, optimizer)
    found = []
    for done, x in enumerate(batches(END)[begin:], begin + 1):
        step(model, optimizer, rows(x))
        if done > SAVED:
            found.append((seen(model), [m.state.tolist() for m in compression.methods(Pruned)]))
        if done == SAVED:
            save(folder, model, optimizer, step=done)
    return found


def test_a_run_resumes_in_the_middle_of_a_schedule(tmp_path):
    """
    On as many ranks to the bit, on another number to the same masks. Breaks if steps or
    thresholds are not in a checkpoint.
    Proves `compress`.
    """
    straight = run(resumed, 2, tmp_path, 0, EVERYTHING)[0]
    for ranks in (1, 2, 3):
        found = run(resumed, ranks, tmp_path, SAVED, EVERYTHING)[0]
        for mine, theirs in zip(found, straight, strict=True):
            compare(mine, theirs)
            if ranks == 2:
                assert mine[1:] == theirs[1:]
                assert all(torch.equal(weight, theirs[0][name])
                           for name, weight in mine[0].items())


# --------------------------------------------------------------------------------------- refusals


def test_a_wrong_call_is_refused():
    """
    Each with what to do. Breaks if a rule is silently not applied.
    Proves `compress`, `named_modules`.
    """
    assert [*named_modules([nn.Linear(2, 2)])] == ["", "0"]
    tied = layers()
    tied.append(nn.Linear(8, 5))
    tied[3].weight = tied[2].weight
    wrong = [
        (layers(), {"*.1": [Prune()]}, "pattern"), (layers(), {"2": []}, "a list"),
        (layers(), {"2": ["prune"]}, "a list"),
        (layers(), {"2": [Prune(), Prune(0.2)]}, "at most one"),
        (layers(), {"2": [Prune()], "*": [Prune()], "2*": [Prune()]}, "another pattern"),
        (layers(), {"2": [Quantize(4, group=3)]}, "splits"),
        (layers(), {"2": [Prune(0.5, "head", heads=3)]}, "splits"),
        (layers(torch.float64), {"2": [Prune()]}, "32 bits"), (tied, {"3": [Prune()]}, "alone"),
        ([nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()], {"*": [Prune(scope="global")]}, "one data"),
        ([nn.Conv2d(4, 4, 1, groups=2)], {"*": [Prune(0.5, "channel")]}, "into groups"),
        ([nn.MultiheadAttention(4, 2)], {"*": [Quantize(of="input")]}, "attention reads"),
        (layers(), {"2": [Prune(0.5, "channel", follows=("1.0",)), Quantize(of="input")]},
         "inputs as they are"),
        ([Zero3Layer(nn.Linear(4, 4))], {"*": [Prune()]}, "one that is sharded"),
        ([nn.Linear(2, 2, device="meta")], {"0": [Prune()]}, "meta"),
    ]
    for model, rules, word in wrong:
        with pytest.raises((ValueError, TypeError), match=f"{word}.*What to do"):
            compress(model, rules)


def test_a_call_that_is_refused_changes_nothing():
    """
    All problems are found before the first rule is put in place. Breaks if an error of a later
    pattern leaves the weights of earlier ones compressed.
    Proves `compress`, `_share`.
    """
    mixed = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()]
    for rules, word in (({"0": [Prune()], "1": [Quantize(4, group=3)]}, "splits"),
                        ({"0": [Prune()], "3": [Prune()]}, "pattern"),
                        ({"0": [Prune()], "1|2": [Prune(scope="global")]}, "one data")):
        with pytest.raises(ValueError, match=word):
            compress(mixed, rules)
        assert all(type(layer) is nn.Linear for layer in mixed)


def encoded():
    plain = layers()
    compress(plain, {"*": [Prune(0.5)]})
    model = sharded(plain, mesh=Links(weights=Int8()))
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    with pytest.raises(RuntimeError, match=r"cannot prune elements.*What to do"):
        step(model, optimizer, rows(batches(1)[0]))


def test_weights_that_are_gathered_in_codes_cannot_be_counted():
    """
    Breaks if ranks mask by other numbers than they compute with.
    """
    run(encoded, 2)


def gathered(encoding):
    """Train with weights in 8 bits, and say what the gathers have sent"""
    plain = layers()
    compress(plain, {"*": [Quantize(8)]})
    model = sharded(plain, mesh=Links(weights=encoding) if encoding else None)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    with Ledger(model, optimizer) as tape:
        losses = [step(model, optimizer, rows(x)) for x in batches(4)]
    return losses, sum(event.sent_bytes for event in tape.events if event.event == "fetch")


def gathered_both():
    return gathered(None), gathered(Int8(block=8))


def test_weights_of_eight_bits_may_be_gathered_in_eight_bits():
    """
    The encoding of the chapter on groups sends a quarter of the bytes, and what it rounds away is
    less than the grid does. Breaks if a grid needs the exact weights.
    Proves `Quantised.forward`.
    """
    ((exact_losses, exact_bytes), (losses, nbytes)), _ = run(gathered_both, 2)
    assert nbytes < 0.4 * exact_bytes
    assert torch.allclose(torch.tensor(losses), torch.tensor(exact_losses), rtol=0.02)


def test_a_quantised_weight_has_a_width():
    """
    Proves `Quantised`, `Quantised.grid`.
    """
    layer = nn.Linear(4, 3)
    assert Quantised(Quantize(4, group=2), layer).grid(layer.weight).scales.shape == (6,)


# ---------------------------------------------------------------------------------------- freeing


def test_a_compressed_weight_is_freed_between_forward_and_backward():
    """
    What autograd has saved has no memory then, nor after backward; the gradients are those of a
    weight that stays. Before a rule starts, the stored weight itself is computed with, and is left
    alone. Breaks if each layer keeps its compressed weight until backward.
    Proves `Compressed`, `Compressed.forward`, `Compressed.before_forward`,
    `Compressed.after_forward`.
    """
    torch.manual_seed(0)
    layer = nn.Linear(6, 5)
    compress([layer], {"0": [Prune(0.5), Quantize(4, start=1)]})
    stored = layer.parametrizations.weight.original
    x = torch.randn(3, 6, requires_grad=True)
    for twice in (False, True):
        out = layer(x)
        other = layer(2 * x) if twice else out
        expected = F.linear(x, layer.weight, layer.bias)
        more = F.linear(2 * x, layer.weight, layer.bias) if twice else expected
        saved = [each.grad_fn._saved_mat2 for each in (out, other)]
        assert all(each.untyped_storage().nbytes() == 0 for each in saved)
        loss = (out + other).square().sum()
        found = torch.autograd.grad(loss, [stored, x], retain_graph=True)
        assert all(each.untyped_storage().nbytes() == 0 for each in saved)
        again = torch.autograd.grad(loss, [stored, x])
        right = torch.autograd.grad((expected + more).square().sum(), [stored, x])
        for a, b, c in zip(found, again, right, strict=True):
            assert torch.equal(a, c) and torch.equal(b, c)
    assert torch.equal(out, expected)
    late = nn.Linear(6, 5)
    compress([late], {"0": [Prune(0.5, start=1)]})
    late(x).sum().backward()
    assert torch.equal(late.weight, late.parametrizations.weight.original)


class Reads(nn.Module):
    """Reads the weight of a module that does not compute, as attention does"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.broken = nn.Linear(6, 6)

    def forward(self, x):
        with contextlib.suppress(RuntimeError):
            self.broken(x[:, 1:])
        return F.linear(self.linear(x), self.linear.weight) + F.linear(x, self.broken.weight)


def test_a_compressed_weight_that_another_module_reads_is_kept_until_backward():
    """
    And not for ever, also if the module itself has failed. A cached one is kept while it is cached.
    Breaks if each step leaves a copy of the weight, or if a weight is freed that others need.
    Proves `Compressed.__init__`, `Compressed.forward`, `Compressed.before_forward`,
    `Compressed.after_forward`.
    """
    torch.manual_seed(0)
    model = Reads()
    compress(model, {"*": [Quantize(8)]})
    x = torch.randn(3, 6)
    weights = []
    for steps in (1, 5):
        for _ in range(steps):
            model(x).sum().backward()
        gc.collect()
        weights.append(sum(type(each) is torch.Tensor and each.shape == (6, 6)
                           for each in gc.get_objects()))
    assert weights[0] == weights[1]
    expected = model(x) + model(2 * x)
    with parametrize.cached():
        assert torch.equal(model(x) + model(2 * x), expected)


def test_a_pruned_weight_is_not_converted_in_silence():
    """
    Its threshold is for numbers of one type. In another one it would prune everything or nothing,
    and a model would be cleaned so.
    Proves `PrunedElements.kept`, `Compression.find_thresholds`.
    """
    model = nn.Sequential(nn.Linear(8, 8))
    record = compress(model, {"*": [Prune(0.5)]})
    model.bfloat16()
    with pytest.raises(RuntimeError, match=r"Expected: torch\.float32, of which its"):
        clean(model)
    record.find_thresholds()
    assert (model[0].weight == 0).sum() == 32


def ending(use):
    """Layers that end in a compressed module, trained on ranks or plain"""
    torch.manual_seed(0)
    plain = [nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)) for _ in range(3)]
    compress(plain, {"*": [Quantize(8)]})
    model = nn.Sequential(*plain)
    if use == "plain":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    else:
        model = sharded(plain) if use == "chain" else wrap(model, nn.Sequential)
        optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    return [step(model, optimizer, x if use == "plain" else rows(x)) for x in batches(3)]


def ending_both():
    return [ending(use) for use in ("chain", "wrap")]


def test_a_compressed_module_may_end_a_sharded_layer():
    """
    The losses are those of one process, as a mean over ranks. Breaks if the weight is made again
    before the layer has gathered the stored one.
    Proves `Compressed.after_forward`.
    """
    on_ranks = torch.tensor(run(ending_both, 2)).mean(0)
    assert torch.allclose(on_ranks, torch.tensor(ending("plain")).expand(2, -1), rtol=1e-3)


class Keeps(nn.Linear):
    """Keeps a part of the loss, and returns the rest"""

    def forward(self, x):
        found = super().forward(x)
        self.part = self.weight.square().sum()
        return found


def test_a_compressed_module_may_keep_a_part_of_the_loss():
    """
    Backward begins with that part, so the weight has to be there. Breaks if it is freed: the
    process would crash.
    Proves `Compressed.after_forward`.
    """
    torch.manual_seed(0)
    layer = Keeps(6, 5)
    compress([layer], {"*": [Quantize(4)]})
    stored = layer.parametrizations.weight.original
    x = torch.randn(3, 6)
    (found,) = torch.autograd.grad(layer(x).sum() + layer.part, [stored])
    weight = layer.weight
    loss = F.linear(x, weight, layer.bias).sum() + weight.square().sum()
    assert torch.allclose(found, torch.autograd.grad(loss, [stored])[0])


def test_a_gradient_of_a_gradient_of_compressed_weights_is_that_of_torch():
    """
    Breaks if a weight is freed that the graph of the gradients has saved.
    Proves `Compressed`.
    """
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    compress(model, {"*": [Quantize(8)]})
    stored = [*model.parameters()]
    x = torch.randn(3, 6)
    found = []
    for weights in (contextlib.nullcontext(), parametrize.cached()):
        # A weight in the cache stays.
        with weights:
            first = torch.autograd.grad(model(x).square().sum(), stored, create_graph=True)
            found.append(torch.autograd.grad(sum(g.square().sum() for g in first), stored))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


class Checkpointed(nn.Module):
    """A layer that is computed again in backward"""

    def __init__(self, layer, use_reentrant):
        super().__init__()
        self.layer = layer
        self.use_reentrant = use_reentrant

    def forward(self, x):
        if not x.requires_grad:
            x = x.clone().requires_grad_()
        return checkpoint(self.layer, x, use_reentrant=self.use_reentrant)


def checkpointed(kind):
    """Gradients of shards, with activation checkpointing or without"""
    plain = layers()
    compress(plain, EVERYTHING)
    if kind is not None:
        plain = [Checkpointed(layer, kind) for layer in plain]
    model = sharded(plain)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    for x in batches(4):
        step(model, optimizer, rows(x))
    with model.full_params() as params:
        return [p.detach().clone() for p in params.values()]


def checkpointed_each():
    return [checkpointed(kind) for kind in (None, True, False)]


def test_activation_checkpointing_and_freeing_agree():
    """
    Both kinds, around compressed layers that are sharded: the same weights, to the bit. Breaks if
    the weight that a recomputation has made is freed before its backward.
    Proves `Compressed.after_forward`.
    """
    on_ranks = run(checkpointed_each, 2)
    expected = on_ranks[0][0]
    for found in on_ranks:
        for weights in found:
            assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))

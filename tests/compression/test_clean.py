"""
# Cleaned models: shapes, bytes and outputs

The oracle is the compressed model, and a reader of safetensors that knows nothing of this package.
"""

import copy
import json
import re
import textwrap
from itertools import combinations, product

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.compression.test_compression import (
    EVERYTHING,
    Conv1D,
    batches,
    layers,
    rows,
    sharded,
    step,
)
from tests.ranks import run
from zero3 import Zero3Optimizer, wrap
from zero3.compression import Prune, Quantize, clean, compress, read, stored, write
from zero3.compression.clean import measure, table
from zero3.compression.stored import Stored, pack, unpack
from zero3.pipeline import Pipeline


def dense(path):
    """All weights of a file, with torch and safetensors alone"""
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        about = json.loads(file.metadata()["zero3"])["weights"]
    found = {name: t for name, t in tensors.items() if name.rpartition(".")[0] not in about}
    for name, known in about.items():
        shape, bits = torch.Size(known["shape"]), known["bits"]
        kept = torch.ones(shape.numel(), dtype=torch.bool)
        if f"{name}.mask" in tensors:
            mask = tensors[f"{name}.mask"]
            kept = torch.stack([mask >> i & 1 for i in range(8)], 1).view(-1)[:len(kept)].bool()
        values = tensors[f"{name}.codes"]
        if bits:
            codes = torch.stack([values >> i & (1 << bits) - 1 for i in range(0, 8, bits)], 1)
            codes = codes.view(-1)[: kept.sum()].float() + known["least"]
            scales = tensors[f"{name}.scales"]
            each = len(kept) // len(scales)
            zeros = tensors.get(f"{name}.zeros", torch.zeros_like(scales)).float()
            codes = 2 * codes - 1 if bits == 1 else codes - zeros.expand(-1, each).reshape(-1)[kept]
            values = codes * scales.expand(-1, each).reshape(-1)[kept]
        weight = torch.zeros(shape.numel(), dtype=values.dtype)
        weight[kept] = values
        found[name] = weight.view(shape).to(getattr(torch, known["dtype"]))
    return found


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_codes_are_packed_and_unpacked(bits):
    """
    The first code in the lowest bits. Breaks if the last byte loses codes.
    Proves `pack`, `unpack`.
    """
    codes = (torch.arange(11) * 37 % 2**bits).to(torch.uint8)
    packed = pack(codes, bits)
    assert len(packed) == -(-11 * bits // 8) and torch.equal(unpack(packed, bits)[:11], codes)
    assert pack(torch.tensor([1, 2], dtype=torch.uint8), 4).tolist() == [1 + 16 * 2]


def test_the_lines_that_read_a_file_without_this_package_are_right(tmp_path):
    """
    Those at the head of `stored.py`. Breaks where a code stays an unsigned number.
    Proves `write`.
    """
    torch.manual_seed(0)
    plain = [nn.Linear(5, 3)]
    compress(plain, {"*": [Quantize(4)]})
    clean(plain)
    write(plain, tmp_path / "small.safetensors")
    with safe_open(tmp_path / "small.safetensors", "pt") as file:
        about = json.loads(file.metadata()["zero3"])["weights"]["0.weight"]
    found = {"torch": torch, "tensors": load_file(tmp_path / "small.safetensors"),
             "shape": about["shape"], "least": about["least"], "numel": 15, "rows": 3}
    exec(textwrap.dedent(re.search(r"(?m)(^    .+\n)+", stored.__doc__)[0]), found)
    assert torch.equal(found["weight"], plain[0].weight)


@pytest.mark.parametrize("pruned", [None, "element"])
@pytest.mark.parametrize("quantised", [
    None, Quantize(8), Quantize(8, symmetric=False), Quantize(4, group=4), Quantize(2),
    Quantize(4, group=2, symmetric=False), Quantize(1), Quantize(1, group=4),
    Quantize(4, start_bits=8, end=2)])
def test_a_file_is_as_small_as_the_bits_say_and_gives_the_same_weights(pruned, quantised, tmp_path):
    """
    To the byte beside the header; a reader of the format finds the weights that training computed
    with, to the bit, and so does the cleaned model. Breaks if a code is off by one, or if a pruned
    element is stored.
    Proves `write`, `Stored`, `Stored.__init__`, `clean.Plan.__init__`, `stored.store`,
    `Stored.forward`, `Grid.codes`, `clean.Plan`, `Plan.store`, `Plan.release`.
    """
    if pruned is None and quantised is None:
        return
    torch.manual_seed(0)
    plain = [nn.Linear(8, 5), nn.ReLU(), nn.Conv1d(4, 3, 2)]
    compression = compress(plain, {"[02]": [*([Prune(0.5, pruned)] if pruned else []),
                                            *([quantised] if quantised else [])]})
    if quantised and quantised.end:
        compression.advance()  # six bits, stored in eight
    expected = {name: module.weight.detach().clone() for name, module in
                (("0.weight", plain[0]), ("2.weight", plain[2]))}
    x = torch.randn(3, 8)
    out = plain[0](x)
    clean(plain)
    assert torch.equal(plain[0](x), out)
    write(plain, tmp_path / "small.safetensors")
    found = dense(tmp_path / "small.safetensors")
    assert {*found} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name

    def nbytes(numel, rows):
        left = numel - round(numel / 2) if pruned else numel
        mask = -(-numel // 8) if pruned else 0
        if not quantised:
            return mask + 4 * left
        bits = 8 if quantised.end else quantised.bits
        scales = numel // quantised.group if quantised.group else rows
        return mask + -(-left * bits // 8) + scales * (4 if quantised.symmetric else 5)

    path = tmp_path / "small.safetensors"
    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert path.stat().st_size - header == nbytes(40, 5) + nbytes(24, 3) + 4 * (5 + 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_data_types_are_stored_too(dtype):
    """
    Breaks if a cleaned layer of bf16 computes with other weights, or in fp32.
    """
    torch.manual_seed(0)
    plain = [nn.Linear(8, 6, dtype=dtype)]
    rules = [Quantize(4)] if dtype == torch.float64 else [Prune(0.4), Quantize(4, symmetric=False)]
    compress(plain, {"0": rules})
    weight = plain[0].weight.detach().clone()
    clean(plain)
    assert plain[0].weight.dtype == dtype and torch.equal(plain[0].weight, weight)


class Attention(nn.Module):
    """Attention with an attribute that counts heads"""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for each in (self.query, self.key, self.value))
        return x + self.output(
            nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two layers of a feed-forward network"""

    def __init__(self):
        super().__init__()
        self.attention = Attention(12, 4)
        self.first = nn.Linear(12, 10)
        self.second = nn.Linear(10, 12)

    def forward(self, x):
        return self.second(torch.relu(self.first(self.attention(x))))


STRUCTURED = {
    "*.first": [Prune(0.4), Prune(0.5, "row", follows=("second",)), Quantize(8)],
    "*.second": [Quantize(4, symmetric=False)],
    "*.output": [Prune(0.5, "head", heads=4, follows=("query", "key", "value"),
                       counts=("heads",)), Quantize(4, group=3)],
    "*.value": [Quantize(8)],
}


def test_pruned_rows_and_heads_are_gone_from_the_shapes():
    """
    Of the layers that follow too; the outputs are the same up to the order of sums with fewer
    terms. Breaks if a neighbour keeps a column that nobody writes.
    Proves `clean`, `Plan.cut`, `clean.measure`, `Size`, `clean.table`.
    """
    torch.manual_seed(0)
    plain = [Block(), Block()]
    whole = nn.Sequential(*plain)
    x = torch.randn(2, 7, 12)
    before = measure(whole, x, 1.0)
    compress(plain, STRUCTURED)
    expected = whole(x)
    clean(plain)
    block = plain[0]
    assert torch.allclose(whole(x), expected, atol=1e-6)
    assert block.first.weight.shape == (5, 12) and block.first.bias.shape == (5,)
    assert block.second.weight.shape == (12, 5) and block.first.out_features == 5
    assert block.attention.query.weight.shape == (6, 12) and block.attention.heads == 2
    assert block.attention.output.weight.shape == (12, 6)
    after = measure(whole, x, 1.1)
    matrices = 2 * (3 * 6 * 12 + 12 * 6 + 5 * 12 + 12 * 5)
    # On the CPU, torch's counter knows no fused attention.
    assert after.multiply_adds == 14 * matrices
    assert before.multiply_adds > after.multiply_adds and before.nbytes > 3 * after.nbytes
    # Of the first layer's elements, 0.4 of them all are pruned, some of them in rows that go.
    biases = 2 * (3 * 6 + 12 + 5 + 12)
    first = sum(int((each.first.weight != 0).sum()) for each in plain)
    assert after.parameters == matrices - 2 * 5 * 12 + first + biases
    assert "multiply-adds" in table(before, after) and "1.100" in table(before, after)


def test_a_model_without_cut_shapes_has_the_same_outputs_to_the_bit():
    """
    Breaks if a cleaned weight is rounded once more.
    Proves `clean`.
    """
    plain = layers()
    whole = nn.Sequential(*plain)
    compress(plain, EVERYTHING | {"2": [Prune(0.5), Quantize(8)]})
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    for x in batches(6):
        step(whole, optimizer, x)
    expected = whole(x)
    clean(plain)
    assert torch.equal(whole(x), expected)
    assert isinstance(plain[0][0].parametrizations.weight[0], Stored)


def test_a_cleaned_copy_leaves_the_original_compressed():
    """
    A copy shares the classes of its modules, from which torch removes the parametrized weights.
    Breaks if the original has no weights afterwards, or is cleaned too.
    Proves `clean`, `Plan.release`.
    """
    plain = nn.Sequential(*layers())
    compress(plain, EVERYTHING)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x in batches(6):
        step(plain, optimizer, x)
    expected = plain(x)
    twin = copy.deepcopy(plain)
    clean(twin)
    assert torch.equal(twin(x), expected) and torch.equal(plain(x), expected)
    step(plain, optimizer, x)
    assert torch.equal(twin(x), expected) and not torch.equal(plain(x), expected)
    expected = plain(x)
    clean(plain)
    assert torch.equal(plain(x), expected)


class Three(nn.Module):
    """Three layers, and a number of heads that `clean` changes"""

    def __init__(self, layer):
        super().__init__()
        self.before = nn.Linear(6, 12)
        self.layer = layer(12, 8)
        self.after = nn.Linear(8, 5)
        self.heads = 4

    def forward(self, x):
        return self.after(torch.relu(self.layer(self.before(x))))


BEFORE = {"follows": ("before",)}
RULES = [
    Prune(0.4), Prune(0.4, scope="global"), Prune(0.5, "row"),
    Prune(0.5, "row", follows=("after",)),
    Prune(0.5, "channel"), Prune(0.5, "channel", **BEFORE), Prune(0.5, "head", heads=4),
    Prune(0.5, "head", heads=4, counts=("heads",), regrow=True, **BEFORE),
    Quantize(8), Quantize(4, symmetric=False), Quantize(4, group=4), Quantize(1),
    Quantize(4, group=2, symmetric=False), Quantize(4, start_bits=8, end=6),
    Quantize(of="input"),
]


# Rules of the layer that the others follow.
AFTER = [Prune(0.4), Prune(0.5, "channel", follows=("layer",)), Quantize(of="input"),
         Quantize(8), Quantize(4, group=2, symmetric=False)]


def build(layer, rules=None):
    torch.manual_seed(0)
    model = Three(layer)
    if rules:
        compress(model, rules)
    return model


def cleaned_pair(layer, rules, path):
    """Train, clean, write and read; how far are the outputs? Nothing, if the pair is refused"""
    model = build(layer)
    try:
        compress(model, rules)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x in batches(2):
            step(model, optimizer, x)
        expected = model.eval()(x)
        clean(model)
    except ValueError as error:
        assert "What to do" in str(error)
        return None
    found = model(x)
    write(model, path)
    inputs = {name: [rule for rule in each if isinstance(rule, Quantize) and rule.of == "input"]
              for name, each in rules.items()}
    again = build(layer, {name: each for name, each in inputs.items() if each}).eval()
    read(again, path)
    assert torch.equal(again(x), found) and again.heads == model.heads
    assert repr(again.layer) == repr(model.layer)
    return float((found - expected).detach().abs().max())


@pytest.mark.parametrize("layer", [nn.Linear, Conv1D])
def test_any_two_rules_are_cleaned_to_the_same_outputs_and_read_back(layer, tmp_path):
    """
    In one layer, and in two that follow each other: the outputs before and after, to the bit if no
    shape changes. A model that reads the file computes the same bits. Breaks if a pair of rules is
    cleaned to another model.
    Proves `clean`, `write`, `read`.
    """
    pairs = [{"layer": [*pair]} for pair in combinations(RULES, 2)]
    if layer is nn.Linear:
        pairs += [{"layer": [one], "after": [two]} for one, two in product(RULES, AFTER)]
    found = []
    for rules in pairs:
        off = cleaned_pair(layer, rules, tmp_path / "small.safetensors")
        changes = any(getattr(rule, "follows", ()) for each in rules.values() for rule in each)
        assert off is None or off <= (1e-6 if changes else 0), (rules, off)
        found.append(off is not None)
    # Most of the others have two rules of a kind.
    assert sum(found) > len(found) / 2


def test_a_file_is_refused_by_a_model_that_it_does_not_fit(tmp_path):
    """
    A model that is not clean is not written, one that is clean is not cleaned again, and a file
    without rounded inputs is not read into a model with them. Breaks if one of them is accepted,
    or is an error without a cure.
    Proves `read`, `write`, `clean`.
    """
    path = tmp_path / "small.safetensors"
    model = build(nn.Linear, {"layer": [Quantize(8)]})
    with pytest.raises(ValueError, match=r"call `clean` first"):
        write(model, path)
    clean(model)
    with pytest.raises(ValueError, match=r"clean already.*What to do"):
        clean(model)
    write(model, path)
    for rules in ({"layer": [Quantize(8)]}, {"layer": [Quantize(of="input")]}):
        with pytest.raises(ValueError, match=r"rules of inputs alone"):
            read(build(nn.Linear, rules), path)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    save_file({**load_file(path), "layer.weight.stray": torch.ones(1)}, path, about)
    with pytest.raises(ValueError, match=r"others, \['layer.weight.stray'\]"):
        read(build(nn.Linear, {}), path)
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match=r"a file of `write`.*What to do"):
        read(model, path)


def test_layers_that_keep_inputs_first_are_cut_on_the_right_side():
    """
    An embedding before a layer, and a transposed convolution. Breaks if their inputs are cut.
    Proves `weights.axes`, `clean`.
    """
    torch.manual_seed(0)
    words = nn.Sequential(nn.Embedding(7, 8), nn.ReLU(), nn.Linear(8, 3))
    image = nn.Sequential(nn.ConvTranspose2d(3, 8, 2), nn.ReLU(), nn.Conv2d(8, 2, 1))
    for model, x in ((words, torch.arange(7)), (image, torch.randn(1, 3, 4, 4))):
        compress(model, {"0": [Prune(0.5, "row", follows=("2",))]})
        expected = model(x)
        clean(model)
        assert torch.allclose(model(x), expected, atol=1e-6)
        assert model[0].weight.shape[1] == model[2].weight.shape[1] == 4
    assert words[0].embedding_dim == 4 and image[0].out_channels == 4


def mistaken():
    plain = layers()
    compress(plain, {"*": [Prune(0.5)]})
    model = sharded(plain)
    for each in (model, plain):
        with pytest.raises(ValueError, match=r"clean\(plain, trained=sharded\)"):
            clean(each)
    for rules, dtype in (({"*": [Prune(0.4)]}, torch.float32), ({"2": [Prune(0.5)]}, torch.float32),
                         ({"*": [Prune(0.5)]}, torch.bfloat16)):
        fresh = layers(dtype)
        compress(fresh, rules)
        with pytest.raises(ValueError, match=r"compress.*same rules|the rule of"):
            clean(fresh, trained=model)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shard"))
    plain = layers()
    compress(plain, {"*": [Prune(0.5)]})
    stages = Pipeline(plain, mesh, loss_fn=lambda out, y: out.mean(), stages=[1, 2])
    with pytest.raises(ValueError, match=r"a pipeline.*What to do"):
        clean(fresh, trained=stages)


def test_other_rules_and_pipelines_are_refused():
    """
    Breaks if a model is cleaned by rules that it was not trained with.
    Proves `clean`.
    """
    run(mistaken, 2)


def cleaned(use):
    plain = layers()
    compress(plain, EVERYTHING)
    model = sharded(plain) if use == "chain" else wrap(nn.Sequential(*plain), nn.Linear)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    for x in batches(6):
        step(model, optimizer, rows(x))
    expected = model.eval()(x).detach()
    fresh = layers()
    compress(fresh, EVERYTHING)
    clean(fresh, trained=model)
    return torch.equal(nn.Sequential(*fresh).eval()(x), expected), fresh[0][0].weight.detach()


def cleaned_both():
    return [cleaned(use) for use in ("chain", "wrap")]


def test_a_sharded_model_is_cleaned_into_a_plain_one():
    """
    With its weights, steps and thresholds; the outputs are the same bits. Breaks if the
    cleaned model is at another step than the trained one.
    Proves `clean`, `take_over`.
    """
    for found in run(cleaned_both, 2):
        assert all(good and (weight == 0).sum() == round(0.6 * 66) for good, weight in found)


def test_what_cannot_be_cleaned_is_refused():
    """
    Each with what to do. Breaks if a wrong name leaves zeros in silence.
    Proves `clean`, `Plan.cut`.
    """
    wrong = [
        ({"0.first": [Prune(0.5, "row", follows=("third",))]}, "third"),
        ({"0.first": [Prune(0.5, "row", follows=("attention.query",))]}, "columns"),
        ({"0.attention.output": [Prune(0.5, "head", heads=4, counts=("size",),
                                       follows=("value",))]}, "size"),
        ({"0.first": [Prune(0.5, "row", follows=("second",))],
          "0.second": [Prune(0.5, "channel", follows=("first",))]}, "two"),
        ({"0.first": [Prune(0.5, "row", follows=("second",))],
          "0.second": [Quantize(4, group=10)] + [Quantize(of="input")]}, None),
        ({"0.first": [Prune(0.5, "row", follows=("second",))], "0.second": [Quantize(4, group=2)]},
         "share a scale"),
    ]
    for rules, word in wrong:
        torch.manual_seed(0)
        plain = [Block()]
        compress(plain, rules)
        if word is None:
            clean(plain)
            continue
        with pytest.raises(ValueError, match=f"{word}.*What to do"):
            clean(plain)
    with pytest.raises(ValueError, match=r"compressed weights.*What to do"):
        clean([Block()])


def test_a_tied_weight_is_tied_after_reading(tmp_path):
    """
    Breaks where each name gets a parameter of its own: training would go on with two weights.
    Proves `read`.
    """
    model = nn.ModuleDict({"table": nn.Embedding(9, 8), "linear": nn.Linear(8, 8),
                           "head": nn.Linear(8, 9, bias=False)})
    model["head"].weight = model["table"].weight
    fresh = copy.deepcopy(model)
    compress(model, {"linear": [Quantize(8)]})
    clean(model)
    write(model, tmp_path / "tied")
    read(fresh, tmp_path / "tied")
    assert fresh["head"].weight is fresh["table"].weight
    assert torch.equal(fresh["head"].weight, model["table"].weight)

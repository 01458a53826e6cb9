"""
# Module injection: other forwards, the same model

The oracle is the plain model, trained by plain PyTorch on the global batch.
"""

import copy
import inspect

import pytest
import torch
import torch.distributed as dist
from labml_nn.transformers import MultiHeadAttention, TransformerLayer
from labml_nn.transformers.feed_forward import FeedForward
from labml_nn.transformers.primer_ez import MultiDConvHeadAttention
from labml_nn.transformers.xl.relative_mha import RelativeMultiHeadAttention
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import zero3
from tests.bench import inject as bench_inject
from tests.ranks import run
from zero3 import Zero3Optimizer, wrap
from zero3.inject import inject, policies, report, restore
from zero3.inject.cross_entropy import chunked_cross_entropy
from zero3.train.gpt import Block, GPTConfig, gpt_layers

TOKENS = 13
WIDTH = 8
LENGTH = 6


def labml_model(**options):
    """labml's layer with a gated feed-forward network, twice, and the main job's block."""
    attention = MultiHeadAttention(2, WIDTH, 0.0)
    network = FeedForward(WIDTH, 12, 0.0, nn.SiLU(), is_gated=True)
    layer = TransformerLayer(d_model=WIDTH, self_attn=attention, feed_forward=network,
                             dropout_prob=0.0)
    config = GPTConfig(TOKENS, LENGTH, WIDTH, 2, 1, 12)
    first, block, last = gpt_layers(config)
    block.layer.feed_forward = copy.deepcopy(network)
    return Model([first, Masked(layer), Masked(copy.deepcopy(layer)), block, last])


class Masked(nn.Module):
    """A layer with the causal mask"""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()[..., None]
        return self.layer(x=x, mask=mask)


class Model(nn.Module):
    """Layers, and the loss of the next token"""

    layer_classes = (Masked, Block)

    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, ids):
        x = ids
        for layer in self.layers:
            x = layer(x)
        return self.loss(x, ids)

    @staticmethod
    def loss(x, ids):
        return F.cross_entropy(x[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


class HuggingFace(nn.Module):
    """A small language model of Hugging Face's"""

    def __init__(self, which, **more):
        # Seconds to import.
        import transformers

        super().__init__()
        names = {"vocab_size": TOKENS, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
        if which == "GPT2":
            config = transformers.GPT2Config(
                n_positions=16, n_embd=WIDTH, n_layer=2, n_head=2, attn_pdrop=0.0,
                **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, **more}, **names)
            self.model = transformers.GPT2LMHeadModel(config)
            self.layer_classes = (type(self.model.transformer.h[0]),)
        else:
            config = getattr(transformers, f"{which}Config")(
                hidden_size=WIDTH, intermediate_size=12, num_hidden_layers=2, head_dim=4,
                num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=16,
                **names, **more)
            self.model = getattr(transformers, f"{which}ForCausalLM")(config)
            self.layer_classes = (type(self.model.model.layers[0]),)

    def forward(self, ids):
        return self.model(ids, labels=ids).loss


def llama():
    return HuggingFace("Llama", tie_word_embeddings=True)


ALL = {"labml": (labml_model, lambda: [policies.attention(), policies.swiglu()], 1e-12),
       # Its norms compute in fp32, in fp64 models too.
       "llama": (llama, lambda: [policies.rms_norm(), policies.swiglu(),
                                 policies.cross_entropy(rows=4)], 2e-6)}


def make(which, seed=0, dtype=torch.double):
    build, listed, tolerance = ALL[which]
    torch.manual_seed(seed)
    return build().to(dtype), listed(), tolerance


def ids_of(rows, seed=1):
    return torch.randint(TOKENS, (rows, LENGTH), generator=torch.Generator().manual_seed(seed))


def gradients(model, *args):
    model.zero_grad()
    loss = model(*args)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def farthest(ones, others):
    assert ones.keys() == others.keys()
    return max(float((ones[name] - other).abs().max()) for name, other in others.items())


# ------------------------------------------------------------------------ the model stays the same


@pytest.mark.parametrize("which", ALL)
def test_restored_models_have_the_same_classes_parameters_and_bits(which):
    """
    Inside, the parameters are the same objects with the same names. `isinstance` says the same.
    After `restore` each module has its class, and outputs have the bits of the plain model.
    Breaks if a module keeps a class of ours.
    Proves `inject`, `restore`, `Replacement`, `Replacement.begin`, `Replacement.end`, `Policy`,
    `Policy.new_class`, `Policy.base_of`.
    """
    model, listed, _ = make(which)
    model.eval()
    ids = ids_of(3)
    modules = dict(model.named_modules())
    classes = {name: type(module) for name, module in modules.items()}
    params = dict(model.named_parameters(remove_duplicate=False))
    expected = model(ids)
    assert inject(model, listed) is model
    replaced = [name for name, module in modules.items() if type(module) is not classes[name]]
    assert len(replaced) == len(report(model, listed)) > 4
    assert dict(model.named_modules()) == modules
    assert all(isinstance(module, classes[name]) for name, module in modules.items())
    found = dict(model.named_parameters(remove_duplicate=False))
    assert all(found[name] is p for name, p in params.items()) and found.keys() == params.keys()
    # A copy is as good as the original.
    twin = restore(copy.deepcopy(model))
    assert restore(model) is model
    for each in (model, twin):
        assert {name: type(module) for name, module in each.named_modules()} == classes
        assert torch.equal(each(ids), expected)


@pytest.mark.parametrize("which", ALL)
def test_injected_models_have_the_losses_and_gradients_of_plain_ones(which):
    """
    In fp64, and in fp32 with a tolerance for rounding.
    Breaks if a forward or a gradient is another function.
    Proves `attention`, `Attention`, `Attention.forward`, `rms_norm`, `RMSNorm`, `swiglu`, `SwiGLU`,
    `_GatedProduct`, `_Norm`, `cross_entropy`, `CrossEntropy`, `CrossEntropy.forward`.
    """
    for dtype, rounding in ((torch.double, 0.0), (torch.float32, 1e-5)):
        model, listed, tolerance = make(which, dtype=dtype)
        twin = inject(copy.deepcopy(model), listed)
        (loss, grads), (other, others) = (gradients(each, ids_of(3)) for each in (model, twin))
        assert abs(loss - other) < max(tolerance, rounding)
        assert farthest(grads, others) < max(tolerance, rounding), (which, dtype)


def wrapped(which, folder):
    """The largest difference of weights after training, checkpoints included."""
    rank, size = dist.get_rank(), dist.get_world_size()
    plain, _, tolerance = make(which)
    model, listed, _ = make(which, seed=rank)
    names = {name for name, _ in plain.named_parameters(remove_duplicate=False)}
    model = wrap(inject(model, listed), model.layer_classes)
    pair = [torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=1e-3),
            Zero3Optimizer(model, torch.optim.AdamW, lr=1e-2, eps=1e-3)]
    for step in range(3):
        ids = ids_of(2 * size, seed=step)
        for each, rows, optimizer in ((plain, ids, pair[0]),
                                      (model, ids[2 * rank : 2 * rank + 2], pair[1])):
            each(rows).backward()
            optimizer.step()
            optimizer.zero_grad()
    zero3.save(folder, model, pair[1], step=3)
    # A plain model loads the checkpoint, because the names are its own.
    other, _, _ = make(which, seed=5)
    other = wrap(other, other.layer_classes)
    zero3.load(folder, other)
    worst = []
    for each in (model, other):
        with each.full_params() as params:
            assert params.keys() == names
            worst.append(farthest(dict(plain.named_parameters()), {
                name: p.detach() for name, p in params.items()
                if name in dict(plain.named_parameters())}))
    trained = restore(model.destroy())
    assert [type(m) for m in trained.modules()] == [type(m) for m in plain.modules()]
    worst.append(farthest(dict(plain.named_parameters()), dict(trained.named_parameters())))
    # AdamW divides by the gradient's size, so small differences of gradients grow.
    return max(worst) / tolerance


@pytest.mark.parametrize("which", ALL)
def test_injected_models_train_sharded_and_keep_their_names(which, tmp_path):
    """
    On two ranks, weights after three steps are those of plain PyTorch. A checkpoint of the injected
    model loads into a plain one. `restore` gives the trained weights.
    Proves I1, `inject`, `restore`.
    """
    assert max(run(wrapped, 2, which, str(tmp_path))) < 1000


def named(which):
    """The signature, the tokens and the losses of a model, plain, injected, split and wrapped."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tensor", "shard"))
    torch.manual_seed(3)
    plain = HuggingFace(which)
    layers = plain.layer_classes
    plain = plain.model.eval()
    for p in plain.parameters():
        nn.init.normal_(p, std=0.5)
    ids = ids_of(2)
    ids[0, :3] = 0
    mask = {"attention_mask": (ids != 0).long()}
    options = {**mask, "max_new_tokens": 5, "do_sample": False, "eos_token_id": None}
    expected = plain.generate(ids, **options)
    signature = inspect.signature(plain.forward)
    labels = {"labels": ids, **mask}
    names = [*signature.parameters]
    places = [labels.get(name) for name in names[1 : names.index("labels") + 1]]
    loss = plain(ids, **labels).loss
    for policy in (policies.cross_entropy(), policies.tensor_parallel(mesh["tensor"])):
        model = inject(copy.deepcopy(plain), [policy])
        for each in (model, wrap(copy.deepcopy(model), layers, mesh=mesh["shard"])):
            assert inspect.signature(each.forward) == signature
            assert torch.equal(each.generate(ids, **options), expected)
            for found in (each(ids, **labels).loss, each(ids, *places).loss):
                assert torch.allclose(found, loss)
    return names


@pytest.mark.parametrize("which", ["GPT2", "Llama"])
def test_a_model_keeps_the_signature_of_its_forward(which):
    """
    Hugging Face's `generate` asks it whether the model takes positions and masks, and a `Trainer`
    drops the columns that it does not name. So prompts with padding on the left are continued with
    the same tokens. Arguments may come by their places.
    Breaks if `generate` counts padding as positions.
    Proves `Policy.new_class`, `CrossEntropy.forward`, `Zero3Model.forward`.
    """
    for found in run(named, 2, which):
        assert {"attention_mask", "position_ids", "labels"} < {*found}


def test_the_norm_of_one_vector_has_the_gradients_of_the_plain_one():
    """
    Without a batch, and with one. Proves `_Norm`.
    """
    plain = llama().model.model.norm
    for shape in ((WIDTH,), (3, WIDTH), (2, 3, WIDTH)):
        found = []
        for model in (plain, inject(nn.Sequential(copy.deepcopy(plain)), [policies.rms_norm()])):
            x = torch.linspace(-1, 2, 6 * WIDTH)[: torch.Size(shape).numel()].view(shape)
            model(x.requires_grad_()).square().sum().backward()
            found.append([x.grad, *(p.grad for p in model.parameters())])
            model.zero_grad()
        assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(*found, strict=True)), found


def test_models_on_the_meta_device_are_injected():
    """
    No values are needed; `wrap` makes them, the same as without a policy.
    Breaks if a policy reads weights.
    Proves `inject`.
    """
    found = []
    for listed in ([], ALL["labml"][1]()):
        with torch.device("meta"):
            model = labml_model()
        model = wrap(inject(model, listed), model.layer_classes, seed=3,
                     init=lambda m: [nn.init.normal_(p, std=0.1)
                                     for p in m._parameters.values() if p is not None])
        found.append(model(ids_of(2)).detach())
    assert torch.allclose(*found, atol=1e-6) and not torch.equal(found[0], torch.zeros(()))


def test_two_policies_may_go_around_one_module():
    """
    Nested and repeated modules, and two policies on one class. The later one is outside.
    Proves `Policy.new_class`, `restore`.
    """
    class Doubled(policies.Replacement):
        def forward(self, x):
            return 2 * super().forward(x)

    class Shifted(policies.Replacement):
        def forward(self, x):
            return 1 + super().forward(x)

    inner = nn.Linear(3, 3)
    model = nn.Sequential(inner, nn.Sequential(inner, nn.Linear(3, 3)))
    x = torch.randn(2, 3)
    expected = model(x)
    once = policies.Policy("doubled", Doubled, {nn.Linear: {}})
    inject(model, [once, policies.Policy("shifted", Shifted, {nn.Sequential: {}, nn.Linear: {}})])
    assert torch.equal(inner(x), 1 + 2 * F.linear(x, inner.weight, inner.bias))
    assert type(inner).__name__ == "shifted(doubled(Linear))"
    assert type(inner) is type(model[1][1])
    assert [line.path for line in report(model, [once])] == ["0", "1.1"]
    assert torch.equal(restore(model)(x), expected) and type(inner) is nn.Linear


# -------------------------------------------------------------------------------- what does not fit


class OtherForward(FeedForward):
    def forward(self, x):
        return super().forward(x) + x


class Same(FeedForward):
    def __init__(self):
        super().__init__(WIDTH, 12, 0.0, nn.SiLU(), is_gated=True)


def patched():
    attention = MultiHeadAttention(2, WIDTH, 0.0)
    attention.forward = lambda **kwargs: kwargs["query"]
    return attention


UNFIT = [
    (lambda: OtherForward(WIDTH, 12, 0.0, nn.SiLU(), True), policies.swiglu,
     "OtherForward has a `forward` of its own"),
    (lambda: FeedForward(WIDTH, 12, 0.0, nn.ReLU(), True), policies.swiglu, "activation is ReLU"),
    (lambda: FeedForward(WIDTH, 12, 0.0, nn.SiLU()), policies.swiglu, "no `linear_v`"),
    (lambda: RelativeMultiHeadAttention(2, WIDTH, 0.0), policies.attention,
     "RelativeMultiHeadAttention has a `get_scores` of its own"),
    (lambda: MultiHeadAttention(2, WIDTH, 0.1), policies.attention, "dropout of 0.1"),
    (patched, policies.attention, "this one has a `forward` of its own"),
    (lambda: nn.LayerNorm(3), lambda: policies.rms_norm(nn.LayerNorm), "no `weight` and"),
]


@pytest.mark.parametrize("build, policy, why", UNFIT, ids=[why for *_, why in UNFIT])
def test_a_policy_that_does_not_fit_is_refused_by_name(build, policy, why):
    """
    The error names module, class, policy and reason, and the model is as before: also the modules
    that the policy would fit. With `strict=False` these are replaced, and the report says which are
    not and why.
    Proves `inject`, `replace.report`, `Finding`, `Replacement.problem`, `_problem`.
    """
    fitting = [Same(), MultiHeadAttention(2, WIDTH, 0.0)]
    model = nn.ModuleDict({"fitting": nn.ModuleList(fitting), "unfit": build()})
    classes = [type(module) for module in model.modules()]
    listed = {each.by: each for each in (policies.swiglu(), policy())}.values()
    with pytest.raises(ValueError, match=f"`unfit` .* not by .*{why}.*strict=False"):
        inject(model, listed)
    assert [type(module) for module in model.modules()] == classes
    inject(model, listed, strict=False)
    assert [type(module) for module in model["unfit"].modules()] == [
        type(module) for module in build().modules()]
    assert type(fitting[0]) is not Same
    [line] = [line for line in report(model, [policy()]) if line.path == "unfit"]
    assert why in str(line)


def test_policies_without_modules_and_sharded_models_are_refused():
    """
    Proves `inject`, `replace.report`, `restore`, `cross_entropy`.
    """
    model = nn.Sequential(Same())
    with pytest.raises(ValueError, match=r"`attention`.*MultiHeadAttention.*none in this Seq"):
        inject(model, [policies.swiglu(), policies.attention()])
    assert type(model[0]) is Same
    inject(model, [policies.swiglu()])
    with pytest.raises(ValueError, match="replaced already"):
        inject(model, [policies.swiglu()])
    sharded = wrap(model, FeedForward)
    for act in (lambda: inject(sharded, [policies.swiglu()]), lambda: restore(sharded)):
        with pytest.raises(RuntimeError, match=r"is sharded.*destroy\(\)"):
            act()
    with pytest.raises(ValueError, match="each policy once"):
        inject(nn.Sequential(Same()), [policies.swiglu(), policies.swiglu(Same)])
    with pytest.raises(ValueError, match="at least 1"):
        policies.cross_entropy(rows=0)


# ------------------------------------------------------------------------------------------- memory


def kept(forward, *args):
    """The bytes of distinct storages that autograd keeps, and the result"""
    found = {}

    def keep(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward(*args)
    return sum(found.values()), result


def test_what_is_kept_for_backward_is_as_the_table_says():
    """
    The elements that autograd keeps, plain minus injected, by the formulas of the table.
    Breaks if a forward keeps more.
    Proves `_GatedProduct`, `_Norm`, `Attention.forward`.
    """
    import transformers

    heads, positions, batch, width = 2, 64, 3, WIDTH
    x = torch.randn(positions, batch, width, requires_grad=True)
    mask = torch.ones(positions, positions, dtype=torch.bool).tril()[..., None]
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(width)
    network = FeedForward(width, 24, 0.0, nn.SiLU(), is_gated=True)
    attention = MultiHeadAttention(heads, width, 0.0)
    rows = positions * batch
    cases = [
        (norm, policies.rms_norm, lambda module: module(x), rows * width),
        (network, policies.swiglu, lambda module: module(x), rows * 24),
        # The plain forward copies the mask, too, and the injected one may reorder its inputs.
        *((module, policies.attention,
           lambda module: module(query=x, key=x, value=x, mask=mask),
           rows * (heads * positions - heads - 3 * width))
          for module in (attention, MultiDConvHeadAttention(heads, width, 0.0)))]
    for module, policy, forward, at_least in cases:
        before, _ = kept(forward, module)
        after, _ = kept(forward, inject(module, [policy()]))
        assert before - after >= 4 * at_least, policy.__name__
        assert before - after == 4 * at_least or policy is policies.attention


def test_norms_and_networks_of_16_bits_are_as_close_as_their_rounding():
    """
    In bf16 the plain forward rounds at other places; both are within two roundings of fp32.
    Proves `_Norm`, `_GatedProduct`.
    """
    for which, name in (("llama", "model.model.layers.0.input_layernorm"),
                        ("llama", "model.model.layers.0.mlp")):
        model, listed, _ = make(which, dtype=torch.bfloat16)
        x = torch.randn(4, WIDTH, dtype=torch.bfloat16)
        grads = []
        for each in (model, inject(copy.deepcopy(model), listed),
                     copy.deepcopy(model).float()):
            module = each.get_submodule(name)
            leaf = x.detach().to(next(module.parameters()).dtype).requires_grad_()
            out = module(leaf)
            assert out.dtype == leaf.dtype
            out.square().sum().backward()
            grads.append([out.float(), leaf.grad.float(),
                          *(p.grad.float() for p in module.parameters())])
        for plain, injected, exact in zip(*grads, strict=True):
            size = exact.abs().max()
            assert (injected - exact).abs().max() <= 2 * (plain - exact).abs().max() + size / 128


def test_a_gradient_of_a_gradient_is_an_error():
    """
    Breaks if it were silently wrong.
    Proves `_Norm`, `_GatedProduct`, `_Chunked`.
    """
    model, listed, _ = make("llama")
    inject(model, listed)
    loss = model(ids_of(2))
    grads = torch.autograd.grad(loss, [*model.parameters()], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grads[0].sum().backward()


# ------------------------------------------------------------------------------------ cross entropy


def losses(dtype, rows, with_bias, frozen=()):
    torch.manual_seed(0)
    tensors = [torch.randn(7, 5), torch.randn(11, 5), torch.randn(11)][: 2 + with_bias]
    tensors = [t.to(dtype).requires_grad_(i not in frozen) for i, t in enumerate(tensors)]
    targets = torch.tensor([0, 10, -100, 3, 3, -100, 1])
    found = []
    for chunked in (False, True):
        if chunked:
            loss = chunked_cross_entropy(tensors[0], tensors[1], targets, *tensors[2:], rows=rows)
        else:
            loss = F.cross_entropy(F.linear(*tensors), targets)
        wanted = [t for t in tensors if t.requires_grad]
        found.append((loss.detach(), *torch.autograd.grad(3 * loss, wanted)))
    return zip(*found, strict=True)


def test_the_loss_in_chunks_is_that_of_all_logits():
    """
    Chunks of each size, targets that do not count, with a bias and without; frozen weights.
    Breaks if a chunk counts twice.
    Proves `chunked_cross_entropy`, `_Chunked`, `cross_entropy._add`.
    """
    for dtype, tolerance in ((torch.double, 1e-13), (torch.float32, 1e-6)):
        for rows in (1, 2, 7, 100):
            for with_bias in (False, True):
                for frozen in ((), (0,), (1,)):
                    for one, other in losses(dtype, rows, with_bias, frozen):
                        assert one.dtype == other.dtype
                        assert torch.allclose(one, other, atol=tolerance, rtol=tolerance)
    hidden, weight = torch.randn(4, 5, requires_grad=True), torch.randn(3, 5)
    with torch.no_grad():
        loss = chunked_cross_entropy(hidden, weight, torch.tensor([0, 1, 2, 2]), rows=3)
    assert not loss.requires_grad and loss > 0


def test_what_does_not_count_may_be_infinite():
    """
    A token that the head's bias masks, and a position without a target. Breaks where a term is
    multiplied by zero.
    Proves `_Chunked`.
    """
    torch.manual_seed(0)
    hidden, weight, targets = torch.randn(3, 4), torch.randn(5, 4), torch.tensor([1, -100, 3])
    mask = torch.tensor([-torch.inf, 0, 0, 0, 0])
    spoilt = hidden.clone()
    spoilt[1] = torch.inf
    for rows, bias in ((hidden, mask), (spoilt, None)):
        plain = F.cross_entropy(F.linear(rows, weight, bias), targets)
        assert torch.allclose(chunked_cross_entropy(rows, weight, targets, bias), plain)


@pytest.mark.parametrize("which", ["GPT2", "Llama", "Mistral", "Qwen2", "Qwen3"])
def test_language_models_with_labels_return_the_plain_loss(which):
    """
    With labels, with masked labels, with the Trainer's number of items, and without labels, where
    logits are there as before. The rest of Hugging Face's norms and networks fit too.
    Proves `CrossEntropy.forward`, `cross_entropy`, `rms_norm`, `swiglu`.
    """
    torch.manual_seed(0)
    model = HuggingFace(which).model.float().eval()
    listed = [policies.cross_entropy(rows=3)]
    if which != "GPT2":
        listed += [policies.rms_norm(), policies.swiglu()]
    twin = inject(copy.deepcopy(model), listed)
    ids = ids_of(3)
    labels = ids.where(ids > 2, -100)
    for options in ({}, {"num_items_in_batch": 7}, {"attention_mask": torch.ones_like(ids)},
                    {"logits_to_keep": 0}):
        one, other = (each(ids, labels=labels, **options) for each in (model, twin))
        assert torch.allclose(one.loss, other.loss, atol=1e-5)
        assert torch.equal(other[0], other.loss)
        assert (other.logits is None) == ("logits_to_keep" not in options)
    assert torch.allclose(model(ids).logits, twin(ids).logits, atol=1e-5)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(ids, **options), twin.generate(ids, **options))


def test_the_benchmark_compares_pairs_with_the_same_loss():
    """
    A row that trains has tokens per second, and its memory is that of the plain module and of the
    injected one. It says nothing of speed here.
    Breaks if the pair trains on other numbers.
    Proves `inject`.
    """
    class Small(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*gpt_layers(GPTConfig(TOKENS, 64, WIDTH, 2, 1, 12)))

        def forward(self, ids):
            return Model.loss(self.layers(ids), ids)

    ids = torch.randint(TOKENS, (2, 64))
    row = bench_inject.measure(Small(), [policies.attention()], ids, 2, True)
    assert len(row["ms"]) == len(row["tokens_per_s"]) == 2
    assert row["kept_bytes"][1] < row["kept_bytes"][0]
    assert row["peak_bytes"][1] < row["peak_bytes"][0]
    row = bench_inject.measure(bench_inject.SelfAttention(WIDTH), [policies.attention()],
                               torch.randn(4, 2, WIDTH, requires_grad=True), 1, False)
    assert "tokens_per_s" not in row and len(bench_inject.cells("a row", row)) == 8

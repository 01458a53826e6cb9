"""
# What autograd saves: the formulas, the shapes, the prediction and the ledger have the same bytes
"""

import pytest
import torch
from torch import nn

from tests.commands import python_m
from tests.ranks import run
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential
from zero3.estimate.ledger import Ledger
from zero3.estimate.predict import predict_optimizer
from zero3.estimate.saved import Moved, activations, gpt2_bytes, gpt2_width, saved_bytes
from zero3.offload.activations import Activations
from zero3.train import gpt

ROWS, CONFIG = 4, gpt.GPTConfig(seq_len=16, d_model=32, n_heads=4, n_layers=3, d_ff=64)


def on_meta(make, *shape, dtype=torch.float32, below_bytes=0):
    with torch.device("meta"):
        return saved_bytes(make(), torch.empty(*shape, dtype=dtype), below_bytes)


def toy_gpt(folder, keep, micro_batches, where):
    """The GPT of the main job: predicted and measured"""
    # More than a mask, the tokens and the statistics of a norm.
    below_bytes = 8 * ROWS * (CONFIG.seq_len + 1) + 1
    states_in = None
    if where == "files":
        states_in = Offload("nvme", folder)
        where = Activations(states_in, below_bytes=below_bytes, keep=keep)
    saved = on_meta(lambda: gpt.gpt_layers(CONFIG), ROWS, CONFIG.seq_len, dtype=torch.long,
                    below_bytes=below_bytes)
    torch.manual_seed(0)
    model = Zero3Sequential([Zero3Layer(layer, activations=where)
                             for layer in gpt.gpt_layers(CONFIG)])
    optimizer = Zero3Optimizer(model, offload=states_in)
    predicted = predict_optimizer(optimizer, micro_batches, saved=activations(saved, keep))
    for _ in range(2):
        with Ledger(model, optimizer) as tape:
            for _ in range(micro_batches):
                windows = torch.randint(256, (ROWS, CONFIG.seq_len + 1))
                optimizer.backward(gpt.next_byte_loss(model, windows))
            optimizer.step()
        optimizer.zero_grad()
    return saved, predicted, tape.out_bytes, tape.in_bytes, tape.peak_live_bytes


@pytest.mark.parametrize("keep, micro_batches", [(1, 1), (1, 3), (2, 2)])
def test_formula_prediction_and_ledger_agree_for_the_toy_gpt(keep, micro_batches, tmp_path):
    r"""
    With $b$ rows of $s$ tokens, $d$ features and $a$ heads a block of the main job saves
    $4b(s(15d + as) + 6d)$ bytes, where $6d$ are two tokens more of queries, keys and values that
    its convolutions make. The head saves $8bsd$, and the embedding nothing of this size. Breaks if
    the next layer's input counts twice, if a micro-batch is forgotten, or if the blocks of the
    threads count, whose `Offload` has the optimizer's states too.
    Proves `saved_bytes`, `saved.activations`, `predict_optimizer`, `predict`, `Ledger`.
    """
    b, s, d, a = ROWS, CONFIG.seq_len, CONFIG.d_model, CONFIG.n_heads
    block = 4 * b * (s * (15 * d + a * s) + 6 * d)
    formula = activations([0, *[block] * 3, 8 * b * s * d], keep)
    for saved, predicted, *measured, peak_bytes in run(toy_gpt, 2, str(tmp_path), keep,
                                                       micro_batches, "files"):
        assert saved == [0, *[block] * 3, 8 * b * s * d]
        assert predicted.activation_bytes == formula.memory_bytes == (keep + 1) * block
        moved = [micro_batches * formula.out_bytes, micro_batches * formula.in_bytes]
        assert [predicted.out_bytes, predicted.in_bytes] == measured == moved
        # The memory of the model is what it would be without.
        assert predicted.peak_bytes == peak_bytes


@pytest.mark.parametrize("where", [None, "cpu"])
def test_activations_that_stay_are_predicted_to_stay(where, tmp_path):
    """
    With a `keep` of all calls, all of them are in memory at once. From layers on the CPU the CPU
    tier takes none.
    Proves `predict_optimizer`, `Activations.moves_from`.
    """
    ((saved, predicted, *measured, _),) = run(toy_gpt, 1, str(tmp_path), 9, 1, where)
    assert predicted.activation_bytes == sum(saved) > 0
    assert measured == [predicted.out_bytes, predicted.in_bytes] == [0, 0]


class Scaled(nn.Module):
    """Saves a buffer and a weight, which the model holds, and views of its input"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x):
        left, right = self.linear(x * self.mask).chunk(2, dim=1)
        return torch.cat((left * right, right), 1)


CHAINS = {
    "an output that the next layer saves": lambda: [
        nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)],
    "views, weights and buffers": lambda: [Scaled() for _ in range(3)],
    "layers that save nothing": lambda: [
        nn.Identity(), nn.Sequential(nn.Linear(8, 8), nn.Sigmoid()), nn.Identity(),
        nn.Linear(8, 8), nn.Flatten(), nn.Identity()],
    "a gradient that ends": lambda: [nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8),
                                     nn.Sequential(nn.Linear(8, 8), nn.Softmax(1))],
}


@pytest.mark.parametrize("name", CHAINS)
def test_shapes_alone_say_what_a_chain_moves(name, tmp_path):
    """
    Breaks if a storage counts once for each view, if parameters or buffers count, or if a layer
    that saves nothing takes the place of the last one.
    Proves `saved_bytes`, `saved.activations`.
    """
    make = CHAINS[name]
    where = Activations(Offload("nvme", tmp_path, block_bytes=4096), below_bytes=0)
    model = Zero3Sequential([Zero3Layer(layer, activations=where) for layer in make()])
    with Ledger(model) as tape:
        model(torch.randn(5, 8)).square().sum().backward()
    moved = activations(on_meta(make, 5, 8))
    assert moved.memory_bytes > 0
    assert (tape.out_bytes, tape.in_bytes) == (moved.out_bytes, moved.in_bytes)


def test_the_example_of_the_chapter():
    """
    Three blocks of GPT-2 with four features, in fp32.
    Proves `gpt2_bytes`, `saved.activations`, `Moved`.
    """
    saved = gpt2_bytes(layers=3, width=4, heads=2, tokens=6, length=3, element_bytes=4)
    assert saved == [2832, 2832, 2832, 192] and sum(saved) == 8688
    assert activations(saved) == Moved(8496, 5664, 5664)


def test_the_command_line_tells_the_bytes_of_activations():
    """
    8 billion parameters in 32 blocks have 4,564 features. Of 32 blocks all leave, 31 come back, and
    two are in memory. `--width` gives the features, and `--tokens` those of a step.
    Proves `show_activations`, `gpt2_width`, `estimate.main`.
    """
    assert gpt2_width(8e9, 32) == 4564 and gpt2_width(1, 81) == 1
    block = 2 * 8192 * (28 * 4564 + 72 * 2048)
    head = 4 * 8192 * 4564
    stays, leaves = told("--model", "8b")
    assert stays == ["0.00", "0.00", f"{(32 * block + head) / 1e9:.2f}"]
    assert leaves == [f"{n * block / 1e9:.2f}" for n in (32, 31, 2)]
    block = 2 * 4096 * (28 * 128 + 2 * 2048)
    _, leaves = told("--model", "8b", "--width", "128", "--tokens", "4096", "--gpu", "80GB")
    assert leaves == [f"{n * block / 1e9:.2f}" for n in (32, 31, 2)]


def told(*options):
    """The two rows of activations"""
    done = python_m("zero3.estimate", *options, "--ranks", "64", "--sequence", "2048")
    assert done.returncode == 0 and done.stderr == ""
    return [line.split()[-3:] for line in done.stdout.splitlines()[-2:]]

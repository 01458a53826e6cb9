"""
# The toy model and its data, on which the main job and every byte count are built
"""

import pytest
import torch
from torch import nn

from zero3.train.gpt import (
    GPTConfig,
    global_batch,
    gpt_layers,
    load_bytes,
    next_byte_loss,
    sample,
    split,
)

TINY = GPTConfig(seq_len=12, d_model=16, n_heads=2, n_layers=2, d_ff=32)


@pytest.fixture(autouse=True)
def one_thread():
    # Matrices this small only wait for a second thread, long where the machine is busy.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*gpt_layers(TINY))


def test_the_layers_chain_from_bytes_to_logits(model):
    """
    One tensor in and one out, for every layer. Breaks where a block asks for a mask from outside.
    Proves `gpt_layers`, `Embedding`, `Block`, `Head`.
    """
    logits = model(torch.zeros(3, 5, dtype=torch.long))
    assert logits.shape == (3, 5, TINY.n_vocab)
    assert [type(layer).__name__ for layer in model] == ["Embedding", "Block", "Block", "Head"]


def test_a_later_byte_changes_no_earlier_logits(model):
    """
    The model is causal, the convolutions behind queries, keys and values included. Breaks where the
    mask is missing or transposed in `Block.forward`.
    Proves `Block`.
    """
    before = torch.randint(256, (2, 12), generator=torch.Generator().manual_seed(1))
    after = before.clone()
    after[:, 7] = (after[:, 7] + 1) % 256
    a, b = model(before), model(after)
    assert torch.equal(a[:, :7], b[:, :7])
    assert not torch.equal(a[:, 7:], b[:, 7:])


def test_training_begins_at_eight_bits_per_byte(model):
    """
    A new model knows nothing. Breaks where the head starts with large weights.
    Proves `gpt_layers`, `next_byte_loss`.
    """
    windows = torch.randint(256, (16, 13), generator=torch.Generator().manual_seed(1))
    bits = next_byte_loss(model, windows).item() / torch.log(torch.tensor(2.0)).item()
    # Logits are near zero but not zero.
    assert bits == pytest.approx(8, abs=0.1)


def test_every_parameter_learns(model):
    """
    No layer is cut off from the loss. Breaks where `Block.forward` detaches, or a part is not used.
    Proves `Embedding`, `Block`, `Head`, `next_byte_loss`.
    """
    next_byte_loss(model, torch.randint(256, (4, 13))).backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_block_keeps_no_attention_between_steps(model):
    """
    Breaks where `Block.forward` leaves labml_nn's copy of the attention alive.
    Proves `Block`.
    """
    next_byte_loss(model, torch.zeros(2, 13, dtype=torch.long)).backward()
    assert all(block.layer.self_attn.attn is None for block in list(model)[1:-1])


def test_blocks_start_with_different_weights(model):
    """
    Breaks where blocks are made by copying one.
    Proves `gpt_layers`.
    """
    first, second = (block.layer.feed_forward.layer1.weight for block in list(model)[1:3])
    assert not torch.equal(first, second)


def test_heads_must_divide_the_features():
    """
    Breaks where `GPTConfig` lets labml_nn round the width of a head down.
    Proves `GPTConfig`.
    """
    with pytest.raises(ValueError, match=r"Expected: a multiple of 3 heads. Got: d_model = 16"):
        GPTConfig(d_model=16, n_heads=3)


def test_a_global_batch_is_the_same_on_every_rank_and_its_rows_cut_into_any_ranks():
    """
    Ranks draw the whole batch and take their rows. Breaks where the draw depends on anything but
    seed and step, or where rows overlap.
    Proves `global_batch`.
    """
    data = load_bytes()
    whole = global_batch(data, step=5, rows=6, seq_len=12, seed=3)
    assert whole.shape == (6, 13) and whole.dtype == torch.long
    for world_size in (1, 2, 3):
        rows = [
            global_batch(data, step=5, rows=6, seq_len=12, seed=3).chunk(world_size)[rank]
            for rank in range(world_size)
        ]
        assert torch.equal(torch.cat(rows), whole)
    assert not torch.equal(global_batch(data, 6, 6, 12, 3), whole)
    assert not torch.equal(global_batch(data, 5, 6, 12, 4), whole)


def test_windows_are_text_and_reach_its_last_byte():
    """
    Breaks where the range of starts is one too short or one too long.
    Proves `global_batch`.
    """
    data = torch.arange(16, dtype=torch.uint8)
    windows = torch.cat([global_batch(data, step, 8, 12) for step in range(20)])
    assert torch.equal(windows - windows[:, :1], torch.arange(13).expand(len(windows), -1))
    assert windows[:, 0].unique().tolist() == [0, 1, 2, 3]


def test_the_held_out_text_is_not_in_the_training_text():
    """
    Breaks where `load_bytes` keeps the paragraphs that the topics quote from one another.
    Proves `load_bytes`, `split`.
    """
    text, held_out = (bytes(part.tolist()) for part in split(load_bytes(), seq_len=64))
    assert len(held_out) == (len(text) + len(held_out)) // 10
    paragraphs = [p for p in held_out.split(b"\n\n") if len(p) > 80]
    assert len(paragraphs) > 50
    assert not [p for p in paragraphs if b"\n\n" + p + b"\n\n" in text]


def test_a_short_text_is_an_error_that_says_how_long_it_must_be():
    """
    Breaks where the held-out part may have no window.
    Proves `split`.
    """
    with pytest.raises(ValueError, match=r"Expected: at least 130 bytes.*Got: 129"):
        split(torch.zeros(129, dtype=torch.uint8), seq_len=12)
    assert len(split(torch.zeros(130, dtype=torch.uint8), seq_len=12)[1]) == 13


def test_a_missing_or_empty_text_is_an_error(tmp_path):
    """
    Breaks where the traceback of `open` is all that a reader gets.
    Proves `load_bytes`, `split`.
    """
    with pytest.raises(ValueError, match=r"no text to train on.*Got: .*nowhere.txt"):
        load_bytes(tmp_path / "nowhere.txt")
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="Got: 0"):
        split(load_bytes(tmp_path / "empty.txt"), seq_len=12)


def test_a_sample_continues_the_prompt_and_follows_its_seed(model):
    """
    Ranks sample together, each for itself: they agree because seeds do. Breaks where the text comes
    from the global generator, or dropout stays on.
    Proves `sample`.
    """

    def draw(seed: int) -> bytes:
        generator = torch.Generator().manual_seed(seed)
        return sample(model, b"ab", 20, TINY.seq_len, generator=generator)

    text = draw(0)
    assert text.startswith(b"ab") and len(text) == 22
    assert draw(0) == text
    assert draw(1) != text
    assert model.training

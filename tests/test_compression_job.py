"""
# The main job, compressed

The whole story on two ranks: train, prune and round, clean, evaluate, write.
"""

import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.test_compression_clean import dense
from tests.test_train import SMALL, run_job
from zero3.compression import clean
from zero3.train import compressed, gpt
from zero3.train.job import prepare

STEPS = ["--steps", "10", "--eval-every", "5", "--sample", "2"]
CONFIG = gpt.GPTConfig(seq_len=16, d_model=16, n_layers=2, d_ff=32)


def small(recipe):
    """The shapes of the cleaned model, from the recipe alone"""
    torch.manual_seed(0)
    layers = gpt.gpt_layers(CONFIG)
    compression = compressed.compress_layers(layers, recipe, 10, CONFIG)
    for _ in range(10):
        compression.advance()
    clean(layers)
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("compressed")


@pytest.mark.parametrize("recipe", [*compressed.RECIPES])
def test_the_job_ends_with_a_small_model_that_is_as_good(recipe, folder):
    """
    Bytes held and sent are those predicted, the counts included; the loss of the cleaned model is
    that of the trained one; the file has its weights, without this package. Breaks if the job
    cleans another step than it trained.
    Proves `rules_8`, `rules_4_half`, `rules_rows_heads`, `compress_layers`, `with_counts`,
    `compressed.finish`, `Compression.counting_bytes`, `Job.held_out_loss`, `write`.
    """
    out = folder / recipe
    run = run_job(out, *STEPS, "--compress", recipe, "--save-every", "8")
    assert run.returncode == 0, run.stderr
    metrics = json.loads((out / "metrics.json").read_text())
    for row in metrics["measured"]:
        for column in ("rest_bytes", "peak_bytes", "sent_bytes"):
            assert row[column] == metrics["predicted"][row["rank"]][column], column
    rows = {line.split()[0]: line.split()[1:] for line in run.stdout.splitlines()
            if line.endswith(("0", "1", "2", "3", "4", "5", "6", "7", "8", "9"))}
    before, after = (float(each) for each in rows["loss"][:2])
    assert before == pytest.approx(metrics["held_out"][-1][1], abs=1e-4)
    # Fewer terms are added in another order, if rows are gone.
    assert after == pytest.approx(before, abs=1e-3 if recipe == "rows-heads" else 1e-4)
    assert float(rows["bytes"][2]) < 0.4
    if recipe == "4-half":
        with safe_open(out / compressed.FILE, "pt") as file:
            masks = torch.cat([file.get_tensor(name) for name in file.keys()
                               if name.endswith(".mask")])
        bits = sum(int((masks >> i & 1).sum()) for i in range(8))
        assert bits == 8 * len(masks) // 2
    expected = small(recipe)
    found = dense(out / compressed.FILE)
    for name, module in expected.named_modules():
        if isinstance(module, nn.Linear):
            assert found[f"{name}.weight"].shape == module.weight.shape


def test_a_compressed_run_resumes_and_ends_with_the_same_file(folder):
    """
    From the checkpoint of step 8 of 10, on as many ranks. Breaks if the job compresses a run that
    resumes from its beginning.
    """
    before = folder / "4-half"
    (saved,) = [path for path in (before / "checkpoints").iterdir() if path.name.endswith("8")]
    again = run_job(folder / "again", *STEPS, "--compress", "4-half", "--resume", str(saved))
    assert again.returncode == 0 and "resumes from" in again.stdout, again.stderr
    files = [(path / compressed.FILE).read_bytes() for path in (before, folder / "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize("options, word", [
    (["--compress", "4-half", "--gather-bits", "8"], "--gather-bits"),
    (["--compress", "rows-heads", "--heads", "1"], "--heads"), (["--compress", "2"], "--compress")])
def test_what_cannot_be_compressed_is_refused_before_anything_starts(options, word, tmp_path,
                                                                     capsys):
    """
    Breaks if a run of an hour ends at its first pruned step.
    """
    with pytest.raises((ValueError, SystemExit)) as raised:
        prepare(["--device", "cpu", *SMALL, "--out", str(tmp_path), *options])
    assert word in f"{raised.value}" + capsys.readouterr().err

"""
# The main job, compressed

The whole story on two ranks: train, prune and round, clean, evaluate, write.
"""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.compression.test_clean import dense
from tests.train.test_job import SMALL, run_job
from zero3.compression import clean, compress
from zero3.train import compressed, gpt
from zero3.train.job import prepare

ROOT = Path(__file__).parents[2]
STEPS = ["--steps", "8", "--eval-every", "8", "--save-every", "6", "--sample", "1"]
# A key of an element has 32 bits of magnitude and 14 of place.
ROUNDS = {"4-half": 6}
CONFIG = gpt.GPTConfig(seq_len=16, d_model=16, n_layers=2, d_ff=32)


def small(recipe):
    """The shapes of the cleaned model, from the recipe alone"""
    torch.manual_seed(0)
    layers = gpt.gpt_layers(CONFIG)
    compression = compress(layers, compressed.RECIPES[recipe](8, CONFIG))
    for _ in range(8):
        compression.advance()
    clean(layers)
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """One run of all recipes: its output, and its folder"""
    out = tmp_path_factory.mktemp("compressed")
    run = run_job(out, *STEPS, "--compress", *compressed.RECIPES)
    assert run.returncode == 0, run.stderr
    return run.stdout, out


@pytest.mark.parametrize("recipe", [*compressed.RECIPES])
def test_the_job_ends_with_a_small_model_that_is_as_good(recipe, ran):
    """
    Bytes and messages are those predicted; if elements are pruned, the formula of `thresholds.py`
    adds to those of a dense model. The loss of the cleaned model is that of the trained one; the
    file has its weights, without this package. Breaks if the job cleans another step than it
    trained.
    Proves `rules_4_half`, `rules_rows_heads`, `compressed.finish`,
    `take_over`, `Job.held_out_loss`, `Job.predicted`, `write`.
    """
    out = ran[1] / recipe
    metrics = json.loads((out / "metrics.json").read_text())
    dense_job = json.loads((ran[1] / compressed.DENSE / "metrics.json").read_text())
    for row, predicted in zip(metrics["measured"], metrics["predicted"], strict=True):
        for column in ("rest_bytes", "peak_bytes"):
            assert row[column] == predicted[column], column
        # Digits of 8 bits, each with 256 counts of 8 bytes, and 32 bytes that announce them.
        rounds = ROUNDS.get(recipe, 0)
        assert ("sent_bytes" in predicted) == (not rounds)
        for column, each in (("sent_bytes", 256 * 8), ("messages", 1), ("order_bytes", 32)):
            assert row[column] == dense_job["predicted"][row["rank"]][column] + rounds * each
    # Fewer terms are added in another order, if rows are gone.
    near = 1e-3 if recipe == "rows-heads" else 1e-4
    assert metrics["cleaned"]["loss"] == pytest.approx(metrics["held_out"][-1][1], abs=near)
    found = dense(out / compressed.FILE)
    if recipe == compressed.DENSE:
        assert sum(weight.nbytes for weight in found.values()) == metrics["cleaned"]["nbytes"]
        return
    assert metrics["cleaned"]["nbytes"] < 0.4 * 4 * CONFIG.numel
    if recipe == "4-half":
        with safe_open(out / compressed.FILE, "pt") as file:
            masks = torch.cat([file.get_tensor(name) for name in file.keys()
                               if name.endswith(".mask")])
        bits = sum(int((masks >> i & 1).sum()) for i in range(8))
        assert bits == 8 * len(masks) // 2
    for name, module in small(recipe).named_modules():
        if isinstance(module, nn.Linear):
            assert found[f"{name}.weight"].shape == module.weight.shape


def test_one_run_compares_all_models_with_the_first(ran):
    """
    All of them begin with the same loss, because they have the same seed and batches. The table has
    the losses and files of all models. Breaks if the yardstick is another model, or has learnt from
    other batches.
    Proves `Job.train_each`, `compressed.compare`, `compared_rows`.
    """
    output, out = ran
    compared = json.loads((out / compressed.COMPARED).read_text())
    assert (compared["ranks"], compared["steps"], compared["seed"]) == (2, 8, 0)
    rows = {row[0]: row for row in compressed.compared_rows(compared)}
    assert [*rows] == ["", *compressed.RECIPES] and "" == rows["dense"][2]
    first = {}
    for model in compared["models"]:
        metrics = json.loads((out / model["recipe"] / "metrics.json").read_text())
        first[model["recipe"]] = metrics["losses"][0]
        assert model["held_out"] == metrics["cleaned"]["loss"]
        file = out / model["recipe"] / compressed.FILE
        assert model["file_bytes"] == file.stat().st_size
        assert all(cell in output for cell in rows[model["recipe"]])
    # `8` begins later. The others round to 8 bits from the first step of so short a run.
    assert first["8"] == first["dense"]
    assert all(loss == pytest.approx(first["dense"], abs=0.01) for loss in first.values())
    more = compared["models"][2]["held_out"] / compared["models"][0]["held_out"] - 1
    assert rows["4-half"][2] == f"{100 * more:+.2f} %"


def test_a_run_of_several_models_goes_on_where_it_ended(ran):
    """
    The same command trains none of them again, and prints the same table. A model without its last
    checkpoint resumes from the one before, and ends with the same file. Breaks if the job
    compresses a run that resumes from its beginning.
    Proves `Job.train_each`.
    """
    output, out = ran
    table = output[output.index("against dense") :]
    file = out / "4-half" / compressed.FILE
    before = file.read_bytes()
    (last,) = (out / "4-half" / "checkpoints").glob("*8")
    shutil.rmtree(last)
    file.unlink()
    again = run_job(out, *STEPS, "--compress", *compressed.RECIPES)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("is the end of this run") == 3
    assert again.stdout.count("step 6: resumes from") == 1
    assert again.stdout.endswith(table) and file.read_bytes() == before


def test_the_recorded_run_keeps_what_the_recipes_promise():
    """
    8 bits within 0.5 % of the dense model's held-out loss, and half of the weights in 4 bits within
    3 %, of one run. Breaks if a recipe changes, and the run that the chapter shows was worse.
    """
    compared = json.loads((ROOT / "docs" / "compression.json").read_text())
    loss = {model["recipe"]: model["held_out"] for model in compared["models"]}
    size = {model["recipe"]: model["file_bytes"] for model in compared["models"]}
    assert compared["steps"] == 650 and compared["ranks"] == 2
    assert loss["8"] < 1.005 * loss["dense"] and loss["4-half"] < 1.03 * loss["dense"]
    assert size["4-half"] < size["8"] < size["dense"] / 3


@pytest.mark.parametrize("options, word", [
    (["--compress", "4-half", "--gather-bits", "8"], "--gather-bits"),
    (["--compress", "rows-heads", "--heads", "1"], "--heads"), (["--compress", "2"], "--compress"),
    (["--compress", "8", "8"], "--compress"), (["--compress", "dense", "8", "--resume", "."],
                                               "--resume")])
def test_what_cannot_be_compressed_is_refused_before_anything_starts(options, word, tmp_path,
                                                                     capsys):
    """
    Breaks if a run of an hour ends at its first pruned step.
    """
    with pytest.raises((ValueError, SystemExit)) as raised:
        prepare(["--device", "cpu", *SMALL, "--out", str(tmp_path), *options])
    assert word in f"{raised.value}" + capsys.readouterr().err

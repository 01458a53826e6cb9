"""
# The ladder of `docs/ladder.py`: less memory on each rung, and always the same numbers
"""

import contextlib
import io
import json
import re
import shutil
import subprocess
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

import tests.ranks  # noqa: F401  (what ranks import once, before the first of them starts)
from docs import ladder, rungs
from zero3 import Int4, Int8, Offload
from zero3.estimate.formulas import describe, stages
from zero3.estimate.predict import data_parallel, predict
from zero3.train.gpt import gpt_layers


@pytest.fixture(scope="module")
def climbed(tmp_path_factory, once):
    """What the command wrote, by rung, and what it printed"""
    out = tmp_path_factory.mktemp("ladder") / "ladder.json"
    climb = ladder.climb
    with pytest.MonkeyPatch.context() as patch, \
            contextlib.redirect_stdout(io.StringIO()) as said:
        patch.setattr(ladder, "climb", lambda: once("ladder", climb))
        ladder.main(["--out", str(out)])
    answer = json.loads(out.read_text())
    return {row["rung"]: row for row in answer["rows"]}, answer, said.getvalue()


def test_all_rungs_on_two_ranks_train_to_the_same_bits(climbed):
    """
    Every loss and every final weight is DDP's, whatever is in shards and wherever these rest: the
    two ranks' gradients are halved and added, for which there is one order, and the optimizer goes
    element by element. Breaks where the mean is taken twice, or not, or a shard is cut elsewhere.
    Proves I1, I8, `Zero3Layer._post_backward_hook`, `Zero3Optimizer._update`, `my_device`, `run`.
    """
    rows, answer, _ = climbed
    assert [*rows] == ["one process", "DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "ZeRO-3, CPU",
                       "ZeRO-3, NVMe"]
    for row in [*rows.values()][1:]:
        assert row["losses"] == rows["DDP"]["losses"] and len(row["losses"]) == answer["steps"]
        assert row["weight_difference"] == row["loss_difference"] == 0, row["rung"]
    assert rows["DDP"]["losses"][-1] < rows["DDP"]["losses"][0] - 1


def test_one_process_trains_to_nearly_the_same_numbers(climbed):
    """
    It takes the mean over the batch in one go, and the ranks a mean of means: sums in another order
    differ by 1e-7 of their size, and five steps make little of that. A sum in place of the mean
    moves losses and weights by more than a hundred times the bound.
    Proves I1, `Zero3Layer._post_backward_hook`, `global_batch`.
    """
    alone, *others = climbed[0].values()
    for row in others:
        assert row["losses"] == pytest.approx(alone["losses"], rel=0, abs=1e-5), row["rung"]
    assert 0 < alone["weight_difference"] < 1e-5


def test_model_states_at_rest_are_what_the_formulas_say(climbed):
    """
    To the byte: 4 + 4 + 8 for each parameter, of which each rung cuts one more into two shards, and
    4 for each tensor that Adam steps, in which it counts. The last two have nothing on the device;
    the one has the same bytes in CPU memory, the other all but buffers and counts in files.
    Proves I2, `ledger.held_bytes`, `predict`, `Offload`, `ledger.disk_bytes`, `Offload.disk_bytes`,
    `StorageFactory.disk_bytes`, `StorageFactory.memory`.
    """
    rows, answer, _ = climbed
    psi, ranks = answer["params"], answer["ranks"]
    tensors = sum(1 for layer in gpt_layers(ladder.CONFIG) for _ in layer.parameters())
    shards = 4 * answer["layers"]
    expected = {"one process": 16 * psi + 4 * tensors, "DDP": 16 * psi + 4 * tensors,
                "ZeRO-1": 8 * psi + 8 * psi // ranks + shards,
                "ZeRO-2": 4 * psi + 12 * psi // ranks + shards,
                "ZeRO-3": 16 * psi // ranks + shards, "ZeRO-3, CPU": 0, "ZeRO-3, NVMe": 0}
    assert {name: row["device_rest_bytes"] for name, row in rows.items()} == expected
    nvme = Offload("nvme", "anywhere")
    exact = predict(describe(gpt_layers(ladder.CONFIG)), ranks, stage3=True, params_in=nvme,
                    states_in=nvme)
    got = {name: (row["cpu_bytes"], row["file_bytes"]) for name, row in rows.items()}
    assert got.pop("ZeRO-3, CPU") == (expected["ZeRO-3"], 0)
    assert got.pop("ZeRO-3, NVMe") == (exact.pool_bytes + shards, exact.disk_bytes)
    assert {*got.values()} == {(0, 0)} and exact.disk_bytes >= 16 * psi // ranks


def test_no_rung_holds_more_on_the_device_than_the_one_below(climbed):
    """
    At rest and at the highest moment; and from DDP on each shard that is cut makes it less. Off the
    device there are only whole layers, in turn. Breaks where a layer stays whole.
    Proves I3, `Zero3Layer._cleanup_params`, `Sharded.drop_full_grads`, `predict`.
    """
    rows, answer, _ = climbed
    for below, above in pairwise(rows.values()):
        for what in ("device_rest_bytes", "device_peak_bytes"):
            same = above["rung"] == "DDP" or above["rests"] == "nvme" or (
                what == "device_rest_bytes" and not below[what])
            assert above[what] == below[what] if same else above[what] < below[what], above["rung"]
    exact = predict(describe(gpt_layers(ladder.CONFIG)), answer["ranks"], stage3=True)
    assert rows["ZeRO-3"]["device_peak_bytes"] == exact.peak_bytes


def test_each_rung_sends_what_its_formula_says(climbed):
    """
    ZeRO-1 and ZeRO-2 as much as DDP, for a reduce-scatter and an all-gather are an all-reduce;
    ZeRO-3, which is measured, half as much again, less a gather of the last layer.
    Proves I4, `data_parallel`, `predict`.
    """
    rows, answer, _ = climbed
    layers, ranks = describe(gpt_layers(ladder.CONFIG)), answer["ranks"]
    plain = data_parallel(layers, ranks).sent_bytes
    exact = predict(layers, ranks, stage3=True).sent_bytes
    assert [row["sent_bytes"] for row in rows.values()] == [0, plain, plain, plain, *[exact] * 3]
    head, norms = layers[-1].shard_bytes(ranks), 8 * answer["layers"]
    assert exact == plain * 3 // 2 - head * (ranks - 1) + norms


def test_the_ladder_says_where_its_figures_come_from(climbed):
    """
    Device, torch and commit, and a line for each rung.
    Proves `commit_name`.
    """
    rows, answer, said = climbed
    assert answer["torch"] == torch.__version__ and answer["device"] in said
    if shutil.which("git") and (Path(__file__).parents[2] / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, check=True,
                              capture_output=True, text=True).stdout
        assert head.startswith(answer["commit"].removesuffix("-dirty"))
    for name, row in rows.items():
        assert f"\n{name} " in said and f"{row['device_peak_bytes']:,}" in said


def bars_of(picture):
    """Width of each bar's parts by colour, in order; boxes of the legend are lower than a bar"""
    bars = {}
    for box in ElementTree.fromstring(str(picture)).iter("{http://www.w3.org/2000/svg}rect"):
        color = re.search(r"fill:var\(--(?:c-)?(\w+)\)", box.get("style"))[1]
        if float(box.get("height")) == 18:
            parts = bars.setdefault(float(box.get("y")), [])
            parts += [(color, float(box.get("width")))] * (color != "line")
    return list(bars.values())


def test_the_ladder_is_drawn_with_device_memory_on_one_scale(climbed):
    """
    Each bar is as long as its bytes on the device, whether they ran or were calculated, and bytes
    elsewhere are told and not drawn. Only shards have the colour of shards. Breaks if files make a
    bar as long as DDP's, which says that nothing was saved.
    """
    small, large = rungs.measured(climbed[1]), rungs.large_ladder(climbed[1]["rows"])
    for bars, unit in ((small, rungs.MIB), (large, rungs.GB)):
        most = bars[1].device_bytes
        for picture, length in zip(rungs.draw(bars, "a model", unit), (234, 356), strict=True):
            told = ElementTree.fromstring(str(picture)).find("{http://www.w3.org/2000/svg}desc")
            for bar, drawn in zip(bars, bars_of(picture), strict=True):
                parts = [*bar.parts.items(), ("whole", bar.rise_bytes)]
                assert [color for color, _ in drawn] == [color for color, held in parts if held]
                assert [width for _, width in drawn] == pytest.approx(
                    [length * held / most for _, held in parts if held], abs=0.1)
                assert ("shard" in bar.parts) == bar.rung.startswith("ZeRO-3")
            assert all(f"{bar.rung}: device " in told.text for bar in bars)
        assert most == max(bar.device_bytes for bar in bars)
        for below, above in pairwise(bars):
            assert above.device_bytes <= below.device_bytes


def test_the_large_ladder_has_the_numbers_of_zeros_table_1(climbed):
    """
    16 bytes for each of 8 billion parameters, and what each stage leaves of them on 64 ranks; the
    last two rungs have nothing on the device after a step, and files leave buffers in CPU memory.
    """
    bars = rungs.large_ladder(climbed[1]["rows"])
    assert [bar.rest_bytes for bar in bars] == pytest.approx([
        128e9, 128e9, *stages(8e9, 64)[1:], 0, 0])
    assert [bar.file_bytes for bar in bars] == [0] * 6 + [2e9]
    assert bars[-2].cpu_bytes == 2e9 and 0 < bars[-1].cpu_bytes < bars[-2].cpu_bytes / 6
    assert "needs 14 %" in rungs.buffers(climbed[1])


def test_compiled_rungs_have_the_same_bits_and_send_less(climbed):
    """
    Losses and weights are DDP's. With the limit of hooks no more is held at the peak. Each layer
    that stays full until backward spares its gather, and with more room there are more of them; an
    embedding is not gathered for backward, which does not read it. Breaks if the compiler frees and
    gathers a layer that it kept, or reorders a sum.
    Proves I1, I8, `compile`, `keep`.
    """
    rows, answer, _ = climbed
    hooks = rows["ZeRO-3"]
    layers, ranks = describe(gpt_layers(ladder.CONFIG)), answer["ranks"]
    shards = [layer.shard_bytes(ranks) for layer in layers]
    assert hooks["gathers"] == 2 * len(layers) - 1
    for row, kept in zip(answer["compiled"], (2, 5), strict=True):
        assert row["losses"] == rows["DDP"]["losses"] and row["weight_difference"] == 0
        assert row["device_rest_bytes"] == hooks["device_rest_bytes"]
        assert row["gathers"] == 2 * len(layers) - 1 - kept
        # The embedding, and what is kept beside the last layer, which hooks keep, too.
        spared = (shards[0] + sum(shards[-kept:-1])) * (ranks - 1)
        assert row["sent_bytes"] == hooks["sent_bytes"] - spared
    same, more = answer["compiled"]
    assert same["device_peak_bytes"] <= hooks["device_peak_bytes"] < more["device_peak_bytes"]
    assert rungs.compiled_table(answer).count("<tr>") == 4


def test_on_two_nodes_only_the_order_of_a_sum_changes_losses_until_bytes_are_rounded(climbed):
    """
    Nodes and hybrid add the gradients inside a node first and then over nodes, so they have the
    same bits. Flat adds rank by rank: a sum of four floats in another order differs by 1e-7 of its
    size. ZeRO++ rounds, by a few percent of each block's largest gradient, and trains as far.
    Proves I1, `LinkedCommunicator.exchange`, `Communicator.exchange`, `Links`.
    """
    flat, nodes, hybrid, rounded = climbed[1]["nodes"]
    assert nodes["losses"] == hybrid["losses"]
    for row in (nodes, hybrid):
        assert row["loss_difference"] < 1e-5 and row["weight_difference"] < 1e-5
    assert 1e-4 < rounded["loss_difference"] < 0.05
    assert rounded["losses"][-1] < rounded["losses"][0] - 1
    assert flat["losses"] == pytest.approx(climbed[0]["DDP"]["losses"], rel=0, abs=1e-5)


def test_each_rung_on_two_nodes_sends_between_them_what_its_formula_says(climbed):
    """
    A shard goes to both ranks of the other node, or to one; with a replica in each node only
    gradients do; rounded, a scale and a byte or half a byte. Then the norms of all layers, 8 bytes
    for each of two ranks. A replica doubles what a rank keeps. Breaks where a row enters a node
    twice, and where a rung has another layout than its name says.
    Proves I2, I4, `LinkedCommunicator.all_gather`, `node_of`, `Int8.nbytes`.
    """
    layers = describe(gpt_layers(ladder.CONFIG))
    shards, halves = ([each.shard_bytes(ranks) // 4 for each in layers] for ranks in (4, 2))
    # Forward, backward without the last layer, and gradients.
    thrice = 4 * (3 * sum(shards) - shards[-1])
    rounded = sum(Int8().nbytes(s) + Int4().nbytes(s) for s in shards)
    norms = 8 * 2 * len(layers)
    expected = {"flat": 2 * thrice, "nodes": thrice, "hybrid": 4 * sum(halves), "ZeRO++": rounded}
    rows = {row["rung"]: row for row in climbed[1]["nodes"]}
    assert {name: row["between_bytes"] - norms for name, row in rows.items()} == expected
    counts = 4 * len(layers)  # Adam's steps
    assert {name: row["device_rest_bytes"] - counts for name, row in rows.items()} == {
        name: 16 * sum(halves if name == "hybrid" else shards) for name in rows}
    table = rungs.nodes_table(climbed[1])
    assert all(f"<td>{name}</td>" in table for name in rows)
    assert rungs.fewer_between(climbed[1]) == "13 %"

"""
# The benchmark runs, and compares like with like
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nodes
from tests.bench import training as bench


def test_the_benchmark_trains_its_peers_alike_and_ours_sends_less_than_fsdp2(tmp_path):
    """
    All see the same losses, to 1e-5: sums over ranks are added in different orders, which
    moves the last bits of fp32. A batch of its own, a sum in place of the mean in
    `_post_backward_hook`, or other weights in `wrap` break it. Ours sends three times the
    parameters, a little less when wrapped, and FSDP2 on gloo four, if `Communicator` exchanges
    messages and not collectives.
    Proves I1, `Zero3Layer._post_backward_hook`, `wrap`.
    """
    out = tmp_path / "bench.json"
    sizes = "--dim 32 --blocks 2 --heads 2 --seq 32 --batch 2 --warmup 0 --steps 3 --rounds 1"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", *sizes.split(), "--out", str(out)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    (only,) = results["rounds"]
    assert set(only) == set(results["medians"]) == {"zero3", "wrap", "ddp", "fsdp2", "minimal"}
    for peer in only.values():
        assert len(peer["losses"]) == 3
        assert peer["losses"] == pytest.approx(only["ddp"]["losses"], abs=1e-5, rel=0)
        assert peer["tokens_per_s"] > 0
    assert only["ddp"]["losses"][-1] < only["ddp"]["losses"][0]
    assert {*results["ratios"]} == {f"zero3/{peer}" for peer in {*only} - {"zero3"}}
    if results["wire_is_exact"]:
        sent = {peer: row["wire_bytes"] for peer, row in only.items()}
        # The head, at the root, and the last block are gathered once; in the chain the head is.
        assert sent["wrap"] < sent["zero3"] < sent["fsdp2"]
        # Headers and barriers come on top of what the ledger counts.
        assert sent["zero3"] > only["zero3"]["ranks"][0]["ledger_bytes"]


def test_muon_sends_what_the_ledger_says_and_less_than_fsdp2s_tensors(tmp_path):
    """
    The matrices of FSDP2 are DTensors, whose products communicate. Losses are DDP's with torch's
    Muon. Where the loopback's count is exact, it is the ledger's, with headers and barriers.
    Proves I1, I4, `Owners.step`.
    """
    out = tmp_path / "muon.json"
    sizes = "--dim 96 --blocks 2 --heads 2 --seq 32 --batch 2 --warmup 0 --steps 3 --rounds 1"
    peers = "--peers zero3-muon fsdp2-muon ddp-muon"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", *sizes.split(), *peers.split(), "--out", str(out)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    (only,) = results["rounds"]
    losses = {peer: row["losses"] for peer, row in only.items()}
    assert losses["zero3-muon"] == pytest.approx(losses["ddp-muon"], abs=1e-4, rel=0)
    # Products of parts are rounded to bf16 in other places.
    assert losses["fsdp2-muon"] == pytest.approx(losses["ddp-muon"], abs=1e-2, rel=0)
    if results["wire_is_exact"]:
        sent = {peer: row["wire_bytes"] for peer, row in only.items()}
        ledger = sum(rank["ledger_bytes"] for rank in only["zero3-muon"]["ranks"]) / 2
        assert ledger < sent["zero3-muon"] < 1.05 * ledger
        assert sent["zero3-muon"] < sent["fsdp2-muon"]


def test_the_benchmark_of_steps_times_ours_and_fsdp2s_on_the_same_model(tmp_path):
    """
    It says nothing of speed here, for the model is tiny. Breaks where a peer cannot step twice.
    Proves `Zero3Optimizer.step`.
    """
    out = tmp_path / "step.json"
    sizes = "--dim 32 --blocks 1 --heads 2 --seq 32 --batch 2"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--step", *sizes.split(), "--out", str(out)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["medians"]
    assert rows["Zero3Optimizer"]["times_ours"] == 1 and rows["Zero3Optimizer"]["ms"] > 0
    assert {name.split(",")[0] for name in rows} == {"Zero3Optimizer", "FSDP2"} and len(rows) == 5


def test_messages_send_half_of_what_gloos_reduce_scatter_sends(tmp_path):
    """
    Where the loopback's count is exact: a reduce-scatter by messages sends what an all-gather
    does, and gloo's own twice that. Headers add less than a hundredth.
    Proves `Communicator`, `Communicator.reduce_scatter`, `Communicator.send`.
    """
    out = tmp_path / "comm.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--comm", "--mib", "1", "--out", str(out)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert all(row["ms"] > 0 for row in results["medians"].values())
    if results["wire_is_exact"]:
        psi = {name: row["wire_psi"] for name, row in results["medians"].items()}
        assert psi["reduce-scatter, gloo"] == pytest.approx(2, rel=0.01)
        for name in ("reduce-scatter, Communicator", "all-gather, Communicator",
                     "all-gather, gloo"):
            assert psi[name] == pytest.approx(1, rel=0.01), name


def test_the_benchmark_of_checkpoints_writes_as_many_bytes_plainly(tmp_path):
    """
    And leaves nothing but its results. It says nothing of speed here.
    Proves `save_load.save`, `File.move`.
    """
    (tmp_path / "saved").mkdir()
    command = [sys.executable, "-m", "tests.bench", "--save", str(tmp_path / "saved"), "--gib",
               "0.04", "--rounds", "2", "--out", str(tmp_path / "save.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "save.json").read_text())
    assert len(results["rounds"]) == 2 and results["medians"]["ratio"] > 0
    assert "from each of 2 ranks: a checkpoint" in done.stdout
    assert [path.name for path in tmp_path.iterdir() if path.name != "saved"] == ["save.json"]
    assert not [*(tmp_path / "saved").iterdir()]


def test_the_benchmark_of_the_disk_asks_fio_for_the_same(tmp_path):
    """
    Ratios of what each got from the same disk, in the same round. It says nothing of speed here.
    Proves `bench.measure`, `File.move`.
    """
    if shutil.which("fio") is None:
        pytest.skip("needs fio")
    out = tmp_path / "disk.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", "--disk", str(tmp_path), "--gib", "0.02", "--rounds",
         "2", "--out", str(out)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )
    if "page cache" in done.stderr:
        pytest.skip("the tests' folder is not on a disk")
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    first, second = results["rounds"]
    assert list(first) == ["zero3", "fio"] and list(second) == ["fio", "zero3"]
    assert all(row["ratio"] > 0 for row in results["medians"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["disk.json"]


def benchmark(which, sizes, out, timeout_s):
    """Run one of the benchmarks of its own, and return what it has measured."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", which, *sizes.split(), "--out", str(out)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())


@pytest.mark.skipif(bool(nodes.why_not()), reason=nodes.why_not())
def test_the_benchmark_of_nodes_counts_what_each_layout_sends_between_them(tmp_path):
    """
    On two nodes of two ranks a rank sends other nodes 3/2 of the parameters if all ranks share
    them, and 1/2 with a replica on each node; ours a little less in flat, because the last layer is
    gathered once. With ZeRO++ it sends 1/10. Headers of gloo's messages come on top, of which so
    small a model has many. The losses are the same, and with ZeRO++ nearly. It says nothing of
    speed here. Breaks where a peer has another mesh than its name says.
    Proves `Links`.
    """
    out = tmp_path / "nodes.json"
    sizes = "--dim 64 --blocks 2 --heads 2 --seq 32 --steps 2 --rounds 1 --mbit 2000"
    results = benchmark("--nodes", sizes, out, 120)
    (only,) = results["rounds"]
    sent_psi = {peer: row["link_psi"] for peer, row in only.items()}
    expected = {"flat": 1.5, "hybrid": 0.5, "zero++": 0.1, "fsdp2": 1.5, "hsdp": 0.5}
    assert sent_psi == pytest.approx(expected, rel=0.1)
    for peer, row in only.items():
        off = 1e-2 if peer == "zero++" else 1e-5
        assert row["losses"] == pytest.approx(only["flat"]["losses"], abs=off, rel=0), peer
    assert set(results["ratios"]) == {
        "flat/fsdp2", "hybrid/hsdp", "hybrid/flat", "zero++/flat", "zero++/hybrid"}


def test_the_benchmark_of_pipelines_trains_all_peers_alike_and_counts_what_a_stage_sends(tmp_path):
    """
    The losses are the same, whoever runs the stages. With `gathers="stage"` a rank sends its stage
    twice, as with DDP, and FSDP2 on gloo three times; if each pass gathers, nine times with four
    micro-batches, and FSDP2's seven. It says nothing of speed here. Breaks where a peer has another
    cut, other rows or another mean than its name says.
    Proves `Pipeline`, `Pipeline.train_batch`.
    """
    out = tmp_path / "pipeline.json"
    sizes = ("--dim 64 --blocks 2 --heads 2 --seq 16 --warmup 1 --steps 2 --rounds 1 "
             "--peers zero3 zero3-each plain ddp fsdp2 fsdp2-each")
    results = benchmark("--pipeline", sizes, out, 240)
    assert [*results["cases"]] == ["1f1b, 2 x 1", "1f1b, 2 x 2"]
    for case in results["cases"].values():
        (only,) = case["rounds"]
        for peer, row in only.items():
            assert len(row["losses"]) == 3
            assert row["losses"] == pytest.approx(only["zero3"]["losses"], abs=1e-5), peer
            assert row["tokens_per_s"] > 0
    assert "plain" not in only and {"ddp", "fsdp2", "fsdp2-each", "zero3-each"} <= {*only}
    if results["wire_is_exact"]:
        # A rank lacks a quarter of the model. Activations and announcements come on top.
        lacks_bytes = only["zero3"]["ranks"][0]["psi_bytes"] / 4
        sent = {peer: row["wire_bytes"] / lacks_bytes for peer, row in only.items()}
        expected = {"zero3": 2, "zero3-each": 9, "ddp": 2, "fsdp2": 3, "fsdp2-each": 7}
        for peer, times in expected.items():
            assert times < sent[peer] < times + 1, peer


def test_the_benchmark_of_compiled_models_trains_all_peers_alike(tmp_path):
    """
    The losses are the same, whoever gathers, with the benchmark's model and with small layers.
    Without Inductor, which takes a minute; it says nothing of speed here. Breaks where a peer has
    other weights or rows than its name says.
    Proves `compile`.
    """
    sizes = ("--dim 32 --blocks 2 --heads 2 --seq 16 --batch 2 --layers 6 --width 8 --warmup 2 "
             "--steps 2 --rounds 1 --peers compile-eager ddp")
    cases = benchmark("--compile", sizes, tmp_path / "compile.json", 240)["cases"]
    assert [*cases] == ["gpt", "small-layers"]
    for case in cases.values():
        (only,) = case["rounds"]
        for peer, row in only.items():
            assert len(row["losses"]) == 4
            assert row["losses"] == pytest.approx(only["ddp"]["losses"], abs=1e-5), peer
            assert row["first_s"] == case["first_s"][peer] > 0
    assert cases["gpt"]["ratios"]["compile-eager/ddp"]["tokens_per_s"]
    assert cases["small-layers"]["ratios"]["compile-eager/ddp"]["step_ms"]


@pytest.mark.parametrize("wrong, said", [
    ("--pipeline --batch 6", "a --batch that --micro-batches divide"),
    ("--peers hybrid", "no such peer without --nodes: {'hybrid'}"),
    ("--nodes --peers flat ddp", "no such peer with --nodes: {'ddp'}"),
    ("--compile --warmup 0", "a --warmup of at least 1"),
    ("--nodes --ranks 2", "two nodes or more"), ("--nodes --ranks 5", "two nodes or more")])
def test_the_benchmark_refuses_peers_and_ranks_that_its_layout_does_not_have(wrong, said, capsys):
    """
    Before anything is run.
    """
    with pytest.raises(SystemExit):
        bench.options(wrong.split())
    assert said in capsys.readouterr().err


def test_the_benchmark_of_activations_trains_all_peers_alike(tmp_path):
    """
    Wherever the activations are, the losses have the same bits. It says nothing of speed here, and
    leaves nothing but its results. Breaks where a peer has other weights or rows than its name
    says.
    Proves I1, `Activations`.
    """
    out = tmp_path / "activations.json"
    sizes = "--dim 32 --blocks 2 --heads 2 --seq 32 --rounds 2"
    results = activations_benchmark(sizes, tmp_path, out)
    assert len(results["rounds"]) == 2
    for row in results["rounds"]:
        assert {*row} == {"plain", "files", "recompute", "recompute-files", "save-on-cpu"}
        assert len({each["loss"] for each in row.values()}) == 1
        assert all(each["step_ms"] > 0 for each in row.values())
    assert results["ratios"]["files/recompute"]["step_ms"]
    sizes = activations_benchmark("--below --rounds 1", tmp_path, out)["sizes"]
    assert [*sizes] == [str(1 << power) for power in range(14, 23)]
    assert [path.name for path in tmp_path.iterdir()] == ["activations.json"]


def activations_benchmark(sizes, folder, out):
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.activations", *sizes.split(), "--folder", str(folder),
         "--out", str(out)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())

"""
# The benchmark runs, and compares like with like

One test starts it as a reader does. The others call it in this process, so that their ranks are
forked from the server of the tests, which has imported torch already.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import nodes
from tests.bench import activations, overlap, pipeline
from tests.bench import training as bench


@pytest.fixture
def network(monkeypatch):
    """
    A network of the ranks' own, if this machine can have one, so that its loopback counts nothing
    but their messages. The benchmark itself makes one by starting anew.
    """
    if nodes.why_not():
        yield False
        return

    def run(worker, ranks, *args, fresh, timeout_s):
        return nodes.Testbed(testbed.fds, ranks).run(worker, *args, timeout_s=timeout_s)

    with nodes.nodes(1) as testbed:
        for module in (bench, pipeline):
            monkeypatch.setattr(module, "run", run)
        yield True


def benchmark(options, out, own_network=False):
    """Run one of the benchmarks, and return what it has measured."""
    args = bench.options([*options.split(), "--out", str(out)])
    args.own_network = own_network
    bench.benchmark(args)
    return json.loads(out.read_text())


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


def test_muon_sends_what_the_ledger_says_and_less_than_fsdp2s_tensors(network, tmp_path):
    """
    The matrices of FSDP2 are DTensors, whose products communicate. Losses are DDP's with torch's
    Muon. Where the loopback's count is exact, it is the ledger's, with headers and barriers.
    Proves I1, I4, `Owners.step`.
    """
    sizes = ("--dim 96 --blocks 2 --heads 2 --seq 32 --batch 2 --warmup 0 --steps 3 --rounds 1 "
             "--peers zero3-muon fsdp2-muon ddp-muon")
    results = benchmark(sizes, tmp_path / "muon.json", network)
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
    sizes = "--step --dim 32 --blocks 1 --heads 2 --seq 32 --batch 2"
    rows = benchmark(sizes, tmp_path / "step.json")["medians"]
    assert rows["Zero3Optimizer"]["times_ours"] == 1 and rows["Zero3Optimizer"]["ms"] > 0
    assert {name.split(",")[0] for name in rows} == {"Zero3Optimizer", "FSDP2"} and len(rows) == 5


def test_messages_send_half_of_what_gloos_reduce_scatter_sends(network, tmp_path):
    """
    Where the loopback's count is exact: a reduce-scatter by messages sends what an all-gather
    does, and gloo's own twice that. Headers add less than a hundredth.
    Proves `Communicator`, `Communicator.reduce_scatter`, `Communicator.send`.
    """
    results = benchmark("--comm --mib 1", tmp_path / "comm.json", network)
    assert all(row["ms"] > 0 for row in results["medians"].values())
    if results["wire_is_exact"]:
        psi = {name: row["wire_psi"] for name, row in results["medians"].items()}
        assert psi["reduce-scatter, gloo"] == pytest.approx(2, rel=0.01)
        for name in ("reduce-scatter, Communicator", "all-gather, Communicator",
                     "all-gather, gloo"):
            assert psi[name] == pytest.approx(1, rel=0.01), name


def test_the_benchmark_of_checkpoints_writes_as_many_bytes_plainly(tmp_path, capsys):
    """
    And leaves nothing but its results. It says nothing of speed here.
    Proves `save_load.save`, `File.move`.
    """
    (tmp_path / "saved").mkdir()
    results = benchmark(f"--save {tmp_path}/saved --gib 0.04 --rounds 2", tmp_path / "save.json")
    assert len(results["rounds"]) == 2 and results["medians"]["ratio"] > 0
    assert "from each of 2 ranks: a checkpoint" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.name != "saved"] == ["save.json"]
    assert not [*(tmp_path / "saved").iterdir()]


def test_the_benchmark_of_the_disk_asks_fio_for_the_same(tmp_path):
    """
    Ratios of what each got from the same disk, in the same round. It says nothing of speed here.
    Proves `File.move`.
    """
    if shutil.which("fio") is None:
        pytest.skip("needs fio")
    try:
        results = benchmark(f"--disk {tmp_path} --gib 0.02 --rounds 2", tmp_path / "disk.json")
    except SystemExit as error:
        assert "page cache" in str(error)
        pytest.skip("the tests' folder is not on a disk")
    first, second = results["rounds"]
    assert list(first) == ["zero3", "fio"] and list(second) == ["fio", "zero3"]
    assert all(row["ratio"] > 0 for row in results["medians"].values())
    assert [path.name for path in tmp_path.iterdir()] == ["disk.json"]


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
    sizes = "--nodes --dim 64 --blocks 2 --heads 2 --seq 32 --steps 2 --rounds 1 --mbit 2000"
    results = benchmark(sizes, tmp_path / "nodes.json")
    (only,) = results["rounds"]
    sent_psi = {peer: row["link_psi"] for peer, row in only.items()}
    expected = {"flat": 1.5, "hybrid": 0.5, "zero++": 0.1, "fsdp2": 1.5, "hsdp": 0.5}
    assert sent_psi == pytest.approx(expected, rel=0.1)
    for peer, row in only.items():
        off = 1e-2 if peer == "zero++" else 1e-5
        assert row["losses"] == pytest.approx(only["flat"]["losses"], abs=off, rel=0), peer
    assert set(results["ratios"]) == {
        "flat/fsdp2", "hybrid/hsdp", "hybrid/flat", "zero++/flat", "zero++/hybrid"}


def test_the_benchmark_of_pipelines_trains_all_peers_alike_and_counts_what_a_stage_sends(
        network, tmp_path):
    """
    The losses are the same, whoever runs the stages. With `gathers="stage"` a rank sends its stage
    twice, as with DDP, and FSDP2 on gloo three times; if each pass gathers, nine times with four
    micro-batches, and FSDP2's seven. It says nothing of speed here. Breaks where a peer has another
    cut, other rows or another mean than its name says.
    Proves `Pipeline`, `Pipeline.train_batch`.
    """
    sizes = ("--pipeline --dim 64 --blocks 2 --heads 2 --seq 16 --warmup 1 --steps 2 --rounds 1 "
             "--peers zero3 zero3-each plain ddp fsdp2 fsdp2-each")
    results = benchmark(sizes, tmp_path / "pipeline.json", network)
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
    sizes = ("--compile --dim 32 --blocks 1 --heads 2 --seq 16 --batch 2 --layers 3 --width 8 "
             "--warmup 2 --steps 2 --rounds 1 --peers compile-eager ddp")
    cases = benchmark(sizes, tmp_path / "compile.json")["cases"]
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
    activations.main([*sizes.split(), "--folder", str(folder), "--out", str(out)])
    return json.loads(out.read_text())


def test_copies_count_as_overlapping_for_as_long_as_a_kernel_runs():
    """
    Two kernels and two copies: the first copy ends in the gap between the kernels, and the second
    begins there.
    """
    def event(name, begin, end, kind="gpu_memcpy"):
        return {"cat": kind, "name": name, "ts": begin, "dur": end - begin}

    events = [event("Memcpy HtoD", 50, 90), event("Memcpy HtoD", 110, 240), {"ts": 0, "dur": 9},
              event("gemm", 0, 80, "kernel"), event("gemm", 120, 220, "kernel")]
    copies = overlap.spans(events, "gpu_memcpy", "HtoD")
    assert copies == [(50, 90), (110, 240)]
    assert overlap.overlap(copies, overlap.spans(events, "kernel")) == 30 + 100

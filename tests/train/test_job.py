"""
# The main job, as a reader starts it: under torchrun, on two ranks

Where the start itself is not the point, torchrun and its ranks are forked from a process that has
imported torch. Where torchrun is not the point either, ranks that live on from test to test run the
same `main`.
"""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import nn

from tests.checkpoint.survivor import free_port, one_rank, torchrun
from tests.ranks import run as run_on_ranks
from zero3 import Zero3Layer, Zero3Sequential, commit_name, save
from zero3.estimate.ledger import Event
from zero3.train import launch
from zero3.train.gpt import lr_at
from zero3.train.job import OPTIONS, Ranks, checkpoints, look_for_checkpoint, main, parse_args
from zero3.train.report import spans

SMALL = ["--d-model", "16", "--layers", "2", "--seq-len", "16", "--batch", "4"]


MAIN = Path(launch.__file__).with_name("__main__.py")
ALONE = ("--standalone", "--nproc_per_node=2")


def run_train(out, *options: str) -> subprocess.CompletedProcess:
    command = ["-m", "torch.distributed.run", *ALONE, "--monitor-interval=0.1", "-m", "zero3.train",
               "--device", "cpu", *SMALL, "--out", str(out), *options]
    return subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})


def job(port: int, out, *options: str, size=SMALL) -> tuple[int, str, str]:
    """The main job on this rank: its exit status, and what it wrote to stdout and stderr."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # The job joins a process group of its own, once all ranks are in this one.
    dist.barrier()
    dist.destroy_process_group()
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size,
             "LOCAL_WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
             "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    place = {name: str(value) for name, value in place.items()}
    told, wrong = io.StringIO(), io.StringIO()
    # To render its pictures takes longer than the steps. Those of `finished` and of runs with files
    # are.
    rendered = contextlib.nullcontext() if "nvme" in options else mock.patch.object(
        Figure, "savefig", lambda self, path: path.touch())
    with mock.patch.dict(os.environ, place), contextlib.redirect_stdout(told), \
            contextlib.redirect_stderr(wrong), rendered:
        code = main(["--device", "cpu", *size, "--out", str(out), *options])
    return code, told.getvalue(), wrong.getvalue()


def large(port: int, out, *options: str) -> tuple[int, str, str]:
    """The same in its usual size."""
    return job(port, out, *options, size=())


def run_job(out, *options: str, worker=job) -> subprocess.CompletedProcess:
    """What `run_train` gives, from ranks that are there already."""
    # Where torchrun has it: beside the ranks, which find each other there.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    codes, told, wrong = zip(*run_on_ranks(worker, 2, store.port, out, *options), strict=True)
    return subprocess.CompletedProcess("job", max(codes), "".join(told), "".join(wrong))


class Torchrun:
    """torchrun and ranks of the main job, which it forks; it writes two files to a folder"""

    def __init__(self, folder, *options, agent=ALONE, network=None, environment=None):
        self.out, self.errors = folder / "out.txt", folder / "errors.txt"
        argv = [*agent, "--monitor-interval=0.1", "--start-method=fork", "--run-path", str(MAIN),
                "--device", "cpu", *SMALL, *options]
        self.process = launch._CONTEXT.Process(target=torchrun, args=(
            argv, self.out, self.errors, network, environment or {}))
        self.process.start()

    def wait_for(self, words, file, seconds=60):
        until = time.monotonic() + seconds
        while not file.exists() or words not in file.read_text():
            assert self.process.is_alive(), self.errors.read_text()
            assert time.monotonic() < until, self.errors.read_text()
            time.sleep(0.02)

    def ranks(self):
        """The processes that torchrun has started"""
        pid = self.process.pid
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


class Job:
    """The main job on forked ranks, which write to one file"""

    def __init__(self, output, argvs, before=None):
        self.output, port = output, free_port()
        self.ranks = [
            launch._CONTEXT.Process(target=one_rank, daemon=True, args=(
                rank, len(argvs), port, argv, str(output), before))
            for rank, argv in enumerate(argvs) if argv is not None]
        for process in self.ranks:
            process.start()

    def text(self):
        return self.output.read_text() if self.output.exists() else ""

    def wait_for(self, words, seconds=60):
        until = time.monotonic() + seconds
        while words not in self.text():
            assert time.monotonic() < until, self.text()
            time.sleep(0.02)

    def codes(self, seconds=90):
        until = time.monotonic() + seconds
        for process in self.ranks:
            process.join(max(0, until - time.monotonic()))
            process.kill()
        for process in self.ranks:
            process.join()
        return [process.exitcode for process in self.ranks]


def killed(out, *options: str, after: str) -> None:
    """The job on forked ranks, of which one is killed after these words, and the other notices"""
    output = out.parent / f"{out.name}.txt"
    process = Job(output, [[*SMALL, "--device", "cpu", "--out", str(out), *options]] * 2)
    # The line comes after the folder: until then, rank 0 may still need the rank that is killed.
    process.wait_for(after)
    process.ranks[1].kill()
    first, second = process.codes()
    assert first > 0 and second == -signal.SIGKILL, process.text()


@pytest.fixture
def one_thread():
    # Matrices this small only wait for a second thread, long where the machine is busy.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """
    A run of six steps on two ranks, and the folder that it wrote to
    """
    out = tmp_path_factory.mktemp("train")
    run = run_train(out, "--steps", "6", "--eval-every", "3", "--sample", "5", "--prompt", "Zero")
    assert run.returncode == 0, run.stderr
    return run, out, json.loads((out / "metrics.json").read_text())


def test_each_rank_holds_and_sends_exactly_what_was_predicted(finished):
    """
    The promise of the main job, to the byte. Breaks where `predict.py` and `layer.py` drift apart.
    Proves I2, I3, I4, `Prediction.rest_bytes`, `measured`, `launch.Ranks.gather`, `report.table`,
    `predict.Prediction`, `Prediction.as_dict`.
    """
    run, _, metrics = finished
    assert [row["rank"] for row in metrics["measured"]] == [0, 1]
    for row in metrics["measured"]:
        for column in ("rest_bytes", "peak_bytes", "sent_bytes", "messages", "order_bytes"):
            assert row[column] == metrics["predicted"][row["rank"]][column], column
    measured = [line for line in run.stdout.splitlines() if "measured" in line]
    assert len(measured) == 2
    assert all(line.count("equal") == 3 for line in measured)


def test_the_table_of_the_readme_is_what_the_job_prints(tmp_path):
    """
    Bytes do not depend on the number of steps. Breaks with any default of the job.
    Proves `report.table`.
    """
    run = run_job(tmp_path, "--steps", "2", "--eval-every", "2", "--sample", "1", worker=large)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    table = readme[readme.index("bytes of each rank"):].partition("\n```")[0]
    assert run.returncode == 0 and table in run.stdout, run.stdout + run.stderr


def test_a_run_from_files_has_the_losses_of_one_in_memory_and_its_table_is_equal(finished,
                                                                                tmp_path):
    """
    The main job with all its states in files: the same losses to the last bit, and six columns
    instead of three, of which those of reads and writes are measured only. Breaks where a tier
    changes a number.
    Proves I8, `Job.build`, `Job.predicted`, `disk_bytes`, `_Shard.place_states`, `report.table`.
    """
    run = run_job(tmp_path, "--steps", "6", "--eval-every", "3", "--sample", "5", "--prompt",
                  "Zero", "--offload-params", "nvme", "--offload-optimizer", "nvme")
    assert run.returncode == 0, run.stderr
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["losses"] == finished[2]["losses"]
    for row in metrics["measured"]:
        for column in ("rest_bytes", "peak_bytes", "disk_bytes"):
            assert row[column] == metrics["predicted"][row["rank"]][column] > 0, column
        assert row["read_bytes"] > 0 and row["written_bytes"] > 0
    measured = [line for line in run.stdout.splitlines() if "measured" in line]
    assert [line.count("equal") for line in measured] == [4, 4]
    assert run.stdout.count("not predicted") == 4
    assert {path.name for path in tmp_path.iterdir()} == {"loss.png", "tape.png", "metrics.json"}


def test_activations_in_files_change_no_number_and_their_bytes_are_predicted(tmp_path):
    """
    The main job in its usual size: the table has two columns more, which are equal too. "cpu" is
    the memory that they are in already. Breaks if the first loss that has read from a file differs.
    Proves I8, `Job.build`, `Job.saved`, `Job.predicted`, `measured`, `report.table`,
    `saved_bytes`.
    """
    ends = []
    for where in ("device", "cpu", "nvme"):
        run = run_job(tmp_path, "--steps", "3", "--eval-every", "3", "--sample", "1",
                      "--activations", where, worker=large)
        assert run.returncode == 0, run.stderr
        measured = [line for line in run.stdout.splitlines() if "measured" in line]
        columns = 5 if where == "nvme" else 3
        assert [line.count("equal") for line in measured] == [columns, columns]
        ends.append(json.loads((tmp_path / "metrics.json").read_text()))
    assert ends[0]["losses"] == ends[1]["losses"] == ends[2]["losses"]
    assert ends[0]["held_out"] == ends[2]["held_out"]
    for row, predicted in zip(ends[2]["measured"], ends[2]["predicted"], strict=True):
        for column in ("out_bytes", "in_bytes", "rest_bytes", "peak_bytes", "sent_bytes"):
            assert row[column] == predicted[column] > 0, column
        assert 4 * row["in_bytes"] == 3 * row["out_bytes"] == 6 * predicted["activation_bytes"]
    assert {path.name for path in tmp_path.iterdir()} == {"loss.png", "tape.png", "metrics.json"}


def test_tokens_of_a_large_batch_leave_too(tmp_path):
    """
    On the CPU the rows of a micro-batch are a view of the whole batch, whose storage is saved. And
    the files may have a folder of their own, in bf16.
    Proves `Job.saved`, `check_options`.
    """
    (tmp_path / "disk").mkdir()
    run = run_job(tmp_path / "out", "--steps", "2", "--eval-every", "2", "--sample", "1", "--batch",
                  "2048", "--accumulate", "2", "--dtype", "bf16", "--activations", "nvme",
                  "--offload-folder", f"{tmp_path}/disk")
    assert run.returncode == 0, run.stderr
    metrics = json.loads((tmp_path / "out/metrics.json").read_text())
    for row, predicted in zip(metrics["measured"], metrics["predicted"], strict=True):
        assert row["out_bytes"] == predicted["out_bytes"] > 2 * 2048 * 17 * 8
        assert row["in_bytes"] == predicted["in_bytes"] > 0


def test_a_run_leaves_pictures_and_figures(finished):
    """
    Breaks where a picture is not written, or losses are lost between evaluations.
    Proves `Job.finish`, `Job.metrics`, `draw_loss`, `draw_tape`, `commit_name`.
    """
    _, out, metrics = finished
    for picture in ("loss.png", "tape.png"):
        assert (out / picture).read_bytes().startswith(b"\x89PNG")
    assert len(metrics["losses"]) == 6
    assert metrics["losses"][0] == pytest.approx(8, abs=0.2)
    assert [step for step, _ in metrics["held_out"]] == [3, 6]
    assert metrics["ranks"] == 2 and metrics["commit"] == commit_name()
    assert metrics["tokens_per_s"] > 0


def test_a_pipe_gets_plain_lines_from_rank_0_alone(finished):
    """
    Breaks where labml's screen writes escape codes into a file, or every rank prints.
    Proves `job.progress`, `launch.Ranks.say`, `launch.Ranks.connect`.
    """
    run, _, _ = finished
    assert "\x1b" not in run.stdout and "\r" not in run.stdout
    assert [line[:11] for line in run.stdout.splitlines()[:2]] == ["step 3 of 6", "step 6 of 6"]
    assert run.stdout.count("\nZero") == 1


def test_one_rank_needs_no_torchrun_and_sees_the_same_batches(finished, tmp_path, one_thread):
    """
    The losses of two ranks are those of one, because the global batch is the same. Not bit for bit:
    a mean of two means rounds differently. Breaks where a rank takes the wrong rows, or the loss is
    not averaged over ranks.
    Proves I1, `Job`, `Job.train`, `Job.train_step`, `launch.Ranks.rows`.
    """
    options = ["--steps", "6", "--eval-every", "6", "--sample", "1"]
    assert main([*SMALL, "--device", "cpu", "--out", str(tmp_path), *options]) == 0
    alone = json.loads((tmp_path / "metrics.json").read_text())
    assert alone["losses"] == pytest.approx(finished[2]["losses"], rel=1e-4)
    assert alone["measured"][0]["sent_bytes"] == alone["predicted"][0]["sent_bytes"] == 0


def test_bf16_with_masters_ends_where_fp32_does(tmp_path):
    """
    Within 2 %, with a dynamic loss scale, clipping and four micro-batches, each row of which is
    rounded in other places; and the bytes are still those predicted.
    Proves `memory_table`, `Job.evaluate`.
    """
    options = ["--batch", "16", "--steps", "20", "--eval-every", "20", "--sample", "1", "--lr",
               "0.01"]
    mixed = ["--dtype", "bf16", "--loss-scale", "dynamic", "--accumulate", "4", "--table"]
    losses = []
    for more in ([], mixed):
        run = run_job(tmp_path, *options, *more, "--clip", "1.0")
        assert run.returncode == 0, run.stderr
        metrics = json.loads((tmp_path / "metrics.json").read_text())
        losses.append(metrics["held_out"][-1][1])
        assert run.stdout.count(" equal") == 6
    assert losses[1] == pytest.approx(losses[0], rel=0.02) and losses[0] < 6
    table = run.stdout.partition("\nstep")[0].splitlines()
    told = {line[:24].strip(): int(line.split()[-1].replace(",", "")) for line in table[1:] if line}
    predicted = metrics["predicted"][0]
    assert told["masters"] == predicted["master_bytes"] == 2 * told["parameters"]
    assert told["at the peak of a step"] == metrics["measured"][0]["peak_bytes"]
    assert metrics["skipped_steps"] == 0


def test_muon_trains_the_hidden_matrices_and_goes_on_after_a_kill(tmp_path):
    """
    It learns, its bytes are measured and not predicted, and after a rank was killed the same
    command ends with the bits of a run that nobody disturbed. Breaks if the owners lose their
    moments.
    Proves I10, `Job.group_by`, `job.is_predicted`.
    """
    options = ["--steps", "20", "--eval-every", "20", "--sample", "1", "--optimizer", "muon"]
    undisturbed = run_job(tmp_path / "whole", *options)
    assert undisturbed.returncode == 0, undisturbed.stderr
    killed(tmp_path / "killed", *options, "--save-every", "5", after="step 10: saved")
    run = run_job(tmp_path / "killed", *options, "--save-every", "5")
    assert run.returncode == 0, run.stderr
    assert ": resumes from " in run.stdout and "not predicted" in run.stdout, run.stdout
    ends = [json.loads((folder / "metrics.json").read_text())
            for folder in (tmp_path / "whole", tmp_path / "killed")]
    same_run(tmp_path / "killed", ends[0])
    assert ends[0]["losses"][-1] < 0.95 * ends[0]["losses"][0]


def test_groups_of_ranks_train_alike_and_their_bytes_are_measured(tmp_path):
    """
    Two nodes or two replicas of one rank each have the losses of two plain ranks. With everything
    rounded between nodes the losses are near them. Their bytes are not predicted, and the table
    says so.
    Proves I1, I4, `Job.links`, `Job.predicted`, `job.is_predicted`, `report.table`.
    """
    options = ["--steps", "20", "--eval-every", "20", "--sample", "1", "--lr", "0.01"]
    rounded = ["--nodes", "2", "--gather-bits", "8", "--reduce-bits", "4", "--secondary"]
    losses = []
    for more in ([], ["--nodes", "2"], ["--replicas", "2"], rounded):
        run = run_job(tmp_path, *options, *more)
        assert run.returncode == 0, run.stderr
        assert run.stdout.count("not predicted" if more else " equal") == 6
        losses.append(json.loads((tmp_path / "metrics.json").read_text())["held_out"][-1][1])
    assert losses[1] == losses[2] == losses[0] < 6
    assert losses[3] == pytest.approx(losses[0], rel=0.01) and losses[3] != losses[0]


def test_what_cannot_work_is_one_line_from_rank_0(tmp_path):
    """
    Breaks where each rank complains, or rank 1 leaves first and torchrun ends rank 0 before it has
    spoken.
    Proves `job.main`, `check_options`.
    """
    run = Torchrun(tmp_path, "--out", str(tmp_path / "out"), "--batch", "3")
    run.process.join()
    assert run.process.exitcode != 0
    errors = run.errors.read_text()
    assert errors.count("zero3.train: ") == 1
    assert errors.count("Expected: a multiple of 2 ranks times 1 micro-batches.") == 1
    assert run.out.read_text() == ""


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--text", "nowhere.txt"], "Expected: a file. Got: nowhere.txt."),
        (["--text", "many words " * 30], "File name too long: 'many words "),
        (["--resume", "many words " * 30], "File name too long: 'many words "),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--heads", "3"], "Expected: a multiple of 3 heads. Got: d_model = 16."),
        (["--steps", "1"], "--steps is too small. Expected: at least 2. Got: 1."),
        (["--clip", "nan"], "--clip is too small. Expected: at least 1e-06. Got: nan."),
        (["--accumulate", "0"], "--accumulate is too small. Expected: at least 1. Got: 0."),
        (["--loss-scale", "much"], "argument --loss-scale: invalid loss_scale value: 'much'"),
        (["--nodes", "2"], "Expected: replicas or nodes that divide 1 ranks. Got: --replicas 1"),
        (["--nodes", "2", "--replicas", "2"], "Expected: --replicas or --nodes. Got: --replicas 2"),
        (["--secondary"], "Expected: --nodes beside it. Got: one node."),
        (["--table", "--gather-bits", "8"],
         "Expected: one group of ranks, no encodings and AdamW."),
        (["--optimizer", "muon", "--compress", "8"], "Expected: AdamW. Got: --optimizer muon"),
        (["--prompt", ""], "Expected: a prompt of at least one byte."),
        (["--seq-len", "1000000"], "the text is too short. Expected: at least 10000010 bytes"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(tmp_path, capsys, options, error):
    """
    Breaks where an option is first looked at when the model is built.
    Proves `job.main`, `parse_args`, `check_options`, `prepare`, `prepare_quietly`, `option`.
    """
    assert main([*SMALL, "--device", "cpu", "--out", str(tmp_path), *options]) == 2
    assert error in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_more_ranks_than_gpus_is_an_error(monkeypatch):
    """
    Breaks where two ranks share a GPU and NCCL reports it in its own words.
    Proves `launch.Ranks`, `launch.Ranks.find`.
    """
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for name, value in {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ValueError, match=r"at most 2 ranks.*Got: 3.*--nproc_per_node=2"):
        Ranks.find("auto")
    assert Ranks.find("cpu").device.type == "cpu"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert str(Ranks.find("auto").device) == "cuda:1"


def test_the_learning_rate_warms_up_and_comes_down():
    """
    Breaks where warm-up and cosine do not meet, or a short run never leaves the warm-up.
    Proves `lr_at`.
    """
    rates = [lr_at(step, 100, 1.0) for step in range(100)]
    assert rates[0] == pytest.approx(1 / 30)
    assert rates[29] == rates[30] == max(rates) == 1
    assert rates[30:] == sorted(rates[30:], reverse=True)
    assert 0.05 < rates[-1] < 0.06
    assert lr_at(1, 2, 1.0) == 1


def test_the_tape_is_cut_into_spans_of_what_a_layer_holds():
    """
    What the picture draws. Breaks where the `free` after a reduce is taken for that of the
    parameters.
    Proves `report.spans`, `Event`.
    """
    names = "fetch gathered compute computed free fetch compute gradients free reduce reduced free"
    events = [
        Event(i, 0, "a", "forward", name, "device", 0, 0, 0, 0)
        for i, name in enumerate(names.split())
    ]
    assert sorted(spans(events)) == [
        ("a", "computing", 2, 3), ("a", "computing", 6, 8), ("a", "full", 0, 4),
        ("a", "full", 5, 8), ("a", "gradients", 7, 11),
    ]


# --------------------------------------------------------------------------------- it goes on again

LONG = ["--steps", "60", "--eval-every", "20", "--sample", "5"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The figures of a run that nobody disturbed and that saved nothing"""
    out = tmp_path_factory.mktemp("undisturbed")
    run = run_job(out, *LONG)
    assert run.returncode == 0, run.stderr
    return json.loads((out / "metrics.json").read_text())


def same_run(out, metrics):
    found = json.loads((out / "metrics.json").read_text())
    for what in ("losses", "held_out", "sample", "measured"):
        assert found[what] == metrics[what], what


def test_after_a_rank_is_killed_the_same_command_goes_on_and_nobody_sees_it_in_the_figures(
        undisturbed, tmp_path):
    """
    From the newest checkpoint, without a word from us: losses, text and bytes are those of a run
    that nobody disturbed. Breaks where a second start begins anew, or loses the curve.
    Proves I10, `Job.begin`, `take_up`, `look_for_checkpoint`, `Job.save`, `checkpoints`.
    """
    out = tmp_path / "out"
    folder = out / "checkpoints"
    killed(out, *LONG, "--save-every", "7", after="step 14: saved")
    assert (folder / "step-00000014").exists()
    again = run_job(out, *LONG, "--save-every", "7")
    assert again.returncode == 0, again.stderr
    assert ": resumes from " in again.stdout
    assert f"saved {folder}/step-00000060, the end of this run" in again.stdout
    same_run(out, undisturbed)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000056", "step-00000060"]


def test_a_checkpoint_from_before_an_option_is_taken_up_if_the_option_is_not_given(tmp_path):
    """
    Breaks where a run that began with an earlier version can no longer go on.
    Proves I10, `look_for_checkpoint`.
    """
    args = parse_args(["--out", str(tmp_path)])
    model = Zero3Sequential([Zero3Layer(nn.Linear(2, 2))])
    old = {name: getattr(args, name) for name in OPTIONS
           if not name.endswith("_bits") and name != "optimizer"}
    save(checkpoints(args), model, step=1, extra={"options": old}).wait()
    found, problem = look_for_checkpoint(args)
    assert found == tmp_path / "checkpoints" / "step-00000001" and problem == ""
    _, problem = look_for_checkpoint(parse_args(["--out", str(tmp_path), "--reduce-bits", "4"]))
    assert "belongs to another run" in problem and "--reduce-bits None there and 4 here" in problem
    _, problem = look_for_checkpoint(parse_args(["--out", str(tmp_path), "--optimizer", "muon"]))
    assert "belongs to another run" in problem and "--optimizer adamw there and muon" in problem


def test_ctrl_c_saves_and_the_same_command_goes_on(undisturbed, tmp_path):
    """
    Also without `--save-every`. Afterwards the run is at its end, and says so. A run of other
    options does not take it up unasked. Breaks where ranks end after different steps.
    Proves `signals`, `Job.train`, `Job.save`, `Run`, `launch.Ranks.gather`.
    """
    out = tmp_path / "out"
    first = Torchrun(tmp_path, *LONG, "--out", str(out))
    # Both ranks train.
    first.wait_for("step 20", first.out)
    os.kill(first.process.pid, signal.SIGINT)
    first.process.join()
    told = first.out.read_text()
    assert "; the same command resumes from there" in told, first.errors.read_text()
    (saved,) = (out / "checkpoints").iterdir()
    assert 20 <= int(saved.name[5:]) < 59
    again = run_job(out, *LONG)
    assert again.returncode == 0, again.stderr
    assert f"step {int(saved.name[5:])}: resumes from {saved}" in again.stdout
    same_run(out, undisturbed)
    assert "step-00000060 is the end of this run" in run_job(out, *LONG).stdout
    other = run_job(out, *LONG, "--lr", "1")
    assert other.returncode == 2 and "Traceback" not in other.stderr
    assert "zero3.train: " in other.stderr and "Got: --lr 0.004 there and 1.0 here" in other.stderr
    assert other.stderr.count("What to do: pass `--resume") == 1

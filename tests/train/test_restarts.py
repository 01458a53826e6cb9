"""
# The main job when something goes wrong around it: restarts, killed processes, errors

Most ranks here are forked, as those of `launch.run`, and call `job.main` with the environment
that torchrun would give them.
"""

import json
import os
import re
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import nodes
from tests.checkpoint.survivor import agent, digest, fails_in_forward, signalled, survive
from tests.ranks import run
from tests.train.test_job import SMALL, Job, Torchrun
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.train import job as train
from zero3.train import launch

RESTARTS = 20
SHORT = [*SMALL, "--device", "cpu", "--steps", "6", "--eval-every", "3", "--sample", "1"]


def undisturbed(steps):
    """The digest of the weights after these steps, without any restart"""
    return digest(survive(None, steps, None)[0])


# ---------------------------------------------------------------------------------------- restarts


def test_torchrun_restarts_a_run_twenty_times_and_it_ends_with_the_same_bits(tmp_path):
    """
    A rank kills itself in each of 20 attempts, once with a store that torchrun keeps for all of
    them, as a static rendezvous does, once with one of its own for each attempt. None of the 42
    starts fails, each takes one step, and the weights are those of a run without restarts. Breaks
    where `fresh_store` returns the store without a prefix: about every second attempt then fails.
    Proves I10, `fresh_store`.
    """
    # Side by side: most of the time each waits for its agent.
    agents = {}
    for name, backend, apart in (("one store", "static", "0"), ("own stores", "c10d", "1")):
        (tmp_path / name).mkdir()
        agents[name] = launch._CONTEXT.Process(
            target=agent, args=(tmp_path / name, RESTARTS, backend, apart))
        agents[name].start()
    expected = run(undisturbed, 2, RESTARTS + 1)
    for name, process in agents.items():
        process.join(200)
        process.kill()
        process.join()
        assert process.exitcode == 0, (tmp_path / name / "errors").read_text()[-3000:]
        for rank in range(2):
            told = (tmp_path / name / f"attempts-{rank}").read_text().split("\n")
            assert told == [*(f"{i} 1" for i in range(RESTARTS + 1)), ""], name
            assert (tmp_path / name / f"digest-{rank}").read_text() == expected[rank]


@pytest.mark.skipif(bool(nodes.why_not()), reason=nodes.why_not())
def test_a_machine_may_be_lost_and_come_back(tmp_path):
    """
    Two machines with a torchrun each. One machine is lost, and the other one goes on alone from the
    newest checkpoint; it comes back, and both go on from there together. At most the steps since
    the last checkpoint are lost. Breaks with the number of the restart in place of the token of
    `fresh_store`, because it differs between machines; and where a lost rank leaves with 0.
    Proves I10, `fresh_store`, `take_up`, `end_with_parent`.
    """
    every = 20

    def node(number, name):
        (tmp_path / name).mkdir()
        agent = [
            "--nnodes=1:2", "--nproc_per_node=1", "--rdzv-backend=c10d", "--rdzv-id=z",
            "--rdzv-endpoint=10.0.0.1:29400", f"--local-addr=10.0.0.{number + 1}",
            f"--rdzv-conf=is_host={1 - number},"
            "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=4",
            "--max-restarts=3"]
        return Torchrun(
            tmp_path / name, "--steps", "1000000", "--eval-every", "5", "--save-every", str(every),
            "--timeout", "20", "--out", str(tmp_path / "out"), agent=agent,
            network=testbed._path(number), environment={
                # No name server can be reached from there, and a host's name leads out of it.
                "RES_OPTIONS": "timeout:1 attempts:1", "GLOO_SOCKET_IFNAME": "uplink",
                # With one store, torch does not tell a machine that comes back where it is.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    def wait_for_first(pattern):
        """Wait for a line of the first machine's after those that were waited for before"""
        nonlocal read
        until = time.monotonic() + 120
        while not (found := re.compile(pattern).search(told(), read)):
            errors = first.errors.read_text()[-3000:] if first.errors.exists() else ""
            assert time.monotonic() < until and first.process.is_alive(), told()[-3000:] + errors
            time.sleep(0.05)
        read = found.end()
        return int(found[1])

    def told():
        return first.out.read_text() if first.out.exists() else ""

    read, machines = 0, []
    with nodes.nodes(ranks_each=1, mbit=2000) as testbed:
        try:
            first, second = node(0, "first"), node(1, "second")
            machines += [first, second]
            wait_for_first(r"step (\d+): saved")
            second.process.kill()
            alone = wait_for_first(r"step (\d+): resumes from ")
            before = re.findall(r"step +(\d+) of", told()[:read])
            assert 0 <= int(before[-1]) - alone < every
            wait_for_first(r"step (\d+): saved")
            machines.append(node(1, "again"))
            # Its torchrun tells the rank to end, which saves.
            saved = wait_for_first(r"step (\d+): saved .*; the same command resumes from there")
            assert wait_for_first(r"step (\d+): resumes from ") == saved > alone
            assert wait_for_first(r"step (\d+): saved") > saved
        finally:
            for machine in machines:
                machine.process.kill()
            for machine in machines:
                machine.process.join()


# ------------------------------------------------------------------------- ranks that are processes


def test_the_rank_with_the_bug_is_told_first_and_the_others_in_a_line_each(tmp_path):
    """
    A bug in a forward of rank 1, of four: one traceback, its own, at the top, and a line from each
    of the others. There were 148 lines before, with four tracebacks. So too if it is rank 0, whose
    store ends with it. A bug of all ranks has one traceback too. Breaks where `main` lets the
    errors through, or a lost rank does not wait for the cause.
    Proves `tell_failure`, `is_consequence`, `job.main`.
    """
    argv = [*SHORT, "--out", str(tmp_path / "out")]
    jobs = {ranks: Job(tmp_path / f"output{i}", [argv] * 4, partial(fails_in_forward, ranks))
            for i, ranks in enumerate([(1,), (0,), (0, 1, 2, 3)])}
    for failing, job in jobs.items():
        assert job.codes() == [1] * 4
        text = job.text()
        assert re.match(r"zero3.train: rank \d failed\nTraceback", text), text
        assert text.count("Traceback") == 1 and "\nZeroDivisionError: division by zero\n" in text
        for rank in {0, 1, 2, 3} - {int(text[len("zero3.train: rank ")])}:
            line = f"zero3.train: rank {rank} ends as a consequence. RuntimeError: rank {rank}: "
            if rank in failing:
                line = f"zero3.train: rank {rank} failed too. ZeroDivisionError: division by zero\n"
            assert text.count(line) == 1, text
            assert text.index(line) > text.index("\nZeroDivisionError"), text
        assert "frame #" not in text and len(text.splitlines()) < 70, text


def test_what_is_wrong_on_one_rank_alone_ends_all_of_them_with_its_reason(tmp_path):
    """
    Before the process group is up: a text that is not on the machine of rank 1, options that
    differ, a rank that never starts. One line, not the words of gloo. Breaks where a rank leaves
    without a word to the others, or does not compare.
    Proves `agree`, `Job.train_and_finish`, `fresh_store`, `job.main`.
    """
    argv = [*SHORT, "--out", str(tmp_path / "out"), "--timeout", "3"]
    three = [*argv, "--batch", "6"]
    job = Job(tmp_path / "text", [three, [*three, "--text", "nowhere.txt"], three])
    other = Job(tmp_path / "seed", [argv, [*argv, "--seed", "1"]])
    words = Job(tmp_path / "words", [argv, [*argv, "--steps", "many"]])
    absent = Job(tmp_path / "absent", [argv, None])
    headless = Job(tmp_path / "headless", [None, argv])
    assert job.codes() == [2, 2, 2]
    assert job.text().count("\n") == 1
    assert job.text().startswith("zero3.train: on rank 1: ") and "Got: nowhere.txt." in job.text()
    assert other.codes() == [2, 2]
    assert other.text() == (
        "zero3.train: the ranks have different options. Expected: the same --seed on all ranks. "
        "Got: 0 on rank 0, and 1 on rank 1. What to do: start all machines with the same "
        "command.\n")
    assert words.codes() == [2, 2]
    assert words.text() == ("zero3.train: on rank 1: argument --steps: invalid int value: 'many'. "
                            "What to do: see `zero3.train --help`.\n")
    for lonely, rank, missing in ((absent, 0, "each other rank"), (headless, 1, "rank 0")):
        assert lonely.codes() == [1]
        # If there is no store to connect to, torch's own log says so too, above.
        assert lonely.text().splitlines()[-1].startswith(
            f"zero3.train: rank {rank}: the other ranks are lost. Expected: a sign of "
            f"{missing} within 3 s. Got: "), lonely.text()
        assert "Traceback" not in lonely.text()


def test_a_stopped_rank_ends_the_run_after_the_timeout_and_a_killed_torchrun_takes_all_along(
        tmp_path):
    """
    SIGSTOP for rank 1, as a lost link or a machine that swaps would have it: after `--timeout`
    rank 0 says what it waited for. SIGKILL for torchrun, which can tell nobody: its ranks are gone,
    also the one that is stopped. Before, rank 0 waited for 30 minutes, and both lived on. Breaks
    without `timeout=` in `connect`, or without `end_with_parent`.
    Proves `launch.Ranks.connect`, `launch.Ranks.waits`, `end_with_parent`, `tell_failure`.
    """
    first = Torchrun(tmp_path, "--steps", "100000", "--eval-every", "2", "--timeout", "5",
                     "--out", str(tmp_path / "out"))
    try:
        first.wait_for("step ", first.out)
        ranks = first.ranks()
        os.kill(ranks[1], signal.SIGSTOP)
        stopped_s = time.monotonic()
        first.wait_for("What to do: ", first.errors)
        assert time.monotonic() - stopped_s < 40
        told = next(line for line in first.errors.read_text().splitlines() if "lost" in line)
        assert "rank 0: " in told and "the other ranks are lost. Expected: their part of " in told
        assert "imed out" in told
    finally:
        first.process.kill()
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() and "zombie" not in
              Path(f"/proc/{pid}/status").read_text() for pid in ranks):
        assert time.monotonic() < until, "ranks have outlived torchrun"
        time.sleep(0.05)
    first.process.join()


def test_a_run_that_was_told_to_end_does_not_pass_for_one_that_is_done(tmp_path):
    """
    SIGTERM for one rank: all save, and end with 128 + 15, as a process does that dies of it, so
    that a supervisor starts the run again. It then goes on to its end, and ends with 0. Breaks
    where `Job.train_and_finish` returns 0 after a signal.
    Proves I10, `Job.train_and_finish`, `signals`.
    """
    argv = [*SHORT, "--out", str(tmp_path / "out")]
    job = Job(tmp_path / "first", [argv] * 2, signalled)
    assert job.codes() == [143, 143]
    assert "step 3: saved " in job.text()
    assert "; the same command resumes from there" in job.text()
    again = Job(tmp_path / "second", [argv] * 2)
    assert again.codes() == [0, 0]
    assert "step 3: resumes from " in again.text() and "the end of this run" in again.text()


def test_the_default_batch_fits_any_number_of_ranks(tmp_path, monkeypatch):
    """
    It is 16, as ever, on 1, 2, 4, 8 and 16 ranks, and else the next multiple, which is said. A
    batch that was asked for is not changed. A run on 3 ranks needs no option, and none of them
    leaves before rank 0 has written its figures. Breaks where the default is refused, or another
    number of ranks trains something else unasked.
    Proves `prepare`, `parse_args`, `launch.Ranks.gather`.
    """
    found = {}
    for ranks in range(1, 17):
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        found[ranks] = train.prepare(["--device", "cpu", "--out", str(tmp_path)]).args.batch
    assert found == {ranks: -(-16 // ranks) * ranks for ranks in range(1, 17)}
    assert {ranks for ranks in found if found[ranks] == 16} == {1, 2, 4, 8, 16}
    monkeypatch.setenv("WORLD_SIZE", "4")
    options = ["--device", "cpu", "--out", str(tmp_path), "--accumulate", "3"]
    assert train.prepare(options).args.batch == 24
    with pytest.raises(ValueError, match=r"multiple of 4 ranks times 3 micro-batches. Got: .* 16"):
        train.prepare([*options, "--batch", "16"])
    small = [*SHORT[: SHORT.index("--batch")], *SHORT[SHORT.index("--batch") + 2 :]]
    job = Job(tmp_path / "output", [[*small, "--out", str(tmp_path / "out")]] * 3)
    assert job.codes() == [0, 0, 0]
    assert job.text().startswith("--batch 18, because 16 is no multiple of 3 (ranks times micro-")
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["options"]["batch"] == 18


# -------------------------------------------------------------------------- ranks from `launch.run`


def one_raises(how):
    """Rank 1 of three raises, in a forward or outside; rank 2 may be asleep"""
    model = Zero3Sequential([Zero3Layer(torch.nn.Linear(4, 4)) for _ in range(3)])
    if dist.get_rank() == 1:
        if how != "forward":
            raise ValueError("the cause")
        model.module_list[1].register_forward_pre_hook(lambda *_: 1 / 0)
    if how == "asleep" and dist.get_rank() == 2:
        time.sleep(1000)
    model(torch.ones(2, 4)).sum().backward()


def test_ranks_from_python_are_told_by_their_cause_too(monkeypatch):
    """
    The traceback of the rank that raised comes first, then a line from each that lost it, and
    nobody waits for a rank that cannot answer any more: that took 90 s with a limit of 40. Breaks
    where answers are read in the order of ranks.
    Proves `launch.run`, `launch.report`, `_answers`, `is_consequence`.
    """
    monkeypatch.setattr(launch, "_GRACE_S", 2)
    for how, cause in (("forward", "ZeroDivisionError: division by zero"),
                       ("outside", "ValueError: the cause"), ("asleep", "ValueError: the cause")):
        begun_s = time.monotonic()
        with pytest.raises(AssertionError) as caught:
            launch.run(one_raises, 3, how, device="cpu", timeout_s=90)
        text = str(caught.value)
        assert text.startswith("rank 1:\nTraceback") and text.count("Traceback") == 1
        lines = text.split(cause + "\n")[1].strip().splitlines()
        assert all(line.startswith("as a consequence, ") for line in lines)
        assert len(lines) == 2 and ("the other ranks are lost" in lines[0])
        assert ("rank 2: no answer" in lines[1]) == (how == "asleep")
        assert time.monotonic() - begun_s < 60


def test_random_numbers_of_a_module_touch_no_other_gpu(monkeypatch):
    """
    Saving their states would open a context on each GPU of the machine, on each rank. Breaks where
    `fork_rng` is called without `devices=`, and where an optimizer whose states rest in CPU memory
    seeds the GPU, because dropout would draw other masks after that.
    Proves `wrap`, `seeded`.
    """
    real, asked, seeds = torch.random.fork_rng, [], []

    def fork_rng(devices=None, **more):
        asked.append(devices)
        return real(devices, **more)

    monkeypatch.setattr(torch.random, "fork_rng", fork_rng)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    before = torch.get_rng_state()
    Zero3Optimizer(wrap(model, torch.nn.Linear), offload="cpu")
    assert not seeds and len(asked) > 2 and asked == [[]] * len(asked)
    assert torch.equal(torch.get_rng_state(), before)

"""
# The page on clusters: its files and commands, run on one machine

Two networks of this machine stand for two machines (see `tests/nodes.py`), and two small programs
for Slurm's `srun` and `scontrol`, which start the command on this machine alone.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import run as torchrun
from torch.utils.data import DistributedSampler

from tests import nodes
from tests.beside.loops import replaced
from tests.docs.test_readme import as_main
from tests.ranks import run
from tests.train.test_job import SMALL, run_job
from zero3 import Zero3Layer, Zero3Optimizer, Zero3Sequential, save
from zero3.train.job import parse_args

ROOT = Path(__file__).parents[2]
PAGE = ROOT.joinpath("docs/clusters.md").read_text(encoding="utf-8")
MACHINES, SLURM = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
(KUBERNETES,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
LINKS, DATA = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
OPTIONS = ("--eval-every", "2", "--sample", "1")
# The hostname and the table of hosts of a machine are of the process that starts there.
MACHINE = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'
SRUN = '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n'
SCONTROL = ('#!/bin/bash\n[ "$*" = "show hostnames node-[0-1]" ] || exit 1\n'
            "echo localhost\necho node-1\n")


def environment(**more):
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more}


def losses(out):
    return json.loads((out / "metrics.json").read_text())["losses"]


def slurm(folder, *options):
    """The Slurm file, as Slurm would start it on the first machine"""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "mine.sbatch").write_text(replaced(SLURM, ("/shared/", f"{folder}/")))
    env = environment(SLURM_JOB_NAME="mine", SLURM_JOB_NODELIST="node-[0-1]", SLURM_NNODES="1",
                      SLURM_GPUS_ON_NODE="2", SLURM_JOB_ID=str(free_job()))
    env["PATH"] = f"{folder}:{env['PATH']}"
    return subprocess.Popen(["bash", "mine.sbatch", *options], cwd=folder, env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def agent_of(process):
    """torchrun's process, which was `srun` before"""
    (agent,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return int(agent)


def free_job():
    """The number of a job whose port nobody listens on, just now"""
    for number in count(os.getpid()):
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("localhost", 20000 + number % 10000))
            return number


@pytest.fixture
def machines(tmp_path):
    """What comes before a command on each of two machines"""
    if nodes.why_not():
        pytest.skip(f"two machines need network namespaces: {nodes.why_not()}")
    hosts = tmp_path / "hosts"
    hosts.write_text("127.0.0.1 localhost\n10.0.0.1 node-0\n10.0.0.2 node-1\n")
    with nodes.nodes(ranks_each=1, mbit=1000) as testbed:
        found = [["nsenter", f"--net=/proc/{os.getpid()}/fd/{fd}", "unshare", "--uts", "--mount",
                  "bash", "-c", MACHINE, "machine", f"node-{i}", str(hosts)]
                 for i, fd in enumerate(testbed.fds)]
        done = subprocess.run([*found[0], "true"], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"a machine needs a hostname of its own: {done.stderr}")
        yield found


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("text", [MACHINES, SLURM])
def test_a_shell_file_parses(text):
    """
    `bash -n` says nothing. Breaks with an open quote, or a line that is continued with a blank.
    """
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_two_machines_train_to_the_losses_of_one_machine(machines, tmp_path):
    """
    The same command on both, and two ranks of one machine: the same bits. Breaks where the command
    lacks the rendezvous, or where `node-0` does not find out that it keeps the store.
    Proves I1, `fresh_store`, `job.main`.
    """
    two, one = tmp_path / "two", tmp_path / "one"
    (tmp_path / "mine.sh").write_text(replaced(
        MACHINES, ("--nproc-per-node=8", "--nproc-per-node=1"), ("/shared/mine", str(two))
    ).rstrip() + f" {shlex.join([*SMALL, *OPTIONS, '--device', 'cpu', '--steps', '4'])}\n")
    started = [subprocess.Popen([*machine, "bash", "mine.sh"], cwd=tmp_path, text=True,
                                # No name server can be reached from there.
                                env=environment(RES_OPTIONS="timeout:1 attempts:1"),
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
               for machine in machines]
    try:
        for process in started:
            told, _ = process.communicate(timeout=120)
            assert process.returncode == 0, told
    finally:
        for process in started:
            process.kill()
    done = run_job(one, *OPTIONS, "--steps", "4")
    assert done.returncode == 0, done.stderr
    assert len(losses(two)) == 4 and losses(two) == losses(one)


def test_a_preempted_job_saves_and_the_same_file_resumes(tmp_path):
    """
    SIGTERM for torchrun, as Slurm sends it to the steps of a job. Breaks where ranks end before
    they have saved.
    Proves I10, `signals`, `take_up`, `Job.train_and_finish`.
    """
    told = []
    for ends, words in ((signal.SIGTERM, "; the same command resumes from there"),
                        (signal.SIGKILL, ": resumes from ")):
        process = slurm(tmp_path, *SMALL, *OPTIONS, "--device", "cpu", "--steps", "100000")
        trains = False
        try:
            for line in process.stdout:
                told.append(line)
                if ends == signal.SIGTERM and "bits/byte" in line and not trains:
                    trains = True
                    os.kill(agent_of(process), ends)
                if words in line:
                    break
            assert words in told[-1], "".join(told)
            assert int(re.match(r"step (\d+): ", told[-1])[1]) >= 2
            if ends == signal.SIGTERM:
                process.communicate(timeout=60)
                assert process.returncode
        finally:
            if process.poll() is None:
                # Its ranks end with it.
                os.kill(agent_of(process), signal.SIGKILL)
                process.communicate(timeout=10)


def test_the_kubernetes_file_starts_the_command_of_two_machines():
    """
    It has fields of Kubeflow's training operator only, and with the variables that the operator
    sets torchrun reads the same from it as from the command. Breaks with a field of another place.
    """
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load(KUBERNETES)
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert spec.keys() == {"elasticPolicy", "pytorchReplicaSpecs"}
    policy, worker = spec["elasticPolicy"], spec["pytorchReplicaSpecs"]["Worker"]
    assert policy.keys() == {"rdzvBackend", "minReplicas", "maxReplicas", "maxRestarts"}
    assert worker.keys() == {"replicas", "restartPolicy", "template"}
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    assert worker["restartPolicy"] in {"Always", "OnFailure", "Never", "ExitCode"}
    pod = worker["template"]["spec"]
    (container,) = pod["containers"]
    assert container["name"] == "pytorch"
    mounted = [mount["name"] for mount in container["volumeMounts"]]
    assert mounted == [volume["name"] for volume in pod["volumes"]]
    env = {each["name"]: each["value"] for each in container["env"]}
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    # What the operator adds; 23456 is its own port.
    env |= {"PET_RDZV_BACKEND": policy["rdzvBackend"], "PET_RDZV_ENDPOINT": "mine-worker-0:23456",
            "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
            "PET_MAX_RESTARTS": str(policy["maxRestarts"])}
    command = shlex.split(MACHINES.split("torchrun")[1].replace("\\\n", " "))
    found = []
    for argv, around in ((container["command"][1:], env), (command, {})):
        with mock.patch.dict(os.environ, around):
            args = torchrun.parse_args(argv)
            config, *_ = torchrun.config_from_args(args)
        ours = parse_args(args.training_script_args)
        assert (args.module, args.training_script) == (True, "zero3.train")
        found.append((config.nproc_per_node, config.min_nodes, config.max_nodes,
                      config.rdzv_backend, config.max_restarts, ours))
    assert found[0] == found[1]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": found[0][0]}


# -------------------------------------------------------------------------------- folders and links


def saved_apart(folder):
    """The folder has the same path on all ranks, and each rank sees another one there"""
    mine = Path(folder, str(dist.get_rank()))
    mine.mkdir()
    model = Zero3Sequential([Zero3Layer(nn.Linear(4, 4))])
    with (pytest.MonkeyPatch.context() as patch, mock.patch.object(os.path, "realpath", str),
          pytest.raises(RuntimeError) as caught):
        patch.chdir(mine)
        save("checkpoints", model, step=1)
    return str(caught.value)


def test_a_folder_that_machines_do_not_share_is_an_error_on_all_ranks(tmp_path):
    """
    It says on which rank. Breaks where a rank makes the folder for itself.
    Proves `save_load.save`.
    """
    for text in run(saved_apart, 2, tmp_path):
        assert "cannot be saved to checkpoints" in text and "on rank 1" in text, text


def test_each_link_of_the_ring_is_timed(tmp_path):
    """
    One line for each rank and the next one. Breaks where two ranks both send first.
    """
    (tmp_path / "links.py").write_text(LINKS)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = "".join(run(as_main, 2, store.port, tmp_path / "links.py"))
    found = re.findall(r"rank (\d) to rank (\d): \d+\.\d\d GB/s\n", told)
    assert sorted(found) == [("0", "1"), ("1", "0")]


# -------------------------------------------------------------------------------------------- data


def uneven(what, folder):
    """Rank 0 has three batches, rank 1 has two. Returns the steps and the error of this rank"""
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/{what}", rank=rank, world_size=2,
                            timeout=timedelta(seconds=3))
    torch.manual_seed(0)
    model = Zero3Sequential([Zero3Layer(nn.Linear(4, 4)) for _ in range(2)])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=0.1)
    steps = 0
    try:
        for _ in range((3 - rank) * (2 if what == "next epoch" else 1)):
            optimizer.backward(model(torch.ones(2, 4)).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
        if rank and what == "evaluates":
            with torch.no_grad():
                for _ in range(2):
                    model(torch.ones(2, 4))
        if rank and what == "saves":
            save(Path(folder, "checkpoints"), model, optimizer, step=steps)
        if rank and what == "barrier":
            dist.barrier()
    except RuntimeError as error:
        if what == "barrier":
            # Neither finds out from the other one's end.
            Path(folder, f"waited-{rank}").touch()
            while not Path(folder, f"waited-{1 - rank}").exists():
                time.sleep(0.01)
        return steps, str(error)
    finally:
        dist.destroy_process_group()
    return steps, ""


@pytest.mark.parametrize("what", ["ends", "next epoch", "evaluates", "saves", "barrier"])
def test_ranks_with_unequal_numbers_of_batches(what, tmp_path):
    """
    An error at once, or a later one; and the time-out where the other rank waits in a barrier. If
    rank 0 is the first whose time is over, its error says to look for fewer batches; if it is
    rank 1, gloo breaks the connection. The table of the page says which.
    Proves I6, `Transfer.wait`, `diverged`, `Group.advice`, `save_load.save`.
    """
    (steps, text), (other_steps, other) = run(uneven, 2, what, tmp_path)
    assert (steps, other_steps) == ((4, 4) if what == "next epoch" else (2, 2))
    if what in ("ends", "next epoch"):
        assert "the other ranks are lost" in text and "imed out" not in text and not other, text
    elif what == "barrier":
        assert "the other ranks are lost" in text, text
        waited = "within 3 s" in text and "has fewer batches" in text
        assert waited or ("closed by peer" in text and "imed out" in other), (text, other)
    else:
        assert "the ranks diverged" in text and "on rank 1" in text, text
        assert "the ranks diverged" in other and "on rank 0" in other, other
    if what == "saves":
        assert "Got: a save or load of a checkpoint, on rank 1" in text, text
        assert "has fewer batches" in text and "has fewer batches" in other, (text, other)


def test_a_stream_of_files_ends_on_all_ranks_together(tmp_path):
    """
    Three steps, though rank 0 has four batches, and each on the mean of both ranks' losses, as
    plain PyTorch has it on the batches together. The last bits may differ: a mean of two means.
    Breaks where a rank reads files of another one, or goes on alone.
    """
    (tmp_path / "mine.py").write_text(DATA)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = "".join(run(as_main, 2, store.port, tmp_path / "mine.py"))
    ours = [[float(loss) for loss in re.findall(rf"rank {rank}: (.*)\n", told)] for rank in (0, 1)]
    files = [torch.randn(rows, 8, generator=torch.Generator().manual_seed(number))
             for number, rows in enumerate((8, 8, 8, 4))]
    batches = [torch.cat(files[rank::2]).split(4) for rank in (0, 1)]
    assert [len(each) for each in batches] == [4, 3]
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = []
    for pair in zip(*batches, strict=False):
        batch = torch.cat(pair)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    assert len(expected) == 3
    assert [sum(pair) / 2 for pair in zip(*ours, strict=True)] == pytest.approx(expected, rel=1e-6)


def test_the_sampler_gives_each_rank_equally_many_rows():
    """
    Seven rows on two ranks: four each, of which one comes twice, or three each.
    """
    def rows(**options):
        return [[*DistributedSampler(range(7), 2, rank, shuffle=False, **options)]
                for rank in (0, 1)]

    assert rows() == [[0, 2, 4, 6], [1, 3, 5, 0]]
    assert rows(drop_last=True) == [[0, 2, 4], [1, 3, 5]]

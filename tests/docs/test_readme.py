"""
# The README and the programs of its page on use, run as they say

The first runs under torchrun. The others run on ranks that live on from test to test and that are
told what torchrun would tell them.
"""

import contextlib
import io
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run

ROOT = Path(__file__).parents[2]
README, USING = ((ROOT / path).read_text() for path in ("README.md", "docs/using.md"))
BLOCKS = re.findall(r"```python\n(.*?)```", USING, re.DOTALL)
END = "dist.destroy_process_group()\n"


# A word that only this program has.
MARKS = {"gpu": "nccl", "wrap": "wrap(Skips(), ", "muon": "Matrices(", "compile": "compile(",
         "nvme": "Offload(", "checkpoint": "save("}


def program(which, folder):
    """
    One of the programs, with its files in a folder of the test. A CPU stands in for GPUs, except in
    the run of the tests that need them.
    """
    if which == "first":
        return BLOCKS[0]
    (text,) = [block for block in BLOCKS if MARKS[which] in block]
    text = text.replace("/tmp", str(folder)).replace("runs/mine", str(folder / "mine"))
    if which == "gpu" and not torch.cuda.device_count():
        for theirs, ours in (('torch.device("cuda", int(os.environ["LOCAL_RANK"]))',
                              'torch.device("cpu")'), ("torch.cuda.set_device(device)\n", ""),
                             ('"nccl", device_id=device', '"gloo"')):
            assert text.count(theirs) == 1
            text = text.replace(theirs, ours)
    return text


def as_main(port, file):
    """What a program prints on this rank."""
    place = {"RANK": dist.get_rank(), "LOCAL_RANK": dist.get_rank(), "WORLD_SIZE": 2,
             "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
             "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0}
    place = {name: str(value) for name, value in place.items()}
    # The program joins a process group of its own, once all ranks are in this one.
    dist.barrier()
    dist.destroy_process_group()
    told = io.StringIO()
    with mock.patch.dict(os.environ, place), contextlib.redirect_stdout(told):
        runpy.run_path(str(file), run_name="__main__")
    return told.getvalue()


@pytest.mark.parametrize("which", [
    "first", *MARKS, pytest.param("gpu", marks=pytest.mark.gpu(2), id="gpu, on two of them")])
def test_a_program_of_the_readme_runs_on_two_ranks(which, tmp_path):
    """
    Each ends with the shapes of the full parameters, which both ranks print.
    Proves `Zero3Sequential`, `Zero3Optimizer`, `Offload`, `wrap`, `compile`, `Matrices`.
    """
    text = program(which, tmp_path)
    assert text.endswith(END)
    (tmp_path / "mine.py").write_text(text)
    if which == "first" or "nccl" in text:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                   "--nproc_per_node=2", "mine.py"]
        root = str(ROOT)
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300,
                              env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": root})
        assert done.returncode == 0, done.stderr
        told = done.stdout
    else:
        # Where torchrun has it: beside the ranks, which find each other there.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        told = "".join(run(as_main, 2, store.port, tmp_path / "mine.py"))
    assert which != "checkpoint" or told.count("{'epoch': 1}") == 2
    names = dict.fromkeys(("wrap", "muon", "compile"), "'blocks.3.0.weight': (64, 64)")
    assert told.count(names.get(which, "'3.0.weight': (64, 64)")) == 2


def test_every_program_of_the_page_on_use_is_tested():
    """
    Breaks if a block is no program, or if no test runs it.
    """
    assert len(BLOCKS) == 1 + len(MARKS) and all(block.endswith(END) for block in BLOCKS)


def test_the_page_on_work_says_what_was_measured_on_a_gpu():
    """
    On that GPU and with that torch. No layer began before its copy had ended, and the rounds differ
    as much as the page says.
    """
    told = json.loads((ROOT / "docs/gpu.json").read_text())
    overlap, text = told["overlap"], " ".join((ROOT / "docs/working.md").read_text().split())
    machine = told["machine"]
    assert f"one rank, one {machine['gpu']}" in text
    assert f"with torch {machine['torch'].rpartition('.')[0]}, gave" in text
    assert min(overlap["us_from_the_end_of_a_copy_to_its_layer"]) > 0
    layers, width = overlap["layers"], overlap["width"]
    assert f"A chain of {layers} matrices of {width} by {width}" in text
    spread = max(max(each) / min(each) for each in told["small"]["tokens_per_s"].values())
    assert f"Rounds of the small model differ by up to {spread:.1f} times" in text


def test_the_readme_is_short_and_shows_the_first_program():
    """
    The one that the page on use begins with. Breaks where one of the two is changed alone.
    """
    assert len(README.splitlines()) <= 130
    assert f"```python\n{BLOCKS[0]}```" in README

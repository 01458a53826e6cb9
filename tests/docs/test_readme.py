"""
# The README and the programs of its page on use, run as they say

The first runs under torchrun. The others differ from it in a few lines, so they run on ranks that
live on from test to test and that are told what torchrun would tell them.
"""

import contextlib
import io
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


def program(which, folder):
    """
    The first block, with lines of it replaced by another block as the text between them says; or
    with the block about checkpoints before its last line. Without two GPUs a CPU stands in for
    them.
    """
    first, *others = BLOCKS
    if which in ("compile", "muon"):
        wrapped = program("wrap", folder)
        mark = {"compile": "compile(", "muon": "Matrices("}[which]
        (block,) = [block for block in others if mark in block]
        (model,) = re.findall(r"^model = wrap.*\n", wrapped, re.MULTILINE)
        (optimizer,) = re.findall(r"^optimizer = .*\n", wrapped, re.MULTILINE)
        return wrapped.replace(optimizer, "").replace(model, block)
    if which == "gpu":
        lines = first.splitlines(keepends=True)
        begin = next(i for i, line in enumerate(lines) if "init_process_group" in line)
        (block,) = [block for block in others if "nccl" in block]
        return "".join([*lines[:begin], block, *lines[begin + 3 :]]).replace(
            "model(x), y", "model(x.to(device)), y.to(device)")
    lines = [line for name in (["layers", "model", "optimizer"] if which == "wrap" else
                               ["model", "optimizer"]) for line in first.splitlines()
             if line.startswith(f"{name} =")]
    mark = {"first": "save(", "wrap": "class Skips", "nvme": "Offload("}[which]
    (block,) = [block for block in others if mark in block]
    if which == "first":
        return first.replace(END, f"{block}print(extra)\n{END}")
    assert len(lines) == (3 if which == "wrap" else 2)
    for line in lines[1:]:
        first = first.replace(f"{line}\n", "")
    return first.replace(f"{lines[0]}\n", block.replace("/tmp", str(folder)))


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


@pytest.mark.parametrize("which", ["first", "wrap", "muon", "compile", "nvme", "gpu"])
def test_a_program_of_the_readme_runs_on_two_ranks(which, tmp_path):
    """
    Each ends with the shapes of the full parameters, which both ranks print.
    Proves `Zero3Sequential`, `Zero3Optimizer`, `Offload`, `wrap`, `compile`, `Matrices`.
    """
    text = program(which, tmp_path)
    if which == "gpu" and torch.cuda.device_count() < 2:
        for theirs, ours in (('torch.device("cuda", int(os.environ["LOCAL_RANK"]))',
                              'torch.device("cpu")'), ("torch.cuda.set_device(device)\n", ""),
                             ('"nccl", device_id=device', '"gloo"')):
            assert text.count(theirs) == 1
            text = text.replace(theirs, ours)
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
    assert which != "first" or told.count("{'epoch': 1}") == 2
    names = dict.fromkeys(("wrap", "muon", "compile"), "'blocks.3.0.weight': (64, 64)")
    assert told.count(names.get(which, "'3.0.weight': (64, 64)")) == 2


def test_the_readme_is_short_and_shows_the_first_program():
    """
    The one that the page on use begins with. Breaks where one of the two is changed alone.
    """
    assert len(README.splitlines()) <= 130
    assert f"```python\n{BLOCKS[0]}```" in README

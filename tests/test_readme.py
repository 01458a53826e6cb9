"""
# The programs in README.md, run as it says
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(),
                    re.DOTALL)


def program(which, folder):
    """
    The first block, with lines of it replaced by another block as the text between them says; or
    with the block about checkpoints in the end. Without two GPUs a CPU stands in for them.
    """
    first, *others = BLOCKS
    if which == "gpu":
        lines = first.splitlines(keepends=True)
        begin = next(i for i, line in enumerate(lines) if "init_process_group" in line)
        (block,) = [block for block in others if "nccl" in block]
        return "".join([*lines[:begin], block, *lines[begin + 3 :]]).replace(
            "model(x), y", "model(x.to(device)), y.to(device)")
    lines = [line for name in (["layers", "model", "optimizer"] if which == "wrap" else
                               ["model", "optimizer"]) for line in first.splitlines()
             if line.startswith(f"{name} =")]
    mark = {"first": "save(", "wrap": "wrap(", "nvme": "Offload("}[which]
    (block,) = [block for block in others if mark in block]
    if which == "first":
        return f"{first}{block}print(extra)\n"
    assert len(lines) == (3 if which == "wrap" else 2)
    for line in lines[1:]:
        first = first.replace(f"{line}\n", "")
    return first.replace(f"{lines[0]}\n", block.replace("/mnt/nvme", str(folder)))


@pytest.mark.parametrize("which", ["first", "wrap", "nvme", "gpu"])
def test_a_program_of_the_readme_runs_on_two_ranks(which, tmp_path):
    """
    Each ends with the shapes of the full parameters, which both ranks print.
    Proves `Zero3Sequential`, `Zero3Optimizer`, `Offload`, `wrap`.
    """
    text = program(which, tmp_path)
    if which == "gpu" and torch.cuda.device_count() < 2:
        for theirs, ours in (('torch.device("cuda", int(os.environ["LOCAL_RANK"]))',
                              'torch.device("cpu")'), ("torch.cuda.set_device(device)\n", ""),
                             ('"nccl", device_id=device', '"gloo"')):
            assert text.count(theirs) == 1
            text = text.replace(theirs, ours)
    (tmp_path / "mine.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
         "mine.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[1])})
    assert done.returncode == 0, done.stderr
    assert which != "first" or done.stdout.count("{'epoch': 1}") == 2
    names = {"wrap": "'blocks.3.0.weight': (64, 64)"}
    assert done.stdout.count(names.get(which, "'3.0.weight': (64, 64)")) == 2

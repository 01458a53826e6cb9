"""
# Ranks from Python: they answer in order, and an error is told
"""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from zero3.train import launch

run = partial(launch.run, device="cpu")


def who():
    return dist.get_rank(), launch.my_device(), torch.get_num_threads()


def asks_nvml():
    return os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]


def test_each_rank_answers_and_the_answers_are_in_rank_order():
    """
    Ranks on the CPU compute on the CPU, with a thread each.
    Proves `launch.run`, `my_device`.
    """
    cpu = torch.device("cpu")
    assert run(who, 3) == [(0, cpu, 1), (1, cpu, 1), (2, cpu, 1)]
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
        launch.run(who, 2, device="cuda")


def test_a_module_may_ask_for_a_gpu_before_the_ranks_are_forked():
    """
    Breaks without the variable, which forked ranks inherit: CUDA would start with the question, and
    works in no process that is forked later.
    Proves `launch.run`.
    """
    assert run(asks_nvml, 1) == ["1"]


PRELOADS = """
import sys

from zero3.train import launch


def has(*modules):
    return [module in sys.modules for module in modules]


if __name__ == "__main__":
    launch.preload("zero3.estimate")
    print(launch.run("mine:has", 1, "zero3.estimate", "zero3.pipeline", device="cpu"))
"""


def test_what_is_preloaded_need_not_be_imported_by_each_rank(tmp_path):
    """
    And nothing else is there. In a process of its own, for the server of this one has started.
    Proves `preload`.
    """
    (tmp_path / "mine.py").write_text(PRELOADS)
    done = subprocess.run([sys.executable, tmp_path / "mine.py"], capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    assert done.stdout == "[[True, False]]\n", done.stderr


def test_there_is_a_rank_for_each_gpu_or_two(monkeypatch):
    """Proves `default_ranks`."""
    for gpus, ranks in ((0, 2), (1, 1), (4, 4)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert launch.default_ranks() == ranks


def fails(how):
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("no such thing")
        os._exit(3)


def test_an_error_on_a_rank_is_told_with_its_traceback():
    """
    Also of a rank that ends without a word. Breaks where a rank's exception stays in its process.
    Proves `launch.run`, `_answer`, `_rank`.
    """
    with pytest.raises(AssertionError, match=r"rank 1:\n(.|\n)*ValueError: no such thing"):
        run(fails, 2, "raises")
    with pytest.raises(AssertionError, match="rank 1: the process ended without an answer"):
        run(fails, 2, "leaves")


def test_a_worker_by_name_is_the_file_as_it_is_now(tmp_path, monkeypatch):
    """
    As a notebook needs it, whose cell writes the file. Breaks where the module of before is kept.
    Proves `launch.run`.
    """
    monkeypatch.syspath_prepend(tmp_path)
    for answer in (1, 22):
        (tmp_path / "worker_of_mine.py").write_text(f"def give():\n    return {answer}\n")
        assert run("worker_of_mine:give", 1) == [answer]

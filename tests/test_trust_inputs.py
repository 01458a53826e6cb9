"""
# What is passed is checked: hostile options, wrong arguments, too little of everything
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from zero3 import disk, estimate, train
from zero3.options import folder, one_line, real, whole, within

NUMBERS = ["nan", "inf", "-inf", "-1", "", "x", "1e999", "9" * 400, "1\n2", "\x1b[31m"]


def one_error(code, text):
    """The line that a command left, after the checks that all of them share."""
    assert code == 2
    assert text.count("\n") == 1 and text.endswith("\n"), text
    assert "Traceback" not in text and "What to do: " in text, text
    assert text.strip().isprintable()
    return text


def refused(capsys, main, *options):
    capsys.readouterr()
    try:
        code = main(list(options))
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert out == ""
    return one_error(code, err)


@pytest.mark.parametrize("option", ["--params", "--ranks", "--gpu", "--cpu", "--nvme", "--layers",
                                    "--tokens", "--tflops"])
def test_a_hostile_number_is_one_line_of_the_estimate(option, capsys):
    """
    Not finite, negative, empty, no number, too large to multiply, with escape codes. Breaks where a
    NaN passes because it is neither too small nor too large.
    Proves `estimate.main`, `Parser`, `Parser.error`, `one_line`.
    """
    given = {"--params": "8b", "--ranks": "2", "--gpu": "80GB"}
    for value in [*NUMBERS, *(["0"] if option not in ("--gpu", "--cpu", "--nvme") else [])]:
        options = [f"{name}={text}" for name, text in {**given, option: value}.items()]
        assert option in refused(capsys, estimate.main, *options)


def test_a_hostile_option_is_one_line_of_the_benchmark(capsys, tmp_path):
    """
    Found before anything is measured, so at once. Breaks where the picture is first looked at
    after two minutes.
    Proves `disk.main`, `check_picture`, `options.folder`, `within`.
    """
    (tmp_path / "file.png").mkdir()
    here = f"--folder={tmp_path}"
    for option in ("--mib", "--rounds"):
        for value in [*NUMBERS, "0", str(1 << 62)]:
            assert option in refused(capsys, disk.main, "bench", here, f"{option}={value}")
    for wrong in ("", "/nowhere", __file__, "/proc", "/sys"):
        assert "--folder" in refused(capsys, disk.main, "bench", f"--folder={wrong}")
    for wrong in ("", "x.exe", f"{tmp_path}/file.png", f"{__file__}/x.png", "/proc/1/x.png"):
        told = refused(capsys, disk.main, "bench", here, f"--picture={wrong}")
        assert "cannot draw --picture" in told or "folder of --picture" in told
    refused(capsys, disk.main)
    # As much as no disk has, and less than a file system takes for a file.
    told = refused(capsys, disk.main, "bench", here, "--mib", str(1 << 23))
    assert "Expected: a folder with room for 8388608 MiB" in told


def test_without_a_name_no_picture_is_left_anywhere(tmp_path, monkeypatch, capsys):
    """
    And none of the figures waits for the others. Breaks where the benchmark draws `runs/disk.png`
    wherever it was started.
    Proves `show`, `disk.sweep`.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(disk, "WAYS", disk.WAYS[:2])
    disk.main(["bench", "--folder", ".", "--mib", "64", "--rounds", "2"])
    out, err = capsys.readouterr()
    assert [line[:14] for line in err.splitlines()] == [f"round {i} of 2: " [:14] for i in (1, 1, 2, 2)]
    assert "wrote" not in out and not list(tmp_path.iterdir())

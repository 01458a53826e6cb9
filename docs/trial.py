r"""
# Try a mutation: the same program, with and without it

A `Mutation` is a few lines of the source and the lines that replace them. `Trials` copies the
package, applies the mutation to the copy, and runs a program of `programs.py` with it on two ranks.

To show the purpose of a line, remove it and train. A process imports a module only once, so each
trial needs new processes. Importing torch takes seconds, but a fork takes almost no time. So all
ranks are forked from a process that has imported torch and nothing of the package. Each rank then
imports the copy of the package, and verifies that it is the copy.

$$\text{seconds} = t_\text{torch} + \sum_\text{trials} t_\text{program}
\qquad \text{instead of} \qquad \sum_\text{trials} (t_\text{torch} + t_\text{program})$$

**Run this**: `python -m docs.mutations`.

**Not covered, and what that costs**: GPUs. All ranks run on the CPU, so the list has no mutations
of streams, whose effects only a GPU shows.
"""

import compileall
import contextlib
import difflib
import importlib
import importlib.util
import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).parents[1]
RANKS = 2


@dataclass(frozen=True)
class Mutation:
    """
    ## A change of a few lines of the source, and its effect
    """

    name: str  # short, for the command line
    file: str  # in the package
    section: str  # the function with these lines, and its class
    old: str  # whole lines that the file contains once
    new: str  # their replacement
    breaks: str  # the invariant, such as "I4", or nothing
    program: str  # the program of `programs.py` that shows the effect
    healthy: str  # the beginning of a line that it prints without the mutation
    symptom: str  # the beginning of a line that it prints with the mutation
    why: str  # in Markdown
    title: str

    def lines(self) -> tuple[int, int]:
        """
        ### The first and the last line of `old` in the file, counted from 1

        Raises `ValueError` unless the file contains these lines exactly once.
        """
        text = source(self.file)
        begin = text.find(self.old)
        whole = self.old.endswith("\n") and text[begin - 1 : begin] in ("", "\n")
        if text.count(self.old) != 1 or not whole:
            raise ValueError(
                f"mutation {self.name}. Expected: whole lines that are in zero3/{self.file} once. "
                f"Got: its `old`, {text.count(self.old)} times. What to do: copy the lines as they "
                "are now.")
        first = text.count("\n", 0, begin) + 1
        return first, first + self.old.count("\n") - 1

    @property
    def line(self) -> int:
        """
        ### The first line of `old` in the file
        """
        return self.lines()[0]

    def text(self) -> str:
        """
        ### The file with the mutation
        """
        self.lines()
        return source(self.file).replace(self.old, self.new)

    def diff(self) -> str:
        """
        ### What changes in the file, with the line numbers of `diff -u`
        """
        rows = difflib.unified_diff(
            source(self.file).splitlines(), self.text().splitlines(), f"zero3/{self.file}",
            f"zero3/{self.file}", lineterm="", n=1)
        return "\n".join(rows)


def source(file: str) -> str:
    """
    ## A file of the package
    """
    return (ROOT / "zero3" / file).read_text()


class Trials:
    """
    ## The processes that try mutations

    Use it in a `with` block, which ends all of them.
    """

    def __enter__(self) -> "Trials":
        # Compile the package once, and not in each rank of each trial.
        self.copy = tempfile.TemporaryDirectory()
        shutil.copytree(ROOT / "zero3", f"{self.copy.name}/zero3",
                        ignore=shutil.ignore_patterns("__pycache__"))
        compileall.compile_dir(self.copy.name, quiet=2)
        # In a new session, so that `__exit__` can kill this process and all its ranks at once.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "docs.trial"], cwd=ROOT, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True, start_new_session=True)
        return self

    def __exit__(self, *exception) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
        self.copy.cleanup()

    def run(self, program: str, mutation: Mutation | None = None, limit_s: float = 60) -> str:
        """
        ### Run a program, with or without a mutation, and return the output of its ranks

        * `limit_s` is the time limit. A rank that has not finished then is killed, because a
          mutation may hang

        A line that all ranks print appears once. Other lines appear with their rank. An exception
        is the last line of its rank. Raises `RuntimeError` if the process that forks ranks has
        ended.
        """
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(self.copy.name, folder, dirs_exist_ok=True)
            if mutation:
                mutated = Path(folder, "zero3", mutation.file)
                mutated.write_text(mutation.text())
                Path(importlib.util.cache_from_source(mutated)).unlink(missing_ok=True)
            assert self.process.stdin and self.process.stdout
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(json.dumps([folder, program, limit_s]) + "\n")
                self.process.stdin.flush()
            if answer := self.process.stdout.readline():
                return json.loads(answer)
            raise RuntimeError("trials. Expected: a process that forks ranks. Got: it ended, with "
                               f"status {self.process.wait()}. What to do: read its output.")


def serve() -> None:
    """
    ## For each line on standard input, fork ranks, run a program and answer with a line
    """
    # Import both once for all forks. Optimizers import the second one in their first step.
    importlib.import_module("torch.distributed")
    importlib.import_module("torch._dynamo")
    # A plain fork is safe, because this process has computed nothing. A computation would start
    # OpenMP's threads. They do not exist in a fork, and the rank would wait for them.
    context = multiprocessing.get_context("fork")
    for line in sys.stdin:
        folder, program, limit_s = json.loads(line)
        said = [Path(folder, f"rank-{rank}") for rank in range(RANKS)]
        ranks = [context.Process(target=_rank, args=(rank, Path(folder), program))
                 for rank in range(RANKS)]
        for process in ranks:
            process.start()
        end_s = time.monotonic() + limit_s
        while time.monotonic() < end_s and any(
                process.is_alive() and not path.exists()
                for process, path in zip(ranks, said, strict=True)):
            time.sleep(0.01)
        for process in ranks:
            process.kill()
            process.join()
        print(json.dumps(_merged([path.read_text().splitlines() if path.exists() else ["no answer"]
                                  for path in said])), flush=True)


def _merged(ranks: list[list[str]]) -> str:
    """
    #### The lines of all ranks
    """
    lines: list[str] = []
    for row in itertools.zip_longest(*ranks):
        alike = len(set(row)) == 1
        lines += row[:1] if alike else [f"rank {i} prints: {said}" for i, said in enumerate(row)
                                        if said is not None]
    return "\n".join(lines)


def _rank(rank: int, folder: Path, program: str) -> None:
    """
    #### Run the program on a rank, and write its output to a file
    """
    import torch
    import torch.distributed as dist

    sys.path.insert(0, str(folder))
    # Programs write to the current folder, which is temporary.
    os.chdir(folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=RANKS, timeout=timedelta(seconds=30))
    programs = importlib.import_module("docs.programs")
    used = importlib.import_module("zero3.layer").__file__
    assert used and Path(used).is_relative_to(folder), f"imported {used}"
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            getattr(programs, program)()
    except Exception as error:
        said.write(f"{type(error).__name__}: {error}\n")
    partial = folder / f"rank-{rank}.partial"
    partial.write_text(said.getvalue())
    partial.rename(folder / f"rank-{rank}")
    # Wait until `serve` kills this rank: if it exited now, the messages of other ranks would fail.
    signal.pause()


if __name__ == "__main__":
    serve()

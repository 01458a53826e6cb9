r"""
# Check an answer to an exercise

`python -m docs.exercises.check 3` replaces functions of the package by the answer to exercise 3,
and reports the claims that hold. A claim is a statement about the answer, such as "the padding is
zero".

The claims are checked in order, on 1, 2 and 3 ranks, up to the first that does not hold on some
rank. Later claims would mostly fail for the same reason. Before the next claim, each rank tells
the others its verdict on this one. Ranks exchange verdicts through files, because a wrong answer
may leave them unable to communicate. If an answer waits forever or crashes the process, the
checker finds the line in the stack that Python then prints.

**Run this**: `make exercise N=1`

**Not covered, and what that costs**: the stderr of the ranks is not shown, so a warning goes
unnoticed. The output of `print` is shown.
"""

import argparse
import faulthandler
import importlib
import json
import linecache
import os
import re
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import zero3
from docs.exercises import claims_alone, claims_inside, claims_list
from docs.exercises.oracle import Case, Claim, Wrong
from docs.exercises.solutions import EXERCISES, ROOT, Exercise, page
from zero3.train import launch

CLAIMS = dict(sorted((claims_alone.CLAIMS | claims_inside.CLAIMS | claims_list.CLAIMS).items()))
# After an error on this rank, the other ranks may wait for its messages and never report a verdict.
PATIENCE_S = 3


class Verdict(NamedTuple):
    """
    ## The result of checking a claim
    """

    status: str  # "ok", "FAILS" or "to do"
    expected: str = ""
    got: str = ""
    where: str = ""  # the rank, and the number of ranks
    time_s: float = 0.0
    is_error: bool = False
    invariant: str = ""  # if it is not the claim's


# ------------------------------------------------------------------------------------------ a rank


def on_rank(folder: str, number: int, answers: list[str], timeout_s: float) -> None:
    """
    ## Check the claims about some answers to an exercise, on this rank

    * `folder` is the folder for the verdicts of all ranks
    * `answers` are names, as for `answer_from`
    """
    # If the process crashes, C++ and the interpreter write the reason to this file.
    stderr = os.open(f"{folder}/stderr.{dist.get_rank()}", os.O_CREAT | os.O_WRONLY)
    os.dup2(stderr, 2)
    faulthandler.enable()
    # This fills new memory with NaN, so that it is not zero by chance.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for i, name in enumerate(answers):
        answer = answer_from(name, number)
        exercise = EXERCISES[number]
        case = Case(answer)
        with in_place(answer, exercise):
            for j, claim in enumerate(CLAIMS[number]):
                faulthandler.dump_traceback_later(timeout_s, exit=True)
                verdict = attempt(claim, case, exercise)
                good = agree(Path(folder), f"{i}.{j}", verdict)
                faulthandler.cancel_dump_traceback_later()
                if not good:
                    break


@contextmanager
def in_place(answer: Any, exercise: Exercise) -> Iterator[None]:
    """
    ## Replace the real methods by the answer's, until the end of the `with` block
    """
    with ExitStack() as stack:
        if exercise.owner:
            for function in exercise.solutions:
                method = function.__name__
                replaced = mock.patch.object(exercise.owner, method, getattr(answer, method))
                stack.enter_context(replaced)
        yield


def answer_from(name: str, number: int) -> Any:
    """
    ## The functions of an answer

    * `name` is "answer" for the reader's file, "solution", or "module:class" for a class with
      these functions. Functions that the class lacks are taken from the solution
    """
    exercise = EXERCISES[number]
    if name == "answer":
        return exercise.module()
    found = vars(exercise.solution())
    if name != "solution":
        module, attribute = name.split(":")
        found |= vars(getattr(importlib.import_module(module), attribute))
    return SimpleNamespace(**found)


def attempt(claim: Claim, case: Case, exercise: Exercise) -> Verdict:
    """
    ## Check a claim
    """
    where = f"rank {dist.get_rank()} of {dist.get_world_size()}"
    try:
        claim.check(case)
    except NotImplementedError as error:
        return Verdict("to do", "an answer", str(error), where, time.time())
    except Wrong as error:
        return Verdict("FAILS", *map(str, error.args), where, time.time())
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)[::-1]
        at = line([(frame.filename, frame.lineno or 0) for frame in frames], exercise)
        got = f"{type(error).__name__}: {error}, {at}"
        return Verdict("FAILS", "no exception", got, where, time.time(), True)
    return Verdict("ok", time_s=time.time())


def line(frames: list[tuple[str, int]], exercise: Exercise) -> str:
    """
    ## The line to show: of the answer if possible, otherwise of this repository

    * `frames` are files and lines, innermost first
    """
    def distance(frame: tuple[str, int]) -> int:
        file = Path(frame[0])
        ours = ROOT in file.parents and "site-packages" not in file.parts
        return 0 if file == exercise.file else 2 - (ours and file.parent != exercise.file.parent)

    file, number = min(frames, key=distance)
    path = Path(file).relative_to(ROOT) if ROOT in Path(file).parents else file
    return f"at {path}, line {number}: `{linecache.getline(file, number).strip()}`"


def agree(folder: Path, which: str, verdict: Verdict) -> bool:
    """
    ## Exchange verdicts on a claim with the other ranks, and return whether it holds on all

    Raises `TimeoutError` if this rank had an error and the others still wait for its messages.
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    partial = folder / f"partial.{rank}"
    partial.write_text(json.dumps(verdict))
    partial.rename(folder / f"{which}.{rank}")
    begin_s = time.time()
    files = [folder / f"{which}.{other}" for other in range(world_size)]
    while not all(file.exists() for file in files):
        if verdict.is_error and time.time() > begin_s + PATIENCE_S:
            raise TimeoutError(f"rank {rank} has an error, and the other ranks wait for it")
        time.sleep(0.002)
    return all(json.loads(file.read_text())[0] == "ok" for file in files)


# ---------------------------------------------------------------------------------------- all ranks


def check(number: int, answers: list[str], world_sizes: tuple[int, ...] = (),
          timeout_s: float = 30) -> list[list[Verdict]]:
    """
    ## Check answers to an exercise: a verdict for each claim, up to the first that does not hold

    * `answers` are names, as for `answer_from`
    * `world_sizes` are the numbers of ranks; the default is the exercise's
    * `timeout_s` is the time limit for one claim
    """
    found: list[list[Verdict]] = [[Verdict("ok") for _ in CLAIMS[number]] for _ in answers]
    for world_size in world_sizes or EXERCISES[number].world_sizes:
        with tempfile.TemporaryDirectory() as folder:
            ended = ""
            try:
                launch.run("docs.exercises.check:on_rank", world_size, folder, number, answers,
                           timeout_s, device="cpu", timeout_s=timeout_s * len(answers) + 30)
            except AssertionError as error:
                ended = str(error)
            for i, verdicts in enumerate(found):
                # Skip claims after one that failed on fewer ranks: fewer ranks are easier to debug.
                for j in range(sum(v.status == "ok" for v in verdicts)):
                    if bad := first_bad(Path(folder), f"{i}.{j}", world_size, number, ended):
                        verdicts[j:] = [bad]
                        break
    return found


def first_bad(folder: Path, which: str, world_size: int, number: int, ended: str
              ) -> Verdict | None:
    """
    ## The verdict of the rank that failed first, if one failed

    The other ranks may have failed because of it. A rank that hangs or crashes has no verdict.
    """
    files = {rank: folder / f"{which}.{rank}" for rank in range(world_size)}
    bad = [Verdict(*json.loads(file.read_text())) for file in files.values() if file.exists()]
    bad = [verdict for verdict in bad if verdict.status != "ok"]
    silent = [rank for rank, file in files.items() if not file.exists()]
    errors = [verdict for verdict in bad if verdict.is_error]
    if silent and len(errors) == len(bad):
        errors += [how_it_ended(folder, rank, world_size, number, ended) for rank in silent]
    return min(errors, key=lambda verdict: verdict.time_s) if errors else next(iter(bad), None)


def how_it_ended(folder: Path, rank: int, world_size: int, number: int, ended: str) -> Verdict:
    """
    ## The verdict on a rank that hangs or has crashed
    """
    stderr = folder / f"stderr.{rank}"
    text = ""
    time_s = time.time()
    if stderr.exists():
        text = stderr.read_text(errors="replace")
        time_s = stderr.stat().st_mtime
    reason = re.search(r"Timeout|Fatal Python error: (.*)", text)
    frames = re.findall(r'File "(.*?)", line (\d+) in', text)
    got = ended or text[-200:]
    if reason:
        got = f"its process crashed ({reason[1]})" if reason[1] else "it waits forever"
        at = [(name, int(at)) for name, at in frames]
        got += f", {line(at, EXERCISES[number])}" if at else ""
        got += ". This happens if memory that is in use is freed" if reason[1] else ""
    return Verdict("FAILS", "every rank finishes", got, f"rank {rank} of {world_size}",
                   time_s if reason else time.time(), True, "I6")


# ------------------------------------------------------------------------------------------ report


def meanings() -> dict[str, str]:
    """
    ## The text of each invariant, from the table of `zero3`, without LaTeX commands
    """
    table = (zero3.__doc__ or "").replace("$", "").replace("_\\ell", "_l")
    table = table.replace("\\lceil ", "ceil(").replace(" \\rceil", ")")
    rows = re.findall(r"^\| (I\d+), (.*?) \| (.*) \|$", table, re.MULTILINE)
    right = "the numbers are right, but"
    return {name: f"{name}, {short}: {text}" for name, short, text in rows} | {
        "time": f"time: {right} communication no longer overlaps computation",
        "idle": f"idle: {right} ranks wait for each other longer than necessary",
        "kept": f"kept: {right} a rank keeps more activations than necessary",
        "sent": f"sent: {right} a rank sends more than necessary"}


def report(number: int, name: str, verdicts: list[Verdict]) -> str:
    """
    ## The report for the reader

    * `name` is "answer" or "solution"
    """
    exercise = EXERCISES[number]
    claims = CLAIMS[number]
    last = verdicts[-1]
    file = exercise.file.relative_to(ROOT) if name == "answer" else "the solution"
    functions = " and ".join(f"`{f.__name__}`" for f in exercise.solutions)
    shown = [page(number).title, f"{functions} in {file}", ""]
    for claim, verdict in zip(claims, verdicts, strict=False):
        invariant = verdict.invariant or claim.invariant
        shown.append(f"{verdict.status:6} {invariant:4} {claim.text}")
    rest = claims[len(verdicts) :]
    if last.status == "to do":
        shown += [f"{'':6} {claim.invariant:4} {claim.text}" for claim in rest]
        shown += what_to_do(exercise, last)
    elif last.status == "FAILS":
        shown += what_fails(exercise, last, last.invariant or claims[len(verdicts) - 1].invariant)
        if rest:
            shown.append(f"{len(rest)} more checks follow this one.")
        shown.append(wrapped("Read again: ", f"the task, at the top of {exercise.file.name}. A "
                             f"solution is at {' and '.join(page(number).source)}; `make exercise "
                             f"N={number} ARGS=--solution` shows it."))
    else:
        shown += ["", f"All {len(claims)} checks hold{on_ranks(exercise)}."]
        shown.append(wrapped("Read next: ", f"{' and '.join(page(number).source)}."))
        if number + 1 in EXERCISES:
            shown.append(f"The next exercise is `make exercise N={number + 1}`.")
    return "\n".join(shown)


def what_to_do(exercise: Exercise, last: Verdict) -> list[str]:
    return ["", wrapped("What to do: ", last.got),
            wrapped("Read first: ", f"the task, at the top of {exercise.file.name}. Each line "
                    "above is a check, with the invariant that it belongs to.")]


def what_fails(exercise: Exercise, last: Verdict, invariant: str) -> list[str]:
    margin = " " * 12
    lines = [wrapped(f"{margin}Expected: ", last.expected), wrapped(f"{margin}Got: ", last.got)]
    if len(exercise.world_sizes) > 1:
        lines.append(f"{margin}On: {last.where}")
    if "nan" in last.got:
        lines.append(f"{margin}nan marks memory that has not been written.")
    return [*lines, "", wrapped("", meanings()[invariant] + ".")]


def on_ranks(exercise: Exercise) -> str:
    *most, last = map(str, exercise.world_sizes)
    return f", on {', '.join(most)} and {last} ranks" if most else ""


def wrapped(before: str, text: str) -> str:
    return textwrap.fill(before + text, 100, subsequent_indent=" " * len(before),
                         break_long_words=False, break_on_hyphens=False)


def cannot_be_read(exercise: Exercise) -> str:
    """
    ## The reason why the reader's file cannot be imported, or an empty text
    """
    try:
        module = exercise.module()
    except SyntaxError as error:
        return "".join(traceback.format_exception_only(error))
    missing = [f.__name__ for f in exercise.solutions if not hasattr(module, f.__name__)]
    file = exercise.file.relative_to(ROOT)
    if not missing:
        return ""
    return (f"{file} has no function `{missing[0]}`. What to do: rename it back, or start again "
            f"with `git checkout {file}`.")


def main() -> None:
    """
    ## Check and report; the exit status is 1 if a claim does not hold
    """
    parser = argparse.ArgumentParser(prog="python -m docs.exercises.check", description="Check "
                                     "your answer to an exercise.")
    parser.add_argument("number", nargs="?", type=int, choices=EXERCISES, help="of the exercise; "
                        "without it, all exercises are listed")
    parser.add_argument("--solution", action="store_true", help="show the solution and check it, "
                        "not your answer")
    given = parser.parse_args()
    if given.number is None:
        for number, exercise in EXERCISES.items():
            print(f"{page(number).title:45} {exercise.file.relative_to(ROOT)}")
        print("\nRead the task at the top of a file, fill in the function below it, and run `make "
              "exercise N=1`.")
        return
    name = "solution" if given.solution else "answer"
    if problem := cannot_be_read(EXERCISES[given.number]):
        sys.exit(problem)
    if given.solution:
        print(f"{page(given.number).solution}\n")
    launch.preload("docs.exercises.claims_inside", "docs.exercises.claims_list")
    verdicts = check(given.number, [name])[0]
    print(report(given.number, name, verdicts))
    sys.exit(verdicts[-1].status != "ok")


if __name__ == "__main__":
    main()

r"""
# Check an answer to an exercise

`python -m docs.exercises.check N` puts the functions of exercise N in the place of the real ones,
and says which claims hold.

On 1, 2 and 3 ranks each claim is tried in turn, up to the first that does not hold on one of them:
what comes after it would mostly fail for the same reason. A rank tells the others how a claim went
before any of them goes on. It does so through files, for an answer may have left the ranks unable
to send each other anything; and one that waits for ever, or ends the process, is told from what
Python then writes about where it was.

**Run this**: `make exercise N=1`

**Not covered, and what that costs**: what ranks write to stderr is not shown; `print` in an answer
is.
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
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import zero3
from docs.exercises import claims_alone, claims_inside
from docs.exercises.oracle import Case, Claim, Wrong
from docs.exercises.solutions import EXERCISES, ROOT, Exercise, page
from zero3.train import launch

CLAIMS = dict(sorted((claims_alone.CLAIMS | claims_inside.CLAIMS).items()))
# After an error on this rank alone, others may wait for its messages, and not hear of it.
PATIENCE_S = 3


class Verdict(NamedTuple):
    """
    ## How a claim went
    """

    status: str  # "ok", "FAILS" or "to do"
    expected: str = ""
    got: str = ""
    where: str = ""  # rank and number of ranks
    time_s: float = 0.0
    is_error: bool = False
    invariant: str = ""  # in place of the claim's


# ------------------------------------------------------------------------------------------ a rank


def on_rank(folder: str, number: int, answers: list[str], timeout_s: float) -> None:
    """
    ## Try the claims about some answers to an exercise, on this rank

    * `folder` is where the ranks write the verdicts
    * `answers` are as for `answer_from`
    """
    # C++ and the interpreter write here what they have to say in the end.
    stderr = os.open(f"{folder}/stderr.{dist.get_rank()}", os.O_CREAT | os.O_WRONLY)
    os.dup2(stderr, 2)
    faulthandler.enable()
    # What is in new memory is NaN then, and never by luck a zero.
    torch.use_deterministic_algorithms(True, warn_only=True)
    for i, name in enumerate(answers):
        answer, exercise = answer_from(name, number), EXERCISES[number]
        case = Case(answer)
        with ExitStack() as stack:
            for function in exercise.solutions if exercise.owner else ():
                at = function.__name__
                stack.enter_context(mock.patch.object(exercise.owner, at, getattr(answer, at)))
            for j, claim in enumerate(CLAIMS[number]):
                faulthandler.dump_traceback_later(timeout_s, exit=True)
                verdict = attempt(claim, case, exercise)
                good = agree(Path(folder), f"{i}.{j}", verdict)
                faulthandler.cancel_dump_traceback_later()
                if not good:
                    break


def answer_from(name: str, number: int) -> Any:
    """
    ## The functions of an answer

    * `name` is "answer" for the reader's file, "solution", or "module:class" for what has functions
      of these names; those that it has not are the solution's
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
    ## Try a claim
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
    ## The line to look at: the answer's, or one of this repository

    * `frames` are files and lines, the innermost first
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
    ## Tell the other ranks how a claim went, and wait for theirs: whether it holds on all

    Raises `TimeoutError` where this rank had an error, and others still wait for its messages.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    partial = folder / f"partial.{rank}"
    partial.write_text(json.dumps(verdict))
    partial.rename(folder / f"{which}.{rank}")
    begin_s = time.time()
    files = [folder / f"{which}.{other}" for other in range(world_size)]
    while not all(file.exists() for file in files):
        if verdict.is_error and time.time() > begin_s + PATIENCE_S:
            raise TimeoutError(f"rank {rank} has an error, and the others wait for it")
        time.sleep(0.002)
    return all(json.loads(file.read_text())[0] == "ok" for file in files)


# ---------------------------------------------------------------------------------------- all ranks


def check(number: int, answers: list[str], world_sizes: tuple[int, ...] = (),
          timeout_s: float = 30) -> list[list[Verdict]]:
    """
    ## Check answers to an exercise: a verdict for each claim, up to the first that does not hold

    * `answers` are as for `answer_from`
    * `world_sizes` are the numbers of ranks; left out, the exercise's
    * `timeout_s` is how long one claim may take
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
                # Up to what fewer ranks found already: they are easier to think about.
                for j in range(sum(v.status == "ok" for v in verdicts)):
                    if bad := first_bad(Path(folder), f"{i}.{j}", world_size, number, ended):
                        verdicts[j:] = [bad]
                        break
    return found


def first_bad(folder: Path, which: str, world_size: int, number: int, ended: str
              ) -> Verdict | None:
    """
    ## The rank that was the first to find a claim wrong, if there is one

    What it left undone made others fail. A rank that never came to an end has no verdict.
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
    ## Why a rank has no verdict: it waited too long, or its process ended
    """
    stderr, text, time_s = folder / f"stderr.{rank}", "", time.time()
    if stderr.exists():
        text, time_s = stderr.read_text(errors="replace"), stderr.stat().st_mtime
    reason = re.search(r"Timeout|Fatal Python error: (.*)", text)
    frames = re.findall(r'File "(.*?)", line (\d+) in', text)
    got = ended or text[-200:]
    if reason:
        got = f"its process ended ({reason[1]})" if reason[1] else "it waits for ever"
        at = [(name, int(at)) for name, at in frames]
        got += f", {line(at, EXERCISES[number])}" if at else ""
        got += ". So it does where memory is freed that is in use" if reason[1] else ""
    return Verdict("FAILS", "every rank comes to the end", got, f"rank {rank} of {world_size}",
                   time_s if reason else time.time(), True, "I6")


# ------------------------------------------------------------------------------------------- shown


def meanings() -> dict[str, str]:
    """
    ## What each invariant says, from the table of `zero3`, without the signs of LaTeX
    """
    table = (zero3.__doc__ or "").replace("$", "").replace("_\\ell", "_l")
    table = table.replace("\\lceil ", "ceil(").replace(" \\rceil", ")")
    rows = re.findall(r"^\| (I\d+), (.*?) \| (.*) \|$", table, re.MULTILINE)
    time_says = "the numbers are right, but the wait for messages is no longer hidden"
    return {name: f"{name}, {short}: {text}" for name, short, text in rows} | {
        "time": f"time: {time_says}"}


def report(number: int, name: str, verdicts: list[Verdict]) -> str:
    """
    ## What the reader is told

    * `name` is "answer" or "solution"
    """
    exercise, claims, last = EXERCISES[number], CLAIMS[number], verdicts[-1]
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
        shown += [f"After this one come {len(rest)} more checks."] * bool(rest)
        shown.append(wrapped("Read again: ", f"the task, at the top of {exercise.file.name}. A "
                             f"solution is at {' and '.join(page(number).source)}; `make exercise "
                             f"N={number} ARGS=--solution` shows it."))
    else:
        shown += ["", f"All {len(claims)} checks hold{on_ranks(exercise)}."]
        shown.append(wrapped("Read next: ", f"{' and '.join(page(number).source)}, where zero3 "
                             "does it."))
        shown += [f"Then comes `make exercise N={number + 1}`."] * (number + 1 in EXERCISES)
    return "\n".join(shown)


def what_to_do(exercise: Exercise, last: Verdict) -> list[str]:
    return ["", wrapped("What to do: ", last.got),
            wrapped("Read first: ", f"the task, at the top of {exercise.file.name}. Each line "
                    "above is a check, with the invariant that it looks after.")]


def what_fails(exercise: Exercise, last: Verdict, invariant: str) -> list[str]:
    margin = " " * 12
    lines = [wrapped(f"{margin}Expected: ", last.expected), wrapped(f"{margin}Got: ", last.got)]
    if len(exercise.world_sizes) > 1:
        lines.append(f"{margin}On: {last.where}")
    if "nan" in last.got:
        lines.append(f"{margin}nan is what the checker puts where nobody has written.")
    return [*lines, "", wrapped("", meanings()[invariant] + ".")]


def on_ranks(exercise: Exercise) -> str:
    *most, last = map(str, exercise.world_sizes)
    return f", on {', '.join(most)} and {last} ranks" if most else ""


def wrapped(before: str, text: str) -> str:
    return textwrap.fill(before + text, 100, subsequent_indent=" " * len(before),
                         break_long_words=False, break_on_hyphens=False)


def cannot_be_read(exercise: Exercise) -> str:
    """
    ## What keeps the reader's file from being imported, or nothing
    """
    try:
        module = exercise.module()
    except SyntaxError as error:
        return "".join(traceback.format_exception_only(error))
    missing = [f.__name__ for f in exercise.solutions if not hasattr(module, f.__name__)]
    file = exercise.file.relative_to(ROOT)
    return (missing and (f"{file} has no function `{missing[0]}`. What to do: give it this name "
                        f"again, or begin anew with `git checkout {file}`.")) or ""


def main() -> None:
    """
    ## Check, and say how it went; the exit status is 1 where a claim does not hold
    """
    parser = argparse.ArgumentParser(prog="python -m docs.exercises.check", description="Check "
                                     "your answer to an exercise.")
    parser.add_argument("number", nargs="?", type=int, choices=EXERCISES, help="of the exercise; "
                        "left out, all are listed")
    parser.add_argument("--solution", action="store_true", help="show the solution, and check it "
                        "in place of your answer")
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
    launch.preload("docs.exercises.claims_inside")
    verdicts = check(given.number, [name])[0]
    print(report(given.number, name, verdicts))
    sys.exit(verdicts[-1].status != "ok")


if __name__ == "__main__":
    main()

"""
# Runs that are killed, by the system's own means, and started again

Against a run that nobody disturbs, bit for bit. The workers are in `survivor.py`.
"""

import random
import time
from collections import Counter
from itertools import pairwise

import pytest

from tests.checkpoint.survivor import die_everywhere, survive
from tests.ranks import run
from zero3.checkpoint.reader import MANIFEST
from zero3.train.launch import _CONTEXT, _answer, _rank

KILLS, FOREVER = 50, 1 << 40
# A save of each kind, and one more that has to clear away after both.
REST = 4


class Life:
    """
    Two ranks, from their start to their end.
    """

    def __init__(self, scratch, folder, steps):
        scratch.mkdir()  # a new store each time, as launchers have it
        self.told, marks = _CONTEXT.Pipe(duplex=False)
        self.ranks, self.pipes, self.marks = [], [], []
        for rank in range(2):
            mine, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(target=_rank, daemon=True, args=(
                survive, rank, 2, str(scratch / "store"), "cpu", theirs, (folder, steps, marks)))
            process.start()
            theirs.close()
            self.ranks.append(process)
            self.pipes.append(mine)
        marks.close()

    def kill(self, victims, rng):
        """
        SIGKILL for these ranks, and soon for the others, whether they have noticed or not.
        """
        for pipe, process in zip(self.pipes, self.ranks, strict=True):
            assert process.is_alive(), _answer(pipe, "?", 5)
        for rank in victims:
            self.ranks[rank].kill()
        for process in self.ranks:
            process.join(rng.uniform(0, 0.1))
            process.kill()
        for process in self.ranks:
            process.join()

    def read(self, saves=FOREVER):
        """
        Read what rank 0 says that it does, and since when, to its n-th save or to its end.
        """
        try:
            while not self.marks or sum(word == "save" for word, _ in self.marks) < saves:
                assert self.told.poll(60), f"rank 0 does not go on after {self.marks}"
                word, _, at_s = self.told.recv_bytes().decode().rpartition(" ")
                self.marks.append((word, float(at_s)))
        except (EOFError, OSError):
            pass
        return self.marks


@pytest.fixture
def begin(tmp_path):
    lives = []

    def new(*args):
        lives.append(Life(tmp_path / f"{len(lives)}", *args))
        return lives[-1]

    yield new
    for process in (process for life in lives for process in life.ranks):
        process.kill()


def rows_of(folder):
    """
    Which rows of the table of `reader.py` are in a folder, and the newest step in it.
    """
    rows, steps = [], [0]
    for path in folder.iterdir() if folder.exists() else ():
        whole = (path / MANIFEST).exists() and path.suffix != ".removed"
        rows.append(path.suffix + " with a manifest" * (whole and bool(path.suffix)))
        steps.append(int(path.name[5:13]) * whole)
    return rows, max(steps)


def test_a_run_that_is_killed_at_any_moment_ends_with_the_same_bits(tmp_path, begin):
    """
    Fifty kills, of one rank or of both, and the weights are those of a run without any kill or
    save. A checkpoint that was there is never lost, and no temporary file is left. Breaks where a
    save that was cut off is taken for a checkpoint (have `clean_up_interrupted_saves` rename any
    folder), or where something that a step needs is not saved (leave out `_go_on`, or the moments).
    Proves I10, `save_load.save`, `load`, `clean_up_interrupted_saves`, `newest`.
    """
    rng, folder, newest = random.Random(0), tmp_path / "checkpoints", 0
    seen, during, spent_s, in_writes = Counter(), Counter(), Counter(), 0
    for i in range(KILLS):
        life = begin(folder, FOREVER)
        # From its load on, or from a save: a slow disk shall not keep the run where it is.
        life.read(saves=rng.randrange(4))
        time.sleep(rng.uniform(0, 0.2))
        life.kill(rng.choice([(0,), (1,), (0, 1), (0, 1)]), rng)
        marks = life.read()
        for (word, at_s), (_, until_s) in pairwise(marks):
            spent_s[word] += until_s - at_s
        rows, step = rows_of(folder)
        assert step >= newest, f"life {i} lost step {newest}: {sorted(folder.rglob('*'))}"
        newest, in_writes = step, in_writes + any(rows)
        seen.update({*rows})
        during[marks[-1][0]] += 1
    shares = {word: f"{each / spent_s.total():.0%}" for word, each in spent_s.items()}
    # `pytest -s` shows it.
    print(f"\n{in_writes} of {KILLS} kills left something of a write: {dict(seen)}; rank 0 was in "
          f"{dict(during)}, and there for {shares} of the time; {newest} steps")
    # They fell where they were meant to fall, and the run went on between them.
    assert in_writes >= KILLS // 10 and seen[".partial"] and newest >= KILLS // 10, (seen, during)

    last = begin(folder, newest + REST)
    killed = [_answer(pipe, rank, 60) for rank, pipe in enumerate(last.pipes)]
    assert all(good for good, _ in killed), killed
    undisturbed = run(survive, 2, None, newest + REST, None)
    for (_, (mine, taken)), (expected, all_taken) in zip(killed, undisturbed, strict=True):
        assert (taken, all_taken) == (REST, newest + REST)
        assert [name for name in expected if mine[name] != expected[name]] == []
    files = ("", "/manifest.json", "/rank-00000-of-00002.safetensors",
             "/rank-00001-of-00002.safetensors")
    left = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert left == {f"step-{newest + REST - i:08}{name}" for i in range(2) for name in files}


SAVES = {
    "the first": ((), {"step": 1}),
    "one more": ((1, 2), {"step": 3}),
    "one more, by a thread": ((1, 2), {"step": 3, "keep": 1, "async_write": True}),
    "the same step again": ((3,), {"step": 3, "keep": 1}),
    "an earlier step again": ((2, 5), {"step": 3, "keep": 1}),
    "beside leftovers": ("leftovers", {"step": 3}),
}


@pytest.mark.parametrize("name", SAVES)
def test_a_save_that_is_killed_between_any_two_calls_leaves_the_old_state_or_the_new(tmp_path,
                                                                                     name):
    """
    For each call of a save that changes something on the disk: killed there, the run finds the
    checkpoint before or the new one, bit for bit, and its next save leaves nothing else. Breaks
    where something is removed too early (the oldest checkpoint before `commit_checkpoint`), or a
    manifest is there too early (written under its own name).
    Proves I10, `commit_checkpoint`, `_rename_to_final`, `remove`, `clean_up_interrupted_saves`.
    """
    (old, new, found), = run(die_everywhere, 1, tmp_path, *SAVES[name], fresh=True)
    assert old != new
    only = ["step-00000020", "step-00000020/manifest.json",
            "step-00000020/rank-00000-of-00001.safetensors"]
    states = []
    for calls, _, (state, *left) in found:
        where = f"killed in the last of {calls}"
        if not SAVES[name][0] and "this is no checkpoint" in state:
            state = old
        assert state in (old, new), f"{where}: {state}"
        assert left == only, f"{where}: {left}"
        states.append(state)
    # All the old one, up to a call; from there on the new one.
    assert states == [old] * states.count(old) + [new] * states.count(new) and old in states
    assert [killed for _, killed, _ in found] == [True] * (len(found) - 1) + [False]
    assert [len(calls) for calls, *_ in found] == [*range(1, len(found)), len(found) - 1]
    assert {"open", "pwritev", "ftruncate", "fsync", "rename"} <= {*found[-1][0]}

"""
# Ranks that live on: what one call leaves behind does not reach the next
"""

import os
import resource
import signal
import tempfile
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.ranks import run
from zero3 import Zero3Layer
from zero3.checkpoint.reader import lock_folder
from zero3.comm.collectives import Communicator

CALLS: list[int] = []


def count():
    """Which process answers, how often this file's code has counted there, and what it draws."""
    CALLS.append(1)
    return os.getpid(), len(CALLS), torch.rand(1).item(), dist.get_world_size()


def test_ranks_live_on_and_each_call_finds_them_as_new():
    """
    The same processes answer for two ranks, for one, and again for two. Variables of a test's file
    begin anew with each call, and so do random numbers. Breaks where `_clear` keeps modules that
    a call has imported.
    """
    (zero, *first), (one, *second) = run(count, 2)
    assert zero != one and first == second and first[0] == 1
    assert run(count, 1) == [(zero, *first[:2], 1)]
    assert run(count, 2) == [(zero, *first), (one, *second)]
    ((other, *alone),) = run(count, 1, fresh=True)
    assert other not in (zero, one) and alone == [*first[:2], 1]


def leave(what):
    if what == "a function":
        Communicator.all_gather = lambda *args: None
    elif what == "a data type":
        torch.set_default_dtype(torch.double)
    elif what == "a mode":
        torch.set_grad_enabled(False)
    elif what == "threads":
        torch.set_num_threads(2)
    elif what == "a thread":
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    elif what == "a file":
        os.open("/dev/zero", os.O_RDONLY)
    elif what == "a folder":
        os.chdir("/")
    elif what == "a locked folder":
        lock_folder(Path(tempfile.gettempdir()))
    elif what == "a variable":
        os.environ["OF_A_TEST"] = "1"
    elif what == "a limit":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 40, 1 << 41))
    elif what == "a signal":
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    elif what == "a hook":
        register_optimizer_step_post_hook(lambda *args: None)
    elif what == "a layer":
        nn.kept = Zero3Layer(nn.Linear(2, 2))
    elif what == "a message":
        # Nobody receives it.
        nn.kept = dist.isend(torch.ones(1 << 20), 1 - dist.get_rank())
    return os.getpid()


@pytest.mark.parametrize("what", [
    "nothing", "a locked folder", "a function", "a data type", "a mode", "threads", "a thread",
    "a file", "a folder", "a variable", "a limit", "a signal", "a hook", "a layer", "a message"])
def test_a_rank_that_is_not_as_it_was_ends(what):
    """
    Whatever a worker changes and does not change back: the next call comes to a new process. A
    folder that it saved to is unlocked after the call. Breaks with any line of `_state`, `_clear`
    or `_left` left out.
    """
    world_size = 2 if what == "a message" else 1
    before = run(leave, world_size, what)
    after = run(leave, world_size, "nothing")
    stays = what in ("nothing", "a locked folder")
    assert before == after if stays else {*before}.isdisjoint(after)


def fail(how):
    if dist.get_rank() == 1:
        if how == "raises":
            raise ValueError("no such thing")
        if how == "ends":
            os._exit(3)
        time.sleep(60)
    return os.getpid()


@pytest.mark.parametrize(("how", "error"), [
    ("raises", r"rank 1:\n(.|\n)*ValueError: no such thing"),
    ("ends", "rank 1: the process ended without an answer"),
    ("hangs", "rank 1: no answer after 1 s")])
def test_after_a_call_that_failed_come_new_ranks(how, error):
    """
    The error is told as `launch.run` tells it, and the next call works. Breaks where a rank that
    has answered is kept although another one failed.
    """
    before = run(leave, 2, "nothing")
    with pytest.raises(AssertionError, match=error):
        run(fail, 2, how, timeout_s=1 if how == "hangs" else 60)
    assert {*before}.isdisjoint(run(leave, 2, "nothing"))

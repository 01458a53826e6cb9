"""
# No memory is freed while something uses it: a second look, in every rank of the tests

`watch()` knows nothing of `InFlight`. It wraps what starts something asynchronous: messages,
collectives, blocks of files. Each notes the storages that it uses until its wait has returned, or
until nobody has its handle any more, because gloo has forgotten them then. To resize a storage that
is noted is a violation, whatever the timing was.
"""

import functools
import sys
import threading
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zero3.comm import collectives
from zero3.offload import disk

MESSAGES = ("isend", "irecv")
COLLECTIVES = ("all_gather_single", "reduce_scatter_single", "all_reduce", "all_to_all_single")
# Functions and lines, the innermost first.
Frames = list[tuple[CodeType, int]]
# For each storage, what uses it: its name, and where it started.
_busy: dict[int, dict[object, tuple[str, Frames]]] = {}
_lock = threading.Lock()
_violations: list[str] = []


class Handle:
    """
    ## The handle of something that has started

    It does whatever torch's does, and forgets the storages after the wait. A wait that raises does
    not: something may still be in flight.
    """

    def __init__(self, work: Any, forget: Any):
        self._work = work
        self._forget = forget

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        found = self._work.wait(*args, **kwargs)
        self._forget()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)

    def __del__(self) -> None:
        self._work = None
        self._forget()


def watch() -> None:
    """
    ## Watch this process, from now on
    """
    for name in MESSAGES:
        watched = _watched(getattr(dist, name), name, 1)
        setattr(dist, name, watched)
        # `P2POp` takes torch's own functions only, which it looks up there.
        setattr(distributed_c10d, name, watched)
    for name in COLLECTIVES:
        setattr(collectives, name, _watched(getattr(collectives, name), name, 2))
    disk.File.move = _moved(disk.File.move)  # type: ignore[method-assign]
    torch.UntypedStorage.resize_ = _resized(  # type: ignore[method-assign]
        torch.UntypedStorage.resize_)


def violations() -> list[str]:
    """
    ## What has been found since the last call
    """
    found = _violations[:]
    _violations.clear()
    return found


def _note(tensors: tuple[Any, ...], what: str) -> Any:
    """
    #### Note storages, and return what forgets them
    """
    token = object()
    keys = [tensor.untyped_storage()._cdata for tensor in tensors if tensor.numel()]
    where = _frames(2)
    with _lock:
        for key in keys:
            _busy.setdefault(key, {})[token] = (what, where)

    def forget() -> None:
        with _lock:
            for key in keys:
                users = _busy.get(key, {})
                users.pop(token, None)
                if not users:
                    _busy.pop(key, None)

    return forget


def _frames(skip: int) -> Frames:
    """
    #### Where this rank is, without `skip` frames

    Every message asks, so the text is made only of a violation.
    """
    frame: FrameType | None = sys._getframe(skip + 1)
    found: Frames = []
    while frame is not None and len(found) < 9:
        found.append((frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return found


def _told(frames: Frames) -> str:
    """
    #### A line of text for each frame
    """
    return "".join(f"  {code.co_filename}, line {line}, in {code.co_name}\n"
                   for code, line in reversed(frames))


def _watched(real: Any, what: str, count: int) -> Any:
    """
    #### A function of torch's whose first arguments are `count` tensors, watched
    """
    @functools.wraps(real)
    def started(*args: Any, **kwargs: Any) -> Any:
        if what in COLLECTIVES and not kwargs.get("async_op"):
            return real(*args, **kwargs)
        forget = _note(args[:count], what)
        try:
            work = real(*args, **kwargs)
        except BaseException:
            forget()
            raise
        return work and Handle(work, forget)

    return started


def _moved(real: Any) -> Any:
    """
    #### A read or write of a block, watched
    """
    @functools.wraps(real)
    def move(self: Any, write: bool, memory: torch.Tensor, offset: int) -> None:
        forget = _note((memory,), "a write to a file" if write else "a read of a file")
        try:
            real(self, write, memory, offset)
        finally:
            forget()

    return move


def _resized(real: Any) -> Any:
    """
    #### A resize of a storage, watched
    """
    @functools.wraps(real)
    def resize_(self: Any, nbytes: int) -> Any:
        with _lock:
            users = [*_busy.get(self._cdata, {}).values()] if self.nbytes() else []
        for what, where in users[:1]:
            _violations.append(f"{self.nbytes()} bytes in flight were resized to {nbytes} at\n"
                               f"{_told(_frames(1))}while {what} used them, which started at\n"
                               f"{_told(where)}")
        return real(self, nbytes)

    return resize_

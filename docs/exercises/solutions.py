"""
# Solutions

A solution for each exercise, and the contents of the page about it.

If the package has what the reader writes, a method of `Zero3Layer` for instance, the solution is
the package's own, not a copy of it. Other exercises ask for a function of their own. Their
solutions are in this file, together with the names of the functions in the package that do the
same.

**Run this**: `make exercise N=2 ARGS=--solution` shows a solution, and checks it.
"""

import ast
import importlib
import inspect
import os
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from docs.exercises.layout import Layout
from zero3 import Zero3Layer, Zero3Sequential
from zero3.checkpoint.entries import Entries
from zero3.checkpoint.reader import CheckpointReader
from zero3.comm.collectives import Communicator
from zero3.compression.thresholds import kth_keys
from zero3.optimizer import whole
from zero3.pipeline import schedules

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def all_gather(full: torch.Tensor, shard: torch.Tensor, rank: int, world_size: int) -> None:
    """
    ## Exercise 2: all-gather
    """
    rows = full.view(world_size, len(shard))
    rows[rank].copy_(shard)
    works = []
    for k in range(1, world_size):
        # Each rank starts with its neighbour, because otherwise all would send to rank 0 first.
        peer = (rank + k) % world_size
        works += [dist.irecv(rows[peer], peer), dist.isend(shard, peer)]
    for work in works:
        work.wait()


def reduce_scatter(grad: torch.Tensor, rank: int, world_size: int) -> torch.Tensor:
    """
    ## Exercise 2: reduce-scatter
    """
    # Divide before the sum, so that the sum of half-precision numbers stays in their range.
    rows = grad.div_(world_size).view(world_size, len(grad) // world_size)
    receive_buffer = torch.empty_like(rows)
    receive_buffer[rank] = rows[rank]
    works = []
    for k in range(1, world_size):
        peer = (rank + k) % world_size
        works += [dist.irecv(receive_buffer[peer], peer), dist.isend(rows[peer], peer)]
    for work in works:
        work.wait()
    return receive_buffer.sum(dim=0)


def reshard(read: Callable[[int, int, int, int], torch.Tensor], saved: Layout, wanted: Layout,
            rank: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """
    ## Exercise 7: reshard a checkpoint
    """
    shards = [torch.zeros(numel, dtype=dtype) for numel in wanted.shard_numels()]
    for name, there in wanted.places.items():
        shard = shards[there.layer]
        first = rank * len(shard)
        old = saved.places[name]
        old_numel = saved.shard_numels()[old.layer]
        # The range of the parameter that is in this rank's shard, counted from its first element.
        begin = max(there.offset, first) - there.offset
        end = min(there.offset + there.numel, first + len(shard)) - there.offset
        while begin < end:
            # Read as much of it as one saved shard contains.
            old_rank, at = divmod(old.offset + begin, old_numel)
            count = min(end - begin, old_numel - at)
            to = there.offset + begin - first
            shard[to : to + count] = read(old.layer, old_rank, at, at + count)
            begin += count
    return shards


def one_forward_one_backward(rank: int, ranks: int, micro_batches: int) -> list[tuple[str, int]]:
    """
    ## Exercise 8: the list of a pipeline
    """
    # The last rank begins with a backward pass as soon as it has done its first forward.
    ahead = min(ranks - 1 - rank, micro_batches)
    passes = [("forward", i) for i in range(ahead)]
    for i in range(micro_batches - ahead):
        passes.append(("forward", ahead + i))
        passes.append(("backward", i))
    # The forwards that went ahead are still to go back.
    passes += [("backward", i) for i in range(micro_batches - ahead, micro_batches)]
    return passes


def kth_smallest(numbers: torch.Tensor, k: int, bits: int,
                 total: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """
    ## Exercise 9: the k-th smallest number of all ranks
    """
    found = 0
    for shift in reversed(range(0, bits, 8)):
        digits = (numbers >> shift) & 255
        counts = total(digits.bincount(minlength=256))
        upto = counts.cumsum(0)
        # The first digit up to which there are k numbers.
        digit = int((upto < k).sum())
        # So many have a smaller digit.
        k -= int(upto[digit] - counts[digit])
        found = 256 * found + digit
        numbers = numbers[digits == digit]
    return found


@dataclass(frozen=True)
class Exercise:
    """
    ## An exercise, and the place of its solution in the source
    """

    name: str  # of its file
    owner: type | None  # the class, if the functions are methods
    solutions: tuple[Callable, ...]  # with the names of the functions to fill in
    source: tuple[Any, ...]  # what to read next
    world_sizes: tuple[int, ...] = (1, 2, 3)  # numbers of ranks to check it on

    @property
    def file(self) -> Path:
        return HERE / f"{self.name}.py"

    def module(self) -> ModuleType:
        """
        ### The reader's file
        """
        return importlib.import_module(f"docs.exercises.{self.name}")

    def solution(self) -> SimpleNamespace:
        """
        ### The solution's functions, by name
        """
        return SimpleNamespace(**{f.__name__: f for f in self.solutions})


EXERCISES = {number: Exercise(*fields) for number, fields in enumerate((
    ("ex1_merge_and_pad", Zero3Layer, (Zero3Layer._merge_and_pad_params,),
     (Zero3Layer._merge_and_pad_params,)),
    ("ex2_each_collective_alone", None, (all_gather, reduce_scatter),
     (Communicator.send, Communicator.total)),
    ("ex3_fetch_params", Zero3Layer, (Zero3Layer.fetch_params,), (Zero3Layer.fetch_params,)),
    ("ex4_cleanup_params", Zero3Layer, (Zero3Layer._cleanup_params,),
     (Zero3Layer._cleanup_params,)),
    ("ex5_backup_grads", Zero3Layer, (Zero3Layer._backup_grads, Zero3Layer.add_reduced),
     (Zero3Layer._backup_grads, Zero3Layer.add_reduced)),
    ("ex6_prefetch", Zero3Sequential, (Zero3Sequential.walk,), (Zero3Sequential.walk,)),
    ("ex7_reshard_a_checkpoint", None, (reshard,), (Entries.shard, CheckpointReader._read_into),
     (1,)),
    ("ex8_one_forward_one_backward", None, (one_forward_one_backward,),
     (schedules.order_of,)),
    ("ex9_kth_smallest", None, (kth_smallest,), (kth_keys,)),
    ("ex10_assign_owners", None, (whole.assign,), (whole.assign,)),
), start=1)}


@dataclass(frozen=True)
class Page:
    """
    ## The contents of the page about an exercise
    """

    number: int
    title: str
    task: str  # markdown, without the title
    stub: str  # Python: the file without the task
    solution: str  # Python
    source: list[str]  # what to read next, as "`fetch_params` (zero3/layer.py:17)"


def page(number: int) -> Page:
    """
    ## The page about an exercise
    """
    exercise = EXERCISES[number]
    source = exercise.file.read_text()
    text = exercise.module().__doc__ or ""
    title, task = text.strip().removeprefix("# ").split("\n", 1)
    after = ast.parse(source).body[0].end_lineno
    stub = "\n".join(source.splitlines()[after:]).strip() + "\n"
    solution = "\n".join(textwrap.dedent(inspect.getsource(f)) for f in exercise.solutions)
    return Page(number, title, task.strip() + "\n", stub, solution,
                [place(f) for f in exercise.source])


def place(function: Callable) -> str:
    """
    ## The name, file and line of a function
    """
    function = inspect.unwrap(function)
    file = os.path.relpath(inspect.getsourcefile(function) or "", ROOT)
    return f"`{function.__name__}` ({file}:{inspect.getsourcelines(function)[1]})"

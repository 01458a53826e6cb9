r"""
# Channels: activations and gradients between the ranks of a pipeline

`Channels` sends tensors to the rank of the next or the previous stage, and receives theirs.

A stage hands on whatever its last layer returns: a tensor, or tensors in tuples, lists and dicts.
The next rank needs memory for them before they arrive, so it has to know their shapes. They are
described once, and afterwards the sender only says that they are the same as before. Each message
consists of up to three parts:

| part | size | by | when |
|---|---|---|---|
| announcement | 40 bytes | gloo | always: what follows, for which stage and micro-batch |
| description | a few hundred bytes | gloo | for shapes that this receiver has not seen |
| tensors | their bytes | the mesh's backend | always |

Take two stages, four micro-batches, and activations of 8 × 16 fp32 elements, 512 bytes. Rank 0
sends four announcements, one description, and 2,048 bytes of tensors.

$$\text{sent by a rank} = \text{micro-batches} \cdot (\text{bytes of activations} +
\text{bytes of gradients})$$

The announcement says what the receiver should be about to do. If it is about to do something else,
both would wait forever, so it raises an error. It also raises one if the sender announces a fault,
and hands that on. So an error in one stage ends all of them, with its text.

**Why three process groups.** NCCL runs the transfers between two ranks in the order in which they
were queued. While rank 0 queues an activation to rank 1, rank 1 may queue a gradient to rank 0, and
each would wait for the other to receive. So activations and gradients have a group each. The
announcements have a third, of gloo, because the host reads them without waiting for a device.

**Run this**: `python -m pytest tests/test_pipeline_faults.py`.

**Not covered, and what that costs**: a description is a pickle, so ranks trust each other. Tensors
are sent whole to one rank of the next stage, also if several ranks there share the same rows.
"""

import pickle
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from zero3.groups.mesh import Group, node_of
from zero3.pipeline.schedules import KINDS, Action

# Numbers of 8 bytes in an announcement: kind, stage, micro-batch, description, its length.
_ROW = 5
# In the place of the kind: the sender has failed, and its error follows.
_FAULT = -1


class Fault(RuntimeError):
    """
    ## An error of another rank

    `cause` is its text, for the ranks after this one.
    """

    cause = ""


class Sent(NamedTuple):
    """
    ## What one message has sent, for a `Ledger`
    """

    sent_bytes: int
    between_bytes: int
    messages: int
    order_bytes: int  # of announcement and description


class Channels:
    """
    ## The ways from this rank to the others of its pipeline, and back
    """

    def __init__(self, line: Group, ranks: tuple[int, ...], device: torch.device):
        """
        ### Make the process groups

        * `line` has the ranks of this pipeline, in order
        * `ranks` are those of all pipelines side by side, first those that have the first stage
        * `device` is where tensors arrive

        All of these ranks call it.
        """
        self.line = line
        self.ranks = ranks
        self.device = device
        self.activations = line.process_group
        self.gradients = self._group(line.ranks, None)
        self.control = self._group(ranks, "gloo")
        # Descriptions by receiver or sender, and checksum.
        self._told: set[tuple[int, int]] = set()
        self._known: dict[tuple[int, int], Any] = {}
        # Messages under way, with the tensors that they read.
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()

    def _group(self, ranks: tuple[int, ...], backend: str | None) -> Any:
        if len(ranks) == 1:
            return None
        return dist.new_group(ranks, backend=backend, use_local_synchronization=True)

    def disagreement(self, problem: str, batch: str) -> str:
        """
        ### Compare the batches of all stages, before anything moves

        * `problem` is what is wrong with this rank's, or empty; `batch` is what it is like

        All ranks call it: an all-gather of 8 bytes by gloo. Returns the first problem of any rank,
        the same on all, or an empty text. Pipelines side by side may have different shapes.
        """
        mine = torch.tensor(-1 if problem else zlib.crc32(batch.encode()))
        every = [torch.empty_like(mine) for _ in self.ranks]
        if self.control is None:
            return problem
        dist.all_gather(every, mine, group=self.control)
        # One row for each stage, one column for each pipeline side by side.
        found = torch.stack(every).view(self.line.size, -1)
        if bool((found >= 0).all() and (found == found[0]).all()):
            return ""
        texts: list[Any] = [None] * len(self.ranks)
        dist.all_gather_object(texts, (problem, batch), group=self.control)
        beside = len(self.ranks) // self.line.size
        wrong = []
        for i, (each, batch) in enumerate(texts):
            first = i % beside
            if each:
                wrong.append(f"{each}, on rank {self.ranks[i]}")
            elif batch != texts[first][1]:
                wrong.append(f"{texts[first][1]}, on rank {self.ranks[first]}, and {batch}, on "
                             f"rank {self.ranks[i]}")
        return "; ".join(wrong)

    def send(self, action: Action, to: int, value: Any) -> Sent:
        """
        ### Start to send tensors, and return at once

        * `action` is what the receiver is about to do
        * `to` is its place in the pipeline
        * `value` has tensors in tuples, lists and dicts

        Raises `TypeError` if the value has anything else that cannot be described.
        """
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        told = pickle.dumps(pytree.tree_map(_described, value))
        checksum = zlib.crc32(told)
        is_new = (to, checksum) not in self._told
        self._told.add((to, checksum))
        row = [KINDS.index(action.kind), action.stage, action.micro_batch, checksum,
               len(told) if is_new else 0]
        self._collect()
        order_bytes = self._announce(row, told if is_new else b"", to)
        nbytes = 0
        for tensor in tensors:
            nbytes += tensor.nbytes
            self._isend(tensor.detach().contiguous(), to, self._data(action))
        far = node_of(self.line.ranks[to]) != node_of(self.line.global_rank)
        return Sent(nbytes, nbytes * far, len(tensors), order_bytes)

    def receive(self, action: Action, source: int) -> Any:
        """
        ### Wait for what another rank sends for this action

        * `source` is its place in the pipeline

        Returns the value, with tensors on the device. Those that need gradients there do so here.
        Raises `Fault` if the sender has failed, and `RuntimeError` if it does something else.
        """
        row = self._recv(torch.empty(_ROW, dtype=torch.int64), source, self.control).tolist()
        kind, stage, micro_batch, checksum, length = row
        told = b""
        if length:
            buffer = torch.empty(length, dtype=torch.uint8)
            told = self._recv(buffer, source, self.control).numpy().tobytes()
        where = f"rank {self.line.global_rank}: {_words(action)}"
        if kind == _FAULT:
            fault = Fault(f"{where}: another rank has failed. Expected: its tensors. Got: "
                          f"{told.decode()} What to do: mend that, and start again.")
            fault.cause = told.decode()
            raise fault
        theirs = Action(KINDS[kind], stage, micro_batch)
        if theirs != action:
            raise RuntimeError(
                f"{where}: the stages diverged. Expected: its tensors. Got: those for "
                f"`{_words(theirs)}`, from rank {self.line.ranks[source]}. What to do: call "
                "`train_batch` and `eval_batch` in the same order on all ranks. Start again.")
        if told:
            self._known[source, checksum] = pickle.loads(told)
        return pytree.tree_map(lambda each: self._leaf(each, source, self._data(action)),
                               self._known[source, checksum])

    def fail(self, text: str) -> None:
        """
        ### Tell the neighbours that this rank has failed

        * `text` is the error, which they hand on
        """
        told = text.encode()
        here = self.line.rank
        for to in {(here + 1) % self.line.size, (here - 1) % self.line.size} - {here}:
            self._announce([_FAULT, 0, 0, 0, len(told)], told, to)

    def end(self) -> None:
        """
        ### Wait until everything that was sent has been received
        """
        while self._leaving:
            self._wait(self._leaving.popleft()[0].wait)

    def _data(self, action: Action) -> Any:
        return self.gradients if "gradient" in action.kind else self.activations

    def _announce(self, row: list[int], told: bytes, to: int) -> int:
        """
        #### Start to send an announcement, and its description if there is one
        """
        self._isend(torch.tensor(row), to, self.control)
        if told:
            self._isend(torch.frombuffer(bytearray(told), dtype=torch.uint8), to, self.control)
        return 8 * _ROW + len(told)

    def _isend(self, tensor: torch.Tensor, to: int, group: Any) -> None:
        if tensor.numel():
            peer = self.line.ranks[to]
            work = self._wait(lambda: dist.isend(tensor, dst=peer, group=group))
            self._leaving.append((work, tensor))

    def _recv(self, buffer: torch.Tensor, source: int, group: Any) -> torch.Tensor:
        if buffer.numel():
            peer = self.line.ranks[source]
            work: Any = self._wait(lambda: dist.irecv(buffer, src=peer, group=group))
            self._wait(work.wait)
        return buffer

    def _leaf(self, described: Any, source: int, group: Any) -> Any:
        """
        #### One tensor, once it has arrived; or a value that was in the description
        """
        if not isinstance(described, _Shape):
            return described
        buffer = torch.empty(described.shape, dtype=described.dtype, device=self.device)
        return self._recv(buffer, source, group).requires_grad_(described.requires_grad)

    def _collect(self) -> None:
        """
        #### Let go of tensors that have been received
        """
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    def _wait(self, does: Callable[[], Any]) -> Any:
        """
        #### Explain the error if the connection to another rank is gone
        """
        try:
            return does()
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.line.global_rank}: another stage is lost. Expected: a rank that "
                f"answers. Got: {error}. What to do: look for the first error on another rank, "
                "and start again.") from error


@dataclass(frozen=True)
class _Shape:
    """
    ## All that a receiver has to know about a tensor
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _described(leaf: Any) -> Any:
    """
    #### The description of a tensor, or of a value that is small enough to be one itself
    """
    if isinstance(leaf, torch.Tensor):
        return _Shape(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
    if leaf is None or isinstance(leaf, (bool, int, float, str)):
        return leaf
    raise TypeError(
        "a stage returns an object. Expected: tensors, numbers and texts, in tuples, lists and "
        f"dicts. Got: a {type(leaf).__name__}, which the next rank could not make. What to do: "
        "return its tensors in a tuple or a dict, or cut the stages elsewhere.")


def _words(action: Action) -> str:
    number = "" if action.micro_batch < 0 else f", micro-batch {action.micro_batch}"
    return f"{action.kind}, stage {action.stage}{number}"

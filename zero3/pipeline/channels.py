r"""
# Channels: activations and gradients between the ranks of a pipeline

`Channels` sends tensors to the rank of the next or the previous stage, and receives theirs.

A stage hands on what its last layer returns: tensors, also in tuples, lists and dicts. The next
rank has to know their shapes before they arrive. Each message consists of up to three parts:

| part | size | by | when |
|---|---|---|---|
| announcement | 32 bytes | gloo | always: what follows, for which stage and micro-batch |
| description | a few hundred bytes | gloo | if it is not that of the micro-batch before |
| tensors | their bytes | the default backend | if they have elements |

Take two stages, four micro-batches, and activations of 8 × 16 fp32 elements, 512 bytes. Rank 0
sends four announcements, one description, and 2,048 bytes of tensors.

$$\text{sent by a rank} = \text{micro-batches} \cdot (\text{bytes of activations} +
\text{bytes of gradients})$$

The announcement says what the receiver should be about to do. If it is about to do something else,
it raises an error, because both would wait forever. It also hands on a fault of the sender, so an
error in one stage ends all of them, with its text.

**Why several process groups.** NCCL runs the transfers between two ranks in the order in which they
were queued. If rank 0 queued an activation and rank 1 a gradient, each would wait for the other to
receive. So with NCCL each way has a group of its own. The announcements have one of gloo, because
the host reads them without waiting for a device.

**On demand.** gloo sends a message once the receiver has asked for it, at `receive`. So on the CPU
a transfer overlaps nothing on the receiving rank. The sending rank goes on at once.

**Run this**: `python -m pytest tests/pipeline/test_channels.py`.

**Not covered, and what that costs**: a description is a pickle, so ranks trust each other. The
process groups stay until the program ends.
"""

import pickle
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from zero3.comm.order import Group, node_of, timeout_of
from zero3.guards.options import expect, same
from zero3.in_flight import in_flight
from zero3.pipeline.schedules import KINDS, Action

# Tensors, in tuples, lists and dicts of any depth.
Tree = Any
# Numbers of 8 bytes in an announcement: kind, stage, micro-batch, length of a description.
_ROW = 4
# In the place of the kind: the sender has failed, and its error follows.
_FAULT = -1
# Tags: announcements 0 and 1, descriptions 2 and 3, tensors 4 and 5, the cause of a fault 6. Odd
# ones are for gradients. gloo matches messages by their tags, and those of one tag by their order.
_TOLD_TAG = 2
_TENSOR_TAG = 4
_CAUSE_TAG = 6
# A fault may be left from an earlier pipeline on the same mesh. Then there is no cause to wait for.
_CAUSE_WAIT = timedelta(seconds=5)


class Fault(RuntimeError):
    """
    ## An error of another rank

    `cause` is its text, for the ranks after this one.
    """

    def __init__(self, text: str, cause: str):
        super().__init__(text)
        self.cause = cause


@dataclass
class Sent:
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

    def __init__(self, line: Group,
                 ranks: tuple[int, ...],
                 tied: tuple[int, int],
                 device: torch.device):
        """
        ### Make the process groups

        * `line` has the ranks of this pipeline, in order
        * `ranks` are those of all pipelines side by side, first those that have the first stage
        * `tied` has the places of the two ranks that share tied weights, or one place twice
        * `device` is where tensors arrive

        All of these ranks call it.
        """
        self.line = line
        self.ranks = ranks
        self.device = device
        self.control = self._group(ranks, "gloo")
        self.data = self._data_groups(tied)
        # The last descriptions sent and received, by kind and stage of the receiving action.
        self._told: dict[tuple[str, int], bytes] = {}
        self._known: dict[tuple[str, int], Any] = {}
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()

    def _group(self, ranks: tuple[int, ...], backend: str | None) -> Group:
        """
        #### A process group of these ranks alone, which all of them make
        """
        here = self.line.global_rank
        if len(ranks) == 1:
            return Group(ranks, 0)
        timeout = timeout_of(dist.group.WORLD, self.device)
        made = dist.new_group(ranks, timeout=timeout, backend=backend,
                              use_local_synchronization=True)
        return Group(ranks, ranks.index(here), weakref.ref(made))

    def _data_groups(self, tied: tuple[int, int]) -> dict[tuple[bool, int, int], Group]:
        """
        #### The process group of each way: whether of gradients, sender, receiver

        gloo tells messages apart by their tags, so all ways share one group.
        """
        line = self.line
        ways = {(gradients, here, (here + (-1 if gradients else 1)) % line.size)
                for gradients in (False, True) for here in range(line.size)}
        first, last = tied
        if first != last:
            ways |= {(False, first, last), (True, last, first)}
        if self.device.type == "cpu":
            return dict.fromkeys(ways, self._group(line.ranks, None))
        return {way: self._group(tuple(sorted(line.ranks[place] for place in way[1:])), None)
                for way in sorted(ways) if line.rank in way[1:]}

    def compare(self, problem: str, batch: str, expected: str, cure: str) -> None:
        """
        ### Refuse batches that cannot be cut, or that differ between the stages of a pipeline

        * `problem` is what is wrong with this rank's, or empty; `batch` is what it is like

        All ranks call it before anything moves: an all-gather of these texts by gloo. Pipelines
        side by side may have different shapes. Raises `ValueError` on all ranks.
        """
        # A process group has its ranks in ascending order.
        every = zip(sorted(self.ranks), self.control.gather((problem, batch)), strict=True)
        told = dict(every)
        where = f"rank {self.line.global_rank}: the batch"
        for rank in self.ranks:
            theirs, _ = told[rank]
            expect(not theirs, where, expected, f"{theirs}, on rank {rank}", cure)
        beside = len(self.ranks) // self.line.size
        for first in range(beside):
            line = self.ranks[first::beside]
            same(where, line, [{"batch": told[rank][1]} for rank in line], cure, ValueError)

    def send(self, action: Action, to: int, value: Tree) -> Sent:
        """
        ### Start to send tensors

        * `action` is what the receiver is about to do, and `to` its place in the pipeline

        Raises `TypeError` if the value has anything else that cannot be described.
        """
        # First, so that nobody waits for what cannot be sent.
        told = pickle.dumps(pytree.tree_map(self._described, value))
        tensors = [_to_send(leaf) for leaf in pytree.tree_leaves(value)
                   if isinstance(leaf, torch.Tensor)]
        is_new = self._told.get((action.kind, action.stage)) != told
        self._told[action.kind, action.stage] = told
        self._collect()
        gradients = action.is_gradient
        numbers = [KINDS.index(action.kind), action.stage, action.micro_batch]
        order_bytes = self._announce(numbers, told if is_new else b"", to, gradients)
        for tensor in tensors:
            self._isend(tensor, to, self.data[gradients, self.line.rank, to],
                        _TENSOR_TAG + gradients)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        far = node_of(self.line.ranks[to]) != node_of(self.line.global_rank)
        return Sent(nbytes, nbytes * far, len(tensors), order_bytes)

    def receive(self, action: Action, source: int) -> Tree:
        """
        ### Wait for what another rank sends for this action

        * `source` is its place in the pipeline

        Returns the value, with tensors on the device. Raises `Fault` if the sender has failed, and
        `RuntimeError` if it does something else.
        """
        gradients = action.is_gradient
        row = torch.empty(_ROW, dtype=torch.int64, device="cpu")
        self._recv(row, source, self.control, gradients)
        kind, stage, micro_batch, length = row.tolist()
        text = torch.empty(length, dtype=torch.uint8, device="cpu")
        self._recv(text, source, self.control, _TOLD_TAG + gradients)
        told = text.numpy().tobytes()
        where = f"rank {self.line.global_rank}: {action.kind}, {action.where}"
        if kind == _FAULT:
            cause = told.decode()
            raise Fault(f"{where}: another rank has failed. Expected: its tensors. Got: {cause} "
                        "What to do: mend that, and start again.", cause)
        theirs = Action(KINDS[kind], stage, micro_batch)
        if theirs != action:
            raise RuntimeError(
                f"{where}: the stages diverged. Expected: its tensors. Got: those for "
                f"`{theirs.kind}, {theirs.where}`, from rank {self.line.ranks[source]}. What to "
                "do: call `train_batch` and `eval_batch` in the same order on all ranks. Start "
                "again.")
        if told:
            self._known[action.kind, action.stage] = pickle.loads(told)
        return pytree.tree_map_only(
            _Shape, lambda shape: self._receive_tensor(shape, source, gradients),
            self._known[action.kind, action.stage])

    def _receive_tensor(self, shape: "_Shape", source: int, gradients: bool) -> torch.Tensor:
        """
        #### The next tensor from a rank, which has this shape
        """
        found = torch.empty(shape.shape, dtype=shape.dtype, device=self.device)
        group = self.data[gradients, source, self.line.rank]
        self._recv(found, source, group, _TENSOR_TAG + gradients)
        return found.requires_grad_(shape.requires_grad)

    def fail(self, text: str) -> None:
        """
        ### Tell all ranks that this one has failed

        * `text` is the error, which they hand on

        The neighbours receive the text instead of tensors. Other ranks notice the fault in a
        collective, and then read the text with `cause_of`.
        """
        told = text.encode()
        here = self.line.rank
        for to in {(here + 1) % self.line.size, (here - 1) % self.line.size} - {here}:
            for gradients in (False, True):
                self._announce([_FAULT, 0, 0], told, to, gradients)
        cause = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        for rank in {*self.ranks} - {self.line.global_rank}:
            for part in (torch.tensor([len(told)], device="cpu"), cause):
                work = dist.isend(part, rank, self.control.process_group, tag=_CAUSE_TAG)
                self._leaving.append((work, part))
        # Others wait for these messages, even if the pipeline is gone.
        in_flight.begin(self)
        in_flight.lose(self)

    def cause_of(self, rank: int) -> str:
        """
        ### The error of a rank that has announced a fault, or an empty text if it does not say
        """
        length = torch.zeros(1, dtype=torch.int64, device="cpu")
        with suppress(RuntimeError):
            self._cause(length, rank)
            text = torch.empty(int(length), dtype=torch.uint8, device="cpu")
            self._cause(text, rank)
            return text.numpy().tobytes().decode()
        return ""

    def _cause(self, buffer: torch.Tensor, rank: int) -> None:
        work: Any = dist.irecv(buffer, rank, self.control.process_group, tag=_CAUSE_TAG)
        self._leaving.append((work, buffer))
        work.wait(_CAUSE_WAIT)

    def end(self) -> None:
        """
        ### Wait until everything that was sent has been received
        """
        while self._leaving:
            self._land(self._leaving.popleft()[0])

    def _announce(self, numbers: list[int],
                  told: bytes,
                  to: int,
                  gradients: bool) -> int:
        """
        #### Start to send an announcement, and its description if there is one
        """
        row = torch.tensor([*numbers, len(told)], device="cpu")
        self._isend(row, to, self.control, gradients)
        if told:
            text = torch.frombuffer(bytearray(told), dtype=torch.uint8)
            self._isend(text, to, self.control, _TOLD_TAG + gradients)
        return row.nbytes + len(told)

    def _isend(self, tensor: torch.Tensor,
               to: int,
               group: Group,
               tag: int) -> None:
        """
        #### Start to send a tensor, and keep it until it has been received
        """
        if tensor.numel():
            peer = self.line.ranks[to]
            with self._explained():
                work = dist.isend(tensor, peer, group.process_group, tag=tag)
            self._leaving.append((work, tensor))

    def _recv(self, buffer: torch.Tensor,
              source: int,
              group: Group,
              tag: int) -> None:
        """
        #### Ask for a message, and wait until it has filled a buffer
        """
        if buffer.numel():
            peer = self.line.ranks[source]
            with self._explained():
                work = dist.irecv(buffer, peer, group.process_group, tag=tag)
            self._land(work)

    def _land(self, work: Any) -> None:
        """
        #### Wait until a message has been sent or received, or the time of all ranks' group is over
        """
        with self._explained():
            work.wait(self.control.timeout)

    def _described(self, leaf: object) -> object:
        """
        #### The description of a tensor, or of a value that is small enough to be one itself
        """
        if isinstance(leaf, torch.Tensor):
            if leaf.layout == torch.strided and leaf.device == self.device:
                return _Shape(tuple(leaf.shape), leaf.dtype, leaf.requires_grad)
            got = f"{leaf.layout} on {leaf.device}"
        elif leaf is None or isinstance(leaf, (bool, int, float, str)):
            return leaf
        else:
            got = f"a {type(leaf).__name__}, which the next rank could not make"
        raise TypeError(
            f"rank {self.line.global_rank}: a stage returns what cannot be sent. Expected: dense "
            f"tensors on {self.device}, numbers and texts, in tuples, lists and dicts. Got: {got}. "
            "What to do: return its tensors in a tuple or a dict, or cut the stages elsewhere.")

    def _collect(self) -> None:
        """
        #### Free tensors that have been received
        """
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.popleft()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """
        #### Explain the error if the connection to another rank is gone
        """
        try:
            yield
        # torch raises the latter for a process group that is gone.
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"rank {self.line.global_rank}: another stage is lost. Expected: a rank that "
                f"answers. Got: {error}. What to do: {self.control.advice(error)}") from error


@dataclass(frozen=True)
class _Shape:
    """
    ## All that a receiver has to know about a tensor
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool


def _to_send(tensor: torch.Tensor) -> torch.Tensor:
    """
    #### A tensor's elements in a row, in memory that nobody writes to

    The next micro-batch may change a buffer of the module before this message has left.
    """
    found = tensor.detach().resolve_conj().resolve_neg().contiguous()
    is_same = found.data_ptr() == tensor.data_ptr()
    return found.clone() if is_same and tensor.grad_fn is None else found

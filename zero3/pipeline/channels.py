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
| tensors | their bytes | the default backend | if they have elements |

Take two stages, four micro-batches, and activations of 8 × 16 fp32 elements, 512 bytes. Rank 0
sends four announcements, one description, and 2,048 bytes of tensors.

$$\text{sent by a rank} = \text{micro-batches} \cdot (\text{bytes of activations} +
\text{bytes of gradients})$$

The announcement says what the receiver should be about to do. If it is about to do something else,
both would wait forever, so it raises an error. It also raises one if the sender announces a fault,
and hands that on. So an error in one stage ends all of them, with its text.

**Why several process groups.** NCCL runs the transfers between two ranks in the order in which they
were queued. While rank 0 queues an activation to rank 1, rank 1 may queue a gradient to rank 0, and
each would wait for the other to receive. So there each way has a group of its own. The
announcements have one more, of gloo, because the host reads them without waiting for a device.

**Ahead of time.** gloo sends a message once the receiver has asked for it. So a rank asks for all
announcements of a batch at its beginning. On the CPU it also asks for the next tensors before it
computes the pass in front of them, if it knows their shapes from an earlier batch. This takes
memory for one more message. With NCCL it asks only when it needs them, because the order of calls
is the order of transfers.

**Run this**: `python -m pytest tests/test_pipeline_faults.py`.

**Not covered, and what that costs**: a description is a pickle, so ranks trust each other. A number
that a stage hands on is a part of the description. If it is another one in each batch, it is
described, and remembered, each time; a tensor of one element is not. The process groups stay until
the program ends.
"""

import pickle
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from zero3.comm.mesh import Group, node_of, timeout_of
from zero3.in_flight import in_flight
from zero3.pipeline.schedules import KINDS, Action

# Numbers of 8 bytes in an announcement: kind, stage, micro-batch, description, its length.
_ROW = 5
# In the place of the kind: the sender has failed, and its error follows.
_FAULT = -1
# Tags: announcements 0 and 1, descriptions 2 and 3, the cause of a fault 4, tensors from 6 up. Odd
# ones are for gradients. gloo matches messages by their tags.
_TOLD_TAG = 2
_CAUSE_TAG = 4
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

    def __init__(self, line: Group, ranks: tuple[int, ...], tied: list[tuple[int, int]],
                 device: torch.device):
        """
        ### Make the process groups

        * `line` has the ranks of this pipeline, in order
        * `ranks` are those of all pipelines side by side, first those that have the first stage
        * `tied` has the places of the two ranks that share tied weights, if there are any
        * `device` is where tensors arrive

        All of these ranks call it.
        """
        self.line = line
        self.ranks = ranks
        self.device = device
        self.control = self._group(ranks, "gloo")
        self.data = self._data_groups(tied)
        # Descriptions that receivers know by their numbers, and those that senders have described.
        self._told: dict[tuple[int, bytes], int] = {}
        self._known: dict[tuple[int, int], Any] = {}
        # Announcements that this batch waits for, in order.
        self._coming: deque[_Coming] = deque()
        # The description that each action had in the last batch, and tensors that are asked for.
        self._usual: dict[Action, int] = {}
        self._asked: dict[tuple[int, bool, int], deque[_Asked]] = {}
        # Messages under way, with their tensors.
        self._leaving: deque[tuple[Any, torch.Tensor]] = deque()

    def _group(self, ranks: tuple[int, ...], backend: str | None) -> Group:
        """
        #### A process group of these ranks alone, which all of them make

        It waits as long for a rank as the group of all ranks does.
        """
        here = self.line.global_rank
        if len(ranks) == 1:
            return Group(ranks, 0)
        timeout = timeout_of(dist.group.WORLD, self.device)
        made = dist.new_group(ranks, timeout=timeout, backend=backend,
                              use_local_synchronization=True)
        return Group(ranks, ranks.index(here), weakref.ref(made))

    def _data_groups(self, tied: list[tuple[int, int]]) -> dict[tuple[bool, int, int], Group]:
        """
        #### The process group of each kind, sender and receiver: whether of gradients, and places

        gloo tells messages apart by their tags, so all of them share one group.
        """
        line = self.line
        ways = {(gradients, here, (here + (-1 if gradients else 1)) % line.size)
                for gradients in (False, True) for here in range(line.size)}
        for first, last in tied:
            ways |= {(False, first, last), (True, last, first)}
        if self.device.type == "cpu":
            return dict.fromkeys(ways, self._group(line.ranks, None))
        return {way: self._group(tuple(sorted(line.ranks[place] for place in way[1:])), None)
                for way in sorted(ways) if line.rank in way[1:]}

    def disagreement(self, problem: str, batch: str) -> str:
        """
        ### Compare the batches of all stages, before anything moves

        * `problem` is what is wrong with this rank's, or empty; `batch` is what it is like

        All ranks call it: an all-gather of 8 bytes by gloo. Returns the first problem of any rank,
        the same on all, or an empty text. Pipelines side by side may have different shapes.
        """
        if self.control.size == 1:
            return problem
        mine = torch.tensor(-1 if problem else zlib.crc32(batch.encode()), device="cpu")
        every = [torch.empty_like(mine) for _ in self.ranks]
        self.control.together("a checksum of the batch", dist.all_gather, every, mine)
        # A process group has its ranks in ascending order.
        order = [sorted(self.ranks).index(rank) for rank in self.ranks]
        # One row for each stage, one column for each pipeline side by side.
        found = torch.stack([every[i] for i in order]).view(self.line.size, -1)
        if bool((found >= 0).all() and (found == found[0]).all()):
            return ""
        told: list[Any] = [None] * len(self.ranks)
        self.control.together("its batch", dist.all_gather_object, told, (problem, batch))
        texts = [told[i] for i in order]
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

    def begin(self, coming: Iterable[tuple[Action, int]]) -> None:
        """
        ### Ask for all announcements of a batch, and for the first tensors if they are known

        * `coming` are the actions that receive something, in their order, with the place of the
          sender of each

        gloo sends a message once the receiver has asked for it. If it asked late, the request would
        wait while the sender computes.
        """
        self._coming.clear()
        for action, source in coming:
            row = torch.empty(_ROW, dtype=torch.int64, device="cpu")
            work = self._irecv(row, source, self.control, _is_gradient(action))
            self._coming.append(_Coming(action, source, row, work))
        self._ask_ahead()

    def send(self, action: Action, to: int, value: Any) -> Sent:
        """
        ### Start to send tensors, and return at once

        * `action` is what the receiver is about to do
        * `to` is its place in the pipeline
        * `value` has tensors in tuples, lists and dicts

        Raises `TypeError` if the value has anything else that cannot be described.
        """
        # Before anything is announced, so that nobody waits for what cannot be sent.
        told = pickle.dumps(pytree.tree_map(self._described, value))
        tensors = [_to_send(leaf) for leaf in pytree.tree_leaves(value)
                   if isinstance(leaf, torch.Tensor)]
        is_new = (to, told) not in self._told
        number = self._told.setdefault((to, told), len(self._told))
        self._collect()
        row = [KINDS.index(action.kind), action.stage, action.micro_batch, number,
               len(told) if is_new else 0]
        order_bytes = self._announce(row, told if is_new else b"", to, _is_gradient(action))
        nbytes = 0
        for tensor in tensors:
            nbytes += tensor.nbytes
            self._isend(tensor, to, self.data[_is_gradient(action), self.line.rank, to],
                        _tag_of(number, _is_gradient(action)))
        far = node_of(self.line.ranks[to]) != node_of(self.line.global_rank)
        return Sent(nbytes, nbytes * far, len(tensors), order_bytes)

    def receive(self, action: Action) -> Any:
        """
        ### Wait for what another rank sends for this action

        Returns the value, with tensors on the device. Those that need gradients there do so here.
        Raises `Fault` if the sender has failed, and `RuntimeError` if it does something else.
        """
        expected, source, row, work = self._coming.popleft()
        assert expected == action
        self._land(work)
        kind, stage, micro_batch, number, length = row.tolist()
        told = b""
        if length:
            text = torch.empty(length, dtype=torch.uint8, device="cpu")
            tag = _TOLD_TAG + _is_gradient(action)
            self._land(self._irecv(text, source, self.control, tag))
            told = text.numpy().tobytes()
        where = f"rank {self.line.global_rank}: {_words(action)}"
        if kind == _FAULT:
            cause = told.decode()
            raise Fault(f"{where}: another rank has failed. Expected: its tensors. Got: {cause} "
                        "What to do: mend that, and start again.", cause)
        theirs = Action(KINDS[kind], stage, micro_batch)
        if theirs != action:
            raise RuntimeError(
                f"{where}: the stages diverged. Expected: its tensors. Got: those for "
                f"`{_words(theirs)}`, from rank {self.line.ranks[source]}. What to do: call "
                "`train_batch` and `eval_batch` in the same order on all ranks. Start again.")
        if told:
            self._known[source, number] = pickle.loads(told)
        self._usual[action] = number
        asked = self._ask(source, _is_gradient(action), number).popleft()
        for each in asked.works:
            self._land(each)
        self._ask_ahead()
        return asked.value

    def fail(self, text: str) -> None:
        """
        ### Tell all ranks that this one has failed

        * `text` is the error, which they hand on

        The neighbours wait for tensors, and receive the text instead. Other ranks notice the fault
        in a collective, and then read the text with `cause_of`.
        """
        told = text.encode()
        here = self.line.rank
        for to in {(here + 1) % self.line.size, (here - 1) % self.line.size} - {here}:
            for gradients in (False, True):
                self._announce([_FAULT, 0, 0, 0, len(told)], told, to, gradients)
        cause = torch.frombuffer(bytearray(told), dtype=torch.uint8)
        for rank in {*self.ranks} - {self.line.global_rank}:
            for part in (torch.tensor([len(told)], device="cpu"), cause):
                work = dist.isend(part, rank, self.control.process_group, tag=_CAUSE_TAG)
                self._leaving.append((work, part))
        # Others still wait for what is on its way, even if the pipeline is gone.
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

    def _ask_ahead(self) -> None:
        """
        #### Ask for the next tensors before the pass that comes first

        They are expected to be described as in the last batch. If the description differs, the
        buffers stay for the next message that fits them. NCCL's order is that of the calls, so
        there nothing is asked ahead.
        """
        if self._coming and self.device.type == "cpu":
            action, source, *_ = self._coming[0]
            if action in self._usual:
                self._ask(source, _is_gradient(action), self._usual[action])

    def _ask(self, source: int, gradients: bool, number: int) -> "deque[_Asked]":
        """
        #### The tensors of this description that are asked for, at least once
        """
        asked = self._asked.setdefault((source, gradients, number), deque())
        if not asked:
            works: list[Any] = []
            group = self.data[gradients, source, self.line.rank]

            def leaf(described: Any) -> Any:
                if not isinstance(described, _Shape):
                    return described
                # Asked for in an evaluation, it may be used in training.
                with torch.inference_mode(False):
                    found = torch.empty(described.shape, dtype=described.dtype, device=self.device)
                if found.numel():
                    works.append(self._irecv(found, source, group, _tag_of(number, gradients)))
                return found.requires_grad_(described.requires_grad)

            value = pytree.tree_map(leaf, self._known[source, number])
            asked.append(_Asked(value, works))
        return asked

    def _announce(self, row: list[int], told: bytes, to: int, gradients: bool) -> int:
        """
        #### Start to send an announcement, and its description if there is one
        """
        self._isend(torch.tensor(row, device="cpu"), to, self.control, gradients)
        if told:
            text = torch.frombuffer(bytearray(told), dtype=torch.uint8)
            self._isend(text, to, self.control, _TOLD_TAG + gradients)
        return 8 * _ROW + len(told)

    def _isend(self, tensor: torch.Tensor, to: int, group: Group, tag: int) -> None:
        """
        #### Start to send a tensor, and keep it until it has been received
        """
        if tensor.numel():
            peer = self.line.ranks[to]
            work = self._explained(lambda: dist.isend(tensor, peer, group.process_group, tag=tag))
            self._leaving.append((work, tensor))

    def _irecv(self, buffer: torch.Tensor, source: int, group: Group, tag: int) -> Any:
        peer = self.line.ranks[source]
        return self._explained(lambda: dist.irecv(buffer, peer, group.process_group, tag=tag))

    def _described(self, leaf: Any) -> Any:
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

    def _land(self, work: Any) -> None:
        """
        #### Wait until a message has been sent or received

        No longer than the group of all ranks would wait.
        """
        self._explained(lambda: work.wait(self.control.timeout))

    def _explained(self, does: Callable[[], Any]) -> Any:
        """
        #### Explain the error if the connection to another rank is gone
        """
        try:
            return does()
        # torch raises the latter for a process group that is gone.
        except (RuntimeError, ValueError) as error:
            raise RuntimeError(
                f"rank {self.line.global_rank}: another stage is lost. Expected: a rank that "
                f"answers. Got: {error}. What to do: {self.control.advice(error)}") from error


class _Coming(NamedTuple):
    """
    ## An announcement that will arrive
    """

    action: Action
    source: int
    row: torch.Tensor
    work: Any


class _Asked(NamedTuple):
    """
    ## A value whose tensors will arrive
    """

    value: Any
    works: list[Any]


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

    What autograd has not computed may be a buffer of the module, which the next micro-batch changes
    before this message has left.
    """
    found = tensor.detach().resolve_conj().resolve_neg().contiguous()
    is_same = found.data_ptr() == tensor.data_ptr()
    return found.clone() if is_same and tensor.grad_fn is None else found


def _is_gradient(action: Action) -> bool:
    return "gradient" in action.kind


def _tag_of(number: int, gradients: bool) -> int:
    """
    #### The tag of tensors with this description
    """
    return _CAUSE_TAG + 2 * (1 + number) + gradients


def _words(action: Action) -> str:
    number = "" if action.micro_batch < 0 else f", micro-batch {action.micro_batch}"
    return f"{action.kind}, stage {action.stage}{number}"

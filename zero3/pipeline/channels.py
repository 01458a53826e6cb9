r"""
# Channels: activations and gradients between the ranks of a pipeline

A stage hands on what its last layer returns: tensors, also in tuples, lists and dicts. The next
rank has to know their shapes before they arrive. Each message has up to three parts:

| part | size | by | when |
|---|---|---|---|
| announcement | 32 bytes | gloo | always: what follows, for which stage and micro-batch |
| description | a few hundred bytes | gloo | if it is not that of the micro-batch before |
| tensors | their bytes | the default backend | if they have elements |

Take two stages, four micro-batches, and activations of 8 × 16 fp32 elements, 512 bytes. Rank 0
sends four announcements, one description, and 2,048 bytes of tensors.

$$\text{sent by a rank} = \text{micro-batches} \cdot (\text{bytes of activations} +
\text{bytes of gradients})$$

Tied weights come on top.

The announcement says what the receiver should be about to do. If it is about to do something else,
it raises an error, because both would wait forever. Or it says that the sender has failed.

**Why several process groups.** NCCL runs the transfers between two ranks in the order in which they
were queued. If rank 0 queued an activation and rank 1 a gradient, each would wait for the other to
receive. So with NCCL there are four groups: for activations and for gradients, to later ranks and
to earlier ones. The announcements have a group of gloo, because the host reads them without
waiting for a device.

**Ahead and on demand.** gloo sends a message only after the receiver has asked for it. A rank asks
for the next announcement as soon as it has read the last one, because its size is known. It asks
for tensors in `receive`, so on the CPU their transfer overlaps nothing there.

**Run this**: `python -m pytest tests/pipeline/test_channels.py`.

**Not covered, and what that costs**: a description is a pickle, so ranks trust each other. The
process groups stay until the program ends.
"""

import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from zero3.comm.order import Counted, Group, node_of, timeout_of
from zero3.flat import in_flight
from zero3.guards.checks import expect, same
from zero3.pipeline.schedules import KINDS, Action

# Tensors, in tuples, lists and dicts of any depth.
Tree = Any
LEAVES = (torch.Tensor, int, float, str, type(None))
# In the place of the kind in an announcement: the sender has failed.
_FAULT = -1
# How long to wait for the rank that has failed first to say why.
_CAUSE_WAIT = timedelta(seconds=5)


class Channels:
    """
    ## The ways from this rank to the others of its pipeline, and back
    """

    def __init__(self, line: Group,
                 ranks: tuple[int, ...],
                 device: torch.device):
        """
        ### Make the process groups

        * `line` has the ranks of this pipeline, in order
        * `ranks` are those of all pipelines side by side
        * `device` is where tensors arrive

        All of these ranks call it.
        """
        self.line = line
        self.device = device
        # Whether each rank of the pipeline is on another node.
        self.far = [node_of(rank) != node_of(line.global_rank)
                    for rank in line.ranks]
        # A process group has its ranks in ascending order.
        self.control = self._group(tuple(sorted(ranks)), "gloo")
        # The group of each way: whether of gradients, and whether to a later rank. All ranks make
        # as many in the same order: torch numbers them, and ranks with other numbers would wait for
        # each other.
        # gloo tells activations and gradients apart by their tags, so there one group has all ways.
        for_all = self._group(line.ranks, None) if device.type == "cpu" else None
        self.data = {(gradients, goes_on): for_all or self._group(line.ranks, None)
                     for gradients in (False, True)
                     for goes_on in (False, True)}
        # The last descriptions, by kind and stage of the receiving action: bytes of those that were
        # sent, and values of those that were received.
        self._descriptions: dict[tuple[str, int], Tree] = {}
        # Messages on their way, the oldest first.
        self._leaving: list[tuple[dist.Work, torch.Tensor]] = []
        # The next announcement, by its source and whether it is of gradients, once one has come.
        self._coming: dict[tuple[int, bool], tuple[dist.Work, torch.Tensor]] = {}

    def _group(self, ranks: tuple[int, ...], backend: str | None) -> Group:
        """
        #### A process group of these ranks alone, which all of them make
        """
        made = dist.new_group(
            ranks,
            timeout=timeout_of(dist.group.WORLD, self.device),
            backend=backend,
            use_local_synchronization=True)
        return Group(ranks, ranks.index(self.line.global_rank), weakref.ref(made))

    def compare(self, problem: str,
                batch: str,
                expected: str,
                cure: str) -> None:
        """
        ### Refuse batches that cannot be cut, or that differ between the stages of a pipeline

        * `problem` is what is wrong with this rank's, or empty; `batch` is what it is like
        * `expected` and `cure` are as for `expect`

        All ranks call it before anything moves: an all-gather of these texts by gloo. Pipelines
        side by side may have different shapes. Raises `ValueError` on all ranks.
        """
        told = dict(zip(self.control.ranks,
                        self.control.gather((self.line.ranks, problem, batch)),
                        strict=True))
        where = f"rank {self.line.global_rank}: the batch"
        for rank, (_, theirs, _) in told.items():
            expect(not theirs, where, expected, f"{theirs}, on rank {rank}", cure)
        for line in sorted({ranks for ranks, *_ in told.values()}):
            same(where, line,
                 [{"batch": told[rank][-1]} for rank in line],
                 cure, ValueError)

    def send(self, action: Action,
             to: int,
             value: Tree) -> Counted:
        """
        ### Start to send tensors

        * `action` is what the receiver is about to do, and `to` its place in the pipeline

        Returns what has been sent, for a `Ledger`. Raises `TypeError` if the value has anything
        that cannot be described.
        """
        # First, so that nobody waits for what cannot be sent.
        description = pickle.dumps(pytree.tree_map(self._described, value))
        tensors = [to_send(leaf) for leaf in pytree.tree_leaves(value)
                   if isinstance(leaf, torch.Tensor)]
        # Nothing, if the receiver has it.
        told = torch.tensor(
            [] if self._descriptions.get(action[:2]) == description else [*description],
            dtype=torch.uint8,
            device="cpu")
        self._descriptions[action[:2]] = description
        row = torch.tensor([KINDS.index(action.kind), *action[1:], len(told)],
                           device="cpu")
        while self._leaving and self._leaving[0][0].is_completed():
            self._leaving.pop(0)
        for group, parts in ((self.control, (row, told)),
                             (self.data[action.is_gradient, self.line.rank < to], tensors)):
            for tensor in parts:
                self._isend(tensor, to, group, action.is_gradient)
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return Counted(sent_bytes=nbytes,
                       between_bytes=nbytes * self.far[to],
                       messages=len(tensors),
                       order_bytes=row.nbytes + told.nbytes)

    def receive(self, action: Action, source: int) -> Tree:
        """
        ### Wait for what another rank sends for this action

        * `source` is its place in the pipeline

        Returns the value, with tensors on the device. Raises `RuntimeError` if the sender has
        failed, or does something else.
        """
        gradients = action.is_gradient
        work, row = self._coming.get((source, gradients)) or self._ask_row(source, gradients)
        self._wait(work, row)
        kind, stage, micro_batch, length = row.tolist()
        where = f"rank {self.line.global_rank}: {action.kind}, {action.where}"
        expect(kind != _FAULT, f"{where}: another rank has failed", "its tensors", "none",
               "mend that, and start again", RuntimeError)
        theirs = Action(KINDS[kind], stage, micro_batch)
        expect(theirs == action, f"{where}: the stages diverged", "its tensors",
               f"those for `{theirs.kind}, {theirs.where}`, from rank {self.line.ranks[source]}",
               "call `train_batch` and `eval_batch` in the same order on all ranks. Start again",
               RuntimeError)
        if length:
            told = torch.empty(length, dtype=torch.uint8, device="cpu")
            self._wait(*self._start(dist.irecv, told, source, self.control, gradients))
            self._descriptions[action[:2]] = pickle.loads(told.numpy().tobytes())
        self._coming[source, gradients] = self._ask_row(source, gradients)

        def arrived(like: torch.Tensor) -> torch.Tensor:
            # Not `empty_like`, which torch computes in Python if `like` is on another device.
            found = torch.empty(like.shape, dtype=like.dtype,
                                device=self.device)
            if found.numel():
                self._wait(*self._start(
                    dist.irecv,
                    found,
                    source,
                    self.data[gradients, source < self.line.rank],
                    gradients))
            return found.requires_grad_(like.requires_grad)

        return pytree.tree_map_only(torch.Tensor, arrived, self._descriptions[action[:2]])

    def fail(self, text: str, knows: bool = True) -> str:
        """
        ### Tell the other stages that this rank has failed, and return the first error of all ranks

        * `text` is the error of this rank; it `knows` unless another rank's failure caused it

        The other stages receive the news in the place of tensors. All of them find the first error
        in the store of the process group.
        """
        first = text
        with suppress(RuntimeError, ValueError):
            group: Any = self.control.process_group
            store = group.get_group_store()
            if not knows:
                store.wait(["first error"], _CAUSE_WAIT)
            first = store.compare_set("first error", "", text).decode()
        for to in {*range(self.line.size)} - {self.line.rank}:
            for gradients in (False, True):
                with suppress(RuntimeError):
                    self._isend(torch.tensor([_FAULT, 0, 0, 0], device="cpu"),
                                to,
                                self.control,
                                gradients)
        # Others wait for these messages, even if the pipeline is gone.
        in_flight.begin(self)
        in_flight.lose(self)
        return first

    def end(self) -> None:
        """
        ### Wait until everything that was sent has been received
        """
        while self._leaving:
            self._wait(*self._leaving.pop(0))

    def _isend(self, tensor: torch.Tensor,
               to: int,
               group: Group,
               gradients: bool) -> None:
        """
        #### Start to send a tensor, and keep it until it has been received

        gloo matches messages by their tags, and those of one tag by their order.
        """
        if tensor.numel():
            self._leaving.append(self._start(dist.isend, tensor, to, group, gradients))

    def _ask_row(self, source: int, gradients: bool) -> tuple[dist.Work, torch.Tensor]:
        """
        #### Ask for the next announcement from a rank
        """
        return self._start(dist.irecv,
                           torch.empty(4, dtype=torch.int64, device="cpu"),
                           source,
                           self.control,
                           gradients)

    def _start(self, call: Callable,
               tensor: torch.Tensor,
               other: int,
               group: Group,
               gradients: bool) -> tuple[dist.Work, torch.Tensor]:
        """
        #### Start to send a tensor, or to fill it by a message; return what `_wait` takes

        * `call` is `isend` or `irecv`, and `other` the place of the other rank
        """
        with self._explained():
            return call(tensor,
                        self.line.ranks[other],
                        group.process_group,
                        tag=int(gradients)), tensor

    def _wait(self, work: dist.Work, tensor: torch.Tensor) -> None:
        """
        #### Wait until a message has been received, or its time is over

        For a message of NCCL's the current stream waits, and NCCL looks at the time. With a limit
        the host would wait too.
        """
        with self._explained():
            if tensor.device.type == "cpu":
                work.wait(self.control.timeout)
            else:
                work.wait()

    def _described(self, leaf: object) -> object:
        """
        #### The description of a tensor is one like it without memory; other values are their own
        """
        got = f"a {type(leaf).__name__}, which the next rank could not make"
        if isinstance(leaf, torch.Tensor):
            if leaf.layout == torch.strided and leaf.device == self.device:
                return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta",
                                   requires_grad=leaf.requires_grad)
            got = f"{leaf.layout} on {leaf.device}"
        elif isinstance(leaf, LEAVES):
            return leaf
        raise TypeError(
            f"rank {self.line.global_rank}: a stage returns what cannot be sent. Expected: dense "
            f"tensors on {self.device}, numbers and texts, in tuples, lists and dicts. Got: {got}. "
            "What to do: return its tensors in a tuple or a dict, or cut the stages elsewhere.")

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


def to_send(tensor: torch.Tensor) -> torch.Tensor:
    """
    ## A tensor's elements in a row, in memory that nobody writes to

    The next micro-batch may change a buffer of the module before this message has left. The module
    may also have written a result to such a buffer: the result has a gradient, and counts the
    write. A result that nobody has written to has memory of its own, and is sent without a copy.
    """
    found = tensor.detach().resolve_conj().resolve_neg().contiguous()
    is_same = found.data_ptr() == tensor.data_ptr()
    is_written = tensor.grad_fn is None or tensor._version > 0
    return found.clone() if is_same and is_written else found

r"""
# Optimizers that need whole matrices

`Owners` steps parameters whole, each on one rank, so that Muon, LAMB or Adafactor train a sharded
model with the bits of plain PyTorch.

**A gradient of four numbers on two ranks.** [Muon](https://kellerjordan.github.io/posts/muon/)
makes the singular values of a gradient almost equal, by five iterations of Newton-Schulz. A flat
parameter is cut anywhere, here between the rows of a $2 \times 2$ matrix:

| | rank 0 | rank 1 | |
|---|---|---|---|
| gradient, in shards | 3 1 | 1 3 | |
| Muon of each shard | .65 .22 | .22 .65 | a row alone keeps its direction |
| **Muon of the matrix** | **.90 -.21** | **-.21 .90** | off the diagonal the sign changes |

So each such parameter gets one *owner* among the ranks that share it. The owner receives the
pieces, steps the whole tensor with torch's own class, and sends the new values back. All other
parameters are stepped in their shards.

```python
rule = Matrices(plain, lr=0.02, weight_decay=0.1)  # from the model before it is sharded
print(rule)                                        # what it has chosen, and why
model = wrap(plain, Block)
optimizer = Zero3Optimizer(model, torch.optim.AdamW, lr=3e-4, group_by=rule, clip_grad_norm=1.0)
scheduler = CosineAnnealingLR(optimizer, 1000)     # of both optimizers
optimizer.backward(loss_of(model(x)))
optimizer.step()
```

**Who owns what.** Newton-Schulz on an $m \times n$ matrix takes time in proportion to

$$\min(m,n)^2 \max(m,n)$$

The most expensive matrix comes first, and each goes to the rank with the least to do. On 64 ranks
the slowest owner computes 1.11 times the mean for Llama 8B.

**What rests where.** Gradients and masters stay in the shards, so tiers, checkpoints and edits of
weights work as before. Moments live whole on the owner. With masters of 4 bytes and gradients of
$b_g$ bytes, an element of another rank than the owner costs

$$\underbrace{(4 + b_g)}_{\text{to the owner}} + \underbrace{4}_{\text{back}} \quad \text{bytes}$$

A rank has $\frac{1}{N}$ of a matrix, so with 8 ranks and bf16 it sends 1.09 bytes per element in a
step, beside 5.25 for gathers and the reduce.

**Rounds.** In a round each owner computes about as much as the most expensive matrix costs, while
the pieces of the next round travel.

**Run this**: `make train ARGS="--optimizer muon"`.

**Not covered, and what that costs**: two rounds are in memory at once. Each replica computes all
steps. Moments of whole parameters rest in memory, also if other states are in files. The assignment
knows the cost of Newton-Schulz only. If an owner's step fails, others have stepped already.
Matrices that tensor parallelism has split are refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from zero3.comm.collectives import ALONE, Communicator, Transfer
from zero3.comm.links import ranks_of_parts
from zero3.comm.order import Listener, node_of
from zero3.comm.parts import part_of
from zero3.flat import Slot
from zero3.guards.options import Named, expect
from zero3.optimizer.portions import inside
from zero3.optimizer.states import ShardStates

# A class of `torch.optim`, for instance.
Maker = Callable[..., torch.optim.Optimizer]
Options = dict[str, object]
GroupBy = Callable[[str, nn.Parameter], Options]
KNOWN_LOOKS = ("element", "parameter")
STEPS_EACH = "one that steps each parameter by itself, with a dense gradient"
_CURE = ("give this optimizer the hidden matrices alone, and the rest to another one: "
         "`Zero3Optimizer(model, torch.optim.AdamW, group_by=Matrices(plain))`")


class Owners:
    """
    ## The owners of whole parameters, and their step

    It is empty unless a param group has the option `optimizer`.
    """

    def __init__(self, stepper: Stepper,
                 groups: dict[int, Options],
                 paths: dict[nn.Module, str]):
        """
        ### Choose the owners, and make the inner optimizers

        * `groups` has the options of each param group that is stepped whole, by its number
        * `paths` are the names of the layers in the plain model

        All ranks call this alike. Raises `RuntimeError` if a class refuses a parameter or an
        option, if a group has no elements, or for what is not covered.
        """
        self.stepper = stepper
        self.comm = stepper.comm
        self.wholes = [
            Whole(f"{paths[states.layer]}.{slot.names[0]}".strip("."), states, position)
            for states in stepper.shard_states for position, slot in enumerate(states.flat.slots)
            if position in states.wholes and slot.view.numel()]
        self.coming: list[Trip] = []
        self.going: list[Trip] = []
        if groups:
            self._check_groups(groups)
        owners = assign([cost(whole.shape)
                         for whole in self.wholes], self.comm.world_size)
        for whole, owner in zip(self.wholes, owners, strict=True):
            whole.owner = owner
        # What this rank owns, with the parameters of the inner optimizers.
        self.own = {whole: self._stand_in(whole) for whole in self.wholes
                    if whole.owner == self.comm.rank}
        # The inner optimizer of each param group.
        self.inner = {
            index: _optimizer_of(options, [
                param for whole, param in self.own.items() if whole.group_index == index])
            for index, options in groups.items()}
        # They have elements only in their step.
        for param in self.own.values():
            param.data = param.new_empty(0)

    # --------------------------------------------------------------------------------------- build

    def _check_groups(self, groups: dict[int, Options]) -> None:
        """
        #### Let each class look at its parameters, on all ranks
        """
        known = {index for theirs in self.comm.stages.gather(
            [whole.group_index for whole in self.wholes]) for index in theirs}
        for index, options in groups.items():
            self.stepper.expect(index in known, "would leave an optimizer without work",
                                "a parameter with elements", f"none for {options}",
                                "correct `group_by`, or leave this group out")
        for whole in self.wholes:
            options = groups[whole.group_index]
            self.stepper.expect(
                part_of(whole.states.layer.module, whole.slot.names[0]) is None,
                f"cannot step `{whole.name}` whole", "a matrix that is sharded and not split",
                "a part of it, because of tensor parallelism",
                "leave it out of the group, or train without `tensor_parallel`")
            try:
                _optimizer_of(options, [self._stand_in(whole)])
            except (TypeError, ValueError) as error:
                self.stepper.expect(False, f"cannot step `{whole.name}`", "parameters and options "
                                    f"that {class_name(options['optimizer'])} takes", f"{error}",
                                    _CURE)
        for options in groups.values():
            looks = looks_at(partial(_optimizer_of, options), {}, self.stepper.device)
            self.stepper.expect(looks in KNOWN_LOOKS, "cannot use this class", STEPS_EACH,
                                f"{class_name(options['optimizer'])}: {looks}",
                                "take Muon, for instance")

    def _stand_in(self, whole: Whole) -> nn.Parameter:
        """
        #### A parameter of this shape, with one zero for all elements
        """
        zero = torch.zeros((), dtype=whole.states.master_dtype, device=self.stepper.device)
        return nn.Parameter(zero.expand(whole.shape))

    @property
    def param_groups(self) -> list[Options]:
        """
        ### The param groups of the inner optimizers, which a scheduler changes
        """
        return [inner.param_groups[0] for inner in self.inner.values()]

    # ---------------------------------------------------------------------------------------- step

    def step(self, used: dict[ShardStates, list[bool]], factor: float) -> None:
        """
        ### Step all whole parameters that have a gradient

        * `used` says which parameters have one; in shards that are not in there, all have
        * `factor` unscales and clips the gradients

        All ranks call it. The new values are in the masters afterwards.
        """
        stepped = [whole for whole in self.wholes if whole.states.has_grad
                   and (whole.states not in used or used[whole.states][whole.position])]
        try:
            for wholes in in_rounds(stepped):
                self._collect(wholes)
                # The round before, while this one travels.
                if len(self.coming) > 1:
                    self._compute(self.coming[0], factor)
            for trip in [*self.coming]:
                self._compute(trip, factor)
            self._land()
        finally:
            self.coming.clear()
            self.going.clear()

    def _collect(self, wholes: list[Whole]) -> None:
        """
        #### Start to send values and gradients to the owners
        """
        carried: list[Carried] = []
        arriving: dict[Whole, list[torch.Tensor]] = {}
        for whole in wholes:
            mine = self._piece(whole)
            if whole in self.own:
                # (numel,) each, device
                arriving[whole] = [part.new_empty(whole.numel) for part in mine]
            carried += [(whole, part, at_owner) for part, at_owner
                        in zip_longest(mine, arriving.get(whole, []))]
        self._start("collect", carried, wholes, arriving)

    def _piece(self, whole: Whole) -> tuple[torch.Tensor, torch.Tensor]:
        """
        #### This rank's values and gradient, on the layer's device
        """
        where = whole.in_shard(self.comm.rank)
        states = whole.states
        with states.in_memory(self.stepper.state, write=False) as ((_, master, grad),):
            # The next shard gets the buffer of one that rests in a file.
            copies = states.in_file is not None
            master, grad = (each[where].to(states.layer.device, copy=copies)
                            for each in (master, grad))
            return master, grad

    def _compute(self, trip: Trip, factor: float) -> None:
        """
        #### Step the parameters that have arrived
        """
        trip.transfer.wait()
        for whole, tensors in trip.tensors.items():
            # The gradient is used up.
            self._step_one(whole, tensors[0], tensors.pop(), factor)
        self.coming.remove(trip)
        self._land()
        self._give_back(trip.wholes, {whole: values
                                      for whole, (values,) in trip.tensors.items()})

    def _step_one(self, whole: Whole,
                  values: torch.Tensor,
                  grad: torch.Tensor,
                  factor: float) -> None:
        """
        #### Unscale, clip and step one parameter

        * `values`, `(numel,)`, gets the new ones
        """
        param = self.own[whole]
        inner = self.inner[whole.group_index]
        group = inner.param_groups[0]
        pieces = group["params"]
        wide = grad.to(values.dtype)
        if factor != 1:
            wide = wide.mul_(factor)
        device = self.stepper.device
        param.data = values.to(device).view(whole.shape)
        param.grad = wide.to(device).view(whole.shape)
        group["params"] = [param]
        try:
            inner.step()
        except Exception as error:
            self.comm.fail(self.stepper, f"cannot step `{whole.name}`",
                           f"a step of {type(inner).__name__}", f"{type(error).__name__}: {error}",
                           "look at this error, and start again: others have been stepped")
        finally:
            group["params"] = pieces
        # Another device has a copy of the values.
        values.copy_(param.data.view(-1))
        param.grad = None
        param.data = param.new_empty(0)

    def _give_back(self, wholes: list[Whole], values: dict[Whole, torch.Tensor]) -> None:
        """
        #### Start to send the new values back

        * `values` are those of the parameters that this rank owns
        """
        pieces: dict[Whole, list[torch.Tensor]] = {}
        for whole in wholes:
            where = whole.within(self.comm.rank)
            # (the elements of this rank,), device
            piece = (values[whole][where] if whole in values else torch.empty(
                where.stop - where.start, dtype=whole.states.master_dtype,
                device=whole.states.layer.device))
            pieces[whole] = [piece]
        carried = [(whole, piece, values.get(whole))
                   for whole, (piece,) in pieces.items()]
        self._start("give back", carried, wholes, pieces)

    def _land(self) -> None:
        """
        #### Put values that have come back into the masters
        """
        while self.going:
            trip = self.going.pop()
            trip.transfer.wait()
            for whole, (piece,) in trip.tensors.items():
                if not len(piece):
                    continue
                in_file = whole.states.in_file is not None
                with whole.states.in_memory(self.stepper.state, write=in_file) as ((_, master, _),):
                    master[whole.in_shard(self.comm.rank)] = piece.to(master.device)

    def _start(self, event: str, carried: list[Carried],
               wholes: list[Whole],
               tensors: dict[Whole, list[torch.Tensor]]) -> None:
        """
        #### Start to send pieces to the owners, or back

        * `event` is "collect" or "give back"; the other arguments are those of the `Trip`

        All ranks call it. Two ranks list what they exchange in the same order.
        """
        comm = self.comm
        sharing = ranks_of_parts(comm)
        # Tensors, and the rank that each goes to or comes from, by the number of its shard.
        there: list[tuple[int, torch.Tensor]] = []
        here: list[tuple[int, torch.Tensor]] = []
        nbytes = 0
        for whole, piece, at_owner in carried:
            nbytes += whole.numel * piece.itemsize
            if at_owner is None:
                there.append((whole.owner, piece))
                continue
            here += [(rank, at_owner[whole.within(rank)])
                     for rank in range(comm.world_size)
                     if rank != whole.owner]
            mine = at_owner[whole.within(comm.rank)]
            target, source = (mine, piece) if event == "collect" else (piece, mine)
            target.copy_(source)
        sends, receives = (there, here) if event == "collect" else (here, there)
        # As many bytes, without memory.
        size = torch.empty(1, dtype=torch.uint8).expand(nbytes)
        transfer = comm.begin([*comm.sharers], [self.stepper], "pieces", [(size, size)])
        tag = transfer.tag()
        # Empty messages are not sent.
        ops = [dist.P2POp(op, tensor, sharing.ranks[rank], sharing.process_group, tag)
               for op, messages in ((dist.irecv, receives), (dist.isend, sends))
               for rank, tensor in messages if len(tensor)]
        transfer.buffers += [op.tensor for op in ops]
        # Together, or two ranks of NCCL could wait for each other. gloo starts messages one by one:
        # if the connection is gone, those that have started are known, and keep their memory.
        batches = [[op] for op in ops] if comm.by_messages else [ops] * bool(ops)
        for batch in batches:
            with transfer.starting(*(op.tensor for op in batch)) as works:
                works += dist.batch_isend_irecv(batch)
        for rank, tensor in sends:
            is_far = node_of(sharing.ranks[rank]) != node_of(comm.global_rank)
            transfer.sent_bytes += tensor.nbytes
            transfer.between_bytes += tensor.nbytes * is_far
            transfer.messages += len(tensor) > 0
        transfer.done.record()
        trips = self.coming if event == "collect" else self.going
        trips.append(Trip(transfer, wholes, tensors))
        self.stepper.listener.record(self.stepper, event, nbytes, transfer)

    # ---------------------------------------------------------------------------------- bookkeeping

    def state_of(self, whole: Whole) -> dict[str, object]:
        """
        ### The state that this rank has of a parameter, if it is the owner
        """
        param = self.own.get(whole)
        return {} if param is None else self.inner[whole.group_index].state.get(param, {})

    def put_state(self, whole: Whole, state: dict[str, object]) -> None:
        """
        ### Replace the state of a parameter that this rank owns
        """
        known = self.inner[whole.group_index].state
        known.pop(self.own[whole], None)
        # Some classes take an empty state for one that is there.
        if state:
            known[self.own[whole]] = {
                key: value.to(self.stepper.device) if isinstance(value, torch.Tensor) else value
                for key, value in state.items()}

    def state_dict(self) -> dict[int, dict[str, object]]:
        """
        ### The states of the parameters that this rank owns, by their numbers
        """
        return {i: dict(self.state_of(whole))
                for i, whole in enumerate(self.wholes)
                if self.state_of(whole)}

    def load_state_dict(self, states: dict[int, dict[str, object]], groups: Sequence[Options]
                        ) -> None:
        """
        ### Load these states, and the options of the param groups that are stepped whole
        """
        for i, whole in enumerate(self.wholes):
            if whole in self.own:
                self.put_state(whole, states.get(i, {}))
        for group, saved in zip(self.param_groups, groups, strict=False):
            group.update({key: value
                          for key, value in saved.items() if key != "params"})

    def spread(self) -> dict[nn.Parameter, Spread]:
        """
        ### The states of all whole parameters in pieces, for a checkpoint (all ranks call it)

        Each rank gets the moments of the elements in its shard, by the piece of its master.
        """
        if not self.wholes:
            return {}
        kinds = {}
        for i, own in self.state_dict().items():
            # A moment has the shape of its parameter.
            dtypes = {key: value.dtype
                      for key, value in own.items() if key != "step"
                      and isinstance(value, torch.Tensor) and value.shape == self.wholes[i].shape}
            kinds[i] = dtypes, {key: own[key]
                                for key in own if key not in dtypes}
        every = {i: each
                 for theirs in self.comm.gather(kinds) for i, each in theirs.items()}
        found: dict[nn.Parameter, Spread] = {}
        carried: list[Carried] = []
        for i, (dtypes, others) in sorted(every.items()):
            whole = self.wholes[i]
            span = whole.states.spans[whole.position]
            where = whole.within(self.comm.rank)
            # (the elements of this rank and its padding,) for each moment
            moments = {key: torch.zeros(span.stop - span.start, dtype=dtype,
                                        device=whole.states.layer.device)
                       for key, dtype in dtypes.items()}
            state: Any = self.state_of(whole)
            carried += [(whole, piece[: where.stop - where.start],
                         state[key].to(piece.device).reshape(-1) if state else None)
                        for key, piece in moments.items()]
            found.update({piece.param: Spread(moments, others)
                          for piece in whole.states.pieces
                          if piece.where == span})
        self._start("give back", carried, [], {})
        self.going.pop().transfer.wait()
        return found

    def held_tensors(self) -> Iterator[torch.Tensor]:
        """
        ### States of the parameters that this rank owns, and what is on its way, for a `Ledger`
        """
        for inner in self.inner.values():
            for state in inner.state.values():
                yield from (each for each in state.values() if isinstance(each, torch.Tensor))
        for trip in (*self.coming, *self.going):
            yield from trip.transfer.buffers
            for tensors in trip.tensors.values():
                yield from tensors


# ----------------------------------------------------------------------------------------- records


@dataclass(eq=False)
class Whole:
    """
    ## A parameter that is stepped whole
    """

    name: str  # in the plain model
    states: ShardStates
    position: int  # among the parameters of the flat one
    owner: int = 0

    @property
    def group_index(self) -> int:
        return self.states.group_indices[self.position]

    @property
    def slot(self) -> Slot:
        return self.states.flat.slots[self.position]

    @property
    def shape(self) -> torch.Size:
        return self.slot.view.shape

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def within(self, rank: int) -> slice:
        """
        ### The elements of the parameter that the shard of a rank has
        """
        return inside(slice(self.slot.offset, self.slot.end), self._shard_of(rank))

    def in_shard(self, rank: int) -> slice:
        """
        ### Where in the shard of a rank these elements are
        """
        return inside(self._shard_of(rank), slice(self.slot.offset, self.slot.end))

    def _shard_of(self, rank: int) -> slice:
        """
        #### The range of the flat parameter that is the shard of a rank
        """
        shard_numel = len(self.states.shard)
        return slice(rank * shard_numel, (rank + 1) * shard_numel)


@dataclass(eq=False)
class Trip:
    """
    ## Parameters on their way to their owners, or back
    """

    transfer: Transfer
    wholes: list[Whole]
    # On the owner values and gradient, `(numel,)` each. On the way back, this rank's new values.
    tensors: dict[Whole, list[torch.Tensor]]


class Spread(NamedTuple):
    """
    ## The state of a whole parameter, as one rank saves it
    """

    moments: dict[str, torch.Tensor]  # for each the elements of the rank's piece, `(n,)`
    others: dict[str, object]  # the count of steps, for instance, or a number for each row


# A parameter, this rank's piece of something that has its shape, and on the owner all of it.
Carried = tuple[Whole, torch.Tensor, torch.Tensor | None]


class Stepper(torch.optim.Optimizer, Named):
    """
    ## An optimizer of shards, as far as its `Owners` have to know it

    It sends norms and pieces, so it has what a `Communicator` and a `Ledger` read of a layer.
    """

    label = "the optimizer"
    layer_idx = ALONE  # like every layer that is in no chain
    comm: Communicator
    listener: Listener
    device: torch.device  # of the step
    shard_states: list[ShardStates]


# ---------------------------------------------------------------------------------------- planning


def cost(shape: Sequence[int]) -> int:
    r"""
    ## What a step of a parameter costs: $\min(m,n)^2 \max(m,n)$
    """
    rows = shape[0] if len(shape) else 1
    columns = torch.Size(shape).numel() // max(1, rows)
    return min(rows, columns) ** 2 * max(rows, columns)


def assign(costs: Sequence[int], ranks: int) -> list[int]:
    """
    ## The owner of each parameter
    """
    owners = [0] * len(costs)
    loads = [0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += costs[i]
    return owners


def in_rounds(wholes: Sequence[Whole]) -> list[list[Whole]]:
    """
    ## Which parameters travel together
    """
    most = max((cost(whole.shape) for whole in wholes), default=1)
    loads: dict[int, int] = defaultdict(int)
    rounds: dict[int, list[Whole]] = defaultdict(list)
    for whole in sorted(wholes, key=lambda whole: -cost(whole.shape)):
        rounds[loads[whole.owner] // most].append(whole)
        loads[whole.owner] += cost(whole.shape)
    return [rounds[number] for number in sorted(rounds)]


# ---------------------------------------------------------------------------------- param groups


def looks_at(make: Maker, kwargs: Options, device: torch.device) -> str:
    """
    ## What an optimizer class looks at in its step: each "element", each "parameter", or a problem

    Found out by trying: a class that steps each element does to the rows of a matrix what it does
    to the matrix.

    Raises what the class raises about its options.
    """
    make([nn.Parameter(torch.ones(2, 2, device=device))], **kwargs)
    if "lr" in kwargs:
        # Zero, for instance, would hide the difference.
        kwargs = {**kwargs, "lr": 0.1}
    matrices = torch.arange(1.0, 9.0, dtype=torch.double, device=device).view(2, 2, 2)
    try:
        together = _tried(make, kwargs, [[*matrices]])
        alone = _tried(make, kwargs, [[each] for each in matrices])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if not torch.allclose(together, alone, rtol=1e-3, atol=0):
        return "another step if it has two parameters"
    try:
        rows = _tried(make, kwargs, [[*matrices.view(4, 2)]])
    except Exception:
        return "parameter"
    same = torch.allclose(together, rows, rtol=1e-3, atol=0)
    return "element" if same else "parameter"


def _tried(make: Maker,
           kwargs: Options, values: list[list[torch.Tensor]]) -> torch.Tensor:
    """
    #### By how much three steps change some values, with an optimizer for each list: `(n,)`
    """
    params = [[nn.Parameter(value.clone())
               for value in each] for each in values]
    every = [*chain(*params)]
    device = every[0].device
    # A class may draw random numbers.
    with torch.random.fork_rng([device] * (device.type != "cpu"), device_type=device.type):
        torch.manual_seed(0)
        optimizers = [make(each, **kwargs) for each in params]
        for _ in range(3):
            for param in every:
                param.grad = param.detach() % 3 - 1
            for optimizer in optimizers:
                optimizer.step()
    return torch.cat([(param.detach() - value).flatten()
                      for param, value in zip(every, chain(*values), strict=True)])


def is_whole(options: Options) -> bool:
    """
    ## Whether parameters with these options are stepped whole
    """
    return "optimizer" in options


class Matrices:
    """
    ## A ready `group_by`: hidden matrices to Muon, the rest to the optimizer's class
    """

    def __init__(self, plain: nn.Module, optimizer: Maker = torch.optim.Muon,
                 but: Iterable[str] = (), **options: object):
        """
        ### Look for hidden matrices

        * `plain` is the model before it is sharded; for a chain, `nn.Sequential(*layers)`
        * `but` has names of parameters or modules to leave to the optimizer's class
        * `options` are those of `optimizer`

        A parameter with two dimensions is a hidden matrix, with three exceptions: those of an
        `nn.Embedding` or `nn.EmbeddingBag`, also if another module is tied to them; the last one in
        the order of the modules, which is the head; and those in `but`. A bare parameter that
        serves as a table of positions looks like a matrix, so name it there.

        Raises `ValueError` if nothing is chosen, or if a name in `but` is unknown.
        """
        self.group: Options = {"optimizer": optimizer, **options}
        # Why each name is left out; an empty string for a hidden matrix.
        self.reasons: dict[str, str] = {}
        named = [*plain.named_parameters(remove_duplicate=False)]
        tables = {id(param) for module in plain.modules()
                  if isinstance(module, (nn.Embedding, nn.EmbeddingBag))
                  for param in module.parameters(recurse=False)}
        last = [id(param)
                for _, param in named if param.ndim == 2 and param.requires_grad][-1:]
        for name, param in named:
            said = [each for each in but if _is_in(name, each)]
            self.reasons[name] = (
                f"{param.ndim} dimensions" if param.ndim != 2
                else "an embedding" if id(param) in tables
                else "the last matrix, so the head" if id(param) in last
                else f"but `{said[0]}`" if said else "")
        for each in but:
            found = any(_is_in(name, each) for name in self.reasons)
            expect(found, "Matrices", "the names of parameters or modules in `but`", f"`{each}`",
                   f"take one of {[*self.reasons]}")
        expect("" in self.reasons.values(), "Matrices", "a hidden matrix", f"{self}", "build it "
               "from the plain model, before it is sharded")

    def __call__(self, name: str, param: nn.Parameter) -> Options:
        """
        ### The options of a parameter, for `Zero3Optimizer(group_by=)`

        Raises `ValueError` if the plain model had no such parameter.
        """
        expect(name in self.reasons, "Matrices", "a parameter of the plain model", f"`{name}`",
               "build it from the model that is sharded, before that")
        return {} if self.reasons[name] else dict(self.group)

    def __str__(self) -> str:
        """
        ### What it has chosen, a line for each parameter
        """
        make = class_name(self.group["optimizer"])
        return "\n".join(f"{name}: {f'left out, {why}' if why else make}"
                         for name, why in self.reasons.items())


def _optimizer_of(options: Options, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """
    #### An optimizer of the class that the options name
    """
    options = dict(options)
    make = options.pop("optimizer")
    return make([{"params": params}], **options)  # type: ignore[operator]


def _is_in(name: str, module: str) -> bool:
    """
    #### Whether a parameter has this name, or is inside the module of this name
    """
    return name == module or name.startswith(f"{module}.")


def class_name(make: object) -> str:
    """
    ## The name of an optimizer class, or of something else that makes one
    """
    return getattr(make, "__name__", str(make))

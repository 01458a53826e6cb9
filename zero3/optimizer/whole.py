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

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from zero3.comm.collectives import ALONE, Communicator, Transfer
from zero3.comm.links import ranks_of_parts
from zero3.comm.order import Group, Listener
from zero3.comm.parts import inside, length, part_of
from zero3.guards.checks import Named, expect
from zero3.optimizer.states import Member, ShardStates, is_whole, seeded

Maker = Callable[..., torch.optim.Optimizer]
Options = dict[str, object]
GroupBy = Callable[[str, nn.Parameter], Options]
KNOWN_LOOKS = ("element", "parameter")
STEPS_EACH = "one that steps each parameter by itself, with a dense gradient"


class Owners:
    """
    ## The owners of whole parameters, and their step

    It is empty unless a param group has the option `optimizer`.
    """

    def __init__(self, stepper: "Stepper", groups: dict[int, Options]):
        """
        ### Choose the owners, and make the inner optimizers

        * `groups` has the options of each param group that is stepped whole, by its number

        All ranks call this alike. Raises `RuntimeError` if a class refuses a parameter or an
        option, if a group has no elements, or for what is not covered.
        """
        self.stepper = stepper
        self.comm = stepper.comm
        self.wholes = {param: states
                       for states in stepper.shard_states for param in states.params
                       if is_whole(param.options) and param.shape.numel()}
        # Pieces on their way to the owners, "collect", and back, "give back".
        self.trips: dict[str, list[Trip]] = defaultdict(list)
        self._check_groups(groups)
        for whole, owner in zip(
                self.wholes,
                assign([cost(whole.shape) for whole in self.wholes], self.comm.world_size),
                strict=True):
            whole.owner = owner
        # What this rank owns, with the parameters of the inner optimizers.
        self.own = {whole: self._stand_in(whole) for whole in self.wholes
                    if whole.owner == self.comm.rank}
        self.inner = {
            index: _optimizer_of(options, [
                param for whole, param in self.own.items() if whole.group_index == index])
            for index, options in groups.items()}

    # --------------------------------------------------------------------------------------- build

    def _check_groups(self, groups: dict[int, Options]) -> None:
        """
        #### Let each class look at its parameters, on all ranks
        """
        known = {index for theirs in self.comm.stages.gather(
            [whole.group_index for whole in self.wholes]) for index in theirs}
        for whole, states in self.wholes.items():
            options = groups[whole.group_index]
            self.stepper.expect(
                part_of(states.layer.module, whole.slot.names[0]) is None,
                f"cannot step `{whole.name}` whole", "a matrix that is sharded and not split",
                "a part of it, because of tensor parallelism",
                "leave it out of the group, or train without `tensor_parallel`")
            try:
                _optimizer_of(options, [self._stand_in(whole)])
            except (TypeError, ValueError) as error:
                self.stepper.expect(False, f"cannot step `{whole.name}`", "parameters and options "
                                    f"that {class_name(options['optimizer'])} takes", f"{error}",
                                    "give this optimizer the hidden matrices alone, and the rest "
                                    "to another one: `Zero3Optimizer(model, torch.optim.AdamW, "
                                    "group_by=Matrices(plain))`")
        for index, options in groups.items():
            self.stepper.expect(index in known, "would leave an optimizer without work",
                                "a parameter with elements", f"none for {options}",
                                "correct `group_by`, or leave this group out")
            looks = looks_at(partial(_optimizer_of, options), {}, self.stepper.device)
            self.stepper.expect(looks in KNOWN_LOOKS, "cannot use this class", STEPS_EACH,
                                f"{class_name(options['optimizer'])}: {looks}",
                                "take Muon, for instance")

    def _stand_in(self, whole: Member) -> nn.Parameter:
        """
        #### A parameter of this shape, with one zero for all elements
        """
        zero = torch.zeros(
            (), dtype=self.wholes[whole].master_dtype, device=self.stepper.device)
        return nn.Parameter(zero.expand(whole.shape))

    @property
    def param_groups(self) -> list[Options]:
        """
        ### The param groups of the inner optimizers, which a scheduler changes
        """
        return [inner.param_groups[0] for inner in self.inner.values()]

    # ---------------------------------------------------------------------------------------- step

    def step(self, unused: set[Member], factor: float) -> None:
        """
        ### Step all whole parameters that have a gradient

        * `unused` are parameters without one in a shard that has one
        * `factor` unscales and clips the gradients

        All ranks call it. The new values are in the masters afterwards.
        """
        stepped = [whole for whole, states in self.wholes.items()
                   if states.shard.grad is not None and whole not in unused]
        self.calls = {index: in_one_step(inner) for index, inner in self.inner.items()}
        try:
            for wholes in in_rounds(stepped):
                self._collect(wholes)
                # The round before, while this one travels.
                if len(self.trips["collect"]) > 1:
                    self._compute(factor)
            while self.trips["collect"]:
                self._compute(factor)
            self._land()
        finally:
            self.trips.clear()

    def _collect(self, wholes: list[Member]) -> None:
        """
        #### Start to send values and gradients to the owners
        """
        carried: list[Carried] = []
        for whole in wholes:
            states = self.wholes[whole]
            numel = length(self._within(whole, self.comm.rank))
            with states.in_memory(self.stepper.state, write=False) as ((_, master, grad),):
                # A copy, if it rests in a file, because the next shard gets the buffer.
                mine = [each[whole.span][:numel].to(states.layer.device,
                                                    copy=states.in_file is not None)
                        for each in (master, grad)]
            # (numel,), device
            carried += [(whole, part, part.new_empty(whole.shape.numel())
                         if whole in self.own else None) for part in mine]
        self._start("collect", carried)

    def _compute(self, factor: float) -> None:
        """
        #### Step the parameters of the first round, and start to send the new values back

        They go into the memory that the old ones came from, often the master itself.
        """
        trip = self.trips["collect"].pop(0)
        trip.transfer.wait()
        back: list[Carried] = []
        # Of each parameter the values, and then the gradient.
        for (whole, mine, values), (_, _, grad) in zip(
                trip.carried[::2], trip.carried[1::2], strict=True):
            if values is not None and grad is not None:
                self._step_one(whole, values, grad, factor)
            back.append((whole, mine, values))
        self._land()
        self._start("give back", back)

    def _step_one(self, whole: Member,
                  values: torch.Tensor,
                  grad: torch.Tensor,
                  factor: float) -> None:
        """
        #### Unscale, clip and step one parameter

        * `values`, `(numel,)`, gets the new ones
        """
        param = self.own[whole]
        inner = self.inner[whole.group_index]
        device = self.stepper.device
        param.data = values.to(device).view(whole.shape)
        param.grad = grad.to(values.dtype).mul_(factor).to(device).view(whole.shape)
        # `Zero3Optimizer` gives the group its pieces back after the step.
        inner.param_groups[0]["params"] = [param]
        try:
            self.calls[whole.group_index]()
        except Exception as error:
            self.comm.fail(self.stepper, f"cannot step `{whole.name}`",
                           f"a step of {type(inner).__name__}", f"{type(error).__name__}: {error}",
                           "look at this error, and start again: others have been stepped")
        # Another device has a copy of the values.
        values.copy_(param.data.view(-1))
        param.grad = None
        param.data = param.new_empty(0)

    def _land(self) -> None:
        """
        #### Put values that have come back into the masters
        """
        for trip in self.trips.pop("give back", []):
            trip.transfer.wait()
            for whole, piece, _ in trip.carried:
                states = self.wholes[whole]
                if len(piece):
                    with states.in_memory(
                            self.stepper.state,
                            write=states.in_file is not None) as ((_, master, _),):
                        master[whole.span][: len(piece)] = piece.to(master.device)

    def _within(self, whole: Member, rank: int) -> slice:
        """
        #### The elements of a parameter that the shard of a rank has
        """
        numel = len(self.wholes[whole].shard)
        return inside(slice(whole.slot.offset, whole.slot.end),
                      slice(rank * numel, (rank + 1) * numel))

    def _start(self, event: str, carried: "list[Carried]") -> None:
        """
        #### Start to send pieces to the owners, or back

        * `event` is "collect" or "give back"

        All ranks call it. Two ranks list what they exchange in the same order.
        """
        comm = self.comm
        sharing = ranks_of_parts(comm)
        # Tensors, and the rank that each goes to or comes from, by the number of its shard.
        sends: list[tuple[int, torch.Tensor]] = []
        receives: list[tuple[int, torch.Tensor]] = []
        there, here = (sends, receives) if event == "collect" else (receives, sends)
        for whole, piece, at_owner in carried:
            if at_owner is None:
                there.append((whole.owner, piece))
            else:
                here += [(rank, at_owner[self._within(whole, rank)])
                         for rank in range(comm.world_size)
                         if rank != whole.owner]
                mine = at_owner[self._within(whole, comm.rank)]
                target, source = (mine, piece) if event == "collect" else (piece, mine)
                target.copy_(source)
        nbytes = sum(whole.shape.numel() * piece.itemsize
                     for whole, piece, _ in carried)
        # As many bytes, without memory.
        size = torch.empty(1, dtype=torch.uint8, device="cpu").expand(nbytes)
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
        with transfer.starting(*(op.tensor for op in ops)) as works:
            for batch in batches:
                works += dist.batch_isend_irecv(batch)
        for rank, tensor in sends:
            transfer.count(Group((comm.global_rank, sharing.ranks[rank]), 0),
                           tensor.nbytes,
                           in_ring=False)
        transfer.done.record()
        self.trips[event].append(Trip(transfer, carried))
        self.stepper.listener.record(self.stepper, event, nbytes, transfer)

    # ---------------------------------------------------------------------------------- bookkeeping

    def state_of(self, whole: Member) -> dict[str, object]:
        """
        ### The state that this rank has of a parameter, if it is the owner
        """
        param = self.own.get(whole)
        return {} if param is None else self.inner[whole.group_index].state.get(param, {})

    def put_state(self, whole: Member, state: dict[str, object]) -> None:
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

    def load_state_dict(self, states: dict[int, dict[str, object]],
                        groups: Sequence[Options]) -> None:
        """
        ### Load these states, and the options of the param groups that are stepped whole
        """
        for i, whole in enumerate(self.wholes):
            if whole in self.own:
                self.put_state(whole, states.get(i, {}))
        for group, saved in zip(self.param_groups, groups, strict=False):
            group.update({key: value
                          for key, value in saved.items() if key != "params"})

    def spread(self) -> "dict[nn.Parameter, Spread]":
        """
        ### The states of all whole parameters in pieces, for a checkpoint (all ranks call it)

        Each rank gets the moments of the elements in its shard, by the piece of its master.
        """
        if not self.wholes:
            return {}
        wholes = [*self.wholes.items()]
        kinds = {}
        for i, own in self.state_dict().items():
            # A moment has the shape of its parameter.
            dtypes = {key: value.dtype
                      for key, value in own.items() if key != "step"
                      and isinstance(value, torch.Tensor) and value.shape == wholes[i][0].shape}
            kinds[i] = dtypes, {key: own[key]
                                for key in own if key not in dtypes}
        every = {i: each
                 for theirs in self.comm.gather(kinds) for i, each in theirs.items()}
        found: dict[nn.Parameter, Spread] = {}
        carried: list[Carried] = []
        for i, (dtypes, others) in sorted(every.items()):
            whole, states = wholes[i]
            # (the elements of this rank and its padding,) for each moment
            moments = {key: torch.zeros(length(whole.span), dtype=dtype,
                                        device=states.layer.device)
                       for key, dtype in dtypes.items()}
            state: Any = self.state_of(whole)
            carried += [(whole, piece[: length(self._within(whole, self.comm.rank))],
                         state[key].to(piece.device).reshape(-1) if state else None)
                        for key, piece in moments.items()]
            found.update({piece.param: Spread(moments, others)
                          for piece in states.pieces
                          if piece.where == whole.span})
        self._start("give back", carried)
        self.trips["give back"].pop().transfer.wait()
        return found

    def held_tensors(self) -> Iterator[torch.Tensor]:
        """
        ### States of the parameters that this rank owns, and what is on its way, for a `Ledger`
        """
        states = [[*inner.state.values()]
                  for inner in self.inner.values()]
        trips = [(trip.transfer.buffers, trip.carried)
                 for trip in chain(*self.trips.values())]
        yield from (each for each in pytree.tree_leaves([states, trips])
                    if isinstance(each, torch.Tensor))


# ----------------------------------------------------------------------------------------- records


# A parameter, this rank's piece of something that has its shape, and on the owner all of it.
Carried = tuple[Member, torch.Tensor, torch.Tensor | None]


class Trip(NamedTuple):
    """
    ## Parameters on their way to their owners, or back
    """

    transfer: Transfer
    carried: list[Carried]  # values and gradient of each parameter; on the way back its new values


class Spread(NamedTuple):
    """
    ## The state of a piece, or of a whole parameter, as one rank saves it
    """

    moments: dict[str, torch.Tensor]  # for each the elements of the rank's piece, `(n,)`
    others: dict[str, object]  # the count of steps, for instance, or a number for each row


class Stepper(torch.optim.Optimizer, Named):
    """
    ## An optimizer of shards, as far as its `Owners` have to know it

    It sends norms and pieces, so it has what a `Communicator` and a `Ledger` read of a layer.
    """

    label = "the optimizer"
    layer_idx = ALONE  # like every layer that is in no chain
    comm: Communicator
    listener = Listener()
    device: torch.device  # of the step
    shard_states: list[ShardStates]


def in_one_step(inner: torch.optim.Optimizer) -> Callable[[], None]:
    """
    ## A step in several calls, each for some of the parameters

    Each call finds the options of the first one. So a class that counts its steps in the param
    group counts one.
    """
    options = [{**group} for group in inner.param_groups]

    def call() -> None:
        for group, first in zip(inner.param_groups, options, strict=True):
            params = group["params"]
            group.clear()
            group.update(first, params=params)
        inner.step()

    return call


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


def in_rounds(wholes: Collection[Member]) -> list[list[Member]]:
    """
    ## Which parameters travel together
    """
    most = max((cost(whole.shape) for whole in wholes),
               default=1)
    loads: dict[int, int] = defaultdict(int)
    rounds: dict[int, list[Member]] = defaultdict(list)
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
    # A learning rate of zero would hide the difference.
    kwargs = {name: 0.1 if name == "lr" else value
              for name, value in kwargs.items()}
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
    # A class may draw random numbers.
    with seeded(every[0].device, 0):
        optimizers = [make(each, **kwargs) for each in params]
        for _ in range(3):
            for param in every:
                param.grad = param.detach() % 3 - 1
            for optimizer in optimizers:
                optimizer.step()
    if not all(isinstance(key, torch.Tensor) for each in optimizers for key in each.state):
        raise ValueError("a state of no parameter")
    return torch.cat([(param.detach() - value).flatten()
                      for param, value in zip(every, chain(*values), strict=True)])


class Matrices:
    """
    ## A ready `group_by`: hidden matrices to Muon, the rest to the optimizer's class
    """

    def __init__(self, plain: nn.Module, optimizer: Maker = torch.optim.Muon,
                 but: Collection[str] = (), **options: object):
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
            expect(any(_is_in(name, each) for name in self.reasons), "Matrices",
                   "the names of parameters or modules in `but`", f"`{each}`",
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
    others = {name: value
              for name, value in options.items() if name != "optimizer"}
    return options["optimizer"]([{"params": params}], **others)  # type: ignore[operator]


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

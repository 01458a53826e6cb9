r"""
# Checks: of arguments, of layers, and of what ranks are about to send

`whole` checks a number, and `expect` raises the error. `same` raises one if ranks differ.
`Named` raises errors under its own name. `Guarded` is a sharded layer, as far as guards and tiers
have to know it. `Announced` is a transfer between its ranks, and `diverged` compares what they have
announced.

`nan < 1` is false and so is `nan > 9`, so a NaN seems neither too small nor too large. And in
Python, `True` equals 1. So the checks here ask for right values, and refuse the rest:

$$\text{least} \le \text{value} \le \text{most}$$

**Run this**: `python -m zero3.estimate --params 0 --ranks 2`.

**Not covered, and what that costs**: values of tensors, and models. The layers check these.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import nn

# The largest number that torch takes as a size.
MOST = 2**63 - 1
# What a rank may be about to do. An announcement has the index in this tuple.
ACTIONS = ("gather", "reduce", "norm", "fault", "exchange", "gather from the node", "pieces",
           "save or load", "gather without rounding")
# The `layer_idx` of a sender that has no place in a chain or a model.
ALONE = -1


def whole(value: Any,
          least: int = 0,
          most: int = MOST) -> bool:
    """
    ## Whether the value is a whole number within limits

    It may be a number of another library that can be an index. `True` is no number here.
    """
    return (hasattr(type(value), "__index__") and not isinstance(value, bool)
            and least <= value <= most)


def expect(good: bool,
           what: str,
           expected: object,
           got: object,
           cure: str,
           kind: type[Exception] = ValueError) -> None:
    """
    ## Raise an error if an option cannot work

    * `good` says whether it can
    * `what` is the problem, `expected` a right value, `got` the value that was passed, and `cure`
      a remedy
    * `kind` is the class of the error
    """
    if not good:
        raise kind(f"{what}. Expected: {expected}. Got: {got}. What to do: {cure}.")


def same(what: str,
         ranks: Sequence[int],
         every: Sequence[Mapping[str, object]],
         cure: str,
         kind: type[Exception] = RuntimeError) -> None:
    """
    ## Raise an error on all ranks if they do not have the same values

    * `every` has the values of each of these ranks, by their names
    * `what`, `cure` and `kind` are as for `expect`
    """
    first = every[0]
    for rank, theirs in zip(ranks, every, strict=True):
        for name in {**first, **theirs}:
            here = first.get(name, "none")
            there = theirs.get(name, "none")
            if here != there:
                expect(False, what, f"the same {name} on all ranks",
                       f"{here!r} on rank {ranks[0]}, and {there!r} on rank {rank}", cure, kind)


class Named:
    """
    ## Whatever raises errors under its own name: a layer, a model, an optimizer, a checkpoint
    """

    label: str  # what errors call it
    comm: Any  # its communicator, which has the number of this rank

    def expect(self, good: bool,
               what: str,
               expected: object,
               got: object,
               cure: str) -> None:
        """
        ### Raise `RuntimeError` unless this is good
        """
        if not good:
            expect(False, f"rank {self.comm.global_rank}: {self.label} {what}", expected, got, cure,
                   RuntimeError)


# -------------------------------------------------------------------------- a layer, for its guards


class Guarded(nn.Module, Named):
    """
    ## A sharded layer, as far as guards and tiers have to know it
    """

    module: nn.Module
    device: torch.device
    chunk: nn.ParameterList  # the shards
    flats: list[Any]
    listener: Any  # hears what happens to it
    is_fetched = False  # from the start of an all-gather until the layer is freed
    is_full_elsewhere = False  # inside `full_params` the parameters are whole in other memory
    gathered_versions: tuple[int, ...] = ()  # `shard_versions` when the last one began
    holders: set[object]  # who needs its full parameters now
    externals: Collection[Any] = ()  # and whose parameters it computes with
    # The advice in errors about a parameter in the wrong place, and about a new one.
    cure = ("wrap each module once, put modules that share a parameter into one Zero3Layer, and "
            "build the optimizer on `get_trainable_chunk()` after wrapping")
    cure_for_new = ("wrap it in a `Zero3Layer` of its own, or assign it before this layer is "
                    "wrapped; and build the optimizer afterwards")

    def fetch_for_others(self) -> bool:
        """
        ### Gather the parameters for another layer that uses them, and return whether it may

        Here nothing is gathered.
        """
        return False

    def show_again(self) -> None:
        """
        ### Show the parameters again, if the layer has stayed full
        """
        if self.is_fetched:
            for flat in self.flats:
                flat.open(was_freed=False)

    def admits(self, layer: nn.Module) -> bool:
        """
        ### Whether a sharded layer may be inside this one
        """
        return True

    def lenders(self) -> "Iterator[Guarded]":
        """
        ### The layers whose parameters the module can read while it computes
        """
        yield from (self, *self.externals)

    def shard_versions(self) -> tuple[int, ...]:
        """
        ### How often each shard has been written to
        """
        return tuple(flat.shard._version for flat in self.flats)


def is_sharded(module: nn.Module) -> TypeGuard[Guarded]:
    """
    ## Whether this is a sharded layer: while it is being made, it is a module like any other
    """
    return isinstance(module, Guarded) and "guard" in vars(module)


def own_modules(module: nn.Module | None, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """
    ## A module and the modules inside, down to the next sharded layer, with prefixes for names

    In a module with a plain layer `a` and a sharded layer `b`:

    | | is sharded | is an own module of the outer one |
    |---|---|---|
    | the module | no | yes |
    | `a` | no | yes, as `a.` |
    | `b` | yes | no |
    | `b.module` | no | no: it is `b`'s |

    A module in a plain list is not inside, as for `modules()`.
    """
    if module is None or is_sharded(module):
        return
    yield prefix, module
    # Not `named_children`, which drops all names but the first.
    for name, child in module._modules.items():
        yield from own_modules(child, f"{prefix}{name}.")


def attributes(model: nn.Module) -> Iterator[dict[str, Any]]:
    """
    ## The attributes of each plain module inside, also of those that sharded layers stand for
    """
    for module in model.modules():
        yield vars(module.module if is_sharded(module) else module)


# ------------------------------------------------------------------- a transfer, for its guard


class Announced(Protocol):
    """
    ## A transfer that all ranks of a group have announced
    """

    action: str  # one of `ACTIONS`
    options: str  # what has to be the same on all ranks besides, in words
    comm: Any

    @property
    def where(self) -> str: ...


def diverged(transfer: Announced,
             ranks: tuple[int, ...],
             rank: int,
             order: torch.Tensor) -> str:
    r"""
    ## Compare the announcements of all ranks of a group

    If ranks exchanged different layers of equal size, the weights would silently be garbage; with
    different sizes gloo ends the process and NCCL hangs. So they announce

    $$(\text{layer}, \text{action}, \text{bytes}, \text{mark})$$

    The norms' mark has a checksum of the optimizer's options, so another learning rate is noticed,
    too. `python -m docs.mutations skip-one` shows the error. If a rank ends without an
    announcement, the others find out by NCCL's time-out.

    * `ranks` are its global ranks, and `rank` is this rank's place among them
    * `order` has their announcements, `(size, 4)` int64, on the device

    Returns the problem, if any. On an accelerator the device compares them itself, unless the host
    is about to wait anyway. Then an assertion on the device fails, and the error comes with the
    next operation that waits for the device, without ranks and layers. Run the same program on the
    CPU, or look at the last collectives with torch's flight recorder (`TORCH_FR_BUFFER_SIZE`).
    """
    comm = transfer.comm
    if not (comm.by_messages or transfer.options):
        problem = (f"{transfer.where}: the ranks diverged. Expected: a {transfer.action} of this "
                   "layer on all ranks. Got: another transfer. What to do: run the program on the "
                   "CPU, which names both. Start again.")
        # A GPU takes no longer message.
        torch._assert_async((order == order[rank]).all(), problem[:254])
        return ""
    rows = order.tolist()
    mine = rows[rank]
    for other, row in zip(ranks, rows, strict=True):
        if row != mine:
            if ACTIONS[row[1]] == "fault":
                comm.failed = other
            return (f"{transfer.where}: the ranks diverged. Expected: {told(transfer, mine)}, on "
                    f"all ranks, as here. Got: {told(transfer, row)}, on rank {other}. "
                    f"What to do: {_cure(transfer.options, mine, row, other)}. Start again.")
    return ""


def told(transfer: Announced, row: list[int]) -> str:
    """
    ## What a rank has announced, in words
    """
    idx, number, nbytes, mark = row
    action = ACTIONS[number]
    name = transfer.comm.labels.get(idx, f"layer {idx}")
    if mark >> 32 not in (transfer.comm.met, 0):
        name = f"layer {idx} of another model"
    elif idx == ALONE:
        name = "the gradients" if action in ("norm", "pieces") else "a layer in no chain"
    if action == "save or load":
        return f"a {action} of a checkpoint"
    if action == "fault":
        return f"{action} of {name}"
    return f"{action} of {name}, {nbytes} bytes, layers' checksum {mark % (1 << 32)}"


def _cure(options: str,
          mine: list[int],
          row: list[int],
          other: int) -> str:
    """
    #### What to do about a rank that has announced something else
    """
    if ACTIONS.index("save or load") in (mine[1], row[1]):
        return (f"look for an error on rank {other}; without one, for a rank that has fewer "
                "batches, or saves alone: all ranks save or load after the same step")
    if 0 != row[3] >> 32 != mine[3] >> 32:
        return "wrap models in the same order on all ranks, and call the same one"
    if options and row[:3] == mine[:3]:
        return (f"give the optimizers of all ranks the same options, which are {options} "
                "here; a scheduler that follows the loss, as ReduceLROnPlateau does, needs the "
                "mean loss over all ranks")
    return (f"look for an error on rank {other}; without one, call the same layers in the same "
            "order on all ranks" + ", and use all of their parameters" * (row[:3] == mine[:3]))

r"""
# A sharded module, for its users

`Sharded` is everything that a sharded layer offers besides the training step, such as its full
parameters and the norm of its gradient. Read its subclass `Zero3Layer` first. `Schedule` tells a
layer which layer comes next.

Take the weights 1, 2, 3 on two ranks, whose shards have the gradients (3, 2) and (4, 0):

| a user | gets in `minimal.py` | gets here |
|---|---|---|
| clips by the norm of the shards | 3.61 on one rank, 4 on the other | an error (guards) |
| calls `model.clip_grad_norm_` | | $\sqrt{3.61^2 + 4^2} = 5.39$ on both ranks |
| reads the weight | memory that is not there | an error (guards) |
| reads it in `with model.full_params():` | | the whole weight on both ranks |

$$\lVert g \rVert = \sqrt{\sum_{r=0}^{N-1} \lVert g^{(r)} \rVert^2}$$

**Run this**: `python -m pytest tests/test_sharded.py` tries these and more.

**Not covered, and what that costs**: `full_params()` holds the whole layer on each rank.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero3.comm.collectives import ALONE, Communicator
from zero3.comm.order import Listener, all_ranks
from zero3.comm.reducer import Reducer
from zero3.flat import FlatParameter, Slot, StorageFactory
from zero3.guards.checks import Guarded, Named, expect, own_modules, whole
from zero3.guards.moments import guards
from zero3.watch import Call, Watch, in_backward

if TYPE_CHECKING:
    from zero3.comm.links import Links
    from zero3.offload.activations import Activations, Offload


class Trained(nn.Module):
    """
    ## What a layer and a model of layers offer between backward and the step
    """

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """
        ### Clip the gradient by its norm over all ranks

        All ranks call it in place of `torch.nn.utils.clip_grad_norm_`, which sees the shards of one
        rank alone. Arguments and result are those of `gradients.py`.
        """
        from zero3.gradients import clip_grad_norm_
        return clip_grad_norm_(self, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        ### Drop the gradients of the shards, and the full ones that `optimizer.no_sync` holds back
        """
        super().zero_grad(set_to_none)
        for layer in self.modules():
            if isinstance(layer, Sharded):
                layer.drop_full_grads()


class Sharded(Trained, Guarded):
    """
    ## A sharded module
    """

    layer_idx = ALONE  # its place in a chain or a model
    listener = Listener()
    watch: Watch
    # `Zero3Layer` has the training step.
    fetch_params: Callable[[], None]
    _cleanup_params: Callable[[], None]

    def __init__(self, module: nn.Module,
                 comm: Communicator,
                 offload: "Offload | str | None",
                 activations: "Activations | Offload | str | None"):
        """
        ### Take a module, and the parts that later chapters replace

        * `offload` and `activations` are as for `Zero3Layer`
        """
        super().__init__()
        self.comm = comm
        self.reducer = Reducer(comm)
        self.schedule = Schedule()
        self.module = module
        self.label = type(module).__name__
        self.flats: list[FlatParameter] = []
        # Who needs the full parameters now: as long as there is one, they are not freed.
        self.holders = set()
        # `Zero3Sequential` sets these. A layer that is in a chain twice, or in two chains, has two
        # next layers.
        self.prev_layer: list[Sharded] = []
        self.next_layer: list[Sharded] = []
        # The module computes `with saving(arguments):`, which may move what autograd saves.
        self.saving: Callable[[object], AbstractContextManager] = nullcontext
        if activations is not None:
            from zero3.offload.activations import LayerActivations
            self.saving = LayerActivations(activations, self)
        self.offload = StorageFactory()
        if offload is not None:
            from zero3.offload.tiers import Offload
            self.offload = Offload.of(offload)

    def reshard(self) -> None:
        """
        ### Reshard (free), whoever still holds the layer

        After a step, parameters that stayed full would keep their old values.
        """
        self.holders.clear()
        self._cleanup_params()

    def read_async(self) -> None:
        """
        ### Begin to read the shards, if they rest in files
        """
        for flat in self.flats:
            flat.storage.read_async()

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """
        ### This rank's trainable shards

        1-D parameters, one for each flat parameter, for this rank's optimizer. An elementwise
        optimizer does to a shard what it would do to the parameters, with one difference. An unused
        parameter has a gradient of zero here if others in its flat parameter were used, and none in
        plain PyTorch.
        """
        return [flat.shard for flat in self.flats if flat.shard.requires_grad and len(flat.shard)]

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """
        ### The full parameters, by their original names

        All ranks must enter and leave together. Inside, the layer may be read, called and written
        to. Do not step or load there: that changes the shards, and not these parameters. With
        `writeback=True` the values that rank 0 wrote are sharded at the end. If a rank raises an
        exception in such a block, nothing is written, and the other ranks raise `RuntimeError`.
        Without `writeback` written values are lost, with a warning. Afterwards the parameters are
        freed again: `clone` the values to keep. A second block inside does nothing.
        """
        params = {name: slot.param for slot in self.slots() for name in slot.names}
        if self.is_full_elsewhere:
            yield params
            return
        self.reshard()
        # Into another buffer, so that a view that the caller keeps stays valid.
        with torch.inference_mode(False), torch.no_grad():
            pairs = [(torch.empty_like(flat.full), flat.storage.load()) for flat in self.flats]
            fulls = [full for full, _ in pairs]
            self.comm.all_gather(self, pairs).wait()
        self.is_full_elsewhere = True
        self.gathered_versions = self.shard_versions()
        for flat, full in zip(self.flats, fulls, strict=True):
            flat.storage.release(self.comm.fetch_stream)
            flat.look_at(full)
        try:
            yield params
            guards.check_writes(self, "", params, writeback)
        except BaseException as error:
            if writeback and not isinstance(error, GeneratorExit):
                # The other ranks wait for this one in `_write_back`.
                self.comm.gather(f"{type(error).__name__}: {error}")
            raise
        else:
            if writeback:
                self._write_back(fulls)
        finally:
            self.is_full_elsewhere = False
            for flat in self.flats:
                flat.look_at(None)

    @torch.no_grad()
    def _write_back(self, fulls: list[torch.Tensor]) -> None:
        """
        #### Shard the values that rank 0 has written

        If on any rank the block has failed, the shards have changed, or a parameter has another
        shape or type, all raise `RuntimeError`.
        """
        problem = ""
        if self.gathered_versions != self.shard_versions():
            problem = "a step or `load` in the block, which this would undo"
        for flat, full in zip(self.flats, fulls, strict=True):
            problem = flat.collect_writes(full) or problem
        self.comm.agree(self,
                        "is not written back, and is unchanged",
                        "a block that ends without an error, and parameters of the same shape and "
                        "type",
                        problem,
                        "look for the error on that rank; change values only")
        for flat, full in zip(self.flats, fulls, strict=True):
            flat.storage.replace(self.comm.scatter(full))

    def and_inside(self, prefix: str) -> "Iterator[tuple[str, Sharded]]":
        """
        ### This layer and the sharded layers inside, each with the prefix of its parameters' names
        """
        yield prefix, self
        for path, module in own_modules(self.module, prefix):
            for name, child in module._modules.items():
                if isinstance(child, Sharded):
                    yield from child.and_inside(f"{path}{name}.")

    def drop_full_grads(self) -> None:
        """
        ### Drop the full gradients, which may be half collected
        """
        for flat in self.flats:
            flat.drop_full_grad()

    def slots(self) -> Iterator[Slot]:
        """
        ### The places of all parameters in their flat parameters
        """
        for flat in self.flats:
            yield from flat.slots

    def held_tensors(self) -> Iterator[torch.Tensor | None]:
        """
        ### Buffers of this layer, besides its shards and their gradients, for a `Ledger`
        """
        for flat in self.flats:
            yield from (flat.full, flat.grad)
        yield from self.reducer.held_tensors()
        yield from self.offload.memory()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """
        ### Refuse `copy.copy`, `copy.deepcopy`, `pickle` and `torch.save`

        A copy would share the hooks, files and communicator of the original.
        """
        self.expect(
            False, "cannot be copied or pickled", "one model on each rank", "a copy of one of its "
            "layers", "copy the plain model before wrapping it; for a moving average (EMA) average "
            "the shards, `[p.detach().clone() for p in model.get_trainable_chunk()]`; to keep the "
            "weights use `zero3.save`, or clone them in `with model.full_params() as params:`")


class ShardedModel(Trained, Named):
    """
    ## A model of sharded layers, for its users
    """

    comm: Communicator  # of all ranks, if the model has one; a chain has that of its layers
    label = "the model"
    listener = Listener()

    def _take(self, layers: list) -> None:
        """
        #### Remember the layers, and tell ranks that split their weights of each other
        """
        from zero3.comm.parts import connect
        # Those that it was built with.
        self.sharded_layers: tuple[Sharded, ...] = tuple(layers)
        connect(self)

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """
        ### This rank's trainable shards, of all layers

        An optimizer of torch's takes these: `torch.optim.AdamW(model.get_trainable_chunk())`.
        """
        # Each once, also if a layer is in a chain twice.
        return list(dict.fromkeys(
            chunk for _, layer in self.named_layers() for chunk in layer.get_trainable_chunk()))

    def named_layers(self) -> "Iterator[tuple[str, Sharded]]":
        """
        ### The layers, each with the prefix of its parameters' names in the plain model
        """
        raise NotImplementedError

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """
        ### The full parameters of all layers at once, named as in the plain model

        As for a layer, but it holds the whole model in memory.
        """
        found: dict[str, nn.Parameter] = {}
        with ExitStack() as stack:
            for prefix, layer in self.named_layers():
                # A layer that is in a chain twice has names for both places.
                params = stack.enter_context(layer.full_params(writeback))
                found |= {prefix + name: p for name, p in params.items()}
            yield found
            if writeback:
                for prefix, layer in self.named_layers():
                    guards.check_writes(layer, prefix, found, writeback)


def comm_of(model: object) -> Communicator:
    """
    ## The communicator of a model; for any other object, that of all ranks
    """
    modules = model.modules() if isinstance(model, nn.Module) else []
    # A pipeline comes before its layers.
    found = (module.comm for module in modules
             if isinstance(module, (Sharded, ShardedModel)) and hasattr(module, "comm"))
    return next(found, None) or Communicator()


class Schedule:
    r"""
    ## Schedule: which layer comes next

    A layer asks it which layers come next, and whether to stay full after forward.

    To overlap computation, communication has to start early, so a layer has to know which one
    computes next. Three layers in a chain, 0, 1 and 2, go through a training step like this:

    | computes | gathered meanwhile | freed afterwards |
    |---|---|---|
    | nothing yet | 0 | |
    | forward of layer 0 | 1 | 0 |
    | forward of layer 1 | 2 | 1 |
    | forward of layer 2 | | nothing: backward begins with layer 2 |
    | backward of layer 2 | 1 | 2 |
    | backward of layer 1 | 0 | 1 |
    | backward of layer 0 | | 0 |

    These are five all-gathers for three layers, because layer 2 is gathered once. If all layers
    train:

    $$\text{all-gathers} = 2 \cdot \text{layers} - 1$$

    This schedule is that of a chain. The neighbours are in the layer itself. A layer that is in no
    chain has none, so nothing overlaps its all-gathers. `whole_model/units.py` has a schedule that
    learns the order of any model, and `python -m zero3.whole_model` prints such an order.
    """

    def ahead(self, layer: Sharded) -> list[Sharded]:
        """
        ### The layers that compute after this one, in the direction of the pass

        In backward the layer gathers them; in forward `walk` of the chain gathers `next_layer`. In
        both directions `fetch_params` begins to read their shards, if these rest in files.
        """
        if in_backward():
            # A layer without a recorded call has no backward pass, so it is not gathered.
            return [before for before in layer.prev_layer if before.watch.pending]
        if not layer.next_layer and torch.is_grad_enabled():
            # This is the last layer. Backward begins with it, so the one before it comes next.
            return layer.prev_layer
        return layer.next_layer

    def stays_full(self, layer: Sharded, call: Call) -> bool:
        """
        ### Whether a layer stays full after a forward call, because backward needs it at once

        The last layer of a chain does, if a backward pass can follow.
        """
        return layer.layer_idx != ALONE and not layer.next_layer and call.outputs > 0


# ------------------------------------------------------------- chapters that an argument asks for


def communicator(rank: int | None = None,
                 world_size: int | None = None,
                 mesh: "DeviceMesh | Links | None" = None) -> Communicator:
    """
    ## The communicator of a layer

    * `rank`, `world_size` and `mesh` are as for `Zero3Layer`

    Raises `TypeError` if the first two are no whole numbers from 0 on, or come with a mesh.
    """
    for number in (rank, world_size):
        expect(number is None or whole(number),
               "Zero3Layer",
               "whole numbers for `rank` and `world_size`",
               repr(number),
               "leave them out, and take the process group's",
               TypeError)
    if mesh is None:
        return Communicator((all_ranks(rank, world_size),))
    expect(rank is world_size is None,
           "Zero3Layer",
           "`mesh`, or `rank` and `world_size`",
           f"{rank} and {world_size} with a mesh",
           "leave the two out, because the mesh says them",
           TypeError)
    from zero3.comm.links import Links
    links = mesh if isinstance(mesh, Links) else Links(mesh)
    return links.communicator()

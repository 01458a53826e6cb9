r"""
# A sharded module, for its users

`Sharded` is everything that a sharded layer offers besides the training step: its full parameters,
the norm of its gradient, and errors in place of wrong numbers. Its subclass `Zero3Layer` adds the
training step; read that first.

A layer in shards looks like any other module, so people use it like one. On one rank that would
reach its shard alone, or memory that is about to be freed. The methods here either do it for the
whole layer, or raise an error that says how to do it. Take the weights 1, 2, 3 on two ranks, whose
shards have the gradients (3, 2) and (4, 0):

| a user | would get | gets |
|---|---|---|
| reads the weight | memory that is not there | an error that names `full_params()` |
| clips by the norm of the shards | 3.61 on one rank, 4 on the other | an error |
| calls `model.clip_grad_norm_` | | $\sqrt{3.61^2 + 4^2} = 5.39$ on both ranks |
| writes to the weight in forward | a write that is lost after forward | an error |
| pickles the layer | a part of a layer | an error that names `zero3.save` |

$$\lVert g \rVert = \sqrt{\sum_{r=0}^{N-1} \lVert g^{(r)} \rVert^2}$$

**Run this**: `python -m pytest tests/test_sharded.py` tries these and more.

**Not covered, and what that costs**: `full_params()` holds the whole layer on each rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero3.comm.collectives import ALONE, Communicator
from zero3.comm.order import Listener, Silence
from zero3.comm.reducer import Reducer
from zero3.flat import FlatParameter, OnDevice, Slot, StorageFactory
from zero3.guards.contents import Contents, Guarded, Known, check_groups
from zero3.guards.options import Named, expect, whole
from zero3.watch import Watch

if TYPE_CHECKING:
    from zero3.comm.links import Links
    from zero3.offload.tiers import Offload


class Sharded(Guarded):
    """
    ## A sharded module

    Schedules and the `Ledger` know a layer by this class.
    """

    layer_idx = ALONE  # its place in a chain or a model
    comm: Communicator
    reducer: Reducer
    listener: Listener = Silence()
    offload: StorageFactory
    contents: Contents
    flats: list[FlatParameter]
    watch: Watch
    is_fetched = False  # from the start of an all-gather until the layer is freed
    is_full_elsewhere = False  # inside `full_params` the parameters are whole in other memory

    # What to do about a parameter that is not where somebody looks for it.
    cure = ("wrap each module once, put modules that share a parameter into one Zero3Layer, and "
            "build the optimizer on `get_trainable_chunk()` after wrapping")
    cure_for_new = ("wrap it in a `Zero3Layer` of its own, or assign it before this layer is "
                    "wrapped; and build the optimizer afterwards")

    def __init__(self, module: nn.Module):
        """
        ### Take a module

        Raises `TypeError` if it is none.
        """
        super().__init__()
        if not isinstance(module, nn.Module):
            expect(False, "Zero3Layer", "a module", repr(module), "pass the layer itself, and not "
                   "its class", TypeError)
        self.module = module
        self.label = type(module).__name__
        self.flats = []
        # `Zero3Sequential` sets these. A layer that is in a chain twice has two next layers.
        self.prev_layer: list[Sharded] = []
        self.next_layer: list[Sharded] = []

    # `Zero3Layer` has the training step.

    def fetch_params(self) -> None:
        raise NotImplementedError

    def add_reduced(self, totals: list[torch.Tensor]) -> None:
        raise NotImplementedError

    def _cleanup_params(self) -> None:
        raise NotImplementedError

    def _backup_grads(self) -> None:
        raise NotImplementedError

    def reshard(self) -> None:
        """
        ### Reshard (free)

        `full_params()` and loading a checkpoint call it first, because parameters that stayed full
        would keep their old values.
        """
        self._cleanup_params()

    def reduce(self) -> None:
        """
        ### Reduce the full gradients that a `no_sync()` has held back

        `Zero3Optimizer.step` calls it. It finds gradients if the last micro-batch ran inside
        `no_sync()` too, or did not reach this layer.
        """
        self._backup_grads()

    def read_async(self) -> None:
        """
        ### Begin to read the shards, if they rest in files
        """
        for flat in self.flats:
            flat.storage.read_async()

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """
        ### This rank's trainable shards

        1-D parameters, one per data type, for this rank's optimizer. An elementwise optimizer does
        to a shard exactly what it would do to the parameters, with one difference: a parameter that
        was not used has a gradient of zero here, and none in plain PyTorch.
        """
        return [flat.shard for flat in self.flats if flat.shard.requires_grad and len(flat.shard)]

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """
        ### The full parameters, by their original names

        All ranks must enter and leave together. Inside, the layer may be read, called and written
        to. With `writeback=True` the values that rank 0 wrote are sharded at the end. If a rank
        raises an exception in the block, nothing is written, and the other ranks raise
        `RuntimeError`. Without it, values that were written are lost, with a warning. Afterwards
        the parameters are freed again: `clone` the values to keep.
        """
        self.reshard()
        # Into another buffer, so that a view of it stays valid if somebody keeps one.
        with torch.inference_mode(False), torch.no_grad():
            fulls = [torch.empty_like(flat.full) for flat in self.flats]
            pairs = [(full, flat.storage.load())
                     for full, flat in zip(fulls, self.flats, strict=True)]
            self.comm.all_gather(self, pairs).wait()
        for flat in self.flats:
            flat.storage.release(self.comm.fetch_stream)
        self.is_full_elsewhere = True
        for flat, full in zip(self.flats, fulls, strict=True):
            flat.look_at(full)
        try:
            yield {name: slot.param for slot in self.slots() for name in slot.names}
        except BaseException as error:
            if writeback and not isinstance(error, GeneratorExit):
                # The other ranks are about to write back, and wait for this one.
                self.comm.gather(f"{type(error).__name__}: {error}")
            raise
        else:
            if writeback:
                self._write_back(fulls)
            else:
                self._warn_of_writes()
        finally:
            self.is_full_elsewhere = False
            for flat in self.flats:
                flat.look_at(None)

    def _warn_of_writes(self) -> None:
        """
        #### Warn that values which were written in the block are lost
        """
        written = [slot.names[0] for slot in self.slots() if slot.param._version != slot.version]
        if written:
            warnings.warn(
                f"rank {self.comm.global_rank}: {self.label}: what was written to `{written[0]}` "
                "inside `full_params()` is lost, because the shards have not changed. Pass "
                "`writeback=True` to keep the values of rank 0.", stacklevel=4)

    @torch.no_grad()
    def _write_back(self, fulls: list[torch.Tensor]) -> None:
        """
        #### Shard the values that rank 0 has written

        First the ranks tell each other whether all of them are here with something to shard. If one
        is not, all raise `RuntimeError`.
        """
        problem = ""
        for flat, full in zip(self.flats, fulls, strict=True):
            problem = flat.collect_writes(full) or problem
        self.comm.agree(self, "is not written back, and is unchanged",
                        "a block that ends without an error, and parameters of the same shape and "
                        "type", problem, "look for the error on that rank; change values only")
        for flat, full in zip(self.flats, fulls, strict=True):
            self.comm.scatter(flat.storage.load(), full)
            flat.storage.save()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """
        ### Clip the gradient of this layer by its norm over all ranks

        See `ShardedModel.clip_grad_norm_`.
        """
        from zero3.gradients import clip_grad_norm_
        return clip_grad_norm_(self, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        ### Drop the gradients of the shards, and the full ones that `no_sync` holds back

        A full gradient that was left over would be added to that of the next micro-batch.
        """
        super().zero_grad(set_to_none)
        for layer in self.modules():
            if isinstance(layer, Sharded):
                layer.drop_full_grads()

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

    @property
    def is_alone(self) -> bool:
        return self.layer_idx == ALONE

    def held_tensors(self) -> Iterator[torch.Tensor | None]:
        """
        ### Memory that this layer holds besides its parameters and gradients, for a `Ledger`
        """
        for flat in self.flats:
            yield flat.full
            yield flat.grad
        yield from self.reducer.held_tensors()
        yield from self.offload.memory()

    # -------------------------------------------------------------------------------------- checks

    def warn_of_autocast(self) -> None:
        """
        ### Warn that autocast keeps a copy of each fp32 weight

        Backward needs the copy. So the 16-bit copies of all layers stay in memory from forward to
        backward, however early their fp32 parameters are freed.
        """
        if not (torch.is_autocast_enabled(self.device.type) and torch.is_grad_enabled()):
            return
        if any(flat.full.dtype == torch.float32 for flat in self.flats):
            # The same words for each layer, because Python shows a warning once.
            warnings.warn(
                f"rank {self.comm.global_rank}: layers of fp32 run under autocast, which keeps a "
                "16-bit copy of every weight from forward to backward. To free these too, convert "
                "the layers with `.bfloat16()` before wrapping and let `Zero3Optimizer` keep fp32 "
                "masters.", stacklevel=4)

    def refuse_writes(self) -> None:
        """
        ### Refuse a write to the parameters, because it is lost when they are freed

        The layer checks this after forward, and again when its backward is over, right before it
        frees the memory. If forward set a weight of 1 to 5, the next all-gather would bring back
        the 1 from the shard, without a word.
        """
        # Not fetched, but inside `full_params`: there a write is allowed.
        if not self.is_fetched:
            return
        for flat in self.flats:
            name = flat.written()
            self.expect(
                not name, f"has written to `{name}`", "parameters that only an "
                "optimizer changes", "a write in forward or backward, which each rank would lose "
                "with the full parameter", "write to the shards between two steps (`for p in "
                "model.get_trainable_chunk(): p.clamp_(...)` under `torch.no_grad()`), or in `with "
                "model.full_params(writeback=True)`")

    def refuse_freed_outputs(self, tensors: list[torch.Tensor]) -> None:
        """
        ### Refuse an output that is a view of a parameter, because its memory is about to be freed

        The layer checks this after forward. A module that returns `self.weight[0]`, for instance,
        would hand out a tensor whose memory is gone a moment later. Whoever read it would crash the
        process.
        """
        # The address of a layer that is freed already is 0, as that of a view of it.
        lent = {flat.full.untyped_storage().data_ptr() for layer in self.lenders()
                for flat in layer.flats if len(flat.full)}
        for tensor in tensors:
            has_memory = tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta
            self.expect(not has_memory or tensor.untyped_storage().data_ptr() not in lent,
                        "puts out freed memory", "a tensor of its own",
                        f"a view of a parameter, {tensor.shape}", "clone it")

    def lenders(self) -> Iterator[Sharded]:
        """
        ### The layers whose parameters the module can read while it computes

        A unit of a whole model may read those of other units.
        """
        yield self

    def refuse_double_backward(self) -> None:
        """
        ### Refuse a backward pass that is itself recorded, because a second one would follow it

        The layer checks this when backward reaches it. The second pass would walk the graph of the
        first one, where the layer has no hooks, so nothing would gather the parameters for it.
        """
        recorded = torch.is_grad_enabled() and not self.is_full_elsewhere
        self.expect(not recorded, "cannot go backward twice", "backward without `create_graph`",
                    "a backward pass that is itself recorded: a gradient penalty, for instance, or "
                    "a Hessian", "compute it in `with model.full_params():`")

    def shard_versions(self) -> tuple[int, ...]:
        """
        ### How often each shard has been written to
        """
        return tuple(flat.shard._version for flat in self.flats)

    def refuse_old_calls(self, versions: tuple[int, ...]) -> None:
        """
        ### Refuse backward through weights that have changed since forward

        The layer checks this when backward reaches it. Backward gathers the weights once more, so
        it would compute with the new ones. Plain PyTorch raises an error here too.
        """
        self.expect(versions == self.shard_versions(), "cannot go backward",
                    "the weights of its forward pass", "weights that have changed since, by an "
                    "optimizer for instance", "go backward through all forward passes before you "
                    "step; or compute the forward pass again")

    def refuse_sparse(self, grad: torch.Tensor, name: str) -> None:
        """
        ### Refuse a gradient that has no place in the flat one

        `nn.Embedding(sparse=True)` makes such gradients: they list the rows that were used. The
        flat gradient has one place for each element of the parameter.
        """
        self.expect(grad.layout == torch.strided and not grad.requires_grad, "cannot reduce a "
                    "gradient", "a dense one without a graph", f"{grad.layout}, `{name}`",
                    "use `sparse=False`, and backward without `create_graph`")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """
        ### Refuse `copy.copy`, `copy.deepcopy`, `pickle` and `torch.save`
        """
        self.contents.refuse_copies()


class ShardedModel(nn.Module, Named):
    """
    ## A model of sharded layers, for its users

    `Zero3Sequential` is one, and so is the model that `wrap` returns.
    """

    sharded_layers: tuple[Sharded, ...]  # those that it was built with
    comm: Communicator  # of all ranks, if the model has one; a chain has that of its layers
    known: Known
    label = "the model"
    listener: Listener = Silence()

    def held_tensors(self) -> Iterable[torch.Tensor | None]:
        """
        ### Memory that it holds besides that of its layers, for a `Ledger`
        """
        return ()

    def get_trainable_chunk(self) -> list[nn.Parameter]:
        """
        ### This rank's trainable shards, of all layers

        An optimizer of torch's takes these: `torch.optim.AdamW(model.get_trainable_chunk())`.
        """
        # Each once, also if a layer is in a chain twice.
        chunks = (chunk for layer in self.sharded_layers for chunk in layer.get_trainable_chunk())
        return list(dict.fromkeys(chunks))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """
        ### Clip the gradient of the whole model

        All ranks call it in place of `torch.nn.utils.clip_grad_norm_`, which sees the shards of one
        rank alone. Arguments and result are those of `gradients.py`.
        """
        from zero3.gradients import clip_grad_norm_
        return clip_grad_norm_(self, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        ### Drop the gradients of all shards, and the full ones that `no_sync` holds back
        """
        super().zero_grad(set_to_none)
        for layer in self.sharded_layers:
            layer.zero_grad(set_to_none)

    def named_layers(self) -> Iterator[tuple[str, Sharded]]:
        """
        ### The layers, each with the prefix of its parameters' names in the plain model
        """
        raise NotImplementedError

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """
        ### The full parameters of all layers at once, named as in the plain model

        This holds the whole model in memory. All ranks must enter and leave together; `writeback`
        is as for a layer.
        """
        params: dict[Sharded, dict[str, nn.Parameter]] = {}
        found = {}
        with ExitStack() as stack:
            for prefix, layer in self.named_layers():
                # Enter each layer once. If it is in a chain twice, it has names for both places.
                if layer not in params:
                    params[layer] = stack.enter_context(layer.full_params(writeback))
                for name, p in params[layer].items():
                    found[prefix + name] = p
            yield found

    def refuse_changes(self, layers: nn.ModuleList) -> None:
        """
        ### Refuse layers that were added to a chain or taken out of it

        The layers learnt their neighbours when the chain was built.
        """
        if self.known.has_changed():
            names = [name for name, _ in self.named_children()]
            self.sharded_layers[0].expect(
                False, "is in a chain whose layers have changed",
                f"the {len(self.sharded_layers)} that it was built with",
                f"{len(layers)}, and submodules {names}",
                "build a new `Zero3Sequential` of `Zero3Layer`s, and the optimizer on it")


def comm_of(model: object) -> Communicator:
    """
    ## The communicator of a model; for any other object, that of all ranks
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        # A pipeline comes before its layers.
        if isinstance(module, (Sharded, ShardedModel)) and hasattr(module, "comm"):
            return module.comm
    return Communicator()


def check_chain(modules: Any) -> list[Any]:
    """
    ## Refuse modules that cannot be a chain

    A plain module among the layers would be whole on each rank, and each rank would train its own.
    """
    expect(isinstance(modules, Iterable), "Zero3Sequential", "a list of Zero3Layers",
           type(modules), "pass `[layer]` for one", TypeError)
    # A generator yields its layers a single time.
    layers = list(modules)
    expect(len(layers) > 0, "Zero3Sequential", "at least one layer", "none",
           "look at the code that should have made the layers")
    for i, layer in enumerate(layers):
        if not isinstance(layer, Sharded):
            raise TypeError(f"Zero3Sequential, element {i}. Expected: a Zero3Layer. Got: "
                            f"{type(layer)}. What to do: wrap it, with parameters or without.")
    check_groups(layers)
    return layers

# ------------------------------------------------------------- chapters that an argument asks for


def communicator(rank: int | None = None, world_size: int | None = None,
                 mesh: DeviceMesh | Links | None = None) -> Communicator:
    """
    ## The communicator of a layer

    * `rank`, `world_size` and `mesh` are as for `Zero3Layer`

    `Links` builds its own, which knows nodes, replicas and encodings. A mesh of two dimensions
    needs it too.

    Raises `TypeError` if the numbers are none, or come with a mesh.
    """
    for number in (rank, world_size):
        expect(number is None or whole(number), "Zero3Layer", "whole numbers for `rank` and "
               "`world_size`", repr(number), "leave them out, and take the process group's",
               TypeError)
    expect(mesh is None or rank is world_size is None, "Zero3Layer", "`mesh`, or `rank` and "
           "`world_size`", f"{rank} and {world_size} with a mesh", "leave the two out, because the "
           "mesh says them", TypeError)
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
        from zero3.comm.links import Links
        mesh = Links(mesh)
    if mesh is None or not hasattr(mesh, "communicator"):
        return Communicator(rank, world_size, mesh)
    return mesh.communicator()


def storage_factory(offload: Offload | str | None) -> StorageFactory:
    """
    ## Where the shards of a layer rest

    * `offload` is as for `Zero3Layer`
    """
    if offload is None:
        return OnDevice()
    from zero3.offload.tiers import Offload
    return Offload.of(offload)

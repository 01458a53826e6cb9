r"""
# Lightning Fabric: a strategy, for a sharded model

Fabric asks a *strategy* whatever depends on how a model is spread over ranks. `Zero3Strategy`
answers for sharded models. Three weights on two ranks have the gradient (3, 0, 4), and rank 1 pads
its shard:

| the call | Fabric's own | here |
|---|---|---|
| `fabric.setup` | DDP sends rank 0's shards to rank 1: an error | each keeps its own |
| `fabric.clip_gradients` | norms of 3 and 4: an error | 5 on both |
| `fabric.no_backward_sync` | needs DDP | full gradients stay |
| `fabric.save` | the states of rank 0 | each rank writes its own |

So all ranks clip by the factor of plain PyTorch:

$$\min\!\Big(1, \frac{c}{\sqrt{\sum_{r} \lVert g^{(r)} \rVert^2}}\Big) = \min\!\Big(1,
\frac{c}{5}\Big)$$

**The order.** `fabric.launch()` starts the process group, and `wrap` shards over the ranks that are
there:

```
fabric = Fabric(strategy=Zero3Strategy())
fabric.launch()
model = wrap(model.to(fabric.device), LlamaDecoderLayer)
optimizer = Zero3Optimizer(model, lr=1e-4)
model, optimizer = fabric.setup(model, optimizer)
```

**Run this**: the program for Fabric in [Use it in your loop](../../docs/loop.md).

**Not covered, and what that costs**: a mixed `precision=` is an error, because autograd would keep
a 16-bit copy of each weight until backward, on every rank. Convert the model before `wrap`. With
`loss_scale=` call `optimizer.backward(loss)`: the step refuses gradients of `fabric.backward`.
`fabric.clip_gradients(clip_val=)` and `load_raw` are errors, and `filter=` has no effect on shards:
clip elements with `torch.nn.utils.clip_grad_value_(model.parameters(), c)`.
`no_backward_sync` has no effect for an optimizer of torch's on shards: each micro-batch is reduced,
with the same result. If a norm is not finite, the error comes after the gradients have been scaled.
`fabric.save` of the shards is complete or absent, but Fabric writes what is beside them by itself.
The strategy is for `lightning.fabric` if `lightning` is installed, and else for `lightning_fabric`:
each accepts strategies of its own classes only.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from weakref import WeakSet

import torch
from torch import nn

from zero3.beside.pairs import check, check_rest, optimizer_of
from zero3.checkpoint.save_load import load, save
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.sharded import ShardedModel, comm_of

try:
    from lightning.fabric.strategies.ddp import DDPStrategy, _DDPBackwardSyncControl
except ImportError:
    from lightning_fabric.strategies.ddp import DDPStrategy, _DDPBackwardSyncControl

# The file of a checkpoint with what is not sharded.
REST = "rest.ckpt"


class Zero3Strategy(DDPStrategy):
    """
    ## Zero3Strategy

    It takes the arguments of Fabric's `DDPStrategy`, and plain models as that one does.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # Not the only references, because a program may be done with a model.
        self.models: WeakSet[ShardedModel] = WeakSet()
        self.optimizers: WeakSet[torch.optim.Optimizer] = WeakSet()
        # Whom Fabric asks for `no_backward_sync`.
        self._backward_sync_control = self

    # ------------------------------------------------------------------------------------- set up

    def module_to_device(self, module: nn.Module) -> None:
        """
        ### Leave shards where they are

        They may rest in files.
        """
        if not isinstance(module, ShardedModel):
            super().module_to_device(module)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """
        ### Take a sharded model as it is

        Raises `RuntimeError` if it is not sharded over all ranks, or not in Fabric's precision.
        """
        if not isinstance(module, ShardedModel):
            return super().setup_module(module)
        ranks = comm_of(module).divisor
        check(ranks == self.world_size, "the strategy cannot feed this model",
              f"gradients that are means over all {self.world_size} ranks", f"over {ranks}",
              "call `fabric.launch()` before `wrap`; and pass no mesh that splits layers or stages")
        precision = self.precision.precision
        check(precision.endswith("-true"),
              "the strategy cannot train this model in mixed precision",
              "`precision=\"bf16-true\"`", precision, "call `model.bfloat16()` before "
              "`wrap`; `Zero3Optimizer` keeps fp32 masters")
        dtypes = [(flat.full.dtype, flat.shard.dtype)
                  for layer in module.sharded_layers for flat in layer.flats]
        check(all(full == shard for full, shard in dtypes),
              "the strategy cannot convert a sharded model", "a model in that precision", dtypes,
              "call `model.bfloat16()` before `wrap`, and wrap it again")
        self.models.add(module)
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """
        ### Take an optimizer as it is, and remember it for `no_backward_sync`
        """
        self.optimizers.add(optimizer)
        return optimizer

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager:
        """
        ### Hold back the gradients of a micro-batch: `Zero3Optimizer.no_sync`

        * `enabled` is false for the last micro-batch
        """
        if not isinstance(module, ShardedModel):
            return _DDPBackwardSyncControl().no_backward_sync(module, enabled)
        optimizer = optimizer_of(module, self.optimizers)
        if enabled and isinstance(optimizer, Zero3Optimizer):
            return optimizer.no_sync()
        return nullcontext()

    # ------------------------------------------------------------------------------------ clipping

    def clip_gradients_norm(self, module: nn.Module, optimizer: torch.optim.Optimizer,
                            max_norm: float, norm_type: float = 2.0,
                            error_if_nonfinite: bool = True) -> torch.Tensor:
        """
        ### Clip the gradient of a model by its norm over all ranks

        Returns the norm before clipping. Raises `RuntimeError` if it is not finite.
        """
        if not isinstance(module, ShardedModel):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type,
                                               error_if_nonfinite)
        norm = module.clip_grad_norm_(max_norm, norm_type)
        check(not error_if_nonfinite or bool(norm.isfinite()),
              "the strategy cannot clip by this norm",
              "a finite one", norm.item(), "call `zero_grad()` and leave out this batch; or "
              "pass `error_if_nonfinite=False`")
        return norm

    # --------------------------------------------------------------------------- saving and loading

    def save_checkpoint(self, path: str | Path, state: dict[str, object],
                        storage_options: object = None, filter: dict | None = None) -> None:
        """
        ### Save shards by `zero3.save`, the rest by Fabric

        * `path` is a folder if there is a sharded model in `state`

        All ranks call it. It loads on any number of ranks.
        """
        pairs, rest, file = self._split(path, state)
        for folder, pair in pairs.items():
            save(folder, *pair, step=0, keep=1)
        super().save_checkpoint(file, rest, storage_options, filter)

    def load_checkpoint(self, path: str | Path, state: object = None, strict: bool = True,
                        weights_only: bool | None = None) -> dict[str, object]:
        """
        ### Load what `save_checkpoint` has saved

        * `state` has the same names, and objects to load into

        All ranks call it. Returns what is left over.
        """
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, strict, weights_only)
        pairs, rest, file = self._split(path, state)
        for folder, pair in pairs.items():
            load(folder, *pair)
        left = super().load_checkpoint(file, rest, strict, weights_only)
        state.update(rest)
        return left

    def _split(self, path: str | Path, state: dict[str, object]
               ) -> tuple[dict[Path, tuple], dict[str, object], str | Path]:
        """
        #### Sharded models with their optimizers, the rest, and the file for the rest
        """
        optimizers = [each for each in state.values() if isinstance(each, torch.optim.Optimizer)]
        pairs = {Path(path) / name: (model, optimizer_of(model, optimizers))
                 for name, model in state.items() if isinstance(model, ShardedModel)}
        ours = {id(each) for pair in pairs.values() for each in pair}
        rest = {name: each for name, each in state.items() if id(each) not in ours}
        check_rest("the strategy", [each for each in optimizers if id(each) not in ours],
                   self.models, "pass both, as `{\"model\": model, \"optimizer\": optimizer}`")
        return pairs, rest, Path(path) / REST if pairs else path

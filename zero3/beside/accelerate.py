r"""
# accelerate: its calls, on a sharded model

`Accelerator` is Hugging Face's, and knows sharded models.

Most of accelerate is right for shards as it is. The rest takes what one rank has for the whole
model. Three weights on two ranks have the gradient (3, 0, 4), and rank 1 pads its shard:

| the call | accelerate's own, on rank 0 | on rank 1 | here |
|---|---|---|---|
| `prepare` | DDP sends its shard to rank 1 | takes that for its own | each keeps its own |
| `clip_grad_norm_` | a norm of 3, of (3, 0) | 4, of (4, pad) | 5 on both |
| `save_state` | writes its states | writes none | each writes its own |
| `get_state_dict` | its shard | its shard | all weights on rank 0 |

So only these calls are replaced. A clipped gradient is the one of plain PyTorch:

$$g \leftarrow g \cdot \min\!\Big(1, \frac{c}{\sqrt{\sum_{r} \lVert g^{(r)} \rVert^2}}\Big)$$

**The order.** Make the `Accelerator` first: it starts the process group, and `wrap` shards over the
ranks that are there:

```
accelerator = Accelerator()
model = wrap(model.to(accelerator.device), LlamaDecoderLayer)
optimizer = Zero3Optimizer(model, lr=1e-4)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
```

**Mixed precision.** `mixed_precision="bf16"` takes a model in bf16, whose fp32 masters the
optimizer has. accelerate would compute an fp32 model under autocast. Autograd then keeps a bf16
copy of each weight until backward, on every rank: $2\Psi$ bytes. So that is an error. fp16 with
torch's `GradScaler` is one too: a model in fp16 and `Zero3Optimizer(loss_scale="dynamic")` do it
here.

**Run this**: the first program of [Use it in your loop](../../docs/loop.md).

**Not covered, and what that costs**: tensor parallelism and pipelines, because the loader would
have to give some ranks the same rows. `accumulate` holds back full gradients until the last
micro-batch, as `Zero3Optimizer.no_sync` does, 4 bytes for each fp32 parameter on every rank.
`GradientAccumulationPlugin(sync_each_batch=True)` reduces after each micro-batch. A checkpoint's
shards are complete or absent, but accelerate writes its own files beside them one by one. An
optimizer of torch's on shards is saved right only if its model went through `prepare` too.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, DynamoBackend
from torch import nn

from zero3.beside.pairs import check, check_rest, optimizer_of
from zero3.checkpoint.save_load import load, save
from zero3.optimizer.stage3 import Zero3Optimizer, plain_names
from zero3.sharded import ShardedModel, comm_of
from zero3.whole_model.materialise import buffers_of


class Accelerator(accelerate.Accelerator):
    """
    ## Accelerator

    It takes the arguments of accelerate's. Models that are not sharded are treated as there.
    """

    # Those that went through `prepare`.
    _models: list[nn.Module]
    _optimizers: list[AcceleratedOptimizer]

    def __init__(self, *args, **kwargs) -> None:
        """
        ### Refuse what cannot be right with shards

        Raises `RuntimeError` for fp16 and fp8, for another library that shards the model, and for
        `torch.compile` of the whole model.
        """
        super().__init__(*args, **kwargs)
        # The sharded models and their optimizers, while a state is saved or loaded.
        self._pairs: dict[ShardedModel, torch.optim.Optimizer | None] = {}
        self.register_save_state_pre_hook(self._save_shards)
        self.register_load_state_pre_hook(self._load_shards)
        check(self.mixed_precision in ("no", "bf16"),
              "the Accelerator cannot scale the loss of shards",
              "`mixed_precision` of \"no\" or \"bf16\"", repr(self.mixed_precision),
              "for fp16 call `model.half()` before `wrap`, and pass "
              "`loss_scale=\"dynamic\"` to `Zero3Optimizer`")
        # Another library would shard the model, or compile it.
        check(self.parallelism_config is None and self.distributed_type not in (
                  DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM,
                  DistributedType.XLA),
              "the Accelerator cannot shard what another library shards",
              "no plugin of FSDP, DeepSpeed or Megatron-LM, and no `parallelism_config`",
              self.distributed_type.value, "leave them out, also in the file that "
              "`accelerate config` has written")
        backend = self.state.dynamo_plugin.backend
        check(backend == DynamoBackend.NO,
              "the Accelerator cannot compile a sharded model from outside",
              "no `dynamo_backend`", backend.value, "shard the model by `zero3.compile`")

    # ----------------------------------------------------------------------------------- prepare

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None,
                      evaluation_mode: bool = False) -> nn.Module:
        """
        ### Take a sharded model as it is

        Raises `RuntimeError` if the model is not sharded over all ranks, is on another device, or
        is not in the precision that was asked for.
        """
        if not isinstance(model, ShardedModel):
            return super().prepare_model(model, device_placement, evaluation_mode)
        ranks = comm_of(model).divisor
        check(ranks == self.num_processes, "the Accelerator cannot feed this model",
              f"gradients that are means over all {self.num_processes} ranks",
              f"over {ranks}", "make the `Accelerator` before `wrap`, because it starts "
              "the other ranks; and pass no mesh that splits layers or stages")
        devices = {layer.device.type for layer in model.sharded_layers}
        check(devices == {self.device.type}, "the Accelerator cannot move a sharded model",
              f"shards on {self.device}", sorted(devices),
              "call `model.to(accelerator.device)` before `wrap`")
        dtypes = {flat.full.dtype for layer in model.sharded_layers for flat in layer.flats}
        check(self.mixed_precision == "no" or torch.bfloat16 in dtypes,
              "the Accelerator cannot train this model in mixed precision",
              "a model in bf16", sorted(map(str, dtypes)), "call `model.bfloat16()` before `wrap`; "
              "`Zero3Optimizer` keeps fp32 masters")
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer,
                          device_placement: bool | None = None) -> AcceleratedOptimizer:
        """
        ### Take a `Zero3Optimizer`, whose states stay where they are

        accelerate would move them, and read those in files into memory for it.
        """
        if not isinstance(optimizer, Zero3Optimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        prepared = Prepared(optimizer, device_placement=False)
        self._optimizers.append(prepared)
        return prepared

    # ---------------------------------------------------------------------------------- the step

    def backward(self, loss: torch.Tensor, **kwargs) -> None:
        """
        ### Backward pass, of the scaled loss if the optimizer scales it

        * `loss` is a scalar, the mean over this rank's rows of one micro-batch
        """
        scaled = self._scaled()
        check(len(scaled) <= 1, "the Accelerator cannot tell whose loss this is",
              "one optimizer with a loss scale", len(scaled),
              "call `optimizer.optimizer.backward(loss)` of the one that it is for")
        if scaled:
            scaled[0].backward(loss / self.gradient_accumulation_steps, **kwargs)
        else:
            super().backward(loss, **kwargs)

    def _scaled(self) -> list[Zero3Optimizer]:
        """
        #### The optimizers that scale the loss
        """
        return [each.optimizer for each in self._optimizers
                if isinstance(each, Prepared) and each.optimizer.scaled]

    def no_sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """
        ### Hold back the gradients of a micro-batch: `Zero3Optimizer.no_sync`

        `accumulate` calls this for all micro-batches but the last one.
        """
        optimizer = self._optimizer_of(model)
        if isinstance(optimizer, Zero3Optimizer):
            return optimizer.no_sync()
        return super().no_sync(model)

    def _optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """
        #### The optimizer of a sharded model, if it went through `prepare`
        """
        return optimizer_of(model, [each.optimizer for each in self._optimizers])

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float,
                        norm_type: float = 2) -> torch.Tensor | None:
        """
        ### Clip the gradient of a model by its norm over all ranks

        * `parameters` are all of a model, or all trainable ones

        Returns the norm before clipping. If the gradients are scaled or rest elsewhere, the step
        clips them by `Zero3Optimizer(clip_grad_norm=)`, and this returns `None`.

        Raises `RuntimeError` if that is another limit, or if these are a part of the model.
        """
        parameters = list(parameters)
        trained = {each for each in parameters if each.requires_grad}
        model = next((each for each in self._models if isinstance(each, ShardedModel)
                      and trained == {*each.get_trainable_chunk()}), None)
        if model is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)
        optimizer = self._optimizer_of(model)
        if not isinstance(optimizer, Zero3Optimizer) or not (
                optimizer.scaled or optimizer.offload.tier != "device"):
            return model.clip_grad_norm_(max_norm, norm_type)
        # Nobody clips by infinity: Hugging Face's `Trainer` asks for the norm like this.
        check(max_norm in (optimizer.clip_grad_norm, math.inf),
              "the Accelerator cannot clip gradients that are scaled or rest elsewhere",
              f"`Zero3Optimizer(clip_grad_norm={max_norm})`, which clips in its step",
              optimizer.clip_grad_norm, "pass it when you build the optimizer")
        return None

    def clip_grad_value_(self, parameters: Iterable[nn.Parameter], clip_value: float) -> None:
        """
        ### Clip each element of a gradient

        Raises `RuntimeError` if the gradients are scaled: nearly all elements would be clipped.
        """
        check(not self._scaled(), "the Accelerator cannot clip scaled gradients by value",
              "a loss without a scale", "`loss_scale=`", "train in bf16, or clip by the norm")
        super().clip_grad_value_(parameters, clip_value)

    # --------------------------------------------------------------------------- saving and loading

    def save_state(self, *args, **kwargs) -> object:
        """
        ### Save all that `prepare` has seen: shards by `zero3.save`, the rest by accelerate

        All ranks call it. The state loads on any number of ranks.
        """
        with self._plain_only():
            return super().save_state(*args, **kwargs)

    def load_state(self, *args, **kwargs) -> None:
        """
        ### Load what `save_state` has saved

        All ranks call it.
        """
        with self._plain_only():
            super().load_state(*args, **kwargs)

    @contextmanager
    def _plain_only(self) -> Iterator[None]:
        """
        #### Hide sharded models and their optimizers from accelerate
        """
        models = self._models
        optimizers = self._optimizers
        self._pairs = {model: self._optimizer_of(model) for model in models
                       if isinstance(model, ShardedModel)}
        plain = [each for each in optimizers if each.optimizer not in self._pairs.values()]
        check_rest("the Accelerator", [each.optimizer for each in plain], self._pairs,
                   "pass both to `prepare`: what `wrap` has returned, and an optimizer on it")
        self._models = [each for each in models if each not in self._pairs]
        self._optimizers = plain
        try:
            yield
        finally:
            self._models = models
            self._optimizers = optimizers
            # `free_memory` does not know of these.
            self._pairs = {}

    def _save_shards(self, models: list,
                     weights: list,
                     folder: str) -> None:
        """
        #### A hook: save the shards, beside what accelerate saves
        """
        for i, (model, optimizer) in enumerate(self._pairs.items()):
            save(Path(folder) / f"zero3_{i}", model, optimizer, step=self.save_iteration, keep=1)

    def _load_shards(self, models: list, folder: str) -> None:
        """
        #### A hook: load the shards, before accelerate loads the rest
        """
        for i, (model, optimizer) in enumerate(self._pairs.items()):
            load(Path(folder) / f"zero3_{i}", model, optimizer)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, torch.Tensor]:
        """
        ### The whole model's parameters and buffers, in CPU memory of the main process

        All ranks call it, because each layer in turn is all-gathered. The others get an empty
        dict. `model.save` writes files without ever having more than a layer in memory.
        """
        if not isinstance(model, ShardedModel):
            return super().get_state_dict(model, unwrap)
        found: dict[str, torch.Tensor] = {}
        # A tensor with several names is copied once.
        copies: dict[torch.Tensor, torch.Tensor] = {}
        paths = plain_names(model)
        for layer in dict.fromkeys(layer for _, layer in model.named_layers()):
            with layer.full_params() as params:
                if self.is_main_process:
                    tensors = {**params, **buffers_of(layer.module)}
                    copies |= {tensor: tensor.detach().to("cpu", copy=True)
                               for tensor in {*tensors.values()} - copies.keys()}
                    found |= {f"{path}.{name}".strip("."): copies[tensor]
                              for name, tensor in tensors.items() for path in paths[layer]}
        # Names that a layer does not know, of parameters that it shares with others.
        return found | {
            name: copies[param]
            for name, param in getattr(model, "tied", {}).items()
            if param in copies}


class Prepared(AcceleratedOptimizer):
    """
    ## A `Zero3Optimizer`, as `prepare` returns it

    It steps only after the last micro-batch, and says whether the step was skipped. accelerate's
    scheduler does not advance then.
    """

    def step(self, closure: Any = None) -> None:
        """
        ### Step, if this was the last micro-batch
        """
        before = self.optimizer.skipped_steps
        super().step(closure)
        # `step_was_skipped` returns it.
        self._is_overflow = self.optimizer.skipped_steps > before

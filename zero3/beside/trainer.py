r"""
# Trainer: Hugging Face's loop, on a sharded model

`Trainer` is the one of `transformers`, with one more argument: `shard`, which gets the plain model
and returns what `wrap` returns.

`transformers.Trainer` looks at the plain model first, and asks an `Accelerator` for the rest. So
the model is sharded between these two, and the `Accelerator` is the one of `accelerate.py`:

| | `transformers.Trainer` | here |
|---|---|---|
| 1 | moves the plain model to the GPU | leaves that to `shard` |
| 2 | looks at its class and signature | the same |
| 3 | | `shard(model)` |
| 4 | an optimizer from `TrainingArguments` | the same, as the class of a `Zero3Optimizer` |
| 5 | the loop, by the `Accelerator` | the same |
| 6 | a checkpoint: `optimizer.pt` of rank 0 | `zero3/`, a shard of each rank |
| 7 | `save_model`, for `from_pretrained` | the same, gathered layer by layer |

We average the gradients, and the `Trainer` divides the loss by all tokens. With $T_r$ of the
batch's tokens on rank $r$ and their summed loss $L_r$, each rank computes $N \frac{L_r}{T}$, so
that the mean over the ranks is the loss of plain PyTorch:

$$\frac{1}{N} \sum_r N \frac{L_r}{T} = \frac{\sum_r L_r}{\sum_r T_r}$$

If rank 0 has the losses 2 and 4, and rank 1 the loss 6, this is $\frac{12}{3} = 4$. The mean of the
ranks' means would be $\frac{3 + 6}{2} = 4.5$.

**Run this**: the second program of [Use it in your loop](../../docs/loop.md).

**Not covered, and what that costs**: `model_init`, `optimizers=`, `auto_find_batch_size`, and
`load_best_model_at_end` together with `save_only_model` are errors. For other options of
`Zero3Optimizer`, such as `offload=`, override `create_optimizer`. `save_model` gathers the whole
model in CPU memory of the first rank; `trainer.model.save` has one layer at a time there. After
`load_best_model_at_end` the optimizer's states are those of the best model too. A run that resumes
on another number of ranks draws other random numbers for dropout. Accumulation holds back full
gradients, unless `accelerator_config={"gradient_accumulation_kwargs": {"sync_each_batch": True}}`
reduces each micro-batch. Of TRL's trainers only `SFTTrainer` is tried. Some of the methods that
this class overrides are private, so another minor release of transformers may need other ones.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from zero3.beside.accelerate import Accelerator
from zero3.checkpoint.save_load import load, save
from zero3.guards.checks import expect
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.sharded import ShardedModel
from zero3.whole_model.wrap import Zero3Model

# Where in a checkpoint of the `Trainer` ours is.
FOLDER = "zero3"


class Trainer(transformers.Trainer):
    """
    ## Trainer
    """

    # What transformers sets to one thing first, and to another later.
    model: Any
    optimizer: Any
    label_smoother: Any

    def __init__(self, model: nn.Module, args: transformers.TrainingArguments, *rest,
                 shard: Callable[[nn.Module], Zero3Model], **kwargs):
        """
        ### Look at the plain model, and shard it

        * `model` is the plain model; adapters of PEFT are in it already
        * `shard` returns the sharded one: `lambda model: wrap(model, LlamaDecoderLayer)`

        Raises `ValueError` for arguments that cannot be right with shards.
        """
        expect(not isinstance(model, ShardedModel) and model is not None, "Trainer: `model`",
               "a plain model", type(model).__name__, "pass the model itself, and "
               "`shard=lambda model: wrap(model, ...)`")
        expect(not args.auto_find_batch_size, "Trainer", "a batch size that fits", "one to be "
               "found", "leave `auto_find_batch_size` out: one rank that runs out of memory "
               "leaves the others waiting")
        expect(not (args.save_only_model and args.load_best_model_at_end), "Trainer",
               "checkpoints with shards, to load the best one", "`save_only_model=True`",
               "leave it out")
        super().__init__(model, args, *rest, **kwargs)
        # A `Trainer` of TRL has put adapters in.
        model = self.model
        expect(self.optimizer is None and self.lr_scheduler is None, "Trainer: `optimizers`",
               "none, because the model has no shards yet", "some", "leave them out, and take "
               "`optim=` of `TrainingArguments` or `optimizer_cls_and_kwargs=`, or override "
               "`create_optimizer`")
        # Counted now, because afterwards a rank sees the elements of its shards.
        counts = getattr(model, "num_parameters", None)
        self.numel = counts(exclude_embeddings=True) if counts else 0
        self.decays = {*self.get_decay_parameter_names(model)}
        if self.label_smoother is not None:
            # In a causal model the next token is the label. transformers knows one by the name of
            # its class, which a sharded model does not have. Adapters are around the model itself.
            plain = getattr(model, "get_base_model", lambda: model)()
            self.label_smoother = partial(
                self.label_smoother,
                shift_labels=plain._get_name() in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
        self.model = shard(model)
        self.model_wrapped = self.model
        self.callback_handler.model = self.model

    def _build_accelerator_args(self, **kwargs) -> dict[str, Any]:
        """
        #### Keep the arguments of the `Accelerator`, for ours
        """
        self.accelerator_args = super()._build_accelerator_args(**kwargs)
        return self.accelerator_args

    def create_accelerator_and_postprocess(self) -> None:
        """
        ### Take our `Accelerator`
        """
        super().create_accelerator_and_postprocess()
        self.accelerator = Accelerator(**self.accelerator_args)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """
        #### Leave the plain model where it is: it may be on the meta device, or not fit on the GPU
        """

    # ------------------------------------------------------------------------------- the optimizer

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """
        ### The optimizer of `TrainingArguments`, on shards
        """
        if self.optimizer is None:
            make, options = (self.optimizer_cls_and_kwargs
                             or self.get_optimizer_cls_and_kwargs(self.args, self.model))
            # Norms and biases do not decay.
            self.optimizer = Zero3Optimizer(
                self.model,
                make,
                **options,
                group_by=lambda name, _: {
                    "weight_decay": self.args.weight_decay * (name in self.decays)})
        return self.optimizer

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """
        ### The operations of this rank's batch: 6 for each token and parameter
        """
        tokens = inputs.get(getattr(self.model, "main_input_name", "input_ids"))
        return 0 if tokens is None else 6 * self.numel * tokens.numel()

    # ---------------------------------------------------------------------------------- checkpoints

    def _save(self, output_dir: str | None = None, state_dict: object = None) -> None:
        """
        #### Write the model for `from_pretrained`, or the adapters of a PEFT model

        All ranks call it, because the weights are gathered.
        """
        state_dict = self.accelerator.get_state_dict(self.model)
        sharded = self.model
        self.model = sharded.module.module
        try:
            # It asks parameters for their data type, and shared units are beside the plain model.
            with sharded.module.guard:
                super()._save(output_dir, state_dict)
        finally:
            self.model = sharded

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """
        #### Write a checkpoint of shards and states, with the scheduler's in it
        """
        save(Path(output_dir) / FOLDER, self.model, self.optimizer.optimizer,
             step=self.state.global_step, extra=self.lr_scheduler.state_dict(), keep=1)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: object = None) -> None:
        """
        #### Nothing yet: the weights are loaded with the states, once there is an optimizer

        Raises `ValueError` if there are none.
        """
        expect((Path(resume_from_checkpoint) / FOLDER).exists(), "Trainer: "
               "`resume_from_checkpoint`", "a checkpoint with shards and states",
               resume_from_checkpoint, "save without `save_only_model`; or begin anew with its "
               "weights, by `from_pretrained`")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """
        #### Load weights, states and scheduler, on any number of ranks
        """
        if checkpoint is not None:
            self.lr_scheduler.load_state_dict(self._load(checkpoint))

    def _load_best_model(self) -> None:
        """
        #### Load the best checkpoint, masters and moments included

        With masters of another step, the next step would bring the old weights back.
        """
        self._load(self.state.best_model_checkpoint)

    def _load(self, checkpoint: str) -> object:
        """
        #### Load our part of a checkpoint, and return the scheduler's state
        """
        return load(Path(checkpoint) / FOLDER, self.model, self.optimizer.optimizer)

r"""
# Uses of a sharded layer

`LayerGuard` looks at a layer before and after it computes.

| forward | without this chapter | here |
|---|---|---|
| sets the weight 1 to 5 | the next all-gather brings back the 1 | an error |
| returns `self.weight[0]` | reading it crashes the process | an error |

$$\text{computed with} = \text{gathered from the shards}$$

**Run this**: `python -m pytest tests/test_sharded.py`.

**Not covered, and what that costs**: a write through `.data` is lost without a word.
"""

import warnings

import torch

from zero3.guards.contents import Contents


class LayerGuard(Contents):
    """
    ## The guard of a layer
    """

    def before_forward(self) -> None:
        """
        ### Look at the contents, and warn that autocast keeps a copy of each fp32 weight
        """
        self.check()
        layer = self.layer
        copies = torch.is_autocast_enabled(layer.device.type) and torch.is_grad_enabled()
        if copies and any(flat.full.dtype == torch.float32 for flat in layer.flats):
            # The same words for each layer, because Python shows a warning once.
            warnings.warn(
                f"rank {layer.comm.global_rank}: layers of fp32 run under autocast, which keeps a "
                "16-bit copy of every weight from forward to backward. To free these too, convert "
                "the layers with `.bfloat16()` before wrapping and let `Zero3Optimizer` keep fp32 "
                "masters.", stacklevel=4)

    def after_forward(self, outputs: list[torch.Tensor]) -> None:
        """
        ### Refuse an output that is a view of a parameter, because its memory is about to be freed
        """
        self.after_backward()
        # The address of a layer that is freed already is 0, as that of a view of it.
        lent = {flat.full.untyped_storage().data_ptr() for layer in self.layer.lenders()
                for flat in layer.flats if len(flat.full)}
        for tensor in outputs:
            has_memory = tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta
            self.layer.expect(
                not has_memory or tensor.untyped_storage().data_ptr() not in lent,
                "puts out freed memory", "a tensor of its own",
                f"a view of a parameter, {tensor.shape}", "clone it")

    def before_backward(self, versions: tuple[int, ...]) -> None:
        """
        ### Refuse a backward pass that is itself recorded, because a second one would follow it
        """
        recorded = torch.is_grad_enabled() and not self.layer.is_full_elsewhere
        self.layer.expect(
            not recorded, "cannot go backward twice", "backward without `create_graph`",
            "a backward pass that is itself recorded: a gradient penalty, for instance, or "
            "a Hessian", "compute it in `with model.full_params():`")
        self.refuse_old_calls(versions)

    def refuse_old_calls(self, versions: tuple[int, ...]) -> None:
        """
        ### Refuse backward through weights that have changed since forward

        Plain PyTorch raises an error here too.
        """
        self.layer.expect(
            versions == self.layer.shard_versions(), "cannot go backward",
            "the weights of its forward pass", "weights that have changed since, by an "
            "optimizer for instance", "go backward through all forward passes before you "
            "step; or compute the forward pass again")

    def before_grad(self, grad: torch.Tensor, name: str) -> None:
        """
        ### Refuse a gradient that has no place in the flat one

        `nn.Embedding(sparse=True)` makes such gradients: they list the rows that were used.
        """
        self.layer.expect(
            grad.layout == torch.strided and not grad.requires_grad, "cannot reduce a gradient",
            "a dense one without a graph", f"{grad.layout}, `{name}`",
            "use `sparse=False`, and backward without `create_graph`")

    def after_backward(self) -> None:
        """
        ### Refuse a write to the parameters, because it is lost when they are freed
        """
        # Not fetched, but inside `full_params`: there a write is allowed.
        if not self.layer.is_fetched:
            return
        for flat in self.layer.flats:
            name = flat.written()
            self.layer.expect(
                not name, f"has written to `{name}`", "parameters that only an "
                "optimizer changes", "a write in forward or backward, which each rank would lose "
                "with the full parameter", "write to the shards between two steps (`for p in "
                "model.get_trainable_chunk(): p.clamp_(...)` under `torch.no_grad()`), or in `with "
                "model.full_params(writeback=True)`")

    def before_copy(self) -> None:
        """
        ### Refuse `copy.copy`, `copy.deepcopy`, `pickle` and `torch.save`

        A copy would share the hooks, files and communicator of the original.
        """
        self.layer.expect(
            False, "cannot be copied or pickled", "one model on each rank", "a copy of one of its "
            "layers", "copy the plain model before wrapping it; for a moving average (EMA) average "
            "the shards, `[p.detach().clone() for p in model.get_trainable_chunk()]`; to keep the "
            "weights use `zero3.save`, or clone them in `with model.full_params() as params:`")

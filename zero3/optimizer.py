r"""
# The Stage 3 optimizer: mixed precision on shards

`Zero3Optimizer` lets a model compute in 16 bits and learn in 32: it keeps fp32 *master weights*
and moments of this rank's shards, scales the loss, clips, and steps.

Layers in half precision take half the memory and half the traffic. But a sum of many small steps
needs more digits than one product does. So the optimizer keeps an fp32 copy of every shard, steps
that one, and rounds the result into the shard that the layer gathers. All of this is elementwise: a
rank does it for its own shards and sends nothing. Two things concern the whole model, and cost one
small message: how long its gradient is, and whether any of it is infinite or NaN.

$$g = \frac{1}{S} \min\!\Big(1, \frac{c}{\lVert g_S \rVert / S}\Big)\, g_S
\qquad w_{32} \leftarrow w_{32} - \eta\, \text{Adam}(g)
\qquad w_{16} \leftarrow \text{round}(w_{32})$$

with $g_S$ the gradient of a loss that was multiplied by the scale $S$, and $c$ the clipping norm.

Master weights, momentum and variance are $K = 12$ bytes per parameter
([ZeRO](https://arxiv.org/abs/1910.02054), section 3.1). With half-precision parameters and
gradients a rank has $\frac{(2 + 2 + K)\Psi}{N} = \frac{16\Psi}{N}$ bytes of model states after
backward, and $\frac{14\Psi}{N}$ once `zero_grad()` has dropped the gradients.

**Why the masters are fp32.** bf16 has 8 significant bits: the neighbours of 1 are
$1 + \frac{1}{128}$ and $1 - \frac{1}{256}$. A step of 0.001 from 1 is rounded away, and so are a
thousand of them, one after the other; an fp32 master arrives at 0. fp16 has 11 bits, and loses a
step of 0.0002 in the same way.

**Why the loss is scaled.** Below $2^{-14}$ fp16 has fewer and fewer digits, and below $2^{-24}$ no
number at all; many gradients are smaller than the one, some than the other. The gradient of $S$
times the loss is $S$ times the gradient, so they move up to where the digits are, and the fp32
gradient is divided by $S$ again. `make train` draws where its own gradients lie, `gradients.png`.
bf16 has the range of fp32 and needs no scale.

**Run this**: `make train ARGS="--dtype bf16 --loss-scale dynamic --accumulate 4 --clip 1.0"`.

**Not covered, and what that costs**: optimizers that look at more than one element at a time. A
shard has no rows and columns, and its norm is not the layer's: LAMB and LARS divide by the norm of
each matrix, Adafactor and Muon need its shape, L-BFGS takes products of the whole gradient. They
would train something else; those that torch has are refused. A squared norm above fp32's range,
gradients of $10^{19}$, counts as an overflow too.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.utils import get_total_norm

from zero3 import estimate
from zero3.layer import Zero3Layer, _Group
from zero3.ledger import Ledger, Pairs, Reducer, Silence, Wire

# Optimizers of torch's that look at more than one element at a time.
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
# Elements whose squares fp32 adds up at once; the blocks' sums are added afterwards. One sum over
# millions is too large to notice its next term, and would be wrong in the fourth digit.
_BLOCK_NUMEL = 1 << 16
# A layer, which of its gradients, the gradient, and a buffer that may become its inbox.
_Gradient = tuple[Any, int, torch.Tensor, torch.Tensor]


@dataclass
class _Owned:
    """
    ## A trainable shard of this rank, and its master
    """

    layer: Zero3Layer
    shard: nn.Parameter  # (shard_numel,), what the layer gathers
    master: torch.Tensor  # (shard_numel,), fp32; or the shard itself, where that is wide enough
    pieces: list[tuple[int, slice, nn.Parameter]]  # param group, where in the master, a view of it
    version: int  # of the shard, when the two were last the same


class Zero3Optimizer(torch.optim.Optimizer):
    """
    ## Zero3 optimizer

    A step goes through each shard twice:

    | | reads | writes |
    |---|---|---|
    | norm | gradient | one number |
    | | | *the ranks tell each other their numbers* |
    | unscale and clip | gradient | gradient in fp32, of one shard at a time |
    | step | gradient in fp32, master, moments | master, moments |
    | round | master | shard |
    """

    # To the wire and the ledger it is one layer more.
    expect: Any = Zero3Layer.expect
    label, layer_idx = "the optimizer", -1

    def __init__(self, model: nn.Module, optimizer_class: Any = torch.optim.AdamW, *,
                 group_by: Callable[[str, nn.Parameter], dict[str, Any]] | None = None,
                 loss_scale: float | str | None = None, clip_grad_norm: float | None = None,
                 reduce_dtype: torch.dtype | None = None, bucket_bytes: int = 1 << 18,
                 scale_window: int = 1000, scale_floor: float = 1.0, **kwargs):
        """
        ### Take over the shards of a model

        All ranks call this alike, after wrapping.

        * `model` is a `Zero3Sequential`, or any module whose parameters are all in `Zero3Layer`s
        * `optimizer_class` is an elementwise one of `torch.optim` or like it; `kwargs` are its
          arguments, and `fused=True` is added where it knows that
        * `group_by` says what is special about a parameter: it gets its name and the parameter,
          which has a shape but no values, and returns the options in which it differs. Parameters
          with equal options become a param group; `lambda name, p: {"weight_decay": 0.1 * (p.ndim
          > 1)}` decays matrices only
        * `loss_scale` is a number, or "dynamic": it starts at 65536, halves when a gradient
          overflows, doubles after `scale_window` steps without, and never goes below `scale_floor`
        * `clip_grad_norm` is the greatest norm that the mean gradient of the whole model may have
        * `reduce_dtype` is of the gradients on their way and in the shard; left out, the layer's
        * `bucket_bytes` of full gradients wait for each other, to be reduced in one message; a
          layer that has as many does not wait

        Raises `RuntimeError` where parameters are not sharded, the optimizer is not elementwise, or
        an argument is out of its range. ZeRO, section 3.1. Keeps I1, I2 and I5.
        """
        layers = {m: name for name, m in model.named_modules() if isinstance(m, Zero3Layer)}
        self.model, self.layers = model, [layer for layer in layers if layer.groups]
        self.wire = self.layers[0].wire if self.layers else Wire()
        self.ledger: Ledger | Silence = Silence()
        self.group_by = group_by or (lambda name, param: {})
        self.dynamic, self.scaled = loss_scale == "dynamic", loss_scale is not None
        self.loss_scale: Any = 65536.0 if self.dynamic else loss_scale if self.scaled else 1.0
        self.scale_window, self.scale_floor = scale_window, scale_floor
        self.good_steps = self.skipped_steps = 0
        self.clip_grad_norm, self.reduce_dtype = clip_grad_norm, reduce_dtype
        self.bucket_bytes = bucket_bytes
        self._check(model, optimizer_class)

        # One reducer for each wire: the layers of a chain share one.
        wires = {layer.wire: Bucket(layer.wire, bucket_bytes) for layer in self.layers}
        for wire, bucket in wires.items():
            wire.reducer = bucket
        self.buckets = list(wires.values())

        options: list[dict[str, Any]] = []
        self.owned = [self._own(layer, group, layers[layer], options) for layer in self.layers
                      for group in layer.groups if group.shard.requires_grad and len(group.shard)]
        self.expect(bool(self.owned), "has nothing to do", "a trainable Zero3Layer", "none",
                    "wrap the model first, and leave some parameter trainable")
        self.device = self.owned[0].shard.device
        self._scratch_bytes = max(o.master.nbytes * (o.shard.grad_dtype != o.master.dtype)
                                  for o in self.owned)
        ways = {"fused", "foreach", "differentiable"}
        if "fused" in inspect.signature(optimizer_class).parameters and not ways & kwargs.keys():
            # One loop over memory in place of one for each operation of the formula.
            kwargs["fused"] = True
        pieces = [{**each, "params": self._pieces(i, self.owned)} for i, each in enumerate(options)]
        self.inner, self.options = optimizer_class(pieces, **kwargs), (optimizer_class, kwargs)
        # Param groups and states are one thing with two owners: a scheduler that sets a learning
        # rate here sets it there.
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.param_groups, self.state = self.inner.param_groups, self.inner.state

    # ------------------------------------------------------------------------------------- masters

    def _check(self, model: nn.Module, optimizer_class: Any) -> None:
        """
        #### Refuse what would train something else
        """
        name = getattr(optimizer_class, "__name__", optimizer_class)
        self.expect(name not in _NOT_ELEMENTWISE, "cannot use this class", "an elementwise one, "
                    "for a shard has no rows and columns", name, "take AdamW, for instance")
        shards = {shard for layer in self.layers for shard in layer.chunk}
        stray = [n for n, p in model.named_parameters() if p.requires_grad and p not in shards]
        self.expect(not stray, "would miss parameters", "all in Zero3Layers, which take the mean "
                    "of their gradients", stray, "wrap the modules that they are in")
        for what, value, least in (("loss_scale", self.loss_scale, 2.0**-149),
                                   ("clip_grad_norm", self.clip_grad_norm, 2.0**-149),
                                   ("scale_floor", self.scale_floor, 2.0**-149),
                                   ("scale_window", self.scale_window, 1),
                                   ("bucket_bytes", self.bucket_bytes, 0)):
            number = isinstance(value, (int, float)) and math.isfinite(value) and value >= least
            optional = what == "clip_grad_norm" and value is None
            self.expect(number or optional, f"cannot use `{what}`", f"a number, {least:g} or more",
                        value, "pass another, or leave it out")
        dtype = self.reduce_dtype or torch.float32
        self.expect(isinstance(dtype, torch.dtype) and dtype.is_floating_point, "cannot use "
                    "`reduce_dtype`", "a floating data type", dtype, "pass torch.float32, or none")

    @torch.no_grad()
    def _own(self, layer: Zero3Layer, group: _Group, path: str, options: list) -> _Owned:
        """
        #### Make a shard's master, and cut it where one param group ends and another begins

        Not only a matrix but its biases too are in a shard, one after the other, and the shard may
        begin in the middle of either. The padding goes with what is before it.
        """
        shard = group.shard
        if self.reduce_dtype:
            # The layer asks the shard what its gradients should be.
            shard.grad_dtype = self.reduce_dtype
        master = shard.float() if shard.element_size() < 4 else shard.detach()
        # Names as in `full_params()`.
        prefix = "".join(f"{part}." for part in path.split(".")
                         if part not in ("", "module", "module_list"))
        indices = []
        for slot in group.slots:
            special = self.group_by(prefix + slot.names[0], slot.param)
            if special not in options:
                options.append(special)
            indices.append(options.index(special))
        # A parameter ends where the next begins, the last one with the padding.
        ends = [*(slot.offset for slot in group.slots[1:]), len(group.full)]
        pieces, first, end = [], self.wire.rank * len(shard), 0
        for index, run in groupby(zip(indices, ends, strict=True), key=lambda pair: pair[0]):
            begin, end = end, [*run][-1][1]
            where = slice(max(begin - first, 0), min(end - first, len(shard)))
            if where.start < where.stop:
                pieces.append((index, where, nn.Parameter(master[where])))
        return _Owned(layer, shard, master, pieces, shard._version)

    def _pieces(self, index: int, owned: list[_Owned]) -> list[nn.Parameter]:
        """
        #### What a param group has of these shards
        """
        return [piece for o in owned for i, _, piece in o.pieces if i == index]

    # ------------------------------------------------------------------------------------ backward

    def backward(self, loss: torch.Tensor) -> None:
        """
        ### Backward pass of the scaled loss

        All ranks call it. For $k$ micro-batches that shall count as one batch pass
        `loss / k` of each; gradients add up until `zero_grad()`.
        """
        # In fp32, where a loss in fp16 could overflow.
        scaled = loss.float() * self.loss_scale if self.scaled else loss
        scaled.backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        r"""
        ### Accumulate full gradients, and send none

        For all micro-batches but the last one. Each layer then keeps its full gradient,
        $N \lceil P_\ell/N \rceil$ elements, from the first micro-batch into the last: memory that
        sharding has saved, for $(k-1)\Psi\frac{N-1}{N}$ elements that are not sent.
        """
        for bucket in self.buckets:
            bucket.hold = True
        try:
            yield
        finally:
            for bucket in self.buckets:
                bucket.hold = False

    # ---------------------------------------------------------------------------------------- step

    @torch.no_grad()
    def step(self) -> float | None:  # type: ignore[override]
        """
        ### Update the shards

        All ranks call it. Returns the norm of the mean gradient of the whole model, before
        clipping and without the scale; or `None` where a gradient overflowed and no rank has
        stepped. Keeps I1 and I5.

        Raises `RuntimeError` with the layer's name where a gradient is infinite or NaN and the loss
        scale cannot go lower. Nothing is changed then: `zero_grad()`, and go on.
        """
        for layer in reversed(self.layers):
            # What `no_sync` has held back, where no other micro-batch took it along.
            layer._backup_grads()
        for bucket in self.buckets:
            bucket.end()
        held = any(group.grad is not None for layer in self.layers for group in layer.groups)
        self.expect(not held, "cannot step", "gradients that are reduced", "some that are held "
                    "back", "leave `no_sync()` first")
        scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self.device)
        # The heart has taken the mean over ranks already, so this is the norm of what plain
        # training on the global batch would have. A norm for each rank, averaged, would not be: in
        # the mean a part of what ranks disagree on cancels.
        squares = self._squares(scratch)  # (world_size, shards) fp64
        norm = squares.sum().sqrt().item() / self.loss_scale
        if not math.isfinite(norm):
            self._overflow(squares)
            return None
        # Unscale and clip in one multiplication. The 1e-6 is that of `clip_grad_norm_`.
        clip = self.clip_grad_norm / (norm + 1e-6) if self.clip_grad_norm else 1.0
        for owned in self.owned:
            if owned.shard.grad is not None:
                self._update(owned, min(clip, 1.0) / self.loss_scale, scratch)
        self.good_steps += 1
        if self.dynamic and self.good_steps % self.scale_window == 0:
            self.loss_scale *= 2
        return norm

    def _widen(self, owned: _Owned, scratch: torch.Tensor) -> torch.Tensor:
        """
        #### The gradient in the master's data type

        A copy where that is another one. All shards share the memory for it, one after the other:
        fp32 gradients of all of them would be 4 more bytes per parameter, and fresh memory for each
        takes longer to get than to fill.
        """
        grad: Any = owned.shard.grad
        if grad.dtype == owned.master.dtype:
            return grad
        return scratch[: owned.master.nbytes].view(owned.master.dtype).copy_(grad)

    def _squares(self, scratch: torch.Tensor) -> torch.Tensor:
        """
        #### The squared norm of each shard's gradient, on each rank

        Parameters are in exactly one shard and the padding is zero, so their sum is that of the
        whole model. A number for each shard, and not one alone, so that an infinity has an address.
        All ranks add them up in the same order, and come to the same bits.
        """
        norms = []
        for owned in self.owned:
            if owned.shard.grad is None:
                norms.append(torch.zeros((), device=self.device))
            else:
                norms.append(get_total_norm(self._widen(owned, scratch).split(_BLOCK_NUMEL)))
        return self.wire.numbers(self, torch.stack([n.double() for n in norms]).square())

    def _overflow(self, squares: torch.Tensor) -> None:
        """
        #### Skip the step, on all ranks, and scale less

        Backward comes to the last layer first, and what is infinite there is infinite in all layers
        below: the last one is where it began.
        """
        bad = ~squares.isfinite()
        last = int(bad.any(dim=0).nonzero().max())
        ranks = bad[:, last].nonzero().flatten().tolist()
        label = self.owned[last].layer.label
        lower = self.scaled and (not self.dynamic or self.loss_scale / 2 >= self.scale_floor)
        scaled = f"at a loss scale of {self.loss_scale:g}, which cannot go lower"
        self.expect(lower, "cannot step", f"a finite gradient {scaled if self.scaled else ''}",
                    f"a norm of inf or nan in {label}, in the shards of ranks {ranks}",
                    "look at what that layer computes, lower the learning rate, or "
                    "`zero_grad()` and go on")
        self.skipped_steps += 1
        if self.dynamic:
            self.loss_scale, self.good_steps = self.loss_scale / 2, 0

    def _update(self, owned: _Owned, factor: float, scratch: torch.Tensor) -> None:
        """
        #### Unscale, clip, step and round one shard
        """
        grad = self._widen(owned, scratch)
        if factor != 1:
            grad.mul_(factor)
        if owned.version != owned.shard._version:
            # Somebody else has written into the shard, `full_params(writeback=True)` for instance.
            owned.master.copy_(owned.shard)
        for _, where, piece in owned.pieces:
            piece.grad = grad[where]
        every = [group["params"] for group in self.param_groups]
        try:
            # A step for each shard, so that its gradient can go before the next one's comes; and
            # with its pieces alone in sight, or each step would look at those of all shards.
            for i, group in enumerate(self.param_groups):
                group["params"] = self._pieces(i, [owned])
            self.inner.step()
        finally:
            for group, params in zip(self.param_groups, every, strict=True):
                group["params"] = params
        if owned.master.dtype != owned.shard.dtype:
            owned.shard.copy_(owned.master)
        owned.version = owned.shard._version
        owned.layer.ledger.record(owned.layer, "step", owned.shard.nbytes)
        for *_, piece in owned.pieces:
            piece.grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        ### Drop the gradients, also those that `no_sync` holds back
        """
        for layer in self.layers:
            layer._drop_grads()
        for owned in self.owned:
            if set_to_none:
                owned.shard.grad = None
            elif owned.shard.grad is not None:
                owned.shard.grad.zero_()

    # -------------------------------------------------------------------------------- bookkeeping

    def state_dict(self) -> dict[str, Any]:
        """
        ### This rank's masters, moments, param groups and loss scale

        For a run with as many ranks. The masters are the model: a shard is one, rounded.
        """
        own = {"masters": [owned.master for owned in self.owned], "loss_scale": self.loss_scale,
               "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}
        return {**self.inner.state_dict(), **own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        ### Go on from there

        Raises `RuntimeError`, before anything is changed, where the shards are of other sizes.
        """
        own = dict(state_dict)
        sizes, mine = [[len(m) for m in masters] for masters in (
            own["masters"], (owned.master for owned in self.owned))]
        self.expect(sizes == mine, "cannot load this state", f"shards of {mine} elements",
                    f"{sizes}", "load it into the same model on as many ranks, on the same rank")
        self.inner.load_state_dict({key: own.pop(key) for key in ("state", "param_groups")})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for owned, master in zip(self.owned, own.pop("masters"), strict=True):
            owned.master.copy_(master)
            owned.shard.copy_(master)
            owned.version = owned.shard._version
        vars(self).update(own)

    def predict(self, micro_batches: int = 1, no_sync: bool = False) -> estimate.Prediction:
        """
        ### The bytes of this rank, from the formulas

        * `micro_batches` are in a step; `no_sync` says that all but the last ran in `no_sync()`

        Raises `RuntimeError` where the model is not a `Zero3Sequential`.
        """
        self.expect(hasattr(self.model, "module_list"), "cannot predict", "a Zero3Sequential",
                    type(self.model).__name__, "put the layers into one, or measure with `Ledger`")
        # How many tensors of an element's width the class keeps, and how many bytes beside them,
        # it says itself: it takes a step with two elements.
        optimizer_class, kwargs = self.options
        two = nn.Parameter(torch.zeros(2, device=self.device))
        two.grad = torch.zeros_like(two)
        probe = optimizer_class([two], **kwargs)
        probe.step()
        states = [t for t in probe.state[two].values() if isinstance(t, torch.Tensor)]
        moments = sum(t.shape == two.shape for t in states)
        return estimate.predict(
            estimate.describe(self.model, self.group_by), self.wire.world_size,
            rank=self.wire.rank, moments=moments,
            step_bytes=sum(t.nbytes for t in states) - moments * two.nbytes,
            by_messages=self.wire.by_messages, stage3=True, micro_batches=micro_batches,
            no_sync=no_sync, bucket_bytes=self.bucket_bytes,
            reduce_bytes=self.reduce_dtype.itemsize if self.reduce_dtype else None)

    def table(self, micro_batches: int = 1) -> str:
        """
        ### What this rank will hold, kind by kind, before it holds it
        """
        p, widths = self.predict(micro_batches), {o.shard.dtype for o in self.owned}
        narrow = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in widths))
        wide = ", ".join(sorted({str(o.master.dtype).removeprefix("torch.") for o in self.owned}))
        reduced = str(self.reduce_dtype or narrow).removeprefix("torch.")
        rows = (("parameters", narrow, p.param_bytes), ("gradients", reduced, p.grad_bytes),
                ("masters", wide, p.master_bytes), ("moments and counts", wide, p.optimizer_bytes),
                ("buffers", "", p.buffer_bytes), ("all of them, with gradients", "",
                 p.rest_bytes + p.grad_bytes), ("at the peak of a step", "", p.peak_bytes))
        return "\n".join([f"{f'rank {self.wire.rank} will hold':30}{'':12}{'bytes':>16}",
                          *(f"{name:30}{dtype:12}{nbytes:>16,}" for name, dtype, nbytes in rows)])


class Bucket(Reducer):
    """
    ## Gradients of small layers wait for each other

    A message costs its bytes and a fixed time beside. Many little layers would pay that time once
    for each; here they fill a bucket, which goes out as one message to each rank.
    """

    def __init__(self, wire: Wire, bucket_bytes: int):
        super().__init__(wire)
        self.bucket_bytes, self.hold = bucket_bytes, False
        self.waiting: list[_Gradient] = []
        # Of the bucket in flight, message by message: layer, which, and elements of the share.
        self.parts: list[list[tuple[Zero3Layer, int, int]]] = []

    def add(self, layer: Any, pairs: Pairs) -> None:
        """
        ### Put a layer's gradients in, and send the bucket if it is full
        """
        if self.hold or layer in self.layers or self._waits(layer):
            return
        new = [(layer, i, *pair) for i, pair in enumerate(pairs)]
        if self._fills(new) or self.wire.world_size == 1:
            # Large enough to go alone; to copy it would cost more than a message does.
            self._send(new)
            return
        self.waiting += new
        if self._fills(self.waiting):
            self._send(self.waiting)

    def _waits(self, layer: Zero3Layer) -> bool:
        return any(layer is waiting for waiting, *_ in self.waiting)

    def _fills(self, gradients: list[_Gradient]) -> bool:
        return sum(grad.nbytes for _, _, grad, _ in gradients) >= self.bucket_bytes

    def _send(self, gradients: list[_Gradient]) -> None:
        """
        #### Send these, in one message to each rank

        What is in flight ends first. Gradients lie in the message in the layers' order and not in
        that of their arrival, which may differ between ranks. Each data type has its own message.
        """
        super().end()
        alike: dict[torch.dtype, list] = {}
        for one in sorted(gradients, key=lambda one: -one[0].layer_idx):
            alike.setdefault(one[2].dtype, []).append(one)
        gradients.clear()
        self.parts, pairs, rows = [], [], self.wire.rows
        for same in alike.values():
            self.parts.append([(layer, i, rows(grad).shape[1]) for layer, i, grad, _ in same])
            *_, grad, buffer = same[0]
            if len(same) > 1:
                # A rank's shares of all of them become its share of the whole.
                grad = torch.cat([rows(grad) for *_, grad, _ in same], dim=1).view(-1)
            pairs.append((grad, buffer))
        self.layers = list(dict.fromkeys(layer for part in self.parts for layer, *_ in part))
        self.wire.reduce_scatter(self.layers[0], pairs)

    def finish(self, layer: Any) -> None:
        """
        ### End the reduce of a layer's bucket, if there is one
        """
        if self._waits(layer):
            self._send(self.waiting)
        if layer in self.layers:
            totals: dict[Any, dict[int, torch.Tensor]] = {layer: {} for layer in self.layers}
            self.layers = []
            for part, total in zip(self.parts, self.wire.reduced(), strict=True):
                shares = total.split([numel for *_, numel in part])
                for (owner, i, _), share in zip(part, shares, strict=True):
                    totals[owner][i] = share
            for owner, own in totals.items():
                owner._add_reduced([own[i] for i in sorted(own)])

    def end(self) -> None:
        """
        ### End all reduces, of layers that wait too
        """
        if self.waiting:
            self._send(self.waiting)
        super().end()

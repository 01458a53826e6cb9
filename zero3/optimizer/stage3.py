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
backward, once the first step has made the moments, and $\frac{14\Psi}{N}$ after `zero_grad()`;
beside that padding, and for each shard 4 bytes in which torch's Adam counts its steps.

**Why the masters are fp32.** bf16 has 8 significant bits: the neighbours of 1 are
$1 + \frac{1}{128}$ and $1 - \frac{1}{256}$. A step of 0.001 from 1 is rounded away, and so are a
thousand of them, one after the other; an fp32 master arrives at 0, to four digits. fp16 has 11
bits, and loses a step of 0.0002 in the same way.

**Why the loss is scaled.** Below $2^{-14}$ fp16 has fewer and fewer digits, and below $2^{-24}$ no
number at all; many gradients are smaller than the one, some than the other. The gradient of $S$
times the loss is $S$ times the gradient, so they move up to where the digits are, and the fp32
gradient is divided by $S$ again. `make train` draws where its own gradients lie, `gradients.png`.
bf16 has the range of fp32 and needs no scale. The idea is section 3.2 of [Mixed Precision
Training](https://arxiv.org/abs/1710.03740).

**Where it all rests.** On the device, in CPU memory or in files: `states.py` brings a shard's
states, and the step walks along the shards as a pipeline, reading ahead and writing behind.

**Why small layers wait.** A message costs its bytes and a fixed time beside. Gradients of layers
smaller than a bucket wait until they fill it, and go as one message. Micro-batches add up in the
shard or, where `no_sync()` says so, in the full gradient.

**Run this**: `make train ARGS="--dtype fp16 --loss-scale dynamic --accumulate 4 --clip 1.0"`, and
with `bf16` for the same without a need for the scale.

**Not covered, and what that costs**: optimizers that look at more than one element at a time. A
shard has no rows and columns, and its norm is not the layer's: LAMB and LARS divide by the norm of
each matrix, Adafactor and Muon need its shape, L-BFGS takes products of the whole gradient. They
would train something else; those that torch has are refused. One that counts its steps in the
param group counts one for each shard, for each is stepped by itself. A squared norm above fp32's
range, of scaled gradients around $10^{19}$, counts as an overflow. A gradient that is missing on
one rank only is zero there while its layer waits in a bucket; where the layer does not, the ranks
raise an error. `zero_grad()` of a module in which the model is one of several does not see the full
gradients that `no_sync` holds back. A parameter that was used in other steps than its neighbours is
a piece of its own from then on, as in plain PyTorch a tensor of its own: that costs a count of
steps and a little of the time of a step; and a step in which no rank used a parameter sends 8 bytes
for each parameter of its shard more than `predict` says.
"""

import inspect
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from zero3.comm import Communicator, Listener, Silence
from zero3.estimate.formulas import describe
from zero3.estimate.predict import Prediction, predict
from zero3.flat import FlatParameter
from zero3.guards.gradients import GradientElsewhere, grad_of, set_grad
from zero3.layer import Zero3Layer
from zero3.offload import Offload
from zero3.optimizer.buckets import Bucket
from zero3.optimizer.states import Owned, moments_of

# Optimizers of torch's that a flat, dense shard cannot serve.
_NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


class Zero3Optimizer(torch.optim.Optimizer):
    """
    ## Zero3 optimizer

    A step goes through all shards for the norm of the gradient, and then, shard by shard, through
    the rest:

    | | reads | writes |
    |---|---|---|
    | norm | gradient, widened to fp32 | one number |
    | | | *the ranks tell each other their numbers* |
    | unscale and clip | gradient | gradient in fp32 |
    | step | gradient in fp32, master, moments | master, moments |
    | round | master | shard |

    A gradient that goes to a file has its norm taken on the way, in backward; a shard that is its
    own master is not rounded.
    """

    # What the wire and the ledger ask of a layer; the message with the norms goes by this name.
    expect: Any = Zero3Layer.expect
    label, layer_idx = "the optimizer", -1
    complete = False  # built, so that nothing can be added any more

    def __init__(self, model: nn.Module, optimizer_class: Any = torch.optim.AdamW, *,
                 group_by: Callable[[str, nn.Parameter], dict[str, Any]] | None = None,
                 loss_scale: float | str | None = None, clip_grad_norm: float | None = None,
                 reduce_dtype: torch.dtype | None = None, bucket_bytes: int = 1 << 18,
                 offload: Offload | str | None = None,
                 scale_window: int = 1000, scale_floor: float = 1.0, **kwargs):
        """
        ### Take over the shards of a model

        All ranks call this alike, after wrapping. From now on the layers' gradients are reduced in
        buckets, and in `reduce_dtype`.

        * `model` is a `Zero3Sequential`, or any module whose parameters are all in `Zero3Layer`s
        * `optimizer_class` is an elementwise one of `torch.optim` or like it, which keeps what it
          knows of a parameter in that parameter's state; `kwargs` are its arguments, and
          `fused=True` is added where it knows that and all parameters are real
        * `group_by` says what is special about a parameter: it gets its name and the parameter,
          which has a shape but no values, and returns the options in which it differs. Parameters
          with equal options become a param group; `lambda name, p: {"weight_decay": 0.1 * (p.ndim
          > 1)}` decays matrices only
        * `loss_scale` is a number, or "dynamic": it starts at 65536, halves when a gradient
          overflows, doubles after `scale_window` steps without that, and is never below
          `scale_floor`
        * `clip_grad_norm` is the greatest norm that the mean gradient of the whole model may have
        * `reduce_dtype` is of the gradients on their way and in the shard; left out, the layer's
        * `bucket_bytes` of full gradients, those of all ranks' shards, wait for each other to be
          reduced in one message; a layer that has as many does not wait
        * `offload` says where masters, moments and the shards' gradients rest, as an `Offload` or
          as "cpu"; left out, on the device. From both other tiers the step is computed by the CPU

        Raises `RuntimeError` where parameters are not sharded, the optimizer is not elementwise, an
        argument is out of its range, or there is no room. ZeRO, section 3.1. Keeps I1, I2 and I5 to
        I8.
        """
        layers = {m: name for name, m in model.named_modules() if isinstance(m, Zero3Layer)}
        self.model, self.layers = model, [layer for layer in layers if layer.flats]
        # Without layers there is an error to come, and it names the rank.
        self.comm = self.layers[0].comm if self.layers else Communicator()
        self.listener: Listener = Silence()
        self.group_by, self.offload = group_by or (lambda name, param: {}), Offload.of(offload)
        self.dynamic, self.scaled = loss_scale == "dynamic", loss_scale is not None
        self.scale_window, self.scale_floor = scale_window, scale_floor
        start = max(65536.0, scale_floor) if self.dynamic else loss_scale
        self.loss_scale: Any = start if self.scaled else 1.0
        self.good_steps = self.skipped_steps = 0
        self.clip_grad_norm, self.reduce_dtype = clip_grad_norm, reduce_dtype
        self._check(model, optimizer_class)
        good = finite(bucket_bytes) and bucket_bytes >= 0
        self.expect(good, "cannot use `bucket_bytes`", "a number of bytes, 0 or more", bucket_bytes,
                    "pass another, or leave it out")

        # The layers of a chain share a reducer, and get a bucket in its place.
        buckets = {layer.reducer: Bucket(layer.comm, bucket_bytes) for layer in self.layers}
        for layer in self.layers:
            layer.reducer = buckets[layer.reducer]
        self.buckets = list(buckets.values())
        for bucket in self.buckets:
            bucket.scaled = self.scaled

        # Of each param group, filled by `_own`. One of which this rank has no piece stays, empty,
        # so that the groups are the same on all ranks.
        options: list[dict[str, Any]] = []
        plain = plain_paths(model)
        self.owned = [self._own(layer, group, layers[layer], plain[layer], options)
                      for layer in self.layers for group in layer.flats
                      if group.shard.requires_grad and len(group.shard)]
        self.expect(bool(self.owned), "has nothing to do", "a trainable Zero3Layer", "none",
                    "wrap the model first, and leave some parameter trainable")
        ways = {"fused", "foreach", "differentiable"}
        real = not any(owned.shard.dtype.is_complex for owned in self.owned)
        knows = "fused" in inspect.signature(optimizer_class).parameters
        if knows and real and not ways & kwargs.keys():
            # One loop over memory in place of one for each operation of the formula.
            kwargs["fused"] = True
        self._rest(optimizer_class, kwargs, options)
        pieces = [{**each, "params": self._pieces(i, self.owned)} for i, each in enumerate(options)]
        self.inner, self.made_by = optimizer_class(pieces, **kwargs), (optimizer_class, kwargs)
        # Param groups and states are one thing with two owners: a scheduler that sets a learning
        # rate here sets it there.
        super().__init__(self.inner.param_groups, self.inner.defaults)
        self.complete = True
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for owned in self.owned:
            owned.let_go(self.state)

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
        for what in ("loss_scale", "clip_grad_norm", "scale_floor", "scale_window"):
            value = getattr(self, what)
            good = finite(value) and value > 0
            self.expect(good or (what == "clip_grad_norm" and value is None), f"cannot use "
                        f"`{what}`", "a positive number", value, "pass another, or leave it out")
        dtype = self.reduce_dtype
        floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        self.expect(dtype is None or floating, "cannot use `reduce_dtype`", "a floating data type",
                    dtype, "pass torch.float32, or leave it out")

    @torch.no_grad()
    def _own(self, layer: Zero3Layer, group: FlatParameter, path: str, plain: str,
             options: list) -> Owned:
        """
        #### Find each parameter's param group, and where it is in this rank's shard
        """
        shard, dtype = group.shard, self.reduce_dtype or group.shard.dtype
        layer.expect(dtype.is_complex or not shard.dtype.is_complex, "cannot use `reduce_dtype`",
                     "complex numbers, as its parameters are", dtype, "leave it out, for a real "
                     "data type would drop the imaginary part")
        if isinstance(grad_of(shard), GradientElsewhere):
            # It rests with the optimizer before this one.
            set_grad(shard, None)
        grad = grad_of(shard)
        layer.expect(grad is None or grad.dtype == dtype, "has gradients", f"{dtype}",
                     shard.grad_dtype, "call `zero_grad()` of the optimizer before this one first")
        # torch lets `.grad` be of this type, and the layer makes its flat gradient of it.
        shard.grad_dtype = dtype
        indices, spans = [], []
        # A parameter ends where the next begins, the last one with the padding.
        ends = [*(slot.offset for slot in group.slots[1:]), len(group.full)]
        first = self.comm.rank * len(shard)
        for slot, end in zip(group.slots, ends, strict=True):
            special = self.group_by(f"{plain}.{slot.names[0]}".strip("."), slot.param)
            if special not in options:
                options.append(special)
            indices.append(options.index(special))
            begin, stop = (min(max(at - first, 0), len(shard)) for at in (slot.offset, end))
            spans.append(slice(begin, stop))
        name = layer.label if layer.layer_idx >= 0 or not path else f"{path} ({layer.label})"
        return Owned(layer, name, group, dtype, indices, spans)

    def _rest(self, optimizer_class: Any, kwargs: dict[str, Any], options: list) -> None:
        """
        #### Have masters, moments and gradients rest where they shall
        """
        on_device = self.offload.tier == "device"
        self.device = self.owned[0].layer.device if on_device else torch.device("cpu")
        two = torch.zeros(2, device=self.device)
        kept = [moments_of(optimizer_class, kwargs, each, two) for each in options]
        self.moments = list(dict.fromkeys(key for keys, _ in kept for key in keys))
        need_bytes = sum(owned.nbytes(self.moments) - owned.shard.nbytes * owned.near(self.device)
                         for owned in self.owned)
        if self.offload.tier != "nvme":
            self.offload.check(self, "masters, moments and gradients", need_bytes, self.device)
        for owned in self.owned:
            owned.rest(self.offload, self.device, self.moments)
        # The first shards' gradients come last. When that of the one above them is here, their
        # states begin to be read, into all buffers but the one that this gradient leaves from.
        in_files, first = [o for o in self.owned if o.states], self.offload.buffers - 1
        for owned in in_files[first : first + 1]:
            owned.ahead = in_files[:first]
        self._scratch_bytes = max(len(o.shard) * o.wide.itemsize * (o.grad_dtype != o.wide)
                                  for o in self.owned)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """
        ### Not possible: param groups are made with the optimizer

        Raises `RuntimeError`. A parameter outside of the model's shards would never be stepped.
        """
        self.expect(not self.complete, "cannot take another param group", "those that it was built "
                    "with", [*param_group], "wrap the module first, and build the "
                    "optimizer on the whole model; `group_by=` makes param groups, and parameters "
                    "outside of the model take an optimizer of their own")
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """
        #### Asked by torch's `GradScaler`, which cannot scale for this optimizer
        """
        self.expect(False, "cannot step", "its own loss scale", "torch's GradScaler",
                    "pass `loss_scale=\"dynamic\"`, and call `optimizer.backward(loss)` and "
                    "`optimizer.step()` in place of the scaler's methods")
        return False

    def regroup(self) -> None:
        """
        ### Put all shards' pieces into their param groups again, after some were cut
        """
        for i, group in enumerate(self.param_groups):
            group["params"] = self._pieces(i, self.owned)

    def _pieces(self, index: int, owned: list[Owned]) -> list[nn.Parameter]:
        """
        #### What a param group has of these shards
        """
        return [piece for o in owned for i, _, piece in o.pieces if i == index]

    # ------------------------------------------------------------------------------------ backward

    def backward(self, loss: torch.Tensor) -> None:
        """
        ### Backward pass of the scaled loss

        * `loss` is a scalar, the mean over this rank's rows, computed in fp32

        All ranks call it. For $k$ micro-batches that shall count as one batch pass `loss / k` of
        each; gradients add up until `zero_grad()`. Keeps I7.

        Raises `RuntimeError` if the loss is no scalar or has no graph; and if it is in fp16 and the
        scale is not a number of fp16, because then each gradient would be infinite.
        """
        tensor = isinstance(loss, torch.Tensor)
        self.expect(tensor and loss.numel() == 1, "cannot go backward", "a loss of one element",
                    f"one of shape {tuple(loss.shape)}" if tensor else type(loss).__name__,
                    "return the loss from what computes it, and take its mean")
        self.expect(loss.requires_grad and loss.is_floating_point(), "cannot go backward",
                    "a loss in real numbers that depends on a trainable parameter",
                    f"{loss.dtype} {'with' if loss.requires_grad else 'without'} a graph",
                    "compute it outside of `torch.no_grad()`, and without `.item()` or "
                    "`.detach()` on the way")
        self.expect(self.loss_scale <= torch.finfo(loss.dtype).max, "cannot scale the loss", "one "
                    f"in fp32, at a scale of {self.loss_scale:g}", loss.dtype, "call `.float()` on "
                    "what it is computed from")
        (loss * self.loss_scale if self.scaled else loss).backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        r"""
        ### Accumulate full gradients, and send none

        For all micro-batches but the last one, on all ranks alike. Each layer then keeps its full
        gradient, $N \lceil P_\ell/N \rceil$ elements, from the first micro-batch into the last.
        This gives back memory that sharding has saved, and saves $(k-1)\Psi\frac{N-1}{N}$ elements
        that a rank would send. Keeps I7, suspends I2. After an exception call `zero_grad()`: layers
        that backward had reached have dropped what they held, the others have not.
        """
        for bucket in self.buckets:
            bucket.holds += 1
        try:
            yield
        finally:
            for bucket in self.buckets:
                bucket.holds -= 1

    # ---------------------------------------------------------------------------------------- step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """
        ### Update the shards

        * `closure` clears the gradients, computes the loss, calls `backward` and returns the loss,
          as for torch's optimizers; left out, the gradients are those that are there

        All ranks call it, and `zero_grad()` before the next backward. Returns the norm of the mean
        gradient of the whole model, before clipping and without the scale; or `None` where a
        gradient overflowed and no rank has stepped. With a closure it returns the closure's loss,
        as torch's do; `skipped_steps` then says whether a gradient overflowed. Keeps I1 and I5.

        A parameter that got no gradient on any rank since `zero_grad()` stays as it is, with its
        moments and its number of steps, as in plain PyTorch.

        Raises `RuntimeError` with the layer's name where a gradient is infinite or NaN and there is
        no loss scale, or a dynamic one is at its floor; with a fixed scale it skips the step. It
        also raises inside of `no_sync()`. Weights and states are then as before: `zero_grad()`, and
        go on.
        """
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            self.step()
            return loss
        self.expect(not any(bucket.holds for bucket in self.buckets), "cannot step", "gradients "
                    "that are reduced", "some that are held back", "leave `no_sync()` first")
        known = {owned.shard for owned in self.owned}
        for layer in self.layers:
            # They were frozen when this optimizer was built.
            thawed = [g.shard for g in layer.flats if g.shard.requires_grad and len(g.shard)]
            layer.expect(known.issuperset(thawed), "cannot be stepped", "parameters that trained "
                         "when the optimizer was built", "some that were frozen then", "build the "
                         "optimizer while all that will train is trainable; freeze afterwards")
        for layer in reversed(self.layers):
            # What `no_sync` has held back, where no other micro-batch took it along; in backward's
            # order, which is the same on all ranks.
            layer.reduce()
        before = torch.get_num_threads()
        for bucket in self.buckets:
            bucket.end()
        try:
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.comm.world_size))
            threads = step_threads(self.device, self.layers[0].device, before, ranks)
            if threads != before:
                torch.set_num_threads(threads)
            return self._step()
        finally:
            if torch.get_num_threads() != before:
                torch.set_num_threads(before)

    def _step(self) -> float | None:
        """
        #### Step all shards, if the gradient is finite
        """
        # The heart has taken the mean over ranks already, so this is the norm of what plain
        # training on the global batch would have. The mean of the ranks' norms would not be: with a
        # gradient of 1 on one rank and of -1 on the other that is 1, and the norm of their mean 0.
        squares = self._squares().cpu()  # (world_size, shards) fp64
        norm = squares.abs().sum().sqrt().item() / self.loss_scale
        if not math.isfinite(norm):
            self._overflow(squares)
            return None
        # Unscale and clip in one multiplication. The 1e-6 is that of `clip_grad_norm_`.
        clip = self.clip_grad_norm / (norm + 1e-6) if self.clip_grad_norm else 1.0
        factor = min(clip, 1.0) / self.loss_scale
        # (bytes of the largest master,); each shard's gradient in turn is widened there.
        scratch = torch.empty(self._scratch_bytes, dtype=torch.uint8, device=self.device)
        used = self._used(squares.signbit().all(dim=0).tolist())
        todo = [owned for owned in self.owned if owned.has_grad and any(used.get(owned, [True]))]
        for i, owned in enumerate(todo):
            # A pipeline, where states rest in files: one buffer is written from, this shard is
            # stepped in another, and into the others the next ones' states are read.
            for ahead in todo[i : i + self.offload.buffers - 1]:
                ahead.read_async()
            self._update(owned, used.get(owned), factor, scratch)
        self.good_steps += 1
        if self.dynamic and self.good_steps % self.scale_window == 0:
            self.loss_scale *= 2
        return norm

    def _squares(self) -> torch.Tensor:
        """
        #### The squared norm of each shard's gradient, on each rank

        An element is in exactly one shard and the padding is zero, so these numbers add up to the
        square of the whole model's norm. A number for each shard, and not one alone, so that the
        error can name the layer with the infinite gradient. A negative sign says that this rank had
        no gradient for some of the shard's parameters. All-gather: all ranks call it, and send 8
        bytes for each shard to each other one. Returns `(world_size, shards)` fp64, the same bits
        on all ranks.
        """
        zero = torch.zeros((), device=self.device)
        norms = [owned.grad_norm() for owned in self.owned]
        whole = [zero if norm is None else norm for norm in norms]
        squares = torch.stack([norm.double() for norm in whole]).square()  # (shards,) fp64
        partly = [norm is not None and owned.used is not None
                  and len(owned.used) < len(owned.group.slots)
                  for norm, owned in zip(norms, self.owned, strict=True)]
        if any(partly):
            squares = torch.stack([-square if part else square
                                   for square, part in zip(squares, partly, strict=True)])
        return self.comm.numbers(self, squares.to(self.layers[0].device))

    def _used(self, partly: list[bool]) -> dict[Owned, list[bool]]:
        """
        #### Which parameters had a gradient on any rank, in shards of which no rank had them all

        * `partly` says of each shard whether that is so; it is the same on all ranks

        All-gather of 8 bytes for each parameter of these shards, in steps that have any; all ranks
        call it. Returns a flag for each parameter.
        """
        asked = [owned for owned, part in zip(self.owned, partly, strict=True) if part]
        if not asked:
            return {}
        mine = [float(slot.names in (owned.used or ())) for owned in asked
                for slot in owned.group.slots]
        rows = self.comm.numbers(self, torch.tensor(
            mine, dtype=torch.double, device=self.layers[0].device))
        flags = iter((rows.sum(dim=0) > 0).tolist())
        return {owned: [next(flags) for _ in owned.group.slots] for owned in asked}

    def _overflow(self, squares: torch.Tensor) -> None:
        """
        #### Skip the step, on all ranks, and scale less

        Backward comes to the last layer first, and what is infinite there spreads to the layers
        below: in a chain, the last one that has it is where it began.
        """
        worst = squares.abs().sum(dim=0).nan_to_num(math.inf)
        last = int((worst == worst.max()).nonzero().max())
        may_skip = self.scaled and (not self.dynamic or self.loss_scale / 2 >= self.scale_floor)
        scaled = f" at a loss scale of {self.loss_scale:g}, the lowest" if self.scaled else ""
        self.expect(may_skip, "cannot step", f"a finite gradient{scaled}",
                    f"a norm of inf or nan in {self.owned[last].name}",
                    "look at what that layer computes, lower the learning rate, or "
                    "`zero_grad()` and go on")
        self.skipped_steps += 1
        if self.dynamic:
            self.loss_scale, self.good_steps = self.loss_scale / 2, 0

    def _update(self, owned: Owned, used: list[bool] | None, factor: float,
                scratch: torch.Tensor) -> None:
        """
        #### Unscale, clip, step and round one shard

        * `used` says of each parameter whether a gradient came for it; left out, for all
        """
        before = len(owned.pieces)
        pieces = owned.pieces if used is None else owned.cut(used, self.state)
        if len(owned.pieces) != before:
            self.regroup()
        with owned.here(self.state) as (master, grad):
            if grad.dtype != master.dtype:
                # All shards share the memory for this, one after the other: fp32 gradients of all
                # of them would be 4 more bytes per parameter, and fresh memory for each would have
                # to be got from the system anew.
                grad = scratch[: master.nbytes].view(master.dtype).copy_(grad)
            if factor != 1:
                # In place: a gradient that was wide enough is spent after this.
                grad.mul_(factor)
            for _, where, piece in pieces:
                piece.grad = grad[where]
            every = [group["params"] for group in self.param_groups]
            try:
                # A step for each shard, so that its gradient can go before the next one's comes;
                # and with its pieces alone in sight, or each step would look at those of all
                # shards.
                for i, group in enumerate(self.param_groups):
                    group["params"] = [piece for index, _, piece in pieces if index == i]
                self.inner.step()
            finally:
                for group, params in zip(self.param_groups, every, strict=True):
                    group["params"] = params
            # While the pieces still hold the widened gradient, or the tape would not count it.
            tier = "device" if self.device == owned.layer.device else "cpu"
            owned.layer.listener.record(owned.layer, "step", grad.nbytes, tier=tier)
            for *_, piece in pieces:
                piece.grad = None
        owned.spent()

    def held_tensors(self) -> Iterator[torch.Tensor | None]:
        """
        ### What it holds beside states and parameters, for whoever measures memory
        """
        for owned in self.owned:
            yield owned.grad
        yield from self.offload.memory()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        ### Drop the gradients, also those that `no_sync` holds back

        Or, without `set_to_none`, those of the shards to zeros, which keeps their memory. In a file
        a step has dropped them already.
        """
        for layer in self.layers:
            layer.drop_full_grads()
        for owned in self.owned:
            owned.drop_grad(set_to_none)

    # -------------------------------------------------------------------------------- bookkeeping

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """
        ### This rank's masters, moments, param groups and loss scale

        For the same rank of a run with as many ranks. The masters are the model: a shard is one,
        rounded. Tensors in memory are those in use; of those in files there are copies, all in
        memory at once.
        """
        masters, states = [], {}
        for owned in self.owned:
            with owned.here(self.state, write=False) as (master, _):
                masters.append(master.clone() if owned.states is not None else master)
                for _, _, piece in owned.pieces:
                    states[piece] = {
                        key: value.clone() if owned.states is not None
                        and isinstance(value, torch.Tensor) else value
                        for key, value in self.state[piece].items()}
        own = {"masters": masters, "cuts": [owned.kinds() for owned in self.owned],
               "loss_scale": self.loss_scale,
               "good_steps": self.good_steps, "skipped_steps": self.skipped_steps}
        found = self.inner.state_dict()
        every = [piece for group in self.param_groups for piece in group["params"]]
        found["state"] = {i: states[every[i]] for i in found["state"]}
        return {**found, **own}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        ### Load masters, moments, param groups and loss scale

        * `state_dict` is what `state_dict()` gave

        Raises `RuntimeError`, before anything is changed, where the shards are of other sizes, and
        torch's `ValueError` where the param groups are others.
        """
        masters, own = state_dict["masters"], [len(owned.shard) for owned in self.owned]
        sizes = [len(master) for master in masters]
        self.expect(sizes == own, "cannot load this state", f"shards of {own} elements",
                    f"{sizes}", "load it into the same model on as many ranks, on the same rank")
        if len(state_dict["param_groups"]) == len(self.param_groups):
            for owned, kinds in zip(self.owned, state_dict["cuts"], strict=True):
                # Cut where the saved pieces were, between parameters used in different steps.
                owned.recut(kinds, self.state)
            self.regroup()
        self.inner.load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.param_groups, self.state = self.inner.param_groups, self.inner.state
        for owned, master in zip(self.owned, masters, strict=True):
            with owned.here(self.state) as (mine, _):
                mine.copy_(master)
        self.good_steps, self.skipped_steps = (
            state_dict[key] for key in ("good_steps", "skipped_steps"))
        if self.dynamic:
            # This run has chosen whether to scale; a dynamic scale goes on from where it was.
            self.loss_scale = state_dict["loss_scale"]

    def predict(self, micro_batches: int = 1, no_sync: bool = False) -> Prediction:
        """
        ### The bytes of this rank, from the formulas

        * `micro_batches` are in a step; `no_sync` says that all but the last ran in `no_sync()`

        Of a step that has its states, as all but the first have.

        Raises `RuntimeError` where the model is not a `Zero3Sequential`, has layers inside of
        layers or several `Offload`s for them, or where param groups keep different states.
        """
        two = torch.zeros(2, device=self.device)
        kept = {(len(keys), count_bytes) for keys, count_bytes in
                (moments_of(*self.made_by, group, two) for group in self.param_groups)}
        chain = [m for m in getattr(self.model, "module_list", ()) if m.flats]
        offloads = {m.offload if m.offload.tier == "nvme" else m.offload.tier for m in chain}
        good = chain == self.layers and len(kept) == len(offloads) == 1
        self.expect(good, "cannot predict", "a Zero3Sequential of plain layers, with one `Offload` "
                    "and as many states in each param group", f"a {type(self.model).__name__}, "
                    f"{len(offloads)} and {len(kept)} kinds", "measure with `Ledger`")
        ((moments, step_bytes),) = kept
        found = predict(
            describe(self.model, self.group_by), self.comm.world_size,
            rank=self.comm.rank, moments=moments, step_bytes=step_bytes,
            by_messages=self.comm.by_messages, stage3=True, micro_batches=micro_batches,
            no_sync=no_sync, bucket_bytes=self.buckets[0].bucket_bytes,
            reduce_bytes=self.reduce_dtype.itemsize if self.reduce_dtype else None,
            params_in=chain[0].offload, states_in=self.offload)
        # Cuts between parameters that were used in different steps.
        more = sum(len(owned.pieces) - owned.groups_here() for owned in self.owned) * step_bytes
        return replace(found, optimizer_bytes=found.optimizer_bytes + more,
                       peak_bytes=found.peak_bytes + more)

    def table(self, micro_batches: int = 1) -> str:
        """
        ### What this rank will hold, kind by kind, before it holds it

        For a step of so many `micro_batches`. Raises as `predict` does.
        """
        dtypes = [sorted({str(dtype).removeprefix("torch.") for dtype in of}) for of in (
            (o.shard.dtype for o in self.owned), (o.grad_dtype for o in self.owned),
            (o.wide for o in self.owned))]
        rows = self.predict(micro_batches).table([", ".join(names) for names in dtypes])
        return f"rank {self.comm.rank} will hold, in bytes\n{rows}"


def step_threads(at: torch.device, device: torch.device, threads: int, ranks: int) -> int:
    """
    ## How many threads a step computes with

    * `at` is where it is computed, and `device` where the layers are
    * `threads` are those that torch has now; `ranks` are on this machine

    torchrun gives each rank one thread, so that ranks that compute on the CPU do not wait for each
    other. While an accelerator computes the layers, the cores are idle but for the step: they are
    shared between the ranks. More threads than one are somebody's choice, and stay.
    """
    idle = at.type == "cpu" and device.type != "cpu" and threads == 1
    return max(1, len(os.sched_getaffinity(0)) // ranks) if idle else threads


def finite(value: Any) -> bool:
    """
    ## Whether an argument is a number, and neither infinite nor NaN
    """
    return isinstance(value, (int, float)) and math.isfinite(value)


def plain_paths(model: nn.Module) -> dict[nn.Module, str]:
    """
    ## What each module is called in the plain model
    """
    return {module: names[0] for module, names in plain_names(model).items()}


def plain_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """
    ## All that each module is called in the plain model, where it may be registered more than once

    There the wrappers, and the attributes in which they have what they wrap, are no part of a name.
    """
    found: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parts, owner = [], model
        for part in path.split(".") if path else ():
            if not hasattr(type(owner), "get_trainable_chunk"):
                parts.append(part)
            elif part not in ("module", "module_list"):
                break
            owner = owner._modules[part]  # type: ignore[assignment]
        else:
            found.setdefault(module, []).append(".".join(parts))
    return found

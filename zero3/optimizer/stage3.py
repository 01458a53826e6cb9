r"""
# The Stage 3 optimizer: mixed precision on shards

`Zero3Optimizer` lets a model compute in 16 bits and learn in 32. It keeps fp32 *master weights* and
moments of this rank's shards, scales the loss, clips the gradient, and steps.

Half precision takes half the memory and half the communication, but a sum of many small steps needs
more digits. So the optimizer steps an fp32 copy of every shard, the master, and rounds the result
into the shard that the layer gathers.

**Two weights on two ranks.** Each rank has one bf16 weight. The loss is scaled by $S = 4$, the
gradient of the unscaled loss is (3, 4), the norm is clipped to 1, and SGD has a learning rate of
0.005:

| | rank 0 | rank 1 | |
|---|---|---|---|
| master, fp32 | 1 | 1 | rounded, these are the shards |
| gradient of 4 times the loss | 12 | 16 | after the reduce-scatter |
| **its square** | **144** | **256** | the ranks exchange these |
| norm | 5 | 5 | $\sqrt{144 + 256} / 4$ |
| unscaled and clipped | .6 | .8 | times $\frac{1}{4}$ and $\frac{1}{5}$ |
| master after the step | .997 | .996 | no communication |
| shard, bf16 | .99609 | .99609 | the masters remember the difference |

The step is elementwise, so a rank steps its own shards without communication. Only the norm of the
gradient concerns the whole model, and it also shows an infinity or a NaN.

$$g = \frac{1}{S} \min\!\Big(1, \frac{c}{\lVert g_S \rVert / S}\Big)\, g_S
\qquad w_{32} \leftarrow w_{32} - \eta\, \text{Adam}(g)
\qquad w_{16} \leftarrow \text{round}(w_{32})$$

Here $g_S$ is the gradient of the loss times the scale $S$, and $c$ is the clipping norm.

Master, momentum and variance take $K = 12$ bytes per parameter
([ZeRO](https://arxiv.org/abs/1910.02054), section 3.1). The first step creates the moments. From
then on, a rank with half-precision parameters and gradients has $\frac{(2 + 2 + K)\Psi}{N} =
\frac{16\Psi}{N}$ bytes of model states after the backward pass, and $\frac{14\Psi}{N}$ after
`zero_grad()`. Padding comes on top, and 4 bytes for each piece of a shard (see `states.py`), in
which torch's Adam counts its steps.

**Why the masters are fp32.** bf16 has 8 significant bits. So the neighbours of 1 are
$1 + \frac{1}{128}$ and $1 - \frac{1}{256}$, and a step of 0.001 from 1 is rounded away. A thousand
such steps are all rounded away, while an fp32 master reaches 0, to four digits.

**Why the loss is scaled.** Below $2^{-14}$ fp16 has fewer and fewer digits, and below $2^{-24}$ it
has no number at all. The gradient of $S$ times the loss is $S$ times the gradient. So scaling moves
gradients up to the range with all digits, and the fp32 gradient is divided by $S$ afterwards. bf16
has the range of fp32 and needs no scale. The idea is section 3.2 of [Mixed Precision
Training](https://arxiv.org/abs/1710.03740).

**Run this**: `make train ARGS="--dtype fp16 --loss-scale dynamic --accumulate 4 --clip 1.0"`.

An optimizer that looks at more than one element at a time steps whole parameters (`whole.py`): a
shard has no rows and columns, and its norm is not the norm of a layer.

**Not covered, and what that costs**: an optimizer that looks at several parameters, as L-BFGS does,
is refused. If a class counts its steps in an attribute, the count is too high, because it is called
once for each large shard, and once for each batch of small ones.

If only one rank lacks the gradients of some parameters of a layer, they count as zeros, and that
rank hands the layer in at the end of backward. This is an error if the ranks then reduce in
different orders: the others have sent the layer alone, or in a bucket that was full before the end.
It is an error too if a rank has no gradient for a layer. If the squares of a shard's gradient
exceed the range of fp32, the norm counts as an overflow. If the model is one of several inside a
module, the module's `zero_grad()` does not see the full gradients that `no_sync` holds back.

A parameter that skips steps in which its neighbours are used becomes a piece of its own. That costs
a little memory and time. If every rank lacks the gradient of some parameter of a layer, the ranks
tell each other which ones: 8 bytes for each parameter of the layer, to each other rank, more than
`predict` says.
"""

import inspect
import math
import os
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zero3.comm.collectives import ALONE
from zero3.comm.parts import connect, inside, length
from zero3.flat import FlatParameter
from zero3.guards.contents import check_drawn, check_groups, stray
from zero3.guards.shard_gradients import GradientElsewhere, elsewhere
from zero3.layer import Zero3Layer
from zero3.offload.tiers import Offload
from zero3.optimizer.buckets import Bucket, PlannedBucket
from zero3.optimizer.states import Member, Piece, ShardStates, is_whole, moments_of, whole_of
from zero3.optimizer.whole import (
    KNOWN_LOOKS,
    STEPS_EACH,
    Owners,
    Stepper,
    class_name,
    in_one_step,
    looks_at,
)
from zero3.sharded import ShardedModel, Trained, comm_of

# The state of a loss scale.
SCALE_STATE = ("loss_scale", "good_steps", "skipped_steps")


class Zero3Optimizer(Stepper):
    """
    ## Zero3 optimizer

    A step visits all shards once for the norm of the gradient, and once more for the rest, one
    shard after the other, or a batch of small ones:

    | | reads | writes |
    |---|---|---|
    | norm | gradient | one number |
    | | | *the ranks exchange their numbers* |
    | unscale and clip | gradient | gradient in fp32 |
    | step | gradient in fp32, master, moments | master, moments |
    | round | master | shard |
    """

    def __init__(self, model: nn.Module,
                 optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, *,
                 group_by: Callable[[str, nn.Parameter], dict[str, Any]] | None = None,
                 loss_scale: float | str | None = None, clip_grad_norm: float | None = None,
                 reduce_dtype: torch.dtype | None = None, bucket_bytes: int = 1 << 18,
                 offload: Offload | str | None = None,
                 scale_window: int = 1000, scale_floor: float = 1.0, **kwargs):
        """
        ### Take over the shards of a model

        All ranks call this alike, after wrapping.

        * `model` is a `Zero3Sequential`, or any module whose trainable parameters are all in
          `Zero3Layer`s
        * `optimizer_class` is an optimizer of `torch.optim`, or one like them that keeps everything
          about a parameter in that parameter's state. `kwargs` are its arguments. `fused=True` is
          added if the optimizer knows it and all parameters are real; not to SGD, and not beside
          `foreach` or `differentiable`
        * `group_by` gets the name and the parameter, which has a shape but no values, and returns
          the options that differ for it: `lambda name, p: {"weight_decay": 0.1 * (p.ndim > 1)}`
          decays matrices only. A tied weight comes once, by its name in the layer that shards it.
          With `"optimizer"`, a class, the parameter is stepped whole by that class, and the other
          options are all of its options (see `whole.py`)
        * `loss_scale` is a number, or "dynamic". A dynamic scale starts at 65536, halves when a
          gradient overflows, and doubles after `scale_window` steps without overflow. It never goes
          below `scale_floor`
        * `clip_grad_norm` limits the norm of the mean gradient of the whole model
        * `reduce_dtype` is the data type of the gradients during the reduce and in the shard. It
          defaults to the layer's
        * `bucket_bytes`: layers wait until their full gradients have as many bytes, and are reduced
          together. A layer with as many bytes is reduced alone. Small shards are also stepped
          together, up to as many bytes
        * `offload` says where masters, moments and the shards' gradients rest, as an `Offload` or
          as "cpu"; left out, on the device. In the two other tiers the CPU computes the step

        Raises `RuntimeError` if parameters are not sharded, if the class cannot step them, if an
        argument is out of range, or if there is not enough memory; `ValueError` if `offload` names
        no known place; and what the class raises about `kwargs`. ZeRO, section 3.1. Keeps the
        invariants I1, I2 and I5 to I8.
        """
        self.comm = comm_of(model)
        self.model = model
        self.group_by = (lambda name, param: {}) if group_by is None else group_by
        self.clip_grad_norm = clip_grad_norm
        self.reduce_dtype = reduce_dtype
        self.bucket_bytes = bucket_bytes

        self.dynamic = loss_scale == "dynamic"
        self.scaled = loss_scale is not None
        self.scale_window = scale_window
        self.scale_floor = scale_floor
        self.loss_scale: Any = loss_scale if self.scaled else 1.0
        if self.dynamic:
            self.loss_scale = max(65536.0, scale_floor)
        # Whether `backward` was called since the last step or `zero_grad()`.
        self.has_scaled = False
        self.good_steps = 0
        self.skipped_steps = 0
        self._check_arguments(optimizer_class)

        connect(model)
        paths = {module: path for path, module in model.named_modules()
                 if isinstance(module, Zero3Layer)}
        self.layers = [layer for layer in paths if layer.flats]
        if self.layers:
            self.comm = self.layers[0].comm
        self.offload = Offload.of(offload)
        self.device = (self.layers[0].device if self.offload.tier == "device" and self.layers
                       else torch.device("cpu"))
        # The options of a param group; empty if the class takes any.
        known = inspect.signature(optimizer_class).parameters
        takes_any = any(each.kind is each.VAR_KEYWORD for each in known.values())
        self.takes = set() if takes_any else {*known} - {"params"}
        self._check_model(optimizer_class, kwargs)

        options = self._make_shard_states(paths)
        # A stage of a pipeline may have nothing to train, but not all of them.
        self.expect(any(self.comm.stages.gather(bool(self.shard_states))), "has nothing to do",
                    "a trainable Zero3Layer", "none",
                    "wrap the model first, and leave some parameter trainable")

        # The layers of a chain share a reducer, and get a bucket in its place. A compiled model
        # keeps its own, because its graphs say when to send.
        buckets = {reducer: reducer if isinstance(reducer, PlannedBucket)
                   else Bucket(reducer.comm, bucket_bytes)
                   for reducer in dict.fromkeys(layer.reducer for layer in self.layers)}
        # Layers without parameters too: the root of a whole model may be one, and its reducer has
        # to know when a backward pass begins.
        for layer in paths:
            layer.reducer = buckets.get(layer.reducer, layer.reducer)
        self.buckets = list(buckets.values())
        for bucket in self.buckets:
            bucket.scaled = self.scaled
            bucket.optimizer = weakref.ref(self)

        self._choose_fused(optimizer_class, kwargs)
        self._place_states(optimizer_class, kwargs, options)
        self._make_inner(optimizer_class, kwargs, options)

    # --------------------------------------------------------------------------------------- build

    def _check_arguments(self, optimizer_class: object) -> None:
        """
        #### Refuse what is no model, no class and no function, and numbers that are out of range
        """
        positive = {"loss_scale": self.loss_scale, "scale_floor": self.scale_floor,
                    "scale_window": self.scale_window,
                    "clip_grad_norm": 1 if self.clip_grad_norm is None else self.clip_grad_norm}
        dtype = torch.float32 if self.reduce_dtype is None else self.reduce_dtype
        cure = "pass another, or leave it out"
        for good, what, expected, got, advice in (
            (isinstance(self.model, nn.Module), "cannot step this", "a sharded model",
             f"one {type(self.model).__name__}", "pass the model itself, not its parameters"),
            (callable(optimizer_class), "cannot use `optimizer_class`",
             "a class, for instance torch.optim.AdamW", f"one {type(optimizer_class).__name__}",
             "pass the class itself, and its options by name: `lr=1e-3`"),
            (callable(self.group_by), "cannot use `group_by`",
             "a function of a name and a parameter", f"one {type(self.group_by).__name__}",
             "pass one that returns the options of this parameter"),
            *((finite(value) and value > 0, f"cannot use `{name}`", "a positive number",
               value, cure) for name, value in positive.items()),
            (isinstance(dtype, torch.dtype) and dtype.is_floating_point,
             "cannot use `reduce_dtype`", "a floating data type",
             dtype, "pass torch.float32, or leave it out"),
            (finite(self.bucket_bytes) and self.bucket_bytes >= 0, "cannot use `bucket_bytes`",
             "a number of bytes, 0 or more", self.bucket_bytes, cure),
        ):
            self.expect(good, what, expected, got, advice)

    def _check_model(self, optimizer_class: Callable[..., torch.optim.Optimizer],
                     kwargs: dict[str, Any]) -> None:
        """
        #### Refuse an optimizer or a model that would train differently on shards

        L-BFGS, for instance, takes products of the whole gradient. A trainable parameter outside of
        the layers would never be stepped, because the optimizer takes only shards.
        """
        looks = looks_at(optimizer_class, kwargs, self.device)
        self.expect(looks in KNOWN_LOOKS, "cannot use this class", STEPS_EACH,
                    f"{class_name(optimizer_class)}: {looks}", "take AdamW, for instance")
        # Options of every parameter, but for those that `group_by` returns: those that step it
        # whole, if the class looks at more than one element.
        self.options = {} if looks == "element" else {"optimizer": optimizer_class, **kwargs}
        check_groups(self.layers)
        check_drawn(self, self.layers)
        names = stray(self.model)
        self.expect(not names, "would miss parameters", "all in Zero3Layers, which take the mean "
                    "of their gradients", names, "wrap the modules that they are in")

    @torch.no_grad()
    def _make_shard_states(self, paths: dict[Zero3Layer, str]) -> list[dict[str, Any]]:
        """
        #### Take over every trainable shard that has elements

        Returns the options of each param group, the same on all ranks.
        """
        plain = plain_paths(self.model)
        flats = {flat: layer for layer in self.layers for flat in layer.flats
                 if flat.shard.requires_grad and len(flat.shard)}
        params = {flat: self._members(flat, plain[layer])
                  for flat, layer in flats.items()}
        # All stages of a pipeline get the same param groups, so a scheduler sets the same learning
        # rates on all of them.
        mine = [param.options for of_flat in params.values() for param in of_flat]
        every = [*chain(*self.comm.stages.gather(mine))]
        # Each once. Groups that are stepped whole come last.
        options = sorted((each for i, each in enumerate(every) if every.index(each) == i),
                         key=is_whole)
        self.shard_states = []
        for flat, layer in flats.items():
            # A name for errors: in a chain the label has the number of the layer already.
            name = (f"{paths[layer]} ({layer.label})"
                    if paths[layer] and layer.layer_idx == ALONE else layer.label)
            self._set_grad_dtype(layer, flat)
            for param in params[flat]:
                param.group_index = options.index(param.options)
            self.shard_states.append(ShardStates(layer,
                                                 name,
                                                 flat,
                                                 params[flat],
                                                 self.offload,
                                                 self.device))
        return options

    def _set_grad_dtype(self, layer: Zero3Layer, flat: FlatParameter) -> None:
        """
        #### Reduce the gradients of a flat parameter in `reduce_dtype`
        """
        shard = flat.shard
        dtype = self.reduce_dtype or shard.dtype
        layer.expect(dtype.is_complex or not shard.dtype.is_complex, "cannot use `reduce_dtype`",
                     "complex numbers, as its parameters are", dtype, "leave it out, because a "
                     "real data type would drop the imaginary part")
        if isinstance(shard.grad, GradientElsewhere):
            # It rests with an earlier optimizer.
            shard.grad = None
        layer.expect(shard.grad is None or shard.grad.dtype == dtype, "has gradients", f"{dtype}",
                     shard.grad_dtype, "call `zero_grad()` of the optimizer before this one first")
        # This allows `.grad` to have another data type than the shard.
        shard.grad_dtype = dtype

    def _members(self, flat: FlatParameter, path: str) -> list[Member]:
        """
        #### The parameters in a flat one, with the options that `group_by` returns for them
        """
        first = self.comm.rank * len(flat.shard)
        shard = slice(first, first + len(flat.shard))
        ends = [slot.offset for slot in flat.slots[1:]] + [len(flat.full)]
        found = []
        for slot, end in zip(flat.slots, ends, strict=True):
            name = f"{path}.{slot.names[0]}".strip(".")
            returned = self.group_by(name, slot.param)
            self.expect(isinstance(returned, Mapping), "cannot use `group_by`", "a dict of options",
                        f"{returned!r}, for `{name}`", "return `{}` where no option differs")
            # A class of its own takes nothing of the optimizer's arguments.
            special = {**({} if is_whole(returned) else self.options), **returned}
            known = not self.takes or is_whole(special) or special.keys() <= self.takes
            self.expect(known, "cannot use `group_by`",
                        f"options of its class, {sorted(self.takes)}", f"{special}, for `{name}`",
                        "correct the name of the option")
            # Its range of the shard may be empty.
            found.append(Member(name, slot, special, inside(shard, slice(slot.offset, end))))
        return found

    def _choose_fused(self, optimizer_class: Callable[..., torch.optim.Optimizer],
                      kwargs: dict[str, Any]) -> None:
        """
        #### Take torch's fused implementation, unless the caller has chosen one
        """
        # The caller's options may be in a `partial` of the class.
        made = partial(optimizer_class, **kwargs)
        has_chosen = not made.keywords.keys().isdisjoint({"fused", "foreach", "differentiable"})
        # torch's fused SGD refuses a parameter that has no momentum yet beside others that have. A
        # scheduler or a param group may bring momentum later.
        is_sgd = isinstance(made.func, type) and issubclass(made.func, torch.optim.SGD)
        is_real = not any(states.shard.dtype.is_complex for states in self.shard_states)
        if ("fused" in inspect.signature(optimizer_class).parameters
                and is_real and not has_chosen and not is_sgd):
            kwargs["fused"] = True

    def _place_states(self, optimizer_class: Callable[..., torch.optim.Optimizer],
                      kwargs: dict[str, Any], options: list[dict[str, Any]]) -> None:
        """
        #### Put masters, moments and gradients where they rest
        """
        self.moments = list(dict.fromkeys(chain(*(
            moments_of(optimizer_class, kwargs, group, torch.zeros(2, device=self.device))[0]
            for group in options if not is_whole(group)))))
        # Files of states and checkpoints have other tensors under these names.
        self.expect({"grad", "master", "param"}.isdisjoint(self.moments), "cannot use this class",
                    "moments not named `grad`, `master` or `param`", self.moments, "rename them")
        # Check now whether there is room for everything. The first step creates the moments, and
        # would fail in the middle.
        for device in dict.fromkeys((self.device, self.layers[0].device)):
            self.offload.check(self,
                               "masters, moments and gradients",
                               sum(portion.nbytes(self.moments)
                                   for states in self.shard_states for portion in states.portions
                                   if portion.device == device
                                   and portion.offload.tier != "nvme"),
                               device)
        # The options are those of all stages, so all of them raise this error.
        self.expect(self.offload.fraction in (0, 1) or not any(map(is_whole, options)),
                    "cannot divide its states", "parameters that are stepped element by element",
                    "some that are stepped whole", "leave `fraction` out")
        for states in self.shard_states:
            states.place(self.moments)

        # Gradients arrive from the last shard to the first, and the step begins with the first. So
        # when the gradient of shard `count` has arrived, prefetch the states of the shards before
        # it. They take all buffers but one, which gradients need on their way to files.
        in_files = [states.portions[0] for states in self.shard_states if states.in_file]
        count = self.offload.buffers - 1
        if len(in_files) > count:
            in_files[count].prefetch = [
                partial(each.in_file.read_async, *each.stepped)
                for each in in_files[:count] if each.in_file and each.stepped]
        self._scratch_bytes = max((
            len(states.shard) * states.master_dtype.itemsize for states in self.shard_states
            if states.shard.grad_dtype != states.master_dtype), default=0)

    def _make_inner(self, optimizer_class: Callable[..., torch.optim.Optimizer],
                    kwargs: dict[str, Any], options: list[dict[str, Any]]) -> None:
        """
        #### Build the wrapped torch optimizer, whose parameters are the pieces of the masters

        The formula of the step is torch's own. Parameters that are stepped whole have optimizers of
        their own, for the last groups.
        """
        groups = [{**each, "params": [piece.param
                                      for piece in self.pieces if piece.group_index == i]}
                  for i, each in enumerate(options) if not is_whole(each)]
        self.inner = optimizer_class(groups or [{"params": []}], **kwargs)
        del self.inner.param_groups[len(groups):]
        self.made_by = (optimizer_class, kwargs)
        self._layout = zlib.crc32(str([
            (states.name, [(param.slot.names, param.group_index) for param in states.params])
            for states in self.shard_states]).encode())
        super().__init__(self.inner.param_groups or [{"params": []}], self.inner.defaults)
        self.owners = Owners(self, {i: each
                                    for i, each in enumerate(options) if is_whole(each)})
        self._share_groups()
        self.regroup(self.pieces)
        for states in self.shard_states:
            first = states.portions[0]
            if first.in_file is not None:
                # torch's constructor needed their sizes. States that it has made go to the file.
                first.put_master(first.master.new_empty(0))
                if any(piece.param in self.state for piece in first.pieces):
                    with states.in_memory(self.state):
                        pass

    @property
    def pieces(self) -> list[Piece]:
        """
        ### The pieces of all shards
        """
        return [piece for states in self.shard_states for piece in states.pieces]

    def _share_groups(self) -> None:
        """
        #### Share param groups with the optimizers inside, and states with the wrapped one

        So a scheduler that sets a learning rate here sets it there. Owners keep their states.
        """
        self.param_groups = [*self.inner.param_groups, *self.owners.param_groups]
        self.state = self.inner.state

    def regroup(self, pieces: list[Piece]) -> None:
        """
        ### Let the param groups have these pieces only
        """
        for i, group in enumerate(self.param_groups):
            group["params"] = [piece.param for piece in pieces if piece.group_index == i]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """
        ### Not possible: param groups are made with the optimizer

        Raises `RuntimeError`.
        """
        # torch adds groups, too, while this one is built. The owners come after that.
        self.expect("owners" not in vars(self), "cannot take another param group", "those that it "
                    "was built with", [*param_group], "wrap the module first, and build the "
                    "optimizer on the whole model; `group_by=` makes param groups, and parameters "
                    "outside of the model take an optimizer of their own")
        super().add_param_group(param_group)

    @property
    def _step_supports_amp_scaling(self) -> None:
        """
        #### torch's `GradScaler` asks for this. It cannot scale for this optimizer

        The scaler would find no gradients.
        """
        self.expect(False, "cannot step", "its own loss scale", "torch's GradScaler",
                    "pass `loss_scale=\"dynamic\"`, and call `optimizer.backward(loss)` and "
                    "`optimizer.step()` in place of the scaler's methods")

    # ------------------------------------------------------------------------------------ backward

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """
        ### Backward pass of the scaled loss

        * `loss` is a scalar, the mean over this rank's rows, computed in fp32
        * `kwargs` are those of `Tensor.backward`, such as `retain_graph`

        All ranks call it. If $k$ micro-batches form one batch, pass `loss / k` for each. Gradients
        add up until `zero_grad()`. Keeps I7 (micro-batches). Raises `RuntimeError` if the loss is
        no scalar, has no graph, or is in a data type without a number for the scale.
        """
        self.expect(self.loss_scale <= torch.finfo(loss.dtype).max, "cannot scale the loss",
                    f"one in fp32, at a scale of {self.loss_scale:g}", loss.dtype,
                    "call `.float()` on the tensor that it is computed from")
        if self.scaled:
            loss = loss * self.loss_scale
        loss.backward(**kwargs)
        self.has_scaled = True

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        r"""
        ### Accumulate full gradients without communication

        Use it for all micro-batches but the last one, on all ranks alike. Each layer then keeps its
        full gradient, $N \lceil P_\ell/N \rceil$ elements, and each rank saves
        $(k-1)\Psi\frac{N-1}{N}$ elements of communication. Keeps I7 (micro-batches), suspends I2
        (memory at rest). After an exception call `zero_grad()`.
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

        * `closure` is as for torch's optimizers, and calls `backward` of this one

        All ranks call it, and call `zero_grad()` before the next backward pass. Returns the norm of
        the mean gradient of the whole model, before clipping and without the scale; `None` if a
        gradient overflowed, and then no rank has stepped. With a closure it returns the loss, and
        `skipped_steps` counts the overflows. Keeps I1 and I5.

        A parameter that got a gradient on no rank keeps its value, its moments and its number of
        steps, as in plain PyTorch.

        Raises `RuntimeError` with the layer's name if a gradient is infinite or NaN and there is no
        loss scale, or a dynamic scale is at its floor. Also raises for what `_check_ready` refuses,
        a step inside `no_sync()` for instance. After these errors weights and states are as before:
        call `zero_grad()` and go on. If the step of an owner fails (`whole.py`), start again.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            self._check_ready()
        except RuntimeError:
            # The other stages of a pipeline are about to ask this one for its norm.
            self._norms_of_stages(torch.full((1,), -1.0, dtype=torch.double, device="cpu"))
            raise
        for layer in reversed(self.layers):
            # Reduce what `no_sync` has held back, unless a later micro-batch has done so. All ranks
            # do so in the order of the backward pass.
            layer.reduce()
        for bucket in self.buckets:
            bucket.end()
        self.has_scaled = False
        threads = torch.get_num_threads()
        # torchrun gives each rank one thread. If an accelerator computes the layers, the ranks of
        # this machine share all cores for the step.
        if threads == 1 and self.device.type == "cpu" and self.layers[0].device.type != "cpu":
            ranks = int(os.environ.get("LOCAL_WORLD_SIZE", self.comm.world_size))
            torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        try:
            norm = self._step()
        finally:
            torch.set_num_threads(threads)
        return norm if closure is None else loss

    def _check_ready(self) -> None:
        """
        #### Refuse a step that cannot be right

        That is one inside `no_sync()`, of gradients without the loss scale, or of parameters that
        were frozen before. The step calls it before it sends or changes anything. A parameter that
        was frozen when the optimizer was built has no master, so it would be reduced and never
        stepped.
        """
        self.expect(not any(bucket.holds for bucket in self.buckets), "cannot step",
                    "gradients that are reduced", "some that are held back",
                    "leave `no_sync()` first")
        has_scale = self.loss_scale != 1 and any(
            states.shard.grad is not None for states in self.shard_states)
        self.expect(self.has_scaled or not has_scale, "cannot step", "gradients "
                    f"of a loss times {self.loss_scale:g}", "gradients of `loss.backward()`, which "
                    "has no scale", "call `optimizer.backward(loss)`; then `zero_grad()` and go on")
        known = {states.shard for states in self.shard_states}
        for layer in self.layers:
            layer.expect(known.issuperset(layer.get_trainable_chunk()), "cannot be stepped",
                         "parameters that trained when the optimizer was built", "some that were "
                         "frozen then", "build the optimizer while everything that will train is "
                         "trainable; freeze afterwards")

    def _step(self) -> float | None:
        """
        #### Step all shards, if the gradient is finite

        All ranks decide from the same norm, because shards from different steps are no model.
        """
        # This is the norm that plain training on the global batch has, because the gradients are
        # means over ranks already. The mean of the ranks' own norms would be another: with the
        # gradients 1 and -1 on two ranks it is 1, while the mean gradient is 0.
        squares = self._squares().cpu()  # (all ranks, shards) fp64
        # Replicas have the same gradients, so count those of the first one.
        stages = self._norms_of_stages(squares[: self.comm.world_size].abs().sum().view(1))
        # In a pipeline, a stage that cannot step has sent a negative number.
        unready = [rank for rank, square in zip(self.comm.stages.ranks, stages, strict=True)
                   if square < 0]
        self.expect(not unready, "cannot step", "stages that are ready to step",
                    f"errors on ranks {unready}", "look at these; nothing has changed")
        norm = stages.sum().sqrt().item() / self.loss_scale
        if not math.isfinite(norm):
            self._overflow(squares, stages)
            return None

        # Unscale and clip in one multiplication. The 1e-6 is that of `clip_grad_norm_`.
        clip = self.clip_grad_norm / (norm + 1e-6) if self.clip_grad_norm else 1.0
        factor = min(clip, 1.0) / self.loss_scale
        # Memory for the largest master, in which gradients of another data type are widened in
        # turn.
        scratch = {device: torch.empty(self._scratch_bytes, dtype=torch.uint8, device=device)
                   for device in {portion.device for states in self.shard_states
                                  for portion in states.portions}}
        # `_squares` says what a negative sign means.
        unused = self._unused(squares.signbit().all(dim=0).tolist())
        # The owners step the pieces of the last param groups.
        count = len(self.inner.param_groups)
        pieces = {states: [piece for piece in states.split_by_use(unused, self.state)
                           if piece.group_index < count]
                  for states in self.shard_states
                  if states.shard.grad is not None and not unused.issuperset(states.params)}
        batches = self._batches(pieces)
        call = in_one_step(self.inner)
        try:
            if self.owners.wholes:
                self.owners.step(unused, factor)
            for i, batch in enumerate(batches):
                # If states rest in files, one buffer is being written, one has the states of this
                # shard, and the others receive those of the next shards.
                for states in chain(*batches[i : i + self.offload.buffers - 1]):
                    if states.in_file is not None:
                        states.in_file.read_async()
                self._update({states: pieces[states] for states in batch},
                             factor, scratch, call)
        finally:
            self.regroup(self.pieces)

        self.good_steps += 1
        if self.dynamic and self.good_steps % self.scale_window == 0:
            self.loss_scale *= 2
        return norm

    def _norms_of_stages(self, mine: torch.Tensor) -> torch.Tensor:
        """
        #### The squared norm of each stage of a pipeline, `(stages, 1)` fp64

        * `mine` is this stage's, `(1,)`; a negative number says that it cannot step

        All ranks call it.
        """
        return self.comm.over_stages(self, mine.to(self.layers[0].device),
                                     self._rule() if self.comm.stages.size > 1 else "").cpu()

    def _rule(self) -> str:
        """
        #### The numbers of the step's formula, in words

        They have to be the same on all ranks. Six digits, because two machines need not compute a
        learning rate to the same last bit.
        """
        groups = [", ".join(f"{name} {_digits(value)}" for name, value in group.items()
                            if isinstance(value, (int, float, tuple, torch.Tensor))
                            and value is not False)
                  for group in self.param_groups]
        return (f"{'; '.join(groups)}; loss scale {self.loss_scale:g}, clipping at "
                f"{self.clip_grad_norm}, {type(self.inner).__name__}")

    def _squares(self) -> torch.Tensor:
        """
        #### The squared norm of each shard's gradient, on each rank

        Padding is zero, so their absolute values sum up to the squared norm of the whole model.
        All-gather: all ranks call it, with 8 bytes for each shard. Returns `(all ranks, shards)`
        fp64, the same bits on all ranks.
        """
        if not self.shard_states:
            # All layers of this stage are frozen.
            return torch.zeros(self.comm.divisor, 0, dtype=torch.double, device="cpu")
        device = self.layers[0].device
        squares = torch.stack([states.grad_norm().to(device, torch.double)
                               for states in self.shard_states]).square()  # (shards,) fp64
        for i, states in enumerate(self.shard_states):
            # The names of the parameters that got a gradient on this rank; `None` means all.
            used = getattr(states.shard.grad, "used", None)
            if used is not None and len(used) < len(states.flat.slots):
                # A square is never negative, so a minus can say that this rank had no gradient for
                # some of the shard's parameters.
                squares[i].neg_()
        options = f"{self._rule()}, for parameters with the checksum {self._layout}"
        return self.comm.numbers(self, squares, options)

    def _unused(self, partial_everywhere: list[bool]) -> set[Member]:
        """
        #### Which parameters had a gradient on no rank, though their shard has one

        * `partial_everywhere` says for each shard whether every rank lacked the gradient of some
          parameter

        All-gather of 8 bytes for each parameter of such shards. All ranks call it.
        """
        asked = [states for states, is_partial
                 in zip(self.shard_states, partial_everywhere, strict=True) if is_partial]
        if not asked:
            return set()
        # The flat gradient has zeros for a parameter that the loss did not depend on, but plain
        # PyTorch does not step such a parameter.
        mine = {param: float(param.slot.names in getattr(states.shard.grad, "used", ()))
                for states in asked for param in states.params}
        counts = self.comm.numbers(self, torch.tensor(
            [*mine.values()], dtype=torch.double, device=self.layers[0].device)).sum(dim=0)
        return {param for param, count in zip(mine, counts.tolist(), strict=True) if not count}

    def _overflow(self, squares: torch.Tensor, stages: torch.Tensor) -> None:
        """
        #### Skip the step on all ranks, and lower the scale

        * `squares` are of each rank and shard of this stage, and `stages` of each stage of a
          pipeline
        """
        # Backward carries an infinity from the last layer to those below, so it began in the last
        # layer that has one.
        stage = int((~stages.isfinite())[:, 0].nonzero().max())
        name = f"the layers of rank {self.comm.stages.ranks[stage]}"
        if stage == self.comm.stages.rank:
            worst = squares.abs().sum(dim=0).nan_to_num(math.inf, math.inf)
            name = self.shard_states[int((worst == worst.max()).nonzero().max())].name
        # A fixed scale skips the step too.
        may_skip = self.scaled and (not self.dynamic or self.loss_scale / 2 >= self.scale_floor)
        scaled = f" at a loss scale of {self.loss_scale:g}, the lowest" if self.scaled else ""
        self.expect(may_skip, "cannot step", f"a finite gradient{scaled}",
                    f"a norm of inf or nan in {name}",
                    "look at the operations of that layer, lower the learning rate, or "
                    "`zero_grad()` and go on")
        self.skipped_steps += 1
        if self.dynamic:
            self.loss_scale = self.loss_scale / 2
            self.good_steps = 0

    def _batches(self, stepped: Iterable[ShardStates]) -> list[list[ShardStates]]:
        """
        #### The shards that each call of the wrapped optimizer steps

        A call takes a fixed time, so small shards share one, up to `bucket_bytes` of them. A shard
        is stepped alone if its states are in one of the few buffers, or its gradient in the one
        scratch memory.
        """
        batches: list[list[ShardStates]] = []
        left_bytes = 0
        for states in stepped:
            alone = (states.in_file is not None
                     or states.shard.grad_dtype != states.master_dtype)
            nbytes = len(states.shard) * states.master_dtype.itemsize
            if alone or nbytes > left_bytes:
                batches.append([])
                left_bytes = 0 if alone else self.bucket_bytes
            batches[-1].append(states)
            left_bytes -= nbytes
        return batches

    def _update(self, batch: dict[ShardStates, list[Piece]], factor: float,
                scratch: dict[torch.device, torch.Tensor], call: Callable[[], None]) -> None:
        """
        #### Unscale, clip, step and round some shards

        * `batch` has the pieces of each shard that have a gradient, and `call` steps them
        """
        pieces = [piece for stepped in batch.values() for piece in stepped]
        with ExitStack() as in_memory:
            for states, stepped in batch.items():
                # When the `with` ends, the masters are rounded into the shards, and files are
                # written.
                for where, master, grad in in_memory.enter_context(states.in_memory(self.state)):
                    if grad.dtype != master.dtype:
                        # Keeping all fp32 gradients would take 4 more bytes per parameter.
                        wide = scratch[master.device][: where.stop * master.itemsize]
                        grad = wide.view(master.dtype)[where].copy_(grad)
                    if factor != 1:
                        # In place, so a gradient that was wide enough is used up after this.
                        grad.mul_(factor)
                    for piece in stepped:
                        if where.start <= piece.where.start < where.stop:
                            piece.param.grad = grad.narrow(
                                0, piece.where.start - where.start, len(piece.param))
            # The device first: it steps its portions while the CPU steps the others.
            for device in sorted(
                    {piece.param.device for piece in pieces},
                    key=lambda device: device.type == "cpu"):
                # Otherwise the wrapped optimizer would look at all pieces for every batch.
                self.regroup([piece for piece in pieces if piece.param.device == device])
                call()
            for states, stepped in batch.items():
                # Record it while the pieces hold the widened gradient, so that it is counted.
                for portion in states.portions:
                    tier = "device" if portion.device == states.layer.device else "cpu"
                    states.layer.listener.record(states.layer, "step", portion.master.nbytes,
                                                 tier=tier)
                for piece in stepped:
                    piece.param.grad = elsewhere(states.flat, piece.param)
                if states.in_file is not None:
                    # The step has scaled it in the buffer only.
                    states.drop_grad()

    def held_tensors(self) -> Iterator[torch.Tensor | None]:
        """
        ### Memory that it holds besides optimizer states, for a `Ledger`
        """
        # In a step the param groups have a few of them.
        for piece in self.pieces:
            yield from (piece.param, piece.param.grad)
        for states in self.shard_states:
            yield from (portion.grad for portion in states.current())
        yield from self.owners.held_tensors()
        yield from self.offload.memory()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """
        ### Drop the gradients, also those that `no_sync` holds back

        Without `set_to_none` the gradients of the shards become zeros and keep their memory. A
        gradient in a file has been dropped by the step already, so a parameter that gets none in
        the next step is not moved by its momentum.
        """
        for layer in self.layers:
            layer.drop_full_grads()
        for states in self.shard_states:
            states.drop_grad(set_to_none)
        self.has_scaled = False

    # -------------------------------------------------------------------------------- bookkeeping

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """
        ### This rank's masters, moments, param groups and loss scale

        It fits the same rank of a run with as many ranks. States in files are copied into memory,
        all at once. Tensors in memory are not copied, so the next step changes them.
        """
        masters = []
        known: dict[torch.Tensor, dict[str, Any]] = {}
        for states in self.shard_states:
            # The next shard gets the buffer of one that rests in a file.
            keep = torch.clone if states.in_file is not None else torch.detach
            with states.in_memory(self.state, write=False) as here:
                masters.append(keep(whole_of([each.master for each in here])))
                for piece in states.pieces:
                    known[piece.param] = pytree.tree_map_only(
                        torch.Tensor, keep, self.state.get(piece.param, {}))
        found = self.inner.state_dict()
        params = [param for group in self.param_groups for param in group["params"]]
        # The states in the order of the params, whichever of them was stepped first.
        return {**found,
                "state": {i: known[params[i]]
                          for i in sorted(found["state"])},
                "param_groups": [*found["param_groups"],
                                 *({**group, "params": []} for group in self.owners.param_groups)],
                "masters": masters, "wholes": self.owners.state_dict(),
                "place": self._place, "parts": self._parts,
                "cuts": [[param.key for param in states.params]
                         for states in self.shard_states],
                **self.scale_state()}

    def scale_state(self) -> dict[str, object]:
        """
        ### The numbers of good and of skipped steps, and the loss scale, if there is one
        """
        return {name: getattr(self, name) for name in SCALE_STATE
                if self.scaled or name != "loss_scale"}

    @property
    def _place(self) -> str:
        """
        #### Which part of the model this rank steps, in words
        """
        return (f"part {self.comm.rank} of {self.comm.world_size}"
                + f", stage {self.comm.stages.rank}" * (self.comm.stages.size > 1))

    @property
    def _parts(self) -> list[list[int]]:
        """
        #### The lengths of the parts of each shard's states
        """
        return [[length(portion.where) for portion in states.portions]
                for states in self.shard_states]

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        ### Load masters, moments, param groups and loss scale

        Raises `RuntimeError` if it is of another rank, if the shards have other sizes or other
        numbers of parameters, if another `fraction` has cut them, or if there are more or fewer
        param groups; then nothing has changed. Raises torch's `ValueError` if the param groups have
        other parameters; then load another state, because moments may be gone.
        """
        self.expect("masters" in state_dict, "cannot load this state", "one that `state_dict` of a "
                    "Zero3Optimizer has returned", f"one of {sorted(map(str, state_dict))}",
                    "take it from a Zero3Optimizer; a plain run goes on by `from_dcp` and "
                    "`zero3.load`")
        masters = state_dict["masters"]
        groups = state_dict["param_groups"]
        # This rank's, in words, the state's, and what to do if they differ.
        for mine, words, theirs, cure in (
            # A file of an earlier version does not say whose it is, or how it was cut.
            (self._place, "that of {}", state_dict.get("place", self._place),
             "load on each rank what this rank has saved, or use `zero3.save` and `zero3.load`; "
             "with plain PyTorch all ranks have the same states, here each has its own part"),
            ([len(states.shard) for states in self.shard_states], "shards of {} elements",
             [len(master) for master in masters],
             "load it into the same model on as many ranks, on the same rank"),
            (self._parts, "shards in parts of {} elements", state_dict.get("parts", self._parts),
             "build the optimizer with the same `fraction`, or use `zero3.save` and `zero3.load`"),
            ([len(states.params) for states in self.shard_states], "shards of {} parameters",
             [len(keys) for keys in state_dict["cuts"]],
             "load it into the same model"),
            (len(self.param_groups), "{} param groups",
             len(groups),
             "build the optimizer with the same `group_by`"),
        ):
            self.expect(theirs == mine, "cannot load this state", words.format(mine), theirs, cure)
        for states, numbers in zip(self.shard_states, state_dict["cuts"], strict=True):
            # Cut like the saved pieces.
            states.repartition(numbers, self.state)
        self.regroup(self.pieces)
        # The groups of the wrapped optimizer come first, and so do their numbers.
        count = len(self.inner.param_groups)
        self.inner.load_state_dict({"state": state_dict["state"], "param_groups": groups[:count]})
        self.owners.load_state_dict(state_dict.get("wholes", {}), groups[count:])
        self._share_groups()
        for states, saved in zip(self.shard_states, masters, strict=True):
            with states.in_memory(self.state) as here:
                for each in here:
                    each.master.copy_(saved[each.where])
        self.load_scale_state(state_dict)

    def load_scale_state(self, saved: Mapping[str, Any]) -> None:
        """
        ### Go on with the numbers of steps, and with a dynamic loss scale

        This run has chosen a fixed scale or none, and keeps it.
        """
        before = self.loss_scale
        for name in SCALE_STATE:
            # An earlier version has saved None in a run without a scale.
            if saved.get(name) is not None and (name != "loss_scale" or self.dynamic):
                setattr(self, name, saved[name])
        if self.dynamic:
            self.loss_scale = max(self.loss_scale, self.scale_floor)
        # Gradients that wait for a step have the old scale. The step refuses them.
        self.has_scaled = self.has_scaled and self.loss_scale == before

    def __reduce_ex__(self, protocol: Any) -> Any:
        """
        ### Refuse `copy.copy`, `copy.deepcopy`, `pickle` and `torch.save`
        """
        self.expect(
            False, "cannot be copied or pickled", "one optimizer of each model", "a copy", "keep "
            "`copy.deepcopy(optimizer.state_dict())`, or call `zero3.save`")


def finite(value: Any) -> bool:
    """
    ## Whether an argument is a number, and neither infinite nor NaN
    """
    return isinstance(value, (int, float)) and math.isfinite(value)


def _digits(value: Any) -> str:
    """
    #### An option of an optimizer to six digits
    """
    plain = value.tolist() if isinstance(value, torch.Tensor) else value
    return " ".join(f"{each:g}" if isinstance(each, float) else str(each)
                    for each in pytree.tree_leaves(plain))


def plain_paths(model: nn.Module) -> dict[nn.Module, str]:
    """
    ## The name of each module in the plain model
    """
    return {module: names[0]
            for module, names in plain_names(model).items()}


def plain_names(model: nn.Module) -> dict[nn.Module, list[str]]:
    """
    ## All names of each module in the plain model
    """
    found: dict[nn.Module, list[str]] = {}

    def visit(module: nn.Module, path: str) -> None:
        found.setdefault(module, []).append(path)
        is_wrapper = isinstance(module, Trained)
        for name, child in module._modules.items():
            # A wrapper may have other attributes, which the plain model does not have.
            if child is not None and (not is_wrapper or name in ("module", "module_list")):
                visit(child, path if is_wrapper else f"{path}.{name}".strip("."))

    visit(model, "")
    # A layer that several modules share is no module of the plain model. The model knows its name.
    for owner in [module for module in found if isinstance(module, ShardedModel)]:
        for prefix, layer in owner.named_layers():
            found.setdefault(layer, [f"{found[owner][0]}.{prefix}".strip(".")])
    return found

r"""
# Predict: the same bytes from shapes

`predict` says how many bytes a sharded model will hold and send, before it runs.

A training step is a fixed sequence of events. `predict` replays it with numbers in place of
tensors, and notes the highest sum.

**Two layers on two ranks.** Layer A has three weights, so its shards have two elements each; layer
B has two weights, and shards of one. In fp32, a rank rests with 12 bytes. This is a step with plain
SGD on the CPU, and the bytes that a rank holds above these 12:

| event | bytes | above rest |
|---|---|---|
| all-gather A | + 16 | 16 |
| all-gather B, while A computes | + 8 | 24 |
| free A; B stays full, because backward begins with it | − 16 | 8 |
| backward of B: all-gather A, one layer ahead | + 16 | 24 |
| the full gradient of B | + 8 | 32 |
| free B | − 8 | 24 |
| reduce-scatter B: a receive buffer | + 8 | 32 |
| backward of A: the full gradient of A | + 16 | **48** |
| free A | − 16 | 32 |
| B is reduced: its shard gets a gradient | + 4 | 36 |
| free B's full gradient and the receive buffer | − 16 | 20 |
| reduce-scatter A: a receive buffer | + 16 | 36 |
| A is reduced: its shard gets a gradient | + 8 | 44 |
| free A's full gradient and the receive buffer | − 32 | 12 |

The peak is $12 + 48 = 60$ bytes. The rank sends $2 \cdot 8 + 4$ bytes in all-gathers, and $8 + 4$
in reduce-scatters. In general,

$$\text{rest} = \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil \, (b + K t_\ell)
\qquad
\text{sent} = (N-1) \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil
\, (b \, g_\ell + b_g \, t_\ell)$$

Layer $\ell$ has $P_\ell$ parameters. An element has $b$ bytes as a parameter and $b_g$ as a
gradient between ranks, and the optimizer keeps $K$ bytes for it. $t_\ell$ is 1 if the layer trains,
else 0. $g_\ell$ counts its all-gathers: two, but one for the last layer, and one for a layer below
the first that trains. Every micro-batch sends as much again. `Zero3Optimizer` also sends 8 bytes
for each trainable shard, once in a step.

**Files.** A step reads the file of a layer's shard, $f$ bytes, for each of its $g_\ell$
all-gathers. It writes each gradient, $f_g$ bytes, after its reduction, and masters and moments,
$f_s$ bytes, and rounded parameters after they are stepped. There are $c$ buffers for states. With
at least $2c$ layers all masters and moments are read again, and all gradients but those of the
first $c$ layers. In half precision, a step of one micro-batch moves

$$\text{read} = \sum_\ell \left( g_\ell f_\ell + f_{s,\ell} \right) + \sum_{\ell > c} f_{g,\ell}
\qquad \text{written} = \sum_\ell \left( f_{g,\ell} + f_{s,\ell} + f_\ell \right)$$

With fewer layers some states stay in the buffers, so a `Prediction` has no bytes that are read or
written.

**Run this**: `make train`; its table holds these numbers against measured ones.

**Not covered, and what that costs**: activations that nobody has counted with `saved.py`. Nodes,
replicas and encodings are refused; measure them with a `Ledger`. The numbers are off for layers
outside a `Zero3Sequential`, inputs that need a gradient, parameters without a gradient or moments,
and a bucket with two data types. With files, they are off if only the last layer of a chain trains.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import accumulate

import torch

from zero3.estimate.formulas import LayerSpec, Part, describe
from zero3.estimate.saved import Moved
from zero3.guards.checks import expect
from zero3.offload.disk import ALIGN_BYTES, whole_blocks
from zero3.offload.tiers import Offload
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.optimizer.states import moments_of


@dataclass(frozen=True)
class Prediction:
    """
    ## Bytes of one rank
    """

    param_bytes: int  # shards in memory, trainable and frozen
    grad_bytes: int  # gradients of these shards, from backward to `zero_grad()`
    master_bytes: int  # copies that the optimizer steps in the place of shards
    optimizer_bytes: int  # moments and step counts
    buffer_bytes: int  # buffers of the modules, which are not sharded
    peak_bytes: int  # the highest moment of a step that begins without gradients
    sent_bytes: int  # parameters, gradients and norms that a step sends to other ranks
    messages: int
    order_bytes: int  # announcements, by which ranks check that they run the same order
    pool_bytes: int = 0  # buffers that files are read into and written from
    disk_bytes: int = 0  # size of the files, without those of activations
    activation_bytes: int = 0  # saved by autograd, at most in memory, beside `peak_bytes`
    out_bytes: int = 0  # of activations that leave in a step
    in_bytes: int = 0  # of those that come back

    @property
    def rest_bytes(self) -> int:
        """
        ### Between steps, after `zero_grad()`, in the device's memory and the CPU's
        """
        return (self.param_bytes + self.master_bytes + self.optimizer_bytes + self.buffer_bytes
                + self.pool_bytes)

    def as_dict(self) -> dict[str, int]:
        """
        ### All numbers by name
        """
        return {"rest_bytes": self.rest_bytes, **asdict(self)}


def predict_optimizer(optimizer: Zero3Optimizer,
                      micro_batches: int = 1,
                      no_sync: bool = False,
                      saved: Moved | None = None) -> Prediction:
    """
    ## Predict the bytes of this rank, for a model and its `Zero3Optimizer`

    * `micro_batches` are in a step, whose moments exist already. `no_sync` says that all but the
      last run in `no_sync()`
    * `saved` are the activations of a micro-batch, as for `predict`

    Raises `RuntimeError` if the model is not a `Zero3Sequential` of plain layers with one
    `Offload`, if param groups keep different states, if other parameters train than when the
    optimizer was built, or with nodes, replicas, encodings, split or whole parameters.
    """
    modules = getattr(optimizer.model, "module_list", ())
    chain = [layer for layer in modules if getattr(layer, "flats", ())]
    offloads = {layer.offload if layer.offload.tier == "nvme" else layer.offload.tier
                for layer in chain}
    # For each param group: how many moments, and the bytes of other states.
    two = torch.zeros(2, device=optimizer.device)
    tried = [moments_of(*optimizer.made_by, group, two) for group in optimizer.param_groups]
    kept = {(len(names), other_bytes) for names, other_bytes in tried}
    good = chain == optimizer.layers and len(kept) == len(offloads) == 1
    optimizer.expect(
        good, "cannot predict", "a Zero3Sequential of plain layers, with one `Offload` and as many "
        "states in each param group", f"a {type(optimizer.model).__name__}, {len(offloads)} and "
        f"{len(kept)} kinds", "measure with `Ledger`")
    comm = optimizer.comm
    links = comm.links
    elsewhere = [layer.offload for layer in chain if isinstance(layer.offload, Offload)]
    plain = (comm.group.size == comm.world_size and comm.replicas.size == 1
             and not (links and (links.weights or links.gradients))
             and not any(each.frozen for each in elsewhere) and not optimizer.owners.wholes
             and comm.stages.size == 1)
    optimizer.expect(plain, "cannot predict", "one group of ranks, without encodings, and an "
                     "elementwise step", "nodes, replicas, encodings, split parameters or owners "
                     "of whole parameters", "measure with `Ledger`")
    trained = {shard for layer in chain for shard in layer.get_trainable_chunk()}
    optimizer.expect(trained == {each.shard for each in optimizer.shard_states},
                     "cannot predict", "the trainable parameters that it was built with",
                     "some that were frozen or unfrozen since",
                     "predict before that, or measure with `Ledger`")
    ((moments, step_bytes),) = kept
    found = predict(
        describe(modules),
        comm.world_size,
        moments=moments,
        step_bytes=step_bytes,
        by_messages=comm.by_messages,
        stage3=True,
        reduce_bytes=optimizer.reduce_dtype.itemsize if optimizer.reduce_dtype else None,
        micro_batches=micro_batches,
        no_sync=no_sync,
        bucket_bytes=optimizer.buckets[0].bucket_bytes,
        params_in=elsewhere[0] if elsewhere else None,
        states_in=optimizer.offload,
        saved=saved,
    )
    # Each piece of a shard has a count of steps.
    cuts = sum(len(states.pieces) - 1 for states in optimizer.shard_states if states.pieces)
    return replace(found, optimizer_bytes=found.optimizer_bytes + cuts * step_bytes,
                   peak_bytes=found.peak_bytes + cuts * step_bytes)


def memory_table(optimizer: Zero3Optimizer, micro_batches: int = 1) -> str:
    """
    ## The bytes that this rank will hold, a line for each kind, before it holds them
    """
    states = optimizer.shard_states
    found = predict_optimizer(optimizer, micro_batches)
    master_dtypes = _names(each.master_dtype for each in states)
    rows = [("parameters", _names(each.shard.dtype for each in states), found.param_bytes),
            ("gradients", _names(each.shard.grad_dtype for each in states), found.grad_bytes),
            ("masters", master_dtypes, found.master_bytes),
            ("moments and counts", master_dtypes, found.optimizer_bytes),
            ("buffers of modules", "", found.buffer_bytes),
            ("all, with gradients", "", found.rest_bytes + found.grad_bytes),
            ("at the peak of a step", "", found.peak_bytes)]
    if found.disk_bytes:
        rows.insert(5, ("buffers of files", "", found.pool_bytes))
        rows.append(("in files", "", found.disk_bytes))
    lines = [f"{name:24}{dtype:20}{nbytes:>16,}" for name, dtype, nbytes in rows]
    return "\n".join([f"rank {optimizer.comm.global_rank} will hold, in bytes", *lines])


def _names(dtypes: Iterable[torch.dtype | None]) -> str:
    return ", ".join(sorted({str(dtype).removeprefix("torch.") for dtype in dtypes}))


def predict(
    layers: list[LayerSpec],
    world_size: int,
    *,
    moments: int = 2,
    step_bytes: int = 4,
    by_messages: bool = True,
    stage3: bool = False,
    reduce_bytes: int | None = None,
    micro_batches: int = 1,
    no_sync: bool = False,
    bucket_bytes: int = 0,
    params_in: Offload | None = None,
    states_in: Offload | None = None,
    saved: Moved | None = None,
) -> Prediction:
    r"""
    ## Predict one rank's bytes, in a chain of layers

    * `moments` is the number of tensors of the shard's size that the optimizer keeps: 2 for Adam
    * `step_bytes` is the size of its step count for each trainable shard: 4 for torch's Adam
    * `by_messages` says that a reduce-scatter needs a receive buffer, as it does on the CPU
    * `stage3` says that the optimizer is a `Zero3Optimizer`: masters and moments are at least fp32,
      and the ranks exchange norms
    * `reduce_bytes` is the size of an element of a gradient between ranks and in the shard; by
      default that of the parameter
    * `micro_batches` make a step; with `no_sync` only the last of them reduces its gradients
    * `bucket_bytes` of full gradients are reduced together
    * `params_in` and `states_in` are the `offload` arguments of the layers and of the optimizer
    * `saved` are the activations of a micro-batch, as `activations` of `saved.py` returns them

    Raises `ValueError` if frozen shards rest in an encoding, or states in parts.
    """
    params_in = params_in or Offload()
    states_in = states_in or Offload()
    saved = saved or Moved()
    expect(params_in.frozen is None, "cannot predict", "frozen shards that rest as they are",
           f"{params_in.frozen}", "measure with `Ledger`")
    expect(states_in.fraction in (0, 1), "cannot predict", "states that rest in one place",
           f"fraction {states_in.fraction}", "measure with `Ledger`")
    if states_in.fraction == 0:
        states_in = Offload()
    least_bytes = 4 if stage3 else 1
    chain = [[_Shard(part, world_size, reduce_bytes or part.element_bytes,
                     max(least_bytes, part.element_bytes), params_in)
              for part in layer.parts]
             for layer in layers if layer.parts]
    shards = [s for layer in chain for s in layer]
    trained = [s for s in shards if s.trains]
    for s in trained:
        s.place_states(moments, states_in, one_memory=by_messages)

    step = Step([StepLayer(layer, world_size) for layer in chain], world_size, bucket_bytes,
                packs=stage3, by_messages=by_messages)
    for i in range(micro_batches):
        step.micro_batch(reduces=not no_sync or i + 1 == micro_batches)
    if stage3 and trained:
        # One gradient at a time is copied into its master's data type.
        widened = [s.master_bytes for s in trained if s.state_width != s.grad_width]
        step.memory.append(max(widened, default=0))
        # The squared norm of each shard's gradient, in fp64.
        step.sent.append((8 * len(trained), 1))

    others = world_size - 1
    in_memory = [s for s in trained if not s.state_file_bytes]
    found = Prediction(
        param_bytes=sum(s.row_bytes for s in shards if not s.file_bytes),
        grad_bytes=sum(s.grad_bytes for s in in_memory),
        master_bytes=sum(s.master_bytes for s in in_memory if not s.is_master),
        optimizer_bytes=moments * sum(s.master_bytes for s in in_memory)
        + step_bytes * len(trained),
        buffer_bytes=sum(layer.buffer_bytes for layer in layers),
        peak_bytes=0,
        sent_bytes=others * sum(nbytes for nbytes, _ in step.sent),
        messages=others * sum(messages for _, messages in step.sent),
        # Four 8-byte numbers announce each transfer.
        order_bytes=others * 32 * len(step.sent),
        pool_bytes=_pool_bytes(chain, states_in.buffers),
        # A shard that is its own master is in the file of the states.
        disk_bytes=sum(s.state_file_bytes for s in trained)
        + sum(s.file_bytes for s in shards if not (s.is_master and s.state_file_bytes)),
        activation_bytes=saved.memory_bytes,
        out_bytes=micro_batches * saved.out_bytes,
        in_bytes=micro_batches * saved.in_bytes,
    )
    return replace(found, peak_bytes=found.rest_bytes + max(accumulate(step.memory, initial=0)))


class _Shard:
    """
    ### One rank's shard of a part of a layer, and the bytes that belong to it
    """

    is_master = False  # whether the optimizer steps the shard itself
    state_file_bytes = 0  # of the file with master, moments and gradient

    def __init__(self, part: Part,
                 world_size: int,
                 grad_width: int,
                 state_width: int,
                 params_in: Offload):
        """
        #### Its sizes, and its tier

        * `grad_width` are the bytes of an element of its gradient
        * `state_width` are those of its master, and of a moment
        """
        self.part = part
        self.numel = part.shard_numel(world_size)
        self.trains = part.trainable and self.numel > 0
        self.grad_width = grad_width
        self.state_width = state_width
        self.row_bytes = self.numel * part.element_bytes
        self.grad_bytes = self.numel * grad_width * part.trainable
        self.master_bytes = self.numel * state_width
        self.tier = params_in.place(self.row_bytes)
        # Of the shard's file, if it has one, as a layer reads it.
        self.file_bytes = whole_blocks(self.row_bytes) if self.tier == "nvme" else 0

    def place_states(self, moments: int,
                     states_in: Offload,
                     one_memory: bool) -> None:
        """
        #### Choose a tier for the states of a shard that trains

        * `one_memory` says that device and CPU are the same memory, as they are without a GPU
        """
        state_bytes = (1 + moments) * self.master_bytes + self.grad_bytes
        in_file = states_in.place(state_bytes) == "nvme"
        steps_on = "device" if states_in.tier == "device" else "cpu"
        at_hand = in_file if self.file_bytes else one_memory or self.tier == steps_on
        self.is_master = self.state_width == self.part.element_bytes and at_hand
        if in_file:
            # A shard that is its own master and rests in memory has none in the file.
            masters = 0 if self.is_master and not self.file_bytes else 1
            self.state_file_bytes = (whole_blocks(self.master_bytes) * (moments + masters)
                                     + whole_blocks(self.grad_bytes))


def _pool_bytes(chain: list[list[_Shard]], buffers: int) -> int:
    """
    ### Memory for the buffers of files: `buffers` for states, and at least two for shards
    """
    shards = [(i + 1, s) for layer in chain for i, s in enumerate(layer)]
    states = max((s.state_file_bytes for _, s in shards), default=0)
    params = max((s.file_bytes for _, s in shards), default=0)
    slots = max([2, *(place for place, s in shards if s.file_bytes)])
    return sum(count * (nbytes + ALIGN_BYTES)
               for count, nbytes in ((buffers, states), (slots, params)) if nbytes)


class StepLayer:
    """
    ### A layer during a step
    """

    def __init__(self, shards: list[_Shard], world_size: int):
        self.shards = shards
        self.trains = any(s.part.trainable for s in shards)
        self.shard_bytes = sum(s.row_bytes for s in shards)
        self.full_bytes = world_size * self.shard_bytes
        # A gradient in a file needs no memory, and one that is there already no more.
        self.new_grad_bytes = sum(s.grad_bytes for s in shards if not s.state_file_bytes)
        self.full_grad_bytes = world_size * sum(s.grad_bytes for s in shards)
        self.has_full_grad = False


class Step:
    """
    ### Replay a step: the bytes that come and go, and those that are sent
    """

    def __init__(self, chain: list[StepLayer],
                 world_size: int,
                 bucket_bytes: int,
                 packs: bool,
                 by_messages: bool):
        self.chain = chain
        self.world_size = world_size
        self.bucket_bytes = bucket_bytes if world_size > 1 else 0
        self.packs = packs
        self.receives = by_messages and world_size > 1
        # Bytes that are allocated, or freed if negative, in order.
        self.memory: list[int] = []
        # Of each transfer: the bytes and the messages to each other rank.
        self.sent: list[tuple[int, int]] = []
        self.waiting: list[StepLayer] = []  # layers of the bucket that is being filled
        self.ending: list[int] = []  # what the end of the reduce in flight allocates and frees

    def micro_batch(self, reduces: bool) -> None:
        """
        #### Forward and backward: gather each layer while the one before it computes

        Without `reduces` the full gradients stay, and the next micro-batch adds to them.
        """
        trains = [layer.trains for layer in self.chain]
        first = trains.index(True) if any(trains) else -1
        order = [*self.chain, *self.chain[first:-1][::-1]]
        for i, following in enumerate([*order, None]):
            if following:
                messages = sum(s.numel > 0 for s in following.shards)
                self.sent.append((following.shard_bytes, messages))
                self.memory.append(following.full_bytes)
            if i > 0:
                self.compute(order[i - 1], i >= len(self.chain), reduces)
        if self.waiting:
            self.reduce(self.waiting)
        self.finish_reduce()

    def compute(self, layer: StepLayer,
                backward: bool,
                reduces: bool) -> None:
        """
        #### Free a layer after it has computed, and put its gradient into a bucket
        """
        has_grad = layer.trains and backward
        if has_grad and not layer.has_full_grad:
            layer.has_full_grad = True
            self.memory.append(layer.full_grad_bytes)
        self.memory.append(-layer.full_bytes)
        if has_grad and reduces:
            self.waiting.append(layer)
            # A gradient that fills a bucket alone goes at once; others wait until they fill one.
            for layers in ([layer], self.waiting):
                if sum(each.full_grad_bytes for each in layers) >= self.bucket_bytes:
                    self.reduce(layers)
                    return

    def reduce(self, layers: list[StepLayer]) -> None:
        """
        #### Start a reduce-scatter; the one before it has to finish first

        `Zero3Optimizer` packs gradients of one data type into one message.
        """
        self.finish_reduce()
        self.waiting = [layer for layer in self.waiting if layer not in layers]
        shards = [s for layer in layers for s in layer.shards if s.trains]
        row_bytes = sum(s.grad_bytes for s in shards)
        widths = Counter(s.grad_width for s in shards)
        self.sent.append((row_bytes, len(widths) if self.packs else len(shards)))
        packed_bytes = self.world_size * sum(
            s.grad_bytes for s in shards if self.packs and widths[s.grad_width] > 1)
        # NCCL adds the gradients by itself.
        receive_bytes = self.world_size * row_bytes if self.receives else 0
        self.memory.append(packed_bytes + receive_bytes)
        self.ending = [-packed_bytes]
        for layer in layers:
            # With one rank the full gradient becomes the shard's.
            grads = [layer.new_grad_bytes, -layer.full_grad_bytes]
            self.ending += grads if self.world_size > 1 else grads[::-1]
            layer.has_full_grad = False
            # The next micro-batch adds to it.
            layer.new_grad_bytes = 0
        self.ending.append(-receive_bytes)

    def finish_reduce(self) -> None:
        """
        #### The bucket in flight is reduced: its shards have gradients, and its buffers are freed
        """
        self.memory += self.ending
        self.ending = []


def data_parallel(layers: list[LayerSpec],
                  world_size: int, *,
                  mixed: bool = False) -> Prediction:
    """
    ## The same for plain data parallelism

    Step counts are left out.

    * `mixed` says that parameters in half precision have masters and moments in fp32
    """
    alone = predict(layers, 1, step_bytes=0, stage3=mixed)
    others = world_size - 1
    return replace(alone, peak_bytes=alone.rest_bytes + alone.grad_bytes,
                   sent_bytes=2 * others * alone.grad_bytes // world_size, messages=2 * others,
                   order_bytes=0)

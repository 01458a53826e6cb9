r"""
# Costs: the bytes of a pipeline's step, before it runs

`predict_step` replays a rank's list of actions with numbers in place of tensors. It says what the
rank will gather, reduce, send and hold, to the byte.

**A stage of three layers on two ranks.** Each layer has three weights in fp32, so it is padded to
four, 16 bytes, and each rank keeps 8. The pipeline is that of `schedules.py`: two stages, 1F1B,
three micro-batches. Activations between the stages take 24 bytes for each micro-batch. A step of a
rank with stage 0 sends

| `gathers` | the stage is gathered | gathered | reduced | activations | peak above rest |
|---|---|---|---|---|---|
| `each` | 6 times | 144 | 24 | 72 | 80: two layers, all gradients |
| `direction` | 4 times | 96 | 24 | 72 | 96: all layers, all gradients |
| `stage` | once | 24 | 24 | 72 | 96 |

A gather of the stage sends three shards of 8 bytes to one other rank. The full gradients, 48 bytes,
stay until the last micro-batch in all three cases. So a stage that stays whole takes 16 bytes more,
one more layer, and its gathers send a sixth.

A layer $\ell$ has $P_\ell$ parameters with $b$ bytes each, and $b_g$ in a gradient. If $N$ ranks
share it and the rank gathers its stage $g$ times in a step, the rank sends

$$\underbrace{(N-1) \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil b \, g}_{\text{gathered}} +
\underbrace{(N-1) \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil b_g}_{\text{reduced}} +
\underbrace{m \, (A + G)}_{\text{between stages}}$$

In the first sum $\ell$ runs over the layers of one stage, and all stages are of one size. In the
second it runs over all layers of the rank. Tied weights, losses and norms come on top. Here $A$ are
the bytes of the activations that a micro-batch sends to the next stage, and $G$ those of the
gradients that it sends to the stage before. With $p$ ranks, rank $r$ has, for its $v$ stages
together,

| $g$ | `each` | `direction` | `stage` | `step` |
|---|---|---|---|---|
| `gpipe` | $2m$ | $2$ | $1$ | $1$ |
| `1f1b` | $2m$ | $2 \max(1, m - p + 1 + r)$ | $1$ | $1$ |
| `breadth-first` | $2mv$ | $2v$ | $2v - 1$ | $v$ |
| `interleaved` | $2mv$ | 1 + changes of stage or direction | 1 + changes of stage | $v$ |

A layer below the first one that trains has no backward pass. With `each` it is gathered $m$ times,
not $2m$. Tied weights stay whole from `unshard` to `reshard`, with `each` too.

**The peak.** With one stage on a rank, held whole, it is either at the end of a backward pass, when
all layers are whole and all full gradients are there, or in the first reduce after the stage is
freed. A reduce needs a receive buffer for the gradients that it sends. If a bucket has several
layers, it also packs them, which is one more copy. With a bucket for each layer, and a last layer
$L$ that is reduced first,

$$\text{peak} - \text{rest} = N \max\Big(\sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil
(b + b_g), \; \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil b_g +
\left\lceil \frac{P_L}{N} \right\rceil \big(1 + \tfrac{1}{N}\big) b_g\Big)$$

for layers of equal size. `predict_step` finds the peak of any stages: it adds up what is alive
after each event, and remembers the highest sum.

**Run this**: `python -m pytest tests/test_pipeline_bytes.py` compares the formulas, this replay and
a `Ledger` on real ranks.

**Not covered, and what that costs**: activations and their gradients in memory; see `kept` in
`timeline.py`. The first step: there are no moments yet, and shapes are described. Shards or states
in files, and encoded ones, are refused. So are two cases of `each`, in which autograd decides what
is freed first: tied weights with a single micro-batch or several stages on a rank, and layers that
return an input tensor unchanged in a tuple, list or dict. A parameter without a gradient costs more
than is predicted, as for a chain.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils import _pytree as pytree

from zero3.estimate.formulas import describe
from zero3.estimate.layouts import Layout, Peers
from zero3.estimate.predict import Prediction, Step, StepLayer, predict
from zero3.groups.mesh import node_of
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.optimizer.states import moments_of
from zero3.pipeline.pipeline import Pipeline

# Of an announcement before each message between stages (see `channels.py`).
_ANNOUNCED_BYTES = 32


class Output(NamedTuple):
    """
    ## What a layer returns for a micro-batch, and the gradients of it
    """

    nbytes: int
    tensors: int
    grad_bytes: int
    grads: int  # tensors that need a gradient
    nested: bool  # tensors in a tuple, list or dict
    passes: bool  # hands on, in a nest, a tensor that came in and needs a gradient


def outputs(layers: Iterable[nn.Module], x: Any) -> list[Output]:
    """
    ## Learn from one micro-batch what each layer returns

    * `layers` are the plain modules that a `Pipeline` will be built of
    * `x` is the input of the first one, a micro-batch

    Each layer is called once. The states of random numbers are as before.
    """
    found = []
    with torch.random.fork_rng():
        for layer in layers:
            came = {id(leaf) for leaf in pytree.tree_leaves(x)}
            y = layer(x)
            tensors = [leaf for leaf in pytree.tree_leaves(y) if isinstance(leaf, torch.Tensor)]
            trained = [tensor for tensor in tensors if tensor.requires_grad]
            nested = not isinstance(y, torch.Tensor)
            found.append(Output(sum(t.nbytes for t in tensors), len(tensors),
                                sum(t.nbytes for t in trained), len(trained), nested,
                                nested and any(id(t) in came for t in trained)))
            # Drop the graph.
            x = pytree.tree_map_only(
                torch.Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), y)
    return found


@dataclass(frozen=True)
class StepBytes:
    """
    ## What a rank does and sends in a training step
    """

    gathers: int  # of a layer
    reduces: int  # of a layer's gradients
    gathered_bytes: int  # sent: shards of parameters
    reduced_bytes: int  # parts of full gradients
    activation_bytes: int  # to the next stage
    gradient_bytes: int  # to the stage before
    tied_bytes: int  # shards of tied weights, or of their gradients
    total: Prediction  # all that is sent, losses and norms too; messages; the peak; what rests


def predict_step(pipeline: Pipeline, optimizer: Zero3Optimizer,
                 learnt: list[Output]) -> StepBytes:
    """
    ## Predict this rank's bytes in a step

    A step is `train_batch`, `optimizer.step()` and `zero_grad()`, and not the first one.

    * `learnt` is what `outputs` returned for a micro-batch, before the pipeline was built

    Raises `RuntimeError` if shards or states rest in files or encoded, or if param groups keep
    different states. With `gathers="each"` also for tied weights, if there is a single micro-batch
    or a rank has several stages, and for layers that hand on a tensor of a nest as it is.
    """
    comm = pipeline.sharded_layers[0].comm
    _check(pipeline, optimizer, learnt)
    moments, step_bytes = _states_of(optimizer)
    reduce_bytes = optimizer.reduce_dtype.itemsize if optimizer.reduce_dtype else None
    replay = _Replay(pipeline, learnt, reduce_bytes)
    specs = [spec for prefix, layer in pipeline.named_layers()
             for spec in describe([layer], _named(prefix, optimizer.group_by))]
    found = predict(specs, replay.layout, rank=comm.rank, moments=moments, step_bytes=step_bytes,
                    by_messages=comm.by_messages, stage3=True, reduce_bytes=reduce_bytes,
                    bucket_bytes=optimizer.buckets[0].bucket_bytes,
                    params_in=pipeline.sharded_layers[0].offload, states_in=optimizer.offload,
                    play=replay.play)
    # A piece that was split, because its parameters are used in different steps, counts them twice.
    split_bytes = step_bytes * sum(len(states.pieces) - states.unsplit_count()
                                   for states in optimizer.shard_states)
    total = replace(found,
                    param_bytes=found.param_bytes + replay.borrowed_bytes,
                    optimizer_bytes=found.optimizer_bytes + split_bytes,
                    peak_bytes=found.peak_bytes + replay.borrowed_bytes + split_bytes,
                    order_bytes=found.order_bytes + replay.announced_bytes)
    return StepBytes(**replay.counts, reduced_bytes=replay.reduced_bytes, total=total)


def _check(pipeline: Pipeline, optimizer: Zero3Optimizer, learnt: list[Output]) -> None:
    """
    #### Refuse what cannot be predicted

    In the two cases of `each`, autograd decides whether a layer is freed before or after something
    else takes memory. For tied weights that is the first backward pass of a stage, in which the
    tied gradient gets its memory. Later ones need more, unless another stage's reduce is in flight.
    """
    offloads = [optimizer.offload, *(layer.offload for layer in pipeline.sharded_layers)]
    in_memory = all(each.tier != "nvme" and each.frozen is None for each in offloads)
    is_first_peak = pipeline.micro_batches == 1 or pipeline.count > pipeline.ranks
    passes = [i for i, output in enumerate(learnt) if output.passes]
    for good, expected, got in (
        (in_memory, "shards and states in memory, not encoded", "files or an encoding"),
        (pipeline.holds or pipeline.ends is None or not is_first_peak, "several micro-batches and "
         'one stage on a rank, for tied weights with `gathers="each"`',
         f"{pipeline.micro_batches} and {pipeline.count // pipeline.ranks}"),
        (pipeline.holds or not passes, "new tensors from each layer, with `gathers=\"each\"`",
         f"layers {passes}, which hand on a tensor that came in"),
    ):
        optimizer.expect(good, "cannot predict", expected, got, "measure with `Ledger`")


def _states_of(optimizer: Zero3Optimizer) -> tuple[int, int]:
    """
    #### The number of moments that the optimizer keeps, and the bytes of its other states
    """
    two = torch.zeros(2, device=optimizer.device)
    kept = set()
    for group in optimizer.param_groups:
        names, other_bytes = moments_of(*optimizer.made_by, group, two)
        kept.add((len(names), other_bytes))
    optimizer.expect(len(kept) == 1, "cannot predict", "as many states in each param group",
                     f"{len(kept)} kinds", "measure with `Ledger`")
    return kept.pop()


def _named(prefix: str, group_by: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    """
    #### `group_by`, for the names that `describe` gives to a single layer: `0.weight`
    """
    return lambda name, param: group_by(prefix + name.partition(".")[2], param)


class _Replay:
    """
    ## Replay a rank's list of actions

    One method for each kind of action. The order of the lines is the order of events in
    `stages.py` and `pipeline.py`.
    """

    def __init__(self, pipeline: Pipeline, learnt: list[Output], reduce_bytes: int | None):
        self.pipeline = pipeline
        self.learnt = learnt
        self.layout = Layout.of(pipeline.sharded_layers[0].comm)
        self.counts = dict.fromkeys(("gathers", "reduces", "gathered_bytes", "activation_bytes",
                                     "gradient_bytes", "tied_bytes"), 0)
        self.announced_bytes = 0
        self.reduced_bytes = 0
        # The layers that are whole, each with the stages that hold it.
        self.holders: dict[StepLayer, set[int]] = {}
        self.borrowed: StepLayer | None = None
        self.borrowed_bytes = 0
        self.layers: dict[Any, StepLayer] = {}
        if pipeline.borrowed is not None:
            layer = pipeline.borrowed.layer
            self.borrowed = StepLayer.of(describe([layer])[0], self.layout, reduce_bytes, 0, True)
            self.borrowed_bytes = self.borrowed.shard_bytes
            self.layers[layer] = self.borrowed

    def play(self, step: Step) -> None:
        """
        ### Replay the list, and the numbers that all ranks exchange in a step
        """
        self.step = step
        with_params = [layer for layer in self.pipeline.sharded_layers if layer.flats]
        self.layers |= zip(with_params, step.chain, strict=True)
        for action in self.pipeline.train_list:
            getattr(self, "_" + action.kind.replace(" ", "_"))(action.stage)
        step.end()
        sent = self.counts
        self.reduced_bytes = step.sent_bytes - sum(
            sent[name] for name in sent if name.endswith("bytes"))
        self._numbers()

    def _numbers(self) -> None:
        """
        #### The loss, 8 bytes from each rank to all others, and the norm, from stage to stage

        `predict` counts the norms between the ranks of a stage.
        """
        line = self.pipeline.comm.stages
        others = line.size - 1
        far = line.far if self.pipeline.comm.by_messages else others * line.next_is_far
        stages = Peers(others, far, line.far)
        self.step.send(stages, 8, 1)
        self.step.send(self.layout.near, 8, 1)
        self.step.send(self.layout.across, 8 * self.layout.ranks, 1)
        self.step.send(stages, 8, 1)

    # ---------------------------------------------------------------------------- gather and free

    def _fetch(self, layer: StepLayer) -> None:
        if layer in self.holders:
            return
        self.holders[layer] = set()
        before = self.step.sent_bytes
        self.step.fetch(layer)
        self.counts["gathers"] += 1
        self.counts["gathered_bytes"] += self.step.sent_bytes - before

    def _free(self, layer: StepLayer) -> None:
        if layer in self.holders and not self.holders[layer]:
            del self.holders[layer]
            self.step.free(layer)

    def _chain(self, s: int) -> list[StepLayer]:
        """
        #### The layers of a stage that have parameters
        """
        return [self.layers[layer] for layer in self.pipeline.stages[s].module_list if layer.flats]

    def _tied(self, s: int) -> list[StepLayer]:
        return [self.layers[layer] for layer in self.pipeline.stages[s].tied]

    def _unshard(self, s: int) -> None:
        for layer in (*self._tied(s), *(self._chain(s) if self.pipeline.holds else ())):
            self._fetch(layer)
            self.holders[layer].add(s)

    def _reshard(self, s: int) -> None:
        for layer in (*self._chain(s), *self._tied(s)):
            self.holders.get(layer, set()).discard(s)
            self._free(layer)

    # ------------------------------------------------------------------------------------- compute

    def _forward(self, s: int) -> None:
        """
        #### Gather each layer while the one before it computes, unless the stage is held
        """
        chain = self._chain(s)
        for layer, ahead in zip(chain, [*chain[1:], None], strict=True):
            self._fetch(layer)
            if ahead:
                self._fetch(ahead)
            self._free(layer)

    def _backward(self, s: int) -> None:
        """
        #### The same from the last layer down to the first that has a backward pass

        The end of the pass finishes the reduces of another stage, if there are any in flight.
        """
        if not self._last_output(s).grads:
            return
        tied = [layer for layer in self._tied(s) if layer.trains]
        for layer in tied:
            self.step.collect(layer)
        down = [layer for layer in reversed(self.pipeline.stages[s].module_list)
                if layer.flats and self.learnt[layer.layer_idx].grads]
        late: list[StepLayer] = []
        for each, below in zip(down, [*down[1:], None], strict=True):
            layer = self.layers[each]
            self._fetch(layer)
            if below:
                self._fetch(self.layers[below])
            for above in late:
                self._free(above)
            self.step.collect(layer)
            # In a nest, the gradient of an input is that of the output below. There the layer below
            # hears of it first, and gathers its neighbour before this one is freed.
            is_late = (below is not None and below.layer_idx == each.layer_idx - 1
                       and self.learnt[below.layer_idx].nested)
            late = [layer] if is_late else []
            if not is_late:
                self._free(layer)
        # The borrowed weights have a reducer of their own.
        if down or any(layer is not self.borrowed for layer in tied):
            self.step.end()

    def _last_output(self, s: int) -> Output:
        """
        #### What a stage returns
        """
        return self.learnt[max(layer.layer_idx for layer in self.pipeline.stages[s].module_list)]

    def _reduce(self, s: int) -> None:
        """
        #### Put the gradients of a stage into the bucket
        """
        layers = self._chain(s)[::-1]
        ends = self.pipeline.ends
        if ends and s == ends[0] and (ends[1] - ends[0]) % self.pipeline.ranks == 0:
            layers += self._tied(s)
        self._into_bucket(layers)

    def _into_bucket(self, layers: list[StepLayer]) -> None:
        for layer in layers:
            if layer.has_full_grad:
                self.counts["reduces"] += 1
                self.step.put_into_bucket(layer)

    # ---------------------------------------------------------------------------------------- move

    def _move(self, what: str, to: int, nbytes: int, tensors: int) -> None:
        """
        #### Send tensors to the rank of another stage
        """
        line = self.pipeline.comm.stages
        self.counts[what] += nbytes
        self.announced_bytes += _ANNOUNCED_BYTES
        self.step.sent_bytes += nbytes
        self.step.messages += tensors
        if node_of(line.ranks[to % line.size]) != node_of(line.global_rank):
            self.step.between_bytes += nbytes

    def _send(self, s: int) -> None:
        sent = self._last_output(s)
        self._move("activation_bytes", s + 1, sent.nbytes, sent.tensors)

    def _send_gradient(self, s: int) -> None:
        first = min(layer.layer_idx for layer in self.pipeline.stages[s].module_list)
        came = self.learnt[first - 1]
        self._move("gradient_bytes", s - 1, came.grad_bytes, came.grads)

    def _receive(self, s: int) -> None:
        """
        #### Nothing is counted
        """

    _receive_gradient = _receive_tied = _receive

    def _send_tied(self, s: int) -> None:
        assert self.pipeline.ends is not None
        for layer in self._tied(s):
            self._move("tied_bytes", self.pipeline.ends[1], layer.shard_bytes, len(layer.shards))

    def _send_tied_gradient(self, s: int) -> None:
        """
        #### Reduce the borrowed gradient by itself, and send this rank's part

        Meanwhile layers of the last stage may be in flight, in the bucket of the optimizer.
        """
        layer = self.borrowed
        assert layer is not None and self.pipeline.ends is not None
        grads = sum(shard.trains for shard in layer.shards) if layer.has_full_grad else 0
        if grads:
            alone = Step([layer], self.layout, 0, packs=True, by_messages=self.step.by_messages)
            alone.arrivals.append([])
            alone.reduce([layer])
            alone.end()
            self.counts["reduces"] += 1
            self.step.add(alone.peak_bytes)
            # The part of the gradient is freed once it is on its way.
            self.step.add(alone.live_bytes - layer.shard_grad_bytes - alone.peak_bytes)
            self.step.sent_bytes += alone.sent_bytes
            self.step.between_bytes += alone.between_bytes
            self.step.messages += alone.messages
            self.step.transfers += alone.transfers
        self._move("tied_bytes", self.pipeline.ends[0], layer.shard_grad_bytes * bool(grads), grads)

    def _receive_tied_gradient(self, s: int) -> None:
        for layer in self._tied(s):
            self.step.collect(layer)
            self._into_bucket([layer])

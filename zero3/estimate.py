r"""
# Estimate: the same bytes from formulas

`predict` says what a sharded model will hold and send before it runs, to the byte; `stages` is
ZeRO's Table 1 as a function.

What a layer rests with, holds at its peak and sends follows from four numbers: how many elements it
has, how wide they are, which of them train, and $N$. Nothing here runs a model: `_Step` walks
through a step and adds up numbers where the heart moves tensors. The tests run a model, with the
`Ledger` listening, and demand equality.

$$\text{rest} = \sum_\ell \Big\lceil \frac{P_\ell}{N} \Big\rceil \, (b + K t_\ell)
\qquad
\text{sent} = (N-1) \sum_\ell \Big\lceil \frac{P_\ell}{N} \Big\rceil
\, (b \, g_\ell + b_g \, t_\ell)$$

with $b$ bytes per element of the parameters and $b_g$ of their gradients on the way, $K$ bytes that
the optimizer keeps for each, $g_\ell$ unshards of layer $\ell$ (two, but one for the last layer,
and one below the first trainable layer) and $t_\ell = 1$ where it trains. Micro-batches send as
much each time, and `Zero3Optimizer` 8 bytes for each trainable shard once in a step.

**Run this**: `python -m zero3.estimate --params 7.5e9 --ranks 64`.

**Not covered, and what that costs**: activations, which do not depend on the sharding and have to
be added; layers outside a `Zero3Sequential`; parameters that no gradient reaches, which keep their
layer full to the end of the pass; buckets that hold two half-precision data types, whose messages
are counted as one.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch

# Bytes per parameter of half-precision training with Adam: parameters, gradients, optimizer states
# ($K$).
#
# * 16: ZeRO, section 3.1. fp16 parameters and gradients; fp32 parameters, momentum, variance.
# * 18: what DeepSpeed's estimator counts for stage 3. As before, with the gradients in fp32.
# * 20: ZeRO-Infinity, section 3. fp16 parameters and gradients; fp32 ones too, momentum, variance.
BASES = {16: (2, 2, 12), 18: (2, 4, 12), 20: (2, 2, 16)}


@dataclass(frozen=True)
class Part:
    """
    ## Parameters of a layer that shard together: of one width, and all trainable or all frozen
    """

    numel: int
    element_bytes: int
    trainable: bool
    runs: tuple[int, ...] = ()  # elements of one param group after the other, where there are some

    def shard_numel(self, world_size: int) -> int:
        return -(-self.numel // world_size)

    def shard_bytes(self, world_size: int) -> int:
        return self.shard_numel(world_size) * self.element_bytes

    @property
    def master_bytes(self) -> int:
        """
        ### Of an element, where the optimizer steps it
        """
        return max(4, self.element_bytes)

    def pieces(self, world_size: int, rank: int) -> int:
        """
        ### How many pieces the param groups cut a rank's shard into

        The padding goes with what is before it.
        """
        numel = self.shard_numel(world_size)
        ends = [*accumulate(self.runs[:-1]), world_size * numel]
        begins = [0, *ends[:-1]]
        spans = zip(begins, ends, strict=True)
        return sum(max(b, rank * numel) < min(e, (rank + 1) * numel) for b, e in spans)


@dataclass(frozen=True)
class LayerSpec:
    """
    ## What the formulas need to know of a layer
    """

    parts: tuple[Part, ...]
    buffer_bytes: int = 0

    def shard_bytes(self, world_size: int) -> int:
        return sum(p.shard_bytes(world_size) for p in self.parts)

    def grad_bytes(self, world_size: int, width: int | None = None) -> int:
        """
        ### Of the shards' gradients, of `width` bytes for an element or the parameters' own
        """
        trainable = (p for p in self.parts if p.trainable)
        return sum(p.shard_numel(world_size) * (width or p.element_bytes) for p in trainable)

    @property
    def trains(self) -> bool:
        return any(p.trainable for p in self.parts)


@dataclass(frozen=True)
class Prediction:
    """
    ## Bytes of one rank
    """

    param_bytes: int  # the shards, trainable and frozen
    grad_bytes: int  # the gradients of the shards, from backward to `zero_grad()`
    master_bytes: int  # fp32 copies of the trainable shards in half precision
    optimizer_bytes: int  # moments and counts
    buffer_bytes: int  # of the modules, which stay whole
    peak_bytes: int  # the highest moment of a step that begins without gradients
    sent_bytes: int  # parameters, gradients and norms put on the wire by a training step
    messages: int
    order_bytes: int  # of the announcements that make sure of the order

    @property
    def rest_bytes(self) -> int:
        """
        ### Between steps, after `zero_grad()`
        """
        rests = self.param_bytes, self.master_bytes, self.optimizer_bytes, self.buffer_bytes
        return sum(rests)

    def table(self, dtypes: list[str]) -> str:
        """
        ### Kind by kind, to be read

        * `dtypes` are of parameters, of gradients, and of masters and moments
        """
        of_params, of_grads, of_masters = dtypes
        rows = (("parameters", of_params, self.param_bytes),
                ("gradients", of_grads, self.grad_bytes),
                ("masters", of_masters, self.master_bytes),
                ("moments and counts", of_masters, self.optimizer_bytes),
                ("buffers", "", self.buffer_bytes),
                ("all, with gradients", "", self.rest_bytes + self.grad_bytes),
                ("at the peak of a step", "", self.peak_bytes))
        return "\n".join(f"{name:24}{dtype:20}{nbytes:>16,}" for name, dtype, nbytes in rows)


def describe(layers: Any, group_by: Callable[[str, Any], Any] | None = None) -> list[LayerSpec]:
    """
    ## Describe layers, sharded already or not

    * `layers` is a `Zero3Sequential`, or a list of the modules that will be wrapped one by one
    * `group_by` is what `Zero3Optimizer` gets to make param groups
    """
    specs = []
    for i, layer in enumerate(getattr(layers, "module_list", layers)):
        # Of each kind of parameters: bytes of an element; then elements and param group of each.
        kinds: dict[Any, tuple[int, list[tuple[int, Any]]]] = {}
        for kind, width, numel, name, param in _parameters(layer):
            group = group_by(f"{i}.{name}", param) if group_by and kind[0] else None
            kinds.setdefault(kind, (width, []))[1].append((numel, group))
        parts = []
        for (trains, _), (width, each) in kinds.items():
            runs = [sum(n for n, _ in run) for _, run in groupby(each, key=lambda one: one[1])]
            parts.append(Part(sum(runs), width, trains, tuple(runs)))
        buffers = sum(b.nbytes for b in layer.buffers())
        specs.append(LayerSpec(tuple(sorted(parts, key=lambda part: not part.trainable)), buffers))
    return specs


def _parameters(layer: Any) -> Iterator[tuple[tuple[bool, Any], int, int, str, Any]]:
    """
    ### Of each parameter: whether it trains and its kind, width, elements, name, itself
    """
    if hasattr(layer, "ledger"):
        for i, g in enumerate(layer.groups):
            for slot in g.slots:
                kind, width = (g.shard.requires_grad, i), g.shard.element_size()
                yield kind, width, slot.view.numel(), slot.names[0], slot.param
    else:
        for name, p in layer.named_parameters():
            yield (p.requires_grad, p.dtype), p.element_size(), p.numel(), name, p


def states(
    optimizer_class: Any, kwargs: dict[str, Any], group: dict[str, Any], two: torch.Tensor
) -> tuple[list[str], int]:
    """
    ## What an optimizer keeps for a parameter: tensors of its size, and bytes beside them

    It says so itself, by a step with `two` elements: each state that then has two is a moment.
    Returns the moments' names.
    """
    param = torch.nn.Parameter(two)
    param.grad = torch.zeros_like(two)
    optimizer = optimizer_class([{**group, "params": [param]}], **kwargs)
    optimizer.step()
    found = {k: t for k, t in optimizer.state[param].items() if isinstance(t, torch.Tensor)}
    moments = [key for key, t in found.items() if t.shape == two.shape]
    return moments, sum(t.nbytes for t in found.values()) - len(moments) * two.nbytes


def predict(
    layers: list[LayerSpec],
    world_size: int,
    *,
    rank: int = 0,
    moments: int = 2,
    step_bytes: int = 4,
    by_messages: bool = True,
    stage3: bool = False,
    reduce_bytes: int | None = None,
    micro_batches: int = 1,
    no_sync: bool = False,
    bucket_bytes: int = 0,
) -> Prediction:
    r"""
    ## Predict one rank's bytes, in a chain of layers

    * `rank` matters where param groups cut the shards, for the cuts are elsewhere on each
    * `moments` is how many tensors of the shard's size the optimizer keeps: 2 for Adam
    * `step_bytes` is what it keeps beside them for each piece of a trainable shard: torch's Adam
      counts steps in an fp32 number
    * `by_messages` says that a reduce receives into a buffer as large as what it sends from, as it
      does on the CPU
    * `stage3` says that the optimizer is a `Zero3Optimizer`: masters and moments are fp32 at least,
      param groups cut the shards, and the ranks tell each other norms
    * `reduce_bytes` are of an element of the reduced gradients; left out, the parameters'
    * `micro_batches` are in a step, all but the last without a reduce if `no_sync`
    * `bucket_bytes` of full gradients are reduced together
    """
    trainable = [p for layer in layers for p in layer.parts if p.trainable and p.numel]
    params = sum(layer.shard_bytes(world_size) for layer in layers)
    grads = sum(layer.grad_bytes(world_size, reduce_bytes) for layer in layers)
    buffers = sum(layer.buffer_bytes for layer in layers)
    masters = states = widened = 0
    for p in trainable:
        wide = p.shard_numel(world_size) * (p.master_bytes if stage3 else p.element_bytes)
        masters += wide if wide > p.shard_bytes(world_size) else 0
        states += moments * wide + step_bytes * (p.pieces(world_size, rank) if stage3 else 1)
        # Of one shard at a time the gradient is copied into the master's data type.
        if stage3 and p.master_bytes != (reduce_bytes or p.element_bytes):
            widened = max(widened, wide)
    rest = params + masters + states + buffers
    step = _Step([layer for layer in layers if layer.parts], world_size, reduce_bytes, bucket_bytes,
                 packs=stage3, inbox=by_messages)
    for i in range(micro_batches):
        step.micro_batch(hold=no_sync and i + 1 < micro_batches)
    step.add(widened)
    if stage3:
        # The squared norm of each shard's gradient, in fp64.
        step.send(8 * len(trainable), 1)
    # Each transfer is announced by four 8-byte numbers; NCCL's are not.
    order = 32 * step.transfers * by_messages
    return Prediction(params, grads, masters, states, buffers, rest + step.peak, step.sent_bytes,
                      step.messages, order)


class _Step:
    """
    ### A step, moment by moment: bytes above rest, and what is sent

    The order of the lines is the order of events in the heart. Layers are numbers here.
    """

    def __init__(self, chain: list[LayerSpec], world_size: int, width: int | None,
                 bucket_bytes: int, packs: bool, inbox: bool):
        self.chain, self.world_size, self.width = chain, world_size, width
        self.bucket_bytes, self.packs, self.inbox = bucket_bytes, packs, inbox
        self.grad = [layer.grad_bytes(world_size, width) for layer in chain]  # of the shard
        # Backward goes down to the first layer that trains.
        self.first = next((i for i, layer in enumerate(chain) if layer.trains), len(chain))
        self.held: set[int] = set()  # layers with a full gradient
        self.reduced: set[int] = set()  # layers whose shard has a gradient
        self.waiting: list[int] = []
        self.in_flight: list[int] = []
        self.packed_bytes = self.inbox_bytes = self.live = self.peak = 0
        self.sent_bytes = self.messages = self.transfers = 0

    def add(self, nbytes: int) -> None:
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def send(self, nbytes: int, messages: int) -> None:
        peers = self.world_size - 1
        self.sent_bytes += peers * nbytes
        self.messages += peers * messages
        self.transfers += peers

    def fetch(self, i: int) -> None:
        """
        #### A layer becomes whole
        """
        if i < len(self.chain):
            shard_bytes = self.chain[i].shard_bytes(self.world_size)
            self.send(shard_bytes, sum(p.numel > 0 for p in self.chain[i].parts))
            self.add(self.world_size * shard_bytes)

    def free(self, i: int) -> None:
        self.add(-self.world_size * self.chain[i].shard_bytes(self.world_size))

    def micro_batch(self, hold: bool) -> None:
        """
        #### Forward and backward

        With `hold` the full gradients stay where they are.
        """
        last = len(self.chain) - 1
        self.fetch(0)
        for i in range(last + 1):
            # This layer and the next are whole. The last stays so if there is a backward.
            self.fetch(i + 1)
            if i < last or self.first > last:
                self.free(i)
        for i in range(last, self.first - 1, -1):
            # This layer and the one before are whole, and its flat gradient is filled.
            if i > self.first:
                self.fetch(i - 1)
            if self.chain[i].trains and i not in self.held:
                self.held.add(i)
                self.add(self.world_size * self.grad[i])
            self.free(i)
            if self.chain[i].trains and not hold:
                if self.fills([i]):
                    self.reduce([i])
                else:
                    self.waiting.append(i)
                if self.fills(self.waiting):
                    self.reduce(self.waiting)
        if self.waiting:
            self.reduce(self.waiting)
        self.finish()

    def fills(self, layers: list[int]) -> bool:
        full_bytes = self.world_size * sum(self.grad[i] for i in layers)
        return bool(layers) and (full_bytes >= self.bucket_bytes or self.world_size == 1)

    def reduce(self, layers: list[int]) -> None:
        """
        #### Gradients leave, and those before them have arrived

        Gradients of one data type are packed into one message; data types of one width are taken
        for one.
        """
        self.finish()
        self.in_flight = list(layers)
        layers.clear()
        alike: dict[int, list[int]] = {}
        for i in self.in_flight:
            for p in self.chain[i].parts:
                if p.trainable and p.numel:
                    width = self.width or p.element_bytes
                    alike.setdefault(width, []).append(width * p.shard_numel(self.world_size))
        shares = sum(sum(same) for same in alike.values())
        messages = len(alike) if self.packs else sum(len(same) for same in alike.values())
        self.send(shares, messages)
        # A gradient that is alone goes as it is.
        packed = sum(sum(same) for same in alike.values() if len(same) > 1) * self.packs
        self.packed_bytes = self.world_size * packed
        self.inbox_bytes = self.world_size * shares * (self.inbox and self.world_size > 1)
        self.add(self.packed_bytes + self.inbox_bytes)

    def finish(self) -> None:
        """
        #### The bucket in flight has arrived: shards have gradients, and its buffers go
        """
        self.add(-self.packed_bytes)
        for i in self.in_flight:
            # One rank alone has its shard's first gradient already: the full one is it.
            if self.world_size > 1 or i in self.reduced:
                self.add(self.grad[i] * (i not in self.reduced))
                self.add(-self.world_size * self.grad[i])
        self.add(-self.inbox_bytes)
        self.reduced.update(self.in_flight)
        self.held.difference_update(self.in_flight)
        self.in_flight, self.packed_bytes, self.inbox_bytes = [], 0, 0


def data_parallel(
    layers: list[LayerSpec], world_size: int, *, moments: int = 2, mixed: bool = False
) -> Prediction:
    """
    ## The same for plain data parallelism

    Everything whole on every rank, and a ring all-reduce, which sends twice what a reduce-scatter
    does. The optimizer's count of steps for each tensor is left out.

    * `mixed` says that parameters in half precision have masters and moments in fp32
    """
    parts = [p for layer in layers for p in layer.parts]
    trainable = [p for p in parts if p.trainable]
    params, grads = sum(p.shard_bytes(1) for p in parts), sum(p.shard_bytes(1) for p in trainable)
    buffers = sum(layer.buffer_bytes for layer in layers)
    wide = sum(p.numel * (p.master_bytes if mixed else p.element_bytes) for p in trainable)
    narrow = sum(p.numel for p in trainable if mixed and p.master_bytes > p.element_bytes)
    masters, states = 4 * narrow, moments * wide
    peak = params + grads + masters + states + buffers
    sent = 2 * (world_size - 1) * grads // world_size
    messages = 2 * (world_size - 1)
    return Prediction(params, grads, masters, states, buffers, peak, sent, messages, 0)


def stages(params: float, ranks: int, basis: int = 16) -> list[float]:
    r"""
    ## ZeRO's Table 1: bytes of model states per rank

    For plain data parallelism, then stages 1, 2 and 3.

    * `params` is $\Psi$, `ranks` is $N$; `basis` is one of `BASES`

    $$4\Psi + \frac{K\Psi}{N} \qquad 2\Psi + \frac{(2+K)\Psi}{N} \qquad \frac{(4+K)\Psi}{N}$$

    ZeRO, section 5 and Table 1, where $K = 12$ and the basis is 16.
    """
    p, g, k = BASES[basis]
    return [
        params * (p + g + k),
        params * (p + g + k / ranks),
        params * (p + (g + k) / ranks),
        params * (p + g + k) / ranks,
    ]


def main() -> None:
    """
    ## The command line
    """
    parser = argparse.ArgumentParser(
        prog="python -m zero3.estimate", description="Memory for model states, stage by stage."
    )
    parser.add_argument("--params", type=float, required=True, help="of the model: 7.5e9")
    parser.add_argument("--ranks", type=int, required=True, help="ranks that share it")
    args = parser.parse_args()
    if args.params <= 0 or args.ranks < 1:
        parser.error(
            f"expected at least one parameter and one rank, got {args.params:g} and {args.ranks}"
        )
    print(f"{args.params:,.0f} parameters on {args.ranks} ranks, in half precision with Adam.")
    print("Model states per rank in GB (1e9 bytes), by bytes counted per parameter:\n")
    print(f"{'':26s}" + "".join(f"{basis:>12d}" for basis in BASES))
    names = ("0: data parallelism", "1: + optimizer states", "2: + gradients", "3: + parameters")
    for stage, name in enumerate(names):
        row = (stages(args.params, args.ranks, basis)[stage] / 1e9 for basis in BASES)
        print(f"{name:26s}" + "".join(f"{gigabytes:12,.2f}" for gigabytes in row))
    print("\n16: ZeRO, 2 parameter + 2 gradient + 12 Adam.  18: DeepSpeed's estimator, 2 + 4 + 12.")
    print("20: ZeRO-Infinity, 2 + 2 + 16.  Activations come on top.")


if __name__ == "__main__":
    main()

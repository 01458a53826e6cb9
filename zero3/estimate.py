r"""
# Estimate: the same bytes from formulas

`predict` says what a sharded model will hold and send before it runs, to the byte; `stages` is
ZeRO's Table 1 as a function.

What a layer rests with, holds at its peak and sends follows from four numbers: how many elements it
has, how wide they are, which of them train, and $N$. Nothing here runs a model. The tests run one,
with the `Ledger` listening, and demand equality.

$$\text{rest} = \sum_\ell \Big\lceil \frac{P_\ell}{N} \Big\rceil \, (b + K)
\qquad
\text{sent} = (N-1) \sum_\ell \Big\lceil \frac{P_\ell}{N} \Big\rceil \, b \, (g_\ell + t_\ell)$$

with $b$ bytes per element, $g_\ell$ unshards of layer $\ell$ in a step (two, but one for the last
layer, and one below the first trainable layer) and $t_\ell = 1$ where it trains.

**Run this**: `python -m zero3.estimate --params 7.5e9 --ranks 64`.

**Not covered, and what that costs**: activations, which do not depend on the sharding and have to
be added; layers outside a `Zero3Sequential`; parameters that no gradient reaches, which keep their
layer full to the end of the pass.
"""

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

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

    def shard_bytes(self, world_size: int) -> int:
        return -(-self.numel // world_size) * self.element_bytes


@dataclass(frozen=True)
class LayerSpec:
    """
    ## What the formulas need to know of a layer
    """

    parts: tuple[Part, ...]
    buffer_bytes: int = 0

    def shard_bytes(self, world_size: int, trainable_only: bool = False) -> int:
        parts = (p for p in self.parts if p.trainable or not trainable_only)
        return sum(p.shard_bytes(world_size) for p in parts)

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
    optimizer_bytes: int
    buffer_bytes: int  # of the modules, which stay whole
    peak_bytes: int  # the highest moment of a step that begins without gradients
    sent_bytes: int  # parameters and gradients put on the wire by a training step
    messages: int
    order_bytes: int  # of the announcements that make sure of the order

    @property
    def rest_bytes(self) -> int:
        """
        ### Between steps, after `zero_grad()`
        """
        return self.param_bytes + self.optimizer_bytes + self.buffer_bytes


def describe(layers: Any) -> list[LayerSpec]:
    """
    ## Describe layers, sharded already or not

    * `layers` is a `Zero3Sequential`, or a list of the modules that will be wrapped one by one
    """
    specs = []
    for layer in getattr(layers, "module_list", layers):
        kinds: dict[tuple[bool, object], list[int]] = {}
        if hasattr(layer, "ledger"):
            for i, g in enumerate(layer.groups):
                numels = [slot.view.numel() for slot in g.slots]
                kinds[g.shard.requires_grad, i] = [g.shard.element_size(), *numels]
        else:
            for p in layer.parameters():
                kinds.setdefault((p.requires_grad, p.dtype), [p.element_size()]).append(p.numel())
        parts = (Part(sum(n), width, trains) for (trains, _), (width, *n) in kinds.items())
        buffers = sum(b.nbytes for b in layer.buffers())
        specs.append(LayerSpec(tuple(sorted(parts, key=lambda part: not part.trainable)), buffers))
    return specs


def predict(
    layers: list[LayerSpec],
    world_size: int,
    *,
    moments: int = 2,
    step_bytes: int = 4,
    by_messages: bool = True,
) -> Prediction:
    r"""
    ## Predict one rank's bytes, in a chain of layers

    * `moments` is how many tensors of the shard's size the optimizer keeps: 2 for Adam
    * `step_bytes` is what it keeps beside them for each trainable shard: torch's Adam counts steps
      in an fp32 number
    * `by_messages` says that a reduce receives into a buffer of the layer's size, as it does on the
      CPU
    """
    trainable = [p for layer in layers for p in layer.parts if p.trainable and p.numel]
    states = sum(moments * p.shard_bytes(world_size) + step_bytes for p in trainable)
    params = sum(layer.shard_bytes(world_size) for layer in layers)
    grads = sum(p.shard_bytes(world_size) for p in trainable)
    buffers = sum(layer.buffer_bytes for layer in layers)
    chain = [layer for layer in layers if layer.parts]
    sent = messages = order = 0
    for layer, gathers, reduces in _transfers(chain):
        for p in layer.parts:
            times = gathers + (reduces and p.trainable)
            sent += times * (world_size - 1) * p.shard_bytes(world_size)
            messages += times * (world_size - 1) * bool(p.numel)
        # Each transfer is announced by three 8-byte numbers to each other rank.
        order += (gathers + reduces) * (world_size - 1) * 24
    rest = params + states + buffers
    peak = rest + max(_moments(chain, world_size, by_messages and world_size > 1), default=0)
    return Prediction(params, grads, states, buffers, peak, sent, messages, order)


def _first_trainable(chain: list[LayerSpec]) -> int:
    """
    ### Where backward ends: nothing below waits for a gradient
    """
    return next((i for i, layer in enumerate(chain) if layer.trains), len(chain))


def _transfers(chain: list[LayerSpec]) -> list[tuple[LayerSpec, int, int]]:
    """
    ### How often each layer is gathered and reduced in a step

    Backward goes down to the first layer that trains; the last layer is still full from forward.
    """
    first = _first_trainable(chain)
    return [
        (layer, 2 if first <= i < len(chain) - 1 else 1, int(layer.trains))
        for i, layer in enumerate(chain)
    ]


def _moments(chain: list[LayerSpec], world_size: int, inbox: bool) -> Iterable[int]:
    """
    ### Bytes above rest, moment by moment through a step

    The order of the lines is the order of events in the heart.
    """
    full = [world_size * layer.shard_bytes(world_size) for layer in chain]
    shard = [layer.shard_bytes(world_size, trainable_only=True) for layer in chain]
    first = _first_trainable(chain)
    live = sum(full[:1])
    yield live
    for i in range(len(chain)):
        # Forward: this layer and the next are full. The last stays so if there is a backward.
        live += sum(full[i + 1 : i + 2])
        yield live
        live -= full[i] if i + 1 < len(chain) or first == len(chain) else 0
    in_flight = None
    for i in reversed(range(first, len(chain))):
        # Backward: this layer and the one before are full.
        live += full[i - 1] if i > first else 0
        yield live
        # Its flat gradient is filled, and then it is full no more.
        live += world_size * shard[i]
        yield live
        live -= full[i]
        # The layer above ends its reduce: its shard has a gradient, and its buffers go.
        if in_flight is not None:
            live += shard[in_flight] if world_size > 1 else 0
            yield live
            live -= world_size * shard[in_flight] * (1 + inbox) if world_size > 1 else 0
        # This one's begins.
        live += world_size * shard[i] if inbox else 0
        in_flight = i if chain[i].trains else None
        yield live
    yield live + (shard[in_flight] if in_flight is not None and world_size > 1 else 0)


def data_parallel(layers: list[LayerSpec], world_size: int, *, moments: int = 2) -> Prediction:
    """
    ## The same for plain data parallelism

    Everything whole on every rank, and a ring all-reduce, which sends twice what a reduce-scatter
    does. The optimizer's count of steps for each tensor is left out.
    """
    parts = [p for layer in layers for p in layer.parts]
    params = sum(p.shard_bytes(1) for p in parts)
    grads = sum(p.shard_bytes(1) for p in parts if p.trainable)
    buffers = sum(layer.buffer_bytes for layer in layers)
    states = moments * grads
    peak = params + grads + states + buffers
    sent = 2 * (world_size - 1) * grads // world_size
    return Prediction(params, grads, states, buffers, peak, sent, 2 * (world_size - 1), 0)


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

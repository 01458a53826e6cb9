r"""
# Estimate: the papers' formulas

`stages` computes ZeRO's Table 1, `sent_elements` the communication of a step, `places` the bytes
that a model needs in each tier, and `efficiency` ZeRO-Infinity's equation 6.

**An example.** A model with 8 billion parameters needs 16 bytes for each of them, 128 GB on one GPU
with 80 GB. With the optimizer states in CPU memory, the GPU keeps 16 GB of parameters, and 1.5 GB
for layers that are whole and their gradients. A step then moves 32 GB between the two. With 8,192
tokens in a step, the GPU computes $\frac{8192}{4} = 2048$ flops for each byte of optimizer states
that moves. A GPU that reaches 70 Tflop/s thus runs at half its speed over a link of
$\frac{70 \cdot 10^{12}}{2048} = 34 \cdot 10^9$ bytes per second, and at 90 % over one of
$308 \cdot 10^9$.

$$\text{efficiency} = \frac{\text{ait} \cdot \text{bw}}{\text{ait} \cdot \text{bw} +
\text{peak}} \qquad \text{ait} = T \text{ for parameters and gradients, } \frac{T}{4}
\text{ for optimizer states}$$

A rank computes with $T$ tokens in a step. $\text{ait}$ is the arithmetic intensity in flops per
byte, $\text{bw}$ the bandwidth of the transfer in bytes per second, and $\text{peak}$ the speed of
computation in flops per second.

**Run this**: `python -m zero3.estimate --params 7.5e9 --ranks 64`, or `python -m zero3.estimate
--model 8b --ranks 1 --gpu 80GB --cpu 128GB --nvme 1TB`.

**Not covered, and what that costs**: activations, which `saved.py` counts. The formulas assume the
papers' data types and Adam; `predict.py` uses the real layers, to the byte.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from zero3.estimate.ledger import storages
from zero3.flat import alike, find_params
from zero3.layer import Zero3Sequential
from zero3.sharded import Sharded

# Of an element in half precision.
ELEMENT_BYTES = 2
# Bytes per parameter of half-precision training with Adam: for the parameter, its gradient, and its
# optimizer states ($K$). Each sum is called a basis. `docs/notation.md` says who uses which.
BASES = {16: (2, 2, 12), 18: (2, 4, 12), 20: (2, 2, 16)}
# In fp32 the states are two moments and no master. The sum is 16 again, so it is called by its data
# type.
WIDTHS: dict[int | str, tuple[int, int, int]] = {"fp32": (4, 4, 8)} | BASES
# Memory of a rank by use: the model states, and buffers that exist only while a layer is at work.
KINDS = ("parameters", "gradients", "states", "working")
# Tiers of parameters and of optimizer states, the fastest first.
CHOICES = (("device", "device"), ("device", "cpu"), ("cpu", "cpu"),
           ("device", "nvme"), ("cpu", "nvme"), ("nvme", "nvme"))


@dataclass(frozen=True)
class Part:
    """
    ## Parameters of a layer that are sharded together

    They have one data type, and are all trainable or all frozen.
    """

    numel: int
    element_bytes: int
    trainable: bool
    align_numel: int = 1  # the elements of a shard are a multiple of it; on the CPU it is 1

    def shard_numel(self, world_size: int) -> int:
        return -(-self.numel // (world_size * self.align_numel)) * self.align_numel


@dataclass(frozen=True)
class LayerSpec:
    """
    ## A layer, as the formulas see it
    """

    parts: tuple[Part, ...]
    buffer_bytes: int = 0

    def shard_bytes(self, world_size: int) -> int:
        return sum(p.shard_numel(world_size) * p.element_bytes for p in self.parts)


def describe(layers: Zero3Sequential | Iterable[nn.Module]) -> list[LayerSpec]:
    """
    ## Describe layers, sharded already or not

    * `layers` is a `Zero3Sequential`, or a list of modules, each of which will be wrapped
    """
    chain = [*(layers.module_list if isinstance(layers, Zero3Sequential) else layers)]
    # Several layers may share a buffer. The last of them counts it.
    buffers = {key: (i, nbytes) for i, layer in enumerate(chain)
               for key, nbytes in storages(layer.buffers()).items()}
    return [LayerSpec(_parts(layer), sum(nbytes for last, nbytes in buffers.values() if last == i))
            for i, layer in enumerate(chain)]


def _parts(layer: nn.Module) -> tuple[Part, ...]:
    """
    ### The parts of a layer, those that train first
    """
    if isinstance(layer, Sharded):
        aligned = layer.comm.aligned
        # Each parameter begins at a multiple of the alignment, and so would one after the last.
        found = [Part(aligned(flat.slots[-1].end, flat.shard.dtype), flat.shard.dtype.itemsize,
                      flat.shard.requires_grad, aligned(1, flat.shard.dtype))
                 for flat in layer.flats]
    else:
        found = [Part(sum(param.numel() for param in params), params[0].dtype.itemsize,
                      params[0].requires_grad)
                 for params in map(list, alike(find_params(layer)))]
    return tuple(found)


def stages(params: float,
           ranks: int,
           basis: int | str = 16) -> list[float]:
    r"""
    ## ZeRO's Table 1: bytes of model states per rank

    Returns four numbers: for plain data parallelism, and for stages 1, 2 and 3.

    * `params` is $\Psi$, `ranks` is $N$, and `basis` is one of `WIDTHS`

    $$4\Psi + \frac{K\Psi}{N} \qquad 2\Psi + \frac{(2+K)\Psi}{N} \qquad \frac{(4+K)\Psi}{N}$$

    ZeRO, section 5 and Table 1, where $K = 12$ and the basis is 16.
    """
    p, g, k = WIDTHS[basis]
    return [
        params * (p + g + k),
        params * (p + g + k / ranks),
        params * (p + (g + k) / ranks),
        params * (p + g + k) / ranks,
    ]


def sent_elements(params: float, ranks: int, stage: int) -> float:
    r"""
    ## Elements that a rank sends to other ranks in a step

    $$2\Psi\frac{N-1}{N} \text{ for stages 0 to 2} \qquad 3\Psi\frac{N-1}{N} \text{ for stage 3}$$

    ZeRO, section 7.2.
    """
    return (3 if stage == 3 else 2) * params * (ranks - 1) / ranks


def efficiency(ait: float, bandwidth: float, peak: float) -> float:
    """
    ## The part of the computation's speed that remains if no transfer is overlapped

    ZeRO-Infinity, section 4, equations 6, 9 and 10.
    """
    return ait * bandwidth / (ait * bandwidth + peak)


@dataclass(frozen=True)
class Place:
    """
    ## A choice of tiers for parameters and optimizer states, and the bytes that a rank then needs

    Gradients are kept in the tier of the optimizer states.
    """

    params_in: str  # "device", "cpu" or "nvme"
    states_in: str
    parts: dict[str, dict[str, float]]  # bytes in each tier, by `KINDS`
    step_bytes: dict[str, float]  # bytes that a step moves into a tier and out of it

    @property
    def needs(self) -> dict[str, float]:
        """
        ### Bytes in each tier
        """
        return {tier: sum(kinds.values()) for tier, kinds in self.parts.items()}


def places(params: float,
           ranks: int,
           layers: int = 32,
           basis: int | str = 16) -> list[Place]:
    r"""
    ## The bytes in each tier, for each choice of tiers, the fastest first

    * `params` is $\Psi$, `ranks` is $N$; all `layers` are taken to have the same size

    Files need buffers in CPU memory: two for a layer's shard, and five for its optimizer states.

    With the states in CPU memory a step moves $4\Psi/N$ bytes, the least that offload can
    (ZeRO-Offload, section 3).
    """
    return [_place(*tiers, params / ranks, params / layers, ranks, basis) for tiers in CHOICES]


def _place(params_in: str,
           states_in: str,
           shard: float,
           layer: float,
           ranks: int,
           basis: int | str) -> Place:
    """
    #### The bytes in each tier, and those that a step moves, for one choice

    * `shard` and `layer` are the parameters of a rank, and of a whole layer
    """
    p, g, k = WIDTHS[basis]
    fp32 = p == 4
    if fp32 and params_in == "device" != states_in:
        # They need a copy in the tier in which they are stepped.
        k += p
    # Master, moments and gradient. In fp32, parameters in files move along with them.
    stepped = g + k + (p if fp32 and params_in == "nvme" else 0)
    parts = {tier: dict.fromkeys(KINDS, 0.0) for tier in ("device", "cpu", "nvme")}
    parts["device"]["working"] = 3 * p * layer
    parts[params_in]["parameters"] = p * shard
    parts[states_in]["gradients"] = g * shard
    parts[states_in]["states"] = k * shard
    moves = {"cpu": 0.0, "nvme": 0.0}
    if params_in != "device":
        moves[params_in] += 2 * p * shard
    if states_in == "cpu":
        # Gradients, and the parameters back.
        moves["cpu"] += (2 if params_in == "device" else 1) * p * shard
    if states_in == "nvme":
        parts["cpu"]["working"] += 5 * stepped * layer / ranks
        # Each is written and read.
        moves["nvme"] += 2 * stepped * shard
    if params_in == "nvme":
        parts["cpu"]["working"] += 2 * p * layer / ranks
        # The master is rounded into the parameters, which are written too.
        moves["nvme"] += 0 if fp32 else p * shard
    return Place(params_in, states_in, parts, moves)


def advise(params: float,
           ranks: int,
           has: dict[str, float],
           layers: int = 32) -> Place | None:
    """
    ## The fastest place that fits, if there is one

    * `has` has the bytes of each tier. Those of "device" are one rank's; all ranks of the machine
      share those of "cpu" and "nvme"
    """
    mine = {tier: n if tier == "device" else n / ranks for tier, n in has.items()}
    return next((place for place in places(params, ranks, layers)
                 if all(need <= mine.get(tier, 0.0) for tier, need in place.needs.items())), None)


def number(text: str) -> float:
    """
    ## Read 7.5e9, 8b, 80GB or 1TB

    Units are powers of 1000. Raises `ValueError` for what is no number.
    """
    text = text.strip().lower()
    if text[-2:] in ("kb", "mb", "gb", "tb"):
        text = text[:-1]
    power = "kmgt".find(text[-1:].replace("b", "g")) + 1
    return float(text[:-1] if power else text) * 1000**power


def print_table(rows: list[tuple[str, list[str], str]], name_width: int = 24) -> None:
    """
    ## Print rows of a name, cells and a note
    """
    width = max(12, *(len(cell) + 2 for _, cells, _ in rows for cell in cells))
    for name, cells, note in rows:
        print(f"{name:{name_width}}" + "".join(f"{cell:>{width}}" for cell in cells) + note)


def gigabytes(nbytes: float, digits: int = 2) -> str:
    return f"{nbytes / 1e9:,.{digits}f}"


def show_stages(params: float, ranks: int) -> None:
    """
    ## Print ZeRO's Table 1 for one model and number of ranks
    """
    print(f"{params:,.0f} parameters on {ranks} ranks, in half precision with Adam.\n"
          "Model states per rank in GB (1e9 bytes), by bytes counted per parameter:\n")
    names = ("0: data parallelism", "1: + optimizer states", "2: + gradients", "3: + parameters")
    by_basis = [stages(params, ranks, basis) for basis in BASES]
    rows = [("", [str(basis) for basis in BASES], "")]
    for name, each in zip(names, zip(*by_basis, strict=True), strict=True):
        rows.append((name, [gigabytes(nbytes) for nbytes in each], ""))
    print_table(rows, name_width=26)
    print("\n16: ZeRO, 2 parameter + 2 gradient + 12 Adam.  18: DeepSpeed's estimator, 2 + 4 + 12."
          "\n20: ZeRO-Infinity, 2 + 2 + 16.  Activations come on top.")

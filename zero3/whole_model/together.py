r"""
# Shared gathers: small units share an all-gather

`fetch_together` starts one all-gather for several units, as `buckets.py` does one reduce-scatter.

**Two units on two ranks.** Unit a is the layer of `minimal.py`: its flat parameter is
1 2 3 0, so rank 0 has the shard 1 2 and rank 1 has 3 0. Unit b has the two weights 5 6. Each rank
packs its shards side by side into its own row of a *packed buffer*:

| | row of rank 0 | row of rank 1 |
|---|---|---|
| shard of a | 1 2 | 3 0 |
| shard of b | 5 | 6 |
| **packed buffer, after one all-gather** | **1 2 5** | **3 0 6** |
| a takes columns 0 and 1 | 1 2 | 3 0 |
| b takes column 2 | 5 | 6 |

When a is about to compute, its columns are copied, row by row, into its flat parameter 1 2 3 0,
and those of b into 5 6. Then the packed buffer is freed. If a collective takes $t$ seconds beside
its bytes, $n$ units save

$$(n - 1)\, t \quad \text{seconds, and cost} \quad \sum_{i=1}^{n} P_{u_i} \quad
\text{elements of memory}$$

while they are copied.

The values are the same, bit for bit. `wrap(..., bucket_numel=6)` does this for units that follow
each other, from the first backward pass on. Larger units are gathered alone.

When a bucket is unpacked, its $k$ units of $P$ elements are there twice, and the units before it
are free. So the most is $2 k P$ elements.

**One unit for several layers.** `Together` holds small layers that follow each other, so that one
unit has all their parameters. Then nothing is packed: a and b of the example have one flat
parameter, 1 2 3 5 6 0. Each layer uses these parameters like tied weights. `zero3.compile` does
this, if it is asked to.

**Run this**: `python -m pytest tests/whole_model/test_together.py -k collectives`.

**Not covered, and what that costs**: gathering without a copy. A unit's rows are in one piece in
its flat parameter, and in several in the packed buffer. Units are gathered one by one if `Links`
quantises their weights, because a block of an encoding would span two units; and if it keeps
secondary copies, because these belong to one unit each. So is a unit whose shards have been moved
or converted, because its own gather has the error for that. A rank alone has nothing to share. If
ranks pack different units, the error of each names its own set of units, and the set of the other
rank by a checksum.
"""

import zlib
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3.comm.collectives import Communicator, Transfer
from zero3.comm.order import Listener
from zero3.flat import FlatParameter
from zero3.in_flight import in_flight


class LayerPlace(NamedTuple):
    """
    ## Where a layer stands in a model
    """

    parent: nn.Module
    name: str  # in the parent
    layer: nn.Module
    path: str  # its name in the model
    is_leaf: bool  # of `leaf_classes`


class Together(nn.Module):
    """
    ## Layers that share a unit

    It has the layers as children, by their names in the model. Nobody calls it.
    """

    def __init__(self, places: list[LayerPlace]):
        super().__init__()
        # Not by `add_module`, because such a name may have dots.
        self._modules.update({place.path: place.layer for place in places})
        self.title = f"{places[0].path} to {places[-1].path}"

    def get_submodule(self, target: str) -> nn.Module:
        """
        ### A module in one of the layers, by its name in the model
        """
        for path, layer in self._modules.items():
            if layer is not None and f"{target}.".startswith(f"{path}."):
                return layer.get_submodule(target[len(path) + 1 :])
        return super().get_submodule(target)


def neighbours(places: Iterable[LayerPlace], most_bytes: int, most_numel: float
               ) -> list[list[LayerPlace]]:
    """
    ## Layers that follow each other, and together are small

    * `places` are those of layers, in the order of the model's modules
    * `most_bytes` and `most_numel` are what the layers of a unit may have together

    Returns lists of at least two places.
    """
    found: list[list[LayerPlace]] = [[]]
    params: list[nn.Parameter] = []  # of the layers in the last list
    for place in places:
        own = [*place.layer.parameters()]
        params += own
        numel = sum(p.numel() for p in params)
        if sum(p.nbytes for p in params) > most_bytes or numel > most_numel:
            found.append([])
            params = own
        found[-1].append(place)
    return [each for each in found if len(each) > 1]


def fetch_together(units: Iterable[Any]) -> None:
    """
    ## Unshard several units by one all-gather

    * `units` are `Unit`s of one model. Those that are full already are left alone

    All ranks must call it, with the same units in the same order. A rank sends to each other rank
    its shards of all of them.

    Raises `RuntimeError` if the units are of several models. Ranks with other units get the error
    about ranks that diverged when they wait (I6).
    """
    several = list(dict.fromkeys(units))
    wanted = [unit for unit in several if not unit.is_here and _can_join(unit)]
    if len(wanted) > 1:
        Packed(wanted)
    for unit in several:
        # One that is alone, or cannot be packed.
        unit.fetch_params()


def can_share(comm: Communicator) -> bool:
    """
    ## Whether units with this communicator can share an all-gather
    """
    links = comm.links
    return comm.world_size > 1 and not (links and (links.weights or links.secondary))


def _can_join(unit: Any) -> bool:
    """
    #### Whether a unit's shards can be packed
    """
    return can_share(unit.comm) and all(
        flat.shard.dtype == flat.full.dtype
        and flat.shard.device in (flat.full.device, torch.device("cpu"))
        for flat in unit.flats)


class Packed:
    """
    ## An all-gather that several units share

    Each of them waits for it as for a `Transfer` of its own. There is a packed buffer for each data
    type.
    """

    def __init__(self, units: list[Any]):
        """
        ### Pack the shards of this rank, and start the all-gather

        * `units` are at least two that are not gathered, in the order of packing
        """
        self.comm: Communicator = units[0].comm
        self.listener: Listener = units[0].listener
        units[0].expect(
            all(unit.comm is self.comm for unit in units), "cannot be gathered with these",
            "units of one model", [unit.label for unit in units],
            "call `fetch_together` for each model by itself")
        self.label = f"{units[0].label} and {len(units) - 1} more"
        # Ranks announce a checksum of all units, below all numbers of layers.
        numbers = [unit.layer_idx for unit in units]
        self.layer_idx = -2 - zlib.crc32(str(numbers).encode())
        self.comm.labels[self.layer_idx] = self.label
        # Each flat parameter, and its columns in the packed buffer.
        self.columns: list[tuple[torch.Tensor, torch.Tensor]] = []
        flats = [flat for unit in units for flat in unit.flats]
        with self.comm.on(self.comm.fetch_stream):
            self.buffers = [
                self._pack([flat for flat in flats if flat.full.dtype == dtype])
                for dtype in dict.fromkeys(flat.full.dtype for flat in flats)]
        pairs = [(buffer, self.comm.rows(buffer)[self.comm.rank])
                 for buffer in self.buffers]
        self.transfer: Transfer | None = self.comm.all_gather(self, pairs, exact=False)
        # Then the host waits for the copies, because an optimizer writes to these shards next.
        self.transfer.from_cpu = any(
            flat.shard.device != flat.full.device for flat in flats)
        for unit in units:
            unit.come_with(self)

    def _pack(self, flats: list[FlatParameter]) -> torch.Tensor:
        """
        #### A packed buffer with this rank's row: `(world_size * sum of shard_numel,)`, device

        * `flats` are of one data type
        """
        numels = [len(flat.shard) for flat in flats]
        buffer = flats[0].full.new_empty(self.comm.world_size * sum(numels))
        parts = self.comm.rows(buffer).split(numels, dim=1)
        for i, (flat, part) in enumerate(zip(flats, parts, strict=True)):
            shard = flat.storage.load()
            for following in flats[i + 1 : i + 2]:
                following.storage.read_async()
            part[self.comm.rank].copy_(shard, non_blocking=True)
            flat.storage.release(self.comm.fetch_stream)
            self.columns.append((flat.full, part))
        return buffer

    def wait(self) -> None:
        """
        ### Wait for the all-gather, and copy the columns of all units into their flat parameters

        The first unit to wait does it for all of them, on the compute stream, and frees the packed
        buffers. Raises `RuntimeError` as `Transfer.wait`.
        """
        if self.transfer is None:
            return
        self.transfer.wait()
        self.transfer = None
        for full, columns in self.columns:
            in_flight.resize(full, full.nbytes)
            self.comm.rows(full).copy_(columns)
        self.listener.record(self, "unpacked", sum(full.nbytes for full, _ in self.columns))
        self.columns = []
        self.buffers = []

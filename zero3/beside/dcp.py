r"""
# DCP: checkpoints of `torch.distributed.checkpoint`, from shards

`save_dcp` writes a folder that `torch.distributed.checkpoint` (DCP) loads, and `load_dcp` reads
one. So FSDP2 or plain PyTorch resumes a run of zero3, and the other way round.

DCP cuts a tensor into boxes, with an offset and a size in every dimension. A shard is a range of a
flat parameter, and a few boxes make it up. **A layer on two ranks** has a weight of $2 \times 3$
and a bias of 2. Rank 0 has the weight's elements from 0 to 4, rank 1 the last two:

| | offset | size | elements |
|---|---|---|---|
| rank 0 | (0, 0) | (1, 3) | 0 1 2 |
| rank 0 | (1, 0) | (1, 1) | 3 |
| rank 1 | (1, 1) | (1, 2) | 4 5 |

In each dimension but the first a row may be incomplete at either end of the range:

$$\text{boxes of a range in } n \text{ dimensions} \le 2n - 1$$

The keys are those of torch's `get_state_dict`: `model.NAME` is the fp32 master, and
`optim.state.NAME.exp_avg` a moment. No rank has more than its shards, and one box or stored tensor:

| | here | FSDP2 and plain PyTorch |
|---|---|---|
| write | `save_dcp(folder, model, optimizer)` | `dcp.save({"model": m, "optim": o}, ...)` |
| read | `load_dcp(folder, model, optimizer)` | `dcp.load(state, ...)`, then `set_state_dict` |

**Run this**: the program for FSDP2 in [Use it in your loop](../../docs/loop.md).

**Not covered, and what that costs**: DCP has no checksums, and its writer does not replace an older
checkpoint as a whole, so each one needs a folder of its own. torch reads a stored tensor as a
whole: a tensor that one process wrote is in the memory of each rank that has a part of it, one at a
time, and up to $2n - 1$ times. Random numbers are not saved, and of buffers those of the first
rank. Options of param groups are read as `get_state_dict` writes them; after
`flatten_optimizer_state_dict=True` this optimizer keeps its own. Before the first step there are no
moments, and then torch misses them. torch looks for the options of a param group by its number, so
groups of several classes need the same order there. Split weights of tensor parallelism are read
and not written.
"""

import io
import math
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from zero3.checkpoint.entries import NOT_SAVED, Entries
from zero3.checkpoint.formats import DcpFolder, dcp_state, flat_entry, name_and_key
from zero3.checkpoint.reader import CheckpointReader, Listing, Param, encode, errors_name
from zero3.checkpoint.save_load import all_here, load_from
from zero3.comm.parts import inside, length
from zero3.flat import in_flight
from zero3.offload.tensors import Broken
from zero3.optimizer.states import Here
from zero3.whole_model.materialise import agreed


def save_dcp(folder: str | Path,
             model: nn.Module,
             optimizer: torch.optim.Optimizer | None = None,
             extra: dict[str, object] | None = None) -> None:
    """
    ## Write a folder that FSDP2 and plain PyTorch load

    All ranks call this with the same arguments, between a step and the next backward pass.

    * `folder` has no checkpoint yet
    * `model` and `optimizer` are as for `zero3.save`
    * `extra` is whatever else `torch.distributed.checkpoint.save` takes. `dcp.load` reads it:
      `state = {"step": 0}; dcp.load(state, checkpoint_id=folder)`

    Raises `RuntimeError` on all ranks if the model is on some of the ranks only, if its weights are
    split, or if the folder has a checkpoint, and torch's `CheckpointException` if one cannot write.
    """
    entries = all_here("saved", folder, model, optimizer)
    if entries.owners is not None:
        entries.spread = entries.owners.spread()
    with agreed(entries, f"cannot be saved to {folder}", "what DCP can write",
                "see there; nothing has changed"):
        _check(entries, Path(folder), extra or {})
        described = entries.describe()
    listing = Listing({"optimizer": entries.options(), **entries.manifest(described)})
    planner = _Boxes(entries, listing)
    state = {**(extra or {}), **dcp_state(listing, entries.replicated)}
    # Without copies ahead: their order would be by size, and a shard in a file be read many times.
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    with planner.open:
        dcp.save(state, storage_writer=writer, planner=planner)


def _check(entries: Entries,
           folder: Path,
           extra: dict[str, object]) -> None:
    """
    #### Refuse what cannot be written
    """
    entries.expect(not (folder / ".metadata").exists(), f"cannot be saved to {folder}", "a folder "
                   "without a checkpoint", "one of DCP's", "choose another folder")
    ours = {"model", "optim"} & extra.keys()
    entries.expect(not ours, "would lose a part of `extra`", "other names in it", sorted(ours),
                   "rename it")
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    entries.expect(len(entries.comm.ranks) == ranks, "cannot be written by DCP", "a model on all "
                   f"{ranks} ranks", f"one on ranks {[*entries.comm.ranks]}", "take `zero3.save`")
    split = [own.names[0] for own in entries.params if own.part]
    entries.expect(not split, "cannot be written by DCP", "whole weights", f"parts of {split[:3]}, "
                   "because of tensor parallelism", "take `zero3.save`")


class _Boxes(dcp.DefaultSavePlanner):
    """
    ## DCP's planner, which writes a rank's shards as boxes
    """

    def __init__(self, entries: Entries, listing: Listing):
        super().__init__()
        self.entries = entries
        self.listing = listing
        # This rank's flat parameters, by their numbers in the listing.
        self.own = dict(zip(
            (i for i, flat in enumerate(listing.flats) if flat["place"] == entries.place),
            entries.flats,
            strict=True))
        # Where the values of each box are: the number of the flat parameter, the key, and the range
        # of the shard; and the size of the box.
        self.places: dict[MetadataIndex, tuple[int, str, slice, torch.Size]] = {}
        # By its number, the flat parameter whose states are in memory until the next one is needed.
        self.open = ExitStack()
        self.here: dict[int, list[Here]] = {}
        self.written = torch.empty(0, device="cpu")

    def create_local_plan(self) -> SavePlan:
        """
        ### List the boxes of this rank, one flat parameter after the other
        """
        plan = super().create_local_plan()
        self.plan = replace(plan, items=sorted(
            (box for item in plan.items for box in self._boxes(item)),
            key=lambda item: self.places.get(item.index, (-1,))[0]))
        return self.plan

    def _boxes(self, item: WriteItem) -> list[WriteItem]:
        """
        #### The boxes of a tensor in this rank's shard
        """
        dcp_key = item.index.fqn
        if not getattr(self.state_dict[dcp_key], "is_meta", False):
            # Every rank has the whole, and the first one writes it.
            return [item] if self.entries.comm.rank == 0 else []
        assert item.tensor_data, "it is a tensor"
        name, key = name_and_key(self.mappings[dcp_key])
        param = self.listing.by_name[name]
        if param.flat not in self.own:
            # It is at another place in the pipeline.
            return []
        flat = self.own[param.flat]
        slot = flat.parameter.slots[self.listing.flats[param.flat]["params"].index(param.entry)]
        first = self.entries.comm.rank * len(flat.parameter.shard)
        shard = slice(first, first + len(flat.parameter.shard))
        tensor = slice(slot.offset, slot.end)
        # The elements that are in both: a range of the tensor, which begins here in the shard.
        part = inside(tensor, shard)
        at = inside(shard, tensor).start
        items = []
        for chunk in boxes(tuple(slot.view.shape), part.start, part.stop):
            index = MetadataIndex(dcp_key, chunk.offsets)
            where = slice(at, at + math.prod(chunk.sizes))
            self.places[index] = (param.flat, key, where, chunk.sizes)
            items.append(WriteItem(
                index,
                WriteItemType.SHARD,
                tensor_data=replace(item.tensor_data, chunk=chunk)))
            at = where.stop
        return items

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """
        ### The values of a box, when torch's writer gets to it
        """
        if write_item.index not in self.places:
            return super().resolve_data(write_item)
        number, key, where, sizes = self.places[write_item.index]
        flat = self.own[number]
        if number not in self.here:
            self.open.close()
            self.here = {number: self.open.enter_context(self.entries.here(flat))}
        # The writer keeps a reference to all that it has written, so free the memory.
        in_flight.free(self.written)
        dtype = self.state_dict[write_item.index.fqn].dtype
        self.written = torch.empty(length(where), dtype=dtype, device="cpu")
        # A box may begin in one piece of the optimizer's and end in another.
        for cut, values in self.entries.values(flat, key, dtype, self.here[number]):
            self.written[inside(where, cut)] = values[inside(cut, where)]
        return self.written.view(sizes)


def boxes(shape: tuple[int, ...],
          begin: int,
          end: int) -> list[ChunkStorageMetadata]:
    """
    ## Cut a range of elements of a tensor, counted row by row, into boxes

    The boxes follow each other in the range.
    """
    found = []
    dims = len(shape)
    # A tensor without dimensions has one element.
    shape = shape or (1,)
    # The elements of one row, in each dimension.
    rows = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    while begin < end:
        # The outermost dimension in which a complete row begins here.
        dim = next(dim for dim, numel in enumerate(rows)
                   if begin % numel == 0 and begin + numel <= end)
        offsets = [begin // numel % size for numel, size in zip(rows, shape, strict=True)]
        count = min((end - begin) // rows[dim], shape[dim] - offsets[dim])
        sizes = [1] * dim + [count, *shape[dim + 1 :]]
        found.append(ChunkStorageMetadata(
            torch.Size(offsets[:dims]),
            torch.Size(sizes[:dims])))
        begin += count * rows[dim]
    return found


# ------------------------------------------------------------------------------------------- load


def load_dcp(folder: str | Path,
             model: nn.Module,
             optimizer: torch.optim.Optimizer | None = None) -> None:
    """
    ## Read a folder that FSDP2, plain PyTorch or `save_dcp` has written

    All ranks call this with the same arguments, between steps.

    * `folder` has a state dict with `model` and `optim`, at the top or inside of another key
    * `model` and `optimizer` are as for `zero3.load`

    Raises `RuntimeError` on all ranks if a tensor is missing, damaged or of another shape. Nothing
    has changed then.
    """
    load_from(Path(folder), all_here("loaded", folder, model, optimizer), DcpCheckpoint)


class DcpCheckpoint(CheckpointReader):
    """
    ## Read a folder of DCP's as if it were a checkpoint of ours
    """

    def __init__(self, folder: Path):
        """
        ### Read the list of tensors, and the options of param groups
        """
        self.dcp = DcpFolder(folder)
        # Files of ours would have random numbers.
        self.files = []
        options_of = self.dcp.read_all(self.dcp.options, "an option of the optimizer")
        groups = [options_of[i] for i in sorted(options_of, key=int)]
        found = {name: i
                 for i, group in enumerate(groups)
                 for name in group.get("params", ())}
        options = [encode({key: value for key, value in group.items() if key not in NOT_SAVED},
                          "param group") for group in groups]
        Listing.__init__(self, {
            "step": 0,
            "world_size": 1,
            "places": 1,
            "replicated": {},
            "extra": None,
            # DCP does not have the class of the optimizer.
            "optimizer": {"class": "", "groups": options, "scale": {}} if options else None,
            "flats": [
                flat_entry(name,
                           keys,
                           self.dcp.scalars.get(name, {}),
                           found.get(name))
                for name, keys in self.dcp.tensors.items()]})

    def read(self, param: Param,
             key: str,
             begin: int,
             end: int) -> torch.Tensor:
        """
        ### Read elements of a parameter or of one of its moments, box by box
        """
        with errors_name(f"`{param.name}`, its {key}"):
            dcp_key = self.dcp.keys[param.name, key]
            entry = self.dcp.entries[dcp_key]
            values = torch.empty(end - begin, dtype=entry.properties.dtype, device="cpu")
            chunks = boxes(param.shape, begin, end)
            parts = values.split([math.prod(chunk.sizes) for chunk in chunks])
            for chunk, part in zip(chunks, parts, strict=True):
                items = create_read_items_for_chunk_list(dcp_key, entry, [chunk])
                Broken.unless(sum(math.prod(item.lengths) for item in items) == len(part),
                              "some elements are in no file")
                planner = dcp.DefaultLoadPlanner()
                planner.state_dict = {dcp_key: part.view(chunk.sizes)}
                # The box alone is there, so its offset in the tensor does not count.
                items = [replace(item, dest_index=MetadataIndex(dcp_key)) for item in items]
                self.dcp.reader.read_data(LoadPlan(items), planner).wait()
        return values

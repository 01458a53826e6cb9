r"""
# Three weights on two ranks

`record` runs the example of the book with the library, and notes what the memory of each rank
contains at each stage of the life of a layer.

The layer is `nn.Linear(2, 1)`, with the weight (1, 2) and the bias 3. So it has two parameters and
three numbers. Each rank computes the loss $\frac{1}{2} \sum (y - t)^2$ on two rows of its own:

| | $x$ | target $t$ | output $y$ | error $y - t$ | gradient of weight | of bias |
|---|---|---|---|---|---|---|
| rank 0 | 1 0 | 2 | 4 | 2 | 2 0 | 2 |
| | 0 1 | 1 | 5 | 4 | 0 4 | 4 |
| | | | | **sum** | **2 4** | **6** |
| rank 1 | 2 0 | 3 | 5 | 2 | 4 0 | 2 |
| | 0 1 | 5 | 5 | 0 | 0 0 | 0 |
| | | | | **sum** | **4 0** | **2** |

The mean of the two ranks' gradients is (3, 2) for the weight and 4 for the bias. SGD with a rate of
0.1 changes the weight to (0.7, 1.8) and the bias to 2.6:

$$w \leftarrow w - \eta\, \frac{1}{N} \sum_{r=0}^{N-1} g_r$$

SGD has a momentum of 0.9, so that there is an optimizer state to see. In the first step the
momentum is the gradient itself, so it does not change the update.

`Watched` is a `Zero3Layer` that notes its memory after each of its own methods, so the stages are
those of a real step. A *box* is one element in memory, four bytes. The boxes of a stage add up to
the bytes that the distinct storages have, or `record` raises an error. `boxes.py` draws them.

**Run this**: `python -m docs.example` prints the boxes of each stage.

**Not covered, and what that costs**: temporary memory between two stages. For instance, autograd's
own gradient of a parameter is freed as soon as the flat gradient has a copy of it. On an
accelerator each parameter and each shard is padded to 16 bytes, so the example always runs on the
CPU.
"""

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zero3 import Offload, Zero3Layer, Zero3Optimizer, commit_name, save
from zero3.checkpoint.reader import CheckpointReader, newest
from zero3.estimate.ledger import held_bytes
from zero3.train import launch
from zero3.watch import in_backward

Json = dict[str, Any]

RANKS = 2
RATE = 0.1
MOMENTUM = 0.9
# Rows and targets of each rank.
BATCHES = ((((1.0, 0.0), (0.0, 1.0)), (2.0, 1.0)),
           (((2.0, 0.0), (0.0, 1.0)), (3.0, 5.0)))


# ------------------------------------------------------------------------------------- the example


def linear() -> nn.Linear:
    """
    ## The layer, with the weight (1, 2) and the bias 3
    """
    layer = nn.Linear(2, 1)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, 2.0]]))
        layer.bias.fill_(3.0)
    return layer


def loss(layer: nn.Module, rank: int) -> torch.Tensor:
    """
    ## The loss of a layer on the rows of a rank
    """
    x, target = (torch.tensor(part) for part in BATCHES[rank])
    return 0.5 * (layer(x).flatten() - target).square().sum()


# -------------------------------------------------------------------------------------- the record


def record(timeout_s: float = 120) -> Json:
    """
    ## Run the example on two ranks, in memory and then in files, and save a checkpoint

    | field | contents |
    |---|---|
    | `ranks` | for each rank its stages, by name: the boxes, and their bytes |
    | `files` | the same for a layer whose shards and states rest in files, and the files' bytes |
    | `checkpoint` | the same for the files of a checkpoint, with the names of their parameters |

    Raises `AssertionError` if a rank fails.
    """
    from zero3.train import report  # Here, because it imports matplotlib.

    with tempfile.TemporaryDirectory() as folder:
        ranks = launch.run("docs.example:worker", RANKS, folder, device="cpu",
                           timeout_s=timeout_s)
        checkpoint = in_checkpoint(folder)
    return {"ranks": [stages for stages, _ in ranks], "files": [stages for _, stages in ranks],
            "checkpoint": checkpoint, "world_size": RANKS, "rate": RATE,
            "device": report.device_name(torch.device("cpu")), "torch": torch.__version__,
            "commit": commit_name()}


def worker(folder: str) -> tuple[Json, Json]:
    """
    ## One rank: a step in memory, a checkpoint, and a step from files
    """
    notes = Notes()
    layer = Watched(linear(), notes)
    optimizer = Zero3Optimizer(layer, torch.optim.SGD, lr=RATE, momentum=MOMENTUM, bucket_bytes=0)
    notes.optimizer = optimizer
    loss(layer, dist.get_rank()).backward()
    notes.look("reduced")
    optimizer.step()
    notes.look("step")
    optimizer.zero_grad()
    notes.look("rest")
    save(folder, layer, optimizer, step=1)
    return notes.stages, from_files(folder)


class Notes:
    """
    ## What the memory of this rank contains, stage by stage

    It is a listener too, because a reduce-scatter starts inside of a method.
    """

    def __init__(self) -> None:
        self.stages: dict[str, Json] = {}
        # Set when the layer is built, and when its optimizer is.
        self.layer: Zero3Layer | None = None
        self.optimizer: Zero3Optimizer | None = None

    def add(self, stage: str, tensors: dict[str, torch.Tensor | None],
            here: dict[str, slice] | None = None) -> None:
        """
        ### Note the contents of these tensors, by name

        * `here` is for buffers that receive something: the part of them that has its values
        """
        boxes: dict[str, Json] = {}
        for name, tensor in tensors.items():
            if tensor is None or not tensor.untyped_storage().nbytes():
                continue
            values: list[float | None] = tensor.detach().flatten().tolist()
            if here and name in here:
                known = range(len(values))[here[name]]
                values = [value if i in known else None for i, value in enumerate(values)]
            boxes[name] = {"values": values, "bytes": tensor.untyped_storage().nbytes()}
        self.stages[stage] = {"boxes": boxes, "bytes": sum(b["bytes"] for b in boxes.values())}

    def look(self, stage: str, here: dict[str, slice] | None = None) -> None:
        """
        ### Note everything that the layer and the optimizer hold

        Raises `RuntimeError` if they hold other storages than the ones noted.
        """
        assert self.layer is not None
        flat = self.layer.flats[0]
        # In a reduce the other rank's gradients arrive in the memory of the full parameters.
        full = "receive" if here and "receive" in here else "full"
        self.add(stage, {"shard": flat.shard, full: flat.full, "grad": flat.grad,
                         "reduced": flat.shard.grad, "state": self.momentum()}, here)
        noted = self.stages[stage]["bytes"]
        held = held_bytes(self.layer, self.optimizer)
        if noted != held:
            raise RuntimeError(f"rank {self.layer.comm.rank}, stage `{stage}`: the notes miss "
                               f"memory. Expected: {held} bytes. Got: {noted}. What to do: note "
                               "the other tensors too.")

    def momentum(self) -> torch.Tensor | None:
        """
        ### The optimizer state of this rank's shard; there is none before the first step
        """
        if self.optimizer is None:
            return None
        return next((state["momentum_buffer"] for state in self.optimizer.state.values()), None)

    def record(self, sender: Any, event: str, *args: Any, **kwargs: Any) -> None:
        """
        ### A listener's method: note the reduce-scatter when it starts, and when its sums are there
        """
        numel = len(sender.flats[0].shard)
        other = 1 - sender.comm.rank
        if event == "reduce":
            self.look("reduce", {"receive": slice(0)})
        elif event == "reduced":
            # In the buffer, each rank has a row.
            self.look("sum", {"receive": slice(other * numel, (other + 1) * numel)})


class Watched(Zero3Layer):
    """
    ## A sharded layer that notes its memory after each of its methods

    Each method first does what it does in `Zero3Layer`.
    """

    def __init__(self, module: nn.Linear, notes: Notes):
        """
        ### Note the parameters of the module, and shard it
        """
        self.notes = notes
        self.plain: dict[str, torch.Tensor | None] = {"weight": module.weight, "bias": module.bias}
        notes.add("born", self.plain)
        super().__init__(module, offload=Noting(notes))
        notes.layer = self
        self.listener = notes
        notes.look("shard")

    def _merge_and_pad_params(self, params: list[nn.Parameter]) -> torch.Tensor:
        full = super()._merge_and_pad_params(params)
        self.plain["full"] = full
        self.notes.add("merge", self.plain)
        return full

    def fetch_params(self) -> None:
        super().fetch_params()
        if self._gather is not None:
            numel = len(self.flats[0].shard)
            mine = slice(self.comm.rank * numel, (self.comm.rank + 1) * numel)
            self.notes.look("refetch" if in_backward() else "fetch", {"full": mine})

    def _wait_params(self) -> None:
        arrives = self._gather is not None
        super()._wait_params()
        if arrives:
            self.notes.look("rewhole" if in_backward() else "whole")

    def _cleanup_params(self) -> None:
        was_fetched = self.is_fetched
        super()._cleanup_params()
        if was_fetched:
            self.notes.look("refree" if in_backward() else "free")

    @torch.no_grad()
    def _post_backward_hook(self, flat_index: int, slot_index: int, param: nn.Parameter) -> None:
        # Before the layer has copied and freed the gradient.
        name = self.flats[flat_index].slots[slot_index].names[0]
        self.notes.add(f"{name}.grad", {name: param.grad})
        super()._post_backward_hook(flat_index, slot_index, param)

    def _backup_grads(self) -> None:
        if self.flats[0].grad is not None:
            # All gradients are in the flat one now, and the layer is still whole.
            self.notes.look("grads")
        super()._backup_grads()


class Noting(Offload):
    """
    ## A place for shards on the device, that notes when a shard arrives
    """

    def __init__(self, notes: Notes):
        super().__init__()
        self.notes = notes

    def shard(self, owner: Any, values: torch.Tensor, trains: bool) -> Any:
        """
        ### Note the shard right after the scatter, while the full parameters still exist
        """
        self.notes.add("scatter", {"shard": values, **owner.plain})
        return super().shard(owner, values, trains)


# --------------------------------------------------------------------------- files and checkpoints


def from_files(folder: str) -> dict[str, Json]:
    """
    ## The same step, with shards and optimizer states in files

    The buffers that all files of a rank share are not noted.
    """
    # Past the page cache, a file could only be read in blocks.
    offload = Offload("nvme", folder=folder, direct=False)
    layer = Zero3Layer(linear(), offload=offload)
    optimizer = Zero3Optimizer(layer, torch.optim.SGD, offload=offload, lr=RATE, momentum=MOMENTUM,
                               bucket_bytes=0)
    stages = {"file rest": in_files(layer, optimizer)}
    layer.fetch_params()
    layer._wait_params()
    stages["file whole"] = in_files(layer, optimizer)
    layer._cleanup_params()
    loss(layer, dist.get_rank()).backward()
    optimizer.step()
    stages["file step"] = in_files(layer, optimizer)
    return stages


def in_files(layer: Zero3Layer, optimizer: Zero3Optimizer) -> Json:
    """
    ## What the files of a layer contain now, and its full parameters in memory
    """
    flat = layer.flats[0]
    shard: Any = flat.storage
    states: Any = optimizer.shard_states[0].in_file
    shard.load()  # waits until everything is written
    shard.release()
    boxes = {"shard": _read(shard, "shard")}
    if optimizer.state:
        boxes["state"] = _read(states, "momentum_buffer")
    file_bytes = sum(box["bytes"] for box in boxes.values())
    full_bytes = flat.full.untyped_storage().nbytes()
    if full_bytes:
        boxes["full"] = {"values": flat.full.tolist(), "bytes": full_bytes}
    return {"boxes": boxes, "bytes": full_bytes, "file_bytes": file_bytes}


def _read(stored: Any, name: str) -> Json:
    offset, nbytes, dtype = stored.where[name]
    data = bytearray(os.pread(stored.file.fd, nbytes, offset))
    return {"values": torch.frombuffer(data, dtype=dtype).tolist(), "bytes": nbytes}


def in_checkpoint(folder: str) -> list[Json]:
    """
    ## What the checkpoint has in the file of each rank, and the names of the parameters there
    """
    reader = CheckpointReader(newest(folder))
    ranks = []
    for rank, file in enumerate(reader.files):
        boxes = {}
        for name, key in (("shard", "param"), ("state", "momentum_buffer")):
            saved = file.read(f"0.{key}")
            boxes[name] = {"values": saved.tolist(), "bytes": saved.nbytes}
        numel = len(boxes["shard"]["values"])
        # Each parameter that has an element in this file.
        names = [param.name for param in reader.params
                 if param.entry["offset"] // numel == rank
                 or (param.entry["offset"] + param.numel - 1) // numel == rank]
        ranks.append({"saved": {"boxes": boxes, "bytes": 0, "names": names,
                                "file_bytes": sum(box["bytes"] for box in boxes.values())}})
    return ranks


def main() -> None:
    """
    ## Print the boxes of each stage
    """
    recorded = record()
    for part in ("ranks", "files", "checkpoint"):
        for stage in recorded[part][0]:
            for rank, stages in enumerate(recorded[part]):
                told = "  ".join(f"{name} {box['values']}"
                                 for name, box in stages[stage]["boxes"].items())
                print(f"{stage:12} rank {rank} {stages[stage]['bytes']:3} bytes  {told}")


if __name__ == "__main__":
    launch.preload("zero3.optimizer.stage3", "zero3.checkpoint.save_load")
    main()

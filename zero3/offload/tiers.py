r"""
# Offload: shards in CPU memory or in files

`Offload` says where shards rest: in memory, in files (`InFile`) or encoded (`Encoded`).

In a training step a rank needs a shard twice to gather it, and once to update it, and the optimizer
states once. In between they can rest in cheaper memory. Such a place is a *tier*: the device that
computes; CPU memory, pinned so that a GPU copies it while it computes; or files on an NVMe disk.

**A layer of three weights on two ranks**, with shards in files. Rank 0 keeps the weights 1 and 2:

| | its file | a buffer | the flat parameter |
|---|---|---|---|
| rest | 1 2 | | |
| read, when layer $\ell - 1$ is gathered | 1 2 | 1 2 | |
| copy, then all-gather | 1 2 | | 1 2 3 0 |
| free | 1 2 | | |
| the optimizer reads, steps and writes | 0.7 1.8 | 0.7 1.8 | |

All files of a rank share a few buffers: two for shards, and by default five for optimizer states.
If each layer has one flat parameter, and apart from rounding up to blocks of the disk:

$$\text{buffers} = 2 \cdot \text{largest shard} \; + \; 5 \cdot \text{largest states of a shard}$$

A frozen shard may rest in 8 or 4 bits: in 8 bits it takes 52 % of its bytes in bf16, and in 4 bits
less than a seventh of those in fp32. `Zero3Layer(module, offload=Offload(frozen=Int4()))` asks for
it.

`formulas.py` has the estimates of [ZeRO-Offload](https://arxiv.org/abs/2101.06840) and
[ZeRO-Infinity](https://arxiv.org/abs/2104.07857): which bandwidth is enough,
and which tier a model needs.

**Run this**: `python -m tests.bench.disk --folder DIR` measures a disk both ways; `make train
ARGS="--offload-params nvme --offload-optimizer nvme"` trains from files.

**Not covered, and what that costs**: each shard in files has a file of its own, which stays open.
So there are at most as many shards as the system's hard limit on open files allows (`ulimit -Hn`),
minus a few. An optimizer of torch's cannot step a shard in a file, because it has no elements;
`Zero3Optimizer` can. Layers are allocated and freed all the time, and glibc keeps some of that
memory in pieces; `MALLOC_MMAP_THRESHOLD_=131072` in the environment makes it give all back, at some
cost in speed. On an accelerator, gradients in CPU memory are in torch's pinned memory, which rounds
each up to a power of two: up to twice the bytes that are predicted.

With `frozen=` all frozen floats of a layer are encoded, also its biases and norms; wrap those in a
layer with another `Offload`. Other numbers rest as they are. The all-gather sends the decoded
shard, or encodes it once more if `Links` says so: nothing is lost then only if both encodings are
the same. In another number of shards the blocks begin elsewhere, so loading a checkpoint there
rounds once more.
"""

import mmap
import os
import sys
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from zero3.comm.encodings import Encoding, is_encoding
from zero3.flat import CURE, Storage, StorageFactory, in_flight
from zero3.guards.checks import Guarded, expect, whole
from zero3.guards.freed import FreedParameter
from zero3.guards.room import check_room, check_step
from zero3.offload.disk import ALIGN_BYTES
from zero3.offload.in_file import Buffers, InFile

TIERS = ("device", "cpu", "nvme")
_SETS_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__set__


@dataclass(eq=False)
class Offload(StorageFactory):
    """
    ## A tier, and the memory and files in use there

    Pass one object to all layers of a model, so that they share its buffers. Whatever takes an
    `Offload` also takes the name of a tier that needs no folder: `offload="cpu"`.

    * `tier` is "device", "cpu" or "nvme"
    * `folder` is where files go, on a disk of this machine; each rank has files of its own
    * `direct` reads and writes past the page cache, if the file system can
    * `queue_depth` is the number of parallel requests, one thread each; parameters, states and
      activations have so many each
    * `block_bytes` is the size of a request
    * `buffers` is how many shards' optimizer states are in memory at once
    * `fraction` of the optimizer states of each shard rest there, and the rest on the device; see
      `optimizer/states.py`
    * `frozen` encodes the shards of parameters that are frozen when their layer is wrapped:
      `Int8()`, `Int4()` or an `Encoding` of your own. Not for files

    Raises `ValueError` if these do not fit together. ZeRO-Infinity, section 5. Keeps I8.
    """

    tier: str = "device"
    folder: str | os.PathLike | None = None
    direct: bool = True
    queue_depth: int = 4
    block_bytes: int = 8 << 20
    buffers: int = 5
    fraction: float = 1.0
    frozen: Encoding | None = None
    # The buffers in use, of "params", "states" and "activations".
    in_use: dict[str, Buffers] = field(default_factory=dict, init=False, repr=False)
    # Weakly, because one object may serve several models after each other.
    encoded: "weakref.WeakSet[Encoded]" = field(default_factory=weakref.WeakSet, init=False,
                                                repr=False)

    def __post_init__(self) -> None:
        has_folder = isinstance(self.folder, (str, os.PathLike)) and bool(os.fspath(self.folder))
        fits_tier = has_folder if self.tier == "nvme" else self.folder is None
        # A request is a thread, and has a block of a buffer; the system moves less than 2 GiB in
        # one. There is a buffer to read into, one to step, and one to write from.
        for name, least, most in (("queue_depth", 1, 256), ("buffers", 3, 1024),
                                  ("block_bytes", ALIGN_BYTES, 1 << 30)):
            value = getattr(self, name)
            expect(whole(value, least, most), "Offload",
                   f"`{name}`, a whole number from {least} to {most}", repr(value), "pass one")
        for good, expected, got, cure in (
            (self.block_bytes % ALIGN_BYTES == 0, f"`block_bytes`, a multiple of {ALIGN_BYTES}",
             repr(self.block_bytes), "pass such a number"),
            (self.tier in TIERS, f"a tier of {TIERS}", repr(self.tier), "pass one of them"),
            (fits_tier, "a folder with the nvme tier, and with no other",
             f"tier {self.tier!r}, folder {self.folder!r}",
             '`Offload("nvme", folder="/mnt/nvme")`, or leave the folder out'),
            (isinstance(self.fraction, (int, float)) and 0 <= self.fraction <= 1,
             "`fraction`, a number from 0 to 1", repr(self.fraction), "pass such a number"),
            (self.fraction == 1 or self.tier != "device", "`fraction` with the cpu or nvme tier",
             f"tier {self.tier!r}", '`Offload("cpu", fraction=0.5)`, for instance'),
            (isinstance(self.direct, bool), "`direct`, True or False", repr(self.direct),
             "pass one of the two"),
            (self.frozen is None or is_encoding(self.frozen), "`frozen`, an encoding",
             repr(self.frozen), "pass `Int8()` or `Int4()`, or leave it out"),
            (self.frozen is None or self.tier != "nvme", "`frozen` with the device or the cpu tier",
             f"tier {self.tier!r}", '`Offload("cpu", frozen=Int8())` for the layers with frozen '
             "weights, and another `Offload` for the rest"),
        ):
            expect(good, "Offload", expected, got, cure)

    @classmethod
    def of(cls, offload: "Offload | str | None") -> "Offload":
        """
        ### Turn the argument `offload` of a layer into an `Offload`

        * `offload` is an `Offload`, the name of a tier, or `None`, which is the device

        Raises `ValueError` for anything else, and for "nvme", because files need a folder.
        """
        if isinstance(offload, Offload):
            return offload
        return cls("device" if offload is None else offload)

    def shard(self, owner: Guarded,
              values: torch.Tensor,
              trains: bool) -> Storage:
        """
        ### Put a layer's shard where it rests

        * `values` are `(shard_numel,)`, on the device

        All ranks call it alike. Raises `RuntimeError` if memory or disk are too small, if a frozen
        weight that is to be encoded is not finite, or if `fraction` is below 1.
        """
        check_step(owner, values, self.cure(owner.device))
        owner.expect(self.fraction == 1, "cannot rest in parts", "an `Offload` without `fraction`",
                     self.fraction, "pass it to `Zero3Optimizer`, whose states it divides")
        cpu = torch.device("cpu")
        if self.frozen is not None and not trains and values.is_floating_point():
            if self.tier == "cpu":
                self.check(owner, "its encoded shard", self.frozen.nbytes(len(values)), cpu)
            encoded = Encoded(self.frozen, self.tier, owner, values)
            self.encoded.add(encoded)
            return encoded
        tier = self.place(values.nbytes)
        if tier == "nvme":
            # One buffer is read into while another is copied from. A layer may have several shards.
            buffers = self.buffers_for("params", owner, max(2, len(owner.flats) + 1))
            storage = InFile(buffers, owner, {"shard": values})
            storage.param = FreedParameter.of_shard(
                owner, torch.empty_like(values, device="cpu"), trains, "it rests in a file: "
                "look at it in `full_params()`, and step it with `Zero3Optimizer`")
            storage.replace(values)
            return storage
        if tier == "cpu" and owner.device.type != "cpu":
            self.check(owner, "its shard", values.nbytes, cpu)
            values = copy_to(cpu, values, values.dtype, owner.device)
        return Storage(nn.Parameter(values, trains), tier)

    def place(self, nbytes: int) -> str:
        """
        ### The tier for `nbytes` of shards or states: a file has at least one byte
        """
        return "cpu" if self.tier == "nvme" and nbytes == 0 else self.tier

    def buffers_for(self, purpose: str,
                    owner: Guarded,
                    number: int) -> Buffers:
        """
        ### The buffers for one purpose, at least `number` of them, made when they are needed first

        "params" and "states" have their own, because backward reads shards while it writes
        gradients. "activations" have files and threads, and no buffers.
        """
        if purpose not in self.in_use:
            self.in_use[purpose] = Buffers(
                self.folder,
                self.direct,
                self.queue_depth,
                self.block_bytes,
                partial(pinned, owner.device),
                owner,
            )
        buffers = self.in_use[purpose]
        buffers.number = max(buffers.number, number)
        return buffers

    def memory(self) -> list[torch.Tensor]:
        """
        ### The memory of all buffers, and of encoded shards
        """
        buffers = [memory for each in self.in_use.values() for memory in each.memory]
        return [*buffers, *(tensor for storage in self.encoded for tensor in storage.memory())]

    def disk_bytes(self) -> int:
        """
        ### Bytes of the files of all buffers
        """
        return sum(os.fstat(file.fd).st_size
                   for buffers in self.in_use.values() for file in buffers.files)

    def check(self, owner: Any,
              what: str,
              nbytes: int,
              at: torch.device) -> None:
        """
        ### Look whether there is memory, before it is taken

        Each rank asks for itself: ranks that share a machine may pass, and still be too many.
        Raises `RuntimeError` on all ranks if one has too little, and says where shards could rest.
        """
        check_room(owner, what, nbytes, at, self.cure(at))

    def cure(self, at: torch.device) -> str:
        """
        ### What to do if a device has no room
        """
        if self.tier == "nvme" or (self.tier == "cpu" and at.type != "cpu"):
            # A layer that computes is on the device, wherever its shards rest.
            return ("more ranks, smaller layers or more memory; everything else has already been "
                    "offloaded")
        return CURE


class Encoded(Storage):
    r"""
    ## A frozen shard that rests encoded

    It is decoded whenever its layer is gathered. **A layer of four frozen weights on one rank**,
    with the numbers of `encodings.py`:

    | | rests | decoded | the flat parameter |
    |---|---|---|---|
    | wrap: encode | 4 bytes | | |
    | *unshard*: decode | 4 bytes | 0.5 −1.5 3.5 0 | |
    | copy, then all-gather | 4 bytes | | 0.5 −1.5 3.5 0 |
    | *reshard* | 4 bytes | | |

    In fp32 the weights take 16 bytes; here two bytes have four codes, and two the scale. The
    weights were 0.6, −1.3, 3.5 and 0 before. From wrapping on, 0.5 and −1.5 *are* the weights, and
    encode to the same bytes again.

    A row of elements takes `nbytes` when encoded. If a layer has $F_\ell$ frozen parameters, a rank
    keeps

    $$\sum_\ell \text{nbytes}\left(\left\lceil \frac{F_\ell}{N} \right\rceil\right)$$

    bytes. While a layer is gathered, its decoded shard comes on top. The idea is from
    [QLoRA](https://arxiv.org/abs/2305.14314), section 3.
    """

    def __init__(self, encoding: Encoding,
                 tier: str,
                 owner: Guarded,
                 values: torch.Tensor):
        """
        ### Encode a shard

        * `tier` is "device" or "cpu", where the code rests
        * `values` are `(shard_numel,)`, on the device of the layer, `owner`

        All ranks call it alike. Raises `RuntimeError` on all ranks if a weight is infinite or NaN
        afterwards.
        """
        self.encoding = encoding
        self.tier = tier
        # Weakly, because the layer refers to this object. A chain replaces its communicator later.
        self.owner = weakref.proxy(owner)
        self.device = owner.device
        at = torch.device("cpu") if tier == "cpu" else self.device
        # (nbytes,) uint8
        self.code = copy_to(at, self._encode(values), torch.uint8, self.device)
        self.decoded: torch.Tensor | None = None  # (shard_numel,), device
        self.param = FrozenShard.of_shard(
            owner, torch.empty(len(values), dtype=values.dtype, device=at), False,
            "it rests encoded: look at it in `full_params()`")
        problem = "" if bool(self.load().isfinite().all()) else "an infinity or a NaN"
        self.release()
        owner.comm.agree(owner, "cannot keep its frozen weights encoded", "finite numbers",
                         problem, "wrap this layer with an `Offload` "
                         "without `frozen=`, or look at its weights")

    def memory(self) -> list[torch.Tensor]:
        """
        ### The code, and the decoded shard while there is one
        """
        return [t for t in (self.code, self.decoded) if t is not None]

    @torch.no_grad()
    def load(self) -> torch.Tensor:
        """
        ### Decode the shard: `(shard_numel,)`, on the device

        On the fetch stream, which copies it next, so the memory can be freed without a wait.
        """
        if self.decoded is None:
            comm = self.owner.comm
            with comm.on(comm.fetch_stream):
                # A copy, if the code rests in CPU memory.
                near = self.code.to(self.device, non_blocking=True)
                numel = len(self.param)
                values = torch.empty(numel, dtype=self.param.dtype, device=self.device)
                self.decoded = values.copy_(self.encoding.decode(near.unsqueeze(0), numel)[0])
                done = comm.event()
                done.record()
            # The compute stream waits for the decoding, because the shard may be read or written
            # there.
            comm.current_stream().wait_event(done)
        return self.decoded

    @torch.no_grad()
    def save(self) -> None:
        """
        ### Encode the decoded shard again
        """
        assert self.decoded is not None
        self.code.copy_(self._encode(self.decoded))
        torch.autograd.graph.increment_version(self.param)
        self.release()

    def release(self, stream: torch.Stream | None = None) -> None:
        """
        ### Free the decoded shard
        """
        if self.decoded is not None:
            # The transfer in flight still refers to it, and ends one layer later.
            in_flight.free(self.decoded)
        self.decoded = None

    @torch.no_grad()
    def _encode(self, values: torch.Tensor) -> torch.Tensor:
        """
        #### The code of these values: `(shard_numel,)` to `(nbytes,)` uint8
        """
        return self.encoding.encode(values.unsqueeze(0))[0]


class FrozenShard(FreedParameter):
    """
    ## The parameter of a shard that rests encoded
    """

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (_SETS_REQUIRES_GRAD, torch.Tensor.requires_grad_):
            # `requires_grad_()` alone means True.
            trains = [*args[1:], *kwargs.values(), True][0]
            cls.owner().expect(
                not trains, "cannot train its frozen weights", "weights that stay frozen, because "
                "they rest encoded", "`requires_grad` set to True", "unfreeze them before the "
                "layer is wrapped, or wrap it without `frozen=` in its `Offload`")
        return super().__torch_function__(func, types, args, kwargs)


# ---------------------------------------------------------------------------------- pinned memory


def copy_to(at: torch.device,
            values: torch.Tensor,
            dtype: torch.dtype,
            device: torch.device) -> torch.Tensor:
    """
    ## A copy, `(n,)`, on another device or of another data type

    In CPU memory it is pinned if `device` is an accelerator.
    """
    if at.type == "cpu":
        return pinned(device, len(values) * dtype.itemsize).view(dtype).copy_(values)
    return torch.empty(len(values), dtype=dtype, device=at).copy_(values)


class _Pages(mmap.mmap):
    """
    ## Memory pages that an accelerator may read and write by itself
    """

    registered: Any = None  # the device's module, the device, and the address

    def __del__(self) -> None:
        if self.registered is not None and not sys.is_finalizing():
            backend, device, address = self.registered
            # It may be collected in a thread that has chosen no device.
            with backend.device(device):
                # A copy may still be in flight.
                backend.synchronize()
                backend.cudart().cudaHostUnregister(address)


def pinned(device: torch.device, nbytes: int) -> torch.Tensor:
    """
    ## Pinned CPU memory for a device: `(nbytes,)` uint8

    An accelerator copies from ordinary CPU memory only while the host waits, because the system may
    move it. *Pinned* memory stays where it is, so a copy overlaps computation. Pinning is slow, so
    it is for memory that stays.

    Exactly as much as is asked for: torch rounds its own pinned memory up to a power of two, so a
    shard of 1.1 GiB would take 2 GiB. Here the system gives pages, and `cudaHostRegister` tells the
    device about them. A device without this call gets torch's pinned memory, and the CPU itself
    gets memory that is not pinned.
    """
    backend: Any = torch.get_device_module(device)
    if nbytes and hasattr(backend, "cudart"):
        pages = _Pages(-1, nbytes)
        memory = torch.frombuffer(pages, dtype=torch.uint8)
        address = memory.data_ptr()
        if int(backend.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
            pages.registered = backend, device, address
            return memory
    return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=device.type != "cpu")

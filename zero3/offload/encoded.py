r"""
# Frozen weights that rest encoded

`Encoded` keeps a frozen shard in 8 or 4 bits, and decodes it whenever its layer is gathered.

In 8 bits a shard takes 52 % of its bytes in bf16, and in 4 bits less than a seventh of those in
fp32. `Zero3Layer(module, offload=Offload(frozen=Int4()))` asks for it.

**A layer of four frozen weights on one rank**, with the numbers of `encodings.py`:

| | rests | decoded | the flat parameter |
|---|---|---|---|
| wrap: encode | 4 bytes | | |
| *unshard*: decode | 4 bytes | 0.5 −1.5 3.5 0 | |
| copy, then all-gather | 4 bytes | | 0.5 −1.5 3.5 0 |
| *reshard* | 4 bytes | | |

In fp32 the weights take 16 bytes; here two bytes have four codes, and two the scale. The weights
were 0.6, −1.3, 3.5 and 0 before. From wrapping on, 0.5 and −1.5 *are* the weights, and encode to
the same bytes again.

A row of elements takes `nbytes` when encoded. If a layer has $F_\ell$ frozen parameters, a rank
keeps

$$\sum_\ell \text{nbytes}\left(\left\lceil \frac{F_\ell}{N} \right\rceil\right)$$

bytes. While a layer is gathered, its decoded shard comes on top. The idea is from
[QLoRA](https://arxiv.org/abs/2305.14314), section 3.

**Run this**: `python -m pytest tests/offload/test_encoded.py`.

**Not covered, and what that costs**: all frozen floats of a layer are encoded, also its biases and
norms; wrap those in a layer with another `Offload`. Other numbers rest as they are. The all-gather
sends the decoded shard, or encodes it once more if `Links` says so: nothing is lost then only if
both encodings are the same. In another number of shards the blocks begin elsewhere, so loading a
checkpoint there rounds once more.
"""

import weakref

import torch

from zero3.comm.encodings import Encoding
from zero3.flat import Storage
from zero3.guards.freed import FreedParameter
from zero3.guards.moments import Guarded
from zero3.in_flight import in_flight
from zero3.offload.memory import copy_to

_SETS_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__set__


class Encoded(Storage):
    """
    ## A frozen shard that rests encoded
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

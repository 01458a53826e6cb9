r"""
# Predict: the same bytes from shapes

`predict` says how many bytes a sharded model will hold, send, read and write, before it runs.

A training step is a fixed sequence of events: all-gather a layer, free it, allocate a gradient,
reduce it. The size of each event follows from the shapes of the parameters, their data types and
the number of ranks $N$. So `predict` replays the sequence with numbers in place of tensors, adds
them up, and notes the highest sum. The tests run the same model with a `Ledger` that measures, and
demand equality to the byte.

**Two layers on two ranks.** Layer A has three weights, so its shards have two elements each, one of
them padding; layer B has two weights, and shards of one. In fp32, a rank rests with 12 bytes. This
is a step with plain SGD on the CPU, and the bytes that a rank holds above these 12:

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

The peak is $12 + 48 = 60$ bytes. The rank sends A's shard twice and B's once in all-gathers, and
one share of each gradient: $2 \cdot 8 + 4 + 8 + 4 = 32$ bytes. In general,

$$\text{rest} = \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil \, (b + K t_\ell)
\qquad
\text{sent} = (N-1) \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil
\, (b \, g_\ell + b_g \, t_\ell)$$

Layer $\ell$ has $P_\ell$ parameters. An element has $b$ bytes as a parameter and $b_g$ as a
gradient between ranks, and the optimizer keeps $K$ bytes for it. $t_\ell$ is 1 if the layer trains,
else 0. $g_\ell$ counts its all-gathers: two, but one for the last layer, and one for a layer below
the first that trains. Every micro-batch sends as much again. `Zero3Optimizer` also sends 8 bytes
for each trainable shard, once in a step. In a step in which no rank used some parameter, it sends 8
more for each parameter of that shard.

Shards in files take no memory. They pass through a few buffers instead, and `_Buffers` replays
which states of a shard are still there when they are needed again.

**Nodes, replicas and encodings.** A `Layout` in place of the number of ranks says how the ranks are
grouped and what travels between them (see `layouts.py`). Three things then change. Encoded rows
take memory beside the flat parameter, until they are decoded. With `secondary`, the slices of all
layers pile up in forward, and backward uses them up. And a second collective follows each reduce:
its buffers stay until the next reduce has arrived, and only then the shard gets its gradient.

**Run this**: `make train`; its table holds these numbers against measured ones.

**Not covered, and what that costs**: activations, which do not depend on the sharding; add them
yourself. The numbers are too low or too high for layers outside a `Zero3Sequential`; for parameters
that get no gradient, because their layer then stays full to the end of backward; for a bucket with
two half-precision data types, whose messages count as one; and for a parameter that no step has
used yet, which has no moments, or that this step did not use. With files, they are off if only the
last layer of a chain trains, because the layer below it is then read ahead in vain; and for an
`Offload` with `max_in_cpu` that another model has used before. With `Offload(frozen=...)` all
frozen parameters are taken to be floats, and on an accelerator the copies of codes from CPU memory
are not counted. There, rows that arrive encoded are not counted either: the stream frees them, and
a `Ledger` does not see them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from zero3.comm.encodings import Encoding
from zero3.estimate.formulas import LayerSpec, Part
from zero3.estimate.layouts import Layout, Peers
from zero3.offload.disk import ALIGN_BYTES, whole_blocks
from zero3.offload.tiers import Offload


@dataclass(frozen=True)
class Prediction:
    """
    ## Bytes of one rank
    """

    param_bytes: int  # shards in memory, trainable and frozen
    grad_bytes: int  # gradients of these shards, from backward to `zero_grad()`
    master_bytes: int  # fp32 copies of the trainable shards in half precision
    optimizer_bytes: int  # moments and step counts
    buffer_bytes: int  # buffers of the modules, which are not sharded
    peak_bytes: int  # the highest moment of a step that begins without gradients
    sent_bytes: int  # parameters, gradients and norms that a step sends to other ranks
    messages: int
    order_bytes: int  # announcements, by which ranks check that they run the same order
    between_bytes: int = 0  # those of `sent_bytes` that go to other nodes
    pool_bytes: int = 0  # buffers that files are read into and written from
    disk_bytes: int = 0  # size of the files
    read_bytes: int = 0  # from files, in a step
    written_bytes: int = 0  # to files, in a step

    @property
    def rest_bytes(self) -> int:
        """
        ### Between steps, after `zero_grad()`, in the device's memory and the CPU's
        """
        return (self.param_bytes + self.master_bytes + self.optimizer_bytes + self.buffer_bytes
                + self.pool_bytes)

    def table(self, dtypes: list[str]) -> str:
        """
        ### A line for each kind of bytes

        * `dtypes` are those of the parameters, of the gradients, and of masters and moments

        Lines about files are left out if they would say 0.
        """
        param_dtype, grad_dtype, master_dtype = dtypes
        rows = [("parameters", param_dtype, self.param_bytes),
                ("gradients", grad_dtype, self.grad_bytes),
                ("masters", master_dtype, self.master_bytes),
                ("moments and counts", master_dtype, self.optimizer_bytes),
                ("buffers of modules", "", self.buffer_bytes),
                ("buffers of files", "", self.pool_bytes),
                ("all, with gradients", "", self.rest_bytes + self.grad_bytes),
                ("at the peak of a step", "", self.peak_bytes),
                ("in files", "", self.disk_bytes),
                ("read in a step", "", self.read_bytes),
                ("written in a step", "", self.written_bytes)]
        of_files = ("buffers of files", "in files", "read in a step", "written in a step")
        return "\n".join(f"{name:24}{dtype:20}{nbytes:>16,}" for name, dtype, nbytes in rows
                         if nbytes or name not in of_files)


def predict(
    layers: list[LayerSpec],
    layout: Layout | int,
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
    params_in: Offload | None = None,
    states_in: Offload | None = None,
    play: "Callable[[Step], None] | None" = None,
) -> Prediction:
    r"""
    ## Predict one rank's bytes, in a chain of layers

    * `layout` says how the ranks share the model; a number of ranks stands for one group of them
    * `rank` is the number of this rank's shard. It matters because param groups cut each rank's
      shards in other places
    * `moments` is the number of tensors of the shard's size that the optimizer keeps: 2 for Adam
    * `step_bytes` is the size of the step count that it keeps for each piece of a trainable shard:
      4 for torch's Adam, which counts in fp32
    * `by_messages` says that a reduce-scatter needs a receive buffer as large as the gradients that
      it sends, as it does on the CPU
    * `stage3` says that the optimizer is a `Zero3Optimizer`: masters and moments are at least fp32,
      param groups cut the shards into pieces, and the ranks exchange norms
    * `reduce_bytes` is the size of an element of a gradient between ranks and in the shard; by
      default that of the parameter
    * `micro_batches` make a step; with `no_sync` only the last of them reduces its gradients
    * `bucket_bytes` of full gradients are reduced together
    * `params_in` and `states_in` are the `offload` arguments of the layers and of the optimizer
    * `play(step)` replays the passes of another order than a chain's, such as a pipeline's
    """
    if not isinstance(layout, Layout):
        layout = Layout(layout)
    world_size = layout.shards
    params_in = params_in or Offload()
    states_in = states_in or Offload()
    chain = [StepLayer.of(layer, layout, reduce_bytes, moments, stage3, params_in.frozen)
             for layer in layers if layer.parts]
    shards = [s for layer in chain for s in layer.shards]
    trained = [s for s in shards if s.trains]
    _place(shards, params_in, states_in, one_memory=by_messages)

    step = Step(chain, layout, bucket_bytes, packs=stage3, by_messages=by_messages)
    if play:
        step.arrivals.append([])
        play(step)
    else:
        for i in range(micro_batches):
            step.micro_batch(reduces=not no_sync or i + 1 == micro_batches)
    # A stage of a pipeline may have nothing to train.
    if stage3 and trained:
        # One shard's gradient at a time is copied into the data type of its master.
        widened = [s.master_bytes for s in trained if s.state_width != s.grad_width]
        step.add(max(widened, default=0))
        # The squared norm of each shard's gradient, in fp64. Those of the ranks near this one go on
        # to the ranks across.
        step.send(layout.near, 8 * len(trained), 1)
        step.send(layout.across, layout.ranks * 8 * len(trained), 1)
    read_bytes, written_bytes = _state_traffic(trained, step.arrivals, states_in.buffers)

    in_memory = [s for s in trained if not s.states_in_file]
    pieces = sum(s.part.pieces(world_size, rank) for s in trained) if stage3 else len(trained)
    found = Prediction(
        param_bytes=sum(s.param_bytes for s in shards if not s.in_file),
        grad_bytes=sum(s.grad_bytes for s in in_memory),
        master_bytes=sum(s.master_bytes for s in in_memory if not s.is_master),
        optimizer_bytes=moments * sum(s.master_bytes for s in in_memory) + step_bytes * pieces,
        buffer_bytes=sum(layer.buffer_bytes for layer in layers),
        peak_bytes=0,
        sent_bytes=step.sent_bytes,
        messages=step.messages,
        # Four 8-byte numbers announce each transfer.
        order_bytes=32 * step.transfers,
        between_bytes=step.between_bytes,
        pool_bytes=_pool_bytes(chain, states_in.buffers),
        disk_bytes=sum(s.state_file_bytes for s in trained)
        + sum(s.file_bytes for s in shards if not s.shares_file),
        read_bytes=step.read_bytes + read_bytes,
        written_bytes=written_bytes,
    )
    return replace(found, peak_bytes=found.rest_bytes + step.peak_bytes)


@dataclass(eq=False)
class _Shard:
    """
    ### One rank's shard of a part of a layer, and the bytes that belong to it

    Its optimizer states are a master, from which the parameters are rounded, and moments. The shard
    itself can serve as the master if it has the master's data type.
    """

    part: Part
    numel: int
    grad_width: int  # bytes of an element of its gradient
    state_width: int  # bytes of an element of its master, and of a moment
    moments: int
    encoding: Encoding | None = None  # in which it rests
    tier: str = "device"  # of the parameters: "device", "cpu" or "nvme"
    state_tier: str = "device"
    is_master: bool = False

    def __post_init__(self) -> None:
        self.trains = self.part.trainable and self.numel > 0
        self.row_bytes = self.numel * self.part.element_bytes  # of a full parameter
        self.param_bytes = self.encoding.nbytes(self.numel) if self.encoding else self.row_bytes
        self.grad_bytes = self.numel * self.grad_width * self.part.trainable
        self.master_bytes = self.numel * self.state_width

    @property
    def in_file(self) -> bool:
        return self.tier == "nvme"

    @property
    def states_in_file(self) -> bool:
        return self.state_tier == "nvme"

    @property
    def file_bytes(self) -> int:
        """
        ### Of the shard's file, as a layer reads it: a whole number of disk blocks
        """
        return whole_blocks(self.param_bytes) if self.in_file else 0

    @property
    def shares_file(self) -> bool:
        """
        ### Whether the file of the states has the shard too, because it is its own master
        """
        return self.is_master and self.states_in_file

    @property
    def kept_bytes(self) -> int:
        """
        ### Of master and moments in the file of the states

        A shard that is its own master and rests in memory has its moments alone there.
        """
        if not self.states_in_file:
            return 0
        masters = 0 if self.is_master and not self.in_file else 1
        return whole_blocks(self.master_bytes) * (self.moments + masters)

    @property
    def grad_file_bytes(self) -> int:
        return whole_blocks(self.grad_bytes) if self.states_in_file else 0

    @property
    def state_file_bytes(self) -> int:
        return self.kept_bytes + self.grad_file_bytes


def _place(
    shards: list[_Shard], params_in: Offload, states_in: Offload, one_memory: bool
) -> None:
    """
    ### Choose a tier for each shard and for its states

    * `one_memory` says that device and CPU are the same memory, as they are without a GPU
    """
    # An `Offload` counts the bytes that it places, so work on copies. If both are the same object,
    # they share a count, and so they share a copy.
    copies = {id(each): replace(each) for each in (params_in, states_in)}
    for s in shards:
        if s.encoding:
            s.tier = params_in.tier
        else:
            s.tier = copies[id(params_in)].place(s.param_bytes)
    for s in shards:
        if s.trains:
            state_bytes = (1 + s.moments) * s.master_bytes + s.grad_bytes
            s.state_tier = copies[id(states_in)].place(state_bytes)
            steps_on = "device" if states_in.tier == "device" else "cpu"
            # The optimizer steps the shard itself if it has the right data type and is at hand.
            at_hand = s.states_in_file if s.in_file else one_memory or s.tier == steps_on
            s.is_master = s.state_width == s.part.element_bytes and at_hand


def _pool_bytes(chain: list["StepLayer"], buffers: int) -> int:
    """
    ### Memory for the buffers of files: `buffers` for states, and at least two for shards

    Each is as large as the largest thing that goes through it. A layer with a shard of each kind
    has as many buffers for shards.
    """
    shards = [s for layer in chain for s in layer.shards]
    states = [s.state_file_bytes for s in shards if s.states_in_file]
    slots = [i + 1 for layer in chain for i, s in enumerate(layer.shards) if s.in_file]
    total = 0
    if states:
        total += buffers * (max(states) + ALIGN_BYTES)
    if slots:
        total += max(2, *slots) * (max(s.file_bytes for s in shards) + ALIGN_BYTES)
    return total


class _Buffers:
    """
    ### The buffers of optimizer states: a read finds in them what was used last
    """

    def __init__(self, count: int):
        self.count = count
        # Which of a shard's states are in a buffer; the shard that was used longest ago is first.
        self.present: dict[_Shard, set[str]] = {}
        self.read_bytes = 0

    def use(self, s: _Shard, *names: str, read: bool = True) -> None:
        """
        #### Have states of a shard in a buffer, and count the bytes that are read from files

        * `names` are of "kept", master and moments, and "grad"
        * `read` is false for states that are about to be overwritten
        """
        if not s.states_in_file:
            return
        if s not in self.present and len(self.present) == self.count:
            del self.present[next(iter(self.present))]
        present = self.present.pop(s, set())
        self.present[s] = present | {*names}
        absent = {*names} - present
        if read and "kept" in absent:
            self.read_bytes += s.kept_bytes
        if read and "grad" in absent:
            self.read_bytes += s.grad_file_bytes


def _state_traffic(
    trained: list[_Shard], arrivals: list[list[_Shard]], count: int
) -> tuple[int, int]:
    """
    ### Bytes of optimizer states that a step reads from files and writes to them

    * `arrivals` are the shards of each micro-batch, in the order in which they get gradients

    Two steps are replayed and the second one counts, because buffers still have states of the step
    before.
    """
    buffers = _Buffers(count)
    read_bytes = written_bytes = 0
    for _ in range(2):
        buffers.read_bytes = 0
        written_bytes = _gradients_arrive(buffers, trained, arrivals)
        written_bytes += _step_all(buffers, trained)
        read_bytes = buffers.read_bytes
    return read_bytes, written_bytes


def _gradients_arrive(
    buffers: _Buffers, trained: list[_Shard], arrivals: list[list[_Shard]]
) -> int:
    """
    #### Backward: gradients go to files; returns the bytes written
    """
    in_files = [s for s in trained if s.states_in_file]
    ahead = buffers.count - 1
    written_bytes = 0
    seen: set[_Shard] = set()
    for s in (s for micro_batch in arrivals for s in micro_batch):
        # The first gradient of a step replaces the file's contents. A later one is added to them.
        buffers.use(s, "grad", read=s in seen)
        seen.add(s)
        written_bytes += s.grad_file_bytes
        if s in in_files[ahead : ahead + 1]:
            # The optimizer will begin with the shards below this one, so read them ahead.
            for other in in_files[:ahead]:
                if other.kept_bytes:
                    buffers.use(other, "kept")
    return written_bytes


def _step_all(buffers: _Buffers, trained: list[_Shard]) -> int:
    """
    #### The optimizer steps shard after shard, and reads ahead; returns the bytes written
    """
    for i in range(len(trained)):
        for s in trained[i : i + buffers.count - 1]:
            buffers.use(s, "kept", "grad")
    return sum(s.kept_bytes + (0 if s.is_master else s.file_bytes) for s in trained)


class StepLayer:
    """
    ### A layer during a step
    """

    def __init__(self, shards: list[_Shard], layout: Layout):
        self.shards = shards
        self.trains = any(s.part.trainable for s in shards)
        self.full_bytes = layout.shards * sum(s.row_bytes for s in shards)
        # Of shards that rest encoded, until they are copied into the flat parameter.
        self.decoded_bytes = sum(s.row_bytes for s in shards if s.encoding)
        self.full_grad_bytes = layout.shards * sum(s.grad_bytes for s in shards)
        # What a rank sends to one other rank of its shards.
        self.row_bytes = sum(layout.weight_bytes(s.numel, s.part.element_bytes) for s in shards)
        self.rows = sum(s.numel > 0 for s in shards)
        self.is_arriving = False
        self.kept_bytes = 0  # the slice that its node keeps for backward
        self.has_full_grad = False
        self.has_shard_grad = False

    @classmethod
    def of(cls, layer: LayerSpec, layout: Layout, reduce_bytes: int | None, moments: int,
           stage3: bool, encoding: Encoding | None = None) -> "StepLayer":
        """
        #### From the shapes of its parameters

        * `encoding` is that in which frozen shards rest; the rest is as for `predict`
        """
        shards = [_Shard(p, p.shard_numel(layout.shards), reduce_bytes or p.element_bytes,
                         p.master_bytes if stage3 else p.element_bytes, moments,
                         None if p.trainable else encoding) for p in layer.parts]
        return cls(shards, layout)

    @property
    def shard_bytes(self) -> int:
        return sum(s.param_bytes for s in self.shards)

    @property
    def shard_grad_bytes(self) -> int:
        return sum(s.grad_bytes for s in self.shards)


class _Pack(NamedTuple):
    """
    ### Gradients that are reduced as one tensor
    """

    numel: int  # elements for each rank
    width: int  # bytes of an element
    is_copy: bool  # several gradients, packed side by side

    @property
    def nbytes(self) -> int:
        return self.numel * self.width


class Step:
    """
    ### Replay a step: bytes above rest, and bytes that are sent

    The order of the lines is the order of events in the heart. `pipeline/costs.py` calls the
    methods in another order, that of a pipeline's list.
    """

    def __init__(self, chain: list[StepLayer], layout: Layout, bucket_bytes: int, packs: bool,
                 by_messages: bool):
        self.chain = chain
        self.layout = layout
        self.bucket_bytes = bucket_bytes
        self.packs = packs
        self.by_messages = by_messages
        # NCCL adds plain gradients by itself. Everything else needs a receive buffer.
        self.receives = by_messages or layout.gradients is not None
        self.live_bytes = 0
        self.peak_bytes = 0
        self.read_bytes = 0
        self.sent_bytes = 0
        self.between_bytes = 0
        self.messages = 0
        self.transfers = 0
        self.keeps_slices = False
        self.waiting: list[StepLayer] = []  # layers of the bucket that is being filled
        self.in_flight: list[StepLayer] = []  # layers of the bucket that is being reduced
        self.sent: list[_Pack] = []  # their gradients
        self.copied_bytes = 0  # of the gradients, packed and encoded
        self.receive_bytes = 0
        self.exchanging: list[StepLayer] = []  # layers whose sums go between nodes or replicas
        self.exchange_bytes = 0
        self.arrivals: list[list[_Shard]] = []

    def add(self, nbytes: int) -> None:
        """
        #### Allocate bytes, or free them if `nbytes` is negative
        """
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def send(self, peers: Peers, nbytes: int, messages: int, directly: bool = False) -> None:
        """
        #### Send as many bytes to each other rank of a group

        * `directly` says that they do not go around in a ring
        """
        self.sent_bytes += peers.count * nbytes
        self.between_bytes += (peers.direct if directly else peers.far) * nbytes
        self.messages += peers.count * messages
        self.transfers += peers.count

    def micro_batch(self, reduces: bool) -> None:
        """
        #### Forward and backward

        Without `reduces` the full gradients stay, and the next micro-batch adds to them.
        """
        self.arrivals.append([])
        trains = [layer.trains for layer in self.chain]
        # Backward goes down to the first layer that trains.
        down = self.chain[trains.index(True) :][::-1] if any(trains) else []
        self.keeps_slices = self.layout.secondary
        self.forward(last_stays=bool(down))
        self.keeps_slices = False
        self.backward(down, reduces)

    def forward(self, last_stays: bool) -> None:
        """
        #### Gather each layer while the one before it computes
        """
        for before, layer in zip([None, *self.chain], self.chain, strict=False):
            self.fetch(layer)
            if before:
                self.gathered(before)
                self.free(before)
        if self.chain:
            self.gathered(self.chain[-1])
        if self.chain and not last_stays:
            self.free(self.chain[-1])

    def backward(self, down: list[StepLayer], reduces: bool) -> None:
        """
        #### Gather each layer while the one above it computes, and reduce gradients

        * `down` are the layers from the last to the first that trains
        """
        for layer, below in zip(down, [*down[1:], None], strict=False):
            if below:
                self.fetch(below)
            self.gathered(layer)
            self.collect(layer)
            self.free(layer)
            if layer.trains and reduces:
                self.put_into_bucket(layer)
        self.end()
        for layer in self.chain:
            self.forget(layer)

    def fetch(self, layer: StepLayer) -> None:
        """
        #### Start an all-gather: between nodes, unless the slice was kept, and inside the node
        """
        if self.layout.nodes > 1 and not layer.kept_bytes:
            self.send(self.layout.across, layer.row_bytes, layer.rows)
        self.send(self.layout.near, self.layout.nodes * layer.row_bytes, layer.rows)
        self.read_bytes += sum(s.file_bytes for s in layer.shards)
        self.forget(layer)
        layer.is_arriving = True
        self.add(layer.full_bytes + layer.decoded_bytes + self.coded_bytes(layer))
        if not self.by_messages:
            # The stream decodes and keeps the slice, and the host does not wait for it.
            self.gathered(layer)
        self.add(-layer.decoded_bytes)

    def coded_bytes(self, layer: StepLayer) -> int:
        """
        #### Of a layer's rows while they arrive encoded
        """
        if self.layout.weights is None or not self.by_messages:
            return 0
        return self.layout.shards * layer.row_bytes

    def gathered(self, layer: StepLayer) -> None:
        """
        #### An all-gather has ended: its rows are decoded, and in forward a slice may be kept
        """
        if not layer.is_arriving:
            return
        layer.is_arriving = False
        layer.kept_bytes = self.layout.nodes * layer.row_bytes if self.keeps_slices else 0
        self.add(layer.kept_bytes - self.coded_bytes(layer))

    def forget(self, layer: StepLayer) -> None:
        """
        #### The slice that was kept is used, or of no use any more
        """
        self.add(-layer.kept_bytes)
        layer.kept_bytes = 0

    def free(self, layer: StepLayer) -> None:
        self.add(-layer.full_bytes)

    def collect(self, layer: StepLayer) -> None:
        """
        #### The gradients of a layer arrive in its full gradient
        """
        if layer.trains and not layer.has_full_grad:
            layer.has_full_grad = True
            self.add(layer.full_grad_bytes)

    def end(self) -> None:
        """
        #### Send the layers that wait, and finish everything
        """
        if self.waiting:
            self.reduce(self.waiting)
        self.finish_reduce()
        self.end_exchange()

    def put_into_bucket(self, layer: StepLayer) -> None:
        """
        #### A gradient that fills a bucket alone goes at once; others wait until they fill one
        """
        if self.fills_bucket([layer]):
            self.reduce([layer])
            return
        self.waiting.append(layer)
        if self.fills_bucket(self.waiting):
            self.reduce(self.waiting)

    def fills_bucket(self, layers: list[StepLayer]) -> bool:
        full_bytes = sum(layer.full_grad_bytes for layer in layers)
        return self.layout.divisor == 1 or full_bytes >= self.bucket_bytes

    def reduce(self, layers: list[StepLayer]) -> None:
        """
        #### Start a reduce-scatter; the one before it has to finish first
        """
        self.finish_reduce()
        self.in_flight = layers
        if layers is self.waiting:
            self.waiting = []
        for layer in layers:
            self.forget(layer)
        self.sent = self.pack(layers)
        layout = self.layout
        row_bytes = self.row_bytes()
        self.send(layout.near, layout.nodes * row_bytes, len(self.sent), bool(layout.gradients))
        # A gradient that is alone needs no packing: it is sent from its own memory.
        self.copied_bytes = layout.shards * sum(each.nbytes for each in self.sent if each.is_copy)
        # A rank that is alone in its node encodes and receives nothing here.
        has_others = layout.near.count > 0
        if has_others and layout.gradients:
            self.copied_bytes += layout.shards * row_bytes
        self.receive_bytes = layout.shards * row_bytes if has_others and self.receives else 0
        self.add(self.copied_bytes + self.receive_bytes)

    def row_bytes(self) -> int:
        """
        #### Of the gradients in flight, for one other rank
        """
        return sum(self.layout.gradient_bytes(each.numel, each.width) for each in self.sent)

    def pack(self, layers: list[StepLayer]) -> list[_Pack]:
        """
        #### `Zero3Optimizer` packs gradients of one data type into one

        Two data types of one width count as one here.
        """
        shards = [s for layer in layers for s in layer.shards if s.trains]
        if not self.packs:
            return [_Pack(s.numel, s.grad_width, False) for s in shards]
        numels: dict[int, list[int]] = {}  # by the width of an element
        for s in shards:
            numels.setdefault(s.grad_width, []).append(s.numel)
        return [_Pack(sum(each), width, len(each) > 1) for width, each in numels.items()]

    def finish_reduce(self) -> None:
        """
        #### The bucket in flight is reduced: its shards have gradients, and its buffers are freed
        """
        layers = self.in_flight
        if not layers:
            return
        self.in_flight = []
        self.add(-self.copied_bytes)
        self.end_exchange()
        in_place_bytes = 0
        if self.layout.across.count:
            in_place_bytes = self.exchange(layers)
        for layer in layers:
            if self.layout.divisor == 1:
                # The full gradient becomes the shard's, so the two are never there together.
                self.drop_full_grad(layer)
                self.deliver(layer)
                continue
            if not self.exchanging:
                self.deliver(layer)
            self.drop_full_grad(layer)
        self.add(in_place_bytes - self.receive_bytes)

    def drop_full_grad(self, layer: StepLayer) -> None:
        layer.has_full_grad = False
        self.add(-layer.full_grad_bytes)

    def deliver(self, layer: StepLayer) -> None:
        """
        #### The shards of a layer get their gradients

        A later micro-batch adds to the gradient of the first. One in a file needs no memory.
        """
        self.add(sum(s.grad_bytes for s in layer.shards
                     if not (layer.has_shard_grad or s.states_in_file)))
        layer.has_shard_grad = True
        self.arrivals[-1] += [s for s in layer.shards if s.trains]

    def exchange(self, layers: list[StepLayer]) -> int:
        """
        #### Start to add the sums over nodes or replicas

        Returns the bytes of sums that are full gradients themselves, because a rank alone in its
        node or replica has reduced nothing. These bytes are counted already, and are not freed with
        the gradients.
        """
        layout = self.layout
        has_nodes = layout.nodes > 1
        row_bytes = self.row_bytes()
        if has_nodes or self.receives:
            directly = has_nodes and bool(layout.gradients)
            self.send(layout.across, row_bytes, len(self.sent), directly)
        else:
            # A ring sends the parts of the sums around twice.
            ring_bytes = sum(2 * each.nbytes // layout.replicas for each in self.sent)
            self.send(layout.across, ring_bytes, 2 * len(self.sent))
        self.exchanging = layers
        self.exchange_bytes = sum(each.nbytes for each in self.sent)  # this rank's totals
        if self.receives:
            self.exchange_bytes += layout.groups * row_bytes
        if has_nodes:
            # The sums for all nodes, or their encoded copies.
            self.exchange_bytes += layout.nodes * row_bytes
        in_place_bytes = 0
        if layout.near.count == 0 and not (has_nodes and layout.gradients):
            alone = sum(each.nbytes for each in self.sent if not each.is_copy)
            in_place_bytes = layout.nodes * alone
        self.add(self.exchange_bytes - in_place_bytes)
        return in_place_bytes

    def end_exchange(self) -> None:
        """
        #### The sums of all nodes or replicas are added: the shards get their gradients
        """
        self.add(-self.exchange_bytes)
        self.exchange_bytes = 0
        for layer in self.exchanging:
            self.deliver(layer)
        self.exchanging = []


def data_parallel(
    layers: list[LayerSpec], world_size: int, *, moments: int = 2, mixed: bool = False
) -> Prediction:
    """
    ## The same for plain data parallelism

    Every rank holds all of the model states, and a ring all-reduce sends twice as much as a
    reduce-scatter. The optimizer's step counts are left out.

    * `mixed` says that parameters in half precision have masters and moments in fp32
    """
    parts = [p for layer in layers for p in layer.parts]
    trainable = [p for p in parts if p.trainable]
    grad_bytes = sum(p.shard_bytes(1) for p in trainable)
    found = Prediction(
        param_bytes=sum(p.shard_bytes(1) for p in parts),
        grad_bytes=grad_bytes,
        master_bytes=sum(4 * p.numel for p in trainable
                         if mixed and p.master_bytes > p.element_bytes),
        optimizer_bytes=moments * sum(p.numel * (p.master_bytes if mixed else p.element_bytes)
                                      for p in trainable),
        buffer_bytes=sum(layer.buffer_bytes for layer in layers),
        peak_bytes=0,
        sent_bytes=2 * (world_size - 1) * grad_bytes // world_size,
        messages=2 * (world_size - 1),
        order_bytes=0,
    )
    return replace(found, peak_bytes=found.rest_bytes + grad_bytes)

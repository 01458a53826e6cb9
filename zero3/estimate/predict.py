r"""
# Predict: the same bytes from shapes

`predict` says what a sharded model will hold, send, read and write before it runs, to the byte.

What a layer rests with, holds at its peak and sends follows from four numbers: how many elements it
has, how wide they are, which of them train, and $N$. Nothing here runs a model: `_Step` walks
through a step and adds up numbers where the heart moves tensors. The tests run a model, with the
`Ledger` listening, and demand equality.

$$\text{rest} = \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil \, (b + K t_\ell)
\qquad
\text{sent} = (N-1) \sum_\ell \left\lceil \frac{P_\ell}{N} \right\rceil
\, (b \, g_\ell + b_g \, t_\ell)$$

with $b$ bytes per element of the parameters and $b_g$ of their gradients on the way, $K$ bytes that
the optimizer keeps for each, $g_\ell$ unshards of layer $\ell$ (two, but one for the last layer,
and one below the first trainable layer) and $t_\ell = 1$ where it trains. Micro-batches send as
much each time, and `Zero3Optimizer` 8 bytes for each trainable shard once in a step (in a step in
which no rank used a parameter, 8 more for each parameter of its shard).

What rests in files is not in memory. In its place there are a few buffers; and what is read and
written is what `_Rest` finds when it goes through the same buffers in the same order.

**Run this**: `make train`; its table holds these numbers against measured ones.

**Not covered, and what that costs**: activations, which do not depend on the sharding and have to
be added; layers outside a `Zero3Sequential`; parameters that no gradient reaches, which keep their
layer full to the end of the pass; buckets that hold two half-precision data types, whose messages
are counted as one; parameters that a step did not use, and those that no step has used yet, which
have no moments. Of files: a chain of which the last layer alone trains, which reads the one below
ahead in vain; an `Offload` with `max_in_cpu` that another model has used before.
"""

from dataclasses import dataclass, field, replace
from itertools import groupby

from zero3.estimate.formulas import LayerSpec, Part
from zero3.files.disk import ALIGN_BYTES, whole_blocks
from zero3.offload import Offload


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
    pool_bytes: int = 0  # buffers between files and the rest
    disk_bytes: int = 0  # of files
    read_bytes: int = 0  # from files, in a step
    written_bytes: int = 0

    @property
    def rest_bytes(self) -> int:
        """
        ### Between steps, after `zero_grad()`, in the device's memory and the CPU's
        """
        return (self.param_bytes + self.master_bytes + self.optimizer_bytes + self.buffer_bytes
                + self.pool_bytes)

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
                ("buffers of modules", "", self.buffer_bytes),
                ("buffers of files", "", self.pool_bytes),
                ("all, with gradients", "", self.rest_bytes + self.grad_bytes),
                ("at the peak of a step", "", self.peak_bytes),
                ("in files", "", self.disk_bytes),
                ("read in a step", "", self.read_bytes),
                ("written in a step", "", self.written_bytes))
        files = ("buffers of files", "in files", "read in a step", "written in a step")
        return "\n".join(f"{name:24}{dtype:20}{nbytes:>16,}" for name, dtype, nbytes in rows
                         if nbytes or name not in files)


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
    params_in: Offload | None = None,
    states_in: Offload | None = None,
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
    * `params_in` and `states_in` are what the layers and the optimizer got as `offload`
    """
    shards = [_Shard(i, p, p.shard_numel(world_size), reduce_bytes or p.element_bytes)
              for i, layer in enumerate(layers) for p in layer.parts]
    rest = _Rest(shards, params_in or Offload(), states_in or Offload(), moments,
                 mixed=stage3, one_memory=by_messages)
    count_bytes = sum(step_bytes * (s.part.pieces(world_size, rank) if stage3 else 1)
                      for s in rest.trains)
    buffer_bytes = sum(layer.buffer_bytes for layer in layers)
    step = _Step(layers, shards, world_size, reduce_bytes, bucket_bytes, packs=stage3,
                 receive_buffer=by_messages)
    for i in range(micro_batches):
        step.micro_batch(hold=no_sync and i + 1 < micro_batches)
    step.add(rest.widened_bytes)
    if stage3:
        # The squared norm of each shard's gradient, in fp64.
        step.send(8 * len(rest.trains), 1)
    for _ in range(2):
        # What the buffers have from the step before is part of a step like all others.
        rest.step(step.arrivals)
    found = Prediction(
        rest.param_bytes, rest.grad_bytes, rest.master_bytes, rest.moment_bytes + count_bytes,
        buffer_bytes, step.peak, step.sent_bytes, step.messages,
        # Each transfer is announced by four 8-byte numbers.
        32 * step.transfers,
        rest.pool_bytes, rest.disk_bytes, rest.read_bytes + step.read_bytes, rest.written_bytes)
    return replace(found, peak_bytes=found.rest_bytes + step.peak)


@dataclass(eq=False)
class _Shard:
    """
    ### A shard, and where it rests
    """

    layer: int
    part: Part
    numel: int
    grad_width: int
    tier: str = "device"  # of the shard
    in_file: bool = False
    states_in_file: bool = False
    own: bool = False  # its own master
    kept_bytes: int = 0  # of master and moments in a file
    grad_bytes: int = 0
    present: set[str] = field(default_factory=set)  # what a buffer has of them

    @property
    def file_bytes(self) -> int:
        """
        ### Of the shard, as a layer reads it
        """
        return whole_blocks(self.numel * self.part.element_bytes) * self.in_file


class _Rest:
    """
    ### What rests where, and what a step reads and writes in files
    """

    def __init__(self, shards: list[_Shard], params_in: Offload, states_in: Offload, moments: int,
                 mixed: bool, one_memory: bool):
        # Copies, for they count what they have placed. One for both is one copy for both.
        places = {id(each): replace(each) for each in (params_in, states_in)}
        for s in shards:
            s.tier = places[id(params_in)].place(s.numel * s.part.element_bytes)
            s.in_file = s.tier == "nvme"
        self.param_bytes = sum(s.numel * s.part.element_bytes for s in shards if not s.in_file)
        self.grad_bytes = self.master_bytes = self.moment_bytes = self.widened_bytes = 0
        self.trains = [s for s in shards if s.part.trainable and s.numel > 0]
        self.count = states_in.buffers
        self.lent: list[_Shard] = []
        for s in self.trains:
            width = s.part.master_bytes if mixed else s.part.element_bytes
            tier = places[id(states_in)].place(s.numel * ((1 + moments) * width + s.grad_width))
            s.states_in_file = tier == "nvme"
            stepped = "device" if states_in.tier == "device" else "cpu"
            near = one_memory or s.tier == stepped
            s.own = width == s.part.element_bytes and (s.states_in_file if s.in_file else near)
            if s.states_in_file:
                s.kept_bytes = whole_blocks(s.numel * width) * (moments + (s.in_file or not s.own))
                s.grad_bytes = whole_blocks(s.numel * s.grad_width)
            else:
                self.master_bytes += s.numel * width * (not s.own)
                self.moment_bytes += s.numel * width * moments
                self.grad_bytes += s.numel * s.grad_width
            if mixed and width != s.grad_width:
                # Of one shard at a time the gradient is copied into the master's data type.
                self.widened_bytes = max(self.widened_bytes, s.numel * width)

        states = [s.kept_bytes + s.grad_bytes for s in self.trains if s.states_in_file]
        alone = [s.file_bytes for s in shards if not (s.own and s.states_in_file)]
        self.disk_bytes = sum(states) + sum(alone)
        self.pool_bytes = self.count * (max(states) + ALIGN_BYTES) if states else 0
        layers = [[*group] for _, group in groupby(shards, key=lambda s: s.layer)]
        buffers = [i + 1 for group in layers for i, s in enumerate(group) if s.in_file]
        if buffers:
            largest = max(s.file_bytes for s in shards)
            self.pool_bytes += max(2, *buffers) * (largest + ALIGN_BYTES)

    def step(self, arrivals: list[list[int]]) -> None:
        """
        #### Gradients arrive, in this order of layers in each micro-batch; then all are stepped
        """
        self.read_bytes = self.written_bytes = 0
        first = self.count - 1
        in_files = [s for s in self.trains if s.states_in_file]
        seen: set[_Shard] = set()
        for layers in arrivals:
            for s in (s for layer in layers for s in self.trains if s.layer == layer):
                # The first of a step overwrites what is there; another adds to it.
                self.use(s, "grad", read=s in seen)
                seen.add(s)
                self.written_bytes += s.grad_bytes
                for other in in_files[:first] if s in in_files[first : first + 1] else ():
                    if other.kept_bytes:
                        self.use(other, "kept")
        for i, s in enumerate(self.trains):
            for other in self.trains[i : i + first]:
                self.use(other, "kept", "grad")
            self.written_bytes += s.kept_bytes + s.file_bytes * (not s.own)

    def use(self, s: _Shard, *names: str, read: bool = True) -> None:
        """
        #### Have these of a shard's states in a buffer; the one used longest ago goes
        """
        if not s.states_in_file:
            return
        if s in self.lent:
            self.lent.remove(s)
        elif len(self.lent) == self.count:
            self.lent.pop(0).present.clear()
        self.lent.append(s)
        for name in {*names} - s.present if read else ():
            self.read_bytes += s.kept_bytes if name == "kept" else s.grad_bytes
        s.present.update(names)


class _Step:
    """
    ### A step, moment by moment: bytes above rest, and what is sent

    The order of the lines is the order of events in the heart. Layers are numbers here.
    """

    def __init__(self, layers: list[LayerSpec], shards: list[_Shard], world_size: int,
                 width: int | None, bucket_bytes: int, packs: bool, receive_buffer: bool):
        numbers = [i for i, layer in enumerate(layers) if layer.parts]
        self.chain, self.world_size, self.width = [layers[i] for i in numbers], world_size, width
        self.bucket_bytes, self.packs, self.receive_buffer = bucket_bytes, packs, receive_buffer
        self.grad = [layer.grad_bytes(world_size, width) for layer in self.chain]  # of the shard
        # Of that, what stays in memory; and what a layer reads from files.
        self.stays, self.file = [0] * len(numbers), [0] * len(numbers)
        for s in shards:
            at = numbers.index(s.layer)
            self.stays[at] += s.numel * s.grad_width * (s.part.trainable and not s.states_in_file)
            self.file[at] += s.file_bytes
        self.numbers, self.read_bytes = numbers, 0
        self.arrivals: list[list[int]] = []  # of gradients, layer by layer in each micro-batch
        chain = self.chain
        # Backward goes down to the first layer that trains.
        self.first = next((i for i, layer in enumerate(chain) if layer.trains), len(chain))
        self.held: set[int] = set()  # layers with a full gradient
        self.reduced: set[int] = set()  # layers whose shard has a gradient
        self.waiting: list[int] = []
        self.in_flight: list[int] = []
        self.packed_bytes = self.receive_bytes = self.live = self.peak = 0
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
            self.read_bytes += self.file[i]
            self.add(self.world_size * shard_bytes)

    def free(self, i: int) -> None:
        self.add(-self.world_size * self.chain[i].shard_bytes(self.world_size))

    def micro_batch(self, hold: bool) -> None:
        """
        #### Forward and backward

        With `hold` the full gradients stay where they are.
        """
        last = len(self.chain) - 1
        self.arrivals.append([])
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
        self.receive_bytes = self.world_size * shares * (self.receive_buffer and self.world_size > 1)
        self.add(self.packed_bytes + self.receive_bytes)

    def finish(self) -> None:
        """
        #### The bucket in flight has arrived: shards have gradients, and its buffers go
        """
        self.add(-self.packed_bytes)
        for i in self.in_flight:
            # One rank alone has its shard's first gradient already: the full one is it.
            if self.world_size > 1 or i in self.reduced:
                self.add(self.stays[i] * (i not in self.reduced))
                self.add(-self.world_size * self.grad[i])
            else:
                self.add(self.stays[i] - self.grad[i])
            self.arrivals[-1].append(self.numbers[i])
        self.add(-self.receive_bytes)
        self.reduced.update(self.in_flight)
        self.held.difference_update(self.in_flight)
        self.in_flight, self.packed_bytes, self.receive_bytes = [], 0, 0


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

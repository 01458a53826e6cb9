r"""
# ZeRO-3 in one file

`Zero3Layer` keeps $\frac{1}{N}$ of a layer on each of $N$ ranks, and holds the whole layer only
while that layer computes.

In data parallel training every rank keeps the whole model, its gradients and its optimizer states.
Yet it needs a layer's parameters only while that layer computes. If it updates one part of them, it
needs the optimizer states of that part alone. So each rank keeps one *shard* of every layer. The
ranks gather a layer just before it computes and free it right afterwards, and each rank receives
the gradient of its own shard alone.

**Three weights on two ranks.** A layer with the weights 1, 2 and 3 goes through a training step
like this. `python -m zero3.minimal` takes the step on two ranks, and prints the bold numbers:

| | rank 0 | rank 1 | |
|---|---|---|---|
| flatten and pad | 1 2 3 0 | 1 2 3 0 | four elements, so that each rank gets two |
| **shard** | **1 2** | **3 0** | only this stays in memory |
| **all-gather** | **1 2 3 0** | **1 2 3 0** | before forward, and before backward if it was freed |
| free | | | after forward and backward; the last layer, as here, only after backward |
| gradients | 2 4 6 0 | 4 0 2 0 | on this rank's part of the batch |
| divide by 2 | 1 2 3 0 | 2 0 1 0 | so that a sum over ranks is the mean |
| **reduce-scatter** | **3 2** | **4 0** | the sums, and each rank gets only those of its shard |
| **step, rate 0.1** | **0.7 1.8** | **2.6 0** | each rank updates its shard; nothing is sent |

A layer with $P$ parameters has shards of $s = \lceil P / N \rceil$ elements. In a step a rank sends

$$\underbrace{(N-1)\,s}_{\text{all-gather, forward}} +
\underbrace{(N-1)\,s}_{\text{all-gather, backward}} +
\underbrace{(N-1)\,s}_{\text{reduce-scatter}} \;=\; 3\,(N-1)\,s$$

elements for the layer. The last layer of a chain is not freed in between, so it sends
$2\,(N-1)\,s$. Here the one layer is the last: a rank sends four elements. Data parallel training
sends $2\,(N-1)\,s$ for each layer, and keeps $N$ times as many parameters, gradients and optimizer
states.

**Run this**: `python -m zero3.minimal`.

**Not covered, and what that costs**: every layer takes one tensor and returns one, and is in the
chain once. Its parameters, one or more, are all trained, used, and of one data type. A
forward pass with gradients is followed by its backward pass. If one of these does not hold, weights
may be stale or gradients lost, often without an error. torch's `clip_grad_norm_` would clip by the
norm of one rank's shards, and buffers are not copied from rank 0. Reading a parameter outside its
layer's forward can crash the process. A backward pass can crash it too, if it reads a parameter
after its gradient is complete, as in `x * w.detach() + w`. `layer.py` is this file grown up: it
does these things right, or raises an error.
"""

import tempfile
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


class Zero3Layer(nn.Module):
    """
    ## A layer in shards

    In the code, `full` is the *flat parameter*: all parameters of the layer one after the other,
    and padding. `chunk` is this rank's *shard* of it.

    Below, *previous* and *next* are in the order of forward:

    | when | what happens | buffers besides the shard, each as long as the flat parameter |
    |---|---|---|
    | between two steps | | nothing |
    | forward: the previous layer computes | it is gathered | parameters, arriving |
    | this layer computes | | parameters |
    | it has computed | it is freed, unless it is the last layer | nothing, or parameters |
    | backward: the next layer computes | it is gathered | parameters, arriving |
    | its gradients arrive | they fill a flat gradient | parameters, gradient |
    | all have arrived | it is freed, its reduce-scatter starts | gradient, receive buffer |
    | backward: the previous layer has its gradients | the shard gets its gradient | nothing |
    """

    def __init__(self, module: nn.Module):
        """
        ### Shard a module

        All ranks call this in the same order, with modules of the same shapes. All get the
        parameters of rank 0.
        """
        super().__init__()
        self.world_size = dist.get_world_size()
        self.module = module
        # The previous and the next layer in a chain. Lists, because a module as an attribute would
        # become a submodule.
        self.prev_layer: list[Zero3Layer] = []
        self.next_layer: list[Zero3Layer] = []

        self.params = list(module.parameters())
        # Where each parameter begins in the flat parameter.
        self.offsets = list(accumulate((p.numel() for p in self.params), initial=0))
        # The flat parameter, (world_size * shard_numel,). All parameters will be views of it.
        self.full = self._merge_and_pad_params()
        dist.broadcast(self.full, 0)
        # This rank's shard, (shard_numel,): a copy, because the flat parameter will be freed.
        self.chunk = nn.Parameter(self.full.view(self.world_size, -1)[dist.get_rank()].clone())
        # The file of the shard, if it has one.
        self.file: MappedShard | None = None
        self._view_params()
        self._add_backward_hooks()

        self.is_fetched = True
        self.gather: Any = None  # the all-gather in flight
        self.reduce: Any = None  # the reduce-scatter in flight
        self.received: Any = None  # the gradients of all ranks, as they arrive
        self.grad: Any = None  # the flat gradient, as long as the flat parameter
        self.arrived = 0  # how many parameters have their gradients
        self._cleanup_params()

    def _merge_and_pad_params(self) -> torch.Tensor:
        r"""
        #### Merge the parameters, and pad so that the length is divisible by `world_size`

        1 2 3 becomes 1 2 3 0. The padding is zero, and so is its gradient, so it stays zero.
        """
        # The last offset is the number of all elements.
        padding = self.params[0].detach().new_zeros(-self.offsets[-1] % self.world_size)
        return torch.cat([*(p.detach().flatten() for p in self.params), padding])

    def _view_params(self) -> None:
        """
        #### Make the parameters views of the flat parameter, and hide them

        After this they follow the flat parameter: when it is gathered they have values, and when it
        is freed they have none.
        """
        for p, offset in zip(self.params, self.offsets, strict=False):
            # Autograd counts the writes to a saved tensor. A parameter whose `.data` was set has a
            # count of its own, so a gather into `full` does not change it.
            p.data = self.full[offset : offset + p.numel()].view(p.shape)
        # `parameters()` must yield the shards alone, because they go to the optimizer. The modules
        # still find their parameters, as plain attributes.
        for module in self.module.modules():
            vars(module).update(module._parameters)
            module._parameters.clear()

    # ---------------------------------------------------------------------------- unshard, reshard

    def fetch_params(self) -> None:
        """
        ### Unshard (all-gather)

        Start the all-gather and return at once, so that communication overlaps the computation of
        another layer. If the shard is in a file, it is read first, and the call waits for that. All
        ranks call it for the same layers in the same order. Otherwise they would hang, or mix up
        layers. A rank sends its shard to the $N-1$ others.
        """
        # It may have been prefetched, or kept since forward.
        if self.is_fetched:
            return
        self.is_fetched = True
        # Give the buffer its memory back. It has to be the same storage every time, because
        # autograd has saved the parameters, which are views of it, for backward.
        self.full.untyped_storage().resize_(self.full.nbytes)
        shard = self.file.load(self.full.device) if self.file else self.chunk.detach()
        # Each shard arrives in its part of the flat parameter. On its way it is in a buffer of
        # gloo's, too.
        self.gather = dist.all_gather(list(self.full.chunk(self.world_size)), shard, async_op=True)

    def _wait_params(self) -> None:
        """
        #### Wait for the all-gather
        """
        if self.gather is not None:
            self.gather.wait()
            self.gather = None

    def _cleanup_params(self) -> None:
        """
        #### Reshard (free)

        Resizing the storage frees it although the parameters still view it. A gather must not write
        to it any more, so this comes after `_wait_params`.
        """
        assert self.gather is None
        self.full.untyped_storage().resize_(0)
        self.is_fetched = False

    # ------------------------------------------------------------------------------------- forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### Forward pass: unshard, prefetch the next layer, compute, reshard
        """
        self.fetch_params()
        # Prefetch: this all-gather overlaps the computation of this layer.
        for layer in self.next_layer:
            layer.fetch_params()
        self._wait_params()
        y = self.module(x)
        if y.requires_grad:
            # Autograd calls this when it has the gradient of `y`, before the layer's own backward.
            y.register_hook(self._pre_backward_hook)
        # Backward begins with the last layer, so it is not freed: gathering it again would bring
        # the same values.
        if self.next_layer or not y.requires_grad:
            self._cleanup_params()
        return y

    # ------------------------------------------------------------------------------------ backward

    def _add_backward_hooks(self) -> None:
        """
        #### Have each parameter report its gradient
        """
        for p, offset in zip(self.params, self.offsets, strict=False):
            p.register_post_accumulate_grad_hook(partial(self._post_backward_hook, offset))

    def _pre_backward_hook(self, _: torch.Tensor) -> None:
        """
        #### The gradient of the output is here: this layer's backward begins

        Unshard again, and prefetch the layer that backward reaches next.
        """
        self.fetch_params()
        for layer in self.prev_layer:
            layer.fetch_params()
        self._wait_params()

    @torch.no_grad()
    def _post_backward_hook(self, offset: int, p: Any) -> None:
        """
        #### The gradient of a parameter is ready: copy it into the flat gradient

        * `offset` is where the parameter begins in the flat parameter
        """
        if self.grad is None:
            self.grad = torch.zeros_like(self.full)  # the padding's gradient stays zero
        # Divide by the number of ranks, so that a sum over ranks is the mean.
        self.grad[offset : offset + p.numel()] = p.grad.flatten() * (1 / self.world_size)
        # The flat gradient has a copy now, so free the original.
        p.grad = None
        self._backward_event()

    def _backward_event(self) -> None:
        """
        #### Count a gradient, and reduce after the last one

        The layer can be freed then. An operation normally computes the gradient of its input
        together with that of its parameter, so nothing reads the parameters any more.
        """
        self.arrived += 1
        if self.arrived == len(self.params):
            self.arrived = 0
            self._cleanup_params()
            self._backup_grads()

    # -------------------------------------------------------------------------------------- reduce

    def _backup_grads(self) -> None:
        """
        #### Reduce-scatter the gradients

        Each rank cuts its gradient into $N$ parts, and sends part $r$ to rank $r$ (all-to-all).
        Then it adds the parts that it has received. On the CPU gloo's own reduce-scatter would send
        twice as much. The all-to-all starts here, and overlaps the backward pass of the previous
        layer.
        """
        # One reduce is in flight at a time. So at most two layers have their whole gradients, and
        # one of them also has a receive buffer.
        for layer in self.next_layer:
            layer._add_reduced()
        self.received = torch.empty_like(self.grad)
        self.reduce = dist.all_to_all_single(self.received, self.grad, async_op=True)
        # After the first layer nothing is left to overlap, and `backward()` is about to return.
        if not self.prev_layer:
            self._add_reduced()

    @torch.no_grad()
    def _add_reduced(self) -> None:
        """
        #### Wait for the gradients of all ranks, and add their sum to the shard's gradient

        Adding lets the gradients of several micro-batches add up.
        """
        self.reduce.wait()
        # Rank by rank, so that the sum has the same bits each time.
        total, *others = self.received.view(self.world_size, -1)
        for part in others:
            total += part
        # A copy, because `total` is a view of all that was received.
        total = total.to(self.chunk.device, copy=True)
        self.chunk.grad = total if self.chunk.grad is None else self.chunk.grad + total
        self.received = None
        self.reduce = None
        self.grad = None


class Chain(nn.Module):
    """
    ## A chain of layers, each gathered while the one before it computes

    `parameters()` are the shards, so any optimizer of torch's that steps element by element trains
    them: `torch.optim.AdamW(chain.parameters())`.
    """

    def __init__(self, layers: list[Zero3Layer]):
        super().__init__()
        self.layers: Any = nn.ModuleList(layers)
        for before, after in pairwise(layers):
            before.next_layer.append(after)
            after.prev_layer.append(before)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class MappedShard:
    """
    ## A shard that rests in a file

    The file is mapped into memory: the shard is a tensor whose elements are in the file, and the
    system reads and writes its pages when they are used. An optimizer steps it like any other
    tensor. A gather goes through a buffer, and reading the file overlaps nothing. If the layer is
    on a GPU, the buffer is *pinned*, memory that the system does not move: a GPU copies from there
    by itself, and from other memory only piece by piece.
    """

    def __init__(self, layer: Zero3Layer, path: str):
        """
        ### Move a layer's shard to a file
        """
        shard = layer.chunk.detach()
        self.mapped = torch.from_file(path, shared=True, size=len(shard), dtype=shard.dtype)
        self.mapped.copy_(shard)
        self.buffer = torch.empty_like(self.mapped, pin_memory=shard.is_cuda)
        layer.chunk.data = self.mapped
        layer.file = self

    def load(self, device: torch.device) -> torch.Tensor:
        """
        ### The shard on the device: from the file to the buffer, and from there to the device
        """
        return self.buffer.copy_(self.mapped).to(device)


# ---------------------------------------------------------------------------------- three weights


def step(rank: int, store: str) -> None:
    """
    ## One training step of three weights, on one of two ranks
    """
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    linear = nn.Linear(2, 1)
    linear.load_state_dict({"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([3.0])})
    layer = Zero3Layer(linear)
    chain = Chain([layer])
    optimizer = torch.optim.SGD(chain.parameters(), lr=0.1)
    show("shard", layer.chunk)

    # Gradients: of the weight, twice the sum of the inputs; of the bias, twice their number.
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]] if rank == 0 else [[2.0, 0.0]])
    loss = 2 * chain(x).sum()
    show("all-gather", layer.full)
    loss.backward()
    show("reduce-scatter", layer.chunk.grad)
    optimizer.step()
    show("step, rate 0.1", layer.chunk)
    dist.destroy_process_group()


def show(event: str, mine: Any) -> None:
    """
    ## Print a row of the table: the numbers of both ranks
    """
    rows = [torch.empty_like(mine), torch.empty_like(mine)]
    dist.all_gather(rows, mine.detach())
    if dist.get_rank() == 0:
        print(f"{event:16}", *(" ".join(f"{n:g}" for n in row.tolist()).ljust(9) for row in rows))


if __name__ == "__main__":
    print(f"{'':16} rank 0    rank 1")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(step, (f"file://{folder}/store",), nprocs=2)

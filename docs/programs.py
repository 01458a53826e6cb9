r"""
# Small training programs that print measurements

Each program trains a sharded chain of a few layers on two ranks and prints its measurements, one
per line. Most of them also train the same chain in plain PyTorch on the global batch, and compare.

With the original package they print the expected results. `mutations.py` changes a few lines of
the package, and then they print something else. Their purpose is to show a difference, so nothing
may hide one. They compute in float64, where rounding in another order of a sum causes differences
of about $10^{-16}$, and compare with a tolerance of $10^{-12}$. And they use plain SGD, because
Adam divides a gradient by its size:

$$w \leftarrow w - \eta\, g$$

**Run this**: `python -m docs.mutations`.

**Not covered, and what that costs**: wrapped models, and more than two ranks. So the list has no
mutations of code that only these need.
"""

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, load, save
from zero3.compression import Prune, Quantize, compress
from zero3.estimate.formulas import describe
from zero3.estimate.ledger import Ledger, held_bytes
from zero3.estimate.predict import predict
from zero3.inject import inject, policies, restore
from zero3.inject.cross_entropy import chunked_cross_entropy
from zero3.inject.sequence import Stream
from zero3.inject.tensor import Pattern
from zero3.offload.activations import Activations
from zero3.offload.disk import File, whole_blocks
from zero3.pipeline import Pipeline

ROWS = 4  # of each rank's batch
WIDTH = 6  # of a row, of the input and of the output
RATE = 0.5  # the learning rate

# ------------------------------------------------------------------------------------ plain PyTorch


def modules(seed: int = 0) -> list[nn.Module]:
    """
    ## Layers of unequal sizes
    """
    torch.manual_seed(seed)
    shapes = ((WIDTH, 11), (11, 5), (5, 9), (9, WIDTH))
    return [nn.Sequential(nn.Linear(*shape), nn.Tanh()).double() for shape in shapes]


def batch(i: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """
    ## The global batch of a step, and this rank's rows of it: `(rows, WIDTH)`
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    rows = torch.randn(ROWS * world_size, WIDTH, generator=torch.Generator().manual_seed(i))
    rows = rows.double()
    return rows, rows.chunk(world_size)[rank]


def loss_of(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """
    ## A loss: the mean over rows
    """
    return model(rows).square().mean()


@torch.no_grad()
def descend(*models: nn.Module) -> None:
    """
    ## A step of SGD, for whole parameters or for shards
    """
    for w in (w for model in models for w in model.parameters()):
        if w.grad is not None:
            w.sub_(RATE * w.grad)
            w.grad = None


# ------------------------------------------------------------------------------- sharded, compared


def chain(layers: list[Any], **options: Any) -> Zero3Sequential:
    """
    ## A sharded chain of copies of these layers
    """
    return Zero3Sequential([Zero3Layer(copy.deepcopy(layer), **options) for layer in layers])


def both(layers: list[nn.Module], **options: Any) -> tuple[nn.Sequential, Zero3Sequential]:
    """
    ## The same chain, plain and sharded
    """
    return nn.Sequential(*copy.deepcopy(layers)), chain(layers, **options)


def weights(model: Zero3Sequential) -> torch.Tensor:
    """
    ## All weights, one after the other
    """
    with model.full_params() as params:
        return torch.cat([p.detach().reshape(-1) for p in params.values()])


def grads_compared(model: Zero3Sequential, plain: nn.Sequential) -> str:
    """
    ## The ratio of the shards' gradients to plain PyTorch's, if it is the same for all elements
    """
    got = [shard.grad for shard in model.parameters()]
    expected = [*_shares(plain)]
    if any(grad is None for grad in got):
        return "none on the shards, and not"
    one = torch.cat(got)  # type: ignore[arg-type]
    other = torch.cat(expected)
    ratio = (one @ other / (other @ other)).item()
    return f"{ratio:.2f} times" if torch.allclose(one, ratio * other, atol=1e-12) else "not"


def _shares(plain: nn.Sequential) -> Iterator[torch.Tensor]:
    """
    #### This rank's part of each plain layer's gradient: `(shard_numel,)`
    """
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    for layer in plain:
        flat = torch.cat([p.grad.reshape(-1) for p in layer.parameters()])  # type: ignore
        padding = flat.new_zeros(-len(flat) % world_size)
        yield torch.cat([flat, padding]).chunk(world_size)[rank]


def compare_output(model: nn.Module, plain: nn.Module) -> None:
    """
    ## Print whether two models compute the same output
    """
    with torch.no_grad():
        good = torch.allclose(model(batch()[1]), plain(batch()[1]), atol=1e-12)
    print(f"output: {'' if good else 'not '}that of plain PyTorch")


def whole_in_graph(loss: torch.Tensor) -> int:
    """
    ## The number of layers whose weights autograd keeps in memory
    """
    found = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        # A matrix product saves its weights for the gradient of its input. Read the raw field,
        # because autograd raises an error for a freed parameter.
        saved = getattr(node, "_raw_saved_mat2", None)
        weight = saved.data if saved is not None else None
        if weight is not None and weight.untyped_storage().nbytes():
            found.add(weight.untyped_storage()._cdata)
        todo += [before for before, _ in node.next_functions if before]  # type: ignore[union-attr]
    return len(found)


def ahead(tape: Ledger) -> str:
    """
    ## Count the all-gathers in backward, and those that start while another layer computes
    """
    early = 0
    fetches = 0
    computing = set()
    for e in tape.events:
        if e.phase != "backward":
            continue
        if e.event == "compute":
            computing.add(e.layer)
        elif e.event == "free":
            computing.discard(e.layer)
        elif e.event == "fetch":
            fetches += 1
            if computing - {e.layer}:
                early += 1
    return f"{early} of {fetches}"


# ---------------------------------------------------------------------------------------- programs


def step() -> None:
    """
    ## Three steps: compare numbers, memory and communication with the expectation
    """
    layers = modules()
    plain, model = both(layers)
    promised = predict(describe(layers), dist.get_world_size(), moments=0, step_bytes=0)
    for i in range(3):
        # With gradients for the input, backward needs the weights of the first layer, too.
        every, mine = (rows.requires_grad_() for rows in batch(i))
        loss_of(plain, every).backward()
        with Ledger(model) as tape:
            loss = loss_of(model, mine)
            whole = whole_in_graph(loss)
            loss.backward()
        if i == 0:
            print(f"gradients: {grads_compared(model, plain)} those of plain PyTorch")
        descend(plain, model)
    compare_output(model, plain)
    rest_bytes = held_bytes(model)
    unshards = sum(e.event == "fetch" for e in tape.events)
    print(f"at rest: {rest_bytes:,} bytes, {rest_bytes / promised.rest_bytes:.2f} times the "
          "prediction")
    print(f"whole layers in the graph after forward: {whole} of {len(layers)}")
    print(f"all-gathers in a step: {unshards}, of {len(layers)} layers; sent "
          f"{tape.sent_bytes / promised.sent_bytes:.2f} times the prediction")
    print(f"all-gathers in backward that start while another layer computes: {ahead(tape)}")


def micro_batches() -> None:
    """
    ## The same batch four times, with a quarter of its loss each time
    """
    plain, model = both(modules())
    every, mine = batch()
    loss_of(plain, every).backward()
    for _ in range(4):
        (loss_of(model, mine) / 4).backward()
    print(f"gradient of 4 micro-batches: {grads_compared(model, plain)} that of the whole batch")


def late() -> None:
    """
    ## Rank 0 is late
    """
    # Rank 1 starts with other weights, so its memory cannot contain the right ones by chance.
    model = chain(modules(seed=dist.get_rank()))
    if dist.get_rank() == 0:
        time.sleep(1)
        model(batch()[1])
    else:
        compare_output(model, nn.Sequential(*modules()))


class HalfUsed(nn.Module):
    """
    ## Two linear layers, of which only the first is used
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(WIDTH, WIDTH)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### Forward pass, with the first layer only
        """
        return self.used(x)


def clip_nan() -> None:
    """
    ## Clip by the norm of the whole gradient, while uninitialised memory is NaN
    """
    # With this setting, torch fills the memory of `torch.empty` with NaN.
    torch.use_deterministic_algorithms(True)
    # The second layer has an odd number of elements, so it needs padding.
    model = chain([HalfUsed().double(), nn.Linear(WIDTH, 5).double()])
    loss_of(model, batch()[1]).backward()
    grads = [shard.grad for shard in model.parameters()]
    squares = torch.stack([grad.square().sum() for grad in grads])
    dist.all_reduce(squares)
    for i, square in enumerate(squares):
        print(f"norm of layer {i}'s gradient:", "a number" if square.isfinite() else "nan")
    clipped = torch.cat([grad / squares.sum().sqrt() for grad in grads])
    print(f"finite gradients after clipping: {int(clipped.isfinite().sum())} of "
          f"{len(clipped)}")


class TwoLinears(nn.Module):
    """
    ## Two linear layers of one shape, created in either order
    """

    first: nn.Module
    second: nn.Module

    def __init__(self, names: tuple[str, str]) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(WIDTH, WIDTH).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """
        ### Forward pass, first `first` and then `second`
        """
        return self.second(torch.tanh(self.first(x)))


def another_order() -> None:
    """
    ## Rank 1 creates its layers in another order
    """
    torch.manual_seed(0)
    plain = TwoLinears(("first", "second"))
    other = TwoLinears(("second", "first"))
    compare_output(chain([other if dist.get_rank() else plain]), plain)


def master() -> None:
    """
    ## Three steps of a bf16 layer with an fp32 master
    """
    model = chain([nn.Linear(WIDTH, WIDTH).bfloat16()])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=RATE)
    before = weights(model)
    for _ in range(3):
        # All weights have the same gradient.
        optimizer.backward(model(torch.ones(ROWS, WIDTH).bfloat16()).float().mean())
        optimizer.step()
        optimizer.zero_grad()
    after = weights(model)
    print(f"weights changed by 3 steps: {int((before != after).sum())} of {len(after)}")


def two_weights(x: list[float], **options: Any) -> tuple[Zero3Sequential, Zero3Optimizer]:
    """
    ## A model of two weights, one on each rank, with these two numbers as gradients
    """
    model = chain([nn.Linear(2, 1, bias=False)])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=1.0, **options)
    optimizer.backward(model(torch.tensor([x])).sum())
    return model, optimizer


def clip() -> None:
    """
    ## Clip a gradient of 3 on rank 0 and 4 on rank 1 to a norm of 1
    """
    model, optimizer = two_weights([3.0, 4.0], clip_grad_norm=1.0)
    before = weights(model)
    print(f"norm of the gradient: {optimizer.step():.2f}")
    first, second = (before - weights(model)).tolist()
    print(f"the step: {first:.2f} and {second:.2f}")


class UnitStep(torch.optim.Optimizer):
    """
    ## Steps by 1 along the gradient of each parameter
    """

    def __init__(self, params: Any):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm())


def normalised() -> None:
    """
    ## A step that divides by the norm of each parameter's gradient
    """
    model = chain([nn.Linear(2, 1, bias=False)])
    optimizer = Zero3Optimizer(model, UnitStep)
    before = weights(model)
    optimizer.backward(model(torch.tensor([[3.0, 4.0]])).sum())
    optimizer.step()
    print(f"length of the step: {(before - weights(model)).norm():.2f}")


def overflow() -> None:
    """
    ## A finite gradient on rank 0, and one on rank 1 that overflows with the loss scale
    """
    _, optimizer = two_weights([1.0, 1e35], loss_scale="dynamic")
    optimizer.step()
    print(f"steps skipped: {optimizer.skipped_steps}, loss scale {optimizer.loss_scale:g}")


def files() -> None:
    """
    ## Three steps with shards in files
    """
    Path("files").mkdir(exist_ok=True)
    plain, model = both(modules(), offload=Offload("nvme", folder="files"))
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=RATE)
    for i in range(3):
        every, mine = batch(i)
        loss_of(plain, every).backward()
        descend(plain)
        with Ledger(model) as tape:
            optimizer.backward(loss_of(model, mine))
            optimizer.step()
        optimizer.zero_grad()
    compare_output(model, plain)
    sizes = [whole_blocks(layer.shard_bytes(dist.get_world_size())) for layer in describe(model)]
    # Forward reads each file, and backward each but the last layer's, which stays whole.
    promised = 2 * sum(sizes) - sizes[-1]
    print(f"read in a step: {tape.read_bytes:,} bytes, "
          f"{tape.read_bytes / promised:.2f} times the prediction")


def late_writes() -> None:
    """
    ## A step with activations in files, which are written late
    """
    Path("files").mkdir(exist_ok=True)
    # A thread for each block, so that a read does not wait for a thread that writes.
    files = Offload("nvme", folder="files", queue_depth=32, block_bytes=whole_blocks(1))
    plain, model = both(modules(), activations=Activations(files, below_bytes=0))
    move = File.move

    def late(file: File, write: bool, *args: Any) -> None:
        if write:
            time.sleep(1)
        move(file, write, *args)

    every, mine = batch()
    loss_of(plain, every).backward()
    with mock.patch.object(File, "move", late):
        loss_of(model, mine).backward()
    print(f"gradients: {grads_compared(model, plain)} those of plain PyTorch")


def damage() -> None:
    """
    ## Save, change one bit in the file of rank 1, and load
    """
    model = chain(modules())
    other = chain(modules(seed=1))
    save("saved", model, step=1)
    if dist.get_rank() == 1:
        (path,) = Path("saved").glob("*/rank-00001-*")
        content = bytearray(path.read_bytes())
        # Flip the sign of the last number.
        content[-1] ^= 0x80
        path.write_bytes(content)
    dist.barrier()
    load("saved", other)
    changed = int((weights(other) != weights(model)).sum())
    print(f"loaded; weights that differ from the saved ones: {changed}")


def stages() -> None:
    """
    ## A step of two stages, the first and the last of whose layers share a weight
    """
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH).double() for _ in range(4)]
    layers[3].weight = layers[0].weight
    plain = nn.Sequential(*copy.deepcopy(layers))
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "shard"))
    model = Pipeline(layers, mesh, loss_fn=lambda output, _: output.square().mean(),
                     micro_batches=4)
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=RATE)
    every, _ = batch()
    with Ledger(model, optimizer) as tape:
        model.train_batch(every, every, optimizer)
    optimizer.step()
    plain(every).square().mean().backward()
    descend(plain)
    with model.full_params() as params:
        moved = {name: (params[name] - old).norm() / (p - old).norm()
                 for (name, p), old in zip(plain.named_parameters(), before.values(), strict=True)}
    print(f"step of the tied weight: {moved.pop('0.weight'):.2f} times that of plain PyTorch")
    print(f"steps of the others: {min(moved.values()):.2f} to {max(moved.values()):.2f} times")
    fetches = sum(event.event == "fetch" for event in tape.events)
    print(f"gathers of three layers: {fetches}")


def pruned() -> None:
    """
    ## Three steps of two layers: half of the first one's weights are pruned, the second has one bit
    """
    torch.manual_seed(0)
    layers: list[Any] = [nn.Sequential(nn.Linear(WIDTH, 11), nn.Tanh()), nn.Linear(11, WIDTH)]
    compress(layers, {"0.0": [Prune(0.5)], "1": [Quantize(1)]})
    model = Zero3Sequential([Zero3Layer(layer) for layer in layers])
    optimizer = Zero3Optimizer(model, torch.optim.SGD, lr=RATE)
    before = weights(model)
    for i in range(3):
        loss = loss_of(model, batch(i)[1].float().requires_grad_())
        whole = whole_in_graph(loss)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    with model.full_params():
        zeros = layers[0][0].weight == 0
    print(f"pruned: {int(zeros.sum())} of {zeros.numel()}")
    print(f"compressed weights in the graph after forward: {whole} of {len(layers)}")
    changed = (weights(model) != before)[-11 * WIDTH :]
    print(f"weights of one bit that 3 steps have changed: {int(changed.sum())} of {len(changed)}")
    equal = nn.Linear(4, 3)
    nn.init.ones_(equal.weight)
    compress([equal], {"0": [Prune(0.5)]})
    print(f"pruned of equal ones: {int((equal.weight == 0).sum())} of {equal.weight.numel()}")


class Network(nn.Module):
    """
    ## A feed-forward network that two ranks split
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8)
        self.down = nn.Linear(8, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).tanh())


class Block(nn.Module):
    """
    ## A norm, a network, dropout, and the residual stream
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.network = Network()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.network(self.norm(x)))


class Blocks(nn.Module):
    """
    ## Two blocks and a last norm
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def split() -> None:
    """
    ## A step of layers that both ranks compute, whole and by positions
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    network = Pattern(columns=("up",), rows=("down",))
    stream = Pattern(stream=Stream("blocks", "norm", classes=(torch.typename(Block),)))
    for name, patterns in (("whole", {Network: network}),
                           ("by positions", {Network: network, Blocks: stream})):
        torch.manual_seed(0)
        plain = Blocks().double()
        model = inject(copy.deepcopy(plain), [
            policies.tensor_parallel(mesh, patterns, sequence=Blocks in patterns)])
        x = torch.randn(ROWS, 5, WIDTH, dtype=torch.float64)
        losses = []
        for each in (plain, model):
            torch.manual_seed(1)
            output = each(x)
            losses.append(output)
            (output * x).sum().backward()
        different = int(((losses[0] - losses[1]).abs() > 1e-12).sum())
        print(f"{name}: outputs that differ from plain PyTorch: {different}")
        for param in ("first.weight", "blocks.0.norm.weight", "blocks.0.network.down.bias"):
            ours, theirs = (each.get_parameter(param).grad for each in (model, plain))
            off = float((ours - theirs).norm() / theirs.norm())  # type: ignore[operator]
            print(f"{name}: gradient of {param}: {off:.0%} off")
        restore(model)


def chunks() -> None:
    """
    ## A loss that is computed in chunks of positions, of which some do not count
    """
    torch.manual_seed(0)
    hidden = torch.randn(9, WIDTH, dtype=torch.float64, requires_grad=True)
    head = torch.randn(7, WIDTH, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 6, -100, 3, 3, -100, 1, 2, -100])
    plain = nn.functional.cross_entropy(hidden @ head.t(), targets)
    expected = torch.autograd.grad(plain, [hidden, head])
    loss = chunked_cross_entropy(hidden, head, targets, rows=4)
    print(f"the loss: {loss.item() / plain.item():.2f} times that of plain PyTorch")
    for name, ours, theirs in zip(("hidden states", "the head"),
                                  torch.autograd.grad(loss, [hidden, head]), expected,
                                  strict=True):
        off = float((ours - theirs).norm() / theirs.norm())
        print(f"gradient of {name}: {off:.0%} off")

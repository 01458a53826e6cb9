r"""
# Pipeline: train a model in stages, each of them sharded

`Pipeline` gives each rank some stages of a model, and carries out the actions of `schedules.py`.

Four ranks on a mesh of two pipelines and two shards, ("pipeline", "shard"):

| | rank 0 | rank 1 | rank 2 | rank 3 |
|---|---|---|---|---|
| place in the mesh | 0, 0 | 0, 1 | 1, 0 | 1, 1 |
| keeps | half of stage 0 | half of stage 0 | half of stage 1 | half of stage 1 |
| rows of the batch | first half | second half | first half | second half |
| sends activations to | rank 2 | rank 3 | | |
| gathers and reduces with | rank 1 | rank 0 | rank 3 | rank 2 |

So a rank keeps $\frac{1}{pN}$ of the model.

**A step.** With micro-batches $0, \ldots, m - 1$ of equal size and their losses $L_i$, the gradient
is that of

$$L = \frac{1}{m} \sum_{i=0}^{m-1} L_i$$

averaged over the ranks of a stage. So the weights are those of plain training on the global batch.

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))
    model = Pipeline(layers, mesh, loss_fn=loss, micro_batches=4)
    optimizer = Zero3Optimizer(model, torch.optim.AdamW, lr=1e-3)
    for x, y in batches:
        loss = model.train_batch(x, y, optimizer)
        optimizer.step()
        optimizer.zero_grad()

**What stays in memory** from the forward to the backward pass of a micro-batch: what autograd has
saved, and the tensors that came in, because their gradients are needed. Tensors that went out are
dropped at the first send after they were received: autograd needs only their place in the graph.

**Run this**: `python -m pytest tests/pipeline/test_pipeline.py`.

**Not covered, and what that costs**: every rank builds all layers before it keeps its own. A
gradient stays whole on each rank of its stage until the last micro-batch, as in `no_sync()`.
`timeline.py` has formulas of their bytes. All ranks compare a checksum of the batch before they
begin, so an accelerator first finishes the step before.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from zero3.comm.collectives import ALONE, Communicator, bytes_of
from zero3.comm.links import groups_of
from zero3.comm.order import Counted
from zero3.guards.checks import expect, same
from zero3.guards.freed import FreedParameter
from zero3.layer import Zero3Layer
from zero3.offload.activations import Activations
from zero3.offload.tiers import Offload
from zero3.optimizer.stage3 import Zero3Optimizer
from zero3.pipeline.channels import LEAVES, Channels, Tree, to_send
from zero3.pipeline.schedules import PASSES, Action, actions
from zero3.pipeline.stages import (
    Plan,
    Stage,
    balanced,
    holder,
    layer_of,
    names_of,
    untie,
)
from zero3.sharded import Sharded, ShardedModel

_MESHES = (("pipeline", "shard"), ("pipeline", "replicate", "shard"))


class Pipeline(ShardedModel):
    """
    ## A model in stages
    """

    label = "the pipeline"
    layer_idx = ALONE

    def __init__(self, layers: Iterable[nn.Module],
                 mesh: DeviceMesh, *,
                 loss_fn: Callable[[Tree, Tree], torch.Tensor],
                 schedule: str = "1f1b",
                 micro_batches: int = 1,
                 stages: list[int] | None = None,
                 per_rank: int = 1,
                 gathers: str = "stage",
                 offload: Offload | str | None = None,
                 activations: Activations | Offload | str | None = None):
        """
        ### Cut a model into stages, and shard those of this rank

        All ranks of the mesh call it alike, and get the values of the first rank.

        * `layers` are plain modules; each takes what the one before it returns
        * `mesh` has the dimensions ("pipeline", "shard"), or ("pipeline", "replicate", "shard")
        * `loss_fn(output, y)` is the mean loss of the last layer's output, a scalar
        * `schedule` and `gathers` are as for `actions`
        * `micro_batches` is the number of parts of a batch
        * `stages` has the number of layers of each stage; left out, they are balanced by parameters
        * `per_rank` is the number of stages on each rank, if `stages` is left out
        * `offload` and `activations` are as for `Zero3Layer`. With `activations`, micro-batches
          that wait for backward take less memory

        Raises `ValueError` for an impossible mesh, schedule or cut, and whatever `Zero3Layer`
        raises.
        """
        super().__init__()
        expect(isinstance(mesh, DeviceMesh) and mesh.mesh_dim_names in _MESHES, "mesh",
               f"a mesh with the dimensions {_MESHES[0]} or {_MESHES[1]}", f"{mesh}",
               "`init_device_mesh(device, (2, 2), mesh_dim_names=(\"pipeline\", \"shard\"))`")
        layers = [*layers]
        # The ranks of this pipeline, in order.
        self.across = Communicator(groups_of(mesh["pipeline"]))
        self.ranks = self.across.group.size
        self.place = self.across.group.rank
        told = self.across.gather({
            **{f"`{name}`": (tuple(tensor.shape), tensor.dtype)
               for kind in ("named_parameters", "named_buffers")
               for tensor, names in names_of(layers, kind).items() for name in names},
            "number of layers": len(layers),
            "`stages`": stages,
            "`per_rank`": per_rank,
            "`schedule`": schedule,
            "`micro_batches`": micro_batches,
            "`gathers`": gathers})
        same(f"rank {self.across.global_rank}: the pipeline", self.across.ranks, told,
             "build it alike on all ranks", ValueError)
        plan = Plan(layers, self.ranks, balanced(layers, self.ranks * per_rank)
                    if stages is None else stages)
        self.count = len(plan.counts)
        self.ends = plan.ends
        self.shapes = plan.shapes
        self.loss_fn = loss_fn
        self._micro_batches = micro_batches
        self.shared_buffers = [name for name in plan.shared_buffers
                               if plan.owners[layer_of(name)] == self.place]
        self.holds = gathers != "each"
        options = (schedule, self.ranks, micro_batches, self.count // self.ranks, gathers,
                   plan.ends)
        self.train_list = actions(*options)[self.place]
        self.eval_list = actions(*options, backward=False)[self.place]

        self.across.broadcast(tensor for layer in layers
                              for tensor in (*layer.parameters(), *layer.buffers()))
        self._build(
            plan,
            mesh=mesh[mesh.mesh_dim_names[1:]],  # type: ignore[index]
            offload=Offload.of(offload),
            activations=activations)
        self._free_others(plan)
        self.channels = Channels(self.across.group, self.comm.ranks, self.comm.device)

    def _build(self, plan: Plan, **options: Any) -> None:
        """
        #### Shard the layers of this rank's stages, and its tied weights

        The first stage that uses tied weights keeps them, and the last one borrows them. All layers
        of this rank share a communicator and a reducer.

        * `options` are those of each `Zero3Layer`
        """
        own = {i: layer for i, layer in enumerate(plan.layers)
               if plan.owners[i] == self.place}
        untie(own.values(), plan.tied)
        built = {i: Zero3Layer(layer, **options) for i, layer in own.items()}
        self.module_list = nn.ModuleDict(
            {str(i): layer for i, layer in built.items()})
        self.sharded_layers = tuple(built.values())
        # The layer of tied weights, on the two ranks that use them.
        self.tied: tuple[Zero3Layer, ...] = ()
        keeps, borrows = (self.place == s % self.ranks for s in self.ends)
        if plan.tied and (keeps or borrows):
            if not keeps:
                # Its shard comes from the other rank in each step.
                options["offload"] = None
            tied = Zero3Layer(holder(plan.tied), **options)
            tied.layer_idx = len(plan.layers)
            tied.label = "the tied weights"
            self.tied = (tied,)
            if keeps:
                # For its parameters' names in the plain model.
                self.module = tied
                self.sharded_layers += self.tied
        # A layer like that of the first stage, which no optimizer and no checkpoint knows.
        self.borrowed = () if keeps else self.tied
        # A dict is not registered: its layers are in `module_list` already.
        self.stages = {
            s: Stage({i: layer for i, layer in built.items() if plan.places[i] == s},
                     self.tied if s in self.ends else ())
            for s in range(self.place, self.count, self.ranks)}
        # That of the ranks that have the same stages, and that of all ranks.
        self.stage_comm = self._first.comm
        self.comm = self.stage_comm.join(self.across.group)
        for layer in (*self.sharded_layers, *self.tied):
            layer.comm = self.stage_comm
            layer.reducer = self._first.reducer

    def _free_others(self, plan: Plan) -> None:
        """
        #### Free the parameters of layers that other ranks keep

        So it is an error if a layer of this rank uses one without registering it.
        """
        for p, names in plan.names.items():
            if plan.owners[layer_of(names[0])] != self.place and p not in plan.tied:
                p.data = torch.empty(0, dtype=p.dtype, device=p.device)
                p.__class__ = FreedParameter.named(
                    self._first,
                    names[0],
                    "register the parameter in each layer that uses it, `head.weight = "
                    "embedding.weight`; then it is tied")

    def named_layers(self) -> Iterator[tuple[str, Sharded]]:
        """
        ### The layers of this rank, with the prefix of their parameters' names
        """
        for i, layer in self.module_list.items():
            yield f"{i}.", layer  # type: ignore[misc]
        if self.tied and not self.borrowed:
            yield "", self.tied[0]

    @contextmanager
    def full_params(self, writeback: bool = False) -> Iterator[dict[str, nn.Parameter]]:
        """
        ### The full parameters of the whole model, named as in `nn.Sequential(*layers)`

        A tied weight is one tensor under all its names. All ranks must enter and leave together;
        `writeback` is as for a layer.
        """
        with super().full_params(writeback) as own, ExitStack() as stack:
            for layer in self.borrowed:
                layer.listener = self.listener
                own |= stack.enter_context(layer.full_params(writeback))
            found: dict[str, nn.Parameter] = {}
            for names, (owner, shape, dtype) in self.shapes.items():
                param: Any = own[names[0]] if names[0] in own else torch.empty(
                    shape,
                    dtype=dtype,
                    device=self.comm.device)
                # This is no write of the caller's.
                with torch.autograd._unsafe_preserve_version_counter(param):
                    self.across.broadcast([param], owner)
                found |= dict.fromkeys(names, param)
            try:
                yield found
            except BaseException as error:
                if writeback and not isinstance(error, GeneratorExit):
                    # The other stages wait for this one in `agree`.
                    self.comm.gather(f"{type(error).__name__}: {error}")
                raise
            if writeback:
                self._share_written(found)

    def _share_written(self, found: dict[str, nn.Parameter]) -> None:
        """
        #### Give all stages the values that the first rank has written
        """
        wrong = [f"`{name}` of {tuple(found[name].shape)}, {found[name].dtype}"
                 for (name, *_), (_, *expected) in self.shapes.items()
                 if [found[name].shape, found[name].dtype] != expected]
        self.comm.agree(self, "is not written back", "a block that ends without an error, and "
                        "parameters of the same shape and type", ", ".join(wrong), "look for the "
                        "error on that rank; nothing has changed")
        self.across.broadcast(found[names[0]] for names in self.shapes)

    def held_tensors(self) -> Iterator[torch.Tensor | None]:
        """
        ### The borrowed weights, which no module has
        """
        for layer in self.borrowed:
            yield from layer.held_tensors()
            for flat in layer.flats:
                yield from (flat.shard, flat.shard.grad)

    def forward(self, *args: Tree, **kwargs: Tree) -> None:
        """
        ### Not possible: a pipeline computes a batch in parts, forward and backward by turns
        """
        expect(False, "the pipeline is called", "a batch with its targets", "a forward pass",
               "call `train_batch(x, y, optimizer)` or `eval_batch(x, y)`", RuntimeError)

    # ------------------------------------------------------------------------------------ a batch

    def train_batch(self, x: Tree,
                    y: Tree,
                    optimizer: Zero3Optimizer) -> float:
        """
        ### Forward and backward of all micro-batches

        * `x` and `y` are this rank's rows: tensors, or tuples, lists and dicts of them, with a row
          for each example. All ranks of a pipeline are given the same ones

        Returns the mean loss over all ranks. Gradients add up until `optimizer.zero_grad()`. Raises
        `ValueError` if the rows cannot be cut, or if the stages were given different batches. An
        error in one stage is raised on all ranks.
        """
        # A newer optimizer has taken over the layers' reducers.
        expect(self._first.reducer in getattr(optimizer, "buckets", ()), "train_batch",
               "the newest `Zero3Optimizer` of this pipeline",
               f"another {type(optimizer).__name__}",
               "build it on the pipeline: `Zero3Optimizer(pipeline, ...)`")
        return self._run(_Batch(self, self.train_list, x, y, optimizer))

    @torch.no_grad()
    def eval_batch(self, x: Tree,
                   y: Tree,
                   outputs: list[Tree] | None = None) -> float:
        """
        ### Forward of all micro-batches, without gradients

        * `outputs` gets what the last layer returns for each micro-batch, on the ranks that have it

        The rest is as for `train_batch`.
        """
        return self._run(_Batch(self, self.eval_list, x, y, None, outputs))

    def _run(self, batch: "_Batch") -> float:
        """
        #### Carry out the actions of a batch, and return its mean loss
        """
        optimizer = batch.optimizer
        # A search of the modules for layers does not find this one.
        for layer in self.borrowed:
            layer.listener = self.listener
            layer.reducer = self._first.reducer
            for flat in layer.flats:
                flat.shard.grad_dtype = getattr(optimizer, "reduce_dtype", None) or flat.shard.dtype
        buffers = self._sums_of_shared()
        with self._together():
            while batch.waiting:
                action = batch.waiting.pop(0)
                sent = getattr(batch, action.kind.replace(" ", "_"))(action)
                self.listener.record(
                    SimpleNamespace(comm=self.comm, label=action.where),
                    action.kind,
                    0,
                    sent)
            self._refuse_written(buffers)
            if optimizer is not None:
                # The last stage has scaled the loss, and so all gradients.
                optimizer.has_scaled = True
                for layer in self.tied:
                    layer.reduce()
                for bucket in optimizer.buckets:
                    bucket.end()
            # The mean of the last stage's losses, on all ranks. This reports a fault of another
            # rank; `end` would wait without noticing it.
            stages = self.stage_comm.over_stages(self, batch.loss.view(1))  # (ranks, 1) fp64
            last = stages[(self.count - 1) % self.ranks]
            loss = float(self.stage_comm.numbers(self, last).mean())
            self.channels.end()
            return loss

    def _sums_of_shared(self) -> dict[str, int]:
        """
        #### A checksum of each buffer of this rank that layers on several ranks share
        """
        # A layer is the `module` of the one that shards it.
        return {name: _checksum([self.module_list.get_buffer(name.replace(".", ".module.", 1))])
                for name in self.shared_buffers}

    def _refuse_written(self, before: dict[str, int]) -> None:
        """
        #### Refuse a module that writes to its buffers, in stages of several ranks

        The ranks' copies would differ.
        """
        written = sorted(name for name, _ in before.items() - self._sums_of_shared().items())
        expect(not written, f"rank {self.comm.global_rank}: buffers that layers on several ranks "
               "share", "the same values on all of them", f"{written}, which this rank has written",
               "give each layer a module of its own, `copy.deepcopy`; or keep these layers on one "
               "rank, with `stages=`", RuntimeError)

    def cut(self, x: Tree,
            y: Tree,
            does: str) -> list[tuple[Tree, Tree]]:
        """
        ### Cut a batch into micro-batches, and check that all stages were given the same one

        * `does` is what this rank is about to do, "train" or "evaluate"

        Returns `x` and `y` of each. Raises `ValueError` on all ranks if they cannot be cut alike.
        """
        leaves, spec = pytree.tree_flatten((x, y))
        rows = {len(leaf) for leaf in leaves if _has_rows(leaf)}
        odd = {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, LEAVES)}
        problem = ""
        if len(rows) > 1 or any(not n or n % self.micro_batches for n in rows):
            problem = f"tensors of {sorted(rows)} rows"
        if odd:
            problem = f"{sorted(odd)} in it"
        # Tensors in words, and other values as they are.
        kinds = [f"{leaf.dtype} of {tuple(leaf.shape)}" if isinstance(leaf, torch.Tensor)
                 else repr(leaf) for leaf in leaves]
        told = (f"{kinds} to {does} in {'training' if self.training else 'evaluation'} mode, and "
                f"values with the checksum {_checksum(leaves)}")
        self.channels.compare(
            problem, told, "the same tensors in all stages, in tuples, lists and dicts, with rows "
            f"for {self.micro_batches} micro-batches", "give all ranks of a pipeline the same "
            f"batch, with rows for {self.micro_batches} micro-batches; or pass another "
            "`micro_batches=`. Expand a tensor without rows, such as positions, to one row for "
            "each; or make it a buffer")
        parts = [leaf.chunk(self.micro_batches) if _has_rows(leaf) else [leaf] * self.micro_batches
                 for leaf in leaves]
        return [pytree.tree_unflatten([*each], spec) for each in zip(*parts, strict=True)]

    @property
    def micro_batches(self) -> int:
        """
        ### The number of parts of a batch, fixed because the lists of actions depend on it
        """
        return self._micro_batches

    @property
    def _first(self) -> Sharded:
        return next(layer for layer in self.sharded_layers if layer.flats)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """
        #### Tell the ranks that wait for this one about an error
        """
        try:
            yield
        except BaseException as error:
            comm = self.stage_comm
            mine = f"{type(error).__name__}: {error} On rank {self.comm.global_rank}."
            # A rank that was woken by another one's failure does not know the first error.
            first = self.channels.fail(mine, comm.failed is None)
            # If a transfer of the stage has failed, the ranks of that stage know already.
            comm.give_up(f"{error}" or repr(error), self, comm.groups)
            comm.announce_fault([comm.stages], self)
            if first != mine and isinstance(error, Exception):
                raise RuntimeError(f"{error} The first error of all: {first}") from error
            raise


class _Batch:
    """
    ## A batch on its way through the stages of this rank

    Each kind of action is a method of the same name, which returns what it has sent.
    """

    def __init__(self, pipeline: Pipeline,
                 listed: list[Action],
                 x: Tree,
                 y: Tree,
                 optimizer: Zero3Optimizer | None,
                 outputs: list[Tree] | None = None):
        self.pipeline = pipeline
        self.waiting = [*listed]  # the actions that are still to come
        self.optimizer = optimizer
        if pipeline.stage_comm.broken:
            raise RuntimeError(pipeline.stage_comm.broken)
        self.parts = pipeline.cut(x, y, "evaluate" if optimizer is None else "train")
        # What a stage is about to get of a micro-batch. It was computed here, or has come in.
        self.values: dict[tuple[int, int], Tree] = {}
        # For backward: the tensors that came in, and where in the graph gradients arrive.
        self.kept: dict[tuple[int, int], tuple[list[torch.Tensor], list[Tree]]] = {}
        self.loss = torch.zeros((), dtype=torch.double, device=pipeline.comm.device)
        self.outputs = outputs

    # ------------------------------------------------------------------------------------- compute

    def forward(self, action: Action) -> None:
        """
        ### Compute a micro-batch through a stage
        """
        key = action[1:]
        x, y = self.parts[action.micro_batch]
        value = self.values.pop(key) if action.stage else _copied(x)
        came_in = _trainable(value)
        self.pipeline.stages[action.stage].begin()
        value = pytree.tree_map_only(torch.Tensor, _Arrival.apply, value)
        output = self.pipeline.stages[action.stage](value)
        if action.stage == self.pipeline.count - 1:
            edges: list[Tree] = [self._loss_of(output, y)]
        else:
            self.values[action.stage + 1, action.micro_batch] = (
                output if self.pipeline.ranks > 1 else _detached(output))
            edges = [get_gradient_edge(t) for t in _trainable(output)]
        if self.optimizer is not None:
            self.kept[key] = (came_in, edges)

    def _loss_of(self, output: Tree, y: Tree) -> torch.Tensor:
        """
        #### The loss of a micro-batch, counted in the batch's mean
        """
        if self.outputs is not None:
            self.outputs.append(output)
        loss = self.pipeline.loss_fn(output, _copied(y))
        expect(isinstance(loss, torch.Tensor) and loss.numel() == 1, "`loss_fn`",
               "the mean loss, a tensor of one element",
               f"{getattr(loss, 'shape', type(loss))}", "take the mean over the rows")
        loss = loss.reshape(())
        self.loss += loss.detach().double() / self.pipeline.micro_batches
        return loss

    def backward(self, action: Action) -> None:
        """
        ### Go back through a stage, and add to the full gradients of its layers
        """
        key = action[1:]
        came_in, edges = self.kept.pop(key)
        assert self.optimizer is not None
        self.pipeline.stages[action.stage].begin()
        with self.optimizer.no_sync():
            if action.stage == self.pipeline.count - 1:
                self.optimizer.backward(edges.pop() / self.pipeline.micro_batches)
            elif edges:
                pairs = [(edge, grad)
                         for edge, grad in zip(edges, self.values.pop(key), strict=True)
                         if grad is not None]
                torch.autograd.backward([edge for edge, _ in pairs],
                                        [grad for _, grad in pairs])
        if action.stage:
            self.values[action.stage - 1, action.micro_batch] = [
                tensor.grad for tensor in came_in]

    # ---------------------------------------------------------------------------------------- move

    def send(self, action: Action) -> Counted:
        """
        ### Send activations to the next stage, or gradients to the one before
        """
        return self._send(
            action,
            self.values.pop((self._partner(action), action.micro_batch)))

    send_gradient = send

    def receive(self, action: Action) -> None:
        """
        ### Receive activations from the stage before, or gradients from the next one
        """
        self.values[action[1:]] = self._receive(action)

    receive_gradient = receive

    def _send(self, action: Action, value: Tree) -> Counted:
        """
        #### Send something to the rank that receives it
        """
        there = Action(action.kind.replace("send", "receive"),
                       self._partner(action),
                       action.micro_batch)
        return self.pipeline.channels.send(there, there.stage % self.pipeline.ranks, value)

    def _receive(self, action: Action) -> Tree:
        """
        #### Wait for what another rank sends for this action
        """
        return self.pipeline.channels.receive(action,
                                              self._partner(action) % self.pipeline.ranks)

    def _partner(self, action: Action) -> int:
        """
        #### The stage at the other end of a transfer
        """
        if "tied" in action.kind:
            return sum(self.pipeline.ends) - action.stage
        return action.stage + (1 if action.kind in ("send", "receive gradient") else -1)

    # ---------------------------------------------------------------------------- gather and reduce

    def unshard(self, action: Action) -> None:
        """
        ### Gather a stage, unless each pass gathers
        """
        upcoming = next(each.kind for each in self.waiting
                        if each.stage == action.stage and each.kind in PASSES)
        self.pipeline.stages[action.stage].unshard(self.pipeline.holds, upcoming == "backward")

    def reshard(self, action: Action) -> None:
        """
        ### Free a stage
        """
        self.pipeline.stages[action.stage].reshard()

    @torch.no_grad()
    def reduce(self, action: Action) -> None:
        """
        ### Start to reduce the gradients of a stage; the next one, or the batch's end, finishes it

        Tied weights wait for the end, because both of their stages add to their gradient.
        """
        for layer in reversed(self.pipeline.stages[action.stage].module_list):
            layer.reduce()

    # -------------------------------------------------------------------------------- tied weights

    def send_tied(self, action: Action) -> Counted:
        """
        ### Lend this rank's shard of the tied weights to its partner
        """
        (tied,) = self.pipeline.tied
        shards = []
        for flat in tied.flats:
            shard = flat.storage.load().to(tied.device, copy=True)
            shards.append(shard.requires_grad_(flat.shard.requires_grad))
            flat.storage.release()
        return self._send(action, shards)

    @torch.no_grad()
    def receive_tied(self, action: Action) -> None:
        """
        ### Use the shard of the tied weights that the first stage has sent
        """
        flats = self.pipeline.tied[0].flats
        for flat, shard in zip(flats, self._receive(action), strict=True):
            flat.shard.requires_grad_(shard.requires_grad)
            # `.data`, because `full_params(writeback=True)` refuses shards that have changed.
            flat.shard.data.copy_(shard)

    def send_tied_gradient(self, action: Action) -> Counted:
        """
        ### Reduce the gradient of the borrowed weights, and send it to where they are kept

        It comes with the names of the parameters that have contributed to it.
        """
        (tied,) = self.pipeline.tied
        tied.reduce()
        tied.reducer.end()
        grads: list[Any] = [flat.shard.grad for flat in tied.flats]
        tied.zero_grad()
        return self._send(action, [
            None if grad is None else
            (sorted(grad.used), grad.as_subclass(torch.Tensor))
            for grad in grads])

    @torch.no_grad()
    def receive_tied_gradient(self, action: Action) -> None:
        """
        ### Add the gradient of the last stage to this rank's part of the full gradient

        With replicas it is a sum over all of them already, so only the first one adds it.
        """
        (tied,) = self.pipeline.tied
        for flat, theirs in zip(tied.flats, self._receive(action), strict=True):
            if theirs is None:
                continue
            names, grad = theirs
            if flat.grad is None:
                flat.begin_grad(torch.empty_like(
                    flat.full, dtype=flat.shard.grad_dtype))
            full = flat.zero_missing()
            flat.ready.update(names)
            if tied.comm.replicas.rank == 0:
                tied.comm.rows(full)[tied.comm.rank] += grad


class _Arrival(torch.autograd.Function):
    """
    ## What came in, as a result of an operation

    A layer may write to it in place, which autograd does not allow for a leaf.
    """

    @staticmethod
    def forward(ctx, tensor):
        return tensor.detach()

    @staticmethod
    def backward(ctx, grad):
        return grad


def _has_rows(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0


def _checksum(leaves: list[object]) -> int:
    """
    #### A checksum of the tensors of a batch, which the host computes
    """
    found = 0
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found = zlib.crc32(bytes_of(leaf).cpu().numpy().data, found)
    return found


def _copied(value: Tree) -> Tree:
    """
    #### A copy of a micro-batch, which a layer or `loss_fn` may write to

    Micro-batches are views of one tensor.
    """
    return pytree.tree_map_only(torch.Tensor, torch.clone, value)


def _detached(value: Tree) -> Tree:
    """
    #### What another stage of this rank has computed, as it would come from another rank

    That is without its graph, and in memory that the next micro-batch does not write to.
    """
    return pytree.tree_map_only(
        torch.Tensor, lambda t: to_send(t).requires_grad_(t.requires_grad), value)


def _trainable(value: Tree) -> list[torch.Tensor]:
    """
    #### The tensors of a value that need gradients
    """
    return [leaf for leaf in pytree.tree_leaves(value)
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad]

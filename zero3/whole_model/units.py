r"""
# Units: a whole model learns its own order

A `Unit` is a layer of a whole model. `TracedOrder` learns in which order the units compute, and
says when each one is gathered and when it is freed. With `unit_bytes` small neighbours share a
unit, see `Together`.

A model that is no chain has no list of what comes next. But each step does the same as the one
before it. So the first forward pass is *traced*, and gathers on demand. From then on the trace says
which units to gather while others compute.

Take the root and three units of 10 elements, a, b and c, with room for 10 elements ahead. After the
first step:

| the pass reaches | gathered on demand | prefetched | freed afterwards |
|---|---|---|---|
| forward, the root | the root | a | |
| forward, a | | b | a |
| forward, b | | c | b |
| forward, c | | | nothing: backward begins with c |
| backward, c | | b | c |
| backward, b | | a | b |
| backward, a | | | a, then the root |

A pass that goes another way is noticed at the first difference. From there on it gathers on demand,
and the next pass expects the new order.

$$\underbrace{u_1, \ldots, u_p}_{\text{seen}}\;
\underbrace{u_{p+1}, \ldots, u_{p+k}}_{\text{soon: prefetched, or not freed}}\;
u_{p+k+1}, \ldots
\qquad \sum_{i=1}^{k} P_{u_{p+i}} \le \text{elements to prefetch}$$

Units that come *soon* are prefetched ([ZeRO-Infinity](https://arxiv.org/abs/2104.07857), section
6.2), and a unit that comes soon *again* is not freed in between. So the last units stay full from
forward to backward, which saves their second all-gather.

| a unit | is full from | to | all-gathers in a step |
|---|---|---|---|
| a layer | shortly before it computes | its end, forward and again backward | 2 |
| the last one | the same | the end of its backward, from the second step on | 1 |
| the root | the beginning of forward | the end of backward | 1 |
| a persistent one | its first use after a step | the first forward after the next step | 1 |

The first three counts are per micro-batch. A unit is always in one of these states:

| state | memory | parameters | until |
|---|---|---|---|
| at rest | freed | closed | it is gathered, ahead or on demand |
| in flight | whole, filling | closed | a unit that needs it computes |
| in use | whole | open | all its `holders` have computed |
| staying | whole | closed | it computes again, or the pass ends, or the optimizer steps |

*Closed* parameters report each use. So the first use of one unit's parameter by another is noticed
(section 7.1, *external* parameters). From then on both are gathered together.

**Run this**: `python -m zero3.whole_model` prints the order of events in two steps of a small
model.

**Not covered, and what that costs**: a unit that is called outside the model's own forward is
gathered on demand; other methods of the model that use parameters of the root raise errors. A layer
that is called twice stays full in backward from one call to the other. If a module has an attribute
that units have themselves, `layer_idx` for instance, read it from `unit.module`. `isinstance` says
of a unit what it says of its module, `type` does not; and `isinstance(unit, Iterable)` is true for
all units. A write through `.data` of a persistent unit's shard is seen only after the next step, or
after `release_all()`. A layer whose parameters have two names, or that has units inside, does not
share a unit, and neither do `leaf_classes`. Layers of a shared unit cannot be frozen one by one.
Only the wrapped model's `parameters()` has the shared shards, not those of a layer or of a list of
layers. The fused loop of AdamW rounds the last elements of a shard in another way, so the last
place may differ.
"""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3.comm.collectives import named_range
from zero3.guards.contents import uncompiled
from zero3.layer import Zero3Layer
from zero3.sharded import Schedule, Sharded
from zero3.watch import Call, in_backward


class Trace:
    """
    ## The order in which units compute

    There are three kinds of passes: "forward" with gradients, "eval" without, and "backward". The
    last pass of a kind says how the next one will go. The first backward pass is expected to be the
    reverse of forward.
    """

    def __init__(self) -> None:
        self.learnt: dict[str, list[Unit]] = {}  # the last pass of each kind
        self.kind = ""  # the kind of the pass that runs
        self.seen: list[Unit] = []  # the units that it has reached
        self.known: list[Unit] = []  # the order in which it is expected to reach them
        self.left: list[Unit] = []  # the last forward pass, in the order of leaving
        self.misses = 0  # passes that went another way than expected

    def begin(self, kind: str) -> None:
        """
        ### Begin a pass, and end the one before it
        """
        self.end()
        if kind == "forward":
            self.left = []
        self.kind = kind
        self.seen = []
        # Backward never reaches a unit that left nothing in the graph.
        self.known = self.learnt.get(
            kind,
            [unit for unit in reversed(self.left) if kind == "backward" and unit.watch.pending])

    def end(self) -> None:
        """
        ### Expect the next pass of this kind to go like this one
        """
        if self.kind:
            self.misses += self.seen != self.learnt.get(self.kind, self.seen)
            self.learnt[self.kind] = self.seen
        self.kind = ""

    def follows(self) -> bool:
        """
        ### Whether the pass has gone as expected so far
        """
        return bool(self.kind) and self.seen == self.known[: len(self.seen)]

    def upcoming(self) -> list["Unit"]:
        """
        ### The units that the pass will reach, in order
        """
        return self.known[len(self.seen) :] if self.follows() else []


class StandIn(nn.Module):
    """
    ## A module in the place of another one, which may be a container such as `nn.Sequential`

    Attributes that it does not have are read, set and deleted on the plain module.
    """

    module: Any

    def _unit(self) -> Any:
        """
        #### The unit that has the plain module
        """
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            unit = self._unit()
            # Not `unit.module`, which would get here again before there is one.
            plain = nn.Module.__getattr__(unit, "module")
            if not isinstance(getattr(type(plain), name, None), property):
                return getattr(plain, name)
            # A property may ask for the parameters.
            with unit.guard:
                return getattr(plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self) and not isinstance(value, (nn.Module, torch.Tensor)):
            # A short way for its own state.
            vars(self)[name] = value
            return
        # Until `wrap` returns, all names are its own. A new one belongs to the plain module, whose
        # forward would not find it here.
        is_own = (not ("order" in vars(self) and self.order.units) or name in vars(self)
                  or name in self._modules or name in self._parameters or name in self._buffers
                  or hasattr(type(self), name))
        if is_own:
            super().__setattr__(name, value)
        else:
            setattr(self._unit().module, name, value)

    def __delattr__(self, name: str) -> None:
        try:
            super().__delattr__(name)
        except AttributeError:
            delattr(self._unit().module, name)

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]

    def __contains__(self, item: Any) -> bool:
        return item in self.module

    def __bool__(self) -> bool:
        # Otherwise Python would ask for the length.
        return bool(self.module)


class Unit(StandIn, Zero3Layer):
    """
    ## A layer of a whole model
    """

    cure = ("call what `wrap` returned, and use the parameter in the forward of a module; where "
            "not all ranks do, `register_external_parameter`; build the optimizer after `wrap`")
    cure_for_new = ("add it to the plain model: `plain = model.destroy()`, change `plain`, `wrap` "
                    "it again and build the optimizer again")

    def __init__(self, module: nn.Module,
                 path: str,
                 leaf: bool,
                 order: "TracedOrder",
                 **options: Any):
        """
        ### Shard a module

        * `path` is its name in the plain model, empty for the root
        * `leaf` says that its parameters may get gradients on some ranks and not on others
        * `order` is the schedule that all units of the model share
        * `options` are arguments of `Zero3Layer`

        Keeps the layer's invariants; I2 only if it is not persistent.
        """
        super().__init__(module, **options)
        self.order = order
        self.schedule = order
        self.path = path
        self.title = module.title if isinstance(module, Together) else path or "the rest"
        self.leaf = leaf
        # `wrap` sets this, and fills the three lists below.
        self.persistent = False
        self.training = module.training
        # It stands for the module in `modules()`, and yields the module's buffers.
        self._buffers = module._buffers
        self._non_persistent_buffers_set = module._non_persistent_buffers_set
        self.numel = sum(len(flat.full) for flat in self.flats)
        self.inside: list[Unit] = []  # units below it in the tree of modules
        self.outside: list[Unit] = []  # units above it
        self.externals: list[Unit] = []  # units whose parameters its modules use
        # The state of the shards that it was gathered from, if it is persistent.
        self._stamp: Any = None

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """
        ### The module's class, so that `isinstance` says of a unit what it says of the module

        A model may treat its layers by their classes. `isinstance(unit, Unit)` is true as well,
        because Python asks `type(unit)` first.
        """
        module = vars(self).get("_modules", {}).get("module")
        return Unit if module is None else type(module)

    @__class__.setter
    def __class__(self, new: type) -> None:
        # `fully_shard` gives the modules that it shards another class.
        self.expect(False, "cannot change its class", "a unit", new.__name__, "leave sharded "
                    "modules out of `fully_shard`, or do not `wrap` them")

    def _get_name(self) -> str:
        return type(self).__name__

    def named_modules(self,
                      memo: set[nn.Module] | None = None,
                      prefix: str = "",
                      remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Module]]:
        """
        ### Itself and the modules inside, named as in the plain model

        It stands for its module, which is left out, and a shared unit leaves its layers out, so
        each layer is met once.
        """
        memo = set() if memo is None else memo
        if self not in memo:
            if remove_duplicate:
                memo.add(self)
            yield prefix, self
            if not isinstance(self.module, Together):
                inside = self.module.named_modules(memo, prefix, remove_duplicate)
                yield from ((path, m) for path, m in inside if m is not self.module)
            yield from self.chunk.named_modules(
                memo, f"{prefix}.chunk".strip("."), remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """
        ### The children of its module, and the shards
        """
        if not isinstance(self.module, Together):
            yield from self.module.named_children()
        yield "chunk", self.chunk

    def train(self, mode: bool = True) -> Any:
        """
        ### Set the mode, by the module's own `train`
        """
        self.module.train(mode)
        self.training = self.module.training
        return self

    def admits(self, layer: nn.Module) -> bool:
        """
        ### Whether a sharded layer is a unit of the same model
        """
        return any(layer is unit for unit in self.order.units)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """
        ### Freeze or unfreeze the unit

        Raises `RuntimeError` for a layer that shares a shard with its neighbours.
        """
        shared = {unit.title for user in (self, *self.inside)
                  for unit in user.externals if isinstance(unit.module, Together)}
        self.expect(not shared, "cannot be frozen by itself", "a layer with a shard of its own",
                    f"one that is part of {shared}", "freeze it before wrapping, or leave "
                    "`unit_bytes` out")
        return super().requires_grad_(requires_grad)

    def shard_versions(self) -> tuple[int, ...]:
        """
        ### How often its shards, and one shared with neighbours, have been written to
        """
        return tuple(flat.shard._version for unit in (self, *self.externals)
                     if unit is self or unit.module._modules.get(self.path) is self.module
                     for flat in unit.flats)

    def full_name(self, name: str) -> str:
        """
        ### The name of one of its parameters in the plain model
        """
        return f"{self.path}.{name}" if self.path else name

    # ------------------------------------------------------------------------------------- forward

    @uncompiled
    def forward(self, *args, **kwargs):
        """
        ### Forward pass, as part of the model's
        """
        recompute = in_backward()
        self.order.stack.append(self)
        try:
            self.order.arrive(self)
            with named_range(self.label):
                return super().forward(*args, **kwargs)
        finally:
            self.order.stack.pop()
            # After recomputation the unit goes backward next, and still uses its parameters.
            if not recompute:
                self.leave()
                if self is self.order.root:
                    self.order.end_pass()

    def lenders(self) -> Iterator[Sharded]:
        """
        ### The units whose parameters it can read, and that may be freed now

        A block may return a view of the root's parameters, because the root frees them last.
        """
        yield self
        yield from (unit for unit in (*self.inside, *self.externals)
                    if not unit.holders - {self})

    def leave(self) -> None:
        """
        ### Stop using parameters, its own and those of other units
        """
        self.holders.discard(self)
        for unit in self.externals:
            unit.holders.discard(self)
            if not unit.holders:
                unit._release()

    # -------------------------------------------------------------------------------- fetch, free

    def refresh(self) -> None:
        """
        ### Take over `requires_grad`, and free it if it may have values from before a step
        """
        # Those that others compute with may have no forward of their own, which would do so.
        self._follow_requires_grad()
        if self.persistent:
            # It changes when an optimizer steps, or somebody writes to a shard.
            stamp = (self.order.steps,
                     [(flat.shard._version, flat.shard.untyped_storage().data_ptr())
                      for flat in self.flats])
            if stamp != self._stamp:
                self.reshard()
            self._stamp = stamp
        elif self.kept_for:
            # Backward has not come, and the optimizer may have stepped since.
            self.reshard()

    def fetch_for_others(self) -> bool:
        """
        ### Record that one unit uses a parameter of another
        """
        stack = self.order.stack
        if not stack and not in_backward():
            return False
        self.order.fetch([self])
        self.show()
        if stack:
            user = stack[-1]
            user.externals.append(self)
            self.holders.add(user)
        return True

    def show(self) -> None:
        """
        ### Wait until the parameters are here, and let them be used
        """
        self._wait_params()
        self.show_again()

    def _release(self, call: Call | None = None) -> None:
        """
        #### Reshard, unless another unit uses it, it computes again soon, or it persists
        """
        self.holders.discard(self)
        if call is not None and self.order.trace.kind == "forward":
            self.order.trace.left.append(self)
        if self.holders:
            return
        if not (self.persistent or self.order.stays_full(self, call)):
            self.reshard()
            return
        if self.is_fetched:
            # A use by another unit still has to be noticed.
            for flat in self.flats:
                flat.close(is_freed=False)
        if call is not None and call.outputs and not self.persistent:
            self.kept_for = weakref.ref(call, lambda _: self.reshard())

    # ------------------------------------------------------------------------------------ backward

    def _pre_backward_hook(self, call: Call, *_) -> None:
        """
        #### The gradient of an output is here: this unit's backward begins
        """
        if call not in self.watch.entered:
            self.order.arrive(self)
        super()._pre_backward_hook(call)

    def is_over(self) -> bool:
        """
        ### Whether backward no longer needs the full parameters
        """
        # The root's operations run between all other units.
        is_around = self is self.order.root or any(
            unit.watch.pending or unit in unit.holders for unit in self.inside)
        # A frozen parameter may lie between the unit and a gradient of another unit's parameter.
        is_between = any(not flat.shard.requires_grad for flat in self.flats) and any(
            unit.get_trainable_chunk() for unit in self.externals)
        if is_around or is_between:
            return False
        if not self.leaf:
            return super().is_over()
        # A leaf does not wait for gradients of its parameters, because an idle expert gets none. It
        # is over with the last gradient of an input, or with the pass.
        watch = self.watch
        return (watch.inputs_left == 0 and not watch.pending and bool(watch.entered)
                and all(call.inputs for call in watch.entered))

    @torch.no_grad()
    def _backup_grads(self) -> None:
        """
        #### Reshard, and reduce-scatter the gradients
        """
        self._fill_leaf()
        self.leave()
        self._release()
        self.choose_receive_buffers()
        super()._backup_grads()
        # The units around it may have waited for it.
        if in_backward():
            for unit in self.outside:
                if unit.watch.entered:
                    unit._backward_event()

    def choose_receive_buffers(self) -> None:
        """
        ### Choose where the other ranks' gradients arrive

        They cannot arrive in the memory of parameters that stay full.
        """
        for flat in self.flats:
            flat.receive_buffer = flat.full.new_empty(0) if self.is_fetched else flat.full

    def _fill_leaf(self) -> None:
        """
        #### Use zeros for the gradients of a leaf that did not arrive

        All ranks reduce its gradient if one of them has one.
        """
        if not self.leaf or not self.watch.entered:
            return
        for flat in self.flats:
            if flat.shard.requires_grad and flat.grad is None:
                # (world_size * shard_numel,), of the reduce's data type, device
                flat.grad = self._empty(len(flat.full), flat.shard.grad_dtype).zero_()
        self.watch.entered.clear()

    def settle(self, raised: bool) -> None:
        """
        ### Finish the unit's part of a backward pass
        """
        self.leave()
        if not self.persistent:
            # Unless an outer backward pass still uses it.
            self._cleanup_params()
        if not raised:
            self._fill_leaf()
        super().settle(raised)
        if not self.reducer.unsettled:
            self.order.end_pass()


class TracedOrder(Schedule):
    """
    ## The schedule of a whole model: gather and free units along the order that was learnt

    All units of a model share one.
    """

    def __init__(self) -> None:
        self.units: list[Unit] = []  # the root first
        self.prefetch_numel = 0  # elements that are gathered ahead, at most
        self.max_live_numel: int | None = None  # elements that are full at once, at most
        self.trace = Trace()
        self.stack: list[Unit] = []  # units that compute in forward, the innermost last
        self.steps = 0  # that optimizers have taken with the shards of these units

    @property
    def root(self) -> Unit:
        return self.units[0]

    def arrive(self, unit: Unit) -> None:
        """
        ### A unit is about to compute: gather it, and the units that come soon after it
        """
        self._follow(unit)
        wanted = [unit, *unit.externals]
        for each in wanted:
            if not (in_backward() or self.trace.kind):
                # Outside a pass nobody knows whether the optimizer has stepped since.
                each.refresh()
            each.kept_for = None
            each.holders.add(unit)
        self.fetch(wanted)
        for each in wanted:
            each.show()

    def _follow(self, unit: Unit) -> None:
        """
        #### Note in the trace that a unit computes
        """
        backward = in_backward()
        trace = self.trace
        if unit is self.root and not backward:
            for each in self.units:
                each.refresh()
            trace.begin("forward" if torch.is_grad_enabled() else "eval")
        elif backward and not unit.reducer.unsettled:
            trace.begin("backward")
        elif backward != (trace.kind == "backward"):
            trace.end()
        # Recomputation and the backward after it are one visit.
        is_same_visit = backward and trace.seen[-1:] == [unit]
        if trace.kind and not is_same_visit:
            trace.seen.append(unit)

    def end_pass(self) -> None:
        """
        ### A pass has ended: free all units but those that a backward pass begins with
        """
        self.trace.end()
        for unit in self.units:
            if not (unit.kept_for or unit.persistent):
                unit._cleanup_params()

    def fetch(self, wanted: list[Unit]) -> None:
        """
        ### Gather these units, and start with the ones that come soon

        Raises `RuntimeError` if the wanted ones are more than may be full.
        """
        upcoming = self.trace.upcoming()
        self._make_room(wanted, upcoming)
        for unit in wanted:
            unit.fetch_params()
        for unit in self._soon(upcoming):
            if not self._fits([unit]):
                break
            unit.fetch_params()
        after = next((unit for unit in upcoming if not unit.is_fetched), None)
        if after is not None:
            after.read_async()

    def _make_room(self, wanted: list[Unit], upcoming: list[Unit]) -> None:
        """
        #### Free units that nobody uses now, until the wanted ones fit
        """
        if self._fits(wanted):
            return
        unused = [unit for unit in self.units if unit.is_fetched
                  and not (unit in wanted or unit.holders or unit.persistent)]
        # The unit that comes last goes first.
        spare = sorted(unused, key=lambda unit: [*upcoming, unit].index(unit))
        while spare and not self._fits(wanted):
            spare.pop().reshard()
        wanted[0].expect(self._fits(wanted), "cannot be fetched", "at most `max_live_numel`, "
                         f"{self.max_live_numel:,} full elements",
                         f"{self.live_numel(wanted):,} with it", "raise the limit, wrap "
                         "smaller layers, or let less persist")

    def live_numel(self, wanted: Iterable[Unit] = ()) -> int:
        """
        ### Elements of full parameters, those in flight and those of the wanted units included
        """
        return sum(unit.numel for unit in self.units
                   if unit.is_fetched or unit.is_full_elsewhere or unit in wanted)

    def _fits(self, wanted: list[Unit]) -> bool:
        """
        #### Whether these units may be full beside those that are
        """
        return self.max_live_numel is None or self.live_numel(wanted) <= self.max_live_numel

    def stays_full(self, unit: Any, call: Call | None) -> bool:
        """
        ### Whether a unit computes again so soon that it stays full

        * `call` is the forward call that has ended; in backward there is none
        """
        upcoming = self.trace.upcoming()
        if self.trace.kind == "forward" and call is not None and call.outputs:
            if unit is self.root:
                # Backward reaches it first, or right after the unit that made the model's output.
                return True
            if self.trace.follows():
                upcoming = upcoming + self.trace.learnt.get("backward", [])
        if isinstance(unit.module, Together) and self.trace.kind and not upcoming:
            # Nobody knows what comes, but its layers follow each other.
            layers = [each for each in self.units if unit in each.externals]
            return self.trace.seen[-1] is not layers[0 if self.trace.kind == "backward" else -1]
        # What the very next unit uses stays, because that takes no further memory.
        following = next(((each, *each.externals) for each in upcoming if not each.holders), ())
        return unit in following or unit in self._soon(upcoming)

    def _soon(self, upcoming: list[Unit]) -> list[Unit]:
        """
        #### The units that come soon: as many as `prefetch_numel` has room for
        """
        # Each is followed by those whose parameters it uses. Those in use are full anyway.
        unused = (unit for user in upcoming
                  for unit in (user, *user.externals)
                  if not unit.holders)
        found: dict[Unit, None] = {}
        left_numel = self.prefetch_numel
        for unit in unused:
            if unit not in found:
                left_numel -= unit.numel
                if left_numel < 0:
                    break
                found[unit] = None
        return [*found]


# -------------------------------------------------------------------------------- shared units


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
    r"""
    ## Layers that share a unit: small neighbours have one flat parameter

    A collective takes a fixed time $t$ beside its bytes, so that many small ones are slow. Take two
    layers on two ranks. Layer a is that of `minimal.py`, with the weights 1 2 3. Layer b has the
    weights 5 6:

    | | flat parameters | rank 0 | rank 1 | collectives in a step |
    |---|---|---|---|---|
    | each alone | 1 2 3 0, and 5 6 | 1 2, and 5 | 3 0, and 6 | 6 at most |
    | in one unit | 1 2 3 5 6 0 | 1 2 3 | 5 6 0 | 3 at most |

    Each layer uses the weights of the shared unit as if they were tied. Both stay units without
    parameters of their own, so the order of the model is known as before. With $n$ layers for each
    shared unit, $L$ layers save up to

    $$3 L \left(1 - \frac{1}{n}\right) t \quad \text{seconds in a step, and nothing is copied.}$$

    This module has the layers as children, by their names in the model. Nobody calls it.
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
        return dict(self.named_modules(remove_duplicate=False))[target]


def neighbours(places: Iterable[LayerPlace],
               most_bytes: int,
               most_numel: float) -> list[list[LayerPlace]]:
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

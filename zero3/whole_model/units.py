r"""
# Units: fetched ahead along an order that was learnt

A `Unit` is a layer of a whole model; a `Schedule` learns in which order units compute, and says
when each is fetched and when it is freed.

A `Zero3Sequential` knows what comes next, because it is a chain. A model that is written freely is
not: its layers stand in lists, branch, are called twice. But from one step to the next it does the
same. So the first forward pass is *traced*, and each unit fetched when it is come to; from the
second one on the trace says what to fetch while the units before it compute. A pass that goes
another way is noticed at the first difference: from there on it fetches on demand, which is slower
and as right, and the next pass goes by what this one did.

$$\underbrace{u_1, \ldots, u_p}_{\text{seen}}\;
\underbrace{u_{p+1}, \ldots, u_{p+k}}_{\text{soon: fetched, or not freed}}\;
u_{p+k+1}, \ldots
\qquad \sum_{i=1}^{k} P_{u_{p+i}} \le \text{what may be fetched ahead}$$

One rule serves three purposes. What comes *soon* is fetched ahead. What comes soon *again* is not
freed in between. And where forward ends, backward comes soon, so the last units stay full, which
saves their second gather. In DeepSpeed these are `stage3_prefetch_bucket_size`,
`stage3_max_reuse_distance`, and its trace; the prefetch along a recorded sequence is section 6.2 of
[ZeRO-Infinity](https://arxiv.org/abs/2104.07857).

| a unit | is full from | to | gathers in a step |
|---|---|---|---|
| a layer | shortly before it computes | its end, forward and again backward | 2 |
| the last one | the same | the end of its backward, once backward is known | 1 |
| the root's | the beginning of forward | the end of backward | 1 |
| a persistent one | its first use after a step | its first use after the next step | 1 |

What is gathered for each micro-batch of a step is so for the first three; a persistent unit is
gathered once for all of them. Between two uses a unit is in one of these states:

| state | memory | parameters | until |
|---|---|---|---|
| at rest | freed | closed | it is fetched, ahead or on demand |
| on its way | whole, filling | closed | somebody arrives who needs it |
| in use | whole | open | it has computed, and all others that use it: `users` is empty |
| staying | whole | closed | it comes again, or the pass is over, or a step has been taken |

*Closed* means that the parameters are of a class that reports each use. So that a unit uses
parameters of another (section 7.1 of the paper calls them external) is noticed the first time, also
where the other one happens to be whole; from then on it is fetched along, forward and backward.

**Run this**: `python -m zero3.whole_model` writes down what happens in two steps of a small model.

**Not covered, and what that costs**: a unit that is called outside of the model's own forward is
fetched on demand; other methods of the model that use what is at the root raise errors. A layer
that is called twice stays full in backward from the one call to the other. An attribute that units
have themselves, `layer_idx` for instance, is read from `unit.module`. `isinstance` says of a unit
what it says of its module, `type` does not; and `isinstance(unit, Iterable)` is true of all of
them. What is written through `.data` of a persistent unit's shard is seen after `release_all()`.
"""

import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from zero3.guards.contents import uncompiled
from zero3.layer import Call, Zero3Layer
from zero3.measure.ledger import in_backward
from zero3.offload import Offload


class Trace:
    """
    ## The order in which units are come to

    Of each kind of pass ("forward" with gradients, "eval" without, "backward") the last one says
    how the next will go. Backward has a guess from the start: it comes to the units in the
    reverse of the order in which forward left them.
    """

    def __init__(self) -> None:
        self.learnt: dict[str, list[Unit]] = {}
        self.kind = ""  # the kind of the pass that runs
        self.seen: list[Unit] = []  # what it has come to
        self.known: list[Unit] = []  # how it is expected to go
        self.left: list[Unit] = []  # the last forward pass, in the order of leaving
        self.misses = 0  # passes that went another way than expected

    def begin(self, kind: str) -> None:
        """
        ### A pass begins, and the one before has ended
        """
        self.end()
        # Nobody goes backward through what left nothing in the graph.
        guess = [unit for unit in self.left[::-1] if unit._pending] if kind == "backward" else []
        self.kind, self.seen, self.known = kind, [], self.learnt.get(kind, guess)
        self.left = [] if kind == "forward" else self.left

    def end(self) -> None:
        """
        ### What was seen is what will be expected
        """
        if self.kind:
            self.misses += self.kind in self.learnt and self.seen != self.known
            self.learnt[self.kind] = self.seen
        self.kind = ""

    def follows(self) -> bool:
        """
        ### Whether the pass has gone as expected so far
        """
        return bool(self.kind) and self.seen == self.known[: len(self.seen)]

    def upcoming(self) -> list["Unit"]:
        """
        ### What the pass has before it
        """
        return self.known[len(self.seen) :] if self.follows() else []


class Unit(Zero3Layer):
    """
    ## A layer of a whole model

    A `Zero3Layer` in the place of a module. Attributes that it does not have itself are read from
    the module, and those that the module has are written to it. When to fetch and when to free it
    asks the schedule.
    """

    cure = ("call what `wrap` returned, and use the parameter in the forward of a module; where "
            "not all ranks do, `register_external_parameter`; build the optimizer after `wrap`")
    cure_for_new = ("add it to the plain model: `plain = model.destroy()`, change `plain`, `wrap` "
                    "it again and build the optimizer again")

    def __init__(self, module: nn.Module, schedule: "Schedule", path: str, leaf: bool,
                 device: torch.device, offload: Offload | None):
        """
        ### Shard a module

        * `path` is its name in the plain model, empty for the root
        * `leaf` says that its parameters may get gradients on some ranks and not on others

        The rest is as for `Zero3Layer`. Its number, label, wire and relations are set once all
        units of the model are there. Keeps the layer's invariants, but for I2 where it persists.
        """
        super().__init__(module, device=device, offload=offload)
        self.schedule, self.path, self.leaf, self.persistent = schedule, path, leaf, False
        self.training = module.training
        self.numel = sum(len(g.full) for g in self.flats)
        self.inside: list[Unit] = []  # units below it in the tree of modules
        self.outside: list[Unit] = []  # units above it
        self.externals: list[Unit] = []  # other units, whose parameters its modules use
        # Those that compute with its parameters now, in forward or in backward; itself among them.
        self.users: set[Unit] = set()
        self._stamp: Any = None  # of the shards that it was gathered from

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return self.read(name)

    def read(self, name: str) -> Any:
        """
        ### An attribute of the module

        A property may look at the parameters: `device` and `dtype` of Hugging Face's models do.
        They can see the data type and the device of parameters that are freed.
        """
        module = super().__getattr__("module")
        if not isinstance(getattr(type(module), name, None), property):
            return getattr(module, name)
        with self.contents:
            return getattr(module, name)

    def __setattr__(self, name: str, value: Any) -> None:
        # The last that `__init__` sets; what comes after is somebody else's, or known to it.
        theirs = "_stamp" in vars(self) and name not in vars(self) and name not in self._modules
        if theirs and not hasattr(type(self), name) and hasattr(self.module, name):
            setattr(self.module, name, value)
        else:
            super().__setattr__(name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """
        ### The module's class, so that `isinstance` says of a unit what it says of the module

        A model may treat its layers by their classes. `isinstance(unit, Unit)` is true as well,
        because it asks `type(unit)` first.
        """
        module = vars(self).get("_modules", {}).get("module")
        return Unit if module is None else type(module)

    @__class__.setter
    def __class__(self, new: type) -> None:
        # `fully_shard` gives what it shards another class.
        self.expect(False, "cannot change its class", "a unit", new.__name__, "leave sharded "
                    "modules out of `fully_shard`, or do not `wrap` them")

    def _get_name(self) -> str:
        # For `repr`.
        return type(self).__name__

    # What a container offers, and a `TypeError` where the module is none.

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload]

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def __contains__(self, item: Any) -> bool:
        return item in self.module  # type: ignore[operator]

    def __bool__(self) -> bool:
        # Without this, Python would ask for the length, which most modules have not.
        return bool(self.module)

    def admits(self, layer: nn.Module) -> bool:
        """
        ### Whether a sharded layer is a unit of the same model
        """
        return any(layer is unit for unit in self.schedule.units)

    def full_name(self, name: str) -> str:
        """
        ### What a parameter of this unit is called in the plain model
        """
        return f"{self.path}.{name}" if self.path else name

    # ------------------------------------------------------------------------------------- forward

    @uncompiled
    def forward(self, *args, **kwargs):
        """
        ### Forward pass, as part of the model's
        """
        schedule, recompute = self.schedule, in_backward()
        schedule.stack.append(self)
        try:
            schedule.arrive(self)
            with schedule.range_of(self):
                return super().forward(*args, **kwargs)
        finally:
            schedule.stack.pop()
            # What was recomputed goes backward next.
            if not recompute:
                self._leave()
                if self is schedule.root:
                    schedule.end_forward()

    def _leave(self) -> None:
        """
        #### Use no parameters any more, neither its own nor those of others
        """
        self.users.discard(self)
        for unit in self.externals:
            unit.users.discard(self)
            if not unit.users:
                unit._release()

    # -------------------------------------------------------------------------------- fetch, free

    def fetch_params(self) -> None:
        """
        ### Unshard (all-gather); again after a step, if it is full since before
        """
        if self.is_fetched:
            # It has stayed, and may have to take gradients again while those before are being sent.
            self.comm.reducer.finish(self)
        stamp = self.schedule.steps, [(g.shard._version, g.shard.untyped_storage().data_ptr())
                                      for g in self.flats]
        if self.is_fetched and self.persistent and stamp != self._stamp:
            self._cleanup_params()
        if self.schedule.debug and self.flats and not (self.is_fetched or self._full_elsewhere):
            self.schedule.compare(self)
        super().fetch_params()
        self._stamp = stamp

    def lend(self) -> bool:
        """
        ### Somebody uses a parameter of this unit outside of it

        Who does will do so again: from now on this unit is fetched along with that one.
        """
        stack = self.schedule.stack
        if not stack and not in_backward():
            return False
        self.schedule.fetch([self])
        self._show()
        for user in stack[-1:]:
            user.externals.append(self)
            self.users.add(user)
        return True

    def _show(self) -> None:
        """
        #### Wait until the parameters are here, and let them be used
        """
        self._wait_params()
        for slot in self._slots() if self.is_fetched else ():
            slot.param.__class__ = nn.Parameter

    def _release(self, call: Call | None = None) -> None:
        """
        #### Reshard; or stay full, if somebody else computes with it or it comes soon again
        """
        self.users.discard(self)
        if call and self.schedule.trace.kind == "forward":
            self.schedule.trace.left.append(self)
        if self.users:
            return
        if not (self.persistent or self.schedule.comes_again(self, call)):
            self._cleanup_params()
            return
        for slot in self._slots() if self.is_fetched else ():
            # Full, and yet a use by somebody else has to be noticed.
            slot.param.__class__ = slot.freed_class
        if call and call.outputs and not self.persistent:
            self._kept = weakref.ref(call, lambda _: self._cleanup_params())

    # ------------------------------------------------------------------------------------ backward

    def _pre_backward_hook(self, call: Call, *_) -> None:
        """
        #### A gradient of an output is here: this unit's backward begins
        """
        if call not in self._entered:
            self.schedule.arrive(self)
        super()._pre_backward_hook(call)

    def _is_over(self) -> bool:
        """
        #### Whether backward needs the full parameters no more

        The root's with the pass, for what it computes lies between all others. What any unit
        computes between units inside of it is needed until these are over. A leaf does not wait for
        gradients of its parameters, for experts that had nothing to do on this rank have none: it
        is over with the last gradient of an input. Without such an input nothing says so, and the
        end of the pass settles it.
        """
        busy = any(unit._pending or unit in unit.users for unit in self.inside)
        if busy or self is self.schedule.root:
            return False
        frozen = any(not g.shard.requires_grad for g in self.flats)
        if frozen and any(unit.get_trainable_chunk() for unit in self.externals):
            # What is frozen may lie between the unit and a gradient of somebody else's parameter.
            return False
        if not self.leaf:
            return super()._is_over()
        done = self._inputs_left <= 0 and not self._pending
        return done and bool(self._entered) and all(call.inputs for call in self._entered)

    def _post_backward_hook(self, group_index: int, slot_index: int, param: nn.Parameter) -> None:
        """
        #### A parameter's gradient is complete: move it into the flat gradient

        Not into one that is being sent, which the unit may have while it stays full.
        """
        if self in self.comm.reducer.layers:
            self.comm.reducer.finish(self)
        super()._post_backward_hook(group_index, slot_index, param)

    @torch.no_grad()
    def _backup_grads(self) -> None:
        """
        #### Reshard, and reduce-scatter the gradients
        """
        self._fill()
        self._leave()
        self._release()
        for g in self.flats:
            # What stays full cannot take in messages.
            g.receive_buffer = g.full.new_empty(0) if self.is_fetched else g.full
        super()._backup_grads()
        for unit in self.outside if in_backward() else ():
            if unit._entered:
                unit._backward_event()

    def _fill(self) -> None:
        """
        #### Have zeros for a leaf's gradients that did not come

        Once for each backward that came to it, so that all ranks reduce what any of them has.
        """
        for g in self.flats if self.leaf and self._entered else ():
            if g.shard.requires_grad and g.grad is None:
                # (world_size * shard_numel,), of the reduce's data type, device
                g.grad = self._empty(len(g.full), g.shard.grad_dtype).zero_()
        if self.leaf:
            self._entered.clear()

    def _settle(self, raised: bool = False) -> None:
        """
        #### End a `backward()`
        """
        if self is self.schedule.root:
            self.schedule.trace.end()
        self._leave()
        if not (self.users or self.persistent):
            # Fetched for a pass that ended early. Of a backward inside of backward, which older
            # checkpointing runs, the outer one may still use it.
            self._cleanup_params()
        if not raised:
            self._fill()
        super()._settle(raised)


class Schedule:
    """
    ## What is fetched and freed, and when

    One for all units of a model. They tell it what happens, and ask it what to do.
    """

    def __init__(self, debug: bool):
        self.units: list[Unit] = []  # the root's first
        self.prefetch_numel = 0  # elements that are fetched ahead, at most
        self.max_live_numel: int | None = None  # elements that are full at once, at most
        self.debug, self.trace = debug, Trace()
        self.stack: list[Unit] = []  # units that compute in forward, the innermost last
        self.steps = 0  # that optimizers have taken with shards of these units

    @property
    def root(self) -> Unit:
        return self.units[0]

    def arrive(self, unit: Unit) -> None:
        """
        ### A unit is about to compute: have it here, and fetch what comes soon after
        """
        backward, trace = in_backward(), self.trace
        if unit is self.root and not backward:
            self._begin_forward()
        elif backward and not unit.comm.unsettled:
            trace.begin("backward")
        elif backward != (trace.kind == "backward"):
            trace.end()
        # Recomputation and the backward after it are one visit.
        if trace.kind and not (backward and trace.seen[-1:] == [unit]):
            trace.seen.append(unit)
        wanted = [unit, *unit.externals]
        for each in wanted:
            if each._kept and not (backward or trace.kind):
                # Outside of a pass nobody knows whether a step has been taken since.
                each._cleanup_params()
            each._kept = None
            each.users.add(unit)
        self.fetch(wanted)
        for each in wanted:
            each._show()

    def _begin_forward(self) -> None:
        """
        #### A forward pass of the model begins

        What is full since one whose backward did not come may be of before a step.
        """
        for unit in self.units:
            if unit._kept:
                unit._cleanup_params()
        self.trace.begin("forward" if torch.is_grad_enabled() else "eval")

    def end_forward(self) -> None:
        """
        ### A forward pass has ended: free all but what backward begins with
        """
        self.trace.end()
        for unit in self.units:
            if not (unit._kept or unit.persistent or unit.users):
                unit._cleanup_params()

    def fetch(self, wanted: list[Unit]) -> None:
        """
        ### Unshard these, and start with what comes soon

        Raises `RuntimeError` where that is more than may be full.
        """
        upcoming = self.trace.upcoming()
        if not self._fit(*wanted):
            spare = [unit for unit in self.units if unit.is_fetched
                     and not (unit in wanted or unit.users or unit.persistent)]
            # What comes last, or not at all, goes first.
            spare.sort(key=lambda unit: upcoming.index(unit) if unit in upcoming else len(upcoming))
            while spare and not self._fit(*wanted):
                spare.pop()._cleanup_params()
            wanted[0].expect(self._fit(*wanted), "cannot be fetched", "at most `max_live_numel`, "
                             f"{self.max_live_numel:,} full elements",
                             f"{self.live_numel(*wanted):,} with it", "raise the limit, wrap "
                             "smaller layers, or let less persist")
        for unit in wanted:
            unit.fetch_params()
        for unit in self._soon(upcoming):
            if not self._fit(unit):
                break
            unit.fetch_params()
        # What comes after these is read from its file.
        after = next((unit for unit in upcoming if not unit.is_fetched), None)
        for g in after.flats if after is not None else ():
            g.storage.read_async()

    def live_numel(self, *wanted: Unit) -> int:
        """
        ### Elements of full parameters, those on their way among them; and with these also
        """
        return sum(unit.numel for unit in self.units
                   if unit.is_fetched or unit._full_elsewhere or unit in wanted)

    def _fit(self, *wanted: Unit) -> bool:
        """
        #### Whether these may be full, beside those that are
        """
        return self.max_live_numel is None or self.live_numel(*wanted) <= self.max_live_numel

    def comes_again(self, unit: Unit, call: Call | None) -> bool:
        """
        ### Whether a unit that has computed comes so soon again that it stays full

        * `call` is the forward call that has ended; in backward there is none

        Also if it is the very next one, whatever its size: to stay takes no memory that it has not.
        """
        upcoming, trace = self.trace.upcoming(), self.trace
        if trace.kind == "forward" and call and call.outputs:
            if unit is self.root:
                # Backward comes to it first, or right after the unit whose output is the model's.
                return True
            if trace.follows():
                upcoming = upcoming + trace.learnt.get("backward", [])
        following = next((each for each in upcoming if not each.users), None)
        return unit is following or unit in self._soon(upcoming)

    def _soon(self, upcoming: list[Unit]) -> list[Unit]:
        """
        #### What comes soon: as many units as `prefetch_numel` has room for

        With those whose parameters they use, and with those that are full already.
        """
        soon: list[Unit] = []
        for user in upcoming:
            for unit in (user, *user.externals):
                if unit not in soon and not unit.users:
                    if sum(each.numel for each in soon) + unit.numel > self.prefetch_numel:
                        return soon
                    soon.append(unit)
        return soon

    def compare(self, unit: Unit) -> None:
        """
        ### Have the ranks tell each other what they are about to gather

        All-gather of their labels; all ranks must call it. Raises `RuntimeError` on all of them if
        one is about to gather something else.
        """
        for rank, label in enumerate(unit.comm.gather(unit.label)):
            unit.expect(label == unit.label, "is about to be gathered, and the ranks diverged",
                        f"a gather of {unit.label}, on all ranks", f"of {label}, on rank {rank}",
                        "put what depends on a rank's data into one "
                        "unit, by `leaf_classes`")

    def range_of(self, unit: Unit) -> Any:
        """
        ### A range by the unit's name, for profilers of CUDA
        """
        cuda = unit.device.type == "cuda"
        return torch.cuda.nvtx.range(unit.label) if cuda else nullcontext()

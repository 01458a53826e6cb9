r"""
# Watch: when a layer's backward begins and ends

`Watch` puts hooks on the tensors that enter and leave a layer. So the layer learns when its
backward begins and when autograd no longer needs its parameters.

Autograd tells nobody which layer it has reached. Take two layers:
$x \to \text{A} \to y \to \text{B} \to \text{loss}$. Backward brings these gradients, those of B
first:

| gradient | the layers learn from it |
|---|---|
| of `loss`, B's output | B's backward begins: gather B, unless it stayed full, and prefetch A |
| of B's parameters | collect them |
| of `y`, which is B's input | B's backward is over: free it, reduce its gradients |
| of `y`, which is A's output | A's backward begins |
| of A's parameters | collect them |
| of `x`, A's input, if it requires one | A's backward is over |

The gradients of the parameters alone do not say that a layer is done. A frozen weight gets no
gradient, yet autograd needs its values to compute the gradient of the input. So a layer's backward
is over when both are complete:

$$\text{gradients of inputs} = \text{inputs that need one} \quad\text{and}\quad
\text{gradients of parameters} = \text{parameters that need one}$$

Some gradients never come, for instance that of a parameter which the loss does not depend on.
`at_end_of_backward` has the autograd engine call the layer once more at the end of the pass, and
the layer then finishes the rest.

**Run this**: `python -m zero3.whole_model` prints the order in which the layers of a small model
compute, forward and backward.

**Not covered, and what that costs**: a tensor is found in tuples, lists, dicts and dataclasses, at
any depth; when it leaves, as an attribute of a module; in other objects one level deep. A tensor
that leaves a layer in another way has no hook. If no other tensor has announced backward, it
reaches freed parameters there, which is an error.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from zero3.guards.checks import attributes


@dataclasses.dataclass(eq=False)
class Call:
    """
    ## One forward call of a layer

    Only hooks in the graph refer to it, and in backward `Watch.entered`. If the graph is dropped
    without a backward pass, the call is freed with it.
    """

    versions: tuple[int, ...]  # how often each shard had been written to
    is_elsewhere: bool  # whether it was inside `full_params`
    # For each input that needs a gradient: the tensor that the module got, and its `_version` then.
    # If it is a view that was made for the module, also the `grad_fn` of the caller's tensor, until
    # the forward pass ends.
    inputs: list[tuple[weakref.ref[torch.Tensor], int, Any]] = dataclasses.field(
        default_factory=list)
    outputs: int = 0  # tensors that went out and need a gradient


class Watch:
    """
    ## The calls of one layer, from forward to the end of their backward

    The layer calls `inputs` and `outputs` around its forward, and autograd calls the two callbacks
    in backward. If a layer is called twice before backward, each call lists its own inputs.
    """

    def __init__(self, begin: Callable[..., None], event: Callable[..., None]):
        """
        ### Set the two callbacks

        * `begin(call, *grad)` is called when a gradient of an output of this call is there
        * `event()` is called when the gradient of an input is complete
        """
        self.begin = begin
        self.event = event
        # Calls whose backward has not begun.
        self.pending: weakref.WeakSet[Call] = weakref.WeakSet()
        # Calls that this backward pass has reached.
        self.entered: set[Call] = set()
        # How many gradients of the inputs of these calls have not arrived yet.
        self.inputs_left = 0
        # Names of the parameters whose gradients have come since the last reduce.
        self.arrived: set[tuple[str, ...]] = set()

    def inputs(self, call: Call, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict]:
        """
        ### Watch the tensors that a call gets

        Returns the arguments to call the module with.
        """
        views: dict[int, object] = {}
        return (tuple(self._input(call, value, views) for value in args),
                {name: self._input(call, value, views) for name, value in kwargs.items()})

    def _input(self, call: Call, value: Any, views: dict[int, object]) -> Any:
        """
        #### Register a hook that runs when the gradient of an input is complete

        The module gets a view of the tensor. The view's gradient is complete once *this layer* has
        added its part. The gradient of the tensor itself also waits for all other users of the
        tensor. A tensor inside a container is not replaced, because the container belongs to the
        caller, nor is a sparse tensor or one of `torch.nested`. For these the layer stays full
        until all users have contributed.

        * `views` has the views by the `id` of their tensors: the module may ask whether two of its
          arguments are the same
        """
        if id(value) in views:
            return views[id(value)]
        came = value
        if (torch.is_grad_enabled() and isinstance(value, torch.Tensor) and value.requires_grad
                and value.layout == torch.strided and not value.is_nested):
            value = value.view_as(value)
        views[id(came)] = value
        node = None if value is came else came.grad_fn
        for tensor in tensors_in(value):
            if tensor.requires_grad and torch.is_grad_enabled():
                call.inputs.append((weakref.ref(tensor), tensor._version, node))
                if tensor.is_leaf:
                    # It may outlive the graph, and would collect the hooks of all passes.
                    handle = tensor.register_hook(partial(self._arrives, weakref.ref(call)))
                    weakref.finalize(call, handle.remove)
                else:
                    # This hook keeps the call for as long as the graph. A hook on an output would
                    # not do: an output that is a view loses its hooks when somebody writes to it.
                    tensor.register_hook(partial(self._arrives, lambda: call))
        return value

    def _arrives(self, ours: Callable[[], Call | None], *_) -> None:
        """
        #### The gradient of an input is complete

        A module may take gradients in its forward. They say nothing about the layer's backward.
        """
        if ours() in self.entered:
            self.inputs_left -= 1
            self.event()

    def outputs(self, call: Call, tensors: Iterable[torch.Tensor]) -> None:
        """
        ### Have each of these outputs announce the backward pass

        Without an announcement autograd would reach freed parameters. A leaf, and an input that
        the layer hands on unchanged, were not computed here and announce nothing.
        """
        for i, (came_in, version, node) in enumerate(call.inputs):
            view = came_in()
            if node is not None and view is not None and view._version != version:
                # A write, as by `nn.ReLU(inplace=True)`, has cost the view its hook.
                node.register_prehook(partial(self._arrives, lambda: call))
            call.inputs[i] = (came_in, version, None)
        for tensor in tensors:
            handed_on = any(came_in() is tensor and tensor._version == version
                            for came_in, version, _ in call.inputs)
            is_computed = tensor.requires_grad and not tensor.is_leaf and not handed_on
            if is_computed and torch.is_grad_enabled():
                call.outputs += 1
                self.pending.add(call)
                tensor.register_hook(partial(self.begin, call))
                node = getattr(tensor._base, "grad_fn", None)
                if node is not None:
                    # A view loses its hook if somebody writes to it, as `nn.ReLU(inplace=True)`.
                    node.register_prehook(partial(self._announces, call))

    def _announces(self, call: Call, *_) -> None:
        """
        #### Backward reaches the tensor that an output is a view of
        """
        if call not in self.entered:
            self.begin(call)

    def enter(self, call: Call) -> bool:
        """
        ### Note that backward has reached a call, and return whether this is the first time

        A call with several outputs is announced several times.
        """
        if call in self.entered:
            return False
        self.entered.add(call)
        self.pending.discard(call)
        self.inputs_left += len(call.inputs)
        return True

    def reset(self) -> None:
        """
        ### The backward pass is over

        `settle` calls it, also after an exception. Otherwise the next pass would wait for gradients
        of inputs that never came in this one.
        """
        self.entered.clear()
        self.inputs_left = 0


def at_end_of_backward(settle: Callable[[bool], None]) -> None:
    """
    ## Call a function at the end of the backward pass that is running

    * `settle(raised)` gets whether the pass ended with an exception

    If `settle` itself raises, it is called once more. Otherwise the layer would stay full.
    """
    def finish(raised: bool) -> None:
        try:
            settle(raised)
        except BaseException:
            settle(True)
            raise

    def end() -> None:
        dropped.detach()
        finish(False)

    # If backward raises an exception, the engine drops `end` without calling it.
    dropped = weakref.finalize(end, finish, True)
    dropped.atexit = False
    torch.autograd.Variable._execution_engine.queue_callback(end)


def in_backward() -> bool:
    """
    ## Whether the autograd engine is running on this thread

    A forward inside a backward pass is a recomputation, by activation checkpointing.
    """
    return torch._C._current_graph_task_id() != -1


def tensors_in(value: Any, look_inside: bool = True) -> Iterator[torch.Tensor]:
    """
    ## Every tensor in a nest of tuples, lists, dicts, dataclasses and attributes of modules

    * `look_inside` says that the attributes of other objects are searched too, one level deep
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        value = [v for own in attributes(value) for v in own.values() if type(v) is torch.Tensor]
    elif isinstance(value, Mapping):
        value = list(value.values())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, f.name, None) for f in dataclasses.fields(value)]
    elif look_inside and hasattr(value, "__dict__"):
        look_inside = False
        value = [v for v in vars(value).values() if not isinstance(v, nn.Module)]
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item, look_inside)

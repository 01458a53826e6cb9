r"""
# From a model to graphs

`graphs_of` gets what `torch.compile` has traced, and returns a function that carries out the graphs
that the passes have made of it.

Dynamo, the first part of `torch.compile`, follows the model's Python code and writes down the
operations. It does not read the weights, so layers may be freed. AOTAutograd, the second part, adds
the backward pass, and cuts the whole into two graphs. Take one linear layer a with the weight `w`.
Its input is `x`, and `g` is the gradient of its output:

| | as AOTAutograd cuts it | here |
|---|---|---|
| forward gets | `x`, `w` | `x` |
| | | `w = parameter(a, 0)` |
| | `y = mm(x, t(w))` | `y = mm(x, t(w))` |
| forward saves | `x`, `t(w)` | the number of writes to the shard, `x` |
| backward gets | `x`, `t(w)`, `g` | that number, `x`, `g` |
| | | refuse to go on if the shard was written to |
| | | `w = parameter(a, 0)` |
| | `dw = mm(t(g), x)` | `dw = mm(t(g), x)` |
| | | `collect(a, 0, dw)` |
| | `dx = mm(g, t(t(w)))` | `dx = mm(g, t(t(w)))` |
| backward returns | `dw`, `dx` | `dx` |

A saved weight, or a view of it, would stay full from forward to backward. So backward makes its
views again. Between forward and backward a rank then holds, of a layer that is not kept,

$$\text{activations} \;+\; \lceil P_\ell / N \rceil \text{ elements}$$

**Run this**: `python -m pytest tests/compiler/test_compiler.py -k "weights or errors"`.

**Not covered, and what that costs**: a model that returns a weight. It returns the freed parameter,
and its first use raises an error. A view of a weight is refused when the model is compiled.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._functorch import config as functorch
from torch._functorch.aot_autograd import aot_module_simplified
from torch._guards import TracingContext, detect_fake_mode
from torch.autograd.graph import get_gradient_edge

from zero3.compiler.graph import (
    collect,
    find,
    full_numel,
    gather,
    insert_after,
    insert_before,
    is_view,
    layers_of,
    offload,
    on_copies,
    parameter,
    reduce,
    refuse_old,
    remember,
)
from zero3.guards.checks import expect

# Without elements it stands for each trainable parameter where autograd would have that.
TRAINED = torch.empty(0, device="cpu", requires_grad=True)


class Place(NamedTuple):
    """
    ## Where a parameter belongs: its layer, its place in there, and its name in the model
    """

    layer: str
    place: int
    name: str


@dataclass
class Graphs:
    """
    ## What has been made of one traced graph
    """

    number: str  # of the frame of Python code, and how often it was compiled before: "0/1"
    broken: str  # why the trace ended before the model did, or empty
    # The name of each pass, and the graphs after it; first "traced". Without gradients there is no
    # backward graph.
    steps: list[tuple[str, fx.Graph, fx.Graph | None]] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)  # layers whole from forward to backward

    @property
    def forward(self) -> fx.Graph:
        return self.steps[-1][1]

    @property
    def backward(self) -> fx.Graph | None:
        return self.steps[-1][2]

    def line(self, numel: dict[str, int]) -> str:
        """
        ### A line about these graphs
        """
        parts = [f"graph {self.number}"]
        for name, graph, kept in (("forward", self.forward, []),
                                  ("backward", self.backward, self.kept)):
            if graph is not None:
                most = max(full_numel(graph, numel, kept), default=0)
                parts.append(f"{name} {len(find(graph, gather))} gathers, "
                             f"{len(find(graph, reduce))} reduces, at most {most:,} full elements")
        gone = [layer for node in find(self.forward, offload) for layer in layers_of(node)]
        parts += [f"{what}: {', '.join(layers)}"
                  for what, layers in (("kept for backward", self.kept),
                                       ("optimizer states that leave meanwhile", gone))
                  if layers]
        if self.broken:
            parts.append("ended early")
        return "; ".join(parts)


def graphs_of(known: dict[int, Place],
              lower: Callable[[], Any],
              engine: Any,
              traced: fx.GraphModule,
              inputs: Sequence[Any]) -> Callable:
    """
    ## Compile what Dynamo has traced: a backend of `torch.compile`, but for the first arguments

    * `known` has the place of each parameter, by its `id`
    * `lower` is a weak reference to a method that runs the passes over traced graphs, and puts the
      steps into the `Graphs`
    * `engine` partitions the joint graph, and makes a function of each of the two
    * `traced` is the graph, and `inputs` are examples of its inputs, the parameters among them

    Returns a function of such inputs.
    """
    places = [known.get(id(each)) for each in inputs]
    guard_parameters(traced.graph, places)
    refuse_views(traced.graph, places)
    end = getattr(traced, "compile_subgraph_reason", None)
    graphs = Graphs(
        number=str(torch._guards.CompileContext.current_compile_id()),
        broken=end.reason if end is not None and end.graph_break else "")

    def partition(joint: fx.GraphModule,
                  *args: Any,
                  num_fwd_outputs: int,
                  **kwargs: Any):
        forward, backward = engine.partition(
            joint, *args, num_fwd_outputs=num_fwd_outputs, **kwargs)
        save_no_parameters(forward.graph, backward.graph, places)
        save_versions(forward.graph, backward.graph, num_fwd_outputs, places)
        lower()(graphs, marked_inputs(forward.graph, places),
                marked_gradients(backward.graph, places))
        return forward, backward

    def infer(module: fx.GraphModule, _: Any) -> Callable:
        lower()(graphs, marked_inputs(module.graph, places), None)
        return compile_forward()

    def compile_forward(*_: Any) -> Callable:
        metadata: Any = TracingContext.get().fw_metadata
        refuse_writes(metadata.input_info, places)
        # Without a list, or with donated buffers, a second backward pass is refused.
        metadata.bw_donated_idxs = []
        return engine.compile(graphs.forward)

    with functorch.patch(donated_buffer=False):
        run = aot_module_simplified(
            traced, inputs, partition_fn=partition,
            inference_compiler=infer,  # type: ignore[arg-type]
            fw_compiler=compile_forward,  # type: ignore[arg-type]
            bw_compiler=lambda *_: engine.compile(graphs.backward),
            decompositions=engine.decompositions)
    return _without_parameters(run, inputs, places)


def _without_parameters(run: Callable, inputs: Sequence[Any], places: list[Place | None]
                        ) -> Callable:
    """
    #### Call a function of inputs and parameters without the parameters

    The gradient of `TRAINED` is none, because `collect` has taken it.
    """
    frozen = torch.empty(0, device="cpu")
    in_place = [None if place is None else TRAINED if each.requires_grad else frozen
                for place, each in zip(places, inputs, strict=True)]
    traced = [id(each) for each in inputs]

    def call(*args: Any) -> Any:
        # `guard_parameters` sees to it. Otherwise other weights would be used in silence.
        assert all(other is None or id(arg) == number
                   for arg, other, number in zip(args, in_place, traced, strict=True))
        return run(*(arg if other is None else other
                     for arg, other in zip(args, in_place, strict=True)))

    return call


def are_wanted() -> bool:
    """
    ## Whether this backward pass is to give gradients to parameters

    `torch.autograd.grad(loss, x)` asks for that of `x` alone.
    """
    return torch._C._will_engine_execute_node(get_gradient_edge(TRAINED).node)


def guard_parameters(graph: fx.Graph, places: Sequence[Place | None]) -> None:
    """
    ## Have Dynamo compile again for other parameters

    Dynamo would run the first layer's graph for all layers of a class, but that graph has the name
    of its layer.
    """
    for node, place in zip(graph.find_nodes(op="placeholder"), places, strict=True):
        if place:
            install_guard(node.meta["grapharg"].source.make_guard(GuardBuilder.ID_MATCH))


def refuse_views(graph: fx.Graph, places: Sequence[Place | None]) -> None:
    """
    ## Refuse a view of a parameter as a result

    The graph frees the memory of the parameter before it returns.
    """
    # The parameters of a layer are views of one flat parameter.
    inputs = zip(graph.find_nodes(op="placeholder"), places, strict=True)
    layers = {node.meta["example_value"].untyped_storage()._cdata: place.layer
              for node, place in inputs
              if place}
    for node in graph.output_node().all_input_nodes:
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            layer = layers.get(value.untyped_storage()._cdata)
            expect(layer is None, "the model cannot be compiled",
                   "tensors of their own as results of a graph",
                   f"a view of a parameter of `{layer}`, which the graph is about to free",
                   "clone it; or compute it where it is needed, if the graph ends early in between",
                   RuntimeError)


def refuse_writes(inputs: Sequence[Any], places: Sequence[Place | None]) -> None:
    """
    ## Refuse a model that writes to a parameter

    The parameter is freed, and the shard would keep its value.
    """
    for place, known in zip(places, inputs, strict=False):
        expect(place is None or not (known.mutates_data or known.mutates_metadata),
               "the model cannot be compiled", "parameters that only an optimizer changes",
               f"a write to `{place and place.name}` in forward", "write to the shards between two "
               "steps, or in `with model.full_params(writeback=True)`", RuntimeError)


def _parameter(graph: fx.Graph,
               place: Place,
               node: fx.Node) -> fx.Node:
    """
    #### An operation that stands for a parameter
    """
    name = place.name.replace(".", "_")
    value = graph.create_node("call_function", parameter, (place.layer, place.place), name=name)
    value.meta = dict(node.meta)
    return value


def save_no_parameters(forward: fx.Graph,
                       backward: fx.Graph,
                       places: Sequence[Place | None]) -> None:
    """
    ## Have backward make the views of parameters again, and not save them

    * `places` are the places of the forward graph's inputs, `None` for inputs of other kinds
    """
    start = backward.find_nodes(op="placeholder")[-1].next
    # The parameters and all of their views, as backward makes them.
    again: dict[fx.Node, fx.Node] = {}
    with backward.inserting_before(start):
        for node, place in zip(forward.find_nodes(op="placeholder"), places, strict=False):
            if place:
                again[node] = _parameter(backward, place, node)
        for node in forward.nodes:
            if is_view(node) and node.args[0] in again:
                again[node] = backward.node_copy(
                    node, lambda n: again[n] if n in again else _saved_size(forward, backward, n))
    saved = {each.name: each for each in backward.find_nodes(op="placeholder")}
    dropped = {node for node in again if node.name in saved}
    for node in dropped:
        saved[node.name].replace_all_uses_with(again[node])
        backward.erase_node(saved[node.name])
    # Views that backward does not read. The operations of communication come into the graph later:
    # nobody reads their results, so they would be dropped too.
    backward.eliminate_dead_code()
    output = forward.output_node()
    output.args = (tuple(each for each in output.args[0] if each not in dropped),)  # type: ignore[union-attr]


def _saved_size(forward: fx.Graph,
                backward: fx.Graph,
                node: fx.Node) -> fx.Node:
    """
    #### The input of backward for a size that forward knows

    A view as long as the sequence, `weight[:length]`, needs it.
    """
    saved = {each.name: each for each in backward.find_nodes(op="placeholder")}
    # Sizes are saved last.
    return saved.get(node.name) or _also_saved(
        forward, backward, node, len(forward.output_node().args[0]))  # type: ignore[arg-type]


def _also_saved(forward: fx.Graph,
                backward: fx.Graph,
                node: fx.Node,
                place: int) -> fx.Node:
    """
    #### Save one more value for backward, and return backward's input for it

    * `place` is its index among the outputs of forward
    """
    output = forward.output_node()
    outputs: Any = [*output.args[0]]  # type: ignore[misc]
    outputs.insert(place, node)
    output.args = (tuple(outputs),)
    # Both a size and the versions come after the other sizes, and before the tensors.
    inputs = backward.find_nodes(op="placeholder")
    tensors = (each for each in inputs if isinstance(each.meta["val"], torch.Tensor))
    with backward.inserting_before(next(tensors)):
        found = backward.placeholder(node.name)
    found.meta["val"] = node.meta["val"]
    return found


def save_versions(forward: fx.Graph,
                  backward: fx.Graph,
                  results: int,
                  places: Sequence[Place | None]) -> None:
    """
    ## Have backward refuse weights that have changed since forward

    * `results` is the number of outputs that the model asked for; what is saved follows them
    """
    layers = tuple(dict.fromkeys(place.layer for place in places if place))
    if not layers:
        return
    fake: Any = detect_fake_mode(
        [node.meta["val"] for node in forward.find_nodes(op="placeholder")])
    versions = insert_before(forward.output_node(), remember, *layers)
    with fake:
        versions.meta["val"] = torch.empty(len(layers), dtype=torch.int64, device="cpu")
    came = _also_saved(forward, backward, versions, results)
    insert_after(backward.find_nodes(op="placeholder")[-1], refuse_old, came, *layers)


@on_copies
def marked_inputs(graph: fx.Graph, places: Sequence[Place | None]) -> fx.Graph:
    """
    ## A graph that names its parameters
    """
    inputs = graph.find_nodes(op="placeholder")
    for node, place in zip(inputs, places, strict=False):
        if place and node.users:
            with graph.inserting_after(inputs[-1]):
                value = _parameter(graph, place, node)
            node.replace_all_uses_with(value)
    return graph


@on_copies
def marked_gradients(graph: fx.Graph, places: Sequence[Place | None]) -> fx.Graph:
    """
    ## A graph that hands over the gradients of parameters as soon as they are there
    """
    output = graph.output_node()
    gradients = [*output.args[0]]  # type: ignore[misc]
    for i, place in enumerate(places):
        if place and gradients[i] is not None:
            insert_after(gradients[i], collect, place.layer, place.place, gradients[i])
            gradients[i] = None
    output.args = (tuple(gradients),)
    return graph

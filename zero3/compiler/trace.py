from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition

from zero3.compiler.graph import collect, copied, parameter
from zero3.compiler.passes import of_parameter

Place = tuple[str, int]


class Backend:
    def __init__(self, places, lower, compile_graph):
        self.places = places
        self.lower = lower
        self.compile_graph = compile_graph

    def __call__(self, traced: fx.GraphModule, inputs: list[Any]) -> Callable:
        places = [self.places.get(id(each)) for each in inputs]
        graphs = {}

        def partition(joint, joint_inputs, **kwargs):
            forward, backward = default_partition(joint, joint_inputs, **kwargs)
            drop_saved_parameters(forward, backward, places)
            first = marked_forward(forward.graph, places)
            second = marked_backward(backward.graph, places)
            graphs["forward"], graphs["backward"] = self.lower(traced, first, second)
            return forward, backward

        def forward(module, _):
            return self.compile_graph(graphs["forward"])

        def backward(module, _):
            return self.compile_graph(graphs["backward"])

        def inference(module, _):
            return self.compile_graph(self.lower(traced, marked_forward(module.graph, places), None)[0])

        run = aot_module_simplified(traced, inputs, fw_compiler=forward, bw_compiler=backward,
                                    inference_compiler=inference, partition_fn=partition)
        trains = torch.empty(0, requires_grad=True)
        frozen = torch.empty(0)
        stand_ins = [None if at is None else trains if each.requires_grad else frozen
                     for at, each in zip(places, inputs, strict=True)]

        def call(*args):
            return run(*[arg if other is None else other
                         for arg, other in zip(args, stand_ins, strict=True)])
        return call


def inputs_of(graph):
    return [node for node in graph.nodes if node.op == "placeholder"]


def marked_forward(graph, places):
    graph = copied(graph)
    begin = inputs_of(graph)[-1]
    for node, place in zip(inputs_of(graph), places, strict=False):
        if place and node.users:
            with graph.inserting_after(begin):
                value = graph.call_function(parameter, place)
            value.meta = node.meta
            node.replace_all_uses_with(value)
    return graph


def marked_backward(graph, places):
    graph = copied(graph)
    output = next(reversed(graph.nodes))
    grads = [*output.args[0]]
    for i, place in enumerate(places):
        if place and grads[i] is not None:
            with graph.inserting_after(grads[i]):
                graph.call_function(collect, (*place, grads[i]))
            grads[i] = None
    output.args = (tuple(grads),)
    return graph


def drop_saved_parameters(forward, backward, places):
    originals = {}
    for node, place in zip(inputs_of(forward.graph), places, strict=False):
        if place:
            originals[node] = place
    views = dict.fromkeys(originals)
    from zero3.compiler.passes import is_view
    for node in forward.graph.nodes:
        if is_view(node) and node.args[0] in views:
            views[node] = None
    by_name = {node.name: node for node in views}
    begin = inputs_of(backward.graph)[-1]
    copies = {}

    def again(node):
        if node not in copies:
            with backward.graph.inserting_before(begin.next):
                if node in originals:
                    copies[node] = backward.graph.call_function(parameter, originals[node])
                    copies[node].meta = dict(node.meta)
                else:
                    for each in node.all_input_nodes:
                        again(each)
                    copies[node] = backward.graph.node_copy(node, lambda n: copies[n])
        return copies[node]

    dropped = set()
    for node in inputs_of(backward.graph):
        if node.name in by_name:
            node.replace_all_uses_with(again(by_name[node.name]))
            backward.graph.erase_node(node)
            dropped.add(by_name[node.name])
    output = next(reversed(forward.graph.nodes))
    output.args = (tuple(out for out in output.args[0] if out not in dropped),)
    forward.recompile()
    backward.recompile()

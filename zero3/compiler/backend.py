import torch
from torch import fx
from torch._functorch.aot_autograd import aot_module_simplified
from torch._functorch.partitioners import default_partition
from zero3.compiler.graph import *
from zero3.compiler import passes


class Backend:
    def __init__(self, model):
        self.model = model
        self.log = []
        self.places = {}
        for unit in model.units:
            for i, slot in enumerate(unit.slots()):
                self.places[id(slot.param)] = (unit.path or "root", i)
        self.layers = {unit.path or "root": unit for unit in model.units}

    def __call__(self, gm, examples):
        found = [self.places.get(id(e)) for e in examples]

        def partition(joint, inputs, **kw):
            fw, bw = default_partition(joint, inputs, **kw)
            forget(fw, bw, found)
            return fw, bw

        def forward(gm, inputs):
            return self.lower(gm, found)

        def backward(gm, inputs):
            return self.lower(gm, None, found)

        run = aot_module_simplified(gm, examples, fw_compiler=forward, bw_compiler=backward,
                                     partition_fn=partition, inference_compiler=forward)
        trains = torch.empty(0, requires_grad=True)
        frozen = torch.empty(0)
        stand = [None if at is None else trains if e.requires_grad else frozen for at, e in zip(found, examples)]

        def call(*args):
            return run(*[a if s is None else s for a, s in zip(args, stand)])
        return call

    def lower(self, gm, found, grads=None):
        graph = rebuilt(gm.graph.nodes)
        if found:
            mark(graph, found)
        if grads:
            mark_grads(graph, grads)
        graph = passes.insert(graph)
        self.log.append(graph)
        return link(graph, self.layers)


def mark(graph, found):
    ins = [n for n in graph.nodes if n.op == "placeholder"]
    first = ins[-1]
    for node, at in zip(ins, found, strict=False):
        if at and node.users:
            with graph.inserting_after(first):
                new = graph.call_function(parameter, at)
            new.meta = node.meta
            node.replace_all_uses_with(new)


def mark_grads(graph, found):
    output = next(reversed(graph.nodes))
    outs = list(output.args[0])
    for i, at in enumerate(found):
        if at and outs[i] is not None:
            with graph.inserting_after(outs[i]):
                graph.call_function(collect, (*at, outs[i]))
            outs[i] = None
    output.args = (tuple(outs),)


def forget(fw, bw, found):
    ins = [n for n in fw.graph.nodes if n.op == "placeholder"]
    of = {node: at for node, at in zip(ins, found, strict=False) if at}
    cone = dict.fromkeys(of)
    for node in fw.graph.nodes:
        if passes.is_view(node) and any(a in cone for a in node.all_input_nodes):
            cone[node] = None
    output = next(reversed(fw.graph.nodes))
    saved = {n.name: n for n in cone}
    copies = {}
    gone = set()
    last = [n for n in bw.graph.nodes if n.op == "placeholder"][-1]
    def rebuild(node, anchor):
        if node in copies:
            return copies[node]
        if node in of:
            with bw.graph.inserting_after(anchor):
                new = bw.graph.call_function(parameter, of[node])
        else:
            args = [rebuild(a, anchor) for a in node.all_input_nodes]
            at = args[-1] if args else anchor
            with bw.graph.inserting_after(at):
                new = bw.graph.node_copy(node, lambda n: copies[n])
        new.meta = dict(node.meta)
        copies[node] = new
        return new
    for p in [n for n in bw.graph.nodes if n.op == "placeholder"]:
        if p.name in saved:
            new = rebuild(saved[p.name], last)
            p.replace_all_uses_with(new)
            bw.graph.erase_node(p)
            gone.add(p.name)
    output.args = (tuple(a for a in output.args[0] if not (isinstance(a, fx.Node) and a.name in gone and a in cone)),)
    fw.recompile(); bw.recompile()

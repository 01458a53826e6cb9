r"""
# Delete this line

`MUTATIONS` are lines of the source, each with what happens without it: the message, or the number,
by which somebody who made this mistake would know it.

A comment can say that a line matters. A run without it shows how, and how quietly: most of these
mistakes raise no error. The model trains, on other numbers than it should, or in more memory. So
each mutation names a program of `programs.py` and how two lines begin that it prints: one with the
source as it is, and the other with the mutation. A test demands both.

$$\text{healthy} \in \text{program}(\text{source}) \qquad
\text{symptom} \in \text{program}(\text{mutation}(\text{source}))$$

**Run this**: `python -m docs.mutations` tries them all, `python -m docs.mutations mean` one.

**Not covered, and what that costs**: mistakes that show by chance. A write that nobody waits for
may be done in time or not. Where a program cannot be late on purpose, as `late` is, the mutation is
not in the list.
"""

import argparse
import textwrap
from collections.abc import Iterator

from docs.trial import Mutation, Trials


def all_with_lines() -> Iterator[tuple[Mutation, int, int]]:
    """
    ## Every mutation, with the first and the last of its lines in the source as it is now

    Raises `ValueError` where one does not fit the source any more.
    """
    for mutation in MUTATIONS:
        yield (mutation, *mutation.lines())


MUTATIONS = [
    Mutation(
        "mean", "layer.py", "Zero3Layer._post_backward_hook",
        title="Without the division by the number of ranks",
        old="        mean = 1 / self.comm.world_size\n",
        new="        mean = 1\n",
        breaks="I1", program="step",
        healthy="gradients: 1.00 times those of plain PyTorch",
        symptom="gradients: 2.00 times those of plain PyTorch",
        why="A reduce-scatter adds, and the loss of the global batch is a mean: without the "
            "division gradients are $N$ times too large. Adam hides most of it, SGD nothing."),
    Mutation(
        "assign", "layer.py", "FlatParameter.add_grad",
        title="A second backward assigns",
        old="            grad = mark(self.shard.grad.add_(total), self, used=None)\n",
        new="            grad = mark(total, self, used=None)\n",
        breaks="I7", program="micro_batches",
        healthy="gradient of 4 micro-batches: 1.00 times that of the whole batch",
        symptom="gradient of 4 micro-batches: 0.25 times that of the whole batch",
        why="Autograd adds to `.grad`, and so has a shard. The last of the four micro-batches "
            "overwrites the others, whose work is thrown away."),
    Mutation(
        "no-hook", "layer.py", "Zero3Layer._add_backward_hooks",
        title="A hook on a node that nobody keeps",
        old="""\
                slot.hook = slot.param.register_post_accumulate_grad_hook(
                    lambda p, ours=ours, i=i: ours()(group, i, p))
""",
        new="""\
                with torch.enable_grad():
                    node = slot.param.expand_as(slot.param).grad_fn.next_functions[0][0]
                slot.hook = node.register_hook(
                    lambda *_, p=slot.param, ours=ours, i=i: ours()(group, i, p))
""",
        breaks="I1", program="step",
        healthy="gradients: 1.00 times those of plain PyTorch",
        symptom="gradients: none on the shards",
        why="The older way to hear of a gradient: a hook on the `AccumulateGrad` node of the "
            "parameter. Nothing but a graph keeps this node. It is gone with the line that found "
            "it, backward makes another one, and the hook is never called."),
    Mutation(
        "keep-storage", "layer.py", "Zero3Layer._cleanup_params",
        title="The storage is kept",
        old="""\
        for g in self.flats:
            g.full.untyped_storage().resize_(0)
""",
        new="",
        breaks="I2", program="step",
        healthy="at rest: 1,008 bytes, 1.00 times what `predict` says",
        symptom="at rest: 3,024 bytes, 3.00 times what `predict` says",
        why="Everything trains, and nothing is saved: beside its shards, half of the model, a rank "
            "rests with all of it. After backward a reduce would still give the memory back, for "
            "its messages arrive there; after an evaluation nothing does."),
    Mutation(
        "fresh-memory", "layer.py", "Zero3Layer.fetch_params",
        title="Each gather into memory of its own",
        old="        self._gather = self._all_gather([g.full for g in self.flats])\n",
        new="""\
        fulls = [self._empty(len(g.full), g.full.dtype) for g in self.flats]
        for full, g in zip(fulls, self.flats, strict=True):
            for slot in g.slots:
                slot.view = slot.of(full)
        self._gather = self._all_gather(fulls)
        self._look_at(fulls)
        self._full_elsewhere = False
""",
        breaks="I3", program="step",
        healthy="whole layers in the graph after forward: 1 of 4",
        symptom="whole layers in the graph after forward: 4 of 4",
        why="Each gather into memory of its own. The layer lets go of it after forward, but "
            "autograd has saved the weights for backward and holds on to them: after forward the "
            "whole model is there. One storage, emptied and filled again, is what both see."),
    Mutation(
        "no-wait", "layer.py", "Zero3Layer._wait_params",
        title="Nobody waits for the messages",
        old="            gather.wait()\n",
        new="",
        breaks="I1", program="late",
        healthy="rank 1 prints: output: that of plain PyTorch",
        symptom="rank 1 prints: output: not that of plain PyTorch",
        why="The layer computes with what its buffer holds, whether the messages have come or not. "
            "Here rank 0 comes a second late, and rank 1 does not notice."),
    Mutation(
        "free-the-last", "layer.py", "Zero3Layer._release",
        title="The last layer is freed after forward",
        old="""\
        if call and call.outputs and self.layer_idx >= 0 and not self.next_layer:
            self._kept = weakref.ref(call, lambda _: self._cleanup_params())
        else:
            self._cleanup_params()
""",
        new="        self._cleanup_params()\n",
        breaks="I4", program="step",
        healthy="unshards in a step: 7, of 4 layers; sent 1.00 times what `predict` says",
        symptom="unshards in a step: 8, of 4 layers; sent 1.09 times what `predict` says",
        why="Backward begins with the layer with which forward ends. If that is freed in between, "
            "it is gathered twice in a row, and nothing hides the wait."),
    Mutation(
        "no-prefetch", "layer.py", "Zero3Layer._pre_backward_hook",
        title="Nothing is fetched ahead in backward",
        old="""\
        for layer in self.prev_layer:
            # Below the first layer that trains nothing goes backward, and nothing is fetched.
            if layer._pending:
                layer.fetch_params()
""",
        new="",
        breaks="", program="step",
        healthy="unshards in backward that start while another layer computes: 3 of 3",
        symptom="unshards in backward that start while another layer computes: 0 of 3",
        why="The numbers stay right, and so do bytes and messages. But each gather now begins "
            "where it is needed, and the layer waits for all of it: what was hidden behind "
            "computation is added to the time of a step."),
    Mutation(
        "dirty-padding", "layer.py", "Zero3Layer._post_backward_hook",
        title="The padding of a gradient is what the memory held",
        old="""\
            for padding in group.padding():
                group.grad[padding].zero_()
""",
        new="",
        breaks="I5", program="clip_nan",
        healthy="gradients that are numbers after clipping: 60 of 60",
        symptom="gradients that are numbers after clipping: 0 of 60",
        why="The padding has no gradient, so nobody writes there. Whatever the memory held is part "
            "of the norm. If it is a NaN, one element that belongs to no parameter makes every "
            "gradient of the model NaN."),
    Mutation(
        "unused", "layer.py", "Zero3Layer._backup_grads",
        title="A parameter that got no gradient is left as it was",
        old="""\
        for g in groups:
            for slot in g.slots:
                if slot.names not in g.ready:
                    # No gradient arrived: it is zero, and not what the memory held.
                    slot.of(g.grad).zero_()
""",
        new="",
        breaks="I1", program="clip_nan",
        healthy="norm of layer 0's gradient: a number",
        symptom="norm of layer 0's gradient: nan",
        why="A parameter that the loss does not depend on gets no gradient, and still has its "
            "place in the flat one, which is sent. Plain PyTorch leaves its `.grad` at `None`; "
            "here it has to be zero."),
    Mutation(
        "skip-one", "layer.py", "Zero3Layer.fetch_params",
        title="One rank leaves out a gather",
        old="        if self.is_fetched or self._full_elsewhere or not self.flats:\n",
        new="        if self.is_fetched or self._full_elsewhere or not self.flats or (\n"
            "                self.comm.rank == 1 and self.layer_idx == 2):\n",
        breaks="I6", program="step",
        healthy="gradients: 1.00 times those of plain PyTorch",
        symptom="rank 0 prints: RuntimeError: rank 0: layer 2 (Sequential): the ranks diverged. "
                "Expected: gather of layer 2, 432 bytes",
        why="One rank leaves out a gather, as one would whose data takes another branch. The other "
            "would wait for ever, or take the next message for this one. As each announces what it "
            "is about to do, the error says what either of them does."),
    Mutation(
        "no-comparison", "comm.py", "Communicator.open",
        title="The ranks do not compare what they shard",
        old="""\
        for rank, theirs in enumerate(self.gather(layout)):
            for i in range(max(len(layout), len(theirs))):
                here, there = layout[i : i + 1] or "none", theirs[i : i + 1] or "none"
                layer.expect(here == there, f"differs between ranks at parameter {i}",
                             f"{here}, as here", f"{there} on rank {rank}",
                             "build the same module, in the same order, on all ranks")
""",
        new="",
        breaks="I6", program="another_order",
        healthy="rank 1 prints: RuntimeError: rank 1: TwoLinears differs between ranks at "
                "parameter 0. Expected: [(('second.weight',)",
        symptom="rank 1 prints: output: not that of plain PyTorch",
        why="On rank 1 the module was built in another order, of layers of one shape. The bytes "
            "fit, so every gather works, and rank 1 computes with the first layer's weights in the "
            "second and the other way round."),
    Mutation(
        "master-stays", "optimizer/states.py", "ShardStates.in_memory",
        title="The master is not rounded into its shard",
        old="""\
        if write and not self.shard_is_master:
            # Round it to the shard's data type. This is what the layer gathers next.
            self.flat.storage.replace(master)
""",
        new="",
        breaks="I1", program="master",
        healthy="weights that 3 steps have changed: 42 of 42",
        symptom="weights that 3 steps have changed: 0 of 42",
        why="The optimizer steps fp32 masters, and layers gather shards in bf16. A master that is "
            "not rounded into its shard learns alone: losses are finite, norms are fine, and the "
            "model stays as it was born."),
    Mutation(
        "local-norm", "optimizer/stage3.py", "Zero3Optimizer._squares",
        title="Each rank clips by its own norm",
        old="        return self.comm.numbers(self, squares.to(self.layers[0].device))\n",
        new="        return squares[None].to(self.layers[0].device)\n",
        breaks="I1", program="clip",
        healthy="the step: 0.60 and 0.80",
        symptom="the step: 1.00 and 1.00",
        why="The gradient is (3, 4), one element on each rank, and its norm 5. If each rank clips "
            "by the norm of what it has, 3 or 4, the parts shrink by different factors: the step "
            "is not only too long, it points elsewhere."),
    Mutation(
        "skip-alone", "optimizer/stage3.py", "Zero3Optimizer._step",
        title="Each rank looks for infinities in its own gradients",
        old="        if not math.isfinite(norm):\n",
        new="        if not squares[self.comm.rank].isfinite().all():\n",
        breaks="I6", program="overflow",
        healthy="steps skipped: 1, loss scale 32768",
        symptom="rank 0 prints: steps skipped: 0, loss scale 65536",
        why="The gradient overflows on rank 1 alone. If each rank looks at its own, rank 0 steps "
            "and rank 1 does not. From then on they add gradients of losses that were multiplied "
            "by different scales."),
    Mutation(
        "old-buffer", "offload.py", "InFile.release",
        title="A buffer that was given back still counts as read",
        old="            self.buffer, self.held = None, False\n            self.present.clear()\n",
        new="            self.buffer, self.held = None, False\n",
        breaks="I8", program="files",
        healthy="read in a step: 28,672 bytes, 1.00 times what `predict` says",
        symptom="read in a step: 16,384 bytes, 0.57 times what `predict` says",
        why="A buffer that was given back is filled with another layer's shard next. A layer that "
            "still believes to have read its own reads less, and computes with that one's weights: "
            "the output is not that of plain PyTorch either."),
    Mutation(
        "unchecked", "checkpoint/tensor_files.py", "TensorFile.block",
        title="No checksum is looked at",
        old="""\
            if f"{zlib.crc32(block):08x}" != self.crc32[8 * i : 8 * i + 8]:
                raise Broken(f"{self.path}, the file of rank {self.rank}, is damaged: bytes "
                             f"{i * BLOCK_BYTES:,} to {i * BLOCK_BYTES + len(block):,} have "
                             "another checksum than when they were written")
""",
        new="",
        breaks="I10", program="damage",
        healthy="rank 1 prints: RuntimeError: rank 1: the checkpoint in saved/step-00000001 cannot",
        symptom="loaded; weights that are not as saved: 1",
        why="One bit in the file of rank 1 has changed, the sign of a weight. Only the checksum "
            "can tell it from a weight that was learnt."),
]


def show(mutation: Mutation, output: str) -> str:
    """
    ## A mutation, and what its program prints with it
    """
    rows = [f"{'>' if row.startswith(mutation.symptom) else ' '} {row}"
            for row in output.splitlines()]
    return "\n".join([
        f"{mutation.name}: zero3/{mutation.file}, line {mutation.line}, {mutation.section}",
        *textwrap.wrap(mutation.why, 100), "", mutation.diff(), "",
        f"`{mutation.program}` prints, instead of `{mutation.healthy}`:", *rows, ""])


def main() -> None:
    """
    ## The command line
    """
    known = [mutation.name for mutation in MUTATIONS]
    parser = argparse.ArgumentParser(prog="python -m docs.mutations")
    parser.add_argument("name", nargs="*", help=f"of {', '.join(known)}; left out, all")
    names = parser.parse_args().name or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"expected names of {known}, got {unknown}")
    with Trials() as trials:
        for mutation in MUTATIONS:
            if mutation.name in names:
                print(show(mutation, trials.run(mutation.program, mutation)), flush=True)


if __name__ == "__main__":
    main()

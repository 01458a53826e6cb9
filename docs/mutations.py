r"""
# Delete this line

`MUTATIONS` lists small mistakes in the source. Each one comes with its symptom: the error message
or the number by which you would notice the mistake.

A comment can claim that a line matters. A run without the line shows the effect, and how easily it
is missed. Most of these mistakes raise no error: the model trains on wrong numbers, or uses more
memory. So each mutation names a program of `programs.py` and the beginnings of two printed lines.
The program prints one of them with the original source, and the other with the mutation. A test
checks both.

$$\text{healthy} \in \text{program}(\text{source}) \qquad
\text{symptom} \in \text{program}(\text{mutation}(\text{source}))$$

**Run this**: `python -m docs.mutations` tries them all, `python -m docs.mutations mean` one.

**Not covered, and what that costs**: mistakes with random effects. A write without a wait may be
complete in time or not. The program `late` delays one rank on purpose; mistakes that cannot be
provoked in such a way are not in the list.
"""

import argparse
import textwrap
from collections.abc import Iterator

from docs.trial import Mutation, Trials


def all_with_lines() -> Iterator[tuple[Mutation, int, int]]:
    """
    ## Every mutation, with the numbers of its first and last line in the current source

    Raises `ValueError` if a mutation does not fit the source any more.
    """
    for mutation in MUTATIONS:
        yield (mutation, *mutation.lines())


MUTATIONS = [
    Mutation(
        "mean", "layer.py", "Zero3Layer._post_backward_hook",
        title="No division by the number of ranks",
        old="        mean = 1 / self.comm.divisor\n",
        new="        mean = 1\n",
        breaks="I1", program="step",
        healthy="gradients: 1.00 times those of plain PyTorch",
        symptom="gradients: 2.00 times those of plain PyTorch",
        why="The reduce-scatter takes a sum over ranks, but the loss of the global batch is a "
            "mean. Without the division gradients are $N$ times too large. With SGD you notice "
            "it. Adam hides most of the error, because it divides by the size of the gradient."),
    Mutation(
        "assign", "flat.py", "FlatParameter.add_grad",
        title="A second backward pass overwrites the first",
        old="            self.shard.grad = guards.mark(self.shard.grad.add_(total), self, None, "
            "names)\n",
        new="            self.shard.grad = guards.mark(total, self, None, names)\n",
        breaks="I7", program="micro_batches",
        healthy="gradient of 4 micro-batches: 1.00 times that of the whole batch",
        symptom="gradient of 4 micro-batches: 0.25 times that of the whole batch",
        why="Autograd adds each new gradient to `.grad`, so a shard has to do the same. Here the "
            "last of four micro-batches overwrites the gradients of the other three."),
    Mutation(
        "no-hook", "layer.py", "Zero3Layer._add_backward_hooks",
        title="A hook on a node that is freed",
        old="""\
                slot.hook = slot.param.register_post_accumulate_grad_hook(
                    lambda p, ours=ours, i=i: ours()(flat_index, i, p))
""",
        new="""\
                with torch.enable_grad():
                    node = slot.param.expand_as(slot.param).grad_fn.next_functions[0][0]
                slot.hook = node.register_hook(
                    lambda *_, p=slot.param, ours=ours, i=i: ours()(flat_index, i, p))
""",
        breaks="I1", program="step",
        healthy="gradients: 1.00 times those of plain PyTorch",
        symptom="gradients: none on the shards",
        why="This is the older way to get a callback for a gradient: a hook on the parameter's "
            "`AccumulateGrad` node. Only an autograd graph keeps this node alive. The graph of "
            "this line is freed at once, and the node with it. Backward creates another node "
            "without a hook, so the hook is never called."),
    Mutation(
        "keep-storage", "layer.py", "Zero3Layer._cleanup_params",
        title="The storage is not freed",
        old="""\
            in_flight.free(flat.full)
""",
        new="",
        breaks="I2", program="step",
        healthy="at rest: 1,008 bytes, 1.00 times the prediction",
        symptom="at rest: 3,024 bytes, 3.00 times the prediction",
        why="The model trains correctly, but no memory is saved. Between steps a rank holds its "
            "shards, half of the model on two ranks, and the whole model as well. After backward "
            "the reduction still frees the memory, because it uses it as its receive buffer. "
            "After an evaluation nothing frees it."),
    Mutation(
        "fresh-memory", "layer.py", "Zero3Layer.fetch_params",
        title="Each all-gather into new memory",
        old="        pairs = [(flat.full, flat.storage.load()) for flat in self.flats]\n",
        new="""\
        pairs = [(torch.empty_like(flat.full), flat.storage.load()) for flat in self.flats]
        for flat, (full, _) in zip(self.flats, pairs, strict=True):
            for slot in flat.slots:
                slot.view = slot.of(full)
            flat.look_at(full)
""",
        breaks="I3", program="step",
        healthy="whole layers in the graph after forward: 1 of 4",
        symptom="whole layers in the graph after forward: 4 of 4",
        why="Here each all-gather allocates new memory. The layer drops its reference after "
            "forward, but autograd has saved the weights for backward and keeps them alive. So "
            "after forward the whole model is in memory. In the real code the layer and autograd "
            "share one storage, which is emptied and filled again."),
    Mutation(
        "no-wait", "layer.py", "Zero3Layer._wait_params",
        title="No wait for the all-gather",
        old="        gather.wait()\n",
        new="",
        breaks="I1", program="late",
        healthy="rank 1 prints: output: that of plain PyTorch",
        symptom="rank 1 prints: output: not that of plain PyTorch",
        why="The layer computes with the contents of its buffer, even if the shards have not "
            "arrived yet. In this program rank 0 is a second late, so rank 1 computes with "
            "uninitialised memory."),
    Mutation(
        "free-the-last", "layer.py", "Zero3Layer._release",
        title="The last layer is freed after forward",
        old="""\
        if call is None or not self.schedule.stays_full(self, call):
            self._cleanup_params()
        else:
            self.kept_for = weakref.ref(call, lambda _: self._cleanup_params())
""",
        new="        self._cleanup_params()\n",
        breaks="I4", program="step",
        healthy="all-gathers in a step: 7, of 4 layers; sent 1.00 times the prediction",
        symptom="all-gathers in a step: 8, of 4 layers; sent 1.09 times the prediction",
        why="Backward starts with the layer that forward ends with. If this layer is freed in "
            "between, it is gathered twice in a row, and the second all-gather overlaps no "
            "computation."),
    Mutation(
        "no-prefetch", "layer.py", "Zero3Layer._pre_backward_hook",
        title="No prefetch in backward",
        old="""\
        for layer in self.schedule.ahead(self):
            layer.fetch_params()
""",
        new="",
        breaks="", program="step",
        healthy="all-gathers in backward that start while another layer computes: 3 of 3",
        symptom="all-gathers in backward that start while another layer computes: 0 of 3",
        why="All numbers are right, and so is the communication volume. But each all-gather now "
            "starts when its layer is needed, so the layer waits for the whole of it. "
            "Communication no longer overlaps computation, and a step takes longer."),
    Mutation(
        "dirty-padding", "flat.py", "FlatParameter.begin_grad",
        title="The padding of a gradient is not initialised",
        old="""\
        for padding in self.padding:
            self.grad[padding].zero_()
""",
        new="",
        breaks="I5", program="clip_nan",
        healthy="finite gradients after clipping: 60 of 60",
        symptom="finite gradients after clipping: 0 of 60",
        why="Padding has no gradient, so autograd does not write to it. Without this line it "
            "keeps the old contents of the memory, and they become part of the gradient norm. If "
            "there is a NaN, a single element that belongs to no parameter turns every gradient "
            "of the model into NaN."),
    Mutation(
        "unused", "layer.py", "Zero3Layer._backup_grads",
        title="The gradient of an unused parameter is not initialised",
        old="        pairs = [(flat.zero_missing(), flat.receive_buffer) for flat in flats]\n",
        new="        pairs = [(flat.grad, flat.receive_buffer) for flat in flats]\n",
        breaks="I1", program="clip_nan",
        healthy="norm of layer 0's gradient: a number",
        symptom="norm of layer 0's gradient: nan",
        why="If the loss does not depend on a parameter, the parameter gets no gradient. It still "
            "has a place in the flat gradient, and this place is sent like the rest. In plain "
            "PyTorch its `.grad` is `None`. Here its place has to be zero."),
    Mutation(
        "skip-one", "layer.py", "Zero3Layer.fetch_params",
        title="One rank skips an all-gather",
        old="        if self.is_fetched or self.is_full_elsewhere or not self.flats:\n",
        new="        if self.is_fetched or self.is_full_elsewhere or not self.flats or (\n"
            "                self.comm.rank == 1 and self.layer_idx == 2):\n",
        breaks="I6", program="step",
        healthy="gradients: 1.00 times those of plain PyTorch",
        symptom="rank 0 prints: RuntimeError: rank 0: layer 2 (Sequential): the ranks diverged. "
                "Expected: gather of layer 2, 432 bytes",
        why="One rank skips an all-gather, as it would if its data took another branch of the "
            "model. Without a check, the other rank would wait forever, or receive the next "
            "message in place of this one. Each rank announces its transfers, so the error can "
            "name the transfers of both ranks."),
    Mutation(
        "no-comparison", "guards/placement.py", "compare_params",
        title="The ranks do not compare their modules",
        old="""\
    same(f"rank {comm.global_rank}: {owner.label} differs between ranks", comm.ranks,
         [told for told, _ in every],
         "build the same module, in the same order and with the same `Links`, on all ranks")
""",
        new="",
        breaks="I6", program="another_order",
        healthy="rank 1 prints: RuntimeError: rank 1: TwoLinears differs between ranks. Expected: "
                "the same parameter 0 on all ranks. Got: (('first.weight',)",
        symptom="rank 1 prints: output: not that of plain PyTorch",
        why="Rank 1 has created its two layers in the opposite order, and both have the same "
            "shape. All sizes agree, so every all-gather works. But rank 1 uses the first layer's "
            "weights in the second layer, and vice versa."),
    Mutation(
        "master-stays", "optimizer/states.py", "ShardStates.in_memory",
        title="The master is not copied into its shard",
        old="""\
            self.flat.storage.replace(whole_of(masters))
""",
        new="",
        breaks="I1", program="master",
        healthy="weights changed by 3 steps: 42 of 42",
        symptom="weights changed by 3 steps: 0 of 42",
        why="The optimizer updates fp32 masters, and layers gather bf16 shards. If a master is "
            "not rounded into its shard, only the master learns. Losses are finite and norms look "
            "right, but the model keeps its initial weights."),
    Mutation(
        "local-norm", "optimizer/stage3.py", "Zero3Optimizer._squares",
        title="Each rank clips by its own norm",
        old="        return self.comm.numbers(self, squares, options)\n",
        new="        return squares[None]\n",
        breaks="I1", program="clip",
        healthy="the step: 0.60 and 0.80",
        symptom="the step: 1.00 and 1.00",
        why="The gradient is (3, 4), one element on each rank, and its norm is 5. If each rank "
            "clips by the norm of its own element, 3 or 4, the two elements shrink by different "
            "factors. The step is too long, and it has the wrong direction."),
    Mutation(
        "all-elementwise", "optimizer/whole.py", "looks_at",
        title="Every optimizer steps shards",
        old='    return "element" if same else "parameter"\n',
        new='    return "element"\n',
        breaks="I1", program="normalised",
        healthy="length of the step: 1.00",
        symptom="length of the step: 1.41",
        why="This optimizer steps each parameter by 1 along its gradient. A shard has half of the "
            "gradient and a norm of its own, so each half is stepped by 1, and both together by "
            "$\\sqrt 2$. A trial with small matrices shows which optimizers need whole ones."),
    Mutation(
        "skip-alone", "optimizer/stage3.py", "Zero3Optimizer._step",
        title="Each rank checks only its own gradients for infinities",
        old="        if not math.isfinite(norm):\n",
        new="        if not squares[self.comm.rank].isfinite().all():\n",
        breaks="I6", program="overflow",
        healthy="steps skipped: 1, loss scale 32768",
        symptom="rank 0 prints: steps skipped: 0, loss scale 65536",
        why="The gradient overflows only on rank 1. If each rank checks only its own gradients, "
            "rank 0 makes the step and rank 1 skips it. From then on the model consists of shards "
            "from different steps, and the loss scales differ, which the next step notices."),
    Mutation(
        "old-buffer", "offload/in_file.py", "InFile.release",
        title="A released buffer still counts as read",
        old="        self.held = False\n        self.present.clear()\n",
        new="        self.held = False\n",
        breaks="I8", program="files",
        healthy="read in a step: 28,672 bytes, 1.00 times the prediction",
        symptom="read in a step: 16,384 bytes, 0.57 times the prediction",
        why="A released buffer is used for the shard of another layer next. If the first layer "
            "assumes that its shard is still there, it skips the read and computes with the other "
            "layer's weights. The output also differs from plain PyTorch."),
    Mutation(
        "no-write-wait", "offload/activations.py", "Copy.rest",
        title="Activations are freed before their copy is complete",
        old="            self._end(\"write\")\n",
        new="",
        breaks="I8", program="late_writes",
        healthy="gradients: 1.00 times those of plain PyTorch",
        symptom="gradients: not those of plain PyTorch",
        why="The layer's activations are written while the next layer computes. If the write is "
            "not over when their memory is freed, backward reads the file too early, and finds "
            "zeros or the activations of an earlier step. In this program each write is a second "
            "late. With a quick disk and long layers you would not notice for a while."),
    Mutation(
        "unchecked", "checkpoint/reader.py", "read_block",
        title="Checksums are not verified",
        old="""\
    Broken.unless(f"{zlib.crc32(block):08x}" == crc32,
                  f"{path}, the file of rank {rank}, is damaged: bytes {i * BLOCK_BYTES:,} to "
                  f"{i * BLOCK_BYTES + len(block):,} do not match their checksum")
""",
        new="",
        breaks="I10", program="damage",
        healthy="rank 1 prints: RuntimeError: rank 1: the checkpoint in saved/step-00000001 cannot",
        symptom="loaded; weights that differ from the saved ones: 1",
        why="One bit in the file of rank 1 has changed, and with it the sign of a weight. Only "
            "the checksum can distinguish this weight from a trained one."),
    Mutation(
        "parts", "pipeline/pipeline.py", "_Batch.backward",
        title="The losses of micro-batches are not divided",
        old="                self.optimizer.backward(edges.pop() / self.pipeline.micro_batches)\n",
        new="                self.optimizer.backward(edges.pop())\n",
        breaks="I7", program="stages",
        healthy="steps of the others: 1.00 to 1.00 times",
        symptom="steps of the others: 4.00 to 4.00 times",
        why="Each micro-batch has a mean loss over its own rows, and their gradients add up. With "
            "four of them the gradient is four times that of the batch. The loss that is printed "
            "does not show it, because it is divided elsewhere."),
    Mutation(
        "tied", "pipeline/pipeline.py", "_Batch.receive_tied_gradient",
        title="The gradient of the borrowed weights is not added",
        old="                tied.comm.rows(full)[tied.comm.rank] += grad\n",
        new="                tied.comm.rows(full)[tied.comm.rank] += 0\n",
        breaks="I1", program="stages",
        healthy="step of the tied weight: 1.00 times that of plain PyTorch",
        symptom="step of the tied weight: 0.",
        why="The last stage uses the weight too, and has its own part of the gradient. Without it "
            "the embedding of a language model learns only from its use as an embedding. It still "
            "learns, so nothing looks wrong."),
    Mutation(
        "hold", "pipeline/stages.py", "Stage.unshard",
        title="A stage is not held from one micro-batch to the next",
        old="        layers = [*self.module_list] if hold else []\n",
        new="        layers = []\n",
        breaks="I4", program="stages",
        healthy="gathers of three layers: 3",
        symptom="gathers of three layers: 17",
        why="Each layer frees itself when it has computed, and gathers itself when it is needed, "
            "so the weights are right. But a step sends the weights of a stage twice for each "
            "micro-batch, and not once."),
    Mutation(
        "place", "compression/thresholds.py", "own_keys",
        title="A rank forgets where its shard begins",
        old="                begin = layer.comm.rank * len(flat.shard)\n",
        new="                begin = 0\n",
        breaks="I1", program="pruned",
        healthy="pruned: 33 of 66",
        symptom="pruned: 35 of 66",
        why="Every rank counts the elements of its shard as if it had the first one. So some "
            "elements are counted twice, some not at all, and biases count as weights. The ranks "
            "still agree on a threshold, and the model trains with it."),
    Mutation(
        "same-k", "compression/thresholds.py", "kth_keys",
        title="Elements with a smaller digit are counted again",
        old="        left -= (upto - counts).gather(1, chosen[:, None])[:, 0]\n",
        new="",
        breaks="", program="pruned",
        healthy="pruned: 33 of 66",
        symptom="pruned: 54 of 66",
        why="The elements with a smaller first digit are below the threshold already, so fewer "
            "are looked for among the rest. Without this line the threshold is too high. All "
            "ranks agree on it, so nothing but the number of zeros shows it."),
    Mutation(
        "ties", "compression/weights.py", "PrunedElements.keys",
        title="Equal elements have equal keys",
        old="        return bits.bitwise_or_(places)\n",
        new="        return bits\n",
        breaks="", program="pruned",
        healthy="pruned of equal ones: 6 of 12",
        symptom="pruned of equal ones: 12 of 12",
        why="All elements up to the threshold are pruned, and all that equal it. In fp32 hardly "
            "two elements are equal, so the model trains as if nothing were wrong. In bf16 many "
            "are, and a layer that begins with equal weights loses all of them."),
    Mutation(
        "one-bit", "compression/weights.py", "Quantised.forward",
        title="The rounding is differentiated",
        old="            rounded = signs + (rows - rows.detach())\n",
        new="            rounded = signs + 0 * rows\n",
        breaks="", program="pruned",
        healthy="weights of one bit that 3 steps have changed: 66 of 66",
        symptom="weights of one bit that 3 steps have changed: 0 of 66",
        why="A sign is flat, so its gradient is zero wherever there is one. The second term is "
            "zero, but it has a gradient: that of a weight which is not rounded. Without it the "
            "weight never changes. The loss falls all the same, by the biases and other layers."),
    Mutation(
        "compressed-stays", "compression/weights.py", "Compressed.after_forward",
        title="A compressed weight is not freed after forward",
        old="            _free(place)\n",
        new="",
        breaks="I3", program="pruned",
        healthy="compressed weights in the graph after forward: 0 of 2",
        symptom="compressed weights in the graph after forward: 2 of 2",
        why="The layer frees its gathered weight, and the compressed one is another tensor. "
            "Autograd keeps it for backward. So after forward all compressed weights are whole on "
            "every rank, and together they are as large as the model that was to be sharded."),
    Mutation(
        "conjugate", "inject/line.py", "Border.enter",
        title="The gradient at the beginning of a split is not summed",
        old="        return Swap.apply(x, identity, self.line.all_reduce)\n",
        new="        return Swap.apply(x, identity, identity)\n",
        breaks="I1", program="split",
        healthy="whole: gradient of first.weight: 0% off",
        symptom="rank 0 prints: whole: gradient of first.weight: 48% off",
        why="Each rank has the gradient through its own half of the layer. The outputs and the "
            "gradients of the split weights themselves are right, so the loss falls for a while. "
            "But all layers below learn from a part, and another one on each rank."),
    Mutation(
        "bias", "inject/tensor.py", "Row.forward",
        title="The bias is added before the sum over ranks",
        old="        out = self.border.leave(x @ weight)\n",
        new="        out = self.border.leave(x @ weight + self.bias)\n"
            "        return out\n",
        breaks="I1", program="split",
        healthy="whole: outputs that differ from plain PyTorch: 0",
        symptom="whole: outputs that differ from plain PyTorch: 120",
        why="Each rank has the whole bias. Whatever all ranks add before the all-reduce, it adds "
            "once for each of them."),
    Mutation(
        "norms", "inject/sequence.py", "SequenceBorder.weight",
        title="The gradient of a norm is that of half of the positions",
        old="        return self.line.border.enter(param) if param.requires_grad else param\n",
        new="        return param\n",
        breaks="I1", program="split",
        healthy="by positions: gradient of blocks.0.norm.weight: 0% off",
        symptom="rank 0 prints: by positions: gradient of blocks.0.norm.weight: 64% off",
        why="A rank has some of the positions, and their gradient. The copies of the weight on "
            "both ranks drift apart, and no output shows it in the first step."),
    Mutation(
        "mask", "inject/sequence.py", "PartialDropout.forward",
        title="Each rank draws a mask for its own positions",
        old="        return x * mine\n",
        new="        return F.dropout(x, self.p)\n",
        breaks="I1", program="split",
        healthy="by positions: outputs that differ from plain PyTorch: 0",
        symptom="by positions: outputs that differ from plain PyTorch: 120",
        why="Ranks with the same random numbers draw the same mask, so the first positions of each "
            "part drop the same elements. The training works, with less random masks, and is that "
            "of the plain model no more."),
    Mutation(
        "ignored", "inject/cross_entropy.py", "_Chunked.forward",
        title="Positions that do not count have a gradient",
        old="                grad = grad.mul_(counts).to(hidden.dtype)\n",
        new="                grad = grad.to(hidden.dtype)\n",
        breaks="I1", program="chunks",
        healthy="gradient of hidden states: 0% off",
        symptom="gradient of hidden states: 99% off",
        why="The loss is right, because its sum leaves these positions out. Its gradient is "
            "computed beside it, and has to leave them out again. Padding would learn to predict "
            "token 0."),
]


def show(mutation: Mutation, output: str) -> str:
    """
    ## A mutation, with the output of its program
    """
    rows = [f"{'>' if row.startswith(mutation.symptom) else ' '} {row}"
            for row in output.splitlines()]
    return "\n".join([
        f"{mutation.name}: zero3/{mutation.file}, line {mutation.line}, {mutation.section}",
        *textwrap.wrap(mutation.why, 100), "", mutation.diff(), "",
        f"`{mutation.program}` prints this, and `{mutation.healthy}` without the mutation:",
        *rows, ""])


def main() -> None:
    """
    ## The command line
    """
    known = [mutation.name for mutation in MUTATIONS]
    parser = argparse.ArgumentParser(prog="python -m docs.mutations")
    parser.add_argument("name", nargs="*", help=f"one or more of {', '.join(known)}; default: all")
    names = parser.parse_args().name or known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"expected names of {known}, got {unknown}")
    with Trials() as trials:
        for mutation in MUTATIONS:
            if mutation.name in names:
                print(show(mutation, trials.run(mutation.program, mutation)), flush=True)


if __name__ == "__main__":
    main()

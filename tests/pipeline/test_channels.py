"""
# Pipelines: an error in one stage ends all of them, with its cause
"""

import dataclasses
import os
import pickle
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from tests.pipeline.test_pipeline import LENGTH, NAMES, TOKENS, WIDTH, chain, gpt, loss_of
from tests.ranks import run
from zero3 import Zero3Layer, Zero3Optimizer
from zero3.pipeline import Pipeline, channels
from zero3.pipeline.channels import Channels
from zero3.pipeline.pipeline import _checksum
from zero3.pipeline.schedules import Action


class Raises(torch.autograd.Function):
    """Identity, with an error in backward"""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("a bad gradient")


class Faulty(nn.Module):
    """A layer that fails on one rank, once it is told how"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.how = ""

    def forward(self, value):
        if self.how == "forward":
            raise ValueError("a bad layer")
        if self.how == "wordless":
            raise ValueError
        if self.how == "object":
            return {**value, "h": object()}
        if self.how == "dies":
            os._exit(7)
        h = self.linear(value["h"])
        return {**value, "h": Raises.apply(h) if self.how == "backward" else h}


def text_of(does):
    try:
        return f"{does()}"
    except (RuntimeError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def train_until(how, at):
    """Three batches; in the second one a rank fails. What each batch returned or raised."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)
    torch.manual_seed(0)
    layers = gpt(0, torch.float)
    faulty = [Faulty(), Faulty()]
    layers[1:1] = faulty[:1]
    layers[4:4] = faulty[1:]
    losses = [loss_of]
    pipeline = Pipeline(layers, mesh, loss_fn=lambda output, y: losses[0](output, y),
                        micro_batches=4, stages=[2, 5])
    optimizer = Zero3Optimizer(pipeline, torch.optim.SGD, lr=0.1)
    x = torch.arange(8 * LENGTH).view(8, LENGTH) % TOKENS
    told = [text_of(lambda: pipeline.train_batch(x, x, optimizer))]
    rows = x
    if dist.get_rank() == at:
        for layer in faulty:
            layer.how = how
        if how == "loss":
            losses[0] = lambda output, y: output
        if how == "rows":
            rows = x[:6]
        if how == "shapes":
            rows = x[:4]
        if how == "values":
            rows = (x + 1) % TOKENS
        if how == "order":
            rows = x.roll(1, 1)
        if how == "type":
            rows = x.int()
        if how == "mode":
            pipeline.eval()
    y = (rows, dist.get_rank() == at) if how == "number" else rows
    told.append(text_of(lambda: pipeline.train_batch(rows, y, optimizer)))
    pipeline.train()
    return [*told, text_of(lambda: pipeline.train_batch(x, x, optimizer))]


@pytest.mark.parametrize("how, at, cause", [
    ("forward", 0, "ValueError: a bad layer"), ("forward", 3, "ValueError: a bad layer"),
    ("backward", 1, "ValueError: a bad gradient"), ("backward", 2, "ValueError: a bad gradient"),
    ("wordless", 1, "ValueError: "), ("loss", 2, "the mean loss, a tensor of one element"),
    ("object", 1, "Got: a object")])
def test_an_error_in_one_stage_is_raised_in_all_with_its_cause(how, at, cause):
    """
    The rank itself raises its own error, and all others quote it. A later batch raises again,
    because gradients are half summed. Breaks where a rank waits for one that has failed, or where
    an error without a text counts as none.
    Proves I6, I10, `Pipeline._together`, `Channels.fail`, `Channels.receive`, `Action.where`,
    `Communicator.announce_fault`.
    """
    answers = run(train_until, 4, how, at)
    for rank, (first, second, third) in enumerate(answers):
        assert "Error" not in first
        assert cause in second and (rank == at or f"On rank {at}." in second), (rank, second)
        assert "Error" in third


@pytest.mark.parametrize("how, wrong", [
    ("rows", "tensors of [6] rows, on rank 2"),
    ("values", "['torch.int64 of (8, 5)', 'torch.int64 of (8, 5)'] to train in training mode, and"),
    ("shapes", " on rank 0, and \"['torch.int64 of (4, 5)', 'torch.int64 of (4, 5)'] to train"),
    ("mode", "['torch.int64 of (8, 5)', 'torch.int64 of (8, 5)'] to train in evaluation mode"),
    ("number", "'torch.int64 of (8, 5)', 'True'] to train"),
    ("type", "'torch.int32 of (8, 5)'] to train"),
    ("order", "['torch.int64 of (8, 5)', 'torch.int64 of (8, 5)'] to train in training mode, and")])
def test_a_batch_that_does_not_fit_is_refused_on_all_ranks_and_training_goes_on(how, wrong):
    """
    The ranks compare before anything is sent, so nothing is lost. In the second batch as in the
    first one: shapes, data types, values, their order in a row, and numbers.
    Proves I10, `Pipeline.cut`, `Channels.compare`, `_checksum`.
    """
    for first, second, third in run(train_until, 4, how, 2):
        assert second.startswith("ValueError") and wrong in second
        assert first == third and float(third) > 0


def dies_in_a_stage():
    return train_until("dies", 3)[1]


class Largest(TorchDispatchMode):
    """Notes the bytes of the largest tensor that an operation makes"""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if isinstance(out, torch.Tensor):
            self.found = max(self.found, out.untyped_storage().nbytes())
        return out


def test_a_checksum_takes_no_memory_however_long_a_row_is():
    """
    A row of a video or of a volume may have a gigabyte. Breaks where the batch is copied, or each
    byte becomes a number of eight.
    Proves `_checksum`.
    """
    for rows in (1, 3):
        batch = torch.zeros(rows, 100_005, dtype=torch.uint8)
        with Largest() as largest:
            before = _checksum([batch])
        assert largest.found == batch.nbytes  # views of the batch
        batch[-1, -1] = 1
        assert _checksum([batch]) != before


def test_a_rank_that_dies_ends_the_others():
    """
    They raise an error that says what is lost, and wait for nothing.
    Proves I10, `Channels._isend`, `Channels._start`, `Channels._wait`, `Channels._explained`.
    """
    with pytest.raises(AssertionError) as error:
        run(dies_in_a_stage, 4, fresh=True)
    assert "rank 3" in str(error.value)


def other_orders():
    """Rank 1 evaluates where rank 0 trains."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    pipeline = Pipeline(gpt(0, torch.float), mesh, loss_fn=loss_of, micro_batches=2)
    optimizer = Zero3Optimizer(pipeline)
    x = torch.arange(2 * LENGTH).view(2, LENGTH) % TOKENS
    if dist.get_rank():
        return text_of(lambda: pipeline.eval_batch(x, x))
    return text_of(lambda: pipeline.train_batch(x, x, optimizer))


def test_stages_that_do_different_things_raise_errors():
    """
    Breaks where one trains, the other evaluates, and each waits for the other.
    Proves I6, `Pipeline.cut`.
    """
    for told in run(other_orders, 2):
        assert "to train in training mode, and values" in told and "to evaluate" in told


def refused():
    """What constructors and calls say to arguments that cannot be."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    shared = nn.Linear(2, 2)

    def make(layers=None, where=mesh, **options):
        return Pipeline(layers or chain(0, torch.float), where, loss_fn=loss_of, **options)

    pipeline = make()
    elsewhere = Zero3Optimizer(Zero3Layer(nn.Linear(2, 2)))
    x = torch.zeros(2, LENGTH, dtype=torch.long)
    buffered = [nn.Linear(2, 2), nn.Linear(2, 2)]
    buffered[1].register_buffer("running", torch.zeros(1 + dist.get_rank()))
    return [text_of(does) for does in (
        lambda: make(where=other), lambda: make(stages=[1, 1]), lambda: make(stages=[2, 1, 2]),
        lambda: make(stages=[3, "2"]), lambda: make(stages=[4, 1]),
        lambda: make([nn.Linear(2, 2)]), lambda: make(micro_batches=0),
        lambda: make(schedule="other"), lambda: make(gpt(0, torch.float), per_rank=2),
        lambda: make([nn.Linear(2, 2), shared, nn.Linear(2, 2), shared, shared],
                     schedule="interleaved", micro_batches=2, stages=[2, 1, 1, 1]),
        lambda: pipeline.train_batch(x, x, elsewhere), lambda: pipeline(x),
        lambda: make(iter([])), lambda: make(stages=[]), lambda: make(buffered))]


def test_what_cannot_be_a_pipeline_is_refused():
    """
    Proves `stages.Plan`, `Plan._check_counts`, `Plan._check_weights`, `balanced`, `Pipeline`,
    `Pipeline.forward`, `Pipeline.train_batch`.
    """
    for told in run(refused, 2):
        for text, part in zip(told, (
                "a mesh with the dimensions ('pipeline', 'shard')", "Got: [1, 1]",
                "Got: [2, 1, 2]", "numbers of layers that add up to 5, for as many",
                "stage 1. Expected: weights of its own. Got: none",
                "the stages. Expected: at most 1, one for each layer. Got: 2",
                "`micro_batches`, at least 1. Got: 0", "Got: 'other'",
                "one stage on each rank with 1f1b. Got: 2",
                "tied weights. Expected: the same two stages for all of them",
                "the newest `Zero3Optimizer` of this pipeline", "`train_batch(x, y, optimizer)`",
                "the stages. Expected: at most 0, one for each layer. Got: 2", "Got: []",
                "`1.running`"),
                strict=True):
            assert part in text and "What to do: " in text, text


def all_fail():
    """What each rank gets as the first error, if all of them have one, and one has a second."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    channels = Pipeline(chain(0, torch.float), mesh, loss_fn=loss_of).channels
    dist.barrier()
    return [channels.fail(f"error {i} of rank {dist.get_rank()}") for i in range(2)]


def test_all_ranks_quote_the_first_of_several_errors():
    """
    Breaks where an error that follows from another one hides it.
    Proves `Channels.fail`.
    """
    (first, again), other = run(all_fail, 2)
    assert first == again and other == [first] * 2
    assert first in ("error 0 of rank 0", "error 0 of rank 1")


def groups_of_an_accelerator():
    """The process groups that a rank makes where tensors are not on the CPU, by their names."""
    mesh = init_device_mesh("cpu", (3, 1), mesh_dim_names=NAMES)
    pipeline = Pipeline(gpt(0, torch.float), mesh, loss_fn=loss_of)
    channels = Channels(pipeline.stage_comm.stages, pipeline.comm.ranks, torch.device("meta"))
    return {way: group.process_group.group_name for way, group in channels.data.items()}


def test_three_stages_on_accelerators_make_the_same_groups():
    """
    Each way has one of its own. Breaks where ranks make other numbers of groups: torch's names of
    them differ then, and the ranks wait for each other.
    Proves `Channels.__init__`, `Channels._group`.
    """
    first, *others = run(groups_of_an_accelerator, 3)
    assert len({*first.values()}) == 4 and others == [first] * 2


def announced_ahead():
    """Rank 1 sends two messages without tensors, and rank 0 asks for the first one alone"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    channels = Pipeline(chain(0, torch.float), mesh, loss_fn=loss_of).channels
    first, second = (Action("receive gradient", 0, i) for i in range(2))
    if dist.get_rank():
        for action in (first, second):
            channels.send(action, 0, [])
            # It returns once rank 0 has asked.
            channels.end()
        return dist.barrier()
    channels.receive(first, 1)
    dist.barrier()
    return channels.receive(second, 1)


def test_the_next_announcement_is_asked_for_before_it_is_needed():
    """
    gloo sends it while the receiving rank computes. Breaks where `receive` asks for it: here rank 1
    would wait for rank 0, which waits for rank 1.
    Proves `Channels.receive`, `Channels._ask_row`.
    """
    assert run(announced_ahead, 2) == [[], None]


def other_micro_batches():
    """Rank 1 sends for another micro-batch than rank 0 expects."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    channels = Pipeline(chain(0, torch.float), mesh, loss_fn=loss_of).channels
    if dist.get_rank():
        channels.send(Action("receive gradient", 0, 1), 0, [])
        return channels.end()
    told = text_of(lambda: channels.receive(Action("receive gradient", 0, 0), 1))
    # What is left of the message, so that rank 1 goes on.
    rest = torch.empty(len(pickle.dumps([])), dtype=torch.uint8)
    channels._wait(*channels._start(dist.irecv, rest, 1, channels.control, True))
    return told


def test_a_message_for_another_action_is_an_error():
    """
    Breaks where it is taken for the one that was expected.
    Proves I6, `Channels.receive`.
    """
    told, _ = run(other_micro_batches, 2)
    assert "receive gradient, stage 0, micro-batch 0: the stages diverged" in told
    assert "those for `receive gradient, stage 0, micro-batch 1`, from rank 1" in told


class Weakly(nn.Module):
    """A head that uses the embedding's weight, and does not register it"""

    def __init__(self, embedding):
        super().__init__()
        self.hidden = [embedding]
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return nn.functional.linear(self.norm(x), self.hidden[0].weight)


class Rows(nn.Embedding):
    """Hands on the first rows of its weight, whatever comes"""

    def forward(self, x):
        return self.weight[None, :LENGTH]


@dataclasses.dataclass
class Wrapped:
    rows: torch.Tensor


def mistakes():
    """Mistakes of a user that would train wrongly or wait forever: what each rank is told."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    rank = dist.get_rank()
    x = torch.arange(2 * LENGTH).view(2, LENGTH) % TOKENS

    def train(layers, x=x, **options):
        options = {"micro_batches": 2, "stages": [1, 1], **options}
        pipeline = Pipeline(layers, mesh, loss_fn=loss_of, **options)
        return pipeline.train_batch(x, x, Zero3Optimizer(pipeline))

    def plain(width=WIDTH):
        return [nn.Embedding(TOKENS, width), nn.Linear(width, TOKENS)]

    embedding = nn.Embedding(TOKENS, WIDTH)
    rows, head = Rows(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
    head.weight = rows.weight
    return [text_of(does) for does in (
        lambda: train(plain(), x=x + rank), lambda: train(plain(), x=Wrapped(x)),
        lambda: train(plain(WIDTH + rank)), lambda: train(plain(), micro_batches=1 + rank),
        lambda: train([*plain(), *[nn.Tanh()] * rank]),
        lambda: train([embedding, Weakly(embedding)]), lambda: train([rows, head]))]


def test_mistakes_that_would_train_wrongly_are_errors_on_all_ranks():
    """
    Other rows on the ranks of a pipeline; a batch that cannot be cut; other layers or arguments; a
    weight that two layers use and one registers; a view of tied weights that is sent, while they
    are freed.
    Proves `Pipeline.cut`, `Pipeline._free_others`, `_checksum`, `same`, `Stage.__init__`,
    `Guarded.lenders`.
    """
    for rank, told in enumerate(run(mistakes, 2)):
        rows, wrapped, shapes, arguments, count, weak, view = told
        assert "values with the checksum" in rows and "the same batch" in rows
        assert "['Wrapped'] in it" in wrapped
        assert "(11, 8), torch.float32) on rank 0, and" in shapes and "(11, 9)" in shapes
        assert "Got: 1 on rank 0, and 2 on rank 1" in arguments
        assert "Got: 2 on rank 0, and 3 on rank 1" in count
        assert ("freed `0.weight`" in weak) and ("then it is tied" in weak or rank == 0)
        assert "layer 0 (Rows) puts out freed memory" in view


class Table(nn.Module):
    """A layer with a buffer that never changes"""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        return self.linear(x) + self.table


def shared(make):
    """Two batches of a pipeline that has the same module in both stages"""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    module = make()
    layers = [nn.Linear(4, 4), module, nn.Linear(4, 4), module, nn.Linear(4, 4)]
    pipeline = Pipeline(layers, mesh, loss_fn=nn.functional.mse_loss, micro_batches=2,
                        stages=[2, 3])
    optimizer = Zero3Optimizer(pipeline, torch.optim.SGD, lr=0.1)
    x = torch.arange(16.0).view(4, 4)
    return [text_of(lambda: pipeline.train_batch(x, x, optimizer)) for _ in range(2)]


def norm():
    return nn.BatchNorm1d(4)


def test_a_module_in_two_stages_may_not_write_to_its_buffers():
    """
    Each rank would have running means of its own. A buffer that stays as it is may be shared.
    Proves I6, `stages.Plan.__init__`, `Pipeline._sums_of_shared`, `Pipeline._refuse_written`.
    """
    for told in run(shared, 2, norm):
        assert "['1.num_batches_tracked', '1.running_mean', '1.running_var']" in told[0] or (
            "['3.num_batches_tracked', '3.running_mean', '3.running_var']" in told[0])
        assert "`copy.deepcopy`" in told[1]
    for first, second in run(shared, 2, Table):
        assert float(first) == float(second) > 0


class Sends(nn.Module):
    """A layer whose output cannot be sent as it is"""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.linear(x)
        return {"conj": lambda: torch.complex(x, x).conj(), "sparse": x.detach().to_sparse,
                "meta": lambda: x.to("meta")}[self.how]()


class Real(nn.Module):
    def forward(self, x):
        return x.real if x.is_complex() else x


def sent(how):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
    layers = [nn.Embedding(TOKENS, WIDTH), Sends(how), Real(), nn.Linear(WIDTH, TOKENS)]
    pipeline = Pipeline(layers, mesh, loss_fn=loss_of, stages=[2, 2])
    x = torch.arange(2 * LENGTH).view(2, LENGTH) % TOKENS
    return text_of(lambda: pipeline.train_batch(x, x, Zero3Optimizer(pipeline)))


def test_what_cannot_be_sent_is_refused_before_it_is_announced():
    """
    A conjugated tensor is sent as it reads. A sparse one, or one on another device, is an error.
    Proves `Channels.send`, `Channels._described`, `to_send`.
    """
    assert [float(told) > 0 for told in run(sent, 2, "conj")] == [True, True]
    for how, what in (("sparse", "torch.sparse_coo on cpu"), ("meta", "on meta")):
        for told in run(sent, 2, how):
            assert what in told


def broken_then_new():
    """A pipeline fails in an evaluation. What a new one says."""
    x = torch.arange(4 * LENGTH).view(4, LENGTH) % TOKENS

    def wrong(output, y):
        raise ValueError("a bad loss")

    def make(loss_fn):
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=NAMES)
        return Pipeline(gpt(0, torch.float), mesh, loss_fn=loss_fn, micro_batches=4)

    # It is gone when this line has ended.
    told = text_of(lambda: make(wrong).eval_batch(x, x))
    pipeline = make(loss_of)
    # Nobody tells the new one a cause, for which it waits twice.
    with mock.patch.object(channels, "_CAUSE_WAIT", timedelta(milliseconds=100)):
        return told, text_of(lambda: pipeline.train_batch(x, x, Zero3Optimizer(pipeline)))


def test_after_a_fault_a_new_pipeline_says_so():
    """
    The first one leaves messages that nobody has received, and is gone. Breaks where the second one
    takes its activations for its own, or where a rank waits for a fault that went with the first.
    Proves I10, `Channels.fail`, `Channels.end`, `Channels.__init__`, `Channels._group`,
    `timeout_of`, `Pipeline._run`.
    """
    for rank, (told, then) in enumerate(run(broken_then_new, 2)):
        assert "a bad loss" in told and (rank or "The first error of all" in told)
        assert "tart again" in then, then

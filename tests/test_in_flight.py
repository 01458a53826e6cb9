"""
# Memory in flight has one owner
"""

import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.ranks import run
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.comm.collectives import Communicator
from zero3.flat import InFlight, in_flight

WEIGHTS = 4 * 3 * 4 * 4  # bytes of a layer of 4 x 4 weights, of which each of three ranks has a row


def layer():
    """48 fp32 weights"""
    return nn.Linear(12, 4, bias=False)


def chain():
    return Zero3Sequential([Zero3Layer(layer()), Zero3Layer(nn.Linear(4, 4))])


def whole():
    return wrap(nn.Sequential(layer(), nn.Linear(4, 4)), nn.Linear)


KINDS = {"chain": chain, "whole": whole}


def first_of(model):
    return next(each for each in model.sharded_layers if each.flats
                and each.flats[0].full.nbytes == WEIGHTS)


def late(kind):
    """Rank 1 has an error, rank 0 goes on, and only then does rank 2 send its row"""
    model = KINDS[kind]()
    first = first_of(model)
    flat = first.flats[0]
    model(torch.ones(2, 12)).sum().backward()
    model.zero_grad()
    told = dist.new_group([0, 2])
    real = Communicator.send

    def send(comm, transfer, *args):
        if transfer.announced:
            # The announcement has been sent already. Now wait until rank 0 has seen the error.
            dist.barrier(told)
            Communicator.send = real
        return real(comm, transfer, *args)

    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError, match="has a fault"):
            first.comm.fail(first, "has a fault", "none", "one", "look after it")
    elif dist.get_rank() == 2:
        Communicator.send = send
        with pytest.raises(RuntimeError, match="diverged"):
            model(torch.ones(2, 12))
    else:
        with pytest.raises(RuntimeError, match="diverged"):
            model(torch.ones(2, 12))
        kept = flat.full.untyped_storage().nbytes(), first.is_fetched
        with pytest.raises(RuntimeError, match="freed `"):
            flat.slots[0].param.sum()
        dist.barrier(told)
        # The messages of a gather: one from rank 1, one from rank 2, and two to them.
        gather = in_flight.user_of(flat.full)
        gather.works[gather.announced + 1].wait()
        return kept, flat.full[32:].tolist()
    with torch.no_grad():
        return flat.shard.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_arrives_after_an_error_finds_its_memory(kind):
    """
    Rank 0 learns of rank 1's error, raises its own, and cleans up. The row of rank 2 arrives
    afterwards, in memory that the gather has kept. Breaks where `InFlight.resize` frees it
    without a question: on a busy machine that corrupts the heap.
    Proves I6, `InFlight.free`, `InFlight.lose`, `Communicator.give_up`,
    `Zero3Layer._cleanup_params`.
    """
    (kept, arrived), _, sent = run(late, 3, kind)
    assert kept == (WEIGHTS, False)
    assert arrived == sent and len(sent) == 16


def start_raises():
    """A connection is gone in the middle of the start of a gather: `isend` raises"""
    model = chain()
    first = first_of(model)
    real = dist.isend
    calls = []

    def isend(tensor, *args, **kwargs):
        calls.append(tensor)
        if tensor.numel() == 24:
            raise RuntimeError("Broken pipe")
        return real(tensor, *args, **kwargs)

    dist.isend = isend
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 12))
    dist.isend = real
    full = first.flats[0].full
    with pytest.raises(RuntimeError) as again:
        model(torch.ones(2, 12))
    return (str(error.value), str(again.value), full.untyped_storage().nbytes(), first.is_fetched,
            in_flight.user_of(full) in in_flight.lost)


def test_a_start_that_raises_says_so_in_words_and_what_has_started_keeps_its_memory():
    """
    gloo has the address of the row that is to be received when the send raises. The error is ours
    and not gloo's, and afterwards nothing new begins.
    Proves I6, `Transfer.starting`, `Transfer._give_up`.
    """
    for rank, (first, second, nbytes, fetched, lost) in enumerate(run(start_raises, 2)):
        assert first == second
        assert first.startswith(
            f"rank {rank}: layer 0 (Linear): the other ranks are lost. Expected: their part of a "
            "gather. Got: Broken pipe. What to do: look for the first error")
        assert (nbytes, fetched, lost) == (WEIGHTS, False, True)


class Wide(nn.Module):
    """Weights of two data types, so a layer of it has two flat parameters"""

    def __init__(self):
        super().__init__()
        self.near, self.far = nn.Linear(4, 4), nn.Linear(4, 4).double()

    def forward(self, x):
        return self.near(x) + self.far(x.double()).float()


def wide():
    torch.manual_seed(0)
    return Zero3Sequential([Zero3Layer(Wide()), Zero3Layer(nn.Linear(4, 4))])


def converted():
    model = wide()
    model.float()
    with pytest.raises(RuntimeError) as error:
        model(torch.ones(2, 4))
    return str(error.value), len(in_flight.users)


def test_an_error_at_the_second_flat_parameter_is_the_one_that_is_raised():
    """
    The first one fits and the second does not. Breaks where the first is on its way by then: the
    cleanup finds it in flight.
    Proves I2, `Communicator._rows_to_fill`, `Communicator.all_gather`.
    """
    for rank, (error, begun) in enumerate(run(converted, 2)):
        assert error.startswith(f"rank {rank}: layer 0 (Wide) cannot gather. Expected: torch.float")
        assert not begun


def without_memory(fails):
    """Memory runs out on one rank, before anything is announced; it tries again"""
    model = wide()
    real = InFlight.resize
    left = [int(dist.get_rank() == fails)]

    def resize(owner, tensor, nbytes):
        if nbytes and tensor.dtype == torch.double and left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("out of memory")
        return real(owner, tensor, nbytes)

    InFlight.resize = resize
    x = torch.ones(2, 4)
    if left[0]:
        with pytest.raises(torch.OutOfMemoryError):
            model(x)
    out = model(x)
    InFlight.resize = real
    out.sum().backward()
    return out.tolist(), [p.grad.tolist() for p in model.get_trainable_chunk()]


def test_a_rank_without_memory_may_try_again():
    """
    The other rank waits for it, and both get the numbers of a run without an error. Breaks where
    the transfer is announced before its memory is there.
    Proves I1, `Communicator.all_gather`.
    """
    assert run(without_memory, 2, 0) == run(without_memory, 2, None)


def alone():
    layer = Zero3Layer(nn.Linear(4, 4))
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError):
            layer.comm.fail(layer, "has a fault", "none", "one", "look after it")
    said = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as error:
            layer(torch.ones(2, 4))
        said.append(str(error.value))
    return said, layer.is_fetched


def test_a_layer_by_itself_says_the_same_error_again():
    """
    A chain cleans up after a wait that raised, and a layer in no chain does so too. Breaks where it
    counts as fetched afterwards: then the next error is about a freed parameter.
    Proves I2, `Zero3Layer.forward`.
    """
    for (first, again), fetched in run(alone, 2):
        assert first == again and not fetched


def interrupted():
    model = chain()
    first = first_of(model)
    first.fetch_params()
    gather = first._gather
    works = gather.works

    class Interrupted:
        def wait(self, timeout):
            raise KeyboardInterrupt

    gather.works = [Interrupted(), *works]
    with pytest.raises(KeyboardInterrupt):
        first._wait_params()
    first.reshard()
    found = first.flats[0].full.untyped_storage().nbytes()
    for work in works:
        work.wait()
    return found, gather in in_flight.lost, first.comm.broken


def test_a_wait_that_is_interrupted_keeps_the_memory():
    """
    Ctrl-C in the middle of a wait: the rows still arrive. Breaks where only errors of gloo's count.
    Proves I6, `Transfer.wait`, `InFlight.lose`.
    """
    assert run(interrupted, 2) == [(WEIGHTS, True, "")] * 2


def after_an_error(folder):
    """An error in forward on rank 1 while everything else is in flight, in each tier"""
    found = []
    for offload in (None, Offload("nvme", folder=folder)):
        model = Zero3Sequential([Zero3Layer(nn.Linear(4, 4), offload=offload) for _ in range(4)])
        optimizer = Zero3Optimizer(model, lr=0.1, offload=offload)
        optimizer.backward(model(torch.ones(2, 4)).sum())
        optimizer.step()
        optimizer.zero_grad()
        comm = model.module_list[0].comm
        if dist.get_rank() == 1:
            model.module_list[2].module.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            model(torch.ones(2, 4))
            comm.fail(model.module_list[0], "has a fault", "none", "one", "look after it")
        with pytest.raises(RuntimeError):
            comm.fail(model.module_list[0], "has a fault", "none", "one", "look after it")
        held = {each.label: each.flats[0].full.untyped_storage().nbytes()
                for each in model.module_list}
        begun = len(in_flight.users)
        with pytest.raises(RuntimeError, match=r"[Ss]tart again|look after it"):
            model(torch.ones(2, 4))
        found.append((sum(map(bool, held.values())), len(in_flight.users) - begun))
    return found


def test_after_an_error_nothing_new_begins_and_only_what_is_in_flight_is_kept(tmp_path):
    """
    Of four layers at most two are whole: the one that computes and the one that is prefetched.
    Proves I2, I6, `Communicator.begin`, `Communicator.give_up`.
    """
    for rank in run(after_an_error, 2, str(tmp_path)):
        for whole_layers, begun in rank:
            assert whole_layers <= 2 and not begun


class Thing:
    pass


def test_memory_in_flight_is_freed_by_nobody():
    """
    Before its wait it is an assertion, after an error it is kept, afterwards it is freed. Other
    memory is not concerned, and what is gone has given its memory back.
    Proves `InFlight`, `InFlight.begin`, `InFlight.end`, `InFlight.resize`, `InFlight.user_of`.
    """
    owner = InFlight()
    mine, other = torch.ones(4), torch.ones(4)
    user, nobody = Thing(), Thing()
    owner.lose(nobody)
    owner.begin(user, mine[1:2])
    owner.begin(user, torch.ones(1))
    owner.free(other)
    assert other.untyped_storage().nbytes() == 0
    owner.resize(mine, 16)
    for nbytes in (0, 32):
        with pytest.raises(AssertionError, match="in flight"):
            owner.resize(mine, nbytes)
    owner.lose(user)
    owner.lose(user)
    owner.free(mine)
    assert mine.untyped_storage().nbytes() == 16 and owner.lost == [user]
    owner.end(nobody)
    owner.end(user)
    owner.free(mine)
    assert mine.untyped_storage().nbytes() == 0
    again = torch.ones(4)
    owner.begin(nobody, again)
    del nobody
    gc.collect()
    owner.free(again)
    assert again.untyped_storage().nbytes() == 0


def frees_too_early():
    """Nobody sends this message, so nothing is written to the memory that is freed."""
    memory = torch.ones(4)
    work = dist.irecv(memory, 1 - dist.get_rank(), tag=9)
    memory.untyped_storage().resize_(0)
    return work is not None


def test_the_ranks_of_the_tests_notice_a_free_that_asks_nobody():
    """
    The second look knows nothing of the owner. Breaks where `tests.in_flight.watch` is not called.
    """
    found = r"16 bytes in flight were resized to 0(.|\n)*frees_too_early(.|\n)*irecv used them"
    with pytest.raises(AssertionError, match=found):
        run(frees_too_early, 2)

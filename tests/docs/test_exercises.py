"""
# The exercises' checkers: they take the solution, and say what is wrong with everything else
"""

import ctypes
import inspect
import math
import re
import sys

import pytest
import torch
import torch.distributed as dist

import tests.ranks  # noqa: F401  (has torch imported once, for all ranks)
from docs.exercises import check as checker
from docs.exercises.check import CLAIMS
from docs.exercises.solutions import EXERCISES, ROOT, page

# ------------------------------------------------------------------ typical wrong answers, by class


class PadsWithWhatTheMemoryHeld:
    def _merge_and_pad_params(self, params):
        numel = sum(p.numel() for p in params)
        padding = self._empty(-numel % self.comm.world_size, params[0].dtype)
        return torch.cat([*(p.detach().reshape(-1) for p in params), padding])


class PadsByTheRemainder:
    def _merge_and_pad_params(self, params):
        numel = sum(p.numel() for p in params)
        padding = self._empty(numel % self.comm.world_size, params[0].dtype).zero_()
        return torch.cat([*(p.detach().reshape(-1) for p in params), padding])


class PadsWhereNothingIsMissing:
    def _merge_and_pad_params(self, params):
        n = self.comm.world_size
        padding = self._empty(n - sum(p.numel() for p in params) % n, params[0].dtype).zero_()
        return torch.cat([*(p.detach().reshape(-1) for p in params), padding])


class LosesTheDataType:
    def _merge_and_pad_params(self, params):
        numel = sum(p.numel() for p in params)
        padding = torch.zeros(-numel % self.comm.world_size)
        return torch.cat([*(p.detach().float().reshape(-1) for p in params), padding])


class ViewsWhatIsTransposed:
    def _merge_and_pad_params(self, params):
        return torch.cat([p.detach().view(-1) for p in params])


class RowsByDistance:
    def all_gather(full, shard, rank, world_size):
        rows = full.view(world_size, -1)
        rows[0].copy_(shard)
        exchange([rows[k] for k in range(1, world_size)], [shard] * world_size, rank, world_size)


class ForgetsItsOwnShard:
    def all_gather(full, shard, rank, world_size):
        rows = full.view(world_size, -1)
        receive_buffer = [rows[(rank + k) % world_size] for k in range(1, world_size)]
        exchange(receive_buffer, [shard] * world_size, rank, world_size)


class DoesNotWait:
    def all_gather(full, shard, rank, world_size):
        rows = full.view(world_size, -1)
        rows[rank].copy_(shard)
        for k in {*range(world_size)} - {rank}:
            dist.irecv(rows[k], k)
            dist.isend(shard, k)


class Sums:
    def reduce_scatter(grad, rank, world_size):
        rows = grad.view(world_size, -1)
        receive_buffer = [torch.empty_like(rows[0]) for _ in range(1, world_size)]
        exchange(receive_buffer, rows, rank, world_size)
        return rows[rank] + sum(receive_buffer)


class SendsEverything:
    def reduce_scatter(grad, rank, world_size):
        receive_buffer = [torch.empty_like(grad) for _ in range(1, world_size)]
        exchange(receive_buffer, [grad] * world_size, rank, world_size)
        return ((grad + sum(receive_buffer)) / world_size).view(world_size, -1)[rank]


class DividesTooLate:
    def reduce_scatter(grad, rank, world_size):
        return Sums.reduce_scatter(grad, rank, world_size) / world_size


class ReducesByACollective:
    def reduce_scatter(grad, rank, world_size):
        dist.all_reduce(grad)
        return grad.view(world_size, -1)[rank] / world_size


def exchange(receive_buffer, outbox, rank, world_size):
    works = []
    for k in range(1, world_size):
        peer = (rank + k) % world_size
        works += [dist.irecv(receive_buffer[k - 1], peer), dist.isend(outbox[peer], peer)]
    for work in works:
        work.wait()


def gather_into(self, fulls):
    shards = [flat.storage.load() for flat in self.flats]
    return self.comm.all_gather(self, list(zip(fulls, shards, strict=True)))


class FreshMemory:
    def fetch_params(self):
        if not (self.is_fetched or self.is_full_elsewhere) and self.flats:
            self.is_fetched = True
            for g in self.flats:
                g.full = torch.empty_like(g.full)
            self._gather = gather_into(self, [g.full for g in self.flats])


class GathersAndCopies:
    def fetch_params(self):
        if not (self.is_fetched or self.is_full_elsewhere) and self.flats:
            self.is_fetched = True
            fresh = [torch.empty_like(g.full) for g in self.flats]
            gather_into(self, fresh).wait()
            for g, full in zip(self.flats, fresh, strict=True):
                g.full.untyped_storage().resize_(full.nbytes)
                g.full.copy_(full)


class WaitsAtOnce:
    def fetch_params(self):
        if not (self.is_fetched or self.is_full_elsewhere) and self.flats:
            self._settle_at_end_of_backward()
            self.reducer.finish(self)
            self.is_fetched = True
            gather_into(self, [g.full for g in self.flats]).wait()


class GathersTwice:
    def fetch_params(self):
        if not self.is_full_elsewhere and self.flats:
            self._settle_at_end_of_backward()
            self.reducer.finish(self)
            self.is_fetched = True
            self._gather = gather_into(self, [g.full for g in self.flats])


class GathersInsideOfFullParams:
    def fetch_params(self):
        if not self.is_fetched and self.flats:
            self.is_fetched = True
            self._gather = gather_into(self, [g.full for g in self.flats])


class GathersWithoutParameters:
    def fetch_params(self):
        if not (self.is_fetched or self.is_full_elsewhere):
            self.is_fetched = True
            self._gather = gather_into(self, [g.full for g in self.flats])


class WritesOverGradients:
    def fetch_params(self):
        if not (self.is_fetched or self.is_full_elsewhere) and self.flats:
            self._settle_at_end_of_backward()
            self.is_fetched = True
            self._gather = gather_into(self, [g.full for g in self.flats])


class LeavesWhatNobodyUsed:
    def fetch_params(self):
        if not (self.is_fetched or self.is_full_elsewhere) and self.flats:
            self.reducer.finish(self)
            self.is_fetched = True
            self._gather = gather_into(self, [g.full for g in self.flats])


class LetsGoOfTheTensor:
    def _cleanup_params(self):
        self.kept_for, fetched, self.is_fetched = None, self.is_fetched, False
        if fetched:
            self._wait_params()
            for slot in self.slots():
                slot.param.__class__ = slot.freed_class
            for g in self.flats:
                g.full = g.full.new_empty(0)


class LeavesPlainParameters:
    def _cleanup_params(self):
        self.kept_for, fetched, self.is_fetched = None, self.is_fetched, False
        if fetched:
            self._wait_params()
            for g in self.flats:
                g.full.untyped_storage().resize_(0)


def free(self):
    for slot in self.slots():
        slot.param.__class__ = slot.freed_class
    for g in self.flats:
        g.full.untyped_storage().resize_(0)
    self.listener.record(self, "free", sum(g.full.nbytes for g in self.flats))


class FreesUnderMessages:
    def _cleanup_params(self):
        self.kept_for, fetched, self.is_fetched = None, self.is_fetched, False
        if fetched:
            free(self)
            self._wait_params()


class StaysFetched:
    def _cleanup_params(self):
        self.kept_for = None
        if self.is_fetched:
            self._wait_params()
            free(self)


class KeepsTheLast:
    def _cleanup_params(self):
        if self.is_fetched:
            self._wait_params()
            self.kept_for, self.is_fetched = None, False
            free(self)


class FreesTwice:
    def _cleanup_params(self):
        self._wait_params()
        self.kept_for, self.is_fetched = None, False
        free(self)


def send(self, pairs):
    if self.reducer.make_way(self, pairs):
        self.reducer.started([self], self.comm.reduce_scatter([self], pairs))


def reduce(self):
    self.watch.arrived.clear()
    for g in self.flats:
        for slot in g.slots if g.grad is not None else ():
            if slot.names not in g.ready:
                slot.of(g.grad).zero_()
    if any(g.grad is not None for g in self.flats):
        pairs = [(g.grad, g.receive_buffer) for g in self.flats if g.grad is not None]
        send(self, pairs)


class StaysWhole:
    def _backup_grads(self):
        reduce(self)
        if self.layer_idx < 0:
            self.reducer.finish(self)


class LeavesTheReduceOfALoneLayer:
    def _backup_grads(self):
        self._release()
        reduce(self)


class SendsWhatTheMemoryHeld:
    def _backup_grads(self):
        self._release()
        self.watch.arrived.clear()
        if pairs := [(g.grad, g.receive_buffer) for g in self.flats if g.grad is not None]:
            send(self, pairs)


class SendsOneGroup:
    def _backup_grads(self):
        self._release()
        self.watch.arrived.clear()
        for g in self.flats:
            if g.grad is not None:
                for slot in g.slots:
                    if slot.names not in g.ready:
                        slot.of(g.grad).zero_()
                send(self, [(g.grad, g.receive_buffer)])


def take(self, totals, put):
    groups = [g for g in self.flats if g.grad is not None]
    for g, total in zip(groups, totals, strict=True):
        put(g, total)
    self.drop_full_grads()
    for g in groups:
        g.receive_buffer.untyped_storage().resize_(0)


class Assigns:
    @torch.no_grad()
    def add_reduced(self, totals):
        take(self, totals, lambda g, total: setattr(g.shard, "grad", total))


class DividesAgain:
    @torch.no_grad()
    def add_reduced(self, totals):
        take(self, totals, lambda g, total: g.add_grad(total / self.comm.world_size))


class KeepsFullGradients:
    @torch.no_grad()
    def add_reduced(self, totals):
        for g, total in zip([g for g in self.flats if g.grad is not None], totals, strict=True):
            g.add_grad(total)
            g.receive_buffer.untyped_storage().resize_(0)


class KeepsTheInbox:
    @torch.no_grad()
    def add_reduced(self, totals):
        for g, total in zip([g for g in self.flats if g.grad is not None], totals, strict=True):
            g.add_grad(total)
        self.drop_full_grads()


def tidy(self):
    for layer in self.module_list:
        if not layer.kept_for:
            layer._cleanup_params()


class OnDemand:
    def walk(self):
        try:
            for layer in self.module_list:
                layer.fetch_params()
                yield layer
        finally:
            tidy(self)


class TheNextAfterwards:
    def walk(self):
        try:
            for layer in self.module_list:
                layer.fetch_params()
                yield layer
                for ahead in layer.next_layer:
                    ahead.fetch_params()
        finally:
            tidy(self)


class TheNextByIndex:
    def walk(self):
        layers = self.module_list
        try:
            for i, layer in enumerate(layers):
                for ahead in layers[i : i + 2]:
                    ahead.fetch_params()
                yield layer
        finally:
            tidy(self)


class AllAtOnce:
    def walk(self):
        for layer in self.module_list:
            layer.fetch_params()
        yield from self.module_list


class LeavesWhatItFetched:
    def walk(self):
        for layer in self.module_list:
            for ahead in (layer, *layer.next_layer):
                ahead.fetch_params()
            yield layer


class FreesTheLast:
    def walk(self):
        try:
            yield from LeavesWhatItFetched.walk(self)
        finally:
            for layer in self.module_list:
                layer._cleanup_params()


class FreesItsPairInBackward:
    def walk(self):
        try:
            for layer in self.module_list:
                pair = [layer, *layer.next_layer]
                for each in pair:
                    each.fetch_params()
                yield layer
        finally:
            for each in pair:
                if each.kept_for is None:
                    each._cleanup_params()


class FreesWhatBackwardNeeds:
    def walk(self):
        try:
            yield from LeavesWhatItFetched.walk(self)
        finally:
            tidy(self)


def saved_flat(read, saved, layer):
    numel = saved.shard_numels()[layer]
    return torch.cat([read(layer, r, 0, numel) for r in range(saved.world_size)])


class TakesPaddingOver:
    def reshard(read, saved, wanted, rank, dtype):
        shards = []
        for layer, numel in enumerate(wanted.shard_numels()):
            flat = saved_flat(read, saved, layer)
            flat = torch.cat([flat, flat.new_zeros(max(0, wanted.world_size * numel - len(flat)))])
            shards.append(flat[rank * numel : (rank + 1) * numel])
        return shards


class PadsInTheMiddle:
    def reshard(read, saved, wanted, rank, dtype):
        numels = [sum(p.numel for p in saved.places.values() if p.layer == i)
                  for i in range(len(saved.shard_numels()))]
        flats = [saved_flat(read, saved, i) for i in range(len(numels))]
        if len(wanted.shard_numels()) == len(flats):
            flats = [flat[:numel] for flat, numel in zip(flats, numels, strict=True)]
        else:
            flats = [torch.cat(flats)]
        shards = []
        for flat, numel in zip(flats, wanted.shard_numels(), strict=True):
            flat = torch.cat([flat, flat.new_zeros(max(0, wanted.world_size * numel - len(flat)))])
            shards.append(flat[rank * numel : (rank + 1) * numel])
        return shards


class RoundRobin:
    def reshard(read, saved, wanted, rank, dtype):
        return [saved_flat(read, saved, layer)[rank :: wanted.world_size]
                for layer in range(len(wanted.shard_numels()))]


class NewPaddingIsNotZero:
    def reshard(read, saved, wanted, rank, dtype):
        shards = EXERCISES[7].solutions[0](read, saved, wanted, rank, dtype)
        return [torch.where(shard == 0, math.nan, shard) for shard in shards]


class ReadsEverything:
    def reshard(read, saved, wanted, rank, dtype):
        shards = [torch.zeros(n * wanted.world_size, dtype=dtype) for n in wanted.shard_numels()]
        for name, there in wanted.places.items():
            old = saved.places[name]
            flat = saved_flat(read, saved, old.layer)
            part = flat[old.offset : old.offset + old.numel]
            shards[there.layer][there.offset : there.offset + there.numel] = part
        return [shard.chunk(wanted.world_size)[rank] for shard in shards]


def in_turn(ahead, count):
    """Some forwards, then a forward and a backward by turns, then the last backwards."""
    passes = [("forward", i) for i in range(ahead)]
    for i in range(count - ahead):
        passes += [("forward", ahead + i), ("backward", i)]
    return passes + [("backward", i) for i in range(max(0, count - ahead), count)]


class AllForwardsFirst:
    def one_forward_one_backward(rank, size, count):
        return in_turn(count, count)


class NothingAhead:
    def one_forward_one_backward(rank, size, count):
        return in_turn(0, count)


class OneTooFewAhead:
    def one_forward_one_backward(rank, size, count):
        return in_turn(min(max(0, size - 2 - rank), count), count)


class OneTooManyAhead:
    def one_forward_one_backward(rank, size, count):
        return in_turn(min(size - rank, count), count)


class AsFarAheadOnEachRank:
    def one_forward_one_backward(rank, size, count):
        return in_turn(min(size - 1, count), count)


class AheadBeyondTheEnd:
    def one_forward_one_backward(rank, size, count):
        return in_turn(size - 1 - rank, count)


class ForgetsTheLastBackwards:
    def one_forward_one_backward(rank, size, count):
        ahead = min(size - 1 - rank, count)
        return in_turn(ahead, count)[: 2 * count - ahead]


class BackwardComesFirst:
    def one_forward_one_backward(rank, size, count):
        ahead = min(size - 1 - rank, count)
        passes = in_turn(ahead, count)
        for k in range(ahead, 2 * count - ahead, 2):
            passes[k : k + 2] = passes[k : k + 2][::-1]
        return passes


class NewestGoesBackFirst:
    def one_forward_one_backward(rank, size, count):
        passes = [("forward", i) for i in range(count)]
        if rank % 2:
            return passes + [("backward", i) for i in reversed(range(count))]
        return passes + [("backward", i) for i in range(count)]


def kth_digits(numbers, k, bits, total, shifts=None, smaller=True, drops=True):
    """The solution, with something left out"""
    found = 0
    for shift in shifts or [*reversed(range(0, bits, 8))]:
        digits = (numbers >> shift) & 255
        counts = total(digits.bincount(minlength=256))
        upto = counts.cumsum(0)
        digit = min(int((upto < k).sum()), 255)
        k -= int(upto[digit] - counts[digit]) if smaller else 0
        found |= digit << shift
        numbers = numbers[digits == digit] if drops else numbers
    return found


class SortsItsOwn:
    def kth_smallest(numbers, k, bits, total):
        return sorted(numbers.tolist())[min(k, len(numbers)) - 1]


class CountsEachValue:
    def kth_smallest(numbers, k, bits, total):
        return int((total(numbers.bincount(minlength=2**bits)).cumsum(0) < k).sum())


class KeepsK:
    def kth_smallest(numbers, k, bits, total):
        return kth_digits(numbers, k, bits, total, smaller=False)


class CountsThoseWithAnotherDigit:
    def kth_smallest(numbers, k, bits, total):
        return kth_digits(numbers, k, bits, total, drops=False)


class LowestDigitFirst:
    def kth_smallest(numbers, k, bits, total):
        return kth_digits(numbers, k, bits, total, shifts=[*range(0, bits, 8)])


class CountsEqualOnesOnce:
    def kth_smallest(numbers, k, bits, total):
        return kth_digits(numbers.unique(), k, bits, total)


class ForgetsHighDigits:
    def kth_smallest(numbers, k, bits, total):
        return kth_digits(numbers, k, min(bits, 32), total)


class NothingToCount:
    def kth_smallest(numbers, k, bits, total):
        return kth_digits(numbers, k, bits, total) if len(numbers) else 0


def largest_first(costs, ranks, key=lambda cost: -cost, first=0):
    """The solution, in another order, or beginning with another rank"""
    owners, loads = [0] * len(costs), [0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: key(costs[i])):
        owners[i] = min(range(ranks), key=lambda rank: (loads[rank], (rank - first) % ranks))
        loads[owners[i]] += costs[i]
    return owners


class InTurn:
    def assign(costs, ranks):
        return [i % ranks for i in range(len(costs))]


class InTheOrderOfTheModel:
    def assign(costs, ranks):
        return largest_first(costs, ranks, key=lambda cost: 0)


class ShortestFirst:
    def assign(costs, ranks):
        return largest_first(costs, ranks, key=lambda cost: cost)


class EachBeginsWithItself:
    def assign(costs, ranks):
        return largest_first(costs, ranks, first=dist.get_rank())


class SortedCosts:
    def assign(costs, ranks):
        return largest_first(sorted(costs, reverse=True), ranks)


class CountsMatrices:
    def assign(costs, ranks):
        order = sorted(range(len(costs)), key=lambda i: -costs[i])
        owners = [0] * len(costs)
        for turn, i in enumerate(order):
            owners[i] = turn % ranks
        return owners


class WithoutMatricesOfNoCost:
    def assign(costs, ranks):
        return largest_first([cost for cost in costs if cost], ranks)


WRONG = {
    1: {PadsWithWhatTheMemoryHeld: "I5", PadsByTheRemainder: "I2", PadsWhereNothingIsMissing: "I2",
        LosesTheDataType: "I1", ViewsWhatIsTransposed: "I1"},
    2: {RowsByDistance: "I1", ForgetsItsOwnShard: "I1", DoesNotWait: "I1", Sums: "I1",
        SendsEverything: "I4", DividesTooLate: "I1", ReducesByACollective: "I1"},
    3: {FreshMemory: "I3", GathersAndCopies: "I3", WaitsAtOnce: "time", GathersTwice: "I4",
        GathersInsideOfFullParams: "I4", GathersWithoutParameters: "I4",
        WritesOverGradients: "I1", LeavesWhatNobodyUsed: "I2"},
    4: {LetsGoOfTheTensor: "I2", LeavesPlainParameters: "I2", FreesUnderMessages: "I1",
        StaysFetched: "I1", KeepsTheLast: "I1", FreesTwice: "I3"},
    5: {StaysWhole: "I2", KeepsFullGradients: "I2", KeepsTheInbox: "I2", Assigns: "I7",
        DividesAgain: "I1", SendsWhatTheMemoryHeld: "I1", SendsOneGroup: "I1",
        LeavesTheReduceOfALoneLayer: "I3"},
    6: {OnDemand: "I3", TheNextAfterwards: "I3", TheNextByIndex: "I3", AllAtOnce: "I3",
        LeavesWhatItFetched: "I2", FreesTheLast: "I4", FreesWhatBackwardNeeds: "I4",
        FreesItsPairInBackward: "I4"},
    7: {TakesPaddingOver: "I5", PadsInTheMiddle: "I5", RoundRobin: "I1", NewPaddingIsNotZero: "I5",
        ReadsEverything: "I2"},
    8: {AllForwardsFirst: "kept", NothingAhead: "idle", OneTooFewAhead: "idle",
        OneTooManyAhead: "kept", AsFarAheadOnEachRank: "idle", AheadBeyondTheEnd: "I1",
        ForgetsTheLastBackwards: "I1", BackwardComesFirst: "I6", NewestGoesBackFirst: "idle"},
    9: {SortsItsOwn: "I1", CountsEachValue: "sent", KeepsK: "I1", CountsThoseWithAnotherDigit: "I1",
        LowestDigitFirst: "I1", CountsEqualOnesOnce: "I1", ForgetsHighDigits: "I1",
        NothingToCount: "I6"},
    10: {InTurn: "time", InTheOrderOfTheModel: "time", ShortestFirst: "time", SortedCosts: "time",
         EachBeginsWithItself: "I6", CountsMatrices: "time", WithoutMatricesOfNoCost: "I6"},
}


def untouched(number):
    """A reader may have filled the stub in: then there is none to test."""
    return "raise NotImplementedError" in EXERCISES[number].file.read_text()


@pytest.mark.parametrize("number", EXERCISES)
def test_a_checker_takes_the_solution_and_names_what_wrong_answers_break(number):
    """
    The real function passes on 1, 2 and 3 ranks. The stub says of which exercise it is, what to do,
    and which invariants are looked after. Each wrong answer fails a claim of the invariant that it
    breaks. Fails where a claim does not notice what it is there for.
    """
    names = [f"{__name__}:{wrong.__name__}" for wrong in WRONG[number]]
    stub = ["answer"] * untouched(number)
    solution, *rest = checker.check(number, ["solution", *names, *stub])
    assert [v.status for v in solution] == ["ok"] * len(CLAIMS[number]), solution[-1]
    assert "All" in checker.report(number, "solution", solution)
    for (wrong, invariant), verdicts in zip(WRONG[number].items(), rest, strict=False):
        said = checker.report(number, "answer", verdicts)
        assert f"FAILS  {invariant} " in said and "Got: " in said, (wrong.__name__, said)
    for verdicts in rest[len(names):]:
        said = checker.report(number, "answer", verdicts)
        assert f"Exercise {number}:" in said and f"What to do: exercise {number}: " in said
        assert all(f" {claim.invariant:4} {claim.text}" in said for claim in CLAIMS[number])


class RaisesOnOneRank:
    def all_gather(full, shard, rank, world_size):
        if rank == 1:
            raise KeyError("mine")
        exchange([*full.view(world_size, -1)], [shard] * world_size, rank, world_size)


class WaitsForEver:
    def all_gather(full, shard, rank, world_size):
        dist.recv(full.view(world_size, -1)[1 - rank], 1 - rank)
        dist.send(shard, 1 - rank)


class Crashes:
    def all_gather(full, shard, rank, world_size):
        ctypes.string_at(0)


@pytest.mark.parametrize(("wrong", "invariant", "words"), [
    (RaisesOnOneRank, "I1", ["KeyError: 'mine'", "rank 1 of 2"]),
    (WaitsForEver, "I6", ["it waits forever", "of 2", "test_exercises.py, line"]),
    (Crashes, "I6", ["Segmentation fault", "of 2", "test_exercises.py, line"]),
])
def test_an_answer_that_raises_waits_or_crashes_is_told_where(wrong, invariant, words):
    """
    The checker itself neither hangs nor shows an error of another rank than the one that began.
    """
    (verdicts,) = checker.check(2, [f"{__name__}:{wrong.__name__}"], (2,), timeout_s=4)
    said = " ".join(checker.report(2, "answer", verdicts).split())
    assert f"FAILS {invariant} " in said and all(word in said for word in words), said


def test_the_command_says_how_it_went(monkeypatch, capsys):
    """
    Its exit status, its list of exercises, and the solution that it shows.
    """
    monkeypatch.setattr(sys, "argv", ["check"])
    checker.main()
    listed = capsys.readouterr().out
    for number, exercise in EXERCISES.items():
        assert f"Exercise {number}: " in listed
        assert str(exercise.file.relative_to(ROOT)) in listed
    monkeypatch.setattr(sys, "argv", ["check", "7", "--solution"])
    with pytest.raises(SystemExit) as ended:
        checker.main()
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "def reshard(" in shown and "All" in shown


@pytest.mark.parametrize("number", EXERCISES)
def test_a_page_has_the_task_the_stub_and_the_solution(number):
    """
    What the site shows of an exercise. The functions have the same arguments as in the source.
    """
    shown, exercise = page(number), EXERCISES[number]
    assert shown.title.startswith(f"Exercise {number}: ")
    assert all(f"**{word}" in shown.task for word in ("Given", "Keeps", "Hint"))
    for solution in exercise.solutions:
        name = solution.__name__
        mine = getattr(exercise.module(), name)
        assert [*inspect.signature(mine).parameters] == [*inspect.signature(solution).parameters]
        assert f"def {name}(" in shown.solution and f"def {name}(" in shown.stub
    for where in shown.source:
        name, file, line = re.fullmatch(r"`(.*)` \((.*):(\d+)\)", where).groups()
        lines = (ROOT / file).read_text().splitlines()[int(line) - 1 :]
        assert any(f"def {name}(" in line for line in lines[:2])
    assert not untouched(number) or "raise NotImplementedError" in shown.stub
    invariants = {claim.invariant for claim in CLAIMS[number]}
    assert invariants <= checker.meanings().keys()

"""
# Distillation: a student and a teacher, both sharded

The oracle is plain PyTorch on the global batch, with the formula written out.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.compression.test_compression import rows, seen, sharded
from tests.ranks import run
from zero3 import Zero3Optimizer
from zero3.compression import Prune, compress, distill
from zero3.compression.distill import outputs
from zero3.compression.weights import Pruned
from zero3.estimate.ledger import Ledger

CLASSES = 7


def block():
    return nn.Sequential(nn.Linear(5, 5), nn.Tanh())


def chain(depth):
    return [nn.Embedding(CLASSES, 5), *(block() for _ in range(depth)), nn.Linear(5, CLASSES)]


def models():
    torch.manual_seed(3)
    return chain(2), chain(4)


def tokens(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(CLASSES, (2, 6, 4), generator=generator)


KEEP = [0, 2, 4, 5]


def learn(steps):
    """Train a student on these ranks"""
    mine, theirs = models()
    student, teacher = sharded(mine), sharded(theirs)
    teaching = distill(student, teacher, KEEP, logits=0.7, hidden=0.3, temperature=3.0)
    optimizer = Zero3Optimizer(student, torch.optim.SGD, lr=0.1)
    first = seen(student)
    losses = []
    with Ledger(teacher) as tape:
        for i in range(steps):
            x, y = (rows(each) for each in tokens(i))
            loss = teaching(x, lambda out, y=y: F.cross_entropy(out.flatten(0, 1), y.flatten()))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    gathers = sum(event.event == "fetch" for event in tape.events)
    assert all(p.grad is None and not p.requires_grad for p in teacher.parameters())
    return first, losses, seen(student), gathers, not teacher.training


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_student_learns_what_plain_pytorch_would_learn(ranks):
    """
    From the same layers, by the formula; the teacher is gathered once a step, and has no gradient.
    Breaks if a layer starts from a wrong one, or if the squared temperature is missing.
    Proves `distill`, `distill.outputs`.
    """
    mine, theirs = models()
    for layer, index in zip(mine, KEEP, strict=True):
        layer.load_state_dict(theirs[index].state_dict())
    student, teacher = nn.Sequential(*mine), nn.Sequential(*theirs)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
    expected = []
    for i in range(4):
        x, y = tokens(i)
        with torch.no_grad():
            taught = [*outputs(teacher, x)]
        hidden = [*outputs(student, x)]
        kl = (taught[-1] / 3).softmax(-1) * ((taught[-1] / 3).log_softmax(-1)
                                             - (hidden[-1] / 3).log_softmax(-1))
        apart = [(hidden[j] - taught[KEEP[j]]).square().mean() for j in range(3)]
        task = F.cross_entropy(hidden[-1].flatten(0, 1), y.flatten())
        loss = 0.3 * task + 0.7 * 9 * kl.sum(-1).mean() + 0.3 * sum(apart) / 3
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    found = run(learn, ranks, 4)
    for first, _, last, gathers, is_eval in found:
        assert torch.equal(first["1.0.weight"], theirs[2][0].weight)
        assert gathers == 4 * 6 and is_eval
        for name, weight in last.items():
            # Gradients are means over ranks, in another order.
            assert torch.allclose(weight, student.get_parameter(name), atol=1e-5)
    # The mean over ranks, of equal batches.
    means = torch.tensor([losses for _, losses, _, _, _ in found]).mean(0)
    assert torch.allclose(means, torch.tensor(expected), atol=1e-5)


def compressed():
    mine, theirs = models()
    compression = compress(mine, {"[12].0": [Prune(0.4)]})
    student, teacher = sharded(mine), sharded(theirs)
    distill(student, teacher, KEEP)
    other = chain(2)
    for layer, index in zip(other, KEEP, strict=True):
        layer.load_state_dict(theirs_again()[index].state_dict())
    expected = compress(other, {"[12].0": [Prune(0.4)]})
    return [[int(m.state[1]) for m in each.methods(Pruned)] for each in (compression, expected)]


def theirs_again():
    return models()[1]


def test_a_compressed_student_takes_over_plain_weights():
    """
    And finds its thresholds anew. Breaks if it prunes by the weights that it was built with.
    Proves `distill`.
    """
    for mine, expected in run(compressed, 2):
        assert mine == expected


def test_a_student_that_does_not_fit_is_refused():
    """
    Each with what to do. Breaks if a layer starts from one of another shape.
    Proves `distill`.
    """
    mine, theirs = (nn.Sequential(*each) for each in models())
    for arguments, options, word in (
            ((mine, theirs, [0, 1, 5]), {}, "keep"), ((mine, theirs, [0, 1, 2, 6]), {}, "keep"),
            ((mine, theirs, [0, 0, 2, 5]), {}, "same parameters"),
            ((mine, theirs, KEEP), {"logits": 1.5}, "logits"),
            ((mine, nn.Linear(2, 2), KEEP), {}, "chains")):
        with pytest.raises((ValueError, TypeError), match=f"{word}.*What to do"):
            distill(*arguments, **options)

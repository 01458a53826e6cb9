"""
# Loops of other libraries, as a user starts them

The programs of the page on loops, run on ranks that live on from program to program and that are
told what torchrun would tell them.
"""

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from pydoc_data import topics
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from tests.ranks import run

PAGE = Path(__file__).parents[2].joinpath("docs/loop.md").read_text(encoding="utf-8")
ACCELERATE, TRAINER, SFT, FABRIC, DCP, WATCH = re.findall(
    r"```python\n(.*?)```", PAGE, re.DOTALL)


def replaced(text, *pairs):
    """A program with some of its words replaced, each of which it has once"""
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


# With the default, 1e-8, Adam makes a step of full length from the last bits of a gradient that is
# nearly zero. And ranks train on different numbers of tokens: a mean of means would be another
# loss. Not in evaluations, where the `Trainer` itself takes means over other rows on other ranks.
TOKENS = "(torch.arange(32) < 2 + page % 30) | (page > 47)"
EXACT = (("max_grad_norm=0.5", "max_grad_norm=0.5, adam_epsilon=1e-3"),
         ('"labels": row', f'"labels": torch.where({TOKENS}, row, -100)'))
# The same program with the `Trainer` of transformers, and all rows of a batch on one rank.
STOCK = (("from zero3.beside.trainer import Trainer", "from transformers import Trainer"),
         (",\n                  shard=lambda model: wrap(model.to(args.device), "
          "LlamaDecoderLayer))", ")"),
         ("per_device_train_batch_size=2", "per_device_train_batch_size=4"),
         ("trainer.accelerator.end_training()", ""))
ALONE = STOCK[2]
SMOOTH = ("weight_decay=0.1", "weight_decay=0.1, label_smoothing_factor=0.1")
BF16 = ("torch.float32  # or torch.bfloat16", "torch.bfloat16  #")
# From the meta device, with weights that the program does not change.
META = (("model = LlamaForCausalLM(config).to(DTYPE)\n",
         "with torch.device('meta'):\n    model = LlamaForCausalLM(config)\n"),
        ("wrap(model.to(args.device), LlamaDecoderLayer)",
         "wrap(model, LlamaDecoderLayer, device=args.device, checkpoint='stock-final')"),
        ("learning_rate=1e-2", "learning_rate=0.0"), ("max_steps=20", "max_steps=5"))


def plain_pytorch(decay=0.5):
    """The weights after 20 steps of plain PyTorch, and how many bytes are right"""
    text = torch.tensor(list("".join(topics.topics.values()).encode()))
    x, y = text[:1280].view(-1, 8), text[8:1288:8]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 8), nn.Flatten(),
                          *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)),
                          nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, decay)
    for step in range(20):
        for at in (0, 8):
            rows = slice(step % 10 * 16 + at, step % 10 * 16 + at + 8)
            (nn.functional.cross_entropy(model(x[rows]), y[rows]) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return dict(model.named_parameters()), int((model(x).argmax(-1) == y).sum())


def saved(folder):
    """All weights in a folder"""
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    assert found
    return found


def off(folder, one, other):
    """The largest difference between the weights in two folders"""
    one, other = (saved(folder / each) for each in (one, other))
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


class Torchrun:
    """
    ## A rank that runs one program after the other
    """

    def __init__(self, ports, folder):
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.ports, self.folder = [*ports], Path(folder)
        # Each program joins a process group of its own, once all ranks are in this one.
        dist.barrier()
        dist.destroy_process_group()

    @contextlib.contextmanager
    def place(self, *words):
        """
        ### What torchrun tells a rank, and a folder of its own to be in
        """
        from accelerate.state import AcceleratorState, GradientState

        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        place = {"RANK": self.rank, "LOCAL_RANK": self.rank, "WORLD_SIZE": self.size,
                 "LOCAL_WORLD_SIZE": self.size, "MASTER_ADDR": "127.0.0.1",
                 "MASTER_PORT": self.ports.pop(), "TORCHELASTIC_USE_AGENT_STORE": True,
                 "TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_RUN_ID": "mine",
                 "OMP_NUM_THREADS": 1}
        place = {name: str(value) for name, value in place.items()}
        with (mock.patch.dict(os.environ, place), mock.patch.object(sys, "argv", ["", *words]),
              pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO())):
            patch.chdir(self.folder)
            yield
            if dist.is_initialized():
                dist.barrier()
                dist.destroy_process_group()

    def main(self, text, *words):
        """
        ### The variables of a program, after it has run
        """
        file = self.folder / f"mine-{self.size}-{self.rank}.py"
        file.write_text(text, encoding="utf-8")
        with self.place(*words), contextlib.redirect_stdout(io.StringIO()) as told:
            found = runpy.run_path(str(file), run_name="__main__")
        return {**found, "told": told.getvalue()}


def run_programs(count, worker, size, folder, *args):
    """
    ## What a worker returns on each rank that runs `count` programs, one after the other

    Beside the ranks is a store for each program, as torchrun has one.
    """
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
              for _ in range(count)]
    return run(worker, size, [each.port for each in stores], folder, *args)


def refused(does):
    """What an error of ours says"""
    try:
        does()
    except (RuntimeError, ValueError) as error:
        text = str(error)
        assert all(word in text for word in ("Expected: ", "Got: ", "What to do: ")), text
        return text
    raise AssertionError("no error")

"""
# The `Trainer` of the page on loops, with the real libraries on two ranks

The oracle is the same program with the `Trainer` of transformers, on one rank with the whole batch.
"""

import importlib
import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.beside.loops import (
    ALONE,
    BF16,
    EXACT,
    META,
    SMOOTH,
    STOCK,
    TRAINER,
    Torchrun,
    off,
    refused,
    replaced,
    run_programs,
)

for library, version in (("accelerate", "1.15"), ("peft", "0.21"), ("transformers", "5.23")):
    pytest.importorskip(library, minversion=version, reason="the extra `tests` has it")


# Five steps with smoothed labels.
SHORT = (SMOOTH, ("max_steps=20", "max_steps=5"))
SHARED = ("(args.device), LlamaDecoderLayer",
          "(args.device), LlamaDecoderLayer, unit_bytes=1 << 30")


def history(trainer):
    """The losses that were logged, and the norms of gradients"""
    return torch.tensor([log[key] for log in trainer.state.log_history
                         for key in ("loss", "grad_norm", "eval_loss") if key in log])


def copies(folder):
    """A run that was interrupted after step 10, twice"""
    for other in ("again", "fewer"):
        for step in (5, 10):
            name = f"checkpoint-{step}"
            shutil.copytree(folder / "run" / name, folder / other / name)


def moved(name):
    """Another folder for a program's results"""
    return ('"run"', f'"{name}"'), ('"final"', f'"{name}-final"')


def on_two_ranks(ports, folder):
    """The program, with our `Trainer`: whole, resumed, with adapters, and in bf16"""
    ranks = Torchrun(ports, folder)
    text = replaced(TRAINER, *EXACT)
    trainer = ranks.main(text)["trainer"]
    trainer._set_signature_columns_if_needed()
    found = {"history": history(trainer), "columns": trainer._signature_columns,
             "flops": trainer.state.total_flos, "best": trainer.state.best_model_checkpoint}
    if ranks.rank == 0:
        copies(folder)
    found["resumed"] = history(ranks.main(replaced(text, *moved("again")), "resume")["trainer"])
    found["lora"] = history(ranks.main(replaced(text, *moved("lora")), "lora")["trainer"])
    found["smooth"] = history(
        ranks.main(replaced(text, *SHORT, SHARED, *moved("smooth")))["trainer"])
    found["smooth lora"] = history(
        ranks.main(replaced(text, *SHORT, *moved("smooth-lora")), "lora")["trainer"])
    trainer = ranks.main(replaced(text, BF16, *moved("bf16")))["trainer"]
    found["bf16"] = history(trainer)
    found["masters"] = {master.dtype
                        for master in trainer.optimizer.optimizer.state_dict()["masters"]}
    return found


def on_one_rank(ports, folder):
    """The same with the `Trainer` of transformers, and ours that goes on on one rank"""
    ranks = Torchrun(ports, folder)
    text = replaced(TRAINER, *EXACT, *STOCK)
    trainer = ranks.main(replaced(text, *moved("stock")))["trainer"]
    trainer._set_signature_columns_if_needed()
    found = {"history": history(trainer), "columns": trainer._signature_columns,
             "flops": trainer.state.total_flos, "best": trainer.state.best_model_checkpoint}
    fewer = replaced(TRAINER, *EXACT, ALONE, *moved("fewer"))
    found["fewer"] = history(ranks.main(fewer, "resume")["trainer"])
    found["lora"] = history(
        ranks.main(replaced(text, *moved("stock-lora")), "lora")["trainer"])
    found["smooth"] = history(
        ranks.main(replaced(text, *SHORT, *moved("stock-smooth")))["trainer"])
    found["smooth lora"] = history(
        ranks.main(replaced(text, *SHORT, *moved("stock-smooth-lora")), "lora")["trainer"])
    ranks.main(replaced(TRAINER, *META, *moved("meta")))
    found["refused"] = refusals(ranks)
    return found


def refusals(ranks):
    """What our `Trainer` says about arguments that cannot be right"""
    with ranks.place():
        from torch import nn
        from transformers import TrainingArguments

        from zero3 import wrap
        from zero3.beside.trainer import Trainer

        def told(model=None, optimizers=(None, None), shard=None, **kwargs):
            args = TrainingArguments("refused", use_cpu=True, report_to=[], **kwargs)
            model = model or nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
            shard = shard or (lambda plain: wrap(plain, nn.Sequential))
            trainer = Trainer(model, args, shard=shard, optimizers=optimizers)
            trainer.accelerator.prepare_model(trainer.model)

        sharded = wrap(nn.Sequential(nn.Sequential(nn.Linear(2, 2))), nn.Sequential)
        optimizer = torch.optim.SGD([torch.zeros(2, requires_grad=True)], 0.1)
        return {
            "sharded": refused(lambda: told(sharded)),
            "optimizers": refused(lambda: told(optimizers=(optimizer, None))),
            "batch size": refused(lambda: told(auto_find_batch_size=True)),
            "best": refused(lambda: told(
                save_only_model=True, load_best_model_at_end=True, eval_strategy="epoch",
                save_strategy="epoch")),
            "bf16": refused(lambda: told(bf16=True)),
            "no shards": refused(lambda: Trainer._load_from_checkpoint(None, "refused")),
        }


@pytest.fixture(scope="module")
def ours(folder):
    return run_programs(6, on_two_ranks, 2, folder)


@pytest.fixture(scope="module")
def theirs(folder, ours):
    (found,) = run_programs(7, on_one_rank, 1, folder)
    return found


def test_the_program_trains_like_plain_pytorch(folder, ours, theirs):
    """
    Twenty steps with accumulation, clipping, recomputation and weight decay on two ranks, compared
    with the stock `Trainer` on one: each checkpoint's weights, losses, norms of gradients, losses
    of the evaluations, and the best checkpoint. 1e-6, because sums over ranks have another order.
    Ranks have different numbers of tokens. Breaks if gradients are summed, losses are means of
    means, or norms and biases decay.
    Proves I1, `Trainer`, `Trainer.create_optimizer`, `Trainer.floating_point_ops`,
    `Trainer.create_accelerator_and_postprocess`.
    """
    for step in (5, 10, 15, 20):
        assert off(folder, f"run/checkpoint-{step}", f"stock/checkpoint-{step}") < 1e-6
    assert off(folder, "final", "stock-final") < 1e-6
    for found in ours:
        assert (found["history"] - theirs["history"]).abs().max() < 1e-5
        assert found["best"] == theirs["best"].replace("stock", "run")
        assert found["columns"] == theirs["columns"] and "input_ids" in found["columns"]
        assert found["flops"] == theirs["flops"]


def test_a_resumed_run_is_the_uninterrupted_one(folder, ours, theirs):
    """
    From step 10: the same bits on two ranks, and 1e-6 on one rank with twice the batch. Breaks if
    the states of rank 0 are loaded on all ranks, or the scheduler begins anew.
    Proves I1, `Trainer`.
    """
    assert off(folder, "again/checkpoint-20", "run/checkpoint-20") == 0
    assert off(folder, "fewer/checkpoint-20", "run/checkpoint-20") < 1e-6
    for found in ours:
        assert torch.equal(found["resumed"], found["history"])
    assert (theirs["fewer"] - ours[0]["history"]).abs().max() < 1e-5


def test_from_pretrained_opens_what_was_saved(folder, ours):
    """
    The model of the end, which is the best one, and a checkpoint of steps in between.
    Proves `Accelerator.get_state_dict`.
    """
    import transformers

    for name in ("final", "run/checkpoint-5"):
        saved = load_file(folder / name / "model.safetensors")
        model = transformers.LlamaForCausalLM.from_pretrained(folder / name)
        params = dict(model.named_parameters())
        assert params.keys() <= saved.keys() | {"lm_head.weight"}
        assert all(torch.equal(p, saved[name]) for name, p in params.items() if name in saved)


def test_a_model_on_the_meta_device_gets_its_weights_from_files(folder, theirs):
    """
    Five steps with a learning rate of zero save the weights that were read. Breaks if the `Trainer`
    moves the model before it is sharded.
    Proves `Trainer`.
    """
    assert off(folder, "meta-final", "stock-final") == 0


def test_adapters_train_and_are_saved_alone(folder, ours, theirs):
    """
    LoRA before `shard`: the frozen weights are sharded too, and the file has adapters only. Breaks
    if PEFT finds units between its modules, and writes an empty file.
    Proves `Trainer`, `Unit.named_modules`.
    """
    one, other = (load_file(folder / f"{name}-final/adapter_model.safetensors")
                  for name in ("lora", "stock-lora"))
    assert one.keys() == other.keys() and all("lora" in name for name in one)
    assert max((one[name] - other[name]).abs().max() for name in one) < 1e-6
    assert (ours[0]["lora"] - theirs["lora"]).abs().max() < 1e-5
    peft = importlib.import_module("peft")
    assert peft.PeftConfig.from_pretrained(folder / "lora-final").r == 4


def test_smoothed_labels_are_those_of_the_next_token(folder, ours, theirs):
    """
    The stock `Trainer` knows a causal model by the name of its class, with adapters too. Breaks if
    a sharded model learns to predict the token that it has just read; or if a model whose layers
    share a unit cannot be saved.
    Proves `Trainer`.
    """
    assert load_file(folder / "smooth-final/model.safetensors").keys() == load_file(
        folder / "stock-smooth-final/model.safetensors").keys()
    for kind in ("smooth", "smooth lora"):
        for found in ours:
            assert (found[kind] - theirs[kind]).abs().max() < 1e-5


def test_bf16_computes_in_16_bits_and_learns_in_32(folder, ours):
    """
    Weights are in bf16 and masters in fp32, and the losses are those of fp32 to two percent.
    Proves `Accelerator.prepare_model`.
    """
    saved = load_file(folder / "bf16-final/model.safetensors")
    assert {weight.dtype for weight in saved.values()} == {torch.bfloat16}
    for found in ours:
        assert found["masters"] == {torch.float32}
        assert torch.allclose(found["bf16"], found["history"], rtol=0.02)


def test_arguments_that_cannot_be_right_are_errors(theirs):
    """
    Each names its cure. Breaks if a run ends late, or in silence, because of one of them.
    Proves `Trainer.__init__`, `Trainer._load_from_checkpoint`.
    """
    for name, words in {"sharded": "shard=lambda", "optimizers": "create_optimizer",
                        "batch size": "auto_find_batch_size", "best": "save_only_model",
                        "bf16": "model.bfloat16()", "no shards": "save_only_model"}.items():
        assert words in theirs["refused"][name], name

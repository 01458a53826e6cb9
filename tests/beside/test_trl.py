"""
# TRL's `SFTTrainer` in shards: the program of the page on loops, with the real library

The oracle is the same program with `SFTTrainer` alone, on one rank with the whole batch.
"""

from unittest import mock

import pytest

from tests.beside.loops import SFT, Torchrun, off, replaced, run_programs

pytest.importorskip("trl", minversion="1.16", reason="no extra has it: it brings `datasets` along")

# As for the `Trainer`: the default of Adam magnifies last bits.
EXACT = ("max_steps=20", "max_steps=20, adam_epsilon=1e-3")
STOCK = (("class SFT(Trainer, SFTTrainer)", "class SFT(SFTTrainer)"),
         (",\n              shard=lambda model: wrap(model.to(args.device), LlamaDecoderLayer))",
          ")"),
         ("per_device_train_batch_size=2", "per_device_train_batch_size=4"))
ADAPTERS = "LoraConfig(target_modules=['q_proj', 'v_proj'], r=4, task_type='CAUSAL_LM')"
WITH_LORA = (("from trl import", "from peft import LoraConfig\nfrom trl import"),
             ("processing_class=", f"peft_config={ADAPTERS}, processing_class="),
             ('"sft-final"', '"lora-final"'))


def programs(ports, folder, *pairs):
    """The program, and the same with adapters"""
    ranks = Torchrun(ports, folder)
    with mock.patch("huggingface_hub.constants.HF_HUB_DISABLE_TELEMETRY", True):
        ranks.main(replaced(SFT, EXACT, *pairs))
        ranks.main(replaced(SFT, EXACT, *pairs, *WITH_LORA))


def test_sft_trains_like_the_stock_trainer(tmp_path):
    """
    Twenty steps with recomputation and accumulation on two ranks, of completions of different
    lengths: the weights to 1e-6, and those of adapters that TRL puts in. Breaks if a rank's tokens
    count as many times as there are ranks, or if the model is sharded without its adapters.
    Proves `Trainer.__init__`.
    """
    for size, pairs in ((2, ()), (1, STOCK)):
        (tmp_path / str(size)).mkdir()
        run_programs(2, programs, size, tmp_path / str(size), *pairs)
    assert off(tmp_path, "2/sft-final", "1/sft-final") < 1e-6
    assert off(tmp_path, "2/lora-final", "1/lora-final") < 1e-6

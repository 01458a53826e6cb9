"""
# A rank of DeepSpeed's, for the tests of checkpoints

It runs in the environment in which DeepSpeed is, and knows nothing of zero3: `python
deepspeed_engine.py RANK STORE TOLD`, where `TOLD` is a file of JSON with

* `stage`: 1, 2 or 3
* `load`: a universal folder to load first, or null
* `steps`: the numbers of the steps to take then, by which their batches are drawn
* `save`: a folder for a checkpoint of DeepSpeed's own, or null
* `out`: a file for what the engine has after loading, and after the steps
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

ROWS = 12


def plain(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 7)),
                         nn.Linear(7, 3))


def contents(engine):
    """Weights and moments of each parameter, and the steps that are counted."""
    import deepspeed

    if hasattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state"):
        # Stages 1 and 2 look for the moments of all groups after the step of the first one.
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    found = {}
    for name, p in engine.module.named_parameters():
        found[name, "param"] = deepspeed.utils.safe_get_full_fp32_param(p).clone()
        for key in ("exp_avg", "exp_avg_sq"):
            value = deepspeed.utils.safe_get_full_optimizer_state(p, key)
            if value is not None:
                found[name, key] = value.clone()
    taken = {float(s["step"]) for s in engine.optimizer.optimizer.state.values() if "step" in s}
    return found, sorted(taken)


def main(rank, store, told):
    # As its launcher does.
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    import deepspeed

    model = plain(1 if told["load"] else 0)
    groups = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    # It clips at 1.0 unless it is told not to.
    config = {"train_micro_batch_size_per_gpu": ROWS // 2, "gradient_clipping": 0.0,
              "zero_optimization": {"stage": told["stage"]}, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False,
              "checkpoint": {"load_universal": bool(told["load"])}}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.AdamW(groups, lr=0.01, eps=1e-3), config=config)
    loaded = None
    if told["load"]:
        engine.load_checkpoint(told["load"])
        for state in engine.optimizer.optimizer.state.values():
            if "step" in state:
                state["step"] = torch.as_tensor(state["step"]).clone()
        loaded = contents(engine)
    for step in told["steps"]:
        rows = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(step))
        loss = engine(rows.chunk(2)[rank]).square().mean()
        engine.backward(loss)
        engine.step()
    after = contents(engine)
    if told["save"]:
        # Without this entry its converter refuses the folders of stages 1 and 2.
        engine.save_checkpoint(told["save"], tag="own",
                               client_state={"universal_checkpoint_info": {}})
    if not rank:
        torch.save({"loaded": loaded, "after": after}, told["out"])
    dist.barrier()


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        main(int(sys.argv[1]), sys.argv[2], json.load(file))

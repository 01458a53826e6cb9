"""
# Leaving and coming back: what other libraries load is what we have, and the other way round
"""

import ctypes
import json
import os
import resource
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, load_model
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.test_save_load import batch, contents, difference, same, shard, train, weights
from tests.ranks import run
from tests.wholes import GPT2
from zero3 import Zero3Optimizer, load, save, wrap
from zero3.checkpoint.convert import main
from zero3.checkpoint.formats import from_tensors
from zero3.checkpoint.reader import MANIFEST, CheckpointReader, newest, steps
from zero3.offload.tensors import INDEX, Broken, save_tensors, write_index
from zero3.train.gpt import GPTConfig, gpt_layers


def plain(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 7)),
                         nn.Linear(7, 3))


def saves(folder, dtype=torch.float32):
    model, optimizer = shard(plain(), dtype=dtype)
    for step in range(2):
        train(model, optimizer, step, dtype)
    save(folder, model, optimizer, step=2)
    return weights(model)


def goes_on(folder, source):
    """From this checkpoint, or from the beginning to its end: one more step."""
    model, optimizer = shard(plain(bool(source)))
    if source:
        load(source, model, optimizer)
        # What came from another format has no options.
        for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
            assert group["weight_decay"] == decay
    for step in (2,) if source else (0, 1, 2):
        train(model, optimizer, step)
    save(folder, model, optimizer, step=3)


def command(*args):
    return main([str(arg) for arg in args])


# ------------------------------------------------------------------------------------ safetensors


class GPT(nn.Module):
    """The main job's, in plain PyTorch"""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(*gpt_layers(GPTConfig(seq_len=8, d_model=16, n_layers=2)))

    def forward(self, ids):
        return self.layers(ids)


def saves_gpt(folder, ids):
    model = wrap(GPT(0), tuple(type(layer) for layer in GPT(0).layers))
    with torch.no_grad():
        logits = model(ids)
    save(folder, model, step=0)
    return logits


def test_an_export_opens_in_plain_pytorch_with_equal_logits(tmp_path):
    """
    A model that three ranks saved, to the last bit. Breaks where a parameter lies elsewhere, or has
    another name than in the plain model.
    Proves `export`, `convert._parts`, `_checkpoint_in`.
    """
    ids = torch.randint(256, (2, 8))
    logits = run(saves_gpt, 3, tmp_path / "run", ids)[0]
    assert not command("export", tmp_path / "run", tmp_path / "one")
    model = GPT(1)
    model.load_state_dict(load_file(tmp_path / "one" / "model.safetensors"))
    assert torch.equal(model(ids), logits)


def test_safetensors_reads_the_files_that_we_write(tmp_path):
    """
    Tensors of every kind, to the bit, in the place of an older file, with the metadata, and each at
    a multiple of its element size; and the index names the files. Breaks where smaller elements are
    written first, where a view is written as its whole memory, or an older file stays.
    Proves `write_tensors`, `save_tensors`, `write_index`, `type_name`, `FileEntry`.
    """
    halves = torch.randn(3, 4).to(torch.bfloat16)
    tensors = {"flag": torch.tensor([True, False, True]), "half": halves[:, 1].t(),
               "empty": torch.empty(0, 2), "wide": torch.randn(5, dtype=torch.double)[::2],
               "count": torch.tensor(7), "complex": torch.randn(2, dtype=torch.complex64)}
    path = tmp_path / "model.safetensors"
    path.write_text("older")
    save_tensors(path, tensors, {"format": "pt"})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], t) and found[name].dtype == t.dtype
               for name, t in tensors.items())
    header = json.loads(path.read_bytes()[8:].split(b"}}")[0] + b"}}")
    assert header.pop("__metadata__") == {"format": "pt"}
    begins = {name: entry["data_offsets"][0] for name, entry in header.items()}
    assert not any(begins[name] % t.itemsize for name, t in tensors.items())
    with pytest.raises(Broken, match=r"`x` is of torch\.complex128, a data type that"):
        save_tensors(tmp_path / "x", {"x": torch.ones(1, dtype=torch.complex128)}, {})
    write_index(tmp_path, {"a": path.name}, 12)
    assert json.loads((tmp_path / INDEX).read_text()) == {
        "metadata": {"total_size": 12}, "weight_map": {"a": path.name}}


def saves_gpt2(folder):
    torch.manual_seed(0)
    plain = GPT2()
    save(folder, wrap(plain, plain.layers), step=0)


def test_an_export_of_tied_weights_opens_in_hugging_face_and_by_safetensors(tmp_path):
    """
    Once in the file, and the other name in its header, as safetensors has it.
    Proves `export`, `Entries._names`.
    """
    run(saves_gpt2, 2, tmp_path)
    assert not command("export", tmp_path, tmp_path / "out")
    torch.manual_seed(0)
    model, ids = GPT2(), torch.tensor([[1, 2, 3]])
    expected = model(ids)
    torch.manual_seed(1)
    other = GPT2()
    load_model(other, tmp_path / "out" / "model.safetensors")
    assert torch.equal(other(ids), expected)


def test_an_export_in_bf16_is_the_masters_rounded(tmp_path):
    """
    And without `--dtype` it is what the model computed with.
    Proves `export`.
    """
    whole = run(saves, 2, tmp_path, torch.bfloat16)[0]
    masters = contents(tmp_path)
    for out, options in (("own", ()), ("fp32", ("--dtype", "F32"))):
        assert not command("export", tmp_path, tmp_path / out, *options)
        found = load_file(tmp_path / out / "model.safetensors")
        for name, p in whole.items():
            expected = p if out == "own" else masters[name, "param"]
            assert found[name].dtype == expected.dtype and torch.equal(found[name], expected)


def grown_mib(*args):
    """By how much a command's memory has grown at its highest."""

    def kib(name):
        with open("/proc/self/status") as status:
            return int(status.read().split(name + ":")[1].split()[0])

    # What is freed goes back to the system at once.
    ctypes.CDLL(None).mallopt(-3, 131072)
    before = kib("RssAnon")
    assert not command(*args)
    return (kib("VmHWM") - kib("RssFile") - before) >> 10


def test_no_conversion_has_the_model_in_memory(tmp_path):
    """
    Of 160 MiB in parameters of 32 MiB: an export takes what is under way in files and a part of a
    parameter; the others take a parameter as well, twice where torch copies it. Breaks where
    tensors are collected before they are written.
    Proves `convert._parts`, `from_dcp`, `DcpFolder.read`, `_DcpPlanner`, `Writer._flush`.
    """
    names = [f"{i}.weight" for i in range(5)]
    big = torch.ones(2048, 4096)
    announced = {name: {"param": (big.dtype, big.shape)} for name in names}
    from_tensors(tmp_path / "run", 0, announced, {}, lambda name, key: big)
    names = ("run", "hf", "ds", "ds_back", "dcp", "dcp_back")
    run_, hf, ds, ds_back, dcp_, dcp_back = (tmp_path / name for name in names)
    style = ("--format", "dcp")
    grown = [run(grown_mib, 1, *args, fresh=True)[0] for args in (
        ("export", run_, hf), ("universal", run_, ds), ("universal", ds, ds_back),
        ("universal", run_, dcp_, *style), ("universal", dcp_, dcp_back, *style))]
    assert grown[0] < 32 + 16 + 20 and max(grown) < 2 * 32 + 32 + 16 + 12, grown


# ------------------------------------------------------------------------------------------- others


def test_a_universal_folder_has_the_plain_tensors(tmp_path):
    """
    Each file of DeepSpeed's layout opens by torch, without our code or theirs, and has what the
    checkpoint has of that parameter; and what is read back from it is the same once more.
    Proves `to_deepspeed`, `from_deepspeed`, `to_dcp`.
    """
    run(goes_on, 2, tmp_path / "run", None)
    assert not command("universal", tmp_path / "run", tmp_path / "out")
    root = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()
    expected = contents(tmp_path / "run")
    for (name, key), values in expected.items():
        file = {"param": "fp32"}.get(key, key)
        found = torch.load(root / "zero" / name / f"{file}.pt", weights_only=True)
        assert torch.equal(torch.as_tensor(found["param"] if key != "step" else float(found)),
                           values)
    assert len([*(root / "zero").glob("*/*.pt")]) == len(expected)
    assert not command("universal", tmp_path / "out", tmp_path / "back")
    assert same(contents(tmp_path / "back"), expected)
    # And on to the third.
    assert not command("universal", tmp_path / "back", tmp_path / "dcp", "--format", "dcp")
    assert not command("universal", tmp_path / "dcp", tmp_path / "end")
    assert same(contents(tmp_path / "end"), expected)


def test_a_universal_folder_is_not_written_twice(tmp_path, capsys):
    """
    Weights alone, after a checkpoint with moments in the same folder: an error, and the older one
    stays as it was. Breaks where new weights get older moments, and nobody says so.
    Proves `to_deepspeed`.
    """
    saves(tmp_path / "run")
    save(tmp_path / "weights", shard(plain(1))[0], step=9)
    assert not command("universal", tmp_path / "run", tmp_path / "out")
    assert command("universal", tmp_path / "weights", tmp_path / "out") == 1
    assert f"{tmp_path / 'out' / 'universal'} exists already" in capsys.readouterr().err
    assert not command("universal", tmp_path / "out", tmp_path / "back")
    assert same(contents(tmp_path / "back"), contents(tmp_path / "run"))


def test_deepspeeds_classes_are_not_needed_and_others_are_refused(tmp_path, capsys):
    """
    Its model states name a few of its classes. They are read as empty ones; any other class in the
    pickle, which could do anything, is an error.
    Proves `_Stub`, `from_deepspeed`.
    """
    run(goes_on, 2, tmp_path / "run", None)
    assert not command("universal", tmp_path / "run", tmp_path / "out")
    root = tmp_path / "out" / (tmp_path / "out" / "latest_universal").read_text()
    states = root / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    about = torch.load(states, weights_only=True)
    for name, good in (("LossScaler", True), ("Surprise", False)):
        module = types.ModuleType("deepspeed.runtime.fp16.loss_scaler")
        scaler = type(name, (), {"__module__": module.__name__})
        setattr(module, name, scaler)
        with pytest.MonkeyPatch.context() as patch:
            for i in range(4):
                patch.setitem(sys.modules, module.__name__.rsplit(".", i)[0], module)
            torch.save({**about, "loss_scaler": scaler()}, states)
        assert command("universal", tmp_path / "out", tmp_path / name) == (not good)
    assert "Surprise" in capsys.readouterr().err


def test_a_run_leaves_for_another_format_and_comes_back_as_if_it_had_stayed(tmp_path):
    """
    Two steps, out, back, one more step on another number of ranks: weights, moments and counts are
    those of three steps.
    Proves `from_deepspeed`, `from_dcp`, `from_tensors`.
    """
    run(goes_on, 2, tmp_path / "all", None)
    run(saves, 3, tmp_path / "run")
    for style in ("deepspeed", "dcp"):
        out, back, end = (tmp_path / f"{style}-{what}" for what in ("out", "back", "end"))
        assert not command("universal", tmp_path / "run", out, "--format", style)
        assert not command("universal", out, back, "--format", style)
        assert newest(back).name == "step-00000002"
        run(goes_on, 2, end, back)
        assert difference(contents(end), contents(tmp_path / "all")) < 1e-6


def fsdp(seed):
    model = plain(seed)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    groups = [[p for p in model.parameters() if p.ndim > 1],
              [p for p in model.parameters() if p.ndim == 1]]
    return model, torch.optim.AdamW([{"params": groups[0], "weight_decay": 0.1},
                                     {"params": groups[1], "weight_decay": 0.0}], lr=0.01, eps=1e-3)


def fsdp_step(model, optimizer, step):
    model(batch(step, torch.float32).chunk(2)[dist.get_rank()]).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def fsdp_goes_on(source):
    """Load a folder of DCP's, as its documentation says, and take a step."""
    model, optimizer = fsdp(1)
    for group in optimizer.param_groups:
        group["lr"] = 1.0
    state = {"model": get_model_state_dict(model),
             "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=source)
    set_model_state_dict(model, state["model"])
    set_optimizer_state_dict(model, optimizer, state["optim"])
    fsdp_step(model, optimizer, 2)
    found = {(name, "param"): p.full_tensor().detach() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        for key, value in optimizer.state[p].items():
            found[name, key] = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found, [group["lr"] for group in optimizer.param_groups]


def test_fsdp2_goes_on_from_a_checkpoint_of_ours(tmp_path):
    """
    Its weights, moments, counts and options after one more step are ours. Breaks where a key is
    called otherwise, or an option is missing.
    Proves `to_dcp`.
    """
    run(goes_on, 2, tmp_path / "all", None)
    run(saves, 3, tmp_path / "run")
    assert not command("universal", tmp_path / "run", tmp_path / "dcp", "--format", "dcp")
    found, rates = run(fsdp_goes_on, 2, tmp_path / "dcp")[0]
    assert difference(found, contents(tmp_path / "all")) < 1e-6 and rates == [0.01, 0.01]


def fsdp_saves(folder, nested):
    model, optimizer = fsdp(0)
    for step in range(2):
        fsdp_step(model, optimizer, step)
    state = {"model": get_model_state_dict(model),
             "optim": get_optimizer_state_dict(model, optimizer)}
    dcp.save({"app": state} if nested else state, checkpoint_id=folder)


@pytest.mark.parametrize("nested", [False, True])
def test_we_go_on_from_a_checkpoint_of_fsdp2(tmp_path, nested):
    """
    Its weights, moments and counts, wherever in the folder they are, and one more step on another
    number of ranks is ours. Breaks where a key is called otherwise.
    Proves `from_dcp`.
    """
    run(goes_on, 2, tmp_path / "all", None)
    run(fsdp_saves, 2, tmp_path / "dcp", nested)
    assert not command("universal", tmp_path / "dcp", tmp_path / "run", "--format", "dcp")
    run(goes_on, 3, tmp_path / "end", tmp_path / "run")
    assert difference(contents(tmp_path / "end"), contents(tmp_path / "all")) < 1e-6


def test_a_plain_state_dict_that_dcp_saved_is_read_too(tmp_path):
    """
    Without `model` in its keys, and without an optimizer; and a buffer, which it does not tell from
    parameters. Breaks where a buffer is only looked for where a rank's own would be.
    Proves `from_dcp`, `from_tensors`, `CheckpointReader.replicated`.
    """
    model = nn.Sequential(plain(), nn.BatchNorm1d(3))
    model[1].num_batches_tracked += 5
    with warnings.catch_warnings():
        # That nothing is distributed here.
        warnings.simplefilter("ignore")
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert not command("universal", tmp_path / "dcp", tmp_path / "run", "--format", "dcp")
    assert same({name: values for (name, _), values in contents(tmp_path / "run").items()},
                {name: p.detach() for name, p in model.state_dict().items()})
    assert newest(tmp_path / "run").name == "step-00000000"
    other = wrap(nn.Sequential(plain(1), nn.BatchNorm1d(3)), nn.BatchNorm1d)
    optimizer = Zero3Optimizer(other, lr=0.1)
    load(tmp_path / "run", other, optimizer)
    assert same(weights(other), {name: p.detach() for name, p in model.named_parameters()})
    assert not optimizer.state
    norm = next(m for m in other.modules() if isinstance(m, nn.BatchNorm1d))
    assert norm.num_batches_tracked == 5


DEEPSPEED = os.environ.get("ZERO3_DEEPSPEED_PYTHON")
needs_deepspeed = pytest.mark.skipif(not DEEPSPEED, reason="set ZERO3_DEEPSPEED_PYTHON to the "
                                     "python of an environment with DeepSpeed")


def deepspeed(folder, stage, steps, load=None, save=None):
    """Two ranks of an engine of DeepSpeed's: what it has after loading, and after these steps."""
    folder.mkdir()
    told = {"stage": stage, "load": load and str(load), "steps": steps, "save": save and str(save),
            "out": str(folder / "out.pt")}
    (folder / "told.json").write_text(json.dumps(told))
    path = f"{Path(DEEPSPEED).parent}:{os.environ['PATH']}"
    env = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": path}
    ranks = [subprocess.Popen(
        [DEEPSPEED, Path(__file__).parent / "deepspeed_engine.py", str(rank), folder / "store",
         folder / "told.json"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for rank in range(2)]
    for process in ranks:
        said, _ = process.communicate(timeout=600)
        assert not process.returncode, said.decode()[-3000:]
    if save:
        done = subprocess.run(
            [DEEPSPEED, "-m", "deepspeed.checkpoint.ds_to_universal", "--input_folder",
             save / "own", "--output_folder", save / "universal", "--num_extract_workers", "1",
             "--num_merge_workers", "1"], env=env, capture_output=True, timeout=600)
        assert not done.returncode, done.stderr.decode()[-3000:]
    return torch.load(folder / "out.pt", weights_only=True)


def without_steps(found):
    return {at: t for at, t in found.items() if at[1] != "step"}


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_goes_on_from_a_universal_folder_of_ours(tmp_path, stage):
    """
    Three ranks of ours saved it: weights and moments are the same bit for bit in two param groups
    of its stages on two ranks, and the count of steps, and one more step there is one more step
    here. Breaks where stages 1 and 2 find fewer param groups than they have, or a version that
    they cannot read.
    Proves `to_deepspeed`.
    """
    run(saves, 3, tmp_path / "run")
    assert not command("universal", tmp_path / "run", tmp_path / "out", "--torch-adam")
    found = deepspeed(tmp_path / "ds", stage, [2], load=tmp_path / "out")
    loaded, counted = found["loaded"]
    assert same(loaded, without_steps(contents(tmp_path / "run"))) and counted == [2.0]
    run(goes_on, 2, tmp_path / "all", None)
    after, counted = found["after"]
    assert difference(after, without_steps(contents(tmp_path / "all"))) < 1e-6 and counted == [3.0]


@needs_deepspeed
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_we_go_on_from_a_universal_folder_of_deepspeeds(tmp_path, stage):
    """
    Two steps there, made universal by its own converter: weights, moments and counts are the same
    here bit for bit, and one more step on three ranks makes the three that we take alone. Breaks
    where the states of stage 3 alone are looked for, or the steps are taken from one place.
    Proves `from_deepspeed`, `_Stub`.
    """
    after, counted = deepspeed(tmp_path / "ds", stage, [0, 1], save=tmp_path / "own")["after"]
    assert not command("universal", tmp_path / "own", tmp_path / "run")
    assert newest(tmp_path / "run").name == "step-00000002"
    found = contents(tmp_path / "run")
    assert same(without_steps(found), after) and counted == [2.0]
    assert {float(t) for (_, key), t in found.items() if key == "step"} == {2.0}
    run(goes_on, 3, tmp_path / "end", tmp_path / "run")
    run(goes_on, 2, tmp_path / "all", None)
    assert difference(contents(tmp_path / "end"), contents(tmp_path / "all")) < 1e-6


# ------------------------------------------------------------------------------------- command line


def test_the_command_line_says_what_is_there_and_what_is_broken(tmp_path, capsys):
    """
    By file and rank, and with an exit status; a run's folder stands for its newest checkpoint, and
    to verify it is to verify all.
    Proves `convert.main`, `verify`, `Broken`.
    """
    model, optimizer = shard(plain())
    train(model, optimizer, 0)
    for step in (1, 2):
        save(tmp_path, model, optimizer, step=step)
    assert not command("verify", tmp_path)
    assert capsys.readouterr().out.count(": as it was written") == 2
    file = CheckpointReader(newest(tmp_path)).files[0].path
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert command("verify", tmp_path) == 1
    told = capsys.readouterr()
    assert f"{file}, the file of rank 0, is damaged" in told.err
    # The other one all the same.
    assert told.out == f"{tmp_path}/step-00000001: as it was written\n"
    assert command("export", tmp_path, tmp_path / "out") == 1
    assert "is damaged" in capsys.readouterr().err
    assert not [*(tmp_path / "out").glob("*")]
    file.write_bytes(good)
    assert not command("export", tmp_path, tmp_path / "out")
    capsys.readouterr()
    assert command("export", tmp_path, tmp_path / "out") == 1
    assert "File exists" in capsys.readouterr().err
    # What is a run's stays a run's.
    with pytest.raises(Broken, match="has checkpoints in it"):
        from_tensors(tmp_path, 3, {}, {}, lambda name, key: torch.ones(1))
    assert len(steps(tmp_path)) == 2
    for args in (("verify", tmp_path / "none"), ("universal", tmp_path / "none", tmp_path / "x")):
        assert command(*args) == 1
        assert "none" in capsys.readouterr().err


def test_a_conversion_that_is_cut_off_leaves_no_checkpoint(tmp_path):
    """
    Of a disk that is full: its folder does not look like one, and the next conversion to the same
    place clears it away. Breaks where a checkpoint that lacks its final name alone is taken for
    such a rest.
    Proves I10, `from_tensors`, `make_output_folder`.
    """
    big = torch.ones(1 << 20)
    args = {"a": {"param": (big.dtype, big.shape)}}, {}, lambda name, key: big
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            from_tensors(tmp_path / "run", 0, *args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert newest(tmp_path / "run") is None
    assert os.listdir(tmp_path / "run") == ["step-00000000.partial"]
    from_tensors(tmp_path / "run", 1, *args)
    assert os.listdir(tmp_path / "run") == ["step-00000001"]
    (tmp_path / "run" / "step-00000001").rename(tmp_path / "run" / "step-00000001.partial")
    with pytest.raises(Broken, match="has checkpoints in it"):
        from_tensors(tmp_path / "run", 0, *args)
    assert (newest(tmp_path / "run") / MANIFEST).exists()

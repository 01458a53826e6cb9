"""
# What is passed is checked: hostile options, wrong arguments, too little of everything
"""

import contextlib
import io
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.bench import disk
from tests.ranks import run
from zero3 import Offload, Zero3Layer, Zero3Optimizer, Zero3Sequential, wrap
from zero3.estimate import __main__ as estimate
from zero3.guards.command_line import APP
from zero3.train import gpt
from zero3.train import job as train

NUMBERS = ["nan", "inf", "-inf", "-1", "", "x", "1e999", "9" * 400, "1\n2", "\x1b[31m"]


def one_error(code, text):
    """The line that a command left, after the checks that all of them share."""
    assert code == 2
    assert text.count("\n") == 1 and text.endswith("\n"), text
    assert "Traceback" not in text and "What to do: " in text, text
    assert text.strip().isprintable()
    return text


def refused(capsys, main, *options):
    capsys.readouterr()
    try:
        code = main(list(options))
    except SystemExit as error:
        code = error.code
    out, err = capsys.readouterr()
    assert out == ""
    return one_error(code, err)


@pytest.mark.parametrize("option", ["--params", "--ranks", "--gpu", "--cpu", "--nvme", "--layers",
                                    "--tokens", "--nodes", "--link"])
def test_a_hostile_number_is_one_line_of_the_estimate(option, capsys):
    """
    Not finite, negative, empty, no number, too large to multiply, with escape codes. Breaks where a
    NaN passes because it is neither too small nor too large.
    Proves `estimate.main`, `Parser`, `Parser.error`, `one_line`, `check_args`,
    `formulas.print_table`.
    """
    given = {"--params": "8b", "--ranks": "2", "--gpu": "80GB"}
    for value in [*NUMBERS, *(["0"] if option not in ("--gpu", "--cpu", "--nvme") else [])]:
        options = [f"{name}={text}" for name, text in {**given, option: value}.items()]
        assert option in refused(capsys, estimate.main, *options)


def test_a_hostile_option_is_one_line_of_the_benchmark(capsys, tmp_path):
    """
    Found before anything is measured, so at once. Breaks where the folder is first looked at when
    the file is made.
    Proves `command_line.folder`, `within`.
    """
    here = f"--folder={tmp_path}"
    for option in ("--mib", "--rounds"):
        for value in [*NUMBERS, "0", str(1 << 62)]:
            assert option in refused(capsys, disk.main, here, f"{option}={value}")
    for wrong in ("", "/nowhere", __file__, "/proc", "/sys"):
        assert "--folder" in refused(capsys, disk.main, f"--folder={wrong}")
    refused(capsys, disk.main)
    # As much as no disk has, and less than a file system takes for a file.
    told = refused(capsys, disk.main, here, "--mib", str(1 << 23))
    assert "Expected: a folder with room for 8388608 MiB" in told


def test_a_figure_of_the_disk_is_told_at_once_and_no_file_stays(tmp_path, monkeypatch, capsys):
    """
    None of the figures waits for the others. Breaks where a way is measured in all rounds before
    the next one has its turn.
    Proves `File`.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(disk, "WAYS", disk.WAYS[:2])
    disk.main(["--folder", ".", "--mib", "64", "--rounds", "2"])
    out, err = capsys.readouterr()
    assert [line[:13] for line in err.splitlines()] == [f"round {i} of 2:" for i in (1, 1, 2, 2)]
    assert "past the cache" in out and not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------ the main job

SMALL = ["--d-model=4", "--layers=1", "--seq-len=4", "--batch=2", "--steps=2", "--device=cpu"]
WHOLE = ["--d-model", "--layers", "--heads", "--seq-len", "--batch", "--accumulate", "--steps",
         "--eval-every"]


@pytest.mark.parametrize(("option", "wrong"), [
    *((option, [*NUMBERS, "0", "1.5"]) for option in WHOLE),
    ("--save-every", NUMBERS), ("--sample", [*NUMBERS, "1000000000"]),
    ("--lr", [*NUMBERS, "1e39"]), ("--clip", [*NUMBERS, "0", "1e39"]),
    ("--loss-scale", [*NUMBERS, "0", "1e39"]),
    ("--seed", ["nan", "", str(2**64), str(-2**63 - 1), "9" * 400]),
    ("--prompt", [""]), ("--resume", ["", "/nowhere", __file__]),
    ("--out", ["", __file__, f"{__file__}/x", "/proc", "/proc/x"]),
    ("--text", ["", "/nowhere", "/proc", "/dev/null", "/proc/self/mem", os.fsdecode(b"\xff")]),
    *((option, ["", "nan", "disk"]) for option in ("--offload-params", "--dtype", "--device")),
])
def test_a_hostile_option_is_one_line_of_the_main_job(option, wrong, tmp_path, capsys):
    """
    Before anything starts: the folder of the run stays as it was. Breaks where an option is first
    looked at when it is used.
    Proves `job.main`, `check_options`, `prepare`, `load_bytes`.
    """
    for value in wrong:
        out = [] if option == "--out" else [f"--out={tmp_path}"]
        told = refused(capsys, train.main, *SMALL, *out, f"{option}={value}")
        assert option in told or "there is no" in told or "the batch does not split" in told, told
    assert not list(tmp_path.iterdir())


def test_files_go_only_where_they_can(tmp_path, capsys):
    """
    A folder of files that is not there, is none, takes none, or that no tier asks for. Breaks where
    the first layer is built before anybody looks: 119 lines from two ranks.
    Proves `check_options`, `command_line.folder`.
    """
    nvme = [*SMALL, f"--out={tmp_path}", "--offload-params=nvme"]
    for wrong in ("", "/nowhere", __file__, "/proc"):
        told = refused(capsys, train.main, *nvme, f"--offload-folder={wrong}")
        assert "cannot write to the folder of --offload-folder" in told
    told = refused(capsys, train.main, *nvme[:-1], f"--offload-folder={tmp_path}")
    assert "nothing goes to --offload-folder" in told


@pytest.mark.parametrize(("options", "what"), [
    (["--d-model=100000"], "the model as it is built"),
    (["--d-model=1000000000000"], "the model as it is built"),
    (["--layers=10000000"], "the model as it is built"),
    (["--batch=1000000000"], "a batch"),
    (["--seq-len=30000", "--batch=16"], "the activations of a step"),
])
def test_sizes_beyond_memory_are_refused_with_what_they_need(options, what, tmp_path, capsys,
                                                             monkeypatch):
    """
    At once, with the bytes needed and the bytes there. Breaks where the machine first tries: a
    batch of a billion windows was drawn for 40 s, in silence.
    Proves `check_memory`, `GPTConfig.numel`.
    """
    monkeypatch.setattr(train, "room", lambda at: 40 * 10**9)
    start_s = time.perf_counter()
    told = refused(capsys, train.main, *SMALL, f"--out={tmp_path}", *options)
    assert f"there is no room for {what}" in told or f"there is no room for the {what}" in told
    assert "40,000,000,000 bytes free" in told and "Expected: at least " in told
    assert time.perf_counter() - start_s < 20


def test_of_blocks_whose_activations_leave_two_need_memory(tmp_path, capsys, monkeypatch):
    """
    Of eight blocks with an attention of 115 GB each. Breaks if a run is refused that would fit.
    Proves `check_memory`.
    """
    monkeypatch.setattr(train, "room", lambda at: 40 * 10**9)
    sizes = [*SMALL, f"--out={tmp_path}", "--layers=8", "--seq-len=30000", "--batch=16"]
    needs = []
    for where in ("device", "nvme"):
        told = refused(capsys, train.main, *sizes, f"--activations={where}")
        needs.append(told.partition("Expected: at least ")[2].partition(" ")[0].replace(",", ""))
    logits = 4 * 16 * 30_000 * 256
    assert [int(need) - logits for need in needs] == [n * 4 * 16 * 2 * 30_000**2 for n in (8, 2)]


def test_the_size_of_the_model_is_known_before_it_is_built():
    """
    Breaks where a layer gets another parameter and the check of memory does not hear of it.
    Proves `GPTConfig.numel`.
    """
    for heads, layers in ((1, 1), (3, 2), (6, 5)):
        config = gpt.GPTConfig(seq_len=7, d_model=12, n_heads=heads, n_layers=layers, d_ff=20)
        built = sum(p.numel() for layer in gpt.gpt_layers(config) for p in layer.parameters())
        assert config.numel == built


def test_every_seed_of_64_bits_draws_batches_and_small_ones_draw_what_they_drew():
    """
    Breaks where the seed of a step, a million times as large, no longer fits.
    Proves `global_batch`.
    """
    data = torch.arange(100, dtype=torch.uint8)
    for seed in (2**64 - 1, 2**63, -2**63):
        assert gpt.global_batch(data, 5, 3, 4, seed).shape == (3, 5)
    for seed in (0, 7, -7):
        generator = torch.Generator().manual_seed(1_000_003 * seed + 5)
        starts = torch.randint(96, (3,), generator=generator)
        assert gpt.global_batch(data, 5, 3, 4, seed)[:, 0].tolist() == starts.tolist()


def test_a_run_that_diverges_ends_with_one_line(tmp_path, capsys):
    """
    A learning rate that passes for a number, and is too high. Breaks where the optimizer's error
    comes with a traceback through the main job.
    Proves `job.main`, `tell_failure`.
    """
    options = [*SMALL[:4], "--device=cpu", "--steps=9", "--lr=1e30", f"--out={tmp_path}"]
    assert "lower the learning rate" in refused(capsys, train.main, *options)


def test_bytes_that_are_no_utf_8_continue_like_others(tmp_path, capsys):
    """
    And the largest seed trains. Breaks where the prompt is first encoded after training.
    Proves `Job.finish`, `global_batch`.
    """
    prompt = os.fsdecode(b"\xff\xfe")
    options = ["--sample=2", f"--prompt={prompt}", f"--seed={2**64 - 1}", f"--out={tmp_path}"]
    assert train.main([*SMALL, *options]) == 0
    assert "\n\ufffd\ufffd" in capsys.readouterr().out


def lame(place, error, folder):
    """The main job on a rank of two, of which rank 1 has a problem of its own."""
    rank = dist.get_rank()
    owner = train.Job if place == "build" else train
    before = getattr(owner, place)

    def fail(*args):
        if rank == 1:
            raise error("only here")
        return before(*args)

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    train.Ranks.connect = lambda self, *_: None
    train.fresh_store = lambda *_: dist.distributed_c10d._get_default_store()
    setattr(owner, place, fail)
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = train.main([*SMALL, f"--out={folder}"])
    (folder / f"{place} {rank}").write_text(f"{code} {said.getvalue()}")
    # As `python -m zero3.train` ends.
    os._exit(code)


def test_what_one_rank_lacks_is_said_once_and_nobody_hangs(tmp_path):
    """
    A machine's own folder or memory: all ranks hear of it before anything starts. A rank that fails
    alone while it builds speaks for itself, and the others learn that it is gone. Breaks where
    they wait for it until their time-out.
    Proves `prepare`, `agree`, `tell_failure`.
    """
    said = {}
    for place, error in (("check_options", ValueError), ("build", RuntimeError)):
        with pytest.raises(AssertionError, match="ended without an answer"):
            run(lame, 2, place, error, tmp_path)
        said[place] = [(tmp_path / f"{place} {rank}").read_text() for rank in range(2)]
    assert said["check_options"] == ["2 zero3.train: on rank 1: only here\n", "2 "]
    assert said["build"][1].startswith("1 zero3.train: rank 1 failed\nTraceback")
    assert "RuntimeError: only here" in said["build"][1]
    assert said["build"][0].startswith("1 zero3.train: rank 0 ends as a consequence. ")


# ------------------------------------------------------------------------------ arguments of Python


def message(make, kind, *words):
    """An error of this kind, in the project's form, and nothing else."""
    with pytest.raises(kind) as caught:
        make()
    told = str(caught.value)
    assert all(word in told for word in ("Expected: ", "Got: ", "What to do: ", *words)), told


@pytest.mark.parametrize("wrong", [
    {"queue_depth": 1.5}, {"queue_depth": True}, {"queue_depth": 10**9}, {"queue_depth": "4"},
    {"block_bytes": 1 << 40}, {"block_bytes": float("nan")}, {"block_bytes": -4096},
    {"buffers": 5.0}, {"buffers": 10**9}, {"direct": "no"}, {"folder": ""}, {"folder": 3},
    {"tier": None}, {"tier": []}, {"tier": "nvme", "folder": None},
])
def test_an_offload_takes_whole_numbers_within_limits(wrong):
    """
    Breaks where a NaN, a fraction or a truth value passes for a number of bytes or threads.
    Proves `Offload`, `whole`, `checks.expect`.
    """
    given = {"tier": "nvme", "folder": "/", **wrong}
    message(lambda: Offload(**given), ValueError, f"{next(iter(wrong.values()))!r}")


def test_the_name_of_a_tier_is_an_offload_wherever_one_is_taken(tmp_path):
    """
    And files need a folder. Breaks where a layer fails with an attribute that a string has not, in
    the middle of building.
    Proves `Offload.of`, `Zero3Layer.__init__`, `wrap`, `Zero3Optimizer.__init__`.
    """
    model = Zero3Sequential([Zero3Layer(nn.Linear(3, 3), offload="cpu")])
    assert model.module_list[0].flats[0].storage.tier == "cpu"
    assert Zero3Optimizer(model, offload="cpu").offload.tier == "cpu"
    whole_model = wrap(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), nn.Linear, offload="cpu")
    assert len({id(unit.offload) for unit in whole_model.units}) == 1
    assert whole_model.units[1].offload.tier == "cpu"
    nvme = Offload("nvme", tmp_path)
    assert Offload.of(nvme) is nvme and Offload.of(None).tier == "device"
    plain = nn.Sequential(nn.Linear(3, 3))
    for make in (lambda: Zero3Layer(nn.Linear(3, 3), offload="nvme"),
                 lambda: Zero3Optimizer(model, offload="nvme"),
                 lambda: wrap(plain, nn.Linear, offload="nvme")):
        message(make, ValueError, 'Offload("nvme", folder=')
    for wrong in ("disk", "", 1, {"tier": "cpu"}):
        message(lambda wrong=wrong: Zero3Layer(nn.Linear(3, 3), offload=wrong), ValueError)
    # What was refused has changed nothing.
    assert plain(torch.ones(3)).shape == (3,)


def test_what_is_no_layer_and_no_model_is_refused_by_what_it_is():
    """
    A generator and an `nn.Sequential` of layers are lists of layers. Breaks where a generator is
    walked twice, which makes an empty model, or a chain without layers returns its input.
    Proves `Zero3Sequential.__init__`, `Zero3Layer.__init__`, `wrap`.
    """
    x = torch.ones(2, 3)
    for kind in (lambda made: made, list, tuple, lambda made: nn.Sequential(*made)):
        made = (Zero3Layer(nn.Linear(3, 3, bias=False)) for _ in range(2))
        model = Zero3Sequential(kind(made))
        assert len(model.module_list) == len(model.get_trainable_chunk()) == 2
        with model.full_params() as params:
            expected = x @ params["0.weight"].t() @ params["1.weight"].t()
            assert model.module_list[0].next_layer == [model.module_list[1]]
        assert torch.equal(model(x), expected)
    for empty in ([], nn.Sequential(), iter(())):
        message(lambda empty=empty: Zero3Sequential(empty), ValueError, "at least one layer")
    for wrong in (None, 3, Zero3Layer(nn.Linear(3, 3))):
        message(lambda wrong=wrong: Zero3Sequential(wrong), TypeError, "a list of Zero3Layers")
    for wrong in ([nn.Linear(3, 3)], nn.Sequential(nn.Linear(3, 3)), "ab", [None]):
        message(lambda wrong=wrong: Zero3Sequential(wrong), TypeError, "element 0")
    for wrong in (None, nn.Linear, torch.ones(3), [nn.Linear(3, 3)]):
        message(lambda wrong=wrong: Zero3Layer(wrong), TypeError, "Zero3Layer")
        message(lambda wrong=wrong: wrap(wrong, nn.Linear), TypeError, "wrap")
    for wrong in ("0", 0.0, True, [0]):
        for name in ("rank", "world_size"):
            message(lambda name=name, wrong=wrong: Zero3Layer(nn.Linear(3, 3), **{name: wrong}),
                    TypeError, name)


@pytest.mark.parametrize("wrong", ["x", float("nan"), float("inf"), -1, 1.5, True, [3]])
def test_wrap_takes_numbers_of_elements(wrong):
    """
    Breaks where a NaN persists nothing and limits nothing, without a word.
    Proves `wrap`, `Zero3Model.mark_persistent_parameters`.
    """
    plain = nn.Sequential(nn.Linear(3, 3))
    for name in ("prefetch_numel", "max_live_numel", "persist_below_numel"):
        message(lambda name=name: wrap(plain, nn.Linear, **{name: wrong}), ValueError, name)
    for name in ("seed", "init"):
        if wrong != -1 or name == "init":
            message(lambda name=name: wrap(plain, nn.Linear, **{name: wrong}),
                    (ValueError, TypeError), name)
    model = wrap(plain, nn.Linear, prefetch_numel=0, max_live_numel=10**9)
    message(lambda: model.mark_persistent_parameters(wrong), ValueError, "below_numel")
    assert model.mark_persistent_parameters(100) == 12


# --------------------------------------------------------------------------------------- packaging

WITHOUT = """
import importlib, importlib.abc, runpy, sys
class Without(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in "labml labml_nn matplotlib torchvision torchtext".split():
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Without())
if sys.argv[1] == "-m":
    del sys.argv[:2]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
for name in sys.argv[1:] if sys.argv[0].endswith("without.py") else ():
    importlib.import_module(name)
"""


def without(folder, *arguments):
    """A Python in which the application's packages are not installed."""
    (folder / "without.py").write_text(WITHOUT)
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, folder / "without.py", *arguments], text=True,
                          capture_output=True, env={**os.environ, "PYTHONPATH": str(root)})


def test_the_library_imports_nothing_of_the_applications(tmp_path):
    """
    Every module but those that train the GPT and draw pictures; the job that does says which extra
    to install. Breaks where a chapter imports what `pip install zero3` does not bring.
    Proves `Parser.error`.
    """
    root = Path(__file__).parents[2]
    names = {path.stem for path in (root / "zero3").glob("*.py")} - {"gpt", "train", "report"}
    done = without(tmp_path, *sorted(f"zero3.{name}" for name in names))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    text = (root / "pyproject.toml").read_text()
    for name, packages in (("dependencies", ["torch", "numpy", "safetensors"]), ("app", APP)):
        (declared,) = re.findall(rf"^{name} = \[(.*?)\]", text, re.DOTALL | re.MULTILINE)
        assert re.findall(r'"([a-z-]+)', declared) == [p.replace("_", "-") for p in packages]
    done = without(tmp_path, "-m", "zero3.train", "--steps=2")
    assert "`pip install 'zero3[app]'`" in one_error(done.returncode, done.stderr)


# ------------------------------------------------------------------------------ limit on open files


def many_files(hard, folder):
    """Forty shards in files, with 16 descriptors to spare, and `hard` if asked for."""
    taken = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken + 16, taken + hard))
    nvme, layers = Offload("nvme", folder=folder, queue_depth=1), []
    try:
        for _ in range(40):
            layers.append(Zero3Layer(nn.Linear(2, 2), offload=nvme))
    except RuntimeError as error:
        return len(layers), str(error)
    x = torch.ones(1, 2)
    optimizer = Zero3Optimizer(Zero3Sequential(layers), lr=0.1, offload=nvme)
    optimizer.backward(optimizer.model(x).sum())
    optimizer.step()
    return len(layers), resource.getrlimit(resource.RLIMIT_NOFILE)[0] - taken


def test_more_layers_in_files_than_the_usual_limit_on_open_files(tmp_path):
    """
    The soft limit is raised to the hard one. Where that is too low, all ranks say so, with the
    rank, the layer, the limit and the cure. Breaks where 1,019 layers in files
    end with "Too many open files" under the limit that most systems begin with.
    Proves `Buffers.make_file`, `Buffers.new_file`.
    """
    assert run(many_files, 2, 1000, tmp_path) == [(40, 1000)] * 2
    for layers, error in run(many_files, 2, 60, tmp_path):
        assert 10 < layers < 40
        assert re.match(r"rank [01]: Linear cannot offload to ", error)
        assert "Got: [Errno 24] Too many open files" in error
        assert "raise the hard limit on open files (`ulimit -Hn`)" in error
        assert ", on rank " in error

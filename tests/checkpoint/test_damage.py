"""
# Checkpoints that somebody forged, two runs in one folder, ranks that disagree
"""

import errno
import fcntl
import io
import json
import os
import pickle
import signal
import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from tests.checkpoint.test_save_load import (
    contents,
    plain,
    refused,
    rewrite,
    same,
    shard,
    train,
    weights,
)
from tests.ranks import run
from zero3 import Zero3Layer, Zero3Optimizer, load, save, wrap
from zero3.checkpoint.convert import main
from zero3.checkpoint.entries import Entries
from zero3.checkpoint.formats import _MetadataUnpickler, check_name, from_tensors
from zero3.checkpoint.reader import (
    _LOCKED,
    MANIFEST,
    CheckpointReader,
    TensorFile,
    file_name,
    lock_folder,
    newest,
    read_block,
)
from zero3.checkpoint.save_load import _random_states
from zero3.guards.command_line import one_line
from zero3.offload.tensors import Broken, checksums

CLEAR = "\x1b[2J"  # clears a terminal's screen


def command(*args):
    return main([str(arg) for arg in args])


def dcp_folder(folder):
    """A small folder of DCP's, of weights alone."""
    with warnings.catch_warnings():
        # That nothing is distributed here.
        warnings.simplefilter("ignore")
        dcp.save({"weight": torch.ones(3)}, checkpoint_id=folder, no_dist=True)
    return folder


# -------------------------------------------------------------------------------------- hostile


@pytest.mark.parametrize("name, key", [
    ("w", "../../../escaped"), ("w", "/escaped"), ("..", "exp_avg"), ("a/../../escaped", "exp_avg"),
    ("w", "a\\b"), ("w", "fp32"), ("w", "step"),
])
def test_a_name_that_leads_out_of_its_folder_writes_nothing(tmp_path, capsys, name, key):
    """
    A checkpoint whose parameter or moment is called by a path, or by the name of another file of
    that folder, is refused before DeepSpeed's layout gets its first file. Breaks where the
    parameters' names alone are looked at.
    Proves `check_name`, `to_deepspeed`.
    """
    one, like = torch.ones(2), (torch.float32, (2,))
    from_tensors(tmp_path / "run", 0, {name: {"param": like, key: like}}, {}, lambda *_: one)
    assert command("universal", tmp_path / "run", tmp_path / "a" / "b" / "out") == 1
    told = capsys.readouterr().err
    words = "is another file's name" if key in ("fp32", "step") else "is not a valid name of"
    assert words in told
    assert not [*tmp_path.rglob("*.pt")] and not (tmp_path / "a").exists()


def test_names_are_checked_wherever_they_come_from(tmp_path, capsys):
    """
    In DeepSpeed's note of the newest folder, and in DCP's list of its files, a path is refused, and
    so are names that are empty or do not print.
    Proves `check_name`, `from_deepspeed`, `_read_metadata`.
    """
    for good in ("weight", "module.0.weight", "größe", "a b", "..a", "a..b"):
        assert check_name(good, as_path=True) == good
    assert check_name("a/b") == "a/b"
    for bad in ("", "\0", "a\nb", CLEAR, "\u202e"):
        with pytest.raises(Broken, match="is not a valid name of a parameter"):
            check_name(bad)
    for bad in (".", "..", "/", "a/b", "a\\b", ""):
        with pytest.raises(Broken, match="is not a valid name of a file"):
            check_name(bad, as_path=True)
    # DeepSpeed's and DCP's.
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "latest_universal").write_text("..")
    folder = dcp_folder(tmp_path / "dcp")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = "../dcp/__0_0.distcp"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    for source in ("ds", "dcp"):
        assert command("universal", tmp_path / source, tmp_path / "out") == 1
        assert "is not a valid name of a file or folder" in capsys.readouterr().err, source
    assert not (tmp_path / "out").exists()


class Hostile:
    """What a pickle of this runs is up to it."""

    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def test_what_is_in_dcps_metadata_is_not_run(tmp_path, capsys):
    """
    A `.metadata` that would open a file is refused by the name of what it asks for, alone and
    inside of what DCP has written, and nothing has been opened. DCP's own is read. Breaks with
    Python's `pickle.load`.
    Proves `_MetadataUnpickler`, `_read_metadata`.
    """
    folder = dcp_folder(tmp_path / "dcp")
    assert not command("universal", folder, tmp_path / "good")
    good = pickle.loads((folder / ".metadata").read_bytes())
    touched = tmp_path / "touched"
    for hostile in (Hostile(open, str(touched), "w"), Hostile(eval, "1"),
                    Hostile(getattr, "x", "upper"), Hostile(torch.load, "x")):
        for told in (hostile, {"state_dict_metadata": hostile}):
            (folder / ".metadata").write_bytes(pickle.dumps(told))
            capsys.readouterr()
            assert command("universal", folder, tmp_path / "out") == 1
            assert "which is none of DCP's records" in capsys.readouterr().err
        good.planner_data = hostile
        (folder / ".metadata").write_bytes(pickle.dumps(good))
        assert command("universal", folder, tmp_path / "out") == 1
    assert not touched.exists() and not (tmp_path / "out").exists()


def test_dcps_metadata_changes_no_class_of_torchs(tmp_path):
    """
    A `.metadata` that sets an attribute on a class sets it on a stand-in. Breaks where
    `find_class` hands out the class itself.
    Proves `_MetadataUnpickler`, `_make`.
    """
    # The class, a state, and the operation that sets it.
    parts = [pickle.dumps(each, protocol=0)[:-1] for each in (Metadata, (None, {"forged": 1}))]
    told = _MetadataUnpickler(io.BytesIO(b"".join([*parts, b"b."]))).load()
    assert told.forged == 1 and not hasattr(Metadata, "forged")
    good = Metadata({"a": BytesStorageMetadata()})
    again = _MetadataUnpickler(io.BytesIO(pickle.dumps(good))).load()
    assert type(again) is Metadata and again == good


def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, capsys):
    """
    A pipe in the place of a file, which nobody writes to. Breaks without `check_files`: the command
    then waits for ever.
    Proves `check_files`, `_read_manifest`.
    """
    for i, (command_name, name) in enumerate((
            ("universal", ".metadata"), ("export", MANIFEST), ("universal", "latest_universal"),
            ("verify", MANIFEST))):
        folder = tmp_path / f"{i}"
        folder.mkdir()
        os.mkfifo(folder / name)
        told = [command_name, folder, tmp_path / "out"]
        assert command(*told[: 2 if command_name == "verify" else 3]) == 1
        assert "is neither a file nor a folder" in capsys.readouterr().err
    model, optimizer = shard(plain())
    with pytest.raises(RuntimeError, match="is missing"):
        load(tmp_path / "1", model, optimizer)


def test_a_tensor_that_leaves_its_file_is_refused(tmp_path):
    """
    Its header, forged so that it ends behind the file, or before it begins.
    Proves `TensorFile.read_bytes`.
    """
    path = tmp_path / "file"
    for offsets in ([8, 800], [-800, 8], [8, 4]):
        header = {"a": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
        raw = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        file = TensorFile(path, 0, read_block, len(raw), checksums(raw))
        with pytest.raises(Broken, match=r"has no bytes|has no elements"):
            file.read("a")


def test_what_does_not_print_is_escaped(tmp_path, capsys):
    """
    A manifest with names that would clear the screen, or that have a line of their own: the command
    line and the errors have them escaped. Breaks where a name is printed as it is.
    Proves `one_line`, `print_escaped`, `Broken`, `load`.
    """
    assert one_line(f"ä {CLEAR}\n") == "ä \\x1b[2J\\n"
    model, optimizer = shard(plain())
    train(model, optimizer, 0)
    save(tmp_path / "run", model, optimizer, step=1)
    name = f"{CLEAR}\nwrote it"

    def forge(told):
        told["flats"][0]["layer"] = told["flats"][0]["params"][0]["names"][0] = name
        told["optimizer"]["class"] = f"AdamW{CLEAR}"

    rewrite(newest(tmp_path / "run"), forge)
    escaped = "\\x1b[2J\\nwrote it"
    for what in (("universal", tmp_path / "out"), ("verify",), ("export", tmp_path / "out")):
        command(what[0], tmp_path / "run", *what[1:])
        told = capsys.readouterr()
        assert CLEAR not in told.out + told.err and "\nwrote" not in told.out + told.err
        assert escaped in told.out + told.err or what[0] in ("verify", "export")
    with pytest.raises(RuntimeError) as error:
        load(tmp_path / "run", model, optimizer)
    assert CLEAR not in str(error.value)
    (tmp_path / f"x{CLEAR}").mkdir()
    assert command("verify", tmp_path / f"x{CLEAR}") == 1
    assert CLEAR not in capsys.readouterr().err


# --------------------------------------------------------------------------------- command line


def test_the_command_line_ends_in_one_line_whatever_it_is_given(tmp_path, capsys):
    """
    Arguments that are none, and folders with anything in them: an error in a line, and exit status
    1 or 2, and no checkpoint. Breaks where an exception that nobody thought of goes through.
    Proves `convert.main`, `verify`.
    """
    model, _ = shard(nn.Sequential(nn.Linear(2, 2)))
    save(tmp_path / "run", model, step=1)
    pickles = b"", b"hello", b"\x80\x05.", b"cnosuch.module\nx\n.", pickle.dumps(3)
    for i, raw in enumerate(pickles):
        (tmp_path / f"dcp{i}").mkdir()
        (tmp_path / f"dcp{i}" / ".metadata").write_bytes(raw)
        assert command("universal", tmp_path / f"dcp{i}", tmp_path / "out") == 1
    told = capsys.readouterr()
    assert told.err.count("zero3.checkpoint ") == len(told.err.splitlines()) == 5
    assert not told.out and not (tmp_path / "out").exists()
    for args in (("verify",), ("export", tmp_path / "run")):
        with pytest.raises(SystemExit) as error:
            command(*args)
        assert error.value.code == 2 and len(capsys.readouterr().err.splitlines()) < 7
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------- all or nothing, in one process


def poison(path, change, file_change=None):
    """What a manifest says, and what a rank's file has, otherwise; with the right checksums."""
    if file_change:
        file = path / file_name(0, 1)
        raw = file.read_bytes()
        assert raw.count(file_change[0]) == 1 and len(file_change[0]) == len(file_change[1])
        raw = raw.replace(*file_change)
        file.write_bytes(raw)
        found = checksums(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
        rewrite(path, lambda told: told["files"][0].update(crc32=found))
    rewrite(path, change)


def random_numbers():
    """The states of the generators of this process"""
    found = _random_states(torch.device("cpu"))
    return {**found, "torch": found["torch"].tolist()}


def test_what_would_poison_the_optimizer_changes_nothing(tmp_path):
    """
    Options of param groups, what the optimizer counts, its loss scale and the random numbers'
    states, each made something of another type, shape or kind, or left out: refused, with the
    weights, the options and the states as before, and the next step is taken. Breaks where an
    option is taken over as it stands, or a state is first set after the weights are there.
    Proves `Entries._check_optimizer`, `Entries._check_options`, `_check_states`, `_kind`,
    `_check_random_states`, `load`.
    """
    model, optimizer = shard(plain())
    train(model, optimizer, 0)
    save(tmp_path / "run", model, optimizer, step=1)
    path = newest(tmp_path / "run")
    good = {name: (path / name).read_bytes() for name in (MANIFEST, file_name(0, 1))}

    def option(key, value):
        return lambda told: told["optimizer"]["groups"][0].update({key: value})

    def scale(key, value):
        return lambda told: told["optimizer"]["scale"].update({key: value})

    def state(change):
        return lambda told: [change(each) for flat in told["flats"] for each in flat["states"]]

    nothing = lambda told: None  # noqa: E731
    cases = [(option(key, value), None) for key, value in (
        ("lr", "x"), ("lr", float("nan")), ("lr", float("inf")), ("lr", True),
        ("params", []), ("fused", "x"), ("betas", [0.9]),
        ("betas", 0.9), ("maximize", "yes"), ("eps", None), ("weight_decay", [1]),
        ("weight_decay", {"__tensor__": "0000803f0000803f", "dtype": "F32", "shape": [2]}),
        ("initial_lr", "x"), ("more", {"a": 1}))]
    cases += [(scale(key, value), None) for key, value in (
        ("step", 5), ("loss_scale", 0), ("loss_scale", float("nan")), ("loss_scale", "x"),
        ("good_steps", -1), ("good_steps", 0.5), ("skipped_steps", None))]
    cases += [(state(change), None) for change in (
        lambda each: each["scalars"].update(step="x"), lambda each: each["scalars"].update(step=1),
        lambda each: each["scalars"].update(
            step={"__tensor__": "0000c07f", "dtype": "F32", "shape": []}),
        lambda each: each.update(moments=[]), lambda each: each.update(scalars={}),
        lambda each: each["moments"].append("exp_avg_cubed"))]
    cases += [(lambda told: [flat.update(states=[]) for flat in told["flats"]], None),
              (option("weight_decay", 1 << 64), None)]
    cases += [(nothing, (b"MT19937", b"MT19936")),
              (nothing, (rb'\"python\": {\"__tuple__\": [3,', rb'\"python\": {\"__tuple__\": [9,')),
              (nothing, (rb'\"python\"', rb'\"pythom\"'))]
    model, optimizer = shard(plain(1))
    for i, (change, file_change) in enumerate(cases):
        poison(path, change, file_change)
        before = repr([{**g, "params": 0} for g in optimizer.param_groups]), vars(optimizer).keys()
        drawn = random_numbers()
        try:
            refused(path, model, optimizer)
        except BaseException as error:
            raise AssertionError(f"case {i}") from error
        after = repr([{**g, "params": 0} for g in optimizer.param_groups]), vars(optimizer).keys()
        assert before == after, i
        assert random_numbers() == drawn, i
        assert all(p.isfinite().all() for p in weights(model).values()), i
        for name, raw in good.items():
            (path / name).write_bytes(raw)
    load(path, model, optimizer)


def forge_entry(of, key, change, told):
    of(told).update(change)
    if not change:
        del of(told)[key]


def test_a_manifest_with_other_entries_is_refused_by_its_name(tmp_path):
    """
    An entry that is missing, one that nobody knows, and one of another type, at every level. Breaks
    where a `TypedDict` and the check of it differ.
    Proves `_check_types`, `Manifest`, `FlatEntry`, `ParamEntry`, `StatesEntry`.
    """
    model, optimizer = shard(plain())
    train(model, optimizer, 0)
    save(tmp_path / "run", model, optimizer, step=1)
    path = newest(tmp_path / "run")
    good = (path / MANIFEST).read_bytes()
    at = {"": lambda told: told, "flats": lambda told: told["flats"][0],
          "params": lambda told: told["flats"][0]["params"][0],
          "states": lambda told: told["flats"][0]["states"][0],
          "optimizer": lambda told: told["optimizer"]}
    for of in at.values():
        for key in of(json.loads(good)):
            if key in ("crc32", "extra", "place", "places", "param_group", "part", "optimizer"):
                # What may be missing, and the checksum, which is written anew.
                continue
            if of is at["states"] and key == "params":
                # It may be missing, too: in older checkpoints it was, if all have the same states.
                continue
            for change in ({}, {"new": 1}, {key: 0.5}):
                rewrite(path, partial(forge_entry, of, key, change))
                with pytest.raises(Broken, match=MANIFEST):
                    CheckpointReader(path)
                (path / MANIFEST).write_bytes(good)
    # The values of options are the checkpoint's own, and only their kinds are compared.
    rewrite(path, lambda told: told["optimizer"]["groups"][0].update(lr=-1.0))
    load(path, model, optimizer)
    assert optimizer.param_groups[0]["lr"] == -1.0
    # Older checkpoints have no list of parameters if all of a param group have the same states.
    expected = contents(path.parent)
    rewrite(path, lambda told: [each.pop("params") for flat in told["flats"]
                                for each in flat["states"]])
    assert same(contents(path.parent), expected)
    load(path, model, optimizer)


def test_options_that_are_right_come_back(tmp_path):
    """
    Those that a scheduler has added, a learning rate in a tensor, an `eps` of zero and integers for
    numbers; by torch's optimizers too, and by one of somebody's own with an argument that no option
    names. Breaks where a check is stricter than the optimizer.
    Proves `Entries._first_state`, `first_state`, `Entries._take_options`, `_kind`.
    """
    class Own(torch.optim.SGD):
        def __init__(self, params, must, **kwargs):
            super().__init__(params, **kwargs)

    made = [(torch.optim.AdamW, {"lr": torch.tensor(0.01), "eps": 0}),
            (torch.optim.SGD, {"lr": 1, "momentum": 0.5, "nesterov": True}),
            (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "eps": 0}),
            (torch.optim.Adagrad, {"lr": 0.01}), (torch.optim.NAdam, {"lr": 0.01}),
            (torch.optim.Rprop, {"lr": 0.01}), (torch.optim.ASGD, {"lr": 0.01}),
            (Own, {"must": 1, "lr": 0.01})]
    for i, (cls, options) in enumerate(made):
        pairs = []
        for seed in (0, 1):
            model, _ = shard(plain(seed))
            if i % 2:
                pairs.append((model, Zero3Optimizer(model, cls, **options)))
            else:
                pairs.append((model, cls(model.get_trainable_chunk(), **options)))
        (model, optimizer), (other, its) = pairs
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(model, optimizer, 0)
        scheduler.step()
        save(tmp_path / f"{i}", model, optimizer, step=1)
        load(tmp_path / f"{i}", other, its)
        assert its.param_groups[0]["initial_lr"] == optimizer.param_groups[0]["initial_lr"]
        for pair in pairs:
            train(*pair, 1)
        assert same(weights(model), weights(other)), cls


# ---------------------------------------------------------------------------- one module, two names


class Normed(nn.Module):
    """With buffers of its own"""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x):
        return self.norm(self.linear(x))


class Twice(nn.Module):
    """One module under three names, in two places"""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.one = self.two = Normed()
        self.rest = nn.Sequential(self.one, nn.Linear(2, 2))

    def forward(self, x):
        return self.rest(self.two(torch.tanh(self.one(x))))


def sharded(kind, seed=0):
    if kind == "layer":
        return Zero3Layer(Twice(seed))
    return wrap(Twice(seed), Normed if kind == "unit" else nn.Sequential)


@pytest.mark.parametrize("kind", ["layer", "unit", "wrap"])
def test_a_module_under_two_names_has_both_everywhere(tmp_path, kind):
    """
    In the full parameters, in a checkpoint and in an export, parameters and buffers; another model
    loads them by either, also where the checkpoint has one name of each, and a step on it is that
    of plain PyTorch. Breaks with `named_children`, which drops the second name.
    Proves `own_modules`, `plain_names`, `Entries._names`, `Entries.check`.
    """
    x, plainly, model = torch.randn(4, 2), Twice(), sharded(kind)
    for each in (plainly, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1)
        each(x).square().sum().backward()
        optimizer.step()
    expected = plainly.state_dict()
    found = weights(model)
    assert found.keys() == {n for n, _ in plainly.named_parameters(remove_duplicate=False)}
    assert all(torch.allclose(found[name], expected[name]) for name in found)
    save(tmp_path / "run", model, step=1)
    assert not command("export", tmp_path / "run", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors"
    with safe_open(file, "pt") as opened:
        aliases = {name: of for name, of in opened.metadata().items() if name != "format"}
    there = load_file(file)
    there |= {name: there[of] for name, of in aliases.items()}
    assert there.keys() == expected.keys()
    assert all(torch.allclose(there[name], expected[name]) for name in expected)

    def first_names(told):
        # As checkpoints had it that were saved before.
        told["replicated"] = {name: place for name, place in told["replicated"].items()
                              if name.startswith("one.")}
        for flat in told["flats"]:
            for each in flat["params"]:
                each["names"] = each["names"][:1]

    for change in (lambda told: None, first_names):
        rewrite(newest(tmp_path / "run"), change)
        other = sharded(kind, 1)
        load(tmp_path / "run", other)
        assert same(weights(other), found)
        assert torch.equal(dict(other.named_buffers())[next(
            name for name, _ in other.named_buffers() if name.endswith("running_mean"))],
            there["one.norm.running_mean"])


# --------------------------------------------------------------------------- two runs in one folder


def saves_beside(folder):
    """Another process: it may load, and may not save."""
    model, optimizer = shard(plain(1))
    messages = []
    try:
        save(folder, model, optimizer, step=2)
    except RuntimeError as error:
        messages.append(str(error))
    load(folder, model, optimizer)
    if not dist.get_rank():
        # A child by `fork` does not keep the lock after this process.
        save(folder.parent / "mine", model.module_list[0], step=1)
        pid = os.fork()
        if not pid:
            os._exit(len(_LOCKED))
        messages.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    return messages


def saves_and_is_killed(folder):
    model, optimizer = shard(plain())
    save(folder, model, optimizer, step=1)
    save(folder, model, optimizer, step=2, async_write=True)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_second_run_in_a_folder_is_refused(tmp_path, capsys):
    """
    On all of its ranks; the first one's save that is under way is not touched, and the other may
    load. A process that is killed holds nothing any more, and no file of a lock is left. Breaks
    where `clean_up_interrupted_saves` takes another run's files for leftovers.
    Proves `lock_folder`, `_drop_inherited_locks`, `make_output_folder`, `Saving.begin`,
    `Saving._on_all_ranks`.
    """
    folder = tmp_path / "run"
    with pytest.raises(AssertionError, match="ended without an answer"):
        run(saves_and_is_killed, 1, folder)
    assert sorted(os.listdir(folder)) == ["step-00000001", "step-00000002.partial"]
    model, optimizer = shard(plain())
    save(folder, model, optimizer, step=1)
    saving = save(folder, model, optimizer, step=2, async_write=True)
    found = run(saves_beside, 1, folder)[0]
    who = f"another run saves its checkpoints to {folder}"
    assert who in found[0] and "choose another folder" in found[0] and found[1:] == [0]
    assert saving.wait() == folder / "step-00000002"
    save(folder, model, optimizer, step=3)
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000003"]
    # What is another format's goes elsewhere.
    for what in (("export",), ("universal",), ("universal", "--format", "dcp")):
        assert command(what[0], folder, folder, *what[1:]) == 1
        assert "has checkpoints in it" in capsys.readouterr().err
    assert sorted(os.listdir(folder)) == ["step-00000002", "step-00000003"]


def test_a_run_with_many_folders_keeps_few_of_them_open(tmp_path):
    """
    The `Trainer` has a folder for each checkpoint. The last one is locked. Breaks where every lock
    is kept: after a thousand checkpoints the system opens no more files.
    Proves `lock_folder`.
    """
    folders = [tmp_path / f"{i}" for i in range(200)]
    before = len(os.listdir("/proc/self/fd"))
    for folder in folders:
        folder.mkdir()
        lock_folder(folder)
    assert len(os.listdir("/proc/self/fd")) <= before + 64
    fd = os.open(folders[-1], os.O_RDONLY)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)


def test_a_file_system_that_locks_no_folder_gets_a_warning(tmp_path, monkeypatch):
    """
    And the checkpoint. Breaks where the error of the lock is the run's, or nothing is said.
    Proves `lock_folder`.
    """
    def refuses(*_):
        raise OSError(errno.EBADF, "Bad file descriptor")

    monkeypatch.setattr(fcntl, "flock", refuses)
    model, _ = shard(plain())
    with pytest.warns(UserWarning, match="cannot be locked here .*: make sure that no other run"):
        save(tmp_path / "run", model, step=1)
    assert newest(tmp_path / "run")


# -------------------------------------------------------------------------------- ranks that differ


def calls_otherwise(folder):
    """Rank 1 does something else than rank 0; what each of them is told."""
    model, optimizer = shard(plain())
    save(folder, model, optimizer, step=1)
    other = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    good = {"folder": folder, "model": model, "optimizer": optimizer, "step": 2}
    messages = []
    for what, bad in ((save, {"step": -1}), (save, {"keep": 0}), (save, {"step": "x"}),
                      (save, {"extra": lambda: 0}), (save, {"model": nn.Linear(2, 2)}),
                      (save, {"optimizer": other}), (save, {"folder": None}),
                      (save, {"step": 3}), (save, {"folder": folder.parent / "b"}),
                      (save, {"async_write": True}), (save, {"optimizer": None}),
                      (load, {"folder": folder.parent / "b"}), (load, {"model": nn.Linear(2, 2)})):
        told = {**good, **(bad if dist.get_rank() else {})}
        if what is load:
            told.pop("step")
        try:
            what(told.pop("folder"), told.pop("model"), told.pop("optimizer"), **told)
            messages.append("")
        except (RuntimeError, TypeError) as error:
            messages.append(str(error))
    # As if nothing had been: a link is the same folder.
    if not dist.get_rank():
        (folder.parent / "link").symlink_to(folder)
    dist.barrier()
    save(folder.parent / "link" if dist.get_rank() else folder, model, optimizer, step=2)
    load(folder, model, optimizer)
    return messages, sorted(os.listdir(folder))


def test_a_rank_that_is_called_otherwise_is_named_on_all(tmp_path):
    """
    One that raises over its arguments, and one that saves another step or loads another folder: the
    error on the others has its rank and its cause, and it has its own. Breaks where one raises
    before the others are there, who then wait for ever.
    Proves `all_here`, `save_load.save`, `load`, `Communicator.use`.
    """
    (first, names), (second, _) = run(calls_otherwise, 2, tmp_path / "run")
    assert names == ["step-00000001", "step-00000002"]
    causes = ["Got: -1 and 2", "Got: 2 and 0", "cannot be interpreted as an integer",
              "`extra` is a function", "Got: Linear", "one of this model's shards", "NoneType"]
    for mine, theirs, cause in zip(first, second, causes, strict=False):
        assert "on rank 1" in mine and cause in mine and cause in theirs, mine
        assert mine.startswith("rank 0: ")
    differences = ["2 on rank 0, and 3 on rank 1", f"'{tmp_path}/b' on rank 1", "True on rank 1",
                   "'AdamW' on rank 0, and None on rank 1", f"'{tmp_path}/b' on rank 1"]
    for mine, theirs, told in zip(first[7:12], second[7:12], differences, strict=True):
        assert told in mine and told in theirs and "What to do: call it alike" in mine
    assert "on rank 1. What to do" in first[12] and "Got: Linear" in second[12]


def is_damaged_meanwhile(folder):
    """Between the two times that a load reads a file, on one rank."""
    model, optimizer = shard(plain())
    save(folder, model, optimizer, step=1)
    take = Entries.take

    def broken(self, *args):
        if dist.get_rank():
            raise OSError(errno.EIO, "Input/output error")
        take(self, *args)

    Entries.take = broken
    try:
        load(folder, model, optimizer)
    except RuntimeError as error:
        return str(error)


def test_what_breaks_after_all_was_whole_is_told_to_all_ranks(tmp_path):
    """
    Breaks where one rank raises in `take` and the others go on to the next collective.
    Proves `load`.
    """
    for told in run(is_damaged_meanwhile, 2, tmp_path):
        assert "was whole, and then was not" in told and "error, on rank 1" in told

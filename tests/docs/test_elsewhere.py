"""
# The notes about FSDP2 and DeepSpeed: each names a section of ours and functions of theirs
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

pytest.importorskip("pygments", reason="the libraries of the site are not installed")

import zero3
from docs import elsewhere
from docs.annotate import Names, Source

ROOT = Path(__file__).parents[2]
DEEPSPEED = os.environ.get("ZERO3_DEEPSPEED_PYTHON")
# The versions that were read, as the table of the page says.
READ = dict(re.findall(r"^\| (FSDP2|DeepSpeed) \| (?:torch )?([\d.]+) \|",
                       elsewhere.NOTES.read_text(encoding="utf-8"), re.MULTILINE))


@pytest.fixture(scope="module")
def names():
    """The definitions of the package, as the site finds them."""
    package = Path(zero3.__file__).parent
    return Names([Source(path) for path in sorted(package.rglob("*.py")) if path.stat().st_size])


def release(version):
    """The first two numbers of a version"""
    return version.split(".")[:2]


def test_each_note_belongs_to_a_section_of_the_package(names):
    """
    The name above a note is that of one class or function, and it has a docstring, which the note
    is shown beside. Breaks if a function is renamed and the note is not.
    """
    for key in elsewhere.notes():
        found = names.find(key)
        assert found is not None, f"`{key}` is not in the package, or ambiguous"
        assert found[1] in names.sources[found[0]].sections, f"`{key}` has no section"


def test_a_name_of_theirs_does_not_become_a_link_to_ours(names):
    """
    The site links a name in backticks if the package has it. Breaks if a note uses such a name for
    a function of another library.
    """
    files = {source.path.name for source in names.sources.values()}
    for key, note in elsewhere.notes().items():
        for library, text in elsewhere.statements(note).items():
            for name in re.findall(r"`([^`]+)`", text):
                assert not names.find(name.removesuffix("()")), (key, library, name)
                assert name not in files, (key, library, name)


def test_a_note_has_at_most_two_sentences_on_each_library():
    """
    And it ends with a link to where each was read. Breaks if somebody writes an essay, or forgets
    the source.
    """
    for key, note in elsewhere.notes().items():
        said = elsewhere.statements(note)
        assert said and [*said] == [name for name in elsewhere.LIBRARIES if name in said], key
        for (library, text), paragraph in zip(said.items(), note.split("\n\n"), strict=True):
            # A full stop inside backticks, as in `torch.empty`, ends no sentence.
            plain = re.sub(r"`[^`]*`", "name", text)
            assert text.endswith("."), (key, library)
            assert 1 <= len(re.findall(r"[.?!](?= |$)", plain)) <= 2, (key, library, text)
            repository = {"FSDP2": "/pytorch/pytorch", "DeepSpeed": "/deepspeedai/DeepSpeed"}
            assert elsewhere.places(paragraph), (key, library)
            for place in elsewhere.places(paragraph):
                assert place.repository == "https://github.com" + repository[library], key
                assert place.version == READ[library], place
            # No link is left that the pattern does not know.
            assert "](" not in text, (key, library)


def test_the_notes_are_about_the_torch_that_is_pinned():
    """
    Breaks if the pin moves to another release and nobody has read FSDP2 again.
    """
    pinned = re.search(r"^torch==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert release(pinned[1]) == release(READ["FSDP2"])


def test_every_function_of_torch_is_where_the_link_says():
    """
    In the installed torch, if it is of the release that was read. Breaks if a link names a function
    that does not exist, or another line.
    """
    version = elsewhere.installed_torch()
    if release(version) != release(READ["FSDP2"]):
        pytest.skip(f"the notes are about torch {READ['FSDP2']}, and {version} is installed")
    wrong = elsewhere.problems(Path(torch.__file__).parent, "pytorch", version)
    assert not wrong, wrong


@pytest.mark.skipif(not DEEPSPEED, reason="set ZERO3_DEEPSPEED_PYTHON to the python of an "
                    "environment with DeepSpeed")
def test_every_function_of_deepspeed_is_where_the_link_says():
    """
    In the DeepSpeed of the environment that the other tests use. Breaks as the test of torch does.
    """
    # Finding a package does not import it, so this needs neither a GPU nor a compiler.
    asked = ("import importlib.metadata as m, importlib.util as u; print(m.version('deepspeed')); "
             "print(u.find_spec('deepspeed').submodule_search_locations[0])")
    answer = subprocess.run([DEEPSPEED, "-c", asked], capture_output=True, text=True, check=True)
    version, folder = answer.stdout.split("\n")[:2]
    assert release(version) == release(READ["DeepSpeed"])
    wrong = elsewhere.problems(Path(folder), "DeepSpeed", version)
    assert not wrong, wrong


def test_a_link_that_leads_nowhere_is_found(tmp_path):
    """
    A function that a file does not define has no line, and a declaration is no definition. Breaks
    if `line_of` finds any mention of the name.
    """
    source = tmp_path / "one.py"
    source.write_text("class A:\n    def f(self):\n        g()\n\n\n@d\ndef h():\n    pass\n")
    assert elsewhere.line_of(source, "A.f") == 2
    assert elsewhere.line_of(source, "h") == 7
    assert elsewhere.line_of(source, "g") is None
    assert elsewhere.line_of(source, "A.h") is None
    source = tmp_path / "one.cpp"
    source.write_text("int f(int);\nint f(int x)\n{\n  return g(x);\n}\n")
    assert elsewhere.line_of(source, "f") == 2
    assert elsewhere.line_of(source, "g") is None


def test_an_entry_without_a_section_is_an_error(tmp_path):
    """
    Breaks if such a note is silently left out of the pages.
    """
    path = tmp_path / "notes.md"
    path.write_text("# T\n\n## Part\n\n### One\n\n`A.f`\n\n**FSDP2** does it.\n\n## Next\n")
    assert elsewhere.notes(path) == {"A.f": "**FSDP2** does it."}
    for text in ("### Two\n\nno name\n", "### One\n\n`A.f`\n\nagain\n"):
        path.write_text("### One\n\n`A.f`\n\n**FSDP2** does it.\n\n" + text)
        with pytest.raises(ValueError, match="needs the name of a section"):
            elsewhere.notes(path)

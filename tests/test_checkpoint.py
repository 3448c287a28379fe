"""The converted directory: what it refuses to overwrite, what a killed process leaves, kinds of damage."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from convert.builders import numpy_weights, write_directory

import tide_jax as tide
from tide_jax.checkpoint import MANIFEST, read_manifest, read_parameters
from tide_jax.errors import InputError

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("converted")
    tide.convert(write_directory(directory / "hf"), directory / "model")
    return directory


@pytest.fixture
def source(converted) -> Path:
    return converted / "hf"


@pytest.fixture
def model(converted, tmp_path) -> Path:
    """A converted model that may be damaged."""
    return Path(shutil.copytree(converted / "model", tmp_path / "model"))


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_an_existing_model_is_replaced_only_when_asked(source, model, tmp_path):
    (model / "notes").write_text("mine")
    before = content(model)
    with pytest.raises(InputError, match=r"model exists already\. Give --overwrite"):
        tide.convert(source, model)
    assert content(model) == before
    manifest = tide.convert(source, model, dtype="bfloat16", overwrite=True)
    assert read_manifest(model) == manifest and manifest.dtype == "bfloat16"
    assert names(tmp_path) == ["model"] and "notes" not in names(model)


def test_nothing_foreign_is_ever_removed(source, tmp_path):
    foreign, file, empty, link = (tmp_path / name for name in ("foreign", "file", "empty", "link"))
    foreign.mkdir()
    empty.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    file.write_text("a file")
    link.symlink_to(foreign)
    for target in (foreign, file, link):
        for overwrite in (False, True):
            with pytest.raises(InputError, match="exists already" if not overwrite else "not a converted model"):
                tide.convert(source, target, overwrite=overwrite)
    for text in (
        "{}",
        "{",
        "[]",
        '{"format": "another-1"}',
        '{"format": 3}',
    ):  # a tide.json, but not one of ours
        (foreign / MANIFEST).write_text(text)
        with pytest.raises(InputError, match="not a converted model"):
            tide.convert(source, foreign, overwrite=True)
    assert (foreign / "thesis.tex").read_text() == "years of work" and file.read_text() == "a file"
    with pytest.raises(InputError, match="exists already"):
        tide.convert(source, empty)
    tide.convert(source, empty, overwrite=True)
    assert names(tmp_path) == ["empty", "file", "foreign", "link"]


def test_hidden_directories_that_no_conversion_made(source, model, tmp_path):
    for name in (".model.part", ".model.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
        with pytest.raises(InputError, match=rf"{name}.* is in the way, and no conversion made it"):
            tide.convert(source, model, overwrite=True)
        assert (tmp_path / name / "thesis.tex").read_text() == "years of work"
        shutil.rmtree(tmp_path / name)


def test_a_rename_that_fails_leaves_the_earlier_model(source, model, tmp_path, monkeypatch):
    before, rename = content(model), Path.rename

    def failing(path, target):
        if path.name == ".model.part":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(InputError, match="cannot be written .*Input/output error"):
        tide.convert(source, model, overwrite=True)
    assert content(model) == before and names(tmp_path) == ["model"]


def test_the_source_is_not_a_target(source):
    before = content(source)
    with pytest.raises(InputError, match="not a converted model"):
        tide.convert(source, source, overwrite=True)
    assert content(source) == before


def test_parents_that_cannot_be_written_to(source, tmp_path):
    (tmp_path / "file").write_text("")
    for target in (tmp_path / "no" / "model", tmp_path / "file" / "model"):
        with pytest.raises(InputError, match=f"{target.parent} is not a directory. Create it first"):
            tide.convert(source, target)
    with pytest.raises(InputError, match=r"/proc/model cannot be written \(.*Check the permissions of /proc"):
        tide.convert(source, "/proc/model")


def test_odd_names(source, tmp_path, monkeypatch):
    """Characters that a glob pattern would interpret, and a name that is relative."""
    other = tmp_path / ".model1.part"
    other.mkdir()
    (other / "kept").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in ("model[1]", "*", "./sub/../here"):
        tide.convert(source, name)
    assert names(tmp_path) == ["*", ".model1.part", "here", "model[1]"] and (other / "kept").exists()


KILLED = """
import os, pathlib, signal, sys
import tide_jax
import tide_jax.checkpoint as checkpoint
source, target, moment = sys.argv[1:]
def killing_after(function, wanted):
    calls = 0
    def replaced(*args, **kwargs):
        nonlocal calls
        result = function(*args, **kwargs)
        calls += 1
        if calls == wanted:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    return replaced
if moment == "third part":
    checkpoint.save_tree = killing_after(checkpoint.save_tree, 3)
else:
    put = checkpoint._put_in_place
    def wrapped(beside, target):  # from here on, since orbax renames too
        wanted = {"first rename": 1, "second rename": 2}[moment]
        pathlib.Path.rename = killing_after(pathlib.Path.rename, wanted)
        put(beside, target)
    checkpoint._put_in_place = wrapped
tide_jax.convert(source, target, dtype="bfloat16", overwrite=True)
"""


def kill(source: Path, target: Path, moment: str) -> None:
    """Convert to bfloat16 in another process, which dies at that moment."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", KILLED, str(source), str(target), moment]
    done = subprocess.run(command, env=environment, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()


def test_killed_while_writing(source, tmp_path):
    target = tmp_path / "model"
    kill(source, target, "third part")
    assert names(tmp_path) == [".model.part"]
    with pytest.raises(InputError, match="is not a converted model: it does not exist"):
        tide.load(target)
    tide.convert(source, target)
    assert names(tmp_path) == ["model"]
    tide.load(target)


@pytest.mark.parametrize(
    ("moment", "left", "dtype"),
    [
        ("third part", [".model.part", "model"], "float32"),
        ("first rename", [".model.old", ".model.part"], "float32"),
        ("second rename", [".model.old", "model"], "bfloat16"),
    ],
)
def test_killed_while_overwriting(moment, left, dtype, source, model, tmp_path):
    """At every moment one of the two models is whole, and the next conversion brings it back or clears up."""
    kill(source, model, moment)
    assert names(tmp_path) == left
    if "model" not in left:
        with pytest.raises(
            InputError, match=r"interrupted overwrite left the earlier model in .*\.model\.old: rename it"
        ):
            tide.load(model)
        with pytest.raises(InputError, match="exists already"):
            tide.convert(source, model)
    assert read_manifest(model).dtype == dtype
    assert tide.load(model, dtype="float32").fingerprint == read_manifest(model).fingerprint
    tide.convert(source, model, dtype="float16", overwrite=True)
    assert names(tmp_path) == ["model"] and read_manifest(model).dtype == "float16"


def test_two_conversions_to_one_target(source, tmp_path, monkeypatch):
    import tide_jax.checkpoint as checkpoint

    save, refused = checkpoint.save_tree, []

    def second(*args):
        if not refused:
            with pytest.raises(InputError, match="model is being written by another process") as error:
                tide.convert(source, tmp_path / "model")
            refused.append(error)
        save(*args)

    monkeypatch.setattr(checkpoint, "save_tree", second)
    tide.convert(source, tmp_path / "model")
    assert refused and names(tmp_path) == ["model"]
    tide.load(tmp_path / "model")


def edit(**changes):
    def damage(model):
        data = json.loads((model / MANIFEST).read_text())
        for path, value in changes.items():
            *outer, last = path.split("__")
            place = data
            for key in outer:
                place = place[key]
            place.pop(last) if value is ... else place.update({last: value})
        (model / MANIFEST).write_text(json.dumps(data))

    return damage


def array_file(model: Path, name: str) -> Path:
    """The largest file of a part: the values of its largest array."""
    return max((model / "weights" / name).rglob("*"), key=lambda path: path.stat().st_size if path.is_file() else -1)


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda m: (m / MANIFEST).unlink(), r"is not a converted model: it holds no tide\.json"),
        (lambda m: (m / MANIFEST).write_text("{"), "tide.json is damaged"),
        (lambda m: (m / MANIFEST).write_text("[" * 100000), "tide.json is damaged"),
        (lambda m: (m / MANIFEST).write_bytes(b"\xff\xfe"), "tide.json is damaged"),
        (lambda m: (m / MANIFEST).write_text("[]"), "tide.json is damaged"),
        (lambda m: (m / MANIFEST).write_text("{}"), "tide.json is damaged .*format"),
        (
            edit(format="tide-checkpoint-9"),
            "has format 'tide-checkpoint-9', this version reads 'tide-checkpoint-2'",
        ),
        (edit(config=...), "damaged .*config"),
        (edit(config__num_layers=2), "damaged .*'parts'"),
        (edit(config__num_layers=10**9), "damaged .*'parts'"),
        (edit(config__num_layers="3"), "damaged .*num_layers"),
        (edit(config__hidden_size=40), "damaged .*'fingerprint'"),
        (edit(config__unknown=1), "damaged .*unknown"),
        (edit(config__family="qwen9"), "damaged .*'family'"),
        (edit(dtype="int8"), "damaged .*'dtype'"),
        (edit(dtype=["float32"]), "damaged .*'dtype'"),
        (edit(eos_ids=["x"]), "damaged .*'eos_ids'"),
        (edit(eos_ids=3), "damaged"),
        (edit(parts=["embedding"]), "damaged"),
        (edit(parts__layer_001=...), "damaged .*'parts'"),
        (edit(parts__layer_001="0"), "damaged .*'fingerprint'"),
        (edit(files__layer_001="0"), "layer_001 is damaged"),
        (edit(files=...), "damaged .*files"),
        (edit(source=3), "damaged .*'source'"),
        (edit(fingerprint=...), "damaged .*fingerprint"),
        (
            lambda m: shutil.rmtree(m / "weights" / "layer_001"),
            "layer_001 is missing: the converted model is incomplete",
        ),
        (lambda m: shutil.rmtree(m / "weights"), "embedding is missing"),
        (lambda m: os.truncate(array_file(m, "layer_001"), 100), "layer_001 is damaged"),
        (lambda m: os.truncate(array_file(m, "embedding"), 0), "embedding is damaged"),
        (lambda m: array_file(m, "layer_002").unlink(), "layer_002 is damaged"),
        (lambda m: flip(array_file(m, "final")), "final is damaged: the digest of its files is"),
        (
            lambda m: [os.truncate(p, 3) for p in (m / "weights/final").rglob("*") if p.is_file()],
            "final is damaged",
        ),
        (
            lambda m: (
                shutil.rmtree(m / "weights/layer_001"),
                shutil.copytree(m / "weights/layer_000", m / "weights/layer_001"),
            ),
            "layer_001 is damaged: the digest of its files is",
        ),
        (
            lambda m: (
                shutil.rmtree(m / "weights/layer_001"),
                shutil.copytree(m / "weights/final", m / "weights/layer_001"),
            ),
            "layer_001 is damaged: the digest of its files is",
        ),
        (lambda m: shutil.rmtree(m / "tokenizer"), "tokenizer"),
    ],
)
def test_damage_is_named_with_its_remedy(damage, message, model):
    damage(model)
    with pytest.raises(InputError, match=message) as error:
        tide.load(model)
    assert str(model) in str(error.value)
    assert "tokenizer" in message or "onvert" in str(error.value)


def test_a_manifest_of_another_model_is_refused(model):
    manifest = read_manifest(model)
    other = dataclasses.replace(manifest, config=dataclasses.replace(manifest.config, ffn_size=53))
    with pytest.raises(InputError, match=r"layer_000 does not fit the config in tide\.json: it holds .*\(52, 36\)"):
        read_parameters(model, other, np.dtype("float32"))


def test_a_failed_conversion_leaves_nothing(source, tmp_path, monkeypatch):
    import tide_jax.checkpoint as checkpoint

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_tree", full)
    with pytest.raises(InputError, match="cannot be written .*No space left.*the space that is left there"):
        tide.convert(source, tmp_path / "model")
    assert names(tmp_path) == []


def test_the_fingerprint_names_config_and_weights(converted, tmp_path):
    first = read_manifest(converted / "model")
    again = tide.convert(write_directory(tmp_path / "same"), tmp_path / "a")
    theta = tide.convert(write_directory(tmp_path / "theta", rope_theta=10001.0), tmp_path / "b")
    other = write_directory(tmp_path / "other")
    tensors = numpy_weights()
    tensors["model.layers.2.mlp.up_proj.weight"][5, 7] = np.nextafter(
        tensors["model.layers.2.mlp.up_proj.weight"][5, 7], 9
    )
    changed = tide.convert(write_directory(other, tensors), tmp_path / "c")
    assert again.fingerprint == first.fingerprint
    assert len({first.fingerprint, theta.fingerprint, changed.fingerprint}) == 3
    assert [name for name in first.parts if first.parts[name] != changed.parts[name]] == ["layer_002"]


def test_a_hugging_face_directory_is_told_from_a_converted_one(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=f"convert {tmp_path} DST"):
        read_manifest(tmp_path)

"""One artefact for CPU, CUDA and TPU: saved here, run by a process that traces nothing, refused where it cannot run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from support import exported, hlo, topologies
from support.require import missing

import tide_jax as tide
from tide_jax.decode import export
from tide_jax.errors import InputError
from tide_jax.kernels import register_cuda, registry, status
from tide_jax.kernels.exit_route import TARGET

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Where the programs are, and what the engines that saved them answered; CUDA kernels in them if they are built."""
    try:
        register_cuda()
    except InputError as error:
        if os.environ.get("TIDE_REQUIRE_CUDA") == "1":
            pytest.fail(f"TIDE_REQUIRE_CUDA=1, but {error}")
    root, answers = tmp_path_factory.mktemp("programs"), {}
    for name in exported.ENGINES:
        (root / name).mkdir()
        answers[name] = exported.answers(exported.Saving, name, root / name)
    return root, answers


def test_a_fresh_process_says_the_same_without_tracing(saved):
    root, answers = saved
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "support.exported", root], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == answers
    # The rows do leave, at different depths, or nothing was shown.
    assert {2, 4, 6} <= {depth for row in answers["routers"]["depths"] for depth in row}
    assert answers["verified"]["tokens"] == answers["plain"]["tokens"]


@pytest.mark.parametrize(("name", "function"), [("plain", "run"), ("routers", "run"), ("verified", "run_rounds")])
def test_every_platform_is_in_one_artefact(saved, name, function):
    root, _ = saved
    assert sorted(path.name for path in (root / name).iterdir()) == sorted(["prefill", function])
    program = export.load_program(root / name / function)
    assert program.exported.platforms == export.PLATFORMS
    called = TARGET in program.exported.mlir_module()
    assert called == (name != "plain" and bool(registry.platforms(TARGET)))


@pytest.mark.portability
@pytest.mark.parametrize("target", ["h200", "v5e"])
def test_the_artefact_compiles_for_accelerators(saved, target):
    topologies.require(target)
    program = export.load_program(saved[0] / "routers" / "run")
    donated = tuple(range(*program.state))
    text = topologies.compile_for(
        target, program.exported.call, *program.exported.in_avals, donate_argnums=donated
    ).as_text()
    there = target == "h200" and "cuda" in registry.platforms(TARGET)
    assert hlo.custom_call_targets(text)[TARGET] == (len(exported.POINTS) if there else 0)
    assert len(hlo.conditionals_in_loops(text)) == len(exported.POINTS) + 1


@pytest.fixture
def program(saved, tmp_path):
    """A file whose header can be changed."""
    path = tmp_path / "run"

    def write(**changes):
        line, _, body = (saved[0] / "routers" / "run").read_bytes().partition(b"\n")
        path.write_bytes(json.dumps({**json.loads(line), **changes}).encode() + b"\n" + body)
        return path

    return write


def test_another_version_is_refused_by_name(program):
    with pytest.raises(InputError, match=r"was saved with tide-jax 0\.0\.1, jax .*, and here are tide-jax "):
        export.load_program(program(versions={**export.versions(), "tide-jax": "0.0.1"}))
    with pytest.raises(InputError, match="jax 0.9.9"):
        export.load_program(program(versions={**export.versions(), "jax": "0.9.9"}))


def test_another_platform_is_refused_by_name(program):
    with pytest.raises(InputError, match="was saved for tpu, and programs run on cpu here"):
        export.load_program(program(targets={"tpu": []}))


def test_a_missing_kernel_is_refused_by_name(program, monkeypatch):
    if not status().available:
        missing("the program calls no kernel: the extension is not built", "TIDE_REQUIRE_KERNELS")
    path = program()
    monkeypatch.setattr(registry, "_statuses", {})
    monkeypatch.setenv(registry.SWITCH, "off")
    with pytest.raises(InputError, match=rf"calls {TARGET}, which is not registered for cpu here: switched off"):
        export.load_program(path)


@pytest.mark.parametrize("content", [b"", b"\x00\xff\n", b"[]\nx", b'{"format": "other"}\n', None])
def test_what_is_no_program_is_refused(tmp_path, content):
    path = tmp_path / "run"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="cannot be read as a program"):
        export.load_program(path)


@pytest.mark.parametrize("damage", [lambda body: body[:-100], lambda body: body[:500] + b"?" + body[501:]])
def test_a_damaged_program_is_refused(program, damage):
    path = program()
    line, _, body = path.read_bytes().partition(b"\n")
    path.write_bytes(line + b"\n" + damage(body))
    with pytest.raises(InputError, match="cannot be read as a program.*another digest"):
        export.load_program(path)


def test_arguments_of_other_sizes_are_refused_by_name(saved):
    loaded = export.load_program(saved[0] / "plain" / "run")
    engine = tide.Engine(exported.tiny_model(3))
    state = engine.start([[1]], rule=tide.Never(), max_new_tokens=2)
    with pytest.raises(
        InputError, match=r"argument .*caches.* is float32\[1, 2, 256, 8\], not float32\[3, 2, 256, 8\]"
    ):
        loaded(engine.model.params, {}, state, jax.numpy.int32(1))
    with pytest.raises(InputError, match="arrays, not"):
        loaded(engine.model.params, {}, state)


def test_a_missing_flatbuffers_names_the_extra(tmp_path, monkeypatch):
    def missing(*_):
        raise ImportError("no flatbuffers")

    monkeypatch.setattr(jax.export.Exported, "serialize", missing)
    with pytest.raises(InputError, match=r"tide-jax\[export\]"):
        export.save_program(tmp_path / "run", lambda params, heads, state: state, {}, {}, jax.numpy.ones(1))

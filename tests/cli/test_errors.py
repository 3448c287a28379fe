"""What a user can get wrong ends in one paragraph and exit code 2; what is our fault keeps its traceback."""

import os

import pytest

from tide_jax.cli import main, output
from tide_jax.cli.inspect import Inspect


def check(code: int, out: str, err: str, *words: str) -> None:
    """One paragraph on standard error that holds the words, nothing else anywhere."""
    assert code == 2
    assert out == ""
    paragraph = err[err.index("error: ") :]
    assert "\n\n" not in paragraph.strip() and "Traceback" not in err
    assert all(len(line) <= 100 for line in paragraph.splitlines())
    flat = " ".join(paragraph.split())
    assert all(word in flat for word in words), flat


@pytest.mark.parametrize("verb", ["inspect", "generate", "compare", "calibrate", "warmup"])
@pytest.mark.parametrize("made", [False, True])
def test_a_directory_that_is_no_converted_model(tide, tmp_path, verb, made):
    directory = tmp_path / "nothing"
    if made:
        directory.mkdir()
    extra = {"generate": ["--prompt", "a"], "compare": ["--prompt", "a"], "calibrate": ["--data", "x"]}
    problem = "holds no tide.json" if made else "does not exist"
    check(*tide(verb, directory, *extra.get(verb, [])), problem, "tide-jax convert")


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_convert_does_not_replace_anything_unasked(tide, tiny_dir, flags):
    check(*tide("convert", "anything.gguf", tiny_dir, *flags), "exists already", "--overwrite")


def test_convert_without_a_source(tide, tmp_path):
    check(*tide("convert", tmp_path / "none.gguf", tmp_path / "out"), "none.gguf does not exist")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "rule", ["sometimes", "fixed", "fixed:", "fixed:x", "fixed:2.5", "router:", "router:x", "never:3"]
)
def test_an_unknown_rule(tide, tiny_dir, rule):
    check(*tide("generate", tiny_dir, "--prompt", "a", "--exits", rule), f"'{rule}'", "fixed:N", "router:T")


@pytest.mark.parametrize("value", ["nan", "-1"])
def test_a_threshold_that_is_no_share(tide, tiny_dir, value):
    check(*tide("generate", tiny_dir, "--prompt", "a", "--exits", f"router:{value}"), "threshold")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--exits", "fixed:9"], ["9", "between 1 and 5"]),
        (["--exits", "fixed:0"], ["0", "between 1 and 5"]),
        (["--exit-points", "2,6", "--exits", "fixed:2"], ["6", "never an exit"]),
        (["--exit-points", "2,four"], ["'2,four'", "8,16,24"]),
        (["--exit-points", "2", "--exits", "fixed:4"], ["FixedDepth(4)", "[2]"]),
        (["--exits", "router"], ["tide-jax calibrate"]),
        (["--temperature", "-1"], ["temperature"]),
        (["--mesh", "2"], ["'2'", "data=2,model=4"]),
        (["--mesh", "model=" + "9" * 5000], ["data=2,model=4"]),
        (["--mesh", "=2"], ["data=2,model=4"]),
        (["--mesh", "model=2,model=2"], ["data=2,model=4"]),
        (["--mesh", "tensor=2"], ["'tensor' is unknown"]),
        (["--mesh", "model=4"], ["6 query heads", "1 or 2"]),
        (["--mesh", "data=2"], ["a batch of 1", "multiple of 2"]),
        (["--mesh", "data=100"], ["data=100 needs 100 devices"]),
        (["--max-new-tokens", "-3"], ["max_new_tokens"]),
        (["--max-new-tokens", "5000"], ["512"]),
    ],
)
def test_values_that_do_not_fit_the_model(tide, tiny_dir, args, words):
    check(*tide("generate", tiny_dir, "--prompt", "a", *args), *words)


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt(tide, tiny_dir, prompt):
    check(*tide("generate", tiny_dir, "--prompt", prompt), "prompt 1 is empty")


def test_an_empty_raw_prompt(tide, tiny_dir):
    check(*tide("generate", tiny_dir, "--raw", "--prompt", ""), "empty")


def test_compare_without_a_usable_prompt(tide, tiny_dir, tmp_path):
    check(*tide("compare", tiny_dir), "--prompt TEXT")
    check(*tide("compare", tiny_dir, "--prompts", tmp_path / "none"), "none: No such file")
    check(*tide("compare", tiny_dir, "--prompts", tmp_path), "Is a directory")
    blank, binary = tmp_path / "blank", tmp_path / "binary"
    blank.write_text("\n \n")
    binary.write_bytes(b"ab\xff\xfe")
    check(*tide("compare", tiny_dir, "--prompts", blank), "holds no prompt")
    check(*tide("compare", tiny_dir, "--prompts", binary), "UTF-8", "byte 2")


def test_calibration_data_that_cannot_be_read(tide, tiny_dir, tmp_path):
    check(*tide("calibrate", tiny_dir, "--data", tmp_path / "none.jsonl"), "none.jsonl")


def test_a_directory_that_cannot_be_written(tide, tiny_dir, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    check(*tide("calibrate", tiny_dir, "--data", "x"), "not writable")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (PermissionError(13, "Permission denied", "/models/a"), "/models/a: Permission denied."),
        (OSError("the disk is gone"), "the disk is gone"),
    ],
)
def test_the_system_refuses(tide, tiny_dir, monkeypatch, error, words):
    def run(self):
        raise error

    monkeypatch.setattr(Inspect, "run", run)
    check(*tide("inspect", tiny_dir), words)


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["frobnicate"],
        ["generate"],
        ["generate", "x"],
        ["generate", "x", "--prompt", "a", "--tempature", "1"],
        ["generate", "x", "--prompt", "a", "--seed", "one"],
        ["generate", "x", "--prompt", "a", "--dtype", "int3"],
        ["calibrate", "x", "--data", "y", "--label", "vibes"],
    ],
)
def test_usage_errors(tide, args):
    code, out, err = tide(*args)
    assert code == 2
    assert out == "" and "--help" in err


def test_an_interrupt_is_quiet(tide, monkeypatch):
    def run(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Inspect, "run", run)
    assert tide("inspect", "x") == (130, "", "")


def test_a_bug_keeps_its_traceback(monkeypatch):
    def run(self):
        raise ZeroDivisionError

    monkeypatch.setattr(Inspect, "run", run)
    with pytest.raises(ZeroDivisionError):
        main(["inspect", "x"])


def test_long_errors_are_wrapped_and_paths_kept_whole(capsys):
    path = "/models/" + "x-" * 60
    output.fail(f"{path} is not a converted model. " + "word " * 40)
    err = capsys.readouterr().err
    assert path in err
    assert len(err.splitlines()) >= 3


def test_the_process_ends_with_2_and_without_a_traceback(tide_process, tmp_path):
    done = tide_process("inspect", tmp_path)
    check(done.returncode, done.stdout, done.stderr, "holds no tide.json")


def test_arguments_are_parsed_without_anything_heavy(tide_process):
    done = tide_process("--help", PYTHONPROFILEIMPORTTIME="1")
    assert done.returncode == 0 and "generate" in done.stdout
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not loaded & {"jax", "flax", "transformers", "torch", "orbax", "numpy"}


def test_a_reader_that_leaves_early_is_no_error(tide_process, tiny_dir):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as gone:
        done = tide_process("inspect", tiny_dir, stdout=gone)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--verify", "9", "--propose", "ngram"], ["9", "between 1 and 8"]),
        (["--verify", "x", "--propose", "ngram"], ["'x'", "1 to 8, or auto"]),
        (["--verify", "4"], ["needs a draft"]),
        (["--propose", "ngram"], ["must be verified"]),
        (["--propose", "ngram", "--verify", "4", "--exits", "fixed:2"], ["would draft"]),
        (["--remainder", "deferred:9", "--exits", "fixed:2"], ["9", "between 2 and 8"]),
        (["--remainder", "deferred:", "--exits", "fixed:2"], ["'deferred:'"]),
        (["--remainder", "river", "--exits", "fixed:2"], ["'river'", "deferred:N"]),
        (["--remainder", "deferred:8", "--exits", "fixed:2", "--verify", "4"], ["different widths"]),
        (["--propose", "ngram", "--verify", "auto"], ["tide-jax warmup"]),
    ],
)
def test_drafts_that_are_not_clear(tide, tiny_dir, args, words):
    check(*tide("generate", tiny_dir, "--prompt", "a", *args), *words)


def test_batch_sizes_that_are_none(tide, tiny_dir):
    check(*tide("warmup", tiny_dir, "--batches", "1,x"), "'1,x'", "1,8")
    check(*tide("warmup", tiny_dir, "--batches", "0"), "batch sizes of 1 or more")

"""A tiny converted model with a tokenizer and a chat template, and ways to run the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from support.tiny import tiny_config
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tide_jax import checkpoint
from tide_jax.cli import main
from tide_jax.models import Decoder
from tide_jax.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}: {{ m['content'] }}<|im_end|>{% endfor %}"


def byte_tokenizer(chat_template: str | None = TEMPLATE) -> Tokenizer:
    """One token per byte, and two special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={piece: id for id, piece in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    return Tokenizer(
        backend,
        special_tokens={name: AddedToken(text, special=True) for name, text in special.items()},
        chat_template=chat_template,
    )


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory) -> Path:
    """A converted model of six small layers."""
    directory = tmp_path_factory.mktemp("tiny") / "model"
    config = tiny_config(vocab_size=260)
    _, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))
    tree = jax.tree.map(np.asarray, nnx.to_pure_dict(params))
    tokenizer = byte_tokenizer()
    checkpoint.write(
        directory,
        config,
        iter(checkpoint.part_trees(tree).items()),
        dtype="float32",
        eos_ids=tokenizer.eos_ids,
        source={"kind": "test"},
        origin={},
        tokenizer=tokenizer,
        overwrite=False,
    )
    return directory


@pytest.fixture
def tide(capsys):
    """Run `tide-jax` in this process: exit code, standard output, standard error."""

    def run(*args: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(arg) for arg in args])
        except SystemExit as stop:
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def tide_json(tide):
    """Run `tide-jax … --json` and return the one object it prints."""

    def run(*args: object) -> dict:
        code, out, err = tide(*args, "--json")
        assert code == 0, err
        assert out.count("\n") == 1
        return json.loads(out)

    return run


@pytest.fixture
def tide_process():
    """Run `tide-jax` in a process of its own."""

    def run(*args: object, stdout: object = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess:
        code = "import sys; from tide_jax.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, *map(str, args)]
        env = {**os.environ, **environment}
        return subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env, timeout=120)

    return run

"""Tokenizer: BOS and EOS rules, files, templates, on tokenizers small enough to read the ids by eye."""

import json
import subprocess
import sys
import warnings

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tide_jax.errors import InputError
from tide_jax.tokenizer import Tokenizer

BOS, EOS, HEADER, END = 0, 1, 2, 3
NAMES = ["<bos>", "<eos>", "<header>", "<end>"]
WITHOUT_BOS = "{% for m in messages %}<header>{{ m.role }}:{{ m.content }}<end>{% endfor %}"
WITH_BOS = "{{ bos_token }}" + WITHOUT_BOS
HELLO = [{"role": "user", "content": "hi"}]
TOKENS = {"bos_token": "<bos>", "eos_token": "<eos>"}


def byte_backend(*, adds_bos: bool = False, adds_eos: bool = False) -> Backend:
    """One token per byte after the four special ones, no merges."""
    tokens = NAMES + sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={token: id for id, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(NAMES)
    if adds_bos or adds_eos:
        single = ["<bos>"] * adds_bos + ["$A"] + ["<eos>"] * adds_eos
        special = [("<bos>", BOS), ("<eos>", EOS)]
        backend.post_processor = TemplateProcessing(single=single, pair=[*single, "$B"], special_tokens=special)
    return backend


def plain(text: str) -> list[int]:
    return byte_backend().encode(text).ids


def write(directory, *, backend=None, config=None, special_map=None, template=None):
    directory.mkdir(exist_ok=True)
    (backend or byte_backend()).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(TOKENS if config is None else config))
    if special_map is not None:
        (directory / "special_tokens_map.json").write_text(json.dumps(special_map))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    return directory


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS])
def test_exactly_one_bos_in_chat_and_in_text(tmp_path, template):
    tokenizer = Tokenizer.load(write(tmp_path, backend=byte_backend(adds_bos=True), template=template))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokenizer.encode_chat(HELLO) == [BOS, HEADER, *plain("user:hi"), END]
        assert tokenizer.encode("hi") == [BOS, *plain("hi")]
        assert tokenizer.encode("") == [BOS]
        assert tokenizer.encode("hi<bos>") == [BOS, *plain("hi"), BOS]


def test_chat_without_an_added_bos_is_what_the_template_writes(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, template=WITHOUT_BOS))
    assert tokenizer.encode_chat(HELLO) == [HEADER, *plain("user:hi"), END]
    tokenizer = Tokenizer.load(write(tmp_path, template=WITH_BOS))
    assert tokenizer.encode_chat(HELLO) == [BOS, HEADER, *plain("user:hi"), END]


def test_typed_bos_is_kept_with_a_warning(tmp_path):
    tokenizer = Tokenizer.load(
        write(tmp_path, backend=byte_backend(adds_bos=True), template="<bos>{{ messages[0].content }}")
    )
    with pytest.warns(UserWarning, match="two '<bos>'"):
        assert tokenizer.encode("<bos>hi") == [BOS, BOS, *plain("hi")]
    with pytest.warns(UserWarning, match="two '<bos>'"):
        assert tokenizer.encode_chat([{"role": "user", "content": "<bos>hi"}]) == [BOS, BOS, *plain("hi")]


def test_typed_bos_is_fine_where_none_is_added(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tokenizer.encode("<bos>hi") == [BOS, *plain("hi")]
        assert tokenizer.encode("") == []


@pytest.mark.parametrize(
    ("in_file", "flags", "expected"),
    [
        ((False, False), {"add_bos_token": True}, [BOS, "x"]),
        ((True, False), {"add_bos_token": False}, ["x"]),
        ((True, False), {"add_eos_token": False}, [BOS, "x"]),
        ((True, False), {"add_eos_token": True}, [BOS, "x", EOS]),
        ((False, False), {"add_bos_token": True, "add_eos_token": True}, [BOS, "x", EOS]),
        ((True, True), {"add_eos_token": False}, [BOS, "x"]),
        ((True, True), {"add_bos_token": None}, [BOS, "x", EOS]),
        ((False, False), {"add_bos_token": False, "add_eos_token": False}, ["x"]),
    ],
)
def test_config_overrules_the_post_processor(tmp_path, in_file, flags, expected):
    backend = byte_backend(adds_bos=in_file[0], adds_eos=in_file[1])
    tokenizer = Tokenizer.load(write(tmp_path, backend=backend, config={**TOKENS, **flags}))
    assert tokenizer.encode("x") == [plain("x")[0] if id == "x" else id for id in expected]


def test_one_token_for_bos_and_eos_counts_as_bos(tmp_path):
    config = {"bos_token": "<bos>", "eos_token": "<bos>", "add_bos_token": False}
    tokenizer = Tokenizer.load(write(tmp_path, backend=byte_backend(adds_bos=True), config=config))
    assert tokenizer.encode("x") == plain("x")


def test_added_bos_without_a_name_is_refused(tmp_path):
    config = {"eos_token": "<eos>", "add_bos_token": True}
    with pytest.raises(InputError, match="bos_token is missing.*eos_token"):
        Tokenizer.load(write(tmp_path, config=config))


def test_missing_tokenizer_json(tmp_path):
    with pytest.raises(InputError, match="no tokenizer.json") as caught:
        Tokenizer.load(tmp_path)
    assert "SentencePiece" not in str(caught.value)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(InputError, match="SentencePiece tokenizer.model alone is not supported yet"):
        Tokenizer.load(tmp_path)
    with pytest.raises(InputError, match="no tokenizer.json"):
        Tokenizer.load(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("tokenizer.json", "{}", "cannot be read as a tokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object, but holds a list"),
        ("special_tokens_map.json", "{", "not valid JSON"),
    ],
)
def test_broken_file_is_named(tmp_path, name, text, match):
    (write(tmp_path) / name).write_text(text)
    with pytest.raises(InputError, match=match) as caught:
        Tokenizer.load(tmp_path)
    assert name in str(caught.value)


def test_only_tokenizer_json_is_needed(tmp_path):
    byte_backend().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (None, [], None)
    assert tokenizer.encode("hi") == plain("hi")
    assert tokenizer.vocab_size == 260


def test_special_ids(tmp_path):
    config = {
        "bos_token": {"__type": "AddedToken", "content": "<bos>", "lstrip": False, "normalized": False},
        "eos_token": "<header>",
        "eot_token": "<eos>",
        "pad_token": "[PAD]",
    }
    tokenizer = Tokenizer.load(write(tmp_path, config=config))
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (BOS, [EOS, HEADER])
    assert (tokenizer.pad_id, tokenizer.vocab_size) == (260, 261), "a token that the file lacks is added at the end"


def test_special_tokens_map_counts_for_older_models_only(tmp_path):
    special_map = {"eos_token": {"content": "<end>", "lstrip": False}}
    assert Tokenizer.load(write(tmp_path, special_map=special_map)).eos_ids == [END]
    decoder = {str(id): {"content": name, "special": True} for id, name in enumerate(NAMES)}
    config = {**TOKENS, "added_tokens_decoder": decoder}
    assert Tokenizer.load(write(tmp_path, config=config, special_map=special_map)).eos_ids == [EOS]


def test_tokens_that_only_the_config_knows(tmp_path):
    config = {**TOKENS, "added_tokens_decoder": {"260": {"content": "<tool>", "special": False}}}
    tokenizer = Tokenizer.load(write(tmp_path, config=config))
    assert tokenizer.encode("a<tool>") == [*plain("a"), 260]
    assert tokenizer.decode([260]) == "<tool>", "not special, so it is kept"
    config["added_tokens_decoder"] = {"7": {"content": "<eos>"}}
    with pytest.raises(InputError, match="'<eos>': id 7 in tokenizer_config.json, id 1 in tokenizer.json"):
        Tokenizer.load(write(tmp_path, config=config))


@pytest.mark.parametrize("key", ["extra_special_tokens", "additional_special_tokens"])
def test_extra_special_tokens(tmp_path, key):
    tokenizer = Tokenizer.load(write(tmp_path, config={**TOKENS, key: ["<a>", {"content": "<b>"}]}))
    assert tokenizer.encode("<a><b>") == [260, 261]
    assert tokenizer.decode([260, 261]) == ""


def test_named_extra_special_tokens_reach_the_template(tmp_path):
    config = {**TOKENS, "extra_special_tokens": {"turn_token": "<header>"}}
    tokenizer = Tokenizer.load(write(tmp_path, config=config, template="{{ turn_token }}x"))
    assert tokenizer.encode_chat(HELLO) == [HEADER, *plain("x")]


def test_truncation_and_padding_of_a_training_run_are_dropped(tmp_path):
    backend = byte_backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=4, pad_token="<end>", pad_id=END)
    tokenizer = Tokenizer.load(write(tmp_path, backend=backend))
    assert tokenizer.encode("abc") == plain("abc")


def test_code_named_by_a_config_is_not_run(tmp_path):
    config = {**TOKENS, "auto_map": {"AutoTokenizer": ["evil.Evil", None]}, "tokenizer_class": "Evil"}
    (write(tmp_path, config=config) / "evil.py").write_text("raise SystemExit('code from a config was run')")
    assert Tokenizer.load(tmp_path).encode("hi") == plain("hi")


def test_template_file_wins_over_the_config(tmp_path):
    write(tmp_path, config={**TOKENS, "chat_template": "config"})
    assert Tokenizer.load(tmp_path).encode_chat(HELLO) == plain("config")
    (tmp_path / "chat_template.jinja").write_bytes(b"file\r\n{{ 1 }}")
    assert Tokenizer.load(tmp_path).encode_chat(HELLO) == plain("file\n1"), "Jinja itself makes newlines plain"


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"not a number": {"content": "<x>"}}},
        {"chat_template": [{"template": "no name"}]},
        {"added_tokens_decoder": ["<x>"]},
    ],
)
def test_config_of_another_form_is_refused(tmp_path, config):
    write(tmp_path, config=config)
    with pytest.raises(InputError, match="from one release"):
        Tokenizer.load(tmp_path)


def test_list_of_templates(tmp_path):
    templates = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "plain"}]
    write(tmp_path, config={**TOKENS, "chat_template": templates})
    assert Tokenizer.load(tmp_path).encode_chat(HELLO) == plain("plain")
    write(tmp_path, config={**TOKENS, "chat_template": templates[:1]})
    with pytest.raises(InputError, match=r"none is named 'default': \['tool_use'\]"):
        Tokenizer.load(tmp_path)


def test_generation_prompt_is_asked_for_by_default(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, template="{% if add_generation_prompt %}A{% else %}B{% endif %}"))
    assert tokenizer.encode_chat(HELLO) == plain("A")
    assert tokenizer.encode_chat(HELLO, add_generation_prompt=False) == plain("B")


def test_no_template(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path))
    assert not tokenizer.has_chat_template
    with pytest.raises(InputError, match="no chat template.*--raw"):
        tokenizer.encode_chat(HELLO)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('only two turns') }}", "refuses these messages: only two turns.*'user'"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{% if %}", "refuses these messages"),
    ],
)
def test_refusal_by_the_template_reaches_the_user(tmp_path, template, match):
    tokenizer = Tokenizer.load(write(tmp_path, template=template))
    with pytest.raises(InputError, match=match):
        tokenizer.encode_chat(HELLO)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        {"role": "user", "content": "hi"},
        ["hi"],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        [{"role": 1, "content": "hi"}],
        [{"role": "user", "content": "hi", "tool_calls": []}],
        [*HELLO, {"role": "assistant", "text": "hi"}],
    ],
)
def test_malformed_messages(tmp_path, messages):
    tokenizer = Tokenizer.load(write(tmp_path, template=WITHOUT_BOS))
    with pytest.raises(InputError, match="non-empty list"):
        tokenizer.encode_chat(messages)


def test_lone_surrogate_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"'\\ud800' at character 2"):
        Tokenizer.load(write(tmp_path)).encode("ab\ud800")


def test_decode(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, config={**TOKENS, "clean_up_tokenization_spaces": True}))
    ids = [BOS, *plain("it 's , fine ."), EOS]
    assert tokenizer.decode(ids) == "it 's , fine ."
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>it 's , fine .<eos>"


def test_token_text(tmp_path):
    tokenizer = Tokenizer.load(write(tmp_path, config={**TOKENS, "pad_token": "<é>"}))
    shown = [tokenizer.token_text(id) for id in plain("a \né") + [BOS, 260, 999]]
    assert shown == ["a", "␣", "\\n", "<0xC3>", "<0xA9>", "<bos>", "<é>", "<999>"]


def test_token_text_of_sentencepiece_style_pieces():
    backend = Backend(models.BPE(vocab={"▁the": 0, "<0xE2>": 1}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = Tokenizer(backend, special_tokens={})
    assert [tokenizer.token_text(id) for id in (0, 1)] == ["␣the", "<0xE2>"]


def test_round_trip(tmp_path):
    config = {**TOKENS, "add_bos_token": True, "pad_token": "[PAD]", "extra_special_tokens": ["<extra>"]}
    first = Tokenizer.load(write(tmp_path / "a", config=config, template=WITH_BOS + "\r\nß\n"))
    first.save(tmp_path / "b")
    second = Tokenizer.load(tmp_path / "b")
    assert second == first
    assert second.encode("hi<extra>") == first.encode("hi<extra>") == [BOS, *plain("hi"), 261]
    assert (second.bos_id, second.eos_ids, second.pad_id, second.vocab_size) == (BOS, [EOS], 260, 262)
    assert second.encode_chat(HELLO) == first.encode_chat(HELLO)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path / "b")
    assert theirs.encode("hi<extra>") == first.encode("hi<extra>")


def test_save_leaves_nothing_of_the_former_tokenizer(tmp_path):
    write(tmp_path, special_map={"eos_token": "<end>"}, template=WITH_BOS)
    tokenizer = Tokenizer(byte_backend(), special_tokens=TOKENS)
    tokenizer.save(tmp_path)
    assert Tokenizer.load(tmp_path) == tokenizer


@pytest.mark.parametrize(
    "change",
    [
        {"chat_template": "other"},
        {"special_tokens": {"bos_token": "<bos>"}},
        {"extra_special_tokens": ["<header>"]},
        {"add_bos": True},
    ],
)
def test_equality_sees_every_part(change):
    same = {"special_tokens": TOKENS, "chat_template": "t"}
    assert Tokenizer(byte_backend(), **same) == Tokenizer(byte_backend(), **same)
    assert Tokenizer(byte_backend(), **same) != Tokenizer(byte_backend(), **{**same, **change})


def test_added_token_flags_survive(tmp_path):
    token = AddedToken("<eos>", lstrip=True, special=True)
    backend = byte_backend()
    backend.add_special_tokens([token])
    Tokenizer(backend, special_tokens={"eos_token": token}).save(tmp_path)
    assert Tokenizer.load(tmp_path).encode("a  <eos>") == [*plain("a"), EOS]


def test_light_import_and_silence_without_pytorch(tmp_path):
    write(tmp_path, template=WITHOUT_BOS)
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from tide_jax.tokenizer import Tokenizer\n"
        "assert not {'transformers', 'tokenizers'} & set(sys.modules)\n"
        f"tokenizer = Tokenizer.load({str(tmp_path)!r})\n"
        f"assert tokenizer.encode_chat({HELLO!r})\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "PyTorch" not in result.stdout + result.stderr

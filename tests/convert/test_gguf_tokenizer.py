"""Tokenizers rebuilt from GGUF metadata, against transformers and against BPE written out by hand."""

import functools
import random

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import pre_tokenizers
from transformers import Qwen2Tokenizer

from tide_jax.convert.gguf_tokenizer import tokenizer_from_gguf
from tide_jax.errors import InputError
from tide_jax.tokenizer import Tokenizer

# transformers splits a "smollm" file by GPT-2's rule, where a numeral goes with the space before it and with
# its neighbours. The model was trained with every numeral alone. The ids differ where a run of spaces loses
# its last one that way, and where a merge reaches from a space or a numeral into a numeral outside ASCII.
SPLIT_DIFFERENTLY = r"\s\s\p{N}|[\s\p{N}](?![0-9])\p{N}"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

SNIPPETS = [
    *"héllo naïve e\u0301 a\u0323\u0302 ﬁ ß İ ſ Ǆ".split(),
    *"東京タワー 你好，世界！ 한국어 ภาษาไทย हिन्दी ქართული Ελληνικά עִבְרִית العَرَبِيَّة ١٢٣ ４５ Ⅷ ½ x²".split(),
    "👩‍👩‍👧‍👦",
    "🤷🏽‍♀️",
    "🇩🇪",
    "\u200b\u200f\ufeff\u00a0\u3000\u2028\u0085",
    "12345678901234567890",
    "3.14159e-10, 1,000,000; v1.2.3",
    "  ",
    "       ",
    "\t\t",
    "\n\n\n",
    " \n \t\r\n",
    "\r\n",
    " ",
    "1",
    "def f(x: int) -> str:\n    return f'{x!r}'  # 2 spaces\n",
    "for (int i = 0; i < 10; ++i) { a[i] <<= 1; }\n\n\n",
    "\tif x == 10:\n\t\tpass",
    "https://example.org/a?b=1&c=%20#d",
    "I'll don't we've you're it's HE'S 'sup ''",
    "The quick brown fox jumps over the lazy dog.",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>user\n",
    "<|im_",
    "<repo_name>",
    "<jupyter_code>",
    "!!!???...---___***",
    "$100 + 20% = #120 ^ ~ ` | \\",
    "Ġhello",
    "\x00\x01\x7f",
]


def texts() -> list[str]:
    """Every snippet, and 300 runs of two to five of them."""
    draw = random.Random(0)
    return SNIPPETS + ["".join(draw.choices(SNIPPETS, k=draw.randint(2, 5))) for _ in range(300)]


@pytest.fixture(scope="module")
def metadata(smollm2_gguf) -> dict:
    from gguf import GGUFReader

    reader = GGUFReader(smollm2_gguf)
    return {name: field.contents() for name, field in reader.fields.items()}


@pytest.fixture(scope="module")
def tokenizer(metadata):
    return tokenizer_from_gguf(metadata)


@pytest.fixture(scope="module")
def theirs(smollm2_gguf):
    pytest.importorskip("torch", reason="transformers reads GGUF files with PyTorch only")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)


@functools.cache
def byte_alphabet() -> dict[int, str]:
    """Byte -> its character, found by pushing every byte of UTF-8 through the byte-level splitter."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {}
    for start in [*range(0x801), *range(0x1000, 0x110000, 0x1000)]:
        if not 0xD800 <= start < 0xE000:
            spelled = splitter.pre_tokenize_str(chr(start))[0][0]
            found.update(zip(chr(start).encode(), spelled, strict=True))
    return found


def bpe_by_hand(metadata: dict, text: str) -> list[int]:
    """llama.cpp's rule for "smollm": control tokens, every numeral alone, GPT-2's splits, then merges."""
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {token: id for id, token in enumerate(tokens)}
    ranks = {merge: rank for rank, merge in enumerate(metadata["tokenizer.ggml.merges"])}
    types = metadata["tokenizer.ggml.token_type"]
    control = [token for token, type in zip(tokens, types, strict=True) if type == 3]
    alphabet = byte_alphabet()
    out = []
    for part in regex.split("(" + "|".join(map(regex.escape, control)) + ")", text):
        if part in control:
            out.append(ids[part])
            continue
        pieces = [piece for run in regex.findall(r"\p{N}|\P{N}+", part) for piece in regex.findall(GPT2, run)]
        assert "".join(pieces) == part
        for piece in pieces:
            # A byte that the vocabulary lacks vanishes, before the merges.
            word = [alphabet[byte] for byte in piece.encode() if alphabet[byte] in ids]
            while True:
                pairs = [ranks.get(f"{a} {b}", len(ranks)) for a, b in zip(word, word[1:], strict=False)]
                if not pairs or min(pairs) == len(ranks):
                    break
                at = pairs.index(min(pairs))
                word[at : at + 2] = [word[at] + word[at + 1]]
            out += [ids[symbol] for symbol in word]
    return out


def test_smollm2_equals_bpe_by_hand(metadata, tokenizer):
    cases = texts()[:150]
    assert sum(bool(regex.search(SPLIT_DIFFERENTLY, text)) for text in cases) >= 10
    for text in cases:
        assert tokenizer.encode(text) == bpe_by_hand(metadata, text), text


def test_smollm2_known_ids(tokenizer):
    assert tokenizer.encode("Hello world! 123") == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("  multiple   spaces") == [216, 2701, 256, 5600]
    assert tokenizer.encode("x  1") == [104, 256, 33], "two spaces before a digit are one token"
    assert tokenizer.encode("<|im_start|>a") == [1, 81]
    assert tokenizer.encode("") == [], "bos_token_id is set, add_bos_token is not"


@pytest.mark.torch
def test_smollm2_equals_transformers(tokenizer, theirs):
    cases = [text for text in texts() if not regex.search(SPLIT_DIFFERENTLY, text)]
    assert len(cases) >= 200
    for text in cases:
        ids = tokenizer.encode(text)
        assert ids == theirs.encode(text), text
        for skip in (True, False):
            assert tokenizer.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip), text
    assert tokenizer.vocab_size == len(theirs)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (1, [2], 2)
    assert [theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id] == [1, 2, 2]


@pytest.mark.torch
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("roles", ["user", "system user", "user assistant user", "system user assistant user"])
def test_smollm2_chat_equals_transformers(tokenizer, theirs, roles, add_generation_prompt):
    contents = ["Sei höflich.", "What is 2  + 2?\n", " Four 👩‍👩‍👧‍👦", "<|im_end|> end"]
    messages = [{"role": r, "content": c} for r, c in zip(roles.split(), contents, strict=False)]
    expected = theirs.apply_chat_template(messages, add_generation_prompt=add_generation_prompt, tokenize=False)
    ids = tokenizer.encode_chat(messages, add_generation_prompt)
    assert tokenizer.decode(ids, skip_special_tokens=False) == expected
    assert ids == tokenizer.encode(expected)
    assert ids == theirs.encode(expected)


def test_smollm2_round_trip_through_files(tokenizer, tmp_path):
    tokenizer.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again == tokenizer
    assert [again.encode(text) for text in SNIPPETS] == [tokenizer.encode(text) for text in SNIPPETS]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_decode_undoes_encode(metadata, tokenizer, data):
    # 21 of the 256 bytes are no token of this vocabulary: some control characters and unassigned planes.
    alphabet, tokens = byte_alphabet(), set(metadata["tokenizer.ggml.tokens"])
    missing = {byte for byte, char in alphabet.items() if char not in tokens}
    assert {4, 6, 0x13, 0x14, 0x16, 0x1D, 0xF1, 0xF2} == missing
    text = data.draw(st.text(st.characters(codec="utf-8").filter(lambda c: not missing & set(c.encode()))))
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def tiny(**changes) -> dict:
    """Metadata of a vocabulary of bytes, one merge, one control and one user-defined token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<bos>", "<eos>", "<tool>", *letters, "ab"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 4] + [1] * (len(letters) + 1),
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    metadata.update({f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()})
    return {name: value for name, value in metadata.items() if value is not None}


def ids_of(metadata: dict, *tokens: str) -> list[int]:
    return [metadata["tokenizer.ggml.tokens"].index(token) for token in tokens]


def test_token_types():
    metadata = tiny()
    tokenizer = tokenizer_from_gguf(metadata)
    ids = tokenizer.encode("ab<eos><tool>c")
    assert ids == ids_of(metadata, "ab", "<eos>", "<tool>", "c")
    assert tokenizer.decode(ids) == "ab<tool>c", "control tokens are special, user-defined ones are text"
    assert tokenizer.vocab_size == 260


@pytest.mark.parametrize(
    ("changes", "before", "after"),
    [
        ({}, [], []),
        ({"ggml__add_bos_token": True}, [0], []),
        ({"ggml__add_bos_token": True, "ggml__add_eos_token": True}, [0], [1]),
        ({"ggml__pre": "llama-bpe"}, [0], []),
        ({"ggml__pre": "llama-bpe", "ggml__add_bos_token": False}, [], []),
    ],
)
def test_added_bos_and_eos(changes, before, after):
    metadata = tiny(**changes)
    ids = tokenizer_from_gguf(metadata).encode("c")
    assert ids == [*before, *ids_of(metadata, "c"), *after]


def test_special_ids():
    changes = {"ggml__eot_token_id": 2, "ggml__padding_token_id": 5, "chat_template": "hi"}
    tokenizer = tokenizer_from_gguf(tiny(**changes))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (0, [1, 2], 5)
    assert tokenizer.has_chat_template
    tokenizer = tokenizer_from_gguf(tiny(ggml__bos_token_id=None, ggml__eos_token_id=None))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.pad_id) == (None, [], None)
    assert not tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", "it|'s| A|'|S| x|123456|  | 7|!!|n|n|y| --|n "),
        ("smollm", "it|'s| A|'|S| x|1|2|3|4|5|6|   |7|!!|n|n|y| --|n "),
        ("default", "it|'|s| A|'|S| x|123|456|  | |7|!!|n|n|y| |--|n "),
        ("llama-bpe", "it|'s| A|'S| x|123|456|  | |7|!!nn|y| --n| "),
        ("qwen2", "it|'s| A|'S| x|1|2|3|4|5|6|  | |7|!!nn|y| --n| "),
    ],
)
def test_splits(tmp_path, pre, pieces):
    tokenizer_from_gguf(tiny(ggml__pre=pre)).save(tmp_path)
    splitter = Backend.from_file(str(tmp_path / "tokenizer.json")).pre_tokenizer
    text = "it's A'S x123456   7!!\n\ny --\n "
    found = [text[start:end] for _, (start, end) in splitter.pre_tokenize_str(text)]
    assert "|".join(found).replace("\n", "n") == pieces


def test_llama3_names_are_one():
    tokenizers = [tokenizer_from_gguf(tiny(ggml__pre=pre)) for pre in ("llama-bpe", "llama3", "llama-v3")]
    assert tokenizers[0] == tokenizers[1] == tokenizers[2]


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("gpt-2", False)])
def test_whole_pieces_skip_the_merges_of_llama3(pre, whole):
    metadata = tiny(ggml__pre=pre, ggml__add_bos_token=False)
    metadata["tokenizer.ggml.tokens"] += ["xyz"]  # a token that no merge leads to
    metadata["tokenizer.ggml.token_type"] += [1]
    assert tokenizer_from_gguf(metadata).encode("xyz") == ids_of(metadata, *(["xyz"] if whole else "xyz"))


def test_qwen2_equals_the_class_of_transformers(metadata):
    ours = tokenizer_from_gguf({**metadata, "tokenizer.ggml.pre": "qwen2"})
    vocab = {token: id for id, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges)
    for text in texts():
        if not regex.search(r"<\|?\w+", text):  # their class does not know which tokens are special here
            assert ours.encode(text) == theirs.encode(text), text
    assert ours.encode("e\u0301") == ours.encode("é"), "composed first"


@pytest.mark.parametrize("key", ["model", "pre", "tokens", "token_type", "merges"])
def test_missing_key_is_named(key):
    with pytest.raises(InputError, match=rf"no tokenizer\.ggml\.{key},"):
        tokenizer_from_gguf(tiny(**{f"ggml__{key}": None}))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ggml__model": "llama"}, "tokenizer.ggml.model = 'llama'"),
        ({"ggml__model": "t5"}, "tokenizer.ggml.model = 't5'"),
        ({"ggml__pre": "viking"}, r"'viking'.*'default', 'gpt-2', 'llama-bpe'.*'smollm'"),
        ({"ggml__add_space_prefix": True}, "add_space_prefix = True"),
        ({"ggml__add_sep_token": True}, "add_sep_token = True"),
        ({"ggml__eos_token_id": 260}, "eos_token_id = 260, outside its vocabulary of 260 tokens"),
        ({"ggml__bos_token_id": -1}, "bos_token_id = -1, outside"),
        ({"ggml__bos_token_id": None, "ggml__add_bos_token": True}, "bos_token is missing"),
        ({"ggml__merges": ["a c"]}, "merge 'a c'"),
        ({"ggml__merges": ["ab"]}, "merge 'ab'"),
        ({"ggml__token_type": [3]}, "260 entries in tokenizer.ggml.tokens but 1"),
        ({"ggml__token_type": [6] + [1] * 259}, r"token 0 \('<bos>'\) the type 6"),
        ({"ggml__tokens": ["<eos>", *tiny()["tokenizer.ggml.tokens"][1:]]}, "'<eos>' twice.*ids 0 and 1"),
    ],
)
def test_refusals(changes, match):
    with pytest.raises(InputError, match=match):
        tokenizer_from_gguf(tiny(**changes))

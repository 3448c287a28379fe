"""The tokenizer inside a GGUF file, rebuilt with `tokenizers` from the metadata.

transformers can do this only with PyTorch, and it does not know every pre-tokenizer: for "smollm" it falls
back to the one of GPT-2, which splits runs of spaces before a digit differently from the tokenizer the model
was trained with.
"""

from collections.abc import Mapping
from typing import NamedTuple

from tide_jax.errors import InputError
from tide_jax.tokenizer import Tokenizer


class _Pre(NamedTuple):
    """How one named pre-tokenizer cuts text before the merges apply."""

    splits: tuple[str, ...]  # one after the other, each cuts the pieces that the ones before it left
    ignore_merges: bool = False  # a piece that is a token as a whole is taken whole
    add_bos: bool = False  # where the file does not say
    nfc: bool = False  # canonical composition first, as the model was trained


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_LLAMA3_PRE = _Pre((_LLAMA3,), ignore_merges=True, add_bos=True)
_PRES = {
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _Pre((_GPT2,)),
    "llama-bpe": _LLAMA3_PRE,
    "llama3": _LLAMA3_PRE,
    "llama-v3": _LLAMA3_PRE,
    "qwen2": _Pre((_QWEN2,), nfc=True),
    "smollm": _Pre((r"\p{N}", _GPT2)),
}

# Values of tokenizer.ggml.token_type. Bytes (6) and undefined (0) have no place in a byte-level vocabulary.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_SPECIAL_KEYS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "eot_token": "tokenizer.ggml.eot_token_id",
    "eom_token": "tokenizer.ggml.eom_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}


def tokenizer_from_gguf(metadata: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer that GGUF metadata (key -> value, arrays as lists) describes.

    Byte-level BPE only (tokenizer.ggml.model "gpt2"). Raises InputError for another kind, an unknown
    pre-tokenizer, a missing key, duplicated tokens, merges of unknown tokens and ids outside the vocabulary.
    """
    from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
    from tokenizers import Tokenizer as Backend

    kind = _need(metadata, "tokenizer.ggml.model")
    if kind != "gpt2":
        raise InputError(
            f"This GGUF file has a tokenizer of the kind tokenizer.ggml.model = {kind!r}; only 'gpt2' "
            f"(byte-level BPE) is supported yet. Convert from the model's original directory with its "
            f"tokenizer.json instead."
        )
    name = _need(metadata, "tokenizer.ggml.pre")
    if name not in _PRES:
        raise InputError(
            f"This GGUF file asks for the pre-tokenizer tokenizer.ggml.pre = {name!r}, which is not known "
            f"here; known are {sorted(_PRES)}. Another one would split text differently from how the model "
            f"was trained, so convert from the model's original directory with its tokenizer.json instead."
        )
    for key in ("tokenizer.ggml.add_space_prefix", "tokenizer.ggml.add_sep_token"):
        if metadata.get(key):
            raise InputError(
                f"This GGUF file sets {key} = {metadata[key]!r}, which is not supported for a byte-level "
                f"tokenizer. Convert from the model's original directory with its tokenizer.json instead."
            )
    pre = _PRES[name]
    tokens, types = _vocabulary(metadata)
    vocab = {token: id for id, token in enumerate(tokens)}
    merges = _merges(metadata, vocab)
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre.ignore_merges))
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in pre.splits]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    # All are in the vocabulary already: adding only makes them match whole, before any split.
    backend.add_tokens(
        [
            AddedToken(token, special=type != _USER_DEFINED, normalized=False)
            for token, type in zip(tokens, types, strict=True)
            if type in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    special = {}
    for token_name, key in _SPECIAL_KEYS.items():
        id = metadata.get(key)
        if id is None:
            continue
        if not 0 <= id < len(tokens):
            raise InputError(
                f"This GGUF file sets {key} = {id}, outside its vocabulary of {len(tokens)} tokens. The file "
                f"is damaged or was written by a faulty converter; get another copy of the model."
            )
        special[token_name] = AddedToken(tokens[id], special=True, normalized=False)
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_template=metadata.get("tokenizer.chat_template"),
        add_bos=metadata.get("tokenizer.ggml.add_bos_token", pre.add_bos),
        add_eos=metadata.get("tokenizer.ggml.add_eos_token", False),
    )


def _need(metadata: Mapping[str, object], key: str):
    if key not in metadata:
        present = sorted(name for name in metadata if name.startswith("tokenizer."))
        raise InputError(
            f"This GGUF file has no {key}, so its tokenizer cannot be rebuilt; its tokenizer keys are "
            f"{present}. Use a file written by a current llama.cpp, or convert from the model's original "
            f"directory."
        )
    return metadata[key]


def _vocabulary(metadata: Mapping[str, object]) -> tuple[list[str], list[int]]:
    """Tokens in the order of their ids and the type of each, checked."""
    tokens = _need(metadata, "tokenizer.ggml.tokens")
    types = _need(metadata, "tokenizer.ggml.token_type")
    if len(tokens) != len(types):
        raise InputError(
            f"This GGUF file has {len(tokens)} entries in tokenizer.ggml.tokens but {len(types)} in "
            f"tokenizer.ggml.token_type. The file is damaged; get another copy of the model."
        )
    seen: dict[str, int] = {}
    for id, (token, type) in enumerate(zip(tokens, types, strict=True)):
        if token in seen:
            raise InputError(
                f"This GGUF file has the token {token!r} twice in tokenizer.ggml.tokens, as ids "
                f"{seen[token]} and {id}, so its text has no single id. Get another copy of the model."
            )
        if type not in (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED):
            raise InputError(
                f"This GGUF file gives token {id} ({token!r}) the type {type} in tokenizer.ggml.token_type, "
                f"which a byte-level tokenizer cannot have. Convert from the model's original directory "
                f"instead."
            )
        seen[token] = id
    return tokens, types


def _merges(metadata: Mapping[str, object], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Merges in the order of their rank; both halves and the result must be tokens."""
    merges = []
    for rank, merge in enumerate(_need(metadata, "tokenizer.ggml.merges")):
        left, _, right = merge.partition(" ")  # byte-level tokens hold no space: it is written Ġ
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise InputError(
                f"This GGUF file has the merge {merge!r} (number {rank} in tokenizer.ggml.merges), which "
                f"does not join two tokens of its vocabulary to a third. The file is damaged; get another "
                f"copy of the model."
            )
        merges.append((left, right))
    return merges

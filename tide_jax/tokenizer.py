"""Text to ids and back: a thin wrapper around `transformers.PreTrainedTokenizerFast`.

transformers renders chat templates in a sandbox and is imported on first use only, so that `import tide_jax`
stays light. Config files are read as JSON data: no class or code that a config names is ever looked up.
"""

import json
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tide_jax.errors import InputError

# Tokens that end a text or a turn, as configs name them: a chat model may have an end of turn beside its EOS.
_STOP_NAMES = ("eos_token", "eot_token", "eom_token")


class Tokenizer:
    """A `tokenizers` backend with named special tokens, a rule for BOS and EOS, perhaps a chat template."""

    def __init__(
        self,
        backend,
        *,
        special_tokens: Mapping[str, object],
        extra_special_tokens: Sequence[object] = (),
        chat_template: str | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
    ):
        """Wrap a copy of `backend` (`tokenizers.Tokenizer`).

        special_tokens: "bos_token", … -> text or `AddedToken`; one that the vocabulary lacks is added.
        add_bos, add_eos: what the model's config says; None leaves the backend's post-processor as it is.
        Raises InputError if BOS or EOS shall be added but is not named.
        """
        self._fast = _fast_class()(
            tokenizer_object=backend, extra_special_tokens=list(extra_special_tokens), **special_tokens
        )
        self._fast.chat_template = chat_template
        self._core = self._fast.backend_tokenizer
        # A tokenizer.json can carry the truncation of a training run; a prompt is never cut in silence.
        self._core.no_truncation()
        self._core.no_padding()
        self._special = {name: str(token) for name, token in special_tokens.items()}
        self._extra = [str(token) for token in extra_special_tokens]
        self._set_edges(add_bos, add_eos)

    def _set_edges(self, add_bos: bool | None, add_eos: bool | None):
        """Make the post-processor add exactly the BOS and EOS asked for; remember whether a BOS is added."""
        edges = self._core.encode("").ids
        # Where BOS and EOS are one token, a single one is taken for the BOS: no prompt ends in EOS.
        has_bos = bool(edges) and edges[0] == self.bos_id
        has_eos = len(edges) > has_bos and edges[-1] == self._fast.eos_token_id
        self._adds_bos = has_bos if add_bos is None else add_bos
        adds_eos = has_eos if add_eos is None else add_eos
        if (self._adds_bos, adds_eos) == (has_bos, has_eos):
            return
        for name, wanted in (("bos_token", self._adds_bos), ("eos_token", adds_eos)):
            if wanted and name not in self._special:
                raise InputError(
                    f"The tokenizer config asks for a token that it does not name: add_{name} is true, "
                    f"{name} is missing; the named ones are {sorted(self._special)}. Name {name} in "
                    f"tokenizer_config.json, or set add_{name} to false."
                )
        from tokenizers.processors import TemplateProcessing

        before = [self._special["bos_token"]] if self._adds_bos else []
        after = [self._special["eos_token"]] if adds_eos else []
        self._core.post_processor = TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", *after, *before, "$B", *after],
            special_tokens=[(token, self._core.token_to_id(token)) for token in {*before, *after}],
        )

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read tokenizer.json, tokenizer_config.json, special_tokens_map.json and chat_template.jinja.

        Only the first is required. Raises InputError for a missing, broken or contradictory file.
        """
        try:
            return cls._read(Path(directory))
        except InputError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"the tokenizer files in {directory} hold something unexpected ({type(error).__name__}: {error}). "
                "Take tokenizer.json and tokenizer_config.json from one release of the model."
            ) from error

    @classmethod
    def _read(cls, directory: Path) -> "Tokenizer":
        backend = _read_backend(directory)
        config = _read_json(directory / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            # Older models name their special tokens in this file; transformers has the same rule.
            config.update(_read_json(directory / "special_tokens_map.json"))
        _add_missing_tokens(backend, config.get("added_tokens_decoder") or {}, directory)
        special = {name: text for name, text in config.items() if name.endswith("_token") and _is_token(text)}
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        if isinstance(extra, dict):
            special, extra = {**special, **extra}, []
        return cls(
            backend,
            special_tokens={name: _as_token(token) for name, token in special.items()},
            extra_special_tokens=[_as_token(token) for token in extra],
            chat_template=_read_template(directory, config),
            add_bos=config.get("add_bos_token"),
            add_eos=config.get("add_eos_token"),
        )

    def save(self, directory: Path):
        """Write the files that `load` (and transformers) reads; the round trip gives an equal tokenizer."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._core.save(str(directory / "tokenizer.json"))
        special = {**self._special, "extra_special_tokens": self._extra}
        # The rule for BOS and EOS is in tokenizer.json by now. A stale map would overrule the config.
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **special}
        _write_text(directory / "tokenizer_config.json", json.dumps(config, indent=2, ensure_ascii=False))
        _write_text(directory / "special_tokens_map.json", json.dumps(special, indent=2, ensure_ascii=False))
        if self.has_chat_template:
            _write_text(directory / "chat_template.jinja", self._fast.chat_template)
        else:
            (directory / "chat_template.jinja").unlink(missing_ok=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokenizer) and self._state() == other._state()

    def _state(self) -> tuple:
        return self._core.to_str(), self._special, self._extra, self._fast.chat_template

    def encode(self, text: str) -> list[int]:
        """Ids of a raw text, with BOS and EOS where the tokenizer adds them; [] for empty text without them.

        A BOS written in the text is kept beside the added one, with a warning. Raises InputError for a lone
        surrogate.
        """
        ids = self._ids(text, add_special_tokens=True)
        self._warn_double_bos(ids)
        return ids

    def encode_chat(self, messages: object, add_generation_prompt: bool = True) -> list[int]:
        """Ids of a conversation, through the model's own template.

        messages: [{"role": str, "content": str}, …]. Where the tokenizer adds a BOS there is exactly one,
        whether or not the template writes it. Raises InputError for no template, malformed messages, and what
        a template refuses.
        """
        if not self.has_chat_template:
            raise InputError(
                "This model has no chat template, so a list of messages cannot be turned into its prompt "
                "format. Pass the prompt as one plain string (on the command line: --raw), or put a "
                "chat_template.jinja beside tokenizer.json."
            )
        _check_messages(messages)
        from jinja2 import TemplateError

        try:
            text = self._fast.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        except TemplateError as error:
            raise InputError(
                f"The model's chat template refuses these messages: {error} The roles given were "
                f"{[message['role'] for message in messages]}. Change the messages to what the template "
                f"accepts, or pass the prompt as one plain string."
            ) from error
        ids = self._ids(text, add_special_tokens=False)
        if self._adds_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        self._warn_double_bos(ids)
        return ids

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"The text is not valid Unicode: a lone surrogate {error.object[error.start]!r} at character "
                f"{error.start}. It comes from bytes that were not decoded as UTF-8; decode them first."
            ) from error
        return self._core.encode(text, add_special_tokens=add_special_tokens).ids

    def _warn_double_bos(self, ids: list[int]):
        if self._adds_bos and ids[:2] == [self.bos_id, self.bos_id]:
            warnings.warn(
                f"The prompt starts with two {self._special['bos_token']!r} (id {self.bos_id}): the "
                f"tokenizer adds one and the text brings its own. Both are kept, which most models were not "
                f"trained on; remove it from the text unless it is meant.",
                stacklevel=3,
            )

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of ids (list or integer array [T]), with every space that they spell: nothing is tidied up."""
        return self._core.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens)

    def token_text(self, id: int) -> str:
        """One token as readable text for plots: spaces, control characters and bytes can be seen."""
        from tokenizers.decoders import ByteLevel

        piece = self._core.id_to_token(int(id))
        if piece is None:
            return f"<{int(id)}>"  # rows that pad the embedding have no token
        if int(id) in self._core.get_added_tokens_decoder():
            return piece
        if isinstance(self._core.decoder, ByteLevel):
            piece = _spell_bytes(piece)
        shown = piece.replace("▁", "␣").replace(" ", "␣")
        return "".join(c if c.isprintable() else repr(c)[1:-1] for c in shown)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can be used."""
        return self._fast.chat_template is not None

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-text token, whether or not it is added; None without one."""
        return self._fast.bos_token_id

    @property
    def eos_ids(self) -> list[int]:
        """Sorted ids that end a text or a turn, as far as the tokenizer knows; [] without any."""
        names = [name for name in _STOP_NAMES if name in self._special]
        return sorted({self._core.token_to_id(self._special[name]) for name in names})

    @property
    def pad_id(self) -> int | None:
        """Id of the padding token; None without one."""
        return self._fast.pad_token_id

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included. The embedding may have more rows, never fewer."""
        return len(self._fast)


def _fast_class():
    """`PreTrainedTokenizerFast`, imported without the advice that PyTorch is missing: it is not needed."""
    logger = logging.getLogger("transformers")

    def is_not_advice(record: logging.LogRecord) -> bool:
        return "PyTorch was not found" not in record.getMessage()

    logger.addFilter(is_not_advice)
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        logger.removeFilter(is_not_advice)
    return PreTrainedTokenizerFast


def _read_backend(directory: Path):
    import tokenizers

    path = directory / "tokenizer.json"
    if not path.is_file():
        found = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
        remedy = "Copy the model's tokenizer.json there."
        if "tokenizer.model" in found:
            remedy = (
                "A SentencePiece tokenizer.model alone is not supported yet: save the tokenizer once with "
                "transformers (AutoTokenizer.from_pretrained(…).save_pretrained(…)), which writes "
                "tokenizer.json."
            )
        raise InputError(f"There is no tokenizer.json in {directory}; its files are {found}. {remedy}")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust library raises plain Exception for every malformed file
        raise InputError(
            f"{path} cannot be read as a tokenizer by tokenizers {tokenizers.__version__}: {error}. Download "
            f"the file again, or upgrade tokenizers if the file is newer than it."
        ) from error


def _read_json(path: Path) -> dict:
    """The object in an optional JSON file, {} if there is none."""
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}. Download the file again.") from error
    if not isinstance(data, dict):
        raise InputError(f"{path} must hold a JSON object, but holds a {type(data).__name__}. Download the file again.")
    return data


def _read_template(directory: Path, config: dict) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_bytes().decode("utf-8")  # read_text would turn \r\n into \n, which is other tokens
    template = config.get("chat_template")
    if not isinstance(template, list):
        return template
    named = {entry["name"]: entry["template"] for entry in template}
    if "default" not in named:
        raise InputError(
            f"tokenizer_config.json in {directory} lists chat templates but none is named 'default': "
            f"{sorted(named)}. Write the one to use to {path}."
        )
    return named["default"]


def _write_text(path: Path, text: str):
    path.write_bytes(text.encode("utf-8"))  # write_text would turn \n into \r\n on some systems


def _is_token(value: object) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _as_token(value: str | dict):
    """A token as configs write it: its text, or an object with the text and how it is matched."""
    if isinstance(value, str):
        return value
    from tokenizers import AddedToken

    flags = {name: value[name] for name in ("single_word", "lstrip", "rstrip", "normalized") if name in value}
    return AddedToken(value["content"], special=value.get("special", True), **flags)


def _add_missing_tokens(backend, decoder: dict, directory: Path):
    """Add tokens that only the config knows, and insist on the ids it gives them."""
    for id, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        token = str(_as_token(entry))
        if backend.token_to_id(token) is None:
            backend.add_tokens([_as_token(entry)])
        found = backend.token_to_id(token)
        if found != int(id):
            raise InputError(
                f"The files in {directory} disagree about token {token!r}: id {id} in tokenizer_config.json, "
                f"id {found} in tokenizer.json. Take both files from the same release."
            )


def _check_messages(messages: object):
    problem = None
    if not isinstance(messages, list | tuple) or not messages:
        problem = f"got {messages!r}"
    else:
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or set(message) != {"role", "content"}:
                problem = f"message {index} is {message!r}"
            elif not all(isinstance(value, str) for value in message.values()):
                problem = f"message {index} has a value that is not a string: {message!r}"
    if problem:
        raise InputError(
            f'A conversation is a non-empty list of {{"role": string, "content": string}} and nothing else, '
            f"but {problem}. Pass text only; tool calls and images are not supported."
        )


def _spell_bytes(piece: str) -> str:
    """Undo the byte alphabet of GPT-2 for one token; bytes that are no whole character become <0xNN>."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    # Bytes without a printable character of their own were given U+0100, U+0101, … in order.
    moved = [byte for byte in range(256) if byte not in set(plain)]
    alphabet = {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(moved)}
    if not set(piece) <= set(alphabet):
        return piece
    text = bytes(alphabet[c] for c in piece).decode("utf-8", errors="surrogateescape")
    return "".join(f"<0x{ord(c) - 0xDC00:02X}>" if "\udc80" <= c <= "\udcff" else c for c in text)

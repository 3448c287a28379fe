"""Arguments that several verbs share, and their meaning."""

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from tide_jax.errors import InputError

if TYPE_CHECKING:
    from tide_jax import Model, Ngram, Verify
    from tide_jax.exits import ExitRule, Remainder

Directory = Positional[Annotated[Path, arg(metavar="DST", help="Directory that `tide-jax convert` made.")]]
Json = Annotated[bool, arg(help="Print exactly one JSON object on standard output.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    arg(help="Of weights, states and caches. auto: as stored; on a CPU, 16-bit weights are held as float32."),
]
EXITS_HELP = (
    "When a token leaves: never | fixed:N (after N layers) | router (at the calibrated thresholds) "
    "| router:T (where the router's score is above T, 0 to 1)."
)
Exits = Annotated[str, arg(metavar="RULE", help=EXITS_HELP)]
ExitPoints = Annotated[
    str | None,
    arg(
        metavar="N,N,…",
        help="Depths (layers run) at which a token may leave. None: those the rule names.",
    ),
]
RemainderName = Annotated[
    str,
    arg(
        metavar="NAME",
        help="What stands in for layers that are not run. project: K and V projections of the exit state | "
        "deferred:N: they are run later, over up to N tokens at once, and leave exact K/V | auto: project, and with "
        "--verify deferred.",
    ),
]
ProposeName = Annotated[
    Literal["none", "ngram"],
    arg(
        help="What drafts instead of --exits, under --verify. ngram: what followed the last words when they last came."
    ),
]
VerifyWidth = Annotated[
    str | None,
    arg(
        metavar="N",
        help="Let the full model judge every token, over up to N columns at once: the text is then its own. auto: as "
        "many as `tide-jax warmup` and the acceptance so far say.",
    ),
]
MeshSizes = Annotated[
    str | None,
    arg(
        metavar="data=N,model=N",
        help="Devices that share the work: along model the heads, feed-forward layers and vocabulary; along data the "
        "rows of a batch (of which there is one where prompts run one by one). None: one device.",
    ),
]
Raw = Annotated[bool, arg(help="Take prompts as raw text; otherwise the model's chat template is applied, if any.")]
MaxNewTokens = Annotated[int, arg(metavar="N", help="New tokens, at most.")]


def parse_exits(text: str) -> "ExitRule":
    """The rule that `--exits` names.

    Raises:
        InputError: it is not one of the forms.
    """
    from tide_jax.exits import FixedDepth, Never, RouterExit

    name, given, value = text.partition(":")
    if name == "never" and not given:
        return Never()
    if name == "router" and not given:
        return RouterExit()
    try:
        number = {"fixed": int, "router": float}[name](value)
    except (KeyError, ValueError) as error:
        raise InputError(
            f"--exits {text!r} is not a rule. Write never, fixed:N with a number of layers (fixed:16), "
            "router, or router:T with a threshold (router:0.85)."
        ) from error
    return FixedDepth(number) if name == "fixed" else RouterExit(number)


def parse_exit_points(text: str | None) -> tuple[int, ...] | None:
    """The depths that `--exit-points` lists.

    Raises:
        InputError: not whole numbers with commas between them.
    """
    if text is None:
        return None
    try:
        return tuple(int(depth) for depth in text.split(","))
    except ValueError as error:
        raise InputError(
            f"--exit-points {text!r} is not a list of depths. Write numbers of layers with commas: 8,16,24."
        ) from error


def parse_remainder(text: str) -> "Remainder | None":
    """The remainder that `--remainder` names; None: the default.

    Raises:
        InputError: it is not one of the forms.
    """
    from tide_jax.exits import Deferred, ProjectKV

    name, given, value = text.partition(":")
    if text == "auto":
        return None
    if text == "project":
        return ProjectKV()
    if name == "deferred" and (not given or value.isdecimal()):
        return Deferred(int(value)) if given else Deferred()
    raise InputError(
        f"--remainder {text!r} is not a remainder. Write auto, project, or deferred:N with 1 to 8 columns."
    )


def parse_propose(name: str) -> "Ngram | None":
    """The proposer of that name."""
    from tide_jax.decode import Ngram

    return {"none": None, "ngram": Ngram()}[name]


def parse_verify(text: str | None) -> "Verify | None":
    """What `--verify` asks for.

    Raises:
        InputError: it is not one of the forms.
    """
    from tide_jax.decode import Verify

    if text is None:
        return None
    if text != "auto" and not text.isdecimal():
        raise InputError(f"--verify {text!r} is not a number of columns. Write 1 to 8, or auto.")
    return Verify("auto" if text == "auto" else int(text))


def parse_mesh(text: str | None) -> dict[str, int] | None:
    """The sizes that `--mesh` names.

    Raises:
        InputError: it is not one of the forms.
    """
    if text is None:
        return None
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    if len(dict(pairs)) != len(pairs) or not re.fullmatch(r"([a-z]+=[0-9]{1,6})(,[a-z]+=[0-9]{1,6})*", text):
        raise InputError(f"--mesh {text[:40]!r} is not a mesh. Write data=2, model=4 or data=2,model=4.")
    return {name: int(value) for name, value in pairs}


def load_model(directory: Path, dtype: str = "auto", *, exits: bool = True, mesh: str | None = None) -> "Model":
    """The model in a converted directory, with or without its exit heads."""
    sizes = parse_mesh(mesh)

    from tide_jax.model import load
    from tide_jax.progress import status

    with status(f"loading {directory}"):
        return load(directory, None if dtype == "auto" else dtype, exits=exits, mesh=sizes)


def as_prompts(model: "Model", texts: list[str], *, raw: bool) -> list[str | list[dict[str, str]]]:
    """Prompts for the library: chats where the model has a chat template and `raw` is false, else the texts.

    Raises:
        InputError: a chat message is empty.
    """
    if raw or model.tokenizer is None or not model.tokenizer.has_chat_template:
        return list(texts)
    if empty := [number for number, text in enumerate(texts, 1) if not text.strip()]:
        raise InputError(f"prompt {empty[0]} is empty. Write a question, or use --raw to send it as it is.")
    return [[{"role": "user", "content": text}] for text in texts]


def read_prompts(source: str | None) -> list[str]:
    """Prompts from a file, one a line; blank lines are left out.

    Raises:
        InputError: the file is not there, is not text, or holds no prompt.
    """
    if source is None:
        return []
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{source} is not UTF-8 text ({error.reason}, byte {error.start}). Save it as UTF-8."
        ) from error
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    if not lines:
        raise InputError(f"{source} holds no prompt. Write one a line.")
    return lines

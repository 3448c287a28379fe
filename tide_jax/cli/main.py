"""Parsing arguments, running a verb, and turning what goes wrong into an exit code.

Nothing heavy is imported before the arguments are understood, so that help and usage errors are instant.
"""

import contextlib
import os
import sys
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Annotated

import tyro

from tide_jax.cli import output
from tide_jax.cli.calibrate import Calibrate
from tide_jax.cli.compare import Compare
from tide_jax.cli.convert import Convert
from tide_jax.cli.export import Export
from tide_jax.cli.generate import Generate
from tide_jax.cli.inspect import Inspect
from tide_jax.cli.warmup import Warmup
from tide_jax.errors import InputError

VERBS = {
    "convert": Convert,
    "inspect": Inspect,
    "calibrate": Calibrate,
    "generate": Generate,
    "compare": Compare,
    "warmup": Warmup,
    "export": Export,
}
ABOUT = """Early-exit decoding for language models in JAX, measured against the full model.

$ tide-jax convert SmolLM2-135M-Instruct.gguf smollm2
$ tide-jax calibrate smollm2 --data texts.jsonl
$ tide-jax generate smollm2 --prompt "Why is the sky blue?" --exits router
$ tide-jax compare smollm2 --prompt "Why is the sky blue?" --exits fixed:24
$ tide-jax generate smollm2 --prompt "Repeat: to be or not to be" --propose ngram --verify 4

`tide-jax VERB --help` explains one verb. Results go to standard output, everything else to standard error."""
_STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitArgPrefixes)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        args: arguments after the program's name; default: those of this process.

    Returns:
        The exit code: 0, 2 when the input is at fault, 130 when interrupted. Anything else that goes wrong is
        a bug and keeps its traceback. Help and usage errors end in `SystemExit` (0 and 2).
    """
    args = list(sys.argv[1:] if args is None else args)
    try:
        _parse(args).run()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has left; the flush at the interpreter's end must not fail too.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except InputError as error:
        output.fail(str(error))
        return 2
    except OSError as error:
        output.fail(f"{error.filename}: {error.strerror}." if error.filename else str(error))
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parse(args: list[str]):
    """The verb that the arguments name, with its options."""
    if args and args[0] in VERBS:
        return tyro.cli(VERBS[args[0]], prog=f"tide-jax {args[0]}", args=args[1:], config=_STYLE)
    choices = [
        Annotated[verb, tyro.conf.subcommand(name, description=verb.__doc__.partition("\n")[0])]
        for name, verb in VERBS.items()
    ]
    return tyro.cli(reduce(or_, choices), prog="tide-jax", description=ABOUT, args=args, config=_STYLE)

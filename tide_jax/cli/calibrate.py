"""`tide-jax calibrate`."""

import dataclasses
import os
import time
from typing import Annotated, Literal

from tyro.conf import arg

from tide_jax.cli import output
from tide_jax.cli.options import Directory, Dtype, Json, load_model, read_prompts
from tide_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Learn at which depths, and when, tokens of this model may leave.

    Trains exit heads on your texts and stores them, with thresholds, beside the weights.

    $ tide-jax calibrate smollm2 --data texts.jsonl --prompts questions.txt
    """

    model: Directory
    data: Annotated[
        str,
        arg(
            metavar="FILE",
            help='Texts: JSON lines with a "text" each, or plain text; - reads standard input.',
        ),
    ]
    texts: Annotated[int, arg(metavar="N", help="Texts to use, at most.")] = 400
    tokens: Annotated[int, arg(metavar="N", help="Tokens of each text.")] = 128
    prompts: Annotated[
        str | None,
        arg(
            metavar="FILE",
            help="What users will ask, one prompt a line: the thresholds are checked on the model's own answers. "
            "Without it, texts of --data that nothing was trained on are asked about.",
        ),
    ] = None
    agreement: Annotated[
        float, arg(metavar="SHARE", help="Share of all tokens that must equal the full model's choice.")
    ] = 0.95
    label: Annotated[
        Literal["agreement", "cosine"],
        arg(help="What routers learn: same choice as the full model, or a final state of similar direction."),
    ] = "agreement"
    seed: Annotated[int, arg(metavar="N", help="Of the training.")] = 0
    dtype: Dtype = "auto"
    json: Json = False

    def run(self) -> None:
        """Calibrate, store, and report."""
        from tide_jax.checkpoint import read_manifest

        read_manifest(self.model)
        if not os.access(self.model, os.W_OK):
            raise InputError(f"{self.model} is not writable, and exit heads are stored there. Change its permissions.")

        from calib import calibrate, read_texts

        prompts = read_prompts(self.prompts)
        texts = read_texts(self.data, limit=self.texts)
        model = load_model(self.model, self.dtype, exits=False)  # old heads may be why one calibrates
        began = time.perf_counter()
        result = calibrate(
            model,
            texts,
            tokens_per_text=self.tokens,
            agreement=self.agreement,
            label=self.label,
            prompts=prompts or None,
            seed=self.seed,
        )
        result.save(self.model)
        if self.json:
            output.emit(result.report)
            return
        output.show(result.table())
        output.note(f"stored in {self.model}, {time.perf_counter() - began:.0f} s")

"""`tide-jax generate`."""

import dataclasses
from typing import Annotated

from tyro.conf import arg

from tide_jax.cli import output
from tide_jax.cli.options import (
    Directory,
    Dtype,
    ExitPoints,
    Exits,
    Json,
    MaxNewTokens,
    MeshSizes,
    ProposeName,
    Raw,
    RemainderName,
    VerifyWidth,
    as_prompts,
    load_model,
    parse_exit_points,
    parse_exits,
    parse_propose,
    parse_remainder,
    parse_verify,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """Answer one prompt, and say how many layers each token really ran.

    The text goes to standard output, depth and speed to standard error.

    $ tide-jax generate smollm2 --prompt "Why is the sky blue?"
    $ tide-jax generate smollm2 --prompt "Why is the sky blue?" --exits router --json
    $ tide-jax generate smollm2 --raw --prompt "The sky is" --exits fixed:24
    $ tide-jax generate smollm2 --prompt "Repeat: to be or not to be" --propose ngram --verify 4
    """

    model: Directory
    prompt: Annotated[str, arg(metavar="TEXT", help="What to answer (with --raw: to continue).")]
    exits: Exits = "never"
    exit_points: ExitPoints = None
    remainder: RemainderName = "auto"
    propose: ProposeName = "none"
    verify: VerifyWidth = None
    max_new_tokens: MaxNewTokens = 64
    temperature: Annotated[float, arg(metavar="T", help="0 picks the likeliest token; otherwise one is drawn.")] = 0.0
    seed: Annotated[int, arg(metavar="N", help="Of the draws.")] = 0
    raw: Raw = False
    dtype: Dtype = "auto"
    mesh: MeshSizes = None
    json: Json = False

    def run(self) -> None:
        """Generate and print."""
        from tide_jax.decode import Sampling, generate
        from tide_jax.progress import status

        rule = parse_exits(self.exits)
        points = parse_exit_points(self.exit_points)
        remainder, propose, verify = (
            parse_remainder(self.remainder),
            parse_propose(self.propose),
            parse_verify(self.verify),
        )
        sampling = Sampling(temperature=self.temperature)
        model = load_model(self.model, self.dtype, mesh=self.mesh)
        prompts = as_prompts(model, [self.prompt], raw=self.raw)
        with status("compiling and generating"):
            out = generate(
                model,
                prompts,
                max_new_tokens=self.max_new_tokens,
                exits=rule,
                exit_points=points,
                remainder=remainder,
                propose=propose,
                verify=verify,
                sampling=sampling,
                seed=self.seed,
            )
        stats, length = out.stats, out.lengths[0]
        if stats.flagged:
            output.note("warning: values that are not finite were met; the text cannot be trusted")
        if self.json:
            output.emit(
                {
                    "text": out.text[0],
                    "tokens": out.tokens[0, :length].tolist(),
                    "exit_depths": out.exit_depths[0, :length].tolist(),
                    "mean_depth": stats.mean_depth,
                    "tokens_per_second": stats.tokens_per_second,
                    "num_layers": model.config.num_layers,
                    "exits": self.exits,
                    "histogram": stats.histogram,
                    "executed_segments": stats.executed_segments,
                    "executed_layers": stats.executed_layers,
                    "timings": dataclasses.asdict(stats.timings),
                    "predicted_tokens_per_second": stats.predicted_tokens_per_second or None,
                    "drafts": stats.drafts and stats.drafts.facts(),
                    "flagged": bool(stats.flagged),
                }
            )
            return
        print(out.text[0])
        output.note(
            f"\n{length} tokens, {stats.mean_depth:.1f} of {model.config.num_layers} layers on average"
            f"{' in the draft' if stats.drafts else ''} "
            f"({output.histogram_text(stats.histogram)}), {stats.tokens_per_second:.1f} tokens/s, "
            f"compiled in {stats.timings.compile:.1f} s"
        )
        if stats.drafts is not None:
            output.note(output.drafts_text(stats.drafts))

"""`tide-jax compare`."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Annotated

from tyro.conf import UseAppendAction, arg

from tide_jax.cli import output
from tide_jax.cli.options import (
    EXITS_HELP,
    Directory,
    Dtype,
    ExitPoints,
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
    read_prompts,
)
from tide_jax.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from tide_jax import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compare:
    """Measure an exit rule against the full model: speed beside quality.

    Agreement is counted along the full model's own greedy answers, not along the faster run's.

    $ tide-jax compare smollm2 --prompt "Why is the sky blue?" --exits router
    $ tide-jax compare smollm2 --prompts questions.txt --exits fixed:24 --json
    $ tide-jax compare smollm2 --prompts questions.txt --propose ngram --verify 4
    """

    model: Directory
    prompt: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT", help="A prompt.")] = ()
    prompts: Annotated[str | None, arg(metavar="FILE", help="Prompts, one a line; - reads standard input.")] = None
    exits: Annotated[
        str | None, arg(metavar="RULE", help=f"{EXITS_HELP} Default: router, or what --propose names.")
    ] = None
    exit_points: ExitPoints = None
    remainder: RemainderName = "auto"
    propose: ProposeName = "none"
    verify: VerifyWidth = None
    max_new_tokens: MaxNewTokens = 64
    raw: Raw = False
    dtype: Dtype = "auto"
    mesh: MeshSizes = None
    json: Json = False

    def run(self) -> None:
        """Compare and print."""
        from tide_jax.decode import compare
        from tide_jax.progress import track

        exits = self.exits or ("router" if self.propose == "none" else "never")
        rule = parse_exits(exits)
        points = parse_exit_points(self.exit_points)
        remainder, propose, verify = (
            parse_remainder(self.remainder),
            parse_propose(self.propose),
            parse_verify(self.verify),
        )
        texts = [*self.prompt, *read_prompts(self.prompts)]
        if not texts:
            raise InputError("compare needs a prompt. Give --prompt TEXT (as often as you like) or --prompts FILE.")
        model = load_model(self.model, self.dtype, mesh=self.mesh)
        prompts = as_prompts(model, texts, raw=self.raw)
        output.note("compiling, then running every prompt at full depth and with exits")
        report = compare(
            model,
            prompts,
            exits=rule,
            exit_points=points,
            remainder=remainder,
            propose=propose,
            verify=verify,
            max_new_tokens=self.max_new_tokens,
            progress=functools.partial(track, description="prompts"),
        )
        name = exits if self.propose == "none" else self.propose
        if verify is not None:
            name += f", verified {self.verify}"
        if self.json:
            output.emit(_facts(exits, self.propose, self.verify, texts, report))
            return
        output.show(side_by_side(name, report, num_layers=model.config.num_layers))
        if report.drafts is not None:
            output.show(output.drafts_text(report.drafts))
        output.show(*answers(texts, {"full": report.full_texts, name: report.texts}))


def _facts(exits: str, propose: str, verify: str | None, prompts: list[str], report: "Report") -> dict[str, object]:
    """The report as JSON-ready data."""
    return {
        "exits": exits,
        "propose": propose,
        "verify": verify,
        **{field.name: getattr(report, field.name) for field in dataclasses.fields(report)},
        "drafts": report.drafts and report.drafts.facts(),
        "speedup": report.tokens_per_second / report.full_tokens_per_second,
        "prompts": prompts,
        "tokens": [tokens.tolist() for tokens in report.tokens],
        "exit_depths": [depths.tolist() for depths in report.exit_depths],
    }


def side_by_side(name: str, report: "Report", *, num_layers: int) -> "Table":
    """The full model beside the rule of that name."""
    from rich.table import Table
    from rich.text import Text

    same = report.texts == report.full_texts
    speedup = report.tokens_per_second / report.full_tokens_per_second
    depth = "layers run per token" if report.drafts is None else "layers of its draft, per token"
    rows = {
        "same choice as the full model": ("100 %", f"{100 * report.agreement:.1f} %"),
        "tokens before the texts differ": ("–", "–" if same else f"{report.first_divergence:.1f}"),
        "KL divergence, nats": ("0", f"{report.kl:.3f}"),
        "NLL gap, nats": ("0", f"{report.nll_gap:+.3f}"),
        "longest repeat, tokens": (f"{report.full_longest_repeat:.1f}", f"{report.longest_repeat:.1f}"),
        depth: (
            f"{num_layers}",
            f"{report.mean_depth:.1f}",
        ),
        "tokens by depth": (f"{num_layers}: 100 %", output.histogram_text(report.histogram)),
        "tokens/s": (
            f"{report.full_tokens_per_second:.1f}",
            f"{report.tokens_per_second:.1f} ({speedup:.2f}×)",
        ),
    }
    title = f"{report.positions} positions of the full model's own answers"
    table = Table(title=title, title_justify="left")
    table.add_column("", style="bold")
    table.add_column("full depth", justify="right")
    table.add_column(Text(name), justify="right")
    for measure, values in rows.items():
        table.add_row(measure, *values)
    return table


def answers(prompts: list[str], texts: dict[str, list[str]]) -> list["Table"]:
    """For each prompt a table of its answers, one line per run, shortened."""
    from rich.table import Table
    from rich.text import Text

    tables = []
    for index, prompt in enumerate(prompts):
        title = Text(f"\n{output.shortened(prompt, 100)}", style="italic")
        table = Table(title=title, title_justify="left", show_header=False, box=None)
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        for name, answered in texts.items():
            table.add_row(Text(name), Text(output.shortened(answered[index], 300)))
        tables.append(table)
    return tables

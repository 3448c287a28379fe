"""How many columns the next round should have: acceptance so far against measured step times.

The choice is a prediction. The rate r at which drafts are accepted is an exponential average per row; a draft of m
tokens is then expected to yield n = 1 + r + … + r^m tokens. If every round were like this one, a row would need as many
rounds to its limit as it has tokens left, divided by n, and a round takes what the table says. The width is taken at
which these times, added up over the rows, are least: so a row that gains nothing is not made to wait for one that gains
much. And of a batch only widths are taken with which its last row is expected to end sooner too, given how often the
rows had something to draft. The host keeps the table's scale at the wall clock's between runs (`corrected`).

`MEMORY`, `PRIOR` and `MARGIN` were chosen by replaying `Ngram` on SmolLM2's answers to 66 prompts of five kinds at
measured costs, for rows alone and in batches of 8; the result hardly moves with any of them. `EXITS_PRIOR`,
`FORGETTING` and `OFFERS_PRIOR` are reasoned, not measured.
"""

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from tide_jax.decode.state import Control, RoundState, Tally
from tide_jax.errors import InputError
from tide_jax.exits.remainders import WIDTHS
from tide_jax.sharding import describe

FILE_NAME = "step_times.json"
FORMAT = "tide-step-times-1"
MEMORY = 0.95  # of a round's outcome, what the next still weighs
PRIOR = (2.0, 4.0)  # accepted, tried: before anything is known, every other proposal is taken for right
# Proposals are judged by what comes even when they are not used. What exits would have drafted is only known by
# drafting: so they begin with much trust, and win it back slowly in rounds without a draft.
EXITS_PRIOR = (1.8, 2.0)
FORGETTING = 0.995
OFFERS_PRIOR = 0.5  # of rounds, before any
MARGIN = 1.05  # what a wider round must promise over a plain step: the losses of wrong predictions come first


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Measured seconds of passes of 1, 4 and 8 columns per row at one batch size, on one device.

    Attributes:
        layer: of one layer.
        head: of final norm and LM head.
    """

    layer: Sequence[int | float]
    head: Sequence[int | float]

    def __post_init__(self):
        if not all(_is_seconds(row) for row in (self.layer, self.head)):
            raise InputError(
                f"StepTimes: layer {self.layer} and head {self.head} must be {len(WIDTHS)} positive numbers of "
                f"seconds each, for passes of {WIDTHS} columns."
            )

    def seconds(self, layers: Int[np.ndarray, " widths"], heads: Int[np.ndarray, " widths"]) -> np.ndarray:
        """Predicted seconds, by width, of so many layers and LM heads."""
        return np.asarray(self.layer) * layers + np.asarray(self.head) * heads

    def corrected(self, predicted: float, measured: float) -> "StepTimes":
        """The table after `measured` seconds for what was predicted: all of it moves half of the way.

        How the widths compare stays as it was measured side by side: a run at one width, on a machine that is slower
        for a while, says nothing of that, and would make the other widths look cheap.
        """
        if not predicted or not measured:
            return self
        # One run may have met another's work on the machine: no more than half as much again at once.
        factor = 1 + 0.5 * float(np.clip(measured / predicted - 1, -0.5, 1.0))
        return StepTimes(layer=[time * factor for time in self.layer], head=[time * factor for time in self.head])


def _is_seconds(row: object) -> bool:
    if not isinstance(row, tuple | list) or len(row) != len(WIDTHS):
        return False
    return all(isinstance(time, int | float) and math.isfinite(time) and time > 0 for time in row)


def new_control(times: StepTimes, batch: int, draft_layers: int | float) -> Control:
    """Nothing observed yet."""
    return Control(
        layer=jnp.asarray(times.layer, jnp.float32),
        head=jnp.asarray(times.head, jnp.float32),
        accepted=jnp.zeros(batch, jnp.float32),
        tried=jnp.zeros(batch, jnp.float32),
        offers=jnp.full(batch, OFFERS_PRIOR, jnp.float32),
        draft_layers=jnp.float32(draft_layers),
    )


def learn(rounds: RoundState, accepted: Int[Array, " batch"], proposed: Int[Array, " batch"]) -> RoundState:
    """Take in how many of the proposed tokens of each row were right."""
    control = rounds.control
    if control is None:
        return rounds
    some, tried = proposed > 0, jnp.minimum(accepted + 1, proposed)
    return rounds._replace(
        control=control._replace(
            accepted=jnp.where(some, MEMORY * control.accepted + accepted, control.accepted),
            tried=jnp.where(some, MEMORY * control.tried + tried, control.tried),
        )
    )


def offered(control: Control, proposals: Int[Array, " batch"]) -> Control:
    """Take in which rows have something to draft."""
    return control._replace(offers=MEMORY * control.offers + (1 - MEMORY) * (proposals > 0))


def forget(rounds: RoundState) -> RoundState:
    """A round went by without a draft."""
    control = rounds.control
    return rounds._replace(
        control=control._replace(accepted=FORGETTING * control.accepted, tried=FORGETTING * control.tried)
    )


def best_width(
    control: Control,
    bodies: Sequence[int],
    num_layers: int,
    proposals: Int[Array, " batch"],
    left: Int[Array, " batch"],
    *,
    drafting_costs: bool,
) -> Int[Array, ""]:
    """The width, 1 or one of `bodies`, at which the rows' expected times to their limits add up to least.

    Of the widths that are expected to bring the end of the whole batch nearer.

    Args:
        control: what is known.
        bodies: widths above 1 that passes are compiled for.
        num_layers: of the model.
        proposals: tokens that each row can draft.
        left: tokens between each row and its limit; 0 where it has ended.
        drafting_costs: drafts run layers, then only the others are left to settle; else they cost nothing.
    """
    accepted, tried = EXITS_PRIOR if drafting_costs else PRIOR
    rate = (control.accepted + accepted) / (control.tried + tried)
    offers = jnp.ones_like(control.offers) if drafting_costs else control.offers
    busy = jnp.where(left > 0, offers, 0).sum() / jnp.maximum((left > 0).sum(), 1)  # share of rounds that would be wide
    widths, times = (1, *bodies), []
    step = num_layers * control.layer[0] + control.head[0]
    for width in widths:
        index = WIDTHS.index(width)
        powers = rate[:, None] ** jnp.arange(width)
        reached = jnp.arange(width) <= jnp.minimum(proposals, width - 1)[:, None]
        rounds = (left / jnp.where(reached, powers, 0).sum(axis=1)).sum()
        settled, drafting = jnp.float32(num_layers), jnp.float32(0)
        if drafting_costs and width > 1:
            settled = num_layers - control.draft_layers
            drafting = width * control.draft_layers * control.layer[0] + (width - 1) * control.head[0]
        seconds = (drafting + settled * control.layer[index] + control.head[index]) * (1.0 if width == 1 else MARGIN)
        end = (left / (1 + offers * (powers.sum(axis=1) - 1))).max() * (step + busy * (seconds - step))
        times.append(jnp.where(end <= left.max() * step, rounds * seconds, jnp.inf) if width > 1 else rounds * seconds)
    return jnp.asarray(widths)[jnp.argmin(jnp.stack(times))]


def executed(tally: Tally, segments_run: Array, edges: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Layers and LM heads run by passes of each width."""
    lengths = np.diff(edges)
    layers = np.asarray(tally.settled_segments) @ lengths
    layers[0] += int(np.dot(np.asarray(segments_run), lengths))
    return layers, np.asarray(tally.lm_heads)


def device_name(mesh: Mesh | None = None) -> str:
    """What step times were measured on: the kind of device, for a CPU how many cores this process may use, the mesh."""
    name = jax.devices()[0].device_kind
    if jax.devices()[0].platform == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        name = f"cpu, {cores} cores"
    return name if mesh is None else f"{name}, mesh {describe(mesh.shape)}"


def write_step_times(directory: Path, dtype: str, tables: Mapping[int, StepTimes], mesh: Mesh | None = None) -> None:
    """Keep the tables of this device (or mesh) and dtype, by batch size, beside the model; all others stay.

    A file that cannot be read is replaced.
    """
    path = directory / FILE_NAME
    kept = []
    if path.exists():
        with contextlib.suppress(InputError):
            kept = _entries(path)
    own = {"device": device_name(mesh), "dtype": dtype}
    kept = [e for e in kept if e["batch"] not in tables or {key: e[key] for key in own} != own]
    made = [{**own, "batch": batch, "layer": times.layer, "head": times.head} for batch, times in tables.items()]
    beside = path.with_name(FILE_NAME + ".part")
    beside.write_text(json.dumps({"format": FORMAT, "widths": WIDTHS, "entries": kept + made}, indent=2) + "\n")
    beside.replace(path)


def read_step_times(directory: Path | None, dtype: str, mesh: Mesh | None = None) -> dict[int, StepTimes]:
    """The tables of this device (or mesh) and dtype by batch size; empty where there are none.

    Raises:
        InputError: the file is damaged.
    """
    path = None if directory is None else directory / FILE_NAME
    if path is None or not path.exists():
        return {}
    return {
        entry["batch"]: _times(entry)
        for entry in _entries(path)
        if (entry["device"], entry["dtype"]) == (device_name(mesh), dtype)
    }


def _entries(path: Path) -> list[dict]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format"] != FORMAT or tuple(data["widths"]) != WIDTHS:
            raise ValueError(f"format {data['format']!r}, widths {data['widths']}")
        for entry in data["entries"]:
            _times(entry)
            entry["device"], entry["dtype"]
            if type(entry["batch"]) is not int or entry["batch"] < 1:
                raise ValueError(f"batch {entry['batch']!r}")
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise InputError(
            f"{path} cannot be read as step times ({error}). Run `tide-jax warmup` again, or remove the file."
        ) from error
    return data["entries"]


def _times(entry: Mapping) -> StepTimes:
    return StepTimes(layer=tuple(entry["layer"]), head=tuple(entry["head"]))


def at_batch(tables: Mapping[int, StepTimes], batch: int) -> StepTimes:
    """The table of a batch size, between measured ones interpolated; beyond them that of the nearest."""
    sizes = sorted(tables)

    def between(name: str) -> tuple[float, ...]:
        measured = np.array([getattr(tables[size], name) for size in sizes])
        return tuple(float(np.interp(batch, sizes, column)) for column in measured.T)

    return StepTimes(layer=between("layer"), head=between("head"))

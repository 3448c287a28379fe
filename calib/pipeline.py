"""The order of calibration: states, then projections, then labels through them, then routers, then thresholds."""

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flax import nnx

from calib.collect import States, collect, split
from calib.labels import Label, degenerate, labels
from calib.projections import ridge
from calib.report import render
from calib.routers import RouterInput, scores, train_routers
from calib.texts import Text
from calib.thresholds import choose, curve
from tide_jax.decode import Yardstick
from tide_jax.errors import InputError
from tide_jax.exits import ExitHead, ExitHeads, Projection, RouterExit
from tide_jax.exits.heads import FILE_NAME, save_heads
from tide_jax.model import Model
from tide_jax.progress import track

REPORT_NAME = "calibration.json"
SHARES = (0.4, 0.4, 0.2)  # documents for projections, for routers, for thresholds


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What calibration learned.

    Attributes:
        exits: heads of all candidate depths, thresholds of the chosen ones.
        report: JSON-ready account of data, depths, curves, and the check with the running engine.
        fingerprint: of the model.
    """

    exits: ExitHeads
    report: dict[str, Any]
    fingerprint: str

    def save(self, directory: Path) -> None:
        """Write `exit_heads.safetensors` and `calibration.json` into a converted directory."""
        save_heads(
            directory / FILE_NAME,
            self.exits,
            fingerprint=self.fingerprint,
            agreement=self.report["agreement"],
        )
        beside = directory / (REPORT_NAME + ".part")
        beside.write_text(json.dumps(self.report, indent=2) + "\n")
        beside.replace(directory / REPORT_NAME)

    def table(self):
        """The report for people, a rich renderable."""
        return render(self.report)


def candidate_depths(num_layers: int) -> tuple[int, ...]:
    """Every 4 layers from 8 on, never the last (TIDE, arXiv 2603.21365); all depths of a model of 8 layers or fewer."""
    return tuple(range(8, num_layers, 4)) or tuple(range(1, num_layers))


def calibrate(
    model: Model,
    texts: Sequence[Text],
    *,
    agreement: float = 0.95,
    label: Label = "agreement",
    tokens_per_text: int = 128,
    depths: Sequence[int] | None = None,
    prompts: Sequence[str] | None = None,
    live_prompts: int = 32,
    live_tokens: int = 64,
    seed: int = 0,
) -> Calibration:
    """Learn exit projections, routers and thresholds from text.

    Texts are split by document into three parts. On the first, a closed-form affine projection is fitted per candidate
    depth, and kept only where it raises agreement on the second. On the second, labels are made through it and routers
    are trained. On the third, at most 3 exit points and their thresholds are chosen so that `agreement` of all tokens
    get the full model's token. Those states came from exact K/V, while the running engine lives with its own
    approximate K/V: so the choice is checked on the yardstick, on the model's own answers to texts of the third part,
    and tightened until it holds.

    Args:
        model: a loaded model with a tokenizer.
        texts: calibration texts.
        agreement: share of tokens that must get the full model's token, in (0, 1].
        label: `agreement` of argmax, or the paper's `cosine` above 0.98.
        tokens_per_text: tokens taken from the beginning of each text.
        depths: candidate exit points in layers run; None: `candidate_depths`.
        prompts: what users will ask. The running engine is checked on the model's own answers to these; None: to
            texts of the third part.
        live_prompts: how many of them are used, spread over the list.
        live_tokens: tokens of each answer; approximate K/V adds up, so short answers would promise too much.
        seed: of splits, initial weights and batch order.

    Raises:
        InputError: values out of range, too little text, no candidate depth, or a model that devices share.

    Example:
        >>> model = tide.load("demo_out/smollm2")
        >>> result = calibrate(model, read_texts("news.txt"))
        >>> result.save(model.path)
    """
    layers = model.config.num_layers
    if model.mesh is not None:
        raise InputError("calibration runs on one device: load the model without a mesh; its exits serve with one.")
    if not 0 < agreement <= 1:
        raise InputError(f"agreement is {agreement}; it is a share of tokens, above 0 and at most 1.")
    if label not in ("agreement", "cosine"):
        raise InputError(f"label is {label!r}; use 'agreement' or 'cosine'.")
    if not 2 <= tokens_per_text <= model.config.max_positions:
        raise InputError(
            f"tokens_per_text is {tokens_per_text}; it must be between 2 and the model's context of "
            f"{model.config.max_positions} tokens."
        )
    if live_prompts < 1:
        raise InputError(f"live_prompts is {live_prompts}; the engine is checked on at least 1 answer.")
    if model.tokenizer is None:
        raise InputError("this model was made in memory without a tokenizer, and calibration reads text.")
    depths = candidate_depths(layers) if depths is None else tuple(sorted(set(depths)))
    if not depths or depths[0] < 1 or depths[-1] >= layers:
        raise InputError(f"candidate depths {list(depths)} must lie between 1 and {layers - 1}, layers run.")
    states = collect(
        model,
        texts,
        depths,
        tokens_per_text=tokens_per_text,
        progress=_bar("collecting states", len(texts) / 8),
    )
    first, second, third = (states.where(mask) for mask in split(states.document, SHARES, seed))

    heads, rows = {}, []
    projections: list[Projection | None] = []
    good_second, good_third = [], []
    probe = second.where(np.arange(len(second.last)) % max(1, len(second.last) // 2048) == 0)
    for index in _bar("projections and labels", len(depths))(range(len(depths))):
        fitted = ridge(first.x[index], first.last)
        plain, through = (labels("agreement", model, map_, probe, index) for map_ in (None, fitted))
        keep = bool(through.mean() > plain.mean())
        projections.append(fitted if keep else None)
        good_second.append(labels(label, model, projections[-1], second, index))
        good_third.append(labels("agreement", model, projections[-1], third, index))
        rows.append({
            "depth": depths[index],
            "plain_agreement": float(plain.mean()),
            "projected_agreement": float(through.mean()),
            "projection_kept": keep,
            "label_rate": float(good_second[-1].mean()),
            "degenerate": degenerate(good_second[-1]),
        })  # fmt: skip

    norm = RouterInput.of(nnx.merge(model.graphdef, model.params).final_norm)
    trained_on = np.unique(second.document)
    if len(trained_on) < 2:
        raise InputError(
            f"only {len(trained_on)} document is left for training routers, and one more is needed to choose the "
            "epoch. Give more documents (in .jsonl, a `document` per text; in .txt, more paragraphs)."
        )
    held_out = np.isin(second.document, trained_on[::6])
    trained, losses = train_routers(
        second.x, norm, np.stack(good_second), held_out, seed=seed, progress=_bar("training routers", 10)
    )
    by_depth, good = {}, {}
    for index, (depth, row) in enumerate(zip(depths, rows, strict=True)):
        heads[depth] = ExitHead(trained[index], projections[index])
        row["router_loss"] = losses[index]
        values = scores(trained[index], norm, third.x[index])
        row["curve"] = curve(values, good_third[index])
        if not row["degenerate"]:
            by_depth[depth], good[depth] = values, good_third[index]
    flagged = frozenset(row["depth"] for row in rows if row["degenerate"])
    thresholds, choice = _choose_checked(
        model,
        ExitHeads(heads, {}, flagged),
        by_depth,
        good,
        prompts=_live_prompts(model, prompts or _held_out(texts, third), live_prompts),
        agreement=agreement,
        live_tokens=live_tokens,
    )
    report = {
        "model": model.fingerprint,
        "agreement": agreement,
        "label": label,
        "num_layers": layers,
        "texts": len(texts),
        "documents": int(np.unique(states.document).size),
        "tokens": {
            "projections": len(first.last),
            "routers": len(second.last),
            "thresholds": len(third.last),
        },
        "depths": rows,
        **choice,
    }
    return Calibration(ExitHeads(heads, thresholds, flagged), report, model.fingerprint)


def _held_out(texts: Sequence[Text], third: States) -> list[str]:
    """The beginnings of texts whose documents belong to the third part."""
    names = list(dict.fromkeys(text.document for text in texts))
    mine = {names[number] for number in np.unique(third.document)}
    return [text.text[:200] for text in texts if text.document in mine]


def _live_prompts(model: Model, prompts: Sequence[str], count: int) -> list[list[int]]:
    """Token ids of at most `count` prompts: through the chat template where there is one, else their beginning."""
    chosen = [prompts[index] for index in np.unique(np.linspace(0, len(prompts) - 1, count).astype(int))]
    if model.tokenizer.has_chat_template:
        return [model.tokenizer.encode_chat([{"role": "user", "content": prompt}]) for prompt in chosen]
    rows = [model.tokenizer.encode(prompt)[:24] for prompt in chosen]
    if not all(rows):
        raise InputError("a calibration prompt is empty. Remove it.")
    return rows


def _choose_checked(
    model: Model,
    exits: ExitHeads,
    by_depth: dict[int, np.ndarray],
    good: dict[int, np.ndarray],
    *,
    prompts: list[list[int]],
    agreement: float,
    live_tokens: int,
    rounds: int = 6,
) -> tuple[dict[int, float], dict[str, Any]]:
    """Thresholds that save most while they hold in the running engine, and how they were found.

    Recorded states come from exact K/V, so agreement on them is the optimistic end. The share of tokens that may
    disagree there is bisected, on a logarithmic scale, until the engine, with its own K/V, keeps what was asked.
    """
    select = functools.partial(choose, by_depth, good, num_layers=model.config.num_layers)
    nothing = {"chosen": {}, "saved_layers": 0.0, "recorded_agreement": 1.0, "live": []}
    if not by_depth:
        return {}, nothing | {"reason": "no exit point has labels that can be learned"}
    if not select(agreement=agreement)[0]:
        return {}, nothing | {"reason": "no threshold keeps the agreement asked for on recorded states"}
    trial = Model(
        model.graphdef,
        model.params,
        tokenizer=model.tokenizer,
        exits=exits,
        eos_ids=model.eos_ids,
        fingerprint=model.fingerprint,
    )
    batch = min(len(prompts), 32)
    yardstick = Yardstick(
        trial,
        prompts,
        rule=RouterExit({}),
        exit_points=sorted(by_depth),
        max_new_tokens=live_tokens,
        batch=batch,
        progress=_bar("full-depth trajectories", len(prompts) / batch),
    )
    # Budgets are shares of tokens that may disagree on recorded states; the engine keeps some of it for drift.
    most, least, budget = 1 - agreement, (1 - agreement) / 32, 1 - agreement
    tried, best = [], None
    for _ in _bar("checking thresholds with the engine", rounds)(range(rounds)):
        thresholds, saved, kept = select(agreement=1 - budget)
        measured = {
            "target": 1 - budget,
            "thresholds": {str(depth): value for depth, value in thresholds.items()},
            "saved_layers": saved,
            "recorded_agreement": kept,
            **yardstick.agreement(RouterExit(thresholds)),
        }
        tried.append(measured)
        share, positions = measured["agreement"], measured["positions"]
        # By two standard errors, so that the best of a few tries is not merely the luckiest.
        if share - 2 * (share * (1 - share) / positions) ** 0.5 >= agreement:
            if thresholds and (best is None or measured["mean_depth"] < best[1]["mean_depth"]):
                best = thresholds, measured
            least = budget
        else:
            most = budget
        if most <= 1.05 * least:
            break
        budget = (most * least) ** 0.5
    if best is None:
        return {}, nothing | {
            "live": tried,
            "reason": "with its own approximate K/V the engine stayed below the agreement asked for",
        }
    thresholds, measured = best
    return thresholds, {
        "chosen": measured["thresholds"],
        "saved_layers": measured["saved_layers"],
        "recorded_agreement": measured["recorded_agreement"],
        "checked": measured,
        "live": tried,
    }


def _bar(description: str, total: int | float) -> Callable:
    return lambda items: track(items, total=int(np.ceil(total)), description=description)

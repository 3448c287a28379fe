"""Running texts through the model once and keeping, for every token, what calibration needs."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from calib.texts import Text
from tide_jax.errors import InputError
from tide_jax.exits.heads import unit
from tide_jax.model import Model


@dataclasses.dataclass(frozen=True)
class States:
    """One row per token.

    Attributes:
        depths: candidate exit points, ascending.
        x: states after each candidate depth, scaled to unit RMS (router and projection see nothing else of a state),
            float16 on the host.
        last: states after the last layer, likewise.
        predicted: the full model's next token.
        document: number of the document a token belongs to.
    """

    depths: tuple[int, ...]
    x: Float[np.ndarray, "depths tokens embed"]
    last: Float[np.ndarray, "tokens embed"]
    predicted: Int[np.ndarray, " tokens"]
    document: Int[np.ndarray, " tokens"]

    def where(self, mask: np.ndarray) -> "States":
        """The tokens under a mask."""
        return States(self.depths, self.x[:, mask], self.last[mask], self.predicted[mask], self.document[mask])


def collect(
    model: Model,
    texts: Sequence[Text],
    depths: Sequence[int],
    *,
    tokens_per_text: int,
    progress: Callable,
    batch: int = 8,
) -> States:
    """States of all texts, one forward pass per batch of texts.

    The first token of a text is left out: it is the attention sink, unlike all others, and never leaves in generation.

    Raises:
        InputError: no text has two tokens.
    """
    documents = {name: number for number, name in enumerate(dict.fromkeys(text.document for text in texts))}
    rows = [(model.tokenizer.encode(text.text)[:tokens_per_text], documents[text.document]) for text in texts]
    rows = sorted((row for row in rows if len(row[0]) > 1), key=lambda row: len(row[0]))
    if not rows:
        raise InputError("no calibration text has two tokens or more. Give longer texts.")
    kept = []
    for begin in progress(range(0, len(rows), batch)):
        group = rows[begin : begin + batch]
        longest = max(len(ids) for ids, _ in group)
        ids = np.zeros((batch, min(-(-longest // 32) * 32, max(tokens_per_text, 32))), np.int32)
        mask = np.zeros(ids.shape, bool)
        for index, (tokens, _) in enumerate(group):
            ids[index, : len(tokens)] = tokens
            mask[index, : len(tokens)] = True
        x, predicted = _forward(model.graphdef, tuple(depths), model.params, ids, mask)
        real = mask.copy()
        real[:, 0] = False
        document = np.zeros(ids.shape, np.int32)
        document[: len(group)] = [[number] for _, number in group]
        kept.append((np.asarray(x)[:, real], np.asarray(predicted)[real], document[real]))
    x = np.concatenate([part[0] for part in kept], axis=1)
    return States(
        depths=tuple(depths),
        x=x[:-1],
        last=x[-1],
        predicted=np.concatenate([part[1] for part in kept]),
        document=np.concatenate([part[2] for part in kept]),
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "depths"))
def _forward(
    graphdef, depths: tuple[int, ...], params, ids: Int[Array, "batch cols"], mask: Array
) -> tuple[Float[Array, "kept batch cols embed"], Int[Array, "batch cols"]]:
    decoder = nnx.merge(graphdef, params)
    states = decoder.hidden_states(ids, mask)
    kept = states[jnp.array([*depths, decoder.config.num_layers])]
    # The head is taken row by row: logits of a whole batch are the largest array of all.
    predicted = jax.lax.map(lambda row: jnp.argmax(decoder.logits(row), axis=-1).astype(jnp.int32), states[-1])
    return unit(kept, decoder.config.norm_eps).astype(jnp.float16), predicted


def split(document: Int[np.ndarray, " tokens"], shares: Sequence[float], seed: int) -> list[np.ndarray]:
    """Token masks of a split by document, close to the shares asked for.

    Raises:
        InputError: fewer documents than shares.
    """
    numbers, counts = np.unique(document, return_counts=True)
    if len(numbers) < len(shares):
        raise InputError(
            f"calibration splits its text by document into {len(shares)} parts, and there are {len(numbers)} documents "
            "with usable tokens. Give more documents (in .jsonl, a `document` per text; in .txt, more paragraphs)."
        )
    order = np.random.default_rng(seed).permutation(len(numbers))
    filled = np.zeros(len(shares))
    owner = np.zeros(len(numbers), int)
    for index in order:  # each document goes where most is missing, relative to the share
        part = int(np.argmin((filled + 1e-9) / np.asarray(shares)))
        owner[index] = part
        filled[part] += counts[index]
    part_of = owner[np.searchsorted(numbers, document)]
    return [part_of == part for part in range(len(shares))]

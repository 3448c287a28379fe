"""Tiny random models for tests about logic, not about language, and what they must compute, in numpy."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import tide_jax as tide
from tide_jax.decode import engine
from tide_jax.exits import ExitHead, ExitHeads, Projection, Router
from tide_jax.kernels import decide
from tide_jax.models import Decoder, DecoderConfig, LayerKind, RopeConfig
from tide_jax.models.decoder import DecoderLayer


def tiny_config(**changes) -> DecoderConfig:
    """Six layers with sizes that differ from each other, so that a swapped axis shows."""
    values = dict(
        family="llama", vocab_size=97, hidden_size=24, ffn_size=40, num_layers=6, num_heads=6, num_kv_heads=2,
        head_dim=8, norm_eps=1e-5, kinds=(LayerKind(rope=RopeConfig(theta=10_000.0)),),
        max_positions=512, tied_head=True,
    )  # fmt: skip
    return DecoderConfig(**{**values, **changes})


def tiny_model(seed: int = 0, dtype=jnp.float32, embedding_scale: float = 0.3, **changes) -> tide.Model:
    """A model with random weights and random norm scales, no tokenizer.

    The embedding is small beside what the layers add, or a tied head would only repeat the token it is given.
    """
    decoder = Decoder(tiny_config(**changes), dtype=dtype, rngs=nnx.Rngs(seed))
    graphdef, params = nnx.split(decoder)
    keys = iter(jax.random.split(jax.random.key(seed + 1), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda a: a + 0.1 * jax.random.normal(next(keys), a.shape, a.dtype), params)
    decoder = nnx.merge(graphdef, params)
    decoder.embedding[...] = embedding_scale * decoder.embedding[...]
    return tide.Model.from_decoder(decoder)


def changed(model: tide.Model, change: Callable[[Decoder], None]) -> tide.Model:
    """A copy of the model whose decoder `change` has worked on."""
    decoder = nnx.clone(nnx.merge(model.graphdef, model.params))
    change(decoder)
    return tide.Model.from_decoder(decoder, exits=model.exits)


def poisoned(model: tide.Model, token: int, value: float) -> tide.Model:
    """The model with one token whose embedding is not a number, and which no other token leads to."""

    def change(decoder):
        decoder.embedding[...] = decoder.embedding[...].at[token].set(value)
        decoder.lm_head.kernel[...] = decoder.lm_head.kernel[...].at[:, token].set(0.0)

    return changed(model, change)


def cast(model: tide.Model, dtype) -> tide.Model:
    """The same model with its weights, states and caches in another dtype."""
    return tide.Model(model.graphdef, jax.tree.map(lambda a: a.astype(dtype), model.params), exits=model.exits)


class Reference:
    """The decoder and early exit with held states, in float64 numpy, one row, token by token.

    Written from the formulas of the architecture and of the exit alone; it shares no code with the library.
    """

    def __init__(self, model: tide.Model):
        as_numpy = jax.tree.map(lambda a: np.asarray(a, np.float64), nnx.to_pure_dict(model.params))
        self.weights, self.config = as_numpy, model.config
        heads = model.exits.heads if model.exits else {}
        self.projections = {depth: head.projection for depth, head in heads.items() if head.projection}
        self.keys = [[] for _ in range(model.config.num_layers)]
        self.values = [[] for _ in range(model.config.num_layers)]

    def feed(self, token: int, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """The final state and the logits of the next position, after running `depth` layers of it."""
        x = self.weights["embedding"][token]
        for index in range(self.config.num_layers):
            layer = self.weights["layers"][index]
            normed = self._norm(x, layer["attention_norm"])
            position = len(self.keys[index])
            self.keys[index].append(self._rotate(self._heads(normed, layer["attention"]["k"]), position))
            self.values[index].append(self._heads(normed, layer["attention"]["v"]))
            if index < depth:
                query = self._rotate(self._heads(normed, layer["attention"]["q"]), position)
                x = x + self._linear(self._attend(index, query), layer["attention"]["o"])
                normed = self._norm(x, layer["mlp_norm"])
                gate = self._linear(normed, layer["mlp"]["gate"])
                wide = gate / (1 + np.exp(-gate)) * self._linear(normed, layer["mlp"]["up"])
                x = x + self._linear(wide, layer["mlp"]["down"])
        if depth < self.config.num_layers and depth in self.projections:
            kernel, bias = self.projections[depth]
            x = x / np.sqrt(np.mean(x * x) + self.config.norm_eps) @ np.asarray(kernel) + np.asarray(bias)
        head = self.weights.get("lm_head")
        normed = self._norm(x, self.weights["final_norm"])
        return x, normed @ (head["kernel"] if head else self.weights["embedding"].T)

    def prefill(self, prompt: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """The final state and the logits of the last position of a prompt, which runs at full depth."""
        return [self.feed(token, self.config.num_layers) for token in prompt][-1]

    def _norm(self, x, norm):
        return x / np.sqrt(np.mean(x * x) + self.config.norm_eps) * norm["scale"]

    def _linear(self, x, weights):
        return x @ weights["kernel"] + weights.get("bias", 0)

    def _heads(self, x, weights):
        return self._linear(x, weights).reshape(-1, self.config.head_dim)

    def _rotate(self, heads, position):
        half = self.config.head_dim // 2
        turn = np.exp(1j * position * self.config.kinds[0].rope.theta ** -(np.arange(half) / half))
        turned = (heads[:, :half] + 1j * heads[:, half:]) * turn
        return np.concatenate([turned.real, turned.imag], axis=1)

    def _attend(self, index, query):
        keys, values = np.array(self.keys[index]), np.array(self.values[index])
        mixed = []
        for head, q in enumerate(query):
            group = head * self.config.num_kv_heads // self.config.num_heads
            weights = np.exp(keys[:, group] @ q / np.sqrt(self.config.head_dim))
            mixed.append(weights @ values[:, group] / weights.sum())
        return np.concatenate(mixed)


def with_heads(model: tide.Model, *depths: int, projections: bool = True, seed: int = 7) -> tide.Model:
    """The same model with a random router, and a random projection if asked for, at each depth."""
    random = np.random.default_rng(seed)
    width = model.config.hidden_size

    def array(*shape):
        return jnp.asarray(random.normal(size=shape) / np.sqrt(width), jnp.float32)

    heads = {
        depth: ExitHead(
            Router(array(width, 16), array(16)),
            Projection(jnp.eye(width) + array(width, width), array(width)) if projections else None,
        )
        for depth in depths
    }
    exits = ExitHeads(heads=heads, thresholds=dict.fromkeys(depths, 0.5))
    return tide.Model(model.graphdef, model.params, exits=exits, eos_ids=model.eos_ids)


@dataclasses.dataclass(frozen=True)
class ScriptedScorer:
    """The score of a token is what the head's `router.up` says at its position."""

    def route(self, depth, head, x, positions, decoder, gate):
        return decide(head.router.up[positions], gate, layers=depth)


@dataclasses.dataclass(frozen=True)
class Scripted:
    """Tokens leave where their script, a table of scores by depth and position, is above 0.5."""

    scorer = ScriptedScorer()

    def default_points(self, exits):
        return tuple(sorted(exits.heads))

    def thresholds(self, points, exits, num_layers):
        return np.full(len(points), 0.5, np.float32)


def with_script(model: tide.Model, script: dict[int, np.ndarray]) -> tide.Model:
    """The same model with a scripted score at each depth, one per position."""
    heads = {
        depth: ExitHead(Router(jnp.zeros((model.config.hidden_size, len(scores))), jnp.asarray(scores, jnp.float32)))
        for depth, scores in script.items()
    }
    return tide.Model(model.graphdef, model.params, exits=ExitHeads(heads=heads, thresholds={}))


def counted_layers(monkeypatch) -> list[int]:
    """A list that grows by one whenever the device really runs a layer, in programs made from now on."""
    calls: list[int] = []
    real = DecoderLayer.__call__

    def counted(self, *args):
        jax.debug.callback(lambda: calls.append(1))
        return real(self, *args)

    monkeypatch.setattr(DecoderLayer, "__call__", counted)
    monkeypatch.setattr(engine, "_PROGRAMS", {})
    return calls

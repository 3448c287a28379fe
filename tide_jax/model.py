"""A converted directory in memory: decoder, tokenizer, and calibrated exits."""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from tide_jax.checkpoint import read_manifest, read_parameters
from tide_jax.compat import release_free_memory, use_mesh
from tide_jax.errors import InputError
from tide_jax.exits import ExitHeads
from tide_jax.exits.heads import FILE_NAME, load_heads
from tide_jax.models import Decoder, DecoderConfig
from tide_jax.sharding import make_mesh, mesh_of, parameter_shardings, place
from tide_jax.tokenizer import Tokenizer

DTYPES = ("float32", "bfloat16", "float16")


@functools.partial(jax.jit, static_argnames="graphdef")
def _logits(graphdef, params, ids, mask):
    return nnx.merge(graphdef, params)(ids, mask)


@functools.partial(jax.jit, static_argnames="graphdef")
def _hidden_states(graphdef, params, ids, mask):
    return nnx.merge(graphdef, params).hidden_states(ids, mask)


class Model:
    """A decoder with its tokenizer and, when calibrated, its exit heads.

    Attributes:
        config: the decoder's config.
        tokenizer: None for a model made in memory.
        exits: None until calibrated.
        eos_ids: ids that end a text.
        fingerprint: names config and weights.
        path: where it was loaded from; None for a model made in memory.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        params: nnx.State,
        *,
        tokenizer: Tokenizer | None = None,
        exits: ExitHeads | None = None,
        eos_ids: tuple[int, ...] = (),
        fingerprint: str = "in-memory",
        path: Path | None = None,
    ):
        self.graphdef = graphdef
        self.params = params
        self.config: DecoderConfig = nnx.merge(graphdef, params).config
        self.tokenizer = tokenizer
        self.exits = exits
        self.eos_ids = eos_ids
        self.fingerprint = fingerprint
        self.path = path

    @classmethod
    def from_decoder(cls, decoder: Decoder, **kwargs) -> "Model":
        """A model around a decoder made in memory."""
        return cls(*nnx.split(decoder), **kwargs)

    def shared(self, mesh: Mapping[str, int]) -> "Model":
        """The same model with its parameters shared by the devices of a mesh.

        Args:
            mesh: devices along `data` (over which rows are cut), `model` (heads, feed-forward layer, vocabulary), or
                both.

        Raises:
            InputError: an unknown axis, more devices than there are, or devices that cannot share this model evenly.

        Example:
            >>> model.shared({"data": 1, "model": 1}).mesh.size
            1
        """
        counts = self.config.axis_counts
        params = jax.device_put(self.params, parameter_shardings(self.params, make_mesh(mesh, counts), counts))
        return Model(
            self.graphdef, params, tokenizer=self.tokenizer, exits=self.exits, eos_ids=self.eos_ids,
            fingerprint=self.fingerprint, path=self.path,
        )  # fmt: skip

    @property
    def mesh(self) -> Mesh | None:
        """The devices that share its parameters; None: they are on one."""
        return mesh_of(self.params)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of parameters, hidden states and caches."""
        return jax.tree.leaves(self.params)[0].dtype

    def __call__(
        self, ids: Int[Array | np.ndarray, "batch cols"], mask: Bool[Array | np.ndarray, "batch cols"] | None = None
    ) -> Float[Array, "batch cols vocab"]:
        """Logits at full depth, without a cache.

        Args:
            ids: token ids.
            mask: True for real tokens; positions count real tokens only, so padding may be on either side.

        Returns:
            Float32 logits of every column.

        Raises:
            InputError: ids of another rank or type, or outside the vocabulary, or longer than the model's context.

        Example:
            >>> model = tide.load("demo_out/smollm2")
            >>> model(np.array([model.tokenizer.encode("The sky is")])).shape
            (1, 3, 49152)
        """
        ids, mask, cols = self._padded(ids, mask)
        with use_mesh(self.mesh):
            return _logits(self.graphdef, self.params, ids, mask)[:, :cols]

    def hidden_states(
        self, ids: Int[Array | np.ndarray, "batch cols"], mask: Bool[Array | np.ndarray, "batch cols"] | None = None
    ) -> Float[Array, "depths batch cols embed"]:
        """Raw states after the embedding and after 1 … L layers, [L + 1, batch, cols, embed].

        Raises:
            InputError: as for calling the model.
        """
        ids, mask, cols = self._padded(ids, mask)
        with use_mesh(self.mesh):
            return _hidden_states(self.graphdef, self.params, ids, mask)[:, :, :cols]

    def check_ids(self, ids: np.ndarray) -> None:
        """Refuse ids that are not tokens of this model.

        Raises:
            InputError: an id is outside the vocabulary.
        """
        if ids.size and (ids.min() < 0 or ids.max() >= self.config.vocab_size):
            bad = ids[(ids < 0) | (ids >= self.config.vocab_size)]
            raise InputError(
                f"token id {int(bad[0])} is outside the vocabulary 0 … {self.config.vocab_size - 1} of this model. "
                "Encode the text with this model's own tokenizer."
            )

    def _padded(self, ids, mask) -> tuple[Array, Array, int]:
        """ids and mask padded on the right to a multiple of 32 columns, so that few lengths are compiled."""
        ids = np.asarray(ids)
        if ids.ndim != 2 or not np.issubdtype(ids.dtype, np.integer):
            raise InputError(f"ids must be integers of shape [batch, cols], got {ids.dtype} of shape {ids.shape}.")
        self.check_ids(ids)
        mask = np.ones(ids.shape, bool) if mask is None else np.asarray(mask, bool)
        if mask.shape != ids.shape:
            raise InputError(f"mask has shape {mask.shape}, ids have {ids.shape}: they must be equal.")
        cols = ids.shape[1]
        if cols > self.config.max_positions:
            raise InputError(
                f"{cols} tokens are more than this model's context of {self.config.max_positions}. Shorten the input."
            )
        extra = ((0, 0), (0, -cols % 32))
        ids, mask = np.pad(ids, extra).astype(np.int32), np.pad(mask, extra)
        return *place((ids, mask), PartitionSpec("batch"), self.mesh), cols


def load(
    path: str | Path,
    dtype: DTypeLike | None = None,
    *,
    exits: bool = True,
    mesh: Mapping[str, int] | None = None,
) -> Model:
    """Load a converted directory.

    Args:
        path: what `tide-jax convert` made.
        dtype: of parameters, states and caches. Default: the stored one; on a CPU, 16-bit weights are brought to
            float32 once, because XLA would do so inside every program that uses them.
        exits: read the calibrated exit heads, if there are any.
        mesh: devices that share the model, as for `Model.shared`; each is given its share of a layer as soon as that is
            read. None: one device.

    Raises:
        InputError: not a converted model, damaged, an unknown dtype, or a mesh that does not fit.

    Example:
        >>> model = tide.load("demo_out/smollm2")
        >>> model.config.num_layers
        30
    """
    path = Path(path)
    manifest = read_manifest(path)
    if dtype is None:
        dtype = manifest.dtype
        if jax.default_backend() == "cpu" and dtype != "float32":
            print(f"{path}: {dtype} weights are held as float32 on this CPU (dtype= overrides)", file=sys.stderr)
            dtype = "float32"
    name = np.dtype(dtype).name if not isinstance(dtype, str) else dtype
    if name not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported; use one of {', '.join(DTYPES)}.")
    devices = None if mesh is None else make_mesh(mesh, manifest.config.axis_counts)
    graphdef, params = read_parameters(path, manifest, jnp.dtype(name), devices)
    release_free_memory()
    heads = path / FILE_NAME
    calibrated = None
    if exits and heads.exists():
        calibrated = load_heads(
            heads,
            fingerprint=manifest.fingerprint,
            hidden_size=manifest.config.hidden_size,
            num_layers=manifest.config.num_layers,
        )
    return Model(
        graphdef,
        params,
        tokenizer=Tokenizer.load(path / "tokenizer"),
        exits=calibrated,
        eos_ids=manifest.eos_ids,
        fingerprint=manifest.fingerprint,
        path=path,
    )

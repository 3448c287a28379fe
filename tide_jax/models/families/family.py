"""What a family is: the model types it reads, a reader of their `config.json`, and a table of weights."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from tide_jax.models.config import DecoderConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weight:
    """One row of a weight table.

    Attributes:
        source: the Hugging Face tensor name; `{layer}` stands for the number of the layer.
        part: `embedding`, `layer` or `final`.
        paths: dotted paths, inside its part, of the parameters that the tensor holds side by side.
        transpose: stored [out, in] there, [in, out] here.
        split: how several parameters lie side by side along `out`: one after the other (`blocks`), or the queries, the
            key and the value of each K/V head together (`heads`).
        when: the configs that have this row; None: all.
    """

    source: str
    part: str
    paths: tuple[str, ...]
    transpose: bool = False
    split: Literal["blocks", "heads"] = "blocks"
    when: Callable[[DecoderConfig], bool] | None = None

    def shape(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The shape of the tensor, from those of its parameters."""
        joined = (*shapes[0][:-1], sum(shape[-1] for shape in shapes))
        return joined[::-1] if self.transpose else joined

    def take(self, stored: np.ndarray, sizes: Sequence[int], head_dim: int) -> list[np.ndarray]:
        """The parameters in a tensor, as views where that is possible.

        Args:
            stored: the tensor.
            sizes: channels of each parameter along its last dimension.
            head_dim: channels of a head.

        Example:
            >>> weight = Weight(source="qkv.bias", part="layer", paths=("q", "k", "v"), split="heads")
            >>> [part.tolist() for part in weight.take(np.arange(12), [4, 4, 4], 2)]
            [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]
        """
        array = stored.T if self.transpose else stored
        if self.split == "blocks":
            return np.split(array, np.cumsum(sizes)[:-1], axis=-1)
        groups = array.reshape(*array.shape[:-1], sizes[1] // head_dim, -1, head_dim)
        parts = groups[..., :-2, :], groups[..., -2, :], groups[..., -1, :]
        return [part.reshape(*array.shape[:-1], -1) for part in parts]

    def join(self, arrays: Sequence[np.ndarray], head_dim: int) -> np.ndarray:
        """The inverse of `take`."""
        if self.split == "heads":
            groups = arrays[1].shape[-1] // head_dim
            cut = [array.reshape(*array.shape[:-1], groups, -1, head_dim) for array in arrays]
            joined = np.concatenate(cut, axis=-2).reshape(*arrays[0].shape[:-1], -1)
        else:
            joined = arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=-1)
        return joined.T if self.transpose else joined


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        name: what it is called.
        types: the `model_type` of its Hugging Face configs.
        config: reads `config.json`, as data.
        weights: the table. Rows of parameters that a config does not switch on find nothing.
        ignored: pattern of tensor names that hold no parameters (buffers that older exports carry).
        renamed: pattern and replacement for names as other exports write them.
        text: what of a `config.json` describes the decoder.
    """

    name: str
    types: tuple[str, ...]
    config: Callable[[Mapping[str, Any]], DecoderConfig]
    weights: tuple[Weight, ...]
    ignored: re.Pattern[str] = re.compile(r"(?!)")
    renamed: tuple[tuple[str, str], ...] = ()
    text: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict

    def canonical(self, name: str) -> str:
        """A tensor name as the table writes it."""
        for pattern, replacement in self.renamed:
            name = re.sub(pattern, replacement, name)
        return name

    def rows(self, config: DecoderConfig) -> tuple[Weight, ...]:
        """The table for this config."""
        return tuple(weight for weight in self.weights if weight.when is None or weight.when(config))

    def locate(self, name: str, rows: Sequence[Weight]) -> tuple[Weight, int | None] | None:
        """The row of a tensor name and its layer; None for a name that the rows do not have.

        Example:
            >>> LLAMA.locate("model.layers.7.mlp.up_proj.weight", LLAMA.weights)[1]
            7
        """
        name = self.canonical(name)
        for weight in rows:
            before, layered, after = weight.source.partition("{layer}")
            match = re.fullmatch(f"{re.escape(before)}{'(0|[1-9][0-9]{0,5})' * bool(layered)}{re.escape(after)}", name)
            if match:
                return weight, int(match[1]) if layered else None
        return None


def embedding(source: str) -> Weight:
    """The row of the token embedding."""
    return Weight(source=f"{source}.weight", part="embedding", paths=("embedding",))


def linear(source: str, *paths: str, split: str = "blocks", transpose: bool = True) -> tuple[Weight, Weight]:
    """The rows of one linear map of a layer, or of several in one tensor: kernel and bias."""
    kernels, biases = (tuple(f"{path}.{name}" for path in paths) for name in ("kernel", "bias"))
    return (
        Weight(source=f"{source}.weight", part="layer", paths=kernels, transpose=transpose, split=split),
        Weight(source=f"{source}.bias", part="layer", paths=biases, split=split),
    )


def norm(
    source: str, path: str, part: str = "layer", when: Callable[[DecoderConfig], bool] | None = None
) -> tuple[Weight, Weight]:
    """The rows of a norm: scale and bias."""
    return (
        Weight(source=f"{source}.weight", part=part, paths=(f"{path}.scale",), when=when),
        Weight(source=f"{source}.bias", part=part, paths=(f"{path}.bias",), when=when),
    )


def head(source: str) -> Weight:
    """The row of the LM head."""
    return Weight(source=f"{source}.weight", part="final", paths=("lm_head.kernel",), transpose=True)

"""From a Hugging Face directory or a GGUF file to a converted directory, and back."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tide_jax.checkpoint import Manifest

__all__ = ["convert", "export"]


def convert(source: str | Path, target: str | Path, *, dtype: str | None = None, overwrite: bool = False) -> "Manifest":
    """Convert a Hugging Face directory or a GGUF file into a directory that `tide_jax.load` reads.

    Args:
        source: directory with config.json, safetensors and tokenizer.json; or a `.gguf` file.
        target: the directory to make; it appears under its name only when it is whole.
        dtype: `float32`, `bfloat16` or `float16`; default: as stored (float32 for dequantised GGUF).
        overwrite: replace a converted model of that name.

    Raises:
        InputError: whatever cannot be honoured: cause, values, remedy.

    Example:
        >>> tide.convert("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2").config.num_layers
        30
    """
    from tide_jax.convert.conversion import convert_checkpoint

    return convert_checkpoint(Path(source), Path(target), dtype=dtype, overwrite=overwrite)


def export(source: str | Path, target: str | Path) -> dict[str, Any]:
    """Write a converted directory as a Hugging Face directory that `transformers` loads.

    The tensors are those of the checkpoint that was converted, bit for bit where their dtype was kept; of a model that
    also sees, the text part.

    Args:
        source: what `convert` made.
        target: the directory to make; it appears under its name only when it is whole.

    Returns:
        What was written: path, family, dtype, files, tensors.

    Raises:
        InputError: not a converted model, damaged, or the target exists.

    Example:
        >>> tide.export("smollm2", "smollm2-hf")["files"]
        ['model.safetensors']
    """
    from tide_jax.convert.exporting import export_checkpoint

    return export_checkpoint(Path(source), Path(target))

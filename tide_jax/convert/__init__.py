"""From a Hugging Face directory or a GGUF file to a converted directory."""

from tide_jax.convert.convert import convert

__all__ = ["convert"]

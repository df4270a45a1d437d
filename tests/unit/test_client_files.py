# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from shapeagent.client import files
from shapeagent.model.errors import InputError


@pytest.mark.parametrize("source", ["-", "file"])
def test_what_is_too_large_is_refused_and_not_cut(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST_TEXT_BYTES", 10)
    for size, is_right in ((10, True), (11, False)):
        text = "x" * size
        path = tmp_path / "file"
        path.write_text(text)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
        where = "-" if source == "-" else str(path)
        if is_right:
            assert files.read_text(where) == text
            continue
        with pytest.raises(InputError) as caught:
            files.read_text(where)
        assert caught.value.reference == "file-too-large", f"got {caught.value.reference}"

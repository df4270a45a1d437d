# SPDX-License-Identifier: Apache-2.0
"""The one text that is compiled: its parts, its line numbers, its digest."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from shapeagent.kernel.source import MAIN_FILE, flatten, source_digest, source_dir
from shapeagent.model.errors import FailedError
from tests.check.check_c import clang, compile_text


def write(folder: Path, **files: str) -> Path:
    """Write each `a__b` = text as `a/b.h` (`main` as main.c) and return main.c."""
    for name, text in files.items():
        path = folder / ("main.c" if name == "main" else name.replace("__", "/") + ".h")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "main.c"


def test_own_headers_are_put_in_once_and_uapi_stays(tmp_path: Path) -> None:
    main = write(
        tmp_path,
        main='#include <uapi/linux/bpf.h>\n#include "abi.h"\n#include "lib/x.h"\nint end;\n',
        abi="int abi;\n",
        lib__x='#include "abi.h"\nint x;\n',
    )
    text = flatten(main)
    assert text.count("int abi;") == 1, text
    assert text.index("int abi;") < text.index("int x;") < text.index("int end;")
    assert "#include <uapi/linux/bpf.h>" in text
    assert '#include "' not in text


def test_compiler_names_the_header_and_line_of_an_error(tmp_path: Path) -> None:
    main = write(
        tmp_path,
        main='#include "lib/x.h"\nint first_wrong = unknown_one;\n',
        lib__x="int fine;\n\nint second_wrong = unknown_two;\n",
    )
    flat = tmp_path / "flat.c"
    flat.write_text(flatten(main), encoding="utf-8")
    done = subprocess.run(
        [clang(), "-fsyntax-only", str(flat)], capture_output=True, text=True, check=False
    )
    places = re.findall(r"^(\S+?):(\d+):\d+: error", done.stderr, re.MULTILINE)
    assert places == [("lib/x.h", "3"), ("main.c", "2")], done.stderr


def test_header_under_a_condition_is_put_in_again_where_it_is_needed(tmp_path: Path) -> None:
    main = write(
        tmp_path,
        main='#ifdef FEATURE\n#include "x.h"\n#endif\n#include "x.h"\n',
        x="#ifndef X_H\n#define X_H\nint x;\n#endif\n",
    )
    assert flatten(main).count("int x;") == 2


def test_missing_header_is_named_with_its_place(tmp_path: Path) -> None:
    main = write(tmp_path, main='\n#include "lib/none.h"\n')
    with pytest.raises(FailedError, match=r'main\.c:2: "lib/none\.h"') as caught:
        flatten(main)
    assert caught.value.reference == "bpf-source-include"


def test_header_that_includes_itself_is_refused(tmp_path: Path) -> None:
    main = write(tmp_path, main='#include "a.h"\n', a='#include "b.h"\n', b='#include "a.h"\n')
    with pytest.raises(FailedError, match="includes itself"):
        flatten(main)


def test_digest_depends_on_text_and_defines_but_not_on_their_order() -> None:
    digest = source_digest("int x;", {"A": 1, "B": "2"})
    assert re.fullmatch(r"[0-9a-f]{64}", digest)
    assert digest == source_digest("int x;", {"B": "2", "A": 1})
    others = [
        source_digest("int y;", {"A": 1, "B": "2"}),
        source_digest("int x;", {"A": 1}),
        source_digest("int x;", {"A": 12, "B": ""}),
    ]
    assert digest not in others
    assert len(set(others)) == 3


def test_checkout_program_is_found_and_flat() -> None:
    text = flatten(source_dir() / MAIN_FILE)
    assert '#include "' not in text
    assert text.count("struct shp_config {") == 1


def test_c_check_refuses_a_map_value_of_the_wrong_type() -> None:
    text = (
        'BPF_TABLE("hash", __u32, __u64, ours, 1);\n'
        "int f(void);\n"
        "int f(void) { __u32 key = 0; struct { int a; } wrong = {}; "
        "return ours.update(&key, &wrong); }\n"
    )
    done = compile_text(text, {})
    assert done.returncode != 0, "got accepted, want refused"
    assert "incompatible pointer types" in done.stderr, done.stderr

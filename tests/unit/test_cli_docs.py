# SPDX-License-Identifier: Apache-2.0
"""The command reference and the man page say what the commands are."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import tomllib
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import shapectl
from shapectl import docs

_DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_generated_pages_are_fresh() -> None:
    for path, text in docs.pages(_DOCS).items():
        assert path.read_text(encoding="utf-8") == text, (
            f"{path.name} is stale: python -m shapectl.docs writes it"
        )


def test_check_tells_a_stale_page_and_writes_nothing(tmp_path: Path) -> None:
    runner = CliRunner()
    arguments = ["--folder", str(tmp_path)]
    assert runner.invoke(docs.main, [*arguments, "--check"]).exit_code == 1
    assert list(tmp_path.iterdir()) == []
    assert runner.invoke(docs.main, arguments).exit_code == 0
    assert runner.invoke(docs.main, [*arguments, "--check"]).exit_code == 0
    (tmp_path / "commands.md").write_text("old", encoding="utf-8")
    stale = runner.invoke(docs.main, [*arguments, "--check"])
    assert stale.exit_code == 1
    assert "commands.md" in stale.output
    assert "shapectl.1" not in stale.output


def test_every_option_stands_in_both_pages() -> None:
    markdown, man = docs.render_markdown(), docs.render_man().replace("\\-", "-")
    for words, command in docs.commands():
        for parameter in command.params:
            if not isinstance(parameter, click.Option):
                continue
            assert parameter.help, f"{words} {parameter.opts} has no help"
            for name in parameter.opts:
                assert name in markdown, f"{words}: {name} is not in commands.md"
                assert name in man, f"{words}: {name} is not in the man page"


def test_every_field_that_json_prints_is_documented() -> None:
    markdown = docs.render_markdown()
    for kind in docs._JSON_TYPES:
        section = markdown.split(f"\n### {kind.__name__}\n")[1].split("\n## ")[0].split("\n### ")[0]
        for field in dataclasses.fields(kind):
            assert f"| `{field.name}` |" in section, f"{kind.__name__}.{field.name} is missing"


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_man_page_has_no_groff_warnings(tmp_path: Path) -> None:
    page = tmp_path / "shapectl.1"
    page.write_text(docs.render_man(), encoding="utf-8")
    run = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-z", str(page)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert run.stderr == "", f"got {run.stderr}"
    assert docs.render_man().isascii(), "the man page is ASCII"


def test_version_is_that_of_the_distribution() -> None:
    project = tomllib.loads((_DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))
    got, want = shapectl.__version__, project["project"]["version"]
    assert got == want, f"got {got}, want {want}"

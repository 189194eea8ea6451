"""Checks of names, links, formats and documents that ruff, mypy and import-linter cannot make."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("protos", "bookie", "broker", "metadata", "client", "spark", "pyspark_magnetar")
BANNED_NAMES = {"utils", "util", "common", "helpers", "manager", "base", "core", "misc"}


def sources() -> list[Path]:
    """Return each hand-written module once, without the links."""
    folders = [ROOT / folder for folder in FOLDERS]
    folders += [path for path in (ROOT / "magnetar").iterdir() if not path.is_symlink()]
    found = [path for folder in folders for path in folder.rglob("*.py")]
    found += (ROOT / "magnetar").glob("*.py")
    return sorted(path for path in found if "_pb2" not in path.name)


SOURCES = sources()
TESTS = sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "benchmarks").rglob("*.py"))
DOCUMENTS = sorted(
    path
    for folder in (ROOT, *(ROOT / name for name in (*FOLDERS, "deploy", "tests", "benchmarks")))
    for path in (folder.glob("*.md") if folder == ROOT else folder.rglob("*.md"))
)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 50


def test_no_module_has_a_meaningless_name() -> None:
    assert not [name_of(path) for path in SOURCES if path.stem in BANNED_NAMES]


def test_every_module_has_a_docstring() -> None:
    texts = {name_of(path): path.read_text() for path in SOURCES}
    bare = [
        n for n, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert not bare


def test_no_module_has_a_fixme() -> None:
    marks = re.compile(r"\b(FIXME|XXX|HACK)\b")
    others = [path for path in SOURCES + TESTS if path != Path(__file__).resolve()]
    assert not [name_of(path) for path in others if marks.search(path.read_text())]


def test_every_format_page_names_the_version_that_the_code_writes() -> None:
    for name, module in (
        ("bookie/storage/FORMAT.md", "format.py"),
        ("broker/cursor/FORMAT.md", "format.py"),
        ("broker/dispatch/DELAYED_FORMAT.md", "delayed_segment.py"),
    ):
        page = ROOT / name
        code = (page.parent / module).read_text()
        [version] = set(re.findall(r"^\w*VERSION(?:: Final)? = (\d+)", code, re.MULTILINE))
        assert re.search(rf"\bversion {version}\b", page.read_text(), re.IGNORECASE), page


def test_links_between_documents_are_not_broken() -> None:
    broken = [
        f"{name_of(path)}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
        if not target.startswith(("http:", "https:", "mailto:"))
        and not (path.parent / target).exists()
    ]
    assert not broken


def test_files_that_documents_name_exist() -> None:
    """A file name is a path in back quotes that begins with one of our folders."""
    folders = "|".join((*FOLDERS, "magnetar", "tests", "deploy", "benchmarks"))
    ours = re.compile(rf"`((?:{folders})/[\w./-]+\.\w+)`")
    missing = [
        f"{name_of(path)}: {name}"
        for path in DOCUMENTS
        for name in ours.findall(path.read_text())
        if not (ROOT / name).exists()
    ]
    assert not missing


def test_the_folders_are_linked_into_the_namespace() -> None:
    for folder in FOLDERS[:-1]:
        link = ROOT / "magnetar" / folder
        assert link.is_symlink()
        assert link.resolve() == (ROOT / folder).resolve()
        assert not link.readlink().is_absolute()


def test_nothing_generated_or_private_is_committed() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    bad = [
        n for n in listed.stdout.split() if re.search(r"__pycache__|\.egg-info|\.venv|\.log$", n)
    ]
    assert not bad

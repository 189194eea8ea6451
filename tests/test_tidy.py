"""The house's own linter: what ruff, mypy and import-linter cannot say.

Sizes are a ratchet, not a law: only growth past the limit fails, and an exemption is one line with
its reason, in a list that must shrink.
"""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("protos", "bookie", "broker", "metadata", "client", "spark", "pyspark_magnetar")
FILE_LINES_MAX = 600
TEST_FILE_LINES_MAX = 700  # a test file is a list of cases: longer, and still read in one go
FUNCTION_LINES_MAX = 70
BANNED_NAMES = {"utils", "util", "common", "helpers", "manager", "base", "core", "misc"}

# file -> why it may be longer than FILE_LINES_MAX
LONG_FILES: dict[str, str] = {}
# "file:function" -> why it may be longer than FUNCTION_LINES_MAX
LONG_FUNCTIONS: dict[str, str] = {}


def sources() -> list[Path]:
    """Our own modules, each once: not through the links, not generated."""
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


def functions(path: Path) -> list[tuple[str, int]]:
    """Name and lines of every function of a module."""
    return [
        (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def test_the_sources_are_found() -> None:
    assert len(SOURCES) > 50


def test_files_do_not_grow_past_a_sitting() -> None:
    long = {}
    for paths, limit in ((SOURCES, FILE_LINES_MAX), (TESTS, TEST_FILE_LINES_MAX)):
        sizes = {name_of(path): len(path.read_text().splitlines()) for path in paths}
        long |= {name: lines for name, lines in sizes.items() if lines > limit}
    assert long.keys() <= LONG_FILES.keys(), long


def test_functions_do_not_grow_past_a_screen() -> None:
    long = {
        f"{name_of(path)}:{function}": lines
        for path in SOURCES
        for function, lines in functions(path)
        if lines > FUNCTION_LINES_MAX
    }
    assert long.keys() <= LONG_FUNCTIONS.keys(), long


def test_exemptions_are_still_needed() -> None:
    for name in LONG_FILES:
        lines = len((ROOT / name).read_text().splitlines())
        assert lines > FILE_LINES_MAX, f"{name} is short enough now"
    for entry in LONG_FUNCTIONS:
        name, wanted = entry.split(":")
        sizes = [lines for function, lines in functions(ROOT / name) if function == wanted]
        assert max(sizes, default=0) > FUNCTION_LINES_MAX, f"{entry} is short enough now"


def test_modules_are_named_after_what_they_are() -> None:
    assert not [name_of(path) for path in SOURCES if path.stem in BANNED_NAMES]


def test_every_module_opens_with_its_theory() -> None:
    texts = {name_of(path): path.read_text() for path in SOURCES}
    bare = [
        n for n, text in texts.items() if text.strip() and not ast.get_docstring(ast.parse(text))
    ]
    assert not bare


def test_nothing_is_left_to_fix() -> None:
    marks = re.compile(r"\b(FIXME|XXX|HACK)\b")
    others = [path for path in SOURCES + TESTS if path != Path(__file__).resolve()]
    assert not [name_of(path) for path in others if marks.search(path.read_text())]


def test_every_format_page_names_the_version_that_the_code_writes() -> None:
    for page in (ROOT / name for name in ("bookie/storage/FORMAT.md", "broker/cursor/FORMAT.md")):
        code = (page.parent / "format.py").read_text()
        [version] = set(re.findall(r"^\w*VERSION(?:: Final)? = (\d+)", code, re.MULTILINE))
        assert re.search(rf"\bversion {version}\b", page.read_text(), re.IGNORECASE), page


def test_links_between_documents_lead_somewhere() -> None:
    broken = [
        f"{name_of(path)}: {target}"
        for path in DOCUMENTS
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text())
        if not target.startswith(("http:", "https:", "mailto:"))
        and not (path.parent / target).exists()
    ]
    assert not broken


def test_files_that_documents_name_exist() -> None:
    """A path in back quotes that looks like one of ours: `broker/log/log.py`."""
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

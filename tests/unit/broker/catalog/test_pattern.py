"""The linear matcher agrees with `re` on supported patterns and refuses all other patterns."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from magnetar.broker.catalog.pattern import PATTERN_CHARACTERS_MAX, TopicPattern
from magnetar.broker.errors import UnsupportedPattern

atoms = st.sampled_from(["a", "b", ".", "[ab]", "[^a]", "[a-c_.]", r"\d", r"\W", r"\.", "-"])


def _grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{1,}", "{0,2}", "*?", "{0}"])).map(
            lambda two: f"(?:{two[0]}){two[1]}"
        ),
    )


patterns = st.recursive(atoms, _grown, max_leaves=8)


@given(patterns, st.lists(st.text("abc.-1_", max_size=8), max_size=10))
def test_the_matcher_agrees_with_re(pattern: str, texts: list[str]) -> None:
    ours, theirs = TopicPattern(pattern), re.compile(pattern, re.ASCII)
    for text in texts:
        assert ours.matches(text) == (theirs.fullmatch(text) is not None), (pattern, text)


@pytest.mark.parametrize(
    ("pattern", "text", "found"),
    [
        ("persistent://public/default/.*", "public/default/x", True),
        ("public/default/foo-.*", "public/default/bar", False),
        ("^public/default/(a|b)$", "public/default/b", True),
        (r"\Qpublic/default/a.b\E", "public/default/a.b", True),
        (r"\Qpublic/default/a.b\E", "public/default/axb", False),
        (r"\Qa$", "a$", True),
        (r"\Qa$", "a", False),
        (r"\Qa\E\Qb$", "ab$", True),
        (r"\Qa\E$", "a", True),
        (r"a\$", "a$", True),
        (r"a\\$", "a\\", True),
        ("a|b$", "a", True),
        ("a*$", "aa", True),
        (r"public/default/[\w-]+", "public/default/a-1", True),
        (r"public/default/[a\-z]", "public/default/-", True),
        ("", "", True),
    ],
)
def test_patterns_of_clients_match_as_in_java(pattern: str, text: str, found: bool) -> None:
    assert TopicPattern(pattern).matches(text) is found


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a)\1",
        "(?=a)a",
        "(?i)a",
        "a**",
        "a*+",
        "(a",
        "a)",
        "[a",
        "[]",
        "[a&&b]",
        "[[a]]",
        "a{2",
        "a{3,1}",
        r"\bx",
        r"\p{L}",
        "*a",
        "a^b",
        "a$b",
        "a$$",
        "(a$)",
        "a$*",
        "[b-a]",
        "x" * (PATTERN_CHARACTERS_MAX + 1),
        "(((a{99}){99}){99}){99}",
        "(" * 60 + ")" * 60,
        "\\",
    ],
)
def test_an_unsupported_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(UnsupportedPattern):
        TopicPattern(pattern)


@given(st.text(max_size=30))
def test_any_text_is_compiled_or_refused(pattern: str) -> None:
    with suppress(UnsupportedPattern):
        TopicPattern(pattern).matches("public/default/x")


def test_a_pattern_that_backtracks_without_end_in_re_is_matched_at_once() -> None:
    pattern = TopicPattern("(a|a)*(a+)+b")
    assert not pattern.matches("a" * 1_000)
    assert pattern.matches("a" * 1_000 + "b")

"""The start decisions of a bookie: one row for each state of the directory and of the cookie."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from magnetar.bookie import errors
from magnetar.bookie.storage.format import (
    INTENTS_MAX,
    DirectoryState,
    FormatDamaged,
    Identity,
)
from magnetar.bookie.storage.identity import Found, Start, Wanted, plan_start
from magnetar.metadata.model import BookieCookie, BookieId

OURS, OTHERS, FRESH = "a" * 32, "b" * 32, "f" * 32
BEFORE, START, NEXT, LATE = "1" * 32, "2" * 32, "3" * 32, "4" * 32
READY, FORMATTING, REPLACING = (
    DirectoryState.READY,
    DirectoryState.FORMATTING,
    DirectoryState.REPLACING,
)
WANTED = Wanted(
    bookie="b1", cluster="c1", fresh_incarnation=FRESH, fresh_start=NEXT, new_incarnation=False
)
LOCAL = Identity(
    bookie="b1",
    cluster="c1",
    incarnation=OURS,
    former=None,
    boot_epoch=5,
    start=START,
    state=READY,
)
COOKIE = BookieCookie(
    bookie=BookieId("b1"), incarnation=OURS, boot_epoch=5, cluster="c1", start=START
)
STARTED = replace(LOCAL, boot_epoch=6, start=NEXT)
BEGUN = replace(LOCAL, boot_epoch=1, state=FORMATTING)
FORMAT = replace(BEGUN, incarnation=FRESH, start=NEXT)
# An intent to replace OTHERS, whose last epoch was 4, and the cookie before and after it.
RENEWED = replace(LOCAL, former=OTHERS, state=REPLACING)
THEIRS = replace(COOKIE, incarnation=OTHERS, boot_epoch=4, start=BEFORE)
DAMAGE = FormatDamaged("checksum mismatch")

STARTS = [
    # directory                      cookie                        continues as
    (Found(None, ()), None, FORMAT),
    (Found(LOCAL, ("store",)), COOKIE, STARTED),
    # The last start wrote its intent and did not reach the cookie.
    (
        Found(replace(LOCAL, boot_epoch=6, start=BEFORE), ("store",)),
        COOKIE,
        replace(STARTED, intents=(BEFORE,)),
    ),
    # Several starts wrote their intents; then the cookie write of one start arrived.
    (
        Found(replace(LOCAL, boot_epoch=6, start=BEFORE, intents=(LATE,)), ("store",)),
        COOKIE,
        replace(STARTED, intents=(LATE, BEFORE)),
    ),
    (Found(replace(LOCAL, start=BEFORE, intents=(LATE, START)), ("store",)), COOKIE, STARTED),
    (Found(replace(LOCAL, intents=(LATE, BEFORE)), ("store",)), COOKIE, STARTED),
    # The first identity files and the first cookies had no record of a start.
    (Found(replace(LOCAL, start=""), ("store",)), replace(COOKIE, start=""), STARTED),
    # Formatting was interrupted: before the cookie, or after it.
    (Found(BEGUN, ()), None, BEGUN),
    (Found(BEGUN, ("store", "watermark")), None, BEGUN),
    (Found(BEGUN, ("store", "watermark")), replace(COOKIE, boot_epoch=1), BEGUN),
    # Replacing was interrupted: before the cookie, after it, and after the store was moved away.
    (Found(RENEWED, ("store",)), THEIRS, replace(RENEWED, start=NEXT, intents=(START,))),
    (Found(replace(RENEWED, start=NEXT, intents=(START,)), ("store",)), COOKIE, RENEWED),
    (
        Found(RENEWED, ("store",)),
        replace(THEIRS, boot_epoch=7),
        replace(RENEWED, boot_epoch=8, start=NEXT),
    ),
    (Found(RENEWED, ("store",)), COOKIE, RENEWED),
    (Found(replace(RENEWED, state=FORMATTING), ()), COOKIE, replace(RENEWED, state=FORMATTING)),
]

REFUSALS = [
    (Found(None, ()), COOKIE, errors.DirectoryEmpty),
    (Found(None, ("photos", "store")), None, errors.DirectoryForeign),
    (Found(None, ("store",)), COOKIE, errors.DirectoryForeign),
    (Found(None, ("former",)), None, errors.DirectoryForeign),
    (Found(DAMAGE, ("store",)), COOKIE, errors.IdentityDamaged),
    (Found(DAMAGE, ()), None, errors.IdentityDamaged),
    (Found(LOCAL, ("store",)), None, errors.CookieMissing),
    (Found(RENEWED, ("store",)), None, errors.CookieMissing),
    (Found(replace(LOCAL, bookie="b2"), ("store",)), COOKIE, errors.WrongBookie),
    (Found(replace(LOCAL, bookie="b2"), ("store",)), None, errors.WrongBookie),
    (Found(replace(LOCAL, cluster="c2"), ("store",)), COOKIE, errors.WrongCluster),
    (Found(replace(LOCAL, cluster="c2"), ("store",)), None, errors.WrongCluster),
    (Found(LOCAL, ("store",)), replace(COOKIE, cluster="c2"), errors.WrongCluster),
    (Found(LOCAL, ("store",)), replace(COOKIE, incarnation=OTHERS), errors.WrongIncarnation),
    (Found(BEGUN, ("store",)), replace(COOKIE, incarnation=OTHERS), errors.WrongIncarnation),
    (Found(RENEWED, ("store",)), replace(COOKIE, incarnation=FRESH), errors.WrongIncarnation),
    (Found(RENEWED, ("store",)), replace(COOKIE, boot_epoch=6), errors.DirectoryRolledBack),
    (Found(LOCAL, ("store",)), replace(COOKIE, boot_epoch=3), errors.MetadataRolledBack),
    # The other of two copies of a directory was started.
    (Found(LOCAL, ("store",)), replace(COOKIE, start=BEFORE), errors.DirectoryCloned),
    (Found(LOCAL, ("store",)), replace(COOKIE, start=""), errors.DirectoryCloned),
    (
        Found(replace(LOCAL, intents=(BEFORE,)), ("store",)),
        replace(COOKIE, start=LATE),
        errors.DirectoryCloned,
    ),
    (Found(RENEWED, ("store",)), replace(COOKIE, start=BEFORE), errors.DirectoryCloned),
]


@pytest.mark.parametrize(("found", "cookie", "expected"), STARTS)
def test_each_state_of_a_directory_gives_its_identity(
    found: Found, cookie: BookieCookie | None, expected: Identity
) -> None:
    assert plan_start(Path("/data"), found, cookie, WANTED) == Start(expected)


@pytest.mark.parametrize(("found", "cookie", "error"), REFUSALS)
def test_each_wrong_directory_is_refused_with_a_remedy(
    found: Found, cookie: BookieCookie | None, error: type[errors.StartRefused]
) -> None:
    with pytest.raises(error) as refused:
        plan_start(Path("/data"), found, cookie, WANTED)
    assert type(refused.value) is error
    message = str(refused.value)
    assert message.startswith("/data: found ")
    assert refused.value.remedy in message
    assert refused.value.definite


def test_an_empty_directory_of_a_known_bookie_needs_the_option_of_the_operator() -> None:
    wanted = replace(WANTED, new_incarnation=True)
    expected = replace(FORMAT, former=OURS, boot_epoch=6)
    assert plan_start(Path("/d"), Found(None, ()), COOKIE, wanted) == Start(expected)
    # Interrupted before and after the cookie's write; the option is needed only once.
    again = Start(replace(expected, intents=(NEXT,)))
    assert plan_start(Path("/d"), Found(expected, ()), COOKIE, WANTED) == again
    entered = replace(COOKIE, incarnation=FRESH, boot_epoch=6, start=NEXT)
    assert plan_start(Path("/d"), Found(expected, ()), entered, WANTED) == Start(expected)
    # This option changes nothing for any other directory.
    for found, cookie, start in STARTS:
        if found.identity is not None:
            assert plan_start(Path("/d"), found, cookie, wanted) == Start(start)
    for found, cookie, error in REFUSALS:
        if error is not errors.DirectoryEmpty:
            with pytest.raises(error):
                plan_start(Path("/d"), found, cookie, wanted)


def test_the_start_decision_for_every_pair_of_cookie_and_local_epoch() -> None:
    for local in range(1, 6):
        for stored in range(1, 6):
            found = Found(replace(LOCAL, boot_epoch=local), ("store",))
            cookie = replace(COOKIE, boot_epoch=stored)
            if local > stored + 1:
                with pytest.raises(errors.MetadataRolledBack):
                    plan_start(Path("/d"), found, cookie, WANTED)
                continue
            start = plan_start(Path("/d"), found, cookie, WANTED)
            assert start.identity.boot_epoch == stored + 1
            if local < stored:  # an older image continues as a new incarnation
                assert start.rolled_back is not None
                assert start.identity.state is REPLACING
                assert (start.identity.incarnation, start.identity.former) == (FRESH, OURS)
            else:
                intents = (START,) if local > stored else ()
                assert start == Start(replace(STARTED, boot_epoch=stored + 1, intents=intents))


@pytest.mark.parametrize("others", [(), ("store",), ("former", "store", "watermark")])
def test_an_image_from_the_time_of_formatting_starts_as_a_new_incarnation(
    others: tuple[str, ...],
) -> None:
    """The image lacks the entries that were acknowledged after the formatting."""
    for identity in (BEGUN, replace(BEGUN, former=OTHERS)):
        start = plan_start(
            Path("/d"), Found(identity, others), replace(COOKIE, boot_epoch=2), WANTED
        )
        assert start.rolled_back is not None
        expected = replace(RENEWED, incarnation=FRESH, former=OURS, boot_epoch=3, start=NEXT)
        assert start.identity == expected
        # Interrupted before the cookie and after it.
        before = plan_start(
            Path("/d"), Found(expected, others), replace(COOKIE, boot_epoch=2), WANTED
        )
        assert before == Start(replace(expected, intents=(NEXT,)))
        cookie = replace(COOKIE, incarnation=FRESH, boot_epoch=3, start=NEXT)
        after = plan_start(Path("/d"), Found(expected, others), cookie, WANTED)
        assert after == Start(expected)


def begin(identity: Identity, cookie: BookieCookie, token: str) -> Identity:
    wanted = replace(WANTED, fresh_start=token)
    return plan_start(Path("/d"), Found(identity, ("store",)), cookie, wanted).identity


def entered(identity: Identity) -> BookieCookie:
    return replace(COOKIE, boot_epoch=identity.boot_epoch, start=identity.start)


@pytest.mark.parametrize("landed", range(5))
def test_of_a_directory_and_its_copy_only_one_starts(landed: int) -> None:
    """Five starts of the original fail before their cookie is stored. A copy of the directory is
    made before each start, and each copy is started once. The cookie write of one start arrives
    late."""
    original, copies, cookies = LOCAL, [], []
    for at in range(5):
        copies.append((begin(original, COOKIE, f"c{at:031x}"), at))
        original = begin(original, COOKIE, f"{at:032x}")
        cookies.append(entered(original))
    again = begin(original, cookies[landed], NEXT)
    assert (again.boot_epoch, again.intents) == (7, ())
    for copy, made_before in copies:
        if made_before <= landed:
            with pytest.raises(errors.DirectoryCloned):
                begin(copy, cookies[landed], LATE)
        else:  # the original: the first start leaves the other copy behind
            begin(copy, cookies[landed], LATE)
        behind = plan_start(Path("/d"), Found(copy, ("store",)), entered(again), WANTED)
        assert behind.rolled_back is not None


def test_intents_are_limited_and_a_dropped_intent_is_refused() -> None:
    identity = LOCAL
    tokens = [f"{at:032x}" for at in range(INTENTS_MAX + 2)]
    for token in tokens:
        identity = begin(identity, COOKIE, token)
    assert identity.intents == tuple(tokens[1:-1])
    late = entered(identity)
    assert begin(identity, replace(late, start=tokens[1]), NEXT).boot_epoch == 7
    with pytest.raises(errors.DirectoryCloned):
        begin(identity, replace(late, start=tokens[0]), NEXT)

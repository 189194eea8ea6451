"""The rules of starting, row by row: what the directory says against what the cluster says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from magnetar.bookie import errors
from magnetar.bookie.storage.format import FormatDamaged, Identity
from magnetar.bookie.storage.identity import Found, Wanted, plan_start
from magnetar.metadata.model import BookieCookie, BookieId

OURS, OTHERS, FRESH = "a" * 32, "b" * 32, "f" * 32
WANTED = Wanted(bookie="b1", cluster="c1", fresh_incarnation=FRESH)
LOCAL = Identity(bookie="b1", cluster="c1", incarnation=OURS, boot_epoch=5, ready=True)
BEGUN = replace(LOCAL, boot_epoch=1, ready=False)
COOKIE = BookieCookie(bookie=BookieId("b1"), incarnation=OURS, boot_epoch=5, cluster="c1")
FORMAT = Identity(bookie="b1", cluster="c1", incarnation=FRESH, boot_epoch=1, ready=False)
DAMAGE = FormatDamaged("checksum mismatch")

STARTS = [
    # directory                      cookie                        goes on as
    (Found(None, ()), None, FORMAT),
    (Found(LOCAL, ("store",)), COOKIE, replace(LOCAL, boot_epoch=6)),
    # The last start wrote its intent and did not reach the cookie.
    (Found(replace(LOCAL, boot_epoch=6), ("store",)), COOKIE, replace(LOCAL, boot_epoch=6)),
    # Formatting was interrupted: before the store, before the cookie, before the end.
    (Found(BEGUN, ()), None, BEGUN),
    (Found(BEGUN, ("store", "watermark")), None, BEGUN),
    (Found(BEGUN, ("store", "watermark")), replace(COOKIE, boot_epoch=1), BEGUN),
]

REFUSALS = [
    (Found(None, ()), COOKIE, errors.DirectoryEmpty),
    (Found(None, ("photos", "store")), None, errors.DirectoryForeign),
    (Found(None, ("store",)), COOKIE, errors.DirectoryForeign),
    (Found(DAMAGE, ("store",)), COOKIE, errors.IdentityDamaged),
    (Found(DAMAGE, ()), None, errors.IdentityDamaged),
    (Found(LOCAL, ("store",)), None, errors.CookieMissing),
    (Found(replace(LOCAL, bookie="b2"), ("store",)), COOKIE, errors.WrongBookie),
    (Found(replace(LOCAL, bookie="b2"), ("store",)), None, errors.WrongBookie),
    (Found(replace(LOCAL, cluster="c2"), ("store",)), COOKIE, errors.WrongCluster),
    (Found(replace(LOCAL, cluster="c2"), ("store",)), None, errors.WrongCluster),
    (Found(LOCAL, ("store",)), replace(COOKIE, cluster="c2"), errors.WrongCluster),
    (Found(LOCAL, ("store",)), replace(COOKIE, incarnation=OTHERS), errors.WrongIncarnation),
    (Found(BEGUN, ("store",)), replace(COOKIE, incarnation=OTHERS), errors.WrongIncarnation),
    (Found(LOCAL, ("store",)), replace(COOKIE, boot_epoch=6), errors.DirectoryRolledBack),
    (Found(BEGUN, ("store",)), replace(COOKIE, boot_epoch=2), errors.DirectoryRolledBack),
    (Found(LOCAL, ("store",)), replace(COOKIE, boot_epoch=3), errors.MetadataRolledBack),
]


@pytest.mark.parametrize(("found", "cookie", "expected"), STARTS)
def test_starts(found: Found, cookie: BookieCookie | None, expected: Identity) -> None:
    assert plan_start(Path("/data"), found, cookie, WANTED) == expected


@pytest.mark.parametrize(("found", "cookie", "error"), REFUSALS)
def test_refusals(
    found: Found, cookie: BookieCookie | None, error: type[errors.StartRefused]
) -> None:
    with pytest.raises(error) as refused:
        plan_start(Path("/data"), found, cookie, WANTED)
    assert type(refused.value) is error
    message = str(refused.value)
    assert message.startswith("/data: found ")
    assert refused.value.remedy in message
    assert refused.value.definite


def test_every_cookie_epoch_against_every_local_one() -> None:
    for local in range(1, 6):
        for stored in range(1, 6):
            found = Found(replace(LOCAL, boot_epoch=local), ("store",))
            cookie = replace(COOKIE, boot_epoch=stored)
            if local in (stored, stored + 1):
                assert plan_start(Path("/d"), found, cookie, WANTED).boot_epoch == stored + 1
            else:
                with pytest.raises((errors.DirectoryRolledBack, errors.MetadataRolledBack)):
                    plan_start(Path("/d"), found, cookie, WANTED)

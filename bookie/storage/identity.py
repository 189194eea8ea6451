"""May a bookie start on this directory, and as which incarnation? The rules; no I/O.

Theory. A directory says whose it is (the identity file); the cluster's metadata says what it
knows of the bookie (the cookie). Only if both tell the same story may the bookie answer "no such
entry". Each start counts up the *boot epoch* and draws a *start* token: first in the directory,
synced, as an intent; then, by compare-and-set, in the cookie; then the bookie serves. So the
directory is level with the cookie, or one ahead when the last start did not get as far as the
cookie. If it is behind, an older image of the disk was restored, and what was acknowledged since is
gone from it. If it is level with another token, it is one of two copies of a directory, and the
other one was started. A running bookie counts its epoch up every hour.

A process that dies while its cookie is on the way to the metadata leaves a write that may land
after the next start has drawn another token for the same epoch. So a directory that is ahead keeps
the tokens of all its *intents* for that epoch, and any of them in the cookie is its own. It forgets
them with the next epoch: all these writes were compared with the same cookie, so once one of them
has landed none of the others can.

A copy of the directory is still told apart. It knows the tokens up to when it was made. One that
was drawn later, by the original, it does not know: it is refused. One that was drawn before it was
made both accept, but only whoever enters the next epoch first goes on: the other one is behind
then. And nobody serves before the token that it drew itself is in the cookie, so a token that two
know and that its drawer did not live to see there has no entries behind it. Only a copy that was
made between the drawing of a token and the end of the very epoch in which its drawer served knows
the token and lacks entries; as the NOTE below says, that was never noticed, intents or not.

NOTE: an image that is taken and restored within one boot epoch is not noticed by this; the
watermark does not help either, it lies in the same image. Never restore the disk image of a
bookie.

A directory becomes an incarnation's in steps, each of which may be the last before a crash: the
identity in the state *formatting*, the cookie, the store, the identity in the state *ready*. Until
the last one nothing was ever acknowledged from it, so formatting may simply go on. If the cookie is
ahead of it, that was done elsewhere: it is an older image, to be replaced like any other.

An incarnation whose store cannot be believed is *replaced*: by the identity of a new incarnation
in the state *replacing*, which names the former one; then the cookie; then the former store is
moved away; then as above from *formatting* on. From the first of these steps on the change is not
taken back, whatever the former store would do at another attempt.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from magnetar.bookie.errors import (
    CookieMissing,
    DirectoryCloned,
    DirectoryEmpty,
    DirectoryForeign,
    DirectoryRolledBack,
    IdentityDamaged,
    MetadataRolledBack,
    WrongBookie,
    WrongCluster,
    WrongIncarnation,
)
from magnetar.bookie.storage.format import (
    INTENTS_MAX,
    DirectoryState,
    FormatDamaged,
    Identity,
)

if TYPE_CHECKING:
    from pathlib import Path

    from magnetar.metadata.model import BookieCookie


@dataclass(frozen=True, slots=True)
class Found:
    """What lies in a directory."""

    identity: Identity | FormatDamaged | None  # None: no such file
    others: tuple[str, ...]  # names of whatever else is there and is not ours to ignore


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """As whom the bookie is to start."""

    bookie: str
    cluster: str
    fresh_incarnation: str  # for a store that is made now
    fresh_start: str
    new_incarnation: bool  # the operator says that the data of an empty directory is lost


@dataclass(frozen=True, slots=True)
class Start:
    """How to go on. In which state `identity` is says what is to be done with the directory."""

    identity: Identity
    rolled_back: DirectoryRolledBack | None = None  # why `identity` replaces another incarnation


def plan_start(directory: Path, found: Found, cookie: BookieCookie | None, wanted: Wanted) -> Start:
    """The identity with which to go on: *ready*, to open the store that is there, or a state from
    which a store is to be made. Raises a StartRefused."""
    if isinstance(found.identity, FormatDamaged):
        raise IdentityDamaged(
            directory,
            found=f"a damaged identity file ({found.identity.reason})",
            expected="one that is intact",
            remedy="Nothing tells whose data it is. If the disk is broken, start the bookie with "
            "--new-incarnation on an empty directory; its entries are restored from the other "
            "bookies.",
        )
    if found.identity is None:
        return Start(_plan_format(directory, found, cookie, wanted))
    identity = found.identity
    _check_names(directory, identity, wanted)
    if identity.state is not DirectoryState.READY:
        return _plan_to_go_on(directory, identity, cookie, wanted)
    if cookie is None:
        raise _cookie_missing(directory, identity)
    _check_cookie(directory, identity, cookie)
    if identity.boot_epoch < cookie.boot_epoch:
        return Start(
            replace_incarnation(identity, cookie, wanted), _behind(directory, identity, cookie)
        )
    _check_start(directory, identity, cookie)
    return Start(_intend(identity, cookie, wanted))


def replace_incarnation(identity: Identity, cookie: BookieCookie, wanted: Wanted) -> Identity:
    """The identity that takes over from one whose store cannot be believed."""
    return replace(
        identity,
        incarnation=wanted.fresh_incarnation,
        former=identity.incarnation,
        boot_epoch=cookie.boot_epoch + 1,
        start=wanted.fresh_start,
        state=DirectoryState.REPLACING,
        intents=(),  # were the former one's; should one land, the cookie names that one again
    )


def _intend(identity: Identity, cookie: BookieCookie, wanted: Wanted) -> Identity:
    """The identity of a start that is to follow the one in the cookie.

    Beyond INTENTS_MAX the oldest intent is forgotten. Should its write land after all, after so
    many starts, the directory is refused as one of two copies: the safe side.
    """
    epoch = cookie.boot_epoch + 1
    intents: tuple[str, ...] = ()
    if identity.boot_epoch == epoch and identity.start:
        intents = (*identity.intents, identity.start)[-INTENTS_MAX:]
    return replace(identity, boot_epoch=epoch, start=wanted.fresh_start, intents=intents)


def _plan_format(
    directory: Path, found: Found, cookie: BookieCookie | None, wanted: Wanted
) -> Identity:
    if found.others:
        raise DirectoryForeign(
            directory,
            found=f"{', '.join(found.others[:5])}, and no identity file",
            expected="an empty directory, or one of a bookie",
            remedy="Point data_dir to an empty directory or to the right one; nothing was changed.",
        )
    if cookie is not None and not wanted.new_incarnation:
        raise DirectoryEmpty(
            directory,
            found="nothing",
            expected=f"the data of bookie {cookie.bookie}, incarnation {cookie.incarnation}",
            remedy="Is the disk mounted? If its data is lost, start with --new-incarnation: the "
            "bookie then begins anew, and its entries are restored from the other bookies.",
        )
    return Identity(
        bookie=wanted.bookie,
        cluster=wanted.cluster,
        incarnation=wanted.fresh_incarnation,
        former=None if cookie is None else cookie.incarnation,
        boot_epoch=1 if cookie is None else cookie.boot_epoch + 1,
        start=wanted.fresh_start,
        state=DirectoryState.FORMATTING,
    )


def _plan_to_go_on(
    directory: Path, identity: Identity, cookie: BookieCookie | None, wanted: Wanted
) -> Start:
    """A change that was begun, and whose intent may have reached the cookie."""
    if cookie is None:
        if identity.former is not None:
            raise _cookie_missing(directory, identity)
        return Start(identity)
    if cookie.incarnation == identity.former:
        return Start(_intend(identity, cookie, wanted))
    _check_cookie(directory, identity, cookie)
    if identity.boot_epoch < cookie.boot_epoch:
        behind = _behind(directory, identity, cookie)
        if identity.state is DirectoryState.REPLACING:
            # What lies here is the store of the one before, which has another name.
            raise behind
        # It was formatted to the end since, and has served: whatever of it lies here is not all.
        return Start(replace_incarnation(identity, cookie, wanted), behind)
    _check_start(directory, identity, cookie)
    if identity.boot_epoch == cookie.boot_epoch:
        return Start(replace(identity, start=cookie.start, intents=()))
    return Start(identity)


def _check_names(directory: Path, identity: Identity, wanted: Wanted) -> None:
    if identity.bookie != wanted.bookie:
        raise WrongBookie(
            directory,
            found=f"the data of bookie {identity.bookie}",
            expected=f"that of bookie {wanted.bookie}",
            remedy="Correct data_dir or id in the configuration.",
        )
    if identity.cluster != wanted.cluster:
        raise WrongCluster(
            directory,
            found=f"a bookie of cluster {identity.cluster}",
            expected=f"one of cluster {wanted.cluster}",
            remedy="Correct the metadata address, or data_dir. A bookie cannot change clusters.",
        )


def _check_cookie(directory: Path, identity: Identity, cookie: BookieCookie) -> None:
    if (identity.bookie, identity.cluster) != (cookie.bookie, cookie.cluster):
        raise WrongCluster(
            directory,
            found=f"bookie {identity.bookie} of cluster {identity.cluster}",
            expected=f"bookie {cookie.bookie} of cluster {cookie.cluster}, as the metadata says",
            remedy="The metadata of this bookie was overwritten; restore it.",
        )
    if identity.incarnation != cookie.incarnation:
        raise WrongIncarnation(
            directory,
            found=f"incarnation {identity.incarnation}",
            expected=f"incarnation {cookie.incarnation}, which the cluster knows as "
            f"{cookie.bookie}",
            remedy="Another directory was started under this id. Start each under its own. If the "
            "other one is lost, start with --new-incarnation on an empty directory.",
        )


def _check_start(directory: Path, identity: Identity, cookie: BookieCookie) -> None:
    """The directory is level with the cookie, or one ahead."""
    if identity.boot_epoch > cookie.boot_epoch + 1:
        raise MetadataRolledBack(
            directory,
            found=f"boot epoch {identity.boot_epoch}",
            expected=f"at most {cookie.boot_epoch + 1}: the cluster's metadata is older",
            remedy="An older state of the metadata was restored; restore the current one.",
        )
    known = (identity.start, *identity.intents)
    if identity.boot_epoch == cookie.boot_epoch and cookie.start not in known:
        raise DirectoryCloned(
            directory,
            found=f"start {identity.start} of boot epoch {identity.boot_epoch}",
            expected=f"{cookie.start}: a copy of this directory was started as {cookie.bookie}",
            remedy="Only one of the two may ever run. If the other one is lost, start with "
            "--new-incarnation on an empty directory.",
        )


def _cookie_missing(directory: Path, identity: Identity) -> CookieMissing:
    return CookieMissing(
        directory,
        found=f"bookie {identity.bookie}, in use since incarnation {identity.incarnation}",
        expected="to find it in the cluster's metadata, which does not know it",
        remedy="Check the metadata address and its root path. If the bookie was removed "
        "from the cluster, start it on an empty directory.",
    )


def _behind(directory: Path, identity: Identity, cookie: BookieCookie) -> DirectoryRolledBack:
    return DirectoryRolledBack(
        directory,
        found=f"boot epoch {identity.boot_epoch}",
        expected=f"{cookie.boot_epoch} or one more: the cluster has seen a later state",
        remedy="An older image of the disk was restored, and acknowledged entries are missing "
        "from it. Start with --new-incarnation on an empty directory.",
    )

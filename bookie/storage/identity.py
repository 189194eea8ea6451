"""The rules that say whether a bookie may start on a directory, and as which incarnation. No I/O.

Theory. The directory's identity file names its owner. The bookie's cookie, in the cluster's
metadata, names the bookie's incarnation and its last start. The bookie may answer "no such entry"
only if both agree. Each start takes the *boot epoch* after the cookie's, and draws a *start* token.
It writes both to the directory first, synced. Then it writes them to the cookie by compare-and-set,
and then the bookie serves. So the directory's epoch equals the cookie's, or is one ahead if the
last start did not reach the cookie. If the directory's epoch is behind, an older image of the disk
was restored, and entries acknowledged after the image are missing. If the epochs are equal but the
tokens differ, there are two copies of the directory, and the other copy was started. A running
bookie begins a new epoch every hour.

A process may end while it writes its cookie. The write may arrive late, after the next start has
drawn another token for the same epoch. So a directory that is ahead keeps all its tokens of that
epoch as *intents*, and accepts any of them in the cookie. The next epoch drops them. All these
writes compare with the same cookie, so after one arrived, the others fail.

A copy of the directory is still recognised. The copy knows the tokens that were drawn before it was
made. If the cookie has a token that the original drew later, the copy is refused. If the cookie has
an earlier token, both directories are accepted. Then the directory that enters the next epoch first
continues, and the other directory is behind. A bookie serves only after its own token is in the
cookie. So a process that ended before its token was in the cookie has stored no entries, and it
does no harm that both directories know this token. One case is not noticed: the bookie draws a
token, the copy is made, and the bookie then stores entries under this token. If the copy is started
in the same epoch, it knows the token but lacks the entries. The NOTE below is about this case,
which intents do not cause.

NOTE: these rules do not notice a disk image that is taken and restored within one boot epoch. The
watermark does not help, because it lies in the same image. Never restore the disk image of a
bookie.

A directory is formatted in four steps, and a crash may happen after each step. The steps are: the
identity in the state *formatting*, the cookie, the store, the identity in the state *ready*.
Nothing was acknowledged from the directory before the last step, so formatting can simply continue.
If the cookie is ahead of the directory, the formatting was completed elsewhere. This directory is
then an older image, and is replaced like any other.

An incarnation with a damaged store is *replaced*. First the identity of a new incarnation is
written in the state *replacing*; this identity names the former incarnation. Then come the cookie,
the move of the former store, the identity in the state *formatting*, the new store, and the
identity in the state *ready*. After the first of these steps the change is never undone, even if
the former store would open at another attempt.
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
    """The content of a directory."""

    identity: Identity | FormatDamaged | None  # None: no such file
    others: tuple[str, ...]  # names of the other files, except those that layout.py ignores


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The bookie that is to start on the directory."""

    bookie: str
    cluster: str
    fresh_incarnation: str  # the incarnation of a store that is made now
    fresh_start: str
    new_incarnation: bool  # the operator states that the bookie's earlier data is lost


@dataclass(frozen=True, slots=True)
class Start:
    """The plan of a start. The state of `identity` says what to do with the directory."""

    identity: Identity
    # The directory is an older image, so `identity` replaces its incarnation. None: it is not.
    rolled_back: DirectoryRolledBack | None = None


def plan_start(directory: Path, found: Found, cookie: BookieCookie | None, wanted: Wanted) -> Start:
    """Plan the start. With an identity in the state *ready* the existing store is opened; in any
    other state a store is made. Raises a StartRefused."""
    if isinstance(found.identity, FormatDamaged):
        raise IdentityDamaged(
            directory,
            found=f"a damaged identity file ({found.identity.reason})",
            expected="an intact identity file",
            remedy="The owner of the data is unknown. If the disk is broken, start the bookie with "
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
    """Return the identity that replaces an incarnation whose store is damaged or outdated."""
    return replace(
        identity,
        incarnation=wanted.fresh_incarnation,
        former=identity.incarnation,
        boot_epoch=cookie.boot_epoch + 1,
        start=wanted.fresh_start,
        state=DirectoryState.REPLACING,
        # The intents belong to the former incarnation. If the cookie write of an intent arrives
        # late, the cookie still names the former incarnation. The next start then continues.
        intents=(),
    )


def _intend(identity: Identity, cookie: BookieCookie, wanted: Wanted) -> Identity:
    """Return the identity of the start that follows the start in the cookie.

    At INTENTS_MAX the oldest intent is dropped. If its write arrives after that many starts, the
    directory is refused as one of two copies, which is the safe side.
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
            expected="an empty directory, or the directory of a bookie",
            remedy="Set data_dir to an empty directory or to this bookie's directory; nothing was "
            "changed.",
        )
    if cookie is not None and not wanted.new_incarnation:
        raise DirectoryEmpty(
            directory,
            found="nothing",
            expected=f"the data of bookie {cookie.bookie}, incarnation {cookie.incarnation}",
            remedy="Check that the disk is mounted. If its data is lost, start with "
            "--new-incarnation: the bookie's entries are restored from the other bookies.",
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
    """Continue an unfinished change, whose start may have reached the cookie."""
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
            # Another replacement is not possible. It would name `identity` as the owner of this
            # store, but the store belongs to `identity.former`.
            raise behind
        # The formatting was completed elsewhere and the bookie has served since, so entries are
        # missing here.
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
            expected=f"the data of bookie {wanted.bookie}",
            remedy="Correct data_dir or id in the configuration.",
        )
    if identity.cluster != wanted.cluster:
        raise WrongCluster(
            directory,
            found=f"a bookie of cluster {identity.cluster}",
            expected=f"a bookie of cluster {wanted.cluster}",
            remedy="Correct the metadata address, or data_dir. A bookie cannot change clusters.",
        )


def _check_cookie(directory: Path, identity: Identity, cookie: BookieCookie) -> None:
    if (identity.bookie, identity.cluster) != (cookie.bookie, cookie.cluster):
        raise WrongCluster(
            directory,
            found=f"bookie {identity.bookie} of cluster {identity.cluster}",
            expected=f"bookie {cookie.bookie} of cluster {cookie.cluster}, as in the metadata",
            remedy="The metadata of this bookie was overwritten; restore it.",
        )
    if identity.incarnation != cookie.incarnation:
        raise WrongIncarnation(
            directory,
            found=f"incarnation {identity.incarnation}",
            expected=f"incarnation {cookie.incarnation}, which the cluster has for {cookie.bookie}",
            remedy="Another directory was started under this id. Start each under its own id. If "
            "the other one is lost, start with --new-incarnation on an empty directory.",
        )


def _check_start(directory: Path, identity: Identity, cookie: BookieCookie) -> None:
    """Check that the directory's epoch equals the cookie's or is one ahead, and that the directory
    knows the start token of an equal epoch. Raises MetadataRolledBack, DirectoryCloned."""
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
            remedy="Only one of the two copies may ever run. If the other one is lost, start with "
            "--new-incarnation on an empty directory.",
        )


def _cookie_missing(directory: Path, identity: Identity) -> CookieMissing:
    return CookieMissing(
        directory,
        found=f"the data of bookie {identity.bookie}, incarnation {identity.incarnation}",
        expected="a cookie of this bookie in the cluster's metadata; there is none",
        remedy="Check the metadata address and its root path. If the bookie was removed "
        "from the cluster, start it on an empty directory.",
    )


def _behind(directory: Path, identity: Identity, cookie: BookieCookie) -> DirectoryRolledBack:
    return DirectoryRolledBack(
        directory,
        found=f"boot epoch {identity.boot_epoch}",
        expected=f"{cookie.boot_epoch} or one more: the cluster saw a later state",
        remedy="An older image of the disk was restored, and acknowledged entries are missing "
        "from it. Start with --new-incarnation on an empty directory.",
    )

"""May a bookie start on this directory? The rules; no I/O.

Theory. A directory says whose it is (the identity file); the cluster's metadata says what it
knows of the bookie (the cookie). Only if both tell the same story may the bookie answer "no such
entry". Each start counts up the *boot epoch*: first in the directory, synced, as an intent; then,
by compare-and-set, in the cookie; then the bookie serves. So the directory is level with the
cookie, or one ahead when the last start did not get as far as the cookie. If it is behind, an
older image of the disk was restored, and what was acknowledged since is gone from it.

NOTE: an image that is taken and restored within one boot epoch is not noticed by this; the
watermark does not help either, it lies in the same image. Never restore the disk image of a
bookie.

A directory becomes a bookie's in steps, each of which may be the last before a crash: identity in
the state *formatting*, the store, the cookie, identity in the state *ready*. Until the last one
nothing was ever acknowledged from it, so formatting may simply go on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from magnetar.bookie.errors import (
    CookieMissing,
    DirectoryEmpty,
    DirectoryForeign,
    DirectoryRolledBack,
    IdentityDamaged,
    MetadataRolledBack,
    WrongBookie,
    WrongCluster,
    WrongIncarnation,
)
from magnetar.bookie.storage.format import FormatDamaged, Identity

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
    fresh_incarnation: str  # for a directory that is formatted now


def plan_start(
    directory: Path, found: Found, cookie: BookieCookie | None, wanted: Wanted
) -> Identity:
    """The identity with which to go on: of this start if the directory is in use (`ready`), else of
    the formatting that is to be begun or finished. Raises a StartRefused."""
    if isinstance(found.identity, FormatDamaged):
        raise IdentityDamaged(
            directory,
            found=f"a damaged identity file ({found.identity.reason})",
            expected="one that is intact",
            remedy="If the disk is broken, start the bookie under a new id on an empty directory; "
            "its entries are restored from the other bookies.",
        )
    if found.identity is None:
        return _plan_format(directory, found, cookie, wanted)
    identity = found.identity
    _check_names(directory, identity, wanted)
    if cookie is None:
        if identity.ready:
            raise CookieMissing(
                directory,
                found=f"bookie {identity.bookie}, in use since incarnation {identity.incarnation}",
                expected="to find it in the cluster's metadata, which does not know it",
                remedy="Check the metadata address and its root path. If the bookie was removed "
                "from the cluster, start it on an empty directory.",
            )
        return identity
    _check_cookie(directory, identity, cookie)
    return replace(identity, boot_epoch=cookie.boot_epoch + 1) if identity.ready else identity


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
    if cookie is not None:
        raise DirectoryEmpty(
            directory,
            found="nothing",
            expected=f"the data of bookie {cookie.bookie}, incarnation {cookie.incarnation}",
            remedy="Is the disk mounted? If its data is lost, start under a new id: this one "
            "still answers for entries in the cluster.",
        )
    return Identity(
        bookie=wanted.bookie,
        cluster=wanted.cluster,
        incarnation=wanted.fresh_incarnation,
        boot_epoch=1,
        ready=False,
    )


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
            remedy="Another directory was started under this id. Start each under its own.",
        )
    if identity.boot_epoch < cookie.boot_epoch:
        raise DirectoryRolledBack(
            directory,
            found=f"boot epoch {identity.boot_epoch}",
            expected=f"{cookie.boot_epoch} or one more: the cluster has seen a later state",
            remedy="An older image of the disk was restored, and acknowledged entries are missing "
            "from it. Start under a new id on an empty directory.",
        )
    if identity.boot_epoch > cookie.boot_epoch + 1:
        raise MetadataRolledBack(
            directory,
            found=f"boot epoch {identity.boot_epoch}",
            expected=f"at most {cookie.boot_epoch + 1}: the cluster's metadata is older",
            remedy="An older state of the metadata was restored; restore the current one.",
        )

"""A disk whose power can be cut: ext4 on a loop device, ended by its own shutdown call.

The call (flag 2: do not write the journal out) makes the file system lose unsynced data, exactly as
a power cut would. Until the file system is unmounted, every operation on it fails. Needs root.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

_EXT4_IOC_SHUTDOWN: Final = 0x8004587D  # _IOR('X', 125, __u32)
_NO_LOG_FLUSH: Final = 2
_BUSY_S: Final = 20.0  # the kernel releases the files of ended processes within milliseconds


class DiskUnusable(Exception):
    """This machine cannot make such a disk; the text says why."""

    definite = True


class LoopDisk:
    """A disk, mounted at `path`. The owner must `close` it."""

    def __init__(self, directory: Path, *, size_mb: int) -> None:
        """Raises DiskUnusable."""
        self.path = directory / "disk"
        self._image = directory / "disk.img"
        self.path.mkdir(parents=True)
        with open(self._image, "wb") as image:
            image.truncate(size_mb << 20)
        if os.geteuid() != 0:
            raise DiskUnusable("only root can mount a loop device")
        try:
            self._run("mkfs.ext4", "-q", "-F", str(self._image))
            self._mount()
        except (OSError, subprocess.CalledProcessError) as error:
            raise DiskUnusable(f"no loop device with ext4 here: {error}") from error
        try:
            self.cut()
        except OSError as error:
            self._run("umount", str(self.path))
            raise DiskUnusable(f"the kernel cannot shut the file system down: {error}") from error
        self.restore()

    def cut(self) -> None:
        """Cut the power."""
        directory = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(directory, _EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(directory)

    def restore(self) -> None:
        """Bring the power back. No process may have a file of the disk open.

        Returns once the file system answers. A container that starts copies all mounts. Until the
        container drops its copy, the kernel keeps the file system that was cut, and a new mount
        shows that file system again.
        """
        end_s = time.monotonic() + _BUSY_S
        while True:
            try:
                self._run("umount", str(self.path))
                self._mount()
                os.close(os.open(self.path, os.O_TMPFILE | os.O_WRONLY))
                return
            except (subprocess.CalledProcessError, OSError):
                if time.monotonic() > end_s:
                    raise
                time.sleep(0.01)

    def close(self) -> None:
        self._run("umount", "-l", str(self.path))

    def _mount(self) -> None:
        # A long commit interval: what is not synced stays in memory until the power is cut.
        options = "loop,commit=300,noatime"
        self._run("mount", "-t", "ext4", "-o", options, str(self._image), str(self.path))

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True)

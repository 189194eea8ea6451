"""A bookie as a process of its own, on metadata of its own, for tests that kill it.

The program `python bookie_process.py CONFIG METADATA_DIR` runs the bookie. When the bookie serves,
the program writes ready.json beside CONFIG.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magnetar.local_process import LocalProcess
from magnetar.metadata.model import BookieAddress
from magnetar.runtime.grpc_frames import open_channel

if TYPE_CHECKING:
    import asyncio

    from grpc import aio

    from magnetar.metadata.model import LedgerId, LedgerMetadata, Member

READY = "ready.json"
LATE_S = 25.0


def _with_tests() -> str:
    """The module path, with `tests` first, so that a program in another folder finds its
    imports."""
    tests = str(Path(__file__).parent.parent)
    return os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))


class BookieProcess:
    """A bookie process that a test starts, calls, kills and starts again."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.directory = directory
        self.data_dir = Path(str(settings.get("data_dir", directory / "data")))
        self.ready: dict[str, Any] = {}
        config = {
            "id": "b1",
            "data_dir": str(self.data_dir),
            "metadata_url": "zk://unused:1",
            "data_port": 0,
            "grpc_port": 0,
            "http_port": 0,
        } | settings
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "bookie.toml").write_text(
            "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
        )
        self._process = LocalProcess(
            "bookie",
            directory.name,
            directory,
            self._command(Path(__file__)),
            {},
            is_ready=(directory / READY).exists,
            variables={"PYTHONPATH": _with_tests()},
        )

    def use_program(self, program: Path) -> None:
        """Use another program than this file from the next start on."""
        self._process.command = self._command(program)

    def launch(self) -> None:
        (self.directory / READY).unlink(missing_ok=True)
        self._process.launch()

    def wait_ready(self) -> None:
        self._process.wait_ready()
        self.ready = json.loads((self.directory / READY).read_text())

    def start(self) -> None:
        """Start the process. Returns when the bookie serves."""
        self.launch()
        self.wait_ready()

    @property
    def log(self) -> str:
        return self._process.log.read_text()

    @property
    def status(self) -> int | None:
        """The exit status; None: the process runs."""
        return self._process.status

    @property
    def address(self) -> BookieAddress:
        return BookieAddress(
            data=f"127.0.0.1:{self.ready['data_port']}", grpc=f"127.0.0.1:{self.ready['grpc_port']}"
        )

    @property
    def incarnation(self) -> str:
        return str(self.ready["incarnation"])

    def kill(self) -> None:
        self._process.kill()

    def terminate(self) -> int:
        self._process.signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Wait for the end of the process. Returns its exit status."""
        return self._process.wait()

    def end(self) -> None:
        """Kill the process if it runs."""
        self._process.kill()

    def _command(self, program: Path) -> list[str]:
        configuration, metadata = self.directory / "bookie.toml", self.directory / "metadata"
        return [sys.executable, str(program), str(configuration), str(metadata)]


def channel_to(bookie: BookieProcess) -> aio.Channel:
    """For the calls over gRPC; fakes/data_port.py is for adds and reads."""
    return open_channel(bookie.address.grpc)


def open_ledger(ledger: LedgerId, member: Member) -> LedgerMetadata:
    from magnetar.metadata.model import EntryId, LedgerMetadata, LedgerState, Segment

    return LedgerMetadata(
        ledger=ledger,
        state=LedgerState.OPEN,
        ensemble_size=1,
        write_quorum=1,
        ack_quorum=1,
        segments=(Segment(EntryId(0), (member,)),),
        master_key=0,
        creator_token=0,
        created_ms=0,
    )


async def serve(config_file: Path, metadata_dir: Path, stop: asyncio.Event) -> None:
    from magnetar.bookie.config import BookieConfig
    from magnetar.bookie.main import Ready, serve_bookie
    from magnetar.bookie.storage.format import decode_identity
    from magnetar.metadata import paths
    from magnetar.metadata.codec import decode_bookie_cookie, encode_ledger
    from magnetar.metadata.embedded import EmbeddedStore
    from magnetar.metadata.model import BookieId, LedgerId, Member
    from magnetar.metadata.store import Versioned
    from magnetar.runtime.config import load_config

    config = load_config(BookieConfig, file=config_file, flags={})
    bookie = BookieId(config.id)

    class Welcoming(EmbeddedStore):
        """Every ledger exists, is open, and has this bookie as its only member."""

        async def get(self, path: str) -> Versioned | None:
            stored = await super().get(path)
            if stored is not None or not path.startswith(paths.LEDGERS):
                return stored
            cookie = await super().get(paths.bookie_cookie(bookie))
            assert cookie is not None
            member = Member(bookie, decode_bookie_cookie(cookie.value).incarnation)
            ledger = LedgerId(int(path.rpartition("/")[2]))
            return Versioned(encode_ledger(open_ledger(ledger, member)), 0)

    store = await Welcoming.open(metadata_dir)

    def on_ready(ready: Ready) -> None:
        faulthandler.cancel_dump_traceback_later()
        identity = decode_identity((config.data_dir / "identity").read_bytes())
        facts = {
            "data_port": ready.data_port,
            "grpc_port": ready.grpc_port,
            "http_port": ready.http_port,
            "incarnation": identity.incarnation,
            "boot_epoch": identity.boot_epoch,
            "pid": os.getpid(),
        }
        new = config_file.with_name(f"{READY}.new")
        new.write_text(json.dumps(facts))
        os.replace(new, config_file.with_name(READY))

    try:
        await serve_bookie(config, stop, store=store, on_ready=on_ready)
    finally:
        await store.close()


if __name__ == "__main__":
    # A start that hangs logs its stack, even if it blocks the loop.
    faulthandler.dump_traceback_later(LATE_S)
    from magnetar.runtime.log import configure_logging
    from magnetar.runtime.process import run_process

    configure_logging()
    sys.exit(run_process(lambda stop: serve(Path(sys.argv[1]), Path(sys.argv[2]), stop)))

"""A bookie as a process of its own, on metadata of its own, for tests that kill it.

Run as a program it serves: `python bookie_process.py CONFIG METADATA_DIR`, and prints one JSON line
when it is ready.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from magnetar.metadata.model import BookieAddress
from magnetar.runtime.grpc_frames import open_channel

if TYPE_CHECKING:
    import asyncio

    from grpc import aio

    from magnetar.metadata.model import LedgerId, LedgerMetadata, Member

READY_S = 60.0
LATE_S = 25.0


def _with_tests() -> str:
    """The path of modules, with `tests` first: a program need not lie beside what it imports."""
    tests = str(Path(__file__).parent.parent)
    return os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))


class BookieProcess:
    """Start it, talk to it, kill it, start it again."""

    def __init__(self, directory: Path, **settings: object) -> None:
        self.directory = directory
        self.program = Path(__file__)
        self.data_dir = Path(str(settings.get("data_dir", directory / "data")))
        self.ready: dict[str, Any] = {}
        self._process: subprocess.Popen[str] | None = None
        self._log = directory / "log"
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

    def launch(self) -> None:
        with open(self._log, "a") as log:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    str(self.program),
                    str(self.directory / "bookie.toml"),
                    str(self.directory / "metadata"),
                ],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"PYTHONPATH": _with_tests()},
            )

    def start(self) -> None:
        """Returns when it serves."""
        self.launch()
        assert self._process is not None
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, self.log
        self.ready = json.loads(line)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def status(self) -> int | None:
        """None: it runs."""
        assert self._process is not None
        return self._process.poll()

    @property
    def address(self) -> BookieAddress:
        return BookieAddress(
            data=f"127.0.0.1:{self.ready['data_port']}", grpc=f"127.0.0.1:{self.ready['grpc_port']}"
        )

    @property
    def incarnation(self) -> str:
        return str(self.ready["incarnation"])

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self.wait()

    def terminate(self) -> int:
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> int:
        """Its exit status."""
        assert self._process is not None
        status = self._process.wait(READY_S)
        assert self._process.stdout is not None
        self._process.stdout.close()
        return status

    def end(self) -> None:
        """Whatever state it is in."""
        if self._process is not None and self._process.poll() is None:
            self.kill()


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
    from magnetar.metadata.model import BookieId, Member
    from magnetar.metadata.store import Versioned
    from magnetar.runtime.config import load_config

    config = load_config(BookieConfig, file=config_file, flags={})
    bookie = BookieId(config.id)

    class Welcoming(EmbeddedStore):
        """Whatever ledger is asked for is open, and this bookie alone is to take it."""

        async def get(self, path: str) -> Versioned | None:
            stored = await super().get(path)
            if stored is not None or not path.startswith(paths.LEDGERS):
                return stored
            cookie = await super().get(paths.bookie_cookie(bookie))
            assert cookie is not None
            member = Member(bookie, decode_bookie_cookie(cookie.value).incarnation)
            return Versioned(encode_ledger(open_ledger(paths.ledger_of(path), member)), 0)

    store = await Welcoming.open(metadata_dir)

    def on_ready(ready: Ready) -> None:
        faulthandler.cancel_dump_traceback_later()
        identity = decode_identity((config.data_dir / "identity").read_bytes())
        print(
            json.dumps(
                {
                    "data_port": ready.data_port,
                    "grpc_port": ready.grpc_port,
                    "http_port": ready.http_port,
                    "incarnation": identity.incarnation,
                    "boot_epoch": identity.boot_epoch,
                    "pid": os.getpid(),
                }
            ),
            flush=True,
        )

    try:
        await serve_bookie(config, stop, store=store, on_ready=on_ready)
    finally:
        await store.close()


if __name__ == "__main__":
    # A start that stands still says in its log where, also if it blocks the loop.
    faulthandler.dump_traceback_later(LATE_S)
    from magnetar.runtime.log import configure_logging
    from magnetar.runtime.process import run_process

    configure_logging()
    sys.exit(run_process(lambda stop: serve(Path(sys.argv[1]), Path(sys.argv[2]), stop)))

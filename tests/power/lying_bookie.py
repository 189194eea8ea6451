"""A bookie whose syncs do nothing, as on a disk that lies: the negative control of power cuts."""

from __future__ import annotations

import sys
from pathlib import Path

from fakes.bookie_process import serve

from magnetar.bookie.storage.rocks import RocksStorage
from magnetar.bookie.storage.watermark import WatermarkFile
from magnetar.runtime.log import configure_logging
from magnetar.runtime.process import run_process


def forget_log(self: RocksStorage) -> None:
    return


def forget_watermark(self: WatermarkFile) -> None:
    return


if __name__ == "__main__":
    RocksStorage.sync = forget_log  # type: ignore[method-assign]
    WatermarkFile.sync = forget_watermark  # type: ignore[method-assign]
    configure_logging()
    sys.exit(run_process(lambda stop: serve(Path(sys.argv[1]), Path(sys.argv[2]), stop)))

"""For all tests: `support` can be imported from any depth (with importlib import mode pytest adds
no paths), logging is afterwards what it was before, whatever a command made of it, Ctrl-C works,
and Hypothesis plays the same examples each time, however long one takes."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from magnetar.spark.session import fork_plainly

if TYPE_CHECKING:
    from collections.abc import Iterator

    from xdist.remote import Producer

sys.path.insert(0, str(Path(__file__).parent))
pytest_plugins = ["async_plugin"]
fork_plainly()  # Spark is started from here, too

# Otherwise an example fails that takes 200 ms, as any may on a busy machine; and a change would be
# refused for what chance found elsewhere. `--hypothesis-profile default` looks for new examples.
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _interrupts() -> None:
    """Ctrl-C interrupts, also the processes that a test starts. A shell that runs the tests in the
    background has it ignored, which children inherit, and Spark puts a handler of its own there."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", "kazoo", "py4j", "magnetar.client")]
    before = [(logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:] = handlers
        logger.setLevel(level)
        logger.propagate = propagate


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first, so that the workers end together."""
    items.sort(key=lambda item: "unit" in item.path.parts)


class FilesTogether(LoadScopeScheduling):
    """Runs a file's tests in one worker, because they share servers; and all files that start
    Spark in one, because they share its session."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "spark" if file.startswith("tests/integration/test_spark") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesTogether:
    return FilesTogether(config, log)

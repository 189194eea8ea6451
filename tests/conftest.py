"""Set-up of all tests. Tests at any depth can import `support` (in importlib mode pytest adds no
paths). Each test restores the logging that a command changed, and Ctrl-C works. Hypothesis runs the
same examples each time, without a time limit for one example."""

from __future__ import annotations

import gc
import logging
import os
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
fork_plainly()  # some tests start Spark in this process
# Java compiles quickly instead of well, and collects garbage in one thread. The tests give Spark
# few rows: with these options, they need 40 % less CPU.
os.environ.setdefault("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# The profile "ci" has no time limit: Hypothesis's default of 200 ms fails on a busy machine. The
# profile also repeats the same examples, so that a new random example does not fail an unrelated
# change. `--hypothesis-profile default` draws new examples.
settings.load_profile("ci")


@pytest.fixture(autouse=True)
def _interrupts() -> None:
    """Make Ctrl-C interrupt the tests and the processes that they start.

    A shell that runs the tests in the background makes them and their child processes ignore
    SIGINT. Spark installs a handler of its own.
    """
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


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Measure CPU time without garbage collections: one walks all objects of the test process, and
    takes longer than the steps that are measured."""
    gc.disable()
    yield
    gc.enable()


def pytest_collection_finish() -> None:
    """Exclude modules and collected tests from garbage collections, which otherwise take a tenth of
    the CPU of the long tests in this process."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long files first, so that the workers end at about the same time."""
    items.sort(key=lambda item: "unit" in item.path.parts)


class FilesTogether(LoadScopeScheduling):
    """Runs the tests of a file in one worker, because they share servers, and all files that start
    Spark in one worker, because they share its session."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "spark" if file.startswith("tests/integration/test_spark") else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesTogether:
    return FilesTogether(config, log)

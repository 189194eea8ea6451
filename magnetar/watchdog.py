"""A watchdog: kills a server that stands still, so that the server is started again.

    python -m magnetar.watchdog --port HTTP_PORT [--silence 2] -- COMMAND [ARGUMENT...]

The watchdog runs COMMAND and asks http://127.0.0.1:HTTP_PORT/health every CHECK_S. When the server
has answered once and then answers nothing for `--silence` seconds, the watchdog sends it SIGKILL
and exits with the server's exit status. systemd or Docker then restarts the watchdog and the
server, by its own restart policy. An answer with a status other than 200 is an answer. The watchdog
passes SIGTERM, SIGINT and SIGHUP on to the server. After such a signal the watchdog does not kill
the server: a server that is shutting down does not answer, and may need some time.
`magnetar local-cluster --watchdog` watches all its servers in the same way.

Why the server is killed: other brokers replace a broker that stands still, and Magnetar's client
continues at them. Apache's client stays on its open connection until its keep-alive gives up after
30 to 60 s. The end of a process closes its connections at once.
"""

from __future__ import annotations

import argparse
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

CHECK_S: Final = 0.5
"""The time between two checks. Also the time limit for the connection of a check, and for its
answer. A check costs the server about 1 ms."""

STANDSTILL_S: Final = 4 * CHECK_S
"""The watchdog itself stood still if two checks are further apart than this time and than
`silence_s`. A check of a silent server and the pause before it take up to 3 * CHECK_S."""

SILENCE_S: Final = 2.0
KILLS_MAX: Final = 3
KILLS_PERIOD_S: Final = 600.0
"""After KILLS_MAX kills, the watchdog kills no more until this time has passed since the first of
them: another restart would not help. This limit is for `magnetar local-cluster`. `python -m
magnetar.watchdog` ends after one kill, and only the restart policy of systemd or Docker limits its
restarts."""


class Watchdog:
    """Decides when to kill one server: a machine. `now` is the time of any clock, in seconds.

    1. A server is killed only if it has answered since its start, and after that was silent for
       `silence_s` while the watchdog itself was running.
    2. There are at most KILLS_MAX kills in KILLS_PERIOD_S.
    """

    def __init__(self, silence_s: float = SILENCE_S) -> None:
        self._silence_s = silence_s
        self._answered_at: float | None = None  # None: it has not answered since its start
        self._checked_at: float | None = None
        self._kills: deque[float] = deque(maxlen=KILLS_MAX)

    @property
    def kills(self) -> int:
        """The number of kills, at most KILLS_MAX. Kills older than KILLS_PERIOD_S are included."""
        return len(self._kills)

    def on_ended(self) -> None:
        """Note that the server has ended, or was started again since the last check."""
        self._answered_at = None

    def on_check(self, now: float, *, answers: bool) -> bool:
        """Note the result of a check. Returns whether to kill the server."""
        pause_s_max = max(self._silence_s, STANDSTILL_S)
        stood_still = self._checked_at is not None and now - self._checked_at > pause_s_max
        self._checked_at = now
        if answers or (stood_still and self._answered_at is not None):
            self._answered_at = now
            return False
        if self._answered_at is None or now - self._answered_at < self._silence_s:
            return False
        full = len(self._kills) == KILLS_MAX and now - self._kills[0] < KILLS_PERIOD_S
        self._answered_at = None
        if full:
            return False
        self._kills.append(now)
        return True


def answers(port: int, timeout_s: float = CHECK_S) -> bool:
    """Return whether the server on loopback answers GET /health, with any status. Blocks for at
    most twice `timeout_s`."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            return bool(connection.recv(1))
    except OSError:
        return False


def run(port: int, silence_s: float, command: Sequence[str]) -> int:
    """Run the command under the watchdog. Returns its exit status as a shell does: 128 + N after
    signal N."""
    # Without a session of its own, the server would get Ctrl-C twice, from the terminal and from
    # the watchdog, and a second signal ends a server at once.
    process = subprocess.Popen(command, start_new_session=True)
    is_stopping = False

    def pass_on(number: int, _: object) -> None:
        nonlocal is_stopping
        is_stopping = True
        process.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, pass_on)
    watchdog = Watchdog(silence_s)
    while True:
        try:
            status = process.wait(CHECK_S)
        except subprocess.TimeoutExpired:
            is_to_kill = watchdog.on_check(time.monotonic(), answers=answers(port))
            if is_to_kill and not is_stopping:
                sys.stderr.write(f"watchdog: /health was silent for {silence_s:g} s; SIGKILL\n")
                process.kill()
        else:
            return 128 - status if status < 0 else status


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m magnetar.watchdog")
    parser.add_argument("--port", type=int, required=True, help="the server's HTTP port")
    parser.add_argument("--silence", type=float, default=SILENCE_S, help="seconds without answer")
    parser.add_argument("command", nargs="+", help="the server")
    options = parser.parse_args(arguments)
    return run(options.port, options.silence, options.command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

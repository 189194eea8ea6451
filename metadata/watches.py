"""The registered watches of a store, by path. Used on the loop's thread only."""

from collections.abc import Callable, Iterable

from magnetar.metadata.store import SessionState

Callback = Callable[[], None]
SessionCallback = Callable[[SessionState], None]


class Watches:
    """Callbacks by path, and callbacks for the session. Each registration has its own number, so
    that the same function may be registered twice and be removed once."""

    def __init__(self) -> None:
        self._by_path: dict[str, dict[int, Callback]] = {}
        self._session: dict[int, SessionCallback] = {}
        self._number = 0

    @property
    def paths(self) -> list[str]:
        return list(self._by_path)

    def __contains__(self, path: str) -> bool:
        return path in self._by_path

    def add(self, path: str, callback: Callback) -> Callable[[], None]:
        number = self._next_number()
        self._by_path.setdefault(path, {})[number] = callback

        def remove() -> None:
            registered = self._by_path.get(path, {})
            registered.pop(number, None)
            if not registered:
                self._by_path.pop(path, None)

        return remove

    def add_session(self, callback: SessionCallback) -> Callable[[], None]:
        number = self._next_number()
        self._session[number] = callback

        def remove() -> None:
            self._session.pop(number, None)

        return remove

    def fire(self, paths: Iterable[str]) -> None:
        """Call the callbacks that are registered now, in order of path and registration. A callback
        may add and remove callbacks; a removed callback is not called any more. Raises the first
        error of a callback, after all were called, so that no other watch is lost."""
        failure: Exception | None = None
        for path in sorted(paths):
            for number, callback in list(self._by_path.get(path, {}).items()):
                if number in self._by_path.get(path, {}):
                    try:
                        callback()
                    except Exception as error:  # raised below
                        failure = failure or error
        if failure is not None:
            raise failure

    def fire_session(self, state: SessionState) -> None:
        for number, callback in list(self._session.items()):
            if number in self._session:
                callback(state)

    def clear(self) -> None:
        self._by_path.clear()
        self._session.clear()

    def _next_number(self) -> int:
        self._number += 1
        return self._number

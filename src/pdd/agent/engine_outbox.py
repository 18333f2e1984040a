"""What is said to one engine: answers to its jobs, and how the store's keys change."""

import logging
import threading
from collections import deque
from typing import Final

from pdd.core.errors import TransportError
from pdd.transport.unix import UnixStream
from pdd.wire import local

_log = logging.getLogger(__name__)
_KEYS_PAUSE_S: Final = 0.005
"""Key changes nobody waits for are gathered for so long: the engine has no use for one message per chunk."""


class EngineOutbox:
    """Messages to one engine, written by a thread; key changes are merged until they are written."""

    def __init__(self, stream: UnixStream) -> None:
        self._stream = stream
        self._changed = threading.Condition()
        self._messages: deque[local.Message] = deque()
        self._keys: dict[bytes, bool] = {}
        self._version = 0
        self._written_version = 0
        self._is_urgent = False
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="pdd-engine-out", daemon=True)
        self._thread.start()

    def put(self, message: local.Message) -> None:
        """The message will be written after all put before it."""
        with self._changed:
            self._messages.append(message)
            self._is_urgent = True
            self._changed.notify_all()

    def key_changed(self, key: bytes, *, is_present: bool) -> None:
        """The engine will be told whether the store has the key."""
        with self._changed:
            if self._is_closed:
                return  # the next engine gets a snapshot
            if not self._keys:
                self._changed.notify_all()
            self._keys[key] = is_present
            self._version += 1

    def flush(self, timeout_s: float) -> bool:
        """Whether the socket has taken every key change made before the call."""
        with self._changed:
            version = self._version
            self._is_urgent = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: self._is_closed or self._written_version >= version, timeout_s
            )

    def close(self) -> None:
        """Nothing more is written."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while taken := self._take():
                version, messages = taken
                self._stream.send([local.encode(message) for message in messages])
                with self._changed:
                    self._written_version = version
                    self._changed.notify_all()
        except TransportError as error:
            _log.debug("engine socket: %s", error)
        finally:
            self.close()

    def _take(self) -> tuple[int, list[local.Message]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or bool(self._messages) or bool(self._keys))
            self._changed.wait_for(lambda: self._is_closed or self._is_urgent, _KEYS_PAUSE_S)
            self._is_urgent = False
            if self._is_closed:
                return None
            messages = list(self._messages)
            self._messages.clear()
            if self._keys:
                added = [key for key, is_present in self._keys.items() if is_present]
                removed = [key for key, is_present in self._keys.items() if not is_present]
                # After a Welcome, before answers: a loaded key is never older news than its answer.
                at = 1 if messages and isinstance(messages[0], local.Welcome) else 0
                messages.insert(at, local.KeysChanged(added=added, removed=removed))
                self._keys = {}
            return self._version, messages

"""Every error PDD raises on purpose, as one tree.

The class says who has to act; the message names what and where::

    PddError
    ├── ConfigurationError        the operator fixes a file or a flag and restarts
    │   └── UnsupportedModelError the model's KV cache cannot be moved, as it is or as it is served
    ├── ProtocolError
    │   ├── LocalProtocolError    our own bug: we tried to send what the state forbids
    │   └── RemoteProtocolError   the peer sent what the protocol forbids; the connection is dropped
    ├── TransportError
    │   ├── ConnectError          nobody answered at the address
    │   ├── UntrustedPeerError    one end could not prove to the other who it is
    │   ├── IncompatiblePeerError the peer's KV cache means something else; the differing fields are named
    │   ├── DeadlineError         the peer answered too late
    │   └── ConnectionLostError   the peer went away in the middle
    ├── CapacityError
    │   ├── NoEndpointError       no engine can serve this request now
    │   └── OverloadedError       engines exist, but none has room
    ├── EngineError               an engine answered a request with an error of its own
    ├── LaunchError               a program died, or was not ready in time; carries its last log lines
    └── InvariantError            a state that must not exist; carries what led to it

OS, ssl and HTTP client errors are translated where the I/O happens, never above it. The router maps
classes to HTTP status in one table (``pdd.router.api.errors``).
"""

from collections.abc import Sequence


class PddError(Exception):
    """Base of every error PDD raises on purpose."""


EXIT_CONFIGURATION = 2
"""Status of a program that ends with a ``ConfigurationError``, as of any that does not take its flags: it
would say the same if it were started again."""


class ConfigurationError(PddError):
    """A file, flag or environment variable has to be changed by a person."""


class UnsupportedModelError(ConfigurationError):
    """The KV cache of the model, as it is or as it is served, cannot be moved to another engine."""


class ProtocolError(PddError):
    """The rules of the wire protocol were broken."""


class LocalProtocolError(ProtocolError):
    """This side tried to do what the protocol state forbids: a bug here."""


class RemoteProtocolError(ProtocolError):
    """The peer sent what the protocol forbids; its connection cannot be used any more."""


class TransportError(PddError):
    """The path to a peer does not work."""


class ConnectError(TransportError):
    """No connection could be made to the address."""


class UntrustedPeerError(TransportError):
    """One end of a connection could not prove to the other who it is.

    Args:
        reason: One of a few words that metrics count by, e.g. ``certificate`` or ``not_tls``.
        message: What exactly was wrong, and with whom.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class IncompatiblePeerError(TransportError):
    """The peer's KV bytes do not mean what ours mean.

    Args:
        fields: Names of the fingerprint fields that differ, each as ``name: ours != theirs``.
    """

    def __init__(self, fields: Sequence[str]) -> None:
        super().__init__("incompatible peer: " + "; ".join(fields))
        self.fields = tuple(fields)


class DeadlineError(TransportError):
    """The peer did not answer in time."""


class ConnectionLostError(TransportError):
    """The connection ended before the exchange did."""


class CapacityError(PddError):
    """The request is fine, but cannot be served now."""


class NoEndpointError(CapacityError):
    """No engine of the needed role is reachable."""


class OverloadedError(CapacityError):
    """Engines are reachable, but none has room.

    Args:
        message: How much there is to do.
        retry_after_s: When it is worth to come back, if that is known.
    """

    def __init__(self, message: str, *, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineError(PddError):
    """An engine answered with an error of its own.

    Args:
        status: HTTP status of the engine's answer.
        message: The engine's own words.
        kind: The engine's error type, for example ``BadRequestError``.
        param: The request field the engine complains about, if it named one.
    """

    def __init__(self, status: int, message: str, *, kind: str = "", param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param


class LaunchError(PddError):
    """A program this one started did not become ready, or could not be kept running.

    Args:
        name: The program, as in messages and log files.
        problem: What happened to it, as the end of a sentence that begins with its name.
        log_lines: The last lines it wrote.
        log_path: Where the rest is.
    """

    def __init__(self, name: str, problem: str, *, log_lines: Sequence[str] = (), log_path: str = "") -> None:
        text = f"{name} {problem}"
        if log_lines:
            text += f"; its last lines (all of them in {log_path}):\n" + "\n".join(
                f"  {line}" for line in log_lines
            )
        super().__init__(text)
        self.name = name
        self.log_lines = tuple(log_lines)


class InvariantError(PddError):
    """A state that must not exist was reached: a bug here."""

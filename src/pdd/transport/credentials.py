"""The certificate, key and CA of one engine, and the TLS contexts made of them.

Files are looked at again before each new connection, so that a renewed certificate is used without a
restart. Files that are broken at that moment (half written, a key that does not fit) change nothing.
"""

import logging
import ssl
import threading
from dataclasses import dataclass
from pathlib import Path

from pdd.core.errors import ConfigurationError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Where an engine's own certificate and key are, and the CA that all engines' certificates come from."""

    cert: Path
    key: Path
    ca: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsContexts:
    """One context per side of a connection; both demand a certificate of the CA."""

    server: ssl.SSLContext
    client: ssl.SSLContext


Signature = tuple[tuple[int, int, int], ...]


class Credentials:
    """Gives out contexts that are as new as the files.

    Raises:
        ConfigurationError: Naming the file that cannot be used.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._signature = _signature(files)
        self._rejected: Signature | None = None
        self._contexts = load_contexts(files)

    def contexts(self) -> TlsContexts:
        """Contexts for a new connection."""
        with self._lock:
            try:
                signature = _signature(self._files)
                if signature not in (self._signature, self._rejected):
                    self._rejected = signature
                    self._contexts = load_contexts(self._files)
                    self._signature = signature
                    _log.info("new TLS files are used from now on: %s", self._files.cert)
            except ConfigurationError as error:
                _log.warning("new TLS files cannot be used, the old ones still are: %s", error)
            return self._contexts


def load_contexts(files: TlsFiles) -> TlsContexts:
    """Contexts of the files as they are now.

    Raises:
        ConfigurationError: Naming the file that cannot be used.
    """
    return TlsContexts(
        server=_context(files, ssl.PROTOCOL_TLS_SERVER), client=_context(files, ssl.PROTOCOL_TLS_CLIENT)
    )


def _context(files: TlsFiles, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # The name to check is an engine's id, not the host that was dialled: an address may lead through NAT.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.num_tickets = 0  # connections are few and stay; a resumed one would not see a new CA
    try:
        context.load_cert_chain(files.cert, files.key, password=_refuse_password)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        raise ConfigurationError(
            f"cannot use the certificate {files.cert} with the key {files.key}: {_words(error)}"
        ) from error
    try:
        context.load_verify_locations(cafile=files.ca)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot use the CA {files.ca}: {_words(error)}") from error
    return context


def _refuse_password() -> str:
    raise ValueError("the key is encrypted; an agent has nobody to ask for the password")


def _words(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _signature(files: TlsFiles) -> Signature:
    """Changes whenever a file does.

    Raises:
        ConfigurationError: Naming the file that is not there.
    """
    found: list[tuple[int, int, int]] = []
    for path in (files.cert, files.key, files.ca):
        try:
            status = path.stat()
        except OSError as error:
            raise ConfigurationError(f"cannot read {path}: {error.strerror}") from error
        found.append((status.st_mtime_ns, status.st_size, status.st_ino))
    return tuple(found)

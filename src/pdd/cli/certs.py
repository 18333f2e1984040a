"""``pdd certs``: a private CA and one certificate per engine."""

import argparse
import datetime
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pdd.cli.options import read_config
from pdd.core.errors import ConfigurationError
from pdd.transport.issue import KeyPair, issue_ca, issue_certificate, read_key_pair, write_key_pair

if TYPE_CHECKING:
    from pdd.cli.options import Subparsers

_CA_DAYS: Final = 3650
_DEFAULT_DAYS: Final = 90
_SKEW: Final = datetime.timedelta(minutes=5)
"""Clocks of two sites may differ by this; a certificate is valid as much earlier."""
_ENGINE_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


def add_parser(commands: "Subparsers") -> None:
    """``pdd certs`` exists."""
    parser = commands.add_parser(
        "certs",
        help="make a private CA and a certificate per engine",
        description=(
            "Make what TLS between agents needs. The CA is made once and kept: run it again with the same "
            "--out to renew certificates or to add engines; agents use new files without a restart. Each "
            "engine's host gets ca.crt and its own two files. ca.key goes to no engine."
        ),
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for all files")
    parser.add_argument(
        "--days", type=int, default=_DEFAULT_DAYS, metavar="N", help=f"validity, default {_DEFAULT_DAYS}"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="take the engines of this pdd.toml")
    parser.add_argument("engines", nargs="*", metavar="ENGINE", help="ids of engines")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    engines: list[str] = list(arguments.engines)
    if arguments.config is not None:
        engines += [engine.id for engine in read_config(arguments).engines]
    for path in make_certificates(arguments.out, engines, days=arguments.days):
        print(path)
    return 0


def make_certificates(folder: Path, engine_ids: Sequence[str], *, days: int) -> list[Path]:
    """Each engine has a new certificate in the folder, from the CA there; one is made if there is none.

    Returns:
        The certificates that were written.

    Raises:
        ConfigurationError: If an id cannot be one, or a file cannot be read or written.
    """
    if not engine_ids:
        raise ConfigurationError("name at least one engine, or a file with --config")
    if days <= 0:
        raise ConfigurationError(f"--days must be at least 1, not {days}")
    for engine_id in engine_ids:
        if not _ENGINE_ID.fullmatch(engine_id):
            raise ConfigurationError(
                f"{engine_id!r} is no engine id: letters a-z, digits and hyphens, up to 63"
            )
    now = datetime.datetime.now(datetime.UTC)
    written: list[Path] = []
    ca = _find_or_make_ca(folder, now, written)
    not_after = min(now + datetime.timedelta(days=days), ca.certificate.not_valid_after_utc)
    for engine_id in dict.fromkeys(engine_ids):
        pair = issue_certificate(ca, [engine_id], not_before=now - _SKEW, not_after=not_after)
        cert = folder / f"{engine_id}.crt"
        write_key_pair(pair, cert, folder / f"{engine_id}.key")
        written.append(cert)
    return written


def _find_or_make_ca(folder: Path, now: datetime.datetime, written: list[Path]) -> KeyPair:
    cert, key = folder / "ca.crt", folder / "ca.key"
    if cert.exists() or key.exists():
        ca = read_key_pair(cert, key)
        if ca.certificate.not_valid_after_utc <= now:
            raise ConfigurationError(
                f"the CA {cert} has expired; move it away and make all certificates anew"
            )
        return ca
    ca = issue_ca(not_before=now - _SKEW, not_after=now + datetime.timedelta(days=_CA_DAYS))
    write_key_pair(ca, cert, key)
    written.append(cert)
    return ca

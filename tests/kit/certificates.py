"""Certificates for tests: a CA a folder, with what may be wrong about them."""

import datetime
from pathlib import Path

from pdd.transport.credentials import TlsFiles
from pdd.transport.issue import issue_ca, issue_certificate, write_key_pair

NOW = datetime.datetime.now(datetime.UTC)
DAY = datetime.timedelta(days=1)


class Pki:
    """A CA and the engine certificates it gave out, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._ca = issue_ca(not_before=NOW - DAY, not_after=NOW + DAY)
        write_key_pair(self._ca, folder / "ca.crt", folder / "ca.key")

    def files(self, *names: str, expired: bool = False, as_file: str | None = None) -> TlsFiles:
        """A certificate for these ids, written now; ``as_file`` names the files, default the first id."""
        not_after = NOW - DAY / 2 if expired else NOW + DAY
        pair = issue_certificate(self._ca, names, not_before=NOW - DAY, not_after=not_after)
        stem = as_file or names[0]
        files = TlsFiles(
            cert=self.folder / f"{stem}.crt", key=self.folder / f"{stem}.key", ca=self.folder / "ca.crt"
        )
        write_key_pair(pair, files.cert, files.key)
        return files

"""``pdd certs``: what it writes, and what it keeps."""

import contextlib
import ssl
from pathlib import Path

import pytest

from pdd.cli.certs import make_certificates
from pdd.cli.main import main
from pdd.core.errors import ConfigurationError
from pdd.transport.credentials import TlsFiles, load_contexts
from pdd.transport.issue import is_issued_by, names_of, read_certificate


def files(folder: Path, engine_id: str) -> TlsFiles:
    return TlsFiles(cert=folder / f"{engine_id}.crt", key=folder / f"{engine_id}.key", ca=folder / "ca.crt")


def test_a_ca_and_a_certificate_for_each_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certs", "--out", str(tmp_path), "--days", "3", "p0", "md0"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / f"{n}.crt") for n in ("ca", "p0", "md0")]
    ca = read_certificate(tmp_path / "ca.crt")
    for engine_id in ("p0", "md0"):
        load_contexts(files(tmp_path, engine_id))
        certificate = read_certificate(tmp_path / f"{engine_id}.crt")
        assert names_of(certificate) == (engine_id,)
        assert is_issued_by(certificate, ca)
        assert (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days == 3
    for key in ("ca.key", "p0.key"):
        assert (tmp_path / key).stat().st_mode & 0o777 == 0o600
    assert {path.name for path in tmp_path.iterdir()} == {
        f"{stem}.{end}" for stem in ("ca", "p0", "md0") for end in ("crt", "key")
    }


def test_certificates_pass_strict_verification(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["p0", "md0"], days=1)
    server, client = (load_contexts(files(tmp_path, i)) for i in ("md0", "p0"))
    for context in (server.server, client.client):
        context.verify_flags |= ssl.VERIFY_X509_STRICT
    ends = [ssl.MemoryBIO() for _ in range(4)]
    near = client.client.wrap_bio(ends[0], ends[1], server_hostname="md0")
    far = server.server.wrap_bio(ends[2], ends[3], server_side=True)
    for _ in range(3):
        for side, out, into in ((near, ends[1], ends[2]), (far, ends[3], ends[0])):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
            into.write(out.read())
    assert near.version() == far.version() == "TLSv1.3"


def test_the_ca_is_kept_when_certificates_are_renewed(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["p0"], days=1)
    ca, old = (tmp_path / name for name in ("ca.crt", "p0.crt"))
    before = ca.read_bytes(), old.read_bytes()
    assert make_certificates(tmp_path, ["p0", "md0"], days=1) == [tmp_path / "p0.crt", tmp_path / "md0.crt"]
    assert ca.read_bytes() == before[0]
    assert old.read_bytes() != before[1]


@pytest.mark.parametrize(
    ("engine_ids", "days", "words"),
    [
        ([], 1, "at least one engine"),
        (["../x"], 1, "no engine id"),
        (["P0"], 1, "no engine id"),
        (["p0"], 0, "--days"),
    ],
)
def test_what_cannot_be_done_is_said(tmp_path: Path, engine_ids: list[str], days: int, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make_certificates(tmp_path, engine_ids, days=days)
    assert list(tmp_path.iterdir()) == []


def test_half_a_ca_is_not_replaced(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["p0"], days=1)
    (tmp_path / "ca.key").unlink()
    with pytest.raises(ConfigurationError, match=r"ca\.key"):
        make_certificates(tmp_path, ["p0"], days=1)


def test_an_engine_without_certificate_in_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ConfigurationError, match="cannot"):
        make_certificates(blocked / "certs", ["p0"], days=1)

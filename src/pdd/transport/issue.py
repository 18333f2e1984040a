"""Makes a private CA and one certificate per engine, as ``pdd certs`` writes them.

Everything a mutual TLS between agents needs and nothing more: P-256 keys, one CA without intermediates,
an engine's id as the DNS name of its certificate, valid for both sides of a connection.
"""

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from pdd.core.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyPair:
    """A certificate and the private key it belongs to."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def issue_ca(*, not_before: datetime.datetime, not_after: datetime.datetime) -> KeyPair:
    """A new CA, valid for that time, that may sign engines' certificates and nothing below them."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "PDD private CA")])
    builder = (
        _builder(name, name, key, not_before=not_before, not_after=not_after)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(is_ca=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    return KeyPair(certificate=builder.sign(key, hashes.SHA256()), key=key)


def issue_certificate(
    ca: KeyPair, engine_ids: Sequence[str], *, not_before: datetime.datetime, not_after: datetime.datetime
) -> KeyPair:
    """A certificate of the CA that speaks for these engines, usually one."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, engine_ids[0])])
    issuer = ca.certificate.subject
    builder = (
        _builder(subject, issuer, key, not_before=not_before, not_after=not_after)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(is_ca=False), critical=True)
        .add_extension(
            x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
            critical=False,
        )
        .add_extension(
            x509.SubjectAlternativeName([x509.DNSName(name) for name in engine_ids]), critical=False
        )
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key()), critical=False
        )
    )
    return KeyPair(certificate=builder.sign(ca.key, hashes.SHA256()), key=key)


def write_key_pair(pair: KeyPair, cert: Path, key: Path) -> None:
    """Both files are there, each replaced as a whole, and only the owner can read the key."""
    private = pair.key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    _replace(key, private, mode=0o600)
    _replace(cert, pair.certificate.public_bytes(serialization.Encoding.PEM), mode=0o644)


def read_key_pair(cert: Path, key: Path) -> KeyPair:
    """What ``write_key_pair`` wrote.

    Raises:
        ConfigurationError: Naming the file that cannot be used.
    """
    certificate = read_certificate(cert)
    try:
        private = serialization.load_pem_private_key(key.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"cannot use the key {key}: {error}") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"the key {key} is not one that pdd certs wrote")
    return KeyPair(certificate=certificate, key=private)


def read_certificate(path: Path) -> x509.Certificate:
    """The first certificate in the file.

    Raises:
        ConfigurationError: If there is none.
    """
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a PEM certificate"
        raise ConfigurationError(f"cannot use the certificate {path}: {reason}") from error


def names_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """The engine ids a certificate speaks for."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(names.get_values_for_type(x509.DNSName))


def is_issued_by(certificate: x509.Certificate, ca: x509.Certificate) -> bool:
    """Whether the CA's key signed the certificate."""
    try:
        certificate.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    *,
    not_before: datetime.datetime,
    not_after: datetime.datetime,
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(not_after)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, is_ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_ca,
        key_cert_sign=is_ca,
        crl_sign=is_ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _replace(path: Path, data: bytes, *, mode: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
        part.replace(path)
    except OSError as error:
        raise ConfigurationError(f"cannot write {path}: {error.strerror}") from error

"""Keys of jobs, their files, and the credentials that follow from them."""

import builtins
import hashlib
import hmac
import os
import ssl
import stat
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.pretty import pretty_repr

from lockstep.errors import ConfigError, UnfitError
from lockstep.protocol.credentials import Credentials
from lockstep.transport.keys import JobKey
from lockstep.transport.tls import describe_tls_error, job_context

NEW_YEAR = 4102444800
"""2100-01-01 00:00:00 UTC."""
KEY = JobKey(bytes(range(32)), NEW_YEAR)
LINE = (
    "lockstep-key 1 2100-01-01T00:00:00Z 000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f\n"
)


def hkdf(secret: bytes, info: bytes) -> bytes:
    """RFC 5869, for 32 bytes without a salt."""
    return hmac.digest(hmac.digest(bytes(32), secret, "sha256"), info + b"\x01", "sha256")


def before() -> float:
    return NEW_YEAR - 1.0


def after() -> float:
    return float(NEW_YEAR)


def client_context(credentials: Credentials) -> ssl.SSLContext:
    return job_context(credentials, accepted=False)


def server_context(credentials: Credentials) -> ssl.SSLContext:
    return job_context(credentials, accepted=True)


def shake_hands(client: Credentials | ssl.SSLContext, server: Credentials) -> tuple[str | None, str | None]:
    """Return why each end refuses the other; None if it does not."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = client_context(client) if isinstance(client, Credentials) else client
    ends = [
        context.wrap_bio(to_client, to_server),
        server_context(server).wrap_bio(to_server, to_client, server_side=True),
    ]
    why: list[str | None] = [None, None]
    # A certificate of the client is refused after its handshake is complete.
    for number in (0, 1, 0, 1, 0):
        if why[number] is not None:
            continue
        try:
            ends[number].do_handshake()
            if number == 0:
                ends[number].read()
        except ssl.SSLWantReadError:
            continue
        except ssl.SSLError as error:
            why[number] = describe_tls_error(error)
    if why == [None, None]:
        assert {end.version() for end in ends} == {"TLSv1.3"}
        assert all(end.getpeercert(binary_form=True) for end in ends)
    return why[0], why[1]


def test_a_key_file_is_one_line_that_others_cannot_read(tmp_path: Path) -> None:
    path = tmp_path / "job.key"
    previous = os.umask(0)
    try:
        KEY.write(path)
    finally:
        os.umask(previous)
    assert path.read_text() == LINE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert JobKey.read(path, before) == KEY
    path.chmod(0o400)
    assert JobKey.read(path, before) == KEY


def test_new_keys_differ_and_expire() -> None:
    one, other = JobKey.generate(2, before), JobKey.generate(2, before)
    assert one.expires == other.expires == NEW_YEAR - 1 + 2 * 24 * 3600
    assert one.secret != other.secret
    assert len(one.secret) == 32
    assert JobKey.parse(one.text, "stdin", before) == one


def test_a_key_file_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "job.key"
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(ConfigError, match="exists; give the name of a new file"):
        KEY.write(tmp_path / "link")
    KEY.write(path)
    with pytest.raises(ConfigError, match="exists; give the name of a new file"):
        JobKey.generate().write(path)
    assert path.read_text() == LINE
    with pytest.raises(ConfigError, match=r"nix/job.key cannot be written: No such file"):
        KEY.write(tmp_path / "nix" / "job.key")


def test_a_key_file_that_cannot_be_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fchmod", fails)
    with pytest.raises(ConfigError, match="No space left on device"):
        KEY.write(tmp_path / "job.key")
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make the file")
@pytest.mark.parametrize(("mode", "owner", "fits"), [(0o440, 0, True), (0o460, 0, False), (0o440, 9, False)])
def test_the_group_may_read_a_key_file_of_root(
    tmp_path: Path, mode: int, owner: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes lets the group of a pod's user read a Secret."""
    path = tmp_path / "job.key"
    JobKey.generate().write(path)
    os.chown(path, owner, 9)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"other users may use|belongs to another user"):
        JobKey.read(path)
    monkeypatch.setattr(os, "geteuid", lambda: 9)
    with nullcontext() if fits else pytest.raises(ConfigError, match="other users may use"):
        JobKey.read(path)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o777])
def test_a_key_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "job.key"
    KEY.write(path)
    path.chmod(mode)
    with pytest.raises(
        ConfigError, match=rf"other users may use .*\(mode {mode:o}\); run chmod 600 .*job.key"
    ):
        JobKey.read(path, before)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to other users")
def test_a_key_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.key"
    KEY.write(path)
    os.chown(path, 12345, -1)
    with pytest.raises(ConfigError, match=r"belongs to another user \(id 12345\)"):
        JobKey.read(path, before)


def test_what_is_no_key_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "large").touch(0o600)
    os.truncate(tmp_path / "large", 2**40)
    for name, why in [
        ("nix", "cannot be read: No such file"),
        ("pipe", "cannot be read: pipe is not a regular file"),
        (".", "cannot be read"),
        ("large", "does not contain a key; make one with lockstep key FILE"),
    ]:
        with pytest.raises(ConfigError, match=why):
            JobKey.read(tmp_path / name, before)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "does not contain a key"),
        (LINE.upper(), "does not contain a key"),
        (LINE + LINE, "does not contain a key"),
        (LINE[:-2], "does not contain a key"),
        ("lockstep-key 2 anything", "a key of format 2, which this version of Lockstep does not know"),
        (LINE.replace("01-01T", "02-30T"), "whose expiry, 2100-02-30T00:00:00Z, is not a time"),
    ],
)
def test_a_malformed_key_is_refused_without_showing_it(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as raised:
        JobKey.parse(text, "stdin", before)
    assert KEY.secret.hex()[:8] not in str(raised.value)


def test_an_expired_key_is_refused(tmp_path: Path) -> None:
    KEY.write(tmp_path / "job.key")
    with pytest.raises(ConfigError, match=r"job.key expired on 2100-01-01 00:00 UTC; make another"):
        JobKey.read(tmp_path / "job.key", after)


def test_all_holders_derive_the_same_authority() -> None:
    """Versions of Lockstep and of its libraries may differ between hosts, so these values never change."""
    one, other = KEY.mint(), KEY.mint()
    assert one.authority == other.authority
    assert one.greeting_key == other.greeting_key
    assert one.expires == other.expires == NEW_YEAR
    assert one.certificate != other.certificate
    assert one.private_key != other.private_key
    assert one.greeting_key == hkdf(KEY.secret, b"lockstep 1 greetings 4102444800")
    assert (
        hashlib.sha256(one.authority).hexdigest()
        == "359253d7fa945562867dce464754a8ff144a13559a98d4f36db4bdd54a0cde43"
    )


def test_another_expiry_makes_another_key() -> None:
    longer = JobKey(KEY.secret, KEY.expires + 1).mint()
    assert longer.greeting_key != KEY.mint().greeting_key
    assert shake_hands(longer, KEY.mint())[0] == "its key is not the key of this job"


def test_holders_of_the_key_trust_each_other() -> None:
    assert shake_hands(KEY.mint(), KEY.mint()) == (None, None)


def test_a_server_sends_nothing_of_its_own_after_the_handshake() -> None:
    """A client that only sends would never read it, and a connection closed with unread bytes is reset."""
    credentials = KEY.mint()
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context(credentials).wrap_bio(to_client, to_server)
    server = server_context(credentials).wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server):
        with pytest.raises(ssl.SSLWantReadError):
            end.do_handshake()
    client.do_handshake()
    server.do_handshake()
    client.write(b"all")
    assert server.read() == b"all"
    assert to_client.read() == b""


def test_strangers_do_not_trust_each_other_in_either_direction() -> None:
    job, stranger = JobKey.generate(), JobKey.generate()
    assert shake_hands(stranger.mint(), job.mint())[0] == "its key is not the key of this job"
    # A stranger that accepts every server is refused by the server.
    careless = msgspec.structs.replace(stranger.mint(), authority=job.mint().authority)
    assert shake_hands(careless, job.mint()) == (
        "its key is not the key of this job",
        "its key is not the key of this job",
    )
    assert shake_hands(job.mint(), careless)[0] == "its key is not the key of this job"


def test_expired_certificates_are_refused_in_both_directions() -> None:
    expired = JobKey(KEY.secret, int(time.time()) - 10).mint()
    assert "the key of the job has expired" in str(shake_hands(expired, expired)[0])

    # It accepts any server, and tells the server so.
    careless = client_context(expired)
    careless.verify_mode = ssl.CERT_NONE
    client, server = shake_hands(careless, expired)
    assert "the key of the job has expired" in str(server)
    assert "the key of the job has expired" in str(client)


def test_a_client_without_a_certificate_is_refused() -> None:
    anonymous = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anonymous.check_hostname = False
    anonymous.verify_mode = ssl.CERT_NONE
    assert shake_hands(anonymous, KEY.mint())[1] is not None


def test_a_certificate_of_the_job_cannot_certify_others() -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    member = KEY.mint()
    signer = serialization.load_pem_private_key(member.private_key, None)
    assert isinstance(signer, Ed25519PrivateKey)
    issuer = x509.load_pem_x509_certificate(member.certificate)
    own = Ed25519PrivateKey.generate()
    forged = (
        x509.CertificateBuilder()
        .subject_name(issuer.subject)
        .issuer_name(issuer.subject)
        .public_key(own.public_key())
        .serial_number(7)
        .not_valid_before(issuer.not_valid_before_utc)
        .not_valid_after(issuer.not_valid_after_utc)
        .sign(signer, None)
    )
    pem = serialization.Encoding.PEM
    forger = msgspec.structs.replace(
        member,
        certificate=forged.public_bytes(pem) + member.certificate,
        private_key=own.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )
    assert shake_hands(KEY.mint(), forger)[0] == "its key is not the key of this job"


def test_credentials_without_encryption_only_sign() -> None:
    plain = KEY.mint(encrypted=False)
    assert not plain.encrypted
    assert plain == Credentials(KEY.mint().greeting_key, NEW_YEAR)


def test_no_secret_is_shown() -> None:
    credentials = KEY.mint()
    secrets = [KEY.secret, credentials.greeting_key, credentials.private_key.splitlines()[1]]
    for value in (KEY, credentials, [credentials], {"x": KEY}):
        for text in (repr(value), str(value), f"{value}", pretty_repr(value)):
            for secret in secrets:
                assert secret.hex() not in text
                assert repr(secret)[2:-1] not in text


def test_credentials_travel_in_messages() -> None:
    credentials = KEY.mint()
    assert msgspec.json.decode(msgspec.json.encode(credentials), type=Credentials) == credentials


@pytest.mark.usefixtures("closes_descriptors")
def test_key_material_is_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    real = builtins.open

    def record(path: Any, *rest: Any, **named: Any) -> Any:
        opened.append(str(path))
        return real(path, *rest, **named)

    credentials = KEY.mint()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(builtins, "open", record)
    server_context(credentials)
    client_context(credentials)
    assert not opened
    assert not list(tmp_path.iterdir())


def test_without_cryptography_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UnfitError, match=r"pip install 'keras-lockstep\[hosts\]'"):
        KEY.mint()


def test_keys_load_no_cryptography_before_they_are_used() -> None:
    script = "import sys, lockstep.cli.main, lockstep.transport.keys; print('cryptography' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

"""The key of a job passes through Ray without being readable there."""

import pytest
from cryptography.exceptions import InvalidTag

from lockstep.ray.sealing import JobSecrets, Opener, seal
from lockstep.transport.keys import JobKey

KEY = JobKey.generate().text
SECRETS = JobSecrets(KEY, {"A_TOKEN": "unrecorded"})


def test_only_the_opener_reads_a_sealed_key() -> None:
    opener = Opener()
    sealed = seal(SECRETS, opener.public)
    assert opener.open(sealed) == SECRETS
    with pytest.raises(InvalidTag):
        Opener().open(sealed)


@pytest.mark.parametrize("at", [0, 40, -1])
def test_a_changed_key_is_not_opened(at: int) -> None:
    opener = Opener()
    sealed = seal(SECRETS, opener.public)
    data = bytearray(sealed.data)
    data[at] ^= 1
    with pytest.raises(InvalidTag):
        opener.open(sealed._replace(data=bytes(data)))


def test_nothing_that_passes_contains_the_key() -> None:
    opener = Opener()
    sealed = seal(SECRETS, opener.public)
    secret = KEY.split()[-1].encode()
    assert len(secret) > 20
    assert all(
        secret not in part and bytes.fromhex(secret.decode()) not in part for part in (*sealed, opener.public)
    )
    assert all(b"unrecorded" not in part for part in sealed)
    assert "unrecorded" not in repr(SECRETS)
    assert seal(SECRETS, opener.public) != sealed

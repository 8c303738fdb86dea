import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.batch import GlobalBatch
from lockstep.data.digest import SAMPLED_ROWS, digest_arrays, sample_rows


@given(st.integers(1, 100), st.integers(1, 12))
def test_shares_cover_the_batch_in_order_and_their_weights_sum_to_one(examples: int, replicas: int) -> None:
    rows = np.arange(examples)
    batch = GlobalBatch(examples, replicas, lambda wanted: rows[wanted], lambda: b"")
    shares = [batch.share(replica) for replica in range(replicas)]
    assert [row for share in shares for row in share.data()] == list(range(examples))
    assert [len(share.data()) for share in shares] == [share.examples for share in shares]
    assert sum(share.weight for share in shares) == 1 or abs(sum(s.weight for s in shares) - 1) < 1e-12


def test_a_share_reads_only_its_rows() -> None:
    read: list[slice] = []
    batch = GlobalBatch(10, 4, read.append, lambda: b"")
    share = batch.share(1)
    assert read == []
    share.data()
    assert read == [slice(3, 6)]


def test_the_digest_of_strings_depends_on_their_text() -> None:
    texts = np.array([b"ab", b"c"], object)
    assert digest_arrays([texts]) == digest_arrays([np.array(["ab", "c"], object)])
    assert digest_arrays([texts]) != digest_arrays([np.array([b"a", b"bc"], object)])
    assert digest_arrays([np.array(["ab"])]) != digest_arrays([np.array(["cd"])])


def test_digests_differ_by_values_shapes_and_dtypes() -> None:
    zeros = np.zeros((2, 3), np.float32)
    others = [zeros + 1, zeros.reshape(3, 2), zeros.astype(np.int32), zeros[:1]]
    digests = {digest_arrays([array]) for array in [zeros, *others]}
    assert len(digests) == 5
    assert digest_arrays([zeros.copy()]) == digest_arrays([zeros])
    assert digest_arrays([np.asfortranarray(zeros)]) == digest_arrays([zeros])


@given(st.integers(1, 10_000))
def test_sampled_rows_are_limited_and_include_the_first_and_the_last(count: int) -> None:
    rows = sample_rows(count)
    assert rows[0] == 0
    assert rows[-1] == count - 1
    assert len(rows) <= SAMPLED_ROWS

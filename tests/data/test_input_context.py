import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.input_context import InputContext


@given(st.integers(1, 1000), st.integers(1, 64))
def test_batch_sizes_per_replica_add_up_or_raise(batch: int, replicas: int) -> None:
    context = InputContext(replicas, replicas - 1, replicas)
    if batch % replicas:
        with pytest.raises(ValueError, match=f"{batch} examples .* evenly over {replicas} replicas"):
            context.get_per_replica_batch_size(batch)
    else:
        assert context.get_per_replica_batch_size(batch) * replicas == batch


def test_a_context_has_one_pipeline_by_default() -> None:
    assert InputContext() == InputContext(1, 0, 1)
    assert repr(InputContext(3, 1, 3)) == (
        "InputContext(num_input_pipelines=3, input_pipeline_id=1, num_replicas_in_sync=3)"
    )

"""Arrays end to end read as one array."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from transformer_jax.data.joined import Joined

TOKENS = st.lists(st.lists(st.integers(-99, 99), max_size=4), min_size=1, max_size=5)


@given(TOKENS, st.data())
def test_joined_arrays_read_as_one(lists, data):
    shifts = data.draw(st.lists(st.integers(-9, 9), min_size=len(lists), max_size=len(lists)))
    joined = Joined([np.array(token, np.int64) for token in lists], shifts)
    whole = np.array(
        [x + shift for token, shift in zip(lists, shifts, strict=True) for x in token], np.int64
    )
    assert len(joined) == len(whole) and joined.dtype == whole.dtype
    limit = st.integers(-len(whole) - 1, len(whole) + 1)
    for part in (
        slice(None),
        slice(data.draw(limit), data.draw(limit)),
        slice(1, None),
        slice(None, -1),
    ):
        np.testing.assert_array_equal(joined[part], whole[part])
    if len(whole):
        some = np.array(data.draw(st.lists(st.integers(0, len(whole) - 1))), np.int64)
        np.testing.assert_array_equal(joined[some], whole[some])
        assert all(joined[i] == whole[i] for i in some.tolist())


def test_small_types_stay_small():
    joined = Joined([np.array([1, 2], np.uint16), np.array([65535], np.uint16)])
    assert joined[:].dtype == joined[np.array([2])].dtype == np.uint16 and joined[2] == 65535

"""The words of errors: what, where, expected, found, what to do."""

import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from core_testing import Momentum
from flax.core import FrozenDict
from opt_core import Mismatch, errors
from opt_core.errors import RestoreError


def test_a_restore_error_in_full() -> None:
    reference = Momentum().create(
        {"a": jnp.ones(2), "b": [jnp.ones((2, 3), jnp.bfloat16)], "c": jnp.ones(()), "d": ()}
    )
    state_dict: Any = reference.state_dict()
    state_dict["target"] = {
        "a": np.ones(3, np.float32),
        "b": {"0": np.ones((2, 3), np.float16)},
        "d": [],
        "e/f": {"g": 1, "h": {}},
    }
    state_dict["state"]["step"] = 2**40
    with pytest.raises(RestoreError) as caught:
        reference.restore_state(state_dict)
    assert str(caught.value) == (
        "the state dict does not fit: 7 deviations\n"
        "  state/step: value: expected int32[], found 1099511627776, which does not fit int32\n"
        "  target/a: shape: expected float32[2], found float32[3]\n"
        "  target/b/0: dtype: expected bfloat16[2, 3], found float16[2, 3]\n"
        "  target/c: missing: expected float32[], found nothing\n"
        "  target/d: container: expected a mapping (tuple) with no keys, found a list\n"
        "  target/e~1f/g: extra: expected nothing, found 1 (int)\n"
        "  target/e~1f/h: extra: expected nothing, found a mapping with no keys\n"
        "Restore into an optimizer built as the saved one was, or correct the dict."
    )


def test_deviations_are_data() -> None:
    optimizer = Momentum().create({"a": jnp.ones(2), "b": {"c": None}})
    state_dict = optimizer.state_dict()
    optimizer.restore_state(FrozenDict(state_dict))
    state_dict["target"]["a"] = 1
    with pytest.raises(RestoreError, match="does not fit: 1 deviation\n") as caught:
        optimizer.restore_state(state_dict)
    assert caught.value.mismatches == (Mismatch("target/a", "value", "float32[2]", "1 (int)"),)
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, RestoreError)
    assert (error.mismatches, str(error)) == (caught.value.mismatches, str(caught.value))


def test_errors_are_the_builtins_that_callers_catch() -> None:
    assert all(issubclass(getattr(errors, name), errors.OptimizerError) for name in errors.__all__)
    for name in ("GroupError", "RestoreError", "StateDictError", "TreeMismatchError"):
        assert issubclass(getattr(errors, name), ValueError)
    for name in ("HyperParamError", "StateChangedError"):
        assert issubclass(getattr(errors, name), TypeError)

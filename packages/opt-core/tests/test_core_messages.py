"""The words of errors: what, where, expected, found, what to do."""

import pickle
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from core_testing import Momentum
from flax.core import FrozenDict
from opt_core import Mismatch, MismatchKind, errors
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
        "the state dict does not fit the optimizer: 7 deviations\n"
        "  state/step: value: expected int32[], found 1099511627776, which does not fit int32\n"
        "  target/a: shape: expected float32[2], found float32[3]\n"
        "  target/b/0: dtype: expected bfloat16[2, 3], found float16[2, 3]\n"
        "  target/c: missing: expected float32[], found nothing\n"
        "  target/d: container: expected a mapping (tuple) with no keys, found a list\n"
        "  target/e~1f/g: extra: expected nothing, found 1 (int)\n"
        "  target/e~1f/h: extra: expected nothing, found a mapping with no keys\n"
        "Restore into an optimizer built as the saved one was, correct the dict, or pass "
        "`strict=False` to take the 3 leaves that fit and keep the rest as they are."
    )


MOMENTA = {"a": np.ones(2), "b": np.ones(2)}


@pytest.mark.parametrize(
    ("changes", "suspected"),
    [
        ({"state": {"step": 0, "param_states": {"0": {"mu": MOMENTA, "nu": MOMENTA}}}}, True),
        ({"state": {"step": 0, "param_states": {"b": np.ones(2, np.float32)}}}, False),
    ],
)
def test_another_optimizers_state_is_recognised(changes: dict[str, Any], suspected: bool) -> None:
    optimizer = Momentum().create({"a": jnp.ones(2), "b": jnp.ones(2)})
    head = str(optimizer.check_state_dict(optimizer.state_dict() | changes)).splitlines()[0]
    words = "; nothing under `state/param_states` fits: another optimizer's state, or none"
    assert head.endswith(words) == suspected


def test_a_report_is_data_and_counts_what_fits() -> None:
    optimizer = Momentum().create({"a": jnp.ones(2), "b": {"c": None}})
    state_dict = optimizer.state_dict()
    fits = optimizer.check_state_dict(FrozenDict(state_dict))
    assert (fits.mismatches, fits.matched) == ((), 5)
    assert str(fits) == "the state dict fits: 5 leaves"
    state_dict["target"]["a"] = 1
    with pytest.raises(RestoreError, match="does not fit the optimizer: 1 deviation\n") as caught:
        optimizer.restore_state(state_dict)
    found = Mismatch("target/a", MismatchKind.VALUE, "float32[2]", "1 (int)")
    report = caught.value.report
    assert (report.mismatches, report.matched) == ((found,), 4)
    error = pickle.loads(pickle.dumps(caught.value))
    assert isinstance(error, RestoreError)
    assert (error.report, str(error)) == (report, str(caught.value))


def test_errors_are_the_builtins_that_callers_catch() -> None:
    assert all(issubclass(getattr(errors, name), errors.OptimizerError) for name in errors.__all__)
    for name in ("GroupError", "RestoreError", "StateDictError", "TreeMismatchError"):
        assert issubclass(getattr(errors, name), ValueError)
    for name in ("HyperParamError", "StateChangedError"):
        assert issubclass(getattr(errors, name), TypeError)

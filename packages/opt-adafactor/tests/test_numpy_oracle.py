"""Random shapes, rules and options against a float64 restatement in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_adafactor as oracle
from adafactor_testing import rule
from hypothesis import given, settings
from hypothesis import strategies as st
from opt_adafactor import HEURISTIC_RULE, Adafactor, HParamMap

# Of rank 3 and more, and of less with a batch dimension: those that T5X does not ignore.
RULES: dict[tuple[int, ...], list[Any]] = {
    (4, 3, 6): ["rbc", "cbr", "rcc", "nbn", "bbb", "rrc", "rnc", "rbr", "nnn", "ccb", None],
    (2, 3, 4, 5): ["rbcc", "cbrc", "brcb", "nbnn", "rrcc", "crnb", None],
    (3, 5): ["bn", "rb", "cb", "bb", None, HEURISTIC_RULE],
    (6, 4): [HEURISTIC_RULE, None],
    (5, 5): [HEURISTIC_RULE],
    (7,): [HEURISTIC_RULE, "b", None],
    (): [HEURISTIC_RULE],
}
PAIRS = [(shape, letters) for shape, rules in RULES.items() for letters in rules]


OPTIONS = st.fixed_dictionaries(
    {
        "learning_rate": st.sampled_from([0.01, 0.3]),
        "multiply_by_parameter_scale": st.booleans(),
        "beta1": st.sampled_from([None, 0.0, 0.9]),
        "decay_rate": st.sampled_from([0.3, 0.8, 1.0]),
        "step_offset": st.sampled_from([0, 0, 1, 7]),
        "clipping_threshold": st.sampled_from([None, 0.25, 1.0]),
        "weight_decay_rate": st.sampled_from([None, 0.0, 0.01]),
        "epsilon1": st.sampled_from([1e-30, 1e-3]),
        "epsilon2": st.sampled_from([1e-3, 0.5]),
        "weight_decay_rate_lr_exponent": st.sampled_from([None, 1.0, 2.0]),
        "global_norm_clip_threshold": st.sampled_from([None, 0.0, 0.5]),
        "max_parameter_scale": st.sampled_from([None, 0.6]),
    }
)


def expected(params: dict[str, Any], grads: list[Any], roles: dict[str, Any], o: Any) -> Any:
    tensors = {k: oracle.Tensor(np.asarray(p, np.float64), roles[k]) for k, p in params.items()}
    for k, g in enumerate(grads):
        clipped = oracle.clip_global_norm(
            [np.asarray(x, np.float64) for x in g.values()], o["global_norm_clip_threshold"]
        )
        for name, x in zip(g, clipped, strict=True):
            oracle.step(tensors[name], x, k, o)
    return tensors


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from(PAIRS), min_size=1, max_size=3),
    OPTIONS,
    st.sampled_from([0, 5]),
    st.integers(0, 2**16),
)
def test_three_steps(pairs: Any, o: dict[str, Any], min_dim: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    draw = {f"p{i}": shape for i, (shape, _) in enumerate(pairs)}
    params = {k: np.float32(rng.normal(size=s)) for k, s in draw.items()}
    grads = [{k: np.float32(rng.normal(size=s)) for k, s in draw.items()} for _ in range(3)]
    rules, roles = [], {}
    for (name, shape), (_, letters) in zip(draw.items(), pairs, strict=True):
        is_letters = isinstance(letters, str)
        rules.append((f"^{name}$", rule(letters) if is_letters else letters))
        by_size = oracle.heuristic_roles(shape, min_dim)
        roles[name] = by_size if letters is HEURISTIC_RULE else letters
    definition = Adafactor(**o, factor_map=HParamMap(rules), min_dim_size_to_factor=min_dim)
    optimizer = definition.create(jax.tree.map(jnp.asarray, params))
    step = jax.jit(lambda optimizer, g: optimizer.apply_gradient(g))
    for g in grads:
        optimizer = step(optimizer, g)
    for name, tensor in expected(params, grads, roles, o).items():
        state = optimizer.state.param_states[name]
        close(optimizer.target[name], tensor.p, f"{name}: {roles[name]}")
        for slot, want in [
            ("v_row", tensor.row),
            ("v_col", tensor.col),
            ("v", tensor.v),
            ("m", tensor.m),
        ]:
            found = getattr(state, slot)
            if want is None:
                assert found.shape == (1,)
            else:
                close(found, want.reshape(found.shape), f"{name}.{slot}")


def close(found: Any, want: Any, what: str) -> None:
    # float32 sums and square roots, three steps deep, relative to the largest entry.
    scale = np.max(np.abs(want), initial=0.0)
    assert np.all(np.abs(np.float64(found) - want) <= 2e-5 * scale + 1e-30), what


def test_weight_decay_on_parameters_of_every_dtype() -> None:
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        p = jnp.asarray([1.0, -2.0, 4.0], dtype)
        optimizer = Adafactor(0.0, weight_decay_rate=0.25, beta1=0.5).create(p)
        optimizer = optimizer.apply_gradient(p)
        assert optimizer.target.dtype == dtype
        assert optimizer.target.tolist() == [0.75, -1.5, 3.0]

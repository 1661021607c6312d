import jax
import jax.numpy as jnp
import numpy as np
from core_testing import bits
from opt_core import strip_weak_type


def test_weak_arrays_become_strong() -> None:
    weak = jnp.asarray(1.5)
    assert weak.weak_type
    assert bits(strip_weak_type(weak)) == bits(jnp.float32(1.5))
    assert not jax.jit(strip_weak_type)(weak).weak_type
    abstract = jax.eval_shape(lambda: jnp.asarray(1.5))
    assert abstract.weak_type
    assert not strip_weak_type(abstract).weak_type


def test_everything_else_is_left_alone() -> None:
    tree = [jnp.ones(2), np.ones(2), 1.5, jax.random.key(0), "text", jax.eval_shape(lambda: 1)]
    strong = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert all(a is b for a, b in zip(strip_weak_type(tree[:-1]), tree[:-1], strict=True))
    assert strip_weak_type(strong) is strong

"""Logical axes in all the forms that people have them in."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from opt_partition import normalise_param_axes
from opt_partition.errors import AxesError

PARAMS = {"mlp": [jnp.ones((3, 4)), np.ones(4)], "scale": jax.ShapeDtypeStruct((), "float32")}


class Boxed:
    """As `flax.linen.LogicallyPartitioned`: it knows its own spec."""

    def get_partition_spec(self) -> P:
        return P("embed", None)


class Metadata:
    """As `flax.linen.partitioning.AxisMetadata`: it has names."""

    names = P("embed", "mlp")


@pytest.mark.parametrize(
    ("given", "padded"),
    [
        (P("embed"), P("embed", None)),
        (None, P(None, None)),
        (("embed", "mlp"), P("embed", "mlp")),
        ([None, "mlp"], P(None, "mlp")),
        ([["heads", "kv"]], P(("heads", "kv"), None)),
        (Boxed(), P("embed", None)),
        (Metadata(), P("embed", "mlp")),
        (np.ones((3, 4)), P(None, None)),
    ],
)
def test_forms(given: Any, padded: P) -> None:
    axes = {"mlp": [given, ("mlp",)], "scale": ()}
    found = normalise_param_axes(PARAMS, axes)
    assert found == {"mlp": [padded, P("mlp")], "scale": P()}


@jax.tree_util.register_pytree_with_keys_class
class Variable:
    """As `flax.nnx.Variable`: a node around its value, with metadata beside that."""

    def __init__(self, value: Any, **metadata: Any) -> None:
        self.value, self.metadata = value, metadata

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("value"), self.value)], tuple(self.metadata.items())

    @classmethod
    def tree_unflatten(cls, metadata: Any, values: Any) -> "Variable":
        return cls(*values, **dict(metadata))


@pytest.mark.parametrize("name", ["out_sharding", "sharding_names", "sharding"])
def test_metadata_of_variables_name_their_values(name: str) -> None:
    kernel, bias = jnp.ones((3, 4)), jnp.ones(4)
    state = {"kernel": Variable(kernel, **{name: ("embed", "mlp")}), "bias": Variable(bias)}
    pure = {"kernel": kernel, "bias": bias}
    specs = {"kernel": P("embed", "mlp"), "bias": P(None)}
    assert normalise_param_axes(pure, state) == specs
    for axes in (state, specs, {"kernel": ("embed", "mlp"), "bias": None}):
        found = normalise_param_axes(state, axes)
        assert {key: found[key].value for key in found} == specs
    inside = {key: Variable(spec) for key, spec in specs.items()}
    assert normalise_param_axes(pure, inside) == specs, "the specs that NNX makes of a state"


def test_arrays_alone_are_not_axes() -> None:
    for params, axes in ((PARAMS, PARAMS), ({"w": jnp.ones(3)}, {"w": Variable(jnp.ones(3))})):
        with pytest.raises(AxesError, match=r"arrays but no axis names.* nnx.get_partition_spec"):
            normalise_param_axes(params, axes)
    assert normalise_param_axes({}, {}) == {}


def test_containers_may_be_of_another_kind() -> None:
    class Layer(NamedTuple):
        kernel: Any
        bias: Any

    params = Layer(jnp.ones((3, 4)), jnp.ones(4))
    found = normalise_param_axes(params, {"bias": ("mlp",), "kernel": ("embed", "mlp")})
    assert found == Layer(P("embed", "mlp"), P("mlp"))


def test_all_that_does_not_fit_is_listed() -> None:
    nested = {"a": {"w": jnp.ones(3), "b": jnp.ones(3)}, "c": {"w": jnp.ones(3)}}
    with pytest.raises(AxesError) as caught:
        normalise_param_axes(nested, {"a": {"w": P("embed"), "x": P()}, "c": P()})
    assert str(caught.value).splitlines() == [
        "`param_axes` does not have the tree structure of its leaves:",
        "  a/b: missing",
        "  a/x: unexpected",
        "  c/w: missing",
        f"  c: expected a container, found {P()!r}",
    ]
    params = {**dict.fromkeys("cde", jnp.ones(2)), "g": "text"}
    axes = {"c": P("embed", "mlp"), "d": "embed", "e": P(3), "g": None}
    with pytest.raises(AxesError) as caught:
        normalise_param_axes(params, axes)
    assert str(caught.value).splitlines() == [
        "`param_axes` do not match `params`:",
        "  c: expected at most 1 axes, one per dimension of (2,), found ('embed', 'mlp')",
        "  d: axes must be a PartitionSpec or a tuple of names, found 'embed'",
        "  e: the name of a dimension must be a string or None, found 3",
        (
            "  g: expected an array or a jax.ShapeDtypeStruct, found str (for an Equinox "
            "module, pass only its arrays: `eqx.filter(model, eqx.is_array)`)"
        ),
    ]


def test_boxed_parameters() -> None:
    with pytest.raises(AxesError, match="w: `params` contains a Boxed; unbox the parameters"):
        normalise_param_axes({"w": Boxed()}, {"w": Boxed()})

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
from typing import Any

import jax.numpy as jnp
import opt_optax_bridge as opt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opt_checkpoint import (
    LeafInfo,
    Schema,
    errors,
    leaf_name,
    leaf_path,
    named_state,
)
from opt_core import FROZEN, Bearing, MultiOptimizer, TransformationDescription

PARTS = st.text(alphabet=st.one_of(st.sampled_from("~/.01%a"), st.characters(codec="utf-8")))
PATHS = st.lists(PARTS, min_size=1, max_size=5).map(tuple)
DTYPES = st.sampled_from(["float32", "bfloat16", "int4", "bool", "key<fry>", "complex64"])
INFOS = st.builds(
    LeafInfo,
    path=PATHS,
    shape=st.lists(st.integers(0, 2**40), max_size=3).map(tuple),
    dtype=DTYPES,
    kind=st.sampled_from(["params", "state", "extra"]),
    parameter=st.none() | PATHS,
    group=st.lists(PARTS, max_size=2).map(tuple),
    transformation=PARTS,
    role=PARTS,
    dimensions=st.none() | st.lists(st.none() | st.integers(0, 9), max_size=3).map(tuple),
    axes=st.none()
    | st.lists(st.none() | st.text() | st.tuples(st.text(), st.text()), max_size=2).map(tuple),
    value=st.none() | st.integers(),
)
BEARINGS = st.sampled_from(
    [
        Bearing("refused"),
        Bearing("window", ("count",), "k"),
        Bearing("at_or_below_count", ("n",)),
        Bearing("above_count", ("n",)),
    ]
)
SETTINGS = st.dictionaries(
    st.text(), st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False)
)
SCHEMAS = st.builds(
    Schema,
    leaves=st.lists(INFOS, max_size=3, unique_by=lambda info: info.path).map(tuple),
    optimizer=st.lists(
        st.builds(
            TransformationDescription,
            name=PARTS,
            group=st.lists(PARTS, max_size=2).map(tuple),
            settings=SETTINGS,
            number=st.integers(1, 9),
            bearing=st.dictionaries(PARTS, BEARINGS, max_size=2),
            source=st.sampled_from(["stated", "derived", "types"]),
        ),
        max_size=2,
    ).map(tuple),
    groups=st.dictionaries(PARTS, st.lists(PATHS, max_size=2).map(tuple), max_size=2),
    versions=st.dictionaries(PARTS, PARTS, max_size=2),
)


@given(PATHS)
def test_names_and_paths_are_inverse(path: tuple[str, ...]) -> None:
    assert leaf_path(leaf_name(path)) == path


@given(PATHS, PATHS)
def test_no_two_paths_share_a_name(one: tuple[str, ...], other: tuple[str, ...]) -> None:
    assert (leaf_name(one) == leaf_name(other)) == (one == other)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=50)
@given(SCHEMAS)
def test_json_and_back(schema: Schema) -> None:
    assert Schema.from_data(json.loads(json.dumps(schema.to_data()))) == schema


def real() -> Any:
    table = MultiOptimizer.from_rules([("fast", "w", opt.adam(0.1))], rest=FROZEN)
    optimizer = table.create({"w": jnp.ones((2, 3)), "b": jnp.ones(1)})
    return json.loads(json.dumps(named_state(optimizer).schema.to_data()))


def edited(*path: Any, value: Any) -> Any:
    data = copy.deepcopy(real())
    node = data
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "where"),
    [
        (("leaves",), None, "schema/leaves"),
        (("leaves",), {}, "schema/leaves"),
        (("leaves", 1), 7, "schema/leaves/1"),
        (("leaves", 1, "path"), "params/w", "schema/leaves/1/path"),
        (("leaves", 1, "path"), [], "schema/leaves/1/path"),
        (("leaves", 1, "path"), ["params", 3], "schema/leaves/1/path/1"),
        (("leaves", 1, "path"), ["params", "b"], "schema/leaves/1/path"),
        (("leaves", 1, "shape"), [2, -3], "schema/leaves/1/shape/1"),
        (("leaves", 1, "shape"), [2, 3.0], "schema/leaves/1/shape/1"),
        (("leaves", 1, "shape"), [2, True], "schema/leaves/1/shape/1"),
        (("leaves", 1, "dtype"), "float33", "schema/leaves/1/dtype"),
        (("leaves", 1, "dtype"), None, "schema/leaves/1/dtype"),
        (("leaves", 1, "kind"), "parameter", "schema/leaves/1/kind"),
        (("leaves", 1, "value"), 1.5, "schema/leaves/1/value"),
        (("leaves", 1, "pickle"), "x", "schema/leaves/1"),
        (("optimizer", 0, "settings"), [1], "schema/optimizer/0/settings"),
        (("optimizer", 0), {"group": []}, "schema/optimizer/0"),
        (("groups", "fast"), [["w", None]], "schema/groups/fast/0/1"),
        (("versions", "jax"), 1, "schema/versions/jax"),
        (("extra",), 1, "schema"),
    ],
)
def test_what_is_malformed_is_named(path: tuple[Any, ...], value: Any, where: str) -> None:
    with pytest.raises(errors.LoadError, match=f"^`{where}`: "):
        Schema.from_data(edited(*path, value=value))


@pytest.mark.parametrize("data", [None, [], "schema", 3, b"{}"])
def test_what_is_no_mapping_is_no_schema(data: Any) -> None:
    with pytest.raises(errors.LoadError, match=r"^`schema`: expected a mapping"):
        Schema.from_data(data)


def test_no_name_is_there_twice() -> None:
    data = real()
    data["leaves"].append(copy.deepcopy(data["leaves"][0]))
    with pytest.raises(errors.LoadError, match="is there twice"):
        Schema.from_data(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [f.name for f in (*dataclasses.fields(LeafInfo), *dataclasses.fields(Schema))]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON, st.sampled_from(["leaves", "optimizer", "groups", "versions"]))
def test_any_json_is_a_schema_or_a_load_error(data: Any, field: str) -> None:
    for given_data in (data, {field: data}, {"leaves": [], field: data}, {"leaves": [data]}):
        with contextlib.suppress(errors.LoadError):
            Schema.from_data(given_data)

"""`opt_nnx.Optimizer` on eight devices: every state lies right, and a step compiles once."""

import warnings
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import opt_nnx
import opt_optax_bridge as opt
import optax
import optax.contrib
import pytest
from elastic_case import assert_same_bits
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from opt_adafactor import Adafactor
from opt_checkpoint import named_state, plan_restore
from opt_core import FROZEN, MultiOptimizer
from opt_partition import Expected, memory_plan, verify
from opt_partition.errors import AxesError

P = PartitionSpec
MESHES: dict[str, Callable[[], Any]] = {
    "auto": lambda: jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2),
    "explicit": lambda: jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2),
}
RULES = (("embed", "fsdp"), ("mlp", "tp"))


class Model(nnx.Module):
    """Two matrices with named dimensions, and biases."""

    def __init__(self, *, names: bool = True, dtype: Any = jnp.float32, **metadata: Any) -> None:
        def init(key: jax.Array, shape: Any, dtype: Any) -> jax.Array:
            return 0.1 * jax.random.normal(key, shape, dtype)

        def layer(shape: tuple[int, int], axes: tuple[str, str]) -> nnx.Linear:
            def named(axes: tuple[str, ...]) -> Any:
                return nnx.with_partitioning(init, axes, **metadata) if names else init

            return nnx.Linear(
                *shape,
                kernel_init=named(axes),
                bias_init=named(axes[1:]),
                param_dtype=dtype,
                rngs=nnx.Rngs(0),
            )

        self.wi: Any = layer((16, 32), ("embed", "mlp"))
        self.wo: Any = layer((32, 16), ("mlp", "embed"))

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(_dot(x, self.wi.kernel[...]) + self.wi.bias[...])
        out: jax.Array = _dot(hidden, self.wo.kernel[...]) + self.wo.bias[...]
        return out


def _dot(x: jax.Array, kernel: jax.Array) -> jax.Array:
    if AxisType.Explicit in jax.typeof(kernel).sharding.mesh.axis_types:
        return jnp.einsum("ab,bc->ac", x, kernel, out_sharding=P())
    return x @ kernel


X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)


def loss(model: Any) -> jax.Array:
    return jnp.mean((model(jnp.asarray(X)) - 1.0) ** 2)


def make_step() -> Any:
    @nnx.jit
    def step(model: Any, optimizer: Any) -> Any:
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return step


def shardings(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(tree))
    return {jax.tree_util.keystr(path): leaf.sharding for path, leaf in leaves}


def specs(tree: Any) -> dict[str, tuple[Any, ...]]:
    return {path: _trimmed(found.spec) for path, found in shardings(tree).items()}


def _trimmed(spec: Any) -> tuple[Any, ...]:
    entries = list(spec)
    while entries and entries[-1] is None:
        entries.pop()
    return tuple(entries)


def single(path: str, found: dict[str, Any]) -> Any:
    (value,) = (value for name, value in found.items() if path in name)
    return value


CONTRIB: Any = optax.contrib
TRANSFORMATIONS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "muon": lambda: CONTRIB.muon(1e-2),
    "sm3": lambda: optax.sm3(1e-2),
    "adafactor_of_ours": lambda: Adafactor(1e-2, min_dim_size_to_factor=8, beta1=0.9),
    "groups": lambda: MultiOptimizer.from_rules(
        [("matrices", r".*/kernel", opt.adafactor(1e-2, min_dim_size_to_factor=8))],
        rest=opt.adam(1e-2),
    ),
    "frozen": lambda: MultiOptimizer.from_rules([("wi", r"wi/.*", opt.lion(1e-2))], rest=FROZEN),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1e-2, momentum=0.9)),
}


class WithOwnNames(nnx.Module):
    """A parameter whose state is sharded along another dimension than it is."""

    def __init__(self) -> None:
        metadata: Any = {"out_sharding": (None, "x"), "optimizer_sharding": ("x", None)}
        self.w = nnx.Param(jnp.ones((8, 8)), **metadata)


@pytest.mark.skipif(
    tuple(map(int, flax.__version__.split(".")[:3])) < (0, 12, 8),
    reason="Flax has no `optimizer_sharding`",
)
def test_state_has_the_names_that_a_variable_says_for_it() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    found = []
    with jax.set_mesh(mesh):
        for kind in (nnx.Optimizer, opt_nnx.Optimizer):
            optimizer: Any = kind(WithOwnNames(), optax.adam(0.1), wrt=nnx.Param)
            momentum = optimizer.opt_state[0].mu["w"]
            shard = momentum.get_value().sharding.shard_shape((8, 8))
            found.append((momentum.get_metadata("out_sharding"), shard))
    assert found == [(("x", None), (1, 8))] * 2


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [None, "fsdp"])
@pytest.mark.parametrize("kind", MESHES)
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_state_stays_where_it_is_made_and_a_step_compiles_once(
    name: str, kind: str, zero: str | None
) -> None:
    with jax.set_mesh(MESHES[kind]()), nnx.logical_axis_rules(RULES):
        model = Model()
        optimizer = opt_nnx.Optimizer(model, TRANSFORMATIONS[name](), zero=zero)
        before = shardings((model, optimizer))
        assert all(isinstance(s, NamedSharding) for s in before.values())
        state = nnx.state(optimizer)
        assert_said(state, nnx.get_partition_spec(state))
        step = make_step()
        values = [float(step(model, optimizer)) for _ in range(3)]
        after = shardings((model, optimizer))
    assert values == sorted(values, reverse=True)
    assert step.jitted_fn._cache_size() == 1
    assert {path: (s.mesh, _trimmed(s.spec)) for path, s in after.items()} == {
        path: (s.mesh, _trimmed(s.spec)) for path, s in before.items()
    }


def assert_said(state: Any, read: Any) -> None:
    """The metadata say where every leaf lies."""
    trees = (state, read)
    pairs = (jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable)) for tree in trees)
    for leaf, spec in zip(*pairs, strict=True):
        if isinstance(leaf.get_value(), jax.Array):
            assert _trimmed(leaf.get_value().sharding.spec) == _trimmed(spec.get_value())


def test_replicated_parameters_are_named_once() -> None:
    """Under `jax.set_mesh`, where Flax's optimizer would let XLA move them and their state."""
    with jax.set_mesh(MESHES["auto"]()), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = Model(names=False)
        optimizer = opt_nnx.Optimizer(model, optax.adam(1e-2))
        optimizer.place(model)
        opt_nnx.Optimizer(model, optax.sgd(1e-2), zero="fsdp")
        opt_nnx.Optimizer(model, optax.sgd(1e-2), zero=())
        with nnx.logical_axis_rules(RULES):
            opt_nnx.Optimizer(Model(), optax.sgd(1e-2))
    opt_nnx.Optimizer(Model(names=False), optax.sgd(1e-2), mesh=MESHES["auto"]())
    (warning,) = caught
    assert warning.filename == __file__  # not a line of Flax or of ours
    text = str(warning.message)
    assert "`wi/kernel`, 2048 bytes, and 3 more" in text
    assert "state of 8580 bytes" in text
    assert 'zero="fsdp"' in text


# Adafactor averages the larger dimension away for the rows, and the smaller for the columns.
EXPECTED: dict[str, Any] = {
    "['v_row']['wi']['kernel']": ("fsdp",),
    "['v_col']['wi']['kernel']": ("tp",),
    "['v_row']['wo']['kernel']": ("fsdp",),
    "['v_col']['wo']['kernel']": ("tp",),
    "['v']['wi']['kernel']": (),
    "['ema']['wo']['kernel']": ("tp", "fsdp"),
    "['step']": (),
}


@pytest.mark.parametrize("kind", MESHES)
def test_every_dimension_lies_as_the_one_that_it_follows(kind: str) -> None:
    with jax.set_mesh(MESHES[kind]()), nnx.logical_axis_rules(RULES):
        optimizer = opt_nnx.Optimizer(Model(), TRANSFORMATIONS["adafactor"]())
    found = specs(optimizer)
    assert {path: single(path, found) for path in EXPECTED} == EXPECTED


def test_zero_divides_the_state_by_the_free_axis() -> None:
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        model = Model(sharding_rules=[("embed", None), ("mlp", "tp")])
        whole, shared = (opt_nnx.Optimizer(model, optax.adam(0.1), zero=z) for z in (None, "data"))

    def held(optimizer: Any) -> int:
        leaves = jax.tree.leaves(nnx.state(optimizer, nnx.OptVariable))
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)

    assert held(whole) == 4 * held(shared)
    assert specs(whole)["['opt_state'][0]['mu']['wi']['kernel'].value"] == (None, "tp")
    assert specs(shared)["['opt_state'][0]['mu']['wi']['kernel'].value"] == ("data", "tp")
    assert _trimmed(model.wi.kernel[...].sharding.spec) == (None, "tp")


@pytest.mark.sample(1)
@pytest.mark.parametrize("zero", [None, "fsdp"])
@pytest.mark.parametrize("name", ["adam", "muon", "clip"])
def test_numbers_are_those_of_flax(name: str, zero: str | None) -> None:
    found = []
    makers: list[Callable[[Any], Any]] = [
        lambda model: nnx.Optimizer(model, TRANSFORMATIONS[name](), wrt=nnx.Param),
        lambda model: opt_nnx.Optimizer(model, TRANSFORMATIONS[name](), zero=zero),
    ]
    for make in makers:
        with jax.set_mesh(MESHES["auto"]()), nnx.logical_axis_rules(RULES):
            # Flax cannot make the states of `muon` where variables have names.
            model = Model(names=name != "muon")
            optimizer = make(model)
            step = make_step()
            values = [step(model, optimizer) for _ in range(4)]
            found.append((values, nnx.state(model), nnx.state(optimizer)))
    for theirs, ours in zip(*(jax.tree.leaves(tree) for tree in found), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-7)


# Where the mesh and the rules come from.


def by_the_context(**metadata: Any) -> Model:
    with jax.set_mesh(MESHES["auto"]()), nnx.logical_axis_rules(RULES):
        return Model(**metadata)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "make",
    [
        by_the_context,  # the rules are gone: names give way to where the arrays lie
        lambda: by_the_context(sharding_rules=RULES),
        lambda: Model(eager_sharding=False, mesh=MESHES["auto"](), sharding_rules=RULES),
    ],
    ids=["arrays", "names and arrays", "metadata"],
)
def test_the_mesh_of_the_model_is_found(make: Callable[[], Model]) -> None:
    optimizer = opt_nnx.Optimizer(make(), optax.adam(0.1))  # without a context
    assert specs(optimizer)["['opt_state'][0]['nu']['wo']['kernel'].value"] == ("tp", "fsdp")
    assert shardings(optimizer)["['step'].value"] == NamedSharding(MESHES["auto"](), P())


def test_a_mesh_and_rules_of_the_constructor_go_first() -> None:
    other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    model = Model(eager_sharding=False, sharding_rules=RULES)
    with nnx.logical_axis_rules(RULES):
        optimizer = opt_nnx.Optimizer(
            model, optax.adam(0.1), mesh=other, rules={"mlp": "x", "embed": None}
        )
    found = specs(optimizer)
    assert found["['opt_state'][0]['nu']['wo']['kernel'].value"] == ("x",)
    assert found["['opt_state'][0]['nu']['wi']['kernel'].value"] == (None, "x")
    assert found["['opt_state'][0]['count'].value"] == ()


def test_arrays_without_names_are_followed() -> None:
    mesh = MESHES["auto"]()
    model = Model(names=False)
    model.wi.kernel.set_value(jax.device_put(model.wi.kernel[...], NamedSharding(mesh, P("tp"))))
    optimizer = opt_nnx.Optimizer(model, TRANSFORMATIONS["adafactor"]())
    assert single("['v_row']['wi']['kernel']", specs(optimizer)) == ("tp",)
    assert single("['v_col']['wi']['kernel']", specs(optimizer)) == ()


def test_names_that_mean_nothing_are_an_error() -> None:
    model = Model(eager_sharding=False)
    with pytest.raises(AxesError) as caught:
        opt_nnx.Optimizer(model, optax.adam(0.1), mesh=MESHES["auto"](), rules=[("mlp", None)])
    assert str(caught.value).splitlines() == [
        "these logical axes have no rule, and are not axes of the mesh, which has fsdp=4, tp=2",
        "  wi/kernel: 'embed'",
        "  wo/bias: 'embed'",
        "  wo/kernel: 'embed'",
        "Pass `rules=[('embed', None), ...]`, or use `nnx.logical_axis_rules`.",
    ]
    with pytest.raises(AxesError, match="`zero` needs a mesh"):
        opt_nnx.Optimizer(Model(names=False), optax.adam(0.1), zero="data")


@pytest.mark.slow
@pytest.mark.parametrize("kind", MESHES)
def test_an_optimizer_made_in_a_compiled_function(kind: str) -> None:
    @nnx.jit
    def create() -> Any:
        model = Model()
        return model, opt_nnx.Optimizer(model, TRANSFORMATIONS["adafactor"](), zero="fsdp")

    with jax.set_mesh(MESHES[kind]()), nnx.logical_axis_rules(RULES):
        model, optimizer = create()
        before = specs((model, optimizer))
        step = make_step()
        for _ in range(2):
            step(model, optimizer)
    assert single("['v_row']['wi']['kernel']", before) == ("fsdp",)
    assert specs((model, optimizer)) == before
    assert step.jitted_fn._cache_size() == 1


def test_an_abstract_model_has_an_abstract_optimizer() -> None:
    mesh = MESHES["auto"]()
    model = nnx.eval_shape(lambda: Model(eager_sharding=False, sharding_rules=RULES))
    optimizer = opt_nnx.Optimizer(model, opt.adam(0.1), mesh=mesh, zero="tp")
    leaves = jax.tree.leaves(nnx.state(optimizer))
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert all(leaf.sharding.mesh == mesh for leaf in leaves)
    assert specs(optimizer)["['opt_state'][0]['nu']['wo']['kernel'].value"] == ("tp", "fsdp")


def test_inside_shard_map_an_update_is_of_shards() -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model = Model(names=False)
    optimizer = opt_nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), mesh=mesh)
    graphdef, state = nnx.split((model, optimizer))

    @jax.jit
    def step(state: Any) -> Any:
        def local(state: Any, x: jax.Array) -> Any:
            model, optimizer = nnx.merge(graphdef, state)
            grads = nnx.grad(lambda model: jnp.mean((model(x) - 1.0) ** 2))(model)
            optimizer.update(model, jax.tree.map(lambda g: jax.lax.pmean(g, "data"), grads))
            return nnx.state((model, optimizer))

        return jax.shard_map(
            local, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
        )(state, jnp.asarray(X))

    for _ in range(2):
        state = step(state)
    assert int(nnx.merge(graphdef, state)[1].step[...]) == 2


class LowRank(nnx.Module):
    """A frozen base with trained factors beside it, as Tunix has them."""

    def __init__(self, dtype: Any) -> None:
        self.base = Model(dtype=dtype)
        metadata: dict[str, Any] = {
            "out_sharding" if hasattr(nnx.Variable, "sharding_names") else "sharding_names": (
                "fsdp",
                None,
            )
        }
        keys = jax.random.split(jax.random.key(1))
        self.a: Any = nnx.LoRAParam(0.1 * jax.random.normal(keys[0], (16, 4), dtype), **metadata)
        self.b = nnx.LoRAParam(jnp.zeros((4, 16), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        low: jax.Array = x.astype(self.a[...].dtype) @ self.a[...] @ self.b[...]
        return self.base(x) + low


INJECTED: dict[str, Callable[[], Any]] = {
    # In bfloat16 Optax would round `b2` to 1, and divide by zero.
    "inject_hyperparams": lambda: optax.inject_hyperparams(
        optax.adamw, static_args=("b1", "b2", "eps", "eps_root", "weight_decay")
    )(learning_rate=1e-2),
    "twin": lambda: opt.adamw(1e-2),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", INJECTED)
def test_a_loop_as_that_of_tunix_needs_no_help(name: str) -> None:
    """LoRA in bfloat16, updates in a branch: nothing is placed or cast from outside."""
    with jax.set_mesh(MESHES["auto"]()), nnx.logical_axis_rules(RULES):
        create: Any = nnx.jit(lambda: LowRank(jnp.bfloat16))
        model = create()
        # As in Tunix: all of the model lies on the mesh, by `get_partition_spec`.
        state = nnx.state(model)
        mesh = model.a[...].sharding.mesh
        nnx.update(model, jax.device_put(state, nnx.get_named_sharding(state, mesh)))
        optimizer = opt_nnx.Optimizer(model, INJECTED[name](), wrt=nnx.LoRAParam)
        avals = jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type), nnx.state(optimizer))
        base = jax.tree.map(jnp.copy, nnx.state(model.base))
        traces: list[None] = []

        @nnx.jit
        def step(model: Any, optimizer: Any, is_update: jax.Array) -> Any:
            traces.append(None)
            grad = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))
            value, grads = grad(model)

            def update(model: Any, optimizer: Any) -> None:
                optimizer.update(model, grads)

            nnx.cond(is_update, update, lambda *_: None, model, optimizer)
            return value

        flags = [jnp.array(i % 2 == 1) for i in range(4)]
        values = [float(step(model, optimizer, flag)) for flag in flags]
    assert values[-1] < values[0]
    jitted: Any = step.jitted_fn
    assert len(traces) == jitted._cache_size() == 1
    assert optimizer.step[...] == 2
    after = jax.tree.map(lambda leaf: (leaf.dtype, leaf.weak_type), nnx.state(optimizer))
    assert after == avals
    assert jax.tree.all(jax.tree.map(jnp.array_equal, base, nnx.state(model.base)))
    mu = single("['mu']['a']", shardings(optimizer))
    assert _trimmed(mu.spec) == ("fsdp",)


def test_verify_takes_a_step_of_jax_jit_and_says_so_of_nnx_jit() -> None:
    mesh, tx = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,)), opt.adamw(1e-2)
    params = nnx.state(nnx.eval_shape(lambda: Model(names=False)), nnx.Param)
    plan = memory_plan(tx, params, nnx.get_partition_spec(params), [], mesh, zero="data")
    model = Model(names=False)
    optimizer = opt_nnx.Optimizer(model, tx, mesh=mesh, zero="data")
    layout = jax.tree.map(lambda leaf: leaf.sharding, (model, optimizer))
    expected = Expected(layout, (*layout, None), params="0", state="1")

    def step(model: Any, optimizer: Any) -> Any:
        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return model, optimizer, value

    report = verify(jax.jit(step, out_shardings=(*layout, None)).lower(model, optimizer), expected)
    assert report.bytes_per_device("state") == plan.state.bytes_per_device

    lowered: Any = nnx.jit(lambda model, optimizer: step(model, optimizer)[2]).lower(
        model, optimizer
    )
    for given in (lowered, lowered.compile()):
        with pytest.raises(TypeError, match=r"got flax\.nnx\..*ed\. .*compile with `jax\.jit`"):
            verify(given, expected)
    with pytest.raises(TypeError, match=r"numbers the leaves.*compile with `jax\.jit`"):
        verify(lowered.lowered, Expected((), ()))


# Names in checkpoints.


def pair(tx: Any, kind: Any = opt_nnx.Optimizer, steps: int = 1) -> Any:
    """A model of Flax NNX and its optimizer."""
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(steps))
    optimizer = kind(model, tx, wrt=nnx.Param)
    for _ in range(steps):
        optimizer.update(model, nnx.state(nnx.Linear(8, 8, rngs=nnx.Rngs(2)), nnx.Param))
    return model, optimizer


def test_what_flax_has_saved_is_read_by_opt_nnx_and_back() -> None:
    theirs = named_state(pair(optax.adamw(1e-2), nnx.Optimizer))
    ours = plan_restore(theirs, pair(opt.adamw(1e-2), steps=0)).apply()
    assert type(ours[1]) is opt_nnx.Optimizer
    assert_same_bits(named_state(ours), theirs)
    target = pair(optax.adamw(1e-2), nnx.Optimizer, steps=0)
    back = plan_restore(named_state(ours), target).apply()
    assert type(back[1]) is nnx.Optimizer
    assert_same_bits(named_state(back), theirs)

import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import opt_optax_bridge
import optax
import pickled_elsewhere
import pytest
from bridge_testing import Jitted, assert_same_bits, make_params, step, trained

pytestmark = pytest.mark.usefixtures("optax_promotion")

BUILT = pickled_elsewhere.built()


@pytest.mark.sample(40)
@pytest.mark.parametrize("name", BUILT)
def test_a_pickle_is_equal_and_hashes_equal(name: str) -> None:
    unpickled = pickle.loads(pickle.dumps(BUILT[name]))
    assert type(unpickled) is type(BUILT[name])
    assert unpickled == BUILT[name]
    assert hash(unpickled) == hash(BUILT[name])
    assert vars(unpickled.hyper_params).keys() == vars(BUILT[name].hyper_params).keys()


PROGRAM = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
unpickled = pickle.loads(open(sys.argv[2], "rb").read())
import pickled_elsewhere
from bridge_testing import make_params
built = pickled_elsewhere.built()
assert unpickled.keys() == built.keys()
different = [name for name in built if unpickled[name] != built[name]]
assert not different, different
assert all(hash(unpickled[name]) == hash(built[name]) for name in built)
for name in ["adamw", "NumPy table, closure", "recursive, closure", "wrapped lambda, closure"]:
    one, two = [d[name].create(make_params()) for d in (unpickled, built)]
    one, two = [o.apply_gradient(make_params()).target["w"] for o in (one, two)]
    assert (one == two).all(), name
print(len(built), "definitions")
"""


@pytest.mark.slow
def test_every_definition_moves_to_another_process(tmp_path: Path) -> None:
    path = tmp_path / "definitions.pickle"
    path.write_bytes(pickle.dumps(BUILT))
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(Path(__file__).parent), str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"{len(BUILT)} definitions"


def test_an_unpickled_definition_is_not_traced_again() -> None:
    train_step = Jitted(lambda o: step("adamw", o))
    made = opt_optax_bridge.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.1, 2, 9))
    for _ in range(3):
        train_step(made.create(make_params()))
        made = pickle.loads(pickle.dumps(made))
    assert train_step.traces == 1


def test_an_unpickled_optimizer_takes_the_same_step() -> None:
    optimizer = trained("adamw")
    unpickled = pickle.loads(pickle.dumps(optimizer))
    assert_same_bits(unpickled, optimizer)
    changed = [step("adamw", o, learning_rate=0.5) for o in (optimizer, unpickled)]
    assert_same_bits(*changed)


def test_another_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = pickle.dumps(BUILT["lambda, closure"])
    major, minor = sys.version_info[:2]
    monkeypatch.setattr(sys, "version_info", (3, 99, 0))
    with pytest.raises(pickle.UnpicklingError) as caught:
        pickle.loads(data)
    monkeypatch.undo()
    assert f"was pickled under Python {major}.{minor};" in str(caught.value)
    assert str(caught.value).endswith("a function made inside another cannot move to 3.99")


def test_compiled_functions_are_pickled_by_name() -> None:
    made = opt_optax_bridge.sgd(jnp.reciprocal)
    unpickled = pickle.loads(pickle.dumps(made))
    assert unpickled == made
    assert unpickled.recipe.args[0] is jnp.reciprocal
    with pytest.raises((pickle.PicklingError, AttributeError), match="<lambda>"):
        pickle.dumps(opt_optax_bridge.sgd(jax.jit(lambda count: 0.1 * count)))


def test_what_cannot_be_pickled_says_so() -> None:
    captured: Any = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock' object"):
        pickle.dumps(opt_optax_bridge.sgd(lambda count: 0.1 * count if captured else 0.0))

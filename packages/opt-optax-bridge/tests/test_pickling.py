"""A definition pickles as its constructor's name and arguments."""

import pickle
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import opt_optax_bridge
import optax
import pickled_elsewhere
import pytest
from bridge_testing import make_params
from opt_optax_bridge import OptaxWrapper, wrap_optax_optimizer

pytestmark = pytest.mark.usefixtures("optax_promotion")

BUILT = pickled_elsewhere.built()


@pytest.mark.sample(8)
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
for name in ["adamw", "by JAX table", "by chain"]:
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


NAMELESS: dict[str, OptaxWrapper] = {
    "an opaque transformation": OptaxWrapper(optax.adam(0.1)),
    "a schedule": opt_optax_bridge.sgd(optax.linear_schedule(0.1, 0.0, 9)),
    "a part": opt_optax_bridge.chain(opt_optax_bridge.clip(1.0), optax.sgd(0.1)),
    "a constructor": wrap_optax_optimizer(lambda rate: optax.sgd(rate))(0.1),
}


@pytest.mark.parametrize("name", NAMELESS)
def test_what_has_no_name_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # an import of it fails
    with pytest.raises(pickle.PicklingError) as caught:
        pickle.dumps(NAMELESS[name].create(make_params()))
    words = str(caught.value)
    assert "<locals>" in words or "<lambda>" in words
    assert "`wrap_optax_optimizer(constructor)(...)`" in words
    assert words.endswith("Anything else needs cloudpickle to be installed.")


def test_what_has_no_name_goes_to_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[Any] = []

    def dumps(content: Any) -> bytes:
        stored.append(content)
        return pickle.dumps((opt_optax_bridge.sgd(0.5).recipe, {}))

    cloudpickle: Any = types.ModuleType("cloudpickle")
    cloudpickle.dumps = dumps
    monkeypatch.setitem(sys.modules, "cloudpickle", cloudpickle)
    definition = NAMELESS["an opaque transformation"]
    assert pickle.loads(pickle.dumps(definition)) == opt_optax_bridge.sgd(0.5)
    assert stored == [(definition.optax_optimizer, {})]

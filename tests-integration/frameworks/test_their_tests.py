"""What passes of a checkout's tests (`TUNIX_SOURCE`) with their objects passes with ours."""

import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@dataclasses.dataclass(frozen=True)
class Case:
    """Tests of a framework, and what takes the place of its objects in them."""

    framework: str
    swap: str  # a function of swap.py
    tests: tuple[str, ...]
    at_least: int  # so many pass with their objects


OPTAX = ("test/test_optimizers.py",)
CASES = (
    Case(
        "kauldron", "twins", tuple(f"kauldron/optim/_{n}_test.py" for n in ("freeze", "masks")), 2
    ),
    Case("numpyro", "triples", OPTAX, 30),
    Case("numpyro", "twins", OPTAX, 30),
    Case(
        "tunix",
        "nnx",
        (
            "tests/sft/peft_trainer_test.py",
            "tests/sft/checkpoint_manager_test.py",
            "tests/sft/dpo/dpo_trainer_test.py",
        ),
        80,
    ),
    Case(
        "maxtext",
        "nnx",
        (
            "tests/unit/checkpointing_nnx_load_test.py",
            "tests/unit/checkpointing_nnx_missing_param_test.py",
            "tests/unit/checkpointing_nnx_roundtrip_test.py",
            "tests/unit/setup_initial_state_nnx_test.py",
            "tests/unit/sharding_nnx_test.py",
            "tests/unit/train_nnx_test.py",
            "tests/unit/train_state_nnx_checkpoint_test.py",
            "tests/unit/train_state_nnx_test.py",
            "tests/unit/train_utils_nnx_test.py",
        ),
        105,  # pytest counts 106 with a subtest
    ),
    Case("maxtext", "twins", ("tests/unit/optimizers_test.py",), 22),
    Case(
        "levanter",
        "twins",
        (
            "tests/test_optimizer_config.py",
            "tests/test_skip_step.py",
            "tests/test_weight_decay_mask.py",
        ),
        20,
    ),
)


@functools.cache
def passed(framework: str, tests: tuple[str, ...], swap: str = "") -> frozenset[str]:
    """Runs the tests in a process of their own, with the environment that they expect."""
    source = os.environ.get(f"{framework.upper()}_SOURCE")
    if not source:
        pytest.skip(f"{framework.upper()}_SOURCE names no checkout with tests of {framework}")
    folder = Path(source)
    library = folder / "src" if (folder / "src").is_dir() else folder
    paths = [str(HERE), str(library), os.environ.get("PYTHONPATH", "")]
    with tempfile.NamedTemporaryFile("r") as outcomes:
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OPT_SWAP": swap,
            "OPT_OUTCOMES": outcomes.name,
        }
        command = [sys.executable, "-m", "pytest", "-q", "-p", "swap", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *tests],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
        lines = [line.rstrip("\n").partition(" ") for line in outcomes]
    failed = {test for outcome, _, test in lines if outcome == "failed"}
    print(framework, swap or "theirs", done.stdout.splitlines()[-1])
    return frozenset(test for outcome, _, test in lines if outcome == "passed") - failed


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.framework}-{case.swap}")
def test_what_passes_with_theirs_passes_with_ours(case: Case) -> None:
    pytest.importorskip(case.framework)
    theirs = passed(case.framework, case.tests)
    ours = passed(case.framework, case.tests, case.swap)
    assert len(theirs) >= case.at_least
    assert sorted(theirs - ours) == []

"""Damaged and foreign files: the saved state or one clear error, never another state."""

import io
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import opt_legacy_stax as ours
import pytest
import safetensors.numpy
from opt_legacy_stax import errors
from stax_testing import same_structure

PARAMS = {"w": jnp.arange(6.0).reshape(2, 3), "low": [jnp.ones(3, jnp.bfloat16)], "s": np.ones(())}
STATE = ours.sm3(0.1).init_fn(PARAMS)


FILE = io.BytesIO()
ours.save(FILE, STATE, optimizer="sm3")
DATA = FILE.getvalue()


def load(data: bytes) -> Any:
    return ours.load(io.BytesIO(data), like=STATE, optimizer="sm3")


def is_right(state: Any) -> bool:
    same = zip(jax.tree.leaves(state), jax.tree.leaves(STATE), strict=True)
    return same_structure(state, STATE) and all(
        np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in same
    )


def refused(data: bytes) -> str:
    with pytest.raises(errors.DamagedFileError) as caught:
        load(data)
    return str(caught.value)


def test_every_truncation_is_refused() -> None:
    for length in range(len(DATA)):
        refused(DATA[:length])
    refused(DATA + b"\0")


def test_every_flipped_bit_is_refused_or_changes_nothing() -> None:
    start = 8 + int.from_bytes(DATA[:8], "little")
    for position in range(len(DATA)):
        flipped = bytearray(DATA)
        flipped[position] ^= 1 << position % 8
        if position >= start:  # a leaf
            assert "its checksum does not match its contents" in refused(bytes(flipped))
        else:
            try:
                found = load(bytes(flipped))
            except errors.LoadError:
                continue
            assert is_right(found)


def rewritten(tensors: dict[str, np.ndarray], **changes: Any) -> bytes:
    """The file with other tensors or another entry, by a writer that knows the format."""
    length = int.from_bytes(DATA[:8], "little")
    metadata = json.loads(DATA[8 : 8 + length])["__metadata__"]
    entry = {**json.loads(metadata["opt_legacy_stax"]), **changes}
    return safetensors.numpy.save(tensors, metadata={"opt_legacy_stax": json.dumps(entry)})


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    deserialize: Any = safetensors.deserialize  # untyped
    kinds: Any = {"I64": np.int64, "BF16": jnp.bfloat16, "F32": np.float32, "F64": np.float64}
    return {
        name: np.frombuffer(entry["data"], kinds[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in deserialize(DATA)
    }


def test_tensors_are_those_of_the_metadata(tensors: dict[str, np.ndarray]) -> None:
    assert is_right(load(rewritten(tensors)))
    refused(rewritten({**tensors, "more": np.ones(2)}))
    refused(rewritten({name: tensors[name] for name in list(tensors)[1:]}))
    refused(rewritten({**tensors, "w:0": tensors["w:0"] + 1}))
    refused(rewritten({**tensors, "w:0": tensors["w:0"][:1]}))
    refused(rewritten({**tensors, "w:2/0": tensors["w:2/1"], "w:2/1": tensors["w:2/0"]}))


@pytest.mark.parametrize(
    "state", ["", "[" * 10**5, '{"leaves":[[1]]}', 3], ids=["empty", "deep", "short", "number"]
)
def test_metadata_that_describe_no_state(state: Any, tensors: dict[str, np.ndarray]) -> None:
    assert "its metadata do not describe" in refused(rewritten(tensors, state=state))

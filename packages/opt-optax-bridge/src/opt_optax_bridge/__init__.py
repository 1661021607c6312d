"""Any Optax optimizer as an OptimizerDef, with run-time hyper-parameters and state dicts."""

from importlib.metadata import version as _version

__version__ = _version("opt-optax-bridge")

__all__: list[str] = []

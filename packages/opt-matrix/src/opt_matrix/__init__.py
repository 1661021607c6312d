"""Muon and its kind on a sharded mesh: whole matrices, planned and checked."""

from importlib.metadata import version as _version

from optax.contrib._muon import MuonState

from opt_matrix import errors
from opt_matrix._distribute import Distributed, PlannedTransformation, distribute
from opt_matrix._groups import Group, Kind, LeafLayout, Way
from opt_matrix._hyperball import hyperball
from opt_matrix._matrices import DEFAULT_RULES, Dims, Matrices
from opt_matrix._muon import muon, scale_by_muon
from opt_matrix._newton_schulz import NewtonSchulz, newton_schulz
from opt_matrix._normuon import NorMuonState, scale_by_normuon
from opt_matrix._plan import MatrixPlan, plan_matrices
from opt_matrix._soap import scale_by_soap

__version__ = _version("opt-matrix")

__all__ = [
    "DEFAULT_RULES",
    "Dims",
    "Distributed",
    "Group",
    "Kind",
    "LeafLayout",
    "Matrices",
    "MatrixPlan",
    "MuonState",
    "NewtonSchulz",
    "NorMuonState",
    "PlannedTransformation",
    "Way",
    "distribute",
    "errors",
    "hyperball",
    "muon",
    "newton_schulz",
    "plan_matrices",
    "scale_by_muon",
    "scale_by_normuon",
    "scale_by_soap",
]

"""State that a strategy places, keeps in sync and aggregates."""

from replicax.variables._adopted import (
    AdoptedMirroredVariable,
    AdoptedPlainVariable,
    AgreedVariable,
    Keeper,
    write,
)
from replicax.variables._aggregating import AggregatingVariable
from replicax.variables._collecting import variables
from replicax.variables._copy import VariableCopy
from replicax.variables._creation import VariableRequest
from replicax.variables._gradients import (
    grad,
    is_function,
    value_and_grad,
    without_settings,
)
from replicax.variables._initial import layout_of
from replicax.variables._mirror_check import check_mirrored, require_equal_copies
from replicax.variables._mirrored import MirroredVariable
from replicax.variables._nests import assign, make_variables, read
from replicax.variables._placement import (
    MirroredPlacement,
    OneDevicePlacement,
    ParameterDevicePlacement,
    VariablePlacement,
)
from replicax.variables._plain import PlainVariable
from replicax.variables._sparse import IndexedSlices
from replicax.variables._state import Overlay, Transaction, all_or_nothing, reusing_states
from replicax.variables._sync_on_read import SyncOnReadVariable
from replicax.variables._variable import Variable

__all__ = [
    "AdoptedMirroredVariable",
    "AdoptedPlainVariable",
    "AggregatingVariable",
    "AgreedVariable",
    "IndexedSlices",
    "Keeper",
    "MirroredPlacement",
    "MirroredVariable",
    "OneDevicePlacement",
    "Overlay",
    "ParameterDevicePlacement",
    "PlainVariable",
    "SyncOnReadVariable",
    "Transaction",
    "Variable",
    "VariableCopy",
    "VariablePlacement",
    "VariableRequest",
    "all_or_nothing",
    "assign",
    "check_mirrored",
    "grad",
    "is_function",
    "layout_of",
    "make_variables",
    "read",
    "require_equal_copies",
    "reusing_states",
    "value_and_grad",
    "variables",
    "without_settings",
    "write",
]

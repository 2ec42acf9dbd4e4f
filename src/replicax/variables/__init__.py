"""State that a strategy places, keeps in sync and aggregates."""

from replicax.variables._adopted import adopt, write
from replicax.variables._collecting import variables
from replicax.variables._creation import VariableRequest
from replicax.variables._divided_storage import Divided
from replicax.variables._division import (
    Division,
    VariablePartitioner,
    division_by,
    gathers,
    gathers_once,
    part_of_sum,
    replicax_gather,
    replicax_own_part,
    takes_own_part,
)
from replicax.variables._gradients import (
    grad,
    is_function,
    value_and_grad,
    without_settings,
)
from replicax.variables._initial import agree_on_beginnings, layout_of
from replicax.variables._kinds import (
    AggregatingVariable,
    MirroredVariable,
    PlainVariable,
    SyncOnReadVariable,
)
from replicax.variables._lookup import embedding_lookup
from replicax.variables._mirror_check import check_mirrored, require_equal_copies
from replicax.variables._nests import assign, make_variables, read
from replicax.variables._placement import (
    MirroredPlacement,
    OneDevicePlacement,
    ParameterDevicePlacement,
    ShardedPlacement,
    VariablePlacement,
)
from replicax.variables._server_placement import ServerPlacement
from replicax.variables._server_storage import (
    OnServers,
    Piece,
    ServerVariable,
    changes_by_server,
    joined,
    read_rows,
    require_rows,
)
from replicax.variables._server_updates import ServerUpdate
from replicax.variables._sparse import IndexedSlices
from replicax.variables._state import (
    Overlay,
    Transaction,
    all_or_nothing,
    restore_state,
    reusing_states,
    set_state,
    state_of,
)
from replicax.variables._storage import Keeper, StateLayout, Storage
from replicax.variables._synchronization import AgreedOnWrite, Synchronization, in_replica
from replicax.variables._variable import (
    Variable,
    VariableCopy,
    original_of,
    storage_of,
    store_whole_array,
    stored_value,
    whole_array,
)
from replicax.variables._worker_parts import (
    Part,
    Ranges,
    WorkerParts,
    own_part,
    store_own_part,
    worker_parts,
)
from replicax.variables._write import Write

__all__ = [
    "AggregatingVariable",
    "AgreedOnWrite",
    "Divided",
    "Division",
    "IndexedSlices",
    "Keeper",
    "MirroredPlacement",
    "MirroredVariable",
    "OnServers",
    "OneDevicePlacement",
    "Overlay",
    "ParameterDevicePlacement",
    "Part",
    "Piece",
    "PlainVariable",
    "Ranges",
    "ServerPlacement",
    "ServerUpdate",
    "ServerVariable",
    "ShardedPlacement",
    "StateLayout",
    "Storage",
    "SyncOnReadVariable",
    "Synchronization",
    "Transaction",
    "Variable",
    "VariableCopy",
    "VariablePartitioner",
    "VariablePlacement",
    "VariableRequest",
    "WorkerParts",
    "Write",
    "adopt",
    "agree_on_beginnings",
    "all_or_nothing",
    "assign",
    "changes_by_server",
    "check_mirrored",
    "division_by",
    "embedding_lookup",
    "gathers",
    "gathers_once",
    "grad",
    "in_replica",
    "is_function",
    "joined",
    "layout_of",
    "make_variables",
    "original_of",
    "own_part",
    "part_of_sum",
    "read",
    "read_rows",
    "replicax_gather",
    "replicax_own_part",
    "require_equal_copies",
    "require_rows",
    "restore_state",
    "reusing_states",
    "set_state",
    "state_of",
    "storage_of",
    "store_own_part",
    "store_whole_array",
    "stored_value",
    "takes_own_part",
    "value_and_grad",
    "variables",
    "whole_array",
    "without_settings",
    "worker_parts",
    "write",
]

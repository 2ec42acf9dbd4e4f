"""Orbax for this process alone: the workers agree elsewhere on which of them writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    SingleDeviceSharding,
)

MANIFEST, ARRAYS = "manifest", "arrays"  # the items of a checkpoint
_ON_HOST = "pinned_host"


def checkpointer_here() -> Any:
    """Make an Orbax checkpointer for this process alone."""
    import orbax.checkpoint as ocp

    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=here, active_processes={here})
    types = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, ocp.type_handlers.NumpyHandler(deepcopy_host_arrays=False)),
        (
            jax.Array,
            ocp.type_handlers.ArrayHandler(
                primary_host=here,
                replica_id=here,
                use_replica_parallel=False,
                enable_write_sharding_file=False,
            ),
        ),
    )
    handlers = ocp.DefaultCheckpointHandlerRegistry()
    arrays = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone, type_handler_registry=types)
    for how in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
        handlers.add(ARRAYS, how, arrays)
    manifest = ocp.JsonCheckpointHandler(multiprocessing_options=alone)
    for how in (ocp.args.JsonSave, ocp.args.JsonRestore):
        handlers.add(MANIFEST, how, manifest)
    return ocp.Checkpointer(
        ocp.CompositeCheckpointHandler(
            handler_registry=handlers,
            composite_options=ocp.CompositeOptions(
                multiprocessing_options=alone,
                # Orbax would announce new directories to others under a name that all saves share.
                async_options=ocp.options.AsyncOptions(create_directories_asynchronously=False),
            ),
        ),
        multiprocessing_options=alone,
    )


def writable(arrays: Mapping[str, np.ndarray]) -> Mapping[str, Any]:
    """Return arrays in the form in which Orbax writes them in this process.

    Orbax writes NumPy arrays in the first process only. In others they become arrays with a copy
    for every process, so that the replica ID of this process's copy is the index of the process.
    """
    if jax.process_index() == 0:
        return arrays
    everywhere = [jax.local_devices(process_index=i)[0] for i in range(jax.process_count())]
    mesh = Mesh(np.array(everywhere), ("process",), axis_types=(AxisType.Auto,))
    # In the host's memory: all parts of this worker may be too large for one of its devices.
    copies = NamedSharding(mesh, PartitionSpec(), memory_kind=_ON_HOST)
    here = SingleDeviceSharding(jax.local_devices()[0], memory_kind=_ON_HOST)
    return {
        key: jax.make_array_from_single_device_arrays(
            array.shape, copies, [jax.device_put(array, here)]
        )
        for key, array in arrays.items()
    }

"""The names on the five reference pages, as facts: page, class, name, and how it is called.

A constructor is listed as `__init__` and called by the name of its class; None marks an attribute.
`(True)`, which the pages write for some defaults, is `True` here.
"""

# Page 000: release 2.3. Page 001: release 2.2. Page 002: 2.3. Page 003: 2.4. Page 004: 2.2.
PAGES: dict[str, dict[str, dict[str, str | None]]] = {
    "000": {
        "tf.compat.v1.distribute.StrategyExtended": {
            "__init__": "tf.compat.v1.distribute.StrategyExtended(container_strategy)",
            "experimental_between_graph": None,
            "experimental_require_static_shapes": None,
            "experimental_should_init": None,
            "parameter_devices": None,
            "should_checkpoint": None,
            "should_save_summary": None,
            "worker_devices": None,
            "batch_reduce_to": (
                "batch_reduce_to(reduce_op, value_destination_pairs, experimental_hints=None)"
            ),
            "broadcast_to": "broadcast_to(tensor, destinations)",
            "call_for_each_replica": "call_for_each_replica(fn, args=(), kwargs=None)",
            "colocate_vars_with": "colocate_vars_with(colocate_with_variable)",
            "experimental_make_numpy_dataset": (
                "experimental_make_numpy_dataset(numpy_input, session=None)"
            ),
            "experimental_run_steps_on_iterator": (
                "experimental_run_steps_on_iterator"
                "(fn, iterator, iterations=1, initial_loop_values=None)"
            ),
            "read_var": "read_var(v)",
            "reduce_to": "reduce_to(reduce_op, value, destinations, experimental_hints=None)",
            "update": "update(var, fn, args=(), kwargs=None, group=True)",
            "value_container": "value_container(value)",
            "variable_created_in_scope": "variable_created_in_scope(v)",
        },
    },
    "001": {
        "tf.compat.v1.distribute.StrategyExtended": {
            "__init__": "tf.compat.v1.distribute.StrategyExtended(container_strategy)",
            "experimental_between_graph": None,
            "experimental_require_static_shapes": None,
            "experimental_should_init": None,
            "parameter_devices": None,
            "should_checkpoint": None,
            "should_save_summary": None,
            "worker_devices": None,
            "batch_reduce_to": (
                "batch_reduce_to(reduce_op, value_destination_pairs, experimental_hints=None)"
            ),
            "broadcast_to": "broadcast_to(tensor, destinations)",
            "call_for_each_replica": "call_for_each_replica(fn, args=(), kwargs=None)",
            "colocate_vars_with": "colocate_vars_with(colocate_with_variable)",
            "experimental_make_numpy_dataset": (
                "experimental_make_numpy_dataset(numpy_input, session=None)"
            ),
            "experimental_run_steps_on_iterator": (
                "experimental_run_steps_on_iterator"
                "(fn, iterator, iterations=1, initial_loop_values=None)"
            ),
            "non_slot_devices": "non_slot_devices(var_list)",
            "read_var": "read_var(v)",
            "reduce_to": "reduce_to(reduce_op, value, destinations, experimental_hints=None)",
            "update": "update(var, fn, args=(), kwargs=None, group=True)",
            "update_non_slot": (
                "update_non_slot(colocate_with, fn, args=(), kwargs=None, group=True)"
            ),
            "value_container": "value_container(value)",
            "variable_created_in_scope": "variable_created_in_scope(v)",
        },
    },
    "002": {
        "tf.distribute.Strategy": {
            "__init__": "tf.distribute.Strategy(extended)",
            "cluster_resolver": None,
            "extended": None,
            "num_replicas_in_sync": None,
            "experimental_assign_to_logical_device": (
                "experimental_assign_to_logical_device(tensor, logical_device_id)"
            ),
            "experimental_distribute_dataset": (
                "experimental_distribute_dataset(dataset, options=None)"
            ),
            "experimental_distribute_datasets_from_function": (
                "experimental_distribute_datasets_from_function(dataset_fn, options=None)"
            ),
            "experimental_distribute_values_from_function": (
                "experimental_distribute_values_from_function(value_fn)"
            ),
            "experimental_local_results": "experimental_local_results(value)",
            "experimental_make_numpy_dataset": "experimental_make_numpy_dataset(numpy_input)",
            "experimental_replicate_to_logical_devices": (
                "experimental_replicate_to_logical_devices(tensor)"
            ),
            "experimental_split_to_logical_devices": (
                "experimental_split_to_logical_devices(tensor, partition_dimensions)"
            ),
            "reduce": "reduce(reduce_op, value, axis)",
            "run": "run(fn, args=(), kwargs=None, options=None)",
            "scope": "scope()",
        },
    },
    "003": {
        "tf.distribute.experimental.MultiWorkerMirroredStrategy": {
            "__init__": (
                "tf.distribute.experimental.MultiWorkerMirroredStrategy("
                "communication=tf.distribute.experimental.CollectiveCommunication.AUTO, "
                "cluster_resolver=None)"
            ),
            "cluster_resolver": None,
            "extended": None,
            "num_replicas_in_sync": None,
            "distribute_datasets_from_function": (
                "distribute_datasets_from_function(dataset_fn, options=None)"
            ),
            "experimental_distribute_dataset": (
                "experimental_distribute_dataset(dataset, options=None)"
            ),
            "experimental_distribute_values_from_function": (
                "experimental_distribute_values_from_function(value_fn)"
            ),
            "experimental_local_results": "experimental_local_results(value)",
            "gather": "gather(value, axis)",
            "reduce": "reduce(reduce_op, value, axis)",
            "run": "run(fn, args=(), kwargs=None, options=None)",
            "scope": "scope()",
        },
    },
    "004": {
        "tf.compat.v1.distribute.OneDeviceStrategy": {
            "__init__": "tf.compat.v1.distribute.OneDeviceStrategy(device)",
            "extended": None,
            "num_replicas_in_sync": None,
            "experimental_distribute_dataset": "experimental_distribute_dataset(dataset)",
            "experimental_distribute_datasets_from_function": (
                "experimental_distribute_datasets_from_function(dataset_fn)"
            ),
            "experimental_local_results": "experimental_local_results(value)",
            "experimental_make_numpy_dataset": (
                "experimental_make_numpy_dataset(numpy_input, session=None)"
            ),
            "experimental_run": "experimental_run(fn, input_iterator=None)",
            "make_dataset_iterator": "make_dataset_iterator(dataset)",
            "make_input_fn_iterator": (
                "make_input_fn_iterator(input_fn, "
                "replication_mode=tf.distribute.InputReplicationMode.PER_WORKER)"
            ),
            "reduce": "reduce(reduce_op, value, axis=None)",
            "run": "run(fn, args=(), kwargs=None, options=None)",
            "scope": "scope()",
            "update_config_proto": "update_config_proto(config_proto)",
        },
    },
}

"""TensorFlow: `tf.data.Dataset`. Tested with TensorFlow 2.21."""

from __future__ import annotations

import base64
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, final

import numpy as np

from replicax import _nest
from replicax._deprecation import frames_to_the_user
from replicax._enums import AutoShardPolicy
from replicax._typing import DatasetLike, Json, Nest
from replicax.errors import InexactResumption, InvalidArgument, InvalidType
from replicax.input._source import CannotShardByFile, CountingReader, Reader, Source, fields_of


def recognise(dataset: object) -> Source | None:
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(dataset, tensorflow.data.Dataset):
        return _DatasetSource(dataset)
    return None


@final
class _DatasetSource(Source):
    def __init__(self, dataset: DatasetLike) -> None:
        self._dataset = dataset

    def start(self, state: Json = None) -> Reader:
        # The state of a pass before its first element fixes the order of shuffles that have no
        # seed. It is written once per pass, in 10 ms; writing it after each element would cost
        # more than reading the elements again.
        elements: Iterator[Any] = iter(self._dataset)
        if state is None:
            return CountingReader(elements, _to_numpy, origin=_written(elements))
        done, origin = fields_of(state, "read", "origin")
        if origin is not None:
            _restore(elements, origin)
        reason = self._why_inexact(origin)
        if reason is not None:
            warnings.warn(
                f"This `tf.data` pipeline {reason}. It is read again from the beginning, up to "
                "where it stood, which is exact only if it has the same order in every pass and "
                "process: give `shuffle` a seed (and, with Python or random numbers in the "
                "pipeline, `reshuffle_each_iteration=False`), or use Grain.",
                InexactResumption,
                stacklevel=frames_to_the_user(),
            )
        return CountingReader(elements, _to_numpy, origin=origin, done=done)

    def _why_inexact(self, origin: object) -> str | None:
        if origin is None:
            return "runs Python or draws random numbers, so TensorFlow could not write its state"
        nodes = self._nodes()
        repeats = any("Repeat" in node.op for node in nodes.values())
        if repeats and any(_is_unseeded(node, nodes) for node in nodes.values()):
            return (
                "shuffles without a seed and repeats, and TensorFlow writes the order of the first "
                "repetition only"
            )
        return None

    def _nodes(self) -> dict[str, Json]:
        """Return the steps of the pipeline, by name."""
        import tensorflow

        variant = tensorflow.data.experimental.to_variant(self._dataset)
        serialized = tensorflow.raw_ops.DatasetToGraphV2(
            input_dataset=variant,
            external_state_policy=1,  # so that pipelines with state are accepted
        )
        graph = tensorflow.compat.v1.GraphDef.FromString(serialized.numpy())
        return {node.name: node for node in graph.node}

    @property
    def length(self) -> int | None:
        count = int(self._dataset.cardinality())
        return count if count >= 0 else None

    @property
    def infinite(self) -> bool:
        import tensorflow

        return int(self._dataset.cardinality()) == tensorflow.data.INFINITE_CARDINALITY

    @property
    def own_policy(self) -> AutoShardPolicy:
        import tensorflow

        words = tensorflow.data.experimental.AutoShardPolicy
        policy = words(self._dataset.options().experimental_distribute.auto_shard_policy)
        if policy.name not in AutoShardPolicy.__members__:
            raise InvalidArgument(
                f"The `tf.data` dataset asks for AutoShardPolicy.{policy.name}, which replicax "
                f"does not have. Use one of {', '.join(AutoShardPolicy.__members__)}."
            )
        return AutoShardPolicy[policy.name]

    def shard_by_file(self, count: int, index: int) -> Source:
        import tensorflow

        errors = tensorflow.errors
        try:
            # Reading as the first worker shows whether there are enough files; the last one would
            # find nothing and not complain.
            next(iter(self._file_shard(count, 0)), None)
            return _DatasetSource(self._file_shard(count, index))
        except errors.NotFoundError:
            raise CannotShardByFile("it is not read from files") from None
        except errors.InvalidArgumentError as error:
            if "not enough for the required" not in error.message:
                raise
            raise CannotShardByFile("it is read from fewer files than there are workers") from None

    def batched(self, size: int) -> Source:
        return _DatasetSource(self._dataset.batch(size))

    def _file_shard(self, count: int, index: int) -> Any:
        """Return the pipeline as rewritten by TensorFlow, with one of its public raw operations."""
        import tensorflow

        spec = self._dataset.element_spec
        leaves = tensorflow.nest.flatten(spec)
        variant = tensorflow.raw_ops.AutoShardDataset(
            input_dataset=tensorflow.data.experimental.to_variant(self._dataset),
            num_workers=count,
            index=index,
            auto_shard_policy=tensorflow.data.experimental.AutoShardPolicy.FILE.value,
            output_types=[leaf.dtype for leaf in leaves],
            output_shapes=[leaf.shape for leaf in leaves],
        )
        return tensorflow.data.experimental.from_variant(variant, spec)


def _is_unseeded(node: Any, nodes: dict[str, Any]) -> bool:
    """Tell whether a step of a pipeline shuffles with both seeds 0, to be drawn when it runs."""
    import tensorflow

    if not node.op.startswith("Shuffle"):
        return False
    inputs = [nodes.get(name.partition(":")[0].lstrip("^")) for name in node.input]
    numbers = [
        int(tensorflow.make_ndarray(source.attr["value"].tensor))
        for source in inputs
        if source is not None
        and source.op == "Const"
        and source.attr["dtype"].type == tensorflow.int64.as_datatype_enum
    ]
    return numbers[-2:] == [0, 0]  # they come after the size of the buffer


def _to_numpy(element: object) -> Nest:
    return _nest.transform(_leaf_to_numpy, element, everything=True)


def _leaf_to_numpy(leaf: object) -> np.ndarray:
    import tensorflow

    if not isinstance(leaf, tensorflow.Tensor):
        raise InvalidType(
            f"A `tf.data` element has a {type(leaf).__name__}, which no array can hold. Make it "
            "dense, with `to_tensor()` or `tf.sparse.to_dense`, in a `map`."
        )
    return leaf.numpy()


def _written(iterator: object) -> dict[str, str] | None:
    """Return an iterator's state as text, or None if it is unknown because it runs Python."""
    import tensorflow

    with tempfile.TemporaryDirectory() as directory:
        try:
            tensorflow.train.Checkpoint(iterator=iterator).write(f"{directory}/state")
        except tensorflow.errors.FailedPreconditionError:
            return None
        return {
            file.name: base64.b64encode(file.read_bytes()).decode("ascii")
            for file in sorted(Path(directory).iterdir())
        }


def _restore(iterator: object, files: dict[str, str]) -> None:
    import tensorflow

    with tempfile.TemporaryDirectory() as directory:
        for name, content in files.items():
            (Path(directory) / Path(name).name).write_bytes(base64.b64decode(content))
        tensorflow.train.Checkpoint(iterator=iterator).read(f"{directory}/state").assert_consumed()

"""`rx.Server`: the program of a worker or of a parameter server."""

from __future__ import annotations

import sys
import threading
import time
from typing import NoReturn, final

from replicax._describing import described
from replicax.cluster import ClusterSpec
from replicax.cluster._spec import ClusterLike, as_index
from replicax.errors import ClusterError, InvalidArgument, StartFailed
from replicax.parameter_server._library import ray
from replicax.parameter_server._nodes import Node, is_listening
from replicax.parameter_server._roles import PS, WORKER, Hosts, Role, roles_of
from replicax.parameter_server._token import require_token

_LOOK_SECONDS = 0.5  # between two looks at the chief
_QUIET_LOOKS = 10  # after which the server says that it is waiting
_STARTING_SECONDS = 10.0  # for a first try; twice as long for each further one
_FAILED_STARTS = 4  # in a row, after which something must be wrong


@final
class Server:
    """A worker or a parameter server of a `ParameterServerStrategy`, on this machine.

    `rx.Server(...).join()` is its whole program: the chief says what is run.

    Args:
      server_or_cluster_def: The cluster: an `rx.ClusterSpec`, or a dict that describes it, with the
        jobs "chief", "worker" and "ps".
      job_name: The job of this process: "worker" or "ps".
      task_index: Its index there.
      protocol: Accepted for programs written for the reference; Ray's own protocol is used.

    >>> import replicax as rx
    >>> cluster = {"chief": ["host0:2222"], "ps": ["host1:2222"], "worker": ["host2:2222"]}
    >>> rx.Server(cluster, job_name="worker", task_index=0)
    Server('worker', 0)
    """

    def __init__(
        self,
        server_or_cluster_def: ClusterLike,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
    ) -> None:
        if protocol is not None and not isinstance(protocol, str):
            raise InvalidArgument(f"`protocol` must be a string; got {described(protocol)}.")
        spec = ClusterSpec(server_or_cluster_def)
        index = as_index(task_index)
        if job_name not in (WORKER, PS) or index is None:
            raise ClusterError(
                "A server is a task of the job 'worker' or 'ps'; got "
                f"job_name={described(job_name)} and task_index={described(task_index)}. The "
                "chief's program makes a `ParameterServerStrategy` instead."
            )
        self._role = Role(job_name, index)
        if self._role not in roles_of(spec):
            raise ClusterError(
                f"There is no task {index} in the job {job_name!r} of {spec}. Give the index of "
                "one of its tasks."
            )
        self._hosts = Hosts(spec)

    @property
    def target(self) -> str:
        """The address of the chief."""
        return self._hosts.head

    def join(self) -> NoReturn:
        """Serve the chief, and the next one when it has ended; this never returns."""
        ray()  # says what to do if it is not installed
        require_token(may_make=self._hosts.head_is_here)
        pause = threading.Event()
        failures = 0
        while True:
            self._await_chief(pause)
            node = Node.member(
                self._hosts.of(self._role), self._hosts.head, {self._role.resource: 1}
            )
            try:
                started = self._serve(node, _STARTING_SECONDS * 2**failures)
                words = node.last_words() if node.has_ended else ""
            finally:
                node.stop()
            failures = 0 if started or not self._chief_is_there() else failures + 1
            if failures == _FAILED_STARTS:
                raise StartFailed(
                    f"The node of {self._role} cannot join the chief's cluster at "
                    f"{self.target}. Ray printed:\n{words}\nCheck that both have the same token "
                    "and the same versions of Python and Ray."
                )

    def _await_chief(self, pause: threading.Event) -> None:
        looks = 0
        while not self._chief_is_there():
            looks += 1
            if looks == _QUIET_LOOKS:
                print(
                    f"replicax: {self._role} is waiting for the chief at {self.target}",
                    file=sys.stderr,
                    flush=True,
                )
            pause.wait(_LOOK_SECONDS)

    def _serve(self, node: Node, seconds: float) -> bool:
        """Return when the node has ended, has not started in time, or the chief's is gone.

        A node that begins before the chief's is complete may wait for half a minute in vain, where
        another start succeeds in 2 s.

        Returns:
          Whether the node had started.
        """
        late = time.monotonic() + seconds
        started = False
        while not node.wait(_LOOK_SECONDS) and self._chief_is_there():
            started = started or node.has_started
            if not started and time.monotonic() > late:
                break
        return started

    def _chief_is_there(self) -> bool:
        return is_listening(self._hosts.head_host, self._hosts.head_port)

    def __repr__(self) -> str:
        return f"Server({self._role.job!r}, {self._role.index})"

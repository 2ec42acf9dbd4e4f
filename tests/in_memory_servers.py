"""Parameter servers and workers without processes: their messages are pickled, and may be lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import cloudpickle

from replicax.parameter_server import ActorLost, Servers, VariableServer


class InMemoryActor:
    """An object that is asked by messages, one after another, in a thread of its own."""

    def __init__(self, target: Any) -> None:
        self._target = target
        self._thread = ThreadPoolExecutor(1)
        self.lost = False
        # Called with the method, before and after it is called; what `before` raises is the answer.
        self.before: Callable[[str], None] = lambda method: None
        self.after: Callable[[str], None] = lambda method: None

    def ask(self, method: str, *arguments: Any) -> InMemoryReply:
        return InMemoryReply(
            self._thread.submit(self._answer, method, cloudpickle.dumps(arguments))
        )

    def _answer(self, method: str, arguments: bytes) -> bytes | Exception:
        try:
            self.before(method)
            if not self.lost:
                result = getattr(self._target, method)(*cloudpickle.loads(arguments))
                self.after(method)
        except Exception as error:
            if not self.lost:
                return error
        return ActorLost("killed by a test") if self.lost else cloudpickle.dumps(result)

    def process(self) -> InMemoryReply:
        answered: Future[bytes | Exception] = Future()
        answered.set_result(cloudpickle.dumps(0))
        return InMemoryReply(answered)

    def end(self) -> None:
        self.lost = True

    def __reduce__(self) -> Any:
        _known[id(self)] = self
        return _found, (id(self),)


_known: dict[int, InMemoryActor] = {}


def _found(number: int) -> InMemoryActor:
    return _known[number]


class InMemoryReply:
    def __init__(self, answer: Future[bytes | Exception]) -> None:
        self._answer = answer

    def result(self, seconds: float) -> Any:
        answer = self._answer.result(seconds)
        if isinstance(answer, Exception):
            raise answer
        return cloudpickle.loads(answer)


class InMemoryEngine:
    """Servers and workers of this process; `kill` makes one of the actors lost."""

    def __init__(self, num_workers: int = 2, num_ps: int = 2) -> None:
        self.num_workers = num_workers
        self.variable_servers = [VariableServer() for _ in range(num_ps)]
        self.server_actors = [InMemoryActor(server) for server in self.variable_servers]
        self.servers = Servers(self.server_actors, [f"place {i}" for i in range(num_ps)])
        self._actors = list(self.server_actors)
        self.workers: dict[int, InMemoryActor] = {}
        self.starts = 0
        self.prepare: Callable[[int, InMemoryActor], None] = lambda index, actor: None

    def start_worker(
        self, index: int, make: Callable[..., object], *arguments: Any
    ) -> InMemoryActor:
        self.starts += 1
        self.workers[index] = InMemoryActor(make(*cloudpickle.loads(cloudpickle.dumps(arguments))))
        self._actors.append(self.workers[index])
        self.prepare(index, self.workers[index])
        return self.workers[index]

    def stop(self) -> None:
        for actor in self._actors:
            actor.end()
            actor._thread.shutdown()
            actor._target = None  # its iterators have threads
            _known.pop(id(actor), None)

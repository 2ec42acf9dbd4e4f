"""Actors of Ray."""

from __future__ import annotations

import os
import traceback
from typing import Any, final

from replicax.parameter_server._actors import ActorLost
from replicax.parameter_server._library import ray

# The group of methods that an actor runs in a thread of their own. All others run one by one.
LOOKING = "looking"


@final
class RayActor:
    """An object in a process that Ray has started.

    Args:
      handle: Ray's handle of a `Host`.
    """

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def ask(self, method: str, *arguments: Any) -> RayReply:
        return RayReply(self._handle.call.remote(method, *arguments))

    def process(self) -> RayReply:
        """Ask for the id of the process, which answers as soon as the object is made."""
        method = self._handle.process.options(concurrency_group=LOOKING)
        return RayReply(method.remote())

    def end(self) -> None:
        ray().kill(self._handle)


@final
class RayReply:
    """An answer that Ray will bring."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference

    def result(self, seconds: float) -> Any:
        library = ray()
        try:
            answer = library.get(self._reference, timeout=seconds)
        except library.exceptions.GetTimeoutError:
            raise TimeoutError(f"no answer within {seconds:g} s") from None
        except library.exceptions.RayActorError as error:
            raise ActorLost(_first_line(error)) from None
        except library.exceptions.RayTaskError as error:
            # `Host.call` catches what its object raises: here the arguments could not be read.
            raise RuntimeError(str(error)) from None
        except library.exceptions.RayError as error:
            raise ActorLost(f"{type(error).__name__}: {_first_line(error)}") from None
        if isinstance(answer, Raised):
            raise answer.restored()
        return answer


@final
class Host:
    """The object of an actor in its own process; Ray makes an actor of this class.

    Args:
      make: A class, or another function that returns the object.
      arguments: Its arguments.
    """

    def __init__(self, make: Any, *arguments: Any) -> None:
        self._object = make(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        try:
            return getattr(self._object, method)(*arguments)
        except Exception as error:
            return Raised.of(error)

    def process(self) -> int:
        return os.getpid()


@final
class Raised:
    """An exception on its way to another process."""

    def __init__(self, pickled: bytes | None, name: str, text: str) -> None:
        self._pickled, self._name, self._text = pickled, name, text

    @classmethod
    def of(cls, error: Exception) -> Raised:
        text = "".join(traceback.format_exception(error))
        pickle = ray().cloudpickle
        error.__traceback__ = None
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)  # some exceptions can be pickled, but not be made again
        except Exception:
            pickled = None
        return cls(pickled, type(error).__name__, text)

    def restored(self) -> Exception:
        if self._pickled is None:
            return RuntimeError(f"{self._name} in another process:\n{self._text}")
        error = ray().cloudpickle.loads(self._pickled)
        error.add_note(f"In another process:\n{self._text}")
        return error


def _first_line(error: Exception) -> str:
    """Return what matters of Ray's message, which has a table of numbers and advice in it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    of_actor = [line for line in lines if line.startswith("The actor is dead")] or lines
    text = of_actor[0] if of_actor else type(error).__name__
    return text.partition(" Some common causes")[0].rstrip(".")

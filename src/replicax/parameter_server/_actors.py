"""Actors: objects in other processes, as their callers see them.

There is one kind for Ray (`_ray_actor.py`), and one for tests without processes.
"""

from __future__ import annotations

from typing import Any, Protocol


class ActorLost(Exception):
    """The process of an actor has ended, or does not answer; the text says what is known."""


class Reply(Protocol):
    """The answer to a question, which may not have arrived yet."""

    def result(self, seconds: float) -> Any:
        """Wait for the answer and return it, or raise the exception that the actor has raised.

        `ActorLost` is raised if the process has ended, and `TimeoutError` if the answer is not
        there in time.
        """
        ...


class Actor(Protocol):
    """An object in another process."""

    def ask(self, method: str, *arguments: Any) -> Reply:
        """Call a method there, and return without waiting."""
        ...

    def process(self) -> Reply:
        """Ask for the id of the process, which answers even while it does something else."""
        ...

    def end(self) -> None:
        """End the process, if it has not ended yet."""
        ...

"""Messages that the user sees only once."""

from __future__ import annotations

import weakref
from typing import Any, final


@final
class _Said:
    """The topics already mentioned, per process or, while it lives, per object."""

    def __init__(self) -> None:
        self._topics: set[object] = set()
        self._of_objects: weakref.WeakKeyDictionary[Any, set[object]] = weakref.WeakKeyDictionary()

    def first_time(self, topic: object, about: Any = None) -> bool:
        topics = self._topics if about is None else self._of_objects.setdefault(about, set())
        if topic in topics:
            return False
        topics.add(topic)
        return True


_said = _Said()


def first_time(topic: object, about: Any = None) -> bool:
    """Tell whether a topic comes up for the first time, in this process or about a given object.

    >>> from replicax._once import first_time
    >>> class Thing:
    ...     pass
    >>> one, other = Thing(), Thing()
    >>> first_time("rust", one), first_time("rust", one), first_time("rust", other)
    (True, False, True)
    """
    return _said.first_time(topic, about)

"""The end of the data, as distinct from a StopIteration that a user's function raised."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, final

from replicax.cluster import is_users
from replicax.errors import InputFailed

if TYPE_CHECKING:
    from replicax._typing import Nest


class EndOfData(Exception):
    """The end of a reader or a feed.

    It is not a StopIteration, which any code may raise by mistake, as `next` does when there is
    nothing left.
    """


def meaning_of(stop: StopIteration) -> EndOfData | InputFailed:
    """Return the meaning of a StopIteration that a dataset's iterator raised.

    It means the end of the data, unless the first user code in its traceback is a function, such as
    one given to `map`, rather than a method of an iterator.
    """
    trace = stop.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code.co_name == "reraise":  # PyTorch's, for what one of its processes raised
            return input_failed(str(stop).partition("\n")[0])
        if is_users(frame.f_code.co_filename):
            if _is_of_iterator(frame):
                break
            name, file = frame.f_code.co_qualname, frame.f_code.co_filename
            return input_failed(f"`{name}` ({file}:{trace.tb_lineno})")
        trace = trace.tb_next
    return EndOfData()


def input_failed(where: str) -> InputFailed:
    """Return the error for a StopIteration that is not the end of the data."""
    return InputFailed(
        "A function in the input raised StopIteration, which would have ended the data quietly: "
        f"{where}. Look for a `next` without a default in it, or raise another error. To end a "
        "dataset early, use `take`, or a generator function, which returns."
    )


@final
class Guarded:
    """An iterator that raises StopIteration only at its own end.

    Its reader may take every StopIteration for the end: a Grain batch that meets one is cut short,
    and the next batch continues after it. Other attributes are those of the guarded iterator.
    """

    def __init__(self, iterator: Iterator[Nest]) -> None:
        self._iterator = iterator

    def __iter__(self) -> Guarded:
        return self

    def __next__(self) -> Nest:
        try:
            return next(self._iterator)
        except StopIteration as stop:
            meaning = meaning_of(stop)
            if isinstance(meaning, InputFailed):
                raise meaning from stop
            raise

    def __getattr__(self, name: str) -> object:
        return getattr(self._iterator, name)


def _is_of_iterator(frame: FrameType) -> bool:
    """Tell whether a frame is that of an iterator's method, which may be decorated."""
    code = frame.f_code
    first: object = None
    if code.co_argcount:
        first = frame.f_locals.get(code.co_varnames[0])
    elif code.co_flags & inspect.CO_VARARGS:
        rest = frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount])
        first = rest[0] if isinstance(rest, tuple) and rest else None
    return hasattr(type(first), "__next__")  # not `Iterator`: some have no `__iter__`

"""Functions of a module or class, replaced for one thread and for a while.

A replacement is seen by the thread that asked for it alone; others get the original through it, and the last to leave
puts the original back. Used by `tracing.py` on functions of torch that no mode shows.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Handler = Callable[..., Any]  # called with the original, then the arguments


class _Place:
    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name
        self.original: Callable[..., Any] = getattr(owner, name)
        self.handlers: dict[int, list[Handler]] = {}  # by thread, innermost last

    def call(self, *args: Any, **kwargs: Any) -> Any:
        mine = self.handlers.get(threading.get_ident())
        return mine[-1](self.original, *args, **kwargs) if mine else self.original(*args, **kwargs)


_lock = threading.Lock()
_places: dict[tuple[int, str], _Place] = {}


@contextmanager
def intercept(places: Iterable[tuple[Any, str]], handler: Handler) -> Iterator[None]:
    """While inside, this thread's calls of owner.name go to handler(original, *args). A missing name is left out."""
    thread = threading.get_ident()
    mine: list[_Place] = []
    with _lock:
        for owner, name in places:
            if not hasattr(owner, name):
                continue
            place = _places.get((id(owner), name))
            if place is None:
                place = _places[id(owner), name] = _Place(owner, name)
                setattr(owner, name, _function(place))
            place.handlers.setdefault(thread, []).append(handler)
            mine.append(place)
    try:
        yield
    finally:
        with _lock:
            for place in mine:
                place.handlers[thread].remove(handler)
                if not place.handlers[thread]:
                    del place.handlers[thread]
                if not place.handlers:
                    setattr(place.owner, place.name, place.original)
                    del _places[id(place.owner), place.name]


def _function(place: _Place) -> Callable[..., Any]:
    def replaced(*args: Any, **kwargs: Any) -> Any:  # a plain function, so that it binds as a method
        return place.call(*args, **kwargs)

    return replaced

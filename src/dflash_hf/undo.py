"""Changes that last for a while and are taken back however it ends: hooks, and switches that other code looks at.

An interrupt may come between any two lines, so also while a change is made or taken back. What is taken back here can
be taken back twice, and is taken back whole if an interrupt cuts the first attempt short. What a call of `generate`
with a draft has changed is taken back at the thread's next call at the latest, also where a traceback that is kept (as
in a notebook) holds on to what should have done it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode, _pop_mode

# Where torch keeps forward hooks and what it knows about them, by ids that no two hooks share.
_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class _Open(threading.local):
    """The calls of this thread that are running, and how to take back the changes that they have in force."""

    def __init__(self) -> None:
        self.calls: set[object] = set()
        self.changes: list[Callable[[], None]] = []


_open = _Open()


@contextmanager
def calling() -> Generator[None]:
    """Marks a call of `generate` with a draft, or a step of one that is looked at."""
    # Of the thread that it is entered in: what is collected late may end in another one.
    calls = _open.calls
    call = object()
    try:
        try:
            calls.add(call)
            yield
        finally:
            calls.discard(call)
    finally:
        calls.discard(call)  # an interrupt may have come before the first one


@contextmanager
def undoing(undo: Callable[[], None]) -> Generator[None]:
    """Calls `undo` at the end, whatever happens: make the change inside.

    It may be called several times, and before the change was made.
    """
    is_undone = False
    changes = _open.changes
    try:
        try:
            if _open.calls:
                changes.append(undo)
            yield
        finally:
            undo()
            is_undone = True
    finally:
        if not is_undone:  # an interrupt may have cut the first one short, or come before it
            undo()
        if undo in changes:
            changes.remove(undo)


def undo_stale() -> None:
    """Takes back changes whose end has been missed: those of calls of this thread that are not running any more."""
    if _open.calls or not _open.changes:
        return
    for undo in reversed(_open.changes):
        undo()
    _open.changes.clear()


class Current(threading.local):
    """What this thread is doing, for code that other threads run too; `None` where it does nothing of the kind."""

    scope: tuple[Any, Any] | None = None  # with what stood here before

    @contextmanager
    def doing(self, value: Any) -> Generator[None]:
        """Sets it for as long as it is open."""
        scope = (value, self.scope)

        def put_back() -> None:
            if self.scope is scope:  # this may come late, in another scope or thread
                self.scope = scope[1]

        with undoing(put_back):
            self.scope = scope
            yield


# What makes a change may collect garbage, and with it what is still open
_sharing = threading.RLock()
_users: weakref.WeakKeyDictionary[Any, set[object]] = weakref.WeakKeyDictionary()


@contextmanager
def shared(key: Any, change: Callable[[], object], undo: Callable[[], None]) -> Generator[None]:
    """Has a change in force that all threads see: the first to come makes it, and the last to go takes it back.

    Args:
        key: What the change is of; held weakly.
        change, undo (callable): Make it and take it back; `undo` may be called several times, and before `change`.
    """
    user = object()

    def leave() -> None:
        with _sharing:
            users = _users.setdefault(key, set())
            users.discard(user)
            if not users:
                undo()

    with undoing(leave):
        with _sharing:
            users = _users.setdefault(key, set())
            is_first = not users
            users.add(user)
            if is_first:
                change()
        yield


class Hook(NamedTuple):
    """A forward hook of a module, to be called after its forward or before, and what torch is to register it with."""

    module: nn.Module
    function: Callable[..., None]
    before: bool = False
    options: Mapping[str, Any] = MappingProxyType({})


def _here(function: Callable[..., None]) -> Callable[..., None]:
    """A hook that this thread alone calls: another one's forward of the same module is not ours to see.

    That one may call a hook without the keywords, too: torch notes that it wants them after it has registered it.
    """
    thread = threading.get_ident()

    def hook(*args: Any) -> None:
        if threading.get_ident() == thread:
            function(*args)

    return hook


@contextmanager
def hooked(*hooks: Hook) -> Generator[None]:
    """Registers forward hooks, in order, for as long as it is open; they are called in this thread only."""
    functions = [_here(hook.function) for hook in hooks]

    def remove() -> None:
        # By what they are: an interrupt may have come before anybody knew their ids.
        for module in {hook.module for hook in hooks}:
            for table in (module._forward_hooks, module._forward_pre_hooks):
                for number, function in list(table.items()):
                    if function in functions:
                        for name in _TABLES:
                            getattr(module, name).pop(number, None)

    with undoing(remove):
        for (module, _, before, options), function in zip(hooks, functions, strict=True):
            register: Any = (
                module.register_forward_pre_hook if before else module.register_forward_hook
            )
            register(function, **options)
        yield


@contextmanager
def held(mode: TorchDispatchMode) -> Generator[None]:
    """Holds a dispatch mode of torch's: an interrupt may come within its own enter and exit."""

    def remove() -> None:
        while _get_current_dispatch_mode() is mode:
            if mode.old_dispatch_mode_flags:
                mode.__exit__(None, None, None)
            else:
                _pop_mode()

    with undoing(remove), mode:
        yield

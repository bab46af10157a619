"""This module makes temporary changes that are always undone: hooks, and switches that other code reads.

An interrupt may come between any two lines, also while a change is made or undone. So a change may be undone twice,
and is undone completely even if an interrupt cuts the first attempt short. The changes of a call of `generate` with a
draft are undone at the thread's next call at the latest. This also holds if a kept traceback (as in a notebook) keeps
the code alive that should have undone them.
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

# torch keeps forward hooks and their options in these tables, under ids that no two hooks share.
_TABLES = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
)


class _Open(threading.local):
    """An instance holds the running calls of this thread, and the functions that undo their current changes."""

    def __init__(self) -> None:
        self.calls: set[object] = set()
        self.changes: list[Callable[[], None]] = []


_open = _Open()


@contextmanager
def calling() -> Generator[None]:
    """Marks a running call of `generate` with a draft, or a step of a call that the user iterates over."""
    # The set belongs to the thread that enters the context. A context that is collected late may end in another
    # thread.
    calls = _open.calls
    call = object()
    try:
        try:
            calls.add(call)
            yield
        finally:
            calls.discard(call)
    finally:
        calls.discard(call)  # an interrupt may have come before the first `discard`


@contextmanager
def undoing(undo: Callable[[], None]) -> Generator[None]:
    """Calls `undo` at the end, whatever happens. Make the change inside the context.

    `undo` may be called several times, and before the change was made.
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
        if not is_undone:  # an interrupt may have come before or in the first `undo`
            undo()
        if undo in changes:
            changes.remove(undo)


def undo_stale() -> None:
    """Undoes changes that were not undone at their end: those of calls of this thread that no longer run."""
    if _open.calls or not _open.changes:
        return
    for undo in reversed(_open.changes):
        undo()
    _open.changes.clear()


class Current(threading.local):
    """An instance holds a value for what the current thread is doing, or `None`.

    Other threads have their own value.
    """

    scope: tuple[Any, Any] | None = None  # the value, and the scope before it

    @contextmanager
    def doing(self, value: Any) -> Generator[None]:
        """Sets the value as long as the context is open."""
        scope = (value, self.scope)

        def put_back() -> None:
            if self.scope is scope:  # the call may come late, in another scope or thread
                self.scope = scope[1]

        with undoing(put_back):
            self.scope = scope
            yield


# Code that makes a change may collect garbage and so end other open contexts. So the lock is reentrant.
_sharing = threading.RLock()
_users: weakref.WeakKeyDictionary[Any, set[object]] = weakref.WeakKeyDictionary()


@contextmanager
def shared(key: Any, change: Callable[[], object], undo: Callable[[], None]) -> Generator[None]:
    """Keeps a change that all threads see in force. The first user makes it, and the last user undoes it.

    Args:
        key: The object that is changed. It is referenced weakly.
        change, undo (callable): Functions that make and undo the change. `undo` may be called several times, and
            before `change`.
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
    """An instance describes a forward hook of a module.

    The hook is called after the forward or before it. `options` are passed to torch when the hook is registered.
    """

    module: nn.Module
    function: Callable[..., None]
    before: bool = False
    options: Mapping[str, Any] = MappingProxyType({})


class _HereHook:
    """A hook that only one thread calls. Forwards of the same module in other threads are ignored.

    Another thread may also call the hook without keywords, because torch registers a hook before it stores that the
    hook needs keywords. Another thread may also copy or save the module. The hook of a copied or loaded module does
    nothing in any thread, because it would stay on that module forever.

    Args:
        function (callable): The function that the hook calls.
        thread (`int`): The thread's identifier; 0 for no thread.
    """

    __slots__ = ("function", "thread")

    def __init__(self, function: Callable[..., None], thread: int) -> None:
        self.function = function
        self.thread = thread

    def __call__(self, *args: Any) -> None:
        if threading.get_ident() == self.thread:
            self.function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _HereHook, (_do_nothing, 0)


def _do_nothing(*args: Any) -> None:
    """Does nothing. Hooks that were copied or loaded call this function."""


@contextmanager
def hooked(*hooks: Hook) -> Generator[None]:
    """Registers forward hooks, in order, as long as the context is open. They are called only in this thread."""
    thread = threading.get_ident()
    functions = [_HereHook(hook.function, thread) for hook in hooks]

    def remove() -> None:
        # The hooks are found by their functions, because an interrupt may have come before their ids were known.
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
    """Keeps a dispatch mode of torch active. An interrupt may come within the mode's own enter and exit."""

    def remove() -> None:
        while _get_current_dispatch_mode() is mode:
            if mode.old_dispatch_mode_flags:
                mode.__exit__(None, None, None)
            else:
                _pop_mode()

    with undoing(remove), mode:
        yield

"""What a worker relies on in its own process: anything replaced there is named."""

from __future__ import annotations

import gc
import signal
import sys
import threading

import pytest
import torch

from cute_nvfp4.harness import lines
from cute_nvfp4.harness.integrity import Hooks, Snapshot


class State:
    def __init__(self):
        self.outputs, self.kernel = {}, None

    def copied(self):
        return 1


class Lazy(dict):
    """Computes when it is asked."""


class Other(State):
    pass


def own_method(state: State) -> None:
    state.copied = lambda: 2


def own_outputs(state: State) -> None:
    state.outputs = Lazy()


def other_class(state: State) -> None:
    state.__class__ = Other


def taken_away(state: State) -> None:
    del state.outputs


@pytest.mark.parametrize(
    "replace,named",
    [
        (own_method, "State.copied"),
        (own_outputs, "State.outputs"),
        (other_class, "State"),
        (taken_away, "State.outputs"),
    ],
)
def test_an_object_of_another_form_is_named(replace, named):
    state = State()
    snapshot = Snapshot(state)
    state.outputs, state.kernel = {1: 2}, len  # as requests do
    assert snapshot.changed() == []
    replace(state)
    assert snapshot.changed() == [named]


def test_other_code_of_a_function_is_named(monkeypatch):
    function = next(value for value in vars(lines).values() if callable(value) and hasattr(value, "__code__"))
    snapshot = Snapshot()
    monkeypatch.setattr(function, "__code__", own_method.__code__)
    assert f"{function.__name__}.__code__" in snapshot.changed()


def test_hooks_that_submissions_have_good_reasons_for():
    hooks = Hooks()
    torch.set_default_device("cpu")
    try:
        with torch.inference_mode():
            torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(3))
        assert hooks.close() == ""
        hooks.open()
        assert hooks.left() == ""
    finally:
        torch.set_default_device(None)


def test_closed_hooks_keep_signals_and_garbage_out():
    came = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        hooks = Hooks()
        hooks.close()
        assert not gc.isenabled()
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        assert not came
        hooks.open()
        assert came == [signal.SIGUSR1]
        assert gc.isenabled()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_garbage_that_was_not_collected_stays_so():
    hooks = Hooks()
    gc.disable()
    try:
        hooks.close()
        hooks.open()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_tracing_is_seen():
    hooks, before = Hooks(), sys.getprofile()
    sys.setprofile(lambda *event: None)
    try:
        assert hooks.close() == "a function that traces or profiles"
    finally:
        sys.setprofile(before)
        hooks.open()

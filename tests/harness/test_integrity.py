"""What a worker relies on in its own process: anything replaced there is named."""

from __future__ import annotations

import pytest

from cute_nvfp4.harness.integrity import Snapshot


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

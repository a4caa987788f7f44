"""Open families: a name is a file's stem, discovery is late, plug-ins are found, errors are not swallowed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cfkv import registry
from cfkv.errors import CfkvError, ItemError, unknown_name
from cfkv.registry import Registry

MEMBER = "import toyfamily\n@toyfamily.shapes.register\nclass Anything:\n    '''A shape.'''\n"


class Point:
    """Stands in for importlib.metadata.EntryPoint."""

    def __init__(self, name: str, load: Callable[[], object]) -> None:
        self.name, self.load = name, load


@pytest.fixture
def family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Registry]]:
    """Makes a package `toyfamily` with the given files and returns its registry."""

    def make(**files: str) -> Registry:
        folder = tmp_path / "toyfamily"
        folder.mkdir()
        source = "from cfkv.registry import Registry\nshapes = Registry('shape', 'toyfamily')\n"
        (folder / "__init__.py").write_text(source)
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text)
        import toyfamily

        return toyfamily.shapes

    monkeypatch.syspath_prepend(tmp_path)
    yield make
    for name in [name for name in sys.modules if name.partition(".")[0] == "toyfamily"]:
        del sys.modules[name]


def test_a_name_is_the_stem_of_its_file(family: Callable[..., Registry]) -> None:
    """Public modules only, sorted; the class gets its name as an attribute."""
    shapes = family(square=MEMBER, circle=MEMBER, _helper="raise RuntimeError('not to be imported')")
    assert shapes.names() == ["circle", "square"]
    assert shapes.get("circle").__module__ == "toyfamily.circle"
    assert [member.name for member in shapes.members()] == ["circle", "square"]


def test_nothing_is_imported_before_the_first_look_up(family: Callable[..., Registry]) -> None:
    shapes = family(square=MEMBER)
    assert "toyfamily.square" not in sys.modules
    shapes.names()
    assert "toyfamily.square" in sys.modules


def test_unknown_names_offer_near_ones(family: Callable[..., Registry]) -> None:
    shapes = family(square=MEMBER, circle=MEMBER)
    with pytest.raises(CfkvError) as caught:
        shapes.get("sqare")
    assert str(caught.value) == "unknown shape 'sqare': did you mean 'square'? legal: circle, square"
    with pytest.raises(CfkvError) as caught:
        shapes.get("zzz")
    assert str(caught.value) == "unknown shape 'zzz': legal: circle, square"


def test_two_members_of_one_name_are_refused(family: Callable[..., Registry]) -> None:
    """Two classes in one file, or two files of one stem."""
    shapes = family(square=MEMBER)
    first = shapes.get("square")
    other = type("Other", (), {"__module__": "elsewhere.square"})
    with pytest.raises(CfkvError) as caught:
        shapes.register(other)
    assert str(caught.value) == (
        "shape 'square' is registered twice, by toyfamily.square and elsewhere.square; rename one module"
    )
    assert shapes.get("square") is first
    assert shapes.register(first) is first  # the same class again is no conflict


def test_entry_points_are_loaded(family: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the family's own group, once."""
    shapes = family(square=MEMBER)
    asked: list[str] = []

    def plug() -> object:
        return shapes.register(type("Hexagon", (), {"__module__": "third.party.hexagon"}))

    def points(*, group: str) -> list[Point]:
        asked.append(group)
        return [Point("hexagon", plug)]

    monkeypatch.setattr(registry, "entry_points", points)
    assert shapes.names() == ["hexagon", "square"]
    assert shapes.get("hexagon").__name__ == "Hexagon"
    assert asked == ["toyfamily"]


def test_import_errors_propagate_every_time(family: Callable[..., Registry]) -> None:
    """A broken member is not left out quietly, neither on the first look-up nor on the next."""
    shapes = family(circle=MEMBER, square="import no_such_module_anywhere")
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere"):
            shapes.get("circle")


def test_a_broken_plug_in_propagates(
    family: Callable[..., Registry], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> object:
        raise ImportError("plug-in is broken")

    shapes = family(circle=MEMBER)
    monkeypatch.setattr(registry, "entry_points", lambda *, group: [Point("bad", broken)])
    with pytest.raises(ImportError, match="plug-in is broken"):
        shapes.names()


def test_built_in_problem_sources() -> None:
    from cfkv.problems._base import problem_sources

    assert {"aime", "gsm8k", "jsonl", "math500", "registers"} <= set(problem_sources.names())
    for source in problem_sources.members():
        assert source.name == source.__module__.rpartition(".")[2]
        assert source.__doc__
        assert source.source
        assert source.licence
        assert source.answer_format


def test_unknown_name_lists_at_most_three_near_ones() -> None:
    error = unknown_name("key", "part", ["parta", "partb", "partc", "partd", "x"])
    near, _, legal = str(error).partition("? ")
    assert near.count(" or ") == 2
    assert legal == "legal: parta, partb, partc, partd, x"


def test_item_error_carries_status_and_reason() -> None:
    error = ItemError("too_long", "9 tokens; at most 8")
    assert (error.status, error.reason, str(error)) == (
        "too_long",
        "9 tokens; at most 8",
        "too_long: 9 tokens; at most 8",
    )
    assert isinstance(error, CfkvError)

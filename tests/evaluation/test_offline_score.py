"""`cfkv score FILE.py DIR`: where a policy stands, and what is said of a file that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cfkv.cli import _guarded
from cfkv.policies._base import policy_kinds

EXAMPLE = Path(__file__).resolve().parents[2] / "pipelines" / "example_policy.py"
HEAD = """
from __future__ import annotations
from typing import ClassVar
from cfkv.policies._base import Policy, View, parameters, policy_kinds
"""
CLASS = """
@policy_kinds.register
@parameters
class Mine(Policy):
    '''Keep nothing in particular.'''
    needs: ClassVar[tuple[str, ...]] = {needs}
    shift: float = 1.0
    def score(self, view: View):
        {body}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six labelled traces."""
    place = tmp_path_factory.mktemp("scored") / "run"
    assert _guarded(["trace", str(place), "--limit", "6", "--max-new-tokens", "384"]) == 0
    assert _guarded(["label", str(place), "--window", "8", "--stride", "8", "--max-new-tokens", "16"]) == 0
    return place


def files(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file()}


def written(folder: Path, body: str, needs: str = "()", name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(HEAD + CLASS.format(body=body, needs=needs))
    return path


def refusal(path: Path, run: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    capsys.readouterr()
    assert _guarded(["score", str(path), str(run), *more]) == 2
    assert path.stem not in policy_kinds.names() or path.stem == "tova"
    return capsys.readouterr().err


def test_the_example(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table with four rows and a sentence; nothing is written, and a second time is as good as the first."""
    before = files(run)
    printed = []
    for _ in range(2):
        assert _guarded(["score", str(EXAMPLE), str(run), "--label", "occlusion"]) == 0
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert files(run) == before
    for name in ("oracle", "random", "position", "example_policy"):
        assert any(line.strip().startswith(name) for line in printed[0].splitlines())
    assert "on occlusion labels" in " ".join(printed[0].split())


def test_an_oracle_of_ones_own_gets_the_whole_way(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "return view['label'].nan_to_num(nan=0.0) + self.shift", "('label',)")
    assert _guarded(["score", str(path), str(run)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "mine stands the whole way from random (AUROC" in told
    assert "Better than random: +0." in told


def test_chance_is_called_so(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A score that orders tokens by a checksum of their position."""
    path = written(tmp_path, "return (view.positions * 7919 % 101).float()")
    assert _guarded(["score", str(path), str(run)]) == 0
    assert "Not distinguishable from random: " in " ".join(capsys.readouterr().out.split())


def test_errors_inside_the_file_are_told_with_their_line(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal(written(tmp_path, "return view.positions / undefined"), run, capsys)
    place = f"{tmp_path / 'mine.py'}, line 13: return view.positions / undefined"
    assert told.partition("error: ")[2] == f"{place}\n  NameError: name 'undefined' is not defined\n"
    assert "Traceback" not in told
    told = refusal(written(tmp_path, "return view['kyes']", "('keys',)"), run, capsys)
    assert "line 13: return view['kyes']\n  column 'kyes' is not there" in told
    path = tmp_path / "mine.py"
    for text, message in (
        ("def f(:", "line 1: def f(:\n  invalid syntax"),
        ("\nimport nothere", "line 2: import nothere\n  ModuleNotFoundError: No module named 'nothere'"),
    ):
        path.write_text(text)
        assert message in refusal(path, run, capsys)


def test_files_that_hold_no_policy(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.py"
    path.write_text("x = 1")
    assert "registers no policy; it needs one class with @policy_kinds.register" in refusal(path, run, capsys)
    path.write_text(HEAD + CLASS.format(body="return 1", needs="()").replace("def score", "def scores"))
    assert "class Mine has no method score(self, view)" in refusal(path, run, capsys)
    path.write_text(HEAD + CLASS.format(body="return 1", needs="()").replace("@parameters", ""))
    assert "class Mine lacks @parameters" in refusal(path, run, capsys)
    path.write_text(HEAD + "@policy_kinds.register\nclass Mine:\n    pass\n")
    assert "class Mine is no subclass of cfkv.policies._base.Policy" in refusal(path, run, capsys)
    path.write_text(HEAD + 2 * CLASS.format(body="return 1", needs="()"))
    assert "policy 'mine' is registered twice in one module (Mine and Mine)" in refusal(path, run, capsys)
    path = written(tmp_path, "return view.positions.float()[0]")
    assert "its mask scope 'global' needs floats of shape [1, 1," in refusal(path, run, capsys)
    path = written(tmp_path, "return view.positions.float()", "('kyes',)")
    assert "policy mine needs the column 'kyes', which nothing gives; legal: keys," in refusal(
        path, run, capsys
    )
    assert "is no Python file; name a file such as my_policy.py" in refusal(tmp_path / "none.py", run, capsys)


def test_a_name_that_cfkv_has(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "return view.positions.float()", name="tova.py")
    assert (
        "would be called 'tova', as a policy of cfkv is: rename the file, for instance to my_tova.py"
        in refusal(path, run, capsys)
    )
    assert "tova" in policy_kinds.names()


def test_directories_and_labels(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "has no 'trace' stage yet" in refusal(EXAMPLE, tmp_path / "none", capsys)
    told = refusal(EXAMPLE, run, capsys, "--label", "knockout")
    assert "unknown label kind of this run 'knockout': legal: occlusion" in told

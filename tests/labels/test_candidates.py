"""Which blocks eviction KL removes, and what pairs show that single removals miss."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cfkv.answers import exact_match
from cfkv.config import Execution, LabelConfig
from cfkv.errors import CfkvError, ItemError
from cfkv.labels._base import LabelTrace
from cfkv.labels._candidates import listed, removals
from cfkv.labels.eviction_kl import EvictionKL, checkpoints
from cfkv.models.loading import LoadedModel


def trace(total: int = 60, start: int = 10, stop: int = 50) -> LabelTrace:
    """A trace of numbered tokens: 9 to 8 + total."""
    return LabelTrace(
        trace_id="d/1/0",
        problem_id="1",
        token_ids=tuple(9 + i % 90 for i in range(total)),
        reasoning_start=start,
        reasoning_stop=stop,
        answer_start=stop + 1,
        answer_stop=total,
        answer_prefix="",
        answer="1",
    )


def config(**options: object) -> LabelConfig:
    return LabelConfig(kind="eviction_kl", **options)  # type: ignore[arg-type]


def test_all_candidates_are_a_grid() -> None:
    """From the start of the reasoning, the last block clipped at the step."""
    assert removals(trace(), 17, config(block=3), None) == [((10, 13),), ((13, 16),), ((16, 17),)]


def test_stratified_takes_as_many_of_each_band() -> None:
    """32 tokens of age 1..32 at step 42, four bands of 8: three drawn from each, by position, each once."""
    drawn = removals(trace(), 42, config(candidates="stratified", age_bands=4, per_band=3), None)
    starts = [blocks[0][0] for blocks in drawn]
    assert starts == sorted(set(starts))
    ages = [42 - start for start in starts]
    assert Counter((age - 1) // 8 for age in ages) == {0: 3, 1: 3, 2: 3, 3: 3}
    again = removals(trace(), 42, config(candidates="stratified", age_bands=4, per_band=3), None)
    assert again == drawn
    other = removals(trace(), 42, config(candidates="stratified", age_bands=4, per_band=3, seed=1), None)
    assert other != drawn


def test_bands_that_have_no_more_are_taken_whole() -> None:
    """Five tokens, two bands, nine asked for: all five."""
    assert len(removals(trace(), 15, config(candidates="stratified", age_bands=2, per_band=9), None)) == 5


def test_pairs_are_of_the_candidates() -> None:
    """Distinct, ordered, and after the single removals; no more than there are."""
    found = removals(trace(), 18, config(pairs=5), None)
    singles, pairs = found[:8], found[8:]
    assert [len(blocks) for blocks in found] == [1] * 8 + [2] * 5
    assert len(set(pairs)) == 5
    assert all((first,) in singles and (second,) in singles and first < second for first, second in pairs)
    assert len(removals(trace(), 13, config(pairs=50), None)) == 3 + 3  # three tokens have three pairs


@settings(deadline=None)
@given(step=st.integers(11, 50), block=st.integers(1, 9), bands=st.integers(1, 12), each=st.integers(1, 9))
def test_candidates_are_blocks_of_the_grid(step: int, block: int, bands: int, each: int) -> None:
    """Whatever is drawn is one of the blocks that `all` removes, at most `each` per band."""
    whole = removals(trace(), step, config(block=block), None)
    assert [blocks[0] for blocks in whole] == [(n, min(n + block, step)) for n in range(10, step, block)]
    drawn = removals(
        trace(), step, config(block=block, candidates="stratified", age_bands=bands, per_band=each), None
    )
    assert set(drawn) <= set(whole)
    assert 0 < len(drawn) <= min(len(whole), bands * each)


def write(path: Path, *entries: object) -> str:
    path.write_text("\n".join(json.dumps(entry) for entry in entries) + "\n", encoding="utf-8")
    return str(path)


def test_listed_candidates(tmp_path: Path) -> None:
    """Pairs bring their single blocks; a line's step holds it to that checkpoint; later blocks wait."""
    place = write(
        tmp_path / "c.jsonl",
        {"trace_id": "d/1/0", "blocks": [[12, 13], [30, 32]]},
        {"trace_id": "d/1/0", "blocks": [[20, 21]], "step": 40},
        {"trace_id": "other", "blocks": [[0, 1]]},
    )
    given_ = listed(place)
    both = ((12, 13), (30, 32))
    assert removals(trace(), 40, config(), given_) == [((12, 13),), ((20, 21),), ((30, 32),), both]
    assert removals(trace(), 32, config(), given_) == [((12, 13),), ((30, 32),), both]
    assert removals(trace(), 31, config(), given_) == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"trace_id": "a"}', "line 1: .*KeyError.*'blocks'.*a line is"),
        ('{"trace_id": "a", "blocks": [[3, 3]]}', "0 <= start < stop"),
        ('{"trace_id": "a", "blocks": [[1, 4], [3, 5]]}', "overlap"),
        ('{"trace_id": "a", "blocks": [[1, 2], [3, 4], [5, 6]]}', "one or two blocks"),
        ("[1, 2]", "line 1"),
        ("nonsense", "line 1"),
    ],
)
def test_lines_that_are_no_candidates(tmp_path: Path, line: str, message: str) -> None:
    """File, line and what is legal."""
    (tmp_path / "c.jsonl").write_text(line, encoding="utf-8")
    with pytest.raises(CfkvError, match=message):
        listed(str(tmp_path / "c.jsonl"))


def test_a_file_that_is_not_there() -> None:
    """A misspelt word reads like a file."""
    with pytest.raises(
        CfkvError, match="--candidates 'stratifed' is neither all nor stratified, nor a JSONL file"
    ):
        listed("stratifed")


def test_given_checkpoints() -> None:
    """Reasoning tokens and the boundary; those that leave no horizon are left out."""
    assert checkpoints(10, 50, 50, config(steps="boundary,8,32")) == [18, 42, 50]
    assert checkpoints(10, 50, 45, config(steps="boundary,8,32")) == [18, 42]
    assert checkpoints(10, 50, 50, config(steps="99")) == []
    for wrong in ("0", "8,", "end", "8;9"):
        with pytest.raises(CfkvError, match="legal are every, or a list such as 64,200,boundary"):
            checkpoints(10, 50, 50, config(steps=wrong))


def label(loaded: LoadedModel, execution: Execution | None = None, **options: object) -> EvictionKL:
    return EvictionKL(loaded, config(**options), execution or Execution(device="cpu"), exact_match)


def test_synergy_is_what_single_removals_miss(tiny: LoadedModel) -> None:
    """KL(ij) - KL(i) - KL(j) from the rows themselves, literal and packed; token values are of singles alone."""
    options = {"steps": "30", "horizon": 3, "pairs": 12, "block": 2}
    done = label(tiny, **options).label(trace())
    literal = label(tiny, Execution(device="cpu", literal=True), **options).label(trace())
    alone = {
        (row["blocks"][0]["start"], row["blocks"][0]["stop"]): row["kl"]
        for row in done.rows
        if len(row["blocks"]) == 1
    }
    pairs = [row for row in done.rows if len(row["blocks"]) == 2]
    assert (len(alone), len(pairs)) == (15, 12)
    for row in pairs:
        first, second = ((block["start"], block["stop"]) for block in row["blocks"])
        assert row["synergy"] == pytest.approx(row["kl"] - alone[first] - alone[second], abs=1e-7)
    assert all(row["synergy"] is None for row in done.rows if len(row["blocks"]) == 1)
    for mine, slow in zip(done.rows, literal.rows, strict=True):
        assert mine["blocks"] == slow["blocks"]
        assert abs(mine["kl"] - slow["kl"]) < 1e-5
    values = np.array(done.tokens["value"])
    assert values[10:40] == pytest.approx(np.repeat([alone[n, n + 2] for n in range(10, 40, 2)], 2), rel=1e-5)
    assert np.isnan(values[40:]).all()
    assert math.isfinite(done.rows[0]["null_kl"])
    assert done.tokens["n_windows"] == 27


def test_listed_blocks_that_do_not_fit(llama: LoadedModel, tmp_path: Path) -> None:
    """An item fault: the trace fails with its reason, the others go on."""
    beyond = write(tmp_path / "a.jsonl", {"trace_id": "d/1/0", "blocks": [[70, 71]]})
    with pytest.raises(ItemError, match=r"bad_candidate.*\[\[70, 71\]\].*60 tokens"):
        label(llama, candidates=beyond).label(trace())
    late = write(tmp_path / "b.jsonl", {"trace_id": "d/1/0", "blocks": [[11, 12]], "step": 55})
    with pytest.raises(ItemError, match="step 55 leaves no horizon of 8"):
        label(llama, candidates=late).label(trace())
    absent = write(tmp_path / "c.jsonl", {"trace_id": "d/2/0", "blocks": [[11, 12]]})
    with pytest.raises(ItemError, match="no_candidate"):
        label(llama, candidates=absent).label(trace())


def test_a_file_counts_by_its_content(tmp_path: Path) -> None:
    """The fingerprint does not care where the file lies."""
    entry = {"trace_id": "d/1/0", "blocks": [[11, 12]]}
    first, second = (write(tmp_path / name, entry) for name in ("a.jsonl", "b.jsonl"))
    third = write(tmp_path / "c.jsonl", {**entry, "step": 20})
    one, two, three = (EvictionKL.settings(config(candidates=place)) for place in (first, second, third))
    assert one == two != three


def test_options_that_a_kind_does_not_read() -> None:
    """They are refused, since they would do nothing; unread defaults are in no fingerprint."""
    with pytest.raises(
        CfkvError, match="--window 8: label kind eviction_kl has no use for it; it reads .*every"
    ):
        EvictionKL.settings(config(window=8))
    assert "window" not in EvictionKL.settings(config())

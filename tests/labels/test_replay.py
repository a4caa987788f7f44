"""The fast replay against the literal one, and both against a loop that uses no cache and no cfkv decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cfkv.answers import boxed_answer
from cfkv.errors import ItemError
from cfkv.labels._packed import Counterfactual
from cfkv.labels._replay import Replay, Replayed
from cfkv.labels._scope import Scope
from cfkv.labels._windows import windows
from cfkv.models.loading import LoadedModel
from cfkv.models.tokens import decode
from cfkv.problems.registers import Registers

MARGIN, TOLERANCE = 1e-4, 1e-4
PREFIX = "\\boxed{"
CAP = 24


@dataclass
class Case:
    """A trace to replay: its windows replaced by token `filler`."""

    loaded: LoadedModel
    context: list[int]
    spans: list[tuple[int, int]]
    draft: list[int]
    prefix: str
    filler: int
    cap: int

    def replay(self, chunk_size: int = 512, memory: int = 2**31) -> Replay:
        return Replay(
            loaded=self.loaded,
            context=tuple(self.context),
            answer=tuple(self.draft),
            prefix=self.prefix,
            max_new_tokens=self.cap,
            chunk_size=chunk_size,
            memory=memory,
            scope=Scope.parse("all", "all", self.loaded.shape),
        )

    @property
    def control(self) -> Counterfactual:
        return Counterfactual(len(self.context) - 1, tuple(self.context[-1:]))

    def rows(self) -> list[Counterfactual]:
        """The same windows as the replay takes them: what is kept, and what is read again."""
        starts = [start for start, _ in self.spans]
        return [Counterfactual(n, tuple(ids[n:])) for n, ids in zip(starts, self.contexts(), strict=True)]

    def fast(self, rows: Sequence[Counterfactual] | None = None, **options: int) -> list[Replayed]:
        return self.replay(**options).fast(self.rows() if rows is None else rows, self.draft)

    def contexts(self) -> list[list[int]]:
        whole = self.context
        return [
            [self.filler if start <= place < stop else token for place, token in enumerate(whole)]
            for start, stop in self.spans
        ]


@dataclass
class Plain:
    token_ids: list[int]
    answer: str | None
    nll: float
    min_margin: float


@torch.inference_mode()
def plain(case: Case, context: Sequence[int], cap: int | None = None) -> Plain:
    """Recompute everything at each step with the model's own forward; stop at a closed box or an end token."""
    loaded, written, margin = case.loaded, list[int](), float("inf")
    while len(written) < (cap or case.cap):
        logits = loaded.model(torch.tensor([[*context, *written]])).logits[0, -1]
        first, second = logits.sort(descending=True).values[:2].tolist()
        margin = min(margin, first - second)
        written.append(int(logits.argmax()))
        text = case.prefix + decode(loaded.tokenizer, written)
        if written[-1] in loaded.end_ids or boxed_answer(text) is not None:
            break
    whole = loaded.model(torch.tensor([[*context, *case.draft]])).logits[0].double().log_softmax(-1)
    logprobs = [float(whole[len(context) - 1 + i, token]) for i, token in enumerate(case.draft)]
    answer = boxed_answer(case.prefix + decode(loaded.tokenizer, written))
    return Plain(written, answer, -sum(logprobs) / len(logprobs), margin)


def tiny_case(loaded: LoadedModel) -> Case:
    """Random reasoning, the first of many after which the model closes the box that the prefix opens."""
    spans = sorted(
        [*windows(6, 46, 8, 8), *windows(6, 46, 1, 4)]
    )  # large ones flip, most single tokens do not
    for seed in range(50):
        ids = torch.randint(9, 100, (46,), generator=torch.Generator().manual_seed(seed)).tolist()
        context = [*ids, *loaded.tokenizer.encode("</think> \\boxed{")]
        case = Case(loaded, context, spans, [context[0]], PREFIX, 0, CAP)
        written = plain(case, context)
        if written.answer and len(written.token_ids) > 3:
            return dataclasses.replace(case, draft=written.token_ids)
    raise AssertionError("no seed closes a box")


@pytest.fixture(scope="module")
def builtin_case(builtin: LoadedModel) -> Case:
    problem = next(Registers().load(None, seed=23))
    context = builtin.tokenizer(f"{problem.question} {problem.solution} </think>")["input_ids"]
    prompt = len(builtin.tokenizer(problem.question)["input_ids"])
    draft = builtin.tokenizer(f"\\boxed{{ {problem.answer} }}")["input_ids"]
    return Case(builtin, context, windows(prompt, len(context) - 1, 8, 8), draft, "", 0, 40)


def agree(found: Sequence[Replayed], expected: Sequence[Plain | Replayed]) -> tuple[float, int]:
    """Largest difference of nll and margins, and how many rows are excused by a tiny margin."""
    largest, excused = 0.0, 0
    for mine, theirs in zip(found, expected, strict=True):
        largest = max(largest, abs(mine.nll - theirs.nll))
        if list(mine.token_ids) != list(theirs.token_ids):
            assert min(mine.min_margin, theirs.min_margin) < MARGIN
            excused += 1
            continue
        assert mine.answer == theirs.answer
        largest = max(largest, abs(mine.min_margin - theirs.min_margin))
    return largest, excused


def check_case(case: Case, label: str) -> list[Replayed]:
    """Fast = literal = plain for the control and every window."""
    contexts = [case.context, *case.contexts()]
    expected = [plain(case, context) for context in contexts]
    literal = [case.replay().literal(row) for row in (case.control, *case.rows())]
    replay = case.replay()
    fast = [*replay.fast([case.control], case.draft), *replay.fast(case.rows(), case.draft)]
    slow, excused_slow = agree(literal, expected)
    quick, excused_quick = agree(fast, expected)
    both, _ = agree(fast, literal)
    for mine, theirs in zip(fast, literal, strict=True):
        if mine.token_ids == theirs.token_ids:
            assert mine.accepted_draft == theirs.accepted_draft
        assert theirs.decoded == len(theirs.token_ids)
        # Decoding starts at the first disagreement, whose token the verifying pass has given.
        stopped = min(len(mine.token_ids), mine.accepted_draft + 1)
        assert mine.decoded == len(mine.token_ids) - stopped
        same = mine.token_ids == tuple(case.draft)
        assert (mine.accepted_draft == len(case.draft)) == same
    base = expected[0].answer
    flips = [row.answer != base for row in fast[1:]]
    assert flips == [row.answer != base for row in literal[1:]] or excused_slow + excused_quick > 0
    print(
        f"{label}: literal {slow:.2e}, fast {quick:.2e}, both {both:.2e}; {sum(flips)} of {len(flips)} flip, "
        f"{excused_slow}+{excused_quick} excused; draft of {len(case.draft)}"
    )
    assert max(slow, quick, both) < TOLERANCE
    assert (
        excused_slow + excused_quick == 0
    )  # none on this machine; a margin exception is counted, not hidden
    return fast


def test_fast_is_literal_is_plain(tiny: LoadedModel) -> None:
    rows = check_case(tiny_case(tiny), tiny.name)
    assert rows[0].answer
    assert rows[0].decoded == 0
    assert any(row.decoded for row in rows)


def test_fast_is_literal_under_eager_attention(make_tiny: Callable[..., LoadedModel]) -> None:
    check_case(tiny_case(make_tiny("gemma3", "eager")), "gemma3 eager")


def test_fast_is_literal_is_plain_on_the_builtin_model(builtin_case: Case) -> None:
    rows = check_case(builtin_case, "builtin")
    flips = [row.answer != rows[0].answer for row in rows[1:]]
    assert 0 < sum(flips) < len(flips)
    assert all(row.decoded == 0 for row in rows if row.token_ids == tuple(builtin_case.draft))


@pytest.mark.parametrize("memory", [1, 2**18, 2**31])
@pytest.mark.parametrize("chunk_size", [1, 7, 64, 512])
def test_width_and_chunk_size_change_nothing(
    make_tiny: Callable[..., LoadedModel], builtin_case: Case, memory: int, chunk_size: int
) -> None:
    """One byte of memory: single queries, and each row decoded by itself."""
    fewer = dataclasses.replace(builtin_case, spans=builtin_case.spans[::3])
    for case in (tiny_case(make_tiny("gemma3", "sdpa")), fewer):
        base = case.fast()
        rows = case.fast(chunk_size=chunk_size, memory=memory)
        largest, excused = agree(rows, base)
        print(f"{case.loaded.name} memory {memory} chunk {chunk_size}: {largest:.2e}")
        assert largest < TOLERANCE
        assert excused == 0
        assert [(r.accepted_draft, r.decoded) for r in rows] == [(b.accepted_draft, b.decoded) for b in base]
        literal = case.replay(chunk_size=chunk_size).literal(case.rows()[0])
        assert agree([literal], base[:1])[0] < TOLERANCE


def test_any_draft_gives_the_same_results(tiny: LoadedModel) -> None:
    """A wrong draft, and one that is not the trace's own answer, whose probability is still told."""
    case = tiny_case(tiny)
    base = case.fast()
    for draft in ([20], [*case.draft[:2], 30, 31], [*case.draft, 20]):
        rows = case.replay().fast(case.rows(), draft)
        largest, excused = agree(rows, base)
        assert largest < TOLERANCE
        assert excused == 0
        assert [r.accepted_draft for r in rows] == [b.accepted_draft for b in base]


def test_forwarded_tokens_are_those_that_are_needed(builtin_case: Case) -> None:
    """Each row's own tokens and the draft but its last token; the prefix once; one per decoded token."""
    replay = builtin_case.replay(chunk_size=200)
    found = replay.fast(builtin_case.rows(), builtin_case.draft)
    own = sum(len(row.tokens) + len(builtin_case.draft) - 1 for row in builtin_case.rows())
    prefix = max(row.keep for row in builtin_case.rows())
    assert replay.tally.forwarded == prefix + own + sum(row.decoded for row in found)


def test_a_window_replaced_by_itself_is_the_control(tiny: LoadedModel) -> None:
    """The null intervention: same tokens, same answer, and the noise floor of delta_nll."""
    case = tiny_case(tiny)
    control = case.fast([case.control])[0]
    null = case.fast([Counterfactual(start, tuple(case.context[start:])) for start, _ in case.spans])
    assert all(row.token_ids == control.token_ids and row.answer == control.answer for row in null)
    floor = max(abs(row.nll - control.nll) for row in null)
    print(f"{tiny.name}: noise floor {floor:.2e}")
    assert floor < 1e-5
    assert case.fast([case.control])[0] == control


def test_cap_below_the_draft(tiny: LoadedModel, builtin_case: Case) -> None:
    for case in (tiny_case(tiny), builtin_case):
        capped = dataclasses.replace(case, cap=2)
        fast = capped.fast(case.rows()[:4])
        expected = [plain(capped, context) for context in case.contexts()[:4]]
        assert agree(fast, expected) == pytest.approx((0, 0), abs=TOLERANCE)
        literal = [capped.replay().literal(row) for row in case.rows()[:4]]
        for mine, theirs in zip(fast, literal, strict=True):
            assert len(mine.token_ids) == len(theirs.token_ids) <= 2
            assert mine.accepted_draft == theirs.accepted_draft
    control = dataclasses.replace(builtin_case, cap=len(builtin_case.draft))
    whole = Counterfactual(0, tuple(builtin_case.context))
    assert control.fast([whole])[0].decoded == 0  # the cap is just enough


def test_draft_without_a_closed_box_is_decoded(builtin_case: Case) -> None:
    """A draft that ends early says nothing about what follows, so agreement on it is not enough."""
    case = dataclasses.replace(builtin_case, draft=builtin_case.draft[:-2])
    control = case.fast([case.control])[0]
    assert control.token_ids == tuple(builtin_case.draft)
    # All of the short draft is accepted; the two tokens after it are decoded.
    assert (control.accepted_draft, control.decoded) == (len(case.draft), 2)
    rows = case.fast(case.rows()[::3])
    largest, excused = agree(rows, [plain(case, context) for context in case.contexts()[::3]])
    assert largest < TOLERANCE
    assert excused == 0


def bigram(wrap_model: Callable[..., LoadedModel], like: LoadedModel, chain: str) -> LoadedModel:
    """A model whose next token depends on the newest one only: it writes `chain` word by word."""
    size = like.shape.vocabulary
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size,
            hidden_size=size,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            eos_token_id=1,
        )
    )
    ids = like.tokenizer.encode(chain)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
                weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        for before, after in pairwise(ids):
            model.lm_head.weight[after, before] = 1.0
    return wrap_model("bigram", model.eval(), like.tokenizer)


@pytest.mark.parametrize(
    ("chain", "written", "answer"),
    [
        ("</think> w1 \\boxed{ 3 }", "w1 \\boxed{ 3 }", "3"),
        ("</think> w1 <eos> \\boxed{ 3 }", "w1 <eos>", None),  # an end token inside an imported draft ends
        ("</think> w1 w2 \\boxed{ 3 w3", "w1 w2 \\boxed{ 3 w3", None),
    ],
)
def test_draft_that_the_model_repeats(
    wrap_model: Callable[..., LoadedModel], llama: LoadedModel, chain: str, written: str, answer: str | None
) -> None:
    loaded = bigram(wrap_model, llama, chain)
    encode = loaded.tokenizer.encode
    draft = encode(chain)[1:]
    case = Case(loaded, [*encode("w7 w8 w9 w9"), *encode("</think>")], [(1, 3)], draft, "", 0, len(draft))
    for row in (*case.fast(), case.replay().literal(case.control)):
        assert (list(row.token_ids), row.answer) == (encode(written), answer)
        assert row.accepted_draft == len(encode(written))


def test_context_that_fills_all_positions(builtin_case: Case) -> None:
    limit = builtin_case.loaded.shape.max_positions
    replay = builtin_case.replay()
    assert replay.room(limit - 3) == 3
    assert replay.room(10) == builtin_case.cap
    fitting = tuple([0] * (limit - len(builtin_case.draft)))
    dataclasses.replace(replay, context=fitting).check_room()
    with pytest.raises(ItemError, match="too_long"):
        dataclasses.replace(replay, context=(0, *fitting)).check_room()

"""How close two logits may be before another batch shape can pick another token.

Fast and literal replays do the same sums in another order. Where the two largest logits differ by less than this,
greedy decoding may write another token, and neither way is wrong. Such windows are counted, not hidden.
"""

from __future__ import annotations

# float32 as the exactness tests have it. The others are four spacings of a logit between 16 and 32: bfloat16 keeps 8
# bits of mantissa (spacing 1/8), float16 keeps 11 (1/64). A margin in bfloat16 is thus 0, 1/8, 1/4, ... at that size.
NARROW_MARGINS = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.0625}


def narrow_margin(dtype: str) -> float:
    """The margin in logits for a compute dtype by its name (`float32`, `torch.bfloat16`); unknown ones are float32."""
    return NARROW_MARGINS.get(dtype.removeprefix("torch."), NARROW_MARGINS["float32"])


def margin_text(dtype: str) -> str:
    """The same as it is printed: 1e-4, 0.5."""
    margin = narrow_margin(dtype)
    return f"{margin:g}" if margin >= 1e-3 else f"{margin:.0e}".replace("e-0", "e-")

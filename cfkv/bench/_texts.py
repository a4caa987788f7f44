"""Worked problems written for the benches, so that they need no file."""

from __future__ import annotations

from cfkv.traces.items import TraceItem

_PROBLEMS = (
    (
        "A school orders 14 boxes of pencils with 24 pencils each and gives 9 pencils to each of its 30 pupils. "
        "How many pencils are left?",
        "The boxes hold 14 * 24 = 336 pencils.\nThe pupils get 30 * 9 = 270 pencils.\n"
        "So 336 - 270 = 66 pencils are left in the store room of the school.",
        "66",
    ),
    (
        "Rosa picks 18 apples every hour for 5 hours and then gives a third of them to her neighbour. "
        "How many apples does she keep?",
        "In 5 hours Rosa picks 18 * 5 = 90 apples.\nHer neighbour gets 90 / 3 = 30 apples.\n"
        "Rosa keeps 90 - 30 = 60 apples for herself and for her family.",
        "60",
    ),
    (
        "A train has 8 cars with 52 seats each. On Monday 375 seats are taken and 12 more passengers stand "
        "although seats are free. How many seats are empty?",
        "The train has 8 * 52 = 416 seats.\nOf them 375 are taken on Monday.\n"
        "The passengers who stand take no seat, so 416 - 375 = 41 seats are empty.",
        "41",
    ),
    (
        "A bakery sells 45 rolls at 2 dollars each and 12 cakes at 15 dollars each in the morning, and half as "
        "much money comes in in the afternoon. How much does it take in that day?",
        "The rolls bring 45 * 2 = 90 dollars.\nThe cakes bring 12 * 15 = 180 dollars.\n"
        "The morning brings 90 + 180 = 270 dollars and the afternoon 270 / 2 = 135 dollars.\n"
        "Together that is 270 + 135 = 405 dollars.",
        "405",
    ),
    (
        "Tom reads 22 pages on each of 6 days and 40 pages on Sunday. The book has 300 pages. "
        "How many pages are left?",
        "On 6 days Tom reads 22 * 6 = 132 pages.\nWith Sunday that makes 132 + 40 = 172 pages.\n"
        "There are 300 - 172 = 128 pages left of the book.",
        "128",
    ),
    (
        "A pool of 4800 litres is filled by two taps, one of 50 and one of 70 litres a minute. "
        "How many minutes does it take?",
        "Both taps together bring 50 + 70 = 120 litres a minute.\n"
        "The pool takes 4800 litres, so it takes 4800 / 120 = 40 minutes until it is full.",
        "40",
    ),
)


def worked_items() -> list[TraceItem]:
    """Six problems with solutions of three or four lines."""
    return [
        TraceItem(
            problem_id=f"bench-{number}",
            sample_index=0,
            question=question,
            reference_answer=answer,
            solution=solution,
        )
        for number, (question, solution, answer) in enumerate(_PROBLEMS)
    ]

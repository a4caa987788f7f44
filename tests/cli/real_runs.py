"""What the end-to-end tests share: real cfkv processes, and runs held against each other."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import polars as pl

import cfkv
from cfkv.schemas import TABLES

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
# Without --multi_gpu, accelerate starts a single process where there are no GPUs; with it, it starts two anywhere.
ACCELERATE = (
    *("-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"),
    *("--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"),
)


# What a recipe without policies leaves empty.
EVALUATED = frozenset(
    [
        "evaluations",
        "keep_sets",
        "policy_accuracy",
        "policy_comparisons",
        "lossless_budgets",
        "offline_online",
        "policy_validity",
        "judged",
        "validity_summary",
    ]
)


def tables(run: Path) -> dict[str, pl.DataFrame]:
    """All tables of a run, whole."""
    loaded = cfkv.load(run)
    return {name: getattr(loaded, name).collect() for name in TABLES}


def assert_same(first: Path, second: Path, *, empty: Collection[str] = ()) -> None:
    """Row for row, column for column; only the tables `empty` have no rows."""
    mine, theirs = tables(first), tables(second)
    for name in TABLES:
        assert mine[name].equals(theirs[name]), name
    assert {name for name in TABLES if len(mine[name]) == 0} == set(empty)


def cfkv_process(*arguments: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A cfkv process of its own, one thread, stderr kept apart."""
    return started([sys.executable, *launcher, "-m", "cfkv", *arguments])


def started(command: list[str], **environment: str) -> subprocess.Popen[str]:
    """A command in a process group of its own."""
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the process; its standard output."""
    printed, complaints = process.communicate(timeout=200)
    assert process.returncode == 0, complaints[-3000:]
    return printed

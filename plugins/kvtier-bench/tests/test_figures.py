"""Figures can be read, however narrow the console is."""

from __future__ import annotations

import io
from dataclasses import dataclass

import pytest
from rich.console import Console

from kvtier_bench import figures


@dataclass(frozen=True)
class Row:
    """Something measured."""

    number_of_chunks: int
    gigabytes_per_second: float
    seconds_of_processor_time: float | None
    bare_gigabytes_per_second: float | None
    what_it_says: str = "words that go on in the next line where there is no room for them in this one"


ROWS = [Row(1000 + index, 1234.5 + index, 0.125 if index % 2 else None, None) for index in range(7)]


def shown(width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    figures.show(ROWS, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("width", [60, 80, 120, 250])
def test_no_figure_is_cut_off(width: int) -> None:
    lines = shown(width)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for row in ROWS:
        assert str(row.number_of_chunks) in text
        assert f"{row.gigabytes_per_second:,.0f}" in text


def test_what_nothing_has_is_left_out_and_what_one_does_not_have_is_a_dash() -> None:
    text = "\n".join(shown(250))
    assert "bare_gigabytes_per_second" not in text
    assert "None" not in text
    assert " - " in text


def test_rows_stay_rows_where_there_is_room() -> None:
    assert any("1000" in line and "1,234" in line for line in shown(120))
    assert not any("1000" in line and "1,234" in line for line in shown(60))

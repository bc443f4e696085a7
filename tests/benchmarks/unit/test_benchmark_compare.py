"""What `python -m benchmarks compare` makes of the values it gets, and how it refuses a checkout that it cannot measure."""

import asyncio
import itertools
import sys

import pytest

from benchmarks import compare
from benchmarks.compare import Compared, shown
from benchmarks.compared import paced


def compared(better, this, before):
    return Compared("drain", better, {"this": this, "before": before})


@pytest.mark.parametrize(
    ("better", "this", "before", "ratio"),
    [
        ("up", [200.0], [100.0], 2.0),
        ("down", [200.0], [100.0], 0.5),
        ("up", [100.0, 1.0, 100.0], [100.0, 100.0, 900.0], 1.0),  # medians: one bad round of each says nothing
        ("down", [0.0], [0.0], 1.0),
        ("down", [0.0], [5.0], float("inf")),
    ],
)
def test_a_ratio_above_one_says_that_this_checkout_is_better(better, this, before, ratio):
    assert compared(better, this, before).ratio == ratio


def test_the_lowest_and_highest_ratio_of_a_round_stand_beside_that_of_the_medians():
    assert shown([compared("up", [100.0, 2000.0, 300.0], [100.0, 1000.0, 600.0])]) == [
        ("drain", "300", "600", "0.50", "0.50 to 2.00")
    ]


def test_a_checkout_that_is_not_built_is_refused_with_what_to_do(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        compare.main(["--before", str(tmp_path), "--only", "drain"])
    assert ended.value.code == 2
    assert "make install" in capsys.readouterr().out


def test_an_unknown_measure_is_refused_with_those_that_there_are(tmp_path, capsys):
    with pytest.raises(SystemExit):
        compare.main(["--before", str(tmp_path), "--only", "drian"])
    assert "drian" in (said := capsys.readouterr().err)
    assert "enqueue" in said


def test_rounds_alternate_which_checkout_is_measured_first(tmp_path, monkeypatch):
    # Stand-ins for the two interpreters: each writes down that it measured, and answers as `compared.py` does.
    log = tmp_path / "log"
    pythons = {side: tmp_path / side / ".venv/bin/python" for side in ("this", "before")}
    for side, python in pythons.items():
        python.parent.mkdir(parents=True)
        python.write_text(
            f"""#!/bin/sh
            case "$2" in
                -c) echo {python};;
                *compared.py) echo {side} $3 >> {log}; echo '{{"{side}": [1.0, "up"]}}';;
            esac
            """.replace("            ", "")
        )
        python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(pythons["this"]))
    compare.main(["--before", str(tmp_path / "before"), "--only", "drain,pools", "--rounds", "3"])
    of_rounds = ["this", "before"], ["before", "this"], ["this", "before"]
    assert log.read_text().split() == [
        word for order in of_rounds for measure in ("drain", "pools") for side in order for word in (side, measure)
    ]


def test_jobs_of_the_open_loop_are_stamped_with_when_they_were_due_however_slow_the_sender_is():
    stamps: list[int] = []
    calls = 0

    async def slow(due: list[int]) -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0.02)
        stamps.extend(due)

    asyncio.run(paced(200, 2_000, slow))
    assert calls < 100, "the sender did not fall behind"
    assert len(stamps) == 200
    assert {after - before for before, after in itertools.pairwise(stamps)} == {500_000}

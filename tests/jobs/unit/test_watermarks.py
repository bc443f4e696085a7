"""Watermarks pass a number only when nothing below it can appear any more."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

from penstock.jobs.models import ClaimedJob
from penstock.jobs.watermarks import Watermarks


def job(seq: int, priority: int = 0) -> ClaimedJob:
    now = datetime.now(UTC)
    # A claim opens a lease for each priority.
    return ClaimedJob(uuid4(), "ship", 5, 5, priority, None, "{}", now, now, seq, 100 + priority, 300.0)


def watermark(watermarks: Watermarks) -> int:
    watermarks.scanned(0.0, 0.0)
    return watermarks.for_claim(0.5).get("ship", {}).get("0", 0)


def test_a_number_is_no_watermark_while_its_transactions_may_be_running() -> None:
    watermarks = Watermarks()
    watermarks.claimed([job(10)], horizon=100, ceiling=105, now=0.45)
    watermarks.claimed([job(20)], horizon=104, ceiling=110, now=0.45)
    assert watermark(watermarks) == 0


def test_a_number_becomes_a_watermark_when_a_later_claim_went_past_it() -> None:
    watermarks = Watermarks()
    watermarks.claimed([job(10)], horizon=100, ceiling=105, now=0.45)
    watermarks.claimed([job(20)], horizon=105, ceiling=110, now=0.45)
    assert watermark(watermarks) == 10


def test_a_claim_that_did_not_get_that_far_confirms_nothing() -> None:
    watermarks = Watermarks()
    watermarks.claimed([job(10)], horizon=100, ceiling=105, now=0.45)
    watermarks.claimed([job(5)], horizon=105, ceiling=110, now=0.45)
    assert watermark(watermarks) == 0


def test_a_stalled_horizon_does_not_hold_the_watermarks_for_ever() -> None:
    watermarks = Watermarks()
    for number in range(1, 200):
        watermarks.claimed([job(number)], horizon=1, ceiling=100 + number, now=number / 400)
    assert 150 < watermark(watermarks) < 170


def test_a_full_scan_that_stops_below_a_watermark_lowers_it_to_where_it_stopped() -> None:
    watermarks = Watermarks()
    for number, seq in enumerate([10, 20, 30]):
        watermarks.claimed([job(seq)], horizon=100 + number, ceiling=100 + number, now=0.1)
    assert watermark(watermarks) == 30
    watermarks.claimed([job(3), job(7)], horizon=200, ceiling=200, now=0.45)
    assert watermark(watermarks) == 7
    watermarks.claimed([job(8)], horizon=200, ceiling=200, now=0.45)
    watermarks.claimed([job(31)], horizon=200, ceiling=200, now=0.45)
    assert watermark(watermarks) == 8


def test_a_full_scan_that_goes_past_a_watermark_leaves_it() -> None:
    watermarks = Watermarks()
    watermarks.claimed([job(10)], horizon=1, ceiling=1, now=0.1)
    watermarks.claimed([job(3), job(11)], horizon=1, ceiling=1, now=0.45)
    assert watermark(watermarks) == 10


def test_priorities_have_watermarks_of_their_own() -> None:
    watermarks = Watermarks()
    watermarks.claimed([job(10), job(50, priority=-5)], horizon=1, ceiling=2, now=0.45)
    watermarks.claimed([job(11)], horizon=2, ceiling=3, now=0.45)
    watermarks.scanned(0.0, 0.0)
    assert watermarks.for_claim(0.5) == {"ship": {"0": 10, "-5": 0}}


def test_a_full_scan_is_due_at_once_when_asked_for_and_seldom_when_it_is_dear() -> None:
    watermarks = Watermarks()
    watermarks.claimed([job(10)], horizon=1, ceiling=1, now=0.45)
    watermarks.claimed([job(11)], horizon=1, ceiling=1, now=0.45)
    watermarks.scanned(100.0, cost_s=1.0)
    assert watermarks.for_claim(119.0) != {}
    assert watermarks.for_claim(120.0) == {}
    watermarks.scanned(120.0, cost_s=0.0)
    watermarks.full_scan()
    assert watermarks.for_claim(120.0) == {}

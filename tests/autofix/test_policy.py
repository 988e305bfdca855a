"""Which changes findings ask for, and whether one has helped."""

from __future__ import annotations

import random
from itertools import combinations
from math import comb, exp
from pathlib import Path

import pytest

from lightning_gpuopt.autofix import policy
from lightning_gpuopt.autofix.policy import (
    MAX_WINDOWS,
    MIN_BEFORE,
    Wanted,
    chance_of,
    expected_of,
    gain_of,
    interval_of,
    judge,
    judge_pauses,
    wanted_changes,
)
from lightning_gpuopt.diagnosis.record import Finding
from lightning_gpuopt.measurements.loading import LoaderFacts

ROOT = Path(__file__).parents[2]
GAIN = (1.5, 2.0, 2.5)


def finding(cause: str, settings: dict[str, object], predicted: tuple[float, float, float] | None = GAIN) -> Finding:
    return Finding(cause, 0.5, {}, "advice", settings, predicted)


class TestWhatIsWanted:
    def test_a_loaders_settings_one_by_one_and_not_what_is_so_already(self):
        found = [finding("slow_transform", {"num_workers": 6, "persistent_workers": True})]
        assert wanted_changes(found, LoaderFacts(num_workers=2), on_gpu=True) == [
            Wanted("num_workers", 6, "slow_transform", GAIN)
        ]
        assert wanted_changes(found, LoaderFacts(num_workers=6), on_gpu=True) == []

    def test_workers_that_are_started_again(self):
        found = [finding("epoch_restart", {"persistent_workers": True}, None)]
        assert wanted_changes(found, LoaderFacts(num_workers=2, persistent_workers=False), on_gpu=False) == [
            Wanted("persistent_workers", True, "epoch_restart", None)
        ]

    def test_an_exposed_copy(self):
        found = [finding("host_to_device", {"pin_memory": True})]
        both = [
            Wanted("device_prefetch", True, "host_to_device", GAIN),
            Wanted("pin_memory", True, "host_to_device", None),
        ]
        loader = LoaderFacts(num_workers=2, pin_memory=False)
        assert wanted_changes(found, loader, on_gpu=True) == both
        assert wanted_changes(found, LoaderFacts(num_workers=0, pin_memory=False), on_gpu=True) == both[1:]
        assert wanted_changes(found, loader, on_gpu=False) == []


class TestWhetherItHelped:
    @pytest.mark.parametrize(("n", "m"), [(3, 3), (3, 5), (4, 4), (5, 2)])
    def test_the_chance_is_that_of_all_orders(self, n, m):
        places = range(n + m)
        orders = [(set(places) - set(fast), set(fast)) for fast in combinations(places, m)]
        for wins in range(n * m + 1):
            as_good = sum(sum(f < s for s in slow for f in fast) >= wins for slow, fast in orders)
            example = next(each for each in orders if sum(f < s for s in each[0] for f in each[1]) == wins)
            assert chance_of(sorted(example[0]), sorted(example[1])) == pytest.approx(as_good / comb(n + m, n))

    @pytest.mark.parametrize(("n", "m"), [(4, 3), (4, 5), (5, 5), (8, 5)])
    def test_the_interval_holds_the_gain_in_95_of_100_orders_and_no_narrower_one_does(self, n, m):
        places = range(n + m)
        orders = [(sorted(set(places) - set(fast)), sorted(fast)) for fast in combinations(places, m)]
        holds = narrower = 0
        for slow, fast in orders:  # there is no gain, and each order is as likely
            before, after = [exp(each) for each in slow], [exp(each) for each in fast]
            ratios = sorted(one / other for one in before for other in after)
            low, high = interval_of(before, after) or (0.0, float("inf"))
            holds += low <= 1 <= high
            narrower += min(each for each in ratios if each > low) <= 1 <= max(each for each in ratios if each < high)
        assert holds >= 0.95 * len(orders) > narrower
        assert (interval_of([1.0] * n, [1.0] * m) is None) == ((n, m) == (4, 3))

    def test_a_clear_gain_is_proved_when_chance_cannot_have_made_it(self):
        before = [2.0, 2.1, 2.05, 1.98]
        after = [1.0, 1.01, 1.02, 1.0, 1.0]
        assert [judge(before, after[:count]) for count in range(6)] == [None, None, None, None, None, True]
        assert gain_of(before, [1.0, 1.0]) == pytest.approx(2.0325)

    def test_nothing_is_judged_by_too_few_windows_before(self):
        assert judge([2.0, 2.0, 2.0], [1.0] * 5) is None

    def test_a_loss_is_known_early(self):
        assert judge([1.0] * 4, [1.1, 1.2]) is None
        assert judge([1.0] * 4, [1.1, 1.2, 1.1]) is False

    def test_each_look_can_prove_a_gain_and_the_docs_say_when_it_comes(self):
        names = {3: "three", 4: "four", 5: "five", 8: "eight"}
        text = " ".join((ROOT / "docs/autofix.md").read_text(encoding="utf-8").split())
        for look in policy._LOOKS:
            assert chance_of([2.0] * MIN_BEFORE, [1.0] * look) <= policy._CHANCE
        first, last = (names[look] for look in policy._LOOKS)
        least, lost = names[MIN_BEFORE].capitalize(), names[policy._MIN_TO_LOSE]
        assert f"{least} to {last} windows before a change, and {first} or {last} after it" in text
        assert f"after {first} windows and after {last}), and the steps became faster by 2 % or more" in text
        assert (
            f"without a proof after {last} windows is undone, one that has made the steps slower after {lost}" in text
        )
        assert policy._MIN_GAIN == 1.02

    def test_noise_is_no_gain(self):
        before = [1.0, 1.3, 0.9, 1.2, 1.1, 1.0, 1.25, 0.95]
        after = [0.98, 1.28, 0.9, 1.15, 1.0, 1.05, 1.2, 0.9]
        verdicts = [judge(before, after[:count]) for count in range(1, MAX_WINDOWS + 1)]
        assert verdicts[-1] is False
        assert True not in verdicts

    def test_a_gain_that_is_sure_and_too_small(self):
        assert judge([1.0] * 8, [0.99] * 7) is None
        assert judge([1.0] * 8, [0.99] * 8) is False

    def test_what_a_trend_explains_is_no_gain(self):
        falling = [1.0 - 0.01 * number for number in range(17)]
        assert expected_of(falling[:8], 8) == pytest.approx(sum(falling[9:]) / 8)
        assert judge(falling[:8], falling[9:]) is False
        assert judge(falling[:8], [each - 0.1 for each in falling[9:14]]) is True

    def test_slow_windows_at_the_start_are_no_trend(self):
        before = [12.5, 9.7, 7.7, 7.7, 7.8, 7.7, 7.6, 7.7]
        assert expected_of(before, 5) > 0.9 * 7.7
        assert judge(before, [4.5, 4.4, 4.7, 5.2, 4.7]) is True

    def test_steps_that_were_getting_slower_count_as_they_were(self):
        assert expected_of([1.0, 1.1, 1.2, 1.3], 5) == pytest.approx(1.15)

    def test_a_change_that_does_nothing_is_seldom_kept(self):
        draw = random.Random(1)
        kept = 0
        for _ in range(2000):
            before = [draw.gauss(1.0, 0.05) for _ in range(8)]
            after = [draw.gauss(1.0, 0.05) for _ in range(8)]
            kept += True in [judge(before, after[:count]) for count in range(1, 9)]
        assert kept <= 40  # 2 of 100

    def test_ties_prove_nothing(self):
        assert chance_of([1.0] * 4, [1.0] * 4) == 1.0

    def test_pauses_between_epochs(self):
        assert judge_pauses([1.0, 1.1], []) is None
        assert judge_pauses([], [0.1]) is None
        assert judge_pauses([1.0, 1.1], [0.2]) is True
        assert judge_pauses([1.0, 1.1], [0.2, 1.05]) is False
        assert judge_pauses([1.0, 1.1], [0.9]) is False

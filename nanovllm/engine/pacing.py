"""How many prompt tokens a step may take, so that the answers that run beside them keep a pace.

What a step takes is learnt from the steps before it. It is taken to be a sum:

    seconds = w0 + w1 * tokens + w2 * keys + w3 * pairs

w0 is what every step takes; `keys` are the tokens that rows look back on, which are read from the
cache, and `pairs` are those of a token and one that it looks back on. No weight is negative.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nanovllm.engine.step import StepPlan

MIN_PROMPT_TOKENS = 64  # in every step: a prompt makes progress, whatever the pace
MAX_GROWTH = 2  # times the tokens of the largest step so far: beyond, nothing is known

_NUM_CLASSES = 32  # of steps, by the power of two that their prompt tokens reach
_NEWEST_SHARE = 0.05  # of a step in what is known of its class: some twenty count
_LOWER_AIM, _RAISE_AIM = 0.95, 1.001  # in balance when one full step in fifty is too long
_AIMS = 0.5, 1.5

Sizes = npt.NDArray[np.float64]  # [4]: 1, tokens, keys, pairs


class StepCost:
    """Predicts the seconds of a step, by least squares of the relative error.

    Relative, so that a step in which something was compiled counts next to nothing: a guess of
    10 ms for 2 s is off by less than 1, one of 30 ms for 10 ms by 2.

    Each class of steps has the same say, or many answers would make it forget what prompts take.
    """

    def __init__(self) -> None:
        self.weights = np.zeros(4)
        self._products = np.zeros((_NUM_CLASSES, 4, 4))  # means of sizes x sizes / seconds**2
        self._sums = np.zeros((_NUM_CLASSES, 4))  # means of sizes / seconds
        self._counts = [0] * _NUM_CLASSES

    def observe(self, sizes: Sizes, num_prompt_tokens: int, seconds: float) -> None:
        scaled = sizes / seconds
        index = num_prompt_tokens.bit_length()
        self._counts[index] += 1
        share = max(_NEWEST_SHARE, 1 / self._counts[index])
        self._products[index] += share * (np.outer(scaled, scaled) - self._products[index])
        self._sums[index] += share * (scaled - self._sums[index])
        self._fit(self._products.sum(0), self._sums.sum(0))

    def seconds(self, sizes: Sizes) -> float:
        return float(self.weights @ sizes)

    def _fit(self, products: Sizes, sums: Sizes) -> None:
        """Move each weight in turn to where the error is least; the last fit is close already."""
        for _ in range(4):
            for i in range(4):
                rest = sums[i] - products[i] @ self.weights
                self.weights[i] = max(0.0, self.weights[i] + rest / products[i, i])


class StepTime:
    """What is left for prompts of the time of one step."""

    def __init__(self, weights: Sizes, seconds: float, num_tokens: int) -> None:
        self._per_token, self._per_key, self._per_pair = weights[1:].tolist()
        self._seconds = seconds
        self._num_tokens = num_tokens
        self._min_tokens = MIN_PROMPT_TOKENS

    def take(self, start: int, wanted: int) -> int:
        """Return how many tokens of a prompt, from `start` on, still fit, and count them in."""
        count = max(1, min(wanted, max(self._min_tokens, self.num_tokens(start))))
        self._min_tokens = 0
        pairs = count * (start + (count + 1) / 2)
        taken = self._per_token * count + self._per_key * (start + count) + self._per_pair * pairs
        self._seconds -= taken
        self._num_tokens -= count
        return count

    def num_tokens(self, start: int) -> int:
        """The tokens from `start` on that take up what is left: a quadratic equation."""
        seconds = self._seconds - self._per_key * start
        if seconds <= 0:
            return 0
        slope = self._per_token + self._per_key + self._per_pair * (start + 0.5)
        root = slope + math.sqrt(slope**2 + 2 * self._per_pair * seconds)
        has_time_for_all = (
            root * self._num_tokens <= 2 * seconds
        )  # root is 0 while nothing is known
        return max(0, self._num_tokens if has_time_for_all else int(2 * seconds / root))


class Pacer:
    """Learns from every step what steps take, and gives prompts what answers leave."""

    def __init__(
        self, target_seconds: float, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.target_seconds = target_seconds
        self.cost = StepCost()
        self._clock = clock
        self._aim = 1.0  # times the target; steps are no sums, and the target is no mean
        self._most_tokens = MIN_PROMPT_TOKENS
        self._planned: deque[float] = deque()  # when, for each step in flight
        self._last_end = -math.inf

    def time_beside(self, starts: list[int]) -> StepTime:
        """The time that answers, each with one token at its start, leave to prompts."""
        num_keys = sum(starts) + len(starts)
        taken = self.cost.seconds(np.array([1, len(starts), num_keys, num_keys]))
        return StepTime(
            self.cost.weights,
            self._aim * self.target_seconds - taken,
            MAX_GROWTH * self._most_tokens - len(starts),
        )

    def begin(self) -> None:
        """A plan was made; it is about to run behind those in flight."""
        self._planned.append(self._clock())

    def end(self, plan: StepPlan) -> None:
        """The oldest plan in flight is done. It ran alone, since the one before it was done."""
        now = self._clock()
        seconds = now - max(self._planned.popleft(), self._last_end)
        self._last_end = now
        if seconds <= 0:
            return
        sizes = _sizes(plan)
        if self.cost.seconds(sizes) > 0.9 * self._aim * self.target_seconds:
            factor = _LOWER_AIM if seconds > self.target_seconds else _RAISE_AIM
            self._aim = min(max(self._aim * factor, _AIMS[0]), _AIMS[1])
        num_tokens = int(plan.counts.sum())
        self._most_tokens = max(self._most_tokens, num_tokens)
        self.cost.observe(sizes, num_tokens - len(plan.counts), seconds)


def _sizes(plan: StepPlan) -> Sizes:
    counts, ends = plan.counts.astype(np.float64), plan.starts + plan.counts
    return np.array([1, counts.sum(), ends.sum(), counts @ (plan.starts + (counts + 1) / 2)])

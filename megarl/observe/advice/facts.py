"""Input of the rules of advice: curves of a run's metrics, its settings, newest samples, faults, and the length of its silence."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megarl.recipe.former_names import with_present_names
from megarl.recipe.key import yaml_word
from megarl.recipe.schema import Recipe

FEWEST = 10
"""Number of values from which on a curve is judged: the first steps of a run say little about it."""
SURE = 3.0
"""Standard errors by which two parts of a curve must differ. With 3, chance alone makes about one pair in 400 differ."""

_ABSENT: Any = object()
_RESTARTS = ("timing_s/recovery", "fleet/restart_seconds")  # seconds in which a step waited for workers to restart


@dataclass(frozen=True)
class Curve:
    """The finite values of a metric: ``steps`` and ``values`` [n], without the evaluation before step 1."""

    steps: np.ndarray
    values: np.ndarray

    @property
    def width(self) -> int:
        """Number of values in the first and in the last part: a tenth, 5 to 20."""
        return min(max(5, len(self.values) // 10), 20)

    @property
    def first(self) -> float:
        """Median of the first part: single outliers do not count."""
        return float(np.median(self.values[: self.width]))

    @property
    def last(self) -> float:
        """Median of the last part."""
        return float(np.median(self.values[-self.width :]))

    @property
    def errors(self) -> float:
        """Last part less first part, in standard errors; the noise comes from neighbouring values, so a trend adds none."""
        return self._errors(float(self.values[-self.width :].mean() - self.values[: self.width].mean()))

    @property
    def errors_below_best(self) -> float:
        """The best part's mean less the last part's, in standard errors."""
        return self._errors(float(self._means().max() - self.values[-self.width :].mean()))

    @property
    def best(self) -> tuple[float, int]:
        """Mean of the part of this width with the largest mean, and that part's last step."""
        means = self._means()
        return float(means.max()), int(self.steps[int(means.argmax()) + self.width - 1])

    @property
    def rises(self) -> bool:
        return self.errors > SURE

    @property
    def falls(self) -> bool:
        return self.errors < -SURE

    def still(self, direction: int) -> bool:
        """True if the last part is above (1) or below (-1) the part before it by more than noise."""
        before = self.values[-2 * self.width : -self.width].mean()
        return direction * self._errors(float(self.values[-self.width :].mean() - before)) > SURE

    def text(self, form: str = ".3g") -> str:
        """Return both parts: ``0.61 in steps 1 to 5, 0.04 in steps 46 to 50``."""
        first, last = self.steps[: self.width], self.steps[-self.width :]
        return (
            f"{self.first:{form}} in steps {first[0]:,.0f} to {first[-1]:,.0f}, "
            f"{self.last:{form}} in steps {last[0]:,.0f} to {last[-1]:,.0f}"
        )

    def last_text(self, form: str = ".3g") -> str:
        last = self.steps[-self.width :]
        return f"{self.last:{form}} in steps {last[0]:,.0f} to {last[-1]:,.0f}"

    def _means(self) -> np.ndarray:
        return np.convolve(self.values, np.full(self.width, 1 / self.width), mode="valid")

    def _errors(self, difference: float) -> float:
        noise = float(np.diff(self.values).std()) / math.sqrt(2) * math.sqrt(2 / self.width)
        if abs(difference) <= 1e-9 * max(1.0, float(np.abs(self.values).max())):
            return 0.0
        return difference / noise if noise > 0 else math.copysign(math.inf, difference)


@dataclass(frozen=True)
class Silence:
    """Nothing was written for ``seconds`` by a run that is alive. ``phase``: the last one that ended in the running step, or None."""

    seconds: float
    phase: str | None


@dataclass
class Facts:
    """A run, for the rules. Every part may be empty.

    ``lines``: of metrics.jsonl. ``settings``: content of recipe.resolved.yaml. ``samples``: records of the newest samples.
    ``sessions``: starts of the run, as in summary.json. ``notices``: of notices.jsonl. ``ettr``: as in summary.json.
    """

    lines: Sequence[Mapping[str, Any]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    sessions: Sequence[Mapping[str, Any]] = ()
    notices: Sequence[Mapping[str, Any]] = ()
    ettr: Mapping[str, Any] = field(default_factory=dict)
    silence: Silence | None = None

    @functools.cached_property
    def _settings(self) -> dict[str, Any]:
        return with_present_names(dict(self.settings), None)

    @functools.cached_property
    def steps(self) -> list[Mapping[str, Any]]:
        """The lines of training steps."""
        return [line for line in self.lines if line["step"] > 0]

    def setting(self, key: str) -> Any:
        """Return the value of a recipe key; in a recipe of an older version, a newer key has its default."""
        values = []
        for content in (_defaults(), self._settings):
            for name in key.split("."):
                content = content.get(name, _ABSENT) if isinstance(content, dict) else _ABSENT
            values.append(content)
        default, value = values
        assert default is not _ABSENT, f"{key} is not a recipe key"
        return default if value is _ABSENT else value

    @functools.cached_property
    def death_steps(self) -> set[int]:
        """Steps in which a worker died, or in which the trainers waited for workers to restart."""
        died = {notice.get("step") for notice in self.notices if notice.get("event") == "death"}
        return {
            line["step"] for line in self.steps if line["step"] in died or any(line.get(name) for name in _RESTARTS)
        }

    @functools.cached_property
    def timed_steps(self) -> list[Mapping[str, Any]]:
        """The lines of training steps for rules about time: without `death_steps` and the first step of each start, which compiles
        and loads for later steps."""
        left_out = {session.get("first_step") for session in self.sessions} | {1} | self.death_steps
        return [line for line in self.steps if line["step"] not in left_out]

    def curve(
        self, name: str, *, fewest: int = FEWEST, steps: Sequence[Mapping[str, Any]] | None = None
    ) -> Curve | None:
        """Return the curve of a metric; None with fewer than `fewest` finite values. steps: lines to use; None: of all steps."""
        lines = self.steps if steps is None else steps
        points = [(line["step"], line[name]) for line in lines if math.isfinite(line.get(name, math.nan))]
        if len(points) < fewest:
            return None
        numbers, values = np.asarray(points, dtype=np.float64).T
        return Curve(numbers, values)

    def share(self, name: str, of: str = "timing_s/step") -> float:
        """Return the sum of a metric over the sum of another, in the `timed_steps` that have both; 0 without such steps."""
        both = [line for line in self.timed_steps if name in line and of in line]
        pairs = [(line[name], line[of]) for line in both if math.isfinite(line[name]) and math.isfinite(line[of])]
        whole = sum(part[1] for part in pairs)
        return sum(part[0] for part in pairs) / whole if len(pairs) >= 5 and whole > 0 else 0.0

    def set(self, key: str, value: Any) -> tuple[str, ...]:
        """Return ``key=value`` as a change; nothing if the run has that value."""
        return () if self.setting(key) == value else (f"{key}={yaml_word(value)}",)

    def scale(self, key: str, factor: float) -> tuple[str, ...]:
        """Return the change that multiplies a number by `factor`; nothing for 0 and unset numbers."""
        value = self.setting(key)
        if not value:
            return ()
        scaled = max(1, round(value * factor)) if isinstance(value, int) else float(f"{value * factor:.3g}")
        return self.set(key, scaled)


@functools.cache
def _defaults() -> dict[str, Any]:
    return dataclasses.asdict(Recipe())

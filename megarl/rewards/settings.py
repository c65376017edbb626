"""Recipe sections that scorers can read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.recipe.remote import RemoteConfig
from megarl.recipe.sandbox import SandboxConfig
from megarl.recipe.schema import RewardConfig


@dataclass(frozen=True)
class ScorerSettings:
    """Settings of the recipe that scorers read: `reward.remote`, `sandbox`, `reward.timeout` and `reward.arguments`."""

    remote: RemoteConfig = field(default_factory=RemoteConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)
    timeout: float = RewardConfig.timeout
    arguments: dict[str, dict[str, Any]] = field(default_factory=dict)  # of the user's functions, by name

    @staticmethod
    def of(reward: RewardConfig, sandbox: SandboxConfig | None = None) -> ScorerSettings:
        arguments = dict.fromkeys(reward.own_functions[:1], reward.arguments)
        return ScorerSettings(reward.remote, sandbox or SandboxConfig(), reward.timeout, arguments)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values for another process, which reads them with `of_json`."""
        return asdict(self)

    @staticmethod
    def of_json(values: dict[str, Any]) -> ScorerSettings:
        return ScorerSettings(
            RemoteConfig(**values["remote"]),
            SandboxConfig(**values["sandbox"]),
            values["timeout"],
            values["arguments"],
        )

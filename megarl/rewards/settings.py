"""Recipe sections that scorers can read."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from megarl.recipe.remote import RemoteConfig
from megarl.recipe.sandbox import SandboxConfig


@dataclass(frozen=True)
class ScorerSettings:
    """The recipe's sections that registered scorers read: `reward.remote` and `sandbox`."""

    remote: RemoteConfig = field(default_factory=RemoteConfig)
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def as_json(self) -> dict[str, Any]:
        """Return JSON values for another process, which reads them with `of_json`."""
        return asdict(self)

    @staticmethod
    def of_json(values: dict[str, Any]) -> ScorerSettings:
        return ScorerSettings(RemoteConfig(**values["remote"]), SandboxConfig(**values["sandbox"]))

"""What a plan is made of: everything that the console, the page and JSON show. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field

from megarl.commands.plan.count.stages import Stage
from megarl.engines.routes import Route
from megarl.platform.devices import Device


@dataclass(frozen=True)
class EngineRank:
    """One device of an engine, by the engine's own model."""

    parameters: int
    weights: int  # bytes, with tables and copies that the engine makes of them
    cache_per_token: float  # bytes of the KV cache that a token of one sequence takes
    working: int  # bytes of its largest step beyond weights and cache
    cache: int | None = None  # bytes that are left for the KV cache; None: the device is not known
    sequences: float | None = None  # of the longest length, that the whole engine has room for at a time
    devices: int = 1  # of all engines of the kind
    largest: int = 0  # bytes of the largest layer's own weights, of which there are two while new ones are loaded
    remade: int = 0  # bytes of weights that latent attention makes anew at the first update, and keeps as it sleeps
    asleep: int = 0  # bytes on the host, while the engine sleeps and keeps its weights


@dataclass(frozen=True)
class Use:
    """Bytes of one device in one phase, by what takes them. Phases have the names of `timing_s/...` where there is one."""

    phase: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class Place:
    """Devices on which the same lies: of a pipeline stage, of an engine, of both where they take turns."""

    name: str
    devices: int
    uses: list[Use]
    not_counted: str | None = None  # what of all that lies there is not known, so that no use is whole

    @property
    def peak(self) -> Use:
        return max(self.uses, key=lambda use: use.total)


@dataclass(frozen=True)
class HostUse:
    """Host memory of machines that hold the same, by what takes it, in bytes."""

    name: str  # "node 0", "nodes 1-15"
    nodes: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class PhaseTime:
    """An estimate of one phase of a step. `bound`: what it is limited by; `assumed`: what the estimate stands on."""

    name: str  # as in timing_s/...
    seconds: float
    bound: str
    assumed: str
    begin: float | None = None  # seconds since the step began; None: where the phase before it ends
    parts: dict[str, float] = field(default_factory=dict)  # seconds by what they are spent on: see cost.py


@dataclass(frozen=True)
class Estimate:
    """Of one step. All of it is estimated."""

    phases: list[PhaseTime]
    seconds: float  # of the step: phases that run beside each other count once
    tokens: float  # prompts and responses
    micro_batches: int  # of a mini batch, of one data-parallel rank
    tokens_per_micro_batch: float
    bubble: float  # share of the update in which a pipeline stage waits for others
    response: float  # tokens of a response, in the mean
    uncalibrated: Estimate | None = None  # with the table's rates, where a calibration was given
    weights: dict[str, float] = field(default_factory=dict)  # seconds of an update of the engines, by route

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Spread:
    """Seconds of a phase if it is off as published runs were: the fewest, the geometric mean, the most."""

    name: str
    low: float
    typical: float
    high: float
    runs: int


@dataclass(frozen=True)
class Links:
    """Bytes of one weight exchange, by the route that the recipe asks for."""

    route: str  # "export", "planned" or "adapters"
    sent: int  # by the trainer rank that sends the most
    received: int  # by the engine rank that receives the most
    total: int
    between_nodes: int  # of the total


@dataclass(frozen=True)
class Variable:
    """An environment variable of a role's processes, and the reason for its value."""

    role: str  # "trainers" or "engines"
    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Refusal:
    """Why the recipe cannot work: its key, the arithmetic, and what to change."""

    key: str
    what: str
    remedy: str


@dataclass(frozen=True)
class Proposal:
    """A layout that fits: what to give on the command line, and how many times the recipe's own seconds a step takes, both
    estimated by layout alone."""

    overrides: str
    times: float


@dataclass(frozen=True)
class Plan:
    """Of one recipe on one kind of device."""

    recipe: str  # its name
    device: Device | None
    stages: list[Stage]
    engine: EngineRank | None  # of the policy
    places: list[Place]
    estimate: Estimate | None
    exchange: Links | None
    readers: dict[str, EngineRank] = field(default_factory=dict)  # of a teacher and a judge
    memory: float | None = None  # GiB of a device; None: not known
    refusals: list[Refusal] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)  # the fastest first
    not_counted: list[str] = field(
        default_factory=list
    )  # sections of which `places` lack what engines hold: see unchecked
    unchecked: list[str] = field(default_factory=list)  # what could not be looked at here, and why
    notes: list[str] = field(default_factory=list)
    hosts: list[HostUse] = field(default_factory=list)  # empty where the device is not known, and on a CPU
    routes: list[Route] = field(default_factory=list)  # of the weights, the expected one first
    spread: list[Spread] = field(default_factory=list)  # of the estimate, and its step; empty with a calibration
    compared: list[str] = field(default_factory=list)  # names of the published runs that `spread` is made of
    own_runs: list[str] = field(default_factory=list)  # those of `compared` that had the recipe's model
    without_own: Spread | None = None  # of the step, by the other runs; None: there are none, or none are left out
    alike: str = ""  # "with experts" or "without experts": the models of these runs, and the recipe's
    environment: list[Variable] = field(default_factory=list)  # set by the recipe, or needed by its layout

    @property
    def most(self) -> int:
        """Bytes of the fullest device, or, where none is known, of the largest weights: what is shown is of this order."""
        of_devices = (place.peak.total for place in self.places if place.uses)
        return max(of_devices, default=0) or max((stage.held.weights for stage in self.stages), default=0)

"""Data classes of a plan: everything that the console, the page and JSON show. Plain values."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from megarl.engines.routes import WeightRoute
from megarl.platform.device_table import Device


@dataclass(frozen=True)
class RankMemory:
    """Memory that one rank holds between steps: bytes, except the first two; with the padding of Megatron's buffers."""

    parameters: int
    trained: int  # parameters that an optimizer step changes
    weights: int
    buffers: int  # tensors of the model that are not parameters: routing biases, rotary frequencies
    gradients: int
    masters: int  # float32 master weights; 0 if the optimizer's parameters are views of the weights
    moments: int  # Adam's two moments
    reference: int  # weights of the reference policy on the host; 0 for a critic, and for adapters without a refresh
    on_host: int = 0  # masters, moments and gradients of an optimizer on the host (optimizer_cpu_offload)
    weights_pinned: int = 0  # page-locked host copies of the weights, rounded up per storage
    states_pinned: int = 0  # page-locked host copies of masters and moments
    reference_pinned: int = 0
    saved: int = (
        0  # bytes that the rank writes into a checkpoint: its share of masters, moments, weights, refreshed reference
    )

    def with_states_on_host(self, share: float) -> RankMemory:
        """Move `share` of masters and moments to the host, with their float32 gradients (as large as the masters)."""
        moved = {name: int(share * getattr(self, name)) for name in ("masters", "moments")}
        stay = {name: getattr(self, name) - size for name, size in moved.items()}
        return replace(
            self,
            **stay,
            states_pinned=int((1 - share) * self.states_pinned),
            on_host=2 * moved["masters"] + moved["moments"],
        )


@dataclass(frozen=True)
class Activations:
    """Peak bytes of each phase on one rank, beyond the memory that it holds between steps."""

    forward: int  # a pass without gradients: log-probs or values
    update: int  # forward and backward of a mini batch
    kept: int  # part of `update` that forward passes save for backward passes, at its maximum
    optimizer: int  # the optimizer step
    forward_logits: int = 0  # part of `forward`: tensors as wide as the rank's share of the vocabulary
    update_logits: int = 0  # the same part of `update`

    @property
    def peak(self) -> int:
        return max(self.forward, self.update, self.optimizer)


@dataclass(frozen=True)
class PipelineStage:
    """One pipeline stage, represented by its rank with the largest share of the optimizer states."""

    role: str  # "actor" or "critic"
    number: int
    rank: int
    held: RankMemory
    activations: Activations | None
    not_counted: str | None  # the reason if `activations` is None
    host: int = 0  # bytes of host memory: see `host.host_copies`
    chunks: int = 1  # model chunks of the stage: more than one under virtual pipeline stages

    @property
    def name(self) -> str:
        return f"{self.role} {self.number}"


@dataclass(frozen=True)
class EngineRank:
    """Memory of one device of an engine, counted from the engine's model."""

    parameters: int
    weights: int  # bytes, with tables and copies that the engine derives from them
    cache_per_token: float  # bytes of KV cache per token of one sequence
    working: int  # bytes of the largest step beyond weights and cache
    cache: int | None = None  # bytes left for the KV cache; None: the device is not known
    sequences: float | None = None  # sequences of the longest length that fit into the whole engine at a time
    devices: int = 1  # of all engines of this model
    largest: int = 0  # bytes that loading the largest layer takes: its new weights, and their quantized copy
    tables: int = 0  # part of `weights`: rotary tables and the like, and copies of a weight that MLA makes
    recomputed: int = 0  # bytes of weights that MLA recomputes at the first update and keeps while asleep
    received: int = 0  # bytes of the weights that an update brings: as in the checkpoint, before they are quantized
    asleep: int = 0  # bytes on the host while the engine sleeps and keeps its weights

    @property
    def name(self) -> str:
        return "engine"


@dataclass(frozen=True)
class Use:
    """Bytes of one device in one phase, by part. Phases have the names of `timing_s/...` if there is such a metric."""

    phase: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class DeviceUses:
    """Devices with equal memory: of a pipeline stage, of an engine, or of both if they time-share devices."""

    name: str
    devices: int
    uses: list[Use]
    not_counted: str | None = None  # parts that are not known, so that every total is a lower bound

    @property
    def peak(self) -> Use:
        return max(self.uses, key=lambda use: use.total)


@dataclass(frozen=True)
class HostUse:
    """Host memory of equal machines in bytes, by part."""

    name: str  # "node 0", "nodes 1-15"
    nodes: int
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True)
class PhaseTime:
    """Estimated time of one phase. `bound`: the limiting resource; `assumed`: assumptions of the estimate."""

    name: str  # as in timing_s/...
    seconds: float
    bound: str
    assumed: str
    begin: float | None = None  # seconds since the begin of the step; None: directly after the previous phase
    parts: dict[str, float] = field(default_factory=dict)  # seconds by cause: see cost.py


@dataclass(frozen=True)
class Estimate:
    """Estimated time of one step."""

    phases: list[PhaseTime]
    seconds: float  # of the step: overlapping phases count once
    tokens: float  # prompts and responses
    micro_batches: int  # per mini batch and data-parallel rank
    tokens_per_micro_batch: float
    bubble: float  # share of the update in which a pipeline stage waits
    response: float  # mean tokens of a response
    uncalibrated: Estimate | None = None  # with the table's rates, if a calibration was applied
    weights: dict[str, float] = field(default_factory=dict)  # seconds of a weight update, by route

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Spread:
    """Expected seconds of a phase from published runs: the least, the geometric mean and the most."""

    name: str
    low: float
    typical: float
    high: float
    runs: int


@dataclass(frozen=True)
class Links:
    """Bytes of one weight update by the recipe's route."""

    route: str  # "full", "sharded" or "adapters"
    sent: int  # by the trainer rank that sends most
    received: int  # by the engine rank that receives most
    total: int
    between_nodes: int  # part of the total


@dataclass(frozen=True)
class Variable:
    """An environment variable of a role's processes, and the reason for its value."""

    role: str  # "trainers" or "engines"
    name: str
    value: str
    why: str


@dataclass(frozen=True)
class Refusal:
    """A reason why the recipe cannot work: its key, the arithmetic and a remedy."""

    key: str
    problem: str
    remedy: str


@dataclass(frozen=True)
class Suggestion:
    """A layout that fits: command-line overrides, and its step time relative to the recipe's, both estimated by layout
    alone."""

    overrides: str
    times: float


@dataclass(frozen=True)
class RecipePlan:
    """The plan of one recipe on one kind of device."""

    recipe: str  # its name
    device: Device | None
    stages: list[PipelineStage]
    engine: EngineRank | None  # of the policy
    places: list[DeviceUses]
    estimate: Estimate | None
    weight_sync: Links | None
    readers: dict[str, EngineRank] = field(default_factory=dict)  # engines of teacher and judge
    memory: float | None = None  # GiB of a device; None: not known
    refusals: list[Refusal] = field(default_factory=list)
    suggestions: list[Suggestion] = field(default_factory=list)  # fastest first
    not_counted: list[str] = field(default_factory=list)  # sections with uncounted engines: see unchecked
    unchecked: list[str] = field(default_factory=list)  # checks that were impossible here, with reasons
    notes: list[str] = field(default_factory=list)
    hosts: list[HostUse] = field(default_factory=list)  # empty without a device, and on a CPU
    routes: list[WeightRoute] = field(default_factory=list)  # of the weights, the expected one first
    spread: list[Spread] = field(default_factory=list)  # per phase and for the step; empty with a calibration
    compared: list[str] = field(default_factory=list)  # names of the published runs behind `spread`
    own_runs: list[str] = field(default_factory=list)  # those in `compared` with the recipe's model
    without_own: Spread | None = None  # of the step, from the other runs; None: no other runs, or `own_runs` is empty
    model_kind: str = ""  # "with experts" or "without experts": the kind of model of these runs and of the recipe
    environment: list[Variable] = field(default_factory=list)  # set by the recipe, or needed by its layout

    @property
    def most(self) -> int:
        """Bytes of the fullest device, or, without a device, of the largest weights: chooses the display unit."""
        of_devices = (place.peak.total for place in self.places if place.uses)
        return max(of_devices, default=0) or max((stage.held.weights for stage in self.stages), default=0)

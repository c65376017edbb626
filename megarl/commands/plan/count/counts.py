"""What is counted of a rank, and what its device and host hold of it in each phase of a step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Held:
    """Of one rank; all but the first two in bytes, padding of Megatron's buffers included."""

    parameters: int
    trained: int  # of these, those that an optimizer step changes
    weights: int
    buffers: int  # a model's tensors that are not parameters: routing biases, rotary frequencies
    gradients: int
    masters: int  # weights of higher precision; 0 where the optimizer's parameters are views of the weights
    moments: int  # Adam's
    reference: (
        int  # the reference policy's weights, on the host, where a recipe has one; 0 for a critic and with adapters
    )
    on_host: int = 0  # masters, moments and gradients of an optimizer on the host (optimizer_cpu_offload)
    weights_pinned: int = 0  # page-locked copies of these on the host, storage by storage
    states_pinned: int = 0  # of masters and moments
    reference_pinned: int = 0
    saved: int = (
        0  # what the rank writes into a checkpoint: its share of masters, moments, and of the weights with them
    )

    def with_states_on_host(self, share: float) -> Held:
        """`share` of masters and moments on the host, with the gradients that it gets in float32, as large as the masters."""
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
    """Bytes at the peak of each phase, of one rank."""

    forward: int  # a pass without gradients: log-probs, or values
    update: int  # forward and backward of a mini batch
    kept: int  # of `update`, what forward passes keep for backward passes, when most of them wait for theirs
    optimizer: int  # the optimizer's update
    forward_logits: int = 0  # of `forward`, tensors of a row's whole share of the vocabulary
    update_logits: int = 0  # of `update`

    @property
    def peak(self) -> int:
        return max(self.forward, self.update, self.optimizer)


@dataclass(frozen=True)
class Phase:
    """Bytes on the device and in the host's memory, of one rank."""

    device: int
    host: int


def phases(
    held: Held, beyond: Activations | None, *, reference: bool, leaves: bool, swaps: int | None = None
) -> dict[str, Phase]:
    """`reference`: the recipe keeps a reference policy. `leaves`: the rank leaves its device to the engines, as
    `Offloader` does it. `swaps`: master weights and moments are on the host, and one of so many parts at a time on the
    device. Without `beyond`, there are no phases that compute.

    What has been away once has its place on the host for good, and comes back at the next step.
    """
    states = held.masters + held.moments
    on_device = 0 if swaps else states
    all_of_it = held.weights + held.buffers + held.gradients + on_device
    kept = held.reference if reference else 0
    host = kept + held.on_host + (held.weights if leaves else 0) + (states if leaves or swaps else 0)
    found = {"resident": Phase(all_of_it, host)}
    if beyond is not None:
        found["log_probs"] = Phase(all_of_it + beyond.forward, host)
        found["update"] = Phase(all_of_it + beyond.update, host)
        found["optimizer"] = Phase(all_of_it + (states // swaps if swaps else beyond.optimizer), host)
    found["exchange"] = Phase(held.weights + held.buffers if leaves else all_of_it, host)
    found["rollout"] = Phase(held.buffers if leaves else all_of_it, host)
    return found

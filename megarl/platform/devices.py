"""What kinds of devices can do, as far as plans need it: a table in devices.yaml, to which a user's own file adds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Device:
    """One device as torch sees it, of an Ascend 910C one of its two dies. Rates are those of data sheets; the shares say
    how much of them phases reach, and are what `plan --calibrate` fits."""

    name: str
    source: str  # where the figures are from
    memory: float  # GiB
    flops: float  # dense bf16, FLOP/s
    bandwidth: float  # of its memory, bytes/s
    link: float  # to another device of the node, one direction, bytes/s
    network: float  # to another node, one direction, bytes/s of a device
    host_link: float  # to the host's memory, one direction, bytes/s
    per_node: int
    host_memory: float  # GiB of the node
    train_share: float  # of flops: forward and backward passes of trainers
    prefill_share: float  # of flops: engines reading prompts
    decode_share: float  # of bandwidth: engines writing
    link_share: float  # of link, network and host_link


def devices(own: Path | None = None) -> dict[str, Device]:
    """The table by name, with those of `own` (YAML) added. Raises InputError for a file that is no such table."""
    raise NotImplementedError

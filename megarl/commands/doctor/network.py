"""Ports, interfaces, and what the launcher takes this machine for."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping

from megarl.commands.doctor.check import check
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.found import platform_of
from megarl.commands.doctor.machine import Machine
from megarl.commands.launch.topology import DEFAULT_PORT, read_topology
from megarl.platform.device_kind import DeviceKind
from megarl.platform.kinds import KINDS

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_EPHEMERAL = "/proc/sys/net/ipv4/ip_local_port_range"
_RESERVED = "/proc/sys/net/ipv4/ip_local_reserved_ports"


@check("launch", "which node of how many launch/multinode.sh takes this machine for, by the launcher's variables")
def launch(machine: Machine, needs: Needs) -> Iterator[Finding]:
    try:
        topology = read_topology(machine.environ)
    except ValueError as error:
        yield fail(str(error), "correct these variables on this node, see the head of launch/multinode.sh")
        return
    if topology.nodes > 1:
        yield ok(f"node rank {topology.node_rank} of {topology.nodes}, Ray's head at {topology.ray_address}")


@check("ray", "that the cluster which the run would join (cluster.ray_address, RAY_ADDRESS) answers")
def ray_address(machine: Machine, needs: Needs) -> Iterator[Finding]:
    host, _, port = needs.ray_address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        remedy = "start it (launch/multinode.sh does), correct the address, or unset RAY_ADDRESS for a private one"
        yield fail(f"nothing answers at {needs.ray_address}: {error.strerror or error}", remedy)
        return
    yield ok(f"{needs.ray_address} answers")


_WITH_RANGES = " and ".join(f"{kind.collective}'s range" for kind in KINDS if kind.port_ranges)


@check(
    "ports",
    f"Ray's ports can be listened on (where none is joined); of {_WITH_RANGES} as many as there are processes",
)
def ports(machine: Machine, needs: Needs) -> Iterator[Finding]:
    parts: list[str] = []
    if not needs.ray_address and needs.ray:
        first = _ray_port(machine)
        taken = [f"{port} ({why})" for port in range(first, first + 3) if (why := machine.cannot_bind(port))]
        said, remedy = (
            f"Ray's ports that cannot be listened on: {', '.join(taken)}",
            "set MASTER_PORT to another, on every node",
        )
        if taken and needs.nodes > 1:
            yield fail(said, remedy)
        elif taken:
            yield warning(f"{said} (one machine alone does not use them)", f"for launch/multinode.sh {remedy}")
        else:
            parts.append(f"{first} to {first + 2} (Ray) are free")
    kind = platform_of(machine, needs).kind
    if kind.port_ranges:
        found = list(_ranges(machine, kind))
        yield from found
        parts += [] if found else [f"{kind.collective}'s ranges are free"]
    if parts:
        yield ok(", ".join(parts))


def _ray_port(machine: Machine) -> int:
    try:
        return read_topology(machine.environ).port
    except ValueError:  # the check `launch` says it
        return DEFAULT_PORT


def _ranges(machine: Machine, kind: DeviceKind) -> Iterator[Finding]:
    """Trainer and engine of a colocated device are two processes, which must not meet on one port."""
    for ports in kind.port_ranges:
        variable = ports.variable
        value = machine.environ.get(variable, ports.default)
        if value == "auto":
            continue
        numbers = _ports(value)
        if numbers is None:
            yield fail(
                f"{variable}={value} is no range of ports",
                f"write e.g. {ports.default}, or unset it (megarl sets that)",
            )
            continue
        taken = [port for port in numbers if machine.cannot_bind(port)]
        left, wanted = len(numbers) - len(taken), 2 * len(machine.glob(kind.files))
        if not ports.on_host:
            continue  # the host's own say nothing of them
        if left < wanted:
            said = f"{variable}={value}: {left} of {len(numbers)} ports are free, {wanted} processes want one each ({kind.port_error})"
            yield fail(said, "end what listens there (ss -ltnp), or set another range on every node")
        elif taken:
            yield warning(f"{variable}={value}: {len(taken)} are taken, from {taken[0]} on", "ss -ltnp names by what")
        if overlap := _handed_out(machine, numbers):
            said = f"{variable}={value}: the system hands {overlap} of these ports out to any connection ({_EPHEMERAL})"
            yield warning(said, f"sysctl -w net.ipv4.ip_local_reserved_ports={value}")


def _ports(value: str) -> list[int] | None:
    """Of "60000-60050", or several of them after commas; None for anything else."""
    numbers: list[int] = []
    for part in value.replace(" ", "").split(","):
        found = _RANGE.fullmatch(part)
        if found is None or int(found[1]) > int(found[2] or found[1]) or int(found[2] or found[1]) > 65535:
            return None
        numbers += range(int(found[1]), int(found[2] or found[1]) + 1)
    return numbers


def _handed_out(machine: Machine, numbers: list[int]) -> int:
    """How many of these ports the system may give to an outgoing connection."""
    ephemeral = (machine.read(_EPHEMERAL) or "").split()
    if len(ephemeral) != 2:
        return 0
    reserved = set(_ports((machine.read(_RESERVED) or "").strip()) or [])
    return sum(int(ephemeral[0]) <= port <= int(ephemeral[1]) and port not in reserved for port in numbers)


@check(
    "interfaces", "that *_SOCKET_IFNAME name interfaces that exist and are up; over several nodes, that they are set"
)
def interfaces(machine: Machine, needs: Needs) -> Iterator[Finding]:
    kind, up = platform_of(machine, needs).kind, interfaces_up(machine)
    whole = {"GLOO_SOCKET_IFNAME": True, **kind.interface_variables}  # -> whether it takes whole names alone
    wanted = list(whole)
    good = True
    for variable in wanted:
        value = machine.environ.get(variable)
        if value is None:
            continue
        if problem := _unusable(value, up, whole=whole[variable]):
            good = False
            there = ", ".join(name for name, is_up in up.items() if is_up) or "none"
            yield fail(
                f"{variable}={value}: {problem}", f"name one that is up here ({there}): it may differ from node to node"
            )
    outer = [name for name, is_up in up.items() if is_up and name != "lo"]
    unset = [variable for variable in wanted if variable not in machine.environ]
    if good and needs.nodes > 1 and len(outer) > 1 and unset:
        said = (
            f"{', '.join(unset)} not set, and {len(outer)} interfaces are up ({', '.join(outer[:6])}): one is guessed"
        )
        yield warning(said, "name the one that reaches the other nodes, on each node")
    elif good:
        yield ok(f"{', '.join(outer) or 'lo alone'} up" + ("" if len(unset) == len(wanted) else ", as named"))


def interfaces_up(machine: Machine) -> Mapping[str, bool]:
    """Of each network interface whether it is up (IFF_UP, and not known to be without a carrier)."""
    found = {}
    for folder in machine.glob("/sys/class/net/*"):
        flags = int((machine.read(f"{folder}/flags") or "0").strip(), 16)
        found[folder.rsplit("/", 1)[1]] = (
            bool(flags & 1) and (machine.read(f"{folder}/operstate") or "").strip() != "down"
        )
    return found


def _unusable(value: str, up: Mapping[str, bool], *, whole: bool) -> str:
    """What is wrong with the interfaces named; "" with none. `whole`: they are whole names, as gloo takes them; else
    beginnings of names, "=name" for the whole of one, "^name" for all others."""
    exact = whole or value.startswith("=")
    excluded = value.startswith("^")
    for name in filter(None, value.lstrip("=^").split(",")):
        fits = [one for one in up if (one == name if exact else one.startswith(name))]
        if excluded:
            continue
        if not fits:
            return f"there is no interface {name}"
        if not any(up[one] for one in fits):
            return f"{name} is down"
    return "" if value.strip("=^,") else "it names none"

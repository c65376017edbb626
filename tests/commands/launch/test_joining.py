"""Launchers of one run: the secret, strangers at the rendezvous, taken ports, and another service at Ray's port."""

from __future__ import annotations

import json
import re
import resource
import socket
import stat
import subprocess
import sys
import threading
import time
import venv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.cluster.process import free_port
from megarl.commands.launch import multinode, rendezvous
from megarl.commands.launch.join_secret import JoinFile, secret_of_environment
from megarl.commands.launch.joining import RayConnection, join, taken_port
from megarl.commands.launch.rendezvous import RendezvousClient, RendezvousServer
from megarl.commands.launch.topology import Topology, address_notice, loopback_problem, read_topology
from megarl.recipe.schema import Recipe
from tests.support.cluster_workers import wait_until
from tests.support.stack import ROOT, environment


def topology(port: int, rank: int = 1, timeout: float = 5.0) -> Topology:
    return Topology(rank, 2, "127.0.0.1", port, 1, None, timeout)


def exchange(port: int, line: bytes) -> list[dict[str, Any]]:
    """Send a line to the head and return all of its messages."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger, stranger.makefile("r") as answers:
        challenge = json.loads(answers.readline())
        try:
            stranger.sendall(line)
            return [challenge, *map(json.loads, answers)]
        except ConnectionError:  # closed with bytes unread
            return [challenge]


@pytest.mark.parametrize(
    "line",
    [
        b'{"node_rank": 1, "nodes": 2, "host": "stranger"}\n',
        b'{"node_rank": 1, "nodes": 2, "host": "stranger", "proof": "00"}\n',
        b'{"failed": "a lie"}\n',
        b'{"node_rank": 1, "proof": "\\ud800"}\n',
        b"[" * 60_000 + b"\n",
        b"no json\n",
    ],
)
def test_a_stranger_learns_nothing_and_takes_no_rank(line: bytes) -> None:
    port, token = free_port(), "the-token-of-ray"
    server = RendezvousServer("127.0.0.1", port, 2, token)
    server.open()
    messages = exchange(port, line)
    assert set(messages[0]) == {"challenge"} and all(set(message) == {"refused"} for message in messages[1:])
    assert token not in json.dumps(messages)
    assert server.absent() == [1] and server.failed() == {}
    node = RendezvousClient("127.0.0.1", port, 1, 2, timeout=5, secret=token)
    assert wait_until(lambda: node.ready, 5), node.refusal
    server.finish(0)


def test_a_proof_serves_for_its_connection_alone() -> None:
    """A proof that a stranger has read from the network does not answer another challenge."""
    port = free_port()
    server = RendezvousServer("127.0.0.1", port, 2, "secret")
    hello = {"node_rank": 1, "nodes": 2, "host": "node"}
    old = hello | {"proof": rendezvous.proof("secret", "an earlier challenge", hello)}
    assert "secret of this run" in exchange(port, json.dumps(old).encode() + b"\n")[1]["refused"]
    server.finish(0)


def test_an_endless_line_costs_no_memory() -> None:
    port = free_port()
    server = RendezvousServer("127.0.0.1", port, 2, "secret")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    exchange(port, b"x" * (100 << 20))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 220 << 10, "kibibytes; the test holds 100 MiB"
    server.finish(0)


def test_silent_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "PROOF_SECONDS", 0.2)
    monkeypatch.setattr(rendezvous, "MOST_UNKNOWN", 2)
    port = free_port()
    server = RendezvousServer("127.0.0.1", port, 2, "secret")
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(5)]
    node = RendezvousClient("127.0.0.1", port, 1, 2, timeout=5, secret="secret")
    assert wait_until(lambda: node.admitted, 5)
    time.sleep(0.4)
    assert server.absent() == [], "a member may be silent"
    for connection in silent:
        connection.close()
    server.finish(0)


def test_a_slow_stranger_has_one_limit_for_all_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then would otherwise hold one of the places for unknown connections forever."""
    monkeypatch.setattr(rendezvous, "PROOF_SECONDS", 0.5)
    port = free_port()
    server = RendezvousServer("127.0.0.1", port, 2, "secret")
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", port)) as stranger, pytest.raises(ConnectionError):
        while time.monotonic() - began < 5:
            stranger.sendall(b" ")
            time.sleep(0.1)
    server.finish(0)


@pytest.mark.parametrize(
    ("banner", "error", "words"),
    [
        (b"", TimeoutError, r"sends nothing, after 0\.5 s \(MEGARL_JOIN_TIMEOUT\)"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", ConnectionError, "sends other messages than node rank 0 does"),
        (b"5\n", ConnectionError, "sends other messages"),
        (b"\xff\xfe\n", ConnectionError, "sends other messages"),
    ],
)
def test_another_program_at_the_heads_port_is_named(
    banner: bytes, error: type[OSError], words: str, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        connections: list[socket.socket] = []

        def serve() -> None:
            connections.append(other.accept()[0])
            connections[0].sendall(banner)

        threading.Thread(target=serve, daemon=True).start()
        place = topology(other.getsockname()[1] - 1, timeout=0.5)
        with pytest.raises(error, match=f"{words}.*set MASTER_PORT"):
            join(place, {"RAY_AUTH_TOKEN": "mine"}, JoinFile(tmp_path, place))
        connections[0].close()


def test_a_head_that_fails_leaves_no_secret_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
        monkeypatch.setenv(name, "restored after the test")
    written: list[bool] = []

    def fail(*_: object) -> None:
        written.extend(path.exists() for path in tmp_path.iterdir())
        raise OSError("no such address")

    monkeypatch.setattr(multinode, "RendezvousServer", fail)
    environ = {
        "NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "MEGARL_JOIN_DIR": str(tmp_path),
    }  # fmt: skip
    assert multinode.main(["--", "true"], environ) == 1
    assert written == [True] and not list(tmp_path.iterdir())


def test_members_read_the_secret_from_a_file_of_their_user(tmp_path: Path) -> None:
    """The file of a killed run is refused, and replaced when the head has started."""
    port = free_port()
    file = JoinFile(tmp_path / "runs", topology(port, 0))
    stale = file.write({})
    fresh = JoinFile(tmp_path / "new", topology(port, 0)).write({})
    result: list[Any] = []
    member = threading.Thread(target=lambda: result.append(join(topology(port, timeout=30), {}, file)))
    server = RendezvousServer("127.0.0.1", port + 1, 2, fresh["RAY_AUTH_TOKEN"])
    member.start()
    time.sleep(0.5)
    assert not result
    (tmp_path / "new" / file.path.name).replace(file.path)
    member.join(20)
    client, variables = result[0]
    assert client.admitted and variables == fresh != stale
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600 and file.path.name == f".megarl-join-127.0.0.1-{port}.json"
    server.finish(0)


def test_a_member_that_does_not_see_the_file_says_where_it_looks(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(TimeoutError, match=r"\.megarl-join-127\.0\.0\.1-\d+\.json is missing.*MEGARL_JOIN_DIR"):
        join(topology(port, timeout=0.3), {}, JoinFile(tmp_path, topology(port)))


def test_the_users_token_is_the_secret(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-a-file\n")
    assert secret_of_environment({"RAY_AUTH_TOKEN": "mine"}) == "mine"
    assert secret_of_environment({"RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}) == "from-a-file"
    assert secret_of_environment({"RAY_AUTH_MODE": "disabled"}) == "" and secret_of_environment({}) is None


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_taken_port_ends_the_head_with_its_number(offset: int, tmp_path: Path) -> None:
    """Redis has Ray's port by default; `ray.init` waited for its answer for minutes."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port + offset)):
        assert taken_port(topology(port, 0)) == port + offset
        head = subprocess.run(
            [sys.executable, "-m", "megarl.commands.launch.multinode", "--", "true"],
            cwd=ROOT,
            env={
                **environment(), "NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                "MEGARL_JOIN_DIR": str(tmp_path),
            },
            capture_output=True,
            text=True,
            timeout=60,
        )  # fmt: skip
    assert head.returncode == 1 and f"port {port + offset} of this machine is in use" in head.stderr
    assert "Traceback" not in head.stderr and not list(tmp_path.iterdir())


def test_rays_end_is_noticed_while_another_service_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray.init` may hang for minutes in native code, where no signal is handled."""
    hanging = threading.Event()
    monkeypatch.setattr(RayConnection, "_connect", lambda *_: hanging.wait(60))
    server: Any = SimpleNamespace(failed=dict, ending=list, open=lambda: None)
    polls = iter([None, None, 1])
    process: Any = SimpleNamespace(poll=lambda: next(polls), returncode=1)
    with socket.create_server(("127.0.0.1", 0)) as redis:
        place = topology(redis.getsockname()[1], 0)
        began = time.monotonic()
        problem, _ = multinode._wait_for_nodes(place, "cpu", server, process, began + 60)
    assert problem == "Ray's head ended with exit code 1" and time.monotonic() - began < 20
    hanging.set()


def test_a_command_has_the_folder_of_recipes() -> None:
    assert Recipe().runs_dir == multinode.RUNS_DIR


def test_the_launcher_takes_the_environment_of_megarl_venv(tmp_path: Path) -> None:
    """The other scripts of launch/ do; without it, every node fails where .venv does not exist."""
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text('#!/bin/sh\necho "environment of the test: $*"\n')
    python.chmod(0o755)
    command = ["bash", "launch/multinode.sh", "recipe.yaml"]
    variables = {**environment(), "MEGARL_VENV": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=30)
    assert done.stdout == "environment of the test: -m megarl.commands.launch.multinode recipe.yaml\n"


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_the_launcher_prints_its_variables(option: str) -> None:
    done = subprocess.run(
        ["bash", "launch/multinode.sh", option], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0 and not done.stderr
    text = (ROOT / "launch" / "multinode.sh").read_text()
    names = re.findall(r"^#   ([A-Z_]{6,})", text, re.M)
    assert {"MASTER_ADDR", "MEGARL_VENV"} < set(names) and all(f"  {name}" in done.stdout for name in names)
    assert "launch/multinode.sh RECIPE" in done.stdout and "set -eu" not in done.stdout and "#" not in done.stdout


def test_missing_packages_are_named_without_a_traceback(tmp_path: Path) -> None:
    """A node where megarl was never installed, or a Python environment of another machine."""
    venv.create(tmp_path, with_pip=False)
    variables = {**environment(), "MEGARL_VENV": str(tmp_path), "PYTHONPATH": ""}
    done = subprocess.run(
        ["bash", "launch/multinode.sh", "recipe.yaml"],
        cwd=ROOT, env=variables, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"not installed for {tmp_path}/bin/python" in done.stderr and "MEGARL_VENV" in done.stderr


def test_a_recipe_that_is_missing_is_an_error_as_of_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert multinode.main(["nosuch.yaml"], {}) == 2
    assert capsys.readouterr().err.startswith("megarl multinode: recipe error:\n  where  command line\n")


def test_a_mistyped_name_of_the_head_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not after the time for joining, as a missing file of the head."""

    def find(name: str, port: None) -> list[str]:
        if name != "node0":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    monkeypatch.setattr("socket.getaddrinfo", find)
    assert address_notice(replace(topology(6379, 1), master="node0")) is None
    environ = {
        "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "noed0", "MEGARL_JOIN_DIR": str(tmp_path), "MEGARL_JOIN_TIMEOUT": "0.1",
    }  # fmt: skip
    assert multinode.main(["--", "true"], environ) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "node rank 1: MASTER_ADDR=noed0 has no address on this node (Name or service not known)" in first
    assert "is missing, after 0 s" in second


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loopback_address_for_several_nodes_has_a_notice(rank: int) -> None:
    """Such nodes must be on one machine: a member on another one waits until the time limit, for 127.0.0.2, which nobody has set."""
    variables = {"NNODES": "2", "NODE_RANK": str(rank)}
    notice = address_notice(read_topology(variables | {"MASTER_ADDR": "localhost"}))
    assert notice is not None and f"node rank 0 has 127.0.0.2, this one 127.0.0.{2 + rank}" in notice
    assert address_notice(read_topology(variables | {"MASTER_ADDR": "10.0.0.9"})) is None


def test_a_head_whose_name_is_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """/etc/hosts of Debian and Ubuntu gives a machine's own name 127.0.1.1: other nodes would wait until the time limit."""
    head = replace(topology(6379, 0), master="node0")
    monkeypatch.setattr("socket.gethostbyname", lambda name: {"node0": "127.0.1.1", "node9": "10.0.0.9"}[name])
    problem = loopback_problem(head)
    assert problem is not None and "MASTER_ADDR=node0 is 127.0.1.1" in problem
    assert loopback_problem(replace(head, master="node9")) is None
    assert loopback_problem(replace(head, nodes=1)) is None
    assert loopback_problem(replace(head, node_ip="127.0.0.2")) is None, "several nodes on one machine, for trials"

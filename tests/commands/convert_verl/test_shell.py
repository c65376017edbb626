"""Scripts are evaluated as bash evaluates them, and what only a running shell knows is an error."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path

import pytest

from megarl.commands.convert_verl.command import convert
from megarl.commands.convert_verl.shell import syntax
from megarl.commands.convert_verl.shell.parser import Command, read_command
from megarl.commands.convert_verl.shell.values import ScriptContext, absent
from megarl.errors import InputError

MAIN = "python3 -m verl.trainer.main_ppo"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
MACHINE = ScriptContext(script="scripts/run.sh", folder="/home/me/verl", now=NOW)


def arguments(script: str, context: ScriptContext = MACHINE, **variables: str) -> list[str]:
    """Return the arguments of the training command."""
    return [argument.text for argument in read_command(script, {"HOME": "/h", **variables}, context).arguments]


def notes(script: str, **variables: str) -> list[str]:
    return read_command(script, {"HOME": "/h", **variables}, MACHINE).notes


def by_bash(script: str) -> list[str]:
    printing = script.replace(MAIN, "printf '%s\\0'")
    environment = {"HOME": "/h", "PATH": os.environ["PATH"]}
    done = subprocess.run(["bash", "-c", printing], capture_output=True, text=True, env=environment, check=True)
    return done.stdout.split("\0")[:-1]


# Scripts that end with the training command. For bash, printf replaces it.
SCRIPTS = {
    "if": 'if [ "${A:-1}" != 0 ] && [ x = x ]; then X=1; else X=2; fi\nMAIN x=$X',
    "elif": 'B=sglang\nif [ "$B" = vllm ]; then X=1\nelif [ "$B" == sglang ]; then X=2\nelse X=3; fi\nMAIN x=$X',
    "nested tests": "B=vllm\nif [ 1 -lt 2 ] && { [ $B = vllm ] || [ $B = trt ]; } && ! [ -z $B ]; then X=1; fi\nMAIN x=$X",
    "double brackets": 'M=Qwen3-8B\nif [[ $M == *-8B && ! "$M" == "*-8B" && $M =~ ^Qwen ]]; then X=1; fi\nMAIN x=$X',
    "numbers": "N=8\nif ((N % 4 == 0 && N > 4)); then X=$((N / 4)); fi\nif [[ N -ge 8 ]]; then Y=1; fi\nMAIN x=$X y=$Y",
    "case": 'D=npu\ncase "${D}" in\n gpu | cuda) X=1 ;;\n n*) X=2; Y=(a b) ;;\n *) X=3 ;;\nesac\nMAIN x=$X "${Y[@]}"',
    "quoted pattern": "case 'a*' in 'a*') X=1;; *) X=2;; esac\ncase ab in 'a*') Y=1;; a?) Y=2;; esac\nMAIN $X $Y",
    "arrays in a branch": 'L=(python)\nE=()\nif true; then E+=(k=1 "m=a b"); L+=(-m); fi\nMAIN "${E[@]}" n=${#E[@]} ${L[1]}',
    "array after &&": "E=(a)\n[ x = x ] && E+=(b c)\n[ x = y ] && E+=(d)\n[ x = y ] || E+=(e)\nMAIN ${E[@]}",
    "empty arrays": 'E=()\nMAIN a "${E[@]}" ${E[@]+"${E[@]}"} "x${E[*]}y" ${E[@]:-none}',
    "for": 'for f in a b "c d"; do F+=("$f.parquet"); done\nMAIN "${F[@]}" last="$f"',
    "for with break": "S=\nfor i in 1 2 3 4; do [ $i = 2 ] && continue; [ $i = 4 ] && break; S=$S$i; done\nMAIN s=$S",
    "counted for": "S=\nfor ((i = 0; i < 3; i++)); do S+=$i; done\nMAIN s=$S i=$i",
    "while": "N=1\nwhile [ $N -lt 100 ]; do N=$((N * 3)); done\nuntil ((N < 10)); do ((N /= 2)) || true; done\nMAIN n=$N",
    "function": 'OUT=\nadd() {\n  local name=$1; shift\n  OUT="$OUT $name:$# $*"\n}\nadd a b c\nadd d\nMAIN o="$OUT" n=${name:-none}',
    "function with return": "f() { if [ $1 = a ]; then return 0; fi; return 1; }\nf a && X=1\nf b || Y=2\nMAIN $X $Y",
    "function that trains": 'run() { MAIN lr=$1 "${@:-z}"; }\nMAIN_=1\nrun 2',
    "output of a function": "f() { echo first; printf '%s-%d' $1 2; }\nX=$(f a)\nMAIN \"$X\" $(f b)",
    "arguments": 'set -- a \'b c\'\nMAIN $# "$1" $2 "$@" "$*"',
    "shift": "set -- a b c\nshift\nX=$1\nshift 2\nMAIN $X $# ${1:-none}",
    "options": 'N=1\nwhile [[ $# -gt 0 ]]; do case "$1" in --n) N=$2; shift 2;; *) shift;; esac; done\nMAIN n=$N "$@"',
    "subshell": "X=1\n(X=2; cd /tmp)\nMAIN x=$X",
    "here-document": "cat > /dev/null << EOF\nMAIN is not run: $X $(date)\nEOF\nX=$(cat << 'END'\nq\nEND\n)\nMAIN x=1",
    "bash -c": "A=1\nbash -c \"MAIN a=$A b='c d'\"",
    "bash with a here-document": "A=1\nbash << EOF\nMAIN a=$A \\\n  b=2\nEOF",
    "eval": 'K=X\neval "$K=1"\nMAIN x=$X',
    "removals": "P=a/b/c.tar.gz\nMAIN ${P##*/} ${P#*/} ${P%.*} ${P%%.*} ${P%/*}/x ${P#z}",
    "replacements": "M=Qwen/Qwen3.5-8B\nMAIN ${M//./_} ${M/Qwen/Q} ${M,,} ${M^^} ${M:5:4} ${M:5} ${#M} ${M//[0-9]/N}",
    "defaults": 'E=\nMAIN ${U-d} ${E-d} a${E:-} ${E:+x} ${E+x} "${U:-\'a\'}" ${U:-\'a b\'} "${U:-"a b"}" ${V:=v w} $V "${U:-a  b}"',
    "appending": "S=a\nS+=b\nA=(1)\nA+=(2 3)\nA+=x\nMAIN $S ${A[@]} ${A[2]}",
    "quotes": 'MAIN \'a"b\' "a\\"b\\$c\\d" a\\ b $\'x\' "" a""b \\"q\\" "l1\nl2" a=[\'x\',\'y\'] \'\' #c',
    "splitting": 'S=\'  a  b \'\nMAIN $S x${S}y "$S" "x$S"y',
    "arithmetic": "A=6 B=4\nMAIN $((A / B)) $((-A / B)) $((A % -B)) $((2 ** 10)) $((A > B && B)) $((0x10 | 010)) $(( (A + B) * 2 )) $(((A+B)*2)) $((!A)) $((A <<= 1)) $A",
    "command output": 'MAIN $(basename a/b.sh .sh) $(dirname a/b/c) $(dirname c) `echo x y` $(seq 2 4) "$(seq 3)" $(echo -n a)b',
    "folders": 'cd /usr/lib\nX=$(cd .. && pwd)\ncd "$(dirname "$PWD")/bin"\nMAIN $X $PWD $(pwd)',
    "prefix assignments": "X=1\nX=2 true\nMAIN x=$X",
    "assignments on a line": "A=1 B=$A\nif true; then C=3; fi\ntrue | true | true\nD=4 && E=5\nMAIN $A $B $C $D $E",
    "export": 'export A=1 B="x y"\nreadonly C=$A\ndeclare -a D=(1 2)\nexport A\nMAIN $A "$B" $C ${D[@]}',
    "unset": "A=1\nunset A\nMAIN ${A:-u}",
    "negation": "if ! [ a = b ]; then X=1; fi\n! true || Y=2\nMAIN $X ${Y:-y}",
    "status of a substitution": "X=$(false) || X=5\nY=$(true) || Y=6\nif Z=$(exit 3); then Z=a; else Z=b; fi\nMAIN $X $Y $Z",
    "failures that set -e permits": "set -o pipefail -e\nf() { false; X=1; }\nif f; then X=2; fi\nfalse || Y=2\nfalse && Y=3\n! true\n(set +e; false; true)\nexport V=$(false; echo a)\nMAIN $X $Y $V",
    "home": "X=~/m\nMAIN $X ~/d '~/e' a=~/f",
    "redirections": "X=$(echo a; echo b >&2; echo c > /dev/null) 2> /dev/null\nMAIN $X",
    "quoted equals": "MAIN +a.b=c ~x 'a=[1,2]' \"a={'b':1}\" a=\\{b\\}",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_is_evaluated_as_by_bash(name: str) -> None:
    script = re.sub(r"\bMAIN(?!_)", MAIN, SCRIPTS[name])
    assert arguments(script) == by_bash(script)


def test_date_folder_and_path_come_from_the_conversion() -> None:
    """The date, the current folder and the script's path are values, and a note says so if the command uses them."""
    script = "\n".join(
        [
            'NAME=$(basename -- "${BASH_SOURCE[0]}" .sh)-$(date +%Y%m%d_%H%M)',
            'HERE=$(cd "$(dirname "$0")" && pwd)',
            "UNUSED=$(date +%s)",
            f"{MAIN} name=$NAME dir=$HERE/out pwd=$(pwd)",
        ]
    )
    assert arguments(script) == ["name=run-20260102_0304", "dir=/home/me/verl/scripts/out", "pwd=/home/me/verl"]
    assert notes(script) == [
        "line 1: $(date) is the time of this conversion, 2026-01-02 03:04:05",
        "line 1: the script's path is scripts/run.sh",
        "line 2: the current folder is /home/me/verl/scripts, as in this conversion",
        "line 2: the script's path is scripts/run.sh",
        "line 4: the current folder is /home/me/verl, as in this conversion",
    ]
    assert notes(f"L=$(date)\n{MAIN} a=1 | tee $L") == []
    with pytest.raises(
        InputError, match=r"line 1: the value of \$\(dirname \"\$0\"\) is unknown: line 1: the value of \$0"
    ):
        arguments(f'{MAIN} a=$(dirname "$0")', ScriptContext(script=None))


def test_notes_are_written_to_the_recipe() -> None:
    options = "algorithm.adv_estimator=grpo actor_rollout_ref.model.path=$PWD/m data.train_files=a.parquet"
    done = convert(f"{MAIN} {options} actor_rollout_ref.rollout.n=2", context=MACHINE)
    assert "line 1: the current folder is /home/me/verl, as in this conversion" in done.notes
    assert "path: /home/me/verl/m" in done.text and "the current folder is /home/me/verl" in done.text


@pytest.mark.parametrize(("module", "device"), [("yaml", "npu"), ("no_such_module_", "gpu")])
def test_a_probe_for_a_package_is_evaluated_on_this_machine(module: str, device: str) -> None:
    """The branch that the answer decides has a note, too."""
    script = "\n".join(
        [
            f"DEVICE=${{DEVICE:-$(python3 -c 'import {module}' 2>/dev/null && echo npu || echo gpu)}}",
            'case "$DEVICE" in npu) N=16;; gpu) N=8;; *) exit 1;; esac',
            f"{MAIN} n=$N",
        ]
    )
    assert arguments(script) == [f"n={16 if device == 'npu' else 8}"]
    state = "is" if device == "npu" else "is not"
    assert notes(script) == [f"line 1: {module} {state} installed on the machine of this conversion"]
    assert arguments(script, DEVICE="npu") == ["n=16"] and notes(script, DEVICE="npu") == []


def test_all_missing_values_are_listed_at_once() -> None:
    script = f'DATA=(\n  a=$((A))/x\n  b=$((B))\n)\nD=$((A))\n{MAIN} "${{DATA[@]}}" d=$D e=$(nproc)'
    with pytest.raises(InputError) as caught:
        arguments(script)
    lines = str(caught.value).splitlines()
    assert lines[0] == "3 values are missing, which the script alone does not determine:"
    assert lines[1:] == [
        "  line 2: the script does not set $A in $((A)): add A=VALUE after the file",
        "  line 3: the script does not set $B in $((B)): add B=VALUE after the file",
        "  line 6: the value of $(nproc) is unknown until the script runs",
    ]
    script = script.replace("$(nproc)", "1")
    assert arguments(script, A="1", B="2") == ["a=1/x", "b=2", "d=1", "e=1"]


def test_the_users_values_override_every_assignment() -> None:
    script = f"if true; then X=1; fi\nfor X in a; do :; done\n((X = 3))\n: ${{X:=4}}\nread -r X\n{MAIN} x=$X"
    assert arguments(script, X="u") == ["x=u"]


class TestGuards:
    """A check of the script's arguments ends a script that has none. The converter asks for what the command uses."""

    @pytest.mark.parametrize(
        "guard",
        [
            'if [ "$#" -lt 1 ]; then echo usage; exit 1; fi',
            'if [ -z "$1" ]; then exit 1; fi',
            "[[ -n $1 ]] || exit 1",
            "[ $# -ge 1 ] || { echo usage; exit 2; }",
            'usage() { echo x; exit 1; }\nif [ "$1" = "" ]; then usage; fi',
        ],
    )
    def test_checks_before_the_training_command_are_skipped(self, guard: str) -> None:
        assert arguments(f"{guard}\n{MAIN} a=1") == ["a=1"]
        assert arguments(f"{guard}\n{MAIN} a=$1") == [f"a={absent('1')}"]
        assert arguments(f"{guard}\n{MAIN} a=$1", **{"1": "x"}) == ["a=x"]

    def test_a_certain_exit_before_the_training_command_is_an_error(self) -> None:
        with pytest.raises(InputError, match=r"line 2: the script ends here, before a training command$"):
            arguments(f"B=trt\nif [ $B != vllm ]; then exit 1; fi\n{MAIN} a=1")

    def test_a_check_of_the_machine_is_skipped(self) -> None:
        assert arguments(f"[ -d /data ] || exit 1\nnvidia-smi || exit 1\ncd x || exit\n{MAIN} a=1") == ["a=1"]

    def test_a_required_value_without_use_is_skipped(self) -> None:
        assert arguments(f': "${{M:?set M}}"\n{MAIN} a=1') == ["a=1"]
        assert arguments(f'X="${{M:?set M}}"\n{MAIN} a=$X') == [f"a={absent('M')}"]


class TestUnknown:
    """A value that depends on an unknown condition is unknown, whatever the path."""

    @pytest.mark.parametrize(
        "script",
        [
            "X=0\nif nvidia-smi; then X=1; fi",
            "X=0\nif nvidia-smi; then X=1; else X=2; fi",
            "X=0\n[ -f /a ] && X=1",
            "X=0\nwhile nvidia-smi; do X=1; done",
            "X=0\nfor f in /data/$(hostname)/*; do X=1; done",
            "X=0\nfor i in 1 2; do if [ -f /a ]; then break; fi; X=$i; done",
            "X=0\nf() { if [ -f /a ]; then return; fi; X=1; }\nf",
            "X=0\ng() { X=1; }\nfor i in $(ls); do g; done",
            "X=0\nread X",
            "X=0\nmapfile X < a",
            "X=$(hostname)",
            "Y=$(hostname)\nX=${Y%.*}",
            "X=$(if [ -f /a ]; then echo 1; else echo 2; fi)",
            "X=$(hostname; echo 1)",
            "X=$(echo a | tr a b)",
            "X[1]=2",
            "declare -A X=([a]=b)",
            "declare -i X=1+1",
            'Y=X\nX=1\nif nvidia-smi; then eval "$Y=2"; fi',
            "cd $(mktemp)\nX=$(pwd)",
            "if nvidia-smi; then :; else set -- $(hostname); fi\nX=${1:-0}",
            "if nvidia-smi; then set -- $(hostname); else :; fi\nX=${1:-0}",
            'f() { X=${3:-0}; }\nf $(ls) "$(hostname)" c',
            'f() { X=${3:-0}; }\nf "$(hostname)" $(ls) c',
            "X=$((1 / 0))",
            "X=$((2 ** 64))",
        ],
    )
    def test_an_unknown_value_is_an_error_only_if_used(self, script: str) -> None:
        with pytest.raises(InputError, match=r"line \d"):
            arguments(f'{script}\n{MAIN} "x=$X"')
        assert arguments(f'{script}\n{MAIN} "x=$X"', X="7") == ["x=7"]
        assert arguments(f"{script}\n{MAIN} a=1") == ["a=1"]

    def test_branches_with_equal_results_are_resolved(self) -> None:
        script = "if nvidia-smi; then X=1; Y=2; else Y=2; X=1; fi\ncase $(hostname) in a) X=1;; b) exit 1;; esac"
        assert arguments(f"{script}\n{MAIN} x=$X y=$Y") == ["x=1", "y=2"]

    def test_an_unknown_quoted_argument_is_a_single_one(self) -> None:
        assert arguments(f'f() {{ X=$3; }}\nf a "$(hostname)" c\n{MAIN} x=$X') == ["x=c"]

    def test_unknown_arguments_before_a_branch_stay_unknown(self) -> None:
        with pytest.raises(InputError, match="line 1"):
            arguments(f"set -- $(hostname)\nif nvidia-smi; then Y=1; fi\n{MAIN} x=$1")

    def test_calling_a_function_with_two_definitions_is_an_error(self) -> None:
        script = "if nvidia-smi; then f() { X=1; }; else f() { X=2; }; fi"
        with pytest.raises(InputError, match="line 2: the script defines f in several ways"):
            arguments(f"{script}\nf\n{MAIN} a=1")
        assert arguments(f"{script}\n{MAIN} a=1") == ["a=1"]

    def test_an_environment_variable_in_a_test_is_empty(self) -> None:
        script = f'X=1\nif [ "$MODE" = fast ]; then X=2; else X=3; fi\n{MAIN} x=$X'
        assert arguments(script) == ["x=3"] and arguments(script, MODE="fast") == ["x=2"]
        assert notes(script) == ["line 2: $MODE is not set, so a test takes it as empty"]
        with pytest.raises(InputError, match=r"line 3: the script does not set \$MODE: add MODE=VALUE after the file"):
            arguments(f"set -u\n{script}")

    def test_a_conditional_training_command_is_refused(self) -> None:
        for script in (
            "if nvidia-smi; then MAIN; fi",
            "for i in $(ls); do MAIN; done",
            "[ -f /a ] && MAIN",
            "nproc || MAIN",
        ):
            with pytest.raises(InputError, match="the training command is inside"):
                arguments(script.replace("MAIN", MAIN))
        assert arguments(f"mkdir -p logs && {MAIN} a=1") == ["a=1"]
        with pytest.raises(InputError, match="several training commands, in lines 1, 1"):
            arguments(f"for lr in 1 2; do {MAIN} lr=$lr; done")


def test_arguments_after_the_text_of_a_shell_are_refused() -> None:
    with pytest.raises(InputError, match="the arguments after the text of bash -c are not read"):
        arguments(f"bash -c '{MAIN} a=1 \"$@\"' _ b=2")


def test_the_trainers_module_can_be_a_variable() -> None:
    command = read_command(
        'LAUNCH=(uv run python3)\nM=verl.trainer.main_ppo\n"${LAUNCH[@]}" -m $M a=$X b=1', {"X": "1"}, MACHINE
    )
    assert isinstance(command, Command) and command.trainer == "verl.trainer.main_ppo" and command.line == 3
    assert command.launcher == ["uv", "run", "python3", "-m"]
    assert [argument.text for argument in command.arguments] == ["a=1", "b=1"]
    assert arguments(f"echo starting verl.trainer.main_ppo\npkill -f main_ppo\n{MAIN} a=1") == ["a=1"]


@pytest.mark.parametrize(
    "script",
    [
        "while true; do X=1; done",
        "f() { f; }\nf",
        "for ((;;)); do :; done",
        "X=$X$X\nY=a\nfor i in $(seq 100); do Y=$Y$Y; done",
    ],
)
def test_an_endless_script_is_an_error_within_seconds(script: str) -> None:
    start = time.monotonic()
    with pytest.raises(InputError):
        arguments(f"{script}\n{MAIN} a=$Y")
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "script",
    [
        "set -e\nfalse",
        "set -euo pipefail\n[ a = b ]",
        "set -o errexit\n((0))",
        "set -e\nX=$(false)",
        "set -e\n(false)",
        "set -e\ntrue && false",
        "f() { false; true; }; set -e\nf",
    ],
)
def test_a_failure_ends_a_script_after_set_e(script: str) -> None:
    with pytest.raises(InputError, match=r"line [12]: the script ends here, before a training command"):
        arguments(f"{script}\n{MAIN} a=1")
    without = script.replace("set -euo pipefail", "set -u").replace("set -e", ":").replace("set -o errexit", ":")
    assert arguments(f"{without}\n{MAIN} a=1") == ["a=1"]


@pytest.mark.parametrize(
    "script",
    [
        "X" * 200_001,
        "echo hello\n" * 900_000,
        "( " * 5000 + ":" + " )" * 5000,
        "if true; then :\n" * 5000 + "fi\n" * 5000,
    ],
)
def test_a_script_that_is_too_large_or_nested_is_refused_within_seconds(script: str) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match=r"are not a launch script|nested too deeply"):
        arguments(f"{script}\n{MAIN} a=1")
    assert time.monotonic() - start < 10


def test_no_command_of_a_script_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    script = "touch a; echo x > b\nX=$(touch c; echo y | tee d)\n`touch e`\neval 'touch f'\nbash -c 'touch g'\ncat <(touch h)\n"
    assert arguments(f"{script}{MAIN} a=1", ScriptContext()) == ["a=1"]
    assert list(tmp_path.iterdir()) == []


def test_damaged_scripts_are_input_errors() -> None:
    """A script that is cut or changed at random converts or is refused, without another exception."""
    generator = random.Random(0)
    scripts = [script.replace("MAIN", MAIN) for script in SCRIPTS.values()]
    refused = 0
    for _ in range(150):
        text = list(generator.choice(scripts))
        for _ in range(generator.randint(1, 4)):
            at = generator.randrange(len(text))
            text[at] = generator.choice(
                ["", "$", "(", ")", '"', "'", "{", "}", "`", "\\", "\0", "é", " ", "\n", ";", text[at] * 2]
            )
        try:
            arguments("".join(text))
        except InputError:
            refused += 1
    assert 0 < refused < 150


class TestParser:
    def test_a_missing_parser_is_reported_in_one_line(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "which", lambda *args, **named: None)
        with pytest.raises(InputError) as caught:
            arguments(f"{MAIN} a=1")
        pin = re.search(
            r"^convert =\n    shfmt-py == (\S+)$", (Path(__file__).parents[3] / "setup.cfg").read_text(), re.M
        )
        assert pin is not None
        message = f"convert-config parses scripts with shfmt, which is not installed: pip install shfmt-py=={pin[1]}"
        assert str(caught.value) == message

    def test_an_old_parser_is_refused(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        """Operators were numbers, which differ between versions."""
        old = tmp_path / "shfmt"
        old.write_text("""#!/bin/sh\necho '{"Type": "File", "Stmts": [{"Cmd": {"Type": "BinaryCmd", "Op": 10}}]}'\n""")
        old.chmod(0o755)
        monkeypatch.setattr(syntax, "_shfmt", lambda: str(old))
        with pytest.raises(InputError, match="older than version 4: pip install"):
            arguments(f"{MAIN} a=1")

    def test_errors_name_the_scripts_lines(self) -> None:
        with pytest.raises(InputError, match=r"^line 2: "):
            arguments("a=1\nif true; then\nfi)\n")
        with pytest.raises(InputError, match=r"line 4: "):
            arguments(f"a=1\n\n\nbash -c 'if'\n{MAIN}")

    def test_windows_line_ends_are_accepted(self) -> None:
        assert arguments(f"A=1\r\n{MAIN} a=$A \\\r\n  b=2\r\n") == ["a=1", "b=2"]

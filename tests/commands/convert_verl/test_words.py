"""Words of a script are expanded and split as bash does it; a value that only a running shell knows is an error."""

from __future__ import annotations

import re

import pytest

from megarl.commands.convert_verl.shell.values import absent
from megarl.errors import InputError
from tests.commands.convert_verl.test_shell import MAIN, arguments, by_bash, notes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a='x y' b=\"p q\" \\\n  c=1", ["a=x y", "b=p q", "c=1"]),
        ("a=['console']", ["a=[console]"]),
        ("a=1\\\nb", ["a=1b"]),  # without a blank the shell joins them, too
        ('a="$V" b=$V $NONE_', ["a=1 2", "b=1", "2"]),
        ('"${L[@]}" x=${L}', ["k=1", "m=a b", "x=k=1"]),
        ("a=$((N*2+7/2)) b=$((-7/2)) c=$((${N}%4)) d=$(( (1+2)*3 ))", ["a=23", "b=-3", "c=2", "d=9"]),
        ("a=${U:-d e} b=${N:-7} c=${E:-x} d=${E-x} f=${N:+y}", ["a=d", "e", "b=10", "c=x", "d=", "f=y"]),
        ('a=${U:-"$N/z"} # b=1', ["a=10/z"]),
        ("a=1 > log 2>&1 &", ["a=1"]),
        ('a=\\"q\\" $@ "$@"', ['a="q"']),
    ],
)
def test_words_are_split_as_in_bash(text: str, expected: list[str]) -> None:
    """Words are split as bash splits them; the test runs bash to compare."""
    script = f"V='1 2'\nN=10\nE=\nNONE_=\nL=(k=1 'm=a b')\n{MAIN} {text}\n"
    assert arguments(script) == expected
    if " $@" not in text and ">" not in text:
        assert by_bash(script) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a=$(nproc)", "line 1: the value of $(nproc) is unknown until the script runs"),
        ("a=`nproc`", "the value of `nproc`"),
        ("a=${U%.sh}", "${U%.sh}"),
        ("a={1,2}", "the brace expansion"),
        ("a=$((1 ? 2 : 3))", "the arithmetic $((1 ? 2 : 3)) is not supported"),
        ("a='b", "line 1: reached EOF without closing quote `'`"),
        ("<<EOF", "line 1: unclosed here-document"),
    ],
)
def test_values_that_only_a_shell_can_compute_are_an_error(text: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        arguments(f"{MAIN} {text}")


@pytest.mark.parametrize(
    "before",
    [
        "if [ -d /data ]; then X=1; fi",
        "for X in $(ls); do Y=$X; X=3; done",
        "nvidia-smi && X=1",
        "case $(hostname) in a) X=1;; esac",
        "while read -r X; do :; done < file",
        "f() {\n[ -d /data ] && return\nX=1\n}\nf",
    ],
)
def test_a_variable_set_in_a_branch_is_unknown(before: str) -> None:
    """The converter does not guess which branch is taken."""
    with pytest.raises(InputError, match=r"the value of \$X is unknown: line \d"):
        arguments(f"{before}\n{MAIN} a=$X")
    assert arguments(f"{before}\n{MAIN} a=$X", X="7") == ["a=7"]


@pytest.mark.parametrize("before", ["f() {\nX=1\n}", "( X=1 )", "unset X", ":"])
def test_a_variable_that_the_script_never_sets_has_no_value(before: str) -> None:
    assert arguments(f"{before}\n{MAIN} a=$X") == [f"a={absent('X')}"]
    assert arguments(f"{before}\n{MAIN} a=$X", X="7") == ["a=7"]


def test_unknown_values_outside_the_training_command_are_accepted() -> None:
    assert arguments(f"NOW=$(date)\nLOG=logs/$NOW\nmkdir -p $LOG\n{MAIN} a=1 | tee $LOG") == ["a=1"]


def test_a_script_must_have_exactly_one_training_command() -> None:
    with pytest.raises(InputError, match="no training command"):
        arguments("python -m other a=1")
    with pytest.raises(InputError, match="several training commands, in lines 1, 2"):
        arguments(f"{MAIN} a=1\n{MAIN} a=2")
    with pytest.raises(InputError, match="line 2: the training command is inside"):
        arguments(f"if [ -d /data ]; then\n{MAIN} a=1\nfi")


SLURM = """#!/bin/bash
#SBATCH --nodes=2 --exclusive
#SBATCH -c 16
#SBATCH --gres=gpu:h100:4,shard:2
#SBATCH --time=1:00:00
set -u
#SBATCH --ntasks=9
N=${SLURM_JOB_NUM_NODES:-1}
MAIN a=$N b=${SLURM_GPUS_ON_NODE:-8} c=$SLURM_CPUS_PER_TASK d=${SLURM_NTASKS:-none} e=${SLURM_GPUS_PER_NODE:-none}
""".replace("MAIN", MAIN)


def test_sbatch_sets_variables() -> None:
    """From the lines before the first command. --gres sets no SLURM_GPUS_PER_NODE."""
    assert arguments(SLURM) == ["a=2", "b=4", "c=16", "d=none", "e=none"]
    assert arguments(SLURM, SLURM_GPUS_ON_NODE="6")[1] == "b=6"
    assert "line 4: SLURM_GPUS_ON_NODE=4, as sbatch sets it from #SBATCH --gres=gpu:h100:4,shard:2" in notes(SLURM)
    assert arguments(SLURM.replace("--nodes=2", "--nodes=2-4"))[0] == "a=1", "a range, not a number"
    assert arguments(SLURM.replace("--gres=gpu:h100:4,shard:2", "--gpus-per-node=h100:8"))[1::3] == ["b=8", "e=8"]

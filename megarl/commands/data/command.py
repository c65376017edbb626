"""Entry point of ``python -m megarl data``: prepare data sets, and the quickstart's data and model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from megarl.errors import as_input_error

if TYPE_CHECKING:
    from megarl.commands.data.source import PreparedFiles

app = typer.Typer(
    help="Prepare data sets: write parquet files in the columns that recipes read.",
    no_args_is_help=True,
    add_completion=False,
)

Splits = Annotated[Path, typer.Option("--out", help="Folder to write train.parquet and test.parquet to.")]
Training = Annotated[Path, typer.Option("--out", help="Folder to write train.parquet to.")]


@app.command()
def gsm8k(
    source: Annotated[
        str,
        typer.Option(help="Folder with train and test (.jsonl or .parquet of question, answer), or a hub name."),
    ],
    out: Splits,
) -> None:
    """GSM8K: grade-school mathematics, 7,473 training and 1,319 test problems."""
    from megarl.commands.data.gsm8k import prepare

    _report(prepare, source, out)


@app.command()
def math(
    source: Annotated[
        str,
        typer.Option(
            help="Folder with train and test (.jsonl or .parquet of problem, solution, level), or a hub name."
        ),
    ],
    out: Splits,
) -> None:
    """MATH: competition problems with levels (DigitalLearningGmbH/MATH-lighteval)."""
    from megarl.commands.data.math import prepare

    _report(prepare, source, out)


@app.command(name="dapo_math")
def dapo_math(
    source: Annotated[str, typer.Option(help="The published file, its folder, or a hub name.")],
    out: Training,
) -> None:
    """DAPO-Math-17k (BytedTsinghua-SIA/DAPO-Math-17k) without duplicates."""
    from megarl.commands.data.dapo_math import prepare

    _report(prepare, source, out)


@app.command()
def deepscaler(
    source: Annotated[str, typer.Option(help="File or folder of problem and answer, or a hub name.")],
    out: Training,
) -> None:
    """DeepScaleR: competition problems (agentica-org/DeepScaleR-Preview-Dataset) without duplicates."""
    from megarl.commands.data.deepscaler import prepare

    _report(prepare, source, out)


@app.command()
def aime(
    source: Annotated[
        str, typer.Option(help="File or folder of problem and answer (or verl's columns), or a hub name.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write test.parquet to.")],
    year: Annotated[Optional[int], typer.Option(help="Sets the rows' data source to aime_YEAR; unset: aime.")] = None,
    split: Annotated[
        Optional[str], typer.Option(help="Split of a folder or of a data set on the hub. Default: train.")
    ] = None,
    config: Annotated[
        Optional[str], typer.Option(help="Configuration of a data set on the hub, if it has any.")
    ] = None,
) -> None:
    """AIME: problems for evaluation (Maxwell-Jia/AIME_2024, BytedTsinghua-SIA/AIME-2024, math-ai/aime25, ...)."""
    from megarl.commands.data.aime import prepare

    _report(prepare, source, out, year, split, config)


@app.command()
def geo3k(
    source: Annotated[
        str,
        typer.Option(help="Folder with train and test (.jsonl or .parquet of images, problem, answer), or a hub name."),
    ],
    out: Splits,
) -> None:
    """Geometry3K: problems with images (hiyouga/geometry3k), for vision-language models."""
    from megarl.commands.data.geo3k import prepare

    _report(prepare, source, out)


@app.command(name="retool_sft")
def retool_sft(
    source: Annotated[str, typer.Option(help="File or folder of messages, or a hub name.")],
    out: Training,
) -> None:
    """ReTool: demonstrations (JoeYing/ReTool-SFT) as conversations with tool calls."""
    from megarl.commands.data.retool_sft import prepare

    _report(prepare, source, out)


@app.command(name="verl_dataset")
def verl_dataset(
    path: Annotated[str, typer.Option("--class", help="The class: file.py:Name or module:Name.")],
    source: Annotated[list[str], typer.Option(help="A file that the class reads. Repeat the option for several.")],
    out: Annotated[Path, typer.Option(help="The .parquet file to write.")],
    model: Annotated[
        Optional[str], typer.Option(help="Model folder with the tokenizer and processor that the class receives.")
    ] = None,
    option: Annotated[
        Optional[list[str]],
        typer.Option(help="An option of verl's section data that the class reads, e.g. prompt_key=question."),
    ] = None,
) -> None:
    """Rows of a dataset class written for verl (data.custom_cls): runs the class once."""
    from megarl.commands.data.verl_dataset import options_of, prepare

    with as_input_error():
        options = options_of(option or [])
    _report(prepare, path, source, out, model, options)


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder for data/ and model/.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems and the weights.")] = 0,
) -> None:
    """Word problems, demonstrations and a random Qwen3-MoE with 0.2 M parameters, for runs on CPU."""
    from megarl.commands.data.quickstart import prepare_quickstart

    with as_input_error():
        prepared = prepare_quickstart(out, seed)
    for path, size in prepared.files.items():
        typer.echo(_line(path, size, prepared.rows.get(path)))
    typer.echo(f"written: {prepared.reason}" if prepared.reason else "kept: all files are intact and have this seed")


def _report(prepare: Callable[..., PreparedFiles], *arguments: Any) -> None:
    """Call `prepare` and print the written files, and the notices."""
    with as_input_error():
        rows, notices = prepare(*arguments)
    for path, count in rows.items():
        typer.echo(_line(path, path.stat().st_size, count))
    for notice in notices:
        typer.echo(notice)


def _line(path: Path, size: int, rows: int | None) -> str:
    count = "" if rows is None else f"  {rows:,} rows"
    return f"{path}  {size / 1024:,.0f} KiB{count}"

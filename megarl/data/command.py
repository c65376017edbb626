"""``python -m megarl data``: data sets and the quickstart's model made ready for recipes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from megarl.config.errors import blaming_input

app = typer.Typer(
    help="Make data sets ready: parquet files in the columns that recipes read.",
    no_args_is_help=True,
    add_completion=False,
)


@app.command()
def gsm8k(
    source: Annotated[
        str,
        typer.Option(help="Folder with train and test (.jsonl or .parquet of question, answer), or a hub name."),
    ],
    out: Annotated[Path, typer.Option(help="Folder to write train.parquet and test.parquet to.")],
) -> None:
    """GSM8K's grade-school mathematics, 7,473 problems to train on and 1,319 to test."""
    from megarl.data.prepare.gsm8k import prepare

    with blaming_input():
        prepared = prepare(source, out)
    for path, rows in prepared.items():
        typer.echo(_line(path, path.stat().st_size, rows))


@app.command()
def quickstart(
    out: Annotated[Path, typer.Option(help="Folder to make data/ and model/ in.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed of the problems and the weights.")] = 0,
) -> None:
    """Word problems, demonstrations and a random 0.2 M-parameter Qwen3-MoE: all that a CPU run needs."""
    from megarl.data.prepare.quickstart import prepare_quickstart

    with blaming_input():
        prepared = prepare_quickstart(out, seed)
    for path, size in prepared.files.items():
        typer.echo(_line(path, size, prepared.rows.get(path)))
    typer.echo(f"made: {prepared.reason}" if prepared.made else "kept: all files are whole and made with this seed")


def _line(path: Path, size: int, rows: int | None) -> str:
    count = "" if rows is None else f"  {rows:,} rows"
    return f"{path}  {size / 1024:,.0f} KiB{count}"

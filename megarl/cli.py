"""The command line: ``python -m megarl COMMAND`` (or ``megarl COMMAND``).

Exit status: 0 success; 1 the run failed (compare: the runs differ); 2 a recipe or other input is wrong; 130 after
Ctrl-C; 143 after SIGTERM.
Errors are one block on stderr; --debug adds the traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from megarl.commands.data.command import app as data_app
from megarl.commands.plan import cli_options
from megarl.errors import as_input_error
from megarl.exit_status import guarded, leave

app = typer.Typer(
    help="Reinforcement learning of large language models on Megatron: a recipe is one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")


RecipePath = Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe, a YAML file.")]
Overrides = Annotated[
    Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Settings that win over the file's.")
]
Model = Annotated[
    Optional[str],
    typer.Option(
        help="A published model, e.g. Qwen3-8B, or a folder with a config.json. Unset: model.path, else the `Shape` in the recipe's head."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


@app.command()
def train(recipe: RecipePath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train as the recipe says; everything it leaves is in runs/<name>/."""
    from megarl import assembly

    assembly.train(assembly.load(recipe, overrides or []))


@app.command(name="eval")
def evaluate(recipe: RecipePath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Sample the recipe's data.eval_files with model.path: pass@k, maj@k and greedy accuracy as JSON."""
    from megarl import assembly

    assembly.evaluate_model(assembly.load(recipe, overrides or []))


@app.command()
def export(
    run_path: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    out: Annotated[Path, typer.Option(help="Directory to write the Hugging Face model to.")],
    step: Annotated[Optional[int], typer.Option(help="Checkpoint to export; unset: the newest.")] = None,
    critic: Annotated[bool, typer.Option("--critic", help="The critic, as a token classification model.")] = False,
    debug: Debug = False,
) -> None:
    """Write a run's checkpoint as a Hugging Face model, read it back and compare it."""
    from megarl import assembly

    assembly.export(run_path, out, step, critic=critic)


@app.command()
def report(
    run_path: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")], debug: Debug = False
) -> None:
    """Write RUN/report.html: curves, timeline and samples in one file that needs no network."""
    from megarl.commands.report import report as write

    with as_input_error():
        path = write(run_path)
    typer.echo(path)


LogPath = typer.Argument(help="A run's directory, or a log of verl: console output, JSONL, TensorBoard events.")


@app.command()
def compare(
    run_a: Annotated[Path, LogPath],
    run_b: Annotated[Path, LogPath],
    metric: Annotated[
        Optional[str], typer.Option(help="What to compare; unset: the reward, or the loss of SFT.")
    ] = None,
    metric_b: Annotated[Optional[str], typer.Option(help="What RUN_B calls it; unset: the same.")] = None,
    max_error: Annotated[
        Optional[str],
        typer.Option(help="Mean absolute error allowed, in percent: 4 is 0.04. Unset: the rule's (reward 4, loss 2)."),
    ] = None,
    steps: Annotated[str, typer.Option(metavar="FROM:TO", help="Steps to compare, both included.")] = ":",
    throughput_steps: Annotated[int, typer.Option(min=1, help="First steps whose throughput counts.")] = 4,
    min_throughput_ratio: Annotated[
        Optional[float], typer.Option(min=0.0, help="Least throughput of RUN_A over RUN_B's; unset: only told.")
    ] = None,
    html: Annotated[Optional[Path], typer.Option(help="Write the comparison as a page, too.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Hold RUN_A against RUN_B: reward or loss, and throughput. Exit status 0 within the rules, 1 outside, 2 bad input."""
    from megarl.commands.compare.command import compare as run_compare
    from megarl.commands.compare.command import percentage, step_range
    from megarl.commands.compare.rules import Options

    with as_input_error():
        first, last = step_range(steps)
        error = None if max_error is None else percentage(max_error)
        options = Options(metric, metric_b, error, first, last, throughput_steps, min_throughput_ratio)
        within = run_compare(run_a, run_b, options, html=html, as_json=as_json)
    if not within:
        raise typer.Exit(1)


@app.command()
def doctor(
    recipe: Annotated[
        Optional[str], typer.Argument(metavar="[RECIPE]", help="Recipe, a YAML file: also what it needs.")
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="A list of objects in place of lines.")] = False,
    nodes: Annotated[
        Optional[bool],
        typer.Option("--nodes/--no-nodes", help="Every node of the Ray cluster; unset: where an address is known."),
    ] = None,
    debug: Debug = False,
) -> int:
    """Look at this machine, or a Ray cluster's: versions, devices, network, limits. Exit status 1 where a check fails."""
    from megarl.commands.doctor.command import doctor as look

    return look(Path(recipe) if recipe else None, overrides or [], as_json=as_json, nodes=nodes)


@app.command()
def accept(
    recipe: Annotated[
        Optional[str], typer.Argument(metavar="[RECIPE]", help="Recipe, a YAML file: its layout, engines and exchange.")
    ] = None,
    overrides: Overrides = None,
    device: Annotated[str, typer.Option(help="Kind of device, as cluster.device names it.")] = "auto",
    nodes: Annotated[int, typer.Option(min=1, help="Nodes of the Ray cluster at RAY_ADDRESS.")] = 1,
    minutes: Annotated[float, typer.Option(min=1, help="Time for all stages together.")] = 60.0,
    stages: Annotated[
        Optional[str], typer.Option(help="Stages to run, e.g. 1-4 or 0,5; unset: all. With --resume: to run again.")
    ] = None,
    resume: Annotated[
        Optional[Path], typer.Option(metavar="DIR", help="Go on with an acceptance: stages that have ended are kept.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for DIR and the archive.")] = Path("."),
    expect: Annotated[
        bool, typer.Option("--expect", help="Print what would run, for how long, and when it passes.")
    ] = False,
    debug: Debug = False,
) -> int:
    """Prove a machine or cluster before the first run: kernels, models, collectives, engine, weight exchange, one step. Exit status 1 where a stage fails."""
    from megarl.commands.accept.command import Options
    from megarl.commands.accept.command import accept as run_stages

    options = Options(device, nodes, minutes, stages, resume, out, expect)
    return run_stages(Path(recipe) if recipe else None, overrides or [], options)


@app.command()
def rehearse(
    recipe: RecipePath,
    overrides: Overrides = None,
    processes: Annotated[
        Optional[int],
        typer.Option(min=1, help="Trainers at most; unset: 2, or 4 where the layout cuts a pipeline and more."),
    ] = None,
    out: Annotated[
        Optional[Path], typer.Option(help="Folder for the twin and its run; unset: a temporary one.")
    ] = None,
    shape: Annotated[
        Optional[str],
        typer.Option(help="Model whose config.json is shrunk, e.g. Qwen3-8B; unset: the recipe's."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Also resume from the checkpoint, for one step more.")] = True,
    debug: Debug = False,
) -> int:
    """Run the recipe on this machine's CPU with its model and batches shrunk: two steps, exchange, checkpoint, resume."""
    from megarl.commands.rehearse.command import rehearse as run_rehearsal

    return run_rehearsal(recipe, overrides or [], out=out, processes=processes, shape=shape, resume=resume)


@app.command()
def plan(
    recipe: RecipePath,
    overrides: Overrides = None,
    model: Model = None,
    device: cli_options.DeviceName = None,
    memory: cli_options.Memory = None,
    host_memory: cli_options.HostMemory = None,
    devices: cli_options.DevicesFile = None,
    calibration: cli_options.CalibrationFile = None,
    response: cli_options.Response = None,
    calibrate: cli_options.CalibratedRun = None,
    out: cli_options.FittedFile = None,
    html: cli_options.Page = None,
    as_json: cli_options.AsJson = False,
    strict: cli_options.Strict = False,
    search: cli_options.Search = False,
    seconds: cli_options.Seconds = None,
    debug: Debug = False,
) -> int:
    """What every device of the recipe holds in each phase of a step, and for how long, without any device. Exit status 1 where memory is too small."""
    from megarl.commands.plan.command import plan as count
    from megarl.commands.plan.options import Options

    options = Options(
        device=device,
        memory=memory,
        host_memory=host_memory,
        devices=devices,
        calibration=calibration,
        response=response,
        calibrate=calibrate,
        out=out,
        html=html,
        as_json=as_json,
        strict=strict,
        search=search,
        seconds=seconds,
    )
    return count(recipe, overrides or [], options, model)


@app.command()
def exchange(
    recipe: RecipePath,
    overrides: Overrides = None,
    explain: Annotated[bool, typer.Option("--explain", hidden=True)] = False,
    model: Model = None,
    per_node: Annotated[
        Optional[int], typer.Option(help="Devices of a machine; unset: as the recipe's head says.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="An object in place of the table.")] = False,
    debug: Debug = False,
) -> int:
    """Show who sends which weights to whom in an update of the engines. Nothing is started or moved."""
    from megarl.commands.plan.explain_command import exchange as show

    if explain:
        typer.echo("--explain is not needed any more: megarl exchange RECIPE", err=True)
    return show(recipe, overrides or [], model=model, per_node=per_node, as_json=as_json)


@app.command(name="convert-weights")
def convert_weights(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A Hugging Face model with FP8 weights.")],
    out: Annotated[
        Path, typer.Option(help="Folder to write the model in bfloat16 to. The same command goes on in it.")
    ],
    workers: Annotated[
        Optional[int], typer.Option(min=1, help="Processes, of about 0.5 GB each; unset: 4, or the cores if fewer.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a model with FP8 block-scaled weights (DeepSeek-V3) in bfloat16, as the trainer reads it. A CPU is enough."""
    from megarl.commands.convert_weights.command import convert

    with as_input_error():
        convert(folder, out, workers)


@app.command(name="convert-config")
def convert_config(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A verl script or command line; - reads standard input.")],
    settings: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Values of the script's shell variables, where it sets none (1=8 is $1); with a dot, settings of the recipe.",
        ),
    ] = None,
    out: Annotated[Optional[Path], typer.Option(help="Recipe to write; unset: standard output.")] = None,
    rows: Annotated[Optional[int], typer.Option(min=1, help="Rows of the training data: makes epochs steps.")] = None,
    debug: Debug = False,
) -> None:
    """Write the recipe of a verl script, which is read and not run; stderr says what was not carried over."""
    from megarl.commands.convert_verl.command import convert_file

    with as_input_error():
        convert_file(file, settings or [], out=out, rows=rows)


def main() -> None:
    """Run the command line and exit with its status."""
    arguments = sys.argv[1:]
    leave(guarded(lambda: app(args=arguments, prog_name="megarl", standalone_mode=False), debug="--debug" in arguments))

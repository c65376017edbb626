"""Command line: ``python -m megarl COMMAND`` (or ``megarl COMMAND``).

Exit status: 0 success; 1 the run failed (compare: the runs differ); 2 invalid recipe or other input; 130 after
Ctrl-C; 143 after SIGTERM.
An error is printed as one block on stderr; --debug adds the traceback.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from megarl.commands.bundle import cli_options as replay_options
from megarl.commands.compare.cli_options import compare_command
from megarl.commands.convert_weights.cli_options import convert_weights_command
from megarl.commands.data.command import app as data_app
from megarl.commands.engines.cli_options import engines_command
from megarl.commands.examples import add_examples
from megarl.commands.group import CommandGroup
from megarl.commands.init.cli_options import init_command
from megarl.commands.keys.command import keys_command
from megarl.commands.model.command import app as model_app
from megarl.commands.plan import cli_options
from megarl.commands.report import report_command
from megarl.commands.serve.cli_command import serve_command
from megarl.commands.simulate import cli_options as simulate_options
from megarl.commands.training import Debug, Overrides, RecipePath, quickstart_command, train_command
from megarl.commands.view.cli_command import view_command
from megarl.errors import as_input_error
from megarl.exit_status import guarded, leave
from megarl.observe.stdout import kept_stdout
from megarl.recipe.former_names import FormerNameWarning

_PYTHON_FORMAT = warnings.formatwarning

app = typer.Typer(
    cls=CommandGroup,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.add_typer(model_app, name="model")

Model = Annotated[
    Optional[str],
    typer.Option(
        help="Published model, e.g. Qwen3-8B, or folder with a config.json. Default: model.path, else `# Shape:` in the recipe's header."
    ),
]


def _show_version(value: bool) -> None:
    if value:
        from megarl.platform.installed import version_lines

        typer.echo("\n".join(version_lines()))
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", help="Print version, commit and versions of the stack.", is_eager=True, callback=_show_version
    ),
]


@app.callback()
def root(version: Version = False) -> None:
    """Reinforcement learning of large language models on Megatron, from a recipe in one YAML file."""


app.command(name="quickstart")(quickstart_command)
app.command(name="train")(train_command)


@app.command(name="eval")
def evaluate(recipe: RecipePath, overrides: Overrides = None, debug: Debug = False) -> None:
    """Evaluate model.path on the recipe's data.eval_files: pass@k, maj@k and greedy accuracy as JSON."""
    with kept_stdout():
        from megarl.commands.evaluate import evaluate_model
        from megarl.preflight.load import load_recipe

        evaluate_model(load_recipe(recipe, overrides or []))


@app.command(name="export")
def export_command(
    run_path: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    out: Annotated[Path, typer.Option(help="Directory to write the Hugging Face model to.")],
    step: Annotated[Optional[int], typer.Option(help="Step of the checkpoint. Default: the newest.")] = None,
    critic: Annotated[
        bool, typer.Option("--critic", help="Export the critic, as a token classification model.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Write a run's checkpoint as a Hugging Face model and verify it."""
    from megarl.commands.export import export

    export(run_path, out, step, critic=critic)


app.command(name="report")(report_command)
app.command(name="view")(view_command)
app.command(name="serve")(serve_command)

app.command(name="compare")(compare_command)
app.command(name="keys")(keys_command)
app.command(name="init")(init_command)


@app.command()
def doctor(
    recipe: Annotated[
        Optional[str],
        typer.Argument(
            metavar="[RECIPE | RUN_DIRECTORY]",
            help="Recipe (YAML file), to check its requirements too; or the directory of a live run, to show its processes.",
        ),
    ] = None,
    overrides: Overrides = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list of findings.")] = False,
    nodes: Annotated[
        Optional[bool],
        typer.Option("--nodes/--no-nodes", help="Check every Ray node. Default: if an address of a cluster is set."),
    ] = None,
    debug: Debug = False,
) -> int:
    """Check this machine or a Ray cluster, or show what the processes of a live run do. Exit status 1 if a check fails."""
    from megarl.commands.doctor.command import doctor as look

    return look(Path(recipe) if recipe else None, overrides or [], as_json=as_json, nodes=nodes)


app.command(name="engines", context_settings={"ignore_unknown_options": True})(engines_command)  # -1 is an argument


@app.command()
def accept(
    recipe: Annotated[
        Optional[str],
        typer.Argument(metavar="[RECIPE]", help="Recipe (YAML file) to take the layout, engines and weight sync from."),
    ] = None,
    overrides: Overrides = None,
    device: Annotated[str, typer.Option(help="Device kind, as in cluster.device.")] = "auto",
    nodes: Annotated[int, typer.Option(min=1, help="Number of nodes of the Ray cluster at RAY_ADDRESS.")] = 1,
    minutes: Annotated[float, typer.Option(min=1, help="Time limit of all stages together.")] = 60.0,
    stages: Annotated[
        Optional[str], typer.Option(help="Stages to run, e.g. 1-4 or 0,5. Default: all. With --resume: to run again.")
    ] = None,
    resume: Annotated[
        Optional[Path], typer.Option(metavar="DIR", help="Resume the acceptance in DIR; finished stages are kept.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for DIR and the archive.")] = Path("."),
    expect: Annotated[
        bool, typer.Option("--expect", help="Print the stages with durations and pass criteria, and run nothing.")
    ] = False,
    debug: Debug = False,
) -> int:
    """Test a machine or cluster before the first run: kernels, models, collectives, engine, weight sync, one step. Exit status 1 if a stage fails."""
    from megarl.commands.accept.command import AcceptOptions
    from megarl.commands.accept.command import accept as run_stages

    options = AcceptOptions(device, nodes, minutes, stages, resume, out, expect)
    return run_stages(Path(recipe) if recipe else None, overrides or [], options)


@app.command()
def rehearse(
    recipe: RecipePath,
    overrides: Overrides = None,
    processes: Annotated[
        Optional[int],
        typer.Option(min=1, help="Maximum number of trainers. Default: 2, or 4 with pipeline and other parallelism."),
    ] = None,
    out: Annotated[
        Optional[Path], typer.Option(help="Folder for the tiny copy and its run. Default: a temporary folder.")
    ] = None,
    shape: Annotated[
        Optional[str],
        typer.Option(help="Model with the config.json to shrink, e.g. Qwen3-8B. Default: the recipe's model."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Also resume from the checkpoint, for one more step.")] = True,
    debug: Debug = False,
) -> int:
    """Run a tiny copy of the recipe on this machine's CPU: two steps, weight sync, checkpoint, resume."""
    from megarl.commands.rehearse.command import rehearse as run_rehearsal

    return run_rehearsal(recipe, overrides or [], out=out, processes=processes, shape=shape, resume=resume)


@app.command()
def replay(
    run_path: replay_options.RunOrFile,
    overrides: Overrides = None,
    name: replay_options.Name = None,
    bundle: replay_options.Bundle = None,
    step: replay_options.Step = None,
    out: replay_options.Out = None,
    debug: Debug = False,
) -> int:
    """Repeat a run with requests in flight by its tape, and compare the metrics. Exit status 1 if one differs.

    --bundle packs a step with model, data and checkpoint into FILE, which is repeated on another machine in the same way.
    """
    from megarl.commands.bundle.options import replay_or_bundle

    return replay_or_bundle(run_path, overrides or [], name=name, bundle=bundle, step=step, out=out)


@app.command()
def reproduce(
    run_path: Annotated[Path, typer.Argument(metavar="RUN", help="A run's directory.")],
    overrides: Overrides = None,
    name: Annotated[
        Optional[str],
        typer.Option(help="Name of the new run, beside RUN; with a slash: its path. Default: RUN's, with -reproduced."),
    ] = None,
    only_print: Annotated[
        bool, typer.Option("--print", help="Print the command on stdout and the differences on stderr; start nothing.")
    ] = False,
    debug: Debug = False,
) -> int:
    """List what differs here from a run's provenance (versions, commit, data, weights), and start its recipe again under a new name."""
    from megarl.commands.reproduce import reproduce as repeat

    return repeat(run_path, name, overrides or [], only_print=only_print)


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
    """Compute memory per device and seconds per phase of a step, without any device. Exit status 1 if memory is too small."""
    from megarl.commands.plan.command import plan as count
    from megarl.commands.plan.options import PlanOptions

    options = PlanOptions(
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
def simulate(
    recipe: RecipePath,
    overrides: Overrides = None,
    model: Model = None,
    device: cli_options.DeviceName = None,
    device_file: simulate_options.DeviceFile = None,
    calibration: cli_options.CalibrationFile = None,
    devices: simulate_options.Devices = None,
    lengths: simulate_options.ResponseLengths = None,
    response: simulate_options.Response = None,
    filtered: simulate_options.Filtered = None,
    max_lag: simulate_options.MaxLag = None,
    steps: simulate_options.Steps = simulate_options.STEPS,
    seed: simulate_options.Seed = 0,
    html: simulate_options.Page = None,
    as_json: simulate_options.AsJson = False,
    debug: Debug = False,
) -> None:
    """Compare update rules, staleness, windows, splits of the devices and over-sampling under a virtual clock, without any device."""
    from megarl.commands.simulate.command import SimulateOptions
    from megarl.commands.simulate.command import simulate as run_simulation

    options = SimulateOptions(
        device=device,
        device_file=device_file,
        calibration=calibration,
        devices=devices,
        lengths=lengths,
        response=response,
        filtered=filtered,
        max_lag=max_lag,
        steps=steps,
        seed=seed,
        html=html,
        as_json=as_json,
    )
    run_simulation(recipe, overrides or [], options, model)


@app.command(name="weight-sync")
def weight_sync(
    recipe: RecipePath,
    overrides: Overrides = None,
    model: Model = None,
    per_node: Annotated[
        Optional[int], typer.Option(help="Devices per machine. Default: `# Hardware:` in the recipe's header.", min=1)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
    debug: Debug = False,
) -> int:
    """Show which weights each trainer sends to each engine in a weight sync. No process is started."""
    from megarl.commands.plan.explain_command import show_weight_sync

    return show_weight_sync(recipe, overrides or [], model=model, per_node=per_node, as_json=as_json)


@app.command(name="exchange", hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def exchange(context: typer.Context) -> int:
    """Former name of `weight-sync`."""
    typer.echo("megarl exchange is now megarl weight-sync (without --explain)", err=True)
    arguments = [argument for argument in context.args if argument != "--explain"]
    return int(app(args=["weight-sync", *arguments], prog_name="megarl", standalone_mode=False) or 0)


app.command(name="convert-weights")(convert_weights_command)


@app.command(name="convert-config")
def convert_config(
    file: Annotated[str, typer.Argument(metavar="FILE", help="verl script or command line; - reads standard input.")],
    settings: Annotated[
        Optional[list[str]],
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Values of shell variables that the script does not set (1=8 sets $1); names with a dot are recipe settings.",
        ),
    ] = None,
    out: Annotated[Optional[Path], typer.Option(help="Recipe file to write. Default: standard output.")] = None,
    rows: Annotated[
        Optional[int], typer.Option(min=1, help="Number of training rows, to convert epochs to steps.")
    ] = None,
    accept: Annotated[
        Optional[list[str]],
        typer.Option(help="Option of verl to leave out although the run then computes something else; repeatable."),
    ] = None,
    machine: Annotated[
        Optional[str], typer.Option(help="Machine or device of the line `# Hardware:`, e.g. H100, which plan reads.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Convert a verl script to a recipe without running it; stderr lists the options that have no counterpart."""
    from megarl.commands.convert_verl.command import convert_file

    with as_input_error():
        convert_file(file, settings or [], out=out, rows=rows, accepted=accept or [], machine=machine)


add_examples(app)


def _format_warning(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
    """Format the warning about a recipe's former name as one line, on the first rank alone; others as Python does."""
    if category is not FormerNameWarning:
        return _PYTHON_FORMAT(message, category, *place, **line)
    return f"notice: {message}\n" if os.environ.get("RANK", "0") == "0" else ""


def main() -> None:
    """Run the command line and exit with its status."""
    arguments = sys.argv[1:]
    warnings.formatwarning = _format_warning
    leave(guarded(lambda: app(args=arguments, prog_name="megarl", standalone_mode=False), debug="--debug" in arguments))

"""Rewards: functions, and reward models, which verl serves itself."""

from __future__ import annotations

from megarl.commands.convert_verl.conversion import Conversion
from megarl.commands.convert_verl.option import Option, no_counterpart
from megarl.errors import InputError
from megarl.recipe.load import OPEN

OVERLONG = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)
LONGEST = ("reward_model.reward_kwargs.max_resp_len", "reward.reward_kwargs.max_resp_len")
"""Options with the length from which verl counts the buffer of long responses."""
_BY_ROW = "each sample is scored separately: by reward.function, or by the scorer of its data_source (docs/rewards.md)"
_SERVER = "it concerns the reward model's server, which is started separately"
_MODELS = {"reward.reward_model": "model_path", "reward_model": "model.path"}
"""Section of a reward model -> its option with the model's path."""
_FUNCTIONS = ("custom_reward_function", "reward.custom_reward_function")  # verl prefers the former
_OF_SERVER = (
    "rollout.*", "model.*", "enable_resource_pool", "n_gpus_per_node", "nnodes", "num_workers", "use_reward_loop",
    "micro_batch_size*", "use_dynamic_bsz", "forward_max_token_len_per_gpu", "max_length", "strategy", "megatron.*",
)  # fmt: skip

OF_REWARD = [
    *(Option(f"{prefix}.{name}", "reward.function", "path:name", derived=True) for prefix in _FUNCTIONS for name in ("path", "name")),
    *(Option(f"{prefix}.reward_kwargs*", "reward.arguments.*", "same name in megarl") for prefix in _FUNCTIONS),
    *no_counterpart(_BY_ROW, "reward_model.reward_manager", "reward.reward_manager.name", same=(None, "naive", "dapo", "prime", "gdpo"), changes=True),
    *no_counterpart(_BY_ROW, "reward.reward_manager.*", "reward_model.reward_loop_*", same=(None, "register"), changes=True),
    *(Option(name, None, "always rollout.max_response_length; another value is refused with an overlong_buffer", derived=True) for name in LONGEST),
    *(option for prefix in OVERLONG for option in (
        Option(f"{prefix}.enable", "algorithm.overlong.penalty_buffer", "False is 0", derived=True),
        Option(f"{prefix}.len", "algorithm.overlong.penalty_buffer", "if enable is True", derived=True),
        Option(f"{prefix}.penalty_factor", "algorithm.overlong.penalty_factor", "if enable is True", derived=True),
        Option(f"{prefix}.log", None, "reward parts are always logged"),
    )),
    *(option for prefix, path in _MODELS.items() for option in (
        Option(f"{prefix}.enable", "reward.function", "True is reward_model; with a custom_reward_function, arguments of the function", derived=True),
        Option(f"{prefix}.{path}", "reward.remote.model", "if enable is True", derived=True),
        *no_counterpart(_SERVER, *(f"{prefix}.{name}" for name in _OF_SERVER)),
    )),
    *no_counterpart("megarl has no bonus from the hidden states of a second model", "reward_model.elliptical.*"),
    *no_counterpart("reward.processes is per engine", "reward.num_workers"),
]  # fmt: skip
"""Options of rewards. A reward model's tensor-parallel size and lengths are in a note, in the command that serves it."""

_ELLIPTICAL = "reward_model.elliptical"
_TIME = {"reward.remote.timeout": 300.0, "reward.timeout": 1000.0}
_TIME_OF_FUNCTION = 3600.0


def translate_reward_function(conversion: Conversion) -> None:
    """Set reward.function to verl's custom_reward_function: a file, or pkg:// and a module."""
    for prefix in _FUNCTIONS:
        option, path = f"{prefix}.path", conversion.get(f"{prefix}.path")
        if not path:
            continue
        if path == OPEN:
            conversion.settings["reward.function"], conversion.origins["reward.function"] = OPEN, option
            break
        path = str(path).removeprefix("file://")
        module = path.removeprefix("pkg://").replace("/", ".") if path.startswith("pkg://") else path
        if "://" in module or not (path.startswith("pkg://") or path.endswith(".py")):
            raise InputError(f"{conversion.where(option)}{option}={path} is neither a .py file nor pkg:// and a module")
        name = conversion.get(f"{prefix}.name", "compute_score")
        if not name:
            raise InputError(f"{conversion.where(f'{prefix}.name')}{prefix}.name has no value")
        conversion.settings["reward.function"] = f"{module}:{name}"
        if option not in conversion.options:
            conversion.note(option, "the scorer of verl's recipe: its repository must be on PYTHONPATH")
        break
    else:
        conversion.drop("reward.arguments.", "verl uses it with custom_reward_function.path")
    _reward_model(conversion)


def _reward_model(conversion: Conversion) -> None:
    """Set the scorer `reward_model`, or the arguments that verl adds to a custom_reward_function, and note the server's command."""
    get, settings = conversion.get, conversion.settings
    prefix = next((prefix for prefix in _MODELS if conversion.is_on(f"{prefix}.enable")), None)
    if prefix is None:
        return
    option, path = f"{prefix}.enable", get(f"{prefix}.{_MODELS[prefix]}")
    if {option, "reward.function"} & {*conversion.user_choices}:
        conversion.note(option, "left out: reward.function is the reward")
        return
    if conversion.is_on(f"{_ELLIPTICAL}.enable"):
        reason = "this model's hidden states give the exploration bonus of rep_exp, which megarl does not compute"
        conversion.leave_out(option, reason, changes=True)
        return
    if not path:
        raise InputError(f"{conversion.where(option)}{option}=True needs {prefix}.{_MODELS[prefix]}")
    if function := settings.get("reward.function"):
        settings |= {
            "reward.arguments.reward_router_address": OPEN,
            "reward.arguments.reward_model_tokenizer": path,
            "reward.timeout": _TIME_OF_FUNCTION,
        }
        engine = get(f"{prefix}.rollout.name", "vllm")
        conversion.note(
            option,
            f"{function} asks a server of {engine} with the model {path}: start it on devices besides the run's, and set "
            f"reward.arguments.reward_router_address=HOST:PORT; verl has no limit for its answer, here it is reward.timeout",
        )
        return
    if any(conversion.is_on(f"{overlong}.enable") for overlong in OVERLONG):
        raise InputError(
            f"{conversion.where(option)}with {option}=True verl ignores overlong_buffer; remove one of the two"
        )
    settings |= {"reward.function": "reward_model", "reward.remote.url": OPEN, "reward.remote.model": path, **_TIME}
    rollout, longest = f"{prefix}.rollout", 0
    if f"{rollout}.prompt_length" in conversion.options:
        longest = conversion.number(f"{rollout}.prompt_length") + conversion.number(f"{rollout}.response_length", 2048)
    size = get(f"{rollout}.tensor_model_parallel_size", 1)
    command = f"vllm serve {path} --tensor-parallel-size {size}{f' --max-model-len {longest}' if longest else ''}"
    conversion.note(
        option,
        f"the model's output is the reward, of evaluation too. Start `{command}` on devices besides the run's, "
        "and set reward.remote.url=http://HOST:8000/classify",
    )

"""Agent loops written for verl: classes derived from verl.experimental.agent_loop.AgentLoopBase, which run unchanged.

A YAML file (`agent_loop_config_path`) lists them with `name`, `_target_` and arguments of the constructor, and a row chooses one
in its column agent_name, as in verl/experimental/agent_loop/agent_loop.py (verl-project/verl at 1dda0394). Log-probs and versions
come from the engine's answers, not from the loop's output.
"""

from __future__ import annotations

import copy
import functools
import importlib
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.agents.custom.interface import AgentLoopClass, LoopSample, Response
from megarl.agents.tool import ToolFault
from megarl.agents.tool_responses import AnswerTokens, ReplyTokens
from megarl.agents.verl_tools import class_of, objects_of_file
from megarl.data.prompts import AGENT_NAME
from megarl.data.tokenizer import HuggingFaceTokenizer, Tokenizer
from megarl.recipe.schema import Recipe

_LOOP = "verl.experimental.agent_loop.agent_loop"
_ROLLOUT = "actor_rollout_ref.rollout"
_DEFAULT = f"{_ROLLOUT}.agent.default_agent_loop"
_BUILT_IN = ("single_turn_agent", "tool_agent")
_TOOLS = f"{_ROLLOUT}.multi_turn.tool_config_path"
_REFUSED = {
    f"{_ROLLOUT}.multi_turn.function_tool_path": "verl's function tools are not passed to loops: the loop imports its tools"
}
_SAMPLING = "sampling_params."
_PIECE = 256  # tokens of a request with stop strings: later ones are searched for the string, and left out behind it
_NO_LIMIT = 1 << 20  # tokens of a message that the loop appends


def verl_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe's settings under verl's names, as a loop reads them. Settings that megarl lacks have verl's defaults."""
    data, rollout = recipe.data, recipe.rollout
    multi_turn = {
        "enable": True, "max_assistant_turns": None, "max_user_turns": None, "max_parallel_calls": 1,
        "max_tool_response_length": 256, "tool_response_truncate_side": "middle", "tool_config_path": None,
        "function_tool_path": None, "interaction_config_path": None, "format": "hermes", "num_repeat_rollouts": None,
    }  # fmt: skip
    return {
        "actor_rollout_ref": {
            "model": {"path": recipe.model.path, "custom_chat_template": None},
            "rollout": {
                "name": rollout.engine, "mode": "async", "n": rollout.samples_per_prompt,
                "prompt_length": data.max_prompt_length, "response_length": rollout.max_response_length,
                "max_model_len": data.max_prompt_length + rollout.max_response_length,
                "temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k,
                "calculate_log_probs": True, "full_determinism": False, "multi_turn": multi_turn,
                "agent": {"num_workers": 1, "default_agent_loop": None, "agent_loop_config_path": None},
            },
        },
        "data": {
            "max_prompt_length": data.max_prompt_length, "max_response_length": rollout.max_response_length,
            "apply_chat_template_kwargs": dict(data.chat_template_args), "mm_processor_kwargs": {}, "return_raw_chat": True,
        },
        "trainer": {"project_name": "megarl", "experiment_name": recipe.name},
    }  # fmt: skip


def is_verls(class_: Any) -> bool:
    """Return whether a class is derived from verl's AgentLoopBase, or from megarl's stand-in."""
    return inspect.isclass(class_) and any(base.__name__ == "AgentLoopBase" for base in class_.__mro__)


def loop_of_verl(
    class_: Any, arguments: Mapping[str, Any], verl: Mapping[str, Any], tokenizer: Tokenizer
) -> AgentLoopClass:
    """Return a class of verl as a loop. `arguments`: options of verl by name; `verl`: of `verl_settings`.

    Raises ValueError if an option, the tokenizer or the class cannot be used.
    """
    maker = _Maker(class_, {}, _config(arguments, verl), _sampling(arguments), tokenizer)
    return AgentLoopClass(class_.__name__, lambda sample: _VerlLoop(maker))


def loops_of_file(
    file: str, arguments: Mapping[str, Any], verl: Mapping[str, Any], tokenizer: Tokenizer
) -> AgentLoopClass:
    """Return the loops of a YAML file as one, which is the row's. Raises ValueError for a file or class that cannot be used."""
    config = _config(arguments, verl)
    makers: dict[str, _Maker] = {}
    for number, entry in enumerate(loop_entries(Path(file))):
        place = f"{file}, loop {number + 1}"
        name, target = entry.get("name"), entry.get("_target_")
        if not isinstance(name, str) or name in makers:
            raise ValueError(f"{place}: its name is {name!r}, and each loop needs one that no other has")
        class_ = class_of(target, place, "AgentLoopBase", ("run",))
        if not is_verls(class_):
            raise ValueError(f"{place}: {target} is not derived from verl's AgentLoopBase")
        keywords = {key: value for key, value in entry.items() if key != "_target_"}
        makers[name] = _Maker(class_, keywords, config, _sampling(arguments), tokenizer)
    default = arguments.get(_DEFAULT) or (next(iter(makers)) if len(makers) == 1 else None)
    if default is not None and default not in makers:
        raise ValueError(f"{_DEFAULT} is {default!r}, and {file} has {', '.join(makers)}")

    def create(sample: LoopSample) -> _VerlLoop:
        name = sample.context.extra_info.get(AGENT_NAME) or default
        if name not in makers:
            hint = f"; or set {_DEFAULT} in agent.loop_arguments"
            if name in _BUILT_IN:
                hint = ": verl's own loops are not run here"
            raise ToolFault(f"the row's {AGENT_NAME} is {name!r}, and the file has {', '.join(makers)}{hint}")
        return _VerlLoop(makers[name])

    return AgentLoopClass(Path(file).name, create)


def loop_entries(file: Path) -> list[dict[str, Any]]:
    """Return the entries of a YAML file of loops, with OmegaConf's references resolved. Raises ValueError for another file."""
    from omegaconf import OmegaConf

    try:
        entries: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except Exception as error:
        raise ValueError(f"{file} cannot be read as YAML of verl's loops: {type(error).__name__}: {error}") from error
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError(f"{file} is not a list of loops, with `name` and `_target_` for each")
    return entries


def _config(arguments: Mapping[str, Any], verl: Mapping[str, Any]) -> Any:
    from omegaconf import OmegaConf

    config = OmegaConf.create(dict(verl))
    for name, value in arguments.items():
        if name.startswith(_SAMPLING):
            continue  # for `run`, see `_sampling`
        if "." not in name:
            raise ValueError(
                f"agent.loop_arguments: {name!r} is not an option of verl: give its whole name, as {_DEFAULT}"
            )
        if value is not None and name in _REFUSED:
            raise ValueError(f"agent.loop_arguments: {name}: {_REFUSED[name]}")
        OmegaConf.update(config, name, value, force_add=True)
    OmegaConf.set_struct(config, True)
    return config


def _sampling(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that `run` receives in its sampling_params, as a manager of the user's would add them."""
    return {name.removeprefix(_SAMPLING): value for name, value in arguments.items() if name.startswith(_SAMPLING)}


class _Maker:
    """Creates the objects of a class. `keywords`: of its entry in the file. `sampling`: see `_sampling`."""

    def __init__(
        self, class_: Any, keywords: Mapping[str, Any], config: Any, sampling: Mapping[str, Any], tokenizer: Tokenizer
    ) -> None:
        from omegaconf import OmegaConf

        self.sampling = sampling
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise ValueError(
                f"agent loops of verl need a tokenizer of transformers, and {tokenizer.directory} has none"
            )
        self.class_, self.keywords, self.config, self.tokenizer = class_, keywords, config, tokenizer
        self.hf_tokenizer = _returning_lists(tokenizer.hugging_face)
        file = OmegaConf.select(config, _TOOLS)
        self.tools = objects_of_file(str(file)) if file else []
        self._prepared = False

    def create(self, sample: LoopSample) -> Any:
        """Return the loop of a sample. An earlier form of verl's classes is prepared first."""
        loop = importlib.import_module(_LOOP)
        if not self._prepared and hasattr(self.class_, "init_class"):
            self.class_.init_class(config=self.config, tokenizer=self.hf_tokenizer, processor=None)
        self._prepared = True
        settings = loop.DictConfigWrap(config=self.config.data)
        parameters = inspect.signature(loop.AgentLoopBase.__init__).parameters
        tools = {"tools": loop.ToolListWrap(self.tools)} if hasattr(loop, "ToolListWrap") else {}
        return self.class_(
            trainer_config=loop.DictConfigWrap(config=self.config),
            server_manager=server_of(sample, self.tokenizer, self.config),
            tokenizer=self.hf_tokenizer,
            processor=None,
            dataset_cls=None,
            hf_model_type=_model_type(self.tokenizer.directory),
            **{"dataset_config" if "dataset_config" in parameters else "data_config": settings},
            **tools,
            **self.keywords,
        )


class _VerlLoop:
    """The loop of a sample, with the method of a class that `megarl.agents.agent_loop` takes."""

    def __init__(self, maker: _Maker) -> None:
        self._maker = maker

    async def run(self, sample: LoopSample) -> Response:
        """Run verl's class. Raises ToolFault for an option that the recipe does not set, or an output that cannot be used."""
        from omegaconf.errors import ConfigAttributeError, ConfigKeyError

        sampling = sample.sampling
        parameters = {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k,
            "repetition_penalty": 1.0, "logprobs": True, **self._maker.sampling,
        }  # fmt: skip
        try:
            return response_of(await self._maker.create(sample).run(parameters, **_columns(sample)))
        except (ConfigAttributeError, ConfigKeyError) as error:
            raise ToolFault(f"it reads verl's option {error.full_key}: give it in agent.loop_arguments") from error


def _columns(sample: LoopSample) -> dict[str, Any]:
    """Return the row's columns, as verl's data set passes them to `run`."""
    context = sample.context
    extra_info = {name: value for name, value in context.extra_info.items() if name != AGENT_NAME}
    return {
        "raw_prompt": copy.deepcopy(list(sample.messages)),
        "data_source": sample.data_source,
        "reward_model": {"ground_truth": context.ground_truth},
        "extra_info": extra_info,
        "index": extra_info.get("index", 0),
        "uid": context.uid,
        "tools_kwargs": extra_info.get("tools_kwargs") or {},
        "interaction_kwargs": extra_info.get("interaction_kwargs") or {},
    }


def response_of(output: Any) -> Response:
    """Convert an AgentLoopOutput. Raises ToolFault if it is another object or has images."""
    missing = [name for name in ("prompt_ids", "response_ids", "response_mask") if not hasattr(output, name)]
    if missing:
        raise ToolFault(f"it returned {type(output).__name__}, not one AgentLoopOutput: no {', '.join(missing)}")
    if any((getattr(output, "multi_modal_data", None) or {}).values()):
        raise ToolFault("its output has multi_modal_data: loops with images are not supported")
    return Response(
        tokens=list(output.response_ids),
        mask=[bool(entry) for entry in output.response_mask],
        prompt=output.prompt_ids,
        reward=output.reward_score,
        extra_info={**output.extra_fields, "num_turns": output.num_turns},
    )


def server_of(sample: LoopSample, tokenizer: Tokenizer, config: Any) -> Any:
    """Return the object `server_manager` of a sample. It is of verl's class, for loops that check it."""
    loop = importlib.import_module(_LOOP)
    base: Any = getattr(loop, "AsyncLLMServerManager", None) or getattr(loop, "LLMServerClient", object)
    template_args = dict(config.data.apply_chat_template_kwargs)

    async def generate(
        self: Any, request_id: Any, *, prompt_ids: Any, sampling_params: Mapping[str, Any], **extra: Any
    ) -> Any:
        unsupported = [name for name, value in extra.items() if value and name != "priority"]
        if unsupported:
            raise ToolFault(f"its request has {', '.join(unsupported)}, and megarl's engine takes token ids only")
        output = importlib.import_module("verl.workers.rollout.replica").TokenOutput
        settings, stops = _settings(sampling_params, sample)
        tokens, log_probs = await _sampled(sample, tokenizer, list(_ids(prompt_ids)), settings, stops)
        return output(token_ids=tokens, log_probs=log_probs, stop_reason="completed")

    def between(self: Any, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        roles = [message["role"] for message in messages]
        if roles == ["user"]:
            return ReplyTokens(tokenizer, template_args, _NO_LIMIT).tokens(messages[0]["content"])
        if roles and set(roles) == {"tool"}:
            answers = [(str(message.get("name", "tool")), message["content"]) for message in messages]
            return AnswerTokens(tokenizer, template_args, _NO_LIMIT).tokens(answers)
        raise ToolFault(
            f"it appends messages of {roles}: without verl, megarl appends one message of the user, or messages of tools"
        )

    server_class = type("PolicyServer", (base,), {"generate": generate, "between": between})
    return object.__new__(server_class)


def _ids(prompt_ids: Any) -> Any:
    """Return token ids; transformers 5 returns them in a mapping."""
    return (
        prompt_ids["input_ids"] if isinstance(prompt_ids, Mapping) or hasattr(prompt_ids, "input_ids") else prompt_ids
    )


async def _sampled(
    sample: LoopSample, tokenizer: Tokenizer, tokens: list[int], settings: dict[str, Any], stops: Sequence[str]
) -> tuple[list[int], list[float]]:
    """Return the continuation of `tokens`, with log-probs, up to the token that completes one of `stops`.

    Engines get token ids alone. So with stop strings the continuation comes in pieces, and tokens behind a stop string are left
    out: the result has the distribution of an engine that stops there.
    """
    if not stops:
        done = await sample.generate(tokens, **settings)
        return list(done.tokens), list(done.log_probs)
    made: list[int] = []
    log_probs: list[float] = []
    most = settings.pop("max_tokens", None)
    while most is None or len(made) < most:
        piece = _PIECE if most is None else min(_PIECE, most - len(made))
        done = await sample.generate([*tokens, *made], max_tokens=piece, **settings)
        made += done.tokens
        log_probs += done.log_probs
        end = _end_of(tokenizer, made, stops)
        if end or done.finish_reason != "length" or not done.tokens:
            return made[:end] if end else made, log_probs[:end] if end else log_probs
    return made, log_probs


def _end_of(tokenizer: Tokenizer, tokens: Sequence[int], stops: Sequence[str]) -> int:
    """Return the number of tokens up to the first one that completes a stop string; 0 if there is none."""

    def stopped(count: int) -> bool:
        text = tokenizer.decode(list(tokens[:count]))
        return any(stop in text for stop in stops)

    if not stopped(len(tokens)):
        return 0
    low, high = 0, len(tokens)  # not stopped, stopped
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if stopped(middle) else (middle, high)
    return high


def _settings(params: Mapping[str, Any], sample: LoopSample) -> tuple[dict[str, Any], list[str]]:
    """Return the keywords of `LoopSample.generate`, and the stop strings. Raises ToolFault for a parameter that the engine cannot follow."""
    left = {name: value for name, value in params.items() if value is not None and name != "logprobs"}
    stops = left.pop("stop", [])
    stops = [stops] if isinstance(stops, str) else list(stops)
    left.pop("include_stop_str_in_output", None)  # it concerns the text, and loops get token ids
    keywords: dict[str, Any] = {}
    for name in ("max_tokens", "max_new_tokens"):
        if name in left:
            keywords["max_tokens"] = left.pop(name)
    for name in ("temperature", "top_p", "top_k"):
        if (value := left.pop(name, None)) is not None and value != getattr(sample.sampling, name):
            keywords[name] = value
    same = {"repetition_penalty": 1.0, "n": 1, "stop_token_ids": []}
    different = [f"{name}={value!r}" for name, value in left.items() if name not in same or value != same[name]]
    if different:
        raise ToolFault(f"its sampling_params have {', '.join(different)}, which megarl's engine is not asked for")
    return keywords, stops


def _returning_lists(tokenizer: Any) -> Any:
    """Return a tokenizer with an apply_chat_template that returns token ids as a list, as before transformers 5."""
    shared = copy.copy(tokenizer)
    render: Callable[..., Any] = tokenizer.apply_chat_template

    @functools.wraps(render)
    def apply_chat_template(*args: Any, **kwargs: Any) -> Any:
        return render(*args, **{"return_dict": False, **kwargs})

    shared.apply_chat_template = apply_chat_template
    return shared


def _model_type(directory: Path) -> str | None:
    file = directory / "config.json"
    return json.loads(file.read_text()).get("model_type") if file.is_file() else None

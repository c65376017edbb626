"""verl's adapters: `model.lora_rank` with FSDP, `model.lora.rank` with Megatron. Each ignores the other's options."""

from __future__ import annotations

from typing import Any

from megarl.commands.convert_verl.conversion import Conversion

_MODEL = "actor_rollout_ref.model"
_FUSED = {
    "linear_qkv": ["q_proj", "k_proj", "v_proj"], "linear_q": ["q_proj"], "linear_k": ["k_proj"], "linear_v": ["v_proj"],
    "linear_proj": ["o_proj"], "linear_fc1": ["gate_proj", "up_proj"], "linear_fc1_gate": ["gate_proj"],
    "linear_fc1_up": ["up_proj"], "linear_fc2": ["down_proj"], "linear_q_proj": ["q_proj"],
    "linear_q_down_proj": ["q_a_proj"], "linear_q_up_proj": ["q_b_proj"], "linear_kv_down_proj": ["kv_a_proj_with_mqa"],
    "linear_kv_up_proj": ["kv_b_proj"],
}  # fmt: skip
"""Megatron's names of linear layers -> Hugging Face's."""
_ALL = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]  # the default of model.lora.target_modules
_SAME = {
    "dropout": (0, 0.0), "exclude_modules": (None, []), "type": ("lora", "canonical_lora"), "adapter_path": (None,),
    "a2a_experimental": (False,), "lora_A_init_method": ("xavier", "kaiming"), "lora_B_init_method": ("zero",), "dtype": (None,),
    "freeze_language_model": (True,), "freeze_vision_model": (True,), "freeze_vision_projection": (True,),
}  # fmt: skip
"""Options of model.lora with the values that megarl's adapters have, but for the initialization of A: uniform, as PEFT's."""


def translate_lora(conversion: Conversion, *, megatron: bool) -> None:
    """Set the adapters of the policy. `megatron`: verl's actor uses Megatron, not FSDP."""
    get, settings = conversion.get, conversion.settings
    read, ignored = (f"{_MODEL}.lora.", f"{_MODEL}.lora_") if megatron else (f"{_MODEL}.lora_", f"{_MODEL}.lora.")
    for name in [name for name in conversion.options if name.startswith(ignored)]:
        if name != f"{_MODEL}.lora.merge":
            engine = "Megatron" if megatron else "FSDP"
            conversion.note(name, f"not used: verl's {engine} actor reads {read}rank and its neighbours")
    if not (rank := get(f"{read}rank", 0)):
        if get(option := f"{read}adapter_path"):
            reason = (
                "without lora_rank, verl of January 2026 trains these adapters, and verl of August 2026 all weights"
            )
            conversion.leave_out(option, reason, changes=True)
        return
    settings |= {"lora.rank": rank, "lora.alpha": get(f"{read}alpha", 32 if megatron else 16)}
    targets = get(f"{read}target_modules", _ALL) if megatron else get(f"{_MODEL}.target_modules", "all-linear")
    settings["lora.targets"] = _targets(conversion, targets, megatron=megatron)
    if not megatron and (path := get(option := f"{read}adapter_path")):  # Megatron's is not a PEFT directory
        settings["lora.path"] = path
        conversion.note(option, "the reference policy has these adapters, too; verl's is the model without adapters")
    if conversion.is_on(f"{_MODEL}.lora.merge"):
        settings["weight_sync.adapters"] = "merged"
    if megatron and get(f"{read}type", "lora") == "lora":
        conversion.note(f"{read}type", "each of the fused layers has separate adapters, as with canonical_lora")
    allowed_values = {f"{read}{name}": same for name, same in _SAME.items()} | {
        f"{_MODEL}.exclude_modules": (None, [], "DONT_EXCLUDE", ".*visual.*")  # a vision tower has no adapters here
    }
    if not megatron:
        del allowed_values[f"{read}adapter_path"]
    for option, same in allowed_values.items():
        if option in conversion.options and get(option) not in same:
            conversion.leave_out(option, "megarl's adapters have no counterpart", changes=True)


def _targets(conversion: Conversion, targets: Any, *, megatron: bool) -> list[str]:
    names = targets if isinstance(targets, list) else [targets]
    if not megatron:
        return ["all-linear"] if targets is None else [str(name) for name in names]
    if {*names} == {*_ALL}:
        return ["all-linear"]
    if unknown := [name for name in names if name not in _FUSED]:
        option = f"{_MODEL}.lora.target_modules"
        reason = f"no counterpart of {', '.join(map(str, unknown))}; supported: {', '.join(_FUSED)}"
        conversion.leave_out(option, reason, to="lora.targets", changes=True)
        names = [name for name in names if name in _FUSED]
    return list(dict.fromkeys(layer for name in names for layer in _FUSED[name]))

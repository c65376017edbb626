"""Learning-rate schedules of verl's engines."""

from __future__ import annotations

from megarl.commands.convert_verl.conversion import Conversion
from megarl.recipe.training import CriticOptimizerConfig, OptimizerConfig


def translate_schedule(conversion: Conversion, section: str, optimizer: str, updates: int, *, megatron: bool) -> None:
    """Derive the learning-rate schedule in `section`. verl's advances once per training step, of `updates` optimizer steps.

    Source: verl/utils/megatron/optimizer.py:249, verl/workers/engine/veomni/transformer_impl.py:290.
    """
    settings, veomni = conversion.settings, conversion.get("model_engine") == "veomni"
    if veomni:
        settings.setdefault(f"{section}.decay", "cosine")  # verl/trainer/config/optim/veomni.yaml
    warmup, decay = (int(conversion.get(f"{optimizer}.lr_{name}_steps") or -1) for name in ("warmup", "decay"))
    ratio = conversion.get(f"{optimizer}.lr_warmup_steps_ratio", 0)
    steps = decay if megatron and decay > 0 else settings.get("train.steps")
    if veomni and warmup > 0:
        conversion.note(f"{optimizer}.lr_warmup_steps", "not used: verl's VeOmni reads lr_warmup_steps_ratio")
    elif warmup > 0:
        settings[f"{section}.warmup_steps"] = warmup * updates
    if ratio and (veomni or warmup <= 0) and steps is not None:
        settings[f"{section}.warmup_steps"] = int(ratio * steps * updates)
    elif ratio and (veomni or warmup <= 0):
        conversion.note(
            f"{optimizer}.lr_warmup_steps_ratio", f"the number of steps is unknown: set {section}.warmup_steps"
        )
    if settings.get(f"{section}.decay", "constant") == "constant":
        return
    if decay > 0:
        settings[f"{section}.decay_steps"] = decay * updates
    if lowest := conversion.get(f"{optimizer}.min_lr"):
        default = CriticOptimizerConfig() if section.startswith("critic") else OptimizerConfig()
        settings[f"{section}.min_lr_ratio"] = float(lowest) / float(settings.get(f"{section}.lr", default.lr))

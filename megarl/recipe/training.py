"""The recipe's sections on what is trained: the model, its layout, adapters, optimizers, actor and critic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Optional

from megarl.recipe.key import key


@dataclass
class ModelConfig:
    """The model that is trained: a Hugging Face directory."""

    path: str = key("", "Hugging Face directory with config.json, safetensors and tokenizer. Required.")
    tokenizer: Optional[str] = key(None, "Tokenizer directory, where it is not `model.path`.")
    dtype: Literal["float32", "bfloat16"] = key(
        "bfloat16",
        "Data type of the trainer's weights and activations. With bfloat16 the optimizer keeps float32 master weights.",
    )


@dataclass
class MegatronConfig:
    """How the trainer's model is laid out and computed. Data parallel size is what the processes leave: processes / (tensor x pipeline x context)."""

    tensor_parallel: int = key(1, "Tensor-parallel size (TP).", at_least=1)
    sequence_parallel: Optional[bool] = key(
        None, "Sequence parallel (SP). Unset: on when TP > 1. MoE with TP > 1 needs it."
    )
    pipeline_parallel: int = key(1, "Pipeline-parallel size (PP).", at_least=1)
    virtual_pipeline: Optional[int] = key(
        None, "Model chunks a pipeline stage (VPP, interleaved 1F1B). Needs PP > 1.", at_least=2
    )
    first_stage_layers: Optional[int] = key(
        None, "Layers on the first pipeline stage, where stages are uneven.", at_least=1
    )
    last_stage_layers: Optional[int] = key(
        None, "Layers on the last pipeline stage, where stages are uneven.", at_least=1
    )
    context_parallel: int = key(1, "Context-parallel size (CP): sequences are cut over this many devices.", at_least=1)
    expert_parallel: int = key(
        1, "Expert-parallel size (EP), taken out of data x tensor x context parallel.", at_least=1
    )
    expert_tensor_parallel: Optional[int] = key(
        None, "Tensor-parallel size inside an expert (ETP). Unset: 1.", at_least=1
    )
    distributed_optimizer: bool = key(True, "Shard the optimizer's states over data-parallel ranks (ZeRO-1).")
    recompute: Literal["none", "selective", "full"] = key(
        "none",
        "Activations to compute again in the backward pass: none, selective (core attention), full (every layer).",
    )
    keep_logits: bool = key(
        False,
        "Hold all logits for the backward pass instead of computing them again block by block: a third less work in the output layer, and tokens x vocabulary / TP numbers of memory.",
    )
    packing: bool = key(
        True,
        "Sequences of a micro batch one after the other, without padding. Off: each padded to the longest of its micro batch, for attention kernels that know no packed sequences; `actor.max_tokens_per_micro_batch` then counts padding.",
    )
    moe_aux_loss_coef: float = key(
        0.0,
        "Coefficient of the MoE load-balancing loss: DeepSeek-V3's sequence-wise loss (arXiv 2412.19437, equations 17-20) of each layer, a mean over all tokens of the mini batch. 0 switches it off.",
        at_least=0,
    )
    moe_z_loss_coef: float = key(
        0.0,
        "Coefficient of the router z-loss (arXiv 2202.08906) of each layer, a mean over all tokens of the mini batch. 0 switches it off.",
        at_least=0,
    )
    routing_replay: Literal["none", "old_log_probs", "rollout"] = key(
        "none",
        "MoE: in the update, send each token to the experts that it went to in the old-log-prob pass (`old_log_probs`: R2), or, in both passes, in the engine (`rollout`: R3; the engine must return them, which vLLM does on CUDA).",
    )
    offload: Optional[bool] = key(
        None,
        "Colocated: gradients, optimizer states and weights move to host memory while the engines run. Unset: true where engines share the trainers' devices and these have memory of their own, else false. It takes host memory for a copy of them and a transfer in each direction at every step.",
    )
    ddp: dict[str, Any] = key(
        {},
        "Fields of Megatron's DistributedDataParallelConfig, under Megatron's own names: overlap_grad_reduce (gradients are reduced beside the last backward pass), overlap_param_gather (updated weights are gathered beside the next forward pass), align_param_gather, bucket_size (parameters), pad_buckets_for_high_nccl_busbw. Unset ones follow the device: both overlaps on with cuda, off elsewhere; `megarl plan` shows them.",
    )
    extra: dict[str, Any] = key(
        {},
        "Further fields of Megatron's TransformerConfig, under Megatron's own names (verl: override_transformer_config); on a device whose adaptor of Megatron has settings of its own, those as well, which are refused elsewhere.",
    )


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule. One optimizer step a mini batch."""

    lr: float = key(1e-6, "Peak learning rate.", at_least=0)
    min_lr_ratio: float = key(0.0, "Where the decay ends, as a share of `lr`.", at_least=0, at_most=1)
    warmup_steps: int = key(0, "Optimizer steps of linear warm-up.", at_least=0)
    decay: Literal["constant", "linear", "cosine"] = key("constant", "Shape after warm-up.")
    decay_steps: Optional[int] = key(
        None, "Optimizer steps until the end of the decay. Unset: all of the run's.", at_least=1
    )
    betas: tuple[float, float] = key((0.9, 0.999), "Adam's beta1 and beta2.")
    eps: float = key(1e-8, "Adam's epsilon.", above=0)
    weight_decay: float = key(0.01, "Decoupled weight decay, of matrices; norms and biases have none.", at_least=0)
    clip_grad: float = key(1.0, "Largest global gradient norm; 0 switches clipping off.", at_least=0)
    extra: dict[str, Any] = key(
        {},
        "Fields of Megatron's OptimizerConfig, under Megatron's own names: optimizer_cpu_offload (on GPUs, with bfloat16: float32 master weights and moments on the host, which updates them), optimizer_offload_fraction (required with it: the share of the states), overlap_cpu_optimizer_d2h_h2d, pin_cpu_grads, pin_cpu_params. Refused on other devices, with the setting that they have instead.",
    )


@dataclass
class LoraConfig:
    """Low-rank adapters: the model's weights stay as they are, and only the adapters beside its linears are trained.

    The reference policy is then the model without adapters; engines are sent adapters alone, or merged weights:
    `exchange.adapters`. Checkpoints hold the adapters alone."""

    rank: int = key(0, "Rank of the adapters. 0: none, all weights are trained.", at_least=0)
    alpha: float = key(32.0, "What adapters add is scaled by alpha / rank.", above=0)
    targets: list[str] = key(
        ["all-linear"],
        "Linears with an adapter, by their Hugging Face names: q_proj, gate_proj, ...; or the ends of longer ones, as in experts.up_proj, shared_experts.up_proj and mlp.up_proj. `all-linear`: those of attention, MLP and experts.",
    )


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    """The critic's AdamW: as the actor's, by default at a higher rate, since it starts without a head."""

    lr: float = key(1e-5, "Peak learning rate.", at_least=0)


@dataclass
class ActorConfig:
    """The policy's update."""

    mini_batches: int = key(
        1, "Optimizer steps a controller step: the batch's groups are cut into this many mini batches.", at_least=1
    )
    max_tokens_per_micro_batch: int = key(
        16384,
        "Tokens a device computes in one forward pass (under context parallel, of a sequence's parts: CP devices share CP times as many). Sequences are packed up to it; a longer one goes alone.",
        at_least=1,
    )
    optimizer: OptimizerConfig = key(OptimizerConfig, "")


@dataclass
class CriticConfig:
    """The critic, with `algorithm.advantage: gae`: a model of its own with a value head, in processes and a layout of its own. Needs Ray."""

    model_path: Optional[str] = key(
        None,
        "Hugging Face directory to start from: a model, or a critic that `megarl export --critic` wrote. Unset: `model.path`.",
    )
    trainers: int = key(
        1,
        "Critic processes, one a device: colocated, on the first of the actor's devices in turn with it, else on devices of their own.",
        at_least=1,
    )
    mini_batches: int = key(
        1, "Optimizer steps a controller step: the batch's groups are cut into this many mini batches.", at_least=1
    )
    max_tokens_per_micro_batch: int = key(
        16384, "Tokens a device computes in one forward pass, as `actor.max_tokens_per_micro_batch`.", at_least=1
    )
    value_clip: Optional[float] = key(
        0.5,
        "PPO's value clip: a value that has moved further than this from the one before the step gains nothing by it. Unset: plain squared error.",
        above=0,
    )
    warmup_steps: int = key(0, "Controller steps at the start in which only the critic learns.", at_least=0)
    optimizer: CriticOptimizerConfig = key(CriticOptimizerConfig, "")
    megatron: MegatronConfig = key(MegatronConfig, "")

"""The recipe's sections on trainers: `model`, `megatron`, `lora`, `actor` and `critic`. Section `train` is in schema.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Optional

from megarl.recipe.key import key


@dataclass
class ModelConfig:
    """The model to train: a Hugging Face directory, or a model on the hub."""

    path: str = key(
        "",
        "Hugging Face directory with config.json, safetensors and tokenizer, or a name on the hub with an optional branch, tag or commit: Qwen/Qwen3-1.7B, Qwen/Qwen3-1.7B@main. docs/hub.md describes names. Required.",
    )
    tokenizer: Optional[str] = key(None, "Tokenizer: a directory or a name on the hub. Unset: `model.path`.")
    dtype: Literal["float32", "bfloat16", "float16"] = key(
        "bfloat16",
        "Data type of the trainer's weights and activations. With bfloat16 and float16 the optimizer keeps float32 master weights; with float16 the loss is scaled (docs/numerics.md).",
    )
    table: Optional[str] = key(
        None,
        "Table of the model's family, for a model type that megarl has no table for: a file that `megarl model table` wrote (docs/add_a_model.md), or its text, which the resolved recipe has. Unset: megarl's own table.",
    )
    freeze_vision_tower: bool = key(
        False,
        "Keep the weights of the vision tower, which turns images into tokens: only the language model is trained. Saves the tower's gradients and optimizer states.",
    )


@dataclass
class MegatronConfig:
    """Layout and computation of the trainer's model. The data-parallel size follows from the number of processes:
    processes / (tensor x pipeline x context)."""

    tensor_parallel: int = key(1, "Tensor-parallel size (TP).", at_least=1)
    sequence_parallel: Optional[bool] = key(
        None, "Sequence parallel (SP). Required for MoE with TP > 1. Unset: on if TP > 1."
    )
    pipeline_parallel: int = key(1, "Pipeline-parallel size (PP).", at_least=1)
    virtual_pipeline: Optional[int] = key(
        None, "Model chunks per pipeline stage (VPP, interleaved 1F1B). Requires PP > 1. Unset: off.", at_least=2
    )
    first_stage_layers: Optional[int] = key(
        None, "Layers on the first pipeline stage. Unset: an even share.", at_least=1
    )
    last_stage_layers: Optional[int] = key(None, "Layers on the last pipeline stage. Unset: an even share.", at_least=1)
    context_parallel: int = key(
        1, "Context-parallel size (CP): each sequence is split over this many devices.", at_least=1
    )
    expert_parallel: int = key(1, "Expert-parallel size (EP), out of data x tensor x context parallel.", at_least=1)
    expert_tensor_parallel: Optional[int] = key(
        None, "Tensor-parallel size within an expert (ETP). Unset: 1.", at_least=1
    )
    distributed_optimizer: bool = key(True, "Shard the optimizer's states over data-parallel ranks (ZeRO-1).")
    recompute: Literal["none", "selective", "full"] = key(
        "none",
        "Activations to recompute in the backward pass: none, selective (core attention), full (every layer).",
    )
    keep_logits: bool = key(
        False,
        "Keep all logits for the backward pass instead of recomputing them block by block. Saves a third of the work in the output layer, and costs memory for tokens x vocabulary / TP numbers.",
    )
    fp32_head: bool = key(
        False,
        "Compute the output layer of the policy in float32, in trainers and engines. In bfloat16 every logit is rounded to 8 bits. Costs memory for float32 copies of the output weight and its inputs, and a slower product. Refused if the engine cannot do it: vLLM needs head_dtype (0.32), SGLang enable_fp32_lm_head.",
    )
    packing: bool = key(
        True,
        "Concatenate the sequences of a micro batch without padding. false: pad each to the longest of its micro batch, for attention kernels without support for packed sequences; `actor.max_tokens_per_micro_batch` then includes padding.",
    )
    moe_aux_loss_coef: float = key(
        0.0,
        "Coefficient of the MoE load-balancing loss: DeepSeek-V3's sequence-wise loss (arXiv 2412.19437, equations 17-20) of each layer, a mean over all tokens of the mini batch. 0: off.",
        at_least=0,
    )
    moe_z_loss_coef: float = key(
        0.0,
        "Coefficient of the router z-loss (arXiv 2202.08906) of each layer, a mean over all tokens of the mini batch. 0: off.",
        at_least=0,
    )
    routing_replay: Literal["none", "old_log_probs", "rollout"] = key(
        "none",
        "MoE: replay recorded expert choices in the update. old_log_probs (R2): the choices of the old-log-prob pass. rollout (R3): the engine's choices, in the old-log-prob pass and the update; requires an engine that returns them (vLLM on CUDA).",
    )
    offload: Optional[bool] = key(
        None,
        "Colocated: move gradients, optimizer states and weights to host memory while the engines run. Costs one copy in host memory, and one transfer in each direction per step. Unset: true if engines share the trainers' devices and the devices have separate memory, else false.",
    )
    ddp: dict[str, Any] = key(
        {},
        "Fields of Megatron's DistributedDataParallelConfig, under Megatron's names: overlap_grad_reduce (reduce gradients during the last backward pass), overlap_param_gather (gather updated weights during the next forward pass), align_param_gather, bucket_size (parameters), pad_buckets_for_high_nccl_busbw. Defaults depend on the device: both overlaps are on with cuda, except for models with images or adapters, and off elsewhere; `megarl plan` shows them.",
    )
    extra: dict[str, Any] = key(
        {},
        "Further fields of Megatron's TransformerConfig, under Megatron's names (verl: override_transformer_config). If the device's Megatron adaptor has additional settings, they are accepted on that device and rejected elsewhere.",
    )


@dataclass
class OptimizerConfig:
    """AdamW and its learning-rate schedule. Each mini batch is an optimizer step."""

    lr: float = key(1e-6, "Peak learning rate.", at_least=0, at_most=1)
    min_lr_ratio: float = key(0.0, "Learning rate at the end of the decay, as a share of `lr`.", at_least=0, at_most=1)
    init_lr_ratio: float = key(
        0.0, "Learning rate at the start of the warm-up, as a share of `lr`.", at_least=0, at_most=1
    )
    warmup_steps: int = key(0, "Optimizer steps of linear warm-up.", at_least=0)
    decay: Literal["constant", "linear", "cosine"] = key("constant", "Shape of the schedule after warm-up.")
    decay_steps: Optional[int] = key(
        None, "Optimizer step at which the decay ends. Unset: the last step of the run.", at_least=1
    )
    betas: tuple[float, float] = key((0.9, 0.999), "Adam's beta1 and beta2.")
    eps: float = key(1e-8, "Adam's epsilon.", above=0)
    weight_decay: float = key(0.01, "Decoupled weight decay of matrices. Norms and biases have none.", at_least=0)
    clip_grad: float = key(1.0, "Maximum global gradient norm. 0: no clipping.", at_least=0)
    extra: dict[str, Any] = key(
        {},
        "Fields of Megatron's OptimizerConfig, under Megatron's names: optimizer_cpu_offload (on GPUs, with bfloat16: float32 master weights and moments are stored and updated on the host), optimizer_offload_fraction (required with it: share of the states), overlap_cpu_optimizer_d2h_h2d, pin_cpu_grads, pin_cpu_params. Rejected on other devices; the message names the equivalent setting.",
    )


@dataclass
class LoraConfig:
    """Low-rank adapters: the model's weights are frozen, and only the adapters of its linear layers are trained.

    The reference policy is the model without adapters, or with the adapters of `path`. After a refresh it is the model with the adapters of that time
    (`algorithm.refresh_reference_every`). Engines receive only adapters, or merged weights: `weight_sync.adapters`.
    Checkpoints contain only the adapters.
    """

    rank: int = key(0, "Rank of the adapters. 0: no adapters, all weights are trained.", at_least=0)
    alpha: float = key(32.0, "The output of an adapter is scaled by alpha / rank.", above=0)
    path: Optional[str] = key(
        None,
        "Adapter to start from: a PEFT directory (adapter_config.json and adapter_model.safetensors) or a name on the hub. Rank, alpha and linears must equal this section's. Unset: new adapters, which change nothing at first.",
    )
    targets: list[str] = key(
        ["all-linear"],
        "Linear layers with an adapter, by Hugging Face name (q_proj, gate_proj, ...), or by a suffix of a longer name (experts.up_proj, shared_experts.up_proj, mlp.up_proj). `all-linear`: all linear layers of attention, MLP and experts.",
    )


@dataclass
class CriticOptimizerConfig(OptimizerConfig):
    """The critic's AdamW: the actor's settings, but a higher default rate, because the value head starts untrained."""

    lr: float = key(1e-5, "Peak learning rate.", at_least=0, at_most=1)


@dataclass
class ActorConfig:
    """The policy's update."""

    mini_batches: int = key(
        1,
        "Parts into which the groups of a step's batch are split, each with an optimizer step. A batch of fewer groups (`algorithm.dynamic_sampling`) is split into single groups.",
        at_least=1,
    )
    mini_batch_order: Literal["as_sampled", "balanced"] = key(
        "as_sampled",
        "Groups of a mini batch. as_sampled: in admission order. balanced: groups with similarly long samples together, so that ranks do not wait for one long sample; with `algorithm.aggregation: token_mean` this changes the weights of tokens. The critic's mini batches are always as_sampled.",
    )
    epochs: int = key(
        1,
        "Passes over the batch of a step, each with an optimizer step per mini batch. Advantages and old log-probs are computed once, before the first pass.",
        at_least=1,
    )
    max_tokens_per_micro_batch: int = key(
        16384,
        "Tokens per device in a forward pass. Sequences are packed up to this number; a longer sequence is a separate micro batch, and so is a longer group if `algorithm.loss` compares the samples of a group. With context parallel, CP devices share CP times as many tokens.",
        at_least=1,
    )
    optimizer: OptimizerConfig = key(OptimizerConfig, "")

    @property
    def optimizer_steps(self) -> int:
        """Return the optimizer steps of a controller step. A batch with fewer groups than `mini_batches` has fewer."""
        return self.mini_batches * self.epochs


@dataclass
class CriticConfig:
    """The critic of `algorithm.advantage: gae`: a separate model with a value head, in separate processes with a
    separate layout. Requires Ray."""

    model_path: Optional[str] = key(
        None,
        "Initial weights, a directory or a name on the hub: a model, or a critic that `megarl export --critic` wrote. Unset: `model.path`.",
    )
    trainers: int = key(
        1,
        "Critic processes, one per device. colocated: on the first of the actor's devices, time-shared with the actor. disaggregated: on separate devices.",
        at_least=1,
    )
    mini_batches: int = key(
        1, "Parts of a step's batch, each with an optimizer step, as `actor.mini_batches`.", at_least=1
    )
    epochs: int = key(1, "Passes over the batch of a step, as `actor.epochs`.", at_least=1)
    max_tokens_per_micro_batch: int = key(
        16384, "Tokens per device in a forward pass, as `actor.max_tokens_per_micro_batch`.", at_least=1
    )
    value_clip: Optional[float] = key(
        0.5,
        "PPO's value clip: the loss is the larger of two squared errors, of the value and of the value clipped to this distance from its value before the step. Unset: plain squared error.",
        above=0,
    )
    warmup_steps: int = key(0, "Controller steps at the start that train only the critic.", at_least=0)
    optimizer: CriticOptimizerConfig = key(CriticOptimizerConfig, "")
    megatron: MegatronConfig = key(MegatronConfig, "")

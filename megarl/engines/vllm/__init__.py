"""vLLM and vllm-ascend as rollout engines."""

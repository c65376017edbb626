"""`megarl convert-weights`: convert a Hugging Face model with FP8 weights to bfloat16."""

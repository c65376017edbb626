"""`megarl convert-weights`: a Hugging Face model with FP8 weights as one in bfloat16."""

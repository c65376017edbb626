"""`megarl convert-weights`: convert a Hugging Face model with FP8 or MXFP4 weights to bfloat16."""

"""Read facts from a Hugging Face model directory without loading the model."""

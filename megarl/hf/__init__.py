"""Facts in a Hugging Face model directory, read without loading the model."""

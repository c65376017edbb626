"""Model families (`families/`), names on the hub (`hub/`), and facts from a Hugging Face model folder without loading the model."""

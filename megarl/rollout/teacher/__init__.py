"""Log-probs of the teacher, for distillation: its processes, and the calls to them."""

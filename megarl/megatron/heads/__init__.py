"""Heads on the model's hidden states: log-probs and entropy of the policy, values of the critic."""

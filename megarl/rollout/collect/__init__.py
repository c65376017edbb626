"""Finished groups on their way from a rollout process to the controller, several with one call."""

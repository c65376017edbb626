"""Agent loops of the user: a class decides what is sampled and what is trained on. docs/agent_loops.md."""

"""Agent loops: the policy samples, tools answer, until it is done. docs/agents.md."""

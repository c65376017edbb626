"""Agent loops of the user: a class makes the requests to the engine and chooses the tokens of the loss. docs/agent_loops.md."""

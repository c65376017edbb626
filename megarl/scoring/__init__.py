"""How samples become scores: in this process, or in processes that may hang and crash."""

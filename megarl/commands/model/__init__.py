"""Commands about models: `megarl model check`."""

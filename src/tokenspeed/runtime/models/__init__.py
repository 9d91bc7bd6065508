"""Model architectures. `registry.build_model` makes the one that a configuration names."""

"""Pictures of what a model does, and of the formulas of the paper."""

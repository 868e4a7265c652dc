"""What a model is: configurations, families, weights and checkpoints, and the ways to run its layers."""

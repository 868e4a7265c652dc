"""Models in lm-eval, the harness that evaluations are compared with; its extra is `harness`."""

"""Denoising: schedules, noise, confidence, transfer rules and the step function."""

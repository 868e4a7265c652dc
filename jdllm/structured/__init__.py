"""Answers of a given form: what a request says of it, and which tokens may follow."""

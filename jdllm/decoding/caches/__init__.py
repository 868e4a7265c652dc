"""Cache policies, one a file: which rows a refresh may store, and when it is due."""

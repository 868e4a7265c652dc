"""A file for each family: its configuration and tensor names."""

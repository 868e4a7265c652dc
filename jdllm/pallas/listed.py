"""A number of operators that requests are checked against, which is read without loading JAX."""

LISTED = 20
"""How many of the likeliest ids of a row are listed, where they are."""

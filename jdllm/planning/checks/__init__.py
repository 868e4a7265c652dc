"""What only checks plans: an exact optimum, and the compiler."""

"""Transfer rules, one a file: which of the evaluated rows commit their token in a step."""

"""Averages of parameters over the steps, and the parameters to evaluate."""
